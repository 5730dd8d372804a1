//! Rotary position embedding: the angles of every position, computed once.
//!
//! Frequencies are in `f64` and by pure-Rust functions, so that every machine holds the same table.
//! YaRN follows `transformers`' `_compute_yarn_parameters` (Peng et al. 2023).

use smoe_format::spec::{RopeScaling, RopeSpec};

/// Cosines and sines, `[positions, rope_dim / 2]` each.
#[derive(Debug)]
pub struct RopeTable {
    half: usize,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl RopeTable {
    /// The table for positions below `positions`.
    #[must_use]
    pub fn new(spec: &RopeSpec, rope_dim: usize, positions: usize) -> Self {
        let half = rope_dim / 2;
        let frequencies = frequencies(spec, half);
        let factor = match spec.scaling {
            RopeScaling::Yarn { attention_factor, .. } => attention_factor,
            _ => 1.0,
        };
        let mut table = Self {
            half,
            cos: Vec::with_capacity(positions * half),
            sin: Vec::with_capacity(positions * half),
        };
        for position in 0..positions {
            for frequency in &frequencies {
                // The reference multiplies in f32; the angle must be rounded as it does.
                let angle = f64::from(position as f32 * *frequency as f32);
                table.cos.push((libm::cos(angle) * factor) as f32);
                table.sin.push((libm::sin(angle) * factor) as f32);
            }
        }
        table
    }

    /// Bytes of a table.
    #[must_use]
    pub const fn bytes(rope_dim: usize, positions: usize) -> u64 {
        (rope_dim * positions * size_of::<f32>()) as u64
    }

    /// Cosines of a position.
    #[must_use]
    pub fn cos(&self, position: usize) -> &[f32] {
        &self.cos[position * self.half..(position + 1) * self.half]
    }

    /// Sines of a position.
    #[must_use]
    pub fn sin(&self, position: usize) -> &[f32] {
        &self.sin[position * self.half..(position + 1) * self.half]
    }
}

/// Radians per position of each pair of dimensions.
fn frequencies(spec: &RopeSpec, half: usize) -> Vec<f64> {
    let dim = (2 * half) as f64;
    let plain = (0..half).map(|i| 1.0 / libm::pow(spec.theta, 2.0 * i as f64 / dim));
    match spec.scaling {
        RopeScaling::None => plain.collect(),
        RopeScaling::Linear { factor } => plain.map(|f| f / factor).collect(),
        RopeScaling::Yarn { factor, original_context, beta_fast, beta_slow, truncate, .. } => {
            // The dimension whose wavelength turns `rotations` times within the original context.
            let dimension = |rotations: f64| {
                let turns = original_context as f64 / (rotations * std::f64::consts::TAU);
                dim * libm::log(turns) / (2.0 * libm::log(spec.theta))
            };
            let (mut low, mut high) = (dimension(beta_fast), dimension(beta_slow));
            if truncate {
                (low, high) = (low.floor(), high.ceil());
            }
            let (low, mut high) = (low.max(0.0), high.min(dim - 1.0));
            if low == high {
                high += 0.001;
            }
            plain
                .enumerate()
                .map(|(i, f)| {
                    let stretch = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                    f / factor * stretch + f * (1.0 - stretch)
                })
                .collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_angles_are_position_times_frequency() {
        let spec = RopeSpec { theta: 10_000.0, ..RopeSpec::default() };
        let table = RopeTable::new(&spec, 4, 8);
        assert_eq!(table.cos(0), [1.0, 1.0]);
        assert!((table.sin(3)[0] - 3f32.sin()).abs() < 1e-6);
        assert!((table.sin(3)[1] - 0.03f32.sin()).abs() < 1e-7);
    }

    #[test]
    fn yarn_keeps_fast_dimensions_and_stretches_slow_ones() {
        let yarn = RopeScaling::Yarn {
            factor: 4.0,
            original_context: 512,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention_factor: 1.0,
            truncate: true,
        };
        let plain = frequencies(&RopeSpec { theta: 1e6, ..RopeSpec::default() }, 32);
        let stretched = frequencies(&RopeSpec { theta: 1e6, scaling: yarn, ..RopeSpec::default() }, 32);
        assert_eq!(plain[0], stretched[0]);
        assert!((plain[31] / stretched[31] - 4.0).abs() < 1e-9);
        assert!(plain.iter().zip(&stretched).all(|(p, s)| *s <= *p && *s >= *p / 4.0 - 1e-18));
    }
}
