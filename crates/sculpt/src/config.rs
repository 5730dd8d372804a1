//! `config.json` to [`ModelSpec`].
//!
//! Both styles of configs are read: `rope_theta` and `rope_scaling` at the top level (transformers 4) and
//! `rope_parameters` (5). A key that this build cannot honour is refused by name.

use serde_json::{Map, Value};
use smoe_format::ModelSpec;
use smoe_format::spec::{AttentionSpec, FfnKind, MoeSpec, RopeScaling, RopeSpec};

use crate::error::{SculptError, Warning};
use crate::family::{Dense, Family};

/// The model that a `config.json` describes, and what was odd about it.
///
/// `tied_head` is what the config says; the weights may say otherwise ([`Warning::DifferentHead`]).
///
/// # Errors
/// Names the key, its value, and what this build needs.
pub fn spec_from_config(config: &Value) -> Result<(ModelSpec, Vec<Warning>), SculptError> {
    let family = family_of(config)?;
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
    let n_heads = keys.size("num_attention_heads")?;
    let n_kv_heads = match keys.optional_size("num_key_value_heads")? {
        Some(n) => n,
        None if family.kv_heads_optional => n_heads,
        None => return Err(bad("num_key_value_heads", None, "a number")),
    };
    let head_dim = match keys.optional_size("head_dim")? {
        Some(n) => n,
        None if n_heads > 0 && d_model.is_multiple_of(n_heads) => d_model / n_heads,
        None => return Err(bad("head_dim", None, "a number (hidden_size does not divide among the heads)")),
    };
    let n_experts = keys.n_experts(family)?;
    let d_expert = keys.size("moe_intermediate_size")?;
    let n_shared = match family.n_shared {
        Some(key) => keys.optional_size(key)?.unwrap_or(0),
        None => 0,
    };
    let max_context = keys.size("max_position_embeddings")?;
    let spec = ModelSpec {
        model_type: family.model_type.to_owned(),
        d_model,
        vocab_size: keys.size("vocab_size")?,
        max_context,
        rms_norm_eps: match keys.get("rms_norm_eps") {
            None => keys.default("rms_norm_eps", 1e-6),
            Some(value) => number("rms_norm_eps", value)?,
        } as f32,
        tied_head: keys.flag("tie_word_embeddings", false)?,
        attention: AttentionSpec { n_heads, n_kv_heads, head_dim, qk_norm: family.qk_norm },
        rope: keys.rope(family, max_context)?,
        layers: keys.layers(family, n_layers)?,
        moe: MoeSpec {
            n_experts,
            top_k: keys.size("num_experts_per_tok")?,
            d_expert,
            router: family.router,
            norm_topk: match keys.get("norm_topk_prob") {
                None => keys.default("norm_topk_prob", false),
                Some(_) => keys.flag("norm_topk_prob", false)?,
            },
            d_shared: n_shared.saturating_mul(d_expert),
        },
    };
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

fn show(value: Option<&Value>) -> String {
    let mut text = value.map_or_else(|| "missing".to_owned(), Value::to_string);
    if text.chars().count() > 80 {
        text = text.chars().take(77).chain("...".chars()).collect();
    }
    text
}

fn bad(key: &str, found: Option<&Value>, expected: impl Into<String>) -> SculptError {
    SculptError::Config { key: key.to_owned(), found: show(found), expected: expected.into() }
}

fn number(key: &str, value: &Value) -> Result<f64, SculptError> {
    value.as_f64().filter(|x| x.is_finite()).ok_or_else(|| bad(key, Some(value), "a number"))
}

struct Keys<'a> {
    config: &'a Value,
    warnings: Vec<Warning>,
}

impl<'a> Keys<'a> {
    /// A key's value; missing and null are the same.
    fn get(&self, key: &str) -> Option<&'a Value> {
        self.config.get(key).filter(|value| !value.is_null())
    }

    fn default<T: ToString>(&mut self, key: &'static str, value: T) -> T {
        self.warnings.push(Warning::Default { key, default: value.to_string() });
        value
    }

    fn optional_size(&self, key: &str) -> Result<Option<usize>, SculptError> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => match value.as_u64() {
                // Sizes in bytes are products of two or three of these.
                Some(n) if n <= u64::from(u32::MAX) => Ok(Some(n as usize)),
                _ => Err(bad(key, Some(value), "a whole number")),
            },
        }
    }

    fn size(&self, key: &str) -> Result<usize, SculptError> {
        self.optional_size(key)?.ok_or_else(|| bad(key, None, "a number"))
    }

    fn flag(&self, key: &str, default: bool) -> Result<bool, SculptError> {
        match self.get(key) {
            None => Ok(default),
            Some(value) => value.as_bool().ok_or_else(|| bad(key, Some(value), "true or false")),
        }
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

    fn layers(&self, family: &Family, n_layers: usize) -> Result<Vec<FfnKind>, SculptError> {
        if n_layers > 4096 {
            return Err(bad("num_hidden_layers", self.get("num_hidden_layers"), "at most 4096"));
        }
        let dense: Vec<bool> = match family.dense {
            Dense::FirstK => {
                let first = self.optional_size("first_k_dense_replace")?.unwrap_or(0);
                (0..n_layers).map(|layer| layer < first).collect()
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

    /// RoPE parameters, wherever they are. As in the reference, `rope_scaling` goes before
    /// `rope_parameters`, and a `rope_theta` inside of them before one at the top level.
    fn rope(&mut self, family: &Family, max_context: usize) -> Result<RopeSpec, SculptError> {
        let empty = Map::new();
        let object = |key: &str| match self.get(key) {
            None => Ok(&empty),
            Some(value) => value.as_object().ok_or_else(|| bad(key, Some(value), "an object")),
        };
        let (old, new) = (object("rope_scaling")?, object("rope_parameters")?);
        let (name, parameters) =
            if old.is_empty() { ("rope_parameters", new) } else { ("rope_scaling", old) };
        if !old.is_empty() && !new.is_empty() && old != new {
            self.warnings.push(Warning::Contradiction {
                what: "`rope_scaling` and `rope_parameters` differ".to_owned(),
                used: "`rope_scaling`".to_owned(),
            });
        }
        let path = |key: &str| format!("{name}.{key}");
        let get = |key: &str| parameters.get(key).filter(|value| !value.is_null());
        let float = |key: &str| get(key).map(|value| number(&path(key), value)).transpose();

        let outer = self.get("rope_theta").map(|value| number("rope_theta", value)).transpose()?;
        let theta = match (float("rope_theta")?, outer) {
            (Some(inner), Some(outer)) if inner != outer => {
                self.warnings.push(Warning::Contradiction {
                    what: format!("`rope_theta` is {outer}, `{name}.rope_theta` is {inner}"),
                    used: inner.to_string(),
                });
                inner
            }
            (Some(theta), _) | (None, Some(theta)) => theta,
            (None, None) => self.default("rope_theta", 10_000.0),
        };
        if let Some(factor) = float("partial_rotary_factor")?
            && factor != 1.0
        {
            return Err(bad(&path("partial_rotary_factor"), get("partial_rotary_factor"), "1"));
        }

        let kind_key = if get("rope_type").is_some() { "rope_type" } else { "type" };
        let kind = match get(kind_key) {
            None if parameters.keys().all(|key| key == "rope_theta") => "default",
            found => found
                .and_then(Value::as_str)
                .ok_or_else(|| bad(&path("rope_type"), found, "the name of a kind of RoPE"))?,
        };
        if kind != "default" && !family.rope.contains(&kind) {
            let expected = format!("\"default\" or one of {:?} for {}", family.rope, family.model_type);
            return Err(bad(&path(kind_key), get(kind_key), expected));
        }
        let scaling = match kind {
            "default" => RopeScaling::None,
            "linear" => RopeScaling::Linear {
                factor: float("factor")?.ok_or_else(|| bad(&path("factor"), None, "a number"))?,
            },
            _ => {
                let original_context = match get("original_max_position_embeddings") {
                    None => max_context,
                    Some(value) => value.as_u64().filter(|&n| n > 0).ok_or_else(|| {
                        bad(&path("original_max_position_embeddings"), Some(value), "a whole number")
                    })? as usize,
                };
                let ratio = max_context as f64 / original_context as f64;
                let factor = match float("factor")? {
                    Some(factor) => factor,
                    // The reference demands the key, but takes null for the contexts' ratio.
                    None if parameters.contains_key("factor") => ratio,
                    None => return Err(bad(&path("factor"), None, "a number")),
                };
                if factor != ratio && original_context != max_context {
                    self.warnings.push(Warning::Contradiction {
                        what: format!(
                            "`{name}.factor` is {factor}, but {max_context} positions are {ratio} times the \
                             original {original_context}"
                        ),
                        used: format!("the factor {factor}"),
                    });
                }
                let truncate = match get("truncate") {
                    None => true,
                    Some(value) => {
                        value.as_bool().ok_or_else(|| bad(&path("truncate"), Some(value), "true or false"))?
                    }
                };
                // Python's `or`: 0 counts as missing.
                let or = |found: Option<f64>, default: f64| found.filter(|&x| x != 0.0).unwrap_or(default);
                let attention_factor = match float("attention_factor")? {
                    Some(given) => given,
                    None => match (float("mscale")?, float("mscale_all_dim")?) {
                        (Some(m), Some(all)) if m != 0.0 && all != 0.0 => {
                            yarn_scale(factor, m) / yarn_scale(factor, all)
                        }
                        _ => yarn_scale(factor, 1.0),
                    },
                };
                RopeScaling::Yarn {
                    factor,
                    original_context,
                    beta_fast: or(float("beta_fast")?, 32.0),
                    beta_slow: or(float("beta_slow")?, 1.0),
                    attention_factor,
                    truncate,
                }
            }
        };
        Ok(RopeSpec { theta, scaling })
    }
}

/// YaRN (Peng et al. 2023), section 3.4: the correction of attention for a stretch of `factor`.
fn yarn_scale(factor: f64, mscale: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 }
}
