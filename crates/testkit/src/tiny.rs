//! Tiny random models, the same on every machine, written as published checkpoints or as vaults.
//!
//! Their shapes are odd on purpose (width 96, experts 40 wide, vocabulary 300), so that groups and tiles are
//! padded; their weights are scaled so that routers choose clearly and logits have margins.

mod checkpoint;
pub mod tokenizer;

use std::path::Path;

use smoe_format::backbone::LayerPart as P;
use smoe_format::half::{bf16_to_f32, f32_to_bf16};
use smoe_format::original::checkpoint_name;
use smoe_format::spec::{
    Activation, AttentionSpec, DeltaSpec, FfnKind, GroupScore, GroupSpec, IndexerSpec, LatentSpec, MixerKind,
    MoeSpec, Multipliers, RopeScaling, RopeSpec, RouterKind,
};
use smoe_format::{BackboneTensor, Encoding, ExpertKey, ModelSpec, Projection};

use crate::fixtures::yarn;
use crate::random::Random;
use crate::vault::write_vault;
use crate::weights::{Weights, expert_name};
use checkpoint::pretty;
pub use checkpoint::{CheckpointOptions, ConfigStyle, Float};

/// A random model: its shape, and the seed that decides every weight.
#[derive(Clone, Debug, PartialEq)]
pub struct TinyModel {
    /// The shape; any valid spec will do.
    pub spec: ModelSpec,
    /// Another seed, another model.
    pub seed: u64,
}

impl TinyModel {
    /// A model of `spec`.
    ///
    /// # Panics
    /// If the spec is not valid.
    #[must_use]
    pub fn new(spec: ModelSpec, seed: u64) -> Self {
        spec.validate().unwrap_or_else(|e| panic!("{e}"));
        Self { spec, seed }
    }

    /// Odd shapes; grouped queries, QK-norm, normalised top-k, a head of its own.
    #[must_use]
    pub fn qwen3(seed: u64) -> Self {
        let spec = ModelSpec {
            model_type: "qwen3_moe".to_owned(),
            d_model: 96,
            vocab_size: 300,
            max_context: 1024,
            rms_norm_eps: 1e-6,
            tied_head: false,
            attention: AttentionSpec {
                n_heads: 4,
                n_kv_heads: 2,
                head_dim: 16,
                qk_norm: true,
                ..Default::default()
            },
            rope: RopeSpec { theta: 1e6, ..Default::default() },
            layers: vec![FfnKind::Moe; 3],
            windows: Vec::new(),
            mixers: Vec::new(),
            delta: None,
            multipliers: Multipliers::default(),
            moe: MoeSpec {
                n_experts: 7,
                top_k: 3,
                d_expert: 40,
                router: RouterKind::Softmax,
                norm_topk: true,
                d_shared: 0,
                ..Default::default()
            },
        };
        Self::new(spec, seed)
    }

    /// As [`Self::qwen3`] with a tied head, a dense layer among the others, and YaRN.
    #[must_use]
    pub fn qwen3_tied(seed: u64) -> Self {
        let mut spec = Self::qwen3(seed).spec;
        spec.tied_head = true;
        spec.layers = vec![FfnKind::Moe, FfnKind::Dense(72), FfnKind::Moe];
        spec.rope.scaling = yarn(4.0, 256);
        Self::new(spec, seed)
    }

    /// Odd shapes; a dense first layer, a shared expert of two widths, plain top-k, a key for every query,
    /// linear RoPE scaling.
    #[must_use]
    pub fn deepseek(seed: u64) -> Self {
        let mut spec = Self::qwen3(seed).spec;
        spec.model_type = "deepseek".to_owned();
        spec.attention =
            AttentionSpec { n_heads: 6, n_kv_heads: 6, head_dim: 16, qk_norm: false, ..Default::default() };
        spec.rope =
            RopeSpec { theta: 1e4, scaling: RopeScaling::Linear { factor: 2.0 }, ..Default::default() };
        spec.layers = vec![FfnKind::Dense(104), FfnKind::Moe, FfnKind::Moe];
        spec.moe.norm_topk = false;
        spec.moe.d_shared = 80;
        Self::new(spec, seed)
    }

    /// The models that can be written as checkpoints.
    #[must_use]
    pub fn all(seed: u64) -> Vec<Self> {
        vec![Self::qwen3(seed), Self::qwen3_tied(seed), Self::deepseek(seed)]
    }

    /// A model for each piece of mathematics that a family has: those above, and others for vaults only.
    #[must_use]
    pub fn every(seed: u64) -> Vec<Self> {
        let new = [
            Self::olmoe,
            Self::qwen2,
            Self::glm4,
            Self::gpt_oss,
            Self::deepseek_v2,
            Self::deepseek_v3,
            Self::granite,
            Self::ernie,
            Self::glm_dsa,
            Self::deepseek_v32,
            Self::qwen3_next,
        ];
        Self::all(seed).into_iter().chain(new.map(|model| model(seed))).collect()
    }

    /// As [`Self::qwen3`] with its QK-norm over all heads as one.
    #[must_use]
    pub fn olmoe(seed: u64) -> Self {
        let mut spec = Self::qwen3(seed).spec;
        spec.model_type = "olmoe".to_owned();
        spec.attention.qk_norm_whole = true;
        Self::new(spec, seed)
    }

    /// Biases of queries, keys and values; a shared expert with a gate.
    #[must_use]
    pub fn qwen2(seed: u64) -> Self {
        let mut spec = Self::deepseek(seed).spec;
        spec.model_type = "qwen2_moe".to_owned();
        spec.attention.qkv_bias = true;
        spec.moe.shared_gate = true;
        Self::new(spec, seed)
    }

    /// Half of each head rotated; a router by sigmoid with corrections.
    #[must_use]
    pub fn glm4(seed: u64) -> Self {
        let mut spec = Self::qwen3(seed).spec;
        spec.model_type = "glm4_moe".to_owned();
        spec.rope.dim = Some(8);
        spec.moe = MoeSpec {
            router: RouterKind::Sigmoid,
            correction_bias: true,
            routed_scale: 1.5,
            d_shared: 40,
            ..spec.moe
        };
        Self::new(spec, seed)
    }

    /// Sinks, windows by turns, biases everywhere, a clamped SwiGLU.
    #[must_use]
    pub fn gpt_oss(seed: u64) -> Self {
        let mut spec = Self::qwen3_tied(seed).spec;
        spec.model_type = "gpt_oss".to_owned();
        spec.layers = vec![FfnKind::Moe; 3];
        spec.windows = vec![9, 0, 40];
        spec.attention =
            AttentionSpec { qk_norm: false, qkv_bias: true, o_bias: true, sinks: true, ..spec.attention };
        spec.moe = MoeSpec {
            router_bias: true,
            expert_bias: true,
            activation: Activation::ClampedSwiglu { alpha: 1.702, limit: 1.0 },
            ..spec.moe
        };
        Self::new(spec, seed)
    }

    /// Latent attention; YaRN that scales scores; experts from the best groups.
    #[must_use]
    pub fn deepseek_v2(seed: u64) -> Self {
        let mut spec = Self::deepseek(seed).spec;
        let latent = LatentSpec { q_rank: 0, kv_rank: 64, rope_dim: 12, value_dim: 32, norm_eps: 1e-6 };
        spec.model_type = "deepseek_v2".to_owned();
        spec.attention =
            AttentionSpec { n_kv_heads: 1, head_dim: 40, latent: Some(latent), ..spec.attention };
        spec.attention.score_scale = 1.25;
        spec.rope = RopeSpec { scaling: yarn(4.0, 256), interleaved: true, ..spec.rope };
        spec.moe.n_experts = 9;
        spec.moe.groups = Some(GroupSpec { n: 3, top: 2, score: GroupScore::Best });
        Self::new(spec, seed)
    }

    /// As [`Self::deepseek_v2`] with a latent of queries, and a router by sigmoid with corrections.
    #[must_use]
    pub fn deepseek_v3(seed: u64) -> Self {
        let mut spec = Self::deepseek_v2(seed).spec;
        spec.model_type = "deepseek_v3".to_owned();
        spec.attention.latent = spec.attention.latent.map(|latent| LatentSpec { q_rank: 48, ..latent });
        spec.moe = MoeSpec {
            groups: Some(GroupSpec { n: 3, top: 2, score: GroupScore::BestTwo }),
            n_experts: 9,
            ..Self::glm4(seed).spec.moe
        };
        Self::new(spec, seed)
    }

    /// As [`Self::deepseek_v3`] with an indexer that chooses fewer positions than a block of the cache has.
    #[must_use]
    pub fn glm_dsa(seed: u64) -> Self {
        let mut spec = Self::deepseek_v3(seed).spec;
        spec.model_type = "glm_moe_dsa".to_owned();
        spec.attention.score_scale = 1.0;
        spec.attention.indexer =
            Some(IndexerSpec { n_heads: 12, head_dim: 20, top_k: 12, interleaved: true, norm_eps: 1e-6 });
        spec.rope.scaling = RopeScaling::None;
        Self::new(spec, seed)
    }

    /// As [`Self::glm_dsa`] with YaRN and halves rotated in the indexer, which chooses more than a block has.
    #[must_use]
    pub fn deepseek_v32(seed: u64) -> Self {
        let mut spec = Self::deepseek_v3(seed).spec;
        spec.model_type = "deepseek_v32".to_owned();
        spec.attention.indexer =
            Some(IndexerSpec { n_heads: 9, head_dim: 16, top_k: 40, interleaved: false, norm_eps: 1e-6 });
        Self::new(spec, seed)
    }

    /// Multipliers of embeddings, scores, residuals and logits.
    #[must_use]
    pub fn granite(seed: u64) -> Self {
        let mut spec = Self::qwen3(seed).spec;
        spec.model_type = "granitemoe".to_owned();
        spec.attention = AttentionSpec { qk_norm: false, score_scale: 1.5, ..spec.attention };
        spec.multipliers = Multipliers { embedding: 3.0, residual: 0.75, logits: 0.8 };
        Self::new(spec, seed)
    }

    /// Softmax with corrections and a least divisor, neighbours rotated.
    #[must_use]
    pub fn ernie(seed: u64) -> Self {
        let mut spec = Self::deepseek(seed).spec;
        spec.model_type = "ernie4_5_moe".to_owned();
        spec.rope = RopeSpec { theta: 1e4, interleaved: true, ..Default::default() };
        // Some tokens' shares are below it.
        spec.moe = MoeSpec { norm_topk: true, norm_min: 0.7, correction_bias: true, ..spec.moe };
        Self::new(spec, seed)
    }

    /// Gated delta nets around an attention that has a gate; half of each head rotated, a shared expert with a gate.
    #[must_use]
    pub fn qwen3_next(seed: u64) -> Self {
        let mut spec = Self::qwen3(seed).spec;
        let (delta, attention) = (MixerKind::GatedDelta, MixerKind::Attention);
        spec.model_type = "qwen3_next".to_owned();
        spec.attention.gate = true;
        spec.rope.dim = Some(8);
        spec.layers = vec![FfnKind::Moe, FfnKind::Dense(72), FfnKind::Moe, FfnKind::Moe];
        spec.mixers = vec![delta, delta, attention, delta];
        spec.delta =
            Some(DeltaSpec { n_key_heads: 3, n_value_heads: 6, key_dim: 32, value_dim: 16, conv_width: 4 });
        spec.moe = MoeSpec { d_shared: 40, shared_gate: true, ..spec.moe };
        Self::new(spec, seed)
    }

    /// `n` random tokens; another `which`, other tokens.
    #[must_use]
    pub fn prompt(&self, n: usize, which: u64) -> Vec<u32> {
        let mut random = Random::named(self.seed ^ which, "prompt");
        (0..n).map(|_| random.below(self.spec.vocab_size) as u32).collect()
    }

    /// Values about `centre` with deviation `scale`, exact in bf16, f16 and f32.
    fn values(&self, name: &str, (rows, cols): (usize, usize), centre: f64, scale: f64) -> Vec<f32> {
        let mut random = Random::named(self.seed, name);
        (0..rows * cols)
            .map(|_| {
                let value = bf16_to_f32(f32_to_bf16((centre + scale * random.bell()) as f32));
                // Below this, eight significant bits are finer than f16's subnormals.
                if value.abs() < 2f32.powi(-16) { 0.0 } else { value }
            })
            .collect()
    }

    /// A backbone tensor, row-major.
    #[must_use]
    pub fn backbone_values(&self, tensor: BackboneTensor) -> Vec<f32> {
        let shape = tensor.shape(&self.spec);
        // Inputs of matrices are of order one after their norm, so this keeps outputs of order one.
        let unit = 1.0 / (shape.1 as f64).sqrt();
        let (centre, scale) = match tensor {
            BackboneTensor::Layer(_, P::QBias | P::KBias | P::VBias | P::OBias | P::RouterBias) => (0.0, 0.3),
            BackboneTensor::Layer(_, P::ExpertGateBias | P::ExpertUpBias | P::ExpertDownBias) => (0.0, 0.3),
            BackboneTensor::Layer(_, P::Sinks) => (0.0, 1.0),
            BackboneTensor::Layer(_, P::IndexKNormBias) => (0.0, 0.3),
            BackboneTensor::Layer(_, P::Correction) => (0.0, 0.2),
            BackboneTensor::Layer(_, P::DecayBias) => (0.0, 0.5),
            // Heads that forget at once, and heads that remember for a hundred tokens.
            BackboneTensor::Layer(_, P::DecayLog) => (-1.5, 1.5),
            _ if tensor.is_vector() => (1.0, 0.1),
            BackboneTensor::Embed if !self.spec.tied_head => (0.0, 1.0),
            // Logits with a deviation of four: the first leads the second by about one.
            BackboneTensor::Embed | BackboneTensor::Head => (0.0, 4.0 * unit),
            BackboneTensor::Layer(_, P::Router) => (0.0, 2.0 * unit),
            BackboneTensor::Layer(..) | BackboneTensor::FinalNorm => (0.0, unit),
        };
        let mut name = checkpoint_name(tensor);
        if let BackboneTensor::Layer(_, P::VUp) = tensor {
            // The published name is also that of the keys'.
            name.push_str(" values");
        }
        self.values(&name, shape, centre, scale)
    }

    /// A matrix of a routed expert, row-major.
    #[must_use]
    pub fn expert_values(&self, key: ExpertKey, projection: Projection) -> Vec<f32> {
        let shape = projection.shape(&self.spec);
        // Larger than the backbone's, so that routing to another expert shows in the logits.
        let scale = 1.5 / (shape.1 as f64).sqrt();
        self.values(&expert_name(key, projection), shape, 0.0, scale)
    }

    /// Writes a vault into `dir`, which must exist, without a sculptor: gate, up and down of every layer in
    /// the encodings `experts`, the backbone's matrices in `backbone`, side files as in a checkpoint.
    ///
    /// # Panics
    /// As [`Self::write_checkpoint`].
    pub fn write_vault(&self, dir: &Path, experts: [Encoding; 3], backbone: Encoding) {
        let options =
            CheckpointOptions { tokenizer: self.spec.vocab_size >= tokenizer::SIZE, ..Default::default() };
        let mut files = self.side_files(options.tokenizer);
        files.insert(0, ("config.json", pretty(&self.config(options)).into_bytes()));
        write_vault(dir, &self.spec, self, |_| experts, |_| backbone, &files);
    }
}

impl Weights for TinyModel {
    fn backbone(&self, tensor: BackboneTensor) -> Vec<f64> {
        self.backbone_values(tensor).into_iter().map(f64::from).collect()
    }
    fn expert(&self, key: ExpertKey, projection: Projection) -> Vec<f64> {
        self.expert_values(key, projection).into_iter().map(f64::from).collect()
    }
}
