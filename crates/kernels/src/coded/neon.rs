//! NEON with the int8 dot product: sixteen bytes of a line are four columns of four rows, one `sdot` operand.
//!
//! `sdot` takes the four activations from one lane of a register, so a register of them serves four units,
//! and sums run down the rows' own lanes. It multiplies signed bytes: codes of up to six bits are that as
//! they are, and so are the levels of a table, which a byte lookup makes of its codes; 8-bit codes lose 128 by a
//! flip of their top bit, and their dots start at 128 times the sum of the activations instead of 0.

// Tiles of registers are indexed: iterators over several of them at once are hard to read.
#![allow(clippy::needless_range_loop)]

pub(super) mod i8mm;

use std::arch::aarch64::*;
use std::arch::asm;

use smoe_format::Zero;
use smoe_format::tile::{ROWS, SCALE_BYTES, plane_bytes, plane_widths};

use super::{AHEAD, Job, Sums, by_bits_and_tokens};

#[target_feature(enable = "neon,dotprod")]
pub(super) fn block(job: Job<'_>, tokens: usize, out: &mut Sums) {
    by_bits_and_tokens!(kernel, job, tokens, out, [1, 2, 3, 4, 5, 6, 7, 8]);
}

/// [`rows_at_once`] with as many quarters of each line at once as leave sixteen registers for sums of
/// products, of 32; eight for one token, which memory holds back anyway.
#[target_feature(enable = "neon,dotprod")]
fn kernel<const BITS: u8, const TABLE: bool, const T: usize>(job: Job<'_>, out: &mut Sums) {
    match T {
        1 | 2 => rows_at_once::<BITS, TABLE, T, 4>(job, out),
        3 | 4 => rows_at_once::<BITS, TABLE, T, 2>(job, out),
        _ => rows_at_once::<BITS, TABLE, T, 1>(job, out),
    }
}

/// A group at a time; `Q` quarters of its lines at a time, that is rows `4 * quarter..` and
/// `16 + 4 * quarter..`. Macros, not loops and functions, where shifts must be constants and dots stay in
/// registers.
#[target_feature(enable = "neon,dotprod")]
fn rows_at_once<const BITS: u8, const TABLE: bool, const T: usize, const Q: usize>(
    job: Job<'_>,
    out: &mut Sums,
) {
    let (uniform, x) = (job.uniform, job.x);
    let (group, tile_bytes) = (uniform.group(), uniform.tile_bytes());
    let narrow_fields = const { narrow_fields(BITS) };
    let lines = lines_of::<BITS>(&job);
    let levels = levels_of(&job);
    let mut sums = [[vdupq_n_f32(0.0); ROWS / 4]; T];
    for (g, tile) in job.tiles.chunks_exact(tile_bytes).enumerate() {
        let cell = g * x.step;
        let xs = x.codes[cell * group..(cell + T) * group].as_ptr();
        prefetch(tile.as_ptr(), tile_bytes);
        let factors = Factors::<T>::of::<TABLE>(&job, tile, cell, T);
        for quarter in (0..4).step_by(Q) {
            let mut dots = [[[vdupq_n_s32(0); 2]; Q]; T];
            if BITS == 8 {
                for t in 0..T {
                    dots[t] = [[vdupq_n_s32(128 * factors.sums[t]); 2]; Q];
                }
            }
            let codes = tile.as_ptr().wrapping_add(16 * quarter);
            // Adds the products of unit `f * lines + line + lane`, for each lane of `x`.
            macro_rules! units {
                ($f:literal, $line:expr, $x:expr, [$($lane:literal),+]) => {$(
                    for q in 0..Q {
                        let codes = codes.wrapping_add(16 * q);
                        // SAFETY: `f` and the line are within the tile's planes of this group (asserted).
                        let raw = unsafe { load::<BITS>(codes, group, lines, $f, $line + $lane) };
                        let [low, high] = unpack::<BITS, TABLE>(raw, $f, levels);
                        for t in 0..T {
                            dots[t][q][0] = sdot::<$lane>(dots[t][q][0], low, $x[t]);
                            dots[t][q][1] = sdot::<$lane>(dots[t][q][1], high, $x[t]);
                        }
                    }
                )+};
            }
            // All lines of the narrowest plane, for each field pair of them.
            macro_rules! field_pairs {
                ($($f:literal),+) => {$(
                    let mut line = 0;
                    while $f < narrow_fields && line + 4 <= lines {
                        let mut x = [vdupq_n_s8(0); T];
                        for t in 0..T {
                            // SAFETY: sixteen columns of a group, and xs holds T groups.
                            x[t] = unsafe { vld1q_s8(xs.add(t * group + 4 * ($f * lines + line))) };
                        }
                        units!($f, line, x, [0, 1, 2, 3]);
                        line += 4;
                    }
                    // Short groups with several field pairs a line.
                    while $f < narrow_fields && line < lines {
                        let mut x = [vdupq_n_s8(0); T];
                        for t in 0..T {
                            // SAFETY: four columns of a group, and xs holds T groups.
                            let four = unsafe { xs.add(t * group + 4 * ($f * lines + line)) };
                            // SAFETY: as above.
                            let four = unsafe { four.cast::<i32>().read_unaligned() };
                            x[t] = vreinterpretq_s8_s32(vdupq_n_s32(four));
                        }
                        units!($f, line, x, [0]);
                        line += 1;
                    }
                )+};
            }
            if BITS == 3 && T == 1 && lines.is_multiple_of(4) {
                for line in (0..lines).step_by(4) {
                    let mut x = [vdupq_n_s8(0); 4];
                    for f in 0..4 {
                        // SAFETY: sixteen columns of a group, which xs holds.
                        x[f] = unsafe { vld1q_s8(xs.add(4 * (f * lines + line))) };
                    }
                    // Adds the products of units `f * lines + line + lane`, for each lane.
                    macro_rules! all_fields {
                        ($($lane:literal),+) => {$(
                            for q in 0..Q {
                                let codes = codes.wrapping_add(16 * q);
                                // SAFETY: the line is within the tile's planes of this group (asserted).
                                let [[even, bits], [odd, _]] = unsafe {
                                    [
                                        load::<BITS>(codes, group, lines, 0, line + $lane),
                                        load::<BITS>(codes, group, lines, 1, line + $lane),
                                    ]
                                };
                                let unpacked = all_of_three(even, odd, bits);
                                for f in 0..4 {
                                    let [low, high] = signed::<TABLE>(unpacked[f], levels);
                                    dots[0][q][0] = sdot::<$lane>(dots[0][q][0], low, x[f]);
                                    dots[0][q][1] = sdot::<$lane>(dots[0][q][1], high, x[f]);
                                }
                            }
                        )+};
                    }
                    all_fields!(0, 1, 2, 3);
                }
            } else {
                field_pairs!(0, 1, 2, 3);
            }
            for half in 0..2 {
                for q in 0..Q {
                    let mut of_rows = [vdupq_n_s32(0); T];
                    for t in 0..T {
                        of_rows[t] = dots[t][q][half];
                    }
                    factors.add::<TABLE>(4 * half + quarter + q, of_rows, &mut sums);
                }
            }
        }
    }
    for (out, sums) in out.iter_mut().zip(sums) {
        store(sums, out);
    }
}

/// Lines of the narrowest plane: field pair f of them is units f * lines ..
fn lines_of<const BITS: u8>(job: &Job<'_>) -> usize {
    let (uniform, group) = (job.uniform, job.uniform.group());
    assert!(uniform.bits() == BITS && uniform.code_bytes() == code_bytes_of(BITS, group));
    assert!(group.is_multiple_of(16));
    group / 4 / narrow_fields(BITS)
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

#[inline]
#[target_feature(enable = "neon")]
fn levels_of(job: &Job<'_>) -> int8x16_t {
    let levels = job.levels.unwrap_or_default();
    // SAFETY: sixteen bytes.
    unsafe { vld1q_s8(levels.as_ptr()) }
}

/// What the dots of a group are multiplied by and added to, for `T` tokens.
struct Factors<'a, const T: usize> {
    zero: Zero,
    /// Scales of four rows each, and minima after them if there are any.
    scales: &'a [[u8; 8]],
    /// The scale of each token's activations, by the largest code of symmetric ones.
    factors: [f32; T],
    /// Of the activations.
    sums: [i32; T],
    /// The largest code times that.
    offsets: [i32; T],
}

impl<'a, const T: usize> Factors<'a, T> {
    /// Of the group of `tile`, for the first `tokens` of the cells from `cell` on; none for further ones.
    // Without a feature of its own, as one that is not inlined saves all sums of its caller.
    #[inline(always)]
    fn of<const TABLE: bool>(job: &Job<'a>, tile: &'a [u8], cell: usize, tokens: usize) -> Self {
        let (uniform, x) = (job.uniform, job.x);
        let m = i32::from(uniform.max_code());
        let scales = tile[uniform.code_bytes()..].as_chunks().0;
        let mut all = Self { zero: uniform.zero(), scales, factors: [0.0; T], sums: [0; T], offsets: [0; T] };
        for t in 0..tokens.min(T) {
            let scale = x.scales[cell + t];
            all.factors[t] = match uniform.zero() {
                _ if TABLE => scale,
                Zero::Symmetric => scale / m as f32,
                Zero::Affine => scale,
            };
            all.sums[t] = x.sums[cell + t];
            all.offsets[t] = m * all.sums[t];
        }
        all
    }

    /// Adds the dots of rows `4 * four..` to the tokens' sums.
    #[inline]
    #[target_feature(enable = "neon")]
    fn add<const TABLE: bool>(
        &self,
        four: usize,
        dots: [int32x4_t; T],
        sums: &mut [[float32x4_t; ROWS / 4]; T],
    ) {
        let scale = halves(&self.scales[four]);
        match self.zero {
            _ if TABLE => {
                for t in 0..T {
                    let dot = vcvtq_f32_s32(dots[t]);
                    sums[t][four] = vfmaq_f32(sums[t][four], dot, vmulq_n_f32(scale, self.factors[t]));
                }
            }
            Zero::Symmetric => {
                for t in 0..T {
                    let twice = vshlq_n_s32::<1>(dots[t]);
                    let integer = vcvtq_f32_s32(vsubq_s32(twice, vdupq_n_s32(self.offsets[t])));
                    sums[t][four] = vfmaq_f32(sums[t][four], integer, vmulq_n_f32(scale, self.factors[t]));
                }
            }
            Zero::Affine => {
                let minimum = halves(&self.scales[SCALE_BYTES / 8 + four]);
                for t in 0..T {
                    let dot = vcvtq_f32_s32(dots[t]);
                    let acc = vfmaq_f32(sums[t][four], dot, vmulq_n_f32(scale, self.factors[t]));
                    let minimum = vmulq_n_f32(minimum, self.factors[t]);
                    sums[t][four] = vfmaq_n_f32(acc, minimum, self.sums[t] as f32);
                }
            }
        }
    }
}

#[inline]
#[target_feature(enable = "neon")]
fn store(sums: [float32x4_t; ROWS / 4], out: &mut [f32; ROWS]) {
    for (out, sums) in out.as_chunks_mut::<4>().0.iter_mut().zip(sums) {
        // SAFETY: four floats.
        unsafe { vst1q_f32(out.as_mut_ptr(), sums) };
    }
}

/// Adds to each lane of `acc` the products of four codes with the four activations of lane `LANE` of `x`.
///
/// By hand, as the intrinsic is not stable.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn sdot<const LANE: u8>(mut acc: int32x4_t, codes: int8x16_t, x: int8x16_t) -> int32x4_t {
    // SAFETY: the feature is there; registers only.
    unsafe {
        asm!(
            "sdot {acc:v}.4s, {codes:v}.16b, {x:v}.4b[{lane}]",
            acc = inout(vreg) acc,
            codes = in(vreg) codes,
            x = in(vreg) x,
            lane = const LANE,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    acc
}

/// What holds the codes of unit `f * lines + line` in rows 0..4 and 16..20: sixteen bytes of each plane, or of both
/// lines of 8-bit codes.
///
/// # Safety
/// `codes` points at the planes of a tile of `BITS` and `group`, or at later quarters of their lines;
/// `lines` is the number of lines of the narrowest plane, `line < lines`, and `f` less than its field pairs.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn load<const BITS: u8>(
    codes: *const u8,
    group: usize,
    lines: usize,
    f: usize,
    line: usize,
) -> [uint8x16_t; 2] {
    // SAFETY: the caller's promises; each plane of width w has `group / 4 * w / 4` lines, and reads are of
    // a line below that.
    let at = |line: usize| unsafe { vld1q_u8(codes.add(64 * line)) };
    let [low_width, _] = const { plane_widths(BITS) };
    match BITS {
        8 => [at(2 * line), at(2 * line + 1)],
        2 | 4 => [at(line), vdupq_n_u8(0)],
        // 2 + 1: the plane of two bits has 2 * lines lines and two field pairs.
        3 => [at(f % 2 * lines + line), at(plane_bytes(low_width, group) / 64 + line)],
        // 4 + 1 and 4 + 2: the plane of four bits has a line per unit.
        _ => [at(f * lines + line), at(plane_bytes(low_width, group) / 64 + line)],
    }
}

/// The codes, or their levels, of field pair `f` of the narrowest plane of what [`load`] gives: of its first four rows and
/// of its last.
#[inline]
#[target_feature(enable = "neon")]
fn unpack<const BITS: u8, const TABLE: bool>(
    raw: [uint8x16_t; 2],
    f: usize,
    levels: int8x16_t,
) -> [int8x16_t; 2] {
    let codes = match BITS {
        8 => [flipped(raw[0]), flipped(raw[1])],
        4 => masked::<4>(shifted::<4>(raw[0], 0)),
        2 => masked::<2>(shifted::<2>(raw[0], f)),
        3 => join::<2>(shifted::<2>(raw[0], f / 2), masked::<1>(shifted::<1>(raw[1], f))),
        5 => join::<4>(shifted::<4>(raw[0], 0), masked::<1>(shifted::<1>(raw[1], f))),
        6 => join::<4>(shifted::<4>(raw[0], 0), masked::<2>(shifted::<2>(raw[1], f))),
        _ => unreachable!(),
    };
    signed::<TABLE>(codes, levels)
}

/// All field pairs of the 3-bit codes of a line of the plane of one bit and the two of the plane of two bits that go
/// with it: two fields at once, in a byte's halves, which takes fewer instructions (EXP-KERNEL-13).
#[inline]
#[target_feature(enable = "neon")]
fn all_of_three(even: uint8x16_t, odd: uint8x16_t, bits: uint8x16_t) -> [[uint8x16_t; 2]; 4] {
    let [first, fifth] = joined_halves(even, vshlq_n_u8::<2>(bits));
    let [second, sixth] = joined_halves(vshrq_n_u8::<2>(even), vshlq_n_u8::<1>(bits));
    let [third, seventh] = joined_halves(odd, bits);
    let [fourth, eighth] = joined_halves(vshrq_n_u8::<2>(odd), vshrq_n_u8::<1>(bits));
    [[first, second], [third, fourth], [fifth, sixth], [seventh, eighth]]
}

/// Bits 0 and 1 of `low` with bit 2 of `high`, and bits 4 and 5 with bit 6.
#[inline]
#[target_feature(enable = "neon")]
fn joined_halves(low: uint8x16_t, high: uint8x16_t) -> [uint8x16_t; 2] {
    let both = vandq_u8(vbslq_u8(vdupq_n_u8(0x33), low, high), vdupq_n_u8(0x77));
    [vandq_u8(both, vdupq_n_u8(0x0f)), vshrq_n_u8::<4>(both)]
}

/// Codes, or their levels, as `sdot` takes them.
#[inline]
#[target_feature(enable = "neon")]
fn signed<const TABLE: bool>([low, high]: [uint8x16_t; 2], levels: int8x16_t) -> [int8x16_t; 2] {
    if TABLE {
        [vqtbl1q_s8(levels, low), vqtbl1q_s8(levels, high)]
    } else {
        [vreinterpretq_s8_u8(low), vreinterpretq_s8_u8(high)]
    }
}

/// Bytes less 128.
#[inline]
#[target_feature(enable = "neon")]
fn flipped(bytes: uint8x16_t) -> uint8x16_t {
    veorq_u8(bytes, vdupq_n_u8(0x80))
}

/// Fields `2 * pair` and `2 * pair + 1` of bytes in the lowest bits.
#[inline]
#[target_feature(enable = "neon")]
fn shifted<const WIDTH: i8>(bytes: uint8x16_t, pair: usize) -> [uint8x16_t; 2] {
    // A shift to the left by less than nothing is one to the right; fields of bytes, so nothing is carried.
    let by = |fields: usize| vdupq_n_s8(-(fields as i8) * WIDTH);
    [vshlq_u8(bytes, by(2 * pair)), vshlq_u8(bytes, by(2 * pair + 1))]
}

/// The lowest `WIDTH` bits of each byte.
#[inline]
#[target_feature(enable = "neon")]
fn masked<const WIDTH: i8>(bytes: [uint8x16_t; 2]) -> [uint8x16_t; 2] {
    let mask = vdupq_n_u8((1 << WIDTH) - 1);
    [vandq_u8(bytes[0], mask), vandq_u8(bytes[1], mask)]
}

/// The lowest `WIDTH` bits of `low` and the bits above them.
#[inline]
#[target_feature(enable = "neon")]
fn join<const WIDTH: i32>(low: [uint8x16_t; 2], high: [uint8x16_t; 2]) -> [uint8x16_t; 2] {
    [vsliq_n_u8::<WIDTH>(low[0], high[0]), vsliq_n_u8::<WIDTH>(low[1], high[1])]
}

/// Four f16 as f32.
#[inline]
#[target_feature(enable = "neon")]
fn halves(bytes: &[u8; 8]) -> float32x4_t {
    // SAFETY: eight bytes.
    vcvt_f32_f16(vreinterpret_f16_u8(unsafe { vld1_u8(bytes.as_ptr()) }))
}

/// Prefetches the tile [`AHEAD`] of this one.
#[inline]
#[target_feature(enable = "neon")]
fn prefetch(tile: *const u8, bytes: usize) {
    // Four lines at once: the last of them may be of the tile after.
    for lines in (0..bytes).step_by(256) {
        let at = tile.addr().wrapping_add(AHEAD + lines);
        // SAFETY: a hint, for which any address will do.
        unsafe {
            asm!(
                "prfm pldl1keep, [{at}]",
                "prfm pldl1keep, [{at}, 64]",
                "prfm pldl1keep, [{at}, 128]",
                "prfm pldl1keep, [{at}, 192]",
                at = in(reg) at,
                options(nomem, nostack, preserves_flags),
            );
        }
    }
}
