//! SARC: the 128-byte architecture block, as the original defined it.
//!
//! It holds what fits; the config block holds everything. Version 3 files carry it so that a reader of the
//! original's files still learns the architecture, and it must agree with the config block.

use crate::FormatError;
use crate::spec::{AttentionSpec, FfnKind, ModelSpec, MoeSpec, Multipliers, RopeSpec, RouterKind};
use crate::wire::{Bytes, Put};

/// Bytes of the block.
pub const SARC_BYTES: usize = 128;
const MAGIC: &[u8; 4] = b"SARC";
const NORM_TOPK: u32 = 1;
const QK_NORM: u32 = 2;
const DENSE_FIRST: u32 = 4;

/// The fields of a SARC block.
#[derive(Clone, Debug, PartialEq)]
pub struct Sarc {
    /// Chosen routing weights are divided by their sum.
    pub norm_topk: bool,
    /// RMSNorm on each head of queries and keys.
    pub qk_norm: bool,
    /// Layer 0 has a dense feed-forward part.
    pub dense_first: bool,
    /// RoPE base.
    pub rope_theta: f32,
    /// Query heads.
    pub n_heads: u32,
    /// Key and value heads.
    pub n_kv_heads: u32,
    /// Width of a head.
    pub head_dim: u32,
    /// Experts per token.
    pub top_k: u32,
    /// Width of a routed expert.
    pub d_expert: u32,
    /// Width of dense layers.
    pub d_dense: u32,
    /// Width of the shared expert.
    pub d_shared: u32,
    /// Number of layers.
    pub n_layers: u32,
    /// Epsilon of RMSNorm.
    pub rms_norm_eps: f32,
    /// Family name, at most 24 bytes.
    pub model_type: String,
}

impl Sarc {
    /// What fits of a spec.
    #[must_use]
    pub fn from_spec(spec: &ModelSpec) -> Self {
        let dense = spec.layers.iter().find_map(|kind| match kind {
            FfnKind::Dense(width) => Some(*width as u32),
            FfnKind::Moe => None,
        });
        let mut model_type = spec.model_type.clone();
        while model_type.len() > 24 {
            model_type.pop();
        }
        Self {
            norm_topk: spec.moe.norm_topk,
            qk_norm: spec.attention.qk_norm,
            dense_first: matches!(spec.layers.first(), Some(FfnKind::Dense(_))),
            rope_theta: spec.rope.theta as f32,
            n_heads: spec.attention.n_heads as u32,
            n_kv_heads: spec.attention.n_kv_heads as u32,
            head_dim: spec.attention.head_dim as u32,
            top_k: spec.moe.top_k as u32,
            d_expert: spec.moe.d_expert as u32,
            d_dense: dense.unwrap_or(0),
            d_shared: spec.moe.d_shared as u32,
            n_layers: spec.layers.len() as u32,
            rms_norm_eps: spec.rms_norm_eps,
            model_type,
        }
    }

    /// The block.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(SARC_BYTES);
        out.put(MAGIC);
        out.put_u32(1);
        out.put_u32(SARC_BYTES as u32);
        let flag = |on: bool, bit: u32| if on { bit } else { 0 };
        out.put_u32(
            flag(self.norm_topk, NORM_TOPK)
                | flag(self.qk_norm, QK_NORM)
                | flag(self.dense_first, DENSE_FIRST),
        );
        out.put(&self.rope_theta.to_le_bytes());
        for value in [
            self.n_heads,
            self.n_kv_heads,
            self.head_dim,
            self.top_k,
            self.d_expert,
            self.d_dense,
            self.d_shared,
            0,
            self.n_layers,
        ] {
            out.put_u32(value);
        }
        out.put(&self.rms_norm_eps.to_le_bytes());
        out.put(self.model_type.as_bytes());
        out.resize(SARC_BYTES, 0);
        out
    }

    /// Reads the block at `offset` of `head`.
    ///
    /// # Errors
    /// If it is cut short, of another version, or names an activation other than SiLU.
    pub fn parse(head: &[u8], offset: u64) -> Result<Self, FormatError> {
        let b = Bytes::at(head, "SARC block", offset, SARC_BYTES as u64)?;
        b.magic(MAGIC)?;
        if b.u32(4) != 1 || b.u32(8) as usize != SARC_BYTES {
            return Err(b.bad("SARC version", b.u32(4), "version 1 of 128 bytes is known"));
        }
        if b.u32(48) != 0 {
            return Err(b.bad("SARC activation", b.u32(48), "0 (SiLU) is known"));
        }
        let flags = b.u32(12);
        if flags & !(NORM_TOPK | QK_NORM | DENSE_FIRST) != 0 {
            return Err(b.bad("SARC flags", format!("{flags:#x}"), "the lowest three bits are known"));
        }
        b.zero(84..SARC_BYTES)?;
        let name = &b.slice()[60..84];
        let name = &name[..name.iter().position(|&c| c == 0).unwrap_or(24)];
        let Ok(model_type) = std::str::from_utf8(name) else {
            return Err(b.bad("SARC model type", format!("{name:02x?}"), "UTF-8"));
        };
        Ok(Self {
            norm_topk: flags & NORM_TOPK != 0,
            qk_norm: flags & QK_NORM != 0,
            dense_first: flags & DENSE_FIRST != 0,
            rope_theta: b.f32(16),
            n_heads: b.u32(20),
            n_kv_heads: b.u32(24),
            head_dim: b.u32(28),
            top_k: b.u32(32),
            d_expert: b.u32(36),
            d_dense: b.u32(40),
            d_shared: b.u32(44),
            n_layers: b.u32(52),
            rms_norm_eps: b.f32(56),
            model_type: model_type.to_owned(),
        })
    }

    /// The spec that a version 2 file means: its block, and what its header and backbone show.
    #[must_use]
    pub fn to_spec(&self, seen: &Seen) -> ModelSpec {
        let layers = (0..self.n_layers)
            .map(|layer| {
                if seen.moe_layers.contains(&layer) {
                    FfnKind::Moe
                } else {
                    FfnKind::Dense(self.d_dense as usize)
                }
            })
            .collect();
        ModelSpec {
            model_type: self.model_type.clone(),
            d_model: seen.d_model,
            vocab_size: seen.vocab_size,
            // The original's KV window; its files do not say what the model was made for.
            max_context: 4096,
            rms_norm_eps: self.rms_norm_eps,
            tied_head: seen.tied_head,
            attention: AttentionSpec {
                n_heads: self.n_heads as usize,
                n_kv_heads: self.n_kv_heads as usize,
                head_dim: self.head_dim as usize,
                qk_norm: self.qk_norm,
                ..AttentionSpec::default()
            },
            rope: RopeSpec { theta: f64::from(self.rope_theta), ..RopeSpec::default() },
            layers,
            windows: Vec::new(),
            mixers: Vec::new(),
            delta: None,
            multipliers: Multipliers::default(),
            moe: MoeSpec {
                n_experts: seen.n_experts,
                top_k: self.top_k as usize,
                d_expert: self.d_expert as usize,
                router: RouterKind::Softmax,
                norm_topk: self.norm_topk,
                d_shared: self.d_shared as usize,
                ..MoeSpec::default()
            },
        }
    }
}

/// What an original file shows outside of its SARC block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    /// Width of the residual stream (header).
    pub d_model: usize,
    /// Rows of the embedding (header).
    pub vocab_size: usize,
    /// Experts of a layer (header).
    pub n_experts: usize,
    /// Layers that occur in the expert table.
    pub moe_layers: Vec<u32>,
    /// The backbone has no head of its own.
    pub tied_head: bool,
}
