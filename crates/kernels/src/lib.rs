//! CPU arithmetic on slices: quantised and float matrix products, norms, RoPE, attention, SwiGLU, top-k.
//!
//! Every operation has one definition, the scalar one, and every instruction set gives its bits: sums are
//! defined over a fixed order (16 virtual lanes for floats, ascending groups for codes), multiply-adds are
//! fused everywhere, and `exp` and its kin are our own polynomials. So scalar is an exact oracle for SIMD,
//! and machines of different makers answer alike.
//!
//! Arithmetic here knows nothing of files, layers or threads: it is handed row ranges. The one exception
//! lives apart: [`pool`] is the fork-join pool and the parallel drivers over those ranges, kept here only
//! because this crate is a fence for `unsafe`.

// Other machines run scalar code so far, and leave the vector side of operations unused.
#![cfg_attr(not(any(target_arch = "x86_64", target_arch = "aarch64")), allow(dead_code))]

mod activations;
mod attention;
mod coded;
mod delta;
mod dot;
mod elementwise;
mod entropy;
mod exp;
mod expert_ffn;
mod float_matmul;
mod head_matmul;
mod isa;
mod loops;
mod matmul;
mod matrix;
mod norm;
pub mod output;
pub mod pool;
mod rope;
mod simd;
mod stream;
mod top_k;

pub use activations::{Activations, Quantised};
pub use attention::{
    AttentionHeads, AttentionScratch, Choices, IndexHeads, KvBlocks, KvPlane, KvRun, KvType, Sight, attend,
    choose,
};
pub use delta::{DeltaInput, DeltaMark, DeltaRun, DeltaScratch, DeltaShape, DeltaWeights, delta_net};
pub use entropy::EntropyDecoder;
pub use exp::{EXP_ULP_MAX, exp, sigmoid, silu};
pub use expert_ffn::{ExpertBias, ExpertCall, ExpertScratch, expert_ffn};
pub use head_matmul::{HeadInput, HeadScratch, head_matmul};
pub use isa::{Isa, Kernels, KernelsError};
pub use loops::Loops;
pub use matmul::{Input, Product, matmul, matmul_all};
pub use matrix::Matrix;
pub use output::Shard;
pub use pool::Pool;
pub use rope::RopeStyle;
pub use top_k::{top_k, top_k_ascending};
