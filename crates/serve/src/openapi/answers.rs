//! What answers hold.

use serde_json::{Map, Value, json};

/// Each by its name.
pub(super) fn schemas() -> Map<String, Value> {
    let mut schemas = Map::new();
    let mut add = |name: &str, schema| schemas.insert(name.to_owned(), schema);
    let (text, whole, number) =
        (json!({"type": "string"}), json!({"type": "integer", "minimum": 0}), "number");
    let time = json!({"type": "string", "format": "date-time"});
    add("Health", closed(json!({"status": {"const": "ok"}})));
    add("Document", json!({"type": "object", "required": ["openapi", "info", "paths", "components"]}));
    add(
        "Error",
        closed(json!({
            "error": closed(json!({
                "message": text, "type": text, "param": nullable("string"), "code": nullable("string"),
            })),
        })),
    );
    add(
        "AnthropicError",
        closed(json!({
            "type": {"const": "error"},
            "error": closed(json!({
                "type": {"enum": [
                    "invalid_request_error", "authentication_error", "permission_error", "not_found_error",
                    "request_too_large", "rate_limit_error", "api_error", "overloaded_error",
                ]},
                "message": text,
            })),
            "request_id": text,
        })),
    );
    add("OllamaError", closed(json!({"error": text})));
    add(
        "Model",
        open(json!({
            "id": text,
            "object": {"const": "model"},
            "created": whole,
            "owned_by": text,
            "type": {"const": "model"},
            "display_name": text,
            "created_at": time,
            "smoe": closed(json!({
                "path": text, "bytes": whole, "layers": whole, "experts": whole, "top_k": whole,
                "context": whole,
                "bits": {"type": number}, "family": text, "loaded": {"type": "boolean"},
            })),
        })),
    );
    add(
        "Models",
        open(json!({
            "object": {"const": "list"},
            "data": {"type": "array", "items": {"$ref": "#/components/schemas/Model"}},
        })),
    );
    add(
        "Usage",
        open(json!({
            "prompt_tokens": whole,
            "completion_tokens": whole,
            "total_tokens": whole,
            "prompt_tokens_details": open(json!({"cached_tokens": whole})),
            "completion_tokens_details": open(json!({"reasoning_tokens": whole})),
        })),
    );
    let head = |object: &str, choice: Value| {
        open(json!({
            "id": text,
            "object": {"const": object},
            "created": whole,
            "model": text,
            "system_fingerprint": text,
            "choices": {"type": "array", "items": choice},
            "usage": {"$ref": "#/components/schemas/Usage"},
        }))
    };
    let finish = json!({"enum": ["stop", "length", "tool_calls"]});
    add(
        "ChatCompletion",
        head(
            "chat.completion",
            open(json!({
                "index": whole,
                "message": message(),
                "logprobs": nullable("object"),
                "finish_reason": finish,
            })),
        ),
    );
    add(
        "Completion",
        head(
            "text_completion",
            open(json!({
                "index": whole,
                "text": text,
                "logprobs": nullable("object"),
                "finish_reason": finish,
            })),
        ),
    );
    add("Message", anthropic());
    add("TokenCount", closed(json!({"input_tokens": whole})));
    let details = open(json!({
        "parent_model": text, "format": text, "family": text, "families": {"type": "array", "items": text},
        "parameter_size": text, "quantization_level": text,
    }));
    add("OllamaVersion", closed(json!({"version": text})));
    add(
        "OllamaModels",
        closed(json!({"models": {"type": "array", "items": closed(json!({
            "name": text, "model": text, "modified_at": time, "size": whole,
            "digest": text, "details": details,
        }))}})),
    );
    add(
        "OllamaRunning",
        closed(json!({"models": {"type": "array", "items": closed(json!({
            "name": text, "model": text, "size": whole, "size_vram": whole, "digest": text,
            "context_length": whole, "details": details,
        }))}})),
    );
    add(
        "OllamaGenerate",
        json!({
            "type": "object",
            "required": ["model", "created_at", "response", "done", "done_reason"],
            "properties": {
                "model": text, "created_at": time, "response": text, "thinking": text,
                "done": {"const": true}, "done_reason": {"enum": ["stop", "length", "load"]},
                "total_duration": whole, "load_duration": whole,
                "prompt_eval_count": whole, "prompt_eval_duration": whole,
                "eval_count": whole, "eval_duration": whole,
            },
        }),
    );
    add(
        "OllamaModel",
        open(json!({
            "modified_at": time,
            "details": details,
            "model_info": {"type": "object"},
            "capabilities": {"type": "array", "items": text},
        })),
    );
    add(
        "OllamaChat",
        open(json!({
            "model": text,
            "created_at": time,
            "message": {
                "type": "object",
                "required": ["role", "content"],
                "properties": {
                    "role": {"const": "assistant"}, "content": text, "thinking": text,
                    "tool_calls": {"type": "array"},
                },
            },
            "done": {"const": true},
            "done_reason": {"enum": ["stop", "length"]},
            "total_duration": whole,
            "load_duration": whole,
            "prompt_eval_count": whole,
            "prompt_eval_duration": whole,
            "eval_count": whole,
            "eval_duration": whole,
        })),
    );
    schemas
}

fn nullable(kind: &str) -> Value {
    json!({"type": [kind, "null"]})
}

/// An object that has these fields, and may have more.
fn open(fields: Value) -> Value {
    let required: Vec<&String> = fields.as_object().into_iter().flat_map(Map::keys).collect();
    json!({"type": "object", "required": required, "properties": fields})
}

/// An object that has these fields and no others.
fn closed(fields: Value) -> Value {
    let mut object = open(fields);
    object["additionalProperties"] = false.into();
    object
}

/// OpenAI's message of the model.
fn message() -> Value {
    json!({
        "type": "object",
        "required": ["role", "content"],
        "properties": {
            "role": {"const": "assistant"},
            "content": nullable("string"),
            "refusal": {"type": "null"},
            "reasoning_content": {"type": "string"},
            "tool_calls": {"type": "array", "items": open(json!({
                "id": {"type": "string"},
                "type": {"const": "function"},
                "function": closed(json!({"name": {"type": "string"}, "arguments": {"type": "string"}})),
            }))},
        },
    })
}

fn anthropic() -> Value {
    let (text, whole) = (json!({"type": "string"}), json!({"type": "integer", "minimum": 0}));
    let block = json!({"anyOf": [
        closed(json!({"type": {"const": "text"}, "text": text})),
        closed(json!({"type": {"const": "thinking"}, "thinking": text, "signature": text})),
        closed(json!({"type": {"const": "tool_use"}, "id": text, "name": text, "input": {"type": "object"}})),
    ]});
    closed(json!({
        "id": text,
        "type": {"const": "message"},
        "role": {"const": "assistant"},
        "model": text,
        "content": {"type": "array", "items": block},
        "stop_reason": {"enum": [
            "end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use",
        ]},
        "stop_sequence": nullable("string"),
        "usage": closed(json!({
            "input_tokens": whole, "cache_creation_input_tokens": whole, "cache_read_input_tokens": whole,
            "output_tokens": whole,
        })),
    }))
}
