//! OpenAI's API, field by field.

use serde_json::{Value as Json, json};

use crate::common::{CONTEXT, Setup, Site, THINKING, chat};

fn text(whole: &Json) -> &str {
    whole["choices"][0]["message"]["content"].as_str().unwrap()
}

/// The text of a stream's choice.
fn streamed(events: &[Json], choice: usize) -> String {
    let choices = events.iter().flat_map(|event| event["choices"].as_array().unwrap());
    let ours = choices.filter(|c| c["index"] == choice);
    ours.filter_map(|c| c["delta"]["content"].as_str().or(c["text"].as_str()).map(str::to_owned)).collect()
}

fn finishes(events: &[Json]) -> Vec<&str> {
    let choices = events.iter().flat_map(|event| event["choices"].as_array().unwrap());
    choices.filter_map(|choice| choice["finish_reason"].as_str()).collect()
}

fn weather() -> Json {
    json!([{"type": "function", "function": {
        "name": "weather",
        "description": "tells the weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": false,
        },
    }}])
}

#[tokio::test(flavor = "multi_thread")]
async fn a_whole_answer_has_every_field() {
    let site = Site::new().await;
    let reply = site.chat("SAY:hello, wörld", json!({})).await;
    assert_eq!(reply.header("content-type"), Some("application/json"));
    let whole = reply.ok();
    assert!(whole["id"].as_str().unwrap().starts_with("chatcmpl-"));
    assert_eq!(whole["object"], "chat.completion");
    assert!(whole["created"].as_u64().unwrap() > 1_700_000_000);
    assert_eq!(whole["model"], "tiny");
    assert!(whole["system_fingerprint"].as_str().unwrap().starts_with("fp_"));
    assert_eq!(text(&whole), "hello, wörld");
    let choice = &whole["choices"][0];
    assert_eq!((&choice["finish_reason"], &choice["logprobs"]), (&"stop".into(), &Json::Null));
    let usage = &whole["usage"];
    assert_eq!(usage["completion_tokens"], "hello, wörld".len() + 1);
    assert_eq!(
        usage["total_tokens"].as_u64(),
        Some(usage["prompt_tokens"].as_u64().unwrap() + usage["completion_tokens"].as_u64().unwrap())
    );
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_has_role_text_finish_usage_and_an_end() {
    let site = Site::new().await;
    let extra = json!({"stream": true, "stream_options": {"include_usage": true}});
    let reply = site.chat("SAY:hä?", extra).await;
    assert!(reply.header("content-type").unwrap().starts_with("text/event-stream"));
    let events = reply.events();
    assert_eq!(events[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    assert_eq!(streamed(&events, 0), "hä?");
    assert_eq!(finishes(&events), ["stop"]);
    let (last, rest) = events.split_last().unwrap();
    assert_eq!((&last["choices"], &last["usage"]["completion_tokens"]), (&json!([]), &5.into()));
    assert!(rest.iter().all(|event| event["usage"].is_null() && event["object"] == "chat.completion.chunk"));
    assert!(events.iter().all(|event| event["id"] == events[0]["id"]));
    let without = site.chat("SAY:x", json!({"stream": true})).await.events();
    assert!(without.iter().all(|event| event.get("usage").is_none()));
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_end_at_stop_strings_and_limits() {
    let site = Site::new().await;
    let stopped = site.chat("SAY:one STOP two", json!({"stop": ["nope", "STOP"]})).await.ok();
    assert_eq!(text(&stopped), "one ");
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");
    // Ended at the very token that completes it.
    assert_eq!(stopped["usage"]["completion_tokens"], "one STOP".len());
    let one = site.chat("SAY:one STOP two", json!({"stop": "ne", "stream": true})).await.events();
    assert_eq!(streamed(&one, 0), "o");
    let cut = site.chat("SAY:hello", json!({"max_tokens": 3})).await.ok();
    assert_eq!((text(&cut), &cut["choices"][0]["finish_reason"]), ("hel", &"length".into()));
    // What looked like a stop string and was none comes out.
    let held = site.chat("SAY:a ST", json!({"stop": "STOP"})).await.ok();
    assert_eq!(text(&held), "a ST");
}

#[tokio::test(flavor = "multi_thread")]
async fn several_answers_differ_by_their_seeds() {
    let site = Site::new().await;
    let whole = site.chat("SAY:{seed}", json!({"n": 3, "seed": 40})).await.ok();
    let said: Vec<&str> = whole["choices"]
        .as_array()
        .unwrap()
        .iter()
        .map(|c| c["message"]["content"].as_str().unwrap())
        .collect();
    assert_eq!(said, ["40", "41", "42"]);
    assert_eq!(whole["usage"]["completion_tokens"], 9);
    let events = site.chat("SAY:{seed}", json!({"n": 2, "seed": -1, "stream": true})).await.events();
    assert_eq!([streamed(&events, 0), streamed(&events, 1)], [u64::MAX.to_string(), "0".to_owned()]);
    assert_eq!(finishes(&events), ["stop", "stop"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn probabilities_come_with_their_text() {
    let site = Site::new().await;
    let extra = json!({"logprobs": true, "top_logprobs": 2, "stop": "!"});
    let whole = site.chat("SAY:aé!", extra.clone()).await.ok();
    let told = whole["choices"][0]["logprobs"]["content"].as_array().unwrap();
    // A byte is a token: é has two, neither of which is text; the stop string is not told.
    let tokens: Vec<&str> = told.iter().map(|entry| entry["token"].as_str().unwrap()).collect();
    assert_eq!(tokens, ["a", "\u{fffd}", "\u{fffd}"]);
    assert_eq!((&told[0]["bytes"], &told[1]["bytes"]), (&json!([97]), &Json::Null));
    assert_eq!(told[0]["logprob"], -0.5);
    let top = told[0]["top_logprobs"].as_array().unwrap();
    assert_eq!((top.len(), &top[1]["token"], &top[1]["logprob"]), (2, &"b".into(), &(-1.5).into()));
    let mut body = chat("SAY:aé!", extra);
    body["stream"] = true.into();
    let events = site.post("/v1/chat/completions", &body).await.events();
    let streamed: Vec<&Json> =
        events.iter().flat_map(|e| e["choices"][0]["logprobs"]["content"].as_array()).flatten().collect();
    assert_eq!(streamed, told.iter().collect::<Vec<_>>());
}

#[tokio::test(flavor = "multi_thread")]
async fn tools_are_called_as_the_model_likes() {
    let site = Site::new().await;
    let call =
        "SAY:Well. <tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Ulm\"}}\n</tool_call>";
    let whole = site.chat(call, json!({"tools": weather()})).await.ok();
    let message = &whole["choices"][0]["message"];
    assert_eq!(message["content"], "Well.");
    let function = &message["tool_calls"][0]["function"];
    assert_eq!(function["name"], "weather");
    let arguments: Json = serde_json::from_str(function["arguments"].as_str().unwrap()).unwrap();
    assert_eq!(arguments, json!({"city": "Ulm"}));
    assert!(message["tool_calls"][0]["id"].as_str().unwrap().starts_with("call_"));
    assert_eq!(whole["choices"][0]["finish_reason"], "tool_calls");

    let events = site.chat(call, json!({"tools": weather(), "stream": true})).await.events();
    let calls: Vec<&Json> =
        events.iter().flat_map(|e| e["choices"][0]["delta"]["tool_calls"].as_array()).flatten().collect();
    assert_eq!((&calls[0]["function"]["name"], &calls[0]["type"]), (&"weather".into(), &"function".into()));
    let arguments: String =
        calls.iter().map(|call| call["function"]["arguments"].as_str().unwrap()).collect();
    assert_eq!(serde_json::from_str::<Json>(&arguments).unwrap(), json!({"city": "Ulm"}));
    assert_eq!(finishes(&events), ["tool_calls"]);

    // Without tools, or when none may be called, it is text.
    let plain = site.chat(call, json!({"tools": weather(), "tool_choice": "none"})).await.ok();
    assert!(text(&plain).contains("<tool_call>"));
    assert_eq!(plain["choices"][0]["finish_reason"], "stop");
}

#[tokio::test(flavor = "multi_thread")]
async fn one_call_is_all_where_calls_may_not_be_parallel() {
    let site = Site::new().await;
    let one = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Ulm\"}}\n</tool_call>";
    let say = format!("SAY:{one}\n{one}");
    let calls = |whole: Json| whole["choices"][0]["message"]["tool_calls"].as_array().unwrap().len();
    assert_eq!(calls(site.chat(&say, json!({"tools": weather()})).await.ok()), 2);
    let extra = json!({"tools": weather(), "parallel_tool_calls": false});
    let whole = site.chat(&say, extra).await.ok();
    assert_eq!(whole["choices"][0]["finish_reason"], "tool_calls");
    assert_eq!(calls(whole), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_must_be_made_is_made() {
    let site = Site::new().await;
    let named = json!({"type": "function", "function": {"name": "weather"}});
    for choice in [json!("required"), named] {
        // The model would rather talk.
        let whole = site.chat("SAY:no", json!({"tools": weather(), "tool_choice": choice})).await.ok();
        let call = &whole["choices"][0]["message"]["tool_calls"][0]["function"];
        assert_eq!(call["name"], "weather", "{whole}");
        let arguments: Json = serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap();
        assert!(arguments["city"].is_string(), "{whole}");
        assert_eq!(whole["choices"][0]["finish_reason"], "tool_calls");
    }
    let unknown = json!({"type": "function", "function": {"name": "time"}});
    let error = site.chat("SAY:no", json!({"tools": weather(), "tool_choice": unknown})).await.error();
    assert_eq!(error, (400, String::new(), "tool_choice".into()));
    let error = site.chat("SAY:no", json!({"tool_choice": "required"})).await.error();
    assert_eq!(error.2, "tool_choice");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_conversation_with_calls_reaches_the_model_as_its_template_has_it() {
    let site = Site::new().await;
    let body = json!({
        "messages": [
            {"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]},
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "content": null, "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{\"city\":\"Ulm\"}"}},
            ]},
            {"role": "tool", "tool_call_id": "call_1", "content": "sunny SAY:ok"},
        ],
    });
    assert_eq!(text(&site.post("/v1/chat/completions", &body).await.ok()), "ok");
    let prompt = site.fake.ended.borrow()[0].0.clone();
    assert_eq!(
        prompt,
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nweather?<|im_end|>\n<|im_start|>assistant\n\
         <tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Ulm\"}}\n</tool_call><|im_end|>\n\
         <|im_start|>tool\nsunny SAY:ok<|im_end|>\n<|im_start|>assistant\n"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_keep_to_a_form() {
    let site = Site::new().await;
    let object = site.chat("SAY:no json", json!({"response_format": {"type": "json_object"}})).await.ok();
    assert!(serde_json::from_str::<Json>(text(&object)).unwrap().is_object());
    let schema = json!({
        "type": "object",
        "properties": {"kind": {"enum": ["x", "y"]}, "n": {"type": "integer"}},
        "required": ["kind", "n"],
        "additionalProperties": false,
    });
    let format =
        json!({"type": "json_schema", "json_schema": {"name": "s", "strict": true, "schema": schema}});
    let bound = site.chat("SAY:{\"kind\": \"z", json!({"response_format": format, "n": 2})).await.ok();
    for choice in bound["choices"].as_array().unwrap() {
        let answer: Json = serde_json::from_str(choice["message"]["content"].as_str().unwrap()).unwrap();
        assert!(answer["kind"] == "x" || answer["kind"] == "y", "{answer}");
        assert!(answer["n"].is_i64());
        assert_eq!(choice["finish_reason"], "stop");
    }
    let wrong = json!({"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "nonsense"}}});
    let error = site.chat("SAY:x", json!({"response_format": wrong})).await.error();
    assert_eq!((error.0, error.2.as_str()), (400, "response_format"));
    // With tools on offer the model may answer or call.
    let call = "SAY:<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Ulm\"}}\n</tool_call>";
    let either = json!({"response_format": {"type": "json_object"}, "tools": weather()});
    let called = site.chat(call, either.clone()).await.ok();
    assert_eq!(called["choices"][0]["finish_reason"], "tool_calls");
    let answered = site.chat("SAY:{\"a\": 1}", either).await.ok();
    assert_eq!(serde_json::from_str::<Json>(text(&answered)).unwrap(), json!({"a": 1}));
}

#[tokio::test(flavor = "multi_thread")]
async fn reasoning_is_apart_and_free_under_a_form() {
    let site = Site::with(Setup { vaults: vec![("thinker", THINKING)], ..Setup::default() }).await;
    let say = "SAY:hm, {no}\n</think>\n\nyes";
    let whole = site.chat(say, json!({"logprobs": true})).await.ok();
    let message = &whole["choices"][0]["message"];
    assert_eq!((&message["reasoning_content"], &message["content"]), (&"hm, {no}".into(), &"yes".into()));
    let told = whole["choices"][0]["logprobs"]["content"].as_array().unwrap();
    let tokens: String = told.iter().map(|entry| entry["token"].as_str().unwrap()).collect();
    assert_eq!(tokens, "yes");
    let reasoning = whole["usage"]["completion_tokens_details"]["reasoning_tokens"].as_u64().unwrap();
    // The markup around it counts.
    assert!((8..=19).contains(&reasoning), "{reasoning}");
    let events = site.chat(say, json!({"stream": true})).await.events();
    let thought: String =
        events.iter().filter_map(|e| e["choices"][0]["delta"]["reasoning_content"].as_str()).collect();
    assert_eq!((thought.as_str(), streamed(&events, 0).as_str()), ("hm, {no}", "yes"));

    let bound = site.chat(say, json!({"response_format": {"type": "json_object"}})).await.ok();
    assert_eq!(bound["choices"][0]["message"]["reasoning_content"], "hm, {no}");
    assert!(serde_json::from_str::<Json>(text(&bound)).unwrap().is_object());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_does_not_fit_is_refused_with_both_numbers() {
    let site = Site::new().await;
    let long = site.chat(&"x".repeat(CONTEXT), json!({})).await;
    assert_eq!(long.error(), (400, "context_length_exceeded".into(), "messages".into()));
    let much = site.chat("SAY:x", json!({"max_tokens": CONTEXT})).await;
    assert_eq!(much.error().1, "context_length_exceeded");
    assert!(much.body.contains("1000 tokens") && much.body.contains("1000 to follow"), "{}", much.body);
    // What is not asked for is what is left.
    let whole = site.chat("SAY:x", json!({})).await.ok();
    assert_eq!(text(&whole), "x");
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_fields_are_named() {
    let site = Site::new().await;
    for (extra, param) in [
        (json!({"temperature": 2.5}), "temperature"),
        (json!({"temperature": "hot"}), "temperature"),
        (json!({"top_p": -0.1}), "top_p"),
        (json!({"top_k": -2}), "top_k"),
        (json!({"min_p": 1.5}), "min_p"),
        (json!({"presence_penalty": 3}), "presence_penalty"),
        (json!({"frequency_penalty": -3}), "frequency_penalty"),
        (json!({"repetition_penalty": 0}), "repetition_penalty"),
        (json!({"n": 0}), "n"),
        (json!({"n": 9}), "n"),
        (json!({"max_tokens": 0}), "max_tokens"),
        (json!({"max_tokens": -1}), "max_tokens"),
        (json!({"stop": vec!["a"; 17]}), "stop"),
        (json!({"stop": ""}), "stop"),
        (json!({"stop": 5}), "stop"),
        (json!({"logit_bias": {"1": 101}}), "logit_bias"),
        (json!({"logit_bias": {"300": 1}}), "logit_bias"),
        (json!({"logprobs": true, "top_logprobs": 21}), "top_logprobs"),
        (json!({"messages": []}), "messages"),
        (json!({"messages": "hi"}), "messages"),
        (json!({"messages": [{"role": "robot", "content": "x"}]}), "messages[0].role"),
        (json!({"messages": [{"role": "user"}]}), "messages[0].content"),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
            "messages[0].content[0]",
        ),
        (json!({"messages": [{"role": "assistant", "tool_calls": [{}]}]}), "messages[0].tool_calls"),
        (json!({"tools": [{"type": "function"}]}), "tools[0]"),
        (json!({"response_format": {"type": "xml"}}), "response_format.type"),
        (json!({"stream": "yes"}), "stream"),
    ] {
        let error = site.chat("SAY:x", extra.clone()).await.error();
        assert_eq!((error.0, error.2.as_str()), (400, param), "{extra}");
    }
    let missing = site.post("/v1/chat/completions", &json!({"model": "tiny"})).await;
    assert_eq!(missing.error().0, 400);
    assert!(missing.body.contains("messages"), "{}", missing.body);
    assert_eq!(*site.fake.said.borrow(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn texts_are_completed_as_they_stand() {
    let site = Site::new().await;
    let post = async |body: Json| site.post("/v1/completions", &body).await;
    let whole = post(json!({"prompt": "SAY:abc", "echo": true})).await.ok();
    assert_eq!(
        (&whole["object"], &whole["choices"][0]["text"]),
        (&"text_completion".into(), &"SAY:abcabc".into())
    );
    assert_eq!(whole["usage"]["prompt_tokens"], 7);
    let several = post(json!({"prompt": ["SAY:a", "SAY:{seed}"], "n": 2, "seed": 7})).await.ok();
    let texts: Vec<&str> = several["choices"]
        .as_array()
        .unwrap()
        .iter()
        .map(|choice| choice["text"].as_str().unwrap())
        .collect();
    assert_eq!(texts, ["a", "a", "7", "8"]);
    assert_eq!(several["usage"]["prompt_tokens"], 5 + 10);
    let ids: Vec<u32> = "SAY:xy".bytes().map(u32::from).collect();
    let told = post(json!({"prompt": ids, "logprobs": 1})).await.ok();
    let logprobs = &told["choices"][0]["logprobs"];
    assert_eq!((&logprobs["tokens"], &logprobs["text_offset"]), (&json!(["x", "y"]), &json!([0, 1])));
    assert_eq!(logprobs["top_logprobs"], json!([{"x": -0.5}, {"y": -0.5}]));
    let events = post(json!({"prompt": ["SAY:a", "SAY:b"], "stream": true, "echo": true})).await.events();
    assert_eq!([streamed(&events, 0), streamed(&events, 1)], ["SAY:aa", "SAY:bb"]);
    assert_eq!(finishes(&events), ["stop", "stop"]);
    for (body, param) in [
        (json!({"prompt": ""}), "prompt"),
        (json!({"prompt": []}), "prompt"),
        (json!({"prompt": 5}), "prompt"),
        (json!({"prompt": "a", "suffix": "b"}), "suffix"),
        (json!({"prompt": "a", "best_of": 3}), "best_of"),
        (json!({"prompt": "a", "logprobs": 6}), "logprobs"),
        (json!({"prompt": "a", "echo": true, "logprobs": 1}), "echo"),
    ] {
        assert_eq!(post(body.clone()).await.error().2, param, "{body}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_model_is_told_what_the_request_overrides() {
    let site = Site::new().await;
    // The vault's default is 0.5; the scripted model refuses what the engine would.
    let body = json!({"temperature": 0, "top_p": 0, "top_k": -1, "logit_bias": {"5": -100}, "seed": 3});
    assert_eq!(text(&site.chat("SAY:{seed}", body).await.ok()), "3");
    let off = json!({"chat_template_kwargs": {"enable_thinking": false}});
    site.chat("SAY:x", off).await.ok();
    let ended = site.fake.ended.borrow().clone();
    assert!(!ended[0].0.contains("</think>") && ended[1].0.ends_with("<think>\n\n</think>\n\n"), "{ended:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_has_begun_is_gone_on_from() {
    let site = Site::new().await;
    let ask = async |last: Json, extra: Json| {
        let mut body = chat("SAY:x", extra);
        body["messages"] = json!([{"role": "user", "content": "Count."}, last]);
        body["continue_final_message"] = true.into();
        site.post("/v1/chat/completions", &body).await
    };
    // The prompt ends with what is to be continued: `SAY:` is then the model's own.
    let begun = json!({"role": "assistant", "content": "One, SAY: two"});
    let reply = ask(begun.clone(), json!({})).await.ok();
    assert_eq!(text(&reply), " two");
    for (last, extra) in [
        (json!({"role": "user", "content": "x"}), json!({})),
        (json!({"role": "assistant", "content": " "}), json!({})),
        (json!({"role": "assistant", "content": null}), json!({})),
        (begun, json!({"response_format": {"type": "json_object"}})),
    ] {
        let (status, _, param) = ask(last, extra).await.error();
        assert_eq!((status, param.as_str()), (400, "messages"));
    }
    let messages =
        json!([{"role": "user", "content": "Count."}, {"role": "assistant", "content": "SAY:two"}]);
    let body = json!({"model": "tiny", "max_tokens": 9, "messages": messages});
    let reply = site.post("/v1/messages", &body).await.ok();
    assert_eq!(reply["content"], json!([{"type": "text", "text": "two"}]));
    let body = json!({"model": "tiny", "stream": false, "messages": messages});
    assert_eq!(site.post("/api/chat", &body).await.ok()["message"]["content"], "two");
}
