//! From logits to a token: penalties, bias, temperature, top-k, top-p, min-p, a seeded draw.
//!
//! The order is that of `transformers`' logits processors and warpers: repetition penalty, presence and
//! frequency penalty, bias, temperature, top-k, top-p (of what top-k left), min-p. Memory is claimed when the
//! sampler is made; a draw passes over the vocabulary, ranks only what can be drawn, and allocates nothing.

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
        for &(id, bias) in &self.logit_bias {
            if id as usize >= vocab_size {
                return Err(EngineError::Token { id, vocab_size });
            }
            if bias.is_nan() || bias == f32::INFINITY {
                return fail("logit_bias", bias, "a number, or -inf to forbid the token");
            }
        }
        Ok(())
    }
}

impl Sampling {
    /// Whether the next token is always the one with the largest logit.
    #[must_use]
    pub fn is_greedy(&self) -> bool {
        let unpenalised = self.repetition_penalty == 1.0
            && self.presence_penalty == 0.0
            && self.frequency_penalty == 0.0
            && self.logit_bias.is_empty();
        self.temperature == 0.0 && unpenalised
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
    /// Logits with penalties and bias.
    logits: Vec<f32>,
    /// `exp((logit - largest) / temperature)` of every token.
    weights: Vec<f32>,
    /// The k best, the worst on top.
    worst: BinaryHeap<Reverse<Candidate>>,
    /// What may be drawn, the likeliest first.
    kept: Vec<Candidate>,
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
        let drawn = if sampling.temperature == 0.0 { 0 } else { vocab_size };
        Ok(Self {
            random: SplitMix64(sampling.seed),
            counts: vec![(0, 0); vocab_size],
            seen: Vec::with_capacity(vocab_size),
            logits: vec![0.0; vocab_size],
            weights: vec![0.0; drawn],
            worst: BinaryHeap::with_capacity(sampling.top_k.min(drawn)),
            kept: Vec::with_capacity(drawn),
            sampling,
        })
    }

    /// How it chooses.
    #[must_use]
    pub const fn sampling(&self) -> &Sampling {
        &self.sampling
    }

    /// Bytes that a sampler claims at most.
    #[must_use]
    pub const fn bytes(vocab_size: usize) -> u64 {
        (vocab_size * (8 + 4 + 4 + 4 + 8 + 8)) as u64
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

    /// Chooses a token by `logits` (`[vocab_size]`) and counts it.
    ///
    /// # Panics
    /// If there are not as many logits as the sampler was made for.
    pub fn sample(&mut self, kernels: Kernels, logits: &[f32]) -> u32 {
        self.sample_allowed(kernels, logits, None)
    }

    /// As [`Self::sample`], of the tokens that `mask` allows: bit `id % 32` of word `id / 32`; those beyond its last
    /// word are forbidden. If it allows none, some token is chosen all the same.
    pub fn sample_allowed(&mut self, kernels: Kernels, logits: &[f32], mask: Option<&[u32]>) -> u32 {
        self.logits.copy_from_slice(logits);
        self.penalise();
        if let Some(mask) = mask {
            for (word, logits) in self.logits.chunks_mut(32).enumerate() {
                let allowed = mask.get(word).copied().unwrap_or(0);
                for (bit, logit) in logits.iter_mut().enumerate() {
                    if allowed >> bit & 1 == 0 {
                        *logit = f32::NEG_INFINITY;
                    }
                }
            }
        }
        let top = kernels.argmax(&self.logits);
        let id = if self.sampling.temperature == 0.0 { top } else { self.draw(kernels, top) };
        self.count(id, 1);
        id
    }

    fn penalise(&mut self) {
        let s = &self.sampling;
        if s.repetition_penalty != 1.0 || s.presence_penalty != 0.0 || s.frequency_penalty != 0.0 {
            for &id in &self.seen {
                let (_, in_answer) = self.counts[id as usize];
                let logit = &mut self.logits[id as usize];
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
            self.logits[id as usize] += bias;
        }
    }

    /// Draws with the probabilities that temperature, top-k, top-p and min-p leave.
    fn draw(&mut self, kernels: Kernels, top: u32) -> u32 {
        let Sampling { temperature, top_k, top_p, min_p, .. } = self.sampling;
        let largest = self.logits[top as usize];
        for (weight, logit) in self.weights.iter_mut().zip(&self.logits) {
            *weight = (logit - largest) / temperature;
        }
        kernels.exp_in_place(&mut self.weights);
        // The likeliest token has weight 1, so min-p is a threshold.
        let above = |weight: f32| if weight >= min_p { weight } else { 0.0 };
        if top_k > 0 && top_k < self.logits.len() {
            self.keep_top_k();
        } else if top_p < 1.0 {
            self.keep_likely();
        } else {
            // Nothing to rank.
            let weights = self.weights.iter().map(|&w| above(w));
            return choose(&mut self.random, weights).map_or(top, |id| id as u32);
        }
        let weights = self.kept.iter().map(|c| above(self.weights[c.id as usize]));
        choose(&mut self.random, weights).map_or(top, |i| self.kept[i].id)
    }

    /// Cuts what is ranked after the fewest tokens that reach `top_p` of `total`, at least one.
    fn cut(&mut self, total: f64) {
        if self.sampling.top_p == 1.0 {
            return;
        }
        let enough = f64::from(self.sampling.top_p) * total;
        let mut sum = 0.0;
        let weights = self.kept.iter().map(|c| f64::from(self.weights[c.id as usize]));
        let keep = weights.take_while(|w| {
            let wanted = sum < enough;
            sum += w;
            wanted
        });
        let keep = keep.count();
        self.kept.truncate(keep.max(1));
    }

    /// Ranks the k largest: one pass, in which most logits cost one comparison.
    fn keep_top_k(&mut self) {
        for (id, &logit) in self.logits.iter().enumerate() {
            let candidate = Reverse(Candidate { logit, id: id as u32 });
            if self.worst.len() < self.sampling.top_k {
                self.worst.push(candidate);
            } else if self.worst.peek().is_some_and(|top| candidate < *top) {
                self.worst.pop();
                self.worst.push(candidate);
            }
        }
        self.kept.clear();
        self.kept.extend(self.worst.drain().map(|Reverse(candidate)| candidate));
        self.kept.sort_unstable_by(|a, b| b.cmp(a));
        let total = self.kept.iter().map(|c| f64::from(self.weights[c.id as usize])).sum();
        self.cut(total);
    }

    /// Ranks what top-p can keep: tokens above a threshold, lowered until they reach the probability, so
    /// that the long tail is not sorted (EXP-ENGINE-01). The ranking is the same as that of a full sort.
    fn keep_likely(&mut self) {
        let total: f64 = self.weights.iter().map(|&w| f64::from(w)).sum();
        let enough = f64::from(self.sampling.top_p) * total;
        let mut threshold = 1.0 / 256.0;
        loop {
            self.kept.clear();
            let mut sum = 0.0;
            for (id, (&logit, &weight)) in self.logits.iter().zip(&self.weights).enumerate() {
                if weight >= threshold {
                    sum += f64::from(weight);
                    self.kept.push(Candidate { logit, id: id as u32 });
                }
            }
            if sum >= enough || self.kept.len() == self.logits.len() {
                break;
            }
            // Below the smallest normal weight everything is kept.
            threshold = if threshold > 1e-30 { threshold / 256.0 } else { 0.0 };
        }
        self.kept.sort_unstable_by(|a, b| b.cmp(a));
        // What the threshold left out is part of the whole that top-p is a share of.
        self.cut(total);
    }
}

/// The logarithm of the probability of `token` by these logits, and the `n` likeliest tokens with theirs.
#[must_use]
pub fn log_probabilities(logits: &[f32], token: u32, n: usize) -> (f32, Vec<(u32, f32)>) {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&l| f64::from(l - largest).exp()).sum();
    let log_sum = f64::from(largest) + sum.ln();
    let of = |id: u32| (f64::from(logits[id as usize]) - log_sum) as f32;
    let mut best: BinaryHeap<Reverse<Candidate>> = BinaryHeap::with_capacity(n + 1);
    for (id, &logit) in (0..).zip(logits) {
        let candidate = Candidate { logit, id };
        if best.len() < n || best.peek().is_some_and(|worst| candidate > worst.0) {
            best.push(Reverse(candidate));
            if best.len() > n {
                best.pop();
            }
        }
    }
    let top = best.into_sorted_vec().into_iter().map(|Reverse(c)| (c.id, of(c.id)));
    (of(token), top.collect())
}

/// The index of a draw in proportion to `weights`; none if all are 0.
fn choose(random: &mut SplitMix64, weights: impl Iterator<Item = f32> + Clone) -> Option<usize> {
    let sum: f64 = weights.clone().map(f64::from).sum();
    let mut left = random.unit() * sum;
    let mut last = None;
    for (i, weight) in weights.enumerate() {
        if weight > 0.0 {
            left -= f64::from(weight);
            last = Some(i);
            if left < 0.0 {
                break;
            }
        }
    }
    last
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
            counts[s.sample(Kernels::detect(), &logits) as usize] += 1.0 / 20_000.0;
        }
        counts
    }

    const LOGITS: [f32; 5] = [1.0, 3.0, 2.0, 0.0, -1.0];

    #[test]
    fn greedy_takes_the_largest_and_the_lowest_id_at_ties() {
        assert_eq!(
            sampler(Sampling::default()).sample(Kernels::detect(), &[0.0, 2.0, 2.0, f32::NAN, 1.0]),
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
    fn top_p_keeps_what_a_full_sort_would() {
        // Flat, peaked and long-tailed: the threshold has to be lowered a different number of times.
        for (spread, top_p) in [(0.0, 0.9), (3.0, 0.5), (12.0, 0.999), (60.0, 0.95), (200.0, 1.0 - 1e-7)] {
            let mut random = SplitMix64(9);
            let logits: Vec<f32> = (0..3000).map(|_| (random.unit() * spread) as f32).collect();
            let sampling = Sampling { temperature: 1.0, top_p, ..Sampling::default() };
            let mut s = Sampler::new(sampling, logits.len()).unwrap();
            s.sample(Kernels::detect(), &logits);
            let mut order: Vec<usize> = (0..logits.len()).collect();
            order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
            let total: f64 = s.weights.iter().map(|&w| f64::from(w)).sum();
            let (mut sum, mut expected) = (0.0, Vec::new());
            for id in order {
                if sum >= f64::from(top_p) * total {
                    break;
                }
                sum += f64::from(s.weights[id]);
                expected.push(id as u32);
            }
            assert_eq!(s.kept.iter().map(|c| c.id).collect::<Vec<_>>(), expected, "{spread} {top_p}");
        }
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
        assert_eq!(s.sample(Kernels::detect(), &LOGITS), 4);
        assert_eq!(s.logits, [1.0, 1.5, 2.0, 0.0, 8.0]);
        s.sample(Kernels::detect(), &LOGITS);
        assert_eq!(s.logits, [1.0, 1.5, 2.0, 0.0, 7.25]);
        s.begin(&[]);
        s.sample(Kernels::detect(), &LOGITS);
        assert_eq!(s.logits[1], 3.0);
    }

    #[test]
    fn the_same_seed_draws_the_same_tokens() {
        let draws = |seed| {
            let mut s = sampler(Sampling { temperature: 2.0, seed, ..Sampling::default() });
            (0..50).map(|_| s.sample(Kernels::detect(), &LOGITS)).collect::<Vec<_>>()
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
            Sampling { logit_bias: vec![(1, f32::INFINITY)], ..Sampling::default() },
        ];
        assert!(bad.into_iter().all(|s| Sampler::new(s, 5).is_err()));
    }
}
