//! Anthropic's API, as its clients use it.

use serde_json::{Value as Json, json};
use smoe_serve::Config;

use crate::common::client::{Reply, request};
use crate::common::{CONTEXT, Setup, Site};

fn ask(say: &str, extra: Json) -> Json {
    let mut body = json!({
        "model": "tiny", "max_tokens": 200, "messages": [{"role": "user", "content": say}],
    });
    for (name, value) in extra.as_object().unwrap() {
        body[name.as_str()] = value.clone();
    }
    body
}

async fn message(site: &Site, say: &str, extra: Json) -> Reply {
    site.post("/v1/messages", &ask(say, extra)).await
}

/// Names and data of a stream's events, pings left out.
fn events(reply: &Reply) -> Vec<Json> {
    assert_eq!(reply.status, 200, "{}", reply.body);
    let mut name = "";
    let mut events = Vec::new();
    for line in reply.body.lines() {
        if let Some(event) = line.strip_prefix("event: ") {
            name = event;
        } else if let Some(data) = line.strip_prefix("data: ") {
            let data: Json = serde_json::from_str(data).unwrap();
            assert_eq!(data["type"], name);
            events.push(data);
        }
    }
    events.retain(|event| event["type"] != "ping");
    events
}

fn weather() -> Json {
    json!([{
        "name": "weather",
        "description": "tells the weather",
        "input_schema": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": false,
        },
    }])
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_has_every_field() {
    let site = Site::new().await;
    let whole = message(&site, "SAY:hello", json!({})).await.ok();
    assert!(whole["id"].as_str().unwrap().starts_with("msg_"));
    assert_eq!(
        (&whole["type"], &whole["role"], &whole["model"]),
        (&json!("message"), &json!("assistant"), &json!("tiny"))
    );
    assert_eq!(whole["content"], json!([{"type": "text", "text": "hello"}]));
    assert_eq!((&whole["stop_reason"], &whole["stop_sequence"]), (&json!("end_turn"), &Json::Null));
    let usage = &whole["usage"];
    assert_eq!((&usage["output_tokens"], &usage["cache_read_input_tokens"]), (&json!(6), &json!(1)));
    let counted = site.post("/v1/messages/count_tokens", &ask("SAY:hello", json!({}))).await.ok();
    assert_eq!(counted["input_tokens"], usage["input_tokens"].as_u64().unwrap() + 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_says_what_a_message_does() {
    let site = Site::new().await;
    let told = events(&message(&site, "SAY:hä?", json!({"stream": true})).await);
    assert_eq!(told[0]["type"], "message_start");
    let text: String = told.iter().filter_map(|event| event["delta"]["text"].as_str()).collect();
    assert_eq!(text, "hä?");
    let [.., delta, stop] = told.as_slice() else { panic!() };
    assert_eq!((&delta["delta"]["stop_reason"], &stop["type"]), (&json!("end_turn"), &json!("message_stop")));
    assert_eq!(delta["usage"]["output_tokens"], 5);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_goes_out_and_its_result_comes_in() {
    let site = Site::new().await;
    let say = "SAY:<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Rome\"}}\n</tool_call>";
    let whole = message(&site, say, json!({"tools": weather()})).await.ok();
    assert_eq!(whole["stop_reason"], "tool_use");
    let call = &whole["content"][0];
    assert_eq!(
        (&call["type"], &call["name"], &call["input"]),
        (&json!("tool_use"), &json!("weather"), &json!({"city": "Rome"}))
    );

    let told = events(&message(&site, say, json!({"tools": weather(), "stream": true})).await);
    let arguments: String = told.iter().filter_map(|event| event["delta"]["partial_json"].as_str()).collect();
    assert_eq!(serde_json::from_str::<Json>(&arguments).unwrap(), json!({"city": "Rome"}));

    // The scripted model says its prompt backwards: so it is seen what it was told.
    let messages = json!([
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": whole["content"]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": call["id"], "content": "18 degrees"},
        ]},
    ]);
    let next =
        message(&site, "", json!({"messages": messages, "tools": weather(), "max_tokens": 900})).await.ok();
    let told: String = next["content"][0]["text"].as_str().unwrap().chars().rev().collect();
    assert!(told.contains("<|im_start|>tool\n18 degrees"), "{told}");
    assert!(told.contains("{\"name\": \"weather\", \"arguments\": {\"city\": \"Rome\"}}"), "{told}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tool_that_must_be_called_is() {
    let site = Site::new().await;
    for choice in [json!({"type": "any"}), json!({"type": "tool", "name": "weather"})] {
        let extra = json!({"tools": weather(), "tool_choice": choice});
        let whole = message(&site, "SAY:no", extra).await.ok();
        assert_eq!(
            (&whole["stop_reason"], &whole["content"][0]["name"]),
            (&json!("tool_use"), &json!("weather"))
        );
        assert!(whole["content"][0]["input"]["city"].is_string());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_end_where_they_should() {
    let site = Site::new().await;
    let stopped = message(&site, "SAY:one STOP two", json!({"stop_sequences": ["STOP"]})).await.ok();
    assert_eq!(
        (&stopped["stop_reason"], &stopped["stop_sequence"]),
        (&json!("stop_sequence"), &json!("STOP"))
    );
    assert_eq!(stopped["content"][0]["text"], "one ");
    let short = message(&site, "SAY:hello", json!({"max_tokens": 2})).await.ok();
    assert_eq!((&short["stop_reason"], &short["content"][0]["text"]), (&json!("max_tokens"), &json!("he")));
    // More than there is room for is no error, as it is in OpenAI's API.
    let full = message(&site, &format!("SAY:{}", "x".repeat(600)), json!({"max_tokens": 32_000})).await.ok();
    assert_eq!(full["stop_reason"], "model_context_window_exceeded");
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_have_anthropics_words_and_status() {
    let site = Site::new().await;
    for (body, status, kind) in [
        (ask("x", json!({"model": "none"})), 404, "not_found_error"),
        (ask("x", json!({"max_tokens": 0})), 400, "invalid_request_error"),
        (ask("x", json!({"temperature": 3})), 400, "invalid_request_error"),
        (ask("x", json!({"tool_choice": {"type": "any"}})), 400, "invalid_request_error"),
        (ask(&"x".repeat(CONTEXT), json!({})), 400, "invalid_request_error"),
        (
            json!({"model": "tiny", "messages": [{"role": "user", "content": "x"}]}),
            400,
            "invalid_request_error",
        ),
        (json!([]), 400, "invalid_request_error"),
    ] {
        let reply = site.post("/v1/messages", &body).await;
        let error = reply.json();
        assert_eq!(
            (reply.status, &error["type"], &error["error"]["type"]),
            (status, &json!("error"), &json!(kind)),
            "{body}"
        );
        assert_eq!(error["request_id"].as_str(), reply.header("request-id"));
        assert!(!error["error"]["message"].as_str().unwrap().is_empty());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_key_comes_in_anthropics_header() {
    let config = Config { api_key: Some("secret".to_owned()), port: 0, ..Config::default() };
    let site = Site::with(Setup { config, ..Setup::default() }).await;
    let body = ask("SAY:x", json!({})).to_string();
    for (key, status) in [("secret", 200), ("wrong", 401)] {
        let headers = [("x-api-key", key), ("anthropic-version", "2023-06-01")];
        let reply = request(site.address, "POST", "/v1/messages", &headers, body.as_bytes()).await;
        assert_eq!(reply.status, status);
        let expected = if status == 401 { json!("authentication_error") } else { Json::Null };
        assert_eq!(reply.json()["error"]["type"], expected);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_list_of_models_is_anthropics_too() {
    let site = Site::new().await;
    let headers = [("anthropic-version", "2023-06-01")];
    let list = request(site.address, "GET", "/v1/models", &headers, b"").await.ok();
    assert_eq!(
        (&list["has_more"], &list["first_id"], &list["last_id"]),
        (&json!(false), &json!("tiny"), &json!("tiny"))
    );
    let model = &list["data"][0];
    assert_eq!((&model["type"], &model["display_name"]), (&json!("model"), &json!("tiny")));
    assert!(model["created_at"].as_str().unwrap().ends_with('Z'));
}
