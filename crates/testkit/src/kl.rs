//! Fidelity of one model to another from their logits, and perplexity: in `f64`, in nats.

use crate::random::Random;

/// Natural logarithms of the probabilities that `logits` mean.
#[must_use]
pub fn log_softmax<F: Copy + Into<f64>>(logits: &[F]) -> Vec<f64> {
    let largest = logits.iter().fold(f64::NEG_INFINITY, |m, &l| m.max(l.into()));
    let sum: f64 = logits.iter().map(|&l| (l.into() - largest).exp()).sum();
    let log_sum = largest + sum.ln();
    logits.iter().map(|&l| l.into() - log_sum).collect()
}

/// Kullback-Leibler divergence of `q` from `p`, in nats: what is lost if `q` stands for `p`. Not negative,
/// zero only if both mean the same distribution.
///
/// # Panics
/// If the lengths differ.
#[must_use]
pub fn kl_divergence<F: Copy + Into<f64>, G: Copy + Into<f64>>(p: &[F], q: &[G]) -> f64 {
    assert_eq!(p.len(), q.len(), "two vocabularies");
    let (p, q) = (log_softmax(p), log_softmax(q));
    // Summed as p * (q/p - 1 - ln(q/p)), whose terms are not negative: the plain form loses small
    // divergences among terms of both signs. The added part sums to zero.
    p.iter()
        .zip(&q)
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

/// Both name the same most likely token.
#[must_use]
pub fn top1_agrees<F: Copy + Into<f64>, G: Copy + Into<f64>>(p: &[F], q: &[G]) -> bool {
    argmax(p) == argmax(q)
}

/// Negative log-likelihood of `token`, in nats.
///
/// # Panics
/// If the token is not in the vocabulary.
#[must_use]
pub fn nll<F: Copy + Into<f64>>(logits: &[F], token: u32) -> f64 {
    -log_softmax(logits)[token as usize]
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

    /// Documents begun.
    #[must_use]
    pub fn documents(&self) -> usize {
        self.documents.len()
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
        let mut random = Random::new(seed);
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

/// Draws for the standard errors of [`Summary`]: their own error is then about 2 %.
const RESAMPLES: usize = 1000;
const SEED: u64 = 0x5eed;

/// A mean and its standard error.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// The value over all tokens.
    pub value: f64,
    /// Bootstrap standard error over documents.
    pub standard_error: f64,
}

impl std::fmt::Display for Estimate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:.4} ± {:.4}", self.value, self.standard_error)
    }
}

/// Perplexity of a model over documents.
#[derive(Clone, Debug, Default)]
pub struct Perplexity {
    nll: DocumentMean,
}

impl Perplexity {
    /// Starts a document.
    pub fn begin(&mut self) {
        self.nll.begin();
    }

    /// Adds the row of logits that `token` followed.
    ///
    /// # Panics
    /// If the token is not in the vocabulary.
    pub fn add<F: Copy + Into<f64>>(&mut self, logits: &[F], token: u32) {
        self.nll.add(nll(logits, token));
    }

    /// Mean negative log-likelihood, in nats a token.
    #[must_use]
    pub fn nll(&self) -> Estimate {
        estimate(&self.nll, |mean| mean)
    }

    /// `exp` of the mean negative log-likelihood.
    #[must_use]
    pub fn perplexity(&self) -> Estimate {
        estimate(&self.nll, f64::exp)
    }
}

fn estimate(mean: &DocumentMean, statistic: fn(f64) -> f64) -> Estimate {
    Estimate {
        value: statistic(mean.mean()),
        standard_error: mean.standard_error(statistic, RESAMPLES, SEED),
    }
}

/// How faithful a model (`q`, quantised) is to another (`p`, as published), over the same documents.
#[derive(Clone, Debug, Default)]
pub struct Fidelity {
    kl: DocumentMean,
    top1: DocumentMean,
    nll_p: DocumentMean,
    nll_q: DocumentMean,
    nll_difference: DocumentMean,
}

/// What [`Fidelity`] found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Summary {
    /// Documents.
    pub documents: usize,
    /// Tokens.
    pub tokens: usize,
    /// Mean KL(p || q), in nats a token.
    pub kl: Estimate,
    /// Share of tokens at which both name the same most likely token.
    pub top1: Estimate,
    /// Perplexity of p.
    pub perplexity_p: Estimate,
    /// Perplexity of q.
    pub perplexity_q: Estimate,
    /// Perplexity of q over that of p; the error is of the pair, far smaller than of each alone.
    pub perplexity_ratio: Estimate,
}

impl Fidelity {
    /// Starts a document.
    pub fn begin(&mut self) {
        for mean in [&mut self.kl, &mut self.top1, &mut self.nll_p, &mut self.nll_q, &mut self.nll_difference]
        {
            mean.begin();
        }
    }

    /// Adds the two rows of logits that `token` followed.
    ///
    /// # Panics
    /// If the rows differ in length or the token is not in the vocabulary.
    pub fn add<F: Copy + Into<f64>, G: Copy + Into<f64>>(&mut self, p: &[F], q: &[G], token: u32) {
        self.kl.add(kl_divergence(p, q));
        self.top1.add(if top1_agrees(p, q) { 1.0 } else { 0.0 });
        let (nll_p, nll_q) = (nll(p, token), nll(q, token));
        self.nll_p.add(nll_p);
        self.nll_q.add(nll_q);
        self.nll_difference.add(nll_q - nll_p);
    }

    /// The figures so far.
    #[must_use]
    pub fn summary(&self) -> Summary {
        Summary {
            documents: self.kl.documents(),
            tokens: self.kl.tokens(),
            kl: estimate(&self.kl, |mean| mean),
            top1: estimate(&self.top1, |mean| mean),
            perplexity_p: estimate(&self.nll_p, f64::exp),
            perplexity_q: estimate(&self.nll_q, f64::exp),
            perplexity_ratio: estimate(&self.nll_difference, f64::exp),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(seed: u64, n: usize) -> Vec<f32> {
        let mut random = Random::new(seed);
        (0..n).map(|_| 5.0 * random.bell() as f32).collect()
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
        assert!(top1_agrees(&p, &p) && top1_agrees(&[1.0f32, 1.0], &[2.0f32, 1.0]));
        assert!(!top1_agrees(&[1.0f32, 2.0], &[2.0f32, 1.0]));
    }

    #[test]
    fn perplexity_of_a_uniform_guess_is_the_vocabulary() {
        let mut perplexity = Perplexity::default();
        for document in 0..3 {
            perplexity.begin();
            for token in 0..5 {
                perplexity.add(&[1.5f32; 50], document + token);
            }
        }
        let found = perplexity.perplexity();
        assert!((found.value - 50.0).abs() < 1e-9 && found.standard_error < 1e-9, "{found}");
        assert!((perplexity.nll().value - 50f64.ln()).abs() < 1e-12);
    }

    #[test]
    fn the_bootstrap_finds_the_error_of_a_mean() {
        // 400 documents of 5 equal tokens: the error is that of 400 draws, not of 2,000.
        let mut random = Random::new(5);
        let mut mean = DocumentMean::default();
        for _ in 0..400 {
            mean.begin();
            let value = random.bell();
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
                fidelity.add(&p, &p, token);
            }
        }
        let s = fidelity.summary();
        assert_eq!((s.documents, s.tokens), (4, 24));
        assert_eq!((s.kl.value, s.top1.value, s.perplexity_ratio.value), (0.0, 1.0, 1.0));
        assert_eq!(s.perplexity_p, s.perplexity_q);
        assert_eq!((s.kl.standard_error, s.perplexity_ratio.standard_error), (0.0, 0.0));
    }
}
