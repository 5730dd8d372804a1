//! Checkpoint to vault: streaming, resumable, verified.
//!
//! A checkpoint (safetensors or GGUF, floats or codes) is read a run of rows at a time, coded, and written to its
//! final place in `.NAME.partial/` beside the vault. A journal there lists the pieces that are on disk with
//! their checksums; whoever stops the work, the next run checks those and does the others, and the bytes come
//! out the same. Only when everything has been read back and compared does the directory get the vault's name.
//!
//! This is the only room that knows tensor names of checkpoints and keys of `config.json`. It does not print,
//! exit, or know the engine.
#![forbid(unsafe_code)]

mod allocate;
pub mod calibrate;
pub mod checkpoint;
mod coded;
mod config;
mod encode;
mod error;
mod family;
pub mod files;
mod journal;
mod measure;
mod partial;
mod plan;
mod progress;
mod quantise;
mod schedule;
mod sculpt;
mod settings;
mod source;
pub mod synth;
mod tokenizer;
mod vault;
pub mod verify;
mod workers;

pub use checkpoint::Checkpoint;
pub use config::spec_from_config;
pub use error::{SculptError, Warning};
pub use files::{OnDisk, WeightFile, WeightFiles, small_files};
pub use measure::{CodeCounts, KindError, compare_codes, measure_error};
pub use progress::Progress;
pub use sculpt::{DryRun, Outcome, dry_run, dry_run_of, read_head, sculpt, sculpt_of};
pub use settings::{BackboneBits, BitsPerWeight, Levels, Recipe, Settings, earlier_codes};
pub use synth::{Shape, SynthOptions, Synthesis, Synthetic, synth, token_stream};
pub use verify::{Damage, Problem, Report, verify};
