//! What can go wrong between a vault and a token.

use std::path::PathBuf;

use smoe_format::FormatError;
use smoe_store::{BlockFileError, DiskError, OutOfMemory, StoreError};

/// An engine error: what happened, where, and what to change.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// A file cannot be opened or read.
    #[error("{}: {source}", file.display())]
    Io {
        /// The file.
        file: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// A path is neither a vault directory nor an original `.smoe` file.
    #[error("{} is no vault: {what}", path.display())]
    NotAVault {
        /// The path.
        path: PathBuf,
        /// What is missing.
        what: String,
    },
    /// A file of the vault has wrong bytes.
    #[error("{}: {source}", file.display())]
    Format {
        /// The file.
        file: PathBuf,
        /// What is wrong.
        source: FormatError,
    },
    /// A file does not have the length or checksum that the vault lists.
    #[error("{} is damaged: {what}; `smoe verify` tells more", file.display())]
    Damaged {
        /// The file.
        file: PathBuf,
        /// Expected and found.
        what: String,
    },
    /// Reading an expert failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Reading a file failed.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// A device failed, or there is none.
    #[cfg(feature = "gpu")]
    #[error(transparent)]
    Gpu(#[from] smoe_gpu::GpuError),
    /// A card failed, or there is none, or no driver.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Cuda(#[from] smoe_cuda::CudaError),
    /// A device failed, and the processor took over: the keys and values that it held are computed again. A warning.
    #[error("{why}: going on on the processor, where conversations are computed again")]
    DeviceLost {
        /// The device, and what it said.
        why: String,
    },
    /// A model does not fit into a device's memory.
    #[error(
        "{device} has {} for a model that needs at least {} there; a shorter --context needs less, and \
         --device cpu none of it",
        crate::plan::Bytes(*given),
        crate::plan::Bytes(*floor)
    )]
    DeviceBudget {
        /// The device.
        device: String,
        /// What is needed.
        floor: u64,
        /// What there is.
        given: u64,
    },
    /// The file of the KV cache cannot be used.
    #[error(transparent)]
    Spill(#[from] BlockFileError),
    /// The bound of the file of the KV cache has no room for one state of the model's linear attention.
    #[error(
        "a file of {} holds no conversation of this model, whose linear attention has a large state: give it {} or \
         more (--kv-cache-size)",
        crate::plan::Bytes(*max_bytes), crate::plan::Bytes(*needed)
    )]
    SpillTooSmall {
        /// The bound.
        max_bytes: u64,
        /// Bytes of a file with one state and its block.
        needed: u64,
    },
    /// The file of the KV cache failed again and again: conversations are kept in memory only from here on.
    #[error("the file of the KV cache failed {failures} times and is not used any more: {source}")]
    SpillGivenUp {
        /// Reads and writes that failed.
        failures: u64,
        /// The last failure.
        source: BlockFileError,
    },
    /// The system has no room for the resident weights.
    #[error(transparent)]
    OutOfMemory(#[from] OutOfMemory),
    /// A trace of the routing cannot be kept.
    #[error(transparent)]
    Trace(#[from] smoe_store::replay::TraceError),
    /// The memory plan does not fit.
    #[error(
        "the model needs at least {} of memory with these settings, {} may be used: raise --memory, or lower \
         --context, --chunk or --ring",
        crate::plan::Bytes(*floor), crate::plan::Bytes(*given)
    )]
    Budget {
        /// The least that works, in bytes.
        floor: u64,
        /// What may be used, in bytes.
        given: u64,
    },
    /// A setting is out of range.
    #[error("{name} {value}: {rule}")]
    Setting {
        /// The flag.
        name: &'static str,
        /// What was given.
        value: String,
        /// What it must be.
        rule: String,
    },
    /// A sampling setting is out of range.
    #[error("{name} is {value}, it must be {rule}")]
    Sampling {
        /// The setting.
        name: &'static str,
        /// What was given.
        value: String,
        /// What it must be.
        rule: &'static str,
    },
    /// A token id that the model does not have.
    #[error("token {id} is not in the vocabulary of {vocab_size}")]
    Token {
        /// The id.
        id: u32,
        /// Size of the vocabulary.
        vocab_size: usize,
    },
    /// The model needs something that this build does not have.
    #[error("{what} is not supported")]
    Unsupported {
        /// What it needs.
        what: String,
    },
    /// Nothing to continue from.
    #[error("the prompt is empty: give at least one token")]
    EmptyPrompt,
    /// The conversation does not fit the context.
    #[error("{needed} tokens do not fit the context of {context}: raise --context or drop older turns")]
    ContextFull {
        /// Tokens that would be held.
        needed: usize,
        /// Positions that there are.
        context: usize,
    },
    /// Every session slot is taken.
    #[error("no session is free: {sessions} are open")]
    NoSession {
        /// How many there may be.
        sessions: usize,
    },
    /// As many jobs wait as may.
    #[error("the queue is full: {queued} jobs wait")]
    QueueFull {
        /// How many wait.
        queued: usize,
    },
    /// A grammar knows no way on.
    #[error("the constraint on the answer failed: {what}")]
    Constraint {
        /// In its own words.
        what: String,
    },
    /// The request was cancelled; what was computed is kept.
    #[error("cancelled")]
    Cancelled,
    /// A hidden state or a logit is not a number: the weights, or a kernel, are broken.
    #[error("what was computed at position {position} is not finite")]
    NotFinite {
        /// Position in the session.
        position: usize,
    },
}
