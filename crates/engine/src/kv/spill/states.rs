//! States in the file: each is cut into pieces of a block's size, which the file takes as it takes blocks.
//!
//! A state is as large as many blocks: 79 MB of Qwen3-Next-80B, whose blocks have 0.8 MB. So one bound, one order of use
//! and one short queue serve both, no buffer is as large as a state, and a step writes or reads as little of one as it
//! does of blocks.
//!
//! ```text
//!                 key                                    parent                     note
//! first piece     S, of the beginning ([`Key::state`])   key of the block before    the block's tokens up to there, and
//!                                                                                   PIECE, or PARTING
//! piece i         S + i                                  S + i - 1                  PIECE
//! ```
//!
//! What a state is follows from its tokens to the bit, so it does not matter which of its pieces was written when. It is
//! there if all of them are: one that was not written to its end, or of which a piece has given way or is damaged, is not
//! found. The last piece is the first to give way.

use std::collections::VecDeque;

use smoe_store::{AlignedBuf, BlockFileError, BlockMeta, OutOfMemory};

use super::super::BLOCK;
use super::super::prefix::{Key, Node, Tokens};
use super::{STAGE, Spill};

/// Ends the note of a piece, which no block's note does where layers keep states: those are words.
const PIECE: u8 = 2;
/// Instead, of the first piece of a state where conversations part.
const PARTING: u8 = 3;

/// How states lie in a file, and which are to come.
#[derive(Debug)]
pub(in crate::kv) struct Pieces {
    /// Room for some pieces.
    stage: AlignedBuf,
    /// f32 of a piece, as many as fill a block.
    piece: usize,
    /// Pieces of a state.
    n: usize,
    /// Those that the file does not have, the first of them in part.
    unsaved: VecDeque<UnsavedState>,
}

/// A snapshot that the file should have.
#[derive(Clone, Copy, Debug)]
pub(in crate::kv) struct UnsavedState {
    /// The block that it belongs to.
    pub(in crate::kv) id: u32,
    /// The beginning before that block, and the tokens of the block that the state has seen.
    pub(in crate::kv) parent: Key,
    pub(in crate::kv) tokens: Tokens,
    /// Conversations part there.
    pub(in crate::kv) is_parting: bool,
    /// Pieces that the file has taken.
    pub(in crate::kv) done: usize,
}

impl UnsavedState {
    /// Whether a block still holds those tokens.
    pub(in crate::kv) fn is_of(&self, node: &Node) -> bool {
        node.parent == self.parent && node.tokens.starts_with(&self.tokens)
    }

    fn key(&self) -> Key {
        self.parent.child(&self.tokens).state()
    }
}

/// Pieces of states of so many f32 in a file for blocks of so many bytes.
pub(in crate::kv) const fn count(floats: usize, block_bytes: usize) -> usize {
    floats.div_ceil(block_bytes / size_of::<f32>())
}

/// Whether a block of the file is a piece of a state.
pub(super) fn is_piece(meta: &BlockMeta) -> bool {
    matches!(meta.note.last(), Some(&(PIECE | PARTING))) && meta.note.len() % 4 == 1
}

/// The name of a state's `i`-th piece.
const fn piece_key(state: Key, i: usize) -> u128 {
    state.0.wrapping_add(i as u128)
}

impl Spill {
    /// For states of so many f32 beside blocks of so many bytes.
    ///
    /// # Errors
    /// If there is no memory.
    pub(in crate::kv) fn with_states(self, floats: usize, block_bytes: usize) -> Result<Self, OutOfMemory> {
        let pieces = Pieces {
            stage: AlignedBuf::zeroed(STAGE * block_bytes)?,
            piece: block_bytes / size_of::<f32>(),
            n: count(floats, block_bytes),
            unsaved: VecDeque::new(),
        };
        Ok(Self { pieces: Some(pieces), ..self })
    }

    /// Blocks of the file that a state takes.
    pub(in crate::kv) fn pieces(&self) -> usize {
        self.pieces.as_ref().map_or(0, |pieces| pieces.n)
    }

    /// Whether the file has the whole state of this name.
    pub(in crate::kv) fn holds_state(&self, state: Key) -> bool {
        let n = self.pieces();
        n > 0 && (0..n).all(|i| self.file.contains(piece_key(state, i)))
    }

    /// Of the states after `parent` and the first tokens of `own`, one block's at most: that which has seen the most of
    /// them, its name and how many that are; of those numbers that `suits` says.
    pub(in crate::kv) fn state_after(
        &self,
        parent: Key,
        own: &[u32],
        suits: impl Fn(usize) -> bool,
    ) -> Option<(Key, usize)> {
        let seen = |meta: &BlockMeta| {
            let words = meta.note.len() / 4;
            let is_so = is_piece(meta)
                && (1..=own.len().min(BLOCK)).contains(&words)
                && meta.note.chunks_exact(4).zip(own).all(|(word, token)| word == token.to_le_bytes());
            is_so.then_some((Key(meta.key), words))
        };
        let states = self.file.children(parent.0).filter_map(seen).filter(|&(_, fill)| suits(fill));
        // What the key does not name is not what it says.
        let is_whole = |&(state, fill): &(Key, usize)| {
            parent.child(&own[..fill]).state() == state && self.holds_state(state)
        };
        states.filter(is_whole).max_by_key(|(_, fill)| *fill)
    }

    /// Whole states.
    #[cfg(test)]
    pub(in crate::kv) fn ends(&self) -> impl Iterator<Item = Key> {
        let firsts = self.file.entries().filter(|meta| is_piece(meta) && meta.note.len() > 1);
        firsts.map(|meta| Key(meta.key)).filter(|&state| self.holds_state(state))
    }

    /// Notes that a state was used. What it continues is to be touched behind it.
    pub(in crate::kv) fn touch_state(&mut self, state: Key) {
        (0..self.pieces()).rev().for_each(|i| self.file.touch(piece_key(state, i)));
    }

    /// States at the ends of conversations after `parent` and the first tokens of `own`, a block's, are worth less than all
    /// else, and so are the blocks that are not complete there. Not where conversations part.
    pub(in crate::kv) fn demote_ends(&mut self, parent: Key, own: &[u32]) {
        let ends = self.file.children(parent.0).filter(|meta| {
            let words = meta.note.chunks_exact(4);
            is_piece(meta)
                && meta.note.last() == Some(&PIECE)
                && words.len() <= own.len()
                && words.zip(own).all(|(word, token)| word == token.to_le_bytes())
        });
        let ends: Vec<(Key, usize)> = ends.map(|meta| (Key(meta.key), meta.note.len() / 4)).collect();
        for (state, fill) in ends {
            (0..self.pieces()).for_each(|i| self.file.demote(piece_key(state, i)));
            if fill < BLOCK {
                self.file.demote(parent.child(&own[..fill]).0);
            }
        }
    }

    /// Notes a state that the file should have, unless that is known.
    pub(in crate::kv) fn note_state(&mut self, unsaved: UnsavedState) {
        let Some(pieces) = &mut self.pieces else { return };
        let is_same = |other: &UnsavedState| {
            other.parent == unsaved.parent && *other.tokens == *unsaved.tokens && other.id == unsaved.id
        };
        if !pieces.unsaved.iter().any(is_same) {
            pieces.unsaved.push_back(unsaved);
        }
    }

    /// The state whose next piece comes next.
    pub(in crate::kv) fn next_state(&self) -> Option<UnsavedState> {
        self.pieces.as_ref()?.unsaved.front().copied()
    }

    /// That one is not to come any more.
    pub(in crate::kv) fn drop_state(&mut self) {
        if let Some(pieces) = &mut self.pieces {
            pieces.unsaved.pop_front();
        }
    }

    /// Pieces that are to come.
    pub(in crate::kv) fn unsaved_pieces(&self) -> usize {
        let unsaved = |pieces: &Pieces| pieces.unsaved.iter().map(|state| pieces.n - state.done).sum();
        self.pieces.as_ref().map_or(0, unsaved)
    }

    /// Queues the next piece of the [next](Self::next_state) state, which is `floats`. False if the file is busy.
    ///
    /// # Errors
    /// If the file is of no use.
    pub(in crate::kv) fn put_piece(&mut self, floats: &[f32]) -> Result<bool, BlockFileError> {
        let Some(pieces) = &mut self.pieces else { return Ok(true) };
        let Some(next) = pieces.unsaved.front_mut() else { return Ok(true) };
        let (state, i) = (next.key(), next.done);
        let before = i.checked_sub(1).map(|before| piece_key(state, before));
        let taken = if before.is_some_and(|before| !self.file.contains(before)) {
            // It failed, or has given way already: the rest is of no use.
            Err(())
        } else {
            let own = &floats[i * pieces.piece..floats.len().min((i + 1) * pieces.piece)];
            let bytes = &mut pieces.stage[..pieces.piece * size_of::<f32>()];
            let (body, rest) = bytes.split_at_mut(size_of_val(own));
            body.chunks_exact_mut(4).zip(own).for_each(|(to, x)| to.copy_from_slice(&x.to_le_bytes()));
            rest.fill(0);
            let words = next.tokens.iter().filter(|_| i == 0).flat_map(|token| token.to_le_bytes());
            let end = if i == 0 && next.is_parting { PARTING } else { PIECE };
            let note = words.chain([end]).collect();
            let parent = before.unwrap_or(next.parent.0);
            match self.file.put(BlockMeta { key: piece_key(state, i), parent, note }, bytes) {
                Ok(taken) => Ok(taken),
                Err(BlockFileError::Full { .. }) => Err(()),
                Err(error) => return Err(error),
            }
        };
        next.done += usize::from(taken == Ok(true));
        if taken.is_err() || next.done == pieces.n {
            pieces.unsaved.pop_front();
        }
        Ok(taken != Ok(false))
    }

    /// Reads at most `most` pieces of a state into it, from the `first` on, of which it has those before. Returns how many
    /// it has then; `None` if one did not come.
    pub(in crate::kv) fn get_pieces(
        &mut self,
        state: Key,
        first: usize,
        most: usize,
        floats: &mut [f32],
    ) -> Option<usize> {
        let Pieces { stage, piece, n, .. } = self.pieces.as_mut()?;
        let (piece, last) = (*piece, (*n).min(first.saturating_add(most)));
        let mut to = floats.chunks_mut(piece).skip(first);
        for some in (first..last).step_by(STAGE) {
            let keys = (some..last.min(some + STAGE)).map(|i| piece_key(state, i));
            let mut slices: Vec<(u128, &mut [u8])> =
                keys.zip(stage.chunks_exact_mut(piece * size_of::<f32>())).collect();
            // A file that fails holds nothing: the state is computed.
            let came = self.file.get(&mut slices).ok()?;
            for ((_, bytes), floats) in slices.iter().zip(&mut to) {
                let words = bytes.chunks_exact(4).map(|w| f32::from_le_bytes([w[0], w[1], w[2], w[3]]));
                floats.iter_mut().zip(words).for_each(|(to, x)| *to = x);
            }
            if came.contains(&false) {
                return None;
            }
        }
        Some(last)
    }
}
