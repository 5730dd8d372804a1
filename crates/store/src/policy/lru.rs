//! Least recently used, by stamp.

use super::{Policy, ordered::Ordered};

/// Parts with the slot whose last use has the lowest stamp; of equal stamps, with the one that was inserted or
/// touched first.
///
/// A prefill demands an expert once for all the tokens of a chunk, layer after layer; stamps are what make it
/// leave the cache as if its tokens had come one by one.
#[derive(Debug)]
pub struct Lru {
    slots: Ordered,
}

impl Lru {
    /// Room for slots `0..slots`, none held.
    pub fn new(slots: usize) -> Self {
        Self { slots: Ordered::new(slots) }
    }
}

impl Policy for Lru {
    fn insert(&mut self, slot: u32, _record: u32, stamp: u64) {
        self.slots.insert(slot, stamp);
    }

    fn touch(&mut self, slot: u32, stamp: u64) {
        // The last use is the latest one known.
        self.slots.reinsert(slot, stamp.max(self.slots.key(slot)));
    }

    fn evict(&mut self, take: &mut dyn FnMut(u32) -> bool) -> Option<u32> {
        self.slots.take_first(take)
    }

    fn remove(&mut self, slot: u32) {
        self.slots.remove(slot);
    }
}
