//! Tiny random models, the same on every machine, written as published checkpoints or as vaults.
//!
//! Their shapes are odd on purpose (width 96, experts 40 wide, vocabulary 300), so that groups and tiles are
//! padded; their weights are scaled so that routers choose clearly and logits have margins.

use std::path::Path;

use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Map, Value, json};
use smoe_format::backbone::LayerPart as P;
use smoe_format::half::{bf16_to_f32, f32_to_bf16, f32_to_f16};
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
use crate::write;

/// A random model: its shape, and the seed that decides every weight.
#[derive(Clone, Debug, PartialEq)]
pub struct TinyModel {
    /// The shape; any valid spec will do.
    pub spec: ModelSpec,
    /// Another seed, another model.
    pub seed: u64,
}

/// Number format of a checkpoint. Tiny models' weights are exact in each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Float {
    /// What most are published in.
    Bf16,
    /// Half precision.
    F16,
    /// Single precision.
    F32,
}

/// Where `config.json` keeps what.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ConfigStyle {
    /// As most published checkpoints: `rope_theta` and `rope_scaling` at the top, `num_experts`,
    /// `torch_dtype`.
    Hub,
    /// As newer libraries write: `rope_parameters`, `num_local_experts`, `dtype`.
    Nested,
}

/// How a checkpoint is written.
#[derive(Clone, Copy, Debug)]
pub struct CheckpointOptions {
    /// Files that the tensors are dealt to; 1 gives `model.safetensors` and no index.
    pub shards: usize,
    /// Number format.
    pub dtype: Float,
    /// Form of the config.
    pub config: ConfigStyle,
    /// Also a byte-level tokenizer and a chat template; needs a vocabulary of [`tokenizer::SIZE`] or more.
    pub tokenizer: bool,
}

impl Default for CheckpointOptions {
    fn default() -> Self {
        Self { shards: 1, dtype: Float::Bf16, config: ConfigStyle::Hub, tokenizer: true }
    }
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

    /// Every tensor of the checkpoint by its published name, with its shape.
    #[must_use]
    pub fn tensors(&self) -> Vec<(String, Vec<usize>, Vec<f32>)> {
        let mut tensors = Vec::new();
        for tensor in BackboneTensor::all(&self.spec) {
            let (rows, cols) = tensor.shape(&self.spec);
            let shape = if tensor.is_vector() { vec![cols] } else { vec![rows, cols] };
            tensors.push((checkpoint_name(tensor), shape, self.backbone_values(tensor)));
        }
        for layer in self.spec.moe_layers() {
            for expert in 0..self.spec.moe.n_experts {
                let key = ExpertKey { layer: layer as u32, expert: expert as u32 };
                for projection in Projection::ALL {
                    let (rows, cols) = projection.shape(&self.spec);
                    let values = self.expert_values(key, projection);
                    tensors.push((expert_name(key, projection), vec![rows, cols], values));
                }
            }
        }
        tensors
    }

    /// Writes a checkpoint into `dir`, which must exist.
    ///
    /// # Panics
    /// If a file cannot be written, or the family's config has no words for the spec or the options.
    pub fn write_checkpoint(&self, dir: &Path, options: CheckpointOptions) {
        let family = &self.spec.model_type;
        assert!(matches!(family.as_str(), "qwen3_moe" | "deepseek"), "no config for `{family}`");
        let config = self.config(options);
        write(&dir.join("config.json"), pretty(&config).as_bytes());
        for (name, bytes) in self.side_files(options.tokenizer) {
            write(&dir.join(name), &bytes);
        }

        let mut shards = vec![Vec::new(); options.shards];
        let mut weight_map = Map::new();
        let file_name = |shard: usize| match options.shards {
            1 => "model.safetensors".to_owned(),
            n => format!("model-{:05}-of-{n:05}.safetensors", shard + 1),
        };
        let mut total_size = 0;
        for (i, (name, shape, values)) in self.tensors().into_iter().enumerate() {
            let bytes = options.dtype.bytes(&values);
            total_size += bytes.len();
            // Dealt out like cards, so that no layer lies whole in one file.
            let shard = i % options.shards;
            weight_map.insert(name.clone(), json!(file_name(shard)));
            shards[shard].push((name, shape, bytes));
        }
        for (shard, tensors) in shards.iter().enumerate() {
            let views = tensors.iter().map(|(name, shape, bytes)| {
                let dtype = options.dtype.dtype();
                (name, TensorView::new(dtype, shape.clone(), bytes).expect("shape and bytes agree"))
            });
            let metadata = [("format".to_owned(), "pt".to_owned())].into();
            let bytes = safetensors::serialize(views, Some(metadata)).expect("distinct names");
            write(&dir.join(file_name(shard)), &bytes);
        }
        if options.shards > 1 {
            let index = json!({ "metadata": { "total_size": total_size }, "weight_map": weight_map });
            write(&dir.join("model.safetensors.index.json"), pretty(&index).as_bytes());
        }
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

    /// `generation_config.json` and, if asked for, the tokenizer's files.
    fn side_files(&self, with_tokenizer: bool) -> Vec<(&'static str, Vec<u8>)> {
        let generation = json!({ "do_sample": false, "eos_token_id": self.eos(with_tokenizer) });
        let mut files = vec![("generation_config.json", pretty(&generation).into_bytes())];
        if with_tokenizer {
            let (size, vocab) = (tokenizer::SIZE, self.spec.vocab_size);
            assert!(vocab >= size, "a vocabulary of {vocab}, the tokenizer has {size}");
            files.push(("tokenizer.json", pretty(&tokenizer::tokenizer()).into_bytes()));
            files.push(("tokenizer_config.json", pretty(&tokenizer::config()).into_bytes()));
            files.push(("chat_template.jinja", tokenizer::CHAT_TEMPLATE.as_bytes().to_vec()));
        }
        files
    }

    fn eos(&self, with_tokenizer: bool) -> usize {
        if with_tokenizer { tokenizer::IM_END as usize } else { self.spec.vocab_size - 1 }
    }

    /// `config.json`.
    fn config(&self, options: CheckpointOptions) -> Value {
        let spec = &self.spec;
        let a = &spec.attention;
        let mut config = json!({
            "model_type": spec.model_type,
            "attention_bias": false,
            "attention_dropout": 0.0,
            "bos_token_id": null,
            "eos_token_id": self.eos(options.tokenizer),
            "head_dim": a.head_dim,
            "hidden_act": "silu",
            "hidden_size": spec.d_model,
            "initializer_range": 0.02,
            "max_position_embeddings": spec.max_context,
            "moe_intermediate_size": spec.moe.d_expert,
            "norm_topk_prob": spec.moe.norm_topk,
            "num_attention_heads": a.n_heads,
            "num_experts_per_tok": spec.moe.top_k,
            "num_hidden_layers": spec.n_layers(),
            "num_key_value_heads": a.n_kv_heads,
            "rms_norm_eps": spec.rms_norm_eps,
            "tie_word_embeddings": spec.tied_head,
            "use_cache": true,
            "vocab_size": spec.vocab_size,
        });
        let map = config.as_object_mut().expect("made above");
        // `f32` in decimal is longer as `f64`; published files have the short form.
        map["rms_norm_eps"] =
            spec.rms_norm_eps.to_string().parse::<f64>().map(Value::from).expect("a number");
        let dense: Vec<(usize, usize)> = spec
            .layers
            .iter()
            .enumerate()
            .filter_map(|(i, kind)| match kind {
                FfnKind::Dense(width) => Some((i, *width)),
                FfnKind::Moe => None,
            })
            .collect();
        let width = dense.first().map_or(spec.moe.d_expert * 2, |d| d.1);
        assert!(dense.iter().all(|d| d.1 == width), "a config has one dense width");
        map.insert("intermediate_size".to_owned(), json!(width));

        let nested = options.config == ConfigStyle::Nested;
        let family = match spec.model_type.as_str() {
            "qwen3_moe" => {
                assert!(a.qk_norm && spec.moe.d_shared == 0, "not of the Qwen3-MoE family");
                let layers: Vec<usize> = dense.iter().map(|d| d.0).collect();
                let experts = if nested { "num_local_experts" } else { "num_experts" };
                json!({
                    "architectures": ["Qwen3MoeForCausalLM"],
                    "decoder_sparse_step": 1,
                    "mlp_only_layers": layers,
                    experts: spec.moe.n_experts,
                    "output_router_logits": false,
                    "router_aux_loss_coef": 0.001,
                    "sliding_window": null,
                    "use_sliding_window": false,
                })
            }
            "deepseek" => {
                assert!(!a.qk_norm && a.n_heads * a.head_dim == spec.d_model, "not of the DeepSeek family");
                assert!(dense.iter().enumerate().all(|(i, d)| i == d.0), "dense layers come first");
                assert!(spec.moe.d_shared.is_multiple_of(spec.moe.d_expert), "whole shared experts");
                json!({
                    "architectures": ["DeepseekForCausalLM"],
                    "first_k_dense_replace": dense.len(),
                    "moe_layer_freq": 1,
                    "n_routed_experts": spec.moe.n_experts,
                    "n_shared_experts": spec.moe.d_shared / spec.moe.d_expert,
                    "pretraining_tp": 1,
                    "scoring_func": "softmax",
                })
            }
            // A vault needs no more than the name.
            _ => json!({}),
        };
        map.extend(family.as_object().expect("made above").clone());

        let scaling = scaling(&spec.rope.scaling);
        let dtype = json!(options.dtype.name());
        if nested {
            let mut rope = scaling.unwrap_or_else(|| json!({ "rope_type": "default" }));
            rope["rope_theta"] = json!(spec.rope.theta);
            map.insert("rope_parameters".to_owned(), rope);
            map.insert("dtype".to_owned(), dtype);
        } else {
            map.insert("rope_theta".to_owned(), json!(spec.rope.theta));
            map.insert("rope_scaling".to_owned(), scaling.unwrap_or(Value::Null));
            map.insert("torch_dtype".to_owned(), dtype);
        }
        config
    }
}

/// RoPE scaling as configs say it; what has its default is left out, as in published ones.
fn scaling(scaling: &RopeScaling) -> Option<Value> {
    match *scaling {
        RopeScaling::None => None,
        RopeScaling::Linear { factor } => Some(json!({ "rope_type": "linear", "factor": factor })),
        RopeScaling::Yarn { factor, original_context, beta_fast, beta_slow, attention_factor, truncate } => {
            let mut value = json!({
                "rope_type": "yarn",
                "factor": factor,
                "original_max_position_embeddings": original_context,
            });
            let RopeScaling::Yarn { attention_factor: default, .. } = yarn(factor, original_context) else {
                unreachable!("yarn() makes YaRN")
            };
            for (name, found, default) in [
                ("beta_fast", beta_fast, 32.0),
                ("beta_slow", beta_slow, 1.0),
                ("attention_factor", attention_factor, default),
            ] {
                if found != default {
                    value[name] = json!(found);
                }
            }
            if !truncate {
                value["truncate"] = json!(false);
            }
            Some(value)
        }
    }
}

fn pretty(value: &Value) -> String {
    format!("{value:#}\n")
}

impl Float {
    const fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bfloat16",
            Self::F16 => "float16",
            Self::F32 => "float32",
        }
    }

    const fn dtype(self) -> Dtype {
        match self {
            Self::Bf16 => Dtype::BF16,
            Self::F16 => Dtype::F16,
            Self::F32 => Dtype::F32,
        }
    }

    fn bytes(self, values: &[f32]) -> Vec<u8> {
        match self {
            Self::Bf16 => values.iter().flat_map(|&v| f32_to_bf16(v).to_le_bytes()).collect(),
            Self::F16 => values.iter().flat_map(|&v| f32_to_f16(v).to_le_bytes()).collect(),
            Self::F32 => values.iter().flat_map(|&v| v.to_le_bytes()).collect(),
        }
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

/// A byte-level tokenizer of 256 bytes and three special tokens: the token of a byte is the byte.
pub mod tokenizer {
    use serde_json::{Map, Value, json};

    /// `<|endoftext|>`.
    pub const END_OF_TEXT: u32 = 256;
    /// `<|im_start|>`.
    pub const IM_START: u32 = 257;
    /// `<|im_end|>`, which ends a turn.
    pub const IM_END: u32 = 258;
    /// Tokens in all. A model's vocabulary may be larger: its last ids then have no text.
    pub const SIZE: usize = 259;

    const SPECIAL: [(u32, &str); 3] =
        [(END_OF_TEXT, "<|endoftext|>"), (IM_START, "<|im_start|>"), (IM_END, "<|im_end|>")];

    /// ChatML.
    pub const CHAT_TEMPLATE: &str = "\
{%- for message in messages %}
    {{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
";

    /// The character that stands for a byte in a byte-level vocabulary (as GPT-2's): printable Latin-1 for
    /// itself, the rest from U+0100 on in order.
    fn stand_in(byte: u8) -> char {
        let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
        if printable(byte) {
            return char::from(byte);
        }
        let rank = (0..byte).filter(|&b| !printable(b)).count() as u32;
        char::from_u32(0x100 + rank).expect("at most 68 past U+0100")
    }

    fn added(id: Option<u32>, content: &str) -> Value {
        let mut token = json!({
            "content": content,
            "single_word": false,
            "lstrip": false,
            "rstrip": false,
            "normalized": false,
            "special": true,
        });
        if let Some(id) = id {
            token["id"] = json!(id);
        }
        token
    }

    /// `tokenizer.json`.
    #[must_use]
    pub fn tokenizer() -> Value {
        let vocab: Map<String, Value> = (0..=255u8).map(|b| (stand_in(b).to_string(), json!(b))).collect();
        let byte_level = json!({
            "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false,
        });
        json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": SPECIAL.map(|(id, content)| added(Some(id), content)),
            "normalizer": null,
            "pre_tokenizer": byte_level,
            "post_processor": null,
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "dropout": null,
                "unk_token": null,
                "continuing_subword_prefix": null,
                "end_of_word_suffix": null,
                "fuse_unk": false,
                "byte_fallback": false,
                "ignore_merges": false,
                "vocab": vocab,
                "merges": [],
            },
        })
    }

    /// `tokenizer_config.json`.
    #[must_use]
    pub fn config() -> Value {
        let decoder: Map<String, Value> =
            SPECIAL.iter().map(|(id, content)| (id.to_string(), added(None, content))).collect();
        json!({
            "add_prefix_space": false,
            "added_tokens_decoder": decoder,
            "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
            "bos_token": null,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "unk_token": null,
            "clean_up_tokenization_spaces": false,
            "model_max_length": 1024,
            "tokenizer_class": "PreTrainedTokenizerFast",
        })
    }

    /// The tokens of `text`, special ones not looked for: its bytes.
    #[must_use]
    pub fn encode(text: &str) -> Vec<u32> {
        text.bytes().map(u32::from).collect()
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn every_byte_has_a_character_of_its_own() {
            let all: std::collections::BTreeSet<char> = (0..=255).map(stand_in).collect();
            assert_eq!(all.len(), 256);
            assert_eq!((stand_in(b' '), stand_in(b'\n'), stand_in(b'a')), ('Ġ', 'Ċ', 'a'));
            assert_eq!(stand_in(0xad), 'Ń');
        }
    }
}
