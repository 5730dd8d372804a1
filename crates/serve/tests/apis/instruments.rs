//! Metrics, the live instrument, and the page that shows it.

use std::path::Path;

use serde_json::{Value as Json, json};
use smoe_engine::plan::PlanRequest;
use smoe_engine::{EngineOptions, SchedulerOptions};
use smoe_serve::start_engine;

use crate::common::client::open;
use crate::common::{Setup, Site};

fn value(page: &str, series: &str) -> f64 {
    let line = page.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("{series} is not in\n{page}")).parse().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_count_what_was_done() {
    let site = Site::new().await;
    assert_eq!(value(&site.get("/metrics").await.body, "smoe_answers_total"), 0.0);
    site.chat("SAY:abc", json!({})).await.ok();
    site.chat("x", json!({"model": "none"})).await;
    let page = site.get("/metrics").await;
    assert!(page.header("content-type").unwrap().starts_with("text/plain; version=0.0.4"));
    let page = page.body;
    let requests =
        |status| format!("smoe_requests_total{{route=\"/v1/chat/completions\",status=\"{status}\"}}");
    assert_eq!((value(&page, &requests(200)), value(&page, &requests(404))), (1.0, 1.0));
    assert_eq!(value(&page, "smoe_completion_tokens_total"), 4.0);
    assert_eq!(value(&page, "smoe_cached_prompt_tokens_total"), 1.0);
    assert_eq!(value(&page, "smoe_time_to_first_token_seconds_count"), 1.0);
    assert_eq!(value(&page, "smoe_jobs_running_max{model=\"tiny\"}"), 4.0);
}

async fn demo() -> Site {
    let plan = PlanRequest { sessions: 2, context: Some(512), threads: Some(2), ..PlanRequest::default() };
    let options = EngineOptions { plan, ..EngineOptions::default() };
    let start = start_engine(options, |_| SchedulerOptions::default(), |_| 16 << 20);
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../demo");
    Site::with(Setup { start: Some(start), paths: vec![demo], vaults: Vec::new(), ..Setup::default() }).await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_instrument_shows_the_engine_at_work() {
    let site = demo().await;
    let mut watching = open(site.address, "GET", "/smoe/instrument", &[], b"").await;
    let first: Json = serde_json::from_str(&watching.event().await.unwrap()).unwrap();
    assert_eq!((&first["state"], &first["model"]), (&json!("idle"), &json!("")));

    let seen = async {
        let (mut uses, mut tokens) = (false, false);
        while !(uses && tokens) {
            let event: Json = serde_json::from_str(&watching.event().await.unwrap()).unwrap();
            if event["model"] != "demo" || event["atlas"].is_null() {
                continue;
            }
            let atlas = &event["atlas"];
            let cells = atlas["layers"].as_u64().unwrap() * atlas["experts"].as_u64().unwrap();
            let text = atlas["uses"].as_str().unwrap();
            assert_eq!(text.len() as u64, (2 * cells).div_ceil(3) * 4);
            uses |= text.chars().any(|c| c != 'A' && c != '=');
            tokens |= event["tok_s"].as_f64().unwrap() > 0.0;
            assert!(event["memory"]["used_bytes"].as_u64() <= event["memory"]["budget_bytes"].as_u64());
        }
    };
    let asking = async {
        loop {
            site.chat("Tell me a long story.", json!({"max_tokens": 200, "temperature": 0})).await.ok();
        }
    };
    tokio::select! {
        () = seen => {}
        () = asking => {}
    }
    let page = site.get("/metrics").await.body;
    assert!(value(&page, "smoe_steps_total{model=\"demo\"}") > 0.0);
    assert!(value(&page, "smoe_phase_seconds_total{model=\"demo\",phase=\"experts\"}") > 0.0);
    assert!(value(&page, "smoe_ring_limit_slots{model=\"demo\"}") > 0.0);
    // Whoever watches does not hold up the end.
    site.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_console_is_served_with_a_policy() {
    let site = Site::new().await;
    let page = site.get("/").await;
    assert_eq!(page.status, 200);
    assert!(page.header("content-security-policy").unwrap().contains("default-src 'self'"));
    assert_eq!(page.header("content-type"), Some("text/html; charset=utf-8"));
    assert!(page.body.starts_with("<!doctype html>"));
    let icon = site.get("/favicon.ico").await;
    assert_eq!((icon.status, icon.header("content-type")), (200, Some("image/svg+xml")));
}
