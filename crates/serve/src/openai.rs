//! OpenAI's API: chat and text completions, streaming and not, and the list of models.

mod answer;
mod wire;

use std::convert::Infallible;

use axum::extract::{Path, State};
use axum::http::HeaderMap;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use futures_util::stream::{self, StreamExt};
use serde_json::{Value, json};

use crate::AppState;
use crate::error::ApiError;
use crate::fleet::Listing;
use crate::front::{ANTHROPIC_VERSION, Wire};
use crate::id::rfc3339;
use crate::turn::{Delta, TurnStream, collect, start};

use answer::{Kind, Writer};
use wire::{ChatRequest, CompletionRequest};

/// The routes of this API.
pub fn routes() -> Router<AppState> {
    Router::new()
        .route("/v1/chat/completions", post(chat))
        .route("/v1/completions", post(completions))
        .route("/v1/models", get(models))
        .route("/v1/models/{id}", get(model))
}

async fn chat(State(state): State<AppState>, Wire(request): Wire<ChatRequest>) -> Result<Response, ApiError> {
    let (streamed, include_usage) = (request.is_streamed(), request.includes_usage());
    let turn = request.turn()?;
    let n = turn.n;
    let (info, deltas) = start(&state, turn).await?;
    let writer = Writer::new(Kind::Chat, info, 1, n, include_usage);
    respond(&state, writer, vec![deltas], n, streamed).await
}

async fn completions(
    State(state): State<AppState>,
    Wire(request): Wire<CompletionRequest>,
) -> Result<Response, ApiError> {
    let (streamed, include_usage) = (request.is_streamed(), request.includes_usage());
    let turns = request.turns()?;
    let n = turns[0].n;
    let (mut streams, mut first) = (Vec::new(), None);
    for turn in turns {
        let (info, deltas) = start(&state, turn).await?;
        first.get_or_insert(info);
        streams.push(deltas);
    }
    let info = first.ok_or_else(|| ApiError::field("prompt", "prompt must hold at least one prompt"))?;
    let writer = Writer::new(Kind::Text, info, streams.len(), n, include_usage);
    respond(&state, writer, streams, n, streamed).await
}

/// The response to one or several turns of `n` choices each; their choices are counted on.
async fn respond(
    state: &AppState,
    writer: Writer,
    turns: Vec<TurnStream>,
    n: usize,
    streamed: bool,
) -> Result<Response, ApiError> {
    if !streamed {
        // Collected one after the other, computed all at once.
        let mut replies = Vec::new();
        for turn in turns {
            replies.extend(collect(turn, n).await?);
        }
        return Ok(Json(writer.whole(&replies)).into_response());
    }
    let counted = turns.into_iter().enumerate().map(|(index, turn)| {
        // Each prompt's choices come after those of the prompts before it.
        turn.map(move |delta| (index * n, delta)).boxed()
    });
    let deltas = Some(stream::select_all(counted));
    let events = stream::unfold((deltas, writer), async |(deltas, mut writer)| {
        let mut deltas = deltas?;
        let (offset, delta) = deltas.next().await?;
        let failed = matches!(delta, Delta::Error(_));
        let mut data: Vec<String> = writer.chunks(offset, delta).iter().map(Value::to_string).collect();
        let over = failed || writer.is_over();
        if over {
            data.push("[DONE]".to_owned());
        }
        let events = data.into_iter().map(|data| Ok::<_, Infallible>(Event::default().data(data)));
        // What still runs after a failure is cancelled with its stream.
        Some((stream::iter(events), ((!over).then_some(deltas), writer)))
    });
    let heartbeat = KeepAlive::new().interval(state.config().heartbeat).text("waiting");
    Ok(Sse::new(events.flatten()).keep_alive(heartbeat).into_response())
}

async fn models(State(state): State<AppState>, headers: HeaderMap) -> Json<Value> {
    let models = state.fleet().models().await;
    let data: Vec<Value> = models
        .iter()
        .map(|(listing, model)| describe(listing, model.as_ref().map(|model| model.context())))
        .collect();
    let mut list = json!({"object": "list", "data": data});
    if headers.contains_key(ANTHROPIC_VERSION) {
        // Anthropic's list is this one with pages, of which there is one.
        list["has_more"] = false.into();
        list["first_id"] = models.first().map(|(listing, _)| listing.id.as_str()).into();
        list["last_id"] = models.last().map(|(listing, _)| listing.id.as_str()).into();
    }
    Json(list)
}

async fn model(State(state): State<AppState>, Path(id): Path<String>) -> Result<Json<Value>, ApiError> {
    let listing = state.fleet().resolve(&id).await?;
    let loaded = state.fleet().loaded();
    let model = loaded.iter().find(|model| model.listing().id == listing.id);
    Ok(Json(describe(&listing, model.map(|model| model.context()))))
}

/// A model as both OpenAI's and Anthropic's clients read one.
fn describe(listing: &Listing, loaded: Option<usize>) -> Value {
    json!({
        "id": listing.id,
        "object": "model",
        "created": listing.created,
        "owned_by": "s-moe",
        "type": "model",
        "display_name": listing.id,
        "created_at": rfc3339(listing.created),
        "smoe": {
            "path": listing.path.to_string_lossy(),
            "bytes": listing.bytes,
            "layers": listing.layers,
            "experts": listing.experts,
            "top_k": listing.top_k,
            "context": loaded.unwrap_or(listing.context),
            "bits": listing.bits,
            "family": listing.family,
            "loaded": loaded.is_some(),
        },
    })
}
