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
use std::io::{self, BufReader, Read, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::{Mutex, MutexGuard};

use sha2::{Digest as _, Sha256};

/// Lengths of a record's head and of its checksum.
const HEAD: usize = 16;
const CHECK: usize = 8;

/// Where the file has the part of a file that begins at an offset: first byte, and how many.
type Parts = HashMap<(String, u64), (u64, usize)>;

/// The parts and the file that they are in. Only their places are in memory: what decides the codes of a large model is
/// some hundred MB.
#[derive(Debug)]
pub(crate) struct Samples {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    file: File,
    parts: Parts,
    /// Bytes of the file.
    end: u64,
}

impl Samples {
    /// Opens or begins the file at `path`.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().create(true).read(true).append(true).open(path)?;
        let (parts, end) = parse(&mut BufReader::new(&file))?;
        file.set_len(end)?;
        Ok(Self { state: Mutex::new(State { file, parts, end }) })
    }

    /// True if there is a part of that many bytes at `offset` of `file`.
    pub fn has(&self, file: &str, offset: u64, bytes: usize) -> bool {
        let state = self.state();
        state.parts.get(&(file.to_owned(), offset)).is_some_and(|(_, len)| bytes <= *len)
    }

    /// Fills `out` with the part at `offset` of `file`; false if there is none of that length.
    pub fn get(&self, file: &str, offset: u64, out: &mut [u8]) -> io::Result<bool> {
        let state = self.state();
        let Some(&(at, len)) = state.parts.get(&(file.to_owned(), offset)) else { return Ok(false) };
        if out.len() > len {
            return Ok(false);
        }
        state.file.read_exact_at(out, at)?;
        Ok(true)
    }

    pub fn put(&self, file: &str, offset: u64, part: &[u8]) -> io::Result<()> {
        let mut record = Vec::with_capacity(HEAD + file.len() + part.len() + CHECK);
        record.extend_from_slice(&(file.len() as u32).to_le_bytes());
        record.extend_from_slice(&(part.len() as u32).to_le_bytes());
        record.extend_from_slice(&offset.to_le_bytes());
        record.extend_from_slice(file.as_bytes());
        record.extend_from_slice(part);
        record.extend_from_slice(&check(&record));
        let mut state = self.state();
        state.file.write_all(&record)?;
        let at = state.end + (HEAD + file.len()) as u64;
        state.end += record.len() as u64;
        state.parts.insert((file.to_owned(), offset), (at, part.len()));
        Ok(())
    }

    /// All parts of a file: offset and bytes.
    pub fn of(&self, file: &str) -> Vec<(u64, usize)> {
        let state = self.state();
        let own = state.parts.iter().filter(|((name, _), _)| name == file);
        own.map(|((_, offset), (_, len))| (*offset, *len)).collect()
    }

    /// Forgets everything.
    pub fn clear(&self) -> io::Result<()> {
        let mut state = self.state();
        state.parts.clear();
        state.end = 0;
        state.file.set_len(0)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("nobody panics with it")
    }
}

fn check(record: &[u8]) -> [u8; CHECK] {
    let mut check = [0; CHECK];
    check.copy_from_slice(&Sha256::digest(record)[..CHECK]);
    check
}

/// The places of the parts, and how many bytes are whole records.
fn parse(input: &mut dyn Read) -> io::Result<(Parts, u64)> {
    let mut parts = Parts::new();
    let mut end = 0;
    let mut record = Vec::new();
    while let Some((name, offset, part)) = read_record(input, &mut record)? {
        let at = end + (HEAD + name.len()) as u64;
        end += (record.len() + CHECK) as u64;
        parts.insert((name, offset), (at, part));
    }
    Ok((parts, end))
}

/// Reads one record into `record`, without its checksum: name, offset, bytes of the part; None if it is not whole.
fn read_record(input: &mut dyn Read, record: &mut Vec<u8>) -> io::Result<Option<(String, u64, usize)>> {
    record.clear();
    if Read::take(&mut *input, HEAD as u64).read_to_end(record)? < HEAD {
        return Ok(None);
    }
    let number = |at: usize| u32::from_le_bytes([record[at], record[at + 1], record[at + 2], record[at + 3]]);
    let (name, part) = (number(0) as usize, number(4) as usize);
    let offset = u64::from(number(8)) | u64::from(number(12)) << 32;
    let body = name as u64 + part as u64;
    if Read::take(&mut *input, body).read_to_end(record)? as u64 != body {
        return Ok(None);
    }
    let mut sum = Vec::with_capacity(CHECK);
    Read::take(&mut *input, CHECK as u64).read_to_end(&mut sum)?;
    if sum != check(record) {
        return Ok(None);
    }
    Ok(String::from_utf8(record[HEAD..HEAD + name].to_vec()).ok().map(|name| (name, offset, part)))
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
        let get = |samples: &Samples, file: &str, offset: u64, bytes: usize| {
            let mut out = vec![0; bytes];
            let found = samples.get(file, offset, &mut out).expect("read");
            assert_eq!(samples.has(file, offset, bytes), found);
            found.then_some(out)
        };
        for len in 0..=whole.len() {
            std::fs::write(&path, &whole[..len]).expect("cut");
            let cut = Samples::open(&path).expect("open");
            if let Some(found) = get(&cut, "a", 5, 5) {
                assert_eq!(found, b"hello");
            }
            assert_eq!(get(&cut, "a", 1 << 40, 300).is_some(), len == whole.len());
            // What is put after a torn record is found again.
            cut.put("c", 9, b"more").expect("put");
            assert_eq!(get(&cut, "c", 9, 4).as_deref(), Some(&b"more"[..]), "{len}");
            drop(cut);
            let again = Samples::open(&path).expect("open");
            assert_eq!(get(&again, "c", 9, 4).as_deref(), Some(&b"more"[..]), "{len}");
            assert!(get(&again, "c", 9, 5).is_none());
        }
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 0x10;
            std::fs::write(&path, &damaged).expect("damage");
            let found = Samples::open(&path).expect("open");
            for (offset, bytes) in found.of("a") {
                let part = get(&found, "a", offset, bytes).expect("listed");
                assert!(part == b"hello" || part == [7; 300]);
            }
            found.clear().expect("clear");
            assert!(get(&found, "a", 5, 5).is_none() && found.of("a").is_empty());
            found.put("a", 5, b"again").expect("put");
            assert_eq!(get(&found, "a", 5, 5).as_deref(), Some(&b"again"[..]));
        }
    }
}
