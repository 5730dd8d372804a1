//! Latent attention (DeepSeek-V2, 2024), its projections absorbed: what is remembered of a position is one row that all heads
//! share. [`LatentAppend`] makes it, [`LatentAttention`] is attention over such rows.

use crate::attention::{Ending, FEW_WORKGROUPS, GRID, SPLIT, splits_of};
use crate::norm::{Draft, demand, demand_coded};
use crate::quantise::Repeated;
use crate::rope::{Angles, KV_BLOCK, KvFormat, RopePairs, Rows};
use crate::shader::{Access, Op};
use crate::{AttentionOutputs, AttentionScratch, CodedPlane, Gpu, GpuError, Slice, Step};

/// Threads of a workgroup of either kernel.
const THREADS: usize = 128;
/// Widest latent of keys and values: a lane has four columns of it.
const MAX_KV_RANK: usize = 4 * THREADS;
/// Widest latent of queries, and widest row: they are shared by a workgroup, in what every device has.
const MAX_WIDTH: usize = 3584;
/// Heads of a workgroup: many, for which a row is read once, and few, where there are not enough workgroups otherwise. What a lane
/// has of them is eight in either case.
const TILES: [usize; 2] = [16, 8];
/// Vectors of keys that are staged at once, where there is shared memory for them, and where there is not.
const PARTS: [(usize, u32); 2] = [(8, 24 << 10), (4, 0)];

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
    fn check(&self, cache: &Slice) {
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
        let LatentInput { plane, stride, kv_at, queries, norm, angles } = input;
        let LatentLayout { format, kv_rank, rope_dim, .. } = kv;
        let q_rank = queries.map_or(0, |queries| queries.rank);
        kv.check(cache);
        assert!(kv.is_able(q_rank), "{kv:?}, {q_rank}");
        demand(plane, tokens * stride, "projections");
        assert!(kv_at + kv.key_dim() <= stride, "columns {kv_at} + {} of {stride}", kv.key_dim());
        demand(rows.rows, 4 * tokens, "rows");
        demand(norm.weights, kv_rank + q_rank, "norms of latents");
        assert_eq!(angles.dim, rope_dim, "elements that are turned");
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
            .constant("KV_AT", kv_at)
            .constant("TYPE", format.number())
            .constant("ROW_WORDS", kv.row_bytes() / 4)
            .flag("INTERLEAVED", angles.pairs == RopePairs::Neighbours)
            .buffer("plane", "f32", Access::Read, plane)
            .buffer("rows", "vec4<u32>", Access::Read, rows.rows)
            .buffer("tables", "u32", Access::Read, rows.tables)
            .buffer("angles", "vec2<f32>", Access::Read, angles.table)
            .buffer("norms", "f32", Access::Read, norm.weights)
            .buffer("cache", "u32", Access::Write, cache)
            .text(include_str!("wgsl/rope_pairs.wgsl"))
            .text(include_str!("wgsl/latent_append.wgsl"))
            .text(include_str!("wgsl/rope_store.wgsl"));
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

/// Attention of heads that share one row a position, each token over the positions that its row says: scores over the whole row,
/// means of its latent.
///
/// Softmax as on the CPU, sums in an order of their own that does not depend on other tokens: bits are the same for one token
/// and for thousands. A row that is not a number makes NaN of the heads that see it. Two dispatches for as many tokens as the
/// scratch has room for.
#[derive(Clone, Debug)]
pub struct LatentAttention {
    /// By heads of a workgroup.
    splits: Vec<(usize, Op)>,
    combine: Op,
    tokens: usize,
    room: usize,
    heads: usize,
    parts: usize,
    scale: f32,
}

impl LatentAttention {
    /// For up to `tokens` tokens of `heads` heads; `queries` is `[tokens, heads * key_dim]`, the outputs are `[tokens, heads * kv_rank]`.
    /// Scores are multiplied by `scale`.
    ///
    /// A row's positions must be of its session's table, and the blocks there of the cache: the device does not check.
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
        heads: usize,
        scale: f32,
        queries: &Slice,
        cache: &Slice,
        rows: Rows<'_>,
        scratch: &AttentionScratch,
        outputs: AttentionOutputs<'_>,
    ) -> Result<Self, GpuError> {
        let LatentLayout { format, kv_rank, .. } = kv;
        kv.check(cache);
        assert!(heads > 0, "no heads");
        demand(queries, tokens * heads * kv.key_dim(), "queries");
        demand(rows.rows, 4 * tokens, "rows");
        outputs.check(tokens, heads * kv_rank);
        assert_eq!((scratch.n_heads, scratch.value_dim), (heads, kv_rank), "heads of the scratch");
        let part = PARTS.iter().find(|(_, bytes)| gpu.shared_bytes() >= *bytes).map_or(4, |(part, _)| *part);
        let repeated = Repeated::on(gpu)?;
        let means = "means: ptr<function, Means>";
        let split = |tile: usize| -> Result<(usize, Op), GpuError> {
            // SHARE * EACH of the kernel: heads by positions of a lane.
            let pairs = (tile * SPLIT / (THREADS / 2)) as u32;
            let rest = [
                include_str!("wgsl/latent_attention.wgsl").to_owned(),
                repeated.calls(
                    "add_pairs(key: ptr<function, Keys>, dots: ptr<function, Dots>, at: u32)",
                    pairs,
                    |i| format!("add_pair(key, dots, at, {i});"),
                ),
                repeated.calls(
                    &format!("add_weights({means}, position: u32, x: vec4<f32>)"),
                    tile as u32 / 4,
                    |v| format!("add_weight(means, position, x, {v});"),
                ),
                repeated.calls(
                    &format!("leave_heads({means}, unit: u32, first_head: u32, lane: u32)"),
                    tile as u32,
                    |q| format!("leave_head(means, unit, first_head, lane, {q});"),
                ),
            ];
            let op = Draft::default()
                .constant("HEADS", heads)
                .constant("TILE", tile)
                .constant("PART", part)
                .constant("KEY_DIM", kv.key_dim())
                .constant("VALUE_DIM", kv_rank)
                .constant("COLUMNS", (kv_rank / 4).next_power_of_two())
                .constant("ROW", kv.row_bytes() / 16)
                .constant("NARROW", format.words())
                .buffer("keys", "vec4<u32>", Access::Read, cache)
                .buffer("values", format.narrow(), Access::Read, cache)
                .buffer("rows", "vec4<u32>", Access::Read, rows.rows)
                .buffer("tables", "u32", Access::Read, rows.tables)
                .buffer("queries", "vec4<f32>", Access::Read, queries)
                .buffer("sums", "vec4<f32>", Access::Write, &scratch.sums)
                .buffer("stats", "vec2<f32>", Access::Write, &scratch.stats)
                .text("alias Narrow = ")
                .text(format.narrow())
                .text(";\n")
                .float(64, 4)
                .text(format.widen())
                .loose_op(gpu, "latent attention", &rest.concat())?;
            Ok((tile, op))
        };
        // A workgroup of many heads that are not there would compute in vain.
        let tiles = TILES.into_iter().filter(|tile| heads > tile / 2 || *tile == TILES[1]);
        let ending = Ending { n_heads: heads, value_dim: kv_rank, sinks: None, outputs };
        Ok(Self {
            splits: tiles.map(split).collect::<Result<_, _>>()?,
            combine: ending.combine(gpu, rows, scratch)?,
            tokens,
            room: scratch.splits,
            heads,
            parts: ending.parts(gpu),
            scale,
        })
    }

    /// Records it for the first `tokens` tokens, none of which sees more than `visible` positions.
    ///
    /// # Panics
    /// If there are more tokens than it was made for, or one of them needs more room than the scratch has.
    pub fn record(&self, step: &mut Step, tokens: usize, visible: usize) {
        assert!(tokens <= self.tokens, "{tokens} tokens of {}", self.tokens);
        let splits = splits_of(visible);
        let at_once = (self.room / splits).min(GRID);
        assert!(tokens == 0 || at_once > 0, "scratch for {} splits, {visible} positions are seen", self.room);
        let low = f32::NEG_INFINITY.to_bits();
        let workgroups = |tile: usize| self.heads.div_ceil(tile);
        let fills = |tile: usize| tokens * splits * workgroups(tile) >= FEW_WORKGROUPS;
        let of_tile = self.splits.iter().find(|(tile, _)| fills(*tile)).or(self.splits.last());
        let Some((tile, op)) = of_tile else { return };
        let mut first = 0;
        while first < tokens {
            let n = (tokens - first).min(at_once);
            let words = [first as u32, splits as u32, self.scale.to_bits(), low];
            step.run(op, &words, [splits as u32, workgroups(*tile) as u32, n as u32]);
            let words = [first as u32, splits as u32, low];
            step.run(&self.combine, &words, [self.parts as u32, n as u32, 1]);
            first += n;
        }
    }
}
