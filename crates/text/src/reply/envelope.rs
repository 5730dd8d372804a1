//! A call that is one JSON object: `{"name": "..", "arguments": {..}}`.
//!
//! The arguments pass through as the model writes them, from the moment when the name is known; before that
//! they wait. `parameters` is another word for them, arguments written as a string are taken out of it, and
//! members of other names are skipped.

use super::arguments::Scanner;
use super::header::NAME_LIMIT;
use super::output::Output;
use super::{Step, Token, ToolSpec};

/// Bytes that the JSON text of a member's name, of the tool's name or of the call's id may have: every byte
/// escaped.
const WORD_LIMIT: usize = 6 * NAME_LIMIT + 2;

/// A call, as far as it is read.
#[derive(Clone, Debug)]
pub(super) struct Envelope {
    frame: Frame,
    spot: Spot,
    /// The JSON text of the word that is being read.
    word: String,
    escaped: bool,
    name: Option<String>,
    id: Option<String>,
    /// Arguments, as far as they are read, that wait for the name.
    waiting: Option<String>,
    /// Arguments have begun.
    argued: bool,
}

/// What stands around the object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Frame {
    /// Markers.
    Marked,
    /// A list of calls.
    Listed,
    /// Nothing: it might be any JSON, and is a call only if it has the members of one and the tool is on
    /// offer.
    Bare,
}

/// Where in the object the next character stands.
#[derive(Clone, Debug)]
enum Spot {
    Before,
    /// Before the first member, or the end.
    First,
    /// Before a further member.
    Key,
    InKey,
    Colon(Member),
    Value(Member),
    InString(Member),
    /// In a number, `true`, `false` or `null`.
    InWord(Member),
    Skip(Scanner),
    Arguments(Scanner),
    /// After a value.
    Comma,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Member {
    Name,
    Id,
    Arguments,
    Other,
}

/// What a character led to.
enum Turn {
    Go(Spot),
    /// The same character, there.
    Again(Spot),
    Complete,
    Wrong,
}

impl Envelope {
    fn new(frame: Frame, spot: Spot) -> Self {
        let (word, escaped, name, id) = (String::new(), false, None, None);
        Envelope { frame, spot, word, escaped, name, id, waiting: None, argued: false }
    }

    /// After the marker of a call.
    pub(super) fn marked() -> Self {
        Envelope::new(Frame::Marked, Spot::Before)
    }

    /// After the marker of a call and the opening brace.
    pub(super) fn opened() -> Self {
        Envelope::new(Frame::Marked, Spot::First)
    }

    /// In a list of calls, after the opening brace.
    pub(super) fn listed() -> Self {
        Envelope::new(Frame::Listed, Spot::First)
    }

    /// After an opening brace that no marker announced.
    pub(super) fn bare() -> Self {
        Envelope::new(Frame::Bare, Spot::First)
    }

    /// After a marker that does not say that a call follows.
    pub(super) fn perhaps() -> Self {
        Envelope::new(Frame::Bare, Spot::Before)
    }

    pub(super) fn is_listed(&self) -> bool {
        self.frame == Frame::Listed
    }

    /// Whether the next character is within the arguments, or another value, and not in a string.
    pub(super) fn in_values(&self) -> bool {
        matches!(&self.spot, Spot::Arguments(scanner) | Spot::Skip(scanner) if !scanner.in_string())
    }

    pub(super) fn take(&mut self, token: Token, out: &mut Output, tools: &[ToolSpec]) -> Step {
        let Token::Char(c) = token else { return Step::Refuse };
        loop {
            let spot = std::mem::replace(&mut self.spot, Spot::Comma);
            match self.turn(spot, c, out, tools) {
                Turn::Go(spot) => {
                    self.spot = spot;
                    return Step::Stay;
                }
                Turn::Again(spot) => self.spot = spot,
                Turn::Complete => return Step::Done,
                Turn::Wrong => return Step::Refuse,
            }
        }
    }

    fn turn(&mut self, spot: Spot, c: char, out: &mut Output, tools: &[ToolSpec]) -> Turn {
        let blank = matches!(c, ' ' | '\t' | '\n' | '\r');
        match (spot, c) {
            (Spot::InKey, _) => match self.take_word(c) {
                None => Turn::Wrong,
                Some(false) => Turn::Go(Spot::InKey),
                Some(true) => self.member().map_or(Turn::Wrong, |member| Turn::Go(Spot::Colon(member))),
            },
            (Spot::InString(member), _) => {
                // Arguments may be of any length.
                let taken =
                    if member == Member::Arguments { Some(self.extend(c)) } else { self.take_word(c) };
                match taken {
                    None => Turn::Wrong,
                    Some(false) => Turn::Go(Spot::InString(member)),
                    Some(true) => self.string(member, out, tools),
                }
            }
            (Spot::InWord(member), _) if blank || matches!(c, ',' | '}') => {
                let word = std::mem::take(&mut self.word);
                match member {
                    Member::Arguments if word == "null" => self.whole("{}".to_owned(), out),
                    Member::Arguments => return Turn::Wrong,
                    _ => {}
                }
                Turn::Again(Spot::Comma)
            }
            (Spot::InWord(member), _) => {
                self.word.push(c);
                if self.word.len() > WORD_LIMIT { Turn::Wrong } else { Turn::Go(Spot::InWord(member)) }
            }
            (Spot::Skip(mut scanner), _) => {
                Turn::Go(if scanner.take(c) { Spot::Comma } else { Spot::Skip(scanner) })
            }
            (Spot::Arguments(mut scanner), _) => {
                let complete = scanner.take(c);
                match &mut self.waiting {
                    Some(waiting) => waiting.push(c),
                    None => out.arguments(c.encode_utf8(&mut [0; 4])),
                }
                if complete && out.is_open() {
                    out.end();
                }
                Turn::Go(if complete { Spot::Comma } else { Spot::Arguments(scanner) })
            }
            (spot, _) if blank => Turn::Go(spot),
            (Spot::Before, '{') => Turn::Go(Spot::First),
            (Spot::First | Spot::Key, '"') => {
                self.word.push(c);
                Turn::Go(Spot::InKey)
            }
            (Spot::Colon(member), ':') => Turn::Go(Spot::Value(member)),
            (Spot::Value(member), _) => self.value(member, c, out),
            (Spot::Comma, ',') => Turn::Go(Spot::Key),
            (Spot::First | Spot::Comma, '}') => self.close(out),
            _ => Turn::Wrong,
        }
    }

    /// A character of a string; whether it is the last.
    fn extend(&mut self, c: char) -> bool {
        self.word.push(c);
        let ends = c == '"' && !self.escaped;
        self.escaped = c == '\\' && !self.escaped;
        ends
    }

    /// The same of a word, which is short; `None` if it is not.
    fn take_word(&mut self, c: char) -> Option<bool> {
        let ends = self.extend(c);
        (self.word.len() <= WORD_LIMIT).then_some(ends)
    }

    /// The string that has been read.
    fn unquote(&mut self) -> Option<String> {
        serde_json::from_str(&std::mem::take(&mut self.word)).ok()
    }

    /// The member that the key names; `None` if a call cannot have it.
    fn member(&mut self) -> Option<Member> {
        Some(match self.unquote()?.as_str() {
            "name" if self.name.is_none() => Member::Name,
            "id" if self.id.is_none() => Member::Id,
            "arguments" | "parameters" if !self.argued => Member::Arguments,
            "type" => Member::Other,
            _ if self.frame == Frame::Bare => return None,
            _ => Member::Other,
        })
    }

    /// A value begins.
    fn value(&mut self, member: Member, c: char, out: &mut Output) -> Turn {
        self.argued |= member == Member::Arguments;
        match (member, c) {
            (Member::Arguments, '{') => {
                match self.name.clone() {
                    Some(name) => {
                        out.begin(name, self.id.take());
                        out.arguments("{");
                    }
                    None => self.waiting = Some("{".to_owned()),
                }
                Turn::Go(Spot::Arguments(Scanner::after(c)))
            }
            (Member::Name | Member::Id | Member::Arguments, '"') => {
                self.word.push(c);
                Turn::Go(Spot::InString(member))
            }
            (Member::Name, _) | (Member::Arguments, '[') => Turn::Wrong,
            (_, '"' | '{' | '[') => Turn::Go(Spot::Skip(Scanner::after(c))),
            (_, 'a'..='z' | '0'..='9' | '-') => {
                self.word.push(c);
                Turn::Go(Spot::InWord(member))
            }
            _ => Turn::Wrong,
        }
    }

    /// The string of a member is complete.
    fn string(&mut self, member: Member, out: &mut Output, tools: &[ToolSpec]) -> Turn {
        let Some(text) = self.unquote() else { return Turn::Wrong };
        match member {
            Member::Name => {
                let offered = self.frame != Frame::Bare || tools.iter().any(|tool| tool.name == text);
                if !(1..=NAME_LIMIT).contains(&text.len()) || !offered {
                    return Turn::Wrong;
                }
                self.name = Some(text);
                if let Some(arguments) = self.waiting.take() {
                    self.whole(arguments, out);
                }
            }
            Member::Id => self.id = Some(text),
            Member::Arguments => match text.trim() {
                "" => self.whole("{}".to_owned(), out),
                object if object.starts_with('{') => self.whole(object.to_owned(), out),
                _ => return Turn::Wrong,
            },
            Member::Other => {}
        }
        Turn::Go(Spot::Comma)
    }

    /// The arguments are complete; the call too, if its name is known.
    fn whole(&mut self, arguments: String, out: &mut Output) {
        match self.name.clone() {
            Some(name) => out.whole(name, self.id.take(), &arguments),
            None => self.waiting = Some(arguments),
        }
    }

    /// The object ends. Where markup says that it is a call, arguments may be left out.
    fn close(&mut self, out: &mut Output) -> Turn {
        if out.is_pending() {
            match self.name.clone() {
                Some(name) if self.frame != Frame::Bare => out.whole(name, self.id.take(), "{}"),
                _ => return Turn::Wrong,
            }
        }
        Turn::Complete
    }
}
