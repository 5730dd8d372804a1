//! The list of what a layer's experts are to compute.

use crate::coded::MANY;
use crate::draft::demand;
use crate::{ExpertLayout, Gpu, GpuError, Slice};

/// Most pairs of an entry, where experts have few and where they have many: what kernels of a few tokens, and of many, take at once.
const PAIRS: usize = 8;
const MANY_PAIRS: usize = 64;
/// Pairs of an expert, on average, from which on entries are of many (EXP-GPU-12).
const MEAN_PAIRS: usize = 2;

/// What is to be computed: entries of an expert and some of its pairs, and the pairs by entry.
///
/// `entries` is words: the number n of entries, three that are not read here, and from word 4 on four words an
/// entry: slot ([`Self::BEHIND`] added in a second memory, [`Self::ABSENT`] if the expert is not here: skipped), first, count (1 to [`Self::entry_pairs`]), expert. `pairs` is
/// words: the pair `token * top_k + j` at each place; an entry's places are `first .. first + count`. A token
/// is at most once in an entry.
#[derive(Clone, Debug)]
pub struct WorkList {
    /// Number and entries.
    pub entries: Slice,
    /// Pairs by place.
    pub pairs: Slice,
    /// Tokens that there is room for.
    pub tokens: usize,
    /// Experts of a token.
    pub top_k: usize,
    /// Experts of the layer.
    pub n_experts: usize,
}

impl WorkList {
    /// The slot of an expert that is not here.
    pub const ABSENT: u32 = u32::MAX;
    /// What is added to the number of a slot of the second memory, where experts lie in two ([`ExpertLayout::and_behind`]).
    pub const BEHIND: u32 = 1 << 31;

    /// Room for `tokens` tokens, of `top_k` of the layout's experts each.
    ///
    /// # Errors
    /// If the device has no room.
    ///
    /// # Panics
    /// If `top_k` is 0.
    pub fn new(gpu: &Gpu, layout: &ExpertLayout, tokens: usize, top_k: usize) -> Result<Self, GpuError> {
        assert!(top_k > 0, "no experts");
        let (pairs, n_experts) = (tokens * top_k, layout.n_experts());
        // In one buffer, so that the host writes it at once.
        let entries = 4 * Self::entry_words(pairs, n_experts) as u64;
        let start = entries.next_multiple_of(gpu.alignment());
        let both = gpu.buffer("work list of experts", start + 4 * pairs as u64)?;
        let (entries, pairs) = (both.part(0, entries), both.part(start, 4 * pairs as u64));
        Ok(Self { entries, pairs, tokens, top_k, n_experts })
    }

    /// Words of the most entries: each expert may have one that is not full.
    fn entry_words(pairs: usize, n_experts: usize) -> usize {
        4 + 4 * pairs.min(n_experts + pairs / PAIRS)
    }

    /// Asserts that the list has room for so many tokens.
    pub(crate) fn assert_room(&self, tokens: usize) {
        let pairs = tokens * self.top_k;
        demand(&self.pairs, pairs, "pairs");
        demand(&self.entries, Self::entry_words(pairs, self.n_experts), "a work list");
    }

    /// Most pairs.
    #[must_use]
    pub const fn most_pairs(&self) -> usize {
        self.tokens * self.top_k
    }

    /// Most pairs of an entry in a list of `tokens` tokens: 8, or as many as share tiles where experts have so many.
    #[must_use]
    pub const fn entry_pairs(&self, tokens: usize) -> usize {
        let are_many = tokens >= MANY && tokens * self.top_k >= MEAN_PAIRS * self.n_experts;
        if are_many { MANY_PAIRS } else { PAIRS }
    }

    /// Whether entries of a list of so many tokens are of many pairs.
    pub(crate) const fn is_of_many(&self, tokens: usize) -> bool {
        self.entry_pairs(tokens) > PAIRS
    }

    /// Whether there is room for so many tokens that they are.
    pub(crate) const fn can_be_of_many(&self) -> bool {
        self.is_of_many(self.tokens)
    }

    /// A grid's most entries of such a list, and the parts that kernels of so many tokens take them in.
    pub(crate) fn grid(&self, tokens: usize, at_once: u32) -> [u32; 2] {
        assert!(tokens <= self.tokens, "{tokens} tokens of {}", self.tokens);
        let (pairs, most) = (tokens * self.top_k, self.entry_pairs(tokens));
        let entries = pairs.min(self.n_experts + pairs / most);
        // No entry has more pairs than there are tokens.
        let parts = if tokens <= PAIRS { 1 } else { (most as u32).div_ceil(at_once) };
        [entries as u32, parts]
    }

    /// Writes the list of `tokens` tokens from the host: (slot, expert, its pairs), an expert with more pairs than an entry takes
    /// in several.
    ///
    /// # Panics
    /// If there are more pairs or entries than there is room for.
    pub fn write(&self, gpu: &Gpu, tokens: usize, experts: &[(u32, u32, &[u32])]) {
        let (mut entries, mut places) = (vec![0; 4], Vec::new());
        for &(slot, expert, pairs) in experts {
            for pairs in pairs.chunks(self.entry_pairs(tokens)) {
                entries.extend([slot, places.len() as u32, pairs.len() as u32, expert]);
                places.extend_from_slice(pairs);
            }
        }
        entries[0] = entries.len() as u32 / 4 - 1;
        assert!(
            4 * entries.len() as u64 <= self.entries.len() && 4 * places.len() as u64 <= self.pairs.len()
        );
        let Some(start) = self.pairs.after(&self.entries) else {
            gpu.write(&self.entries, 0, bytemuck::cast_slice(&entries));
            gpu.write(&self.pairs, 0, bytemuck::cast_slice(&places));
            return;
        };
        entries.resize(start as usize / 4, 0);
        entries.extend(places);
        gpu.write(&self.entries.to_end_of(&self.pairs), 0, bytemuck::cast_slice(&entries));
    }
}
