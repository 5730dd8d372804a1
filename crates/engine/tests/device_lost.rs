//! What is left when a device fails: the same answers, from the processor. A binary of its own, as tests share a device.
#![cfg(feature = "gpu")]
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]
#![allow(clippy::print_stderr, reason = "what is skipped is said")]

mod common;

use common::{bits, open, options, write_tiny};
use smoe_engine::plan::RingSize;
use smoe_engine::{Control, DeviceChoice, Engine, EngineError, EngineOptions, Session};
use smoe_gpu::{Gpu, Software};
use smoe_testkit::TinyModel;

fn decode(engine: &mut Engine, session: &mut Session, token: u32) -> Vec<u32> {
    engine.decode(session, token, &mut Control::default()).unwrap();
    bits(session.logits())
}

#[test]
fn a_lost_device_changes_who_computes_and_nothing_else() {
    let gpu = match Gpu::shared(None, Software::Accept) {
        Ok(gpu) => gpu,
        Err(error) => return eprintln!("SKIPPED: {error}"),
    };
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
