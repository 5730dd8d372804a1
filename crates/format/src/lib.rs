//! The bytes of a vault: encodings of weights, tiles, records, header, tables, checksums, versions.
//!
//! Pure functions from bytes to types and back; `docs/FORMAT.md` is this crate in prose. It knows
//! nothing of files, threads, SIMD or what a layer does with its weights.
#![forbid(unsafe_code)]

pub mod backbone;
pub mod crc;
pub mod encoding;
pub mod entropy;
mod error;
pub mod expert_file;
pub mod half;
pub mod original;
pub mod sarc;
pub mod spec;
pub mod table;
pub mod tile;
mod wire;

pub use backbone::{Backbone, BackboneTensor};
pub use encoding::{Encoding, Uniform, Zero};
pub use error::FormatError;
pub use expert_file::{ExpertFile, LayerTable, Projection, RecordEntry, TensorEntry};
pub use spec::{FfnKind, ModelSpec};
pub use table::Table;

/// A routed expert's name: which layer, which of its experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ExpertKey {
    /// Index of the transformer layer, dense layers counted.
    pub layer: u32,
    /// Index of the expert in its layer.
    pub expert: u32,
}

impl std::fmt::Display for ExpertKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "layer {} expert {}", self.layer, self.expert)
    }
}

/// Records start and end at multiples of this: Apple's page, and a multiple of every device's block.
pub const RECORD_ALIGN: usize = 16 * 1024;

/// File names inside a vault directory.
pub mod file_name {
    /// Routed experts: header, tables and records.
    pub const EXPERTS: &str = "experts.smoe";
    /// Everything else that is a weight.
    pub const BACKBONE: &str = "backbone.safetensors";
    /// What travels with a checkpoint, verbatim, where the checkpoint has it.
    pub const SIDE_FILES: [&str; 6] = [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "chat_template.json",
    ];
}

/// Checksum of an expert record: crc32c over the layer and expert ids (two little-endian u32) and then all
/// bytes of the record, padding included, so that a record in another's place does not pass.
#[must_use]
pub fn record_crc(key: ExpertKey, bytes: &[u8]) -> u32 {
    crc::crc32c_append(record_crc_start(key), bytes)
}

/// The checksum of a record before its first byte, for those who have its bytes piece by piece and append
/// them with [`crc::crc32c_append`].
#[must_use]
pub fn record_crc_start(key: ExpertKey) -> u32 {
    let mut seed = [0; 8];
    seed[..4].copy_from_slice(&key.layer.to_le_bytes());
    seed[4..].copy_from_slice(&key.expert.to_le_bytes());
    crc::crc32c(&seed)
}
