//! The experts of an MoE layer, its router and its shared expert; and dense parts, which are experts that every token visits.

use smoe_format::expert_file::{LayerTable, TensorEntry};
use smoe_format::{Encoding, Uniform};
use smoe_gpu::{
    Columns, ExpertLayout, FloatMatmul, GpuError, Hidden, Route, RouteInputs, RouteOutputs, RouterNorm,
    Slice, Weights as DeviceWeights, WorkList,
};
use smoe_kernels::Matrix;

use super::Builder;
use crate::EngineError;
use crate::backend::gpu::ops::{Gate, Input, Moe, Operands, Resident, SharedExpert};
use crate::weights::{Ffn, LayerFfn, Weights};

/// The experts of a layer, for binding.
pub(super) struct TierOf<'a> {
    /// Its number among the MoE layers.
    pub(super) index: usize,
    pub(super) table: &'a LayerTable,
    /// Slots that the device finds by itself, and where it is told of each expert.
    pub(super) memory: &'a Slice,
    pub(super) places: &'a Slice,
    /// Slots of the ring behind them, and how far those are apart.
    pub(super) behind: Option<(&'a Slice, u64)>,
    /// Slots that the host's lists name, by segment.
    pub(super) listed: &'a [Slice],
    pub(super) slot_bytes: u64,
    /// What the host writes for the experts that it names.
    pub(super) lists: &'a [WorkList],
    /// What the device writes.
    pub(super) own: &'a WorkList,
}

/// The norm before a layer's router, which can do it as well.
pub(super) struct OwnNorm<'a> {
    pub(super) weight: &'a Slice,
    /// Of what attention adds.
    pub(super) bias: Option<&'a Slice>,
    /// Whether the layer's entrance leaves the hidden states elsewhere if it has one token.
    pub(super) keeps: bool,
}

impl Builder<'_> {
    /// Router, experts and shared expert of a layer whose feed-forward part is `ffn`. `normed` is their input, by `norm`.
    pub(super) fn moe(
        &mut self,
        ffn: &LayerFfn,
        tier: TierOf<'_>,
        normed: &Input,
        norm: &OwnNorm<'_>,
    ) -> Result<Moe, EngineError> {
        let LayerFfn::Moe { router, router_bias, correction, shared, shared_scale, biases } = ffn else {
            unreachable!("a layer with a tier has experts")
        };
        let (host, t) = (self.weights, self.tokens);
        let TierOf { index, table, memory, listed, places, behind, slot_bytes, lists, own } = tier;
        let layout = ExpertLayout::new(table, slot_bytes).activated(self.spec.moe.activation);
        let layout = match biases {
            Some(biases) => layout.biased(self.up.rows(&biases.each_ref().map(|b| host.matrix(b)))?),
            None => layout,
        };
        let logits = self.planes.router.clone();
        let n_experts = self.spec.moe.n_experts;
        let matrix = self.up.matrix(&host.matrix(router))?;
        let mut router = Vec::new();
        self.products_of(&matrix, normed, t, &logits, n_experts, 0, &mut router)?;
        let whole = match matrix.parts.as_slice() {
            [part] if matrix.encoding.is_float() => {
                let bytes = part.bytes.clone();
                Some(DeviceWeights::new(bytes, part.rows, matrix.cols, matrix.encoding))
            }
            _ => None,
        };
        let shared = match shared {
            None => None,
            Some(ffn) => {
                let expert = self.resident(host, ffn, normed)?;
                let gate = match shared_scale {
                    None => None,
                    Some(scale) => Some(self.gate(host.matrix(scale), normed)?),
                };
                Some(SharedExpert { expert, gate })
            }
        };
        let operands = Operands {
            hidden: self.hidden(table, &layout, t * self.spec.moe.top_k)?,
            layout,
            input: Input { float: normed.float.clone(), coded: normed.coded.clone() },
            outputs: self.planes.outputs.clone(),
        };
        let bias = router_bias.as_ref().map(|bias| self.up.vector(bias)).transpose()?;
        let correction = (!correction.is_empty()).then(|| self.up.vector(correction)).transpose()?;
        // What the layer's own norm does.
        let norm = RouterNorm {
            hidden: &self.planes.hidden,
            before: norm.keeps.then_some(&self.planes.kept),
            weight: norm.weight,
            added: &self.planes.delta,
            bias: norm.bias,
            eps: self.spec.rms_norm_eps,
            residual: self.spec.multipliers.residual as f32,
            coded: normed.coded.first(),
        };
        let inputs = RouteInputs {
            logits: &logits,
            bias: bias.as_ref(),
            correction: correction.as_ref(),
            router: whole.as_ref().map(|weights| (weights, &normed.float)),
            norm: (normed.coded.len() <= 1).then_some(norm),
            slots: places,
        };
        let outputs = RouteOutputs {
            ids: &self.planes.ids,
            weights: &self.planes.route_weights,
            list: own,
            seen: Some((&self.planes.seen, index)),
        };
        let halt = (self.halt(), (index + 1) as f32);
        Ok(Moe {
            index,
            router,
            bias: router_bias.clone(),
            route: Route::halting(self.gpu, t, &self.spec.moe, inputs, outputs, Some(halt))?,
            own: operands.routed(self.gpu, own, memory, behind)?,
            list: own.clone(),
            lists: lists
                .iter()
                .flat_map(|list| listed.iter().map(move |memory| (list, memory)))
                .map(|(list, memory)| operands.routed(self.gpu, list, memory, None))
                .collect::<Result<_, _>>()?,
            lone: operands.with_shared(self.gpu, own, memory, behind, shared.as_ref())?,
            operands,
            shared,
            logits,
        })
    }

    /// Room for the hidden values of `pairs` pairs.
    fn hidden(
        &mut self,
        table: &LayerTable,
        layout: &ExpertLayout,
        pairs: usize,
    ) -> Result<Hidden, GpuError> {
        let group = table.tensors[2].encoding.tiles().map_or(0, Uniform::group);
        let is_apart = usize::from(!layout.is_fused());
        let key = [layout.d_expert(), group, pairs, is_apart];
        if let Some((_, hidden)) = self.hidden.iter().find(|(other, _)| *other == key) {
            return Ok(hidden.clone());
        }
        let hidden = Hidden::new(self.gpu, layout, pairs)?;
        self.hidden.push((key, hidden.clone()));
        Ok(hidden)
    }

    /// The gate of a shared expert: one row, in f32.
    fn gate(&mut self, matrix: Matrix<'_>, normed: &Input) -> Result<Gate, GpuError> {
        let mut row = vec![0.0; matrix.cols()];
        matrix.encoding().decode_row(matrix.bytes(), matrix.cols(), 0, &mut row);
        let bytes = self.up.vector(&row)?;
        let weights = DeviceWeights::new(bytes, 1, matrix.cols(), Encoding::F32);
        let out = Columns::whole(self.planes.gates.clone(), 1);
        let product = FloatMatmul::new(self.gpu, &weights, &normed.float, self.tokens, &out)?;
        Ok(Gate { weights, out, product })
    }

    /// A dense part or a shared expert.
    pub(super) fn resident(
        &mut self,
        host: &Weights,
        ffn: &Ffn,
        normed: &Input,
    ) -> Result<Resident, EngineError> {
        let matrices = [&ffn.gate, &ffn.up, &ffn.down].map(|tensor| host.matrix(tensor));
        if self.exact && matrices.iter().any(|m| m.tiles().is_some()) {
            let what = "exact products of coded dense parts on a GPU (--device cpu can)".to_owned();
            return Err(EngineError::Unsupported { what });
        }
        let mut at = 0;
        let tensors = matrices.map(|m| {
            let offset = at;
            at += m.bytes().len().next_multiple_of(64);
            TensorEntry {
                offset,
                len: m.bytes().len(),
                rows: m.rows(),
                cols: m.cols(),
                encoding: m.encoding(),
            }
        });
        let table = LayerTable { layer: 0, n_experts: 1, record_len: at, tensors };
        let record = self.up.record(&matrices, &tensors, at as u64)?;
        let layout = ExpertLayout::new(&table, at as u64);
        let list = match &self.everyone {
            Some(list) => list.clone(),
            None => {
                let list = WorkList::new(self.gpu, &layout, self.tokens, 1)?;
                self.everyone.insert(list).clone()
            }
        };
        let hidden = self.hidden(&table, &layout, self.tokens)?;
        let operands = Operands {
            layout,
            input: Input { float: normed.float.clone(), coded: normed.coded.clone() },
            hidden,
            outputs: self.planes.dense.clone(),
        };
        let kernels = operands.routed(self.gpu, &list, &record, None)?;
        Ok(Resident { operands, record, list, kernels })
    }
}
