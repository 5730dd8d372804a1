//! The document, held against the server: every path is there, and what it forbids is refused.

use serde_json::{Value as Json, json};
use smoe_serve::Config;

use crate::common::client::request;
use crate::common::{Setup, Site};

#[tokio::test(flavor = "multi_thread")]
async fn every_path_of_the_document_is_served() {
    let site = Site::new().await;
    let document = site.get("/openapi.json").await.ok();
    for (path, methods) in document["paths"].as_object().unwrap() {
        for method in methods.as_object().unwrap().keys() {
            // An empty body is refused by whoever takes one, and the endless one is not waited for.
            let method = method.to_uppercase();
            let path = path.replace("{id}", "tiny");
            let reply = crate::common::client::open(site.address, &method, &path, &[], b"").await;
            let expected = if method == "POST" { 400 } else { 200 };
            assert_eq!(reply.status, expected, "{method} {path}");
            let other = if method == "POST" { "GET" } else { "POST" };
            let refused = request(site.address, other, &path, &[], b"").await;
            assert_eq!(refused.status, 405, "{other} {path}");
            assert!(refused.header("allow").is_some_and(|allowed| allowed.contains(&method)));
        }
    }
    // The instrument must not keep the server from ending.
    site.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_is_in_the_document_of_a_server_that_wants_one() {
    let config = Config { api_key: Some("secret".to_owned()), port: 0, ..Config::default() };
    let site = Site::with(Setup { config, ..Setup::default() }).await;
    let document = site.get("/openapi.json").await.ok();
    assert!(document["paths"]["/v1/models"]["get"]["security"].is_array());
    assert!(document["paths"]["/metrics"]["get"].get("security").is_none());
    assert_eq!(site.get("/v1/models").await.status, 401);
    assert_eq!(site.get("/metrics").await.status, 200);
}

/// The nearest values beyond every bound of the document, in a request that is right but for them.
#[tokio::test(flavor = "multi_thread")]
async fn what_the_document_forbids_is_refused() {
    let site = Site::new().await;
    let document = site.get("/openapi.json").await.ok();
    let said = json!([{"role": "user", "content": "SAY:x"}]);
    for (path, body) in [
        ("/v1/chat/completions", json!({"messages": said})),
        ("/v1/completions", json!({"prompt": "SAY:x"})),
        ("/v1/messages", json!({"model": "tiny", "messages": said, "max_tokens": 5})),
        ("/v1/messages/count_tokens", json!({"model": "tiny", "messages": said})),
        ("/api/chat", json!({"model": "tiny", "messages": said, "stream": false})),
        ("/api/generate", json!({"model": "tiny", "prompt": "SAY:x", "stream": false})),
    ] {
        site.post(path, &body).await.ok();
        let content = &document["paths"][path]["post"]["requestBody"]["content"];
        let schema = resolve(&document, &content["application/json"]["schema"]);
        for field in schema["required"].as_array().unwrap() {
            let mut less = body.clone();
            less.as_object_mut().unwrap().remove(field.as_str().unwrap());
            assert_eq!(site.post(path, &less).await.status, 400, "{path} without {field}");
        }
        let mut tried = 0;
        for (place, wrong) in beyond(&document, schema, "") {
            let mut more = body.clone();
            *place_of(&mut more, &place) = wrong.clone();
            let reply = site.post(path, &more).await;
            assert_eq!(reply.status, 400, "{path} {place} = {wrong}: {}", reply.body);
            tried += 1;
        }
        assert!(tried > 20, "{path}: {tried}");
    }
}

fn resolve<'a>(document: &'a Json, schema: &'a Json) -> &'a Json {
    match schema["$ref"].as_str() {
        Some(reference) => document.pointer(reference.trim_start_matches('#')).unwrap(),
        None => schema,
    }
}

/// Places in an object and values that its schema forbids there.
fn beyond(document: &Json, schema: &Json, at: &str) -> Vec<(String, Json)> {
    let mut out = Vec::new();
    for (name, field) in schema["properties"].as_object().into_iter().flatten() {
        let place = format!("{at}/{name}");
        let field = resolve(document, field);
        let kinds: Vec<&str> = match &field["type"] {
            Json::String(kind) => vec![kind],
            Json::Array(kinds) => kinds.iter().filter_map(Json::as_str).collect(),
            _ => Vec::new(),
        };
        if !kinds.is_empty() {
            for (kind, wrong) in [
                ("string", json!("wrong")),
                ("boolean", json!(true)),
                ("array", json!([])),
                ("object", json!({})),
                ("number", json!(0.3)),
                ("null", Json::Null),
            ] {
                if !(kinds.contains(&kind) || kind == "number" && kinds.contains(&"integer")) {
                    out.push((place.clone(), wrong));
                }
            }
        }
        if kinds.contains(&"integer") {
            out.push((place.clone(), json!(1.5)));
        }
        if let (Some(low), true) = (field["minimum"].as_f64(), low_enough(field)) {
            let step = if kinds.contains(&"integer") { 1.0 } else { 0.01 };
            out.push((place.clone(), if step == 1.0 { json!(low as i64 - 1) } else { json!(low - step) }));
        }
        if field["exclusiveMinimum"] == 0 {
            out.push((place.clone(), json!(0)));
        }
        if let Some(high) = field["maximum"].as_f64().filter(|high| *high < 1e9) {
            let step = if kinds.contains(&"integer") { 1.0 } else { 0.01 };
            out.push((place.clone(), if step == 1.0 { json!(high as i64 + 1) } else { json!(high + step) }));
        }
        if let Some(most) = field["maxItems"].as_u64() {
            out.push((place.clone(), Json::Array(vec![json!("x"); most as usize + 1])));
        }
        if field["minItems"] == 1 {
            out.push((place.clone(), json!([])));
        }
        for (index, branch) in field["anyOf"].as_array().into_iter().flatten().enumerate() {
            if let (0, Some(most)) = (index, branch["maxItems"].as_u64()) {
                out.push((place.clone(), Json::Array(vec![json!("x"); most as usize + 1])));
            }
        }
        if field.get("anyOf").is_some() {
            out.push((place.clone(), json!([[]])));
        }
        out.extend(beyond(document, field, &place));
    }
    out
}

/// Whether there is a number below the lowest.
fn low_enough(field: &Json) -> bool {
    field["minimum"].as_f64() > Some(-1e9)
}

/// The place of a pointer, its objects made if need be.
fn place_of<'a>(body: &'a mut Json, pointer: &str) -> &'a mut Json {
    let mut place = body;
    for name in pointer.split('/').skip(1) {
        if !place.is_object() {
            *place = json!({});
        }
        place = &mut place[name];
    }
    place
}
