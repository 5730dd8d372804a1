//! One float operation, every instruction set: sixteen lanes behind a trait, one dispatch for all.
//!
//! A float operation is a struct of its operands that implements [`Op`] twice: `scalar` is the definition in
//! plain Rust; `vector` is the fast way over any [`Simd`], that is over a value that exists only where the
//! processor has the instructions. [`Kernels::run`] is the only place where the two meet and the only
//! call into code compiled for other features than the crate's.
//!
//! A [`Simd`] always has sixteen lanes, whatever the registers hold (AVX-512 one, AVX2 two, NEON four),
//! because sums are defined over sixteen lanes; so an operation is written once. Everything from `vector`
//! down to the lanes must be `#[inline(always)]`: only what ends up inside the feature function is compiled
//! with its features. Closures are not, so no lanes go through them.

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use crate::isa::Isa;
use crate::isa::Kernels;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;

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
            // SAFETY: as above.
            #[cfg(target_arch = "aarch64")]
            Isa::Neon | Isa::NeonI8mm => unsafe { neon::run(op) },
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
    /// The [`Simd::sum`] of each of four.
    fn sum_each(self, v: [Self::F; 4]) -> [f32; 4];

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

#[cfg(test)]
mod tests {
    use smoe_format::half::{bf16_to_f32, f16_to_f32, f32_to_f16};

    use super::*;

    /// What each basic operation makes of `a`, `b` and `c`, one after the other.
    struct Basics<'a> {
        a: &'a [f32; LANES],
        b: &'a [f32; LANES],
        c: &'a [f32; LANES],
    }

    impl Op for Basics<'_> {
        type Out = Vec<[f32; LANES]>;

        fn scalar(self) -> Self::Out {
            let each =
                |f: fn(f32, f32, f32) -> f32| std::array::from_fn(|l| f(self.a[l], self.b[l], self.c[l]));
            vec![
                each(|a, b, _| a + b),
                each(|a, b, _| a - b),
                each(|a, b, _| a * b),
                each(|a, b, _| a / b),
                each(f32::mul_add),
                each(|a, b, _| if a > b { a } else { b }),
                each(|a, b, c| if a < b { c } else { a }),
                each(|a, b, _| f32::from_bits(a.to_bits().wrapping_add(b.to_bits() << 23))),
                [join(*self.a); LANES],
                std::array::from_fn(|l| join([*self.a, *self.b, *self.c, *self.a][l % 4])),
                std::array::from_fn(|l| if l < 3 { self.a[l] } else { -0.0 }),
                std::array::from_fn(|l| f16_to_f32(f32_to_f16(self.a[l]))),
            ]
        }

        #[inline(always)]
        fn vector<S: Simd>(self, s: S) -> Self::Out {
            let (a, b, c) = (s.load(self.a), s.load(self.b), s.load(self.c));
            let mut halves = [0; 2 * LANES];
            s.store_f16(a, &mut halves);
            let each = s.sum_each([a, b, c, a]);
            let all = [
                s.add(a, b),
                s.sub(a, b),
                s.mul(a, b),
                s.div(a, b),
                s.fma(a, b, c),
                s.max(a, b),
                s.if_less(a, b, c, a),
                s.add_exponent(a, b),
                s.splat(s.sum(a)),
                s.load(&std::array::from_fn(|l| each[l % 4])),
                s.load_part(&self.a[..3], -0.0),
                // SAFETY: `halves` is 32 bytes.
                unsafe { s.load_f16(halves.as_ptr()) },
            ];
            let mut out = vec![[0.0; LANES]; all.len()];
            for i in 0..all.len() {
                s.store(all[i], &mut out[i]);
            }
            out
        }
    }

    #[test]
    fn lanes_do_what_they_say() {
        let mut state = 1u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            match state >> 29 {
                0 => f32::NAN,
                1 => -0.0,
                2 => f32::INFINITY,
                3 => f32::from_bits(state << 3),
                _ => (state as i32 >> 8) as f32 / 1000.0,
            }
        };
        let canonical = |v: f32| if v.is_nan() { u32::MAX } else { v.to_bits() };
        for _ in 0..2000 {
            let [a, b, c] = std::array::from_fn(|_| std::array::from_fn(|_| next()));
            let run = |k: Kernels| k.run(Basics { a: &a, b: &b, c: &c });
            let scalar = run(Kernels::available()[0]);
            for k in Kernels::available() {
                for (op, (lanes, scalar)) in run(k).iter().zip(&scalar).enumerate() {
                    // A NaN's own bits are not defined, so neither is what is added to them.
                    let skip = |l: usize| op == 7 && (a[l].is_nan() || b[l].is_nan());
                    for l in (0..LANES).filter(|&l| !skip(l)) {
                        let what = (op, a[l], b[l], c[l]);
                        assert_eq!(canonical(lanes[l]), canonical(scalar[l]), "{k:?} {what:?}");
                    }
                }
            }
        }
    }

    /// Sixteen elements of each stored type, widened: f16, bf16, i8 (of the first sixteen bytes).
    struct Widen<'a>(&'a [u8; 2 * LANES]);

    impl Op for Widen<'_> {
        type Out = [[f32; LANES]; 3];

        fn scalar(self) -> Self::Out {
            let half = |l: usize| u16::from_le_bytes([self.0[2 * l], self.0[2 * l + 1]]);
            [
                std::array::from_fn(|l| f16_to_f32(half(l))),
                std::array::from_fn(|l| bf16_to_f32(half(l))),
                std::array::from_fn(|l| f32::from(self.0[l] as i8)),
            ]
        }

        #[inline(always)]
        fn vector<S: Simd>(self, s: S) -> Self::Out {
            let mut out = [[0.0; LANES]; 3];
            let at = self.0.as_ptr();
            // SAFETY: 32 bytes, as much as the widest of the three reads.
            let all = unsafe { [s.load_f16(at), s.load_bf16(at), s.load_i8(at)] };
            for i in 0..3 {
                s.store(all[i], &mut out[i]);
            }
            out
        }
    }

    #[test]
    fn all_halves_and_bytes_widen_to_the_bits_of_the_format() {
        for first in (0..=u16::MAX).step_by(LANES) {
            let mut bytes = [0; 2 * LANES];
            for (l, bytes) in bytes.chunks_exact_mut(2).enumerate() {
                bytes.copy_from_slice(&(first + l as u16).to_le_bytes());
            }
            let scalar = Kernels::available()[0].run(Widen(&bytes));
            for k in Kernels::available() {
                assert_eq!(
                    k.run(Widen(&bytes)).map(|v| v.map(f32::to_bits)),
                    scalar.map(|v| v.map(f32::to_bits))
                );
            }
        }
    }
}
