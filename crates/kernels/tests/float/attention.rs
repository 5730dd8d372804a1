use proptest::prelude::*;
use smoe_format::half::{f16_to_f32, f32_to_f16};
use smoe_kernels::{Kernels, KvBlocks, KvPlane, KvRun, KvType};

use crate::{Numbers, assert_close, bits, lengths, same_bits};

const TYPES: [KvType; 3] = [KvType::F32, KvType::F16, KvType::Q8];

fn store(k: Kernels, ty: KvType, rows: &[f32], dim: usize) -> Vec<u8> {
    let size = ty.row_bytes(dim);
    let mut bytes = vec![0; rows.len() / dim * size];
    for (x, out) in rows.chunks(dim).zip(bytes.chunks_mut(size)) {
        k.store_kv_row(ty, x, out);
    }
    bytes
}

/// What a row says, by the words of the documentation.
fn read(ty: KvType, row: &[u8], dim: usize) -> Vec<f64> {
    let word = |at: usize| f32::from_le_bytes(row[at..at + 4].try_into().expect("four bytes"));
    let half = |at: usize| f16_to_f32(u16::from_le_bytes([row[at], row[at + 1]]));
    (0..dim)
        .map(|i| match ty {
            KvType::F32 => f64::from(word(4 * i)),
            KvType::F16 => f64::from(half(2 * i)),
            KvType::Q8 => f64::from(row[i] as i8) * f64::from(word(row.len() - 4)),
        })
        .collect()
}

#[test]
fn rows_are_multiples_of_16_bytes() {
    assert_eq!(TYPES.map(|ty| ty.row_bytes(128)), [512, 256, 144]);
    assert_eq!(TYPES.map(|ty| ty.row_bytes(12)), [48, 32, 16]);
    assert_eq!(TYPES.map(|ty| ty.row_bytes(13)), [64, 32, 32]);
}

#[test]
fn stored_rows_have_the_same_bytes_everywhere_and_are_near_what_was_stored() {
    let mut numbers = Numbers(20);
    let all = Kernels::available();
    for ty in TYPES {
        for dim in lengths() {
            for x in [numbers.units(dim), numbers.any(dim)] {
                let scalar = store(all[0], ty, &x, dim);
                for &k in &all {
                    assert_eq!(store(k, ty, &x, dim), scalar, "{ty:?} {k:?} {x:?}");
                }
            }
            let x = numbers.units(dim);
            let absmax = x.iter().fold(0.0f32, |m, x| m.max(x.abs()));
            let tolerance = match ty {
                KvType::F32 => 0.0,
                KvType::F16 => 2f64.powi(-12),
                KvType::Q8 => f64::from(absmax) / 127.0 * 0.5001,
            };
            for (&x, value) in x.iter().zip(read(ty, &store(all[0], ty, &x, dim), dim)) {
                assert_close(x, value, tolerance, "stored value");
            }
        }
    }
}

#[test]
fn every_f16_and_its_neighbours_are_stored_alike() {
    for half in (0..=u16::MAX).step_by(32) {
        let x: Vec<f32> = (half..=half + 31)
            .flat_map(|half| {
                let wide = f16_to_f32(half);
                [0, 1, 0x0fff, 0x1000, 0x1001].map(|d| f32::from_bits(wide.to_bits().wrapping_add(d)))
            })
            .collect();
        for k in Kernels::available() {
            let stored = store(k, KvType::F16, &x, x.len());
            for (bytes, &x) in stored.chunks(2).zip(&x) {
                assert_eq!([bytes[0], bytes[1]], f32_to_f16(x).to_le_bytes(), "{k:?} {:#x}", x.to_bits());
            }
        }
    }
}

#[test]
fn q8_rows_at_the_ends_of_the_range() {
    for k in Kernels::available() {
        let row = |x: &[f32]| read(KvType::Q8, &store(k, KvType::Q8, x, x.len()), x.len());
        assert_eq!(row(&[0.0, -0.0]), [0.0, 0.0]);
        assert_eq!(row(&[1e-40, -3e-38]), [0.0, 0.0]);
        assert!(row(&[1.0, f32::NAN]).iter().all(|v| v.is_nan()));
        assert!(row(&[1.0, f32::NEG_INFINITY]).iter().all(|v| v.is_nan()));
        let large = row(&[f32::MAX, -f32::MAX, 0.0]);
        assert!(large[0] > 3.4e38 && large[1] < -3.4e38 && large[2] == 0.0);
    }
}

#[test]
fn scores_and_values_of_many_queries_are_those_of_single_ones() {
    let mut numbers = Numbers(21);
    for ty in TYPES {
        for (dim, n, n_q) in [(64, 16, 8), (128, 5, 3), (80, 7, 5), (33, 3, 2), (7, 1, 1), (300, 9, 6)] {
            let rows = numbers.units(n * dim);
            let bytes = store(Kernels::available()[0], ty, &rows, dim);
            let run = KvRun { ty, bytes: &bytes, row_bytes: ty.row_bytes(dim) };
            let (q, start) = (numbers.units(n_q * dim), numbers.units(n_q * dim));
            let stride = n + 3;
            let scores = same_bits("scores", |k| {
                let mut scores = vec![9.0; n_q * stride];
                k.attend_scores(&q, dim, run, 0.3, &mut scores, stride);
                scores
            });
            let acc = same_bits("values", |k| {
                let mut acc = start.clone();
                k.attend_values(&scores, stride, run, &mut acc, dim);
                acc
            });
            let k = Kernels::detect();
            for (i, query) in q.chunks(dim).enumerate() {
                let mut single = vec![0.0; n];
                k.attend_scores(query, dim, run, 0.3, &mut single, n);
                assert_eq!(bits(&scores[i * stride..][..n]), bits(&single));
                assert_eq!(scores[i * stride + n..][..3], [9.0; 3]);
                let mut sum = start[i * dim..][..dim].to_vec();
                k.attend_values(&single, n, run, &mut sum, dim);
                assert_eq!(bits(&acc[i * dim..][..dim]), bits(&sum));
                for (d, &out) in sum.iter().enumerate() {
                    let weighted = |p: usize| {
                        let row = read(ty, &bytes[p * run.row_bytes..][..run.row_bytes], dim);
                        f64::from(single[p]) * row[d]
                    };
                    let expected = f64::from(start[i * dim + d]) + (0..n).map(weighted).sum::<f64>();
                    assert_close(out, expected, 1e-5, "values");
                }
            }
        }
    }
}

/// A cache of scattered blocks that holds `keys` and `values` of `heads` kv heads, `[positions, heads, dim]`.
struct Cache {
    ty: KvType,
    keys: Vec<u8>,
    values: Vec<u8>,
    table: Vec<u32>,
    block_positions: usize,
    dims: (usize, usize),
    heads: usize,
}

impl Cache {
    fn new(
        ty: KvType,
        block_positions: usize,
        heads: usize,
        dims: (usize, usize),
        keys: &[f32],
        values: &[f32],
    ) -> Self {
        let positions = keys.len() / (heads * dims.0);
        let blocks = positions.div_ceil(block_positions);
        // Backwards, with a hole before each block.
        let table: Vec<u32> = (0..blocks as u32).rev().map(|b| 2 * b + 1).collect();
        let plane = |x: &[f32], dim: usize| {
            let size = ty.row_bytes(dim);
            let mut bytes = vec![0xee; (2 * blocks + 1) * block_positions * heads * size];
            for (i, x) in x.chunks(dim).enumerate() {
                let (p, h) = (i / heads, i % heads);
                let block = table[p / block_positions] as usize;
                let row = (block * heads + h) * block_positions + p % block_positions;
                Kernels::detect().store_kv_row(ty, x, &mut bytes[row * size..][..size]);
            }
            bytes
        };
        let (keys, values) = (plane(keys, dims.0), plane(values, dims.1));
        Self { ty, keys, values, table, block_positions, dims, heads }
    }

    fn head(&self, head: usize) -> KvBlocks<'_> {
        let plane = |bytes, dim| {
            let row_bytes = self.ty.row_bytes(dim);
            let head_bytes = self.block_positions * row_bytes;
            KvPlane {
                ty: self.ty,
                bytes,
                row_bytes,
                block_stride: self.heads * head_bytes,
                head_offset: head * head_bytes,
            }
        };
        KvBlocks {
            keys: plane(&self.keys, self.dims.0),
            values: plane(&self.values, self.dims.1),
            table: &self.table,
            block_positions: self.block_positions,
        }
    }
}

fn attend(
    k: Kernels,
    q: &[f32],
    cache: &Cache,
    head: usize,
    visible: std::ops::Range<usize>,
    sinks: Option<&[f32]>,
) -> Vec<f32> {
    let n_q = q.len() / cache.dims.0;
    let mut scores = vec![f32::NAN; n_q * visible.len()];
    let mut out = vec![f32::NAN; n_q * cache.dims.1];
    k.attention(q, cache.dims.0, cache.head(head), visible, 0.125, sinks, &mut scores, &mut out);
    out
}

/// Softmax attention in f64, one output element at a time, over what is stored.
fn expected(
    ty: KvType,
    q: &[f32],
    keys: &[f32],
    values: &[f32],
    dims: (usize, usize),
    sink: Option<f32>,
) -> Vec<f64> {
    let scalar = Kernels::available()[0];
    let rows = |x: &[f32], dim| -> Vec<Vec<f64>> {
        let size = ty.row_bytes(dim);
        store(scalar, ty, x, dim).chunks(size).map(|row| read(ty, row, dim)).collect()
    };
    let (keys, values) = (rows(keys, dims.0), rows(values, dims.1));
    let e: Vec<f64> = keys
        .iter()
        .map(|k| (k.iter().zip(q).map(|(k, &q)| k * f64::from(q)).sum::<f64>() * 0.125).exp())
        .collect();
    let total = e.iter().sum::<f64>() + sink.map_or(0.0, |s| f64::from(s).exp());
    (0..dims.1).map(|d| values.iter().zip(&e).map(|(v, e)| v[d] * e / total).sum()).collect()
}

#[test]
fn attention_is_near_f64_and_the_same_for_every_block_size() {
    let mut numbers = Numbers(22);
    for ty in TYPES {
        for (dims, heads, n_q, positions) in
            [((64, 64), 2, 4, 37), ((40, 24), 1, 1, 5), ((96, 128), 3, 7, 70)]
        {
            let keys = numbers.units(positions * heads * dims.0);
            let values = numbers.units(positions * heads * dims.1);
            let q: Vec<f32> = numbers.units(n_q * dims.0).iter().map(|q| q * 4.0).collect();
            let sinks = numbers.units(n_q);
            for sinks in [None, Some(&sinks[..])] {
                for head in 0..heads {
                    let outs: Vec<Vec<f32>> = [positions, 1, 3, 16, 64]
                        .iter()
                        .map(|&block| {
                            let cache = Cache::new(ty, block, heads, dims, &keys, &values);
                            same_bits("attention", |k| attend(k, &q, &cache, head, 0..positions, sinks))
                        })
                        .collect();
                    outs.iter().for_each(|out| assert_eq!(bits(out), bits(&outs[0])));
                    let of_head = |x: &[f32], dim: usize| -> Vec<f32> {
                        x.chunks(dim).skip(head).step_by(heads).flatten().copied().collect()
                    };
                    let (keys, values) = (of_head(&keys, dims.0), of_head(&values, dims.1));
                    for (i, q) in q.chunks(dims.0).enumerate() {
                        let sink = sinks.map(|s| s[i]);
                        let expected = expected(ty, q, &keys, &values, dims, sink);
                        for (&out, expected) in outs[0][i * dims.1..].iter().zip(expected) {
                            assert_close(out, expected, 5e-6, "attention");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn a_sliding_window_is_attention_on_the_cut_cache() {
    let mut numbers = Numbers(23);
    let (dims, n_q, positions) = ((64, 64), 3, 50);
    let (keys, values) = (numbers.units(positions * 64), numbers.units(positions * 64));
    let q = numbers.units(n_q * 64);
    for ty in TYPES {
        let cache = Cache::new(ty, 8, 1, dims, &keys, &values);
        for window in [0..1, 7..9, 8..16, 13..50, 49..50, 0..50] {
            let range = window.start * 64..window.end * 64;
            let cut = Cache::new(ty, 16, 1, dims, &keys[range.clone()], &values[range]);
            for k in Kernels::available() {
                let seen = attend(k, &q, &cache, 0, window.clone(), None);
                let alone = attend(k, &q, &cut, 0, 0..window.len(), None);
                assert_eq!(bits(&seen), bits(&alone), "{ty:?} {window:?} {k:?}");
            }
        }
    }
}

#[test]
fn values_may_be_the_first_elements_of_the_keys() {
    let mut numbers = Numbers(24);
    let (dim, value_dim, positions, n_q) = (80, 64, 21, 4);
    let keys = numbers.units(positions * dim);
    let q = numbers.units(n_q * dim);
    for ty in TYPES {
        let cache = Cache::new(ty, 8, 1, (dim, dim), &keys, &keys);
        let blocks = KvBlocks { values: cache.head(0).keys, ..cache.head(0) };
        same_bits("latent", |k| {
            let mut scores = vec![0.0; n_q * positions];
            let mut out = vec![0.0; n_q * value_dim];
            k.attention(&q, dim, blocks, 0..positions, 0.125, None, &mut scores, &mut out);
            let whole = attend(k, &q, &cache, 0, 0..positions, None);
            for (out, whole) in out.chunks(value_dim).zip(whole.chunks(dim)) {
                assert_eq!(bits(out), bits(&whole[..value_dim]), "{ty:?} {k:?}");
            }
            out
        });
    }
}

#[test]
fn wrong_shapes_panic() {
    let cache = Cache::new(KvType::F16, 8, 1, (16, 16), &[0.0; 160], &[0.0; 160]);
    let call = |q: usize, visible: std::ops::Range<usize>, scores: usize, out: usize, row_bytes: usize| {
        let mut blocks = cache.head(0);
        blocks.keys.row_bytes = row_bytes;
        std::panic::catch_unwind(move || {
            let (q, mut scores, mut out) = (vec![0.0; q], vec![0.0; scores], vec![0.0; out]);
            Kernels::detect().attention(&q, 16, blocks, visible, 1.0, None, &mut scores, &mut out);
        })
        .is_err()
    };
    assert!(!call(32, 0..10, 20, 32, 32));
    assert!(call(31, 0..10, 20, 32, 32), "queries");
    assert!(call(32, 3..3, 20, 32, 32), "nothing visible");
    assert!(call(32, 0..17, 34, 32, 32), "past the table");
    assert!(call(32, 0..10, 19, 32, 32), "scratch");
    assert!(call(32, 0..10, 20, 34, 32), "values longer than rows");
    assert!(call(32, 0..10, 20, 32, 16), "rows shorter than a head");
    assert!(call(0, 0..10, 20, 0, 32), "no queries");
}

proptest! {
    #[test]
    fn any_shape_has_the_same_bits_everywhere(
        ty in 0usize..3,
        dim in 1usize..140,
        n_q in 1usize..10,
        positions in 1usize..60,
        block in 1usize..20,
        first in 0usize..60,
        seed in any::<u64>(),
    ) {
        let mut numbers = Numbers(seed);
        let first = first % positions;
        let (keys, values) = (numbers.units(positions * dim), numbers.units(positions * dim));
        let q = numbers.units(n_q * dim);
        let cache = Cache::new(TYPES[ty], block, 1, (dim, dim), &keys, &values);
        same_bits("attention", |k| attend(k, &q, &cache, 0, first..positions, None));
    }
}
