//! Vaults of packed safetensors checkpoints: FP8 in blocks, MLX, GPTQ, AWQ.
#![allow(clippy::unwrap_used, reason = "what fails is the test")]

mod common;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use common::{Random, Tensor, Tiny, Type, Vault, run};
use serde_json::{Value, json};
use smoe_format::half::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};
use smoe_format::{Encoding, Projection};
use smoe_sculpt::{BackboneBits, Recipe, SculptError, Settings, verify};

/// Odd numbers of rows, columns of whole groups of 64.
fn plain(seed: u64) -> Tiny {
    let config = json!({
        "model_type": "qwen3_moe", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 96,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "num_experts": 3, "num_experts_per_tok": 2,
        "moe_intermediate_size": 192, "norm_topk_prob": true, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "tie_word_embeddings": false, "rope_theta": 1e6,
    });
    Tiny::fill(config, Type::Bf16, seed)
}

fn tensor(dtype: &str, shape: &[usize], bytes: Vec<u8>) -> Tensor {
    Tensor { dtype: dtype.to_owned(), shape: shape.to_vec(), bytes }
}

fn words(values: &[u32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

fn f16s(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|&v| f32_to_f16(v).to_le_bytes()).collect()
}

/// Packs every projection of attention and experts with `pack`, which is given module, rows and columns and
/// returns the parts and what they mean.
fn packed(
    seed: u64,
    config: Value,
    mut pack: impl FnMut(&mut Random, usize, usize) -> (Vec<(&'static str, Tensor)>, Vec<f32>),
) -> (Tiny, BTreeMap<String, Vec<f32>>) {
    let mut tiny = plain(seed);
    let mut random = Random(seed * 2 + 1);
    let mut meant = BTreeMap::new();
    let names: Vec<String> =
        tiny.tensors.keys().filter(|name| name.ends_with("_proj.weight")).cloned().collect();
    for name in names {
        let old = tiny.tensors.remove(&name).unwrap();
        let (parts, values) = pack(&mut random, old.shape[0], old.shape[1]);
        let module = name.trim_end_matches(".weight");
        for (part, tensor) in parts {
            tiny.tensors.insert(format!("{module}.{part}"), tensor);
        }
        meant.insert(name, values);
    }
    tiny.config.as_object_mut().unwrap().extend(config.as_object().unwrap().clone());
    (tiny, meant)
}

/// Sculpts and calls `check` with each packed tensor: name, encoding, decoded weights, meant weights.
fn each(
    tiny: &Tiny,
    meant: &BTreeMap<String, Vec<f32>>,
    dir: &Path,
    settings: &Settings,
    mut check: impl FnMut(&str, Encoding, &[f32], &[f32]),
) {
    let (checkpoint, out) = (dir.join("checkpoint"), dir.join("vault"));
    tiny.write(&checkpoint, 2);
    run(&checkpoint, &out, &Settings { force: true, ..settings.clone() }).unwrap();
    assert_eq!(verify(&out, Some(1), &(), &AtomicBool::new(false)).unwrap().problems, []);
    let vault = Vault::open(&out);
    let decode = |encoding: Encoding, bytes: &[u8], cols: usize, n: usize| {
        let mut values = vec![0.0; n];
        for (row, out) in values.chunks_exact_mut(cols).enumerate() {
            encoding.decode_row(bytes, cols, row, out);
        }
        values
    };
    let mut seen = 0;
    for record in &vault.experts.records {
        let table = vault.experts.table(record.key.layer).unwrap();
        for (entry, projection) in table.tensors.iter().zip(Projection::ALL) {
            let (layer, expert) = (record.key.layer, record.key.expert);
            let name = format!("model.layers.{layer}.mlp.experts.{expert}.{}_proj.weight", projection.name());
            let bytes = &vault.experts_bytes[record.offset as usize + entry.offset..][..entry.len];
            let found = decode(entry.encoding, bytes, entry.cols, entry.rows * entry.cols);
            check(&name, entry.encoding, &found, &meant[&name]);
            seen += 1;
        }
    }
    for layer in 0..2 {
        for (part, rows, cols) in [("q", 128, 128), ("k", 64, 128), ("v", 64, 128), ("o", 128, 128)] {
            let (encoding, bytes) = vault.backbone_tensor(&format!("layers.{layer}.{part}"));
            let name = format!("model.layers.{layer}.self_attn.{part}_proj.weight");
            check(&name, encoding, &decode(encoding, bytes, cols, rows * cols), &meant[&name]);
            seen += 1;
        }
    }
    assert_eq!(seen, 2 * (3 * 3 + 4));
}

/// With the original's rule, whose largest error is known.
fn rounded() -> Settings {
    Settings { recipe: Recipe::Absmax, ..Settings::default() }
}

fn whole() -> Settings {
    Settings { bits: 16, backbone: BackboneBits::Bf16, threads: Some(1), ..Settings::default() }
}

fn far(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

fn refused(tiny: &Tiny, dir: &Path) -> SculptError {
    let checkpoint = dir.join("bad");
    _ = std::fs::remove_dir_all(&checkpoint);
    tiny.write(&checkpoint, 0);
    run(&checkpoint, &dir.join("no"), &Settings::default()).unwrap_err()
}

#[test]
fn eight_bit_floats_times_their_blocks_scales() {
    let dir = tempfile::tempdir().unwrap();
    let config = json!({"quantization_config": {
        "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [48, 40], "activation_scheme": "dynamic",
    }});
    let value = |byte: u8| {
        let magnitude = match (byte >> 3 & 15, byte & 7) {
            (0, m) => f32::from(m) / 512.0,
            (e, m) => (1.0 + f32::from(m) / 8.0) * 2f32.powi(i32::from(e) - 7),
        };
        if byte < 128 { magnitude } else { -magnitude }
    };
    let (mut tiny, meant) = packed(1, config, |random, rows, cols| {
        let bytes: Vec<u8> = (0..rows * cols)
            .map(|_| match random.below(256) as u8 {
                // Not a number.
                0x7f | 0xff => 0x3c,
                byte => byte,
            })
            .collect();
        let across = cols.div_ceil(40);
        let scales: Vec<f32> =
            (0..rows.div_ceil(48) * across).map(|_| (random.below(900) + 1) as f32 * 1.7e-6).collect();
        let values =
            bytes.iter().enumerate().map(|(i, &b)| value(b) * scales[i / cols / 48 * across + i % cols / 40]);
        let values = values.collect();
        let scales = scales.iter().flat_map(|s| s.to_le_bytes()).collect();
        let parts = vec![
            ("weight", tensor("F8_E4M3", &[rows, cols], bytes)),
            ("weight_scale_inv", tensor("F32", &[rows.div_ceil(48), across], scales)),
        ];
        (parts, values)
    });
    let lossless = Settings { lossless: true, ..whole() };
    each(&tiny, &meant, dir.path(), &lossless, |name, encoding, found, wanted| {
        assert_eq!(encoding, Encoding::F32);
        assert!(found == wanted, "{name}");
    });
    each(&tiny, &meant, dir.path(), &rounded(), |name, encoding, found, wanted| {
        assert!(matches!(encoding.to_string().as_str(), "q4/64" | "q8/64"), "{name} {encoding}");
        assert!(far(found, wanted) < 0.05, "{name}");
    });
    let name = "model.layers.1.mlp.experts.2.down_proj.weight_scale_inv";
    let scales = tiny.tensors.remove(name).unwrap();
    let error = refused(&tiny, dir.path()).to_string();
    assert!(error.contains(name) && error.contains("missing"), "{error}");
    tiny.tensors.insert(name.to_owned(), tensor("F32", &[1, 2], scales.bytes[..8].to_vec()));
    let error = refused(&tiny, dir.path()).to_string();
    assert!(error.contains("shape [1, 2] instead of [3, 5]"), "{error}");
    tiny.tensors.insert(name.to_owned(), tensor("I32", &scales.shape, scales.bytes.clone()));
    let error = refused(&tiny, dir.path()).to_string();
    assert!(error.contains("I32"), "{error}");
}

/// `bits` of each code, one behind the other.
fn stream(codes: &[u8], bits: usize) -> Vec<u32> {
    let mut words = vec![0u32; codes.len() * bits / 32];
    for (i, &code) in codes.iter().enumerate() {
        for bit in 0..bits {
            let at = i * bits + bit;
            words[at / 32] |= u32::from(code >> bit & 1) << (at % 32);
        }
    }
    words
}

#[test]
fn codes_of_mlx_are_kept() {
    let dir = tempfile::tempdir().unwrap();
    for (bits, group, ty) in
        [(4, 64, "BF16"), (8, 32, "F16"), (3, 64, "F16"), (6, 64, "BF16"), (2, 32, "F32")]
    {
        let config = json!({"quantization": {"group_size": group, "bits": bits}});
        let (mut tiny, meant) = packed(bits as u64, config, |random, rows, cols| {
            let codes: Vec<u8> = (0..rows * cols).map(|_| random.below(1 << bits) as u8).collect();
            let level = |random: &mut Random| {
                let x = (random.below(2000) as f32 - 1000.0) * 1e-5;
                if ty == "BF16" { bf16_to_f32(f32_to_bf16(x)) } else { f16_to_f32(f32_to_f16(x)) }
            };
            let n = rows * cols / group;
            let scales: Vec<f32> = (0..n).map(|_| level(random)).collect();
            let minima: Vec<f32> = (0..n).map(|_| level(random)).collect();
            let values = codes
                .iter()
                .enumerate()
                .map(|(i, &code)| f32::from(code).mul_add(scales[i / group], minima[i / group]))
                .collect();
            let shape = [rows, cols / group];
            let floats = |values: &[f32]| match ty {
                "BF16" => Tensor::new(Type::Bf16, &shape, values),
                "F16" => Tensor::new(Type::F16, &shape, values),
                _ => Tensor::new(Type::F32, &shape, values),
            };
            let packed = codes.chunks_exact(cols).flat_map(|row| stream(row, bits)).collect::<Vec<u32>>();
            let parts = vec![
                ("weight", tensor("U32", &[rows, cols * bits / 32], words(&packed))),
                ("scales", floats(&scales)),
                ("biases", floats(&minima)),
            ];
            (parts, values)
        });
        let check = |name: &str, encoding: Encoding, found: &[f32], wanted: &[f32]| {
            assert_eq!(encoding.to_string(), format!("q{bits}a/{group}"));
            assert!(found == wanted, "{name}");
        };
        each(&tiny, &meant, dir.path(), &Settings { lossless: true, ..whole() }, check);
        // The experts of a layer on top of each other, as MLX has them.
        let mut stacked: BTreeMap<String, Vec<Tensor>> = BTreeMap::new();
        for (name, tensor) in std::mem::take(&mut tiny.tensors) {
            let Some((at, rest)) = name.split_once(".experts.") else {
                tiny.tensors.insert(name, tensor);
                continue;
            };
            let (_, rest) = rest.split_once('.').unwrap();
            stacked.entry(format!("{at}.switch_mlp.{rest}")).or_default().push(tensor);
        }
        for (name, parts) in stacked {
            let mut all = parts[0].clone();
            all.shape.insert(0, parts.len());
            all.bytes = parts.into_iter().flat_map(|part| part.bytes).collect();
            tiny.tensors.insert(name, all);
        }
        each(&tiny, &meant, dir.path(), &Settings::default(), check);
        tiny.tensors.remove("model.layers.0.mlp.switch_mlp.up_proj.biases").unwrap();
        let error = refused(&tiny, dir.path());
        assert!(matches!(error, SculptError::Packed { .. }), "{error}");
        assert!(error.to_string().contains("switch_mlp.up_proj.biases` is missing"), "{error}");
    }
}

/// A GPTQ tensor; `order`: which group each column is in.
fn gptq(
    random: &mut Random,
    (rows, cols): (usize, usize),
    (bits, group): (usize, usize),
    zero: Option<u8>,
    order: Option<&dyn Fn(usize) -> usize>,
) -> (Vec<(&'static str, Tensor)>, Vec<f32>) {
    let groups = cols.div_ceil(group);
    let codes: Vec<u8> = (0..rows * cols).map(|_| random.below(1 << bits) as u8).collect();
    let zeros: Vec<u8> =
        (0..rows * groups).map(|_| zero.unwrap_or_else(|| random.below((1 << bits) - 1) as u8 + 1)).collect();
    let scales: Vec<f32> =
        (0..rows * groups).map(|_| f16_to_f32(f32_to_f16((random.below(900) + 1) as f32 * 1e-5))).collect();
    let of = |col: usize| order.map_or(col / group, |order| order(col));
    let mut values = Vec::new();
    for row in 0..rows {
        for col in 0..cols {
            let at = row * groups + of(col);
            values.push((f32::from(codes[row * cols + col]) - f32::from(zeros[at])) * scales[at]);
        }
    }
    // Everything turned round: lines of the file are columns, packed downwards; zeros are packed across.
    let by_row: Vec<Vec<u32>> = codes.chunks_exact(cols).map(|row| stream(row, bits)).collect();
    let qweight: Vec<u32> = (0..cols * bits / 32)
        .flat_map(|w| by_row.iter().map(move |row| row[w]).collect::<Vec<u32>>())
        .collect();
    let line = |g: usize| (0..rows).map(|r| zeros[r * groups + g] - 1).collect::<Vec<u8>>();
    let qzeros: Vec<u32> = (0..groups).flat_map(|g| stream(&line(g), bits)).collect();
    let turned: Vec<f32> = (0..groups)
        .flat_map(|g| (0..rows).map(move |r| (r, g)))
        .map(|(r, g)| scales[r * groups + g])
        .collect();
    let g_idx: Vec<u32> = (0..cols).map(|col| of(col) as u32).collect();
    let parts = vec![
        ("qweight", tensor("I32", &[cols * bits / 32, rows], words(&qweight))),
        ("qzeros", tensor("I32", &[groups, rows * bits / 32], words(&qzeros))),
        ("scales", tensor("F16", &[groups, rows], f16s(&turned))),
        ("g_idx", tensor("I32", &[cols], words(&g_idx))),
    ];
    (parts, values)
}

fn gptq_config(bits: usize, group: i64) -> Value {
    json!({"quantization_config": {
        "quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": false, "sym": true,
    }})
}

#[test]
fn codes_of_gptq_are_kept_where_columns_are_in_order() {
    let dir = tempfile::tempdir().unwrap();
    let exact = |name: &str, found: &[f32], wanted: &[f32]| assert!(found == wanted, "{name}");
    for (bits, group, kept) in [(4, 64, "q4a/64"), (8, 32, "q8a/32"), (3, 32, "q3a/32"), (2, 64, "q2a/64")] {
        // A zero that is a power of two: its product with a scale is an f16 again.
        let zero = Some(1u8 << (bits - 1));
        let (tiny, meant) = packed(bits as u64, gptq_config(bits, group as i64), |random, rows, cols| {
            gptq(random, (rows, cols), (bits, group), zero, None)
        });
        each(
            &tiny,
            &meant,
            dir.path(),
            &Settings { lossless: true, ..whole() },
            |name, encoding, found, wanted| {
                assert_eq!(encoding.to_string(), kept);
                exact(name, found, wanted);
            },
        );
    }
    // One group as wide as the row: 128 or 192 columns.
    let (tiny, meant) = packed(9, gptq_config(4, -1), |random, rows, cols| {
        gptq(random, (rows, cols), (4, cols), Some(8), None)
    });
    each(&tiny, &meant, dir.path(), &Settings::default(), |name, encoding, found, wanted| {
        let group = if name.contains("down") { 64 } else { 128 };
        assert_eq!(encoding.to_string(), format!("q4a/{group}"), "{name}");
        exact(name, found, wanted);
    });
    // Other zeros are rounded, and refused where nothing may be lost.
    let (mut tiny, meant) =
        packed(5, gptq_config(4, 64), |random, rows, cols| gptq(random, (rows, cols), (4, 64), None, None));
    each(&tiny, &meant, dir.path(), &Settings::default(), |name, _, found, wanted| {
        let far = far(found, wanted);
        assert!(far > 0.0 && far < 1e-4, "{name} {far}");
    });
    tiny.write(&dir.path().join("checkpoint"), 0);
    let lossless = Settings { lossless: true, ..whole() };
    let error = run(&dir.path().join("checkpoint"), &dir.path().join("no"), &lossless).unwrap_err();
    assert!(matches!(error, SculptError::Lossy { form: "GPTQ", .. }), "{error}");

    let name = "model.layers.0.self_attn.k_proj.qzeros";
    let zeros = tiny.tensors.remove(name).unwrap();
    let error = refused(&tiny, dir.path()).to_string();
    assert!(error.contains(name) && error.contains("missing"), "{error}");
    tiny.tensors.insert(name.to_owned(), tensor("F32", &zeros.shape, zeros.bytes));
    let error = refused(&tiny, dir.path()).to_string();
    assert!(error.contains(name) && error.contains("F32"), "{error}");
}

#[test]
fn columns_of_gptq_in_another_order_are_weighed_one_by_one() {
    let dir = tempfile::tempdir().unwrap();
    let turned = |col: usize| col * 7 % 128 / 64;
    let (mut tiny, meant) = packed(3, gptq_config(4, 64), |random, rows, cols| {
        let order = |col: usize| if cols == 128 { turned(col) } else { col * 5 % 192 / 64 };
        gptq(random, (rows, cols), (4, 64), None, Some(&order))
    });
    each(
        &tiny,
        &meant,
        dir.path(),
        &Settings { lossless: true, ..whole() },
        |name, encoding, found, wanted| {
            assert_eq!(encoding, Encoding::F32);
            // (q - z) * s is rounded once, q * s - z * s twice at most.
            assert!(far(found, wanted) < 1e-8, "{name}");
        },
    );
    each(&tiny, &meant, dir.path(), &rounded(), |name, encoding, found, wanted| {
        assert!(matches!(encoding.to_string().as_str(), "q4/64" | "q8/64"), "{name} {encoding}");
        assert!(far(found, wanted) < 0.02, "{name}");
    });
    let name = "model.layers.0.mlp.experts.0.up_proj.g_idx";
    tiny.tensors.get_mut(name).unwrap().bytes[0] = 9;
    let error = refused(&tiny, dir.path()).to_string();
    assert!(error.contains("a g_idx of 9 of 2 groups"), "{error}");
}

#[test]
fn codes_of_awq_are_kept() {
    let dir = tempfile::tempdir().unwrap();
    let config = json!({"quantization_config": {
        "quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": true,
    }});
    // Nibble i of a word is this one of its eight rows.
    let order = [0, 2, 4, 6, 1, 3, 5, 7];
    let pack = |rows: &[u8]| -> Vec<u32> {
        let word = |eight: &[u8]| (0..8).fold(0, |word, i| word | u32::from(eight[order[i]]) << (4 * i));
        rows.chunks_exact(8).map(word).collect()
    };
    let make = |zero: Option<u8>| {
        packed(4, config.clone(), |random, rows, cols| {
            let groups = cols / 64;
            let codes: Vec<u8> = (0..rows * cols).map(|_| random.below(16) as u8).collect();
            let zeros: Vec<u8> =
                (0..rows * groups).map(|_| zero.unwrap_or_else(|| random.below(16) as u8)).collect();
            let scales: Vec<f32> = (0..rows * groups)
                .map(|_| f16_to_f32(f32_to_f16((random.below(900) + 1) as f32 * 1e-5)))
                .collect();
            let values = (0..rows * cols)
                .map(|i| {
                    let at = i / cols * groups + i % cols / 64;
                    (f32::from(codes[i]) - f32::from(zeros[at])) * scales[at]
                })
                .collect();
            let column =
                |of: &[u8], width: usize, c: usize| (0..rows).map(|r| of[r * width + c]).collect::<Vec<u8>>();
            let qweight: Vec<u32> = (0..cols).flat_map(|c| pack(&column(&codes, cols, c))).collect();
            let qzeros: Vec<u32> = (0..groups).flat_map(|g| pack(&column(&zeros, groups, g))).collect();
            let turned: Vec<f32> = (0..groups * rows).map(|i| scales[i % rows * groups + i / rows]).collect();
            let parts = vec![
                ("qweight", tensor("I32", &[cols, rows / 8], words(&qweight))),
                ("qzeros", tensor("I32", &[groups, rows / 8], words(&qzeros))),
                ("scales", tensor("F16", &[groups, rows], f16s(&turned))),
            ];
            (parts, values)
        })
    };
    let (tiny, meant) = make(Some(4));
    each(
        &tiny,
        &meant,
        dir.path(),
        &Settings { lossless: true, ..whole() },
        |name, encoding, found, wanted| {
            assert_eq!(encoding.to_string(), "q4a/64");
            assert!(found == wanted, "{name}");
        },
    );
    let (mut tiny, meant) = make(None);
    each(&tiny, &meant, dir.path(), &Settings::default(), |name, _, found, wanted| {
        assert!(far(found, wanted) < 1e-4, "{name}");
    });
    let name = "model.layers.1.mlp.experts.0.gate_proj.scales";
    let scales = tiny.tensors[name].clone();
    tiny.tensors.insert(name.to_owned(), tensor("F16", &[1, 384], scales.bytes));
    let error = refused(&tiny, dir.path()).to_string();
    assert!(error.contains(name) && error.contains("[1, 384]"), "{error}");
}

#[test]
fn other_packings_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    for (config, key, found) in [
        (json!({"quant_method": "bitsandbytes"}), "quantization_config.quant_method", "bitsandbytes"),
        (json!({"quant_method": "fp8"}), "quantization_config.weight_block_size", "missing"),
        (json!({"quant_method": "gptq", "bits": 5, "group_size": 64}), "quantization_config.bits", "5"),
        (json!({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemv"}), "version", "gemv"),
        (json!({"bits": 4, "group_size": 64, "mode": "mxfp4"}), "mode", "mxfp4"),
        (json!({"bits": 7, "group_size": 64}), "quantization_config", "7"),
    ] {
        let mut tiny = plain(1);
        tiny.config["quantization_config"] = config;
        let error = refused(&tiny, dir.path());
        assert!(matches!(error, SculptError::Config { .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains(key) && text.contains(found), "{text}");
    }
}
