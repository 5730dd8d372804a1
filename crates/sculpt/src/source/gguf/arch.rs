//! What this build knows of llama.cpp's architectures (`src/llama-arch.cpp`, and `conversion/` for what its converter does to
//! weights).

/// An architecture.
#[derive(Debug)]
pub(super) struct Arch {
    /// llama.cpp's name.
    pub name: &'static str,
    /// The family, `model_type` in its `config.json`; of `deepseek2`, that with a router by softmax.
    pub family: &'static str,
    /// Queries and keys have the halves of each head interleaved.
    pub permuted: bool,
    /// Where the feed-forward part is.
    pub ffn: &'static str,
    /// The router in it, and what corrects its scores.
    pub router: &'static str,
    pub correction: &'static str,
    /// The shared expert in it.
    pub shared: &'static str,
    /// The keys of the number of experts, and of how many a token visits.
    pub n_experts: &'static str,
    pub top_k: &'static str,
    /// Experts' matrices have Mixtral's names.
    pub mixtral: bool,
    /// Chosen weights are divided by their sum, where the file does not say.
    pub norm_topk: bool,
    /// `expert_gating_func`, where the family has one only: 1 is softmax, 2 sigmoid.
    pub gating: Option<u64>,
    /// Keys and values come from a latent.
    pub latent: bool,
    /// An indexer chooses what attention sees.
    pub indexer: bool,
    /// Gated delta nets in some layers.
    pub hybrid: Option<Hybrid>,
}

/// How the projections of a gated delta net lie in a file. Norms around one have it added, and decays are there as
/// `-exp(A_log)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hybrid {
    /// Beta and decay of each key head side by side; queries, keys and values in one, gates alone.
    Next,
    /// Each alone, and heads of values in another order: by turns one of each key head.
    Tiled,
}

const SOFTMAX: Option<u64> = Some(1);
const SIGMOID: Option<u64> = Some(2);

const QWEN: Arch = Arch {
    name: "",
    family: "",
    permuted: false,
    ffn: "mlp",
    router: "gate",
    correction: "gate.e_score_correction_bias",
    shared: "shared_expert",
    n_experts: "num_experts",
    top_k: "num_experts_per_tok",
    mixtral: false,
    norm_topk: true,
    gating: SOFTMAX,
    latent: false,
    indexer: false,
    hybrid: None,
};

const MIXTRAL: Arch = Arch {
    ffn: "block_sparse_moe",
    n_experts: "num_local_experts",
    mixtral: true,
    correction: "e_score_correction_bias",
    ..QWEN
};

const DEEPSEEK: Arch =
    Arch { shared: "shared_experts", n_experts: "n_routed_experts", norm_topk: false, ..QWEN };

pub(super) const ARCHS: &[Arch] = &[
    Arch { name: "qwen3moe", family: "qwen3_moe", ..QWEN },
    Arch { name: "qwen2moe", family: "qwen2_moe", norm_topk: false, ..QWEN },
    Arch { name: "olmoe", family: "olmoe", norm_topk: false, ..QWEN },
    Arch { name: "llama", family: "mixtral", permuted: true, ..MIXTRAL },
    Arch { name: "deepseek", family: "deepseek", permuted: true, ..DEEPSEEK },
    Arch { name: "deepseek2", family: "deepseek_v2", latent: true, gating: None, ..DEEPSEEK },
    Arch {
        name: "deepseek32",
        family: "deepseek_v32",
        latent: true,
        indexer: true,
        gating: SIGMOID,
        ..DEEPSEEK
    },
    Arch { name: "glm-dsa", family: "glm_moe_dsa", latent: true, indexer: true, gating: SIGMOID, ..DEEPSEEK },
    Arch { name: "glm4moe", family: "glm4_moe", gating: SIGMOID, ..DEEPSEEK },
    // By softmax over the chosen ones, a number of its own where a file has it.
    Arch {
        name: "gpt-oss",
        family: "gpt_oss",
        router: "router",
        n_experts: "num_local_experts",
        gating: None,
        ..QWEN
    },
    Arch { name: "granitemoe", family: "granitemoe", permuted: true, router: "router.layer", ..MIXTRAL },
    Arch { name: "minimax-m2", family: "minimax_m2", gating: SIGMOID, ..MIXTRAL },
    Arch {
        name: "ernie4_5-moe",
        family: "ernie4_5_moe",
        shared: "shared_experts",
        correction: "moe_statics.e_score_correction_bias",
        n_experts: "moe_num_experts",
        top_k: "moe_k",
        ..QWEN
    },
    Arch { name: "qwen3next", family: "qwen3_next", hybrid: Some(Hybrid::Next), ..QWEN },
    Arch { name: "qwen35moe", family: "qwen3_5_moe_text", hybrid: Some(Hybrid::Tiled), ..QWEN },
];

/// Parts of a layer that are called alike in every architecture.
pub(super) const PARTS: &[(&str, &str)] = &[
    ("attn_norm", "input_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
    // GLM-4, GPT-OSS and the hybrids.
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
    ("indexer.attn_q_b", "self_attn.indexer.wq_b"),
    ("indexer.attn_k", "self_attn.indexer.wk"),
    ("indexer.k_norm", "self_attn.indexer.k_norm"),
    ("indexer.proj", "self_attn.indexer.weights_proj"),
];
