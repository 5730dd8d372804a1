//! The CPU backend: the verbs of a layer over a fork-join pool.
//!
//! Coded weights multiply int8 activations, float weights f32 ones; in exact mode f32 everywhere. Planes
//! are claimed once for the longest step.

use std::sync::Mutex;

use smoe_format::expert_file::LayerTable;
use smoe_format::{Encoding, FfnKind, ModelSpec, Uniform};
use smoe_kernels::{
    Activations, ExpertCall, ExpertScratch, Input, Kernels, KvBlocks, KvPlane, Matrix, Pool, Product,
    RopeStyle, expert_ffn, matmul, matmul_all,
};
use smoe_store::Lease;

use crate::EngineError;
use crate::backend::{Backend, HEAD_ROWS, Row};
use crate::kv::{BLOCK, KvCache};
use crate::plan::Plan;
use crate::rope::RopeTable;
use crate::routes::Routes;
use crate::weights::{Ffn, LayerFfn, Tensor, Weights};

/// Experts of one kernel call; a fork-join serves them all.
const CALL_EXPERTS: usize = 16;
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
        let coded_groups = matrices.iter().filter_map(Matrix::uniform).map(Uniform::group);
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

    /// `x += y`, row by row.
    fn add(&self, x: &mut [f32], y: &[f32]) {
        let d = self.spec.d_model;
        self.pool.chunks_mut(x, d, &|t, x| self.kernels.add_in_place(x, &y[t * d..(t + 1) * d]));
    }
}

/// The CPU backend.
#[derive(Debug)]
pub struct CpuBackend {
    context: Context,
    tokens: usize,
    /// `[T, d_model]`.
    hidden: Vec<f32>,
    /// `[T, d_model]`, the input of attention or the feed-forward part.
    normed: Plane,
    /// `[T, n_heads * head_dim]`.
    q: Vec<f32>,
    /// `[T, n_kv_heads * head_dim]`.
    k: Vec<f32>,
    /// `[T, n_kv_heads * head_dim]`.
    v: Vec<f32>,
    /// `[T, n_heads * head_dim]`, outputs of the heads.
    mixed: Plane,
    /// `[T, d_model]`, what a verb adds to the hidden states.
    delta: Vec<f32>,
    /// `[T, width]` of dense layers and shared experts.
    gate: Vec<f32>,
    up: Vec<f32>,
    inner: Plane,
    /// Attention scores of one (token, KV head), one buffer per thread.
    scores: Vec<Mutex<Vec<f32>>>,
    /// `[T, n_experts]`.
    router: Vec<f32>,
    /// Outputs of (expert, token) pairs, in the order in which they were computed.
    outputs: Vec<f32>,
    /// `[T, d_model]`, weighted sums of `outputs`.
    sum: Vec<f32>,
    /// Rows of `outputs` that are filled.
    filled: usize,
    /// `[T, top_k]`: which row of `outputs` a pair got.
    output_row: Vec<u32>,
    scratch: ExpertScratch,
    /// `[HEAD_ROWS, d_model]`.
    head_input: Plane,
    /// `[HEAD_ROWS, vocab_size]`.
    logits: Vec<f32>,
}

/// Group sizes of all coded weights: as many int8 forms may an input have.
pub(crate) fn groups(resident: impl Iterator<Item = Encoding>, experts: &[LayerTable]) -> Vec<usize> {
    let routed = experts.iter().flat_map(|table| &table.tensors).map(|t| t.encoding);
    let mut groups: Vec<usize> = resident
        .chain(routed)
        .filter_map(|encoding| match encoding {
            Encoding::Uniform(u) => Some(u.group()),
            _ => None,
        })
        .collect();
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
        let pairs = t * spec.moe.top_k;
        let score_len = a.n_heads / a.n_kv_heads * plan.context;
        let groups = groups(weights.tensors().map(|t| t.encoding), experts);
        let floats = exact || experts.iter().flat_map(|t| &t.tensors).any(|t| t.encoding.is_float());
        let plane = |tokens, cols| Plane::with_capacity(tokens, cols, &groups);
        Self {
            tokens: 0,
            hidden: vec![0.0; t * d],
            normed: plane(t, d),
            q: vec![0.0; t * heads],
            k: vec![0.0; t * kv_heads],
            v: vec![0.0; t * kv_heads],
            mixed: plane(t, heads),
            delta: vec![0.0; t * d],
            gate: vec![0.0; t * width],
            up: vec![0.0; t * width],
            inner: plane(t, width),
            scores: (0..plan.threads).map(|_| Mutex::new(vec![0.0; score_len])).collect(),
            router: vec![0.0; t * spec.moe.n_experts],
            outputs: vec![0.0; pairs * d],
            sum: vec![0.0; t * d],
            filled: 0,
            output_row: vec![0; pairs],
            scratch: ExpertScratch::with_capacity(pairs, d, spec.moe.d_expert, floats),
            head_input: plane(HEAD_ROWS, d),
            logits: vec![0.0; HEAD_ROWS * spec.vocab_size],
            context: Context {
                rope: RopeTable::new(&spec.rope, a.head_dim, plan.context),
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
        chunk: usize,
        context: usize,
        threads: usize,
    ) -> u64 {
        let a = &spec.attention;
        let (t, d, width) = (chunk as u64, spec.d_model as u64, dense_width(spec) as u64);
        let heads = (a.n_heads * a.head_dim) as u64;
        let kv_heads = (a.n_kv_heads * a.head_dim) as u64;
        let pairs = t * spec.moe.top_k as u64;
        let d_expert = spec.moe.d_expert as u64;
        // 4 bytes, and per int8 form 1 byte, and scale and sum per group of 16 and more.
        let plane = |values: u64| values * 4 + values * groups as u64 * 3 / 2;
        let floats = 3 * t * d
            + t * (heads + 2 * kv_heads)
            + 2 * t * width
            + t * spec.moe.n_experts as u64
            + pairs * d
            + HEAD_ROWS as u64 * spec.vocab_size as u64
            + threads as u64 * (a.n_heads / a.n_kv_heads * context) as u64;
        let planes = plane(t * d) + plane(t * heads) + plane(t * width) + plane(HEAD_ROWS as u64 * d);
        // Gathered tokens as f32 and int8, gate and up, and the hidden values of every pair.
        let scratch = plane(pairs * d) + pairs * d_expert * 8 + plane(pairs * d_expert);
        floats * 4 + planes + scratch + Routes::bytes(&spec.moe, chunk)
    }

    /// A SwiGLU of resident weights: `delta = down(silu(gate x) * up x)` of `normed`.
    fn swiglu(&mut self, layer: usize, shared: bool) {
        let Self { context, normed, gate, up, inner, delta, tokens, .. } = self;
        let tokens = *tokens;
        let Some(ffn) = resident_ffn(&context.weights, layer, shared) else { return };
        let width = ffn.gate.rows;
        context.multiply_all([&ffn.gate, &ffn.up], normed, tokens, [&mut *gate, &mut *up]);
        let (gate, up) = (&*gate, &*up);
        context.pool.chunks_mut(inner.fill(tokens * width), width, &|t, out| {
            let row = t * width..(t + 1) * width;
            context.kernels.swiglu(&gate[row.clone()], &up[row], out);
        });
        context.multiply(&ffn.down, inner, tokens, delta);
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
        }
        Ok(())
    }

    fn attend(&mut self, layer: usize, rows: &[Row], kv: &mut KvCache) -> Result<(), EngineError> {
        let Self { context, hidden, normed, q, k, v, mixed, delta, scores, tokens, .. } = self;
        let (tokens, kernels, pool) = (*tokens, context.kernels, &context.pool);
        let spec = &context.spec;
        let a = spec.attention;
        let (head_dim, per_kv) = (a.head_dim, a.n_heads / a.n_kv_heads);
        let (heads, kv_heads) = (a.n_heads * head_dim, a.n_kv_heads * head_dim);
        let weights = &context.weights.layers[layer];
        let hidden = &mut hidden[..tokens * spec.d_model];

        context.norm(hidden, &weights.attn_norm, normed.fill(hidden.len()));
        context.multiply_all([&weights.q, &weights.k, &weights.v], normed, tokens, [&mut *q, &mut *k, v]);

        let prepare = |plane: &mut [f32], width: usize, norm: Option<&[f32]>| {
            pool.chunks_mut(&mut plane[..tokens * width], width, &|t, row| {
                if let Some(norm) = norm {
                    for head in row.chunks_exact_mut(head_dim) {
                        kernels.rms_norm_in_place(head, norm, spec.rms_norm_eps);
                    }
                }
                let position = rows[t].position as usize;
                let (cos, sin) = (context.rope.cos(position), context.rope.sin(position));
                kernels.rope(row, head_dim, cos, sin, RopeStyle::Half);
            });
        };
        let norms = weights.qk_norm.as_ref();
        prepare(q, heads, norms.map(|(q, _)| q.as_slice()));
        prepare(k, kv_heads, norms.map(|(_, k)| k.as_slice()));

        for (t, row) in rows.iter().enumerate() {
            for head in 0..a.n_kv_heads {
                let from = t * kv_heads + head * head_dim;
                kv.append(kernels, layer, *row, head, &k[from..from + head_dim], &v[from..from + head_dim]);
            }
        }

        let (keys, values, geometry) = kv.layer(layer);
        let scale = 1.0 / (head_dim as f32).sqrt();
        let (kv, q) = (&*kv, &*q);
        pool.chunks_mut(mixed.fill(tokens * heads), per_kv * head_dim, &|i, out| {
            let (t, head) = (i / a.n_kv_heads, i % a.n_kv_heads);
            let plane = |bytes| KvPlane {
                ty: kv.kv_type(),
                bytes,
                row_bytes: geometry.row_bytes,
                block_stride: geometry.block_stride,
                head_offset: head * geometry.head_stride,
            };
            let blocks = KvBlocks {
                keys: plane(keys),
                values: plane(values),
                table: kv.blocks(rows[t].seq),
                block_positions: BLOCK,
            };
            let queries = &q[t * heads + head * per_kv * head_dim..][..per_kv * head_dim];
            let visible = 0..rows[t].position as usize + 1;
            // As many buffers as threads: one is free.
            let free = scores.iter().find_map(|scores| scores.try_lock().ok());
            let Some(mut scores) = free else { unreachable!("more tasks at once than threads") };
            let scores = &mut scores[..per_kv * visible.len()];
            kernels.attention(queries, head_dim, blocks, visible, scale, None, scores, out);
        });
        context.multiply(&weights.o, mixed, tokens, delta);
        context.add(hidden, delta);
        Ok(())
    }

    fn dense(&mut self, layer: usize) -> Result<(), EngineError> {
        let n = self.tokens * self.context.spec.d_model;
        let norm = &self.context.weights.layers[layer].ffn_norm;
        self.context.norm(&self.hidden[..n], norm, self.normed.fill(n));
        self.swiglu(layer, false);
        self.context.add(&mut self.hidden[..n], &self.delta);
        Ok(())
    }

    fn route(&mut self, layer: usize) -> Result<&[f32], EngineError> {
        let n = self.tokens * self.context.spec.d_model;
        let weights = &self.context.weights.layers[layer];
        self.context.norm(&self.hidden[..n], &weights.ffn_norm, self.normed.fill(n));
        if let LayerFfn::Moe { router, .. } = &weights.ffn {
            self.context.multiply(router, &mut self.normed, self.tokens, &mut self.router);
        }
        Ok(&self.router[..self.tokens * self.context.spec.moe.n_experts])
    }

    fn begin(&mut self, layer: usize, _routes: &Routes) -> Result<(), EngineError> {
        self.filled = 0;
        self.swiglu(layer, true);
        Ok(())
    }

    fn experts(&mut self, layer: usize, ready: &mut Vec<Lease>, routes: &Routes) -> Result<(), EngineError> {
        let Self { context, normed, outputs, output_row, filled, scratch, tokens, .. } = self;
        let d = context.spec.d_model;
        let found = context.experts.binary_search_by_key(&(layer as u32), |table| table.layer);
        let table = &context.experts[found.expect("an MoE layer has its table, as the vault was checked")];
        for leases in ready.chunks(CALL_EXPERTS) {
            let calls: [_; CALL_EXPERTS] = std::array::from_fn(|i| {
                let lease = &leases[i.min(leases.len() - 1)];
                expert_call(table, lease, routes)
            });
            let calls = &calls[..leases.len()];
            let first = *filled;
            for lease in leases {
                for &pair in routes.of_expert(lease.key().expert).0 {
                    output_row[pair as usize] = *filled as u32;
                    *filled += 1;
                }
            }
            let out = &mut outputs[first * d..*filled * d];
            context.with_input(&[calls[0].gate, calls[0].up], normed, *tokens, |input| {
                expert_ffn(&context.pool, context.kernels, calls, input, scratch, out);
            });
        }
        ready.clear();
        Ok(())
    }

    fn reclaim(&mut self) -> Result<bool, EngineError> {
        // Work is done when a verb returns.
        Ok(false)
    }

    fn finish(&mut self, layer: usize, routes: &Routes) -> Result<(), EngineError> {
        let Self { context, hidden, delta, sum, outputs, output_row, tokens, .. } = self;
        let d = context.spec.d_model;
        let has_shared = resident_ffn(&context.weights, layer, true).is_some();
        let (kernels, delta) = (context.kernels, &*delta);
        let (sum, outputs) = (&mut sum[..*tokens * d], &*outputs);
        context.pool.chunks_mut(sum, d, &|t, sum| {
            let (_, weights) = routes.of_token(t);
            let rows = &output_row[t * weights.len()..(t + 1) * weights.len()];
            sum.fill(0.0);
            for (&row, &weight) in rows.iter().zip(weights) {
                kernels.scale_add(sum, &outputs[row as usize * d..(row as usize + 1) * d], weight);
            }
            if has_shared {
                kernels.add_in_place(sum, &delta[t * d..(t + 1) * d]);
            }
        });
        context.add(&mut hidden[..*tokens * d], sum);
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
        Ok(&logits[..tokens.len() * context.spec.vocab_size])
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

/// An expert's matrices where the disk put them, and its tokens.
fn expert_call<'a>(table: &LayerTable, lease: &'a Lease, routes: &'a Routes) -> ExpertCall<'a> {
    let bytes = lease.bytes();
    let [gate, up, down] =
        table.tensors.map(|t| Matrix::new(&bytes[t.offset..t.offset + t.len], t.rows, t.cols, t.encoding));
    let (_, tokens) = routes.of_expert(lease.key().expert);
    ExpertCall { gate, up, down, tokens }
}
