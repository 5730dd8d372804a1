//! What is left when a device fails: the same answers, from the processor. A binary of its own, as tests share a device.
#![cfg(feature = "gpu")]
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]
#![allow(clippy::print_stderr, reason = "what is skipped is said")]

mod common;

use std::sync::{Arc, Mutex, PoisonError};

use common::device::{by, imports, run};
use common::{bits, open, options, write_tiny};
use smoe_engine::plan::RingSize;
use smoe_engine::{Control, DeviceChoice, Engine, EngineError, EngineOptions, ExpertPath, Session, Vault};
use smoe_gpu::{Fault, Gpu, KV_BLOCK, Software};
use smoe_testkit::TinyModel;

/// They lose a device that they share.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// The device that engines will open; none, said aloud, where there is none.
fn device() -> Option<Arc<Gpu>> {
    let found = Gpu::shared(None, Software::Accept);
    found.inspect_err(|error| eprintln!("SKIPPED: {error}")).ok()
}

fn decode(engine: &mut Engine, session: &mut Session, token: u32) -> Vec<u32> {
    engine.decode(session, token, &mut Control::default()).unwrap();
    bits(session.logits())
}

#[test]
fn a_lost_device_changes_who_computes_and_nothing_else() {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(gpu) = device() else { return };
    let model = TinyModel::qwen3(51);
    let dir = tempfile::tempdir().unwrap();
    let vault = write_tiny(dir.path(), &model, "q4/64", "q8/64");
    let mut cpu = options(RingSize::Auto, 16, 1);
    cpu.plan.sessions = 3;
    let on_device = EngineOptions { device: DeviceChoice::Gpu(None), ..cpu.clone() };
    let (prompt, other) = (model.prompt(40, 1), model.prompt(21, 2));
    let further = model.prompt(5, 3);

    let mut reference = open(&vault, &cpu);
    let mut expected = Vec::new();
    for prompt in [&prompt, &other] {
        let mut session = reference.open_session().unwrap();
        reference.sync(&mut session, prompt, &mut Control::default()).unwrap();
        expected.push(
            further.iter().map(|&token| decode(&mut reference, &mut session, token)).collect::<Vec<_>>(),
        );
    }

    let mut engine = open(&vault, &on_device);
    assert!(engine.info().tier.is_some());
    let mut sessions = [&prompt, &other].map(|prompt| {
        let mut session = engine.open_session().unwrap();
        engine.adopt(&mut session, prompt);
        engine.sync(&mut session, prompt, &mut Control::default()).unwrap();
        session
    });
    for session in &mut sessions {
        further[..2].iter().for_each(|&token| drop(decode(&mut engine, session, token)));
    }
    assert!(engine.take_warning().is_none());
    gpu.lose("pulled out");
    // Taken back while it is lost, and asked again.
    engine.truncate(&mut sessions[1], other.len() + 1);
    assert_eq!(decode(&mut engine, &mut sessions[0], further[2]), expected[0][2]);
    for (i, &token) in further.iter().enumerate().skip(1) {
        assert_eq!(decode(&mut engine, &mut sessions[1], token), expected[1][i], "{i}");
    }
    for (i, &token) in further.iter().enumerate().skip(3) {
        assert_eq!(decode(&mut engine, &mut sessions[0], token), expected[0][i], "{i}");
    }
    let warning = engine.take_warning().unwrap();
    assert!(matches!(warning, EngineError::DeviceLost { .. }), "{warning}");
    assert!(warning.to_string().contains("pulled out"), "{warning}");
    assert!(engine.take_warning().is_none() && engine.info().tier.is_none());
    // What was computed before is found again, from the processor.
    let [first, second] = sessions;
    engine.close(first, true);
    engine.close(second, true);
    let mut again = engine.open_session().unwrap();
    assert!(engine.adopt(&mut again, &prompt) >= 32);
    engine.sync(&mut again, &prompt, &mut Control::default()).unwrap();
    assert_eq!(decode(&mut engine, &mut again, further[0]), expected[0][0]);
}

/// States and snapshots are lost too: what they held is computed again from the beginning, and snapshots are taken anew.
#[test]
fn states_of_a_lost_device_are_computed_again() {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(gpu) = device() else { return };
    let model = TinyModel::qwen3_next(55);
    let dir = tempfile::tempdir().unwrap();
    let vault = write_tiny(dir.path(), &model, "bf16", "bf16");
    let mut cpu = options(RingSize::Auto, 16, 1);
    cpu.plan.sessions = 2;
    let (prompt, further) = (model.prompt(70, 1), model.prompt(6, 3));
    let mut reference = open(&vault, &cpu);
    let mut session = reference.open_session().unwrap();
    reference.sync(&mut session, &prompt, &mut Control::default()).unwrap();
    let expected: Vec<_> = further.iter().map(|&token| decode(&mut reference, &mut session, token)).collect();

    let mut engine = open(&vault, &EngineOptions { device: DeviceChoice::Gpu(None), ..cpu });
    assert!(engine.info().tier.is_some());
    let mut session = engine.open_session().unwrap();
    engine.adopt(&mut session, &prompt);
    engine.sync(&mut session, &prompt, &mut Control::default()).unwrap();
    further[..3].iter().for_each(|&token| drop(decode(&mut engine, &mut session, token)));
    gpu.lose("pulled out");
    for (i, &token) in further.iter().enumerate().skip(3) {
        assert_eq!(decode(&mut engine, &mut session, token), expected[i], "{i}");
    }
    assert!(matches!(engine.take_warning(), Some(EngineError::DeviceLost { .. })));
    assert!(engine.info().tier.is_none());
    // To a snapshot that the processor has taken since, and from it again.
    engine.sync(&mut session, &prompt, &mut Control::default()).unwrap();
    assert_eq!(decode(&mut engine, &mut session, further[0]), expected[0]);
    engine.close(session, true);
    let mut again = engine.open_session().unwrap();
    assert_eq!(engine.adopt(&mut again, &prompt), 64);
    engine.sync(&mut again, &prompt, &mut Control::default()).unwrap();
    assert_eq!(decode(&mut engine, &mut again, further[0]), expected[0]);
}

/// What a conversation held is computed again in as little room as windows have.
#[test]
fn a_conversation_many_windows_long_goes_on_without_its_device() {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(gpu) = device() else { return };
    let model = TinyModel::gpt_oss(54);
    let dir = tempfile::tempdir().unwrap();
    let vault = write_tiny(dir.path(), &model, "bf16", "bf16");
    let mut cpu = options(RingSize::Auto, 64, 1);
    cpu.plan.context = Some(1024);
    let (prompt, token) = (model.prompt(450, 1), 7);
    let mut reference = open(&vault, &cpu);
    let mut session = reference.open_session().unwrap();
    reference.sync(&mut session, &prompt, &mut Control::default()).unwrap();
    let answer: Vec<u32> = model.prompt(100, 2);
    answer.iter().for_each(|&token| drop(decode(&mut reference, &mut session, token)));
    let expected = decode(&mut reference, &mut session, token);

    let mut engine = open(&vault, &EngineOptions { device: DeviceChoice::Gpu(None), ..cpu });
    assert!(engine.plan().window_blocks * KV_BLOCK < prompt.len(), "windows have room for all");
    let mut session = engine.open_session().unwrap();
    engine.adopt(&mut session, &prompt);
    engine.sync(&mut session, &prompt, &mut Control::default()).unwrap();
    answer.iter().for_each(|&token| drop(decode(&mut engine, &mut session, token)));
    gpu.lose("pulled out");
    assert_eq!(decode(&mut engine, &mut session, token), expected);
    assert!(engine.info().tier.is_none());
    engine.close(session, true);
    // Found again: its end, and where its answer began, for another one.
    let other = model.prompt(40, 3);
    for (said, known) in
        [([&prompt[..], &answer, &[token, 1]].concat(), 551), ([&prompt[..], &other].concat(), 449)]
    {
        let mut again = engine.open_session().unwrap();
        assert!(engine.adopt(&mut again, &said) >= known, "{known}");
        engine.close(again, false);
    }
}

/// Logits after a prompt.
fn logits(engine: &mut Engine, prompt: &[u32]) -> Vec<u32> {
    let mut session = engine.open_session().unwrap();
    engine.sync(&mut session, prompt, &mut Control::default()).unwrap();
    bits(session.logits())
}

/// A vault, options of the processor and of a device, a prompt, and its logits from the processor.
fn subject(dir: &std::path::Path, seed: u64) -> (Vault, EngineOptions, Vec<u32>, Vec<u32>) {
    let model = TinyModel::qwen3(seed);
    let vault = write_tiny(dir, &model, "q4/64", "q8/64");
    let cpu = options(RingSize::Auto, 16, 1);
    let prompt = model.prompt(20, 1);
    let expected = logits(&mut open(&vault, &cpu), &prompt);
    (vault, EngineOptions { device: DeviceChoice::Gpu(None), ..cpu }, prompt, expected)
}

#[test]
fn a_device_that_is_lost_while_experts_are_loaded_is_left() {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(_gpu) = device() else { return };
    let dir = tempfile::tempdir().unwrap();
    let (vault, options, prompt, expected) = subject(dir.path(), 52);
    // Where they are copied there; what is read in place is loaded into the ring alone.
    let options = EngineOptions { device_path: ExpertPath::Import, ..options };
    let mut calls = 0;
    open(&vault, &options).preload(&mut |_, _| calls += 1).unwrap();
    assert!(calls > 2);
    // Before the first of them, amid them, and when all are there: then the first step tells.
    for at in [0, calls / 2, usize::MAX] {
        let mut engine = open(&vault, &options);
        let gpu = device().unwrap();
        let mut call = 0;
        let mut lose = |_, _| {
            if call == at {
                gpu.lose("pulled out");
            }
            call += 1;
        };
        engine.preload(&mut lose).unwrap();
        gpu.lose("pulled out");
        assert_eq!(logits(&mut engine, &prompt), expected, "lost at {at} of {calls}");
        let warning = engine.take_warning().unwrap();
        assert!(matches!(warning, EngineError::DeviceLost { .. }), "{warning}");
        assert!(warning.to_string().contains("pulled out"), "{warning}");
        let info = engine.info();
        assert!(info.tier.is_none() && info.device_note.unwrap().contains("on the processor"));
    }
}

/// By whatever way experts came to it, and if the ring has not a slot more than it holds.
#[test]
fn a_device_that_is_lost_leaves_the_ring_to_the_processor() {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(_gpu) = device() else { return };
    let dir = tempfile::tempdir().unwrap();
    let (vault, options, prompt, expected) = subject(dir.path(), 55);
    let (top_k, all) = (vault.spec.moe.top_k, vault.experts.records.len());
    for path in [ExpertPath::Staging, ExpertPath::Import, ExpertPath::ZeroCopy, ExpertPath::InPlace] {
        for ring in [top_k, all] {
            let mut options = EngineOptions { device_path: path, ..options.clone() };
            options.plan.ring = RingSize::Slots(ring);
            options.device_slots = (path != ExpertPath::InPlace).then_some(top_k);
            let mut engine = open(&vault, &options);
            if ring == all {
                engine.preload(&mut |_, _| {}).unwrap();
            }
            let mut session = engine.open_session().unwrap();
            engine.sync(&mut session, &prompt[..prompt.len() - 1], &mut Control::default()).unwrap();
            assert!(engine.info().tier.is_some());
            device().unwrap().lose("pulled out");
            let last = prompt[prompt.len() - 1];
            assert_eq!(decode(&mut engine, &mut session, last), expected, "{path}, a ring of {ring}");
            assert!(engine.info().tier.is_none() && engine.take_warning().is_some());
        }
    }
}

#[test]
fn a_device_that_fails_while_it_is_opened_is_the_processors_case() {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(gpu) = device() else { return };
    let dir = tempfile::tempdir().unwrap();
    let (vault, options, prompt, expected) = subject(dir.path(), 53);
    // How many allocations opening takes: a failure behind them does not come.
    const MANY: usize = 1 << 20;
    // What is asked of a device once is not asked again.
    drop(open(&vault, &options));
    gpu.fail_at(MANY, Fault::NoRoom);
    let mut whole = open(&vault, &options);
    let allocations = MANY - gpu.faults_after().unwrap();
    let on_device = logits(&mut whole, &prompt);
    assert!(allocations > 20, "{allocations}");
    drop(whole);
    for at in 0..allocations {
        // Others had the memory for a moment: it is asked for less.
        gpu.fail_at(at, Fault::NoRoom);
        let mut engine = open(&vault, &options);
        assert_eq!(gpu.faults_after(), None, "{at} of {allocations}");
        let info = engine.info();
        assert!(info.tier.is_some() && info.device_note.unwrap().contains("has no room for"), "{at}");
        assert_eq!(logits(&mut engine, &prompt), on_device, "no room at {at}");
    }
    // They keep it; or the device goes. Kernels are made again for each that is lost.
    let some = [0, 1, allocations / 2, allocations - 1];
    for (at, fault) in some.iter().flat_map(|&at| [(at, Fault::Full), (at, Fault::Lost)]) {
        let gpu = device().unwrap();
        gpu.fail_at(at, fault);
        let mut engine = open(&vault, &options);
        gpu.end_faults();
        let info = engine.info();
        let note = info.device_note.unwrap();
        let why = if fault == Fault::Lost { "lost at an allocation" } else { "has no room for" };
        assert!(note.starts_with("on the processor: ") && note.contains(why), "{fault:?} at {at}: {note}");
        assert!(info.tier.is_none() && logits(&mut engine, &prompt) == expected, "{fault:?} at {at}");
    }
}

#[test]
fn a_device_that_does_not_import_gets_its_experts_as_ever() {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    if !imports() {
        return;
    }
    let gpu = device().unwrap();
    let model = TinyModel::qwen3(66);
    let dir = tempfile::tempdir().unwrap();
    let vault = write_tiny(dir.path(), &model, "q4/64", "q8/64");
    let base = options(RingSize::Auto, 16, 1);
    let prompt = model.prompt(20, 1);
    let top_k = vault.spec.moe.top_k;
    let expected = run(&mut open(&vault, &by(ExpertPath::Staging, &base, top_k)), &prompt, &[]);
    for path in [ExpertPath::Auto, ExpertPath::Import, ExpertPath::ZeroCopy, ExpertPath::InPlace] {
        gpu.fail_at(0, Fault::NoImport);
        let mut engine = open(&vault, &by(path, &base, top_k));
        gpu.end_faults();
        let tier = engine.info().tier.unwrap();
        assert_eq!(tier.plan.path, ExpertPath::Staging, "{path}");
        assert!(tier.path_note.unwrap().contains("refuse"), "{path}");
        assert!(tier.plan.slots.iter().all(|&slots| slots >= top_k), "{path}: {:?}", tier.plan.slots);
        assert!(run(&mut engine, &prompt, &[]) == expected, "{path}");
    }
}
