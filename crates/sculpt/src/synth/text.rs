//! The text side of a synthetic vault: another model's tokenizer, templates and generation settings, so that what has
//! random weights can be talked to and served. What it says means nothing.
//!
//! The vocabulary is then the tokenizer's own, without rows for ids that have no token. Special tokens, and gaps
//! between ids, get head rows of zeros: among thousands of random logits 0 is never one of the larger, so that answers
//! are text and end where their length does. (A head that is the embedding keeps its rows.)

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::Path;

use serde_json::Value as Json;
use sha2::{Digest as _, Sha256};
use smoe_format::tile::ROWS;
use smoe_format::{Encoding, file_name};

use crate::error::SculptError;
use crate::progress::Progress;

const TOKENIZER: &str = "tokenizer.json";
/// Of another model's shape: it does not come along.
const CONFIG: &str = "config.json";
/// More ids than any tokenizer has.
const MOST_IDS: usize = 1 << 24;

/// Another model's text.
#[derive(Clone, Debug)]
pub(crate) struct Text {
    /// Side files by name.
    pub files: Vec<(&'static str, Vec<u8>)>,
    /// One more than the tokenizer's highest id.
    pub vocab_size: usize,
    /// Names its exact bytes.
    pub digest: String,
    /// In ascending order.
    mute: Vec<usize>,
}

impl Text {
    /// Reads the side files of a vault or a checkpoint.
    pub fn read(dir: &Path) -> Result<Self, SculptError> {
        let mut files = Vec::new();
        let mut hash = Sha256::new();
        for name in file_name::SIDE_FILES.into_iter().filter(|name| *name != CONFIG) {
            let path = dir.join(name);
            match fs::read(&path) {
                Ok(bytes) => {
                    hash.update(name);
                    hash.update((bytes.len() as u64).to_le_bytes());
                    hash.update(&bytes);
                    files.push((name, bytes));
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(SculptError::io("read", &path)(error)),
            }
        }
        let bad = |what: String| SculptError::Json { path: dir.join(TOKENIZER), what };
        let bytes = files.iter().find(|(name, _)| *name == TOKENIZER).map(|(_, bytes)| bytes);
        let Some(bytes) = bytes else {
            return Err(SculptError::Setting {
                flag: "--text",
                found: dir.display().to_string(),
                expected: "must be a vault or a checkpoint that has a tokenizer.json".to_owned(),
            });
        };
        let json = serde_json::from_slice(bytes).map_err(|error| bad(error.to_string()))?;
        let speaks = speaking(&json).ok_or_else(|| bad("its tokens have no ids".to_owned()))?;
        let mute = (0..speaks.len()).filter(|&id| !speaks[id]).collect();
        let digest = hash.finalize().iter().take(6).map(|byte| format!("{byte:02x}")).collect();
        Ok(Self { files, vocab_size: speaks.len(), digest, mute })
    }

    /// Writes the files into a vault that is being made.
    pub fn write(&self, dir: &Path, progress: &dyn Progress) -> Result<(), SculptError> {
        for (name, bytes) in &self.files {
            let path = dir.join(name);
            let mut file = File::create(&path).map_err(SculptError::io("create", &path))?;
            let written = file.write_all(bytes).and_then(|()| file.sync_all());
            written.map_err(SculptError::io("write", &path))?;
            progress.advance(bytes.len() as u64);
        }
        Ok(())
    }

    /// Makes zeros of the rows in `out` that must not be chosen; `out` are the head's rows from `first` on.
    pub fn mute(&self, encoding: Encoding, first: usize, rows: usize, cols: usize, out: &mut [u8]) {
        let from = self.mute.partition_point(|&id| id < first);
        for row in self.mute[from..].iter().map(|id| id - first).take_while(|row| *row < rows) {
            match encoding.tiles() {
                Some(u) => {
                    let groups = u.groups(cols);
                    let tiles = out.chunks_exact_mut(u.tile_bytes()).skip(row / ROWS * groups).take(groups);
                    // Whatever the codes are.
                    tiles.for_each(|tile| u.write_row(tile, row % ROWS, &[], 0, 0));
                }
                None => {
                    let len = out.len() / rows;
                    out[row * len..(row + 1) * len].fill(0);
                }
            }
        }
    }
}

/// For each id of a `tokenizer.json` whether it is that of a token with a text; `None` if it has no ids.
fn speaking(tokenizer: &Json) -> Option<Vec<bool>> {
    let id = |id: &Json| id.as_u64().and_then(|id| usize::try_from(id).ok()).filter(|id| *id < MOST_IDS);
    let mut speaks = Vec::new();
    let mut mark = |id: usize, is_text: bool| {
        speaks.resize(speaks.len().max(id + 1), false);
        speaks[id] = is_text;
    };
    match tokenizer.pointer("/model/vocab")? {
        Json::Object(vocab) => {
            for token in vocab.values() {
                mark(id(token)?, true);
            }
        }
        // Pairs of token and score: the id is the place.
        Json::Array(vocab) => (0..vocab.len()).for_each(|id| mark(id, true)),
        _ => return None,
    }
    for token in tokenizer["added_tokens"].as_array().into_iter().flatten() {
        mark(id(&token["id"])?, token["special"] != true);
    }
    (!speaks.is_empty()).then_some(speaks)
}
