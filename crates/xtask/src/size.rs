//! `cargo xtask size`: the bytes of the tracked files.

use crate::{Result, workspace};

/// A fresh clone stays a matter of seconds; the bundled demo vault is most of it.
const MAX_BYTES: u64 = 45_000_000;
/// Files to name.
const SHOWN: usize = 5;

/// Runs the command.
pub fn run() -> Result<()> {
    let root = workspace::root();
    let names = workspace::git(&["ls-files", "-z"])?;
    let mut files: Vec<(u64, &str)> = names
        .split('\0')
        .filter(|name| !name.is_empty())
        // A file that was removed and is still in the index has no bytes.
        .filter_map(|name| Some((root.join(name).symlink_metadata().ok()?.len(), name)))
        .collect();
    files.sort_unstable_by(|a, b| b.cmp(a));
    let total: u64 = files.iter().map(|(bytes, _)| bytes).sum();
    for (bytes, name) in files.iter().take(SHOWN) {
        println!("{bytes:>12}  {name}");
    }
    println!("{total:>12}  in {} tracked files; {MAX_BYTES} are allowed", files.len());
    if total > MAX_BYTES {
        return Err(format!("{} bytes too many are tracked", total - MAX_BYTES).into());
    }
    Ok(())
}
