use proptest::prelude::*;
use smoe_format::Encoding;
use smoe_format::half::f32_to_f16;
use smoe_kernels::{Kernels, Shard};

use crate::{Numbers, assert_close, bits, lengths, same_bits};

const FLOATS: [Encoding; 3] = [Encoding::F32, Encoding::F16, Encoding::Bf16];

/// The order of sums in its other reading: each lane on its own, then the tree by hand.
fn dot_by_lanes(a: &[f32], b: &[f32]) -> f32 {
    let lane = |l: usize| (l..a.len()).step_by(16).fold(0.0f32, |acc, i| a[i].mul_add(b[i], acc));
    let r8 = |l| lane(l) + lane(l + 8);
    let r4 = |l| r8(l) + r8(l + 4);
    let r2 = |l| r4(l) + r4(l + 2);
    r2(0) + r2(1)
}

#[test]
fn dot_sums_in_the_one_order() {
    let mut numbers = Numbers(1);
    for n in [0].into_iter().chain(lengths()) {
        for (a, b) in [
            (numbers.units(n), numbers.units(n)),
            (numbers.any(n), numbers.any(n)),
            (numbers.tiny(n), numbers.tiny(n)),
        ] {
            let dot = same_bits("dot", |k| vec![k.dot(&a, &b)]);
            assert_eq!(bits(&dot), bits(&[dot_by_lanes(&a, &b)]), "{n}");
        }
    }
}

#[test]
fn lanes_past_the_end_keep_a_negative_zero() {
    // All lanes get -1e-60, which rounds to -0, and one more step leaves most of them alone.
    let a = [-1e-30f32; 17];
    let b = [1e-30f32; 17];
    let dot = same_bits("dot", |k| vec![k.dot(&a, &b)]);
    assert_eq!(dot[0].to_bits(), (-0.0f32).to_bits());
}

#[test]
fn dot_is_near_the_f64_sum() {
    let mut numbers = Numbers(2);
    for n in lengths() {
        let (a, b) = (numbers.units(n), numbers.units(n));
        let expected: f64 = a.iter().zip(&b).rev().map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
        let magnitude: f64 = a.iter().zip(&b).map(|(&a, &b)| f64::from(a * b).abs()).sum();
        // Each lane takes n / 16 roundings, the tree four.
        let tolerance = magnitude * (n as f64 / 16.0 + 5.0) * 2f64.powi(-24);
        assert_close(Kernels::detect().dot(&a, &b), expected, tolerance, "dot");
    }
}

/// Encoded weights `[rows, cols]` and what they widen to.
fn weights(encoding: Encoding, values: &[f32], cols: usize) -> (Vec<u8>, Vec<f32>) {
    let rows = values.len() / cols;
    let mut bytes = vec![0; encoding.tensor_bytes(rows, cols).expect("small")];
    encoding.encode(values, cols, &mut bytes);
    let mut wide = vec![0.0; values.len()];
    for (row, out) in wide.chunks_exact_mut(cols).enumerate() {
        encoding.decode_row(&bytes, cols, row, out);
    }
    (bytes, wide)
}

/// The product of every row and token as single dot products.
fn by_dots(wide: &[f32], cols: usize, x: &[f32]) -> Vec<f32> {
    let kernels = Kernels::available()[0];
    x.chunks(cols).flat_map(|x| wide.chunks(cols).map(|w| kernels.dot(w, x))).collect()
}

fn matmul(k: Kernels, bytes: &[u8], encoding: Encoding, rows: usize, cols: usize, x: &[f32]) -> Vec<f32> {
    let tokens = x.len() / cols;
    let mut out = vec![f32::NAN; tokens * rows];
    k.float_matmul(bytes, encoding, cols, 0..rows, x, &mut Shard::new(&mut out, tokens, rows));
    out
}

#[test]
fn every_product_is_the_dot_of_the_widened_row_for_odd_lengths() {
    let mut numbers = Numbers(3);
    for encoding in FLOATS {
        for cols in lengths() {
            let (rows, tokens) = (6, 5);
            let (bytes, wide) = weights(encoding, &numbers.units(rows * cols), cols);
            let x = numbers.units(tokens * cols);
            let out = same_bits("matmul", |k| matmul(k, &bytes, encoding, rows, cols, &x));
            assert_eq!(bits(&out), bits(&by_dots(&wide, cols, &x)), "{encoding} {cols}");
        }
    }
}

#[test]
fn special_values_come_out_alike() {
    let mut numbers = Numbers(4);
    for encoding in FLOATS {
        for cols in [1, 15, 16, 17, 40, 64] {
            let (rows, tokens) = (9, 6);
            let (bytes, wide) = weights(encoding, &numbers.any(rows * cols), cols);
            for x in [numbers.any(tokens * cols), numbers.tiny(tokens * cols)] {
                let out = same_bits("matmul", |k| matmul(k, &bytes, encoding, rows, cols, &x));
                assert_eq!(bits(&out), bits(&by_dots(&wide, cols, &x)), "{encoding} {cols}");
            }
        }
    }
}

#[test]
fn many_tokens_give_the_bits_of_single_tokens_also_over_several_panels() {
    let mut numbers = Numbers(5);
    // 4100 columns: 31 vectors would be a panel, so 67 are three.
    let (rows, cols, tokens) = (7, 4100, 67);
    let (bytes, _) = weights(Encoding::Bf16, &numbers.units(rows * cols), cols);
    let x = numbers.units(tokens * cols);
    for k in Kernels::available() {
        let together = matmul(k, &bytes, Encoding::Bf16, rows, cols, &x);
        let single: Vec<f32> =
            x.chunks(cols).flat_map(|x| matmul(k, &bytes, Encoding::Bf16, rows, cols, x)).collect();
        assert_eq!(bits(&together), bits(&single), "{k:?}");
    }
}

#[test]
fn row_ranges_write_their_part_and_nothing_else() {
    let mut numbers = Numbers(6);
    let (rows, cols, tokens) = (23, 33, 3);
    let (bytes, _) = weights(Encoding::F16, &numbers.units(rows * cols), cols);
    let x = numbers.units(tokens * cols);
    for k in Kernels::available() {
        let whole = matmul(k, &bytes, Encoding::F16, rows, cols, &x);
        let mut out = vec![0.0; tokens * rows];
        let mut shard = Shard::new(&mut out, tokens, rows);
        for range in [0..1, 1..8, 8..8, 8..21] {
            k.float_matmul(&bytes, Encoding::F16, cols, range, &x, &mut shard);
        }
        for (out, whole) in out.chunks(rows).zip(whole.chunks(rows)) {
            assert_eq!(bits(&out[..21]), bits(&whole[..21]));
            assert_eq!(out[21..], [0.0; 2]);
        }
    }
}

#[test]
fn wrong_shapes_panic() {
    let call = |encoding, cols, rows: std::ops::Range<usize>, x: usize| {
        std::panic::catch_unwind(move || {
            let mut out = [0.0; 8];
            let mut shard = Shard::new(&mut out, 2, 4);
            Kernels::detect().float_matmul(&[0; 64], encoding, cols, rows, &vec![0.0; x], &mut shard);
        })
        .is_err()
    };
    assert!(!call(Encoding::Bf16, 8, 0..4, 16));
    assert!(call(Encoding::Bf16, 8, 0..5, 16), "a row too many");
    assert!(call(Encoding::F32, 8, 0..4, 16), "weights too short");
    assert!(call(Encoding::Bf16, 8, 0..4, 15), "activations too short");
    assert!(call(Encoding::Bf16, 0, 0..4, 0), "no columns");
    assert!(call(Encoding::Bf16, usize::MAX, 0..4, 16), "columns that overflow");
}

proptest! {
    #[test]
    fn any_shape_is_the_dots(
        rows in 1usize..12,
        cols in 1usize..150,
        tokens in 0usize..11,
        seed in any::<u64>(),
    ) {
        let mut numbers = Numbers(seed);
        let encoding = FLOATS[(seed % 3) as usize];
        let (bytes, wide) = weights(encoding, &numbers.units(rows * cols), cols);
        // An odd address: weights need no alignment.
        let mut shifted = vec![0];
        shifted.extend(&bytes);
        let x = numbers.units(tokens * cols);
        let out = same_bits("matmul", |k| matmul(k, &shifted[1..], encoding, rows, cols, &x));
        prop_assert_eq!(bits(&out), bits(&by_dots(&wide, cols, &x)));
    }
}

#[test]
fn every_f16_multiplies_as_its_value() {
    // One column: the product with 1 is the weight itself (and +0 for -0).
    let halves: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    let out = same_bits("f16", |k| matmul(k, &halves, Encoding::F16, 65536, 1, &[1.0]));
    for (half, value) in (0..=u16::MAX).zip(out) {
        let expected = if half == 0x8000 { 0 } else { half };
        assert!(value.is_nan() && half & 0x7fff > 0x7c00 || f32_to_f16(value) == expected, "{half:#06x}");
    }
}
