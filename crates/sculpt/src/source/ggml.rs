//! The block types of ggml (llama.cpp): bytes to codes with scale and minimum.
//!
//! Each formula is ggml's own, brought to `code * scale + minimum`, or for tables to `level[code] * scale`. That loses
//! nothing: the products are exact in `f32` (11 bits of an f16, at most 7 of a scale's factor or a level and 6 of a
//! code), so that there is one rounding there and here, that of the sum.

use smoe_format::half::f16_to_f32;
use smoe_format::{Encoding, Table};

use super::affine;

/// Weights of a block of the K types.
const SUPER: usize = 256;

/// A type of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(non_camel_case_types, reason = "ggml's names")]
pub(crate) enum Kind {
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q4_K,
    Q5_K,
    Q6_K,
    Iq4Nl,
    Mxfp4,
}

impl Kind {
    /// Those that this build reads.
    pub const ALL: [Self; 10] = [
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q4_K,
        Self::Q5_K,
        Self::Q6_K,
        Self::Iq4Nl,
        Self::Mxfp4,
    ];

    /// Its number in a GGUF file.
    pub const fn number(self) -> u32 {
        match self {
            Self::Q4_0 => 2,
            Self::Q4_1 => 3,
            Self::Q5_0 => 6,
            Self::Q5_1 => 7,
            Self::Q8_0 => 8,
            Self::Q4_K => 12,
            Self::Q5_K => 13,
            Self::Q6_K => 14,
            Self::Iq4Nl => 20,
            Self::Mxfp4 => 39,
        }
    }

    /// ggml's name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q5_0 => "Q5_0",
            Self::Q5_1 => "Q5_1",
            Self::Q8_0 => "Q8_0",
            Self::Q4_K => "Q4_K",
            Self::Q5_K => "Q5_K",
            Self::Q6_K => "Q6_K",
            Self::Iq4Nl => "IQ4_NL",
            Self::Mxfp4 => "MXFP4",
        }
    }

    /// Weights and bytes of a block.
    pub const fn block(self) -> (usize, usize) {
        match self {
            Self::Q4_0 | Self::Iq4Nl => (32, 18),
            Self::Q4_1 => (32, 20),
            Self::Q5_0 => (32, 22),
            Self::Q5_1 => (32, 24),
            Self::Q8_0 => (32, 34),
            Self::Q4_K => (SUPER, 144),
            Self::Q5_K => (SUPER, 176),
            Self::Q6_K => (SUPER, 210),
            Self::Mxfp4 => (32, 17),
        }
    }

    /// Bytes of a row of whole blocks.
    pub const fn row_bytes(self, cols: usize) -> usize {
        let (weights, bytes) = self.block();
        cols / weights * bytes
    }

    /// The codes that it is.
    pub fn encoding(self) -> Encoding {
        let (bits, group) = match self {
            Self::Q4_0 | Self::Q4_1 | Self::Q4_K => (4, 32),
            Self::Q5_0 | Self::Q5_1 | Self::Q5_K => (5, 32),
            Self::Q8_0 => (8, 32),
            Self::Q6_K => (6, 16),
            Self::Iq4Nl => return Encoding::Table(Table::IQ4_NL),
            Self::Mxfp4 => return Encoding::Table(Table::MXFP4),
        };
        affine(bits, group).map(Encoding::Uniform).expect("bits and groups of the format")
    }

    /// Columns that share a scale.
    const fn group(self) -> usize {
        if matches!(self, Self::Q6_K) { 16 } else { 32 }
    }

    /// True if scales are themselves coded, so that they are products with more bits than an f16 has.
    pub const fn is_super_block(self) -> bool {
        matches!(self, Self::Q4_K | Self::Q5_K | Self::Q6_K)
    }

    /// Unpacks whole blocks; `codes` and `levels` are as long as they need.
    pub fn unpack(self, bytes: &[u8], codes: &mut [u8], levels: &mut [[f32; 2]]) {
        let (weights, len) = self.block();
        let groups = weights / self.group();
        let blocks = bytes.chunks_exact(len);
        let out = codes.chunks_exact_mut(weights).zip(levels.chunks_exact_mut(groups));
        for (block, (codes, levels)) in blocks.zip(out) {
            self.unpack_block(block, codes, levels);
        }
    }

    fn unpack_block(self, b: &[u8], codes: &mut [u8], levels: &mut [[f32; 2]]) {
        let half = |at: usize| f16_to_f32(u16::from_le_bytes([b[at], b[at + 1]]));
        match self {
            Self::Q4_0 => {
                nibbles(&b[2..], codes);
                levels[0] = [half(0), -8.0 * half(0)];
            }
            Self::Q4_1 => {
                nibbles(&b[4..], codes);
                levels[0] = [half(0), half(2)];
            }
            Self::Q5_0 => {
                nibbles(&b[6..], codes);
                fifth_bits(&b[2..6], codes);
                levels[0] = [half(0), -16.0 * half(0)];
            }
            Self::Q5_1 => {
                nibbles(&b[8..], codes);
                fifth_bits(&b[4..8], codes);
                levels[0] = [half(0), half(2)];
            }
            Self::Q8_0 => {
                for (code, &q) in codes.iter_mut().zip(&b[2..]) {
                    // Signed to biased by 128.
                    *code = q ^ 0x80;
                }
                levels[0] = [half(0), -128.0 * half(0)];
            }
            Self::Q4_K | Self::Q5_K => {
                let (d, dmin) = (half(0), half(2));
                let (high, low) =
                    if self == Self::Q5_K { (Some(&b[16..48]), &b[48..]) } else { (None, &b[16..]) };
                for (i, (level, codes)) in levels.iter_mut().zip(codes.chunks_exact_mut(32)).enumerate() {
                    let (scale, minimum) = k_scale(&b[4..16], i);
                    *level = [d * scale, -(dmin * minimum)];
                    for (j, code) in codes.iter_mut().enumerate() {
                        *code = (low[i / 2 * 32 + j] >> (i % 2 * 4)) & 15;
                        if let Some(high) = high {
                            *code |= ((high[j] >> i) & 1) << 4;
                        }
                    }
                }
            }
            Self::Q6_K => {
                let d = half(208);
                for (n, code) in codes.iter_mut().enumerate() {
                    let (part, quarter, j) = (n / 128, n % 128 / 32, n % 32);
                    let low = b[part * 64 + quarter % 2 * 32 + j] >> (quarter / 2 * 4);
                    let high = b[128 + part * 32 + j] >> (2 * quarter);
                    *code = (low & 15) | ((high & 3) << 4);
                }
                for (level, &factor) in levels.iter_mut().zip(&b[192..208]) {
                    let scale = d * f32::from(factor as i8);
                    *level = [scale, -32.0 * scale];
                }
            }
            Self::Iq4Nl => {
                nibbles(&b[2..], codes);
                levels[0] = [half(0), 0.0];
            }
            Self::Mxfp4 => {
                nibbles(&b[1..], codes);
                levels[0] = [e8m0_half(b[0]), 0.0];
            }
        }
    }
}

/// Half of 2^(e - 127): the scale of a block with exponent byte `e`, for the levels of MXFP4 are doubled.
pub(crate) fn e8m0_half(e: u8) -> f32 {
    f32::from_bits(if e < 2 { 0x0020_0000 << e } else { (u32::from(e) - 1) << 23 })
}

/// Sixteen bytes: the low nibbles, then the high ones.
fn nibbles(bytes: &[u8], codes: &mut [u8]) {
    let (low, high) = codes.split_at_mut(16);
    for ((low, high), &byte) in low.iter_mut().zip(high).zip(bytes) {
        (*low, *high) = (byte & 15, byte >> 4);
    }
}

fn fifth_bits(bytes: &[u8], codes: &mut [u8]) {
    for (i, code) in codes.iter_mut().enumerate() {
        *code |= ((bytes[i / 8] >> (i % 8)) & 1) << 4;
    }
}

/// The 6-bit factors of scale and minimum of group `i` of eight: the last four borrow the top bits of the
/// first.
fn k_scale(bytes: &[u8], i: usize) -> (f32, f32) {
    let (scale, minimum) = if i < 4 {
        (bytes[i] & 63, bytes[i + 4] & 63)
    } else {
        ((bytes[i + 4] & 15) | (bytes[i - 4] >> 6 << 4), (bytes[i + 4] >> 4) | (bytes[i] >> 6 << 4))
    };
    (f32::from(scale), f32::from(minimum))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::{Codes, Kept, evened};

    /// What the `gguf` package reads out of random blocks (`tests/goldens/ggml.py`).
    const GOLDEN: &[u8] = include_bytes!("../../tests/goldens/ggml.bin");

    fn word(bytes: &mut &[u8]) -> usize {
        let (word, rest) = bytes.split_first_chunk::<4>().expect("a whole golden");
        *bytes = rest;
        u32::from_le_bytes(*word) as usize
    }

    #[test]
    fn blocks_mean_what_ggml_says() {
        let mut golden = GOLDEN;
        let mut seen = 0;
        while !golden.is_empty() {
            let number = word(&mut golden);
            let (n_bytes, n) = (word(&mut golden), word(&mut golden));
            let (blocks, rest) = golden.split_at(n_bytes);
            let (wanted, rest) = rest.split_at(4 * n);
            golden = rest;
            let wanted: Vec<f32> = wanted.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
            let kind =
                Kind::ALL.into_iter().find(|kind| kind.number() as usize == number).expect("a known type");
            assert_eq!(kind.row_bytes(n), n_bytes);
            let encoding = kind.encoding();
            let groups = encoding.tiles().expect("codes").groups(n);
            assert_eq!(groups * kind.group(), n);
            let mut codes = Codes { codes: vec![0; n], levels: vec![[0.0; 2]; groups] };
            kind.unpack(blocks, &mut codes.codes, &mut codes.levels);
            let mut found = vec![0.0; n];
            codes.weights(encoding, n, &mut found);
            // Equal numbers: only the sign of a zero may differ.
            assert_eq!(found, wanted, "{}", kind.name());

            // As they are, and levels of a table as steps.
            let even = match encoding {
                Encoding::Table(table) => Some(Encoding::Uniform(evened(table).0)),
                _ => None,
            };
            for to in [Some(encoding), even].into_iter().flatten() {
                let mut tiles = vec![0; to.tensor_bytes(1, n).expect("small")];
                let kept = codes.tiles(encoding, to, n, &mut tiles);
                to.decode_row(&tiles, n, 0, &mut found);
                // The first two powers of MXFP4's golden are far below f16.
                if kind.is_super_block() || kind == Kind::Mxfp4 {
                    assert_eq!(kept, Kept::Rounded, "{} {to}", kind.name());
                    let power: f32 = wanted.iter().map(|w| w * w).sum();
                    let error: f32 = wanted.iter().zip(&found).map(|(w, f)| (w - f) * (w - f)).sum();
                    assert!(error < 1e-6 * power, "{} {to}: {error} of {power}", kind.name());
                } else {
                    assert_eq!(kept, Kept::Exactly, "{} {to}", kind.name());
                    assert_eq!(found, wanted, "{} {to}", kind.name());
                }
            }
            seen += 1;
        }
        assert_eq!(seen, Kind::ALL.len());
    }

    /// A power of two is a scale if it is an f16, the subnormal ones included; where all weights are zero any is.
    #[test]
    fn powers_of_mxfp4_are_kept_where_f16_has_them() {
        let table = Encoding::Table(Table::MXFP4);
        let steps = Encoding::Uniform(evened(Table::MXFP4).0);
        // 2^-24 is the least f16, 2^15 its largest power; minima are 16 times the scale.
        let cases = [
            (0, 1, Kept::Rounded, Kept::Rounded),
            (0, 0, Kept::Exactly, Kept::Exactly),
            (255, 8, Kept::Exactly, Kept::Exactly),
            (103, 1, Kept::Rounded, Kept::Rounded),
            (104, 1, Kept::Exactly, Kept::Exactly),
            (139, 15, Kept::Exactly, Kept::Exactly),
            (143, 15, Kept::Exactly, Kept::Beyond(-524_288.0)),
            (144, 15, Kept::Beyond(65_536.0), Kept::Beyond(65_536.0)),
        ];
        for (e, code, in_table, in_steps) in cases {
            let mut block = [code << 4 | code; 17];
            block[0] = e;
            let mut codes = Codes { codes: vec![0; 32], levels: vec![[0.0; 2]] };
            Kind::Mxfp4.unpack(&block, &mut codes.codes, &mut codes.levels);
            let mut wanted = [0.0; 32];
            codes.weights(table, 32, &mut wanted);
            for (to, expected) in [(table, in_table), (steps, in_steps)] {
                let mut tiles = vec![0; to.tensor_bytes(1, 32).expect("small")];
                assert_eq!(codes.tiles(table, to, 32, &mut tiles), expected, "{e} {to}");
                if expected == Kept::Exactly {
                    let mut found = [1.0; 32];
                    to.decode_row(&tiles, 32, 0, &mut found);
                    assert_eq!(found, wanted, "{e} {to}");
                }
            }
        }
    }
}
