//! Models with linear attention: what they remember has no history, so they go back, and begin as others did, to
//! snapshots only; and never to anything else.
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

mod common;

use std::io::ErrorKind;
use std::sync::atomic::{AtomicBool, Ordering};

use common::{bits, greedy, job, open, options, write_tiny};
use smoe_engine::memory::MemoryFacts;
use smoe_engine::plan::{PlanRequest, RingSize};
use smoe_engine::{
    Control, Driver, Engine, EngineError, Finish, Scheduler, SchedulerOptions, SpillConfig, Synced, Vault,
    plan_vault,
};
use smoe_store::{Fault, FaultyDisk, FileDisk, OpenMode};
use smoe_testkit::TinyModel;
use tempfile::TempDir;

fn tiny() -> (TempDir, Vault, TinyModel) {
    let model = TinyModel::qwen3_next(3);
    let dir = tempfile::tempdir().unwrap();
    let vault = write_tiny(dir.path(), &model, "q4/64", "q8/64");
    (dir, vault, model)
}

/// Logits after a prompt, computed from nothing.
fn fresh(vault: &Vault, prompt: &[u32]) -> Vec<u32> {
    let mut engine = open(vault, &options(RingSize::Auto, 64, 1));
    let mut session = engine.open_session().unwrap();
    engine.sync(&mut session, prompt, &mut Control::default()).unwrap();
    bits(session.logits())
}

#[test]
fn a_session_goes_back_to_a_snapshot_and_computes_the_rest_again() {
    let (_dir, vault, model) = tiny();
    let mut engine = open(&vault, &options(RingSize::Auto, 16, 2));
    let prompt = model.prompt(100, 1);
    let mut session = engine.open_session().unwrap();
    let control = &mut Control::default();
    engine.sync(&mut session, &prompt, control).unwrap();
    let expected = bits(session.logits());
    assert_eq!(expected, fresh(&vault, &prompt));
    // Again, and again after an answer: from the last edge before the last token.
    let again = Synced { reused: 96, prefilled: 4 };
    assert_eq!(engine.sync(&mut session, &prompt, control).unwrap(), again);
    assert_eq!(bits(session.logits()), expected);
    for token in model.prompt(7, 2) {
        engine.decode(&mut session, token, control).unwrap();
    }
    assert_eq!(engine.sync(&mut session, &prompt, control).unwrap(), again);
    assert_eq!(bits(session.logits()), expected);
    // What grows is gone on with.
    let longer = [&prompt[..], &model.prompt(20, 4)].concat();
    assert_eq!(engine.sync(&mut session, &longer, control).unwrap(), Synced { reused: 100, prefilled: 20 });
    assert_eq!(bits(session.logits()), fresh(&vault, &longer));
    // Before the first snapshot there is the beginning.
    let mut other = prompt.clone();
    other[30] = (other[30] + 1) % vault.spec.vocab_size as u32;
    assert_eq!(engine.sync(&mut session, &other, control).unwrap().reused, 0);
    assert_eq!(bits(session.logits()), fresh(&vault, &other));
}

#[test]
fn a_step_that_is_cancelled_or_fails_leaves_the_states_as_they_were() {
    let (_dir, vault, model) = tiny();
    let prompt = model.prompt(40, 1);
    let expected = fresh(&vault, &prompt);
    let mut engine = open(&vault, &options(RingSize::Auto, 8, 1));
    let mut session = engine.open_session().unwrap();
    let cancel = AtomicBool::new(false);
    let mut stop = |done: usize, _: usize| cancel.store(done > 16, Ordering::Relaxed);
    let mut control = Control { cancel: Some(&cancel), progress: Some(&mut stop), ..Control::default() };
    let cancelled = engine.sync(&mut session, &prompt, &mut control);
    assert!(matches!(cancelled, Err(EngineError::Cancelled)));
    // In the middle of a step, whose first layers had gone on.
    assert_eq!(session.tokens(), &prompt[..16]);
    let synced = engine.sync(&mut session, &prompt, &mut Control::default()).unwrap();
    assert_eq!(synced, Synced { reused: 16, prefilled: 24 });
    assert_eq!(bits(session.logits()), expected);

    let disk = FaultyDisk::new(FileDisk::open(&vault.experts_path, OpenMode::Auto).unwrap());
    let options = options(RingSize::Slots(vault.spec.moe.top_k), 8, 1);
    let mut engine = Engine::open_on(&vault, disk.clone(), &options).unwrap();
    let mut session = engine.open_session().unwrap();
    for read in [5, 20, 60] {
        disk.on_read(read, Fault::Error(ErrorKind::Other));
    }
    let mut failures = 0;
    while let Err(error) = engine.sync(&mut session, &prompt, &mut Control::default()) {
        assert!(matches!(error, EngineError::Store(_)), "{error}");
        failures += 1;
        assert!(failures < 9, "{error}");
    }
    assert!(failures > 0);
    assert_eq!(bits(session.logits()), expected);
}

#[test]
fn jobs_side_by_side_and_after_each_other_get_what_they_get_alone() {
    let (dir, vault, model) = tiny();
    let mut several = options(RingSize::Auto, 48, 2);
    (several.plan.sessions, several.plan.context) = (3, Some(512));
    let spill = SpillConfig { path: dir.path().join("kv"), max_bytes: 1 << 24 };
    let scheduling = SchedulerOptions { spill: Some(spill), ..SchedulerOptions::default() };
    let mut scheduler = Scheduler::new(open(&vault, &several), scheduling).unwrap();
    let warning = scheduler.take_warning().unwrap().to_string();
    assert!(warning.contains("linear attention"), "{warning}");
    // Words that come again and again: guesses would pay.
    let words = model.prompt(9, 5);
    let prompts: Vec<Vec<u32>> =
        (0..4).map(|i| (0..70 + 20 * i).map(|at| words[(at * (i + 1)) % words.len()]).collect()).collect();
    let mut alone = open(&vault, &options(RingSize::Auto, 256, 1));
    let expected: Vec<_> = prompts.iter().map(|prompt| greedy(&mut alone, prompt, 30)).collect();
    for round in 0..3 {
        let submit = |prompt: &Vec<u32>| {
            let (job, heard) = job(prompt, 30);
            scheduler.submit(job).unwrap();
            heard
        };
        let all: Vec<_> = prompts.iter().map(submit).collect();
        while scheduler.step() {}
        for ((heard, expected), prompt) in all.iter().zip(&expected).zip(&prompts) {
            let heard = heard.lock().unwrap();
            assert_eq!(heard.tokens, *expected, "round {round}");
            let end = heard.end.as_ref().unwrap();
            assert!(matches!(end.result, Ok(Finish::Length)));
            // What was computed once is gone on from, at an edge before the prompt's end.
            let cached = end.usage.cached;
            assert!((cached > 0) == (round > 0) && cached < prompt.len(), "round {round}: {cached}");
        }
    }
    assert_eq!(scheduler.load().guessed, 0, "no guesses that could not be taken back");
    // A conversation goes on from its very end.
    let said: Vec<u32> = [&prompts[0][..], &expected[0][..29], &words].concat();
    let (next, heard) = job(&said, 5);
    scheduler.submit(next).unwrap();
    while scheduler.step() {}
    let heard = heard.lock().unwrap();
    assert_eq!(heard.end.as_ref().unwrap().usage.cached, prompts[0].len() + 29);
    assert_eq!(heard.tokens, greedy(&mut alone, &said, 5));
}

#[test]
fn the_plan_counts_states_and_their_snapshots() {
    let (_dir, vault, _) = tiny();
    let facts = MemoryFacts { physical: 1 << 30, cgroup_limit: None, available: None };
    let plan = |sessions| {
        let request = PlanRequest { sessions, ..PlanRequest::default() };
        plan_vault(&vault, &request, &facts).unwrap()
    };
    let (one, three) = (plan(1), plan(3));
    let delta = vault.spec.delta.unwrap();
    let heads = delta.n_value_heads * delta.value_dim * delta.key_dim;
    let state = 4 * vault.spec.delta_layers().count() * (heads + (delta.conv_width - 1) * delta.channels());
    for (plan, sessions) in [(&one, 1), (&three, 3)] {
        assert_eq!(plan.state_bytes, ((2 * sessions + plan.snapshots) * state) as u64);
    }
    assert_eq!((one.snapshots, three.snapshots), (16, 48));
    assert!(one.floor_bytes() > one.state_bytes && three.kv_bytes == 3 * one.kv_bytes);
}
