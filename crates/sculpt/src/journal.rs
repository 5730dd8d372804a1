//! The list of finished pieces beside unfinished work.
//!
//! One line per piece, each with its own checksum; a line is appended only after the piece's bytes are on the
//! disk. What a kill or a power cut tears is the end of the last line: a line that does not check is as if it
//! were not there.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::fs::File;
use std::io::Write as _;
use std::path::Path;

use smoe_format::expert_file::Provenance;

use crate::error::SculptError;

const MAGIC: &str = "smoe-sculpt 2";
/// In the place of a piece, the step of the experts' codes, and as its checksum the bits of that `f32`: what is found by
/// coding experts is not found again.
pub(crate) const STEP: &str = "step";
/// In the place of a piece, what weights decided before the first was coded ([`crate::plan::Plan::decided`]): pieces that
/// were coded by other levels or by another step are of no use.
pub(crate) const DECIDED: &str = "decided";

/// A journal as read.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Journal {
    pub provenance: Provenance,
    /// Which files the pieces were made from ([`crate::Checkpoint::identity`]).
    pub identity: String,
    /// Checksum of each finished piece by name.
    pub pieces: HashMap<String, u32>,
}

/// A line for `text`.
fn push_line(lines: &mut String, text: &str) {
    writeln!(lines, "{text} {:08x}", smoe_format::crc::crc32c(text.as_bytes())).expect("strings grow");
}

/// The line of a finished piece.
pub(crate) fn push_piece(lines: &mut String, name: &str, crc: u32) {
    push_line(lines, &format!("{name} {crc:08x}"));
}

fn header(provenance: &Provenance, identity: &str) -> String {
    format!("{MAGIC} {identity} {} {}", provenance.fingerprint, provenance.settings)
}

impl Journal {
    /// Reads a journal; `None` if its first line does not check.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let mut lines = bytes.split(|&b| b == b'\n').map(checked);
        let header = lines.next()??.strip_prefix(MAGIC)?.strip_prefix(' ')?;
        let (identity, header) = header.split_once(' ')?;
        let (fingerprint, settings) = header.split_once(' ')?;
        let provenance = Provenance { fingerprint: fingerprint.to_owned(), settings: settings.to_owned() };
        let pieces = lines
            .flatten()
            .filter_map(|text| {
                let (name, crc) = text.rsplit_once(' ')?;
                Some((name.to_owned(), u32::from_str_radix(crc, 16).ok()?))
            })
            .collect();
        Some(Self { provenance, identity: identity.to_owned(), pieces })
    }

    /// Writes a new journal with `lines` of pieces at `path`, in one step, and returns it open for appending.
    pub fn create(
        path: &Path,
        provenance: &Provenance,
        identity: &str,
        lines: &str,
    ) -> Result<File, SculptError> {
        let mut text = String::new();
        push_line(&mut text, &header(provenance, identity));
        text.push_str(lines);
        let new = path.with_extension("new");
        let mut file = File::create(&new).map_err(SculptError::io("create", &new))?;
        file.write_all(text.as_bytes()).map_err(SculptError::io("write", &new))?;
        file.sync_all().map_err(SculptError::io("write", &new))?;
        std::fs::rename(&new, path).map_err(SculptError::io("rename", &new))?;
        Ok(file)
    }
}

/// The text of a line, if its checksum is right.
fn checked(line: &[u8]) -> Option<&str> {
    let (text, crc) = std::str::from_utf8(line).ok()?.rsplit_once(' ')?;
    let right =
        crc.len() == 8 && u32::from_str_radix(crc, 16) == Ok(smoe_format::crc::crc32c(text.as_bytes()));
    right.then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn torn_and_garbled_lines_are_as_if_they_were_not_there() {
        let dir = tempfile::tempdir().expect("dir");
        let path = dir.path().join("journal");
        let provenance = Provenance { fingerprint: "abc".to_owned(), settings: "codec=1 x=2".to_owned() };
        let mut lines = String::new();
        for i in 0..5 {
            push_piece(&mut lines, &format!("expert 1 {i}"), i * 1000);
        }
        drop(Journal::create(&path, &provenance, "id", &lines).expect("written"));
        let bytes = std::fs::read(&path).expect("read");
        let whole = Journal::parse(&bytes).expect("whole");
        assert_eq!((&whole.provenance, whole.identity.as_str()), (&provenance, "id"));
        assert_eq!(whole.pieces.len(), 5);
        assert_eq!(whole.pieces["expert 1 3"], 3000);
        let first = bytes.iter().position(|&b| b == b'\n').expect("line");
        for len in 0..bytes.len() {
            match Journal::parse(&bytes[..len]) {
                None => assert!(len < first),
                Some(cut) => {
                    assert!(cut.pieces.len() <= 5);
                    assert!(cut.pieces.iter().all(|(name, crc)| whole.pieces[name] == *crc));
                }
            }
        }
        for at in first + 1..bytes.len() {
            for bit in 0..8 {
                let mut garbled = bytes.clone();
                garbled[at] ^= 1 << bit;
                let found = Journal::parse(&garbled).expect("header");
                // A hexadecimal digit of a line's checksum means the same in upper case.
                assert!(found.pieces.iter().all(|(name, crc)| whole.pieces.get(name) == Some(crc)));
                assert!(found.pieces.len() >= 3);
            }
        }
    }
}
