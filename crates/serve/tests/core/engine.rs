//! The whole way, with the demo model.

use std::path::Path;

use serde_json::{Value as Json, json};
use smoe_engine::plan::PlanRequest;
use smoe_engine::{EngineOptions, SchedulerOptions, SpillConfig};
use smoe_serve::start_engine;

use crate::common::{Setup, Site, chat};

async fn demo() -> Site {
    demo_with(None).await
}

/// With a file for its conversations.
async fn demo_with(spill: Option<SpillConfig>) -> Site {
    let plan = PlanRequest { sessions: 2, context: Some(512), threads: Some(2), ..PlanRequest::default() };
    let options = EngineOptions { plan, ..EngineOptions::default() };
    let scheduling = move |_: &_| SchedulerOptions { spill: spill.clone(), ..SchedulerOptions::default() };
    let start = start_engine(options, scheduling, |_| 16 << 20);
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../demo");
    Site::with(Setup { start: Some(start), paths: vec![demo], vaults: Vec::new(), ..Setup::default() }).await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_demo_model_says_the_same_streamed_and_at_once_and_bound_to_a_schema() {
    let site = demo().await;
    let greedy = json!({"temperature": 0, "max_tokens": 24, "logprobs": true, "top_logprobs": 2});
    let whole = site.chat("What is a cache?", greedy.clone()).await.ok();
    let said = whole["choices"][0]["message"]["content"].as_str().unwrap();
    assert!(!said.is_empty());
    let told = whole["choices"][0]["logprobs"]["content"].as_array().unwrap();
    let joined: String = told.iter().map(|entry| entry["token"].as_str().unwrap()).collect();
    assert_eq!(joined, said);
    assert!(told.iter().all(|entry| entry["top_logprobs"][0]["logprob"].as_f64() <= Some(0.0)));

    let mut streamed = chat("What is a cache?", greedy);
    streamed["stream"] = true.into();
    let events = site.post("/v1/chat/completions", &streamed).await.events();
    let text: String =
        events.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(text, said);

    let schema = json!({
        "type": "object",
        "properties": {"sort": {"enum": ["tool", "animal"]}, "legs": {"type": "integer", "maximum": 9, "minimum": 0}},
        "required": ["sort", "legs"],
        "additionalProperties": false,
    });
    let format = json!({"type": "json_schema", "json_schema": {"name": "thing", "schema": schema}});
    let extra = json!({"temperature": 0, "max_tokens": 400, "response_format": format});
    let bound = site.chat("Is a spider a tool or an animal?", extra).await.ok();
    let answer: Json =
        serde_json::from_str(bound["choices"][0]["message"]["content"].as_str().unwrap()).unwrap();
    assert!(answer["legs"].is_u64() && answer["sort"].is_string(), "{answer}");
    assert_eq!(bound["choices"][0]["finish_reason"], "stop");

    let model = site.fleet.loaded().pop().unwrap();
    let glance = model.runner().glance().await.unwrap();
    assert_eq!(glance.resident, vec![0xff; 8 * 32 / 8]);
    assert!(model.meters().is_some() && model.info().is_some());
    site.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_cannot_be_used_is_gone_without_and_that_is_told() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("conversations");
    let spill = |path: &Path| Some(SpillConfig { path: path.to_owned(), max_bytes: 64 << 20 });
    let say = json!({"temperature": 0, "max_tokens": 4});
    let first = demo_with(spill(&file)).await;
    let said = first.chat("What is a cache?", say.clone()).await.ok();
    assert_eq!(first.get("/health").await.ok(), json!({"status": "ok"}));
    // Used by another server; no file at all.
    for path in [file.as_path(), directory.path()] {
        let site = demo_with(spill(path)).await;
        let again = site.chat("What is a cache?", say.clone()).await.ok();
        assert_eq!(again["choices"], said["choices"]);
        let health = site.get("/health").await.ok();
        let warning = health["warnings"]["demo"][0].as_str().unwrap();
        assert!(warning.starts_with("conversations are not remembered"), "{warning}");
        assert!(site.get("/metrics").await.body.contains("smoe_model_warnings{model=\"demo\"} 1"));
        site.stop().await.unwrap();
    }
    first.stop().await.unwrap();
}
