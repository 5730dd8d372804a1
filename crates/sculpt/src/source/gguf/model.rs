//! Metadata and tensor names of llama.cpp's architectures, in the words of the checkpoints they were made from.
//!
//! What comes out is a `config.json` of the family and tensors under its names, so that everything behind
//! knows one language only. What llama.cpp does without saying so in the file (which routers divide by the
//! sum, whose queries are permuted) is said here.

use std::collections::{BTreeMap, HashMap};

use serde_json::{Map, Value as Json, json};

use super::{Metadata, Tensor, Type, stored};
use crate::error::{SculptError, Warning};
use crate::source::stacked::{Heads, Leaf};
use crate::source::{At, Form, Order, Stored};

/// What this build knows of an architecture.
struct Arch {
    name: &'static str,
    /// Queries and keys have the halves of each head interleaved.
    permuted: bool,
    /// Where the feed-forward part is.
    ffn: &'static str,
    /// The router in it.
    router: &'static str,
    /// The shared expert in it.
    shared: &'static str,
    /// The key of the number of experts.
    n_experts: &'static str,
    /// Chosen weights are divided by their sum, where the file does not say.
    norm_topk: bool,
}

const ARCHS: &[Arch] = &[
    Arch {
        name: "qwen3moe",
        permuted: false,
        ffn: "mlp",
        router: "gate",
        shared: "shared_expert",
        n_experts: "num_experts",
        norm_topk: true,
    },
    Arch {
        name: "qwen2moe",
        permuted: false,
        ffn: "mlp",
        router: "gate",
        shared: "shared_expert",
        n_experts: "num_experts",
        norm_topk: false,
    },
    Arch {
        name: "olmoe",
        permuted: false,
        ffn: "mlp",
        router: "gate",
        shared: "shared_expert",
        n_experts: "num_experts",
        norm_topk: false,
    },
    Arch {
        name: "llama",
        permuted: true,
        ffn: "block_sparse_moe",
        router: "gate",
        shared: "shared_expert",
        n_experts: "num_local_experts",
        norm_topk: true,
    },
    Arch {
        name: "deepseek",
        permuted: true,
        ffn: "mlp",
        router: "gate",
        shared: "shared_experts",
        n_experts: "n_routed_experts",
        norm_topk: false,
    },
    Arch {
        name: "deepseek2",
        permuted: false,
        ffn: "mlp",
        router: "gate",
        shared: "shared_experts",
        n_experts: "n_routed_experts",
        norm_topk: false,
    },
    Arch {
        name: "glm4moe",
        permuted: false,
        ffn: "mlp",
        router: "gate",
        shared: "shared_experts",
        n_experts: "n_routed_experts",
        norm_topk: false,
    },
    Arch {
        name: "gpt-oss",
        permuted: false,
        ffn: "mlp",
        router: "router",
        shared: "shared_expert",
        n_experts: "num_local_experts",
        norm_topk: true,
    },
];

/// Parts of a layer that are called alike in every architecture.
const PARTS: &[(&str, &str)] = &[
    ("attn_norm", "input_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
    // GLM-4 and GPT-OSS.
    ("post_attention_norm", "post_attention_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("attn_q_a", "self_attn.q_a_proj"),
    ("attn_q_a_norm", "self_attn.q_a_layernorm"),
    ("attn_q_b", "self_attn.q_b_proj"),
    ("attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa"),
    ("attn_kv_a_norm", "self_attn.kv_a_layernorm"),
    ("attn_kv_b", "self_attn.kv_b_proj"),
];

/// Reads metadata of one architecture.
struct Keys<'a> {
    metadata: &'a Metadata,
    arch: &'static Arch,
}

impl Keys<'_> {
    fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.arch.name)
    }

    fn number(&self, key: &str) -> Result<Option<u64>, SculptError> {
        self.metadata.unsigned(&self.key(key))
    }

    fn need(&self, key: &str) -> Result<u64, SculptError> {
        self.number(key)?.ok_or_else(|| self.metadata.bad(&self.key(key), "a whole number"))
    }

    fn float(&self, key: &str) -> Result<Option<f64>, SculptError> {
        self.metadata.float(&self.key(key))
    }

    fn text(&self, key: &str) -> Result<Option<&str>, SculptError> {
        self.metadata.text(&self.key(key))
    }
}

/// The model's config and its tensors under the names of its family.
pub(super) fn model(
    metadata: &Metadata,
    tensors: &BTreeMap<String, Tensor>,
    warnings: &mut Vec<Warning>,
) -> Result<(Json, HashMap<String, Stored>), SculptError> {
    let name = metadata.text("general.architecture")?;
    let name = name.ok_or_else(|| metadata.bad("general.architecture", "the name of an architecture"))?;
    let Some(arch) = ARCHS.iter().find(|arch| arch.name == name) else {
        if metadata.unsigned(&format!("{name}.expert_count"))?.unwrap_or(0) == 0 {
            return Err(SculptError::Dense { file: metadata.file.clone(), architecture: name.to_owned() });
        }
        let known: Vec<&str> = ARCHS.iter().map(|arch| arch.name).collect();
        return Err(metadata.bad("general.architecture", &format!("one of {}", known.join(", "))));
    };
    let keys = Keys { metadata, arch };
    if keys.number("expert_count")?.unwrap_or(0) == 0 {
        return Err(SculptError::Dense { file: metadata.file.clone(), architecture: name.to_owned() });
    }
    let config = config(&keys, tensors, warnings)?;
    let tensors = names(&keys, &config, tensors)?;
    Ok((config, tensors))
}

/// A `config.json` of the family.
fn config(
    keys: &Keys<'_>,
    tensors: &BTreeMap<String, Tensor>,
    warnings: &mut Vec<Warning>,
) -> Result<Json, SculptError> {
    let (arch, metadata) = (keys.arch, keys.metadata);
    let heads = keys.need("attention.head_count")?;
    let blocks = keys.need("block_count")?;
    // Blocks that predict further tokens are no layers of the model.
    let more = keys.number("nextn_predict_layers")?.unwrap_or(0);
    let layers = blocks.checked_sub(more).filter(|&n| n > 0);
    let layers =
        layers.ok_or_else(|| metadata.bad(&keys.key("block_count"), "above the blocks that predict"))?;
    let width = keys.need("embedding_length")?;
    let embedding = tensors.get("token_embd.weight");
    let vocab = embedding.and_then(|t| t.shape.first().copied());
    let eps_key = "attention.layer_norm_rms_epsilon";
    let eps = keys.float(eps_key)?.ok_or_else(|| metadata.bad(&keys.key(eps_key), "a number"))?;
    let mut config = Map::new();
    let mut put = |key: &str, value: Json| {
        config.insert(key.to_owned(), value);
    };
    put("hidden_size", json!(width));
    put("num_hidden_layers", json!(layers));
    put("num_attention_heads", json!(heads));
    put("max_position_embeddings", json!(keys.need("context_length")?));
    put("rms_norm_eps", json!(eps));
    put("vocab_size", json!(vocab.unwrap_or(0)));
    put("tie_word_embeddings", json!(!tensors.contains_key("output.weight")));
    put("hidden_act", json!("silu"));
    put(arch.n_experts, json!(keys.need("expert_count")?));
    put("num_experts_per_tok", json!(keys.need("expert_used_count")?));
    if let Some(base) = keys.float("rope.freq_base")? {
        put("rope_theta", json!(base));
    }
    let kv_heads = match keys.metadata.get(&keys.key("attention.head_count_kv")) {
        Some(_) => keys.need("attention.head_count_kv")?,
        None => heads,
    };
    put("num_key_value_heads", json!(kv_heads));
    let dense = keys.number("feed_forward_length")?;
    let expert = keys.number("expert_feed_forward_length")?;
    // The width of an expert stands in its tensors, and in old files only there.
    let of_tensors = || {
        let any = tensors.iter().find(|(name, _)| name.ends_with(".ffn_gate_exps.weight"))?.1;
        any.shape.get(1).map(|&n| n as u64)
    };
    let expert = expert.or_else(of_tensors).or(dense);
    let expert = expert.ok_or_else(|| metadata.bad(&keys.key("expert_feed_forward_length"), "a number"))?;
    let head_dim = keys.number("attention.key_length")?;
    if let Some(other) = keys.number("attention.value_length")?
        && head_dim.is_some_and(|n| n != other)
        && arch.name != "deepseek2"
    {
        return Err(metadata.bad(&keys.key("attention.value_length"), "equal to attention.key_length"));
    }
    let norm = metadata.flag(&keys.key("expert_weights_norm"))?.unwrap_or(arch.norm_topk);
    let scale = keys.float("expert_weights_scale")?;
    let leading = keys.number("leading_dense_block_count")?.unwrap_or(0);
    let rotated = keys.number("rope.dimension_count")?;
    let head = head_dim.unwrap_or(width / heads.max(1));
    if arch.name != "deepseek2" {
        put("head_dim", json!(head));
        if let Some(rotated) = rotated.filter(|&n| n != head) {
            put("partial_rotary_factor", json!(rotated as f64 / head.max(1) as f64));
        }
    }
    put(
        "model_type",
        json!(match arch.name {
            "qwen3moe" => "qwen3_moe",
            "qwen2moe" => "qwen2_moe",
            "llama" => "mixtral",
            "glm4moe" => "glm4_moe",
            "gpt-oss" => "gpt_oss",
            "deepseek2" if keys.number("expert_gating_func")? == Some(2) => "deepseek_v3",
            "deepseek2" => "deepseek_v2",
            same => same,
        }),
    );
    match arch.name {
        "qwen3moe" | "qwen2moe" => {
            put("moe_intermediate_size", json!(expert));
            put("intermediate_size", json!(dense.unwrap_or(expert)));
            put("norm_topk_prob", json!(norm));
            let moe = |layer| tensors.contains_key(&format!("blk.{layer}.ffn_gate_inp.weight"));
            let dense: Vec<u64> = (0..layers).filter(|&layer| !moe(layer)).collect();
            put("mlp_only_layers", json!(dense));
            put("decoder_sparse_step", json!(1));
            if arch.name == "qwen2moe" {
                let shared = keys.number("expert_shared_feed_forward_length")?;
                let of_tensor = tensors.get("blk.0.ffn_gate_shexp.weight").map(|t| t.shape[0] as u64);
                put("shared_expert_intermediate_size", json!(shared.or(of_tensor)));
                put("qkv_bias", json!(true));
            } else {
                put("attention_bias", json!(false));
            }
        }
        "olmoe" => {
            put("intermediate_size", json!(expert));
            put("norm_topk_prob", json!(norm));
            put("clip_qkv", json!(keys.float("attention.clamp_kqv")?.filter(|&x| x > 0.0)));
            put("attention_bias", json!(false));
        }
        "llama" => {
            put("intermediate_size", json!(expert));
            put("sliding_window", json!(null));
        }
        "gpt-oss" => {
            put("intermediate_size", json!(expert));
            put("attention_bias", json!(true));
            put("sliding_window", json!(keys.need("attention.sliding_window")?));
            // llama.cpp: every other layer, the first one too.
            let kind = |layer| if layer % 2 == 0 { "sliding_attention" } else { "full_attention" };
            put("layer_types", json!((0..layers).map(kind).collect::<Vec<_>>()));
            put("swiglu_alpha", json!(1.702));
            put("swiglu_limit", json!(7.0));
        }
        _ => {
            put("moe_intermediate_size", json!(expert));
            put("intermediate_size", json!(dense.unwrap_or(0)));
            put("first_k_dense_replace", json!(leading));
            put("n_shared_experts", json!(keys.number("expert_shared_count")?.unwrap_or(0)));
            put("norm_topk_prob", json!(norm));
            put("routed_scaling_factor", json!(scale.filter(|&x| x != 0.0).unwrap_or(1.0)));
            if arch.name != "deepseek" {
                let groups = keys.number("expert_group_count")?;
                if groups.is_none() && arch.name == "deepseek2" {
                    warnings.push(Warning::Default {
                        key: "expert_group_count",
                        default: "1 (no expert groups)".to_owned(),
                    });
                }
                let groups = groups.unwrap_or(1).max(1);
                put("n_group", json!(groups));
                put("topk_group", json!(keys.number("expert_group_used_count")?.unwrap_or(1).max(1)));
                let method = if groups > 1 { "group_limited_greedy" } else { "greedy" };
                if arch.name == "deepseek2" && keys.number("expert_gating_func")? != Some(2) {
                    put("topk_method", json!(method));
                }
            }
            if arch.name == "glm4moe" {
                put("attention_bias", json!(tensors.contains_key("blk.0.attn_q.bias")));
                put("use_qk_norm", json!(tensors.contains_key("blk.0.attn_q_norm.weight")));
            }
        }
    }
    if arch.name == "deepseek2" {
        let rope = rotated.ok_or_else(|| metadata.bad(&keys.key("rope.dimension_count"), "a number"))?;
        let mla = keys.number("attention.key_length_mla")?;
        let key = mla.or(head_dim).filter(|&n| n > rope);
        let key =
            key.ok_or_else(|| metadata.bad(&keys.key("attention.key_length"), "above the rotated part"))?;
        let value = match mla {
            Some(_) => keys.need("attention.value_length_mla")?,
            None => keys.need("attention.value_length")?,
        };
        put("qk_rope_head_dim", json!(rope));
        put("qk_nope_head_dim", json!(key - rope));
        put("v_head_dim", json!(value));
        put("kv_lora_rank", json!(keys.need("attention.kv_lora_rank")?));
        put("q_lora_rank", json!(keys.number("attention.q_lora_rank")?.filter(|&n| n > 0)));
        // One head of latents, by llama.cpp's count.
        put("num_key_value_heads", json!(heads));
    }
    let scaling = rope_scaling(keys, arch)?;
    put("rope_scaling", scaling);
    if let Some(key) =
        ["rope_freqs.weight", "rope_factors_long.weight"].into_iter().find(|&key| tensors.contains_key(key))
    {
        return Err(metadata.bad(key, "no tensor of factors of RoPE's frequencies"));
    }
    Ok(Json::Object(config))
}

fn rope_scaling(keys: &Keys<'_>, arch: &Arch) -> Result<Json, SculptError> {
    let factor = keys.float("rope.scaling.factor")?.or(keys.float("rope.scale_linear")?);
    let original = keys.number("rope.scaling.original_context_length")?;
    let kind = match keys.text("rope.scaling.type")? {
        None if factor.is_some_and(|x| x != 0.0 && x != 1.0) => "linear",
        None | Some("none") => return Ok(Json::Null),
        Some(kind) => kind,
    };
    let mut scaling = Map::new();
    scaling.insert("rope_type".to_owned(), json!(kind));
    scaling.insert("factor".to_owned(), json!(factor));
    if let Some(original) = original {
        scaling.insert("original_max_position_embeddings".to_owned(), json!(original));
    }
    if kind == "yarn" {
        for (theirs, ours) in [
            ("rope.scaling.yarn_beta_fast", "beta_fast"),
            ("rope.scaling.yarn_beta_slow", "beta_slow"),
            ("rope.scaling.attn_factor", "attention_factor"),
            ("rope.scaling.yarn_attn_factor", "attention_factor"),
        ] {
            if let Some(x) = keys.float(theirs)? {
                scaling.insert(ours.to_owned(), json!(x));
            }
        }
        if let Some(x) = keys.float("rope.scaling.yarn_log_multiplier")? {
            // A tenth of `mscale_all_dim`, to which `mscale` is equal in all published models.
            let all = (x * 10.0 * 1e6).round() / 1e6;
            scaling.insert("mscale".to_owned(), json!(all));
            scaling.insert("mscale_all_dim".to_owned(), json!(all));
        }
        if arch.name == "gpt-oss" {
            scaling.insert("truncate".to_owned(), json!(false));
        }
    }
    Ok(Json::Object(scaling))
}

/// All tensors under the names of the family. Those that have none keep their own.
fn names(
    keys: &Keys<'_>,
    config: &Json,
    tensors: &BTreeMap<String, Tensor>,
) -> Result<HashMap<String, Stored>, SculptError> {
    let (arch, metadata) = (keys.arch, keys.metadata);
    let size = |key: &str| config[key].as_u64().unwrap_or(0) as usize;
    let head_dim = size("head_dim");
    let mut out = HashMap::new();
    for (name, tensor) in tensors {
        let plain = || stored(tensor, tensor.shape.clone(), 0, Order::Plain);
        let top = match name.as_str() {
            "token_embd.weight" => Some("model.embed_tokens.weight"),
            "output_norm.weight" => Some("model.norm.weight"),
            "output.weight" => Some("lm_head.weight"),
            _ => None,
        };
        if let Some(top) = top {
            out.insert(top.to_owned(), plain());
            continue;
        }
        let Some((layer, part, kind)) = layer_part(name) else {
            out.insert(name.clone(), plain());
            continue;
        };
        let prefix = format!("model.layers.{layer}");
        let ffn = format!("{prefix}.{}", arch.ffn);
        if let Some(&(_, ours)) = PARTS.iter().find(|(theirs, _)| *theirs == part) {
            let permuted = arch.permuted && matches!(part, "attn_q" | "attn_k");
            let order = match permuted {
                true if head_dim == 0 || head_dim % 2 == 1 || !tensor.shape[0].is_multiple_of(head_dim) => {
                    return Err(
                        metadata.bad(&keys.key("attention.key_length"), "a part of the queries' width")
                    );
                }
                // A bias lies in one row; its elements are the ones that are permuted.
                true if tensor.shape.len() == 1 => {
                    return Err(metadata.bad(name, "no bias where queries are permuted"));
                }
                true => Order::Rope { head_dim },
                false => Order::Plain,
            };
            out.insert(format!("{prefix}.{ours}.{kind}"), stored(tensor, tensor.shape.clone(), 0, order));
            continue;
        }
        match (part, tensor.shape.as_slice()) {
            ("attn_sinks", _) => _ = out.insert(format!("{prefix}.self_attn.sinks"), plain()),
            ("ffn_gate_inp", _) => _ = out.insert(format!("{ffn}.{}.{kind}", arch.router), plain()),
            ("ffn_gate_inp_shexp", shape) => {
                // A row that is written as a vector.
                let row = vec![1, shape.last().copied().unwrap_or(0)];
                out.insert(
                    format!("{ffn}.{}_gate.{kind}", arch.shared),
                    stored(tensor, row, 0, Order::Plain),
                );
            }
            ("exp_probs_b", _) => {
                out.insert(format!("{ffn}.gate.e_score_correction_bias"), plain());
            }
            ("attn_k_b" | "attn_v_b", _) => {
                if part == "attn_k_b"
                    && let Some(pair) = heads(tensor, tensors.get(&format!("blk.{layer}.attn_v_b.weight")))
                {
                    out.insert(format!("{prefix}.self_attn.kv_b_proj.weight"), pair);
                }
            }
            _ => {
                let Some((projection, of)) = feed_forward(part) else {
                    out.insert(name.clone(), plain());
                    continue;
                };
                let expert_name = |expert: usize| match (arch.name, projection) {
                    ("llama", "gate") => format!("{ffn}.experts.{expert}.w1.{kind}"),
                    ("llama", "down") => format!("{ffn}.experts.{expert}.w2.{kind}"),
                    ("llama", _) => format!("{ffn}.experts.{expert}.w3.{kind}"),
                    _ => format!("{ffn}.experts.{expert}.{projection}_proj.{kind}"),
                };
                match (of, tensor.shape.as_slice()) {
                    (Of::Dense, _) => _ = out.insert(format!("{ffn}.{projection}_proj.{kind}"), plain()),
                    (Of::Shared, _) => {
                        out.insert(format!("{ffn}.{}.{projection}_proj.{kind}", arch.shared), plain());
                    }
                    (Of::One(expert), _) => _ = out.insert(expert_name(expert), plain()),
                    (Of::All, &[n, rows, cols]) => {
                        let (unit, bytes) = tensor.kind.unit().unwrap_or((1, 1));
                        let each = (rows * (cols / unit) * bytes) as u64;
                        for expert in 0..n {
                            let skip = expert as u64 * each;
                            let part = stored(tensor, vec![rows, cols], skip, Order::Plain);
                            out.insert(expert_name(expert), part);
                        }
                    }
                    (Of::All, &[_, _]) if kind == "bias" => {
                        out.insert(format!("{ffn}.experts.{projection}_proj.bias"), plain());
                    }
                    (Of::All, _) => return Err(metadata.bad(name, "a tensor of three dimensions")),
                }
            }
        }
    }
    Ok(out)
}

/// Layer, part and kind ("weight" or "bias") of a name such as `blk.3.attn_q.weight`.
fn layer_part(name: &str) -> Option<(usize, &str, &str)> {
    let (layer, rest) = name.strip_prefix("blk.")?.split_once('.')?;
    let (part, kind) = rest.rsplit_once('.').unwrap_or((rest, "weight"));
    Some((layer.parse().ok()?, part, kind))
}

/// Whose feed-forward matrix it is.
enum Of {
    Dense,
    Shared,
    /// One expert's: files of before the stacks.
    One(usize),
    All,
}

fn feed_forward(part: &str) -> Option<(&str, Of)> {
    let (projection, rest) = ["gate", "up", "down"].into_iter().find_map(|projection| {
        let rest = part.strip_prefix("ffn_")?.strip_prefix(projection)?;
        Some((projection, rest))
    })?;
    match rest {
        "" => Some((projection, Of::Dense)),
        "_shexp" => Some((projection, Of::Shared)),
        "_exps" => Some((projection, Of::All)),
        _ => rest.strip_prefix('.')?.parse().ok().map(|expert| (projection, Of::One(expert))),
    }
}

/// Keys and values of latent attention, put together.
fn heads(k: &Tensor, v: Option<&Tensor>) -> Option<Stored> {
    let v = v?;
    let (&[n, cols, keys], &[n_v, values, cols_v]) = (k.shape.as_slice(), v.shape.as_slice()) else {
        return None;
    };
    let leaf = |t: &Tensor| {
        let at = At { shard: t.shard, offset: t.offset };
        match t.kind {
            Type::Float(ty) => Some(Leaf::Float(at, ty)),
            Type::Blocks(kind) => Some(Leaf::Ggml(at, kind)),
            Type::Other(_) => None,
        }
    };
    if (n, cols) != (n_v, cols_v) {
        return None;
    }
    let form = Form::Heads(Heads { k: leaf(k)?, v: leaf(v)?, keys, values });
    let shape = vec![n.checked_mul(keys + values)?, cols];
    Some(Stored { shape, shard: k.shard, form: Ok(form), order: Order::Plain })
}
