//! GPT-OSS on a GPU: windows by turns, sinks, biases everywhere and a clamped activation, as the processor has them.
//!
//! Skipped aloud where there is no device; a program that plays one (lavapipe) will do.
#![cfg(feature = "gpu")]
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]
#![allow(clippy::print_stderr, reason = "what is skipped is said")]

mod common;

use std::sync::atomic::AtomicBool;

use common::device::{has_device, on_gpu, run_in};
use common::{bits, greedy, job, meets_golden, observe, open, options, sculpted, write_tiny};
use smoe_engine::plan::RingSize;
use smoe_engine::{Control, Driver, Engine, EngineOptions, KvType, Scheduler, SchedulerOptions, Vault};
use smoe_format::{Encoding, FfnKind, Table};
use smoe_sculpt::{BackboneBits, Settings, sculpt};
use smoe_testkit::mxfp4::pack_gpt_oss;
use smoe_testkit::{Golden, TinyModel, shared_path};

/// Layers that see 24 positions and layers that see all, by turns; 40 experts, heads of 64.
fn model(seed: u64) -> TinyModel {
    let mut spec = TinyModel::gpt_oss(seed).spec;
    spec.d_model = 128;
    spec.attention.head_dim = 64;
    spec.layers = vec![FfnKind::Moe; 4];
    spec.windows = vec![24, 0, 24, 0];
    (spec.moe.n_experts, spec.moe.top_k, spec.moe.d_expert) = (40, 4, 72);
    TinyModel::new(spec, seed)
}

/// Settings for a context of many windows.
fn settings(ring: RingSize, chunk: usize) -> EngineOptions {
    let mut options = options(ring, chunk, 2);
    options.plan.context = Some(512);
    options
}

/// Logits after the prompt and after each further token, of a session that is closed then.
fn run(engine: &mut Engine, prompt: &[u32], further: &[u32]) -> Vec<u32> {
    let mut session = engine.open_session().unwrap();
    let out = run_in(engine, &mut session, prompt, further);
    engine.close(session, false);
    out
}

/// Holds what a device computes of a prompt against what the processor does: for all tokens but so many in a hundred, logits
/// may differ by `tolerance` of the largest one. Coded weights multiply int8 activations, and where a sum in another order
/// rounds to another code a token may go to other experts, of which these random models give another answer.
fn assert_close(vault: &Vault, options: &EngineOptions, prompt: &[u32], tolerance: f32, off: usize) {
    let expected = observe(&mut open(vault, options), prompt);
    let mut engine = open(vault, &on_gpu(options, None));
    engine.preload(&mut |_, _| {}).unwrap();
    let got = observe(&mut engine, prompt);
    assert_eq!(got.logits.len(), expected.logits.len());
    assert!(got.logits.iter().all(|logit| logit.is_finite()));
    let vocab = vault.spec.vocab_size;
    let scale = expected.logits.iter().fold(1f32, |m, l| m.max(l.abs()));
    let mut worst: Vec<f32> = got
        .logits
        .chunks_exact(vocab)
        .zip(expected.logits.chunks_exact(vocab))
        .map(|(a, b)| a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max) / scale)
        .collect();
    worst.sort_by(f32::total_cmp);
    let n = worst.len();
    let (median, held, most) = (worst[n / 2], worst[(n - 1) * (100 - off) / 100], worst[n - 1]);
    eprintln!("logits off by {median:.1e}, {held:.1e} but for {off} %, {most:.1e} at most");
    assert!(held <= tolerance, "logits off by {held} but for {off} %, {median} in the middle");
}

#[test]
fn a_prompt_many_windows_long_gets_the_processors_logits_and_tokens() {
    if !has_device() {
        return;
    }
    let model = model(41);
    for (experts, backbone, tolerance, off) in [("bf16", "bf16", 1e-5, 0), ("mxfp4/32", "bf16", 0.03, 10)] {
        let dir = tempfile::tempdir().unwrap();
        let vault = write_tiny(dir.path(), &model, experts, backbone);
        let options = settings(RingSize::Auto, 64);
        assert_close(&vault, &options, &model.prompt(150, 1), tolerance, off);
        if experts == "bf16" {
            let prompt = model.prompt(70, 2);
            let expected = greedy(&mut open(&vault, &options), &prompt, 40);
            assert_eq!(greedy(&mut open(&vault, &on_gpu(&options, None)), &prompt, 40), expected);
        }
    }
}

#[test]
fn steps_of_any_length_and_experts_held_or_not_give_the_same_bits() {
    if !has_device() {
        return;
    }
    let model = model(42);
    let dir = tempfile::tempdir().unwrap();
    let vault = write_tiny(dir.path(), &model, "mxfp4/32", "q8/64");
    let (prompt, further) = (model.prompt(110, 3), model.prompt(40, 4));
    let all = vault.experts.records.len();
    let mut base = settings(RingSize::Slots(all), 64);
    base.plan.whole_windows = true;
    let mut whole = open(&vault, &on_gpu(&base, None));
    whole.preload(&mut |_, _| {}).unwrap();
    let expected = run(&mut whole, &prompt, &further);
    assert_eq!(run(&mut whole, &prompt, &further), expected, "again");
    for (slots, ring, chunk) in [(None, all, 7), (Some(4), 4, 64), (Some(9), all, 1)] {
        let mut engine = open(&vault, &on_gpu(&settings(RingSize::Slots(ring), chunk), slots));
        assert_eq!(run(&mut engine, &prompt, &further), expected, "{slots:?} {ring} {chunk}");
        let (blocks, of) = (engine.plan().window_blocks, engine.kv_usage().blocks);
        assert!((1..of).contains(&blocks) && whole.plan().window_blocks == 0, "{blocks} of {of}");
        let snapshot = engine.info().tier.unwrap().meter.snapshot();
        assert!(snapshot.misses > 0, "{snapshot:?}");
    }
}

/// Experts of which each product's input has its own group size: int8 is made where its reader needs it, by the kernels that
/// make the rest.
#[test]
fn a_token_takes_as_many_kernels_whatever_group_sizes_experts_and_backbone_have() {
    if !has_device() {
        return;
    }
    let model = model(44);
    let [together, apart] = ["q4/64", "mxfp4/32"].map(|experts| {
        let dir = tempfile::tempdir().unwrap();
        let vault = write_tiny(dir.path(), &model, experts, "q8/64");
        let mut engine = open(&vault, &on_gpu(&settings(RingSize::Auto, 64), None));
        engine.measure_device().unwrap().unwrap().dispatches
    });
    assert_eq!(together, apart);
}

/// Several at a time, greedy: steps of several conversations, beginnings that are shared, and steps that the device begins
/// before anyone has asked for them.
#[test]
fn conversations_together_get_what_they_get_alone() {
    if !has_device() {
        return;
    }
    let model = model(43);
    let dir = tempfile::tempdir().unwrap();
    let vault = write_tiny(dir.path(), &model, "mxfp4/32", "q8/64");
    let begin = model.prompt(100, 5);
    let prompts: Vec<Vec<u32>> =
        (0..4).map(|i| [&begin[..], &model.prompt(5 + 20 * i, 6 + i as u64)].concat()).collect();
    let options = on_gpu(&settings(RingSize::Auto, 64), None);
    let mut whole = options.clone();
    whole.plan.whole_windows = true;
    let mut alone = open(&vault, &whole);
    let expected: Vec<Vec<u32>> = prompts.iter().map(|prompt| greedy(&mut alone, prompt, 45)).collect();
    drop(alone);
    let mut several = options;
    (several.plan.sessions, several.plan.kv_contexts) = (3, 2);
    let settings = SchedulerOptions { at_once: Some(3), ..SchedulerOptions::default() };
    let mut scheduler = Scheduler::new(open(&vault, &several), settings).unwrap();
    let mut found = 0;
    for round in 0..2 {
        let all: Vec<_> = prompts
            .iter()
            .map(|prompt| {
                let (job, heard) = job(prompt, 45);
                scheduler.submit(job).unwrap();
                heard
            })
            .collect();
        while scheduler.step() {}
        for (i, (heard, expected)) in all.iter().zip(&expected).enumerate() {
            let heard = heard.lock().unwrap();
            let end = heard.end.as_ref().unwrap();
            assert!(end.result.is_ok(), "{:?}", end.result);
            assert_eq!(heard.tokens, *expected, "round {round}, job {i}");
            found += usize::from(round > 0 && end.usage.cached == prompts[i].len() - 1);
        }
    }
    assert!(found > 0, "a prompt was not found again");
    let usage = scheduler.engine().kv_usage();
    assert_eq!((usage.held, usage.window_held), (0, 0), "{usage:?}");
}

/// Into a window that is there still, and into the middle of a block that another conversation has begun with.
#[test]
fn a_chat_goes_back_and_another_goes_on_from_the_middle_of_its_block() {
    if !has_device() {
        return;
    }
    let model = model(44);
    let dir = tempfile::tempdir().unwrap();
    let vault = write_tiny(dir.path(), &model, "mxfp4/32", "q8/64");
    let mut bounded = on_gpu(&settings(RingSize::Auto, 64), None);
    bounded.plan.sessions = 2;
    let mut whole = bounded.clone();
    whole.plan.whole_windows = true;
    let (mut engine, mut whole) = (open(&vault, &bounded), open(&vault, &whole));
    let mut fresh = |tokens: &[u32]| {
        let mut session = whole.open_session().unwrap();
        whole.sync(&mut session, tokens, &mut Control::default()).unwrap();
        let logits = bits(session.logits());
        whole.close(session, false);
        logits
    };
    let (prompt, control) = (model.prompt(110, 1), &mut Control::default());
    let mut session = engine.open_session().unwrap();
    engine.adopt(&mut session, &prompt);
    engine.sync(&mut session, &prompt, control).unwrap();
    for token in model.prompt(70, 2) {
        engine.decode(&mut session, token, control).unwrap();
    }
    let next = [&prompt[..], &model.prompt(45, 3)].concat();
    assert_eq!(engine.sync(&mut session, &next, control).unwrap().reused, 110);
    assert_eq!(bits(session.logits()), fresh(&next));
    engine.close(session, true);
    // Its end is within a block, of which the other has a copy of its own.
    for which in [4, 5] {
        let other = [&next[..], &model.prompt(30, which)].concat();
        let mut session = engine.open_session().unwrap();
        assert_eq!(engine.adopt(&mut session, &other), 155);
        engine.sync(&mut session, &other, control).unwrap();
        assert_eq!(bits(session.logits()), fresh(&other));
        engine.close(session, false);
    }
}

#[test]
fn the_fixture_meets_the_reference_on_a_device() {
    if !has_device() {
        return;
    }
    let Some((_dir, vault)) = sculpted("gpt_oss", 16, BackboneBits::Bf16) else { return };
    let golden = Golden::of("gpt_oss").unwrap();
    let mut options = on_gpu(&options(RingSize::Auto, 64, 2), None);
    options.plan.kv = Some(KvType::F32);
    let mut engine = open(&vault, &options);
    meets_golden(&mut engine, &golden, &vault.spec);
}

/// GPT-OSS as it is published: experts in MXFP4, everything else in bf16.
#[test]
fn a_published_checkpoint_answers_on_a_device_as_on_the_processor() {
    if !has_device() {
        return;
    }
    let Some(fixture) = shared_path("fixtures/gpt_oss") else { return };
    let dir = tempfile::tempdir().unwrap();
    let [packed, floats, out] = ["packed", "floats", "vault"].map(|name| dir.path().join(name));
    std::fs::create_dir(&packed).unwrap();
    std::fs::create_dir(&floats).unwrap();
    pack_gpt_oss(&fixture, &packed, &floats);
    let settings = Settings { bits: 16, backbone: BackboneBits::Bf16, lossless: true, ..Settings::default() };
    sculpt(&packed, &out, &settings, &(), &AtomicBool::new(false)).unwrap();
    let vault = Vault::open(&out).unwrap();
    let is_mxfp4 = |encoding: Encoding| encoding == Encoding::Table(Table::MXFP4);
    assert!(vault.experts.layers.iter().all(|table| table.tensors.iter().all(|t| is_mxfp4(t.encoding))));
    let golden = Golden::of("gpt_oss").unwrap();
    for prompt in &golden.prompts {
        assert_close(&vault, &options(RingSize::Auto, 64, 2), &prompt.tokens, 0.03, 10);
    }
}
