//! GPT-OSS as it is published: a float checkpoint's experts packed as MXFP4, and the floats that those mean.

use std::path::Path;

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

use crate::{read, write};

/// Magnitudes of a 4-bit float with two bits of exponent and one of mantissa.
const MAGNITUDES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
/// Columns that share a power of two.
const GROUP: usize = 32;

/// Writes the checkpoint in `from`, one of bf16 floats, with packed experts into `packed`, and with the F32 weights
/// that these mean into `floats`. Both exist already.
///
/// # Panics
/// If a file does not read or write, or the checkpoint has no such experts.
pub fn pack_gpt_oss(from: &Path, packed: &Path, floats: &Path) {
    let bytes = read(&from.join("model.safetensors"));
    let file = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    let mut of_packed: Vec<(String, Dtype, Vec<usize>, Vec<u8>)> = Vec::new();
    let mut of_floats = Vec::new();
    for (name, view) in file.tensors() {
        let whole = (name.clone(), view.dtype(), view.shape().to_vec(), view.data().to_vec());
        if !(name.ends_with(".gate_up_proj") || name.ends_with(".down_proj")) {
            of_packed.push(whole.clone());
            of_floats.push(whole);
            continue;
        }
        // [expert, inputs, outputs]; packed, outputs come before inputs.
        let &[n, inputs, outputs] = view.shape() else { panic!("{name} is {:?}", view.shape()) };
        let value = |i: usize| {
            f32::from_bits(u32::from(view.data()[2 * i + 1]) << 24 | u32::from(view.data()[2 * i]) << 16)
        };
        let groups = inputs / GROUP;
        let (mut blocks, mut scales) = (Vec::new(), Vec::new());
        let mut meant = vec![0.0f32; n * inputs * outputs];
        for expert in 0..n {
            for output in 0..outputs {
                for group in 0..groups {
                    let at = |i: usize| (expert * inputs + group * GROUP + i) * outputs + output;
                    let most = (0..GROUP).map(|i| value(at(i)).abs()).fold(0.0, f32::max);
                    // The largest magnitude lies between 4 and 8 of the power, as the format's authors have it.
                    let exponent = (most.max(1e-30).log2().floor() as i32 - 2).clamp(-127, 127);
                    let power = 2f32.powi(exponent);
                    let nibbles: Vec<u8> = (0..GROUP)
                        .map(|i| {
                            let w = value(at(i));
                            let far = |code: &usize| (MAGNITUDES[*code] * power - w.abs()).abs();
                            let code = (0..8).min_by(|a, b| far(a).total_cmp(&far(b))).expect("eight");
                            meant[at(i)] = MAGNITUDES[code] * power * w.signum();
                            code as u8 | u8::from(w < 0.0) << 3
                        })
                        .collect();
                    blocks.extend(nibbles.chunks_exact(2).map(|pair| pair[0] | pair[1] << 4));
                    scales.push((exponent + 127) as u8);
                }
            }
        }
        of_packed.push((format!("{name}_blocks"), Dtype::U8, vec![n, outputs, groups, GROUP / 2], blocks));
        of_packed.push((format!("{name}_scales"), Dtype::U8, vec![n, outputs, groups], scales));
        let meant = meant.iter().flat_map(|w| w.to_le_bytes()).collect();
        of_floats.push((name, Dtype::F32, vec![n, inputs, outputs], meant));
    }
    assert!(of_packed.len() > of_floats.len(), "{} has experts", from.display());
    let mut config: serde_json::Value =
        serde_json::from_slice(&read(&from.join("config.json"))).expect("JSON");
    for (dir, tensors) in [(floats, of_floats), (packed, of_packed)] {
        let views = tensors.iter().map(|(name, dtype, shape, bytes)| {
            (name, TensorView::new(*dtype, shape.clone(), bytes).expect("the right length"))
        });
        let bytes = safetensors::serialize(views, None).expect("distinct names");
        write(&dir.join("model.safetensors"), &bytes);
        write(&dir.join("config.json"), config.to_string().as_bytes());
        config["quantization_config"] = serde_json::json!({"quant_method": "mxfp4"});
    }
}
