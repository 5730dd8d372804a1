//! How a family writes its replies: found in its chat template, as data for the parser.

use serde_json::Value as Json;

use super::State;
use super::envelope::Envelope;
use super::harmony;
use super::header::Header;
use super::tagged::Tagged;
use crate::tokenizer::Tokenizer;

/// How a model writes reasoning and calls.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReplyFormat {
    /// How it calls tools.
    pub tools: ToolFormat,
    /// The markers around its reasoning, if it has such; Harmony's channels need none.
    pub reasoning: Option<(String, String)>,
}

/// How a model writes a call of a tool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum ToolFormat {
    /// Not at all, or in no way known here.
    #[default]
    None,
    /// Qwen2.5, Qwen3, Hermes: `<tool_call>\n{"name": "..", "arguments": {..}}\n</tool_call>`.
    HermesJson,
    /// Qwen3-Coder:
    /// `<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>`.
    Qwen3Coder,
    /// GLM from 4.5: `<tool_call>NAME\n<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n</tool_call>`.
    Glm,
    /// DeepSeek V3 and R1: ``function<｜tool▁sep｜>NAME\n```json\n{..}\n``` `` between special tokens.
    DeepSeekV3,
    /// DeepSeek V3.1: `NAME<｜tool▁sep｜>{..}` between special tokens.
    DeepSeekV31,
    /// Kimi K2: `functions.NAME:INDEX<|tool_call_argument_begin|>{..}` between special tokens.
    Kimi,
    /// GPT-OSS: a message `to=functions.NAME` whose content is the arguments.
    Harmony,
    /// Mistral's later models: `[TOOL_CALLS]NAME[ARGS]{..}`, perhaps with `[CALL_ID]ID` after the name. Reads
    /// [`ToolFormat::MistralList`] as well.
    Mistral,
    /// Mistral's earlier models: `[TOOL_CALLS] [{"name": "..", "arguments": {..}}, ..]`. Reads
    /// [`ToolFormat::Mistral`] as well.
    MistralList,
    /// Llama 3: `{"name": "..", "parameters": {..}}` is the whole answer, perhaps after `<|python_tag|>`.
    Llama3Json,
}

/// Markers and what they are.
pub(super) type Marks = &'static [(&'static str, Mark)];

/// What a marker is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mark {
    ReasoningOpen,
    ReasoningClose,
    /// Begins a call.
    Open,
    /// Begins what may be a call in code.
    Code,
    /// Qwen: begins a call's name, perhaps without the marker before it.
    Function,
    /// Has no content of its own and is dropped wherever it stands.
    Stray,
    CallEnd,
    Separator,
    Arguments,
    CallId,
    /// A parameter begins.
    Key,
    KeyEnd,
    Value,
    ValueEnd,
    /// Harmony's.
    Start,
    Channel,
    Constrain,
    Message,
    End,
}

/// The markers of a format outside a call.
pub(super) struct Markup {
    /// Those that count everywhere in text.
    pub(super) outer: Marks,
    /// Those that count directly after a call.
    pub(super) closing: Marks,
    /// Those that also end the reasoning: special tokens that nobody reasons about.
    pub(super) ends_reasoning: Marks,
}

const DEEPSEEK: Marks = &[
    ("<｜tool▁call▁begin｜>", Mark::Open),
    ("<｜tool▁call▁end｜>", Mark::CallEnd),
    ("<｜tool▁calls▁begin｜>", Mark::Stray),
    ("<｜tool▁calls▁end｜>", Mark::Stray),
];

const KIMI: Marks = &[
    ("<|tool_call_begin|>", Mark::Open),
    ("<|tool_call_end|>", Mark::CallEnd),
    ("<|tool_calls_section_begin|>", Mark::Stray),
    ("<|tool_calls_section_end|>", Mark::Stray),
];

impl ReplyFormat {
    /// The format that a chat template writes, and so its model.
    pub fn detect(template_source: &str) -> Self {
        let has = |text: &str| template_source.contains(text);
        let tools = if has("<|channel|>") && has("<|message|>") {
            ToolFormat::Harmony
        } else if has("<|tool_call_begin|>") {
            ToolFormat::Kimi
        } else if has("<｜tool▁call▁begin｜>") {
            if has("```json") { ToolFormat::DeepSeekV3 } else { ToolFormat::DeepSeekV31 }
        } else if has("[TOOL_CALLS]") {
            if has("[ARGS]") { ToolFormat::Mistral } else { ToolFormat::MistralList }
        } else if has("<arg_key>") {
            ToolFormat::Glm
        } else if has("<function=") && has("<parameter=") {
            ToolFormat::Qwen3Coder
        } else if has("<tool_call>") && has("arguments") {
            ToolFormat::HermesJson
        } else if has("{\"name\": ") && has("\"parameters\": ") {
            ToolFormat::Llama3Json
        } else {
            ToolFormat::None
        };
        let pairs = [("[THINK]", "[/THINK]"), ("<think>", "</think>"), ("<|channel>thought", "<channel|>")];
        let pair = pairs.into_iter().find(|(open, close)| has(open) && has(close));
        let reasoning = pair.map(|(open, close)| (open.to_owned(), close.to_owned()));
        ReplyFormat { tools, reasoning: reasoning.filter(|_| tools != ToolFormat::Harmony) }
    }

    /// Whether the markers of reasoning are special tokens: no part of the text of a detokeniser that skips those.
    pub fn reasons_in_special_tokens(&self, tokenizer: &Tokenizer) -> bool {
        let is_special = |marker: &str| {
            let ids = tokenizer.encode(marker).unwrap_or_default();
            ids.into_iter().any(|id| tokenizer.is_special(id))
        };
        match &self.reasoning {
            Some((open, close)) => is_special(open) || is_special(close),
            None => self.tools == ToolFormat::Harmony,
        }
    }
}

impl ToolFormat {
    /// The text before and after the JSON arguments of a reply that is one call of `name`, where a grammar
    /// can force it; `None` where the format has no JSON object for arguments.
    ///
    /// Harmony's is a reply's beginning; after another message it needs `<|start|>assistant` before it.
    pub fn call_frame(&self, name: &str) -> Option<(String, String)> {
        let quoted = Json::from(name);
        let (prefix, suffix) = match self {
            ToolFormat::None | ToolFormat::Qwen3Coder | ToolFormat::Glm => return None,
            ToolFormat::HermesJson => {
                (format!("<tool_call>\n{{\"name\": {quoted}, \"arguments\": "), "}\n</tool_call>")
            }
            ToolFormat::DeepSeekV3 => (
                format!("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n"),
                "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            ),
            ToolFormat::DeepSeekV31 => (
                format!("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{name}<｜tool▁sep｜>"),
                "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            ),
            ToolFormat::Kimi => (
                format!(
                    "<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>"
                ),
                "<|tool_call_end|><|tool_calls_section_end|>",
            ),
            ToolFormat::Harmony => (
                format!("<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"),
                "<|call|>",
            ),
            ToolFormat::Mistral => (format!("[TOOL_CALLS]{name}[ARGS]"), ""),
            ToolFormat::MistralList => (format!("[TOOL_CALLS] [{{\"name\": {quoted}, \"arguments\": "), "}]"),
            ToolFormat::Llama3Json => (format!("{{\"name\": {quoted}, \"parameters\": "), "}"),
        };
        Some((prefix, suffix.to_owned()))
    }

    pub(super) fn markup(self) -> Markup {
        let markup = |outer, closing| Markup { outer, closing, ends_reasoning: &[] };
        match self {
            ToolFormat::None => markup(&[], &[]),
            ToolFormat::HermesJson | ToolFormat::Glm => {
                markup(&[("<tool_call>", Mark::Open)], &[("</tool_call>", Mark::Stray)])
            }
            ToolFormat::Qwen3Coder => markup(
                &[("<tool_call>", Mark::Open), ("<function=", Mark::Function)],
                &[("</tool_call>", Mark::Stray), ("</function>", Mark::Stray)],
            ),
            ToolFormat::DeepSeekV3 => {
                Markup { outer: DEEPSEEK, closing: &[("```", Mark::Stray)], ends_reasoning: DEEPSEEK }
            }
            ToolFormat::DeepSeekV31 => Markup { outer: DEEPSEEK, closing: &[], ends_reasoning: DEEPSEEK },
            ToolFormat::Kimi => Markup { outer: KIMI, closing: &[], ends_reasoning: KIMI },
            ToolFormat::Harmony => markup(harmony::CONTENT, &[]),
            ToolFormat::Mistral | ToolFormat::MistralList => markup(&[("[TOOL_CALLS]", Mark::Open)], &[]),
            ToolFormat::Llama3Json => markup(&[("<|python_tag|>", Mark::Code)], &[(";", Mark::Stray)]),
        }
    }

    /// The state in which a call begins after this marker; `None` if it begins none.
    pub(super) fn call(self, mark: Mark) -> Option<State> {
        match (self, mark) {
            (ToolFormat::HermesJson, Mark::Open) => Some(State::Envelope(Envelope::marked())),
            (ToolFormat::Qwen3Coder, Mark::Open) => Some(State::Tagged(Tagged::qwen())),
            (ToolFormat::Qwen3Coder, Mark::Function) => Some(State::Tagged(Tagged::qwen_function())),
            (ToolFormat::Glm, Mark::Open) => Some(State::Tagged(Tagged::glm())),
            (ToolFormat::DeepSeekV3 | ToolFormat::DeepSeekV31, Mark::Open) => {
                Some(State::Header(Header::deepseek()))
            }
            (ToolFormat::Kimi, Mark::Open) => Some(State::Header(Header::kimi())),
            (ToolFormat::Mistral | ToolFormat::MistralList, Mark::Open) => {
                Some(State::Header(Header::mistral()))
            }
            (ToolFormat::Llama3Json, Mark::Code) => Some(State::Envelope(Envelope::perhaps())),
            _ => None,
        }
    }
}
