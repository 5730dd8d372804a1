//! Which experts the tokens of a synthetic vault choose: from wanted statistics to the embedding's mixture.
//!
//! The embedding of a token of topic t is `sqrt(a) c + sqrt(b) z_t + sqrt(1 - a - b) u`, unit-variance
//! vectors common to the model, the topic, and the token's own. Hidden states stay near it, and a router's
//! rows are random, so in every layer the logits of an expert for two tokens are normal with correlation a,
//! or a + b if their topic is one, and experts are independent. Two functions of a correlation follow, both
//! found by drawing such logits:
//!
//! - skew: the common part of correlation a makes some experts busier than others, for all tokens;
//! - overlap: two tokens of correlation r have a share of their experts in common.

use smoe_format::ModelSpec;

use super::random::{Random, stream_of};
use super::stream::{RUN, TOPICS, topic_stream, topic_width};

/// Logits drawn for one value of a function, unless that is more tokens than it needs.
const DRAWS: usize = 1 << 18;
/// The most tokens drawn for one value: enough for a standard error below 0.005.
const MAX_TOKENS: usize = 1 << 13;
/// Tokens of a stream on which the statistics are those asked for. Fewer see fewer topics: their overlap is
/// the same, their skew larger.
pub(crate) const TOKENS: usize = 4096;
/// Halvings of the interval of a correlation.
const HALVINGS: usize = 12;

/// Shares of variance in an embedding row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Mixture {
    /// Of the part common to all tokens.
    pub a: f64,
    /// Of the part common to a topic.
    pub b: f64,
}

/// How tokens of a stream choose experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RoutingStats {
    /// The mean share of a token's experts that the token before it had too, in the same layer.
    pub overlap: f64,
    /// The share of choices that falls on the busiest tenth of a layer's experts; 0.1 if all are alike.
    pub skew: f64,
}

/// What decides the choices, the mixture apart.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Router {
    pub n_experts: usize,
    pub top_k: usize,
    pub vocab_size: usize,
}

impl Router {
    pub fn of(spec: &ModelSpec) -> Self {
        Self { n_experts: spec.moe.n_experts, top_k: spec.moe.top_k, vocab_size: spec.vocab_size }
    }

    /// The mixture that comes nearest to what is wanted.
    pub fn solve(&self, wanted: RoutingStats) -> Mixture {
        let first = self.solve_for(wanted.overlap, wanted.skew);
        // In a stream the busiest experts are those that turn out to be, and its topics are few: some more
        // skew than the common part alone gives, taken off once.
        let more = self.predict(first, TOKENS).skew - wanted.skew;
        self.solve_for(wanted.overlap, wanted.skew - more)
    }

    fn solve_for(&self, overlap: f64, skew: f64) -> Mixture {
        let common = solve(skew, |r| self.skew(r));
        // Neighbours are of one topic but where a run ends, and now and then the same token.
        let topics = self.vocab_size.div_ceil(topic_width(self.vocab_size)) as f64;
        let change = (1.0 - 1.0 / topics) / RUN as f64;
        let same = 1.0 / topic_width(self.vocab_size) as f64;
        let apart = self.overlap(common);
        let expected = |r: f64| change * apart + (1.0 - change) * (same + (1.0 - same) * self.overlap(r));
        let neighbours = solve(overlap, expected).max(common);
        // The topics of a stream have a common part, too, as large as the chance that two of its tokens are
        // of one topic: of one run (a geometric length's mean square is twice its squared mean), or by
        // accident.
        let run = 2.0 * RUN as f64 / TOKENS as f64;
        let alike = run + (1.0 - run) / topics;
        let a =
            if topics < 2.0 { neighbours } else { ((common - neighbours * alike) / (1.0 - alike)).max(0.0) };
        Mixture { a, b: neighbours - a }
    }

    /// What a mixture gives in `tokens` tokens of a stream and several layers, counted as an engine would.
    pub fn predict(&self, mixture: Mixture, tokens: usize) -> RoutingStats {
        let n = self.n_experts;
        let layers = (16 * DRAWS / (tokens * n)).clamp(1, 8);
        let stream: Vec<(u32, usize)> = topic_stream(self.vocab_size, 1).take(tokens).collect();
        let [a, b, own] =
            [mixture.a, mixture.b, 1.0 - mixture.a - mixture.b].map(|x| x.max(0.0).sqrt() as f32);
        let mut stats = RoutingStats { overlap: 0.0, skew: 0.0 };
        let (mut logits, mut chosen, mut before) = (vec![0.0; n], Vec::new(), Vec::new());
        for layer in 0..layers as u64 {
            let mut random = Random::new(&[stream_of::PREDICT, layer]);
            let common: Vec<f32> = (0..n).map(|_| random.normal()).collect();
            let topics: Vec<f32> = (0..TOPICS * n).map(|_| random.normal()).collect();
            let mut uses = vec![0.0; n];
            let mut shared = 0;
            for (i, &(token, topic)) in stream.iter().enumerate() {
                // The same token has the same logits.
                let mut random = Random::new(&[stream_of::PREDICT_TOKEN, layer, u64::from(token)]);
                for (e, logit) in logits.iter_mut().enumerate() {
                    *logit = a * common[e] + b * topics[topic * n + e] + own * random.normal();
                }
                self.choose(&logits, &mut chosen);
                chosen.iter().for_each(|&e| uses[e as usize] += 1.0);
                if i > 0 {
                    shared += common_to(&chosen, &before);
                }
                std::mem::swap(&mut chosen, &mut before);
            }
            stats.overlap += shared as f64 / ((tokens - 1).max(1) * self.top_k) as f64;
            uses.sort_unstable_by(|x: &f64, y| y.total_cmp(x));
            stats.skew += busiest(&uses) / (tokens * self.top_k) as f64;
        }
        RoutingStats { overlap: stats.overlap / layers as f64, skew: stats.skew / layers as f64 }
    }

    /// The skew that a common part of correlation `r` gives in the long run: then the busiest experts are
    /// those whose common part is largest.
    fn skew(&self, r: f64) -> f64 {
        const EACH: usize = 32;
        let n = self.n_experts;
        let layers = (DRAWS / n).min(MAX_TOKENS).div_ceil(EACH).max(4);
        let (common, own) = (r.sqrt() as f32, (1.0 - r).sqrt() as f32);
        let mut random = Random::new(&[stream_of::SKEW]);
        let (mut logits, mut chosen, mut uses) = (vec![0.0; n], Vec::new(), vec![0.0; n]);
        let mut total = 0.0;
        for _ in 0..layers {
            let mut part: Vec<f32> = (0..n).map(|_| random.normal()).collect();
            part.sort_unstable_by(|x, y| y.total_cmp(x));
            uses.fill(0.0);
            for _ in 0..EACH {
                for (logit, part) in logits.iter_mut().zip(&part) {
                    *logit = common * part + own * random.normal();
                }
                self.choose(&logits, &mut chosen);
                chosen.iter().for_each(|&e| uses[e as usize] += 1.0);
            }
            total += busiest(&uses);
        }
        total / (layers * EACH * self.top_k) as f64
    }

    /// The share of experts that two tokens of correlation `r` have in common.
    fn overlap(&self, r: f64) -> f64 {
        let n = self.n_experts;
        let pairs = (DRAWS / n).clamp(64, MAX_TOKENS);
        let (common, own) = (r.sqrt() as f32, (1.0 - r).sqrt() as f32);
        let mut random = Random::new(&[stream_of::OVERLAP]);
        let mut logits = [vec![0.0; n], vec![0.0; n]];
        let mut chosen = [Vec::new(), Vec::new()];
        let mut shared = 0;
        for _ in 0..pairs {
            for e in 0..n {
                let part = common * random.normal();
                logits.iter_mut().for_each(|logits| logits[e] = part + own * random.normal());
            }
            logits.iter().zip(&mut chosen).for_each(|(logits, chosen)| self.choose(logits, chosen));
            shared += common_to(&chosen[0], &chosen[1]);
        }
        shared as f64 / (pairs * self.top_k) as f64
    }

    /// The `top_k` largest of `logits`, ascending by number.
    fn choose(&self, logits: &[f32], chosen: &mut Vec<u32>) {
        chosen.clear();
        chosen.extend(0..logits.len() as u32);
        if self.top_k < chosen.len() {
            chosen.select_nth_unstable_by(self.top_k, |&x, &y| {
                logits[y as usize].total_cmp(&logits[x as usize])
            });
            chosen.truncate(self.top_k);
        }
        chosen.sort_unstable();
    }
}

/// How many numbers two ascending lists have in common.
fn common_to(a: &[u32], b: &[u32]) -> usize {
    a.iter().filter(|e| b.binary_search(e).is_ok()).count()
}

/// Uses of the first tenth; one that is not whole counts its last expert in part.
fn busiest(uses: &[f64]) -> f64 {
    let tenth = uses.len() as f64 / 10.0;
    let whole = tenth as usize;
    uses[..whole].iter().sum::<f64>() + uses.get(whole).map_or(0.0, |&u| u * tenth.fract())
}

/// The correlation at which a growing function has the value `wanted`; 0 or 1 if it is beyond its ends.
fn solve(wanted: f64, f: impl Fn(f64) -> f64) -> f64 {
    if f(0.0) >= wanted {
        return 0.0;
    }
    if f(1.0) <= wanted {
        return 1.0;
    }
    let (mut low, mut high) = (0.0, 1.0);
    for _ in 0..HALVINGS {
        let middle = f64::midpoint(low, high);
        if f(middle) < wanted { low = middle } else { high = middle }
    }
    f64::midpoint(low, high)
}
