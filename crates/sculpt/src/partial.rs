//! The unfinished work beside a vault, `.NAME.partial/`: its lock, its files, and what is done already.

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use smoe_format::expert_file::Provenance;
use smoe_format::file_name;

use crate::error::SculptError;
use crate::journal::{self, Journal};
use crate::plan::parent_of;
use crate::settings::codec_of;
use crate::vault;

pub(crate) const JOURNAL: &str = "journal";
/// Finished pieces are made durable so many times in a sculpt...
const DURABLE_TIMES: u64 = 32;
/// ... but not for less than this (a flush costs some milliseconds), and at the latest after this: what a
/// power cut can cost.
const DURABLE_BYTES: (u64, u64) = (256 << 10, 64 << 20);

/// The directory of unfinished work, locked.
#[derive(Debug)]
pub(crate) struct Partial {
    pub dir: PathBuf,
    /// Holds the lock; stays the same through the final rename.
    handle: File,
}

/// What was found in it.
pub(crate) enum Found {
    /// Nothing of use.
    Nothing,
    /// Finished pieces and their checksums.
    Pieces(HashMap<String, u32>),
    /// A whole vault that only lacks its last check and its name.
    Whole,
}

impl Partial {
    /// Where the unfinished work of `vault` is.
    pub fn path(vault: &Path) -> Result<PathBuf, SculptError> {
        hidden(vault, "partial")
    }

    /// Creates the directory if need be and locks it.
    pub fn lock(vault: &Path) -> Result<Self, SculptError> {
        let dir = Self::path(vault)?;
        let parent = parent_of(vault);
        fs::create_dir_all(parent).map_err(SculptError::io("create", parent))?;
        loop {
            match fs::create_dir(&dir) {
                Err(e) if e.kind() != io::ErrorKind::AlreadyExists => {
                    return Err(SculptError::io("create", &dir)(e));
                }
                _ => {}
            }
            let handle = match File::open(&dir) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                other => other.map_err(SculptError::io("open", &dir))?,
            };
            match handle.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => return Err(SculptError::Busy { partial: dir }),
                Err(TryLockError::Error(e)) => return Err(SculptError::io("lock", &dir)(e)),
            }
            // Another process may have given the directory its final name between open and lock.
            let mine = handle.metadata().map_err(SculptError::io("read", &dir))?;
            match fs::metadata(&dir) {
                Ok(there) if (there.dev(), there.ino()) == (mine.dev(), mine.ino()) => {
                    return Ok(Self { dir, handle });
                }
                _ => {}
            }
        }
    }

    /// Refuses what is none of a sculpt's files: it would be in the vault, or seem damage at the end.
    ///
    /// # Errors
    /// Names the first stranger.
    pub fn refuse_strangers(&self) -> Result<(), SculptError> {
        let ours = [file_name::EXPERTS, file_name::BACKBONE, JOURNAL, "journal.new"];
        for entry in fs::read_dir(&self.dir).map_err(SculptError::io("read", &self.dir))? {
            let entry = entry.map_err(SculptError::io("read", &self.dir))?;
            let name = entry.file_name();
            if !ours.iter().chain(&file_name::SIDE_FILES).any(|known| name == *known) {
                return Err(SculptError::Stranger { path: entry.path() });
            }
        }
        Ok(())
    }

    /// A file in it.
    pub fn file(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Looks at what an earlier run left for this plan.
    ///
    /// With `force`, only pieces that were made from these very files are of use; without it, others are an
    /// error. The fingerprint samples the experts, so it cannot tell that. Pieces for which weights had decided something
    /// else than `decided` are never of use: rows that are asked for ahead of their file may have been wrong.
    pub fn inspect(
        &self,
        provenance: &Provenance,
        identity: &str,
        decided: u32,
        force: bool,
    ) -> Result<Found, SculptError> {
        let path = self.file(JOURNAL);
        let found = match fs::read(&path) {
            Ok(bytes) => match Journal::parse(&bytes) {
                Some(mut journal) if differs(&journal.provenance, provenance).is_none() => {
                    if journal.identity == identity {
                        let same = journal.pieces.remove(journal::DECIDED) == Some(decided);
                        return Ok(if same { Found::Pieces(journal.pieces) } else { Found::Nothing });
                    }
                    if force {
                        return Ok(Found::Nothing);
                    }
                    return Err(SculptError::OtherPartial {
                        partial: self.dir.clone(),
                        what: "checkpoint files that were written anew since",
                        found: journal.identity,
                        expected: identity.to_owned(),
                    });
                }
                Some(journal) => journal.provenance,
                None => return Ok(Found::Nothing),
            },
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                // The journal goes last, when everything else is in place.
                match vault::read_head(&self.file(file_name::EXPERTS)) {
                    Ok((file, _)) => match file.manifest() {
                        Some(manifest) => manifest.source.clone(),
                        None => return Ok(Found::Nothing),
                    },
                    Err(_) => return Ok(Found::Nothing),
                }
            }
            Err(e) => return Err(SculptError::io("read", &path)(e)),
        };
        match differs(&found, provenance) {
            None if force => Ok(Found::Nothing),
            None => Ok(Found::Whole),
            Some(_) if force => Ok(Found::Nothing),
            Some((what, found, expected)) => {
                Err(SculptError::OtherPartial { partial: self.dir.clone(), what, found, expected })
            }
        }
    }

    /// Removes everything that a sculpt writes.
    pub fn clear(&self) -> Result<(), SculptError> {
        remove_vault_files(&self.dir, &[JOURNAL, "journal.new"])
    }

    /// Makes changes of names durable.
    pub fn sync(&self) -> Result<(), SculptError> {
        self.handle.sync_all().map_err(SculptError::io("write", &self.dir))
    }

    /// Opens a data file for positioned reads and writes and gives it its length.
    pub fn data_file(&self, name: &str, len: u64) -> Result<File, SculptError> {
        let path = self.file(name);
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(SculptError::io("create", &path))?;
        file.set_len(len).map_err(SculptError::io("write", &path))?;
        Ok(file)
    }
}

/// In what two provenances differ: what, found, expected.
pub(crate) fn differs(found: &Provenance, expected: &Provenance) -> Option<(&'static str, String, String)> {
    let short = |s: &str| s.chars().take(12).collect::<String>();
    if found.fingerprint != expected.fingerprint {
        return Some(("another checkpoint", short(&found.fingerprint), short(&expected.fingerprint)));
    }
    if found.settings == expected.settings {
        return None;
    }
    let (earlier, same) = (codec_of(&found.settings), codec_of(&expected.settings));
    let what = match (earlier, same) {
        (Some((a, rest)), Some((b, same))) if a < b && rest == same => {
            "the codes of an earlier version, otherwise the same, and can be used as it is"
        }
        _ => "other settings",
    };
    Some((what, found.settings.clone(), expected.settings.clone()))
}

/// `.NAME.SUFFIX` beside `vault`.
pub(crate) fn hidden(vault: &Path, suffix: &str) -> Result<PathBuf, SculptError> {
    let name = vault.file_name().ok_or_else(|| SculptError::NotAVault { path: vault.to_owned() })?;
    let mut hidden = std::ffi::OsString::from(".");
    hidden.push(name);
    hidden.push(".");
    hidden.push(suffix);
    Ok(parent_of(vault).join(hidden))
}

/// Removes the files of a vault, and `more`, from `dir`; strangers stay.
pub(crate) fn remove_vault_files(dir: &Path, more: &[&str]) -> Result<(), SculptError> {
    let names = [file_name::EXPERTS, file_name::BACKBONE].into_iter().chain(file_name::SIDE_FILES);
    for name in more.iter().copied().chain(names) {
        let path = dir.join(name);
        match fs::remove_file(&path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(SculptError::io("remove", &path)(e)),
            _ => {}
        }
    }
    Ok(())
}

/// The journal as the workers write it.
pub(crate) struct Ledger<'a> {
    path: PathBuf,
    journal: Mutex<File>,
    /// Files whose bytes must be on disk before a line is.
    data: [&'a File; 2],
    pending: Mutex<Pending>,
    /// Bytes after which pieces are made durable.
    every: u64,
}

#[derive(Default)]
struct Pending {
    lines: String,
    bytes: u64,
}

impl<'a> Ledger<'a> {
    /// A ledger for `total` bytes of pieces.
    pub fn new(path: PathBuf, journal: File, data: [&'a File; 2], total: u64) -> Self {
        let every = (total / DURABLE_TIMES).clamp(DURABLE_BYTES.0, DURABLE_BYTES.1);
        Self { path, journal: Mutex::new(journal), data, pending: Mutex::new(Pending::default()), every }
    }

    /// Notes a finished piece whose bytes are written.
    pub fn finished(&self, name: &str, crc: u32, bytes: u64) -> Result<(), SculptError> {
        let full = {
            let mut pending = self.pending.lock().expect("no worker panics");
            journal::push_piece(&mut pending.lines, name, crc);
            pending.bytes += bytes;
            pending.bytes >= self.every
        };
        if full { self.flush() } else { Ok(()) }
    }

    /// Makes all finished pieces durable, and then their lines.
    pub fn flush(&self) -> Result<(), SculptError> {
        let mut journal = self.journal.lock().expect("no worker panics");
        let Pending { lines, .. } = std::mem::take(&mut *self.pending.lock().expect("no worker panics"));
        if lines.is_empty() {
            return Ok(());
        }
        for file in self.data {
            file.sync_data().map_err(SculptError::io("write", &self.path))?;
        }
        journal
            .write_all(lines.as_bytes())
            .and_then(|()| journal.sync_data())
            .map_err(SculptError::io("write", &self.path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_earlier_codec_is_told_from_other_settings() {
        let of = |settings: &str| Provenance { fingerprint: "f".to_owned(), settings: settings.to_owned() };
        let what = |found: &str, expected: &str| differs(&of(found), &of(expected)).map(|(what, ..)| what);
        assert_eq!(what("codec=3 experts=q4/64", "codec=3 experts=q4/64"), None);
        let earlier = what("codec=2 experts=q4/64", "codec=3 experts=q4/64");
        assert!(earlier.is_some_and(|what| what.contains("earlier version")), "{earlier:?}");
        for (found, expected) in [
            ("codec=3 experts=q4/64", "codec=2 experts=q4/64"),
            ("codec=2 experts=q3/64", "codec=3 experts=q4/64"),
            ("nothing", "codec=3 experts=q4/64"),
        ] {
            assert_eq!(what(found, expected), Some("other settings"), "{found}");
        }
    }
}
