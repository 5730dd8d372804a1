//! Texts for a model to read: plain ones, and conversations.

use std::path::Path;

use serde_json::Value;
use smoe_sculpt::calibrate::Document;
use smoe_text::{ModelText, TemplateInput, Tokenizer};

use crate::failure::Failure;

/// Reads a text as documents of at most `longest` tokens, `most` in all.
///
/// A file whose first line is a JSON object with `messages` is a conversation a line, rendered by the model's template;
/// with `answers_only` only tokens count that predict one of an assistant's message. Any other file is plain text.
pub fn read(
    path: &Path,
    text: &ModelText,
    answers_only: bool,
    longest: usize,
    most: usize,
) -> Result<Vec<Document>, Failure> {
    let shown = path.display();
    let content = std::fs::read_to_string(path).map_err(|e| Failure::new(format!("{shown}: {e}")))?;
    let tokenizer = text.tokenizer.as_ref().ok_or_else(|| Failure::new("the model has no tokenizer.json"))?;
    let lines = || content.lines().filter(|line| !line.trim().is_empty());
    let is_chat = lines().next().and_then(|line| serde_json::from_str::<Value>(line).ok());
    let is_chat = is_chat.is_some_and(|line| line["messages"].is_array());
    if answers_only && !is_chat {
        let what = "has no conversations: --answers-only wants lines of {\"messages\": [...]}";
        return Err(Failure::new(format!("{shown} {what}")));
    }
    let mut documents = Vec::new();
    let mut left = most;
    let mut push = |document: Document| {
        for (tokens, counted) in document.tokens.chunks(longest).zip(document.counted.chunks(longest)) {
            let n = tokens.len().min(left);
            left -= n;
            if n > 0 {
                documents.push(Document { tokens: tokens[..n].to_vec(), counted: counted[..n].to_vec() });
            }
        }
        left > 0
    };
    if is_chat {
        for (i, line) in lines().enumerate() {
            let at = |what: String| Failure::new(format!("{shown}, line {}: {what}", i + 1));
            let value: Value = serde_json::from_str(line).map_err(|e| at(e.to_string()))?;
            let messages = value["messages"].as_array().ok_or_else(|| at("has no `messages`".to_owned()))?;
            let document = conversation(text, tokenizer, messages, answers_only).map_err(at)?;
            if !push(document) {
                break;
            }
        }
    } else {
        // In pieces, for a tokeniser's memory is many times its text.
        let mut rest = content.as_str();
        while !rest.is_empty() {
            let end = rest.char_indices().map(|(at, _)| at).find(|&at| at >= PIECE).unwrap_or(rest.len());
            let cut = rest[..end].rfind('\n').map_or(end, |at| at + 1);
            let tokens = tokenizer.encode(&rest[..cut])?;
            rest = &rest[cut..];
            let counted = vec![true; tokens.len()];
            if !push(Document { tokens, counted }) {
                break;
            }
        }
    }
    if documents.iter().all(|document| !document.counted.contains(&true)) {
        return Err(Failure::new(format!("{shown} has nothing to read")));
    }
    Ok(documents)
}

/// Bytes of plain text that are tokenised at once.
const PIECE: usize = 1 << 20;

fn conversation(
    text: &ModelText,
    tokenizer: &Tokenizer,
    messages: &[Value],
    answers_only: bool,
) -> Result<Document, String> {
    let template = text.chat_template.as_ref().ok_or("the model has no chat template")?;
    let render = |messages: &[Value], add_generation_prompt: bool| {
        let input = TemplateInput {
            messages: messages.to_vec().into(),
            add_generation_prompt,
            bos_token: text.bos_token.clone(),
            eos_token: text.eos_token.clone(),
            ..TemplateInput::default()
        };
        template.render(&input).map_err(|e| e.to_string())
    };
    let encode = |text: &str| tokenizer.encode(text).map_err(|e| e.to_string());
    let whole = render(messages, false)?;
    if !answers_only {
        let tokens = encode(&whole)?;
        return Ok(Document { counted: vec![true; tokens.len()], tokens });
    }
    // By turns what a person sees before an answer and the answer, each with tokens of its own, as when it is generated.
    let mut document = Document::default();
    let mut done = 0;
    for (i, _) in messages.iter().enumerate().filter(|(_, message)| message["role"] == "assistant") {
        let before = render(&messages[..i], true)?;
        let after = render(&messages[..=i], false)?;
        let fits = whole.starts_with(&after) && after.starts_with(&before) && before.len() >= done;
        if !fits {
            return Err(
                "the model's template shows earlier turns otherwise once later ones follow: without \
                        --answers-only all tokens count"
                    .to_owned(),
            );
        }
        document.tokens.extend(encode(&whole[done..before.len()])?);
        document.counted.resize(document.tokens.len(), false);
        // A position counts that predicts a token of the answer.
        if let Some(last) = document.counted.last_mut() {
            *last = true;
        }
        document.tokens.extend(encode(&whole[before.len()..after.len()])?);
        document.counted.resize(document.tokens.len(), true);
        if let Some(last) = document.counted.last_mut() {
            *last = false;
        }
        done = after.len();
    }
    Ok(document)
}
