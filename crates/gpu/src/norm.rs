//! The residual stream: where it begins ([`Embed`]), and what each part of a layer adds to it and takes of it
//! ([`MixNorm`]).

use std::fmt::Write as _;

use smoe_format::tile::plane_widths;
use smoe_format::{Encoding, Zero};

use crate::quantise::{QUANTISE, source};
use crate::shader::{Access, Op, Shader};
use crate::{CodedPlane, Gpu, GpuError, Quantise, Slice, Step};

pub(crate) const FLOAT: &str = concat!(include_str!("wgsl/exp.wgsl"), include_str!("wgsl/norm_float.wgsl"));
const STORE_CODES: &str = include_str!("wgsl/norm_codes.wgsl");
const NORM: &str = concat!(include_str!("wgsl/norm_row.wgsl"), include_str!("wgsl/norm.wgsl"));
pub(crate) const NORM_ROW: &str = include_str!("wgsl/norm_row.wgsl");
const EMBED: &str = include_str!("wgsl/norm_embed.wgsl");

/// Vectors of four values that a lane keeps in registers at most.
const HELD: usize = 64;

/// Vectors of weights that a lane reads ahead at most: more would take the registers that others need.
const AHEAD: usize = 8;

/// A kernel on its way: its source, and the buffers that it will be bound to.
#[derive(Debug, Default)]
pub(crate) struct Draft<'a> {
    source: String,
    access: Vec<Access>,
    slices: Vec<&'a Slice>,
}

impl<'a> Draft<'a> {
    pub(crate) fn constant(mut self, name: &str, value: usize) -> Self {
        let _ = writeln!(self.source, "const {name}: u32 = {value}u;");
        self
    }

    pub(crate) fn flag(mut self, name: &str, value: bool) -> Self {
        let _ = writeln!(self.source, "const {name}: bool = {value};");
        self
    }

    /// Functions of floats, and int8 codes in groups of `group` that teams of `team` lanes share.
    pub(crate) fn float(self, group: usize, team: usize) -> Self {
        self.constant("GROUP", group).constant("TEAM", team).text(QUANTISE).text(FLOAT)
    }

    pub(crate) fn text(mut self, text: &str) -> Self {
        self.source.push_str(text);
        self
    }

    /// The next binding, an array of `ty`.
    pub(crate) fn buffer(mut self, name: &str, ty: &str, access: Access, slice: &'a Slice) -> Self {
        let mode = if access == Access::Read { "read" } else { "read_write" };
        let at = self.access.len();
        let _ = writeln!(self.source, "@group(0) @binding({at}) var<storage, {mode}> {name}: array<{ty}>;");
        self.access.push(access);
        self.slices.push(slice);
        self
    }

    /// The next binding, which a text declares.
    pub(crate) fn declared(mut self, access: Access, slice: &'a Slice) -> Self {
        self.access.push(access);
        self.slices.push(slice);
        self
    }

    /// The next binding, rows of `cols` floats: `load_NAME(row, chunk)` gives columns `4 * chunk` and the three
    /// after them, 0 past the end of the row, and `store_NAME` takes them. The chunk begins within the row.
    pub(crate) fn plane(self, name: &str, cols: usize, access: Access, slice: &'a Slice) -> Self {
        let wide = cols.is_multiple_of(4);
        let mut draft = self.buffer(name, if wide { "vec4<f32>" } else { "f32" }, access, slice);
        let out = &mut draft.source;
        let writes = access == Access::Write;
        if wide {
            let at = format!("{name}[row * {}u + chunk]", cols / 4);
            let _ = writeln!(out, "fn load_{name}(row: u32, chunk: u32) -> vec4<f32> {{ return {at}; }}");
            if writes {
                let _ = writeln!(out, "fn store_{name}(row: u32, chunk: u32, v: vec4<f32>) {{ {at} = v; }}");
            }
            return draft;
        }
        let place = format!("let at = row * {cols}u + 4u * chunk; let left = {cols}u - 4u * chunk;");
        let lines = |line: &dyn Fn(usize, char) -> String| -> String {
            let rest = [(1, 'y'), (2, 'z'), (3, 'w')];
            rest.iter().map(|&(i, part)| format!("if (left > {i}u) {{ {} }} ", line(i, part))).collect()
        };
        let loads = lines(&|i, part| format!("v.{part} = {name}[at + {i}u];"));
        let _ = writeln!(
            out,
            "fn load_{name}(row: u32, chunk: u32) -> vec4<f32> {{ {place} \
             var v = vec4({name}[at], 0.0, 0.0, 0.0); {loads}return v; }}"
        );
        if writes {
            let stores = lines(&|i, part| format!("{name}[at + {i}u] = v.{part};"));
            let _ = writeln!(
                out,
                "fn store_{name}(row: u32, chunk: u32, v: vec4<f32>) {{ {place} {name}[at] = v.x; {stores}}}"
            );
        }
        draft
    }

    /// Codes and cells of an int8 plane: the next two bindings.
    pub(crate) fn coded(self, plane: &'a CodedPlane) -> Self {
        self.buffer("codes", "u32", Access::Write, &plane.codes)
            .buffer("cells", "vec2<u32>", Access::Write, &plane.cells)
            .text(STORE_CODES)
    }

    /// The kernel, with the CPU's bits wherever its fma is.
    pub(crate) fn op(self, gpu: &Gpu, name: &str) -> Result<Op, GpuError> {
        let source = source(gpu, &[], &[&self.source])?;
        self.bound(gpu, name, source)
    }

    /// The same, but `rest` has the device's own `fma`, fused or not: for sums whose order is nobody else's.
    pub(crate) fn loose_op(self, gpu: &Gpu, name: &str, rest: &str) -> Result<Op, GpuError> {
        let source = source(gpu, &[], &[&self.source])? + rest;
        self.bound(gpu, name, source)
    }

    fn bound(self, gpu: &Gpu, name: &str, source: String) -> Result<Op, GpuError> {
        let shader = Shader { name, source: source.into(), bindings: &self.access };
        gpu.bind(&gpu.kernel(&shader)?, &self.slices)
    }
}

/// Panics if a buffer is shorter than its kernel takes for granted.
pub(crate) fn demand(slice: &Slice, words: usize, what: &str) {
    assert!(slice.len() >= 4 * words as u64, "{what}: {} bytes, {} are needed", slice.len(), 4 * words);
}

/// Panics if an int8 plane does not fit.
pub(crate) fn demand_coded(plane: &CodedPlane, tokens: usize, cols: usize) {
    assert!(
        plane.tokens >= tokens && plane.cols == cols,
        "int8 activations are [{}, {}], not [{tokens}, {cols}]",
        plane.tokens,
        plane.cols
    );
}

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

/// Rows of an embedding: `hidden[t] = table[ids[t]]`, as [`Encoding::decode_row`] decodes them, bit for bit. An id past the end of the table gives NaN.
#[derive(Clone, Debug)]
pub struct Embed {
    op: Op,
    tokens: usize,
    chunks: usize,
    scale: f32,
}

impl Embed {
    /// Of `table`, `rows x cols` in `encoding`, for up to `tokens` `ids` (u32), into `hidden`, `[tokens, cols]`.
    ///
    /// # Errors
    /// If the device refuses.
    ///
    /// # Panics
    /// If a buffer is too short, or the table has 2^32 values or more.
    pub fn new(
        gpu: &Gpu,
        tokens: usize,
        table: &Slice,
        encoding: Encoding,
        rows: usize,
        cols: usize,
        ids: &Slice,
        hidden: &Slice,
    ) -> Result<Self, GpuError> {
        let bytes = encoding.tensor_bytes(rows, cols).filter(|_| (rows * cols) >> 32 == 0);
        let Some(bytes) = bytes else { panic!("an embedding of {rows} x {cols}") };
        demand(table, bytes.div_ceil(4), "an embedding");
        demand(ids, tokens, "ids of tokens");
        demand(hidden, tokens * cols, "hidden states");
        let kind = match encoding {
            Encoding::F32 => 0,
            Encoding::F16 => 1,
            Encoding::Bf16 => 2,
            Encoding::Uniform(_) => 3,
            Encoding::Table(_) => panic!("an embedding of {encoding}"),
        };
        let mut draft = Draft::default().constant("ROWS", rows).constant("COLS", cols).constant("KIND", kind);
        // The same constants for floats, where nothing reads them.
        let uniform = match encoding {
            Encoding::Uniform(u) => Some(u),
            _ => None,
        };
        let [low, high] = uniform.map_or([4, 0], |u| plane_widths(u.bits())).map(usize::from);
        let group = uniform.map_or(64, |u| u.group());
        draft = draft
            .float(group, 4)
            .constant("GROUPS", cols.div_ceil(group))
            .constant("LOW", low)
            .constant("HIGH", high)
            .constant("MOST", uniform.map_or(1, |u| usize::from(u.max_code())))
            .constant("HIGH_AT", group * low)
            .constant("SCALES_AT", group * (low + high))
            .constant("TILE", uniform.map_or(0, |u| u.tile_bytes() / 4))
            .flag("AFFINE", uniform.is_some_and(|u| u.zero() == Zero::Affine));
        let op = draft
            .buffer("table", "u32", Access::Read, table)
            .buffer("ids", "u32", Access::Read, ids)
            .buffer("out", "f32", Access::Write, hidden)
            .text(EMBED)
            .op(gpu, "embed")?;
        Ok(Self { op, tokens, chunks: cols.div_ceil(4), scale: 1.0 })
    }

    /// The same, each value multiplied.
    #[must_use]
    pub const fn scaled(mut self, scale: f32) -> Self {
        self.scale = scale;
        self
    }

    /// Records it for the first `tokens` ids.
    ///
    /// # Panics
    /// If there are more than it was made for.
    pub fn record(&self, step: &mut Step, tokens: usize) {
        assert!(tokens <= self.tokens, "{tokens} tokens of {}", self.tokens);
        let nan = f32::NAN.to_bits();
        step.run(&self.op, &[nan, self.scale.to_bits()], [self.chunks.div_ceil(64) as u32, tokens as u32, 1]);
    }
}
