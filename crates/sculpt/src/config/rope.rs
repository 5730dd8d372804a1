//! The rotary embedding of a config: frequencies, stretching, and what YaRN makes of the scale of scores.

use serde_json::{Map, Value};
use smoe_format::spec::{RopeScaling, RopeSpec};

use super::{Keys, bad, number};
use crate::error::{SculptError, Warning};
use crate::family::{Family, Rotary};

impl<'a> Keys<'a> {
    /// RoPE parameters, wherever they are. As in the reference, `rope_scaling` goes before
    /// `rope_parameters`, and a `rope_theta` inside of them before one at the top level.
    pub(super) fn rope(
        &mut self,
        family: &Family,
        max_context: usize,
        head_dim: usize,
    ) -> Result<RopeSpec, SculptError> {
        let (name, parameters, differ) = self.rope_parameters()?;
        if differ {
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
            (None, None) => self.default("rope_theta", family.defaults.theta),
        };
        let partial = "partial_rotary_factor";
        let found = (float(partial)?, self.get(partial).map(|value| number(partial, value)).transpose()?);
        let dim = match (family.rotary, found) {
            (Rotary::Partial(default), (inner, outer)) => {
                let factor = match inner.or(outer) {
                    Some(factor) => factor,
                    None => self.default(partial, default),
                };
                let dim = (head_dim as f64 * factor) as usize;
                if !(factor > 0.0 && factor <= 1.0) || dim == 0 {
                    return Err(bad(partial, get(partial).or(self.get(partial)), "above 0 and up to 1"));
                }
                Some(dim).filter(|&dim| dim != head_dim)
            }
            (Rotary::Width(key), (inner, outer)) => {
                let of_factor = inner.or(outer).map(|factor| (head_dim as f64 * factor) as usize);
                match (self.optional_size(key)?, of_factor) {
                    (Some(width), Some(other)) if width != other => {
                        return Err(bad(key, self.get(key), format!("{other}, as `{partial}` says")));
                    }
                    (width, other) => match width.or(other) {
                        Some(n) if n == 0 || n > head_dim => {
                            let found = self.get(key).or(get(partial)).or(self.get(partial));
                            return Err(bad(key, found, format!("up to {head_dim}, a head's width")));
                        }
                        dim => dim.filter(|&dim| dim != head_dim),
                    },
                }
            }
            (_, (Some(factor), _)) if factor != 1.0 => return Err(bad(&path(partial), get(partial), "1")),
            _ => None,
        };
        let interleaved = match family.rotary {
            Rotary::Halves | Rotary::Partial(_) | Rotary::Width(_) => false,
            Rotary::Neighbours => true,
            Rotary::NeighboursByKey => self.flag("rope_interleave", true)?,
        };

        let kind_key = if get("rope_type").is_some() { "rope_type" } else { "type" };
        let kind = match get(kind_key) {
            None if parameters.keys().all(|key| key == "rope_theta" || key == partial) => "default",
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
        Ok(RopeSpec { theta, scaling, dim, interleaved })
    }

    /// The name and the contents of what has the parameters of RoPE, and whether there are others too.
    fn rope_parameters(&self) -> Result<(&'static str, &'a Map<String, Value>, bool), SculptError> {
        static EMPTY: std::sync::LazyLock<Map<String, Value>> = std::sync::LazyLock::new(Map::new);
        let object = |key: &str| match self.get(key) {
            None => Ok(&*EMPTY),
            Some(value) => value.as_object().ok_or_else(|| bad(key, Some(value), "an object")),
        };
        let (old, new) = (object("rope_scaling")?, object("rope_parameters")?);
        let (name, parameters) =
            if old.is_empty() { ("rope_parameters", new) } else { ("rope_scaling", old) };
        Ok((name, parameters, !old.is_empty() && !new.is_empty() && old != new))
    }

    /// What scores are multiplied with besides `1 / sqrt(head_dim)`: a multiplier that is there instead of it; and what
    /// YaRN makes of scores in latent attention, the square of its factor for `mscale_all_dim`.
    pub(super) fn score_scale(&self, family: &Family, head_dim: usize) -> Result<f64, SculptError> {
        if family.multipliers {
            return Ok(self.factor("attention_multiplier")? * (head_dim as f64).sqrt());
        }
        let (name, parameters, _) = self.rope_parameters()?;
        let float = |key: &str| {
            let found = parameters.get(key).filter(|value| !value.is_null());
            found.map(|value| number(&format!("{name}.{key}"), value)).transpose()
        };
        match (float("mscale_all_dim")?, float("factor")?) {
            (Some(all), Some(factor)) if family.latent && all != 0.0 => Ok(yarn_scale(factor, all).powi(2)),
            _ => Ok(1.0),
        }
    }
}

/// YaRN (Peng et al. 2023), section 3.4: the correction of attention for a stretch of `factor`.
fn yarn_scale(factor: f64, mscale: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 }
}
