//! The original's own file, where the shared fixtures are at hand.
#![allow(clippy::print_stderr, reason = "a test that skips says so")]

use std::path::PathBuf;

use smoe_format::{Backbone, Encoding, ExpertFile, original};

fn fixture(name: &str) -> Option<Vec<u8>> {
    let shared = std::env::var_os("SMOE_SHARED").map_or_else(
        || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared")),
        PathBuf::from,
    );
    let path = shared.join("fixtures").join(name);
    let bytes = std::fs::read(&path).ok();
    if bytes.is_none() {
        eprintln!("SKIPPED: no {}", path.display());
    }
    bytes
}

#[test]
fn the_originals_codes_are_those_of_our_rule_and_survive_retiling() {
    let Some(bytes) = fixture("original-vault-v2/qwen3_moe.smoe") else { return };
    let Some(backbone) = fixture("original-vault-v2/qwen3_moe.scout.safetensors") else { return };
    let Some(checkpoint) = fixture("qwen3_moe/model.safetensors") else { return };
    let head_len = ExpertFile::head_len(&bytes, bytes.len() as u64).expect("header") as usize;
    let file = ExpertFile::parse(&bytes[..head_len], bytes.len() as u64).expect("head");
    assert_eq!((file.version, file.records.len()), (2, 24));
    let backbone = Backbone::parse(&backbone, backbone.len() as u64).expect("backbone");
    let spec = file.spec(&backbone).expect("spec");
    assert_eq!((spec.d_model, spec.moe.top_k, spec.tied_head), (64, 2, false));

    let checkpoint = safetensors::SafeTensors::deserialize(&checkpoint).expect("checkpoint");
    let mut compared = 0;
    for (record, descriptors) in file.records.iter().zip(&file.original) {
        let table = file.table(record.key.layer).expect("layer");
        let raw = &bytes[record.offset as usize..][..record.len as usize];
        let mut slot = vec![0xaa; table.record_len];
        original::retile(raw, descriptors, table, &mut slot);
        for (tensor, name) in table.tensors.iter().zip(["gate", "up", "down"]) {
            let name = format!(
                "model.layers.{}.mlp.experts.{}.{name}_proj.weight",
                record.key.layer, record.key.expert
            );
            let source = checkpoint.tensor(&name).expect("tensor");
            let mut weights = vec![0.0; tensor.rows * tensor.cols];
            for (w, b) in weights.iter_mut().zip(source.data().chunks_exact(2)) {
                *w = smoe_format::half::bf16_to_f32(u16::from_le_bytes([b[0], b[1]]));
            }
            let mut expected = vec![0; tensor.len];
            let Encoding::Uniform(_) = tensor.encoding else { panic!("uniform") };
            tensor.encoding.encode(&weights, tensor.cols, &mut expected);
            assert!(slot[tensor.offset..][..tensor.len] == expected[..], "{name}");
            compared += weights.len();
        }
    }
    eprintln!("{compared} codes and their scales are equal");
}
