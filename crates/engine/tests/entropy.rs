//! Entropy-coded records change what is read, not what is computed.
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

mod common;

use std::sync::atomic::AtomicBool;

use common::{bits, observe, open, options};
use smoe_engine::plan::RingSize;
use smoe_engine::{Control, EngineError, EngineOptions, Vault, plan_vault};
use smoe_format::entropy::{RECORD_HEAD_BYTES, SLACK, n_parts};
use smoe_format::record_crc;
use smoe_sculpt::{Progress, Settings, sculpt};
use smoe_testkit::TinyModel;
use smoe_testkit::tiny::CheckpointOptions;
use smoe_testkit::vault::entropy_decode;
use tempfile::TempDir;

struct Quiet;

impl Progress for Quiet {}

/// Wide enough for coding to pay; tiles and groups are padded all the same.
fn model(seed: u64) -> TinyModel {
    let mut spec = TinyModel::qwen3(seed).spec;
    (spec.d_model, spec.moe.d_expert) = (320, 168);
    TinyModel::new(spec, seed)
}

/// An entropy-coded vault of a number of hundredths of a bit, and its twin of the same codes in records that are not.
struct Twins {
    _dir: TempDir,
    coded: Vault,
    plain: Vault,
}

fn twins(model: &TinyModel, bpw: u16, group: usize) -> Twins {
    let dir = tempfile::tempdir().unwrap();
    let [checkpoint, coded, plain] = ["checkpoint", "coded", "plain"].map(|name| dir.path().join(name));
    std::fs::create_dir(&checkpoint).unwrap();
    std::fs::create_dir(&plain).unwrap();
    model.write_checkpoint(&checkpoint, CheckpointOptions { tokenizer: false, ..Default::default() });
    let settings = Settings { entropy: true, coded_bpw: Some(bpw), group, ..Settings::default() };
    sculpt(&checkpoint, &coded, &settings, &Quiet, &AtomicBool::new(false)).unwrap();
    entropy_decode(&coded, &plain);
    Twins { coded: Vault::open(&coded).unwrap(), plain: Vault::open(&plain).unwrap(), _dir: dir }
}

fn on_disk(vault: &Vault) -> u64 {
    vault.experts.records.iter().map(|record| record.len).sum()
}

#[test]
fn the_logits_are_those_of_the_same_codes_in_a_fixed_width_vault() {
    let model = model(21);
    for (bpw, group) in [(330, 128), (230, 64), (280, 32)] {
        let Twins { coded, plain, _dir } = twins(&model, bpw, group);
        assert!(on_disk(&coded) < on_disk(&plain), "{} {}", on_disk(&coded), on_disk(&plain));
        let prompt = model.prompt(40, 2);
        let expected = observe(&mut open(&plain, &options(RingSize::Auto, 64, 1)), &prompt);
        let (floor, all) = (plain.spec.moe.top_k, plain.experts.records.len());
        for (ring, chunk, readers) in
            [(floor, 64, None), (floor, 1, Some(1)), (floor + 2, 7, Some(3)), (all, 16, Some(64))]
        {
            let options = EngineOptions { readers, ..options(RingSize::Slots(ring), chunk, 2) };
            let got = observe(&mut open(&coded, &options), &prompt);
            assert_eq!(bits(&got.logits), bits(&expected.logits), "{bpw}: ring {ring}, {readers:?}");
            assert_eq!(bits(&got.hidden), bits(&expected.hidden), "{bpw}: ring {ring}, {readers:?}");
        }
        for kernels in ["scalar", "avx2", "avx512", "neon", "neon-i8mm"] {
            if smoe_engine::kernels(Some(kernels)).is_err() {
                eprintln!("SKIPPED: this machine has no {kernels}");
                continue;
            }
            let kernels = Some(kernels.to_owned());
            let options = EngineOptions { kernels, ..options(RingSize::Slots(floor), 33, 2) };
            let got = observe(&mut open(&coded, &options), &prompt);
            assert_eq!(bits(&got.logits), bits(&expected.logits), "{bpw}");
        }
    }
}

/// Of so many blocks that readers share the decoding of a record.
#[test]
fn records_that_several_readers_decode_are_the_same_too() {
    let mut spec = TinyModel::qwen3(24).spec;
    (spec.d_model, spec.moe.d_expert) = (1088, 1056);
    (spec.moe.n_experts, spec.moe.top_k) = (3, 2);
    let model = TinyModel::new(spec, 24);
    let Twins { coded, plain, _dir } = twins(&model, 250, 64);
    assert!(n_parts(&coded.experts.layers[0]) > 3);
    let prompt = model.prompt(12, 2);
    let expected = observe(&mut open(&plain, &options(RingSize::Auto, 64, 1)), &prompt);
    for (chunk, readers) in [(64, None), (1, None), (1, Some(1))] {
        let options = EngineOptions { readers, ..options(RingSize::Slots(2), chunk, 2) };
        let got = observe(&mut open(&coded, &options), &prompt);
        assert_eq!(bits(&got.logits), bits(&expected.logits), "{chunk} {readers:?}");
    }
}

#[test]
fn what_is_read_is_less_than_what_slots_hold_and_the_plan_counts_the_buffers() {
    let Twins { coded, plain, _dir } = twins(&model(22), 250, 128);
    let run = |vault: &Vault| {
        let mut engine = open(vault, &options(RingSize::Auto, 64, 1));
        engine.preload(&mut |_, _| ()).unwrap();
        let store = engine.store_snapshot();
        (store.disk_bytes, store.decoded_bytes)
    };
    assert_eq!(run(&plain), (on_disk(&plain), 0));
    assert_eq!(run(&coded), (on_disk(&coded), on_disk(&plain)));
    let fixed = |vault: &Vault| {
        let facts = smoe_engine::memory::MemoryFacts::detect();
        plan_vault(vault, &options(RingSize::Slots(8), 64, 1).plan, &facts).unwrap().fixed_bytes
    };
    let buffer = coded.experts.longest_record() + SLACK as u64;
    let buffers = fixed(&coded) - fixed(&plain);
    assert!((4..=16).any(|readers| buffers == smoe_store::staging_bytes(readers, buffer)), "{buffers}");
}

/// Damage under a right checksum: the request that meets it fails and says where, and the engine goes on.
#[test]
fn a_record_that_cannot_be_decoded_ends_the_request_and_nothing_else() {
    let model = model(23);
    let Twins { coded, _dir, .. } = twins(&model, 300, 128);
    let path = &coded.experts_path;
    let mut bytes = std::fs::read(path).unwrap();
    let mut file = coded.experts.clone();
    let layer = file.layers[0].layer;
    for record in file.records.iter_mut().filter(|record| record.key.layer == layer) {
        let raw = &mut bytes[record.offset as usize..][..record.len as usize];
        raw[RECORD_HEAD_BYTES..record.used as usize].fill(0xff);
        record.crc32c = Some(record_crc(record.key, raw));
    }
    bytes[..file.data_offset as usize].copy_from_slice(&file.head_bytes());
    std::fs::write(path, &bytes).unwrap();
    let damaged = Vault::open(path.parent().unwrap()).unwrap();
    let mut engine = open(&damaged, &options(RingSize::Auto, 16, 1));
    for _ in 0..2 {
        let mut session = engine.open_session().unwrap();
        let error = engine.sync(&mut session, &model.prompt(5, 1), &mut Control::default()).unwrap_err();
        let EngineError::Store(error) = error else { panic!("{error}") };
        let message = error.to_string();
        assert!(
            message.contains(&format!("layer {layer} expert")) && message.contains("gate: "),
            "{message}"
        );
    }
    assert!(engine.store_snapshot().decode_errors > 0);
}
