//! The largest of a few or many scores: router and greedy sampling.

use crate::exp::max_lanes;
use crate::isa::Kernels;
use crate::simd::{LANES, Op, Simd};

/// Writes the ids of the `out.len()` largest scores, the largest first.
///
/// Of equal scores the lower id comes first, and is the one that is kept. A NaN counts as smaller than any
/// number. Meant for a router's k of 1 to a few dozen: the cost is up to `n * k`.
///
/// # Panics
/// If there are fewer scores than `out` is long, or more than `u32` counts.
pub fn top_k(scores: &[f32], out: &mut [u32]) {
    assert!(out.len() <= scores.len() && scores.len() <= u32::MAX as usize, "top-k of {}", scores.len());
    let greater = |a: f32, b: f32| a > b || (b.is_nan() && !a.is_nan());
    let mut kept = 0;
    for (id, &score) in scores.iter().enumerate() {
        // Ids ascend, so a score goes behind all those that it does not exceed.
        let mut at = kept;
        while at > 0 && greater(score, scores[out[at - 1] as usize]) {
            at -= 1;
        }
        if at < out.len() {
            kept = (kept + 1).min(out.len());
            out.copy_within(at..kept - 1, at + 1);
            out[at] = id as u32;
        }
    }
}

/// In the order of numbers; a NaN is below all, the two zeros are one.
fn rank(score: f32) -> u32 {
    const SIGN: u32 = 1 << 31;
    if score.is_nan() {
        return 0;
    }
    // -0 + 0 is +0.
    let bits = (score + 0.0).to_bits();
    if bits & SIGN == 0 { bits | SIGN } else { !bits }
}

/// Writes the ids of the `out.len()` largest scores, ascending: the ids that [`top_k`] gives, for k up to thousands.
///
/// The cost is linear in the number of scores, whatever k is. `scratch` is as long as `scores`.
///
/// # Panics
/// If there are fewer scores than `out` is long, or more than `u32` counts, or `scratch` has another length.
pub fn top_k_ascending(scores: &[f32], scratch: &mut [u32], out: &mut [u32]) {
    assert!(out.len() <= scores.len() && scores.len() <= u32::MAX as usize, "top-k of {}", scores.len());
    assert_eq!(scratch.len(), scores.len(), "a scratch of one rank per score");
    if out.is_empty() {
        return;
    }
    scratch.iter_mut().zip(scores).for_each(|(rank_of, &score)| *rank_of = rank(score));
    let (_, &mut least, above) = scratch.select_nth_unstable(scores.len() - out.len());
    // Those above it are all in; of those like it, the first.
    let mut equal = out.len() - above.iter().filter(|&&rank| rank > least).count();
    let mut kept = 0;
    for (id, &score) in scores.iter().enumerate() {
        let rank = rank(score);
        if rank < least || (rank == least && equal == 0) {
            continue;
        }
        equal -= usize::from(rank == least);
        out[kept] = id as u32;
        kept += 1;
    }
}

struct Argmax<'a> {
    scores: &'a [f32],
}

impl Argmax<'_> {
    /// The first that equals `max`: by chunks without a way out, which become vectors.
    #[inline(always)]
    fn first(self, max: f32) -> u32 {
        let holds = |chunk: &[f32]| chunk.iter().fold(false, |holds, &score| holds | (score == max));
        let at = self.scores.chunks(4 * LANES).position(holds).unwrap_or(0) * 4 * LANES;
        (at + self.scores[at..].iter().position(|&score| score == max).unwrap_or(0)) as u32
    }
}

impl Op for Argmax<'_> {
    type Out = u32;

    fn scalar(self) -> u32 {
        let max = self.scores.iter().fold(f32::NEG_INFINITY, |max, &x| if x > max { x } else { max });
        self.first(max)
    }

    #[inline(always)]
    fn vector<S: Simd>(self, s: S) -> u32 {
        let max = max_lanes(s, self.scores, f32::NEG_INFINITY);
        self.first(max)
    }
}

impl Kernels {
    /// The lowest id of the largest score. A NaN counts as smaller than any number; 0 if there is none.
    ///
    /// # Panics
    /// If there are more scores than `u32` counts.
    #[must_use]
    pub fn argmax(self, scores: &[f32]) -> u32 {
        assert!(scores.len() <= u32::MAX as usize);
        self.run(Argmax { scores })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ways_keep_the_same_ids() {
        let mut state = 7u32;
        let mut next = move |below: u32| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) % below
        };
        // Few different scores, so that many are equal, and all that are odd.
        let odd = [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0, -0.0, f32::MIN_POSITIVE / 2.0];
        for n in 1..80 {
            for k in [0, 1, n / 3, n / 2, n - 1, n] {
                let scores: Vec<f32> = (0..n)
                    .map(|_| match next(16) {
                        i if (i as usize) < odd.len() => odd[i as usize],
                        i => (i as f32 - 11.0) * 0.25,
                    })
                    .collect();
                let mut expected = vec![0; k];
                top_k(&scores, &mut expected);
                expected.sort_unstable();
                let mut out = vec![u32::MAX; k];
                top_k_ascending(&scores, &mut vec![9; n], &mut out);
                assert_eq!(out, expected, "{k} of {scores:?}");
            }
        }
    }
}
