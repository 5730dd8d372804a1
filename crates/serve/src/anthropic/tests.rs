use std::time::Duration;

use proptest::prelude::*;
use serde_json::{Value as Json, json};

use super::events::{Event, Events, Message};
use super::request::Request;
use crate::error::ApiError;
use crate::turn::{Delta, Format, Phase, Reason, Reply, ReplyCall, ToolChoice, Turn, TurnInput, TurnUsage};

fn turn(extra: Json) -> Result<Turn, ApiError> {
    let mut body = json!({
        "model": "m", "max_tokens": 100, "messages": [{"role": "user", "content": "hi"}],
    });
    for (name, value) in extra.as_object().unwrap() {
        body[name.as_str()] = value.clone();
    }
    serde_json::from_value::<Request>(body).map_err(|error| ApiError::invalid(error.to_string()))?.turn()
}

fn messages(extra: Json) -> Vec<Json> {
    let TurnInput::Chat { messages, .. } = turn(extra).unwrap().input else { panic!("no chat") };
    messages
}

#[test]
fn a_conversation_with_tools_becomes_openais() {
    let got = messages(json!({
        "system": [
            {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "Be kind."},
        ],
        "messages": [
            {"role": "user", "content": "Weather?"},
            {"role": "user", "content": [{"type": "text", "text": "In Rome."}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "A tool.", "signature": "s-moe"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I "},
                {"type": "text", "text": "look."},
                {"type": "tool_use", "id": "a", "name": "get", "input": {"at": "Rome"}},
                {"type": "tool_use", "id": "b", "name": "log", "input": {}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "b", "is_error": true, "content": "disk full"},
                {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "18"}]},
                {"type": "tool_result", "tool_use_id": "gone"},
                {"type": "text", "text": "And?"},
            ]},
            {"role": "system", "content": "Hurry."},
        ],
    }));
    let call = |id: &str, name: &str, arguments: &str| {
        let function = json!({"name": name, "arguments": arguments});
        json!({"id": id, "type": "function", "function": function})
    };
    let expected = [
        json!({"role": "system", "content": "Be brief.\n\nBe kind."}),
        json!({"role": "user", "content": "Weather?\n\nIn Rome."}),
        json!({
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "A tool.",
            "tool_calls": [call("a", "get", "{\"at\":\"Rome\"}"), call("b", "log", "{}")],
        }),
        json!({"role": "tool", "tool_call_id": "b", "content": "Error: disk full", "name": "log"}),
        json!({"role": "tool", "tool_call_id": "a", "content": "18", "name": "get"}),
        json!({"role": "tool", "tool_call_id": "gone", "content": ""}),
        json!({"role": "user", "content": "And?"}),
        json!({"role": "system", "content": "Hurry."}),
    ];
    assert_eq!(got, expected);
}

#[test]
fn settings_are_taken_over() {
    let turn = turn(json!({
        "temperature": 0.5, "top_p": 0.9, "top_k": 40, "stop_sequences": ["a", "b"],
        "metadata": {"user_id": "u"}, "service_tier": "auto",
        "output_config": {"effort": "max", "format": {"type": "json_schema", "schema": {"type": "object"}}},
        "tools": [{"name": "get", "description": "gets", "input_schema": {"type": "object"}}],
    }))
    .unwrap();
    assert_eq!((turn.model.as_str(), turn.n, turn.max_tokens, turn.cut_to_fit), ("m", 1, Some(100), true));
    let sampling = &turn.sampling;
    assert_eq!((sampling.temperature, sampling.top_p, sampling.top_k), (Some(0.5), Some(0.9), Some(40)));
    assert_eq!(turn.stop, ["a", "b"]);
    assert_eq!(turn.template["reasoning_effort"], "high");
    assert_eq!(
        turn.format,
        Format::JsonSchema { name: "output".to_owned(), schema: json!({"type": "object"}) }
    );
    let TurnInput::Chat { tools, .. } = turn.input else { panic!("no chat") };
    assert_eq!(tools[0].name, "get");
    assert_eq!(tools[0].description.as_deref(), Some("gets"));
    assert_eq!(tools[0].parameters, json!({"type": "object"}));
}

#[test]
fn every_way_to_choose_tools_and_to_think_is_read() {
    for (choice, expected, parallel) in [
        (json!(null), ToolChoice::Auto, true),
        (json!({"type": "auto"}), ToolChoice::Auto, true),
        (json!({"type": "auto", "disable_parallel_tool_use": true}), ToolChoice::Auto, false),
        (json!({"type": "any", "disable_parallel_tool_use": false}), ToolChoice::Required, true),
        (json!({"type": "tool", "name": "f"}), ToolChoice::Named("f".to_owned()), true),
        (json!({"type": "none"}), ToolChoice::None, true),
    ] {
        let turn = turn(json!({"tool_choice": choice})).unwrap();
        assert_eq!((turn.tool_choice, turn.parallel_tool_calls), (expected, parallel));
    }
    for (thinking, expected) in [
        (json!(null), None),
        (json!({"type": "enabled", "budget_tokens": 2048}), Some(true)),
        (json!({"type": "adaptive"}), Some(true)),
        (json!({"type": "disabled"}), Some(false)),
    ] {
        assert_eq!(turn(json!({"thinking": thinking})).unwrap().thinking, expected);
    }
}

#[test]
fn what_makes_no_sense_is_refused() {
    let said = |content: Json| json!({"messages": [{"role": "user", "content": content}]});
    let result = |content: Json| json!([{"type": "tool_result", "tool_use_id": "a", "content": content}]);
    for (body, word) in [
        (json!({"messages": []}), "one of the user's"),
        (json!({"messages": [{"role": "assistant", "content": "The answer is ("}]}), "one of the user's"),
        (json!({"messages": [{"role": "tool", "content": "x"}]}), "unknown variant `tool`"),
        (said(json!([{"type": "image", "source": {}}])), "unknown variant `image`"),
        (said(json!([{"type": "thinking", "thinking": "x"}])), "text and tool results"),
        (said(json!(7)), "a string or a list of content blocks"),
        (said(result(json!([{"type": "redacted_thinking"}]))), "only text"),
        (json!({"tools": [{"name": "a b", "input_schema": {}}]}), "a name must be"),
        (json!({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}), "web_search_20250305"),
        (json!({"tools": [{"name": "f"}]}), "input_schema"),
        (json!({"tool_choice": {"type": "tool"}}), "missing field `name`"),
        (json!({"max_tokens": "many"}), "invalid type"),
    ] {
        let error = turn(body.clone()).unwrap_err();
        assert!(error.message.contains(word), "{body}: {}", error.message);
        assert_eq!(error.status.as_u16(), 400);
    }
    let body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
    let request: Request = serde_json::from_value(body).unwrap();
    assert!(request.max_tokens().unwrap_err().message.contains("required"));
    assert!(request.turn().is_ok(), "to count tokens no limit is needed");
}

fn usage(prompt: usize, cached: usize, completion: usize) -> TurnUsage {
    let job = smoe_engine::Usage {
        prompt,
        cached,
        completion,
        decode: Duration::from_secs(1),
        ..Default::default()
    };
    TurnUsage { job, reasoning: 0 }
}

/// The same, as it is told.
fn used(input: usize, cached: usize, output: usize) -> Json {
    json!({
        "input_tokens": input,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": output,
    })
}

fn events() -> Events {
    Events::new(Message::new("msg_1".to_owned(), "m".to_owned()), 50, "req_1".to_owned())
}

fn told(deltas: Vec<Delta>) -> Vec<Json> {
    let mut events = events();
    deltas.into_iter().flat_map(|delta| events.push(delta)).map(|event| event.data()).collect()
}

fn text(text: &str) -> Delta {
    Delta::Text { choice: 0, text: text.to_owned(), logprobs: Vec::new() }
}

fn reasoning(text: &str) -> Delta {
    Delta::Reasoning { choice: 0, text: text.to_owned() }
}

fn begin(index: usize, id: &str, name: &str) -> Delta {
    Delta::ToolBegin { choice: 0, index, id: id.to_owned(), name: name.to_owned() }
}

fn arguments(index: usize, fragment: &str) -> Delta {
    Delta::ToolArguments { choice: 0, index, fragment: fragment.to_owned() }
}

fn end(reason: Reason) -> Delta {
    Delta::End { choice: 0, reason, usage: usage(20, 12, 9) }
}

#[test]
fn an_answer_is_told_block_by_block() {
    let got = told(vec![
        Delta::Phase(Phase::Decode),
        Delta::Accepted { prompt_tokens: 20, echo: None },
        reasoning("Hm"),
        reasoning("."),
        text("I look."),
        begin(0, "call_a", "get"),
        arguments(0, "{\"at\":"),
        arguments(0, "\"Rome\"}"),
        begin(1, "call_b", "get"),
        arguments(1, "{}"),
        end(Reason::ToolCalls),
    ]);
    let start = |index, block| json!({"type": "content_block_start", "index": index, "content_block": block});
    let delta = |index, delta| json!({"type": "content_block_delta", "index": index, "delta": delta});
    let stop = |index| json!({"type": "content_block_stop", "index": index});
    let expected = [
        json!({"type": "message_start", "message": {
            "id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": [],
            "stop_reason": null, "stop_sequence": null,
            "usage": used(20, 0, 0),
        }}),
        start(0, json!({"type": "thinking", "thinking": "", "signature": ""})),
        delta(0, json!({"type": "thinking_delta", "thinking": "Hm"})),
        delta(0, json!({"type": "thinking_delta", "thinking": "."})),
        delta(0, json!({"type": "signature_delta", "signature": "s-moe"})),
        stop(0),
        start(1, json!({"type": "text", "text": ""})),
        delta(1, json!({"type": "text_delta", "text": "I look."})),
        stop(1),
        start(2, json!({"type": "tool_use", "id": "call_a", "name": "get", "input": {}})),
        delta(2, json!({"type": "input_json_delta", "partial_json": "{\"at\":"})),
        delta(2, json!({"type": "input_json_delta", "partial_json": "\"Rome\"}"})),
        stop(2),
        start(3, json!({"type": "tool_use", "id": "call_b", "name": "get", "input": {}})),
        delta(3, json!({"type": "input_json_delta", "partial_json": "{}"})),
        stop(3),
        json!({
            "type": "message_delta",
            "delta": {"stop_reason": "tool_use", "stop_sequence": null},
            "usage": used(8, 12, 9),
        }),
        json!({"type": "message_stop"}),
    ];
    assert_eq!(got, expected);
}

#[test]
fn every_end_has_its_reason() {
    for (reason, expected, sequence) in [
        (Reason::Stop, "end_turn", json!(null)),
        (Reason::StopString("END".to_owned()), "stop_sequence", json!("END")),
        (Reason::ToolCalls, "tool_use", json!(null)),
        // 9 of 50.
        (Reason::Length, "model_context_window_exceeded", json!(null)),
    ] {
        let got = told(vec![Delta::Accepted { prompt_tokens: 20, echo: None }, end(reason)]);
        assert_eq!(got[1]["delta"], json!({"stop_reason": expected, "stop_sequence": sequence}));
    }
    let full = Delta::End { choice: 0, reason: Reason::Length, usage: usage(20, 0, 50) };
    assert_eq!(told(vec![full])[1]["delta"]["stop_reason"], "max_tokens");
}

#[test]
fn a_failure_ends_the_stream_in_anthropics_words() {
    let got = told(vec![text("a"), Delta::Error(ApiError::busy(3)), text("b"), end(Reason::Stop)]);
    assert_eq!(got.len(), 4);
    assert_eq!(got[3]["type"], "error");
    assert_eq!(got[3]["error"]["type"], "rate_limit_error");
    assert_eq!(got[3]["request_id"], "req_1");
}

#[test]
fn a_message_in_one_piece_has_its_blocks_in_order() {
    let call = |arguments: &str| ReplyCall {
        id: "call_a".to_owned(),
        name: "get".to_owned(),
        arguments: arguments.to_owned(),
    };
    let reply = Reply {
        reasoning: "Hm.".to_owned(),
        text: "I look.".to_owned(),
        calls: vec![call("{\"at\":\"Rome\"}"), call("{\"at\":\"Ro")],
        reason: Some(Reason::Length),
        usage: usage(20, 12, 50),
        ..Reply::default()
    };
    let message = Message::new("msg_1".to_owned(), "m".to_owned()).with(reply, 50);
    let expected = json!({
        "id": "msg_1", "type": "message", "role": "assistant", "model": "m",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "s-moe"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "call_a", "name": "get", "input": {"at": "Rome"}},
            {"type": "tool_use", "id": "call_a", "name": "get", "input": {}},
        ],
        "stop_reason": "max_tokens", "stop_sequence": null,
        "usage": used(8, 12, 50),
    });
    assert_eq!(serde_json::to_value(message).unwrap(), expected);
}

fn any_delta() -> impl Strategy<Value = Delta> {
    prop_oneof![
        Just(Delta::Accepted { prompt_tokens: 3, echo: None }),
        "[a-z]{0,3}".prop_map(|piece| text(&piece)),
        "[a-z]{0,3}".prop_map(|piece| reasoning(&piece)),
        (0..3usize).prop_map(|index| begin(index, "id", "f")),
        (0..3usize, "[a-z]{0,3}").prop_map(|(index, piece)| arguments(index, &piece)),
        prop_oneof![Just(Reason::Stop), Just(Reason::Length), Just(Reason::ToolCalls)].prop_map(end),
        Just(Delta::Error(ApiError::internal("x"))),
        Just(Delta::Phase(Phase::Queued { ahead: 1 })),
    ]
}

proptest! {
    /// Whatever comes, in whatever order: clients that keep a stack of one block can follow.
    #[test]
    fn any_course_makes_a_well_formed_stream(deltas in prop::collection::vec(any_delta(), 0..40)) {
        let mut events = events();
        let (mut begun, mut open, mut blocks, mut over, mut complete) = (false, None, 0, false, false);
        for event in deltas.into_iter().flat_map(|delta| events.push(delta)) {
            prop_assert!(!over, "{event:?} after the end");
            match event.data()["type"].as_str().unwrap() {
                "message_start" => {
                    prop_assert!(!begun);
                    begun = true;
                }
                "error" => over = true,
                "content_block_start" => {
                    let Event::ContentBlockStart { index, content_block } = &event else { panic!() };
                    prop_assert!(begun && !complete && open.is_none() && *index == blocks);
                    open = Some(serde_json::to_value(content_block).unwrap()["type"].clone());
                }
                "content_block_delta" => {
                    let data = event.data();
                    let fits = match data["delta"]["type"].as_str().unwrap() {
                        "text_delta" => "text",
                        "thinking_delta" | "signature_delta" => "thinking",
                        "input_json_delta" => "tool_use",
                        other => panic!("{other}"),
                    };
                    prop_assert!(data["index"] == blocks && open == Some(json!(fits)), "{data}");
                }
                "content_block_stop" => {
                    prop_assert!(open.take().is_some() && event.data()["index"] == blocks);
                    blocks += 1;
                }
                "message_delta" => {
                    prop_assert!(begun && open.is_none() && !complete);
                    complete = true;
                }
                "message_stop" => {
                    prop_assert!(complete);
                    over = true;
                }
                other => panic!("{other}"),
            }
        }
    }
}
