//! The fixtures: where they are, and their models' specs written out by hand from `config.json`, so that the
//! reference does not hang on the sculptor's reading of it.
//!
//! Most are shared ones beside the repository. Those of [`OWN`] are in this crate's `fixtures/`, where `make.py` made
//! them with the reference implementation; both are of the same form.

use std::io::Write;
use std::path::{Path, PathBuf};

use smoe_format::ModelSpec;
use smoe_format::spec::{
    Activation, AttentionSpec, DeltaSpec, FfnKind, GroupScore, GroupSpec, IndexerSpec, LatentSpec, MixerKind,
    MoeSpec, Multipliers, RopeScaling, RopeSpec, RouterKind,
};

/// The folder of shared fixtures: `$SMOE_SHARED`, else `shared` beside the repository. If it is absent, says
/// `SKIPPED:` and what is absent on standard error, past the test harness's capture, and returns `None`.
#[must_use]
pub fn shared() -> Option<PathBuf> {
    shared_path("")
}

/// The fixtures that are in the repository.
pub const OWN: [&str; 7] =
    ["granitemoe", "ernie4_5_moe", "minimax_m2", "glm_moe_dsa", "deepseek_v32", "qwen3_next", "qwen3_5_moe"];

/// The families that have a checkpoint with goldens: a fixture.
pub const FAMILIES: [&str; 17] = [
    "qwen3_moe",
    "qwen3_moe_tied",
    "deepseek",
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "glm4_moe",
    "gpt_oss",
    "deepseek_v2",
    "deepseek_v3",
    "granitemoe",
    "ernie4_5_moe",
    "minimax_m2",
    "glm_moe_dsa",
    "deepseek_v32",
    "qwen3_next",
    "qwen3_5_moe",
];

/// The folder of a family's fixture; `None`, said aloud, if it is absent.
#[must_use]
pub fn fixture(family: &str) -> Option<PathBuf> {
    if OWN.contains(&family) {
        return Some(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures")).join(family));
    }
    shared_path(&format!("fixtures/{family}"))
}

/// A file or folder of the shared fixtures, as `fixtures/qwen3_moe`; `None`, said aloud, if absent.
#[must_use]
pub fn shared_path(relative: &str) -> Option<PathBuf> {
    let root = std::env::var_os("SMOE_SHARED").map_or_else(
        || Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared")).to_owned(),
        PathBuf::from,
    );
    // Written, not printed: a passing test's prints are swallowed, and a skip must be seen.
    let complain = |line: String| std::io::stderr().write_all(line.as_bytes());
    locate(&root, relative).map_err(complain).ok()
}

/// The path, or the line to say.
fn locate(root: &Path, relative: &str) -> Result<PathBuf, String> {
    let path = if relative.is_empty() { root.to_owned() } else { root.join(relative) };
    if path.exists() {
        return Ok(path);
    }
    Err(format!("SKIPPED: {} is absent (set SMOE_SHARED to the shared fixtures)\n", path.display()))
}

/// `fixtures/qwen3_moe`: grouped queries, QK-norm, normalised top-k.
#[must_use]
pub fn qwen3_moe() -> ModelSpec {
    ModelSpec {
        model_type: "qwen3_moe".to_owned(),
        d_model: 64,
        vocab_size: 256,
        max_context: 2048,
        rms_norm_eps: 1e-6,
        tied_head: false,
        attention: AttentionSpec {
            n_heads: 4,
            n_kv_heads: 2,
            head_dim: 32,
            qk_norm: true,
            ..Default::default()
        },
        rope: RopeSpec { theta: 1e6, ..Default::default() },
        layers: vec![FfnKind::Moe; 3],
        windows: Vec::new(),
        mixers: Vec::new(),
        delta: None,
        multipliers: Multipliers::default(),
        moe: MoeSpec {
            n_experts: 8,
            top_k: 2,
            d_expert: 64,
            router: RouterKind::Softmax,
            norm_topk: true,
            d_shared: 0,
            ..Default::default()
        },
    }
}

/// `fixtures/qwen3_moe_tied`: also a tied head, a dense layer in the middle, and YaRN.
#[must_use]
pub fn qwen3_moe_tied() -> ModelSpec {
    ModelSpec {
        tied_head: true,
        rope: RopeSpec { theta: 5e6, scaling: yarn(4.0, 512), ..Default::default() },
        layers: vec![FfnKind::Moe, FfnKind::Dense(128), FfnKind::Moe],
        ..qwen3_moe()
    }
}

/// `fixtures/deepseek`: a dense first layer, a shared expert of two widths, plain top-k, no QK-norm.
#[must_use]
pub fn deepseek() -> ModelSpec {
    ModelSpec {
        model_type: "deepseek".to_owned(),
        attention: AttentionSpec {
            n_heads: 4,
            n_kv_heads: 4,
            head_dim: 16,
            qk_norm: false,
            ..Default::default()
        },
        rope: RopeSpec { theta: 1e4, ..Default::default() },
        layers: vec![FfnKind::Dense(128), FfnKind::Moe, FfnKind::Moe],
        moe: MoeSpec { norm_topk: false, d_shared: 128, ..qwen3_moe().moe },
        ..qwen3_moe()
    }
}

/// `fixtures/mixtral`: nothing but grouped queries, and normalised top-k.
#[must_use]
pub fn mixtral() -> ModelSpec {
    let base = qwen3_moe();
    ModelSpec {
        model_type: "mixtral".to_owned(),
        attention: AttentionSpec { qk_norm: false, ..base.attention },
        moe: MoeSpec { n_experts: 4, ..base.moe },
        ..base
    }
}

/// `fixtures/olmoe`: QK-norm over all heads as one, a key for every query.
#[must_use]
pub fn olmoe() -> ModelSpec {
    let base = qwen3_moe();
    ModelSpec {
        model_type: "olmoe".to_owned(),
        attention: AttentionSpec { n_kv_heads: 4, head_dim: 16, qk_norm_whole: true, ..base.attention },
        rope: RopeSpec { theta: 1e4, ..base.rope },
        moe: MoeSpec { norm_topk: false, ..base.moe },
        ..base
    }
}

/// `fixtures/qwen2_moe`: biases of queries, keys and values, a shared expert with a gate.
#[must_use]
pub fn qwen2_moe() -> ModelSpec {
    let base = qwen3_moe();
    ModelSpec {
        model_type: "qwen2_moe".to_owned(),
        attention: AttentionSpec { head_dim: 16, qk_norm: false, qkv_bias: true, ..base.attention },
        moe: MoeSpec { norm_topk: false, d_shared: 128, shared_gate: true, ..base.moe },
        ..base
    }
}

/// `fixtures/glm4_moe`: half of each head rotated, biases, a router by sigmoid with corrections.
#[must_use]
pub fn glm4_moe() -> ModelSpec {
    let base = qwen3_moe();
    ModelSpec {
        model_type: "glm4_moe".to_owned(),
        attention: AttentionSpec { qkv_bias: true, ..base.attention },
        rope: RopeSpec { theta: 1e4, dim: Some(16), ..base.rope },
        layers: deepseek().layers,
        moe: MoeSpec { router: RouterKind::Sigmoid, correction_bias: true, d_shared: 64, ..base.moe },
        ..base
    }
}

/// `fixtures/gpt_oss`: sinks, windows by turns, biases everywhere, a clamped SwiGLU, YaRN that is not truncated.
#[must_use]
pub fn gpt_oss() -> ModelSpec {
    let base = qwen3_moe();
    let mut scaling = yarn(32.0, 64);
    if let RopeScaling::Yarn { truncate, .. } = &mut scaling {
        *truncate = false;
    }
    ModelSpec {
        model_type: "gpt_oss".to_owned(),
        attention: AttentionSpec {
            qk_norm: false,
            qkv_bias: true,
            o_bias: true,
            sinks: true,
            ..base.attention
        },
        rope: RopeSpec { theta: 150_000.0, scaling, ..base.rope },
        windows: vec![16, 0, 16],
        moe: MoeSpec {
            router_bias: true,
            expert_bias: true,
            activation: Activation::ClampedSwiglu { alpha: 1.702, limit: 7.0 },
            ..base.moe
        },
        ..base
    }
}

/// `fixtures/deepseek_v2`: latent attention, neighbours rotated, two shared experts.
#[must_use]
pub fn deepseek_v2() -> ModelSpec {
    let base = deepseek();
    let latent = LatentSpec { q_rank: 0, kv_rank: 64, rope_dim: 32, value_dim: 32, norm_eps: 1e-6 };
    ModelSpec {
        model_type: "deepseek_v2".to_owned(),
        attention: AttentionSpec { n_kv_heads: 1, head_dim: 64, latent: Some(latent), ..base.attention },
        rope: RopeSpec { interleaved: true, ..base.rope },
        ..base
    }
}

/// `fixtures/deepseek_v3`: also a latent of queries, and a router by sigmoid with corrections and groups.
#[must_use]
pub fn deepseek_v3() -> ModelSpec {
    let base = deepseek_v2();
    let latent = base.attention.latent.map(|latent| LatentSpec { q_rank: 64, ..latent });
    ModelSpec {
        model_type: "deepseek_v3".to_owned(),
        attention: AttentionSpec { latent, ..base.attention },
        moe: MoeSpec {
            groups: Some(GroupSpec { n: 4, top: 2, score: GroupScore::BestTwo }),
            routed_scale: 2.5,
            ..glm4_moe().moe
        },
        ..base
    }
}

/// `fixtures/granitemoe`: multipliers of embeddings, scores, residuals and logits, a tied head, stacked experts.
#[must_use]
pub fn granitemoe() -> ModelSpec {
    let base = own(qwen3_moe());
    ModelSpec {
        model_type: "granitemoe".to_owned(),
        tied_head: true,
        // 1/16 instead of the root of 1/16.
        attention: AttentionSpec { score_scale: 0.25, ..base.attention },
        multipliers: Multipliers { embedding: 12.0, residual: 0.25, logits: 8.0 },
        ..base
    }
}

/// `fixtures/ernie4_5_moe`: softmax with corrections and a least divisor, neighbours rotated, a dense first layer, a
/// shared expert of two widths.
#[must_use]
pub fn ernie4_5_moe() -> ModelSpec {
    let base = own(qwen3_moe());
    ModelSpec {
        model_type: "ernie4_5_moe".to_owned(),
        tied_head: true,
        rope: RopeSpec { theta: 5e5, interleaved: true, ..base.rope },
        layers: vec![FfnKind::Dense(96), FfnKind::Moe, FfnKind::Moe],
        moe: MoeSpec { correction_bias: true, norm_min: 1e-12, d_shared: 64, ..base.moe },
        ..base
    }
}

/// `fixtures/minimax_m2`: a router by sigmoid with corrections, QK-norm over all heads as one, half of each rotated.
#[must_use]
pub fn minimax_m2() -> ModelSpec {
    let base = own(qwen3_moe());
    ModelSpec {
        model_type: "minimax_m2".to_owned(),
        attention: AttentionSpec { qk_norm: true, qk_norm_whole: true, ..base.attention },
        rope: RopeSpec { theta: 5e6, dim: Some(8), ..base.rope },
        moe: MoeSpec { router: RouterKind::Sigmoid, correction_bias: true, ..base.moe },
        ..base
    }
}

/// `fixtures/glm_moe_dsa`: latent attention over positions that an indexer chooses; neighbours rotated in both.
#[must_use]
pub fn glm_moe_dsa() -> ModelSpec {
    let base = own(qwen3_moe());
    let latent = LatentSpec { q_rank: 48, kv_rank: 64, rope_dim: 8, value_dim: 32, norm_eps: 1e-6 };
    let indexer = IndexerSpec { n_heads: 16, head_dim: 16, top_k: 16, interleaved: true, norm_eps: 1e-6 };
    ModelSpec {
        model_type: "glm_moe_dsa".to_owned(),
        attention: AttentionSpec {
            n_kv_heads: 1,
            head_dim: 32,
            latent: Some(latent),
            indexer: Some(indexer),
            ..base.attention
        },
        rope: RopeSpec { theta: 1e6, interleaved: true, ..base.rope },
        layers: vec![FfnKind::Dense(96), FfnKind::Moe, FfnKind::Moe],
        moe: MoeSpec {
            router: RouterKind::Sigmoid,
            correction_bias: true,
            d_shared: 32,
            routed_scale: 2.5,
            ..base.moe
        },
        ..base
    }
}

/// `fixtures/deepseek_v32`: the indexer rotates halves, groups of experts, YaRN.
#[must_use]
pub fn deepseek_v32() -> ModelSpec {
    let base = glm_moe_dsa();
    let indexer = base.attention.indexer.map(|indexer| IndexerSpec { interleaved: false, ..indexer });
    let mut scaling = yarn(4.0, 512);
    let RopeScaling::Yarn { attention_factor, .. } = &mut scaling else { return base };
    // Scores are scaled instead, by its square.
    let mscale = std::mem::replace(attention_factor, 1.0);
    ModelSpec {
        model_type: "deepseek_v32".to_owned(),
        attention: AttentionSpec { indexer, score_scale: mscale * mscale, ..base.attention },
        rope: RopeSpec { theta: 1e4, scaling, ..base.rope },
        moe: MoeSpec { groups: Some(GroupSpec { n: 4, top: 2, score: GroupScore::BestTwo }), ..base.moe },
        ..base
    }
}

/// `fixtures/qwen3_next`: gated delta nets but for one layer, whose attention has a gate; half of each head rotated, a
/// shared expert with a gate.
#[must_use]
pub fn qwen3_next() -> ModelSpec {
    let base = own(qwen3_moe());
    let (delta, attention) = (MixerKind::GatedDelta, MixerKind::Attention);
    ModelSpec {
        model_type: "qwen3_next".to_owned(),
        attention: AttentionSpec { qk_norm: true, gate: true, ..base.attention },
        rope: RopeSpec { theta: 1e7, dim: Some(8), ..base.rope },
        layers: vec![FfnKind::Moe; 4],
        mixers: vec![delta, delta, attention, delta],
        delta: Some(DeltaSpec {
            n_key_heads: 2,
            n_value_heads: 4,
            key_dim: 16,
            value_dim: 16,
            conv_width: 4,
        }),
        moe: MoeSpec { d_shared: 32, shared_gate: true, ..base.moe },
        ..base
    }
}

/// `fixtures/qwen3_5_moe`: the same under other names, beside a part for vision.
#[must_use]
pub fn qwen3_5_moe() -> ModelSpec {
    ModelSpec { model_type: "qwen3_5_moe".to_owned(), ..qwen3_next() }
}

/// The sizes of the fixtures in the repository.
fn own(base: ModelSpec) -> ModelSpec {
    ModelSpec {
        vocab_size: 128,
        attention: AttentionSpec { head_dim: 16, qk_norm: false, ..base.attention },
        rope: RopeSpec { theta: 1e4, ..base.rope },
        moe: MoeSpec { d_expert: 32, ..base.moe },
        ..base
    }
}

/// `demo-model`: the small chat model trained for the project.
#[must_use]
pub fn demo_model() -> ModelSpec {
    ModelSpec {
        d_model: 384,
        vocab_size: 8192,
        max_context: 4096,
        tied_head: true,
        attention: AttentionSpec {
            n_heads: 6,
            n_kv_heads: 2,
            head_dim: 64,
            qk_norm: true,
            ..Default::default()
        },
        layers: vec![FfnKind::Moe; 8],
        moe: MoeSpec { n_experts: 32, top_k: 4, d_expert: 128, ..qwen3_moe().moe },
        ..qwen3_moe()
    }
}

/// YaRN as a config gives it that names only `factor` and the original context: the defaults of the paper.
#[must_use]
pub fn yarn(factor: f64, original_context: usize) -> RopeScaling {
    RopeScaling::Yarn {
        factor,
        original_context,
        beta_fast: 32.0,
        beta_slow: 1.0,
        attention_factor: 0.1 * factor.ln() + 1.0,
        truncate: true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_specs_are_valid() {
        let new = [mixtral, olmoe, qwen2_moe, glm4_moe, gpt_oss, deepseek_v2, deepseek_v3].map(|spec| spec());
        let own = [granitemoe, ernie4_5_moe, minimax_m2, glm_moe_dsa, deepseek_v32, qwen3_next, qwen3_5_moe]
            .map(|spec| spec());
        let new = new.into_iter().chain(own);
        for spec in [qwen3_moe(), qwen3_moe_tied(), deepseek(), demo_model()].into_iter().chain(new) {
            spec.validate().expect("valid");
        }
    }

    #[test]
    fn what_is_absent_is_named() {
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        assert_eq!(locate(here, ""), Ok(here.to_owned()));
        assert_eq!(locate(here, "src/lib.rs"), Ok(here.join("src/lib.rs")));
        let line = locate(here, "no such thing").expect_err("absent");
        assert!(line.starts_with("SKIPPED: ") && line.contains("no such thing is absent"), "{line}");
    }
}
