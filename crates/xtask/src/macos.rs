//! `cargo xtask macos`: the whole workspace, with its tests, type-checked for Apple Silicon on another system.
//!
//! Nothing is linked or run: it shows that what is written for macOS alone is valid, not that it works. No C compiler
//! for the target is needed: no build script of the workspace compiles C there. With a toolchain that has the target's
//! standard library clippy looks, too.

use std::time::Instant;

use crate::Result;
use crate::toolchain::Toolchain;

const TARGET: &str = "aarch64-apple-darwin";

/// Arguments of `cargo xtask macos`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Fetch Debian's compiler, even if there is another that would do
    #[arg(long)]
    fetch: bool,
    /// Packages to check [default: the workspace]
    #[arg(short, long, value_name = "NAME")]
    package: Vec<String>,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let start = Instant::now();
    let toolchain = if args.fetch { Toolchain::fetched(TARGET) } else { Toolchain::find(TARGET) }?;
    println!("{}", toolchain.describe());
    let what = if args.package.is_empty() { "the workspace".to_owned() } else { args.package.join(", ") };
    let mut command = toolchain.cargo(if toolchain.has_clippy() { "clippy" } else { "check" });
    command.arg("--all-targets");
    if args.package.is_empty() {
        command.arg("--workspace");
    }
    for package in &args.package {
        command.args(["--package", package]);
    }
    if toolchain.has_clippy() {
        command.args(["--", "-D", "warnings"]);
    }
    let status = command.status()?;
    if !status.success() {
        return Err(format!("{TARGET}: {what} does not type-check ({status})").into());
    }
    let took = start.elapsed().as_secs_f64();
    println!("{TARGET}: {what} type-checks, tests included; nothing was run; {took:.0} s");
    Ok(())
}
