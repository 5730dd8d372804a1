//! What a block file is made of, what it holds and what it tells.

use super::BlockFileError;
use super::layout::Geometry;
use crate::disk::DirectIo;
use crate::file_disk::OpenMode;

/// What a block file is made of.
#[derive(Clone, Debug)]
pub struct BlockFileConfig {
    /// Bytes of every payload.
    pub payload_bytes: usize,
    /// The file never becomes longer than this.
    pub max_bytes: u64,
    /// Whatever payloads depend on. A file with another fingerprint is stale, and is started anew.
    pub fingerprint: [u8; 32],
    /// Writes that may be queued, each with a buffer of its own of [`slot_bytes`](Self::slot_bytes).
    pub queue: usize,
    /// Past the page cache or through it.
    pub direct: OpenMode,
}

impl BlockFileConfig {
    /// Bytes that a block takes in the file, and a queued write in memory.
    ///
    /// # Errors
    /// [`BlockFileError::Config`] and [`BlockFileError::TooSmall`], as [`BlockFile::open`](super::BlockFile::open).
    pub fn slot_bytes(&self) -> Result<usize, BlockFileError> {
        Ok(self.geometry()?.slot_bytes)
    }

    /// Bytes of a file of so many blocks.
    ///
    /// # Errors
    /// As [`slot_bytes`](Self::slot_bytes).
    pub fn bytes_of(&self, blocks: u32) -> Result<u64, BlockFileError> {
        Ok(self.geometry()?.offset(blocks))
    }

    pub(super) fn geometry(&self) -> Result<Geometry, BlockFileError> {
        if self.queue == 0 {
            return Err(BlockFileError::Config { setting: "queue" });
        }
        Geometry::new(self.fingerprint, self.payload_bytes, self.max_bytes)
    }
}

/// A block without its payload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockMeta {
    /// Its name. Equal keys mean equal parents, notes and payloads.
    pub key: u128,
    /// The key of the block that it continues, which need not be held; its own key or any that is never held
    /// (0, say) if there is none. Parents form no cycles.
    pub parent: u128,
    /// Anything, up to [`NOTE_BYTES_MAX`](super::NOTE_BYTES_MAX) bytes.
    pub note: Box<[u8]>,
}

/// What was found when a file was opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Opened {
    /// Blocks.
    pub blocks: usize,
    /// Slots whose descriptor was damaged or whose end was cut off.
    pub dropped: usize,
    /// Why the file that was there is of no use and was started anew.
    pub stale: Option<String>,
    /// Whether reads and writes bypass the page cache.
    pub direct_io: DirectIo,
}

/// A block that is no longer held because of the disk.
#[derive(Debug)]
pub struct BlockFailure {
    /// The block.
    pub key: u128,
    /// Why: its write or its read failed.
    pub error: BlockFileError,
}

/// Counts since the file was opened, and what it holds now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockFileSnapshot {
    /// Blocks held.
    pub blocks: usize,
    /// Blocks that can be held. Becomes less if the disk is full before the file has its bound.
    pub capacity: usize,
    /// Blocks whose write is queued or under way.
    pub writing: usize,
    /// Blocks written.
    pub written: u64,
    /// Their bytes in the file.
    pub written_bytes: u64,
    /// Bytes of payloads that were read from the file.
    pub read_bytes: u64,
    /// Blocks asked for that came.
    pub hits: u64,
    /// Blocks asked for that were not held, were damaged or could not be read.
    pub misses: u64,
    /// Blocks that gave way to others.
    pub evicted: u64,
    /// Blocks dropped because their payload was not what had been written.
    pub corrupt: u64,
    /// Reads that the system failed.
    pub read_errors: u64,
    /// Writes that the system failed.
    pub write_errors: u64,
}
