//! A hub of this machine: its API, its files, a second server that the files are redirected to, and what can go wrong.
#![allow(dead_code, clippy::unwrap_used, reason = "each test uses a part")]

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, Uri};
use axum::response::{IntoResponse as _, Response};
use futures_util::StreamExt as _;
use serde_json::{Value, json};
use sha1::Sha1;
use sha2::{Digest as _, Sha256};
use smoe_format::spec::FfnKind;
use smoe_testkit::TinyModel;
use smoe_testkit::tiny::CheckpointOptions;
use tokio::runtime::Runtime;

pub const REPO: &str = "owner/Tiny-MoE";
pub const TOKEN: &str = "hf_secret";
const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// A request as it came.
#[derive(Clone, Debug)]
pub struct Request {
    /// Of the server that the files are redirected to.
    pub elsewhere: bool,
    pub path: String,
    pub range: Option<(u64, u64)>,
    pub token: Option<String>,
}

impl Request {
    /// The weight file that a part is asked of, if it is more than samples that lie side by side.
    pub fn weights(&self) -> Option<(&str, u64, u64)> {
        let name = self.path.rsplit('/').next()?;
        let (start, end) = self.range.unwrap_or((0, u64::MAX));
        (name.ends_with(".safetensors") && end - start > 64 << 10).then_some((name, start, end))
    }
}

/// What goes wrong with a request.
#[derive(Clone, Debug)]
pub enum Fault {
    Status(u16, Vec<(&'static str, String)>),
    /// So many bytes, and then the connection ends.
    Cut(usize),
    /// So many bytes, and then nothing for ever.
    Stall(usize),
    /// A bit is not what it was.
    Damage,
    /// The second half are other weights.
    Other,
    /// The whole file, whatever was asked for.
    Whole,
    /// Another part than was asked for.
    Shifted,
}

type Script = Box<dyn FnMut(&Request) -> Option<Fault> + Send>;

struct Shared {
    files: BTreeMap<String, Bytes>,
    listing: Value,
    elsewhere: String,
    script: Mutex<Script>,
    seen: Mutex<Vec<Request>>,
}

/// The servers; they end with it.
pub struct Hub {
    pub endpoint: String,
    shared: Arc<Shared>,
    _runtime: Runtime,
}

impl Hub {
    /// Serves the files of a directory, and goes wrong as `script` has it.
    pub fn new(dir: &Path, script: impl FnMut(&Request) -> Option<Fault> + Send + 'static) -> Self {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let bind = || runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
        let (hub, other) = (bind(), bind());
        let address =
            |listener: &tokio::net::TcpListener| format!("http://{}", listener.local_addr().unwrap());
        let mut files = BTreeMap::new();
        let mut siblings = Vec::new();
        for entry in std::fs::read_dir(dir).unwrap() {
            let entry = entry.unwrap();
            let name = entry.file_name().into_string().unwrap();
            let bytes = std::fs::read(entry.path()).unwrap();
            siblings.push(sibling(&name, &bytes));
            files.insert(name, Bytes::from(bytes));
        }
        let shared = Arc::new(Shared {
            files,
            listing: json!({"id": REPO, "sha": COMMIT, "private": false, "siblings": siblings}),
            elsewhere: address(&other),
            script: Mutex::new(Box::new(script)),
            seen: Mutex::default(),
        });
        let endpoint = address(&hub);
        for (listener, elsewhere) in [(hub, false), (other, true)] {
            let app = Router::new().fallback(answer).with_state((Arc::clone(&shared), elsewhere));
            runtime.spawn(async move { axum::serve(listener, app).await.unwrap() });
        }
        Self { endpoint, shared, _runtime: runtime }
    }

    /// Everything that was asked since the last call.
    pub fn seen(&self) -> Vec<Request> {
        std::mem::take(&mut self.shared.seen.lock().unwrap())
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A file as the hub lists it: large ones with a hash of their own.
fn sibling(name: &str, bytes: &[u8]) -> Value {
    let blob = hex(&Sha1::digest([format!("blob {}\0", bytes.len()).as_bytes(), bytes].concat()));
    let mut entry = json!({"rfilename": name, "size": bytes.len(), "blobId": blob});
    if name.ends_with(".safetensors") || name.ends_with(".gguf") {
        entry["lfs"] =
            json!({"sha256": hex(&Sha256::digest(bytes)), "size": bytes.len(), "pointerSize": 134});
    }
    entry
}

async fn answer(
    State((hub, elsewhere)): State<(Arc<Shared>, bool)>,
    uri: Uri,
    headers: HeaderMap,
) -> Response {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).map(str::to_owned);
    let range = text("range").map(|range| {
        let (start, last) = range.strip_prefix("bytes=").unwrap().split_once('-').unwrap();
        (start.parse().unwrap(), last.parse::<u64>().unwrap() + 1)
    });
    let request = Request { elsewhere, path: uri.path().to_owned(), range, token: text("authorization") };
    hub.seen.lock().unwrap().push(request.clone());
    let fault = (hub.script.lock().unwrap())(&request);
    if let Some(Fault::Status(status, headers)) = fault {
        let mut response = StatusCode::from_u16(status).unwrap().into_response();
        for (name, value) in headers {
            response.headers_mut().insert(name, value.parse().unwrap());
        }
        return response;
    }
    if !elsewhere && request.path.starts_with("/api/models/") {
        let known =
            [format!("/api/models/{REPO}/revision/main"), format!("/api/models/{REPO}/revision/{COMMIT}")];
        if !known.contains(&request.path) || uri.query() != Some("blobs=true") {
            return StatusCode::NOT_FOUND.into_response();
        }
        return axum::Json(hub.listing.clone()).into_response();
    }
    let prefix = if elsewhere { "/signed/".to_owned() } else { format!("/{REPO}/resolve/{COMMIT}/") };
    let file = request.path.strip_prefix(&prefix).and_then(|name| hub.files.get_key_value(name));
    let Some((name, bytes)) = file else { return StatusCode::NOT_FOUND.into_response() };
    if !elsewhere && name.ends_with(".safetensors") {
        let location = format!("{}/signed/{name}?signature=abc", hub.elsewhere);
        return (StatusCode::FOUND, [("location", location)]).into_response();
    }
    part(bytes, request.range.filter(|_| !matches!(fault, Some(Fault::Whole))), fault)
}

fn part(bytes: &Bytes, range: Option<(u64, u64)>, fault: Option<Fault>) -> Response {
    let total = bytes.len() as u64;
    let status = if range.is_some() { StatusCode::PARTIAL_CONTENT } else { StatusCode::OK };
    let (start, end) = range.unwrap_or((0, total));
    if start > total {
        return (StatusCode::RANGE_NOT_SATISFIABLE, [("content-range", format!("bytes */{total}"))])
            .into_response();
    }
    let end = end.min(total);
    let mut body = bytes.slice(start as usize..end as usize);
    if let Some(Fault::Damage) = fault {
        let mut damaged = body.to_vec();
        let middle = damaged.len() / 2;
        damaged[middle] ^= 1;
        body = damaged.into();
    }
    if let Some(Fault::Other) = fault {
        let mut other = body.to_vec();
        let middle = other.len() / 4 * 2;
        // 1 and -1 by turns.
        for (i, weight) in other[middle..].chunks_exact_mut(2).enumerate() {
            weight.copy_from_slice(&[0x80, [0x3f, 0xbf][i % 2]]);
        }
        body = other.into();
    }
    let len = body.len();
    let shift = u64::from(matches!(fault, Some(Fault::Shifted)));
    let range = format!("bytes {}-{}/{total}", start + shift, end.saturating_sub(1));
    let body = match fault {
        Some(Fault::Cut(n)) => {
            let some: [std::io::Result<Bytes>; 1] = [Ok(body.slice(..n.min(len)))];
            // A pause, in which the server sends what it has.
            let end = futures_util::stream::once(async {
                tokio::task::yield_now().await;
                Err(std::io::ErrorKind::ConnectionReset.into())
            });
            Body::from_stream(futures_util::stream::iter(some).chain(end))
        }
        Some(Fault::Stall(n)) => {
            let some: [std::io::Result<Bytes>; 1] = [Ok(body.slice(..n.min(len)))];
            Body::from_stream(futures_util::stream::iter(some).chain(futures_util::stream::pending()))
        }
        _ => Body::from(body),
    };
    let headers = [("content-range", range), ("content-length", len.to_string())];
    (status, headers, body).into_response()
}

/// Writes a checkpoint whose tensors lie layer by layer in `shards` files, as they do on hubs.
pub fn write_checkpoint(dir: &Path, layers: usize, experts: usize, shards: usize) {
    let mut spec = TinyModel::qwen3(0).spec;
    spec.d_model = 256;
    spec.layers = vec![FfnKind::Moe; layers];
    spec.moe.n_experts = experts;
    spec.moe.d_expert = 256;
    std::fs::create_dir_all(dir).unwrap();
    TinyModel::new(spec, 1).write_checkpoint(dir, CheckpointOptions::default());
    let single = dir.join("model.safetensors");
    let bytes = std::fs::read(&single).unwrap();
    std::fs::remove_file(&single).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let mut tensors = file.tensors();
    let layer = |name: &str| -> u32 {
        let layer = name.strip_prefix("model.layers.").and_then(|rest| rest.split('.').next());
        layer.map_or(if name.contains("embed") { 0 } else { u32::MAX }, |layer| layer.parse().unwrap())
    };
    tensors.sort_by_key(|(name, _)| (layer(name), name.clone()));
    let total: usize = tensors.iter().map(|(_, tensor)| tensor.data().len()).sum();
    let mut files = vec![Vec::new(); shards];
    let mut map = BTreeMap::new();
    let mut at = 0;
    for (name, tensor) in tensors {
        let shard = (at * shards / total).min(shards - 1);
        at += tensor.data().len();
        map.insert(name.clone(), format!("model-{:05}-of-{shards:05}.safetensors", shard + 1));
        files[shard].push((name, tensor));
    }
    for (shard, tensors) in files.into_iter().enumerate() {
        let path = dir.join(format!("model-{:05}-of-{shards:05}.safetensors", shard + 1));
        std::fs::write(path, safetensors::serialize(tensors, None).unwrap()).unwrap();
    }
    let index = json!({"metadata": {"total_size": total}, "weight_map": map});
    std::fs::write(dir.join("model.safetensors.index.json"), index.to_string()).unwrap();
}

/// All files of a directory.
pub fn files(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(dir).unwrap().map(Result::unwrap);
    entries.map(|e| (e.file_name().into_string().unwrap(), std::fs::read(e.path()).unwrap())).collect()
}
