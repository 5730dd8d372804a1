//! The text of an evaluation, as tokens.

use std::fs;
use std::ops::Range;
use std::path::Path;

use serde_json::Value;
use smoe_text::{ModelText, TemplateInput, TextError};

use crate::failure::Failure;

/// A template that tells the date tells this one, so that figures repeat.
const TODAY: &str = "2025-01-01 00:00:00";

/// Tokens that belong together.
pub struct Document {
    pub tokens: Vec<u32>,
    /// Which of them count; never the first.
    pub scored: Vec<bool>,
}

/// All of them.
pub struct Documents {
    pub list: Vec<Document>,
    /// One plain text, whose windows stand for documents where errors are estimated.
    pub windows_are_documents: bool,
}

impl Documents {
    /// Reads a plain text, or JSON lines with `messages` or `text` if the name ends in `.jsonl`.
    pub fn read(
        path: &Path,
        model: &ModelText,
        answers_only: bool,
        max_tokens: Option<usize>,
    ) -> Result<Self, Failure> {
        let failed = |what: String| Failure::new(format!("{}: {what}", path.display()));
        let text = fs::read(path).map_err(|e| failed(format!("cannot read it: {e}")))?;
        let text = String::from_utf8(text).map_err(|_| failed("it is not UTF-8 text".to_owned()))?;
        let lines = path.extension().is_some_and(|ending| ending == "jsonl" || ending == "ndjson");
        if answers_only && !lines {
            let what = format!("--answers-only: {} is no file of JSON lines (.jsonl)", path.display());
            return Err(Failure::Usage(what));
        }
        let mut left = max_tokens.unwrap_or(usize::MAX);
        let mut list = Vec::new();
        if lines {
            for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
                if left == 0 {
                    break;
                }
                let (tokens, answer) =
                    of_line(line, model).map_err(|what| failed(format!("line {}: {what}", number + 1)))?;
                let scored = if answers_only { answer } else { vec![true; tokens.len()] };
                list.push(Document::new(tokens, scored, &mut left));
            }
        } else {
            let tokenizer = model.tokenizer.as_ref().ok_or(TextError::Absent { what: "tokenizer" })?;
            let tokens = tokenizer.encode_with_special(&text)?;
            let scored = vec![true; tokens.len()];
            list.push(Document::new(tokens, scored, &mut left));
        }
        if !list.iter().any(|document| document.scored.contains(&true)) {
            let what =
                if answers_only { "there is no answer in it" } else { "there is nothing to predict in it" };
            return Err(failed(what.to_owned()));
        }
        Ok(Self { list, windows_are_documents: !lines })
    }

    /// Bytes that they take.
    pub fn bytes(&self) -> u64 {
        self.list.iter().map(|document| 5 * document.tokens.len() as u64).sum()
    }
}

impl Document {
    /// No more than `left` tokens are scored, and what comes after the last of those is cut off.
    fn new(mut tokens: Vec<u32>, mut scored: Vec<bool>, left: &mut usize) -> Self {
        if let Some(first) = scored.first_mut() {
            *first = false;
        }
        let mut end = 0;
        for i in (0..tokens.len()).filter(|&i| scored[i]) {
            if *left == 0 {
                break;
            }
            *left -= 1;
            end = i + 1;
        }
        tokens.truncate(end);
        scored.truncate(end);
        Self { tokens, scored }
    }
}

/// A line's tokens, and which of them are answers.
fn of_line(line: &str, model: &ModelText) -> Result<(Vec<u32>, Vec<bool>), String> {
    let mut json: Value = serde_json::from_str(line).map_err(|e| e.to_string())?;
    if let Some(text) = json["text"].as_str() {
        let tokenizer = model.tokenizer.as_ref().ok_or("the vault has no tokenizer")?;
        let tokens = tokenizer.encode_with_special(text).map_err(|e| e.to_string())?;
        let answer = vec![false; tokens.len()];
        return Ok((tokens, answer));
    }
    if !json["messages"].is_array() {
        return Err("it has neither `messages` nor `text`".to_owned());
    }
    if json["strftime_now"].is_null() {
        json["strftime_now"] = TODAY.into();
    }
    let mut input = TemplateInput::from_json(&json).map_err(|e| e.to_string())?;
    input.bos_token = input.bos_token.or_else(|| model.bos_token.clone());
    input.eos_token = input.eos_token.or_else(|| model.eos_token.clone());
    let dialogue = model.dialogue(&input).map_err(|e| e.to_string())?;
    Ok((dialogue.tokens, dialogue.answer))
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
        let scored = vec![true, true, false, true, false];
        let first = Document::new(vec![1, 2, 3, 4, 5], scored, &mut left);
        assert_eq!((first.tokens.as_slice(), left), (&[1, 2, 3, 4][..], 1));
        assert_eq!(first.scored, [false, true, false, true]);
        let second = Document::new(vec![1, 2, 3], vec![true; 3], &mut left);
        assert_eq!((second.tokens.as_slice(), left), (&[1, 2][..], 0));
        assert!(Document::new(vec![1, 2], vec![true; 2], &mut left).tokens.is_empty());
    }
}
