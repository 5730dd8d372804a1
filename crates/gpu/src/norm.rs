//! The residual stream: what each part of a layer adds to it and takes of it ([`MixNorm`]).

use crate::draft::{Draft, demand, demand_coded};
use crate::shader::{Access, Op};
use crate::{CodedPlane, Gpu, GpuError, Quantise, Slice, Step};

const NORM: &str = concat!(include_str!("wgsl/norm_row.wgsl"), include_str!("wgsl/norm.wgsl"));
pub(crate) const NORM_ROW: &str = include_str!("wgsl/norm_row.wgsl");

/// Vectors of four values that a lane keeps in registers at most.
const HELD: usize = 64;

/// Vectors of weights that a lane reads ahead at most: more would take the registers that others need.
const AHEAD: usize = 8;

/// What a part of a layer adds to the hidden states.
#[derive(Clone, Copy, Debug)]
pub enum Delta<'a> {
    /// Nothing: they are only read.
    None,
    /// A plane, `[tokens, d]`, and a bias, `[d]`: `hidden += plane + bias`, `hidden += plane` without one.
    Plane(&'a Slice, Option<&'a Slice>),
    /// Outputs of routed experts: `sum = fma(output, weight, sum)` from 0 over a token's pairs in ascending
    /// order, then the shared expert's output is added to the sum, then `hidden += sum`.
    Experts {
        /// `[tokens * top_k, d]`, row `token * top_k + j` being of the token's j-th expert.
        outputs: &'a Slice,
        /// `[tokens, top_k]`.
        weights: &'a Slice,
        /// Experts of a token.
        top_k: usize,
        /// The shared expert's.
        shared: Option<Shared<'a>>,
    },
}

/// Output of a shared expert.
#[derive(Clone, Copy, Debug)]
pub struct Shared<'a> {
    /// `[tokens, d]`.
    pub output: &'a Slice,
    /// `[tokens]`: its sigmoid multiplies the output.
    pub gate: Option<&'a Slice>,
}

impl Delta<'_> {
    /// Planes that a token's sum is of.
    pub(crate) fn planes(&self) -> usize {
        match self {
            Self::None => 0,
            Self::Plane(..) => 1,
            Self::Experts { top_k, shared, .. } => top_k + usize::from(shared.is_some()),
        }
    }

    pub(crate) fn bindings(&self) -> usize {
        match self {
            Self::None => 0,
            Self::Plane(_, bias) => 1 + usize::from(bias.is_some()),
            Self::Experts { shared, .. } => {
                2 + usize::from(shared.is_some()) + usize::from(shared.is_some_and(|s| s.gate.is_some()))
            }
        }
    }

    pub(crate) fn check(&self, tokens: usize, d: usize) {
        match self {
            Self::None => {}
            Self::Plane(plane, bias) => {
                demand(plane, tokens * d, "what is added");
                bias.iter().for_each(|bias| demand(bias, d, "a bias"));
            }
            Self::Experts { outputs, weights, top_k, shared } => {
                assert!(*top_k > 0, "no experts");
                demand(outputs, tokens * top_k * d, "outputs of experts");
                demand(weights, tokens * top_k, "routing weights");
                if let Some(shared) = shared {
                    demand(shared.output, tokens * d, "outputs of the shared expert");
                    shared.gate.iter().for_each(|gate| demand(gate, tokens, "gate of the shared expert"));
                }
            }
        }
    }
}

/// Declares what a delta reads, and the function that makes it.
pub(crate) fn add_delta<'a>(draft: Draft<'a>, delta: Delta<'a>, d: usize) -> Draft<'a> {
    const HEAD: &str = "fn delta(token: u32, chunk: u32) -> vec4<f32> {\n";
    match delta {
        Delta::None => draft.text(HEAD).text("return vec4(0.0);\n}\n"),
        Delta::Plane(plane, bias) => {
            let draft = draft.plane("added", d, Access::Read, plane);
            match bias {
                None => draft.text(HEAD).text("return load_added(token, chunk);\n}\n"),
                Some(bias) => draft
                    .plane("added_bias", d, Access::Read, bias)
                    .text(HEAD)
                    .text("return load_added(token, chunk) + load_added_bias(0u, chunk);\n}\n"),
            }
        }
        Delta::Experts { outputs, weights, top_k, shared } => {
            let mut draft = draft.constant("TOP_K", top_k).plane("outputs", d, Access::Read, outputs).buffer(
                "weights",
                "f32",
                Access::Read,
                weights,
            );
            let mut end = "";
            if let Some(shared) = shared {
                draft = draft.plane("shared_output", d, Access::Read, shared.output);
                end = "sum += load_shared_output(token, chunk);\n";
                if let Some(gate) = shared.gate {
                    draft = draft.buffer("gates", "f32", Access::Read, gate);
                    end = "let gate = divide(1.0, 1.0 + exponential(-gates[token]));\n\
                           sum += fma4(load_shared_output(token, chunk), vec4(gate), vec4(p.zero));\n";
                }
            }
            draft
                .text(HEAD)
                .text(
                    "var sum = vec4(p.zero);\n\
                     for (var j = 0u; j < TOP_K; j++) {\n\
                     let pair = token * TOP_K + j;\n\
                     sum = fma4(load_outputs(pair, chunk), vec4(weights[pair]), sum);\n}\n",
                )
                .text(end)
                .text("return sum;\n}\n")
        }
    }
}

/// A word on the device that stops layers that are recorded ahead: 0 while they go on, and the number of the layer
/// some of whose experts are not there ([`Route::halting`](crate::Route::halting)), an f32, from then on.
#[derive(Clone, Copy, Debug)]
pub struct Halt<'a> {
    /// Where it lies.
    pub words: &'a Slice,
    /// Its place, in words.
    pub at: usize,
}

/// What [`MixNorm`] writes.
#[derive(Clone, Copy, Debug, Default)]
pub struct NormOutputs<'a> {
    /// As f32, `[rows, d]`.
    pub plane: Option<&'a Slice>,
    /// As int8, one per group size.
    pub coded: &'a [&'a CodedPlane],
}

/// How a row is cut for the lanes of a workgroup.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NormCut {
    d: usize,
    group: usize,
    team: usize,
    groups: usize,
    pub(crate) threads: usize,
    rounds: usize,
}

impl NormCut {
    /// Of `d` values, in groups of `group` if it is quantised, by `threads` threads or as many as it likes.
    ///
    /// # Panics
    /// If there are none, or too many for registers.
    pub(crate) fn new(gpu: &Gpu, d: usize, group: Option<usize>, threads: Option<usize>) -> Self {
        Self::try_new(gpu, d, group, threads).unwrap_or_else(|| panic!("a norm of {d} values"))
    }

    /// The same; none if there are none, or too many.
    pub(crate) fn try_new(gpu: &Gpu, d: usize, group: Option<usize>, threads: Option<usize>) -> Option<Self> {
        let group = group.unwrap_or(64);
        let team = gpu.team(group);
        let groups = d.div_ceil(group);
        let as_wide = (team * groups).next_multiple_of(64).clamp(64, gpu.most_threads());
        let threads = threads.unwrap_or(as_wide);
        let rounds = groups.div_ceil(threads / team);
        let cut = Self { d, group, team, groups, threads, rounds };
        (d > 0 && cut.held() <= HELD).then_some(cut)
    }

    /// Bytes that a workgroup shares.
    pub(crate) const fn shared_bytes(self) -> u32 {
        (4 * self.rounds * self.threads / self.team) as u32
    }

    /// Vectors that a lane holds.
    const fn held(self) -> usize {
        self.rounds * self.group / (4 * self.team)
    }

    /// What norm_row.wgsl needs to know of it.
    pub(crate) fn draft(self, draft: Draft<'_>) -> Draft<'_> {
        let held = self.held();
        draft
            .float(self.group, self.team)
            .constant("D", self.d)
            .constant("D_GROUPS", self.groups)
            .constant("THREADS", self.threads)
            .constant("ROUNDS", self.rounds)
            .constant("AHEAD", if held <= AHEAD { held } else { 0 })
    }
}

/// Adds to the hidden states and norms them: `hidden[t] += delta[t]`, then
/// `out = weight * (hidden[t] * inv)`, `inv = 1 / sqrt(dot(hidden[t], hidden[t]) / d + eps)`.
///
/// The sum and its addition have the CPU's bits; the sum of squares has an order of its own. One dispatch, and another one per int8 plane after the first (or from the first on, if a shared
/// expert with a gate and both kinds of outputs are more than the device binds).
#[derive(Clone, Debug)]
pub struct MixNorm {
    op: Op,
    /// Int8 planes that the kernel does not make itself.
    rest: Vec<Quantise>,
    rows: usize,
    eps: f32,
    residual: f32,
}

impl MixNorm {
    /// Over `hidden`, `[tokens, d]`, with `weight`, `[d]`.
    ///
    /// Output row i is of token i; or of token `rows[i]` (u32, distinct, below `tokens`), and other tokens are left
    /// alone: what a head needs.
    ///
    /// # Errors
    /// If the device refuses.
    ///
    /// # Panics
    /// If a buffer is too short, an int8 plane has other columns, `d` is 0 or above 65,536, there is no output,
    /// or int8 planes that need an f32 one have none.
    pub fn new(
        gpu: &Gpu,
        tokens: usize,
        d: usize,
        eps: f32,
        hidden: &Slice,
        weight: &Slice,
        delta: Delta<'_>,
        rows: Option<(&Slice, usize)>,
        outputs: NormOutputs<'_>,
    ) -> Result<Self, GpuError> {
        Self::halting(gpu, tokens, d, eps, hidden, weight, delta, rows, outputs, None)
    }

    /// The same, but it writes nothing while `halt` is not 0.
    ///
    /// # Errors
    /// As [`Self::new`].
    ///
    /// # Panics
    /// As there, or if `halt` is past the end of its buffer.
    pub fn halting(
        gpu: &Gpu,
        tokens: usize,
        d: usize,
        eps: f32,
        hidden: &Slice,
        weight: &Slice,
        delta: Delta<'_>,
        rows: Option<(&Slice, usize)>,
        outputs: NormOutputs<'_>,
        halt: Option<Halt<'_>>,
    ) -> Result<Self, GpuError> {
        let NormOutputs { plane, coded } = outputs;
        let n = rows.map_or(tokens, |(_, n)| n);
        demand(hidden, tokens * d, "hidden states");
        demand(weight, d, "weights of a norm");
        delta.check(tokens, d);
        rows.iter().for_each(|(rows, n)| demand(rows, *n, "chosen rows"));
        plane.iter().for_each(|plane| demand(plane, n * d, "normed states"));
        coded.iter().for_each(|coded| demand_coded(coded, n, d));
        assert!(plane.is_some() || !coded.is_empty(), "a norm without outputs");

        halt.iter().for_each(|halt| demand(halt.words, halt.at + 1, "a halt"));
        // Routing weights have it behind them.
        let beside =
            |halt: &Halt<'_>| matches!(delta, Delta::Experts { weights, .. } if weights.is(halt.words));
        let bound = 2
            + delta.bindings()
            + usize::from(rows.is_some())
            + usize::from(plane.is_some())
            + usize::from(halt.is_some_and(|halt| !beside(&halt)));
        let fused = coded.first().filter(|_| bound + 2 <= gpu.most_bindings());
        let rest = &coded[usize::from(fused.is_some())..];
        assert!(plane.is_some() || rest.is_empty(), "several int8 planes need the f32 plane");
        // Sums have the order of the first int8 plane's groups, whoever makes it: so have a lone token's kernels.
        let cut = NormCut::new(gpu, d, coded.first().map(|coded| coded.group), None);
        let mut draft = cut
            .draft(Draft::default())
            .flag("NORMED", plane.is_some())
            .flag("CODED", fused.is_some())
            .flag("CHANGED", !matches!(delta, Delta::None))
            .text(NORM)
            .plane("hidden", d, Access::Write, hidden)
            .plane("weight", d, Access::Read, weight);
        draft = add_delta(draft, delta, d);
        draft = match halt {
            None => draft.text("fn halted() -> bool { return false; }\n"),
            Some(halt) => {
                let (draft, words) = match beside(&halt) {
                    true => (draft, "weights"),
                    false => (draft.buffer("halts", "f32", Access::Read, halt.words), "halts"),
                };
                draft
                    .text("fn halted() -> bool { return ")
                    .text(words)
                    .text("[HALT] != 0.0; }\n")
                    .constant("HALT", halt.at)
            }
        };
        draft = match rows {
            Some((rows, _)) => draft
                .buffer("rows", "u32", Access::Read, rows)
                .text("fn token_of(row: u32) -> u32 { return rows[row]; }\n"),
            None => draft.text("fn token_of(row: u32) -> u32 { return row; }\n"),
        };
        draft = match plane {
            Some(plane) => draft.plane("normed", d, Access::Write, plane),
            None => draft.text("fn store_normed(row: u32, chunk: u32, v: vec4<f32>) {}\n"),
        };
        draft = match fused {
            Some(coded) => draft.coded(coded),
            None => draft.text("fn store_codes(cell: u32, quarter: u32, coded: Codes) {}\n"),
        };
        let op = draft.op(gpu, "norm")?;
        // These read a plane that a halt left as it was.
        let rest = match plane {
            Some(plane) => rest.iter().map(|coded| Quantise::new(gpu, plane, coded)).collect(),
            None => Ok(Vec::new()),
        }?;
        Ok(Self { op, rest, rows: n, eps, residual: 1.0 })
    }

    /// The same, but what is added is multiplied: `hidden[t] = fma(delta[t], residual, hidden[t])`.
    #[must_use]
    pub const fn scaled(mut self, residual: f32) -> Self {
        self.residual = residual;
        self
    }

    /// Records it for the first `rows` rows.
    ///
    /// # Panics
    /// If there are more than it was made for.
    pub fn record(&self, step: &mut Step, rows: usize) {
        assert!(rows <= self.rows, "{rows} rows of {}", self.rows);
        step.run(&self.op, &[self.eps.to_bits(), 0, self.residual.to_bits()], [rows as u32, 1, 1]);
        self.rest.iter().for_each(|quantise| quantise.record(step, rows));
    }
}
