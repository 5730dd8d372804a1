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

mod isa;
pub mod output;

pub use isa::{Isa, Kernels, KernelsError};
pub use output::Shard;
