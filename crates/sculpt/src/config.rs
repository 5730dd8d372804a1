//! `config.json` to [`ModelSpec`].
//!
//! Both styles of configs are read: `rope_theta` and `rope_scaling` at the top level (transformers 4) and
//! `rope_parameters` (5). A key that this build cannot honour is refused by name.

mod keys;
mod rope;

use serde_json::{Map, Value};
use smoe_format::ModelSpec;
use smoe_format::spec::{
    Activation, AttentionSpec, DeltaSpec, FfnKind, GroupSpec, IndexerSpec, LatentSpec, MixerKind, MoeSpec,
    Multipliers,
};

use crate::error::{SculptError, Warning};
use crate::family::{Bias, Dense, Expert, Family, Hybrid, Indexer, Norm, QkNorm, Shared};
use keys::{Keys, bad, number, show};

/// The model that a `config.json` describes, and what was odd about it.
///
/// `tied_head` is what the config says; the weights may say otherwise ([`Warning::DifferentHead`]).
///
/// # Errors
/// Names the key, its value, and what this build needs.
pub fn spec_from_config(config: &Value) -> Result<(ModelSpec, Vec<Warning>), SculptError> {
    let family = family_of(config)?;
    let mut text = None;
    if let Some(key) = family.text {
        let found = config.get(key);
        let own = found.and_then(Value::as_object).ok_or_else(|| bad(key, found, "the text's config"))?;
        let mut own = own.clone();
        // Said of the whole.
        for key in ["model_type", "tie_word_embeddings"] {
            own.extend(config.get(key).map(|value| (key.to_owned(), value.clone())));
        }
        text = Some(Value::Object(own));
    }
    let has_vision = text.is_some() && config.get("vision_config").is_some_and(|value| !value.is_null());
    let config = text.as_ref().unwrap_or(config);
    let mut keys = Keys { config, warnings: Vec::new() };
    for only in family.conditions() {
        if let Some(value) = keys.get(only.key)
            && !(only.is)(value)
        {
            return Err(bad(only.key, Some(value), only.expected));
        }
    }
    if keys.flag("use_sliding_window", false)? && !matches!(config.get("sliding_window"), Some(Value::Null)) {
        return Err(bad("use_sliding_window", config.get("use_sliding_window"), "false (no sliding window)"));
    }

    let d_model = keys.size("hidden_size")?;
    let n_layers = keys.size("num_hidden_layers")?;
    let attention = keys.attention(family, d_model)?;
    let max_context = keys.size("max_position_embeddings")?;
    let (mixers, delta) = keys.hybrid(family, n_layers)?;
    let spec = ModelSpec {
        model_type: family.model_type.to_owned(),
        d_model,
        vocab_size: keys.size("vocab_size")?,
        max_context,
        rms_norm_eps: match keys.get("rms_norm_eps") {
            None => keys.default("rms_norm_eps", family.defaults.eps),
            Some(value) => number("rms_norm_eps", value)?,
        } as f32,
        tied_head: keys.flag("tie_word_embeddings", family.defaults.tied)?,
        rope: keys.rope(family, max_context, attention.head_dim)?,
        attention: AttentionSpec { score_scale: keys.score_scale(family, attention.head_dim)?, ..attention },
        layers: keys.layers(family, n_layers)?,
        windows: keys.windows(family, n_layers)?,
        mixers,
        delta,
        multipliers: keys.multipliers(family)?,
        moe: keys.moe(family)?,
    };
    for what in ["num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers"] {
        if keys.optional_size(what)?.unwrap_or(0) > 0 {
            keys.warnings.push(Warning::Ignored { what });
        }
    }
    if has_vision {
        keys.warnings.push(Warning::Vision { what: "vision_config" });
    }
    spec.validate()?;
    Ok((spec, keys.warnings))
}

/// The family that a config names.
pub(crate) fn family_of(config: &Value) -> Result<&'static Family, SculptError> {
    let found = config.get("model_type");
    found
        .and_then(Value::as_str)
        .and_then(Family::find)
        .ok_or_else(|| SculptError::Family { found: show(found), known: Family::known() })
}

/// More layers than this are taken for damage.
pub(crate) const MAX_LAYERS: usize = 4096;

impl<'a> Keys<'a> {
    fn attention(&self, family: &Family, d_model: usize) -> Result<AttentionSpec, SculptError> {
        let n_heads = self.size("num_attention_heads")?;
        let n_kv_heads = match self.optional_size("num_key_value_heads")? {
            Some(n) => n,
            None if family.kv_heads_optional => n_heads,
            None => return Err(bad("num_key_value_heads", None, "a number")),
        };
        if family.latent {
            if n_kv_heads != n_heads {
                let expected = format!("{n_heads}, as there are query heads");
                return Err(bad("num_key_value_heads", self.get("num_key_value_heads"), expected));
            }
            let rope_dim = self.size("qk_rope_head_dim")?;
            let latent = LatentSpec {
                q_rank: self.optional_size("q_lora_rank")?.unwrap_or(0),
                kv_rank: self.size("kv_lora_rank")?,
                rope_dim,
                value_dim: self.size("v_head_dim")?,
                // The reference's norms of latents do not ask the config.
                norm_eps: 1e-6,
            };
            let head_dim = self.size("qk_nope_head_dim")? + rope_dim;
            let (latent, indexer) = (Some(latent), self.indexer(family)?);
            return Ok(AttentionSpec {
                n_heads,
                n_kv_heads: 1,
                head_dim,
                latent,
                indexer,
                ..Default::default()
            });
        }
        let head_dim = match self.optional_size("head_dim")? {
            Some(n) => n,
            None if n_heads > 0 && d_model.is_multiple_of(n_heads) => d_model / n_heads,
            None => {
                return Err(bad("head_dim", None, "a number (hidden_size does not divide among the heads)"));
            }
        };
        let (qkv_bias, o_bias) = match family.bias {
            Bias::None => (false, false),
            Bias::Qkv(key, default) => (self.flag(key, default)?, false),
            Bias::All(key, default) => (self.flag(key, default)?, self.flag(key, default)?),
        };
        Ok(AttentionSpec {
            n_heads,
            n_kv_heads,
            head_dim,
            qk_norm: match family.qk_norm {
                QkNorm::None => false,
                QkNorm::Heads | QkNorm::Whole => true,
                QkNorm::Key(key) => self.flag(key, false)?,
            },
            qk_norm_whole: matches!(family.qk_norm, QkNorm::Whole),
            qkv_bias,
            o_bias,
            sinks: family.sinks,
            gate: family.hybrid != Hybrid::None,
            ..AttentionSpec::default()
        })
    }

    /// What chooses the positions that attention sees. A key about it that is not known may be another way of choosing.
    fn indexer(&self, family: &Family) -> Result<Option<IndexerSpec>, SculptError> {
        const KNOWN: [&str; 8] = [
            "index_n_heads",
            "index_head_dim",
            "index_topk",
            "index_topk_freq",
            "index_topk_pattern",
            // Which layers have none, if not every layer has one.
            "index_skip_topk_offset",
            "indexer_types",
            "indexer_rope_interleave",
        ];
        let Some(rotated) = family.indexer else { return Ok(None) };
        let keys = self.config.as_object().into_iter().flat_map(Map::keys);
        for key in keys.filter(|key| key.starts_with("index") && !KNOWN.contains(&key.as_str())) {
            if let Some(value) = self.get(key) {
                return Err(bad(key, Some(value), "missing: this build does not know such an indexer"));
            }
        }
        let interleaved = rotated == Indexer::Neighbours;
        if self.flag("indexer_rope_interleave", interleaved)? != interleaved {
            let found = self.get("indexer_rope_interleave");
            return Err(bad(
                "indexer_rope_interleave",
                found,
                format!("{interleaved} for {}", family.model_type),
            ));
        }
        Ok(Some(IndexerSpec {
            n_heads: self.size("index_n_heads")?,
            head_dim: self.size("index_head_dim")?,
            top_k: self.size("index_topk")?,
            interleaved,
            // The reference's norm does not ask the config.
            norm_eps: 1e-6,
        }))
    }

    fn moe(&mut self, family: &Family) -> Result<MoeSpec, SculptError> {
        let n_experts = self.n_experts(family)?;
        let d_expert = self.size(family.d_expert)?;
        let router = &family.router;
        Ok(MoeSpec {
            n_experts,
            top_k: self.size(family.top_k)?,
            d_expert,
            router: router.kind,
            norm_topk: match (router.norm, self.get("norm_topk_prob")) {
                (Norm::Always, _) => true,
                (Norm::Never, _) => false,
                (Norm::Key(default), None) => self.default("norm_topk_prob", default),
                (Norm::Key(default), Some(_)) => self.flag("norm_topk_prob", default)?,
            },
            norm_min: match router.norm_min {
                None => 0.0,
                Some((key, default)) => self.number_or(key, default)?,
            },
            d_shared: match family.shared {
                Shared::None => 0,
                Shared::Count(key) => self.optional_size(key)?.unwrap_or(0).saturating_mul(d_expert),
                Shared::Gated(key) => self.size(key)?,
            },
            router_bias: router.bias,
            correction_bias: router.correction,
            groups: self.groups(family)?,
            routed_scale: match self.get("routed_scaling_factor") {
                Some(value) if router.scale => number("routed_scaling_factor", value)?,
                None if router.scale && family.indexer.is_some() => {
                    return Err(bad("routed_scaling_factor", None, "a number"));
                }
                None if router.scale => self.default("routed_scaling_factor", 1.0),
                _ => 1.0,
            },
            shared_gate: matches!(family.shared, Shared::Gated(_)),
            expert_bias: family.expert == Expert::ClampedWithBiases,
            activation: match family.expert {
                Expert::SwiGlu => Activation::SwiGlu,
                Expert::ClampedWithBiases => {
                    let alpha = self.number_or("swiglu_alpha", 1.702)?;
                    let limit = self.number_or("swiglu_limit", 7.0)?;
                    Activation::ClampedSwiglu { alpha: alpha as f32, limit: limit as f32 }
                }
            },
        })
    }

    /// Groups of experts; `None` if a token may visit all.
    fn groups(&self, family: &Family) -> Result<Option<GroupSpec>, SculptError> {
        let Some(score) = family.router.groups else { return Ok(None) };
        // DeepSeek-V2 has the numbers also where they do not count.
        if self.get("topk_method").is_some_and(|method| method == "greedy") {
            return Ok(None);
        }
        match (self.optional_size("n_group")?, self.optional_size("topk_group")?) {
            // What is left out means other numbers in other versions of these.
            (None, None) if family.indexer.is_some() => {
                Err(bad("n_group", None, "a number (1 for no groups)"))
            }
            (None, None) => Ok(None),
            (Some(n), Some(top)) if n == top => Ok(None),
            (Some(n), Some(top)) => Ok(Some(GroupSpec { n, top, score })),
            (None, top) => Err(bad("n_group", None, format!("a number, as topk_group is {top:?}"))),
            (n, None) => Err(bad("topk_group", None, format!("a number, as n_group is {n:?}"))),
        }
    }

    /// Positions that each layer sees, 0 for all; empty if all see all.
    fn windows(&self, family: &Family, n_layers: usize) -> Result<Vec<usize>, SculptError> {
        if !family.windows {
            return Ok(Vec::new());
        }
        let found = self.get("layer_types");
        let rule = || bad("layer_types", found, "\"sliding_attention\" or \"full_attention\" for each layer");
        let kinds = found.and_then(Value::as_array).ok_or_else(rule)?;
        if kinds.len() != n_layers {
            return Err(rule());
        }
        let window = |kind: &Value| match kind.as_str() {
            Some("full_attention") => Ok(0),
            Some("sliding_attention") => match self.size("sliding_window")? {
                0 => Err(bad("sliding_window", self.get("sliding_window"), "above 0")),
                positions => Ok(positions),
            },
            _ => Err(rule()),
        };
        let windows = kinds.iter().map(window).collect::<Result<Vec<_>, _>>()?;
        Ok(if windows.iter().all(|&positions| positions == 0) { Vec::new() } else { windows })
    }

    /// What mixes the tokens of each layer, and the shape of gated delta nets among it.
    fn hybrid(
        &mut self,
        family: &Family,
        n_layers: usize,
    ) -> Result<(Vec<MixerKind>, Option<DeltaSpec>), SculptError> {
        if family.hybrid == Hybrid::None {
            return Ok((Vec::new(), None));
        }
        let key = "layer_types";
        let mixers = match self.get(key) {
            None => {
                let interval = match self.optional_size("full_attention_interval")? {
                    Some(interval) => interval,
                    None => self.default("full_attention_interval", 4),
                };
                if interval == 0 || n_layers > MAX_LAYERS {
                    let found = self.get("full_attention_interval");
                    return Err(bad("full_attention_interval", found, "above 0, of at most 4096 layers"));
                }
                let is_full = |layer: usize| (layer + 1).is_multiple_of(interval);
                let kind = |full| if full { MixerKind::Attention } else { MixerKind::GatedDelta };
                (0..n_layers).map(|layer| kind(is_full(layer))).collect::<Vec<_>>()
            }
            found => {
                let rule = || bad(key, found, "\"linear_attention\" or \"full_attention\" for each layer");
                let kind = |value: &Value| match value.as_str() {
                    Some("full_attention") => Ok(MixerKind::Attention),
                    Some("linear_attention") => Ok(MixerKind::GatedDelta),
                    _ => Err(rule()),
                };
                let kinds = found.and_then(Value::as_array).filter(|kinds| kinds.len() == n_layers);
                kinds.ok_or_else(rule)?.iter().map(kind).collect::<Result<_, _>>()?
            }
        };
        if !mixers.contains(&MixerKind::GatedDelta) {
            return Ok((Vec::new(), None));
        }
        let delta = DeltaSpec {
            n_key_heads: self.size("linear_num_key_heads")?,
            n_value_heads: self.size("linear_num_value_heads")?,
            key_dim: self.size("linear_key_head_dim")?,
            value_dim: self.size("linear_value_head_dim")?,
            conv_width: self.size("linear_conv_kernel_dim")?,
        };
        Ok((mixers, Some(delta)))
    }

    /// The number of routed experts, which goes by several names.
    fn n_experts(&self, family: &Family) -> Result<usize, SculptError> {
        let mut found: Option<(&str, usize)> = None;
        for key in family.n_experts {
            match (self.optional_size(key)?, found) {
                (Some(n), Some((other, m))) if n != m => {
                    return Err(bad(key, self.get(key), format!("{m}, as `{other}` says")));
                }
                (Some(n), None) => found = Some((key, n)),
                _ => {}
            }
        }
        let (key, n) = found.ok_or_else(|| bad(family.n_experts[0], None, "a number"))?;
        if n == 0 {
            return Err(bad(key, self.get(key), "above 0: a model without experts needs no vault"));
        }
        Ok(n)
    }

    fn layers(&mut self, family: &Family, n_layers: usize) -> Result<Vec<FfnKind>, SculptError> {
        if n_layers > MAX_LAYERS {
            return Err(bad("num_hidden_layers", self.get("num_hidden_layers"), "at most 4096"));
        }
        let dense: Vec<bool> = match family.dense {
            Dense::None => vec![false; n_layers],
            Dense::FirstK => {
                let first = self.optional_size("first_k_dense_replace")?.unwrap_or(0);
                (0..n_layers).map(|layer| layer < first).collect()
            }
            Dense::Types(default) => match self.get("mlp_layer_types") {
                None => {
                    let first = self.optional_size("first_k_dense_replace")?;
                    let first = first.unwrap_or_else(|| self.default("first_k_dense_replace", default));
                    (0..n_layers).map(|layer| layer < first).collect()
                }
                found @ Some(value) => {
                    let rule = || bad("mlp_layer_types", found, "\"dense\" or \"sparse\" for each layer");
                    let kinds = value.as_array().filter(|kinds| kinds.len() == n_layers).ok_or_else(rule)?;
                    let is_dense = |kind: &Value| match kind.as_str() {
                        Some("dense") => Ok(true),
                        Some("sparse") => Ok(false),
                        _ => Err(rule()),
                    };
                    kinds.iter().map(is_dense).collect::<Result<_, _>>()?
                }
            },
            Dense::Outside => {
                let first = self.optional_size("moe_layer_start_index")?.unwrap_or(1);
                let last = match self.get("moe_layer_end_index") {
                    Some(value) if value.as_i64() == Some(-1) => None,
                    _ => self.optional_size("moe_layer_end_index")?,
                };
                let interval = self.optional_size("moe_layer_interval")?.unwrap_or(1);
                if interval == 0 {
                    return Err(bad("moe_layer_interval", self.get("moe_layer_interval"), "above 0"));
                }
                let is_moe = |layer: usize| {
                    (layer + 1).is_multiple_of(interval)
                        && (first..=last.unwrap_or(usize::MAX)).contains(&layer)
                };
                (0..n_layers).map(|layer| !is_moe(layer)).collect()
            }
            Dense::SparseStep => {
                let step = self.optional_size("decoder_sparse_step")?.unwrap_or(1);
                if step == 0 {
                    return Err(bad("decoder_sparse_step", self.get("decoder_sparse_step"), "above 0"));
                }
                let mut dense: Vec<bool> =
                    (0..n_layers).map(|layer| !(layer + 1).is_multiple_of(step)).collect();
                if let Some(listed) = self.get("mlp_only_layers") {
                    let rule = || bad("mlp_only_layers", Some(listed), "a list of layers");
                    for layer in listed.as_array().ok_or_else(rule)? {
                        let layer = layer.as_u64().ok_or_else(rule)?;
                        // The reference asks each layer whether it is listed: numbers beyond the last are idle.
                        if let Some(dense) = dense.get_mut(layer as usize) {
                            *dense = true;
                        }
                    }
                }
                dense
            }
        };
        if dense.iter().all(|&dense| dense) {
            return Err(bad("model_type", self.get("model_type"), "at least one layer with experts"));
        }
        let width = if dense.contains(&true) { self.size("intermediate_size")? } else { 0 };
        Ok(dense.into_iter().map(|dense| if dense { FfnKind::Dense(width) } else { FfnKind::Moe }).collect())
    }

    /// What the residual stream and the logits are multiplied with.
    fn multipliers(&self, family: &Family) -> Result<Multipliers, SculptError> {
        if !family.multipliers {
            return Ok(Multipliers::default());
        }
        Ok(Multipliers {
            embedding: self.factor("embedding_multiplier")?,
            residual: self.factor("residual_multiplier")?,
            logits: 1.0 / self.factor("logits_scaling")?,
        })
    }
}
