//! Answers of a given form: which tokens may come next so that the text stays JSON, follows a schema, matches a
//! regular expression or is a call of a function.
//!
//! ```text
//! Tokenizer ──► GrammarVocabulary (once per model)
//!                     │
//! Shape ──────────► Constraint ──► mask ──► (sampler) ──► token ──► accept ──► mask ...
//! ```
//!
//! The grammars are compiled and followed by `llguidance`; what this module adds is the tokens' bytes as the
//! detokeniser gives them, and borders: nothing in a schema is passed over in silence, and no schema, however
//! hostile, costs more than a bounded time and memory.

mod grammar;
mod schema;
mod tagged;
mod values;
mod vocabulary;

use std::fmt;

use llguidance::Matcher;
use llguidance::toktrie::SimpleVob;
use serde_json::Value as Json;

pub use vocabulary::GrammarVocabulary;

pub(crate) use schema::target;
pub(crate) use values::{ALTERNATIVES, DEPTH};

use crate::error::TextError;

/// Stack of the thread that compiles a grammar: the compiler recurses over a schema's references and properties,
/// and what [`GrammarLimits`] lets through by default needs less than half of this. Untouched pages cost nothing.
const COMPILER_STACK: usize = 64 << 20;

/// The form that an answer must have.
#[derive(Clone, Debug, PartialEq)]
pub enum Shape {
    /// Any JSON object.
    JsonObject,
    /// JSON that satisfies a schema (draft 2020-12, and what older drafts have in common with it).
    JsonSchema(Json),
    /// Text that a regular expression matches as a whole.
    Regex(String),
    /// Text of a grammar in `llguidance`'s variant of Lark, without its `%json`.
    Lark(String),
    /// Exactly one of some calls.
    Calls(Vec<CallShape>),
}

/// A call as a model writes it: fixed text around its arguments. Special tokens in the fixed text stand for
/// themselves.
#[derive(Clone, Debug, PartialEq)]
pub struct CallShape {
    /// What stands before the arguments, the function's name within it.
    pub prefix: String,
    /// Schema of the arguments.
    pub schema: Json,
    /// What stands behind the arguments.
    pub suffix: String,
    /// How each parameter is marked; `None` if the arguments are one JSON object.
    pub tags: Option<ParameterTags>,
}

/// How a model marks the parameters of a call, each by itself: a value that may be any string is bare text, every other
/// one JSON.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParameterTags {
    /// What stands before a parameter's name.
    pub before_key: &'static str,
    /// What stands between the name and a value that is a string.
    pub after_key: &'static str,
    /// The same before any other value; where it differs, the model says so what the value is.
    pub after_json_key: &'static str,
    /// What stands behind a value.
    pub after_value: &'static str,
    /// What no bare text may have in it, because the value would end there.
    pub never: Vec<&'static str>,
    /// New lines in the fixed texts may be left out.
    pub lines_optional: bool,
}

/// What a shape may be at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GrammarLimits {
    /// Bytes of a schema, a regular expression or a grammar; of all calls' schemas together, and of their fixed
    /// texts.
    pub bytes: usize,
    /// Nesting of a schema's JSON.
    pub depth: usize,
    /// JSON values in a schema: a subschema, an `enum` value, a keyword's number are one each.
    pub values: usize,
}

impl Default for GrammarLimits {
    fn default() -> Self {
        GrammarLimits { bytes: 256 << 10, depth: 64, values: 10_000 }
    }
}

/// The state of an answer that must have a form.
pub struct Constraint {
    vocabulary: GrammarVocabulary,
    matcher: Matcher,
    mask: SimpleVob,
    /// Whether `mask` is that of the present state.
    fresh: bool,
}

impl fmt::Debug for Constraint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Constraint").field("complete", &self.is_complete()).finish_non_exhaustive()
    }
}

impl Constraint {
    /// Compiles a shape and computes its first mask, so that what cannot be enforced is known before an answer
    /// begins.
    ///
    /// # Errors
    /// [`TextError::Schema`].
    pub fn new(
        vocabulary: &GrammarVocabulary,
        shape: &Shape,
        limits: &GrammarLimits,
    ) -> Result<Self, TextError> {
        let compile = || {
            let grammar = grammar::of(vocabulary, shape, limits)?;
            let parser = vocabulary.factory().create_parser(grammar).map_err(|error| says(&error))?;
            let mut matcher = Matcher::new(Ok(parser));
            let mask = matcher.compute_mask_or_eos().map_err(|error| says(&error))?;
            Ok((matcher, mask))
        };
        let compiled: Result<(Matcher, SimpleVob), String> = std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().stack_size(COMPILER_STACK);
            let thread = thread.spawn_scoped(scope, compile).map_err(|error| error.to_string())?;
            thread.join().unwrap_or_else(|_| Err("the grammar's compiler failed".to_owned()))
        });
        let (matcher, mask) = compiled.map_err(|reason| TextError::Schema { reason })?;
        Ok(Constraint { vocabulary: vocabulary.clone(), matcher, mask, fresh: true })
    }

    /// The tokens that may come next: token `id` is bit `id % 32` of word `id / 32`. End tokens are among them where
    /// the text may end, and alone where it must.
    ///
    /// # Errors
    /// [`TextError::Constraint`] if the step is too complex for the limits, or nothing may follow.
    pub fn mask(&mut self) -> Result<&[u32], TextError> {
        if !self.fresh {
            self.mask = self.matcher.compute_mask_or_eos().map_err(broken)?;
            self.fresh = true;
        }
        Ok(&self.mask.as_slice()[..self.vocabulary.vocab_size().div_ceil(32)])
    }

    /// Takes the token that was chosen. A token that is refused changes nothing.
    ///
    /// # Errors
    /// [`TextError::Constraint`] if the token may not come here.
    pub fn accept(&mut self, token: u32) -> Result<(), TextError> {
        if !self.allows(token)? {
            let reason = format!("token {token} may not come here");
            return Err(TextError::Constraint { reason });
        }
        if self.matcher.is_stopped() {
            return Ok(());
        }
        self.fresh = false;
        self.matcher.consume_token(token).map_err(broken)
    }

    fn allows(&mut self, token: u32) -> Result<bool, TextError> {
        if token as usize >= self.vocabulary.vocab_size() {
            return Ok(false);
        }
        if self.fresh {
            return Ok(self.mask.is_allowed(token));
        }
        if self.matcher.is_stopped() {
            return Ok(self.is_complete() && self.vocabulary.is_end(token));
        }
        Ok(self.matcher.validate_tokens(&[token]).map_err(broken)? == 1)
    }

    /// Whether the text is complete and nothing but its end may follow.
    pub fn is_complete(&self) -> bool {
        self.matcher.is_stopped() && self.matcher.stop_reason().is_ok()
    }

    /// The tokens that must follow whatever the model thinks, as its tokenizer would write them: a step of the
    /// model may take them all at once. They are still to be accepted one by one. None where the next token is
    /// free, where the text is complete, or where the tokenizer's way of writing a part of a text is not known
    /// (those that are not byte-level).
    pub fn forced(&mut self) -> Vec<u32> {
        if self.matcher.is_stopped() { Vec::new() } else { self.matcher.compute_ff_tokens() }
    }
}

fn broken(error: impl fmt::Display) -> TextError {
    TextError::Constraint { reason: says(&error) }
}

/// The library's words without the sources, states and backtraces that it appends.
fn says(error: &impl fmt::Display) -> String {
    const LONGEST: usize = 600;
    let text = format!("{error:#}");
    if text.contains("coerce_one_of") {
        return "`oneOf` is only supported where its branches cannot overlap; `anyOf` is supported"
            .to_owned();
    }
    if text.starts_with("panic: ") {
        return "the compiler of grammars failed on it".to_owned();
    }
    // Where a call's schema is compiled within our own grammar, its place there says nothing to anybody.
    let text = text.rsplit("failed to compile JSON schema: ").next().unwrap_or_default();
    let appended =
        |line: &&str| line.starts_with('<') || line.trim_start().split_once(" | ").is_some_and(is_number);
    let lines: Vec<&str> = text.lines().take_while(|line| !appended(line)).collect();
    let text = lines.join("\n");
    if text == "NoExtensionBias" {
        return "no text that the tokens can spell satisfies it".to_owned();
    }
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{} ...", &text[..end]),
        None => text,
    }
}

/// Whether a line begins with a number, as those of a source do.
fn is_number((before, _): (&str, &str)) -> bool {
    before.bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constraints_and_vocabularies_go_between_threads() {
        fn sent<T: Send>() {}
        fn shared<T: Send + Sync>() {}
        sent::<Constraint>();
        shared::<GrammarVocabulary>();
    }

    #[test]
    fn errors_are_short_and_without_the_librarys_state() {
        assert_eq!(says(&"wrong\n<state>\nTokens: ..."), "wrong");
        assert!(!says(&"panic: x\n<backtrace>\n1: ...").contains("panic"));
        assert_eq!(says(&"at 2(3): unknown name\n   1 | start: x\n   2 | y: z"), "at 2(3): unknown name");
        assert_eq!(says(&"at 2(9): failed to compile JSON schema: too large\n   1 | start: x"), "too large");
        assert!(says(&"é".repeat(5_000)).len() < 1_300);
    }
}
