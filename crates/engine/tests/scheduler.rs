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
    Constraint, Driver, Ended, Engine, EngineError, EngineOptions, Event, Finish, Job, KvType, Limits,
    Sampler, Sampling, Scheduler, SchedulerOptions, SpillConfig, Vault,
};
use smoe_store::{Fault, FaultyDisk, FileDisk, OpenMode};
use smoe_testkit::TinyModel;
use tempfile::TempDir;

fn tiny() -> (TempDir, Vault, TinyModel) {
    tiny_of(TinyModel::qwen3(3))
}

fn tiny_of(model: TinyModel) -> (TempDir, Vault, TinyModel) {
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
    gets_the_tokens_that_it_gets_alone(TinyModel::qwen3(3));
}

/// Tokens of one step see choices of their own.
#[test]
fn so_does_every_client_of_sparse_attention() {
    gets_the_tokens_that_it_gets_alone(TinyModel::glm_dsa(3));
}

/// Blocks that are seen no more are others' at once, also where the cache is short.
#[test]
fn so_does_every_client_of_windows() {
    gets_the_tokens_that_it_gets_alone(TinyModel::gpt_oss(3));
}

fn gets_the_tokens_that_it_gets_alone(model: TinyModel) {
    let (_dir, vault, model) = tiny_of(model);
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
    comes_back_from_the_file(TinyModel::qwen3(3));
}

/// With a block of each kind in a record.
#[test]
fn so_do_those_of_windows() {
    comes_back_from_the_file(TinyModel::gpt_oss(3));
}

fn comes_back_from_the_file(model: TinyModel) {
    let (dir, vault, model) = tiny_of(model);
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
    is_never_different(TinyModel::qwen3(3));
    is_never_different(TinyModel::gpt_oss(3));
}

fn is_never_different(model: TinyModel) {
    let (dir, vault, model) = tiny_of(model);
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
    // One for the place that is free, and two that wait.
    (1..4).for_each(|i| submit(&model.prompt(4, i), good.clone()).map(|_| ()).unwrap());
    assert!(matches!(submit(&model.prompt(4, 4), good), Err(EngineError::QueueFull { queued: 2 })));
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

/// How many steps until this is so.
fn steps_until(scheduler: &mut Scheduler, mut is_so: impl FnMut(&Scheduler) -> bool) -> usize {
    for steps in 0..10_000 {
        if is_so(scheduler) {
            return steps;
        }
        scheduler.step();
    }
    panic!("it never is");
}

fn told(log: &Log) -> usize {
    log.lock().unwrap().tokens.len()
}

#[test]
fn a_short_prompt_does_not_wait_for_a_long_one() {
    let (_dir, vault, model) = tiny();
    let mut options = several(RingSize::Auto, 16, 3, 0);
    options.plan.context = Some(1000);
    for (long, short, others) in [(900, 10, 1), (900, 40, 1), (900, 40, 2)] {
        let mut scheduler = scheduler(&vault, &options);
        let mut longs = Vec::new();
        for i in 0..others {
            let (job, log) = job(&model.prompt(long, i), 2);
            scheduler.submit(job).unwrap();
            longs.push(log);
        }
        scheduler.step();
        let prompt = model.prompt(short, 9);
        let (job, log) = job(&prompt, 3);
        scheduler.submit(job).unwrap();
        let steps = steps_until(&mut scheduler, |_| told(&log) > 0);
        // Parts of 16 tokens for n prompts: ceil(r / floor(16 / 2n)), in a step each as nobody is being answered.
        let bound = short.div_ceil(16 / (2 * (others as usize + 1)));
        assert!(steps <= bound, "{steps} steps for {short} tokens beside {others} prompts of {long}");
        run(&mut scheduler);
        let mut alone = open(&vault, &options);
        assert_eq!(log.lock().unwrap().tokens, greedy(&mut alone, &prompt, 3));
        for (i, log) in longs.iter().enumerate() {
            assert_eq!(log.lock().unwrap().tokens, greedy(&mut alone, &model.prompt(long, i as u64), 2));
        }
    }
}

#[test]
fn a_prompt_needs_room_for_what_is_new_in_it() {
    let (_dir, vault, model) = tiny();
    // Eight blocks in all.
    let mut scheduler = scheduler(&vault, &several(RingSize::Auto, 64, 3, 1));
    let prompt = model.prompt(100, 1);
    let mut longer = prompt.clone();
    longer.extend(model.prompt(5, 2));
    let (first, log) = job(&prompt, 20);
    scheduler.submit(first).unwrap();
    steps_until(&mut scheduler, |_| told(&log) > 0);
    // Five blocks and one to spare; three of them the first one holds.
    let (second, other) = job(&longer, 20);
    scheduler.submit(second).unwrap();
    scheduler.step();
    assert_eq!((scheduler.load().running, scheduler.load().queued), (2, 0));
    // What shares nothing has to wait.
    let (third, stranger) = job(&model.prompt(100, 3), 20);
    scheduler.submit(third).unwrap();
    scheduler.step();
    assert_eq!((scheduler.load().running, scheduler.load().queued), (2, 1));
    run(&mut scheduler);
    assert_eq!(cached(&other), 96);
    assert_eq!(scheduler.load().sent_back, 0);
    let mut alone = open(&vault, &options(RingSize::Auto, 16, 1));
    for (log, prompt) in [(&log, &prompt), (&other, &longer), (&stranger, &model.prompt(100, 3))] {
        assert_eq!(finish(log), Ok(Finish::Length));
        assert_eq!(log.lock().unwrap().tokens, greedy(&mut alone, prompt, 20));
    }
    // Equal ones that come together count once, too.
    let logs: Vec<Log> = (0..3)
        .map(|_| {
            let (job, log) = job(&model.prompt(120, 7), 8);
            scheduler.submit(job).unwrap();
            log
        })
        .collect();
    scheduler.step();
    assert_eq!(scheduler.load().running, 3);
    run(&mut scheduler);
    assert!(logs.iter().all(|log| finish(log) == Ok(Finish::Length)));
    assert_eq!(scheduler.load().sent_back, 0);
}

fn queueing(vault: &Vault, sessions: usize, max_queued: usize) -> Scheduler {
    let engine = open(vault, &several(RingSize::Auto, 16, sessions, 0));
    Scheduler::new(engine, SchedulerOptions { max_queued, ..SchedulerOptions::default() }).unwrap()
}

#[test]
fn jobs_that_come_together_are_taken_or_refused_together() {
    let (_dir, vault, model) = tiny();
    let mut scheduler = queueing(&vault, 2, 3);
    let jobs = |n: u64| -> (Vec<Job>, Vec<Log>) { (0..n).map(|i| job(&model.prompt(6, i), 4)).unzip() };
    let (many, refused) = jobs(6);
    assert!(matches!(scheduler.submit_all(many), Err(EngineError::QueueFull { queued: 0 })));
    assert_eq!(scheduler.load().queued, 0);
    assert!(refused.iter().all(|log| log.lock().unwrap().end.is_none()), "nobody heard of it");
    let (five, logs) = jobs(5);
    assert_eq!(scheduler.submit_all(five).unwrap().len(), 5);
    let (one, _) = jobs(1);
    assert!(matches!(scheduler.submit_all(one), Err(EngineError::QueueFull { queued: 3 })));
    scheduler.step();
    assert_eq!((scheduler.load().running, scheduler.load().queued), (2, 3));
    // One that cannot be done refuses the others.
    let (mut two, _) = jobs(2);
    two[1].prompt = vec![u32::MAX];
    assert!(matches!(scheduler.submit_all(two), Err(EngineError::Token { .. })));
    run(&mut scheduler);
    assert!(logs.iter().all(|log| finish(log) == Ok(Finish::Length)));
}

#[test]
fn without_a_queue_a_job_runs_at_once_or_not_at_all() {
    let (_dir, vault, model) = tiny();
    let mut scheduler = queueing(&vault, 2, 0);
    let mut logs = Vec::new();
    for i in 0..2 {
        let (job, log) = job(&model.prompt(6, i), 4);
        scheduler.submit(job).unwrap();
        logs.push(log);
    }
    let refused = |scheduler: &mut Scheduler| scheduler.submit(job(&model.prompt(6, 8), 4).0);
    assert!(matches!(refused(&mut scheduler), Err(EngineError::QueueFull { queued: 0 })));
    scheduler.step();
    assert_eq!((scheduler.load().running, scheduler.load().queued), (2, 0));
    assert!(matches!(refused(&mut scheduler), Err(EngineError::QueueFull { .. })));
    run(&mut scheduler);
    assert!(logs.iter().all(|log| finish(log) == Ok(Finish::Length)));
    refused(&mut scheduler).unwrap();
    run(&mut scheduler);
    // A place without room in the cache is none.
    let engine = open(&vault, &several(RingSize::Auto, 16, 2, 1));
    let mut scheduler =
        Scheduler::new(engine, SchedulerOptions { max_queued: 0, ..SchedulerOptions::default() }).unwrap();
    scheduler.submit(job(&model.prompt(200, 1), 30).0).unwrap();
    scheduler.step();
    let second = scheduler.submit(job(&model.prompt(200, 2), 30).0);
    assert!(matches!(second, Err(EngineError::QueueFull { .. })));
}

#[test]
fn a_file_that_cannot_be_used_is_a_warning() {
    let (dir, vault, model) = tiny();
    let expected = greedy(&mut open(&vault, &options(RingSize::Auto, 16, 1)), &model.prompt(80, 1), 5);
    let taken = dir.path().join("taken.kvcache");
    let _holds = spilling(&vault, &taken, 1, 64 << 20);
    let foreign = dir.path().join("letter.kvcache");
    std::fs::write(&foreign, "Dear file,").unwrap();
    for path in [taken.clone(), foreign.clone(), dir.path().to_owned(), dir.path().join("no/such/directory")]
    {
        let mut scheduler = spilling(&vault, &path, 1, 64 << 20);
        let warning = scheduler.take_warning().expect("it is told");
        assert!(matches!(warning, EngineError::Spill(_)), "{warning:?}");
        assert!(scheduler.take_warning().is_none(), "once");
        assert!(!scheduler.load().kv_has_file);
        assert_eq!(one(&mut scheduler, &model.prompt(80, 1), 5), (expected.clone(), 0));
        assert_eq!(one(&mut scheduler, &model.prompt(80, 1), 5), (expected.clone(), 79));
    }
    assert_eq!(std::fs::read(&foreign).unwrap(), b"Dear file,");
    assert!(spilling(&vault, &dir.path().join("new.kvcache"), 1, 64 << 20).load().kv_has_file);
}

/// A conversation of 28 blocks is in the file only; while it is read, somebody else is being answered.
#[test]
fn a_beginning_is_read_from_the_file_while_others_go_on() {
    let (dir, vault, model) = tiny();
    let file = dir.path().join("long.kvcache");
    let mut options = several(RingSize::Auto, 64, 2, 0);
    options.plan.context = Some(1000);
    let open_on = |file: &Path| {
        let spill = Some(SpillConfig { path: file.to_owned(), max_bytes: 64 << 20 });
        Scheduler::new(open(&vault, &options), SchedulerOptions { spill, ..SchedulerOptions::default() })
            .unwrap()
    };
    let long = model.prompt(900, 1);
    let (expected, _) = one(&mut open_on(&file), &long, 4);
    let mut scheduler = open_on(&file);
    let (answered, answer) = job(&model.prompt(5, 2), 200);
    scheduler.submit(answered).unwrap();
    steps_until(&mut scheduler, |_| told(&answer) > 2);
    let (loaded, log) = job(&long, 4);
    scheduler.submit(loaded).unwrap();
    let mut steps = 0;
    while log.lock().unwrap().prefills.is_empty() {
        let (before, hits) = (told(&answer), scheduler.engine().spilled().unwrap().hits);
        scheduler.step();
        let read = scheduler.engine().spilled().unwrap().hits - hits;
        assert!(read <= 9, "{read} blocks in a step");
        assert!(told(&answer) > before, "who is being answered gets a token in every step");
        steps += 1;
    }
    assert!((4..=5).contains(&steps), "28 blocks in {steps} steps");
    run(&mut scheduler);
    assert_eq!(cached(&log), 899);
    assert_eq!(log.lock().unwrap().tokens, expected);
    // One that is cancelled meanwhile holds nothing.
    let mut scheduler = open_on(&dir.path().join("other.kvcache"));
    drop(scheduler);
    std::fs::copy(&file, dir.path().join("other.kvcache")).unwrap();
    scheduler = open_on(&dir.path().join("other.kvcache"));
    let (answered, answer) = job(&model.prompt(5, 2), 60);
    scheduler.submit(answered).unwrap();
    steps_until(&mut scheduler, |_| told(&answer) > 2);
    let (loaded, log) = job(&long, 4);
    let cancel = loaded.cancel.clone();
    scheduler.submit(loaded).unwrap();
    scheduler.step();
    scheduler.step();
    cancel.store(true, Ordering::Relaxed);
    run(&mut scheduler);
    assert_eq!(finish(&log), Ok(Finish::Stopped));
    assert_eq!(finish(&answer), Ok(Finish::Length));
    assert_eq!(scheduler.load().kv_used, 0);
    assert_eq!(one(&mut scheduler, &long, 4), (expected, 899));
}

#[test]
fn what_an_early_end_took_is_told() {
    let (_dir, vault, model) = tiny();
    let mut scheduler = scheduler(&vault, &several(RingSize::Auto, 16, 1, 0));
    let shared = model.prompt(64, 1);
    one(&mut scheduler, &shared, 1);
    let mut prompt = shared.clone();
    prompt.extend(model.prompt(60, 2));
    let (running, first) = job(&prompt, 50);
    let (waiting, second) = job(&prompt, 50);
    let cancels = [running.cancel.clone(), waiting.cancel.clone()];
    scheduler.submit(running).unwrap();
    scheduler.submit(waiting).unwrap();
    scheduler.step();
    scheduler.step();
    cancels.iter().for_each(|cancel| cancel.store(true, Ordering::Relaxed));
    run(&mut scheduler);
    let usage = |log: &Log| log.lock().unwrap().end.as_ref().unwrap().usage;
    let (of_first, of_second) = (usage(&first), usage(&second));
    assert_eq!((of_first.prompt, of_first.cached, of_first.completion), (124, 64, 0));
    assert!(of_first.prefill > Duration::ZERO && of_first.decode == Duration::ZERO);
    assert_eq!((of_second.prompt, of_second.cached, of_second.completion), (124, 0, 0));
    assert!(of_second.queued >= of_first.prefill && of_second.prefill == Duration::ZERO);
    // In the middle of an answer.
    let (job, log) = job(&prompt, 50);
    let cancel = job.cancel.clone();
    scheduler.submit(job).unwrap();
    steps_until(&mut scheduler, |_| told(&log) == 7);
    cancel.store(true, Ordering::Relaxed);
    run(&mut scheduler);
    let usage = usage(&log);
    assert!(
        usage.prompt == 124 && usage.cached >= 64 && usage.completion == 7 && usage.decode > Duration::ZERO
    );
}

/// An answer that repeats itself: guesses are right, and counted.
#[test]
fn guesses_that_are_right_save_steps() {
    let (_dir, vault, model) = tiny();
    let prompt: Vec<u32> = model.prompt(5, 3).into_iter().cycle().take(60).collect();
    let run_with = |speculate| {
        let engine = open(&vault, &several(RingSize::Auto, 16, 1, 0));
        let options = SchedulerOptions { speculate, ..SchedulerOptions::default() };
        let mut scheduler = Scheduler::new(engine, options).unwrap();
        let (mut job, log) = job(&prompt, 120);
        // Only two tokens may be said: they soon repeat.
        job.constraint = Some(Box::new(Few(vec![0b11])));
        scheduler.submit(job).unwrap();
        let steps = steps_until(&mut scheduler, |_| told(&log) == 120);
        run(&mut scheduler);
        assert_eq!(finish(&log), Ok(Finish::Length));
        let tokens = log.lock().unwrap().tokens.clone();
        (tokens, steps, scheduler.load())
    };
    let (plain, plain_steps, load) = run_with(false);
    assert_eq!((load.guessed, load.accepted), (0, 0));
    let (tokens, steps, load) = run_with(true);
    assert_eq!(tokens, plain);
    assert!(load.accepted > 0 && load.accepted <= load.guessed, "{load:?}");
    assert_eq!(steps + load.accepted as usize, plain_steps, "each that was right saved a step");
}

/// Allows what its mask says.
struct Few(Vec<u32>);

impl Constraint for Few {
    fn mask(&mut self) -> Result<&[u32], String> {
        Ok(&self.0)
    }

    fn accept(&mut self, _token: u32) -> Result<(), String> {
        Ok(())
    }
}

#[test]
fn who_is_sent_back_goes_on_with_the_same_tokens() {
    let (_dir, vault, model) = tiny();
    let sampled = |seed: u64| {
        let (mut job, log) = job(&model.prompt(70, seed), 500);
        job.sampling = Sampling {
            temperature: 0.9,
            top_p: 0.9,
            repetition_penalty: 1.1,
            frequency_penalty: 0.2,
            seed,
            ..Sampling::default()
        };
        (job, log)
    };
    // Room for 31 blocks, of which both jobs come to need 18, and seem to need 11 when they are let in.
    let mut options = several(RingSize::Auto, 16, 2, 1);
    options.plan.context = Some(992);
    let mut together = scheduler(&vault, &options);
    let logs: Vec<Log> = (0..2)
        .map(|seed| {
            let (job, log) = sampled(seed);
            together.submit(job).unwrap();
            log
        })
        .collect();
    run(&mut together);
    assert!(together.load().sent_back > 0);
    let mut alone = scheduler(&vault, &options);
    for (seed, log) in (0..).zip(&logs) {
        assert_eq!(finish(log), Ok(Finish::Length));
        let (job, expected) = sampled(seed);
        alone.submit(job).unwrap();
        run(&mut alone);
        assert_eq!(log.lock().unwrap().tokens, expected.lock().unwrap().tokens);
    }
    assert_eq!(alone.load().sent_back, 0);
}

#[test]
fn a_prompt_comes_in_parts_between_the_tokens_of_an_answer() {
    let (_dir, vault, model) = tiny();
    let mut options = several(RingSize::Auto, 512, 2, 0);
    options.plan.context = Some(1000);
    let engine = open(&vault, &options);
    // What steps take is nothing to this: a part is limited by the one before it.
    let stall = Duration::from_secs(3600);
    let mut scheduler =
        Scheduler::new(engine, SchedulerOptions { stall, ..SchedulerOptions::default() }).unwrap();
    let (answered, answer) = job(&model.prompt(5, 2), 900);
    scheduler.submit(answered).unwrap();
    steps_until(&mut scheduler, |_| told(&answer) > 2);
    let prompt = model.prompt(700, 1);
    let (prefilled, log) = job(&prompt, 3);
    scheduler.submit(prefilled).unwrap();
    // The first ones are few.
    let (mut done, mut most, mut parts) = (0, 128, 0);
    while told(&log) == 0 {
        let before = told(&answer);
        scheduler.step();
        assert_eq!(told(&answer), before + 1, "one token a step");
        let now = log.lock().unwrap().prefills.last().map_or(0, |prefill| prefill.0);
        let part = now - done;
        if part > 0 {
            assert!(part <= most.min(511), "a part of {part} after one of {}", most / 2);
            (done, most, parts) = (now, 2 * part.max(64), parts + 1);
        }
        assert!(told(&answer) < 800);
    }
    assert!(parts >= 3, "{parts}");
    run(&mut scheduler);
    assert_eq!(log.lock().unwrap().tokens, greedy(&mut open(&vault, &options), &prompt, 3));
    assert_eq!(answer.lock().unwrap().tokens, greedy(&mut open(&vault, &options), &model.prompt(5, 2), 900));
}

#[test]
fn beginnings_are_shared_however_numbers_are_kept() {
    beginnings_are_shared(TinyModel::qwen3(3));
}

/// With the keys of their indexers, in memory and in the file.
#[test]
fn beginnings_of_sparse_attention_are_shared_too() {
    beginnings_are_shared(TinyModel::glm_dsa(3));
}

fn beginnings_are_shared(model: TinyModel) {
    let (dir, vault, model) = tiny_of(model);
    for kv in [KvType::F32, KvType::F16, KvType::Q8] {
        let file = dir.path().join(format!("{kv:?}.kvcache"));
        let mut options = several(RingSize::Auto, 16, 2, 0);
        options.plan.kv = Some(kv);
        let open_on = || {
            let spill = Some(SpillConfig { path: file.clone(), max_bytes: 64 << 20 });
            Scheduler::new(open(&vault, &options), SchedulerOptions { spill, ..SchedulerOptions::default() })
                .unwrap()
        };
        let mut scheduler = open_on();
        let mut conversation = model.prompt(75, 1);
        for turn in 0..3 {
            let expected = greedy(&mut open(&vault, &options), &conversation, 20);
            let (mut answer, cached) = one(&mut scheduler, &conversation, 20);
            assert_eq!(answer, expected, "{kv:?}, turn {turn}");
            assert_eq!(cached > 0, turn > 0);
            conversation.append(&mut answer);
            conversation.extend(model.prompt(9, 50 + turn));
        }
        // In the middle of a block; and from the file.
        let mut other = conversation[..50].to_vec();
        other.extend(model.prompt(8, 99));
        let expected = greedy(&mut open(&vault, &options), &other, 12);
        assert_eq!(one(&mut scheduler, &other, 12), (expected.clone(), 50), "{kv:?}");
        drop(scheduler);
        let (answer, cached) = one(&mut open_on(), &other, 12);
        assert_eq!(answer, expected, "{kv:?}, from the file");
        assert!(cached >= 57, "{cached}");
    }
}

struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % n
    }
}

/// Conversations that share beginnings come, go on, and are given up at any moment, with little room and much, with a
/// file and without. Whoever is not given up gets what it gets alone, who is gets a beginning of it, and at the end
/// nothing is held.
#[test]
fn whoever_leaves_the_others_get_what_they_get_alone() {
    let (dir, vault, model) = tiny();
    let top_k = vault.spec.moe.top_k;
    for seed in 1..7_u64 {
        let mut random = Random(seed * 0x9e37_79b9);
        let ring = if seed % 2 == 0 { RingSize::Slots(2 * top_k) } else { RingSize::Auto };
        let mut options = several(ring, [7, 16, 64][seed as usize % 3], 4, 1 + seed as usize % 2);
        options.plan.context = Some(600);
        let spill = (seed > 3).then(|| SpillConfig {
            path: dir.path().join(format!("{seed}.kvcache")),
            max_bytes: if seed == 4 { 300_000 } else { 64 << 20 },
        });
        let settings =
            SchedulerOptions { at_once: Some(4), max_queued: 1000, spill, ..SchedulerOptions::default() };
        let mut scheduler = Scheduler::new(open(&vault, &options), settings).unwrap();
        let prompts: Vec<Vec<u32>> = (0..14)
            .map(|i| {
                let mut prompt = model.prompt(20 + 15 * random.below(12), i % 3);
                prompt.extend(model.prompt(1 + random.below(40), 100 + i));
                prompt
            })
            .collect();
        let lengths: Vec<usize> = prompts.iter().map(|_| random.below(300)).collect();
        let mut jobs: Vec<(Log, Arc<AtomicBool>, bool)> = Vec::new();
        while jobs.len() < prompts.len() || scheduler.load().running + scheduler.load().queued > 0 {
            if jobs.len() < prompts.len() && random.below(8) == 0 {
                let (mut job, log) = job(&prompts[jobs.len()], lengths[jobs.len()]);
                job.sampling = Sampling { temperature: 0.8, seed: jobs.len() as u64, ..Sampling::default() };
                jobs.push((log, job.cancel.clone(), false));
                scheduler.submit(job).unwrap();
            }
            if !jobs.is_empty() && random.below(60) == 0 {
                let i = random.below(jobs.len());
                jobs[i].1.store(true, Ordering::Relaxed);
                jobs[i].2 = true;
            }
            scheduler.step();
            let load = scheduler.load();
            assert!(load.kv_used + load.kv_cached <= load.kv_blocks);
            assert!(load.running > 0 || load.kv_used == 0, "nobody holds {} blocks", load.kv_used);
        }
        run(&mut scheduler);
        assert_eq!(scheduler.load().kv_used, 0);
        let mut alone = self::scheduler(&vault, &options);
        let mut given_up = 0;
        for (i, (log, _, may_be_short)) in jobs.iter().enumerate() {
            let (mut job, expected) = job(&prompts[i], lengths[i]);
            job.sampling = Sampling { temperature: 0.8, seed: i as u64, ..Sampling::default() };
            alone.submit(job).unwrap();
            run(&mut alone);
            let (finish, expected) = (finish(log), expected.lock().unwrap());
            let tokens = &log.lock().unwrap().tokens;
            if finish == Ok(Finish::Stopped) && *may_be_short {
                given_up += 1;
                assert_eq!(*tokens, expected.tokens[..tokens.len()], "seed {seed}, job {i}");
            } else {
                assert_eq!(
                    (&finish, tokens),
                    (&Ok(Finish::Length), &expected.tokens),
                    "seed {seed}, job {i}"
                );
            }
        }
        assert!((1..14).contains(&given_up), "{given_up} of 14 were given up");
    }
}
