//! The other APIs and the instruments over real connections.
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

#[path = "../common/mod.rs"]
mod common;

mod anthropic;
mod instruments;
mod ollama;
mod openapi;
