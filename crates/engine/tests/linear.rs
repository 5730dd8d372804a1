//! Models with linear attention: what they remember has no history, so they go back, and begin as others did, to
//! snapshots only, in memory or in a file; and never to anything else.
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

mod common;

use std::io::ErrorKind;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use common::{bits, goes_back_to_snapshots, greedy, job, open, options, write_tiny};
use smoe_engine::memory::MemoryFacts;
use smoe_engine::plan::{PlanRequest, RingSize};
use smoe_engine::{
    Control, Driver, Engine, EngineError, Finish, KvType, Scheduler, SchedulerOptions, SpillConfig, Synced,
    Vault, plan_vault,
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
    goes_back_to_snapshots(&mut engine, &model, &mut |prompt| fresh(&vault, prompt));
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
    assert!(scheduler.take_warning().is_none());
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

/// Conversations that are kept in a file.
fn kept(vault: &Vault, kv: KvType, file: &Path, max_bytes: u64) -> Scheduler {
    let mut options = options(RingSize::Auto, 48, 2);
    options.plan.kv = Some(kv);
    (options.plan.sessions, options.plan.context) = (2, Some(512));
    let spill = Some(SpillConfig { path: file.to_owned(), max_bytes });
    Scheduler::new(open(vault, &options), SchedulerOptions { spill, ..SchedulerOptions::default() }).unwrap()
}

/// An answer to the bit, its log probabilities with it; and how much of the prompt was known.
fn answer(scheduler: &mut Scheduler, prompt: &[u32], n: usize) -> (Vec<u32>, Vec<u32>, usize) {
    let (mut job, heard) = job(prompt, n);
    job.logprobs = Some(0);
    scheduler.submit(job).unwrap();
    while scheduler.step() {}
    let heard = heard.lock().unwrap();
    let probabilities: Vec<f32> = heard.logprobs.iter().map(|(logprob, _)| *logprob).collect();
    let end = heard.end.as_ref().unwrap();
    assert!(matches!(end.result, Ok(Finish::Length)), "{:?}", end.result);
    (heard.tokens.clone(), bits(&probabilities), end.usage.cached)
}

const ROOM: u64 = 64 << 20;

#[test]
fn a_conversation_goes_on_after_a_restart_as_it_does_without() {
    let (dir, vault, model) = tiny();
    for kv in [KvType::F32, KvType::F16, KvType::Q8] {
        let [file, other] = ["restarts", "goes-on"].map(|name| dir.path().join(format!("{name}-{kv:?}")));
        let mut goes_on = kept(&vault, kv, &other, ROOM);
        let (mut conversation, mut known) = (model.prompt(75, 1), 0);
        for turn in 0..4 {
            let mut restarted = kept(&vault, kv, &file, ROOM);
            let told = answer(&mut restarted, &conversation, 40);
            assert_eq!(told, answer(&mut goes_on, &conversation, 40), "{kv:?}, turn {turn}");
            // The last token of an answer is told but never computed.
            assert_eq!(told.2, known, "{kv:?}, turn {turn}");
            conversation.extend(told.0);
            known = conversation.len() - 1;
            conversation.extend(model.prompt(9, 50 + turn));
        }
        // What was said otherwise in the third turn goes on from the end of the second.
        let second = known - 49;
        conversation[second + 5] = (conversation[second + 5] + 1) % vault.spec.vocab_size as u32;
        let told = answer(&mut kept(&vault, kv, &file, ROOM), &conversation, 9);
        assert_eq!(told.2, second, "{kv:?}");
        let mut alone = options(RingSize::Auto, 64, 1);
        (alone.plan.kv, alone.plan.context) = (Some(kv), Some(512));
        assert_eq!(told.0, greedy(&mut open(&vault, &alone), &conversation, 9), "{kv:?}");
    }
}

#[test]
fn a_beginning_that_two_share_outlives_a_restart() {
    let (dir, vault, model) = tiny();
    let file = dir.path().join("kv");
    let begun = model.prompt(150, 1);
    let prompt = |who| [&begun[..], &model.prompt(40, who)].concat();
    for (who, cached) in [(2, 0), (3, 0), (4, 128), (5, 128)] {
        let told = answer(&mut kept(&vault, KvType::F16, &file, ROOM), &prompt(who), 9);
        assert_eq!((told.0, told.2), (answer_alone(&vault, &prompt(who), 9), cached), "{who}");
    }
}

fn answer_alone(vault: &Vault, prompt: &[u32], n: usize) -> Vec<u32> {
    greedy(&mut open(vault, &options(RingSize::Auto, 64, 1)), prompt, n)
}

#[test]
fn a_file_that_is_small_damaged_or_anothers_makes_it_slower_never_different() {
    let (dir, vault, model) = tiny();
    let file = dir.path().join("kv");
    let prompts: Vec<Vec<u32>> = (0..4).map(|i| model.prompt(90 + 9 * i, i as u64)).collect();
    let expected: Vec<_> = prompts.iter().map(|prompt| answer_alone(&vault, prompt, 40)).collect();
    // Of a block there is no room for a state.
    let mut scheduler = kept(&vault, KvType::F16, &file, 1 << 16);
    let warning = scheduler.take_warning().unwrap();
    assert!(matches!(warning, EngineError::SpillTooSmall { max_bytes: 65536, .. }), "{warning:?}");
    assert!(warning.to_string().contains("--kv-cache-size"), "{warning}");
    assert!(!scheduler.load().kv_has_file && !file.exists());
    assert_eq!(answer(&mut scheduler, &prompts[0], 40).0, expected[0]);
    // Of two conversations, not of four.
    for _ in 0..2 {
        let mut scheduler = kept(&vault, KvType::F16, &file, 20 << 14);
        assert!(scheduler.take_warning().is_none());
        for (prompt, expected) in prompts.iter().zip(&expected) {
            assert_eq!(answer(&mut scheduler, prompt, 40).0, *expected);
        }
    }
    std::fs::remove_file(&file).unwrap();
    // As a crash leaves it, at any moment.
    let mut scheduler = kept(&vault, KvType::F16, &file, ROOM);
    let mut copies = Vec::new();
    for (i, prompt) in prompts.iter().enumerate() {
        scheduler.submit(job(prompt, 40).0).unwrap();
        let mut step = 0;
        while scheduler.step() {
            step += 1;
            if step % 8 == 0 {
                let copy = dir.path().join(format!("{i}-{step}"));
                std::fs::copy(&file, &copy).unwrap();
                copies.push(copy);
            }
        }
    }
    drop(scheduler);
    let said = |i: usize| [&prompts[i][..], &expected[i]].concat();
    let after: Vec<_> = (0..4).map(|i| answer_alone(&vault, &said(i), 5)).collect();
    let whole: Vec<usize> = (0..4).map(|i| said(i).len() - 1).collect();
    let mut found = 0;
    for copy in &copies {
        let mut scheduler = kept(&vault, KvType::F16, copy, ROOM);
        for i in 0..4 {
            let (tokens, _, cached) = answer(&mut scheduler, &said(i), 5);
            assert_eq!(tokens, after[i]);
            assert!(cached == 0 || cached == whole[i], "{cached} of {}", whole[i]);
            found += usize::from(cached > 0);
        }
    }
    assert!(found > copies.len(), "{found} in {} copies", copies.len());
    // Damaged all over.
    let mut bytes = std::fs::read(&file).unwrap();
    bytes.iter_mut().skip(8192).step_by(150_001).for_each(|byte| *byte ^= 0x40);
    let damaged = dir.path().join("damaged");
    std::fs::write(&damaged, &bytes).unwrap();
    let mut scheduler = kept(&vault, KvType::F16, &damaged, ROOM);
    let cached: usize = (0..4)
        .map(|i| {
            let (tokens, _, cached) = answer(&mut scheduler, &said(i), 5);
            assert_eq!(tokens, after[i]);
            cached
        })
        .sum();
    assert!(cached < whole.iter().sum(), "some were damaged");
    // Another model's, and the same with other numbers, is begun anew.
    let other_dir = tempfile::tempdir().unwrap();
    let other = write_tiny(other_dir.path(), &TinyModel::qwen3_next(4), "q4/64", "q8/64");
    for (vault, kv) in [(&other, KvType::F16), (&vault, KvType::Q8), (&vault, KvType::F16)] {
        assert_eq!(answer(&mut kept(vault, kv, &file, ROOM), &said(0), 5).2, 0);
    }
}

#[test]
fn a_state_is_read_from_the_file_while_others_go_on() {
    let (dir, vault, model) = tiny();
    let file = dir.path().join("kv");
    let long = model.prompt(450, 1);
    let mut said = [&long[..], &answer(&mut kept(&vault, KvType::F16, &file, ROOM), &long, 20).0].concat();
    let known = said.len() - 1;
    said.extend(model.prompt(5, 3));
    let mut scheduler = kept(&vault, KvType::F16, &file, ROOM);
    let (other, answered) = job(&model.prompt(5, 2), 200);
    scheduler.submit(other).unwrap();
    let told = || answered.lock().unwrap().tokens.len();
    while told() < 3 {
        scheduler.step();
    }
    let (loaded, heard) = job(&said, 4);
    scheduler.submit(loaded).unwrap();
    let mut steps = 0;
    while heard.lock().unwrap().prefills.is_empty() {
        let (before, hits) = (told(), scheduler.engine().spilled().unwrap().hits);
        scheduler.step();
        let read = scheduler.engine().spilled().unwrap().hits - hits;
        assert!(read <= 9, "{read} blocks and pieces in a step");
        assert!(told() > before, "who is being answered gets a token in every step");
        steps += 1;
    }
    // Fourteen blocks, three pieces, and the part of a block at the end.
    assert_eq!(steps, 3);
    while scheduler.step() {}
    let heard = heard.lock().unwrap();
    assert_eq!(heard.end.as_ref().unwrap().usage.cached, known);
    let mut alone = options(RingSize::Auto, 64, 1);
    alone.plan.context = Some(512);
    assert_eq!(heard.tokens, greedy(&mut open(&vault, &alone), &said, 4));
}
