//! Checkpoints in memory as GGUF files, and blocks of each of ggml's types, built from the numbers that they mean.
#![allow(dead_code, clippy::unwrap_used, reason = "each test uses a part")]

use std::collections::BTreeMap;

use serde_json::Value;
use smoe_format::half::{f16_to_f32, f32_to_f16};
use smoe_testkit::gguf::{self, Gguf};

use super::common::{Random, Tensor};

/// llama.cpp's file of a checkpoint in memory.
pub fn of_checkpoint(config: &Value, tensors: &BTreeMap<String, Tensor>, split_heads: bool) -> Gguf {
    let raw = |(name, t): (&String, &Tensor)| {
        let (dtype, shape, bytes) = (t.dtype.clone(), t.shape.clone(), t.bytes.clone());
        (name.clone(), gguf::Tensor { dtype, shape, bytes })
    };
    gguf::of_checkpoint(config, &tensors.iter().map(raw).collect(), split_heads)
}

/// A type of blocks: its number, name, weights of a block.
pub const KINDS: [(u32, &str, usize); 10] = [
    (2, "Q4_0", 32),
    (3, "Q4_1", 32),
    (6, "Q5_0", 32),
    (7, "Q5_1", 32),
    (8, "Q8_0", 32),
    (12, "Q4_K", 256),
    (13, "Q5_K", 256),
    (14, "Q6_K", 256),
    (20, "IQ4_NL", 32),
    (39, "MXFP4", 32),
];

/// Random blocks of a type for `n` weights, and what they mean by the formulas of ggml's documentation.
pub fn blocks(kind: &str, n: usize, random: &mut Random) -> (Vec<u8>, Vec<f32>) {
    let weights = KINDS.iter().find(|k| k.1 == kind).unwrap().2;
    let (mut bytes, mut values) = (Vec::new(), Vec::new());
    for _ in 0..n / weights {
        let (block, of_block) = block(kind, random);
        assert_eq!(of_block.len(), weights);
        bytes.extend(block);
        values.extend(of_block);
    }
    (bytes, values)
}

fn block(kind: &str, random: &mut Random) -> (Vec<u8>, Vec<f32>) {
    let mut half = |signed: bool| {
        let x = (random.below(2000) as f32 + 1.0) * 1e-5;
        let bits = f32_to_f16(if signed && random.below(2) == 0 { -x } else { x });
        (bits.to_le_bytes(), f16_to_f32(bits))
    };
    let ((d_bytes, d), (m_bytes, m)) = (half(true), half(true));
    let q = |random: &mut Random, n: u64| -> Vec<u8> { (0..32).map(|_| random.below(n) as u8).collect() };
    let low_high = |q: &[u8]| (0..16).map(|i| (q[i] & 15) | (q[i + 16] & 15) << 4).collect::<Vec<u8>>();
    let fifth = |q: &[u8]| {
        let bits = q.iter().enumerate().fold(0u32, |bits, (i, q)| bits | u32::from(q >> 4) << i);
        bits.to_le_bytes().to_vec()
    };
    let with = |q: &[u8], f: &dyn Fn(u8) -> f32| q.iter().map(|&q| f(q)).collect::<Vec<f32>>();
    match kind {
        "Q4_0" => {
            let q = q(random, 16);
            let values = with(&q, &|q| d * (f32::from(q) - 8.0));
            ([&d_bytes[..], &low_high(&q)].concat(), values)
        }
        "Q4_1" => {
            let q = q(random, 16);
            let values = with(&q, &|q| d * f32::from(q) + m);
            ([&d_bytes[..], &m_bytes, &low_high(&q)].concat(), values)
        }
        "Q5_0" => {
            let q = q(random, 32);
            let values = with(&q, &|q| d * (f32::from(q) - 16.0));
            ([&d_bytes[..], &fifth(&q), &low_high(&q)].concat(), values)
        }
        "Q5_1" => {
            let q = q(random, 32);
            let values = with(&q, &|q| d * f32::from(q) + m);
            ([&d_bytes[..], &m_bytes, &fifth(&q), &low_high(&q)].concat(), values)
        }
        "Q8_0" => {
            let q = q(random, 256);
            let values = with(&q, &|q| d * f32::from(q as i8));
            ([&d_bytes[..], &q].concat(), values)
        }
        "IQ4_NL" => {
            let levels = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
            let q = q(random, 16);
            let values = with(&q, &|q| d * levels[usize::from(q)] as f32);
            ([&d_bytes[..], &low_high(&q)].concat(), values)
        }
        "MXFP4" => {
            let levels = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
            let (e, q) = (110 + random.below(18) as u8, q(random, 16));
            let power = 2f32.powi(i32::from(e) - 127);
            let sign = |q: u8| if q < 8 { 1.0 } else { -1.0 };
            let values = with(&q, &|q| sign(q) * levels[usize::from(q & 7)] * power);
            ([&[e][..], &low_high(&q)].concat(), values)
        }
        "Q4_K" | "Q5_K" => {
            let five = kind == "Q5_K";
            let (mut scales, mut minima) = ([0u8; 8], [0u8; 8]);
            let (mut values, mut qs) = (Vec::new(), Vec::new());
            for i in 0..8 {
                (scales[i], minima[i]) = (random.below(64) as u8, random.below(64) as u8);
                let q = q(random, if five { 32 } else { 16 });
                let (scale, minimum) = (d * f32::from(scales[i]), m * f32::from(minima[i]));
                values.extend(q.iter().map(|&q| scale * f32::from(q) - minimum));
                qs.push(q);
            }
            let mut bytes = [d_bytes, m_bytes].concat();
            bytes.extend((0..4).map(|i| scales[i] | scales[i + 4] >> 4 << 6));
            bytes.extend((0..4).map(|i| minima[i] | minima[i + 4] >> 4 << 6));
            bytes.extend((0..4).map(|i| (scales[i + 4] & 15) | (minima[i + 4] & 15) << 4));
            if five {
                bytes.extend((0..32).map(|j| (0..8).fold(0, |b, i| b | qs[i][j] >> 4 << i)));
            }
            for pair in qs.chunks_exact(2) {
                bytes.extend((0..32).map(|j| (pair[0][j] & 15) | (pair[1][j] & 15) << 4));
            }
            (bytes, values)
        }
        "Q6_K" => {
            let (mut low, mut high) = (vec![0u8; 128], vec![0u8; 64]);
            let scales: Vec<i8> = (0..16).map(|_| random.below(256) as u8 as i8).collect();
            let mut values = Vec::new();
            for n in 0..256 {
                let q = random.below(64) as u8;
                let (part, quarter, j) = (n / 128, n / 32 % 4, n % 32);
                low[part * 64 + (quarter % 2) * 32 + j] |= (q & 15) << (quarter / 2 * 4);
                high[part * 32 + j] |= (q >> 4) << (quarter * 2);
                values.push(d * f32::from(scales[n / 16]) * (f32::from(q) - 32.0));
            }
            let scales: Vec<u8> = scales.into_iter().map(|s| s as u8).collect();
            ([low, high, scales, d_bytes.to_vec()].concat(), values)
        }
        other => panic!("{other}"),
    }
}
