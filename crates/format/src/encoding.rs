//! Encodings of weights: what the codes of a tensor mean, and the scalar codec of each.
//!
//! Uniform codes are unsigned, `b` bits, in groups along the row, one f16 scale per (row, group):
//!
//! - symmetric (the original's SMOE-Q4/Q2): `w = (2 * code - m) * (scale / m)` with `m = 2^b - 1`, which is
//!   `(code - Z) / Z * scale` with `Z = m / 2`; the scale is the group's largest magnitude;
//! - affine: `w = code * scale + minimum`.
//!
//! The value of a code in `f32` is defined here, roundings included: [`Uniform::dequantise`]. Codes that name
//! levels of a table are in [`crate::table`].

use crate::half::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};
use crate::table::Table;
use crate::tile::{self, ROWS, SCALE_BYTES};

/// How the weights of one tensor lie on disk and in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Encoding {
    /// IEEE binary32, row-major.
    F32,
    /// IEEE binary16, row-major.
    F16,
    /// bfloat16, row-major.
    Bf16,
    /// Uniform codes in tiles ([`tile`]).
    Uniform(Uniform),
    /// Codes that name levels of a table, in the same tiles.
    Table(Table),
}

/// Uniform codes with a scale per (row, group).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Uniform {
    bits: u8,
    group: u8,
    zero: Zero,
}

/// Where a code stands for zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Zero {
    /// At `(2^b - 1) / 2`, a constant.
    Symmetric,
    /// Given by an f16 minimum per (row, group).
    Affine,
}

impl Uniform {
    /// Uniform codes of 2, 3, 4, 5, 6 or 8 bits in groups of 16, 32, 64 or 128; `None` for anything else.
    #[must_use]
    pub const fn new(bits: u8, group: usize, zero: Zero) -> Option<Self> {
        if matches!(bits, 2..=6 | 8) && matches!(group, 16 | 32 | 64 | 128) {
            Some(Self { bits, group: group as u8, zero })
        } else {
            None
        }
    }

    /// Bits of a code.
    #[inline]
    #[must_use]
    pub const fn bits(self) -> u8 {
        self.bits
    }

    /// Columns that share a scale.
    #[inline]
    #[must_use]
    pub const fn group(self) -> usize {
        self.group as usize
    }

    /// Symmetric or affine.
    #[inline]
    #[must_use]
    pub const fn zero(self) -> Zero {
        self.zero
    }

    /// The largest code, `m = 2^b - 1`.
    #[inline]
    #[must_use]
    pub const fn max_code(self) -> u8 {
        (0xff_u16 >> (8 - self.bits)) as u8
    }

    /// Groups of a row of `cols` columns, the last one possibly padded.
    #[inline]
    #[must_use]
    pub const fn groups(self, cols: usize) -> usize {
        cols.div_ceil(self.group())
    }

    /// Bytes of the codes of a tile.
    #[inline]
    #[must_use]
    pub const fn code_bytes(self) -> usize {
        tile::plane_bytes(self.bits, self.group())
    }

    /// Bytes of a tile: codes, scales and, if affine, minima. A multiple of 64.
    #[inline]
    #[must_use]
    pub const fn tile_bytes(self) -> usize {
        self.code_bytes()
            + match self.zero {
                Zero::Symmetric => SCALE_BYTES,
                Zero::Affine => 2 * SCALE_BYTES,
            }
    }

    /// Bytes of a block of 32 rows of `cols` columns.
    #[inline]
    #[must_use]
    pub const fn block_bytes(self, cols: usize) -> usize {
        self.groups(cols) * self.tile_bytes()
    }

    /// The value of `code` under `scale` and, if affine, `minimum`: the definition, in `f32`.
    #[inline]
    #[must_use]
    pub fn dequantise(self, code: u8, scale: f32, minimum: f32) -> f32 {
        match self.zero {
            Zero::Symmetric => {
                let m = self.max_code();
                (2 * i32::from(code) - i32::from(m)) as f32 * (scale / f32::from(m))
            }
            Zero::Affine => f32::from(code).mul_add(scale, minimum),
        }
    }

    /// Codes one group: writes the codes and returns the f16 scale and minimum (0 if symmetric).
    ///
    /// Symmetric codes follow the original's rule, each step in `f32`:
    /// `round_half_even(w / absmax * Z + Z)`, clamped, with the *unrounded* absmax; checked against the
    /// original's own file. Affine codes span minimum to maximum, rounded against the stored f16 values.
    #[inline(always)]
    pub fn encode_group(self, weights: &[f32], codes: &mut [u8]) -> (u16, u16) {
        let max_code = f32::from(self.max_code());
        match self.zero {
            Zero::Symmetric => {
                let absmax = largest_magnitude(weights);
                let (z, divisor) = (max_code / 2.0, if absmax > 0.0 { absmax } else { 1.0 });
                for (code, &w) in codes.iter_mut().zip(weights) {
                    *code = nearest_code(w / divisor * z + z, max_code);
                }
                (f32_to_f16(absmax), 0)
            }
            Zero::Affine => {
                let low = weights.iter().fold(f32::INFINITY, |m, &w| m.min(w));
                let high = weights.iter().fold(f32::NEG_INFINITY, |m, &w| m.max(w));
                let minimum = f32_to_f16(low);
                let scale = f32_to_f16((high - f16_to_f32(minimum)) / max_code);
                let (base, step) = (f16_to_f32(minimum), f16_to_f32(scale));
                for (code, &w) in codes.iter_mut().zip(weights) {
                    let steps = if step > 0.0 { (w - base) / step } else { 0.0 };
                    *code = nearest_code(steps, max_code);
                }
                (scale, minimum)
            }
        }
    }

    /// Writes one block of up to 32 rows into `out`.
    ///
    /// `weights` is `[rows, cols]` row-major with `rows <= 32`; `out` is [`Self::block_bytes`] long and is
    /// overwritten whole: missing rows and columns get code 0 and, for rows, scale 0.
    ///
    /// # Panics
    /// If a length does not match.
    #[inline(always)]
    pub fn encode_block(self, weights: &[f32], cols: usize, out: &mut [u8]) {
        encode_tiles(self, weights, cols, out, |weights, codes| self.encode_group(weights, codes));
    }

    /// Writes the scale and the minimum of a row of a tile.
    #[inline]
    pub fn write_levels(self, tile: &mut [u8], row: usize, scale: u16, minimum: u16) {
        let scales = &mut tile[self.code_bytes()..];
        scales[2 * row..2 * row + 2].copy_from_slice(&scale.to_le_bytes());
        if self.zero == Zero::Affine {
            let at = SCALE_BYTES + 2 * row;
            scales[at..at + 2].copy_from_slice(&minimum.to_le_bytes());
        }
    }

    /// Writes the codes, scale and minimum of one row of a zeroed tile.
    pub fn write_row(self, tile: &mut [u8], row: usize, codes: &[u8], scale: u16, minimum: u16) {
        let planes = &mut tile[..self.code_bytes()];
        for (col, &code) in codes.iter().enumerate() {
            tile::set_code(planes, self.bits, self.group(), row, col, code);
        }
        self.write_levels(tile, row, scale, minimum);
    }

    /// The scale and the minimum (0 if symmetric) of a row of a tile.
    #[must_use]
    pub fn scale(self, tile: &[u8], row: usize) -> (f32, f32) {
        let at = self.code_bytes() + 2 * row;
        let half = |at: usize| f16_to_f32(u16::from_le_bytes([tile[at], tile[at + 1]]));
        let minimum = if self.zero == Zero::Affine { half(at + SCALE_BYTES) } else { 0.0 };
        (half(at), minimum)
    }

    /// Reads row `row` (0..32) of a block back as `f32`; `out` is `[cols]`.
    pub fn decode_row(self, block: &[u8], row: usize, out: &mut [f32]) {
        let group = self.group();
        for (tile, out) in block.chunks_exact(self.tile_bytes()).zip(out.chunks_mut(group)) {
            let (scale, minimum) = self.scale(tile, row);
            for (col, value) in out.iter_mut().enumerate() {
                *value = self.dequantise(tile::code(tile, self.bits, group, row, col), scale, minimum);
            }
        }
    }
}

/// Writes a block of up to 32 rows; `encode_group` writes the codes of a group and returns its scale and minimum.
///
/// # Panics
/// If a length does not match.
#[inline(always)]
pub(crate) fn encode_tiles(
    tiles: Uniform,
    weights: &[f32],
    cols: usize,
    out: &mut [u8],
    mut encode_group: impl FnMut(&[f32], &mut [u8]) -> (u16, u16),
) {
    let rows = weights.len() / cols;
    assert!(rows <= ROWS && rows * cols == weights.len());
    assert_eq!(out.len(), tiles.block_bytes(cols));
    out.fill(0);
    let group = tiles.group();
    let mut codes = [0u8; ROWS * 128];
    let codes = &mut codes[..ROWS * group];
    for (g, tile) in out.chunks_exact_mut(tiles.tile_bytes()).enumerate() {
        let width = group.min(cols - g * group);
        if width < group {
            codes.fill(0);
        }
        for (row, codes) in codes.chunks_exact_mut(group).take(rows).enumerate() {
            let start = row * cols + g * group;
            let (scale, minimum) = encode_group(&weights[start..start + width], &mut codes[..width]);
            tiles.write_levels(tile, row, scale, minimum);
        }
        tile::pack(codes, tiles.bits, group, &mut tile[..tiles.code_bytes()]);
    }
}

impl Encoding {
    /// The uniform codes in whose tiles the codes lie; `None` for floats. Sizes, places of codes and scales are
    /// theirs; what a code means, only the encoding itself says.
    #[must_use]
    pub const fn tiles(self) -> Option<Uniform> {
        match self {
            Self::Uniform(uniform) => Some(uniform),
            Self::Table(table) => Some(table.tiles()),
            Self::F32 | Self::F16 | Self::Bf16 => None,
        }
    }

    /// Bytes of a tensor of `rows x cols`; `None` if that overflows.
    #[must_use]
    pub fn tensor_bytes(self, rows: usize, cols: usize) -> Option<usize> {
        match self {
            Self::F32 => rows.checked_mul(cols)?.checked_mul(4),
            Self::F16 | Self::Bf16 => rows.checked_mul(cols)?.checked_mul(2),
            Self::Uniform(_) | Self::Table(_) => {
                let tiles = self.tiles()?;
                tiles.groups(cols).checked_mul(tiles.tile_bytes())?.checked_mul(rows.div_ceil(ROWS))
            }
        }
    }

    /// Encodes whole rows; `weights` is `[rows, cols]`, `out` is `tensor_bytes(rows, cols)` long. A tensor
    /// may be encoded in runs of rows that are multiples of 32 (the last run excepted).
    ///
    /// # Panics
    /// If a length does not match.
    pub fn encode(self, weights: &[f32], cols: usize, out: &mut [u8]) {
        let rows = weights.len().checked_div(cols).unwrap_or(0);
        assert_eq!(Some(out.len()), self.tensor_bytes(rows, cols), "encoded length");
        match self {
            Self::F32 => {
                for (bytes, w) in out.chunks_exact_mut(4).zip(weights) {
                    bytes.copy_from_slice(&w.to_le_bytes());
                }
            }
            Self::F16 => encode_halves(weights, out, f32_to_f16),
            Self::Bf16 => encode_halves(weights, out, f32_to_bf16),
            Self::Uniform(u) => {
                for (rows, block) in
                    weights.chunks(ROWS * cols).zip(out.chunks_exact_mut(u.block_bytes(cols)))
                {
                    u.encode_block(rows, cols, block);
                }
            }
            Self::Table(t) => {
                let size = t.tiles().block_bytes(cols);
                for (rows, block) in weights.chunks(ROWS * cols).zip(out.chunks_exact_mut(size)) {
                    t.encode_block(rows, cols, block);
                }
            }
        }
    }

    /// Decodes row `row` of a tensor of `cols` columns into `out` (`[cols]`).
    ///
    /// # Panics
    /// If the row lies outside of `bytes`.
    pub fn decode_row(self, bytes: &[u8], cols: usize, row: usize, out: &mut [f32]) {
        debug_assert_eq!(out.len(), cols);
        match self {
            Self::F32 => {
                let bytes = &bytes[4 * row * cols..4 * (row + 1) * cols];
                for (value, b) in out.iter_mut().zip(bytes.chunks_exact(4)) {
                    *value = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
                }
            }
            Self::F16 => decode_halves(&bytes[2 * row * cols..2 * (row + 1) * cols], out, f16_to_f32),
            Self::Bf16 => decode_halves(&bytes[2 * row * cols..2 * (row + 1) * cols], out, bf16_to_f32),
            Self::Uniform(u) => {
                let size = u.block_bytes(cols);
                let block = row / ROWS * size;
                u.decode_row(&bytes[block..block + size], row % ROWS, out);
            }
            Self::Table(t) => {
                let size = t.tiles().block_bytes(cols);
                let block = row / ROWS * size;
                t.decode_row(&bytes[block..block + size], row % ROWS, out);
            }
        }
    }

    /// Bits per weight, scales and padding included.
    #[must_use]
    pub fn bits_per_weight(self, rows: usize, cols: usize) -> f64 {
        self.tensor_bytes(rows, cols).unwrap_or(0) as f64 * 8.0 / (rows as f64 * cols as f64)
    }

    /// True if weights multiply f32 activations without codes.
    #[must_use]
    pub const fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::F16 | Self::Bf16)
    }
}

/// The largest magnitude of some weights, over sixteen lanes.
#[inline(always)]
fn largest_magnitude(weights: &[f32]) -> f32 {
    let larger = |a: f32, w: f32| if w.abs() > a { w.abs() } else { a };
    let (whole, rest) = weights.as_chunks::<16>();
    let mut lanes = [0.0f32; 16];
    for chunk in whole {
        for (lane, &w) in lanes.iter_mut().zip(chunk) {
            *lane = larger(*lane, w);
        }
    }
    rest.iter().chain(&lanes).fold(0.0, |a, &w| larger(a, w))
}

/// The code nearest to `position`, ties to even. Adding and taking away 1.5 * 2^23 rounds what is below 2^22 as
/// `round_ties_even` does, on machines without an instruction for it too.
#[inline(always)]
fn nearest_code(position: f32, max_code: f32) -> u8 {
    const UNITS: f32 = 12_582_912.0;
    let position = if position > 0.0 { position } else { 0.0 };
    let position = if position < max_code { position } else { max_code };
    // Below 2^23 the lowest bits of the sum are the integer.
    (position + UNITS).to_bits() as u8
}

fn encode_halves(weights: &[f32], out: &mut [u8], narrow: impl Fn(f32) -> u16) {
    for (bytes, &w) in out.chunks_exact_mut(2).zip(weights) {
        bytes.copy_from_slice(&narrow(w).to_le_bytes());
    }
}

fn decode_halves(bytes: &[u8], out: &mut [f32], widen: impl Fn(u16) -> f32) {
    for (value, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
        *value = widen(u16::from_le_bytes([b[0], b[1]]));
    }
}

impl std::fmt::Display for Encoding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::F32 => f.write_str("f32"),
            Self::F16 => f.write_str("f16"),
            Self::Bf16 => f.write_str("bf16"),
            Self::Uniform(u) => {
                let affine = if u.zero == Zero::Affine { "a" } else { "" };
                write!(f, "q{}{affine}/{}", u.bits, u.group)
            }
            Self::Table(t) => t.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> impl Iterator<Item = Uniform> {
        [2, 3, 4, 5, 6, 8].into_iter().flat_map(|bits| {
            [16, 32, 64, 128].into_iter().flat_map(move |group| {
                [Zero::Symmetric, Zero::Affine]
                    .into_iter()
                    .map(move |zero| Uniform::new(bits, group, zero).expect("valid"))
            })
        })
    }

    fn weights(n: usize, seed: u32) -> Vec<f32> {
        let mut state = seed;
        (0..n)
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 8) as f32 / 8_388_608.0 - 1.0
            })
            .collect()
    }

    #[test]
    fn tiles_are_whole_cache_lines_of_the_sizes_in_the_format_document() {
        let size = |bits, zero| Uniform::new(bits, 64, zero).map(Uniform::tile_bytes);
        assert_eq!(size(4, Zero::Symmetric), Some(1088));
        assert_eq!(size(4, Zero::Affine), Some(1152));
        assert_eq!(size(8, Zero::Symmetric), Some(2112));
        assert_eq!(size(2, Zero::Symmetric), Some(576));
        assert!(all().all(|u| u.tile_bytes() % 64 == 0));
        assert_eq!(Uniform::new(7, 64, Zero::Symmetric), None);
        assert_eq!(Uniform::new(4, 48, Zero::Symmetric), None);
    }

    #[test]
    fn decoding_is_within_half_a_step_for_odd_shapes() {
        let (rows, cols) = (37, 150);
        let w = weights(rows * cols, 7);
        for u in all() {
            let e = Encoding::Uniform(u);
            let mut bytes = vec![0xaa; e.tensor_bytes(rows, cols).expect("small")];
            e.encode(&w, cols, &mut bytes);
            let mut row_values = vec![0.0; cols];
            for row in 0..rows {
                e.decode_row(&bytes, cols, row, &mut row_values);
                for (col, &value) in row_values.iter().enumerate() {
                    let group = col / u.group() * u.group();
                    let original = &w[row * cols + group..row * cols + (group + u.group()).min(cols)];
                    let absmax = original.iter().fold(0.0f32, |m, v| m.max(v.abs()));
                    let step = 2.0 * absmax / f32::from(u.max_code());
                    let error = (value - w[row * cols + col]).abs();
                    // Half a step, and the rounding of scale and minimum to f16.
                    assert!(error <= step * 0.5 + absmax * 2e-3, "{e} {row} {col}: {error} {step}");
                }
            }
        }
    }

    #[test]
    fn runs_of_whole_blocks_give_the_bytes_of_the_whole_tensor() {
        let (rows, cols) = (100, 96);
        let w = weights(rows * cols, 3);
        for e in all().map(Encoding::Uniform).chain([Encoding::Bf16, Encoding::F16, Encoding::F32]) {
            let mut whole = vec![0; e.tensor_bytes(rows, cols).expect("small")];
            e.encode(&w, cols, &mut whole);
            let mut runs = Vec::new();
            for run in w.chunks(64 * cols) {
                let mut part = vec![0; e.tensor_bytes(run.len() / cols, cols).expect("small")];
                e.encode(run, cols, &mut part);
                runs.extend(part);
            }
            assert_eq!(whole, runs, "{e}");
        }
    }

    #[test]
    fn zero_groups_and_the_largest_weight_are_kept_by_symmetric_codes() {
        for u in all().filter(|u| u.zero() == Zero::Symmetric) {
            let mut codes = [0; 4];
            assert_eq!(u.encode_group(&[0.0; 4], &mut codes).0, 0);
            let (scale, _) = u.encode_group(&[0.5, -0.5, 0.25, 0.0], &mut codes);
            assert_eq!(codes[..2], [u.max_code(), 0]);
            assert_eq!(u.dequantise(codes[0], f16_to_f32(scale), 0.0), 0.5);
            assert_eq!(u.dequantise(codes[1], f16_to_f32(scale), 0.0), -0.5);
        }
    }
}
