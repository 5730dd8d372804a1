//! The KV cache: what attention remembers of earlier positions.
//!
//! Families differ in what a layer keeps, so each layer has its own planes ([`Geometry::plane`]), or a state of fixed size
//! instead (`states.rs`). Keys and values are kept in blocks of [`BLOCK`] positions of all layers; a sequence holds a
//! table of block numbers. Layers that see a window only have blocks of their own, of which a sequence holds no more than
//! it sees (`windows.rs`). Blocks that are complete can be shared by every sequence that begins with the same tokens
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
//! [`KvCache::adopt`] say how far that is, and the rest is computed again. The file has those at the ends of conversations
//! and where they part (`stateful.rs`). Of windows it is the same where their blocks are gone; the file has those too.
//!
//! Nobody waits for the file for long. A block is written while others are computed; one that must give way before that
//! is waited for within a bound, and then lost: it is computed again one day. A prefix that is in the file is
//! read in parts ([`KvCache::adopt_some`]).

mod adopt;
mod device;
mod file;
mod geometry;
mod pool;
mod prefix;
mod room;
mod share;
mod spill;
mod stateful;
mod states;
mod windowed;
mod windows;

use std::time::Duration;

use smoe_format::ModelSpec;
use smoe_kernels::{DeltaMark, DeltaRun, Kernels, KvType};
use smoe_store::AlignedBuf;

use crate::EngineError;
use crate::backend::Row;
pub use geometry::{Geometry, Plane, PlaneGeometry};
use pool::Pool;
use prefix::{Key, Tree};
use spill::Spill;
pub use spill::{Opened, SpillConfig};
pub use states::StateCopy;
use states::States;
pub(crate) use states::{bytes as state_bytes, shape as state_shape};
pub(crate) use windows::blocks as window_blocks;
use windows::{GONE, Windows};

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
    /// Of the state that it begins with and that is being read: its name, and how many of its pieces have come.
    reading: Option<(Key, usize)>,
    open: bool,
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
    /// Those of layers that see a window, if they have their own.
    pub window_blocks: usize,
    /// Of those, held by open sequences.
    pub window_held: usize,
    /// Bytes that all of them take.
    pub bytes: u64,
    /// Whether there is a file that is used.
    pub has_file: bool,
    /// Reads and writes of the file that failed.
    pub file_failures: u64,
    /// Blocks that gave way before the file had taken them.
    pub lost: u64,
    /// States that the file should have had, and that gave way before it had taken them.
    pub lost_states: u64,
}

/// A block that a device copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockCopy {
    /// What is copied.
    pub from: u32,
    /// What it becomes.
    pub to: u32,
    /// They are blocks of layers that see a window, which have their own.
    pub is_window: bool,
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
    pool: Pool,
    /// Of layers that see a window, if they have blocks of their own.
    windows: Option<Windows>,
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
    /// Blocks, and states, that gave way before the file had taken them.
    lost: u64,
    lost_states: u64,
    /// What went wrong with the file and was not told yet; and whether its first failure was noted.
    warnings: Vec<EngineError>,
    told: bool,
    /// Blocks lie in a device's memory: what is to be copied there.
    device_copies: Option<Vec<BlockCopy>>,
}

impl KvCache {
    /// A cache of `positions` positions for at most `sequences` sequences, of which every layer keeps all. Its address
    /// space is claimed now, pages as they are first written. Of states that layers keep instead there are no snapshots
    /// before [`Self::with_snapshots`].
    ///
    /// # Errors
    /// If there is no memory.
    pub fn new(
        spec: &ModelSpec,
        kv_type: KvType,
        positions: usize,
        sequences: usize,
    ) -> Result<Self, EngineError> {
        let geometry = Geometry::new(spec, kv_type, |_| true);
        let n = positions.div_ceil(BLOCK);
        Ok(Self {
            kv_type,
            memory: AlignedBuf::zeroed(n * geometry.block_stride)?,
            geometry,
            pool: Pool::new(n),
            windows: None,
            sequences: (0..sequences)
                .map(|_| {
                    let (blocks, keys) = (Vec::with_capacity(n), Vec::with_capacity(n));
                    Sequence { blocks, keys, reading: None, open: false }
                })
                .collect(),
            tree: Tree::new(n),
            spill: None,
            states: States::new(spec, sequences, 0, n),
            patience: WAIT,
            file_failures: 0,
            lost: 0,
            lost_states: 0,
            warnings: Vec::new(),
            told: false,
            device_copies: None,
        })
    }

    /// With `blocks` blocks for the layers that see a window, which keep no more than is seen and needed again; if any
    /// layer does. As many as [`Plan::window_blocks`](crate::plan::Plan::window_blocks) never run short.
    ///
    /// # Errors
    /// If there is no memory.
    pub fn with_windows(mut self, spec: &ModelSpec, blocks: usize) -> Result<Self, EngineError> {
        let (n, sequences) = (self.pool.len(), self.sequences.len());
        if blocks > 0
            && let Some(windows) = Windows::new(spec, self.kv_type, blocks, n, sequences)?
        {
            self.geometry = Geometry::new(spec, self.kv_type, |layer| spec.window(layer).is_none());
            self.memory = AlignedBuf::zeroed(n * self.geometry.block_stride)?;
            self.windows = Some(windows);
        }
        Ok(self)
    }

    /// With room for so many snapshots of states, if layers keep any.
    #[must_use]
    pub fn with_snapshots(mut self, spec: &ModelSpec, snapshots: usize) -> Self {
        self.states = States::new(spec, self.sequences.len(), snapshots, self.pool.len());
        self
    }

    /// Bytes of a cache of `positions` positions, without states, of which every layer keeps all.
    #[must_use]
    pub fn bytes(spec: &ModelSpec, kv_type: KvType, positions: usize) -> u64 {
        Self::windowed_bytes(spec, kv_type, positions, 0)
    }

    /// As [`Self::bytes`], [`Self::with_windows`] of so many blocks.
    #[must_use]
    pub fn windowed_bytes(spec: &ModelSpec, kv_type: KvType, positions: usize, blocks: usize) -> u64 {
        let keeps = |windowed| move |layer| blocks == 0 || spec.window(layer).is_some() == windowed;
        let stride = |windowed| Geometry::new(spec, kv_type, keeps(windowed)).block_stride;
        let windows = if blocks == 0 { 0 } else { blocks * stride(true) };
        (positions.div_ceil(BLOCK) * stride(false) + windows) as u64
    }

    /// How numbers are kept.
    #[must_use]
    pub const fn kv_type(&self) -> KvType {
        self.kv_type
    }

    /// Blocks, by what they are used for.
    #[must_use]
    pub fn usage(&self) -> KvUse {
        let windows = self.windows.as_ref().map(|windows| &windows.pool);
        KvUse {
            blocks: self.pool.len(),
            held: self.pool.held(),
            cached: self.pool.cached(),
            window_blocks: windows.map_or(0, Pool::len),
            window_held: windows.map_or(0, Pool::held),
            bytes: (self.memory.len() + self.windows.as_ref().map_or(0, |windows| windows.memory.len()))
                as u64,
            has_file: self.spill.is_some(),
            file_failures: self.file_failures + self.spill.as_ref().map_or(0, Spill::failures),
            lost: self.lost,
            lost_states: self.lost_states,
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

    /// A step is about to compute positions `from` to `to` of a sequence, whose blocks are reserved: of its prompt, or
    /// of an answer.
    pub fn expect(&mut self, seq: SeqId, from: usize, to: usize, is_prompt: bool) {
        if let Some(states) = &mut self.states {
            // What was read of a state is written over.
            self.sequences[seq.0 as usize].reading = None;
            states.expect(seq, from, to, is_prompt, &self.sequences[seq.0 as usize].blocks);
        }
        if let Some(windows) = self.windows.as_mut().filter(|_| is_prompt && to > from) {
            // The last token of a prompt is always computed again.
            windows.expect_answer(seq, to - 1);
        }
    }

    /// A sequence holds `len` positions after a step, and others may find them: it lets go of blocks that no window of
    /// its own will see again, but for a few tokens that may be taken back, and the window at which its answer began.
    pub fn slide(&mut self, seq: SeqId, len: usize) {
        if let Some(windows) = &mut self.windows {
            windows.slide(seq, len);
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

    /// The blocks of a sequence, in the order of its positions: those of layers that see all of them.
    #[must_use]
    pub fn blocks(&self, seq: SeqId) -> &[u32] {
        &self.sequences[seq.0 as usize].blocks
    }

    /// The same for any layer. Of one that sees a window, what no token sees any more is in no memory.
    #[must_use]
    pub fn table(&self, layer: usize, seq: SeqId) -> &[u32] {
        self.windows_of(layer).map_or_else(|| self.blocks(seq), |windows| windows.table(seq))
    }

    /// Whether a layer's blocks are those of layers that see a window.
    #[must_use]
    pub fn is_windowed(&self, layer: usize) -> bool {
        self.windows_of(layer).is_some()
    }

    /// The blocks of layers that see a window, if they have their own: as many as [`Self::blocks`]. What no token sees any
    /// more is in no memory.
    #[must_use]
    pub fn window_table(&self, seq: SeqId) -> Option<&[u32]> {
        self.windows.as_ref().map(|windows| windows.table(seq))
    }

    /// The memory in which a layer's blocks lie, and where things lie in it.
    #[must_use]
    pub fn memory(&self, layer: usize) -> (&[u8], &Geometry) {
        match self.windows_of(layer) {
            Some(windows) => (&windows.memory, &windows.geometry),
            None => (&self.memory, &self.geometry),
        }
    }

    /// If a layer's blocks are among those.
    fn windows_of(&self, layer: usize) -> Option<&Windows> {
        self.windows.as_ref().filter(|windows| windows.geometry.plane(layer, Plane::Keys).is_some())
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
        let geometry = self.memory(layer).1;
        let Some(plane) = geometry.plane(layer, plane) else { return };
        let block = self.table(layer, row.seq)[row.position as usize / BLOCK] as usize;
        let within = plane.head(head) + row.position as usize % BLOCK * plane.row_bytes;
        let at = block * geometry.block_stride + within;
        let memory = match &mut self.windows {
            Some(windows) if windows.geometry.plane(layer, Plane::Keys).is_some() => &mut windows.memory,
            _ => &mut self.memory,
        };
        kernels.store_kv_row(self.kv_type, x, &mut memory[at..at + plane.row_bytes]);
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
