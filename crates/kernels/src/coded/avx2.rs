//! AVX2: each 64-byte line as two halves of eight rows, by `vpmaddubsw` and `vpmaddwd`.
//!
//! `vpmaddubsw` saturates at 32,767, so a pair of products may reach `2 * m * 127` and only so many pairs may
//! be added in 16 bits before they are widened: [`units_in_16_bits`]. Codes of 8 bits would saturate a
//! single pair (64,770) and are split into nibbles, `dot = low + 16 * high`.
//!
//! Levels of a table are signed. Near ones, as those of MXFP4, are taken from the least of them: unsigned codes like
//! any other, and what is missing is added to the sums. Of others the magnitudes are multiplied by activations that
//! got their signs, `|level| * (sign(level) * x)`, and two such products, 32,258 at most, are widened at once
//! (EXP-KERNEL-06).

use std::arch::x86_64::*;

use smoe_format::Zero;
use smoe_format::tile::{ROWS, SCALE_BYTES, plane_bytes, plane_widths};

use super::{AHEAD, Job, Sums, by_bits_and_tokens};

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn block(job: Job<'_>, tokens: usize, out: &mut Sums) {
    by_bits_and_tokens!(kernel, job, tokens, out, [1, 2, 3, 4]);
}

/// Units of four columns whose pair sums fit in 16 bits together; a power of two.
const fn units_in_16_bits(bits: u8) -> usize {
    match bits {
        2 => 32,
        3 => 16,
        // 8-bit codes come as two of four bits.
        4 | 8 => 8,
        5 => 4,
        _ => 2,
    }
}

// The bound of the table, and the next power of two beyond it (2-bit groups have 32 units at most).
const _: () = {
    let mut bits = 2;
    while bits <= 6 {
        let pair = 2 * ((1 << bits) - 1) * 127;
        assert!(units_in_16_bits(bits) * pair <= i16::MAX as usize);
        assert!(bits == 2 || 2 * units_in_16_bits(bits) * pair > i16::MAX as usize);
        bits += 1;
    }
};

/// Codes are multiplied.
const PLAIN: u8 = 0;
/// Levels less the least of them are.
const NEAR: u8 = 1;
/// Magnitudes of levels are, with activations of their signs.
const FAR: u8 = 2;

/// [`rows`], as the levels have it.
#[target_feature(enable = "avx2,fma,f16c")]
fn kernel<const BITS: u8, const TABLE: bool, const T: usize>(job: Job<'_>, out: &mut Sums) {
    let Some(levels) = job.levels.filter(|_| TABLE) else {
        return rows::<BITS, PLAIN, T>(job, [0; 16], 0, const { units_in_16_bits(BITS) }, out);
    };
    let (least, most) =
        levels.iter().fold((0, 0), |(least, most), &level| (level.min(least), level.max(most)));
    let span = usize::from(most.abs_diff(least));
    match i16::MAX as usize / (2 * span.max(1) * 127) {
        0 | 1 => rows::<BITS, FAR, T>(job, levels, 0, 1, out),
        // Then the span is 64 at most.
        pairs => {
            let levels = levels.map(|level| level.wrapping_sub(least));
            rows::<BITS, NEAR, T>(job, levels, i32::from(least), 1 << pairs.ilog2(), out);
        }
    }
}

/// All rows of the block. `levels` are what codes become, `least` is what such a level is short of its own, and `units`
/// of four columns fit in 16 bits together.
#[target_feature(enable = "avx2,fma,f16c")]
fn rows<const BITS: u8, const MAP: u8, const T: usize>(
    job: Job<'_>,
    levels: [i8; 16],
    least: i32,
    units: usize,
    out: &mut Sums,
) {
    let (uniform, x) = (job.uniform, job.x);
    let (group, tile_bytes, code_bytes) = (uniform.group(), uniform.tile_bytes(), uniform.code_bytes());
    assert!(uniform.bits() == BITS && code_bytes == code_bytes_of(BITS, group));
    let m = i32::from(uniform.max_code());
    let narrow_fields = const { narrow_fields(BITS) };
    let lines = group / 4 / narrow_fields;
    let step = if MAP == FAR { 1 } else { units.min(lines) };
    // SAFETY: sixteen bytes.
    let levels = _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(levels.as_ptr().cast()) });
    assert!(group.is_multiple_of(16) && lines.is_multiple_of(step));
    let mut sums = [[_mm256_setzero_ps(); 4]; T];
    for (g, tile) in job.tiles.chunks_exact(tile_bytes).enumerate() {
        let cell = g * x.step;
        let codes = tile.as_ptr();
        let xs = x.codes[cell * group..(cell + T) * group].as_ptr();
        prefetch(codes, tile_bytes);
        // Dots of eight rows each: [token][rows / 8].
        let mut dots = [[_mm256_setzero_si256(); 4]; T];
        // A part is what two registers of codes cover: rows 8p.. and 16 + 8p.., or for bytes rows 8p..
        // as two nibbles.
        for part in 0..if BITS == 8 { 4 } else { 2 } {
            let mut wide = [[_mm256_setzero_si256(); 2]; T];
            for q in 0..narrow_fields {
                for start in (0..lines).step_by(step) {
                    let mut narrow = [[_mm256_setzero_si256(); 2]; T];
                    for line in start..start + step {
                        // SAFETY: `q` and `line` are within the tile's planes of this group (asserted).
                        let mut pair = unsafe { unpack::<BITS>(codes, group, lines, q, line, part) };
                        if MAP != PLAIN {
                            pair =
                                [_mm256_shuffle_epi8(levels, pair[0]), _mm256_shuffle_epi8(levels, pair[1])];
                        }
                        let signs = pair;
                        if MAP == FAR {
                            pair = [_mm256_abs_epi8(pair[0]), _mm256_abs_epi8(pair[1])];
                        }
                        for (t, narrow) in narrow.iter_mut().enumerate() {
                            let at = t * group + 4 * (q * lines + line);
                            // SAFETY: four columns of a group, and xs holds T groups.
                            let x = unsafe { xs.add(at).cast::<i32>().read_unaligned() };
                            let x = _mm256_set1_epi32(x);
                            for (i, narrow) in narrow.iter_mut().enumerate() {
                                let x = if MAP == FAR { _mm256_sign_epi8(x, signs[i]) } else { x };
                                *narrow = _mm256_add_epi16(*narrow, _mm256_maddubs_epi16(pair[i], x));
                            }
                        }
                    }
                    for (wide, narrow) in wide.iter_mut().zip(narrow) {
                        for (i, (wide, narrow)) in wide.iter_mut().zip(narrow).enumerate() {
                            let weight = if BITS == 8 && i == 1 { 16 } else { 1 };
                            let sum = _mm256_madd_epi16(narrow, _mm256_set1_epi16(weight));
                            *wide = _mm256_add_epi32(*wide, sum);
                        }
                    }
                }
            }
            for (dots, wide) in dots.iter_mut().zip(wide) {
                if BITS == 8 {
                    dots[part] = _mm256_add_epi32(wide[0], wide[1]);
                } else {
                    dots[part] = wide[0];
                    dots[2 + part] = wide[1];
                }
            }
        }
        let scales = halves(&tile[code_bytes..]);
        let (sx, sx_sums) = (&x.scales[cell..cell + T], &x.sums[cell..cell + T]);
        match uniform.zero() {
            _ if MAP != PLAIN => {
                for t in 0..T {
                    let (sx, short) = (_mm256_set1_ps(sx[t]), _mm256_set1_epi32(least * sx_sums[t]));
                    for i in 0..4 {
                        let dot = _mm256_cvtepi32_ps(_mm256_add_epi32(dots[t][i], short));
                        sums[t][i] = _mm256_fmadd_ps(dot, _mm256_mul_ps(scales[i], sx), sums[t][i]);
                    }
                }
            }
            Zero::Symmetric => {
                for t in 0..T {
                    let factor = _mm256_set1_ps(sx[t] / m as f32);
                    let offset = _mm256_set1_ps((m * sx_sums[t]) as f32);
                    for i in 0..4 {
                        // Exact, as both parts are integers below 2^24.
                        let dot = _mm256_cvtepi32_ps(dots[t][i]);
                        let integer = _mm256_fmsub_ps(dot, _mm256_set1_ps(2.0), offset);
                        let scale = _mm256_mul_ps(scales[i], factor);
                        sums[t][i] = _mm256_fmadd_ps(integer, scale, sums[t][i]);
                    }
                }
            }
            Zero::Affine => {
                let minima = halves(&tile[code_bytes + SCALE_BYTES..]);
                for t in 0..T {
                    let (sx, sum) = (_mm256_set1_ps(sx[t]), _mm256_set1_ps(sx_sums[t] as f32));
                    for i in 0..4 {
                        let dot = _mm256_cvtepi32_ps(dots[t][i]);
                        let acc = _mm256_fmadd_ps(dot, _mm256_mul_ps(scales[i], sx), sums[t][i]);
                        sums[t][i] = _mm256_fmadd_ps(sum, _mm256_mul_ps(minima[i], sx), acc);
                    }
                }
            }
        }
    }
    for (out, sums) in out.iter_mut().zip(sums) {
        for (out, sums) in out.as_chunks_mut::<8>().0.iter_mut().zip(sums) {
            // SAFETY: eight floats.
            unsafe { _mm256_storeu_ps(out.as_mut_ptr(), sums) };
        }
    }
}

/// Field pairs of the narrowest plane.
const fn narrow_fields(bits: u8) -> usize {
    match bits {
        3 | 5 => 4,
        2 | 6 => 2,
        _ => 1,
    }
}

const fn code_bytes_of(bits: u8, group: usize) -> usize {
    let [low, high] = plane_widths(bits);
    plane_bytes(low, group) + plane_bytes(high, group)
}

/// The codes of unit `q * lines + line` in rows `8 * part..` and `16 + 8 * part..`; for 8 bits, the low and
/// the high nibbles of rows `8 * part..`.
///
/// # Safety
/// `codes` points at the planes of a tile of `BITS` and `group`; `lines` is the number of lines of the
/// narrowest plane, `line < lines`, `q` less than its field pairs, `part` less than 2 (8 bits: 4).
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn unpack<const BITS: u8>(
    codes: *const u8,
    group: usize,
    lines: usize,
    q: usize,
    line: usize,
    part: usize,
) -> [__m256i; 2] {
    // SAFETY: the caller's promises; each plane of width w has `group / 4 * w / 4` lines, and `field_pair`
    // is given half of a line below that.
    unsafe {
        let codes = codes.add(32 * part);
        match BITS {
            8 => field_pair::<4>(codes.add(128 * line), 0),
            4 => field_pair::<4>(codes.add(64 * line), 0),
            2 => field_pair::<2>(codes.add(64 * line), q),
            3 => join::<2>(
                field_pair::<2>(codes.add(64 * (q % 2 * lines + line)), q / 2),
                field_pair::<1>(codes.add(plane_bytes(2, group) + 64 * line), q),
            ),
            5 => join::<4>(
                field_pair::<4>(codes.add(64 * (q * lines + line)), 0),
                field_pair::<1>(codes.add(plane_bytes(4, group) + 64 * line), q),
            ),
            6 => join::<4>(
                field_pair::<4>(codes.add(64 * (q * lines + line)), 0),
                field_pair::<2>(codes.add(plane_bytes(4, group) + 64 * line), q),
            ),
            _ => unreachable!(),
        }
    }
}

/// Fields `2 * pair` and `2 * pair + 1` of half a line.
///
/// # Safety
/// 32 bytes can be read.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn field_pair<const WIDTH: u32>(line: *const u8, pair: usize) -> [__m256i; 2] {
    // SAFETY: the caller's promise.
    let bytes = unsafe { _mm256_loadu_si256(line.cast()) };
    let mask = _mm256_set1_epi8(((1u32 << WIDTH) - 1) as i8);
    let shift = |fields: usize| _mm_cvtsi32_si128(fields as i32 * WIDTH as i32);
    let low = if pair == 0 { bytes } else { _mm256_srl_epi16(bytes, shift(2 * pair)) };
    let high = _mm256_srl_epi16(bytes, shift(2 * pair + 1));
    [_mm256_and_si256(low, mask), _mm256_and_si256(high, mask)]
}

/// Codes of a low plane `WIDTH` bits wide and the bits above it.
#[inline]
#[target_feature(enable = "avx2")]
fn join<const WIDTH: u32>(low: [__m256i; 2], high: [__m256i; 2]) -> [__m256i; 2] {
    // The bits above are few enough that a shift of 16-bit lanes does not carry into the next byte.
    let up = _mm_cvtsi32_si128(WIDTH as i32);
    [
        _mm256_or_si256(low[0], _mm256_sll_epi16(high[0], up)),
        _mm256_or_si256(low[1], _mm256_sll_epi16(high[1], up)),
    ]
}

/// Prefetches the tile [`AHEAD`] of this one.
#[inline]
#[target_feature(enable = "avx2")]
fn prefetch(tile: *const u8, bytes: usize) {
    for line in (0..bytes).step_by(64) {
        // A hint: any address will do.
        _mm_prefetch::<_MM_HINT_T0>(tile.wrapping_add(AHEAD + line).cast());
    }
}

/// 32 f16 as f32.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn halves(bytes: &[u8]) -> [__m256; 4] {
    assert!(bytes.len() >= 2 * ROWS);
    let eight = |i: usize| {
        // SAFETY: 64 bytes, asserted; i < 4.
        _mm256_cvtph_ps(unsafe { _mm_loadu_si128(bytes.as_ptr().add(16 * i).cast()) })
    };
    [eight(0), eight(1), eight(2), eight(3)]
}
