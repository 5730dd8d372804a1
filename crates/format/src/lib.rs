//! The bytes of a vault: encodings of weights, tiles, records, header, tables, checksums, versions.
//!
//! Pure functions from bytes to types and back; `docs/FORMAT.md` is this crate in prose. It knows
//! nothing of files, threads, SIMD or what a layer does with its weights.
#![forbid(unsafe_code)]

pub mod encoding;
pub mod half;
pub mod tile;

pub use encoding::{Encoding, Uniform, Zero};
