//! `cargo xtask macos`: the whole workspace, with its tests, type-checked for Apple Silicon on another system.
//!
//! Nothing is linked or run: it shows that what is written for macOS alone is valid, not that it works. What it
//! takes is a compiler with Rust's standard library for the target, or with its source:
//!
//! 1. the toolchain in use, if it has the library or `rustup` can add it; then clippy looks, too;
//! 2. Debian's compiler, if it is installed with its source;
//! 3. the same, fetched with `apt-get download` and unpacked below `target/`: nothing is installed.
//!
//! No C compiler for the target is needed: no build script of the workspace compiles C there.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use crate::{Result, workspace};

const TARGET: &str = "aarch64-apple-darwin";
const SOURCE: &str = "lib/rustlib/src/rust/library/Cargo.lock";
/// Debian's compiler, and the names that those of its own libraries begin with.
const PACKAGES: [&str; 2] = ["rustc-web", "rust-web-src"];
const LIBRARIES: [&str; 2] = ["libstd-rust-web", "libllvm"];

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
    let toolchain = if args.fetch { Toolchain::fetched()? } else { Toolchain::find()? };
    println!("{}", toolchain.describe());
    let what = if args.package.is_empty() { "the workspace".to_owned() } else { args.package.join(", ") };
    let status = toolchain.check(&args.package).status()?;
    if !status.success() {
        return Err(format!("{TARGET}: {what} does not type-check ({status})").into());
    }
    let took = start.elapsed().as_secs_f64();
    println!("{TARGET}: {what} type-checks, tests included; nothing was run; {took:.0} s");
    Ok(())
}

/// A compiler for the target.
struct Toolchain {
    rustc: OsString,
    /// The folder of its shared libraries, if the system does not know it.
    libraries: Option<PathBuf>,
    kind: Kind,
}

enum Kind {
    /// It has the standard library; with or without clippy.
    Library { clippy: bool },
    /// It has the library's source, which cargo compiles: stable toolchains do when told to pass for others.
    Source,
}

impl Toolchain {
    fn find() -> Result<Self> {
        let rustc = env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
        if !has_library(&rustc) {
            // Fails quietly where there is no rustup, or no network.
            let _ = output("rustup", &["target", "add", TARGET]);
        }
        if has_library(&rustc) {
            let clippy = output(cargo(), &["clippy", "--version"]).is_some();
            return Ok(Self { rustc, libraries: None, kind: Kind::Library { clippy } });
        }
        for rustc in [rustc, "/usr/bin/rustc".into()] {
            let root = output(&rustc, &["--print", "sysroot"]);
            if root.is_some_and(|root| Path::new(&root).join(SOURCE).is_file()) {
                return Ok(Self { rustc, libraries: None, kind: Kind::Source });
            }
        }
        Self::fetched()
    }

    /// Debian's compiler, unpacked below `target/`.
    fn fetched() -> Result<Self> {
        let folder = target_folder().join("macos-toolchain");
        let rustc = folder.join("usr/bin/rustc");
        let complete = folder.join("complete");
        if !complete.is_file() {
            println!("fetching Debian's compiler into {}", folder.display());
            fetch(&folder)?;
            fs::write(complete, "")?;
        }
        let libraries = format!("usr/lib/{}-linux-gnu", env::consts::ARCH);
        let libraries = Some(folder.join(libraries));
        Ok(Self { rustc: rustc.into(), libraries, kind: Kind::Source })
    }

    fn describe(&self) -> String {
        let mut command = Command::new(&self.rustc);
        self.environment(&mut command);
        let version = command.arg("--version").output().map(|o| o.stdout).unwrap_or_default();
        let how = match self.kind {
            Kind::Library { clippy: true } => "standard library as installed, with clippy",
            Kind::Library { clippy: false } => "standard library as installed",
            Kind::Source => "standard library compiled here",
        };
        format!("{}, {how}", String::from_utf8_lossy(&version).trim())
    }

    fn environment(&self, command: &mut Command) {
        if let Some(folder) = &self.libraries {
            command.env("LD_LIBRARY_PATH", folder);
        }
    }

    /// The command that checks packages, or all.
    fn check(&self, packages: &[String]) -> Command {
        let mut command = Command::new(cargo());
        self.environment(&mut command);
        let clippy = matches!(self.kind, Kind::Library { clippy: true });
        command.current_dir(workspace::root());
        command.args([if clippy { "clippy" } else { "check" }, "--all-targets", "--target", TARGET]);
        if packages.is_empty() {
            command.arg("--workspace");
        }
        for package in packages {
            command.args(["--package", package]);
        }
        command.env("RUSTC", &self.rustc);
        // Not the folder of other builds, which another compiler would start anew.
        command.env("CARGO_TARGET_DIR", target_folder().join("macos"));
        match self.kind {
            Kind::Library { .. } => {}
            Kind::Source => {
                command.arg("-Zbuild-std").env("RUSTC_BOOTSTRAP", "1");
            }
        }
        if clippy {
            command.args(["--", "-D", "warnings"]);
        }
        command
    }
}

/// Downloads the packages and unpacks them into `folder`.
fn fetch(folder: &Path) -> Result<()> {
    let missing =
        || "missing: a compiler with the library for the target, or its source, and apt-get to fetch one";
    let depends = [
        "depends",
        "--recurse",
        "--no-recommends",
        "--no-suggests",
        "--no-conflicts",
        "--no-breaks",
        "--no-replaces",
        "--no-enhances",
        PACKAGES[0],
    ];
    let listed = output("apt-cache", &depends).ok_or_else(missing)?;
    // Of what it depends on, its own libraries; the C library and the like are on every system.
    let own = listed.lines().filter(|name| LIBRARIES.iter().any(|prefix| name.starts_with(prefix)));
    let archives = folder.join("archives");
    fs::create_dir_all(&archives)?;
    let status = Command::new("apt-get")
        .current_dir(&archives)
        .args(["-q", "download"])
        .args(PACKAGES)
        .args(own)
        .status()?;
    if !status.success() {
        return Err(format!("apt-get download: {status}").into());
    }
    for archive in fs::read_dir(&archives)? {
        let archive = archive?.path();
        let status = Command::new("dpkg-deb").arg("-x").arg(&archive).arg(folder).status()?;
        if !status.success() {
            return Err(format!("dpkg-deb -x {}: {status}", archive.display()).into());
        }
        fs::remove_file(archive)?;
    }
    Ok(())
}

/// The cargo in use: Debian's is not needed, and wants libraries of its own.
fn cargo() -> OsString {
    env::var_os("CARGO").unwrap_or_else(|| "cargo".into())
}

fn target_folder() -> PathBuf {
    env::var_os("CARGO_TARGET_DIR").map_or_else(|| workspace::root().join("target"), PathBuf::from)
}

fn has_library(rustc: &OsStr) -> bool {
    let Some(folder) = output(rustc, &["--print", "target-libdir", "--target", TARGET]) else { return false };
    let Ok(files) = Path::new(&folder).read_dir() else { return false };
    files.flatten().any(|file| file.file_name().to_string_lossy().starts_with("libstd-"))
}

/// What a program prints, trimmed; nothing if it fails or does not exist.
fn output(program: impl AsRef<OsStr>, arguments: &[&str]) -> Option<String> {
    let output = Command::new(program).args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}
