//! Text from a stream of ids, handed out as soon as it is final.
//!
//! The promise: what all pushes and the end give, put together, is [`Tokenizer::decode`] of all ids, and no piece
//! ends inside a character. For the two common kinds of decoder ([`crate::decoding`]) this holds for every sequence
//! of ids, at most three bytes are ever held back, and a push costs what its token costs.

use crate::decoding::{Decoder, Decoding};
use crate::tokenizer::Tokenizer;

/// So many tokens are held back at most where the kind of decoder is not known: each stands for a byte at least,
/// and a character has four bytes at most. After that a U+FFFD at the end is taken to be meant.
const MAX_HELD: usize = 4;

/// Turns ids into text one by one.
#[derive(Clone, Debug)]
pub struct Detokeniser {
    tokenizer: Tokenizer,
    skip_special: bool,
    decoder: Decoder,
    window: Window,
}

/// Where a decoder can only be asked for whole texts: the last tokens whose text is out, for those that follow
/// depend on them (a word's piece, a blank in between), and the tokens held back.
#[derive(Clone, Debug, Default)]
struct Window {
    ids: Vec<u32>,
    /// How many of `ids` are out.
    out: usize,
}

impl Detokeniser {
    /// Begins a text. Special tokens leave nothing behind if they are to be skipped.
    pub fn new(tokenizer: &Tokenizer, skip_special: bool) -> Self {
        Detokeniser {
            tokenizer: tokenizer.clone(),
            skip_special,
            decoder: Decoder::new(tokenizer.decoding()),
            window: Window::default(),
        }
    }

    /// Takes the next id and returns the text that it makes certain, which may be none.
    pub fn push(&mut self, id: u32) -> String {
        let mut text = String::new();
        self.push_to(id, &mut text);
        text
    }

    /// As [`Detokeniser::push`], appending.
    pub(crate) fn push_to(&mut self, id: u32, text: &mut String) {
        let Some(token) = self.tokenizer.id_to_token(id) else { return };
        if self.skip_special && self.tokenizer.is_special_token(&token) {
            return;
        }
        match self.tokenizer.decoding() {
            Decoding::Whole => self.window.push(&self.tokenizer, id, text),
            decoding => self.decoder.push(decoding, &token, text),
        }
    }

    /// Ends the text and returns what was held back; the beginning of a character becomes U+FFFD.
    pub fn finish(&mut self) -> String {
        let mut text = String::new();
        match self.tokenizer.decoding() {
            Decoding::Whole => text.push_str(&self.window.rest(&self.tokenizer)),
            _ => self.decoder.finish(&mut text),
        }
        self.window = Window::default();
        text
    }
}

impl Window {
    fn push(&mut self, tokenizer: &Tokenizer, id: u32, text: &mut String) {
        self.ids.push(id);
        let rest = self.rest(tokenizer);
        let unfinished = rest.is_empty() || rest.ends_with(char::REPLACEMENT_CHARACTER);
        if unfinished && self.ids.len() - self.out < MAX_HELD {
            return;
        }
        text.push_str(&rest);
        self.ids.drain(..self.out);
        self.out = self.ids.len();
    }

    /// The text of the tokens held back: what they add to the text of those before them.
    fn rest(&self, tokenizer: &Tokenizer) -> String {
        // Special tokens that are to be skipped never came here.
        let before = tokenizer.decode_whole(&self.ids[..self.out], false);
        let all = tokenizer.decode_whole(&self.ids, false);
        match all.strip_prefix(&before) {
            Some(rest) => rest.to_owned(),
            None => {
                // The decoder rewrote what is out already; the part that differs is all that can be given.
                let same =
                    before.chars().zip(all.chars()).take_while(|(a, b)| a == b).map(|(a, _)| a.len_utf8());
                all[same.sum::<usize>()..].to_owned()
            }
        }
    }
}
