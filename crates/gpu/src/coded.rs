//! Products of coded weights, in the vault's own tiles.
//!
//! [`CodedMatmul`] multiplies by int8 activations and has the CPU's bits; [`ExactMatmul`] by f32.

use smoe_format::tile::ROWS;
use smoe_format::{Encoding, Uniform, Zero};

use crate::quantise::{GRID, QUANTISE, Repeated, assert_plane, levels, source, text, tile_constants};
use crate::{Access, CodedPlane, Gpu, GpuError, Op, Shader, Slice, Step};

/// Bytes of what a workgroup shares that are not for slots: arrays that are empty have an element.
const SPARE: u32 = 64;
/// Most chains of a lane: more would not stay in registers.
const CHAINS: u32 = 16;
/// Most lines of a tile that a lane holds its share of: a register file's worth.
const HELD: u32 = 34;
/// Tokens that a pass takes: the widths that are compiled.
pub(crate) const PASSES: [u32; 4] = [1, 2, 4, 8];
/// Blocks of rows that are many for a device, that are more than it has multiprocessors, and groups of a long row.
const MANY_BLOCKS: usize = 512;
const SOME_BLOCKS: usize = 160;
const LONG: usize = 48;
/// Workgroups below which runs of blocks are not made longer.
const WORKGROUPS: usize = 256;

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

/// How a coded kernel is cut, for each of its passes: what is timed to choose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuning {
    /// Threads of a workgroup: 64, 128, 256 or 512.
    pub threads: u32,
    /// Tiles that a lane holds at once: 1 or 2.
    pub items: u32,
}

impl Tuning {
    /// For `blocks` blocks of rows in a dispatch, each alone in its workgroup if it likes, of so many groups, and passes
    /// of so many tokens: what was fastest or nearly so for nine shapes (EXP-GPU-05). Where blocks fill a device, small
    /// workgroups do; where there are few, each is to be done at once.
    pub(crate) const fn of(blocks: usize, groups: usize, pass: u32) -> Self {
        let threads = match pass {
            1 if blocks >= MANY_BLOCKS => 64,
            1 | 2 if blocks >= SOME_BLOCKS => 128,
            1 | 2 if groups >= LONG => 256,
            1 | 2 if groups >= LONG / 2 => 128,
            4 => 128,
            8 if groups >= LONG => 128,
            _ => 64,
        };
        Self { threads, items: 1 }
    }

    /// For workgroups of so many tiles, of gate and up together (EXP-GPU-05).
    pub(crate) const fn of_pair(tiles: usize, pass: u32) -> Self {
        let threads = if tiles <= 128 && pass <= 4 { 256 } else { 128 };
        Self { threads, items: 1 }
    }
}

/// A coded kernel's constants.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cut {
    pub(crate) pass: u32,
    pub(crate) threads: u32,
    items: u32,
    pub(crate) slots: u32,
    own: Option<Own>,
}

/// An operand of one f32 row that workgroups quantise themselves.
#[derive(Clone, Copy, Debug)]
struct Own {
    cols: u32,
    groups: u32,
    group: u32,
    team: u32,
}

/// The share of what a workgroup may share that such a row may take.
const OWN_SHARE: u32 = 4;

/// Whether workgroups can quantise a row of so many columns themselves.
pub(crate) fn can_own(gpu: &Gpu, uniform: Uniform, cols: usize) -> bool {
    let bytes = uniform.groups(cols) * (uniform.group() + 8);
    cols.is_multiple_of(4) && bytes <= (gpu.shared_bytes() / OWN_SHARE) as usize
}

impl Cut {
    pub(crate) fn new(gpu: &Gpu, uniform: Uniform, pass: u32, tuning: Tuning) -> Self {
        let Tuning { threads, items } = tuning;
        assert!(matches!(threads, 64 | 128 | 256 | 512) && matches!(items, 1 | 2), "{tuning:?}");
        let threads = threads.min(gpu.most_threads() as u32);
        Self::over(gpu, uniform, pass, threads, items, None)
    }

    /// The same for one token whose f32 row workgroups quantise themselves: see [`can_own`].
    pub(crate) fn owning(gpu: &Gpu, uniform: Uniform, cols: usize, tuning: Tuning) -> Self {
        let cut = Self::new(gpu, uniform, 1, tuning);
        let (groups, group) = (uniform.groups(cols) as u32, uniform.group() as u32);
        // As many lanes a group as there are in one go: what a group takes besides its values each of them does.
        let team = (cut.threads / groups).clamp(4, gpu.team(uniform.group()) as u32);
        let own = Own { cols: cols as u32, groups, group, team: 1 << team.ilog2() };
        Self::over(gpu, uniform, 1, cut.threads, cut.items, Some(own))
    }

    fn over(gpu: &Gpu, uniform: Uniform, pass: u32, threads: u32, items: u32, own: Option<Own>) -> Self {
        let affine = u32::from(uniform.zero() == Zero::Affine);
        let room = gpu.shared_bytes() - SPARE - own.map_or(0, |own| own.groups * (own.group + 8));
        // Integers and a cell a token; scales, minima.
        let slot = pass * (4 * ROWS as u32 + 8) + (1 + affine) * 2 * ROWS as u32;
        Self { pass, threads, items, slots: (threads / 4 * items).min(room / slot), own }
    }

    /// Most blocks of rows that a workgroup can take.
    pub(crate) const fn most_blocks(self) -> u32 {
        CHAINS * self.threads / (self.pass * ROWS as u32 / 2)
    }

    /// Blocks of rows for a workgroup: as few as keep most slots of most rounds in use, as long as there are
    /// workgroups enough, with `times` such products in a dispatch.
    fn blocks(self, groups: usize, all: usize, times: usize) -> u32 {
        let slots = self.slots as usize;
        let use_of = |blocks: usize| {
            let items = blocks * groups;
            items as f64 / items.next_multiple_of(slots) as f64
        };
        let most = (all * times / WORKGROUPS).clamp(1, self.most_blocks() as usize);
        let mut best = 1;
        for blocks in 2..=most {
            if use_of(best) >= 0.9 {
                break;
            }
            if use_of(blocks) > use_of(best) {
                best = blocks;
            }
        }
        best as u32
    }

    /// Chains of a lane, in workgroups of so many blocks.
    fn chains(self, blocks: u32) -> u32 {
        let chains = (blocks * self.pass * ROWS as u32 / 2).div_ceil(self.threads);
        assert!(chains <= CHAINS, "{blocks} blocks a workgroup");
        chains
    }

    /// coded.wgsl, for workgroups of so many blocks of so many groups: its constants and its text.
    pub(crate) fn core(
        self,
        encoding: Encoding,
        blocks: u32,
        groups: usize,
        repeated: Repeated,
    ) -> (Vec<(&'static str, u32)>, String) {
        let Some(uniform) = encoding.tiles() else { panic!("{encoding} weights have no codes") };
        let chains = self.chains(blocks);
        // Longer tiles are read where they are needed.
        let held = Some((uniform.tile_bytes() / 64) as u32).filter(|lines| *lines <= HELD).unwrap_or(0);
        let mut constants = tile_constants(uniform).to_vec();
        constants.extend([
            ("TABLE", u32::from(encoding != Encoding::Uniform(uniform))),
            ("TOKENS", self.pass),
            ("THREADS", self.threads),
            ("ITEMS", self.items),
            ("SLOTS", self.slots),
            ("CHAINS", chains),
            ("HELD", u32::from(held > 0)),
            ("ONE_ROUND", u32::from(blocks as usize * groups <= self.slots as usize)),
        ]);
        let operand = match self.own {
            None => include_str!("wgsl/coded_plane.wgsl").to_owned(),
            Some(own) => {
                let Own { cols, groups, group, team } = own;
                constants.extend([("COLS", cols), ("OWN", groups), ("GROUP", group), ("TEAM", team)]);
                [QUANTISE, include_str!("wgsl/coded_own.wgsl")].concat()
            }
        };
        let (job, lines) = ("job: ptr<function, Job>", "lines: ptr<function, Lines>");
        let (integers, sums) = ("sums: ptr<function, Integers>", "sums: ptr<function, Sums>");
        let places = "base: u32, at: u32, tile: u32";
        let text = [
            include_str!("wgsl/coded.wgsl").to_owned(),
            operand,
            levels(encoding),
            repeated.calls(&format!("load_lines({lines}, base: u32, at: u32)"), held, |i| {
                format!("load_line(lines, base, at, {i});")
            }),
            repeated.calls(
                &format!("take_spans({job}, {lines}, {integers}, {places})"),
                uniform.group() as u32 / 16,
                |v| format!("take_span(job, lines, sums, base, at, tile, {v});"),
            ),
            repeated.tokens(
                &format!("add_tokens({job}, {integers}, span: ptr<function, Span>, tile: u32, v: u32)"),
                self.pass,
                |t| format!("add_span(job, sums, span, {t}, tile, v);"),
            ),
            repeated.tokens(
                &format!("hand_tokens({job}, {integers}, slot: u32, quarter: u32, tile: u32)"),
                self.pass,
                |t| format!("hand(job, sums, slot, quarter, tile, {t});"),
            ),
            repeated.calls(&format!("run_chains({job}, {sums}, lane: u32, first: u32)"), chains, |k| {
                format!("run_chain(job, sums, lane, first, {k});")
            }),
            repeated.calls(&format!("finish_chains({job}, {sums}, lane: u32)"), chains, |k| {
                format!("finish_chain(job, sums, lane, {k});")
            }),
        ];
        (constants, text.concat())
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
        let blocks = cut.blocks(groups, rows.div_ceil(ROWS), times);
        let (mut constants, core) = cut.core(encoding, blocks, groups, Repeated::on(gpu)?);
        constants.extend_from_slice(extra);
        let mut texts = vec![&core[..]];
        texts.extend_from_slice(parts);
        let mut all = vec![Access::Read; if cut.own.is_some() { 2 } else { 3 }];
        all.extend_from_slice(accesses);
        let source = source(gpu, &constants, &texts)?.into();
        let kernel = gpu.kernel(&Shader { name, source, bindings: &all })?;
        Ok(Self { op: gpu.bind(&kernel, buffers)?, blocks })
    }
}

/// `out[t, offset + r] = sum over k of W[r, k] * x[t, k]` for coded weights and int8 activations.
///
/// The bits are those of the CPU's `Kernels::coded_matmul`, whatever the number of tokens: exact integers within a group, groups in ascending order with one fused multiply-add each. (Where a
/// scale of weights times one of activations is subnormal, a device may take it for zero.)
#[derive(Clone, Debug)]
pub struct CodedMatmul {
    passes: Vec<CodedOp>,
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
        Self::tuned(gpu, weights, x, out, None)
    }

    /// The same, cut as said: for measurements.
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
        let uniform = weights.tiles();
        assert!(x.suits(uniform, weights.cols), "x is {} in {}", x.cols, x.group);
        out.assert_room(x.tokens, weights.rows);
        assert!(x.tokens.div_ceil(8) <= GRID && weights.rows.div_ceil(ROWS) <= GRID, "the grid");
        let groups = uniform.groups(weights.cols);
        let passes = passes(x.tokens)
            .map(|pass| {
                let blocks = weights.rows.div_ceil(ROWS);
                let cut = Cut::new(gpu, uniform, pass, tuning.unwrap_or(Tuning::of(blocks, groups, pass)));
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
                    &[],
                    &parts,
                    &[Access::Write],
                    &buffers,
                )
            })
            .collect::<Result<_, _>>()?;
        let (stride, offset) = (out.stride, out.offset);
        Ok(Self { passes, rows: weights.rows, groups, tokens: x.tokens, stride, offset })
    }

    /// Records it for the first `tokens` tokens.
    ///
    /// # Panics
    /// If there is no room for them.
    pub fn record(&self, step: &mut Step, tokens: usize) {
        assert!(tokens <= self.tokens, "{tokens} tokens of {}", self.tokens);
        let pass = pass_of(tokens);
        let CodedOp { op, blocks } = &self.passes[pass];
        let words = [self.rows, self.groups, *blocks as usize, tokens, self.stride, self.offset];
        let runs = self.rows.div_ceil(ROWS).div_ceil(*blocks as usize) as u32;
        let grid = [runs, (tokens as u32).div_ceil(PASSES[pass]), 1];
        step.run(op, &words.map(|word| word as u32), grid);
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
        let Encoding::Uniform(uniform) = weights.encoding else { panic!("{} weights", weights.encoding) };
        assert_plane(x, tokens, weights.cols);
        out.assert_room(tokens, weights.rows);
        assert!(weights.rows.div_ceil(ROWS) <= GRID, "the grid");
        let mut constants = tile_constants(uniform).to_vec();
        constants.extend([("GROUP", uniform.group() as u32), ("TEAM", 4)]);
        let kernel = gpu.kernel(&Shader {
            name: "exact product",
            source: text(&constants, &[QUANTISE, include_str!("wgsl/coded_exact.wgsl")]).into(),
            bindings: &[Access::Read, Access::Read, Access::Write],
        })?;
        let op = gpu.bind(&kernel, &[&weights.slice, x, &out.plane])?;
        let groups = uniform.groups(weights.cols);
        let Columns { stride, offset, .. } = *out;
        Ok(Self { op, rows: weights.rows, cols: weights.cols, groups, tokens, stride, offset })
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
