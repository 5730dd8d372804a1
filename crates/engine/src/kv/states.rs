//! States of layers that remember no positions: one per sequence, and snapshots of them at block edges.
//!
//! A sequence has two places. A step reads the state before it in one and writes the state after it into the other, so
//! that a step that fails leaves everything as it was; [`States::keep`] changes their parts. What is before the last
//! step is gone then, so nothing is rolled back or shared but to a *snapshot*: the state after some position of a block,
//! which is that block's, travels with it as it is shared, and goes when the block is written or given away.
//!
//! Snapshots are bounded. A step takes them where they are worth most ([`States::expect`]); the one that was used longest
//! ago gives way.

mod device;

use std::cmp::Ordering;

use smoe_format::ModelSpec;
use smoe_kernels::{DeltaMark, DeltaRun, DeltaShape};

use super::{BLOCK, SeqId};
use crate::backend::Row;
pub use device::StateCopy;

/// Positions between snapshots of a long beginning that conversations may share, and of a long answer. A snapshot of
/// Qwen3-Next-80B is 79 MB. EXP-ENGINE-09.
const SPACING: usize = 16 * BLOCK;
/// One in so many of all snapshots may be of a single step's spaced positions, at least one: a long prompt must not take
/// those at the ends of others' conversations. EXP-ENGINE-09.
const SPACED_SHARE: usize = 4;
/// f32 of a cache line, on which states begin.
const LINE: usize = 16;

/// The shape of the states of a model's linear layers.
pub(crate) fn shape(spec: &ModelSpec) -> Option<DeltaShape> {
    spec.delta.map(|delta| DeltaShape {
        n_key_heads: delta.n_key_heads,
        n_value_heads: delta.n_value_heads,
        key_dim: delta.key_dim,
        value_dim: delta.value_dim,
        conv_width: delta.conv_width,
    })
}

/// Bytes of a sequence's state in all layers.
pub(crate) fn bytes(spec: &ModelSpec) -> u64 {
    let floats = shape(spec).map_or(0, |shape| shape.state_len().next_multiple_of(LINE));
    4 * (spec.delta_layers().count() * floats) as u64
}

/// A sequence's state.
#[derive(Clone, Copy, Debug, Default)]
struct Live {
    /// Positions that it has seen.
    at: usize,
    /// Which of its two places has it.
    place: usize,
    /// The snapshot, and its block, that the last step of a prompt took at its last edge.
    edge: Option<(usize, u32)>,
    /// The running step, or the last one, computes a part of a prompt.
    is_prompt: bool,
    /// The last edge before its prompt's last token, from which its answer can be generated again.
    prompt_edge: usize,
    /// Where others are known to go on otherwise: a block's edge.
    part: Option<usize>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Snapshot {
    /// The block that it belongs to, if any.
    block: Option<u32>,
    /// Positions of that block that it has seen.
    fill: usize,
    /// When it was made, or gone back to, last.
    used: u64,
}

/// A snapshot that the running step takes.
#[derive(Clone, Copy, Debug)]
struct Pending {
    seq: SeqId,
    /// Positions that it will have seen.
    position: usize,
    snapshot: usize,
    /// It is at the last edge of a prompt so far.
    is_edge: bool,
}

/// States of all sequences, and snapshots.
#[derive(Debug)]
pub(super) struct States {
    memory: Vec<f32>,
    /// Where the first cache line begins.
    base: usize,
    /// Where each layer's begins within a state.
    layers: Vec<Option<usize>>,
    /// f32 of a state.
    len: usize,
    live: Vec<Live>,
    snapshots: Vec<Snapshot>,
    /// By block.
    of_block: Vec<Option<u32>>,
    pending: Vec<Pending>,
    /// Clock of uses.
    now: u64,
    /// States lie in a device's memory: what is to be copied there.
    device_copies: Option<Vec<StateCopy>>,
}

impl States {
    /// States of so many sequences, and snapshots of blocks; `None` for a model that has none.
    pub(super) fn new(spec: &ModelSpec, sequences: usize, snapshots: usize, blocks: usize) -> Option<Self> {
        let stride = shape(spec)?.state_len().next_multiple_of(LINE);
        let mut len = 0;
        let place = |layer| {
            let at = len;
            spec.delta_of(layer).map(|_| {
                len += stride;
                at
            })
        };
        let layers = (0..spec.n_layers()).map(place).collect();
        // Zeroed pages are claimed as they are first written.
        let memory = vec![0.0f32; (2 * sequences + snapshots) * len + LINE];
        let base = memory.as_ptr().align_offset(4 * LINE).min(LINE);
        Some(Self {
            memory,
            base,
            layers,
            len,
            live: vec![Live::default(); sequences],
            snapshots: vec![Snapshot::default(); snapshots],
            of_block: vec![None; blocks],
            pending: Vec::with_capacity(snapshots),
            now: 0,
            device_copies: None,
        })
    }

    fn of_sequence(&self, seq: SeqId, place: usize) -> usize {
        self.base + (2 * seq.0 as usize + place) * self.len
    }

    fn of_snapshot(&self, snapshot: usize) -> usize {
        self.base + (2 * self.live.len() + snapshot) * self.len
    }

    /// Positions that a sequence's state has seen.
    pub(super) fn at(&self, seq: SeqId) -> usize {
        self.live[seq.0 as usize].at
    }

    /// Forgets what an earlier step was about to take.
    pub(super) fn begin_step(&mut self) {
        self.pending.clear();
    }

    /// A step is about to compute positions `from` to `to` of a sequence, whose blocks these are, of its prompt or of an
    /// answer. Of a prompt a snapshot is taken at the last block edge before its last token, from which its answer can
    /// be generated again: each step of it takes one, instead of the step before. One is taken where others are known to
    /// go on otherwise ([`Self::part_at`]): there the next one begins. Others are taken at [`SPACING`]-th positions, where
    /// all conversations find them: the last ones of the step, so that a long one does not take every place.
    pub(super) fn expect(&mut self, seq: SeqId, from: usize, to: usize, is_prompt: bool, blocks: &[u32]) {
        let edge = to.saturating_sub(1) / BLOCK * BLOCK;
        let live = &mut self.live[seq.0 as usize];
        live.is_prompt = is_prompt;
        if is_prompt {
            live.prompt_edge = edge;
        }
        let part = self.live[seq.0 as usize].part.filter(|part| (from + 1..=to).contains(part));
        if let Some(part) = part.filter(|part| !part.is_multiple_of(SPACING)) {
            self.plan(seq, part, false);
        }
        if is_prompt && !edge.is_multiple_of(SPACING) && part != Some(edge) {
            match edge.cmp(&from) {
                Ordering::Greater => self.plan(seq, edge, true),
                Ordering::Equal => self.snapshot(seq, blocks, true),
                Ordering::Less => {}
            }
        }
        let most = (self.snapshots.len() / SPACED_SHARE).max(1);
        for n in (from / SPACING + 1..=to / SPACING).rev().take(most) {
            self.plan(seq, n * SPACING, false);
        }
    }

    /// Sets a place aside for a snapshot of the running step.
    fn plan(&mut self, seq: SeqId, position: usize, is_edge: bool) {
        let pending = &self.pending;
        let is_free = |snapshot: &usize| pending.iter().all(|other| other.snapshot != *snapshot);
        let free = (0..self.snapshots.len()).filter(is_free);
        let oldest = free.min_by_key(|&i| (self.snapshots[i].block.is_some(), self.snapshots[i].used));
        if let Some(snapshot) = oldest {
            self.clear(snapshot);
            self.pending.push(Pending { seq, position, snapshot, is_edge });
        }
    }

    fn clear(&mut self, snapshot: usize) {
        if let Some(block) = self.snapshots[snapshot].block.take() {
            self.of_block[block as usize] = None;
        }
    }

    /// Gives a snapshot to a block, instead of one that it has.
    fn give(&mut self, snapshot: usize, block: u32, fill: usize) {
        self.forget(block);
        self.now += 1;
        self.snapshots[snapshot] = Snapshot { block: Some(block), fill, used: self.now };
        self.of_block[block as usize] = Some(snapshot as u32);
    }

    /// Whose states rows of a layer go through, and where they and the snapshots of the step lie: `rows` are those of
    /// one call, those of a sequence one after the other.
    pub(super) fn runs(
        &mut self,
        layer: usize,
        rows: &[Row],
        runs: &mut Vec<DeltaRun>,
        marks: &mut Vec<DeltaMark>,
    ) -> &mut [f32] {
        runs.clear();
        marks.clear();
        let offset = self.layers[layer].unwrap_or_default();
        let mut start = 0;
        for own in rows.chunk_by(|a, b| a.seq == b.seq) {
            let (seq, first) = (own[0].seq, own[0].position as usize);
            let Live { at, place, .. } = self.live[seq.0 as usize];
            let [from, to] = [place, 1 - place].map(|place| self.of_sequence(seq, place) + offset);
            // Behind the first rows of a step the state before is that of the step itself.
            let from = if first > at { Some(to) } else { (at > 0).then_some(from) };
            runs.push(DeltaRun { rows: start..start + own.len(), from, to });
            for mark in self.pending.iter().filter(|mark| mark.seq == seq) {
                if (first + 1..=first + own.len()).contains(&mark.position) {
                    let row = start + mark.position - 1 - first;
                    marks.push(DeltaMark { row, to: self.of_snapshot(mark.snapshot) + offset });
                }
            }
            start += own.len();
        }
        &mut self.memory
    }

    /// The step is done: the state of a sequence, whose blocks these are, has seen `at` positions, and its snapshots
    /// count.
    pub(super) fn keep(&mut self, seq: SeqId, at: usize, blocks: &[u32]) {
        let Live { place, edge, is_prompt, .. } = self.live[seq.0 as usize];
        // An answer leaves its prompt's last one alone.
        let mut edge = edge.filter(|_| is_prompt);
        let mut i = 0;
        while i < self.pending.len() {
            let Pending { seq: of, position, snapshot, is_edge } = self.pending[i];
            if of != seq {
                i += 1;
                continue;
            }
            self.pending.swap_remove(i);
            let block = (position - 1) / BLOCK;
            self.give(snapshot, blocks[block], position - block * BLOCK);
            if is_edge {
                self.drop_edge(edge.replace((snapshot, blocks[block])), snapshot);
            }
        }
        self.live[seq.0 as usize] = Live { at, place: 1 - place, edge, ..self.live[seq.0 as usize] };
    }

    /// Clears the snapshot at an earlier edge, if it is still that and not the one that came instead.
    fn drop_edge(&mut self, old: Option<(usize, u32)>, new: usize) {
        if let Some((old, block)) = old
            && old != new
            && self.snapshots[old].block == Some(block)
        {
            self.clear(old);
        }
    }

    /// Takes a snapshot of a sequence, whose blocks these are, as it is: for its end, or as the last edge of its prompt.
    pub(super) fn snapshot(&mut self, seq: SeqId, blocks: &[u32], is_edge: bool) {
        let Live { at, place, edge, .. } = self.live[seq.0 as usize];
        let Some(index) = at.checked_sub(1).map(|last| last / BLOCK) else { return };
        let n = self.pending.len();
        self.plan(seq, at, false);
        let Some(Pending { snapshot, .. }) = self.pending.get(n).copied() else { return };
        self.pending.truncate(n);
        let (from, to) = (self.of_sequence(seq, place), self.of_snapshot(snapshot));
        self.copy(from, to);
        self.give(snapshot, blocks[index], at - index * BLOCK);
        if is_edge {
            self.drop_edge(edge, snapshot);
            self.live[seq.0 as usize].edge = Some((snapshot, blocks[index]));
        }
    }

    /// A block is given away, or goes on from its first position.
    pub(super) fn forget(&mut self, block: u32) {
        if let Some(snapshot) = self.of_block[block as usize] {
            self.clear(snapshot as usize);
        }
    }

    /// A block is written from its `fill`-th position on.
    pub(super) fn write(&mut self, block: u32, fill: usize) {
        if self.fill(block).is_some_and(|seen| seen > fill) {
            self.forget(block);
        }
    }

    /// A block gives way to another that holds the same.
    pub(super) fn replace(&mut self, block: u32, by: u32) {
        if let (Some(snapshot), None) = (self.of_block[block as usize], self.of_block[by as usize]) {
            let fill = self.snapshots[snapshot as usize].fill;
            self.clear(snapshot as usize);
            self.give(snapshot as usize, by, fill);
        }
    }

    /// How many positions of a block its snapshot has seen.
    pub(super) fn fill(&self, block: u32) -> Option<usize> {
        self.of_block[block as usize].map(|snapshot| self.snapshots[snapshot as usize].fill)
    }

    /// The state of a sequence becomes the one after the most positions of its blocks, `most` at most, that has a
    /// snapshot, or that before the first; returns how many that are.
    pub(super) fn go_to(&mut self, seq: SeqId, blocks: &[u32], most: usize) -> usize {
        let found = blocks.iter().enumerate().rev().find_map(|(i, &block)| {
            let snapshot = self.of_block[block as usize]? as usize;
            let position = i * BLOCK + self.snapshots[snapshot].fill;
            (position <= most).then_some((snapshot, position))
        });
        let live = &mut self.live[seq.0 as usize];
        (live.edge, live.prompt_edge, live.part) = (None, 0, None);
        live.at = found.map_or(0, |(_, position)| position);
        let (at, place) = (live.at, live.place);
        if let Some((snapshot, _)) = found {
            let (from, to) = (self.of_snapshot(snapshot), self.of_sequence(seq, place));
            self.copy(from, to);
            self.now += 1;
            self.snapshots[snapshot].used = self.now;
        }
        at
    }

    /// As [`Self::go_to`], if the state has seen more.
    pub(super) fn go_back(&mut self, seq: SeqId, blocks: &[u32], most: usize) -> usize {
        if self.at(seq) <= most { self.at(seq) } else { self.go_to(seq, blocks, most) }
    }

    /// f32 of a state.
    pub(super) const fn len(&self) -> usize {
        self.len
    }

    /// The snapshot of a block that has seen so many of its positions.
    pub(super) fn snapshot_of(&self, block: u32, fill: usize) -> Option<&[f32]> {
        let snapshot = self.of_block[block as usize]? as usize;
        let at = self.of_snapshot(snapshot);
        (self.snapshots[snapshot].fill == fill).then(|| &self.memory[at..at + self.len])
    }

    /// Where the state of a sequence that is empty is read into, in parts, until it has [arrived](Self::arrive).
    pub(super) fn room(&mut self, seq: SeqId) -> &mut [f32] {
        let at = self.of_sequence(seq, self.live[seq.0 as usize].place);
        &mut self.memory[at..at + self.len]
    }

    /// The state of a sequence was read, which is that after `at` positions, the last of which is in the last of these
    /// blocks: a snapshot of it stays.
    pub(super) fn arrive(&mut self, seq: SeqId, at: usize, blocks: &[u32]) {
        let live = &mut self.live[seq.0 as usize];
        (live.at, live.edge, live.prompt_edge, live.part) = (at, None, 0, None);
        self.snapshot(seq, blocks, false);
    }

    /// Others are known to have the sequence's tokens up to there, the edge of a block, and to go on otherwise, or may
    /// begin there as it did.
    pub(super) fn part_at(&mut self, seq: SeqId, position: usize) {
        self.live[seq.0 as usize].part = Some(position);
    }

    /// Where that is.
    pub(super) fn parting(&self, seq: SeqId) -> Option<usize> {
        self.live[seq.0 as usize].part
    }

    /// The last edge of its prompt.
    pub(super) fn prompt_edge(&self, seq: SeqId) -> usize {
        self.live[seq.0 as usize].prompt_edge
    }

    /// For tests: the state.
    #[cfg(test)]
    pub(super) fn state(&self, seq: SeqId) -> &[f32] {
        let at = self.of_sequence(seq, self.live[seq.0 as usize].place);
        &self.memory[at..at + self.len]
    }
}
