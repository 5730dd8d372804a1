//! What a model is, in the words that the engine needs: shapes, router, RoPE, kinds of layers.
//!
//! The sculptor writes it (from a checkpoint's config), the config block of a vault carries it, the engine
//! computes by it. An unknown field is refused, never skipped: it could change the mathematics. A new field
//! gets a serde default, the value that all vaults before it imply, so that they still open.

use serde::{Deserialize, Serialize};

use crate::FormatError;

/// A decoder-only transformer with routed experts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelSpec {
    /// The family's name, as in `model_type` of the checkpoint.
    pub model_type: String,
    /// Width of the residual stream.
    pub d_model: usize,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Positions that the model was made for.
    pub max_context: usize,
    /// Epsilon of every RMSNorm.
    pub rms_norm_eps: f32,
    /// The head is the embedding.
    pub tied_head: bool,
    /// Attention, the same in every layer.
    pub attention: AttentionSpec,
    /// Rotary position embedding.
    pub rope: RopeSpec,
    /// The feed-forward kind of each layer; its length is the number of layers.
    pub layers: Vec<FfnKind>,
    /// Routed (and shared) experts of the MoE layers.
    pub moe: MoeSpec,
}

/// The feed-forward part of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FfnKind {
    /// One SwiGLU of this width.
    Dense(usize),
    /// Routed experts.
    Moe,
}

/// Grouped-query attention (Ainslie et al. 2023); multi-head when the two counts are equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttentionSpec {
    /// Query heads.
    pub n_heads: usize,
    /// Key and value heads; divides `n_heads`.
    pub n_kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// RMSNorm over each head of queries and keys, before RoPE.
    pub qk_norm: bool,
}

/// Rotary position embedding (Su et al. 2021) over the whole head, rotating halves.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RopeSpec {
    /// Base of the geometric series of wavelengths.
    pub theta: f64,
    /// Stretching of the positions.
    pub scaling: RopeScaling,
}

/// How positions beyond the training context are reached.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// All positions divided by `factor`.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// YaRN (Peng et al. 2023), as in `transformers`' `_compute_yarn_parameters`.
    Yarn {
        /// Stretch of the low frequencies.
        factor: f64,
        /// Context that the model was trained with.
        original_context: usize,
        /// Rotations in `original_context` above which a frequency is kept.
        beta_fast: f64,
        /// Rotations below which a frequency is stretched whole.
        beta_slow: f64,
        /// Factor on cosines and sines.
        attention_factor: f64,
        /// The ramp's ends are rounded outwards to whole dimensions.
        truncate: bool,
    },
}

/// Routed experts and their router.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MoeSpec {
    /// Routed experts of a layer.
    pub n_experts: usize,
    /// Experts that a token visits.
    pub top_k: usize,
    /// Width of a routed expert.
    pub d_expert: usize,
    /// How router logits become weights.
    pub router: RouterKind,
    /// Chosen weights are divided by their sum.
    pub norm_topk: bool,
    /// Width of the shared expert that every token visits; 0 if there is none.
    pub d_shared: usize,
}

/// How router logits become routing weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RouterKind {
    /// Softmax over all experts, then top-k.
    Softmax,
}

/// Widths beyond this are taken for damage; the largest published model is below a tenth of it.
const MAX_WIDTH: usize = 1 << 20;
const MAX_LAYERS: usize = 4096;

impl ModelSpec {
    /// Number of layers.
    #[must_use]
    pub fn n_layers(&self) -> usize {
        self.layers.len()
    }

    /// The indices of the MoE layers, ascending.
    pub fn moe_layers(&self) -> impl Iterator<Item = usize> + '_ {
        self.layers.iter().enumerate().filter(|(_, kind)| **kind == FfnKind::Moe).map(|(i, _)| i)
    }

    /// Checks what the rest of the program relies on: sizes positive and bounded, counts that divide.
    ///
    /// # Errors
    /// Names the field and the rule.
    pub fn validate(&self) -> Result<(), FormatError> {
        let fail = |what: String| Err(FormatError::Config { what });
        let a = &self.attention;
        let widths = [
            ("d_model", self.d_model),
            ("n_heads", a.n_heads),
            ("n_kv_heads", a.n_kv_heads),
            ("head_dim", a.head_dim),
            ("n_experts", self.moe.n_experts),
            ("top_k", self.moe.top_k),
            ("d_expert", self.moe.d_expert),
        ];
        for (name, value) in widths {
            if !(1..=MAX_WIDTH).contains(&value) {
                return fail(format!("{name} is {value}, it must be 1 to {MAX_WIDTH}"));
            }
        }
        if !(1..=1 << 28).contains(&self.vocab_size) || !(1..=1 << 40).contains(&self.max_context) {
            return fail("vocab_size or max_context is out of range".to_owned());
        }
        if !(1..=MAX_LAYERS).contains(&self.layers.len()) {
            return fail(format!("{} layers, there must be 1 to {MAX_LAYERS}", self.layers.len()));
        }
        for kind in &self.layers {
            if let FfnKind::Dense(width) = kind
                && !(1..=MAX_WIDTH).contains(width)
            {
                return fail(format!("a dense layer of width {width}"));
            }
        }
        if !a.n_heads.is_multiple_of(a.n_kv_heads) {
            return fail(format!("{} heads do not divide among {} KV heads", a.n_heads, a.n_kv_heads));
        }
        if !a.head_dim.is_multiple_of(2) {
            return fail(format!("head_dim {} is odd, RoPE rotates pairs", a.head_dim));
        }
        if a.n_heads * a.head_dim > MAX_WIDTH || self.moe.d_shared > MAX_WIDTH {
            return fail("attention or the shared expert is too wide".to_owned());
        }
        if self.moe.top_k > self.moe.n_experts {
            return fail(format!("top_k {} of {} experts", self.moe.top_k, self.moe.n_experts));
        }
        let positive = |x: f64| x.is_finite() && x > 0.0;
        if !positive(f64::from(self.rms_norm_eps)) || !positive(self.rope.theta) {
            return fail("rms_norm_eps and rope theta must be positive".to_owned());
        }
        match self.rope.scaling {
            RopeScaling::None => {}
            RopeScaling::Linear { factor } if positive(factor) => {}
            RopeScaling::Yarn {
                factor, original_context, beta_fast, beta_slow, attention_factor, ..
            } if [factor, beta_fast, beta_slow, attention_factor].into_iter().all(positive)
                && original_context > 0 => {}
            _ => return fail("RoPE scaling has a parameter that is not positive".to_owned()),
        }
        Ok(())
    }
}
