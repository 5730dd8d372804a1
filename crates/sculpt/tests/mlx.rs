//! Vaults of checkpoints as mlx-lm saves them: experts stacked, and what its `sanitize` of each model changes.
#![allow(clippy::print_stderr, clippy::unwrap_used, reason = "what fails is the test")]

mod common;

use std::collections::BTreeMap;

use common::{Tensor, Tiny, Type, Vault, run, settings};
use serde_json::json;
use smoe_format::BackboneTensor;
use smoe_sculpt::BackboneBits;
use smoe_testkit::{fixtures, gguf};

/// A fixture's checkpoint.
fn load(family: &str) -> Option<Tiny> {
    let (config, tensors) = gguf::load(&fixtures::fixture(family)?);
    let own =
        |(name, t): (String, gguf::Tensor)| (name, Tensor { dtype: t.dtype, shape: t.shape, bytes: t.bytes });
    Some(Tiny { config, tensors: tensors.into_iter().map(own).collect(), side: BTreeMap::new() })
}

/// What mlx-lm makes of it.
fn sanitized(of: &Tiny) -> Tiny {
    let text = if of.config["text_config"].is_object() { &of.config["text_config"] } else { &of.config };
    let n = |key: &str| text[key].as_u64().unwrap_or(0) as usize;
    let hybrid = n("linear_num_key_heads") > 0;
    let mut stacks = BTreeMap::<String, BTreeMap<usize, Tensor>>::new();
    let mut tensors = BTreeMap::new();
    for (name, tensor) in &of.tensors {
        if name.starts_with("model.visual.") {
            continue;
        }
        // The part for text is a model of its own there.
        let name = match name.strip_prefix("model.language_model.") {
            Some(rest) => format!("language_model.model.{rest}"),
            None if of.config["text_config"].is_object() => format!("language_model.{name}"),
            None => name.clone(),
        };
        let mut put = |name: String, shape: &[usize], bytes: Vec<u8>| {
            tensors.insert(name, Tensor { dtype: tensor.dtype.clone(), shape: shape.to_vec(), bytes });
        };
        let shape = &tensor.shape;
        if let Some((module, rest)) = name.split_once(".experts.") {
            let (expert, rest) = rest.split_once('.').unwrap();
            let projection = match rest {
                "w1.weight" => "gate_proj.weight",
                "w2.weight" => "down_proj.weight",
                "w3.weight" => "up_proj.weight",
                same => same,
            };
            let stack = stacks.entry(format!("{module}.switch_mlp.{projection}")).or_default();
            stack.insert(expert.parse().unwrap(), tensor.clone());
        } else if let Some(module) = name.strip_suffix(".input_linear.weight") {
            let each = tensor.bytes.len() / (2 * shape[0]);
            for (i, projection) in ["gate_proj", "up_proj"].into_iter().enumerate() {
                let half = tensor.bytes.chunks_exact(each).skip(i).step_by(2).flatten().copied().collect();
                let name = format!("{module}.switch_mlp.{projection}.weight");
                put(name, &[shape[0], shape[1] / 2, shape[2]], half);
            }
        } else if let Some(module) = name.strip_suffix(".output_linear.weight") {
            put(format!("{module}.switch_mlp.down_proj.weight"), shape, tensor.bytes.clone());
        } else if hybrid && name.ends_with(".conv1d.weight") {
            put(name.clone(), &[shape[0], shape[2], 1], tensor.bytes.clone());
        } else if hybrid && name.ends_with("norm.weight") && !name.ends_with("linear_attn.norm.weight") {
            let values: Vec<f32> = tensor.values().iter().map(|w| w + 1.0).collect();
            tensors.insert(name, Tensor::new(Type::F32, shape, &values));
        } else if let Some(module) = name.strip_suffix(".kv_b_proj.weight") {
            let (heads, keys, values) = (n("num_attention_heads"), n("qk_nope_head_dim"), n("v_head_dim"));
            let (of, cols) = (keys + values, shape[1]);
            let weights = tensor.values();
            let at = |head: usize, row: usize, col: usize| weights[(head * of + row) * cols + col];
            let (mut k, mut v) = (Vec::new(), Vec::new());
            for head in 0..heads {
                k.extend((0..cols).flat_map(|c| (0..keys).map(move |r| at(head, r, c))));
                v.extend((keys..of).flat_map(|r| (0..cols).map(move |c| at(head, r, c))));
            }
            tensors.insert(
                format!("{module}.embed_q.weight"),
                Tensor::new(Type::Bf16, &[heads, cols, keys], &k),
            );
            let v = Tensor::new(Type::Bf16, &[heads, values, cols], &v);
            tensors.insert(format!("{module}.unembed_out.weight"), v);
        } else {
            put(name.clone(), shape, tensor.bytes.clone());
        }
    }
    for (name, stack) in stacks {
        let shape = [&[stack.len()][..], &stack[&0].shape].concat();
        let (dtype, bytes) = (stack[&0].dtype.clone(), stack.into_values().flat_map(|t| t.bytes).collect());
        tensors.insert(name, Tensor { dtype, shape, bytes });
    }
    Tiny { config: of.config.clone(), tensors, side: BTreeMap::new() }
}

/// All weights of the backbone, as numbers.
fn backbone(vault: &Vault) -> Vec<(String, Vec<f32>)> {
    let spec = &vault.experts.manifest().unwrap().spec;
    let values = |tensor: BackboneTensor| {
        let (encoding, bytes) = vault.backbone_tensor(&tensor.to_string());
        let (rows, cols) = tensor.shape(spec);
        let mut values = vec![0.0; rows * cols];
        for (row, out) in values.chunks_exact_mut(cols).enumerate() {
            encoding.decode_row(bytes, cols, row, out);
        }
        (tensor.to_string(), values)
    };
    BackboneTensor::all(spec).into_iter().map(values).collect()
}

fn assert_same(a: &Vault, b: &Vault, what: &str) {
    assert_eq!(a.experts.manifest().unwrap().spec, b.experts.manifest().unwrap().spec, "{what}");
    let data = |vault: &Vault| vault.experts_bytes[vault.experts.data_offset as usize..].to_vec();
    assert!(data(a) == data(b), "{what}: experts");
    for ((name, x), (_, y)) in backbone(a).into_iter().zip(backbone(b)) {
        assert!(x == y, "{what}: {name}");
    }
}

#[test]
fn what_mlx_changes_is_undone() {
    let dir = tempfile::tempdir().unwrap();
    let raw = settings(16, BackboneBits::Bf16);
    for family in ["qwen3_next", "qwen3_5_moe", "glm_moe_dsa", "minimax_m2", "granitemoe", "ernie4_5_moe"] {
        let tiny = load(family).unwrap();
        let at = |name: &str| dir.path().join(format!("{family}-{name}"));
        tiny.write(&at("plain"), 1);
        run(&at("plain"), &at("a"), &raw).unwrap();
        sanitized(&tiny).write(&at("mlx"), 1);
        run(&at("mlx"), &at("b"), &raw).unwrap();
        assert_same(&Vault::open(&at("a")), &Vault::open(&at("b")), family);
    }
}

/// Keys and values of latent attention in MLX's codes: 8 bits, 32 to a group.
#[test]
fn latent_attention_is_put_together_of_codes() {
    let Some(tiny) = load("deepseek_v3") else { return };
    let dir = tempfile::tempdir().unwrap();
    let mut mlx = sanitized(&tiny);
    let mut plain = mlx.clone();
    for name in mlx.tensors.keys().cloned().collect::<Vec<_>>() {
        let Some(module) =
            name.strip_suffix(".weight").filter(|m| m.ends_with("embed_q") || m.ends_with("unembed_out"))
        else {
            continue;
        };
        let &[heads, rows, cols] = mlx.tensors[&name].shape.as_slice() else { panic!("{name}") };
        let (mut codes, mut scales, mut minima, mut meant) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for group in 0..heads * rows * cols / 32 {
            let (scale, minimum) = ((1 + group % 7) as f32 / 4096.0, -((group % 5) as f32) / 64.0);
            scales.push(scale);
            minima.push(minimum);
            for i in 0..32 {
                let code = (group * 31 + i * 17) % 256;
                codes.push(code as u8);
                meant.push((code as f32).mul_add(scale, minimum));
            }
        }
        let groups = [heads, rows, cols / 32];
        let packed = Tensor { dtype: "U32".to_owned(), shape: vec![heads, rows, cols / 4], bytes: codes };
        mlx.tensors.insert(name.clone(), packed);
        mlx.tensors.insert(format!("{module}.scales"), Tensor::new(Type::F32, &groups, &scales));
        mlx.tensors.insert(format!("{module}.biases"), Tensor::new(Type::F32, &groups, &minima));
        plain.tensors.insert(name.clone(), Tensor::new(Type::F32, &[heads, rows, cols], &meant));
    }
    mlx.config["quantization"] = json!({"group_size": 32, "bits": 8});
    let raw = settings(16, BackboneBits::Bf16);
    let at = |name: &str| dir.path().join(name);
    for (tiny, name) in [(&plain, "a"), (&mlx, "b")] {
        tiny.write(&at(&format!("{name}-checkpoint")), 1);
        run(&at(&format!("{name}-checkpoint")), &at(name), &raw).unwrap();
    }
    assert_same(&Vault::open(&at("a")), &Vault::open(&at("b")), "deepseek_v3");
}
