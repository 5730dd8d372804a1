//! One float operation, every instruction set: sixteen lanes behind a trait, one dispatch for all.
//!
//! A float operation is a struct of its operands that implements [`Op`] twice: `scalar` is the definition in
//! plain Rust; `vector` is the fast way over any [`Simd`], that is over a value that exists only where the
//! processor has the instructions. [`Kernels::run`] is the only place where the two meet and the only
//! call into code compiled for other features than the crate's.
//!
//! A [`Simd`] always has sixteen lanes, whatever the registers hold (AVX-512 one, AVX2 two), because sums are
//! defined over sixteen lanes; so an operation is written once. Everything from `vector` down to the
//! lanes must be `#[inline(always)]`: only what ends up inside the feature function is compiled with its
//! features. Closures are not, so no lanes go through them.

use crate::isa::{Isa, Kernels};

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;

/// Lanes of a sum.
pub(crate) const LANES: usize = 16;

/// An operation with all its operands.
pub(crate) trait Op {
    type Out;

    /// The definition.
    fn scalar(self) -> Self::Out;

    /// The same bits with the lanes of `s`. Must be `#[inline(always)]`.
    fn vector<S: Simd>(self, s: S) -> Self::Out;
}

impl Kernels {
    /// Runs `op` with this instruction set.
    #[inline]
    pub(crate) fn run<O: Op>(self, op: O) -> O::Out {
        match self.isa() {
            // SAFETY: a `Kernels` of an instruction set exists only where the processor has it.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => unsafe { avx512::run(op) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => unsafe { avx2::run(op) },
            _ => op.scalar(),
        }
    }
}

/// Sixteen f32 lanes of an instruction set. A value of an implementing type proves that the processor has it.
pub(crate) trait Simd: Copy {
    /// The lanes.
    type F: Copy;

    /// True if sixteen accumulators of sixteen lanes fit into the registers, else four do.
    const WIDE: bool;

    fn splat(self, x: f32) -> Self::F;

    /// Reads sixteen f32.
    ///
    /// # Safety
    /// 64 bytes at `at` can be read; any alignment.
    unsafe fn load_f32(self, at: *const u8) -> Self::F;

    /// Reads and widens sixteen IEEE halves.
    ///
    /// # Safety
    /// 32 bytes at `at` can be read; any alignment.
    unsafe fn load_f16(self, at: *const u8) -> Self::F;

    /// Reads and widens sixteen bfloat16.
    ///
    /// # Safety
    /// 32 bytes at `at` can be read; any alignment.
    unsafe fn load_bf16(self, at: *const u8) -> Self::F;

    /// Reads sixteen signed bytes as f32.
    ///
    /// # Safety
    /// 16 bytes at `at` can be read.
    unsafe fn load_i8(self, at: *const u8) -> Self::F;

    fn store(self, v: Self::F, out: &mut [f32; LANES]);
    /// Narrows to IEEE halves, to nearest even, little-endian.
    fn store_f16(self, v: Self::F, out: &mut [u8; 2 * LANES]);

    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `if a > b { a } else { b }`, so `b` where either is NaN.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// `if a < b { yes } else { no }`.
    fn if_less(self, a: Self::F, b: Self::F, yes: Self::F, no: Self::F) -> Self::F;
    /// The bits of `v` plus the bits of `t` shifted left by 23, as integers that wrap.
    fn add_exponent(self, v: Self::F, t: Self::F) -> Self::F;
    /// The lanes' sum by the fixed tree ([`join`]).
    fn sum(self, v: Self::F) -> f32;

    /// Hints that the line at `at`, which need not be readable, is wanted soon.
    fn prefetch(self, at: *const u8);

    /// Sixteen lanes of an array.
    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> Self::F {
        // SAFETY: an array of sixteen f32 is 64 readable bytes.
        unsafe { self.load_f32(from.as_ptr().cast()) }
    }

    /// Fewer than sixteen lanes, the rest `pad`.
    #[inline(always)]
    fn load_part(self, from: &[f32], pad: f32) -> Self::F {
        let mut lanes = [pad; LANES];
        lanes[..from.len()].copy_from_slice(from);
        self.load(&lanes)
    }

    /// Stores the first `out.len()` lanes, fewer than sixteen.
    #[inline(always)]
    fn store_part(self, v: Self::F, out: &mut [f32]) {
        let mut lanes = [0.0; LANES];
        self.store(v, &mut lanes);
        out.copy_from_slice(&lanes[..out.len()]);
    }
}

/// The fixed tree that joins sixteen lanes: halves are added until one value is left.
#[inline]
pub(crate) fn join(lanes: [f32; LANES]) -> f32 {
    let r8: [f32; 8] = std::array::from_fn(|l| lanes[l] + lanes[l + 8]);
    let r4: [f32; 4] = std::array::from_fn(|l| r8[l] + r8[l + 4]);
    let r2: [f32; 2] = std::array::from_fn(|l| r4[l] + r4[l + 2]);
    r2[0] + r2[1]
}
