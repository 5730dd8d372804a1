//! A store as it was when it was opened, and its arena as plain memory: for those who measure.

use crate::store::Store;

/// All the arena's bytes, while no read is under way.
#[derive(Debug)]
pub enum ArenaMemory<'a> {
    /// No slot holds anything, and nobody leases one.
    Empty(&'a mut [u8]),
    /// Every slot holds an expert.
    Full(&'a [u8]),
}

impl Store {
    /// Forgets every expert that nobody leases, once what is being read has arrived, and ends the expected list
    /// and what is left of a batch. The memory stays the arena's.
    pub fn forget(&mut self) {
        self.settle();
        self.residency.forget();
    }

    /// Ends everything that is under way.
    fn settle(&mut self) {
        self.abandon_batch();
        self.withdraw();
        while self.in_flight() > 0 {
            self.wait();
        }
    }

    /// Shows the arena's bytes to `f`, once what is being read has arrived. None if some slots hold an expert and
    /// others do not. Ends the expected list and what is left of a batch.
    pub fn with_memory<R>(&mut self, f: impl FnOnce(ArenaMemory<'_>) -> R) -> Option<R> {
        self.settle();
        let arena = self.arena().clone();
        let (start, len) = (arena.slot_ptr(0), arena.bytes());
        if self.n_resident() == arena.n_slots() {
            // SAFETY: the region is mapped and initialised. It is written through load permits only, which go to
            // readers; none is out, as nothing is in flight, and none is made while `self` is borrowed.
            return Some(f(ArenaMemory::Full(unsafe { std::slice::from_raw_parts(start, len) })));
        }
        let is_empty = self.n_resident() == 0 && self.limit() == arena.n_slots() && arena.leased() == 0;
        if !is_empty {
            return None;
        }
        // SAFETY: as above; moreover nobody reads, as there are no leases, and none is granted while `self` is
        // borrowed.
        Some(f(ArenaMemory::Empty(unsafe { std::slice::from_raw_parts_mut(start, len) })))
    }
}
