//! Blocks of layers whose attention sees a window: a sequence holds those that its next token sees, and no more.
//!
//! Such layers have a pool of blocks of their own, in which position p of a sequence is in the same place of a block as
//! in the others' pool. A sequence's table is as long as that of the other blocks; what no window sees any more is
//! [`GONE`] in it.
//!
//! ```text
//! table     = GONE | GONE | 17 | 4 | GONE | GONE | GONE | 9 | 3 | 12
//!                          └ answer ┘                   └ the last token's ┘
//! ```
//!
//! A block that others may find goes with one of the other pool, its *companion*, while it lasts. A sequence can begin, or
//! go back to, a *place* only if every block that the next token's window sees is there ([`Windows::place`]). So not
//! every block is worth its memory: those of windows where conversations ended, where an answer began, or where
//! conversations part are *needed*, and others give way first.

use std::ops::Range;

use smoe_format::ModelSpec;
use smoe_kernels::KvType;
use smoe_store::{AlignedBuf, OutOfMemory};

use super::geometry::Geometry;
use super::pool::Pool;
use super::{BLOCK, BlockCopy, SeqId};

/// No block: reading it is out of bounds of every memory.
pub(super) const GONE: u32 = u32::MAX;
/// One in so many positions of the cache has room for windows to be found again, beside what sequences hold.
/// EXP-ENGINE-10.
const KEPT_SHARE: usize = 16;

/// Positions of the widest window of a model, if it has any. Linear attention beside windows keeps everything: no model
/// has both.
pub(crate) fn width(spec: &ModelSpec) -> Option<usize> {
    let windows = (0..spec.n_layers()).filter_map(|layer| spec.window(layer));
    windows.max().filter(|_| spec.delta.is_none())
}

/// Blocks that windows need in a cache of so many positions, sequences and tokens of a step: those that the sequences'
/// next tokens see and those that a step adds, at any cut; a window a sequence at which its answer began, and some to be
/// found again. 0 for a model without windows.
pub(crate) fn blocks(spec: &ModelSpec, positions: usize, sequences: usize, step: usize) -> usize {
    let Some(width) = width(spec).map(|width| width.min(positions)) else { return 0 };
    // After a step a block more than is seen is held: a few tokens may be taken back.
    let live = (width + 2 * BLOCK - 3) / BLOCK + 2;
    let all = positions.div_ceil(BLOCK);
    let kept = (all / KEPT_SHARE).max(sequences * (width / BLOCK + 2));
    // And one that is being copied.
    (sequences * live + step.div_ceil(BLOCK) + kept + 1).min(all)
}

/// A sequence's blocks.
#[derive(Debug, Default)]
struct Table {
    blocks: Vec<u32>,
    /// Before this one all are gone, but for those of the answer's window.
    from: usize,
    /// Where the answer to the last prompt began.
    answer: Option<usize>,
    /// Where others go on otherwise.
    parting: Option<usize>,
}

/// The blocks of all windowed layers.
#[derive(Debug)]
pub(super) struct Windows {
    width: usize,
    pub(super) geometry: Geometry,
    pub(super) memory: AlignedBuf,
    pub(super) pool: Pool,
    /// By block of this pool: its companion, if it can be found.
    companion: Vec<Option<u32>>,
    /// By block of this pool: it gives way after those that are not needed.
    needed: Vec<bool>,
    /// By block of the other pool: its companion of this one.
    of: Vec<Option<u32>>,
    tables: Vec<Table>,
}

impl Windows {
    /// `blocks` blocks beside `others` of the layers that see all; `None` for a model that has no windows.
    pub(super) fn new(
        spec: &ModelSpec,
        kv_type: KvType,
        blocks: usize,
        others: usize,
        sequences: usize,
    ) -> Result<Option<Self>, OutOfMemory> {
        let Some(width) = width(spec) else { return Ok(None) };
        let geometry = Geometry::new(spec, kv_type, |layer| spec.window(layer).is_some());
        let table = || Table { blocks: Vec::with_capacity(others), ..Table::default() };
        Ok(Some(Self {
            width,
            memory: AlignedBuf::zeroed(blocks * geometry.block_stride)?,
            geometry,
            pool: Pool::new(blocks),
            companion: vec![None; blocks],
            needed: vec![false; blocks],
            of: vec![None; others],
            tables: (0..sequences).map(|_| table()).collect(),
        }))
    }

    /// The blocks that the token at position `len`, the next one, sees of those before it.
    pub(super) fn range(&self, len: usize) -> Range<usize> {
        (len + 1).saturating_sub(self.width) / BLOCK..len.div_ceil(BLOCK)
    }

    /// The longest beginning, of at most `len` positions, whose window is whole: `has` says which blocks are there.
    pub(super) fn place(&self, mut len: usize, has: impl Fn(usize) -> bool) -> usize {
        // Without a block there is no place from behind it until its last position is out of sight.
        while let Some(lacked) = self.range(len).find(|&i| !has(i)) {
            len = lacked * BLOCK;
        }
        len
    }

    /// A sequence's blocks.
    pub(super) fn table(&self, seq: SeqId) -> &[u32] {
        &self.tables[seq.0 as usize].blocks
    }

    /// A sequence goes on with a block that it holds, or with [`GONE`].
    pub(super) fn push(&mut self, seq: SeqId, block: u32) {
        self.tables[seq.0 as usize].blocks.push(block);
    }

    /// Another block instead of that at `index`, which is given back.
    pub(super) fn replace(&mut self, seq: SeqId, index: usize, by: u32) -> u32 {
        std::mem::replace(&mut self.tables[seq.0 as usize].blocks[index], by)
    }

    /// One holder less.
    pub(super) fn let_go(&mut self, block: u32, needed: bool) {
        if block == GONE || !self.pool.release(block) {
            return;
        }
        self.needed[block as usize] = needed;
        if self.companion[block as usize].is_none() {
            self.pool.set_free(block);
        }
    }

    fn let_go_at(&mut self, seq: SeqId, index: usize) {
        let parting = self.tables[seq.0 as usize].parting.map(|len| self.range(len));
        let block = self.replace(seq, index, GONE);
        self.let_go(block, parting.is_some_and(|parting| parting.contains(&index)));
    }

    /// The answer to a sequence's prompt will begin at `len`: its window is held until another prompt comes.
    pub(super) fn expect_answer(&mut self, seq: SeqId, len: usize) {
        let new = self.range(len);
        let table = &mut self.tables[seq.0 as usize];
        let from = table.from;
        if let Some(old) = table.answer.replace(len) {
            let old = self.range(old);
            (old.start..old.end.min(from)).filter(|i| !new.contains(i)).for_each(|i| self.let_go_at(seq, i));
        }
    }

    /// Others go on otherwise than a sequence from here on.
    pub(super) fn part_at(&mut self, seq: SeqId, len: Option<usize>) {
        self.tables[seq.0 as usize].parting = len;
    }

    /// Lets go of what a sequence of `len` positions sees no more, but for a block's length, so that a few tokens can be
    /// taken back.
    pub(super) fn slide(&mut self, seq: SeqId, len: usize) {
        let to = self.range(len.saturating_sub(BLOCK)).start;
        let table = &self.tables[seq.0 as usize];
        let (from, answer) = (table.from, table.answer.map_or(0..0, |len| self.range(len)));
        for i in from..to {
            if !answer.contains(&i) {
                self.let_go_at(seq, i);
            }
        }
        self.tables[seq.0 as usize].from = from.max(to);
    }

    /// Goes back to the longest beginning of a sequence, of at most `most` positions, whose window is there, and holds
    /// it; `blocks` are the sequence's of the other pool.
    pub(super) fn go_back(&mut self, seq: SeqId, blocks: &[u32], most: usize) -> usize {
        let own = self.table(seq);
        let has = |i: usize| {
            let pair = own.get(i).zip(blocks.get(i));
            pair.is_none_or(|(&block, &other)| block != GONE || self.of[other as usize].is_some())
        };
        let len = self.place(most, has);
        let range = self.range(len);
        self.take(seq, blocks, range.clone());
        let table = &mut self.tables[seq.0 as usize];
        table.from = table.from.min(range.start);
        table.answer = table.answer.filter(|&answer| answer <= len);
        table.parting = table.parting.filter(|&parting| parting <= len);
        len
    }

    /// Holds what can be found of a part of a sequence.
    pub(super) fn take(&mut self, seq: SeqId, blocks: &[u32], part: Range<usize>) {
        for i in part {
            let table = &mut self.tables[seq.0 as usize].blocks;
            if let Some(own) = table.get_mut(i).filter(|own| **own == GONE)
                && let Some(found) = blocks.get(i).and_then(|&block| self.of[block as usize])
            {
                *own = found;
                self.pool.hold(found);
            }
        }
    }

    /// Gives back the blocks of a sequence beyond `keep`, the last first.
    pub(super) fn give_back(&mut self, seq: SeqId, keep: usize) {
        while self.table(seq).len() > keep
            && let Some(block) = self.tables[seq.0 as usize].blocks.pop()
        {
            self.let_go(block, true);
        }
        let table = &mut self.tables[seq.0 as usize];
        table.from = table.from.min(keep);
        if keep == 0 {
            (table.answer, table.parting) = (None, None);
        }
    }

    /// The companion of a block of the other pool.
    pub(super) fn of(&self, other: u32) -> Option<u32> {
        self.of[other as usize]
    }

    /// A block can be found with one of the other pool, if neither has a companion.
    pub(super) fn join(&mut self, block: u32, other: u32) {
        if block != GONE && self.of[other as usize].is_none() && self.companion[block as usize].is_none() {
            self.of[other as usize] = Some(block);
            self.companion[block as usize] = Some(other);
        }
    }

    /// A sequence goes on with a block `other` of the other pool instead of an equal one of its own: then with its
    /// companion too, or that becomes the sequence's own.
    pub(super) fn agree(&mut self, seq: SeqId, index: usize, other: u32) {
        let own = self.table(seq)[index];
        match self.of[other as usize] {
            Some(known) if own != GONE && known != own => {
                self.pool.hold(known);
                self.replace(seq, index, known);
                self.let_go(own, false);
            }
            Some(_) => {}
            None => self.join(own, other),
        }
    }

    /// A block of the other pool can be found no more.
    pub(super) fn forget(&mut self, other: u32) {
        let Some(block) = self.of[other as usize].take() else { return };
        self.companion[block as usize] = None;
        if self.pool.holders(block) == 0 {
            self.pool.set_free(block);
        }
    }

    /// The block to give way, and its companion, of those whose companions are meant.
    pub(super) fn oldest(&self, is_meant: impl Fn(u32) -> bool) -> Option<(u32, u32)> {
        let cached = self.pool.unheld().filter_map(|(id, used)| {
            let other = self.companion[id as usize].filter(|&other| is_meant(other))?;
            Some((id, other, (self.needed[id as usize], used)))
        });
        cached.min_by_key(|(_, _, order)| *order).map(|(id, other, _)| (id, other))
    }

    /// A block that nobody holds can be found no more, and is the caller's.
    pub(super) fn evict(&mut self, block: u32) {
        if let Some(other) = self.companion[block as usize].take() {
            self.of[other as usize] = None;
        }
    }

    /// The bytes of a block.
    pub(super) fn bytes(&self, block: u32) -> &[u8] {
        let stride = self.geometry.block_stride;
        &self.memory[block as usize * stride..(block as usize + 1) * stride]
    }

    /// Copies a block; if blocks lie in a device's memory, notes that it is to be copied there.
    pub(super) fn copy(&mut self, from: u32, to: u32, device: &mut Option<Vec<BlockCopy>>) {
        if let Some(copies) = device {
            copies.push(BlockCopy { from, to, is_window: true });
            return;
        }
        let stride = self.geometry.block_stride;
        let from = from as usize * stride;
        self.memory.copy_within(from..from + stride, to as usize * stride);
    }
}
