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

use common::{Heard, greedy, job, open, options, write_tiny};
use smoe_engine::plan::{PlanRequest, RingSize};
use smoe_engine::{
    Constraint, Driver, Engine, EngineError, EngineOptions, Event, Finish, Job, KvType, Sampler, Sampling,
    Scheduler, SchedulerOptions, SpillConfig, Vault,
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

type Log = Arc<Mutex<Heard>>;

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
