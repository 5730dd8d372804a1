//! What a lone token needs around attention over a latent, in fewer dispatches and with the same bits: [`LatentEntry`] before it,
//! [`LatentExit`] behind it.

use smoe_format::tile::ROWS;

use crate::attention::SPLIT;
use crate::cut::{Cut, can_own};
use crate::draft::{Draft, FLOAT, demand};
use crate::heads::tuning_of_heads;
use crate::latent::bind_row;
use crate::quantise::{GRID, Repeated};
use crate::rope::{RopePairs, Rows};
use crate::shader::{Access, Op};
use crate::{
    AttentionScratch, Gpu, GpuError, HeadColumns, HeadTurn, LatentInput, LatentLayout, Slice, Step, Weights,
};

/// Splits that each workgroup of [`LatentExit`] joins for itself at most; not measured (EXP-GPU-13).
const JOINED: usize = 16;

/// Bytes that a workgroup may share of a device that these kernels are made for: the products' own, and a row of the cache.
const SHARED: u32 = 24 << 10;

/// A row of the cache to be made, as [`LatentAppend`](crate::LatentAppend) makes it.
#[derive(Clone, Copy, Debug)]
pub struct LatentRow<'a> {
    /// How it lies.
    pub kv: LatentLayout,
    /// What it is made of; its queries have no latent.
    pub input: LatentInput<'a>,
    /// Where it goes.
    pub cache: &'a Slice,
}

/// The head products' core of one token whose workgroups make their operand themselves, and so many blocks of rows; none if the weights
/// have no codes, or the device shares too little.
fn core(
    gpu: &Gpu,
    weights: &Weights,
    heads: usize,
) -> Result<Option<(Draft<'static>, String, u32)>, GpuError> {
    let (rows, cols, encoding) = (weights.rows() / heads.max(1), weights.cols(), weights.encoding());
    assert!(
        heads > 0 && heads < GRID && rows * heads == weights.rows(),
        "{} rows of {heads} heads",
        weights.rows()
    );
    assert!(rows > 0 && rows.is_multiple_of(ROWS), "{rows} rows of a head");
    let has_room = |uniform| gpu.shared_bytes() >= SHARED && can_own(gpu, uniform, cols);
    let Some(uniform) = encoding.tiles().filter(|&uniform| has_room(uniform)) else {
        return Ok(None);
    };
    let groups = uniform.groups(cols);
    let tuning = tuning_of_heads(gpu, encoding, weights.rows() / ROWS, groups, 1);
    let cut = Cut::owning(gpu, uniform, cols, tuning);
    let blocks = cut.blocks(encoding, groups, rows / ROWS, heads);
    let (constants, text) = cut.core(encoding, blocks, groups, Repeated::on(gpu)?);
    let known = |draft: Draft<'static>, (name, value): (&str, u32)| draft.constant(name, value as usize);
    let draft = constants.into_iter().fold(Draft::default(), known).constant("HEADS", heads);
    Ok(Some((draft, text, blocks)))
}

/// Of a lone token what [`HeadInput`](crate::HeadInput), [`HeadMatmul`](crate::HeadMatmul) and, if it is to,
/// [`LatentAppend`](crate::LatentAppend) do, with their bits: queries that meet the latent, and the row of the cache. One dispatch.
#[derive(Clone, Debug)]
pub struct LatentEntry {
    op: Op,
    words: [u32; 4],
    grid: [u32; 3],
}

impl LatentEntry {
    /// Multiplies `weights`, `[heads * rows, cols]`, by the first `cols` columns of each head of `from` into the first `rows` columns of each head
    /// of `turn.queries`, and turns the others into those behind them. None if the weights have no codes, or the device shares too little for
    /// it.
    ///
    /// # Errors
    /// If the device refuses the kernel.
    ///
    /// # Panics
    /// If a shape does not match, or `row` is of another plane, of queries that have a latent, or of a layout that has no kernels.
    pub fn new(
        gpu: &Gpu,
        weights: &Weights,
        heads: usize,
        from: HeadColumns<'_>,
        turn: HeadTurn<'_>,
        row: Option<LatentRow<'_>>,
    ) -> Result<Option<Self>, GpuError> {
        let HeadColumns { plane, stride, at, head_stride } = from;
        let HeadTurn { angles, rows, queries, key_dim } = turn;
        let (cols, turned) = (weights.cols(), angles.dim);
        let Some((draft, core, blocks)) = core(gpu, weights, heads)? else { return Ok(None) };
        demand(plane, stride, "a plane of heads");
        assert!(
            cols + turned <= head_stride && at + heads * head_stride <= stride,
            "{heads} heads of {cols} and {turned} in {head_stride}, {at} in {stride}"
        );
        demand(angles.table, angles.positions * turned, "angles");
        demand(rows.rows, 4, "rows");
        demand(queries, heads * key_dim, "queries");
        let rows_of_head = weights.rows() / heads;
        assert!(rows_of_head + turned == key_dim && turned.is_multiple_of(2), "{turned} of {key_dim}");
        let draft = draft
            .declared(Access::Read, weights.slice())
            .constant("STRIDE", stride)
            .constant("AT", at)
            .constant("HEAD_STRIDE", head_stride)
            .constant("HALF", turned / 2)
            .flag("INTERLEAVED", angles.pairs == RopePairs::Neighbours)
            .constant("KV_RANK", key_dim - turned)
            .constant("KEY_DIM", key_dim)
            .constant("APPENDS", usize::from(row.is_some()))
            .buffer("plane", "f32", Access::Read, plane)
            .buffer("queries", "f32", Access::Write, queries)
            .buffer("rows", "vec4<u32>", Access::Read, rows.rows)
            .buffer("angles", "vec2<f32>", Access::Read, angles.table)
            .text(include_str!("wgsl/rope_pairs.wgsl"))
            .text(include_str!("wgsl/heads_turn.wgsl"))
            .text(&core)
            .text(include_str!("wgsl/latent_entry.wgsl"));
        let (draft, eps) = match row {
            None => (draft.text("fn keys_and_values(token: u32, lane: u32) {}\n"), 0.0),
            Some(LatentRow { kv, input, cache }) => {
                assert!(input.plane.is(plane) && input.stride == stride, "a row of another plane");
                assert!(
                    input.queries.is_none() && kv.key_dim() == key_dim,
                    "a row that has queries, or {kv:?}"
                );
                let draft = draft.text(FLOAT).constant("WIDEST", key_dim);
                (bind_row(draft, kv, input, rows, cache), input.norm.eps)
            }
        };
        let op = draft.op(gpu, "input and product of heads")?;
        let groups = weights.encoding().tiles().map_or(0, |tiles| tiles.groups(cols));
        let words = [rows_of_head as u32, groups as u32, blocks, eps.to_bits()];
        let runs = (rows_of_head / ROWS).div_ceil(blocks as usize);
        let grid = [runs + 1, 1, heads + usize::from(row.is_some())].map(|n| n as u32);
        Ok(Some(Self { op, words, grid }))
    }

    /// Records it.
    pub fn record(&self, step: &mut Step) {
        step.run(&self.op, &self.words, self.grid);
    }
}

/// Of a lone token what joins the splits of [`LatentAttention`](crate::LatentAttention), and a [`HeadMatmul`](crate::HeadMatmul) of it by
/// int8, with their bits. One dispatch.
#[derive(Clone, Debug)]
pub struct LatentExit {
    op: Op,
    words: [u32; 5],
    grid: [u32; 3],
}

impl LatentExit {
    /// Multiplies `weights`, `[heads * rows, kv_rank]`, by what `scratch` holds of a token that `rows` begins with, into the first `rows` of each
    /// `stride` columns of `out`. None if the weights have no codes, heads are not whole groups, or the device shares too little for it.
    ///
    /// # Errors
    /// If the device refuses the kernel.
    ///
    /// # Panics
    /// If a shape does not match.
    pub fn new(
        gpu: &Gpu,
        weights: &Weights,
        heads: usize,
        scratch: &AttentionScratch,
        rows: Rows<'_>,
        out: &Slice,
        stride: usize,
    ) -> Result<Option<Self>, GpuError> {
        let (cols, tiles) = (weights.cols(), weights.encoding().tiles());
        let Some(tiles) = tiles.filter(|tiles| cols.is_multiple_of(tiles.group())) else { return Ok(None) };
        let Some((draft, core, blocks)) = core(gpu, weights, heads)? else { return Ok(None) };
        let rows_of_head = weights.rows() / heads;
        assert_eq!((scratch.n_heads, scratch.value_dim), (heads, cols), "heads of the scratch");
        assert!(rows_of_head <= stride, "{rows_of_head} rows of a head, {stride}");
        demand(out, heads * stride, "outputs of heads");
        demand(rows.rows, 4, "rows");
        let op = draft
            .declared(Access::Read, weights.slice())
            .constant("VALUE_DIM", cols)
            .flag("SINKS", false)
            .buffer("rows", "vec4<u32>", Access::Read, rows.rows)
            .buffer("sums", "vec4<f32>", Access::Read, &scratch.sums)
            .buffer("stats", "vec2<f32>", Access::Read, &scratch.stats)
            .buffer("out", "f32", Access::Write, out)
            .text("fn sink_of(head: u32) -> f32 { return 0.0; }\n")
            .text(FLOAT)
            .text(include_str!("wgsl/attention_join.wgsl"))
            .text(&core)
            .text(include_str!("wgsl/latent_exit.wgsl"))
            .op(gpu, "splits and product of heads")?;
        let groups = tiles.groups(cols);
        let low = f32::NEG_INFINITY.to_bits();
        let words = [rows_of_head as u32, groups as u32, blocks, stride as u32, low];
        let runs = (rows_of_head / ROWS).div_ceil(blocks as usize);
        Ok(Some(Self { op, words, grid: [runs, 1, heads].map(|n| n as u32) }))
    }

    /// Whether it is for a token whose positions are all below `end`: each workgroup joins all splits of its head.
    #[must_use]
    pub const fn joins(end: usize) -> bool {
        end.div_ceil(SPLIT) <= JOINED
    }

    /// Records it.
    pub fn record(&self, step: &mut Step) {
        step.run(&self.op, &self.words, self.grid);
    }
}
