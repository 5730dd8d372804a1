//! What needs a look inside: backends that fail, a ring that shrinks.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use smoe_format::Encoding;
use smoe_store::Lease;
use smoe_testkit::TinyModel;
use tempfile::TempDir;

use super::*;
use crate::backend::{Backend, Row};
use crate::kv::KvCache;
use crate::plan::{PlanRequest, RingSize};
use crate::{EngineOptions, Limits, Routes, Sampling, Vault};

/// A backend that computes no number for a token, and whose head fails, as told.
struct Faulty {
    inner: Option<Box<dyn Backend>>,
    /// The token that gives no number.
    bad: u32,
    /// After so many calls of the head all others fail; none if never.
    heads: Arc<AtomicU32>,
    tokens: Vec<u32>,
    hidden: Vec<f32>,
}

const NEVER: u32 = u32::MAX;

impl Faulty {
    fn inner(&mut self) -> &mut dyn Backend {
        self.inner.as_deref_mut().unwrap()
    }
}

impl Backend for Faulty {
    fn embed(&mut self, tokens: &[u32]) -> Result<(), EngineError> {
        self.tokens = tokens.to_vec();
        self.inner().embed(tokens)
    }

    fn attend(&mut self, layer: usize, rows: &[Row], kv: &mut KvCache) -> Result<(), EngineError> {
        self.inner().attend(layer, rows, kv)
    }

    fn dense(&mut self, layer: usize) -> Result<(), EngineError> {
        self.inner().dense(layer)
    }

    fn route(&mut self, layer: usize) -> Result<&[f32], EngineError> {
        self.inner().route(layer)
    }

    fn wants_order(&self, routes: &Routes) -> bool {
        self.inner.as_ref().unwrap().wants_order(routes)
    }

    fn begin(&mut self, layer: usize, routes: &Routes) -> Result<(), EngineError> {
        self.inner().begin(layer, routes)
    }

    fn experts(&mut self, layer: usize, ready: &mut Vec<Lease>, routes: &Routes) -> Result<(), EngineError> {
        self.inner().experts(layer, ready, routes)
    }

    fn reclaim(&mut self) -> Result<bool, EngineError> {
        self.inner().reclaim()
    }

    fn finish(&mut self, layer: usize, routes: &Routes) -> Result<(), EngineError> {
        self.inner().finish(layer, routes)
    }

    fn head(&mut self, tokens: &[usize]) -> Result<&[f32], EngineError> {
        match self.heads.load(Ordering::Relaxed) {
            NEVER => {}
            0 => return Err(EngineError::Unsupported { what: "this head".to_owned() }),
            n => self.heads.store(n - 1, Ordering::Relaxed),
        }
        self.inner().head(tokens)
    }

    fn hidden(&mut self) -> Result<&[f32], EngineError> {
        let Self { inner, bad, tokens, hidden, .. } = self;
        *hidden = inner.as_deref_mut().unwrap().hidden()?.to_vec();
        let width = hidden.len() / tokens.len();
        for (row, _) in hidden.chunks_mut(width).zip(tokens).filter(|(_, token)| *token == bad) {
            row[width / 2] = f32::NAN;
        }
        Ok(hidden)
    }

    fn final_hidden(&mut self, token: usize) -> Result<&[f32], EngineError> {
        self.inner().final_hidden(token)
    }
}

fn faulty(engine: &mut Engine, bad: u32) -> Arc<AtomicU32> {
    let heads = Arc::new(AtomicU32::new(NEVER));
    let around = Faulty { inner: None, bad, heads: heads.clone(), tokens: Vec::new(), hidden: Vec::new() };
    let slot = engine.backend_mut();
    let inner = std::mem::replace(slot, Box::new(around));
    *slot = Box::new(Faulty {
        inner: Some(inner),
        bad,
        heads: heads.clone(),
        tokens: Vec::new(),
        hidden: Vec::new(),
    });
    heads
}

fn tiny() -> (TempDir, Vault, TinyModel) {
    let model = TinyModel::qwen3(3);
    let dir = tempfile::tempdir().unwrap();
    let encoding = |text: &str| text.parse::<Encoding>().unwrap();
    model.write_vault(dir.path(), [encoding("q4/64"); 3], encoding("q8/64"));
    let vault = Vault::open(dir.path()).unwrap();
    (dir, vault, model)
}

fn engine(vault: &Vault, ring: RingSize, sessions: usize) -> Engine {
    let plan = PlanRequest {
        memory: Some(1 << 30),
        ring,
        context: Some(256),
        chunk: Some(32),
        threads: Some(1),
        sessions,
        ..PlanRequest::default()
    };
    Engine::open(vault, &EngineOptions { plan, ..EngineOptions::default() }).unwrap()
}

type Log = Arc<Mutex<(Vec<u32>, Option<Ended>)>>;

fn submit(scheduler: &mut Scheduler, prompt: &[u32], max_tokens: usize) -> Log {
    let log = Log::default();
    let heard = log.clone();
    let sink = move |event: Event<'_>| {
        match event {
            Event::Token { id, .. } => heard.lock().unwrap().0.push(id),
            Event::End(ended) => heard.lock().unwrap().1 = Some(ended),
            Event::Prefill { .. } => {}
        }
        ControlFlow::Continue(())
    };
    let job = Job {
        prompt: prompt.to_vec(),
        sampling: Sampling::default(),
        limits: Limits { max_tokens, end_tokens: Vec::new() },
        logprobs: None,
        constraint: None,
        cancel: Arc::default(),
        sink: Box::new(sink),
    };
    scheduler.submit(job).unwrap();
    log
}

/// Steps until nothing is left to do; that must not take for ever.
fn run(scheduler: &mut Scheduler) {
    let steps = (0..2000).take_while(|_| scheduler.step()).count();
    assert!(steps < 2000, "it does not end");
}

/// Tokens and end of a job.
fn ended(log: &Log) -> (Vec<u32>, Ended) {
    let mut log = log.lock().unwrap();
    (log.0.clone(), log.1.take().expect("it has ended"))
}

#[test]
fn a_head_that_fails_ends_the_jobs_of_its_step_or_changes_nothing() {
    let (_dir, vault, model) = tiny();
    let prompts: Vec<Vec<u32>> = (0..11).map(|i| model.prompt(3 + i as usize, i)).collect();
    let mut scheduler =
        Scheduler::new(engine(&vault, RingSize::Auto, 11), SchedulerOptions::default()).unwrap();
    let logs: Vec<Log> = prompts.iter().map(|prompt| submit(&mut scheduler, prompt, 12)).collect();
    run(&mut scheduler);
    let expected: Vec<Vec<u32>> = logs.iter().map(|log| ended(log).0).collect();
    for works in [0, 1, 2, 5, 9] {
        let mut engine = engine(&vault, RingSize::Auto, 11);
        let heads = faulty(&mut engine, NEVER);
        let mut scheduler = Scheduler::new(engine, SchedulerOptions::default()).unwrap();
        let logs: Vec<Log> = prompts.iter().map(|prompt| submit(&mut scheduler, prompt, 12)).collect();
        heads.store(works, Ordering::Relaxed);
        run(&mut scheduler);
        for (log, expected) in logs.iter().zip(&expected) {
            let (tokens, ended) = ended(log);
            assert!(matches!(ended.result, Err(EngineError::Unsupported { .. })), "{works}: {ended:?}");
            assert_eq!(tokens, expected[..tokens.len()], "{works}");
        }
        assert_eq!(scheduler.load().kv_used, 0);
        // For a while only: everybody gets everything, also those who had their token from the step that failed.
        let logs: Vec<Log> = prompts.iter().map(|prompt| submit(&mut scheduler, prompt, 12)).collect();
        heads.store(works, Ordering::Relaxed);
        while heads.load(Ordering::Relaxed) > 0 {
            scheduler.step();
        }
        scheduler.step();
        heads.store(NEVER, Ordering::Relaxed);
        run(&mut scheduler);
        let mut whole = 0;
        for (log, expected) in logs.iter().zip(&expected) {
            let (tokens, ended) = ended(log);
            whole += usize::from(ended.result.is_ok());
            assert_eq!(tokens, expected[..tokens.len()], "{works}");
            assert!(ended.result.is_err() || tokens.len() == 12);
        }
        assert!(whole >= 10, "{works}: {whole}");
    }
}

#[test]
fn what_is_no_number_is_the_jobs_end_and_nobody_finds_it() {
    let (_dir, vault, model) = tiny();
    let bad = 7;
    let clean =
        |n, which| model.prompt(n, which).iter().map(|&t| if t == bad { 8 } else { t }).collect::<Vec<u32>>();
    let mut prompt = clean(100, 1);
    prompt[70] = bad;
    let neighbour = clean(60, 2);
    let mut engine_alone = engine(&vault, RingSize::Auto, 1);
    let heads = faulty(&mut engine_alone, NEVER);
    let mut alone = Scheduler::new(engine_alone, SchedulerOptions::default()).unwrap();
    let expected = [&prompt, &neighbour].map(|prompt| {
        let log = submit(&mut alone, prompt, 9);
        run(&mut alone);
        ended(&log).0
    });
    assert_eq!(heads.load(Ordering::Relaxed), NEVER);
    let mut engine = engine(&vault, RingSize::Auto, 2);
    let _ = faulty(&mut engine, bad);
    let mut scheduler = Scheduler::new(engine, SchedulerOptions::default()).unwrap();
    let logs = [&prompt, &neighbour].map(|prompt| submit(&mut scheduler, prompt, 9));
    run(&mut scheduler);
    let (tokens, end) = ended(&logs[0]);
    assert!(tokens.is_empty());
    assert!(matches!(end.result, Err(EngineError::NotFinite { position: 70 })), "{end:?}");
    assert_eq!(ended(&logs[1]).0, expected[1]);
    // The backend is well again: it finds what came before.
    *scheduler.engine.backend_mut() = {
        let mut well = self::engine(&vault, RingSize::Auto, 2);
        let _ = faulty(&mut well, NEVER);
        std::mem::replace(
            well.backend_mut(),
            Box::new(Faulty {
                inner: None,
                bad: NEVER,
                heads: Arc::default(),
                tokens: Vec::new(),
                hidden: Vec::new(),
            }),
        )
    };
    let log = submit(&mut scheduler, &prompt, 9);
    run(&mut scheduler);
    let (tokens, end) = ended(&log);
    assert_eq!(tokens, expected[0]);
    assert!(end.usage.cached <= 64, "{} tokens", end.usage.cached);
    assert!(end.usage.cached >= 32, "{} tokens", end.usage.cached);
}

#[test]
fn jobs_at_once_follow_the_ring() {
    let (_dir, vault, model) = tiny();
    let all = vault.experts.records.len();
    let mut scheduler =
        Scheduler::new(engine(&vault, RingSize::Auto, 4), SchedulerOptions::default()).unwrap();
    assert_eq!(scheduler.load().max_running, 4);
    let logs: Vec<Log> = (0..3).map(|i| submit(&mut scheduler, &model.prompt(5, i), 8)).collect();
    scheduler.step();
    assert_eq!(scheduler.load().running, 3);
    // Memory is short: nobody more is let in, those inside stay.
    scheduler.engine.set_ring_limit(all / 2);
    assert_eq!(scheduler.load().max_running, 1);
    let late = submit(&mut scheduler, &model.prompt(5, 9), 3);
    scheduler.step();
    assert_eq!((scheduler.load().running, scheduler.load().queued), (3, 1));
    // And again.
    scheduler.engine.set_ring_limit(all);
    scheduler.step();
    assert_eq!((scheduler.load().running, scheduler.load().queued, scheduler.load().max_running), (4, 0, 4));
    run(&mut scheduler);
    assert!(logs.iter().chain([&late]).all(|log| ended(log).1.result.is_ok()));
}

#[test]
fn every_number_that_is_none_is_seen() {
    let mut logits = vec![-1.5e38_f32; 200];
    logits[3] = f32::MIN_POSITIVE / 4.0;
    assert!(is_finite(&logits) && is_finite(&[]));
    for at in [0, 63, 64, 199] {
        for none in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let before = std::mem::replace(&mut logits[at], none);
            assert!(!is_finite(&logits), "{none} at {at}");
            logits[at] = before;
        }
    }
}
