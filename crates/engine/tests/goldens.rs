//! 16-bit vaults of the fixtures against the reference implementation's goldens, and coded ones against the
//! reference forward on the same dequantised codes.

mod common;

use std::sync::atomic::AtomicBool;

use common::{greedy, meets_golden, observe, open, options, sculpted, sculpted_by, write_tiny};
use smoe_engine::plan::RingSize;
use smoe_engine::{EngineOptions, KvType};
use smoe_format::{Encoding, ModelSpec, Table};
use smoe_sculpt::{BackboneBits, Recipe, Settings, sculpt};
use smoe_testkit::fixtures;
use smoe_testkit::mxfp4::pack_gpt_oss;
use smoe_testkit::{
    CheckpointWeights, Golden, TinyModel, VaultWeights, compare, compare_greedy, forward, gguf, shared_path,
    tolerance,
};

/// Largest difference between f32 and f64 sums on the fixtures; the goldens' own bound is 2e-3.
const EXACT: f64 = tolerance::REFERENCE_LOGITS;

#[test]
fn sixteen_bit_vaults_meet_the_goldens() {
    for family in fixtures::FAMILIES {
        let Some((_dir, vault)) = sculpted(family, 16, BackboneBits::Bf16) else { continue };
        let golden = Golden::of(family).unwrap();
        let mut engine = open(&vault, &options(RingSize::Auto, 64, 2));
        meets_golden(&mut engine, &golden, &vault.spec);
    }
}

/// What llama.cpp's converter makes of every fixture, with latent attention's matrices in one and apart, and experts' gates
/// and ups apart and in one, gives the reference's logits and tokens.
#[test]
fn gguf_files_of_every_family_meet_the_goldens() {
    for (i, family) in fixtures::FAMILIES.into_iter().enumerate() {
        let Some(checkpoint) = fixtures::fixture(family) else { continue };
        let (config, tensors) = gguf::load(&checkpoint);
        let dir = tempfile::tempdir().unwrap();
        let (path, out) = (dir.path().join("model.gguf"), dir.path().join("vault"));
        gguf::of_checkpoint(&config, &tensors, i % 2 == 0).write(&path);
        let settings = Settings { bits: 16, backbone: BackboneBits::Bf16, ..Settings::default() };
        sculpt(&path, &out, &settings, &(), &AtomicBool::new(false)).unwrap();
        let vault = smoe_engine::Vault::open(&out).unwrap();
        let golden = Golden::of(family).unwrap();
        let mut engine = open(&vault, &options(RingSize::Auto, 64, 2));
        for (i, prompt) in golden.prompts.iter().enumerate() {
            let got = observe(&mut engine, &prompt.tokens);
            let report = compare(&golden, i, &got.logits, Some(&got.hidden), Some(&got.router), &vault.spec);
            report.assert_passes();
            let tokens = greedy(&mut engine, &prompt.tokens, prompt.greedy.len());
            compare_greedy(&tokens, &prompt.greedy).assert_passes();
        }
    }
}

/// f32 everywhere: activations, keys and values.
fn exact() -> EngineOptions {
    let mut options = options(RingSize::Auto, 16, 2);
    options.plan.kv = Some(KvType::F32);
    EngineOptions { exact: true, ..options }
}

fn largest_difference(got: &[f32], expected: &[f64]) -> f64 {
    assert_eq!(got.len(), expected.len());
    got.iter().zip(expected).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max)
}

#[test]
fn float_and_exact_vaults_agree_with_the_reference_on_the_same_weights() {
    for model in TinyModel::every(5) {
        for (experts, backbone) in [
            ("bf16", "bf16"),
            ("f32", "f32"),
            ("q4/64", "q8/64"),
            ("q2/32", "q4/32"),
            ("q3a/128", "q5a/16"),
            ("q6/64", "q6/128"),
            ("q8a/32", "bf16"),
            ("bf16,q5/64,q4/32", "q8/64"),
            ("mxfp4/32", "bf16"),
            ("iq4_nl/64,t3/128,t2/16", "q8/64"),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let vault = write_tiny(dir.path(), &model, experts, backbone);
            let prompt = model.prompt(21, 3);
            let weights = VaultWeights::open(dir.path());
            let expected = forward(&vault.spec, &weights, &prompt);
            let got = observe(&mut open(&vault, &exact()), &prompt);
            let difference = largest_difference(&got.logits, &expected.logits);
            eprintln!("{} {experts} {backbone}: {difference:.2e}", vault.spec.model_type);
            assert!(difference < EXACT, "{} {experts} {backbone}: {difference}", vault.spec.model_type);
        }
    }
}

/// Beyond as many positions as an indexer chooses, in exact mode: the reference chooses by a mask.
#[test]
fn sparse_attention_on_coded_weights_agrees_with_the_reference() {
    for model in [TinyModel::glm_dsa(5), TinyModel::deepseek_v32(5)] {
        for (experts, backbone) in
            [("q4/64", "q8/64"), ("q3a/32", "q5a/16"), ("mxfp4/32", "q4/32"), ("q8/128", "bf16")]
        {
            let dir = tempfile::tempdir().unwrap();
            let vault = write_tiny(dir.path(), &model, experts, backbone);
            let mut dense = vault.spec.clone();
            let indexer = dense.attention.indexer.as_mut().unwrap();
            let prompt = model.prompt(indexer.top_k + 45, 3);
            indexer.top_k = prompt.len();
            let weights = VaultWeights::open(dir.path());
            let expected = forward(&vault.spec, &weights, &prompt);
            let got = observe(&mut open(&vault, &exact()), &prompt);
            let difference = largest_difference(&got.logits, &expected.logits);
            let unseen = largest_difference(&got.logits, &forward(&dense, &weights, &prompt).logits);
            let family = &vault.spec.model_type;
            eprintln!("{family} {experts} {backbone}: {difference:.2e}, and {unseen:.1} to all positions");
            assert!(difference < EXACT, "{family} {experts} {backbone}: {difference}");
            assert!(unseen > 0.1, "{family} {experts} {backbone}: choosing changes {unseen}");
        }
    }
}

/// Published configs have one epsilon for all norms; each has its own all the same.
#[test]
fn the_norms_of_latents_and_of_the_indexer_have_epsilons_of_their_own() {
    let mut spec = TinyModel::glm_dsa(6).spec;
    let (layer, latent, indexer) = (0.02, 0.3, 1.5);
    spec.rms_norm_eps = layer;
    spec.attention.latent.as_mut().unwrap().norm_eps = latent;
    spec.attention.indexer.as_mut().unwrap().norm_eps = indexer;
    let model = TinyModel::new(spec.clone(), 6);
    let dir = tempfile::tempdir().unwrap();
    let vault = write_tiny(dir.path(), &model, "bf16", "bf16");
    assert_eq!(vault.spec, spec);
    let prompt = model.prompt(40, 3);
    let weights = VaultWeights::open(dir.path());
    let got = observe(&mut open(&vault, &exact()), &prompt);
    let difference =
        |spec: &ModelSpec| largest_difference(&got.logits, &forward(spec, &weights, &prompt).logits);
    assert!(difference(&spec) < EXACT, "{}", difference(&spec));
    // Each shows: another norm's in its place gives another answer.
    for whose in ["a layer's", "a latent's", "the indexer's"] {
        let mut other = spec.clone();
        match whose {
            "a layer's" => other.rms_norm_eps = latent,
            "a latent's" => other.attention.latent.as_mut().unwrap().norm_eps = layer,
            _ => other.attention.indexer.as_mut().unwrap().norm_eps = layer,
        }
        assert!(difference(&other) > 100.0 * EXACT, "{whose} epsilon shows by {}", difference(&other));
    }
}

#[test]
fn int8_activations_stay_close_to_the_exact_product() {
    for mut model in TinyModel::every(6) {
        // A random indexer's scores have nothing to do with what attention weighs, so another choice is another answer:
        // here every position is seen.
        if let Some(indexer) = &mut model.spec.attention.indexer {
            indexer.top_k = indexer.top_k.max(40);
        }
        let dir = tempfile::tempdir().unwrap();
        let experts = if model.spec.moe.expert_bias { "mxfp4/32" } else { "q4/64" };
        let vault = write_tiny(dir.path(), &model, experts, "q8/64");
        let prompt = model.prompt(40, 1);
        let exact = observe(&mut open(&vault, &exact()), &prompt);
        let coded = observe(&mut open(&vault, &options(RingSize::Auto, 64, 2)), &prompt);
        let vocab = vault.spec.vocab_size;
        let rows = exact.logits.chunks_exact(vocab).zip(coded.logits.chunks_exact(vocab));
        let kl: Vec<f64> = rows.map(|(a, b)| smoe_meter::fidelity::kl_divergence(a, b)).collect();
        let mut sorted = kl;
        sorted.sort_by(f64::total_cmp);
        let (median, most) = (sorted[sorted.len() / 2], sorted[sorted.len() - 1]);
        let mean = sorted.iter().sum::<f64>() / sorted.len() as f64;
        let name = &vault.spec.model_type;
        eprintln!("{name}: KL of int8 activations: median {median:.2e}, mean {mean:.2e}, most {most:.2e}");
        // Medians measured 4e-4 to 4e-3, and 1.3e-2 where states carry errors on (qwen3_next, with a layer more); means 3e-3
        // to 7e-2; but a token that goes to other experts gets another answer of these random models (one of
        // glm_moe_dsa's 6.1, which makes its mean 0.2). A kernel that is wrong is at 1 and more at every token.
        let is_touchy = model.spec.delta.is_some() || model.spec.attention.indexer.is_some();
        let [most_median, most_mean] = if is_touchy { [3e-2, 0.4] } else { [1e-2, 5e-2] };
        assert!(median < most_median && mean < most_mean, "{name}: median {median}, mean {mean}");
    }
}

#[test]
fn the_originals_pair_and_our_vault_of_the_same_checkpoint_give_the_same_bits() {
    let Some((_dir, vault)) = sculpted_by(Recipe::Absmax, "qwen3_moe", 4, BackboneBits::Bf16) else { return };
    let Some(pair) = shared_path("fixtures/original-vault-v2/qwen3_moe.smoe") else { return };
    let original = smoe_engine::Vault::open(&pair).unwrap();
    assert_eq!((original.experts.version, vault.experts.version), (2, 3));
    let golden = Golden::of("qwen3_moe").unwrap();
    let options = options(RingSize::Auto, 64, 2);
    let (mut ours, mut theirs) = (open(&vault, &options), open(&original, &options));
    for prompt in &golden.prompts {
        let (a, b) = (observe(&mut ours, &prompt.tokens), observe(&mut theirs, &prompt.tokens));
        assert_eq!(common::bits(&a.logits), common::bits(&b.logits));
        assert_eq!(greedy(&mut ours, &prompt.tokens, 24), greedy(&mut theirs, &prompt.tokens, 24));
    }
    // And both are the codes of the checkpoint: the exact product agrees with the reference on them.
    let weights = VaultWeights::open(vault.experts_path.parent().unwrap());
    let tokens = &golden.prompts[1].tokens;
    let expected = forward(&vault.spec, &weights, tokens);
    let got = observe(&mut open(&vault, &exact()), tokens);
    assert!(largest_difference(&got.logits, &expected.logits) < EXACT);
}

/// GPT-OSS as it is published: experts in MXFP4, everything else in bf16. The vault has their codes, and the engine
/// answers what the reference answers with the weights that they mean.
#[test]
fn a_published_mxfp4_checkpoint_answers_as_its_weights_do() {
    let Some(fixture) = shared_path("fixtures/gpt_oss") else { return };
    let dir = tempfile::tempdir().unwrap();
    let [packed, floats, out] = ["packed", "floats", "vault"].map(|name| dir.path().join(name));
    std::fs::create_dir(&packed).unwrap();
    std::fs::create_dir(&floats).unwrap();
    pack_gpt_oss(&fixture, &packed, &floats);
    let settings = Settings { bits: 16, backbone: BackboneBits::Bf16, lossless: true, ..Settings::default() };
    sculpt(&packed, &out, &settings, &(), &AtomicBool::new(false)).unwrap();
    let vault = smoe_engine::Vault::open(&out).unwrap();
    for table in &vault.experts.layers {
        assert!(table.tensors.iter().all(|t| t.encoding == Encoding::Table(Table::MXFP4)));
    }
    let weights = CheckpointWeights::open(&floats);
    for prompt in &Golden::of("gpt_oss").unwrap().prompts {
        let expected = smoe_testkit::greedy(&vault.spec, &weights, &prompt.tokens, 12);
        let tokens = greedy(&mut open(&vault, &exact()), &prompt.tokens, 12);
        compare_greedy(&tokens, &expected).assert_passes();
    }
}
