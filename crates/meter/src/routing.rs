//! How tokens are routed: what caches and look-ahead can hope for.
//!
//! Everything rests on two histograms over ranks. The *rank* of an expert in some router logits is the number
//! of experts with larger logits: the chosen `top_k` have ranks `0..top_k` in their own. Ranks in the logits
//! of the token before, at the same layer, say what the last token foretold; ranks in the look-ahead, the
//! router applied one layer early, say what the layer before foretold.

use crate::Counter;

/// Counters of one model's routing. The engine's thread owns it; anyone reads.
#[derive(Debug)]
pub struct RouteMeter {
    top_k: usize,
    n_experts: usize,
    /// `[MoE layers, experts]`.
    uses: Vec<Counter>,
    previous: Vec<Counter>,
    ahead: Vec<Counter>,
}

impl RouteMeter {
    /// All zero, for `layers` MoE layers of `n_experts` experts.
    #[must_use]
    pub fn new(layers: usize, n_experts: usize, top_k: usize) -> Self {
        let counters = |n| std::iter::repeat_with(Counter::default).take(n).collect();
        Self {
            top_k,
            n_experts,
            uses: counters(layers * n_experts),
            previous: counters(n_experts),
            ahead: counters(n_experts),
        }
    }

    /// `tokens` tokens were routed to an expert of the `layer`-th MoE layer.
    ///
    /// # Panics
    /// If there is no such layer or expert.
    pub fn used(&self, layer: usize, expert: usize, tokens: usize) {
        self.uses[layer * self.n_experts + expert].add(tokens as u64);
    }

    /// A chosen expert had this rank in the logits of the token before.
    ///
    /// # Panics
    /// If there are not so many experts.
    pub fn rank_before(&self, rank: usize) {
        self.previous[rank].add(1);
    }

    /// A chosen expert had this rank in the look-ahead's logits.
    ///
    /// # Panics
    /// If there are not so many experts.
    pub fn rank_ahead(&self, rank: usize) {
        self.ahead[rank].add(1);
    }

    /// All counters, as they are now.
    #[must_use]
    pub fn snapshot(&self) -> RouteSnapshot {
        let values = |counters: &[Counter]| counters.iter().map(Counter::get).collect();
        RouteSnapshot {
            top_k: self.top_k,
            n_experts: self.n_experts,
            uses: values(&self.uses),
            previous: values(&self.previous),
            ahead: values(&self.ahead),
        }
    }
}

/// The counters of a [`RouteMeter`] at one time, or over an interval ([`RouteSnapshot::since`]).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RouteSnapshot {
    top_k: usize,
    n_experts: usize,
    uses: Vec<u64>,
    previous: Vec<u64>,
    ahead: Vec<u64>,
}

impl RouteSnapshot {
    /// Experts per token.
    #[must_use]
    pub fn top_k(&self) -> usize {
        self.top_k
    }

    /// Experts of a layer.
    #[must_use]
    pub fn n_experts(&self) -> usize {
        self.n_experts
    }

    /// Tokens routed to each expert, a row per MoE layer.
    pub fn layers(&self) -> impl Iterator<Item = &[u64]> {
        self.uses.chunks_exact(self.n_experts.max(1))
    }

    /// The adjacent-token overlap: the mean share of a decoded token's experts that the token before had too.
    /// None if no two tokens were decoded in a row.
    #[must_use]
    pub fn overlap(&self) -> Option<f64> {
        self.coverage_before(self.top_k)
    }

    /// The mean share of a decoded token's experts among the `width` highest of the token before.
    #[must_use]
    pub fn coverage_before(&self, width: usize) -> Option<f64> {
        coverage(&self.previous, width)
    }

    /// The mean share of a decoded token's experts among the `width` highest of the look-ahead.
    #[must_use]
    pub fn coverage_ahead(&self, width: usize) -> Option<f64> {
        coverage(&self.ahead, width)
    }

    /// The share of uses that falls on the busiest tenth of a layer's experts, averaged over layers by use;
    /// 0.1 if all are alike. A tenth that is not whole counts its last expert in part.
    #[must_use]
    pub fn skew(&self) -> Option<f64> {
        let total: u64 = self.uses.iter().sum();
        let busiest: f64 = self
            .layers()
            .map(|layer| {
                let mut uses = layer.to_vec();
                uses.sort_unstable_by(|a, b| b.cmp(a));
                let tenth = uses.len() as f64 / 10.0;
                let whole: u64 = uses.iter().take(tenth as usize).sum();
                whole as f64 + uses.get(tenth as usize).map_or(0.0, |&u| u as f64 * tenth.fract())
            })
            .sum();
        (total > 0).then(|| busiest / total as f64)
    }

    /// What was counted between `earlier` and `self`, snapshots of one meter.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let minus = |a: &[u64], b: &[u64]| a.iter().zip(b).map(|(a, b)| a.saturating_sub(*b)).collect();
        Self {
            uses: minus(&self.uses, &earlier.uses),
            previous: minus(&self.previous, &earlier.previous),
            ahead: minus(&self.ahead, &earlier.ahead),
            ..*self
        }
    }
}

fn coverage(ranks: &[u64], width: usize) -> Option<f64> {
    let total: u64 = ranks.iter().sum();
    let covered: u64 = ranks.iter().take(width).sum();
    (total > 0).then(|| covered as f64 / total as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlap_is_the_coverage_of_as_many_as_are_chosen() {
        let meter = RouteMeter::new(1, 8, 2);
        assert_eq!(meter.snapshot().overlap(), None);
        for rank in [0, 1, 2, 5] {
            meter.rank_before(rank);
        }
        meter.rank_ahead(1);
        let snapshot = meter.snapshot();
        assert_eq!(snapshot.overlap(), Some(0.5));
        let curve: Vec<_> = [0, 3, 6, 100].map(|width| snapshot.coverage_before(width)).into();
        assert_eq!(curve, [Some(0.0), Some(0.75), Some(1.0), Some(1.0)]);
        assert_eq!(snapshot.coverage_ahead(1), Some(0.0));
        assert_eq!(snapshot.coverage_ahead(2), Some(1.0));
    }

    #[test]
    fn skew_is_the_busiest_tenth_of_each_layer() {
        let meter = RouteMeter::new(2, 20, 1);
        assert_eq!(meter.snapshot().skew(), None);
        for expert in 0..20 {
            meter.used(0, expert, 1);
        }
        assert!((meter.snapshot().skew().unwrap() - 0.1).abs() < 1e-12);
        let before = meter.snapshot();
        // In the second layer two of twenty, its busiest tenth, take everything.
        meter.used(1, 3, 10);
        meter.used(1, 19, 30);
        assert_eq!(meter.snapshot().since(&before).skew(), Some(1.0));
        assert_eq!(meter.snapshot().layers().nth(1).unwrap()[19], 30);
    }

    #[test]
    fn a_tenth_may_be_a_part_of_an_expert() {
        let meter = RouteMeter::new(1, 5, 1);
        for expert in 0..5 {
            meter.used(0, expert, 2);
        }
        assert!((meter.snapshot().skew().unwrap() - 0.1).abs() < 1e-12);
    }
}
