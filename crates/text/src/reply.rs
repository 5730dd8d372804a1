//! The reply as it arrives: reasoning, text and tool calls out of one stream of text.
//!
//! Pieces break anywhere, also inside a marker. [`ReplyParser`] reads the text one character or one marker at
//! a time, and which markers count depends on nothing but the text before them:
//!
//! ```text
//! piece ──► held ──► a marker of the present state? ──► state ──► events
//!                    yes: one step    may become one: wait    no: one character is one step
//! ```
//!
//! From this follow the promises. The events, joined, are the same however the text was cut. Only what may be
//! the beginning of a marker, white space that markup would swallow, and the head of a call wait; the rest
//! comes out at once. A call is announced when its arguments begin; text that looked like a call until then
//! and is none comes out as text, byte by byte. A refused character is read again in the state to which the
//! refusal led, and that state takes it, so that the work is linear in the text.
//!
//! White space directly before and after markup is dropped, as templates do when they read a turn back.

mod arguments;
mod envelope;
mod format;
mod harmony;
mod header;
mod output;
mod tagged;

use serde_json::Value as Json;

pub use format::{ReplyFormat, ToolFormat};

pub(crate) use header::NAME_LIMIT;

use arguments::Scanner;
use envelope::Envelope;
use format::{Mark, Marks};
use header::Header;
use output::{Output, Voice};
use tagged::Tagged;

/// What a piece of a reply turned out to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReplyEvent {
    /// A piece of the reasoning that precedes an answer.
    Reasoning(String),
    /// A piece of the answer.
    Text(String),
    /// A tool call begins.
    ToolBegin {
        /// The number of calls before it in this reply.
        index: usize,
        /// The tool's name: at most 256 bytes; not necessarily a tool on offer.
        name: String,
        /// The call's own id, in formats that have one.
        id: Option<String>,
    },
    /// A piece of the arguments: the pieces of one call make one JSON object, unless the model wrote it
    /// wrongly or the reply was cut short.
    ToolArguments {
        /// The call's number.
        index: usize,
        /// The next piece of the JSON text.
        fragment: String,
    },
    /// A tool call is over.
    ToolEnd {
        /// The call's number.
        index: usize,
    },
}

/// A tool on offer.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolSpec {
    /// Its name.
    pub name: String,
    /// The JSON schema of its arguments; formats that write values as bare text are read with it.
    pub parameters: Json,
}

/// Turns the text of one reply into events.
#[derive(Clone, Debug)]
pub struct ReplyParser {
    format: ReplyFormat,
    tools: Vec<ToolSpec>,
    /// The end of the text so far that may be the beginning of a marker.
    held: String,
    state: State,
    edge: Edge,
    /// Within the markers of the answer.
    in_answer: bool,
    out: Output,
}

/// Where in the reply the next character stands.
#[derive(Clone, Debug)]
enum State {
    Text,
    Reasoning,
    /// Between a call's beginning and its arguments, where the name stands bare.
    Header(Header),
    /// In arguments that are delimited by markup.
    Arguments(Scanner),
    /// In `{"name": .., "arguments": ..}`.
    Envelope(Envelope),
    /// Between the calls of `[{..}, {..}]`.
    List,
    /// In a call that names each parameter in markup.
    Tagged(Tagged),
    /// In a Harmony message, before its content: the text since its beginning.
    Message(String),
}

/// What stands before the next character, white space aside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Edge {
    /// The beginning, of the reply or of its reasoning.
    Start,
    /// The end of the reasoning.
    Reasoning,
    /// The end of a call.
    Call,
    /// Content.
    Inside,
}

/// The unit in which the text is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Token {
    Char(char),
    Mark(Mark),
}

/// What a state says of a token.
enum Step {
    /// Taken; more of the same.
    Stay,
    /// Taken; the next one is of another state.
    Into(State),
    /// Taken, and the call is complete.
    Done,
    /// Not taken; the state has another part for it.
    Again,
    /// Not taken: the call, if it was one, is over before it.
    Refuse,
}

/// The markers that count at present: up to three of the model's own, and those of the format.
struct Active<'a> {
    own: [Option<(&'a str, Mark)>; 3],
    fixed: [Marks; 2],
}

impl ReplyParser {
    /// A parser for one reply in this format, when these tools are on offer and the prompt ends so.
    ///
    /// Without tools their markup is plain text; reasoning, and Harmony's channels, are read all the same.
    /// The end of the prompt tells whether the template has opened the reasoning already.
    pub fn new(format: &ReplyFormat, tools: &[ToolSpec], prompt_tail: &str) -> Self {
        let mut format = format.clone();
        let whole = |(open, close): &(String, String)| !open.is_empty() && !close.is_empty();
        format.reasoning = format.reasoning.filter(whole);
        format.answer = format.answer.filter(whole);
        let mut parser = ReplyParser {
            format,
            tools: tools.to_vec(),
            held: String::new(),
            state: State::Text,
            edge: Edge::Start,
            in_answer: false,
            out: Output::default(),
        };
        if parser.is_harmony() {
            parser.state = State::Message(String::new());
            // A prompt may go on into the message; what is there already is read, but is no part of the
            // reply.
            let begun = prompt_tail.rsplit_once(harmony::ASSISTANT).map_or("", |(_, begun)| begun);
            let _ = parser.push(begun);
            return parser;
        }
        let tail = prompt_tail.trim_end();
        if let Some((open, close)) = &parser.format.reasoning {
            if tail.ends_with(open.trim_end()) {
                parser.state = State::Reasoning;
                parser.out.drop_blank();
            } else if tail.ends_with(close.trim_end()) {
                parser.edge = Edge::Reasoning;
                parser.out.drop_blank();
            }
        }
        parser
    }

    /// Takes the next piece of the reply.
    pub fn push(&mut self, piece: &str) -> Vec<ReplyEvent> {
        self.held.push_str(piece);
        self.run(false);
        self.out.events()
    }

    /// Ends the reply: what was held back comes out, and a call under way ends where it is.
    pub fn finish(&mut self) -> Vec<ReplyEvent> {
        // The beginning of a marker is no text where little else can stand.
        match &self.state {
            State::Text if self.edge == Edge::Call => self.held.clear(),
            State::Tagged(tagged) if self.out.is_open() && !tagged.in_value() => self.held.clear(),
            _ => {}
        }
        self.run(true);
        match std::mem::replace(&mut self.state, State::Text) {
            State::Text => self.out.keep_blank(Voice::Text),
            State::Reasoning => self.out.keep_blank(Voice::Reasoning),
            State::Message(raw) if harmony::may_be_text(&raw) => self.out.verbatim(&raw),
            State::Message(_) => {}
            State::Tagged(mut tagged) => {
                tagged.cut(&mut self.out);
                self.give_up();
            }
            _ => self.give_up(),
        }
        self.out.events()
    }

    /// Whether the text so far ends inside a call, or what looks like one.
    pub fn in_tool_call(&self) -> bool {
        !matches!(self.state, State::Text | State::Reasoning | State::Message(_))
    }

    /// Whether a call has been announced.
    pub fn saw_tool_call(&self) -> bool {
        self.out.saw_call()
    }

    fn is_harmony(&self) -> bool {
        self.format.tools == ToolFormat::Harmony
    }

    fn reads_calls(&self) -> bool {
        !self.tools.is_empty()
    }

    /// Reads what is held, up to where only more text can tell what it is.
    fn run(&mut self, ended: bool) {
        let mut held = std::mem::take(&mut self.held);
        let mut at = 0;
        while let Some((token, length)) = self.next(&held[at..], ended) {
            let text = &held[at..at + length];
            if self.take(token, text) {
                at += length;
            }
        }
        held.drain(..at);
        self.held = held;
    }

    /// The token at the beginning of this text, and its length; `None` if that is not decided yet, or at the
    /// end.
    fn next(&self, rest: &str, ended: bool) -> Option<(Token, usize)> {
        let first = rest.chars().next()?;
        let active = self.active();
        // The shortest counts, so that the answer does not depend on how much of the text is there.
        let complete = active.marks().filter(|(text, _)| rest.starts_with(text));
        if let Some((text, mark)) = complete.min_by_key(|(text, _)| text.len()) {
            return Some((Token::Mark(mark), text.len()));
        }
        if !ended && active.marks().any(|(text, _)| text.starts_with(rest)) {
            return None;
        }
        Some((Token::Char(first), first.len_utf8()))
    }

    fn active(&self) -> Active<'_> {
        let markup = self.format.tools.markup();
        let fixed = |first, second| Active { own: [None; 3], fixed: [first, second] };
        match &self.state {
            State::Text | State::Reasoning if self.is_harmony() => fixed(markup.outer, &[]),
            State::Text => Active {
                own: {
                    let [open, close] = self.reasoning_marks(
                        self.edge != Edge::Inside,
                        matches!(self.edge, Edge::Start | Edge::Reasoning),
                    );
                    [open, close, self.answer_mark()]
                },
                fixed: match (self.reads_calls(), self.edge) {
                    (true, Edge::Call) => [markup.outer, markup.closing],
                    (true, _) => [markup.outer, &[]],
                    (false, _) => [&[], &[]],
                },
            },
            State::Reasoning => Active {
                own: {
                    let [open, close] = self.reasoning_marks(self.edge == Edge::Start, true);
                    [open, close, None]
                },
                fixed: if self.reads_calls() { [markup.ends_reasoning, &[]] } else { [&[], &[]] },
            },
            State::Header(header) => fixed(header.marks(), markup.outer),
            State::Arguments(scanner) if !scanner.in_string() => fixed(markup.outer, markup.closing),
            State::Envelope(envelope) if envelope.in_values() => fixed(markup.outer, markup.closing),
            State::Tagged(tagged) => fixed(tagged.marks(), &[]),
            State::Message(_) => fixed(harmony::HEADER, &[]),
            State::Arguments(_) | State::Envelope(_) | State::List => fixed(&[], &[]),
        }
    }

    fn reasoning_marks(&self, open: bool, close: bool) -> [Option<(&str, Mark)>; 2] {
        let Some((opens, closes)) = &self.format.reasoning else { return [None, None] };
        [
            open.then_some((opens.as_str(), Mark::ReasoningOpen)),
            close.then_some((closes.as_str(), Mark::ReasoningClose)),
        ]
    }

    /// The marker of the answer that counts in text: it is opened before its first word.
    fn answer_mark(&self) -> Option<(&str, Mark)> {
        let (open, close) = self.format.answer.as_ref()?;
        match self.in_answer {
            true => Some((close.as_str(), Mark::AnswerClose)),
            false => (self.edge != Edge::Inside).then_some((open.as_str(), Mark::AnswerOpen)),
        }
    }

    /// Takes a token, unless its turn comes in another state, which is then the present one.
    fn take(&mut self, token: Token, text: &str) -> bool {
        let (out, tools) = (&mut self.out, self.tools.as_slice());
        let step = match &mut self.state {
            State::Text => return self.take_content(Voice::Text, token, text),
            State::Reasoning => return self.take_content(Voice::Reasoning, token, text),
            State::Message(_) => return self.take_message(token, text),
            State::Header(header) => header.take(token, out),
            State::Arguments(scanner) => scanner.stream(token, out),
            State::Envelope(envelope) => envelope.take(token, out, tools),
            State::List => take_list(token, out),
            State::Tagged(tagged) => tagged.take(token, out, tools),
        };
        match step {
            Step::Stay => self.out.keep(text),
            Step::Into(state) => {
                self.out.keep(text);
                self.state = state;
            }
            Step::Done if matches!(&self.state, State::Envelope(envelope) if envelope.is_listed()) => {
                self.state = State::List;
            }
            Step::Done => self.rest(Edge::Call),
            Step::Again => return false,
            Step::Refuse => {
                self.give_up();
                return false;
            }
        }
        true
    }

    /// A token of text or reasoning.
    fn take_content(&mut self, voice: Voice, token: Token, text: &str) -> bool {
        match token {
            Token::Char('{') if self.opens_object() => {
                self.out.open(text);
                self.state = State::Envelope(Envelope::bare());
            }
            Token::Char(c) => {
                let holds = voice == Voice::Reasoning || self.swallows_blank();
                if self.out.say(voice, c, holds) {
                    self.edge = Edge::Inside;
                }
            }
            Token::Mark(Mark::ReasoningOpen) => {
                self.out.begin_message();
                self.state = State::Reasoning;
                self.edge = Edge::Start;
            }
            Token::Mark(Mark::ReasoningClose) => self.rest(Edge::Reasoning),
            Token::Mark(mark @ (Mark::AnswerOpen | Mark::AnswerClose)) => {
                self.in_answer = mark == Mark::AnswerOpen;
                self.out.drop_blank();
            }
            Token::Mark(Mark::Start | Mark::Channel) if self.is_harmony() => {
                self.rest(Edge::Inside);
                return false;
            }
            Token::Mark(Mark::End) if self.is_harmony() => self.rest(Edge::Inside),
            Token::Mark(_) if voice == Voice::Reasoning => {
                self.rest(Edge::Reasoning);
                return false;
            }
            Token::Mark(mark) => match self.format.tools.call(mark) {
                Some(state) => {
                    self.out.open(text);
                    self.state = state;
                }
                None => self.out.drop_blank(),
            },
        }
        true
    }

    /// Whether an object that begins here may be a call, without any markup.
    fn opens_object(&self) -> bool {
        self.format.tools == ToolFormat::Llama3Json
            && self.reads_calls()
            && self.edge != Edge::Inside
            && matches!(self.state, State::Text)
    }

    /// Whether white space here may be followed by markup that swallows it.
    fn swallows_blank(&self) -> bool {
        let starts = self.edge != Edge::Inside;
        match self.format.tools {
            ToolFormat::Harmony => true,
            ToolFormat::None => self.in_answer || (starts && self.format.reasoning.is_some()),
            ToolFormat::Llama3Json => self.in_answer || starts,
            _ => self.in_answer || self.reads_calls() || (starts && self.format.reasoning.is_some()),
        }
    }

    /// A token of a Harmony message's header.
    fn take_message(&mut self, token: Token, text: &str) -> bool {
        let State::Message(raw) = &mut self.state else { return false };
        match token {
            Token::Mark(Mark::End | Mark::Start) => raw.clear(),
            Token::Mark(Mark::Message) => {
                raw.push_str(text);
                let raw = std::mem::take(raw);
                self.begin_message(&raw);
            }
            _ => {
                raw.push_str(text);
                if !harmony::may_be_header(raw) {
                    raw.truncate(raw.len() - text.len());
                    let raw = std::mem::take(raw);
                    self.out.verbatim(&raw);
                    self.state = State::Text;
                    self.edge = Edge::Inside;
                    return false;
                }
            }
        }
        true
    }

    /// The content of a Harmony message begins, after this header.
    fn begin_message(&mut self, raw: &str) {
        let (channel, recipient) = harmony::read_header(raw);
        self.edge = Edge::Inside;
        let tool = recipient.and_then(|to| {
            let name = to.strip_prefix("functions.");
            name.or_else(|| self.tools.iter().any(|tool| tool.name == to).then_some(to))
        });
        match tool.filter(|name| self.reads_calls() && header::is_name(name)) {
            Some(name) => {
                self.out.open(raw);
                self.state = State::Header(Header::opening(name.to_owned()));
            }
            None if channel == "analysis" => {
                self.out.begin_message();
                self.state = State::Reasoning;
            }
            None => {
                self.out.begin_message();
                if recipient.is_some() {
                    self.out.verbatim(raw);
                }
                self.state = State::Text;
            }
        }
    }

    /// Goes back to where the reply is read from after markup.
    fn rest(&mut self, edge: Edge) {
        self.out.drop_blank();
        self.edge = edge;
        self.state = if self.is_harmony() { State::Message(String::new()) } else { State::Text };
    }

    /// Leaves a call that does not go on: announced, it ends here; if not, it was text.
    fn give_up(&mut self) {
        if self.out.give_up() {
            self.rest(Edge::Call);
        } else {
            self.edge = Edge::Inside;
            self.state = State::Text;
        }
    }
}

impl<'a> Active<'a> {
    fn marks(&self) -> impl Iterator<Item = (&'a str, Mark)> {
        self.own.into_iter().flatten().chain(self.fixed.into_iter().flatten().copied())
    }
}

/// A token between the calls of a list.
fn take_list(token: Token, out: &mut Output) -> Step {
    match token {
        Token::Char(c) if c.is_whitespace() => Step::Stay,
        Token::Char(',') if !out.is_pending() => {
            out.open("");
            Step::Stay
        }
        Token::Char('{') if out.is_pending() => Step::Into(State::Envelope(Envelope::listed())),
        Token::Char(']') if !out.is_pending() => Step::Done,
        _ => Step::Refuse,
    }
}
