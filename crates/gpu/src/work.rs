//! The list of what a layer's experts are to compute.

use crate::{ExpertLayout, Gpu, GpuError, Slice};

/// Most pairs of an entry.
pub(crate) const PAIRS: usize = 8;

/// What is to be computed: entries of an expert and up to eight pairs, and the pairs by entry.
///
/// `entries` is words: the number n of entries, three that are not read here, and from word 4 on four words an
/// entry: slot ([`Self::ABSENT`] if the expert is not here: skipped), first, count (1 to 8), expert. `pairs` is
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
}

impl WorkList {
    /// The slot of an expert that is not here.
    pub const ABSENT: u32 = u32::MAX;

    /// Room for `tokens` tokens, of `top_k` of the layout's experts each.
    ///
    /// # Errors
    /// If the device has no room.
    ///
    /// # Panics
    /// If `top_k` is 0.
    pub fn new(gpu: &Gpu, layout: &ExpertLayout, tokens: usize, top_k: usize) -> Result<Self, GpuError> {
        assert!(top_k > 0, "no experts");
        let pairs = tokens * top_k;
        // In one buffer, so that the host writes it at once.
        let entries = (16 + 16 * layout.entries(pairs)) as u64;
        let start = entries.next_multiple_of(gpu.alignment());
        let both = gpu.buffer("work list of experts", start + 4 * pairs as u64)?;
        Ok(Self { entries: both.part(0, entries), pairs: both.part(start, 4 * pairs as u64), tokens, top_k })
    }

    /// Most pairs.
    #[must_use]
    pub const fn most_pairs(&self) -> usize {
        self.tokens * self.top_k
    }

    /// Writes a list from the host: (slot, expert, its pairs), an expert with more than eight pairs in several
    /// entries.
    ///
    /// # Panics
    /// If there are more pairs or entries than there is room for.
    pub fn write(&self, gpu: &Gpu, experts: &[(u32, u32, &[u32])]) {
        let (mut entries, mut places) = (vec![0; 4], Vec::new());
        for &(slot, expert, pairs) in experts {
            for pairs in pairs.chunks(PAIRS) {
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
