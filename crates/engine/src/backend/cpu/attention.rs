//! Attention: queries, keys and values of a block of tokens, the cache, and what the heads make of it.

use smoe_format::ModelSpec;
use smoe_format::spec::LatentSpec;
use smoe_kernels::{AttentionHeads, HeadInput, HeadScratch, KvBlocks, KvPlane, KvType, Sight, head_matmul};

use super::{CpuBackend, Plane};
use crate::backend::Row;
use crate::kv::{self, BLOCK, KvCache, PlaneGeometry};
use crate::weights::Projections;

/// What latent attention needs besides.
#[derive(Debug)]
pub(super) struct LatentPlanes {
    /// `[B, q_rank]`.
    low: Plane,
    /// `[B, n_heads * key_dim]`: queries that meet the latent, and their rotated part.
    queries: Vec<f32>,
    /// `[B, n_heads * kv_rank]`: what attention makes of the latent.
    mixed: Vec<f32>,
    scratch: HeadScratch,
}

impl LatentPlanes {
    pub(super) fn new(spec: &ModelSpec, latent: &LatentSpec, block: usize, groups: &[usize]) -> Self {
        let a = &spec.attention;
        Self {
            low: Plane::with_capacity(block, latent.q_rank, groups),
            queries: vec![0.0; block * a.n_heads * a.key_dim()],
            mixed: vec![0.0; block * a.n_heads * latent.kv_rank],
            scratch: HeadScratch::with_capacity(block, a.n_heads, Self::cols(spec, latent)),
        }
    }

    /// The widest input of a product head by head.
    pub(super) fn cols(spec: &ModelSpec, latent: &LatentSpec) -> usize {
        latent.kv_rank.max(spec.attention.head_dim - latent.rope_dim)
    }
}

/// Outputs of the heads of attention, or of a gated delta net.
pub(super) fn outputs_width(spec: &ModelSpec) -> usize {
    let a = &spec.attention;
    (a.n_heads * a.value_dim()).max(spec.delta.map_or(0, |delta| delta.values()))
}

/// Bytes of the rows that attention gathers where positions are chosen; a latent has one plane.
pub(super) fn gathered_bytes(spec: &ModelSpec, kv: KvType, context: usize) -> usize {
    let row_bytes = kv.row_bytes(spec.attention.key_dim());
    spec.attention.indexer.filter(|i| context > i.top_k).map_or(0, |indexer| indexer.top_k * row_bytes)
}

impl CpuBackend {
    /// Queries, and what is remembered, of a block of tokens.
    pub(super) fn project(&mut self, layer: usize, hidden: &[f32], rows: &[Row]) {
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
    pub(super) fn remember(&self, layer: usize, rows: &[Row], kv: &mut KvCache) {
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
    pub(super) fn mix(&mut self, layer: usize, rows: &[Row], kv: &KvCache) {
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
}
