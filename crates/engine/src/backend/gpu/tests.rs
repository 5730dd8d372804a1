//! Halts, one by one.
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]
#![allow(clippy::print_stderr, reason = "what is skipped is said")]

use std::ops::{ControlFlow, Range};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use smoe_format::{Encoding, FfnKind};
use smoe_gpu::{Gpu, Software};
use smoe_meter::TierSnapshot;
use smoe_testkit::TinyModel;

use super::begun::BEGUN;
use super::flow::FORESEEN;
use crate::plan::{PlanRequest, RingSize};
use crate::{
    Control, DeviceChoice, Driver, Engine, EngineOptions, Event, ExpertPath, Job, Limits, Sampler, Sampling,
    Scheduler, SchedulerOptions, Session, Vault,
};

/// What a step of `tokens` behind `held` ones gives and counts, some layers having forgotten their experts.
fn step(
    engine: &mut Engine,
    session: &mut Session,
    held: usize,
    tokens: &[u32],
    forgotten: Range<usize>,
) -> (Vec<u32>, TierSnapshot) {
    engine.truncate(session, held);
    engine.preload(&mut |_, _| {}).unwrap();
    engine.backend_mut().forget_experts(forgotten);
    let meter = engine.device_tier().unwrap().meter;
    let before = meter.snapshot();
    session.queue(tokens, 1);
    let mut logits = Vec::new();
    let mut keep = |_: usize, _: usize, row: &[f32]| logits = row.iter().map(|l| l.to_bits()).collect();
    engine.step(std::slice::from_mut(session), &mut Control::default(), &mut keep).unwrap();
    (logits, meter.snapshot() - before)
}

/// An engine on a device, with room for every expert; none, said aloud, where there is no device.
fn engine(model: &TinyModel) -> Option<(tempfile::TempDir, Vault, Engine)> {
    engine_by(model, ExpertPath::Auto)
}

/// The same by a way on which the device has slots for a token's experts, unless it is [`ExpertPath::Auto`]; none, said aloud, where
/// there is no such way.
fn engine_by(model: &TinyModel, path: ExpertPath) -> Option<(tempfile::TempDir, Vault, Engine)> {
    let _gpu = match Gpu::shared(None, Software::Accept) {
        Ok(gpu) => gpu,
        Err(error) => {
            eprintln!("SKIPPED: {error}");
            return None;
        }
    };
    let dir = tempfile::tempdir().unwrap();
    let encoding = |text: &str| text.parse::<Encoding>().unwrap();
    model.write_vault(dir.path(), [encoding("q4/64"); 3], encoding("q8/64"));
    let vault = Vault::open(dir.path()).unwrap();
    let plan = PlanRequest {
        memory: Some(1 << 30),
        ring: RingSize::Slots(vault.experts.records.len()),
        context: Some(256),
        chunk: Some(32),
        threads: Some(1),
        sessions: 3,
        ..PlanRequest::default()
    };
    let device_slots = (path != ExpertPath::Auto).then_some(vault.spec.moe.top_k);
    let device = DeviceChoice::Gpu(None);
    let options = EngineOptions { plan, device, device_slots, device_path: path, ..EngineOptions::default() };
    let engine = Engine::open(&vault, &options).unwrap();
    let note = engine.device_tier().and_then(|tier| tier.path_note);
    if path != ExpertPath::Auto && note.is_some() {
        eprintln!("SKIPPED: {}", note.unwrap_or_default());
        return None;
    }
    Some((dir, vault, engine))
}

#[test]
fn a_step_that_was_recorded_ahead_is_the_one_that_comes() {
    let model = TinyModel::qwen3(33);
    let Some((_dir, _vault, mut engine)) = engine(&model) else { return };
    // Up to the end of the context, over ends of blocks and of attention's first split.
    let all = model.prompt(256, 1);
    for held in [118, 250] {
        let mut session = engine.open_session().unwrap();
        engine.sync(&mut session, &all[..held], &mut Control::default()).unwrap();
        let positions = held..all.len().min(held + 14);
        let mut one = |at: usize| step(&mut engine, &mut session, at, &all[at..=at], 0..0).0;
        let before = FORESEEN.get();
        let ahead: Vec<_> = positions.clone().map(&mut one).collect();
        assert_eq!(FORESEEN.get() - before, positions.len() - 1, "from {held}");
        // Backwards no step is like the one that was expected.
        for (at, ahead) in positions.clone().zip(ahead).rev() {
            assert!(one(at) == ahead, "position {at}");
        }
        assert_eq!(FORESEEN.get() - before, positions.len() - 1, "backwards from {held}");
        engine.close(session, false);
    }
}

#[test]
fn a_step_that_was_recorded_ahead_fits_whatever_comes_between() {
    let model = TinyModel::qwen2(34);
    let Some((_dir, vault, mut engine)) = engine(&model) else { return };
    let [a, b, c] = [1, 2, 3].map(|which| model.prompt(60, which));
    let mut sync = |tokens: &[u32]| {
        let mut session = engine.open_session().unwrap();
        engine.sync(&mut session, tokens, &mut Control::default()).unwrap();
        session
    };
    let (mut one, mut two, mut three) = (sync(&a[..50]), sync(&b[..51]), sync(&c[..20]));
    // Not like what was expected after the last prompt.
    let before = FORESEEN.get();
    let (expected, _) = step(&mut engine, &mut two, 51, &b[51..=51], 0..0);
    assert_eq!(FORESEEN.get(), before);
    // Every expert of every layer.
    let all = 0..vault.spec.n_layers();
    for between in 0..4 {
        // After it a step of a token that sees 52 positions is expected.
        step(&mut engine, &mut one, 50, &a[50..=50], 0..0);
        let taken = match between {
            // Another session's.
            0 => 1,
            // One that halts, and leaves what was recorded for when nothing is missing.
            1 => {
                let (got, counted) = step(&mut engine, &mut two, 51, &b[51..=51], all.clone());
                assert!(got == expected && counted.misses > 0, "{counted:?}");
                1
            }
            // Three tokens, of which the last one has logits.
            2 => {
                step(&mut engine, &mut three, 20, &c[20..23], 0..0);
                0
            }
            // One that is given up before it begins.
            _ => {
                engine.truncate(&mut two, 51);
                let stop = std::sync::atomic::AtomicBool::new(true);
                let mut control = Control::cancelled_by(&stop);
                assert!(engine.sync(&mut two, &b[..53], &mut control).is_err());
                1
            }
        };
        let before = FORESEEN.get();
        let (got, _) = step(&mut engine, &mut two, 51, &b[51..=51], 0..0);
        assert!(got == expected, "after {between}");
        assert_eq!(FORESEEN.get() - before, taken, "after {between}");
    }
}

#[test]
fn a_ring_that_is_to_shrink_is_given_back_unless_it_is_read_in_place() {
    let model = TinyModel::qwen3(40);
    let Some((_dir, vault, mut engine)) = engine(&model) else { return };
    if Gpu::shared(None, Software::Accept).unwrap().can_import().is_err() {
        eprintln!("SKIPPED: it imports nothing");
        return;
    }
    engine.preload(&mut |_, _| {}).unwrap();
    let tokens = model.prompt(20, 1);
    let expected = logits_after(&mut engine, &tokens);
    let (all, top_k) = (vault.experts.records.len(), vault.spec.moe.top_k);
    for (path, slots) in
        [(ExpertPath::Import, Some(top_k)), (ExpertPath::ZeroCopy, Some(top_k)), (ExpertPath::InPlace, None)]
    {
        let plan = PlanRequest {
            memory: Some(1 << 30),
            ring: RingSize::Slots(all),
            context: Some(256),
            chunk: Some(32),
            threads: Some(1),
            sessions: 2,
            ..PlanRequest::default()
        };
        let device = DeviceChoice::Gpu(None);
        let options = EngineOptions {
            plan,
            device,
            device_slots: slots,
            device_path: path,
            ..EngineOptions::default()
        };
        let mut engine = Engine::open(&vault, &options).unwrap();
        engine.preload(&mut |_, _| {}).unwrap();
        assert!(logits_after(&mut engine, &tokens) == expected, "{path}");
        // A step is recorded ahead, another begun.
        let mut session = engine.open_session().unwrap();
        engine.sync(&mut session, &tokens[..18], &mut Control::default()).unwrap();
        decode_likely(&mut engine, &mut session, tokens[18]);
        engine.set_ring_limit(all / 2);
        let stays = path == ExpertPath::InPlace;
        assert_eq!(engine.ring_limit(), if stays { all } else { all / 2 }, "{path}");
        let now = if stays { path } else { ExpertPath::Staging };
        assert_eq!(engine.device_tier().unwrap().plan.path, now);
        assert!(decode_likely(&mut engine, &mut session, tokens[19]) == expected, "{path}");
        assert!(logits_after(&mut engine, &tokens) == expected, "{path}");
    }
}

/// Bits of the logits after `tokens`, by a session that sees nothing else.
fn logits_after(engine: &mut Engine, tokens: &[u32]) -> Vec<u32> {
    let mut session = engine.open_session().unwrap();
    engine.sync(&mut session, tokens, &mut Control::default()).unwrap();
    let bits = session.logits().iter().map(|l| l.to_bits()).collect();
    engine.close(session, false);
    bits
}

/// Decodes a token, the largest logit being likely to name the next, and gives the logits' bits.
fn decode_likely(engine: &mut Engine, session: &mut Session, token: u32) -> Vec<u32> {
    session.queue(&[token], 1);
    session.expect_likeliest();
    let mut logits = Vec::new();
    let mut keep = |_: usize, _: usize, row: &[f32]| logits = row.iter().map(|l| l.to_bits()).collect();
    engine.step(std::slice::from_mut(session), &mut Control::default(), &mut keep).unwrap();
    logits
}

fn largest(bits: &[u32]) -> u32 {
    let logits: Vec<f32> = bits.iter().map(|bits| f32::from_bits(*bits)).collect();
    smoe_kernels::Kernels::detect().argmax(&logits)
}

#[test]
fn what_a_token_costs_is_told_apart() {
    let model = TinyModel::qwen3(39);
    let Some((_dir, _vault, mut engine)) = engine(&model) else { return };
    let expected = logits_after(&mut engine, &model.prompt(5, 1));
    let Some((_dir, _vault, mut engine)) = self::engine(&model) else { return };
    let costs = engine.device_costs().unwrap().unwrap();
    let kernels: u32 = costs.kernels.iter().map(|kernel| kernel.runs).sum();
    assert!(costs.dispatches == kernels && kernels > 20, "{costs:?}");
    assert!(costs.dispatch_s.is_finite() && costs.copy_bytes_per_s > 0.0, "{costs:?}");
    // Kernels that return at once leave nothing behind.
    assert!(logits_after(&mut engine, &model.prompt(5, 1)) == expected);
}

#[test]
fn greedy_tokens_are_begun_before_they_are_asked_for_and_are_the_same() {
    [ExpertPath::Auto, ExpertPath::ZeroCopy].into_iter().for_each(greedy_tokens_are_begun_by);
}

fn greedy_tokens_are_begun_by(path: ExpertPath) {
    let model = TinyModel::qwen3(36);
    let Some((_dir, vault, mut engine)) = engine_by(&model, path) else { return };
    engine.preload(&mut |_, _| {}).unwrap();
    let prompt = model.prompt(20, 1);
    let mut expected = prompt.clone();
    for _ in 0..60 {
        let next = largest(&logits_after(&mut engine, &expected));
        expected.push(next);
    }
    let mut sampler = Sampler::new(Sampling::default(), vault.spec.vocab_size).unwrap();
    let limits = Limits { max_tokens: 60, end_tokens: Vec::new() };
    let before = BEGUN.get();
    let mut session = engine.open_session().unwrap();
    engine.sync(&mut session, &prompt, &mut Control::default()).unwrap();
    let mut tokens = prompt;
    engine
        .generate(&mut session, &mut sampler, &limits, &mut Control::default(), &mut |token| {
            tokens.push(token);
            ControlFlow::Continue(())
        })
        .unwrap();
    assert_eq!(tokens, expected);
    let [taken, begun] = [0, 1].map(|i| BEGUN.get()[i] - before[i]);
    // 58 tokens follow one that was computed by itself and are not the last; two of them begin a block.
    assert_eq!((taken, begun), (56, 56), "{path}");
    let last: Vec<u32> = session.logits().iter().map(|l| l.to_bits()).collect();
    assert!(last == logits_after(&mut engine, &expected[..expected.len() - 1]));
}

#[test]
fn what_was_begun_in_vain_leaves_no_trace() {
    let model = TinyModel::qwen3(37);
    let Some((_dir, _vault, mut engine)) = engine(&model) else { return };
    engine.preload(&mut |_, _| {}).unwrap();
    let [a, b] = [1, 2].map(|which| model.prompt(40, which));
    let token = a[33];
    let chosen = largest(&logits_after(&mut engine, &[&a[..33], &[token]].concat()));
    let other = (chosen + 1) % model.spec.vocab_size as u32;
    // What follows `a`, and what follows another prompt of its length.
    let on = |first: &[u32], more: &[u32]| [first, more].concat();
    let cases = [
        ("another token", on(&a[..34], &[other])),
        ("another session", on(&b[..34], &[chosen])),
        ("taken back", on(&a[..33], &[chosen])),
        ("several tokens", on(&a[..34], &[chosen, other, chosen])),
        ("a place that is used again", on(&b[..34], &[chosen])),
        ("the token itself", on(&a[..34], &[chosen])),
    ];
    for (what, tokens) in cases {
        let expected = logits_after(&mut engine, &tokens);
        let mut first = engine.open_session().unwrap();
        let mut second = engine.open_session().unwrap();
        engine.sync(&mut second, &b[..34], &mut Control::default()).unwrap();
        engine.sync(&mut first, &a[..33], &mut Control::default()).unwrap();
        let before = BEGUN.get();
        let got = decode_likely(&mut engine, &mut first, token);
        assert_eq!(largest(&got), chosen);
        assert_eq!(BEGUN.get()[1] - before[1], 1, "{what}");
        let got = match what {
            "another token" => decode_likely(&mut engine, &mut first, other),
            "another session" => decode_likely(&mut engine, &mut second, chosen),
            "taken back" => {
                engine.truncate(&mut first, 33);
                decode_likely(&mut engine, &mut first, chosen)
            }
            "several tokens" => {
                engine.sync(&mut first, &tokens, &mut Control::default()).unwrap();
                first.logits().iter().map(|l| l.to_bits()).collect()
            }
            "a place that is used again" => {
                let seq = first.seq;
                engine.close(first, false);
                first = engine.open_session().unwrap();
                assert_eq!(first.seq, seq);
                engine.sync(&mut first, &b[..34], &mut Control::default()).unwrap();
                decode_likely(&mut engine, &mut first, chosen)
            }
            _ => decode_likely(&mut engine, &mut first, chosen),
        };
        assert!(got == expected, "{what}");
        let taken = BEGUN.get()[0] - before[0];
        assert_eq!(taken, usize::from(what == "the token itself"), "{what}");
        engine.close(first, false);
        engine.close(second, false);
    }
}

/// A greedy or a drawn job, and where its tokens go.
fn job(prompt: &[u32], tokens: usize, temperature: f32) -> (Job, Arc<Mutex<Vec<u32>>>) {
    let heard: Arc<Mutex<Vec<u32>>> = Arc::default();
    let told = heard.clone();
    let job = Job {
        prompt: prompt.to_vec(),
        sampling: Sampling { temperature, seed: 5, ..Sampling::default() },
        limits: Limits { max_tokens: tokens, end_tokens: Vec::new() },
        logprobs: None,
        constraint: None,
        cancel: Arc::default(),
        sink: Box::new(move |event: Event<'_>| {
            if let Event::Token { id, .. } = event {
                told.lock().unwrap().push(id);
            }
            ControlFlow::Continue(())
        }),
    };
    (job, heard)
}

/// Steps until `until` holds.
fn steps(scheduler: &mut Scheduler, until: impl Fn() -> bool) {
    for _ in 0..1000 {
        if until() {
            return;
        }
        scheduler.step();
    }
    panic!("a job that does not end");
}

#[test]
fn a_schedulers_greedy_job_goes_on_with_what_the_device_began_whoever_comes_and_goes() {
    let model = TinyModel::qwen3(38);
    let Some((_dir, _vault, mut engine)) = engine(&model) else { return };
    engine.preload(&mut |_, _| {}).unwrap();
    let prompts = [1, 2, 3].map(|which| model.prompt(20, which));
    let expected = prompts.clone().map(|mut all| {
        for _ in 0..40 {
            all.push(largest(&logits_after(&mut engine, &all)));
        }
        all.split_off(20)
    });
    let options = SchedulerOptions { speculate: false, ..SchedulerOptions::default() };
    let mut scheduler = Scheduler::new(engine, options).unwrap();
    let len = |heard: &Arc<Mutex<Vec<u32>>>| heard.lock().unwrap().len();

    let before = BEGUN.get();
    let (alone, heard) = job(&prompts[0], 40, 0.0);
    scheduler.submit(alone).unwrap();
    steps(&mut scheduler, || len(&heard) == 40);
    assert_eq!(*heard.lock().unwrap(), expected[0]);
    let [taken, begun] = [0, 1].map(|i| BEGUN.get()[i] - before[i]);
    // 38 tokens follow one that was computed by itself and are not the last; one of them begins a block.
    assert_eq!((taken, begun), (37, 37));

    // Others come while its next step is begun already, one greedy, one drawn; it ends before them. Then one is alone again.
    let before = BEGUN.get();
    let (first, a) = job(&prompts[1], 24, 0.0);
    let (second, b) = job(&prompts[2], 40, 0.0);
    let (third, c) = job(&prompts[0], 10, 0.8);
    let cancel = Arc::clone(&third.cancel);
    scheduler.submit(first).unwrap();
    steps(&mut scheduler, || len(&a) == 6);
    scheduler.submit(second).unwrap();
    steps(&mut scheduler, || len(&b) == 3);
    scheduler.submit(third).unwrap();
    steps(&mut scheduler, || len(&c) == 4);
    cancel.store(true, Ordering::Relaxed);
    steps(&mut scheduler, || len(&b) == 40);
    assert_eq!(*a.lock().unwrap(), expected[1][..24]);
    assert_eq!(*b.lock().unwrap(), expected[2]);
    let [taken, begun] = [0, 1].map(|i| BEGUN.get()[i] - before[i]);
    assert!(taken > 8 && begun > taken, "{taken} of {begun}: some were begun in vain");

    // What is drawn is not begun.
    let before = BEGUN.get();
    let (drawn, heard) = job(&prompts[0], 10, 0.8);
    scheduler.submit(drawn).unwrap();
    steps(&mut scheduler, || len(&heard) == 10);
    assert_eq!(BEGUN.get(), before);
    let c = c.lock().unwrap();
    assert_eq!(heard.lock().unwrap()[..c.len()], c[..]);
}

#[test]
fn a_halt_at_any_layer_changes_no_bit() {
    // Without a shared expert, with a gated one behind a dense layer, and with biases and windows.
    for model in [TinyModel::qwen3(31), TinyModel::qwen2(32), TinyModel::gpt_oss(33)] {
        let Some((_dir, vault, mut engine)) = engine(&model) else { return };
        let (name, layers) = (&model.spec.model_type, 0..vault.spec.n_layers());
        let is_moe = |layer: usize| vault.spec.layers[layer] == FfnKind::Moe;
        let mut session = engine.open_session().unwrap();
        let (prompt, next) = (model.prompt(20, 1), model.prompt(3, 2));
        engine.sync(&mut session, &prompt, &mut Control::default()).unwrap();
        for tokens in [&next[..1], &next[..]] {
            let (expected, counted) = step(&mut engine, &mut session, prompt.len(), tokens, 0..0);
            assert_eq!((counted.misses, counted.waits), (0, 1), "{name}: {counted:?}");
            // At first few layers are handed over at once; as fewer halt, all that there are.
            for round in 0..3 {
                for layer in layers.clone() {
                    let (got, counted) =
                        step(&mut engine, &mut session, prompt.len(), tokens, layer..layer + 1);
                    assert!(got == expected, "{name}: a halt at {layer}, round {round}");
                    assert_eq!(counted.misses > 0, is_moe(layer), "{name}, {layer}: {counted:?}");
                    assert_eq!(counted.waits > 1, is_moe(layer), "{name}, {layer}: {counted:?}");
                }
                for _ in 0..40 * round {
                    let (got, counted) = step(&mut engine, &mut session, prompt.len(), tokens, 0..0);
                    assert!(got == expected && counted.misses == 0, "{name}: {counted:?}");
                }
            }
            let (got, counted) = step(&mut engine, &mut session, prompt.len(), tokens, layers.clone());
            assert!(got == expected, "{name}: all layers halt");
            let moes = layers.clone().filter(|&layer| is_moe(layer)).count() as u64;
            assert!(counted.hits == 0 && counted.waits > moes, "{name}: {counted:?}");
        }
    }
}

#[test]
fn a_halt_among_what_is_read_over_the_bus_changes_no_bit() {
    for model in [TinyModel::qwen3(41), TinyModel::qwen2(42), TinyModel::gpt_oss(43)] {
        let Some((_dir, vault, mut engine)) = engine_by(&model, ExpertPath::ZeroCopy) else { return };
        let name = &model.spec.model_type;
        let mut session = engine.open_session().unwrap();
        let (prompt, next) = (model.prompt(20, 1), model.prompt(3, 2));
        // In the order of the file.
        engine.preload(&mut |_, _| {}).unwrap();
        engine.sync(&mut session, &prompt, &mut Control::default()).unwrap();
        for tokens in [&next[..1], &next[..]] {
            let (expected, counted) = step(&mut engine, &mut session, prompt.len(), tokens, 0..0);
            assert_eq!((counted.computed, counted.waits), (0, 1), "{name}: {counted:?}");
            for layer in 0..vault.spec.n_layers() {
                let (got, counted) = step(&mut engine, &mut session, prompt.len(), tokens, layer..layer + 1);
                assert!(got == expected, "{name}: a halt at {layer}");
                let halts = vault.spec.layers[layer] == FfnKind::Moe;
                assert_eq!(
                    (counted.computed > 0, counted.waits > 1),
                    (halts, halts),
                    "{name}, {layer}: {counted:?}"
                );
                // What the processor has computed lies behind the slots.
                let (got, counted) = step(&mut engine, &mut session, prompt.len(), tokens, 0..0);
                assert!(got == expected && counted.computed == 0, "{name}: {counted:?}");
            }
        }
    }
}
