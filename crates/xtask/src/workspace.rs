//! Where things are, and on what machine.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::Result;

/// The root of the repository.
pub fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().nth(2).unwrap_or(here).to_owned()
}

/// What `git` prints, trimmed.
pub fn git(arguments: &[&str]) -> Result<String> {
    let output = Command::new("git").arg("-C").arg(root()).args(arguments).output()?;
    if !output.status.success() {
        return Err(format!("git {}: {}", arguments.join(" "), output.status).into());
    }
    Ok(String::from_utf8(output.stdout)?.trim().to_owned())
}

/// The commit that is checked out, and whether sources differ from it.
pub fn commit() -> String {
    let Ok(commit) = git(&["rev-parse", "--short=10", "HEAD"]) else { return "unknown".to_owned() };
    match git(&["status", "--porcelain", "--", "crates", "Cargo.toml", "Cargo.lock"]) {
        Ok(changes) if changes.is_empty() => commit,
        _ => format!("{commit} with uncommitted changes"),
    }
}

/// The processor's name.
pub fn cpu() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    name.map_or_else(|| std::env::consts::ARCH.to_owned(), |(_, name)| name.trim().to_owned())
}
