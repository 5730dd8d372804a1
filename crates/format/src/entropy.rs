//! Entropy-coded records: 4-bit tiles behind a tANS coder, for less to read from the disk.
//!
//! A coded record holds the same gate, up and down as a plain one, each in a *part* of its own, either as it is or
//! coded. Decoding gives the tiles of the record to the bit, whatever made them. The coder's 256 states lie so that
//! a step of all of them is two 64-byte lines of a tile, and 8 states share a stream of bits: a state tells its
//! number of bits before any is read, so eight are cut out of one load (`docs/FORMAT.md` section 4.1).
//!
//! This is the definition, in plain code. [`decode_record`] takes the decoder of a block as an argument: the
//! kernels have faster ones.

mod block;
mod table;

pub use block::{BLOCK_BYTES, BLOCK_STATES, BLOCK_STEPS, Block, SLACK, STEP_BYTES, STREAMS};
pub use table::{STATES, SYMBOLS, SymbolTable, TABLE_BYTES};

use crate::encoding::{Encoding, Uniform};
use crate::expert_file::{LayerTable, Projection, TENSOR_ALIGN, TensorEntry};
use crate::tile::ROWS;
use crate::wire::Put;
use crate::{FormatError, RECORD_ALIGN};
use block::HEAD_BYTES;
use std::ops::Range;
use table::Encoder;

/// Bytes of a record before its first part: four words for each part, and zeros.
pub const RECORD_HEAD_BYTES: usize = 64;
/// Bytes of a block's entry in the index: its length, its patches.
const INDEX_BYTES: usize = 8;
/// Bytes of a patch: the place of a code in 18 bits, and the code in 4.
const PATCH_BYTES: usize = 3;
/// Bytes of an exception: the place of a scale or minimum among those of all tiles, and its f16.
const EXCEPTION_BYTES: usize = 6;
/// Codes rarer than this are patched: a state for one costs every other code log2(128 / 127) bits, a patch 24.
const RARE: f64 = 0.0113 / 24.0;

/// How a part holds its tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    /// As it is in a slot.
    Plain,
    /// Coded; the scales (and minima) of a block of 32 rows once, for all groups but those that are exceptions.
    RowScales,
    /// Coded; the scales (and minima) of every tile.
    TileScales,
}

impl Form {
    const ALL: [Self; 3] = [Self::Plain, Self::RowScales, Self::TileScales];
}

/// The most bytes of a coded record of this layer, a multiple of [`RECORD_ALIGN`].
#[must_use]
pub const fn max_record_len(layer: &LayerTable) -> usize {
    layer.record_len + RECORD_ALIGN
}

/// Codes a record. `tiles` is the record as it is to be in a slot (its tensors are looked at, what is between
/// them is not); `out` becomes the record on disk but for the zeros up to a multiple of [`RECORD_ALIGN`], at most
/// [`max_record_len`] bytes. A tensor that coding would make longer, or that has no 4-bit codes, stays as it is.
///
/// # Panics
/// If `tiles` is shorter than the layer's tensors.
pub fn encode_record(tiles: &[u8], layer: &LayerTable, out: &mut Vec<u8>) {
    out.clear();
    out.resize(RECORD_HEAD_BYTES, 0);
    for (p, t) in layer.tensors.iter().enumerate() {
        out.resize(out.len().next_multiple_of(TENSOR_ALIGN), 0);
        let start = out.len();
        let tensor = &tiles[t.offset..t.offset + t.len];
        let mut form = Form::Plain;
        if let Some(uniform) = coded(t.encoding) {
            form = encode_tensor(tensor, uniform, uniform.groups(t.cols), out);
        }
        if form == Form::Plain || out.len() - start >= tensor.len() {
            form = Form::Plain;
            out.truncate(start);
            out.put(tensor);
        }
        let words = [start as u32, (out.len() - start) as u32, form as u32];
        for (i, word) in words.into_iter().enumerate() {
            out[16 * p + 4 * i..][..4].copy_from_slice(&word.to_le_bytes());
        }
    }
}

/// The encoding, if its tiles can be coded.
const fn coded(encoding: Encoding) -> Option<Uniform> {
    match encoding {
        Encoding::Uniform(uniform) if uniform.bits() == 4 => Some(uniform),
        _ => None,
    }
}

/// Tiles of a block.
const fn block_tiles(uniform: Uniform) -> usize {
    BLOCK_BYTES / uniform.code_bytes()
}

fn encode_tensor(tensor: &[u8], uniform: Uniform, groups: usize, out: &mut Vec<u8>) -> Form {
    let (tile_bytes, code_bytes) = (uniform.tile_bytes(), uniform.code_bytes());
    if groups == 0 {
        return Form::Plain;
    }
    let mut counts = [0u64; SYMBOLS];
    for byte in tensor.chunks_exact(tile_bytes).flat_map(|tile| &tile[..code_bytes]) {
        counts[usize::from(byte & 15)] += 1;
        counts[usize::from(byte >> 4)] += 1;
    }
    let total = counts.iter().sum::<u64>() as f64;
    let kept = counts.map(|count| if count as f64 >= RARE * total { count } else { 0 });
    let table = SymbolTable::fit(&kept);
    let encoder = Encoder::new(&table);
    // What stands for a code that is patched: the nearest that is not.
    let stand_in: [u8; SYMBOLS] = std::array::from_fn(|s| {
        let near = (0..SYMBOLS as u8).filter(|&other| encoder.has(other));
        near.min_by_key(|&other| (i16::from(other) - s as i16).abs()).unwrap_or(0)
    });

    let tiles = tensor.len() / tile_bytes;
    let tails = Tails::new(tensor, uniform, groups);
    let row_bytes = tails.rows.len() + tails.exceptions.len();
    let form = if row_bytes < tiles * (tile_bytes - code_bytes) { Form::RowScales } else { Form::TileScales };
    out.put(&table.to_bytes());
    match form {
        Form::RowScales => out.put(&tails.rows),
        _ => tensor.chunks_exact(tile_bytes).for_each(|tile| out.put(&tile[code_bytes..])),
    }
    let index = out.len();
    let per_block = block_tiles(uniform);
    out.resize(index + tiles.div_ceil(per_block) * INDEX_BYTES, 0);
    let (mut codes, mut fields, mut patches) = (Vec::new(), Vec::new(), Vec::new());
    for (b, block) in tensor.chunks(per_block * tile_bytes).enumerate() {
        codes.clear();
        patches.clear();
        for tile in block.chunks_exact(tile_bytes) {
            codes.put(&tile[..code_bytes]);
        }
        for (at, byte) in codes.iter_mut().enumerate() {
            let pair = [*byte & 15, *byte >> 4];
            for (half, code) in pair.into_iter().enumerate().filter(|(_, code)| !encoder.has(*code)) {
                let place = (2 * at + half) as u32 | u32::from(code) << 18;
                patches.put(&place.to_le_bytes()[..PATCH_BYTES]);
            }
            *byte = stand_in[usize::from(pair[0])] | stand_in[usize::from(pair[1])] << 4;
        }
        let start = out.len();
        block::encode(&encoder, &codes, &mut fields, out);
        out.put(&patches);
        let words = [(out.len() - start) as u32, (patches.len() / PATCH_BYTES) as u32];
        for (i, word) in words.into_iter().enumerate() {
            out[index + b * INDEX_BYTES + 4 * i..][..4].copy_from_slice(&word.to_le_bytes());
        }
    }
    if form == Form::RowScales {
        out.put(&tails.exceptions);
    }
    form
}

/// What follows the codes of tiles: for each block of 32 rows what most of its tiles have, and the others.
struct Tails {
    rows: Vec<u8>,
    exceptions: Vec<u8>,
}

impl Tails {
    fn new(tensor: &[u8], uniform: Uniform, groups: usize) -> Self {
        let (tile_bytes, code_bytes) = (uniform.tile_bytes(), uniform.code_bytes());
        let halves = (tile_bytes - code_bytes) / 2;
        let (mut rows, mut exceptions, mut sorted) = (Vec::new(), Vec::new(), Vec::with_capacity(groups));
        for (b, block) in tensor.chunks_exact(groups * tile_bytes).enumerate() {
            for half in 0..halves {
                let at = code_bytes + 2 * half;
                let values = || block.chunks_exact(tile_bytes).map(|tile| [tile[at], tile[at + 1]]);
                sorted.clear();
                sorted.extend(values());
                sorted.sort_unstable();
                let usual = sorted.chunk_by(|a, b| a == b).max_by_key(|equal| equal.len());
                let usual = usual.map_or([0; 2], |equal| equal[0]);
                rows.put(&usual);
                for (g, value) in values().enumerate().filter(|(_, value)| *value != usual) {
                    exceptions.put_u32(((b * groups + g) * halves + half) as u32);
                    exceptions.put(&value);
                }
            }
        }
        Self { rows, exceptions }
    }
}

/// The most parts of a record.
pub const MAX_PARTS: usize = 9;
/// Blocks of a part at least: what is decoded apart must be worth handing over.
const PART_BLOCKS: usize = 2;

/// A share of a record that is decoded by itself: some blocks of one tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    projection: usize,
    /// Tiles of codes that may be coded, and blocks of them; everything of a tensor that never is.
    tiles: Range<usize>,
    blocks: Range<usize>,
    /// What it fills of the slot.
    pub slot: Range<usize>,
}

/// Parts of this layer's records, 3 to [`MAX_PARTS`]: any order and any number of threads will do.
#[must_use]
pub fn n_parts(layer: &LayerTable) -> usize {
    let blocks = layer.tensors.iter().map(|t| coded(t.encoding).map_or(0, |uniform| blocks(t, uniform)));
    Projection::ALL.len() * per_tensor(blocks.max().unwrap_or(0))
}

const fn per_tensor(blocks: usize) -> usize {
    match blocks / PART_BLOCKS {
        0 => 1,
        n if n > MAX_PARTS / 3 => MAX_PARTS / 3,
        n => n,
    }
}

const fn blocks(t: &TensorEntry, uniform: Uniform) -> usize {
    (t.len / uniform.tile_bytes()).div_ceil(block_tiles(uniform))
}

/// The `i`-th part, ascending in the slot as the layer's tensors are.
///
/// # Panics
/// If there are fewer.
#[must_use]
pub fn part(layer: &LayerTable, i: usize) -> Part {
    let per_tensor = n_parts(layer) / Projection::ALL.len();
    let (projection, i) = (i / per_tensor, i % per_tensor);
    let t = &layer.tensors[projection];
    let Some(uniform) = coded(t.encoding) else {
        // All of it is the first part; the others are empty, behind it.
        let end = t.offset + t.len;
        let start = if i == 0 { t.offset } else { end };
        return Part { projection, tiles: 0..0, blocks: 0..0, slot: start..end };
    };
    let all = blocks(t, uniform);
    let blocks = all * i / per_tensor..all * (i + 1) / per_tensor;
    let tiles = t.len / uniform.tile_bytes();
    let tile = |block: usize| (block * block_tiles(uniform)).min(tiles);
    let tiles = tile(blocks.start)..tile(blocks.end);
    let byte = |tile: usize| t.offset + tile * uniform.tile_bytes();
    Part { projection, slot: byte(tiles.start)..byte(tiles.end), tiles, blocks }
}

/// Decodes a record into a slot: all of its parts.
///
/// `slot` is at least as long as the layer's tensors; bytes that belong to none are not touched. Otherwise as
/// [`decode_part`].
///
/// # Errors
/// As [`decode_part`]; the slot is then of no use.
///
/// # Panics
/// If `slot` is shorter than the layer's tensors, or `raw` than `len`.
pub fn decode_record(
    raw: &[u8],
    len: usize,
    layer: &LayerTable,
    slot: &mut [u8],
    mut decode: impl FnMut(&mut Block<'_>) -> bool,
) -> Result<(), FormatError> {
    (0..n_parts(layer)).try_for_each(|i| {
        let part = part(layer, i);
        decode_part(raw, len, layer, &part, &mut slot[part.slot.clone()], &mut decode)
    })
}

/// Decodes a part of a record into its share of a slot, `out`. A record is good if all of its parts are.
///
/// `raw` begins with the `len` bytes of the record on disk; what may stand behind them ([`SLACK`] bytes are enough)
/// is for decoders that load ahead and has no influence on what is accepted. `decode` decodes one block, as
/// [`Block::decode`] does.
///
/// Time and memory do not depend on what the bytes say.
///
/// # Errors
/// [`FormatError::Coded`] if the record contradicts itself, as far as this part sees it.
///
/// # Panics
/// If `out` is not as long as the part, or `raw` is shorter than `len`.
pub fn decode_part(
    raw: &[u8],
    len: usize,
    layer: &LayerTable,
    part: &Part,
    out: &mut [u8],
    mut decode: impl FnMut(&mut Block<'_>) -> bool,
) -> Result<(), FormatError> {
    assert_eq!(out.len(), part.slot.len(), "a part fills what is its own");
    let (p, t) = (part.projection, &layer.tensors[part.projection]);
    let bad = |what| FormatError::Coded { tensor: Projection::ALL[p].name(), what };
    let record = &raw[..len];
    let head = record.get(..RECORD_HEAD_BYTES).ok_or(bad("the record has no head"))?;
    let word = |i: usize| word(&head[16 * p + 4 * i..]);
    let form = Form::ALL.into_iter().find(|form| *form as usize == word(2) as usize);
    let form = form.filter(|_| word(3) == 0).ok_or(bad("its form is not known"))?;
    let (start, bytes) = (word(0) as usize, word(1) as usize);
    let bytes = start.checked_add(bytes).and_then(|end| record.get(start..end));
    let bytes = bytes.ok_or(bad("its part is not in the record"))?;
    match (form, coded(t.encoding)) {
        (Form::Plain, _) if bytes.len() == t.len => {
            let own = part.slot.start - t.offset..part.slot.end - t.offset;
            out.copy_from_slice(&bytes[own]);
            Ok(())
        }
        (Form::Plain, _) => Err(bad("it is not as long as it has to be")),
        (_, None) => Err(bad("only 4-bit codes are coded")),
        (_, Some(uniform)) => {
            let tensor = Coded { bytes, ahead: &raw[start..], uniform, shared: form == Form::RowScales };
            tensor.decode(t, part, out, &mut decode).map_err(bad)
        }
    }
}

/// A tensor that is coded.
struct Coded<'a> {
    bytes: &'a [u8],
    /// Begins with `bytes` and goes on as far as there is something to read.
    ahead: &'a [u8],
    uniform: Uniform,
    /// Whether the tiles of 32 rows share what follows their codes.
    shared: bool,
}

impl Coded<'_> {
    fn decode(
        &self,
        t: &TensorEntry,
        part: &Part,
        out: &mut [u8],
        decode: &mut impl FnMut(&mut Block<'_>) -> bool,
    ) -> Result<(), &'static str> {
        const SHORT: &str = "its part is too short";
        let (uniform, groups) = (self.uniform, self.uniform.groups(t.cols));
        let (tile_bytes, code_bytes) = (uniform.tile_bytes(), uniform.code_bytes());
        let tail_bytes = tile_bytes - code_bytes;
        let tiles = t.len / tile_bytes;
        let tails = if self.shared { tiles.checked_div(groups).unwrap_or(0) } else { tiles };
        let (table, rest) = self.bytes.split_first_chunk::<TABLE_BYTES>().ok_or(SHORT)?;
        let table = SymbolTable::from_bytes(table);
        let (tails, rest) = rest.split_at_checked(tails * tail_bytes).ok_or(SHORT)?;
        let per_block = block_tiles(uniform);
        let (index, mut rest) = rest.split_at_checked(blocks(t, uniform) * INDEX_BYTES).ok_or(SHORT)?;
        let mut own = out.chunks_mut(per_block * tile_bytes);
        for (b, entry) in index.chunks_exact(INDEX_BYTES).enumerate() {
            let (len, patches) = (word(entry) as usize, word(&entry[4..]) as usize);
            let (block, after) = rest.split_at_checked(len).ok_or(SHORT)?;
            let at = self.bytes.len() - rest.len();
            rest = after;
            if !part.blocks.contains(&b) {
                continue;
            }
            let tiles = own.next().ok_or(SHORT)?;
            let patches = self.block(&table, block, &self.ahead[at..], patches, tiles, decode)?;
            for (i, tile) in tiles.chunks_exact_mut(tile_bytes).enumerate() {
                let number = b * per_block + i;
                let number = if self.shared { number / groups } else { number };
                tile[code_bytes..].copy_from_slice(&tails[number * tail_bytes..][..tail_bytes]);
            }
            patch(tiles, tile_bytes, code_bytes, patches)?;
        }
        let (exceptions, left) = rest.as_chunks::<EXCEPTION_BYTES>();
        if !left.is_empty() || !(self.shared || exceptions.is_empty()) {
            return Err("its part is too long");
        }
        for exception in exceptions {
            let place = word(exception) as usize;
            let number = place / (tail_bytes / 2);
            if number >= tiles {
                return Err("an exception is of no tile");
            }
            if part.tiles.contains(&number) {
                let tile = &mut out[(number - part.tiles.start) * tile_bytes..][..tile_bytes];
                tile[code_bytes + place % (tail_bytes / 2) * 2..][..2].copy_from_slice(&exception[4..]);
            }
        }
        Ok(())
    }

    /// Decodes the codes of a block, which `ahead` begins with, and gives its patches.
    fn block<'b>(
        &self,
        table: &SymbolTable,
        block: &'b [u8],
        ahead: &[u8],
        patches: usize,
        tiles: &mut [u8],
        decode: &mut impl FnMut(&mut Block<'_>) -> bool,
    ) -> Result<&'b [u8], &'static str> {
        const SHORT: &str = "its part is too short";
        let patch_bytes = patches.checked_mul(PATCH_BYTES).ok_or("a block has more patches than codes")?;
        let (lens, bytes) = block.split_first_chunk::<{ 2 * STREAMS }>().ok_or(SHORT)?;
        let (states, bytes) = bytes.split_first_chunk::<BLOCK_STATES>().ok_or(SHORT)?;
        let streams = bytes.len().checked_sub(patch_bytes).ok_or("a block is shorter than its patches")?;
        let (mut end, mut ends) = (0, [0; STREAMS]);
        for (stream_end, len) in ends.iter_mut().zip(lens.as_chunks::<2>().0) {
            end += u32::from(u16::from_le_bytes(*len));
            *stream_end = end;
        }
        if end as usize != streams {
            return Err("the streams of a block are not as long as the block");
        }
        if states.iter().any(|&state| usize::from(state) >= STATES) {
            return Err("a block begins in a state that there is not");
        }
        let (tile_bytes, code_bytes) = (self.uniform.tile_bytes(), self.uniform.code_bytes());
        let bytes_ahead = &ahead[HEAD_BYTES..];
        let mut job = Block { table, bytes: bytes_ahead, ends, states, tiles, tile_bytes, code_bytes };
        if !decode(&mut job) {
            return Err("a stream of a block does not end where it should");
        }
        Ok(&bytes[streams..])
    }
}

/// Writes rare codes over what stands for them in a block.
fn patch(tiles: &mut [u8], tile_bytes: usize, code_bytes: usize, patches: &[u8]) -> Result<(), &'static str> {
    let codes = 2 * code_bytes * (tiles.len() / tile_bytes);
    for patch in patches.chunks_exact(PATCH_BYTES) {
        let patch = u32::from_le_bytes([patch[0], patch[1], patch[2], 0]);
        let (place, code) = ((patch & 0x3_ffff) as usize, (patch >> 18) as u8);
        if place >= codes || code > 15 {
            return Err("a patch of a block is not one of its codes");
        }
        let (byte, shift) = (place / 2, 4 * (place % 2));
        let byte = &mut tiles[byte / code_bytes * tile_bytes + byte % code_bytes];
        *byte = *byte & !(15 << shift) | code << shift;
    }
    Ok(())
}

/// The number in the first four bytes.
fn word(bytes: &[u8]) -> u32 {
    u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

/// Bits that a tensor's codes have on disk, a weight, by their `counts`: their entropy and what the coder loses,
/// without the record's head and padding.
#[must_use]
pub fn estimated_bits(counts: &[u64; SYMBOLS]) -> f64 {
    let total = counts.iter().sum::<u64>() as f64;
    let (mut states, mut bits) = ([0u32; SYMBOLS], 0.0);
    SymbolTable::fit(&counts.map(|n| if n as f64 >= RARE * total { n } else { 0 }))
        .symbols()
        .iter()
        .for_each(|&s| states[usize::from(s)] += 1);
    for (&n, states) in counts.iter().zip(states).filter(|(n, _)| **n > 0) {
        let each =
            if states == 0 { 8.0 * PATCH_BYTES as f64 } else { (STATES as f64 / f64::from(states)).log2() };
        bits += n as f64 * each;
    }
    let blocks = (total / (2 * BLOCK_BYTES) as f64).ceil();
    let fixed = TABLE_BYTES as f64 + blocks * (HEAD_BYTES + INDEX_BYTES + STREAMS / 2) as f64;
    if total > 0.0 { (bits + 8.0 * fixed) / total } else { 0.0 }
}

// A tile of 16 columns has whole steps, and one of 128 has whole blocks of tiles.
const _: () =
    assert!((ROWS * 16 / 2).is_multiple_of(STEP_BYTES) && BLOCK_BYTES.is_multiple_of(ROWS * 128 / 2));
