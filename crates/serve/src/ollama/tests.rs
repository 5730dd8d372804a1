use std::time::{Duration, Instant};

use proptest::prelude::*;
use serde_json::{Value as Json, json};

use super::chunks::{Chunks, Form};
use super::request::{ChatRequest, GenerateRequest, ShowRequest};
use crate::error::ApiError;
use crate::turn::{Delta, Format, Reason, Reply, ReplyCall, Turn, TurnInput, TurnUsage};

fn turn(extra: Json) -> Result<Turn, ApiError> {
    let mut body = json!({"model": "m:latest", "messages": [{"role": "user", "content": "hi"}]});
    for (name, value) in extra.as_object().unwrap() {
        body[name.as_str()] = value.clone();
    }
    serde_json::from_value::<ChatRequest>(body).map_err(|error| ApiError::invalid(error.to_string()))?.turn()
}

#[test]
fn a_conversation_with_tools_becomes_openais() {
    let call = |name: &str, at: &str| json!({"function": {"name": name, "arguments": {"at": at}}});
    let turn = turn(json!({
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Weather?", "images": []},
            {"role": "assistant", "content": "", "thinking": "A tool.",
             "tool_calls": [call("get", "Rome"), call("log", "x"), call("get", "Oslo")]},
            {"role": "tool", "tool_name": "log", "content": "done"},
            {"role": "tool", "tool_name": "get", "content": "18"},
            {"role": "tool", "content": "3"},
            {"role": "tool", "tool_name": "other", "content": "?"},
        ],
        "tools": [{"type": "function", "function": {"name": "get", "description": "gets"}}],
    }))
    .unwrap();
    let said = |id: &str, name: &str, at: &str| {
        let arguments = format!("{{\"at\":\"{at}\"}}");
        json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
    };
    let expected = [
        json!({"role": "system", "content": "Be brief."}),
        json!({"role": "user", "content": "Weather?"}),
        json!({
            "role": "assistant",
            "content": "",
            "reasoning_content": "A tool.",
            "tool_calls": [
                said("call_0", "get", "Rome"), said("call_1", "log", "x"), said("call_2", "get", "Oslo"),
            ],
        }),
        json!({"role": "tool", "content": "done", "tool_call_id": "call_1", "name": "log"}),
        json!({"role": "tool", "content": "18", "tool_call_id": "call_0", "name": "get"}),
        json!({"role": "tool", "content": "3", "tool_call_id": "call_2", "name": "get"}),
        json!({"role": "tool", "content": "?", "name": "other"}),
    ];
    let TurnInput::Chat { messages, tools } = turn.input else { panic!("no chat") };
    assert_eq!(messages, expected);
    assert_eq!(tools[0].parameters, json!({"type": "object"}));
    assert_eq!(turn.model, "m");
}

#[test]
fn options_are_taken_over() {
    let turn = turn(json!({
        "format": "json", "think": "high", "keep_alive": "5m",
        "options": {
            "num_predict": 7, "temperature": 0.5, "top_k": -1, "top_p": 0.9, "min_p": 0.1, "seed": 3,
            "stop": ["a"],
            "repeat_penalty": 1.1, "num_ctx": 4096, "mirostat": 2,
        },
    }))
    .unwrap();
    assert_eq!((turn.max_tokens, turn.cut_to_fit, turn.thinking, turn.n), (Some(7), true, Some(true), 1));
    assert_eq!(turn.format, Format::JsonObject);
    let sampling = &turn.sampling;
    assert_eq!((sampling.top_k, sampling.seed, sampling.repetition_penalty), (Some(-1), Some(3), Some(1.1)));
    assert_eq!((sampling.temperature, sampling.top_p, sampling.min_p), (Some(0.5), Some(0.9), Some(0.1)));
}

#[test]
fn what_is_below_zero_is_left_open() {
    let turn =
        turn(json!({"options": {"num_predict": -2, "seed": -1}, "think": false, "format": ""})).unwrap();
    assert_eq!((turn.max_tokens, turn.sampling.seed, turn.thinking), (None, None, Some(false)));
    assert_eq!(turn.format, Format::Text);
}

#[test]
fn what_makes_no_sense_is_refused() {
    for (body, word) in [
        (json!({"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}), "images"),
        (json!({"format": "xml"}), "format"),
        (json!({"format": 3}), "format"),
        (json!({"think": "a lot"}), "expected true, false"),
        (json!({"tools": [{"function": {"name": ""}}]}), "a name must be"),
        (json!({"options": {"top_k": "x"}}), "invalid type"),
    ] {
        let error = turn(body.clone()).unwrap_err();
        assert!(error.message.contains(word), "{body}: {}", error.message);
    }
}

#[test]
fn a_model_may_be_asked_for_by_its_old_name() {
    for body in [json!({"model": "m"}), json!({"name": "m:latest", "verbose": true})] {
        assert_eq!(serde_json::from_value::<ShowRequest>(body).unwrap().model(), "m");
    }
}

fn usage() -> TurnUsage {
    let job = smoe_engine::Usage {
        prompt: 20,
        completion: 9,
        prefill: Duration::from_millis(2),
        decode: Duration::from_millis(3),
        ..Default::default()
    };
    TurnUsage { job, reasoning: 0 }
}

/// Lines without what differs from run to run.
fn timeless(mut line: Json) -> Json {
    let fields = line.as_object_mut().unwrap();
    for name in ["created_at", "total_duration", "load_duration"] {
        fields.remove(name);
    }
    line
}

fn said(choice: &str) -> Delta {
    Delta::Text { choice: 0, text: choice.to_owned(), logprobs: Vec::new() }
}

#[test]
fn an_answer_is_told_line_by_line_and_a_call_at_once() {
    let mut chunks = Chunks::new(Form::Chat, "m".to_owned(), Instant::now());
    let argument =
        |fragment: &str| Delta::ToolArguments { choice: 0, index: 0, fragment: fragment.to_owned() };
    let deltas = [
        Delta::Accepted { prompt_tokens: 20, echo: None },
        Delta::Reasoning { choice: 0, text: "Hm".to_owned() },
        said("I look."),
        Delta::ToolBegin { choice: 0, index: 0, id: "a".to_owned(), name: "get".to_owned() },
        argument("{\"at\":"),
        argument("\"Rome\"}"),
        Delta::End { choice: 0, reason: Reason::ToolCalls, usage: usage() },
        said("too late"),
    ];
    let got: Vec<Json> = deltas.into_iter().flat_map(|delta| chunks.push(delta)).map(timeless).collect();
    let line = |message: Json| json!({"model": "m", "message": message, "done": false});
    let call = json!({"function": {"name": "get", "arguments": {"at": "Rome"}}});
    let expected = [
        line(json!({"role": "assistant", "content": "", "thinking": "Hm"})),
        line(json!({"role": "assistant", "content": "I look."})),
        line(json!({"role": "assistant", "content": "", "tool_calls": [call]})),
        json!({
            "model": "m", "message": {"role": "assistant", "content": ""},
            "done": true, "done_reason": "stop",
            "prompt_eval_count": 20, "prompt_eval_duration": 2_000_000,
            "eval_count": 9, "eval_duration": 3_000_000,
        }),
    ];
    assert_eq!(got, expected);
}

#[test]
fn an_answer_in_one_piece_has_all_of_it() {
    let call = ReplyCall { id: "a".to_owned(), name: "get".to_owned(), arguments: "{\"at\":\"Ro".to_owned() };
    let reply = Reply {
        reasoning: "Hm".to_owned(),
        text: "I look.".to_owned(),
        calls: vec![call],
        reason: Some(Reason::Length),
        usage: usage(),
        ..Reply::default()
    };
    let whole = Chunks::new(Form::Chat, "m".to_owned(), Instant::now()).whole(reply);
    assert_eq!(
        whole["message"],
        json!({
            "role": "assistant", "content": "I look.", "thinking": "Hm",
            "tool_calls": [{"function": {"name": "get", "arguments": {}}}],
        })
    );
    assert_eq!((&whole["done"], &whole["done_reason"]), (&json!(true), &json!("length")));
}

#[test]
fn a_prompt_alone_is_a_conversation_unless_it_is_raw() {
    let generate = |body: Json| serde_json::from_value::<GenerateRequest>(body).unwrap();
    let turn = generate(json!({"model": "m:latest", "prompt": "Hi", "system": "Be brief."})).turn().unwrap();
    let TurnInput::Chat { messages, .. } = turn.input else { panic!("no chat") };
    let [system, user] =
        [("system", "Be brief."), ("user", "Hi")].map(|(r, c)| json!({"role": r, "content": c}));
    assert_eq!((messages, turn.model.as_str()), (vec![system, user], "m"));
    let raw =
        generate(json!({"model": "m", "prompt": "Hi", "raw": true, "options": {"seed": 3}})).turn().unwrap();
    assert!(matches!(&raw.input, TurnInput::Text(text) if text == "Hi"));
    assert_eq!(raw.sampling.seed, Some(3));
    assert_eq!(generate(json!({"model": "m:latest", "prompt": ""})).loads(), Some("m"));
    assert_eq!(generate(json!({"model": "m", "prompt": "x"})).loads(), None);
    for (field, value) in [("images", json!(["aGk="])), ("suffix", json!("x")), ("format", json!("xml"))] {
        let mut body = json!({"model": "m", "prompt": "x"});
        body[field] = value;
        assert_eq!(generate(body).turn().unwrap_err().param.as_deref(), Some(field));
    }
}

#[test]
fn the_models_own_words_at_the_end_are_gone_on_from() {
    let said = |last: Json| json!({"messages": [{"role": "user", "content": "Count."}, last]});
    assert!(turn(said(json!({"role": "assistant", "content": "One, t"}))).unwrap().continues);
    let call = json!({"function": {"name": "f"}});
    for last in [
        json!({"role": "assistant", "content": ""}),
        json!({"role": "assistant", "content": "I look.", "tool_calls": [call]}),
        json!({"role": "user", "content": "x"}),
    ] {
        assert!(!turn(said(last)).unwrap().continues);
    }
}

#[test]
fn lines_of_a_prompts_answer_have_its_text_themselves() {
    let mut chunks = Chunks::new(Form::Generate, "m".to_owned(), Instant::now());
    let deltas = [
        Delta::Reasoning { choice: 0, text: "Hm".to_owned() },
        said("I look."),
        Delta::End { choice: 0, reason: Reason::Stop, usage: usage() },
    ];
    let got: Vec<Json> = deltas.into_iter().flat_map(|delta| chunks.push(delta)).map(timeless).collect();
    assert_eq!(got[0], json!({"model": "m", "response": "", "thinking": "Hm", "done": false}));
    assert_eq!(got[1], json!({"model": "m", "response": "I look.", "done": false}));
    assert_eq!(
        (&got[2]["response"], &got[2]["done"], &got[2]["eval_count"]),
        (&json!(""), &json!(true), &json!(9))
    );
}

proptest! {
    #[test]
    fn any_course_ends_once(kinds in prop::collection::vec(0..6u8, 0..30)) {
        let mut chunks = Chunks::new(Form::Chat, "m".to_owned(), Instant::now());
        let mut over = false;
        let mut begun = 0;
        let mut told = 0;
        for kind in kinds {
            let delta = match kind {
                0 => said("x"),
                1 => Delta::Reasoning { choice: 0, text: "y".to_owned() },
                2 => Delta::ToolBegin { choice: 0, index: begun, id: String::new(), name: "f".to_owned() },
                3 => Delta::ToolArguments { choice: 0, index: 0, fragment: "{}".to_owned() },
                4 => Delta::End { choice: 0, reason: Reason::Stop, usage: usage() },
                _ => Delta::Error(ApiError::internal("z")),
            };
            begun += usize::from(kind == 2 && !over);
            for line in chunks.push(delta) {
                prop_assert!(!over);
                over = line["done"] == true || line.get("error").is_some();
                told += line["message"]["tool_calls"].as_array().map_or(0, Vec::len);
                if line["done"] == true {
                    prop_assert_eq!(told, begun);
                }
            }
        }
    }
}
