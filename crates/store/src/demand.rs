//! A batch of experts that the owner needs now.
//!
//! All hits are leased before any slot is claimed, so a batch never evicts its own hits unawares; then misses
//! claim slots, as many as there are, in the order demanded, and their reads are all in flight before anything is
//! waited for. Further misses claim slots as leases come back.
//!
//! *Arrival* hands out the hits, then what arrives. *Given* hands out the longest prefix that is ready, so what is
//! ready further on holds slots that an earlier miss may need. Then that miss takes the slot of the farthest one,
//! which is read again when its turn comes; only what lies behind the miss is ever taken, so what is to be handed
//! out next always gets a slot, and any batch ends unless the consumer itself holds every lease. Taking costs a
//! read, so it is done only while the readers would otherwise run dry: else a slot will soon come back by itself.

use crate::arena::LoadPermit;
use crate::error::StoreError;
use crate::exchange::Lane;
use crate::lease::Lease;
use crate::residency::Place;
use crate::store::{Store, piece};
use crate::{Order, Want};
use std::collections::VecDeque;
use std::fmt;

/// What has become of an expert of the batch.
enum State {
    /// No slot yet.
    Wanted,
    /// In flight.
    Loading,
    /// To be handed out. `hit` if it was resident when demanded.
    Ready { result: Result<Lease, StoreError>, hit: bool },
    /// Handed out.
    Gone,
}

/// An expert of the batch.
struct Cell {
    record: u32,
    stamp: u64,
    state: State,
}

/// Where a record stands in a batch.
#[derive(Clone, Copy, Default)]
struct Mark {
    batch: u64,
    position: u32,
}

/// The running batch. Lives in the store, so that its memory is reused.
pub(crate) struct Batch {
    /// Number of the batch; a record whose mark has it belongs to it.
    id: u64,
    marks: Vec<Mark>,
    order: Order,
    /// In the order demanded.
    cells: Vec<Cell>,
    /// No cell before this one is Wanted, and how many are.
    next_wanted: usize,
    n_wanted: usize,
    /// Every cell before this one is Gone, and how many are not.
    head: usize,
    n_left: usize,
    /// *Arrival*: cells that are Ready, in the order to hand out.
    arrivals: VecDeque<u32>,
    /// Hits that have not been given up.
    hits: usize,
}

impl Batch {
    pub(crate) fn new(records: usize) -> Self {
        Self {
            id: 1,
            marks: vec![Mark::default(); records],
            order: Order::Arrival,
            cells: Vec::with_capacity(records),
            next_wanted: 0,
            n_wanted: 0,
            head: 0,
            n_left: 0,
            arrivals: VecDeque::with_capacity(records),
            hits: 0,
        }
    }

    /// Experts that have no slot yet.
    pub(crate) fn n_unclaimed(&self) -> usize {
        self.n_wanted
    }

    /// Experts that have not been handed out.
    pub(crate) fn remaining(&self) -> usize {
        self.n_left
    }

    /// Whether `record` belongs to this batch, handed out or not.
    pub(crate) fn names(&self, record: u32) -> bool {
        self.marks[record as usize].batch == self.id
    }

    pub(crate) fn position(&self, record: u32) -> u32 {
        self.marks[record as usize].position
    }

    /// Appends `record`; false if it was named before.
    fn name(&mut self, record: u32, stamp: u64) -> bool {
        let mark = Mark { batch: self.id, position: self.cells.len() as u32 };
        let before = std::mem::replace(&mut self.marks[record as usize], mark);
        self.cells.push(Cell { record, stamp, state: State::Gone });
        before.batch != self.id
    }

    /// Forgets everything, and returns how many hits there were. What is still in flight belongs to no batch
    /// from here on.
    pub(crate) fn clear(&mut self) -> usize {
        self.id += 1;
        self.cells.clear();
        self.arrivals.clear();
        (self.next_wanted, self.n_wanted, self.head, self.n_left) = (0, 0, 0, 0);
        std::mem::take(&mut self.hits)
    }

    fn set_wanted(&mut self, position: usize) {
        self.cells[position].state = State::Wanted;
        self.n_wanted += 1;
        self.next_wanted = self.next_wanted.min(position);
    }

    fn set_ready(&mut self, position: usize, result: Result<Lease, StoreError>, hit: bool) {
        self.cells[position].state = State::Ready { result, hit };
        if self.order == Order::Arrival {
            self.arrivals.push_back(position as u32);
        }
    }

    /// The first cell without a slot.
    fn first_wanted(&mut self) -> Option<usize> {
        if self.n_wanted == 0 {
            return None;
        }
        while !matches!(self.cells[self.next_wanted].state, State::Wanted) {
            self.next_wanted += 1;
        }
        Some(self.next_wanted)
    }

    fn set_loading(&mut self, position: usize) {
        self.cells[position].state = State::Loading;
        self.n_wanted -= 1;
    }

    /// Whether a result for `record`, which was in flight, is this batch's.
    pub(crate) fn waits_for(&self, record: u32) -> bool {
        let waiting = |cell: &Cell| matches!(cell.state, State::Loading);
        self.names(record) && self.cells.get(self.position(record) as usize).is_some_and(waiting)
    }

    /// A record that this batch waits for arrived.
    pub(crate) fn arrived(&mut self, record: u32, result: Result<Lease, StoreError>) {
        self.set_ready(self.position(record) as usize, result, false);
    }

    /// A record that this batch waits for did not arrive, but that was a read that nobody had demanded.
    pub(crate) fn try_again(&mut self, record: u32) {
        self.set_wanted(self.position(record) as usize);
    }

    /// The cell to hand out next, if it is ready.
    fn next_ready(&self) -> Option<usize> {
        match self.order {
            Order::Arrival => self.arrivals.front().map(|&position| position as usize),
            Order::Given => {
                let ready = |cell: &Cell| matches!(cell.state, State::Ready { .. });
                self.cells.get(self.head).is_some_and(ready).then_some(self.head)
            }
        }
    }

    /// Hands out the next cell if `wants` accepts it.
    fn pop_if(
        &mut self,
        wants: impl Fn(&Result<Lease, StoreError>) -> bool,
    ) -> Option<Result<Lease, StoreError>> {
        let position = self.next_ready()?;
        let state = &mut self.cells[position].state;
        if !matches!(state, State::Ready { result, .. } if wants(result)) {
            return None;
        }
        let State::Ready { result, .. } = std::mem::replace(state, State::Gone) else { return None };
        match self.order {
            Order::Arrival => drop(self.arrivals.pop_front()),
            Order::Given => self.head += 1,
        }
        self.n_left -= 1;
        Some(result)
    }
}

/// A batch that is being handed out. Iterate, or [`take_ready`](Demand::take_ready).
///
/// Every expert demanded comes out exactly once, as a lease or as its error, in the [`Order`] asked for.
/// [`StoreError::Stalled`] comes out in between, is about no expert, and may be followed by more.
///
/// Dropped early, reads that no reader has begun are cancelled, the others complete into the cache, and
/// nothing waits for them.
pub struct Demand<'s> {
    pub(crate) store: &'s mut Store,
}

impl Store {
    /// Demands `wants`: leases those that are resident, and sets reads of the others going.
    ///
    /// An expert that is still in flight, for an earlier batch that was dropped or because it was expected, counts
    /// as a miss and is not read twice. What was expected and is not wanted is forgotten.
    ///
    /// # Errors
    /// [`StoreError::UnknownExpert`] or [`StoreError::Duplicate`], before anything is leased, read or counted.
    pub fn demand(&mut self, wants: &[Want], order: Order) -> Result<Demand<'_>, StoreError> {
        self.abandon_batch(); // that of a demand which was forgotten, not dropped
        self.collect();
        self.name_batch(wants).inspect_err(|_| {
            self.batch.clear();
        })?;
        self.end_expected();
        self.batch.order = order;
        self.batch.n_left = wants.len();
        let mut ahead = 0;
        for position in 0..wants.len() {
            let Cell { record, stamp, .. } = self.batch.cells[position];
            let (place, unasked) = self.residency.demanded(record, stamp);
            match place {
                Place::Resident(_) => {
                    ahead += usize::from(unasked);
                    let lease = self.residency.lease(record, self.record(record));
                    self.batch.set_ready(position, Ok(lease), true);
                    self.batch.hits += 1;
                }
                Place::Loading(_) => self.batch.cells[position].state = State::Loading,
                Place::Absent => self.batch.set_wanted(position),
            }
        }
        self.meter.count_demand(wants.len() - self.batch.hits, ahead);
        self.read_ahead();
        Ok(Demand { store: self })
    }

    fn name_batch(&mut self, wants: &[Want]) -> Result<(), StoreError> {
        for &Want { key, stamp } in wants {
            let record = self.find(key)?;
            if !self.batch.name(record, stamp) {
                return Err(StoreError::Duplicate(key));
            }
        }
        Ok(())
    }

    /// Claims slots for as many misses as there are slots, and sends their reads off together, with those that
    /// stand in the outbox already.
    pub(crate) fn read_ahead(&mut self) {
        let adopted = !self.outbox.is_empty();
        while let Some(position) = self.batch.first_wanted() {
            let Some(permit) = self.claim(position) else { break };
            self.outbox.push(piece(self.batch.cells[position].record, permit));
            self.batch.set_loading(position);
        }
        if adopted {
            let batch = &self.batch;
            self.outbox.sort_unstable_by_key(|piece| batch.position(piece.work.record));
        }
        self.submit(Lane::Demand);
    }

    /// A slot for the miss at `position`.
    fn claim(&mut self, position: usize) -> Option<LoadPermit> {
        let Cell { record, stamp, .. } = self.batch.cells[position];
        let permit = self.residency.claim(record, stamp);
        let dry = self.in_flight + self.outbox.len() < self.enough_work();
        if permit.is_none() && dry && self.batch.order == Order::Given {
            return self.take_from_behind(position);
        }
        permit
    }

    /// The slot of the farthest expert behind `position` that is ready and that nobody else leases.
    fn take_from_behind(&mut self, position: usize) -> Option<LoadPermit> {
        let Cell { record, stamp, .. } = self.batch.cells[position];
        for behind in (position + 1..self.batch.cells.len()).rev() {
            let cell = &mut self.batch.cells[behind];
            let State::Ready { result: Ok(_), hit } = cell.state else { continue };
            let victim = cell.record;
            cell.state = State::Gone; // gives its lease back
            if let Some(permit) = self.residency.claim_from(victim, record, stamp) {
                self.batch.set_wanted(behind);
                self.batch.hits -= usize::from(hit);
                self.meter.demand_misses.add(u64::from(hit));
                return Some(permit);
            }
            let lease = self.residency.lease(victim, self.record(victim));
            self.batch.set_ready(behind, Ok(lease), hit);
        }
        None
    }

    /// Makes the next expert ready, waiting if need be. False if the batch is complete.
    fn ready_or_wait(&mut self) -> Result<bool, StoreError> {
        loop {
            self.poll();
            if self.batch.next_ready().is_some() {
                return Ok(true);
            }
            if self.batch.remaining() == 0 {
                return Ok(false);
            }
            if self.in_flight == 0 {
                return Err(StoreError::Stalled {
                    slots: self.residency.n_slots(),
                    leased: self.arena().leased(),
                    wanted: self.batch.n_unclaimed(),
                });
            }
            // Ours, or what nobody waits for: then its slot is free for ours once it has arrived.
            self.wait();
        }
    }
}

impl Demand<'_> {
    /// Experts that have not been handed out.
    pub fn remaining(&self) -> usize {
        self.store.batch.remaining()
    }

    /// As [`Store::in_flight`].
    pub fn in_flight(&self) -> usize {
        self.store.in_flight()
    }

    /// Appends the leases that are ready now, at most `max` and at least one, for which it waits, and returns how
    /// many: 0 only when the batch is complete.
    ///
    /// # Errors
    /// As the iterator's items. Leases that precede an error in the order of the batch come first, so an error
    /// appends nothing; after it the batch goes on.
    ///
    /// # Panics
    /// If `max` is 0.
    pub fn take_ready(&mut self, max: usize, out: &mut Vec<Lease>) -> Result<usize, StoreError> {
        assert!(max > 0, "asked for no experts");
        if !self.store.ready_or_wait()? {
            return Ok(0);
        }
        let batch = &mut self.store.batch;
        if let Some(Err(error)) = batch.pop_if(Result::is_err) {
            return Err(error);
        }
        let before = out.len();
        while out.len() - before < max
            && let Some(Ok(lease)) = batch.pop_if(Result::is_ok)
        {
            out.push(lease);
        }
        Ok(out.len() - before)
    }
}

impl Iterator for Demand<'_> {
    type Item = Result<Lease, StoreError>;

    /// The next expert, waiting if it is not ready; none when all have been handed out.
    fn next(&mut self) -> Option<Self::Item> {
        match self.store.ready_or_wait() {
            Ok(true) => self.store.batch.pop_if(|_| true),
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
