//! The scale of a group: searched, not read off its largest weight.
//!
//! Some shares of the largest magnitude are tried. Under each the weights are coded, the scale is refitted to the codes
//! by least squares and rounded to the f16 that is stored, and the weights are coded again under that: what is judged is
//! what will be read. The lowest squared error wins, weighted by `importance`.

use smoe_format::half::{f16_to_f32, f32_to_f16};

use super::MAX_GROUP;
use super::grid::Grid;

/// Lanes of a sum.
const LANES: usize = 16;
/// Shares that are tried.
const TRIES: usize = 6;

/// What sixteen lanes sum of a group under a scale.
#[derive(Clone, Copy)]
struct Fit {
    /// Importance times weight times level.
    product: f64,
    /// Importance times level squared.
    power: f64,
}

/// The scale of a group as stored, and the squared error that it leaves.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scale {
    /// Bits of the f16.
    pub half: u16,
    /// Weighted by importance; f64 because it is a difference of large sums.
    pub error: f64,
}

/// Finds the scale of a group.
///
/// `weights` and `importance` are as long as each other, a multiple of 16; padding has importance 0 and weight 0.
#[inline(always)]
pub(crate) fn search<G: Grid>(grid: G, weights: &[f32], importance: &[f32]) -> Scale {
    let (largest, power) = extent(weights, importance);
    if largest == 0.0 {
        return Scale { half: 0, error: 0.0 };
    }
    let mut levels = [0.0; MAX_GROUP];
    let levels = &mut levels[..weights.len()];
    let clips = grid.clips();
    let signs: &[f32] = if grid.is_symmetric() { &[1.0] } else { &[1.0, -1.0] };
    // What no scale fits better than: a group of weights that all come out as zero.
    let mut best = Scale { half: 0, error: f64::INFINITY };
    for &sign in signs {
        for i in 0..TRIES {
            let share = clips.start + (clips.end - clips.start) * (i as f32 / (TRIES - 1) as f32);
            let first = fit(grid, weights, importance, sign * largest * share / grid.reach(), levels);
            if first.power == 0.0 {
                continue;
            }
            let half = f32_to_f16((first.product / first.power) as f32 * grid.scale());
            let step = f16_to_f32(half) / grid.scale();
            // Beyond f16, or rounded to nothing.
            if !step.is_finite() || step == 0.0 {
                continue;
            }
            let found = fit(grid, weights, importance, step, levels);
            let step = f64::from(step);
            let error = step.mul_add(step.mul_add(found.power, -2.0 * found.product), power);
            if error < best.error {
                best = Scale { half, error };
            }
        }
    }
    if best.error.is_infinite() {
        // Subnormal weights, or the very largest: the plain rule.
        best.half = f32_to_f16(largest / grid.reach() * grid.scale());
    }
    best
}

/// The levels nearest to the weights of a group under a stored scale.
#[inline(always)]
pub(crate) fn levels<G: Grid>(grid: G, weights: &[f32], half: u16, out: &mut [f32]) {
    nearest(grid, weights, f16_to_f32(half) / grid.scale(), out);
}

#[inline(always)]
fn nearest<G: Grid>(grid: G, weights: &[f32], step: f32, out: &mut [f32]) {
    let inverse = 1.0 / step;
    let inverse = if inverse.is_finite() { inverse } else { 0.0 };
    for (out, &w) in out.iter_mut().zip(weights) {
        *out = grid.nearest(w * inverse);
    }
}

/// The largest magnitude among what matters, and the weighted sum of squares.
#[inline(always)]
fn extent(weights: &[f32], importance: &[f32]) -> (f32, f64) {
    let (mut largest, mut power) = ([0.0f32; LANES], [0.0f32; LANES]);
    for (weights, importance) in weights.as_chunks::<LANES>().0.iter().zip(importance.as_chunks::<LANES>().0)
    {
        for lane in 0..LANES {
            let magnitude = weights[lane].abs();
            largest[lane] = if magnitude > largest[lane] { magnitude } else { largest[lane] };
            power[lane] += weights[lane] * weights[lane] * importance[lane];
        }
    }
    (largest.iter().fold(0.0, |a, &b| if b > a { b } else { a }), sum(power))
}

/// Codes a group under a step and sums what a refit needs.
#[inline(always)]
fn fit<G: Grid>(grid: G, weights: &[f32], importance: &[f32], step: f32, levels: &mut [f32]) -> Fit {
    nearest(grid, weights, step, levels);
    let (mut product, mut power) = ([0.0f32; LANES], [0.0f32; LANES]);
    let chunks = weights.as_chunks::<LANES>().0.iter().zip(importance.as_chunks::<LANES>().0);
    for ((weights, importance), levels) in chunks.zip(levels.as_chunks::<LANES>().0) {
        for lane in 0..LANES {
            let weighted = importance[lane] * levels[lane];
            product[lane] += weighted * weights[lane];
            power[lane] += weighted * levels[lane];
        }
    }
    Fit { product: sum(product), power: sum(power) }
}

/// The sum of the lanes, by halves.
#[inline(always)]
fn sum(lanes: [f32; LANES]) -> f64 {
    let mut eight = [0.0; 8];
    for (lane, sum) in eight.iter_mut().enumerate() {
        *sum = lanes[lane] + lanes[lane + 8];
    }
    let [a, b, c, d, e, f, g, h] = eight;
    f64::from(((a + e) + (c + g)) + ((b + f) + (d + h)))
}

#[cfg(test)]
mod tests {
    use smoe_testkit::random::Random;

    use super::super::grid::UniformGrid;
    use super::*;

    fn bell(n: usize, seed: u64) -> Vec<f32> {
        let mut random = Random::new(seed);
        (0..n).map(|_| 0.02 * random.bell() as f32).collect()
    }

    /// The squared error of a stored scale, with every level tried for every weight.
    fn brute(m: i32, weights: &[f32], half: u16) -> f64 {
        let step = f64::from(f16_to_f32(half)) / f64::from(m);
        let of = |w: f32| {
            (0..=m).map(|c| (f64::from(w) - f64::from(2 * c - m) * step).powi(2)).fold(f64::MAX, f64::min)
        };
        weights.iter().map(|&w| of(w)).sum()
    }

    #[test]
    fn the_error_is_that_of_the_stored_scale_and_near_the_best_of_all_scales() {
        for (seed, m) in [(1, 3), (2, 7), (3, 15), (4, 63)] {
            let grid = UniformGrid { max_code: m as u8 };
            for group in [16, 64, 128] {
                let weights = bell(group, seed);
                let found = search(grid, &weights, &vec![1.0; group]);
                let error = brute(m, &weights, found.half);
                assert!((found.error / error - 1.0).abs() < 1e-3, "{m} {group}: {} {error}", found.error);
                let absmax = weights.iter().fold(0.0f32, |a, w| a.max(w.abs()));
                let best = (300..1100)
                    .map(|i| brute(m, &weights, f32_to_f16(absmax * i as f32 / 1000.0)))
                    .fold(f64::MAX, f64::min);
                assert!(error <= brute(m, &weights, f32_to_f16(absmax)) * 1.000_001);
                // Of few weights a scale may happen to hit many.
                let near = if group == 16 { 1.6 } else { 1.12 };
                assert!(error < near * best, "{m} {group}: {error} {best}");
            }
        }
    }

    #[test]
    fn what_has_no_importance_has_no_say() {
        let grid = UniformGrid { max_code: 15 };
        let mut weights = bell(64, 9);
        let mut importance = vec![1.0; 64];
        weights[40..].fill(0.0);
        importance[40..].fill(0.0);
        let a = search(grid, &weights, &importance);
        // Half the scale, half the error at a quarter of the weight.
        let halved: Vec<f32> = weights.iter().map(|w| w * 0.5).collect();
        let b = search(grid, &halved, &importance.iter().map(|i| i * 4.0).collect::<Vec<_>>());
        assert_eq!(f16_to_f32(a.half), 2.0 * f16_to_f32(b.half));
        assert!((a.error / b.error - 1.0).abs() < 1e-5);
    }

    #[test]
    fn extremes_of_f16_have_a_scale() {
        let grid = UniformGrid { max_code: 3 };
        for (weight, what) in [(0.0, "zero"), (1e-30, "below f16"), (65504.0, "largest"), (6e-8, "subnormal")]
        {
            let found = search(grid, &[weight; 16], &[1.0; 16]);
            assert!(f16_to_f32(found.half).is_finite(), "{what}");
            let mut out = [f32::NAN; 16];
            levels(grid, &[weight; 16], found.half, &mut out);
            assert!(out.iter().all(|l| l.is_finite()), "{what}");
        }
    }
}
