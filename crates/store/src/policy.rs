//! Whom to evict. Pure: it sees slots and records as numbers, and accesses in order.
//!
//! LRU is the default because nothing measured on this workload beats it by much (others' traces: CLOCK,
//! S3-FIFO and LRU within a point; LFU variants +2 to +3 points at some sizes and -3 to -4 at others, where
//! the best possible is +10 to +25: EXP-STORE-03). [`Policy`] is the place to try another.

/// An eviction policy over the slots that hold an expert.
///
/// Slots being loaded are not in it; leased ones are, and are passed over when a victim is sought.
pub trait Policy: Send {
    /// `slot`, which was not in the policy, now holds `record`.
    fn insert(&mut self, slot: u32, record: u32);

    /// `slot` was demanded again.
    fn touch(&mut self, slot: u32);

    /// Offers slots to `take`, the one to part with first, until it takes one; that one leaves the policy.
    fn evict(&mut self, take: &mut dyn FnMut(u32) -> bool) -> Option<u32>;
}

const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct Link {
    older: u32,
    newer: u32,
}

/// Least recently used: a doubly linked list threaded through a `Vec`, one link a slot.
///
/// `insert` and `touch` are O(1); `evict` passes over leased slots, which are few and mostly recent.
#[derive(Debug)]
pub struct Lru {
    links: Vec<Link>,
    oldest: u32,
    newest: u32,
}

impl Lru {
    /// An empty list with room for slots `0..slots`.
    pub fn new(slots: usize) -> Self {
        Self { links: vec![Link { older: NONE, newer: NONE }; slots], oldest: NONE, newest: NONE }
    }

    fn unlink(&mut self, slot: u32) {
        let Link { older, newer } = self.links[slot as usize];
        match older {
            NONE => self.oldest = newer,
            older => self.links[older as usize].newer = newer,
        }
        match newer {
            NONE => self.newest = older,
            newer => self.links[newer as usize].older = older,
        }
    }

    fn push_newest(&mut self, slot: u32) {
        self.links[slot as usize] = Link { older: self.newest, newer: NONE };
        match self.newest {
            NONE => self.oldest = slot,
            newest => self.links[newest as usize].newer = slot,
        }
        self.newest = slot;
    }
}

impl Policy for Lru {
    fn insert(&mut self, slot: u32, _record: u32) {
        self.push_newest(slot);
    }

    fn touch(&mut self, slot: u32) {
        if self.newest != slot {
            self.unlink(slot);
            self.push_newest(slot);
        }
    }

    fn evict(&mut self, take: &mut dyn FnMut(u32) -> bool) -> Option<u32> {
        let mut slot = self.oldest;
        while slot != NONE {
            if take(slot) {
                self.unlink(slot);
                return Some(slot);
            }
            slot = self.links[slot as usize].newer;
        }
        None
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Against a `Vec` in order of age.
        #[test]
        fn lru_agrees_with_a_vec(
            steps in prop::collection::vec((0..9_u32, 0..3_u8, any::<u16>()), 1..400),
        ) {
            let mut lru = Lru::new(9);
            let mut model: Vec<u32> = Vec::new();
            for (slot, action, leased) in steps {
                let place = model.iter().position(|&s| s == slot);
                match (action, place) {
                    (0 | 1, None) => {
                        lru.insert(slot, 0);
                        model.push(slot);
                    }
                    (0 | 1, Some(place)) => {
                        lru.touch(slot);
                        model.remove(place);
                        model.push(slot);
                    }
                    _ => {
                        let free = |slot: u32| leased & (1 << slot) == 0;
                        let place = model.iter().position(|&s| free(s));
                        let expected = place.map(|place| model.remove(place));
                        prop_assert_eq!(lru.evict(&mut |slot| free(slot)), expected);
                    }
                }
            }
        }
    }
}
