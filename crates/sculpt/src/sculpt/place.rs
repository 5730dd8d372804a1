//! Where a vault goes: its directory, the room there, and its name once it is finished.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use smoe_format::expert_file::Provenance;

use crate::error::{SculptError, Warning};
use crate::partial::{Partial, differs, hidden, remove_vault_files};
use crate::plan::parent_of;
use crate::progress::Progress;
use crate::vault::Existing;

/// Left free on the disk beyond what the vault needs.
pub(super) const RESERVE: u64 = 64 << 20;

/// Where the vault really goes: links are followed, so that the work lies on its disk and a replaced vault
/// is the one that is meant.
pub(crate) fn place(vault: &Path) -> Result<PathBuf, SculptError> {
    let Ok(entry) = fs::symlink_metadata(vault) else { return Ok(vault.to_owned()) };
    let refuse = |what: &str| SculptError::Place { vault: vault.to_owned(), what: what.to_owned() };
    let real = match fs::canonicalize(vault) {
        Ok(real) => real,
        Err(_) if entry.is_symlink() => return Err(refuse("is a link that leads nowhere; remove it")),
        Err(e) => return Err(SculptError::io("read", vault)(e)),
    };
    let device = |path: &Path| fs::metadata(path).map(|m| m.dev()).map_err(SculptError::io("read", path));
    // A finished vault takes its name by a rename, which cannot replace a mount point.
    if real.is_dir() && device(&real)? != device(parent_of(&real))? {
        return Err(refuse("is a mount point; name a directory below it"));
    }
    Ok(real)
}

/// True if `vault` is complete and of this provenance; an error if it is another's.
pub(crate) fn is_complete(vault: &Path, provenance: &Provenance) -> Result<bool, SculptError> {
    match Existing::at(vault)? {
        Existing::Nothing => Ok(false),
        Existing::Other => Err(SculptError::NotAVault { path: vault.to_owned() }),
        Existing::Damaged(what) => Err(SculptError::DamagedVault { vault: vault.to_owned(), what }),
        Existing::Vault(file) => {
            let Some(manifest) = file.manifest() else {
                let what = format!("it is a version {} file", file.version);
                return Err(SculptError::DamagedVault { vault: vault.to_owned(), what });
            };
            match differs(&manifest.source, provenance) {
                None => Ok(true),
                Some((what, found, expected)) => {
                    Err(SculptError::OtherVault { vault: vault.to_owned(), what, found, expected })
                }
            }
        }
    }
}

/// Gives the finished directory the vault's name, in one step; an old vault goes aside first and is
/// removed after.
pub(crate) fn give_name(partial: &Partial, vault: &Path, progress: &dyn Progress) -> Result<(), SculptError> {
    let parent = parent_of(vault);
    // An empty directory of this name is simply replaced.
    if let Existing::Vault(_) | Existing::Damaged(_) = Existing::at(vault)? {
        let mut aside = old_names(vault)?;
        let old = aside
            .find(|old| fs::symlink_metadata(old).is_err())
            .expect("there are more numbers than directories");
        fs::rename(vault, &old).map_err(SculptError::io("rename", vault))?;
    }
    fs::rename(&partial.dir, vault).map_err(SculptError::io("rename", &partial.dir))?;
    File::open(parent).and_then(|dir| dir.sync_all()).map_err(SculptError::io("write", parent))?;
    remove_old(vault, progress)
}

/// `.NAME.old-1`, `.NAME.old-2`, ...: where replaced vaults are until they are removed.
fn old_names(vault: &Path) -> Result<impl Iterator<Item = PathBuf>, SculptError> {
    let first = hidden(vault, "old")?;
    Ok((1..=u32::MAX).map(move |n| {
        let mut name = first.clone().into_os_string();
        name.push(format!("-{n}"));
        PathBuf::from(name)
    }))
}

/// Removes replaced vaults, also those that an earlier run was killed before removing. What else is in their
/// directories stays.
pub(super) fn remove_old(vault: &Path, progress: &dyn Progress) -> Result<(), SculptError> {
    let is_ours = |old: &PathBuf| fs::symlink_metadata(old).is_ok_and(|entry| entry.is_dir());
    for old in old_names(vault)?.take_while(is_ours) {
        remove_vault_files(&old, &[])?;
        if fs::remove_dir(&old).is_err() {
            progress.warn(&Warning::LeftBehind { path: old }.to_string());
        }
    }
    Ok(())
}

/// Free bytes of the disk that `path` is on.
pub(super) fn available(path: &Path) -> Result<u64, SculptError> {
    let stat = rustix::fs::statvfs(path).map_err(|e| SculptError::io("read", path)(e.into()))?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// The nearest directory above `vault` that is there already.
pub(crate) fn existing_ancestor(vault: &Path) -> &Path {
    parent_of(vault).ancestors().find(|dir| dir.is_dir()).unwrap_or(Path::new("."))
}

pub(crate) fn check_space(path: &Path, bytes: u64) -> Result<(), SculptError> {
    let (needed, available) = (bytes.saturating_add(RESERVE), available(path)?);
    if needed > available {
        return Err(SculptError::Space { path: path.to_owned(), needed, available });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_without_space_is_named_with_what_is_needed() {
        let here = Path::new(".");
        assert!(check_space(here, 0).is_ok() || available(here).expect("statvfs") < RESERVE);
        match check_space(here, u64::MAX / 2) {
            Err(SculptError::Space { path, needed, available }) => {
                assert_eq!((path.as_path(), needed), (here, u64::MAX / 2 + RESERVE));
                assert!(available < needed);
            }
            other => panic!("{other:?}"),
        }
    }
}
