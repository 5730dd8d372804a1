//! A session: one conversation's timeline of tokens whose keys and values are in the cache.

use std::sync::{Arc, Mutex};

use crate::kv::SeqId;

/// Sessions of one engine that were dropped and whose cache can be freed.
#[derive(Debug, Default)]
pub(crate) struct Dropped(Mutex<Vec<SeqId>>);

impl Dropped {
    /// Takes one.
    pub(crate) fn take(&self) -> Option<SeqId> {
        self.0.lock().ok()?.pop()
    }
}

/// One mutable timeline, made by [`crate::Engine::open_session`]. Dropping it frees its cache.
#[derive(Debug)]
pub struct Session {
    pub(crate) seq: SeqId,
    /// Tokens whose keys and values are held; never more than the context.
    pub(crate) tokens: Vec<u32>,
    pub(crate) logits: Vec<f32>,
    /// Tokens that the next step computes, and of how many of the last of them the logits are wanted.
    pub(crate) pending: Vec<u32>,
    pub(crate) wanted: usize,
    /// How many of the last of them are guesses.
    pub(crate) guesses: usize,
    /// The logits after the last token were given: what comes next is an answer's, if it comes token by token.
    pub(crate) is_answering: bool,
    /// Where that answer began.
    pub(crate) answer: Option<usize>,
    /// The token after those is likely to be the one with the largest logit.
    pub(crate) likely: bool,
    /// Others may find what it computed.
    pub(crate) shared: bool,
    /// The first position whose hidden state was not finite; from there on nothing is for others to find.
    pub(crate) broken: Option<usize>,
    pub(crate) is_open: bool,
    /// How many devices the engine had lost when this was last computed: of fewer, nothing is in the cache.
    pub(crate) losses: u32,
    /// Of the engine that made it.
    pub(crate) dropped: Arc<Dropped>,
}

impl Drop for Session {
    fn drop(&mut self) {
        if self.is_open
            && let Ok(mut dropped) = self.dropped.0.lock()
        {
            dropped.push(self.seq);
        }
    }
}

impl Session {
    /// The tokens that are held.
    #[must_use]
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Logits after the last token that was computed, `[vocab_size]`.
    #[must_use]
    pub fn logits(&self) -> &[f32] {
        &self.logits
    }

    /// How many are held.
    #[must_use]
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Has the next step compute `tokens` after those that are held, and give the logits of the last `logits` of them.
    pub fn queue(&mut self, tokens: &[u32], logits: usize) {
        self.pending.clear();
        self.pending.extend_from_slice(tokens);
        self.wanted = logits.min(tokens.len());
        self.guesses = 0;
        self.likely = false;
    }

    /// Says that the token after what is queued is likely to be the one with the largest logit: a device may begin its
    /// step before it is asked to.
    pub(crate) const fn expect_likeliest(&mut self) {
        self.likely = true;
    }

    /// Adds guesses at what follows, of which all the logits are wanted too.
    pub(crate) fn queue_guesses(&mut self, guesses: &[u32]) {
        self.pending.extend_from_slice(guesses);
        self.wanted += guesses.len();
        self.guesses += guesses.len();
    }

    /// Has the next step compute `tokens` that were computed before, as parts of a prompt or of an answer.
    pub(crate) fn queue_again(&mut self, tokens: &[u32], is_answer: bool) {
        self.queue(tokens, 0);
        self.is_answering = is_answer;
        self.guesses = if is_answer { tokens.len() } else { 0 };
    }

    /// Whether what is queued is a part of a prompt.
    pub(crate) const fn queues_prompt(&self) -> bool {
        !self.is_answering || self.pending.len() > 1 + self.guesses
    }

    /// How many tokens are queued.
    #[must_use]
    pub fn queued(&self) -> usize {
        self.pending.len()
    }

    /// True before the first token.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }
}

/// What [`crate::Engine::sync`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Synced {
    /// Leading tokens that were held already.
    pub reused: usize,
    /// Tokens that were computed.
    pub prefilled: usize,
}

/// How many leading tokens of `tokens` need no work when `held` are held: the longest common prefix, but
/// never all, since the last token's logits have to be computed.
pub(crate) fn reusable(held: &[u32], tokens: &[u32]) -> usize {
    let common = held.iter().zip(tokens).take_while(|(a, b)| a == b).count();
    common.min(tokens.len().saturating_sub(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_is_reused_but_never_the_last_token() {
        assert_eq!(reusable(&[], &[1, 2]), 0);
        assert_eq!(reusable(&[1, 2, 3], &[1, 2, 4, 5]), 2);
        assert_eq!(reusable(&[1, 2, 3], &[1, 2, 3]), 2);
        assert_eq!(reusable(&[1, 2, 3, 4], &[1, 2]), 1);
        assert_eq!(reusable(&[1], &[1, 2, 3]), 1);
    }
}
