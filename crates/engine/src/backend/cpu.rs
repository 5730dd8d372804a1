//! The CPU backend: the verbs of a layer over a fork-join pool.
//!
//! Coded weights multiply int8 activations, float weights f32 ones; in exact mode f32 everywhere. Planes
//! are claimed once for the longest step.

use smoe_format::expert_file::LayerTable;
use smoe_format::{Encoding, FfnKind, ModelSpec, Uniform};
use smoe_kernels::{
    Activations, AttentionHeads, AttentionScratch, ExpertCall, ExpertScratch, Input, Kernels, KvBlocks,
    KvPlane, Matrix, Pool, Product, RopeStyle, Sight, expert_ffn, matmul, matmul_all,
};
use smoe_store::Lease;

use crate::EngineError;
use crate::backend::{Backend, HEAD_ROWS, Row};
use crate::kv::{self, BLOCK, KvCache};
use crate::plan::Plan;
use crate::rope::RopeTable;
use crate::routes::Routes;
use crate::weights::{Ffn, LayerFfn, Tensor, Weights};

/// Experts of one kernel call; a fork-join serves them all.
pub(crate) const CALL_EXPERTS: usize = 16;
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
    /// `[B, n_kv_heads * head_dim]`.
    k: Vec<f32>,
    /// `[B, n_kv_heads * head_dim]`.
    v: Vec<f32>,
    /// `[B, n_heads * head_dim]`, outputs of the heads.
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
        let block = t.min(BLOCK_TOKENS);
        let pairs = t * spec.moe.top_k;
        let call_pairs = pairs.min(CALL_PAIRS);
        let groups = groups(weights.tensors().map(|t| t.encoding), experts);
        let floats = exact || experts.iter().flat_map(|t| &t.tensors).any(|t| t.encoding.is_float());
        let plane = |tokens, cols| Plane::with_capacity(tokens, cols, &groups);
        let has_shared = spec.moe.d_shared > 0;
        Self {
            tokens: 0,
            hidden: vec![0.0; t * d],
            normed: plane(t, d),
            input: plane(block, d),
            q: vec![0.0; block * heads],
            k: vec![0.0; block * kv_heads],
            v: vec![0.0; block * kv_heads],
            mixed: plane(block, heads),
            delta: vec![0.0; block * d],
            gate: vec![0.0; block * width],
            up: vec![0.0; block * width],
            inner: plane(block, width),
            attention: AttentionScratch::new(plan.threads, a.head_dim, a.head_dim, plan.context),
            shared: vec![0.0; if has_shared { t * d } else { 0 }],
            router: vec![0.0; t * spec.moe.n_experts],
            outputs: vec![0.0; call_pairs * d],
            sum: vec![0.0; t * d],
            filled: 0,
            output_row: vec![0; pairs],
            scratch: ExpertScratch::with_capacity(call_pairs, d, spec.moe.d_expert, floats),
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
        let pairs = (t * spec.moe.top_k as u64).min(CALL_PAIRS as u64);
        let d_expert = spec.moe.d_expert as u64;
        let block = t.min(BLOCK_TOKENS as u64);
        // 4 bytes, and per int8 form 1 byte, and scale and sum per group of 16 and more.
        let plane = |values: u64| values * 4 + values * groups as u64 * 3 / 2;
        let whole = if spec.moe.d_shared > 0 { 3 } else { 2 };
        let floats = whole * t * d
            + t * spec.moe.n_experts as u64
            + block * (heads + 2 * kv_heads + d + 2 * width)
            + pairs * d
            + HEAD_ROWS as u64 * spec.vocab_size as u64
            + (threads * AttentionScratch::floats(a.head_dim, a.head_dim, context)) as u64;
        let planes = plane(t * d)
            + plane(block * d)
            + plane(block * heads)
            + plane(block * width)
            + plane(HEAD_ROWS as u64 * d);
        // Gathered tokens as f32 and int8, gate and up, and the hidden values of every pair.
        let scratch = plane(pairs * d) + pairs * d_expert * 8 + plane(pairs * d_expert);
        floats * 4 + planes + scratch + Routes::bytes(&spec.moe, chunk)
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
        let Self { context, normed, outputs, output_row, filled, scratch, tokens, .. } = self;
        let d = context.spec.d_model;
        let table = &context.experts[table];
        let calls: [_; CALL_EXPERTS] = std::array::from_fn(|i| {
            let (lease, from, to) = pieces[i.min(pieces.len() - 1)];
            let lease = &leases[lease];
            expert_call(table, lease, &routes.of_expert(lease.key().expert).1[from..to])
        });
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
            expert_ffn(&context.pool, context.kernels, calls, input, scratch, out);
        });
        if in_order {
            self.accumulate(first, routes);
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
        }
        Ok(())
    }

    fn attend(&mut self, layer: usize, rows: &[Row], kv: &mut KvCache) -> Result<(), EngineError> {
        let Self { context, hidden, input, q, k, v, mixed, delta, attention, tokens, .. } = self;
        let (kernels, pool) = (context.kernels, &context.pool);
        let spec = &context.spec;
        let a = spec.attention;
        let (head_dim, per_kv) = (a.head_dim, a.n_heads / a.n_kv_heads);
        let (heads, kv_heads) = (a.n_heads * head_dim, a.n_kv_heads * head_dim);
        let weights = &context.weights.layers[layer];
        let hidden = &mut hidden[..*tokens * spec.d_model];
        let blocks = hidden.chunks_mut(BLOCK_TOKENS * spec.d_model).zip(rows.chunks(BLOCK_TOKENS));
        for (hidden, rows) in blocks {
            let tokens = rows.len();
            context.norm(hidden, &weights.attn_norm, input.fill(hidden.len()));
            context.multiply_all([&weights.q, &weights.k, &weights.v], input, tokens, [&mut *q, &mut *k, v]);

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
                    let (key, value) = (&k[from..from + head_dim], &v[from..from + head_dim]);
                    kv.append(kernels, layer, *row, head, key, value);
                }
            }

            let kv = &*kv;
            let (bytes, geometry) = kv.memory();
            let sight = |t: usize, head: usize| {
                let plane = |plane| KvPlane {
                    ty: kv.kv_type(),
                    bytes,
                    row_bytes: geometry.row_bytes,
                    block_stride: geometry.block_stride,
                    head_offset: geometry.head(layer, plane, head),
                };
                let table = kv.blocks(rows[t].seq);
                let (keys, values) = (plane(kv::Plane::Keys), plane(kv::Plane::Values));
                Sight {
                    blocks: KvBlocks { keys, values, table, block_positions: BLOCK },
                    visible: 0..rows[t].position as usize + 1,
                }
            };
            let shape = AttentionHeads {
                n_kv_heads: a.n_kv_heads,
                per_kv,
                head_dim,
                value_dim: head_dim,
                scale: 1.0 / (head_dim as f32).sqrt(),
                sinks: None,
            };
            let (q, out) = (&q[..tokens * heads], mixed.fill(tokens * heads));
            smoe_kernels::attend(pool, kernels, &shape, q, &sight, attention, out);
            context.multiply(&weights.o, mixed, tokens, delta);
            context.add(hidden, delta);
        }
        Ok(())
    }

    fn dense(&mut self, layer: usize) -> Result<(), EngineError> {
        self.swiglu(layer, false, &mut |context, _, hidden, delta| context.add(hidden, delta));
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
        let Self { context, hidden, shared, sum, tokens, .. } = self;
        let sum = &mut sum[..*tokens * context.spec.d_model];
        if resident_ffn(&context.weights, layer, true).is_some() {
            context.add(sum, shared);
        }
        context.add(&mut hidden[..*tokens * context.spec.d_model], sum);
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

/// An expert's matrices where the disk put them, and tokens that it serves.
fn expert_call<'a>(table: &LayerTable, lease: &'a Lease, tokens: &'a [u32]) -> ExpertCall<'a> {
    let bytes = lease.bytes();
    let [gate, up, down] =
        table.tensors.map(|t| Matrix::new(&bytes[t.offset..t.offset + t.len], t.rows, t.cols, t.encoding));
    ExpertCall { gate, up, down, tokens }
}
