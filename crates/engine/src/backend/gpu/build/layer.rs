//! A layer: norm, projections, attention or what stands in its place, and what they add.

use smoe_format::Encoding;
use smoe_format::expert_file::LayerTable;
use smoe_gpu::{
    Angles, Attention, AttentionGate, AttentionHeads, AttentionOutputs, CodedPlane, Columns, Delta,
    OwnMatmul, Projections as Projected, QkNorm, RopeAppend, RopeInput, RopePairs, Rows, Slice,
    Weights as DeviceWeights,
};
use smoe_kernels::Matrix;

use super::Builder;
use super::experts::{OwnNorm, TierOf};
use crate::EngineError;
use crate::backend::gpu::ops::{Input, Layer, LayerOps, Lone, Mixer};
use crate::backend::gpu::weights::stackable;
use crate::weights::{Delta as DeltaTensors, Ffn, LayerFfn, LayerWeights, Projections, Weights};

/// The weights that the input of a feed-forward part is multiplied by.
fn multiplied(ffn: &LayerFfn, experts: Option<&LayerTable>) -> Vec<Encoding> {
    let of = |ffn: &Ffn| [ffn.gate.encoding, ffn.up.encoding];
    match ffn {
        LayerFfn::Dense(dense) => of(dense).into(),
        LayerFfn::Moe { router, shared, .. } => {
            let routed = experts.iter().flat_map(|table| &table.tensors[..2]).map(|tensor| tensor.encoding);
            routed.chain(shared.iter().flat_map(of)).chain([router.encoding]).collect()
        }
    }
}

impl<'a> Builder<'a> {
    /// A layer; `tier` if it is an MoE layer.
    pub(super) fn layer(&mut self, layer: usize, tier: Option<TierOf<'_>>) -> Result<Layer, EngineError> {
        let weights: &'a LayerWeights = &self.weights.layers[layer];
        let host: &'a Weights = self.weights;
        let matrices: Vec<Matrix<'a>> = match &weights.projections {
            Projections::Heads { q, k, v, gate, .. } => {
                [q, k, v].into_iter().chain(gate).map(|w| host.matrix(w)).collect()
            }
            Projections::Latent { q_down, q, kv_down, .. } => {
                [q_down.as_ref().map_or(q, |(down, _)| down), kv_down].map(|w| host.matrix(w)).into()
            }
            Projections::Delta(delta) => {
                let DeltaTensors { q, k, v, gate, beta, decay, .. } = &**delta;
                [q, k, v, gate, beta, decay].map(|w| host.matrix(w)).into()
            }
        };
        let rows: usize = matrices.iter().map(Matrix::rows).sum();
        // Four columns are one vector where states are asked.
        let stride = rows.next_multiple_of(if self.spec.delta_of(layer).is_some() { 4 } else { 1 });
        let (t, d) = (self.tokens, self.spec.d_model);

        let norm_weight = self.up.vector(&weights.attn_norm)?;
        let encodings: Vec<Encoding> = matrices.iter().map(Matrix::encoding).collect();
        let input = self.planes.input.for_weights(&encodings);
        let enter = self.norm(&norm_weight, self.delta_before(layer), None, t, &input)?;
        let enter_plain = self.norm(&norm_weight, Delta::None, None, t, &input)?;

        let projected = self.planes.projected.clone();
        let stacked = if stackable(&matrices) { Some(self.up.stack(&matrices)?) } else { None };
        let stacks = match &stacked {
            Some(stacked) => vec![(stacked.clone(), 0)],
            None => self.stacks(&matrices)?,
        };
        let mut qkv = Vec::new();
        for (matrix, offset) in &stacks {
            self.products_of(matrix, &input, t, &projected, stride, *offset, &mut qkv)?;
        }
        let lone_qkv = self.beside(&stacks, &input, &projected, stride)?;
        // Between them the router's norm has what is kept.
        let lone = match &stacked {
            Some(stacked) if matches!(weights.ffn, LayerFfn::Moe { .. }) => {
                let made = |delta| self.norm_product(&norm_weight, delta, stacked, &projected, stride);
                let (enter, enter_plain) = (made(self.delta_before(layer))?, made(Delta::None)?);
                enter.zip(enter_plain).map(|(enter, enter_plain)| Lone { enter, enter_plain })
            }
            _ => None,
        };
        let mixed = match (&weights.projections, &self.planes.net) {
            (Projections::Delta(_), Some(net)) => &net.mixed,
            _ => &self.planes.mixed,
        };
        let mixed = Input { float: mixed.float.clone(), coded: mixed.coded.clone() };
        let wanted = host.matrix(&weights.o).tiles().filter(|_| !self.exact);
        let coded = wanted.and_then(|u| mixed.coded.iter().find(|plane| plane.suits(u, weights.o.cols)));
        let mixer = self.mixer(layer, stride, &mixed, coded)?;
        let delta = self.planes.delta.clone();
        let o_matrix = self.up.matrix(&host.matrix(&weights.o))?;
        let mut o = Vec::new();
        self.products_of(&o_matrix, &mixed, t, &delta, d, 0, &mut o)?;
        // Others' outputs come as int8.
        let lone_o = match (&mixer, o_matrix.parts.as_slice(), coded) {
            (Mixer::Latent(_), [part], Some(_)) => {
                let (cols, encoding) = (o_matrix.cols, o_matrix.encoding);
                let matrix = DeviceWeights::new(part.bytes.clone(), part.rows, cols, encoding);
                OwnMatmul::new(self.gpu, &matrix, &mixed.float, &Columns::whole(delta.clone(), d))?
            }
            _ => None,
        };
        let o_bias = weights.o_bias.as_ref().map(|bias| self.up.vector(bias)).transpose()?;
        let norm_weight = self.up.vector(&weights.ffn_norm)?;
        let added = Delta::Plane(&self.planes.delta, o_bias.as_ref());
        let normed =
            self.planes.normed.for_weights(&multiplied(&weights.ffn, tier.as_ref().map(|tier| tier.table)));
        let leave = self.norm(&norm_weight, added, None, t, &normed)?;

        let ops = match &weights.ffn {
            LayerFfn::Dense(ffn) => LayerOps::Dense(Box::new(self.resident(host, ffn, &normed)?)),
            ffn @ LayerFfn::Moe { .. } => {
                let tier = tier.expect("an MoE layer has its table");
                let norm = OwnNorm { weight: &norm_weight, bias: o_bias.as_ref(), keeps: lone.is_some() };
                LayerOps::Moe(Box::new(self.moe(ffn, tier, &normed, &norm)?))
            }
        };
        let window = self.spec.window(layer).unwrap_or(usize::MAX);
        Ok(Layer { enter, enter_plain, qkv, lone_qkv, lone, mixer, window, o, lone_o, leave, ops })
    }

    /// What is between a layer's projections and the product of its outputs, which come to `mixed`, or as int8 to `coded`.
    fn mixer(
        &mut self,
        layer: usize,
        stride: usize,
        mixed: &Input,
        coded: Option<&CodedPlane>,
    ) -> Result<Mixer, EngineError> {
        let window = self.spec.window(layer).unwrap_or(usize::MAX);
        let row_buffer = self.planes.rows.iter().find(|rows| rows.window == window);
        let (row_words, tables, angle_table) = (
            row_buffer.expect("every window has its rows").rows.clone(),
            self.planes.tables.clone(),
            self.planes.angles.clone(),
        );
        let rows = Rows { rows: &row_words, tables: &tables };
        let angles = Angles {
            table: &angle_table,
            positions: self.context,
            dim: self.spec.rope_dim(),
            pairs: if self.spec.rope.interleaved { RopePairs::Neighbours } else { RopePairs::Halves },
        };
        Ok(match &self.weights.layers[layer].projections {
            Projections::Heads { bias, norm, .. } => {
                self.heads(layer, bias.as_ref(), norm.as_ref(), stride, rows, angles, &mixed.float, coded)?
            }
            Projections::Delta(delta) => {
                Mixer::Delta(Box::new(self.delta(layer, delta, stride, &mixed.float, coded)?))
            }
            Projections::Latent { .. } => {
                Mixer::Latent(Box::new(self.latent(layer, stride, rows, angles, &mixed.float, coded)?))
            }
        })
    }

    /// Queries, keys and values of heads of their own, and attention over them, of a layer.
    fn heads(
        &mut self,
        layer: usize,
        bias: Option<&[Vec<f32>; 3]>,
        norm: Option<&[Vec<f32>; 2]>,
        stride: usize,
        rows: Rows<'_>,
        angles: Angles<'_>,
        mixed: &Slice,
        coded: Option<&CodedPlane>,
    ) -> Result<Mixer, EngineError> {
        let a = self.spec.attention;
        let (heads, kv_heads) = (a.n_heads * a.head_dim, a.n_kv_heads * a.head_dim);
        let (t, projected) = (self.tokens, self.planes.projected.clone());
        let padded = |bias: &[Vec<f32>; 3]| {
            let mut all = bias.concat();
            all.resize(stride, 0.0);
            all
        };
        let bias = bias.map(|bias| self.up.vector(&padded(bias))).transpose()?;
        let norms = norm.map(|norm| self.up.vector(&norm.concat())).transpose()?;
        let rope_input = RopeInput {
            projections: Projected {
                plane: &projected,
                stride,
                at: [0, heads, heads + kv_heads],
                bias: bias.as_ref(),
            },
            norm: norms.as_ref().map(|weights| QkNorm {
                weights,
                eps: self.spec.rms_norm_eps,
                whole: a.qk_norm_whole,
            }),
            angles,
        };
        let sinks = &self.weights.layers[layer].sinks;
        let sinks = sinks.as_ref().map(|sinks| self.up.vector(sinks)).transpose()?;
        let (queries, cache) = (&self.planes.queries, &self.kv[layer]);
        let rope = RopeAppend::new(self.gpu, t, a.n_heads, self.kv_layout, rope_input, rows, queries, cache)?;
        let attention = Attention::new(
            self.gpu,
            t,
            self.kv_layout,
            AttentionHeads {
                n_heads: a.n_heads,
                scale: (a.score_scale / (a.head_dim as f64).sqrt()) as f32,
                sinks: sinks.as_ref(),
            },
            queries,
            cache,
            rows,
            &self.planes.scratch,
            AttentionOutputs {
                plane: coded.is_none().then_some(mixed),
                coded,
                // Behind queries, keys and values.
                gate: a.gate.then_some(AttentionGate { plane: &projected, stride, at: heads + 2 * kv_heads }),
            },
            Some(rope_input),
        )?;
        Ok(Mixer::Heads { rope, attention: Box::new(attention) })
    }
}
