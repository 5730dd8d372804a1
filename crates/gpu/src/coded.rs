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
const OWN_X: &str = include_str!("wgsl/coded_own_x.wgsl");
/// Lanes of a wide tile.
const WIDE: u32 = 32;
/// Bytes that a workgroup shares for a group of the 32 rows of such: an integer and a factor each.
const GROUP_TERMS: u32 = 8 * ROWS as u32;
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

/// Which lanes share a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lanes {
    /// Four, as many tiles at once as there are such.
    Four,
    /// 32, with so many tiles on their way: of one token, and symmetric codes of 4 or 8 bits in groups of 64.
    Wide(u32),
}

/// How a coded kernel is cut, for each of its passes: what is timed to choose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuning {
    /// Threads of a workgroup: 64, 128, 256 or 512.
    pub threads: u32,
    /// Which of them share a tile; `Four` where that says more than one token can have.
    pub lanes: Lanes,
}

/// Whether 32 lanes can share tiles of such codes.
fn can_widen(encoding: Encoding) -> bool {
    matches!(encoding, Encoding::Uniform(uniform) if uniform.zero() == Zero::Symmetric
        && uniform.group() == 64
        && matches!(uniform.bits(), 4 | 8))
}

/// The same on a device, for rows of so many groups, whatever else a workgroup shares.
fn can_widen_on(gpu: &Gpu, encoding: Encoding, groups: usize) -> bool {
    // Terms, a row as int8, and what a norm of it needs.
    let shared = groups as u32 * (GROUP_TERMS + 64 + 8 + 16) + SPARE;
    gpu.has_wide_subgroups() && can_widen(encoding) && shared <= gpu.wide_shared_bytes()
}

impl Tuning {
    /// For `blocks` blocks of rows of so many groups each, and passes of so many tokens: 32 lanes a tile for one token where
    /// that can be.
    pub(crate) fn of(gpu: &Gpu, encoding: Encoding, blocks: usize, groups: usize, pass: u32) -> Self {
        if pass == 1 && can_widen_on(gpu, encoding, groups) {
            return Self::wide(blocks, groups);
        }
        Self::narrow(blocks, groups, pass)
    }

    /// The same for a lone token's gate or up, which meet.
    pub(crate) fn of_either(gpu: &Gpu, encoding: Encoding, blocks: usize, groups: usize) -> Self {
        if can_widen_on(gpu, encoding, groups) {
            return Self { threads: 512, lanes: Lanes::Wide(1) };
        }
        Self::narrow(blocks, groups, 1)
    }

    /// For a lone token's down, whose workgroups quantise: 32 lanes a tile are no faster (EXP-GPU-08).
    pub(crate) const fn of_lone_down() -> Self {
        Self { threads: 128, lanes: Lanes::Four }
    }

    /// Of one token, 32 lanes a tile: what was fastest or nearly so for eight shapes (EXP-GPU-08).
    const fn wide(blocks: usize, groups: usize) -> Self {
        let (threads, ahead) = match (blocks, groups) {
            (2048.., _) => (256, 1),
            (SOME_BLOCKS..MANY_BLOCKS, _) => (512, 1),
            (_, LONG..) => (512, 2),
            _ => (512, 1),
        };
        Self { threads, lanes: Lanes::Wide(ahead) }
    }

    /// For `blocks` blocks of rows in a dispatch, each alone in its workgroup if it likes, of so many groups, and passes
    /// of so many tokens: what was fastest or nearly so for nine shapes (EXP-GPU-05). Where blocks fill a device, small
    /// workgroups do; where there are few, each is to be done at once.
    const fn narrow(blocks: usize, groups: usize, pass: u32) -> Self {
        let threads = match pass {
            1 if blocks >= MANY_BLOCKS => 64,
            1 | 2 if blocks >= SOME_BLOCKS => 128,
            1 | 2 if groups >= LONG => 256,
            1 | 2 if groups >= LONG / 2 => 128,
            4 => 128,
            8 if groups >= LONG => 128,
            _ => 64,
        };
        Self { threads, lanes: Lanes::Four }
    }

    /// For workgroups of so many tiles, of gate and up together (EXP-GPU-05).
    pub(crate) const fn of_pair(tiles: usize, pass: u32) -> Self {
        let threads = if tiles <= 128 && pass <= 4 { 256 } else { 128 };
        Self { threads, lanes: Lanes::Four }
    }
}

/// A coded kernel's constants.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cut {
    pub(crate) pass: u32,
    pub(crate) threads: u32,
    lanes: Lanes,
    /// Whether 32 lanes may be of several subgroups, which exchange by what they share.
    played: bool,
    /// Bytes that a workgroup may share for what becomes of tiles.
    room: u32,
    pub(crate) slots: u32,
    operand: Operand,
}

/// What a coded kernel's tiles are multiplied by.
#[derive(Clone, Copy, Debug)]
enum Operand {
    /// An int8 plane.
    Plane,
    /// One f32 row that workgroups quantise themselves.
    Own(Own),
    /// One int8 row that the kernel's other texts make, by workgroups, and so many bytes that they share for that.
    Made(Own, u32),
}

impl Operand {
    /// Bytes that a workgroup shares.
    const fn bytes(self) -> u32 {
        match self {
            Self::Plane => 0,
            Self::Own(own) => own.bytes(),
            Self::Made(own, more) => own.bytes() + more,
        }
    }

    const fn bindings(self) -> usize {
        match self {
            Self::Plane => 2,
            Self::Own(_) => 1,
            Self::Made(..) => 0,
        }
    }
}

/// An operand of one f32 row that workgroups quantise themselves.
#[derive(Clone, Copy, Debug)]
struct Own {
    cols: u32,
    groups: u32,
    group: u32,
    team: u32,
}

impl Own {
    const fn bytes(self) -> u32 {
        self.groups * (self.group + 8)
    }
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
        let Tuning { threads, lanes } = tuning;
        assert!(matches!(threads, 64 | 128 | 256 | 512) && lanes != Lanes::Wide(0), "{tuning:?}");
        let threads = threads.min(gpu.most_threads() as u32);
        Self::over(gpu, uniform, pass, threads, if pass == 1 { lanes } else { Lanes::Four }, Operand::Plane)
    }

    /// The same for one token whose f32 row workgroups quantise themselves: see [`can_own`].
    pub(crate) fn owning(gpu: &Gpu, uniform: Uniform, cols: usize, tuning: Tuning) -> Self {
        let cut = Self::new(gpu, uniform, 1, tuning);
        let (groups, group) = (uniform.groups(cols) as u32, uniform.group() as u32);
        // As many lanes a group as there are in one go: what a group takes besides its values each of them does.
        let team = (cut.threads / groups).clamp(4, gpu.team(uniform.group()) as u32);
        let own = Own { cols: cols as u32, groups, group, team: 1 << team.ilog2() };
        Self::over(gpu, uniform, 1, cut.threads, cut.lanes, Operand::Own(own))
    }

    /// The same for one token whose int8 row the kernel makes, sharing `more` bytes for that; none if all that is too much
    /// to be shared.
    pub(crate) fn making(
        gpu: &Gpu,
        uniform: Uniform,
        cols: usize,
        tuning: Tuning,
        more: u32,
    ) -> Option<Self> {
        let cut = Self::new(gpu, uniform, 1, tuning);
        let (groups, group) = (uniform.groups(cols) as u32, uniform.group() as u32);
        let operand = Operand::Made(Own { cols: cols as u32, groups, group, team: 0 }, more);
        let fits = operand.bytes() <= gpu.shared_bytes() / OWN_SHARE;
        fits.then(|| Self::over(gpu, uniform, 1, cut.threads, cut.lanes, operand))
    }

    fn over(gpu: &Gpu, uniform: Uniform, pass: u32, threads: u32, lanes: Lanes, operand: Operand) -> Self {
        let affine = u32::from(uniform.zero() == Zero::Affine);
        let played = !gpu.has_wide_subgroups();
        let room = gpu.shared_bytes() - SPARE - operand.bytes();
        // Integers and a cell a token; scales, minima.
        let slot = pass * (4 * ROWS as u32 + 8) + (1 + affine) * 2 * ROWS as u32;
        let slots = (threads / 4).min(room / slot);
        let room = gpu.wide_shared_bytes() - SPARE - operand.bytes();
        Self { pass, threads, lanes, played, room, slots, operand }
    }

    /// Tiles that 32 lanes have on their way, if they share each.
    fn wide(self, encoding: Encoding, groups: usize) -> Option<u32> {
        let bytes = groups as u32 * GROUP_TERMS + if self.played { 16 * self.threads } else { 0 };
        match self.lanes {
            Lanes::Wide(ahead) if can_widen(encoding) && bytes <= self.room => {
                Some(ahead.min((groups as u32).div_ceil(self.threads / WIDE)))
            }
            _ => None,
        }
    }

    /// Most blocks of rows that a workgroup can take.
    pub(crate) const fn most_blocks(self) -> u32 {
        CHAINS * self.threads / (self.pass * ROWS as u32 / 2)
    }

    /// Blocks of rows for a workgroup: as few as keep most slots of most rounds in use, as long as there are
    /// workgroups enough, with `times` such products in a dispatch.
    pub(crate) fn blocks(self, encoding: Encoding, groups: usize, all: usize, times: usize) -> u32 {
        if self.wide(encoding, groups).is_some() {
            return 1;
        }
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

    /// coded.wgsl or coded_wide.wgsl, for workgroups of so many blocks of so many groups: its constants and its text.
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
        ]);
        let operand = match self.operand {
            Operand::Plane => include_str!("wgsl/coded_plane.wgsl").to_owned(),
            Operand::Own(own) => {
                let Own { cols, groups, group, team } = own;
                constants.extend([("COLS", cols), ("OWN", groups), ("GROUP", group), ("TEAM", team)]);
                [QUANTISE, OWN_X, include_str!("wgsl/coded_own.wgsl")].concat()
            }
            Operand::Made(own, _) => {
                constants.push(("OWN", own.groups));
                OWN_X.to_owned()
            }
        };
        let tiles = include_str!("wgsl/coded_tiles.wgsl").to_owned();
        let job = "job: ptr<function, Job>";
        if let Some(ahead) = self.wide(encoding, groups) {
            assert_eq!((blocks, self.pass), (1, 1), "blocks and tokens of a workgroup");
            let teams = self.threads / WIDE;
            let one_round = u32::from(groups as u32 <= ahead * teams);
            constants.extend([
                ("TILES_AHEAD", ahead),
                ("ROW_TILES", groups as u32),
                ("ONE_ROUND", one_round),
            ]);
            let exchange = match self.played {
                false => include_str!("wgsl/coded_wide_exchange.wgsl"),
                true => include_str!("wgsl/coded_wide_played.wgsl"),
            };
            let list = |what: &str| {
                let head = format!("{what}s({job}, window: ptr<function, Window>, first: u32, lane: u32)");
                repeated.calls(&head, ahead, |i| format!("{what}(job, window, first, lane, {i});"))
            };
            let wide = include_str!("wgsl/coded_wide.wgsl").to_owned();
            let lists = [list("load_tile"), list("take_tile")].concat();
            return (constants, [tiles, wide, exchange.to_owned(), operand, lists].concat());
        }
        constants.extend([
            ("SLOTS", self.slots),
            ("CHAINS", chains),
            ("HELD", u32::from(held > 0)),
            ("ONE_ROUND", u32::from(blocks as usize * groups <= self.slots as usize)),
        ]);
        let lines = "lines: ptr<function, Lines>";
        let (integers, sums) = ("sums: ptr<function, Integers>", "sums: ptr<function, Sums>");
        let places = "at: u32, tile: u32";
        let text = [
            tiles,
            include_str!("wgsl/coded.wgsl").to_owned(),
            operand,
            levels(encoding),
            repeated.calls(&format!("load_lines({lines}, at: u32)"), held, |i| {
                format!("load_line(lines, at, {i});")
            }),
            repeated.calls(
                &format!("take_spans({job}, {lines}, {integers}, {places})"),
                uniform.group() as u32 / 16,
                |v| format!("take_span(job, lines, sums, at, tile, {v});"),
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
        let blocks = cut.blocks(encoding, groups, rows.div_ceil(ROWS), times);
        let (mut constants, core) = cut.core(encoding, blocks, groups, Repeated::on(gpu)?);
        constants.extend_from_slice(extra);
        let mut texts = vec![&core[..]];
        texts.extend_from_slice(parts);
        let mut all = vec![Access::Read; 1 + cut.operand.bindings()];
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
