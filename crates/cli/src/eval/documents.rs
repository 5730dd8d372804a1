//! The text of an evaluation, as tokens.

use std::ops::Range;
use std::path::Path;

use smoe_text::ModelText;

use crate::corpus::{Corpus, Document};
use crate::failure::Failure;

/// All documents.
pub struct Documents {
    pub list: Vec<Document>,
    /// One plain text, whose windows stand for documents where errors are estimated.
    pub windows_are_documents: bool,
}

impl Documents {
    /// Reads them, until so many tokens are scored.
    pub fn read(
        path: &Path,
        model: &ModelText,
        answers_only: bool,
        max_tokens: Option<usize>,
    ) -> Result<Self, Failure> {
        let corpus = Corpus::open(path, answers_only)?;
        let mut left = max_tokens.unwrap_or(usize::MAX);
        let mut list: Vec<Document> = Vec::new();
        for document in corpus.documents(model) {
            let mut document = document?;
            limit(&mut document, &mut left);
            match list.last_mut() {
                Some(last) if document.goes_on => {
                    last.tokens.append(&mut document.tokens);
                    last.scored.append(&mut document.scored);
                }
                _ => list.push(document),
            }
            if left == 0 {
                break;
            }
        }
        if !list.iter().any(|document| document.scored.contains(&true)) {
            return Err(corpus.nothing());
        }
        Ok(Self { list, windows_are_documents: !corpus.is_lines })
    }

    /// Bytes that they take.
    pub fn bytes(&self) -> u64 {
        self.list.iter().map(|document| 5 * document.tokens.len() as u64).sum()
    }
}

/// No more than `left` tokens are scored, and what comes after the last of those is cut off.
fn limit(document: &mut Document, left: &mut usize) {
    let mut end = 0;
    for i in (0..document.tokens.len()).filter(|&i| document.scored[i]) {
        if *left == 0 {
            break;
        }
        *left -= 1;
        end = i + 1;
    }
    document.tokens.truncate(end);
    document.scored.truncate(end);
}

/// A part of a document that is computed from an empty context.
#[derive(Debug, PartialEq, Eq)]
pub struct Window {
    pub tokens: Range<usize>,
    /// The first token that counts here: those before it have counted already, and are context.
    pub first: usize,
}

/// Cuts a document of `len` tokens into windows that have `overlap` tokens, one at least, in common, so that every
/// token but the first counts once.
pub fn windows(len: usize, window: usize, overlap: usize) -> impl Iterator<Item = Window> {
    let mut done = 0;
    std::iter::from_fn(move || {
        if done >= len {
            return None;
        }
        let start = done.saturating_sub(overlap);
        let tokens = start..len.min(start + window);
        let first = done.max(1);
        done = tokens.end;
        Some(Window { tokens, first })
    })
    // A single token predicts nothing.
    .filter(|window| window.first < window.tokens.end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_token_but_the_first_counts_in_one_window() {
        for len in 0..40 {
            for window in 2..12 {
                for overlap in 1..window {
                    let mut counted = vec![0; len];
                    for part in windows(len, window, overlap) {
                        assert!(part.tokens.len() <= window && part.tokens.end <= len);
                        // Its context is there, unless it is the beginning.
                        assert!(part.first - part.tokens.start >= overlap || part.tokens.start == 0);
                        (part.first..part.tokens.end).for_each(|i| counted[i] += 1);
                    }
                    let expected: Vec<i32> = (0..len).map(|i| i32::from(i > 0)).collect();
                    assert_eq!(counted, expected, "{len} {window} {overlap}");
                }
            }
        }
    }

    #[test]
    fn a_limit_counts_scored_tokens() {
        let mut left = 3;
        let mut cut = |scored: &[bool]| {
            let tokens = (0..scored.len() as u32).collect();
            let mut document = Document { tokens, scored: scored.to_vec(), goes_on: false };
            limit(&mut document, &mut left);
            assert_eq!(document.tokens.len(), document.scored.len());
            (document.tokens.len(), left)
        };
        assert_eq!(cut(&[false, true, false, true, false]), (4, 1));
        assert_eq!(cut(&[false, true, true]), (2, 0));
        assert_eq!(cut(&[false, true]), (0, 0));
    }
}
