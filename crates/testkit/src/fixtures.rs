//! The shared fixtures: where they are, and their models' specs written out by hand from `config.json`, so
//! that the reference does not hang on the sculptor's reading of it.

use std::io::Write;
use std::path::{Path, PathBuf};

use smoe_format::ModelSpec;
use smoe_format::spec::{AttentionSpec, FfnKind, MoeSpec, RopeScaling, RopeSpec, RouterKind};

/// The folder of shared fixtures: `$SMOE_SHARED`, else `shared` beside the repository. If it is absent, says
/// `SKIPPED:` and what is absent on standard error, past the test harness's capture, and returns `None`.
#[must_use]
pub fn shared() -> Option<PathBuf> {
    shared_path("")
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
        attention: AttentionSpec { n_heads: 4, n_kv_heads: 2, head_dim: 32, qk_norm: true },
        rope: RopeSpec { theta: 1e6, scaling: RopeScaling::None },
        layers: vec![FfnKind::Moe; 3],
        moe: MoeSpec {
            n_experts: 8,
            top_k: 2,
            d_expert: 64,
            router: RouterKind::Softmax,
            norm_topk: true,
            d_shared: 0,
        },
    }
}

/// `fixtures/qwen3_moe_tied`: also a tied head, a dense layer in the middle, and YaRN.
#[must_use]
pub fn qwen3_moe_tied() -> ModelSpec {
    ModelSpec {
        tied_head: true,
        rope: RopeSpec { theta: 5e6, scaling: yarn(4.0, 512) },
        layers: vec![FfnKind::Moe, FfnKind::Dense(128), FfnKind::Moe],
        ..qwen3_moe()
    }
}

/// `fixtures/deepseek`: a dense first layer, a shared expert of two widths, plain top-k, no QK-norm.
#[must_use]
pub fn deepseek() -> ModelSpec {
    ModelSpec {
        model_type: "deepseek".to_owned(),
        attention: AttentionSpec { n_heads: 4, n_kv_heads: 4, head_dim: 16, qk_norm: false },
        rope: RopeSpec { theta: 1e4, scaling: RopeScaling::None },
        layers: vec![FfnKind::Dense(128), FfnKind::Moe, FfnKind::Moe],
        moe: MoeSpec { norm_topk: false, d_shared: 128, ..qwen3_moe().moe },
        ..qwen3_moe()
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
        attention: AttentionSpec { n_heads: 6, n_kv_heads: 2, head_dim: 64, qk_norm: true },
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
        for spec in [qwen3_moe(), qwen3_moe_tied(), deepseek(), demo_model()] {
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
