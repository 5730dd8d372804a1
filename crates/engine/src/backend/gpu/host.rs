//! Experts that the device lacks, computed by the processor where the ring has them.
//!
//! A step of a few tokens that halts waits for the host in any case. A missing expert that serves one token is read once
//! either way, and the processor reads memory faster than a bus moves it: so it computes it, of the halted layer's input, which
//! the device has handed back with its halt, and writes what comes out where the device's own experts have written
//! theirs. Coded products have the same bits on both. To the device goes what has been used more, of late, than
//! what it would give up ([`MARGIN`]). EXP-GPU-20.

use smoe_format::ModelSpec;
use smoe_format::expert_file::LayerTable;
use smoe_format::spec::Activation;
use smoe_kernels::{ExpertBias, ExpertScratch, Kernels, Pool, expert_ffn};
use smoe_store::Lease;

use crate::backend::cpu::{CALL_EXPERTS, expert_call, groups};
use crate::backend::input::Plane;
use crate::routes::Routes;
use crate::weights::{LayerFfn, Weights};

/// Uses of late by which an expert outweighs what the device would give up for it: a fifth to a twentieth of the misses do
/// where a quarter or less of the experts have room, and as many are found there afterwards as if each had been brought.
/// EXP-GPU-20.
pub(super) const MARGIN: f32 = 1.5;

/// What it takes to compute experts on the processor.
pub(super) struct HostExperts {
    kernels: Kernels,
    activation: Activation,
    tables: Vec<LayerTable>,
    /// By MoE layer: biases of each expert's gate, up and down; none if there are none.
    biases: Vec<Option<[Vec<f32>; 3]>>,
    /// Input of the halted layer.
    input: Plane,
    scratch: ExpertScratch,
    /// `[pairs, d_model]`.
    outputs: Vec<f32>,
    d_model: usize,
}

impl HostExperts {
    /// For steps of up to `few` tokens; `None` where the processor's bits are not the device's: float products sum in another
    /// order.
    pub(super) fn new(
        spec: &ModelSpec,
        weights: &Weights,
        tables: &[LayerTable],
        kernels: Kernels,
        few: usize,
    ) -> Option<Self> {
        let mut tensors = tables.iter().flat_map(|table| &table.tensors);
        if tables.is_empty() || tensors.any(|tensor| tensor.encoding.is_float()) {
            return None;
        }
        let groups = groups(std::iter::empty(), tables);
        let biases = spec.moe_layers().map(|layer| match &weights.layers[layer].ffn {
            LayerFfn::Moe { biases: Some(tensors), .. } => Some(tensors.each_ref().map(|tensor| {
                let mut values = vec![0.0; tensor.rows * tensor.cols];
                kernels.decode_rows(&weights.matrix(tensor), 0..tensor.rows, &mut values);
                values
            })),
            _ => None,
        });
        let (d_model, pairs) = (spec.d_model, few * spec.moe.top_k);
        Some(Self {
            kernels,
            activation: spec.moe.activation,
            tables: tables.to_vec(),
            biases: biases.collect(),
            input: Plane::with_capacity(few, d_model, &groups),
            scratch: ExpertScratch::with_capacity(pairs, d_model, spec.moe.d_expert, false),
            outputs: vec![0.0; pairs * d_model],
            d_model,
        })
    }

    /// The input of a halted layer, `[tokens, d_model]`, to be overwritten.
    pub(super) fn input(&mut self, tokens: usize) -> &mut [f32] {
        self.input.fill(tokens * self.d_model)
    }

    /// Computes experts of the `index`-th MoE layer, [`CALL_EXPERTS`] at a time: calls `take(pair, output)` for each of their
    /// (token, expert) pairs.
    pub(super) fn compute(
        &mut self,
        pool: &Pool,
        index: usize,
        tokens: usize,
        leases: &[Lease],
        routes: &Routes,
        mut take: impl FnMut(u32, &[f32]),
    ) {
        let Self { kernels, activation, tables, biases, input, scratch, outputs, d_model } = self;
        let (table, biases) = (&tables[index], &biases[index]);
        for leases in leases.chunks(CALL_EXPERTS) {
            let call = |lease| {
                let expert = Lease::key(lease).expert;
                let bias = biases.as_ref().map(|[gate, up, down]| ExpertBias {
                    gate: row_of(gate, expert, table),
                    up: row_of(up, expert, table),
                    down: row_of(down, expert, table),
                });
                expert_call(table, lease, bias, routes.of_expert(expert).1)
            };
            let calls: Vec<_> = leases.iter().map(call).collect();
            let Some(first) = calls.first() else { return };
            let pairs: usize = calls.iter().map(|call| call.tokens.len()).sum();
            let out = &mut outputs[..pairs * *d_model];
            input.with_forms(pool, *kernels, false, &[first.gate, first.up], tokens, |input| {
                expert_ffn(pool, *kernels, &calls, *activation, input, scratch, out);
            });
            let pairs = leases.iter().flat_map(|lease| routes.of_expert(lease.key().expert).0);
            pairs.zip(out.chunks_exact(*d_model)).for_each(|(&pair, out)| take(pair, out));
        }
    }
}

/// An expert's row of what every expert of a layer has one of.
fn row_of<'a>(values: &'a [f32], expert: u32, table: &LayerTable) -> &'a [f32] {
    let width = values.len() / table.n_experts as usize;
    &values[expert as usize * width..][..width]
}
