//! Attention over the rows of a latent: [`LatentAttention`].

use crate::attention::{Ending, GRID, SPLIT, splits_of};
use crate::draft::{Draft, demand};
use crate::latent::THREADS as MIXERS;
use crate::quantise::Repeated;
use crate::rope::{KV_BLOCK, KvFormat, Rows};
use crate::shader::{Access, Op};
use crate::{AttentionOutputs, AttentionScratch, Gpu, GpuError, LatentLayout, Slice, Step};

/// Lanes of a position.
const CHAINS: usize = 4;
/// What lanes of a head's weights find, each four neighbours one.
const FOUND: usize = 8;
/// Least lanes side by side over a value: a slice of positions then has four at least, whose weights are read at once.
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

/// Attention of heads that share one row a position, each token over the positions that its row says: scores over the whole row,
/// means of its latent.
///
/// Softmax as on the CPU, sums in an order of their own that does not depend on other tokens or heads: bits are the same for one token
/// and for thousands. A row that is not a number makes NaN of the heads that see it. Two dispatches for as many tokens as the
/// scratch has room for; one for few heads of tokens whose positions are all of the first split.
#[derive(Clone, Debug)]
pub struct LatentAttention {
    /// By heads of a workgroup, from few to many.
    splits: Vec<(usize, Op)>,
    /// The same of one head for positions of the first split.
    whole: Option<(usize, Op)>,
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
        let repeated = Repeated::on(gpu)?;
        let has_room = |&cut: &LatentCut| {
            let core = Core { kv, heads, cut, whole: false, repeated };
            cut.heads < 2 * heads && core.shared_bytes() <= gpu.shared_bytes() as usize
        };
        let cuts: Vec<_> = CUTS.into_iter().filter(has_room).collect();
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
            let op = ending.draft(draft, None).loose_op(gpu, "latent attention, whole", &core.text())?;
            Ok((cut.heads, op))
        };
        // Otherwise groups are of several heads.
        let can = outputs.coded.is_none_or(|coded| kv_rank.is_multiple_of(coded.group));
        let one = cuts.iter().find(|cut| can && cut.heads == 1);
        Ok(Self {
            splits: cuts.iter().map(split).collect::<Result<_, _>>()?,
            whole: one.map(whole).transpose()?,
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
        end <= SPLIT && self.whole.is_some()
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
        if let Some((heads, op)) = self.whole.iter().find(fits).filter(|_| splits == 1 && !apart) {
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
        self.cut.values_ahead.min(SPLIT * self.columns() / MIXERS)
    }

    /// Bytes that a workgroup shares.
    fn shared_bytes(&self) -> usize {
        let LatentCut { heads, .. } = self.cut;
        let queries = 2 * heads * 2 * CHAINS * self.ahead();
        // Weights, and what is found of them, four floats a vector.
        let weights = heads * SPLIT / 4 + 2 * (heads * FOUND / 4);
        16 * (queries + weights + self.room()) + 4 * SPLIT / KV_BLOCK
    }

    /// Vectors of outputs, and behind them those that slices come to.
    fn room(&self) -> usize {
        let slices = if self.columns() < MIXERS { self.cut.threads } else { 0 };
        (self.outputs() + slices).max(1)
    }

    fn outputs(&self) -> usize {
        if self.whole { self.cut.heads * self.kv.kv_rank / 4 } else { 0 }
    }

    /// What both kernels bind and know.
    fn draft<'b>(&self, queries: &'b Slice, cache: &'b Slice, rows: Rows<'b>) -> Draft<'b> {
        let LatentLayout { format, kv_rank, .. } = self.kv;
        let LatentCut { threads, heads, ahead, values_ahead } = self.cut;
        let known = matches!(threads, 128 | 256 | 512)
            && matches!(heads, 1 | 2 | 4 | 8 | 16)
            && matches!(values_ahead, 4 | 8 | 16 | 32);
        assert!(known && ahead > 0, "{:?}", self.cut);
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
            .constant("SLICED", self.outputs())
            .constant("ROOM", self.room())
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
        let mixed = heads / heads.min((self.cut.threads / MIXERS) as u32);
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
