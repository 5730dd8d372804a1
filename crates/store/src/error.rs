//! What the store reports.

use crate::aligned::OutOfMemory;
use crate::disk::DiskError;
use smoe_format::ExpertKey;
use std::io;
use std::path::PathBuf;

/// Why a store did not open, or an expert did not come.
///
/// Errors of an expert ([`Read`](StoreError::Read), [`Checksum`](StoreError::Checksum),
/// [`Decode`](StoreError::Decode), [`ReaderPanicked`](StoreError::ReaderPanicked)) go to the demand that waits
/// for it; the store itself stays whole, and a later demand reads again.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// A setting that no store can have.
    #[error("{setting} must be at least 1")]
    Config {
        /// The field of [`crate::StoreConfig`].
        setting: &'static str,
    },
    /// A record that cannot be read as the table describes it.
    #[error("{}: {key} at offset {offset}: {why}", file.display())]
    BadRecord {
        /// The file.
        file: PathBuf,
        /// The record's first byte.
        offset: u64,
        /// The expert.
        key: ExpertKey,
        /// What is wrong.
        why: &'static str,
    },
    /// A record that the file is too short for.
    #[error("{}: {key} at offset {offset} ends at {expected}, but the file ends at {found}", file.display())]
    Truncated {
        /// The file.
        file: PathBuf,
        /// The record's first byte.
        offset: u64,
        /// The expert.
        key: ExpertKey,
        /// Where the record ends.
        expected: u64,
        /// Where the file ends.
        found: u64,
    },
    /// A record that does not fit into a slot.
    #[error("{key} needs a slot of {expected} bytes, but slots have {found}")]
    SlotTooSmall {
        /// The expert.
        key: ExpertKey,
        /// Bytes that it needs.
        expected: usize,
        /// Bytes that slots have.
        found: usize,
    },
    /// The arena or a staging buffer does not fit into memory.
    #[error(transparent)]
    OutOfMemory(#[from] OutOfMemory),
    /// A reader thread cannot be started.
    #[error("cannot start a reader thread: {0}")]
    Spawn(#[source] io::Error),
    /// Demanded, but in no record.
    #[error("{0} is not in the vault")]
    UnknownExpert(ExpertKey),
    /// Demanded twice in one batch, or described by two records.
    #[error("{0} is named twice")]
    Duplicate(ExpertKey),
    /// The whole vault was to be loaded, and does not fit.
    #[error("cannot hold all {expected} experts in {found} slots")]
    TooFewSlots {
        /// Experts.
        expected: usize,
        /// Slots.
        found: usize,
    },
    /// Nothing can progress until a lease is dropped: every slot is leased, nothing is in flight, and the
    /// batch wants more. Not final: drop leases, or wait for the device that holds them, and ask again.
    #[error("all slots are held: {leased} of {slots} are leased and the batch wants {wanted} more experts")]
    Stalled {
        /// Slots in the arena.
        slots: usize,
        /// Slots that are leased.
        leased: usize,
        /// Experts of the batch that have no slot yet.
        wanted: usize,
    },
    /// A record could not be read. `source` says what was expected and found.
    #[error("{key}: {source}")]
    Read {
        /// The expert.
        key: ExpertKey,
        /// The record's first byte.
        offset: u64,
        /// Names the file, and what was expected and found.
        source: Box<DiskError>,
    },
    /// A record's bytes are not those that were written, or not this expert's.
    #[error(
        "{}: {key} at offset {offset}: checksum is wrong: expected {expected:08x}, found {found:08x}",
        file.display()
    )]
    Checksum {
        /// The file.
        file: PathBuf,
        /// The record's first byte.
        offset: u64,
        /// The expert.
        key: ExpertKey,
        /// The checksum in the table.
        expected: u32,
        /// The checksum of the bytes read.
        found: u32,
    },
    /// A record's bytes are intact but cannot be decoded.
    #[error("{}: {key} at offset {offset}: {why}", file.display())]
    Decode {
        /// The file.
        file: PathBuf,
        /// The record's first byte.
        offset: u64,
        /// The expert.
        key: ExpertKey,
        /// What the decoder said.
        why: String,
    },
    /// A reader thread panicked over a record: a bug of ours or of a decoder.
    #[error("{}: {key} at offset {offset}: reader panicked: {message}", file.display())]
    ReaderPanicked {
        /// The file.
        file: PathBuf,
        /// The record's first byte.
        offset: u64,
        /// The expert.
        key: ExpertKey,
        /// What it said.
        message: String,
    },
}
