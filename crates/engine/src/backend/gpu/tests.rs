//! Halts, one by one.
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]
#![allow(clippy::print_stderr, reason = "what is skipped is said")]

use std::ops::Range;

use smoe_format::{Encoding, FfnKind};
use smoe_gpu::{Gpu, Software};
use smoe_meter::TierSnapshot;
use smoe_testkit::TinyModel;

use crate::plan::{PlanRequest, RingSize};
use crate::{Control, DeviceChoice, Engine, EngineOptions, Session, Vault};

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
        ..PlanRequest::default()
    };
    let options = EngineOptions { plan, device: DeviceChoice::Gpu(None), ..EngineOptions::default() };
    let engine = Engine::open(&vault, &options).unwrap();
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
        let ahead: Vec<_> = positions.clone().map(&mut one).collect();
        // Backwards no step is like the one that was expected.
        for (at, ahead) in positions.zip(ahead).rev() {
            assert!(one(at) == ahead, "position {at}");
        }
        engine.close(session, false);
    }
}

#[test]
fn a_halt_at_any_layer_changes_no_bit() {
    // Without a shared expert, and with a gated one behind a dense layer.
    for model in [TinyModel::qwen3(31), TinyModel::qwen2(32)] {
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
