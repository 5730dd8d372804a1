//! Less memory makes it slower, never different: bit-identical logits for every ring, chunk, thread count and
//! instruction set, in prefill and decode.

mod common;

use common::{bits, observe, open, options, write_tiny};
use smoe_engine::plan::RingSize;
use smoe_engine::{Control, EngineOptions, KvType};
use smoe_format::FfnKind;
use smoe_format::spec::MoeSpec;
use smoe_testkit::TinyModel;

/// Coded, float and mixed vaults with odd shapes: tiles and groups are padded.
const ENCODINGS: [(&str, &str); 5] = [
    ("q4/64", "q8/64"),
    ("bf16", "bf16"),
    ("q3a/32", "q6/128"),
    ("bf16,bf16,q4/64", "q8/64"),
    ("q4/32,q8/128,q6/64", "bf16"),
];

#[test]
fn ring_chunk_threads_and_kernels_do_not_change_a_bit() {
    for model in TinyModel::every(11) {
        for (experts, backbone) in ENCODINGS {
            let dir = tempfile::tempdir().unwrap();
            let vault = write_tiny(dir.path(), &model, experts, backbone);
            let prompt = model.prompt(70, 2);
            let all = vault.experts.records.len();
            let floor = vault.spec.moe.top_k;
            let expected = observe(&mut open(&vault, &options(RingSize::Auto, 128, 1)), &prompt);
            let same = |what: &str, options: &EngineOptions| {
                let got = observe(&mut open(&vault, options), &prompt);
                assert_eq!(bits(&got.logits), bits(&expected.logits), "{experts} {backbone}: {what}");
                assert_eq!(bits(&got.hidden), bits(&expected.hidden), "{experts} {backbone}: {what}");
                assert_eq!(bits(&got.router), bits(&expected.router), "{experts} {backbone}: {what}");
            };
            for ring in [floor, all / 2, all] {
                for chunk in [1, 7, 64] {
                    let options = options(RingSize::Slots(ring), chunk, 1 + chunk % 2);
                    same(&format!("ring {ring}, chunk {chunk}"), &options);
                }
            }
            for kernels in ["scalar", "avx2", "avx512", "neon", "neon-i8mm"] {
                if smoe_engine::kernels(Some(kernels)).is_err() {
                    eprintln!("SKIPPED: this machine has no {kernels}");
                    continue;
                }
                let kernels = Some(kernels.to_owned());
                let options = EngineOptions { kernels, ..options(RingSize::Slots(floor), 33, 2) };
                same("kernels", &options);
            }
            let exact =
                |threads, chunk| EngineOptions { exact: true, ..options(RingSize::Auto, chunk, threads) };
            let (one, two) = (
                observe(&mut open(&vault, &exact(1, 128)), &prompt),
                observe(&mut open(&vault, &exact(2, 5)), &prompt),
            );
            assert_eq!(bits(&one.logits), bits(&two.logits), "{experts} {backbone}: exact");
        }
    }
}

#[test]
fn prefill_of_n_tokens_is_n_decode_steps() {
    for model in TinyModel::every(12) {
        for kv in [KvType::F32, KvType::F16, KvType::Q8] {
            let dir = tempfile::tempdir().unwrap();
            let vault = write_tiny(dir.path(), &model, "q4/64", "q8/64");
            let mut options = options(RingSize::Slots(vault.spec.moe.top_k), 64, 2);
            options.plan.kv = Some(kv);
            let prompt = model.prompt(48, 7);
            let mut engine = open(&vault, &options);
            let mut session = engine.open_session().unwrap();
            engine.sync(&mut session, &prompt, &mut Control::default()).unwrap();
            let prefilled = bits(session.logits());
            drop(session);
            let mut session = engine.open_session().unwrap();
            engine.sync(&mut session, &prompt[..1], &mut Control::default()).unwrap();
            for &token in &prompt[1..] {
                engine.decode(&mut session, token, &mut Control::default()).unwrap();
            }
            assert_eq!(bits(session.logits()), prefilled, "{kv:?}");
        }
    }
}

/// Longer than a block of attention and than one kernel call's pairs: experts come in ascending order, one expert's
/// tokens are served in several calls, and the next layer is read ahead.
#[test]
fn a_long_prefill_is_the_same_however_it_is_cut() {
    for model in TinyModel::every(13) {
        let dir = tempfile::tempdir().unwrap();
        let vault = write_tiny(dir.path(), &model, "q4/64", "q8/64");
        let tokens = 1000;
        assert!(tokens * vault.spec.moe.top_k > 1024, "long enough to be summed in order");
        let prompt = model.prompt(tokens, 5);
        let logits = |ring: usize, chunk: usize, threads: usize| {
            let mut options = options(RingSize::Slots(ring), chunk, threads);
            options.plan.context = Some(tokens);
            let mut engine = open(&vault, &options);
            let mut session = engine.open_session().unwrap();
            engine.sync(&mut session, &prompt, &mut Control::default()).unwrap();
            (bits(session.logits()), engine.store_snapshot())
        };
        let (floor, all) = (vault.spec.moe.top_k, vault.experts.records.len());
        let (expected, _) = logits(all, 50, 1);
        for (ring, chunk, threads) in
            [(all, 1000, 2), (floor, 1000, 2), (floor, 1000, 1), (floor + 3, 600, 2)]
        {
            let (got, store) = logits(ring, chunk, threads);
            assert_eq!(got, expected, "ring {ring}, chunk {chunk}, {threads} threads");
            if chunk == tokens {
                assert!(store.loads <= all as u64, "{} experts read of {all}", store.loads);
            }
        }
    }
}

/// More experts than a kernel call takes, 32: of many tokens, and of a single one. Rings hold fewer, as many, and more.
#[test]
fn a_layer_of_many_experts_is_the_same_in_every_ring() {
    for top_k in [3, 40] {
        let mut spec = TinyModel::qwen3(15).spec;
        spec.layers.truncate(2);
        spec.moe = MoeSpec { n_experts: 80, top_k, d_expert: 24, ..spec.moe };
        let model = TinyModel::new(spec, 15);
        let dir = tempfile::tempdir().unwrap();
        let vault = write_tiny(dir.path(), &model, "q4/64", "q8/64");
        let prompt = model.prompt(24, 6);
        let logits = |ring, chunk, threads| {
            let mut engine = open(&vault, &options(RingSize::Slots(ring), chunk, threads));
            bits(&observe(&mut engine, &prompt).logits)
        };
        let all = vault.experts.records.len();
        let expected = logits(all, 24, 1);
        for ring in (top_k..50).chain([79, 80, 81, all - 1]) {
            for (chunk, threads) in [(24, 2), (1 + ring % 9, 1)] {
                assert_eq!(logits(ring, chunk, threads), expected, "top {top_k}, ring {ring}, chunk {chunk}");
            }
        }
    }
}

#[test]
fn reading_ahead_changes_no_bit() {
    for model in TinyModel::every(14) {
        let dir = tempfile::tempdir().unwrap();
        let vault = write_tiny(dir.path(), &model, "q4/64", "q8/64");
        let (prompt, answer) = (model.prompt(20, 3), model.prompt(40, 4));
        let run = |look_ahead, spec, readers| {
            let ring = RingSize::Slots(vault.spec.moe.top_k + 2);
            let options = EngineOptions { look_ahead, spec, readers, ..options(ring, 16, 2) };
            let mut engine = open(&vault, &options);
            let mut session = engine.open_session().unwrap();
            engine.sync(&mut session, &prompt, &mut Control::default()).unwrap();
            // What the prompt read ahead has arrived by then.
            engine.forget_experts();
            let before = engine.store_snapshot();
            let step = |&token| {
                engine.decode(&mut session, token, &mut Control::default()).unwrap();
                bits(session.logits())
            };
            let logits: Vec<_> = answer.iter().map(step).collect();
            (logits, engine.store_snapshot() - before)
        };
        let (expected, plain) = run(Some(0), 0, None);
        assert_eq!(plain.ahead_reads, 0, "nothing is read ahead");
        for (look_ahead, spec, readers) in [
            (Some(3), 0, None),
            (Some(0), 4, None),
            (Some(2), 2, Some(1)),
            (Some(100), 100, Some(9)),
            (None, 1, None),
        ] {
            let (got, store) = run(look_ahead, spec, readers);
            assert_eq!(got, expected, "look-ahead {look_ahead:?}, spec {spec}, readers {readers:?}");
            let leads = vault.spec.layers.windows(2).any(|pair| pair == [FfnKind::Moe, FfnKind::Moe]);
            let asked = spec > 0 || leads && look_ahead.is_some();
            assert!(!asked || store.ahead_reads + store.ahead_late > 0, "something was read ahead");
        }
    }
}
