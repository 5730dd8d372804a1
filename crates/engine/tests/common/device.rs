//! What the tests of a GPU share.

use std::sync::{Arc, LazyLock};

use smoe_engine::{Control, DeviceChoice, Engine, EngineOptions, ExpertPath, Session};
use smoe_gpu::{Gpu, GpuError, Software};

use super::bits;

/// All tests share one device, and its compiled kernels; false, said aloud, where there is none.
pub fn has_device() -> bool {
    static DEVICE: LazyLock<Result<Arc<Gpu>, GpuError>> =
        LazyLock::new(|| Gpu::shared(None, Software::Accept));
    match &*DEVICE {
        Ok(gpu) => eprintln!("on {}", gpu.facts()),
        Err(error) => eprintln!("SKIPPED: {error}"),
    }
    DEVICE.is_ok()
}

/// With so few slots of its own, to which experts are copied: whether a bus is fast enough to be read over is a matter of time.
pub fn on_gpu(options: &EngineOptions, slots: Option<usize>) -> EngineOptions {
    let device_path = if slots.is_some() { ExpertPath::Import } else { ExpertPath::Auto };
    EngineOptions { device: DeviceChoice::Gpu(None), device_slots: slots, device_path, ..options.clone() }
}

/// Whether there is a device that imports; false, said aloud, if not.
pub fn imports() -> bool {
    has_device()
        && match Gpu::shared(None, Software::Accept).unwrap().can_import() {
            Ok(_) => true,
            Err(why) => {
                eprintln!("SKIPPED: {why}");
                false
            }
        }
}

/// Options of a device that experts come to by this way, with so few slots of its own if it has any.
pub fn by(path: ExpertPath, base: &EngineOptions, slots: usize) -> EngineOptions {
    let slots = (path != ExpertPath::InPlace).then_some(slots);
    EngineOptions { device_path: path, ..on_gpu(base, slots) }
}

/// Logits of a session after the prompt and after each further token.
pub fn run_in(engine: &mut Engine, session: &mut Session, prompt: &[u32], further: &[u32]) -> Vec<u32> {
    let mut out = Vec::new();
    engine.sync(session, prompt, &mut Control::default()).unwrap();
    out.extend(bits(session.logits()));
    for &token in further {
        engine.decode(session, token, &mut Control::default()).unwrap();
        out.extend(bits(session.logits()));
    }
    out
}

/// Those of a session of its own.
pub fn run(engine: &mut Engine, prompt: &[u32], further: &[u32]) -> Vec<u32> {
    let mut session = engine.open_session().unwrap();
    run_in(engine, &mut session, prompt, further)
}
