//! What published templates write of an assistant's turn is read back: the same calls, reasoning and text.

#![allow(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "a test may fail by panicking and say what it skips"
)]

mod common;

use serde_json::{Value as Json, json};
use smoe_text::{ChatTemplate, ReplyEvent, ReplyFormat, ReplyParser, TemplateInput, ToolFormat, ToolSpec};

/// A template, and how the turn stands in what it renders.
struct Case {
    template: &'static str,
    tools: ToolFormat,
    reasoning: Option<(&'static str, &'static str)>,
    /// Before the turn, and where the prompt ends.
    opening: &'static str,
    /// After the turn.
    ending: &'static str,
    /// What else of a turn with calls the template writes: text, reasoning, a second call.
    writes: (bool, bool, bool),
}

const THINK: Option<(&str, &str)> = Some(("<think>", "</think>"));

const CASES: [Case; 16] = [
    Case {
        template: "GLM-4.6",
        tools: ToolFormat::Glm,
        reasoning: THINK,
        opening: "<|assistant|>",
        ending: "",
        writes: (true, true, true),
    },
    Case {
        template: "GLM-4.7-Flash",
        tools: ToolFormat::Glm,
        reasoning: THINK,
        opening: "<|assistant|>",
        ending: "",
        writes: (true, true, true),
    },
    Case {
        template: "MiniMax-M2",
        tools: ToolFormat::MiniMax,
        reasoning: THINK,
        opening: "]~b]ai\n",
        ending: "[e~[\n",
        writes: (true, true, true),
    },
    Case {
        template: "Mistral-Small-3.2-24B-Instruct-2506",
        tools: ToolFormat::Mistral,
        reasoning: None,
        opening: "[/INST]",
        ending: "</s>",
        writes: (false, false, true),
    },
    Case {
        template: "Qwen-Qwen2.5-7B-Instruct",
        tools: ToolFormat::HermesJson,
        reasoning: None,
        opening: "<|im_start|>assistant\n",
        ending: "<|im_end|>\n",
        writes: (true, false, true),
    },
    Case {
        template: "Qwen-Qwen3-0.6B",
        tools: ToolFormat::HermesJson,
        reasoning: THINK,
        opening: "<|im_start|>assistant\n",
        ending: "<|im_end|>\n",
        writes: (true, true, true),
    },
    Case {
        template: "Qwen3-Coder",
        tools: ToolFormat::Qwen3Coder,
        reasoning: None,
        opening: "<|im_start|>assistant\n",
        ending: "<|im_end|>\n",
        writes: (true, false, true),
    },
    Case {
        template: "Qwen3.5-4B",
        tools: ToolFormat::Qwen3Coder,
        reasoning: THINK,
        opening: "<|im_start|>assistant\n",
        ending: "<|im_end|>\n",
        writes: (true, true, true),
    },
    Case {
        template: "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
        tools: ToolFormat::DeepSeekV3,
        reasoning: THINK,
        opening: "<｜Assistant｜>",
        ending: "<｜end▁of▁sentence｜>",
        writes: (false, false, true),
    },
    Case {
        template: "deepseek-ai-DeepSeek-V3.1",
        tools: ToolFormat::DeepSeekV31,
        reasoning: THINK,
        opening: "<｜Assistant｜><think></think>",
        ending: "<｜end▁of▁sentence｜>",
        writes: (true, false, true),
    },
    Case {
        template: "deepseek-ai-DeepSeek-V3.2",
        tools: ToolFormat::Dsml,
        reasoning: THINK,
        opening: "<｜Assistant｜></think>",
        ending: "<｜end▁of▁sentence｜>",
        writes: (true, false, true),
    },
    Case {
        template: "google-gemma-4-31B-it",
        tools: ToolFormat::None,
        reasoning: Some(("<|channel>thought", "<channel|>")),
        opening: "<|turn>model\n",
        ending: "",
        writes: (false, false, false),
    },
    Case {
        template: "ibm-granite-granite-4.0",
        tools: ToolFormat::HermesJson,
        reasoning: None,
        opening: "<|start_of_role|>assistant<|end_of_role|>",
        ending: "<|end_of_text|>\n",
        writes: (true, false, true),
    },
    Case {
        template: "meta-llama-Llama-3.1-8B-Instruct",
        tools: ToolFormat::Llama3Json,
        reasoning: None,
        opening: "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ending: "<|eot_id|>",
        writes: (false, false, false),
    },
    Case {
        template: "moonshotai-Kimi-K2",
        tools: ToolFormat::Kimi,
        reasoning: None,
        opening: "<|im_assistant|>assistant<|im_middle|>",
        ending: "<|im_end|>",
        writes: (true, false, true),
    },
    Case {
        template: "openai-gpt-oss-120b",
        tools: ToolFormat::Harmony,
        reasoning: None,
        opening: "<|start|>assistant",
        ending: "<|call|>",
        writes: (false, true, false),
    },
];

const QUESTION: &str = "What is to be done?";
const SAID: &str = "I look it up:\n\n 1. here";
const THOUGHT: &str = "The user wants\n\nsomething.";

fn calls() -> [(&'static str, Json); 2] {
    let first = json!({"city": "Rome \"eterna\" 漢字 🎨\n</x> {", "days": 2, "share": 0.25, "exact": true, "none": null,
        "tags": ["a", {"b": [1, false]}], "where": {"lat": -1.5, "name": "x"}, "code": "12"});
    [("get_weather", first), ("now", json!({}))]
}

fn schema() -> Json {
    json!({"type": "object", "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "share": {"type": "number"},
        "exact": {"type": "boolean"}, "none": {"type": ["integer", "null"]}, "tags": {"type": "array"},
        "where": {"type": "object"}, "code": {"type": "string"}}})
}

impl Case {
    fn source(&self) -> Option<String> {
        let path = common::shared(&format!("compat/chat-templates/{}.jinja", self.template))?;
        Some(std::fs::read_to_string(path).unwrap())
    }

    /// The turn as the template writes it.
    fn turn(&self, source: &str, calls: &[(&str, Json)]) -> String {
        let (says, thinks, _) = self.writes;
        let tool_calls: Vec<Json> = calls
            .iter()
            .zip(["abcdefgh1", "abcdefgh2"])
            .map(|((name, arguments), id)| {
                json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
            })
            .collect();
        let mut turn =
            json!({"role": "assistant", "content": if says { SAID } else { "" }, "tool_calls": tool_calls});
        match self.tools {
            ToolFormat::Harmony => turn["thinking"] = json!(THOUGHT),
            ToolFormat::DeepSeekV3 => turn["content"] = Json::Null,
            _ if thinks => turn["reasoning_content"] = json!(THOUGHT),
            _ => {}
        }
        let tools: Vec<Json> = calls
            .iter()
            .map(|(name, _)| {
                let function = json!({"name": name, "description": "A tool.", "parameters": schema()});
                json!({"type": "function", "function": function})
            })
            .collect();
        let input = json!({"messages": [{"role": "user", "content": QUESTION}, turn], "tools": tools,
            "bos_token": "<s>", "eos_token": "</s>", "strftime_now": "2026-01-02 03:04:05"});
        let input = TemplateInput::from_json(&input).unwrap();
        let text = ChatTemplate::compile(source).unwrap().render(&input).unwrap();
        let (_, after) = text.split_once(QUESTION).unwrap();
        let (_, turn) = after.split_once(self.opening).unwrap();
        let end = turn.rfind(self.ending).unwrap();
        turn[..end].to_owned()
    }
}

/// What was read, put together: reasoning, text, and each call.
#[derive(Debug, Default, PartialEq)]
struct Read {
    reasoning: String,
    text: String,
    calls: Vec<(String, Json)>,
}

fn read(format: &ReplyFormat, tools: &[ToolSpec], tail: &str, reply: &str) -> Read {
    let mut parser = ReplyParser::new(format, tools, tail);
    let pieces = reply.split("").filter(|piece| !piece.is_empty());
    let mut events: Vec<ReplyEvent> = pieces.flat_map(|piece| parser.push(piece)).collect();
    events.extend(parser.finish());
    let (mut read, mut arguments) = (Read::default(), String::new());
    for event in events {
        match event {
            ReplyEvent::Reasoning(said) => read.reasoning.push_str(&said),
            ReplyEvent::Text(said) => read.text.push_str(&said),
            ReplyEvent::ToolBegin { name, .. } => read.calls.push((name, Json::Null)),
            ReplyEvent::ToolArguments { fragment, .. } => arguments.push_str(&fragment),
            ReplyEvent::ToolEnd { index } => {
                read.calls[index].1 = serde_json::from_str(&arguments).unwrap();
                arguments.clear();
            }
        }
    }
    read
}

#[test]
fn the_format_is_told_by_the_template() {
    for case in &CASES {
        let Some(source) = case.source() else { continue };
        let reasoning = case.reasoning.map(|(open, close)| (open.to_owned(), close.to_owned()));
        let expected = ReplyFormat { tools: case.tools, reasoning, answer: None };
        assert_eq!(ReplyFormat::detect(&source), expected, "{}", case.template);
    }
    assert_eq!(ReplyFormat::detect("{{ messages }}"), ReplyFormat::default());
}

/// What these formats are told by, where their templates are not at hand.
#[test]
fn the_format_is_told_by_the_markers_of_its_calls() {
    let think = ("<think>".to_owned(), "</think>".to_owned());
    let response = ("<response>".to_owned(), "</response>".to_owned());
    for (source, tools, reasoning, answer) in [
        (
            "{{ '<think>' ~ thought ~ '</think>' ~ '<minimax:tool_call>' ~ '<invoke name=' ~ '<response>' ~ '</response>' }}",
            ToolFormat::MiniMax,
            true,
            false,
        ),
        (
            "{%- set token = '｜DSML｜' -%}{{ '<' + token + 'function_calls>' }}",
            ToolFormat::Dsml,
            false,
            false,
        ),
        ("respond only with <|tool_call|> followed by a list", ToolFormat::Granite, false, false),
        (
            "{{ '<think>' ~ '</think>' ~ '<response>' ~ '</response>' ~ '<tool_call>' ~ call.arguments }}",
            ToolFormat::HermesJson,
            true,
            true,
        ),
        ("{{ '<response>' ~ '</response>' }}", ToolFormat::None, false, false),
    ] {
        let expected = ReplyFormat {
            tools,
            reasoning: reasoning.then(|| think.clone()),
            answer: answer.then(|| response.clone()),
        };
        assert_eq!(ReplyFormat::detect(source), expected, "{source}");
    }
}

#[test]
fn what_a_template_writes_is_read_back() {
    for case in CASES.iter().filter(|case| case.tools != ToolFormat::None) {
        let Some(source) = case.source() else { continue };
        let (says, thinks, twice) = case.writes;
        let calls: Vec<(&str, Json)> = calls().into_iter().take(if twice { 2 } else { 1 }).collect();
        let turn = case.turn(&source, &calls);
        let specs: Vec<ToolSpec> = calls
            .iter()
            .map(|(name, _)| ToolSpec { name: (*name).to_owned(), parameters: schema() })
            .collect();
        let expected = Read {
            reasoning: if thinks { THOUGHT.to_owned() } else { String::new() },
            text: if says { SAID.to_owned() } else { String::new() },
            calls: calls.iter().map(|(name, arguments)| ((*name).to_owned(), arguments.clone())).collect(),
        };
        let format = ReplyFormat::detect(&source);
        assert_eq!(read(&format, &specs, case.opening, &turn), expected, "{}: {turn:?}", case.template);
    }
}

/// Where each parameter is named in markup, a grammar has that markup.
#[test]
fn tags_are_what_the_template_writes() {
    for case in CASES.iter().filter(|case| case.tools != ToolFormat::None) {
        let Some(source) = case.source() else { continue };
        let tool = ToolSpec { name: "now".into(), parameters: schema() };
        let shape = case.tools.call_shape(&tool).unwrap();
        let Some(tags) = shape.tags else { continue };
        let written = |lines: bool| {
            let text = [
                &shape.prefix,
                &format!("{}city{}Rome{}", tags.before_key, tags.after_key, tags.after_value),
                &format!("{}days{}2{}", tags.before_key, tags.after_json_key, tags.after_value),
                &shape.suffix,
            ]
            .map(String::as_str)
            .concat();
            if lines { text } else { text.replace('\n', "") }
        };
        let turn = case.turn(&source, &[("now", json!({"city": "Rome", "days": 2}))]);
        let ends = turn.ends_with(&written(true)) || (tags.lines_optional && turn.ends_with(&written(false)));
        assert!(ends, "{}: {turn:?} ends not with {:?}", case.template, written(true));
    }
}

#[test]
fn a_frame_is_what_the_template_writes() {
    let formats = [
        ToolFormat::HermesJson,
        ToolFormat::DeepSeekV3,
        ToolFormat::DeepSeekV31,
        ToolFormat::Kimi,
        ToolFormat::Llama3Json,
    ];
    for case in CASES.iter().filter(|case| formats.contains(&case.tools)) {
        let Some(source) = case.source() else { continue };
        let turn = case.turn(&source, &[("now", json!({"at": 1}))]);
        let (before, after) = case.tools.call_frame("now").unwrap();
        let written = format!("{before}{{\"at\": 1}}{after}");
        assert!(turn.ends_with(&written), "{}: {turn:?} ends not with {written:?}", case.template);
    }
}
