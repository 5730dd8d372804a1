//! The commit that a binary was built from, for bench records.

use std::process::Command;

fn main() {
    let commit = Command::new("git")
        .args(["describe", "--always", "--dirty", "--abbrev=12", "--match", "none"])
        .output()
        .ok();
    let commit = commit.filter(|out| out.status.success()).and_then(|out| String::from_utf8(out.stdout).ok());
    println!("cargo:rustc-env=SMOE_COMMIT={}", commit.as_deref().unwrap_or("unknown").trim());
    println!("cargo:rerun-if-changed=../../.git/logs/HEAD");
    println!("cargo:rerun-if-changed=../../.git/index");
}
