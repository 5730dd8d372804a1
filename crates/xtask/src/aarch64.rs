//! `cargo xtask aarch64`: the tests of the kernels, built for aarch64 Linux and run by qemu's user emulation.
//!
//! Once on a processor with everything, once on one without the int8 dot product, where detection must fall
//! back to scalar. Nothing is installed; what is missing is named. Rust's standard library for the target
//! comes with `rustup target add`; where a toolchain has its source only, cargo builds it, which stable
//! toolchains do when told to pass for others.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use crate::{Result, workspace};

const TARGET: &str = "aarch64-unknown-linux-gnu";
const LINKER: &str = "aarch64-linux-gnu-gcc";
const EMULATORS: [&str; 2] = ["qemu-aarch64", "qemu-aarch64-static"];
/// Emulated processors, and the kernels that detection must choose on each.
const PROCESSORS: [(&str, &str); 2] = [("max", "neon"), ("cortex-a53", "scalar")];

/// Runs the command.
pub fn run() -> Result<()> {
    let (tools, toolchain) = (Tools::find(), Toolchain::find());
    let (tools, toolchain) = match (tools, toolchain) {
        (Ok(tools), Ok(toolchain)) => (tools, toolchain),
        (Err(tools), Err(toolchain)) => return Err(format!("{tools}; {toolchain}").into()),
        (Err(missing), _) | (_, Err(missing)) => return Err(missing.into()),
    };
    println!("{}; {}", toolchain.describe(), tools.emulator);
    timed("built", || toolchain.cargo_test(&tools, "max", "neon", &["--no-run"]))?;
    for (processor, kernels) in PROCESSORS {
        println!("{processor}, where {kernels} kernels are expected:");
        timed(processor, || toolchain.cargo_test(&tools, processor, kernels, &[]))?;
    }
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
    fn find() -> std::result::Result<Self, String> {
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
                Err(format!(
                    "missing: {} (on Debian: apt-get install qemu-user gcc-aarch64-linux-gnu \
                     libc6-dev-arm64-cross)",
                    missing.join(", ")
                ))
            }
        }
    }
}

/// A cargo and its compiler, and whether they must build the standard library.
struct Toolchain {
    cargo: OsString,
    rustc: OsString,
    build_std: bool,
}

impl Toolchain {
    /// The toolchain in use or Debian's; one that has the library rather than one that has its source.
    fn find() -> std::result::Result<Self, String> {
        let or = |name: &str, default: &str| env::var_os(name).unwrap_or_else(|| default.into());
        let toolchains = [
            (or("CARGO", "cargo"), or("RUSTC", "rustc")),
            ("/usr/bin/cargo".into(), "/usr/bin/rustc".into()),
        ];
        let find = |build_std: bool, has: fn(&OsString) -> bool| {
            let found = toolchains.iter().find(|(_, rustc)| has(rustc));
            found.map(|(cargo, rustc)| Self { cargo: cargo.clone(), rustc: rustc.clone(), build_std })
        };
        find(false, has_std).or_else(|| find(true, has_source)).ok_or_else(|| {
            format!(
                "missing: Rust's standard library for {TARGET}, or its source (rustup target add {TARGET}; \
                 on Debian: apt-get install rustc-web cargo-web rust-web-src)"
            )
        })
    }

    fn describe(&self) -> String {
        let version = output(&self.rustc, &["--version"]).unwrap_or_default();
        let library = if self.build_std { "built here" } else { "as installed" };
        format!("{version}, standard library {library}")
    }

    /// `cargo test` of the kernels on an emulated processor.
    fn cargo_test(&self, tools: &Tools, processor: &str, kernels: &str, arguments: &[&str]) -> Result<()> {
        let target =
            env::var_os("CARGO_TARGET_DIR").map_or_else(|| workspace::root().join("target"), PathBuf::from);
        let runner = format!("{} -cpu {processor} -L {}", tools.emulator, tools.prefix.display());
        let mut command = Command::new(&self.cargo);
        command.current_dir(workspace::root());
        command.args(["test", "--release", "--package", "smoe-kernels", "--tests", "--target", TARGET]);
        command.args(arguments);
        command.env("RUSTC", &self.rustc);
        // Not the folder of other builds, which another compiler would start anew.
        command.env("CARGO_TARGET_DIR", target.join("aarch64"));
        command.env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", LINKER);
        command.env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER", runner);
        command.env("SMOE_EXPECTED_KERNELS", kernels);
        if self.build_std {
            command.arg("-Zbuild-std").env("RUSTC_BOOTSTRAP", "1");
        }
        let status = command.status()?;
        if status.success() { Ok(()) } else { Err(format!("cargo test for {processor}: {status}").into()) }
    }
}

fn has_std(rustc: &OsString) -> bool {
    let Some(folder) = output(rustc, &["--print", "target-libdir", "--target", TARGET]) else { return false };
    let Ok(files) = Path::new(&folder).read_dir() else { return false };
    files.flatten().any(|file| file.file_name().to_string_lossy().starts_with("libstd-"))
}

fn has_source(rustc: &OsString) -> bool {
    let root = output(rustc, &["--print", "sysroot"]);
    root.is_some_and(|root| Path::new(&root).join("lib/rustlib/src/rust/library/Cargo.lock").is_file())
}

/// What a program prints, trimmed; nothing if it fails or does not exist.
fn output(program: impl AsRef<std::ffi::OsStr>, arguments: &[&str]) -> Option<String> {
    let output = Command::new(program).args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}
