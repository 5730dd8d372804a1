//! The order of codes inside a tile: the one definition that codecs, kernels and readers share.
//!
//! A coded tensor of `rows x cols` is cut into blocks of [`ROWS`] rows; a block holds its groups of columns
//! one after the other, a tile each. A tile is its code planes, then 32 scales, then (affine) 32 minima,
//! everything in whole 64-byte lines:
//!
//! ```text
//! tensor = block 0: tile(group 0) tile(group 1) ... | block 1: ...      rows past the end: scale 0, codes 0
//! tile   = plane [plane] | 32 x f16 scale | [32 x f16 minimum]
//! ```
//!
//! A *plane* of width w holds w bits of every code. With `U = group / 4` units of four columns, one byte
//! holds `8 / w` codes, its *fields*: field `f` of byte `64 * p + 4 * r + c` is the code of row
//! `16 * (f mod 2) + r` and column `4 * (p + P * (f / 2)) + c`, where `P = U * w / 4` is the number of 64-byte
//! lines of the plane. So a 64-byte register masked down to one field holds four consecutive columns of
//! sixteen rows: what one VNNI instruction takes. Whole bytes (w = 8) put rows 0..16 and 16..32 of a unit in
//! two lines. Codes of 3, 5 and 6 bits are two planes, the low bits first: 2 + 1, 4 + 1, 4 + 2.

/// Rows of a tile.
pub const ROWS: usize = 32;
/// Bytes of the scales of a tile, and of its minima.
pub const SCALE_BYTES: usize = 2 * ROWS;

/// Widths of the planes of a `bits`-bit code, low bits first; an unused second plane is 0 wide.
///
/// # Panics
/// If `bits` is none of 2, 3, 4, 5, 6, 8.
#[inline]
#[must_use]
pub const fn plane_widths(bits: u8) -> [u8; 2] {
    match bits {
        2 => [2, 0],
        3 => [2, 1],
        4 => [4, 0],
        5 => [4, 1],
        6 => [4, 2],
        8 => [8, 0],
        _ => panic!("codes have 2, 3, 4, 5, 6 or 8 bits"),
    }
}

/// Bytes of a plane of `width` bits for a group of `group` columns and 32 rows.
#[inline]
#[must_use]
pub const fn plane_bytes(width: u8, group: usize) -> usize {
    group * ROWS * width as usize / 8
}

/// Where a plane keeps the bits of (row, column) of its tile: byte index and shift.
///
/// `row < 32`, `col < group`.
#[inline]
#[must_use]
pub const fn plane_position(width: u8, group: usize, row: usize, col: usize) -> (usize, u32) {
    let (half, r) = (row / 16, row % 16);
    let (unit, c) = (col / 4, col % 4);
    if width == 8 {
        return (128 * unit + 64 * half + 4 * r + c, 0);
    }
    let lines = group / 4 * width as usize / 4;
    let field = 2 * (unit / lines) + half;
    (64 * (unit % lines) + 4 * r + c, field as u32 * width as u32)
}

/// The code of (row, column) of a tile whose planes begin at `codes[0]`.
#[inline]
#[must_use]
pub fn code(codes: &[u8], bits: u8, group: usize, row: usize, col: usize) -> u8 {
    let [low, high] = plane_widths(bits);
    let (byte, shift) = plane_position(low, group, row, col);
    let mut code = (codes[byte] >> shift) & low_mask(low);
    if high > 0 {
        let (byte, shift) = plane_position(high, group, row, col);
        code |= ((codes[plane_bytes(low, group) + byte] >> shift) & low_mask(high)) << low;
    }
    code
}

/// Writes the code of (row, column) into planes that are zero there.
#[inline]
pub fn set_code(codes: &mut [u8], bits: u8, group: usize, row: usize, col: usize, code: u8) {
    let [low, high] = plane_widths(bits);
    let (byte, shift) = plane_position(low, group, row, col);
    codes[byte] |= (code & low_mask(low)) << shift;
    if high > 0 {
        let (byte, shift) = plane_position(high, group, row, col);
        codes[plane_bytes(low, group) + byte] |= (code >> low) << shift;
    }
}

/// Writes the planes of a whole tile at once: `codes` is `[32, group]` row-major, `planes` as long as the planes and
/// overwritten. Four codes, which lie side by side in both, are moved as one word.
///
/// # Panics
/// If a length does not match.
#[inline]
pub fn pack(codes: &[u8], bits: u8, group: usize, planes: &mut [u8]) {
    assert_eq!(codes.len(), ROWS * group, "codes of a tile");
    let [low, high] = plane_widths(bits);
    let (first, second) = planes.split_at_mut(plane_bytes(low, group));
    assert_eq!(second.len(), plane_bytes(high, group), "planes of a tile");
    match low {
        2 => pack_plane::<2>(codes, group, 0, first),
        4 => pack_plane::<4>(codes, group, 0, first),
        _ => {
            let units = group / 4;
            for (i, out) in first.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                *out = codes.as_chunks::<4>().0[i % ROWS * units + i / ROWS];
            }
        }
    }
    match high {
        1 => pack_plane::<1>(codes, group, u32::from(low), second),
        2 => pack_plane::<2>(codes, group, u32::from(low), second),
        _ => {}
    }
}

/// Writes the plane of `W` bits from bit `from` of every code on.
#[inline]
fn pack_plane<const W: usize>(codes: &[u8], group: usize, from: u32, plane: &mut [u8]) {
    let units = group / 4;
    let words = codes.as_chunks::<4>().0;
    let out = plane.as_chunks_mut::<4>().0;
    // A word has four codes in its bytes, in the order of memory on any machine: bits move within bytes only.
    let mask = u32::from_ne_bytes([low_mask(W as u8); 4]);
    let lines = units * W / 4;
    for (line, out) in out.chunks_exact_mut(16).enumerate() {
        for (row, out) in out.iter_mut().enumerate() {
            let mut packed = 0;
            for field in 0..8 / W {
                let at = (16 * (field % 2) + row) * units + line + lines * (field / 2);
                packed |= ((u32::from_ne_bytes(words[at]) >> from) & mask) << (field * W);
            }
            *out = packed.to_ne_bytes();
        }
    }
}

const fn low_mask(width: u8) -> u8 {
    (0xff_u16 >> (8 - width)) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn four_bit_tiles_of_64_are_as_written_in_the_format_document() {
        // Byte 64u + 4r + c: low nibble row r, high nibble row 16 + r, column 4u + c.
        for u in 0..16 {
            for r in 0..16 {
                for c in 0..4 {
                    assert_eq!(plane_position(4, 64, r, 4 * u + c), (64 * u + 4 * r + c, 0));
                    assert_eq!(plane_position(4, 64, 16 + r, 4 * u + c), (64 * u + 4 * r + c, 4));
                }
            }
        }
    }

    #[test]
    fn every_position_is_used_once_and_codes_round_trip() {
        for group in [16, 32, 64, 128] {
            for bits in [2, 3, 4, 5, 6, 8] {
                let [low, high] = plane_widths(bits);
                for width in [low, high].into_iter().filter(|&w| w > 0) {
                    let mut seen = vec![0u8; plane_bytes(width, group)];
                    for row in 0..ROWS {
                        for col in 0..group {
                            let (byte, shift) = plane_position(width, group, row, col);
                            assert_eq!(seen[byte] & (low_mask(width) << shift), 0);
                            seen[byte] |= low_mask(width) << shift;
                        }
                    }
                    assert!(seen.iter().all(|&b| b == 0xff));
                }
                let mut codes = vec![0u8; plane_bytes(low, group) + plane_bytes(high, group)];
                let value = |row: usize, col: usize| ((row * 31 + col * 7) % (1 << bits)) as u8;
                for row in 0..ROWS {
                    for col in 0..group {
                        set_code(&mut codes, bits, group, row, col, value(row, col));
                    }
                }
                for row in 0..ROWS {
                    for col in 0..group {
                        assert_eq!(code(&codes, bits, group, row, col), value(row, col));
                    }
                }
                let rows: Vec<u8> = (0..ROWS * group).map(|i| value(i / group, i % group)).collect();
                let mut packed = vec![0xaa; codes.len()];
                pack(&rows, bits, group, &mut packed);
                assert_eq!(packed, codes, "{bits} {group}");
            }
        }
    }
}
