//! From logits to a token: penalties, bias, temperature, top-k, top-p, min-p, a seeded draw.
//!
//! The order is that of `transformers`' logits processors and warpers: repetition penalty, presence and
//! frequency penalty, bias, temperature, top-k, top-p, min-p. Memory is claimed when the sampler is made;
//! a draw is one pass over the vocabulary and no allocation.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

use smoe_kernels::Kernels;

use crate::EngineError;

/// How to choose the next token.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// 0 is greedy: the largest logit, the lowest id at ties.
    pub temperature: f32,
    /// Keep the k most likely tokens; 0 keeps all.
    pub top_k: usize,
    /// Keep the fewest most likely tokens whose probabilities reach this; 1 keeps all.
    pub top_p: f32,
    /// Keep tokens at least this likely, relative to the most likely one; 0 keeps all.
    pub min_p: f32,
    /// Divides (positive) or multiplies (negative) the logits of tokens in prompt and answer; 1 is off.
    pub repetition_penalty: f32,
    /// Subtracted once from tokens of the answer.
    pub presence_penalty: f32,
    /// Subtracted from tokens of the answer, once per occurrence.
    pub frequency_penalty: f32,
    /// Added to logits.
    pub logit_bias: Vec<(u32, f32)>,
    /// Seed of the draws.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: 0,
        }
    }
}

impl Sampling {
    /// Checks ranges.
    ///
    /// # Errors
    /// Names the setting and its range.
    pub fn validate(&self, vocab_size: usize) -> Result<(), EngineError> {
        let fail = |name: &'static str, value: f32, rule: &'static str| {
            Err(EngineError::Sampling { name, value: value.to_string(), rule })
        };
        if !(self.temperature >= 0.0 && self.temperature.is_finite()) {
            return fail("temperature", self.temperature, "0 or more");
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return fail("top_p", self.top_p, "above 0, at most 1");
        }
        if !(0.0..=1.0).contains(&self.min_p) {
            return fail("min_p", self.min_p, "0 to 1");
        }
        if !(self.repetition_penalty > 0.0 && self.repetition_penalty.is_finite()) {
            return fail("repetition_penalty", self.repetition_penalty, "above 0");
        }
        for (name, value) in
            [("presence_penalty", self.presence_penalty), ("frequency_penalty", self.frequency_penalty)]
        {
            if !value.is_finite() {
                return fail(name, value, "a number");
            }
        }
        match self.logit_bias.iter().find(|(id, bias)| *id as usize >= vocab_size || bias.is_nan()) {
            Some((id, _)) => Err(EngineError::Token { id: *id, vocab_size }),
            None => Ok(()),
        }
    }
}

/// A token that may be drawn. Ordered by logit, then by the lower id.
#[derive(Clone, Copy, PartialEq)]
struct Candidate {
    logit: f32,
    id: u32,
}

impl Eq for Candidate {}

impl Ord for Candidate {
    fn cmp(&self, other: &Self) -> Ordering {
        self.logit.total_cmp(&other.logit).then(other.id.cmp(&self.id))
    }
}

impl PartialOrd for Candidate {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// Draws tokens; knows what it has drawn.
pub struct Sampler {
    sampling: Sampling,
    random: SplitMix64,
    /// Occurrences in prompt and answer, and in the answer alone, by token id.
    counts: Vec<(u32, u32)>,
    /// Ids with a count.
    seen: Vec<u32>,
    worst: BinaryHeap<Reverse<Candidate>>,
    best: BinaryHeap<Candidate>,
    kept: Vec<(u32, f32)>,
}

impl std::fmt::Debug for Sampler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sampler").field("sampling", &self.sampling).finish_non_exhaustive()
    }
}

impl Sampler {
    /// A sampler for a vocabulary.
    ///
    /// # Errors
    /// If a setting is out of range.
    pub fn new(sampling: Sampling, vocab_size: usize) -> Result<Self, EngineError> {
        sampling.validate(vocab_size)?;
        let candidates = if sampling.temperature == 0.0 { 0 } else { vocab_size };
        Ok(Self {
            random: SplitMix64(sampling.seed),
            sampling,
            counts: vec![(0, 0); vocab_size],
            seen: Vec::with_capacity(vocab_size),
            worst: BinaryHeap::with_capacity(candidates),
            best: BinaryHeap::with_capacity(candidates),
            kept: Vec::with_capacity(candidates),
        })
    }

    /// Counts the tokens of a prompt (for the repetition penalty) and forgets those before.
    pub fn begin(&mut self, prompt: &[u32]) {
        for id in self.seen.drain(..) {
            self.counts[id as usize] = (0, 0);
        }
        for &id in prompt {
            self.count(id, 0);
        }
    }

    fn count(&mut self, id: u32, in_answer: u32) {
        let Some(counts) = self.counts.get_mut(id as usize) else { return };
        if counts.0 == 0 {
            self.seen.push(id);
        }
        counts.0 += 1;
        counts.1 += in_answer;
    }

    /// Chooses a token and counts it. `logits` are changed by penalties and bias.
    pub fn sample(&mut self, kernels: Kernels, logits: &mut [f32]) -> u32 {
        self.penalise(logits);
        let greedy = self.sampling.temperature == 0.0;
        let id = if greedy { kernels.argmax(logits) } else { self.draw(logits) };
        self.count(id, 1);
        id
    }

    fn penalise(&self, logits: &mut [f32]) {
        let s = &self.sampling;
        if s.repetition_penalty != 1.0 || s.presence_penalty != 0.0 || s.frequency_penalty != 0.0 {
            for &id in &self.seen {
                let (_, in_answer) = self.counts[id as usize];
                let logit = &mut logits[id as usize];
                if *logit > 0.0 {
                    *logit /= s.repetition_penalty;
                } else {
                    *logit *= s.repetition_penalty;
                }
                if in_answer > 0 {
                    *logit -= s.presence_penalty + s.frequency_penalty * in_answer as f32;
                }
            }
        }
        for &(id, bias) in &s.logit_bias {
            logits[id as usize] += bias;
        }
    }

    fn draw(&mut self, logits: &[f32]) -> u32 {
        let s = &self.sampling;
        let k = if s.top_k == 0 { logits.len() } else { s.top_k.min(logits.len()) };
        self.best.clear();
        let candidates = logits.iter().enumerate().map(|(id, &logit)| Candidate { logit, id: id as u32 });
        if k < logits.len() {
            // A heap of the k best, the worst on top: one pass, most logits cost one comparison.
            for candidate in candidates.map(Reverse) {
                if self.worst.len() < k {
                    self.worst.push(candidate);
                } else if self.worst.peek().is_some_and(|top| candidate < *top) {
                    self.worst.pop();
                    self.worst.push(candidate);
                }
            }
            self.best.extend(self.worst.drain().map(|Reverse(candidate)| candidate));
        } else {
            self.best.extend(candidates);
        }
        let top = self.best.peek().map_or(0.0, |c| c.logit);
        let weight = |logit: f32| libm::exp(f64::from((logit - top) / s.temperature));
        // This total only decides where top-p ends; the draw sums what is kept.
        let total: f64 = self.best.iter().map(|c| weight(c.logit)).sum();

        self.kept.clear();
        let (mut sum, mut first) = (0.0, None);
        while let Some(candidate) = self.best.pop() {
            let w = weight(candidate.logit);
            let likeliest = *first.get_or_insert(w);
            let enough = sum >= f64::from(s.top_p) * total;
            if !self.kept.is_empty() && (enough || w < f64::from(s.min_p) * likeliest) {
                break;
            }
            sum += w;
            self.kept.push((candidate.id, w as f32));
        }
        let sum: f64 = self.kept.iter().map(|(_, w)| f64::from(*w)).sum();
        let mut left = self.random.unit() * sum;
        for &(id, w) in &self.kept {
            left -= f64::from(w);
            if left < 0.0 {
                return id;
            }
        }
        self.kept.last().map_or(0, |(id, _)| *id)
    }
}

/// SplitMix64 (Steele, Lea and Flood 2014): the seed is the state, any seed is good.
#[derive(Debug)]
struct SplitMix64(u64);

impl SplitMix64 {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in [0, 1), 53 bits.
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampler(sampling: Sampling) -> Sampler {
        Sampler::new(sampling, 5).unwrap()
    }

    fn frequencies(sampling: Sampling, logits: [f32; 5]) -> [f64; 5] {
        let mut s = sampler(sampling);
        let mut counts = [0.0; 5];
        for _ in 0..20_000 {
            s.begin(&[]);
            counts[s.sample(Kernels::detect(), &mut logits.clone()) as usize] += 1.0 / 20_000.0;
        }
        counts
    }

    const LOGITS: [f32; 5] = [1.0, 3.0, 2.0, 0.0, -1.0];

    #[test]
    fn greedy_takes_the_largest_and_the_lowest_id_at_ties() {
        assert_eq!(
            sampler(Sampling::default()).sample(Kernels::detect(), &mut [0.0, 2.0, 2.0, f32::NAN, 1.0]),
            1
        );
    }

    #[test]
    fn temperature_one_draws_with_the_softmax() {
        let drawn = frequencies(Sampling { temperature: 1.0, ..Sampling::default() }, LOGITS);
        let sum: f64 = LOGITS.iter().map(|l| f64::from(*l).exp()).sum();
        for (frequency, logit) in drawn.iter().zip(LOGITS) {
            assert!((frequency - f64::from(logit).exp() / sum).abs() < 0.015, "{drawn:?}");
        }
    }

    #[test]
    fn top_k_top_p_and_min_p_cut_the_tail() {
        let base = Sampling { temperature: 1.0, ..Sampling::default() };
        let cut = |s: Sampling| frequencies(s, LOGITS).map(|f| f > 0.0);
        assert_eq!(cut(Sampling { top_k: 2, ..base.clone() }), [false, true, true, false, false]);
        // Probabilities are 0.636, 0.234, 0.086, ...: two of them reach 0.7.
        assert_eq!(cut(Sampling { top_p: 0.7, ..base.clone() }), [false, true, true, false, false]);
        assert_eq!(cut(Sampling { top_p: 0.6, ..base.clone() }), [false, true, false, false, false]);
        assert_eq!(cut(Sampling { min_p: 0.1, ..base }), [true, true, true, false, false]);
    }

    #[test]
    fn penalties_and_bias_move_logits_as_documented() {
        let mut s = sampler(Sampling {
            repetition_penalty: 2.0,
            presence_penalty: 0.25,
            frequency_penalty: 0.5,
            logit_bias: vec![(4, 10.0)],
            ..Sampling::default()
        });
        s.begin(&[1, 4]);
        let mut logits = LOGITS;
        assert_eq!(s.sample(Kernels::detect(), &mut logits), 4);
        assert_eq!(logits, [1.0, 1.5, 2.0, 0.0, 8.0]);
        let mut logits = LOGITS;
        s.sample(Kernels::detect(), &mut logits);
        assert_eq!(logits, [1.0, 1.5, 2.0, 0.0, 7.25]);
        s.begin(&[]);
        let mut logits = LOGITS;
        s.sample(Kernels::detect(), &mut logits);
        assert_eq!(logits[1], 3.0);
    }

    #[test]
    fn the_same_seed_draws_the_same_tokens() {
        let draws = |seed| {
            let mut s = sampler(Sampling { temperature: 2.0, seed, ..Sampling::default() });
            (0..50).map(|_| s.sample(Kernels::detect(), &mut LOGITS.clone())).collect::<Vec<_>>()
        };
        assert_eq!(draws(1337), draws(1337));
        assert_ne!(draws(1337), draws(1338));
    }

    #[test]
    fn settings_out_of_range_are_named() {
        let bad = [
            Sampling { temperature: -1.0, ..Sampling::default() },
            Sampling { top_p: 0.0, ..Sampling::default() },
            Sampling { min_p: 2.0, ..Sampling::default() },
            Sampling { repetition_penalty: 0.0, ..Sampling::default() },
            Sampling { logit_bias: vec![(5, 0.0)], ..Sampling::default() },
        ];
        assert!(bad.into_iter().all(|s| Sampler::new(s, 5).is_err()));
    }
}
