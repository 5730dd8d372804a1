//! Model families as data: which keys, router, attention and names a checkpoint of each has.
//!
//! A family says what this build can compute; whatever else a config asks for is refused by name.

use serde_json::Value;
use smoe_format::spec::RouterKind;
use smoe_format::{BackboneTensor, ExpertKey, Projection, original};

/// A model family.
#[derive(Debug)]
pub(crate) struct Family {
    /// `model_type` in config.json.
    pub model_type: &'static str,
    /// RMSNorm on each head of queries and keys.
    pub qk_norm: bool,
    /// How router logits become weights.
    pub router: RouterKind,
    /// The key of the number of routed experts, newest first.
    pub n_experts: &'static [&'static str],
    /// The key of the number of shared experts, each as wide as a routed one.
    pub n_shared: Option<&'static str>,
    /// Which layers are dense.
    pub dense: Dense,
    /// Stretchings of RoPE that the family's reference defines.
    pub rope: &'static [&'static str],
    /// `num_key_value_heads` may be missing: as many as query heads.
    pub kv_heads_optional: bool,
    /// Values that keys must have, if they are there at all.
    pub only: &'static [Only],
    /// Name of a backbone tensor.
    pub backbone_name: fn(BackboneTensor) -> String,
    /// Name of a routed expert's tensor.
    pub expert_name: fn(ExpertKey, Projection) -> String,
}

/// How a config says which layers are dense.
#[derive(Debug)]
pub(crate) enum Dense {
    /// `decoder_sparse_step` and `mlp_only_layers`.
    SparseStep,
    /// The first `first_k_dense_replace` layers.
    FirstK,
}

/// A key that must be missing, null or of a value with `is`.
#[derive(Debug)]
pub(crate) struct Only {
    pub key: &'static str,
    pub is: fn(&Value) -> bool,
    pub expected: &'static str,
}

const fn only(key: &'static str, is: fn(&Value) -> bool, expected: &'static str) -> Only {
    Only { key, is, expected }
}

fn is_false(v: &Value) -> bool {
    *v == Value::Bool(false)
}
fn is_one(v: &Value) -> bool {
    v.as_f64() == Some(1.0)
}
fn is_at_most_one(v: &Value) -> bool {
    v.as_f64().is_some_and(|x| x <= 1.0)
}
fn is_never(_: &Value) -> bool {
    false
}
fn is_silu(v: &Value) -> bool {
    matches!(v.as_str(), Some("silu" | "swish"))
}
fn is_full_attention(v: &Value) -> bool {
    v.as_array().is_some_and(|layers| layers.iter().all(|layer| layer == "full_attention"))
}

/// What holds for every family that there is.
const COMMON: &[Only] = &[
    only("attention_bias", is_false, "false (no biases)"),
    only("mlp_bias", is_false, "false (no biases)"),
    only("hidden_act", is_silu, "\"silu\""),
    only("quantization_config", is_never, "missing: convert from the unquantised checkpoint"),
    only("layer_types", is_full_attention, "\"full_attention\" in every layer"),
    only("partial_rotary_factor", is_one, "1 (RoPE over the whole head)"),
    only("clip_qkv", is_never, "null (no clipping)"),
];

impl Family {
    /// All conditions on keys.
    pub fn conditions(&self) -> impl Iterator<Item = &'static Only> {
        COMMON.iter().chain(self.only)
    }

    /// The family called `model_type`.
    pub fn find(model_type: &str) -> Option<&'static Self> {
        FAMILIES.iter().find(|family| family.model_type == model_type)
    }

    /// The names of all families, for messages.
    pub fn known() -> String {
        FAMILIES.iter().map(|family| family.model_type).collect::<Vec<_>>().join(", ")
    }
}

fn expert_name(key: ExpertKey, projection: Projection) -> String {
    format!("model.layers.{}.mlp.experts.{}.{}_proj.weight", key.layer, key.expert, projection.name())
}

/// The families that this build knows.
pub(crate) static FAMILIES: &[Family] = &[
    // Reference: `Qwen3MoeForCausalLM` of transformers.
    Family {
        model_type: "qwen3_moe",
        qk_norm: true,
        router: RouterKind::Softmax,
        n_experts: &["num_local_experts", "num_experts"],
        n_shared: None,
        dense: Dense::SparseStep,
        rope: &["linear", "yarn"],
        kv_heads_optional: false,
        only: &[],
        backbone_name: original::checkpoint_name,
        expert_name,
    },
    // DeepSeek-MoE-16B: multi-head attention, softmax router. Its own code knows linear stretching only.
    Family {
        model_type: "deepseek",
        qk_norm: false,
        router: RouterKind::Softmax,
        n_experts: &["n_routed_experts"],
        n_shared: Some("n_shared_experts"),
        dense: Dense::FirstK,
        rope: &["linear"],
        kv_heads_optional: true,
        only: &[
            only("moe_layer_freq", is_one, "1"),
            only("scoring_func", |v| v == "softmax", "\"softmax\""),
            only("topk_method", |v| v == "greedy", "\"greedy\""),
            only("n_group", is_at_most_one, "1 (no expert groups)"),
            only("topk_group", is_at_most_one, "1 (no expert groups)"),
            only("routed_scaling_factor", is_one, "1"),
            only("q_lora_rank", is_never, "null (no latent attention)"),
            only("kv_lora_rank", is_never, "null (no latent attention)"),
        ],
        backbone_name: original::checkpoint_name,
        expert_name,
    },
];
