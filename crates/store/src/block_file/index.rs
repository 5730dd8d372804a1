//! Which block is in which slot, and which one gives way: pure book-keeping, no I/O.
//!
//! Blocks form trees by their parents' keys. The one that gives way is the least recently used of those that
//! no held block names as its parent, so that a block never goes before its descendants, whatever the order
//! of uses; nor does the parent of the block that is to come. Recency is a clock of uses; a block's sequence
//! number in the file is the clock when it was put.

use super::BlockMeta;
use crate::block_file::layout::Descriptor;
use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap};

/// A block that is held.
pub(super) struct Held {
    pub(super) meta: BlockMeta,
    pub(super) payload_crc: u32,
    /// When it was last used.
    stamp: u64,
    /// Not yet on the disk.
    writing: bool,
}

enum Slot {
    Free,
    /// Its block was removed, and a write or the wiping is still under way.
    Leaving,
    /// The disk was full when it was to be written first.
    Retired,
    Held(Held),
}

/// A place for a new block.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Claim {
    /// This slot; whom it was taken from is forgotten.
    Slot { slot: u32, evicted: bool },
    /// None before a write has ended.
    Busy,
    /// None, because all blocks are ancestors of the new one.
    Full,
}

/// The slots of a file.
pub(super) struct Index {
    /// Those that were used so far.
    slots: Vec<Slot>,
    /// Whether the file is known to have room for the slot.
    proven: Vec<bool>,
    by_key: HashMap<u128, u32>,
    /// By parent's key, whether or not the parent is held: slots of the held blocks that name it.
    children: HashMap<u128, Vec<u32>>,
    /// Held blocks that are nobody's parent, by stamp.
    leaves: BTreeSet<(u64, u32)>,
    free: BTreeSet<u32>,
    leaving: usize,
    retired: usize,
    /// Slots that the file may have.
    limit: u32,
    clock: u64,
}

impl Index {
    /// No slots used, of at most `limit`.
    pub(super) fn new(limit: u32) -> Self {
        Self {
            slots: Vec::new(),
            proven: Vec::new(),
            by_key: HashMap::new(),
            children: HashMap::new(),
            leaves: BTreeSet::new(),
            free: BTreeSet::new(),
            leaving: 0,
            retired: 0,
            limit,
            clock: 0,
        }
    }

    /// Adds the next slot of a file that is being opened: with this block, or free. Of two blocks with one
    /// key the newer stays.
    pub(super) fn restore(&mut self, descriptor: Option<Descriptor>) {
        let slot = self.slots.len() as u32;
        self.slots.push(Slot::Free);
        self.proven.push(descriptor.is_some());
        self.free.insert(slot);
        let Some(Descriptor { sequence, payload_crc, meta }) = descriptor else { return };
        if let Some((other, held)) = self.find(meta.key) {
            if held.stamp >= sequence {
                return;
            }
            self.take(other, Slot::Free);
        }
        self.clock = self.clock.max(sequence);
        self.place(slot, Held { meta, payload_crc, stamp: sequence, writing: false });
    }

    pub(super) fn len(&self) -> usize {
        self.by_key.len()
    }

    /// Blocks that can be held at once.
    pub(super) fn capacity(&self) -> usize {
        self.limit as usize - self.retired
    }

    /// Slots that are neither held nor free, because a write is under way.
    pub(super) fn leaving(&self) -> usize {
        self.leaving
    }

    pub(super) fn is_leaving(&self, slot: u32) -> bool {
        matches!(self.slots[slot as usize], Slot::Leaving)
    }

    pub(super) fn held(&self) -> impl Iterator<Item = &Held> {
        self.slots.iter().filter_map(|slot| match slot {
            Slot::Held(held) => Some(held),
            _ => None,
        })
    }

    /// The held blocks that name `parent`.
    pub(super) fn children(&self, parent: u128) -> impl Iterator<Item = &Held> {
        self.children.get(&parent).into_iter().flatten().map(|&slot| self.at(slot))
    }

    pub(super) fn find(&self, key: u128) -> Option<(u32, &Held)> {
        let slot = *self.by_key.get(&key)?;
        Some((slot, self.at(slot)))
    }

    /// Notes a use; false if the block is not held.
    pub(super) fn touch(&mut self, key: u128) -> bool {
        let Some(&slot) = self.by_key.get(&key) else { return false };
        let now = self.tick();
        self.stamp(slot, now);
        true
    }

    /// A block is the first to give way, until it is used again.
    pub(super) fn demote(&mut self, key: u128) {
        if let Some(&slot) = self.by_key.get(&key) {
            self.stamp(slot, 0);
        }
    }

    fn stamp(&mut self, slot: u32, stamp: u64) {
        let before = std::mem::replace(&mut self.at_mut(slot).stamp, stamp);
        if self.leaves.remove(&(before, slot)) {
            self.leaves.insert((stamp, slot));
        }
    }

    /// The slot of a block that is held, to be written anew; `None` if there is none.
    pub(super) fn reclaim(&mut self, key: u128) -> Option<Claim> {
        let slot = *self.by_key.get(&key)?;
        if self.at(slot).writing {
            return Some(Claim::Busy);
        }
        self.take(slot, Slot::Free);
        self.free.remove(&slot);
        Some(Claim::Slot { slot, evicted: false })
    }

    /// A slot for a block of this parent: a free one, a new one, or that of the block that gives way.
    pub(super) fn claim(&mut self, parent: u128) -> Claim {
        if let Some(slot) = self.free.pop_first() {
            return Claim::Slot { slot, evicted: false };
        }
        if self.slots.len() < self.limit as usize {
            self.slots.push(Slot::Free);
            self.proven.push(false);
            return Claim::Slot { slot: self.slots.len() as u32 - 1, evicted: false };
        }
        if self.leaving > 0 {
            return Claim::Busy;
        }
        let Some(&(_, slot)) = self.leaves.iter().find(|&&(_, slot)| self.at(slot).meta.key != parent) else {
            return Claim::Full;
        };
        if self.at(slot).writing {
            return Claim::Busy;
        }
        self.take(slot, Slot::Free);
        self.free.remove(&slot);
        Claim::Slot { slot, evicted: true }
    }

    /// Puts a block, whose write begins, into a claimed slot, and returns its sequence number.
    pub(super) fn hold(&mut self, slot: u32, meta: BlockMeta, payload_crc: u32) -> u64 {
        let stamp = self.tick();
        self.place(slot, Held { meta, payload_crc, stamp, writing: true });
        stamp
    }

    /// The block's write has succeeded.
    pub(super) fn written(&mut self, slot: u32) {
        self.proven[slot as usize] = true;
        self.at_mut(slot).writing = false;
    }

    /// The block's write has failed: it is not held. On a full disk the file grows no further, and slots that
    /// it has no room for are given up, unless it would then have none at all.
    pub(super) fn not_written(&mut self, slot: u32, disk_full: bool) -> u128 {
        let key = self.take(slot, Slot::Free).meta.key;
        if disk_full {
            self.limit = self.slots.len() as u32;
            if !self.proven[slot as usize] && !self.by_key.is_empty() {
                self.free.remove(&slot);
                self.slots[slot as usize] = Slot::Retired;
                self.retired += 1;
            }
        }
        key
    }

    /// Forgets a block; its slot is not used again before [`released`](Index::released).
    pub(super) fn leave(&mut self, key: u128) -> Option<u32> {
        let slot = *self.by_key.get(&key)?;
        self.take(slot, Slot::Leaving);
        self.leaving += 1;
        Some(slot)
    }

    /// No write to a slot that was left is under way any more.
    pub(super) fn released(&mut self, slot: u32) {
        debug_assert!(self.is_leaving(slot), "only a slot that was left is released");
        self.slots[slot as usize] = Slot::Free;
        self.leaving -= 1;
        self.free.insert(slot);
    }

    fn tick(&mut self) -> u64 {
        // Saturates only if a file says so; recency is then lost, and nothing else.
        self.clock = self.clock.saturating_add(1);
        self.clock
    }

    fn at(&self, slot: u32) -> &Held {
        match &self.slots[slot as usize] {
            Slot::Held(held) => held,
            _ => unreachable!("slot {slot} holds a block"),
        }
    }

    fn at_mut(&mut self, slot: u32) -> &mut Held {
        match &mut self.slots[slot as usize] {
            Slot::Held(held) => held,
            _ => unreachable!("slot {slot} holds a block"),
        }
    }

    fn place(&mut self, slot: u32, held: Held) {
        let BlockMeta { key, parent, .. } = held.meta;
        self.free.remove(&slot);
        self.by_key.insert(key, slot);
        if !self.children.contains_key(&key) {
            self.leaves.insert((held.stamp, slot));
        }
        self.slots[slot as usize] = Slot::Held(held);
        if parent != key {
            let siblings = self.children.entry(parent).or_default();
            siblings.push(slot);
            if let (1, Some((slot, held))) = (siblings.len(), self.find(parent)) {
                self.leaves.remove(&(held.stamp, slot));
            }
        }
    }

    /// Takes a block out, and leaves its slot in this state.
    fn take(&mut self, slot: u32, state: Slot) -> Held {
        if matches!(state, Slot::Free) {
            self.free.insert(slot);
        }
        let Slot::Held(held) = std::mem::replace(&mut self.slots[slot as usize], state) else {
            unreachable!("slot {slot} holds a block")
        };
        let BlockMeta { key, parent, .. } = held.meta;
        self.by_key.remove(&key);
        self.leaves.remove(&(held.stamp, slot));
        if parent != key
            && let Entry::Occupied(mut siblings) = self.children.entry(parent)
        {
            siblings.get_mut().retain(|&other| other != slot);
            if siblings.get().is_empty() {
                siblings.remove();
                if let Some((slot, held)) = self.find(parent) {
                    self.leaves.insert((held.stamp, slot));
                }
            }
        }
        held
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn meta(key: u128, parent: u128) -> BlockMeta {
        BlockMeta { key, parent, note: Box::default() }
    }

    /// Puts a block whose write succeeds at once.
    fn put(index: &mut Index, key: u128, parent: u128) -> Claim {
        let claim = index.claim(parent);
        if let Claim::Slot { slot, .. } = claim {
            index.hold(slot, meta(key, parent), 0);
            index.written(slot);
        }
        claim
    }

    fn keys(index: &Index) -> Vec<u128> {
        let mut keys: Vec<u128> = index.held().map(|held| held.meta.key).collect();
        keys.sort_unstable();
        keys
    }

    #[test]
    fn a_block_outlives_its_descendants() {
        let mut index = Index::new(4);
        // A chain 1, 2, 3, and 9 on its own. Recency alone would take 1 first.
        for (slot, (key, parent)) in [(1, 0), (2, 1), (3, 2), (9, 0)].into_iter().enumerate() {
            let slot = slot as u32;
            assert_eq!(put(&mut index, key, parent), Claim::Slot { slot, evicted: false });
        }
        assert_eq!(put(&mut index, 10, 0), Claim::Slot { slot: 2, evicted: true });
        assert_eq!(keys(&index), [1, 2, 9, 10]);
        put(&mut index, 11, 0);
        assert_eq!(keys(&index), [1, 9, 10, 11]);
        put(&mut index, 12, 0);
        assert_eq!(keys(&index), [9, 10, 11, 12], "then the chain's first");
    }

    #[test]
    fn the_parent_of_what_comes_does_not_give_way_to_it() {
        let mut index = Index::new(2);
        put(&mut index, 1, 0);
        put(&mut index, 9, 0);
        assert_eq!(put(&mut index, 2, 1), Claim::Slot { slot: 1, evicted: true });
        assert_eq!(keys(&index), [1, 2]);
        assert_eq!(put(&mut index, 3, 2), Claim::Full, "only ancestors are left");
        assert_eq!(keys(&index), [1, 2]);
        assert!(matches!(put(&mut index, 4, 1), Claim::Slot { .. }), "2 may go for its sibling");
        assert_eq!(keys(&index), [1, 4]);
    }

    #[test]
    fn a_child_that_was_there_before_its_parent_protects_it() {
        let mut index = Index::new(2);
        put(&mut index, 2, 1);
        put(&mut index, 1, 0);
        put(&mut index, 9, 0);
        assert_eq!(keys(&index), [1, 9]);
    }

    #[test]
    fn a_block_is_written_anew_in_its_own_slot_and_keeps_its_place_in_the_tree() {
        let mut index = Index::new(3);
        for (key, parent) in [(1, 0), (2, 1), (3, 2)] {
            put(&mut index, key, parent);
            index.written(index.find(key).expect("held").0);
        }
        assert_eq!(index.reclaim(4), None);
        let (slot, _) = index.find(2).expect("held");
        assert_eq!(index.reclaim(2), Some(Claim::Slot { slot, evicted: false }));
        index.hold(slot, meta(2, 1), 7);
        assert_eq!(index.find(2).map(|(found, held)| (found, held.payload_crc)), Some((slot, 7)));
        assert_eq!(index.reclaim(2), Some(Claim::Busy), "while it is being written");
        index.written(slot);
        assert_eq!(index.children(1).count(), 1);
        // Only the last of the chain gives way.
        put(&mut index, 5, 0);
        assert_eq!(keys(&index), [1, 2, 5]);
    }

    #[test]
    fn children_are_those_that_are_held() {
        let mut index = Index::new(3);
        let of = |index: &Index, parent| index.children(parent).map(|held| held.meta.key).collect::<Vec<_>>();
        for (key, parent) in [(2, 1), (3, 1), (1, 0)] {
            put(&mut index, key, parent);
        }
        assert_eq!((of(&index, 1), of(&index, 0), of(&index, 2)), (vec![2, 3], vec![1], vec![]));
        put(&mut index, 9, 0);
        assert_eq!((of(&index, 1), of(&index, 0)), (vec![3], vec![1, 9]), "2 gave way");
        index.leave(3);
        assert!(of(&index, 1).is_empty());
        assert!(!index.children.contains_key(&1), "nothing is kept of those that are gone");
    }

    #[test]
    fn a_block_that_is_its_own_parent_is_a_root() {
        let mut index = Index::new(1);
        put(&mut index, 5, 5);
        put(&mut index, 6, 6);
        assert_eq!(keys(&index), [6]);
    }

    #[test]
    fn slots_under_way_are_waited_for() {
        let mut index = Index::new(1);
        let Claim::Slot { slot, .. } = index.claim(0) else { panic!() };
        index.hold(slot, meta(1, 0), 0);
        assert_eq!(index.claim(0), Claim::Busy);
        index.written(slot);
        assert_eq!(index.leave(1), Some(slot));
        assert_eq!((index.claim(0), index.len()), (Claim::Busy, 0));
        index.released(slot);
        assert_eq!(index.claim(0), Claim::Slot { slot, evicted: false });
    }

    #[test]
    fn a_full_disk_ends_growth_and_overwriting_goes_on() {
        let mut index = Index::new(10);
        put(&mut index, 1, 0);
        put(&mut index, 2, 0);
        let Claim::Slot { slot, .. } = index.claim(0) else { panic!() };
        index.hold(slot, meta(3, 0), 0);
        assert_eq!(index.not_written(slot, true), 3);
        assert_eq!((index.capacity(), index.len()), (2, 2));
        assert_eq!(put(&mut index, 4, 0), Claim::Slot { slot: 0, evicted: true });
        // With nothing held, the slot is kept to be tried again.
        let mut index = Index::new(10);
        let Claim::Slot { slot, .. } = index.claim(0) else { panic!() };
        index.hold(slot, meta(1, 0), 0);
        index.not_written(slot, true);
        assert_eq!(index.capacity(), 1);
        assert!(matches!(put(&mut index, 1, 0), Claim::Slot { slot: 0, .. }));
    }

    #[test]
    fn of_two_blocks_with_one_key_the_newer_is_restored() {
        for sequences in [[5, 7], [7, 5]] {
            let mut index = Index::new(4);
            for sequence in sequences {
                let payload_crc = sequence as u32;
                index.restore(Some(Descriptor { sequence, payload_crc, meta: meta(1, 0) }));
            }
            index.restore(None);
            assert_eq!(index.find(1).unwrap().1.payload_crc, 7);
            assert_eq!((index.len(), index.free.len()), (1, 2));
            let Claim::Slot { slot, .. } = index.claim(0) else { panic!() };
            assert_eq!(index.hold(slot, meta(2, 0), 0), 8, "newer than all in the file");
        }
    }
}
