//! Level tables: a code names one of up to sixteen signed 8-bit levels, under a scale per (row, group).
//!
//! ```text
//! w = level[code] * scale          levels of the encoding, an f16 scale per (row, group)
//! ```
//!
//! Levels may lie where weights are dense, as those of IQ4_NL and fitted tables do, or be those of a small float
//! type ([`Table::MXFP4`]). Codes lie in the tiles of symmetric [`Uniform`] codes of the same bits and group.

use crate::encoding::{Encoding, Uniform, Zero, encode_tiles};
use crate::half::{f16_to_f32, f32_to_f16};
use crate::tile;

/// Codes of 2, 3 or 4 bits that name levels of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Table {
    /// In whose tiles the codes lie; of its arithmetic nothing is used.
    tiles: Uniform,
    /// Levels past `2^bits` are 0.
    levels: [i8; 16],
}

impl Table {
    /// Levels of a 4-bit float with two bits of exponent (E2M1), doubled, in groups of 32: MXFP4, with half the
    /// block's power of two as scale. (OCP Microscaling Formats 1.0; minus zero is 0.)
    pub const MXFP4: Self = Self::known(4, 32, &[0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]);
    /// Levels of ggml's IQ4_NL, in groups of 32 (`kvalues_iq4nl` in `ggml-common.h`).
    pub const IQ4_NL: Self =
        Self::known(4, 32, &[-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]);

    /// Codes of 2, 3 or 4 bits in groups of 16, 32, 64 or 128, and the `2^bits` levels that they name, in any
    /// order, equal ones allowed. `None` for anything else.
    ///
    /// No level is -128: so the magnitude of each fits a signed byte, as one that is negated does, which kernels
    /// for signed bytes use.
    #[must_use]
    pub const fn new(bits: u8, group: usize, levels: &[i8]) -> Option<Self> {
        if !matches!(bits, 2..=4) || levels.len() != 1 << bits {
            return None;
        }
        let Some(tiles) = Uniform::new(bits, group, Zero::Symmetric) else { return None };
        let mut padded = [0; 16];
        let mut code = 0;
        while code < levels.len() {
            if levels[code] == i8::MIN {
                return None;
            }
            padded[code] = levels[code];
            code += 1;
        }
        Some(Self { tiles, levels: padded })
    }

    const fn known(bits: u8, group: usize, levels: &[i8]) -> Self {
        match Self::new(bits, group, levels) {
            Some(table) => table,
            None => panic!("no level table"),
        }
    }

    /// The same levels in other groups; `None` if the format has no such groups.
    #[must_use]
    pub const fn with_group(self, group: usize) -> Option<Self> {
        match Uniform::new(self.bits(), group, Zero::Symmetric) {
            Some(tiles) => Some(Self { tiles, levels: self.levels }),
            None => None,
        }
    }

    /// Bits of a code.
    #[must_use]
    pub const fn bits(self) -> u8 {
        self.tiles.bits()
    }

    /// Columns that share a scale.
    #[must_use]
    pub const fn group(self) -> usize {
        self.tiles.group()
    }

    /// The levels, `2^bits` of them, by code.
    #[must_use]
    pub fn levels(&self) -> &[i8] {
        &self.levels[..1 << self.bits()]
    }

    /// The levels by code, then zeros: a register of bytes for a shuffle.
    #[must_use]
    pub const fn register(&self) -> &[i8; 16] {
        &self.levels
    }

    /// The uniform codes in whose tiles these lie: planes, scales and sizes are theirs, values are not.
    #[must_use]
    pub const fn tiles(self) -> Uniform {
        self.tiles
    }

    /// The value of `code` under `scale`: the definition, in `f32`. Exact for a scale that was an f16.
    ///
    /// # Panics
    /// If the code has more bits than the table's.
    #[inline]
    #[must_use]
    pub fn dequantise(&self, code: u8, scale: f32) -> f32 {
        f32::from(self.levels()[usize::from(code)]) * scale
    }

    /// The code whose value under `scale` is nearest to `weight`, the lowest such code.
    #[must_use]
    pub fn nearest(&self, weight: f32, scale: f32) -> u8 {
        let mut best = (0, f32::INFINITY);
        for (code, &level) in self.levels().iter().enumerate() {
            let error = (weight - f32::from(level) * scale).abs();
            if error < best.1 {
                best = (code as u8, error);
            }
        }
        best.0
    }

    /// The f16 scale under which the largest weight gets the level of largest magnitude, sign included: the
    /// scale is negative where those two differ in sign. 0 where weights or levels are.
    #[must_use]
    pub fn spanning_scale(&self, weights: &[f32]) -> u16 {
        let weight = weights.iter().fold(0.0f32, |most, &w| if w.abs() > most.abs() { w } else { most });
        let level = self.levels().iter().fold(0i8, |most, &l| if l.abs() > most.abs() { l } else { most });
        if level == 0 || weight == 0.0 { 0 } else { f32_to_f16(weight / f32::from(level)) }
    }

    /// Codes one group under a given f16 scale, each weight by its nearest level; `codes` is as long as
    /// `weights`.
    pub fn encode_group(&self, weights: &[f32], scale: u16, codes: &mut [u8]) {
        let scale = f16_to_f32(scale);
        for (code, &weight) in codes.iter_mut().zip(weights) {
            *code = self.nearest(weight, scale);
        }
    }

    /// Writes one block of up to 32 rows with spanning scales; as [`Uniform::encode_block`].
    ///
    /// # Panics
    /// If a length does not match.
    pub fn encode_block(&self, weights: &[f32], cols: usize, out: &mut [u8]) {
        encode_tiles(self.tiles, weights, cols, out, |weights, codes| {
            let scale = self.spanning_scale(weights);
            self.encode_group(weights, scale, codes);
            (scale, 0)
        });
    }

    /// Reads row `row` (0..32) of a block back as `f32`; `out` is `[cols]`.
    pub fn decode_row(&self, block: &[u8], row: usize, out: &mut [f32]) {
        let group = self.group();
        for (tile, out) in block.chunks_exact(self.tiles.tile_bytes()).zip(out.chunks_mut(group)) {
            let (scale, _) = self.tiles.scale(tile, row);
            for (col, value) in out.iter_mut().enumerate() {
                *value = self.dequantise(tile::code(tile, self.bits(), group, row, col), scale);
            }
        }
    }
}

impl From<Uniform> for Encoding {
    fn from(uniform: Uniform) -> Self {
        Self::Uniform(uniform)
    }
}

impl From<Table> for Encoding {
    fn from(table: Table) -> Self {
        Self::Table(table)
    }
}

impl std::fmt::Display for Table {
    /// `mxfp4/32`, `iq4_nl/32`, and `t4/64` for other levels: a label for people, which does not tell one fitted
    /// table from another.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.levels == Self::MXFP4.levels && self.bits() == 4 {
            write!(f, "mxfp4/{}", self.group())
        } else if self.levels == Self::IQ4_NL.levels && self.bits() == 4 {
            write!(f, "iq4_nl/{}", self.group())
        } else {
            write!(f, "t{}/{}", self.bits(), self.group())
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::tile::ROWS;

    fn tables() -> impl Strategy<Value = Table> {
        (2u8..=4, prop::sample::select(vec![16usize, 32, 64, 128]))
            .prop_flat_map(|(bits, group)| {
                (Just(bits), Just(group), prop::collection::vec(-127i8..=127, 1 << bits))
            })
            .prop_map(|(bits, group, levels)| Table::new(bits, group, &levels).expect("valid"))
    }

    #[test]
    fn only_whole_tables_of_levels_that_can_be_negated_are_taken() {
        assert!(Table::new(2, 64, &[-3, -1, 1, 3]).is_some());
        assert!(Table::new(2, 64, &[-3, -1, 1]).is_none());
        assert!(Table::new(2, 64, &[0; 16]).is_none());
        assert!(Table::new(4, 64, &[0; 4]).is_none());
        assert!(Table::new(5, 64, &[0; 32]).is_none());
        assert!(Table::new(1, 64, &[0; 2]).is_none());
        assert!(Table::new(2, 48, &[0; 4]).is_none());
        assert!(Table::new(2, 64, &[-127, 127, 0, 0]).is_some());
        assert!(Table::new(2, 64, &[0, 0, 0, -128]).is_none());
    }

    #[test]
    fn known_tables_are_what_their_publications_say() {
        // E2M1 from its definition: sign, two bits of exponent with bias 1, one of mantissa.
        for code in 0..16u8 {
            let (exponent, mantissa) = (i32::from(code >> 1 & 3), f32::from(code & 1));
            let magnitude = match exponent {
                0 => mantissa * 0.5,
                e => (1.0 + mantissa * 0.5) * 2f32.powi(e - 1),
            };
            let value = if code & 8 == 0 { magnitude } else { -magnitude };
            assert_eq!(Table::MXFP4.dequantise(code, 0.5), value);
        }
        let levels = Table::IQ4_NL.levels();
        assert!(levels.is_sorted() && levels.len() == 16);
        assert_eq!(Table::MXFP4.to_string(), "mxfp4/32");
        assert_eq!(Table::IQ4_NL.with_group(64).expect("a group").to_string(), "iq4_nl/64");
        assert_eq!(Table::new(3, 64, &[0; 8]).expect("valid").to_string(), "t3/64");
    }

    #[test]
    fn the_largest_weight_gets_the_farthest_level_whatever_their_signs() {
        let table = Table::IQ4_NL;
        for sign in [1.0, -1.0] {
            let weights = [0.25 * sign, -12.7 * sign, 11.3 * sign, 0.0];
            let scale = table.spanning_scale(&weights);
            let mut codes = [0; 4];
            table.encode_group(&weights, scale, &mut codes);
            assert_eq!((codes[1], codes[2]), (0, 15));
            assert_eq!(f16_to_f32(scale) > 0.0, sign > 0.0);
        }
        assert_eq!(table.spanning_scale(&[0.0; 4]), 0);
        assert_eq!(Table::new(2, 16, &[0; 4]).expect("valid").spanning_scale(&[1.0]), 0);
    }

    proptest! {
        /// Weights that are levels times a scale come back as they were, from any place of a tensor.
        #[test]
        fn what_a_table_can_say_it_says_exactly(
            table in tables(),
            shape in (1usize..70, 1usize..300),
            seed in any::<u64>(),
        ) {
            let (rows, cols) = shape;
            let mut state = seed | 1;
            let mut next = |n: usize| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 33) as usize % n
            };
            let groups = cols.div_ceil(table.group());
            // Any finite f16, of either sign, subnormals included.
            let scales: Vec<u16> = (0..rows * groups).map(|_| (next(0x7c00) | next(2) << 15) as u16).collect();
            let codes: Vec<u8> = (0..rows * cols).map(|_| next(1 << table.bits()) as u8).collect();
            let encoding = Encoding::from(table);
            let tiles = table.tiles();
            let mut bytes = vec![0; encoding.tensor_bytes(rows, cols).expect("small")];
            for row in 0..rows {
                for g in 0..groups {
                    let at = (row / ROWS * groups + g) * tiles.tile_bytes();
                    let columns = g * table.group()..cols.min((g + 1) * table.group());
                    let weights: Vec<f32> = columns
                        .map(|col| {
                            let level = table.levels()[usize::from(codes[row * cols + col])];
                            f32::from(level) * f16_to_f32(scales[row * groups + g])
                        })
                        .collect();
                    let mut found = vec![0; weights.len()];
                    table.encode_group(&weights, scales[row * groups + g], &mut found);
                    let tile = &mut bytes[at..at + tiles.tile_bytes()];
                    tiles.write_row(tile, row % ROWS, &found, scales[row * groups + g], 0);
                }
            }
            let mut values = vec![0.0; cols];
            for row in 0..rows {
                encoding.decode_row(&bytes, cols, row, &mut values);
                for (col, &value) in values.iter().enumerate() {
                    let scale = f16_to_f32(scales[row * groups + col / table.group()]);
                    let level = table.levels()[usize::from(codes[row * cols + col])];
                    prop_assert_eq!(f64::from(value), f64::from(level) * f64::from(scale));
                }
            }
        }

        /// No other level would have been nearer, and a tensor's bytes are the same in runs of whole blocks.
        #[test]
        fn weights_get_their_nearest_level(
            table in tables(),
            weights in prop::collection::vec(-4.0f32..4.0, 70 * 33),
        ) {
            let (rows, cols) = (70, 33);
            let encoding = Encoding::from(table);
            let mut bytes = vec![0xaa; encoding.tensor_bytes(rows, cols).expect("small")];
            encoding.encode(&weights, cols, &mut bytes);
            let mut values = vec![0.0; cols];
            for row in 0..rows {
                encoding.decode_row(&bytes, cols, row, &mut values);
                for (g, group) in weights[row * cols..(row + 1) * cols].chunks(table.group()).enumerate() {
                    let scale = f16_to_f32(table.spanning_scale(group));
                    for (i, &weight) in group.iter().enumerate() {
                        let error = (values[g * table.group() + i] - weight).abs();
                        let least = table.levels().iter().map(|&l| (f32::from(l) * scale - weight).abs());
                        prop_assert_eq!(error, least.fold(f32::INFINITY, f32::min));
                    }
                }
            }
            let mut runs = Vec::new();
            for run in weights.chunks(32 * cols) {
                let mut part = vec![0; encoding.tensor_bytes(run.len() / cols, cols).expect("small")];
                encoding.encode(run, cols, &mut part);
                runs.extend(part);
            }
            prop_assert_eq!(bytes, runs);
        }
    }
}
