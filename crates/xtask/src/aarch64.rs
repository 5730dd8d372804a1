//! `cargo xtask aarch64`: tests built for aarch64 Linux and run by qemu's user emulation.
//!
//! Once for each kind of processor that detection tells apart; on each it must choose the kernels that are named here,
//! and every set below them is tested too. What is emulated shows that results are right, and nothing of speed. Tests that
//! start themselves a second time (`store`'s of a killed process) cannot be emulated. A linker or an emulator that is
//! missing is named, and has to be installed.

use std::path::PathBuf;
use std::time::Instant;

use crate::Result;
use crate::toolchain::{Toolchain, output};

const TARGET: &str = "aarch64-unknown-linux-gnu";
const LINKER: &str = "aarch64-linux-gnu-gcc";
const EMULATORS: [&str; 2] = ["qemu-aarch64", "qemu-aarch64-static"];
/// Emulated processors, and the kernels that detection must choose on each: one with everything, one without int8
/// matrix products, one without the int8 dot product either.
const PROCESSORS: [(&str, &str); 3] =
    [("max", "neon-i8mm"), ("neoverse-n1", "neon"), ("cortex-a53", "scalar")];

/// Arguments of `cargo xtask aarch64`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Fetch Debian's compiler, even if there is another that would do
    #[arg(long)]
    fetch: bool,
    /// Packages to test
    #[arg(short, long, value_name = "NAME", default_values = ["smoe-kernels", "smoe-format"])]
    package: Vec<String>,
    /// Processors of qemu to test on
    #[arg(long, value_name = "NAME", default_values = PROCESSORS.map(|(name, _)| name))]
    cpu: Vec<String>,
    /// Arguments for the tests, as a filter of names
    #[arg(last = true)]
    test: Vec<String>,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let tools = Tools::find()?;
    let toolchain = if args.fetch { Toolchain::fetched(TARGET) } else { Toolchain::find(TARGET) }?;
    println!("{}; {}", toolchain.describe(), tools.emulator);
    timed("built", || tools.cargo_test(&toolchain, args, "max", &["--no-run"]))?;
    for processor in &args.cpu {
        println!("on {processor}:");
        timed(processor, || tools.cargo_test(&toolchain, args, processor, &[]))?;
    }
    println!("{TARGET}: tests of {} pass on {}", args.package.join(", "), args.cpu.join(", "));
    Ok(())
}

fn timed(what: &str, work: impl FnOnce() -> Result<()>) -> Result<()> {
    let start = Instant::now();
    work()?;
    println!("{what}: {:.0} s", start.elapsed().as_secs_f64());
    Ok(())
}

/// What links and runs programs for the target.
struct Tools {
    emulator: &'static str,
    /// The folder whose `lib` has the target's C library.
    prefix: PathBuf,
}

impl Tools {
    fn find() -> Result<Self> {
        let emulator = EMULATORS.into_iter().find(|name| output(name, &["--version"]).is_some());
        // A bare name in return means that there is no such file.
        let start_file = output(LINKER, &["-print-file-name=crt1.o"]).map(PathBuf::from);
        let prefix = start_file.and_then(|file| {
            let file = file.canonicalize().ok()?;
            Some(file.parent()?.parent()?.to_owned())
        });
        match (emulator, prefix) {
            (Some(emulator), Some(prefix)) => Ok(Self { emulator, prefix }),
            (emulator, prefix) => {
                let mut missing = Vec::new();
                if emulator.is_none() {
                    missing.push(EMULATORS[0]);
                }
                if prefix.is_none() {
                    missing.push("aarch64-linux-gnu-gcc with a C library");
                }
                let missing = missing.join(", ");
                let packages = "qemu-user gcc-aarch64-linux-gnu libc6-dev-arm64-cross";
                Err(format!("missing: {missing} (on Debian: apt-get install {packages})").into())
            }
        }
    }

    /// `cargo test` of the packages on an emulated processor.
    fn cargo_test(
        &self,
        toolchain: &Toolchain,
        args: &Args,
        processor: &str,
        arguments: &[&str],
    ) -> Result<()> {
        let mut command = toolchain.cargo("test");
        command.args(["--release", "--tests"]).args(arguments);
        for package in &args.package {
            command.args(["--package", package]);
        }
        command.arg("--").args(&args.test);
        let runner = format!("{} -cpu {processor} -L {}", self.emulator, self.prefix.display());
        command.env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", LINKER);
        command.env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER", runner);
        if let Some((_, kernels)) = PROCESSORS.iter().find(|(name, _)| *name == processor) {
            command.env("SMOE_EXPECTED_KERNELS", kernels);
        }
        let status = command.status()?;
        if status.success() { Ok(()) } else { Err(format!("cargo test for {processor}: {status}").into()) }
    }
}
