//! What a model is, in the words that the engine needs: shapes, router, RoPE, kinds of layers.
//!
//! The sculptor writes it (from a checkpoint's config), the config block of a vault carries it, the engine
//! computes by it. An unknown field is refused, never skipped: it could change the mathematics. A new field
//! gets a serde default, the value that all vaults before it imply, so that they still open.

use serde::{Deserialize, Serialize};

use crate::FormatError;
use crate::tile::ROWS;

/// A value that is left out of the config block, as vaults before it did.
fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

fn is_one(value: &f64) -> bool {
    *value == 1.0
}

const fn one() -> f64 {
    1.0
}

/// A decoder-only transformer with routed experts.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
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
    /// Positions that each layer's attention sees, its own the last of them; 0 is all. Empty if all see all.
    #[serde(default, skip_serializing_if = "is_default")]
    pub windows: Vec<usize>,
    /// What mixes the tokens in each layer. Empty if attention does in all.
    #[serde(default, skip_serializing_if = "is_default")]
    pub mixers: Vec<MixerKind>,
    /// The gated delta nets of those layers that have one.
    #[serde(default, skip_serializing_if = "is_default")]
    pub delta: Option<DeltaSpec>,
    /// What the residual stream and the logits are multiplied with.
    #[serde(default, skip_serializing_if = "is_default")]
    pub multipliers: Multipliers,
    /// Routed (and shared) experts of the MoE layers.
    pub moe: MoeSpec,
}

/// Constants of a model whose width does not change how it learns (muP: Yang et al. 2022; Granite).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Multipliers {
    /// Of embeddings as they enter the first layer; not of a head that is tied to them.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub embedding: f64,
    /// Of what attention and the feed-forward part of each layer add.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub residual: f64,
    /// Of logits.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub logits: f64,
}

impl Default for Multipliers {
    fn default() -> Self {
        Self { embedding: 1.0, residual: 1.0, logits: 1.0 }
    }
}

/// What mixes the tokens in a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MixerKind {
    /// Attention over keys and values.
    Attention,
    /// A gated delta net, which remembers a state of fixed size.
    GatedDelta,
}

/// Gated delta net (Yang, Kautz, Hatamizadeh 2024), a linear attention: queries, keys and values go through a causal
/// convolution, and each value head has a state, `value_dim x key_dim`, that decays and takes the difference between a
/// value and what the state says of its key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeltaSpec {
    /// Heads of queries and keys.
    pub n_key_heads: usize,
    /// Heads of values, and of states; so many in a row share a key head.
    pub n_value_heads: usize,
    /// Width of a query or key.
    pub key_dim: usize,
    /// Width of a value.
    pub value_dim: usize,
    /// Positions that the convolution sees, its own the last of them.
    pub conv_width: usize,
}

impl DeltaSpec {
    /// Elements of all queries of a position, and of all keys.
    #[must_use]
    pub const fn keys(&self) -> usize {
        self.n_key_heads * self.key_dim
    }

    /// Elements of all values of a position.
    #[must_use]
    pub const fn values(&self) -> usize {
        self.n_value_heads * self.value_dim
    }

    /// Channels of the convolution: queries, keys, values.
    #[must_use]
    pub const fn channels(&self) -> usize {
        2 * self.keys() + self.values()
    }
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

/// Grouped-query attention (Ainslie et al. 2023); multi-head when the two counts are equal; multi-head latent
/// (DeepSeek-V2, 2024) if `latent` is there.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttentionSpec {
    /// Query heads.
    pub n_heads: usize,
    /// Heads of what is remembered; divides `n_heads`. A latent has one.
    pub n_kv_heads: usize,
    /// Width of a query head, and of a key: scores are divided by its root.
    pub head_dim: usize,
    /// RMSNorm over each head of queries and keys, before RoPE.
    pub qk_norm: bool,
    /// That norm is over all heads as one.
    #[serde(default, skip_serializing_if = "is_default")]
    pub qk_norm_whole: bool,
    /// Biases of the projections to queries, keys and values.
    #[serde(default, skip_serializing_if = "is_default")]
    pub qkv_bias: bool,
    /// Bias of the output projection.
    #[serde(default, skip_serializing_if = "is_default")]
    pub o_bias: bool,
    /// A logit per query head that takes a share of attention and has no value.
    #[serde(default, skip_serializing_if = "is_default")]
    pub sinks: bool,
    /// Outputs of heads are multiplied with the sigmoid of a projection of their own.
    #[serde(default, skip_serializing_if = "is_default")]
    pub gate: bool,
    /// What scores are multiplied with besides `1 / sqrt(head_dim)`.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub score_scale: f64,
    /// Keys and values come from a latent.
    #[serde(default, skip_serializing_if = "is_default")]
    pub latent: Option<LatentSpec>,
    /// An indexer chooses the positions that a token sees; it needs a latent of queries.
    #[serde(default, skip_serializing_if = "is_default")]
    pub indexer: Option<IndexerSpec>,
}

impl Default for AttentionSpec {
    fn default() -> Self {
        Self {
            n_heads: 0,
            n_kv_heads: 0,
            head_dim: 0,
            qk_norm: false,
            qk_norm_whole: false,
            qkv_bias: false,
            o_bias: false,
            sinks: false,
            gate: false,
            score_scale: 1.0,
            latent: None,
            indexer: None,
        }
    }
}

impl AttentionSpec {
    /// Elements of a remembered key: a head's, or the latent and the part that is rotated.
    #[must_use]
    pub const fn key_dim(&self) -> usize {
        match self.latent {
            Some(latent) => latent.kv_rank + latent.rope_dim,
            None => self.head_dim,
        }
    }

    /// Elements of what attention takes the mean of: a head's value, or the latent.
    #[must_use]
    pub const fn mixed_dim(&self) -> usize {
        match self.latent {
            Some(latent) => latent.kv_rank,
            None => self.head_dim,
        }
    }

    /// Elements of a head's output.
    #[must_use]
    pub const fn value_dim(&self) -> usize {
        match self.latent {
            Some(latent) => latent.value_dim,
            None => self.head_dim,
        }
    }

    /// Remembered rows of a position and head: key and value, or the one that is both.
    #[must_use]
    pub const fn kv_planes(&self) -> usize {
        if self.latent.is_some() { 1 } else { 2 }
    }
}

/// Multi-head latent attention: keys and values are products of a latent that all heads share; a part of the key
/// that is rotated comes beside it. The first `head_dim - rope_dim` elements of a query head meet the former.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LatentSpec {
    /// Width of the latent of queries; 0 if they come straight from the hidden states.
    pub q_rank: usize,
    /// Width of the latent of keys and values.
    pub kv_rank: usize,
    /// Elements of a query head that are rotated, its last ones.
    pub rope_dim: usize,
    /// Width of a head's value.
    pub value_dim: usize,
    /// Epsilon of the latents' RMSNorms.
    pub norm_eps: f32,
}

/// The indexer of sparse attention (DeepSeek-V3.2, 2025): of the positions that a token would see, its attention sees
/// the `top_k` of the largest index scores, and of equal ones the earlier. An index score is the sum over the
/// indexer's heads of `weight * relu(query . key)`; all heads have one key, which is remembered beside the latent.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IndexerSpec {
    /// Heads of its queries.
    pub n_heads: usize,
    /// Width of a head and of the key; their first `rope_dim` elements, as many as of a latent's, are rotated.
    pub head_dim: usize,
    /// Positions that are seen.
    pub top_k: usize,
    /// Neighbours are a pair of what is rotated, whatever they are in attention.
    #[serde(default, skip_serializing_if = "is_default")]
    pub interleaved: bool,
    /// Epsilon of the key's LayerNorm.
    pub norm_eps: f32,
}

/// Rotary position embedding (Su et al. 2021).
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RopeSpec {
    /// Base of the geometric series of wavelengths.
    pub theta: f64,
    /// Stretching of the positions.
    pub scaling: RopeScaling,
    /// Elements of a head that are rotated, its first ones; `None` is all (of a latent's head, its `rope_dim`).
    #[serde(default, skip_serializing_if = "is_default")]
    pub dim: Option<usize>,
    /// Neighbours are a pair, not the elements half of `dim` apart.
    #[serde(default, skip_serializing_if = "is_default")]
    pub interleaved: bool,
}

/// How positions beyond the training context are reached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum RopeScaling {
    /// Not at all.
    #[default]
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
    /// How router logits become scores.
    pub router: RouterKind,
    /// Chosen scores are divided by their sum.
    pub norm_topk: bool,
    /// That divisor is no less than this.
    #[serde(default, skip_serializing_if = "is_default")]
    pub norm_min: f64,
    /// Width of the shared expert that every token visits; 0 if there is none.
    pub d_shared: usize,
    /// The router's logits have a bias.
    #[serde(default, skip_serializing_if = "is_default")]
    pub router_bias: bool,
    /// Experts are chosen by score plus a bias of their own, which is no part of their weight.
    #[serde(default, skip_serializing_if = "is_default")]
    pub correction_bias: bool,
    /// Experts are chosen from a few groups only.
    #[serde(default, skip_serializing_if = "is_default")]
    pub groups: Option<GroupSpec>,
    /// What weights are multiplied with at last.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub routed_scale: f64,
    /// The shared expert's output is multiplied with the sigmoid of a product with the token.
    #[serde(default, skip_serializing_if = "is_default")]
    pub shared_gate: bool,
    /// Routed experts have biases, which are resident.
    #[serde(default, skip_serializing_if = "is_default")]
    pub expert_bias: bool,
    /// What stands between a routed expert's matrices.
    #[serde(default, skip_serializing_if = "is_default")]
    pub activation: Activation,
}

impl Default for MoeSpec {
    fn default() -> Self {
        Self {
            n_experts: 0,
            top_k: 0,
            d_expert: 0,
            router: RouterKind::Softmax,
            norm_topk: false,
            norm_min: 0.0,
            d_shared: 0,
            router_bias: false,
            correction_bias: false,
            groups: None,
            routed_scale: 1.0,
            shared_gate: false,
            expert_bias: false,
            activation: Activation::SwiGlu,
        }
    }
}

/// How router logits become scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RouterKind {
    /// Softmax over all experts.
    Softmax,
    /// Sigmoid of each.
    Sigmoid,
}

/// The choice of groups before the choice of experts. Groups are experts in a row, all of one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GroupSpec {
    /// Groups; divides the number of experts.
    pub n: usize,
    /// Groups that a token may visit.
    pub top: usize,
    /// What a group is ranked by.
    pub score: GroupScore,
}

/// What a group of experts is ranked by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupScore {
    /// Its best score.
    Best,
    /// The sum of its two best.
    BestTwo,
}

/// What stands between an expert's matrices, of gate g and up u.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Activation {
    /// `silu(g) * u`.
    #[default]
    #[serde(rename = "swiglu")]
    SwiGlu,
    /// `g' sigmoid(alpha g') * (u' + 1)`, g' being g up to `limit` and u' being u from `-limit` to `limit`.
    ClampedSwiglu {
        /// Steepness.
        alpha: f32,
        /// Bound.
        limit: f32,
    },
}

/// Widths beyond this are taken for damage; the largest published model is below a tenth of it.
const MAX_WIDTH: usize = 1 << 20;
const MAX_LAYERS: usize = 4096;
const MAX_CONV: usize = 64;

impl ModelSpec {
    /// Number of layers.
    #[must_use]
    pub fn n_layers(&self) -> usize {
        self.layers.len()
    }

    /// Positions that a layer's attention sees, if not all.
    #[must_use]
    pub fn window(&self, layer: usize) -> Option<usize> {
        self.windows.get(layer).copied().filter(|&positions| positions > 0)
    }

    /// The gated delta net of a layer, if it has one instead of attention.
    #[must_use]
    pub fn delta_of(&self, layer: usize) -> Option<DeltaSpec> {
        self.delta.filter(|_| self.mixers.get(layer) == Some(&MixerKind::GatedDelta))
    }

    /// The indices of the layers with a gated delta net, ascending.
    pub fn delta_layers(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.n_layers()).filter(|&layer| self.delta_of(layer).is_some())
    }

    /// Elements of a head that are rotated.
    #[must_use]
    pub const fn rope_dim(&self) -> usize {
        match (self.attention.latent, self.rope.dim) {
            (Some(latent), _) => latent.rope_dim,
            (None, Some(dim)) => dim,
            (None, None) => self.attention.head_dim,
        }
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
        let rope_dim = self.rope_dim();
        if !rope_dim.is_multiple_of(2) || !(1..=a.head_dim).contains(&rope_dim) {
            let head_dim = a.head_dim;
            return fail(format!("RoPE rotates pairs, {rope_dim} of {head_dim} elements cannot be"));
        }
        // Planes of a step have so many columns.
        let widest = a.n_heads.saturating_mul(a.head_dim.max(a.key_dim()).max(a.value_dim()));
        if widest > MAX_WIDTH || self.moe.d_shared > MAX_WIDTH {
            return fail("attention or the shared expert is too wide".to_owned());
        }
        if self.moe.top_k > self.moe.n_experts {
            return fail(format!("top_k {} of {} experts", self.moe.top_k, self.moe.n_experts));
        }
        if !self.windows.is_empty() && self.windows.len() != self.layers.len() {
            return fail(format!("{} windows for {} layers", self.windows.len(), self.layers.len()));
        }
        let positive = |x: f64| x.is_finite() && x > 0.0;
        self.validate_latent()?;
        self.validate_indexer()?;
        self.validate_delta()?;
        if let Some(GroupSpec { n, top, .. }) = self.moe.groups {
            let (experts, top_k) = (self.moe.n_experts, self.moe.top_k);
            let fits = n > 0 && experts.is_multiple_of(n) && (1..=n).contains(&top);
            if !fits || top_k > top * (experts / n) {
                return fail(format!("top_k {top_k} of {experts} experts in {top} of {n} groups"));
            }
        }
        if self.moe.shared_gate && self.moe.d_shared == 0 {
            return fail("a gate of a shared expert that there is not".to_owned());
        }
        if !positive(self.moe.routed_scale) || !positive(a.score_scale) {
            return fail("routed_scale and score_scale must be positive".to_owned());
        }
        if !(0.0..=1.0).contains(&self.moe.norm_min) {
            return fail(format!("norm_min is {}, it must be 0 to 1", self.moe.norm_min));
        }
        let Multipliers { embedding, residual, logits } = self.multipliers;
        if ![embedding, residual, logits].into_iter().all(positive) {
            return fail("multipliers must be positive".to_owned());
        }
        if let Activation::ClampedSwiglu { alpha, limit } = self.moe.activation
            && !(positive(f64::from(alpha)) && positive(f64::from(limit)))
        {
            return fail(format!("a clamped SwiGLU with alpha {alpha} and limit {limit}"));
        }
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

    fn validate_indexer(&self) -> Result<(), FormatError> {
        let Some(indexer) = self.attention.indexer else { return Ok(()) };
        let fail = |what: &str| Err(FormatError::Config { what: format!("an indexer {what}") });
        let Some(latent) = self.attention.latent.filter(|latent| latent.q_rank > 0) else {
            return fail("needs a latent of queries");
        };
        let IndexerSpec { n_heads, head_dim, top_k, norm_eps, .. } = indexer;
        let sizes = [n_heads, head_dim, top_k, n_heads.saturating_mul(head_dim)];
        if !sizes.iter().all(|n| (1..=MAX_WIDTH).contains(n)) {
            return fail("is empty or too wide");
        }
        if head_dim < latent.rope_dim {
            return fail("rotates more than a head of it has");
        }
        if !(norm_eps.is_finite() && norm_eps > 0.0) {
            return fail("needs a positive epsilon");
        }
        if !self.windows.is_empty() {
            return fail("chooses from all positions, not from a window");
        }
        Ok(())
    }

    fn validate_delta(&self) -> Result<(), FormatError> {
        let fail = |what: String| Err(FormatError::Config { what });
        let (mixers, layers) = (self.mixers.len(), self.layers.len());
        if mixers > 0 && mixers != layers {
            return fail(format!("{mixers} mixers for {layers} layers"));
        }
        let has = |kind| self.mixers.contains(&kind);
        if has(MixerKind::GatedDelta) != self.delta.is_some() {
            return fail("a gated delta net needs its shape, and its shape a layer".to_owned());
        }
        let Some(delta) = self.delta else { return Ok(()) };
        // A cache of nothing has no blocks to share.
        if !has(MixerKind::Attention) {
            return fail("no layer has attention".to_owned());
        }
        let DeltaSpec { n_key_heads, n_value_heads, key_dim, value_dim, conv_width } = delta;
        let widest = [n_key_heads, n_value_heads, key_dim, value_dim].into_iter().max().unwrap_or(0);
        if widest > MAX_WIDTH || delta.channels() > MAX_WIDTH || !(1..=MAX_CONV).contains(&conv_width) {
            return fail(format!("a gated delta net of {delta:?} is too wide"));
        }
        if n_key_heads == 0 || n_value_heads == 0 || !n_value_heads.is_multiple_of(n_key_heads) {
            return fail(format!("{n_value_heads} value heads do not divide among {n_key_heads} key heads"));
        }
        // Rows of a state are summed in whole lanes.
        if [key_dim, value_dim].iter().any(|n| *n == 0 || !n.is_multiple_of(16)) {
            return fail(format!("keys of {key_dim} and values of {value_dim}, multiples of 16 are needed"));
        }
        Ok(())
    }

    fn validate_latent(&self) -> Result<(), FormatError> {
        let a = &self.attention;
        let Some(latent) = a.latent else { return Ok(()) };
        let fail = |what: &str| Err(FormatError::Config { what: format!("latent attention {what}") });
        if [latent.kv_rank, latent.value_dim].iter().any(|n| *n == 0 || !n.is_multiple_of(ROWS)) {
            return fail("needs ranks and values that are multiples of 32");
        }
        if [latent.q_rank, latent.kv_rank, latent.value_dim].iter().any(|n| *n > MAX_WIDTH) {
            return fail("is too wide");
        }
        if latent.rope_dim >= a.head_dim {
            return fail("needs a part of each head that is not rotated");
        }
        if !(latent.norm_eps.is_finite() && latent.norm_eps > 0.0) {
            return fail("needs a positive epsilon");
        }
        if a.n_kv_heads != 1 {
            return fail("remembers one head");
        }
        if a.qk_norm || a.qkv_bias || a.gate || self.rope.dim.is_some() {
            return fail("has neither QK-norm nor biases nor a gate nor a part of RoPE");
        }
        Ok(())
    }
}
