//! The KV cache: what attention remembers of earlier positions.
//!
//! Families differ in what a layer keeps, so each layer has its own planes ([`Geometry::plane`]), or a state of fixed size
//! instead (`states.rs`). Keys and values are kept in blocks of [`BLOCK`] positions of all layers; a sequence holds a
//! table of block numbers. Blocks that are complete can be shared by every sequence that begins with the same tokens
//! (`prefix.rs`), also after the sequence that computed them has ended, and kept in a file (`spill.rs`) when memory is
//! short or the process ends.
//!
//! ```text
//! memory = block 0 | block 1 | ...
//! block  = layer 0: keys, values | layer 1: keys, values | ...       keys = KV head 0: position 0, 1, ... | head 1 | ...
//!          (a latent: keys only; behind them the keys of an indexer)
//! ```
//!
//! A block that is shared is never written: who goes on from the middle of one copies it first.
//!
//! Layers with linear attention keep a state per sequence instead (`states.rs`), which has no history: such a sequence
//! goes back, and begins as another did, only as far as a snapshot was taken of it. [`KvCache::truncate`] and
//! [`KvCache::adopt`] say how far that is, and the rest is computed again. There is no file for them.
//!
//! Nobody waits for the file for long. A block is written while others are computed; one that must give way before that
//! is waited for within a bound, and then lost: it is computed again one day. A prefix that is in the file is
//! read in parts ([`KvCache::adopt_some`]).

mod geometry;
mod prefix;
mod spill;
mod states;

use std::time::{Duration, Instant};

use smoe_format::ModelSpec;
use smoe_kernels::{DeltaMark, DeltaRun, Kernels, KvType};
use smoe_store::{AlignedBuf, BlockFile, BlockFileError};

use crate::EngineError;
use crate::backend::Row;
pub use geometry::{Geometry, Plane, PlaneGeometry};
use prefix::{Key, Node, Tokens, Tree};
pub use spill::{Opened, SpillConfig};
use spill::{QUEUE, Spill};
use states::States;
pub(crate) use states::{bytes as state_bytes, shape as state_shape};

/// Positions of a block.
pub const BLOCK: usize = 32;
/// The most that a step waits for the file, so that blocks that give way are not lost.
const WAIT: Duration = Duration::from_millis(100);
/// The most that is waited for the file when the cache goes.
const CLOSE: Duration = Duration::from_secs(2);

/// A sequence's place in the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SeqId(pub(crate) u32);

#[derive(Debug, Default)]
struct Sequence {
    blocks: Vec<u32>,
    /// Keys of the leading blocks that are in the tree.
    keys: Vec<Key>,
    open: bool,
}

/// A block of memory.
#[derive(Debug, Default)]
struct Block {
    /// Sequences that hold it.
    holders: u32,
    /// When it was last held.
    used: u64,
}

/// Blocks, by what they are used for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvUse {
    /// All of them.
    pub blocks: usize,
    /// Held by open sequences.
    pub held: usize,
    /// Of sequences that have ended, to be found again.
    pub cached: usize,
    /// Whether there is a file that is used.
    pub has_file: bool,
    /// Reads and writes of the file that failed.
    pub file_failures: u64,
    /// Blocks that gave way before the file had taken them.
    pub lost: u64,
}

/// What was found of a sequence's tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Adopted {
    /// Leading tokens that the sequence holds.
    pub held: usize,
    /// False if the file has more of them.
    pub is_done: bool,
}

/// Keys and values of all sequences.
#[derive(Debug)]
pub struct KvCache {
    kv_type: KvType,
    geometry: Geometry,
    memory: AlignedBuf,
    blocks: Vec<Block>,
    free: Vec<u32>,
    /// Blocks with holders.
    held: usize,
    sequences: Vec<Sequence>,
    /// What blocks hold that others may find: they are not written any more.
    tree: Tree,
    spill: Option<Spill>,
    /// Of layers that keep no positions.
    states: Option<States>,
    /// What this step may still wait for the file.
    patience: Duration,
    /// Of files that are not used any more.
    file_failures: u64,
    /// Blocks that gave way before the file had taken them.
    lost: u64,
    /// What went wrong with the file and was not told yet; and whether its first failure was noted.
    warnings: Vec<EngineError>,
    told: bool,
    /// Clock of uses.
    now: u64,
    /// Blocks lie in a device's memory: what is to be copied there.
    device_copies: Option<Vec<(u32, u32)>>,
}

impl KvCache {
    /// A cache of `positions` positions for at most `sequences` sequences. Its address space is claimed now, pages
    /// as they are first written. Of states that layers keep instead there are no snapshots before
    /// [`Self::with_snapshots`].
    ///
    /// # Errors
    /// If there is no memory.
    pub fn new(
        spec: &ModelSpec,
        kv_type: KvType,
        positions: usize,
        sequences: usize,
    ) -> Result<Self, EngineError> {
        let geometry = Geometry::new(spec, kv_type);
        let n = positions.div_ceil(BLOCK);
        Ok(Self {
            kv_type,
            memory: AlignedBuf::zeroed(n * geometry.block_stride)?,
            geometry,
            blocks: (0..n).map(|_| Block::default()).collect(),
            free: (0..n as u32).rev().collect(),
            held: 0,
            sequences: (0..sequences)
                .map(|_| {
                    let (blocks, keys) = (Vec::with_capacity(n), Vec::with_capacity(n));
                    Sequence { blocks, keys, open: false }
                })
                .collect(),
            tree: Tree::new(n),
            spill: None,
            states: States::new(spec, sequences, 0, n),
            patience: WAIT,
            file_failures: 0,
            lost: 0,
            warnings: Vec::new(),
            told: false,
            device_copies: None,
            now: 0,
        })
    }

    /// With room for so many snapshots of states, if layers keep any.
    #[must_use]
    pub fn with_snapshots(mut self, spec: &ModelSpec, snapshots: usize) -> Self {
        self.states = States::new(spec, self.sequences.len(), snapshots, self.blocks.len());
        self
    }

    /// Bytes of a cache of `positions` positions, without states.
    #[must_use]
    pub fn bytes(spec: &ModelSpec, kv_type: KvType, positions: usize) -> u64 {
        (positions.div_ceil(BLOCK) * Geometry::new(spec, kv_type).block_stride) as u64
    }

    /// Keeps complete blocks in a file too, and finds those that are there. If it cannot be used nothing has changed,
    /// and the cache goes on without.
    ///
    /// # Errors
    /// As [`smoe_store::BlockFile::open`].
    pub fn spill_to(&mut self, config: &SpillConfig, model: [u8; 32]) -> Result<Opened, EngineError> {
        if self.is_on_device() {
            let what = "a file of the KV cache while the cache is on a GPU".to_owned();
            return Err(EngineError::Unsupported { what });
        }
        if self.states.is_some() {
            let what = "a file of the KV cache of a model with linear attention".to_owned();
            return Err(EngineError::Unsupported { what });
        }
        let settings = self.file_settings(config.max_bytes, model);
        let (file, opened) = BlockFile::open(&config.path, &settings)?;
        self.spill = Some(Spill::new(file));
        Ok(opened)
    }

    fn file_settings(&self, max_bytes: u64, model: [u8; 32]) -> smoe_store::BlockFileConfig {
        let layout = format!("{:?} {:?}", self.kv_type, self.geometry);
        spill::settings(max_bytes, self.geometry.block_stride, spill::fingerprint(model, &layout))
    }

    /// How numbers are kept.
    #[must_use]
    pub const fn kv_type(&self) -> KvType {
        self.kv_type
    }

    /// Blocks, by what they are used for.
    #[must_use]
    pub fn usage(&self) -> KvUse {
        let (blocks, held) = (self.blocks.len(), self.held);
        KvUse {
            blocks,
            held,
            cached: blocks - held - self.free.len(),
            has_file: self.spill.is_some(),
            file_failures: self.file_failures + self.spill.as_ref().map_or(0, Spill::failures),
            lost: self.lost,
        }
    }

    /// What went wrong with the file, if that was not told yet: its first failure, and that it is given up.
    pub fn take_warning(&mut self) -> Option<EngineError> {
        if self.warnings.is_empty() { None } else { Some(self.warnings.remove(0)) }
    }

    /// Takes a free sequence.
    ///
    /// # Errors
    /// If all are open.
    pub fn open(&mut self) -> Result<SeqId, EngineError> {
        let Some(i) = self.sequences.iter().position(|s| !s.open) else {
            return Err(EngineError::NoSession { sessions: self.sequences.len() });
        };
        self.sequences[i].open = true;
        Ok(SeqId(i as u32))
    }

    /// Gives a sequence and its blocks back. Those in the tree can still be found.
    pub fn close(&mut self, seq: SeqId) {
        self.truncate(seq, 0);
        self.sequences[seq.0 as usize].open = false;
    }

    /// Makes room for positions `from` to `to`, the sequence holding those before `from`.
    ///
    /// # Errors
    /// If there are not enough blocks; nothing is taken then.
    pub fn reserve(&mut self, seq: SeqId, from: usize, to: usize) -> Result<(), EngineError> {
        let held = self.sequences[seq.0 as usize].blocks.len();
        let missing = to.div_ceil(BLOCK).saturating_sub(held);
        let begun = (to > from && !from.is_multiple_of(BLOCK))
            .then(|| self.sequences[seq.0 as usize].blocks[from / BLOCK]);
        // What only this sequence holds is its own again, and nobody else's to find.
        if let Some(id) = begun.filter(|&id| self.blocks[id as usize].holders == 1) {
            self.tree.remove(id);
            if let Some(states) = &mut self.states {
                states.write(id, from % BLOCK);
            }
        }
        let shared = begun.is_some_and(|id| self.blocks[id as usize].holders > 1);
        if missing == 0 && !shared {
            return Ok(());
        }
        let available = self.available();
        if missing + usize::from(shared) > available {
            return Err(EngineError::ContextFull { needed: to, context: (held + available) * BLOCK });
        }
        if shared {
            let copy = self.allocate()?;
            let original = std::mem::replace(&mut self.sequences[seq.0 as usize].blocks[from / BLOCK], copy);
            self.copy(original, copy);
            self.release(original);
        }
        for _ in 0..missing {
            let block = self.allocate()?;
            self.sequences[seq.0 as usize].blocks.push(block);
        }
        Ok(())
    }

    /// Rolls a sequence back to `len` positions, or to the last one before that it can go back to, and says
    /// which; blocks beyond are given back. Pages can go back to any, states to snapshots only.
    pub fn truncate(&mut self, seq: SeqId, len: usize) -> usize {
        let len = match &mut self.states {
            Some(states) => states.go_back(seq, &self.sequences[seq.0 as usize].blocks, len),
            None => len,
        };
        self.give_back(seq, len);
        len
    }

    /// Gives back what a sequence holds beyond `len` positions.
    fn give_back(&mut self, seq: SeqId, len: usize) {
        let keep = len.div_ceil(BLOCK);
        // The last first: what comes later in a sequence is the older, and gives way first.
        while self.sequences[seq.0 as usize].blocks.len() > keep
            && let Some(block) = self.sequences[seq.0 as usize].blocks.pop()
        {
            self.release(block);
        }
        self.sequences[seq.0 as usize].keys.truncate(len / BLOCK);
    }

    /// Blocks that a new sequence could get: free ones, and those that only wait to be found again.
    #[must_use]
    pub fn available(&self) -> usize {
        self.blocks.len() - self.held
    }

    /// Gives an empty sequence the longest beginning of `tokens` that is known, from memory or the file, and
    /// returns its length. What the file cannot give is as if it were not there.
    ///
    /// # Panics
    /// If the sequence is not empty.
    pub fn adopt(&mut self, seq: SeqId, tokens: &[u32]) -> usize {
        assert!(self.sequences[seq.0 as usize].blocks.is_empty(), "only an empty sequence adopts");
        self.adopt_some(seq, tokens, usize::MAX).held
    }

    /// As [`Self::adopt`], but reads about `most` blocks of the file and no more: to be called again, with the same
    /// tokens, until it is done.
    ///
    /// # Panics
    /// If the sequence holds anything that it has not adopted.
    pub fn adopt_some(&mut self, seq: SeqId, tokens: &[u32], most: usize) -> Adopted {
        let sequence = &self.sequences[seq.0 as usize];
        assert_eq!(sequence.blocks.len(), sequence.keys.len(), "only what was adopted is gone on from");
        if self.states.is_some() {
            return Adopted { held: self.adopt_state(seq, tokens), is_done: true };
        }
        let mut left = most;
        loop {
            self.take_known(seq, tokens);
            match self.fetch(seq, tokens, left) {
                (0, true) => {
                    let held = self.sequences[seq.0 as usize].keys.len() * BLOCK;
                    return Adopted { held, is_done: false };
                }
                (0, false) => break,
                (read, _) => left -= read,
            }
        }
        // The last first, as the file wants it.
        if let Some(spill) = &mut self.spill {
            self.sequences[seq.0 as usize].keys.iter().rev().for_each(|&key| spill.touch(key));
        }
        let (n, parent) = self.end(seq);
        Adopted { held: n * BLOCK + self.adopt_part(seq, parent, &tokens[n * BLOCK..]), is_done: true }
    }

    /// As [`Self::adopt`] where layers keep states: to the longest beginning that has a snapshot.
    fn adopt_state(&mut self, seq: SeqId, tokens: &[u32]) -> usize {
        self.take_known(seq, tokens);
        let Some(states) = &self.states else { return 0 };
        // After each block that is known: those that go on as the tokens do as far as their snapshots, whether or not
        // they are the sequence's own. The last such place has the longest beginning.
        let known = self.end(seq).0;
        let last = (0..=known).rev().find_map(|i| {
            let parent =
                i.checked_sub(1).map_or(Key::ROOT, |before| self.sequences[seq.0 as usize].keys[before]);
            let rest = &tokens[i * BLOCK..];
            let begun = self.tree.children(parent).filter_map(|(id, node)| {
                let fill = states.fill(id)?;
                (rest.get(..fill)? == node.tokens.get(..fill)?).then_some((i, id, fill, node.key))
            });
            begun.max_by_key(|(_, _, fill, _)| *fill)
        });
        if let Some((i, id, fill, key)) = last {
            self.hold(id);
            self.give_back(seq, i * BLOCK);
            let sequence = &mut self.sequences[seq.0 as usize];
            sequence.blocks.push(id);
            sequence.keys.extend((fill == BLOCK).then_some(key));
        }
        let Some(states) = &mut self.states else { return 0 };
        let held = states.go_to(seq, &self.sequences[seq.0 as usize].blocks, tokens.len());
        self.give_back(seq, held);
        let last = held / BLOCK;
        let Some(&begun) = self.sequences[seq.0 as usize].blocks.get(last) else { return held };
        // Gone on from within: others find the block as it is.
        let Ok(copy) = self.allocate() else {
            self.close_state(seq);
            return 0;
        };
        self.copy(begun, copy);
        self.sequences[seq.0 as usize].blocks[last] = copy;
        self.release(begun);
        held
    }

    /// A sequence becomes empty.
    fn close_state(&mut self, seq: SeqId) {
        if let Some(states) = &mut self.states {
            states.go_to(seq, &[], 0);
        }
        self.give_back(seq, 0);
    }

    /// How many blocks of a sequence can be found by others, and the key of the last of them.
    fn end(&self, seq: SeqId) -> (usize, Key) {
        let keys = &self.sequences[seq.0 as usize].keys;
        (keys.len(), keys.last().copied().unwrap_or(Key::ROOT))
    }

    /// Goes on with the blocks that are in memory.
    fn take_known(&mut self, seq: SeqId, tokens: &[u32]) {
        let (n, mut parent) = self.end(seq);
        for own in tokens[n * BLOCK..].chunks_exact(BLOCK) {
            let Some(id) = self.tree.child(parent, own) else { return };
            self.hold(id);
            parent = self.tree.node(id).map_or(parent, |node| node.key);
            let sequence = &mut self.sequences[seq.0 as usize];
            sequence.blocks.push(id);
            sequence.keys.push(parent);
        }
    }

    /// Goes on with at most `most` blocks that are in the file. Returns how many were read, and whether it has more; a
    /// block that did not come is not in the file any more.
    fn fetch(&mut self, seq: SeqId, tokens: &[u32], most: usize) -> (usize, bool) {
        let (n, mut parent) = self.end(seq);
        let (mut wanted, mut more) = (Vec::new(), false);
        for own in tokens[n * BLOCK..].chunks_exact(BLOCK) {
            if self.spill.is_none() || self.tree.child(parent, own).is_some() {
                break;
            }
            parent = parent.child(own);
            if !self.spill.as_ref().is_some_and(|spill| spill.holds(parent)) {
                break;
            }
            more = wanted.len() == most;
            if more {
                break;
            }
            let Ok(id) = self.allocate() else { break };
            wanted.push((parent, id));
        }
        // It may have been given up meanwhile: then nothing comes from it.
        let came = match &mut self.spill {
            Some(spill) if !wanted.is_empty() => {
                spill.get(&wanted, &mut self.memory, self.geometry.block_stride)
            }
            _ => vec![false; wanted.len()],
        };
        let (_, mut parent) = self.end(seq);
        let mut is_whole = true;
        for ((&(key, id), came), own) in wanted.iter().zip(came).zip(tokens[n * BLOCK..].chunks_exact(BLOCK))
        {
            if came {
                self.insert(id, Node { key, parent, tokens: Tokens::new(own), saved: true });
            }
            is_whole &= came;
            if is_whole {
                let sequence = &mut self.sequences[seq.0 as usize];
                sequence.blocks.push(id);
                sequence.keys.push(key);
            } else {
                self.release(id);
            }
            parent = key;
        }
        // Behind a block that did not come nothing is of use.
        if is_whole { (wanted.len(), more) } else { (0, false) }
    }

    /// Copies the beginning of a block that goes on as `tokens` do, if there is one.
    fn adopt_part(&mut self, seq: SeqId, parent: Key, tokens: &[u32]) -> usize {
        let in_memory = self.tree.longest(parent, tokens);
        let in_file = self.spill.as_ref().and_then(|spill| spill.longest(parent, tokens));
        let memory_len = in_memory.map_or(0, |(_, len)| len);
        let file_len = in_file.map_or(0, |(_, len)| len);
        if memory_len.max(file_len) == 0 {
            return 0;
        }
        if let Some((id, _)) = in_memory.filter(|_| memory_len >= file_len) {
            let key = self.tree.node(id).map(|node| node.key);
            if let (Some(spill), Some(key)) = (&mut self.spill, key) {
                spill.touch(key);
            }
            self.hold(id);
            let copy = self.allocate();
            if let Ok(copy) = copy {
                self.copy(id, copy);
                self.sequences[seq.0 as usize].blocks.push(copy);
            }
            self.release(id);
            return if copy.is_ok() { memory_len } else { 0 };
        }
        let (Some((key, _)), Ok(id)) = (in_file, self.allocate()) else { return 0 };
        let stride = self.geometry.block_stride;
        let get = |spill: &mut Spill| spill.get(&[(key, id)], &mut self.memory, stride);
        if self.spill.as_mut().map(get) == Some(vec![true]) {
            self.sequences[seq.0 as usize].blocks.push(id);
            return file_len;
        }
        self.release(id);
        0
    }

    /// Lets others find the complete blocks of a sequence that holds `tokens`. A block that is known already gives
    /// way to the one that others share.
    pub fn commit(&mut self, seq: SeqId, tokens: &[u32]) {
        let (known, mut parent) = self.end(seq);
        for i in known..tokens.len() / BLOCK {
            let own = &tokens[i * BLOCK..(i + 1) * BLOCK];
            let id = self.sequences[seq.0 as usize].blocks[i];
            let key = parent.child(own);
            match self.tree.child(parent, own) {
                Some(other) if other != id => {
                    self.hold(other);
                    self.sequences[seq.0 as usize].blocks[i] = other;
                    if let Some(states) = &mut self.states {
                        states.replace(id, other);
                    }
                    self.release(id);
                }
                Some(_) => {}
                None => self.insert(id, Node { key, parent, tokens: Tokens::new(own), saved: false }),
            }
            self.sequences[seq.0 as usize].keys.push(key);
            parent = key;
        }
    }

    /// As [`Self::commit`], and the block at the end, which is not complete: for a sequence that ends.
    pub fn commit_all(&mut self, seq: SeqId, tokens: &[u32]) {
        self.commit(seq, tokens);
        if let Some(states) = self.states.as_mut().filter(|states| states.at(seq) == tokens.len()) {
            states.snapshot(seq, &self.sequences[seq.0 as usize].blocks, false);
        }
        let tail = &tokens[tokens.len() / BLOCK * BLOCK..];
        let Some(&id) = self.sequences[seq.0 as usize].blocks.get(tokens.len() / BLOCK) else { return };
        let (_, parent) = self.end(seq);
        let known = self.tree.longest(parent, tail).filter(|(_, len)| *len == tail.len());
        if let (Some((known, _)), Some(states), false) = (known, &mut self.states, tail.is_empty()) {
            // That block may never have had a snapshot, or lost it.
            states.replace(id, known);
        }
        if tail.is_empty() || known.is_some() || self.tree.node(id).is_some() {
            return;
        }
        // A shorter end of the same conversation has had its day.
        let shorter = self.tree.children(parent).find(|(child, node)| {
            let is_part = node.tokens.len() < tail.len() && tail.starts_with(&node.tokens);
            is_part && self.blocks[*child as usize].holders == 0
        });
        if let Some((shorter, _)) = shorter {
            self.tree.remove(shorter);
            self.set_free(shorter);
        }
        let key = parent.child(tail);
        self.insert(id, Node { key, parent, tokens: Tokens::new(tail), saved: false });
    }

    /// Queues at most `most` blocks that the file does not have yet, as far as it takes them without waiting. True
    /// if more are left.
    pub fn save(&mut self, most: usize) -> bool {
        self.look_at_file();
        for _ in 0..most {
            let Some((id, key)) = self.spill.as_mut().and_then(Spill::next_unsaved) else { return false };
            if self.is_unsaved(id, key) && !self.write(id) {
                if let Some(spill) = &mut self.spill {
                    spill.put_back(id, key);
                }
                return true;
            }
        }
        self.spill.as_ref().is_some_and(|spill| spill.unsaved().len() > 0)
    }

    /// A step is about to compute positions `from` to `to` of a sequence, whose blocks are reserved: of its prompt, or
    /// of an answer.
    pub fn expect(&mut self, seq: SeqId, from: usize, to: usize, is_prompt: bool) {
        if let Some(states) = &mut self.states {
            states.expect(seq, from, to, is_prompt, &self.sequences[seq.0 as usize].blocks);
        }
    }

    /// A new step begins: nothing is expected.
    pub fn begin_step(&mut self) {
        if let Some(states) = &mut self.states {
            states.begin_step();
        }
    }

    /// The step that computed these rows is done: their states are those of their sequences now.
    pub fn keep(&mut self, rows: &[Row]) {
        let Some(states) = &mut self.states else { return };
        for own in rows.chunk_by(|a, b| a.seq == b.seq) {
            if let Some(last) = own.last() {
                let blocks = &self.sequences[last.seq.0 as usize].blocks;
                states.keep(last.seq, last.position as usize + 1, blocks);
            }
        }
    }

    /// The memory of states, and where in it those of a layer that keeps one are for rows of the running step.
    pub fn states_of(
        &mut self,
        layer: usize,
        rows: &[Row],
        runs: &mut Vec<DeltaRun>,
        marks: &mut Vec<DeltaMark>,
    ) -> Option<&mut [f32]> {
        self.states.as_mut().map(|states| states.runs(layer, rows, runs, marks))
    }

    /// A new step may wait for the file anew.
    pub fn end_step(&mut self) {
        self.patience = WAIT;
    }

    /// Waits until the file has written something, or has nothing to write, but not for longer than `limit`; false if
    /// that passed or there is no file.
    pub fn wait_for_file(&mut self, limit: Duration) -> bool {
        self.spill.as_mut().is_some_and(|spill| spill.wait(limit))
    }

    /// Brings what can be found to the file, the oldest first, and waits until the drive has it; but not for longer than
    /// `limit`. Returns how many blocks the file may lack: it is then closed, and not used any more.
    pub fn flush(&mut self, limit: Duration) -> usize {
        let start = Instant::now();
        let left = || limit.saturating_sub(start.elapsed());
        while self.save(usize::MAX) && left() > Duration::ZERO && self.wait_for_file(left()) {}
        let Some(mut spill) = self.spill.take() else { return 0 };
        let unsaved = spill.unsaved().filter(|&(id, key)| self.is_unsaved(id, key)).count();
        match spill.flush_within(if unsaved == 0 { left() } else { Duration::ZERO }) {
            Ok(true) => {
                self.spill = Some(spill);
                self.look_at_file();
                0
            }
            Ok(false) => {
                let lacks = unsaved + spill.snapshot().writing;
                self.file_failures += spill.failures();
                spill.abandon();
                lacks
            }
            Err(error) => {
                self.spill = Some(spill);
                self.give_up(error);
                unsaved
            }
        }
    }

    /// Counts of the file, if there is one.
    #[must_use]
    pub fn spilled(&self) -> Option<smoe_store::BlockFileSnapshot> {
        self.spill.as_ref().map(Spill::snapshot)
    }

    fn is_unsaved(&self, id: u32, key: Key) -> bool {
        self.tree.node(id).is_some_and(|node| node.key == key && !node.saved)
    }

    /// Queues a block for the file; false if that is busy.
    fn write(&mut self, id: u32) -> bool {
        let (Some(spill), Some(node)) = (&mut self.spill, self.tree.node_mut(id)) else { return true };
        let stride = self.geometry.block_stride;
        if !node.saved {
            match spill.put(node, &self.memory[id as usize * stride..(id as usize + 1) * stride]) {
                Ok(taken) => node.saved = taken,
                Err(error) => {
                    self.give_up(error);
                    return true;
                }
            }
        }
        node.saved
    }

    /// Notes what has failed in the file: it is told once, and a file that only fails is given up.
    fn look_at_file(&mut self) {
        let Some(spill) = &mut self.spill else { return };
        let Some((error, only_fails)) = spill.failed() else { return };
        if only_fails {
            self.give_up(error);
        } else if !std::mem::replace(&mut self.told, true) {
            self.warnings.push(error.into());
        }
    }

    fn give_up(&mut self, source: BlockFileError) {
        let Some(spill) = self.spill.take() else { return };
        let failures = spill.failures().max(1);
        spill.abandon();
        self.file_failures += failures;
        self.warnings.push(EngineError::SpillGivenUp { failures, source });
    }

    fn insert(&mut self, id: u32, node: Node) {
        if let Some(spill) = self.spill.as_mut().filter(|_| !node.saved) {
            let tree = &self.tree;
            let is_unsaved =
                |id, key| tree.node(id).is_some_and(|node: &Node| node.key == key && !node.saved);
            spill.note_unsaved(id, node.key, self.blocks.len(), is_unsaved);
        }
        self.tree.insert(id, node);
    }

    fn hold(&mut self, id: u32) {
        let holders = &mut self.blocks[id as usize].holders;
        *holders += 1;
        self.held += usize::from(*holders == 1);
    }

    /// One holder less. Nobody's: free, or cached if it can be found.
    fn release(&mut self, id: u32) {
        let block = &mut self.blocks[id as usize];
        block.holders -= 1;
        self.held -= usize::from(block.holders == 0);
        self.now += 1;
        block.used = self.now;
        if block.holders == 0 && self.tree.node(id).is_none() {
            self.set_free(id);
        }
    }

    fn set_free(&mut self, id: u32) {
        self.free.push(id);
        if let Some(states) = &mut self.states {
            states.forget(id);
        }
    }

    /// A block with one holder: a free one, or the cached one that was held longest ago.
    fn allocate(&mut self) -> Result<u32, EngineError> {
        let id = match self.free.pop() {
            Some(id) => id,
            None => {
                let Some(id) = self.oldest(false) else {
                    let context = self.blocks.len() * BLOCK;
                    return Err(EngineError::ContextFull { needed: context + 1, context });
                };
                let id = self.make_way(id);
                self.tree.remove(id);
                if let Some(states) = &mut self.states {
                    states.forget(id);
                }
                id
            }
        };
        self.hold(id);
        Ok(id)
    }

    /// The block that nobody holds and that was held longest ago; of those that are saved, if asked for.
    fn oldest(&self, saved: bool) -> Option<u32> {
        let cached = (0..).zip(&self.blocks).filter(|(id, block)| {
            block.holders == 0 && (!saved || self.tree.node(*id).is_some_and(|node| node.saved))
        });
        cached.min_by_key(|(_, block)| block.used).map(|(id, _)| id)
    }

    /// Which block gives way: the `oldest`, once the file has it; while that is busy another that it has. If there is
    /// none the file is waited for, as long as the step may; then the block is lost.
    fn make_way(&mut self, oldest: u32) -> u32 {
        if self.write(oldest) {
            return oldest;
        }
        if let Some(saved) = self.oldest(true) {
            return saved;
        }
        // Each write that ends frees a buffer, but not always the place that this block needs.
        for _ in 0..=QUEUE {
            let start = Instant::now();
            let has_ended = self.wait_for_file(self.patience);
            self.patience = self.patience.saturating_sub(start.elapsed());
            if self.write(oldest) {
                return oldest;
            }
            if !has_ended {
                break;
            }
        }
        self.lost += 1;
        oldest
    }

    fn copy(&mut self, from: u32, to: u32) {
        if let Some(copies) = &mut self.device_copies {
            copies.push((from, to));
            return;
        }
        let stride = self.geometry.block_stride;
        let from = from as usize * stride;
        self.memory.copy_within(from..from + stride, to as usize * stride);
    }

    /// Keeps the bookkeeping only: blocks lie in a device's memory, and who owns that copies them when
    /// [`Self::take_copies`] says so. Nothing of them can go to a file.
    pub fn keep_on_device(&mut self) {
        self.device_copies = Some(Vec::new());
    }

    /// The device is lost, and the blocks on it: every sequence is empty, nothing can be found, and blocks lie in this
    /// memory from here on.
    pub fn leave_device(&mut self) {
        self.device_copies = None;
        for i in 0..self.sequences.len() {
            self.truncate(SeqId(i as u32), 0);
        }
        for id in 0..self.blocks.len() as u32 {
            // Nobody holds it: it was only there to be found.
            if self.tree.node(id).is_some() {
                self.tree.remove(id);
                self.set_free(id);
            }
        }
    }

    /// True if blocks lie in a device's memory.
    #[must_use]
    pub const fn is_on_device(&self) -> bool {
        self.device_copies.is_some()
    }

    /// Blocks to be copied there before anything else is written: from, to.
    pub fn take_copies(&mut self) -> impl Iterator<Item = (u32, u32)> + '_ {
        self.device_copies.iter_mut().flat_map(|copies| copies.drain(..))
    }

    /// The blocks of a sequence, in the order of its positions.
    #[must_use]
    pub fn blocks(&self, seq: SeqId) -> &[u32] {
        &self.sequences[seq.0 as usize].blocks
    }

    /// Everything, and where things lie in it.
    #[must_use]
    pub fn memory(&self) -> (&[u8], &Geometry) {
        (&self.memory, &self.geometry)
    }

    /// Stores a head's row of one position, whose block is reserved; of a plane that the layer does not keep, nothing.
    pub fn append(
        &mut self,
        kernels: Kernels,
        layer: usize,
        row: Row,
        (plane, head): (Plane, usize),
        x: &[f32],
    ) {
        let Some(plane) = self.geometry.plane(layer, plane) else { return };
        let block = self.blocks(row.seq)[row.position as usize / BLOCK] as usize;
        let within = plane.head(head) + row.position as usize % BLOCK * plane.row_bytes;
        let at = block * self.geometry.block_stride + within;
        kernels.store_kv_row(self.kv_type, x, &mut self.memory[at..at + plane.row_bytes]);
    }
}

/// What is on its way to the file gets there, if that does not take too long.
impl Drop for KvCache {
    fn drop(&mut self) {
        let Some(mut spill) = self.spill.take() else { return };
        // A failure costs a prefill one day.
        if !spill.flush_within(CLOSE).unwrap_or(false) {
            spill.abandon();
        }
    }
}

#[cfg(test)]
mod tests;
