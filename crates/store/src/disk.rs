//! Positioned reads: all that the store asks of a disk.

use crate::aligned::{AlignedBuf, OutOfMemory, PAGE};
use std::fmt;
use std::io::{self, IoSliceMut};
use std::path::{Path, PathBuf};

/// Largest bounce buffer of [`Disk::read_range`]: long enough for full speed, short enough not to matter.
const BOUNCE_BYTES: usize = 8 << 20;

/// Whether reads bypass the page cache. Belongs into every bench record, and into the panel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DirectIo {
    /// They do: shown by a trial read, not assumed from a flag.
    Yes {
        /// Offset, length and address of a read must be multiples of this.
        alignment: usize,
    },
    /// They do not; any offset, length and address will do.
    No {
        /// The reason, for a person.
        why: String,
    },
}

impl DirectIo {
    /// What offset, length and address of a read must be multiples of.
    pub fn alignment(&self) -> usize {
        match self {
            DirectIo::Yes { alignment } => *alignment,
            DirectIo::No { .. } => 1,
        }
    }
}

impl fmt::Display for DirectIo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DirectIo::Yes { alignment } => write!(f, "yes (alignment {alignment})"),
            DirectIo::No { why } => write!(f, "no ({why})"),
        }
    }
}

/// What went wrong with a file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DiskError {
    /// The file cannot be opened or examined.
    #[error("{}: cannot open: {source}", file.display())]
    Open {
        /// The file.
        file: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Direct I/O was demanded, and the file cannot have it.
    #[error("{}: no direct I/O: {why}", file.display())]
    NotDirect {
        /// The file.
        file: PathBuf,
        /// The reason.
        why: String,
    },
    /// The file ends before the bytes asked for.
    #[error("{}: short read at offset {offset}: expected {expected} bytes, found {found}", file.display())]
    Short {
        /// The file.
        file: PathBuf,
        /// Where the read began.
        offset: u64,
        /// Bytes asked for.
        expected: u64,
        /// Bytes there.
        found: u64,
    },
    /// A direct read whose offset, length or address is not aligned. [`Disk::read_range`] takes any.
    #[error(
        "{}: direct read of {len} bytes at offset {offset} into address {address:#x} is not aligned to {alignment}",
        file.display()
    )]
    Misaligned {
        /// The file.
        file: PathBuf,
        /// Where the read began.
        offset: u64,
        /// Bytes asked for.
        len: usize,
        /// Where they were to go.
        address: usize,
        /// What all three must be multiples of.
        alignment: usize,
    },
    /// The system failed the read.
    #[error("{}: read of {len} bytes at offset {offset} failed: {source}", file.display())]
    Io {
        /// The file.
        file: PathBuf,
        /// Where the read began.
        offset: u64,
        /// Bytes asked for.
        len: usize,
        /// What the system said.
        source: io::Error,
    },
    /// No memory for a bounce buffer.
    #[error(transparent)]
    OutOfMemory(#[from] OutOfMemory),
}

/// A file of known length that many threads read at once.
///
/// Implementors owe [`read_at`](Disk::read_at), [`len`](Disk::len), [`name`](Disk::name) and
/// [`direct`](Disk::direct); the rest is built on those.
pub trait Disk: Send + Sync {
    /// Reads at `offset` until `buf` is full or the file ends, and returns the bytes read: fewer than asked
    /// means the end of the file, nothing else.
    ///
    /// # Errors
    /// [`DiskError::Misaligned`] if `direct` says that reads are aligned and this one is not;
    /// [`DiskError::Io`] if the system fails it.
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<usize, DiskError>;

    /// Length in bytes, as it was when opened.
    fn len(&self) -> u64;

    /// Its path, or what stands for it in messages.
    fn name(&self) -> &Path;

    /// Whether reads bypass the page cache, and what alignment they must have.
    fn direct(&self) -> &DirectIo;

    /// Whether there is nothing to read.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Fills `buf` from `offset`.
    ///
    /// # Errors
    /// As [`read_at`](Disk::read_at), and [`DiskError::Short`] if the file ends first.
    fn read_exact_at(&self, offset: u64, buf: &mut [u8]) -> Result<(), DiskError> {
        let expected = buf.len();
        let found = self.read_at(offset, buf)?;
        if found == expected { Ok(()) } else { Err(short(self.name(), offset, expected, found)) }
    }

    /// Fills several buffers from one contiguous range of the file that starts at `offset`.
    ///
    /// # Errors
    /// As [`read_exact_at`](Disk::read_exact_at); each buffer must be aligned as a read of its own.
    fn read_exact_vectored_at(&self, offset: u64, bufs: &mut [IoSliceMut<'_>]) -> Result<(), DiskError> {
        let mut at = offset;
        for buf in bufs {
            self.read_exact_at(at, buf)?;
            at += buf.len() as u64;
        }
        Ok(())
    }

    /// Fills `buf` from `offset`, whatever the alignment of either, through an aligned bounce buffer where one
    /// is needed. For tables and tensors; records are aligned and need none.
    ///
    /// # Errors
    /// As [`read_exact_at`](Disk::read_exact_at), save that it is never misaligned; and
    /// [`DiskError::OutOfMemory`].
    fn read_range(&self, offset: u64, buf: &mut [u8]) -> Result<(), DiskError> {
        let alignment = self.direct().alignment();
        let is_aligned = |n: usize| n.is_multiple_of(alignment);
        let aligned_start = offset.is_multiple_of(alignment as u64) && is_aligned(buf.as_ptr().addr());
        let straight = if aligned_start { buf.len() - buf.len() % alignment } else { 0 };
        let (straight, bounced) = buf.split_at_mut(straight);
        if !straight.is_empty() {
            self.read_exact_at(offset, straight)?;
        }
        if bounced.is_empty() { Ok(()) } else { read_bounced(self, offset + straight.len() as u64, bounced) }
    }
}

/// Reads whole aligned blocks around what is wanted, piece by piece, and copies out of them.
fn read_bounced<D: Disk + ?Sized>(disk: &D, offset: u64, buf: &mut [u8]) -> Result<(), DiskError> {
    let block = disk.direct().alignment().max(PAGE) as u64;
    let spanned = buf.len().saturating_add(2 * block as usize);
    let mut bounce = AlignedBuf::zeroed(spanned.next_multiple_of(block as usize).min(BOUNCE_BYTES))?;
    let mut filled = 0;
    while filled < buf.len() {
        let at = offset + filled as u64;
        let start = at - at % block;
        let skip = (at - start) as usize;
        let wanted = (buf.len() - filled).min(bounce.len() - skip);
        let span = (skip + wanted).next_multiple_of(block as usize);
        let found = disk.read_at(start, &mut bounce[..span])?;
        if found < skip + wanted {
            let found = filled + found.saturating_sub(skip);
            return Err(short(disk.name(), offset, buf.len(), found));
        }
        buf[filled..filled + wanted].copy_from_slice(&bounce[skip..skip + wanted]);
        filled += wanted;
    }
    Ok(())
}

fn short(file: &Path, offset: u64, expected: usize, found: usize) -> DiskError {
    DiskError::Short { file: file.to_owned(), offset, expected: expected as u64, found: found as u64 }
}
