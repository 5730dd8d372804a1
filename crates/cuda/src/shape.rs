//! What kernels are compiled for.

use smoe_format::{Encoding, Uniform, Zero};

/// Columns of a group of codes.
pub const GROUP: usize = 64;
/// Shared memory of a workgroup that needs no asking.
const SHARED: usize = 48 << 10;
/// Shared memory of a group: codes and cell, and its terms.
const STAGED: usize = 72;
const TERMS: usize = 256;

/// How keys and values are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvKind {
    /// f32.
    F32,
    /// IEEE halves.
    F16,
}

impl KvKind {
    const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 => 2,
        }
    }
}

/// A model, and how much of it there is to be at once.
#[derive(Clone, Debug, PartialEq)]
pub struct Shape {
    /// Width of the hidden states.
    pub d_model: usize,
    /// Rows of the head.
    pub vocab_size: usize,
    /// Layers, all of experts.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Width of a head: 64, 128 or 256.
    pub head_dim: usize,
    /// Dimensions that are rotated, their halves paired.
    pub rope_dim: usize,
    /// How keys and values are stored.
    pub kv: KvKind,
    /// Experts of a layer.
    pub experts: usize,
    /// Experts of a token: at most 32.
    pub top_k: usize,
    /// Width of an expert.
    pub d_expert: usize,
    /// Weights of the chosen are divided by their sum.
    pub renormalised: bool,
    /// Epsilon of every norm.
    pub eps: f32,
    /// What embeddings, what is added to hidden states, scores, and weights of experts are multiplied by.
    pub embedding_scale: f32,
    /// See there.
    pub residual_scale: f32,
    /// See there.
    pub score_scale: f32,
    /// See there.
    pub routed_scale: f32,
    /// Tokens of a step at most.
    pub tokens: usize,
    /// Rows of logits at once.
    pub head_rows: usize,
    /// Positions of a session at most.
    pub context: usize,
    /// Blocks of the cache.
    pub blocks: usize,
    /// Words of the block tables of a step's sessions at most.
    pub table_words: usize,
}

/// Positions of a block of the cache.
pub const BLOCK: usize = 32;

impl Shape {
    /// Why the kernels do not do; `None` if they do.
    #[must_use]
    pub fn unsupported(&self) -> Option<&'static str> {
        if !matches!(self.head_dim, 64 | 128 | 256) {
            Some("heads of another width than 64, 128 or 256")
        } else if self.rope_dim > self.head_dim || !self.rope_dim.is_multiple_of(2) {
            Some("this rotation")
        } else if !self.d_model.is_multiple_of(GROUP) || !self.d_expert.is_multiple_of(GROUP) {
            Some("widths that are not whole groups of 64")
        } else if self.d_model / GROUP * (STAGED + 2 * TERMS) > SHARED
            || (self.heads * self.head_dim).max(self.d_expert) / GROUP * (STAGED + TERMS) > SHARED
        {
            Some("rows as long")
        } else if self.experts > 1024 || self.top_k > 32 || self.top_k == 0 {
            Some("as many experts")
        } else {
            None
        }
    }

    /// Bytes of a block of keys and values of a layer.
    #[must_use]
    pub const fn block_bytes(&self) -> usize {
        2 * self.kv_heads * BLOCK * self.head_dim * self.kv.bytes()
    }

    /// What the sources are told.
    pub(crate) fn constants(&self) -> [(&'static str, usize); 10] {
        [
            ("D", self.d_model),
            ("HEADS", self.heads),
            ("KV_HEADS", self.kv_heads),
            ("HEAD_DIM", self.head_dim),
            ("HALF", self.rope_dim / 2),
            ("KV_KIND", usize::from(self.kv == KvKind::F16)),
            ("EXPERTS", self.experts),
            ("TOP_K", self.top_k),
            ("MOE_LAYERS", self.layers),
            ("RENORM", usize::from(self.renormalised)),
        ]
    }
}

/// Bits of codes that kernels take, symmetric in groups of 64; none of other encodings.
#[must_use]
pub fn bits(encoding: Encoding) -> Option<u32> {
    let own = |bits| Uniform::new(bits, GROUP, Zero::Symmetric).map(Encoding::Uniform);
    [4, 8].into_iter().find(|&bits| own(bits) == Some(encoding)).map(u32::from)
}

/// The name of a float type in the kernels' names.
pub(crate) const fn float_name(encoding: Encoding) -> Option<&'static str> {
    match encoding {
        Encoding::F32 => Some("f32"),
        Encoding::F16 => Some("f16"),
        Encoding::Bf16 => Some("bf16"),
        _ => None,
    }
}

/// Whether a product of such weights has a kernel.
#[must_use]
pub fn has_product(encoding: Encoding) -> bool {
    bits(encoding).is_some() || float_name(encoding).is_some()
}

/// Warps that share a block of rows of a coded product: many where rows are long and few, as each is to be done at
/// once; few where blocks fill the card (EXP-GPU-07).
pub(crate) const fn warps(bits: u32, blocks: usize, groups: usize) -> u32 {
    match (bits, blocks >= 512, groups >= 48) {
        (4, true, _) => 4,
        (_, true, _) | (_, false, false) => 8,
        (_, false, true) => 16,
    }
}

/// Shared memory of a product of so many groups, `matrices` at once.
pub(crate) const fn shared_bytes(groups: usize, matrices: usize) -> u32 {
    (groups * (STAGED + matrices * TERMS)) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_of_4_and_8_bits_in_groups_of_64_have_kernels() {
        let uniform =
            |bits, group, zero| Encoding::Uniform(Uniform::new(bits, group, zero).expect("an encoding"));
        assert_eq!(bits(uniform(4, 64, Zero::Symmetric)), Some(4));
        assert_eq!(bits(uniform(8, 64, Zero::Symmetric)), Some(8));
        assert_eq!(bits(uniform(4, 32, Zero::Symmetric)), None);
        assert_eq!(bits(uniform(4, 64, Zero::Affine)), None);
        assert_eq!(bits(uniform(6, 64, Zero::Symmetric)), None);
        assert!(has_product(Encoding::Bf16) && !has_product(uniform(2, 64, Zero::Symmetric)));
    }
}
