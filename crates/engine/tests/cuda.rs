//! A card through CUDA computes what the processor computes, whatever the steps are cut into.
//!
//! Skipped aloud where there is no card, driver or run-time compiler.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]
#![allow(clippy::print_stderr, reason = "what is skipped is said")]

mod common;

use common::{bits, open, options, write_tiny};
use smoe_cuda::Cuda;
use smoe_engine::plan::RingSize;
use smoe_engine::{Control, DeviceChoice, Engine, EngineError, EngineOptions};
use smoe_testkit::{TinyModel, fixtures};

fn has_card() -> bool {
    match Cuda::open() {
        Ok(card) => eprintln!("on {}", card.facts()),
        Err(error) => {
            eprintln!("SKIPPED: {error}");
            return false;
        }
    }
    true
}

/// Models of whole groups: heads of 64 with a norm; heads of 128 without, multipliers, a tied head, and as many experts as
/// leave some lanes one more than others.
fn models() -> [TinyModel; 2] {
    let mut first = fixtures::qwen3_moe();
    (first.d_model, first.attention.head_dim, first.moe.d_expert) = (256, 64, 128);
    let mut second = fixtures::granitemoe();
    (second.d_model, second.attention.head_dim, second.moe.d_expert) = (256, 128, 128);
    second.attention.qk_norm = false;
    (second.moe.norm_topk, second.moe.n_experts, second.moe.top_k) = (false, 40, 4);
    [TinyModel::new(first, 5), TinyModel::new(second, 6)]
}

fn on_card(options: &EngineOptions) -> EngineOptions {
    EngineOptions { device: DeviceChoice::Cuda, ..options.clone() }
}

#[test]
fn where_there_is_no_card_that_is_all_that_is_wrong() {
    for model in models() {
        let dir = tempfile::tempdir().unwrap();
        let vault = write_tiny(dir.path(), &model, "q4/64", "q8/64");
        match Engine::open(&vault, &on_card(&options(RingSize::Auto, 8, 1))) {
            Ok(engine) => assert!(engine.device_tier().is_some_and(|tier| tier.plan.holds_all())),
            Err(error) => assert!(matches!(error, EngineError::Cuda(_)), "{error}"),
        }
    }
}

/// Logits after the prompt and after each further token.
fn run(engine: &mut Engine, prompt: &[u32], further: &[u32]) -> Vec<f32> {
    engine.preload(&mut |_, _| {}).unwrap();
    let mut session = engine.open_session().unwrap();
    let mut out = Vec::new();
    engine.sync(&mut session, prompt, &mut Control::default()).unwrap();
    out.extend_from_slice(session.logits());
    for &token in further {
        engine.decode(&mut session, token, &mut Control::default()).unwrap();
        out.extend_from_slice(session.logits());
    }
    out
}

#[test]
fn logits_are_the_processors_within_the_tolerance() {
    if !has_card() {
        return;
    }
    for model in models() {
        for (backbone, tolerance) in [("q8/64", 0.03), ("bf16", 0.03), ("q4/64", 0.03)] {
            let dir = tempfile::tempdir().unwrap();
            let vault = write_tiny(dir.path(), &model, "q4/64", backbone);
            let cpu = options(RingSize::Auto, 64, 1);
            let (prompt, further) = (model.prompt(40, 3), model.prompt(8, 4));
            let expected = run(&mut open(&vault, &cpu), &prompt, &further);
            let got = run(&mut open(&vault, &on_card(&cpu)), &prompt, &further);
            assert_eq!(got.len(), expected.len());
            let scale = expected.iter().fold(1f32, |m, l| m.max(l.abs()));
            let worst = got.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
            eprintln!("{backbone}: off by {worst} of {scale}");
            assert!(got.iter().all(|a| a.is_finite()) && worst <= tolerance * scale, "{backbone}: {worst}");
        }
    }
}

#[test]
fn steps_of_any_length_and_runs_give_the_same_bits() {
    if !has_card() {
        return;
    }
    let [model, _] = models();
    let dir = tempfile::tempdir().unwrap();
    let vault = write_tiny(dir.path(), &model, "q4/64", "q8/64");
    let (prompt, further) = (model.prompt(40, 3), model.prompt(8, 4));
    let runs: Vec<Vec<u32>> = [64, 7, 1, 64]
        .map(|chunk| {
            let mut engine = open(&vault, &on_card(&options(RingSize::Auto, chunk, 1)));
            bits(&run(&mut engine, &prompt, &further)).into_iter().collect()
        })
        .into_iter()
        .collect();
    assert!(runs.iter().all(|run| *run == runs[0]), "other bits");
}

#[test]
fn what_has_no_kernels_is_refused_by_name() {
    for model in [TinyModel::deepseek(1), TinyModel::gpt_oss(1)] {
        let dir = tempfile::tempdir().unwrap();
        let vault = write_tiny(dir.path(), &model, "bf16", "bf16");
        let Err(error) = Engine::open(&vault, &on_card(&options(RingSize::Auto, 8, 1))) else {
            panic!("{} through CUDA", model.spec.model_type)
        };
        assert!(matches!(error, EngineError::Unsupported { .. }), "{error}");
        assert!(error.to_string().contains("CUDA"), "{error}");
    }
}
