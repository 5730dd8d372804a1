//! An answer as rows: reasoning dim, text as markdown or as it is, a tool call as a line.
//!
//! Events may cut the answer anywhere: the rows are the same.

use std::collections::BTreeMap;

use smoe_text::ReplyEvent;

use super::cells::{Break, Margin, Row, Span, Style, expand_tabs, wrap};
use super::markdown::Markdown;

/// Before a line of reasoning.
const THOUGHT: &str = "┊ ";
/// More of a call's arguments is not shown.
const MOST_ARGUMENTS: usize = 200;
/// More of a line that is not over is not looked at for what it may be.
const MOST_PENDING: usize = 8192;

/// How an answer is shown.
#[derive(Clone, Copy, Debug, Default)]
pub struct Looks {
    /// Text as it is, without markdown.
    pub plain: bool,
    /// Reasoning is only counted.
    pub folded: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Voice {
    Reasoning,
    Text,
}

/// An answer under way.
#[derive(Debug)]
pub struct Body {
    looks: Looks,
    voice: Option<Voice>,
    markdown: Markdown,
    /// The line that is not over.
    pending: String,
    thought: String,
    calls: Calls,
    /// Rows that nobody has taken yet.
    rows: Vec<Row>,
}

impl Body {
    /// Nothing was said yet.
    pub fn new(looks: Looks) -> Self {
        Self {
            looks,
            voice: None,
            markdown: Markdown::default(),
            pending: String::new(),
            thought: String::new(),
            calls: Calls::default(),
            rows: Vec::new(),
        }
    }

    /// Goes on, in so many columns.
    pub fn take(&mut self, event: &ReplyEvent, columns: usize) {
        match event {
            ReplyEvent::Reasoning(piece) => {
                if self.voice != Some(Voice::Reasoning) {
                    self.end_voice(columns);
                    self.thought.clear();
                    self.voice = Some(Voice::Reasoning);
                }
                self.thought.push_str(piece);
                if !self.looks.folded {
                    self.push(piece, columns);
                }
            }
            ReplyEvent::Text(piece) => {
                if self.voice == Some(Voice::Reasoning) {
                    self.end_voice(columns);
                }
                self.voice = Some(Voice::Text);
                self.push(piece, columns);
            }
            event => {
                if let Some(call) = self.calls.take(event) {
                    self.end_voice(columns);
                    self.rows.extend(wrap(
                        &[Span::new(&call, Style::DIM)],
                        &Margin::default(),
                        columns,
                        Break::Words,
                    ));
                }
            }
        }
    }

    /// The answer is over.
    pub fn finish(&mut self, columns: usize) {
        self.end_voice(columns);
        let cut = self.calls.cut();
        let row =
            |call: &String| wrap(&[Span::new(call, Style::DIM)], &Margin::default(), columns, Break::Words);
        self.rows.extend(cut.iter().flat_map(row));
    }

    /// The rows that are final and were not taken yet.
    pub fn take_rows(&mut self) -> Vec<Row> {
        std::mem::take(&mut self.rows)
    }

    /// The last reasoning.
    pub fn thought(&self) -> &str {
        &self.thought
    }

    /// What follows the final rows for now.
    pub fn preview(&self, columns: usize) -> Vec<Row> {
        match self.voice {
            None => Vec::new(),
            Some(Voice::Reasoning) if self.looks.folded => {
                wrap(&[thoughts("thinking", &self.thought)], &Margin::default(), columns, Break::Words)
            }
            Some(Voice::Reasoning) if self.pending.is_empty() => Vec::new(),
            Some(Voice::Reasoning) => thought_rows(tail(&self.pending), columns),
            Some(Voice::Text) if self.pending.len() > MOST_PENDING || self.looks.plain => {
                let rows = wrap(
                    &[Span::new(&expand_tabs(tail(&self.pending)), Style::PLAIN)],
                    &Margin::default(),
                    columns,
                    Break::Anywhere,
                );
                if self.pending.is_empty() { Vec::new() } else { rows }
            }
            Some(Voice::Text) => self.markdown.preview(&self.pending, columns),
        }
    }

    fn push(&mut self, piece: &str, columns: usize) {
        let mut rest = piece;
        while let Some((line, after)) = rest.split_once('\n') {
            self.pending.push_str(line);
            let line = std::mem::take(&mut self.pending);
            self.line(&line, columns);
            rest = after;
        }
        self.pending.push_str(rest);
    }

    fn line(&mut self, line: &str, columns: usize) {
        match self.voice {
            Some(Voice::Reasoning) => self.rows.extend(thought_rows(line, columns)),
            // The terminal breaks it, so that it is one line when it is copied.
            _ if self.looks.plain => self.rows.push(vec![Span::new(&expand_tabs(line), Style::PLAIN)]),
            _ => self.markdown.line(line, columns, &mut self.rows),
        }
    }

    fn end_voice(&mut self, columns: usize) {
        let pending = std::mem::take(&mut self.pending);
        if !pending.is_empty() {
            self.line(&pending, columns);
        }
        match self.voice.take() {
            Some(Voice::Text) => self.markdown.finish(columns, &mut self.rows),
            Some(Voice::Reasoning) if self.looks.folded => {
                self.rows.push(vec![
                    thoughts("thought", &self.thought),
                    Span::new("; /think unfolds", Style::DIM),
                ]);
                self.rows.push(Row::new());
            }
            Some(Voice::Reasoning) => self.rows.push(Row::new()),
            None => {}
        }
    }
}

/// Reasoning as it is shown: plain and dim.
pub fn thought_rows(text: &str, columns: usize) -> Vec<Row> {
    let style = Style { italic: true, ..Style::DIM };
    let margin = Margin::every(THOUGHT, Style::DIM);
    let row = |line: &str| wrap(&[Span::new(&expand_tabs(line), style)], &margin, columns, Break::Words);
    text.split('\n').flat_map(row).collect()
}

fn thoughts(what: &str, thought: &str) -> Span {
    let words = thought.split_whitespace().count();
    let unit = if words == 1 { "word" } else { "words" };
    Span::new(&format!("{THOUGHT}{what}, {words} {unit}"), Style::DIM)
}

/// The end of a text, where only that will be seen.
fn tail(text: &str) -> &str {
    let mut begin = text.len().saturating_sub(MOST_PENDING);
    while !text.is_char_boundary(begin) {
        begin += 1;
    }
    &text[begin..]
}

/// Calls under way, by their number.
#[derive(Clone, Debug, Default)]
pub struct Calls(BTreeMap<usize, (String, String)>);

impl Calls {
    /// Goes on; the line of a call that is over with this event.
    pub fn take(&mut self, event: &ReplyEvent) -> Option<String> {
        match event {
            ReplyEvent::ToolBegin { index, name, .. } => {
                let earlier = self.0.insert(*index, (name.clone(), String::new()));
                earlier.map(|call| line(&call))
            }
            ReplyEvent::ToolArguments { index, fragment } => {
                let (_, arguments) = self.0.get_mut(index)?;
                // Characters beyond the most that is shown only say that there are more.
                let room = (2 * MOST_ARGUMENTS).saturating_sub(arguments.chars().count());
                arguments.extend(fragment.chars().take(room));
                None
            }
            ReplyEvent::ToolEnd { index } => self.0.remove(index).map(|call| line(&call)),
            ReplyEvent::Reasoning(_) | ReplyEvent::Text(_) => None,
        }
    }

    /// The lines of calls that were cut short.
    pub fn cut(&mut self) -> Vec<String> {
        std::mem::take(&mut self.0).values().map(line).collect()
    }
}

fn line((name, arguments): &(String, String)) -> String {
    let arguments = arguments.split_whitespace().collect::<Vec<_>>().join(" ");
    let shown: String = arguments.chars().take(MOST_ARGUMENTS).collect();
    let more = if shown.len() < arguments.len() { "…" } else { "" };
    format!("→ calls {name}({shown}{more})")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chat::cells::{encode, plain};
    use smoe_text::{ReplyFormat, ReplyParser};

    const REPLY: &str = "<think>\nFirst, *look*.\n\nThen leap.\n</think>\n\n# Plan\n\n- **one** and `two`\n\
        - 日本語の文です\n\n|a|b|\n|-|-|\n|1|é|\n\n```rust\nlet x = \"**no**\";\n```\nDone \x1b[31mnow.";

    fn body_of(pieces: &[&str], looks: Looks) -> Vec<String> {
        let format = ReplyFormat::detect("<think></think>");
        let mut parser = ReplyParser::new(&format, &[], "");
        let mut body = Body::new(looks);
        let mut rows = Vec::new();
        for piece in pieces {
            for event in parser.push(piece) {
                body.take(&event, 40);
                // Looking changes nothing.
                let _ = body.preview(40);
                rows.extend(body.take_rows());
            }
        }
        parser.finish().iter().for_each(|event| body.take(event, 40));
        body.finish(40);
        rows.extend(body.take_rows());
        rows.iter().map(|row| encode(row, true)).collect()
    }

    #[test]
    fn wherever_a_reply_is_cut_the_rows_are_those_of_the_whole() {
        let cuts: Vec<usize> = (1..REPLY.len()).filter(|cut| REPLY.is_char_boundary(*cut)).collect();
        for looks in [
            Looks::default(),
            Looks { folded: true, ..Looks::default() },
            Looks { plain: true, ..Looks::default() },
        ] {
            let whole = body_of(&[REPLY], looks);
            for cut in &cuts {
                let (left, right) = REPLY.split_at(*cut);
                assert_eq!(body_of(&[left, right], looks), whole, "{cut}");
            }
            let characters: Vec<String> = REPLY.chars().map(String::from).collect();
            assert_eq!(body_of(&characters.iter().map(String::as_str).collect::<Vec<_>>(), looks), whole);
            assert!(whole.iter().all(|row| !row.contains("\x1b[31m")));
        }
    }

    #[test]
    fn reasoning_is_dim_or_folded() {
        let open = body_of(&["<think>hm *so*</think>\n\nyes"], Looks::default());
        assert_eq!(open, ["\x1b[2m┊ \x1b[0m\x1b[2;3mhm *so*\x1b[0m", "", "yes"]);
        let folded = body_of(&["<think>hm so</think>yes"], Looks { folded: true, ..Looks::default() });
        assert_eq!(folded, ["\x1b[2m┊ thought, 2 words; /think unfolds\x1b[0m", "", "yes"]);
    }

    #[test]
    fn plain_text_stays_one_line_and_loses_only_what_a_terminal_obeys() {
        let text = format!("**a** {}\x1b[2J\n\n\n# b", "x".repeat(60));
        let rows = body_of(&[&text], Looks { plain: true, ..Looks::default() });
        assert_eq!(
            rows,
            [format!("**a** {}[2J", "x".repeat(60)), String::new(), String::new(), "# b".to_owned()]
        );
    }

    #[test]
    fn what_is_not_over_is_shown_and_bounded() {
        let mut body = Body::new(Looks::default());
        body.take(&ReplyEvent::Text("**bo".to_owned()), 40);
        assert_eq!(plain(&body.preview(40)), "**bo");
        body.take(&ReplyEvent::Text("ld**".to_owned()), 40);
        assert_eq!(plain(&body.preview(40)), "bold");
        body.take(&ReplyEvent::Text("é".repeat(100_000)), 40);
        assert!(body.take_rows().is_empty());
        assert!(body.preview(40).len() <= MOST_PENDING / 40 + 1);
    }

    #[test]
    fn a_call_is_a_line() {
        let begin = |index, name: &str| ReplyEvent::ToolBegin { index, name: name.to_owned(), id: None };
        let arguments =
            |index, fragment: &str| ReplyEvent::ToolArguments { index, fragment: fragment.to_owned() };
        let mut body = Body::new(Looks::default());
        body.take(&ReplyEvent::Text("I look.".to_owned()), 300);
        for event in [begin(0, "find\x1b[A"), begin(1, "cut")] {
            body.take(&event, 300);
        }
        body.take(&arguments(0, "{\"q\":\n \"x"), 300);
        body.take(&arguments(1, "{"), 300);
        body.take(&arguments(0, "\"}"), 300);
        body.take(&ReplyEvent::ToolEnd { index: 0 }, 300);
        body.take(&arguments(1, &"y".repeat(1000)), 300);
        body.finish(300);
        let rows = body.take_rows();
        let expected =
            format!("I look.\n→ calls find[A({{\"q\": \"x\"}})\n→ calls cut({{{}…)", "y".repeat(199));
        assert_eq!(plain(&rows), expected);
    }
}
