//! Checkpoints that arrive from a model hub while they are sculpted.
//!
//! ```text
//!        hub ── listing: names, lengths, hashes ──► Pull ◄── sculpt: WeightFiles
//!         ├──── small files, whole ───────────────► DIR/config.json ...
//!         ├──── ranges: headers, samples ─────────► DIR/model-00007.safetensors.part, DIR/samples
//!         └──── one file, and the next ───────────► .part ── hash is right ──► the file ── sculpted ──► gone
//! ```
//!
//! [`Pull`] is a directory in which the weight files of a repository seem to lie. A file that is needed is on the
//! disk, whole and with the hash that the hub's listing gives it; at most one more is on its way; what was used is
//! removed. Everything that was received stays in the directory until then, so that whoever stops the work, the next
//! run goes on from the last byte.
//!
//! This room knows HTTP and a hub's API. It does not know what is in a file. It does not print or exit.
#![forbid(unsafe_code)]

mod client;
mod error;
mod listing;
mod pull;
mod samples;
mod url;

pub use client::Patience;
pub use error::HubError;
pub use pull::{Options, Pull, Watch};
