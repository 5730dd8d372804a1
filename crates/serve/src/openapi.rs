//! `/openapi.json`: every route, what it takes and what it answers, as OpenAPI 3.1.
//!
//! Bounds are those of the code that checks them; `tests/apis/openapi.rs` and `tests/clients/schemathesis.sh`
//! hold the server to the document.

mod answers;
mod requests;

use axum::extract::State;
use axum::routing::get;
use axum::{Json, Router};
use serde_json::{Map, Value, json};

use crate::AppState;

const ABOUT: &str = "Mixture-of-experts models larger than memory, behind the APIs of OpenAI, Anthropic and \
                     Ollama. Unknown fields of a request are passed over; null is as good as absent where a \
                     field is not required.";

/// `/openapi.json`.
pub(crate) fn routes() -> Router<AppState> {
    Router::new().route("/openapi.json", get(serve))
}

async fn serve(State(state): State<AppState>) -> Json<Value> {
    Json(document(state.config().api_key.is_some()))
}

/// What most are there for.
const GO_ON: &str = "Continue a conversation";

/// Whose words a route's errors have.
#[derive(Clone, Copy, Debug)]
enum Words {
    OpenAi,
    Anthropic,
    Ollama,
}

/// The document of a server that wants a key, or of one that does not.
fn document(key: bool) -> Value {
    let mut schemas = Map::new();
    schemas.extend(requests::schemas());
    schemas.extend(answers::schemas());
    let mut document = json!({
        "openapi": "3.1.0",
        "info": {
            "title": "S-MoE",
            "version": env!("CARGO_PKG_VERSION"),
            "description": ABOUT,
        },
        "paths": paths(key),
        "components": {"schemas": schemas},
    });
    if key {
        document["components"]["securitySchemes"] = json!({
            "bearer": {"type": "http", "scheme": "bearer"},
            "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        });
    }
    document
}

/// Those that a key guards, and those that are open.
fn paths(key: bool) -> Value {
    let (open_ai, anthropic, ollama) = (Words::OpenAi, Words::Anthropic, Words::Ollama);
    let (sse, ndjson) = (Some("text/event-stream"), Some("application/x-ndjson"));
    let mut model = read("model", "A model", open_ai, "Model");
    model["parameters"] =
        json!([{"name": "id", "in": "path", "required": true, "schema": {"type": "string"}}]);
    model["responses"]["404"] = failure("There is no such model", open_ai);
    let count = ("Count a prompt's tokens", "CountRequest", "TokenCount");
    let mut guarded = json!({
        "/v1/models": {"get": read("models", "The models", open_ai, "Models")},
        "/v1/models/{id}": {"get": model},
        "/v1/chat/completions": {"post": ask("chat", open_ai, (GO_ON, "ChatRequest", "ChatCompletion"), sse)},
        "/v1/completions": {"post":
            ask("complete", open_ai, ("Continue a text", "CompletionRequest", "Completion"), sse)},
        "/v1/messages": {"post": ask("message", anthropic, (GO_ON, "MessageRequest", "Message"), sse)},
        "/v1/messages/count_tokens": {"post": ask("count_tokens", anthropic, count, None)},
        "/api/version": {"get": read("ollama_version", "The API's version", ollama, "OllamaVersion")},
        "/api/tags": {"get": read("ollama_tags", "The models", ollama, "OllamaModels")},
        "/api/ps": {"get": read("ollama_ps", "The models that are loaded", ollama, "OllamaRunning")},
        "/api/generate": {"post": ask(
            "ollama_generate",
            ollama,
            ("Answer a prompt", "OllamaGenerateRequest", "OllamaGenerate"),
            ndjson,
        )},
        "/api/show": {"post":
            ask("ollama_show", ollama, ("A model", "OllamaShowRequest", "OllamaModel"), None)},
        "/api/chat": {"post": ask("ollama_chat", ollama, (GO_ON, "OllamaChatRequest", "OllamaChat"), ndjson)},
        "/smoe/instrument": {"get": instrument()},
    });
    if key {
        let operations = guarded.as_object_mut().into_iter().flat_map(|paths| paths.values_mut());
        for operation in operations.filter_map(Value::as_object_mut).flat_map(|methods| methods.values_mut())
        {
            operation["security"] = json!([{"bearer": []}, {"header": []}]);
        }
    }
    let mut paths = json!({
        "/": {"get": open("console", "The console", "text/html")},
        "/favicon.ico": {"get": open("icon", "Its icon", "image/svg+xml")},
        "/health": {"get": open_json("health", "Whether the server is there", "Health")},
        "/metrics": {"get": open("metrics", "Counters as Prometheus reads them", "text/plain")},
        "/openapi.json": {"get": open_json("openapi", "This document", "Document")},
    });
    if let (Some(paths), Value::Object(guarded)) = (paths.as_object_mut(), guarded) {
        paths.extend(guarded);
    }
    paths
}

fn reference(schema: &str) -> Value {
    json!({"$ref": format!("#/components/schemas/{schema}")})
}

fn failure(description: &str, words: Words) -> Value {
    let schema = match words {
        Words::OpenAi => "Error",
        Words::Anthropic => "AnthropicError",
        Words::Ollama => "OllamaError",
    };
    json!({"description": description, "content": {"application/json": {"schema": reference(schema)}}})
}

/// Failures of every route that a key guards.
fn guarded(words: Words) -> Map<String, Value> {
    let mut responses = Map::new();
    for (status, description) in
        [("401", "The key is missing or wrong"), ("403", "Pages of that origin may not use the server")]
    {
        responses.insert(status.to_owned(), failure(description, words));
    }
    responses
}

/// A route that reads something.
fn read(id: &str, summary: &str, words: Words, answer: &str) -> Value {
    let mut operation = open_json(id, summary, answer);
    if let Some(responses) = operation["responses"].as_object_mut() {
        responses.extend(guarded(words));
    }
    operation
}

/// A route that takes a body: what it does, its request and its answer, the type of its answer in pieces.
fn ask(
    id: &str,
    words: Words,
    (summary, request, answer): (&str, &str, &str),
    stream: Option<&str>,
) -> Value {
    let mut operation = read(id, summary, words, answer);
    operation["requestBody"] =
        json!({"required": true, "content": {"application/json": {"schema": reference(request)}}});
    for (status, description) in [
        ("400", "The request makes no sense, or does not fit the context"),
        ("404", "There is no such model"),
        ("408", "The body did not arrive in time"),
        ("413", "The body is too large"),
        ("500", "Something failed here"),
    ] {
        operation["responses"][status] = failure(description, words);
    }
    for (status, description) in [
        ("429", "Too many requests wait"),
        ("503", "The model could not be loaded, or the server is shutting down"),
    ] {
        operation["responses"][status] = failure(description, words);
        operation["responses"][status]["headers"] =
            json!({"retry-after": {"description": "Seconds to wait", "schema": {"type": "string"}}});
    }
    if let Some(kind) = stream {
        // Events and lines are described where their API is.
        operation["responses"]["200"]["content"][kind] = json!({"schema": {"type": "string"}});
    }
    operation
}

/// A route without guard.
fn open(id: &str, summary: &str, kind: &str) -> Value {
    let content = json!({kind: {"schema": {"type": "string"}}});
    json!({
        "operationId": id,
        "summary": summary,
        "responses": {"200": {"description": "It", "content": content}},
    })
}

fn open_json(id: &str, summary: &str, answer: &str) -> Value {
    let mut operation = open(id, summary, "application/json");
    operation["responses"]["200"]["content"]["application/json"]["schema"] = reference(answer);
    operation
}

fn instrument() -> Value {
    let mut operation = open("instrument", "What the server is doing, without end", "text/event-stream");
    if let Some(responses) = operation["responses"].as_object_mut() {
        responses.extend(guarded(Words::OpenAi));
    }
    operation
}

#[cfg(test)]
mod tests {
    use super::*;

    fn references(value: &Value, out: &mut Vec<String>) {
        match value {
            Value::Object(fields) => {
                out.extend(fields.get("$ref").and_then(Value::as_str).map(str::to_owned));
                fields.values().for_each(|value| references(value, out));
            }
            Value::Array(values) => values.iter().for_each(|value| references(value, out)),
            _ => {}
        }
    }

    #[test]
    fn every_schema_is_there_and_used() {
        let document = document(true);
        let mut used = Vec::new();
        references(&document, &mut used);
        for reference in &used {
            let pointer = reference.strip_prefix('#').unwrap();
            assert!(document.pointer(pointer).is_some(), "{reference}");
        }
        for name in document["components"]["schemas"].as_object().unwrap().keys() {
            assert!(
                used.iter().any(|reference| reference.ends_with(&format!("/{name}"))),
                "{name} is not used"
            );
        }
    }

    #[test]
    fn operations_have_names_of_their_own() {
        let document = document(false);
        let mut ids = std::collections::HashSet::new();
        for (path, methods) in document["paths"].as_object().unwrap() {
            for operation in methods.as_object().unwrap().values() {
                let id = operation["operationId"].as_str().unwrap();
                assert!(ids.insert(id.to_owned()), "{id} twice");
                assert!(operation.get("security").is_none());
                assert_eq!(
                    path.starts_with("/v1/") || path.starts_with("/api/") || path.starts_with("/smoe/"),
                    operation["responses"].get("401").is_some(),
                    "{path}"
                );
            }
        }
    }
}
