//! GGUF files made by code: a writer, and what llama.cpp's converter makes of a checkpoint: its names, stacks,
//! permutations and changed weights, family by family, written after `conversion/*.py` of llama.cpp.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use serde_json::Value;
use smoe_format::half::bf16_to_f32;

/// A tensor of a checkpoint.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// `F32` or `BF16`.
    pub dtype: String,
    /// Dimensions, outermost first.
    pub shape: Vec<usize>,
    /// Its weights, little-endian.
    pub bytes: Vec<u8>,
}

impl Tensor {
    fn values(&self) -> Vec<f32> {
        match self.dtype.as_str() {
            "F32" => self.bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
            "BF16" => {
                self.bytes.as_chunks::<2>().0.iter().map(|b| bf16_to_f32(u16::from_le_bytes(*b))).collect()
            }
            other => panic!("{other} is written as it is only"),
        }
    }
}

/// `config.json` and all tensors of a checkpoint of one file.
///
/// # Panics
/// If it does not read.
#[must_use]
pub fn load(dir: &Path) -> (Value, BTreeMap<String, Tensor>) {
    let json = |e| panic!("{}: {e}", dir.display());
    let config = serde_json::from_slice(&crate::read(&dir.join("config.json"))).unwrap_or_else(json);
    let bytes = crate::read(&dir.join("model.safetensors"));
    let file = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    let tensors = file.tensors().into_iter().map(|(name, view)| {
        let (dtype, shape) = (format!("{:?}", view.dtype()), view.shape().to_vec());
        (name, Tensor { dtype, shape, bytes: view.data().to_vec() })
    });
    (config, tensors.collect())
}

/// A value of the metadata.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "named for their types")]
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
    /// A text.
    #[must_use]
    pub fn str(text: &str) -> Self {
        Self::Str(text.to_owned())
    }
}

/// A tensor: name, dimensions outermost first, type, bytes.
pub type Entry = (String, Vec<usize>, u32, Vec<u8>);

/// A file.
#[derive(Clone, Debug, Default)]
pub struct Gguf {
    /// Metadata, in order.
    pub meta: Vec<(String, Meta)>,
    /// Tensors, in order.
    pub tensors: Vec<Entry>,
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

impl Gguf {
    /// Sets a key of the metadata.
    pub fn set(&mut self, key: &str, value: Meta) {
        self.meta.retain(|(k, _)| k != key);
        self.meta.push((key.to_owned(), value));
    }

    /// The file, and where its data begin.
    #[must_use]
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

    /// Writes it.
    ///
    /// # Panics
    /// If it cannot.
    pub fn write(&self, path: &Path) {
        crate::write(path, &self.bytes().0);
    }

    /// Writes it in parts; the first has the metadata only, as llama.cpp may have it. Returns their paths.
    ///
    /// # Panics
    /// If it cannot.
    #[must_use]
    pub fn write_split(&self, dir: &Path, stem: &str, parts: usize) -> Vec<PathBuf> {
        let each = self.tensors.len().div_ceil(parts - 1);
        let mut paths = Vec::new();
        for no in 0..parts {
            let mut part = Self::default();
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
/// values of latent attention apart, and gate and up of experts in one, as newer files have them.
///
/// # Panics
/// If the checkpoint is of a family or form that is not known here.
#[must_use]
pub fn of_checkpoint(config: &Value, tensors: &BTreeMap<String, Tensor>, split_heads: bool) -> Gguf {
    let family = config["model_type"].as_str().expect("a family");
    let config = if config["text_config"].is_object() { &config["text_config"] } else { config };
    let arch = match family {
        "qwen3_moe" => "qwen3moe",
        "qwen2_moe" => "qwen2moe",
        "mixtral" => "llama",
        "deepseek_v2" | "deepseek_v3" => "deepseek2",
        "glm4_moe" => "glm4moe",
        "gpt_oss" => "gpt-oss",
        "minimax_m2" => "minimax-m2",
        "ernie4_5_moe" => "ernie4_5-moe",
        "glm_moe_dsa" => "glm-dsa",
        "deepseek_v32" => "deepseek32",
        "qwen3_next" => "qwen3next",
        "qwen3_5_moe" => "qwen35moe",
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
    let need = |key: &str| n(key).unwrap_or_else(|| panic!("{key} is missing"));
    let layers = need("num_hidden_layers");
    let (heads, d) = (need("num_attention_heads"), need("hidden_size"));
    let head_dim = n("head_dim").unwrap_or(d / heads);
    set("block_count", u(Some(layers)));
    set("context_length", u(n("max_position_embeddings")));
    set("embedding_length", u(Some(d)));
    set("feed_forward_length", u(n("intermediate_size")));
    set("attention.head_count", u(Some(heads)));
    let eps = config["rms_norm_eps"].as_f64().expect("a number") as f32;
    set("attention.layer_norm_rms_epsilon", Some(Meta::F32(eps)));
    let experts = ["num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"];
    set("expert_count", u(experts.iter().find_map(|key| n(key))));
    set("expert_used_count", u(n("num_experts_per_tok").or(n("moe_k"))));
    set("expert_feed_forward_length", u(n("moe_intermediate_size").or(n("intermediate_size"))));
    set("expert_shared_count", u(n("n_shared_experts").or(n("moe_num_shared_experts"))));
    set("expert_shared_feed_forward_length", u(n("shared_expert_intermediate_size")));
    set("leading_dense_block_count", u(n("first_k_dense_replace").or(n("moe_layer_start_index"))));
    set("interleave_moe_layer_step", u(n("moe_layer_interval")));
    for (theirs, ours) in [
        ("attention.scale", "attention_multiplier"),
        ("embedding_scale", "embedding_multiplier"),
        ("residual_scale", "residual_multiplier"),
        ("logit_scale", "logits_scaling"),
    ] {
        set(theirs, config[ours].as_f64().map(|x| Meta::F32(x as f32)));
    }
    for (theirs, ours) in [
        ("attention.indexer.head_count", "index_n_heads"),
        ("attention.indexer.key_length", "index_head_dim"),
        ("attention.indexer.top_k", "index_topk"),
        ("ssm.conv_kernel", "linear_conv_kernel_dim"),
        ("ssm.state_size", "linear_key_head_dim"),
        ("ssm.group_count", "linear_num_key_heads"),
        ("ssm.time_step_rank", "linear_num_value_heads"),
    ] {
        set(theirs, u(n(ours)));
    }
    let delta = Delta::of(config);
    set("ssm.inner_size", u(delta.as_ref().map(|d| (d.value_heads * d.value) as u32)));
    set("expert_group_count", u(n("n_group")));
    set("expert_group_used_count", u(n("topk_group")));
    set("attention.sliding_window", u(n("sliding_window").filter(|&n| n > 0)));
    let scale = config["routed_scaling_factor"].as_f64();
    set("expert_weights_scale", scale.map(|x| Meta::F32(x as f32)));
    if matches!(arch, "deepseek2" | "deepseek32" | "glm-dsa" | "glm4moe") {
        set("expert_weights_norm", Some(Meta::Bool(config["norm_topk_prob"] == true)));
        let sigmoid = family != "deepseek_v2";
        set("expert_gating_func", u(Some(if sigmoid { 2 } else { 1 })));
    }
    if arch == "minimax-m2" {
        set("expert_gating_func", u(Some(2)));
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
        let all = rope["mscale_all_dim"].as_f64();
        set("rope.scaling.yarn_log_multiplier", all.map(|x| Meta::F32((0.1 * x) as f32)));
    }

    let mut stacks: BTreeMap<String, BTreeMap<usize, Shaped>> = BTreeMap::new();
    for (name, tensor) in tensors {
        if name.starts_with("model.visual.") {
            continue;
        }
        let name = name.replace("model.language_model.", "model.");
        let changed = delta.as_ref().and_then(|delta| delta.change(arch == "qwen35moe", &name, tensor));
        if let Some(changed) = changed {
            file.tensors.extend(changed);
            continue;
        }
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
                        if matches!(arch, "llama" | "deepseek" | "granitemoe") =>
                    {
                        let part = if *proj == "q_proj" { "attn_q.weight" } else { "attn_k.weight" };
                        push(blk(part), shape, interleaved(shape, &bytes, head_dim as usize));
                    }
                    ["self_attn", "kv_b_proj", "weight"] if split_heads => {
                        let (k, v) = apart(tensor, heads as usize, need("qk_nope_head_dim") as usize);
                        push(blk("attn_k_b.weight"), &k.0, k.1);
                        push(blk("attn_v_b.weight"), &v.0, v.1);
                    }
                    ["self_attn", "indexer", part, kind] => {
                        let part = match *part {
                            "wq_b" => "attn_q_b",
                            "wk" => "attn_k",
                            "weights_proj" => "proj",
                            same => same,
                        };
                        push(blk(&format!("indexer.{part}.{kind}")), shape, bytes);
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
                    [_, "router", "layer", "weight"] => push(blk("ffn_gate_inp.weight"), shape, bytes),
                    [_, projection @ ("input_linear" | "output_linear"), "weight"] => {
                        let (n, cols) = (shape[0], shape[2]);
                        if *projection == "output_linear" {
                            push(blk("ffn_down_exps.weight"), shape, bytes);
                            continue;
                        }
                        // Of each expert the gate's rows, and then those of up.
                        let half = [n, shape[1] / 2, cols];
                        let each = bytes.len() / (2 * n);
                        for (i, part) in ["gate", "up"].into_iter().enumerate() {
                            let own = bytes.chunks_exact(each).skip(i).step_by(2).flatten().copied();
                            push(blk(&format!("ffn_{part}_exps.weight")), &half, own.collect());
                        }
                    }
                    [_, "moe_statics" | "e_score_correction_bias", ..] => {
                        push(blk("exp_probs_b.bias"), shape, bytes);
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
                        stack.insert(expert.parse().expect("a number"), (shape.clone(), bytes));
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
    if split_heads && delta.is_some() {
        stacks = fused(stacks);
    }
    for (name, stack) in stacks {
        let mut shape = vec![stack.len()];
        shape.extend(&stack[&0].0);
        let bytes = stack.into_values().flat_map(|(_, bytes)| bytes).collect();
        file.tensors.push((name, shape, BF16, bytes));
    }
    file
}

/// Gate and up of each expert in one, the gate's rows first.
fn fused(stacks: BTreeMap<String, BTreeMap<usize, Shaped>>) -> BTreeMap<String, BTreeMap<usize, Shaped>> {
    let mut out = BTreeMap::<String, BTreeMap<usize, Shaped>>::new();
    // By name, gates come before ups.
    for (name, stack) in stacks {
        let name =
            name.replace("ffn_gate_exps", "ffn_gate_up_exps").replace("ffn_up_exps", "ffn_gate_up_exps");
        let both = out.entry(name).or_default();
        for (expert, (shape, bytes)) in stack {
            let (all, data) = both.entry(expert).or_insert_with(|| (vec![0, shape[1]], Vec::new()));
            all[0] += shape[0];
            data.extend(bytes);
        }
    }
    out
}

/// The widths of gated delta nets.
struct Delta {
    key_heads: usize,
    value_heads: usize,
    key: usize,
    value: usize,
}

impl Delta {
    fn of(config: &Value) -> Option<Self> {
        let n = |key: &str| config[key].as_u64().map(|n| n as usize);
        Some(Self {
            key_heads: n("linear_num_key_heads")?,
            value_heads: n("linear_num_value_heads")?,
            key: n("linear_key_head_dim")?,
            value: n("linear_value_head_dim")?,
        })
    }

    /// What becomes of a tensor that is changed: those of linear attention, and norms around one.
    fn change(&self, tiled: bool, name: &str, tensor: &Tensor) -> Option<Vec<Entry>> {
        let floats = |name: String, shape: Vec<usize>, values: Vec<f32>| {
            (name, shape, F32, values.into_iter().flat_map(f32::to_le_bytes).collect::<Vec<u8>>())
        };
        let one = |name: String| {
            let values = tensor.values().into_iter().map(|w| w + 1.0).collect();
            Some(vec![floats(name, tensor.shape.clone(), values)])
        };
        if name == "model.norm.weight" {
            return one("output_norm.weight".to_owned());
        }
        let (layer, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
        let blk = |part: &str| format!("blk.{layer}.{part}");
        let part = match rest {
            "input_layernorm.weight" => return one(blk("attn_norm.weight")),
            "post_attention_layernorm.weight" => return one(blk("post_attention_norm.weight")),
            "self_attn.q_norm.weight" => return one(blk("attn_q_norm.weight")),
            "self_attn.k_norm.weight" => return one(blk("attn_k_norm.weight")),
            _ => rest.strip_prefix("linear_attn.")?,
        };
        let (rows, cols) = (tensor.shape[0], tensor.shape.iter().skip(1).product::<usize>());
        let values = tensor.values();
        let row = |r: usize| &values[r * cols..(r + 1) * cols];
        let per = self.value_heads / self.key_heads;
        // `reshape(key heads, per, width).swapaxes(0, 1)`: which old place each new one has.
        let order = |first: usize, n: usize, width: usize| -> Vec<usize> {
            if !tiled {
                return (0..n).collect();
            }
            let mut from: Vec<usize> = (0..first).collect();
            for j in 0..per {
                for g in 0..self.key_heads {
                    from.extend((0..width).map(|i| first + (g * per + j) * width + i));
                }
            }
            from
        };
        let keys = self.key_heads * self.key;
        let in_rows = |from: Vec<usize>| from.into_iter().flat_map(|r| row(r).to_vec()).collect::<Vec<f32>>();
        let shape = tensor.shape.clone();
        Some(match part {
            "in_proj_qkvz.weight" => {
                let of = 2 * self.key + 2 * per * self.value;
                let part = |first: usize, n: usize| {
                    (0..self.key_heads).flat_map(move |head| (0..n).map(move |i| head * of + first + i))
                };
                let v = per * self.value;
                let qkv = part(0, self.key).chain(part(self.key, self.key)).chain(part(2 * self.key, v));
                let z = part(2 * self.key + v, v);
                let (qkv, z) = (in_rows(qkv.collect()), in_rows(z.collect()));
                vec![
                    floats(blk("attn_qkv.weight"), vec![qkv.len() / cols, cols], qkv),
                    floats(blk("attn_gate.weight"), vec![z.len() / cols, cols], z),
                ]
            }
            "in_proj_ba.weight" => vec![floats(blk("ssm_ba.weight"), shape, values)],
            "in_proj_qkv.weight" => {
                let all = in_rows(order(2 * keys, rows, self.value));
                vec![floats(blk("attn_qkv.weight"), shape, all)]
            }
            "in_proj_z.weight" => {
                vec![floats(blk("attn_gate.weight"), shape, in_rows(order(0, rows, self.value)))]
            }
            "in_proj_b.weight" => vec![floats(blk("ssm_beta.weight"), shape, in_rows(order(0, rows, 1)))],
            "in_proj_a.weight" => vec![floats(blk("ssm_alpha.weight"), shape, in_rows(order(0, rows, 1)))],
            "conv1d.weight" => {
                let all = in_rows(order(2 * keys, rows, self.value));
                vec![floats(blk("ssm_conv1d.weight"), vec![rows, cols], all)]
            }
            "norm.weight" => vec![floats(blk("ssm_norm.weight"), shape, values)],
            "A_log" => {
                let all = order(0, rows, 1).into_iter().map(|i| -values[i].exp()).collect();
                vec![floats(blk("ssm_a"), shape, all)]
            }
            "dt_bias" => {
                let all = order(0, rows, 1).into_iter().map(|i| values[i]).collect();
                vec![floats(blk("ssm_dt.bias"), shape, all)]
            }
            "out_proj.weight" => {
                let from = order(0, cols, self.value);
                let all = (0..rows).flat_map(|r| from.iter().map(move |&c| (r, c)));
                let all = all.map(|(r, c)| values[r * cols + c]).collect();
                vec![floats(blk("ssm_out.weight"), shape, all)]
            }
            other => panic!("{other}"),
        })
    }
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
