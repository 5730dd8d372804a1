//! The head of a call whose name stands bare between markers: DeepSeek, Kimi, Mistral, and what of Harmony's
//! is left when its message begins; and of Granite's, which is a list.

use super::arguments::Scanner;
use super::envelope::Envelope;
use super::format::{Mark, Marks};
use super::output::Output;
use super::{State, Step, Token};

/// Bytes that a tool's name may have.
pub(crate) const NAME_LIMIT: usize = 256;

/// Bytes that one part of a head may have: a name, and what Kimi's ids add to it.
const PART_LIMIT: usize = NAME_LIMIT + 64;

const FENCE: &str = "```json";

const SEPARATOR: Marks = &[("<｜tool▁sep｜>", Mark::Separator)];
const ARGUMENTS: Marks = &[("<|tool_call_argument_begin|>", Mark::Arguments)];
const CALL_ID: Marks = &[("[ARGS]", Mark::Arguments)];
const NAME: Marks = &[("[ARGS]", Mark::Arguments), ("[CALL_ID]", Mark::CallId)];

/// Whether this can be the name of a tool where it stands bare.
pub(super) fn is_name(name: &str) -> bool {
    (1..=NAME_LIMIT).contains(&name.len())
        && !name.chars().any(|c| c.is_whitespace() || c.is_control() || "{}<>\"".contains(c))
}

/// The head of a call, part by part.
#[derive(Clone, Debug)]
pub(super) struct Header {
    part: Part,
    /// The text of the present part.
    text: String,
    name: String,
    id: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    /// DeepSeek: `function`, or already the name, up to the separator.
    Kind,
    /// DeepSeek V3: the name, up to the end of its line.
    Line,
    /// Kimi: `functions.NAME:INDEX`, up to the beginning of the arguments.
    Numbered,
    /// Mistral: the name, or a list of calls.
    Name,
    /// Mistral: the call's id.
    CallId,
    /// Granite: before a list of calls, or one.
    List,
    /// Before the opening brace; perhaps a fence.
    Opening,
}

impl Header {
    fn new(part: Part) -> Self {
        Header { part, text: String::new(), name: String::new(), id: None }
    }

    pub(super) fn deepseek() -> Self {
        Header::new(Part::Kind)
    }

    pub(super) fn kimi() -> Self {
        Header::new(Part::Numbered)
    }

    pub(super) fn mistral() -> Self {
        Header::new(Part::Name)
    }

    pub(super) fn granite() -> Self {
        Header::new(Part::List)
    }

    /// A head of which only the opening brace is missing.
    pub(super) fn opening(name: String) -> Self {
        Header { name, ..Header::new(Part::Opening) }
    }

    /// The markers within the head.
    pub(super) fn marks(&self) -> Marks {
        match self.part {
            Part::Kind => SEPARATOR,
            Part::Numbered => ARGUMENTS,
            Part::Name => NAME,
            Part::CallId => CALL_ID,
            Part::Line | Part::List | Part::Opening => &[],
        }
    }

    pub(super) fn take(&mut self, token: Token, out: &mut Output) -> Step {
        let taken = match (self.part, token) {
            (Part::Kind, Token::Mark(Mark::Separator)) if self.text.trim() == "function" => {
                self.go_on(Part::Line);
                true
            }
            (Part::Kind, Token::Mark(Mark::Separator))
            | (Part::Line, Token::Char('\n'))
            | (Part::Name, Token::Mark(Mark::Arguments)) => self.named(),
            (Part::Numbered, Token::Mark(Mark::Arguments)) => self.numbered(),
            (Part::Name, Token::Mark(Mark::CallId)) => {
                let named = self.named();
                self.go_on(Part::CallId);
                named
            }
            (Part::Name, Token::Char('[')) if self.text.trim().is_empty() => return Step::Into(State::List),
            (Part::List, Token::Char('[')) => return Step::Into(State::List),
            (Part::List, Token::Char('{')) => return Step::Into(State::Envelope(Envelope::opened())),
            (Part::List, Token::Char(c)) => c.is_whitespace(),
            (Part::Name, Token::Char('{')) => {
                return if self.named() { self.begin(out) } else { Step::Refuse };
            }
            (Part::CallId, Token::Mark(Mark::Arguments)) => {
                let id = std::mem::take(&mut self.text).trim().to_owned();
                self.id = Some(id).filter(|id| is_name(id));
                self.go_on(Part::Opening);
                true
            }
            (Part::Opening, Token::Char('{')) => return self.begin(out),
            (Part::Opening, Token::Char(c)) => {
                if !c.is_whitespace() {
                    self.text.push(c);
                }
                FENCE.starts_with(&self.text)
            }
            // Arguments that are left out are none.
            (Part::Opening, Token::Mark(Mark::CallEnd | Mark::End)) => {
                out.whole(std::mem::take(&mut self.name), self.id.take(), "{}");
                return Step::Done;
            }
            (_, Token::Char(c)) => {
                self.text.push(c);
                self.text.len() <= PART_LIMIT
            }
            (_, Token::Mark(_)) => false,
        };
        if taken { Step::Stay } else { Step::Refuse }
    }

    fn go_on(&mut self, part: Part) {
        self.text.clear();
        self.part = part;
    }

    /// The text is the name; whether it can be.
    fn named(&mut self) -> bool {
        self.name = self.text.trim().to_owned();
        self.go_on(Part::Opening);
        is_name(&self.name)
    }

    /// The text is the name and the call's number; whether it can be.
    fn numbered(&mut self) -> bool {
        let id = self.text.trim().to_owned();
        let name = id.strip_prefix("functions.").unwrap_or(&id);
        let name = name.rsplit_once(':').map_or(name, |(name, _)| name).to_owned();
        self.name = name;
        self.id = Some(id);
        self.go_on(Part::Opening);
        is_name(&self.name)
    }

    fn begin(&mut self, out: &mut Output) -> Step {
        out.begin(std::mem::take(&mut self.name), self.id.take());
        out.arguments("{");
        Step::Into(State::Arguments(Scanner::after('{')))
    }
}
