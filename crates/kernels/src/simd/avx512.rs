//! Sixteen lanes in one AVX-512 register.

use std::arch::x86_64::*;

use super::{LANES, Op, Simd};

/// Proof that the processor has AVX-512 F, BW, DQ and VL.
#[derive(Clone, Copy)]
pub(crate) struct Avx512(());

impl Avx512 {
    /// Callable without `unsafe` only where the features are known to be there.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    fn new() -> Self {
        Self(())
    }
}

/// Runs `op`, compiled for AVX-512.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub(super) fn run<O: Op>(op: O) -> O::Out {
    op.vector(Avx512::new())
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

impl Simd for Avx512 {
    type F = __m512;

    const WIDE: bool = true;

    #[inline(always)]
    unsafe fn load_f32(self, at: *const u8) -> __m512 {
        // SAFETY: features by `self`; 64 readable bytes by the caller's promise, alignment not needed.
        unsafe { _mm512_loadu_ps(at.cast()) }
    }

    #[inline(always)]
    unsafe fn load_f16(self, at: *const u8) -> __m512 {
        // SAFETY: features by `self`; 32 readable bytes by the caller's promise, alignment not needed.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(at.cast())) }
    }

    #[inline(always)]
    unsafe fn load_bf16(self, at: *const u8) -> __m512 {
        // SAFETY: features by `self`; 32 readable bytes by the caller's promise, alignment not needed.
        unsafe {
            let halves = _mm512_cvtepu16_epi32(_mm256_loadu_si256(at.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(halves))
        }
    }

    #[inline(always)]
    unsafe fn load_i8(self, at: *const u8) -> __m512 {
        // SAFETY: features by `self`; 16 readable bytes by the caller's promise, alignment not needed.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(at.cast()))) }
    }

    #[inline(always)]
    fn sum(self, v: __m512) -> f32 {
        // SAFETY: features by `self`; no memory is touched.
        unsafe {
            let r8 = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v));
            let r4 = _mm_add_ps(_mm256_castps256_ps128(r8), _mm256_extractf128_ps::<1>(r8));
            let r2 = _mm_add_ps(r4, _mm_movehl_ps(r4, r4));
            _mm_cvtss_f32(_mm_add_ss(r2, _mm_movehdup_ps(r2)))
        }
    }

    #[inline(always)]
    fn sum_each(self, v: [__m512; 4]) -> [f32; 4] {
        // Levels of the tree for several at once: after each, the halves of two fit into one register.
        // SAFETY: features by `self`; `out` is the 16 bytes that are stored.
        unsafe {
            let r8_01 = _mm512_add_ps(
                _mm512_shuffle_f32x4::<0x44>(v[0], v[1]),
                _mm512_shuffle_f32x4::<0xee>(v[0], v[1]),
            );
            let r8_23 = _mm512_add_ps(
                _mm512_shuffle_f32x4::<0x44>(v[2], v[3]),
                _mm512_shuffle_f32x4::<0xee>(v[2], v[3]),
            );
            let r4 = _mm512_add_ps(
                _mm512_shuffle_f32x4::<0x88>(r8_01, r8_23),
                _mm512_shuffle_f32x4::<0xdd>(r8_01, r8_23),
            );
            let r2 = _mm512_add_ps(r4, _mm512_permute_ps::<0x4e>(r4));
            let r = _mm512_add_ps(r2, _mm512_permute_ps::<0xb1>(r2));
            let mut out = [0.0; 4];
            let firsts = _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, r));
            _mm_storeu_ps(out.as_mut_ptr(), firsts);
            out
        }
    }

    lanes! {
        fn splat(x: f32) -> __m512 { _mm512_set1_ps(x) }
        fn store(v: __m512, out: &mut [f32; LANES]) { _mm512_storeu_ps(out.as_mut_ptr(), v) }
        fn store_f16(v: __m512, out: &mut [u8; 2 * LANES]) {
            _mm256_storeu_si256(
                out.as_mut_ptr().cast(),
                _mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(v),
            )
        }
        fn add(a: __m512, b: __m512) -> __m512 { _mm512_add_ps(a, b) }
        fn sub(a: __m512, b: __m512) -> __m512 { _mm512_sub_ps(a, b) }
        fn mul(a: __m512, b: __m512) -> __m512 { _mm512_mul_ps(a, b) }
        fn div(a: __m512, b: __m512) -> __m512 { _mm512_div_ps(a, b) }
        fn fma(a: __m512, b: __m512, c: __m512) -> __m512 { _mm512_fmadd_ps(a, b, c) }
        fn max(a: __m512, b: __m512) -> __m512 { _mm512_max_ps(a, b) }
        fn if_less(a: __m512, b: __m512, yes: __m512, no: __m512) -> __m512 {
            _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b), no, yes)
        }
        fn add_exponent(v: __m512, t: __m512) -> __m512 {
            _mm512_castsi512_ps(_mm512_add_epi32(
                _mm512_castps_si512(v),
                _mm512_slli_epi32::<23>(_mm512_castps_si512(t)),
            ))
        }
        fn prefetch(at: *const u8) { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }
}
