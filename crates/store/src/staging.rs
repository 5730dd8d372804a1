//! Where a record lands before it is decoded: one reader reads it, then any number of readers decode its parts.
//!
//! ```text
//! spare ─► one reader: alone ─► landed ─► each part once: shared ─► who ends the last part: alone ─► spare
//! ```
//!
//! The exchange hands it on under its lock, so what one reader wrote the next one sees; at the end the parts meet in
//! [`Staging::end_part`].

use crate::aligned::AlignedBuf;
use crate::error::StoreError;
use crate::exchange::Lane;
use crate::reader::Load;
use crate::record::MAX_PARTS;
use crate::sync::{AtomicU32, AtomicUsize, Mutex, Ordering, lock};
use smoe_format::crc::crc32c_combine;
use std::cell::UnsafeCell;
use std::ops::Range;

/// A buffer, and what is to become of the record in it.
pub(crate) struct Staging {
    inner: UnsafeCell<Inner>,
    /// Parts that have not been ended.
    left: AtomicUsize,
    /// The checksum of each part's share of the record's bytes.
    sums: [AtomicU32; MAX_PARTS],
    /// The first part that failed.
    failed: Mutex<Option<(usize, StoreError)>>,
}

pub(crate) struct Inner {
    pub(crate) raw: AlignedBuf,
    pub(crate) job: Option<Job>,
}

/// A record that was read.
pub(crate) struct Job {
    pub(crate) load: Load,
    pub(crate) lane: Lane,
    pub(crate) cuts: Cuts,
}

/// How a slot is cut into parts.
#[derive(Clone, Copy)]
pub(crate) struct Cuts {
    pub(crate) parts: usize,
    /// Where each part begins in the slot, and where the last one ends; ascending.
    at: [usize; MAX_PARTS + 1],
}

// SAFETY: `inner` is written by who holds the staging alone and only read by those who share it (the contracts of
// `alone` and `shared`); all in it may be sent, and is only looked at while it is shared: bytes, numbers, and a permit,
// of whose slot each part has its own range.
unsafe impl Sync for Staging {}

impl Cuts {
    /// Cuts a slot's `slot_len` bytes where parts `start`; a part that would begin before another ends is shortened.
    pub(crate) fn new(slot_len: usize, parts: usize, start: impl Fn(usize) -> usize) -> Self {
        let parts = parts.clamp(1, MAX_PARTS);
        let mut at = [slot_len; MAX_PARTS + 1];
        at[0] = 0;
        for part in 1..parts {
            at[part] = start(part).clamp(at[part - 1], slot_len);
        }
        Self { parts, at }
    }

    /// A part's range of the slot: no two have a byte in common.
    pub(crate) fn slot(&self, part: usize) -> Range<usize> {
        assert!(part < self.parts, "part {part} of {}", self.parts);
        self.at[part]..self.at[part + 1]
    }

    /// The share of the record's `len` bytes that is checked with a part.
    pub(crate) fn checked(&self, part: usize, len: usize) -> Range<usize> {
        len * part / self.parts..len * (part + 1) / self.parts
    }
}

impl Staging {
    pub(crate) fn new(raw: AlignedBuf) -> Self {
        Self {
            inner: UnsafeCell::new(Inner { raw, job: None }),
            left: AtomicUsize::new(0),
            sums: std::array::from_fn(|_| AtomicU32::new(0)),
            failed: Mutex::new(None),
        }
    }

    /// All of it.
    ///
    /// # Safety
    /// The caller holds the staging alone: the exchange gave it to read into, or [`end_part`](Self::end_part) said so.
    #[allow(clippy::mut_from_ref, reason = "as of any cell; see Safety")]
    pub(crate) unsafe fn alone(&self) -> &mut Inner {
        // SAFETY: the caller's.
        unsafe { &mut *self.inner.get() }
    }

    /// To look at.
    ///
    /// # Safety
    /// The caller holds a part that the exchange gave it to decode and that it has not ended.
    pub(crate) unsafe fn shared(&self) -> &Inner {
        // SAFETY: nobody holds it alone before every part has been ended.
        unsafe { &*self.inner.get() }
    }

    /// So many parts are to be decoded.
    pub(crate) fn begin(&self, parts: usize) {
        self.left.store(parts, Ordering::Relaxed);
        *lock(&self.failed) = None;
    }

    /// Says what is the matter with a part.
    pub(crate) fn fail(&self, part: usize, error: StoreError) {
        let mut failed = lock(&self.failed);
        if failed.as_ref().is_none_or(|(first, _)| part < *first) {
            *failed = Some((part, error));
        }
    }

    /// The checksum of a part's share.
    pub(crate) fn set_sum(&self, part: usize, sum: u32) {
        self.sums[part].store(sum, Ordering::Relaxed);
    }

    /// The checksum of a record that is `len` bytes long, appended to `start`. Holds once all parts have been ended.
    pub(crate) fn sum(&self, cuts: &Cuts, len: usize, start: u32) -> u32 {
        let sums = self.sums[..cuts.parts].iter().enumerate();
        sums.fold(start, |crc, (part, sum)| {
            crc32c_combine(crc, sum.load(Ordering::Relaxed), cuts.checked(part, len).len())
        })
    }

    /// True for the last part: the caller has the staging alone from here on, and sees all that the others did.
    pub(crate) fn end_part(&self) -> bool {
        self.left.fetch_sub(1, Ordering::AcqRel) == 1
    }

    /// What failed, if anything did.
    pub(crate) fn take_failure(&self) -> Option<StoreError> {
        lock(&self.failed).take().map(|(_, error)| error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_have_no_byte_in_common_whatever_a_decoder_says() {
        for starts in [[0, 5, 5, 90], [7, 90, 3, 200], [500, 400, 300, 0], [0, 0, 0, 0]] {
            for parts in [0, 1, 4, MAX_PARTS, usize::MAX] {
                let cuts = Cuts::new(100, parts, |part| starts[part % 4]);
                let (mut slot, mut record) = (0, 0);
                for part in 0..cuts.parts {
                    assert_eq!((cuts.slot(part).start, cuts.checked(part, 33).start), (slot, record));
                    (slot, record) = (cuts.slot(part).end, cuts.checked(part, 33).end);
                }
                assert_eq!((slot, record), (100, 33));
            }
        }
    }
}
