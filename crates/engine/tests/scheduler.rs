//! Many jobs at once: the same tokens as alone, whatever the ring, the order and the room; what was computed is found
//! again; failures and cancellations concern those whose they are.
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

mod common;

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{greedy, open, options, write_tiny};
use smoe_engine::plan::{PlanRequest, RingSize};
use smoe_engine::{
    Constraint, Driver, Ended, Engine, EngineError, EngineOptions, Event, Finish, Job, Limits, Sampler,
    Sampling, Scheduler, SchedulerOptions, SpillConfig, Vault,
};
use smoe_store::{Fault, FaultyDisk, FileDisk, OpenMode};
use smoe_testkit::TinyModel;
use tempfile::TempDir;

fn tiny() -> (TempDir, Vault, TinyModel) {
    let model = TinyModel::qwen3(3);
    let dir = tempfile::tempdir().unwrap();
    let vault = write_tiny(dir.path(), &model, "q4/64", "q8/64");
    (dir, vault, model)
}

fn several(ring: RingSize, chunk: usize, sessions: usize, kv_contexts: usize) -> EngineOptions {
    let mut options = options(ring, chunk, 2);
    options.plan = PlanRequest { sessions, kv_contexts, ..options.plan };
    options
}

/// What a job's sink heard.
#[derive(Default)]
struct Heard {
    tokens: Vec<u32>,
    logprobs: Vec<(f32, Vec<(u32, f32)>)>,
    prefills: Vec<(usize, usize, usize)>,
    end: Option<Ended>,
}

type Log = Arc<Mutex<Heard>>;

fn job(prompt: &[u32], n: usize) -> (Job, Log) {
    let log = Log::default();
    let heard = log.clone();
    let sink = move |event: Event<'_>| {
        let mut heard = heard.lock().unwrap();
        assert!(heard.end.is_none(), "nothing comes after the end");
        match event {
            Event::Prefill { done, total, cached } => {
                assert!(done <= total && heard.tokens.is_empty());
                heard.prefills.push((done, total, cached));
            }
            Event::Token { id, logprob, top } => {
                heard.tokens.push(id);
                heard.logprobs.extend(logprob.map(|logprob| (logprob, top.to_vec())));
            }
            Event::End(ended) => heard.end = Some(ended),
        }
        ControlFlow::Continue(())
    };
    let job = Job {
        prompt: prompt.to_vec(),
        sampling: Sampling::default(),
        limits: Limits { max_tokens: n, end_tokens: Vec::new() },
        logprobs: None,
        constraint: None,
        cancel: Arc::default(),
        sink: Box::new(sink),
    };
    (job, log)
}

fn scheduler(vault: &Vault, options: &EngineOptions) -> Scheduler {
    let at_once = Some(options.plan.sessions);
    Scheduler::new(open(vault, options), SchedulerOptions { at_once, ..SchedulerOptions::default() }).unwrap()
}

fn run(scheduler: &mut Scheduler) {
    while scheduler.step() {}
}

fn finish(log: &Log) -> Result<Finish, String> {
    let mut heard = log.lock().unwrap();
    let end = heard.end.take().expect("it has ended");
    assert_eq!(end.usage.completion, heard.tokens.len());
    end.result.map_err(|e| e.to_string())
}

fn cached(log: &Log) -> usize {
    log.lock().unwrap().end.as_ref().unwrap().usage.cached
}

/// One job from beginning to end: its tokens.
fn one(scheduler: &mut Scheduler, prompt: &[u32], n: usize) -> (Vec<u32>, usize) {
    let (job, log) = job(prompt, n);
    scheduler.submit(job).unwrap();
    run(scheduler);
    let cached = cached(&log);
    assert_eq!(finish(&log), Ok(Finish::Length));
    let tokens = log.lock().unwrap().tokens.clone();
    (tokens, cached)
}

#[test]
fn every_client_gets_the_tokens_that_it_gets_alone() {
    let (_dir, vault, model) = tiny();
    let top_k = vault.spec.moe.top_k;
    let prompts: Vec<Vec<u32>> = (0..6).map(|i| model.prompt(5 + 23 * i, i as u64)).collect();
    let mut alone = open(&vault, &options(RingSize::Auto, 16, 1));
    let expected: Vec<Vec<u32>> = prompts.iter().map(|prompt| greedy(&mut alone, prompt, 24)).collect();
    for ring in [RingSize::Auto, RingSize::Slots(top_k), RingSize::Slots(3 * top_k)] {
        for (sessions, kv_contexts, chunk) in [(6, 0, 64), (3, 0, 7), (6, 1, 16), (2, 1, 64)] {
            let mut scheduler = scheduler(&vault, &several(ring, chunk, sessions, kv_contexts));
            let mut logs = Vec::new();
            for (i, prompt) in prompts.iter().enumerate() {
                let (job, log) = job(prompt, 24);
                scheduler.submit(job).unwrap();
                logs.push(log);
                // Some come while others are being answered.
                for _ in 0..3 * (i % 3) {
                    scheduler.step();
                }
            }
            run(&mut scheduler);
            for ((log, expected), i) in logs.iter().zip(&expected).zip(0..) {
                assert_eq!(finish(log), Ok(Finish::Length), "client {i}");
                assert_eq!(
                    log.lock().unwrap().tokens,
                    *expected,
                    "client {i}, {ring:?}, {sessions} sessions"
                );
            }
            let load = scheduler.load();
            assert_eq!((load.running, load.queued, load.kv_used), (0, 0, 0));
        }
    }
}

#[test]
fn sampled_tokens_do_not_depend_on_neighbours_and_logprobs_are_the_models() {
    let (_dir, vault, model) = tiny();
    let sampling = |seed| Sampling { temperature: 1.0, top_p: 0.9, seed, ..Sampling::default() };
    let submit = |scheduler: &mut Scheduler, seed: u64| {
        let (mut job, log) = job(&model.prompt(20, seed), 16);
        job.sampling = sampling(seed);
        job.logprobs = Some(3);
        scheduler.submit(job).unwrap();
        log
    };
    let mut together = scheduler(&vault, &several(RingSize::Auto, 16, 4, 0));
    let logs: Vec<Log> = (0..4).map(|seed| submit(&mut together, seed)).collect();
    run(&mut together);
    for (seed, log) in (0..).zip(&logs) {
        let mut alone = scheduler(&vault, &several(RingSize::Auto, 16, 1, 0));
        let expected = submit(&mut alone, seed);
        run(&mut alone);
        let (log, expected) = (log.lock().unwrap(), expected.lock().unwrap());
        assert_eq!((&log.tokens, &log.logprobs), (&expected.tokens, &expected.logprobs));
        for (logprob, top) in &log.logprobs {
            assert_eq!(top.len(), 3);
            assert!(top.is_sorted_by(|a, b| a.1 >= b.1) && top[0].1 >= *logprob && *logprob < 0.0);
        }
    }
    let mut engine = open(&vault, &options(RingSize::Auto, 16, 1));
    let mut session = engine.open_session().unwrap();
    engine.sync(&mut session, &model.prompt(20, 0), &mut smoe_engine::Control::default()).unwrap();
    let token = Sampler::new(sampling(0), vault.spec.vocab_size)
        .map(|mut s| engine.sample(&session, &mut s))
        .unwrap();
    let first = logs[0].lock().unwrap();
    assert_eq!(first.tokens[0], token);
    let sum: f64 = session.logits().iter().map(|&l| f64::from(l).exp()).sum();
    let expected = f64::from(session.logits()[token as usize]) - sum.ln();
    assert!((f64::from(first.logprobs[0].0) - expected).abs() < 1e-5);
}

#[test]
fn the_next_turn_costs_its_own_tokens() {
    let (_dir, vault, model) = tiny();
    let mut scheduler = scheduler(&vault, &several(RingSize::Auto, 16, 2, 0));
    let mut conversation = model.prompt(75, 1);
    let (mut answer, first) = one(&mut scheduler, &conversation, 20);
    assert_eq!(first, 0);
    for turn in 0..3 {
        conversation.append(&mut answer);
        let known = conversation.len() - 1;
        conversation.extend(model.prompt(9, 50 + turn));
        let expected = greedy(&mut open(&vault, &options(RingSize::Auto, 16, 1)), &conversation, 20);
        let cached;
        (answer, cached) = one(&mut scheduler, &conversation, 20);
        // The last token of an answer is told but never computed.
        assert_eq!((cached, &answer), (known, &expected), "turn {turn}");
    }
    // A conversation that leaves it in the middle of a block goes on from there, and both stay as they are.
    let mut other = conversation[..50].to_vec();
    other.extend(model.prompt(8, 99));
    let expected = greedy(&mut open(&vault, &options(RingSize::Auto, 16, 1)), &other, 12);
    assert_eq!(one(&mut scheduler, &other, 12), (expected, 50));
    let again = greedy(&mut open(&vault, &options(RingSize::Auto, 16, 1)), &conversation, 20);
    assert_eq!(one(&mut scheduler, &conversation, 20), (again, conversation.len() - 1));
}

#[test]
fn equal_prompts_at_once_are_computed_once() {
    let (_dir, vault, model) = tiny();
    let mut scheduler = scheduler(&vault, &several(RingSize::Auto, 32, 4, 0));
    let prompt = model.prompt(100, 1);
    let logs: Vec<Log> = (0..4)
        .map(|_| {
            let (job, log) = job(&prompt, 4);
            scheduler.submit(job).unwrap();
            log
        })
        .collect();
    run(&mut scheduler);
    assert_eq!(cached(&logs[0]), 0);
    for log in &logs[1..] {
        assert!(cached(log) >= 96, "{}", cached(log));
        assert_eq!(log.lock().unwrap().tokens, logs[0].lock().unwrap().tokens);
    }
}

fn spilling(vault: &Vault, file: &Path, kv_contexts: usize, max_bytes: u64) -> Scheduler {
    let spill = Some(SpillConfig { path: file.to_owned(), max_bytes });
    let options = several(RingSize::Auto, 64, 2, kv_contexts);
    Scheduler::new(open(vault, &options), SchedulerOptions { spill, ..SchedulerOptions::default() }).unwrap()
}

/// A cache of one context of 256 positions, and a dozen conversations of 120: most are in the file only.
#[test]
fn conversations_longer_than_memory_come_back_from_the_file() {
    let (dir, vault, model) = tiny();
    let file = dir.path().join("conversations.kvcache");
    let prompts: Vec<Vec<u32>> = (0..12).map(|i| model.prompt(110, i)).collect();
    let expected: BTreeMap<usize, Vec<u32>> = {
        let mut scheduler = spilling(&vault, &file, 1, 64 << 20);
        let answers =
            prompts.iter().enumerate().map(|(i, prompt)| (i, one(&mut scheduler, prompt, 10).0)).collect();
        for (i, prompt) in prompts.iter().enumerate() {
            let (answer, cached) = one(&mut scheduler, prompt, 10);
            let answers: &BTreeMap<usize, Vec<u32>> = &answers;
            assert_eq!((&answer, cached), (&answers[&i], 109), "conversation {i}");
        }
        let spilled = scheduler.engine().spilled().unwrap();
        assert!(spilled.hits > 20 && spilled.corrupt == 0, "{spilled:?}");
        // What a crash leaves: the file as it is while the scheduler lives.
        std::fs::copy(&file, dir.path().join("crash.kvcache")).unwrap();
        answers
    };
    let mut found = 0;
    let mut scheduler = spilling(&vault, &dir.path().join("crash.kvcache"), 1, 64 << 20);
    for (i, prompt) in prompts.iter().enumerate() {
        let (answer, cached) = one(&mut scheduler, prompt, 10);
        assert_eq!(&answer, &expected[&i], "after a crash, conversation {i}");
        found += cached;
    }
    assert!(found > 10 * 109, "all but what was being written: {found}");
    let mut scheduler = spilling(&vault, &file, 1, 64 << 20);
    for (i, prompt) in prompts.iter().enumerate() {
        let (answer, cached) = one(&mut scheduler, prompt, 10);
        assert_eq!((&answer, cached), (&expected[&i], 109), "after a restart, conversation {i}");
    }
    drop(scheduler);
    // Damaged all over: what is still whole is used, and nobody hears a wrong word.
    let mut bytes = std::fs::read(&file).unwrap();
    for at in (8192..bytes.len()).step_by(50_021) {
        bytes[at] ^= 0x40;
    }
    std::fs::write(&file, &bytes).unwrap();
    let mut scheduler = spilling(&vault, &file, 1, 64 << 20);
    let mut reused = 0;
    for (i, prompt) in prompts.iter().enumerate() {
        let (answer, cached) = one(&mut scheduler, prompt, 10);
        assert_eq!(&answer, &expected[&i], "from a damaged file, conversation {i}");
        reused += cached;
    }
    assert!(reused < 12 * 109, "some were damaged");
    drop(scheduler);
    // Another model's: begun anew.
    let other = TinyModel::qwen3(4);
    let other_dir = tempfile::tempdir().unwrap();
    let other_vault = write_tiny(other_dir.path(), &other, "q4/64", "q8/64");
    let mut scheduler = spilling(&other_vault, &file, 1, 64 << 20);
    assert_eq!(one(&mut scheduler, &prompts[0], 10).1, 0);
}

#[test]
fn a_small_file_and_a_small_cache_make_it_slower_never_different() {
    let (dir, vault, model) = tiny();
    let mut alone = open(&vault, &options(RingSize::Auto, 16, 1));
    let prompts: Vec<Vec<u32>> = (0..5).map(|i| model.prompt(60 + 20 * i, i as u64)).collect();
    let expected: Vec<Vec<u32>> = prompts.iter().map(|prompt| greedy(&mut alone, prompt, 60)).collect();
    let bytes = 8 * (alone_block(&alone) + 4096) as u64;
    let mut scheduler = spilling(&vault, &dir.path().join("small.kvcache"), 1, bytes);
    for _ in 0..2 {
        let logs: Vec<Log> = prompts
            .iter()
            .map(|prompt| {
                let (job, log) = job(prompt, 60);
                scheduler.submit(job).unwrap();
                log
            })
            .collect();
        run(&mut scheduler);
        for (log, expected) in logs.iter().zip(&expected) {
            assert_eq!((finish(log), &log.lock().unwrap().tokens), (Ok(Finish::Length), expected));
        }
    }
}

/// Bytes of a block of this engine's cache.
fn alone_block(engine: &Engine) -> usize {
    let plan = engine.info().plan;
    plan.kv_bytes as usize / engine.kv_usage().blocks
}

#[test]
fn cancelled_jobs_end_and_leave_what_they_computed() {
    let (_dir, vault, model) = tiny();
    let mut scheduler = scheduler(&vault, &several(RingSize::Auto, 16, 2, 0));
    let prompt = model.prompt(100, 1);
    let (first, log) = job(&prompt, 50);
    let cancel = first.cancel.clone();
    scheduler.submit(first).unwrap();
    for _ in 0..4 {
        scheduler.step();
    }
    cancel.store(true, Ordering::Relaxed);
    run(&mut scheduler);
    assert_eq!(finish(&log), Ok(Finish::Stopped));
    let computed = log.lock().unwrap().prefills.last().unwrap().0;
    assert!((48..100).contains(&computed), "{computed}");
    let expected = greedy(&mut open(&vault, &options(RingSize::Auto, 16, 1)), &prompt, 5);
    assert_eq!(one(&mut scheduler, &prompt, 5), (expected, computed));
    // One that waits, and one whose sink will hear no more.
    let (waits, log) = job(&prompt, 5);
    let cancel = waits.cancel.clone();
    scheduler.submit(waits).unwrap();
    cancel.store(true, Ordering::Relaxed);
    let (mut deaf, _) = job(&prompt, 5);
    let heard = Arc::new(Mutex::new(0));
    let count = heard.clone();
    deaf.sink = Box::new(move |event: Event<'_>| {
        *count.lock().unwrap() += usize::from(matches!(event, Event::Token { .. }));
        ControlFlow::Break(())
    });
    scheduler.submit(deaf).unwrap();
    run(&mut scheduler);
    assert_eq!(finish(&log), Ok(Finish::Stopped));
    assert!(*heard.lock().unwrap() <= 1);
    assert_eq!(scheduler.load().kv_used, 0);
}

#[test]
fn what_cannot_be_done_is_refused_before_it_is_queued() {
    let (_dir, vault, model) = tiny();
    let engine = open(&vault, &several(RingSize::Auto, 16, 1, 0));
    let mut scheduler =
        Scheduler::new(engine, SchedulerOptions { max_queued: 2, ..SchedulerOptions::default() }).unwrap();
    let mut submit = |prompt: &[u32], sampling: Sampling| {
        let (mut job, _) = job(prompt, 4);
        job.sampling = sampling;
        scheduler.submit(job)
    };
    let good = Sampling::default();
    assert!(matches!(submit(&[], good.clone()), Err(EngineError::EmptyPrompt)));
    assert!(matches!(submit(&[u32::MAX], good.clone()), Err(EngineError::Token { .. })));
    assert!(matches!(submit(&[1; 257], good.clone()), Err(EngineError::ContextFull { .. })));
    let bad = Sampling { temperature: -1.0, ..Sampling::default() };
    assert!(matches!(submit(&[1], bad), Err(EngineError::Sampling { .. })));
    submit(&model.prompt(4, 1), good.clone()).unwrap();
    submit(&model.prompt(4, 2), good.clone()).unwrap();
    assert!(matches!(submit(&model.prompt(4, 3), good), Err(EngineError::QueueFull { queued: 2 })));
    run(&mut scheduler);
    // A prompt that fills the context has room for the tokens that follow its last one, one.
    let (job, log) = job(&model.prompt(256, 1), 10);
    scheduler.submit(job).unwrap();
    run(&mut scheduler);
    assert_eq!(finish(&log), Ok(Finish::ContextFull));
    assert_eq!(log.lock().unwrap().tokens.len(), 1);
}

/// Says only even tokens, and fails after a few.
struct Even {
    mask: Vec<u32>,
    left: usize,
}

impl Constraint for Even {
    fn mask(&mut self) -> Result<&[u32], String> {
        if self.left == 0 { Err("nothing fits".to_owned()) } else { Ok(&self.mask) }
    }

    fn accept(&mut self, token: u32) -> Result<(), String> {
        assert_eq!(token % 2, 0);
        self.left -= 1;
        Ok(())
    }
}

#[test]
fn a_constraint_is_kept_and_its_failure_is_the_jobs() {
    let (_dir, vault, model) = tiny();
    let mut scheduler = scheduler(&vault, &several(RingSize::Auto, 16, 2, 0));
    let prompt = model.prompt(12, 1);
    let (mut constrained, log) = job(&prompt, 20);
    constrained.constraint =
        Some(Box::new(Even { mask: vec![0x5555_5555; vault.spec.vocab_size.div_ceil(32)], left: 6 }));
    let (free, other) = job(&prompt, 20);
    scheduler.submit(constrained).unwrap();
    scheduler.submit(free).unwrap();
    run(&mut scheduler);
    assert!(finish(&log).unwrap_err().contains("nothing fits"));
    let tokens = log.lock().unwrap().tokens.clone();
    assert!(tokens.len() == 6 && tokens.iter().all(|token| token % 2 == 0), "{tokens:?}");
    assert_eq!(finish(&other), Ok(Finish::Length));
    let expected = greedy(&mut open(&vault, &options(RingSize::Auto, 16, 1)), &prompt, 20);
    assert_eq!(other.lock().unwrap().tokens, expected);
}

#[test]
fn a_failed_read_fails_those_who_need_it() {
    let (_dir, vault, model) = tiny();
    let prompts: Vec<Vec<u32>> = (0..4).map(|i| model.prompt(6, i)).collect();
    let mut alone = open(&vault, &options(RingSize::Auto, 16, 1));
    let expected: Vec<Vec<u32>> = prompts.iter().map(|prompt| greedy(&mut alone, prompt, 6)).collect();
    let mut failed = 0;
    for record in vault.experts.records.iter().step_by(3) {
        let disk = FaultyDisk::new(FileDisk::open(&vault.experts_path, OpenMode::Auto).unwrap());
        disk.on_offset(record.offset, Fault::Error(ErrorKind::Other));
        let ring = RingSize::Slots(vault.spec.moe.top_k * 2);
        let engine = Engine::open_on(&vault, disk.clone(), &several(ring, 8, 4, 0)).unwrap();
        let options = SchedulerOptions { at_once: Some(4), ..SchedulerOptions::default() };
        let mut scheduler = Scheduler::new(engine, options).unwrap();
        assert_eq!(scheduler.load().max_running, 4);
        let logs: Vec<Log> = prompts
            .iter()
            .map(|prompt| {
                let (job, log) = job(prompt, 6);
                scheduler.submit(job).unwrap();
                log
            })
            .collect();
        run(&mut scheduler);
        for (log, expected) in logs.iter().zip(&expected) {
            match finish(log) {
                Ok(finish) => assert_eq!((finish, &log.lock().unwrap().tokens), (Finish::Length, expected)),
                Err(error) => {
                    let names = format!("layer {} expert {}", record.key.layer, record.key.expert);
                    assert!(error.contains(&names), "{error}");
                    failed += 1;
                }
            }
        }
        disk.heal();
        assert_eq!(one(&mut scheduler, &prompts[0], 6).0, expected[0]);
    }
    assert!(failed > 0);
}

/// Repetition invites guesses; they never change what is said.
#[test]
fn guesses_change_nothing() {
    let (_dir, vault, model) = tiny();
    let period = model.prompt(5, 3);
    let prompt: Vec<u32> = period.iter().copied().cycle().take(60).collect();
    let run_with = |speculate| {
        let engine = open(&vault, &several(RingSize::Auto, 16, 1, 0));
        let options =
            SchedulerOptions { speculate, stall: Duration::from_secs(1), ..SchedulerOptions::default() };
        let mut scheduler = Scheduler::new(engine, options).unwrap();
        let mut answers = Vec::new();
        for seed in 0..4 {
            let (mut job, log) = job(&prompt, 80);
            job.sampling = Sampling { temperature: seed as f32 * 0.3, top_k: 4, seed, ..Sampling::default() };
            scheduler.submit(job).unwrap();
            run(&mut scheduler);
            assert_eq!(finish(&log), Ok(Finish::Length));
            answers.push(log.lock().unwrap().tokens.clone());
        }
        answers
    };
    assert_eq!(run_with(true), run_with(false));
}

/// A lone answer that guesses and runs into the end of the context, of every length of the prompt.
#[test]
fn guesses_at_the_end_of_the_context_change_nothing_and_end() {
    let (_dir, vault, model) = tiny();
    let period = model.prompt(4, 3);
    for (chunk, len) in [(16, 180), (16, 199), (2, 215), (1, 240), (3, 230)] {
        let prompt: Vec<u32> = period.iter().copied().cycle().take(len).collect();
        let answer = |speculate| {
            let engine = open(&vault, &several(RingSize::Auto, chunk, 1, 0));
            let options = SchedulerOptions { speculate, ..SchedulerOptions::default() };
            let mut scheduler = Scheduler::new(engine, options).unwrap();
            let (job, log) = job(&prompt, 1000);
            scheduler.submit(job).unwrap();
            // And one that waits: it must come to its turn.
            let (next, later) = self::job(&prompt[..20], 2);
            scheduler.submit(next).unwrap();
            run(&mut scheduler);
            assert_eq!((finish(&log), finish(&later)), (Ok(Finish::ContextFull), Ok(Finish::Length)));
            log.lock().unwrap().tokens.clone()
        };
        assert_eq!(answer(true), answer(false), "{len} tokens, chunk {chunk}");
    }
}

#[test]
fn no_token_is_a_length_too() {
    let (_dir, vault, model) = tiny();
    let mut scheduler = scheduler(&vault, &several(RingSize::Auto, 16, 1, 0));
    for (most, told) in [(0, 0), (1, 1)] {
        let (job, log) = job(&model.prompt(20, 1), most);
        scheduler.submit(job).unwrap();
        run(&mut scheduler);
        assert_eq!(finish(&log), Ok(Finish::Length));
        assert_eq!(log.lock().unwrap().tokens.len(), told);
    }
}

#[test]
fn a_cancelled_flag_that_is_set_during_a_long_prompt_is_seen_between_layers() {
    let (_dir, vault, model) = tiny();
    let mut scheduler = scheduler(&vault, &several(RingSize::Auto, 128, 1, 0));
    let (mut long, _) = job(&model.prompt(120, 1), 5);
    let cancel = Arc::<AtomicBool>::default();
    long.cancel = cancel.clone();
    let ended = Arc::new(Mutex::new(None));
    let end = ended.clone();
    long.sink = Box::new(move |event: Event<'_>| {
        match event {
            Event::Prefill { done, .. } if done > 0 => cancel.store(true, Ordering::Relaxed),
            Event::End(e) => *end.lock().unwrap() = Some(e),
            _ => {}
        }
        ControlFlow::Continue(())
    });
    scheduler.submit(long).unwrap();
    run(&mut scheduler);
    let ended = ended.lock().unwrap().take().unwrap();
    assert_eq!((ended.result.unwrap(), ended.usage.completion), (Finish::Stopped, 0));
}
