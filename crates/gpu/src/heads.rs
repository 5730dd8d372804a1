//! Products head by head: a matrix that is one of every head's own, over the heads' parts of a plane. What latent attention
//! does on either side of the latent: [`HeadInput`] makes what [`HeadMatmul`] takes.

use smoe_format::tile::ROWS;
use smoe_format::{Encoding, Uniform};

use crate::coded::{CodedOp, ExactMatmul, PASSES, pass_of, passes};
use crate::cut::{Cut, Lanes, Tuning};
use crate::draft::{Draft, demand};
use crate::float::FloatCut;
use crate::memories::Memories;
use crate::quantise::GRID;
use crate::rope::{Angles, RopePairs, Rows};
use crate::shader::{Access, Op};
use crate::{CodedPlane, Gpu, GpuError, Slice, Step, Weights};

/// Threads of a workgroup of [`HeadInput`].
const THREADS: usize = 256;
/// Groups of a row from which on 32 lanes share a tile.
const WIDE_GROUPS: usize = 4;

/// What products head by head take: a row of so many columns for each (token, head), heads of a token side by side.
#[derive(Clone, Debug)]
pub enum HeadPlane {
    /// As f32: for float weights, and for the exact products of coded ones.
    Float(Slice),
    /// As int8, each head's columns in groups of their own.
    Coded(CodedPlane),
}

impl HeadPlane {
    /// Room for `tokens` tokens of `heads` heads of `cols` columns; as int8 if there is a `group`.
    ///
    /// # Errors
    /// If the device has no room.
    pub fn new(
        gpu: &Gpu,
        tokens: usize,
        heads: usize,
        cols: usize,
        group: Option<usize>,
    ) -> Result<Self, GpuError> {
        Ok(match group {
            Some(group) => Self::Coded(CodedPlane::new(gpu, tokens * heads, cols, group)?),
            None => Self::Float(gpu.buffer("inputs of heads", (4 * tokens * heads * cols) as u64)?),
        })
    }

    /// Columns of a group if it is int8.
    #[must_use]
    pub const fn group(&self) -> Option<usize> {
        match self {
            Self::Float(_) => None,
            Self::Coded(plane) => Some(plane.group),
        }
    }

    fn check(&self, tokens: usize, heads: usize, cols: usize) {
        match self {
            Self::Float(plane) => demand(plane, tokens * heads * cols, "inputs of heads"),
            Self::Coded(plane) => assert!(
                plane.tokens >= tokens * heads && plane.cols == cols,
                "int8 inputs of heads are [{}, {}], not [{tokens} * {heads}, {cols}]",
                plane.tokens,
                plane.cols
            ),
        }
    }
}

/// A plane of heads, `[tokens, stride]`.
#[derive(Clone, Copy, Debug)]
pub struct HeadColumns<'a> {
    /// f32.
    pub plane: &'a Slice,
    /// Columns of a token.
    pub stride: usize,
    /// The first head's first column.
    pub at: usize,
    /// Columns from one head to the next.
    pub head_stride: usize,
}

/// What becomes of the columns behind those that the product takes: they are turned.
#[derive(Clone, Copy, Debug)]
pub struct HeadTurn<'a> {
    /// As many columns as are turned.
    pub angles: Angles<'a>,
    /// Positions of the tokens.
    pub rows: Rows<'a>,
    /// `[tokens, heads * key_dim]` f32: they become the last columns of each head.
    pub queries: &'a Slice,
    /// Columns of a head there.
    pub key_dim: usize,
}

/// Of each head of a plane the first columns, as [`HeadMatmul`] takes them; the others turned by RoPE.
///
/// Both have the CPU's bits (`Activations::quantise`, `rope`). One dispatch.
#[derive(Clone, Debug)]
pub struct HeadInput {
    op: Op,
    tokens: usize,
    parts: usize,
}

impl HeadInput {
    /// Of the first `cols` columns of each of `heads` heads, for up to `tokens` tokens.
    ///
    /// # Errors
    /// If the device refuses.
    ///
    /// # Panics
    /// If a shape does not match, or `cols` is no multiple of four.
    pub fn new(
        gpu: &Gpu,
        tokens: usize,
        heads: usize,
        cols: usize,
        from: HeadColumns<'_>,
        turn: Option<HeadTurn<'_>>,
        out: &HeadPlane,
    ) -> Result<Self, GpuError> {
        let HeadColumns { plane, stride, at, head_stride } = from;
        demand(plane, tokens * stride, "a plane of heads");
        assert!(cols > 0 && cols.is_multiple_of(4) && tokens <= GRID, "{cols} columns of {tokens} tokens");
        let turned = turn.map_or(0, |turn| turn.angles.dim);
        assert!(
            heads > 0 && cols + turned <= head_stride && at + heads * head_stride <= stride,
            "{heads} heads of {cols} and {turned} in {head_stride}, {at} in {stride}"
        );
        out.check(tokens, heads, cols);
        let group = out.group().unwrap_or(64);
        let team = gpu.team(group);
        let cells = cols.div_ceil(group);
        let mut draft = Draft::default()
            .float(group, team)
            .constant("HEADS", heads)
            .constant("STRIDE", stride)
            .constant("AT", at)
            .constant("HEAD_STRIDE", head_stride)
            .constant("COLS", cols)
            .constant("CELLS", cells)
            .flag("CODED", out.group().is_some())
            .text(include_str!("wgsl/heads_input.wgsl"))
            .buffer("plane", "f32", Access::Read, plane);
        let pairs = heads * turned / 2;
        draft = match turn {
            None => draft.text("fn turn(token: u32, id: u32) {}\n"),
            Some(HeadTurn { angles, rows, queries, key_dim }) => {
                demand(angles.table, angles.positions * angles.dim, "angles");
                demand(rows.rows, 4 * tokens, "rows");
                demand(queries, tokens * heads * key_dim, "queries");
                assert!(turned > 0 && turned.is_multiple_of(2) && turned < key_dim, "{turned} of {key_dim}");
                draft
                    .constant("HALF", turned / 2)
                    .flag("INTERLEAVED", angles.pairs == RopePairs::Neighbours)
                    .constant("KV_RANK", key_dim - turned)
                    .constant("KEY_DIM", key_dim)
                    .buffer("rows", "vec4<u32>", Access::Read, rows.rows)
                    .buffer("angles", "vec2<f32>", Access::Read, angles.table)
                    .buffer("queries", "f32", Access::Write, queries)
                    .text(include_str!("wgsl/rope_pairs.wgsl"))
                    .text(include_str!("wgsl/heads_turn.wgsl"))
            }
        };
        let (draft, items) = match out {
            HeadPlane::Float(plane) => (
                draft
                    .plane("part", cols, Access::Write, plane)
                    .text("fn store_codes(cell: u32, part: u32, coded: Codes) {}\n"),
                heads * cols / 4,
            ),
            HeadPlane::Coded(plane) => (
                draft.coded(plane).text("fn store_part(row: u32, chunk: u32, v: vec4<f32>) {}\n"),
                heads * cells * team,
            ),
        };
        let op = draft.op(gpu, "input of heads")?;
        Ok(Self { op, tokens, parts: items.max(pairs).div_ceil(THREADS) })
    }

    /// Records it for the first `tokens` tokens.
    ///
    /// # Panics
    /// If there are more than it was made for.
    pub fn record(&self, step: &mut Step, tokens: usize) {
        assert!(tokens <= self.tokens, "{tokens} tokens of {}", self.tokens);
        step.run(&self.op, &[], [self.parts as u32, tokens as u32, 1]);
    }
}

/// Rows of heads are short: no more threads than a block of them has lanes for (EXP-GPU-10, unmeasured).
pub(crate) fn tuning_of_heads(
    gpu: &Gpu,
    encoding: Encoding,
    blocks: usize,
    groups: usize,
    pass: u32,
) -> Tuning {
    let tuning = Tuning::of(gpu, encoding, blocks, groups, pass);
    match tuning.lanes {
        Lanes::Four => tuning,
        Lanes::Wide(_) if groups < WIDE_GROUPS => Tuning { threads: 64, lanes: Lanes::Four },
        Lanes::Wide(_) => {
            Tuning { threads: (32 * groups as u32).next_power_of_two().min(256), lanes: Lanes::Wide(1) }
        }
    }
}

/// How a [`HeadMatmul`] multiplies.
#[derive(Clone, Debug)]
enum Form {
    Coded { passes: Vec<CodedOp>, groups: usize },
    Float { passes: Vec<Op>, cut: FloatCut },
    Exact { op: Op, groups: usize },
}

/// `out[t, h * stride + r] = sum over k of W[h * rows + r, k] * x[t, h, k]`, as `head_matmul` on the CPU.
///
/// Coded weights and int8 inputs give the CPU's bits, as [`CodedMatmul`](crate::CodedMatmul) does; float weights, and coded ones by
/// f32 inputs, sum in an order of their own, which does not depend on the number of tokens. One dispatch.
#[derive(Clone, Debug)]
pub struct HeadMatmul {
    form: Form,
    heads: usize,
    /// Of a head.
    rows: usize,
    cols: usize,
    tokens: usize,
    stride: usize,
}

impl HeadMatmul {
    /// Multiplies `weights`, `[heads * rows, cols]`, by up to `tokens` tokens of `x`, into the first `rows` of each `stride` columns
    /// of `out`, `[tokens, heads * stride]`.
    ///
    /// # Errors
    /// If the device refuses a kernel.
    ///
    /// # Panics
    /// If a shape does not match, a head's rows are not whole blocks of 32, or float weights meet int8 inputs.
    pub fn new(
        gpu: &Gpu,
        weights: &Weights,
        heads: usize,
        x: &HeadPlane,
        tokens: usize,
        out: &Slice,
        stride: usize,
    ) -> Result<Self, GpuError> {
        let (rows, cols) = (weights.rows() / heads.max(1), weights.cols());
        assert!(heads > 0 && rows * heads == weights.rows(), "{} rows of {heads} heads", weights.rows());
        assert!(rows > 0 && rows.is_multiple_of(ROWS) && rows <= stride, "{rows} rows of a head, {stride}");
        assert!(heads <= GRID && tokens <= GRID && rows / ROWS <= GRID, "the grid");
        assert!(tokens * heads * stride <= 1 << 31, "{tokens} tokens of {heads} heads of {stride}");
        x.check(tokens, heads, cols);
        demand(out, tokens * heads * stride, "outputs of heads");
        let of_heads = [("HEADS", heads as u32)];
        let form = match (weights.encoding().tiles(), x) {
            (Some(uniform), HeadPlane::Coded(x)) => {
                assert!(x.suits(uniform, cols), "x is {} in {}", x.cols, x.group);
                let groups = uniform.groups(cols);
                let of_pass = |pass| Self::coded(gpu, weights, uniform, heads, x, out, pass);
                Form::Coded { passes: passes(tokens).map(of_pass).collect::<Result<_, _>>()?, groups }
            }
            (Some(uniform), HeadPlane::Float(x)) => {
                let op = ExactMatmul::kernel(gpu, weights, heads, x, out)?;
                Form::Exact { op, groups: uniform.groups(cols) }
            }
            (None, HeadPlane::Float(x)) => {
                // Of all heads, as they share a dispatch.
                let cut = FloatCut::new(weights.rows());
                let parts = [include_str!("wgsl/heads_float.wgsl")];
                let (buffers, matrix) = ([weights.slice(), x, out], (weights.encoding(), cols));
                let access = [Access::Write];
                let of_pass = |pass| {
                    let name = "float product of heads";
                    cut.op(gpu, name, matrix, pass, &of_heads, &parts, &access, &buffers, Memories::One)
                };
                Form::Float { passes: passes(tokens).map(of_pass).collect::<Result<_, _>>()?, cut }
            }
            (None, HeadPlane::Coded(_)) => panic!("float weights by int8 inputs"),
        };
        Ok(Self { form, heads, rows, cols, tokens, stride })
    }

    fn coded(
        gpu: &Gpu,
        weights: &Weights,
        uniform: Uniform,
        heads: usize,
        x: &CodedPlane,
        out: &Slice,
        pass: u32,
    ) -> Result<CodedOp, GpuError> {
        let (rows, cols, encoding): (_, _, Encoding) =
            (weights.rows() / heads, weights.cols(), weights.encoding());
        let groups = uniform.groups(cols);
        let tuning = tuning_of_heads(gpu, encoding, weights.rows() / ROWS, groups, pass);
        CodedOp::new(
            gpu,
            "coded product of heads",
            encoding,
            Cut::new(gpu, uniform, pass, tuning),
            (rows, cols),
            heads,
            &[("OUT", 3), ("HEADS", heads as u32)],
            &[include_str!("wgsl/heads_coded.wgsl")],
            &[Access::Write],
            &[weights.slice(), &x.codes, &x.cells, out],
        )
    }

    /// Records it for the first `tokens` tokens.
    ///
    /// # Panics
    /// If there are more than it was made for.
    pub fn record(&self, step: &mut Step, tokens: usize) {
        assert!(tokens <= self.tokens, "{tokens} tokens of {}", self.tokens);
        let Self { rows, cols, stride, .. } = *self;
        let (heads, pass) = (self.heads as u32, pass_of(tokens));
        let runs = (tokens as u32).div_ceil(PASSES[pass]);
        let mut run = |op: &Op, words: &[usize], grid: [u32; 3]| {
            let words: Vec<u32> = words.iter().map(|&word| word as u32).collect();
            step.run(op, &words, grid);
        };
        match &self.form {
            Form::Coded { passes, groups } => {
                let CodedOp { op, blocks, .. } = &passes[pass];
                let parts = (rows / ROWS).div_ceil(*blocks as usize) as u32;
                run(op, &[rows, *groups, *blocks as usize, tokens, stride], [parts, runs, heads]);
            }
            Form::Float { passes, cut } => {
                run(&passes[pass], &[rows, cols, tokens, stride], [cut.grid(rows), runs, heads]);
            }
            Form::Exact { op, groups } => {
                let grid = [(rows / ROWS) as u32, tokens as u32, heads];
                run(op, &[rows, cols, *groups, stride, 0], grid);
            }
        }
    }
}
