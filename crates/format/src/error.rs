//! What can be wrong with the bytes of a vault.

use crate::ExpertKey;

/// A vault, or a part of it, that cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FormatError {
    /// The file ends before a structure does.
    #[error("{what} at offset {offset} needs {needed} bytes, the file has {available}")]
    Truncated {
        /// Which structure.
        what: &'static str,
        /// Where it starts.
        offset: u64,
        /// Its length in bytes.
        needed: u64,
        /// Bytes that there are from `offset` on.
        available: u64,
    },
    /// A magic number is not there.
    #[error("no {what} at offset {offset}: found {found:02x?}")]
    Magic {
        /// Which structure.
        what: &'static str,
        /// Where it was expected.
        offset: u64,
        /// The bytes found.
        found: Vec<u8>,
    },
    /// A version that this build does not read.
    #[error("vault version {found} is not known; this build reads versions 1 to 3")]
    Version {
        /// The version found.
        found: u32,
    },
    /// The checksum of header and tables is wrong.
    #[error("header and tables are damaged: checksum {found:08x}, expected {expected:08x}")]
    HeadChecksum {
        /// The checksum that the file states.
        expected: u32,
        /// The checksum of its bytes.
        found: u32,
    },
    /// A field has a value that cannot be.
    #[error("{what} at offset {offset}: {found} is not valid ({rule})")]
    Field {
        /// Which field.
        what: &'static str,
        /// Offset of its structure.
        offset: u64,
        /// The value found.
        found: String,
        /// What it would have to be.
        rule: String,
    },
    /// The expert table does not list every expert of every MoE layer exactly once.
    #[error("{key}: {what}")]
    Record {
        /// The expert.
        key: ExpertKey,
        /// What is wrong with its entry.
        what: String,
    },
    /// An entropy-coded record contradicts itself.
    #[error("{tensor}: {what}")]
    Coded {
        /// Gate, up or down.
        tensor: &'static str,
        /// What is wrong with it.
        what: &'static str,
    },
    /// The config block is not what it should be.
    #[error("config block: {what}")]
    Config {
        /// What is wrong.
        what: String,
    },
    /// The backbone file's header is not what it should be.
    #[error("backbone: {what}")]
    Backbone {
        /// What is wrong.
        what: String,
    },
    /// A tensor of the backbone is missing or has another shape than the model needs.
    #[error("backbone tensor `{name}`: {what}")]
    Tensor {
        /// Its name.
        name: String,
        /// What is wrong with it.
        what: String,
    },
}
