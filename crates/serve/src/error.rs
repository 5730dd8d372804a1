//! What a client is told when something goes wrong: one error, worded in the shape of the API it came by.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value as Json, json};
use smoe_engine::EngineError;
use smoe_text::TextError;

/// Seconds after which a client that was turned away may come again.
const RETRY_AFTER: &str = "2";

/// An error as a client sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    /// The HTTP status; within a stream it is lost, `kind` stays.
    pub status: StatusCode,
    /// What is wrong, and what to do if there is something to do.
    pub message: String,
    /// OpenAI's `type`.
    pub kind: &'static str,
    /// The field that is wrong.
    pub param: Option<String>,
    /// OpenAI's `code`.
    pub code: Option<&'static str>,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), kind, param: None, code: None }
    }

    /// 400: the request is wrong.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", message)
    }

    /// 400: a field of the request is wrong.
    pub fn field(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::invalid(message).at(param)
    }

    /// 400: the prompt, or what is to follow it, does not fit. Names both numbers.
    pub fn context(context: usize, prompt: usize, completion: Option<usize>) -> Self {
        let wanted = match completion {
            Some(tokens) => {
                format!("{} tokens ({prompt} of the prompt, {tokens} to follow)", prompt + tokens)
            }
            None => format!("a prompt of {prompt} tokens"),
        };
        Self::invalid(format!(
            "this model's context is {context} tokens and the request needs {wanted}: drop older messages or \
             lower max_tokens"
        ))
        .coded("context_length_exceeded")
        .at("messages")
    }

    /// 404: no such model.
    pub fn no_model(name: &str) -> Self {
        Self::new(
            StatusCode::NOT_FOUND,
            "invalid_request_error",
            format!("the model `{name}` does not exist"),
        )
        .coded("model_not_found")
        .at("model")
    }

    /// 404: no such path.
    pub fn no_route(method: &str, path: &str) -> Self {
        let message = format!("there is nothing at {method} {path}");
        Self::new(StatusCode::NOT_FOUND, "invalid_request_error", message).coded("unknown_url")
    }

    /// 405: not this way.
    pub fn wrong_method(method: &str, path: &str) -> Self {
        let message = format!("{path} does not take {method}");
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "invalid_request_error", message)
            .coded("method_not_allowed")
    }

    /// 401: the key is missing or wrong.
    pub fn unauthorised() -> Self {
        let message = "this server wants its API key: send it as `Authorization: Bearer KEY`";
        Self::new(StatusCode::UNAUTHORIZED, "authentication_error", message).coded("invalid_api_key")
    }

    /// 403: a page of another origin asks, and that was not allowed.
    pub fn foreign_origin(origin: &str) -> Self {
        let message =
            format!("pages of {origin} may not use this server; start it with --cors to allow that");
        Self::new(StatusCode::FORBIDDEN, "permission_error", message).coded("origin_not_allowed")
    }

    /// 408: the body did not arrive in time.
    pub fn slow_body() -> Self {
        Self::new(StatusCode::REQUEST_TIMEOUT, "invalid_request_error", "the body did not arrive in time")
    }

    /// 408: so many bytes of an answer wait for a client that does not take them.
    pub fn slow_reader(waiting: usize) -> Self {
        let message =
            format!("the answer is read more slowly than it is written: {waiting} bytes of it wait");
        Self::new(StatusCode::REQUEST_TIMEOUT, "invalid_request_error", message).coded("slow_reader")
    }

    /// 413: the body is too large.
    pub fn large_body(limit: usize) -> Self {
        let message = format!("the body is larger than the {limit} bytes that are allowed");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", message).coded("request_too_large")
    }

    /// 429: so many answers are under way or wait already.
    pub fn busy(taken: usize) -> Self {
        let message =
            format!("{taken} answers are under way or waiting, which is all that may: try again later");
        Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message).coded("queue_full")
    }

    /// 500: our own fault, or the machine's.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message)
    }

    /// 503: the model cannot be loaded.
    pub fn not_loaded(name: &str, why: &str) -> Self {
        let message = format!("the model `{name}` could not be loaded: {why}");
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", message).coded("model_load_failed")
    }

    /// 503: the server ends.
    pub fn ending() -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", "the server is shutting down")
            .coded("shutting_down")
    }

    /// With OpenAI's code.
    #[must_use]
    pub fn coded(mut self, code: &'static str) -> Self {
        self.code = Some(code);
        self
    }

    /// Naming the field.
    #[must_use]
    pub fn at(mut self, param: impl Into<String>) -> Self {
        self.param = Some(param.into());
        self
    }

    /// OpenAI's error object, as it also stands in a stream.
    pub fn openai(&self) -> Json {
        json!({"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}})
    }

    /// Anthropic's error object.
    pub fn anthropic(&self, request_id: &str) -> Json {
        let kind = match self.status.as_u16() {
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            413 => "request_too_large",
            429 => "rate_limit_error",
            503 => "overloaded_error",
            500.. => "api_error",
            _ => "invalid_request_error",
        };
        json!({
            "type": "error",
            "error": {"type": kind, "message": self.message},
            "request_id": request_id,
        })
    }

    /// Ollama's error object.
    pub fn ollama(&self) -> Json {
        json!({"error": self.message})
    }
}

/// Handlers of every API return the error itself; the front words it for the API (`front::worded`).
impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = self.status.into_response();
        if matches!(self.status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE) {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static(RETRY_AFTER));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response.extensions_mut().insert(self);
        response
    }
}

impl From<EngineError> for ApiError {
    fn from(error: EngineError) -> Self {
        let message = error.to_string();
        match error {
            EngineError::QueueFull { queued } => Self::busy(queued),
            EngineError::ContextFull { .. } => Self::invalid(message).coded("context_length_exceeded"),
            EngineError::Sampling { name, .. } => Self::field(name, message),
            EngineError::EmptyPrompt | EngineError::Token { .. } => Self::field("prompt", message),
            EngineError::Constraint { .. } => Self::internal(message).coded("constraint_failed"),
            _ => Self::internal(message),
        }
    }
}

impl From<TextError> for ApiError {
    fn from(error: TextError) -> Self {
        let message = error.to_string();
        match error {
            TextError::TemplateRaised { .. }
            | TextError::TemplateFailed { .. }
            | TextError::TemplateExhausted { .. }
            | TextError::Encode { .. } => Self::field("messages", message),
            TextError::Schema { .. } => Self::field("response_format", message).coded("invalid_schema"),
            _ => Self::internal(message),
        }
    }
}
