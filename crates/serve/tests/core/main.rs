//! The core of the server over real connections.
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

#[path = "../common/mod.rs"]
mod common;

mod engine;
mod fleet;
mod openai;
mod server;
