//! What every request passes: its id, the key, one line of log, and the wording of errors.

use std::time::Instant;

use axum::body::{Body, to_bytes};
use axum::extract::{FromRequest, MatchedPath, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, Uri, header};
use axum::middleware::Next;
use axum::response::Response;
use serde::de::DeserializeOwned;
use serde_json::Value as Json;

use crate::AppState;
use crate::error::ApiError;
use crate::id;

/// Names a request, both ways.
pub const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// The same, by Anthropic's name.
const ANTHROPIC_REQUEST_ID: HeaderName = HeaderName::from_static("request-id");
/// Clients of Anthropic's API send it, and no others.
pub const ANTHROPIC_VERSION: HeaderName = HeaderName::from_static("anthropic-version");
/// Where Anthropic's clients have the key.
const API_KEY: HeaderName = HeaderName::from_static("x-api-key");

/// The longest id that a client may give.
const LONGEST_ID: usize = 128;

/// What a request is called; in its extensions.
#[derive(Clone, Debug)]
pub struct RequestId(pub String);

/// Whose API a request speaks, and so how its errors are worded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// OpenAI's, and our own.
    OpenAi,
    /// Anthropic's.
    Anthropic,
    /// Ollama's.
    Ollama,
}

impl Dialect {
    /// By where it goes, and the header that Anthropic's clients send everywhere.
    pub fn of(path: &str, headers: &HeaderMap) -> Self {
        if path.starts_with("/v1/messages") || headers.contains_key(ANTHROPIC_VERSION) {
            Self::Anthropic
        } else if path.starts_with("/api/") {
            Self::Ollama
        } else {
            Self::OpenAi
        }
    }
}

/// The middleware around all routes.
pub async fn front(State(state): State<AppState>, mut request: Request, next: Next) -> Response {
    let start = Instant::now();
    let id = request_id(request.headers());
    request.extensions_mut().insert(RequestId(id.clone()));
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let route = request.extensions().get::<MatchedPath>().map(|route| route.as_str().to_owned());
    let dialect = Dialect::of(&path, request.headers());

    let response = match admit(&state, &path, request.headers()) {
        Ok(()) => next.run(request).await,
        Err(error) => axum::response::IntoResponse::into_response(error),
    };
    let mut response = worded(response, dialect, &id);
    if let Ok(value) = HeaderValue::from_str(&id) {
        if dialect == Dialect::Anthropic {
            response.headers_mut().insert(ANTHROPIC_REQUEST_ID, value.clone());
        }
        response.headers_mut().insert(REQUEST_ID, value);
    }

    let status = response.status().as_u16();
    state.tally().responded(route.as_deref().unwrap_or("none"), status);
    tracing::info!(%method, path, status, ms = start.elapsed().as_millis() as u64, id);
    response
}

/// The client's own id, if it can be one.
fn request_id(headers: &HeaderMap) -> String {
    let given = headers.get(REQUEST_ID).and_then(|id| id.to_str().ok());
    let given = given.filter(|id| (1..=LONGEST_ID).contains(&id.len()));
    given.map_or_else(|| id::new("req_"), str::to_owned)
}

/// Whether a request may come in. The console's page is open, and so is what watches over the server.
fn admit(state: &AppState, path: &str, headers: &HeaderMap) -> Result<(), ApiError> {
    if !["/v1/", "/api/", "/smoe/"].iter().any(|guarded| path.starts_with(guarded)) {
        return Ok(());
    }
    if let Some(key) = &state.config().api_key {
        let bearer = headers.get(header::AUTHORIZATION).map(HeaderValue::as_bytes);
        let bearer = bearer.and_then(|value| value.split_at_checked(7));
        let bearer = bearer.filter(|(scheme, _)| scheme.eq_ignore_ascii_case(b"bearer ")).map(|(_, key)| key);
        let given = bearer.or_else(|| headers.get(API_KEY).map(HeaderValue::as_bytes));
        if !given.is_some_and(|given| same(given, key.as_bytes())) {
            return Err(ApiError::unauthorised());
        }
    }
    // A page somewhere on the web must not use the server of who looks at it.
    let text = |name| headers.get(name).and_then(|value: &HeaderValue| value.to_str().ok());
    match text(header::ORIGIN) {
        Some(origin) if !state.config().cors => {
            let host = origin.split_once("://").map(|(_, host)| host);
            if host.is_some() && host == text(header::HOST) {
                Ok(())
            } else {
                Err(ApiError::foreign_origin(origin))
            }
        }
        _ => Ok(()),
    }
}

/// Compares in a time that tells nothing but the length.
fn same(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |differ, (a, b)| differ | (a ^ b)) == 0
}

/// A response with its error in the words of the client's API.
fn worded(mut response: Response, dialect: Dialect, id: &str) -> Response {
    let Some(error) = response.extensions_mut().remove::<ApiError>() else { return response };
    let body = match dialect {
        Dialect::OpenAi => error.openai(),
        Dialect::Anthropic => error.anthropic(id),
        Dialect::Ollama => error.ollama(),
    };
    let json = HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, json);
    response.headers_mut().remove(header::CONTENT_LENGTH);
    response.map(|_| Body::from(body.to_string()))
}

/// For paths that there are not.
pub async fn no_route(method: Method, uri: Uri) -> ApiError {
    ApiError::no_route(method.as_str(), uri.path())
}

/// For methods that a path does not take.
pub async fn wrong_method(method: Method, uri: Uri) -> ApiError {
    ApiError::wrong_method(method.as_str(), uri.path())
}

/// A JSON body, whatever the content type says; what is wrong with it is told with its place.
#[derive(Clone, Copy, Debug)]
pub struct Wire<T>(pub T);

impl<T: DeserializeOwned> FromRequest<AppState> for Wire<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &AppState) -> Result<Self, ApiError> {
        let limit = state.config().body_limit;
        let body = tokio::time::timeout(state.config().body_timeout, to_bytes(request.into_body(), limit));
        let body = body.await.map_err(|_| ApiError::slow_body())?;
        // A body breaks off in no other way that its client would hear of.
        let body = body.map_err(|_| ApiError::large_body(limit))?;
        parse(&body).map(Wire)
    }
}

/// Reads a body.
fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, ApiError> {
    let mut reader = serde_json::Deserializer::from_slice(body);
    let value = serde_path_to_error::deserialize(&mut reader).map_err(|error| {
        let path = error.path().to_string();
        let message = match error.inner() {
            inner if inner.is_data() && path != "." => format!("{path}: {inner}"),
            inner if inner.is_data() => inner.to_string(),
            inner => format!("the body is not JSON: {inner}"),
        };
        let error_at = ApiError::invalid(message);
        if path == "." || !error.inner().is_data() { error_at } else { error_at.at(path) }
    })?;
    reader.end().map_err(|error| ApiError::invalid(format!("the body is not JSON: {error}")))?;
    Ok(value)
}

/// A body that is any JSON.
pub type WireJson = Wire<Json>;

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, serde::Deserialize)]
    struct Inner {
        n: u32,
    }

    #[derive(Debug, serde::Deserialize)]
    struct Outer {
        inner: Vec<Inner>,
    }

    #[test]
    fn a_wrong_field_is_named_with_its_place() {
        assert_eq!(parse::<Outer>(br#"{"inner": [{"n": 1}]}"#).unwrap().inner[0].n, 1);
        let error = parse::<Outer>(br#"{"inner": [{"n": 1}, {"n": "x"}]}"#).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("inner[1].n"));
        assert!(error.message.starts_with("inner[1].n: invalid type"), "{}", error.message);
    }

    #[test]
    fn what_is_no_json_is_said_to_be_none() {
        for body in [&b""[..], b"{", b"{} {}", b"\xff", b"{\"inner\": [] } x"] {
            let error = parse::<Json>(body).unwrap_err();
            assert!(error.message.contains("not JSON"), "{body:?}: {}", error.message);
        }
        assert!(parse::<Json>(&[b'['; 500]).is_err());
    }

    #[test]
    fn keys_are_compared_whole() {
        assert!(same(b"secret", b"secret"));
        for wrong in ["", "secre", "secrets", "Secret"] {
            assert!(!same(wrong.as_bytes(), b"secret"));
        }
    }
}
