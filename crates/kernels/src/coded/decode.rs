//! Codes of whole tiles to bytes and to `f32`, in loops that compilers turn into vectors.

use std::ops::Range;

use smoe_format::tile::{ROWS, plane_bytes, plane_widths};
use smoe_format::{Uniform, Zero};

use crate::{Isa, Kernels, Matrix};

/// Codes of a tile as bytes in the order of 8-bit tiles: `4 * (32 * unit + row) + c` for column
/// `4 * unit + c`.
pub(super) type Codes = [[[u8; 4]; ROWS]; 32];

/// Unpacks the planes of a tile; units past the group keep what they hold.
#[inline(always)]
pub(super) fn unpack(uniform: Uniform, tile: &[u8], out: &mut Codes) {
    let group = uniform.group();
    let [low, high] = plane_widths(uniform.bits());
    let out = &mut out[..group / 4];
    let (low_plane, rest) = tile.split_at(plane_bytes(low, group));
    if low == 8 {
        out.as_flattened_mut().as_flattened_mut().copy_from_slice(low_plane);
        return;
    }
    fields(low_plane, low, out, |code, field| *code = field);
    if high > 0 {
        fields(&rest[..plane_bytes(high, group)], high, out, |code, field| *code |= field << low);
    }
}

/// Hands each field of a plane to `put`, with its code.
#[inline(always)]
fn fields(plane: &[u8], width: u8, out: &mut [[[u8; 4]; ROWS]], put: impl Fn(&mut u8, u8)) {
    let (lines, _) = plane.as_chunks::<64>();
    let mask = (1u8 << width) - 1;
    for (pair, units) in out.chunks_exact_mut(lines.len()).enumerate() {
        for (line, unit) in lines.iter().zip(units) {
            let (halves, _) = unit.as_flattened_mut().as_chunks_mut::<64>();
            for (half, codes) in halves.iter_mut().enumerate() {
                let shift = (2 * pair + half) as u32 * u32::from(width);
                for (code, &byte) in codes.iter_mut().zip(line) {
                    put(code, (byte >> shift) & mask);
                }
            }
        }
    }
}

/// Rows `rows` of one block into `out`, `[rows, cols]`.
#[inline(always)]
fn decode_block(
    (uniform, levels): (Uniform, Option<[i8; 16]>),
    block: &[u8],
    rows: Range<usize>,
    cols: usize,
    out: &mut [f32],
) {
    // In f32 already, for codes have at most four bits.
    let levels = levels.map(|levels| levels.map(f32::from));
    let group = uniform.group();
    let mut codes: Codes = [[[0; 4]; ROWS]; 32];
    for (g, tile) in block.chunks_exact(uniform.tile_bytes()).enumerate() {
        unpack(uniform, tile, &mut codes);
        for (row, out) in rows.clone().zip(out.chunks_exact_mut(cols)) {
            let (scale, minimum) = uniform.scale(tile, row);
            let out = &mut out[g * group..cols.min((g + 1) * group)];
            // `dequantise` of the encoding, with the row's part of it done once.
            match (&levels, uniform.zero()) {
                (Some(levels), _) => values(&codes, row, out, |code| levels[usize::from(code)] * scale),
                (None, Zero::Symmetric) => {
                    let m = i32::from(uniform.max_code());
                    let step = scale / m as f32;
                    values(&codes, row, out, |code| (2 * i32::from(code) - m) as f32 * step);
                }
                (None, Zero::Affine) => {
                    values(&codes, row, out, |code| f32::from(code).mul_add(scale, minimum));
                }
            }
        }
    }
}

#[inline(always)]
fn values(codes: &Codes, row: usize, out: &mut [f32], value: impl Fn(u8) -> f32) {
    let (fours, rest) = out.as_chunks_mut::<4>();
    for (out, unit) in fours.iter_mut().zip(codes) {
        *out = unit[row].map(&value);
    }
    if let Some(unit) = codes.get(fours.len()) {
        rest.iter_mut().zip(unit[row]).for_each(|(out, code)| *out = value(code));
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn decode_avx2(
    codes: (Uniform, Option<[i8; 16]>),
    block: &[u8],
    rows: Range<usize>,
    cols: usize,
    out: &mut [f32],
) {
    decode_block(codes, block, rows, cols, out);
}

impl Kernels {
    /// Decodes the rows `rows` of a matrix into `out`, `[rows.len(), cols]`: exactly
    /// [`smoe_format::Encoding::decode_row`], faster for coded weights. Any range will do.
    ///
    /// # Panics
    /// If `rows` are not of the matrix, or `out` has another length.
    pub fn decode_rows(self, matrix: &Matrix<'_>, rows: Range<usize>, out: &mut [f32]) {
        let cols = matrix.cols();
        assert!(rows.start <= rows.end && rows.end <= matrix.rows(), "rows {rows:?} of {matrix:?}");
        assert_eq!(out.len(), rows.len() * cols, "output is [{}, {cols}]", rows.len());
        if cols == 0 {
            return;
        }
        let Some(uniform) = matrix.tiles() else {
            for (row, out) in rows.zip(out.chunks_exact_mut(cols)) {
                matrix.encoding().decode_row(matrix.bytes(), cols, row, out);
            }
            return;
        };
        let codes = (uniform, matrix.levels());
        let size = uniform.block_bytes(cols);
        let mut row = rows.start;
        while row < rows.end {
            let (block, first) = (row / ROWS, row % ROWS);
            let last = (first + rows.end - row).min(ROWS);
            let bytes = &matrix.bytes()[block * size..(block + 1) * size];
            let at = row - rows.start;
            let out = &mut out[at * cols..(at + last - first) * cols];
            match self.isa() {
                // NEON is part of every aarch64 target.
                Isa::Scalar | Isa::Neon | Isa::NeonI8mm => {
                    decode_block(codes, bytes, first..last, cols, out);
                }
                #[cfg(target_arch = "x86_64")]
                // SAFETY: a `Kernels` of either set proves that the machine has these features.
                Isa::Avx2 | Isa::Avx512 => unsafe { decode_avx2(codes, bytes, first..last, cols, out) },
                #[cfg(not(target_arch = "x86_64"))]
                Isa::Avx2 | Isa::Avx512 => decode_block(codes, bytes, first..last, cols, out),
            }
            row += last - first;
        }
    }
}
