//! Replies in every format, cut in every way.

#![allow(clippy::unwrap_used, reason = "a test may fail by panicking")]

use proptest::prelude::*;
use serde_json::{Value as Json, json};
use smoe_text::ReplyEvent::{self, Reasoning, Text, ToolArguments, ToolBegin, ToolEnd};
use smoe_text::{ReplyFormat, ReplyParser, ToolFormat, ToolSpec};

const FORMATS: [ToolFormat; 14] = [
    ToolFormat::None,
    ToolFormat::HermesJson,
    ToolFormat::Qwen3Coder,
    ToolFormat::Glm,
    ToolFormat::DeepSeekV3,
    ToolFormat::DeepSeekV31,
    ToolFormat::Kimi,
    ToolFormat::Harmony,
    ToolFormat::Mistral,
    ToolFormat::MistralList,
    ToolFormat::Llama3Json,
    ToolFormat::Granite,
    ToolFormat::MiniMax,
    ToolFormat::Dsml,
];

fn tools() -> Vec<ToolSpec> {
    let parameters = json!({"type": "object", "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "exact": {"type": "boolean"}}});
    vec![
        ToolSpec { name: "weather".into(), parameters },
        ToolSpec { name: "now".into(), parameters: json!({"type": "object", "properties": {}}) },
    ]
}

fn format(tools: ToolFormat) -> ReplyFormat {
    let reasoning = Some(("<think>".into(), "</think>".into()));
    ReplyFormat { tools, reasoning, answer: Some(("<response>".into(), "</response>".into())) }
}

/// Adjacent events of a kind joined.
fn join(events: Vec<ReplyEvent>) -> Vec<ReplyEvent> {
    let mut joined: Vec<ReplyEvent> = Vec::new();
    for event in events {
        match (joined.last_mut(), &event) {
            (Some(Reasoning(said)), Reasoning(more)) | (Some(Text(said)), Text(more)) => said.push_str(more),
            (Some(ToolArguments { index, fragment }), ToolArguments { index: same, fragment: more })
                if index == same =>
            {
                fragment.push_str(more);
            }
            _ => joined.push(event),
        }
    }
    joined
}

fn stream<'a>(
    format: &ReplyFormat,
    tools: &[ToolSpec],
    tail: &str,
    pieces: impl IntoIterator<Item = &'a str>,
) -> Vec<ReplyEvent> {
    let mut parser = ReplyParser::new(format, tools, tail);
    let mut events: Vec<ReplyEvent> = pieces.into_iter().flat_map(|piece| parser.push(piece)).collect();
    events.extend(parser.finish());
    assert!(!parser.in_tool_call());
    let called = events.iter().any(|event| matches!(event, ToolBegin { .. }));
    assert_eq!(parser.saw_tool_call(), called);
    join(events)
}

/// Every character a piece.
fn characters(text: &str) -> impl Iterator<Item = &str> {
    text.split("").filter(|piece| !piece.is_empty())
}

/// The events of a reply: the same as a whole, by characters and cut once anywhere.
fn events_after(tools_format: ToolFormat, tail: &str, reply: &str) -> Vec<ReplyEvent> {
    let (format, tools) = (format(tools_format), tools());
    let events = stream(&format, &tools, tail, [reply]);
    assert_eq!(stream(&format, &tools, tail, characters(reply)), events, "by characters: {reply:?}");
    for (at, _) in reply.char_indices() {
        let cut = [&reply[..at], &reply[at..]];
        assert_eq!(stream(&format, &tools, tail, cut), events, "cut: {cut:?}");
    }
    events
}

fn events(format: ToolFormat, reply: &str) -> Vec<ReplyEvent> {
    let tail = if format == ToolFormat::Harmony { "<|end|><|start|>assistant" } else { "assistant\n" };
    events_after(format, tail, reply)
}

fn text(text: &str) -> Vec<ReplyEvent> {
    vec![Text(text.to_owned())]
}

fn reasoning(text: &str) -> Vec<ReplyEvent> {
    vec![Reasoning(text.to_owned())]
}

fn call(index: usize, name: &str, id: Option<&str>, arguments: &str) -> Vec<ReplyEvent> {
    let id = id.map(str::to_owned);
    let mut events = vec![ToolBegin { index, name: name.to_owned(), id }];
    if !arguments.is_empty() {
        events.push(ToolArguments { index, fragment: arguments.to_owned() });
    }
    events.push(ToolEnd { index });
    events
}

const ROME: &str = r#"{"city":  "Rome"}"#;
const OSLO: &str = r#"{"city": "O\"s}l{o", "at": [1, {"deep": "]"}]}"#;

#[test]
fn calls_in_json() {
    let reply = format!(
        "Let me look.\n\n<tool_call>\n{{\"name\": \"weather\", \"arguments\": {ROME}}}\n</tool_call>\n\
         <tool_call>\n{{\"arguments\": {OSLO}, \"name\": \"weather\"}}\n</tool_call>\n\nThat is all. "
    );
    let expected = [
        text("Let me look."),
        call(0, "weather", None, ROME),
        call(1, "weather", None, OSLO),
        text("That is all. "),
    ];
    assert_eq!(events(ToolFormat::HermesJson, &reply), expected.concat());
    // What models also write: other members, arguments as a string, none at all, no end.
    for (written, arguments) in [
        (r#"{"type": "function", "id": 7, "x": [{"name": "y"}], "name": "now", "parameters": {}}"#, "{}"),
        (r#"{"name": "now", "arguments": "{\"a\": \"\\n\"}"}"#, r#"{"a": "\n"}"#),
        (r#"{"arguments": "{\"a\": 1}", "name": "now"}"#, r#"{"a": 1}"#),
        (r#"{"name": "now", "arguments": null}"#, "{}"),
        (r#"{"name": "now", "arguments": ""}"#, "{}"),
        (r#"{"name": "now"}"#, "{}"),
        (r#"{"name": "n\u006fw", "arguments": {}"#, "{}"),
    ] {
        for end in ["</tool_call>", ""] {
            let reply = format!("<tool_call>{written}{end}");
            assert_eq!(events(ToolFormat::HermesJson, &reply), call(0, "now", None, arguments), "{reply}");
        }
    }
    let with_id = r#"<tool_call>{"id": "c1", "name": "now", "arguments": {}}</tool_call>"#;
    assert_eq!(events(ToolFormat::HermesJson, with_id), call(0, "now", Some("c1"), "{}"));
}

#[test]
fn what_is_no_call_is_text() {
    let long = "n".repeat(257);
    for body in [
        "Use it like this.",
        "{}",
        "{\"name\": 1, \"arguments\": {}}",
        "{\"name\": \"\", \"arguments\": {}}",
        "{\"name\": \"now\", \"arguments\": [1]}",
        "{\"name\": \"now\", \"arguments\": 1}",
        "{\"name\": \"now\", \"arguments\": \"Rome\"}",
        "{\"arguments\": {\"a\": 1}}",
        "{\"name\": \"now\" \"arguments\": {}}",
        "{'name': 'now'}",
        "{\"name\": \"now",
        "",
        &format!("{{\"name\": \"{long}\", \"arguments\": {{}}}}"),
    ] {
        for end in ["\n</tool_call>\nand more", ""] {
            let reply = format!("So:\n<tool_call> {body}{end}");
            assert_eq!(events(ToolFormat::HermesJson, &reply), text(&reply));
        }
    }
    let second = "<tool_call>\n<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>";
    let expected = [text("<tool_call>\n"), call(0, "now", None, "{}")].concat();
    assert_eq!(events(ToolFormat::HermesJson, second), expected);
}

#[test]
fn a_call_that_breaks_off_ends_where_it_is() {
    let cut = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Ro";
    assert_eq!(events(ToolFormat::HermesJson, cut), call(0, "weather", None, "{\"city\": \"Ro"));
    let unclosed = "<tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": 1</tool_call> So.";
    let expected = [call(0, "weather", None, "{\"city\": 1"), text("So.")].concat();
    assert_eq!(events(ToolFormat::HermesJson, unclosed), expected);
    // Half a value is not taken for a whole one, also where the format writes no JSON.
    let cut = "<tool_call>\n<function=weather>\n<parameter=days>\n1\n</parameter>\n<parameter=city>\nRo\"m";
    let expected = call(0, "weather", None, "{\"days\": 1, \"city\": \"Ro\\\"m");
    assert_eq!(events(ToolFormat::Qwen3Coder, cut), expected);
    let cut = "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_va";
    assert_eq!(events(ToolFormat::Glm, cut), call(0, "weather", None, "{"));
    let cut = "<tool_call>{\"name\": \"now\", \"arguments\": {}}\n</tool_ca";
    assert_eq!(events(ToolFormat::HermesJson, cut), call(0, "now", None, "{}"));
    let prose = "<tool_call>\n<function=now>\nWell,\n</function>";
    let expected = [call(0, "now", None, "{"), text("Well,\n</function>")].concat();
    assert_eq!(events(ToolFormat::Qwen3Coder, prose), expected);
}

#[test]
fn markers_within_strings_are_the_strings() {
    let arguments = r#"{"text": "<tool_call>x</tool_call> <|tool_call_end|> [TOOL_CALLS] <|call|>"}"#;
    for format in FORMATS {
        let Some((before, after)) = format.call_frame("note") else { continue };
        let known = [ToolSpec { name: "note".into(), parameters: Json::Null }];
        let plain = ReplyFormat { tools: format, ..ReplyFormat::default() };
        let reply = format!("{before}{arguments}{after}");
        let tail = "<|start|>assistant";
        let expected = stream(&plain, &known, tail, characters(&reply));
        let Some(ToolArguments { fragment, .. }) = expected.get(1) else { panic!("{expected:?}") };
        assert_eq!(fragment, arguments, "{format:?}");
        assert_eq!(expected.len(), 3, "{format:?}");
    }
}

#[test]
fn a_frame_makes_a_call() {
    let none =
        [ToolFormat::None, ToolFormat::Qwen3Coder, ToolFormat::Glm, ToolFormat::MiniMax, ToolFormat::Dsml];
    for format in FORMATS {
        let frame = format.call_frame("weather");
        assert_eq!(frame.is_none(), none.contains(&format), "{format:?}");
        let Some((before, after)) = frame else { continue };
        let id = (format == ToolFormat::Kimi).then_some("functions.weather:0");
        let reply = format!("{before}{OSLO}{after}");
        assert_eq!(events(format, &reply), call(0, "weather", id, OSLO), "{format:?}");
    }
}

#[test]
fn calls_in_tags() {
    let qwen = "I look.\n<tool_call>\n<function=weather>\n<parameter=city>\n\nRome\n is \"it\"\n\n</parameter>\n\
                <parameter=days>\n2\n</parameter>\n<parameter=exact>\nTrue\n</parameter>\n<parameter=other>\n\
                [1, 2]\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>";
    let arguments = r#"{"city": "\nRome\n is \"it\"\n", "days": 2, "exact": true, "other": [1, 2]}"#;
    let expected =
        [text("I look."), call(0, "weather", None, arguments), call(1, "now", None, "{}")].concat();
    assert_eq!(events(ToolFormat::Qwen3Coder, qwen), expected);
    // Forgotten: the call's marker, the ends of values.
    let short = "<function=weather>\n<parameter=city>\nRome\n<parameter=days>\n2\n</function>";
    let arguments = r#"{"city": "Rome", "days": 2}"#;
    assert_eq!(events(ToolFormat::Qwen3Coder, short), call(0, "weather", None, arguments));
    for prose in ["Write <function=x> here", "<function=a b>", "<tool_call> <function> </tool_call>"] {
        assert_eq!(events(ToolFormat::Qwen3Coder, prose), text(prose));
    }

    let glm = "\n<think></think>\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value> Rome\n</arg_value>\n\
               <arg_key>days</arg_key><arg_value>many</arg_value>\n</tool_call>\n<tool_call>now</tool_call>\nDone.";
    let arguments = r#"{"city": " Rome\n", "days": "many"}"#;
    let expected = [call(0, "weather", None, arguments), call(1, "now", None, "{}"), text("Done.")].concat();
    assert_eq!(events(ToolFormat::Glm, glm), expected);
    let prose = format!("<tool_call>{}<arg_key>", "n".repeat(257));
    for prose in
        [prose.as_str(), "<tool_call>is how calls begin", "<tool_call>\n</tool_call>", "<tool_call>now\n"]
    {
        assert_eq!(events(ToolFormat::Glm, prose), text(prose));
    }
}

/// A call of `now` with one parameter, `any`, in each format with tags.
fn tagged(format: ToolFormat, value: &str) -> String {
    let (before, after) = match format {
        ToolFormat::Qwen3Coder => {
            ("<tool_call>\n<function=now>\n<parameter=any>\n", "\n</parameter>\n</function>\n</tool_call>")
        }
        ToolFormat::Glm => {
            ("<tool_call>now\n<arg_key>any</arg_key>\n<arg_value>", "</arg_value>\n</tool_call>")
        }
        ToolFormat::MiniMax => (
            "<minimax:tool_call>\n<invoke name=\"now\">\n<parameter name=\"any\">",
            "</parameter>\n</invoke>\n</minimax:tool_call>",
        ),
        ToolFormat::Dsml => (
            "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"now\">\n<｜DSML｜parameter name=\"any\" string=\"false\">",
            "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        ),
        _ => panic!("{format:?} has no tags"),
    };
    format!("{before}{value}{after}")
}

const TAGGED: [ToolFormat; 4] =
    [ToolFormat::Qwen3Coder, ToolFormat::Glm, ToolFormat::MiniMax, ToolFormat::Dsml];

#[test]
fn strings_of_json_between_tags_may_have_markers() {
    let value = r#"{"a": ["</parameter></function> </tool_call>", "</arg_value> \"</invoke>"], "</minimax:tool_call>":
 "</｜DSML｜parameter> </｜DSML｜invoke> </｜DSML｜function_calls>"}"#;
    for format in TAGGED {
        let arguments = format!("{{\"any\": {value}}}");
        assert_eq!(events(format, &tagged(format, value)), call(0, "now", None, &arguments), "{format:?}");
    }
}

#[test]
fn json_that_never_closes_its_string_ends_with_its_line() {
    for format in TAGGED {
        let found = events(format, &(tagged(format, r#"{"a": "b}"#) + "So."));
        let [ToolBegin { .. }, ToolArguments { fragment, .. }, ToolEnd { .. }, Text(so)] = &found[..] else {
            panic!("{format:?}: {found:?}");
        };
        let arguments: Json = serde_json::from_str(fragment).unwrap();
        assert!(arguments["any"].as_str().unwrap().starts_with(r#"{"a": "b}"#), "{format:?}: {fragment}");
        assert_eq!(so, "So.", "{format:?}");
    }
}

#[test]
fn several_calls_between_two_markers() {
    let minimax = "I look.\n<minimax:tool_call>\n<invoke name=\"weather\">\n<parameter name=\"city\"> Rome\n is \"it\"\
                   </parameter>\n<parameter name=\"days\">2</parameter>\n<parameter name=\"exact\">true</parameter>\n\
                   <parameter name=\"other\">[1, 2]</parameter>\n</invoke>\n<invoke name=\"now\">\n</invoke>\n\
                   </minimax:tool_call>\nSo.";
    let arguments = r#"{"city": " Rome\n is \"it\"", "days": 2, "exact": true, "other": [1, 2]}"#;
    let expected =
        [text("I look."), call(0, "weather", None, arguments), call(1, "now", None, "{}"), text("So.")];
    assert_eq!(events(ToolFormat::MiniMax, minimax), expected.concat());
    // The markup of this one says what is a string: a number in quotes is one, whatever the schema says.
    let dsml = "I look.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"weather\">\n\
                <｜DSML｜parameter name=\"city\" string=\"true\"> Rome\n is \"it\"</｜DSML｜parameter>\n\
                <｜DSML｜parameter name=\"days\" string=\"true\">2</｜DSML｜parameter>\n\
                <｜DSML｜parameter name=\"exact\">True</｜DSML｜parameter>\n\
                <｜DSML｜parameter name=\"other\" string=\"false\">[1, 2]</｜DSML｜parameter>\n</｜DSML｜invoke>\n\
                <｜DSML｜invoke name=\"now\">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>So.";
    let arguments = r#"{"city": " Rome\n is \"it\"", "days": "2", "exact": true, "other": [1, 2]}"#;
    let expected =
        [text("I look."), call(0, "weather", None, arguments), call(1, "now", None, "{}"), text("So.")];
    assert_eq!(events(ToolFormat::Dsml, dsml), expected.concat());
    // What is called no string, and is no JSON, is one.
    let wrong = "<｜DSML｜function_calls><｜DSML｜invoke name=\"weather\"><｜DSML｜parameter name=\"city\" string=\"false\">\
                 Rome</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>";
    assert_eq!(events(ToolFormat::Dsml, wrong), call(0, "weather", None, r#"{"city": "Rome"}"#));
    // Forgotten: ends of values and of calls.
    let short = "<minimax:tool_call><invoke name=\"weather\">\n<parameter name=\"city\">Rome\n\
                 <parameter name=\"days\">2\n</invoke>\n<invoke name=\"now\"></minimax:tool_call>";
    let expected = [call(0, "weather", None, r#"{"city": "Rome", "days": 2}"#), call(1, "now", None, "{}")];
    assert_eq!(events(ToolFormat::MiniMax, short), expected.concat());
    let cut = "<minimax:tool_call>\n<invoke name=\"weather\">\n<parameter name=\"city\">Ro</para";
    assert_eq!(events(ToolFormat::MiniMax, cut), call(0, "weather", None, r#"{"city": "Ro</para"#));
    // Nobody reasons about these.
    let unclosed = "<think>Hm.\n<minimax:tool_call><invoke name=\"now\"></invoke></minimax:tool_call>";
    let expected = [reasoning("Hm."), call(0, "now", None, "{}")].concat();
    assert_eq!(events(ToolFormat::MiniMax, unclosed), expected);
    for (format, prose) in [
        (ToolFormat::MiniMax, "Write <invoke name=\"now\">\n</invoke> here"),
        (ToolFormat::MiniMax, "<minimax:tool_call>\n</minimax:tool_call>"),
        (ToolFormat::MiniMax, "<minimax:tool_call>\n<invoke name=\"two words\">"),
        (ToolFormat::MiniMax, "<minimax:tool_call>\n<invoke name=\"\">"),
        (ToolFormat::Dsml, "<｜DSML｜function_calls>\n<invoke name=\"now\">"),
    ] {
        assert_eq!(events(format, prose), text(prose));
    }
}

#[test]
fn calls_of_granite_are_a_list() {
    let list = format!(
        "<|tool_call|>[{{\"arguments\": {ROME}, \"name\": \"weather\"}}, {{\"name\": \"now\", \"arguments\": {{}}}}]"
    );
    let expected = [call(0, "weather", None, ROME), call(1, "now", None, "{}")].concat();
    assert_eq!(events(ToolFormat::Granite, &list), expected);
    let tagged = list.replace("<|tool_call|>", "\n<tool_call>") + "</tool_call>";
    assert_eq!(events(ToolFormat::Granite, &tagged), expected);
    let one = format!("<|tool_call|> {{\"name\": \"weather\", \"arguments\": {OSLO}}}");
    assert_eq!(events(ToolFormat::Granite, &one), call(0, "weather", None, OSLO));
    for prose in ["<|tool_call|>now", "<|tool_call|>[]", "<|tool_call|>[1]", "<tool_call> begins a call"] {
        assert_eq!(events(ToolFormat::Granite, prose), text(prose));
    }
}

#[test]
fn an_answer_may_have_markers_of_its_own() {
    let both = [reasoning("So?"), text("Yes, <response>.")].concat();
    for reply in [
        "<think>\nSo?\n</think>\n\n<response>\nYes, <response>.\n</response>\n",
        "<think>So?</think><response>Yes, <response>.</response>",
        "<think>So?</think>Yes, <response>.",
        "<think>So?</think><response>Yes, <response>.",
    ] {
        assert_eq!(events(ToolFormat::HermesJson, reply), both, "{reply}");
    }
    assert_eq!(events(ToolFormat::None, "<response>\nYes\n\n no\n</response>"), text("Yes\n\n no"));
    let plain = "Yes</response>";
    assert_eq!(events(ToolFormat::None, plain), text(plain));
    let called = "<response>\nI look.\n</response>\n<tool_call>\n{\"name\": \"now\"}\n</tool_call>\n";
    let expected = [text("I look."), call(0, "now", None, "{}")].concat();
    assert_eq!(events(ToolFormat::HermesJson, called), expected);
}

#[test]
fn calls_between_special_tokens() {
    let v3 = format!(
        "Looking.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{ROME}\n```\
         <｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{{}}\n```\
         <｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    );
    let expected = [text("Looking."), call(0, "weather", None, ROME), call(1, "now", None, "{}")].concat();
    assert_eq!(events(ToolFormat::DeepSeekV3, &v3), expected);
    let v31 = format!(
        "Looking.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{ROME}<｜tool▁call▁end｜>\
         <｜tool▁call▁begin｜>now<｜tool▁sep｜><｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    );
    assert_eq!(events(ToolFormat::DeepSeekV31, &v31), expected);
    let kimi = format!(
        "Looking.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:3<|tool_call_argument_begin|>{ROME}\
         <|tool_call_end|><|tool_call_begin|> now <|tool_call_argument_begin|>{{}}<|tool_call_end|>\
         <|tool_calls_section_end|>"
    );
    let expected = [
        text("Looking."),
        call(0, "weather", Some("functions.weather:3"), ROME),
        call(1, "now", Some("now"), "{}"),
    ];
    assert_eq!(events(ToolFormat::Kimi, &kimi), expected.concat());
    // Nobody reasons about special tokens: the reasoning is over.
    let unclosed = format!("<think>Hm.\n{}", &kimi["Looking.".len()..]);
    let expected = [reasoning("Hm."), expected[1].clone(), expected[2].clone()].concat();
    assert_eq!(events(ToolFormat::Kimi, &unclosed), expected);
    let prose = "<|tool_call_begin|>two words<|tool_call_argument_begin|>{}<|tool_call_end|>";
    assert_eq!(
        events(ToolFormat::Kimi, prose),
        text("<|tool_call_begin|>two words<|tool_call_argument_begin|>{}")
    );
}

#[test]
fn calls_of_mistral() {
    let named = format!(
        "Looking. [TOOL_CALLS]weather[CALL_ID]abc123def[ARGS]{ROME}[TOOL_CALLS]weather[ARGS]{OSLO}\
         [TOOL_CALLS]now{{}}"
    );
    let list = format!(
        "Looking.[TOOL_CALLS] [{{\"name\": \"weather\", \"arguments\": {ROME}, \"id\": \"abc123def\"}}, \
         {{\"name\": \"weather\", \"arguments\": {OSLO}}},{{\"name\": \"now\", \"arguments\": {{}}}}]"
    );
    for format in [ToolFormat::Mistral, ToolFormat::MistralList] {
        for (reply, id) in [(&named, Some("abc123def")), (&list, None)] {
            let expected = [
                text("Looking."),
                call(0, "weather", id, ROME),
                call(1, "weather", None, OSLO),
                call(2, "now", None, "{}"),
            ];
            assert_eq!(events(format, reply), expected.concat());
        }
        for prose in ["[TOOL_CALLS] are markers", "[TOOL_CALLS][1]", "[TOOL_CALLS][]", "an [ARGS] or two"] {
            assert_eq!(events(format, prose), text(prose));
        }
    }
}

#[test]
fn calls_of_llama_are_the_whole_answer() {
    let one = format!("{{\"name\": \"weather\", \"parameters\": {OSLO}}}");
    for reply in [one.clone(), format!("\n\n{one}\n"), format!("<|python_tag|>{one}")] {
        assert_eq!(events(ToolFormat::Llama3Json, &reply), call(0, "weather", None, OSLO));
    }
    let two = format!("{one}; {{\"type\": \"function\", \"name\": \"now\", \"parameters\": {{}}}}");
    let expected = [call(0, "weather", None, OSLO), call(1, "now", None, "{}")].concat();
    assert_eq!(events(ToolFormat::Llama3Json, &two), expected);
    for prose in [
        "{\"name\": \"John\", \"parameters\": {}}",
        "{\"name\": \"now\", \"age\": 3}",
        "{\"name\": \"now\"}",
        "<|python_tag|>print({\"a\": 1})",
        "{ }",
        &format!("See: {one}"),
    ] {
        assert_eq!(events(ToolFormat::Llama3Json, prose), text(prose));
    }
}

#[test]
fn channels_of_harmony() {
    let harmony = |reply: &str| events(ToolFormat::Harmony, reply);
    let answer =
        "<|channel|>analysis<|message|>Two and two.<|end|><|start|>assistant<|channel|>final<|message|>Four.";
    assert_eq!(harmony(answer), [reasoning("Two and two."), text("Four.")].concat());
    let written = [
        format!("<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ROME}<|call|>"),
        format!(" to=functions.weather<|channel|>commentary json<|message|>{ROME}<|call|>"),
        format!("<|channel|>analysis to=functions.weather code<|message|>{ROME}"),
        format!("<|channel|>commentary to=weather<|message|>\n{ROME}\n"),
    ];
    for reply in &written {
        assert_eq!(harmony(reply), call(0, "weather", None, ROME), "{reply}");
    }
    let more = format!(
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>analysis<|message|>So.<|end|><|start|>\
         assistant<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{}<|start|>assistant{}",
        written[1], "<|channel|>commentary to=functions.now<|message|><|call|>"
    );
    let calls = [call(0, "weather", None, ROME), call(1, "now", None, "{}")].concat();
    assert_eq!(harmony(&more), [reasoning("Hm.\n\nSo."), text("I look."), calls].concat());
    // Without channels, and with content that is no object.
    for prose in ["Hello, all.", "t", "to be or not", "assistants are"] {
        assert_eq!(harmony(prose), text(prose));
    }
    let code = "<|channel|>commentary to=functions.now<|message|>print(1)";
    assert_eq!(harmony(code), text(code));
    // The prompt may have begun the message.
    let tail = "<|start|>assistant<|channel|>analysis<|message|>I think";
    let events = events_after(ToolFormat::Harmony, tail, " so.<|end|>");
    assert_eq!(events, reasoning(" so."));
}

#[test]
fn reasoning_comes_apart_from_the_answer() {
    let after = |tail: &str, reply: &str| events_after(ToolFormat::HermesJson, tail, reply);
    let both = [reasoning("So?\n<tool_call>"), text("Yes.\n")].concat();
    assert_eq!(after("assistant\n", "<think>\nSo?\n<tool_call>\n</think>\n\nYes.\n"), both);
    assert_eq!(after("assistant\n<think>\n", "So?\n<tool_call></think>\n\nYes.\n"), both);
    assert_eq!(after("assistant\n<think>", "\n<think>So?\n<tool_call></think>Yes.\n"), both);
    assert_eq!(after("<think>\n\n</think>\n\n", "\nYes, <think>."), text("Yes, <think>."));
    assert_eq!(after("assistant\n", "<think>\n\n</think>\n\nYes."), text("Yes."));
    assert_eq!(after("assistant\n", "</think>Yes."), text("Yes."));
    assert_eq!(after("<think>", "So"), reasoning("So"));
    assert_eq!(after("a user wrote <think> and", "Yes.</think>"), text("Yes.</think>"));
    let marked = ReplyFormat { reasoning: Some(("[T]".into(), "[/T]".into())), ..ReplyFormat::default() };
    let events = stream(&marked, &[], "", characters("[T]So[/T] Yes"));
    assert_eq!(events, [reasoning("So"), text("Yes")].concat());
}

#[test]
fn without_tools_their_markup_is_text() {
    let reply = "<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call> \n";
    for format in FORMATS {
        let events = stream(&self::format(format), &[], "<|start|>assistant", characters(reply));
        assert_eq!(events, text(reply), "{format:?}");
    }
    let harmony =
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Four.";
    let events = stream(&format(ToolFormat::Harmony), &[], "<|start|>assistant", [harmony]);
    assert_eq!(events, [reasoning("Hm."), text("Four.")].concat());
}

#[test]
fn only_what_may_be_markup_waits() {
    let mut parser = ReplyParser::new(&format(ToolFormat::HermesJson), &tools(), "");
    assert_eq!(parser.push("Hello"), text("Hello"));
    assert_eq!(parser.push(" wor"), text(" wor"));
    assert_eq!(parser.push("ld \n"), text("ld"));
    assert_eq!(parser.push("<b>, <tool"), text(" \n<b>,"));
    assert!(!parser.in_tool_call());
    assert_eq!(parser.push("_call>"), []);
    assert!(parser.in_tool_call() && !parser.saw_tool_call());
    assert_eq!(parser.push("{\"name\": \"weather\", \"arg"), []);
    assert_eq!(parser.push("uments\": {\"ci").len(), 2);
    assert!(parser.in_tool_call() && parser.saw_tool_call());
    let fragment = |text: &str| vec![ToolArguments { index: 0, fragment: text.to_owned() }];
    assert_eq!(parser.push("ty\": \"</tool"), fragment("ty\": \"</tool"));
    assert_eq!(parser.push("x\"</"), fragment("x\""));
    assert_eq!(parser.push("x"), fragment("</x"));
    assert_eq!(parser.push("}"), [fragment("}"), vec![ToolEnd { index: 0 }]].concat());
    assert!(parser.in_tool_call() && parser.saw_tool_call());
    assert_eq!(parser.push("}\n</tool_call>\n"), []);
    assert!(!parser.in_tool_call());
    assert_eq!(parser.finish(), []);

    let mut parser = ReplyParser::new(&ReplyFormat::default(), &[], "");
    assert_eq!(parser.push("<|im \n"), text("<|im \n"));
}

#[test]
fn a_string_between_tags_comes_as_it_is_written() {
    let mut parser = ReplyParser::new(&format(ToolFormat::Qwen3Coder), &tools(), "");
    let fragment = |text: &str| vec![ToolArguments { index: 0, fragment: text.to_owned() }];
    let begin = vec![ToolBegin { index: 0, name: "weather".into(), id: None }];
    let opened = parser.push("<tool_call>\n<function=weather>\n<parameter=city>\n");
    assert_eq!(opened, [begin, fragment("{\"city\": \"")].concat());
    assert_eq!(parser.push("Ro\"m"), fragment("Ro\\\"m"));
    assert_eq!(parser.push("e\n"), fragment("e"));
    assert_eq!(parser.push("x\n"), fragment("\\nx"));
    assert_eq!(parser.push("</parameter>\n"), fragment("\""));
    // What may be more than a string waits until it is whole.
    assert_eq!(parser.push("<parameter=days>\n12"), []);
    assert_eq!(parser.push("\n</parameter>"), fragment(", \"days\": 12"));

    let mut parser = ReplyParser::new(&format(ToolFormat::Dsml), &tools(), "");
    let head = "<｜DSML｜function_calls><｜DSML｜invoke name=\"now\"><｜DSML｜parameter name=\"any\" string=\"true\">";
    assert_eq!(parser.push(head).len(), 2);
    assert_eq!(parser.push("1 <"), fragment("1 "));
    assert_eq!(parser.push("b>"), fragment("<b>"));
}

/// What a reply of one unit over and over may begin with, and such units.
const STARTS: [&str; 12] = [
    "",
    "<tool_call>",
    "<tool_call>{\"x\": ",
    "<tool_call>{\"arguments\": {",
    "<tool_call>now<arg_key>k</arg_key><arg_value>",
    "<function=now><parameter=k>",
    "<minimax:tool_call><invoke name=\"now\"><parameter name=\"k\">",
    "<｜DSML｜function_calls><｜DSML｜invoke name=\"now\"><｜DSML｜parameter name=\"k",
    "<response>",
    "<think>",
    "<|channel|>final<|message|>",
    "[TOOL_CALLS]now[ARGS]{",
];
#[rustfmt::skip]
const UNITS: [&str; 28] = [
    "<tool_call>", "<tool_call", "<", " ", "\n", "{", "[", "\"", "\\", "a", "<think>", "</think>", "[TOOL_CALLS]",
    "[TOOL_CALLS][", "<|tool_call_begin|>", "<｜tool▁call▁begin｜>", "<function=now>", "<arg_key>", "<|channel|>",
    "<|start|>", "<|channel|>final<|message|>", "{\"name\": \"now\", \"a\":", "<|tool_call|>", "<|tool_call|>[",
    "<minimax:tool_call>", "<invoke name=\"now\">", "\" string=\"", "<response>",
];

fn repeat(format: ToolFormat, start: &str, unit: &str, bytes: usize) {
    let reply = unit.repeat(bytes / unit.len());
    let mut parser = ReplyParser::new(&self::format(format), &tools(), "");
    let mut events = parser.push(start);
    events.extend(characters(&reply).flat_map(|piece| parser.push(piece)));
    events.extend(parser.finish());
    check_order(&events);
}

#[test]
fn hostile_replies_do_no_harm() {
    for format in FORMATS {
        for (index, unit) in UNITS.into_iter().enumerate() {
            for start in STARTS {
                repeat(format, start, unit, 600);
            }
            // Work that grew with the square of this would not end.
            repeat(format, STARTS[index % STARTS.len()], unit, 50_000);
        }
    }
}

/// Bits of replies, in and out of order.
fn bits() -> impl Strategy<Value = String> {
    #[rustfmt::skip]
    let fixed = [
        "<tool_call>", "</tool_call>", "<function=", "<function=weather>", "</function>", "<parameter=", "city>", "\n",
        "<parameter=city>", "</parameter>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "weather", "now",
        "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "function", "<｜tool▁sep｜>", "```json", "```",
        "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<|tool_calls_section_begin|>", "<|tool_call_begin|>",
        "functions.now:0", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>",
        "<|start|>", "assistant", "<|channel|>", "analysis", "final", "commentary", " to=functions.now", "<|message|>",
        "<|constrain|>", "json", "<|end|>", "<|return|>", "<|call|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[", "]",
        "<|tool_call|>", "<|tool_call|>[", "<minimax:tool_call>", "</minimax:tool_call>", "<invoke name=\"now\">",
        "<invoke name=\"", "weather\">", "</invoke>", "<parameter name=\"city\">", "\">", "<｜DSML｜function_calls>",
        "</｜DSML｜function_calls>", "<｜DSML｜invoke name=\"now\">", "</｜DSML｜invoke>", "<｜DSML｜parameter name=\"",
        "\" string=\"true\">", "\" string=\"false\">", "</｜DSML｜parameter>", "<response>", "</response>",
        "<|python_tag|>", ";", "<think>", "</think>", "{\"name\": \"now\", \"arguments\": ", "{\"arguments\": ",
        "{\"name\": \"weather\", \"parameters\": ", "{\"city\": \"Rome\"}", "{", "}", ", ", "\"name\": \"now\"", ": ",
        "\"", "\\", "\"a\": 1", "null", " ", "\t", "Hello", "é", "漢字", "🎨", "<", "|", "｜",
    ];
    let bit = prop_oneof![8 => prop::sample::select(fixed.to_vec()).prop_map(str::to_owned), 1 => ".{0,3}"];
    prop::collection::vec(bit, 0..24).prop_map(|bits| bits.concat())
}

fn any_format() -> impl Strategy<Value = ToolFormat> {
    prop::sample::select(FORMATS.to_vec())
}

const TAILS: [&str; 5] = [
    "",
    "<think>",
    "<think>\n\n</think>",
    "<|start|>assistant",
    "<|start|>assistant<|channel|>final<|message|>",
];

/// Calls come one after the other, each begun and ended, with its arguments in between.
fn check_order(events: &[ReplyEvent]) {
    let (mut open, mut calls) = (false, 0);
    for event in events {
        match event {
            Reasoning(said) | Text(said) => assert!(!open && !said.is_empty(), "{events:?}"),
            ToolBegin { index, name, .. } => {
                assert!(!open && *index == calls && (1..=256).contains(&name.len()), "{events:?}");
                open = true;
            }
            ToolArguments { index, fragment } => {
                assert!(open && *index == calls && !fragment.is_empty(), "{events:?}");
            }
            ToolEnd { index } => {
                assert!(open && *index == calls, "{events:?}");
                open = false;
                calls += 1;
            }
        }
    }
    assert!(!open, "{events:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn the_events_do_not_depend_on_the_cuts(
        reply in bits(),
        format in any_format(),
        tail in prop::sample::select(TAILS.to_vec()),
        offered in any::<bool>(),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..6),
    ) {
        let (format, tools) = (self::format(format), if offered { tools() } else { Vec::new() });
        let whole = stream(&format, &tools, tail, [reply.as_str()]);
        check_order(&whole);
        prop_assert_eq!(&stream(&format, &tools, tail, characters(&reply)), &whole);
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(reply.len() + 1)).collect();
        cuts.retain(|&cut| reply.is_char_boundary(cut));
        cuts.extend([0, reply.len()]);
        cuts.sort_unstable();
        let pieces = cuts.windows(2).map(|ends| &reply[ends[0]..ends[1]]);
        prop_assert_eq!(&stream(&format, &tools, tail, pieces), &whole);
    }

    #[test]
    fn text_without_markup_comes_out_as_it_is(reply in "[a-z<\\[{}\\] \n\"漢|]{0,40}", format in any_format()) {
        // Llama's markup is a brace, Harmony's header may be a word.
        let marked = format == ToolFormat::Llama3Json || (format == ToolFormat::Harmony && reply.trim().is_empty());
        prop_assume!(!marked && !reply.contains("<think>"));
        let events = stream(&self::format(format), &tools(), "<|start|>assistant", characters(&reply));
        let said: String = events
            .iter()
            .map(|event| if let Text(said) = event { said.as_str() } else { "" })
            .collect();
        prop_assert_eq!(said, reply);
    }

    #[test]
    fn calls_are_read_back(
        arguments in prop::collection::btree_map("[a-z_]{1,8}", json_value(), 0..4),
        format in any_format(),
        said in "[a-zA-Z.,漢]{0,12}",
    ) {
        let arguments = serde_json::to_string(&arguments).unwrap();
        let Some((before, after)) = format.call_frame("weather") else { return Ok(()) };
        let lead = !matches!(format, ToolFormat::Harmony | ToolFormat::Llama3Json);
        let reply = format!("{}{before}{arguments}{after}", if lead { said.as_str() } else { "" });
        let events = stream(&self::format(format), &tools(), "<|start|>assistant", characters(&reply));
        let id = (format == ToolFormat::Kimi).then_some("functions.weather:0");
        let expected = if lead && !said.is_empty() { text(&said) } else { Vec::new() };
        prop_assert_eq!(events, [expected, call(0, "weather", id, &arguments)].concat());
    }
}

fn json_value() -> impl Strategy<Value = Json> {
    let leaf = prop_oneof![
        Just(Json::Null),
        any::<bool>().prop_map(Json::from),
        any::<i64>().prop_map(Json::from),
        bits().prop_map(Json::from),
    ];
    leaf.prop_recursive(3, 12, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Json::from),
            prop::collection::btree_map("[a-z\"\\\\]{0,4}", inner, 0..4)
                .prop_map(|members| Json::Object(members.into_iter().collect())),
        ]
    })
}
