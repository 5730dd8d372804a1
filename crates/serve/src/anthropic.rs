//! Anthropic's API: messages, streaming and not, and the count of a prompt's tokens.
//!
//! The list of models is OpenAI's, which has Anthropic's fields as well (`openai.rs`); errors are worded in
//! `front.rs`.

mod events;
mod request;
#[cfg(test)]
mod tests;

use std::convert::Infallible;

use axum::extract::{Extension, State};
use axum::response::sse::{Event as Sent, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Json, Router};
use futures_util::stream::{self, StreamExt};
use serde_json::{Value, json};

use crate::AppState;
use crate::error::ApiError;
use crate::front::{RequestId, Wire};
use crate::id;
use crate::turn::{collect, count, start};

use events::{Event, Events, Message};
use request::Request;

pub(crate) use request::{LONGEST_NAME, checked_name, effort};

/// The routes of this API.
pub(crate) fn routes() -> Router<AppState> {
    Router::new().route("/v1/messages", post(messages)).route("/v1/messages/count_tokens", post(count_tokens))
}

async fn messages(
    State(state): State<AppState>,
    Extension(RequestId(request_id)): Extension<RequestId>,
    Wire(request): Wire<Request>,
) -> Result<Response, ApiError> {
    let (streamed, max_tokens) = (request.streams(), request.max_tokens()?);
    let (info, deltas) = start(&state, request.turn()?).await?;
    let message = Message::new(id::new("msg_"), info.model);
    if !streamed {
        let reply = collect(deltas, 1).await?.remove(0);
        return Ok(Json(message.with(reply, max_tokens)).into_response());
    }
    let mut events = Events::new(message, max_tokens, request_id);
    let events = deltas.flat_map(move |delta| stream::iter(events.push(delta)));
    let heartbeat = KeepAlive::new().interval(state.config().heartbeat).event(sent(&Event::Ping));
    let events = events.map(|event| Ok::<_, Infallible>(sent(&event)));
    Ok(Sse::new(events).keep_alive(heartbeat).into_response())
}

/// An event as it is sent: its type is its name too.
fn sent(event: &Event) -> Sent {
    let data = event.data();
    let name = data["type"].as_str().unwrap_or_default();
    Sent::default().event(name).data(data.to_string())
}

async fn count_tokens(
    State(state): State<AppState>,
    Wire(request): Wire<Request>,
) -> Result<Json<Value>, ApiError> {
    let tokens = count(&state, request.turn()?).await?;
    Ok(Json(json!({"input_tokens": tokens})))
}
