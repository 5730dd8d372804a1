//! Products of float weights.

use smoe_format::Encoding;

use crate::beside::Launch;
use crate::coded::{PASSES, pass_of, passes};
use crate::memories::Memories;
use crate::quantise::{GRID, Repeated, assert_plane, text};
use crate::{Access, Columns, Gpu, GpuError, Op, Shader, Slice, Step, Weights};

/// Threads of a workgroup.
pub(crate) const THREADS: u32 = 256;
/// Rows below which whole workgroups share one: there are too few to fill a device otherwise.
const FEW_ROWS: usize = 1024;
/// Experts up to which each has a workgroup of the router's, and is ranked among all: an H200, of 132 multiprocessors, took twice as long for
/// 256 as for 128 (EXP-GPU-22).
pub(crate) const SOME_EXPERTS: usize = 160;

/// Where a float product's operand lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operand {
    /// In an f32 plane, the second binding.
    Plane,
    /// In shared memory: one row, which the workgroup makes while its first weights are on their way.
    Own,
}

/// How a float product is cut: lanes that share rows, and rows that they share.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FloatCut {
    /// Threads of a workgroup.
    threads: u32,
    lanes: u32,
    rows: u32,
}

impl FloatCut {
    /// For `rows` rows in all of a dispatch's products. It decides the order of sums, so tokens do not matter.
    pub(crate) const fn new(rows: usize) -> Self {
        let (lanes, rows) = if rows < FEW_ROWS { (256, 1) } else { (32, 4) };
        Self { threads: THREADS, lanes, rows }
    }

    /// The same in workgroups of so many threads, a multiple of 256, with the same bits.
    const fn in_workgroups_of(self, threads: u32) -> Self {
        Self { threads, ..self }
    }

    /// Workgroups for so many rows.
    pub(crate) fn grid(self, rows: usize) -> u32 {
        (rows as u32).div_ceil(self.threads / self.lanes * self.rows)
    }

    /// One of a float product's kernels: `parts` and `bindings` follow the core and its two bindings.
    pub(crate) fn op(
        self,
        gpu: &Gpu,
        name: &str,
        matrix: (Encoding, usize),
        pass: u32,
        extra: &[(&str, u32)],
        parts: &[&str],
        accesses: &[Access],
        buffers: &[&Slice],
        memories: Memories,
    ) -> Result<Op, GpuError> {
        let mut constants = vec![("TOKENS", pass), ("THREADS", self.threads)];
        constants.extend(self.constants(matrix.0, Operand::Plane));
        constants.extend_from_slice(extra);
        let (binding, words) = memories.text();
        constants.extend(binding);
        let core = self.core(gpu, matrix.1, pass, Operand::Plane)?;
        let mut texts = vec![&core[..], words];
        texts.extend_from_slice(parts);
        let mut all = vec![Access::Read; 2];
        all.extend_from_slice(accesses);
        let source = text(&constants, &texts).into();
        let kernel = gpu.kernel(&Shader { name, source, bindings: &all })?;
        gpu.bind(&kernel, buffers)
    }

    /// What float.wgsl needs to know besides tokens and threads.
    pub(crate) fn constants(self, encoding: Encoding, operand: Operand) -> [(&'static str, u32); 4] {
        let kind = match encoding {
            Encoding::F32 => 0,
            Encoding::F16 => 1,
            Encoding::Bf16 => 2,
            Encoding::Uniform(_) | Encoding::Table(_) => panic!("{encoding} weights are not floats"),
        };
        let first = u32::from(operand == Operand::Own);
        [("KIND", kind), ("LANES", self.lanes), ("ROWS", self.rows), ("FIRST", first)]
    }

    /// For the router's product of a lone token, with the same bits: of many experts a workgroup has four, so that no device of a
    /// hundred multiprocessors has to begin any when others end.
    pub(crate) const fn of_router(n_experts: usize) -> Self {
        let cut = Self::new(n_experts);
        if n_experts > SOME_EXPERTS && cut.is_one_team() { Self { rows: 4, ..cut } } else { cut }
    }

    /// Whether all of a workgroup share its rows.
    pub(crate) const fn is_one_team(self) -> bool {
        self.lanes == self.threads
    }

    /// float.wgsl, for rows of `cols` columns and `pass` tokens: its text, but for how it reads ([`Memories`]).
    pub(crate) fn core(
        self,
        gpu: &Gpu,
        cols: usize,
        pass: u32,
        operand: Operand,
    ) -> Result<String, GpuError> {
        let (rows, x) = if cols.is_multiple_of(8) {
            (include_str!("wgsl/float_wide.wgsl"), include_str!("wgsl/float_wide_x.wgsl"))
        } else {
            (include_str!("wgsl/float_odd.wgsl"), include_str!("wgsl/float_odd_x.wgsl"))
        };
        let x = if operand == Operand::Own { include_str!("wgsl/float_own_x.wgsl") } else { x };
        let sums = "sums: ptr<function, Sums>";
        let add =
            format!("add_tokens(job: ptr<function, Job>, {sums}, w: ptr<function, Weights>, eight: u32)");
        let repeated = Repeated::on(gpu)?;
        Ok([
            include_str!("wgsl/float.wgsl").to_owned(),
            rows.to_owned(),
            x.to_owned(),
            repeated.tokens(&add, pass, |t| format!("add_token(job, sums, w, eight, {t});")),
            repeated.calls(&format!("join_tokens({sums}, lane: u32)"), pass, |t| {
                format!("join_token(sums, lane, {t});")
            }),
        ]
        .concat())
    }
}

/// `out[t, offset + r] = sum over k of W[r, k] * x[t, k]` for f32, f16 or bf16 weights and f32 activations.
///
/// Weights are widened to f32. The order of a sum depends on the matrix's shape only, not on the number of
/// tokens; it is not the CPU's, so results differ from `Kernels::float_matmul` in the last bits.
#[derive(Clone, Debug)]
pub struct FloatMatmul {
    passes: Vec<Op>,
    cut: FloatCut,
    rows: usize,
    cols: usize,
    tokens: usize,
    stride: usize,
    offset: usize,
}

impl FloatMatmul {
    /// Multiplies `weights` by up to `tokens` tokens of `x`, `[tokens, cols]`.
    ///
    /// # Errors
    /// If the device refuses a kernel.
    ///
    /// # Panics
    /// If the weights are codes, `x` is too short, or the output has no room.
    pub fn new(
        gpu: &Gpu,
        weights: &Weights,
        x: &Slice,
        tokens: usize,
        out: &Columns,
    ) -> Result<Self, GpuError> {
        Self::cut(gpu, weights, x, tokens, out, FloatCut::new(weights.rows()))
    }

    /// The same for one token, in workgroups of so many threads, a multiple of 256.
    pub(crate) fn of_one(
        gpu: &Gpu,
        weights: &Weights,
        x: &Slice,
        out: &Columns,
        threads: u32,
    ) -> Result<Self, GpuError> {
        Self::cut(gpu, weights, x, 1, out, FloatCut::new(weights.rows()).in_workgroups_of(threads))
    }

    fn cut(
        gpu: &Gpu,
        weights: &Weights,
        x: &Slice,
        tokens: usize,
        out: &Columns,
        cut: FloatCut,
    ) -> Result<Self, GpuError> {
        let (rows, cols) = (weights.rows(), weights.cols());
        assert_plane(x, tokens, cols);
        out.assert_room(tokens, rows);
        assert!(cut.grid(rows) as usize <= GRID, "the grid");
        let passes = passes(tokens)
            .map(|pass| {
                let parts = [include_str!("wgsl/float_matmul.wgsl")];
                let buffers = [weights.slice(), x, &out.plane];
                let matrix = (weights.encoding(), cols);
                let accesses = [Access::Write];
                cut.op(gpu, "float product", matrix, pass, &[], &parts, &accesses, &buffers, Memories::One)
            })
            .collect::<Result<_, _>>()?;
        Ok(Self { passes, cut, rows, cols, tokens, stride: out.stride, offset: out.offset })
    }

    /// Records it for the first `tokens` tokens.
    ///
    /// # Panics
    /// If there is no room for them.
    pub fn record(&self, step: &mut Step, tokens: usize) {
        assert!(tokens <= self.tokens, "{tokens} tokens of {}", self.tokens);
        let pass = pass_of(tokens);
        let grid = [self.cut.grid(self.rows), (tokens as u32).div_ceil(PASSES[pass]), 1];
        step.run(&self.passes[pass], &self.words(tokens), grid);
    }

    fn words(&self, tokens: usize) -> [u32; 5] {
        [self.rows, self.cols, tokens, self.stride, self.offset].map(|word| word as u32)
    }

    /// Of one token.
    pub(crate) fn launch(&self) -> Launch<'_> {
        Launch {
            op: &self.passes[0],
            words: self.words(1).to_vec(),
            grid: [self.cut.grid(self.rows), 1],
            // Fours of lanes.
            shared: self.cut.threads * self.cut.rows,
        }
    }
}
