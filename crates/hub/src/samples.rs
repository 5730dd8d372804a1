//! Small parts of files that were asked for before the files come, kept so that the next run need not ask again.
//!
//! One file of records, each appended whole:
//!
//! ```text
//! u32 length of the name, u32 length of the part, u64 offset, name, part, first 8 bytes of the SHA-256 of all this
//! ```
//!
//! A record that does not check, and what comes after it, is as if it were not there.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use sha2::{Digest as _, Sha256};

/// Lengths of a record's head and of its checksum.
const HEAD: usize = 16;
const CHECK: usize = 8;

type Parts = HashMap<(String, u64), Vec<u8>>;

/// The parts and the file that they are in.
#[derive(Debug)]
pub(crate) struct Samples {
    path: PathBuf,
    state: Mutex<(File, Parts)>,
}

impl Samples {
    /// Opens or begins the file at `path`.
    pub fn open(path: &Path) -> io::Result<Self> {
        let bytes = match std::fs::read(path) {
            Ok(bytes) => bytes,
            Err(e) if e.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(e) => return Err(e),
        };
        let (parts, whole) = parse(&bytes);
        let file = OpenOptions::new().create(true).append(true).open(path)?;
        file.set_len(whole as u64)?;
        Ok(Self { path: path.to_owned(), state: Mutex::new((file, parts)) })
    }

    /// The part of `bytes` bytes at `offset` of `file`.
    pub fn get(&self, file: &str, offset: u64, bytes: usize) -> Option<Vec<u8>> {
        let state = self.state.lock().expect("nobody panics with it");
        let part = state.1.get(&(file.to_owned(), offset))?;
        part.get(..bytes).map(<[u8]>::to_vec)
    }

    pub fn put(&self, file: &str, offset: u64, part: &[u8]) -> io::Result<()> {
        let mut record = Vec::with_capacity(HEAD + file.len() + part.len() + CHECK);
        record.extend_from_slice(&(file.len() as u32).to_le_bytes());
        record.extend_from_slice(&(part.len() as u32).to_le_bytes());
        record.extend_from_slice(&offset.to_le_bytes());
        record.extend_from_slice(file.as_bytes());
        record.extend_from_slice(part);
        record.extend_from_slice(&check(&record));
        let mut state = self.state.lock().expect("nobody panics with it");
        state.0.write_all(&record)?;
        state.1.insert((file.to_owned(), offset), part.to_vec());
        Ok(())
    }

    /// All parts of a file: offset and bytes.
    pub fn of(&self, file: &str) -> Vec<(u64, Vec<u8>)> {
        let state = self.state.lock().expect("nobody panics with it");
        let own = state.1.iter().filter(|((name, _), _)| name == file);
        own.map(|((_, offset), part)| (*offset, part.clone())).collect()
    }

    /// Forgets everything.
    pub fn clear(&self) -> io::Result<()> {
        let mut state = self.state.lock().expect("nobody panics with it");
        state.1.clear();
        std::fs::remove_file(&self.path)?;
        state.0 = OpenOptions::new().create(true).append(true).open(&self.path)?;
        Ok(())
    }
}

fn check(record: &[u8]) -> [u8; CHECK] {
    let mut check = [0; CHECK];
    check.copy_from_slice(&Sha256::digest(record)[..CHECK]);
    check
}

/// The parts, and how much of the bytes are whole records.
fn parse(bytes: &[u8]) -> (Parts, usize) {
    let mut parts = Parts::new();
    let mut at = 0;
    while let Some((name, offset, part, len)) = record(&bytes[at..]) {
        parts.insert((name, offset), part);
        at += len;
    }
    (parts, at)
}

fn record(bytes: &[u8]) -> Option<(String, u64, Vec<u8>, usize)> {
    let number = |at: usize| Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?) as usize);
    let (name, part) = (number(0)?, number(4)?);
    let offset = u64::from_le_bytes(bytes.get(8..HEAD)?.try_into().ok()?);
    let end = HEAD.checked_add(name)?.checked_add(part)?;
    let body = bytes.get(..end)?;
    if bytes.get(end..end + CHECK)? != check(body) {
        return None;
    }
    let text = String::from_utf8(body[HEAD..HEAD + name].to_vec()).ok()?;
    Some((text, offset, body[HEAD + name..].to_vec(), end + CHECK))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_put_is_there_again_and_a_torn_end_is_not() {
        let dir = tempfile::tempdir().expect("dir");
        let path = dir.path().join("samples");
        let samples = Samples::open(&path).expect("open");
        samples.put("a", 5, b"hello").expect("put");
        samples.put("b", 0, b"").expect("put");
        samples.put("a", 1 << 40, &[7; 300]).expect("put");
        drop(samples);
        let whole = std::fs::read(&path).expect("read");
        for len in 0..=whole.len() {
            std::fs::write(&path, &whole[..len]).expect("cut");
            let cut = Samples::open(&path).expect("open");
            if let Some(found) = cut.get("a", 5, 5) {
                assert_eq!(found, b"hello");
            }
            assert_eq!(cut.get("a", 1 << 40, 300).is_some(), len == whole.len());
            // What is put after a torn record is found again.
            cut.put("c", 9, b"more").expect("put");
            drop(cut);
            let again = Samples::open(&path).expect("open");
            assert_eq!(again.get("c", 9, 4).as_deref(), Some(&b"more"[..]), "{len}");
            assert!(again.get("c", 9, 5).is_none());
        }
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 0x10;
            std::fs::write(&path, &damaged).expect("damage");
            let found = Samples::open(&path).expect("open");
            assert!(found.of("a").iter().all(|(_, part)| part == b"hello" || part == &[7; 300]));
            found.clear().expect("clear");
            assert!(found.get("a", 5, 5).is_none() && found.of("a").is_empty());
        }
    }
}
