//! Models whose layers see windows keep no more than windows of those layers, and compute what they would with all kept.
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

mod common;

use std::io::ErrorKind;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use common::{Heard, bits, greedy, job, observe, open, options, sculpted, write_tiny};
use smoe_engine::plan::RingSize;
use smoe_engine::{
    Control, Driver, Engine, EngineOptions, Finish, Scheduler, SchedulerOptions, SpillConfig, Synced, Vault,
};
use smoe_sculpt::BackboneBits;
use smoe_store::{Fault, FaultyDisk, FileDisk, OpenMode};
use smoe_testkit::TinyModel;
use tempfile::TempDir;

/// Windows of 9 and 40 positions, and a layer that sees all.
fn tiny() -> (TempDir, Vault, TinyModel) {
    let model = TinyModel::gpt_oss(3);
    let dir = tempfile::tempdir().unwrap();
    let vault = write_tiny(dir.path(), &model, "q4/64", "q8/64");
    (dir, vault, model)
}

/// Settings for a context of many windows; those with everything kept.
fn settings(chunk: usize, sessions: usize) -> [EngineOptions; 2] {
    let mut bounded = options(RingSize::Auto, chunk, 2);
    (bounded.plan.context, bounded.plan.sessions) = (Some(1024), sessions);
    let mut whole = bounded.clone();
    whole.plan.whole_windows = true;
    [bounded, whole]
}

fn is_what_it_is_with_all_kept(vault: &Vault, prompt: &[u32]) {
    for chunk in [512, 33, 1] {
        let [mut bounded, mut whole] = settings(chunk, 1).map(|options| open(vault, &options));
        let (blocks, all) = (bounded.plan().window_blocks, bounded.kv_usage().blocks);
        assert!((1..all).contains(&blocks) && whole.plan().window_blocks == 0, "{blocks} of {all}");
        let expected = observe(&mut whole, prompt);
        let got = observe(&mut bounded, prompt);
        assert_eq!(bits(&got.logits), bits(&expected.logits), "chunk {chunk}");
        assert_eq!(bits(&got.hidden), bits(&expected.hidden), "chunk {chunk}");
        assert_eq!(greedy(&mut bounded, prompt, 40), greedy(&mut whole, prompt, 40), "chunk {chunk}");
    }
}

#[test]
fn a_prompt_many_windows_long_has_the_bits_that_it_has_with_all_kept() {
    let (_dir, vault, model) = tiny();
    is_what_it_is_with_all_kept(&vault, &model.prompt(700, 1));
    // `None` said so.
    let Some((_dir, vault)) = sculpted("gpt_oss", 16, BackboneBits::Bf16) else { return };
    is_what_it_is_with_all_kept(&vault, &TinyModel::new(vault.spec.clone(), 1).prompt(400, 2));
}

#[test]
fn a_chat_goes_back_to_where_its_answer_began_and_says_how_far() {
    let (_dir, vault, model) = tiny();
    let [bounded, whole] = settings(64, 1);
    let (mut engine, mut whole) = (open(&vault, &bounded), open(&vault, &whole));
    let fresh = |whole: &mut Engine, prompt: &[u32]| {
        let mut session = whole.open_session().unwrap();
        whole.sync(&mut session, prompt, &mut Control::default()).unwrap();
        bits(session.logits())
    };
    let prompt = model.prompt(300, 1);
    let mut session = engine.open_session().unwrap();
    let control = &mut Control::default();
    engine.sync(&mut session, &prompt, control).unwrap();
    let expected = bits(session.logits());
    for token in model.prompt(200, 2) {
        engine.decode(&mut session, token, control).unwrap();
    }
    // The answer again; and a turn whose template leaves out what was thought.
    assert_eq!(engine.sync(&mut session, &prompt, control).unwrap(), Synced { reused: 299, prefilled: 1 });
    assert_eq!(bits(session.logits()), expected);
    for token in model.prompt(200, 3) {
        engine.decode(&mut session, token, control).unwrap();
    }
    let next = [&prompt[..], &model.prompt(90, 4)].concat();
    assert_eq!(engine.sync(&mut session, &next, control).unwrap(), Synced { reused: 300, prefilled: 90 });
    assert_eq!(bits(session.logits()), fresh(&mut whole, &next));
    // Into the middle of the first prompt: nothing is left of that window.
    let other = [&prompt[..150], &model.prompt(50, 5)].concat();
    assert_eq!(engine.sync(&mut session, &other, control).unwrap(), Synced { reused: 0, prefilled: 200 });
    assert_eq!(bits(session.logits()), fresh(&mut whole, &other));
}

fn submit(scheduler: &mut Scheduler, prompt: &[u32], n: usize) -> Arc<Mutex<Heard>> {
    let (job, heard) = job(prompt, n);
    scheduler.submit(job).unwrap();
    heard
}

fn scheduler(vault: &Vault, file: Option<&Path>, sessions: usize) -> Scheduler {
    let [mut bounded, _] = settings(64, sessions);
    bounded.plan.kv_contexts = 2;
    let spill = file.map(|path| SpillConfig { path: path.to_owned(), max_bytes: 64 << 20 });
    let options = SchedulerOptions { spill, at_once: Some(sessions), ..SchedulerOptions::default() };
    Scheduler::new(open(vault, &bounded), options).unwrap()
}

/// The tokens of a job, and how many of its prompt were found.
fn told(heard: &Arc<Mutex<Heard>>) -> (Vec<u32>, usize) {
    let heard = heard.lock().unwrap();
    let end = heard.end.as_ref().unwrap();
    assert!(end.result.is_ok(), "{:?}", end.result);
    (heard.tokens.clone(), end.usage.cached)
}

#[test]
fn jobs_together_and_after_a_restart_get_what_they_get_alone_with_all_kept() {
    let (dir, vault, model) = tiny();
    let file = dir.path().join("kv");
    let [_, whole] = settings(512, 1);
    let mut alone = open(&vault, &whole);
    // One beginning for all; words that come again, so that guesses are made.
    let words = model.prompt(9, 5);
    let begin = model.prompt(200, 6);
    let prompts: Vec<Vec<u32>> = (0..5)
        .map(|i| {
            [&begin[..], &(0..80 + 60 * i).map(|at| words[at * (i + 1) % 9]).collect::<Vec<_>>()].concat()
        })
        .collect();
    let expected: Vec<Vec<u32>> = prompts.iter().map(|prompt| greedy(&mut alone, prompt, 60)).collect();
    let mut scheduler_ = scheduler(&vault, Some(&file), 3);
    for round in 0..2 {
        let all: Vec<_> = prompts.iter().map(|prompt| submit(&mut scheduler_, prompt, 60)).collect();
        while scheduler_.step() {}
        for (i, (heard, expected)) in all.iter().zip(&expected).enumerate() {
            let (tokens, cached) = told(heard);
            assert_eq!(tokens, *expected, "round {round}");
            assert!(round == 0 || cached == prompts[i].len() - 1, "round {round}: {cached} of job {i}");
        }
    }
    let usage = scheduler_.engine().kv_usage();
    assert_eq!((usage.held, usage.window_held, usage.lost), (0, 0, 0), "{usage:?}");
    drop(scheduler_);
    // After a restart the next turn finds everything, and so does the same prompt.
    let mut again = scheduler(&vault, Some(&file), 3);
    for (prompt, answer) in prompts.iter().zip(&expected) {
        let heard = submit(&mut again, prompt, 60);
        while again.step() {}
        assert_eq!(told(&heard), (answer.clone(), prompt.len() - 1));
        let said = [&prompt[..], &answer[..59], &words].concat();
        let heard = submit(&mut again, &said, 5);
        while again.step() {}
        assert_eq!(told(&heard), (greedy(&mut alone, &said, 5), prompt.len() + 59));
    }
    // Without a file, what memory keeps is enough for the ends.
    let mut memory = scheduler(&vault, None, 3);
    for (prompt, answer) in prompts[..3].iter().zip(&expected) {
        let heard = submit(&mut memory, prompt, 60);
        while memory.step() {}
        assert_eq!(told(&heard).0, *answer);
    }
    for (prompt, answer) in prompts[..3].iter().zip(&expected) {
        let said = [&prompt[..], &answer[..59], &words].concat();
        let heard = submit(&mut memory, &said, 5);
        while memory.step() {}
        assert_eq!(told(&heard), (greedy(&mut alone, &said, 5), prompt.len() + 59));
    }
}

/// Going back empties the blocks of a beginning that was read in part: a step that fails must not do that to a job that is
/// not in it, and then let go of what it no longer has.
#[test]
fn a_job_that_reads_its_beginning_while_the_step_of_another_fails_can_be_let_go() {
    let (dir, vault, model) = tiny();
    let spill = SpillConfig { path: dir.path().join("kv"), max_bytes: 64 << 20 };
    let prompt = model.prompt(700, 3);
    let mut first = scheduler(&vault, Some(&spill.path), 2);
    submit(&mut first, &prompt, 5);
    while first.step() {}
    drop(first);

    let [mut bounded, _] = settings(64, 2);
    bounded.plan.ring = RingSize::Slots(2 * vault.spec.moe.top_k);
    let disk = FaultyDisk::new(FileDisk::open(&vault.experts_path, OpenMode::Auto).unwrap());
    let engine = Engine::open_on(&vault, disk.clone(), &bounded).unwrap();
    let settings = SchedulerOptions { spill: Some(spill), at_once: Some(2), ..SchedulerOptions::default() };
    let mut scheduler = Scheduler::new(engine, settings).unwrap();
    let answered = submit(&mut scheduler, &model.prompt(5, 4), 200);
    while answered.lock().unwrap().tokens.len() < 3 {
        assert!(scheduler.step());
    }
    let (reading, heard) = job(&prompt, 5);
    let cancel = reading.cancel.clone();
    scheduler.submit(reading).unwrap();
    for record in &vault.experts.records {
        disk.on_offset(record.offset, Fault::Error(ErrorKind::Other));
    }
    scheduler.step();
    cancel.store(true, Ordering::Relaxed);
    while scheduler.step() {}
    assert!(answered.lock().unwrap().end.as_ref().unwrap().result.is_err(), "its step failed");
    let heard = heard.lock().unwrap();
    let end = heard.end.as_ref().unwrap();
    assert!(matches!(end.result, Ok(Finish::Stopped)), "{:?}", end.result);
    assert!((1..699).contains(&end.usage.cached), "read in part: {}", end.usage.cached);
    let usage = scheduler.engine().kv_usage();
    assert_eq!((usage.held, usage.window_held), (0, 0));
}
