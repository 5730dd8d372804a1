//! Routed experts: kernel calls of some of them at once, and the sums of what they made.

use smoe_format::ModelSpec;
use smoe_format::expert_file::LayerTable;
use smoe_kernels::{ExpertBias, ExpertCall, Matrix, expert_ffn};
use smoe_store::Lease;

use super::CpuBackend;
use crate::backend::{Backend, ExpertObserver, ExpertSeen};
use crate::routes::Routes;
use crate::weights::LayerFfn;

/// Experts of one kernel call; a fork-join serves them all. A layer's experts of a step of eight clients are one or two
/// calls (EXP-ENGINE-05).
pub(crate) const CALL_EXPERTS: usize = 32;
/// (expert, token) pairs of one kernel call: bounds the memory of a prefill, whatever its length.
pub(super) const CALL_PAIRS: usize = 1024;
/// Tokens of a task that sums expert outputs.
const SUM_TOKENS: usize = 16;

/// Biases of the experts of a kernel call.
pub(super) fn bias_values(spec: &ModelSpec) -> usize {
    let moe = &spec.moe;
    if moe.expert_bias { CALL_EXPERTS * (2 * moe.d_expert + spec.d_model) } else { 0 }
}

impl CpuBackend {
    /// Computes experts that are ready, in as many kernel calls as they need.
    pub(super) fn call_all(&mut self, layer: usize, ready: &[Lease], routes: &Routes) {
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
    pub(super) fn accumulate(&mut self, first: usize, routes: &Routes) {
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
}

/// An expert's matrices where the disk put them, and tokens that it serves.
pub(crate) fn expert_call<'a>(
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
