//! Sixteen lanes in two AVX registers: lanes 0..8 and 8..16.

use std::arch::x86_64::*;

use super::{LANES, Op, Simd};

/// Proof that the processor has AVX2, FMA and F16C.
#[derive(Clone, Copy)]
pub(crate) struct Avx2(());

impl Avx2 {
    /// Callable without `unsafe` only where the features are known to be there.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn new() -> Self {
        Self(())
    }
}

/// Runs `op`, compiled for AVX2.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn run<O: Op>(op: O) -> O::Out {
    op.vector(Avx2::new())
}

/// Methods of one expression that needs the features and nothing else.
macro_rules! lanes {
    ($(fn $name:ident($($arg:ident: $type:ty),*) $(-> $out:ty)? { $body:expr })*) => {$(
        #[inline(always)]
        fn $name(self, $($arg: $type),*) $(-> $out)? {
            // SAFETY: `self` exists only where the processor has the features; whatever memory `body`
            // touches lies behind a reference to an array of the size of the access.
            unsafe { $body }
        }
    )*};
}

/// Two halves of sixteen lanes.
type Pair = (__m256, __m256);

const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT;

impl Simd for Avx2 {
    type F = Pair;

    const WIDE: bool = false;

    #[inline(always)]
    unsafe fn load_f32(self, at: *const u8) -> Pair {
        // SAFETY: features by `self`; 64 readable bytes by the caller's promise, alignment not needed.
        unsafe { (_mm256_loadu_ps(at.cast()), _mm256_loadu_ps(at.add(32).cast())) }
    }

    #[inline(always)]
    unsafe fn load_f16(self, at: *const u8) -> Pair {
        // SAFETY: features by `self`; 32 readable bytes by the caller's promise, alignment not needed.
        unsafe {
            (_mm256_cvtph_ps(_mm_loadu_si128(at.cast())), _mm256_cvtph_ps(_mm_loadu_si128(at.add(16).cast())))
        }
    }

    #[inline(always)]
    unsafe fn load_bf16(self, at: *const u8) -> Pair {
        // SAFETY: features by `self`; 32 readable bytes by the caller's promise, alignment not needed.
        unsafe {
            let low = _mm256_cvtepu16_epi32(_mm_loadu_si128(at.cast()));
            let high = _mm256_cvtepu16_epi32(_mm_loadu_si128(at.add(16).cast()));
            (
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)),
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)),
            )
        }
    }

    #[inline(always)]
    unsafe fn load_i8(self, at: *const u8) -> Pair {
        // SAFETY: features by `self`; 16 readable bytes by the caller's promise, alignment not needed.
        unsafe {
            let low = _mm256_cvtepi8_epi32(_mm_loadl_epi64(at.cast()));
            let high = _mm256_cvtepi8_epi32(_mm_loadl_epi64(at.add(8).cast()));
            (_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high))
        }
    }

    #[inline(always)]
    fn store(self, v: Pair, out: &mut [f32; LANES]) {
        // SAFETY: features by `self`; `out` holds both halves.
        unsafe {
            _mm256_storeu_ps(out.as_mut_ptr(), v.0);
            _mm256_storeu_ps(out.as_mut_ptr().add(8), v.1);
        }
    }

    #[inline(always)]
    fn store_f16(self, v: Pair, out: &mut [u8; 2 * LANES]) {
        // SAFETY: features by `self`; `out` holds both halves.
        unsafe {
            _mm_storeu_si128(out.as_mut_ptr().cast(), _mm256_cvtps_ph::<NEAREST>(v.0));
            _mm_storeu_si128(out.as_mut_ptr().add(16).cast(), _mm256_cvtps_ph::<NEAREST>(v.1));
        }
    }

    #[inline(always)]
    fn sum(self, v: Pair) -> f32 {
        // SAFETY: features by `self`; no memory is touched.
        unsafe {
            let r8 = _mm256_add_ps(v.0, v.1);
            let r4 = _mm_add_ps(_mm256_castps256_ps128(r8), _mm256_extractf128_ps::<1>(r8));
            let r2 = _mm_add_ps(r4, _mm_movehl_ps(r4, r4));
            _mm_cvtss_f32(_mm_add_ss(r2, _mm_movehdup_ps(r2)))
        }
    }

    #[inline(always)]
    fn sum_each(self, v: [Pair; 4]) -> [f32; 4] {
        // Levels of the tree for several at once: after each, the halves of two fit into one register.
        // SAFETY: features by `self`; `out` is the 32 bytes that are stored.
        unsafe {
            let [a, b, c, d] = v;
            let (a8, b8) = (_mm256_add_ps(a.0, a.1), _mm256_add_ps(b.0, b.1));
            let (c8, d8) = (_mm256_add_ps(c.0, c.1), _mm256_add_ps(d.0, d.1));
            let ab4 =
                _mm256_add_ps(_mm256_permute2f128_ps::<0x20>(a8, b8), _mm256_permute2f128_ps::<0x31>(a8, b8));
            let cd4 =
                _mm256_add_ps(_mm256_permute2f128_ps::<0x20>(c8, d8), _mm256_permute2f128_ps::<0x31>(c8, d8));
            // In each half: two of the first, two of the second.
            let r2 = _mm256_add_ps(_mm256_shuffle_ps::<0x44>(ab4, cd4), _mm256_shuffle_ps::<0xee>(ab4, cd4));
            let r = _mm256_add_ps(r2, _mm256_permute_ps::<0xb1>(r2));
            let mut out = [0.0; 8];
            _mm256_storeu_ps(out.as_mut_ptr(), r);
            [out[0], out[4], out[2], out[6]]
        }
    }

    #[inline(always)]
    fn splat(self, x: f32) -> Pair {
        // SAFETY: features by `self`; no memory is touched.
        let v = unsafe { _mm256_set1_ps(x) };
        (v, v)
    }

    #[inline(always)]
    fn add_exponent(self, v: Pair, t: Pair) -> Pair {
        (self.add_exponent_half(v.0, t.0), self.add_exponent_half(v.1, t.1))
    }

    #[inline(always)]
    fn if_less(self, a: Pair, b: Pair, yes: Pair, no: Pair) -> Pair {
        (self.if_less_half(a.0, b.0, yes.0, no.0), self.if_less_half(a.1, b.1, yes.1, no.1))
    }

    lanes! {
        fn add(a: Pair, b: Pair) -> Pair { (_mm256_add_ps(a.0, b.0), _mm256_add_ps(a.1, b.1)) }
        fn sub(a: Pair, b: Pair) -> Pair { (_mm256_sub_ps(a.0, b.0), _mm256_sub_ps(a.1, b.1)) }
        fn mul(a: Pair, b: Pair) -> Pair { (_mm256_mul_ps(a.0, b.0), _mm256_mul_ps(a.1, b.1)) }
        fn div(a: Pair, b: Pair) -> Pair { (_mm256_div_ps(a.0, b.0), _mm256_div_ps(a.1, b.1)) }
        fn fma(a: Pair, b: Pair, c: Pair) -> Pair {
            (_mm256_fmadd_ps(a.0, b.0, c.0), _mm256_fmadd_ps(a.1, b.1, c.1))
        }
        fn max(a: Pair, b: Pair) -> Pair { (_mm256_max_ps(a.0, b.0), _mm256_max_ps(a.1, b.1)) }
        fn prefetch(at: *const u8) { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }
}

impl Avx2 {
    lanes! {
        fn if_less_half(a: __m256, b: __m256, yes: __m256, no: __m256) -> __m256 {
            _mm256_blendv_ps(no, yes, _mm256_cmp_ps::<_CMP_LT_OQ>(a, b))
        }
        fn add_exponent_half(v: __m256, t: __m256) -> __m256 {
            _mm256_castsi256_ps(_mm256_add_epi32(
                _mm256_castps_si256(v),
                _mm256_slli_epi32::<23>(_mm256_castps_si256(t)),
            ))
        }
    }
}
