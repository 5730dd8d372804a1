//! int8 activations: what coded weights are multiplied by.
//!
//! [`Activations`] defines the codes.
//!
//! Layout: blocks of up to [`TOKENS`] tokens, a block holds its groups one after the other, a group its
//! tokens. A plain `[T, K]` would put the tokens of a kernel on the same L1 sets whenever K is a power of
//! two. Cell `(token, g)` is number `first(token) + g * width(token)`, codes lie at `cell * group`, and the
//! planes of scales and sums are indexed by the cell itself. A run of tokens always takes
//! `tokens * groups` cells, so several runs can share one buffer.

use crate::output::Shared;
use crate::pool::Pool;
use crate::{Isa, Kernels};

/// Tokens of a block: the widest register tile of the kernels.
pub(crate) const TOKENS: usize = 8;

/// Adding this to |v| < 2^22 leaves `round_half_even(v)` in the low bits of the sum.
const ROUND: f32 = 12_582_912.0;

/// Borrowed int8 activations of some tokens, `[tokens, cols]` in the layout of this module.
#[derive(Clone, Copy, Debug)]
pub struct Quantised<'a> {
    codes: &'a [i8],
    scales: &'a [f32],
    sums: &'a [i32],
    tokens: usize,
    cols: usize,
    group: usize,
}

/// Up to [`TOKENS`] tokens that kernels take at once. Group g's tokens are the cells `g * step..`.
#[derive(Clone, Copy)]
pub(crate) struct TokenBlock<'a> {
    pub(crate) codes: &'a [i8],
    pub(crate) scales: &'a [f32],
    pub(crate) sums: &'a [i32],
    /// Cells from one group to the next: tokens of the block that this is a part of.
    pub(crate) step: usize,
}

impl<'a> Quantised<'a> {
    /// Tokens.
    #[must_use]
    pub const fn tokens(&self) -> usize {
        self.tokens
    }

    /// Columns, without padding.
    #[must_use]
    pub const fn cols(&self) -> usize {
        self.cols
    }

    /// Columns that share a scale.
    #[must_use]
    pub const fn group(&self) -> usize {
        self.group
    }

    const fn groups(&self) -> usize {
        self.cols.div_ceil(self.group)
    }

    /// The codes, scale and sum of a (token, group).
    ///
    /// # Panics
    /// If there is no such token or group.
    #[must_use]
    pub fn cell(&self, token: usize, g: usize) -> (&'a [i8], f32, i32) {
        assert!(token < self.tokens && g < self.groups(), "({token}, {g})");
        let (first, width) = position(self.tokens, self.groups(), token);
        let cell = first + g * width;
        let codes = &self.codes[cell * self.group..(cell + 1) * self.group];
        (codes, self.scales[cell], self.sums[cell])
    }

    /// Tokens `token..` of one block (the caller stays within it).
    pub(crate) fn block(&self, token: usize) -> TokenBlock<'a> {
        let (first, step) = position(self.tokens, self.groups(), token);
        TokenBlock {
            codes: &self.codes[first * self.group..],
            scales: &self.scales[first..],
            sums: &self.sums[first..],
            step,
        }
    }
}

/// The cell of (token, group 0) and the cells from group to group, in a run of `tokens`.
fn position(tokens: usize, groups: usize, token: usize) -> (usize, usize) {
    let start = token / TOKENS * TOKENS;
    (start * groups + (token - start), TOKENS.min(tokens - start))
}

/// Planes of codes, scales and sums for some number of cells.
#[derive(Debug, Default)]
pub(crate) struct Planes {
    codes: Vec<i8>,
    scales: Vec<f32>,
    sums: Vec<i32>,
}

/// The planes, to be written by several threads.
pub(crate) struct SharedPlanes<'a> {
    codes: Shared<'a, i8>,
    scales: Shared<'a, f32>,
    sums: Shared<'a, i32>,
}

/// Where a run of tokens lies in planes, and its shape.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Run {
    /// First byte of codes, and first cell of the other planes.
    pub(crate) code: usize,
    pub(crate) cell: usize,
    pub(crate) tokens: usize,
    pub(crate) cols: usize,
    pub(crate) group: usize,
}

impl Run {
    pub(crate) const fn groups(&self) -> usize {
        self.cols.div_ceil(self.group)
    }
}

/// Bytes of codes and number of cells that a token of `cols` columns needs at most, for any group.
pub(crate) const fn room(cols: usize) -> (usize, usize) {
    (cols.next_multiple_of(128), cols.div_ceil(16))
}

impl Planes {
    /// Makes room; allocates only if there is less.
    pub(crate) fn reserve(&mut self, codes: usize, cells: usize) {
        if self.codes.len() < codes {
            self.codes.resize(codes, 0);
        }
        if self.scales.len() < cells {
            self.scales.resize(cells, 0.0);
            self.sums.resize(cells, 0);
        }
    }

    pub(crate) fn share(&mut self) -> SharedPlanes<'_> {
        SharedPlanes {
            codes: Shared::new(&mut self.codes),
            scales: Shared::new(&mut self.scales),
            sums: Shared::new(&mut self.sums),
        }
    }

    pub(crate) fn view(&self, run: Run) -> Quantised<'_> {
        let cells = run.tokens * run.groups();
        Quantised {
            codes: &self.codes[run.code..run.code + cells * run.group],
            scales: &self.scales[run.cell..run.cell + cells],
            sums: &self.sums[run.cell..run.cell + cells],
            tokens: run.tokens,
            cols: run.cols,
            group: run.group,
        }
    }
}

impl SharedPlanes<'_> {
    /// Quantises `x`, the columns of `token` from group `g` on.
    ///
    /// # Safety
    /// Nobody else touches these cells at the same time.
    pub(crate) unsafe fn quantise(&self, kernels: Kernels, run: Run, token: usize, g: usize, x: &[f32]) {
        let (first, width) = position(run.tokens, run.groups(), token);
        for (i, x) in x.chunks(run.group).enumerate() {
            let cell = first + (g + i) * width;
            let code = run.code + cell * run.group;
            // SAFETY: the cells are the caller's alone, and cells do not overlap each other.
            let (codes, scale, sum) = unsafe {
                let cell = run.cell + cell;
                (
                    self.codes.part(code..code + run.group),
                    self.scales.part(cell..cell + 1),
                    self.sums.part(cell..cell + 1),
                )
            };
            (scale[0], sum[0]) = kernels.quantise_group(x, codes);
        }
    }

    /// Copies the chosen tokens of `source` into `run`.
    ///
    /// # Safety
    /// Nobody else touches the cells of `run` at the same time.
    pub(crate) unsafe fn gather(&self, run: Run, source: Quantised<'_>, tokens: &[u32]) {
        debug_assert_eq!((run.cols, run.group, run.tokens), (source.cols, source.group, tokens.len()));
        for (to, &from) in tokens.iter().enumerate() {
            let (first, width) = position(run.tokens, run.groups(), to);
            for g in 0..run.groups() {
                let cell = first + g * width;
                let code = run.code + cell * run.group;
                let (codes, scale, sum) = source.cell(from as usize, g);
                // SAFETY: the cells are the caller's alone, and cells do not overlap each other.
                unsafe {
                    let cell = run.cell + cell;
                    self.codes.part(code..code + run.group).copy_from_slice(codes);
                    self.scales.part(cell..cell + 1)[0] = scale;
                    self.sums.part(cell..cell + 1)[0] = sum;
                }
            }
        }
    }
}

/// Owned int8 activations, reused from step to step.
///
/// Per (token, group of columns), with `absmax` the group's largest magnitude, each step in `f32`:
///
/// ```text
/// inverse = 127 / absmax     code = round_half_even(x * inverse), clamped to -127..=127
/// scale   = absmax / 127     sum  = sum of the codes, exact
/// ```
///
/// A group whose `inverse` overflows (all zero, or below 4e-37) has scale 0 and codes 0. A group that holds
/// an infinity or a NaN has codes 0 and that infinity or NaN as its scale, so every sum over it is NaN.
/// Columns past the end of the last group are 0 and not in the sum.
#[derive(Debug)]
pub struct Activations {
    planes: Planes,
    tokens: usize,
    cols: usize,
    group: usize,
}

impl Activations {
    /// Room for `tokens` tokens of `cols` columns in any group size.
    #[must_use]
    pub fn with_capacity(tokens: usize, cols: usize) -> Self {
        let mut planes = Planes::default();
        let (codes, cells) = room(cols);
        planes.reserve(tokens * codes, tokens * cells);
        Self { planes, tokens: 0, cols, group: 64 }
    }

    fn set_shape(&mut self, tokens: usize, cols: usize, group: usize) -> Run {
        assert!(matches!(group, 16 | 32 | 64 | 128), "groups of {group}");
        let run = Run { code: 0, cell: 0, tokens, cols, group };
        let cells = tokens * run.groups();
        self.planes.reserve(cells * group, cells);
        (self.tokens, self.cols, self.group) = (tokens, cols, group);
        run
    }

    /// Quantises `x` (`[tokens, cols]`, row-major) in groups of `group` columns (16, 32, 64 or 128),
    /// replacing what was here. Each token's bits depend on that token only. Allocates only beyond the
    /// capacity.
    ///
    /// # Panics
    /// If `x` has another length, or `group` is none of those.
    pub fn quantise(&mut self, kernels: Kernels, x: &[f32], tokens: usize, cols: usize, group: usize) {
        self.quantise_on(None, kernels, x, tokens, cols, group);
    }

    /// [`Self::quantise`], with the tokens spread over the threads of `pool`.
    ///
    /// # Panics
    /// As there.
    pub fn quantise_parallel(
        &mut self,
        pool: &Pool,
        kernels: Kernels,
        x: &[f32],
        tokens: usize,
        cols: usize,
        group: usize,
    ) {
        // Below about 20 us of work a fork does not pay.
        let pool = (tokens > TOKENS && tokens * cols >= 1 << 16).then_some(pool);
        self.quantise_on(pool, kernels, x, tokens, cols, group);
    }

    fn quantise_on(
        &mut self,
        pool: Option<&Pool>,
        kernels: Kernels,
        x: &[f32],
        tokens: usize,
        cols: usize,
        group: usize,
    ) {
        assert_eq!(x.len(), tokens * cols, "x is [{tokens}, {cols}]");
        let run = self.set_shape(tokens, cols, group);
        let planes = self.planes.share();
        let block = |block: usize| {
            for token in block * TOKENS..tokens.min((block + 1) * TOKENS) {
                // SAFETY: each token is quantised by one task, and tokens share no cells.
                unsafe { planes.quantise(kernels, run, token, 0, &x[token * cols..(token + 1) * cols]) };
            }
        };
        match pool {
            Some(pool) => pool.run(tokens.div_ceil(TOKENS), &block),
            None => (0..tokens.div_ceil(TOKENS)).for_each(block),
        }
    }

    /// Takes over the codes of some tokens of `source`, in that order, without quantising anew: what an
    /// expert sees of a layer's input. Allocates only beyond the capacity.
    ///
    /// # Panics
    /// If a token is not in `source`.
    pub fn gather(&mut self, source: Quantised<'_>, tokens: &[u32]) {
        let run = self.set_shape(tokens.len(), source.cols, source.group);
        // SAFETY: the planes are borrowed mutably, here and by no other thread.
        unsafe { self.planes.share().gather(run, source, tokens) };
    }

    /// The activations, as kernels take them.
    #[must_use]
    pub fn view(&self) -> Quantised<'_> {
        let (tokens, cols, group) = (self.tokens, self.cols, self.group);
        self.planes.view(Run { code: 0, cell: 0, tokens, cols, group })
    }
}

/// One group: writes the codes, 0 past the end of `x`, and gives the scale and the sum of the codes.
///
/// Plain arithmetic in a form that compilers turn into vectors; inlined into one function per instruction
/// set, so the bits are the same by construction.
#[inline(always)]
fn quantise_group(x: &[f32], codes: &mut [i8]) -> (f32, i32) {
    // Magnitudes of floats order like their bits, NaN above infinity.
    let absmax = x.iter().fold(0, |m: u32, v| m.max(v.to_bits() & 0x7fff_ffff));
    let absmax = f32::from_bits(absmax);
    let inverse = 127.0 / absmax;
    if !(inverse > 0.0 && inverse < f32::INFINITY) {
        codes.fill(0);
        return (if absmax < 1.0 { 0.0 } else { absmax }, 0);
    }
    let (head, padding) = codes.split_at_mut(x.len());
    let mut sum = 0i32;
    for (code, &v) in head.iter_mut().zip(x) {
        let rounded = (v * inverse + ROUND).to_bits().wrapping_sub(ROUND.to_bits()) as i32;
        let rounded = rounded.clamp(-127, 127);
        sum += rounded;
        *code = rounded as i8;
    }
    padding.fill(0);
    (absmax / 127.0, sum)
}

/// [`quantise_group`] with the length known, for the common case of whole groups.
#[inline(always)]
fn quantise_any(x: &[f32], codes: &mut [i8]) -> (f32, i32) {
    match (x.len(), codes.len()) {
        (32, 32) => quantise_group(&x[..32], &mut codes[..32]),
        (64, 64) => quantise_group(&x[..64], &mut codes[..64]),
        (128, 128) => quantise_group(&x[..128], &mut codes[..128]),
        _ => quantise_group(x, codes),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn quantise_avx2(x: &[f32], codes: &mut [i8]) -> (f32, i32) {
    quantise_any(x, codes)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn quantise_avx512(x: &[f32], codes: &mut [i8]) -> (f32, i32) {
    quantise_any(x, codes)
}

impl Kernels {
    /// Quantises one group (`x.len() <= codes.len()`).
    fn quantise_group(self, x: &[f32], codes: &mut [i8]) -> (f32, i32) {
        match self.isa() {
            // NEON is part of every aarch64 target.
            Isa::Scalar | Isa::Neon | Isa::NeonI8mm => quantise_any(x, codes),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: a `Kernels` of this set proves that the machine has its features.
            Isa::Avx2 => unsafe { quantise_avx2(x, codes) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Isa::Avx512 => unsafe { quantise_avx512(x, codes) },
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Avx2 | Isa::Avx512 => quantise_any(x, codes),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The definition, spelled with the standard library's rounding.
    fn reference(x: &[f32]) -> (Vec<i8>, f32) {
        let absmax = x.iter().fold(0.0f32, |m, v| m.max(v.abs()));
        let inverse = 127.0 / absmax;
        if !inverse.is_finite() {
            return (vec![0; x.len()], 0.0);
        }
        let code = |v: &f32| (v * inverse).round_ties_even().clamp(-127.0, 127.0) as i8;
        (x.iter().map(code).collect(), absmax / 127.0)
    }

    fn check(x: &[f32], tokens: usize, cols: usize, group: usize) {
        for kernels in Kernels::available() {
            let mut a = Activations::with_capacity(1, 1);
            // Stale bytes must not show in the padding.
            a.quantise(kernels, &vec![1.0; tokens * (cols + 128)], tokens, cols + 128, group);
            a.quantise(kernels, x, tokens, cols, group);
            for t in 0..tokens {
                for (g, x) in x[t * cols..(t + 1) * cols].chunks(group).enumerate() {
                    let (codes, scale, sum) = a.view().cell(t, g);
                    let (expected, expected_scale) = reference(x);
                    assert_eq!(codes[..x.len()], expected, "{kernels:?} {t} {g}");
                    assert!(codes[x.len()..].iter().all(|&c| c == 0));
                    assert_eq!(scale.to_bits(), expected_scale.to_bits());
                    assert_eq!(sum, expected.iter().map(|&c| i32::from(c)).sum::<i32>());
                }
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn every_set_gives_the_definition(
            tokens in 1usize..20,
            cols in 1usize..300,
            group in prop::sample::select(vec![16usize, 32, 64, 128]),
            seed in any::<u32>(),
            exponent in -46i32..38,
        ) {
            let mut state = seed;
            let x: Vec<f32> = (0..tokens * cols).map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                ((state >> 8) as f32 / 8_388_608.0 - 1.0) * 10f32.powi(exponent)
            }).collect();
            check(&x, tokens, cols, group);
        }
    }

    #[test]
    fn ties_round_to_even_and_zero_groups_are_zero() {
        let mut x = vec![0.0; 64];
        x[0] = 127.0;
        for (i, v) in x[1..].iter_mut().enumerate() {
            *v = i as f32 - 30.5;
        }
        check(&x, 1, 64, 64);
        check(&[0.0; 40], 1, 40, 16);
        check(&[f32::from_bits(1), -f32::from_bits(3)], 1, 2, 16);
        check(&[f32::MAX, -f32::MAX, 1.0], 1, 3, 16);
        // A last group of another group's length.
        check(&[1.0; 160], 1, 160, 64);
    }

    #[test]
    fn infinities_and_nans_poison_their_group_only() {
        for kernels in Kernels::available() {
            for bad in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
                let mut x = vec![1.0; 64];
                x[20] = bad;
                let mut a = Activations::with_capacity(1, 64);
                a.quantise(kernels, &x, 1, 64, 32);
                let (codes, scale, sum) = a.view().cell(0, 0);
                assert!(codes.iter().all(|&c| c == 0) && !scale.is_finite() && sum == 0);
                assert_eq!(a.view().cell(0, 1).0, [127; 32]);
            }
        }
    }

    #[test]
    fn gathering_and_parallel_quantising_keep_the_bits() {
        let (tokens, cols) = (37, 2000);
        let x: Vec<f32> = (0..tokens * cols).map(|i| ((i * 7919) % 1009) as f32 - 500.0).collect();
        let kernels = Kernels::detect();
        let mut a = Activations::with_capacity(tokens, cols);
        a.quantise(kernels, &x, tokens, cols, 64);
        let mut b = Activations::with_capacity(tokens, cols);
        b.quantise_parallel(&Pool::new(3, false), kernels, &x, tokens, cols, 64);
        let mut c = Activations::with_capacity(tokens, cols);
        let chosen = [36, 0, 5, 5, 8, 9, 10, 11, 12, 31];
        c.gather(a.view(), &chosen);
        for g in 0..cols.div_ceil(64) {
            for t in 0..tokens {
                assert_eq!(a.view().cell(t, g), b.view().cell(t, g));
            }
            for (to, &from) in chosen.iter().enumerate() {
                assert_eq!(c.view().cell(to, g), a.view().cell(from as usize, g));
            }
        }
    }
}
