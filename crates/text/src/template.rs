//! Chat templates: from a conversation to the text that the model reads.
//!
//! A template is Jinja2, rendered as `transformers` does in `apply_chat_template`: blocks trimmed, loop controls,
//! `{% generation %}`, `raise_exception`, `strftime_now`, Python's `json.dumps` as `tojson`, and Python's manners
//! elsewhere ([`crate::python`]). `tests/goldens.rs` holds it to that renderer's output byte by byte.
//!
//! A template comes with a model and is not to be trusted further than the model: it sees its input and nothing
//! else, has a budget of steps that bounds time and memory, and a bounded depth of recursion. Holes are left, all inside
//! minijinja: slices of strings are free, so that a template can copy a text of some hundred megabytes at each of its
//! steps and take minutes; and two ways to overflow the stack and end the process, a namespace that holds itself,
//! joined to a text by `~`, and a list nested some hundred thousand deep by a loop, when it is dropped.
//!
//! Known differences, each the renderer's own and pinned in `tests/jinja.rs` where it can be: iterating or slicing
//! `None` gives nothing where Python fails; an attribute that names a method without calling it (`x.items`) is
//! looked up as a key; `%` does not format strings; joined by `~`, floats below 1e-4 or from 1e16 print without an
//! exponent; a string marked `safe` does not escape what is added to it; a macro knows no `varargs`, and its defaults
//! do not see its other parameters.

use jiff::civil::DateTime;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Value;
use minijinja::{Environment, Error, ErrorKind, UndefinedBehavior};
use serde_json::{Map, Value as Json};

use crate::error::TextError;
use crate::generation;
use crate::python;

/// Steps that any template may take: an instruction, or 64 bytes of text made. A loop without end is stopped within
/// a second, a text that doubles itself at half a gigabyte.
const FUEL: u64 = 8_000_000;

/// Further steps for each byte of input, so that a long text is not mistaken for a loop.
const FUEL_PER_BYTE: u64 = 4;

/// Further steps for each pair of messages: many a template looks from every message at all others. Of 65 published
/// ones the hungriest took 15 a pair on conversations of 200 to 3200 messages.
const FUEL_PER_PAIR: u64 = 20;

/// A call of a macro costs 4, a block or a loop 1. The published templates of `tests/goldens.rs` need 30 at most. At
/// this limit a render needs less than 256 KiB of stack, and less than 1 MiB in a debug build (`tests/template.rs`).
const RECURSION_LIMIT: usize = 200;

/// Name of the template in its environment.
const NAME: &str = "chat";

/// Name of the template for conversations with tools.
const TOOL_USE: &str = "tool_use";

/// A compiled chat template.
#[derive(Clone, Debug)]
pub struct ChatTemplate {
    env: Environment<'static>,
    source: String,
}

/// What a template may see.
#[derive(Clone, Debug, Default)]
pub struct TemplateInput {
    /// The conversation: an array of objects with at least `role`.
    pub messages: Json,
    /// The tools on offer, as an array of OpenAI's function schemas; `None` where there are none.
    pub tools: Option<Json>,
    /// Whether to end with the opening of the assistant's turn.
    pub add_generation_prompt: bool,
    /// The model's token that begins a text; undefined in the template where it has none.
    pub bos_token: Option<String>,
    /// The model's token that ends a text; undefined in the template where it has none.
    pub eos_token: Option<String>,
    /// Further variables (`enable_thinking`, `reasoning_effort`, `documents` ...). The above win over one of the same
    /// name; a special token only where the model has it.
    pub extra: Map<String, Json>,
    /// The time that `strftime_now` formats; `None` is the clock's.
    pub now: Option<DateTime>,
}

impl TemplateInput {
    /// Reads an input from an object with the keys `messages`, `tools`, `add_generation_prompt`, `bos_token`,
    /// `eos_token` and `strftime_now` (`"YYYY-MM-DD HH:MM:SS"`), each of which may be absent or null; every other
    /// key is a further variable.
    pub fn from_json(value: &Json) -> Result<Self, TextError> {
        let wrong = |field, expected| TextError::TemplateInput { field, expected };
        let Json::Object(object) = value else {
            return Err(wrong("input", "an object"));
        };
        let mut input = TemplateInput { messages: Json::Array(Vec::new()), ..Self::default() };
        for (key, value) in object {
            match (key.as_str(), value) {
                (
                    "messages"
                    | "tools"
                    | "add_generation_prompt"
                    | "bos_token"
                    | "eos_token"
                    | "strftime_now",
                    Json::Null,
                ) => {}
                ("messages", Json::Array(_)) => input.messages = value.clone(),
                ("messages", _) => return Err(wrong("messages", "an array")),
                ("tools", Json::Array(_)) => input.tools = Some(value.clone()),
                ("tools", _) => return Err(wrong("tools", "an array or null")),
                ("add_generation_prompt", Json::Bool(yes)) => input.add_generation_prompt = *yes,
                ("add_generation_prompt", _) => return Err(wrong("add_generation_prompt", "true or false")),
                ("bos_token", Json::String(token)) => input.bos_token = Some(token.clone()),
                ("bos_token", _) => return Err(wrong("bos_token", "a string or null")),
                ("eos_token", Json::String(token)) => input.eos_token = Some(token.clone()),
                ("eos_token", _) => return Err(wrong("eos_token", "a string or null")),
                ("strftime_now", Json::String(time)) => {
                    let time = time.parse().map_err(|_| wrong("strftime_now", "YYYY-MM-DD HH:MM:SS"))?;
                    input.now = Some(time);
                }
                ("strftime_now", _) => return Err(wrong("strftime_now", "a string or null")),
                _ => {
                    input.extra.insert(key.clone(), value.clone());
                }
            }
        }
        Ok(input)
    }

    /// The variables of the template, as `transformers` names them: `tools` and `documents` are always defined,
    /// the special tokens only where the model has them.
    fn variables(&self) -> Value {
        let mut variables: Vec<(&str, Value)> =
            vec![("documents", Value::from(())), ("strftime_now", python::strftime_now(self.now))];
        variables.extend(self.extra.iter().map(|(name, value)| (name.as_str(), python::value(value))));
        let tokens = [("bos_token", &self.bos_token), ("eos_token", &self.eos_token)];
        variables.extend(
            tokens
                .into_iter()
                .filter_map(|(name, token)| token.as_ref().map(|token| (name, Value::from(token.as_str())))),
        );
        variables.push(("messages", python::value(&self.messages)));
        variables.push(("tools", self.tools.as_ref().map_or(Value::from(()), python::value)));
        variables.push(("add_generation_prompt", Value::from(self.add_generation_prompt)));
        Value::from_pairs(variables)
    }

    /// How many steps a template may take over this input.
    fn budget(&self) -> u64 {
        let extra: usize = self.extra.values().map(size).sum();
        let bytes = size(&self.messages) + self.tools.as_ref().map_or(0, size) + extra;
        let messages = self.messages.as_array().map_or(0, Vec::len) as u64;
        FUEL + FUEL_PER_BYTE * bytes as u64 + FUEL_PER_PAIR * messages.pow(2)
    }

    fn offers_tools(&self) -> bool {
        matches!(&self.tools, Some(Json::Array(tools)) if !tools.is_empty())
    }
}

/// Roughly how many bytes a value holds.
fn size(value: &Json) -> usize {
    // 16 bytes stand for what a value costs besides its text.
    16 + match value {
        Json::String(text) => text.len(),
        Json::Array(items) => items.iter().map(size).sum(),
        Json::Object(fields) => fields.iter().map(|(name, value)| name.len() + size(value)).sum(),
        _ => 0,
    }
}

impl ChatTemplate {
    /// Compiles a template.
    ///
    /// # Errors
    /// [`TextError::TemplateSyntax`] if it is not Jinja2.
    pub fn compile(source: &str) -> Result<Self, TextError> {
        let mut env = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        env.set_syntax(syntax.map_err(syntax_error)?);
        env.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        env.set_undefined_behavior(UndefinedBehavior::Lenient);
        env.set_recursion_limit(RECURSION_LIMIT);
        env.set_debug(false);
        python::install(&mut env);
        let mut template = ChatTemplate { env, source: String::new() };
        template.add(NAME, source)?;
        Ok(template)
    }

    /// Adds the template that takes over when a conversation offers tools; some models have two.
    ///
    /// # Errors
    /// [`TextError::TemplateSyntax`] if it is not Jinja2.
    pub fn with_tool_use(mut self, source: &str) -> Result<Self, TextError> {
        self.add(TOOL_USE, source)?;
        Ok(self)
    }

    /// The templates as they were written, one after the other: how a model marks reasoning and calls stands there.
    pub fn source(&self) -> &str {
        &self.source
    }

    fn add(&mut self, name: &'static str, source: &str) -> Result<(), TextError> {
        self.source.push_str(source);
        // Jinja2 reads every kind of line break as a line feed.
        let source = source.replace("\r\n", "\n").replace('\r', "\n");
        let source = generation::without_generation_tags(&source).into_owned();
        self.env.add_template_owned(name, source).map_err(syntax_error)
    }

    /// Renders a conversation.
    ///
    /// # Errors
    /// [`TextError::TemplateRaised`] if the template refuses the conversation, [`TextError::TemplateFailed`] if it
    /// fails over it, [`TextError::TemplateExhausted`] if it does not come to an end.
    pub fn render(&self, input: &TemplateInput) -> Result<String, TextError> {
        let fuel = input.budget();
        // The budget belongs to the environment; a copy of it shares everything that is large.
        let mut env = self.env.clone();
        env.set_fuel(Some(fuel));
        let tools = input.offers_tools().then(|| env.get_template(TOOL_USE).ok()).flatten();
        let template = tools.map_or_else(|| env.get_template(NAME), Ok);
        template
            .and_then(|template| template.render(input.variables()))
            .map_err(|error| failure(&error, fuel))
    }
}

fn syntax_error(error: Error) -> TextError {
    TextError::TemplateSyntax { line: error.line().unwrap_or(0), reason: reason(&error) }
}

fn failure(error: &Error, fuel: u64) -> TextError {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(current) = cause {
        if let Some(raised) = current.downcast_ref::<python::Raised>() {
            return TextError::TemplateRaised { message: raised.0.clone() };
        }
        if current.downcast_ref::<Error>().is_some_and(|error| error.kind() == ErrorKind::OutOfFuel) {
            return TextError::TemplateExhausted { fuel };
        }
        cause = current.source();
    }
    TextError::TemplateFailed { line: error.line().unwrap_or(0), reason: reason(error) }
}

/// What the renderer says, without the place that the error has a field for.
fn reason(error: &Error) -> String {
    match error.detail() {
        Some(detail) => format!("{}: {detail}", error.kind()),
        None => error.kind().to_string(),
    }
}
