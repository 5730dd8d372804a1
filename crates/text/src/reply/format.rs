//! How a family writes its replies: found in its chat template, as data for the parser.

use serde_json::Value as Json;

use super::envelope::Envelope;
use super::harmony;
use super::header::Header;
use super::tagged::{self, Tagged};
use super::{State, ToolSpec};
use crate::constrain::{CallShape, ParameterTags};
use crate::tokenizer::Tokenizer;

/// How a model writes reasoning and calls.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReplyFormat {
    /// How it calls tools.
    pub tools: ToolFormat,
    /// The markers around its reasoning, if it has such; Harmony's channels need none.
    pub reasoning: Option<(String, String)>,
    /// The markers around its answer, in families that set it apart from the reasoning so.
    pub answer: Option<(String, String)>,
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
    /// Granite up to 3: `<|tool_call|>[{"name": "..", "arguments": {..}}, ..]`.
    Granite,
    /// MiniMax M2: `<invoke name="NAME">\n<parameter name="KEY">VALUE</parameter>\n</invoke>`, one or more between
    /// `<minimax:tool_call>\n` and `\n</minimax:tool_call>`.
    MiniMax,
    /// DeepSeek V3.2: the same with `｜DSML｜` in every tag, `function_calls` around, and `string="true"` or `"false"`
    /// in each parameter.
    Dsml,
}

/// Markers and what they are.
pub(super) type Marks = &'static [(&'static str, Mark)];

/// What a marker is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mark {
    ReasoningOpen,
    ReasoningClose,
    AnswerOpen,
    AnswerClose,
    /// Begins a call.
    Open,
    /// Begins what may be a call in code.
    Code,
    /// Begins a call's name within the marker of a call, perhaps without it.
    Function,
    NameEnd,
    /// Has no content of its own and is dropped wherever it stands.
    Stray,
    CallEnd,
    Separator,
    Arguments,
    CallId,
    /// A parameter begins.
    Key,
    KeyEnd,
    /// The same, and says that the value is a string.
    StringKeyEnd,
    /// The same, and says that the value is JSON.
    JsonKeyEnd,
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

const MINIMAX: Marks = &[("<minimax:tool_call>", Mark::Open)];

const DSML: Marks = &[("<｜DSML｜function_calls>", Mark::Open)];

impl ReplyFormat {
    /// The format that a chat template writes, and so its model.
    pub fn detect(template_source: &str) -> Self {
        let has = |text: &str| template_source.contains(text);
        let tools = if has("<|channel|>") && has("<|message|>") {
            ToolFormat::Harmony
        } else if has("<|tool_call_begin|>") {
            ToolFormat::Kimi
        } else if has("<minimax:tool_call>") {
            ToolFormat::MiniMax
        } else if has("｜DSML｜") && has("function_calls") {
            ToolFormat::Dsml
        } else if has("<｜tool▁call▁begin｜>") {
            if has("```json") { ToolFormat::DeepSeekV3 } else { ToolFormat::DeepSeekV31 }
        } else if has("[TOOL_CALLS]") {
            if has("[ARGS]") { ToolFormat::Mistral } else { ToolFormat::MistralList }
        } else if has("<arg_key>") {
            ToolFormat::Glm
        } else if has("<function=") && has("<parameter=") {
            ToolFormat::Qwen3Coder
        } else if has("<|tool_call|>") {
            ToolFormat::Granite
        } else if has("<tool_call>") && has("arguments") {
            ToolFormat::HermesJson
        } else if has("{\"name\": ") && has("\"parameters\": ") {
            ToolFormat::Llama3Json
        } else {
            ToolFormat::None
        };
        let pairs = [("[THINK]", "[/THINK]"), ("<think>", "</think>"), ("<|channel>thought", "<channel|>")];
        let pair = pairs.into_iter().find(|(open, close)| has(open) && has(close));
        let pair = pair.filter(|_| tools != ToolFormat::Harmony);
        // MiniMax's are around a tool's result.
        let answer = pair.filter(|_| tools != ToolFormat::MiniMax).and(Some(("<response>", "</response>")));
        let owned = |(open, close): (&str, &str)| (open.to_owned(), close.to_owned());
        ReplyFormat {
            tools,
            reasoning: pair.map(owned),
            answer: answer.filter(|(open, close)| has(open) && has(close)).map(owned),
        }
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
            ToolFormat::None
            | ToolFormat::Qwen3Coder
            | ToolFormat::Glm
            | ToolFormat::MiniMax
            | ToolFormat::Dsml => return None,
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
            ToolFormat::Granite => (format!("<|tool_call|>[{{\"name\": {quoted}, \"arguments\": "), "}]"),
        };
        Some((prefix, suffix.to_owned()))
    }

    /// The form of a reply that is one call of this tool; `None` if it calls none, or in no way known here.
    ///
    /// Harmony's is a reply's beginning, as with [`ToolFormat::call_frame`].
    pub fn call_shape(&self, tool: &ToolSpec) -> Option<CallShape> {
        let (name, schema) = (&tool.name, tool.parameters.clone());
        if let Some((prefix, suffix)) = self.call_frame(name) {
            return Some(CallShape { prefix, schema, suffix, tags: None });
        }
        let never = self.style()?.value.iter().map(|(mark, _)| *mark).collect();
        let tags = |before_key, after_key, after_value| ParameterTags {
            before_key,
            after_key,
            after_json_key: after_key,
            after_value,
            never,
            lines_optional: false,
        };
        let (prefix, tags, suffix) = match self {
            ToolFormat::Qwen3Coder => (
                format!("<tool_call>\n<function={name}>"),
                tags("\n<parameter=", ">\n", "\n</parameter>"),
                "\n</function>\n</tool_call>",
            ),
            // From 4.7 on without the new lines.
            ToolFormat::Glm => (
                format!("<tool_call>{name}"),
                ParameterTags {
                    lines_optional: true,
                    ..tags("\n<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>")
                },
                "\n</tool_call>",
            ),
            ToolFormat::MiniMax => (
                format!("<minimax:tool_call>\n<invoke name=\"{name}\">"),
                tags("\n<parameter name=\"", "\">", "</parameter>"),
                "\n</invoke>\n</minimax:tool_call>",
            ),
            ToolFormat::Dsml => (
                format!("<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"{name}\">"),
                ParameterTags {
                    after_json_key: "\" string=\"false\">",
                    ..tags("\n<｜DSML｜parameter name=\"", "\" string=\"true\">", "</｜DSML｜parameter>")
                },
                "\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
            ),
            _ => return None,
        };
        Some(CallShape { prefix, schema, suffix: suffix.to_owned(), tags: Some(tags) })
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
            // Some write the tag of later versions before the list of earlier ones.
            ToolFormat::Granite => markup(
                &[("<|tool_call|>", Mark::Open), ("<tool_call>", Mark::Open)],
                &[("</tool_call>", Mark::Stray)],
            ),
            ToolFormat::MiniMax => Markup {
                outer: MINIMAX,
                closing: &[("<invoke name=\"", Mark::Function), ("</minimax:tool_call>", Mark::Stray)],
                ends_reasoning: MINIMAX,
            },
            ToolFormat::Dsml => Markup {
                outer: DSML,
                closing: &[
                    ("<｜DSML｜invoke name=\"", Mark::Function),
                    ("</｜DSML｜function_calls>", Mark::Stray),
                ],
                ends_reasoning: DSML,
            },
        }
    }

    /// The marks of a format that names parameters in markup.
    fn style(self) -> Option<&'static tagged::Style> {
        match self {
            ToolFormat::Qwen3Coder => Some(&tagged::QWEN),
            ToolFormat::Glm => Some(&tagged::GLM),
            ToolFormat::MiniMax => Some(&tagged::MINIMAX),
            ToolFormat::Dsml => Some(&tagged::DSML),
            _ => None,
        }
    }

    /// The state in which a call begins after this marker; `None` if it begins none.
    pub(super) fn call(self, mark: Mark) -> Option<State> {
        if let Some(style) = self.style() {
            return match mark {
                Mark::Open => Some(State::Tagged(Tagged::marked(style))),
                // Qwen forgets the marker before it; the others' stands directly after another call.
                Mark::Function if self == ToolFormat::Qwen3Coder => {
                    Some(State::Tagged(Tagged::perhaps(style)))
                }
                Mark::Function => Some(State::Tagged(Tagged::named(style))),
                _ => None,
            };
        }
        match (self, mark) {
            (ToolFormat::HermesJson, Mark::Open) => Some(State::Envelope(Envelope::marked())),
            (ToolFormat::DeepSeekV3 | ToolFormat::DeepSeekV31, Mark::Open) => {
                Some(State::Header(Header::deepseek()))
            }
            (ToolFormat::Kimi, Mark::Open) => Some(State::Header(Header::kimi())),
            (ToolFormat::Mistral | ToolFormat::MistralList, Mark::Open) => {
                Some(State::Header(Header::mistral()))
            }
            (ToolFormat::Granite, Mark::Open) => Some(State::Header(Header::granite())),
            (ToolFormat::Llama3Json, Mark::Code) => Some(State::Envelope(Envelope::perhaps())),
            _ => None,
        }
    }
}
