//! Policies that are there to be scored against [`super::Lru`] on recorded routes ([`crate::replay`]).

use super::{Policy, ordered::Ordered, queues::Queues};

/// First in, first out: uses do not matter.
#[derive(Debug)]
pub struct Fifo {
    queues: Queues,
}

impl Fifo {
    /// Room for slots `0..slots`, none held.
    pub fn new(slots: usize) -> Self {
        Self { queues: Queues::new(slots, 1) }
    }
}

impl Policy for Fifo {
    fn insert(&mut self, slot: u32, _record: u32, _stamp: u64) {
        self.queues.push(0, slot);
    }

    fn touch(&mut self, _slot: u32, _stamp: u64) {}

    fn evict(&mut self, take: &mut dyn FnMut(u32) -> bool) -> Option<u32> {
        self.queues.take_first(0, take)
    }

    fn remove(&mut self, slot: u32) {
        self.queues.remove(0, slot);
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Seen {
    Absent,
    Present,
    Touched,
}

/// A hand goes round the slots and parts with the first that was not touched since it last came by.
#[derive(Debug)]
pub struct Clock {
    slots: Vec<Seen>,
    hand: usize,
}

impl Clock {
    /// Room for slots `0..slots`, none held.
    pub fn new(slots: usize) -> Self {
        Self { slots: vec![Seen::Absent; slots], hand: 0 }
    }
}

impl Policy for Clock {
    fn insert(&mut self, slot: u32, _record: u32, _stamp: u64) {
        self.slots[slot as usize] = Seen::Present;
    }

    fn touch(&mut self, slot: u32, _stamp: u64) {
        self.slots[slot as usize] = Seen::Touched;
    }

    fn evict(&mut self, take: &mut dyn FnMut(u32) -> bool) -> Option<u32> {
        // Once round to forget the touches, once more to find one that can be taken.
        for _ in 0..2 * self.slots.len() {
            let slot = self.hand;
            self.hand = (self.hand + 1) % self.slots.len();
            match self.slots[slot] {
                Seen::Absent => {}
                Seen::Touched => self.slots[slot] = Seen::Present,
                Seen::Present if take(slot as u32) => {
                    self.slots[slot] = Seen::Absent;
                    return Some(slot as u32);
                }
                Seen::Present => {}
            }
        }
        None
    }

    fn remove(&mut self, slot: u32) {
        self.slots[slot as usize] = Seen::Absent;
    }
}

/// Least frequently used, where a use counts half as much after `half_life` stamps.
///
/// A record's uses are remembered while it is not held. Uses are summed in logarithms, `2^(stamp / half_life)`
/// each, so that nothing has to be halved and nothing overflows.
#[derive(Debug)]
pub struct LfuDecay {
    slots: Ordered,
    /// Per record: log2 of the sum of its uses.
    uses: Vec<f64>,
    /// Per slot, what it holds.
    records: Vec<u32>,
    half_life: f64,
}

impl LfuDecay {
    /// Room for slots `0..slots`, none held, and records `0..records`.
    pub fn new(slots: usize, records: usize, half_life: u32) -> Self {
        Self {
            slots: Ordered::new(slots),
            uses: vec![f64::NEG_INFINITY; records],
            records: vec![0; slots],
            half_life: f64::from(half_life.max(1)),
        }
    }

    /// Counts a use; the key of the sum.
    fn count(&mut self, record: u32, stamp: u64) -> u64 {
        let uses = &mut self.uses[record as usize];
        let (before, now) = (*uses, stamp as f64 / self.half_life);
        let (large, small) = (before.max(now), before.min(now));
        *uses = large + (small - large).exp2().ln_1p() / std::f64::consts::LN_2;
        // Not negative, so its bits are in the order of its value.
        uses.to_bits()
    }
}

impl Policy for LfuDecay {
    fn insert(&mut self, slot: u32, record: u32, stamp: u64) {
        self.records[slot as usize] = record;
        let key = self.count(record, stamp);
        self.slots.insert(slot, key);
    }

    fn touch(&mut self, slot: u32, stamp: u64) {
        let key = self.count(self.records[slot as usize], stamp);
        self.slots.reinsert(slot, key);
    }

    fn evict(&mut self, take: &mut dyn FnMut(u32) -> bool) -> Option<u32> {
        self.slots.take_first(take)
    }

    fn remove(&mut self, slot: u32) {
        self.slots.remove(slot);
    }
}

const PROBATION: usize = 0;
const PROTECTED: usize = 1;

/// Segmented LRU: what was used once goes before what was used again. The protected part is at most 4/5.
#[derive(Debug)]
pub struct Slru {
    queues: Queues,
    is_protected: Vec<bool>,
    protected_most: usize,
}

impl Slru {
    /// Room for slots `0..slots`, none held.
    pub fn new(slots: usize) -> Self {
        let protected_most = (slots * 4 / 5).max(1);
        Self { queues: Queues::new(slots, 2), is_protected: vec![false; slots], protected_most }
    }

    fn segment(&self, slot: u32) -> usize {
        if self.is_protected[slot as usize] { PROTECTED } else { PROBATION }
    }
}

impl Policy for Slru {
    fn insert(&mut self, slot: u32, _record: u32, _stamp: u64) {
        self.is_protected[slot as usize] = false;
        self.queues.push(PROBATION, slot);
    }

    fn touch(&mut self, slot: u32, _stamp: u64) {
        self.queues.remove(self.segment(slot), slot);
        self.is_protected[slot as usize] = true;
        self.queues.push(PROTECTED, slot);
        if self.queues.len(PROTECTED) > self.protected_most
            && let Some(oldest) = self.queues.oldest(PROTECTED)
        {
            self.queues.remove(PROTECTED, oldest);
            self.is_protected[oldest as usize] = false;
            self.queues.push(PROBATION, oldest);
        }
    }

    fn evict(&mut self, take: &mut dyn FnMut(u32) -> bool) -> Option<u32> {
        self.queues.take_first(PROBATION, take).or_else(|| self.queues.take_first(PROTECTED, take))
    }

    fn remove(&mut self, slot: u32) {
        self.queues.remove(self.segment(slot), slot);
    }
}

const SMALL: usize = 0;
const MAIN: usize = 1;
const MOST_USES: u8 = 3;

/// S3-FIFO (Yang et al., SOSP 2023): a small queue of a tenth that weeds out what is used once, a main queue
/// that gives used ones another turn, and a memory of what the small one parted with.
#[derive(Debug)]
pub struct S3Fifo {
    queues: Queues,
    /// Per slot: what it holds, its queue, and its uses since it came there.
    records: Vec<u32>,
    queue: Vec<usize>,
    uses: Vec<u8>,
    small_most: usize,
    /// Per record: when the small queue parted with it, counted in such partings from 1; 0 if it did not.
    parted: Vec<u64>,
    partings: u64,
}

impl S3Fifo {
    /// Room for slots `0..slots`, none held, and records `0..records`.
    pub fn new(slots: usize, records: usize) -> Self {
        Self {
            queues: Queues::new(slots, 2),
            records: vec![0; slots],
            queue: vec![SMALL; slots],
            uses: vec![0; slots],
            small_most: (slots / 10).max(1),
            parted: vec![0; records],
            partings: 0,
        }
    }

    /// Remembered: as many as there are slots.
    fn is_remembered(&self, record: u32) -> bool {
        let parted = self.parted[record as usize];
        parted > 0 && self.partings - parted < self.records.len() as u64
    }

    fn move_to(&mut self, queue: usize, slot: u32) {
        self.queues.remove(self.queue[slot as usize], slot);
        self.queue[slot as usize] = queue;
        self.queues.push(queue, slot);
    }
}

impl Policy for S3Fifo {
    fn insert(&mut self, slot: u32, record: u32, _stamp: u64) {
        let queue = if self.is_remembered(record) { MAIN } else { SMALL };
        self.parted[record as usize] = 0;
        self.records[slot as usize] = record;
        self.queue[slot as usize] = queue;
        self.uses[slot as usize] = 0;
        self.queues.push(queue, slot);
    }

    fn touch(&mut self, slot: u32, _stamp: u64) {
        let uses = &mut self.uses[slot as usize];
        *uses = (*uses + 1).min(MOST_USES);
    }

    fn evict(&mut self, take: &mut dyn FnMut(u32) -> bool) -> Option<u32> {
        // Enough turns for every slot to move on, lose its uses and be offered.
        for _ in 0..(usize::from(MOST_USES) + 2) * self.records.len() {
            let small_is_full = self.queues.len(SMALL) >= self.small_most || self.queues.len(MAIN) == 0;
            let slot = self.queues.oldest(if small_is_full { SMALL } else { MAIN })?;
            let uses = self.uses[slot as usize];
            if small_is_full && uses > 1 {
                self.uses[slot as usize] = 0;
                self.move_to(MAIN, slot);
            } else if !small_is_full && uses > 0 {
                self.uses[slot as usize] -= 1;
                self.move_to(MAIN, slot);
            } else if take(slot) {
                if small_is_full {
                    self.partings += 1;
                    self.parted[self.records[slot as usize] as usize] = self.partings;
                }
                self.remove(slot);
                return Some(slot);
            } else {
                // In use, so it is not the one to weed out.
                self.move_to(MAIN, slot);
            }
        }
        // All of the main queue are in use; what is left is a small queue that is not full.
        self.queues.take_first(SMALL, take)
    }

    fn remove(&mut self, slot: u32) {
        self.queues.remove(self.queue[slot as usize], slot);
    }
}
