//! What keys of a config must say, where this build computes one thing only.

use serde_json::Value;

/// A key that must be missing, null or of a value with `is`.
#[derive(Debug)]
pub(crate) struct Only {
    pub key: &'static str,
    pub is: fn(&Value) -> bool,
    pub expected: &'static str,
}

pub(super) const fn only(key: &'static str, is: fn(&Value) -> bool, expected: &'static str) -> Only {
    Only { key, is, expected }
}

pub(super) fn is_true(v: &Value) -> bool {
    *v == Value::Bool(true)
}
pub(super) fn is_false(v: &Value) -> bool {
    *v == Value::Bool(false)
}
pub(super) fn is_zero(v: &Value) -> bool {
    v.as_f64() == Some(0.0)
}
pub(super) fn is_one(v: &Value) -> bool {
    v.as_f64() == Some(1.0)
}
pub(super) fn is_at_most_one(v: &Value) -> bool {
    v.as_f64().is_some_and(|x| x <= 1.0)
}
pub(super) fn is_never(_: &Value) -> bool {
    false
}
pub(super) fn is_silu(v: &Value) -> bool {
    matches!(v.as_str(), Some("silu" | "swish"))
}
pub(super) fn is_full_attention(v: &Value) -> bool {
    v.as_array().is_some_and(|layers| layers.iter().all(|layer| layer == "full_attention"))
}
pub(super) fn is_softmax(v: &Value) -> bool {
    v == "softmax"
}
pub(super) fn is_sigmoid(v: &Value) -> bool {
    v == "sigmoid"
}
/// By the names that versions of transformers write.
pub(super) fn is_indexed_attention(v: &Value) -> bool {
    let is_indexed = |layer: &Value| layer == "indexed_attention" || layer == "deepseek_sparse_attention";
    v.as_array().is_some_and(|layers| layers.iter().all(is_indexed))
}
pub(super) fn are_full(v: &Value) -> bool {
    v.as_array().is_some_and(|layers| layers.iter().all(|layer| layer == "full"))
}
pub(super) fn is_full_pattern(v: &Value) -> bool {
    are_full(v) || v.as_str().is_some_and(|pattern| pattern.bytes().all(|layer| layer == b'F'))
}
pub(super) fn is_empty(v: &Value) -> bool {
    v.as_array().is_some_and(Vec::is_empty)
}
pub(super) fn are_ones(v: &Value) -> bool {
    v.as_array().is_some_and(|layers| layers.iter().all(is_one))
}

/// What holds for every family that does not read the key itself.
pub(super) const COMMON: &[Only] = &[
    only("attention_bias", is_false, "false (no biases)"),
    only("mlp_bias", is_false, "false (no biases)"),
    only("hidden_act", is_silu, "\"silu\""),
    only("quantization_config", is_never, "missing: convert from the unquantised checkpoint"),
    only("layer_types", is_full_attention, "\"full_attention\" in every layer"),
    only("partial_rotary_factor", is_one, "1 (RoPE over the whole head)"),
    only("clip_qkv", is_never, "null (no clipping)"),
    only("embedding_multiplier", is_one, "1"),
    only("attention_multiplier", is_never, "missing"),
    only("residual_multiplier", is_one, "1"),
    only("logits_scaling", is_one, "1"),
];
