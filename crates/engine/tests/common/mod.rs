//! What the engine's tests share: vaults, engines of every setting, and a recording observer.
#![allow(dead_code, reason = "each test binary uses its own part")]
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]
#![allow(clippy::print_stderr, reason = "what is skipped, and what was compared, is said")]

#[cfg(feature = "gpu")]
pub mod device;

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

use smoe_engine::plan::{PlanRequest, RingSize};
use smoe_engine::{
    Control, Ended, Engine, EngineOptions, Event, Job, Limits, Observer, Sampler, Sampling, Synced, Vault,
};
use smoe_format::ModelSpec;
use smoe_sculpt::{BackboneBits, Progress, Recipe, Settings, sculpt};
use smoe_testkit::fixtures::fixture;
use smoe_testkit::{Golden, TinyModel, compare, compare_greedy};
use tempfile::TempDir;

struct Quiet;

impl Progress for Quiet {}

/// Sculpts a fixture; `None` (said aloud) where the fixtures are not at hand.
pub fn sculpted(family: &str, bits: u8, backbone: BackboneBits) -> Option<(TempDir, Vault)> {
    sculpted_by(Recipe::Searched, family, bits, backbone)
}

/// The same, by a rule that may be the original's.
pub fn sculpted_by(
    recipe: Recipe,
    family: &str,
    bits: u8,
    backbone: BackboneBits,
) -> Option<(TempDir, Vault)> {
    let checkpoint = fixture(family)?;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("vault");
    let settings = Settings { bits, backbone, recipe, ..Settings::default() };
    sculpt(&checkpoint, &path, &settings, &Quiet, &AtomicBool::new(false)).unwrap();
    let vault = Vault::open(&path).unwrap();
    Some((dir, vault))
}

/// Options for small vaults: memory is no question, sizes are.
pub fn options(ring: RingSize, chunk: usize, threads: usize) -> EngineOptions {
    EngineOptions {
        plan: PlanRequest {
            memory: Some(1 << 30),
            ring,
            context: Some(256),
            chunk: Some(chunk),
            threads: Some(threads),
            ..PlanRequest::default()
        },
        ..EngineOptions::default()
    }
}

pub fn open(vault: &Vault, options: &EngineOptions) -> Engine {
    Engine::open(vault, options).unwrap()
}

/// A session of a model with linear attention goes back, in steps of 16: to the last edge before the last token, and to
/// nothing else; `fresh` gives a prompt's logits, computed from nothing.
pub fn goes_back_to_snapshots(
    engine: &mut Engine,
    model: &TinyModel,
    fresh: &mut dyn FnMut(&[u32]) -> Vec<u32>,
) {
    let prompt = model.prompt(100, 1);
    let mut session = engine.open_session().unwrap();
    let control = &mut Control::default();
    engine.sync(&mut session, &prompt, control).unwrap();
    let expected = bits(session.logits());
    assert_eq!(expected, fresh(&prompt));
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
    assert_eq!(bits(session.logits()), fresh(&longer));
    // Before the first snapshot there is the beginning.
    let mut other = prompt.clone();
    other[30] = (other[30] + 1) % model.spec.vocab_size as u32;
    assert_eq!(engine.sync(&mut session, &other, control).unwrap().reused, 0);
    assert_eq!(bits(session.logits()), fresh(&other));
}

/// What a job's sink heard.
#[derive(Default)]
pub struct Heard {
    pub tokens: Vec<u32>,
    pub logprobs: Vec<(f32, Vec<(u32, f32)>)>,
    pub prefills: Vec<(usize, usize, usize)>,
    pub end: Option<Ended>,
}

/// A job that takes the likeliest tokens, and what its sink will have heard.
pub fn job(prompt: &[u32], n: usize) -> (Job, Arc<Mutex<Heard>>) {
    let log = Arc::<Mutex<Heard>>::default();
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

/// Records everything that a forward shows.
#[derive(Debug, Default, Clone, PartialEq)]
pub struct Recorded {
    pub logits: Vec<f32>,
    /// `[n_layers + 1, T, d_model]`.
    pub hidden: Vec<f32>,
    /// `[MoE layers, T, n_experts]`.
    pub router: Vec<f32>,
    tokens: usize,
    width: usize,
    experts: usize,
    vocab: usize,
}

impl Recorded {
    fn put(plane: &mut [f32], tokens: usize, width: usize, index: usize, first: usize, rows: &[f32]) {
        let start = (index * tokens + first) * width;
        plane[start..start + rows.len()].copy_from_slice(rows);
    }
}

impl Observer for Recorded {
    fn hidden(&mut self, index: usize, first: usize, rows: &[f32]) {
        Self::put(&mut self.hidden, self.tokens, self.width, index, first, rows);
    }

    fn router(&mut self, index: usize, first: usize, rows: &[f32]) {
        Self::put(&mut self.router, self.tokens, self.experts, index, first, rows);
    }

    fn logits(&mut self, first: usize, rows: &[f32]) {
        Self::put(&mut self.logits, self.tokens, self.vocab, 0, first, rows);
    }
}

/// Everything about a prompt, computed at once.
pub fn observe(engine: &mut Engine, tokens: &[u32]) -> Recorded {
    let spec = engine.spec().clone();
    let t = tokens.len();
    let mut recorded = Recorded {
        logits: vec![f32::NAN; t * spec.vocab_size],
        hidden: vec![f32::NAN; (spec.n_layers() + 1) * t * spec.d_model],
        router: vec![f32::NAN; spec.moe_layers().count() * t * spec.moe.n_experts],
        tokens: t,
        width: spec.d_model,
        experts: spec.moe.n_experts,
        vocab: spec.vocab_size,
    };
    engine.observe(tokens, &mut recorded).unwrap();
    recorded
}

/// Greedy tokens after a prompt, end tokens ignored.
pub fn greedy(engine: &mut Engine, prompt: &[u32], n: usize) -> Vec<u32> {
    let mut sampler = Sampler::new(Sampling::default(), engine.spec().vocab_size).unwrap();
    let mut session = engine.open_session().unwrap();
    engine.sync(&mut session, prompt, &mut Control::default()).unwrap();
    let mut tokens = Vec::new();
    let limits = Limits { max_tokens: n, end_tokens: Vec::new() };
    engine
        .generate(&mut session, &mut sampler, &limits, &mut Control::default(), &mut |token| {
            tokens.push(token);
            ControlFlow::Continue(())
        })
        .unwrap();
    tokens
}

/// Waits until all other threads wait for work. A thread allocates when it begins, which on a busy machine may be long
/// after it was made; one that waits has begun. Where the system does not tell, nothing is waited for.
pub fn all_threads_have_begun() {
    let waits = |stat: &str| {
        // The name of the program, in parentheses, may be anything.
        stat.rsplit_once(") ").is_none_or(|(_, state)| state.starts_with(['S', 'D']))
    };
    let Ok(me) = std::fs::read_link("/proc/thread-self") else { return };
    loop {
        let others = std::fs::read_dir("/proc/self/task").unwrap().map(|task| task.unwrap().path());
        let mut others = others.filter(|path| path.file_name() != me.file_name());
        // A thread that has ended meanwhile has no state.
        if others.all(|path| std::fs::read_to_string(path.join("stat")).map_or(true, |stat| waits(&stat))) {
            return;
        }
        std::thread::yield_now();
    }
}

/// The bits of floats: equality that knows no tolerance.
pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// `experts` is one encoding for gate, up and down, or three, as `bf16,q8/64,mxfp4/32`.
pub fn write_tiny(dir: &Path, model: &TinyModel, experts: &str, backbone: &str) -> Vault {
    let kinds: Vec<smoe_format::Encoding> = experts.split(',').map(smoe_testkit::vault::encoding).collect();
    let kind = |i: usize| kinds[i.min(kinds.len() - 1)];
    model.write_vault(dir, [kind(0), kind(1), kind(2)], backbone.parse().unwrap());
    Vault::open(dir).unwrap()
}

/// Asserts that an engine has the logits, hidden states, router logits and greedy tokens of a reference.
pub fn meets_golden(engine: &mut Engine, golden: &Golden, spec: &ModelSpec) {
    for (i, prompt) in golden.prompts.iter().enumerate() {
        let got = observe(engine, &prompt.tokens);
        let report = compare(golden, i, &got.logits, Some(&got.hidden), Some(&got.router), spec);
        eprintln!("{} {i}: {report}", spec.model_type);
        report.assert_passes();
        let tokens = greedy(engine, &prompt.tokens, prompt.greedy.len());
        compare_greedy(&tokens, &prompt.greedy).assert_passes();
    }
}
