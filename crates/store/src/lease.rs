//! A borrowed claim on a slot.

use crate::ExpertKey;
use crate::arena::Arena;
use std::fmt;
use std::sync::Arc;

/// An expert's bytes, held in their slot until this is dropped, on whatever thread.
///
/// It borrows nothing, so that a device backend may keep it until its work completes; it may even outlive the
/// store. As long as it lives its slot is neither evicted nor overwritten, so holding many starves the store
/// of slots: [`crate::StoreError::Stalled`].
#[must_use = "a dropped lease gives the slot back"]
pub struct Lease {
    arena: Arc<Arena>,
    key: ExpertKey,
    slot: u32,
    len: u32,
}

impl Lease {
    /// A lease on a Ready slot that holds `len` bytes of `key`; none in any other state.
    pub(crate) fn grant(arena: &Arc<Arena>, slot: u32, key: ExpertKey, len: u32) -> Option<Self> {
        arena.slot(slot).lease().then(|| Self { arena: arena.clone(), key, slot, len })
    }

    /// The expert.
    pub fn key(&self) -> ExpertKey {
        self.key
    }

    /// Its bytes, from the start of the slot, at a multiple of [`crate::PAGE`].
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: `len` bytes of a slot are mapped and initialised (checked against the slot's size when the
        // store opened). The slot is Ready and cannot leave that state while this lease counts, so no permit
        // to write exists; `lease` acquired what the reader published.
        unsafe { std::slice::from_raw_parts(self.arena.slot_ptr(self.slot), self.len as usize) }
    }

    /// The slot's number.
    pub fn slot(&self) -> usize {
        self.slot as usize
    }

    /// Where the bytes start in [`crate::Store::arena`], for devices that wrap the arena as one buffer.
    pub fn arena_offset(&self) -> usize {
        self.slot as usize * self.arena.stride()
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.arena.slot(self.slot).release();
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease")
            .field("key", &self.key)
            .field("slot", &self.slot)
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}
