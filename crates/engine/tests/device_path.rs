//! By whatever way experts come to a device, it computes the same bits, and the ring's slots are nobody else's while it
//! reads them.
//!
//! Skipped aloud where there is no device, or it imports nothing; a program that plays one (lavapipe) will do.
#![cfg(feature = "gpu")]
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]
#![allow(clippy::print_stderr, reason = "what is skipped is said")]

mod common;

use std::cell::Cell;

use common::device::{by, imports, run, run_in};
use common::{bits, open, options, write_tiny};
use smoe_engine::plan::RingSize;
use smoe_engine::{Control, Engine, EngineError, ExpertPath, Vault};
use smoe_meter::TierSnapshot;
use smoe_testkit::TinyModel;

const PATHS: [ExpertPath; 4] =
    [ExpertPath::Staging, ExpertPath::Import, ExpertPath::ZeroCopy, ExpertPath::InPlace];

fn counted(engine: &Engine) -> TierSnapshot {
    engine.info().tier.unwrap().meter.snapshot()
}

fn tiny(dir: &std::path::Path, model: &TinyModel) -> Vault {
    write_tiny(dir, model, "q4/64", "q8/64")
}

#[test]
fn every_way_and_every_ring_give_the_same_bits() {
    if !imports() {
        return;
    }
    for model in [TinyModel::qwen3(61), TinyModel::deepseek(62), TinyModel::gpt_oss(63)] {
        let dir = tempfile::tempdir().unwrap();
        let vault = tiny(dir.path(), &model);
        let (prompt, further) = (model.prompt(37, 4), model.prompt(6, 5));
        let (all, top_k) = (vault.experts.records.len(), vault.spec.moe.top_k);
        let ring = |slots: usize| options(RingSize::Slots(slots), 16, 1);
        let mut whole = open(&vault, &by(ExpertPath::Staging, &ring(all), vault.spec.moe.n_experts));
        whole.preload(&mut |_, _| {}).unwrap();
        let expected = run(&mut whole, &prompt, &further);
        for path in PATHS {
            for (slots, loaded) in
                [(top_k, false), (top_k + 1, false), (all - 1, false), (all, false), (all, true)]
            {
                let mut engine = open(&vault, &by(path, &ring(slots), top_k));
                let what = format!("{} {path}, a ring of {slots}, loaded: {loaded}", model.spec.model_type);
                let tier = engine.info().tier.unwrap();
                // What does not hold every expert is not read over the bus.
                let copies = path == ExpertPath::ZeroCopy && slots < all;
                let taken = if copies { ExpertPath::Import } else { path };
                assert_eq!((tier.plan.path, tier.path_note.is_some()), (taken, copies), "{what}");
                if loaded {
                    engine.preload(&mut |_, _| {}).unwrap();
                }
                assert!(run(&mut engine, &prompt, &further) == expected, "{what}");
                assert!(run(&mut engine, &prompt, &further) == expected, "{what}, again");
                let counted = counted(&engine);
                let in_place = path == ExpertPath::InPlace;
                // What lies in the ring in the order of the file is found without the host.
                assert_eq!(counted.misses == 0, in_place && loaded, "{what}: {counted:?}");
                assert_eq!(counted.loads == 0, in_place, "{what}: {counted:?}");
                match taken == ExpertPath::ZeroCopy {
                    false => assert_eq!(counted.over_bus, 0, "{what}"),
                    true if loaded => assert!(counted.over_bus > 0 && counted.computed == 0, "{what}"),
                    // By chance in the order of the file, or computed by the processor.
                    true => assert!(counted.over_bus + counted.computed > 0, "{what}"),
                }
                // No step is so long that an expert would be read twice.
                if loaded && (in_place || taken == ExpertPath::ZeroCopy) {
                    let steps = 2 * (prompt.len().div_ceil(16) + further.len());
                    assert_eq!(counted.waits as usize, steps, "a wait a step: {counted:?}");
                }
            }
        }
    }
}

#[test]
fn what_is_read_over_the_bus_halts_nothing_and_is_brought_where_it_is_used() {
    if !imports() {
        return;
    }
    for model in [TinyModel::qwen3(67), TinyModel::gpt_oss(68)] {
        for experts in ["q4/64", "bf16"] {
            let dir = tempfile::tempdir().unwrap();
            let vault = write_tiny(dir.path(), &model, experts, "q8/64");
            let (prompt, further) = (model.prompt(3, 4), model.prompt(30, 5));
            let (all, top_k) = (vault.experts.records.len(), vault.spec.moe.top_k);
            let base = options(RingSize::Slots(all), 2, 1);
            let expected = run(&mut open(&vault, &by(ExpertPath::Staging, &base, top_k)), &prompt, &further);
            let mut engine = open(&vault, &by(ExpertPath::ZeroCopy, &base, top_k));
            engine.preload(&mut |_, _| {}).unwrap();
            let empty = counted(&engine);
            assert_eq!((empty.loads, empty.waits), (0, 0));
            assert!(run(&mut engine, &prompt, &further) == expected, "{experts}");
            let counted = counted(&engine);
            let steps = prompt.len().div_ceil(2) + further.len();
            assert_eq!(counted.waits as usize, steps, "a wait a step: {counted:?}");
            assert_eq!((counted.over_bus, counted.computed), (counted.misses, 0));
            assert!(
                counted.hits > 0 && counted.evictions > 0 && counted.loads < counted.misses,
                "{counted:?}"
            );
        }
    }
}

#[test]
fn sessions_by_turns_find_what_the_ring_has_in_place() {
    if !imports() {
        return;
    }
    let model = TinyModel::qwen2(64);
    let dir = tempfile::tempdir().unwrap();
    let vault = tiny(dir.path(), &model);
    let (all, top_k) = (vault.experts.records.len(), vault.spec.moe.top_k);
    let prompts = [model.prompt(21, 1), model.prompt(33, 2)];
    let further = [model.prompt(5, 3), model.prompt(5, 4)];
    let mut expected = Vec::new();
    for path in PATHS {
        for slots in [top_k, all] {
            let mut base = options(RingSize::Slots(slots), 32, 2);
            base.plan.sessions = 2;
            let mut engine = open(&vault, &by(path, &base, top_k));
            let mut sessions = [(); 2].map(|()| engine.open_session().unwrap());
            let mut got = Vec::new();
            for (session, prompt) in sessions.iter_mut().zip(&prompts) {
                got.push(run_in(&mut engine, session, prompt, &[]));
            }
            for i in 0..5 {
                for (session, further) in sessions.iter_mut().zip(&further) {
                    engine.decode(session, further[i], &mut Control::default()).unwrap();
                    got.push(bits(session.logits()));
                }
            }
            if expected.is_empty() {
                expected.clone_from(&got);
            }
            assert!(got == expected, "{path}, a ring of {slots}");
        }
    }
}

/// Experts that were on their way when a step was given up are there for the next, and their slots are free again.
#[test]
fn a_step_that_is_given_up_leaves_no_expert_behind() {
    if !imports() {
        return;
    }
    let model = TinyModel::qwen3(65);
    let dir = tempfile::tempdir().unwrap();
    let vault = tiny(dir.path(), &model);
    let top_k = vault.spec.moe.top_k;
    let prompt = model.prompt(30, 1);
    for path in PATHS {
        let base = options(RingSize::Slots(top_k), 64, 1);
        let mut engine = open(&vault, &by(path, &base, top_k));
        let expected = run(&mut engine, &prompt, &[]);
        for checks in 0..vault.spec.n_layers() {
            let seen = Cell::new(0);
            let stop = || seen.replace(seen.get() + 1) == checks;
            let mut session = engine.open_session().unwrap();
            let mut control = Control { stop: Some(&stop), ..Control::default() };
            let given_up = engine.sync(&mut session, &prompt, &mut control);
            assert!(matches!(given_up, Err(EngineError::Cancelled)), "{path}, {checks}");
            assert!(run_in(&mut engine, &mut session, &prompt, &[]) == expected, "{path}, layer {checks}");
            engine.close(session, false);
        }
    }
}
