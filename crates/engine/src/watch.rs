//! What is remembered of routing from token to token: for the instrument, and for what reads ahead.

use std::sync::Arc;

use smoe_format::ModelSpec;
use smoe_kernels::Kernels;
use smoe_meter::RouteMeter;
use smoe_store::replay::Trace;

use crate::backend::Row;
use crate::kv::SeqId;
use crate::routes::Routes;

/// Expert ids of the longest trace: 8 MB, ten thousand tokens of a model with 48 layers and 8 experts each.
const TRACE_IDS: usize = 4 << 20;

/// What experts ranked by for the last decoded token (router logits, if nothing corrects them), and the counters fed
/// from it.
#[derive(Debug)]
pub(crate) struct RouteWatch {
    meter: Arc<RouteMeter>,
    n_experts: usize,
    /// `[MoE layers, experts]`: of the last decoded token.
    last: Vec<f32>,
    /// Whose they are: a session and the position that continues it. None while a step runs.
    next: Option<(SeqId, u32)>,
    /// The running step continues what `last` is of.
    continues: bool,
    /// `[experts]`: of the look-ahead into the layer that comes.
    ahead: Vec<f32>,
    ahead_is_fresh: bool,
    trace: Option<Trace>,
    /// Ids of the running step, `[layer][token][top_k]`, while there is a trace.
    step_ids: Vec<u16>,
}

impl RouteWatch {
    pub(crate) fn new(spec: &ModelSpec) -> Self {
        let (layers, n_experts) = (spec.moe_layers().count(), spec.moe.n_experts);
        Self {
            meter: Arc::new(RouteMeter::new(layers, n_experts, spec.moe.top_k)),
            n_experts,
            last: vec![0.0; layers * n_experts],
            next: None,
            continues: false,
            ahead: vec![0.0; n_experts],
            ahead_is_fresh: false,
            trace: None,
            step_ids: Vec::new(),
        }
    }

    pub(crate) fn meter(&self) -> &Arc<RouteMeter> {
        &self.meter
    }

    /// Begins to write down every routing, or ends it and gives what was written.
    pub(crate) fn record(&mut self, trace: Option<Trace>) -> Option<Trace> {
        std::mem::replace(&mut self.trace, trace)
    }

    /// Keeps the look-ahead into the next MoE layer to be routed, the `index`-th.
    pub(crate) fn foretell(&mut self, kernels: Kernels, index: usize, logits: &[f32], routes: &Routes) {
        self.ahead.copy_from_slice(logits);
        routes.rank_by(kernels, index, &mut self.ahead);
        self.ahead_is_fresh = true;
    }

    /// What experts rank by in the look-ahead.
    pub(crate) fn ahead(&self) -> &[f32] {
        &self.ahead
    }

    /// What experts ranked by for the last decoded token at the `index`-th MoE layer.
    pub(crate) fn last(&self, index: usize) -> &[f32] {
        &self.last[index * self.n_experts..(index + 1) * self.n_experts]
    }

    /// The `index`-th MoE layer was routed for `rows` by `logits`.
    pub(crate) fn routed(
        &mut self,
        kernels: Kernels,
        index: usize,
        rows: &[Row],
        logits: &[f32],
        routes: &Routes,
    ) {
        for &expert in routes.union() {
            self.meter.used(index, expert as usize, routes.of_expert(expert).0.len());
        }
        if self.trace.is_some() {
            let tokens = (0..rows.len()).flat_map(|token| routes.of_token(token).0);
            self.step_ids.extend(tokens.map(|&expert| expert as u16));
        }
        let fresh = std::mem::take(&mut self.ahead_is_fresh);
        if rows.len() != 1 {
            return;
        }
        let last = &mut self.last[index * self.n_experts..(index + 1) * self.n_experts];
        let (experts, _) = routes.of_token(0);
        if self.continues {
            experts.iter().for_each(|&e| self.meter.rank_before(rank(last, e as usize)));
        }
        if fresh {
            experts.iter().for_each(|&e| self.meter.rank_ahead(rank(&self.ahead, e as usize)));
        }
        last.copy_from_slice(logits);
        routes.rank_by(kernels, index, last);
    }

    /// A step ended: what is kept belongs to its last row if it was a decoded token, else to nobody.
    pub(crate) fn end_step(&mut self, rows: &[Row]) {
        self.next = match rows {
            [row] => Some((row.seq, row.position + 1)),
            _ => None,
        };
        if let Some(trace) = &mut self.trace {
            // A trace that has reached its length stays as it is; else `push` takes what a step gives.
            let so_far = trace.n_tokens() as usize * trace.n_layers() * trace.top_k();
            if so_far + self.step_ids.len() <= TRACE_IDS {
                let _ = trace.push(rows.len() as u32, &self.step_ids);
            }
        }
        self.step_ids.clear();
    }

    /// A step of `rows` begins: what is kept of the token before is of use only if it continues it. Should the step
    /// fail, nothing is known of a token before.
    pub(crate) fn begin_step(&mut self, rows: &[Row]) {
        self.ahead_is_fresh = false;
        self.step_ids.clear();
        self.continues = self.next.take().is_some_and(|(seq, position)| *rows == [Row { seq, position }]);
    }
}

/// Experts with larger logits.
fn rank(logits: &[f32], expert: usize) -> usize {
    let own = logits[expert];
    logits.iter().filter(|&&l| l > own).count()
}
