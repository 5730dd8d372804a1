//! What can go wrong with text: a file that is not what it should be, a template that refuses or misbehaves.

/// The error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TextError {
    /// The tokenizer's definition cannot be used.
    #[error("the tokenizer cannot be loaded: {reason}")]
    Tokenizer {
        /// What the tokenizer library says.
        reason: String,
    },
    /// A text cannot be turned into tokens.
    #[error("the text ({bytes} bytes) cannot be tokenised: {reason}")]
    Encode {
        /// Length of the text.
        bytes: usize,
        /// What the tokenizer library says.
        reason: String,
    },
    /// A chat template is not Jinja2 as it is understood here.
    #[error("chat template, line {line}: {reason}")]
    TemplateSyntax {
        /// Line in the template, from 1; 0 where it is not known.
        line: usize,
        /// What the parser says.
        reason: String,
    },
    /// A chat template refused its input by `raise_exception`: the fault is the conversation's.
    #[error("the chat template refuses this conversation: {message}")]
    TemplateRaised {
        /// The template's own words.
        message: String,
    },
    /// A chat template failed while it was rendered (a missing attribute, a wrong type, too deep a recursion).
    #[error("chat template, line {line}: {reason}")]
    TemplateFailed {
        /// Line in the template, from 1; 0 where it is not known.
        line: usize,
        /// What the renderer says.
        reason: String,
    },
    /// A chat template was stopped because it did more work than any honest template would.
    #[error("the chat template used up its budget of {fuel} steps; it probably loops without end")]
    TemplateExhausted {
        /// The budget, in instructions or 64-byte portions of text.
        fuel: u64,
    },
    /// The input of a template has a field of the wrong type.
    #[error("template input: `{field}` must be {expected}")]
    TemplateInput {
        /// Name of the field.
        field: &'static str,
        /// What it must be.
        expected: &'static str,
    },
    /// A text file is not UTF-8.
    #[error("{file} is not UTF-8 text")]
    NotUtf8 {
        /// Name of the file in the model directory.
        file: String,
    },
    /// A file is not JSON.
    #[error("{file} is not valid JSON: {source}")]
    Json {
        /// Name of the file in the model directory.
        file: String,
        /// Where and why.
        source: serde_json::Error,
    },
    /// A JSON file holds a field of the wrong type.
    #[error("{file}: `{field}` must be {expected}")]
    Field {
        /// Name of the file in the model directory.
        file: String,
        /// Path of the field in the file.
        field: String,
        /// What it must be.
        expected: &'static str,
    },
    /// A file of a model directory is well-formed but cannot be used.
    #[error("{file}: {source}")]
    File {
        /// Name of the file in the model directory.
        file: String,
        /// Why.
        source: Box<TextError>,
    },
    /// A model directory lacks what is needed.
    #[error("the model has no {what}")]
    Absent {
        /// What.
        what: &'static str,
    },
    /// An answer of a conversation does not stand where the prompt for it ends.
    #[error(
        "message {message}: the chat template retells what stands before it otherwise than it asks for it"
    )]
    Answer {
        /// Its place in the conversation, from 1.
        message: usize,
    },
    /// A tokenizer's tokens cannot serve a grammar.
    #[error("answers of this model cannot be constrained: {reason}")]
    Vocabulary {
        /// Why.
        reason: String,
    },
    /// A schema, regular expression or grammar cannot be enforced: it is wrong, too large, asks for what is not
    /// supported, or nothing satisfies it.
    #[error("the answer's form cannot be enforced: {reason}")]
    Schema {
        /// What, and where in the schema if that is known.
        reason: String,
    },
    /// A constraint cannot go on: a token was forced on it that it refuses, or a step became too complex.
    #[error("the answer's form could not be kept to: {reason}")]
    Constraint {
        /// Why.
        reason: String,
    },
}
