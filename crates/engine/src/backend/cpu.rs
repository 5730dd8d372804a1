//! The CPU backend: the verbs of a layer over a fork-join pool.
//!
//! Coded weights multiply int8 activations, float weights f32 ones; in exact mode f32 everywhere. Planes
//! are claimed once for the longest step.

mod attention;
mod context;
mod delta;
mod experts;
mod index;

use smoe_format::expert_file::LayerTable;
use smoe_format::{Encoding, FfnKind, ModelSpec, Uniform};
use smoe_kernels::{AttentionScratch, ExpertScratch, Kernels, KvType, Pool};
use smoe_store::Lease;

use crate::EngineError;
use crate::backend::input::Plane;
use crate::backend::{Backend, HEAD_ROWS, Row, SharedObserver};
use crate::kv::{self, KvCache};
use crate::plan::Plan;
use crate::rope::RopeTable;
use crate::routes::Routes;
use crate::weights::{Ffn, LayerFfn, Weights};
use attention::{LatentPlanes, gathered_bytes, outputs_width};
use context::Context;
use delta::DeltaPlanes;
pub(crate) use experts::CALL_EXPERTS;
#[cfg(feature = "gpu")]
pub(crate) use experts::expert_call;
use experts::{CALL_PAIRS, bias_values};
use index::IndexPlanes;

/// Tokens that projections, attention and dense layers take at once: their planes are as long, however long the
/// step.
const BLOCK_TOKENS: usize = 512;

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
    /// `[n_experts]`, of a layer that comes.
    foretold: Vec<f32>,
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
            foretold: vec![0.0; spec.moe.n_experts],
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

    fn foretell(&mut self, layer: usize) -> Result<Option<&[f32]>, EngineError> {
        // `input` is free between verbs, and so is not what experts read.
        let d = self.context.spec.d_model;
        let weights = &self.context.weights.layers[layer];
        let LayerFfn::Moe { router, router_bias, .. } = &weights.ffn else { return Ok(None) };
        self.context.norm(&self.hidden[..d], &weights.ffn_norm, self.input.fill(d));
        self.context.multiply(router, &mut self.input, 1, &mut self.foretold);
        self.context.add_bias(&mut self.foretold, router_bias.as_deref());
        Ok(Some(&self.foretold))
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
        self.call_all(layer, ready, routes);
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
