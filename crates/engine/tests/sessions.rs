//! Sessions: reuse of prefixes, cancellation, limits, faults.
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

mod common;

use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use common::{bits, greedy, open, options, write_tiny};
use smoe_engine::memory::MemoryFacts;
use smoe_engine::plan::{PlanRequest, RingSize};
use smoe_engine::{Control, Engine, EngineError, Synced, Vault, plan_vault};
use smoe_store::{Fault, FaultyDisk, FileDisk, OpenMode, StoreError};
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

#[test]
fn a_session_reuses_what_it_holds_and_gives_the_same_bits() {
    reuses_what_it_holds(TinyModel::qwen3(3));
}

/// An indexer's keys are kept, found and dropped with the positions.
#[test]
fn so_does_a_session_of_sparse_attention() {
    reuses_what_it_holds(TinyModel::glm_dsa(3));
    reuses_what_it_holds(TinyModel::deepseek_v32(3));
}

fn reuses_what_it_holds(model: TinyModel) {
    let (_dir, vault, model) = tiny_of(model);
    let mut engine = open(&vault, &options(RingSize::Auto, 16, 2));
    let prompt = model.prompt(60, 1);
    let mut session = engine.open_session().unwrap();
    let control = &mut Control::default();
    engine.sync(&mut session, &prompt[..40], control).unwrap();
    let synced = engine.sync(&mut session, &prompt, control).unwrap();
    assert_eq!(synced, Synced { reused: 40, prefilled: 20 });
    let grown = bits(session.logits());
    // A shorter and a diverging prompt drop what lies beyond; the same prompt recomputes its last token.
    assert_eq!(engine.sync(&mut session, &prompt[..10], control).unwrap().reused, 9);
    let mut other = prompt.clone();
    other[30] = (other[30] + 1) % vault.spec.vocab_size as u32;
    assert_eq!(engine.sync(&mut session, &other, control).unwrap().reused, 10);
    assert_eq!(engine.sync(&mut session, &prompt, control).unwrap().reused, 30);
    assert_eq!(bits(session.logits()), grown);
    assert_eq!(engine.sync(&mut session, &prompt, control).unwrap(), Synced { reused: 59, prefilled: 1 });
    assert_eq!(bits(session.logits()), grown);
}

#[test]
fn a_cancelled_prompt_keeps_its_finished_chunks() {
    let (_dir, vault, model) = tiny();
    let mut engine = open(&vault, &options(RingSize::Auto, 8, 1));
    let prompt = model.prompt(40, 1);
    let mut session = engine.open_session().unwrap();
    let cancel = AtomicBool::new(false);
    let mut stop_at_16 = |done: usize, _: usize| {
        if done == 16 {
            cancel.store(true, std::sync::atomic::Ordering::Relaxed);
        }
    };
    let mut control =
        Control { cancel: Some(&cancel), progress: Some(&mut stop_at_16), ..Control::default() };
    let cancelled = engine.sync(&mut session, &prompt, &mut control);
    assert!(matches!(cancelled, Err(EngineError::Cancelled)));
    assert_eq!(session.tokens(), &prompt[..16]);
    let synced = engine.sync(&mut session, &prompt, &mut Control::default()).unwrap();
    assert_eq!(synced, Synced { reused: 16, prefilled: 24 });
    let resumed = bits(session.logits());
    drop(session);
    let mut session = engine.open_session().unwrap();
    engine.sync(&mut session, &prompt, &mut Control::default()).unwrap();
    assert_eq!(bits(session.logits()), resumed);
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let (_dir, vault, model) = tiny();
    let mut engine = open(&vault, &options(RingSize::Auto, 16, 1));
    let mut session = engine.open_session().unwrap();
    let control = &mut Control::default();
    assert!(matches!(engine.sync(&mut session, &[], control), Err(EngineError::EmptyPrompt)));
    let id = vault.spec.vocab_size as u32;
    assert!(matches!(engine.sync(&mut session, &[id], control), Err(EngineError::Token { .. })));
    let long = engine.sync(&mut session, &[1; 257], control);
    assert!(matches!(long, Err(EngineError::ContextFull { needed: 257, context: 256 })));
    assert!(matches!(engine.open_session(), Err(EngineError::NoSession { sessions: 1 })));
    engine.sync(&mut session, &model.prompt(256, 1), control).unwrap();
    assert!(matches!(
        engine.decode(&mut session, 1, &mut Control::default()),
        Err(EngineError::ContextFull { .. })
    ));
}

#[test]
fn a_plan_below_the_floor_names_floor_and_given() {
    let (_dir, vault, _) = tiny();
    let facts = MemoryFacts { physical: 1 << 30, cgroup_limit: None, available: None };
    let plan = |request: PlanRequest| plan_vault(&vault, &request, &facts);
    let auto = plan(PlanRequest::default()).unwrap();
    assert!(auto.holds_all() && auto.total_bytes() <= auto.budget_bytes);
    let Err(EngineError::Budget { floor, given }) =
        plan(PlanRequest { memory: Some(1 << 20), ..PlanRequest::default() })
    else {
        panic!("a megabyte is not enough");
    };
    assert_eq!(given, 1 << 20);
    // The floor that the error names works, and one byte less does not.
    let at_floor = plan(PlanRequest { memory: Some(floor), ..PlanRequest::default() }).unwrap();
    assert_eq!((at_floor.ring_slots, at_floor.total_bytes()), (at_floor.ring_floor, floor));
    assert!(plan(PlanRequest { memory: Some(floor - 1), ..PlanRequest::default() }).is_err());
    let ring = plan(PlanRequest { ring: RingSize::Slots(1), ..PlanRequest::default() });
    assert!(matches!(ring, Err(EngineError::Setting { name: "--ring", .. })));
    let context = plan(PlanRequest { context: Some(1 << 30), ..PlanRequest::default() });
    assert!(matches!(context, Err(EngineError::Setting { name: "--context", .. })));
}

fn faulty(vault: &Vault) -> (Engine, Arc<FaultyDisk>) {
    let disk = FileDisk::open(&vault.experts_path, OpenMode::Auto).unwrap();
    let disk = FaultyDisk::new(disk);
    // A ring at the floor reads on, so that faults are met; token by token, so that every read is demanded: one
    // that is made ahead may fail in silence.
    let options = options(RingSize::Slots(vault.spec.moe.top_k), 1, 1);
    (Engine::open_on(vault, disk.clone(), &options).unwrap(), disk)
}

#[test]
fn a_failed_or_torn_read_ends_the_request_and_the_next_one_succeeds() {
    let (_dir, vault, model) = tiny();
    let prompt = model.prompt(24, 1);
    let expected = greedy(&mut open(&vault, &options(RingSize::Auto, 8, 1)), &prompt, 8);
    for (fault, is_right) in [
        (
            Fault::Error(ErrorKind::Other),
            (|e: &StoreError| matches!(e, StoreError::Read { .. })) as fn(&StoreError) -> bool,
        ),
        (Fault::Short(100), |e| matches!(e, StoreError::Read { .. })),
        (Fault::Torn(5), |e| matches!(e, StoreError::Checksum { .. })),
    ] {
        let (mut engine, disk) = faulty(&vault);
        disk.on_read(7, fault.clone());
        let mut session = engine.open_session().unwrap();
        let failed = engine.sync(&mut session, &prompt, &mut Control::default());
        let Err(EngineError::Store(error)) = failed else { panic!("{fault:?}: {failed:?}") };
        assert!(is_right(&error), "{error}");
        let text = error.to_string();
        assert!(text.contains("layer") && text.contains("expert"), "{text}");
        drop(session);
        disk.heal();
        assert_eq!(greedy(&mut engine, &prompt, 8), expected);
    }
}

/// What is said next costs its own tokens, however long the history: positions computed, and experts read.
#[test]
fn a_further_turn_computes_and_reads_for_its_own_tokens_alone() {
    let (_dir, vault, model) = tiny();
    let turn = 3;
    for history in [10, 200] {
        // A ring at the floor keeps next to nothing: every expert that a step needs is read.
        let mut engine = open(&vault, &options(RingSize::Slots(vault.spec.moe.top_k), 64, 1));
        let mut session = engine.open_session().unwrap();
        let tokens = model.prompt(history + turn, 6);
        engine.sync(&mut session, &tokens[..history], &mut Control::default()).unwrap();
        let before = engine.store_snapshot();
        let synced = engine.sync(&mut session, &tokens, &mut Control::default()).unwrap();
        let read = (engine.store_snapshot() - before).loads as usize;
        assert_eq!((synced.reused, synced.prefilled), (history, turn));
        // Those of its tokens, or, where they need most of a layer, the next layer once.
        let layers = vault.spec.moe_layers().count();
        let most = layers * (turn * vault.spec.moe.top_k).max(vault.spec.moe.n_experts);
        assert!((1..=most).contains(&read), "{read} experts read after {history} tokens of history");
    }
}
