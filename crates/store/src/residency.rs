//! Which expert is where: the owner's view of the slots.
//!
//! It changes on the owner's thread alone. A record that a reader has just published is still
//! [`Place::Loading`] here until the owner has seen the result, so every load is accounted for exactly once.
//!
//! A slot is free (Empty, in `free`), occupied (coming or resident), or retired: beyond the limit, its pages given
//! back, its write permit parked in `retired` so that nothing can happen to it.

use crate::arena::{Arena, LentArena, LoadPermit};
use crate::lease::Lease;
use crate::policy::Policy;
use crate::{ExpertKey, Record};
use smoe_meter::StoreMeter;
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

/// What the owner knows of a slot that is not free.
#[derive(Clone, Copy, Debug, Default)]
struct Occupant {
    /// What is in it or coming.
    record: u32,
    /// The latest use of what is coming; the policy knows that of a resident.
    stamp: u64,
    /// Claimed ahead of demand, and not demanded since.
    unasked: bool,
}

pub(crate) struct Residency {
    arena: Arc<Arena>,
    meter: Arc<StoreMeter>,
    /// Per record.
    places: Vec<Place>,
    /// Per slot; stale for slots without an occupant.
    occupants: Vec<Occupant>,
    /// Empty slots, the next to use last.
    free: Vec<u32>,
    retired: Vec<LoadPermit>,
    /// Slots that shall be in use. More are while those beyond it are leased or loading.
    limit: usize,
    n_resident: usize,
    policy: Box<dyn Policy>,
}

impl Residency {
    pub(crate) fn new(
        arena: Arc<Arena>,
        records: usize,
        policy: Box<dyn Policy>,
        meter: Arc<StoreMeter>,
    ) -> Self {
        let slots = arena.n_slots();
        Self {
            arena,
            meter,
            places: vec![Place::Absent; records],
            occupants: vec![Occupant::default(); slots],
            free: (0..slots as u32).rev().collect(),
            retired: Vec::with_capacity(slots),
            limit: slots,
            n_resident: 0,
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
        self.n_resident
    }

    pub(crate) fn limit(&self) -> usize {
        self.limit
    }

    /// Slots that are not retired.
    pub(crate) fn n_slots(&self) -> usize {
        self.arena.n_slots() - self.retired.len()
    }

    /// A slot to load an absent `record` into: a free one, or the policy's first victim that nobody leases.
    /// None while every slot is leased or loading.
    pub(crate) fn claim(&mut self, record: u32, stamp: u64) -> Option<LoadPermit> {
        self.trim();
        let slot = self.free.pop().or_else(|| self.evict(|_| false))?;
        Some(self.occupy(slot, record, stamp, false))
    }

    /// As `claim`, for a record that nobody has demanded: at the cost of no record that is `spared`, or, without
    /// that, of none at all.
    pub(crate) fn claim_ahead(
        &mut self,
        record: u32,
        stamp: u64,
        spared: Option<impl Fn(u32) -> bool>,
    ) -> Option<LoadPermit> {
        self.trim();
        let slot = self.free.pop().or_else(|| self.evict(spared?))?;
        Some(self.occupy(slot, record, stamp, true))
    }

    /// As `claim`, but of the slot of a resident `victim`. None if somebody leases it.
    pub(crate) fn claim_from(&mut self, victim: u32, record: u32, stamp: u64) -> Option<LoadPermit> {
        let Place::Resident(slot) = self.place(victim) else {
            unreachable!("only a resident has a slot to take")
        };
        if !self.arena.slot(slot).evict() {
            return None;
        }
        self.policy.remove(slot);
        self.evicted(slot);
        Some(self.occupy(slot, record, stamp, false))
    }

    fn occupy(&mut self, slot: u32, record: u32, stamp: u64, unasked: bool) -> LoadPermit {
        debug_assert_eq!(self.place(record), Place::Absent);
        self.occupants[slot as usize] = Occupant { record, stamp, unasked };
        self.places[record as usize] = Place::Loading(slot);
        LoadPermit::claim(&self.arena, slot).expect("a free slot is Empty")
    }

    fn evict(&mut self, spared: impl Fn(u32) -> bool) -> Option<u32> {
        let Self { arena, occupants, policy, .. } = self;
        let slot =
            policy.evict(&mut |slot| !spared(occupants[slot as usize].record) && arena.slot(slot).evict())?;
        self.evicted(slot);
        Some(slot)
    }

    /// Keeps the books of a slot that is Empty now and has left the policy.
    fn evicted(&mut self, slot: u32) {
        let Occupant { record, unasked, .. } = self.occupants[slot as usize];
        self.places[record as usize] = Place::Absent;
        self.n_resident -= 1;
        self.meter.evictions.add(1);
        self.meter.ahead_waste.add(u64::from(unasked));
    }

    /// Empties every slot that nobody leases; their pages are kept.
    pub(crate) fn forget(&mut self) {
        while let Some(slot) = self.evict(|_| false) {
            self.free.push(slot);
        }
    }

    /// Notes a demand for `record`; says where it is, and whether it is there, or comes, only because it was read ahead.
    pub(crate) fn demanded(&mut self, record: u32, stamp: u64) -> (Place, bool) {
        let place = self.place(record);
        let unasked = match place {
            Place::Absent => false,
            Place::Loading(slot) => {
                let occupant = &mut self.occupants[slot as usize];
                occupant.stamp = occupant.stamp.max(stamp);
                let unasked = std::mem::take(&mut occupant.unasked);
                self.meter.ahead_late.add(u64::from(unasked));
                unasked
            }
            Place::Resident(slot) => {
                self.policy.touch(slot, stamp);
                std::mem::take(&mut self.occupants[slot as usize].unasked)
            }
        };
        (place, unasked)
    }

    /// `record` has been read.
    pub(crate) fn arrived(&mut self, record: u32) {
        let Place::Loading(slot) = self.place(record) else { unreachable!("only a load arrives") };
        self.places[record as usize] = Place::Resident(slot);
        self.policy.insert(slot, record, self.occupants[slot as usize].stamp);
        self.n_resident += 1;
    }

    /// `record` could not be read, or was cancelled; its permit is gone.
    pub(crate) fn failed(&mut self, record: u32) {
        let Place::Loading(slot) = self.place(record) else { unreachable!("only a load fails") };
        self.places[record as usize] = Place::Absent;
        self.free_up(slot);
    }

    /// A slot whose permit was dropped is free.
    fn free_up(&mut self, slot: u32) {
        let cleared = self.arena.slot(slot).clear();
        debug_assert!(cleared, "a permit that is dropped leaves its slot Failed");
        self.free.push(slot);
    }

    /// A lease on a resident record.
    pub(crate) fn lease(&self, record: u32, Record { key, slot_len, .. }: Record) -> Lease {
        let Place::Resident(slot) = self.place(record) else { unreachable!("only a resident is leased") };
        Lease::grant(&self.arena, slot, key, slot_len).expect("a resident's slot is Ready")
    }
}

/// The limit.
impl Residency {
    pub(crate) fn set_limit(&mut self, limit: usize) {
        self.limit = limit;
        while self.n_slots() < limit
            && let Some(mut permit) = self.retired.pop()
        {
            permit.reclaim();
            let slot = permit.slot();
            drop(permit);
            self.free_up(slot);
        }
        self.trim();
    }

    /// Lends the arena: slots that are retired may be used again without a change of their pages.
    pub(crate) fn lend(&mut self) -> LentArena {
        self.retired.iter_mut().for_each(LoadPermit::reclaim);
        LentArena::new(&self.arena)
    }

    /// Retires slots beyond the limit: free ones, then those that the policy would part with first. Those that
    /// are leased or loading stay for a later call.
    pub(crate) fn trim(&mut self) {
        while self.n_slots() > self.limit {
            let Some(slot) = self.free.pop().or_else(|| self.evict(|_| false)) else { return };
            let mut permit = LoadPermit::claim(&self.arena, slot).expect("a free slot is Empty");
            permit.discard();
            self.retired.push(permit);
        }
    }
}

/// For messages and tests: what is resident, in no order.
impl Residency {
    pub(crate) fn residents<'a>(&'a self, records: &'a [Record]) -> impl Iterator<Item = ExpertKey> + 'a {
        (0_u32..).zip(records).filter(|(index, _)| self.is_resident(*index)).map(|(_, record)| record.key)
    }
}
