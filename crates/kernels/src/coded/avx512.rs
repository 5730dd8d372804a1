//! AVX-512 VNNI: a register of unpacked codes is four columns of sixteen rows, one `vpdpbusd` operand.

use std::arch::x86_64::*;
use std::sync::LazyLock;

use smoe_format::Zero;
use smoe_format::tile::{ROWS, SCALE_BYTES, plane_bytes, plane_widths};

use super::{Job, Sums, TOKENS, Take, by_bits_and_tokens};

/// Bytes ahead of the tile that are prefetched, for any number of tokens (EXP-KERNEL-08).
const AHEAD: usize = 8192;

/// Into L2 only, for a single token: it gains where L1 has room for few outstanding lines, as on Intel's
/// server cores (EXP-KERNEL-02), and loses a tenth on AMD's (EXP-KERNEL-08).
static ONE_INTO_L2: LazyLock<bool> = LazyLock::new(|| {
    let vendor = __cpuid(0);
    [vendor.ebx, vendor.edx, vendor.ecx] == [*b"Genu", *b"ineI", *b"ntel"].map(u32::from_le_bytes)
});

/// All blocks of the job; `take` is given each block's number and sums.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma,f16c")]
pub(super) fn blocks(job: Job<'_>, tokens: usize, take: &mut Take<'_>) {
    by_bits_and_tokens!(kernel, job, tokens, take, [1, 2, 3, 4, 5, 6, 7, 8]);
}

/// What encodings differ in, as numbers, so that they share one loop: with `start` times the sum of the activations
/// added, a dot is the integer of the definition (twice that if affine), and it is multiplied by `scale * (sx / divisor)`.
///
/// Codes are taken twice, so that `2 * dot - m * sum` needs no step of its own; only bytes have no room for that, and are
/// doubled when they have been summed. Levels are taken as they are, but for their bias.
struct Rule {
    start: i32,
    divisor: f32,
    affine: bool,
}

impl Rule {
    fn of(job: &Job<'_>) -> Self {
        let m = job.uniform.max_code();
        match job.uniform.zero() {
            _ if job.levels.is_some() => Self { start: -128, divisor: 1.0, affine: false },
            Zero::Symmetric => Self { start: -i32::from(m), divisor: f32::from(m), affine: false },
            Zero::Affine => Self { start: 0, divisor: 1.0, affine: true },
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma,f16c")]
fn kernel<const BITS: u8, const TABLE: bool, const T: usize>(job: Job<'_>, take: &mut Take<'_>) {
    let (uniform, x) = (job.uniform, job.x);
    let (group, tile_bytes, code_bytes) = (uniform.group(), uniform.tile_bytes(), uniform.code_bytes());
    assert!(uniform.bits() == BITS && code_bytes == code_bytes_of(BITS, group));
    let [narrow_fields, unroll] = const { shape(BITS) };
    let into_l2 = T == 1 && *ONE_INTO_L2;
    // Lines of the narrowest plane: field pair q of them is units q * lines ..
    let lines = group / 4 / narrow_fields;
    assert!(group.is_multiple_of(16) && lines.is_multiple_of(unroll));
    let Rule { start, divisor, affine } = Rule::of(&job);
    let levels = biased(job.levels.unwrap_or_default());
    let (start, divisor) = (_mm256_set1_epi32(start), _mm256_set1_ps(divisor));
    let mut out: Sums = [[0.0; ROWS]; TOKENS];
    for (block, tiles) in job.tiles.chunks_exact(job.block_bytes).enumerate() {
        let mut sums = [[_mm512_setzero_ps(); 2]; T];
        for (g, tile) in tiles.chunks_exact(tile_bytes).enumerate() {
            let cell = g * x.step;
            let codes = tile.as_ptr();
            let xs = x.codes[cell * group..(cell + T) * group].as_ptr();
            let sx = floats::<T>(&x.scales[cell..cell + T]);
            let sx_sums = integers::<T>(&x.sums[cell..cell + T]);
            let starts = integer_lanes(_mm256_mullo_epi32(sx_sums, start));
            let factors = float_lanes(_mm256_div_ps(sx, divisor));
            let mut dots = [[_mm512_setzero_si512(); 2]; T];
            if BITS != 8 {
                for (dots, start) in dots.iter_mut().zip(starts) {
                    *dots = [_mm512_set1_epi32(start); 2];
                }
            }
            let planes = Planes { codes, xs, group, lines, levels, into_l2 };
            let mut line = 0;
            while line < lines {
                for line in line..line + unroll {
                    // SAFETY: the planes and activations of this group, whose lines these are (asserted above).
                    unsafe {
                        multiply::<BITS, TABLE, T, 0>(&planes, line, &mut dots);
                        if narrow_fields > 1 {
                            multiply::<BITS, TABLE, T, 1>(&planes, line, &mut dots);
                        }
                        if narrow_fields > 2 {
                            multiply::<BITS, TABLE, T, 2>(&planes, line, &mut dots);
                            multiply::<BITS, TABLE, T, 3>(&planes, line, &mut dots);
                        }
                    }
                }
                line += unroll;
            }
            for (dots, start) in dots.iter_mut().zip(starts) {
                for dot in dots {
                    if BITS == 8 && !affine {
                        *dot = _mm512_add_epi32(_mm512_add_epi32(*dot, *dot), _mm512_set1_epi32(start));
                    } else if BITS != 8 && affine {
                        *dot = _mm512_srai_epi32::<1>(*dot);
                    }
                }
            }
            let scales = halves(&tile[code_bytes..]);
            prefetch(codes.wrapping_add(code_bytes), into_l2);
            for t in 0..T {
                let factor = _mm512_set1_ps(factors[t]);
                for half in 0..2 {
                    // Exact, an integer below 2^24.
                    let dot = _mm512_cvtepi32_ps(dots[t][half]);
                    let scale = _mm512_mul_ps(scales[half], factor);
                    sums[t][half] = _mm512_fmadd_ps(dot, scale, sums[t][half]);
                }
            }
            if affine {
                let minima = halves(&tile[code_bytes + SCALE_BYTES..]);
                prefetch(codes.wrapping_add(code_bytes + SCALE_BYTES), into_l2);
                let offsets = float_lanes(_mm256_cvtepi32_ps(sx_sums));
                for t in 0..T {
                    let (factor, offset) = (_mm512_set1_ps(factors[t]), _mm512_set1_ps(offsets[t]));
                    for half in 0..2 {
                        let minimum = _mm512_mul_ps(minima[half], factor);
                        sums[t][half] = _mm512_fmadd_ps(offset, minimum, sums[t][half]);
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
        take(block, &out);
    }
}

/// `T` floats and zeros.
#[inline]
#[target_feature(enable = "avx512f,avx512vl")]
fn floats<const T: usize>(values: &[f32]) -> __m256 {
    assert!(values.len() >= T && T <= 8);
    // SAFETY: the mask has `T` lanes, and so many values are there.
    unsafe { _mm256_maskz_loadu_ps(u8::MAX >> (8 - T), values.as_ptr()) }
}

/// `T` integers and zeros.
#[inline]
#[target_feature(enable = "avx512f,avx512vl")]
fn integers<const T: usize>(values: &[i32]) -> __m256i {
    assert!(values.len() >= T && T <= 8);
    // SAFETY: as above.
    unsafe { _mm256_maskz_loadu_epi32(u8::MAX >> (8 - T), values.as_ptr()) }
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

/// Bits of the low and the high plane. A constant wherever it is used: a call inside the loop, were it not inlined, would
/// have every register saved around it.
const fn widths(bits: u8) -> [i32; 2] {
    let [low, high] = plane_widths(bits);
    [low as i32, high as i32]
}

const fn code_bytes_of(bits: u8, group: usize) -> usize {
    let [low, high] = plane_widths(bits);
    plane_bytes(low, group) + plane_bytes(high, group)
}

/// The lanes of a register.
#[inline]
#[target_feature(enable = "avx512f,avx512vl")]
fn float_lanes(register: __m256) -> [f32; 8] {
    let mut lanes = [0.0; 8];
    // SAFETY: eight floats.
    unsafe { _mm256_storeu_ps(lanes.as_mut_ptr(), register) };
    lanes
}

/// The lanes of a register.
#[inline]
#[target_feature(enable = "avx512f,avx512vl")]
fn integer_lanes(register: __m256i) -> [i32; 8] {
    let mut lanes = [0; 8];
    // SAFETY: eight integers.
    unsafe { _mm256_storeu_si256(lanes.as_mut_ptr().cast(), register) };
    lanes
}

/// The planes of a tile and what they are multiplied by.
struct Planes {
    codes: *const u8,
    /// Of the tokens, group after group.
    xs: *const i8,
    group: usize,
    /// Of the narrowest plane.
    lines: usize,
    /// As unsigned bytes.
    levels: __m512i,
    into_l2: bool,
}

/// Adds the products of unit `Q * lines + line`: of field pair `Q` of a line of the narrowest plane.
///
/// A function of its own for each pair, so that shifts are constants.
///
/// # Safety
/// `codes` points at the planes of a tile of `BITS` and `group`, `xs` at `T` groups of activations; `lines` are as many as
/// such a plane has, `line` is one of them, and `Q` less than its field pairs.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn multiply<const BITS: u8, const TABLE: bool, const T: usize, const Q: usize>(
    planes: &Planes,
    line: usize,
    dots: &mut [[__m512i; 2]; T],
) {
    let &Planes { codes, xs, group, lines, levels, into_l2 } = planes;
    let unit = Q * lines + line;
    // A unit is 16 bytes for every bit.
    let ahead = codes.wrapping_add(unit * 16 * BITS as usize);
    prefetch(ahead, into_l2);
    if BITS > 4 {
        prefetch(ahead.wrapping_add(64), into_l2);
    }
    // SAFETY: the caller's promises.
    let [mut low, mut high] = unsafe { unpack::<BITS, TABLE, Q>(codes, group, lines, line) };
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

/// The codes of unit `Q * lines + line`, twice them unless they are bytes or name levels: rows 0..16, and rows 16..32.
///
/// # Safety
/// As for [`multiply`], and `line < lines`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn unpack<const BITS: u8, const TABLE: bool, const Q: usize>(
    codes: *const u8,
    group: usize,
    lines: usize,
    line: usize,
) -> [__m512i; 2] {
    // SAFETY: the caller's promises; each plane of width w has `group / 4 * w / 4` lines.
    let load = |line: usize| unsafe { _mm512_loadu_si512(codes.add(64 * line).cast()) };
    let [low_width, high_width] = const { widths(BITS) };
    // The line of the low plane, and which field pair of it.
    let (own, pair) = match BITS {
        8 => return [load(2 * line), load(2 * line + 1)],
        2 => (line, Q),
        // 2 + 1: the plane of two bits has 2 * lines lines and two field pairs.
        3 => (Q % 2 * lines + line, Q / 2),
        // 4, 4 + 1 and 4 + 2: the plane of four bits has a line per unit.
        _ => (Q * lines + line, 0),
    };
    let place = if TABLE { 0 } else { 1 };
    let [first, second] = fields(load(own), pair, low_width, place);
    let low = mask(low_width, place);
    let [first, second] = [_mm512_and_si512(first, low), _mm512_and_si512(second, low)];
    if high_width == 0 {
        return [first, second];
    }
    // Behind the low plane, which has a line for every 16 columns of each bit.
    let place = place + low_width;
    let bits = fields(load(group / 16 * low_width as usize + line), Q, high_width, place);
    let high = mask(high_width, place);
    // first | (bits & high)
    [
        _mm512_ternarylogic_epi32::<0xf8>(first, bits[0], high),
        _mm512_ternarylogic_epi32::<0xf8>(second, bits[1], high),
    ]
}

/// `width` ones in each byte, from bit `place` on.
#[inline]
#[target_feature(enable = "avx512f")]
fn mask(width: i32, place: i32) -> __m512i {
    _mm512_set1_epi8((((1 << width) - 1) << place) as i8)
}

/// Fields `2 * pair` and `2 * pair + 1` of each byte at bit `place` of it, among others that a mask takes away. Where
/// a field is within its byte it is there in 16-bit lanes too.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn fields(bytes: __m512i, pair: usize, width: i32, place: i32) -> [__m512i; 2] {
    let at = |field: i32| {
        let right = field * width - place;
        match right {
            0 => bytes,
            -1 => _mm512_add_epi8(bytes, bytes),
            ..0 => _mm512_sll_epi16(bytes, _mm_cvtsi32_si128(-right)),
            1.. => _mm512_srl_epi16(bytes, _mm_cvtsi32_si128(right)),
        }
    };
    [at(2 * pair as i32), at(2 * pair as i32 + 1)]
}

#[inline]
#[target_feature(enable = "avx512f")]
fn prefetch(line: *const u8, into_l2: bool) {
    // A hint: any address will do.
    let line = line.wrapping_add(AHEAD).cast();
    if into_l2 { _mm_prefetch::<_MM_HINT_T1>(line) } else { _mm_prefetch::<_MM_HINT_T0>(line) }
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
