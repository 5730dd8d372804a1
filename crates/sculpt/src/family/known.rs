//! The families that this build knows.

use smoe_format::backbone::LayerPart;
use smoe_format::spec::{GroupScore, RouterKind};

use super::conditions::{
    are_full, are_ones, is_at_most_one, is_empty, is_false, is_full_pattern, is_indexed_attention, is_never,
    is_one, is_sigmoid, is_softmax, is_true, is_zero, only,
};
use super::{
    Bias, Defaults, Dense, Expert, Experts, Family, Hybrid, Indexer, Norm, QkNorm, Rotary, Router, Shared,
};

/// What most families have; the others say what they have instead.
const LLAMA: Family = Family {
    model_type: "",
    text: None,
    prefix: "model",
    hybrid: Hybrid::None,
    qk_norm: QkNorm::None,
    bias: Bias::None,
    latent: false,
    indexer: None,
    sinks: false,
    windows: false,
    multipliers: false,
    router: Router {
        kind: RouterKind::Softmax,
        bias: false,
        correction: false,
        norm: Norm::Key(false),
        norm_min: None,
        groups: None,
        scale: false,
    },
    n_experts: &["num_local_experts", "num_experts"],
    top_k: "num_experts_per_tok",
    d_expert: "moe_intermediate_size",
    expert: Expert::SwiGlu,
    shared: Shared::None,
    dense: Dense::None,
    rope: &["linear", "yarn"],
    rotary: Rotary::Halves,
    kv_heads_optional: false,
    defaults: Defaults { eps: 1e-6, theta: 10_000.0, tied: false },
    only: &[],
    parts: &[],
    experts: Experts { folder: "mlp.experts", names: ["gate_proj", "up_proj", "down_proj"] },
};

/// A router by sigmoid with corrections and groups: DeepSeek-V3's.
const SIGMOID: Router = Router {
    kind: RouterKind::Sigmoid,
    bias: false,
    correction: true,
    norm: Norm::Key(true),
    norm_min: None,
    groups: Some(GroupScore::BestTwo),
    scale: true,
};

/// Latent attention and a router by sigmoid.
const DEEPSEEK_V3: Family = Family {
    latent: true,
    router: SIGMOID,
    n_experts: &["n_routed_experts"],
    shared: Shared::Count("n_shared_experts"),
    dense: Dense::FirstK,
    rope: &["yarn"],
    rotary: Rotary::NeighboursByKey,
    kv_heads_optional: true,
    only: &[
        only("moe_layer_freq", is_one, "1"),
        only("scoring_func", is_sigmoid, "\"sigmoid\""),
        only("topk_method", |v| v == "noaux_tc", "\"noaux_tc\""),
    ],
    ..LLAMA
};

/// Latent attention over positions that an indexer chooses: DeepSeek-V3.2's.
const SPARSE: Family = Family {
    latent: true,
    indexer: Some(Indexer::Halves),
    router: SIGMOID,
    n_experts: &["n_routed_experts"],
    shared: Shared::Count("n_shared_experts"),
    dense: Dense::Types(3),
    rope: &["yarn"],
    rotary: Rotary::Neighbours,
    kv_heads_optional: true,
    only: &[
        only(
            "layer_types",
            is_indexed_attention,
            "\"indexed_attention\" or \"deepseek_sparse_attention\" in every layer",
        ),
        only("rope_interleave", is_true, "true (neighbours are rotated)"),
        only("moe_layer_freq", is_one, "1"),
        only("scoring_func", is_sigmoid, "\"sigmoid\""),
        only("topk_method", |v| v == "noaux_tc", "\"noaux_tc\""),
        only("indexer_types", are_full, "\"full\" in every layer (each with an indexer of its own)"),
        only("index_topk_freq", is_one, "1 (each layer with an indexer of its own)"),
        only("index_topk_pattern", is_full_pattern, "all F (each layer with an indexer of its own)"),
    ],
    ..LLAMA
};

/// Mixtral's names, which others took over.
const MIXTRAL_EXPERTS: Experts = Experts { folder: "block_sparse_moe.experts", names: ["w1", "w3", "w2"] };

/// Gated delta nets beside gated attention.
const HYBRID: Family = Family {
    hybrid: Hybrid::Joined,
    qk_norm: QkNorm::Heads,
    router: Router { norm: Norm::Key(true), ..LLAMA.router },
    n_experts: &["num_experts"],
    shared: Shared::Gated("shared_expert_intermediate_size"),
    dense: Dense::SparseStep,
    rotary: Rotary::Partial(0.25),
    parts: &[
        (LayerPart::SharedGate, "mlp.shared_expert.gate_proj.weight"),
        (LayerPart::SharedUp, "mlp.shared_expert.up_proj.weight"),
        (LayerPart::SharedDown, "mlp.shared_expert.down_proj.weight"),
    ],
    only: &[only("attn_output_gate", is_true, "true")],
    ..LLAMA
};

/// As [`HYBRID`], without dense layers or a choice of how scores are divided.
const QWEN3_5: Family = Family {
    hybrid: Hybrid::Apart,
    router: Router { norm: Norm::Always, ..LLAMA.router },
    dense: Dense::None,
    only: &[
        only("attn_output_gate", is_true, "true"),
        only("norm_topk_prob", is_true, "true"),
        only("mlp_only_layers", is_empty, "empty"),
        only("decoder_sparse_step", is_one, "1"),
    ],
    ..HYBRID
};

/// The families that this build knows.
pub(crate) static FAMILIES: &[Family] = &[
    // Reference: `Qwen3MoeForCausalLM` of transformers, as of all below of which nothing else is said.
    Family { model_type: "qwen3_moe", qk_norm: QkNorm::Heads, dense: Dense::SparseStep, ..LLAMA },
    // DeepSeek-MoE-16B: multi-head attention, softmax router. Its own code knows linear stretching only.
    Family {
        model_type: "deepseek",
        n_experts: &["n_routed_experts"],
        shared: Shared::Count("n_shared_experts"),
        dense: Dense::FirstK,
        rope: &["linear"],
        kv_heads_optional: true,
        only: &[
            only("moe_layer_freq", is_one, "1"),
            only("scoring_func", is_softmax, "\"softmax\""),
            only("topk_method", |v| v == "greedy", "\"greedy\""),
            only("n_group", is_at_most_one, "1 (no expert groups)"),
            only("topk_group", is_at_most_one, "1 (no expert groups)"),
            only("routed_scaling_factor", is_one, "1"),
            only("q_lora_rank", is_never, "null (no latent attention)"),
            only("kv_lora_rank", is_never, "null (no latent attention)"),
        ],
        ..LLAMA
    },
    Family {
        model_type: "mixtral",
        router: Router { norm: Norm::Always, ..LLAMA.router },
        d_expert: "intermediate_size",
        defaults: Defaults { eps: 1e-5, theta: 1e6, ..LLAMA.defaults },
        only: &[only("sliding_window", is_never, "null (no sliding window)")],
        parts: &[(LayerPart::Router, "block_sparse_moe.gate.weight")],
        experts: MIXTRAL_EXPERTS,
        ..LLAMA
    },
    Family {
        model_type: "olmoe",
        qk_norm: QkNorm::Whole,
        d_expert: "intermediate_size",
        kv_heads_optional: true,
        defaults: Defaults { eps: 1e-5, ..LLAMA.defaults },
        ..LLAMA
    },
    Family {
        model_type: "qwen2_moe",
        bias: Bias::Qkv("qkv_bias", true),
        shared: Shared::Gated("shared_expert_intermediate_size"),
        dense: Dense::SparseStep,
        parts: &[
            (LayerPart::SharedGate, "mlp.shared_expert.gate_proj.weight"),
            (LayerPart::SharedUp, "mlp.shared_expert.up_proj.weight"),
            (LayerPart::SharedDown, "mlp.shared_expert.down_proj.weight"),
        ],
        ..LLAMA
    },
    Family {
        model_type: "glm4_moe",
        qk_norm: QkNorm::Key("use_qk_norm"),
        bias: Bias::Qkv("attention_bias", false),
        router: SIGMOID,
        n_experts: &["n_routed_experts"],
        shared: Shared::Count("n_shared_experts"),
        dense: Dense::FirstK,
        rotary: Rotary::Partial(0.5),
        defaults: Defaults { eps: 1e-5, ..LLAMA.defaults },
        ..LLAMA
    },
    // In transformers softmax is over the chosen logits: the same as over all, divided by the chosen ones' sum.
    Family {
        model_type: "gpt_oss",
        bias: Bias::All("attention_bias", true),
        sinks: true,
        windows: true,
        router: Router { bias: true, norm: Norm::Always, ..LLAMA.router },
        d_expert: "intermediate_size",
        expert: Expert::ClampedWithBiases,
        rope: &["yarn"],
        defaults: Defaults { eps: 1e-5, theta: 150_000.0, ..LLAMA.defaults },
        parts: &[(LayerPart::Router, "mlp.router.weight"), (LayerPart::RouterBias, "mlp.router.bias")],
        ..LLAMA
    },
    // transformers leaves YaRN's factor on scores out; here it is, as in the publication's own code.
    Family {
        model_type: "deepseek_v2",
        latent: true,
        router: Router { norm: Norm::Never, groups: Some(GroupScore::Best), scale: true, ..LLAMA.router },
        n_experts: &["n_routed_experts"],
        shared: Shared::Count("n_shared_experts"),
        dense: Dense::FirstK,
        rope: &["yarn"],
        rotary: Rotary::Neighbours,
        kv_heads_optional: true,
        only: &[
            only("moe_layer_freq", is_one, "1"),
            only("scoring_func", is_softmax, "\"softmax\""),
            only(
                "topk_method",
                |v| v == "greedy" || v == "group_limited_greedy",
                "\"greedy\" or \"group_limited_greedy\"",
            ),
            only("norm_topk_prob", is_false, "false (its references differ)"),
        ],
        ..LLAMA
    },
    Family { model_type: "deepseek_v3", ..DEEPSEEK_V3 },
    // Its code is DeepSeek-V3's, under a name of its own.
    Family { model_type: "kimi_k2", ..DEEPSEEK_V3 },
    Family { model_type: "deepseek_v32", ..SPARSE },
    Family {
        model_type: "glm_moe_dsa",
        indexer: Some(Indexer::Neighbours),
        defaults: Defaults { eps: 1e-5, ..LLAMA.defaults },
        ..SPARSE
    },
    // As in GPT-OSS, softmax is over the chosen logits. Experts are stacked, two tensors a layer.
    Family {
        model_type: "granitemoe",
        bias: Bias::All("attention_bias", false),
        multipliers: true,
        router: Router { norm: Norm::Always, ..LLAMA.router },
        d_expert: "intermediate_size",
        kv_heads_optional: true,
        only: &[
            only("position_embedding_type", |v| v == "rope", "\"rope\""),
            only("shared_intermediate_size", is_zero, "0 (no shared expert)"),
        ],
        parts: &[(LayerPart::Router, "block_sparse_moe.router.layer.weight")],
        experts: MIXTRAL_EXPERTS,
        ..LLAMA
    },
    Family {
        model_type: "ernie4_5_moe",
        router: Router {
            correction: true,
            norm: Norm::Always,
            norm_min: Some(("moe_norm_min", 1e-12)),
            ..LLAMA.router
        },
        n_experts: &["moe_num_experts"],
        top_k: "moe_k",
        shared: Shared::Count("moe_num_shared_experts"),
        dense: Dense::Outside,
        rotary: Rotary::Neighbours,
        defaults: Defaults { eps: 1e-5, theta: 500_000.0, tied: true },
        only: &[
            only("use_bias", is_false, "false (no biases)"),
            only("moe_gate", |v| v == "topk", "\"topk\""),
            only("moe_use_aux_free", is_true, "true (experts chosen with corrections)"),
        ],
        parts: &[(LayerPart::Correction, "mlp.moe_statics.e_score_correction_bias")],
        ..LLAMA
    },
    Family {
        model_type: "minimax_m2",
        qk_norm: QkNorm::Whole,
        router: Router { norm: Norm::Always, groups: None, scale: false, ..SIGMOID },
        d_expert: "intermediate_size",
        rotary: Rotary::Width("rotary_dim"),
        defaults: Defaults { theta: 5e6, ..LLAMA.defaults },
        only: &[
            only("use_qk_norm", is_true, "true"),
            only("qk_norm_type", |v| v == "per_layer", "\"per_layer\" (over all heads as one)"),
            only("scoring_func", is_sigmoid, "\"sigmoid\""),
            only("use_routing_bias", is_true, "true"),
            only("shared_intermediate_size", is_zero, "0 (no shared expert)"),
            only("attn_type_list", are_ones, "1 in every layer (full attention)"),
            only("sliding_window", is_never, "null (no sliding window)"),
        ],
        parts: &[
            (LayerPart::Router, "block_sparse_moe.gate.weight"),
            (LayerPart::Correction, "block_sparse_moe.e_score_correction_bias"),
        ],
        experts: MIXTRAL_EXPERTS,
        ..LLAMA
    },
    Family { model_type: "qwen3_next", ..HYBRID },
    // As published, of which only the part for text is taken; and that part alone.
    Family {
        model_type: "qwen3_5_moe",
        text: Some("text_config"),
        prefix: "model.language_model",
        ..QWEN3_5
    },
    Family { model_type: "qwen3_5_moe_text", ..QWEN3_5 },
];
