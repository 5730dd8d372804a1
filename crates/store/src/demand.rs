//! A batch of experts that the owner needs now.
//!
//! Order: all hits are leased before any slot is claimed, so a batch never evicts its own hits; then misses
//! claim slots, as many as there are, and their reads are all in flight before anything is waited for. Further
//! misses claim slots as leases come back.

use crate::ExpertKey;
use crate::error::StoreError;
use crate::lease::Lease;
use crate::reader::Work;
use crate::residency::Place;
use crate::store::Store;
use std::collections::VecDeque;
use std::fmt;

/// The running batch. Lives in the store, so that its memory is reused.
pub(crate) struct Batch {
    /// Number of the batch; a record whose stamp is this belongs to it.
    id: u64,
    stamps: Vec<u64>,
    /// Misses, in the order demanded; from `next_wanted` on they have no slot yet.
    wanted: Vec<u32>,
    next_wanted: usize,
    /// Misses of this batch that are in flight.
    pending: usize,
    /// To be handed out: hits first, then what arrived.
    ready: VecDeque<Result<Lease, StoreError>>,
}

impl Batch {
    pub(crate) fn new(slots: usize, records: usize) -> Self {
        Self {
            id: 0,
            stamps: vec![0; records],
            wanted: Vec::with_capacity(records),
            next_wanted: 0,
            pending: 0,
            ready: VecDeque::with_capacity(slots),
        }
    }

    fn n_unclaimed(&self) -> usize {
        self.wanted.len() - self.next_wanted
    }

    pub(crate) fn remaining(&self) -> usize {
        self.ready.len() + self.pending + self.n_unclaimed()
    }

    /// Names `record`; false if it was named before.
    fn name(&mut self, record: u32) -> bool {
        std::mem::replace(&mut self.stamps[record as usize], self.id) != self.id
    }

    /// Forgets everything. What is still in flight belongs to no batch from here on.
    pub(crate) fn clear(&mut self) {
        self.wanted.clear();
        self.next_wanted = 0;
        self.pending = 0;
        self.ready.clear();
        self.id += 1;
    }

    /// Whether a result for `record`, which was in flight, is this batch's.
    pub(crate) fn waits_for(&self, record: u32) -> bool {
        self.stamps[record as usize] == self.id
    }

    /// A record that this batch waits for arrived.
    pub(crate) fn arrived(&mut self, result: Result<Lease, StoreError>) {
        self.pending -= 1;
        self.ready.push_back(result);
    }
}

/// A batch that is being handed out. Iterate, or [`take_ready`](Demand::take_ready).
///
/// Every expert demanded comes out exactly once, as a lease or as its error; hits first, then misses as they
/// arrive. [`StoreError::Stalled`] comes out in between, is about no expert, and may be followed by more.
///
/// Dropped early, reads that no reader has begun are cancelled, the others complete into the cache, and
/// nothing waits for them.
pub struct Demand<'s> {
    store: &'s mut Store,
}

impl Store {
    /// Demands `keys`: leases those that are resident, and sets reads of the others going.
    ///
    /// An expert that is still in flight for an earlier batch that was dropped counts as a miss and is not
    /// read twice.
    ///
    /// # Errors
    /// [`StoreError::UnknownExpert`] or [`StoreError::Duplicate`], before anything is leased, read or counted.
    pub fn demand(&mut self, keys: &[ExpertKey]) -> Result<Demand<'_>, StoreError> {
        self.abandon_batch(); // that of a demand which was forgotten, not dropped
        self.collect();
        for &key in keys {
            let record = self.find(key)?;
            if !self.batch.name(record) {
                return Err(StoreError::Duplicate(key));
            }
        }
        for &key in keys {
            let record = self.find(key)?;
            match self.residency.place(record) {
                Place::Resident(_) => {
                    self.residency.touch(record);
                    let lease = self.residency.lease(record, self.record(record));
                    self.batch.ready.push_back(Ok(lease));
                }
                Place::Loading(_) => self.batch.pending += 1,
                Place::Absent => self.batch.wanted.push(record),
            }
        }
        let hits = self.batch.ready.len();
        self.meter.demand_hits.add(hits as u64);
        self.meter.demand_misses.add((keys.len() - hits) as u64);
        self.read_ahead();
        Ok(Demand { store: self })
    }

    /// Claims slots for as many misses as there are slots, and sends their reads off together.
    fn read_ahead(&mut self) {
        let mut loads = 0;
        while let Some(&record) = self.batch.wanted.get(self.batch.next_wanted) {
            let Some(load) = self.claim(record) else { break };
            self.outbox.push(Work::Record(load));
            self.batch.next_wanted += 1;
            self.batch.pending += 1;
            loads += 1;
        }
        if loads > 0 {
            self.submit(loads);
        }
    }

    /// Makes `batch.ready` non-empty, waiting if need be. False if the batch is complete.
    fn ready_or_wait(&mut self) -> Result<bool, StoreError> {
        loop {
            self.collect();
            self.read_ahead();
            if !self.batch.ready.is_empty() {
                return Ok(true);
            }
            if self.batch.remaining() == 0 {
                return Ok(false);
            }
            if self.in_flight == 0 {
                return Err(StoreError::Stalled {
                    slots: self.arena().n_slots(),
                    leased: self.arena().leased(),
                    wanted: self.batch.n_unclaimed(),
                });
            }
            // Ours, or of a dropped batch: then its slot is free for ours once it has arrived.
            self.wait();
        }
    }
}

impl Demand<'_> {
    /// Experts that have not been handed out.
    pub fn remaining(&self) -> usize {
        self.store.batch.remaining()
    }

    /// Appends all leases that are ready now, waiting for at least one, and returns how many: 0 only when the
    /// batch is complete.
    ///
    /// # Errors
    /// As the iterator's items. Leases that precede an error in the order of arrival come first, so an error
    /// appends nothing; after it the batch goes on.
    pub fn take_ready(&mut self, out: &mut Vec<Lease>) -> Result<usize, StoreError> {
        let before = out.len();
        if !self.store.ready_or_wait()? {
            return Ok(0);
        }
        let ready = &mut self.store.batch.ready;
        while let Some(result) = ready.pop_front() {
            match result {
                Ok(lease) => out.push(lease),
                Err(error) if out.len() == before => return Err(error),
                Err(error) => {
                    ready.push_front(Err(error));
                    break;
                }
            }
        }
        Ok(out.len() - before)
    }
}

impl Iterator for Demand<'_> {
    type Item = Result<Lease, StoreError>;

    /// The next expert, waiting if none is ready; none when all have been handed out.
    fn next(&mut self) -> Option<Self::Item> {
        match self.store.ready_or_wait() {
            Ok(true) => self.store.batch.ready.pop_front(),
            Ok(false) => None,
            Err(stalled) => Some(Err(stalled)),
        }
    }
}

impl Drop for Demand<'_> {
    fn drop(&mut self) {
        self.store.abandon_batch();
    }
}

impl fmt::Debug for Demand<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Demand").field("remaining", &self.remaining()).finish_non_exhaustive()
    }
}
