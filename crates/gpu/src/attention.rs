//! Attention over the cache: [`Attention`].
//!
//! A token's positions are cut at multiples of [`SPLIT`]; one kernel works on all splits side by side, another
//! joins them. What the splits of a token come to lies in an [`AttentionScratch`] in between: long prompts take
//! several rounds of both.

mod outputs;

use crate::draft::{Draft, demand};
use crate::rope::{KvFormat, KvLayout, RopeInput, Rows};
use crate::shader::{Access, Op};
use crate::{Gpu, GpuError, Slice, Step};
pub(crate) use outputs::Ending;
pub use outputs::{AttentionGate, AttentionOutputs};

const ATTENTION: &str = include_str!("wgsl/attention.wgsl");
const TURNED: &str = include_str!("wgsl/attention_turned.wgsl");
const TURNS: &str = include_str!("wgsl/attention_turns.wgsl");

/// Positions of a split.
pub(crate) const SPLIT: usize = 128;
/// Threads of a workgroup.
pub(crate) const THREADS: usize = 256;
/// Lanes that turn a head.
const HEAD_LANES: usize = 32;
/// Splits of a token that turn its query each for itself: 5 gain a dispatch's time by it, 24 lose 2 us (EXP-GPU-08).
const TURNING: usize = 8;
/// Rows of values that a lane of few queries reads ahead.
const VALUES_AHEAD: usize = 16;
/// Bytes that a workgroup shares besides what is counted.
const SPARE: usize = 256;
/// Queries of a workgroup at most.
const QUERIES: usize = 8;
/// Query heads that may share a kv head.
const PER_KV: usize = 16;
/// Tokens from which on several of them share a workgroup: there are enough workgroups then.
const TILED: usize = 16;
/// Workgroups below which each query head has one of its own: a card has more room, and what a head takes is short.
const FEW_WORKGROUPS: usize = 128;
/// Workgroups of a token each from which on those of a session share tiles: 256 take an H200 as long as a few tiles, 35 us, and
/// 128 half of it (EXP-GPU-14).
const MANY_WORKGROUPS: usize = 256;
/// Storage buffers that every device binds at once.
const BINDINGS: usize = 8;
/// Workgroups along an axis of a grid.
pub(crate) const GRID: usize = 65_535;

/// Room for what the splits of tokens come to; shared by the layers of a model.
#[derive(Clone, Debug)]
pub struct AttentionScratch {
    pub(crate) sums: Slice,
    pub(crate) stats: Slice,
    pub(crate) n_heads: usize,
    pub(crate) value_dim: usize,
    pub(crate) splits: usize,
}

impl AttentionScratch {
    /// In about `bytes` bytes, for heads of that number and width; at least for one token that sees `visible`
    /// positions.
    ///
    /// # Errors
    /// If the device has no room, or cannot bind as much.
    pub fn new(
        gpu: &Gpu,
        n_heads: usize,
        value_dim: usize,
        visible: usize,
        bytes: u64,
    ) -> Result<Self, GpuError> {
        let split = (n_heads * (value_dim + 2) * 4) as u64;
        let most = gpu.facts().max_binding / (n_heads * value_dim * 4) as u64;
        let splits = (bytes / split).min(most).max(splits_of(visible) as u64) as usize;
        Ok(Self {
            sums: gpu.buffer("sums of attention", (splits * n_heads * value_dim * 4) as u64)?,
            stats: gpu.buffer("weights of attention", (splits * n_heads * 8) as u64)?,
            n_heads,
            value_dim,
            splits,
        })
    }

    /// Bytes that one token needs at least that sees `visible` positions.
    #[must_use]
    pub const fn least_bytes(n_heads: usize, value_dim: usize, visible: usize) -> u64 {
        (splits_of(visible) * n_heads * (value_dim + 2) * 4) as u64
    }

    /// Bytes on the device.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.sums.len() + self.stats.len()
    }
}

/// Splits that `visible` consecutive positions touch at most.
pub(crate) const fn splits_of(visible: usize) -> usize {
    (visible + 2 * SPLIT - 2) / SPLIT
}

/// What [`Attention`] works on besides the cache.
#[derive(Clone, Copy, Debug)]
pub struct AttentionHeads<'a> {
    /// Query heads; those of kv head h are `h * n_heads / n_kv_heads` and the ones after it.
    pub n_heads: usize,
    /// What scores are multiplied with.
    pub scale: f32,
    /// One logit per query head that takes part in the softmax and has no value, `[n_heads]`.
    pub sinks: Option<&'a Slice>,
}

/// Grouped-query attention of the tokens of a step, each over the positions that its row says.
///
/// Softmax as on the CPU, sums in an order of their own that does not depend on other tokens: bits are the same
/// for one token and for thousands. A score or value that is not a number makes NaN of the heads that see it, and
/// of no others. Two dispatches for as many tokens as the scratch has room for; one for a few whose positions are all
/// of the first split.
#[derive(Clone, Debug)]
pub struct Attention {
    /// One token a workgroup: a query head, or all that share a kv head; and several tokens.
    narrow: Op,
    single: Op,
    tiled: Option<(Op, usize)>,
    /// Tokens of one session, a tile of them a workgroup.
    prompt: Option<(Op, usize)>,
    /// A query head of tokens that have one split only.
    whole: Option<Op>,
    /// `narrow` and `whole` of one token that make queries, keys and values themselves.
    turning: Option<(Op, Option<Op>)>,
    combine: Op,
    tokens: usize,
    room: usize,
    n_kv_heads: usize,
    /// Workgroups that share a kv head's queries in `single` and `tiled`; in the others each query has its own.
    groups: usize,
    per_kv: usize,
    parts: usize,
    scale: f32,
    /// Of the norm of what it makes itself.
    eps: f32,
}

impl Attention {
    /// For up to `tokens` tokens; `queries` is `[tokens, n_heads * head_dim]`. With `turns` it can make queries, keys and
    /// values of a lone token itself.
    ///
    /// A row's positions must be of its session's table, and the blocks there of the cache: the device does not
    /// check.
    ///
    /// # Errors
    /// If the device refuses.
    ///
    /// # Panics
    /// If a shape does not match, a head is wider than 256 or no multiple of 4, or more than 16 query heads share a
    /// kv head.
    pub fn new<'a>(
        gpu: &Gpu,
        tokens: usize,
        kv: KvLayout,
        heads: AttentionHeads<'a>,
        queries: &'a Slice,
        cache: &'a Slice,
        rows: Rows<'a>,
        scratch: &'a AttentionScratch,
        outputs: AttentionOutputs<'a>,
        turns: Option<RopeInput<'a>>,
    ) -> Result<Self, GpuError> {
        let KvLayout { n_kv_heads, head_dim, value_dim, .. } = kv;
        let AttentionHeads { n_heads, scale, sinks } = heads;
        kv.check(cache);
        let per_kv = n_heads / n_kv_heads;
        assert!(
            n_heads == per_kv * n_kv_heads && (1..=PER_KV).contains(&per_kv),
            "{n_heads} heads of {n_kv_heads}"
        );
        let width = n_heads * value_dim;
        demand(queries, tokens * n_heads * head_dim, "queries");
        demand(rows.rows, 4 * tokens, "rows");
        sinks.iter().for_each(|sinks| demand(sinks, n_heads, "sinks"));
        outputs.check(tokens, width);
        assert_eq!((scratch.n_heads, scratch.value_dim), (n_heads, value_dim), "heads of the scratch");

        let groups = per_kv.div_ceil(QUERIES);
        let group = outputs.coded.map_or(64, |coded| coded.group);
        let team = gpu.team(group);
        let access = |turns: Option<RopeInput<'a>>| match turns {
            // What is in the cache already, and what is written there, are of one buffer.
            Some(_) => Access::Write,
            None => Access::Read,
        };
        let core = |tile: usize, groups: usize, turns: Option<RopeInput<'a>>| {
            let queries_at_once = tile * per_kv.div_ceil(groups);
            let draft = Draft::default()
                .constant("HEADS", n_heads)
                .constant("KV_HEADS", n_kv_heads)
                .constant("PER_KV", per_kv)
                .constant("QUERIES", queries_at_once)
                .constant("GROUPS", groups)
                .constant("TILE", tile)
                .constant("HEAD_DIM", head_dim)
                .constant("VALUE_DIM", value_dim)
                .constant("COLUMNS", (value_dim / 4).next_power_of_two())
                .constant("ROW", kv.row_bytes() / 16)
                .constant("NARROW", kv.format.words())
                .constant("STAGE", (queries_at_once * head_dim / 4).max(2 * THREADS))
                .buffer("keys", "vec4<u32>", access(turns), cache)
                .buffer("values", kv.format.narrow(), access(turns), cache)
                .buffer("rows", "vec4<u32>", Access::Read, rows.rows)
                .buffer("tables", "u32", Access::Read, rows.tables)
                .text("alias Narrow = ")
                .text(kv.format.narrow())
                .text(";\n")
                .float(group, team)
                .text(kv.format.widen());
            match turns {
                Some(input) => input
                    .draft(draft, kv, THREADS / HEAD_LANES)
                    .buffer("cache", "u32", Access::Write, cache)
                    .text(kv.format.own_value())
                    .text(TURNS),
                None => draft.buffer("queries", "vec4<f32>", Access::Read, queries).text(TURNED),
            }
        };
        let split = |tile: usize, groups: usize, turns: Option<RopeInput<'a>>| {
            core(tile, groups, turns)
                .buffer("sums", "vec4<f32>", Access::Write, &scratch.sums)
                .buffer("stats", "vec2<f32>", Access::Write, &scratch.stats)
                .text(include_str!("wgsl/attention_split.wgsl"))
                .loose_op(gpu, "attention", ATTENTION)
        };
        let tile = QUERIES / per_kv;
        let tiled = if tile > 1 && tokens >= TILED { Some((split(tile, groups, None)?, tile)) } else { None };
        let prompt = if tokens >= TILED {
            crate::prompt::op(gpu, kv, heads, queries, cache, rows, scratch)?
        } else {
            None
        };

        let ending = Ending { n_heads, value_dim, sinks, outputs };
        // Its outputs must have room where its scores were, its heads be whole groups, and its buffers few enough.
        let bound = 5
            + usize::from(sinks.is_some())
            + usize::from(outputs.plane.is_some())
            + 2 * usize::from(outputs.coded.is_some());
        // Who makes queries has the gate's plane already.
        let own_gate = |turns: Option<RopeInput<'a>>| {
            let bound =
                turns.zip(outputs.gate).is_some_and(|(turns, gate)| turns.projections.plane.is(gate.plane));
            outputs.gate.is_some() && !bound
        };
        let fits = value_dim <= SPLIT && bound + usize::from(outputs.gate.is_some()) <= BINDINGS;
        let whole_heads = outputs.coded.is_none() || value_dim.is_multiple_of(group);
        let whole = |name: &str, turns: Option<RopeInput<'a>>| {
            let rest = [ATTENTION, include_str!("wgsl/attention_whole.wgsl")].concat();
            // Codes have the CPU's bits, so its end is not among the rest.
            let bound = (!own_gate(turns)).then_some("plane");
            ending.draft(core(1, per_kv, turns), bound).loose_op(gpu, name, &rest)
        };
        // Every value of a split is on its way at once, and so are keys; and all of it has room.
        let turning = match turns.filter(|input| {
            input.check(1, n_heads, kv);
            let bound = bound + input.bindings() + 2 + usize::from(own_gate(Some(*input)));
            let columns = (value_dim / 4).next_power_of_two();
            let shared = 16 * (head_dim / 4).max(2 * THREADS)
                + 16 * SPLIT
                + 32 * (THREADS / 4)
                + 4 * (THREADS / HEAD_LANES) * (head_dim.max(value_dim) + 16)
                + 4 * THREADS
                + 2 * kv.row_bytes()
                + SPARE;
            VALUES_AHEAD * THREADS / columns >= SPLIT
                && bound.max(9 + input.bindings()) <= gpu.most_bindings()
                && shared <= gpu.shared_bytes() as usize
        }) {
            Some(input) => {
                let split = split(1, per_kv, Some(input))?;
                let can = fits && whole_heads;
                let whole = if can { Some(whole("rope and attention, whole", Some(input))?) } else { None };
                Some((split, whole))
            }
            None => None,
        };
        let whole = if fits && whole_heads { Some(whole("attention, whole", None)?) } else { None };
        Ok(Self {
            narrow: split(1, per_kv, None)?,
            single: split(1, groups, None)?,
            tiled,
            prompt,
            whole,
            turning,
            combine: ending.combine(gpu, rows, scratch)?,
            tokens,
            room: scratch.splits,
            n_kv_heads,
            groups,
            per_kv,
            parts: ending.parts(gpu),
            scale,
            eps: turns.map_or(0.0, |input| input.eps()),
        })
    }

    /// Whether it makes the query, key and value of a token that is alone and sees so many positions, as
    /// [`RopeAppend`](crate::RopeAppend) would: each split would turn the query once more.
    #[must_use]
    pub fn turns(&self, visible: usize) -> bool {
        self.turning.is_some() && splits_of(visible) <= TURNING
    }

    /// Records it for one token whose query, key and value it makes, with the bits of
    /// [`RopeAppend`](crate::RopeAppend) and [`Self::record`]; that sees at most `visible` positions, and is below `end`.
    ///
    /// # Panics
    /// If it does not make them ([`Self::turns`]), or needs more room than the scratch has.
    pub fn record_turning(&self, step: &mut Step, visible: usize, end: usize) {
        let Some((narrow, whole)) = &self.turning else { panic!("queries are made elsewhere") };
        let splits = splits_of(visible);
        assert!(splits <= self.room, "scratch for {} splits, {visible} positions are seen", self.room);
        let low = f32::NEG_INFINITY.to_bits();
        let (scale, eps) = (self.scale.to_bits(), self.eps.to_bits());
        let heads = (self.n_kv_heads * self.per_kv) as u32;
        if let Some(op) = whole.as_ref().filter(|_| end <= SPLIT) {
            step.run(op, &[0, 1, 1, scale, low, eps], [1, heads, 1]);
            return;
        }
        step.run(narrow, &[0, 1, splits as u32, scale, low, eps], [splits as u32, heads, 1]);
        step.run(&self.combine, &[0, splits as u32, low], [self.parts as u32, 1, 1]);
    }

    /// Records it for the first `tokens` tokens, none of which sees more than `visible` positions; all of them are below
    /// `end`. They are of so many `sessions`, one after the other: which kernel is fast hangs on it, not what tokens get.
    ///
    /// # Panics
    /// If there are more tokens than it was made for, or one of them needs more room than the scratch has.
    pub fn record(&self, step: &mut Step, tokens: usize, sessions: usize, visible: usize, end: usize) {
        assert!(tokens <= self.tokens, "{tokens} tokens of {}", self.tokens);
        let splits = splits_of(visible);
        let at_once = (self.room / splits).min(GRID);
        assert!(tokens == 0 || at_once > 0, "scratch for {} splits, {visible} positions are seen", self.room);
        let low = f32::NEG_INFINITY.to_bits();
        let each = self.n_kv_heads * self.per_kv;
        if let Some(op) = self.whole.as_ref().filter(|_| end <= SPLIT && tokens < TILED) {
            let words = [0, tokens as u32, 1, self.scale.to_bits(), low];
            step.run(op, &words, [1, each as u32, tokens as u32]);
            return;
        }
        let shared = self.n_kv_heads * self.groups;
        let worth = tokens * visible.div_ceil(SPLIT) * shared >= MANY_WORKGROUPS;
        let prompt = self.prompt.as_ref().filter(|(_, tile)| worth && tokens >= TILED.max(sessions * tile));
        let (op, tile, heads) = match (prompt, &self.tiled) {
            (Some((op, tile)), _) => (op, *tile, self.n_kv_heads),
            (None, Some((op, tile))) if tokens >= TILED => (op, *tile, shared),
            _ if tokens * splits * shared < FEW_WORKGROUPS => (&self.narrow, 1, each),
            _ => (&self.single, 1, shared),
        };
        // Rounds of whole tiles, if there is room for one.
        let at_once = if at_once > tile { at_once / tile * tile } else { at_once };
        let mut first = 0;
        while first < tokens {
            let end = tokens.min(first + at_once);
            let words = [first as u32, end as u32, splits as u32, self.scale.to_bits(), low];
            step.run(op, &words, [splits as u32, heads as u32, (end - first).div_ceil(tile) as u32]);
            let words = [first as u32, splits as u32, low];
            step.run(&self.combine, &words, [self.parts as u32, (end - first) as u32, 1]);
            first = end;
        }
    }
}

impl KvFormat {
    /// Parts of sixteen bytes that hold four elements each.
    pub(crate) const fn words(self) -> usize {
        match self {
            Self::F32 => 1,
            Self::F16 => 2,
            Self::Q8 => 4,
        }
    }

    /// The type of such a part.
    pub(crate) const fn narrow(self) -> &'static str {
        match self {
            Self::F32 => "vec4<u32>",
            Self::F16 => "vec2<u32>",
            Self::Q8 => "u32",
        }
    }

    /// Four elements of a value that a workgroup has of its own.
    const fn own_value(self) -> &'static str {
        match self {
            Self::F32 => {
                "fn own_value(column: u32) -> Narrow { let at = ROW_WORDS + 4u * column; \
                 return vec4(own_rows[at], own_rows[at + 1u], own_rows[at + 2u], own_rows[at + 3u]); }\n"
            }
            Self::F16 => {
                "fn own_value(column: u32) -> Narrow { let at = ROW_WORDS + 2u * column; \
                 return vec2(own_rows[at], own_rows[at + 1u]); }\n"
            }
            Self::Q8 => "fn own_value(column: u32) -> Narrow { return own_rows[ROW_WORDS + column]; }\n",
        }
    }

    pub(crate) const fn widen(self) -> &'static str {
        match self {
            Self::F32 => include_str!("wgsl/attention_f32.wgsl"),
            Self::F16 => include_str!("wgsl/attention_f16.wgsl"),
            Self::Q8 => include_str!("wgsl/attention_q8.wgsl"),
        }
    }
}
