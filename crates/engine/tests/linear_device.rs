//! Models with linear attention on a GPU: states live there, go back to snapshots there, and hold what the processor's do.
//!
//! Skipped aloud where there is no device; a program that plays one (lavapipe) will do.
#![cfg(feature = "gpu")]
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]
#![allow(clippy::print_stderr, reason = "what is skipped is said")]

mod common;

use common::device::{has_device, on_gpu, run, run_in};
use common::{
    bits, goes_back_to_snapshots, greedy, job, meets_golden, observe, open, options, sculpted, write_tiny,
};
use smoe_engine::plan::RingSize;
use smoe_engine::{Control, Driver, Engine, EngineOptions, Scheduler, SchedulerOptions, Vault};
use smoe_sculpt::BackboneBits;
use smoe_testkit::{Golden, TinyModel};
use tempfile::TempDir;

fn tiny(seed: u64) -> (TempDir, Vault, TinyModel) {
    let model = TinyModel::qwen3_next(seed);
    let dir = tempfile::tempdir().unwrap();
    let vault = write_tiny(dir.path(), &model, "q4/64", "q8/64");
    (dir, vault, model)
}

/// An engine that has every expert on the device.
fn whole(vault: &Vault, options: &EngineOptions) -> Engine {
    let mut engine = open(vault, &on_gpu(options, None));
    engine.preload(&mut |_, _| {}).unwrap();
    engine
}

/// What the processor gives differs by rounding: where a sum in another order rounds to another int8 code, by a step of 1/127.
#[test]
fn logits_are_the_processors_within_the_tolerance() {
    if !has_device() {
        return;
    }
    let model = TinyModel::qwen3_next(31);
    for (experts, backbone, tolerance) in [("bf16", "bf16", 1e-4), ("q4/64", "q8/64", 0.03)] {
        let dir = tempfile::tempdir().unwrap();
        let vault = write_tiny(dir.path(), &model, experts, backbone);
        // Over the end of what is staged at once, and of a block.
        let prompt = model.prompt(75, 3);
        let cpu = options(RingSize::Auto, 48, 1);
        let expected = observe(&mut open(&vault, &cpu), &prompt);
        let got = observe(&mut whole(&vault, &cpu), &prompt);
        let scale = expected.logits.iter().fold(1f32, |m, l| m.max(l.abs()));
        for (what, a, b) in
            [("logits", &got.logits, &expected.logits), ("hidden", &got.hidden, &expected.hidden)]
        {
            let worst = a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
            eprintln!("{experts} {backbone}: {what} off by {worst} of {scale}");
            assert!(
                a.len() == b.len() && worst <= tolerance * scale,
                "{experts} {backbone}: {what} off by {worst}"
            );
        }
    }
}

#[test]
fn fixtures_meet_the_goldens() {
    if !has_device() {
        return;
    }
    for family in ["qwen3_next", "qwen3_5_moe"] {
        let Some((_dir, vault)) = sculpted(family, 16, BackboneBits::Bf16) else { continue };
        let golden = Golden::of(family).unwrap();
        meets_golden(&mut whole(&vault, &options(RingSize::Auto, 64, 1)), &golden, &vault.spec);
    }
}

/// Kernels that do not depend on each other are one dispatch: the shared expert's and its gate's are the routed ones'.
#[test]
fn a_shared_expert_takes_a_token_no_dispatch() {
    if !has_device() {
        return;
    }
    let model = TinyModel::qwen3_next(30);
    let mut alone = model.spec.clone();
    (alone.moe.d_shared, alone.moe.shared_gate) = (0, false);
    let [with, without] = [model, TinyModel::new(alone, 30)].map(|model| {
        let dir = tempfile::tempdir().unwrap();
        let vault = write_tiny(dir.path(), &model, "q4/64", "q8/64");
        let mut engine = open(&vault, &on_gpu(&options(RingSize::Auto, 64, 1), None));
        engine.measure_device().unwrap().unwrap().dispatches
    });
    assert_eq!(with, without);
    eprintln!("{with} dispatches");
}

#[test]
fn what_the_device_holds_and_how_steps_are_cut_do_not_change_a_bit() {
    if !has_device() {
        return;
    }
    let (_dir, vault, model) = tiny(32);
    let (prompt, further) = (model.prompt(70, 4), model.prompt(6, 5));
    let (all, top_k) = (vault.experts.records.len(), vault.spec.moe.top_k);
    let expected = run(&mut whole(&vault, &options(RingSize::Slots(all), 128, 1)), &prompt, &further);
    for (slots, chunk) in [(None, 1), (None, 9), (Some(top_k), 128), (Some(top_k), 5), (Some(top_k + 1), 1)] {
        let mut engine = open(&vault, &on_gpu(&options(RingSize::Slots(all), chunk, 2), slots));
        assert_eq!(run(&mut engine, &prompt, &further), expected, "{slots:?} {chunk}");
        let snapshot = engine.info().tier.unwrap().meter.snapshot();
        assert!(
            snapshot.misses > 0 && (slots.is_none() || snapshot.evictions > 0),
            "{slots:?}: {snapshot:?}"
        );
    }
}

#[test]
fn a_session_goes_back_to_a_snapshot_on_the_device() {
    if !has_device() {
        return;
    }
    let (_dir, vault, model) = tiny(33);
    let mut engine = whole(&vault, &options(RingSize::Auto, 16, 1));
    let mut fresh = whole(&vault, &options(RingSize::Auto, 64, 1));
    goes_back_to_snapshots(&mut engine, &model, &mut |prompt| run(&mut fresh, prompt, &[]));
}

#[test]
fn sessions_by_turns_keep_their_states_apart() {
    if !has_device() {
        return;
    }
    let (_dir, vault, model) = tiny(34);
    let mut options = options(RingSize::Auto, 32, 1);
    options.plan.sessions = 3;
    let mut engine = whole(&vault, &options);
    let subjects =
        [1, 2, 3].map(|which| (model.prompt(20 + 15 * which as usize, which), model.prompt(4, 9 + which)));
    let alone = subjects.clone().map(|(prompt, further)| run(&mut engine, &prompt, &further));
    let mut sessions = [(); 3].map(|()| engine.open_session().unwrap());
    let mut got: Vec<Vec<u32>> = subjects
        .iter()
        .zip(&mut sessions)
        .map(|((prompt, _), session)| run_in(&mut engine, session, prompt, &[]))
        .collect();
    for i in 0..4 {
        for (((_, further), session), got) in subjects.iter().zip(&mut sessions).zip(&mut got) {
            engine.decode(session, further[i], &mut Control::default()).unwrap();
            got.extend(bits(session.logits()));
        }
    }
    assert!(got.iter().eq(&alone), "by turns");
}

/// Greedy answers, whose steps the device begins before they are asked for, over a position where a snapshot is taken; then gone back to.
#[test]
fn jobs_side_by_side_and_after_each_other_get_what_they_get_alone() {
    if !has_device() {
        return;
    }
    let (_dir, vault, model) = tiny(35);
    let mut several = options(RingSize::Auto, 128, 1);
    (several.plan.sessions, several.plan.context) = (3, Some(1024));
    let mut scheduler = Scheduler::new(whole(&vault, &several), SchedulerOptions::default()).unwrap();
    let prompts = [model.prompt(503, 1), model.prompt(70, 2), model.prompt(33, 3)];
    let mut one = options(RingSize::Auto, 200, 1);
    one.plan.context = Some(1024);
    let mut alone = whole(&vault, &one);
    let expected = prompts.each_ref().map(|prompt| greedy(&mut alone, prompt, 24));
    // The long one by itself; all together.
    for who in [0..1, 0..3] {
        let heard: Vec<_> = who
            .clone()
            .map(|i| {
                let (job, heard) = job(&prompts[i], 24);
                scheduler.submit(job).unwrap();
                heard
            })
            .collect();
        while scheduler.step() {}
        for (i, heard) in who.zip(&heard) {
            assert_eq!(heard.lock().unwrap().tokens, expected[i], "prompt {i}");
        }
    }
    // From the snapshot amid the answer, and from its end.
    for (said, known) in [(15, 512), (23, 503 + 23)] {
        let mut prompt = [&prompts[0][..], &expected[0][..said]].concat();
        if known == 512 {
            prompt.push((expected[0][said] + 1) % vault.spec.vocab_size as u32);
        }
        prompt.extend(model.prompt(5, 8));
        let (job, heard) = job(&prompt, 6);
        scheduler.submit(job).unwrap();
        while scheduler.step() {}
        let heard = heard.lock().unwrap();
        assert_eq!(heard.tokens, greedy(&mut alone, &prompt, 6), "from {known}");
        assert_eq!(heard.end.as_ref().unwrap().usage.cached, known);
    }
}
