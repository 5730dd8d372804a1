//! Chores of the project: `cargo xtask ...`. Development only, never shipped.
//!
//! | command | what it shows |
//! | --- | --- |
//! | `fidelity` | what each bit width does to the demo model's answers, and to a larger model's text and JSON |
//! | `mutate` | that no damaged or hostile vault crashes, hangs or silently changes the mathematics |
//! | `kill-sculpt` | that a sculpt killed at any moment goes on to the same bytes |
//! | `aarch64` | that the kernels of aarch64 give the bits of the definition, by emulation |
//! | `macos` | that everything type-checks for macOS |
//! | `size` | that the repository stays small |
#![forbid(unsafe_code)]
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "commands for developers at a terminal")]

mod aarch64;
mod fidelity;
mod kill_sculpt;
mod macos;
mod mutate;
mod size;
mod toolchain;
mod workspace;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// What commands return.
type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Chores of the project.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Perplexity and KL divergence of a checkpoint's vaults, by bits
    Fidelity(fidelity::Args),
    /// Mutate vaults; nothing may crash, hang, or change the logits unnoticed
    Mutate(mutate::Args),
    /// Kill the real binary's sculpt at random moments; the vault must come out the same
    KillSculpt(kill_sculpt::Args),
    /// Run tests for aarch64 in qemu, those of the kernels by default
    Aarch64(aarch64::Args),
    /// Type-check the workspace for Apple Silicon
    Macos(macos::Args),
    /// Add up the tracked files; too many bytes fail
    Size,
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Fidelity(args) => fidelity::run(&args),
        Command::Mutate(args) => mutate::run(&args),
        Command::KillSculpt(args) => kill_sculpt::run(&args),
        Command::Aarch64(args) => aarch64::run(&args),
        Command::Macos(args) => macos::run(&args),
        Command::Size => size::run(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
