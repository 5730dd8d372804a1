//! Which tokens a piece of the answer's text is made of, so that their probabilities come with it.
//!
//! ```text
//! token ──► heard: its text as it came ──► said: what the reply's parser made of it ──► out: past the stop strings
//! ```
//!
//! The parser drops markup and holds back what may become markup, the matcher what may become a stop string; in
//! between, text keeps its order and its bytes.

use std::collections::VecDeque;

use super::TokenLogprob;

/// Tokens on their way to being text.
#[derive(Debug, Default)]
pub(super) struct Told {
    /// Not read by the parser yet, each with its text; the rest of a token that was read in part has no token.
    heard: VecDeque<(Option<TokenLogprob>, String)>,
    /// Text of the answer, with their lengths in it.
    said: VecDeque<(TokenLogprob, usize)>,
    /// Bytes that are out of the first of `said`, which is longer.
    credit: usize,
}

impl Told {
    /// Takes a token and the text that came of it, which may be none.
    pub(super) fn hear(&mut self, token: TokenLogprob, text: &str) {
        self.heard.push_back((Some(token), text.to_owned()));
    }

    /// This was text of the answer.
    pub(super) fn say(&mut self, text: &str) {
        let tokens = self.take(text);
        self.said.extend(tokens);
    }

    /// This was reasoning.
    pub(super) fn pass(&mut self, text: &str) {
        self.take(text);
    }

    /// All that was heard was markup.
    pub(super) fn forget(&mut self) {
        self.heard.clear();
    }

    /// This much of the answer's text is out: the tokens that are so with it.
    pub(super) fn out(&mut self, text: &str) -> Vec<TokenLogprob> {
        self.credit += text.len();
        let mut out = Vec::new();
        while self.credit > 0
            && let Some((_, length)) = self.said.front()
            && *length <= self.credit
        {
            self.credit -= length;
            out.extend(self.said.pop_front().map(|(token, _)| token));
        }
        out
    }

    /// Takes the tokens of this text, and drops those before it.
    fn take(&mut self, text: &str) -> Vec<(TokenLogprob, usize)> {
        let heard: String = self.heard.iter().map(|(_, text)| text.as_str()).collect();
        if !heard.starts_with(text)
            && let Some(markup) = heard.rfind(text)
        {
            self.cut(markup);
        }
        self.cut(text.len())
    }

    /// Cuts so many bytes off; gives the tokens with what was cut of each.
    fn cut(&mut self, mut bytes: usize) -> Vec<(TokenLogprob, usize)> {
        let mut tokens = Vec::new();
        while bytes > 0
            && let Some((token, text)) = self.heard.front_mut()
        {
            let length = text.len().min(bytes);
            bytes -= length;
            tokens.extend(token.take().map(|token| (token, length)));
            if length == text.len() {
                self.heard.pop_front();
            } else {
                text.drain(..length);
            }
        }
        tokens
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::turn::TokenText;

    fn told(tokens: &[(&str, &str)]) -> Told {
        let mut told = Told::default();
        for (name, text) in tokens {
            let token = TokenText { text: (*name).to_owned(), bytes: None };
            told.hear(TokenLogprob { token, logprob: 0.0, top: Vec::new() }, text);
        }
        told
    }

    fn names(tokens: &[TokenLogprob]) -> Vec<&str> {
        tokens.iter().map(|token| token.token.text.as_str()).collect()
    }

    #[test]
    fn markup_in_pieces_is_dropped_and_what_follows_is_kept() {
        let mut told = told(&[("h", "h"), ("</", "</"), ("t>\n", "t>\n"), ("y", "y"), ("e", "e")]);
        told.pass("h");
        told.say("ye");
        assert_eq!(names(&told.out("ye")), ["y", "e"]);
    }

    #[test]
    fn what_is_held_back_comes_with_its_text() {
        let mut told = told(&[("a<", "a<"), ("b", "b")]);
        told.say("a");
        assert_eq!(names(&told.out("a")), ["a<"]);
        told.say("<b");
        assert!(told.out("").is_empty());
        assert_eq!(names(&told.out("<b")), ["b"]);
    }

    #[test]
    fn parts_of_a_character_come_together() {
        let mut told = told(&[("1", ""), ("2", "é"), ("3", "")]);
        told.say("é");
        assert_eq!(names(&told.out("é")), ["1", "2"]);
    }

    #[test]
    fn a_token_is_out_when_all_of_it_is() {
        let mut told = told(&[("ab", "ab"), ("c", "c")]);
        told.say("abc");
        assert!(told.out("a").is_empty());
        assert_eq!(names(&told.out("bc")), ["ab", "c"]);
    }
}
