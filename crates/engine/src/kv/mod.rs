//! The KV cache: what attention remembers of earlier positions.
//!
//! Families differ in what a layer keeps, so each layer states its kind ([`LayerKv`]). Keys and values are kept in
//! blocks of [`BLOCK`] positions of all layers; a sequence holds a table of block numbers. Blocks that are complete
//! can be shared by every sequence that begins with the same tokens (`prefix.rs`), also after the sequence that
//! computed them has ended, and kept in a file (`spill.rs`) when memory is short or the process ends.
//!
//! ```text
//! memory = block 0 | block 1 | ...
//! block  = layer 0: keys, values | layer 1: keys, values | ...       keys = KV head 0: position 0, 1, ... | head 1 | ...
//! ```
//!
//! A block that is shared is never written: who goes on from the middle of one copies it first.

mod prefix;
mod spill;

use smoe_format::ModelSpec;
use smoe_kernels::{Kernels, KvType};
use smoe_store::{AlignedBuf, PAGE};

use crate::EngineError;
use crate::backend::Row;
use prefix::{Key, Node, Tree};
use spill::Spill;
pub use spill::{Opened, SpillConfig};

/// Positions of a block.
pub const BLOCK: usize = 32;

/// What one layer keeps per session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LayerKv {
    /// Every position, in blocks (GQA, a latent, an indexer's keys).
    Paged {
        /// Bytes of a position.
        bytes_per_token: usize,
    },
    /// The last `positions` only (sliding-window attention).
    Window {
        /// Bytes of a position.
        bytes_per_token: usize,
        /// Width of the window.
        positions: usize,
    },
    /// A state of fixed size (linear attention). It has no history: no prefix can be shared or rolled back
    /// without a snapshot.
    Recurrent {
        /// Bytes of the state.
        bytes: usize,
        /// Snapshots kept at block edges.
        snapshots: usize,
    },
}

impl LayerKv {
    /// What each layer of a model keeps.
    #[must_use]
    pub fn of(spec: &ModelSpec, kv_type: KvType) -> Vec<Self> {
        let a = &spec.attention;
        let bytes_per_token = 2 * a.n_kv_heads * kv_type.row_bytes(a.head_dim);
        vec![Self::Paged { bytes_per_token }; spec.n_layers()]
    }
}

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
    /// What it holds, if others may find it: it is not written any more.
    node: Option<Node>,
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
    tree: Tree,
    spill: Option<Spill>,
    /// Clock of uses.
    now: u64,
}

impl KvCache {
    /// A cache of `positions` positions for at most `sequences` sequences. Its address space is claimed now, pages
    /// as they are first written.
    ///
    /// # Errors
    /// If a layer keeps something else than pages, which no family does yet, or there is no memory.
    pub fn new(
        spec: &ModelSpec,
        kv_type: KvType,
        positions: usize,
        sequences: usize,
    ) -> Result<Self, EngineError> {
        let paged = |layer| matches!(layer, LayerKv::Paged { .. });
        if let Some(kind) = LayerKv::of(spec, kv_type).into_iter().find(|&layer| !paged(layer)) {
            return Err(EngineError::Unsupported { what: format!("a layer that keeps {kind:?}") });
        }
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
                .map(|_| Sequence { blocks: Vec::with_capacity(n), ..Sequence::default() })
                .collect(),
            tree: Tree::default(),
            spill: None,
            now: 0,
        })
    }

    /// Bytes of a cache of `positions` positions.
    #[must_use]
    pub fn bytes(spec: &ModelSpec, kv_type: KvType, positions: usize) -> u64 {
        (positions.div_ceil(BLOCK) * Geometry::new(spec, kv_type).block_stride) as u64
    }

    /// Keeps complete blocks in a file too, and finds those that are there.
    ///
    /// # Errors
    /// As [`smoe_store::BlockFile::open`].
    pub fn spill_to(&mut self, config: &SpillConfig, model: [u8; 32]) -> Result<Opened, EngineError> {
        let layout = format!("{:?} {:?}", self.kv_type, self.geometry);
        let (spill, opened) = Spill::open(config, self.geometry.block_stride, model, &layout)?;
        self.spill = Some(spill);
        Ok(opened)
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
        KvUse { blocks, held, cached: blocks - held - self.free.len() }
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
            self.forget(id);
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
    /// which; blocks beyond are given back. Pages can go back to any.
    pub fn truncate(&mut self, seq: SeqId, len: usize) -> usize {
        let keep = len.div_ceil(BLOCK);
        // The last first: what comes later in a sequence is the older, and gives way first.
        while self.sequences[seq.0 as usize].blocks.len() > keep
            && let Some(block) = self.sequences[seq.0 as usize].blocks.pop()
        {
            self.release(block);
        }
        self.sequences[seq.0 as usize].keys.truncate(len / BLOCK);
        len
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
        // What is in memory is held first, so that nothing of it makes room for what comes from the file.
        let (mut keys, mut parent) = (Vec::new(), Key::ROOT);
        let mut steps: Vec<Result<u32, Key>> = Vec::new();
        let mut rest = tokens;
        while rest.len() >= BLOCK {
            let own = &rest[..BLOCK];
            let step = match self.tree.child(parent, own, &self.blocks) {
                Some(id) => Ok(id),
                None => match self.spill.as_ref().and_then(|spill| spill.child(parent, own)) {
                    Some(key) => Err(key),
                    None => break,
                },
            };
            if let Ok(id) = step {
                self.hold(id);
            }
            parent = parent.child(own);
            keys.push(parent);
            steps.push(step);
            rest = &rest[BLOCK..];
        }
        let complete = self.fetch(&steps, &keys, tokens);
        // Behind a block that did not come.
        steps.iter().skip(complete.len()).flatten().for_each(|&id| self.release(id));
        let n = complete.len();
        let sequence = &mut self.sequences[seq.0 as usize];
        sequence.blocks.extend(&complete);
        sequence.keys.extend(&keys[..n]);
        let parent = keys[..n].last().copied().unwrap_or(Key::ROOT);
        n * BLOCK + self.adopt_part(seq, parent, &tokens[n * BLOCK..])
    }

    /// Brings the blocks of `steps` that are in the file into memory; returns the leading ones that came.
    fn fetch(&mut self, steps: &[Result<u32, Key>], keys: &[Key], tokens: &[u32]) -> Vec<u32> {
        let mut blocks = Vec::with_capacity(steps.len());
        let mut wanted = Vec::new();
        for step in steps {
            match *step {
                Ok(id) => blocks.push(id),
                Err(key) => match self.allocate() {
                    Ok(id) => {
                        wanted.push((key, id));
                        blocks.push(id);
                    }
                    Err(_) => break,
                },
            }
        }
        // The file may have been given up meanwhile: then nothing comes from it.
        let came = match &mut self.spill {
            Some(spill) => spill.get(&wanted, &mut self.memory, self.geometry.block_stride),
            None => vec![false; wanted.len()],
        };
        let mut lost = blocks.len();
        for (&(key, id), came) in wanted.iter().zip(came) {
            let i = blocks.iter().position(|&block| block == id).unwrap_or_default();
            if came {
                let parent = i.checked_sub(1).map_or(Key::ROOT, |i| keys[i]);
                let own = tokens[i * BLOCK..(i + 1) * BLOCK].to_vec();
                self.insert(id, Node { key, parent, tokens: own, saved: true });
            } else {
                lost = lost.min(i);
            }
        }
        for (i, &id) in blocks.iter().enumerate().skip(lost) {
            if steps[i].is_err() {
                self.release(id);
            }
        }
        blocks.truncate(lost);
        blocks
    }

    /// Copies the beginning of a block that goes on as `tokens` do, if there is one.
    fn adopt_part(&mut self, seq: SeqId, parent: Key, tokens: &[u32]) -> usize {
        let in_memory = self.tree.longest(parent, tokens, &self.blocks);
        let in_file = self.spill.as_ref().and_then(|spill| spill.longest(parent, tokens));
        let memory_len = in_memory.map_or(0, |(_, len)| len);
        let file_len = in_file.map_or(0, |(_, len)| len);
        if memory_len.max(file_len) == 0 {
            return 0;
        }
        if let Some((id, _)) = in_memory.filter(|_| memory_len >= file_len) {
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
        let known = self.sequences[seq.0 as usize].keys.len();
        let mut parent = self.sequences[seq.0 as usize].keys.last().copied().unwrap_or(Key::ROOT);
        for i in known..tokens.len() / BLOCK {
            let own = &tokens[i * BLOCK..(i + 1) * BLOCK];
            let id = self.sequences[seq.0 as usize].blocks[i];
            let key = parent.child(own);
            match self.tree.child(parent, own, &self.blocks) {
                Some(other) if other != id => {
                    self.hold(other);
                    self.sequences[seq.0 as usize].blocks[i] = other;
                    self.release(id);
                }
                Some(_) => {}
                None => self.insert(id, Node { key, parent, tokens: own.to_vec(), saved: false }),
            }
            self.sequences[seq.0 as usize].keys.push(key);
            parent = key;
        }
    }

    /// As [`Self::commit`], and the block at the end, which is not complete: for a sequence that ends.
    pub fn commit_all(&mut self, seq: SeqId, tokens: &[u32]) {
        self.commit(seq, tokens);
        let tail = &tokens[tokens.len() / BLOCK * BLOCK..];
        let Some(&id) = self.sequences[seq.0 as usize].blocks.get(tokens.len() / BLOCK) else { return };
        let parent = self.sequences[seq.0 as usize].keys.last().copied().unwrap_or(Key::ROOT);
        let known = self.tree.longest(parent, tail, &self.blocks).is_some_and(|(_, len)| len == tail.len());
        if tail.is_empty() || known || self.blocks[id as usize].node.is_some() {
            return;
        }
        // A shorter end of the same conversation has had its day.
        let shorter = self.tree.children(parent).iter().copied().find(|&child| {
            let block = &self.blocks[child as usize];
            let is_part = |node: &Node| node.tokens.len() < tail.len() && tail.starts_with(&node.tokens);
            block.holders == 0 && block.node.as_ref().is_some_and(is_part)
        });
        if let Some(shorter) = shorter {
            self.forget(shorter);
            self.free.push(shorter);
        }
        self.insert(id, Node { key: parent.child(tail), parent, tokens: tail.to_vec(), saved: false });
    }

    /// Writes at most `most` blocks that the file does not have yet, as far as it takes them without waiting. True
    /// if more are left.
    ///
    /// # Errors
    /// If the file fails; it is not used any more then.
    pub fn save(&mut self, most: usize) -> Result<bool, EngineError> {
        for _ in 0..most {
            let Some(spill) = &mut self.spill else { return Ok(false) };
            let Some((id, key)) = spill.next_unsaved() else { return Ok(false) };
            let node = self.blocks[id as usize].node.as_mut().filter(|node| node.key == key && !node.saved);
            let Some(node) = node else { continue };
            let stride = self.geometry.block_stride;
            let bytes = &self.memory[id as usize * stride..(id as usize + 1) * stride];
            match spill.put(node, bytes) {
                Ok(true) => node.saved = true,
                Ok(false) => {
                    spill.put_back(id, key);
                    return Ok(true);
                }
                Err(error) => {
                    self.spill = None;
                    return Err(error);
                }
            }
        }
        Ok(self.spill.as_ref().is_some_and(Spill::has_unsaved))
    }

    /// Brings everything that can be found to the file, and waits for it.
    ///
    /// # Errors
    /// If the file fails.
    pub fn flush(&mut self) -> Result<(), EngineError> {
        loop {
            let more = self.save(usize::MAX)?;
            if let Some(Err(error)) = self.spill.as_mut().map(Spill::flush) {
                self.spill = None;
                return Err(error);
            }
            if !more {
                return Ok(());
            }
        }
    }

    /// Counts of the file, if there is one.
    #[must_use]
    pub fn spilled(&self) -> Option<smoe_store::BlockFileSnapshot> {
        self.spill.as_ref().map(Spill::snapshot)
    }

    fn insert(&mut self, id: u32, node: Node) {
        self.tree.insert(node.parent, id);
        if let Some(spill) = self.spill.as_mut().filter(|_| !node.saved) {
            spill.note_unsaved(id, node.key);
        }
        self.blocks[id as usize].node = Some(node);
    }

    fn forget(&mut self, id: u32) {
        if let Some(node) = self.blocks[id as usize].node.take() {
            self.tree.remove(node.parent, id);
        }
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
        if block.holders == 0 && block.node.is_none() {
            self.free.push(id);
        }
    }

    /// A block with one holder: a free one, or the cached one that was held longest ago.
    fn allocate(&mut self) -> Result<u32, EngineError> {
        let id = match self.free.pop() {
            Some(id) => id,
            None => {
                let cached = self.blocks.iter().enumerate().filter(|(_, block)| block.holders == 0);
                let Some((id, _)) = cached.min_by_key(|(_, block)| block.used) else {
                    let context = self.blocks.len() * BLOCK;
                    return Err(EngineError::ContextFull { needed: context + 1, context });
                };
                let unsaved = self.blocks[id].node.as_ref().is_some_and(|node| !node.saved);
                if unsaved && self.spill.is_some() {
                    // Better late than computed again. A file that fails is given up.
                    let _ = self.flush();
                }
                self.forget(id as u32);
                id as u32
            }
        };
        self.hold(id);
        Ok(id)
    }

    fn copy(&mut self, from: u32, to: u32) {
        let stride = self.geometry.block_stride;
        let from = from as usize * stride;
        self.memory.copy_within(from..from + stride, to as usize * stride);
    }

    /// The blocks of a sequence, in the order of its positions.
    #[must_use]
    pub fn blocks(&self, seq: SeqId) -> &[u32] {
        &self.sequences[seq.0 as usize].blocks
    }

    /// Everything, and where things lie in it.
    #[must_use]
    pub fn memory(&self) -> (&[u8], Geometry) {
        (&self.memory, self.geometry)
    }

    /// Stores key and value (`[head_dim]`) of one position and KV head, whose block is reserved.
    pub fn append(
        &mut self,
        kernels: Kernels,
        layer: usize,
        row: Row,
        head: usize,
        key: &[f32],
        value: &[f32],
    ) {
        let Geometry { block_stride, row_bytes, .. } = self.geometry;
        let block = self.blocks(row.seq)[row.position as usize / BLOCK] as usize;
        let within = row.position as usize % BLOCK * row_bytes;
        for (plane, x) in Plane::BOTH.into_iter().zip([key, value]) {
            let at = block * block_stride + self.geometry.head(layer, plane, head) + within;
            kernels.store_kv_row(self.kv_type, x, &mut self.memory[at..at + row_bytes]);
        }
    }
}

/// One of the two things that a layer keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plane {
    /// Keys.
    Keys = 0,
    /// Values.
    Values = 1,
}

impl Plane {
    /// Keys, then values.
    pub const BOTH: [Self; 2] = [Self::Keys, Self::Values];
}

/// Where things lie in the memory of a cache.
#[derive(Clone, Copy, Debug)]
pub struct Geometry {
    /// Bytes from block to block, a multiple of [`PAGE`].
    pub block_stride: usize,
    /// Bytes from head to head within a plane of a block.
    pub head_stride: usize,
    /// Bytes of a position of a head.
    pub row_bytes: usize,
    n_kv_heads: usize,
}

impl Geometry {
    fn new(spec: &ModelSpec, kv_type: KvType) -> Self {
        let a = &spec.attention;
        let row_bytes = kv_type.row_bytes(a.head_dim);
        let head_stride = BLOCK * row_bytes;
        let block = spec.n_layers() * 2 * a.n_kv_heads * head_stride;
        let block_stride = block.next_multiple_of(PAGE);
        Self { block_stride, head_stride, row_bytes, n_kv_heads: a.n_kv_heads }
    }

    /// Where a head's rows begin within a block.
    #[must_use]
    pub const fn head(&self, layer: usize, plane: Plane, head: usize) -> usize {
        ((layer * 2 + plane as usize) * self.n_kv_heads + head) * self.head_stride
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    /// A spec of two layers, small.
    fn spec() -> ModelSpec {
        smoe_testkit::TinyModel::qwen3(1).spec
    }

    struct Random(u64);

    impl Random {
        fn below(&mut self, n: usize) -> usize {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            (self.0 >> 11) as usize % n
        }
    }

    /// What a position holds depends on all tokens up to it, as keys and values do.
    fn mark(tokens: &[u32]) -> [u8; 8] {
        let mut hash = 0xcbf2_9ce4_8422_2325_u64;
        for token in tokens {
            hash = (hash ^ u64::from(*token)).wrapping_mul(0x0000_0100_0000_01b3);
        }
        hash.to_le_bytes()
    }

    impl KvCache {
        fn place(&self, seq: SeqId, position: usize) -> usize {
            let block = self.blocks(seq)[position / BLOCK] as usize;
            block * self.geometry.block_stride + position % BLOCK * 8
        }
    }

    /// Sequences that begin, go on, roll back, end and begin again, of few different tokens so that they share: each
    /// always holds what its own tokens say, whatever memory there is and whatever went through the file.
    fn agrees_with_the_model(seed: u64, blocks: usize, file: Option<u64>) {
        let dir = tempfile::tempdir().unwrap();
        let mut random = Random(seed);
        let mut kv = KvCache::new(&spec(), KvType::F16, blocks * BLOCK, 4).unwrap();
        if let Some(slots) = file {
            let max_bytes = (slots + 1) * (kv.geometry.block_stride as u64 + 4096) + 65536;
            let config = SpillConfig { path: dir.path().join("kv"), max_bytes };
            kv.spill_to(&config, [seed as u8; 32]).unwrap();
        }
        let mut open: HashMap<usize, (SeqId, Vec<u32>)> = HashMap::new();
        let mut spoken: Vec<Vec<u32>> = vec![Vec::new()];
        let (mut adopted, mut refused) = (0, 0);
        for step in 0..1500 {
            let who = random.below(4);
            match (open.remove(&who), random.below(10)) {
                (None, _) => {
                    // Something that was said before, a part of it, and something new.
                    let mut tokens = spoken[random.below(spoken.len())].clone();
                    tokens.truncate(random.below(tokens.len() + 1));
                    tokens.extend((0..random.below(40)).map(|_| random.below(2) as u32));
                    let seq = kv.open().unwrap();
                    let held = kv.adopt(seq, &tokens);
                    assert!(held <= tokens.len());
                    adopted += held;
                    tokens.truncate(held);
                    open.insert(who, (seq, tokens));
                }
                (Some((seq, mut tokens)), 0..6) => {
                    let n = 1 + random.below(50);
                    if kv.reserve(seq, tokens.len(), tokens.len() + n).is_err() {
                        refused += 1;
                        kv.truncate(seq, tokens.len());
                    } else {
                        for _ in 0..n {
                            tokens.push(random.below(2) as u32);
                            let at = kv.place(seq, tokens.len() - 1);
                            kv.memory[at..at + 8].copy_from_slice(&mark(&tokens));
                        }
                        kv.commit(seq, &tokens);
                    }
                    open.insert(who, (seq, tokens));
                }
                (Some((seq, mut tokens)), 6) => {
                    let len = random.below(tokens.len() + 1);
                    tokens.truncate(kv.truncate(seq, len));
                    open.insert(who, (seq, tokens));
                }
                (Some((seq, tokens)), 7) => {
                    kv.close(seq);
                    spoken.push(tokens);
                }
                (Some((seq, tokens)), _) => {
                    kv.commit_all(seq, &tokens);
                    kv.close(seq);
                    spoken.push(tokens);
                }
            }
            kv.save(random.below(3)).unwrap();
            for (seq, tokens) in open.values() {
                for position in 0..tokens.len() {
                    let at = kv.place(*seq, position);
                    assert_eq!(kv.memory[at..at + 8], mark(&tokens[..=position]), "step {step}, {position}");
                }
            }
            let held: std::collections::HashSet<u32> =
                open.values().flat_map(|(seq, _)| kv.blocks(*seq)).copied().collect();
            let usage = kv.usage();
            assert_eq!(usage.held, held.len(), "step {step}");
            assert_eq!(usage.held + usage.cached + kv.free.len(), blocks);
        }
        for (_, (seq, _)) in open {
            kv.close(seq);
        }
        assert_eq!(kv.usage().held, 0);
        assert!(adopted > 100, "{adopted}");
        println!("{blocks} blocks, file {file:?}: {adopted} adopted, {refused} refused, {:?}", kv.spilled());
    }

    #[test]
    fn every_sequence_holds_its_own_tokens_work() {
        for (seed, blocks) in (1..).zip([6, 9, 16, 40, 200]) {
            agrees_with_the_model(seed, blocks, None);
            agrees_with_the_model(seed, blocks, Some(1000));
            agrees_with_the_model(seed, blocks, Some(12));
        }
    }

    #[test]
    fn a_room_that_is_refused_takes_nothing() {
        let mut kv = KvCache::new(&spec(), KvType::F16, 4 * BLOCK, 2).unwrap();
        let (a, b) = (kv.open().unwrap(), kv.open().unwrap());
        assert!(matches!(kv.open(), Err(EngineError::NoSession { sessions: 2 })));
        kv.reserve(a, 0, 3 * BLOCK).unwrap();
        let refused = kv.reserve(b, 0, BLOCK + 1);
        assert!(matches!(refused, Err(EngineError::ContextFull { needed: 33, context: 32 })));
        assert_eq!(kv.available(), 1);
        kv.reserve(b, 0, BLOCK).unwrap();
        kv.close(a);
        assert_eq!(kv.available(), 3);
    }
}
