//! The families beyond the first two: what their configs mean, and what of them is refused by name.
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

use serde_json::{Value, json};
use smoe_format::ModelSpec;
use smoe_format::spec::{FfnKind, GroupScore, GroupSpec, MixerKind, Multipliers};
use smoe_sculpt::{SculptError, Warning, spec_from_config};
use smoe_testkit::fixtures;

/// A config with what every family asks for.
fn config(family: &str, own: Value) -> Value {
    let mut config = json!({
        "model_type": family, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 150,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "num_experts_per_tok": 2, "rope_theta": 1e4,
        "tie_word_embeddings": false,
    });
    config.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
    config
}

fn mixtral() -> Value {
    config("mixtral", json!({ "num_local_experts": 4 }))
}

fn olmoe() -> Value {
    config("olmoe", json!({ "num_experts": 8, "norm_topk_prob": false }))
}

fn qwen2_moe() -> Value {
    let own = json!({
        "num_experts": 8, "moe_intermediate_size": 32, "norm_topk_prob": false,
        "shared_expert_intermediate_size": 64,
    });
    config("qwen2_moe", own)
}

fn glm4_moe() -> Value {
    let own = json!({
        "n_routed_experts": 8, "moe_intermediate_size": 32, "n_shared_experts": 1, "norm_topk_prob": true,
        "partial_rotary_factor": 0.5, "use_qk_norm": true, "attention_bias": true, "n_group": 1,
        "topk_group": 1, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1,
    });
    config("glm4_moe", own)
}

fn gpt_oss() -> Value {
    let own = json!({
        "num_local_experts": 8, "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    });
    config("gpt_oss", own)
}

fn granitemoe() -> Value {
    let own = json!({
        "num_local_experts": 8, "embedding_multiplier": 12.0, "attention_multiplier": 0.0625,
        "residual_multiplier": 0.22, "logits_scaling": 6, "attention_bias": false,
    });
    config("granitemoe", own)
}

fn ernie4_5_moe() -> Value {
    let own = json!({
        "moe_num_experts": 8, "moe_k": 2, "num_experts_per_tok": null, "moe_intermediate_size": 32,
        "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": 28,
        "moe_layer_interval": 1, "moe_gate": "topk", "moe_use_aux_free": true, "moe_capacity": [8, 8, 8],
        "use_bias": false,
    });
    config("ernie4_5_moe", own)
}

fn minimax_m2() -> Value {
    let own = json!({
        "num_local_experts": 8, "rotary_dim": 8, "scoring_func": "sigmoid", "use_qk_norm": true,
        "qk_norm_type": "per_layer", "use_routing_bias": true, "shared_intermediate_size": 0,
        "attn_type_list": [1, 1, 1], "sliding_window": null, "num_mtp_modules": 0,
    });
    config("minimax_m2", own)
}

/// What hybrids ask for besides.
fn hybrid() -> Value {
    json!({
        "num_experts": 8, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64,
        "norm_topk_prob": true, "partial_rotary_factor": 0.25, "attn_output_gate": true,
        "full_attention_interval": 3, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 16, "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4,
    })
}

fn qwen3_next() -> Value {
    config("qwen3_next", hybrid())
}

fn qwen3_5_moe() -> Value {
    let text = config("qwen3_5_moe_text", hybrid());
    json!({ "model_type": "qwen3_5_moe", "text_config": text, "vision_config": { "depth": 2 } })
}

fn deepseek(family: &str) -> Value {
    let own = json!({
        "num_key_value_heads": 4, "n_routed_experts": 8, "moe_intermediate_size": 32, "n_shared_experts": 2,
        "first_k_dense_replace": 1, "moe_layer_freq": 1, "norm_topk_prob": family == "deepseek_v3",
        "q_lora_rank": null, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
        "v_head_dim": 32, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 16.0,
        "topk_method": if family == "deepseek_v3" { "noaux_tc" } else { "group_limited_greedy" },
        "scoring_func": if family == "deepseek_v3" { "sigmoid" } else { "softmax" },
    });
    config(family, own)
}

fn sparse(family: &str) -> Value {
    let mut config = deepseek("deepseek_v3");
    let own = json!({
        "model_type": family, "q_lora_rank": 48, "index_n_heads": 4, "index_head_dim": 32, "index_topk": 2048,
    });
    config.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
    config
}

fn read(config: &Value) -> (ModelSpec, Vec<Warning>) {
    spec_from_config(config).unwrap_or_else(|e| panic!("{config}: {e}"))
}

#[test]
fn configs_of_the_fixtures_mean_the_models_written_out_by_hand() {
    for (family, expected) in [
        ("qwen3_moe", fixtures::qwen3_moe()),
        ("qwen3_moe_tied", fixtures::qwen3_moe_tied()),
        ("deepseek", fixtures::deepseek()),
        ("mixtral", fixtures::mixtral()),
        ("olmoe", fixtures::olmoe()),
        ("qwen2_moe", fixtures::qwen2_moe()),
        ("glm4_moe", fixtures::glm4_moe()),
        ("gpt_oss", fixtures::gpt_oss()),
        ("deepseek_v2", fixtures::deepseek_v2()),
        ("deepseek_v3", fixtures::deepseek_v3()),
        ("granitemoe", fixtures::granitemoe()),
        ("ernie4_5_moe", fixtures::ernie4_5_moe()),
        ("minimax_m2", fixtures::minimax_m2()),
        ("glm_moe_dsa", fixtures::glm_moe_dsa()),
        ("deepseek_v32", fixtures::deepseek_v32()),
        ("qwen3_next", fixtures::qwen3_next()),
        ("qwen3_5_moe", fixtures::qwen3_5_moe()),
    ] {
        let Some(dir) = fixtures::fixture(family) else { continue };
        let config = serde_json::from_slice(&std::fs::read(dir.join("config.json")).unwrap()).unwrap();
        assert_eq!(read(&config).0, expected, "{family}");
    }
}

#[test]
fn what_a_family_cannot_compute_is_refused_by_key() {
    let (v2, v3) = (deepseek("deepseek_v2"), deepseek("deepseek_v3"));
    for (config, key, value) in [
        (mixtral(), "sliding_window", json!(4096)),
        (mixtral(), "attention_bias", json!(true)),
        (mixtral(), "num_local_experts", Value::Null),
        (mixtral(), "residual_multiplier", json!(0.5)),
        (mixtral(), "attention_multiplier", json!(0.5)),
        (olmoe(), "clip_qkv", json!(8.0)),
        (olmoe(), "attention_bias", json!(true)),
        (qwen2_moe(), "shared_expert_intermediate_size", Value::Null),
        (qwen2_moe(), "qkv_bias", json!("yes")),
        (qwen2_moe(), "use_sliding_window", json!(true)),
        (glm4_moe(), "partial_rotary_factor", json!(0.0)),
        (glm4_moe(), "partial_rotary_factor", json!(1.5)),
        (glm4_moe(), "topk_group", Value::Null),
        (glm4_moe(), "routed_scaling_factor", json!("large")),
        (gpt_oss(), "layer_types", Value::Null),
        (gpt_oss(), "layer_types", json!(["sliding_attention"])),
        (gpt_oss(), "layer_types", json!(["full_attention", "full_attention", "linear_attention"])),
        (gpt_oss(), "sliding_window", Value::Null),
        (gpt_oss(), "sliding_window", json!(0)),
        (gpt_oss(), "swiglu_limit", json!("7")),
        (gpt_oss(), "rope_scaling", json!({ "rope_type": "linear", "factor": 2.0 })),
        (v2.clone(), "norm_topk_prob", json!(true)),
        (v2.clone(), "scoring_func", json!("sigmoid")),
        (v2.clone(), "topk_method", json!("noaux_tc")),
        (v2.clone(), "num_key_value_heads", json!(2)),
        (v2.clone(), "kv_lora_rank", Value::Null),
        (v2.clone(), "attention_bias", json!(true)),
        (v2, "rope_scaling", json!({ "type": "linear", "factor": 2.0 })),
        (v3.clone(), "scoring_func", json!("softmax")),
        (v3.clone(), "topk_method", json!("greedy")),
        (v3.clone(), "moe_layer_freq", json!(2)),
        (v3.clone(), "rope_interleave", json!(1)),
        (v3, "v_head_dim", Value::Null),
        (granitemoe(), "residual_multiplier", json!(0.0)),
        (granitemoe(), "attention_multiplier", json!(-1.0)),
        (granitemoe(), "logits_scaling", json!("6")),
        (granitemoe(), "position_embedding_type", json!("nope")),
        (granitemoe(), "shared_intermediate_size", json!(32)),
        (ernie4_5_moe(), "use_bias", json!(true)),
        (ernie4_5_moe(), "moe_k", Value::Null),
        (ernie4_5_moe(), "moe_gate", json!("top2")),
        (ernie4_5_moe(), "moe_use_aux_free", json!(false)),
        (ernie4_5_moe(), "moe_layer_interval", json!(0)),
        (ernie4_5_moe(), "moe_layer_start_index", json!([1, 2])),
        (ernie4_5_moe(), "moe_norm_min", json!("small")),
        (minimax_m2(), "rotary_dim", json!(0)),
        (minimax_m2(), "rotary_dim", json!(32)),
        (minimax_m2(), "partial_rotary_factor", json!(0.75)),
        (minimax_m2(), "scoring_func", json!("softmax")),
        (minimax_m2(), "use_qk_norm", json!(false)),
        (minimax_m2(), "qk_norm_type", json!("per_head")),
        (minimax_m2(), "use_routing_bias", json!(false)),
        (minimax_m2(), "shared_intermediate_size", json!(64)),
        (minimax_m2(), "attn_type_list", json!([0, 1, 1])),
        (minimax_m2(), "sliding_window", json!(128)),
        (sparse("glm_moe_dsa"), "index_topk", Value::Null),
        (sparse("deepseek_v32"), "routed_scaling_factor", Value::Null),
        (sparse("glm_moe_dsa"), "index_n_heads", json!("many")),
        (sparse("glm_moe_dsa"), "indexer_types", json!(["full", "full", "shared"])),
        (sparse("glm_moe_dsa"), "index_topk_freq", json!(4)),
        (sparse("glm_moe_dsa"), "index_topk_pattern", json!("FSS")),
        (sparse("glm_moe_dsa"), "index_share", json!(true)),
        (sparse("glm_moe_dsa"), "indexer_rope_interleave", json!(false)),
        (sparse("glm_moe_dsa"), "rope_interleave", json!(false)),
        (sparse("glm_moe_dsa"), "layer_types", json!(["full_attention", "full_attention", "full_attention"])),
        (sparse("glm_moe_dsa"), "mlp_layer_types", json!(["dense", "sparse"])),
        (sparse("glm_moe_dsa"), "mlp_layer_types", json!(["dense", "sparse", "linear"])),
        (sparse("glm_moe_dsa"), "attention_bias", json!(true)),
        (sparse("deepseek_v32"), "indexer_rope_interleave", json!(true)),
        (sparse("deepseek_v32"), "scoring_func", json!("softmax")),
        (sparse("deepseek_v32"), "num_key_value_heads", json!(2)),
        (qwen3_next(), "linear_num_key_heads", Value::Null),
        (qwen3_next(), "layer_types", json!(["linear_attention", "full_attention"])),
        (qwen3_next(), "layer_types", json!(["linear_attention", "full_attention", "sliding_attention"])),
        (qwen3_next(), "full_attention_interval", json!(0)),
        (qwen3_next(), "attn_output_gate", json!(false)),
        (qwen3_next(), "attention_bias", json!(true)),
        (qwen3_5_moe(), "text_config", Value::Null),
    ] {
        read(&config);
        let mut config = config;
        config[key] = value.clone();
        match spec_from_config(&config) {
            Err(SculptError::Config { key: named, expected, .. }) => {
                assert!(named.starts_with(key) || expected.contains(key), "{key}={value}: {named}");
            }
            other => panic!("{key}={value}: {other:?}"),
        }
    }
}

#[test]
fn sizes_that_the_engine_cannot_have_are_refused() {
    let mut narrow = deepseek("deepseek_v2");
    narrow["kv_lora_rank"] = json!(40);
    let mut groups = deepseek("deepseek_v3");
    groups["n_group"] = json!(3);
    let mut few = deepseek("deepseek_v3");
    few["num_experts_per_tok"] = json!(5);
    let (mut plain, mut thin, mut none) =
        (sparse("glm_moe_dsa"), sparse("glm_moe_dsa"), sparse("glm_moe_dsa"));
    plain["q_lora_rank"] = Value::Null;
    thin["index_head_dim"] = json!(8);
    none["index_topk"] = json!(0);
    let mut keys = qwen3_next();
    keys["linear_key_head_dim"] = json!(24);
    let mut heads = qwen3_next();
    heads["linear_num_value_heads"] = json!(5);
    let mut no_attention = qwen3_next();
    no_attention["full_attention_interval"] = json!(4);
    for config in [narrow, groups, few, plain, thin, none, keys, heads, no_attention] {
        assert!(matches!(spec_from_config(&config), Err(SculptError::Format(_))), "{config}");
    }
}

#[test]
fn keys_that_are_silent_mean_what_the_reference_takes() {
    let with = |mut config: Value, key: &str, value: Value| {
        config[key] = value;
        read(&config)
    };
    let (spec, warnings) = with(mixtral(), "rms_norm_eps", Value::Null);
    assert_eq!(spec.rms_norm_eps, 1e-5);
    assert!(spec.moe.norm_topk && spec.layers == [FfnKind::Moe; 3] && spec.moe.d_expert == 96);
    assert!(matches!(&warnings[..], [Warning::Default { key: "rms_norm_eps", .. }]), "{warnings:?}");
    assert_eq!(with(gpt_oss(), "rope_theta", Value::Null).0.rope.theta, 150_000.0);
    assert!(read(&qwen2_moe()).0.attention.qkv_bias, "published configs do not say so");
    assert!(!with(qwen2_moe(), "qkv_bias", json!(false)).0.attention.qkv_bias);
    assert!(!with(glm4_moe(), "use_qk_norm", Value::Null).0.attention.qk_norm);
    let (spec, warnings) = with(glm4_moe(), "partial_rotary_factor", Value::Null);
    assert_eq!(spec.rope_dim(), 8);
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    assert_eq!(with(glm4_moe(), "partial_rotary_factor", json!(1.0)).0.rope.dim, None);
    let full = json!(["full_attention", "full_attention", "full_attention"]);
    assert!(with(gpt_oss(), "layer_types", full).0.windows.is_empty());
    assert_eq!(read(&gpt_oss()).0.windows, [128, 0, 128]);
}

#[test]
fn sparse_attention_has_the_names_of_two_versions() {
    for name in ["indexed_attention", "deepseek_sparse_attention"] {
        let mut config = sparse("glm_moe_dsa");
        config["layer_types"] = json!([name, name, name]);
        assert!(read(&config).0.attention.indexer.is_some(), "{name}");
    }
    let mut config = sparse("deepseek_v32");
    for key in ["n_group", "topk_group"] {
        config.as_object_mut().unwrap().remove(key);
    }
    let error = spec_from_config(&config).unwrap_err().to_string();
    assert!(error.contains("n_group"), "{error}");
}

#[test]
fn linear_layers_are_those_that_are_named_or_lie_between() {
    let (delta, full) = (MixerKind::GatedDelta, MixerKind::Attention);
    let (spec, warnings) = read(&qwen3_next());
    assert_eq!((&spec.mixers[..], &warnings[..]), (&[delta, delta, full][..], &[][..]));
    assert!(spec.attention.gate && spec.attention.qk_norm && spec.moe.shared_gate);
    assert_eq!(spec.rope_dim(), 4);
    let mut config = qwen3_next();
    config.as_object_mut().unwrap().remove("full_attention_interval");
    config["num_hidden_layers"] = json!(4);
    let (spec, warnings) = read(&config);
    assert_eq!((&spec.mixers[..], warnings.len()), (&[delta, delta, delta, full][..], 1), "{warnings:?}");
    let mut config = qwen3_next();
    config["layer_types"] = json!(["full_attention", "linear_attention", "full_attention"]);
    assert_eq!(read(&config).0.mixers, [full, delta, full]);
    config["layer_types"] = json!(["full_attention", "full_attention", "full_attention"]);
    let spec = read(&config).0;
    assert_eq!((spec.mixers.len(), spec.delta), (0, None));
}

#[test]
fn what_sees_images_is_left_out_aloud() {
    let (spec, warnings) = read(&qwen3_5_moe());
    assert!(matches!(&warnings[..], [Warning::Vision { what: "vision_config" }]), "{warnings:?}");
    let alone = qwen3_5_moe()["text_config"].take();
    let (text, warnings) = read(&alone);
    assert_eq!((ModelSpec { model_type: "qwen3_5_moe".to_owned(), ..text }, warnings), (spec, Vec::new()));
}

#[test]
fn multipliers_are_those_of_the_config() {
    let spec = read(&granitemoe()).0;
    assert_eq!(spec.multipliers, Multipliers { embedding: 12.0, residual: 0.22, logits: 1.0 / 6.0 });
    // 0.0625 is there instead of 1/4.
    assert_eq!(spec.attention.score_scale, 0.25);
    assert_eq!(read(&config("granitemoe", json!({ "num_local_experts": 8 }))).0.attention.score_scale, 4.0);
}

#[test]
fn ernies_layers_have_experts_from_start_to_end_at_intervals() {
    let (moe, dense) = (FfnKind::Moe, FfnKind::Dense(96));
    let layers = |changes: Value| {
        let mut config = ernie4_5_moe();
        config["num_hidden_layers"] = json!(6);
        config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        read(&config).0.layers
    };
    assert_eq!(layers(json!({})), [dense, moe, moe, moe, moe, moe]);
    assert_eq!(layers(json!({ "moe_layer_end_index": -1 })), [dense, moe, moe, moe, moe, moe]);
    assert_eq!(layers(json!({ "moe_layer_end_index": 3 })), [dense, moe, moe, moe, dense, dense]);
    let every_other = json!({ "moe_layer_interval": 2, "moe_layer_start_index": 2 });
    assert_eq!(layers(every_other), [dense, dense, dense, moe, dense, moe]);
    assert_eq!(layers(json!({ "moe_layer_start_index": null }))[..2], [dense, moe]);
    let spec = read(&ernie4_5_moe()).0;
    assert_eq!((spec.moe.norm_min, spec.moe.d_shared, spec.moe.top_k), (1e-12, 64, 2));
    let mut silent = ernie4_5_moe();
    silent["tie_word_embeddings"] = Value::Null;
    assert!(read(&silent).0.tied_head, "the reference's default");
}

#[test]
fn a_width_or_a_part_says_how_much_of_a_head_is_rotated() {
    let dim = |width: Value, part: Value| {
        let mut config = minimax_m2();
        (config["rotary_dim"], config["partial_rotary_factor"]) = (width, part);
        read(&config).0.rope.dim
    };
    assert_eq!(dim(json!(8), Value::Null), Some(8));
    assert_eq!(dim(json!(8), json!(0.5)), Some(8));
    assert_eq!(dim(Value::Null, json!(0.25)), Some(4));
    assert_eq!(dim(Value::Null, Value::Null), None);
    assert_eq!(dim(json!(16), Value::Null), None);
}

#[test]
fn kimi_is_deepseeks_architecture_by_another_name() {
    let mut config = deepseek("deepseek_v3");
    let (theirs, _) = read(&config);
    config["model_type"] = json!("kimi_k2");
    assert_eq!(read(&config).0, ModelSpec { model_type: "kimi_k2".to_owned(), ..theirs });
}

#[test]
fn groups_count_where_they_limit() {
    let (v2, v3) = (deepseek("deepseek_v2"), deepseek("deepseek_v3"));
    let groups = |config: &Value| read(config).0.moe.groups;
    assert_eq!(groups(&v2), Some(GroupSpec { n: 4, top: 2, score: GroupScore::Best }));
    assert_eq!(groups(&v3), Some(GroupSpec { n: 4, top: 2, score: GroupScore::BestTwo }));
    let mut greedy = v2;
    greedy["topk_method"] = json!("greedy");
    assert_eq!(groups(&greedy), None);
    let mut all = v3;
    all["topk_group"] = json!(4);
    assert_eq!(groups(&all), None);
}

#[test]
fn yarn_scales_the_scores_of_latent_attention() {
    let mut config = deepseek("deepseek_v3");
    assert_eq!(read(&config).0.attention.score_scale, 1.0);
    config["rope_scaling"] = json!({
        "type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1,
        "original_max_position_embeddings": 64,
    });
    let (spec, _) = read(&config);
    let mscale = 0.1 * 40f64.ln() + 1.0;
    assert!((spec.attention.score_scale - mscale * mscale).abs() < 1e-12);
    assert_eq!((spec.attention.key_dim(), spec.attention.kv_planes()), (80, 1));
}

#[test]
fn indexers_rotate_as_their_family_does_and_layers_are_listed_or_counted() {
    let glm = read(&sparse("glm_moe_dsa")).0;
    let indexer = glm.attention.indexer.unwrap();
    assert_eq!((indexer.n_heads, indexer.head_dim, indexer.top_k), (4, 32, 2048));
    assert!(indexer.interleaved && glm.rope.interleaved);
    let deepseek = read(&sparse("deepseek_v32")).0;
    assert!(!deepseek.attention.indexer.unwrap().interleaved && deepseek.rope.interleaved);
    let (moe, dense) = (FfnKind::Moe, FfnKind::Dense(96));
    assert_eq!(glm.layers, [dense, moe, moe]);
    // What lists layers goes before what counts them.
    let mut listed = sparse("glm_moe_dsa");
    listed["mlp_layer_types"] = json!(["sparse", "dense", "sparse"]);
    assert_eq!(read(&listed).0.layers, [moe, dense, moe]);
    let mut silent = sparse("glm_moe_dsa");
    silent["first_k_dense_replace"] = Value::Null;
    silent["num_hidden_layers"] = json!(5);
    let (spec, warnings) = read(&silent);
    assert_eq!(spec.layers, [dense, dense, dense, moe, moe]);
    assert!(matches!(&warnings[..], [Warning::Default { key: "first_k_dense_replace", .. }]), "{warnings:?}");
    // Every layer has its own, said in any way.
    let mut own = sparse("glm_moe_dsa");
    own["indexer_types"] = json!(["full", "full", "full"]);
    own["index_topk_pattern"] = json!("FFF");
    (own["index_topk_freq"], own["index_skip_topk_offset"]) = (json!(1), json!(2));
    assert_eq!(read(&own).0, glm);
}

#[test]
fn layers_that_guess_ahead_are_left_out_aloud() {
    for (mut config, key) in
        [(deepseek("deepseek_v3"), "num_nextn_predict_layers"), (minimax_m2(), "num_mtp_modules")]
    {
        let (without, warnings) = read(&config);
        assert_eq!(warnings, []);
        config[key] = json!(1);
        let (with, warnings) = read(&config);
        assert_eq!(with, without);
        assert!(matches!(&warnings[..], [Warning::Ignored { what }] if *what == key), "{warnings:?}");
    }
}
