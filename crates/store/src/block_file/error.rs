//! What a block file reports.

use crate::aligned::OutOfMemory;
use crate::disk::DiskError;
use std::io;
use std::path::PathBuf;

/// Why a block file did not open, or did not do what was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BlockFileError {
    /// A setting that no block file can have.
    #[error("{setting} must be at least 1")]
    Config {
        /// The field of [`crate::BlockFileConfig`].
        setting: &'static str,
    },
    /// The bound has no room for one block.
    #[error("a block file of {max_bytes} bytes holds no block: give it {needed} or more")]
    TooSmall {
        /// The bound.
        max_bytes: u64,
        /// Bytes of a file with one block.
        needed: u64,
    },
    /// Another process, or another [`crate::BlockFile`] of this one, has the file open.
    #[error("{}: in use by another process", file.display())]
    InUse {
        /// The file.
        file: PathBuf,
    },
    /// Something else than a block file lies there, and is left alone.
    #[error("{}: not a block file; remove it, or give another name", file.display())]
    Foreign {
        /// The file.
        file: PathBuf,
    },
    /// The file cannot be opened as asked, or not be read.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// The system failed a write.
    #[error("{}: write of {len} bytes at offset {offset} failed: {source}", file.display())]
    Write {
        /// The file.
        file: PathBuf,
        /// Where the write began.
        offset: u64,
        /// Bytes to write.
        len: usize,
        /// What the system said.
        source: io::Error,
    },
    /// The system failed something else.
    #[error("{}: cannot {what}: {source}", file.display())]
    Io {
        /// The file.
        file: PathBuf,
        /// What was tried.
        what: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// The buffers of queued writes do not fit into memory.
    #[error(transparent)]
    OutOfMemory(#[from] OutOfMemory),
    /// A writer thread cannot be started.
    #[error("cannot start a writer thread: {0}")]
    Spawn(#[source] io::Error),
    /// A payload of another length than the file's blocks have.
    #[error("a payload has {found} bytes, but blocks have {expected}")]
    PayloadLength {
        /// Bytes of a block.
        expected: usize,
        /// Bytes given.
        found: usize,
    },
    /// A note that does not fit beside the key.
    #[error("a note has {found} bytes, but at most {} fit", crate::NOTE_BYTES_MAX)]
    NoteTooLong {
        /// Bytes given.
        found: usize,
    },
    /// Every block that is held is an ancestor of the new one, so that to evict any would leave the new one
    /// without its beginning. The file is unchanged; give it a larger bound.
    #[error("all {capacity} blocks of the file are ancestors of the new one: give it a larger bound")]
    Full {
        /// Blocks that fit.
        capacity: usize,
    },
}
