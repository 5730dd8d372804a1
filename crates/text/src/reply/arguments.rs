//! One JSON value, followed character by character to its end.
//!
//! Brackets are counted and strings respected, no more: what a model writes goes on to whoever asked for the
//! call, who checks it anyway.

use super::output::Output;
use super::{Step, Token};

/// Where in a JSON object, array or string the next character stands.
#[derive(Clone, Debug, Default)]
pub(super) struct Scanner {
    depth: usize,
    in_string: bool,
    escaped: bool,
}

impl Scanner {
    /// A scanner that has seen the first character: an opening bracket or quote.
    pub(super) fn after(first: char) -> Self {
        let mut scanner = Scanner::default();
        scanner.take(first);
        scanner
    }

    /// Takes a character; whether it is the value's last.
    pub(super) fn take(&mut self, c: char) -> bool {
        if self.in_string {
            if self.escaped {
                self.escaped = false;
            } else if c == '\\' {
                self.escaped = true;
            } else if c == '"' {
                self.in_string = false;
            }
        } else {
            match c {
                '"' => self.in_string = true,
                '{' | '[' => self.depth += 1,
                '}' | ']' => self.depth = self.depth.saturating_sub(1),
                _ => {}
            }
        }
        self.depth == 0 && !self.in_string
    }

    /// Whether the next character is within a string: markup there is the string's.
    pub(super) fn in_string(&self) -> bool {
        self.in_string
    }

    /// Passes on the arguments of an announced call.
    pub(super) fn stream(&mut self, token: Token, out: &mut Output) -> Step {
        let Token::Char(c) = token else { return Step::Refuse };
        out.arguments(c.encode_utf8(&mut [0; 4]));
        if self.take(c) {
            out.end();
            return Step::Done;
        }
        Step::Stay
    }
}
