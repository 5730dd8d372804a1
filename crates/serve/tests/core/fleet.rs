//! Several vaults, one at a time.

use std::sync::Arc;

use serde_json::json;

use crate::common::fake::Fake;
use crate::common::{Setup, Site, THINKING, TOOLS, chat, client, tiny_vault};

fn two() -> Setup {
    Setup { vaults: vec![("alpha", TOOLS), ("beta", THINKING), ("broken", TOOLS)], ..Setup::default() }
}

fn ids(list: &serde_json::Value) -> Vec<&str> {
    list["data"].as_array().unwrap().iter().map(|model| model["id"].as_str().unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn vaults_are_listed_with_what_their_bytes_say_and_new_ones_are_found() {
    let site = Site::with(two()).await;
    let list = site.get("/v1/models").await.ok();
    assert_eq!(ids(&list), ["alpha", "beta", "broken"]);
    let smoe = &list["data"][0]["smoe"];
    assert_eq!((&smoe["layers"], &smoe["experts"], &smoe["top_k"]), (&3.into(), &7.into(), &3.into()));
    assert_eq!((&smoe["bits"], &smoe["context"]), (&32.into(), &1024.into()));
    assert_eq!((&smoe["family"], &smoe["loaded"]), (&"qwen3_moe".into(), &false.into()));

    tiny_vault(&site.directory.path().join("gamma"), TOOLS);
    let one = site.get("/v1/models/gamma").await.ok();
    assert_eq!((&one["id"], &one["object"]), (&"gamma".into(), &"model".into()));
    assert_eq!(ids(&site.get("/v1/models").await.ok()).len(), 4);
    std::fs::remove_dir_all(site.directory.path().join("gamma")).unwrap();
    assert_eq!(ids(&site.get("/v1/models").await.ok()).len(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_is_loaded_by_its_name_and_any_means_the_last() {
    let site = Site::with(two()).await;
    let answered = |reply: client::Reply| reply.ok()["model"].as_str().unwrap().to_owned();
    assert_eq!(answered(site.chat("SAY:a", json!({})).await), "alpha");
    assert_eq!(answered(site.chat("SAY:a", json!({"model": "beta"})).await), "beta");
    assert_eq!(answered(site.chat("SAY:a", json!({"model": "s-moe"})).await), "beta");
    assert_eq!(*site.fake.loads.borrow(), 2);
    let loaded = site.fleet.loaded();
    assert_eq!(loaded.len(), 1);
    let unknown = site.chat("SAY:a", json!({"model": "delta"})).await;
    assert_eq!(unknown.error(), (404, "model_not_found".into(), "model".into()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_that_cannot_be_loaded_says_so_and_others_still_can() {
    let site = Site::with(two()).await;
    site.chat("SAY:a", json!({"model": "alpha"})).await.ok();
    let failed = site.chat("SAY:a", json!({"model": "broken"})).await;
    assert_eq!(failed.error(), (503, "model_load_failed".into(), String::new()));
    assert!(failed.body.contains("a broken vault"), "{}", failed.body);
    assert!(failed.header("retry-after").is_some());
    site.chat("SAY:a", json!({"model": "alpha"})).await.ok();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_leaves_when_its_answers_are_over() {
    let fake = Arc::new(Fake::gated(1));
    let site = Site::with(Setup { fake: fake.clone(), ..two() }).await;
    let mut body = chat("SAY:abc", json!({"model": "alpha", "stream": true}));
    let mut first =
        client::open(site.address, "POST", "/v1/chat/completions", &[], body.to_string().as_bytes()).await;
    // The head of the response: the job runs, and waits.
    assert!(first.event().await.unwrap().contains("assistant"));
    body["model"] = "beta".into();
    body["smoe"] = json!({"progress": true});
    let address = site.address;
    let second = tokio::spawn(async move {
        client::request(address, "POST", "/v1/chat/completions", &[], body.to_string().as_bytes()).await
    });
    let mut loading = site.fleet.loading();
    loading.wait_for(|loading| loading.as_ref().is_some_and(|l| l.id == "beta")).await.unwrap();
    assert_eq!(*fake.loads.borrow(), 1, "the first still runs");
    fake.permit(100);
    let first = first.rest().await;
    assert!(first.body.contains("\"finish_reason\":\"stop\""), "{}", first.body);
    let second = second.await.unwrap();
    let phases: Vec<_> =
        second.events().iter().filter_map(|e| e["smoe"]["phase"].as_str().map(str::to_owned)).collect();
    assert_eq!(phases.first().map(String::as_str), Some("loading"));
    assert!(phases.contains(&"prefill".to_owned()) && phases.contains(&"decode".to_owned()), "{phases:?}");
    assert_eq!(*fake.loads.borrow(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn two_models_stay_where_two_may() {
    let site = Site::with(Setup { resident: 2, ..two() }).await;
    for model in ["alpha", "beta", "alpha", "beta"] {
        site.chat("SAY:a", json!({"model": model})).await.ok();
    }
    assert_eq!(*site.fake.loads.borrow(), 2);
    assert_eq!(site.fleet.loaded().len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_whose_thread_dies_is_loaded_anew() {
    let site = Site::new().await;
    assert_eq!(site.chat("SAY:PANIC", json!({})).await.error().0, 500);
    site.chat("SAY:a", json!({})).await.ok();
    assert_eq!(*site.fake.loads.borrow(), 2);
}
