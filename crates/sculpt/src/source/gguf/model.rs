//! Metadata of llama.cpp's architectures, in the words of the checkpoints they were made from.
//!
//! What comes out is a `config.json` of the family and tensors under its names, so that everything behind
//! knows one language only. What llama.cpp does without saying so in the file (which routers divide by the
//! sum, whose queries are permuted) is said here.

use std::collections::{BTreeMap, HashMap};

use serde_json::{Map, Value as Json, json};

use super::arch::{ARCHS, Arch};
use super::names::names;
use super::{MAX_NAME, Metadata, Tensor};
use crate::config::MAX_LAYERS;
use crate::error::{SculptError, Warning};
use crate::source::Stored;

/// Reads metadata of one architecture.
pub(super) struct Keys<'a> {
    pub metadata: &'a Metadata,
    pub arch: &'static Arch,
}

impl Keys<'_> {
    pub fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.arch.name)
    }

    pub fn number(&self, key: &str) -> Result<Option<u64>, SculptError> {
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
    let name = name.filter(|name| name.len() <= MAX_NAME as usize);
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
    if blocks > MAX_LAYERS as u64 {
        return Err(metadata.bad(&keys.key("block_count"), &format!("at most {MAX_LAYERS}")));
    }
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
    put(arch.top_k, json!(keys.need("expert_used_count")?));
    if let (Some(gating), Some(found)) = (arch.gating, keys.number("expert_gating_func")?)
        && found != gating
    {
        let kind = if gating == 1 { "1 (softmax)" } else { "2 (sigmoid)" };
        return Err(metadata.bad(&keys.key("expert_gating_func"), kind));
    }
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
        && !arch.latent
    {
        return Err(metadata.bad(&keys.key("attention.value_length"), "equal to attention.key_length"));
    }
    let norm = metadata.flag(&keys.key("expert_weights_norm"))?.unwrap_or(arch.norm_topk);
    let scale = keys.float("expert_weights_scale")?;
    let leading = keys.number("leading_dense_block_count")?.unwrap_or(0);
    let rotated = keys.number("rope.dimension_count")?;
    let head = head_dim.unwrap_or(width / heads.max(1));
    if !arch.latent {
        put("head_dim", json!(head));
        // llama.cpp rotates the whole head where the file is silent, some families a part.
        put("partial_rotary_factor", json!(part_of(rotated.unwrap_or(head), head)));
    }
    put(
        "model_type",
        json!(match arch.name {
            "deepseek2" if keys.number("expert_gating_func")? == Some(2) => "deepseek_v3",
            _ => arch.family,
        }),
    );
    let has = |name: &str| tensors.contains_key(name);
    let moe_layers = || (0..layers).filter(|layer| has(&format!("blk.{layer}.ffn_gate_inp.weight")));
    let shared_width = || -> Result<Json, SculptError> {
        let shared = keys.number("expert_shared_feed_forward_length")?;
        let of_tensor = tensors.get("blk.0.ffn_gate_shexp.weight").and_then(|t| t.shape.first());
        Ok(json!(shared.or(of_tensor.map(|&n| n as u64))))
    };
    match arch.name {
        "qwen3moe" | "qwen2moe" => {
            put("moe_intermediate_size", json!(expert));
            put("intermediate_size", json!(dense.unwrap_or(expert)));
            put("norm_topk_prob", json!(norm));
            let moe: Vec<u64> = moe_layers().collect();
            let dense: Vec<u64> = (0..layers).filter(|layer| !moe.contains(layer)).collect();
            put("mlp_only_layers", json!(dense));
            put("decoder_sparse_step", json!(1));
            if arch.name == "qwen2moe" {
                put("shared_expert_intermediate_size", shared_width()?);
                put("qkv_bias", json!(true));
            } else {
                put("attention_bias", json!(false));
            }
        }
        "qwen3next" | "qwen35moe" => {
            put("moe_intermediate_size", json!(expert));
            put("norm_topk_prob", json!(norm));
            put("shared_expert_intermediate_size", shared_width()?);
            put("attention_bias", json!(has("blk.0.attn_q.bias")));
            let kind = |layer| match has(&format!("blk.{layer}.ssm_conv1d.weight")) {
                true => "linear_attention",
                false => "full_attention",
            };
            put("layer_types", json!((0..layers).map(kind).collect::<Vec<_>>()));
            let value_heads = keys.need("ssm.time_step_rank")?;
            let values = keys.need("ssm.inner_size")?;
            if value_heads == 0 || !values.is_multiple_of(value_heads) {
                return Err(metadata.bad(&keys.key("ssm.inner_size"), "a multiple of ssm.time_step_rank"));
            }
            put("linear_num_key_heads", json!(keys.need("ssm.group_count")?));
            put("linear_num_value_heads", json!(value_heads));
            put("linear_key_head_dim", json!(keys.need("ssm.state_size")?));
            put("linear_value_head_dim", json!(values / value_heads));
            put("linear_conv_kernel_dim", json!(keys.need("ssm.conv_kernel")?));
        }
        "minimax-m2" => {
            put("intermediate_size", json!(expert));
            put("attention_bias", json!(has("blk.0.attn_q.bias")));
            put("use_qk_norm", json!(has("blk.0.attn_q_norm.weight")));
            put("use_routing_bias", json!(has("blk.0.exp_probs_b.bias")));
        }
        "ernie4_5-moe" => {
            put("moe_intermediate_size", json!(expert));
            put("intermediate_size", json!(dense.unwrap_or(0)));
            put("moe_num_shared_experts", json!(keys.number("expert_shared_count")?.unwrap_or(0)));
            put("moe_layer_start_index", json!(leading));
            put("moe_layer_interval", json!(keys.number("interleave_moe_layer_step")?.unwrap_or(1)));
            // The converter does not write it.
            put("moe_layer_end_index", json!(moe_layers().next_back()));
            put("use_bias", json!(has("blk.0.attn_q.bias")));
        }
        "granitemoe" => {
            put("intermediate_size", json!(expert));
            put("attention_bias", json!(has("blk.0.attn_q.bias")));
            put("shared_intermediate_size", json!(keys.number("expert_shared_feed_forward_length")?));
            // There a switch for RoPE.
            if metadata.flag(&keys.key("rope.scaling.finetuned"))? == Some(false) {
                return Err(metadata.bad(&keys.key("rope.scaling.finetuned"), "true (RoPE)"));
            }
            // As llama.cpp where the file is silent.
            let attention = keys.float("attention.scale")?.filter(|&x| x != 0.0);
            put("attention_multiplier", json!(attention.unwrap_or(1.0 / (head.max(1) as f64).sqrt())));
            for (theirs, ours) in [
                ("embedding_scale", "embedding_multiplier"),
                ("residual_scale", "residual_multiplier"),
                ("logit_scale", "logits_scaling"),
            ] {
                put(ours, json!(keys.float(theirs)?));
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
            if arch.indexer {
                // Whoever has no groups says so there; a guess would be another model without any sign.
                keys.need("expert_group_count")?;
                if scale.is_none() {
                    return Err(metadata.bad(&keys.key("expert_weights_scale"), "a number"));
                }
            }
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
            if arch.indexer {
                put("index_n_heads", json!(keys.need("attention.indexer.head_count")?));
                put("index_head_dim", json!(keys.need("attention.indexer.key_length")?));
                put("index_topk", json!(keys.need("attention.indexer.top_k")?));
            }
            if arch.name == "glm4moe" {
                put("attention_bias", json!(tensors.contains_key("blk.0.attn_q.bias")));
                put("use_qk_norm", json!(tensors.contains_key("blk.0.attn_q_norm.weight")));
            }
        }
    }
    if arch.latent {
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

/// The factor of which the reference makes `part` again: the whole part of its product with `whole`.
fn part_of(part: u64, whole: u64) -> f64 {
    let whole = whole.max(1) as f64;
    let factor = part as f64 / whole;
    if ((whole * factor) as u64) < part { factor.next_up() } else { factor }
}

fn rope_scaling(keys: &Keys<'_>, arch: &Arch) -> Result<Json, SculptError> {
    let factor = keys.float("rope.scaling.factor")?.or(keys.float("rope.scale_linear")?);
    let original = keys.number("rope.scaling.original_context_length")?;
    let kind = match keys.text("rope.scaling.type")? {
        None if factor.is_some_and(|x| x != 0.0 && x != 1.0) => "linear",
        None | Some("none") => return Ok(Json::Null),
        Some(kind @ ("linear" | "yarn")) => kind,
        Some(_) => return Err(keys.metadata.bad(&keys.key("rope.scaling.type"), "none, linear or yarn")),
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

#[cfg(test)]
mod tests {
    use super::part_of;

    #[test]
    fn the_rotated_part_comes_out_of_its_factor() {
        for whole in 1..=512 {
            for part in 1..=whole {
                assert_eq!((whole as f64 * part_of(part, whole)) as u64, part, "{part} of {whole}");
            }
            assert_eq!(part_of(whole, whole).to_bits(), 1f64.to_bits());
        }
    }
}
