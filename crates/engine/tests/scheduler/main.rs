//! Many jobs at once: the same tokens as alone, whatever the ring, the order and the room; what was computed is found
//! again; failures and cancellations concern those whose they are.
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

mod admission;
#[path = "../common/mod.rs"]
mod common;
mod ends;
mod guesses;
mod identity;
mod sharing;

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
