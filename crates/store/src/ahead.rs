//! Reads that nobody waits for yet: what will probably be demanded next, and what fills slots that are free.
//!
//! A list, in order of hope, that is worked off behind demand: nothing of it is submitted before every miss of the
//! running batch has been, readers take it last and few at a time, and it costs no slot of the running batch or of
//! the list itself. The next demand takes over what it wants of it and forgets the rest, so a wrong guess costs
//! idle disk time and the slots of what was least likely to be used.

use crate::exchange::Lane;
use crate::residency::Place;
use crate::store::{Store, piece};
use crate::{Demand, ExpertKey, Want};

/// The list. Lives in the store, so that its memory is reused.
pub(crate) struct Ahead {
    /// Number of the list; a record whose mark is this is on it.
    id: u64,
    marks: Vec<u64>,
    /// Records and the stamps of their probable use; those before `next` have been seen to.
    list: Vec<(u32, u64)>,
    next: usize,
    /// Whether residents that are on no list may have to go.
    may_evict: bool,
}

impl Ahead {
    pub(crate) fn new(records: usize) -> Self {
        Self { id: 1, marks: vec![0; records], list: Vec::with_capacity(records), next: 0, may_evict: false }
    }

    fn clear(&mut self) {
        self.id += 1;
        self.list.clear();
        self.next = 0;
    }

    fn push(&mut self, record: u32, stamp: u64) {
        if std::mem::replace(&mut self.marks[record as usize], self.id) != self.id {
            self.list.push((record, stamp));
        }
    }

    fn names(&self, record: u32) -> bool {
        self.marks[record as usize] == self.id
    }
}

impl Store {
    /// Says what will probably be demanded next, the likeliest first. It is read at low priority, as far as slots
    /// can be had without evicting what the running batch or this list names.
    ///
    /// A hint: names that are unknown or come again are passed over, a failed read is only counted, and the next
    /// demand ends it. What the last call named and no reader has begun is forgotten. While a batch runs, this is
    /// [`Demand::expect`].
    pub fn expect(&mut self, wants: &[Want]) {
        self.plan_ahead(wants.iter().copied(), true);
    }

    /// As [`expect`](Store::expect), but into free slots only, as the least recently used of all: fills a cache
    /// while nothing else is to be done. Experts that are resident already are passed over.
    pub fn prewarm(&mut self, keys: &[ExpertKey]) {
        self.plan_ahead(keys.iter().map(|&key| Want::from(key)), false);
    }

    /// Takes in what has arrived and keeps the readers busy, without waiting. For the owner to call now and then
    /// while it has other things to do.
    pub fn poll(&mut self) {
        self.collect();
        self.read_ahead();
        self.read_expected();
    }

    fn plan_ahead(&mut self, wants: impl Iterator<Item = Want>, may_evict: bool) {
        self.withdraw();
        self.ahead.may_evict = may_evict;
        for want in wants {
            if let Ok(record) = self.find(want.key) {
                self.ahead.push(record, want.stamp);
            }
        }
        self.poll();
    }

    /// Ends the list. What no reader has begun is given up, except what the batch that now begins wants: those
    /// loads stay in the outbox.
    pub(crate) fn end_expected(&mut self) {
        self.ahead.clear();
        self.take_back(Lane::Low);
        let Self { outbox, batch, residency, .. } = self;
        for piece in outbox.extract_if(.., |piece| !batch.names(piece.work.record)) {
            piece.work.give_up(residency);
        }
    }

    /// Ends the list, and gives up what no reader has begun.
    pub(crate) fn withdraw(&mut self) {
        self.ahead.clear();
        self.take_back(Lane::Low);
        self.outbox.drain(..).for_each(|piece| piece.work.give_up(&mut self.residency));
    }

    /// Submits what can be submitted of the list.
    pub(crate) fn read_expected(&mut self) {
        if self.batch.n_unclaimed() > 0 {
            return;
        }
        let Self { ahead, batch, residency, outbox, .. } = self;
        while let Some(&(record, stamp)) = ahead.list.get(ahead.next) {
            if residency.place(record) == Place::Absent {
                let spared = |resident| ahead.names(resident) || batch.names(resident);
                let spared = ahead.may_evict.then_some(spared);
                let Some(permit) = residency.claim_ahead(record, stamp, spared) else { break };
                outbox.push(piece(record, permit));
            }
            ahead.next += 1;
        }
        self.submit(Lane::Low);
    }
}

impl Demand<'_> {
    /// Whether an expert, if there is one of this name, is neither in a slot nor on its way to one.
    pub fn is_absent(&self, key: ExpertKey) -> bool {
        let place = |record| self.store.residency.place(record);
        self.store.find(key).is_ok_and(|record| place(record) == Place::Absent)
    }

    /// As [`Store::expect`], while this batch runs: what will be demanded after it.
    pub fn expect(&mut self, wants: &[Want]) {
        self.store.expect(wants);
    }

    /// As [`Store::poll`].
    pub fn poll(&mut self) {
        self.store.poll();
    }
}
