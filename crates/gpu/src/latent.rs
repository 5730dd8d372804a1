//! Latent attention (DeepSeek-V2, 2024), its projections absorbed: what is remembered of a position is one row that all heads
//! share. [`LatentAppend`] makes it, [`LatentAttention`] is attention over such rows.

use crate::attention::{Ending, GRID, SPLIT, splits_of};
use crate::norm::{Draft, demand, demand_coded};
use crate::quantise::Repeated;
use crate::rope::{Angles, KV_BLOCK, KvFormat, RopePairs, Rows};
use crate::shader::{Access, Op};
use crate::{AttentionOutputs, AttentionScratch, CodedPlane, Gpu, GpuError, Slice, Step};

/// Threads of a workgroup that makes rows, and lanes that add up rows of values.
const THREADS: usize = 128;
/// Widest latent of keys and values: a lane has four columns of it.
const MAX_KV_RANK: usize = 4 * THREADS;
/// Widest latent of queries, and widest row: they are shared by a workgroup, in what every device has.
const MAX_WIDTH: usize = 3584;
/// Lanes of a position.
const CHAINS: usize = 4;
/// Least lanes side by side over a value: four positions of each of the others' have their weights side by side.
const LEAST_COLUMNS: usize = 4;
/// How heads are cut for workgroups, from few to many; the last is for any number (EXP-GPU-13).
const CUTS: [LatentCut; 5] = [
    LatentCut { threads: 256, heads: 1, ahead: 18, values_ahead: 16 },
    LatentCut { threads: 256, heads: 2, ahead: 9, values_ahead: 16 },
    LatentCut { threads: 256, heads: 4, ahead: 9, values_ahead: 16 },
    LatentCut { threads: 256, heads: 8, ahead: 6, values_ahead: 8 },
    LatentCut { threads: 128, heads: 16, ahead: 1, values_ahead: 8 },
];
/// Workgroups up to which they have fewer heads: about as many as there are multiprocessors (EXP-GPU-13).
const FEW: usize = 160;
/// Most heads of a workgroup that ends with the outputs of its token: it shares room for them.
const WHOLE_HEADS: usize = 1;

/// How [`LatentAttention`] is cut: what is timed to choose. It changes no bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LatentCut {
    /// Threads of a workgroup: 128, 256 or 512. A lane has four, two or one positions.
    pub threads: usize,
    /// Heads of a workgroup: 1, 2, 4, 8 or 16. Each row of the cache is read once for them.
    pub heads: usize,
    /// Units of eight columns, of each of its positions, that a lane has on their way; of rows of f32 half of them.
    pub ahead: usize,
    /// Rows of values that it has on their way: 4, 8, 16 or 32.
    pub values_ahead: usize,
}

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

/// Attention of heads that share one row a position, each token over the positions that its row says: scores over the whole row,
/// means of its latent.
///
/// Softmax as on the CPU, sums in an order of their own that does not depend on other tokens or heads: bits are the same for one token
/// and for thousands. A row that is not a number makes NaN of the heads that see it. Two dispatches for as many tokens as the
/// scratch has room for; one for few workgroups whose positions are all of the first split.
#[derive(Clone, Debug)]
pub struct LatentAttention {
    /// By heads of a workgroup, from few to many.
    splits: Vec<(usize, Op)>,
    /// The same for positions of the first split.
    wholes: Vec<(usize, Op)>,
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
        // A workgroup of many heads that are not there would compute in vain.
        let cuts: Vec<_> = CUTS.into_iter().filter(|cut| cut.heads < 2 * heads).collect();
        Self::tuned(gpu, tokens, kv, heads, scale, queries, cache, rows, scratch, outputs, &cuts)
    }

    /// The same, cut in one of these ways, from few heads a workgroup to many: for measurements.
    ///
    /// # Errors
    /// As [`Self::new`].
    ///
    /// # Panics
    /// As there, and if there are no cuts, or their numbers are not those that their fields name.
    pub fn tuned(
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
        cuts: &[LatentCut],
    ) -> Result<Self, GpuError> {
        let kv_rank = kv.kv_rank;
        kv.check(cache);
        assert!(heads > 0 && !cuts.is_empty(), "{heads} heads, {cuts:?}");
        demand(queries, tokens * heads * kv.key_dim(), "queries");
        demand(rows.rows, 4 * tokens, "rows");
        outputs.check(tokens, heads * kv_rank);
        assert_eq!((scratch.n_heads, scratch.value_dim), (heads, kv_rank), "heads of the scratch");
        let ending = Ending { n_heads: heads, value_dim: kv_rank, sinks: None, outputs };
        let repeated = Repeated::on(gpu)?;
        let core = |cut: LatentCut, whole: bool| Core { kv, heads, cut, whole, repeated };
        let bound = |core: &Core| core.draft(queries, cache, rows);
        let split = |&cut: &LatentCut| -> Result<(usize, Op), GpuError> {
            let core = core(cut, false);
            let op = bound(&core)
                .buffer("sums", "vec4<f32>", Access::Write, &scratch.sums)
                .buffer("stats", "vec2<f32>", Access::Write, &scratch.stats)
                .float(64, 4)
                .text(kv.format.widen())
                .loose_op(gpu, "latent attention", &core.text())?;
            Ok((cut.heads, op))
        };
        let whole = |&cut: &LatentCut| -> Result<(usize, Op), GpuError> {
            let core = core(cut, true);
            let group = ending.group();
            let draft = bound(&core).float(group, gpu.team(group)).text(kv.format.widen());
            let op = ending.draft(draft).loose_op(gpu, "latent attention, whole", &core.text())?;
            Ok((cut.heads, op))
        };
        // Otherwise groups are of several heads.
        let can = outputs.coded.is_none_or(|coded| kv_rank.is_multiple_of(coded.group));
        let wholes = cuts.iter().filter(|cut| can && cut.heads <= WHOLE_HEADS);
        Ok(Self {
            splits: cuts.iter().map(split).collect::<Result<_, _>>()?,
            wholes: wholes.map(whole).collect::<Result<_, _>>()?,
            combine: ending.combine(gpu, rows, scratch)?,
            tokens,
            room: scratch.splits,
            heads,
            parts: ending.parts(gpu),
            scale,
        })
    }

    /// Records it for the first `tokens` tokens, none of which sees more than `visible` positions; all of them are below `end`.
    ///
    /// # Panics
    /// If there are more tokens than it was made for, or one of them needs more room than the scratch has.
    pub fn record(&self, step: &mut Step, tokens: usize, visible: usize, end: usize) {
        self.run(step, tokens, visible, end, false);
    }

    /// Whether positions below `end` are one split, of which few tokens get their outputs at once.
    #[must_use]
    pub fn is_whole(&self, end: usize) -> bool {
        end <= SPLIT && !self.wholes.is_empty()
    }

    /// The same for one token whose splits [`LatentExit`](crate::LatentExit) joins: they stay in the scratch.
    ///
    /// # Panics
    /// As there.
    pub fn record_splits(&self, step: &mut Step, visible: usize, end: usize) {
        self.run(step, 1, visible, end, true);
    }

    fn run(&self, step: &mut Step, tokens: usize, visible: usize, end: usize, apart: bool) {
        assert!(tokens <= self.tokens, "{tokens} tokens of {}", self.tokens);
        let splits = splits_of(visible).min(end.div_ceil(SPLIT));
        let at_once = (self.room / splits.max(1)).min(GRID);
        assert!(tokens == 0 || at_once > 0, "scratch for {} splits, {visible} positions are seen", self.room);
        let (scale, low) = (self.scale.to_bits(), f32::NEG_INFINITY.to_bits());
        let workgroups = |heads: usize| self.heads.div_ceil(heads);
        let fits = |(heads, _): &&(usize, Op)| tokens * splits * workgroups(*heads) <= FEW;
        if let Some((heads, op)) = self.wholes.iter().find(fits).filter(|_| splits == 1 && !apart) {
            step.run(op, &[0, 1, scale, low], [1, workgroups(*heads) as u32, tokens as u32]);
            return;
        }
        let Some((heads, op)) = self.splits.iter().find(fits).or(self.splits.last()) else { return };
        let mut first = 0;
        while first < tokens {
            let n = (tokens - first).min(at_once);
            let words = [first as u32, splits as u32, scale, low];
            step.run(op, &words, [splits as u32, workgroups(*heads) as u32, n as u32]);
            if apart {
                return;
            }
            let words = [first as u32, splits as u32, low];
            step.run(&self.combine, &words, [self.parts as u32, n as u32, 1]);
            first += n;
        }
    }
}

/// A kernel of latent attention on its way.
#[derive(Clone, Copy)]
struct Core {
    kv: LatentLayout,
    heads: usize,
    cut: LatentCut,
    /// Whether it makes outputs, a token having one split only.
    whole: bool,
    repeated: Repeated,
}

impl Core {
    fn columns(&self) -> usize {
        (self.kv.kv_rank / 4).next_power_of_two().max(LEAST_COLUMNS)
    }

    fn ahead(&self) -> usize {
        match self.kv.format {
            KvFormat::F32 => self.cut.ahead.div_ceil(2),
            KvFormat::F16 | KvFormat::Q8 => self.cut.ahead,
        }
    }

    /// Rows of values ahead, of a slice of positions.
    fn values_ahead(&self) -> usize {
        self.cut.values_ahead.min(SPLIT * self.columns() / THREADS)
    }

    /// What both kernels bind and know.
    fn draft<'b>(&self, queries: &'b Slice, cache: &'b Slice, rows: Rows<'b>) -> Draft<'b> {
        let LatentLayout { format, kv_rank, .. } = self.kv;
        let LatentCut { threads, heads, ahead, values_ahead } = self.cut;
        let known = matches!(threads, 128 | 256 | 512)
            && matches!(heads, 1 | 2 | 4 | 8 | 16)
            && matches!(values_ahead, 4 | 8 | 16 | 32);
        assert!(known && ahead > 0, "{:?}", self.cut);
        // Outputs, and behind them what slices come to.
        let outputs = if self.whole { heads * kv_rank / 4 } else { 0 };
        let slices = if self.columns() < THREADS { threads } else { 0 };
        Draft::default()
            .constant("HEADS", self.heads)
            .constant("THREADS", threads)
            .constant("TILE", heads)
            .constant("AHEAD", self.ahead())
            .constant("VALUES_AHEAD", self.values_ahead())
            .constant("KEY_DIM", self.kv.key_dim())
            .constant("VALUE_DIM", kv_rank)
            .constant("COLUMNS", self.columns())
            .constant("ROW", self.kv.row_bytes() / 16)
            .constant("NARROW", format.words())
            .constant("SLICED", outputs)
            .constant("ROOM", (outputs + slices).max(1))
            .buffer("keys", "vec4<u32>", Access::Read, cache)
            .buffer("values", format.narrow(), Access::Read, cache)
            .buffer("rows", "vec4<u32>", Access::Read, rows.rows)
            .buffer("tables", "u32", Access::Read, rows.tables)
            .buffer("queries", "vec4<f32>", Access::Read, queries)
            .text("alias Narrow = ")
            .text(format.narrow())
            .text(";\n")
    }

    /// Their text.
    fn text(&self) -> String {
        let (heads, ahead) = (self.cut.heads as u32, self.ahead() as u32);
        let each = SPLIT * CHAINS / self.cut.threads;
        let mixed = heads / heads.min((self.cut.threads / THREADS) as u32);
        let calls = |head: &str, n: u32, call: &dyn Fn(&str) -> String| self.repeated.calls(head, n, call);
        let (units, starts) = ("ahead: ptr<function, Ahead>", "starts: ptr<function, Starts>");
        let (dots, means) = ("dots: ptr<function, Dots>", "means: ptr<function, Means>");
        let run = "first: u32, start: u32, end: u32, lane: u32";
        [
            include_str!("wgsl/latent_attention.wgsl").to_owned(),
            match self.kv.format {
                KvFormat::F32 => include_str!("wgsl/latent_units_f32.wgsl"),
                KvFormat::F16 => include_str!("wgsl/latent_units_f16.wgsl"),
                KvFormat::Q8 => include_str!("wgsl/latent_units_q8.wgsl"),
            }
            .to_owned(),
            match each {
                1 => include_str!("wgsl/latent_each_1.wgsl"),
                2 => include_str!("wgsl/latent_each_2.wgsl"),
                _ => include_str!("wgsl/latent_each_4.wgsl"),
            }
            .to_owned(),
            match self.whole {
                true => include_str!("wgsl/attention_whole.wgsl"),
                false => include_str!("wgsl/attention_split.wgsl"),
            }
            .to_owned(),
            calls(
                &format!("load_units({units}, {starts}, round: u32, chain: u32)"),
                ahead * each as u32,
                &|i| format!("load_unit(ahead, starts, round, chain, {i});"),
            ),
            calls(
                &format!("take_units({units}, {dots}, {starts}, round: u32, chain: u32, stage: u32)"),
                ahead,
                &|i| format!("take_unit(ahead, dots, starts, round, chain, stage, {i});"),
            ),
            calls(&format!("add_heads(columns: ptr<function, Columns>, {dots}, at: u32)"), heads, &|h| {
                format!("add_head(columns, dots, at, {h});")
            }),
            calls(&format!("leave_scores({dots}, chain: u32, factor: f32, place: u32)"), heads, &|h| {
                format!("leave_score(dots, chain, factor, place, {h});")
            }),
            calls(
                &format!("take_values(ahead: ptr<function, ValuesAhead>, {means}, {run})"),
                self.values_ahead() as u32 / 4,
                &|v| format!("take_value(ahead, means, first, start, end, lane, {v});"),
            ),
            calls(&format!("add_weights({means}, x: ptr<function, Four>, at: u32)"), mixed, &|h| {
                format!("add_weight(means, x, at, {h});")
            }),
            calls(&format!("end_heads({means}, unit: u32, first_head: u32, lane: u32)"), mixed, &|h| {
                format!("end_head(means, unit, first_head, lane, {h});")
            }),
        ]
        .concat()
    }
}
