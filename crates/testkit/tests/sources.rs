//! Checkpoints, vaults and the original's files: written and read back, and one against the other.

use std::path::Path;

use smoe_format::{BackboneTensor, Encoding, ExpertKey, ModelSpec, Projection, Uniform, Zero};
use smoe_meter::fidelity::{Fidelity, TokenScore};
use smoe_testkit::tiny::{CheckpointOptions, ConfigStyle, Float, tokenizer};
use smoe_testkit::{
    CheckpointWeights, Golden, OriginalWeights, TinyModel, VaultWeights, Weights, fixtures, forward,
    shared_path, tolerance, vault,
};

fn coded(bits: u8, group: usize, zero: Zero) -> Encoding {
    Encoding::Uniform(Uniform::new(bits, group, zero).expect("valid"))
}

/// Calls `f` with every tensor of both and its name.
fn each(spec: &ModelSpec, a: &impl Weights, b: &impl Weights, mut f: impl FnMut(&str, &[f64], &[f64])) {
    for tensor in BackboneTensor::all(spec) {
        f(&tensor.to_string(), &a.backbone(tensor), &b.backbone(tensor));
    }
    for layer in spec.moe_layers() {
        for expert in 0..spec.moe.n_experts {
            let key = ExpertKey { layer: layer as u32, expert: expert as u32 };
            for projection in Projection::ALL {
                let name = format!("{key} {}", projection.name());
                f(&name, &a.expert(key, projection), &b.expert(key, projection));
            }
        }
    }
}

fn assert_same(spec: &ModelSpec, a: &impl Weights, b: &impl Weights) {
    each(spec, a, b, |name, a, b| assert!(a == b, "{name}"));
}

fn json(dir: &Path, name: &str) -> serde_json::Value {
    serde_json::from_slice(&std::fs::read(dir.join(name)).expect(name)).expect(name)
}

#[test]
fn a_checkpoint_reads_back_in_every_number_format_and_number_of_files() {
    for model in TinyModel::all(1) {
        for (shards, dtype) in [(1, Float::Bf16), (2, Float::F16), (3, Float::F32)] {
            let dir = tempfile::tempdir().expect("a temporary folder");
            let options = CheckpointOptions { shards, dtype, ..Default::default() };
            model.write_checkpoint(dir.path(), options);
            let weights = CheckpointWeights::open(dir.path());
            assert_same(&model.spec, &model, &weights);
            assert_eq!(dir.path().join("model.safetensors.index.json").exists(), shards > 1);
        }
    }
}

#[test]
fn configs_say_the_spec_in_both_styles() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let write = |model: &TinyModel, config| {
        let options = CheckpointOptions { config, ..Default::default() };
        model.write_checkpoint(dir.path(), options);
        json(dir.path(), "config.json")
    };
    let hub = write(&TinyModel::qwen3_tied(1), ConfigStyle::Hub);
    assert_eq!(hub["num_experts"], 7);
    assert_eq!(hub["rope_scaling"]["rope_type"], "yarn");
    assert_eq!(hub["rope_theta"], 1e6);
    assert_eq!(hub["mlp_only_layers"], serde_json::json!([1]));
    assert_eq!(hub["rms_norm_eps"], 1e-6);
    let nested = write(&TinyModel::qwen3_tied(1), ConfigStyle::Nested);
    assert_eq!(nested["num_local_experts"], 7);
    assert_eq!(nested["rope_parameters"]["original_max_position_embeddings"], 256);
    assert_eq!(nested["rope_parameters"]["rope_theta"], 1e6);
    assert!(nested.get("rope_scaling").is_none());
    let deepseek = write(&TinyModel::deepseek(1), ConfigStyle::Hub);
    assert_eq!(deepseek["n_shared_experts"], 2);
    assert_eq!(deepseek["first_k_dense_replace"], 1);
    assert_eq!(deepseek["eos_token_id"], tokenizer::IM_END);
    assert_eq!(json(dir.path(), "tokenizer.json")["model"]["vocab"]["Ġ"], 32);
}

#[test]
fn tiny_models_choose_clearly_and_use_every_expert() {
    for model in TinyModel::all(1) {
        let spec = &model.spec;
        let found = forward(spec, &model, &model.prompt(64, 0));
        let spread = |rows: &[f64], width: usize, k: usize| {
            let mut margins: Vec<f64> = rows
                .chunks(width)
                .map(|row| {
                    let mut row = row.to_vec();
                    row.sort_by(|a, b| b.total_cmp(a));
                    row[k - 1] - row[k]
                })
                .collect();
            margins.sort_by(f64::total_cmp);
            (margins[0], margins[margins.len() / 2])
        };
        let (least, median) = spread(&found.logits, spec.vocab_size, 1);
        let (router_least, router_median) = spread(&found.router, spec.moe.n_experts, spec.moe.top_k);
        println!(
            "{}: margins of logits {least:.1e} to {median:.2} (median), of routers {router_least:.1e} to {router_median:.2}",
            spec.model_type
        );
        assert!(median > 0.3 && router_median > 0.1);
        assert!(found.logits.iter().all(|l| l.abs() < 40.0));
        let mut used = found.chosen.clone();
        used.sort_unstable();
        used.dedup();
        assert_eq!(used.len(), spec.moe.n_experts);
    }
}

/// Goldens and bench records may name a tiny model by its seed.
#[test]
fn a_tiny_model_is_the_same_for_ever() {
    let model = TinyModel::qwen3(1);
    let embed = &model.backbone_values(BackboneTensor::Embed)[..4];
    assert_eq!(embed, [-1.1875, -0.115_722_656, 0.019_531_25, 1.015_625]);
    let mut sum = 0.0;
    for (_, _, values) in model.tensors() {
        sum += values.iter().map(|&v| f64::from(v).abs()).sum::<f64>();
    }
    // Multiples of 2^-24 that `f64` adds without rounding: no order matters.
    assert_eq!(sum, 74_330.803_366_065_03);
}

#[test]
fn a_raw_vault_holds_the_checkpoint_exactly() {
    for model in TinyModel::all(2) {
        let dir = tempfile::tempdir().expect("a temporary folder");
        model.write_vault(dir.path(), [Encoding::Bf16, Encoding::F16, Encoding::F32], Encoding::Bf16);
        let weights = VaultWeights::open(dir.path());
        assert_eq!(weights.spec(), &model.spec);
        assert_same(&model.spec, &model, &weights);
        let tokens = model.prompt(5, 0);
        assert_eq!(
            forward(&model.spec, &model, &tokens).logits,
            forward(&model.spec, &weights, &tokens).logits
        );
    }
}

#[test]
fn a_coded_vault_is_off_by_no_more_than_its_codes() {
    let model = TinyModel::deepseek(2);
    for (experts, backbone, allowed) in [
        ([coded(8, 32, Zero::Symmetric); 3], coded(8, 64, Zero::Symmetric), 0.02),
        (
            [coded(4, 64, Zero::Symmetric), coded(5, 32, Zero::Affine), coded(6, 16, Zero::Symmetric)],
            Encoding::Bf16,
            0.2,
        ),
    ] {
        let dir = tempfile::tempdir().expect("a temporary folder");
        model.write_vault(dir.path(), experts, backbone);
        let weights = VaultWeights::open(dir.path());
        each(&model.spec, &model, &weights, |name, a, b| {
            let largest = a.iter().fold(0.0f64, |m, v| m.max(v.abs()));
            let off = a.iter().zip(b).fold(0.0f64, |m, (a, b)| m.max((a - b).abs()));
            assert!(off <= allowed * largest, "{name}: {off} of {largest}");
        });
        let tokens = model.prompt(24, 0);
        let (p, q) = (forward(&model.spec, &model, &tokens), forward(&model.spec, &weights, &tokens));
        let mut fidelity = Fidelity::default();
        for (p, q) in p.logits.chunks(model.spec.vocab_size).zip(q.logits.chunks(model.spec.vocab_size)) {
            fidelity.add(&TokenScore::against(q, p, 0, 1));
        }
        let s = fidelity.summary().against.unwrap();
        println!("{}: KL {:.4}, top-1 {:.3}", experts[0], s.kl.value, s.top1.value);
        assert!(s.kl.value > 0.0);
    }
}

#[test]
#[should_panic(expected = "checksum of layer 1 expert 3")]
fn a_damaged_record_is_noticed() {
    let model = TinyModel::deepseek(2);
    let dir = tempfile::tempdir().expect("a temporary folder");
    model.write_vault(dir.path(), [Encoding::Bf16; 3], Encoding::Bf16);
    let file = VaultWeights::open(dir.path()).experts().clone();
    let key = ExpertKey { layer: 1, expert: 3 };
    let record = file.records.iter().find(|r| r.key == key).expect("a record");
    let path = dir.path().join("experts.smoe");
    let mut bytes = std::fs::read(&path).expect("written");
    bytes[record.offset as usize + 100] ^= 1;
    std::fs::write(&path, bytes).expect("writable");
    let _ = VaultWeights::open(dir.path()).expert(key, Projection::Down);
}

#[test]
fn the_originals_files_hold_the_codes_of_the_checkpoint() {
    let Some(dir) = shared_path("fixtures/original-vault-v2") else { return };
    let Some(checkpoint) = shared_path("fixtures/qwen3_moe") else { return };
    let spec = fixtures::qwen3_moe();
    let original =
        OriginalWeights::open(&dir.join("qwen3_moe.smoe"), &dir.join("qwen3_moe.scout.safetensors"));
    let source = CheckpointWeights::open(&checkpoint);

    // The same codes by our own codec, in our own layout.
    let folder = tempfile::tempdir().expect("a temporary folder");
    let q4 = coded(4, 64, Zero::Symmetric);
    vault::write_vault(folder.path(), &spec, &source, |_| [q4; 3], |_| Encoding::Bf16, &[]);
    let ours = VaultWeights::open(folder.path());

    let mut off = 0.0f64;
    each(&spec, &original, &ours, |name, a, b| {
        for (a, b) in a.chunks(64).zip(b.chunks(64)) {
            let scale = a.iter().fold(0.0f64, |m, v| m.max(v.abs()));
            for (a, b) in a.iter().zip(b) {
                off = off.max((a - b).abs() / scale);
                assert!((a - b).abs() <= tolerance::DEQUANTISE * scale, "{name}: {a} {b}");
            }
        }
    });
    println!("weights of the original and of our vault: off by {off:.1e} of a scale at most");

    let Some(golden) = Golden::of("qwen3_moe") else { return };
    let mut fidelity = Fidelity::default();
    for prompt in &golden.prompts {
        let p = forward(&spec, &original, &prompt.tokens);
        let q = forward(&spec, &ours, &prompt.tokens);
        let off = p.logits.iter().zip(&q.logits).fold(0.0f64, |m, (a, b)| m.max((a - b).abs()));
        println!("{} tokens: logits of original and ours off by {off:.1e}", prompt.tokens.len());
        assert!(off < tolerance::SAME_CODES);
        assert_eq!(p.chosen, q.chosen);
        fidelity.begin();
        for (i, next) in prompt.tokens.iter().enumerate().skip(1) {
            let row = (i - 1) * spec.vocab_size..i * spec.vocab_size;
            fidelity.add(&TokenScore::against(&p.logits[row.clone()], &prompt.logits[row], *next, 1));
        }
    }
    let s = fidelity.summary().against.unwrap();
    println!("the original's 4 bits: KL {} nats, top-1 {}", s.kl.value, s.top1.value);
    assert!(s.kl.value > 0.0 && s.kl.value < 0.5 && s.top1.value > 0.5);
}
