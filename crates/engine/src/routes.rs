//! Which experts a step needs: top-k per token, its weights, and the union that the store is asked for.

use smoe_format::spec::{MoeSpec, RouterKind};
use smoe_kernels::Kernels;

/// The routing of one MoE layer for T tokens. Reused from layer to layer; claims its memory once.
#[derive(Debug)]
pub struct Routes {
    top_k: usize,
    n_experts: usize,
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
    scores: Vec<f32>,
    order: Vec<u32>,
}

impl Routes {
    /// Room for `tokens` tokens.
    #[must_use]
    pub fn with_capacity(moe: &MoeSpec, tokens: usize) -> Self {
        let pairs = tokens * moe.top_k;
        Self {
            top_k: moe.top_k,
            n_experts: moe.n_experts,
            tokens: 0,
            ids: Vec::with_capacity(pairs),
            weights: Vec::with_capacity(pairs),
            union: Vec::with_capacity(moe.n_experts),
            starts: vec![0; moe.n_experts + 1],
            pairs: vec![0; pairs],
            pair_tokens: vec![0; pairs],
            scores: vec![0.0; moe.n_experts],
            order: vec![0; moe.top_k],
        }
    }

    /// Bytes that [`Self::with_capacity`] claims.
    #[must_use]
    pub const fn bytes(moe: &MoeSpec, tokens: usize) -> u64 {
        (tokens * moe.top_k * 16 + moe.n_experts * 16) as u64
    }

    /// Routes by `logits` (`[T, n_experts]`).
    ///
    /// Softmax over all experts, then the `top_k` largest (the lower id at ties), whose weights are divided
    /// by their sum if the family does so: Qwen3-MoE and DeepSeek-MoE as in `transformers`.
    pub fn route(&mut self, kernels: Kernels, moe: &MoeSpec, logits: &[f32]) {
        self.tokens = logits.len() / self.n_experts;
        self.ids.clear();
        self.weights.clear();
        for logits in logits.chunks_exact(self.n_experts) {
            self.scores.copy_from_slice(logits);
            match moe.router {
                RouterKind::Softmax => kernels.softmax_in_place(&mut self.scores),
            }
            smoe_kernels::top_k(&self.scores, &mut self.order);
            // The divisor is summed in the order of the ranking, as the reference sums it.
            let sum: f32 = self.order.iter().map(|&id| self.scores[id as usize]).sum();
            let divisor = if moe.norm_topk { sum } else { 1.0 };
            self.order.sort_unstable();
            self.ids.extend_from_slice(&self.order);
            self.weights.extend(self.order.iter().map(|&id| self.scores[id as usize] / divisor));
        }
        self.group_by_expert();
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

#[cfg(test)]
mod tests {
    use super::*;

    fn moe(norm_topk: bool) -> MoeSpec {
        MoeSpec { n_experts: 5, top_k: 2, d_expert: 8, router: RouterKind::Softmax, norm_topk, d_shared: 0 }
    }

    #[test]
    fn tokens_are_grouped_by_expert_and_weights_follow_the_family() {
        let logits = [0.0, 3.0, 1.0, 2.0, -1.0, 5.0, 0.0, 0.0, 4.0, 0.0];
        for norm in [true, false] {
            let mut routes = Routes::with_capacity(&moe(norm), 2);
            // Twice: nothing of the first may be left.
            routes.route(Kernels::detect(), &moe(norm), &[9.0, 9.0, 0.0, 0.0, 0.0]);
            routes.route(Kernels::detect(), &moe(norm), &logits);
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
        routes.route(Kernels::detect(), &moe(true), &[1.0; 5]);
        assert_eq!(routes.of_token(0), (&[0, 1][..], &[0.5, 0.5][..]));
    }
}
