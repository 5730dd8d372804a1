//! What is in a vault is what was in the checkpoint.
#![allow(clippy::print_stderr)]

mod common;

use std::path::Path;

use common::{Tiny, Type, Vault, files, run, settings, shared};
use smoe_format::{BackboneTensor, Encoding, Projection, Uniform, Zero, original, record_crc};
use smoe_sculpt::{BackboneBits, Outcome, Settings, verify};
use std::sync::atomic::AtomicBool;

fn uniform(bits: u8, group: usize) -> Encoding {
    Encoding::Uniform(Uniform::new(bits, group, Zero::Symmetric).expect("valid"))
}

fn assert_whole(vault: &Path) {
    let report = verify(vault, Some(1), &(), &AtomicBool::new(false)).expect("verified");
    assert_eq!(report.problems, [], "{}", vault.display());
    assert!(report.checksums && report.records > 0);
}

/// Compares every tensor with the encoding of the checkpoint's.
fn assert_faithful(tiny: &Tiny, dir: &Path, settings: &Settings) {
    let vault = Vault::open(dir);
    let spec = &vault.experts.manifest().expect("manifest").spec;
    let encoded = |source: &common::Tensor, encoding: Encoding, rows: usize, cols: usize| {
        if encoding == source.encoding() {
            return source.bytes[..encoding.tensor_bytes(rows, cols).expect("small")].to_vec();
        }
        let mut bytes = vec![0; encoding.tensor_bytes(rows, cols).expect("small")];
        encoding.encode(&source.values()[..rows * cols], cols, &mut bytes);
        bytes
    };
    for tensor in BackboneTensor::all(spec) {
        let source = &tiny.tensors[&original::checkpoint_name(tensor)];
        let (rows, cols) = tensor.shape(spec);
        let wanted = match settings.backbone {
            _ if !tensor.may_be_coded() => source.encoding(),
            BackboneBits::Bf16 => source.encoding(),
            BackboneBits::Q8 => uniform(8, 64),
            BackboneBits::Q6 => uniform(6, 64),
            BackboneBits::Q5 => uniform(5, 64),
            BackboneBits::Q4 => uniform(4, 64),
        };
        let (encoding, bytes) = vault.backbone_tensor(&tensor.to_string());
        assert_eq!(encoding, wanted, "{tensor}");
        assert!(bytes == encoded(source, encoding, rows, cols), "{tensor}");
        if bytes.len() % 64 == 0 {
            let at = vault.backbone.get(&tensor.to_string()).expect("there").bytes.start;
            assert_eq!(at % 64, 0, "{tensor}");
        }
    }
    for record in &vault.experts.records {
        let table = vault.experts.table(record.key.layer).expect("table");
        let bytes = &vault.experts_bytes[record.offset as usize..(record.offset + record.len) as usize];
        assert_eq!(record.crc32c, Some(record_crc(record.key, bytes)));
        let mut used = 0;
        for (entry, projection) in table.tensors.iter().zip(Projection::ALL) {
            let name = format!(
                "model.layers.{}.mlp.experts.{}.{}_proj.weight",
                record.key.layer,
                record.key.expert,
                projection.name()
            );
            let source = &tiny.tensors[&name];
            let wanted =
                if settings.bits == 16 { source.encoding() } else { uniform(settings.bits, settings.group) };
            assert_eq!(entry.encoding, wanted, "{name}");
            let expected = encoded(source, wanted, entry.rows, entry.cols);
            assert!(bytes[entry.offset..entry.offset + entry.len] == expected, "{name}");
            assert!(bytes[used..entry.offset].iter().all(|&b| b == 0));
            used = entry.offset + entry.len;
        }
        assert!(bytes[used..].iter().all(|&b| b == 0));
    }
}

#[test]
fn every_tensor_is_the_encoding_of_the_checkpoints() {
    let dir = tempfile::tempdir().expect("dir");
    let mut n = 0;
    for (family, make) in [("qwen3", Tiny::qwen3 as fn(Type, u64) -> Tiny), ("deepseek", Tiny::deepseek)] {
        for ty in Type::ALL {
            let tiny = make(ty, 11);
            let shards = if ty == Type::F16 { 3 } else { 0 };
            let checkpoint = dir.path().join(format!("{family}-{ty:?}"));
            tiny.write(&checkpoint, shards);
            for (bits, group, backbone) in [
                (4, 64, BackboneBits::Q8),
                (16, 64, BackboneBits::Bf16),
                (2, 32, BackboneBits::Q4),
                (3, 128, BackboneBits::Q5),
                (5, 64, BackboneBits::Q6),
                (6, 32, BackboneBits::Bf16),
                (8, 128, BackboneBits::Q8),
            ] {
                let vault = dir.path().join(format!("vault-{n}"));
                n += 1;
                let settings = Settings { group, ..settings(bits, backbone) };
                assert_eq!(run(&checkpoint, &vault, &settings).expect("sculpted"), Outcome::Created);
                assert_faithful(&tiny, &vault, &settings);
                assert_whole(&vault);
            }
        }
    }
}

#[test]
fn mixed_types_are_kept_without_loss() {
    let dir = tempfile::tempdir().expect("dir");
    let mut tiny = Tiny::qwen3(Type::Bf16, 3);
    let name = "model.layers.1.mlp.experts.2.up_proj.weight";
    let half = Tiny::qwen3(Type::F16, 4).tensors[name].clone();
    tiny.tensors.insert(name.to_owned(), half);
    tiny.write(dir.path(), 0);
    let out = dir.path().join("vault");
    run(dir.path(), &out, &settings(16, BackboneBits::Bf16)).expect("sculpted");
    let vault = Vault::open(&out);
    let of = |layer: u32| vault.experts.table(layer).expect("table").tensors.map(|t| t.encoding);
    assert_eq!(of(1), [Encoding::Bf16, Encoding::F32, Encoding::Bf16]);
    assert_eq!(of(2), [Encoding::Bf16; 3]);
    let entry = vault.experts.table(1).expect("table").tensors[1];
    let record = vault.experts.records[2];
    let mut row = vec![0.0; entry.cols];
    let values = tiny.tensors[name].values();
    for r in 0..entry.rows {
        let bytes = &vault.experts_bytes[record.offset as usize + entry.offset..][..entry.len];
        entry.encoding.decode_row(bytes, entry.cols, r, &mut row);
        assert_eq!(row, values[r * entry.cols..(r + 1) * entry.cols]);
    }
}

#[test]
fn worker_count_and_sharding_do_not_change_a_byte() {
    let dir = tempfile::tempdir().expect("dir");
    let tiny = Tiny::deepseek(Type::Bf16, 5);
    tiny.write(&dir.path().join("one"), 0);
    let base = settings(4, BackboneBits::Q6);
    let mut all = Vec::new();
    for threads in [1, 2, 5] {
        let vault = dir.path().join(format!("v{threads}"));
        run(&dir.path().join("one"), &vault, &Settings { threads: Some(threads), ..base.clone() })
            .expect("sculpted");
        all.push(files(&vault));
    }
    assert!(all[0] == all[1] && all[0] == all[2]);
    // Sharded: another fingerprint in the head, the same weights.
    tiny.write(&dir.path().join("four"), 4);
    run(&dir.path().join("four"), &dir.path().join("sharded"), &base).expect("sculpted");
    let (a, b) = (Vault::open(&dir.path().join("v1")), Vault::open(&dir.path().join("sharded")));
    assert_eq!(a.experts.records, b.experts.records);
    assert!(a.backbone_bytes == b.backbone_bytes);
}

#[test]
fn side_files_travel_verbatim_and_a_single_file_is_a_checkpoint() {
    let dir = tempfile::tempdir().expect("dir");
    let mut tiny = Tiny::qwen3(Type::Bf16, 6);
    tiny.side.insert("chat_template.jinja".into(), b"{{ messages }}\r\n\n".to_vec());
    tiny.side.insert("generation_config.json".into(), b"{ \"eos_token_id\":[1,2] }".to_vec());
    tiny.side.insert("unrelated.txt".into(), b"stays".to_vec());
    tiny.write(dir.path(), 0);
    let out = dir.path().join("vault");
    run(&dir.path().join("model.safetensors"), &out, &settings(4, BackboneBits::Q8)).expect("sculpted");
    let made = files(&out);
    let names: Vec<&str> = made.keys().map(String::as_str).collect();
    assert_eq!(
        names,
        [
            "backbone.safetensors",
            "chat_template.jinja",
            "config.json",
            "experts.smoe",
            "generation_config.json"
        ]
    );
    for name in ["chat_template.jinja", "generation_config.json"] {
        assert_eq!(made[name], tiny.side[name]);
    }
    assert_eq!(made["config.json"], std::fs::read(dir.path().join("config.json")).expect("config"));
    assert_whole(&out);
}

#[test]
fn a_cut_model_is_the_beginning_of_the_whole_one() {
    let dir = tempfile::tempdir().expect("dir");
    let tiny = Tiny::qwen3(Type::Bf16, 7);
    tiny.write(dir.path(), 0);
    let out = dir.path().join("vault");
    let cut = Settings { max_layers: Some(2), max_experts: Some(3), ..settings(4, BackboneBits::Bf16) };
    run(dir.path(), &out, &cut).expect("sculpted");
    let vault = Vault::open(&out);
    let spec = &vault.experts.manifest().expect("manifest").spec;
    assert_eq!((spec.layers.len(), spec.moe.n_experts, vault.experts.records.len()), (2, 3, 3));
    assert_faithful(&tiny, &out, &cut);
    assert_whole(&out);
}

#[test]
fn the_fixtures_become_vaults_of_their_own_weights() {
    let dir = tempfile::tempdir().expect("dir");
    for name in ["qwen3_moe", "qwen3_moe_tied", "deepseek"] {
        let Some(checkpoint) = shared(&format!("fixtures/{name}")) else { return };
        for (bits, backbone) in [(16, BackboneBits::Bf16), (4, BackboneBits::Q8)] {
            let out = dir.path().join(format!("{name}-{bits}"));
            run(&checkpoint, &out, &settings(bits, backbone)).expect("sculpted");
            assert_whole(&out);
            assert_eq!(
                Vault::open(&out).experts.manifest().expect("manifest").spec.model_type,
                if name == "deepseek" { "deepseek" } else { "qwen3_moe" }
            );
        }
    }
}

#[test]
fn codes_and_scales_are_those_of_the_original() {
    let Some(checkpoint) = shared("fixtures/qwen3_moe") else { return };
    let Some(theirs) = shared("fixtures/original-vault-v2/qwen3_moe.smoe") else { return };
    let dir = tempfile::tempdir().expect("dir");
    let out = dir.path().join("vault");
    run(&checkpoint, &out, &settings(4, BackboneBits::Bf16)).expect("sculpted");
    let ours = Vault::open(&out);
    let bytes = std::fs::read(theirs).expect("original");
    let len = bytes.len() as u64;
    let head = ExpertFileHead::parse(&bytes, len);
    let mut tiles = 0;
    for ((record, descriptors), mine) in head.records.iter().zip(&head.original).zip(&ours.experts.records) {
        assert_eq!(record.key, mine.key);
        let table = head.table(record.key.layer).expect("table");
        let mut slot = vec![0; table.record_len];
        original::retile(&bytes[record.offset as usize..], descriptors, table, &mut slot);
        let my = &ours.experts_bytes[mine.offset as usize..(mine.offset + mine.len) as usize];
        assert!(slot == my, "{}", record.key);
        tiles += table.used_bytes() / 1088;
    }
    eprintln!("{} records, {tiles} tiles of codes and scales are equal", head.records.len());
    // And the backbone, tensor by tensor.
    let scout = shared("fixtures/original-vault-v2/qwen3_moe.scout.safetensors").expect("beside it");
    let scout = std::fs::read(scout).expect("scout");
    let scout = safetensors::SafeTensors::deserialize(&scout).expect("scout");
    let spec = &ours.experts.manifest().expect("manifest").spec;
    for tensor in BackboneTensor::all(spec) {
        let theirs = scout.tensor(&original::checkpoint_name(tensor)).expect("tensor");
        assert!(theirs.data() == ours.backbone_tensor(&tensor.to_string()).1, "{tensor}");
    }
}

struct ExpertFileHead;
impl ExpertFileHead {
    fn parse(bytes: &[u8], len: u64) -> smoe_format::ExpertFile {
        let head = smoe_format::ExpertFile::head_len(bytes, len).expect("head") as usize;
        smoe_format::ExpertFile::parse(&bytes[..head], len).expect("head")
    }
}
