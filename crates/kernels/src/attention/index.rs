//! The indexer of sparse attention (DeepSeek-V3.2, 2025): which positions a token's attention sees.
//!
//! A position's *index score* is `sum over heads of weight * relu(query . key)`, one key per position for all heads. The
//! positions of the `top_k` largest are chosen. Factors that are the same for all positions of a token, as the
//! publication's roots of the heads' width and number, change no choice and are left out.

use crate::dot::{Element, F16, F32, I8, products, products_scalar};
use crate::isa::Kernels;
use crate::matmul::FORK;
use crate::output::Shared;
use crate::simd::{Op, Simd};
use crate::{Pool, top_k_ascending};

use super::{KvRun, KvType, Sight, check_heads};

/// Tokens whose scores are kept at once: bounds the memory of a prefill, and spreads choosing over threads.
const TOKENS: usize = 16;
/// Positions of a task that scores; a multiple of the cache's blocks, so that no block is of two tasks.
const SPAN: usize = 512;

/// Index scores of a token for a run of keys.
struct IndexScores<'a> {
    queries: &'a [f32],
    head_dim: usize,
    weights: &'a [f32],
    keys: KvRun<'a>,
    scores: &'a mut [f32],
}

impl IndexScores<'_> {
    /// Heads come in ascending order to each row.
    #[inline(always)]
    fn emit(&mut self, row: usize, head: usize, sum: f32) {
        let product = sum * self.keys.scale(row);
        // A NaN stays one.
        let product = if product < 0.0 { 0.0 } else { product };
        self.scores[row] = self.weights[head].mul_add(product, self.scores[row]);
    }

    fn scalar_of<E: Element>(&mut self) {
        let (rows, queries, head_dim) = (self.keys.rows(), self.queries, self.head_dim);
        products_scalar::<E>(rows, queries, head_dim, |row, head, sum| self.emit(row, head, sum));
    }

    #[inline(always)]
    fn vector_of<S: Simd, E: Element>(&mut self, s: S) {
        let (rows, queries, head_dim) = (self.keys.rows(), self.queries, self.head_dim);
        products::<S, E>(s, rows, queries, head_dim, &mut |row, head, sum| self.emit(row, head, sum));
    }
}

impl Op for IndexScores<'_> {
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

impl Kernels {
    /// A token's index scores for a run of keys.
    ///
    /// `queries` is `[heads, head_dim]`, `weights` is `[heads]`, `scores` has one number per row of the run. From +0,
    /// for heads ascending, `score[p] = fma(weights[h], relu(dot(q_h, k_p) * scale_p), score[p])`, `scale_p` being a
    /// q8 key's and else 1, with the dot product of [`Kernels::dot`].
    ///
    /// # Panics
    /// If a shape does not match.
    pub fn index_scores(
        self,
        queries: &[f32],
        head_dim: usize,
        weights: &[f32],
        keys: KvRun<'_>,
        scores: &mut [f32],
    ) {
        keys.check(head_dim);
        check_heads(queries.len(), head_dim);
        assert_eq!(queries.len() / head_dim, weights.len(), "one weight per head");
        assert_eq!(scores.len(), keys.count(), "one score per key");
        scores.fill(0.0);
        self.run(IndexScores { queries, head_dim, weights, keys, scores });
    }
}

/// The heads of an indexer.
#[derive(Clone, Copy, Debug)]
pub struct IndexHeads {
    /// How many there are.
    pub n_heads: usize,
    /// Elements of a query and of a key.
    pub head_dim: usize,
    /// Positions that a token sees.
    pub top_k: usize,
}

/// What [`choose`] chose, and its working memory.
#[derive(Debug)]
pub struct Choices {
    top_k: usize,
    /// `[T, top_k]`.
    chosen: Vec<u32>,
    /// `[TOKENS, positions]`.
    scores: Vec<f32>,
    ranks: Vec<u32>,
}

impl Choices {
    /// For `tokens` tokens that see up to `context` positions.
    #[must_use]
    pub fn new(tokens: usize, top_k: usize, context: usize) -> Self {
        let (chosen, plane) = Self::sizes(tokens, top_k, context);
        Self { top_k, chosen: vec![0; chosen], scores: vec![0.0; plane], ranks: vec![0; plane] }
    }

    /// Bytes of [`Self::new`].
    #[must_use]
    pub const fn bytes(tokens: usize, top_k: usize, context: usize) -> usize {
        let (chosen, plane) = Self::sizes(tokens, top_k, context);
        4 * (chosen + 2 * plane)
    }

    /// Nothing where a token never sees more than is chosen.
    const fn sizes(tokens: usize, top_k: usize, context: usize) -> (usize, usize) {
        if context <= top_k {
            return (0, 0);
        }
        let at_once = if tokens < TOKENS { tokens } else { TOKENS };
        (tokens * top_k, at_once * context.next_multiple_of(SPAN))
    }

    /// The positions chosen of the `visible` first that a token sees, ascending; `None` if it sees all of them.
    #[must_use]
    pub fn of(&self, token: usize, visible: usize) -> Option<&[u32]> {
        (visible > self.top_k).then(|| &self.chosen[token * self.top_k..(token + 1) * self.top_k])
    }
}

/// Chooses the positions that each token sees of those before it: the [`top_k_ascending`] of its index scores.
///
/// `queries` is `[T, n_heads * head_dim]`, `weights` is `[T, n_heads]`. `sight(t)` has the session's index keys for keys
/// and all positions that token t could see, from 0 on; its values are not looked at. A token that could see `top_k`
/// or fewer is passed over. The choice does not depend on other tokens or the number of threads. Allocates nothing.
///
/// # Panics
/// If a shape does not match, tokens or positions are more than the choices were made for, or a row lies outside of its
/// plane.
pub fn choose<'a>(
    pool: &Pool,
    kernels: Kernels,
    heads: IndexHeads,
    queries: &[f32],
    weights: &[f32],
    sight: &(dyn Fn(usize) -> Sight<'a> + Sync),
    choices: &mut Choices,
) {
    let IndexHeads { n_heads, head_dim, top_k } = heads;
    let width = n_heads * head_dim;
    let tokens = weights.len() / n_heads;
    assert!(queries.len() == tokens * width && weights.len() == tokens * n_heads, "{tokens} of {heads:?}");
    assert_eq!(choices.top_k, top_k, "choices of another indexer");
    let Choices { chosen, scores, ranks, .. } = choices;
    for first in (0..tokens).step_by(TOKENS) {
        let n = TOKENS.min(tokens - first);
        let visible = |token: usize| Some(sight(token).visible.end).filter(|&visible| visible > top_k);
        let Some(longest) = (first..first + n).filter_map(visible).max() else { continue };
        let stride = longest.next_multiple_of(SPAN);
        let spans = stride / SPAN;
        let forks = n * longest * width >= FORK;
        let each = |tasks: usize, task: &(dyn Fn(usize) + Sync)| {
            if forks { pool.run(tasks, task) } else { (0..tasks).for_each(task) }
        };
        let plane = Shared::new(&mut scores[..n * stride]);
        each(n * spans, &|task| {
            let (token, from) = (first + task / spans, task % spans * SPAN);
            let Some(visible) = visible(token).filter(|&visible| visible > from) else { return };
            let range = from..visible.min(from + SPAN);
            let at = task / spans * stride;
            // SAFETY: each task has its own span of its own token.
            let out = unsafe { plane.part(at + range.start..at + range.end) };
            let queries = &queries[token * width..(token + 1) * width];
            let weights = &weights[token * n_heads..(token + 1) * n_heads];
            let blocks = sight(token).blocks;
            for (block, positions, at) in blocks.runs(range) {
                let out = &mut out[at..at + positions.len()];
                kernels.index_scores(queries, head_dim, weights, blocks.keys.run(block, positions), out);
            }
        });
        let (scores, ranks, chosen) = (&*scores, Shared::new(ranks), Shared::new(chosen));
        each(n, &|i| {
            let token = first + i;
            let Some(visible) = visible(token) else { return };
            let row = i * stride..i * stride + visible;
            // SAFETY: each task has its own token's own ranks and choices.
            let (ranks, chosen) =
                unsafe { (ranks.part(row.clone()), chosen.part(token * top_k..(token + 1) * top_k)) };
            top_k_ascending(&scores[row], ranks, chosen);
        });
    }
}

#[cfg(test)]
mod tests;
