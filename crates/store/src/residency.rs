//! Which expert is where: the owner's view of the slots.
//!
//! It changes on the owner's thread alone. A record that a reader has just published is still
//! [`Place::Loading`] here until the owner has seen the result, so every load is accounted for exactly once.

use crate::arena::{Arena, LoadPermit};
use crate::lease::Lease;
use crate::policy::Policy;
use crate::{ExpertKey, Record};
use std::sync::Arc;

/// Where a record is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// On disk only.
    Absent,
    /// Being read into this slot, or queued to be.
    Loading(u32),
    /// In this slot.
    Resident(u32),
}

/// A slot won for a record.
pub(crate) struct Claim {
    pub(crate) permit: LoadPermit,
    pub(crate) evicted: bool,
}

pub(crate) struct Residency {
    arena: Arc<Arena>,
    /// Per record.
    places: Vec<Place>,
    /// Per slot, the record that is in it or coming; stale for free slots.
    occupants: Vec<u32>,
    /// Empty slots, the next to use last.
    free: Vec<u32>,
    policy: Box<dyn Policy>,
}

impl Residency {
    pub(crate) fn new(arena: Arc<Arena>, records: usize, policy: Box<dyn Policy>) -> Self {
        let slots = arena.n_slots();
        Self {
            arena,
            places: vec![Place::Absent; records],
            occupants: vec![0; slots],
            free: (0..slots as u32).rev().collect(),
            policy,
        }
    }

    pub(crate) fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    pub(crate) fn place(&self, record: u32) -> Place {
        self.places[record as usize]
    }

    pub(crate) fn is_resident(&self, record: u32) -> bool {
        matches!(self.place(record), Place::Resident(_))
    }

    pub(crate) fn n_resident(&self) -> usize {
        self.places.iter().filter(|place| matches!(place, Place::Resident(_))).count()
    }

    /// A slot to load an absent `record` into: a free one, or the policy's first victim that nobody leases.
    /// None while every slot is leased or loading.
    pub(crate) fn claim(&mut self, record: u32) -> Option<Claim> {
        debug_assert_eq!(self.place(record), Place::Absent);
        let (slot, evicted) = match self.free.pop() {
            Some(slot) => (slot, false),
            None => (self.evict()?, true),
        };
        let permit = LoadPermit::claim(&self.arena, slot).expect("a free slot is Empty");
        self.occupants[slot as usize] = record;
        self.places[record as usize] = Place::Loading(slot);
        Some(Claim { permit, evicted })
    }

    fn evict(&mut self) -> Option<u32> {
        let arena = &self.arena;
        let slot = self.policy.evict(&mut |slot| arena.slot(slot).evict())?;
        self.places[self.occupants[slot as usize] as usize] = Place::Absent;
        Some(slot)
    }

    /// `record` has been read.
    pub(crate) fn arrived(&mut self, record: u32) {
        let Place::Loading(slot) = self.place(record) else { unreachable!("only a load arrives") };
        self.places[record as usize] = Place::Resident(slot);
        self.policy.insert(slot, record);
    }

    /// `record` could not be read, or was cancelled; its permit is gone.
    pub(crate) fn failed(&mut self, record: u32) {
        let Place::Loading(slot) = self.place(record) else { unreachable!("only a load fails") };
        let cleared = self.arena.slot(slot).clear();
        debug_assert!(cleared, "a failed load leaves its slot Failed");
        self.places[record as usize] = Place::Absent;
        self.free.push(slot);
    }

    /// Notes that a resident `record` was demanded again.
    pub(crate) fn touch(&mut self, record: u32) {
        if let Place::Resident(slot) = self.place(record) {
            self.policy.touch(slot);
        }
    }

    /// A lease on a resident record.
    pub(crate) fn lease(&self, record: u32, Record { key, slot_len, .. }: Record) -> Lease {
        let Place::Resident(slot) = self.place(record) else { unreachable!("only a resident is leased") };
        Lease::grant(&self.arena, slot, key, slot_len).expect("a resident's slot is Ready")
    }
}

/// For messages and tests: what is resident, in no order.
impl Residency {
    pub(crate) fn residents<'a>(&'a self, records: &'a [Record]) -> impl Iterator<Item = ExpertKey> + 'a {
        (0_u32..).zip(records).filter(|(index, _)| self.is_resident(*index)).map(|(_, record)| record.key)
    }
}
