//! HTTP itself: who may come in, what is refused, who leaves, and the end.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::json;
use smoe_engine::{Driver, EngineError, Job, JobId, Load};
use smoe_serve::Config;
use smoe_serve::fleet::{Opened, Start};
use smoe_serve::runner::Machine;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::watch;

use crate::common::client::{self, open, request};
use crate::common::fake::Fake;
use crate::common::{Setup, Site, chat, scripted};

const CHAT: &str = "/v1/chat/completions";

fn config() -> Config {
    Config { port: 0, ..Config::default() }
}

/// A stream that runs and waits for leave to go on.
async fn waiting_stream(site: &Site) -> client::Incoming {
    let body = chat("SAY:abcdefgh", json!({"stream": true})).to_string();
    let mut stream = open(site.address, "POST", CHAT, &[], body.as_bytes()).await;
    assert!(stream.event().await.unwrap().contains("assistant"));
    stream
}

#[tokio::test(flavor = "multi_thread")]
async fn health_is_open_and_the_rest_wants_the_key() {
    let config = Config { api_key: Some("sesame".to_owned()), ..config() };
    let site = Site::with(Setup { config, ..Setup::default() }).await;
    assert_eq!(site.get("/health").await.ok(), json!({"status": "ok"}));
    let none = site.get("/v1/models").await;
    assert_eq!(none.error().0, 401);
    assert_eq!(none.header("www-authenticate"), Some("Bearer"));
    for (name, value, status) in [
        ("authorization", "Bearer sesame", 200),
        ("authorization", "bearer sesame", 200),
        ("x-api-key", "sesame", 200),
        ("authorization", "Bearer open", 401),
        ("authorization", "sesame", 401),
        ("x-api-key", "sesam", 401),
    ] {
        let reply = request(site.address, "GET", "/v1/models", &[(name, value)], b"").await;
        assert_eq!(reply.status, status, "{name}: {value}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_have_ids_and_errors_the_shape_of_their_api() {
    let site = Site::new().await;
    let named = request(site.address, "GET", "/health", &[("x-request-id", "mine")], b"").await;
    assert_eq!(named.header("x-request-id"), Some("mine"));
    let unknown = site.get("/v1/nothing").await;
    assert!(unknown.header("x-request-id").unwrap().starts_with("req_"));
    assert_eq!(unknown.error(), (404, "unknown_url".into(), String::new()));
    assert_eq!(site.get(CHAT).await.error().0, 405);
    let anthropic = site.get("/v1/messages/nothing").await;
    assert_eq!(anthropic.status, 404);
    let body = anthropic.json();
    assert_eq!((&body["type"], &body["error"]["type"]), (&"error".into(), &"not_found_error".into()));
    assert_eq!(body["request_id"].as_str(), anthropic.header("request-id"));
    assert!(site.get("/api/nothing").await.json()["error"].is_string());
}

#[tokio::test(flavor = "multi_thread")]
async fn bodies_that_are_not_what_they_should_be_are_refused() {
    let config = Config { body_limit: 10_000, ..config() };
    let site = Site::with(Setup { config, ..Setup::default() }).await;
    let deep = format!("{{\"messages\": {}1{}}}", "[".repeat(2000), "]".repeat(2000));
    let post = async |body: &[u8]| request(site.address, "POST", CHAT, &[], body).await.error().0;
    for body in [
        &b"{"[..],
        b"[]",
        b"null",
        b"{\"messages\": \"\xff\xfe\"}",
        deep.as_bytes(),
        b"{\"messages\": [1e999]}",
    ] {
        assert_eq!(post(body).await, 400, "{:?}", String::from_utf8_lossy(&body[..body.len().min(40)]));
    }
    assert_eq!(post(&vec![b' '; 10_001]).await, 413);
    let plain = [("content-type", "text/plain")];
    let body = chat("SAY:x", json!({})).to_string();
    let mut stream = TcpStream::connect(site.address).await.unwrap();
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{}: {}\r\ncontent-length: {}\r\n\r\n",
        plain[0].0,
        plain[0].1,
        body.len()
    );
    stream.write_all((head + &body).as_bytes()).await.unwrap();
    client::read_head(stream).await.rest().await.ok();
}

#[tokio::test(flavor = "multi_thread")]
async fn other_origins_may_come_only_where_that_is_said() {
    let site = Site::new().await;
    let own = format!("http://{}", site.address);
    let from = async |site: &Site, origin: &str| {
        request(site.address, "GET", "/v1/models", &[("origin", origin)], b"").await
    };
    assert_eq!(from(&site, &own).await.status, 200);
    assert_eq!(
        from(&site, "https://elsewhere.example").await.error(),
        (403, "origin_not_allowed".into(), String::new())
    );
    assert_eq!(from(&site, "null").await.status, 403);

    let open = Site::with(Setup { config: Config { cors: true, ..config() }, ..Setup::default() }).await;
    let reply = from(&open, "https://elsewhere.example").await;
    assert_eq!((reply.status, reply.header("access-control-allow-origin")), (200, Some("*")));
    let preflight = [
        ("origin", "https://elsewhere.example"),
        ("access-control-request-method", "POST"),
        ("access-control-request-headers", "authorization,content-type"),
    ];
    let reply = request(open.address, "OPTIONS", CHAT, &preflight, b"").await;
    assert_eq!(reply.status, 200);
    assert_eq!(reply.header("access-control-allow-headers"), Some("authorization,content-type"));
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_heads_and_bodies_are_cut_off() {
    let short = Duration::from_millis(50);
    let config = Config { header_timeout: short, body_timeout: short, ..config() };
    let site = Site::with(Setup { config, ..Setup::default() }).await;
    let mut slow = TcpStream::connect(site.address).await.unwrap();
    slow.write_all(b"GET /health HTTP/1.1\r\nhost:").await.unwrap();
    let mut rest = Vec::new();
    slow.read_to_end(&mut rest).await.unwrap();
    assert!(!rest.starts_with(b"HTTP/1.1 200"));
    let mut slow = TcpStream::connect(site.address).await.unwrap();
    let head = format!("POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{{");
    slow.write_all(head.as_bytes()).await.unwrap();
    assert_eq!(client::read_head(slow).await.status, 408);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_frees_its_job() {
    for streamed in [true, false] {
        let fake = Arc::new(Fake::gated(2));
        let site = Site::with(Setup { fake: fake.clone(), ..Setup::default() }).await;
        let mut said = fake.said.subscribe();
        if streamed {
            let stream = waiting_stream(&site).await;
            said.wait_for(|said| *said == 2).await.unwrap();
            drop(stream);
        } else {
            let body = chat("SAY:abcdefgh", json!({})).to_string();
            let mut stream = TcpStream::connect(site.address).await.unwrap();
            let head = format!("POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", body.len());
            stream.write_all((head + &body).as_bytes()).await.unwrap();
            said.wait_for(|said| *said == 2).await.unwrap();
        }
        // No leave to speak is given: it ends because nobody listens.
        let mut ended = fake.ended.subscribe();
        assert_eq!(ended.wait_for(|ended| ended.len() == 1).await.unwrap()[0].1, 2);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn who_finds_the_queue_full_is_told_to_come_again() {
    let fake = Arc::new(Fake::narrow(1, 1, 1));
    let site = Site::with(Setup { fake: fake.clone(), ..Setup::default() }).await;
    let running = waiting_stream(&site).await;
    let body = chat("SAY:second", json!({"stream": true, "smoe": {"progress": true}})).to_string();
    let mut queued = open(site.address, "POST", CHAT, &[], body.as_bytes()).await;
    assert!(queued.event().await.unwrap().contains("\"smoe\":{\"phase\":\"queued\",\"ahead\":1}"));
    let refused = site.chat("SAY:third", json!({})).await;
    assert_eq!(refused.error(), (429, "queue_full".into(), String::new()));
    assert_eq!(refused.header("retry-after"), Some("2"));
    fake.permit(100);
    assert!(running.rest().await.body.contains("[DONE]"));
    assert!(queued.rest().await.body.contains("[DONE]"));
    site.chat("SAY:third", json!({})).await.ok();
}

#[tokio::test(flavor = "multi_thread")]
async fn several_answers_are_queued_together_or_not_at_all() {
    let fake = Arc::new(Fake::narrow(1, 1, 1));
    let site = Site::with(Setup { fake: fake.clone(), ..Setup::default() }).await;
    let running = waiting_stream(&site).await;
    for streamed in [true, false] {
        let refused = site.chat("SAY:x", json!({"n": 2, "stream": streamed})).await;
        assert_eq!(refused.error(), (429, "queue_full".into(), String::new()));
        assert_eq!(refused.header("retry-after"), Some("2"));
        // Nor will there ever be room for so many.
        let refused = site.chat("SAY:x", json!({"n": 3, "stream": streamed})).await;
        assert_eq!(refused.error(), (400, String::new(), "n".into()));
    }
    fake.permit(100);
    running.rest().await;
    // Nothing had been queued of them.
    site.chat("SAY:x", json!({"n": 2})).await.ok();
    let ended: Vec<String> = fake.ended.borrow().iter().map(|(prompt, _)| prompt.clone()).collect();
    assert_eq!(ended.iter().filter(|prompt| prompt.contains("SAY:x")).count(), 2, "{ended:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn where_nobody_may_wait_a_free_model_answers_and_a_busy_one_refuses() {
    let fake = Arc::new(Fake::narrow(1, 2, 0));
    let site = Site::with(Setup { fake: fake.clone(), ..Setup::default() }).await;
    let first = waiting_stream(&site).await;
    let second = chat("SAY:b", json!({"stream": true})).to_string();
    let second = open(site.address, "POST", CHAT, &[], second.as_bytes()).await;
    for n in [1, 2] {
        let refused = site.chat("SAY:c", json!({"stream": true, "n": n})).await;
        assert_eq!(refused.error(), (429, "queue_full".into(), String::new()), "n = {n}");
    }
    fake.permit(1_000);
    first.rest().await;
    second.rest().await;
    // The end of an answer is told when there is room again.
    for _ in 0..50 {
        site.chat("SAY:c", json!({"stream": true, "n": 2})).await.events();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_is_a_status_also_while_a_model_loads_for_longer_than_anyone_waits() {
    let config = Config { patience: Duration::from_millis(1), ..config() };
    for (max_queued, n) in [(2, 1), (0, 1), (0, 2)] {
        let fake = Arc::new(Fake::narrow(1_000, 1, max_queued));
        let (load, loading) = std::sync::mpsc::channel::<()>();
        let (loading, scripted) = (Mutex::new(loading), scripted(fake.clone()));
        let start: Start = Box::new(move |starting| {
            // An error too: the test is over.
            let _ = loading.lock().unwrap().recv();
            scripted(starting)
        });
        let setup = Setup { fake, config: config.clone(), start: Some(start), ..Setup::default() };
        let site = Site::with(setup).await;
        let ask = |n| {
            let (address, body) = (site.address, chat("SAY:x", json!({"stream": true, "n": n})).to_string());
            async move { open(address, "POST", CHAT, &[], body.as_bytes()).await }
        };
        let (mut begun, mut unsure) = (Vec::new(), None);
        if n == 1 {
            for _ in 0..max_queued.max(1) {
                begun.push(ask(1).await);
            }
        } else {
            unsure = Some(tokio::spawn(ask(n)));
            site.fleet.loading().wait_for(Option::is_some).await.unwrap();
        }
        assert_eq!(ask(1).await.rest().await.error().0, 429);
        load.send(()).unwrap();
        for stream in begun {
            assert!(stream.rest().await.events().iter().all(|event| event["error"].is_null()));
        }
        if let Some(unsure) = unsure {
            // More than it ever answers at once, which nobody could know before.
            assert_eq!(unsure.await.unwrap().rest().await.error(), (400, String::new(), "n".into()));
        }
    }
}

/// Reads until the server closes.
async fn all_of(mut stream: TcpStream) -> String {
    let mut all = Vec::new();
    // A connection that is reset is closed too.
    let _ = stream.read_to_end(&mut all).await;
    String::from_utf8(all).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_shuts_its_sending_half_has_left() {
    for streamed in [true, false] {
        let fake = Arc::new(Fake::gated(2));
        let site = Site::with(Setup { fake: fake.clone(), ..Setup::default() }).await;
        let body = chat("SAY:abcdefgh", json!({"stream": streamed})).to_string();
        let mut stream = TcpStream::connect(site.address).await.unwrap();
        let head = format!("POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", body.len());
        stream.write_all((head + &body).as_bytes()).await.unwrap();
        fake.said.subscribe().wait_for(|said| *said == 2).await.unwrap();
        stream.shutdown().await.unwrap();
        // What it is sent is never what looks complete.
        let all = all_of(stream).await;
        assert!(!all.contains("[DONE]") && !all.ends_with("0\r\n\r\n"), "{all}");
        let mut ended = fake.ended.subscribe();
        assert_eq!(ended.wait_for(|ended| ended.len() == 1).await.unwrap()[0].1, 2);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_model_goes_without_is_told() {
    let mut fake = Fake::default();
    fake.warnings.push("no file".to_owned());
    let fake = Arc::new(fake);
    let site = Site::with(Setup { fake: fake.clone(), ..Setup::default() }).await;
    assert_eq!(site.get("/health").await.ok(), json!({"status": "ok"}));
    site.chat("SAY:x", json!({})).await.ok();
    assert_eq!(site.get("/health").await.ok(), json!({"status": "ok", "warnings": {"tiny": ["no file"]}}));
    assert!(site.get("/metrics").await.body.contains("smoe_model_warnings{model=\"tiny\"} 1"));
    // What goes wrong later is told too.
    *fake.trouble.lock().unwrap() = Some(EngineError::EmptyPrompt);
    site.chat("SAY:x", json!({})).await.ok();
    let trouble = EngineError::EmptyPrompt.to_string();
    assert_eq!(site.get("/health").await.ok()["warnings"]["tiny"], json!(["no file", trouble]));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_does_not_read_holds_nobody_up() {
    let fake = Arc::new(Fake::wide(16));
    let site = Site::with(Setup { fake, ..Setup::default() }).await;
    let body = chat(&format!("SAY:{}", "z".repeat(400)), json!({"stream": true, "n": 8})).to_string();
    let slow = open(site.address, "POST", CHAT, &[], body.as_bytes()).await;
    site.chat("SAY:quick", json!({})).await.ok();
    let mut ended = site.fake.ended.subscribe();
    ended.wait_for(|ended| ended.len() == 9).await.unwrap();
    let events = slow.rest().await.events();
    assert_eq!(events.iter().filter(|e| e["choices"][0]["finish_reason"] == "stop").count(), 8);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_waits_shows_that_it_lives() {
    let fake = Arc::new(Fake::gated(0));
    let config = Config { heartbeat: Duration::from_millis(5), ..config() };
    let site = Site::with(Setup { fake: fake.clone(), config, ..Setup::default() }).await;
    let body = chat("SAY:x", json!({"stream": true})).to_string();
    let mut stream = open(site.address, "POST", CHAT, &[], body.as_bytes()).await;
    assert_eq!(stream.line().await.as_deref(), Some(": waiting"));
    fake.permit(10);
    assert!(stream.rest().await.body.contains("[DONE]"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_begins_without_its_answer_where_patience_is_short() {
    let config = Config { patience: Duration::from_millis(1), ..config() };
    let (fail, failing) = std::sync::mpsc::channel::<()>();
    let failing = Mutex::new(failing);
    let start: Start = Box::new(move |_| {
        // An error too: the test is over.
        let _ = failing.lock().unwrap().recv();
        Err(EngineError::EmptyPrompt)
    });
    let site = Site::with(Setup { config, start: Some(start), ..Setup::default() }).await;
    let body = chat("SAY:x", json!({"stream": true})).to_string();
    let stream = open(site.address, "POST", CHAT, &[], body.as_bytes()).await;
    assert_eq!(stream.status, 200);
    fail.send(()).unwrap();
    let late = stream.rest().await;
    assert_eq!(late.events().last().unwrap()["error"]["code"], "model_load_failed", "{}", late.body);
    // At once, it is a status all the same.
    fail.send(()).unwrap();
    assert_eq!(site.chat("SAY:x", json!({})).await.error().0, 503);
}

#[tokio::test(flavor = "multi_thread")]
async fn at_the_end_running_answers_may_finish() {
    let fake = Arc::new(Fake::gated(1));
    let site = Site::with(Setup { fake: fake.clone(), ..Setup::default() }).await;
    let running = waiting_stream(&site).await;
    // An idle connection holds nothing up.
    let mut idle = TcpStream::connect(site.address).await.unwrap();
    let address = site.address;
    let over = site.stop();
    while TcpStream::connect(address).await.is_ok() {}
    fake.permit(100);
    let reply = running.rest().await;
    assert!(reply.body.contains("\"finish_reason\":\"stop\""), "{}", reply.body);
    over.await.unwrap();
    assert_eq!(idle.read(&mut [0; 10]).await.unwrap_or(0), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn at_the_end_nobody_waits_for_a_model_that_cannot_end() {
    let (release, held) = std::sync::mpsc::channel::<()>();
    let held = Mutex::new(Some(held));
    let (fake, hung) = (Arc::new(Fake::default()), watch::Sender::new(false));
    let start: Start = {
        let (fake, hung) = (fake.clone(), hung.clone());
        Box::new(move |_| {
            let machine = Hanging(fake.machine(), held.lock().unwrap().take(), hung.clone());
            Ok(Opened { machine: Box::new(machine), meters: None, info: None, warnings: Vec::new() })
        })
    };
    let config = Config { grace: Duration::from_millis(50), ..config() };
    let site = Site::with(Setup { fake, config, start: Some(start), ..Setup::default() }).await;
    site.chat("SAY:x", json!({})).await.ok();
    site.stop().await.unwrap();
    assert!(*hung.subscribe().wait_for(|hung| *hung).await.unwrap(), "it ended while the model hung");
    drop(release);
}

/// A model whose end waits for a disk that does not answer.
struct Hanging(Box<dyn Machine>, Option<std::sync::mpsc::Receiver<()>>, watch::Sender<bool>);

impl Machine for Hanging {}

impl Driver for Hanging {
    fn submit(&mut self, job: Job) -> Result<JobId, EngineError> {
        self.0.submit(job)
    }

    fn step(&mut self) -> bool {
        self.0.step()
    }

    fn load(&self) -> Load {
        self.0.load()
    }
}

impl Drop for Hanging {
    fn drop(&mut self) {
        self.2.send_replace(true);
        // An error: the test is over.
        let _ = self.1.take().map(|held| held.recv());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn at_the_end_what_does_not_finish_is_cut_with_a_word() {
    let fake = Arc::new(Fake::gated(1));
    let config = Config { grace: Duration::from_millis(20), ..config() };
    let site = Site::with(Setup { fake: fake.clone(), config, ..Setup::default() }).await;
    let running = waiting_stream(&site).await;
    let over = site.stop();
    let events = running.rest().await.events();
    assert_eq!(events.last().unwrap()["error"]["code"], "shutting_down");
    over.await.unwrap();
    let mut ended = fake.ended.subscribe();
    ended.wait_for(|ended| ended.len() == 1).await.unwrap();
}
