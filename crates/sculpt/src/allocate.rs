//! A budget of bits per weight, spent by tensor kind and layer.
//!
//! All experts get the widest codes that fit everywhere; what is left is spent where a further bit takes away the most
//! error for its bytes. Nothing goes below the common width: paying for one kind with another has only lost
//! (EXP-QUANT-04).

use smoe_format::{Encoding, Projection};

/// Widths of codes, in ascending order.
pub(crate) const WIDTHS: [u8; 6] = [2, 3, 4, 5, 6, 8];

/// How much the same relative error costs in gate, up and down: by what one more bit there lowered KL, 23, 18 and 36 %
/// from 3 bits everywhere (EXP-QUANT-04); with our own codes it was 23, 18 and 34 % (EXP-QUANT-13).
const COST: [f64; 3] = [0.23, 0.18, 0.36];

/// One kind of a layer.
pub(crate) struct Candidate {
    /// In ascending order, with the bytes that all its experts take.
    pub encodings: Vec<(Encoding, u64)>,
    /// Squared error of each over the power of the weights.
    pub errors: Vec<f64>,
    pub projection: Projection,
}

/// The index of the encoding that each candidate gets of at most `budget` bytes; `None` if the narrowest take more.
pub(crate) fn allocate(candidates: &[Candidate], budget: u64) -> Option<Vec<usize>> {
    let widths = candidates.iter().map(|c| c.encodings.len()).min().unwrap_or(0);
    let all = |width: usize| candidates.iter().map(|c| c.encodings[width].1).sum::<u64>();
    let common = (0..widths).rev().find(|&width| all(width) <= budget)?;
    let mut left = budget - all(common);
    let mut chosen = vec![common; candidates.len()];
    if common + 1 == widths {
        return Some(chosen);
    }
    // Gain for a byte, the greatest first, by place where equal.
    let mut steps: Vec<(f64, usize)> = candidates
        .iter()
        .enumerate()
        .map(|(i, c)| {
            let bytes = c.encodings[common + 1].1 - c.encodings[common].1;
            let gain = COST[c.projection as usize] * (c.errors[common] - c.errors[common + 1]);
            (gain / bytes.max(1) as f64, i)
        })
        .collect();
    steps.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    for (_, i) in steps {
        let bytes = candidates[i].encodings[common + 1].1 - candidates[i].encodings[common].1;
        if bytes <= left {
            left -= bytes;
            chosen[i] = common + 1;
        }
    }
    Some(chosen)
}

#[cfg(test)]
mod tests {
    use smoe_format::{Uniform, Zero};

    use super::*;

    fn candidates(layers: usize) -> Vec<Candidate> {
        let encoding = |bits| Encoding::Uniform(Uniform::new(bits, 64, Zero::Symmetric).expect("valid"));
        (0..layers)
            .flat_map(|layer| Projection::ALL.map(|projection| (layer, projection)))
            .map(|(layer, projection)| Candidate {
                encodings: WIDTHS.map(|bits| (encoding(bits), 1000 * u64::from(bits) + 250)).to_vec(),
                // A layer in the middle errs more.
                errors: WIDTHS
                    .map(|bits| 0.25f64.powi(i32::from(bits)) * if layer == 2 { 1.5 } else { 1.0 })
                    .to_vec(),
                projection,
            })
            .collect()
    }

    fn bits(chosen: &[usize]) -> Vec<u8> {
        chosen.iter().map(|&i| WIDTHS[i]).collect()
    }

    #[test]
    fn what_is_left_goes_to_down_and_nothing_pays_for_it() {
        let c = candidates(4);
        let per_weight = |bpw: u64| 10 * bpw * c.len() as u64;
        assert_eq!(bits(&allocate(&c, per_weight(325)).expect("fits")), [3; 12]);
        let third = bits(&allocate(&c, per_weight(325) + 4000).expect("fits"));
        assert_eq!(third, [3, 3, 4, 3, 3, 4, 3, 3, 4, 3, 3, 4]);
        let first = bits(&allocate(&c, per_weight(325) + 1999).expect("fits"));
        assert_eq!(first, [3, 3, 3, 3, 3, 3, 3, 3, 4, 3, 3, 3]);
        assert_eq!(bits(&allocate(&c, u64::MAX).expect("fits")), [8; 12]);
        assert!(allocate(&c, per_weight(225) - 1).is_none());
        for budget in (per_weight(225)..per_weight(900)).step_by(777) {
            let chosen = allocate(&c, budget).expect("fits");
            let spent: u64 = chosen.iter().zip(&c).map(|(&i, c)| c.encodings[i].1).sum();
            assert!(spent <= budget);
        }
    }
}
