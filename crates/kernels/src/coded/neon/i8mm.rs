//! NEON with int8 matrix products: `smmla` multiplies eight columns of two rows by those of two tokens.
//!
//! Two units beside each other are eight columns. Their lines are zipped before they are unpacked, so that a register of
//! codes holds two rows; a register of activations holds two tokens, and is made once for all rows of a tile. An `smmla`
//! is twice the products of an `sdot`, so half as many are issued; the integers are the same.

#![allow(clippy::needless_range_loop)]

use std::arch::aarch64::*;
use std::arch::asm;

use smoe_format::tile::ROWS;

use super::{Factors, levels_of, lines_of, load, narrow_fields, prefetch, store, unpack};
use crate::coded::{Job, Sums, by_bits_and_tokens};

/// Columns of a group at most, in registers of eight.
const CHUNKS: usize = 128 / 8;

/// True if the codes can be had by two units beside each other: not those of 3 and 5 bits in groups of 16.
pub(in crate::coded) fn takes(job: &Job<'_>) -> bool {
    (job.uniform.group() / 4 / narrow_fields(job.uniform.bits())).is_multiple_of(2)
}

/// A block for two tokens or more, if [`takes`] says so.
#[target_feature(enable = "neon,dotprod,i8mm")]
pub(in crate::coded) fn block(job: Job<'_>, tokens: usize, out: &mut Sums) {
    let out = (tokens, out);
    by_bits_and_tokens!(kernel, job, tokens.div_ceil(2), out, [1, 2, 3, 4]);
}

/// [`rows_at_once`] for `P` pairs of tokens, with sixteen registers for sums of products, or twelve.
#[target_feature(enable = "neon,dotprod,i8mm")]
fn kernel<const BITS: u8, const TABLE: bool, const P: usize>(
    job: Job<'_>,
    (tokens, out): (usize, &mut Sums),
) {
    match P {
        1 => rows_at_once::<BITS, TABLE, 1, 2, 4>(job, tokens, out),
        2 => rows_at_once::<BITS, TABLE, 2, 4, 2>(job, tokens, out),
        3 => rows_at_once::<BITS, TABLE, 3, 6, 1>(job, tokens, out),
        _ => rows_at_once::<BITS, TABLE, 4, 8, 1>(job, tokens, out),
    }
}

/// As the one of `sdot`, for `T = 2 * P` tokens, the last of which may be one that there is not.
#[target_feature(enable = "neon,dotprod,i8mm")]
fn rows_at_once<const BITS: u8, const TABLE: bool, const P: usize, const T: usize, const Q: usize>(
    job: Job<'_>,
    tokens: usize,
    out: &mut Sums,
) {
    const { assert!(T == 2 * P) };
    let (uniform, x) = (job.uniform, job.x);
    let (group, tile_bytes) = (uniform.group(), uniform.tile_bytes());
    let narrow_fields = const { narrow_fields(BITS) };
    let lines = lines_of::<BITS>(&job);
    assert!(lines.is_multiple_of(2) && group <= 8 * CHUNKS && (T - 1..=T).contains(&tokens));
    let levels = levels_of(&job);
    let mut sums = [[vdupq_n_f32(0.0); ROWS / 4]; T];
    // Eight columns of each pair of tokens.
    let mut pairs = [[vdupq_n_s8(0); P]; CHUNKS];
    for (g, tile) in job.tiles.chunks_exact(tile_bytes).enumerate() {
        let cell = g * x.step;
        arrange(&x.codes[cell * group..(cell + tokens) * group], group, &mut pairs);
        prefetch(tile.as_ptr(), tile_bytes);
        let factors = Factors::<T>::of::<TABLE>(&job, tile, cell, tokens);
        for quarter in (0..4).step_by(Q) {
            // Of two rows and two tokens each: rows 0, 1 and 2, 3 of the low half and of the high half.
            let mut dots = [[[vdupq_n_s32(0); 4]; Q]; P];
            if BITS == 8 {
                for p in 0..P {
                    let start = [128 * factors.sums[2 * p], 128 * factors.sums[2 * p + 1]];
                    let start = vzip1q_s32(vdupq_n_s32(start[0]), vdupq_n_s32(start[1]));
                    dots[p] = [[start; 4]; Q];
                }
            }
            let codes = tile.as_ptr().wrapping_add(16 * quarter);
            // Adds the products of units `f * lines + line` and the next: all fields of a line before the next quarter of
            // it, as they share what is loaded.
            macro_rules! field_pairs {
                ($q:ident, $line:expr, $x:expr, [$($f:literal),+]) => {$(
                    if $f < narrow_fields {
                        let x = if $f == 0 { $x } else { &pairs[($f * lines + $line) / 2 % CHUNKS] };
                        let codes = codes.wrapping_add(16 * $q);
                        // SAFETY: `f` and the lines are within the tile's planes of this group (asserted).
                        let [a, b] = unsafe {
                            [
                                load::<BITS>(codes, group, lines, $f, $line),
                                load::<BITS>(codes, group, lines, $f, $line + 1),
                            ]
                        };
                        let [upper, lower] = zip(a, b);
                        let upper = unpack::<BITS, TABLE>(upper, $f, levels);
                        let lower = unpack::<BITS, TABLE>(lower, $f, levels);
                        for p in 0..P {
                            dots[p][$q][0] = smmla(dots[p][$q][0], upper[0], x[p]);
                            dots[p][$q][1] = smmla(dots[p][$q][1], lower[0], x[p]);
                            dots[p][$q][2] = smmla(dots[p][$q][2], upper[1], x[p]);
                            dots[p][$q][3] = smmla(dots[p][$q][3], lower[1], x[p]);
                        }
                    }
                )+};
            }
            for (i, x) in pairs[..lines / 2].iter().enumerate() {
                for q in 0..Q {
                    field_pairs!(q, 2 * i, x, [0, 1, 2, 3]);
                }
            }
            for half in 0..2 {
                for q in 0..Q {
                    let mut of_rows = [vdupq_n_s32(0); T];
                    for p in 0..P {
                        let [a, b] = [dots[p][q][2 * half], dots[p][q][2 * half + 1]];
                        of_rows[2 * p] = vuzp1q_s32(a, b);
                        of_rows[2 * p + 1] = vuzp2q_s32(a, b);
                    }
                    factors.add::<TABLE>(4 * half + quarter + q, of_rows, &mut sums);
                }
            }
        }
    }
    for (out, sums) in out[..tokens].iter_mut().zip(sums) {
        store(sums, out);
    }
}

/// The activations of a group, token after token, as eight columns of two tokens in each register.
#[inline]
#[target_feature(enable = "neon")]
fn arrange<const P: usize>(xs: &[i8], group: usize, pairs: &mut [[int8x16_t; P]; CHUNKS]) {
    let mut of_tokens = xs.chunks_exact(group);
    for p in 0..P {
        let Some(a) = of_tokens.next() else { return };
        // The last token beside itself, whose products nobody looks at.
        let b = of_tokens.next().unwrap_or(a);
        let of_columns = pairs.as_chunks_mut::<2>().0.iter_mut();
        for ((a, b), pairs) in a.as_chunks::<16>().0.iter().zip(b.as_chunks::<16>().0).zip(of_columns) {
            // SAFETY: sixteen bytes each.
            let (a, b) = unsafe { (vld1q_s8(a.as_ptr()), vld1q_s8(b.as_ptr())) };
            let (a, b) = (vreinterpretq_s64_s8(a), vreinterpretq_s64_s8(b));
            pairs[0][p] = vreinterpretq_s8_s64(vzip1q_s64(a, b));
            pairs[1][p] = vreinterpretq_s8_s64(vzip2q_s64(a, b));
        }
    }
}

/// The first two rows of two units, and their last two.
#[inline]
#[target_feature(enable = "neon")]
fn zip(a: [uint8x16_t; 2], b: [uint8x16_t; 2]) -> [[uint8x16_t; 2]; 2] {
    let mut zipped = [a; 2];
    for i in 0..2 {
        let (a, b) = (vreinterpretq_u32_u8(a[i]), vreinterpretq_u32_u8(b[i]));
        zipped[0][i] = vreinterpretq_u8_u32(vzip1q_u32(a, b));
        zipped[1][i] = vreinterpretq_u8_u32(vzip2q_u32(a, b));
    }
    zipped
}

/// Adds the products of two rows with two tokens: of the first row with both, then of the second.
///
/// By hand, as the intrinsic is not stable.
#[inline]
#[target_feature(enable = "neon,i8mm")]
fn smmla(mut acc: int32x4_t, rows: int8x16_t, tokens: int8x16_t) -> int32x4_t {
    // SAFETY: the feature is there; registers only.
    unsafe {
        asm!(
            "smmla {acc:v}.4s, {rows:v}.16b, {tokens:v}.16b",
            acc = inout(vreg) acc,
            rows = in(vreg) rows,
            tokens = in(vreg) tokens,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    acc
}
