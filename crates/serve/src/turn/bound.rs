//! A text's constraint as the engine wants one, which leaves the model free to reason first.

use smoe_engine::Constraint;
use smoe_text::{Detokeniser, Tokenizer};

use super::follow::Follower;

/// Where an answer's reasoning stands.
enum Reasoning {
    /// It may begin with the next token, which is the first and has this id.
    May { open: u32 },
    /// It goes on until its closing marker.
    On { detokeniser: Detokeniser, seen: String },
    /// There is none, or no more.
    Over,
}

/// Binds an answer to a form; its reasoning is free, but for its end, which has to come.
pub(super) struct Bound {
    inner: Follower,
    reasoning: Reasoning,
    tokenizer: Tokenizer,
    close: String,
    /// Every token but the end tokens.
    free: Vec<u32>,
    /// What the form allows at first, and the opening of the reasoning.
    first: Vec<u32>,
}

impl Bound {
    /// Binds the answer from its first token on, or from the end of its reasoning, which stands between
    /// `reasoning`'s markers: it may be open already, or perhaps opened.
    pub(super) fn new(
        inner: Follower,
        tokenizer: &Tokenizer,
        vocab_size: usize,
        end_tokens: &[u32],
        reasoning: Option<(&str, &str)>,
        open_already: bool,
    ) -> Self {
        let mut free = vec![u32::MAX; vocab_size.div_ceil(32)];
        if let (Some(last), rest @ 1..) = (free.last_mut(), vocab_size % 32) {
            *last = (1 << rest) - 1;
        }
        for &id in end_tokens {
            if let Some(word) = free.get_mut(id as usize / 32) {
                *word &= !(1 << (id % 32));
            }
        }
        let close = reasoning.map_or("", |(_, close)| close).trim().to_owned();
        let tokenizer = tokenizer.clone();
        let mut bound = Self { inner, reasoning: Reasoning::Over, tokenizer, close, free, first: Vec::new() };
        match reasoning {
            Some(_) if open_already => bound.begin_reasoning(),
            Some((open, _)) => {
                if let Some(open) = bound.tokenizer.token_to_id(open.trim()) {
                    bound.reasoning = Reasoning::May { open };
                }
            }
            None => {}
        }
        bound
    }

    fn begin_reasoning(&mut self) {
        self.reasoning =
            Reasoning::On { detokeniser: Detokeniser::new(&self.tokenizer, false), seen: String::new() };
    }
}

impl Constraint for Bound {
    fn mask(&mut self) -> Result<&[u32], String> {
        match &self.reasoning {
            Reasoning::Over => self.inner.mask(),
            Reasoning::On { .. } => Ok(&self.free),
            Reasoning::May { open } => {
                let mut mask = self.inner.mask()?.to_vec();
                if let Some(word) = mask.get_mut(*open as usize / 32) {
                    *word |= 1 << (open % 32);
                }
                self.first = mask;
                Ok(&self.first)
            }
        }
    }

    fn accept(&mut self, token: u32) -> Result<(), String> {
        match &mut self.reasoning {
            Reasoning::May { open } if *open == token => {
                self.begin_reasoning();
                Ok(())
            }
            Reasoning::On { detokeniser, seen } => {
                seen.push_str(&detokeniser.push(token));
                if seen.contains(&self.close) {
                    self.reasoning = Reasoning::Over;
                } else {
                    // Only the end may be the beginning of the marker.
                    let keep = seen.len().saturating_sub(self.close.len());
                    let keep = (keep..=seen.len()).find(|&at| seen.is_char_boundary(at));
                    seen.drain(..keep.unwrap_or(0));
                }
                Ok(())
            }
            Reasoning::May { .. } | Reasoning::Over => {
                self.reasoning = Reasoning::Over;
                self.inner.accept(token)
            }
        }
    }
}
