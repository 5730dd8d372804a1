//! Ollama's API, as its clients use it.

use serde_json::{Value as Json, json};

use crate::common::Site;
use crate::common::client::Reply;

async fn chat(site: &Site, say: &str, extra: Json) -> Reply {
    let mut body = json!({"model": "tiny", "messages": [{"role": "user", "content": say}]});
    for (name, value) in extra.as_object().unwrap() {
        body[name.as_str()] = value.clone();
    }
    site.post("/api/chat", &body).await
}

#[tokio::test(flavor = "multi_thread")]
async fn chat_is_streamed_unless_it_is_not_wanted() {
    let site = Site::new().await;
    let reply = chat(&site, "SAY:hä?", json!({})).await;
    assert_eq!(reply.header("content-type"), Some("application/x-ndjson"));
    let lines: Vec<Json> = reply.body.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let text: String = lines.iter().filter_map(|line| line["message"]["content"].as_str()).collect();
    assert_eq!(text, "hä?");
    let (last, rest) = lines.split_last().unwrap();
    assert_eq!(
        (&last["done"], &last["done_reason"], &last["eval_count"]),
        (&json!(true), &json!("stop"), &json!(5))
    );
    assert!(rest.iter().all(|line| line["done"] == false && line["model"] == "tiny"));
    let whole = chat(&site, "SAY:hä?", json!({"stream": false})).await.ok();
    assert_eq!((&whole["message"]["content"], &whole["done"]), (&json!("hä?"), &json!(true)));
    assert!(whole["total_duration"].as_u64() >= whole["load_duration"].as_u64());
}

#[tokio::test(flavor = "multi_thread")]
async fn options_format_and_tools_do_what_they_say() {
    let site = Site::new().await;
    let short = chat(&site, "SAY:hello", json!({"stream": false, "options": {"num_predict": 2}})).await.ok();
    assert_eq!((&short["message"]["content"], &short["done_reason"]), (&json!("he"), &json!("length")));
    let format = json!({
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": false,
    });
    let bound = chat(&site, "SAY:no", json!({"stream": false, "format": format})).await.ok();
    let answer: Json = serde_json::from_str(bound["message"]["content"].as_str().unwrap()).unwrap();
    assert!(answer["a"].is_i64(), "{answer}");
    let tools = json!([{"type": "function", "function": {
        "name": "get", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    }}]);
    let say = "SAY:<tool_call>\n{\"name\": \"get\", \"arguments\": {\"at\": \"Rome\"}}\n</tool_call>";
    let called = chat(&site, say, json!({"stream": false, "tools": tools})).await.ok();
    let expected = json!([{"function": {"name": "get", "arguments": {"at": "Rome"}}}]);
    assert_eq!(called["message"]["tool_calls"], expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn models_are_listed_and_shown() {
    let site = Site::new().await;
    let models = site.get("/api/tags").await.ok();
    assert_eq!(models["models"][0]["model"], "tiny");
    assert!(models["models"][0]["size"].as_u64().unwrap() > 0);
    let model = site.post("/api/show", &json!({"model": "tiny:latest"})).await.ok();
    let info = model["model_info"].as_object().unwrap();
    let family = info["general.architecture"].as_str().unwrap();
    assert!(info[&format!("{family}.expert_count")].as_u64().unwrap() > 0);
    assert!(site.get("/api/version").await.ok()["version"].is_string());
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_have_ollamas_shape() {
    let site = Site::new().await;
    let unknown = chat(&site, "x", json!({"model": "none"})).await;
    assert_eq!((unknown.status, unknown.json()["error"].is_string()), (404, true));
    let wrong = chat(&site, "x", json!({"options": {"temperature": "hot"}})).await;
    assert_eq!(wrong.status, 400);
    assert!(wrong.json()["error"].as_str().unwrap().starts_with("options.temperature"), "{}", wrong.body);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_is_answered_and_an_empty_one_loads_the_model() {
    let site = Site::new().await;
    assert_eq!(site.get("/api/ps").await.ok(), json!({"models": []}));
    let loaded = site.post("/api/generate", &json!({"model": "tiny", "prompt": ""})).await.ok();
    assert_eq!((&loaded["response"], &loaded["done_reason"]), (&json!(""), &json!("load")));
    let running = site.get("/api/ps").await.ok();
    assert_eq!(running["models"][0]["model"], "tiny");
    assert!(running["models"][0]["context_length"].as_u64() > Some(0));
    let body = json!({"model": "tiny", "prompt": "SAY:hä?"});
    let reply = site.post("/api/generate", &body).await;
    let lines: Vec<Json> = reply.body.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let text: String = lines.iter().filter_map(|line| line["response"].as_str()).collect();
    assert_eq!((text.as_str(), &lines.last().unwrap()["done_reason"]), ("hä?", &json!("stop")));
    // A raw prompt is continued as it stands: backwards, by this model.
    let raw = json!({"model": "tiny", "prompt": "abc", "raw": true, "stream": false});
    assert_eq!(site.post("/api/generate", &raw).await.ok()["response"], "cba");
}
