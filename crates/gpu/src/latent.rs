//! Latent attention (DeepSeek-V2, 2024), its projections absorbed: what is remembered of a position is one row that all heads
//! share. [`LatentAppend`] makes it, [`LatentAttention`](crate::LatentAttention) is attention over such rows.

use crate::draft::{Draft, demand, demand_coded};
use crate::rope::{Angles, KV_BLOCK, KvFormat, RopePairs, Rows};
use crate::shader::{Access, Op};
use crate::{CodedPlane, Gpu, GpuError, Slice, Step};

/// Threads of a workgroup that makes rows, and lanes that add up rows of values.
pub(crate) const THREADS: usize = 128;
/// Widest latent of keys and values: a lane has four columns of it.
const MAX_KV_RANK: usize = 4 * THREADS;
/// Widest latent of queries, and widest row: they are shared by a workgroup, in what every device has.
const MAX_WIDTH: usize = 3584;

/// The rows of a layer on the device.
///
/// That of position p of a session is at byte `(b * KV_BLOCK + p % KV_BLOCK) * row_bytes`, block b being entry `p / KV_BLOCK`
/// of the session's table: the CPU's row, byte by byte, the latent in front.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LatentLayout {
    /// How elements are stored.
    pub format: KvFormat,
    /// Elements of the latent.
    pub kv_rank: usize,
    /// Elements behind it, which are turned.
    pub rope_dim: usize,
}

impl LatentLayout {
    /// Whether there are kernels for it, and for a latent of queries of `q_rank` elements (0 if there is none).
    #[must_use]
    pub const fn is_able(&self, q_rank: usize) -> bool {
        let Self { kv_rank, rope_dim, .. } = *self;
        kv_rank > 0
            && kv_rank.is_multiple_of(4)
            && kv_rank <= MAX_KV_RANK
            && rope_dim > 0
            && rope_dim.is_multiple_of(4)
            && self.key_dim() <= MAX_WIDTH
            && q_rank <= MAX_WIDTH
    }

    /// Elements of a row.
    #[must_use]
    pub const fn key_dim(&self) -> usize {
        self.kv_rank + self.rope_dim
    }

    /// Bytes of a row.
    #[must_use]
    pub const fn row_bytes(&self) -> usize {
        self.format.row_bytes(self.key_dim())
    }

    /// Bytes of a block.
    #[must_use]
    pub const fn block_bytes(&self) -> usize {
        KV_BLOCK * self.row_bytes()
    }

    /// Panics unless the kernels can work on it.
    pub(crate) fn check(&self, cache: &Slice) {
        assert!(self.is_able(0), "{self:?}");
        assert!(cache.len() >= self.block_bytes() as u64, "a cache without blocks");
        assert!(cache.len() >> 34 == 0, "a cache of {} bytes", cache.len());
    }
}

/// The latent of queries.
#[derive(Clone, Copy, Debug)]
pub struct LatentQueries<'a> {
    /// Elements.
    pub rank: usize,
    /// Its first column.
    pub at: usize,
    /// As f32, `[tokens, rank]`.
    pub plane: Option<&'a Slice>,
    /// As int8.
    pub coded: Option<&'a CodedPlane>,
}

/// The RMSNorm of both latents.
#[derive(Clone, Copy, Debug)]
pub struct LatentNorm<'a> {
    /// `[kv_rank]`, then `[rank]` of queries if they have a latent.
    pub weights: &'a Slice,
    /// Epsilon.
    pub eps: f32,
}

/// What [`LatentAppend`] works on: projections, `[tokens, stride]` f32.
#[derive(Clone, Copy, Debug)]
pub struct LatentInput<'a> {
    /// The plane.
    pub plane: &'a Slice,
    /// Columns of a token.
    pub stride: usize,
    /// First column of the row: latent of keys and values, and what is turned.
    pub kv_at: usize,
    /// None if queries have no latent.
    pub queries: Option<LatentQueries<'a>>,
    /// Of both.
    pub norm: LatentNorm<'a>,
    /// Of the elements behind the latent.
    pub angles: Angles<'a>,
}

/// Norms the latents and turns what is beside: a row of the cache, and the input of what makes queries.
///
/// Both have the CPU's bits (`rms_norm_in_place`, `rope`, `store_kv_row`, `Activations::quantise`), with the exceptions of
/// [`RopeAppend`](crate::RopeAppend). One dispatch.
#[derive(Clone, Debug)]
pub struct LatentAppend {
    op: Op,
    tokens: usize,
    parts: u32,
    eps: f32,
}

impl LatentAppend {
    /// For up to `tokens` tokens. Positions must be of the table of angles, blocks of the cache, and no two tokens of a step may have
    /// the same row of it: the device does not check.
    ///
    /// # Errors
    /// If the device refuses.
    ///
    /// # Panics
    /// If a shape does not match, or there are no kernels for it ([`LatentLayout::is_able`]).
    pub fn new(
        gpu: &Gpu,
        tokens: usize,
        kv: LatentLayout,
        input: LatentInput<'_>,
        rows: Rows<'_>,
        cache: &Slice,
    ) -> Result<Self, GpuError> {
        let LatentInput { plane, stride, queries, norm, angles, .. } = input;
        let LatentLayout { kv_rank, rope_dim, .. } = kv;
        let q_rank = queries.map_or(0, |queries| queries.rank);
        demand(plane, tokens * stride, "projections");
        demand(rows.rows, 4 * tokens, "rows");
        demand(angles.table, angles.positions * angles.dim, "angles");
        let coded = queries.and_then(|queries| queries.coded);
        let group = coded.map_or(64, |coded| coded.group);
        let mut draft = Draft::default()
            .float(group, gpu.team(group))
            .constant("LANES", THREADS)
            .constant("WIDEST", kv.key_dim().max(q_rank))
            .constant("KV_RANK", kv_rank)
            .constant("KEY_DIM", kv.key_dim())
            .constant("HALF", rope_dim / 2)
            .constant("STRIDE", stride)
            .flag("INTERLEAVED", angles.pairs == RopePairs::Neighbours)
            .buffer("plane", "f32", Access::Read, plane)
            .buffer("rows", "vec4<u32>", Access::Read, rows.rows)
            .buffer("angles", "vec2<f32>", Access::Read, angles.table)
            .text(include_str!("wgsl/rope_pairs.wgsl"))
            .text(include_str!("wgsl/latent_append.wgsl"));
        draft = bind_row(draft, kv, input, rows, cache);
        draft = match queries {
            None => draft.text("fn queries(token: u32, lane: u32) {}\n"),
            Some(LatentQueries { rank, at, plane, coded }) => {
                assert!(at + rank <= stride, "columns {at} + {rank} of {stride}");
                assert!(plane.is_some() != coded.is_some(), "a latent of queries goes to one plane");
                plane.iter().for_each(|plane| demand(plane, tokens * rank, "latents of queries"));
                coded.iter().for_each(|coded| demand_coded(coded, tokens, rank));
                draft = draft
                    .constant("Q_RANK", rank)
                    .constant("Q_AT", at)
                    .constant("CELLS", rank.div_ceil(group))
                    .flag("PLANE", plane.is_some())
                    .flag("CODED", coded.is_some())
                    .text(include_str!("wgsl/latent_append_queries.wgsl"));
                draft = match plane {
                    Some(plane) => draft.plane("low", rank, Access::Write, plane),
                    None => draft.text("fn store_low(row: u32, chunk: u32, v: vec4<f32>) {}\n"),
                };
                match coded {
                    Some(coded) => draft.coded(coded),
                    None => draft.text("fn store_codes(cell: u32, part: u32, coded: Codes) {}\n"),
                }
            }
        };
        let op = draft.op(gpu, "latents")?;
        Ok(Self { op, tokens, parts: 1 + u32::from(queries.is_some()), eps: norm.eps })
    }

    /// Records it for the first `tokens` tokens.
    ///
    /// # Panics
    /// If there are more than it was made for.
    pub fn record(&self, step: &mut Step, tokens: usize) {
        assert!(tokens <= self.tokens, "{tokens} tokens of {}", self.tokens);
        step.run(&self.op, &[self.eps.to_bits()], [self.parts, tokens as u32, 1]);
    }
}

/// What latent_row.wgsl needs of its own, and its text.
pub(crate) fn bind_row<'a>(
    draft: Draft<'a>,
    kv: LatentLayout,
    input: LatentInput<'a>,
    rows: Rows<'a>,
    cache: &'a Slice,
) -> Draft<'a> {
    let LatentInput { stride, kv_at, queries, norm, angles, .. } = input;
    let q_rank = queries.map_or(0, |queries| queries.rank);
    kv.check(cache);
    assert!(kv.is_able(q_rank), "{kv:?}, {q_rank}");
    assert!(kv_at + kv.key_dim() <= stride, "columns {kv_at} + {} of {stride}", kv.key_dim());
    assert_eq!(angles.dim, kv.rope_dim, "elements that are turned");
    demand(norm.weights, kv.kv_rank + q_rank, "norms of latents");
    draft
        .constant("KV_AT", kv_at)
        .constant("TYPE", kv.format.number())
        .constant("ROW_WORDS", kv.row_bytes() / 4)
        .buffer("tables", "u32", Access::Read, rows.tables)
        .buffer("norms", "f32", Access::Read, norm.weights)
        .buffer("cache", "u32", Access::Write, cache)
        .text(include_str!("wgsl/latent_row.wgsl"))
        .text(include_str!("wgsl/rope_store.wgsl"))
}
