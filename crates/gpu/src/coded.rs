//! Products of coded weights, in the vault's own tiles.
//!
//! [`CodedMatmul`] multiplies by int8 activations and has the CPU's bits; [`ExactMatmul`] by f32.

use smoe_format::tile::ROWS;
use smoe_format::{Encoding, Uniform};

use crate::beside::Launch;
use crate::cut::{Cut, OWN_ROW, Tuning, can_own};
use crate::memories::Memories;
use crate::quantise::{GRID, QUANTISE, Repeated, assert_plane, source, text, tile_constants};
use crate::tiling::{Tiled, Tiling};
use crate::{Access, CodedPlane, Gpu, GpuError, Op, Shader, Slice, Step};

/// Tokens that a pass takes: the widths that are compiled.
pub(crate) const PASSES: [u32; 4] = [1, 2, 4, 8];
/// Tokens from which on a product shares tiles among many: more than a pass takes (EXP-GPU-12).
pub(crate) const MANY: usize = 9;
/// Workgroups of a product of many tokens below which it is cut finer: more than half of a large card's multiprocessors
/// (EXP-GPU-12).
const WORKGROUPS: u32 = 80;

/// A weight matrix on the device: `rows x cols`, its bytes as in the vault.
#[derive(Clone, Debug)]
pub struct Weights {
    slice: Slice,
    rows: usize,
    cols: usize,
    encoding: Encoding,
}

impl Weights {
    /// The matrix that `slice` begins with.
    ///
    /// # Panics
    /// If it is empty, or the slice too short.
    #[must_use]
    pub fn new(slice: Slice, rows: usize, cols: usize, encoding: Encoding) -> Self {
        let bytes = encoding.tensor_bytes(rows, cols).map(|bytes| bytes as u64);
        assert!(
            rows > 0 && cols > 0 && bytes.is_some_and(|bytes| bytes <= slice.len()),
            "{} bytes for {rows} x {cols} {encoding}",
            slice.len()
        );
        Self { slice, rows, cols, encoding }
    }

    /// Outputs.
    #[must_use]
    pub const fn rows(&self) -> usize {
        self.rows
    }

    /// Inputs.
    #[must_use]
    pub const fn cols(&self) -> usize {
        self.cols
    }

    /// What the bytes mean.
    #[must_use]
    pub const fn encoding(&self) -> Encoding {
        self.encoding
    }

    pub(crate) const fn slice(&self) -> &Slice {
        &self.slice
    }

    fn tiles(&self) -> Uniform {
        let Self { rows, cols, encoding, .. } = self;
        encoding.tiles().unwrap_or_else(|| panic!("{rows} x {cols} {encoding} weights have no codes"))
    }
}

/// Where a product goes: the columns from `offset` on of a `[tokens, stride]` plane of f32.
#[derive(Clone, Debug)]
pub struct Columns {
    /// The plane.
    pub plane: Slice,
    /// Columns of the plane.
    pub stride: usize,
    /// The first one.
    pub offset: usize,
}

impl Columns {
    /// A whole plane of `cols` columns.
    #[must_use]
    pub const fn whole(plane: Slice, cols: usize) -> Self {
        Self { plane, stride: cols, offset: 0 }
    }

    /// Asserts room for `rows` of each of so many tokens.
    pub(crate) fn assert_room(&self, tokens: usize, rows: usize) {
        assert!(self.offset + rows <= self.stride, "{rows} at {} of {}", self.offset, self.stride);
        let last = tokens.saturating_sub(1) * self.stride + self.offset + rows;
        assert!(self.plane.len() >= last as u64 * 4, "{} bytes for {last} floats", self.plane.len());
        assert!(last <= 1 << 31, "{last} floats in a plane");
    }
}

/// The passes that calls of up to `tokens` tokens need.
pub(crate) fn passes(tokens: usize) -> impl Iterator<Item = u32> {
    let widest = pass_of(tokens);
    PASSES.into_iter().take(widest + 1)
}

/// Which of [`PASSES`] a call of `tokens` tokens takes.
pub(crate) fn pass_of(tokens: usize) -> usize {
    match tokens {
        0 | 1 => 0,
        2 => 1,
        3 | 4 => 2,
        _ => 3,
    }
}

/// A kernel with the blocks that its workgroups take.
#[derive(Clone, Debug)]
pub(crate) struct CodedOp {
    pub(crate) op: Op,
    pub(crate) blocks: u32,
    /// Bytes that a workgroup shares.
    pub(crate) shared: u32,
}

impl CodedOp {
    /// One of a coded product's kernels: `parts` and `accesses` follow the core and its bindings: the weights, and the
    /// operand's one or two.
    pub(crate) fn new(
        gpu: &Gpu,
        name: &str,
        encoding: Encoding,
        cut: Cut,
        shape: (usize, usize),
        times: usize,
        extra: &[(&'static str, u32)],
        parts: &[&str],
        accesses: &[Access],
        buffers: &[&Slice],
    ) -> Result<Self, GpuError> {
        let (rows, cols) = shape;
        let groups = encoding.tiles().map_or(0, |tiles| tiles.groups(cols));
        let blocks = cut.blocks(encoding, groups, rows.div_ceil(ROWS), times);
        let (mut constants, core) = cut.core(encoding, blocks, groups, Repeated::on(gpu)?);
        constants.extend_from_slice(extra);
        let mut texts = vec![&core[..]];
        texts.extend_from_slice(parts);
        let mut all = vec![Access::Read; 1 + cut.operand_bindings()];
        all.extend_from_slice(accesses);
        let source = source(gpu, &constants, &texts)?.into();
        let kernel = gpu.kernel(&Shader { name, source, bindings: &all })?;
        Ok(Self { op: gpu.bind(&kernel, buffers)?, blocks, shared: cut.shared(encoding, groups) })
    }
}

/// Kernels of many tokens.
#[derive(Clone, Debug)]
struct Many {
    /// With their cuts, the largest first.
    ops: Vec<(Op, Tiling)>,
    /// Tokens from which on they are taken.
    from: usize,
}

impl Many {
    /// The one for so many rows and tokens, with its grid: the largest cut that they fill, with workgroups enough for a device.
    fn of(&self, rows: usize, tokens: usize) -> (&Op, [u32; 3]) {
        let grid = |tiling: &Tiling| {
            [(rows as u32).div_ceil(tiling.rows), (tokens as u32).div_ceil(tiling.tokens), 1]
        };
        let is_enough = |(_, tiling): &&(Op, Tiling)| {
            let [runs, times, _] = grid(tiling);
            tiling.is_filled(tokens) && runs * times >= WORKGROUPS
        };
        let (op, tiling) =
            self.ops.iter().find(is_enough).or(self.ops.last()).expect("there is one at least");
        (op, grid(tiling))
    }
}

/// `out[t, offset + r] = sum over k of W[r, k] * x[t, k]` for coded weights and int8 activations.
///
/// The bits are those of the CPU's `Kernels::coded_matmul`, whatever the number of tokens: exact integers within a group, groups in ascending order with one fused multiply-add each. (Where a
/// scale of weights times one of activations is subnormal, a device may take it for zero.)
///
/// A few tokens take each tile as it lies, eight of them at once (coded.wgsl); many share tiles that are unpacked once
/// (coded_tiled.wgsl).
#[derive(Clone, Debug)]
pub struct CodedMatmul {
    passes: Vec<CodedOp>,
    many: Option<Many>,
    rows: usize,
    groups: usize,
    tokens: usize,
    stride: usize,
    offset: usize,
}

impl CodedMatmul {
    /// Multiplies `weights` by up to `x.tokens` tokens.
    ///
    /// # Errors
    /// If the device refuses a kernel.
    ///
    /// # Panics
    /// If the weights have no codes, `x` has other columns or groups, or the output has no room.
    pub fn new(gpu: &Gpu, weights: &Weights, x: &CodedPlane, out: &Columns) -> Result<Self, GpuError> {
        Self::cut(gpu, weights, x, out, None, MANY, &Tiling::DENSE)
    }

    /// The same, passes of a few tokens cut as said: for measurements.
    ///
    /// # Errors
    /// As [`Self::new`].
    ///
    /// # Panics
    /// As there, and if `tuning` is not one of those that its fields name.
    pub fn tuned(
        gpu: &Gpu,
        weights: &Weights,
        x: &CodedPlane,
        out: &Columns,
        tuning: Option<Tuning>,
    ) -> Result<Self, GpuError> {
        Self::cut(gpu, weights, x, out, tuning, MANY, &Tiling::DENSE)
    }

    /// The same, cut as said from so many tokens on, if the device can: for measurements.
    ///
    /// # Errors
    /// As [`Self::new`].
    ///
    /// # Panics
    /// As there, and if `tiling` is not one of those that its fields name.
    pub fn tiled(
        gpu: &Gpu,
        weights: &Weights,
        x: &CodedPlane,
        out: &Columns,
        from: usize,
        tiling: Tiling,
    ) -> Result<Self, GpuError> {
        Self::cut(gpu, weights, x, out, None, from, &[tiling])
    }

    fn cut(
        gpu: &Gpu,
        weights: &Weights,
        x: &CodedPlane,
        out: &Columns,
        tuning: Option<Tuning>,
        from: usize,
        tilings: &[Tiling],
    ) -> Result<Self, GpuError> {
        let uniform = weights.tiles();
        assert!(x.suits(uniform, weights.cols), "x is {} in {}", x.cols, x.group);
        out.assert_room(x.tokens, weights.rows);
        assert!(x.tokens.div_ceil(8) <= GRID && weights.rows.div_ceil(ROWS) <= GRID, "the grid");
        let groups = uniform.groups(weights.cols);
        let many = if x.tokens < from { None } else { Self::many(gpu, weights, x, out, from, tilings)? };
        let few = if many.is_some() { from - 1 } else { x.tokens };
        let passes = passes(few)
            .map(|pass| {
                let blocks = weights.rows.div_ceil(ROWS);
                let cut = Cut::new(
                    gpu,
                    uniform,
                    pass,
                    tuning.unwrap_or_else(|| Tuning::of(gpu, weights.encoding, blocks, groups, pass)),
                );
                let buffers = [&weights.slice, &x.codes, &x.cells, &out.plane];
                let shape = (weights.rows, weights.cols);
                let parts = [include_str!("wgsl/coded_matmul.wgsl")];
                CodedOp::new(
                    gpu,
                    "coded product",
                    weights.encoding,
                    cut,
                    shape,
                    1,
                    &[("OUT", 3)],
                    &parts,
                    &[Access::Write],
                    &buffers,
                )
            })
            .collect::<Result<_, _>>()?;
        let (stride, offset) = (out.stride, out.offset);
        Ok(Self { passes, many, rows: weights.rows, groups, tokens: x.tokens, stride, offset })
    }

    fn many(
        gpu: &Gpu,
        weights: &Weights,
        x: &CodedPlane,
        out: &Columns,
        from: usize,
        tilings: &[Tiling],
    ) -> Result<Option<Many>, GpuError> {
        let repeated = Repeated::on(gpu)?;
        let ops = tilings
            .iter()
            .filter_map(|tiling| Tiled::new(gpu, weights.encoding, *tiling))
            .map(|tiled| {
                let (mut constants, core) = tiled.core(Memories::One, repeated);
                constants.push(("OUT", 3));
                let parts = [&core, include_str!("wgsl/coded_tiled_matmul.wgsl"), &tiled.rows(repeated)];
                let kernel = gpu.kernel(&Shader {
                    name: "coded product, many tokens",
                    source: source(gpu, &constants, &parts)?.into(),
                    bindings: &[Access::Read, Access::Read, Access::Read, Access::Write],
                })?;
                let op = gpu.bind(&kernel, &[&weights.slice, &x.codes, &x.cells, &out.plane])?;
                Ok((op, tiled.tiling))
            })
            .collect::<Result<Vec<_>, GpuError>>()?;
        Ok(if ops.is_empty() { None } else { Some(Many { ops, from }) })
    }

    /// Whether many tokens share tiles: there is room for so many, and the device can.
    #[must_use]
    pub const fn shares_tiles(&self) -> bool {
        self.many.is_some()
    }

    /// Records it for the first `tokens` tokens.
    ///
    /// # Panics
    /// If there is no room for them.
    pub fn record(&self, step: &mut Step, tokens: usize) {
        assert!(tokens <= self.tokens, "{tokens} tokens of {}", self.tokens);
        if let Some(many) = self.many.as_ref().filter(|many| tokens >= many.from) {
            let words = [self.rows, self.groups, tokens, self.stride, self.offset];
            let (op, grid) = many.of(self.rows, tokens);
            return step.run(op, &words.map(|word| word as u32), grid);
        }
        let pass = pass_of(tokens);
        let (op, words, runs) = self.pass(pass, tokens);
        step.run(&op.op, &words, [runs, (tokens as u32).div_ceil(PASSES[pass]), 1]);
    }

    /// A pass, its immediates and its runs of rows.
    fn pass(&self, pass: usize, tokens: usize) -> (&CodedOp, [u32; 6], u32) {
        let op = &self.passes[pass];
        let words = [self.rows, self.groups, op.blocks as usize, tokens, self.stride, self.offset];
        let runs = self.rows.div_ceil(ROWS).div_ceil(op.blocks as usize) as u32;
        (op, words.map(|word| word as u32), runs)
    }

    /// Of one token.
    pub(crate) fn launch(&self) -> Launch<'_> {
        let (op, words, runs) = self.pass(0, 1);
        Launch { op: &op.op, words: words.to_vec(), grid: [runs, 1], shared: op.shared }
    }
}

/// `out[offset + r] = sum over k of W[r, k] * x[k]` for coded weights and one f32 row, which each workgroup quantises for itself: of one token, in
/// one dispatch, with the bits of [`Quantise`](crate::Quantise) and [`CodedMatmul`].
#[derive(Clone, Debug)]
pub struct OwnMatmul {
    op: Op,
    words: [u32; 6],
    workgroups: u32,
}

impl OwnMatmul {
    /// None if a row is more than a workgroup is to share.
    ///
    /// # Errors
    /// If the device refuses the kernel.
    ///
    /// # Panics
    /// If the weights have no codes, `x` is too short, or the output has no room.
    pub fn new(gpu: &Gpu, weights: &Weights, x: &Slice, out: &Columns) -> Result<Option<Self>, GpuError> {
        let (uniform, rows, cols) = (weights.tiles(), weights.rows, weights.cols);
        if !can_own(gpu, uniform, cols) {
            return Ok(None);
        }
        assert_plane(x, 1, cols);
        out.assert_room(1, rows);
        assert!(rows.div_ceil(ROWS) <= GRID, "the grid");
        let groups = uniform.groups(cols);
        let tuning = Tuning::of(gpu, weights.encoding, rows.div_ceil(ROWS), groups, 1);
        let CodedOp { op, blocks, .. } = CodedOp::new(
            gpu,
            "coded product of a row",
            weights.encoding,
            Cut::owning(gpu, uniform, cols, tuning),
            (rows, cols),
            1,
            &[("OUT", 2)],
            &[OWN_ROW, include_str!("wgsl/coded_matmul.wgsl")],
            &[Access::Write],
            &[&weights.slice, x, &out.plane],
        )?;
        let words = [rows, groups, blocks as usize, 1, out.stride, out.offset].map(|word| word as u32);
        Ok(Some(Self { op, words, workgroups: rows.div_ceil(ROWS).div_ceil(blocks as usize) as u32 }))
    }

    /// Records it.
    pub fn record(&self, step: &mut Step) {
        step.run(&self.op, &self.words, [self.workgroups, 1, 1]);
    }
}

/// `out[t, offset + r] = sum over k of W[r, k] * x[t, k]` for uniform codes and f32 activations: each weight is
/// decoded as the format defines it, and multiplied in f32. For exactness, not for speed.
///
/// The sums have an order of their own, the same for any number of tokens: they differ from the CPU's
/// `exact_matmul` in the last bits.
#[derive(Clone, Debug)]
pub struct ExactMatmul {
    op: Op,
    rows: usize,
    cols: usize,
    groups: usize,
    tokens: usize,
    stride: usize,
    offset: usize,
}

impl ExactMatmul {
    /// Multiplies `weights` by up to `tokens` tokens of `x`, `[tokens, cols]`.
    ///
    /// # Errors
    /// If the device refuses the kernel.
    ///
    /// # Panics
    /// If the weights have no uniform codes, `x` is too short, or the output has no room.
    pub fn new(
        gpu: &Gpu,
        weights: &Weights,
        x: &Slice,
        tokens: usize,
        out: &Columns,
    ) -> Result<Self, GpuError> {
        assert_plane(x, tokens, weights.cols);
        out.assert_room(tokens, weights.rows);
        assert!(weights.rows.div_ceil(ROWS) <= GRID, "the grid");
        let op = Self::kernel(gpu, weights, 1, x, &out.plane)?;
        let groups = weights.tiles().groups(weights.cols);
        let Columns { stride, offset, .. } = *out;
        Ok(Self { op, rows: weights.rows, cols: weights.cols, groups, tokens, stride, offset })
    }

    /// The kernel, for a matrix of each of `heads` heads.
    pub(crate) fn kernel(
        gpu: &Gpu,
        weights: &Weights,
        heads: usize,
        x: &Slice,
        out: &Slice,
    ) -> Result<Op, GpuError> {
        let Encoding::Uniform(uniform) = weights.encoding else { panic!("{} weights", weights.encoding) };
        let mut constants = tile_constants(uniform).to_vec();
        constants.extend([("GROUP", uniform.group() as u32), ("TEAM", 4), ("HEADS", heads as u32)]);
        let kernel = gpu.kernel(&Shader {
            name: "exact product",
            source: text(&constants, &[QUANTISE, include_str!("wgsl/coded_exact.wgsl")]).into(),
            bindings: &[Access::Read, Access::Read, Access::Write],
        })?;
        gpu.bind(&kernel, &[&weights.slice, x, out])
    }

    /// Records it for the first `tokens` tokens.
    ///
    /// # Panics
    /// If there is no room for them.
    pub fn record(&self, step: &mut Step, tokens: usize) {
        assert!(tokens <= self.tokens, "{tokens} tokens of {}", self.tokens);
        let words = [self.rows, self.cols, self.groups, self.stride, self.offset];
        let grid = [self.rows.div_ceil(ROWS) as u32, tokens as u32, 1];
        step.run(&self.op, &words.map(|word| word as u32), grid);
    }
}
