//! Attention of consecutive tokens of one session, many queries at once: the prompt's way.
//!
//! A *tile* is up to [`WIDE`] queries (token by token, and the query heads of a token that share the kv head)
//! with one query in each lane. Keys and values are widened to `f32` once per tile. Nothing is added across
//! a register: the sixteen lanes of a sum of products, and of a softmax, are sixteen registers, joined by
//! the same tree.
//!
//! ```text
//! scores   [position][query]   chain of one lane: query register * key element, for 8 positions at once
//! weights  the same plane      exp in place; divided by the sum a few rows ahead of their use
//! outputs  [query][element]    weight * value register, positions ascending, for 4 queries x 64 elements
//! ```
//!
//! The last positions are not seen by the first tokens of a tile: their scores become -infinity, whose weight
//! is 0, and they are left out of the outputs.

use std::ops::Range;

use super::{KvBlocks, KvRun, KvType};
use crate::dot::{Element, F16, F32, I8};
use crate::exp::exp_lanes;
use crate::isa::{Isa, Kernels};
use crate::output::Shard;
use crate::simd::{LANES, Op, Simd};

/// Queries of a tile: two registers of them use each widened key twice.
const WIDE: usize = 2 * LANES;
/// Positions over which a tile is so wide: their scores take 1 MiB, half of a common cache of the second
/// level. A tile over more of them has [`LANES`] queries.
const WIDE_POSITIONS: usize = 8192;
/// Positions that are widened at once.
const ROWS: usize = 16;
/// Fewer queries than this are quicker one token at a time.
const FEW: usize = 8;
/// Floats of a cache line, on which every plane of the scratch begins.
const LINE: usize = 16;

/// Tokens that fill a tile if `n_q` query heads share a kv head.
pub(super) const fn tile_tokens(n_q: usize) -> usize {
    if n_q == 0 || n_q > WIDE { 1 } else { WIDE / n_q }
}

/// Floats of scratch of [`Kernels::attention_block`] for sessions of up to `context` positions.
pub(super) const fn scratch_len(head_dim: usize, value_dim: usize, context: usize) -> usize {
    let wide = WIDE * if context < WIDE_POSITIONS { context } else { WIDE_POSITIONS };
    let narrow = LANES * context;
    let scores = if wide > narrow { wide } else { narrow };
    scores + planes_len(WIDE, head_dim, value_dim) + LINE
}

/// Floats beside the scores: queries, keys, values, outputs.
const fn planes_len(lanes: usize, head_dim: usize, value_dim: usize) -> usize {
    let head_dim = head_dim.next_multiple_of(LINE);
    let value_dim = value_dim.next_multiple_of(LINE);
    (lanes + ROWS) * head_dim + (ROWS + lanes) * value_dim
}

/// The operands of [`Kernels::attention_block`].
struct Block<'a, 'o> {
    kernels: Kernels,
    queries: &'a [f32],
    query_stride: usize,
    n_q: usize,
    head_dim: usize,
    blocks: KvBlocks<'a>,
    /// What the first token sees.
    visible: Range<usize>,
    scale: f32,
    sinks: Option<&'a [f32]>,
    scratch: &'a mut [f32],
    out: &'a mut Shard<'o>,
}

impl Block<'_, '_> {
    fn value_dim(&self) -> usize {
        self.out.rows().len() / self.n_q
    }

    /// The definition. Heads are taken in pieces, so that the scores of sixteen queries are all the scratch
    /// that it needs.
    fn one_by_one(&mut self) {
        let (head_dim, dim) = (self.head_dim, self.value_dim());
        for token in 0..self.out.tokens() {
            let visible = self.visible.start..self.visible.end + token;
            for head in (0..self.n_q).step_by(LANES) {
                let heads = head..self.n_q.min(head + LANES);
                let at = token * self.query_stride;
                let queries = &self.queries[at + heads.start * head_dim..at + heads.end * head_dim];
                let sinks = self.sinks.map(|sinks| &sinks[heads.clone()]);
                let out = &mut self.out.token(token)[heads.start * dim..heads.end * dim];
                let scores = &mut self.scratch[..heads.len() * visible.len()];
                let visible = visible.clone();
                self.kernels.attention(
                    queries,
                    head_dim,
                    self.blocks,
                    visible,
                    self.scale,
                    sinks,
                    scores,
                    out,
                );
            }
        }
    }

    /// One tile after the other.
    #[inline(always)]
    fn tiles<S: Simd>(&mut self, s: S) {
        let (tokens, n_q) = (self.out.tokens(), self.n_q);
        let context = self.visible.len() + tokens - 1;
        let (_, scratch) = self.scratch.split_at_mut(to_line(self.scratch));
        let room = |lanes| lanes * context + planes_len(lanes, self.head_dim, self.out.rows().len() / n_q);
        let wide = room(WIDE) <= scratch.len();
        assert!(wide || room(LANES) <= scratch.len(), "scratch for {context} positions");
        let widest = if wide { WIDE } else { LANES };
        for first in (0..tokens * n_q).step_by(widest) {
            let queries = first..(first + widest).min(tokens * n_q);
            if queries.len() > LANES {
                self.tile::<S, 2>(s, queries);
            } else {
                self.tile::<S, 1>(s, queries);
            }
        }
    }

    /// The queries `queries`, counted token by token, in the lanes of `V` registers.
    #[inline(always)]
    fn tile<S: Simd, const V: usize>(&mut self, s: S, queries: Range<usize>) {
        let (n_q, head_dim, value_dim) = (self.n_q, self.head_dim, self.value_dim());
        let lanes = V * LANES;
        let start = self.visible.start;
        // Position after the last one that a query sees, and the part that all see.
        let end_of = |query: usize| self.visible.end + query / n_q - start;
        let (common, positions) = (end_of(queries.start), end_of(queries.end - 1));
        // Queries before the first one that sees a position.
        let blind = |position: usize| {
            let token = (position + start + 1).saturating_sub(self.visible.end);
            (token * n_q).saturating_sub(queries.start)
        };

        let (_, scratch) = self.scratch.split_at_mut(to_line(self.scratch));
        let (scores, scratch) = scratch.split_at_mut(lanes * positions);
        let (query_plane, scratch) = scratch.split_at_mut(lanes * head_dim);
        let (key_rows, scratch) = scratch.split_at_mut(ROWS * head_dim.next_multiple_of(LINE));
        let padded = value_dim.next_multiple_of(LINE);
        let (value_rows, scratch) = scratch.split_at_mut(ROWS * padded);
        let outputs = &mut scratch[..lanes * padded];

        query_plane.fill(0.0);
        for (lane, query) in queries.clone().enumerate() {
            let at = query / n_q * self.query_stride + query % n_q * head_dim;
            for (lanes, &x) in query_plane.chunks_exact_mut(lanes).zip(&self.queries[at..at + head_dim]) {
                lanes[lane] = x;
            }
        }

        let seen = start..start + positions;
        for (block, range, at) in self.blocks.runs(seen.clone()) {
            let run = self.blocks.keys.run(block, range);
            run.check(head_dim);
            for first in (0..run.count()).step_by(ROWS) {
                let rows = first..run.count().min(first + ROWS);
                widen(s, run, rows.clone(), head_dim, head_dim, key_rows);
                let scores = &mut scores[(at + first) * lanes..][..rows.len() * lanes];
                score_rows::<S, V>(s, query_plane, key_rows, head_dim, run, rows, self.scale, scores);
            }
        }

        let mut sinks = [f32::NEG_INFINITY; WIDE];
        if let Some(all) = self.sinks {
            sinks.iter_mut().zip(queries.clone()).for_each(|(sink, query)| *sink = all[query % n_q]);
        }
        for position in common..positions {
            scores[position * lanes..][..blind(position)].fill(f32::NEG_INFINITY);
        }
        let sums = exp_rows::<S, V>(s, scores, &sinks, self.sinks.is_some());

        outputs.fill(0.0);
        let mut weights = Weights { scores, sums, ready: 0 };
        for (block, range, at) in self.blocks.runs(seen) {
            let run = self.blocks.values.run(block, range);
            run.check(value_dim);
            for first in (0..run.count()).step_by(ROWS) {
                let rows = first..run.count().min(first + ROWS);
                widen(s, run, rows.clone(), value_dim, padded, value_rows);
                let at = at + first;
                weights.divide(s, (at + rows.len()).saturating_sub(weights.ready));
                if matches!(run.ty, KvType::Q8) {
                    weights.scale(s, at, run, rows.clone());
                }
                let shared = rows.len().min(common.saturating_sub(at));
                let count = queries.len();
                weights.add_values(s, at..at + shared, value_rows, padded, &mut outputs[..], count);
                for position in at + shared..at + rows.len() {
                    let value = &value_rows[(position - at) * padded..][..padded];
                    weights.add_value(s, position, value, outputs, blind(position)..count);
                }
            }
        }

        for (lane, query) in queries.enumerate() {
            let head = query % n_q * value_dim;
            let out = &mut self.out.token(query / n_q)[head..head + value_dim];
            out.copy_from_slice(&outputs[lane * padded..][..value_dim]);
        }
    }
}

impl Op for Block<'_, '_> {
    type Out = ();

    fn scalar(mut self) {
        self.one_by_one();
    }

    #[inline(always)]
    fn vector<S: Simd>(mut self, s: S) {
        self.tiles(s);
    }
}

/// Floats before the first whole cache line.
fn to_line(scratch: &[f32]) -> usize {
    scratch.as_ptr().align_offset(4 * LINE).min(scratch.len())
}

/// The rows `rows` of a run as `f32`, `stride` apart; elements past `dim` become 0, the scale is left out.
#[inline(always)]
fn widen<S: Simd>(s: S, run: KvRun<'_>, rows: Range<usize>, dim: usize, stride: usize, out: &mut [f32]) {
    match run.ty {
        KvType::F32 => widen_of::<S, F32>(s, run, rows, dim, stride, out),
        KvType::F16 => widen_of::<S, F16>(s, run, rows, dim, stride, out),
        KvType::Q8 => widen_of::<S, I8>(s, run, rows, dim, stride, out),
    }
}

#[inline(always)]
fn widen_of<S: Simd, E: Element>(
    s: S,
    run: KvRun<'_>,
    rows: Range<usize>,
    dim: usize,
    stride: usize,
    out: &mut [f32],
) {
    for (row, out) in rows.zip(out.chunks_exact_mut(stride)) {
        let bytes = run.rows().row::<E>(row, dim);
        let (whole, tail) = out.as_chunks_mut::<LANES>();
        let groups = dim / LANES;
        for (i, out) in whole[..groups].iter_mut().enumerate() {
            // SAFETY: `bytes` holds `dim` elements, and (i + 1) * 16 <= dim.
            s.store(unsafe { E::load(s, bytes.as_ptr().add(i * LANES * E::BYTES)) }, out);
        }
        let last = whole.get_mut(groups).map_or(tail, |last| &mut last[..]);
        let values = bytes[groups * LANES * E::BYTES..].chunks_exact(E::BYTES).map(E::value);
        last.iter_mut().zip(values.chain(std::iter::repeat(0.0))).for_each(|(out, x)| *out = x);
    }
}

/// Scores of up to [`ROWS`] widened keys: `scores` is `[rows][V * 16]`.
#[inline(always)]
fn score_rows<S: Simd, const V: usize>(
    s: S,
    queries: &[f32],
    keys: &[f32],
    dim: usize,
    run: KvRun<'_>,
    rows: Range<usize>,
    scale: f32,
    scores: &mut [f32],
) {
    if S::WIDE {
        score_columns::<S, V, V, 8>(s, queries, keys, dim, run, rows, scale, scores, 0);
    } else {
        for v in 0..V {
            score_columns::<S, V, 1, 4>(s, queries, keys, dim, run, rows.clone(), scale, scores, v);
        }
    }
}

/// `C` of a row's `V` registers, from register `first_column`; `P` rows at once.
#[inline(always)]
fn score_columns<S: Simd, const V: usize, const C: usize, const P: usize>(
    s: S,
    queries: &[f32],
    keys: &[f32],
    dim: usize,
    run: KvRun<'_>,
    rows: Range<usize>,
    scale: f32,
    scores: &mut [f32],
    first_column: usize,
) {
    const { assert!(ROWS.is_multiple_of(P)) };
    assert!(queries.len() == dim * V * LANES && keys.len() >= ROWS * dim && rows.len() <= ROWS);
    assert!(first_column + C <= V);
    let (scores, _) = scores.as_chunks_mut::<LANES>();
    let queries = queries[first_column * LANES..].as_ptr();
    for first in (0..rows.len()).step_by(P) {
        let keys = keys[first * dim..].as_ptr();
        // SAFETY: `dim` rows of queries `V * 16` apart, `C` registers each within their row; `first + P` is
        // at most `ROWS`, as both are multiples of `P`, and so many rows of keys there are.
        let sums = unsafe { sums_of_products::<S, C, P>(s, queries, V * LANES, keys, dim) };
        // Rows past the end are what an earlier run left there.
        for p in 0..P.min(rows.len() - first) {
            let factor = s.splat(run.scale(rows.start + first + p) * scale);
            for c in 0..C {
                s.store(s.mul(sums[p][c], factor), &mut scores[(first + p) * V + first_column + c]);
            }
        }
    }
}

/// The products of `V` registers of queries with `P` keys, in the order of [`Kernels::dot`]: each lane's
/// chain for itself, and the lanes joined as their siblings in the tree are done.
///
/// # Safety
/// `queries` points at `dim` rows of `V` times sixteen floats, `lanes` apart; `keys` at `P` rows of `dim`.
#[inline(always)]
unsafe fn sums_of_products<S: Simd, const V: usize, const P: usize>(
    s: S,
    queries: *const f32,
    lanes: usize,
    keys: *const f32,
    dim: usize,
) -> [[S::F; V]; P] {
    let mut waiting = [[[s.splat(0.0); V]; P]; 4];
    let mut sums = [[s.splat(0.0); V]; P];
    for leaf in 0..LANES {
        // Leaves of the tree from left to right are 0, 8, 4, 12, ...: bits in reverse.
        let lane = leaf.reverse_bits() >> (usize::BITS - 4);
        sums = [[s.splat(0.0); V]; P];
        let mut d = lane;
        while d < dim {
            let mut q = [s.splat(0.0); V];
            for v in 0..V {
                // SAFETY: row `d` of the queries, by the caller's promise.
                q[v] = unsafe { s.load_f32(queries.add(d * lanes + v * LANES).cast()) };
            }
            for p in 0..P {
                // SAFETY: element `d` of row `p` of the keys.
                let k = s.splat(unsafe { *keys.add(p * dim + d) });
                for v in 0..V {
                    sums[p][v] = s.fma(q[v], k, sums[p][v]);
                }
            }
            d += LANES;
        }
        let mut level = 0;
        while leaf >> level & 1 == 1 {
            for p in 0..P {
                for v in 0..V {
                    sums[p][v] = s.add(waiting[level][p][v], sums[p][v]);
                }
            }
            level += 1;
        }
        if level < waiting.len() {
            waiting[level] = sums;
        }
    }
    sums
}

/// Replaces scores by `exp(score - max)`, max and sum for each lane by itself; gives the sums.
#[inline(always)]
fn exp_rows<S: Simd, const V: usize>(
    s: S,
    scores: &mut [f32],
    sinks: &[f32; WIDE],
    with_sinks: bool,
) -> [S::F; V] {
    let (rows, _) = scores.as_chunks_mut::<LANES>();
    let (sinks, _) = sinks.as_chunks::<LANES>();
    let mut maxes = [s.splat(0.0); V];
    for v in 0..V {
        maxes[v] = s.load(&sinks[v]);
    }
    for row in rows.chunks_exact(V) {
        for v in 0..V {
            maxes[v] = s.max(s.load(&row[v]), maxes[v]);
        }
    }
    let mut lanes = [[s.splat(0.0); V]; LANES];
    for (position, row) in rows.chunks_exact_mut(V).enumerate() {
        let lane = &mut lanes[position % LANES];
        for v in 0..V {
            let e = exp_lanes(s, s.sub(s.load(&row[v]), maxes[v]));
            s.store(e, &mut row[v]);
            lane[v] = s.add(lane[v], e);
        }
    }
    let mut half = LANES / 2;
    while half > 0 {
        for l in 0..half {
            for v in 0..V {
                lanes[l][v] = s.add(lanes[l][v], lanes[l + half][v]);
            }
        }
        half /= 2;
    }
    let mut sums = lanes[0];
    if with_sinks {
        for v in 0..V {
            sums[v] = s.add(sums[v], exp_lanes(s, s.sub(s.load(&sinks[v]), maxes[v])));
        }
    }
    sums
}

/// The weights of a tile: exponentials, of which the first `ready` positions are divided by their sums.
struct Weights<'a, S: Simd, const V: usize> {
    scores: &'a mut [f32],
    sums: [S::F; V],
    ready: usize,
}

impl<S: Simd, const V: usize> Weights<'_, S, V> {
    const LANES: usize = V * LANES;

    /// Divides the next `count` positions, as far as there are any.
    #[inline(always)]
    fn divide(&mut self, s: S, count: usize) {
        let (rows, _) = self.scores[self.ready * Self::LANES..].as_chunks_mut::<LANES>();
        for row in rows.chunks_exact_mut(V).take(count) {
            for v in 0..V {
                s.store(s.div(s.load(&row[v]), self.sums[v]), &mut row[v]);
            }
            self.ready += 1;
        }
    }

    /// Multiplies the weights from position `at` by the scales of their rows.
    #[inline(always)]
    fn scale(&mut self, s: S, at: usize, run: KvRun<'_>, rows: Range<usize>) {
        let (weights, _) = self.scores[at * Self::LANES..].as_chunks_mut::<LANES>();
        for (row, weights) in rows.zip(weights.chunks_exact_mut(V)) {
            let scale = s.splat(run.scale(row));
            for v in 0..V {
                s.store(s.mul(s.load(&weights[v]), scale), &mut weights[v]);
            }
        }
    }

    /// Adds widened values at `positions`, weighted, to the first `count` outputs. In between it divides
    /// some later weights: the divider works beside the multipliers.
    #[inline(always)]
    fn add_values(
        &mut self,
        s: S,
        positions: Range<usize>,
        values: &[f32],
        padded: usize,
        outputs: &mut [f32],
        count: usize,
    ) {
        // Outputs and registers of elements at once.
        let (queries, wide) = if S::WIDE { (4, 4) } else { (2, 2) };
        let parts = count.div_ceil(queries) * (padded / LANES).div_ceil(wide);
        let ahead = ROWS.div_ceil(parts);
        for query in (0..count).step_by(queries) {
            let mut column = 0;
            while column < padded {
                self.divide(s, ahead);
                if column + wide * LANES <= padded {
                    if S::WIDE {
                        self.add_block::<4, 4>(s, positions.clone(), query, values, padded, column, outputs);
                    } else {
                        self.add_block::<2, 2>(s, positions.clone(), query, values, padded, column, outputs);
                    }
                    column += wide * LANES;
                } else {
                    if S::WIDE {
                        self.add_block::<4, 1>(s, positions.clone(), query, values, padded, column, outputs);
                    } else {
                        self.add_block::<2, 1>(s, positions.clone(), query, values, padded, column, outputs);
                    }
                    column += LANES;
                }
            }
        }
    }

    /// `Q` outputs from `query`, `C` times sixteen elements from `column`.
    #[inline(always)]
    fn add_block<const Q: usize, const C: usize>(
        &self,
        s: S,
        positions: Range<usize>,
        query: usize,
        values: &[f32],
        padded: usize,
        column: usize,
        outputs: &mut [f32],
    ) {
        let count = positions.len();
        assert!(query + Q <= Self::LANES && column + C * LANES <= padded && values.len() >= count * padded);
        let outputs = &mut outputs[query * padded..(query + Q) * padded];
        let weights = self.scores[positions.start * Self::LANES..positions.end * Self::LANES].as_ptr();
        let mut acc = [[s.splat(0.0); C]; Q];
        for q in 0..Q {
            for c in 0..C {
                // SAFETY: row `q` of the outputs, `column + C * 16 <= padded`.
                acc[q][c] =
                    unsafe { s.load_f32(outputs.as_ptr().add(q * padded + column + c * LANES).cast()) };
            }
        }
        for p in 0..count {
            let mut value = [s.splat(0.0); C];
            for c in 0..C {
                // SAFETY: row `p < count` of the values, `column + C * 16 <= padded`.
                value[c] = unsafe { s.load_f32(values.as_ptr().add(p * padded + column + c * LANES).cast()) };
            }
            for q in 0..Q {
                // SAFETY: row `p` of the weights of `positions`, lane `query + q` below the lanes of a row.
                let w = s.splat(unsafe { *weights.add(p * Self::LANES + query + q) });
                for c in 0..C {
                    acc[q][c] = s.fma(w, value[c], acc[q][c]);
                }
            }
        }
        for q in 0..Q {
            let (row, _) = outputs[q * padded + column..][..C * LANES].as_chunks_mut::<LANES>();
            for c in 0..C {
                s.store(acc[q][c], &mut row[c]);
            }
        }
    }

    /// Adds one widened value, weighted, to the outputs of `queries`.
    #[inline(always)]
    fn add_value(&self, s: S, position: usize, value: &[f32], outputs: &mut [f32], queries: Range<usize>) {
        let (value, _) = value.as_chunks::<LANES>();
        for query in queries {
            let w = s.splat(self.scores[position * Self::LANES + query]);
            let (out, _) = outputs[query * value.len() * LANES..].as_chunks_mut::<LANES>();
            for (out, value) in out.iter_mut().zip(value) {
                let sum = s.fma(w, s.load(value), s.load(out));
                s.store(sum, out);
            }
        }
    }
}

impl Kernels {
    /// Attention of consecutive tokens of one session, of their query heads that share a kv head.
    ///
    /// There are as many tokens as `out` has. Token t has `n_q` queries of `head_dim` elements from
    /// `queries[t * query_stride]` on, sees the positions `visible.start..visible.end + t`, and gets
    /// [`Kernels::attention`], bit for bit, into its `n_q * value_dim` columns of `out`; `value_dim` is what
    /// that makes it. `scratch` needs [`AttentionScratch::floats`](super::AttentionScratch::floats) for the
    /// positions that the last token sees.
    ///
    /// # Panics
    /// If a shape does not match, `visible` is empty, the scratch is too short, or a row lies outside of its
    /// plane.
    pub fn attention_block(
        self,
        queries: &[f32],
        query_stride: usize,
        n_q: usize,
        head_dim: usize,
        blocks: KvBlocks<'_>,
        visible: Range<usize>,
        scale: f32,
        sinks: Option<&[f32]>,
        scratch: &mut [f32],
        out: &mut Shard<'_>,
    ) {
        let tokens = out.tokens();
        if tokens == 0 {
            return;
        }
        assert!(n_q > 0 && head_dim > 0, "{n_q} queries of {head_dim} elements");
        let width = out.rows().len();
        assert!(width > 0 && width.is_multiple_of(n_q), "{n_q} outputs in {width} columns");
        assert!(queries.len() >= (tokens - 1) * query_stride + n_q * head_dim, "queries of {tokens} tokens");
        assert!(!visible.is_empty(), "attention over no positions");
        assert!(sinks.is_none_or(|sinks| sinks.len() == n_q), "one sink per query");
        let kernels = self;
        let mut block = Block {
            kernels,
            queries,
            query_stride,
            n_q,
            head_dim,
            blocks,
            visible,
            scale,
            sinks,
            scratch,
            out,
        };
        if tokens == 1 || tokens * n_q < FEW || self.isa() == Isa::Scalar {
            block.one_by_one();
        } else {
            self.run(block);
        }
    }
}
