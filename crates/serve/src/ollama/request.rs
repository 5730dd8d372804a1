//! What is asked, in Ollama's words, as a [`Turn`].

use serde::Deserialize;
use serde_json::{Map, Value as Json, json};

use crate::anthropic::{checked_name, effort};
use crate::error::ApiError;
use crate::turn::{Format, SamplingOverrides, Tool, Turn, TurnInput};

/// Body of `POST /api/chat`. How long a model stays loaded is not for a request to say: `keep_alive` is
/// passed over.
#[derive(Debug, Deserialize)]
pub(super) struct ChatRequest {
    model: String,
    messages: Vec<Message>,
    stream: Option<bool>,
    format: Option<Json>,
    options: Option<Options>,
    tools: Option<Vec<ToolParam>>,
    think: Option<Think>,
}

/// Body of `POST /api/generate`. Templates and contexts of the request's own are passed over.
#[derive(Debug, Deserialize)]
pub(super) struct GenerateRequest {
    model: String,
    prompt: Option<String>,
    system: Option<String>,
    suffix: Option<String>,
    images: Option<Vec<Json>>,
    /// The prompt stands for itself.
    raw: Option<bool>,
    stream: Option<bool>,
    format: Option<Json>,
    options: Option<Options>,
    think: Option<Think>,
}

/// Body of `POST /api/show`.
#[derive(Debug, Deserialize)]
pub(super) struct ShowRequest {
    /// Older clients call it `name`.
    #[serde(alias = "name")]
    model: String,
}

#[derive(Debug, Deserialize)]
struct Message {
    role: Role,
    content: Option<String>,
    thinking: Option<String>,
    images: Option<Vec<Json>>,
    tool_calls: Option<Vec<Call>>,
    tool_name: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Role {
    System,
    User,
    Assistant,
    Tool,
}

#[derive(Debug, Deserialize)]
struct Call {
    function: CallFunction,
}

#[derive(Debug, Deserialize)]
struct CallFunction {
    name: String,
    #[serde(default)]
    arguments: Map<String, Json>,
}

#[derive(Debug, Deserialize)]
struct ToolParam {
    function: Function,
}

#[derive(Debug, Deserialize)]
struct Function {
    name: String,
    description: Option<String>,
    parameters: Option<Map<String, Json>>,
}

/// On, off, or how much: any amount is on.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(untagged, expecting = "expected true, false, `low`, `medium` or `high`")]
enum Think {
    Flag(bool),
    Effort(Effort),
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Effort {
    Low,
    Medium,
    High,
}

impl Think {
    fn effort(self) -> Option<&'static str> {
        match self {
            Think::Flag(_) => None,
            Think::Effort(Effort::Low) => Some("low"),
            Think::Effort(Effort::Medium) => Some("medium"),
            Think::Effort(Effort::High) => Some("high"),
        }
    }
}

/// Those that mean something here; the rest is about how Ollama would compute.
#[derive(Debug, Default, Deserialize)]
struct Options {
    num_predict: Option<i64>,
    temperature: Option<f64>,
    top_k: Option<i64>,
    top_p: Option<f64>,
    min_p: Option<f64>,
    seed: Option<i64>,
    stop: Option<Vec<String>>,
    repeat_penalty: Option<f64>,
    presence_penalty: Option<f64>,
    frequency_penalty: Option<f64>,
}

impl ChatRequest {
    /// Whether the answer is wanted piece by piece: unless it is said otherwise.
    pub(super) fn streams(&self) -> bool {
        self.stream.unwrap_or(true)
    }

    /// The same in the words that all APIs share.
    ///
    /// # Errors
    /// Names the field that makes no sense.
    pub(super) fn turn(self) -> Result<Turn, ApiError> {
        let tools = self.tools.unwrap_or_default().into_iter().map(|tool| tool.function.tool());
        let tools = tools.collect::<Result<Vec<Tool>, ApiError>>()?;
        let messages = messages(self.messages)?;
        // What the model is to go on from.
        let continues = messages.last().is_some_and(|last| {
            last["role"] == "assistant" && last["content"] != "" && last["tool_calls"].is_null()
        });
        let turn = turn(&self.model, self.options, self.think, self.format)?;
        Ok(Turn { input: TurnInput::Chat { messages, tools }, continues, ..turn })
    }
}

impl GenerateRequest {
    /// Whether the answer is wanted piece by piece: unless it is said otherwise.
    pub(super) fn streams(&self) -> bool {
        self.stream.unwrap_or(true)
    }

    /// The model's name, if it is only to be loaded.
    pub(super) fn loads(&self) -> Option<&str> {
        let says = self.prompt.as_ref().is_some_and(|prompt| !prompt.is_empty());
        (!says).then(|| untagged(&self.model))
    }

    /// The same in the words that all APIs share.
    ///
    /// # Errors
    /// Names the field that makes no sense.
    pub(super) fn turn(self) -> Result<Turn, ApiError> {
        if self.images.is_some_and(|images| !images.is_empty()) {
            return Err(ApiError::field("images", "images are not supported"));
        }
        if self.suffix.is_some_and(|suffix| !suffix.is_empty()) {
            return Err(ApiError::field("suffix", "suffix is not supported"));
        }
        let prompt = self.prompt.unwrap_or_default();
        let input = if self.raw.unwrap_or(false) {
            TurnInput::Text(prompt)
        } else {
            let system = self.system.filter(|system| !system.is_empty());
            let system = system.map(|system| json!({"role": "system", "content": system}));
            let asked = json!({"role": "user", "content": prompt});
            TurnInput::Chat { messages: system.into_iter().chain([asked]).collect(), tools: Vec::new() }
        };
        Ok(Turn { input, ..turn(&self.model, self.options, self.think, self.format)? })
    }
}

/// What both kinds of requests have in common, without an input.
fn turn(
    model: &str,
    options: Option<Options>,
    think: Option<Think>,
    format: Option<Json>,
) -> Result<Turn, ApiError> {
    let options = options.unwrap_or_default();
    Ok(Turn {
        format: self::format(format)?,
        sampling: SamplingOverrides {
            temperature: options.temperature,
            top_p: options.top_p,
            top_k: options.top_k,
            min_p: options.min_p,
            repetition_penalty: options.repeat_penalty,
            presence_penalty: options.presence_penalty,
            frequency_penalty: options.frequency_penalty,
            // Below 0 is any.
            seed: options.seed.filter(|&seed| seed >= 0),
            ..SamplingOverrides::default()
        },
        stop: options.stop.unwrap_or_default(),
        // Below 0 is as many as there is room for.
        max_tokens: options.num_predict.and_then(|most| usize::try_from(most).ok()),
        cut_to_fit: true,
        thinking: think.map(|think| !matches!(think, Think::Flag(false))),
        template: think.and_then(Think::effort).map(effort).unwrap_or_default(),
        parallel_tool_calls: true,
        n: 1,
        model: untagged(model).to_owned(),
        ..Turn::default()
    })
}

impl ShowRequest {
    /// The model's name.
    pub(super) fn model(&self) -> &str {
        untagged(&self.model)
    }
}

/// A name without the tag that clients put behind names that have none.
fn untagged(name: &str) -> &str {
    name.strip_suffix(":latest").unwrap_or(name)
}

impl Function {
    fn tool(self) -> Result<Tool, ApiError> {
        let parameters = self.parameters.map_or_else(|| json!({"type": "object"}), Json::Object);
        Ok(Tool { name: checked_name(self.name)?, description: self.description, parameters })
    }
}

fn format(format: Option<Json>) -> Result<Format, ApiError> {
    match format {
        None | Some(Json::Null) => Ok(Format::Text),
        Some(Json::String(word)) if word.is_empty() => Ok(Format::Text),
        Some(Json::String(word)) if word == "json" => Ok(Format::JsonObject),
        Some(schema @ Json::Object(_)) => Ok(Format::JsonSchema { name: "format".to_owned(), schema }),
        Some(_) => Err(ApiError::field("format", "format: \"json\" or a JSON schema")),
    }
}

/// The conversation in OpenAI's shape. Calls have no names here: they get numbers, and a result is of the
/// first call of its tool that has none yet.
fn messages(messages: Vec<Message>) -> Result<Vec<Json>, ApiError> {
    let mut out = Vec::with_capacity(messages.len());
    let mut numbered = 0;
    let mut waiting: Vec<(String, String)> = Vec::new();
    for message in messages {
        if message.images.is_some_and(|images| !images.is_empty()) {
            return Err(ApiError::field("messages", "messages: images are not supported"));
        }
        let content = message.content.unwrap_or_default();
        out.push(match message.role {
            Role::System => json!({"role": "system", "content": content}),
            Role::User => json!({"role": "user", "content": content}),
            Role::Assistant => {
                let mut said = json!({"role": "assistant", "content": content});
                if let Some(thinking) = message.thinking.filter(|thinking| !thinking.is_empty()) {
                    said["reasoning_content"] = Json::String(thinking);
                }
                waiting.clear();
                let mut calls = Vec::new();
                for Call { function } in message.tool_calls.unwrap_or_default() {
                    let id = format!("call_{numbered}");
                    numbered += 1;
                    let arguments = Json::Object(function.arguments).to_string();
                    let name = function.name;
                    calls.push(json!({
                        "id": id, "type": "function", "function": {"name": name, "arguments": arguments},
                    }));
                    waiting.push((id, name));
                }
                if !calls.is_empty() {
                    said["tool_calls"] = Json::Array(calls);
                }
                said
            }
            Role::Tool => {
                let mut result = json!({"role": "tool", "content": content});
                let named =
                    |(_, name): &(String, String)| message.tool_name.as_ref().is_none_or(|tool| tool == name);
                if let Some(at) = waiting.iter().position(named) {
                    let (id, name) = waiting.remove(at);
                    result["tool_call_id"] = Json::String(id);
                    result["name"] = Json::String(name);
                } else if let Some(tool) = message.tool_name {
                    result["name"] = Json::String(tool);
                }
                result
            }
        });
    }
    Ok(out)
}
