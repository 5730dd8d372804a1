//! Shapes of published models, and what the engine runs in their place.

use std::fs;
use std::path::Path;

use smoe_format::ModelSpec;
use smoe_format::spec::{
    Activation, AttentionSpec, FfnKind, IndexerSpec, LatentSpec, MixerKind, MoeSpec, Multipliers,
    RopeScaling, RopeSpec, RouterKind,
};

use crate::config::spec_from_config;
use crate::error::{SculptError, Warning};

/// A model's shape.
#[derive(Clone, Debug)]
pub struct Shape {
    /// Its name, or `config.json`.
    pub name: String,
    /// What a synthetic vault of it holds.
    pub spec: ModelSpec,
    /// What of the model the engine does not know, and what stands in for it.
    pub stand_in: Option<String>,
    /// What was odd about its config.json.
    pub warnings: Vec<Warning>,
}

/// The family name of a synthetic vault: nothing takes it for the model whose shape it has.
const MODEL_TYPE: &str = "synthetic";

/// A published model, from its config.json.
struct Published {
    name: &'static str,
    d_model: usize,
    vocab: usize,
    context: usize,
    layers: usize,
    /// The first so many layers are dense, of this width.
    dense: (usize, usize),
    /// Query heads, KV heads, width of a head.
    heads: (usize, usize, usize),
    qk_norm: bool,
    theta: f64,
    eps: f32,
    /// Experts of a layer, per token, width of one.
    experts: (usize, usize, usize),
    shared: usize,
    norm_topk: bool,
    /// What the engine does not know, and the weights of that attention in a layer if it is of another kind.
    unknown: Option<(&'static str, Option<usize>)>,
    /// What the fields above have no words for.
    also: Option<fn(&mut ModelSpec)>,
}

/// Projections of multi-head latent attention (DeepSeek-V2, 2024) in a layer: width, heads, ranks of queries
/// (0: not compressed) and of keys and values. Heads are of 128 and 64 rotated dimensions, values of 128.
const fn latent(d: usize, heads: usize, q_rank: usize, kv_rank: usize) -> usize {
    let queries = heads * (128 + 64);
    let q = if q_rank == 0 { d * queries } else { q_rank * (d + queries) };
    q + d * (kv_rank + 64) + kv_rank * heads * (128 + 128) + heads * 128 * d
}

/// What GPT-OSS has besides its sizes: sinks, windows by turns, biases, a clamped SwiGLU, YaRN.
fn gpt_oss(spec: &mut ModelSpec) {
    let factor = 32.0f64;
    spec.windows = (0..spec.n_layers()).map(|layer| if layer % 2 == 0 { 128 } else { 0 }).collect();
    let AttentionSpec { qkv_bias, o_bias, sinks, .. } = &mut spec.attention;
    (*qkv_bias, *o_bias, *sinks) = (true, true, true);
    (spec.moe.router_bias, spec.moe.expert_bias) = (true, true);
    spec.moe.activation = Activation::ClampedSwiglu { alpha: 1.702, limit: 7.0 };
    spec.rope.scaling = RopeScaling::Yarn {
        factor,
        original_context: 4096,
        beta_fast: 32.0,
        beta_slow: 1.0,
        attention_factor: 0.1 * factor.ln() + 1.0,
        truncate: false,
    };
}

const LATENT: &str = "latent attention, sigmoid router with groups";

static PUBLISHED: &[Published] = &[
    Published {
        name: "qwen3-30b-a3b",
        d_model: 2048,
        vocab: 151_936,
        context: 40_960,
        layers: 48,
        dense: (0, 0),
        heads: (32, 4, 128),
        qk_norm: true,
        theta: 1e6,
        eps: 1e-6,
        experts: (128, 8, 768),
        shared: 0,
        norm_topk: true,
        unknown: None,
        also: None,
    },
    Published {
        name: "qwen3-235b-a22b",
        d_model: 4096,
        vocab: 151_936,
        context: 40_960,
        layers: 94,
        dense: (0, 0),
        heads: (64, 4, 128),
        qk_norm: true,
        theta: 1e6,
        eps: 1e-6,
        experts: (128, 8, 1536),
        shared: 0,
        norm_topk: true,
        unknown: None,
        also: None,
    },
    Published {
        name: "qwen3-coder-480b-a35b",
        d_model: 6144,
        vocab: 151_936,
        context: 262_144,
        layers: 62,
        dense: (0, 0),
        heads: (96, 8, 128),
        qk_norm: true,
        theta: 1e7,
        eps: 1e-6,
        experts: (160, 8, 2560),
        shared: 0,
        norm_topk: true,
        unknown: None,
        also: None,
    },
    Published {
        name: "glm-4.5-air",
        d_model: 4096,
        vocab: 151_552,
        context: 131_072,
        layers: 46,
        dense: (1, 10_944),
        heads: (96, 8, 128),
        qk_norm: false,
        theta: 1e6,
        eps: 1e-5,
        experts: (128, 8, 1408),
        shared: 1408,
        norm_topk: true,
        unknown: Some(("biases of attention, RoPE over half a head, sigmoid router", None)),
        also: None,
    },
    Published {
        name: "glm-4.5",
        d_model: 5120,
        vocab: 151_552,
        context: 131_072,
        layers: 92,
        dense: (3, 12_288),
        heads: (96, 8, 128),
        qk_norm: true,
        theta: 1e6,
        eps: 1e-5,
        experts: (160, 8, 1536),
        shared: 1536,
        norm_topk: true,
        unknown: Some(("biases of attention, RoPE over half a head, sigmoid router", None)),
        also: None,
    },
    Published {
        name: "gpt-oss-20b",
        d_model: 2880,
        vocab: 201_088,
        context: 131_072,
        layers: 24,
        dense: (0, 0),
        heads: (64, 8, 64),
        qk_norm: false,
        theta: 150_000.0,
        eps: 1e-5,
        experts: (32, 4, 2880),
        shared: 0,
        norm_topk: true,
        unknown: None,
        also: Some(gpt_oss),
    },
    Published {
        name: "gpt-oss-120b",
        d_model: 2880,
        vocab: 201_088,
        context: 131_072,
        layers: 36,
        dense: (0, 0),
        heads: (64, 8, 64),
        qk_norm: false,
        theta: 150_000.0,
        eps: 1e-5,
        experts: (128, 4, 2880),
        shared: 0,
        norm_topk: true,
        unknown: None,
        also: Some(gpt_oss),
    },
    Published {
        name: "deepseek-v2-lite",
        d_model: 2048,
        vocab: 102_400,
        context: 163_840,
        layers: 27,
        dense: (1, 10_944),
        heads: (24, 2, 128),
        qk_norm: false,
        theta: 10_000.0,
        eps: 1e-6,
        experts: (64, 6, 1408),
        shared: 2816,
        norm_topk: false,
        unknown: Some(("latent attention", Some(latent(2048, 16, 0, 512)))),
        also: None,
    },
    Published {
        name: "deepseek-v3",
        d_model: 7168,
        vocab: 129_280,
        context: 163_840,
        layers: 61,
        dense: (3, 18_432),
        heads: (96, 4, 128),
        qk_norm: false,
        theta: 10_000.0,
        eps: 1e-6,
        experts: (256, 8, 2048),
        shared: 2048,
        norm_topk: true,
        unknown: Some((LATENT, Some(latent(7168, 128, 1536, 512)))),
        also: None,
    },
    Published {
        name: "kimi-k2",
        d_model: 7168,
        vocab: 163_840,
        context: 131_072,
        layers: 61,
        dense: (1, 18_432),
        heads: (52, 4, 128),
        qk_norm: false,
        theta: 50_000.0,
        eps: 1e-6,
        experts: (384, 8, 2048),
        shared: 2048,
        norm_topk: true,
        unknown: Some((LATENT, Some(latent(7168, 64, 1536, 512)))),
        also: None,
    },
    // As `GlmMoeDsaConfig` of transformers has it, which names zai-org/GLM-5; that is silent about RoPE's base, which is
    // GLM-4.5's here.
    Published {
        name: "glm-5",
        d_model: 6144,
        vocab: 154_880,
        context: 202_752,
        layers: 78,
        dense: (3, 12_288),
        heads: (64, 1, 192 + 64),
        qk_norm: false,
        theta: 1e6,
        eps: 1e-5,
        experts: (256, 8, 2048),
        shared: 2048,
        norm_topk: true,
        unknown: None,
        also: Some(|spec| {
            spec.attention.latent =
                Some(LatentSpec { q_rank: 2048, kv_rank: 512, rope_dim: 64, value_dim: 256, norm_eps: 1e-6 });
            spec.attention.indexer = Some(IndexerSpec {
                n_heads: 32,
                head_dim: 128,
                top_k: 2048,
                interleaved: true,
                norm_eps: 1e-6,
            });
            spec.rope.interleaved = true;
            spec.moe.router = RouterKind::Sigmoid;
            spec.moe.correction_bias = true;
            spec.moe.routed_scale = 2.5;
        }),
    },
    Published {
        name: "olmoe-1b-7b",
        d_model: 2048,
        vocab: 50_304,
        context: 4096,
        layers: 16,
        dense: (0, 0),
        heads: (16, 16, 128),
        qk_norm: true,
        theta: 10_000.0,
        eps: 1e-5,
        experts: (64, 8, 1024),
        shared: 0,
        norm_topk: false,
        unknown: Some(("QK-norm over all heads at once", None)),
        also: None,
    },
    Published {
        name: "mixtral-8x7b",
        d_model: 4096,
        vocab: 32_000,
        context: 32_768,
        layers: 32,
        dense: (0, 0),
        heads: (32, 8, 128),
        qk_norm: false,
        theta: 1e6,
        eps: 1e-5,
        experts: (8, 2, 14_336),
        shared: 0,
        norm_topk: true,
        unknown: None,
        also: None,
    },
];

/// Models whose config.json says it all.
const CONFIGS: &[(&str, &str)] = &[
    (
        "qwen3-next-80b-a3b",
        r#"{"model_type": "qwen3_next", "hidden_size": 2048, "num_hidden_layers": 48, "vocab_size": 151936,
        "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "tie_word_embeddings": false,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "partial_rotary_factor": 0.25,
        "rope_theta": 10000000, "full_attention_interval": 4, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4, "num_experts": 512, "num_experts_per_tok": 10,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "norm_topk_prob": true}"#,
    ),
    (
        "qwen3.5-35b-a3b",
        r#"{"model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_hidden_layers": 40,
        "vocab_size": 248320, "max_position_embeddings": 262144, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": false, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
        "partial_rotary_factor": 0.25, "rope_theta": 10000000, "full_attention_interval": 4,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_experts": 256,
        "num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}"#,
    ),
];

/// Weights of the projections of attention in a layer.
fn attention_weights(spec: &ModelSpec) -> usize {
    let a = &spec.attention;
    2 * spec.d_model * a.head_dim * (a.n_heads + a.n_kv_heads)
}

impl Published {
    fn shape(&self) -> Shape {
        let (n_heads, n_kv_heads, head_dim) = self.heads;
        let (n_experts, top_k, d_expert) = self.experts;
        let (n_dense, width) = self.dense;
        let layers = (0..self.layers).map(|l| if l < n_dense { FfnKind::Dense(width) } else { FfnKind::Moe });
        let mut spec = ModelSpec {
            model_type: MODEL_TYPE.to_owned(),
            d_model: self.d_model,
            vocab_size: self.vocab,
            max_context: self.context,
            rms_norm_eps: self.eps,
            tied_head: false,
            attention: AttentionSpec {
                n_heads,
                n_kv_heads,
                head_dim,
                qk_norm: self.qk_norm,
                ..Default::default()
            },
            rope: RopeSpec { theta: self.theta, ..Default::default() },
            layers: layers.collect(),
            windows: Vec::new(),
            mixers: Vec::new(),
            delta: None,
            multipliers: Multipliers::default(),
            moe: MoeSpec {
                n_experts,
                top_k,
                d_expert,
                router: RouterKind::Softmax,
                norm_topk: self.norm_topk,
                d_shared: self.shared,
                ..Default::default()
            },
        };
        if let Some(also) = self.also {
            also(&mut spec);
        }
        let stand_in = self.unknown.map(|(what, weights)| {
            let qk_norm = if self.qk_norm { ", QK-norm" } else { "" };
            let millions = |n: usize| format!("{:.1} M", n as f64 / 1e6);
            let weights = weights.map_or_else(String::new, |published| {
                let ours = attention_weights(&spec);
                format!(" ({} weights a layer for {})", millions(ours), millions(published))
            });
            format!(
                "{}: {what}: stands in as {n_heads} heads over {n_kv_heads} KV heads of {head_dim}{qk_norm}\
                 {weights}, softmax router",
                self.name
            )
        });
        Shape { name: self.name.to_owned(), spec, stand_in, warnings: Vec::new() }
    }
}

impl Shape {
    /// The names that [`Shape::find`] knows.
    pub fn names() -> impl Iterator<Item = &'static str> {
        let configs = CONFIGS.iter().map(|(name, _)| *name);
        PUBLISHED.iter().map(|published| published.name).chain(configs)
    }

    /// The shape called `like`: a name, a config.json, or a directory with one.
    ///
    /// # Errors
    /// If it is neither, or a config.json of a family that is not known.
    pub fn find(like: &str) -> Result<Self, SculptError> {
        if let Some(published) = PUBLISHED.iter().find(|published| published.name == like) {
            return Ok(published.shape());
        }
        if let Some((name, config)) = CONFIGS.iter().find(|(name, _)| *name == like) {
            let config = serde_json::from_str(config).expect("written above");
            return Self::of_config(name, &config);
        }
        let path = Path::new(like);
        if !path.exists() {
            let names = Self::names().collect::<Vec<_>>().join(", ");
            let expected = format!("neither a file nor one of {names}");
            return Err(SculptError::Setting { flag: "--like", found: like.to_owned(), expected });
        }
        let path = if path.is_dir() { path.join("config.json") } else { path.to_owned() };
        let bytes = fs::read(&path).map_err(SculptError::io("read", &path))?;
        let config = serde_json::from_slice(&bytes).map_err(SculptError::json(&path))?;
        Self::of_config("config.json", &config)
    }

    fn of_config(name: &str, config: &serde_json::Value) -> Result<Self, SculptError> {
        let (mut spec, warnings) = spec_from_config(config)?;
        MODEL_TYPE.clone_into(&mut spec.model_type);
        Ok(Self { name: name.to_owned(), spec, stand_in: None, warnings })
    }

    /// Cuts it to its first `layers` layers.
    ///
    /// # Errors
    /// If there are not so many, or none with experts among them.
    pub fn cut(&mut self, layers: usize) -> Result<(), SculptError> {
        let n = self.spec.n_layers();
        let bad =
            |expected| Err(SculptError::Setting { flag: "--layers", found: layers.to_string(), expected });
        if !(1..=n).contains(&layers) {
            return bad(format!("{} has 1 to {n}", self.name));
        }
        if !self.spec.layers[..layers].contains(&FfnKind::Moe) {
            return bad("leaves no layer with experts".to_owned());
        }
        self.spec.layers.truncate(layers);
        self.spec.windows.truncate(layers);
        self.spec.mixers.truncate(layers);
        if !self.spec.mixers.contains(&MixerKind::GatedDelta) {
            (self.spec.mixers, self.spec.delta) = (Vec::new(), None);
        } else if !self.spec.mixers.contains(&MixerKind::Attention) {
            return bad("leaves no layer with attention".to_owned());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_a_model_that_the_engine_can_run() {
        for name in Shape::names() {
            let shape = Shape::find(name).expect("known");
            shape.spec.validate().expect(name);
            assert_eq!(shape.name, name);
        }
    }

    #[test]
    fn gpt_oss_is_what_its_config_says() {
        let kinds = ["sliding_attention", "full_attention"].repeat(18);
        let config = serde_json::json!({
            "model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 36, "vocab_size": 201_088,
            "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "tie_word_embeddings": false,
            "attention_bias": true, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
            "rope_theta": 150_000, "layer_types": kinds, "sliding_window": 128, "swiglu_limit": 7.0,
            "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                "original_max_position_embeddings": 4096, "truncate": false},
            "num_local_experts": 128, "num_experts_per_tok": 4, "intermediate_size": 2880,
        });
        let published = Shape::of_config("gpt-oss-120b", &config).expect("a config");
        assert_eq!(Shape::find("gpt-oss-120b").expect("known").spec, published.spec);
    }

    #[test]
    fn what_stands_in_for_latent_attention_has_about_its_weights() {
        let mut seen = 0;
        for published in PUBLISHED {
            if let Some((_, Some(weights))) = published.unknown {
                let ratio = attention_weights(&published.shape().spec) as f64 / weights as f64;
                assert!((0.97..1.03).contains(&ratio), "{}: {ratio}", published.name);
                seen += 1;
            }
        }
        assert!(seen > 0);
        // DeepSeek-V3's own: 187.1 million.
        assert_eq!(latent(7168, 128, 1536, 512), 187_105_280);
    }
}
