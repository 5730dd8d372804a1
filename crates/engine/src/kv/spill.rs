//! Blocks in a file: a conversation is found again after it has been evicted, and after a restart.

use std::collections::{HashMap, VecDeque};
use std::path::PathBuf;

use sha2::{Digest, Sha256};
use smoe_store::{BlockFile, BlockFileConfig, BlockFileError, BlockFileSnapshot, BlockMeta, OpenMode};

use super::prefix::{Key, Node, common};
use crate::EngineError;

/// Writes under way at once; each has a buffer of a block.
const QUEUE: usize = 4;
/// Changes with the arithmetic of keys and values: what an earlier build computed is not what this one would.
const NUMERICS: u32 = 1;

/// Where and how large.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpillConfig {
    /// The file.
    pub path: PathBuf,
    /// The most that it may take, in bytes.
    pub max_bytes: u64,
}

impl SpillConfig {
    /// Memory that writing takes, for blocks of `block_bytes`.
    #[must_use]
    pub const fn memory_bytes(block_bytes: u64) -> u64 {
        QUEUE as u64 * (block_bytes + 4096)
    }
}

/// What was found in the file.
pub type Opened = smoe_store::Opened;

#[derive(Debug)]
pub(super) struct Spill {
    file: BlockFile,
    /// Blocks in the file by the key of what comes before them; some may have been evicted meanwhile.
    children: HashMap<Key, Vec<(Key, Vec<u32>)>>,
    /// Blocks in memory that the file does not have.
    unsaved: VecDeque<(u32, Key)>,
}

impl Spill {
    /// Opens the file for blocks of `block_bytes` of this model in this layout.
    pub(super) fn open(
        config: &SpillConfig,
        block_bytes: usize,
        model: [u8; 32],
        layout: &str,
    ) -> Result<(Self, Opened), EngineError> {
        let mut hash = Sha256::new();
        hash.update(model);
        hash.update(NUMERICS.to_le_bytes());
        hash.update(layout);
        let config_of_file = BlockFileConfig {
            payload_bytes: block_bytes,
            max_bytes: config.max_bytes,
            fingerprint: hash.finalize().into(),
            queue: QUEUE,
            direct: OpenMode::Auto,
        };
        let (file, opened) = BlockFile::open(&config.path, &config_of_file)?;
        let mut spill = Self { file, children: HashMap::new(), unsaved: VecDeque::new() };
        let found: Vec<(Key, Key, Vec<u32>)> = spill
            .file
            .entries()
            .filter_map(|meta| Some((Key(meta.key), Key(meta.parent), tokens(&meta.note)?)))
            // What the key does not name is not what it says.
            .filter(|(key, parent, tokens)| parent.child(tokens) == *key)
            .collect();
        for (key, parent, tokens) in found {
            spill.children.entry(parent).or_default().push((key, tokens));
        }
        Ok((spill, opened))
    }

    /// The block in the file that holds exactly `own` after `parent`.
    pub(super) fn child(&self, parent: Key, own: &[u32]) -> Option<Key> {
        let held = |(key, tokens): &&(Key, Vec<u32>)| tokens == own && self.file.contains(key.0);
        self.children.get(&parent)?.iter().find(held).map(|(key, _)| *key)
    }

    /// The block in the file after `parent` that begins as `own` does for longest, and for how long.
    pub(super) fn longest(&self, parent: Key, own: &[u32]) -> Option<(Key, usize)> {
        let held = self.children.get(&parent)?.iter().filter(|(key, _)| self.file.contains(key.0));
        let lengths = held.map(|(key, tokens)| (*key, common(tokens, own)));
        lengths.max_by_key(|(_, len)| *len).filter(|(_, len)| *len > 0)
    }

    /// Reads blocks into their places of `memory`, all at once; says which came.
    pub(super) fn get(&mut self, wanted: &[(Key, u32)], memory: &mut [u8], stride: usize) -> Vec<bool> {
        let mut places: HashMap<u32, usize> = wanted.iter().enumerate().map(|(i, w)| (w.1, i)).collect();
        let mut slices: Vec<(u128, &mut [u8])> = Vec::with_capacity(wanted.len());
        let mut order = Vec::with_capacity(wanted.len());
        for (id, bytes) in (0..).zip(memory.chunks_exact_mut(stride)) {
            if let Some(i) = places.remove(&id) {
                order.push(i);
                slices.push((wanted[i].0.0, bytes));
            }
        }
        // A file that fails holds nothing: what it should bring is computed.
        let came = self.file.get(&mut slices).unwrap_or_default();
        let mut in_order = vec![false; wanted.len()];
        order.into_iter().zip(came).for_each(|(i, came)| in_order[i] = came);
        in_order
    }

    /// Queues a block for writing; false if the file is busy.
    pub(super) fn put(&mut self, node: &Node, bytes: &[u8]) -> Result<bool, EngineError> {
        let note = node.tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
        let meta = BlockMeta { key: node.key.0, parent: node.parent.0, note };
        // A block that could not be written is not held: it is computed again one day.
        self.file.poll();
        match self.file.put(meta, bytes) {
            Ok(true) => {
                let siblings = self.children.entry(node.parent).or_default();
                let file = &self.file;
                siblings.retain(|(key, _)| *key != node.key && file.contains(key.0));
                siblings.push((node.key, node.tokens.clone()));
                Ok(true)
            }
            Ok(false) => Ok(false),
            // The rest of a conversation that fills the whole file.
            Err(BlockFileError::Full { .. }) => Ok(true),
            Err(error) => Err(error.into()),
        }
    }

    pub(super) fn note_unsaved(&mut self, id: u32, key: Key) {
        self.unsaved.push_back((id, key));
    }

    pub(super) fn put_back(&mut self, id: u32, key: Key) {
        self.unsaved.push_front((id, key));
    }

    pub(super) fn next_unsaved(&mut self) -> Option<(u32, Key)> {
        self.unsaved.pop_front()
    }

    pub(super) fn has_unsaved(&self) -> bool {
        !self.unsaved.is_empty()
    }

    /// Waits until what is queued is on the drive.
    pub(super) fn flush(&mut self) -> Result<(), EngineError> {
        Ok(self.file.flush()?)
    }

    pub(super) fn snapshot(&self) -> BlockFileSnapshot {
        self.file.snapshot()
    }
}

/// The tokens of a note.
fn tokens(note: &[u8]) -> Option<Vec<u32>> {
    let words = note.chunks_exact(4);
    let whole = words.remainder().is_empty() && !note.is_empty() && note.len() <= 4 * super::BLOCK;
    whole.then(|| words.map(|w| u32::from_le_bytes([w[0], w[1], w[2], w[3]])).collect())
}
