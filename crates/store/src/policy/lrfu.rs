//! Recency and frequency in one number.

use super::{Policy, ordered::Ordered};

/// Parts with the record whose uses weigh least, a use losing half its weight every `half_life` stamps (LRFU, Lee et
/// al. 2001). Short half-lives come close to LRU, long ones to LFU.
///
/// The weight at a time t is `sum of 2^((stamp - t) / half_life)`. Its logarithm falls alike for all, so
/// `log2(weight at the last use) + last use / half_life` orders records at any time, and changes with their uses
/// only. Records keep their weight while they are not in the cache.
#[derive(Debug)]
pub struct Lrfu {
    slots: Ordered,
    half_life: f64,
    /// Per slot, its record.
    records: Vec<u32>,
    /// Per record: the weight at its last use, and that use.
    uses: Vec<(f32, u64)>,
}

/// Steps of a key per halving: an order finer than that does not matter.
const RESOLUTION: f64 = (1u64 << 16) as f64;

impl Lrfu {
    /// Room for slots `0..slots`, none held, and for records `0..records`.
    pub fn new(slots: usize, records: usize, half_life: u32) -> Self {
        Self {
            slots: Ordered::new(slots),
            half_life: f64::from(half_life.max(1)),
            records: vec![0; slots],
            uses: vec![(0.0, 0); records],
        }
    }

    /// Counts a use, and gives the key.
    fn used(&mut self, record: u32, stamp: u64) -> u64 {
        let (weight, last) = &mut self.uses[record as usize];
        let halvings = stamp.saturating_sub(*last) as f64 / self.half_life;
        // What is asked for again at the same time, or as of earlier, is the same use.
        if stamp > *last || *weight == 0.0 {
            *weight = 1.0 + *weight * (-halvings).exp2() as f32;
            *last = stamp.max(*last);
        }
        // The weight is 1 at least, so this is not negative.
        ((f64::from(*weight).log2() + *last as f64 / self.half_life) * RESOLUTION) as u64
    }
}

impl Policy for Lrfu {
    fn insert(&mut self, slot: u32, record: u32, stamp: u64) {
        self.records[slot as usize] = record;
        let key = self.used(record, stamp);
        self.slots.insert(slot, key);
    }

    fn touch(&mut self, slot: u32, stamp: u64) {
        let key = self.used(self.records[slot as usize], stamp);
        self.slots.reinsert(slot, key);
    }

    fn outweighs(&mut self, record: u32, stamp: u64, margin: f32) -> bool {
        self.used(record, stamp);
        let Some(first) = self.slots.first() else { return true };
        let weight = |record: u32| {
            let (weight, last) = self.uses[record as usize];
            weight * (-(stamp.saturating_sub(last) as f64) / self.half_life).exp2() as f32
        };
        weight(record) > weight(self.records[first as usize]) + margin
    }

    fn evict(&mut self, take: &mut dyn FnMut(u32) -> bool) -> Option<u32> {
        self.slots.take_first(take)
    }

    fn remove(&mut self, slot: u32) {
        self.slots.remove(slot);
    }
}
