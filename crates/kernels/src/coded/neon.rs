//! NEON with the int8 dot product: sixteen bytes of a line are four columns of four rows, one `sdot` operand.
//!
//! `sdot` takes the four activations from one lane of a register, so a register of them serves four units,
//! and sums run down the rows' own lanes. It multiplies signed bytes: codes of up to six bits are that as
//! they are, and so are the levels of a table, which a byte lookup makes of its codes; 8-bit codes lose 128 by a
//! flip of their top bit, and their dots start at 128 times the sum of the activations instead of 0.

// Tiles of registers are indexed: iterators over several of them at once are hard to read.
#![allow(clippy::needless_range_loop)]

use std::arch::aarch64::*;
use std::arch::asm;

use smoe_format::Zero;
use smoe_format::tile::{ROWS, SCALE_BYTES, plane_bytes, plane_widths};

use super::{AHEAD, Job, Sums, by_bits_and_tokens};

#[target_feature(enable = "neon,dotprod")]
pub(super) fn block(job: Job<'_>, tokens: usize, out: &mut Sums) {
    by_bits_and_tokens!(kernel, job, tokens, out, [1, 2, 4, 8]);
}

/// [`rows_at_once`] with as many quarters of each line at once as leave sixteen registers for sums of
/// products, of 32; eight for one token, which memory holds back anyway.
#[target_feature(enable = "neon,dotprod")]
fn kernel<const BITS: u8, const TABLE: bool, const T: usize>(job: Job<'_>, out: &mut Sums) {
    match T {
        1 | 2 => rows_at_once::<BITS, TABLE, T, 4>(job, out),
        4 => rows_at_once::<BITS, TABLE, T, 2>(job, out),
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
    let (group, tile_bytes, code_bytes) = (uniform.group(), uniform.tile_bytes(), uniform.code_bytes());
    assert!(uniform.bits() == BITS && code_bytes == code_bytes_of(BITS, group));
    let m = i32::from(uniform.max_code());
    let narrow_fields = const { narrow_fields(BITS) };
    // Lines of the narrowest plane: field pair f of them is units f * lines ..
    let lines = group / 4 / narrow_fields;
    assert!(group.is_multiple_of(16));
    let levels = job.levels.unwrap_or_default();
    // SAFETY: sixteen bytes.
    let levels = unsafe { vld1q_s8(levels.as_ptr()) };
    let mut sums = [[vdupq_n_f32(0.0); ROWS / 4]; T];
    for (g, tile) in job.tiles.chunks_exact(tile_bytes).enumerate() {
        let cell = g * x.step;
        let xs = x.codes[cell * group..(cell + T) * group].as_ptr();
        let (sx, sx_sums) = (&x.scales[cell..cell + T], &x.sums[cell..cell + T]);
        prefetch(tile.as_ptr(), tile_bytes);
        let (scales, _) = tile[code_bytes..].as_chunks::<8>();
        let mut factors = [0.0; T];
        for t in 0..T {
            factors[t] = match uniform.zero() {
                _ if TABLE => sx[t],
                Zero::Symmetric => sx[t] / m as f32,
                Zero::Affine => sx[t],
            };
        }
        for quarter in (0..4).step_by(Q) {
            let mut dots = [[[vdupq_n_s32(0); 2]; Q]; T];
            if BITS == 8 {
                for t in 0..T {
                    dots[t] = [[vdupq_n_s32(128 * sx_sums[t]); 2]; Q];
                }
            }
            let codes = tile.as_ptr().wrapping_add(16 * quarter);
            // Adds the products of unit `f * lines + line + lane`, for each lane of `x`.
            macro_rules! units {
                ($f:literal, $line:expr, $x:expr, [$($lane:literal),+]) => {$(
                    for q in 0..Q {
                        let codes = codes.wrapping_add(16 * q);
                        // SAFETY: `f` and the line are within the tile's planes of this group (asserted).
                        let [mut low, mut high] =
                            unsafe { unpack::<BITS>(codes, group, lines, $f, $line + $lane) };
                        if TABLE {
                            low = vqtbl1q_s8(levels, vreinterpretq_u8_s8(low));
                            high = vqtbl1q_s8(levels, vreinterpretq_u8_s8(high));
                        }
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
            field_pairs!(0, 1, 2, 3);
            for half in 0..2 {
                for q in 0..Q {
                    let four = 4 * half + quarter + q;
                    let scale = halves(&scales[four]);
                    match uniform.zero() {
                        _ if TABLE => {
                            for t in 0..T {
                                let dot = vcvtq_f32_s32(dots[t][q][half]);
                                let scale = vmulq_n_f32(scale, factors[t]);
                                sums[t][four] = vfmaq_f32(sums[t][four], dot, scale);
                            }
                        }
                        Zero::Symmetric => {
                            for t in 0..T {
                                let twice = vshlq_n_s32::<1>(dots[t][q][half]);
                                let integer = vcvtq_f32_s32(vsubq_s32(twice, vdupq_n_s32(m * sx_sums[t])));
                                let scale = vmulq_n_f32(scale, factors[t]);
                                sums[t][four] = vfmaq_f32(sums[t][four], integer, scale);
                            }
                        }
                        Zero::Affine => {
                            let minimum = halves(&scales[SCALE_BYTES / 8 + four]);
                            for t in 0..T {
                                let dot = vcvtq_f32_s32(dots[t][q][half]);
                                let acc = vfmaq_f32(sums[t][four], dot, vmulq_n_f32(scale, factors[t]));
                                let minimum = vmulq_n_f32(minimum, factors[t]);
                                sums[t][four] = vfmaq_n_f32(acc, minimum, sx_sums[t] as f32);
                            }
                        }
                    }
                }
            }
        }
    }
    for (out, sums) in out.iter_mut().zip(sums) {
        for (out, sums) in out.as_chunks_mut::<4>().0.iter_mut().zip(sums) {
            // SAFETY: four floats.
            unsafe { vst1q_f32(out.as_mut_ptr(), sums) };
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

/// The codes of unit `f * lines + line` in rows 0..4 and 16..20, as signed bytes.
///
/// # Safety
/// `codes` points at the planes of a tile of `BITS` and `group`, or at later quarters of their lines;
/// `lines` is the number of lines of the narrowest plane, `line < lines`, and `f` less than its field pairs.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn unpack<const BITS: u8>(
    codes: *const u8,
    group: usize,
    lines: usize,
    f: usize,
    line: usize,
) -> [int8x16_t; 2] {
    // SAFETY: the caller's promises; each plane of width w has `group / 4 * w / 4` lines, and reads are of
    // a line below that.
    let [low, high] = unsafe {
        match BITS {
            8 => {
                let flip = vdupq_n_u8(0x80);
                let at = codes.add(128 * line);
                [veorq_u8(vld1q_u8(at), flip), veorq_u8(vld1q_u8(at.add(64)), flip)]
            }
            4 => masked::<4>(shifted::<4>(codes.add(64 * line), 0)),
            2 => masked::<2>(shifted::<2>(codes.add(64 * line), f)),
            // 2 + 1: the plane of two bits has 2 * lines lines and two field pairs.
            3 => join::<2>(
                shifted::<2>(codes.add(64 * (f % 2 * lines + line)), f / 2),
                masked::<1>(shifted::<1>(codes.add(plane_bytes(2, group) + 64 * line), f)),
            ),
            // 4 + 1: the plane of four bits has a line per unit.
            5 => join::<4>(
                shifted::<4>(codes.add(64 * (f * lines + line)), 0),
                masked::<1>(shifted::<1>(codes.add(plane_bytes(4, group) + 64 * line), f)),
            ),
            6 => join::<4>(
                shifted::<4>(codes.add(64 * (f * lines + line)), 0),
                masked::<2>(shifted::<2>(codes.add(plane_bytes(4, group) + 64 * line), f)),
            ),
            _ => unreachable!(),
        }
    };
    [vreinterpretq_s8_u8(low), vreinterpretq_s8_u8(high)]
}

/// A quarter of a line with field `2 * pair`, then `2 * pair + 1`, in the lowest bits.
///
/// # Safety
/// 16 bytes can be read.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn shifted<const WIDTH: i8>(line: *const u8, pair: usize) -> [uint8x16_t; 2] {
    // SAFETY: the caller's promise.
    let bytes = unsafe { vld1q_u8(line) };
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
    for line in (0..bytes).step_by(64) {
        let at = tile.addr().wrapping_add(AHEAD + line);
        // SAFETY: a hint, for which any address will do.
        unsafe { asm!("prfm pldl1keep, [{at}]", at = in(reg) at, options(nomem, nostack, preserves_flags)) };
    }
}
