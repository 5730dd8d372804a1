//! Blocks in a file: a conversation is found again after it has been evicted, and after a restart.
//!
//! What is written is copied and goes its own way; what is read is read on the caller's thread, as few blocks at a time
//! as the caller likes. The file is a convenience: one that fails again and again is not used any more.
//!
//! Where layers that see a window have blocks of their own, a block of the file is one of each, and its note ends with a
//! byte that says whether the window's was still there ([`WITH_WINDOW`]). States lie beside the blocks
//! (`spill/states.rs`).

mod states;

use std::collections::VecDeque;
use std::path::PathBuf;
use std::time::Duration;

use sha2::{Digest, Sha256};
use smoe_format::ModelSpec;
use smoe_kernels::KvType;
use smoe_store::{
    AlignedBuf, BlockFile, BlockFileConfig, BlockFileError, BlockFileSnapshot, BlockMeta, OpenMode,
    OutOfMemory,
};

use super::prefix::{Key, Node};
use super::{BLOCK, KvCache, state_shape, windows};
use states::{Pieces, is_piece};
pub(super) use states::{UnsavedState, count};

/// Writes under way at once; each has a buffer of a block.
pub(super) const QUEUE: usize = 4;
/// Failures, with nothing that succeeds among them, after which a file is given up. More than one queue: a drive that is
/// full fails what is under way, and then the file does with what it has.
const REPEATS: usize = 4 * QUEUE;
/// Blocks of two pools that are read at once: as many as the file has threads.
pub(super) const STAGE: usize = 4;
/// Ends the note of a block that came with its window's, and of one that did not; `states::PIECE` is another.
const WITH_WINDOW: u8 = 1;
const WITHOUT_WINDOW: u8 = 0;
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
    /// Memory that writing and reading takes.
    #[must_use]
    pub fn memory_bytes(spec: &ModelSpec, kv_type: KvType) -> u64 {
        let apart = usize::from(windows::width(spec).is_some());
        let block = KvCache::windowed_bytes(spec, kv_type, BLOCK, apart);
        let staged = apart + usize::from(state_shape(spec).is_some());
        QUEUE as u64 * (block + 4096) + (STAGE * staged) as u64 * block
    }
}

/// What was found in the file.
pub type Opened = smoe_store::Opened;

#[derive(Debug)]
pub(super) struct Spill {
    file: BlockFile,
    /// Where the parts of blocks of two pools meet.
    stage: Option<Stage>,
    /// How states lie in the file, if layers keep any.
    pieces: Option<Pieces>,
    /// Blocks in memory that the file does not have, and some that it has or that are gone.
    unsaved: VecDeque<(u32, Key)>,
    /// Blocks and bytes that the file has written and read without a fault.
    good: u64,
    /// Failures since.
    in_a_row: usize,
}

/// Room for some blocks as they are in the file: of so many bytes, and those of a window behind them.
#[derive(Debug)]
struct Stage {
    bytes: AlignedBuf,
    own: usize,
    window: usize,
}

/// A block that is to be read, and the places of its parts that are of use.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted {
    pub(super) key: Key,
    pub(super) own: Option<u32>,
    pub(super) window: Option<u32>,
}

/// What the file's blocks are, beside their size.
pub(super) fn fingerprint(model: [u8; 32], layout: &str) -> [u8; 32] {
    let mut hash = Sha256::new();
    hash.update(model);
    hash.update(NUMERICS.to_le_bytes());
    hash.update(layout);
    hash.finalize().into()
}

/// The settings of a file for blocks of `block_bytes`.
pub(super) fn settings(max_bytes: u64, block_bytes: usize, fingerprint: [u8; 32]) -> BlockFileConfig {
    BlockFileConfig {
        payload_bytes: block_bytes,
        max_bytes,
        fingerprint,
        queue: QUEUE,
        direct: OpenMode::Auto,
    }
}

impl Spill {
    pub(super) fn new(file: BlockFile) -> Self {
        Self { file, stage: None, pieces: None, unsaved: VecDeque::new(), good: 0, in_a_row: 0 }
    }

    /// For blocks of two pools, of so many bytes.
    ///
    /// # Errors
    /// If there is no memory.
    pub(super) fn with_windows(self, own: usize, window: usize) -> Result<Self, OutOfMemory> {
        let bytes = AlignedBuf::zeroed(STAGE * (own + window))?;
        Ok(Self { stage: Some(Stage { bytes, own, window }), ..self })
    }

    /// Whether the file has the block called `key`, which continues `parent`, with its window's.
    pub(super) fn holds_window(&self, parent: Key, key: Key) -> bool {
        self.file.children(parent.0).any(|meta| meta.key == key.0 && meta.note.last() == Some(&WITH_WINDOW))
    }

    /// Whether the file has a block that continues this one.
    pub(super) fn goes_on(&self, key: Key) -> bool {
        self.file.children(key.0).next().is_some()
    }

    /// Whether the file has this block.
    pub(super) fn holds(&self, key: Key) -> bool {
        self.file.contains(key.0)
    }

    /// Notes that a block of the file was used, wherever it came from.
    pub(super) fn touch(&mut self, key: Key) {
        self.file.touch(key.0);
    }

    /// The block in the file after `parent` that begins as `own` does for longest, and for how long. Where windows have
    /// blocks of their own: of those that have theirs.
    pub(super) fn longest(&self, parent: Key, own: &[u32]) -> Option<(Key, usize)> {
        let is_apart = self.stage.is_some();
        let common = |meta: &BlockMeta| {
            let words = meta.note.chunks_exact(4).zip(own);
            words.take_while(|(word, token)| **word == token.to_le_bytes()).count()
        };
        let whole = self.file.children(parent.0).filter(|meta| !is_piece(meta));
        let whole = whole.filter(|meta| !is_apart || meta.note.last() == Some(&WITH_WINDOW));
        let lengths = whole.map(|meta| (meta, common(meta)));
        let (meta, len) = lengths.max_by_key(|(_, len)| *len).filter(|(_, len)| *len > 0)?;
        let words = &meta.note[..meta.note.len() - usize::from(is_apart)];
        // What the key does not name is not what it says.
        (parent.child(&tokens(words)?).0 == meta.key).then_some((Key(meta.key), len))
    }

    /// Reads blocks into their places of `memory`, all at once; says which came.
    pub(super) fn get(&mut self, wanted: &[(Key, u32)], memory: &mut [u8], stride: usize) -> Vec<bool> {
        let mut order: Vec<usize> = (0..wanted.len()).collect();
        order.sort_unstable_by_key(|&i| wanted[i].1);
        let mut slices: Vec<(u128, &mut [u8])> = Vec::with_capacity(wanted.len());
        let (mut rest, mut at) = (memory, 0);
        for &i in &order {
            let (key, id) = (wanted[i].0, wanted[i].1 as usize);
            let (bytes, behind) = rest.split_at_mut((id - at) * stride).1.split_at_mut(stride);
            slices.push((key.0, bytes));
            (rest, at) = (behind, id + 1);
        }
        // A file that fails holds nothing: what it should bring is computed.
        let came = self.file.get(&mut slices).unwrap_or_default();
        let mut in_order = vec![false; wanted.len()];
        order.into_iter().zip(came).for_each(|(i, came)| in_order[i] = came);
        in_order
    }

    /// Reads blocks of two pools, each part into its place of that pool's memory; says which came.
    pub(super) fn get_parts(
        &mut self,
        wanted: &[Wanted],
        own_memory: &mut [u8],
        window_memory: &mut [u8],
    ) -> Vec<bool> {
        let Some(Stage { bytes, own, window }) = &mut self.stage else { return vec![false; wanted.len()] };
        let (own, window) = (*own, *window);
        let mut came = Vec::with_capacity(wanted.len());
        for wanted in wanted.chunks(STAGE) {
            let parts = bytes.chunks_exact_mut(own + window);
            let mut slices: Vec<(u128, &mut [u8])> =
                wanted.iter().zip(parts).map(|(wanted, part)| (wanted.key.0, part)).collect();
            // A file that fails holds nothing: what it should bring is computed.
            let read = self.file.get(&mut slices).unwrap_or_else(|_| vec![false; wanted.len()]);
            for ((wanted, (_, part)), &read) in wanted.iter().zip(&slices).zip(&read) {
                let (own_part, window_part) = part.split_at(own);
                if let Some(to) = wanted.own.filter(|_| read) {
                    own_memory[to as usize * own..][..own].copy_from_slice(own_part);
                }
                if let Some(to) = wanted.window.filter(|_| read) {
                    window_memory[to as usize * window..][..window].copy_from_slice(window_part);
                }
            }
            came.extend(read);
        }
        came
    }

    /// Whether the file has this block, but not its window's.
    pub(super) fn lacks_window(&self, parent: Key, key: Key) -> bool {
        self.holds(key) && !self.holds_window(parent, key)
    }

    /// Queues a block for writing, where windows have blocks of their own with the one that goes with it, if that is
    /// still there: once more, if the file has it without. False if the file is busy.
    ///
    /// # Errors
    /// If the file is of no use.
    pub(super) fn put(
        &mut self,
        node: &Node,
        own: &[u8],
        window: Option<&[u8]>,
    ) -> Result<bool, BlockFileError> {
        let mut note: Vec<u8> = node.tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
        let once_more = window.is_some() && self.lacks_window(node.parent, node.key);
        let bytes = match &mut self.stage {
            None => own,
            // There would be nothing in it.
            Some(_) if own.is_empty() && window.is_none() => return Ok(true),
            Some(stage) => {
                note.push(if window.is_some() { WITH_WINDOW } else { WITHOUT_WINDOW });
                let (own_part, window_part) = stage.bytes[..stage.own + stage.window].split_at_mut(stage.own);
                own_part.copy_from_slice(own);
                match window {
                    Some(window) => window_part.copy_from_slice(window),
                    None => window_part.fill(0),
                }
                &stage.bytes[..stage.own + stage.window]
            }
        };
        let (key, parent) = (node.key.0, node.parent.0);
        let meta = BlockMeta { key, parent, note: note.into() };
        match if once_more { self.file.replace(meta, bytes) } else { self.file.put(meta, bytes) } {
            // The rest of a conversation that fills the whole file.
            Err(BlockFileError::Full { .. }) => Ok(true),
            done => done,
        }
    }

    /// The first failure since the last call, if there was one, and whether the file only fails by now.
    pub(super) fn failed(&mut self) -> Option<(BlockFileError, bool)> {
        // A block that could not be written or read is not held: it is computed again one day.
        let failures = self.file.poll();
        let now = self.file.snapshot();
        let good = now.written + now.read_bytes;
        self.in_a_row = if good > self.good { failures.len() } else { self.in_a_row + failures.len() };
        self.good = good;
        failures.into_iter().next().map(|failure| (failure.error, self.in_a_row >= REPEATS))
    }

    /// Reads and writes that failed.
    pub(super) fn failures(&self) -> u64 {
        let counts = self.file.snapshot();
        counts.read_errors + counts.write_errors
    }

    /// Notes a block that the file should have. So that the list stays short, `is_unsaved` is asked now and then about
    /// what is in it.
    pub(super) fn note_unsaved(
        &mut self,
        id: u32,
        key: Key,
        blocks: usize,
        is_unsaved: impl Fn(u32, Key) -> bool,
    ) {
        if self.unsaved.len() >= 2 * blocks {
            self.unsaved.retain(|&(id, key)| is_unsaved(id, key));
        }
        self.unsaved.push_back((id, key));
    }

    pub(super) fn put_back(&mut self, id: u32, key: Key) {
        self.unsaved.push_front((id, key));
    }

    pub(super) fn next_unsaved(&mut self) -> Option<(u32, Key)> {
        self.unsaved.pop_front()
    }

    /// What is noted as unsaved; some of it may be saved, or gone.
    pub(super) fn unsaved(&self) -> impl ExactSizeIterator<Item = (u32, Key)> {
        self.unsaved.iter().copied()
    }

    /// Waits until a write has ended, but not for longer than `limit`; false if that passed.
    pub(super) fn wait(&mut self, limit: Duration) -> bool {
        self.file.wait(limit)
    }

    /// Waits until what is queued is on the drive, but not for longer than `limit`; false if that passed.
    ///
    /// # Errors
    /// If the system cannot say that it is.
    pub(super) fn flush_within(&mut self, limit: Duration) -> Result<bool, BlockFileError> {
        self.file.flush_within(limit)
    }

    /// Closes the file without waiting for it.
    pub(super) fn abandon(self) {
        self.file.abandon();
    }

    pub(super) fn snapshot(&self) -> BlockFileSnapshot {
        self.file.snapshot()
    }
}

/// The tokens of a note.
fn tokens(note: &[u8]) -> Option<Vec<u32>> {
    let words = note.chunks_exact(4);
    let whole = words.remainder().is_empty() && !note.is_empty() && note.len() <= 4 * BLOCK;
    whole.then(|| words.map(|w| u32::from_le_bytes([w[0], w[1], w[2], w[3]])).collect())
}
