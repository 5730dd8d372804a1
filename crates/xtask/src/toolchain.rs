//! Compilers for other targets than this machine's, with what is at hand:
//!
//! 1. the toolchain in use, if it has the target's standard library or `rustup` can add it;
//! 2. the toolchain in use or Debian's, if it has the library's source, which cargo compiles;
//! 3. Debian's with that source, fetched with `apt-get download` and unpacked below `target/`: nothing is installed.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{Result, workspace};

const SOURCE: &str = "lib/rustlib/src/rust/library/Cargo.lock";
/// Debian's compiler, and the names that those of its own libraries begin with.
const PACKAGES: [&str; 2] = ["rustc-web", "rust-web-src"];
const LIBRARIES: [&str; 2] = ["libstd-rust-web", "libllvm"];

/// A compiler for a target.
pub struct Toolchain {
    target: &'static str,
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
    /// The first of those above that there is.
    pub fn find(target: &'static str) -> Result<Self> {
        let rustc = env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
        if !has_library(&rustc, target) {
            // Fails quietly where there is no rustup, or no network.
            let _ = output("rustup", &["target", "add", target]);
        }
        if has_library(&rustc, target) {
            let clippy = output(cargo(), &["clippy", "--version"]).is_some();
            return Ok(Self { target, rustc, libraries: None, kind: Kind::Library { clippy } });
        }
        for rustc in [rustc, "/usr/bin/rustc".into()] {
            let root = output(&rustc, &["--print", "sysroot"]);
            if root.is_some_and(|root| Path::new(&root).join(SOURCE).is_file()) {
                return Ok(Self { target, rustc, libraries: None, kind: Kind::Source });
            }
        }
        Self::fetched(target)
    }

    /// Debian's compiler, unpacked below `target/`.
    pub fn fetched(target: &'static str) -> Result<Self> {
        let folder = target_folder().join("debian-toolchain");
        let rustc = folder.join("usr/bin/rustc");
        let complete = folder.join("complete");
        if !complete.is_file() {
            println!("fetching Debian's compiler into {}", folder.display());
            fetch(&folder)?;
            fs::write(complete, "")?;
        }
        let libraries = format!("usr/lib/{}-linux-gnu", env::consts::ARCH);
        let libraries = Some(folder.join(libraries));
        Ok(Self { target, rustc: rustc.into(), libraries, kind: Kind::Source })
    }

    /// The compiler's version, and where the standard library comes from.
    pub fn describe(&self) -> String {
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

    /// True if there is a clippy that looks at code for the target.
    pub const fn has_clippy(&self) -> bool {
        matches!(self.kind, Kind::Library { clippy: true })
    }

    /// A command of cargo for the target, in the workspace.
    pub fn cargo(&self, subcommand: &str) -> Command {
        let mut command = Command::new(cargo());
        self.environment(&mut command);
        command.current_dir(workspace::root());
        command.args([subcommand, "--target", self.target]);
        command.env("RUSTC", &self.rustc);
        // Not the folder of other builds, which another compiler would start anew.
        command.env("CARGO_TARGET_DIR", target_folder().join("cross"));
        if matches!(self.kind, Kind::Source) {
            command.arg("-Zbuild-std").env("RUSTC_BOOTSTRAP", "1");
        }
        command
    }

    fn environment(&self, command: &mut Command) {
        if let Some(folder) = &self.libraries {
            command.env("LD_LIBRARY_PATH", folder);
        }
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

fn has_library(rustc: &OsStr, target: &str) -> bool {
    let Some(folder) = output(rustc, &["--print", "target-libdir", "--target", target]) else { return false };
    let Ok(files) = Path::new(&folder).read_dir() else { return false };
    files.flatten().any(|file| file.file_name().to_string_lossy().starts_with("libstd-"))
}

/// What a program prints, trimmed; nothing if it fails or does not exist.
pub fn output(program: impl AsRef<OsStr>, arguments: &[&str]) -> Option<String> {
    let output = Command::new(program).args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}
