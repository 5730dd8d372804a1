//! What the tests share: where files of published models are found.

use std::path::PathBuf;

/// The folder of shared material, or `None` (said aloud) where it is absent. `SMOE_SHARED` names another place.
pub fn shared(part: &str) -> Option<PathBuf> {
    let root = std::env::var_os("SMOE_SHARED").map_or_else(
        || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared")),
        PathBuf::from,
    );
    let path = root.join(part);
    if !path.exists() {
        eprintln!("SKIPPED: {} is absent", path.display());
        return None;
    }
    Some(path)
}
