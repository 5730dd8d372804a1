//! Fidelity of one model to another from their logits, and perplexity: in `f64`, in nats.
//!
//! Everything that says how good a vault is (`smoe eval`, the fidelity table, tests) has its definitions from here.

/// Natural logarithms of the probabilities that `logits` mean.
#[must_use]
pub fn log_softmax<F: Copy + Into<f64>>(logits: &[F]) -> Vec<f64> {
    let largest = logits.iter().fold(f64::NEG_INFINITY, |m, &l| m.max(l.into()));
    let sum: f64 = logits.iter().map(|&l| (l.into() - largest).exp()).sum();
    let log_sum = largest + sum.ln();
    logits.iter().map(|&l| l.into() - log_sum).collect()
}

/// Kullback-Leibler divergence of `q` from `p`, in nats: what is lost if `q` stands for `p`. Not negative,
/// zero only if both mean the same distribution. Both are logits.
///
/// # Panics
/// If the lengths differ.
#[must_use]
pub fn kl_divergence<F: Copy + Into<f64>, G: Copy + Into<f64>>(p: &[F], q: &[G]) -> f64 {
    kl_of_logs(&log_softmax(p), &log_softmax(q))
}

/// [`kl_divergence`] of distributions that are given as the logarithms of their probabilities.
///
/// # Panics
/// If the lengths differ.
#[must_use]
pub fn kl_of_logs(p: &[f64], q: &[f64]) -> f64 {
    assert_eq!(p.len(), q.len(), "two vocabularies");
    // Summed as p * (q/p - 1 - ln(q/p)), whose terms are not negative: the plain form loses small
    // divergences among terms of both signs. The added part sums to zero.
    p.iter()
        .zip(q)
        .map(|(&p, &q)| {
            if p == f64::NEG_INFINITY {
                return q.exp();
            }
            p.exp() * ((q - p).exp_m1() - (q - p))
        })
        .sum()
}

/// Index of the largest logit, the lowest at a tie.
///
/// # Panics
/// If there is none.
#[must_use]
pub fn argmax<F: Copy + Into<f64>>(logits: &[F]) -> usize {
    assert!(!logits.is_empty(), "no logits");
    let mut best = 0;
    for (i, &logit) in logits.iter().enumerate() {
        if logit.into() > logits[best].into() {
            best = i;
        }
    }
    best
}

/// Indices of the `k` largest values, largest first, the lower index first at a tie; all of them if there are fewer.
#[must_use]
pub fn top_k<F: Copy + Into<f64>>(values: &[F], k: usize) -> Vec<usize> {
    let mut best: Vec<(f64, usize)> = Vec::with_capacity(k + 1);
    for (i, &value) in values.iter().enumerate() {
        let value = value.into();
        if best.len() == k && best.last().is_none_or(|&(least, _)| value <= least) {
            continue;
        }
        let place = best.partition_point(|&(other, _)| other >= value);
        best.insert(place, (value, i));
        best.truncate(k);
    }
    best.into_iter().map(|(_, i)| i).collect()
}

/// Negative log-likelihood of `token`, in nats.
///
/// # Panics
/// If the token is not in the vocabulary.
#[must_use]
pub fn nll<F: Copy + Into<f64>>(logits: &[F], token: u32) -> f64 {
    -log_softmax(logits)[token as usize]
}

/// What is said of one token by one model, or by two.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenScore {
    /// Negative log-likelihood by `q`, in nats.
    pub nll: f64,
    /// Against a reference, if there is one.
    pub against: Option<Comparison>,
}

/// One token, seen by two models.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Comparison {
    /// Negative log-likelihood by the reference `p`, in nats.
    pub nll: f64,
    /// KL(p || q), in nats.
    pub kl: f64,
    /// Both name the same most likely token.
    pub top1: bool,
    /// Share of p's `k` most likely tokens that are among q's `k`.
    pub top_k: f64,
}

impl TokenScore {
    /// Scores the logits `q` that `token` followed, by themselves.
    ///
    /// # Panics
    /// If the token is not in the vocabulary.
    #[must_use]
    pub fn alone<F: Copy + Into<f64>>(q: &[F], token: u32) -> Self {
        Self { nll: nll(q, token), against: None }
    }

    /// Scores `q` by itself and against the reference's logits `p`, with agreement on `k` tokens.
    ///
    /// # Panics
    /// If the rows differ in length, the token is not in the vocabulary, or `k` is 0.
    #[must_use]
    pub fn against<F: Copy + Into<f64>, G: Copy + Into<f64>>(q: &[F], p: &[G], token: u32, k: usize) -> Self {
        let (of_p, of_q) = (top_k(p, k), top_k(q, k));
        assert!(!of_p.is_empty(), "agreement on no tokens");
        let common = of_p.iter().filter(|&token| of_q.contains(token)).count();
        let (p, q) = (log_softmax(p), log_softmax(q));
        let against = Comparison {
            nll: -p[token as usize],
            kl: kl_of_logs(&p, &q),
            top1: of_p[0] == of_q[0],
            top_k: common as f64 / of_p.len() as f64,
        };
        Self { nll: -q[token as usize], against: Some(against) }
    }
}

/// A mean over tokens that knows its documents: tokens of one document are not independent, so the error of
/// the mean comes from drawing whole documents anew.
#[derive(Clone, Debug, Default)]
pub struct DocumentMean {
    /// Sum and number of tokens of each document.
    documents: Vec<(f64, usize)>,
}

impl DocumentMean {
    /// Starts a document.
    pub fn begin(&mut self) {
        self.documents.push((0.0, 0));
    }

    /// Adds a token's value to the document begun last; begins one if there is none.
    pub fn add(&mut self, value: f64) {
        if self.documents.is_empty() {
            self.begin();
        }
        if let Some((sum, count)) = self.documents.last_mut() {
            *sum += value;
            *count += 1;
        }
    }

    /// Tokens added.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.documents.iter().map(|d| d.1).sum()
    }

    /// Documents that have tokens.
    #[must_use]
    pub fn documents(&self) -> usize {
        self.documents.iter().filter(|d| d.1 > 0).count()
    }

    /// The mean over all tokens; NaN if there are none.
    #[must_use]
    pub fn mean(&self) -> f64 {
        mean(self.documents.iter())
    }

    /// Bootstrap (Efron 1979) standard error of `statistic` of the mean: the deviation among `resamples`
    /// draws of as many documents with replacement. The same for the same data and `seed`; NaN for fewer
    /// than two documents.
    #[must_use]
    pub fn standard_error(&self, statistic: impl Fn(f64) -> f64, resamples: usize, seed: u64) -> f64 {
        let with_tokens: Vec<_> = self.documents.iter().filter(|d| d.1 > 0).collect();
        if with_tokens.len() < 2 || resamples < 2 {
            return f64::NAN;
        }
        let mut random = SplitMix64(seed);
        let draws: Vec<f64> = (0..resamples)
            .map(|_| {
                let drawn: Vec<_> =
                    (0..with_tokens.len()).map(|_| with_tokens[random.below(with_tokens.len())]).collect();
                statistic(mean(drawn.into_iter()))
            })
            .collect();
        let centre = draws.iter().sum::<f64>() / resamples as f64;
        let squares: f64 = draws.iter().map(|d| (d - centre) * (d - centre)).sum();
        (squares / (resamples - 1) as f64).sqrt()
    }
}

fn mean<'a>(documents: impl Iterator<Item = &'a (f64, usize)>) -> f64 {
    let (sum, count) = documents.fold((0.0, 0), |(s, n), d| (s + d.0, n + d.1));
    sum / count as f64
}

/// The generator of the bootstrap's draws (Steele, Lea, Flood 2014): the same on every machine.
struct SplitMix64(u64);

impl SplitMix64 {
    fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in `0..n`.
    fn below(&mut self, n: usize) -> usize {
        ((u128::from(self.next_u64()) * n as u128) >> 64) as usize
    }
}

/// Draws for an [`Estimate`]'s standard error: its own error is then about 2 %.
const RESAMPLES: usize = 1000;
const SEED: u64 = 0x5eed;

/// A mean and its standard error.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// The value over all tokens.
    pub value: f64,
    /// Bootstrap standard error over documents; NaN for fewer than two.
    pub standard_error: f64,
}

impl Estimate {
    /// `statistic` of a mean.
    #[must_use]
    pub fn of(mean: &DocumentMean, statistic: fn(f64) -> f64) -> Self {
        Self {
            value: statistic(mean.mean()),
            standard_error: mean.standard_error(statistic, RESAMPLES, SEED),
        }
    }

    /// The mean itself.
    #[must_use]
    pub fn mean(mean: &DocumentMean) -> Self {
        Self::of(mean, |mean| mean)
    }
}

/// How good a model `q` is over documents, and how faithful to another one, `p`, if its tokens were scored against
/// that ([`TokenScore::against`]).
#[derive(Clone, Debug, Default)]
pub struct Fidelity {
    nll: DocumentMean,
    nll_p: DocumentMean,
    nll_difference: DocumentMean,
    kl: DocumentMean,
    top1: DocumentMean,
    top_k: DocumentMean,
    kl_largest: f64,
}

/// What [`Fidelity`] found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Summary {
    /// Documents with scored tokens.
    pub documents: usize,
    /// Scored tokens.
    pub tokens: usize,
    /// Mean negative log-likelihood by q, in nats a token.
    pub nll: Estimate,
    /// `exp` of it.
    pub perplexity: Estimate,
    /// Against p, if every token was.
    pub against: Option<Against>,
}

/// How faithful q is to p.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Against {
    /// Mean negative log-likelihood by p, in nats a token.
    pub nll: Estimate,
    /// Perplexity of p.
    pub perplexity: Estimate,
    /// Perplexity of q over that of p; the error is of the pair, far smaller than of each alone.
    pub perplexity_ratio: Estimate,
    /// Mean KL(p || q), in nats a token.
    pub kl: Estimate,
    /// The largest KL of a token.
    pub kl_largest: f64,
    /// Share of tokens at which both name the same most likely token.
    pub top1: Estimate,
    /// Mean share of p's k most likely tokens that are among q's k.
    pub top_k: Estimate,
}

impl Fidelity {
    /// Starts a document.
    pub fn begin(&mut self) {
        let Self { nll, nll_p, nll_difference, kl, top1, top_k, kl_largest: _ } = self;
        for mean in [nll, nll_p, nll_difference, kl, top1, top_k] {
            mean.begin();
        }
    }

    /// Adds a token to the document begun last.
    pub fn add(&mut self, score: &TokenScore) {
        self.nll.add(score.nll);
        let Some(against) = &score.against else { return };
        self.nll_p.add(against.nll);
        self.nll_difference.add(score.nll - against.nll);
        self.kl.add(against.kl);
        self.kl_largest = self.kl_largest.max(against.kl);
        self.top1.add(f64::from(u8::from(against.top1)));
        self.top_k.add(against.top_k);
    }

    /// Mean negative log-likelihood by q so far, in nats a token.
    #[must_use]
    pub fn nll(&self) -> f64 {
        self.nll.mean()
    }

    /// Tokens so far.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.nll.tokens()
    }

    /// The figures so far.
    #[must_use]
    pub fn summary(&self) -> Summary {
        let compared = self.kl.tokens() > 0 && self.kl.tokens() == self.nll.tokens();
        Summary {
            documents: self.nll.documents(),
            tokens: self.nll.tokens(),
            nll: Estimate::mean(&self.nll),
            perplexity: Estimate::of(&self.nll, f64::exp),
            against: compared.then(|| Against {
                nll: Estimate::mean(&self.nll_p),
                perplexity: Estimate::of(&self.nll_p, f64::exp),
                perplexity_ratio: Estimate::of(&self.nll_difference, f64::exp),
                kl: Estimate::mean(&self.kl),
                kl_largest: self.kl_largest,
                top1: Estimate::mean(&self.top1),
                top_k: Estimate::mean(&self.top_k),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bell-shaped, mean 0 and variance 1: the sum of four uniforms.
    fn bell(random: &mut SplitMix64) -> f64 {
        let sum: f64 = (0..4).map(|_| (random.next_u64() >> 11) as f64 / (1u64 << 53) as f64).sum();
        (sum - 2.0) * 3f64.sqrt()
    }

    fn rows(seed: u64, n: usize) -> Vec<f32> {
        let mut random = SplitMix64(seed);
        (0..n).map(|_| 5.0 * bell(&mut random) as f32).collect()
    }

    #[test]
    fn log_softmax_sums_to_one_and_does_not_mind_a_shift() {
        let logits = rows(1, 300);
        let a = log_softmax(&logits);
        assert!((a.iter().map(|l| l.exp()).sum::<f64>() - 1.0).abs() < 1e-12);
        let shifted: Vec<f64> = logits.iter().map(|&l| f64::from(l) + 1e4).collect();
        for (a, b) in a.iter().zip(log_softmax(&shifted)) {
            assert!((a - b).abs() < 1e-10);
        }
        assert_eq!(log_softmax(&[0.0f32, f32::NEG_INFINITY]), [0.0, f64::NEG_INFINITY]);
    }

    #[test]
    fn divergence_is_that_of_two_coins() {
        // p = (3/4, 1/4), q = (1/2, 1/2).
        let p = [3f64.ln(), 0.0];
        let q = [0.0f32, 0.0];
        let expected = 0.75 * 1.5f64.ln() + 0.25 * 0.5f64.ln();
        assert!((kl_divergence(&p, &q) - expected).abs() < 1e-15);
        let other_way = 0.5 * (2.0f64 / 3.0).ln() + 0.5 * 2f64.ln();
        assert!((kl_divergence(&q, &p) - other_way).abs() < 1e-15);
        // An impossible token costs nothing if q gives it nothing, and the rest is renormalised.
        let gone = [0.0f64, f64::NEG_INFINITY];
        assert!((kl_divergence(&gone, &q) - 2f64.ln()).abs() < 1e-15);
        assert_eq!(kl_divergence(&q, &gone), f64::INFINITY);
        assert_eq!(kl_divergence(&gone, &gone), 0.0);
    }

    #[test]
    fn small_divergences_are_exact() {
        let p: Vec<f64> = rows(2, 200).into_iter().map(f64::from).collect();
        assert_eq!(kl_divergence(&p, &p), 0.0);
        // Second order: half the variance of the difference under p, 1e-14 here.
        let mut q = p.clone();
        let probability = log_softmax(&p)[7].exp();
        q[7] += 1e-6;
        let expected = 0.5e-12 * probability * (1.0 - probability);
        let found = kl_divergence(&p, &q);
        assert!(found > 0.0 && (found / expected - 1.0).abs() < 1e-2, "{found} {expected}");
    }

    #[test]
    fn divergence_agrees_with_the_plain_sum() {
        let (p, q) = (rows(3, 300), rows(4, 300));
        let plain: f64 = log_softmax(&p).iter().zip(log_softmax(&q)).map(|(p, q)| p.exp() * (p - q)).sum();
        assert!((kl_divergence(&p, &q) / plain - 1.0).abs() < 1e-12);
    }

    #[test]
    fn the_largest_are_those_of_a_stable_sort() {
        for seed in 0..20 {
            // Coarse values, so that there are ties; no negative zero, which a sort would put below the other.
            let values: Vec<f32> = rows(seed, 60).into_iter().map(|v| v.round() + 0.0).collect();
            let mut sorted: Vec<usize> = (0..values.len()).collect();
            sorted.sort_by(|&a, &b| values[b].total_cmp(&values[a]));
            for k in [1, 2, 7, 59, 60, 61] {
                assert_eq!(top_k(&values, k), sorted[..k.min(60)], "{k}");
            }
            assert_eq!(argmax(&values), sorted[0]);
        }
        assert!(top_k(&[1.0f32], 0).is_empty());
    }

    #[test]
    fn agreement_is_of_the_most_likely_and_of_the_k_most_likely() {
        let p = [4.0f32, 3.0, 2.0, 1.0, 0.0];
        let q = [3.0f32, 4.0, 0.0, 1.0, 2.0];
        let of = |k| TokenScore::against(&q, &p, 0, k).against.expect("compared");
        assert!(!of(1).top1);
        assert_eq!([of(1).top_k, of(2).top_k, of(3).top_k, of(9).top_k], [0.0, 1.0, 2.0 / 3.0, 1.0]);
        assert_eq!(of(1).nll, nll(&p, 0));
        assert!(TokenScore::against(&[2.0f32, 1.0], &[1.0f32, 1.0], 0, 1).against.expect("compared").top1);
    }

    #[test]
    fn perplexity_of_a_uniform_guess_is_the_vocabulary() {
        let mut fidelity = Fidelity::default();
        for document in 0..3 {
            fidelity.begin();
            for token in 0..5 {
                fidelity.add(&TokenScore::alone(&[1.5f32; 50], document + token));
            }
        }
        // One without tokens is none.
        fidelity.begin();
        let found = fidelity.summary();
        assert_eq!((found.documents, found.tokens, found.against), (3, 15, None));
        let Estimate { value, standard_error } = found.perplexity;
        assert!((value - 50.0).abs() < 1e-9 && standard_error < 1e-9, "{value} {standard_error}");
        assert!((found.nll.value - 50f64.ln()).abs() < 1e-12 && fidelity.nll() == found.nll.value);
    }

    #[test]
    fn the_bootstrap_finds_the_error_of_a_mean() {
        // 400 documents of 5 equal tokens: the error is that of 400 draws, not of 2,000.
        let mut random = SplitMix64(5);
        let mut mean = DocumentMean::default();
        for _ in 0..400 {
            mean.begin();
            let value = bell(&mut random);
            (0..5).for_each(|_| mean.add(value));
        }
        assert_eq!((mean.documents(), mean.tokens()), (400, 2000));
        let error = mean.standard_error(|m| m, 2000, 1);
        assert!((error - 0.05).abs() < 0.008, "{error}");
        assert_eq!(error, mean.standard_error(|m| m, 2000, 1));
        let mut single = DocumentMean::default();
        single.add(1.0);
        assert!(single.standard_error(|m| m, 100, 1).is_nan());
    }

    #[test]
    fn a_model_is_faithful_to_itself() {
        let mut fidelity = Fidelity::default();
        for document in 0..4u32 {
            fidelity.begin();
            for token in 0..6 {
                let p = rows(u64::from(document * 10 + token), 40);
                fidelity.add(&TokenScore::against(&p, &p, token, 5));
            }
        }
        let found = fidelity.summary();
        assert_eq!((found.documents, found.tokens), (4, 24));
        let against = found.against.expect("compared");
        let values = [against.kl, against.top1, against.top_k, against.perplexity_ratio].map(|e| e.value);
        assert_eq!(values, [0.0, 1.0, 1.0, 1.0]);
        assert_eq!((against.perplexity, against.kl_largest), (found.perplexity, 0.0));
        assert_eq!((against.kl.standard_error, against.perplexity_ratio.standard_error), (0.0, 0.0));
    }
}
