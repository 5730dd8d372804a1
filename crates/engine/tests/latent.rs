//! Latent attention on a GPU: the goldens, the processor's answers over several splits of positions, and the same bits however
//! steps are cut, whatever the device holds and whoever shares a prefix.
//!
//! Skipped aloud where there is no device; a program that plays one (lavapipe) will do.
#![cfg(feature = "gpu")]
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]
#![allow(clippy::print_stderr, reason = "what is skipped is said")]

mod common;

use common::device::{has_device, on_gpu, run};
use common::{bits, greedy, meets_golden, observe, open, options, sculpted, write_tiny};
use smoe_engine::plan::RingSize;
use smoe_engine::{Control, Engine, EngineError, EngineOptions, KvType};
use smoe_sculpt::BackboneBits;
use smoe_testkit::{Golden, TinyModel};

/// More positions than two splits of attention have.
const CONTEXT: usize = 320;

fn long(chunk: usize) -> EngineOptions {
    let mut options = options(RingSize::Auto, chunk, 1);
    options.plan.context = Some(CONTEXT);
    options
}

#[test]
fn sixteen_bit_vaults_meet_the_goldens() {
    if !has_device() {
        return;
    }
    // Prompts are longer than the indexers of the others choose.
    for family in ["deepseek_v2", "deepseek_v3"] {
        let Some((_dir, vault)) = sculpted(family, 16, BackboneBits::Bf16) else { continue };
        let golden = Golden::of(family).unwrap();
        let mut engine = open(&vault, &on_gpu(&options(RingSize::Auto, 64, 2), None));
        meets_golden(&mut engine, &golden, &vault.spec);
    }
}

/// The same answers as the processor's over several splits, by each kind of weights and of cache: the largest difference of a
/// position, as a part of the largest logit, as in `device.rs`. Where activations are int8, of some hundred positions a few have experts that
/// are too close to call, and go their own way from there.
#[test]
fn long_contexts_are_the_processors_within_the_tolerance() {
    if !has_device() {
        return;
    }
    for (model, experts, backbone, kv, tolerance) in [
        (TinyModel::deepseek_v3(31), "q4/64", "q8/64", KvType::F16, 0.03),
        // A latent of 64 in groups of 128, and coded heads of 28 columns in groups of 32.
        (TinyModel::deepseek_v2(32), "q4/64", "q8/128", KvType::Q8, 0.03),
        (TinyModel::deepseek_v2(33), "bf16", "bf16", KvType::F32, 1e-5),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let vault = write_tiny(dir.path(), &model, experts, backbone);
        let prompt = model.prompt(CONTEXT - 20, 3);
        let mut cpu = long(64);
        cpu.plan.kv = Some(kv);
        let mut processor = open(&vault, &cpu);
        let expected = observe(&mut processor, &prompt);
        let mut engine = open(&vault, &on_gpu(&cpu, None));
        engine.preload(&mut |_, _| {}).unwrap();
        let got = observe(&mut engine, &prompt);
        let scale = expected.logits.iter().fold(1f32, |m, l| m.max(l.abs()));
        let name = format!("{} {backbone} {kv:?}", model.spec.model_type);
        let vocab = vault.spec.vocab_size;
        let positions = got.logits.chunks_exact(vocab).zip(expected.logits.chunks_exact(vocab));
        let mut worst: Vec<f32> = positions
            .map(|(a, b)| a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max) / scale)
            .collect();
        worst.sort_by(f32::total_cmp);
        let (n, within) = (worst.len(), worst.iter().filter(|off| **off <= tolerance).count());
        eprintln!("{name}: {within} of {n} positions within {tolerance}, median {:.1e}", worst[n / 2]);
        let called = if tolerance < 0.01 { n } else { n * 9 / 10 };
        assert!(within >= called && got.logits.iter().all(|a| a.is_finite()), "{name}: {within} of {n}");
        if tolerance < 0.01 {
            let prompt = &prompt[..CONTEXT - 40];
            assert_eq!(greedy(&mut engine, prompt, 16), greedy(&mut processor, prompt, 16), "{name}");
        }
    }
}

#[test]
fn how_steps_are_cut_and_what_the_device_holds_do_not_change_a_bit() {
    if !has_device() {
        return;
    }
    for model in [TinyModel::deepseek_v2(34), TinyModel::deepseek_v3(35)] {
        let dir = tempfile::tempdir().unwrap();
        let vault = write_tiny(dir.path(), &model, "q4/64", "q8/64");
        let (prompt, further) = (model.prompt(290, 4), model.prompt(4, 5));
        let mut expected = None;
        for (chunk, slots) in [(64, None), (7, Some(vault.spec.moe.top_k)), (1, None)] {
            let mut engine = open(&vault, &on_gpu(&long(chunk), slots));
            if slots.is_none() {
                engine.preload(&mut |_, _| {}).unwrap();
            }
            let got = run(&mut engine, &prompt, &further);
            assert_eq!(run(&mut engine, &prompt, &further), got, "again, by {chunk}");
            let expected = expected.get_or_insert_with(|| got.clone());
            assert_eq!(&got, expected, "{}: steps of {chunk}, {slots:?}", model.spec.model_type);
        }
    }
}

#[test]
fn conversations_share_prefixes_and_steps() {
    if !has_device() {
        return;
    }
    let model = TinyModel::deepseek_v3(36);
    let dir = tempfile::tempdir().unwrap();
    let vault = write_tiny(dir.path(), &model, "q4/64", "q8/64");
    let mut options = on_gpu(&options(RingSize::Auto, 64, 1), None);
    options.plan.sessions = 3;
    let prompt = model.prompt(45, 7);
    // From the middle of a block on it is another conversation.
    let other = [&prompt[..40], &model.prompt(9, 9)].concat();
    let [mine, theirs] = [model.prompt(3, 8), model.prompt(3, 10)];
    let mut engine = open(&vault, &options);
    let (alone, other_alone) = (run(&mut engine, &prompt, &mine), run(&mut engine, &other, &theirs));

    let mut engine = open(&vault, &options);
    let mut sessions = [engine.open_session().unwrap(), engine.open_session().unwrap()];
    // Who has adopted, be it nothing, is found by others.
    assert_eq!(engine.adopt(&mut sessions[0], &prompt), 0);
    engine.sync(&mut sessions[0], &prompt, &mut Control::default()).unwrap();
    assert!(engine.adopt(&mut sessions[1], &other) >= 32, "a block is shared");
    engine.sync(&mut sessions[1], &other, &mut Control::default()).unwrap();
    let mut out = [bits(sessions[0].logits()), bits(sessions[1].logits())];
    for i in 0..3 {
        sessions[0].queue(&mine[i..=i], 1);
        sessions[1].queue(&theirs[i..=i], 1);
        let mut keep = |session: usize, _: usize, row: &[f32]| out[session].extend(bits(row));
        engine.step(&mut sessions, &mut Control::default(), &mut keep).unwrap();
    }
    assert!(out[0] == alone && out[1] == other_alone);
}

/// As many positions as an indexer chooses are all that there are; one more, and the model is the processor's.
#[test]
fn sparse_attention_runs_as_far_as_it_chooses_all() {
    if !has_device() {
        return;
    }
    let mut model = TinyModel::glm_dsa(37);
    let indexer = model.spec.attention.indexer.as_mut().unwrap();
    indexer.top_k = CONTEXT - 1;
    let dir = tempfile::tempdir().unwrap();
    let vault = write_tiny(dir.path(), &model, "bf16", "bf16");
    let Err(error) = Engine::open(&vault, &on_gpu(&long(64), None)) else { panic!("beyond the indexer") };
    let said = error.to_string();
    assert!(matches!(error, EngineError::Unsupported { .. }) && said.contains("--context 319"), "{said}");

    let mut within = long(64);
    within.plan.context = Some(CONTEXT - 1);
    let prompt = model.prompt(150, 3);
    let expected = observe(&mut open(&vault, &within), &prompt);
    let got = observe(&mut open(&vault, &on_gpu(&within, None)), &prompt);
    let scale = expected.logits.iter().fold(1f32, |m, l| m.max(l.abs()));
    let worst = got.logits.iter().zip(&expected.logits).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
    assert!(worst <= 1e-5 * scale, "logits off by {worst} of {scale}");
}

/// Exact products of heads and projections there are, of coded dense parts there are none: that is said, and nothing panics.
#[test]
fn exact_products_of_coded_dense_parts_are_refused_by_name() {
    if !has_device() {
        return;
    }
    let model = TinyModel::deepseek_v3(38);
    let dir = tempfile::tempdir().unwrap();
    let vault = write_tiny(dir.path(), &model, "bf16", "q8/64");
    let exact = EngineOptions { exact: true, ..options(RingSize::Auto, 64, 1) };
    let Err(error) = Engine::open(&vault, &on_gpu(&exact, None)) else { panic!("dense parts in codes") };
    assert!(matches!(error, EngineError::Unsupported { .. }), "{error}");
    assert!(error.to_string().contains("exact products"), "{error}");
}
