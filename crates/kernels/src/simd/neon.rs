//! Sixteen lanes in four NEON registers: lanes 0..4, 4..8, 8..12 and 12..16.

use std::arch::aarch64::*;
use std::arch::asm;

use super::{LANES, Op, Simd};

/// Proof that the processor has NEON.
#[derive(Clone, Copy)]
pub(crate) struct Neon(());

impl Neon {
    /// Callable without `unsafe` only where the feature is known to be there.
    #[inline]
    #[target_feature(enable = "neon")]
    fn new() -> Self {
        Self(())
    }
}

/// Runs `op`, compiled for NEON.
#[target_feature(enable = "neon")]
pub(super) fn run<O: Op>(op: O) -> O::Out {
    op.vector(Neon::new())
}

/// Four quarters of sixteen lanes.
type Quad = [float32x4_t; 4];

/// Methods that make one expression of each quarter; it needs the feature and touches no memory.
macro_rules! quarters {
    ($(fn $name:ident($($arg:ident),*) { $body:expr })*) => {$(
        #[inline(always)]
        fn $name(self, $($arg: Quad),*) -> Quad {
            let mut out = self.splat(0.0);
            for (i, out) in out.iter_mut().enumerate() {
                $(let $arg = $arg[i];)*
                // SAFETY: `self` exists only where the processor has the feature.
                *out = unsafe { $body };
            }
            out
        }
    )*};
}

impl Simd for Neon {
    type F = Quad;

    const WIDE: bool = false;

    #[inline(always)]
    unsafe fn load_f32(self, at: *const u8) -> Quad {
        let mut out = self.splat(0.0);
        for (i, out) in out.iter_mut().enumerate() {
            // SAFETY: feature by `self`; 64 readable bytes by the caller's promise. Loads of bytes need no
            // alignment.
            *out = unsafe { vreinterpretq_f32_u8(vld1q_u8(at.add(16 * i))) };
        }
        out
    }

    #[inline(always)]
    unsafe fn load_f16(self, at: *const u8) -> Quad {
        let mut out = self.splat(0.0);
        for (i, out) in out.iter_mut().enumerate() {
            // SAFETY: feature by `self`; 32 readable bytes by the caller's promise.
            *out = unsafe { vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(at.add(8 * i)))) };
        }
        out
    }

    #[inline(always)]
    unsafe fn load_bf16(self, at: *const u8) -> Quad {
        let mut out = self.splat(0.0);
        for (i, out) in out.iter_mut().enumerate() {
            // SAFETY: feature by `self`; 32 readable bytes by the caller's promise.
            *out = unsafe {
                vreinterpretq_f32_u32(vshll_n_u16::<16>(vreinterpret_u16_u8(vld1_u8(at.add(8 * i)))))
            };
        }
        out
    }

    #[inline(always)]
    unsafe fn load_i8(self, at: *const u8) -> Quad {
        // SAFETY: feature by `self`; 16 readable bytes by the caller's promise.
        unsafe {
            let bytes = vld1q_s8(at.cast());
            let (low, high) = (vmovl_s8(vget_low_s8(bytes)), vmovl_high_s8(bytes));
            [
                vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))),
                vcvtq_f32_s32(vmovl_high_s16(low)),
                vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))),
                vcvtq_f32_s32(vmovl_high_s16(high)),
            ]
        }
    }

    #[inline(always)]
    fn store(self, v: Quad, out: &mut [f32; LANES]) {
        for (i, v) in v.into_iter().enumerate() {
            // SAFETY: feature by `self`; `out` holds all quarters.
            unsafe { vst1q_f32(out.as_mut_ptr().add(4 * i), v) };
        }
    }

    #[inline(always)]
    fn store_f16(self, v: Quad, out: &mut [u8; 2 * LANES]) {
        for (i, v) in v.into_iter().enumerate() {
            // SAFETY: feature by `self`; `out` holds all quarters.
            unsafe { vst1_u8(out.as_mut_ptr().add(8 * i), vreinterpret_u8_f16(vcvt_f16_f32(v))) };
        }
    }

    #[inline(always)]
    fn sum(self, v: Quad) -> f32 {
        // SAFETY: feature by `self`; no memory is touched.
        unsafe {
            let r4 = self.four_lanes(v);
            let r2 = vadd_f32(vget_low_f32(r4), vget_high_f32(r4));
            vpadds_f32(r2)
        }
    }

    #[inline(always)]
    fn sum_each(self, v: [Quad; 4]) -> [f32; 4] {
        let [a, b, c, d] =
            [self.four_lanes(v[0]), self.four_lanes(v[1]), self.four_lanes(v[2]), self.four_lanes(v[3])];
        let mut out = [0.0; 4];
        // SAFETY: feature by `self`; `out` is the 16 bytes that are stored.
        unsafe { vst1q_f32(out.as_mut_ptr(), vpaddq_f32(self.two_lanes(a, b), self.two_lanes(c, d))) };
        out
    }

    #[inline(always)]
    fn splat(self, x: f32) -> Quad {
        // SAFETY: feature by `self`; no memory is touched.
        [unsafe { vdupq_n_f32(x) }; 4]
    }

    #[inline(always)]
    fn prefetch(self, at: *const u8) {
        // SAFETY: a hint, for which any address will do.
        unsafe {
            asm!("prfm pldl1keep, [{at}]", at = in(reg) at.addr(), options(nomem, nostack, preserves_flags));
        }
    }

    quarters! {
        fn add(a, b) { vaddq_f32(a, b) }
        fn sub(a, b) { vsubq_f32(a, b) }
        fn mul(a, b) { vmulq_f32(a, b) }
        fn div(a, b) { vdivq_f32(a, b) }
        fn fma(a, b, c) { vfmaq_f32(c, a, b) }
        // Not the instruction for maxima, which gives NaN where either is one.
        fn max(a, b) { vbslq_f32(vcgtq_f32(a, b), a, b) }
        fn if_less(a, b, yes, no) { vbslq_f32(vcltq_f32(a, b), yes, no) }
        fn add_exponent(v, t) {
            vreinterpretq_f32_u32(vaddq_u32(
                vreinterpretq_u32_f32(v),
                vshlq_n_u32::<23>(vreinterpretq_u32_f32(t)),
            ))
        }
    }
}

impl Neon {
    /// Two levels of the tree: lanes l, l + 4, l + 8 and l + 12 are joined.
    #[inline(always)]
    fn four_lanes(self, v: Quad) -> float32x4_t {
        // SAFETY: feature by `self`; no memory is touched.
        unsafe { vaddq_f32(vaddq_f32(v[0], v[2]), vaddq_f32(v[1], v[3])) }
    }

    /// The third level for two sums at once: two lanes of `a`, two of `b`.
    #[inline(always)]
    fn two_lanes(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: feature by `self`; no memory is touched.
        unsafe {
            let low = vcombine_f32(vget_low_f32(a), vget_low_f32(b));
            vaddq_f32(low, vcombine_f32(vget_high_f32(a), vget_high_f32(b)))
        }
    }
}
