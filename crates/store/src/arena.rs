//! The slots' memory, and the permit to write into one.
//!
//! One page-aligned region, claimed when the store opens; slot `i` starts at `i * stride`. Bytes are touched
//! through a [`LoadPermit`] or a [`crate::Lease`] only, and the slot's state machine keeps the two apart. The
//! arena lives as long as anyone holds it, so a lease may outlive its store.
//!
//! The region is address space at first: a slot's pages are memory from its first load on, until it is discarded.

use crate::aligned::{Mapping, OutOfMemory, PAGE};
use crate::slot::{Slot, SlotState};
use std::cell::UnsafeCell;
use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The memory of all slots. For devices that wrap host memory without copying: one region, fixed for life.
pub struct Arena {
    mapping: Mapping,
    stride: usize,
    slots: Box<[Slot]>,
    /// [`LentArena`]s that live.
    lent: AtomicUsize,
}

impl Arena {
    /// `n_slots` slots of at least `slot_bytes` bytes each; neither is 0.
    pub(crate) fn new(n_slots: usize, slot_bytes: usize) -> Result<Arc<Self>, OutOfMemory> {
        let too_large =
            || OutOfMemory { bytes: usize::MAX, source: io::Error::from(io::ErrorKind::OutOfMemory) };
        let stride = slot_bytes.checked_next_multiple_of(PAGE).ok_or_else(too_large)?;
        let mapping = Mapping::new(stride.checked_mul(n_slots).ok_or_else(too_large)?)?;
        let slots = (0..n_slots).map(|_| Slot::empty()).collect();
        Ok(Arc::new(Self { mapping, stride, slots, lent: AtomicUsize::new(0) }))
    }

    /// Number of slots.
    pub fn n_slots(&self) -> usize {
        self.slots.len()
    }

    /// Distance between the starts of two slots, in bytes: a multiple of [`PAGE`].
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// Size of the whole region, in bytes.
    pub fn bytes(&self) -> usize {
        self.stride * self.slots.len()
    }

    /// Where the region starts, at a multiple of [`PAGE`]. Reading through it is sound only where a
    /// [`crate::Lease`] is held; writing never is.
    pub fn as_ptr(&self) -> *const u8 {
        self.mapping.start().as_ptr()
    }

    pub(crate) fn slot(&self, slot: u32) -> &Slot {
        &self.slots[slot as usize]
    }

    /// Slots that somebody leases.
    pub(crate) fn leased(&self) -> usize {
        self.slots.iter().filter(|slot| slot.inspect().1 > 0).count()
    }

    /// Where slot `slot` starts; in bounds for `stride` bytes.
    pub(crate) fn slot_ptr(&self, slot: u32) -> *mut u8 {
        assert!((slot as usize) < self.slots.len(), "slot {slot} is not in the arena");
        // SAFETY: the slot lies in the mapping, by the assertion and the size chosen in `new`.
        unsafe { self.mapping.start().as_ptr().add(slot as usize * self.stride) }
    }
}

/// The arena's memory, lent to a device that reads it where it lies: its pages stay what they are while this lives.
///
/// A device has the pages that were there when it took the memory. A page that were given back and claimed again
/// would be another one, of which the device knows nothing: so a slot that is discarded meanwhile keeps its pages.
/// Who reads a slot holds its [`crate::Lease`]; without, what it reads is anything.
pub struct LentArena(Arc<Arena>);

impl LentArena {
    /// To be called by the owner of the slots: nothing is discarded during the call.
    pub(crate) fn new(arena: &Arc<Arena>) -> Self {
        arena.lent.fetch_add(1, Ordering::Relaxed);
        Self(arena.clone())
    }

    /// Number of slots.
    pub fn n_slots(&self) -> usize {
        self.0.n_slots()
    }

    /// Distance between the starts of two slots, in bytes.
    pub fn stride(&self) -> usize {
        self.0.stride()
    }
}

impl AsRef<[UnsafeCell<u8>]> for LentArena {
    /// The whole region, whose bytes readers may be writing at any time.
    fn as_ref(&self) -> &[UnsafeCell<u8>] {
        // SAFETY: the region is mapped and initialised for as long as `self` lives. Cells may be written by others
        // while they are borrowed, and nobody reads or writes one through this borrow without a promise of its own.
        unsafe { std::slice::from_raw_parts(self.0.mapping.start().as_ptr().cast(), self.0.bytes()) }
    }
}

impl Drop for LentArena {
    fn drop(&mut self) {
        // What the device has done with the memory comes before its pages are given back.
        self.0.lent.fetch_sub(1, Ordering::Release);
    }
}

impl fmt::Debug for LentArena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("LentArena").field(&self.0).finish()
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arena")
            .field("n_slots", &self.slots.len())
            .field("stride", &self.stride)
            .field("leased", &self.leased())
            .finish_non_exhaustive()
    }
}

/// The one permit to write a slot that is Loading. Dropped without [`publish`](LoadPermit::publish), it fails
/// the slot: a cancelled load, an error and a panic all end the same way.
pub(crate) struct LoadPermit {
    arena: Arc<Arena>,
    slot: u32,
    published: bool,
}

impl LoadPermit {
    /// Turns an Empty slot to Loading; none if it is in any other state.
    pub(crate) fn claim(arena: &Arc<Arena>, slot: u32) -> Option<Self> {
        arena.slot(slot).begin_load().then(|| Self { arena: arena.clone(), slot, published: false })
    }

    /// The slot's bytes.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        debug_assert_eq!(self.arena.slot(self.slot).inspect().0, SlotState::Loading);
        // SAFETY: the range is mapped and initialised (zero at first). The slot is Loading from `claim` until
        // this permit is consumed, the permit is not `Clone`, and only one `claim` succeeds between Empty and
        // Loading, so no other permit for it exists; a lease exists only in state Ready, and `evict` acquired
        // all that lessees did. `&mut self` makes this the only borrow from this permit.
        unsafe { std::slice::from_raw_parts_mut(self.arena.slot_ptr(self.slot), self.arena.stride) }
    }

    /// A range of the slot's bytes.
    ///
    /// # Safety
    /// No other borrow of any of these bytes lives: those who share a permit have ranges of their own.
    #[allow(clippy::mut_from_ref, reason = "as of any cell; see Safety")]
    pub(crate) unsafe fn range_mut(&self, range: Range<usize>) -> &mut [u8] {
        assert!(range.start <= range.end && range.end <= self.arena.stride, "not a range of a slot");
        // SAFETY: as in `bytes_mut`, save that the caller promises what `&mut self` does there.
        unsafe {
            std::slice::from_raw_parts_mut(self.arena.slot_ptr(self.slot).add(range.start), range.len())
        }
    }

    /// Gives the slot's pages back to the system, unless the arena is lent. The slot's bytes are unspecified afterwards.
    pub(crate) fn discard(&mut self) {
        if self.arena.lent.load(Ordering::Acquire) > 0 {
            return;
        }
        // SAFETY: a slot is a range of whole pages of the mapping, and it is this permit's alone, as in
        // `bytes_mut`.
        unsafe { self.arena.mapping.discard(self.slot as usize * self.arena.stride, self.arena.stride) };
    }

    /// Ends what [`discard`](LoadPermit::discard) began; owed before the slot is used again.
    pub(crate) fn reclaim(&mut self) {
        // SAFETY: as in `discard`.
        unsafe { self.arena.mapping.reclaim(self.slot as usize * self.arena.stride, self.arena.stride) };
    }

    /// The slot's number.
    pub(crate) fn slot(&self) -> u32 {
        self.slot
    }

    /// The bytes are complete: Ready.
    pub(crate) fn publish(mut self) {
        self.arena.slot(self.slot).publish();
        self.published = true;
    }
}

impl Drop for LoadPermit {
    fn drop(&mut self) {
        if !self.published {
            self.arena.slot(self.slot).fail();
        }
    }
}

#[cfg(all(test, not(loom), target_os = "linux"))]
#[allow(clippy::unwrap_used, reason = "tests stop at the first surprise")]
mod tests {
    use super::*;

    /// Bytes of the arena that are memory now.
    fn touched(arena: &Arena) -> usize {
        // SAFETY: sysconf has no preconditions.
        let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap();
        let mut pages = vec![0_u8; arena.bytes() / page];
        let start = arena.as_ptr().cast_mut().cast();
        // SAFETY: the range is mapped, and there is a byte for each of its pages.
        assert_eq!(unsafe { libc::mincore(start, arena.bytes(), pages.as_mut_ptr()) }, 0);
        pages.iter().filter(|&&page| page & 1 == 1).count() * page
    }

    #[test]
    fn pages_are_claimed_by_loads_and_given_back() {
        let arena = Arena::new(8, 4 << 20).unwrap();
        assert_eq!(touched(&arena), 0, "an arena that nobody used");
        let mut permits: Vec<LoadPermit> =
            (2..5).map(|slot| LoadPermit::claim(&arena, slot).unwrap()).collect();
        permits.iter_mut().for_each(|permit| permit.bytes_mut().fill(7));
        assert_eq!(touched(&arena), 3 * arena.stride());
        permits[1].discard();
        assert_eq!(touched(&arena), 2 * arena.stride());
        permits[1].reclaim();
        permits[1].bytes_mut()[5] = 1;
        for (permit, byte) in permits.iter_mut().zip([7, 1, 7]) {
            assert_eq!(permit.bytes_mut()[5], byte);
        }
    }

    #[test]
    fn pages_that_are_lent_stay() {
        let arena = Arena::new(4, 4 << 20).unwrap();
        let mut permit = LoadPermit::claim(&arena, 1).unwrap();
        permit.bytes_mut().fill(7);
        let lent = [LentArena::new(&arena), LentArena::new(&arena)];
        let cells: &[UnsafeCell<u8>] = lent[0].as_ref();
        assert_eq!((cells.as_ptr().cast(), cells.len()), (arena.as_ptr(), arena.bytes()));
        assert_eq!((lent[0].n_slots(), lent[0].stride()), (4, arena.stride()));
        for lent in lent {
            permit.discard();
            assert_eq!(touched(&arena), arena.stride());
            assert_eq!(permit.bytes_mut()[5], 7);
            drop(lent);
        }
        permit.discard();
        assert_eq!(touched(&arena), 0);
    }
}
