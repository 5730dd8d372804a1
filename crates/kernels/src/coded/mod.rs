//! Products of coded weights: tiles times int8 activations.
//!
//! [`Kernels::coded_matmul`] has the definition. Its integers are exact in any order and stay below 2^24, so
//! their conversion is exact too: only the order of groups is part of the contract, and every instruction
//! set, token count and row range gives the same bits.
//!
//! A kernel multiplies one block of 32 rows by a few tokens over all groups; sums run down the rows' own
//! lanes, so nothing is added across a register. Codes are unpacked in registers, on the fly; tiles are
//! prefetched some KiB ahead.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
pub(crate) mod decode;
#[cfg(target_arch = "aarch64")]
mod neon;
mod scalar;

use std::ops::Range;

use smoe_format::Uniform;
use smoe_format::tile::ROWS;

use crate::activations::{Quantised, TOKENS, TokenBlock};
use crate::{Isa, Kernels, Matrix, Shard};

/// Sums of one block of rows: `[token][row]`.
type Sums = [[f32; ROWS]; TOKENS];

/// Bytes ahead of the tile that AVX2 and NEON prefetch: 2 to 8 KiB measured alike, the non-temporal hint halves the
/// speed (EXP-KERNEL-01).
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
const AHEAD: usize = 4096;

/// With more tokens than a kernel takes at once, rows are taken in runs of about this many bytes, which stay
/// in L2 while the tokens pass.
const RUN_BYTES: usize = 256 << 10;

/// What a kernel gives each block's number and sums to.
type Take<'a> = dyn FnMut(usize, &Sums) + 'a;

/// What a kernel does to a run of blocks of rows.
#[derive(Clone, Copy)]
struct Job<'a> {
    /// In whose tiles the codes lie; without levels, also what they mean.
    uniform: Uniform,
    /// The levels that the codes name, if they are of a table.
    levels: Option<[i8; 16]>,
    /// The tiles of the blocks, block after block, in a block group after group.
    tiles: &'a [u8],
    block_bytes: usize,
    x: TokenBlock<'a>,
}

impl Kernels {
    /// Multiplies the rows `rows` of a coded matrix by int8 activations:
    /// `out[t, r] = sum over k of W[r, k] * x[t, k]`.
    ///
    /// `matrix` is `[N, K]` in tiles; `x` holds T tokens of K columns, quantised in the matrix's group size;
    /// `out` holds at least the columns `rows` of a `[T, N]` plane, and only those are written.
    ///
    /// The definition, for one row and one token, groups in ascending order from `acc = 0`, where `dot` is
    /// the exact sum of code times activation over the group (for a table, of level times activation), `sum`
    /// that of the activations, `sx` the scale of the activations and `m` the largest code:
    ///
    /// ```text
    /// symmetric   acc = fma(float(2 * dot - m * sum), scale * (sx / m), acc)
    /// affine      acc = fma(float(sum), minimum * sx, fma(float(dot), scale * sx, acc))
    /// table       acc = fma(float(dot), scale * sx, acc)
    /// ```
    ///
    /// Levels and activations are at most 127 in magnitude and groups 128 long, so a table's dots stay below
    /// 128 * 127 * 127 = 2,064,512 < 2^24 and are exact as floats. Biased by 128, as sets that multiply u8 by s8
    /// want them, their partial sums stay below 128 * 255 * 127 < 2^23.
    ///
    /// Every instruction set, T and range gives these bits.
    ///
    /// # Panics
    /// If the weights are not coded, shapes or groups differ, `rows` are not whole blocks of 32 (the end of
    /// the matrix excepted), or `out` lacks some of them.
    pub fn coded_matmul(
        self,
        matrix: &Matrix<'_>,
        rows: Range<usize>,
        x: Quantised<'_>,
        out: &mut Shard<'_>,
    ) {
        let Some(uniform) = matrix.tiles() else {
            panic!("{matrix:?} has no codes");
        };
        let levels = matrix.levels();
        matrix.assert_range(&rows);
        assert_eq!(x.cols(), matrix.cols(), "columns of {matrix:?} and of x");
        assert_eq!(x.group(), uniform.group(), "groups of {matrix:?} and of x");
        assert_eq!(x.tokens(), out.tokens(), "tokens of x and of the output");
        let block_bytes = uniform.block_bytes(matrix.cols());
        if block_bytes == 0 {
            (0..x.tokens()).for_each(|t| out.part(rows.clone()).token(t).fill(0.0));
            return;
        }
        let one_pass = x.tokens() == self.tokens_at_once(x.tokens());
        let run = if one_pass { usize::MAX / ROWS } else { (RUN_BYTES / block_bytes).max(1) };
        for start in rows.clone().step_by(run * ROWS) {
            let run = start..rows.end.min(start.saturating_add(run * ROWS));
            let blocks = run.start / ROWS..run.end.div_ceil(ROWS);
            let tiles = &matrix.bytes()[blocks.start * block_bytes..blocks.end * block_bytes];
            let mut token = 0;
            while token < x.tokens() {
                let count = self.tokens_at_once((x.tokens() - token).min(TOKENS - token % TOKENS));
                let job = Job { uniform, levels, tiles, block_bytes, x: x.block(token) };
                self.coded_blocks(job, count, &mut |block, sums| {
                    let row = run.start + block * ROWS;
                    let width = ROWS.min(run.end - row);
                    for (t, sums) in sums[..count].iter().enumerate() {
                        // Not as a slice: a call to copy 128 bytes showed (EXP-KERNEL-14).
                        if width == ROWS {
                            out.store_block(token + t, row, sums);
                        } else {
                            out.store(token + t, row, &sums[..width]);
                        }
                    }
                });
                token += count;
            }
        }
    }

    /// The largest register tile for at most `tokens` tokens: fewer passes, even of an odd number of tokens,
    /// are what counts, as each reads and unpacks the weights again.
    fn tokens_at_once(self, tokens: usize) -> usize {
        match self.isa() {
            Isa::Scalar | Isa::Avx512 | Isa::Neon | Isa::NeonI8mm => tokens.min(8),
            Isa::Avx2 => tokens.min(4),
        }
    }

    /// All blocks of the job for `tokens` tokens, as many as [`Self::tokens_at_once`] gives.
    fn coded_blocks(self, job: Job<'_>, tokens: usize, take: &mut Take<'_>) {
        #[cfg(target_arch = "x86_64")]
        if self.isa() == Isa::Avx512 {
            // Fast enough that a call for each block would show.
            // SAFETY: a `Kernels` of this set proves that the machine has its features.
            return unsafe { avx512::blocks(job, tokens, take) };
        }
        let mut sums: Sums = [[0.0; ROWS]; TOKENS];
        for (block, tiles) in job.tiles.chunks_exact(job.block_bytes).enumerate() {
            self.coded_block(Job { tiles, ..job }, tokens, &mut sums);
            take(block, &sums);
        }
    }

    /// A job of one block, by sets that take no more at once.
    fn coded_block(self, job: Job<'_>, tokens: usize, out: &mut Sums) {
        match self.isa() {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: a `Kernels` of this set proves that the machine has its features.
            Isa::Avx2 => unsafe { avx2::block(job, tokens, out) },
            #[cfg(target_arch = "aarch64")]
            // SAFETY: as above.
            Isa::NeonI8mm if tokens > 1 && neon::i8mm::takes(&job) => unsafe {
                neon::i8mm::block(job, tokens, out);
            },
            #[cfg(target_arch = "aarch64")]
            // SAFETY: as above; one with int8 matrix products has int8 dot products.
            Isa::Neon | Isa::NeonI8mm => unsafe { neon::block(job, tokens, out) },
            _ => scalar::block(job, tokens, out),
        }
    }
}

/// Calls a `fn<const BITS: u8, const TABLE: bool, const T: usize>(job, out)` for run-time bits and tokens; `TABLE`
/// is whether the codes name levels.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
macro_rules! by_bits_and_tokens {
    ($kernel:ident, $job:expr, $tokens:expr, $out:expr, [$($t:literal),+]) => {
        match ($job.uniform.bits(), $job.levels.is_some(), $tokens) {
            $(
                (2, false, $t) => $kernel::<2, false, $t>($job, $out),
                (3, false, $t) => $kernel::<3, false, $t>($job, $out),
                (4, false, $t) => $kernel::<4, false, $t>($job, $out),
                (5, false, $t) => $kernel::<5, false, $t>($job, $out),
                (6, false, $t) => $kernel::<6, false, $t>($job, $out),
                (8, false, $t) => $kernel::<8, false, $t>($job, $out),
                (2, true, $t) => $kernel::<2, true, $t>($job, $out),
                (3, true, $t) => $kernel::<3, true, $t>($job, $out),
                (4, true, $t) => $kernel::<4, true, $t>($job, $out),
            )+
            (bits, table, tokens) => unreachable!("{bits} bits, table: {table}, {tokens} tokens"),
        }
    };
}
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use by_bits_and_tokens;

#[cfg(test)]
mod tests;
