//! `smoe devices`: the GPUs that there are.

use crate::args::DevicesArgs;
use crate::failure::Failure;

/// Runs the command.
#[cfg(feature = "gpu")]
pub fn devices(args: &DevicesArgs) -> Result<(), Failure> {
    use serde_json::json;
    use smoe_engine::plan::Bytes;
    use smoe_gpu::DeviceKind;

    let found = smoe_gpu::devices();
    let cards = cuda();
    let kind = |kind: DeviceKind| match kind {
        DeviceKind::Discrete => "discrete",
        DeviceKind::Integrated => "integrated",
        DeviceKind::Other => "other",
        DeviceKind::Software => "software",
    };
    if args.json {
        let list: Vec<_> = found
            .iter()
            .map(|device| {
                json!({
                    "name": device.name,
                    "api": device.api,
                    "driver": device.driver,
                    "kind": kind(device.kind),
                    "subgroup": [device.subgroup.0, device.subgroup.1],
                    "memory_bytes": device.memory,
                    "max_binding_bytes": device.max_binding,
                    "max_buffer_bytes": device.max_buffer,
                    "unusable": device.unusable,
                })
            })
            .chain(cards.iter().map(|card| match card {
                Ok((name, memory)) => {
                    json!({"name": name, "api": "cuda", "memory_bytes": memory, "unusable": null})
                }
                Err(why) => json!({"api": "cuda", "unusable": why}),
            }))
            .collect();
        say!("{}", serde_json::to_string_pretty(&list)?);
        return Ok(());
    }
    if found.is_empty() {
        say!("no GPU: there is no Vulkan or Metal driver; smoe computes on the processor");
    }
    for device in found {
        let memory = device.memory.map_or_else(|| "unknown".to_owned(), |bytes| Bytes(bytes).to_string());
        say!("{device}");
        say!(
            "  {}, memory {memory}, subgroups of {}",
            kind(device.kind),
            match device.subgroup {
                (least, most) if least == most => least.to_string(),
                (least, most) => format!("{least} to {most}"),
            }
        );
        match (&device.unusable, device.kind) {
            (Some(why), _) => say!("  cannot be used: {why}"),
            (None, DeviceKind::Software) => {
                say!("  plays a GPU on the processor: only with --device gpu, for tests")
            }
            (None, _) => say!("  --device gpu"),
        }
    }
    if let Some(card) = cards {
        match card {
            Ok((name, memory)) => {
                say!("{name}\n  memory {}\n  --device cuda, for models that it holds whole", Bytes(memory));
            }
            Err(why) => say!("CUDA cannot be used: {why}"),
        }
    }
    Ok(())
}

/// The card that CUDA would take, with its memory, or why it cannot; nothing where there is no driver.
#[cfg(feature = "cuda")]
fn cuda() -> Option<Result<(String, u64), String>> {
    match smoe_cuda::Cuda::open() {
        Ok(card) => Some(Ok((card.facts().to_string(), card.facts().memory))),
        Err(smoe_cuda::CudaError::NoDriver | smoe_cuda::CudaError::NoDevice) => None,
        Err(error) => Some(Err(error.to_string())),
    }
}

/// There is no CUDA in this build.
#[cfg(all(feature = "gpu", not(feature = "cuda")))]
const fn cuda() -> Option<Result<(String, u64), String>> {
    None
}

/// Says that there is nothing to say.
#[cfg(not(feature = "gpu"))]
pub fn devices(_args: &DevicesArgs) -> Result<(), Failure> {
    say!("this build has no GPU support; smoe computes on the processor");
    Ok(())
}
