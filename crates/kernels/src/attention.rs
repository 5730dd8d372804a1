//! Attention over a paged KV cache: of one token, of consecutive tokens (`tile.rs`), of a step (`step.rs`); and which
//! positions sparse attention sees (`index.rs`).
//!
//! A *row* is the key or the value of one position and one kv head; a *run* is rows of consecutive positions
//! at equal distances, as they lie in one block of the cache. Everything here is defined per query head and
//! position, so neither the size of blocks nor the number of query heads that share a kv head changes a
//! bit: sharing only means that a row is read once for all of them.

// Tiles of registers are indexed: iterators over several of them at once are hard to read.
#![allow(clippy::needless_range_loop)]

mod index;
mod step;
mod tile;

use std::ops::Range;

use smoe_format::half::f32_to_f16;

use crate::dot::{Element, F16, F32, I8, Rows, products, products_scalar};
use crate::exp::Softmax;
use crate::isa::Kernels;
use crate::simd::{LANES, Op, Simd};

pub use index::{Choices, IndexHeads, choose};
pub use step::{AttentionHeads, AttentionScratch, Sight, attend};

/// How keys or values are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvType {
    /// Little-endian f32.
    F32,
    /// Little-endian IEEE halves.
    F16,
    /// Signed bytes, and one little-endian f32 scale in the last four bytes of the row.
    Q8,
}

impl KvType {
    /// Bytes of a row of `dim` elements: what it needs, rounded up to a multiple of 16.
    #[must_use]
    pub const fn row_bytes(self, dim: usize) -> usize {
        let scale = match self {
            Self::F32 | Self::F16 => 0,
            Self::Q8 => SCALE_BYTES,
        };
        (dim * self.element_bytes() + scale).next_multiple_of(16)
    }

    const fn element_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 => 2,
            Self::Q8 => 1,
        }
    }
}

const SCALE_BYTES: usize = 4;

/// Consecutive rows of one kv head.
#[derive(Clone, Copy, Debug)]
pub struct KvRun<'a> {
    /// How the elements are stored.
    pub ty: KvType,
    /// The rows, back to back.
    pub bytes: &'a [u8],
    /// Bytes of a row; [`KvType::row_bytes`] of its elements or more. A q8 row's scale is at its very end, so
    /// that values may be the first elements of longer rows that are also the keys (MLA's latent).
    pub row_bytes: usize,
}

impl<'a> KvRun<'a> {
    fn count(self) -> usize {
        self.bytes.len() / self.row_bytes
    }

    fn rows(self) -> Rows<'a> {
        Rows::new(self.bytes, self.row_bytes, self.count())
    }

    /// What all values of row `row` are multiplied with.
    #[inline(always)]
    fn scale(self, row: usize) -> f32 {
        match self.ty {
            KvType::F32 | KvType::F16 => 1.0,
            KvType::Q8 => {
                let end = (row + 1) * self.row_bytes;
                let bytes = self.bytes[end - SCALE_BYTES..end].try_into().unwrap_or([0; SCALE_BYTES]);
                f32::from_le_bytes(bytes)
            }
        }
    }

    fn check(self, dim: usize) {
        assert!(
            self.row_bytes >= self.ty.row_bytes(dim) && self.bytes.len().is_multiple_of(self.row_bytes),
            "{} bytes of {:?} rows of {dim} elements in {} bytes",
            self.bytes.len(),
            self.ty,
            self.row_bytes
        );
    }
}

/// Where the keys, or the values, of one kv head lie in a plane of cache blocks.
///
/// The row of position p of block b is at byte `b * block_stride + head_offset + p * row_bytes`.
#[derive(Clone, Copy, Debug)]
pub struct KvPlane<'a> {
    /// How the elements are stored.
    pub ty: KvType,
    /// All blocks of a layer.
    pub bytes: &'a [u8],
    /// Bytes from a position to the next ([`KvRun::row_bytes`]).
    pub row_bytes: usize,
    /// Bytes from a block to the next.
    pub block_stride: usize,
    /// Bytes from the start of a block to this head's first row.
    pub head_offset: usize,
}

impl<'a> KvPlane<'a> {
    /// The rows `positions` of block `block`.
    ///
    /// # Panics
    /// If they lie outside of the plane.
    #[inline]
    #[must_use]
    pub fn run(self, block: u32, positions: Range<usize>) -> KvRun<'a> {
        let start = block as usize * self.block_stride + self.head_offset;
        let rows = start + positions.start * self.row_bytes..start + positions.end * self.row_bytes;
        KvRun { ty: self.ty, bytes: &self.bytes[rows], row_bytes: self.row_bytes }
    }
}

/// The keys and values of one kv head of one session, in blocks of the cache.
#[derive(Clone, Copy, Debug)]
pub struct KvBlocks<'a> {
    /// The keys.
    pub keys: KvPlane<'a>,
    /// The values.
    pub values: KvPlane<'a>,
    /// The session's blocks in order: position p is in block `table[p / block_positions]`.
    pub table: &'a [u32],
    /// Positions of a block.
    pub block_positions: usize,
}

impl<'a> KvBlocks<'a> {
    /// Cuts `visible` at the edges of blocks: (block, positions in the block, offset within `visible`).
    fn runs(self, visible: Range<usize>) -> impl Iterator<Item = (u32, Range<usize>, usize)> + 'a {
        let size = self.block_positions;
        let first = visible.start / size;
        let last = visible.end.div_ceil(size);
        (first..last).map(move |index| {
            let start = visible.start.max(index * size);
            let end = visible.end.min((index + 1) * size);
            (self.table[index], start - index * size..end - index * size, start - visible.start)
        })
    }
}

/// Stores a row.
struct StoreRow<'a> {
    ty: KvType,
    x: &'a [f32],
    out: &'a mut [u8],
}

impl StoreRow<'_> {
    #[inline(always)]
    fn store_f32(self) {
        for (bytes, x) in self.out.as_chunks_mut::<4>().0.iter_mut().zip(self.x) {
            *bytes = x.to_le_bytes();
        }
    }

    /// Plain loops over integers and single elements: the compiler's own vectors give the same bits.
    #[inline(always)]
    fn store_q8(self) {
        let magnitude = self.x.iter().fold(0u32, |max, x| max.max(x.to_bits() & 0x7fff_ffff));
        let absmax = f32::from_bits(magnitude);
        let inverse = 127.0 / absmax;
        let at = self.out.len() - SCALE_BYTES;
        let (codes, scale) = self.out.split_at_mut(at);
        // 127 / absmax overflows for rows that are as good as zero.
        let (inverse, step) = if inverse.is_finite() { (inverse, absmax / 127.0) } else { (0.0, 0.0) };
        if absmax.is_finite() {
            for (code, &x) in codes.iter_mut().zip(self.x) {
                // Adding 1.5 * 2^23 rounds to the nearest integer, even at a tie, into the lowest bits.
                *code = (x * inverse + 12_582_912.0).to_bits() as u8;
            }
        } else {
            codes[..self.x.len()].fill(0);
        }
        let step = if absmax.is_finite() { step } else { f32::NAN };
        scale.copy_from_slice(&step.to_le_bytes());
    }
}

impl Op for StoreRow<'_> {
    type Out = ();

    fn scalar(self) {
        match self.ty {
            KvType::F32 => self.store_f32(),
            KvType::F16 => {
                for (bytes, &x) in self.out.as_chunks_mut::<2>().0.iter_mut().zip(self.x) {
                    *bytes = f32_to_f16(x).to_le_bytes();
                }
            }
            KvType::Q8 => self.store_q8(),
        }
    }

    #[inline(always)]
    fn vector<S: Simd>(self, s: S) {
        match self.ty {
            KvType::F32 => self.store_f32(),
            KvType::F16 => {
                let (whole, tail) = self.x.as_chunks::<LANES>();
                let out = &mut self.out[..2 * self.x.len()];
                let (outs, out_tail) = out.as_chunks_mut::<{ 2 * LANES }>();
                for (out, x) in outs.iter_mut().zip(whole) {
                    s.store_f16(s.load(x), out);
                }
                let mut last = [0; 2 * LANES];
                s.store_f16(s.load_part(tail, 0.0), &mut last);
                out_tail.copy_from_slice(&last[..out_tail.len()]);
            }
            KvType::Q8 => self.store_q8(),
        }
    }
}

/// Scores of `[n_q, head_dim]` queries against a run.
struct Scores<'a> {
    queries: &'a [f32],
    head_dim: usize,
    keys: KvRun<'a>,
    scale: f32,
    scores: &'a mut [f32],
    /// Scores of a query.
    stride: usize,
}

impl Scores<'_> {
    #[inline(always)]
    fn emit(&mut self, row: usize, query: usize, sum: f32) {
        self.scores[query * self.stride + row] = sum * (self.keys.scale(row) * self.scale);
    }

    fn scalar_of<E: Element>(&mut self) {
        let (rows, queries, head_dim) = (self.keys.rows(), self.queries, self.head_dim);
        products_scalar::<E>(rows, queries, head_dim, |row, query, sum| self.emit(row, query, sum));
    }

    #[inline(always)]
    fn vector_of<S: Simd, E: Element>(&mut self, s: S) {
        let (rows, queries, head_dim) = (self.keys.rows(), self.queries, self.head_dim);
        products::<S, E>(s, rows, queries, head_dim, &mut |row, query, sum| self.emit(row, query, sum));
    }
}

impl Op for Scores<'_> {
    type Out = ();

    fn scalar(mut self) {
        match self.keys.ty {
            KvType::F32 => self.scalar_of::<F32>(),
            KvType::F16 => self.scalar_of::<F16>(),
            KvType::Q8 => self.scalar_of::<I8>(),
        }
    }

    #[inline(always)]
    fn vector<S: Simd>(mut self, s: S) {
        match self.keys.ty {
            KvType::F32 => self.vector_of::<S, F32>(s),
            KvType::F16 => self.vector_of::<S, F16>(s),
            KvType::Q8 => self.vector_of::<S, I8>(s),
        }
    }
}

/// Weighted sums of a run's rows, one per query.
struct Values<'a> {
    weights: &'a [f32],
    /// Weights of a query, of which the run's are the first.
    stride: usize,
    values: KvRun<'a>,
    dim: usize,
    acc: &'a mut [f32],
}

impl Values<'_> {
    #[inline(always)]
    fn weight(&self, query: usize, row: usize) -> f32 {
        self.weights[query * self.stride + row] * self.values.scale(row)
    }

    fn scalar_of<E: Element>(self) {
        self.elements::<E>(0);
    }

    /// The definition, for the elements from `first`.
    #[inline(always)]
    fn elements<E: Element>(self, first: usize) {
        let rows = self.values.rows();
        for query in 0..self.acc.len() / self.dim {
            for row in 0..rows.count() {
                let w = self.weight(query, row);
                let values = rows.row::<E>(row, self.dim).chunks_exact(E::BYTES).map(E::value);
                let acc = &mut self.acc[query * self.dim..(query + 1) * self.dim];
                for (acc, value) in acc.iter_mut().zip(values).skip(first) {
                    *acc = w.mul_add(value, *acc);
                }
            }
        }
    }

    #[inline(always)]
    fn vector_of<S: Simd, E: Element>(mut self, s: S) {
        let queries = self.acc.len() / self.dim;
        let mut query = 0;
        if S::WIDE {
            while query + 4 <= queries {
                self.columns::<S, E, 4, 4>(s, query);
                query += 4;
            }
            while query < queries {
                self.columns::<S, E, 1, 8>(s, query);
                query += 1;
            }
        } else {
            while query + 2 <= queries {
                self.columns::<S, E, 2, 2>(s, query);
                query += 2;
            }
            while query < queries {
                self.columns::<S, E, 1, 4>(s, query);
                query += 1;
            }
        }
        let whole = self.dim / LANES * LANES;
        if whole < self.dim {
            self.elements::<E>(whole);
        }
    }

    /// All whole lanes of `Q` queries, `C` times sixteen elements at once.
    #[inline(always)]
    fn columns<S: Simd, E: Element, const Q: usize, const C: usize>(&mut self, s: S, query: usize) {
        let mut column = 0;
        while column + C * LANES <= self.dim {
            self.block::<S, E, Q, C>(s, query, column);
            column += C * LANES;
        }
        while column + LANES <= self.dim {
            self.block::<S, E, Q, 1>(s, query, column);
            column += LANES;
        }
    }

    #[inline(always)]
    fn block<S: Simd, E: Element, const Q: usize, const C: usize>(
        &mut self,
        s: S,
        query: usize,
        column: usize,
    ) {
        let rows = self.values.rows();
        let mut acc = [[s.splat(0.0); C]; Q];
        for q in 0..Q {
            let from = &self.acc[(query + q) * self.dim + column..][..C * LANES];
            for (acc, from) in acc[q].iter_mut().zip(from.as_chunks::<LANES>().0) {
                *acc = s.load(from);
            }
        }
        for row in 0..rows.count() {
            let bytes = &rows.row::<E>(row, self.dim)[column * E::BYTES..][..C * LANES * E::BYTES];
            let mut v = [s.splat(0.0); C];
            for c in 0..C {
                // SAFETY: `bytes` holds `C` times sixteen elements.
                v[c] = unsafe { E::load(s, bytes.as_ptr().add(c * LANES * E::BYTES)) };
            }
            for q in 0..Q {
                let w = s.splat(self.weight(query + q, row));
                for c in 0..C {
                    acc[q][c] = s.fma(w, v[c], acc[q][c]);
                }
            }
        }
        for q in 0..Q {
            let to = &mut self.acc[(query + q) * self.dim + column..][..C * LANES];
            for (acc, to) in acc[q].iter().zip(to.as_chunks_mut::<LANES>().0) {
                s.store(*acc, to);
            }
        }
    }
}

impl Op for Values<'_> {
    type Out = ();

    fn scalar(self) {
        match self.values.ty {
            KvType::F32 => self.scalar_of::<F32>(),
            KvType::F16 => self.scalar_of::<F16>(),
            KvType::Q8 => self.scalar_of::<I8>(),
        }
    }

    #[inline(always)]
    fn vector<S: Simd>(self, s: S) {
        match self.values.ty {
            KvType::F32 => self.vector_of::<S, F32>(s),
            KvType::F16 => self.vector_of::<S, F16>(s),
            KvType::Q8 => self.vector_of::<S, I8>(s),
        }
    }
}

impl Kernels {
    /// Stores the key or value `x` as a row.
    ///
    /// `out` is the row, [`KvType::row_bytes`] or more; bytes between elements and scale are left alone. f16
    /// rounds to nearest even. q8: `scale = absmax / 127`, `code = round_half_even(x * (127 / absmax))`, the
    /// value is `code * scale`; a row whose absmax is so small that 127 / absmax overflows becomes zero, and
    /// a row that is not finite becomes NaN as a whole.
    ///
    /// # Panics
    /// If `out` is shorter than `row_bytes`.
    pub fn store_kv_row(self, ty: KvType, x: &[f32], out: &mut [u8]) {
        assert!(out.len() >= ty.row_bytes(x.len()), "a {ty:?} row of {} in {} bytes", x.len(), out.len());
        self.run(StoreRow { ty, x, out });
    }

    /// Scores of queries that share a kv head against a run of keys.
    ///
    /// `queries` is `[n_q, head_dim]`; `scores[q * stride + p]` becomes `dot(q, k_p) * scale`, for q8 keys
    /// `dot(q, codes_p) * (scale_p * scale)`, with the dot product of [`Kernels::dot`].
    ///
    /// # Panics
    /// If a shape does not match: whole queries, whole rows of at least `head_dim` elements, `stride` at
    /// least the run's rows, room for the last score.
    pub fn attend_scores(
        self,
        queries: &[f32],
        head_dim: usize,
        keys: KvRun<'_>,
        scale: f32,
        scores: &mut [f32],
        stride: usize,
    ) {
        keys.check(head_dim);
        check_heads(queries.len(), head_dim);
        check_stride(queries.len() / head_dim, keys.count(), stride, scores.len());
        self.run(Scores { queries, head_dim, keys, scale, scores, stride });
    }

    /// Adds a run of values, weighted, to the output of the queries that share a kv head.
    ///
    /// `acc` is `[n_q, dim]`. For positions p of the run, ascending:
    /// `acc[q, d] = fma(weights[q * stride + p], v_p[d], acc[q, d])`, for q8 values
    /// `fma(weights[..] * scale_p, code_p[d], acc[q, d])`.
    ///
    /// # Panics
    /// If a shape does not match, as in [`Kernels::attend_scores`].
    pub fn attend_values(
        self,
        weights: &[f32],
        stride: usize,
        values: KvRun<'_>,
        acc: &mut [f32],
        dim: usize,
    ) {
        values.check(dim);
        check_heads(acc.len(), dim);
        check_stride(acc.len() / dim, values.count(), stride, weights.len());
        self.run(Values { weights, stride, values, dim, acc });
    }

    /// Attention of one token's query heads that share a kv head, over the positions `visible`.
    ///
    /// `queries` is `[n_q, head_dim]`, `out` is `[n_q, value_dim]` and is overwritten. `visible` starts after 0
    /// for a sliding window. `scores` is scratch for `n_q * visible.len()` numbers and holds the weights
    /// afterwards, `[n_q, visible.len()]`.
    /// Per query head: [`Kernels::attend_scores`], then [`Kernels::softmax_in_place`] (its lanes count from
    /// `visible.start`), then [`Kernels::attend_values`] from +0. `sinks`, one logit per query head, joins
    /// the maximum, and `exp(sink - max)` is added last to the denominator; it has no value (gpt-oss).
    /// The bits do not depend on where the blocks lie or how large they are.
    ///
    /// # Panics
    /// If a shape does not match, `visible` is empty, or a row lies outside of its plane.
    pub fn attention(
        self,
        queries: &[f32],
        head_dim: usize,
        blocks: KvBlocks<'_>,
        visible: Range<usize>,
        scale: f32,
        sinks: Option<&[f32]>,
        scores: &mut [f32],
        out: &mut [f32],
    ) {
        check_heads(queries.len(), head_dim);
        let n_q = queries.len() / head_dim;
        let context = visible.len();
        assert!(context > 0, "attention over no positions");
        assert!(n_q > 0 && out.len().is_multiple_of(n_q), "one output per query");
        assert!(sinks.is_none_or(|sinks| sinks.len() == n_q), "one sink per query");
        let dim = out.len() / n_q;
        let scores = &mut scores[..n_q * context];
        for (block, positions, at) in blocks.runs(visible.clone()) {
            let keys = blocks.keys.run(block, positions);
            self.attend_scores(queries, head_dim, keys, scale, &mut scores[at..], context);
        }
        for (q, row) in scores.chunks_exact_mut(context).enumerate() {
            self.run(Softmax { x: row, sink: sinks.map(|sinks| sinks[q]) });
        }
        out.fill(0.0);
        for (block, positions, at) in blocks.runs(visible) {
            let values = blocks.values.run(block, positions);
            self.attend_values(&scores[at..], context, values, out, dim);
        }
    }
}

fn check_heads(len: usize, head_dim: usize) {
    assert!(head_dim > 0 && len.is_multiple_of(head_dim), "whole heads of {head_dim}, not {len}");
}

/// `heads` rows of `count` numbers, `stride` apart, lie within `len` numbers.
fn check_stride(heads: usize, count: usize, stride: usize, len: usize) {
    let fits = count <= stride && (heads == 0 || (heads - 1) * stride + count <= len);
    assert!(fits, "{heads} rows of {count}, {stride} apart, in {len}");
}

#[cfg(test)]
mod tests;
