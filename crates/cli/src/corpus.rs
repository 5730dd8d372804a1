//! Texts for a model to read: plain ones, and conversations.

use std::path::{Path, PathBuf};

use serde_json::Value;
use smoe_text::{ModelText, TemplateInput, TextError};

use crate::failure::Failure;

/// A template that tells the date tells this one, so that figures repeat.
const TODAY: &str = "2025-01-01 00:00:00";
/// Bytes of plain text that are tokenised at once: a tokeniser's memory is many times its text.
const PIECE: usize = 1 << 20;

/// Tokens that belong together.
#[derive(Debug, Default)]
pub struct Document {
    pub tokens: Vec<u32>,
    /// Which of them a model is to predict; never the first of a text.
    pub scored: Vec<bool>,
    /// It goes on with the text of the one before.
    pub goes_on: bool,
}

/// A file of texts.
pub struct Corpus {
    path: PathBuf,
    text: String,
    /// A conversation or a text a line, in JSON; else one plain text.
    pub is_lines: bool,
    answers_only: bool,
}

impl Corpus {
    /// Opens a plain text, or JSON lines with `messages` or `text`: by the name (`.jsonl`, `.ndjson`), or by the first
    /// line.
    pub fn open(path: &Path, answers_only: bool) -> Result<Self, Failure> {
        let failed = |what: String| Failure::new(format!("{}: {what}", path.display()));
        let text = std::fs::read(path).map_err(|e| failed(format!("cannot read it: {e}")))?;
        let text = String::from_utf8(text).map_err(|_| failed("it is not UTF-8 text".to_owned()))?;
        let is_object = |line: &str| {
            let line = serde_json::from_str::<Value>(line).unwrap_or_default();
            line["messages"].is_array() || line["text"].is_string()
        };
        let is_lines = path.extension().is_some_and(|ending| ending == "jsonl" || ending == "ndjson")
            || text.lines().find(|line| !line.trim().is_empty()).is_some_and(is_object);
        if answers_only && !is_lines {
            let what = "has no conversations, which are JSON lines of {\"messages\": [...]}";
            return Err(Failure::Usage(format!("--answers-only: {} {what}", path.display())));
        }
        Ok(Self { path: path.to_owned(), text, is_lines, answers_only })
    }

    /// Its documents, tokenised one by one as they are asked for. With `answers_only` those tokens are scored that are of
    /// an assistant's answer.
    pub fn documents(&self, model: &ModelText) -> impl Iterator<Item = Result<Document, Failure>> {
        let plain = if self.is_lines { "" } else { &self.text };
        let lines = if self.is_lines { &*self.text } else { "" };
        let lines = lines.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
        let lines = lines.map(move |(number, line)| {
            self.line(line, model).map_err(|what| self.failed(format!("line {}: {what}", number + 1)))
        });
        let pieces = pieces(plain).enumerate().map(move |(i, piece)| {
            let tokenizer = model.tokenizer.as_ref().ok_or(TextError::Absent { what: "tokenizer" })?;
            let goes_on = i > 0;
            let tokens =
                if goes_on { tokenizer.encode(piece)? } else { tokenizer.encode_with_special(piece)? };
            let mut scored = vec![true; tokens.len()];
            if let Some(first) = scored.first_mut() {
                *first = goes_on;
            }
            Ok(Document { tokens, scored, goes_on })
        });
        lines.chain(pieces)
    }

    /// The error of a file in which no token is scored.
    pub fn nothing(&self) -> Failure {
        let what = if self.answers_only { "no answer in it" } else { "nothing to predict in it" };
        self.failed(format!("there is {what}"))
    }

    fn failed(&self, what: String) -> Failure {
        Failure::new(format!("{}: {what}", self.path.display()))
    }

    fn line(&self, line: &str, model: &ModelText) -> Result<Document, String> {
        let (tokens, answer) = of_line(line, model)?;
        let mut scored = if self.answers_only { answer } else { vec![true; tokens.len()] };
        if let Some(first) = scored.first_mut() {
            *first = false;
        }
        Ok(Document { tokens, scored, goes_on: false })
    }
}

/// Cuts a text after ends of lines, where it has some.
fn pieces(mut rest: &str) -> impl Iterator<Item = &str> {
    std::iter::from_fn(move || {
        let end = rest.ceil_char_boundary(PIECE);
        let cut = if end == rest.len() { end } else { rest[..end].rfind('\n').map_or(end, |at| at + 1) };
        let (piece, after) = rest.split_at(cut);
        rest = after;
        (!piece.is_empty()).then_some(piece)
    })
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_the_text_and_end_with_lines() {
        let line = "ä".repeat(300) + "\n";
        for text in [String::new(), "short".to_owned(), line.repeat(6000), "é".repeat(PIECE)] {
            let cut: Vec<&str> = pieces(&text).collect();
            assert_eq!(cut.concat(), text);
            assert!(cut.iter().all(|piece| !piece.is_empty() && piece.len() <= PIECE + 1));
            if text.contains('\n') {
                assert!(cut.len() > 1 && cut.iter().all(|piece| piece.ends_with('\n')));
            }
        }
    }
}
