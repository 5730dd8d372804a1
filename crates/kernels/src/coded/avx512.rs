//! AVX-512 VNNI: a register of unpacked codes is four columns of sixteen rows, one `vpdpbusd` operand.

use std::arch::x86_64::*;

use smoe_format::Zero;
use smoe_format::tile::{ROWS, SCALE_BYTES, plane_bytes, plane_widths};

use super::{AHEAD, AHEAD_OF_ONE, Job, Sums, by_bits_and_tokens};

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma,f16c")]
pub(super) fn block(job: Job<'_>, tokens: usize, out: &mut Sums) {
    by_bits_and_tokens!(kernel, job, tokens, out, [1, 2, 3, 4, 5, 6, 7, 8]);
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma,f16c")]
fn kernel<const BITS: u8, const TABLE: bool, const T: usize>(job: Job<'_>, out: &mut Sums) {
    let (uniform, x) = (job.uniform, job.x);
    let (group, tile_bytes, code_bytes) = (uniform.group(), uniform.tile_bytes(), uniform.code_bytes());
    assert!(uniform.bits() == BITS && code_bytes == code_bytes_of(BITS, group));
    let m = i32::from(uniform.max_code());
    let [narrow_fields, unroll] = const { shape(BITS) };
    // Lines of the narrowest plane: field pair q of them is units q * lines ..
    let lines = group / 4 / narrow_fields;
    assert!(group.is_multiple_of(16) && lines.is_multiple_of(unroll));
    let levels = biased(job.levels.unwrap_or_default());
    let mut sums = [[_mm512_setzero_ps(); 2]; T];
    for (g, tile) in job.tiles.chunks_exact(tile_bytes).enumerate() {
        let cell = g * x.step;
        let codes = tile.as_ptr();
        let xs = x.codes[cell * group..(cell + T) * group].as_ptr();
        let mut dots = [[_mm512_setzero_si512(); 2]; T];
        if TABLE {
            // What the bias of the levels will add.
            for (dots, sum) in dots.iter_mut().zip(&x.sums[cell..cell + T]) {
                *dots = [_mm512_set1_epi32(-128 * sum); 2];
            }
        }
        for q in 0..narrow_fields {
            let mut line = 0;
            while line < lines {
                for line in line..line + unroll {
                    let unit = q * lines + line;
                    // SAFETY: `q` and `line` are within the tile's planes of this group (asserted above).
                    let [mut low, mut high] = unsafe { unpack::<BITS, T>(codes, group, lines, q, line) };
                    if TABLE {
                        low = _mm512_shuffle_epi8(levels, low);
                        high = _mm512_shuffle_epi8(levels, high);
                    }
                    for (t, dots) in dots.iter_mut().enumerate() {
                        // SAFETY: 4 * unit + 4 <= group, and xs holds T groups.
                        let x = unsafe { xs.add(t * group + 4 * unit).cast::<i32>().read_unaligned() };
                        let x = _mm512_set1_epi32(x);
                        dots[0] = _mm512_dpbusd_epi32(dots[0], low, x);
                        dots[1] = _mm512_dpbusd_epi32(dots[1], high, x);
                    }
                }
                line += unroll;
            }
        }
        let scales = halves(&tile[code_bytes..]);
        prefetch::<T>(codes.wrapping_add(code_bytes));
        let (sx, sx_sums) = (&x.scales[cell..cell + T], &x.sums[cell..cell + T]);
        match uniform.zero() {
            _ if TABLE => {
                for t in 0..T {
                    let sx = _mm512_set1_ps(sx[t]);
                    for half in 0..2 {
                        let dot = _mm512_cvtepi32_ps(dots[t][half]);
                        let scale = _mm512_mul_ps(scales[half], sx);
                        sums[t][half] = _mm512_fmadd_ps(dot, scale, sums[t][half]);
                    }
                }
            }
            Zero::Symmetric => {
                let mut factors = [0.0f32; T];
                let mut offsets = [0.0f32; T];
                for t in 0..T {
                    factors[t] = sx[t] / m as f32;
                    offsets[t] = (m * sx_sums[t]) as f32;
                }
                for t in 0..T {
                    let (factor, offset) = (_mm512_set1_ps(factors[t]), _mm512_set1_ps(offsets[t]));
                    for half in 0..2 {
                        // Exact, as both parts are integers below 2^24.
                        let dot = _mm512_cvtepi32_ps(dots[t][half]);
                        let integer = _mm512_fmsub_ps(dot, _mm512_set1_ps(2.0), offset);
                        let scale = _mm512_mul_ps(scales[half], factor);
                        sums[t][half] = _mm512_fmadd_ps(integer, scale, sums[t][half]);
                    }
                }
            }
            Zero::Affine => {
                let minima = halves(&tile[code_bytes + SCALE_BYTES..]);
                prefetch::<T>(codes.wrapping_add(code_bytes + SCALE_BYTES));
                for t in 0..T {
                    let (sx, sum) = (_mm512_set1_ps(sx[t]), _mm512_set1_ps(sx_sums[t] as f32));
                    for half in 0..2 {
                        let dot = _mm512_cvtepi32_ps(dots[t][half]);
                        let scale = _mm512_mul_ps(scales[half], sx);
                        let acc = _mm512_fmadd_ps(dot, scale, sums[t][half]);
                        let minimum = _mm512_mul_ps(minima[half], sx);
                        sums[t][half] = _mm512_fmadd_ps(sum, minimum, acc);
                    }
                }
            }
        }
    }
    for (out, sums) in out.iter_mut().zip(sums) {
        for (out, sums) in out.as_chunks_mut::<16>().0.iter_mut().zip(sums) {
            // SAFETY: sixteen floats.
            unsafe { _mm512_storeu_ps(out.as_mut_ptr(), sums) };
        }
    }
}

/// Levels as unsigned bytes, 128 more than they are, in each quarter of a register.
#[inline]
#[target_feature(enable = "avx512f")]
fn biased(levels: [i8; 16]) -> __m512i {
    let bytes = levels.map(|level| level.cast_unsigned() ^ 0x80);
    // SAFETY: sixteen bytes.
    _mm512_broadcast_i32x4(unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) })
}

/// Field pairs of the narrowest plane, and how many of its lines the loop takes at once.
const fn shape(bits: u8) -> [usize; 2] {
    match bits {
        3 | 5 => [4, 1],
        2 | 6 => [2, 2],
        _ => [1, 4],
    }
}

const fn code_bytes_of(bits: u8, group: usize) -> usize {
    let [low, high] = plane_widths(bits);
    plane_bytes(low, group) + plane_bytes(high, group)
}

/// The codes of unit `q * lines + line`: rows 0..16, and rows 16..32.
///
/// # Safety
/// `codes` points at the planes of a tile of `BITS` and `group`; `lines` is the number of lines of the
/// narrowest plane, `line < lines`, and `q` less than its field pairs.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn unpack<const BITS: u8, const T: usize>(
    codes: *const u8,
    group: usize,
    lines: usize,
    q: usize,
    line: usize,
) -> [__m512i; 2] {
    // SAFETY: the caller's promises; each plane of width w has `group / 4 * w / 4` lines, and `field_pair`
    // is given a line below that.
    unsafe {
        match BITS {
            8 => [load::<T>(codes.add(128 * line)), load::<T>(codes.add(128 * line + 64))],
            4 => field_pair::<4, T>(codes.add(64 * line), 0),
            2 => field_pair::<2, T>(codes.add(64 * line), q),
            // 2 + 1: the plane of two bits has 2 * lines lines and two field pairs.
            3 => join::<2>(
                field_pair::<2, T>(codes.add(64 * (q % 2 * lines + line)), q / 2),
                field_pair::<1, T>(codes.add(plane_bytes(2, group) + 64 * line), q),
            ),
            // 4 + 1: the plane of four bits has a line per unit.
            5 => join::<4>(
                field_pair::<4, T>(codes.add(64 * (q * lines + line)), 0),
                field_pair::<1, T>(codes.add(plane_bytes(4, group) + 64 * line), q),
            ),
            6 => join::<4>(
                field_pair::<4, T>(codes.add(64 * (q * lines + line)), 0),
                field_pair::<2, T>(codes.add(plane_bytes(4, group) + 64 * line), q),
            ),
            _ => unreachable!(),
        }
    }
}

/// Fields `2 * pair` and `2 * pair + 1` of a line.
///
/// # Safety
/// 64 bytes can be read.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn field_pair<const WIDTH: u32, const T: usize>(line: *const u8, pair: usize) -> [__m512i; 2] {
    // SAFETY: the caller's promise.
    let bytes = unsafe { load::<T>(line) };
    let mask = _mm512_set1_epi8(((1u32 << WIDTH) - 1) as i8);
    let shift = |fields: usize| _mm_cvtsi32_si128(fields as i32 * WIDTH as i32);
    let low = if pair == 0 { bytes } else { _mm512_srl_epi16(bytes, shift(2 * pair)) };
    let high = _mm512_srl_epi16(bytes, shift(2 * pair + 1));
    [_mm512_and_si512(low, mask), _mm512_and_si512(high, mask)]
}

/// Codes of a low plane `WIDTH` bits wide and the bits above it.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn join<const WIDTH: u32>(low: [__m512i; 2], high: [__m512i; 2]) -> [__m512i; 2] {
    // The bits above are few enough that a shift of 16-bit lanes does not carry into the next byte.
    let up = _mm_cvtsi32_si128(WIDTH as i32);
    [
        _mm512_or_si512(low[0], _mm512_sll_epi16(high[0], up)),
        _mm512_or_si512(low[1], _mm512_sll_epi16(high[1], up)),
    ]
}

/// Loads a line and prefetches the one that comes some KiB after it.
///
/// # Safety
/// 64 bytes can be read.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn load<const T: usize>(line: *const u8) -> __m512i {
    prefetch::<T>(line);
    // SAFETY: the caller's promise.
    unsafe { _mm512_loadu_si512(line.cast()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn prefetch<const T: usize>(line: *const u8) {
    // A hint: any address will do.
    if T == 1 {
        _mm_prefetch::<_MM_HINT_T1>(line.wrapping_add(AHEAD_OF_ONE).cast());
    } else {
        _mm_prefetch::<_MM_HINT_T0>(line.wrapping_add(AHEAD).cast());
    }
}

/// 32 f16 as f32.
#[inline]
#[target_feature(enable = "avx512f")]
fn halves(bytes: &[u8]) -> [__m512; 2] {
    assert!(bytes.len() >= 2 * ROWS);
    // SAFETY: 64 bytes, asserted.
    unsafe {
        [
            _mm512_cvtph_ps(_mm256_loadu_si256(bytes.as_ptr().cast())),
            _mm512_cvtph_ps(_mm256_loadu_si256(bytes.as_ptr().add(32).cast())),
        ]
    }
}
