//! A session: one conversation's timeline of tokens whose keys and values are in the cache.

use crate::kv::SeqId;

/// One mutable timeline. Made by [`crate::Engine::open_session`], given back to
/// [`crate::Engine::close_session`].
#[derive(Debug)]
pub struct Session {
    pub(crate) seq: SeqId,
    /// Tokens whose keys and values are held; never more than the context.
    pub(crate) tokens: Vec<u32>,
}

impl Session {
    /// The tokens that are held.
    #[must_use]
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// How many are held.
    #[must_use]
    pub fn len(&self) -> usize {
        self.tokens.len()
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
