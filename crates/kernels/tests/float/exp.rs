use smoe_format::spec::Activation;
use smoe_kernels::{EXP_ULP_MAX, Kernels, exp, sigmoid, silu};

use crate::{Numbers, assert_close, bits, lengths, same_bits};

/// The largest error in units of the last place over every `step`-th f32 of a range of bits.
fn error_ulp(kernels: Kernels, from: f32, to: f32, step: usize) -> f64 {
    let mut worst = 0.0f64;
    let mut x = Vec::with_capacity(4096);
    let mut patterns = (from.to_bits()..=to.to_bits()).step_by(step).peekable();
    while patterns.peek().is_some() {
        x.clear();
        x.extend(patterns.by_ref().take(4096).map(f32::from_bits));
        let mut e = x.clone();
        kernels.exp_in_place(&mut e);
        for (&x, &e) in x.iter().zip(&e) {
            let exact = f64::from(x).exp();
            let ulp = 2f64.powi(exact.log2().floor() as i32 - 23);
            worst = worst.max((f64::from(e) - exact).abs() / ulp);
        }
    }
    worst
}

#[test]
fn exp_is_within_its_bound() {
    // A prime step: about 1.5 million numbers each way.
    let kernels = Kernels::detect();
    let positive = error_ulp(kernels, 0.0, 88.722_83, 751);
    let negative = error_ulp(kernels, -0.0, -87.336_54, 751);
    assert!(positive.max(negative) < EXP_ULP_MAX, "{positive} {negative}");
}

#[test]
fn exp_has_the_same_bits_everywhere_on_a_dense_sweep() {
    // All bit patterns, NaNs and infinities among them.
    for first in (0..=u32::MAX).step_by(16 * 16381) {
        let x: Vec<f32> =
            (0..64).map(|i| f32::from_bits(first.wrapping_add(i * 4093))).chain([f32::NAN]).collect();
        let e = same_bits("exp", |k| {
            let mut x = x.clone();
            k.exp_in_place(&mut x);
            x
        });
        let single: Vec<f32> = x.iter().map(|&x| exp(x)).collect();
        assert_eq!(bits(&e), bits(&single));
    }
}

#[test]
fn exp_at_the_ends_of_its_range() {
    let next = |x: f32, by: i32| f32::from_bits(x.to_bits().wrapping_add_signed(by));
    let lowest = f32::from_bits(0xc2ae_ac4f);
    let highest = f32::from_bits(0x42b1_7217);
    let x = [
        f32::NEG_INFINITY,
        f32::MIN,
        -1000.0,
        -104.0,
        next(lowest, 1),
        lowest,
        -0.0,
        0.0,
        1e-45,
        highest,
        next(highest, 1),
        1000.0,
        f32::MAX,
        f32::INFINITY,
        f32::NAN,
        -f32::NAN,
    ];
    let e = same_bits("exp", |k| {
        let mut x = x;
        k.exp_in_place(&mut x);
        x.to_vec()
    });
    assert_eq!(bits(&e[..5]), [0; 5], "+0 below the normal numbers");
    assert!(e[5] >= f32::MIN_POSITIVE && e[5] < f32::MIN_POSITIVE * 1.000_01);
    assert_eq!(e[6..9], [1.0; 3]);
    assert!(e[9] > 3.4e38 && e[9].is_finite());
    assert_eq!(e[10..14], [f32::INFINITY; 4]);
    assert!(e[14].is_nan() && e[15].is_nan());
}

#[test]
fn exp_does_not_fall_where_the_reduction_changes() {
    for n in -125..=127 {
        let edge = (f64::from(n) + 0.5) * std::f64::consts::LN_2;
        let mut x: Vec<f32> = (-40..=40).map(|i| edge as f32 * (1.0 + i as f32 * 6e-8)).collect();
        x.sort_by(f32::total_cmp);
        let mut e = x.clone();
        Kernels::detect().exp_in_place(&mut e);
        let falls = e.windows(2).filter(|w| w[1] < w[0]).count();
        assert_eq!(falls, 0, "{n}");
    }
}

#[test]
fn sigmoid_silu_and_swiglu_have_one_definition() {
    let mut numbers = Numbers(7);
    for n in lengths() {
        for (gate, up) in [(numbers.units(n), numbers.units(n)), (numbers.any(n), numbers.any(n))]
            .map(|(g, u)| (g.iter().map(|g| g * 20.0).collect::<Vec<_>>(), u))
        {
            let map = |f: fn(Kernels, &mut [f32]), one: fn(f32) -> f32| {
                let out = same_bits("map", |k| {
                    let mut x = gate.clone();
                    f(k, &mut x);
                    x
                });
                assert_eq!(bits(&out), bits(&gate.iter().map(|&x| one(x)).collect::<Vec<_>>()));
            };
            map(Kernels::sigmoid_in_place, sigmoid);
            map(Kernels::silu_in_place, silu);
            let out = same_bits("swiglu", |k| {
                let mut out = vec![f32::NAN; n];
                k.swiglu(&gate, &up, &mut out);
                out
            });
            for ((&g, &u), &out) in gate.iter().zip(&up).zip(&out) {
                if g.abs() < 20.0 && u.abs() <= 1.0 {
                    let (g, u) = (f64::from(g), f64::from(u));
                    let expected = g * u / (1.0 + (-g).exp());
                    assert_close(out, expected, expected.abs() * 4e-7 + 1e-37, "swiglu");
                }
            }
        }
    }
    assert_eq!(silu(-1e30), 0.0);
    assert_eq!(silu(1e30), 1e30);
    assert_eq!(sigmoid(0.0), 0.5);
}

#[test]
fn a_clamped_swiglu_has_one_definition() {
    let (alpha, limit) = (1.702f32, 7.0f32);
    let mut numbers = Numbers(8);
    for n in lengths() {
        let wide = |x: Vec<f32>| x.iter().map(|x| x * 20.0).collect::<Vec<_>>();
        for (gate, up) in [(wide(numbers.units(n)), wide(numbers.units(n))), (numbers.any(n), numbers.any(n))]
        {
            let out = same_bits("clamped", |k| {
                let mut out = vec![f32::NAN; n];
                k.glu(Activation::ClampedSwiglu { alpha, limit }, &gate, &up, &mut out);
                out
            });
            for ((&g, &u), &out) in gate.iter().zip(&up).zip(&out) {
                assert_eq!(out.is_nan(), g.is_nan() || u.is_nan() || g == f32::NEG_INFINITY, "{g} {u}");
                if g.abs() <= 20.0 && u.abs() <= 20.0 {
                    let g = f64::from(g.min(limit));
                    let u = f64::from(u.clamp(-limit, limit));
                    let expected = g / (1.0 + (-f64::from(alpha) * g).exp()) * (u + 1.0);
                    assert_close(out, expected, expected.abs() * 2e-6 + 1e-30, "clamped");
                }
            }
        }
    }
}

fn softmax(k: Kernels, x: &[f32]) -> Vec<f32> {
    let mut x = x.to_vec();
    k.softmax_in_place(&mut x);
    x
}

#[test]
fn softmax_is_near_f64_and_the_same_everywhere() {
    let mut numbers = Numbers(8);
    for n in lengths() {
        let x: Vec<f32> = (0..n).map(|_| numbers.unit() * 10.0 + 1000.0).collect();
        let out = same_bits("softmax", |k| softmax(k, &x));
        let total: f64 = x.iter().map(|&x| (f64::from(x) - 1000.0).exp()).sum();
        for (&x, &p) in x.iter().zip(&out) {
            let expected = (f64::from(x) - 1000.0).exp() / total;
            assert_close(p, expected, expected * 2e-6, "softmax");
        }
        let special = numbers.any(n);
        same_bits("softmax of special values", |k| softmax(k, &special));
    }
}

#[test]
fn softmax_of_hidden_and_broken_logits() {
    let inf = f32::INFINITY;
    for n in [3, 16, 17, 40] {
        let mut x = vec![-inf; n];
        assert!(same_bits("all hidden", |k| softmax(k, &x)).iter().all(|p| p.is_nan()));
        x[n - 1] = -5.0;
        let one = same_bits("all but one hidden", |k| softmax(k, &x));
        assert!(one[n - 1] == 1.0 && one[..n - 1].iter().all(|p| p.to_bits() == 0));
        x[0] = f32::NAN;
        assert!(same_bits("a NaN", |k| softmax(k, &x)).iter().all(|p| p.is_nan()));
        x[0] = inf;
        assert!(same_bits("infinity", |k| softmax(k, &x))[0].is_nan());
    }
    assert!(same_bits("nothing", |k| softmax(k, &[])).is_empty());
}
