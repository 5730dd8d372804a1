//! A block of codes: 256 states in 32 streams of bits.

use super::table::{Encoder, SymbolTable};

/// Streams of a block; each has the states of eight codes.
pub const STREAMS: usize = 32;
/// States of a block; each is the state of every 256th code.
pub const BLOCK_STATES: usize = 8 * STREAMS;
/// Bytes of codes that a step decodes: one code for every state.
pub const STEP_BYTES: usize = BLOCK_STATES / 2;
/// Steps of a block at most: 128 KiB of codes. Half of it costs 0.4 % more bytes, twice saves 0.2 % (EXP-KERNEL-07).
pub const BLOCK_STEPS: usize = 1024;
/// Bytes of codes of a block at most.
pub const BLOCK_BYTES: usize = BLOCK_STEPS * STEP_BYTES;
/// What a stream advances in a step at most: seven bits for each of its states.
const STREAM_STEP: usize = 7;
/// Bytes before a block's streams: their lengths and the first states.
pub(super) const HEAD_BYTES: usize = 2 * STREAMS + BLOCK_STATES;
/// Readable bytes that a decoder which does not check wants behind a record: a stream that begins at its very
/// end, and takes all that it can, plus the eight bytes of a load.
pub const SLACK: usize = (STREAM_STEP * BLOCK_STEPS + 8).next_multiple_of(4096);

/// A block to decode: what a decoder is handed.
///
/// Code number `256 t + i` of the block (step t, state i) is half a byte of the tiles' codes: with
/// `chain = i / 64`, it is in byte `128 t + 64 * (chain / 2) + i mod 64`, the low half if `chain` is even. State i
/// belongs to stream `i / 8`; in a step a stream has the bits of its eight states in ascending order, lowest bits
/// first.
#[derive(Debug)]
pub struct Block<'a> {
    /// Of the tensor.
    pub table: &'a SymbolTable,
    /// What is readable from the first stream on; more than the block's own bytes.
    pub bytes: &'a [u8],
    /// Where each stream ends in `bytes`, ascending, all within it; each begins where the one before ends.
    pub ends: [u32; STREAMS],
    /// The first states, below 128.
    pub states: &'a [u8; BLOCK_STATES],
    /// Whole tiles, at most [`BLOCK_BYTES`] of codes.
    pub tiles: &'a mut [u8],
    /// Bytes of a tile.
    pub tile_bytes: usize,
    /// Bytes of its codes, which come first; a multiple of [`STEP_BYTES`].
    pub code_bytes: usize,
}

impl Block<'_> {
    /// Steps of the block.
    #[must_use]
    pub const fn steps(&self) -> usize {
        self.tiles.len() / self.tile_bytes * (self.code_bytes / STEP_BYTES)
    }

    /// First byte of each stream.
    #[must_use]
    pub fn starts(&self) -> [u32; STREAMS] {
        std::array::from_fn(|i| if i == 0 { 0 } else { self.ends[i - 1] })
    }

    /// True if no stream of the block can lead a decoder that loads eight bytes at a time beyond `bytes`,
    /// whatever the bytes say.
    #[must_use]
    pub fn has_slack(&self) -> bool {
        let last = self.ends[STREAMS - 2] as usize;
        last.saturating_add(STREAM_STEP * self.steps() + 8) <= self.bytes.len()
    }

    /// Decodes, in plain code: the definition. False if a stream does not end where it should, or a state is not
    /// 0 at its end; the tiles are then of no use.
    #[must_use]
    pub fn decode(&mut self) -> bool {
        let (starts, table) = (self.starts(), self.table);
        let per_tile = self.code_bytes / STEP_BYTES;
        let mut whole = true;
        for (stream, (start, end)) in starts.into_iter().zip(self.ends).enumerate() {
            let mut states: [u8; 8] = std::array::from_fn(|k| self.states[8 * stream + k] & 127);
            let (chain, lane) = (stream / 8, stream % 8);
            let first = 64 * (chain / 2) + 8 * lane;
            let mut position = 8 * start as usize;
            for tile in self.tiles.chunks_exact_mut(self.tile_bytes) {
                for step in 0..per_tile {
                    // At most 7 of misalignment and 8 * 7 of content.
                    let mut window = load(self.bytes, position / 8) >> (position % 8);
                    let codes = &mut tile[step * STEP_BYTES + first..][..8];
                    for (state, code) in states.iter_mut().zip(codes) {
                        let i = usize::from(*state);
                        let (symbol, bits) = (table.symbols()[i], table.bits()[i]);
                        *code = if chain % 2 == 0 { symbol } else { *code | symbol << 4 };
                        *state = table.base()[i] + (window as u8 & ((1u8 << bits) - 1));
                        window >>= bits;
                        position += usize::from(bits);
                    }
                }
            }
            whole &= position.div_ceil(8) == end as usize && states == [0; 8];
        }
        whole
    }
}

/// Eight bytes from `at` on; those that are not there are 0.
fn load(bytes: &[u8], at: usize) -> u64 {
    let there = bytes.get(at..).unwrap_or_default();
    if let Some(eight) = there.first_chunk::<8>() {
        return u64::from_le_bytes(*eight);
    }
    let mut eight = [0; 8];
    eight[..there.len()].copy_from_slice(there);
    u64::from_le_bytes(eight)
}

/// Appends a block of `codes`, whole steps of them: head and streams. `fields` is scratch.
pub(super) fn encode(encoder: &Encoder, codes: &[u8], fields: &mut Vec<[u8; 2]>, out: &mut Vec<u8>) {
    let steps = codes.len() / STEP_BYTES;
    debug_assert!(codes.len().is_multiple_of(STEP_BYTES) && steps <= BLOCK_STEPS);
    let head = out.len();
    out.resize(head + HEAD_BYTES, 0);
    fields.resize(8 * steps, [0; 2]);
    for stream in 0..STREAMS {
        let (chain, lane) = (stream / 8, stream % 8);
        let (first, shift) = (64 * (chain / 2) + 8 * lane, 4 * (chain % 2));
        // Backwards, from the states that the decoder is to end in.
        let mut states = [0u8; 8];
        let in_steps = codes.chunks_exact(STEP_BYTES).zip(fields.as_chunks_mut::<8>().0);
        for (codes, fields) in in_steps.rev() {
            for ((state, field), code) in states.iter_mut().zip(fields).zip(&codes[first..first + 8]) {
                let (before, value, bits) = encoder.put((code >> shift) & 15, *state);
                (*state, *field) = (before, [value, bits]);
            }
        }
        out[head + 2 * STREAMS + 8 * stream..][..8].copy_from_slice(&states);
        let start = out.len();
        let (mut window, mut filled) = (0u64, 0);
        for step in fields.as_chunks::<8>().0 {
            // Below 8 bits are left over, 56 come at most.
            for [value, bits] in step {
                window |= u64::from(*value) << filled;
                filled += u32::from(*bits);
            }
            let bytes = filled as usize / 8;
            out.extend_from_slice(&window.to_le_bytes()[..bytes]);
            window >>= 8 * bytes;
            filled %= 8;
        }
        if filled > 0 {
            out.push(window as u8);
        }
        let len = (out.len() - start) as u16;
        out[head + 2 * stream..][..2].copy_from_slice(&len.to_le_bytes());
    }
}
