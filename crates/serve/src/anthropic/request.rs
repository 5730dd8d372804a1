//! What is asked, in Anthropic's words, as a [`Turn`].
//!
//! Messages of one role that follow each other are one message. Its blocks become OpenAI-shaped messages in
//! their order: results of tools are messages of their own, reasoning and calls are fields of the
//! assistant's.

use std::fmt;

use serde::Deserialize;
use serde::de::value::SeqAccessDeserializer;
use serde::de::{self, Deserializer, SeqAccess, Visitor};
use serde_json::{Map, Value as Json, json};

use crate::error::ApiError;
use crate::turn::{Format, SamplingOverrides, Tool, ToolChoice, Turn, TurnInput};

/// The longest name of a tool.
pub(crate) const LONGEST_NAME: usize = 128;
/// Between blocks of a text that is not the model's own.
const BREAK: &str = "\n\n";

/// Body of `POST /v1/messages`, and of its `count_tokens`, which looks at the prompt alone.
#[derive(Debug, Deserialize)]
pub(super) struct Request {
    model: String,
    messages: Vec<Message>,
    system: Option<Content>,
    tools: Option<Vec<ToolParam>>,
    tool_choice: Option<Choice>,
    thinking: Option<Thinking>,
    output_config: Option<OutputConfig>,
    max_tokens: Option<usize>,
    stream: Option<bool>,
    stop_sequences: Option<Vec<String>>,
    temperature: Option<f64>,
    top_p: Option<f64>,
    top_k: Option<i64>,
}

#[derive(Debug, Deserialize)]
struct Message {
    role: Role,
    content: Content,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Role {
    User,
    Assistant,
    System,
}

/// A text alone is one block of it.
#[derive(Debug, Default)]
struct Content(Vec<Block>);

#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Block {
    Text { text: String },
    Thinking { thinking: String },
    RedactedThinking {},
    ToolUse { id: String, name: String, input: Map<String, Json> },
    ToolResult { tool_use_id: String, content: Option<Content>, is_error: Option<bool> },
}

#[derive(Debug, Deserialize)]
struct ToolParam {
    name: String,
    description: Option<String>,
    input_schema: Option<Map<String, Json>>,
    /// Tools of the service itself have types of their own, and no schema.
    #[serde(rename = "type")]
    kind: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Choice {
    Auto { disable_parallel_tool_use: Option<bool> },
    Any { disable_parallel_tool_use: Option<bool> },
    Tool { name: String, disable_parallel_tool_use: Option<bool> },
    None {},
}

/// A budget or a display that is asked for is not looked at.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Thinking {
    Enabled {},
    Adaptive {},
    BetweenTools {},
    Disabled {},
}

#[derive(Debug, Deserialize)]
struct OutputConfig {
    format: Option<OutputFormat>,
    effort: Option<Effort>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Effort {
    Low,
    Medium,
    High,
    Xhigh,
    Max,
}

#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum OutputFormat {
    JsonSchema { schema: Map<String, Json> },
}

impl Request {
    /// Whether the answer is wanted piece by piece.
    pub(super) fn streams(&self) -> bool {
        self.stream.unwrap_or(false)
    }

    /// The most tokens that are wanted.
    ///
    /// # Errors
    /// If it is not said: it must be.
    pub(super) fn max_tokens(&self) -> Result<usize, ApiError> {
        self.max_tokens.ok_or_else(|| ApiError::field("max_tokens", "max_tokens: it is required"))
    }

    /// The same in the words that all APIs share.
    ///
    /// # Errors
    /// Names the field that makes no sense.
    pub(super) fn turn(self) -> Result<Turn, ApiError> {
        let tools = self.tools.unwrap_or_default().into_iter().map(ToolParam::tool);
        let tools = tools.collect::<Result<Vec<Tool>, ApiError>>()?;
        let (tool_choice, parallel) = choice(self.tool_choice);
        let (format, wanted) =
            self.output_config.map_or((None, None), |config| (config.format, config.effort));
        let format = match format {
            None => Format::Text,
            Some(OutputFormat::JsonSchema { schema }) => {
                Format::JsonSchema { name: "output".to_owned(), schema: Json::Object(schema) }
            }
        };
        let continues = self.messages.last().is_some_and(|last| last.role == Role::Assistant);
        Ok(Turn {
            input: TurnInput::Chat { messages: messages(self.system, self.messages)?, tools },
            continues,
            tool_choice,
            parallel_tool_calls: parallel,
            format,
            sampling: SamplingOverrides {
                temperature: self.temperature,
                top_p: self.top_p,
                top_k: self.top_k,
                ..SamplingOverrides::default()
            },
            stop: self.stop_sequences.unwrap_or_default(),
            max_tokens: self.max_tokens,
            // Clients ask for more than a small context has, and expect to be told when it is full.
            cut_to_fit: true,
            thinking: self.thinking.map(|thinking| !matches!(thinking, Thinking::Disabled {})),
            n: 1,
            model: self.model,
            template: wanted.map(Effort::name).map(effort).unwrap_or_default(),
            ..Turn::default()
        })
    }
}

impl Effort {
    /// In the words of the templates, which know three.
    fn name(self) -> &'static str {
        match self {
            Effort::Low => "low",
            Effort::Medium => "medium",
            Effort::High | Effort::Xhigh | Effort::Max => "high",
        }
    }
}

/// The variables of templates that know how much to reason.
pub(crate) fn effort(effort: &str) -> Map<String, Json> {
    Map::from_iter([("reasoning_effort".to_owned(), effort.into())])
}

impl ToolParam {
    fn tool(self) -> Result<Tool, ApiError> {
        if let Some(kind) = self.kind.filter(|kind| kind != "custom") {
            let message = format!("tools: there are no tools of type `{kind}` here, only `custom` ones");
            return Err(ApiError::field("tools", message));
        }
        let schema = self.input_schema;
        let schema = schema.ok_or_else(|| ApiError::field("tools", "tools: missing field `input_schema`"))?;
        Ok(Tool {
            name: checked_name(self.name)?,
            description: self.description,
            parameters: Json::Object(schema),
        })
    }
}

/// A tool's name, if calls with it can be read.
pub(crate) fn checked_name(name: String) -> Result<String, ApiError> {
    let fine = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    if (1..=LONGEST_NAME).contains(&name.len()) && name.chars().all(fine) {
        return Ok(name);
    }
    let message = format!("tools: a name must be 1 to {LONGEST_NAME} letters, digits, `_`, `-` or `.`");
    Err(ApiError::field("tools", message))
}

fn choice(choice: Option<Choice>) -> (ToolChoice, bool) {
    let (choice, single) = match choice {
        None => (ToolChoice::Auto, None),
        Some(Choice::Auto { disable_parallel_tool_use: single }) => (ToolChoice::Auto, single),
        Some(Choice::Any { disable_parallel_tool_use: single }) => (ToolChoice::Required, single),
        Some(Choice::Tool { name, disable_parallel_tool_use: single }) => (ToolChoice::Named(name), single),
        Some(Choice::None {}) => (ToolChoice::None, None),
    };
    (choice, !single.unwrap_or(false))
}

/// The conversation in OpenAI's shape.
fn messages(system: Option<Content>, messages: Vec<Message>) -> Result<Vec<Json>, ApiError> {
    if !messages.iter().any(|message| message.role == Role::User) {
        return Err(ApiError::field("messages", "messages: there must be one of the user's"));
    }
    let mut out = Vec::new();
    if let Some(system) = system {
        out.push(json!({"role": "system", "content": plain(system, "system")?}));
    }
    let mut merged: Vec<Message> = Vec::new();
    for message in messages {
        match merged.last_mut() {
            Some(last) if last.role == message.role => last.content.0.extend(message.content.0),
            _ => merged.push(message),
        }
    }
    for message in merged {
        match message.role {
            Role::System => {
                let text = plain(message.content, "messages")?;
                out.push(json!({"role": "system", "content": text}));
            }
            Role::User => user(message.content, &mut out)?,
            Role::Assistant => out.push(assistant(message.content)?),
        }
    }
    Ok(out)
}

/// A user's blocks: text, and what tools gave.
fn user(content: Content, out: &mut Vec<Json>) -> Result<(), ApiError> {
    let mut texts: Vec<String> = Vec::new();
    let say = |texts: &mut Vec<String>, out: &mut Vec<Json>| {
        if !texts.is_empty() {
            out.push(json!({"role": "user", "content": std::mem::take(texts).join(BREAK)}));
        }
    };
    let blank = content.0.is_empty();
    for block in content.0 {
        match block {
            Block::Text { text } => texts.push(text),
            Block::ToolResult { tool_use_id, content, is_error } => {
                say(&mut texts, out);
                let text = plain(content.unwrap_or_default(), "messages")?;
                let text = if is_error == Some(true) { format!("Error: {text}") } else { text };
                let mut message = json!({"role": "tool", "tool_call_id": tool_use_id, "content": text});
                // Templates of some families name the tool instead of the call.
                if let Some(name) = called(out, &tool_use_id) {
                    message["name"] = Json::String(name);
                }
                out.push(message);
            }
            _ => return Err(misplaced("a user's message may hold text and tool results")),
        }
    }
    if blank {
        texts.push(String::new());
    }
    say(&mut texts, out);
    Ok(())
}

/// The model's own blocks. Its texts are joined as they were said, so that the prompt is what is cached.
fn assistant(content: Content) -> Result<Json, ApiError> {
    let (mut text, mut reasoning) = (String::new(), String::new());
    let mut calls = Vec::new();
    for block in content.0 {
        match block {
            Block::Text { text: more } => text.push_str(&more),
            Block::Thinking { thinking } => reasoning.push_str(&thinking),
            Block::RedactedThinking {} => {}
            Block::ToolUse { id, name, input } => {
                let arguments = Json::Object(input).to_string();
                let function = json!({"name": name, "arguments": arguments});
                calls.push(json!({"id": id, "type": "function", "function": function}));
            }
            Block::ToolResult { .. } => {
                return Err(misplaced("an assistant's message may hold text, thinking and tool use"));
            }
        }
    }
    let mut message = json!({"role": "assistant", "content": text});
    if !reasoning.is_empty() {
        message["reasoning_content"] = Json::String(reasoning);
    }
    if !calls.is_empty() {
        message["tool_calls"] = Json::Array(calls);
    }
    Ok(message)
}

/// Content that may be text only.
fn plain(content: Content, param: &'static str) -> Result<String, ApiError> {
    let text = |block| match block {
        Block::Text { text } => Ok(text),
        _ => Err(ApiError::field(param, format!("{param}: only text may stand here"))),
    };
    Ok(content.0.into_iter().map(text).collect::<Result<Vec<_>, _>>()?.join(BREAK))
}

/// The name of the tool of an earlier call.
fn called(messages: &[Json], id: &str) -> Option<String> {
    let calls = messages.iter().rev().filter_map(|message| message["tool_calls"].as_array()).flatten();
    let call = calls.into_iter().find(|call| call["id"] == id)?;
    call["function"]["name"].as_str().map(str::to_owned)
}

fn misplaced(what: &str) -> ApiError {
    ApiError::field("messages", format!("messages: {what}"))
}

impl<'de> Deserialize<'de> for Content {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Blocks;

        impl<'de> Visitor<'de> for Blocks {
            type Value = Content;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string or a list of content blocks")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Content, E> {
                Ok(Content(vec![Block::Text { text: text.to_owned() }]))
            }

            fn visit_string<E: de::Error>(self, text: String) -> Result<Content, E> {
                Ok(Content(vec![Block::Text { text }]))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, blocks: A) -> Result<Content, A::Error> {
                Vec::deserialize(SeqAccessDeserializer::new(blocks)).map(Content)
            }
        }

        deserializer.deserialize_any(Blocks)
    }
}
