//! Errors and codes, measured.
#![allow(clippy::print_stderr)]

mod common;

use std::sync::atomic::AtomicBool;

use common::{Tiny, Type, run, settings, shared};
use smoe_sculpt::{
    BackboneBits, KindError, Recipe, SculptError, Settings, compare_codes, dry_run, measure_error, verify,
};

fn errors(checkpoint: &std::path::Path, vault: &std::path::Path, threads: usize) -> Vec<KindError> {
    measure_error(checkpoint, vault, Some(threads), &(), &AtomicBool::new(false)).expect("measured")
}

#[test]
fn what_is_kept_has_no_error_and_coarser_codes_have_more() {
    let dir = tempfile::tempdir().expect("dir");
    let checkpoint = dir.path().join("checkpoint");
    Tiny::deepseek(Type::F32, 41).write(&checkpoint, 0);
    let mut snr = Vec::new();
    for (bits, backbone) in [
        (16, BackboneBits::Bf16),
        (8, BackboneBits::Q8),
        (6, BackboneBits::Q6),
        (5, BackboneBits::Q5),
        (4, BackboneBits::Q4),
    ] {
        let vault = dir.path().join(format!("v{bits}"));
        run(&checkpoint, &vault, &settings(bits, backbone)).expect("sculpted");
        let one = errors(&checkpoint, &vault, 1);
        // Not by a bit, whoever measures first.
        assert_eq!(one, errors(&checkpoint, &vault, 3));
        let of = |kind: &str| one.iter().find(|e| e.kind == kind).unwrap_or_else(|| panic!("{kind}")).clone();
        for kind in ["attn_norm", "ffn_norm", "final_norm", "router"] {
            assert_eq!((of(kind).rmse, of(kind).encoding.as_str()), (0.0, "f32"));
        }
        snr.push(["expert down", "q", "head", "shared_up", "dense gate"].map(|kind| of(kind).snr_db));
        assert_eq!(of("expert gate").weights, 2 * 5 * 48 * 64);
        let codes = compare_codes(&checkpoint, &vault, None, Some(2), &(), &AtomicBool::new(false))
            .expect("compared");
        assert!(codes.iter().all(|c| c.different_codes == 0 && c.different_scales == 0 && c.equal_codes > 0));
    }
    assert_eq!(snr[0], [f64::INFINITY; 5]);
    for (fine, coarse) in snr.iter().zip(&snr[1..]) {
        for (fine, coarse) in fine.iter().zip(coarse) {
            // A bit is worth some 6 dB.
            assert!(fine > &(coarse + 4.0), "{fine} {coarse}");
        }
    }
}

#[test]
fn searched_scales_err_less_and_are_compared_as_such() {
    let dir = tempfile::tempdir().expect("dir");
    let checkpoint = dir.path().join("checkpoint");
    Tiny::deepseek(Type::Bf16, 43).write(&checkpoint, 0);
    for (bits, backbone) in [(2, BackboneBits::Q4), (3, BackboneBits::Q5), (4, BackboneBits::Q6)] {
        let plain = settings(bits, backbone);
        let searched = Settings { recipe: Recipe::Searched, threads: Some(2), ..plain.clone() };
        let [plain, searched] = [plain, searched].map(|settings| {
            let vault = dir.path().join(format!("{bits}-{}", settings.recipe));
            run(&checkpoint, &vault, &settings).expect("sculpted");
            assert!(verify(&vault, None, &(), &AtomicBool::new(false)).expect("read").problems.is_empty());
            let codes = compare_codes(&checkpoint, &vault, None, None, &(), &AtomicBool::new(false))
                .expect("compared");
            assert!(codes.iter().all(|c| c.different_codes == 0 && c.different_scales == 0), "{codes:?}");
            errors(&checkpoint, &vault, 1)
        });
        for (plain, searched) in plain.iter().zip(&searched).filter(|(plain, _)| plain.rmse > 0.0) {
            assert!(searched.rmse < plain.rmse, "{searched:?} {plain:?}");
        }
    }
}

#[test]
fn another_models_vault_is_not_compared() {
    let dir = tempfile::tempdir().expect("dir");
    Tiny::deepseek(Type::Bf16, 42).write(&dir.path().join("a"), 0);
    Tiny::qwen3(Type::Bf16, 42).write(&dir.path().join("b"), 0);
    let vault = dir.path().join("v");
    run(&dir.path().join("a"), &vault, &settings(4, BackboneBits::Q8)).expect("sculpted");
    let other = measure_error(&dir.path().join("b"), &vault, None, &(), &AtomicBool::new(false));
    assert!(matches!(other, Err(SculptError::Incomparable { .. })), "{other:?}");
}

#[test]
fn the_originals_pair_has_our_codes_our_scales_and_our_errors() {
    let Some(checkpoint) = shared("fixtures/qwen3_moe") else { return };
    let Some(theirs) = shared("fixtures/original-vault-v2/qwen3_moe.smoe") else { return };
    let codes =
        compare_codes(&checkpoint, &theirs, None, Some(2), &(), &AtomicBool::new(false)).expect("compared");
    for c in &codes {
        eprintln!(
            "{:12} codes {} equal, {} different; scales {} equal, {} different",
            c.kind, c.equal_codes, c.different_codes, c.equal_scales, c.different_scales
        );
        assert_eq!((c.different_codes, c.different_scales), (0, 0), "{}", c.kind);
    }
    let dir = tempfile::tempdir().expect("dir");
    let ours = dir.path().join("v");
    run(&checkpoint, &ours, &settings(4, BackboneBits::Bf16)).expect("sculpted");
    let (a, b) = (errors(&checkpoint, &ours, 2), errors(&checkpoint, &theirs, 2));
    for e in &a {
        eprintln!(
            "{:12} {:6} {:7} weights, rmse {:.3e}, SNR {:.2} dB, max {:.3e}, digest {:016x}",
            e.kind, e.encoding, e.weights, e.rmse, e.snr_db, e.max_error, e.digest
        );
    }
    assert_eq!(a, b);
}

#[test]
fn a_dry_run_says_what_the_sculpt_then_makes() {
    let dir = tempfile::tempdir().expect("dir");
    let checkpoint = dir.path().join("c");
    Tiny::deepseek(Type::Bf16, 43).write(&checkpoint, 3);
    let settings = settings(4, BackboneBits::Q8);
    let vault = dir.path().join("not/yet/there");
    let plan = dry_run(&checkpoint, Some(&vault), &settings, &AtomicBool::new(false)).expect("plan");
    assert!(!dir.path().join("not").exists());
    run(&checkpoint, &vault, &settings).expect("sculpted");
    let made = common::files(&vault);
    assert_eq!(plan.experts_bytes, made["experts.smoe"].len() as u64);
    assert_eq!(plan.backbone_bytes, made["backbone.safetensors"].len() as u64);
    assert_eq!(plan.side_bytes, made["config.json"].len() as u64);
    assert_eq!((plan.experts, plan.record_bytes), (10, 16384));
    assert_eq!(plan.token_expert_bytes, 2 * 3 * 16384);
    assert!(plan.available_bytes.is_some() && plan.padding_bytes > 0);
    let matrices = 2 * 130 * 64 + 3 * 4 * 64 * 64 + 3 * 96 * 64 + 2 * (5 * 64 + 3 * 96 * 64);
    let vectors = 7 * 64;
    assert_eq!(plan.weights, (matrices + vectors + 10 * 3 * 48 * 64) as u64);
    assert_eq!(plan.active_weights, (matrices - 129 * 64 + vectors + 6 * 3 * 48 * 64) as u64);
}
