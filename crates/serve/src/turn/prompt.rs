//! From a conversation to a prompt: messages as templates expect them, the template, tokens, the answer's form.

use serde_json::{Map, Value as Json, json};
use smoe_engine::{Limits, Sampling};
use smoe_text::{
    CallShape, Constraint, GenerationDefaults, GrammarLimits, Shape, TemplateInput, TextError, Tokenizer,
    ToolFormat, ToolSpec,
};

use super::bound::Bound;
use super::follow::Follower;
use super::{Format, SamplingOverrides, Tool, ToolChoice, Turn, TurnInput};
use crate::error::ApiError;
use crate::id;
use crate::model::Model;

/// Bytes at the prompt's end that tell how the reply begins.
const TAIL: usize = 4096;

const ROLES: [&str; 6] = ["system", "developer", "user", "assistant", "tool", "function"];

/// All that a turn's jobs and voices are made of.
pub(super) struct Prepared {
    pub(super) prompt: Vec<u32>,
    /// The end of the prompt's text.
    pub(super) tail: String,
    /// The tools that the model was told of.
    pub(super) tools: Vec<ToolSpec>,
    sampling: Sampling,
    pub(super) limits: Limits,
    /// One for each choice, if the answer has a form.
    pub(super) constraints: Vec<Bound>,
    /// The prompt as text, if it is to be echoed.
    pub(super) echo: Option<String>,
}

impl Prepared {
    /// Every answer has a seed of its own.
    pub(super) fn sampling_of(&self, choice: usize) -> Sampling {
        Sampling { seed: self.sampling.seed.wrapping_add(choice as u64), ..self.sampling.clone() }
    }
}

/// Makes the prompt: work of milliseconds to seconds, not for the threads of the server.
pub(super) fn prepare(model: &Model, turn: &Turn) -> Result<Prepared, ApiError> {
    let tokenizer = model.text().tokenizer.as_ref();
    let (prompt, tail, tools) = encode(model, turn)?;
    let echo = turn.echo.then(|| match (&turn.input, tokenizer) {
        (TurnInput::Text(text), _) => text.clone(),
        (_, Some(tokenizer)) => tokenizer.decode(&prompt, true),
        (_, None) => String::new(),
    });
    let left = model.context().saturating_sub(prompt.len());
    if left == 0 || turn.max_tokens.is_some_and(|tokens| tokens > left && !turn.cut_to_fit) {
        return Err(ApiError::context(model.context(), prompt.len(), turn.max_tokens));
    }
    let limits = Limits {
        max_tokens: turn.max_tokens.map_or(left, |tokens| tokens.min(left)),
        end_tokens: model.text().end_tokens.clone(),
    };
    let sampling = sampling(&turn.sampling, &model.text().defaults, model.vocab_size())?;
    let constraints = constraints(model, turn, tools, &tail)?;
    let tools =
        tools.iter().map(|tool| ToolSpec { name: tool.name.clone(), parameters: tool.parameters.clone() });
    Ok(Prepared { prompt, tail, tools: tools.collect(), sampling, limits, constraints, echo })
}

/// Tokens of the prompt.
pub(super) fn count(model: &Model, turn: &Turn) -> Result<usize, ApiError> {
    encode(model, turn).map(|(prompt, ..)| prompt.len())
}

/// The prompt, the end of its text, and the tools that it tells of.
fn encode<'a>(model: &Model, turn: &'a Turn) -> Result<(Vec<u32>, String, &'a [Tool]), ApiError> {
    let tokenizer = model.text().tokenizer.as_ref();
    let (prompt, tail, tools) = match &turn.input {
        TurnInput::Chat { messages, tools } => {
            // Tools that may not be called are none.
            let tools = if turn.tool_choice == ToolChoice::None { &[] } else { tools.as_slice() };
            let text = render(model, turn, messages, tools)?;
            let prompt = need(tokenizer)?.encode(&text)?;
            (prompt, end_of(&text, TAIL).to_owned(), tools)
        }
        TurnInput::Text(text) => (need(tokenizer)?.encode_with_special(text)?, String::new(), &[][..]),
        TurnInput::Tokens(ids) => (ids.clone(), String::new(), &[][..]),
    };
    if prompt.is_empty() {
        return Err(ApiError::field("prompt", "the prompt is empty: give at least one token"));
    }
    Ok((prompt, tail, tools))
}

fn need(tokenizer: Option<&Tokenizer>) -> Result<&Tokenizer, ApiError> {
    tokenizer.ok_or_else(|| {
        ApiError::invalid("this model's vault has no tokenizer: send token ids to /v1/completions")
    })
}

fn end_of(text: &str, bytes: usize) -> &str {
    let at = text.len().saturating_sub(bytes);
    let at = (at..=text.len()).find(|&at| text.is_char_boundary(at)).unwrap_or(0);
    &text[at..]
}

/// The text that the model reads.
fn render(model: &Model, turn: &Turn, messages: &[Json], tools: &[Tool]) -> Result<String, ApiError> {
    let Some(template) = &model.text().chat_template else {
        let message = "this model's vault has no chat template: use /v1/completions";
        return Err(ApiError::invalid(message).coded("no_chat_template"));
    };
    let mut messages = normalise(messages)?;
    if !model.knows_developer() {
        for message in &mut messages {
            if message["role"] == "developer" {
                message["role"] = "system".into();
            }
        }
    }
    let mut extra = turn.template.clone();
    if let Some(thinking) = turn.thinking {
        // The names that templates have for it.
        extra.insert("enable_thinking".to_owned(), thinking.into());
        extra.insert("thinking".to_owned(), thinking.into());
    }
    let tools: Vec<Json> = tools
        .iter()
        .map(|tool| {
            let mut function = json!({"name": tool.name});
            if let Some(description) = &tool.description {
                function["description"] = description.as_str().into();
            }
            function["parameters"] = tool.parameters.clone();
            json!({"type": "function", "function": function})
        })
        .collect();
    let mut input = TemplateInput {
        messages: Json::Array(messages),
        tools: (!tools.is_empty()).then_some(Json::Array(tools)),
        add_generation_prompt: !turn.continues,
        bos_token: model.text().bos_token.clone(),
        eos_token: model.text().eos_token.clone(),
        extra,
        now: None,
    };
    let text = match template.render(&input) {
        // Most templates want the arguments of calls as objects, some as the text that the API has.
        Err(TextError::TemplateFailed { .. }) if with_textual_arguments(&mut input.messages) => {
            template.render(&input)?
        }
        rendered => rendered?,
    };
    if turn.continues { Ok(cut_open(text, &input.messages)?) } else { Ok(text) }
}

/// Cuts a conversation off behind the last message's text, so that the model goes on from there.
fn cut_open(mut text: String, messages: &Json) -> Result<String, ApiError> {
    let last = messages.as_array().and_then(|messages| messages.last());
    let said = last.filter(|last| last["role"] == "assistant" && last["tool_calls"].is_null());
    let said = said.and_then(|last| last["content"].as_str()).unwrap_or_default();
    if said.trim().is_empty() {
        let message =
            "only a last message of the role `assistant` with a text, and no calls, can be continued";
        return Err(ApiError::field("messages", message));
    }
    // Many templates take blanks off its ends.
    let end = [said, said.trim_start(), said.trim_end(), said.trim()]
        .into_iter()
        .find_map(|said| text.rfind(said).map(|at| at + said.len()));
    let Some(end) = end else {
        let message =
            "this model's chat template changes the last message's text, so that it cannot be continued";
        return Err(ApiError::field("messages", message));
    };
    text.truncate(end);
    Ok(text)
}

/// Checks messages and leaves what templates know: contents as text, arguments as objects.
fn normalise(messages: &[Json]) -> Result<Vec<Json>, ApiError> {
    if messages.is_empty() {
        return Err(ApiError::field("messages", "messages must hold at least one message"));
    }
    messages.iter().enumerate().map(|(index, message)| normalise_one(index, message)).collect()
}

fn normalise_one(index: usize, message: &Json) -> Result<Json, ApiError> {
    let at = |field: &str| format!("messages[{index}].{field}");
    let wrong = |field: &str, expected: &str| {
        let at = at(field);
        Err(ApiError::field(at.clone(), format!("{at} must be {expected}")))
    };
    let Json::Object(fields) = message else {
        let message = format!("messages[{index}] must be an object");
        return Err(ApiError::field(format!("messages[{index}]"), message));
    };
    let role = fields.get("role").and_then(Json::as_str).unwrap_or_default();
    if !ROLES.contains(&role) {
        return wrong("role", &format!("one of {}", ROLES.join(", ")));
    }
    let mut known = Map::new();
    known.insert("role".to_owned(), role.into());
    let content = match fields.get("content") {
        Some(Json::String(text)) => Json::from(text.as_str()),
        Some(Json::Array(parts)) => Json::from(join(&at("content"), parts)?),
        None | Some(Json::Null) if role == "assistant" => Json::Null,
        _ => return wrong("content", "a text or a list of text parts"),
    };
    known.insert("content".to_owned(), content);
    for field in ["name", "tool_call_id", "reasoning_content"] {
        match fields.get(field) {
            None | Some(Json::Null) => {}
            Some(Json::String(text)) => {
                known.insert(field.to_owned(), text.as_str().into());
            }
            Some(_) => return wrong(field, "a text"),
        }
    }
    match fields.get("tool_calls") {
        None | Some(Json::Null) => {}
        Some(Json::Array(calls)) if calls.is_empty() => {}
        Some(Json::Array(calls)) => {
            let calls = calls.iter().map(call).collect::<Option<Vec<Json>>>();
            let Some(calls) = calls else {
                return wrong(
                    "tool_calls",
                    "calls with `function.name` and `function.arguments`, a JSON object",
                );
            };
            known.insert("tool_calls".to_owned(), Json::Array(calls));
        }
        Some(_) => return wrong("tool_calls", "a list"),
    }
    Ok(Json::Object(known))
}

/// The text of content parts.
fn join(at: &str, parts: &[Json]) -> Result<String, ApiError> {
    let mut text = String::new();
    for (index, part) in parts.iter().enumerate() {
        match (part["type"].as_str(), part["text"].as_str()) {
            (Some("text"), Some(part)) => text.push_str(part),
            (kind, _) => {
                let message = match kind {
                    Some(kind @ ("image_url" | "input_audio" | "file")) => {
                        format!(
                            "content of type `{kind}` is not supported: this server's models read text only"
                        )
                    }
                    _ => format!("{at}[{index}] must be {{\"type\": \"text\", \"text\": ..}}"),
                };
                return Err(ApiError::field(format!("{at}[{index}]"), message));
            }
        }
    }
    Ok(text)
}

/// A call of an earlier turn, its arguments as an object.
fn call(call: &Json) -> Option<Json> {
    let function = call.get("function")?;
    let name = function.get("name")?.as_str()?;
    let arguments = match function.get("arguments")? {
        Json::String(text) if text.trim().is_empty() => json!({}),
        Json::String(text) => serde_json::from_str(text).ok().filter(Json::is_object)?,
        object @ Json::Object(_) => object.clone(),
        _ => return None,
    };
    let mut out = json!({"type": "function", "function": {"name": name, "arguments": arguments}});
    if let Some(id) = call.get("id").and_then(Json::as_str) {
        out["id"] = id.into();
    }
    Some(out)
}

/// Makes texts of all calls' arguments; false if there are none.
fn with_textual_arguments(messages: &mut Json) -> bool {
    let mut any = false;
    let messages = messages.as_array_mut().into_iter().flatten();
    let calls = messages.filter_map(|message| message.get_mut("tool_calls")?.as_array_mut()).flatten();
    for call in calls {
        let text = call["function"]["arguments"].to_string();
        call["function"]["arguments"] = text.into();
        any = true;
    }
    any
}

/// The settings of the request over those of the model's makers.
fn sampling(
    asked: &SamplingOverrides,
    model: &GenerationDefaults,
    vocab_size: usize,
) -> Result<Sampling, ApiError> {
    // A model that says `do_sample: false` is greedy unless asked otherwise, one that says true has the
    // reference's default temperature, and one that says neither has what temperature it names.
    let temperature = match model.do_sample {
        Some(false) => 0.0,
        Some(true) => model.temperature.unwrap_or(1.0),
        None => model.temperature.unwrap_or(0.0),
    };
    let top_k = asked.top_k.or(model.top_k.map(i64::from)).unwrap_or(0);
    // Checked as they were given; the engine's are half as wide.
    let either = |asked: Option<f64>, model: Option<f32>| asked.map(|x| x as f32).or(model);
    let sampling = Sampling {
        temperature: either(asked.temperature, None).unwrap_or(temperature),
        top_k: usize::try_from(top_k).unwrap_or(0),
        // 0 asks for the likeliest token alone, which the smallest positive number gives.
        top_p: either(asked.top_p, model.top_p).unwrap_or(1.0).max(f32::MIN_POSITIVE),
        min_p: either(asked.min_p, model.min_p).unwrap_or(0.0),
        repetition_penalty: either(asked.repetition_penalty, model.repetition_penalty)
            .unwrap_or(1.0)
            .max(f32::MIN_POSITIVE),
        presence_penalty: either(asked.presence_penalty, None).unwrap_or(0.0),
        frequency_penalty: either(asked.frequency_penalty, None).unwrap_or(0.0),
        logit_bias: asked.logit_bias.iter().map(|&(id, bias)| (id, bias as f32)).collect(),
        seed: asked.seed.map_or_else(id::random, i64::cast_unsigned),
    };
    if let Some((id, _)) = sampling.logit_bias.iter().find(|(id, _)| *id as usize >= vocab_size) {
        let message = format!("logit_bias names token {id}; this model has {vocab_size}");
        return Err(ApiError::field("logit_bias", message));
    }
    Ok(sampling)
}

/// A constraint for each choice, if the answer has a form.
fn constraints(model: &Model, turn: &Turn, tools: &[Tool], tail: &str) -> Result<Vec<Bound>, ApiError> {
    let Some((shape, field)) = shape(model, turn, tools)? else { return Ok(Vec::new()) };
    let vocabulary = model.grammar()?;
    let tokenizer = need(model.text().tokenizer.as_ref())?;
    let chat = matches!(turn.input, TurnInput::Chat { .. });
    let reasoning = model.format().reasoning.as_ref().filter(|_| chat && turn.thinking != Some(false));
    let reasoning = reasoning.map(|(open, close)| (open.as_str(), close.as_str()));
    let ends_with = |mark: &str| tail.trim_end().ends_with(mark.trim());
    // What the template has closed stays closed.
    let reasoning = reasoning.filter(|(_, close)| !ends_with(close));
    let open = reasoning.is_some_and(|(open, _)| ends_with(open));
    (0..turn.n)
        .map(|_| {
            let inner = Constraint::new(vocabulary, &shape, &GrammarLimits::default())
                .map_err(|error| ApiError::from(error).at(field))?;
            let inner = Follower::new(inner)
                .map_err(|error| ApiError::internal(format!("no thread for the answer's form: {error}")))?;
            let ends = &model.text().end_tokens;
            Ok(Bound::new(inner, tokenizer, model.vocab_size(), ends, reasoning, open))
        })
        .collect()
}

/// The form of the answer, and the field that asks for it.
fn shape(model: &Model, turn: &Turn, tools: &[Tool]) -> Result<Option<(Shape, &'static str)>, ApiError> {
    let harmony = model.format().tools == ToolFormat::Harmony;
    let answer = match &turn.format {
        Format::Text => None,
        Format::JsonObject => Some(json!({"type": "object"})),
        Format::JsonSchema { schema, .. } => Some(schema.clone()),
    };
    let answer = answer.map(|schema| CallShape {
        prefix: if harmony { "<|channel|>final<|message|>".to_owned() } else { String::new() },
        schema,
        suffix: String::new(),
        tags: None,
    });
    let call = |tool: &Tool| {
        let (name, parameters) = (tool.name.clone(), tool.parameters.clone());
        model.format().tools.call_shape(&ToolSpec { name, parameters })
    };
    let calls = |wanted: &dyn Fn(&Tool) -> bool, field| {
        let calls: Option<Vec<_>> = tools.iter().filter(|tool| wanted(tool)).map(call).collect();
        let message = "how this model writes calls is not known, so they cannot be enforced: use tool_choice `auto`, without \
                       response_format";
        calls.ok_or_else(|| ApiError::field(field, message))
    };
    Ok(match (&turn.tool_choice, answer) {
        (ToolChoice::Required, _) => Some((Shape::Calls(calls(&|_| true, "tool_choice")?), "tools")),
        (ToolChoice::Named(name), _) => {
            Some((Shape::Calls(calls(&|tool| tool.name == *name, "tool_choice")?), "tools"))
        }
        (_, None) => None,
        // Either the answer or a call.
        (ToolChoice::Auto, Some(answer)) if !tools.is_empty() => {
            let mut either = vec![answer];
            either.extend(calls(&|_| true, "response_format")?);
            Some((Shape::Calls(either), "response_format"))
        }
        (_, Some(answer)) if harmony => Some((Shape::Calls(vec![answer]), "response_format")),
        (_, Some(answer)) => Some((Shape::JsonSchema(answer.schema), "response_format")),
    })
}
