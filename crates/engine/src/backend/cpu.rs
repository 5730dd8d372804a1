//! The CPU backend: the verbs of a layer over a fork-join pool.
//!
//! Coded weights multiply int8 activations, float weights f32 ones; in exact mode f32 everywhere. Planes
//! are claimed once for the longest step.

mod delta;
mod index;

use smoe_format::expert_file::LayerTable;
use smoe_format::spec::LatentSpec;
use smoe_format::{Encoding, FfnKind, ModelSpec, Uniform};
use smoe_kernels::{
    Activations, AttentionHeads, AttentionScratch, ExpertBias, ExpertCall, ExpertScratch, HeadInput,
    HeadScratch, Input, Kernels, KvBlocks, KvPlane, KvType, Matrix, Pool, Product, RopeStyle, Sight,
    expert_ffn, head_matmul, matmul, matmul_all,
};
use smoe_store::Lease;

use crate::EngineError;
use crate::backend::{Backend, ExpertObserver, ExpertSeen, HEAD_ROWS, Row, SharedObserver};
use crate::kv::{self, BLOCK, KvCache, PlaneGeometry};
use crate::plan::Plan;
use crate::rope::RopeTable;
use crate::routes::Routes;
use crate::weights::{Ffn, LayerFfn, Projections, Tensor, Weights};
use delta::DeltaPlanes;
use index::IndexPlanes;

/// Experts of one kernel call; a fork-join serves them all. A layer's experts of a step of eight clients are one or two
/// calls (EXP-ENGINE-05).
pub(crate) const CALL_EXPERTS: usize = 32;
/// (expert, token) pairs of one kernel call: bounds the memory of a prefill, whatever its length.
const CALL_PAIRS: usize = 1024;
/// Tokens that projections, attention and dense layers take at once: their planes are as long, however long the
/// step.
const BLOCK_TOKENS: usize = 512;
/// Tokens of a task that sums expert outputs.
const SUM_TOKENS: usize = 16;
/// Group sizes that an encoding can have: 16, 32, 64, 128.
const MAX_GROUPS: usize = 4;

/// f32 inputs of T tokens and, once coded matrices ask, their int8 forms: one per group size of the model.
#[derive(Debug)]
struct Plane {
    x: Vec<f32>,
    coded: Vec<Coded>,
}

#[derive(Debug)]
struct Coded {
    group: usize,
    activations: Activations,
    /// Made from the current `x`.
    fresh: bool,
}

impl Plane {
    fn with_capacity(tokens: usize, cols: usize, groups: &[usize]) -> Self {
        let coded =
            |&group| Coded { group, activations: Activations::with_capacity(tokens, cols), fresh: false };
        Self { x: vec![0.0; tokens * cols], coded: groups.iter().map(coded).collect() }
    }

    /// The first `len` values, to be overwritten.
    fn fill(&mut self, len: usize) -> &mut [f32] {
        self.coded.iter_mut().for_each(|coded| coded.fresh = false);
        &mut self.x[..len]
    }
}

/// What every verb needs, apart from the planes.
#[derive(Debug)]
struct Context {
    spec: ModelSpec,
    weights: Weights,
    experts: Vec<LayerTable>,
    rope: RopeTable,
    pool: Pool,
    kernels: Kernels,
    exact: bool,
}

impl Context {
    /// `out = W x` for T tokens.
    fn multiply(&self, w: &Tensor, plane: &mut Plane, tokens: usize, out: &mut [f32]) {
        let matrix = self.weights.matrix(w);
        self.with_input(&[matrix], plane, tokens, |input| {
            matmul(&self.pool, self.kernels, &matrix, input, &mut out[..tokens * w.rows]);
        });
    }

    /// Several products of the same input, in one fork.
    fn multiply_all<const N: usize>(
        &self,
        ws: [&Tensor; N],
        plane: &mut Plane,
        tokens: usize,
        outs: [&mut [f32]; N],
    ) {
        let matrices = ws.map(|w| self.weights.matrix(w));
        self.with_input(&matrices, plane, tokens, |input| {
            let mut outs = outs.into_iter();
            let mut products = matrices.map(|matrix| {
                let out = outs.next().unwrap_or_default();
                Product::new(matrix, tokens, &mut out[..tokens * matrix.rows()])
            });
            matmul_all(&self.pool, self.kernels, &mut products, input);
        });
    }

    /// Calls `f` with the input in every form that `matrices` take; each form is made once per input.
    fn with_input(
        &self,
        matrices: &[Matrix<'_>],
        plane: &mut Plane,
        tokens: usize,
        f: impl FnOnce(&Input<'_>),
    ) {
        let cols = matrices.first().map_or(0, Matrix::cols);
        let Plane { x, coded } = plane;
        let x = &x[..tokens * cols];
        let coded_groups = matrices.iter().filter_map(Matrix::tiles).map(Uniform::group);
        for group in coded_groups.filter(|_| !self.exact) {
            for coded in coded.iter_mut().filter(|coded| coded.group == group && !coded.fresh) {
                coded.activations.quantise_parallel(&self.pool, self.kernels, x, tokens, cols, group);
                coded.fresh = true;
            }
        }
        if self.exact {
            return f(&Input::exact(x, tokens));
        }
        let mut fresh = coded.iter().filter(|coded| coded.fresh).map(|coded| coded.activations.view());
        let Some(first) = fresh.next() else {
            return f(&Input::new(x, tokens, &[]));
        };
        let mut views = [first; MAX_GROUPS];
        let mut n = 1;
        for view in fresh {
            views[n] = view;
            n += 1;
        }
        f(&Input::new(x, tokens, &views[..n]));
    }

    /// `out[t] = rms_norm(x[t])` for every row.
    fn norm(&self, x: &[f32], weight: &[f32], out: &mut [f32]) {
        let d = weight.len();
        self.pool.chunks_mut(out, d, &|t, out| {
            self.kernels.rms_norm(&x[t * d..(t + 1) * d], weight, self.spec.rms_norm_eps, out);
        });
    }

    /// Turns the first elements of each head of `x`, as wide as what is rotated of it.
    fn rotate(&self, x: &mut [f32], head_dim: usize, position: u32) {
        let style = if self.spec.rope.interleaved { RopeStyle::Interleaved } else { RopeStyle::Half };
        self.rotate_as(style, x, head_dim, position);
    }

    fn rotate_as(&self, style: RopeStyle, x: &mut [f32], head_dim: usize, position: u32) {
        let (cos, sin) = (self.rope.cos(position as usize), self.rope.sin(position as usize));
        self.kernels.rope(x, head_dim, cos, sin, style);
    }

    /// Adds `bias` to every row of `x`.
    fn add_bias(&self, x: &mut [f32], bias: Option<&[f32]>) {
        if let Some(bias) = bias {
            self.pool.chunks_mut(x, bias.len(), &|_, row| self.kernels.add_in_place(row, bias));
        }
    }

    /// What a part of a layer adds to the hidden states, row by row: `hidden += multiplier * y`, rounded once, so that a
    /// multiplier of one changes no bit.
    fn add_residual(&self, hidden: &mut [f32], y: &[f32]) {
        let (d, w) = (self.spec.d_model, self.spec.multipliers.residual as f32);
        self.pool.chunks_mut(hidden, d, &|t, row| {
            self.kernels.scale_add(row, &y[t * d..(t + 1) * d], w);
        });
    }

    /// `x *= by`, if that changes anything.
    fn multiply_by(&self, x: &mut [f32], by: f64) {
        if by != 1.0 {
            self.kernels.scale_in_place(x, by as f32);
        }
    }

    /// `x += y`, row by row.
    fn add(&self, x: &mut [f32], y: &[f32]) {
        let d = self.spec.d_model;
        self.pool.chunks_mut(x, d, &|t, x| self.kernels.add_in_place(x, &y[t * d..(t + 1) * d]));
    }
}

/// Takes what a dense part made of a block of tokens: the first token, their hidden states, and the rows.
type TakeRows<'a> = &'a mut dyn FnMut(&Context, usize, &mut [f32], &[f32]);

/// The CPU backend.
#[derive(Debug)]
pub struct CpuBackend {
    context: Context,
    tokens: usize,
    /// `[T, d_model]`.
    hidden: Vec<f32>,
    /// `[T, d_model]`, the input of router and routed experts.
    normed: Plane,
    /// `[B, d_model]`, the input of attention or a dense part, B being tokens of a block.
    input: Plane,
    /// `[B, n_heads * head_dim]`.
    q: Vec<f32>,
    /// `[B, n_kv_heads * key_dim]`.
    k: Vec<f32>,
    /// `[B, n_kv_heads * head_dim]`; empty if keys are values.
    v: Vec<f32>,
    latent: Option<LatentPlanes>,
    index: Option<IndexPlanes>,
    /// `[B, n_heads * head_dim]`, what outputs of heads are multiplied with; empty if there is none.
    gates: Vec<f32>,
    net: Option<DeltaPlanes>,
    /// `[B, n_heads * value_dim]`, outputs of the heads.
    mixed: Plane,
    /// `[B, d_model]`, what a verb adds to the hidden states.
    delta: Vec<f32>,
    /// `[B, width]` of dense layers and shared experts.
    gate: Vec<f32>,
    up: Vec<f32>,
    inner: Plane,
    attention: AttentionScratch,
    /// `[T, d_model]`, outputs of the shared expert; empty if there is none.
    shared: Vec<f32>,
    /// `[T]`, its weights; empty if they are 1.
    shared_scale: Vec<f32>,
    /// `[T, n_experts]`.
    router: Vec<f32>,
    /// Outputs of (expert, token) pairs, in the order in which they were computed: of all pairs of the layer
    /// if they have room, else of one kernel call.
    outputs: Vec<f32>,
    /// `[T, d_model]`, weighted sums of `outputs`.
    sum: Vec<f32>,
    /// Pairs computed in this layer.
    filled: usize,
    /// `[T, top_k]`: the how many-th pair computed a pair was.
    output_row: Vec<u32>,
    scratch: ExpertScratch,
    /// Biases of the experts of a kernel call, gate, up and down of each; empty if there are none.
    biases: Vec<f32>,
    /// `[HEAD_ROWS, d_model]`.
    head_input: Plane,
    /// `[HEAD_ROWS, vocab_size]`.
    logits: Vec<f32>,
    observer: Option<SharedObserver>,
}

/// What latent attention needs besides.
#[derive(Debug)]
struct LatentPlanes {
    /// `[B, q_rank]`.
    low: Plane,
    /// `[B, n_heads * key_dim]`: queries that meet the latent, and their rotated part.
    queries: Vec<f32>,
    /// `[B, n_heads * kv_rank]`: what attention makes of the latent.
    mixed: Vec<f32>,
    scratch: HeadScratch,
}

impl LatentPlanes {
    fn new(spec: &ModelSpec, latent: &LatentSpec, block: usize, groups: &[usize]) -> Self {
        let a = &spec.attention;
        Self {
            low: Plane::with_capacity(block, latent.q_rank, groups),
            queries: vec![0.0; block * a.n_heads * a.key_dim()],
            mixed: vec![0.0; block * a.n_heads * latent.kv_rank],
            scratch: HeadScratch::with_capacity(block, a.n_heads, Self::cols(spec, latent)),
        }
    }

    /// The widest input of a product head by head.
    fn cols(spec: &ModelSpec, latent: &LatentSpec) -> usize {
        latent.kv_rank.max(spec.attention.head_dim - latent.rope_dim)
    }
}

/// Outputs of the heads of attention, or of a gated delta net.
fn outputs_width(spec: &ModelSpec) -> usize {
    let a = &spec.attention;
    (a.n_heads * a.value_dim()).max(spec.delta.map_or(0, |delta| delta.values()))
}

/// Group sizes of all coded weights: as many int8 forms may an input have.
pub(crate) fn groups(resident: impl Iterator<Item = Encoding>, experts: &[LayerTable]) -> Vec<usize> {
    let routed = experts.iter().flat_map(|table| &table.tensors).map(|t| t.encoding);
    let mut groups: Vec<usize> =
        resident.chain(routed).filter_map(Encoding::tiles).map(Uniform::group).collect();
    groups.sort_unstable();
    groups.dedup();
    groups
}

/// Widest dense layer or shared expert.
fn dense_width(spec: &ModelSpec) -> usize {
    let dense = spec.layers.iter().map(|kind| match kind {
        FfnKind::Dense(width) => *width,
        FfnKind::Moe => 0,
    });
    dense.max().unwrap_or(0).max(spec.moe.d_shared)
}

/// Biases of the experts of a kernel call.
fn bias_values(spec: &ModelSpec) -> usize {
    let moe = &spec.moe;
    if moe.expert_bias { CALL_EXPERTS * (2 * moe.d_expert + spec.d_model) } else { 0 }
}

/// Bytes of the rows that attention gathers where positions are chosen; a latent has one plane.
fn gathered_bytes(spec: &ModelSpec, kv: KvType, context: usize) -> usize {
    let row_bytes = kv.row_bytes(spec.attention.key_dim());
    spec.attention.indexer.filter(|i| context > i.top_k).map_or(0, |indexer| indexer.top_k * row_bytes)
}

impl CpuBackend {
    /// A backend for steps of at most `plan.chunk` tokens.
    #[must_use]
    pub fn new(
        spec: ModelSpec,
        weights: Weights,
        experts: &[LayerTable],
        plan: &Plan,
        kernels: Kernels,
        exact: bool,
    ) -> Self {
        let t = plan.chunk;
        let a = spec.attention;
        let (d, width) = (spec.d_model, dense_width(&spec));
        let (heads, kv_heads) = (a.n_heads * a.head_dim, a.n_kv_heads * a.head_dim);
        let block = t.min(BLOCK_TOKENS);
        let latent = a.latent.as_ref();
        let pairs = t * spec.moe.top_k;
        let call_pairs = pairs.min(CALL_PAIRS);
        let groups = groups(weights.tensors().map(|t| t.encoding), experts);
        let floats = exact || experts.iter().flat_map(|t| &t.tensors).any(|t| t.encoding.is_float());
        let plane = |tokens, cols| Plane::with_capacity(tokens, cols, &groups);
        let has_shared = spec.moe.d_shared > 0;
        let seen = index::seen(&spec, plan.context);
        Self {
            tokens: 0,
            hidden: vec![0.0; t * d],
            normed: plane(t, d),
            input: plane(block, d),
            q: vec![0.0; block * heads],
            k: vec![0.0; block * a.n_kv_heads * a.key_dim()],
            v: vec![0.0; if latent.is_some() { 0 } else { block * kv_heads }],
            latent: latent.map(|latent| LatentPlanes::new(&spec, latent, block, &groups)),
            index: a.indexer.map(|indexer| IndexPlanes::new(indexer, block, plan.context)),
            gates: vec![0.0; if a.gate { block * heads } else { 0 }],
            net: kv::state_shape(&spec).map(|shape| DeltaPlanes::new(shape, block, plan.snapshots)),
            mixed: plane(block, outputs_width(&spec)),
            delta: vec![0.0; block * d],
            gate: vec![0.0; block * width],
            up: vec![0.0; block * width],
            inner: plane(block, width),
            attention: AttentionScratch::new(plan.threads, a.key_dim(), a.mixed_dim(), seen)
                .with_rows(gathered_bytes(&spec, plan.kv, plan.context)),
            shared: vec![0.0; if has_shared { t * d } else { 0 }],
            shared_scale: vec![0.0; if spec.moe.shared_gate { t } else { 0 }],
            router: vec![0.0; t * spec.moe.n_experts],
            outputs: vec![0.0; call_pairs * d],
            sum: vec![0.0; t * d],
            filled: 0,
            output_row: vec![0; pairs],
            scratch: ExpertScratch::with_capacity(call_pairs, d, spec.moe.d_expert, floats),
            biases: vec![0.0; bias_values(&spec)],
            head_input: plane(HEAD_ROWS, d),
            logits: vec![0.0; HEAD_ROWS * spec.vocab_size],
            observer: None,
            context: Context {
                rope: RopeTable::new(&spec.rope, spec.rope_dim(), plan.context),
                pool: Pool::new(plan.threads, false),
                experts: experts.to_vec(),
                spec,
                weights,
                kernels,
                exact,
            },
        }
    }

    /// Bytes of the planes that [`Self::new`] claims, and of the routes beside them; `groups` is the number
    /// of group sizes among the coded weights.
    #[must_use]
    pub fn activation_bytes(
        spec: &ModelSpec,
        groups: usize,
        kv: KvType,
        chunk: usize,
        context: usize,
        threads: usize,
    ) -> u64 {
        let a = &spec.attention;
        let (t, d, width) = (chunk as u64, spec.d_model as u64, dense_width(spec) as u64);
        let heads = (a.n_heads * a.head_dim) as u64;
        let remembered = (a.n_kv_heads * (a.key_dim() + a.head_dim)) as u64;
        let outputs = outputs_width(spec) as u64;
        let pairs = (t * spec.moe.top_k as u64).min(CALL_PAIRS as u64);
        let d_expert = spec.moe.d_expert as u64;
        let block = t.min(BLOCK_TOKENS as u64);
        // 4 bytes, and per int8 form 1 byte, and scale and sum per group of 16 and more.
        let plane = |values: u64| values * 4 + values * groups as u64 * 3 / 2;
        let whole = if spec.moe.d_shared > 0 { 3 } else { 2 };
        let floats = whole * t * d
            + t * spec.moe.n_experts as u64
            + block * (heads + remembered + d + 2 * width)
            + pairs * d
            + bias_values(spec) as u64
            + t
            + HEAD_ROWS as u64 * spec.vocab_size as u64
            + (threads * AttentionScratch::floats(a.key_dim(), a.mixed_dim(), index::seen(spec, context)))
                as u64;
        let planes = plane(t * d)
            + plane(block * d)
            + plane(block * outputs)
            + plane(block * width)
            + plane(HEAD_ROWS as u64 * d);
        // Gathered tokens as f32 and int8, gate and up, and the hidden values of every pair. The int8 forms have room even
        // if all experts are floats.
        let coded_once = |values: u64| values * 4 + values * groups.max(1) as u64 * 3 / 2;
        let scratch = coded_once(pairs * d) + pairs * d_expert * 8 + coded_once(pairs * d_expert);
        let latent = a.latent.map_or(0, |latent| {
            let heads = block * a.n_heads as u64;
            let products = 4 * heads * (a.key_dim() + latent.kv_rank) as u64;
            // As f32 and as int8, in groups that may be the smallest.
            let scratch = heads * LatentPlanes::cols(spec, &latent) as u64 * 11 / 2;
            plane(block * latent.q_rank as u64) + products + scratch
        });
        let index = a.indexer.map_or(0, |indexer| IndexPlanes::bytes(&indexer, block as usize, context));
        let gathered = (threads * gathered_bytes(spec, kv, context)) as u64;
        let gates = if a.gate { 4 * block * heads } else { 0 };
        let delta = kv::state_shape(spec).map_or(0, |shape| 4 * DeltaPlanes::floats(&shape, block as usize));
        let attention = scratch + latent + index + gathered + gates + delta as u64;
        floats * 4 + planes + attention + Routes::bytes(&spec.moe, chunk)
    }

    /// Queries, and what is remembered, of a block of tokens.
    fn project(&mut self, layer: usize, hidden: &[f32], rows: &[Row]) {
        let Self { context, input, q, k, v, latent, index, gates, .. } = self;
        let (kernels, pool, eps) = (context.kernels, &context.pool, context.spec.rms_norm_eps);
        let a = &context.spec.attention;
        let (tokens, head_dim, key_dim) = (rows.len(), a.head_dim, a.key_dim());
        let (heads, kv_heads) = (a.n_heads * head_dim, a.n_kv_heads * head_dim);
        let weights = &context.weights.layers[layer];
        context.norm(hidden, &weights.attn_norm, input.fill(hidden.len()));
        match (&weights.projections, latent) {
            (Projections::Latent { q_down, q: q_up, kv_down, kv_norm, k_up, indexer, .. }, Some(planes)) => {
                let Some(LatentSpec { kv_rank, rope_dim, norm_eps, .. }) = a.latent else { return };
                let norm = |row: &mut [f32], weight: &[f32]| {
                    kernels.rms_norm_in_place(row, weight, norm_eps);
                };
                if let Some((q_down, q_norm)) = q_down {
                    let indexer = indexer.as_ref().zip(index.as_mut());
                    let low = planes.low.fill(tokens * q_down.rows);
                    let norm_low =
                        |low: &mut [f32]| pool.chunks_mut(low, q_down.rows, &|_, row| norm(row, q_norm));
                    if let Some((indexer, index)) = indexer {
                        let of_input = [q_down, kv_down, &indexer.k, &indexer.weights];
                        let (keys, weights) = (&mut index.keys[..], &mut index.weights[..]);
                        context.multiply_all(of_input, input, tokens, [&mut *low, &mut *k, keys, weights]);
                        norm_low(low);
                        if index.is_asked(rows) {
                            let outs = [&mut *q, &mut index.queries[..]];
                            context.multiply_all([q_up, &indexer.q], &mut planes.low, tokens, outs);
                        } else {
                            context.multiply(q_up, &mut planes.low, tokens, q);
                        }
                        index.turn(context, indexer, rows);
                    } else {
                        context.multiply_all([q_down, kv_down], input, tokens, [&mut *low, &mut *k]);
                        norm_low(low);
                        context.multiply(q_up, &mut planes.low, tokens, q);
                    }
                } else {
                    context.multiply_all([q_up, kv_down], input, tokens, [&mut *q, &mut *k]);
                }
                pool.chunks_mut(&mut k[..tokens * key_dim], key_dim, &|t, row| {
                    let (latent, rotated) = row.split_at_mut(kv_rank);
                    norm(latent, kv_norm);
                    context.rotate(rotated, rope_dim, rows[t].position);
                });
                let q = &q[..tokens * heads];
                let queries = &mut planes.queries[..tokens * a.n_heads * key_dim];
                pool.chunks_mut(queries, a.n_heads * key_dim, &|t, row| {
                    let own = q[t * heads..(t + 1) * heads].chunks_exact(head_dim);
                    for (to, from) in row.chunks_exact_mut(key_dim).zip(own) {
                        let rotated = &mut to[kv_rank..];
                        rotated.copy_from_slice(&from[head_dim - rope_dim..]);
                        context.rotate(rotated, rope_dim, rows[t].position);
                    }
                });
                let input = HeadInput { x: q, stride: head_dim, coded: !context.exact };
                let k_up = context.weights.matrix(k_up);
                let scratch = &mut planes.scratch;
                head_matmul(pool, kernels, &k_up, a.n_heads, input, scratch, queries, key_dim);
            }
            (Projections::Heads { q: wq, k: wk, v: wv, bias, norm, gate }, _) => {
                context.multiply_all([wq, wk, wv], input, tokens, [&mut *q, &mut *k, &mut *v]);
                if let Some(gate) = gate {
                    context.multiply(gate, input, tokens, gates);
                }
                let [q_bias, k_bias, v_bias] =
                    bias.as_ref().map_or([None; 3], |bias| bias.each_ref().map(|bias| Some(&bias[..])));
                let [q_norm, k_norm] =
                    norm.as_ref().map_or([None; 2], |norm| norm.each_ref().map(|norm| Some(&norm[..])));
                let prepare =
                    |plane: &mut [f32], width: usize, bias: Option<&[f32]>, norm: Option<&[f32]>| {
                        pool.chunks_mut(&mut plane[..tokens * width], width, &|t, row| {
                            if let Some(bias) = bias {
                                kernels.add_in_place(row, bias);
                            }
                            if let Some(norm) = norm {
                                kernels.rms_norm_in_place(row, norm, eps);
                            }
                            context.rotate(row, head_dim, rows[t].position);
                        });
                    };
                prepare(q, heads, q_bias, q_norm);
                prepare(k, kv_heads, k_bias, k_norm);
                context.add_bias(&mut v[..tokens * kv_heads], v_bias);
            }
            (Projections::Latent { .. }, None) => unreachable!("a latent has its planes"),
            (Projections::Delta(_), _) => unreachable!("a gated delta net has its own way"),
        }
    }

    /// Appends a block of tokens to the cache.
    fn remember(&self, layer: usize, rows: &[Row], kv: &mut KvCache) {
        let Self { context, k, v, index, .. } = self;
        let a = &context.spec.attention;
        let (key_dim, head_dim) = (a.key_dim(), a.head_dim);
        for (t, row) in rows.iter().enumerate() {
            for head in 0..a.n_kv_heads {
                let at = t * a.n_kv_heads + head;
                let key = &k[at * key_dim..(at + 1) * key_dim];
                kv.append(context.kernels, layer, *row, (kv::Plane::Keys, head), key);
                if let Some(value) = v.get(at * head_dim..(at + 1) * head_dim) {
                    kv.append(context.kernels, layer, *row, (kv::Plane::Values, head), value);
                }
            }
        }
        if let Some(index) = index {
            index.remember(context, layer, rows, kv);
        }
    }

    /// Attention of a block of tokens, as far as the heads' outputs.
    fn mix(&mut self, layer: usize, rows: &[Row], kv: &KvCache) {
        let Self { context, q, latent, index, gates, mixed, attention, .. } = self;
        let (kernels, pool) = (context.kernels, &context.pool);
        if let Some(index) = index {
            index.choose(context, layer, rows, kv);
        }
        let index = index.as_ref();
        let a = &context.spec.attention;
        let tokens = rows.len();
        let weights = &context.weights.layers[layer];
        let window = context.spec.window(layer);
        let (bytes, geometry) = kv.memory(layer);
        let Some(keys) = geometry.plane(layer, kv::Plane::Keys) else { return };
        let values = geometry.plane(layer, kv::Plane::Values).unwrap_or(keys);
        let sight = |t: usize, head: usize| {
            let plane = |plane: PlaneGeometry| KvPlane {
                ty: kv.kv_type(),
                bytes,
                row_bytes: plane.row_bytes,
                block_stride: geometry.block_stride,
                head_offset: plane.head(head),
            };
            let table = kv.table(layer, rows[t].seq);
            let (keys, values) = (plane(keys), plane(values));
            let end = rows[t].position as usize + 1;
            Sight {
                blocks: KvBlocks { keys, values, table, block_positions: BLOCK },
                visible: window.map_or(0, |positions| end.saturating_sub(positions))..end,
                chosen: index.and_then(|index| index.chosen(t, end)),
            }
        };
        let shape = AttentionHeads {
            n_kv_heads: a.n_kv_heads,
            per_kv: a.n_heads / a.n_kv_heads,
            head_dim: a.key_dim(),
            value_dim: a.mixed_dim(),
            scale: 1.0 / (a.head_dim as f32).sqrt() * a.score_scale as f32,
            sinks: weights.sinks.as_deref(),
        };
        let out = mixed.fill(tokens * a.n_heads * a.value_dim());
        match (&weights.projections, latent) {
            (Projections::Latent { v_up, .. }, Some(planes)) => {
                let rank = shape.value_dim;
                let queries = &planes.queries[..tokens * a.n_heads * shape.head_dim];
                let latents = &mut planes.mixed[..tokens * a.n_heads * rank];
                smoe_kernels::attend(pool, kernels, &shape, queries, &sight, attention, latents);
                let input = HeadInput { x: latents, stride: rank, coded: !context.exact };
                let v_up = context.weights.matrix(v_up);
                let scratch = &mut planes.scratch;
                head_matmul(pool, kernels, &v_up, a.n_heads, input, scratch, out, a.value_dim());
            }
            _ => {
                let q = &q[..tokens * a.n_heads * a.head_dim];
                smoe_kernels::attend(pool, kernels, &shape, q, &sight, attention, out);
            }
        }
        if a.gate {
            let width = a.n_heads * a.value_dim();
            pool.chunks_mut(&mut gates[..tokens * width], width, &|_, row| kernels.sigmoid_in_place(row));
            let gates = &*gates;
            pool.chunks_mut(out, width, &|t, row| {
                kernels.mul_in_place(row, &gates[t * width..(t + 1) * width]);
            });
        }
    }

    /// One kernel call: `pieces` are (lease, tokens from, tokens to) of some experts, `pairs` in all.
    fn call(
        &mut self,
        table: usize,
        leases: &[Lease],
        pieces: &[(usize, usize, usize)],
        pairs: usize,
        routes: &Routes,
    ) {
        let in_order = self.wants_order(routes);
        let Self { context, normed, outputs, output_row, filled, scratch, biases, tokens, .. } = self;
        let (d, d_expert) = (context.spec.d_model, context.spec.moe.d_expert);
        let table = &context.experts[table];
        let layer = table.layer;
        let resident = match &context.weights.layers[table.layer as usize].ffn {
            LayerFfn::Moe { biases: Some(tensors), .. } => Some(tensors),
            _ => None,
        };
        if let Some(tensors) = resident {
            for (out, &(lease, ..)) in biases.chunks_exact_mut(2 * d_expert + d).zip(pieces) {
                let row = leases[lease].key().expert as usize;
                let mut rest = out;
                for tensor in tensors {
                    let (own, after) = rest.split_at_mut(tensor.cols);
                    context.kernels.decode_rows(&context.weights.matrix(tensor), row..row + 1, own);
                    rest = after;
                }
            }
        }
        let biases = &*biases;
        let calls: [_; CALL_EXPERTS] = std::array::from_fn(|i| {
            let i = i.min(pieces.len() - 1);
            let (lease, from, to) = pieces[i];
            let lease = &leases[lease];
            let bias = resident.map(|_| {
                let own = &biases[i * (2 * d_expert + d)..][..2 * d_expert + d];
                let (gate, rest) = own.split_at(d_expert);
                let (up, down) = rest.split_at(d_expert);
                ExpertBias { gate, up, down }
            });
            expert_call(table, lease, bias, &routes.of_expert(lease.key().expert).1[from..to])
        });
        let activation = context.spec.moe.activation;
        let calls = &calls[..pieces.len()];
        let first = *filled;
        for &(lease, from, to) in pieces {
            for &pair in &routes.of_expert(leases[lease].key().expert).0[from..to] {
                output_row[pair as usize] = *filled as u32;
                *filled += 1;
            }
        }
        let row = if in_order { 0 } else { first };
        let out = &mut outputs[row * d..(row + pairs) * d];
        context.with_input(&[calls[0].gate, calls[0].up], normed, *tokens, |input| {
            expert_ffn(&context.pool, context.kernels, calls, activation, input, scratch, out);
        });
        if let Some(observer) = &self.observer
            && let Ok(mut observer) = observer.lock()
        {
            self.show(&mut *observer, layer, leases, pieces, routes);
        }
        if in_order {
            self.accumulate(first, routes);
        }
    }

    /// Shows the experts of the kernel call that has just been made.
    fn show(
        &self,
        observer: &mut dyn ExpertObserver,
        layer: u32,
        leases: &[Lease],
        pieces: &[(usize, usize, usize)],
        routes: &Routes,
    ) {
        let Self { context, normed, scratch, tokens, .. } = self;
        let (d, d_expert) = (context.spec.d_model, context.spec.moe.d_expert);
        let mut first = 0;
        for &(lease, from, to) in pieces {
            let expert = leases[lease].key().expert;
            let (pairs, of) = routes.of_expert(expert);
            let weights: Vec<f32> = pairs[from..to]
                .iter()
                .zip(&of[from..to])
                .map(|(&pair, &token)| {
                    let (_, weights) = routes.of_token(token as usize);
                    weights[pair as usize % weights.len()]
                })
                .collect();
            let last = first + to - from;
            observer.expert(&ExpertSeen {
                layer,
                expert,
                tokens: &of[from..to],
                weights: &weights,
                inputs: &normed.x[..*tokens * d],
                hidden: &scratch.activated(last, d_expert)[first * d_expert..],
            });
            first = last;
        }
    }

    /// Adds to each token's sum, in ascending expert id, its weighted outputs among the pairs that were
    /// computed from the `first`-th on, whose outputs begin at row 0.
    fn accumulate(&mut self, first: usize, routes: &Routes) {
        let Self { context, sum, outputs, output_row, filled, tokens, .. } = self;
        let (d, kernels) = (context.spec.d_model, context.kernels);
        let (outputs, output_row) = (&*outputs, &*output_row);
        let computed = first..*filled;
        // Few tokens have pairs in a call, so several make a task.
        let step = SUM_TOKENS.min(tokens.div_ceil(context.pool.threads())).max(1);
        context.pool.chunks_mut(&mut sum[..*tokens * d], step * d, &|task, sums| {
            for (i, sum) in sums.chunks_exact_mut(d).enumerate() {
                let token = task * step + i;
                let (_, weights) = routes.of_token(token);
                let rows = &output_row[token * weights.len()..(token + 1) * weights.len()];
                for (&row, &weight) in rows.iter().zip(weights) {
                    if computed.contains(&(row as usize)) {
                        let row = row as usize - first;
                        kernels.scale_add(sum, &outputs[row * d..(row + 1) * d], weight);
                    }
                }
            }
        });
    }

    /// A SwiGLU of resident weights of all tokens, block by block: calls `take(first, rows)` with
    /// `down(silu(gate x) * up x)`, x being the normed hidden states, and the hidden states of those tokens.
    fn swiglu(&mut self, layer: usize, shared: bool, take: TakeRows<'_>) {
        let Self { context, hidden, input, gate, up, inner, delta, tokens, .. } = self;
        let d = context.spec.d_model;
        let weights = &context.weights.layers[layer];
        let Some(ffn) = resident_ffn(&context.weights, layer, shared) else { return };
        let width = ffn.gate.rows;
        for (i, hidden) in hidden[..*tokens * d].chunks_mut(BLOCK_TOKENS * d).enumerate() {
            let tokens = hidden.len() / d;
            context.norm(hidden, &weights.ffn_norm, input.fill(hidden.len()));
            context.multiply_all([&ffn.gate, &ffn.up], input, tokens, [&mut *gate, &mut *up]);
            let (gate, up) = (&*gate, &*up);
            context.pool.chunks_mut(inner.fill(tokens * width), width, &|t, out| {
                let row = t * width..(t + 1) * width;
                context.kernels.swiglu(&gate[row.clone()], &up[row], out);
            });
            context.multiply(&ffn.down, inner, tokens, delta);
            take(context, i * BLOCK_TOKENS, hidden, &delta[..tokens * d]);
        }
    }
}

fn resident_ffn(weights: &Weights, layer: usize, shared: bool) -> Option<&Ffn> {
    match &weights.layers[layer].ffn {
        LayerFfn::Dense(ffn) if !shared => Some(ffn),
        LayerFfn::Moe { shared: Some(ffn), .. } if shared => Some(ffn),
        _ => None,
    }
}

impl Backend for CpuBackend {
    fn embed(&mut self, tokens: &[u32]) -> Result<(), EngineError> {
        self.tokens = tokens.len();
        let Self { context, hidden, .. } = self;
        let embed = context.weights.matrix(&context.weights.embed);
        for (out, &token) in hidden.chunks_exact_mut(context.spec.d_model).zip(tokens) {
            let row = token as usize;
            context.kernels.decode_rows(&embed, row..row + 1, out);
            context.multiply_by(out, context.spec.multipliers.embedding);
        }
        Ok(())
    }

    fn attend(&mut self, layer: usize, rows: &[Row], kv: &mut KvCache) -> Result<(), EngineError> {
        let width = BLOCK_TOKENS * self.context.spec.d_model;
        let n = self.tokens * self.context.spec.d_model;
        let mut hidden = std::mem::take(&mut self.hidden);
        for (hidden, rows) in hidden[..n].chunks_mut(width).zip(rows.chunks(BLOCK_TOKENS)) {
            if self.context.spec.delta_of(layer).is_some() {
                self.renew(layer, hidden, rows, kv);
            } else {
                self.project(layer, hidden, rows);
                self.remember(layer, rows, kv);
                self.mix(layer, rows, kv);
            }
            let Self { context, mixed, delta, .. } = self;
            let weights = &context.weights.layers[layer];
            context.multiply(&weights.o, mixed, rows.len(), delta);
            let delta = &mut delta[..hidden.len()];
            context.add_bias(delta, weights.o_bias.as_deref());
            context.add_residual(hidden, delta);
        }
        self.hidden = hidden;
        Ok(())
    }

    fn dense(&mut self, layer: usize) -> Result<(), EngineError> {
        self.swiglu(layer, false, &mut |context, _, hidden, delta| context.add_residual(hidden, delta));
        Ok(())
    }

    fn route(&mut self, layer: usize) -> Result<&[f32], EngineError> {
        let n = self.tokens * self.context.spec.d_model;
        let weights = &self.context.weights.layers[layer];
        self.context.norm(&self.hidden[..n], &weights.ffn_norm, self.normed.fill(n));
        let len = self.tokens * self.context.spec.moe.n_experts;
        if let LayerFfn::Moe { router, router_bias, .. } = &weights.ffn {
            self.context.multiply(router, &mut self.normed, self.tokens, &mut self.router);
            self.context.add_bias(&mut self.router[..len], router_bias.as_deref());
        }
        Ok(&self.router[..len])
    }

    fn wants_order(&self, routes: &Routes) -> bool {
        routes.n_pairs() * self.context.spec.d_model > self.outputs.len()
    }

    fn begin(&mut self, layer: usize, routes: &Routes) -> Result<(), EngineError> {
        self.filled = 0;
        self.output_row[..routes.n_pairs()].fill(u32::MAX);
        if self.wants_order(routes) {
            self.sum[..self.tokens * self.context.spec.d_model].fill(0.0);
        }
        let mut shared = std::mem::take(&mut self.shared);
        self.swiglu(layer, true, &mut |context, first, _, delta| {
            shared[first * context.spec.d_model..][..delta.len()].copy_from_slice(delta);
        });
        self.shared = shared;
        if let LayerFfn::Moe { shared_scale: Some(scale), .. } = &self.context.weights.layers[layer].ffn {
            let weights = &mut self.shared_scale[..self.tokens];
            self.context.multiply(scale, &mut self.normed, self.tokens, weights);
            self.context.kernels.sigmoid_in_place(weights);
        }
        Ok(())
    }

    fn experts(&mut self, layer: usize, ready: &mut Vec<Lease>, routes: &Routes) -> Result<(), EngineError> {
        let found = self.context.experts.binary_search_by_key(&(layer as u32), |table| table.layer);
        let table = found.expect("an MoE layer has its table, as the vault was checked");
        // The next piece of work: an expert, and how many of its tokens have been served.
        let (mut lease, mut served) = (0, 0);
        while lease < ready.len() {
            let mut pieces = [(0, 0, 0); CALL_EXPERTS];
            let (mut n, mut pairs) = (0, 0);
            while n < CALL_EXPERTS && lease < ready.len() && pairs < CALL_PAIRS {
                let tokens = routes.of_expert(ready[lease].key().expert).1.len();
                let piece = (tokens - served).min(CALL_PAIRS - pairs);
                pieces[n] = (lease, served, served + piece);
                (n, pairs, served) = (n + 1, pairs + piece, served + piece);
                if served == tokens {
                    (lease, served) = (lease + 1, 0);
                }
            }
            self.call(table, ready, &pieces[..n], pairs, routes);
        }
        ready.clear();
        Ok(())
    }

    fn reclaim(&mut self) -> Result<bool, EngineError> {
        // Work is done when a verb returns.
        Ok(false)
    }

    fn finish(&mut self, layer: usize, routes: &Routes) -> Result<(), EngineError> {
        if !self.wants_order(routes) {
            self.sum[..self.tokens * self.context.spec.d_model].fill(0.0);
            self.accumulate(0, routes);
        }
        let Self { context, hidden, shared, shared_scale, sum, tokens, .. } = self;
        let d = context.spec.d_model;
        let sum = &mut sum[..*tokens * d];
        if context.spec.moe.shared_gate {
            let scale_add = |t: usize, sum: &mut [f32]| {
                context.kernels.scale_add(sum, &shared[t * d..(t + 1) * d], shared_scale[t]);
            };
            context.pool.chunks_mut(sum, d, &scale_add);
        } else if resident_ffn(&context.weights, layer, true).is_some() {
            context.add(sum, shared);
        }
        context.add_residual(&mut hidden[..*tokens * d], sum);
        Ok(())
    }

    fn head(&mut self, tokens: &[usize]) -> Result<&[f32], EngineError> {
        assert!(tokens.len() <= HEAD_ROWS, "{} rows of logits at once", tokens.len());
        let Self { context, hidden, head_input, logits, .. } = self;
        let d = context.spec.d_model;
        let input = head_input.fill(tokens.len() * d);
        for (row, &token) in input.chunks_exact_mut(d).zip(tokens) {
            let hidden = &hidden[token * d..(token + 1) * d];
            context.kernels.rms_norm(hidden, &context.weights.final_norm, context.spec.rms_norm_eps, row);
        }
        context.multiply(&context.weights.head, head_input, tokens.len(), logits);
        let logits = &mut logits[..tokens.len() * context.spec.vocab_size];
        context.multiply_by(logits, context.spec.multipliers.logits);
        Ok(logits)
    }

    fn watch_experts(&mut self, observer: Option<SharedObserver>) -> Result<(), EngineError> {
        self.observer = observer;
        Ok(())
    }

    fn hidden(&mut self) -> Result<&[f32], EngineError> {
        Ok(&self.hidden[..self.tokens * self.context.spec.d_model])
    }

    fn final_hidden(&mut self, token: usize) -> Result<&[f32], EngineError> {
        let Self { context, hidden, head_input, .. } = self;
        let d = context.spec.d_model;
        let out = head_input.fill(d);
        let hidden = &hidden[token * d..(token + 1) * d];
        context.kernels.rms_norm(hidden, &context.weights.final_norm, context.spec.rms_norm_eps, out);
        Ok(out)
    }
}

/// An expert's matrices where the disk put them, and tokens that it serves.
fn expert_call<'a>(
    table: &LayerTable,
    lease: &'a Lease,
    bias: Option<ExpertBias<'a>>,
    tokens: &'a [u32],
) -> ExpertCall<'a> {
    let bytes = lease.bytes();
    let [gate, up, down] =
        table.tensors.map(|t| Matrix::new(&bytes[t.offset..t.offset + t.len], t.rows, t.cols, t.encoding));
    ExpertCall { gate, up, down, bias, tokens }
}
