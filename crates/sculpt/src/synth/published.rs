//! Shapes of published models: the figures of their config.json, read as any config.json is.
//!
//! Left out is what the engine leaves out: layers that guess ahead, parts for images. One figure is not the config's:
//! OLMoE's `head_dim`, which its reference computes.

use serde_json::{Value, json};

/// A name, and what makes its config.
type Published = (&'static str, fn() -> Value);

pub(super) static PUBLISHED: &[Published] = &[
    ("qwen3-30b-a3b", || qwen3(2048, 48, [32, 4], 128, 768)),
    ("qwen3-235b-a22b", || qwen3(4096, 94, [64, 4], 128, 1536)),
    ("qwen3-coder-480b-a35b", || {
        let long = json!({ "max_position_embeddings": 262_144, "rope_theta": 1e7 });
        with(qwen3(6144, 62, [96, 8], 160, 2560), long)
    }),
    ("qwen3-next-80b-a3b", || {
        let own = json!({
            "model_type": "qwen3_next", "num_hidden_layers": 48, "vocab_size": 151_936, "num_experts": 512,
            "num_experts_per_tok": 10, "norm_topk_prob": true,
        });
        with(hybrid(), own)
    }),
    ("qwen3.5-35b-a3b", || {
        let own = json!({
            "model_type": "qwen3_5_moe_text", "num_hidden_layers": 40, "vocab_size": 248_320, "num_experts": 256,
            "num_experts_per_tok": 8,
        });
        with(hybrid(), own)
    }),
    ("glm-4.5-air", || {
        let own = json!({
            "hidden_size": 4096, "num_hidden_layers": 46, "intermediate_size": 10_944, "first_k_dense_replace": 1,
            "use_qk_norm": false, "n_routed_experts": 128, "moe_intermediate_size": 1408,
            "routed_scaling_factor": 1.0,
        });
        with(glm4(), own)
    }),
    ("glm-4.5", || {
        let own = json!({
            "hidden_size": 5120, "num_hidden_layers": 92, "intermediate_size": 12_288, "first_k_dense_replace": 3,
            "use_qk_norm": true, "n_routed_experts": 160, "moe_intermediate_size": 1536,
            "routed_scaling_factor": 2.5,
        });
        with(glm4(), own)
    }),
    ("glm-5", glm5),
    ("gpt-oss-20b", || gpt_oss(24, 32)),
    ("gpt-oss-120b", || gpt_oss(36, 128)),
    ("deepseek-v2-lite", || {
        let own = json!({
            "hidden_size": 2048, "num_hidden_layers": 27, "intermediate_size": 10_944, "q_lora_rank": null,
            "num_attention_heads": 16, "num_key_value_heads": 16, "n_routed_experts": 64,
            "moe_intermediate_size": 1408, "topk_method": "greedy", "n_group": 1, "topk_group": 1,
            "routed_scaling_factor": 1.0, "rope_scaling": yarn(40, [32, 1], 0.707),
        });
        with(deepseek_v2(), own)
    }),
    ("deepseek-v2", || {
        let own = json!({
            "hidden_size": 5120, "num_hidden_layers": 60, "intermediate_size": 12_288, "q_lora_rank": 1536,
            "num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 160,
            "moe_intermediate_size": 1536, "topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3,
            "routed_scaling_factor": 16.0, "rope_scaling": yarn(40, [32, 1], 1.0),
        });
        with(deepseek_v2(), own)
    }),
    ("deepseek-v3", deepseek_v3),
    ("deepseek-v3.2", || {
        let indexer = json!({
            "model_type": "deepseek_v32", "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048,
        });
        with(deepseek_v3(), indexer)
    }),
    // DeepSeek-V3's architecture; as first published, for 131,072 positions.
    ("kimi-k2", || {
        let own = json!({
            "model_type": "kimi_k2", "vocab_size": 163_840, "max_position_embeddings": 131_072,
            "num_attention_heads": 64, "num_key_value_heads": 64, "first_k_dense_replace": 1, "n_routed_experts": 384, "n_group": 1,
            "topk_group": 1, "routed_scaling_factor": 2.827, "rope_theta": 50_000,
            "rope_scaling": yarn(32, [1, 1], 1.0),
        });
        with(deepseek_v3(), own)
    }),
    ("minimax-m2", || {
        json!({
            "model_type": "minimax_m2", "hidden_size": 3072, "num_hidden_layers": 62, "vocab_size": 200_064,
            "max_position_embeddings": 196_608, "rms_norm_eps": 1e-6, "tie_word_embeddings": false,
            "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "rotary_dim": 64,
            "rope_theta": 5_000_000, "use_qk_norm": true, "qk_norm_type": "per_layer",
            "scoring_func": "sigmoid", "use_routing_bias": true, "num_local_experts": 256,
            "num_experts_per_tok": 8, "intermediate_size": 1536, "shared_intermediate_size": 0,
        })
    }),
    ("olmoe-1b-7b", || {
        json!({
            "model_type": "olmoe", "hidden_size": 2048, "num_hidden_layers": 16, "vocab_size": 50_304,
            "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "tie_word_embeddings": false,
            "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 128, "rope_theta": 10_000,
            "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": false, "intermediate_size": 1024,
        })
    }),
    ("mixtral-8x7b", || {
        json!({
            "model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 32, "vocab_size": 32_000,
            "max_position_embeddings": 32_768, "rms_norm_eps": 1e-5, "tie_word_embeddings": false,
            "num_attention_heads": 32, "num_key_value_heads": 8, "rope_theta": 1e6, "sliding_window": null,
            "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 14_336,
        })
    }),
];

/// `base` with the keys of `own`, which go first.
fn with(mut base: Value, own: Value) -> Value {
    if let (Value::Object(base), Value::Object(own)) = (&mut base, own) {
        base.extend(own);
    }
    base
}

/// `rope_scaling` beyond 4,096 positions, as DeepSeek's models have it.
fn yarn(factor: u32, [fast, slow]: [u32; 2], mscale: f64) -> Value {
    json!({
        "type": "yarn", "factor": factor, "beta_fast": fast, "beta_slow": slow, "mscale": mscale,
        "mscale_all_dim": mscale, "original_max_position_embeddings": 4096,
    })
}

fn qwen3(d: usize, layers: usize, [heads, kv_heads]: [usize; 2], experts: usize, width: usize) -> Value {
    json!({
        "model_type": "qwen3_moe", "hidden_size": d, "num_hidden_layers": layers, "vocab_size": 151_936,
        "max_position_embeddings": 40_960, "rms_norm_eps": 1e-6, "tie_word_embeddings": false,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 128, "rope_theta": 1e6,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "num_experts": experts, "num_experts_per_tok": 8,
        "moe_intermediate_size": width, "norm_topk_prob": true,
    })
}

/// What Qwen3-Next and Qwen3.5 have in common: three layers of four with a gated delta net.
fn hybrid() -> Value {
    json!({
        "hidden_size": 2048, "max_position_embeddings": 262_144, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": false, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
        "partial_rotary_factor": 0.25, "rope_theta": 1e7, "full_attention_interval": 4,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    })
}

fn glm4() -> Value {
    json!({
        "model_type": "glm4_moe", "vocab_size": 151_552, "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": false, "attention_bias": true, "num_attention_heads": 96,
        "num_key_value_heads": 8, "head_dim": 128, "partial_rotary_factor": 0.5, "rope_theta": 1e6,
        "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "num_experts_per_tok": 8, "norm_topk_prob": true,
    })
}

fn glm5() -> Value {
    json!({
        "model_type": "glm_moe_dsa", "hidden_size": 6144, "num_hidden_layers": 78, "vocab_size": 154_880,
        "max_position_embeddings": 202_752, "rms_norm_eps": 1e-5, "tie_word_embeddings": false,
        "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 2048, "kv_lora_rank": 512,
        "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "rope_interleave": true,
        "rope_parameters": { "rope_type": "default", "rope_theta": 1e6 }, "index_n_heads": 32,
        "index_head_dim": 128, "index_topk": 2048, "indexer_rope_interleave": true,
        "intermediate_size": 12_288, "first_k_dense_replace": 3, "scoring_func": "sigmoid",
        "topk_method": "noaux_tc", "n_group": 1, "topk_group": 1, "n_routed_experts": 256,
        "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "norm_topk_prob": true,
        "routed_scaling_factor": 2.5,
    })
}

/// Experts are published in MXFP4.
fn gpt_oss(layers: usize, experts: usize) -> Value {
    let kinds: Vec<&str> = ["sliding_attention", "full_attention"].into_iter().cycle().take(layers).collect();
    json!({
        "model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": layers, "vocab_size": 201_088,
        "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "tie_word_embeddings": false,
        "attention_bias": true, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
        "rope_theta": 150_000, "layer_types": kinds, "sliding_window": 128, "swiglu_limit": 7.0,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "original_max_position_embeddings": 4096, "truncate": false,
        },
        "num_local_experts": experts, "num_experts_per_tok": 4, "intermediate_size": 2880,
        "quantization_config": { "quant_method": "mxfp4" },
    })
}

fn deepseek_v2() -> Value {
    json!({
        "model_type": "deepseek_v2", "vocab_size": 102_400, "max_position_embeddings": 163_840,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": false, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "rope_theta": 10_000, "first_k_dense_replace": 1,
        "moe_layer_freq": 1, "scoring_func": "softmax", "n_shared_experts": 2, "num_experts_per_tok": 6,
        "norm_topk_prob": false,
    })
}

fn deepseek_v3() -> Value {
    json!({
        "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "vocab_size": 129_280,
        "max_position_embeddings": 163_840, "rms_norm_eps": 1e-6, "tie_word_embeddings": false,
        "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "rope_theta": 10_000,
        "rope_scaling": yarn(40, [32, 1], 1.0), "intermediate_size": 18_432, "first_k_dense_replace": 3,
        "moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "n_group": 8,
        "topk_group": 4, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048, "norm_topk_prob": true, "routed_scaling_factor": 2.5,
    })
}

#[cfg(test)]
mod tests {
    use smoe_format::spec::{GroupScore, GroupSpec, MixerKind, RopeScaling, RouterKind};
    use smoe_format::{BackboneTensor, FfnKind, ModelSpec};

    use super::*;
    use crate::synth::Shape;

    fn spec(name: &str) -> ModelSpec {
        Shape::find(name).expect(name).spec
    }

    /// Figures of a config may be wrong in ways that no rule of it shows; their product is published.
    #[test]
    fn every_shape_has_the_parameters_that_its_model_has() {
        // Billions: counted in the checkpoints, or, of round figures, the cards'; without what guesses ahead.
        let (counted, card) = (1e-3, 1e-2);
        let published = [
            ("qwen3-30b-a3b", 30.53, counted),
            ("qwen3-235b-a22b", 235.09, counted),
            ("qwen3-coder-480b-a35b", 480.15, counted),
            ("qwen3-next-80b-a3b", 80.0, card),
            ("qwen3.5-35b-a3b", 35.0, card),
            ("glm-4.5-air", 106.0, card),
            ("glm-4.5", 355.0, card),
            ("glm-5", 744.0, card),
            ("gpt-oss-20b", 20.91, counted),
            ("gpt-oss-120b", 116.83, counted),
            ("deepseek-v2-lite", 15.71, counted),
            ("deepseek-v2", 235.74, counted),
            ("deepseek-v3", 671.03, counted),
            ("deepseek-v3.2", 671.0, card),
            ("kimi-k2", 1026.0, card),
            ("minimax-m2", 229.0, card),
            ("olmoe-1b-7b", 6.919, counted),
            ("mixtral-8x7b", 46.70, counted),
        ];
        assert!(published.iter().map(|(name, ..)| *name).eq(PUBLISHED.iter().map(|(name, _)| *name)));
        for (name, billions, within) in published {
            let spec = spec(name);
            let backbone = BackboneTensor::all(&spec).into_iter().map(|tensor| {
                let (rows, cols) = tensor.shape(&spec);
                rows * cols
            });
            let experts =
                spec.moe_layers().count() * spec.moe.n_experts * 3 * spec.d_model * spec.moe.d_expert;
            let found = (backbone.sum::<usize>() + experts) as f64 / 1e9;
            assert!((found / billions - 1.0).abs() < within, "{name}: {found:.3} of {billions}");
        }
    }

    #[test]
    fn latent_attention_and_routers_are_the_models() {
        for (name, q_rank, heads, groups, score, n_dense, scale) in [
            ("deepseek-v2-lite", 0, 16, None, RouterKind::Softmax, 1, 1.0),
            ("deepseek-v2", 1536, 128, Some((8, 3, GroupScore::Best)), RouterKind::Softmax, 1, 16.0),
            ("deepseek-v3", 1536, 128, Some((8, 4, GroupScore::BestTwo)), RouterKind::Sigmoid, 3, 2.5),
            ("deepseek-v3.2", 1536, 128, Some((8, 4, GroupScore::BestTwo)), RouterKind::Sigmoid, 3, 2.5),
            ("kimi-k2", 1536, 64, None, RouterKind::Sigmoid, 1, 2.827),
            ("glm-5", 2048, 64, None, RouterKind::Sigmoid, 3, 2.5),
        ] {
            let spec = spec(name);
            let latent = spec.attention.latent.expect(name);
            assert_eq!((latent.q_rank, latent.kv_rank, latent.rope_dim), (q_rank, 512, 64), "{name}");
            assert_eq!((spec.attention.n_heads, spec.attention.n_kv_heads), (heads, 1), "{name}");
            let groups = groups.map(|(n, top, score)| GroupSpec { n, top, score });
            assert_eq!((spec.moe.groups, spec.moe.router), (groups, score), "{name}");
            assert_eq!(spec.moe.correction_bias, score == RouterKind::Sigmoid, "{name}");
            assert_eq!(spec.moe.routed_scale.to_bits(), f64::to_bits(scale), "{name}");
            let dense = spec.layers.iter().take_while(|kind| **kind != FfnKind::Moe).count();
            assert_eq!(dense, n_dense, "{name}");
            assert!(spec.moe.d_shared > 0, "{name}");
            assert_eq!(spec.attention.indexer.is_some(), ["glm-5", "deepseek-v3.2"].contains(&name));
        }
        // YaRN's factor on scores: (0.1 * 0.707 * ln 40 + 1)^2.
        let scale = spec("deepseek-v2-lite").attention.score_scale;
        assert!((scale - 1.589_6).abs() < 1e-3, "{scale}");
    }

    #[test]
    fn what_is_beside_attention_is_the_models() {
        let air = spec("glm-4.5-air");
        assert!(air.attention.qkv_bias && !air.attention.qk_norm && air.moe.correction_bias);
        assert_eq!(
            (air.rope.dim, air.moe.d_shared, air.moe.routed_scale.to_bits()),
            (Some(64), 1408, 1f64.to_bits())
        );
        assert!(spec("glm-4.5").attention.qk_norm);
        assert!(spec("olmoe-1b-7b").attention.qk_norm_whole);
        let oss = spec("gpt-oss-120b");
        assert!(oss.attention.sinks && oss.attention.o_bias && oss.moe.expert_bias && oss.moe.router_bias);
        assert_eq!((oss.windows.len(), &oss.windows[..2]), (36, &[128, 0][..]));
        assert!(matches!(oss.rope.scaling, RopeScaling::Yarn { truncate: false, .. }));
        let next = spec("qwen3-next-80b-a3b");
        let linear = next.mixers.iter().filter(|mixer| **mixer == MixerKind::GatedDelta).count();
        assert_eq!(
            (linear, next.mixers.len(), next.rope.dim, next.moe.shared_gate),
            (36, 48, Some(64), true)
        );
        assert_eq!(spec("minimax-m2").rope.dim, Some(64));
    }
}
