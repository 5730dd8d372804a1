//! Reading ahead what the next layer will probably want: its router ranks the experts over the hidden states as they
//! are before this layer's experts have been added, while reads of those are under way.
//!
//! How far such a ranking is right differs from model to model, from layer to layer, and above all with the ring: what
//! is right is often there already, what is wrong hardly ever. So rankings are scored by the experts that would have had
//! to be read, and those are read where that proves worth it: EXP-STORE-16.

/// An expert is read ahead where such experts are chosen so often: reads in vain take the disk from those that are
/// demanded, and at 0.83 as much is lost as gained.
const TRUST: f32 = 0.88;
/// Scores before anything is trusted.
const FIRST_SCORES: u16 = 8;
/// Scores of which shares are means at least; later ones count for one in so many.
const MEMORY: u16 = 256;
/// The most experts that are read ahead of a layer, if not told: the disk's idle time is over then.
const MOST: usize = 4;
/// Tokens for which each layer is ranked, to learn; and those between two at which one is that has nothing worth reading:
/// a ranking costs a router.
const LEARNING: u8 = 64;
const SCORE_EVERY: u64 = 16;

/// What is known of the rankings of each layer, and the one that waits to be scored.
#[derive(Debug)]
pub(super) struct LookAhead {
    /// Ranks to read ahead; `None` goes by what they are worth.
    width: Option<usize>,
    top_k: usize,
    /// Of all rankings; `[MoE layers]` of each layer; `[top_k]` of each rank. A rank of a layer alone has too few.
    all: Score,
    layers: Vec<Score>,
    ranks: Vec<Score>,
    /// `[MoE layers]`: rankings so far, up to [`LEARNING`].
    asked: Vec<u8>,
    /// The ranking that waits: of which MoE layer, and its experts, the highest first, with whether they were absent.
    waits: Option<usize>,
    ranking: Vec<u32>,
    absent: Vec<bool>,
    /// Those of them to be read.
    wanted: Vec<u32>,
}

/// What reading the next layer ahead has come to.
#[derive(Clone, Debug, PartialEq)]
pub struct LookAheadReport {
    /// Ranks that are read because [`EngineOptions::look_ahead`](crate::EngineOptions::look_ahead) says so, 0 being
    /// off; `None` if they are those that prove worth it.
    pub told: Option<usize>,
    /// Ranks whose experts are read now if they are not there, the mean over MoE layers.
    pub ranks: f64,
    /// Share of the ranked experts that were not there and were chosen; `None` before there are scores of some.
    pub right: Option<f64>,
    /// `[top_k]`: the same of each rank, the highest first.
    pub right_by_rank: Vec<Option<f64>>,
}

/// How often an expert that was not there was chosen.
#[derive(Clone, Copy, Debug, Default)]
struct Score {
    right: f32,
    /// Up to [`MEMORY`].
    count: u16,
}

impl Score {
    fn known(self) -> Option<f32> {
        (self.count >= FIRST_SCORES).then_some(self.right)
    }

    fn add(&mut self, is_right: bool) {
        self.count = (self.count + 1).min(MEMORY);
        self.right += (f32::from(u8::from(is_right)) - self.right) / f32::from(self.count);
    }
}

impl LookAhead {
    pub(super) fn new(width: Option<usize>, layers: usize, n_experts: usize, top_k: usize) -> Self {
        let longest = width.unwrap_or(0).min(n_experts).max(top_k);
        Self {
            width: width.map(|width| width.min(n_experts)),
            top_k,
            all: Score::default(),
            layers: vec![Score::default(); layers],
            ranks: vec![Score::default(); top_k],
            asked: vec![0; layers],
            waits: None,
            ranking: Vec::with_capacity(longest),
            absent: Vec::with_capacity(longest),
            wanted: Vec::with_capacity(longest),
        }
    }

    /// Whether to rank the `index`-th MoE layer for the `token`-th token: to read ahead, or to score. `streams` tells
    /// whether anything may have to be read.
    pub(super) fn asks(&self, index: usize, token: u64, streams: bool) -> bool {
        let reads = match self.width {
            Some(width) => width > 0,
            None => self.asked[index] < LEARNING || (0..self.top_k).any(|rank| self.is_worth_it(index, rank)),
        };
        streams && reads || token.is_multiple_of(SCORE_EVERY)
    }

    /// Whether to read the expert of a rank ahead if it is not there: by the rank's share, as much more or less as the
    /// layer's is than all.
    fn is_worth_it(&self, index: usize, rank: usize) -> bool {
        if let Some(width) = self.width {
            return rank < width;
        }
        let rank = self.ranks.get(rank).and_then(|score| score.known());
        let (Some(rank), Some(layer), Some(all)) = (rank, self.layers[index].known(), self.all.known())
        else {
            return false;
        };
        all > 0.0 && rank * layer >= TRUST * all
    }

    /// Takes what experts of the `index`-th MoE layer rank by, and whether an expert would have to be read; gives those
    /// to read ahead, the likeliest first.
    pub(super) fn ranked(&mut self, index: usize, by: &[f32], is_absent: impl Fn(u32) -> bool) -> &[u32] {
        self.ranking.clear();
        self.ranking.resize(self.width.unwrap_or(0).max(self.top_k), 0);
        smoe_kernels::top_k(by, &mut self.ranking);
        self.absent.clear();
        self.absent.extend(self.ranking.iter().map(|&expert| is_absent(expert)));
        self.asked[index] = (self.asked[index] + 1).min(LEARNING);
        self.waits = Some(index);
        let mut wanted = std::mem::take(&mut self.wanted);
        wanted.clear();
        let to_read = (0..self.ranking.len()).filter(|&r| self.absent[r] && self.is_worth_it(index, r));
        wanted.extend(to_read.map(|rank| self.ranking[rank]).take(self.width.unwrap_or(MOST)));
        self.wanted = wanted;
        &self.wanted
    }

    /// The `index`-th MoE layer chose `experts`, in ascending order.
    pub(super) fn chosen(&mut self, index: usize, experts: &[u32]) {
        if self.waits.take() != Some(index) {
            return;
        }
        for ((rank, expert), &absent) in self.ranks.iter_mut().zip(&self.ranking).zip(&self.absent) {
            if absent {
                let is_right = experts.binary_search(expert).is_ok();
                for score in [rank, &mut self.layers[index], &mut self.all] {
                    score.add(is_right);
                }
            }
        }
    }

    /// What is read, and what is known.
    pub(super) fn report(&self) -> LookAheadReport {
        let most = self.width.unwrap_or(MOST);
        let widest = self.width.unwrap_or(0).max(self.top_k);
        let read = |index| (0..widest).filter(|&rank| self.is_worth_it(index, rank)).count().min(most);
        let known = |score: &Score| score.known().map(f64::from);
        LookAheadReport {
            told: self.width,
            ranks: (0..self.layers.len()).map(read).sum::<usize>() as f64 / self.layers.len().max(1) as f64,
            right: known(&self.all),
            right_by_rank: self.ranks.iter().map(known).collect(),
        }
    }

    /// A step begins: no ranking waits.
    pub(super) fn begin_step(&mut self) {
        self.waits = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ranks by descending id, so that rank r is expert `8 - 1 - r`.
    const BY: [f32; 8] = [0., 1., 2., 3., 4., 5., 6., 7.];

    fn ranked(ahead: &mut LookAhead, index: usize) -> Vec<u32> {
        ahead.ranked(index, &BY, |_| true).to_vec()
    }

    fn score(ahead: &mut LookAhead, index: usize, chosen: &[u32], times: usize) {
        for _ in 0..times {
            ranked(ahead, index);
            ahead.chosen(index, chosen);
        }
    }

    #[test]
    fn ranks_are_read_where_they_are_right() {
        let mut ahead = LookAhead::new(None, 2, 8, 3);
        assert!(ranked(&mut ahead, 0).is_empty(), "nothing is known");
        // The third is never right, in no layer.
        score(&mut ahead, 0, &[0, 6, 7], 16);
        assert_eq!(ranked(&mut ahead, 0), [7, 6]);
        assert!(ranked(&mut ahead, 1).is_empty(), "nothing is known of this layer");
        score(&mut ahead, 1, &[0, 6, 7], 16);
        assert_eq!(ranked(&mut ahead, 1), [7, 6]);
        // It forgets, in time.
        score(&mut ahead, 0, &[0, 1, 6], 1_000);
        assert_eq!(ranked(&mut ahead, 0), [6]);
        score(&mut ahead, 0, &[0, 1, 2], 1_000);
        assert!(ranked(&mut ahead, 0).is_empty());
    }

    #[test]
    fn a_layer_that_is_hard_to_foretell_is_told_from_others() {
        let mut ahead = LookAhead::new(None, 3, 8, 2);
        for _ in 0..100 {
            score(&mut ahead, 0, &[6, 7], 1);
            score(&mut ahead, 1, &[6, 7], 1);
            score(&mut ahead, 2, &[0, 1], 1);
        }
        assert_eq!(ranked(&mut ahead, 0), [7, 6]);
        assert!(ranked(&mut ahead, 2).is_empty());
    }

    #[test]
    fn only_what_would_be_read_counts() {
        let mut ahead = LookAhead::new(None, 1, 8, 2);
        let is_absent = |expert| expert != 7;
        for _ in 0..20 {
            ahead.ranked(0, &BY, is_absent);
            // What is there is right, what would be read is not.
            ahead.chosen(0, &[0, 7]);
        }
        assert!(ranked(&mut ahead, 0).is_empty());
        score(&mut ahead, 0, &[6, 7], 2_000);
        assert_eq!(ahead.ranked(0, &BY, is_absent), [6]);
    }

    #[test]
    fn most_reads_are_bounded() {
        let mut ahead = LookAhead::new(None, 1, 8, 7);
        score(&mut ahead, 0, &[1, 2, 3, 4, 5, 6, 7], 16);
        assert_eq!(ranked(&mut ahead, 0), [7, 6, 5, 4]);
        assert_eq!(ahead.ranked(0, &BY, |expert| expert % 2 == 0), [6, 4, 2]);
    }

    #[test]
    fn what_is_not_worth_it_is_ranked_now_and_then() {
        let mut ahead = LookAhead::new(None, 1, 8, 2);
        assert!(ahead.asks(0, 1, true), "to learn");
        assert!(!ahead.asks(0, 1, false) && ahead.asks(0, SCORE_EVERY, false), "only for the instrument");
        score(&mut ahead, 0, &[0, 1], LEARNING.into());
        assert!(!ahead.asks(0, 1, true) && ahead.asks(0, SCORE_EVERY, true));
        score(&mut ahead, 0, &[6, 7], 2_000);
        assert!(ahead.asks(0, 1, true));
    }

    #[test]
    fn a_number_is_kept_to() {
        let mut ahead = LookAhead::new(Some(5), 1, 8, 2);
        assert_eq!(ranked(&mut ahead, 0), [7, 6, 5, 4, 3]);
        let mut off = LookAhead::new(Some(0), 1, 8, 2);
        score(&mut off, 0, &[6, 7], 100);
        assert!(ranked(&mut off, 0).is_empty() && !off.asks(0, 1, true));
        assert_eq!(ranked(&mut LookAhead::new(Some(100), 1, 8, 2), 0).len(), 8);
    }

    #[test]
    fn a_report_says_what_is_read_and_why() {
        let mut ahead = LookAhead::new(None, 2, 8, 3);
        let nothing = LookAheadReport { told: None, ranks: 0.0, right: None, right_by_rank: vec![None; 3] };
        assert_eq!(ahead.report(), nothing);
        // Two ranks of three are right in one of two layers.
        score(&mut ahead, 0, &[0, 6, 7], 16);
        let report = ahead.report();
        assert_eq!((report.ranks, report.right_by_rank), (1.0, vec![Some(1.0), Some(1.0), Some(0.0)]));
        assert!((report.right.unwrap_or(0.0) - 2.0 / 3.0).abs() < 1e-3, "{:?}", report.right);
        let told = |width| LookAhead::new(Some(width), 2, 8, 3).report();
        assert_eq!((told(0).told, told(0).ranks), (Some(0), 0.0));
        assert_eq!((told(5).told, told(5).ranks), (Some(5), 5.0));
    }

    #[test]
    fn a_ranking_is_scored_once_and_by_its_own_layer() {
        let mut ahead = LookAhead::new(None, 2, 8, 1);
        ranked(&mut ahead, 0);
        ahead.chosen(1, &[7]);
        ahead.chosen(0, &[7]);
        ranked(&mut ahead, 0);
        ahead.begin_step();
        ahead.chosen(0, &[7]);
        assert_eq!(ahead.all.count, 0);
    }
}
