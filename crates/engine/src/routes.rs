//! Which experts a step needs: top-k per token, its weights, and the union that the store is asked for.

use smoe_format::spec::{GroupScore, GroupSpec, MoeSpec, RouterKind};
use smoe_kernels::Kernels;

/// The routing of one MoE layer for T tokens. Reused from layer to layer; claims its memory once.
#[derive(Debug)]
pub struct Routes {
    top_k: usize,
    n_experts: usize,
    router: RouterKind,
    tokens: usize,
    /// `[T, K]` expert ids, ascending per token: the order in which outputs are summed.
    ids: Vec<u32>,
    /// `[T, K]` routing weights, parallel to `ids`.
    weights: Vec<f32>,
    /// Experts that some token visits, ascending.
    union: Vec<u32>,
    /// For each expert, where its pairs start in `pairs`; one more at the end.
    starts: Vec<u32>,
    /// Pair numbers (`token * K + k`) by expert, then token.
    pairs: Vec<u32>,
    /// Tokens of those pairs.
    pair_tokens: Vec<u32>,
    /// Of each MoE layer, `[n_experts]` or nothing: what is added to scores for the choice.
    corrections: Vec<Vec<f32>>,
    scores: Vec<f32>,
    /// What the choice goes by.
    choice: Vec<f32>,
    order: Vec<u32>,
    group_scores: Vec<f32>,
    group_order: Vec<u32>,
}

impl Routes {
    /// Room for `tokens` tokens.
    #[must_use]
    pub fn with_capacity(moe: &MoeSpec, tokens: usize) -> Self {
        let pairs = tokens * moe.top_k;
        let (groups, top_groups) = moe.groups.map_or((0, 0), |groups| (groups.n, groups.top));
        Self {
            top_k: moe.top_k,
            n_experts: moe.n_experts,
            router: moe.router,
            corrections: Vec::new(),
            tokens: 0,
            ids: Vec::with_capacity(pairs),
            weights: Vec::with_capacity(pairs),
            union: Vec::with_capacity(moe.n_experts),
            starts: vec![0; moe.n_experts + 1],
            pairs: vec![0; pairs],
            pair_tokens: vec![0; pairs],
            scores: vec![0.0; moe.n_experts],
            choice: vec![0.0; moe.n_experts],
            order: vec![0; moe.top_k],
            group_scores: vec![0.0; groups],
            group_order: vec![0; top_groups],
        }
    }

    /// With what each MoE layer adds to scores for the choice (its correction bias).
    #[must_use]
    pub fn correcting(self, corrections: Vec<Vec<f32>>) -> Self {
        Self { corrections, ..self }
    }

    /// Bytes that [`Self::with_capacity`] claims.
    #[must_use]
    pub const fn bytes(moe: &MoeSpec, tokens: usize) -> u64 {
        (tokens * moe.top_k * 16 + moe.n_experts * 20) as u64
    }

    /// Routes the `index`-th MoE layer by `logits` (`[T, n_experts]`), as the families' references do.
    ///
    /// Scores are the softmax over all experts, or each one's sigmoid. The `top_k` largest are chosen (the lower id at
    /// ties), by their sum with the layer's corrections and from the best groups, where the family has these; their
    /// weights are scores, divided by their sum (or a least divisor) if the family does so, times its scale.
    pub fn route(&mut self, kernels: Kernels, moe: &MoeSpec, index: usize, logits: &[f32]) {
        self.tokens = logits.len() / self.n_experts;
        self.ids.clear();
        self.weights.clear();
        let scale = moe.routed_scale as f32;
        for logits in logits.chunks_exact(self.n_experts) {
            self.scores.copy_from_slice(logits);
            score(kernels, moe.router, &mut self.scores);
            self.choose(moe, index);
            // The divisor is summed in the order of the ranking, as the reference sums it.
            let sum: f32 = self.order.iter().map(|&id| self.scores[id as usize]).sum();
            let divisor = match moe.router {
                _ if !moe.norm_topk => 1.0,
                // Corrections may choose experts whose scores are zero.
                _ if sum < moe.norm_min as f32 => moe.norm_min as f32,
                RouterKind::Softmax => sum,
                // All sigmoids may be zero.
                RouterKind::Sigmoid => sum + 1e-20,
            };
            self.order.sort_unstable();
            self.ids.extend_from_slice(&self.order);
            self.weights.extend(self.order.iter().map(|&id| self.scores[id as usize] / divisor * scale));
        }
        self.group_by_expert();
    }

    /// The `top_k` experts by `scores`, into `order`.
    fn choose(&mut self, moe: &MoeSpec, index: usize) {
        let correction = self.corrections.get(index).map_or(&[][..], Vec::as_slice);
        self.choice.copy_from_slice(&self.scores);
        self.choice.iter_mut().zip(correction).for_each(|(score, correction)| *score += correction);
        if let Some(GroupSpec { n, score, .. }) = moe.groups {
            let size = self.n_experts / n;
            for (group, sum) in self.choice.chunks_exact(size).zip(&mut self.group_scores) {
                let mut best = [f32::NEG_INFINITY; 2];
                for &score in group {
                    if score > best[0] {
                        best = [score, best[0]];
                    } else if score > best[1] {
                        best[1] = score;
                    }
                }
                *sum = match score {
                    GroupScore::BestTwo if size > 1 => best[0] + best[1],
                    _ => best[0],
                };
            }
            smoe_kernels::top_k(&self.group_scores, &mut self.group_order);
            for (group, scores) in (0..).zip(self.choice.chunks_exact_mut(size)) {
                if !self.group_order.contains(&group) {
                    scores.fill(f32::NEG_INFINITY);
                }
            }
        }
        smoe_kernels::top_k(&self.choice, &mut self.order);
    }

    /// What the experts of the `index`-th MoE layer rank by, groups apart: `logits` (`[n_experts]`) become that.
    pub fn rank_by(&self, kernels: Kernels, index: usize, logits: &mut [f32]) {
        // Without corrections any score is in the order of its logit.
        if let Some(correction) = self.corrections.get(index).filter(|correction| !correction.is_empty()) {
            score(kernels, self.router, logits);
            kernels.add_in_place(logits, correction);
        }
    }

    /// Counting sort of the pairs by expert.
    fn group_by_expert(&mut self) {
        self.starts.fill(0);
        for &id in &self.ids {
            self.starts[id as usize + 1] += 1;
        }
        self.union.clear();
        self.union.extend((0..self.n_experts as u32).filter(|&e| self.starts[e as usize + 1] > 0));
        for e in 0..self.n_experts {
            self.starts[e + 1] += self.starts[e];
        }
        for (pair, &id) in self.ids.iter().enumerate() {
            let at = &mut self.starts[id as usize];
            self.pairs[*at as usize] = pair as u32;
            self.pair_tokens[*at as usize] = (pair / self.top_k) as u32;
            *at += 1;
        }
        // Each start now stands at its expert's end: shift them back by one.
        self.starts.copy_within(0..self.n_experts, 1);
        self.starts[0] = 0;
    }

    /// Tokens routed.
    #[must_use]
    pub const fn tokens(&self) -> usize {
        self.tokens
    }

    /// Experts per token.
    #[must_use]
    pub const fn top_k(&self) -> usize {
        self.top_k
    }

    /// (token, expert) pairs.
    #[must_use]
    pub const fn n_pairs(&self) -> usize {
        self.tokens * self.top_k
    }

    /// Experts that some token visits, ascending.
    #[must_use]
    pub fn union(&self) -> &[u32] {
        &self.union
    }

    /// Pair numbers of an expert, and their tokens, ascending.
    #[must_use]
    pub fn of_expert(&self, expert: u32) -> (&[u32], &[u32]) {
        let range = self.starts[expert as usize] as usize..self.starts[expert as usize + 1] as usize;
        (&self.pairs[range.clone()], &self.pair_tokens[range])
    }

    /// Experts (ascending) and weights of a token.
    #[must_use]
    pub fn of_token(&self, token: usize) -> (&[u32], &[f32]) {
        let range = token * self.top_k..(token + 1) * self.top_k;
        (&self.ids[range.clone()], &self.weights[range])
    }
}

/// Router logits become scores.
fn score(kernels: Kernels, router: RouterKind, logits: &mut [f32]) {
    match router {
        RouterKind::Softmax => kernels.softmax_in_place(logits),
        RouterKind::Sigmoid => kernels.sigmoid_in_place(logits),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moe(norm_topk: bool) -> MoeSpec {
        MoeSpec { n_experts: 5, top_k: 2, d_expert: 8, norm_topk, ..MoeSpec::default() }
    }

    #[test]
    fn tokens_are_grouped_by_expert_and_weights_follow_the_family() {
        let logits = [0.0, 3.0, 1.0, 2.0, -1.0, 5.0, 0.0, 0.0, 4.0, 0.0];
        for norm in [true, false] {
            let mut routes = Routes::with_capacity(&moe(norm), 2);
            // Twice: nothing of the first may be left.
            routes.route(Kernels::detect(), &moe(norm), 0, &[9.0, 9.0, 0.0, 0.0, 0.0]);
            routes.route(Kernels::detect(), &moe(norm), 0, &logits);
            assert_eq!(routes.union(), [0, 1, 3]);
            assert_eq!(routes.of_token(0).0, [1, 3]);
            assert_eq!(routes.of_token(1).0, [0, 3]);
            assert_eq!(routes.of_expert(3), (&[1, 3][..], &[0, 1][..]));
            assert_eq!(routes.of_expert(2), (&[][..], &[][..]));
            let weights = routes.of_token(0).1;
            assert!((weights[0] / weights[1] - 1f32.exp()).abs() < 1e-5);
            let sum = weights[0] + weights[1];
            assert_eq!((sum - 1.0).abs() < 1e-6, norm, "{sum}");
        }
    }

    #[test]
    fn equal_scores_go_to_the_lower_id() {
        let mut routes = Routes::with_capacity(&moe(true), 1);
        routes.route(Kernels::detect(), &moe(true), 0, &[1.0; 5]);
        assert_eq!(routes.of_token(0), (&[0, 1][..], &[0.5, 0.5][..]));
    }

    #[test]
    fn a_correction_chooses_and_does_not_weigh() {
        let router = RouterKind::Sigmoid;
        let moe = MoeSpec { router, correction_bias: true, routed_scale: 2.5, ..moe(true) };
        let corrections = vec![vec![], vec![0.0, 0.0, 0.9, 0.0, -0.9]];
        let mut routes = Routes::with_capacity(&moe, 1).correcting(corrections);
        let logits = [0.0, 1.0, -1.0, 2.0, 3.0];
        routes.route(Kernels::detect(), &moe, 0, &logits);
        assert_eq!(routes.of_token(0).0, [3, 4]);
        routes.route(Kernels::detect(), &moe, 1, &logits);
        assert_eq!(routes.of_token(0).0, [2, 3]);
        let sigmoid = |x: f32| 1.0 / (1.0 + (-x).exp());
        let weights = routes.of_token(0).1;
        assert!((weights[0] - 2.5 * sigmoid(-1.0) / (sigmoid(-1.0) + sigmoid(2.0))).abs() < 1e-6);
        let mut ranks = logits;
        routes.rank_by(Kernels::detect(), 0, &mut ranks);
        assert_eq!(ranks, logits);
        routes.rank_by(Kernels::detect(), 1, &mut ranks);
        assert!(ranks[2] > ranks[3] && ranks[3] > ranks[1] && ranks[0] > ranks[4]);
    }

    #[test]
    fn a_correction_of_shares_may_choose_what_weighs_nothing() {
        let moe = MoeSpec { correction_bias: true, norm_min: 1e-12, ..moe(true) };
        let corrections = vec![vec![-2.0, -2.0, -2.0, 0.0, 0.1]];
        let mut routes = Routes::with_capacity(&moe, 1).correcting(corrections);
        let mut logits = [0.0, 0.0, 0.0, -1.0, -2.0];
        routes.route(Kernels::detect(), &moe, 0, &logits);
        assert_eq!(routes.of_token(0).0, [3, 4]);
        let weights = routes.of_token(0).1;
        assert!(
            (weights[0] / weights[1] - 1f32.exp()).abs() < 1e-5
                && (weights[0] + weights[1] - 1.0).abs() < 1e-6
        );
        routes.rank_by(Kernels::detect(), 0, &mut logits);
        assert!(logits[4] > logits[3] && logits[3] > logits[0], "by shares, not by logits: {logits:?}");
        // Both shares are below the least divisor.
        routes.route(Kernels::detect(), &moe, 0, &[0.0, 0.0, 0.0, -40.0, -60.0]);
        let share = (-40f32).exp() / 3.0;
        assert!((routes.of_token(0).1[0] / (share / 1e-12) - 1.0).abs() < 1e-4, "{:?}", routes.of_token(0));
    }

    #[test]
    fn experts_come_from_the_best_groups_only() {
        let grouped =
            |score, top| MoeSpec { n_experts: 6, groups: Some(GroupSpec { n: 3, top, score }), ..moe(false) };
        let logits = [5.0, 0.0, 4.0, 3.0, 3.5, 2.0];
        let chosen = |moe: &MoeSpec| {
            let mut routes = Routes::with_capacity(moe, 1);
            routes.route(Kernels::detect(), moe, 0, &logits);
            routes.of_token(0).0.to_vec()
        };
        assert_eq!(chosen(&grouped(GroupScore::Best, 1)), [0, 1]);
        assert_eq!(
            chosen(&MoeSpec { router: RouterKind::Sigmoid, ..grouped(GroupScore::BestTwo, 1) }),
            [2, 3]
        );
        assert_eq!(chosen(&grouped(GroupScore::Best, 2)), [0, 2]);
        assert_eq!(chosen(&grouped(GroupScore::Best, 3)), [0, 2]);
    }
}
