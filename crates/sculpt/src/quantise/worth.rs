//! How finely the channels of an expert are coded, where an entropy coder's rate can follow.
//!
//! A channel's hidden value `h_i` reaches the expert's output through column i of down: of the output's power it has
//! about `E[h_i^2] |down_i|^2`, and the same relative error in row i of gate or up, or in column i of down, costs the
//! more the larger that is. The least error at a number of bits has steps that are inversely proportional to the root of
//! what an error costs (reverse water-filling; for the columns of GPTQ: WaterSIC, 2026). Half of that, in octaves, is
//! taken: one table of symbols serves all rows of a tensor, and sixteen levels hold no finer steps (EXP-QUANT-14).
//!
//! Rows have steps of their own. For the columns of down the channel itself is scaled, `up_i / s` and `down_i * s`: the
//! function stays the same where the hidden value is linear in up ([`may_scale`]).

use smoe_format::ModelSpec;
use smoe_format::spec::Activation;
use smoe_kernels::{Kernels, Loops};

use super::factor::{LANES, Square, dots};

/// The least and the most that a channel is scaled by.
const SCALED: (f32, f32) = (0.18, 2.0);
/// No row's step is made finer than this, in its mean magnitudes: sixteen levels would not hold its weights.
const FINEST: f32 = 0.55;
/// No row's is made coarser: beyond it a row has two levels, which would be larger than its weights are.
const COARSEST: f32 = 4.0;

/// Whether an expert's hidden value is linear in up: what is added to up's product, or bounds it, does not scale with it.
pub(crate) fn may_scale(spec: &ModelSpec) -> bool {
    spec.moe.activation == Activation::SwiGlu && !spec.moe.expert_bias
}

/// The weights of an expert, row by row; those of up and down with scaled channels.
#[derive(Debug, Default)]
pub(crate) struct Expert {
    /// `[d_expert, d_model]`.
    pub gate: Vec<f32>,
    /// `[d_expert, d_model]`.
    pub up: Vec<f32>,
    /// `[d_model, d_expert]`.
    pub down: Vec<f32>,
}

/// The step of each row, as a multiple of that of the tensor, in mean magnitudes of the row.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Finesse {
    pub gate: Vec<f32>,
    pub up: Vec<f32>,
    pub down: Vec<f32>,
}

impl Finesse {
    /// The step of a row, in its mean magnitudes, if the tensor's is `step`.
    pub fn step(row: f32, step: f32) -> f32 {
        (row * step).max(step.min(FINEST)).min(step.max(COARSEST))
    }
}

impl Expert {
    /// Scales the channels of up and down, and `hidden`, the Hessian of the inputs of down, with them, if they may be
    /// ([`may_scale`]); says how finely rows are to be coded. `input` is that of the inputs of gate and up.
    ///
    /// What does not tell the channels apart (a Hessian of nothing, weights that are all zero) changes nothing.
    pub fn scale(
        &mut self,
        kernels: Kernels,
        input: &Square,
        hidden: &mut Square,
        may_scale: bool,
    ) -> Finesse {
        let (d_model, d_expert) = (input.n, hidden.n);
        let power: Vec<f64> = (0..d_expert).map(|i| f64::from(hidden.row(i)[i])).collect();
        let mut reach = vec![0.0f64; d_expert];
        for row in self.down.chunks_exact(d_expert) {
            reach.iter_mut().zip(row).for_each(|(sum, &w)| *sum += f64::from(w) * f64::from(w));
        }
        let cost = |kernels: Kernels, weights: &[f32]| {
            let energies = kernels.compiled(Energies { weights, hessian: input });
            let rows = weights.chunks_exact(d_model).zip(energies);
            let costs = rows.zip(power.iter().zip(&reach)).map(|((row, energy), (power, reach))| {
                let mean = mean_magnitude(row);
                if energy > 0.0 { power * reach / energy * mean * mean } else { 0.0 }
            });
            fourth_roots(&costs.collect::<Vec<_>>())
        };
        let inverse = |root: f32| if root > 0.0 { 1.0 / root } else { 1.0 };
        let gate = cost(kernels, &self.gate).into_iter().map(inverse).collect();
        let up = cost(kernels, &self.up).into_iter().map(inverse).collect();

        let factors: Vec<f32> =
            fourth_roots(&power).into_iter().map(|root| root.clamp(SCALED.0, SCALED.1)).collect();
        let scaled = self.up.chunks_exact(d_model).zip(&factors);
        if may_scale
            && scaled.flat_map(|(row, s)| row.iter().map(move |w| w / s)).all(crate::encode::codable)
            && self
                .down
                .chunks_exact(d_expert)
                .flat_map(|row| row.iter().zip(&factors))
                .all(|(w, s)| crate::encode::codable(w * s))
        {
            self.apply(&factors, hidden);
        }
        let means: Vec<f64> = self.down.chunks_exact(d_expert).map(mean_magnitude).collect();
        // Outputs count alike: the step's square root stays with the row.
        let squares: Vec<f64> = means.iter().map(|m| m * m).collect();
        let down = fourth_roots(&squares).into_iter().map(inverse).collect();
        Finesse { gate, up, down }
    }

    fn apply(&mut self, factors: &[f32], hidden: &mut Square) {
        let d_model = self.up.len() / factors.len();
        for (row, s) in self.up.chunks_exact_mut(d_model).zip(factors) {
            row.iter_mut().for_each(|w| *w /= s);
        }
        for row in self.down.chunks_exact_mut(factors.len()) {
            row.iter_mut().zip(factors).for_each(|(w, s)| *w *= s);
        }
        let stride = hidden.stride;
        for (row, s) in hidden.values.chunks_exact_mut(stride).zip(factors) {
            row.iter_mut().zip(factors).for_each(|(h, other)| *h /= s * other);
        }
    }
}

fn mean_magnitude(row: &[f32]) -> f64 {
    row.iter().map(|&w| f64::from(w.abs())).sum::<f64>() / row.len().max(1) as f64
}

/// Fourth roots of numbers over their mean; ones if there is nothing to tell them apart. Operations that every machine
/// rounds alike.
fn fourth_roots(of: &[f64]) -> Vec<f32> {
    let mean = of.iter().sum::<f64>() / of.len().max(1) as f64;
    if !(mean.is_finite() && mean > 0.0) || of.iter().any(|x| *x < 0.0) {
        return vec![1.0; of.len()];
    }
    of.iter().map(|x| (x / mean).sqrt().sqrt() as f32).collect()
}

/// `w^T H w` of each row w.
struct Energies<'a> {
    weights: &'a [f32],
    hessian: &'a Square,
}

impl Loops for Energies<'_> {
    type Out = Vec<f64>;

    #[inline(always)]
    fn run(self) -> Vec<f64> {
        let Square { n, stride, values } = self.hessian;
        let (n, stride) = (*n, *stride);
        let mut out = Vec::with_capacity(self.weights.len() / n.max(1));
        let mut rows = vec![0.0f32; 4 * stride];
        for four in self.weights.chunks(4 * n) {
            let count = four.len() / n;
            rows.fill(0.0);
            for (row, weights) in rows.chunks_exact_mut(stride).zip(four.chunks_exact(n)) {
                row[..n].copy_from_slice(weights);
            }
            let of = |i: usize| &rows[i * stride..][..stride];
            let mut sums = [0.0f64; 4];
            for first in (0..n).step_by(4) {
                let columns: [&[f32]; 4] =
                    std::array::from_fn(|j| &values[(first + j).min(n - 1) * stride..][..stride]);
                let products = dots([of(0), of(1), of(2), of(3)], columns);
                for (i, products) in products.iter().enumerate() {
                    for (j, product) in products.iter().enumerate().take(n - first) {
                        sums[i] += f64::from(*product) * f64::from(rows[i * stride + first + j]);
                    }
                }
            }
            out.extend_from_slice(&sums[..count]);
        }
        out
    }
}

const _: () = assert!(LANES.is_multiple_of(4));

#[cfg(test)]
mod tests {
    use smoe_testkit::random::Random;

    use super::super::factor::tests::hessian;
    use super::*;

    fn expert(d_model: usize, d_expert: usize, seed: u64) -> Expert {
        let mut random = Random::new(seed);
        let mut of = |n: usize| (0..n).map(|_| 0.02 * random.bell() as f32).collect::<Vec<f32>>();
        Expert { gate: of(d_model * d_expert), up: of(d_model * d_expert), down: of(d_model * d_expert) }
    }

    #[test]
    fn energies_are_those_of_a_triple_loop() {
        for (rows, n) in [(1, 1), (5, 7), (9, 64), (6, 50)] {
            let h = hessian(n, 2 * n + 3, 3);
            let mut random = Random::new(n as u64);
            let weights: Vec<f32> = (0..rows * n).map(|_| random.bell() as f32).collect();
            for kernels in Kernels::available() {
                let found = kernels.compiled(Energies { weights: &weights, hessian: &h });
                assert_eq!(found.len(), rows);
                for (row, found) in weights.chunks_exact(n).zip(found) {
                    let mut expected = 0.0;
                    for i in 0..n {
                        for j in 0..n {
                            expected += f64::from(row[i]) * f64::from(h.row(i)[j]) * f64::from(row[j]);
                        }
                    }
                    assert!((found / expected - 1.0).abs() < 1e-4, "{rows} {n}: {found} {expected}");
                }
            }
        }
    }

    #[test]
    fn scaled_channels_compute_the_same_and_those_that_count_more_are_finer() {
        let (d_model, d_expert) = (48, 32);
        let before = expert(d_model, d_expert, 1);
        let mut after = expert(d_model, d_expert, 1);
        let input = hessian(d_model, 200, 2);
        let mut hidden = hessian(d_expert, 200, 4);
        // Channel 3 is 16 times as loud as it was, channel 5 silent.
        for i in 0..d_expert {
            for (channel, factor) in [(3, 16.0), (5, 0.0)] {
                hidden.values[i * hidden.stride + channel] *= factor;
                hidden.values[channel * hidden.stride + i] *= factor;
            }
        }
        let louder = |hidden: &Square| hidden.row(3)[3] / hidden.row(4)[4];
        let before_scaling = louder(&hidden);
        let finesse = after.scale(Kernels::detect(), &input, &mut hidden, true);
        assert_eq!(before.gate, after.gate);
        let x: Vec<f64> = (0..d_model).map(|i| (i as f64 * 0.7).sin()).collect();
        let output = |expert: &Expert| -> Vec<f64> {
            let product =
                |row: &[f32], x: &[f64]| row.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum::<f64>();
            let rows = expert.gate.chunks_exact(d_model).zip(expert.up.chunks_exact(d_model));
            let h: Vec<f64> = rows.map(|(gate, up)| product(gate, &x).tanh() * product(up, &x)).collect();
            expert.down.chunks_exact(d_expert).map(|row| product(row, &h)).collect()
        };
        for (a, b) in output(&before).into_iter().zip(output(&after)) {
            assert!((a - b).abs() < 1e-6 * a.abs().max(1e-3), "{a} {b}");
        }
        let others = |of: &[f32]| of.iter().sum::<f32>() / of.len() as f32;
        for rows in [&finesse.gate, &finesse.up] {
            assert!(rows[3] < 0.6 * others(rows) && rows[5] == 1.0, "{rows:?}");
        }
        assert!(after.down[3] > 1.5 * before.down[3].abs() || after.down[3] < -1.5 * before.down[3].abs());
        // Twice, and the others about 0.6 times.
        assert!(louder(&hidden) < 0.2 * before_scaling, "{}", louder(&hidden));
    }

    #[test]
    fn what_tells_no_channels_apart_changes_nothing() {
        let (d_model, d_expert) = (16, 20);
        let before = expert(d_model, d_expert, 7);
        let mut after = expert(d_model, d_expert, 7);
        let finesse =
            after.scale(Kernels::detect(), &Square::zeros(d_model), &mut Square::zeros(d_expert), true);
        assert!(finesse.gate.iter().chain(&finesse.up).all(|f| *f == 1.0));
        assert_eq!((before.up, before.down), (after.up, after.down));
        assert_eq!(Finesse::step(0.1, 1.0), FINEST);
        assert_eq!(Finesse::step(0.1, 0.3), 0.3);
        assert_eq!(Finesse::step(1.5, 1.0), 1.5);
        assert_eq!((Finesse::step(1e9, 1.0), Finesse::step(1e9, 5.0)), (COARSEST, 5.0));
    }

    #[test]
    fn channels_stay_where_up_does_not_act_alone() {
        let (d_model, d_expert) = (16, 20);
        let before = expert(d_model, d_expert, 7);
        let mut after = expert(d_model, d_expert, 7);
        let (input, mut hidden) = (hessian(d_model, 60, 2), hessian(d_expert, 60, 3));
        let finesse = after.scale(Kernels::detect(), &input, &mut hidden, false);
        assert_eq!((before.up, before.down), (after.up, after.down));
        assert_eq!(hidden.values, hessian(d_expert, 60, 3).values);
        assert!(finesse.up.iter().any(|f| *f != 1.0), "rows are told apart all the same");

        let mut spec = smoe_testkit::TinyModel::qwen3(1).spec;
        assert!(may_scale(&spec));
        spec.moe.expert_bias = true;
        assert!(!may_scale(&spec));
        spec.moe.expert_bias = false;
        spec.moe.activation = Activation::ClampedSwiglu { alpha: 1.702, limit: 7.0 };
        assert!(!may_scale(&spec));
    }
}
