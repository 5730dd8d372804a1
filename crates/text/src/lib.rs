//! Text on both sides of the engine: tokens, chat templates, stop strings.
//!
//! This room turns a conversation into token ids and token ids into text that may be shown at once. It knows
//! tokenizers, templates and their files; it knows nothing of the model that reads the ids, of HTTP or of
//! terminals, and it neither prints nor exits.
//!
//! ```text
//! messages ──► ChatTemplate ──► text ──► Tokenizer::encode ──► ids ──► (engine)
//! (engine) ──► ids, one by one ──► Detokeniser ──► text ──► StopMatcher ──► what the reader sees
//! ```
//!
//! - [`Tokenizer`]: ids of a text and text of ids, after Hugging Face's `tokenizer.json`.
//! - [`Detokeniser`]: the same text piece by piece; a piece never ends inside a character.
//! - [`StopMatcher`]: cuts a stream at a stop string, wherever the pieces break.
//! - [`ChatTemplate`]: Jinja2 as `transformers` renders it.
//! - [`Dialogue`]: a finished conversation as tokens, and which of them are answers.
//! - [`Constraint`]: which tokens may come next so that an answer is JSON, follows a schema or is a call.
//! - [`ReplyParser`]: reasoning, text and tool calls out of the stream.
//! - [`ModelText`]: all of the above from a model directory's side files.

#![forbid(unsafe_code)]

mod constrain;
mod decoding;
mod detokeniser;
mod dialogue;
mod error;
mod generation;
mod model_text;
mod python;
mod reply;
mod stop;
mod template;
mod tokenizer;

pub use constrain::{CallShape, Constraint, GrammarLimits, GrammarVocabulary, ParameterTags, Shape};
pub use detokeniser::Detokeniser;
pub use dialogue::Dialogue;
pub use error::TextError;
pub use model_text::{GenerationDefaults, ModelText};
pub use reply::{ReplyEvent, ReplyFormat, ReplyParser, ToolFormat, ToolSpec};
pub use stop::{StopMatcher, StopStep};
pub use template::{ChatTemplate, TemplateInput};
pub use tokenizer::Tokenizer;
