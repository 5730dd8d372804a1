//! A reply whose markers are special tokens, which are no text, retold with markers that are: `<think>` around what is
//! reasoning. So whatever shows an answer as it is written shows that too, and who folds reasoning knows how.

use smoe_text::{ReplyEvent, ReplyFormat, ReplyParser};

const OPEN: &str = "<think>\n";
const CLOSE: &str = "\n</think>\n\n";

/// Retells a reply as it comes.
pub struct Retold {
    parser: ReplyParser,
    thinks: bool,
    answer: String,
}

impl Retold {
    /// For a reply in this format to a prompt that ends so.
    pub fn new(format: &ReplyFormat, prompt: &str) -> Self {
        // No tools were offered: what looks like a call is text.
        Self { parser: ReplyParser::new(format, &[], prompt), thinks: false, answer: String::new() }
    }

    /// What is read afterwards.
    pub fn format() -> ReplyFormat {
        let reasoning = Some((OPEN.trim().to_owned(), CLOSE.trim().to_owned()));
        ReplyFormat { reasoning, ..ReplyFormat::default() }
    }

    /// Takes a piece.
    pub fn push(&mut self, piece: &str) -> String {
        let events = self.parser.push(piece);
        self.tell(events)
    }

    /// Ends the reply.
    pub fn finish(&mut self) -> String {
        let events = self.parser.finish();
        self.tell(events)
    }

    /// The answer so far, without its reasoning.
    pub fn answer(&self) -> &str {
        &self.answer
    }

    fn tell(&mut self, events: Vec<ReplyEvent>) -> String {
        let mut told = String::new();
        for event in events {
            match event {
                ReplyEvent::Reasoning(text) => {
                    if !std::mem::replace(&mut self.thinks, true) {
                        told.push_str(OPEN);
                    }
                    told.push_str(&text);
                }
                ReplyEvent::Text(text) => {
                    if std::mem::take(&mut self.thinks) {
                        told.push_str(CLOSE);
                    }
                    told.push_str(&text);
                    self.answer.push_str(&text);
                }
                // None, without tools.
                ReplyEvent::ToolBegin { .. }
                | ReplyEvent::ToolArguments { .. }
                | ReplyEvent::ToolEnd { .. } => {}
            }
        }
        told
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn channels_become_reasoning_and_an_answer_however_they_are_cut() {
        let format = ReplyFormat::detect("<|channel|><|message|>");
        let reply =
            "<|channel|>analysis<|message|>I think.<|end|><|start|>assistant<|channel|>final<|message|>Four.";
        for size in [1, 3, 7, reply.len()] {
            let mut retold = Retold::new(&format, "...<|start|>assistant");
            let pieces: Vec<char> = reply.chars().collect();
            let mut told: String =
                pieces.chunks(size).map(|piece| retold.push(&piece.iter().collect::<String>())).collect();
            told += &retold.finish();
            assert_eq!(told, "<think>\nI think.\n</think>\n\nFour.");
            assert_eq!(retold.answer(), "Four.");
            let mut parser = ReplyParser::new(&Retold::format(), &[], "");
            let mut events = parser.push(&told);
            events.extend(parser.finish());
            let expected =
                [ReplyEvent::Reasoning("I think.".to_owned()), ReplyEvent::Text("Four.".to_owned())];
            assert_eq!(events, expected);
        }
    }
}
