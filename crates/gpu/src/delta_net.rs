//! Gated delta nets (Yang, Kautz, Hatamizadeh 2024): [`DeltaNet`], from a layer's projections to what its states answer.
//!
//! The states are the CPU's, number by number: `delta_net` in `smoe-kernels` defines them and what becomes of them.

use crate::draft::{Draft, demand, demand_coded};
use crate::quantise::{GRID, Repeated};
use crate::shader::{Access, Op};
use crate::{CodedPlane, Gpu, GpuError, Slice, Step};

const CHANNELS: &str = include_str!("wgsl/delta_channels.wgsl");
const MIX: &str = include_str!("wgsl/delta_mix.wgsl");
const STAGED: &str = include_str!("wgsl/delta_staged.wgsl");
const LONE: &str = include_str!("wgsl/delta_lone.wgsl");
const NET: &str = include_str!("wgsl/delta_net.wgsl");
const FOUND: &str = include_str!("wgsl/delta_found.wgsl");
const GATED: &str = include_str!("wgsl/delta_gated.wgsl");
const ENDED: &str = include_str!("wgsl/delta_ended.wgsl");
const EXIT: &str = include_str!("wgsl/delta_exit.wgsl");

/// Added to the squares of a query or key before the root.
const EPS: f32 = 1e-6;
/// Threads of a workgroup that states go through tokens in.
const THREADS: usize = 128;
/// Lanes that share two rows of a state, at most (EXP-GPU-16).
const LANES: usize = 8;
/// Tokens that such a workgroup stages at once.
const TILE: usize = 8;
/// Heads of a workgroup of delta_mix.wgsl.
const AT_ONCE: usize = 4;
/// Threads of a workgroup of delta_exit.wgsl, or those of one head.
const EXIT_THREADS: usize = 64;
/// Widest key, whose row of a state lanes hold in registers.
const MAX_KEY: usize = 256;
/// Words of a run, a mark, a token.
const RUN: usize = 8;
const MARK: usize = 2;
const TOKEN: usize = 2;
/// No state.
const NONE: u32 = u32::MAX;

/// The heads of a layer, and how its states lie.
///
/// A state has a part per key head: the last inputs of the convolution, `[conv_width - 1, channels]`, the oldest position first,
/// channels being its query, its key and the values of its value heads; then `S` of each of those, `[value_dim, key_dim]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaLayout {
    /// Heads of queries and keys.
    pub n_key_heads: usize,
    /// Heads of values; so many in a row share a key head.
    pub n_value_heads: usize,
    /// Width of a query or key.
    pub key_dim: usize,
    /// Width of a value.
    pub value_dim: usize,
    /// Positions that the convolution sees, its own the last of them.
    pub conv_width: usize,
}

impl DeltaLayout {
    /// Whether there are kernels for it.
    #[must_use]
    pub const fn is_able(&self) -> bool {
        let heads = self.n_key_heads > 0 && self.n_value_heads.is_multiple_of(self.n_key_heads);
        let keys = self.key_dim > 0 && self.key_dim.is_multiple_of(16) && self.key_dim <= MAX_KEY;
        let values = self.value_dim > 0 && self.value_dim.is_multiple_of(16) && self.value_dim <= MAX_KEY;
        // Whole groups of whole heads have lanes in a workgroup.
        let groups = if values { lcm(128, self.value_dim) / 128 } else { 0 };
        heads && keys && values && groups <= 8 && self.n_value_heads > 0 && self.conv_width > 0
    }

    /// Columns of all values.
    #[must_use]
    pub const fn values(&self) -> usize {
        self.n_value_heads * self.value_dim
    }

    const fn channels(&self) -> usize {
        2 * self.key_dim + self.n_value_heads / self.n_key_heads * self.value_dim
    }

    const fn unit(&self) -> usize {
        let states = self.n_value_heads / self.n_key_heads * self.value_dim * self.key_dim;
        (self.conv_width - 1) * self.channels() + states
    }

    /// f32 of a state.
    #[must_use]
    pub const fn state_len(&self) -> usize {
        self.n_key_heads * self.unit()
    }

    /// f32 of what the convolution makes of a token: queries and keys, values, rates.
    #[must_use]
    pub const fn mixed(&self) -> usize {
        2 * self.n_key_heads * self.key_dim + self.values() + 4 * self.n_value_heads.div_ceil(2)
    }

    const fn taps(&self) -> usize {
        self.n_key_heads * self.conv_width * self.channels()
    }

    fn draft<'a>(&self, input: &DeltaInput<'_>, draft: Draft<'a>) -> Draft<'a> {
        let [q_at, k_at, v_at, gate_at, beta_at, decay_at] = input.at;
        draft
            .constant("KEY_HEADS", self.n_key_heads)
            .constant("VALUE_HEADS", self.n_value_heads)
            .constant("KEY_DIM", self.key_dim)
            .constant("VALUE_DIM", self.value_dim)
            .constant("CONV", self.conv_width)
            .constant("STRIDE", input.stride)
            .constant("Q_AT", q_at)
            .constant("K_AT", k_at)
            .constant("V_AT", v_at)
            .constant("GATE_AT", gate_at)
            .constant("BETA_AT", beta_at)
            .constant("DECAY_AT", decay_at)
            .constant("UNIT", self.unit())
            .constant("STATE", self.state_len())
            .constant("MIXED", self.mixed())
    }
}

/// Tokens in a row of one sequence, and the numbers of states in a memory of states.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateRun {
    /// The first token's place in the planes.
    pub first: u32,
    /// The place behind the last one's.
    pub end: u32,
    /// The state before them; none before a sequence's first token.
    pub from: Option<u32>,
    /// The state after them; may be the same.
    pub to: u32,
}

/// A copy of a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateMark {
    /// The token after which it is taken.
    pub row: u32,
    /// The copy's number.
    pub to: u32,
}

/// Whose states a step's tokens go through: words on the device, which all layers share.
#[derive(Clone, Debug)]
pub struct StateRuns {
    words: Slice,
    tokens: usize,
    runs: usize,
    marks: usize,
    host: Vec<u32>,
}

impl StateRuns {
    /// Room for steps of so many tokens, in so many runs, with so many marks.
    ///
    /// # Errors
    /// If the device has no room.
    pub fn new(gpu: &Gpu, tokens: usize, runs: usize, marks: usize) -> Result<Self, GpuError> {
        let runs = runs.min(tokens);
        let words = RUN * runs + MARK * marks + TOKEN * tokens;
        let host = Vec::with_capacity(words);
        Ok(Self { words: gpu.buffer("runs of states", 4 * words as u64)?, tokens, runs, marks, host })
    }

    /// Tells the device, before the next submitted step. Runs are of ascending tokens and have all of them; `marks` come in any order.
    ///
    /// # Panics
    /// If there are more than there is room for.
    pub fn write(&mut self, gpu: &Gpu, runs: &[StateRun], marks: &[StateMark]) {
        assert!(
            runs.len() <= self.runs && marks.len() <= self.marks,
            "{} runs, {} marks",
            runs.len(),
            marks.len()
        );
        let words = &mut self.host;
        words.clear();
        words.resize(RUN * self.runs + MARK * self.marks, 0);
        let mut mark = 0;
        for (i, run) in runs.iter().enumerate() {
            let first = mark;
            // The next one of the run, each time.
            let mut from = run.first;
            while let Some(next) =
                marks.iter().filter(|mark| (from..run.end).contains(&mark.row)).min_by_key(|mark| mark.row)
            {
                words[RUN * self.runs + MARK * mark..][..MARK].copy_from_slice(&[next.row, next.to]);
                (mark, from) = (mark + 1, next.row + 1);
            }
            let StateRun { first: row, end, from, to } = *run;
            let own = [row, end, from.unwrap_or(NONE), to, first as u32, mark as u32, 0, 0];
            words[RUN * i..RUN * (i + 1)].copy_from_slice(&own);
        }
        for run in runs {
            assert!(run.end as usize <= self.tokens && run.first <= run.end, "{run:?} of {}", self.tokens);
            (run.first..run.end).for_each(|_| words.extend([run.first, run.from.unwrap_or(NONE)]));
        }
        gpu.write(&self.words, 0, bytemuck::cast_slice(words));
    }
}

/// What a layer makes of tokens before their states are asked: `[tokens, stride]` f32.
#[derive(Clone, Copy, Debug)]
pub struct DeltaInput<'a> {
    /// The plane.
    pub plane: &'a Slice,
    /// Columns of a token, a multiple of four.
    pub stride: usize,
    /// The first columns of queries, keys, values, gates (as many as values), beta and decay (one a value head); of the first four
    /// multiples of four.
    pub at: [usize; 6],
}

/// A layer's weights.
#[derive(Clone, Copy, Debug)]
pub struct DeltaNetWeights<'a> {
    /// `[n_key_heads, conv_width, channels]`.
    pub taps: &'a Slice,
    /// `[2 * n_value_heads]`: rates of decay, then what is added before softplus.
    pub rates: &'a Slice,
    /// `[value_dim]`, of the norm of each head's output.
    pub norm: &'a Slice,
    /// Of that norm.
    pub eps: f32,
}

/// Planes between its kernels, which layers share.
#[derive(Clone, Debug)]
pub struct DeltaScratch {
    mixed: Slice,
    found: Slice,
}

impl DeltaScratch {
    /// For up to so many tokens.
    ///
    /// # Errors
    /// If the device has no room.
    pub fn new(gpu: &Gpu, layout: &DeltaLayout, tokens: usize) -> Result<Self, GpuError> {
        let plane = |what, cols: usize| gpu.buffer(what, (4 * tokens * cols) as u64);
        Ok(Self {
            mixed: plane("inputs of states", layout.mixed())?,
            found: plane("answers of states", layout.values())?,
        })
    }
}

/// Where the outputs go; one of them at least.
#[derive(Clone, Copy, Debug, Default)]
pub struct DeltaOutputs<'a> {
    /// As f32, `[tokens, n_value_heads * value_dim]`.
    pub plane: Option<&'a Slice>,
    /// As int8.
    pub coded: Option<&'a CodedPlane>,
}

/// Convolution, states, norm and gate of a layer, for tokens of any runs; renews the states and leaves the marked copies.
///
/// The arithmetic is the CPU's (`delta_net`, `rms_norm_in_place`, `swiglu`) in f32, decay too, and every sum has an order of its own that does not
/// depend on tokens, runs or marks: a prompt has the bits of its tokens one by one. Three dispatches, one
/// of a lone token, or two if its heads are no whole groups of the int8 outputs.
#[derive(Clone, Debug)]
pub struct DeltaNet {
    mix: Op,
    net: Op,
    /// Both of a lone token.
    lone: Op,
    exit: Op,
    /// `lone` does what `exit` does.
    is_ended: bool,
    tokens: usize,
    /// Workgroups of a token, of a run, of a lone token, of a token.
    parts: [[usize; 2]; 4],
    runs: usize,
    scale: f32,
    eps: f32,
}

impl DeltaNet {
    /// For up to `tokens` tokens of the runs, over `states`, `[any number, state_len]` f32.
    ///
    /// The numbers in the runs must be of it, none of those that are written may be another run's or mark's, and a run's own `from` may be its `to`
    /// only, and not where one token is recorded: the device does not check.
    ///
    /// # Errors
    /// If the device refuses.
    ///
    /// # Panics
    /// If a shape does not match or [has no kernels](DeltaLayout::is_able).
    pub fn new<'a>(
        gpu: &Gpu,
        tokens: usize,
        layout: DeltaLayout,
        input: DeltaInput<'a>,
        weights: DeltaNetWeights<'a>,
        runs: &'a StateRuns,
        states: &'a Slice,
        scratch: &'a DeltaScratch,
        outputs: DeltaOutputs<'a>,
    ) -> Result<Self, GpuError> {
        assert!(layout.is_able(), "{layout:?}");
        let DeltaLayout { n_key_heads, n_value_heads, key_dim, value_dim, .. } = layout;
        let (keys, values) = (n_key_heads * key_dim, layout.values());
        let DeltaInput { plane, stride, at } = input;
        demand(plane, tokens * stride, "projections");
        assert!(
            tokens <= runs.tokens && tokens <= GRID && stride.is_multiple_of(4),
            "{tokens} tokens of {stride}"
        );
        for (at, width) in at.into_iter().zip([keys, keys, values, values, n_value_heads, n_value_heads]) {
            assert!(at + width <= stride, "columns {at} + {width} of {stride}");
        }
        assert!(at[..4].iter().all(|at| at.is_multiple_of(4)), "columns at {at:?}");
        demand(weights.taps, layout.taps(), "weights of a convolution");
        demand(weights.rates, 2 * n_value_heads, "rates of decay");
        demand(weights.norm, value_dim, "weights of a norm");
        demand(states, layout.state_len(), "states");
        demand(&scratch.mixed, tokens * layout.mixed(), "inputs of states");
        demand(&scratch.found, tokens * values, "answers of states");
        let DeltaOutputs { plane: out, coded } = outputs;
        out.iter().for_each(|out| demand(out, tokens * values, "outputs of states"));
        coded.iter().for_each(|coded| demand_coded(coded, tokens, values));
        assert!(out.is_some() || coded.is_some(), "states without outputs");

        let marks_at = RUN * runs.runs;
        let channels = |access: Access, (group, team): (usize, usize)| {
            layout
                .draft(&input, Draft::default())
                .float(group, team)
                .constant("MARKS_AT", marks_at)
                .constant("TOKENS_AT", marks_at + MARK * runs.marks)
                .buffer("words", "u32", Access::Read, &runs.words)
                .buffer("plane", "vec4<f32>", Access::Read, plane)
                .buffer("taps", "vec4<f32>", Access::Read, weights.taps)
                .buffer("rates", "f32", Access::Read, weights.rates)
                .buffer("states", "vec4<f32>", access, states)
                .text(CHANNELS)
        };
        let mix = channels(Access::Read, (64, 4))
            .buffer("mixed", "vec4<f32>", Access::Write, &scratch.mixed)
            .text(MIX)
            .op(gpu, "inputs of states")?;

        let lanes = LANES.min(1 << gpu.facts().subgroup.0.ilog2());
        let parts = (key_dim / 4).div_ceil(lanes);
        let repeated = Repeated::on(gpu)?;
        let of_states = |draft: Draft<'a>, threads: usize, tile: usize| {
            draft
                .constant("LANES", lanes)
                .constant("THREADS", threads)
                .constant("TILE", tile)
                .flag("REMEMBERS_EARLY", tile == 1 && threads > THREADS)
                .constant("PARTS", parts)
        };
        let with_found = |threads: usize, tile: usize| {
            of_states(channels(Access::Write, (64, 4)), threads, tile)
                .buffer("out", "vec2<f32>", Access::Write, &scratch.found)
                .text(FOUND)
        };
        let rows = rows_lists(repeated, parts);
        let staged = TILE * (key_dim / 2 + THREADS / lanes / 2 + 1);
        let net = with_found(THREADS, TILE)
            .buffer("mixed", "vec4<f32>", Access::Read, &scratch.mixed)
            .loose_op(gpu, "states", &[NET, STAGED, &rows, &staged_lists(repeated, staged)].concat())?;

        // The end of heads: their norm and gate, in planes.
        let ending = |draft: Draft<'a>, own: usize| {
            let draft = draft
                .constant("OWN", own)
                .flag("PLANE", out.is_some())
                .flag("CODED", coded.is_some())
                .buffer("weight", "vec4<f32>", Access::Read, weights.norm)
                .text(GATED);
            let draft = match out {
                Some(out) => draft.plane("mixed", values, Access::Write, out),
                None => draft.text("fn store_mixed(row: u32, chunk: u32, v: vec4<f32>) {}\n"),
            };
            match coded {
                Some(coded) => draft.coded(coded),
                None => draft.text("fn store_codes(cell: u32, part: u32, coded: Codes) {}\n"),
            }
        };
        // A workgroup has all rows of a head, if there are whole groups of them.
        let group = coded.map_or(16, |coded| coded.group);
        let whole = (lanes * value_dim / 2).max(THREADS);
        let bound = 6 + usize::from(out.is_some()) + 2 * usize::from(coded.is_some());
        let is_ended =
            value_dim.is_multiple_of(group) && whole <= gpu.most_threads() && bound <= gpu.most_bindings();
        let rest = [NET, &rows].concat();
        let lone = if is_ended {
            let draft = of_states(channels(Access::Write, (group, gpu.team(group))), whole, 1).text(LONE);
            let draft = ending(draft, value_dim / 4).text(ENDED);
            draft.loose_op(gpu, "states, norm and gate of a token", &rest)?
        } else {
            with_found(THREADS, 1).text(LONE).loose_op(gpu, "states of a token", &rest)?
        };

        let group = coded.map_or(64, |coded| coded.group);
        let team = gpu.team(group);
        // Whole groups of whole heads.
        let least = lcm(group, value_dim);
        let lanes_of_least = least / group * team;
        let threads = lanes_of_least * (EXIT_THREADS / lanes_of_least).max(1);
        assert!(
            threads <= gpu.most_threads(),
            "{threads} threads for values of {value_dim} in groups of {group}"
        );
        let draft = layout
            .draft(&input, Draft::default())
            .float(group, team)
            .constant("THREADS", threads)
            .constant("VALUES", values)
            .constant("CELLS", values.div_ceil(group))
            .buffer("plane", "vec4<f32>", Access::Read, plane)
            .buffer("found", "vec4<f32>", Access::Read, &scratch.found);
        let own = threads * group / (4 * team);
        let exit = ending(draft, own).text(EXIT).op(gpu, "norm and gate of states")?;
        let rows = 2 * THREADS / lanes;
        Ok(Self {
            mix,
            net,
            lone,
            exit,
            is_ended,
            tokens,
            parts: [
                [(2 * n_key_heads + n_value_heads).div_ceil(AT_ONCE), 0],
                [value_dim.div_ceil(rows), n_value_heads],
                [if is_ended { 1 } else { value_dim.div_ceil(rows) }, n_value_heads],
                [values.div_ceil(group).div_ceil(threads / team), 0],
            ],
            runs: runs.runs,
            scale: 1.0 / (key_dim as f32).sqrt(),
            eps: weights.eps,
        })
    }

    /// Records it for the first `tokens` tokens.
    ///
    /// # Panics
    /// If there are more than it was made for.
    pub fn record(&self, step: &mut Step, tokens: usize) {
        assert!(tokens <= self.tokens, "{tokens} tokens of {}", self.tokens);
        let [[mix, _], [net, heads], [lone, _], [exit, _]] = self.parts.map(|of| of.map(|n| n as u32));
        // Runs that there are not have no tokens. How many there are is not known when it is recorded.
        let (runs, tokens) = (self.runs.min(tokens) as u32, tokens as u32);
        let words = [EPS, self.scale, self.eps].map(f32::to_bits);
        if tokens == 1 {
            step.run(&self.lone, &words, [lone, heads, 1]);
        } else {
            step.run(&self.mix, &words[..2], [mix, tokens, 1]);
            step.run(&self.net, &words, [net, heads, runs]);
        }
        if tokens == 1 && self.is_ended {
            return;
        }
        step.run(&self.exit, &[self.eps.to_bits()], [exit, tokens, 1]);
    }
}

/// The functions of all vectors of a row of a lane.
fn rows_lists(repeated: Repeated, parts: usize) -> String {
    let calls = |head: &str, call: &dyn Fn(&str) -> String| repeated.calls(head, parts as u32, call);
    let of_row = "s: ptr<function, Held>, sums: ptr<function, Sums>, at: u32";
    [
        calls("load_parts(s: ptr<function, Held>, at: u32, part: u32)", &|j| {
            format!("load_part(s, at, part, {j});")
        }),
        calls("leave_parts(s: ptr<function, Held>, at: u32, part: u32)", &|j| {
            format!("leave_part(s, at, part, {j});")
        }),
        calls(&format!("meet_parts({of_row}, decay: f32, part: u32)"), &|j| {
            format!("meet_part(s, sums, at, decay, part, {j});")
        }),
        calls(&format!("take_parts({of_row}, d: vec2<f32>, part: u32)"), &|j| {
            format!("take_part(s, sums, at, d, part, {j});")
        }),
    ]
    .concat()
}

/// The functions of all items that a lane stages.
fn staged_lists(repeated: Repeated, staged: usize) -> String {
    let items = staged.div_ceil(THREADS) as u32;
    [
        repeated.calls(
            "read_items(ahead: ptr<function, Ahead>, run: Run, base: u32, lane: u32)",
            items,
            |j| format!("read_item(ahead, run, base, lane, {j});"),
        ),
        repeated.calls("stage_items(ahead: ptr<function, Ahead>, run: Run, lane: u32)", items, |j| {
            format!("stage_item(ahead, lane, {j});")
        }),
    ]
    .concat()
}

const fn lcm(a: usize, b: usize) -> usize {
    let (mut x, mut y) = (a, b);
    while y > 0 {
        (x, y) = (y, x % y);
    }
    a / x * b
}
