//! Layers whose attention is linear: a gated delta net (Yang, Kautz, Hatamizadeh 2024) over the states of the sequences.

use smoe_kernels::{DeltaInput, DeltaMark, DeltaRun, DeltaScratch, DeltaShape, delta_net};

use super::CpuBackend;
use crate::backend::Row;
use crate::kv::KvCache;
use crate::weights::Projections;

/// What gated delta nets need besides.
#[derive(Debug)]
pub(super) struct DeltaPlanes {
    shape: DeltaShape,
    /// `[B, n_key_heads * key_dim]`.
    q: Vec<f32>,
    k: Vec<f32>,
    /// `[B, n_value_heads * value_dim]`.
    v: Vec<f32>,
    gate: Vec<f32>,
    /// The same: what was asked of the states.
    found: Vec<f32>,
    /// `[B, n_value_heads]`.
    beta: Vec<f32>,
    decay: Vec<f32>,
    runs: Vec<DeltaRun>,
    marks: Vec<DeltaMark>,
    scratch: DeltaScratch,
}

impl DeltaPlanes {
    pub(super) fn new(shape: DeltaShape, block: usize, snapshots: usize) -> Self {
        let (keys, values) = (shape.n_key_heads * shape.key_dim, shape.n_value_heads * shape.value_dim);
        let plane = |width: usize| vec![0.0; block * width];
        Self {
            shape,
            q: plane(keys),
            k: plane(keys),
            v: plane(values),
            gate: plane(values),
            found: plane(values),
            beta: plane(shape.n_value_heads),
            decay: plane(shape.n_value_heads),
            runs: Vec::with_capacity(block),
            marks: Vec::with_capacity(snapshots),
            scratch: DeltaScratch::new(&shape),
        }
    }

    /// f32 of it.
    pub(super) fn floats(shape: &DeltaShape, block: usize) -> usize {
        let (keys, values) = (shape.n_key_heads * shape.key_dim, shape.n_value_heads * shape.value_dim);
        block * (2 * keys + 3 * values + 2 * shape.n_value_heads) + DeltaScratch::floats(shape)
    }
}

impl CpuBackend {
    /// A gated delta net over a block of tokens, as far as the heads' outputs.
    pub(super) fn renew(&mut self, layer: usize, hidden: &[f32], rows: &[Row], kv: &mut KvCache) {
        let Self { context, input, net, mixed, .. } = self;
        let (kernels, pool, tokens) = (context.kernels, &context.pool, rows.len());
        let weights = &context.weights.layers[layer];
        let (Projections::Delta(delta), Some(planes)) = (&weights.projections, net) else {
            unreachable!("a gated delta net has its planes");
        };
        let DeltaPlanes { shape, q, k, v, gate, found, beta, decay, runs, marks, scratch } = planes;
        context.norm(hidden, &weights.attn_norm, input.fill(hidden.len()));
        let matrices = [&delta.q, &delta.k, &delta.v, &delta.gate, &delta.beta, &delta.decay];
        let [keys, _, values, _, heads, _] = matrices.map(|matrix| matrix.rows);
        context.multiply_all(
            matrices,
            input,
            tokens,
            [&mut *q, &mut *k, &mut *v, &mut *gate, &mut *beta, &mut *decay],
        );
        let planes = DeltaInput {
            q: &q[..tokens * keys],
            k: &k[..tokens * keys],
            v: &v[..tokens * values],
            beta: &beta[..tokens * heads],
            decay: &decay[..tokens * heads],
        };
        let memory =
            kv.states_of(layer, rows, runs, marks).expect("a model with such layers has their states");
        let found = &mut found[..tokens * values];
        delta_net(pool, kernels, shape, &delta.weights, planes, memory, runs, marks, scratch, found);
        let (norm, eps) = (&delta.norm, context.spec.rms_norm_eps);
        pool.chunks_mut(found, values, &|_, row| kernels.rms_norm_in_place(row, norm, eps));
        let (gate, found) = (&*gate, &*found);
        pool.chunks_mut(mixed.fill(tokens * values), values, &|t, out| {
            let row = t * values..(t + 1) * values;
            kernels.swiglu(&gate[row.clone()], &found[row], out);
        });
    }
}
