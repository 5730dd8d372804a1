//! The CUDA backend: all layers of a token as one graph, every expert in the card's memory.
//!
//! Steps of several tokens replay it for each. Whatever asks for a layer by itself (statistics, experts that are not on
//! the card) is refused: the other backends do that.

use std::sync::Arc;
use std::time::Instant;

use smoe_cuda::{Cuda, KvKind, LayerParts, MatrixBytes, Model, Place, Shape, Slots, bits, has_product};
use smoe_format::expert_file::LayerTable;
use smoe_format::spec::{Activation, RouterKind};
use smoe_format::{Encoding, FfnKind, ModelSpec};
use smoe_gpu::{DeviceFacts, DeviceKind};
use smoe_kernels::KvType;
use smoe_meter::TierMeter;
use smoe_store::Lease;

use crate::EngineError;
use crate::backend::{Advanced, Backend, DeviceTier, HEAD_ROWS, Row};
use crate::device::DevicePlan;
use crate::kv::{BLOCK, BlockCopy, KvCache};
use crate::plan::Plan;
use crate::rope::RopeTable;
use crate::routes::Routes;
use crate::weights::{LayerFfn, LayerWeights, Projections, Tensor, Weights};

/// The CUDA backend.
pub struct CudaBackend {
    model: Model,
    spec: ModelSpec,
    plan: DevicePlan,
    meter: Arc<TierMeter>,
    /// Tokens of the step.
    tokens: Vec<u32>,
    /// They are computed.
    computed: bool,
    places: Vec<Place>,
    tables: Vec<u32>,
    /// Router logits, `[layers, tokens, experts]`.
    router: Vec<f32>,
    /// The tokens whose logits these are.
    headed: Vec<usize>,
    hidden: Vec<f32>,
}

impl std::fmt::Debug for CudaBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CudaBackend").field("plan", &self.plan).finish_non_exhaustive()
    }
}

/// The card as plans see it.
pub(crate) fn facts(cuda: &Cuda) -> DeviceFacts {
    let facts = cuda.facts();
    DeviceFacts {
        name: facts.name.clone(),
        api: "cuda",
        driver: format!("compute capability {}.{}", facts.capability.0, facts.capability.1),
        kind: DeviceKind::Discrete,
        subgroup: (32, 32),
        memory: Some(facts.memory),
        max_binding: u64::MAX,
        max_buffer: u64::MAX,
        unusable: None,
    }
}

/// Why a model cannot run; `None` if it can, as far as its spec and its experts tell.
pub(crate) fn unsupported(spec: &ModelSpec, exact: bool, tables: &[LayerTable]) -> Option<&'static str> {
    let (a, moe) = (&spec.attention, &spec.moe);
    let coded = |table: &LayerTable| {
        let four = |encoding: Encoding| bits(encoding) == Some(4);
        table.tensors.iter().all(|t| four(t.encoding) && t.offset.is_multiple_of(16))
            && table.record_len.is_multiple_of(16)
            && table.n_experts as usize == moe.n_experts
    };
    if exact {
        Some("exact products")
    } else if a.latent.is_some() || spec.delta.is_some() || a.gate {
        Some("another attention than plain heads")
    } else if a.qkv_bias || a.o_bias || a.sinks || a.qk_norm_whole {
        Some("attention with biases or sinks, or one norm for all heads")
    } else if spec.rope.interleaved {
        Some("rotation of neighbours")
    } else if (0..spec.n_layers()).any(|layer| spec.window(layer).is_some()) {
        Some("attention in a window")
    } else if spec.layers.iter().any(|kind| *kind != FfnKind::Moe) || moe.d_shared > 0 {
        Some("dense layers or shared experts")
    } else if moe.router != RouterKind::Softmax
        || moe.groups.is_some()
        || moe.router_bias
        || moe.correction_bias
    {
        Some("this routing")
    } else if moe.expert_bias || moe.activation != Activation::SwiGlu {
        Some("experts with biases or another activation than SwiGLU")
    } else if !tables.iter().all(coded) {
        Some("experts in other than symmetric 4-bit codes in groups of 64")
    } else {
        shape(spec, &Room::default()).unsupported()
    }
}

/// How much of a model there is to be at once.
#[derive(Clone, Copy, Debug)]
struct Room {
    kv: KvKind,
    tokens: usize,
    context: usize,
    blocks: usize,
    sessions: usize,
}

impl Default for Room {
    fn default() -> Self {
        Self { kv: KvKind::F32, tokens: 1, context: 1, blocks: 1, sessions: 1 }
    }
}

fn shape(spec: &ModelSpec, room: &Room) -> Shape {
    let (a, moe, scales) = (&spec.attention, &spec.moe, &spec.multipliers);
    Shape {
        d_model: spec.d_model,
        vocab_size: spec.vocab_size,
        layers: spec.n_layers(),
        heads: a.n_heads,
        kv_heads: a.n_kv_heads,
        head_dim: a.head_dim,
        rope_dim: spec.rope_dim(),
        kv: room.kv,
        experts: moe.n_experts,
        top_k: moe.top_k,
        d_expert: moe.d_expert,
        renormalised: moe.norm_topk,
        eps: spec.rms_norm_eps,
        embedding_scale: scales.embedding as f32,
        residual_scale: scales.residual as f32,
        score_scale: a.score_scale as f32,
        routed_scale: moe.routed_scale as f32,
        tokens: room.tokens,
        head_rows: HEAD_ROWS,
        context: room.context,
        blocks: room.blocks,
        table_words: room.sessions * room.context.div_ceil(BLOCK),
    }
}

/// A matrix, if it has kernels.
fn matrix<'a>(weights: &'a Weights, tensor: &Tensor) -> Result<MatrixBytes<'a>, EngineError> {
    let (m, encoding) = (weights.matrix(tensor), tensor.encoding);
    if !has_product(encoding) {
        return Err(refused(&format!("backbone matrices in {encoding}")));
    }
    Ok(MatrixBytes { bytes: m.bytes(), rows: tensor.rows, cols: tensor.cols, encoding })
}

fn refused(what: &str) -> EngineError {
    EngineError::Unsupported { what: format!("{what} through CUDA (--device gpu or cpu can)") }
}

fn layer<'a>(
    weights: &'a Weights,
    layer: &'a LayerWeights,
    table: &LayerTable,
) -> Result<LayerParts<'a>, EngineError> {
    let Projections::Heads { q, k, v, norm, bias: None, gate: None } = &layer.projections else {
        return Err(refused("this attention"));
    };
    let LayerFfn::Moe { router, .. } = &layer.ffn else { return Err(refused("dense layers")) };
    if !router.encoding.is_float() {
        return Err(refused("a coded router"));
    }
    Ok(LayerParts {
        attn_norm: &layer.attn_norm,
        qkv: [matrix(weights, q)?, matrix(weights, k)?, matrix(weights, v)?],
        qk_norm: norm.as_ref().map(|[q, k]| [&q[..], &k[..]]),
        o: matrix(weights, &layer.o)?,
        ffn_norm: &layer.ffn_norm,
        router: matrix(weights, router)?,
        slots: Slots { len: table.record_len, offsets: [0, 1, 2].map(|i| table.tensors[i].offset) },
    })
}

impl CudaBackend {
    /// Puts the model on the card. The weights here are not needed afterwards.
    ///
    /// # Errors
    /// If something has no kernels, the experts do not all fit, or the card refuses something.
    pub(crate) fn new(
        cuda: Arc<Cuda>,
        spec: &ModelSpec,
        weights: &Weights,
        tables: &[LayerTable],
        plan: &Plan,
        held: DevicePlan,
    ) -> Result<Self, EngineError> {
        if !held.holds_all() {
            return Err(refused("a model whose experts do not all fit the card's memory"));
        }
        let kv = match plan.kv {
            KvType::F32 => KvKind::F32,
            KvType::F16 => KvKind::F16,
            KvType::Q8 => return Err(refused("keys and values in q8")),
        };
        let room = Room {
            kv,
            tokens: plan.chunk,
            context: plan.context,
            blocks: plan.kv_positions.div_ceil(BLOCK),
            sessions: plan.sessions,
        };
        let table = RopeTable::new(&spec.rope, spec.rope_dim(), plan.context);
        let angles: Vec<f32> = (0..plan.context)
            .flat_map(|p| table.cos(p).iter().zip(table.sin(p)).flat_map(|(cos, sin)| [*cos, *sin]))
            .collect();
        let layers: Vec<_> = weights
            .layers
            .iter()
            .zip(tables)
            .map(|(of, table)| layer(weights, of, table))
            .collect::<Result<_, _>>()?;
        let (embed, head) = (matrix(weights, &weights.embed)?, matrix(weights, &weights.head)?);
        let shape = shape(spec, &room);
        let model = Model::new(cuda, shape, &angles, &embed, layers, &weights.final_norm, &head)?;
        let routed = spec.n_layers() * plan.chunk * spec.moe.n_experts;
        Ok(Self {
            model,
            plan: held,
            meter: Arc::new(TierMeter::default()),
            tokens: Vec::with_capacity(plan.chunk),
            computed: false,
            places: Vec::with_capacity(plan.chunk),
            tables: Vec::new(),
            router: vec![0.0; routed],
            headed: Vec::with_capacity(HEAD_ROWS),
            hidden: vec![0.0; plan.chunk * spec.d_model],
            spec: spec.clone(),
        })
    }

    fn place(&mut self, rows: &[Row], kv: &mut KvCache) -> Result<(), EngineError> {
        for BlockCopy { from, to, .. } in kv.take_copies() {
            self.model.copy_block(from, to)?;
        }
        self.places.clear();
        self.tables.clear();
        let mut last = None;
        for (row, &token) in rows.iter().zip(&self.tokens) {
            let table = match last {
                Some((seq, start)) if seq == row.seq => start,
                _ => {
                    let start = self.tables.len() as u32;
                    self.tables.extend_from_slice(kv.blocks(row.seq));
                    start
                }
            };
            last = Some((row.seq, table));
            self.places.push(Place { token, position: row.position, table });
        }
        Ok(())
    }

    /// Waits for the step, with the logits of these tokens.
    fn compute_head(&mut self, tokens: &[usize]) -> Result<(), EngineError> {
        self.model.finish(tokens)?;
        let by = self.spec.multipliers.logits as f32;
        if by != 1.0 {
            self.model.scale_logits(by);
        }
        self.headed.clear();
        self.headed.extend_from_slice(tokens);
        Ok(())
    }

    fn by_layer<T>() -> Result<T, EngineError> {
        Err(refused("layers one by one"))
    }

    /// Nothing is seen before all layers are computed.
    fn after_all(&self) -> Result<(), EngineError> {
        if self.computed { Ok(()) } else { Self::by_layer() }
    }
}

impl Backend for CudaBackend {
    fn embed(&mut self, tokens: &[u32]) -> Result<(), EngineError> {
        self.tokens.clear();
        self.tokens.extend_from_slice(tokens);
        self.headed.clear();
        self.computed = false;
        Ok(())
    }

    fn advance(
        &mut self,
        from: usize,
        rows: &[Row],
        kv: &mut KvCache,
        head: &[usize],
    ) -> Result<Advanced, EngineError> {
        assert_eq!(from, 0, "all layers at once");
        if !self.model.has_all() {
            return Err(refused("a model whose experts were not loaded"));
        }
        self.place(rows, kv)?;
        self.model.step(&self.places, &self.tables)?;
        self.computed = true;
        let start = Instant::now();
        self.compute_head(head)?;
        let (layers, n) = (self.spec.n_layers(), self.tokens.len() * self.spec.moe.n_experts);
        self.model.router(&mut self.router[..layers * n]);
        self.meter.submits.add(self.tokens.len() as u64);
        self.meter.dispatches.add((self.tokens.len() * self.model.kernels() + 2 * head.len()) as u64);
        self.meter.waits.add(1);
        self.meter.wait_ns.add_time(start.elapsed());
        Ok(Advanced { next: layers, halted: false })
    }

    fn advanced(&mut self, index: usize) -> Result<&[f32], EngineError> {
        let n = self.tokens.len() * self.spec.moe.n_experts;
        Ok(&self.router[index * n..(index + 1) * n])
    }

    fn routed(&mut self, _layer: usize, routes: &Routes) {
        self.meter.hits.add(routes.union().len() as u64);
    }

    fn lacks(&mut self, layer: usize, expert: u32) -> bool {
        !self.model.has(layer, expert as usize)
    }

    fn attend(&mut self, _layer: usize, _rows: &[Row], _kv: &mut KvCache) -> Result<(), EngineError> {
        Self::by_layer()
    }

    fn dense(&mut self, _layer: usize) -> Result<(), EngineError> {
        Self::by_layer()
    }

    fn route(&mut self, _layer: usize) -> Result<&[f32], EngineError> {
        Self::by_layer()
    }

    fn wants_order(&self, _routes: &Routes) -> bool {
        false
    }

    fn begin(&mut self, _layer: usize, _routes: &Routes) -> Result<(), EngineError> {
        Self::by_layer()
    }

    fn experts(
        &mut self,
        _layer: usize,
        _ready: &mut Vec<Lease>,
        _routes: &Routes,
    ) -> Result<(), EngineError> {
        Self::by_layer()
    }

    fn reclaim(&mut self) -> Result<bool, EngineError> {
        Ok(false)
    }

    fn finish(&mut self, _layer: usize, _routes: &Routes) -> Result<(), EngineError> {
        Self::by_layer()
    }

    fn head(&mut self, tokens: &[usize]) -> Result<&[f32], EngineError> {
        self.after_all()?;
        if self.headed.as_slice() != tokens {
            self.compute_head(tokens)?;
        }
        self.headed.clear();
        Ok(&self.model.logits()[..tokens.len() * self.spec.vocab_size])
    }

    fn hidden(&mut self) -> Result<&[f32], EngineError> {
        self.after_all()?;
        let n = self.tokens.len() * self.spec.d_model;
        self.model.hidden(&mut self.hidden[..n])?;
        Ok(&self.hidden[..n])
    }

    fn final_hidden(&mut self, token: usize) -> Result<&[f32], EngineError> {
        self.after_all()?;
        let n = self.spec.d_model;
        self.model.final_hidden(token, &mut self.hidden[..n])?;
        Ok(&self.hidden[..n])
    }

    fn bring(&mut self, layer: usize, ready: &mut Vec<Lease>) -> Result<(), EngineError> {
        for lease in ready.drain(..) {
            let bytes = lease.bytes();
            self.model.bring(layer, lease.key().expert as usize, bytes)?;
            self.meter.loads.add(1);
            self.meter.load_bytes.add(bytes.len() as u64);
        }
        Ok(())
    }

    fn tier(&self) -> Option<DeviceTier> {
        Some(DeviceTier { plan: self.plan.clone(), path_note: None, meter: self.meter.clone() })
    }
}

#[cfg(test)]
mod tests {
    use smoe_testkit::fixtures;

    use super::*;

    /// A model that all kernels take, were its experts in 4-bit codes.
    fn plain() -> ModelSpec {
        let mut spec = fixtures::qwen3_moe();
        spec.layers.fill(FfnKind::Moe);
        (spec.d_model, spec.moe.d_expert, spec.attention.head_dim) = (256, 64, 64);
        spec
    }

    #[test]
    fn families_with_parts_that_have_no_kernels_are_refused() {
        assert_eq!(unsupported(&plain(), false, &[]), None);
        assert_eq!(unsupported(&plain(), true, &[]), Some("exact products"));
        for spec in [
            fixtures::deepseek(),
            fixtures::deepseek_v3(),
            fixtures::qwen2_moe(),
            fixtures::glm4_moe(),
            fixtures::gpt_oss(),
            fixtures::qwen3_next(),
        ] {
            assert!(unsupported(&spec, false, &[]).is_some(), "{}", spec.model_type);
        }
        let mut biased = plain();
        biased.moe.router_bias = true;
        let mut narrow = plain();
        narrow.attention.head_dim = 32;
        let mut windowed = plain();
        windowed.windows = vec![16; windowed.n_layers()];
        for spec in [biased, narrow, windowed] {
            assert!(unsupported(&spec, false, &[]).is_some());
        }
    }

    #[test]
    fn experts_in_other_codes_are_refused() {
        use smoe_format::TensorEntry;

        let spec = plain();
        let table = |text: &str| {
            let encoding: Encoding = text.parse().expect("an encoding");
            let tensor = TensorEntry { encoding, rows: 64, cols: 256, offset: 0, len: 0 };
            let n_experts = spec.moe.n_experts as u32;
            LayerTable { layer: 0, n_experts, record_len: 16 << 10, tensors: [tensor; 3] }
        };
        assert_eq!(unsupported(&spec, false, &[table("q4/64")]), None);
        for other in ["q4/32", "q4a/64", "q8/64", "bf16"] {
            assert!(unsupported(&spec, false, &[table(other)]).is_some(), "{other}");
        }
    }
}
