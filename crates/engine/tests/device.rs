//! A GPU computes what the processor computes, and what it computes does not depend on how many experts it holds.
//!
//! Skipped aloud where there is no device; a program that plays one (lavapipe) will do.
#![cfg(feature = "gpu")]
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]
#![allow(clippy::print_stderr, reason = "what is skipped is said")]

mod common;

use std::cell::Cell;

use common::device::{has_device, on_gpu, run};
use common::{bits, observe, open, options, write_tiny};
use smoe_engine::plan::RingSize;
use smoe_engine::{Control, Engine, EngineError, ExpertPath, Session};
use smoe_testkit::TinyModel;

/// Encodings of experts and backbone, and the largest difference that may be seen, as a part of the largest logit.
/// Float products differ by the order of their sums. Coded ones multiply int8 activations: where a sum in another
/// order rounds to another code, the difference is a step of 1/127 of the group's largest value.
const ENCODINGS: [(&str, &str, f32); 3] = [
    ("bf16", "bf16", 1e-5),
    ("q4/32,q8/128,q3a/64", "q8/64", 0.03),
    ("mxfp4/32,mxfp4/32,iq4_nl/64", "q8/64", 0.03),
];

/// The models that have GPU kernels, and whether those of the others are refused by name.
fn models(seed: u64) -> Vec<TinyModel> {
    let (able, unable): (Vec<_>, Vec<_>) = TinyModel::every(seed).into_iter().partition(|model| {
        let spec = &model.spec;
        // An indexer chooses among more positions than it may.
        spec.attention.indexer.is_none()
    });
    for model in unable {
        let dir = tempfile::tempdir().unwrap();
        let vault = write_tiny(dir.path(), &model, "bf16", "bf16");
        let options = on_gpu(&options(RingSize::Auto, 8, 1), None);
        let Err(error) = Engine::open(&vault, &options) else { panic!("{} on a GPU", model.spec.model_type) };
        assert!(matches!(error, EngineError::Unsupported { .. }), "{error}");
    }
    able
}

#[test]
fn logits_are_the_processors_within_the_tolerance() {
    if !has_device() {
        return;
    }
    for (i, model) in models(21).into_iter().enumerate() {
        // Devices that a program plays take seconds to make a kernel: only the first model has all encodings.
        for (_, (experts, backbone, tolerance)) in
            ENCODINGS.into_iter().enumerate().filter(|(j, _)| i == 0 || (i + j) % 3 == 0)
        {
            let dir = tempfile::tempdir().unwrap();
            let vault = write_tiny(dir.path(), &model, experts, backbone);
            let prompt = model.prompt(40, 3);
            let cpu = options(RingSize::Auto, 64, 1);
            let expected = observe(&mut open(&vault, &cpu), &prompt);
            let mut engine = open(&vault, &on_gpu(&cpu, None));
            engine.preload(&mut |_, _| {}).unwrap();
            let got = observe(&mut engine, &prompt);
            let scale = expected.logits.iter().fold(1f32, |m, l| m.max(l.abs()));
            let name = &model.spec.model_type;
            for (what, a, b) in [
                ("logits", &got.logits, &expected.logits),
                ("router", &got.router, &expected.router),
                ("hidden", &got.hidden, &expected.hidden),
            ] {
                assert_eq!(a.len(), b.len());
                let worst = a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
                eprintln!("{name} {experts} {backbone}: {what} off by {worst} of {scale}");
                assert!(worst <= tolerance * scale, "{name} {experts} {backbone}: {what} off by {worst}");
                assert!(a.iter().all(|a| a.is_finite()));
            }
        }
    }
}

#[test]
fn what_the_device_holds_how_steps_are_cut_and_the_ring_do_not_change_a_bit() {
    if !has_device() {
        return;
    }
    for model in models(22).into_iter().step_by(2) {
        let dir = tempfile::tempdir().unwrap();
        let vault = write_tiny(dir.path(), &model, "q4/64", "q8/64");
        let (prompt, further) = (model.prompt(37, 4), model.prompt(5, 5));
        let all = vault.experts.records.len();
        let top_k = vault.spec.moe.top_k;
        let base = options(RingSize::Slots(all), 64, 1);
        let mut whole = open(&vault, &on_gpu(&base, None));
        whole.preload(&mut |_, _| {}).unwrap();
        let expected = run(&mut whole, &prompt, &further);
        let snapshot = whole.info().tier.unwrap().meter.snapshot();
        assert!(snapshot.hits > 0 && snapshot.misses == 0, "{snapshot:?}");
        assert_eq!(run(&mut whole, &prompt, &further), expected, "again");
        for (slots, ring, chunk) in
            [(None, all, 64), (Some(top_k), top_k, 64), (Some(top_k + 1), all, 5), (Some(top_k), all, 1)]
        {
            let options = on_gpu(&options(RingSize::Slots(ring), chunk, 2), slots);
            let mut engine = open(&vault, &options);
            let name = &model.spec.model_type;
            assert_eq!(run(&mut engine, &prompt, &further), expected, "{name}: {slots:?} {ring} {chunk}");
            let snapshot = engine.info().tier.unwrap().meter.snapshot();
            assert!(snapshot.misses > 0, "{snapshot:?}");
            assert_eq!(snapshot.evictions > 0, slots.is_some(), "{slots:?}: {snapshot:?}");
        }
    }
}

#[test]
fn steps_are_long_where_experts_are_brought_and_give_the_same_bits() {
    if !has_device() {
        return;
    }
    let model = TinyModel::qwen3(24);
    let dir = tempfile::tempdir().unwrap();
    let vault = write_tiny(dir.path(), &model, "q4/64", "q8/64");
    let (prompt, further) = (model.prompt(1000, 4), model.prompt(2, 5));
    let mut base = options(RingSize::Auto, 1, 1);
    base.plan.context = Some(1024);
    let chosen = |chunk, slots| {
        let mut options = on_gpu(&base, slots);
        options.plan.chunk = chunk;
        let mut engine = open(&vault, &options);
        (engine.plan().chunk, run(&mut engine, &prompt, &further))
    };
    let (chunk, expected) = chosen(None, None);
    assert_eq!(chunk, 512, "all experts are there");
    let few = Some(vault.spec.moe.top_k);
    let (chunk, got) = chosen(None, few);
    assert_eq!(chunk, 1024, "as long as the context");
    assert!(got == expected, "steps of 1,024 and of 512 differ");
    assert_eq!(chosen(Some(300), few).0, 300, "as it is told");
}

/// Experts that come in more lots than there are work lists, to a tier that must give some up for others within the step.
#[test]
fn a_long_step_whose_experts_come_one_by_one_gives_the_same_bits() {
    if !has_device() {
        return;
    }
    let mut spec = TinyModel::qwen3(25).spec;
    spec.moe.n_experts = 40;
    let model = TinyModel::new(spec, 25);
    let dir = tempfile::tempdir().unwrap();
    let vault = write_tiny(dir.path(), &model, "q4/64", "q8/64");
    let (prompt, further) = (model.prompt(160, 4), model.prompt(2, 5));
    let base = options(RingSize::Slots(vault.experts.records.len()), 80, 1);
    let expected = run(&mut open(&vault, &on_gpu(&base, None)), &prompt, &further);
    let top_k = vault.spec.moe.top_k;
    for path in [ExpertPath::Staging, ExpertPath::Import] {
        for slots in [2 * top_k, 12, 16] {
            let mut options = on_gpu(&options(RingSize::Slots(top_k), 80, 1), Some(slots));
            (options.device_path, options.readers) = (path, Some(1));
            let got = run(&mut open(&vault, &options), &prompt, &further);
            assert!(got == expected, "{path:?}, {slots} slots");
        }
    }
}

#[test]
fn tiers_of_every_size_give_the_same_bits() {
    if !has_device() {
        return;
    }
    let model = TinyModel::qwen3(23);
    let dir = tempfile::tempdir().unwrap();
    let vault = write_tiny(dir.path(), &model, "q4/64", "q8/64");
    let (prompt, further) = (model.prompt(9, 4), model.prompt(12, 5));
    let moe = &vault.spec.moe;
    let base = options(RingSize::Slots(vault.experts.records.len()), 4, 1);
    let mut expected: Option<Vec<u32>> = None;
    let mut waits = Vec::new();
    for slots in (moe.top_k..=moe.n_experts).rev() {
        let mut engine = open(&vault, &on_gpu(&base, Some(slots)));
        engine.preload(&mut |_, _| {}).unwrap();
        let got = run(&mut engine, &prompt, &further);
        let expected = expected.get_or_insert_with(|| got.clone());
        assert_eq!(&got, expected, "{slots} experts of a layer");
        let snapshot = engine.info().tier.unwrap().meter.snapshot();
        assert_eq!(snapshot.misses == 0, slots == moe.n_experts, "{slots}: {snapshot:?}");
        assert_eq!(snapshot.computed > 0, snapshot.misses > 0, "of steps of few tokens: {snapshot:?}");
        waits.push(snapshot.waits);
    }
    // Steps of all layers, and a wait each; those before the last chunk of the prompt included.
    assert_eq!(waits[0] as usize, prompt.len().div_ceil(4) + further.len());
    assert!(waits.iter().all(|&n| n >= waits[0]), "{waits:?}");
}

#[test]
fn sessions_share_prefixes_and_copy_before_they_write() {
    if !has_device() {
        return;
    }
    let model = TinyModel::qwen3(24);
    let dir = tempfile::tempdir().unwrap();
    let vault = write_tiny(dir.path(), &model, "q4/64", "q8/64");
    let mut options = on_gpu(&options(RingSize::Auto, 64, 1), None);
    options.plan.sessions = 3;
    let prompt = model.prompt(45, 7);
    let mut engine = open(&vault, &options);
    let alone = run(&mut engine, &prompt, &model.prompt(3, 8));
    // Continues one session from the middle of a block, twice, differently.
    let mut first = engine.open_session().unwrap();
    engine.sync(&mut first, &prompt, &mut Control::default()).unwrap();
    let mut second = engine.open_session().unwrap();
    let mut other = prompt[..40].to_vec();
    other.extend(model.prompt(9, 9));
    engine.sync(&mut second, &other, &mut Control::default()).unwrap();
    let mut out = bits(first.logits());
    for token in model.prompt(3, 8) {
        engine.decode(&mut first, token, &mut Control::default()).unwrap();
        out.extend(bits(first.logits()));
    }
    assert_eq!(out, alone);
}

#[test]
fn a_step_that_is_given_up_anywhere_leaves_what_it_began_from() {
    if !has_device() {
        return;
    }
    // Its first layer is dense, so nothing has been handed to the device when the second one begins.
    let model = TinyModel::deepseek(25);
    let dir = tempfile::tempdir().unwrap();
    let vault = write_tiny(dir.path(), &model, "q4/64", "q8/64");
    assert!(vault.spec.moe_layers().next() > Some(0));
    let mut options = on_gpu(&options(RingSize::Auto, 64, 1), Some(vault.spec.moe.top_k));
    options.plan.sessions = 2;
    let prompt = model.prompt(45, 10);
    let mut engine = open(&vault, &options);
    // More tokens than a flow has: their layers are begun one by one.
    let other = [&prompt[..36], &model.prompt(9, 11)].concat();
    let step = |engine: &mut Engine, session: &mut Session, checks: usize| {
        let seen = Cell::new(0);
        let stop = || seen.replace(seen.get() + 1) == checks;
        let mut control = Control { stop: Some(&stop), ..Control::default() };
        let held = session.len();
        session.queue(&other[held..], 1);
        let mut logits = Vec::new();
        let sessions = std::slice::from_mut(session);
        engine.step(sessions, &mut control, &mut |_, _, row| logits = bits(row)).map(|()| logits)
    };
    let mut first = engine.open_session().unwrap();
    engine.adopt(&mut first, &prompt);
    engine.sync(&mut first, &prompt, &mut Control::default()).unwrap();
    engine.close(first, true);
    let mut alone = engine.open_session().unwrap();
    engine.sync(&mut alone, &other, &mut Control::default()).unwrap();
    let expected = bits(alone.logits());
    engine.close(alone, false);
    // The block that is copied to is the same each time: only the first copy shows if it was lost.
    for checks in (1..vault.spec.n_layers()).chain([0]) {
        // Goes on from the middle of a block that is another's, so copies it first.
        let mut session = engine.open_session().unwrap();
        assert_eq!(engine.adopt(&mut session, &other), 36);
        let given_up = step(&mut engine, &mut session, checks);
        assert!(matches!(given_up, Err(EngineError::Cancelled)), "{checks}: {given_up:?}");
        assert_eq!(step(&mut engine, &mut session, usize::MAX).unwrap(), expected, "before layer {checks}");
        engine.close(session, false);
    }
}
