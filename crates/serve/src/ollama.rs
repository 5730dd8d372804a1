//! Ollama's API, as far as its clients use it: the models, what one is, which are loaded, chat, and one answer to one
//! prompt.

mod chunks;
mod request;
#[cfg(test)]
mod tests;

use std::convert::Infallible;
use std::time::Instant;

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use futures_util::stream::{self, StreamExt};
use serde_json::{Value, json};

use crate::AppState;
use crate::error::ApiError;
use crate::fleet::Listing;
use crate::front::Wire;
use crate::id::rfc3339;
use crate::turn::{Turn, collect, start};

use chunks::{Chunks, Form};
use request::{ChatRequest, GenerateRequest, ShowRequest};

/// The version of Ollama whose API this is: clients compare it with what they need.
const VERSION: &str = "0.12.0";

/// The routes of this API.
pub(crate) fn routes() -> Router<AppState> {
    Router::new()
        .route("/api/version", get(|| async { Json(json!({"version": VERSION})) }))
        .route("/api/tags", get(tags))
        .route("/api/ps", get(ps))
        .route("/api/show", post(show))
        .route("/api/generate", post(generate))
        .route("/api/chat", post(chat))
}

async fn chat(State(state): State<AppState>, Wire(request): Wire<ChatRequest>) -> Result<Response, ApiError> {
    let streamed = request.streams();
    answer(&state, Form::Chat, request.turn()?, streamed).await
}

async fn generate(
    State(state): State<AppState>,
    Wire(request): Wire<GenerateRequest>,
) -> Result<Response, ApiError> {
    let (streamed, loads) = (request.streams(), request.loads().map(str::to_owned));
    let turn = request.turn()?;
    if let Some(name) = loads {
        turn.check()?;
        let listing = state.fleet().resolve(&name).await?;
        state.fleet().acquire(&listing.id, &|_| {}).await?;
        let chunks = Chunks::new(Form::Generate, listing.id, Instant::now());
        return Ok(Json(chunks.loaded()).into_response());
    }
    answer(&state, Form::Generate, turn, streamed).await
}

async fn answer(state: &AppState, form: Form, turn: Turn, streamed: bool) -> Result<Response, ApiError> {
    let asked = Instant::now();
    let (info, deltas) = start(state, turn).await?;
    let mut chunks = Chunks::new(form, info.model, asked);
    if !streamed {
        let reply = collect(deltas, 1).await?.remove(0);
        return Ok(Json(chunks.whole(reply)).into_response());
    }
    let lines = deltas.flat_map(move |delta| stream::iter(chunks.push(delta)));
    let lines = lines.map(|line| Ok::<_, Infallible>(Bytes::from(format!("{line}\n"))));
    Ok(([(CONTENT_TYPE, "application/x-ndjson")], Body::from_stream(lines)).into_response())
}

async fn tags(State(state): State<AppState>) -> Json<Value> {
    let models = state.fleet().models().await;
    let models: Vec<Value> = models
        .iter()
        .map(|(listing, _)| {
            json!({
                "name": listing.id,
                "model": listing.id,
                "modified_at": rfc3339(listing.created),
                "size": listing.bytes,
                "digest": listing.fingerprint,
                "details": details(listing),
            })
        })
        .collect();
    Json(json!({"models": models}))
}

/// The models that are loaded. None leaves by the clock, so none has a time at which it does.
async fn ps(State(state): State<AppState>) -> Json<Value> {
    let models: Vec<Value> = state
        .fleet()
        .loaded()
        .iter()
        .map(|model| {
            let listing = model.listing();
            json!({
                "name": listing.id,
                "model": listing.id,
                "size": model.held_bytes(),
                "size_vram": model.device_bytes(),
                "digest": listing.fingerprint,
                "context_length": model.context(),
                "details": details(listing),
            })
        })
        .collect();
    Json(json!({"models": models}))
}

async fn show(
    State(state): State<AppState>,
    Wire(request): Wire<ShowRequest>,
) -> Result<Json<Value>, ApiError> {
    let listing = state.fleet().resolve(request.model()).await?;
    let family = &listing.family;
    let mut info = json!({"general.architecture": family});
    for (key, value) in [
        ("block_count", listing.layers),
        ("context_length", listing.context),
        ("expert_count", listing.experts),
        ("expert_used_count", listing.top_k),
    ] {
        info[format!("{family}.{key}")] = value.into();
    }
    Ok(Json(json!({
        "modified_at": rfc3339(listing.created),
        "modelfile": "",
        "parameters": "",
        "template": "",
        "details": details(&listing),
        "model_info": info,
        "capabilities": ["completion", "tools", "thinking"],
    })))
}

fn details(listing: &Listing) -> Value {
    json!({
        "parent_model": "",
        "format": "smoe",
        "family": listing.family,
        "families": [listing.family],
        "parameter_size": "",
        "quantization_level": format!("{} bits", listing.bits),
    })
}
