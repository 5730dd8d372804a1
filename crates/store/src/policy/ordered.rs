//! Slots in the order of a key: a skip list threaded through a `Vec`.
//!
//! Every operation is a walk over preallocated links. A key that is the largest so far is put in its place after
//! one comparison a level; one in the middle takes O(log n). Slots of equal keys stand in the order in which they
//! came. A slot's height is a hash of its number, so there is no state beside the links.

/// Enough for some ten thousand slots at a quarter a level.
const LEVELS: usize = 8;

#[derive(Clone, Copy, Debug)]
struct Link {
    lower: u32,
    higher: u32,
}

/// Slots `0..slots`, each in it or not, by ascending key.
#[derive(Debug)]
pub(super) struct Ordered {
    keys: Vec<u64>,
    /// Per slot and level its neighbours; circular through one more entry, the end. Of a slot that is not in
    /// the list, stale.
    links: Vec<[Link; LEVELS]>,
}

impl Ordered {
    pub(super) fn new(slots: usize) -> Self {
        let end = slots as u32;
        Self { keys: vec![0; slots], links: vec![[Link { lower: end, higher: end }; LEVELS]; slots + 1] }
    }

    fn end(&self) -> u32 {
        self.keys.len() as u32
    }

    /// The key of a slot that is in the list.
    pub(super) fn key(&self, slot: u32) -> u64 {
        self.keys[slot as usize]
    }

    /// Puts `slot`, which is not in the list, behind all whose key is at most `key`.
    pub(super) fn insert(&mut self, slot: u32, key: u64) {
        self.keys[slot as usize] = key;
        let (end, height) = (self.end(), height(slot));
        let mut higher = end;
        for level in (0..LEVELS).rev() {
            let mut lower = self.links[higher as usize][level].lower;
            while lower != end && self.keys[lower as usize] > key {
                higher = lower;
                lower = self.links[higher as usize][level].lower;
            }
            if level < height {
                self.links[slot as usize][level] = Link { lower, higher };
                self.links[lower as usize][level].higher = slot;
                self.links[higher as usize][level].lower = slot;
            }
        }
    }

    /// Takes out `slot`, which is in the list.
    pub(super) fn remove(&mut self, slot: u32) {
        for level in 0..height(slot) {
            let Link { lower, higher } = self.links[slot as usize][level];
            self.links[lower as usize][level].higher = higher;
            self.links[higher as usize][level].lower = lower;
        }
    }

    /// Gives a slot that is in the list another key.
    pub(super) fn reinsert(&mut self, slot: u32, key: u64) {
        self.remove(slot);
        self.insert(slot, key);
    }

    /// The slot of the smallest key.
    pub(super) fn first(&self) -> Option<u32> {
        let first = self.links[self.keys.len()][0].higher;
        (first != self.end()).then_some(first)
    }

    /// Offers slots by ascending key until one is taken, and takes that one out.
    pub(super) fn take_first(&mut self, take: &mut dyn FnMut(u32) -> bool) -> Option<u32> {
        let end = self.end();
        let mut slot = self.links[end as usize][0].higher;
        while slot != end {
            if take(slot) {
                self.remove(slot);
                return Some(slot);
            }
            slot = self.links[slot as usize][0].higher;
        }
        None
    }
}

/// 1 for three slots of four, 2 for three of the rest, and so on.
fn height(slot: u32) -> usize {
    let hash = (u64::from(slot) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    1 + (hash.trailing_zeros() as usize / 2).min(LEVELS - 1)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Against a `Vec` that is sorted, stably, after each step.
        #[test]
        fn agrees_with_a_sorted_vec(steps in prop::collection::vec((0..40_u32, 0..12_u64), 1..300)) {
            let mut ordered = Ordered::new(40);
            let mut model: Vec<(u64, u32)> = Vec::new();
            for (slot, key) in steps {
                let place = model.iter().position(|&(_, s)| s == slot);
                match (place, key) {
                    (Some(place), 0) => {
                        ordered.remove(slot);
                        model.remove(place);
                    }
                    (Some(place), key) => {
                        ordered.reinsert(slot, key);
                        model.remove(place);
                        model.push((key, slot));
                    }
                    (None, key) => {
                        ordered.insert(slot, key);
                        model.push((key, slot));
                    }
                }
                model.sort_by_key(|&(key, _)| key);
                let mut seen = Vec::new();
                prop_assert_eq!(ordered.take_first(&mut |slot| { seen.push(slot); false }), None);
                let expected: Vec<u32> = model.iter().map(|&(_, slot)| slot).collect();
                prop_assert_eq!(ordered.first(), expected.first().copied());
                prop_assert_eq!(seen, expected);
            }
            while !model.is_empty() {
                prop_assert_eq!(ordered.take_first(&mut |_| true), Some(model.remove(0).1));
            }
            prop_assert_eq!(ordered.take_first(&mut |_| true), None);
        }
    }

    #[test]
    fn heights_thin_out() {
        let count = |at_least| (0..20_000).filter(|&slot| height(slot) >= at_least).count();
        assert_eq!(count(1), 20_000);
        assert!((4_500..5_500).contains(&count(2)), "{}", count(2));
        assert!((1_000..1_500).contains(&count(3)), "{}", count(3));
        assert!((10..60).contains(&count(6)), "{}", count(6));
    }
}
