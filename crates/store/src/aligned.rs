//! Page-aligned memory straight from the system.
//!
//! The arena and the engine's backbone live in it. It differs from an allocation in three ways: it is aligned
//! for direct I/O and for devices that wrap host pages; it is not touched, so a page costs nothing until it is
//! written; and where the system has no room the caller gets [`OutOfMemory`], not an abort.

use std::fmt;
use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr::{self, NonNull};
use std::sync::Arc;

/// Alignment of every buffer: Apple's page, and a multiple of every page and block size on the other systems.
pub const PAGE: usize = 16 * 1024;

/// From this size on, buffers are aligned for huge pages and ask for them.
///
/// A drive's DMA and a kernel's streaming reads both gain from fewer pages (reads 3.6 x faster in isolation
/// with 2 MiB alignment on an M3 Max, 5 % in the pipeline: EXP-STORE-04).
const HUGE_PAGE: usize = 2 << 20;

/// The system had no room for a buffer.
#[derive(Debug, thiserror::Error)]
#[error("the system refused {bytes} bytes of memory: {source}")]
pub struct OutOfMemory {
    /// Bytes asked for.
    pub bytes: usize,
    /// What the system said.
    pub source: io::Error,
}

/// An anonymous private mapping, unmapped on drop. Never empty.
pub(crate) struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping is owned memory, like a `Box<[u8]>`: nothing about it is tied to the thread that made it.
unsafe impl Send for Mapping {}
// SAFETY: a shared `Mapping` gives out only its address and length; whoever reads or writes through the address
// must prove on their own that no one else does (`AlignedBuf`: by borrowing; `Arena`: by permits and leases).
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` zero bytes, which must not be 0.
    pub(crate) fn new(len: usize) -> Result<Self, OutOfMemory> {
        assert!(len > 0, "a mapping is never empty");
        let too_large = || OutOfMemory { bytes: len, source: io::Error::from(io::ErrorKind::OutOfMemory) };
        let align = if len >= HUGE_PAGE { HUGE_PAGE } else { PAGE };
        let rounded = len.checked_next_multiple_of(PAGE).ok_or_else(too_large)?;
        let reserved = rounded.checked_add(align).ok_or_else(too_large)?;
        // SAFETY: a new anonymous mapping at an address of the system's choice touches no existing memory.
        let raw = unsafe {
            libc::mmap(
                ptr::null_mut(),
                reserved,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANON,
                -1,
                0,
            )
        };
        if raw == libc::MAP_FAILED {
            return Err(OutOfMemory { bytes: len, source: io::Error::last_os_error() });
        }
        let raw = raw.cast::<u8>();
        let head = raw.align_offset(align);
        let tail = reserved - head - rounded;
        // SAFETY: `head + rounded + tail == reserved`, so both ends lie in the mapping made above, and no
        // pointer into them exists. Addresses and lengths are multiples of the system's page: the mapping
        // starts at a page, `align` and `rounded` are multiples of PAGE, which is a multiple of it.
        let start = unsafe {
            let start = raw.add(head);
            if head > 0 {
                libc::munmap(raw.cast(), head);
            }
            if tail > 0 {
                libc::munmap(start.add(rounded).cast(), tail);
            }
            start
        };
        #[cfg(target_os = "linux")]
        if align == HUGE_PAGE {
            // SAFETY: advice on memory that this function owns; it changes no contents, and a refusal is fine.
            unsafe { libc::madvise(start.cast(), rounded, libc::MADV_HUGEPAGE) };
        }
        let start = NonNull::new(start).ok_or_else(too_large)?;
        Ok(Self { start, len: rounded })
    }

    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Gives the pages of a range back to the system. They read as zeros or as before, and cost memory again once
    /// they are written.
    ///
    /// Linux frees them at once. On macOS they are marked reusable, which takes them off the process's footprint;
    /// the system takes them when it needs some, and [`reclaim`](Mapping::reclaim) is owed before the next use.
    /// On other systems nothing happens.
    ///
    /// # Safety
    /// - `offset` and `len` are multiples of [`PAGE`], and the range lies in the mapping.
    /// - Nobody else reads or writes in the range during the call.
    pub(crate) unsafe fn discard(&self, offset: usize, len: usize) {
        #[cfg(target_os = "linux")]
        const ADVICE: libc::c_int = libc::MADV_DONTNEED;
        #[cfg(target_os = "macos")]
        const ADVICE: libc::c_int = libc::MADV_FREE_REUSABLE;
        #[cfg(any(target_os = "linux", target_os = "macos"))]
        // SAFETY: a range of our own anonymous mapping, at whole pages, that nobody looks at (the caller's
        // promises); its bytes stay initialised. A refusal leaves them as they are.
        unsafe {
            libc::madvise(self.start.as_ptr().add(offset).cast(), len, ADVICE);
        }
        #[cfg(not(any(target_os = "linux", target_os = "macos")))]
        let _ = (offset, len);
    }

    /// Says that a range that was discarded will be used again.
    ///
    /// # Safety
    /// As [`discard`](Mapping::discard).
    pub(crate) unsafe fn reclaim(&self, offset: usize, len: usize) {
        #[cfg(target_os = "macos")]
        // SAFETY: as in `discard`; this one changes the system's books only.
        unsafe {
            libc::madvise(self.start.as_ptr().add(offset).cast(), len, libc::MADV_FREE_REUSE);
        }
        #[cfg(not(target_os = "macos"))]
        let _ = (offset, len);
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: exactly the range that `new` kept; its owner is going, so no borrow of it is left.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// A buffer of bytes that starts at a multiple of [`PAGE`] (of 2 MiB from that size on) and begins as zeros.
pub struct AlignedBuf {
    mapping: Option<Arc<Mapping>>,
    /// Of the mapping's bytes, these are nobody else's.
    offset: usize,
    len: usize,
}

impl AlignedBuf {
    /// A buffer of `len` zero bytes. The pages are not touched yet.
    ///
    /// # Errors
    /// [`OutOfMemory`] where the system refuses.
    pub fn zeroed(len: usize) -> Result<Self, OutOfMemory> {
        let mapping = if len == 0 { None } else { Some(Arc::new(Mapping::new(len)?)) };
        Ok(Self { mapping, offset: 0, len })
    }

    /// So many buffers of `len` zero bytes, side by side, each at a multiple of [`PAGE`]: small ones share huge pages,
    /// and from 2 MiB on none has others, of which reads take longer (EXP-STORE-17).
    ///
    /// # Errors
    /// [`OutOfMemory`] where the system refuses.
    pub fn zeroed_side_by_side(count: usize, len: usize) -> Result<Vec<Self>, OutOfMemory> {
        let too_large = || OutOfMemory { bytes: len, source: io::Error::from(io::ErrorKind::OutOfMemory) };
        let all = Self::side_by_side_bytes(count, len).ok_or_else(too_large)?;
        let each = len.next_multiple_of(PAGE);
        let mapping = if all == 0 { None } else { Some(Arc::new(Mapping::new(all)?)) };
        Ok((0..count).map(|i| Self { mapping: mapping.clone(), offset: i * each, len }).collect())
    }

    /// What they take, if it can be told: from 2 MiB on whole huge pages.
    pub(crate) fn side_by_side_bytes(count: usize, len: usize) -> Option<usize> {
        let all = len.checked_next_multiple_of(PAGE)?.checked_mul(count)?;
        if all < HUGE_PAGE { Some(all) } else { all.checked_next_multiple_of(HUGE_PAGE) }
    }

    fn start(&self) -> NonNull<u8> {
        // SAFETY: `offset + len` is at most the mapping's length.
        self.mapping.as_ref().map_or(NonNull::dangling(), |m| unsafe { m.start().add(self.offset) })
    }
}

impl Deref for AlignedBuf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `len` bytes from `start` are mapped, initialised (anonymous memory is zero) and those of `self`
        // alone, and writers need `&mut self`. For `len` 0 a dangling pointer is allowed.
        unsafe { std::slice::from_raw_parts(self.start().as_ptr(), self.len) }
    }
}

impl DerefMut for AlignedBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `&mut self` makes this the only borrow.
        unsafe { std::slice::from_raw_parts_mut(self.start().as_ptr(), self.len) }
    }
}

impl fmt::Debug for AlignedBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AlignedBuf").field("len", &self.len).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned_zero_and_writable() {
        for len in [0, 1, 511, PAGE, PAGE + 1, HUGE_PAGE - 1, HUGE_PAGE, 3 * HUGE_PAGE + 7] {
            let mut buf = AlignedBuf::zeroed(len).unwrap();
            assert_eq!(buf.len(), len);
            assert!(buf.iter().all(|&b| b == 0), "{len}");
            if len == 0 {
                continue;
            }
            let align = if len >= HUGE_PAGE { HUGE_PAGE } else { PAGE };
            assert_eq!(buf.as_ptr().addr() % align, 0, "{len}");
            buf[len - 1] = 7;
            buf[0] = 9;
            assert_eq!(buf[0], 9);
        }
    }

    #[test]
    fn buffers_side_by_side_are_apart() {
        for len in [0, 1, PAGE, PAGE + 1, HUGE_PAGE / 2] {
            let mut all = AlignedBuf::zeroed_side_by_side(5, len).unwrap();
            for (i, buf) in (1..).zip(&mut all) {
                assert!(buf.len() == len && buf.as_ptr().addr().is_multiple_of(PAGE) || len == 0);
                buf.fill(i);
            }
            drop(all.remove(2));
            assert!([1, 2, 4, 5].iter().zip(&all).all(|(i, buf)| buf.iter().all(|byte| byte == i)));
        }
    }

    /// What a plan counts for buffers of records that are decoded.
    #[test]
    fn buffers_side_by_side_take_whole_huge_pages_once_they_fill_one() {
        let bytes = crate::staging_bytes;
        assert_eq!(bytes(0, 5), 0);
        assert_eq!(bytes(3, PAGE as u64 + 1), 6 * PAGE as u64, "pages");
        assert_eq!(bytes(2, 1 << 20), 2 << 20);
        assert_eq!(bytes(2, (1 << 20) + 1), 4 << 20);
        // Five times 608 KiB are 2.97 MiB.
        assert_eq!(bytes(5, 600 << 10), 4 << 20);
        assert_eq!(bytes(2, u64::MAX), u64::MAX, "no such memory");
        let all = AlignedBuf::zeroed_side_by_side(5, 600 << 10).unwrap();
        assert_eq!(all[0].as_ptr().addr() % HUGE_PAGE, 0);
    }

    #[test]
    fn an_absurd_size_is_an_error() {
        for len in [usize::MAX, usize::MAX / 2, 1 << 60] {
            let error = AlignedBuf::zeroed(len).unwrap_err();
            assert_eq!(error.bytes, len);
        }
    }

    #[test]
    fn buffers_travel_between_threads() {
        let mut buf = AlignedBuf::zeroed(PAGE).unwrap();
        let buf = std::thread::spawn(move || {
            buf[3] = 3;
            buf
        });
        assert_eq!(buf.join().unwrap()[3], 3);
    }
}
