use smoe_kernels::{Kernels, RopeStyle, top_k};

use crate::{Numbers, assert_close, bits, lengths, same_bits};

#[test]
fn rms_norm_is_near_f64_and_the_same_in_place() {
    let mut numbers = Numbers(9);
    for n in lengths() {
        let (x, weight) = (numbers.units(n), numbers.units(n));
        let out = same_bits("rms_norm", |k| {
            let mut out = vec![f32::NAN; n];
            k.rms_norm(&x, &weight, 1e-6, &mut out);
            out
        });
        let mean = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / n as f64;
        for ((&x, &w), &out) in x.iter().zip(&weight).zip(&out) {
            let expected = f64::from(w) * f64::from(x) / (mean + 1e-6).sqrt();
            assert_close(out, expected, expected.abs() * 1e-6 + 1e-12, "rms_norm");
        }
        let heads = same_bits("rms_norm_in_place", |k| {
            let mut heads = [&x[..], &weight, &x].concat();
            k.rms_norm_in_place(&mut heads, &weight, 1e-6);
            heads
        });
        assert_eq!(bits(&heads[..n]), bits(&out));
        assert_eq!(bits(&heads[2 * n..]), bits(&out));
        let special = numbers.any(n);
        same_bits("rms_norm of special values", |k| {
            let mut x = special.clone();
            k.rms_norm_in_place(&mut x, &weight, 1e-6);
            x
        });
    }
}

#[test]
fn layer_norm_is_near_f64() {
    let mut numbers = Numbers(19);
    for n in lengths() {
        let (x, weight, bias) = (numbers.units(n), numbers.units(n), numbers.units(n));
        let out = same_bits("layer_norm_in_place", |k| {
            let mut rows = [&x[..], &bias].concat();
            k.layer_norm_in_place(&mut rows, &weight, &bias, 1e-6);
            rows
        });
        for (x, out) in [&x, &bias].into_iter().zip(out.chunks(n)) {
            let x: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
            let mean = x.iter().sum::<f64>() / n as f64;
            let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n as f64;
            for (((x, &w), &b), &out) in x.iter().zip(&weight).zip(&bias).zip(out) {
                let expected = (x - mean) / (variance + 1e-6).sqrt() * f64::from(w) + f64::from(b);
                // One element alone is its mean: what is left of it is rounding.
                assert_close(out, expected, if n == 1 { 1e-3 } else { 2e-5 }, "layer_norm");
            }
        }
        let special = numbers.any(n);
        same_bits("layer_norm of special values", |k| {
            let mut x = special.clone();
            k.layer_norm_in_place(&mut x, &weight, &bias, 1e-6);
            x
        });
    }
}

#[test]
fn sums_and_multiples_of_vectors() {
    let mut numbers = Numbers(10);
    for n in lengths() {
        let (a, b) = (numbers.any(n), numbers.any(n));
        let sum = same_bits("add_in_place", |k| {
            let mut acc = a.clone();
            k.add_in_place(&mut acc, &b);
            acc
        });
        assert_eq!(bits(&sum), bits(&a.iter().zip(&b).map(|(a, b)| a + b).collect::<Vec<_>>()));
        let fused = same_bits("scale_add", |k| {
            let mut acc = a.clone();
            k.scale_add(&mut acc, &b, 0.37);
            acc
        });
        let expected: Vec<f32> = a.iter().zip(&b).map(|(a, b)| 0.37f32.mul_add(*b, *a)).collect();
        assert_eq!(bits(&fused), bits(&expected));
        let multiple = same_bits("scale_in_place", |k| {
            let mut x = a.clone();
            k.scale_in_place(&mut x, 0.37);
            x
        });
        assert_eq!(bits(&multiple), bits(&a.iter().map(|a| 0.37 * a).collect::<Vec<_>>()));
    }
}

#[test]
fn rope_turns_pairs_as_complex_numbers_and_leaves_the_rest() {
    let mut numbers = Numbers(11);
    for (heads, head_dim, rope_dim) in
        [(1, 2, 2), (3, 64, 64), (2, 80, 32), (1, 70, 70), (2, 128, 128), (1, 9, 0)]
    {
        let pairs = rope_dim / 2;
        let angles: Vec<f64> = (0..pairs).map(|_| f64::from(numbers.unit()) * 3.0).collect();
        let cos: Vec<f32> = angles.iter().map(|a| a.cos() as f32).collect();
        let sin: Vec<f32> = angles.iter().map(|a| a.sin() as f32).collect();
        let x = numbers.units(heads * head_dim);
        for style in [RopeStyle::Half, RopeStyle::Interleaved] {
            let out = same_bits("rope", |k| {
                let mut x = x.clone();
                k.rope(&mut x, head_dim, &cos, &sin, style);
                x
            });
            for (x, out) in x.chunks(head_dim).zip(out.chunks(head_dim)) {
                for (i, angle) in angles.iter().enumerate() {
                    let (a, b) = match style {
                        RopeStyle::Half => (i, i + pairs),
                        RopeStyle::Interleaved => (2 * i, 2 * i + 1),
                    };
                    let radius = f64::from(x[a]).hypot(f64::from(x[b]));
                    let turned = f64::from(x[b]).atan2(f64::from(x[a])) + angle;
                    assert_close(out[a], radius * turned.cos(), 3e-7, "rope");
                    assert_close(out[b], radius * turned.sin(), 3e-7, "rope");
                    let first = x[a].mul_add(cos[i], -(x[b] * sin[i]));
                    let second = x[b].mul_add(cos[i], x[a] * sin[i]);
                    assert_eq!(bits(&[out[a], out[b]]), bits(&[first, second]));
                }
                assert_eq!(bits(&x[rope_dim..]), bits(&out[rope_dim..]));
            }
        }
    }
}

/// By sorting everything.
fn top_k_by_sort(scores: &[f32], k: usize) -> Vec<u32> {
    let key = |id: u32| match scores[id as usize] {
        score if score.is_nan() => f64::NEG_INFINITY,
        score => f64::from(score).max(f64::MIN) + 0.0,
    };
    let mut ids: Vec<u32> = (0..scores.len() as u32).collect();
    ids.sort_by(|&a, &b| key(b).partial_cmp(&key(a)).expect("no NaN").then(a.cmp(&b)));
    ids.truncate(k);
    ids
}

#[test]
fn top_k_breaks_ties_by_id() {
    let mut numbers = Numbers(12);
    for n in [1, 2, 5, 16, 17, 60, 128, 512] {
        for k in [0, 1, 2, 8, 17, n] {
            if k > n {
                continue;
            }
            let near_ties: Vec<f32> = (0..n).map(|_| (numbers.next() % 7) as f32 - 3.0).collect();
            for scores in [numbers.units(n), near_ties, numbers.any(n), vec![f32::NAN; n]] {
                let mut ids = vec![u32::MAX; k];
                top_k(&scores, &mut ids);
                assert_eq!(ids, top_k_by_sort(&scores, k), "{scores:?}");
            }
        }
    }
    let mut ids = [0; 5];
    top_k(&[0.0, f32::NAN, -0.0, f32::NEG_INFINITY, f32::NAN, 0.0], &mut ids);
    assert_eq!(ids, [0, 2, 5, 3, 1]);
}

#[test]
fn argmax_is_the_first_of_top_k() {
    let mut numbers = Numbers(13);
    for n in lengths() {
        for scores in [numbers.units(n), numbers.any(n), vec![f32::NAN; n], vec![-0.0; n]] {
            let mut first = [0];
            top_k(&scores, &mut first);
            for k in Kernels::available() {
                assert_eq!(k.argmax(&scores), first[0], "{k:?} {scores:?}");
            }
        }
    }
    assert_eq!(Kernels::detect().argmax(&[]), 0);
}
