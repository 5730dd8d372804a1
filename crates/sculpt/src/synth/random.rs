//! Random numbers that are the same on every machine, and tensors full of them.

use smoe_format::half::{f32_to_bf16, f32_to_f16};
use smoe_format::tile::ROWS;
use smoe_format::{Encoding, Uniform};

/// What the names of random streams begin with.
pub(crate) mod stream_of {
    pub const EXPERT: u64 = 1;
    pub const BACKBONE: u64 = 2;
    /// The embedding's parts.
    pub const COMMON: u64 = 3;
    pub const TOPIC: u64 = 4;
    pub const TOKEN: u64 = 5;
    /// Token ids.
    pub const STREAM: u64 = 6;
    /// Logits that are drawn to learn what they give.
    pub const SKEW: u64 = 7;
    pub const OVERLAP: u64 = 8;
    pub const PREDICT: u64 = 9;
    pub const PREDICT_TOKEN: u64 = 10;
    /// Places of experts in groups.
    pub const SKEW_PLACE: u64 = 11;
}

/// SplitMix64 (Steele, Lea, Flood 2014): a counter and a hash, so that a stream can begin anywhere.
#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

impl Random {
    /// The stream called `name`: other names give streams that have nothing in common.
    pub fn new(name: &[u64]) -> Self {
        let mut stream = Self(0);
        for &part in name {
            stream.0 ^= part;
            stream.0 = stream.next();
        }
        stream
    }

    #[inline]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(STEP);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform below `n`, which is above 0.
    pub fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(n)) >> 64) as u64
    }

    /// Nearly normal, variance 1: the sum of four uniform numbers of 16 bits. It ends at 3.46, which a sum of
    /// hundreds of them does not show.
    #[inline]
    pub fn weight(&mut self) -> f32 {
        let x = self.next();
        let sum = (x & 0xffff) + (x >> 16 & 0xffff) + (x >> 32 & 0xffff) + (x >> 48);
        // Variance 4 (2^32 - 1) / 12; mean 2 * 65535.
        (sum as i64 - 131_070) as f32 * 2.642_9e-5
    }

    /// Nearly normal, variance 1, with tails up to 6: the sum of twelve uniform numbers.
    #[inline]
    pub fn normal(&mut self) -> f32 {
        let mut sum = 0;
        for _ in 0..3 {
            let x = self.next();
            sum += (x & 0xffff) + (x >> 16 & 0xffff) + (x >> 32 & 0xffff) + (x >> 48);
        }
        // Variance 12 (2^32 - 1) / 12; mean 6 * 65535.
        (sum as i64 - 393_210) as f32 * (1.0 / 65536.0)
    }

    fn fill(&mut self, bytes: &mut [u8]) {
        let mut words = bytes.chunks_exact_mut(8);
        for word in &mut words {
            word.copy_from_slice(&self.next().to_le_bytes());
        }
        let rest = words.into_remainder();
        let last = self.next().to_le_bytes();
        rest.copy_from_slice(&last[..rest.len()]);
    }

    /// Whole rows of a tensor with random weights of the given deviation: `out` is as long as `encoding` has
    /// it for them. Codes are uniform, the scale is one constant; padding is as FORMAT.md wants it.
    pub fn rows(&mut self, encoding: Encoding, rows: usize, cols: usize, deviation: f32, out: &mut [u8]) {
        match encoding {
            Encoding::Uniform(u) => {
                // Codes 0 to m mean -1 to 1 in m equal steps: variance (m + 2) / 3m.
                let m = f32::from(u.max_code());
                self.tiles(u, rows, cols, deviation / ((m + 2.0) / (3.0 * m)).sqrt(), out);
            }
            Encoding::Table(t) => {
                let power = t.levels().iter().map(|&level| f32::from(level).powi(2)).sum::<f32>();
                let rms = (power / t.levels().len() as f32).sqrt();
                self.tiles(t.tiles(), rows, cols, deviation / rms.max(1.0), out);
            }
            Encoding::Bf16 => {
                // Random sign and fraction under one exponent: 1.5275 times the power of two, rms.
                let power = (deviation * (std::f32::consts::SQRT_2 / 1.5275)).to_bits() >> 23;
                self.fill(out);
                for value in out.chunks_exact_mut(2) {
                    let half = u16::from_le_bytes([value[0], value[1]]);
                    value.copy_from_slice(&(half & 0x807f | (power as u16) << 7).to_le_bytes());
                }
            }
            Encoding::F16 | Encoding::F32 => unreachable!("synthetic sources are bf16"),
        }
    }

    fn tiles(&mut self, u: Uniform, rows: usize, cols: usize, scale: f32, out: &mut [u8]) {
        let scale = f32_to_f16(scale);
        let tiles = out.chunks_exact_mut(u.tile_bytes());
        for (i, tile) in tiles.enumerate() {
            let (block, group) = (i / u.groups(cols), i % u.groups(cols));
            let rows = ROWS.min(rows - block * ROWS);
            let cols = u.group().min(cols - group * u.group());
            if rows == ROWS && cols == u.group() {
                let (codes, scales) = tile.split_at_mut(u.code_bytes());
                self.fill(codes);
                for bytes in scales.chunks_exact_mut(2) {
                    bytes.copy_from_slice(&scale.to_le_bytes());
                }
                continue;
            }
            tile.fill(0);
            let mut codes = [0; 128];
            for row in 0..rows {
                self.fill(&mut codes[..cols]);
                codes[..cols].iter_mut().for_each(|code| *code &= u.max_code());
                u.write_row(tile, row, &codes[..cols], scale, 0);
            }
        }
    }
}

/// The bytes of `value` in bf16, `n` times.
pub(crate) fn constant(value: f32, n: usize, out: &mut Vec<u8>) {
    out.clear();
    for _ in 0..n {
        out.extend_from_slice(&f32_to_bf16(value).to_le_bytes());
    }
}
