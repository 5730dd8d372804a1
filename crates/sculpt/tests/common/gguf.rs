//! GGUF files made by code: a writer, the way from a checkpoint to llama.cpp's names, and blocks of each type
//! built from the numbers that they mean.
#![allow(dead_code, clippy::unwrap_used, reason = "each test uses a part")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::Value;
use smoe_format::half::{f16_to_f32, f32_to_f16};

use super::common::{Random, Tensor};

#[derive(Clone, Debug)]
pub enum Meta {
    U16(u16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    Str(String),
    Strs(Vec<String>),
    I32s(Vec<i32>),
    F32s(Vec<f32>),
}

impl Meta {
    pub fn str(text: &str) -> Self {
        Self::Str(text.to_owned())
    }
}

/// A tensor: name, dimensions outermost first, type, bytes.
pub type Entry = (String, Vec<usize>, u32, Vec<u8>);

#[derive(Clone, Debug, Default)]
pub struct Gguf {
    pub meta: Vec<(String, Meta)>,
    pub tensors: Vec<Entry>,
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

impl Gguf {
    pub fn set(&mut self, key: &str, value: Meta) {
        self.meta.retain(|(k, _)| k != key);
        self.meta.push((key.to_owned(), value));
    }

    /// The file, and where its data begin.
    pub fn bytes(&self) -> (Vec<u8>, usize) {
        let mut out = b"GGUF".to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.meta.len() as u64).to_le_bytes());
        for (key, value) in &self.meta {
            put_text(&mut out, key);
            let mut scalar = |ty: u32, bytes: &[u8]| {
                out.extend(ty.to_le_bytes());
                out.extend(bytes);
            };
            let list = |ty: u32, n: usize| [9, ty, n as u32, 0].map(u32::to_le_bytes).concat();
            match value {
                Meta::U16(n) => scalar(2, &n.to_le_bytes()),
                Meta::U32(n) => scalar(4, &n.to_le_bytes()),
                Meta::I32(n) => scalar(5, &n.to_le_bytes()),
                Meta::F32(x) => scalar(6, &x.to_le_bytes()),
                Meta::Bool(b) => scalar(7, &[u8::from(*b)]),
                Meta::Str(text) => {
                    scalar(8, &[]);
                    put_text(&mut out, text);
                }
                Meta::Strs(texts) => {
                    out.extend(list(8, texts.len()));
                    texts.iter().for_each(|text| put_text(&mut out, text));
                }
                Meta::I32s(numbers) => {
                    out.extend(list(5, numbers.len()));
                    numbers.iter().for_each(|n| out.extend(n.to_le_bytes()));
                }
                Meta::F32s(numbers) => {
                    out.extend(list(6, numbers.len()));
                    numbers.iter().for_each(|n| out.extend(n.to_le_bytes()));
                }
            }
        }
        let mut offset = 0u64;
        for (name, shape, ty, bytes) in &self.tensors {
            put_text(&mut out, name);
            out.extend((shape.len() as u32).to_le_bytes());
            shape.iter().rev().for_each(|&n| out.extend((n as u64).to_le_bytes()));
            out.extend(ty.to_le_bytes());
            out.extend(offset.to_le_bytes());
            offset += (bytes.len() as u64).next_multiple_of(32);
        }
        out.resize(out.len().next_multiple_of(32), 0);
        let data = out.len();
        for (.., bytes) in &self.tensors {
            out.extend(bytes);
            out.resize(out.len().next_multiple_of(32), 0);
        }
        (out, data)
    }

    pub fn write(&self, path: &Path) {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, self.bytes().0).unwrap();
    }

    /// Writes it in parts; the first has the metadata only, as llama.cpp may have it. Returns their paths.
    pub fn write_split(&self, dir: &Path, stem: &str, parts: usize) -> Vec<PathBuf> {
        let each = self.tensors.len().div_ceil(parts - 1);
        let mut paths = Vec::new();
        for no in 0..parts {
            let mut part = Gguf::default();
            if no == 0 {
                part.meta = self.meta.clone();
            } else {
                part.tensors = self.tensors.iter().skip((no - 1) * each).take(each).cloned().collect();
            }
            part.set("split.no", Meta::U16(no as u16));
            part.set("split.count", Meta::U16(parts as u16));
            part.set("split.tensors.count", Meta::I32(self.tensors.len() as i32));
            let path = dir.join(format!("{stem}-{:05}-of-{parts:05}.gguf", no + 1));
            part.write(&path);
            paths.push(path);
        }
        paths
    }
}

const F32: u32 = 0;
const BF16: u32 = 30;

/// llama.cpp's file of a checkpoint in bf16: its names, its stacks, its permutations. `split_heads`: keys and
/// values of latent attention apart, as newer files have them.
pub fn of_checkpoint(config: &Value, tensors: &BTreeMap<String, Tensor>, split_heads: bool) -> Gguf {
    let family = config["model_type"].as_str().unwrap();
    let arch = match family {
        "qwen3_moe" => "qwen3moe",
        "qwen2_moe" => "qwen2moe",
        "mixtral" => "llama",
        "deepseek_v2" | "deepseek_v3" => "deepseek2",
        "glm4_moe" => "glm4moe",
        "gpt_oss" => "gpt-oss",
        other => other,
    };
    let n = |key: &str| config[key].as_u64().map(|n| n as u32);
    let mut file = Gguf::default();
    file.set("general.architecture", Meta::str(arch));
    let mut set = |key: &str, value: Option<Meta>| {
        if let Some(value) = value {
            file.set(&format!("{arch}.{key}"), value);
        }
    };
    let u = |n: Option<u32>| n.map(Meta::U32);
    let layers = n("num_hidden_layers").unwrap();
    let (heads, d) = (n("num_attention_heads").unwrap(), n("hidden_size").unwrap());
    let head_dim = n("head_dim").unwrap_or(d / heads);
    set("block_count", u(Some(layers)));
    set("context_length", u(n("max_position_embeddings")));
    set("embedding_length", u(Some(d)));
    set("feed_forward_length", u(n("intermediate_size")));
    set("attention.head_count", u(Some(heads)));
    let eps = config["rms_norm_eps"].as_f64().unwrap() as f32;
    set("attention.layer_norm_rms_epsilon", Some(Meta::F32(eps)));
    set("expert_count", u(n("num_experts").or(n("n_routed_experts")).or(n("num_local_experts"))));
    set("expert_used_count", u(n("num_experts_per_tok")));
    set("expert_feed_forward_length", u(n("moe_intermediate_size").or(n("intermediate_size"))));
    set("expert_shared_count", u(n("n_shared_experts")));
    set("expert_shared_feed_forward_length", u(n("shared_expert_intermediate_size")));
    set("leading_dense_block_count", u(n("first_k_dense_replace")));
    set("expert_group_count", u(n("n_group")));
    set("expert_group_used_count", u(n("topk_group")));
    set("attention.sliding_window", u(n("sliding_window").filter(|&n| n > 0)));
    let scale = config["routed_scaling_factor"].as_f64();
    set("expert_weights_scale", scale.map(|x| Meta::F32(x as f32)));
    if arch == "deepseek2" || arch == "glm4moe" {
        set("expert_weights_norm", Some(Meta::Bool(config["norm_topk_prob"] == true)));
        let sigmoid = family != "deepseek_v2";
        set("expert_gating_func", u(Some(if sigmoid { 2 } else { 1 })));
    }
    let (nope, rope_dim) = (n("qk_nope_head_dim"), n("qk_rope_head_dim"));
    if let (Some(nope), Some(rope), Some(rank)) = (nope, rope_dim, n("kv_lora_rank")) {
        set("attention.kv_lora_rank", u(Some(rank)));
        set("attention.q_lora_rank", u(n("q_lora_rank")));
        set("rope.dimension_count", u(Some(rope)));
        if split_heads {
            set("attention.head_count_kv", u(Some(1)));
            set("attention.key_length", u(Some(rank + rope)));
            set("attention.value_length", u(Some(rank)));
            set("attention.key_length_mla", u(Some(nope + rope)));
            set("attention.value_length_mla", u(n("v_head_dim")));
        } else {
            set("attention.head_count_kv", u(Some(heads)));
            set("attention.key_length", u(Some(nope + rope)));
            set("attention.value_length", u(n("v_head_dim")));
        }
    } else {
        set("attention.head_count_kv", u(n("num_key_value_heads")));
        set("attention.key_length", u(Some(head_dim)));
        set("attention.value_length", u(Some(head_dim)));
        let part = config["rope_parameters"]["partial_rotary_factor"].as_f64().unwrap_or(1.0);
        set("rope.dimension_count", u(Some((f64::from(head_dim) * part) as u32)));
    }
    let rope = if config["rope_parameters"].is_object() { &config["rope_parameters"] } else { config };
    set("rope.freq_base", rope["rope_theta"].as_f64().map(|x| Meta::F32(x as f32)));
    if let Some(kind) = rope["rope_type"].as_str().filter(|&kind| kind != "default") {
        set("rope.scaling.type", Some(Meta::str(kind)));
        set("rope.scaling.factor", rope["factor"].as_f64().map(|x| Meta::F32(x as f32)));
        let original = rope["original_max_position_embeddings"].as_u64().map(|n| Meta::U32(n as u32));
        set("rope.scaling.original_context_length", original);
        set("rope.scaling.yarn_beta_fast", rope["beta_fast"].as_f64().map(|x| Meta::F32(x as f32)));
        set("rope.scaling.yarn_beta_slow", rope["beta_slow"].as_f64().map(|x| Meta::F32(x as f32)));
    }

    type Tensor = (Vec<usize>, Vec<u8>);
    let mut stacks: BTreeMap<String, BTreeMap<usize, Tensor>> = BTreeMap::new();
    for (name, tensor) in tensors {
        let ty = if tensor.dtype == "F32" { F32 } else { BF16 };
        let mut push = |name: String, shape: &[usize], bytes: Vec<u8>| {
            file.tensors.push((name, shape.to_vec(), ty, bytes));
        };
        let (shape, bytes) = (&tensor.shape, tensor.bytes.clone());
        let words: Vec<&str> = name.split('.').collect();
        match words.as_slice() {
            ["model", "embed_tokens", "weight"] => push("token_embd.weight".into(), shape, bytes),
            ["model", "norm", "weight"] => push("output_norm.weight".into(), shape, bytes),
            ["lm_head", "weight"] => push("output.weight".into(), shape, bytes),
            ["model", "layers", layer, rest @ ..] => {
                let blk = |part: &str| format!("blk.{layer}.{part}");
                let kind = rest[rest.len() - 1];
                match rest {
                    ["self_attn", "sinks"] => push(blk("attn_sinks.weight"), shape, bytes),
                    ["self_attn", proj @ ("q_proj" | "k_proj"), "weight"]
                        if matches!(arch, "llama" | "deepseek") =>
                    {
                        let part = if *proj == "q_proj" { "attn_q.weight" } else { "attn_k.weight" };
                        push(blk(part), shape, interleaved(shape, &bytes, head_dim as usize));
                    }
                    ["self_attn", "kv_b_proj", "weight"] if split_heads => {
                        let (k, v) = apart(tensor, heads as usize, nope.unwrap() as usize);
                        push(blk("attn_k_b.weight"), &k.0, k.1);
                        push(blk("attn_v_b.weight"), &v.0, v.1);
                    }
                    ["self_attn", part, kind] => {
                        let part = match *part {
                            "q_proj" => "attn_q",
                            "k_proj" => "attn_k",
                            "v_proj" => "attn_v",
                            "o_proj" => "attn_output",
                            "q_norm" => "attn_q_norm",
                            "k_norm" => "attn_k_norm",
                            "q_a_proj" => "attn_q_a",
                            "q_a_layernorm" => "attn_q_a_norm",
                            "q_b_proj" => "attn_q_b",
                            "kv_a_proj_with_mqa" => "attn_kv_a_mqa",
                            "kv_a_layernorm" => "attn_kv_a_norm",
                            "kv_b_proj" => "attn_kv_b",
                            other => panic!("{other}"),
                        };
                        push(blk(&format!("{part}.{kind}")), shape, bytes);
                    }
                    ["input_layernorm", _] => push(blk("attn_norm.weight"), shape, bytes),
                    ["post_attention_layernorm", _] => {
                        let other = matches!(arch, "gpt-oss" | "glm4moe");
                        push(
                            blk(if other { "post_attention_norm.weight" } else { "ffn_norm.weight" }),
                            shape,
                            bytes,
                        );
                    }
                    [_, "gate" | "router", "weight" | "bias"] => {
                        push(blk(&format!("ffn_gate_inp.{kind}")), shape, bytes);
                    }
                    [_, "gate", "e_score_correction_bias"] => push(blk("exp_probs_b.bias"), shape, bytes),
                    [_, "shared_expert_gate", _] => {
                        push(blk("ffn_gate_inp_shexp.weight"), &shape[1..], bytes);
                    }
                    [_, "shared_expert" | "shared_experts", proj, _] => {
                        let proj = proj.trim_end_matches("_proj");
                        push(blk(&format!("ffn_{proj}_shexp.weight")), shape, bytes);
                    }
                    [_, "experts", stacked] => {
                        for (proj, shape, bytes) in gpt_oss(stacked, tensor) {
                            push(blk(&format!("ffn_{proj}_exps.{}", kind_of(stacked))), &shape, bytes);
                        }
                    }
                    [_, "experts", expert, proj, _] => {
                        let proj = match *proj {
                            "w1" | "gate_proj" => "gate",
                            "w2" | "down_proj" => "down",
                            _ => "up",
                        };
                        let stack = stacks.entry(blk(&format!("ffn_{proj}_exps.weight"))).or_default();
                        stack.insert(expert.parse().unwrap(), (shape.clone(), bytes));
                    }
                    ["mlp", proj, _] => {
                        let proj = proj.trim_end_matches("_proj");
                        push(blk(&format!("ffn_{proj}.weight")), shape, bytes);
                    }
                    other => panic!("{other:?}"),
                }
            }
            other => panic!("{other:?}"),
        }
    }
    for (name, stack) in stacks {
        let mut shape = vec![stack.len()];
        shape.extend(&stack[&0].0);
        let bytes = stack.into_values().flat_map(|(_, bytes)| bytes).collect();
        file.tensors.push((name, shape, BF16, bytes));
    }
    file
}

fn kind_of(stacked: &str) -> &'static str {
    if stacked.ends_with("_bias") { "bias" } else { "weight" }
}

/// Rows of a matrix of bf16.
fn rows_of(cols: usize, bytes: &[u8]) -> Vec<&[u8]> {
    bytes.chunks_exact(2 * cols).collect()
}

/// `reshape(heads, 2, half).swapaxes(1, 2)` on rows.
fn interleaved(shape: &[usize], bytes: &[u8], head_dim: usize) -> Vec<u8> {
    let rows = rows_of(shape[1], bytes);
    let mut out = Vec::new();
    for head in rows.chunks_exact(head_dim) {
        let (first, second) = head.split_at(head_dim / 2);
        for (a, b) in first.iter().zip(second) {
            out.extend_from_slice(a);
            out.extend_from_slice(b);
        }
    }
    out
}

type Shaped = (Vec<usize>, Vec<u8>);

fn transposed(rows: &[&[u8]], cols: usize) -> Vec<u8> {
    let mut out = Vec::new();
    for c in 0..cols {
        for row in rows {
            out.extend_from_slice(&row[2 * c..2 * c + 2]);
        }
    }
    out
}

/// `kv_b_proj` as transposed keys and values.
fn apart(tensor: &Tensor, heads: usize, nope: usize) -> (Shaped, Shaped) {
    let (height, cols) = (tensor.shape[0] / heads, tensor.shape[1]);
    let rows = rows_of(cols, &tensor.bytes);
    let (mut k, mut v) = (Vec::new(), Vec::new());
    for head in rows.chunks_exact(height) {
        k.extend(transposed(&head[..nope], cols));
        head[nope..].iter().for_each(|row| v.extend_from_slice(row));
    }
    ((vec![heads, cols, nope], k), (vec![heads, height - nope, cols], v))
}

/// The stacks of GPT-OSS, outputs before inputs, gate and up apart.
fn gpt_oss(name: &str, tensor: &Tensor) -> Vec<(&'static str, Vec<usize>, Vec<u8>)> {
    let every = |bytes: &[u8], row: usize, from: usize| {
        let rows = bytes.chunks_exact(row);
        rows.skip(from).step_by(2).flatten().copied().collect::<Vec<u8>>()
    };
    match (name, tensor.shape.as_slice()) {
        ("gate_up_proj" | "down_proj", &[n, cols, height]) => {
            let mut flat = Vec::new();
            for expert in tensor.bytes.chunks_exact(2 * cols * height) {
                flat.extend(transposed(&rows_of(height, expert), height));
            }
            if name == "down_proj" {
                return vec![("down", vec![n, height, cols], flat)];
            }
            let shape = vec![n, height / 2, cols];
            vec![("gate", shape.clone(), every(&flat, 2 * cols, 0)), ("up", shape, every(&flat, 2 * cols, 1))]
        }
        ("gate_up_proj_bias", &[n, height]) => {
            let shape = vec![n, height / 2];
            vec![
                ("gate", shape.clone(), every(&tensor.bytes, 2, 0)),
                ("up", shape, every(&tensor.bytes, 2, 1)),
            ]
        }
        ("down_proj_bias", shape) => vec![("down", shape.to_vec(), tensor.bytes.clone())],
        other => panic!("{other:?}"),
    }
}

/// A type of blocks: its number, name, weights of a block.
pub const KINDS: [(u32, &str, usize); 10] = [
    (2, "Q4_0", 32),
    (3, "Q4_1", 32),
    (6, "Q5_0", 32),
    (7, "Q5_1", 32),
    (8, "Q8_0", 32),
    (12, "Q4_K", 256),
    (13, "Q5_K", 256),
    (14, "Q6_K", 256),
    (20, "IQ4_NL", 32),
    (39, "MXFP4", 32),
];

/// Random blocks of a type for `n` weights, and what they mean by the formulas of ggml's documentation.
pub fn blocks(kind: &str, n: usize, random: &mut Random) -> (Vec<u8>, Vec<f32>) {
    let weights = KINDS.iter().find(|k| k.1 == kind).unwrap().2;
    let (mut bytes, mut values) = (Vec::new(), Vec::new());
    for _ in 0..n / weights {
        let (block, of_block) = block(kind, random);
        assert_eq!(of_block.len(), weights);
        bytes.extend(block);
        values.extend(of_block);
    }
    (bytes, values)
}

fn block(kind: &str, random: &mut Random) -> (Vec<u8>, Vec<f32>) {
    let mut half = |signed: bool| {
        let x = (random.below(2000) as f32 + 1.0) * 1e-5;
        let bits = f32_to_f16(if signed && random.below(2) == 0 { -x } else { x });
        (bits.to_le_bytes(), f16_to_f32(bits))
    };
    let ((d_bytes, d), (m_bytes, m)) = (half(true), half(true));
    let q = |random: &mut Random, n: u64| -> Vec<u8> { (0..32).map(|_| random.below(n) as u8).collect() };
    let low_high = |q: &[u8]| (0..16).map(|i| (q[i] & 15) | (q[i + 16] & 15) << 4).collect::<Vec<u8>>();
    let fifth = |q: &[u8]| {
        let bits = q.iter().enumerate().fold(0u32, |bits, (i, q)| bits | u32::from(q >> 4) << i);
        bits.to_le_bytes().to_vec()
    };
    let with = |q: &[u8], f: &dyn Fn(u8) -> f32| q.iter().map(|&q| f(q)).collect::<Vec<f32>>();
    match kind {
        "Q4_0" => {
            let q = q(random, 16);
            let values = with(&q, &|q| d * (f32::from(q) - 8.0));
            ([&d_bytes[..], &low_high(&q)].concat(), values)
        }
        "Q4_1" => {
            let q = q(random, 16);
            let values = with(&q, &|q| d * f32::from(q) + m);
            ([&d_bytes[..], &m_bytes, &low_high(&q)].concat(), values)
        }
        "Q5_0" => {
            let q = q(random, 32);
            let values = with(&q, &|q| d * (f32::from(q) - 16.0));
            ([&d_bytes[..], &fifth(&q), &low_high(&q)].concat(), values)
        }
        "Q5_1" => {
            let q = q(random, 32);
            let values = with(&q, &|q| d * f32::from(q) + m);
            ([&d_bytes[..], &m_bytes, &fifth(&q), &low_high(&q)].concat(), values)
        }
        "Q8_0" => {
            let q = q(random, 256);
            let values = with(&q, &|q| d * f32::from(q as i8));
            ([&d_bytes[..], &q].concat(), values)
        }
        "IQ4_NL" => {
            let levels = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
            let q = q(random, 16);
            let values = with(&q, &|q| d * levels[usize::from(q)] as f32);
            ([&d_bytes[..], &low_high(&q)].concat(), values)
        }
        "MXFP4" => {
            let levels = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
            let (e, q) = (110 + random.below(18) as u8, q(random, 16));
            let power = 2f32.powi(i32::from(e) - 127);
            let sign = |q: u8| if q < 8 { 1.0 } else { -1.0 };
            let values = with(&q, &|q| sign(q) * levels[usize::from(q & 7)] * power);
            ([&[e][..], &low_high(&q)].concat(), values)
        }
        "Q4_K" | "Q5_K" => {
            let five = kind == "Q5_K";
            let (mut scales, mut minima) = ([0u8; 8], [0u8; 8]);
            let (mut values, mut qs) = (Vec::new(), Vec::new());
            for i in 0..8 {
                (scales[i], minima[i]) = (random.below(64) as u8, random.below(64) as u8);
                let q = q(random, if five { 32 } else { 16 });
                let (scale, minimum) = (d * f32::from(scales[i]), m * f32::from(minima[i]));
                values.extend(q.iter().map(|&q| scale * f32::from(q) - minimum));
                qs.push(q);
            }
            let mut bytes = [d_bytes, m_bytes].concat();
            bytes.extend((0..4).map(|i| scales[i] | scales[i + 4] >> 4 << 6));
            bytes.extend((0..4).map(|i| minima[i] | minima[i + 4] >> 4 << 6));
            bytes.extend((0..4).map(|i| (scales[i + 4] & 15) | (minima[i + 4] & 15) << 4));
            if five {
                bytes.extend((0..32).map(|j| (0..8).fold(0, |b, i| b | qs[i][j] >> 4 << i)));
            }
            for pair in qs.chunks_exact(2) {
                bytes.extend((0..32).map(|j| (pair[0][j] & 15) | (pair[1][j] & 15) << 4));
            }
            (bytes, values)
        }
        "Q6_K" => {
            let (mut low, mut high) = (vec![0u8; 128], vec![0u8; 64]);
            let scales: Vec<i8> = (0..16).map(|_| random.below(256) as u8 as i8).collect();
            let mut values = Vec::new();
            for n in 0..256 {
                let q = random.below(64) as u8;
                let (part, quarter, j) = (n / 128, n / 32 % 4, n % 32);
                low[part * 64 + (quarter % 2) * 32 + j] |= (q & 15) << (quarter / 2 * 4);
                high[part * 32 + j] |= (q >> 4) << (quarter * 2);
                values.push(d * f32::from(scales[n / 16]) * (f32::from(q) - 32.0));
            }
            let scales: Vec<u8> = scales.into_iter().map(|s| s as u8).collect();
            ([low, high, scales, d_bytes.to_vec()].concat(), values)
        }
        other => panic!("{other}"),
    }
}
