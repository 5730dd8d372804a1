//! Vaults of GGUF files.
#![allow(clippy::print_stderr, clippy::unwrap_used, reason = "what fails is the test")]

mod common;
#[path = "common/gguf.rs"]
mod gguf;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use smoe_testkit::fixtures;
use smoe_testkit::gguf::{self as writer, Gguf, Meta};

use common::{Random, Tensor, Tiny, Type, Vault, Watch, files, run, settings};
use gguf::{KINDS, blocks, of_checkpoint};
use serde_json::{Value, json};
use smoe_format::backbone::LayerPart;
use smoe_format::{BackboneTensor, Encoding, Projection, Table, Uniform, Zero};
use smoe_sculpt::synth::mixture_of_dense;
use smoe_sculpt::{
    BackboneBits, Checkpoint, Outcome, Recipe, SculptError, Settings, measure_error, sculpt, verify,
};

fn load(dir: &Path) -> (Value, BTreeMap<String, Tensor>) {
    let config = serde_json::from_slice(&std::fs::read(dir.join("config.json")).unwrap()).unwrap();
    let bytes = std::fs::read(dir.join("model.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let tensors = file.tensors().into_iter().map(|(name, view)| {
        let (dtype, shape) = (format!("{:?}", view.dtype()), view.shape().to_vec());
        (name, Tensor { dtype, shape, bytes: view.data().to_vec() })
    });
    (config, tensors.collect())
}

fn assert_whole(vault: &Path) {
    let report = verify(vault, Some(1), &(), &AtomicBool::new(false)).unwrap();
    assert_eq!(report.problems, [], "{}", vault.display());
}

/// Names, stacks, permutations and keys of every architecture: what comes out of llama.cpp's form of a checkpoint
/// is what comes out of the checkpoint.
#[test]
fn a_checkpoint_and_its_gguf_file_become_the_same_vault() {
    let dir = tempfile::tempdir().unwrap();
    for family in fixtures::FAMILIES {
        let Some(checkpoint) = fixtures::fixture(family) else { continue };
        let first = dir.path().join(format!("{family}-safetensors"));
        let raw = settings(16, BackboneBits::Bf16);
        run(&checkpoint, &first, &raw).unwrap();
        let (config, tensors) = writer::load(&checkpoint);
        for split_heads in [false, true] {
            let path = dir.path().join(format!("{family}-{split_heads}.gguf"));
            writer::of_checkpoint(&config, &tensors, split_heads).write(&path);
            let second = dir.path().join(format!("{family}-{split_heads}"));
            // Floats, however they lie.
            assert!(!Checkpoint::open(&path).unwrap().is_coded(), "{family}");
            run(&path, &second, &raw).unwrap();
            let (a, b) = (Vault::open(&first), Vault::open(&second));
            let spec = |vault: &Vault| {
                let mut spec = vault.experts.manifest().unwrap().spec.clone();
                // GGUF files have no part for images.
                spec.model_type = spec.model_type.trim_end_matches("_text").to_owned();
                spec
            };
            assert_eq!(spec(&a), spec(&b), "{family}");
            assert_eq!(a.experts.records.len(), b.experts.records.len());
            for (x, y) in a.experts.records.iter().zip(&b.experts.records) {
                let bytes = |vault: &Vault, record: &smoe_format::expert_file::RecordEntry| {
                    vault.experts_bytes[record.offset as usize..][..record.len as usize].to_vec()
                };
                assert!(bytes(&a, x) == bytes(&b, y), "{family} {}", x.key);
            }
            for tensor in BackboneTensor::all(&spec(&a)) {
                let (x, y) = (a.backbone_tensor(&tensor.to_string()), b.backbone_tensor(&tensor.to_string()));
                // Keys and values that were put together again are not copied, but widened.
                let values = |(encoding, bytes): (Encoding, &[u8])| {
                    let (rows, cols) = tensor.shape(&spec(&a));
                    let mut values = vec![0.0; rows * cols];
                    encoding.decode_row(bytes, rows * cols, 0, &mut values);
                    values
                };
                if matches!(tensor, BackboneTensor::Layer(_, LayerPart::DecayLog)) {
                    // Its exponential is what the file has.
                    let near = values(x).iter().zip(values(y)).all(|(a, b)| (a - b).abs() < 1e-6);
                    assert!(near, "{family} {tensor}");
                    continue;
                }
                assert!(values(x) == values(y), "{family} {tensor}");
            }
            assert_whole(&second);
        }
    }
}

/// A model whose rows are whole blocks of every type.
fn wide() -> Tiny {
    let config = json!({
        "model_type": "qwen3_moe", "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 96,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "num_experts": 3, "num_experts_per_tok": 2,
        "moe_intermediate_size": 256, "norm_topk_prob": true, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "tie_word_embeddings": false, "rope_theta": 1e6,
    });
    Tiny::fill(config, Type::Bf16, 3)
}

/// Its file with all matrices but the routers in blocks of `kind`, and what they mean.
fn coded(kind: &str, seed: u64) -> (Gguf, BTreeMap<String, Vec<f32>>) {
    let tiny = wide();
    let mut file = of_checkpoint(&tiny.config, &tiny.tensors, false);
    let number = KINDS.iter().find(|k| k.1 == kind).unwrap().0;
    let mut random = Random(seed * 2 + 1);
    let mut meant = BTreeMap::new();
    for (name, shape, ty, bytes) in &mut file.tensors {
        if shape.len() > 1 && !name.contains("ffn_gate_inp") {
            let values;
            (*bytes, values) = blocks(kind, shape.iter().product(), &mut random);
            *ty = number;
            meant.insert(name.clone(), values);
        }
    }
    (file, meant)
}

/// Calls `check` with each coded tensor of a vault: name, encoding, bytes, rows, columns, what it should be.
fn each_tensor(
    vault: &Path,
    meant: &BTreeMap<String, Vec<f32>>,
    mut check: impl FnMut(&str, Encoding, &[u8], usize, &[f32]),
) {
    let vault = Vault::open(vault);
    let spec = &vault.experts.manifest().unwrap().spec;
    let mut seen = 0;
    for record in &vault.experts.records {
        let table = vault.experts.table(record.key.layer).unwrap();
        let bytes = &vault.experts_bytes[record.offset as usize..][..record.len as usize];
        for (entry, projection) in table.tensors.iter().zip(Projection::ALL) {
            let name = format!("blk.{}.ffn_{}_exps.weight", record.key.layer, projection.name());
            let n = entry.rows * entry.cols;
            let values = &meant[&name][record.key.expert as usize * n..][..n];
            check(&name, entry.encoding, &bytes[entry.offset..entry.offset + entry.len], entry.cols, values);
            seen += 1;
        }
    }
    let mut backbone = vec![("embed".to_owned(), "token_embd.weight".to_owned())];
    backbone.push(("head".into(), "output.weight".into()));
    for layer in 0..spec.layers.len() {
        for (ours, theirs) in [("q", "attn_q"), ("k", "attn_k"), ("v", "attn_v"), ("o", "attn_output")] {
            backbone.push((format!("layers.{layer}.{ours}"), format!("blk.{layer}.{theirs}.weight")));
        }
    }
    for (ours, theirs) in backbone {
        let (encoding, bytes) = vault.backbone_tensor(&ours);
        let cols = if theirs.contains("attn_output") { 256 } else { spec.d_model };
        check(&theirs, encoding, bytes, cols, &meant[&theirs]);
        seen += 1;
    }
    assert!(seen > 20);
}

fn decoded(encoding: Encoding, bytes: &[u8], cols: usize, n: usize) -> Vec<f32> {
    let mut values = vec![0.0; n];
    for (row, out) in values.chunks_exact_mut(cols).enumerate() {
        encoding.decode_row(bytes, cols, row, out);
    }
    values
}

#[test]
fn blocks_are_kept_to_the_bit_or_nearly() {
    let dir = tempfile::tempdir().unwrap();
    // Experts may have level tables, the backbone has steps.
    let expected = |kind: &str, expert: bool| {
        let (bits, group) = match kind {
            "MXFP4" if expert => return Encoding::Table(Table::MXFP4),
            "IQ4_NL" if expert => return Encoding::Table(Table::IQ4_NL),
            "Q4_0" | "Q4_1" | "Q4_K" => (4, 32),
            "Q5_0" | "Q5_1" | "Q5_K" | "MXFP4" => (5, 32),
            "Q8_0" | "IQ4_NL" => (8, 32),
            _ => (6, 16),
        };
        Encoding::Uniform(Uniform::new(bits, group, Zero::Affine).unwrap())
    };
    let quiet = AtomicBool::new(false);
    for (i, (_, kind, _)) in KINDS.into_iter().enumerate() {
        let (file, meant) = coded(kind, i as u64);
        let path = dir.path().join(format!("{kind}.gguf"));
        file.write(&path);
        let vault = dir.path().join(kind);
        let asked = Settings { threads: Some(2), ..Settings::default() };
        assert_eq!(run(&path, &vault, &asked).unwrap(), Outcome::Created);
        assert_whole(&vault);
        let exact = !kind.ends_with("_K");
        each_tensor(&vault, &meant, |name, encoding, bytes, cols, values| {
            assert_eq!(encoding, expected(kind, name.contains("_exps")), "{kind} {name}");
            let found = decoded(encoding, bytes, cols, values.len());
            if exact {
                assert!(found == values, "{kind} {name}");
            } else {
                // A scale and a minimum of up to 64 * 0.02 are rounded to 11 bits.
                let far = found.iter().zip(values).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(far > 0.0 && far < 0.1, "{kind} {name} {far}");
            }
        });
        for error in measure_error(&path, &vault, Some(1), &(), &quiet).unwrap() {
            let coded = error.kind != "router" && !error.kind.ends_with("norm");
            if exact || !coded {
                assert_eq!(error.max_error, 0.0, "{kind} {}", error.kind);
            } else {
                assert!(error.snr_db > 60.0 && error.snr_db.is_finite(), "{kind} {error:?}");
            }
        }
        // Nothing may be lost: the same vault, or none.
        let lossless =
            Settings { bits: 16, backbone: BackboneBits::Bf16, lossless: true, ..Settings::default() };
        let out = dir.path().join(format!("{kind}-lossless"));
        match run(&path, &out, &lossless) {
            Ok(_) => {
                assert!(exact);
                let (a, b) = (Vault::open(&vault), Vault::open(&out));
                assert!(a.backbone_bytes == b.backbone_bytes);
                let data = |vault: &Vault| vault.experts_bytes[vault.experts.data_offset as usize..].to_vec();
                assert!(data(&a) == data(&b));
            }
            Err(SculptError::Lossy { tensor, form, .. }) => {
                assert!(!exact && form == kind && tensor.starts_with("model."), "{tensor} {form}");
                assert!(!out.exists());
            }
            Err(other) => panic!("{other}"),
        }
        // And coded anew from the weights.
        let anew = Settings {
            bits: 6,
            recipe: Recipe::Absmax,
            keep_experts: false,
            keep_backbone: false,
            ..Settings::default()
        };
        let out = dir.path().join(format!("{kind}-anew"));
        run(&path, &out, &anew).unwrap();
        each_tensor(&out, &meant, |name, encoding, bytes, cols, values| {
            assert!(
                matches!(encoding, Encoding::Uniform(u) if u.group() == 64 && u.zero() == Zero::Symmetric)
            );
            let mut wanted = vec![0; bytes.len()];
            encoding.encode(values, cols, &mut wanted);
            assert!(wanted == bytes, "{kind} {name}");
        });
    }
}

/// Gate in one type, up in another, down in a third, as mixtures of quantised files have them: kept side by side.
#[test]
fn projections_of_unlike_types_stand_in_one_record() {
    let dir = tempfile::tempdir().unwrap();
    let (mut file, mut meant) = coded("MXFP4", 11);
    let kinds = [("gate", "MXFP4"), ("up", "IQ4_NL"), ("down", "Q6_K")];
    for (part, kind) in &kinds[1..] {
        let (other, values) = coded(kind, 12);
        let ours = format!("ffn_{part}_exps");
        for (to, from) in file.tensors.iter_mut().zip(&other.tensors).filter(|(to, _)| to.0.contains(&ours)) {
            to.clone_from(from);
            meant.insert(to.0.clone(), values[&to.0].clone());
        }
    }
    let path = dir.path().join("m.gguf");
    file.write(&path);
    let out = dir.path().join("v");
    run(&path, &out, &Settings::default()).unwrap();
    assert_whole(&out);
    let names: Vec<String> =
        Vault::open(&out).experts.layers[0].tensors.iter().map(|t| t.encoding.to_string()).collect();
    assert_eq!(names, ["mxfp4/32", "iq4_nl/32", "q6a/16"]);
    each_tensor(&out, &meant, |name, encoding, bytes, cols, values| {
        if !name.contains("ffn_down") {
            assert!(decoded(encoding, bytes, cols, values.len()) == values, "{name}");
        }
    });
}

/// Queries, keys and values in one type, gates in another: llama.cpp has them apart, checkpoints joined.
#[test]
fn what_is_joined_may_be_of_unlike_types() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = fixtures::fixture("qwen3_next").unwrap();
    let (config, tensors) = writer::load(&checkpoint);
    let mut file = writer::of_checkpoint(&config, &tensors, false);
    let (mut random, mut meant) = (Random(5), BTreeMap::new());
    for (name, shape, ty, bytes) in &mut file.tensors {
        if name.ends_with("attn_gate.weight") {
            let values;
            (*bytes, values) = blocks("Q8_0", shape.iter().product(), &mut random);
            *ty = 8;
            meant.insert(name.clone(), values);
        }
    }
    let path = dir.path().join("m.gguf");
    file.write(&path);
    let (plain, unlike) = (dir.path().join("plain"), dir.path().join("unlike"));
    let raw = settings(16, BackboneBits::Bf16);
    run(&checkpoint, &plain, &raw).unwrap();
    run(&path, &unlike, &raw).unwrap();
    assert_whole(&unlike);
    let (plain, unlike) = (Vault::open(&plain), Vault::open(&unlike));
    let spec = &unlike.experts.manifest().unwrap().spec;
    let values = |vault: &Vault, layer: usize, part: LayerPart| {
        let tensor = BackboneTensor::Layer(layer as u32, part);
        let ((encoding, bytes), (rows, cols)) =
            (vault.backbone_tensor(&tensor.to_string()), tensor.shape(spec));
        decoded(encoding, bytes, cols, rows * cols)
    };
    let layers: Vec<usize> = spec.delta_layers().collect();
    assert_eq!(layers.len(), meant.len());
    for layer in layers {
        let gate = &meant[&format!("blk.{layer}.attn_gate.weight")];
        assert!(values(&unlike, layer, LayerPart::OGate) == *gate, "layer {layer}");
        for part in [LayerPart::Q, LayerPart::K, LayerPart::V] {
            assert!(values(&unlike, layer, part) == values(&plain, layer, part), "layer {layer} {part:?}");
        }
    }
}

/// A block of MXFP4 whose power of two is no f16: coded with an error, and refused where none is allowed.
#[test]
fn powers_of_mxfp4_that_no_f16_has_are_told() {
    let dir = tempfile::tempdir().unwrap();
    let (mut file, _) = coded("MXFP4", 13);
    let path = dir.path().join("m.gguf");
    let lossless = Settings { bits: 16, backbone: BackboneBits::Bf16, lossless: true, ..Settings::default() };
    let entry = file.tensors.iter().position(|t| t.0 == "blk.1.ffn_up_exps.weight").unwrap();
    // The second expert's first block: 2^-27 times codes that are not all 0; then all 0.
    let at = 256 * 256 / 32 * 17;
    let block = &mut file.tensors[entry].3[at..at + 17];
    block.fill(0x21);
    block[0] = 100;
    file.write(&path);
    match run(&path, &dir.path().join("no"), &lossless) {
        Err(SculptError::Lossy { tensor, form, .. }) => {
            assert_eq!((tensor.as_str(), form), ("model.layers.1.mlp.experts.1.up_proj.weight", "MXFP4"));
        }
        other => panic!("{other:?}"),
    }
    run(&path, &dir.path().join("near"), &Settings::default()).unwrap();
    let quiet = AtomicBool::new(false);
    let errors = measure_error(&path, &dir.path().join("near"), Some(1), &(), &quiet).unwrap();
    let worst = errors.iter().find(|e| e.kind.contains("up")).unwrap().max_error;
    assert!(worst > 0.0 && worst <= 2f64.powi(-27), "{worst}");
    file.tensors[entry].3[at + 1..at + 17].fill(0x80);
    file.write(&path);
    run(&path, &dir.path().join("yes"), &lossless).unwrap();
}

#[test]
fn a_scale_beyond_f16_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let (mut file, _) = coded("Q8_0", 1);
    let entry = file.tensors.iter_mut().find(|t| t.0 == "blk.1.ffn_up_exps.weight").unwrap();
    // 1024.0: times 128 it is out of reach. The second expert's first block.
    let at = 256 * 256 / 32 * 34;
    entry.3[at..at + 2].copy_from_slice(&0x6400u16.to_le_bytes());
    let path = dir.path().join("m.gguf");
    file.write(&path);
    match run(&path, &dir.path().join("v"), &Settings::default()) {
        Err(SculptError::Range { tensor, found, .. }) => {
            assert_eq!((tensor.as_str(), found), ("model.layers.1.mlp.experts.1.up_proj.weight", -131_072.0));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn split_files_are_one_checkpoint_by_any_part() {
    let dir = tempfile::tempdir().unwrap();
    let (file, _) = coded("Q4_0", 5);
    let whole = dir.path().join("whole.gguf");
    file.write(&whole);
    run(&whole, &dir.path().join("a"), &Settings::default()).unwrap();
    let parts = file.write_split(dir.path(), "part", 4);
    for (i, part) in parts.iter().enumerate() {
        let out = dir.path().join(format!("b{i}"));
        run(part, &out, &Settings::default()).unwrap();
        let (a, b) = (Vault::open(&dir.path().join("a")), Vault::open(&out));
        assert!(a.backbone_bytes == b.backbone_bytes);
    }
    std::fs::remove_file(&parts[2]).unwrap();
    let missing = Checkpoint::open(&parts[0]).unwrap_err().to_string();
    assert!(missing.contains("part-00003-of-00004.gguf"), "{missing}");
    std::fs::copy(&parts[1], &parts[2]).unwrap();
    let twice = Checkpoint::open(&parts[0]).unwrap_err().to_string();
    assert!(twice.contains("number"), "{twice}");
    let renamed = dir.path().join("renamed.gguf");
    std::fs::copy(&parts[0], &renamed).unwrap();
    let named = Checkpoint::open(&renamed).unwrap_err().to_string();
    assert!(named.contains("-of-00004.gguf"), "{named}");
}

#[test]
fn stopped_work_goes_on_with_the_same_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let (mut file, _) = coded("Q5_K", 7);
    tokens(&mut file, "qwen2");
    let path = dir.path().join("m.gguf");
    file.write(&path);
    run(&path, &dir.path().join("a"), &Settings::default()).unwrap();
    let out = dir.path().join("b");
    let mut stops = 0;
    for _ in 0..1000 {
        let stop = AtomicBool::new(false);
        let watch = Watch::new(&stop, 300_000);
        let one = Settings { threads: Some(1), ..Settings::default() };
        match sculpt(&path, &out, &one, &watch, &stop) {
            Ok(_) => break,
            Err(SculptError::Cancelled { .. }) => stops += 1,
            Err(other) => panic!("{other}"),
        }
        if stops == 3 {
            // The file is another one now.
            let mut other = file.clone();
            let at = other.tensors.len() - 1;
            other.tensors[at].3[40] ^= 1;
            other.write(&path);
            let refused = run(&path, &out, &Settings::default());
            assert!(matches!(refused, Err(SculptError::OtherPartial { .. })), "{refused:?}");
            file.write(&path);
            // Written anew: begin again.
            let force = Settings { force: true, ..Settings::default() };
            run(&path, &out, &force).unwrap();
            break;
        }
    }
    assert!(stops > 2);
    assert!(files(&dir.path().join("a")) == files(&out));
    assert_eq!(run(&path, &out, &Settings::default()).unwrap(), Outcome::AlreadyComplete);
}

#[test]
fn models_without_experts_are_refused_plainly() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    for (arch, experts) in [("qwen3", None), ("llama", None), ("llama", Some(0)), ("gemma3", None)] {
        let mut file = Gguf::default();
        file.set("general.architecture", Meta::str(arch));
        if let Some(n) = experts {
            file.set(&format!("{arch}.expert_count"), Meta::U32(n));
        }
        file.write(&path);
        let error = Checkpoint::open(&path).unwrap_err();
        assert!(matches!(&error, SculptError::Dense { architecture, .. } if architecture == arch), "{error}");
        assert!(error.to_string().contains("no experts"));
    }
    let mut file = Gguf::default();
    file.set("general.architecture", Meta::str("dbrx"));
    file.set("dbrx.expert_count", Meta::U32(16));
    file.write(&path);
    let error = Checkpoint::open(&path).unwrap_err().to_string();
    assert!(error.contains("dbrx") && error.contains("qwen3moe"), "{error}");
}

/// A dense model of llama's architecture.
fn dense(d: usize, ff: usize) -> Gguf {
    let mut file = Gguf::default();
    file.set("general.architecture", Meta::str("llama"));
    for (key, n) in [
        ("block_count", 2),
        ("context_length", 64),
        ("embedding_length", d),
        ("feed_forward_length", ff),
        ("attention.head_count", 2),
        ("attention.head_count_kv", 1),
    ] {
        file.set(&format!("llama.{key}"), Meta::U32(n as u32));
    }
    file.set("llama.attention.layer_norm_rms_epsilon", Meta::F32(1e-5));
    let mut random = Random(77);
    let mut put = |name: String, shape: &[usize]| {
        let values: Vec<f32> = (0..shape.iter().product()).map(|_| random.weight()).collect();
        let bytes = Tensor::new(Type::Bf16, shape, &values).bytes;
        file.tensors.push((name, shape.to_vec(), 30, bytes));
    };
    put("token_embd.weight".into(), &[40, d]);
    put("output_norm.weight".into(), &[d]);
    for layer in 0..2 {
        for (part, shape) in [
            ("attn_norm", &[d][..]),
            ("ffn_norm", &[d]),
            ("attn_q", &[d, d]),
            ("attn_k", &[d / 2, d]),
            ("attn_v", &[d / 2, d]),
            ("attn_output", &[d, d]),
            ("ffn_gate", &[ff, d]),
            ("ffn_up", &[ff, d]),
            ("ffn_down", &[d, ff]),
        ] {
            put(format!("blk.{layer}.{part}.weight"), shape);
        }
    }
    file
}

/// Gate and up by rows, down by columns and times the number of experts, whose weights are equal.
#[test]
fn a_dense_model_is_cut_into_experts_that_are_its_function() {
    let dir = tempfile::tempdir().unwrap();
    let (path, out) = (dir.path().join("m.gguf"), dir.path().join("out"));
    let (d, ff, n) = (32, 64, 4);
    let file = dense(d, ff);
    file.write(&path);
    mixture_of_dense(&path, n, &out).unwrap();
    let (config, tensors) = load(&out);
    assert_eq!((&config["num_local_experts"], &config["num_experts_per_tok"]), (&json!(n), &json!(n)));
    assert_eq!(config["intermediate_size"], ff / n);
    let whole = |name: &str| {
        let (_, shape, _, bytes) = file.tensors.iter().find(|t| t.0 == name).unwrap();
        Tensor { dtype: "BF16".to_owned(), shape: shape.clone(), bytes: bytes.clone() }.values()
    };
    let e = ff / n;
    for layer in 0..2 {
        let moe = format!("model.layers.{layer}.block_sparse_moe");
        assert!(tensors[&format!("{moe}.gate.weight")].values().iter().all(|&w| w == 0.0));
        for expert in 0..n {
            let of = |w: &str| tensors[&format!("{moe}.experts.{expert}.{w}.weight")].values();
            for (w, part) in [("w1", "ffn_gate"), ("w3", "ffn_up")] {
                let rows = &whole(&format!("blk.{layer}.{part}.weight"))[expert * e * d..][..e * d];
                assert_eq!(of(w), rows, "{layer} {expert} {w}");
            }
            let down = whole(&format!("blk.{layer}.ffn_down.weight"));
            for (r, row) in of("w2").chunks_exact(e).enumerate() {
                for (c, &w) in row.iter().enumerate() {
                    assert_eq!(w, n as f32 * down[r * ff + expert * e + c]);
                }
            }
        }
        let v = tensors[&format!("model.layers.{layer}.self_attn.v_proj.weight")].values();
        assert_eq!(v, whole(&format!("blk.{layer}.attn_v.weight")));
    }
    run(&out, &dir.path().join("vault"), &settings(4, BackboneBits::Q8)).unwrap();

    for n in [3, 128] {
        assert!(matches!(mixture_of_dense(&path, n, &out), Err(SculptError::Metadata { .. })), "{n}");
    }
    small().write(&path);
    assert!(matches!(mixture_of_dense(&path, 4, &out), Err(SculptError::Metadata { .. })));
}

#[test]
fn types_that_are_not_read_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    let (mut file, _) = coded("Q4_K", 2);
    let entry = file.tensors.iter_mut().find(|t| t.0 == "blk.0.attn_v.weight").unwrap();
    entry.2 = 10;
    entry.3 = vec![0; 128 * 84];
    file.write(&path);
    let error = run(&path, &dir.path().join("v"), &Settings::default()).unwrap_err().to_string();
    assert!(error.contains("model.layers.0.self_attn.v_proj.weight") && error.contains("Q2_K"), "{error}");
    // All of them at once, and what can be done.
    let entry = file.tensors.iter_mut().find(|t| t.0 == "blk.1.ffn_up_exps.weight").unwrap();
    entry.2 = 16;
    entry.3 = vec![0; 3 * 256 * 66];
    file.write(&path);
    let error = run(&path, &dir.path().join("v"), &Settings::default()).unwrap_err().to_string();
    for part in [
        "IQ2_XXS (3, such as `model.layers.1.mlp.experts.0.up_proj.weight`)",
        "Q2_K (1, such as `model.layers.0.self_attn.v_proj.weight`)",
        "take a file of those",
    ] {
        assert!(error.contains(part), "{error}");
    }
}

/// A small file that is read whole in no time.
fn small() -> Gguf {
    let tiny = Tiny::qwen3(Type::Bf16, 1);
    let mut file = of_checkpoint(&tiny.config, &tiny.tensors, false);
    tokens(&mut file, "qwen2");
    file
}

#[test]
fn what_contradicts_itself_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    let (whole, data) = small().bytes();
    let refused = |bytes: &[u8], what: &str| {
        std::fs::write(&path, bytes).unwrap();
        let error = Checkpoint::open(&path).unwrap_err().to_string();
        assert!(error.contains(what), "{what}: {error}");
    };
    let with = |at: usize, new: &[u8]| {
        let mut bytes = whole.clone();
        bytes[at..at + new.len()].copy_from_slice(new);
        bytes
    };
    std::fs::write(&path, &whole).unwrap();
    Checkpoint::open(&path).unwrap();
    refused(&whole[..3], "ends");
    refused(&with(0, b"GGML"), "GGUF");
    refused(&with(4, &1u32.to_le_bytes()), "version 1");
    refused(&with(4, &3u32.to_be_bytes()), "big-endian");
    refused(&with(8, &u64::MAX.to_le_bytes()), "tensors");
    refused(&with(16, &u64::MAX.to_le_bytes()), "entries of metadata");
    refused(&with(24, &u64::MAX.to_le_bytes()), "a key of 18446744073709551615 bytes");
    refused(&whole[..whole.len() - 4000], "cut off");
    // The table's entries by their names.
    let find = |name: &str| {
        let mut text = (name.len() as u64).to_le_bytes().to_vec();
        text.extend(name.as_bytes());
        whole.windows(text.len()).position(|w| w == text).unwrap() + text.len()
    };
    let at = find("blk.1.attn_q.weight");
    refused(&with(at, &9u32.to_le_bytes()), "`blk.1.attn_q.weight` has 9 dimensions");
    refused(&with(at + 4, &(1u64 << 60).to_le_bytes()), "a dimension of 1152921504606846976");
    refused(&with(at + 4, &0u64.to_le_bytes()), "a dimension of 0");
    refused(&with(at + 20, &2u32.to_le_bytes()), "no whole blocks of Q4_0");
    refused(&with(at + 20, &999u32.to_le_bytes()), "999");
    refused(&with(at + 24, &8u64.to_le_bytes()), "no multiple of 32");
    refused(&with(at + 24, &0u64.to_le_bytes()), "overlaps");
    refused(&with(at + 24, &(u64::MAX - 31).to_le_bytes()), "`blk.1.attn_q.weight`");
    assert!(data < whole.len());
    for (change, what) in [
        (
            Box::new(|f: &mut Gguf| f.tensors.push(f.tensors[0].clone())) as Box<dyn Fn(&mut Gguf)>,
            "is in m.gguf",
        ),
        (Box::new(|f| f.meta.push(f.meta[2].clone())), "stands twice"),
        (Box::new(|f| f.set("general.alignment", Meta::U32(24))), "general.alignment"),
        (Box::new(|f| f.set("qwen3moe.block_count", Meta::str("many"))), "qwen3moe.block_count"),
        (Box::new(|f| f.set("qwen3moe.block_count", Meta::U32(u32::MAX))), "needs at most 4096"),
        (
            Box::new(|f| f.set("general.architecture", Meta::Str("x".repeat(5000)))),
            "`general.architecture` is a text, this build needs the name of an architecture",
        ),
        (Box::new(|f| (0..2).for_each(|_| f.meta.push(("k".repeat(5000), Meta::U32(1))))), "kkk..."),
        (Box::new(|f| f.meta.retain(|m| m.0 != "qwen3moe.embedding_length")), "embedding_length` is missing"),
        (Box::new(|f| f.tensors.push(("rope_freqs.weight".into(), vec![4], 0, vec![0; 16]))), "rope_freqs"),
        (
            Box::new(|f| f.set("qwen3moe.rope.scaling.type", Meta::str("longrope"))),
            "rope.scaling.type` is \"longrope\", this build needs none, linear or yarn",
        ),
        (Box::new(|f| f.set("qwen3moe.expert_gating_func", Meta::U32(2))), "needs 1 (softmax)"),
        (
            Box::new(|f| f.set("qwen3moe.expert_count", Meta::U32(9999))),
            "experts, `qwen3moe.expert_count` says 9999",
        ),
    ] {
        let mut file = small();
        change(&mut file);
        refused(&file.bytes().0, what);
    }
}

/// Keys that a file need not have mean what llama.cpp takes for them; what would be a guess is refused.
#[test]
fn keys_that_are_left_out_are_llama_cpps_or_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (path, vault) = (dir.path().join("m.gguf"), dir.path().join("v"));
    let raw = Settings { force: true, ..settings(16, BackboneBits::Bf16) };
    let spec = |file: &Gguf| {
        file.write(&path);
        run(&path, &vault, &raw).map(|_| Vault::open(&vault).experts.manifest().unwrap().spec.clone())
    };
    let without = |file: &Gguf, key: &str| {
        let mut file = file.clone();
        let before = file.meta.len();
        file.meta.retain(|(name, _)| !name.ends_with(key));
        assert!(file.meta.len() < before, "{key}");
        file
    };
    let refused = |file: &Gguf, what: &str| {
        let error = spec(file).unwrap_err().to_string();
        assert!(error.contains(what), "{what}: {error}");
    };
    for family in ["glm4_moe", "qwen3_next", "qwen3_5_moe", "granitemoe", "deepseek_v32", "glm_moe_dsa"] {
        let Some(checkpoint) = fixtures::fixture(family) else { continue };
        let (config, tensors) = writer::load(&checkpoint);
        let file = writer::of_checkpoint(&config, &tensors, true);
        match family {
            "granitemoe" => {
                let found = spec(&without(&file, ".attention.scale")).unwrap();
                assert!((found.attention.score_scale - 1.0).abs() < 1e-12, "{}", found.attention.score_scale);
                let mut off = file.clone();
                off.set("granitemoe.rope.scaling.finetuned", Meta::Bool(false));
                refused(&off, "rope.scaling.finetuned` is false");
            }
            "deepseek_v32" | "glm_moe_dsa" => {
                refused(&without(&file, ".expert_group_count"), "expert_group_count` is missing");
                refused(&without(&file, ".expert_weights_scale"), "expert_weights_scale` is missing");
                let mut coded = file;
                let keys = coded.tensors.iter_mut().find(|t| t.0.ends_with(".attn_k_b.weight")).unwrap();
                let weights: u64 = keys.1.iter().map(|&n| n as u64).product();
                (keys.2, keys.3) = (28, vec![0; 8 * weights as usize]);
                refused(&coded, "F64 (2, such as `model.layers.0.self_attn.kv_b_proj.weight`)");
            }
            _ => {
                let found = spec(&without(&file, ".rope.dimension_count")).unwrap();
                assert_eq!(found.rope.dim, None, "{family}: the whole head");
            }
        }
    }
}

#[test]
fn a_gguf_file_beside_safetensors_is_not_taken_for_them() {
    let dir = tempfile::tempdir().unwrap();
    small().write(&dir.path().join("m.gguf"));
    Checkpoint::open(dir.path()).unwrap();
    std::fs::write(dir.path().join("model-00001-of-00002.safetensors"), []).unwrap();
    let error = Checkpoint::open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("a GGUF file without safetensors beside it"), "{error}");
}

#[test]
fn long_names_are_cut_in_messages() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    let long = "x".repeat(1 << 20);
    let refused = |file: &Gguf, what: &str| {
        file.write(&path);
        let error = run(&path, &dir.path().join("v"), &Settings::default()).unwrap_err().to_string();
        assert!(error.contains(what) && error.len() < 2000, "{} bytes", error.len());
    };
    let mut file = small();
    file.set("tokenizer.ggml.pre", Meta::Str(long.clone()));
    refused(&file, "the pre-tokenizer is xxx");
    let mut file = small();
    for (key, value) in &mut file.meta {
        if let (true, Meta::Strs(tokens)) = (key == "tokenizer.ggml.tokens", value) {
            tokens[0].clone_from(&long);
            tokens[1].clone_from(&long);
        }
    }
    refused(&file, "stands twice");
}

/// Whatever a header says, it is read or refused: no panic, no allocation beyond the file, no endless loop.
#[test]
fn damaged_headers_are_read_or_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    let out = dir.path().join("v");
    let (whole, data) = small().bytes();
    let mut random = Random(77);
    for len in (0..data).step_by(7) {
        std::fs::write(&path, &whole[..len]).unwrap();
        assert!(Checkpoint::open(&path).is_err(), "{len}");
    }
    let (mut opened, mut refused) = (0, 0);
    for case in 0..1500 {
        let mut bytes = whole.clone();
        for _ in 0..=random.below(3) {
            let at = random.below(data as u64) as usize;
            match random.below(4) {
                0 => bytes[at] ^= 1 << random.below(8),
                1 => bytes[at] = 0xff,
                2 => bytes[at] = 0,
                // A number that is large or odd, where one may be.
                _ => {
                    let number = [u64::MAX, 1 << 62, 1 << 33, 1 << 20, 7][random.below(5) as usize];
                    let end = (at + 8).min(data);
                    bytes[at..end].copy_from_slice(&number.to_le_bytes()[..end - at]);
                }
            }
        }
        std::fs::write(&path, &bytes).unwrap();
        match Checkpoint::open(&path) {
            // What opens may still be another model; it must not panic either.
            Ok(_) if case % 8 == 0 => {
                _ = run(&path, &out, &Settings { force: true, ..Settings::default() });
                opened += 1;
            }
            Ok(_) => opened += 1,
            Err(_) => refused += 1,
        }
    }
    assert!(opened > 100 && refused > 100, "{opened} {refused}");
}

/// A vocabulary of the 256 bytes, two merges and a mark.
fn tokens(file: &mut Gguf, pre: &str) {
    let mut next = 256;
    let mut texts: Vec<String> = (0..=255u8)
        .map(|byte| match byte {
            b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => char::from(byte).to_string(),
            _ => {
                next += 1;
                char::from_u32(next - 1).unwrap().to_string()
            }
        })
        .collect();
    texts.extend(["he", "hel", "<|end|>", "[PAD0]"].map(str::to_owned));
    let mut kinds = vec![1; texts.len()];
    (kinds[258], kinds[259]) = (3, 5);
    file.set("tokenizer.ggml.model", Meta::str("gpt2"));
    file.set("tokenizer.ggml.pre", Meta::str(pre));
    file.set("tokenizer.ggml.tokens", Meta::Strs(texts));
    file.set("tokenizer.ggml.token_type", Meta::I32s(kinds));
    file.set("tokenizer.ggml.merges", Meta::Strs(vec!["h e".to_owned(), "he l".to_owned()]));
    file.set("tokenizer.ggml.eos_token_id", Meta::U32(258));
    file.set("tokenizer.chat_template", Meta::str("{{ messages }}"));
}

fn read_json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

#[test]
fn the_tokenizer_and_the_template_come_out_of_the_metadata() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    let mut file = small();
    file.write(&path);
    let out = dir.path().join("v");
    // What lies beside a GGUF file is not its own.
    std::fs::write(dir.path().join("tokenizer.json"), "{}").unwrap();
    run(&path, &out, &Settings::default()).unwrap();
    assert_whole(&out);
    assert_eq!(std::fs::read(out.join("chat_template.jinja")).unwrap(), b"{{ messages }}");
    assert_eq!(read_json(&out.join("generation_config.json")), json!({"eos_token_id": [258]}));
    assert_eq!(read_json(&out.join("tokenizer_config.json")), json!({"eos_token": "<|end|>"}));
    assert_eq!(read_json(&out.join("config.json"))["model_type"], "qwen3_moe");
    let tokenizer = tokenizers::Tokenizer::from_file(out.join("tokenizer.json")).unwrap();
    let ids = tokenizer.encode_fast("hello<|end|> h\u{e9}", false).unwrap().get_ids().to_vec();
    assert_eq!(ids[..4], [257, u32::from(b'l'), u32::from(b'o'), 258]);
    assert_eq!(tokenizer.decode(&ids, false).unwrap(), "hello<|end|> hé");
    assert_eq!(tokenizer.decode(&ids, true).unwrap(), "hello hé");
    assert_eq!(tokenizer.token_to_id("[PAD0]"), None);

    file.set("tokenizer.ggml.pre", Meta::str("unheard-of"));
    file.write(&path);
    let out = dir.path().join("w");
    let error = run(&path, &out, &Settings::default()).unwrap_err();
    assert!(matches!(error, SculptError::Tokenizer { .. }), "{error}");
    assert!(error.to_string().contains("unheard-of") && error.to_string().contains("--tokenizer"), "{error}");
    let beside = dir.path().join("tokenizer");
    std::fs::create_dir(&beside).unwrap();
    let named = Settings { tokenizer: Some(beside.clone()), ..Settings::default() };
    assert!(matches!(run(&path, &out, &named), Err(SculptError::Tokenizer { .. })));
    std::fs::copy(dir.path().join("v/tokenizer.json"), beside.join("tokenizer.json")).unwrap();
    run(&path, &out, &named).unwrap();
    assert_whole(&out);
    assert_eq!(files(&out)["tokenizer.json"], files(&dir.path().join("v"))["tokenizer.json"]);
    assert!(!out.join("chat_template.jinja").exists());
}

/// A file whose tokens are bytes and these pieces, the first of which have the highest scores.
fn scored(pieces: &[&str]) -> Gguf {
    let mut file = small();
    file.meta.retain(|(key, _)| !key.starts_with("tokenizer"));
    let mut texts: Vec<String> = ["<unk>", "<s>", "</s>"].map(str::to_owned).to_vec();
    let mut kinds = vec![2, 3, 3];
    texts.extend((0..=255).map(|byte| format!("<0x{byte:02X}>")));
    kinds.extend([6; 256]);
    texts.extend(pieces.iter().map(|piece| (*piece).to_owned()));
    kinds.resize(texts.len(), 1);
    let scores = (0..texts.len()).map(|id| if id < 259 { 0.0 } else { 259.0 - id as f32 }).collect();
    file.set("tokenizer.ggml.model", Meta::str("llama"));
    file.set("tokenizer.ggml.tokens", Meta::Strs(texts));
    file.set("tokenizer.ggml.token_type", Meta::I32s(kinds));
    file.set("tokenizer.ggml.scores", Meta::F32s(scores));
    file.set("tokenizer.ggml.bos_token_id", Meta::U32(1));
    file.set("tokenizer.ggml.eos_token_id", Meta::U32(2));
    file
}

#[test]
fn pieces_with_scores_become_pairs() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    scored(&["ab", "bc", "▁abc", "abc", "▁", "a", "b", "c"]).write(&path);
    let out = dir.path().join("v");
    run(&path, &out, &Settings::default()).unwrap();
    let tokenizer = tokenizers::Tokenizer::from_file(out.join("tokenizer.json")).unwrap();
    let ids = |text: &str| tokenizer.encode_fast(text, true).unwrap().get_ids().to_vec();
    // `ab` goes before `bc`, and `▁abc` before `abc`.
    assert_eq!(ids("abc bc"), [1, 261, 263, 260]);
    assert_eq!(ids("a\n"), [1, 263, 264, 3 + 10]);
    assert_eq!(tokenizer.decode(&ids("abc bc\n"), true).unwrap(), "abc bc\n");
}

/// Where a long token can be cut is tried at every character, so that there is a bound: 1 KiB.
#[test]
fn pieces_are_put_together_up_to_a_kibibyte() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    let (half, more) = ("a".repeat(512), "b".repeat(513));
    let (longest, longer) = (half.clone() + &more[1..], half.clone() + &more);
    scored(&[&longest, &longer, &half, &more, &more[1..]]).write(&path);
    let out = dir.path().join("v");
    run(&path, &out, &Settings::default()).unwrap();
    let json = read_json(&out.join("tokenizer.json"));
    assert!(json["model"]["vocab"].get(&longer).is_some());
    let merges = json["model"]["merges"].as_array().unwrap();
    assert_eq!(merges, &[json!(format!("{half} {}", &more[1..]))]);
}
