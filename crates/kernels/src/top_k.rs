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
