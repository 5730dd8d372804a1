//! Checkpoints that contradict themselves: decided as the reference decides, aloud, or refused by name.

mod common;

use std::path::Path;

use common::{Tensor, Tiny, Type, Vault, run, settings, watched};
use serde_json::{Value, json};
use smoe_format::spec::{FfnKind, RopeScaling};
use smoe_sculpt::{BackboneBits, SculptError, Settings, Warning, spec_from_config};

fn plain() -> Settings {
    settings(16, BackboneBits::Bf16)
}

fn refusal(tiny: &Tiny, shards: usize) -> SculptError {
    let dir = tempfile::tempdir().expect("dir");
    tiny.write(dir.path(), shards);
    refused(dir.path())
}

fn refused(checkpoint: &Path) -> SculptError {
    let out = checkpoint.join("vault");
    let error = run(checkpoint, &out, &plain()).expect_err("refused");
    assert!(!out.exists() && !checkpoint.join(".vault.partial").exists());
    error
}

/// Sculpts; the vault and the warnings.
fn accepted(checkpoint: &Path) -> (Vault, Vec<String>) {
    let out = checkpoint.join("vault");
    let (outcome, warnings) = watched(checkpoint, &out, &plain());
    outcome.expect("sculpted");
    (Vault::open(&out), warnings)
}

#[test]
fn untied_without_a_head_is_refused_by_name() {
    let mut tiny = Tiny::qwen3(Type::Bf16, 1);
    tiny.tensors.remove("lm_head.weight");
    let error = refusal(&tiny, 0);
    assert!(matches!(&error, SculptError::MissingHead { tensor } if tensor == "lm_head.weight"), "{error}");
    assert!(error.to_string().contains("tie_word_embeddings"), "{error}");
    // As its message suggests.
    tiny.config["tie_word_embeddings"] = json!(true);
    let dir = tempfile::tempdir().expect("dir");
    tiny.write(dir.path(), 0);
    let (vault, warnings) = accepted(dir.path());
    assert!(vault.experts.manifest().expect("manifest").spec.tied_head);
    assert!(vault.backbone.get("head").is_none());
    assert_eq!(warnings, [""; 0]);
}

#[test]
fn tied_with_a_head_is_decided_by_whether_it_differs() {
    let mut tiny = Tiny::qwen3(Type::Bf16, 1);
    tiny.config["tie_word_embeddings"] = json!(true);
    let dir = tempfile::tempdir().expect("dir");
    tiny.write(dir.path(), 0);
    let (vault, warnings) = accepted(dir.path());
    assert!(!vault.experts.manifest().expect("manifest").spec.tied_head);
    assert!(vault.backbone_tensor("head").1 == tiny.tensors["lm_head.weight"].bytes);
    assert!(warnings[0].contains("lm_head.weight") && warnings[0].contains("differs"), "{warnings:?}");

    // The same values, even as another type.
    let values = tiny.tensors["model.embed_tokens.weight"].values();
    tiny.tensors.insert("lm_head.weight".into(), Tensor::new(Type::F32, &[150, 72], &values));
    let dir = tempfile::tempdir().expect("dir");
    tiny.write(dir.path(), 0);
    let (vault, warnings) = accepted(dir.path());
    assert!(vault.experts.manifest().expect("manifest").spec.tied_head);
    assert!(vault.backbone.get("head").is_none());
    assert!(warnings[0].contains("equal"), "{warnings:?}");

    // Only the head.
    tiny.tensors.remove("model.embed_tokens.weight");
    let dir = tempfile::tempdir().expect("dir");
    tiny.write(dir.path(), 0);
    let (vault, warnings) = accepted(dir.path());
    assert!(vault.experts.manifest().expect("manifest").spec.tied_head);
    assert!(vault.backbone_tensor("embed").1 == tiny.tensors["lm_head.weight"].bytes);
    assert!(warnings[0].contains("model.embed_tokens.weight"), "{warnings:?}");
}

#[test]
fn missing_files_and_tensors_are_named() {
    let tiny = Tiny::qwen3(Type::Bf16, 2);
    let dir = tempfile::tempdir().expect("dir");
    tiny.write(dir.path(), 4);
    let gone = "model-00003-of-00004.safetensors";
    let kept = std::fs::read(dir.path().join(gone)).expect("shard");
    std::fs::remove_file(dir.path().join(gone)).expect("removed");
    match refused(dir.path()) {
        SculptError::MissingShard { file, missing: 1, shards: 4, tensors, .. } => {
            assert_eq!((file.as_str(), tensors), (gone, tiny.tensors.len() / 4));
        }
        other => panic!("{other}"),
    }
    for len in [0, 5, 100, kept.len() / 2, kept.len() - 1] {
        std::fs::write(dir.path().join(gone), &kept[..len]).expect("cut");
        let error = refused(dir.path()).to_string();
        assert!(error.contains(gone) && error.contains(&len.to_string()), "{error}");
    }
    let mut longer = kept.clone();
    longer.push(0);
    std::fs::write(dir.path().join(gone), longer).expect("longer");
    assert!(matches!(refused(dir.path()), SculptError::FileLength { .. }));

    let mut lacking = tiny.clone();
    lacking.tensors.retain(|name, _| !name.contains("layers.2.mlp.experts.4."));
    match refusal(&lacking, 0) {
        SculptError::MissingTensors { count: 3, examples } => {
            assert!(examples[0].starts_with("model.layers.2.mlp.experts.4."), "{examples:?}");
        }
        other => panic!("{other}"),
    }

    // The index promises what its file does not have.
    let dir = tempfile::tempdir().expect("dir");
    lacking.write(dir.path(), 2);
    let path = dir.path().join("model.safetensors.index.json");
    let mut index: Value = serde_json::from_slice(&std::fs::read(&path).expect("index")).expect("json");
    index["weight_map"]["model.layers.2.mlp.experts.4.up_proj.weight"] =
        json!("model-00002-of-00002.safetensors");
    std::fs::write(&path, index.to_string()).expect("index");
    let error = refused(dir.path()).to_string();
    assert!(error.contains("the index puts it into model-00002-of-00002.safetensors"), "{error}");

    let empty = tempfile::tempdir().expect("dir");
    assert!(matches!(refused(empty.path()), SculptError::NoCheckpoint { .. }));
    std::fs::write(empty.path().join("config.json"), "{}").expect("config");
    assert!(refused(empty.path()).to_string().contains("neither model.safetensors nor"));
    assert!(matches!(refused(&empty.path().join("nowhere")), SculptError::NoCheckpoint { .. }));
}

#[test]
fn an_index_that_leads_out_of_the_directory_is_refused() {
    let dir = tempfile::tempdir().expect("dir");
    Tiny::qwen3(Type::Bf16, 2).write(dir.path(), 1);
    for name in ["../model.safetensors", "/etc/passwd", ""] {
        let index = json!({"weight_map": {"a": name}});
        std::fs::write(dir.path().join("model.safetensors.index.json"), index.to_string()).expect("index");
        assert!(matches!(refused(dir.path()), SculptError::Json { .. }));
    }
}

#[test]
fn the_index_decides_between_two_copies_of_a_tensor() {
    let tiny = Tiny::qwen3(Type::Bf16, 2);
    let other = Tiny::qwen3(Type::Bf16, 9);
    let name = "model.norm.weight";
    let dir = tempfile::tempdir().expect("dir");
    tiny.write(dir.path(), 2);
    let path = dir.path().join("model.safetensors.index.json");
    let mut index: Value = serde_json::from_slice(&std::fs::read(&path).expect("index")).expect("json");
    let extra = "model-extra.safetensors";
    common::write_safetensors(&dir.path().join(extra), &[(&name.to_owned(), &other.tensors[name])]);
    index["weight_map"]["unused"] = json!(extra);
    std::fs::write(&path, index.to_string()).expect("index");
    let (vault, warnings) = accepted(dir.path());
    assert!(vault.backbone_tensor("final_norm").1 == tiny.tensors[name].bytes);
    assert!(warnings.iter().any(|w| w.contains(name) && w.contains(extra)), "{warnings:?}");

    let Some(Value::String(first)) = index["weight_map"].as_object_mut().expect("map").remove(name) else {
        panic!("listed")
    };
    std::fs::write(&path, index.to_string()).expect("index");
    std::fs::remove_dir_all(dir.path().join("vault")).expect("removed");
    match refused(dir.path()) {
        SculptError::Ambiguous { tensor, first: a, second: b } => {
            assert_eq!(tensor, name);
            assert!([&a, &b].contains(&&first) && [a.as_str(), &b].contains(&extra));
        }
        other => panic!("{other}"),
    }

    // In another file than the index says.
    let wrong = if first.contains("00001") { "model-00002-of-00002" } else { "model-00001-of-00002" };
    index["weight_map"][name] = json!(format!("{wrong}.safetensors"));
    index["weight_map"].as_object_mut().expect("map").remove("unused");
    std::fs::write(&path, index.to_string()).expect("index");
    let (vault, warnings) = accepted(dir.path());
    assert!(vault.backbone_tensor("final_norm").1 == tiny.tensors[name].bytes);
    assert!(warnings.iter().any(|w| w.contains(name) && w.contains(wrong)), "{warnings:?}");
}

#[test]
fn extra_tensors_are_counted_and_frequencies_are_not() {
    let mut tiny = Tiny::deepseek(Type::F16, 2);
    for i in 0..7 {
        let name = format!("model.layers.3.extra.{i}.weight");
        tiny.tensors.insert(name, Tensor::new(Type::F16, &[2], &[1.0, 2.0]));
    }
    let name = "model.layers.0.self_attn.rotary_emb.inv_freq";
    tiny.tensors.insert(name.into(), Tensor::new(Type::F32, &[2], &[1.0, 2.0]));
    let dir = tempfile::tempdir().expect("dir");
    tiny.write(dir.path(), 0);
    let (_, warnings) = accepted(dir.path());
    assert_eq!(warnings.len(), 1);
    assert!(warnings[0].starts_with("7 tensors") && warnings[0].contains("layers.3.extra.0"), "{warnings:?}");
}

#[test]
fn shapes_and_types_that_the_config_does_not_expect_are_named() {
    let mut tiny = Tiny::qwen3(Type::Bf16, 2);
    tiny.config["vocab_size"] = json!(149);
    match refusal(&tiny, 0) {
        SculptError::Shape { tensor, expected, found, .. } => {
            assert_eq!(tensor, "model.embed_tokens.weight");
            assert_eq!((expected, found), (vec![149, 72], vec![150, 72]));
        }
        other => panic!("{other}"),
    }
    let mut tiny = Tiny::qwen3(Type::Bf16, 2);
    let name = "model.layers.1.mlp.experts.0.gate_proj.weight";
    let odd = tiny.tensors.get_mut(name).expect("there");
    odd.dtype = "F8_E4M3".to_owned();
    odd.bytes.truncate(odd.bytes.len() / 2);
    let error = refusal(&tiny, 0).to_string();
    assert!(error.contains(name) && error.contains("F8_E4M3"), "{error}");
}

#[test]
fn weights_beyond_the_scales_are_named() {
    let dir = tempfile::tempdir().expect("dir");
    for (i, (name, flag, value)) in [
        ("model.layers.1.mlp.experts.0.down_proj.weight", "--bits 16", f32::NAN),
        ("model.layers.2.mlp.experts.5.up_proj.weight", "--bits 16", 70000.0),
        ("model.layers.1.self_attn.o_proj.weight", "--backbone bf16", f32::INFINITY),
    ]
    .into_iter()
    .enumerate()
    {
        let mut tiny = Tiny::qwen3(Type::F32, 2);
        let tensor = tiny.tensors.get_mut(name).expect("there");
        tensor.bytes[4 * 17..4 * 18].copy_from_slice(&value.to_le_bytes());
        let checkpoint = dir.path().join(format!("c{i}"));
        tiny.write(&checkpoint, 0);
        let out = dir.path().join(format!("v{i}"));
        let error = run(&checkpoint, &out, &settings(4, BackboneBits::Q8)).expect_err("refused");
        assert!(matches!(&error, SculptError::Range { tensor, flag: f, .. } if tensor == name && *f == flag));
        assert!(!out.exists());
        // Kept as it is: nothing to refuse.
        run(&checkpoint, &out, &Settings { force: true, ..plain() }).expect("sculpted");
    }
}

#[test]
fn tokenizer_and_embedding_may_differ_aloud() {
    let count = |tokens: usize, added: usize| {
        let vocab: serde_json::Map<String, Value> =
            (0..tokens).map(|i| (format!("t{i}"), json!(i))).collect();
        let mut tiny = Tiny::qwen3(Type::Bf16, 2);
        let added: Vec<Value> = (0..added).map(|i| json!({"id": tokens + i, "content": "x"})).collect();
        let tokenizer =
            json!({"model": {"type": "BPE", "vocab": vocab, "merges": []}, "added_tokens": added});
        tiny.side.insert("tokenizer.json".into(), tokenizer.to_string().into_bytes());
        let dir = tempfile::tempdir().expect("dir");
        tiny.write(dir.path(), 0);
        accepted(dir.path()).1
    };
    assert_eq!(count(140, 10), [""; 0]);
    let fewer = count(100, 3);
    assert!(fewer[0].contains("150 rows") && fewer[0].contains("103 tokens"), "{fewer:?}");
    let more = count(150, 1);
    assert!(more[0].contains("151 tokens"), "{more:?}");
}

#[test]
fn what_this_build_cannot_compute_is_refused_by_key() {
    let qwen = Tiny::qwen3(Type::Bf16, 1).config;
    let deepseek = Tiny::deepseek(Type::Bf16, 1).config;
    let cases = [
        (&qwen, "attention_bias", json!(true)),
        (&qwen, "hidden_act", json!("gelu")),
        (&qwen, "use_sliding_window", json!(true)),
        (&qwen, "layer_types", json!(["full_attention", "sliding_attention", "full_attention"])),
        (&qwen, "quantization_config", json!({"quant_method": "fp8"})),
        (&qwen, "rope_scaling", json!({"type": "dynamic", "factor": 2.0})),
        (&qwen, "rope_scaling", json!({"rope_type": "longrope", "factor": 2.0})),
        (&qwen, "rope_scaling", json!({"rope_type": "yarn"})),
        (&qwen, "rope_scaling", json!({"factor": 2.0})),
        (&qwen, "rope_scaling", json!("yarn")),
        (&qwen, "partial_rotary_factor", json!(0.5)),
        (&qwen, "num_local_experts", json!(7)),
        (&qwen, "num_experts", json!(0)),
        (&qwen, "decoder_sparse_step", json!(0)),
        (&qwen, "hidden_size", json!("72")),
        (&qwen, "hidden_size", json!(-1)),
        (&qwen, "num_key_value_heads", Value::Null),
        (&qwen, "norm_topk_prob", json!(1)),
        (&qwen, "rms_norm_eps", json!("tiny")),
        (&deepseek, "moe_layer_freq", json!(2)),
        (&deepseek, "scoring_func", json!("sigmoid")),
        (&deepseek, "n_group", json!(8)),
        (&deepseek, "topk_method", json!("group_limited_greedy")),
        (&deepseek, "routed_scaling_factor", json!(16.0)),
        (&deepseek, "kv_lora_rank", json!(512)),
        (&deepseek, "rope_scaling", json!({"type": "yarn", "factor": 40, "mscale": 0.7})),
    ];
    for (config, key, value) in cases {
        let mut config = config.clone();
        config[key] = value.clone();
        match spec_from_config(&config) {
            Err(SculptError::Config { key: named, expected, .. }) => {
                assert!(named.starts_with(key) || expected.contains(key), "{key}={value}: {named}");
            }
            other => panic!("{key}={value}: {other:?}"),
        }
    }
    for model_type in [json!("llama"), json!("dbrx"), Value::Null, json!(3)] {
        let mut config = qwen.clone();
        config["model_type"] = model_type;
        assert!(matches!(spec_from_config(&config), Err(SculptError::Family { .. })));
    }
    let mut config = qwen.clone();
    config["num_experts_per_tok"] = json!(7);
    assert!(matches!(spec_from_config(&config), Err(SculptError::Format(_))));
}

#[test]
fn both_styles_of_configs_mean_the_same() {
    let base = Tiny::qwen3(Type::Bf16, 1).config;
    let with = |edits: &[(&str, Value)]| {
        let mut config = base.clone();
        for (key, value) in edits {
            config[*key] = value.clone();
        }
        spec_from_config(&config).expect("known")
    };
    let yarn = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128});
    let mut inner = yarn.clone();
    inner["rope_theta"] = json!(5e6);
    let (old, _) = with(&[("rope_theta", json!(5e6)), ("rope_scaling", yarn.clone())]);
    let (new, warnings) = with(&[("rope_theta", Value::Null), ("rope_parameters", inner)]);
    assert_eq!(old, new);
    assert_eq!(warnings, []);
    assert_eq!(new.rope.theta, 5e6);
    match new.rope.scaling {
        RopeScaling::Yarn { factor, original_context, beta_fast, beta_slow, attention_factor, truncate } => {
            assert_eq!(
                (factor, original_context, beta_fast, beta_slow, truncate),
                (4.0, 128, 32.0, 1.0, true)
            );
            assert!((attention_factor - 1.138_629_436_111_989).abs() < 1e-12);
        }
        other => panic!("{other:?}"),
    }
    let mut explicit = yarn.clone();
    explicit["mscale"] = json!(1.0);
    explicit["mscale_all_dim"] = json!(0.5);
    explicit["truncate"] = json!(false);
    explicit["beta_fast"] = json!(0);
    let (spec, _) = with(&[("rope_scaling", explicit)]);
    let RopeScaling::Yarn { attention_factor, truncate, beta_fast, .. } = spec.rope.scaling else {
        panic!("yarn")
    };
    let expected = (0.1 * 4f64.ln() + 1.0) / (0.05 * 4f64.ln() + 1.0);
    assert!((attention_factor - expected).abs() < 1e-12 && !truncate && beta_fast == 32.0);

    let (spec, warnings) = with(&[(
        "rope_scaling",
        json!({"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 128}),
    )]);
    assert!(matches!(spec.rope.scaling, RopeScaling::Yarn { factor: 8.0, .. }));
    assert!(matches!(&warnings[..], [Warning::Contradiction { .. }]), "{warnings:?}");
    let (spec, _) = with(&[("rope_scaling", json!({"type": "linear", "factor": 2}))]);
    assert_eq!(spec.rope.scaling, RopeScaling::Linear { factor: 2.0 });
    let (spec, warnings) = with(&[("rope_theta", Value::Null), ("norm_topk_prob", Value::Null)]);
    assert_eq!((spec.rope.theta, spec.moe.norm_topk), (10_000.0, false));
    assert_eq!(warnings.len(), 2);
    let (_, warnings) = with(&[("rope_parameters", json!({"rope_type": "default", "rope_theta": 3.0}))]);
    assert!(matches!(&warnings[..], [Warning::Contradiction { .. }]), "{warnings:?}");

    let (spec, _) = with(&[("decoder_sparse_step", json!(2)), ("mlp_only_layers", json!([9]))]);
    assert_eq!(spec.layers, [FfnKind::Dense(80), FfnKind::Moe, FfnKind::Dense(80)]);
    let (spec, _) = with(&[("head_dim", Value::Null)]);
    assert_eq!(spec.attention.head_dim, 18);
}

#[test]
fn settings_are_checked_before_anything_is_written() {
    let dir = tempfile::tempdir().expect("dir");
    Tiny::qwen3(Type::Bf16, 1).write(dir.path(), 0);
    let base = plain();
    for (flag, bad) in [
        ("--bits", Settings { bits: 7, ..base.clone() }),
        ("--group", Settings { group: 48, ..base.clone() }),
        ("--max-layers", Settings { max_layers: Some(1), ..base.clone() }),
        ("--max-experts", Settings { max_experts: Some(1), ..base.clone() }),
        ("--max-experts", Settings { max_experts: Some(0), ..base.clone() }),
        ("--threads", Settings { threads: Some(0), ..base }),
    ] {
        let error = run(dir.path(), &dir.path().join("vault"), &bad).expect_err("refused");
        assert!(error.to_string().starts_with(flag), "{error}");
    }
    assert!(!dir.path().join(".vault.partial").exists());
}
