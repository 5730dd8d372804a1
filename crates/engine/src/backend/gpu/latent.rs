//! Latent attention on a device: what stands between a layer's projections and the product of its outputs.
//!
//! Projections are absorbed as on the processor: `k_up` turns queries into ones that meet the latent, `v_up` makes outputs of
//! what attention made of it, both head by head; one row of the cache serves all heads.

use smoe_format::ModelSpec;
use smoe_format::spec::LatentSpec;
use smoe_gpu::{
    Angles, AttentionOutputs, CodedPlane, Gpu, GpuError, HeadColumns, HeadInput, HeadMatmul, HeadPlane,
    HeadTurn, LatentAppend, LatentAttention, LatentEntry, LatentExit, LatentInput, LatentLayout, LatentNorm,
    LatentQueries, LatentRow, Quantise, Rows, Slice, Step, Weights as DeviceWeights,
};
use smoe_kernels::{KvType, Matrix};

use super::build::{Builder, floats};
use super::ops::{Input, Product};
use super::plan::kv_format;
use crate::EngineError;
use crate::weights::Projections;

/// How the rows of a layer lie.
pub(super) fn layout(spec: &ModelSpec, kv: KvType) -> Option<LatentLayout> {
    let LatentSpec { kv_rank, rope_dim, .. } = spec.attention.latent?;
    Some(LatentLayout { format: kv_format(kv), kv_rank, rope_dim })
}

/// Whether there are kernels for heads of this shape.
pub(super) fn is_able(spec: &ModelSpec, latent: &LatentSpec) -> bool {
    // Layouts differ by the type in nothing that matters here.
    let fits = layout(spec, KvType::F32).is_some_and(|layout| layout.is_able(latent.q_rank));
    fits && (spec.attention.head_dim - latent.rope_dim).is_multiple_of(4)
}

/// Floats of a token in the planes of latent attention, besides those of any.
pub(super) fn plane_floats(spec: &ModelSpec) -> usize {
    let a = &spec.attention;
    a.latent.map_or(0, |latent| {
        let own = a.head_dim + a.head_dim - latent.rope_dim + latent.kv_rank + latent.value_dim;
        latent.q_rank + a.n_heads * own
    })
}

/// Planes that layers share.
pub(super) struct LatentPlanes {
    /// Latents of queries.
    low: Option<Input>,
    /// Queries before the first part of each meets the latent; those without a latent of their own come with the projections.
    q: Slice,
    /// That part, in the forms that matrices take.
    parts: Vec<HeadPlane>,
    /// What attention makes of the latent, in the forms that matrices take.
    latents: Vec<HeadPlane>,
}

impl LatentPlanes {
    pub(super) fn new(
        gpu: &Gpu,
        spec: &ModelSpec,
        tokens: usize,
        groups: &[usize],
    ) -> Result<Option<Self>, GpuError> {
        let a = &spec.attention;
        let Some(latent) = a.latent else { return Ok(None) };
        let has_low = latent.q_rank > 0;
        let q = if has_low { tokens * a.n_heads * a.head_dim } else { 0 };
        Ok(Some(Self {
            low: if has_low { Some(Input::new(gpu, tokens, latent.q_rank, groups)?) } else { None },
            q: gpu.buffer("queries of a latent", floats(q))?,
            parts: Vec::new(),
            latents: Vec::new(),
        }))
    }
}

/// The plane of this form among those that are there, made if it is new.
fn form(
    planes: &mut Vec<HeadPlane>,
    gpu: &Gpu,
    (tokens, heads, cols): (usize, usize, usize),
    group: Option<usize>,
) -> Result<HeadPlane, GpuError> {
    if let Some(plane) = planes.iter().find(|plane| plane.group() == group) {
        return Ok(plane.clone());
    }
    let plane = HeadPlane::new(gpu, tokens, heads, cols, group)?;
    planes.push(plane.clone());
    Ok(plane)
}

/// The kernels of a layer.
pub(super) struct Latent {
    append: LatentAppend,
    /// Queries of their latent; none if they come with the projections.
    q: Vec<Product>,
    input: HeadInput,
    k_up: HeadMatmul,
    attention: LatentAttention,
    /// What `v_up` takes, where attention does not leave it so.
    latents: Option<HeadInput>,
    v_up: HeadMatmul,
    /// What the outputs' product takes.
    quantise: Option<Quantise>,
    /// Of a lone token what `input` and `k_up` do, and `append` too if queries come with the projections.
    entry: Option<LatentEntry>,
    /// Of a lone token what joins its splits, and `v_up`.
    exit: Option<LatentExit>,
}

impl Latent {
    /// Records it for tokens that see at most `visible` positions, all below `end`; what the outputs' product takes is made if it `quantises`.
    pub(super) fn record(&self, step: &mut Step, tokens: usize, visible: usize, end: usize, quantises: bool) {
        let entry = self.entry.as_ref().filter(|_| tokens == 1);
        if entry.is_none() || !self.q.is_empty() {
            self.append.record(step, tokens);
        }
        self.q.iter().for_each(|product| product.record(step, tokens));
        match entry {
            Some(entry) => entry.record(step),
            None => {
                self.input.record(step, tokens);
                self.k_up.record(step, tokens);
            }
        }
        let joins = LatentExit::joins(end) && !self.attention.is_whole(end);
        match self.exit.as_ref().filter(|_| tokens == 1 && joins) {
            Some(exit) => {
                self.attention.record_splits(step, visible, end);
                exit.record(step);
            }
            None => {
                self.attention.record(step, tokens, visible, end);
                self.latents.iter().for_each(|input| input.record(step, tokens));
                self.v_up.record(step, tokens);
            }
        }
        self.quantise.iter().filter(|_| quantises).for_each(|quantise| quantise.record(step, tokens));
    }
}

impl<'a> Builder<'a> {
    /// A layer's, whose projections have `stride` columns: those that make queries, and behind them the row. `mixed` takes the outputs, as
    /// int8 in `coded` if the product is to have them so.
    pub(super) fn latent(
        &mut self,
        layer: usize,
        stride: usize,
        rows: Rows<'_>,
        angles: Angles<'_>,
        mixed: &Slice,
        coded: Option<&CodedPlane>,
    ) -> Result<Latent, EngineError> {
        let (gpu, host, t) = (self.gpu, self.weights, self.tokens);
        let a = self.spec.attention;
        let (
            Projections::Latent { q_down, q, kv_norm, k_up, v_up, .. },
            Some(spec),
            Some(planes),
            Some(layout),
        ) = (
            &host.layers[layer].projections,
            a.latent,
            self.planes.latent.take(),
            layout(self.spec, self.kv_type),
        )
        else {
            return Err(EngineError::Unsupported { what: "this attention on a GPU".to_owned() });
        };
        let mut planes = planes;
        let (heads, key_dim, kv_rank) = (a.n_heads, a.key_dim(), spec.kv_rank);
        let projected = self.planes.projected.clone();
        let (queries, cache) = (self.planes.queries.clone(), self.kv[layer].clone());
        let group = |matrix: &Matrix<'_>, exact: bool| matrix.tiles().filter(|_| !exact).map(|u| u.group());

        let mut norms = kv_norm.clone();
        let (mut q_products, mut low_queries) = (Vec::new(), None);
        let mut from = HeadColumns { plane: &projected, stride, at: 0, head_stride: a.head_dim };
        let q_matrix = host.matrix(q);
        if let (Some((_, q_norm)), Some(low)) = (q_down, &planes.low) {
            norms.extend_from_slice(q_norm);
            let wanted = q_matrix.tiles().filter(|_| !self.exact);
            let coded = wanted.and_then(|u| low.coded.iter().find(|plane| plane.suits(u, spec.q_rank)));
            let plane = coded.is_none().then_some(&low.float);
            low_queries = Some(LatentQueries { rank: spec.q_rank, at: 0, plane, coded });
            q_products = self.product(&[q_matrix], low, t, &planes.q, heads * a.head_dim)?;
            from = HeadColumns { plane: &planes.q, stride: heads * a.head_dim, ..from };
        }
        let norms = self.up.vector(&norms)?;
        let row_input = LatentInput {
            plane: &projected,
            stride,
            kv_at: stride - key_dim,
            queries: low_queries,
            norm: LatentNorm { weights: &norms, eps: spec.norm_eps },
            angles,
        };
        let append = LatentAppend::new(gpu, t, layout, row_input, rows, &cache)?;

        let k_up = host.matrix(k_up);
        let first = (t, heads, a.head_dim - spec.rope_dim);
        let part = form(&mut planes.parts, gpu, first, group(&k_up, self.exact))?;
        let turn = HeadTurn { angles, rows, queries: &queries, key_dim };
        let input = HeadInput::new(gpu, t, heads, first.2, from, Some(turn), &part)?;
        let weights = self.head_weights(&k_up)?;
        let row = LatentRow { kv: layout, input: row_input, cache: &cache };
        let row = q_products.is_empty().then_some(row);
        let entry = match self.exact {
            true => None,
            false => LatentEntry::new(gpu, &weights, heads, from, turn, row)?,
        };
        let k_up = HeadMatmul::new(gpu, &weights, heads, &part, t, &queries, key_dim)?;

        let v_up = host.matrix(v_up);
        let wanted = group(&v_up, self.exact);
        let shape = (t, heads, kv_rank);
        let of_heads = form(&mut planes.latents, gpu, shape, wanted)?;
        // Groups that heads do not share are those of all heads in a row.
        let whole = match &of_heads {
            HeadPlane::Coded(plane) if kv_rank.is_multiple_of(plane.group) => {
                Some(CodedPlane { tokens: t, cols: heads * kv_rank, ..plane.clone() })
            }
            _ => None,
        };
        let plane = match whole {
            Some(_) => None,
            None => Some(form(&mut planes.latents, gpu, shape, None)?),
        };
        let plane = plane.as_ref().and_then(|plane| match plane {
            HeadPlane::Float(plane) => Some(plane),
            HeadPlane::Coded(_) => None,
        });
        let scale = (a.score_scale / (a.head_dim as f64).sqrt()) as f32;
        let outputs = AttentionOutputs { plane, coded: whole.as_ref(), gate: None };
        let scratch = &self.planes.scratch.clone();
        let attention =
            LatentAttention::new(gpu, t, layout, heads, scale, &queries, &cache, rows, scratch, outputs)?;
        let latents = match plane.filter(|_| wanted.is_some()) {
            Some(plane) => {
                let from = HeadColumns { plane, stride: heads * kv_rank, at: 0, head_stride: kv_rank };
                Some(HeadInput::new(gpu, t, heads, kv_rank, from, None, &of_heads)?)
            }
            None => None,
        };
        let weights = self.head_weights(&v_up)?;
        let exit = match self.exact {
            true => None,
            false => LatentExit::new(gpu, &weights, heads, scratch, rows, mixed, a.value_dim())?,
        };
        let v_up = HeadMatmul::new(gpu, &weights, heads, &of_heads, t, mixed, a.value_dim())?;
        let quantise = coded.map(|coded| Quantise::new(gpu, mixed, coded)).transpose()?;
        let latent =
            Latent { append, q: q_products, input, k_up, attention, latents, v_up, quantise, entry, exit };
        self.planes.latent = Some(planes);
        Ok(latent)
    }

    /// A matrix of every head's.
    fn head_weights(&mut self, matrix: &Matrix<'_>) -> Result<DeviceWeights, EngineError> {
        let uploaded = self.up.matrix(matrix)?;
        let [part] = uploaded.parts.as_slice() else {
            let what = format!("a matrix of heads of {} bytes on this device", matrix.bytes().len());
            return Err(EngineError::Unsupported { what });
        };
        Ok(DeviceWeights::new(part.bytes.clone(), part.rows, matrix.cols(), matrix.encoding()))
    }
}
