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
//!
//! Experts are chosen as the engine chooses them. Scores, by softmax or sigmoid, are in the order of the logits, and
//! biases are zero, so without groups that is by the logits; with groups it is among the groups that rank highest.

use smoe_format::ModelSpec;
use smoe_format::spec::{GroupScore, GroupSpec, RouterKind};

use super::LOGITS;
use super::random::{Random, stream_of};
use super::stream::{RUN, TOPICS, topic_stream, topic_width};

/// Logits drawn for one value of a function, unless that is more tokens than it needs.
const DRAWS: usize = 1 << 18;
/// The most tokens drawn for one value: enough for a standard error below 0.005.
const MAX_TOKENS: usize = 1 << 13;
/// Tokens of a stream on which the statistics are those asked for. Fewer see fewer topics: their overlap is
/// the same, their skew larger.
pub(crate) const TOKENS: usize = 4096;
/// The most times that a mixture which misses what is wanted is mended further.
const CORRECTIONS: usize = 4;
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

impl RoutingStats {
    /// How near to what was asked for a prediction counts as met.
    pub const TOLERANCE: f64 = 0.03;

    /// Whether a prediction counts as this.
    fn is_met_by(self, predicted: Self) -> bool {
        let near = |asked: f64, found: f64| (asked - found).abs() <= Self::TOLERANCE;
        near(self.overlap, predicted.overlap) && near(self.skew, predicted.skew)
    }

    fn distance(self, other: Self) -> f64 {
        (self.overlap - other.overlap).abs() + (self.skew - other.skew).abs()
    }
}

/// What decides the choices, the mixture apart.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Router {
    pub n_experts: usize,
    pub top_k: usize,
    pub vocab_size: usize,
    groups: Option<GroupSpec>,
    kind: RouterKind,
}

impl Router {
    pub fn of(spec: &ModelSpec) -> Self {
        Self {
            n_experts: spec.moe.n_experts,
            top_k: spec.moe.top_k,
            vocab_size: spec.vocab_size,
            groups: spec.moe.groups,
            kind: spec.moe.router,
        }
    }

    /// The mixture that comes nearest to what is wanted.
    pub fn solve(&self, wanted: RoutingStats) -> Mixture {
        let first = self.solve_for(wanted.overlap, wanted.skew);
        // In a stream the busiest experts are those that turn out to be, and its topics are few: some more
        // skew than the common part alone gives, taken off.
        let more = self.predict(first, TOKENS).skew - wanted.skew;
        let mut asked = RoutingStats { skew: wanted.skew - more, ..wanted };
        let mut mixture = self.solve_for(asked.overlap, asked.skew);
        let mut predicted = self.predict(mixture, TOKENS);
        // Once is enough for most shapes.
        for _ in 0..CORRECTIONS {
            if wanted.is_met_by(predicted) {
                break;
            }
            asked.overlap -= predicted.overlap - wanted.overlap;
            asked.skew -= predicted.skew - wanted.skew;
            let next = self.solve_for(asked.overlap, asked.skew);
            let other = self.predict(next, TOKENS);
            if wanted.distance(other) >= wanted.distance(predicted) {
                break;
            }
            (mixture, predicted) = (next, other);
        }
        mixture
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
        let mut places = Random::new(&[stream_of::SKEW_PLACE]);
        let (mut logits, mut chosen, mut uses) = (vec![0.0; n], Vec::new(), vec![0.0; n]);
        // Where the expert of the largest common part is, and so on: of what groups there are, in any.
        let mut place: Vec<usize> = (0..n).collect();
        let mut total = 0.0;
        for _ in 0..layers {
            let mut part: Vec<f32> = (0..n).map(|_| random.normal()).collect();
            part.sort_unstable_by(|x, y| y.total_cmp(x));
            if self.groups.is_some() {
                (1..n).for_each(|e| place.swap(e, places.below(e as u64 + 1) as usize));
            }
            uses.fill(0.0);
            for _ in 0..EACH {
                for (&place, part) in place.iter().zip(&part) {
                    logits[place] = common * part + own * random.normal();
                }
                self.choose(&logits, &mut chosen);
                chosen.iter().for_each(|&e| uses[e as usize] += 1.0);
            }
            let in_order: Vec<f64> = place.iter().map(|&place| uses[place]).collect();
            total += busiest(&in_order);
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

    /// The `top_k` largest of `logits` among the groups that rank highest, ascending by number.
    fn choose(&self, logits: &[f32], chosen: &mut Vec<u32>) {
        chosen.clear();
        match self.groups {
            None => chosen.extend(0..logits.len() as u32),
            Some(groups) => {
                let size = logits.len() / groups.n;
                let mut ranked: Vec<(f32, u32)> = logits
                    .chunks_exact(size)
                    .zip(0..)
                    .map(|(logits, group)| (self.group_score(groups.score, logits), group))
                    .collect();
                ranked.sort_unstable_by(|x, y| y.0.total_cmp(&x.0));
                for &(_, group) in &ranked[..groups.top] {
                    let first = group * size as u32;
                    chosen.extend(first..first + size as u32);
                }
            }
        }
        if self.top_k < chosen.len() {
            chosen.select_nth_unstable_by(self.top_k, |&x, &y| {
                logits[y as usize].total_cmp(&logits[x as usize])
            });
            chosen.truncate(self.top_k);
        }
        chosen.sort_unstable();
    }

    /// What a group is ranked by, the same on every machine. Softmax's divisor is the same for all.
    fn group_score(&self, score: GroupScore, logits: &[f32]) -> f32 {
        let value = |logit: f32| match self.kind {
            RouterKind::Softmax => smoe_kernels::exp(LOGITS * logit),
            RouterKind::Sigmoid => smoe_kernels::sigmoid(LOGITS * logit),
        };
        let [mut first, mut second] = [f32::NEG_INFINITY; 2];
        for &logit in logits {
            (first, second) = if logit > first { (logit, first) } else { (first, second.max(logit)) };
        }
        match score {
            GroupScore::Best => value(first),
            GroupScore::BestTwo => value(first) + value(second),
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synth::Shape;

    #[test]
    fn the_largest_routers_have_what_is_asked_for() {
        for (name, overlap, skew) in [
            ("kimi-k2", 0.46, 0.3),
            ("kimi-k2", 0.7, 0.35),
            ("qwen3-next-80b-a3b", 0.7, 0.35),
            ("deepseek-v3", 0.46, 0.3),
            ("deepseek-v2", 0.7, 0.35),
        ] {
            let wanted = RoutingStats { overlap, skew };
            let router = Router::of(&Shape::find(name).expect("known").spec);
            let predicted = router.predict(router.solve(wanted), TOKENS);
            assert!(wanted.is_met_by(predicted), "{name}: {wanted:?}, {predicted:?}");
        }
    }
}
