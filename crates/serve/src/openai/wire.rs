//! Requests as they come, and the turns that they mean. Unknown fields are passed over; `null` is as good as absent.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Map, Value as Json, json};

use crate::error::ApiError;
use crate::turn::{Format, MAX_CHOICES, SamplingOverrides, Tool, ToolChoice, Turn, TurnInput};

/// The most alternatives that a text completion tells with a token.
const MAX_TEXT_LOGPROBS: usize = 5;
/// The longest name of a tool: what calls are read with.
const LONGEST_NAME: usize = 64;

/// A request with the fields that both kinds have. (`serde(flatten)` would lose the place of an error.)
macro_rules! request {
    ($(#[$doc:meta])* $name:ident { $($fields:tt)* }) => {
        $(#[$doc])*
        #[derive(Debug, Deserialize)]
        pub(super) struct $name {
            $($fields)*
            model: Option<String>,
            temperature: Option<f64>,
            top_p: Option<f64>,
            top_k: Option<i64>,
            min_p: Option<f64>,
            presence_penalty: Option<f64>,
            frequency_penalty: Option<f64>,
            repetition_penalty: Option<f64>,
            seed: Option<i64>,
            logit_bias: Option<BTreeMap<String, f64>>,
            stop: Option<OneOrMany>,
            n: Option<usize>,
            max_tokens: Option<usize>,
            stream: Option<bool>,
            stream_options: Option<StreamOptions>,
            smoe: Option<Smoe>,
        }

        impl $name {
            pub(super) fn is_streamed(&self) -> bool {
                self.stream.unwrap_or(false)
            }

            pub(super) fn includes_usage(&self) -> bool {
                self.stream_options.as_ref().and_then(|options| options.include_usage).unwrap_or(false)
            }

            /// The turn, but for what the kinds differ in.
            fn common(&mut self) -> Result<Turn, ApiError> {
                Ok(Turn {
                    model: self.model.take().unwrap_or_default(),
                    parallel_tool_calls: true,
                    sampling: SamplingOverrides {
                        temperature: self.temperature,
                        top_p: self.top_p,
                        top_k: self.top_k,
                        min_p: self.min_p,
                        presence_penalty: self.presence_penalty,
                        frequency_penalty: self.frequency_penalty,
                        repetition_penalty: self.repetition_penalty,
                        logit_bias: biases(self.logit_bias.take().unwrap_or_default())?,
                        seed: self.seed,
                    },
                    stop: self.stop.take().map(OneOrMany::into_vec).unwrap_or_default(),
                    max_tokens: self.max_tokens,
                    n: self.n.unwrap_or(1),
                    progress: self.smoe.as_ref().and_then(|smoe| smoe.progress).unwrap_or(false),
                    ..Turn::default()
                })
            }
        }
    };
}

request! {
    /// Body of `/v1/chat/completions`.
    ChatRequest {
        messages: Vec<Json>,
        tools: Option<Vec<ToolWire>>,
        tool_choice: Option<ToolChoiceWire>,
        parallel_tool_calls: Option<bool>,
        response_format: Option<ResponseFormat>,
        logprobs: Option<bool>,
        top_logprobs: Option<usize>,
        max_completion_tokens: Option<usize>,
        reasoning_effort: Option<String>,
        chat_template_kwargs: Option<Map<String, Json>>,
        continue_final_message: Option<bool>,
    }
}

request! {
    /// Body of `/v1/completions`.
    CompletionRequest {
        prompt: Prompt,
        echo: Option<bool>,
        suffix: Option<String>,
        best_of: Option<usize>,
        logprobs: Option<usize>,
    }
}

#[derive(Debug, Deserialize)]
struct StreamOptions {
    include_usage: Option<bool>,
}

/// Our own wishes.
#[derive(Debug, Deserialize)]
struct Smoe {
    progress: Option<bool>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a text or a list of texts")]
enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

impl OneOrMany {
    fn into_vec(self) -> Vec<String> {
        match self {
            Self::One(text) => vec![text],
            Self::Many(texts) => texts,
        }
    }
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a text, token ids, or a list of either")]
enum Prompt {
    Text(String),
    Texts(Vec<String>),
    Tokens(Vec<u32>),
    TokenLists(Vec<Vec<u32>>),
}

#[derive(Debug, Deserialize)]
struct ToolWire {
    r#type: Option<String>,
    function: FunctionWire,
}

#[derive(Debug, Deserialize)]
struct FunctionWire {
    name: String,
    description: Option<String>,
    parameters: Option<Map<String, Json>>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected `none`, `auto`, `required`, or a function by its name")]
enum ToolChoiceWire {
    Mode(ToolMode),
    Named { function: NamedFunction },
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum ToolMode {
    None,
    Auto,
    Required,
}

#[derive(Debug, Deserialize)]
struct NamedFunction {
    name: String,
}

#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum ResponseFormat {
    Text,
    JsonObject,
    JsonSchema { json_schema: NamedSchema },
}

#[derive(Debug, Deserialize)]
struct NamedSchema {
    name: Option<String>,
    schema: Option<Json>,
}

impl ChatRequest {
    /// What is asked.
    ///
    /// # Errors
    /// Names the field that makes no sense.
    pub(super) fn turn(mut self) -> Result<Turn, ApiError> {
        let mut turn = self.common()?;
        let tools = self.tools.take().unwrap_or_default();
        let tools = tools.into_iter().enumerate().map(|(index, tool)| tool.checked(index));
        let tools = tools.collect::<Result<Vec<Tool>, ApiError>>()?;
        turn.input = TurnInput::Chat { messages: self.messages, tools };
        turn.continues = self.continue_final_message.unwrap_or(false);
        turn.tool_choice = match self.tool_choice {
            None | Some(ToolChoiceWire::Mode(ToolMode::Auto)) => ToolChoice::Auto,
            Some(ToolChoiceWire::Mode(ToolMode::None)) => ToolChoice::None,
            Some(ToolChoiceWire::Mode(ToolMode::Required)) => ToolChoice::Required,
            Some(ToolChoiceWire::Named { function }) => ToolChoice::Named(function.name),
        };
        turn.parallel_tool_calls = self.parallel_tool_calls.unwrap_or(true);
        turn.format = match self.response_format {
            None | Some(ResponseFormat::Text) => Format::Text,
            Some(ResponseFormat::JsonObject) => Format::JsonObject,
            Some(ResponseFormat::JsonSchema { json_schema }) => {
                let Some(schema) = json_schema.schema else {
                    let place = "response_format.json_schema.schema";
                    return Err(ApiError::field(place, format!("{place} is missing")));
                };
                Format::JsonSchema { name: json_schema.name.unwrap_or_default(), schema }
            }
        };
        turn.max_tokens = self.max_completion_tokens.or(turn.max_tokens);
        turn.logprobs = match (self.logprobs.unwrap_or(false), self.top_logprobs) {
            (true, top) => Some(top.unwrap_or(0)),
            (false, None | Some(0)) => None,
            (false, Some(_)) => {
                return Err(ApiError::field("top_logprobs", "top_logprobs needs `logprobs: true`"));
            }
        };
        turn.template = self.chat_template_kwargs.unwrap_or_default();
        if let Some(value) = turn.template.remove("enable_thinking") {
            let Json::Bool(thinking) = value else {
                let place = "chat_template_kwargs.enable_thinking";
                return Err(ApiError::field(place, format!("{place} must be true or false")));
            };
            turn.thinking = Some(thinking);
        }
        if let Some(effort) = self.reasoning_effort {
            if effort == "none" {
                turn.thinking.get_or_insert(false);
            } else {
                turn.template.insert("reasoning_effort".to_owned(), effort.into());
            }
        }
        Ok(turn)
    }
}

impl CompletionRequest {
    /// What is asked, a turn for each prompt, at least one.
    ///
    /// # Errors
    /// Names the field that makes no sense.
    pub(super) fn turns(mut self) -> Result<Vec<Turn>, ApiError> {
        let mut turn = self.common()?;
        if self.suffix.is_some_and(|suffix| !suffix.is_empty()) {
            return Err(ApiError::field("suffix", "suffix is not supported"));
        }
        if self.best_of.is_some_and(|best| best != turn.n) {
            return Err(ApiError::field("best_of", "best_of other than n is not supported"));
        }
        turn.echo = self.echo.unwrap_or(false);
        turn.logprobs = self.logprobs;
        if turn.echo && turn.logprobs.is_some() {
            return Err(ApiError::field("echo", "echo together with logprobs is not supported"));
        }
        if self.logprobs.is_some_and(|top| top > MAX_TEXT_LOGPROBS) {
            return Err(ApiError::field("logprobs", format!("logprobs must be 0 to {MAX_TEXT_LOGPROBS}")));
        }
        let inputs: Vec<TurnInput> = match self.prompt {
            Prompt::Text(text) => vec![TurnInput::Text(text)],
            Prompt::Texts(texts) => texts.into_iter().map(TurnInput::Text).collect(),
            Prompt::Tokens(ids) => vec![TurnInput::Tokens(ids)],
            Prompt::TokenLists(lists) => lists.into_iter().map(TurnInput::Tokens).collect(),
        };
        if !(1..=MAX_CHOICES).contains(&inputs.len()) {
            return Err(ApiError::field("prompt", format!("prompt must hold 1 to {MAX_CHOICES} prompts")));
        }
        Ok(inputs.into_iter().map(|input| Turn { input, ..turn.clone() }).collect())
    }
}

impl ToolWire {
    fn checked(self, index: usize) -> Result<Tool, ApiError> {
        if self.r#type.is_some_and(|kind| kind != "function") {
            let place = format!("tools[{index}].type");
            return Err(ApiError::field(place.clone(), format!("{place} must be `function`")));
        }
        let FunctionWire { name, description, parameters } = self.function;
        let fine = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
        if name.is_empty() || name.len() > LONGEST_NAME || !name.chars().all(fine) {
            let place = format!("tools[{index}].function.name");
            let message = format!("{place} must be 1 to {LONGEST_NAME} letters, digits, `_`, `-` or `.`");
            return Err(ApiError::field(place, message));
        }
        let nothing = || json!({"type": "object", "properties": {}});
        Ok(Tool { name, description, parameters: parameters.map_or_else(nothing, Json::Object) })
    }
}

fn biases(given: BTreeMap<String, f64>) -> Result<Vec<(u32, f64)>, ApiError> {
    let bias = |(id, bias): (String, f64)| match id.parse() {
        Ok(id) => Ok((id, bias)),
        Err(_) => {
            Err(ApiError::field("logit_bias", format!("logit_bias names `{id}`, which is no token id")))
        }
    };
    given.into_iter().map(bias).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chat(extra: Json) -> Result<Turn, ApiError> {
        let mut body = json!({"messages": [{"role": "user", "content": "hi"}]});
        for (name, value) in extra.as_object().unwrap() {
            body[name.as_str()] = value.clone();
        }
        serde_json::from_value::<ChatRequest>(body).map_err(|e| ApiError::invalid(e.to_string()))?.turn()
    }

    #[test]
    fn what_is_not_said_is_left_to_the_model() {
        let turn = chat(json!({"unknown": 1, "temperature": null})).unwrap();
        assert_eq!(turn.sampling, SamplingOverrides::default());
        assert_eq!((turn.n, turn.max_tokens, turn.logprobs, turn.thinking), (1, None, None, None));
        assert!(turn.parallel_tool_calls && turn.stop.is_empty());
    }

    #[test]
    fn the_newer_name_of_the_limit_wins() {
        let turn = chat(json!({"max_tokens": 5, "max_completion_tokens": 7})).unwrap();
        assert_eq!(turn.max_tokens, Some(7));
    }

    #[test]
    fn every_way_to_choose_tools_is_read() {
        let tools = json!([{"type": "function", "function": {"name": "f"}}]);
        for (choice, expected) in [
            (json!("none"), ToolChoice::None),
            (json!("auto"), ToolChoice::Auto),
            (json!("required"), ToolChoice::Required),
            (json!({"type": "function", "function": {"name": "f"}}), ToolChoice::Named("f".to_owned())),
        ] {
            assert_eq!(chat(json!({"tools": tools, "tool_choice": choice})).unwrap().tool_choice, expected);
        }
        assert!(chat(json!({"tool_choice": "always"})).is_err());
    }

    #[test]
    fn thinking_has_two_switches() {
        let switched = chat(json!({"chat_template_kwargs": {"enable_thinking": false, "x": 1}})).unwrap();
        assert_eq!((switched.thinking, switched.template.len()), (Some(false), 1));
        assert_eq!(chat(json!({"reasoning_effort": "none"})).unwrap().thinking, Some(false));
        assert_eq!(chat(json!({"reasoning_effort": "high"})).unwrap().template["reasoning_effort"], "high");
    }

    #[test]
    fn what_makes_no_sense_is_named() {
        for (body, param) in [
            (json!({"top_logprobs": 2}), "top_logprobs"),
            (json!({"logit_bias": {"a": 1}}), "logit_bias"),
            (json!({"tools": [{"type": "x", "function": {"name": "f"}}]}), "tools[0].type"),
            (json!({"tools": [{"function": {"name": "a b"}}]}), "tools[0].function.name"),
            (
                json!({"response_format": {"type": "json_schema", "json_schema": {}}}),
                "response_format.json_schema.schema",
            ),
        ] {
            assert_eq!(chat(body).unwrap_err().param.as_deref(), Some(param));
        }
    }

    #[test]
    fn prompts_come_in_four_forms() {
        let inputs = |prompt: Json| {
            let request: CompletionRequest = serde_json::from_value(json!({"prompt": prompt})).unwrap();
            request.turns().map(|turns| turns.len())
        };
        assert_eq!(inputs(json!("a")).unwrap(), 1);
        assert_eq!(inputs(json!(["a", "b"])).unwrap(), 2);
        assert_eq!(inputs(json!([1, 2, 3])).unwrap(), 1);
        assert_eq!(inputs(json!([[1], [2, 3]])).unwrap(), 2);
        assert!(inputs(json!([])).is_err());
    }
}
