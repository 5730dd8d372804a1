//! What tests measure the engine against: a slow reference of another shape, tiny models, goldens.
//!
//! ```text
//! fixtures, checkpoints, vaults ──► Weights ──► reference::forward (f64) ──► golden::compare
//! TinyModel ──► checkpoint or vault on disk
//! ```
//!
//! Development only: no shipped room depends on it. What cannot be read or does not fit panics with the
//! file's name, as a test would want it; nothing here is fast, and nothing here shares arithmetic with the
//! engine beyond `smoe-format`'s codecs.
#![forbid(unsafe_code)]

pub mod fixtures;
pub mod gguf;
pub mod golden;
pub mod mxfp4;
pub mod random;
pub mod reference;
pub mod tiny;
pub mod tolerance;
pub mod vault;
pub mod weights;

pub use fixtures::{shared, shared_path};
pub use golden::{Golden, compare, compare_greedy, compare_routes};
pub use reference::{Forward, forward, greedy};
pub use tiny::TinyModel;
pub use weights::{CheckpointWeights, OriginalWeights, VaultWeights, Weights};

use std::path::Path;

/// The bytes of a file.
pub(crate) fn read(path: &Path) -> Vec<u8> {
    std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Writes a file.
pub(crate) fn write(path: &Path, bytes: &[u8]) {
    std::fs::write(path, bytes).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
}
