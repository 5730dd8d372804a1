//! The directory of a pull: whose it is, and what it holds parts of.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::HubError;

const LOCK: &str = ".lock";
const STATE: &str = ".state.json";

/// What a directory holds parts of, whichever hub or mirror they are from: a commit has the same files everywhere.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct State {
    pub(super) repo: String,
    pub(super) revision: String,
    pub(super) commit: String,
}

pub(super) fn check_name(repo: &str) -> Result<(), HubError> {
    let part = |part: &str| {
        let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        !part.is_empty() && part.chars().all(allowed) && part.trim_matches('.') == part
    };
    match repo.split_once('/') {
        Some((owner, name)) if part(owner) && part(name) => Ok(()),
        _ => Err(HubError::Name { name: repo.to_owned() }),
    }
}

pub(super) fn lock(dir: &Path) -> Result<File, HubError> {
    let path = dir.join(LOCK);
    let file =
        OpenOptions::new().create(true).append(true).open(&path).map_err(HubError::io("open", &path))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(HubError::Busy { dir: dir.to_owned() }),
        Err(TryLockError::Error(e)) => Err(HubError::io("lock", &path)(e)),
    }
}

pub(super) fn read_state(dir: &Path) -> Result<Option<State>, HubError> {
    let path = dir.join(STATE);
    match fs::read(&path) {
        // One that does not read was never finished: it is renamed into place.
        Ok(bytes) => Ok(serde_json::from_slice(&bytes).ok()),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(HubError::io("read", &path)(e)),
    }
}

pub(super) fn write_state(dir: &Path, state: &State) -> Result<(), HubError> {
    let (path, new) = (dir.join(STATE), dir.join(".state.new"));
    let text = serde_json::to_vec(state).expect("texts are JSON");
    fs::write(&new, text).and_then(|()| fs::rename(&new, &path)).map_err(HubError::io("write", &path))
}

/// Removes what is in `dir`, but for the lock.
pub(super) fn clear(dir: &Path) -> Result<(), HubError> {
    for entry in fs::read_dir(dir).map_err(HubError::io("read", dir))? {
        let entry = entry.map_err(HubError::io("read", dir))?;
        let path = entry.path();
        if entry.file_name() == LOCK {
            continue;
        }
        let removed = if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
        removed.map_err(HubError::io("remove", &path))?;
    }
    Ok(())
}

pub(super) fn length(path: &Path) -> u64 {
    fs::metadata(path).map_or(0, |meta| meta.len())
}
