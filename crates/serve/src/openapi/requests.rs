//! What requests may hold.

use serde_json::{Map, Value, json};

use crate::anthropic::LONGEST_NAME;
use crate::turn::{MAX_BIASES, MAX_CHOICES, MAX_STOPS, MAX_TOOLS, MAX_TOP_LOGPROBS};

/// Each by its name.
pub(super) fn schemas() -> Map<String, Value> {
    let mut schemas = Map::new();
    let mut add = |name: &str, schema| schemas.insert(name.to_owned(), schema);
    add("ChatRequest", chat());
    add("CompletionRequest", completion());
    add("ChatMessage", chat_message());
    add(
        "TextPart",
        json!({
            "type": "object",
            "required": ["type", "text"],
            "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
        }),
    );
    add(
        "Tool",
        json!({
            "type": "object",
            "required": ["function"],
            "properties": {
                "type": {"enum": ["function", null]},
                "function": {
                    "type": "object",
                    "required": ["name"],
                    "properties": {
                        "name": tool_name(64),
                        "description": nullable("string"),
                        "parameters": nullable("object"),
                    },
                },
            },
        }),
    );
    add("MessageRequest", message(&["model", "messages", "max_tokens"]));
    add("CountRequest", message(&["model", "messages"]));
    add("AnthropicMessage", anthropic_message());
    add(
        "AnthropicTool",
        json!({
            "type": "object",
            "required": ["name", "input_schema"],
            "properties": {
                "type": {"enum": ["custom", null]},
                "name": tool_name(LONGEST_NAME),
                "description": nullable("string"),
                "input_schema": {"type": "object"},
            },
        }),
    );
    add("OllamaChatRequest", ollama_chat());
    add("OllamaGenerateRequest", ollama_generate());
    add(
        "OllamaShowRequest",
        json!({
            "type": "object",
            "required": ["model"],
            "properties": {"model": {"type": "string"}},
        }),
    );
    schemas
}

fn nullable(kind: &str) -> Value {
    json!({"type": [kind, "null"]})
}

fn number(low: f64, high: f64) -> Value {
    json!({"type": ["number", "null"], "minimum": low, "maximum": high})
}

fn integer(low: i64, high: i64) -> Value {
    json!({"type": ["integer", "null"], "minimum": low, "maximum": high})
}

/// As many as a 64-bit machine counts.
fn tokens() -> Value {
    integer(1, i64::MAX)
}

fn tool_name(most: usize) -> Value {
    json!({"type": "string", "pattern": format!("^[A-Za-z0-9_.-]{{1,{most}}}$")})
}

fn stops(most: usize) -> Value {
    json!({"type": "array", "maxItems": most, "items": {"type": "string", "minLength": 1}})
}

fn sampling() -> Map<String, Value> {
    let mut fields = Map::new();
    let mut add = |name: &str, schema| fields.insert(name.to_owned(), schema);
    add("temperature", number(0.0, 2.0));
    add("top_p", number(0.0, 1.0));
    add("top_k", integer(-1, i64::MAX));
    fields
}

/// What both of OpenAI's kinds of request have.
fn common() -> Map<String, Value> {
    let mut fields = sampling();
    let mut add = |name: &str, schema| fields.insert(name.to_owned(), schema);
    add("model", nullable("string"));
    add("min_p", number(0.0, 1.0));
    add("presence_penalty", number(-2.0, 2.0));
    add("frequency_penalty", number(-2.0, 2.0));
    add("repetition_penalty", json!({"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 10}));
    add("seed", integer(i64::MIN, i64::MAX));
    add(
        "logit_bias",
        json!({
            "type": ["object", "null"],
            "maxProperties": MAX_BIASES,
            "propertyNames": {"pattern": "^[0-9]{1,9}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        }),
    );
    add("stop", json!({"anyOf": [{"type": "null"}, {"type": "string", "minLength": 1}, stops(MAX_STOPS)]}));
    add("n", integer(1, MAX_CHOICES as i64));
    add("max_tokens", tokens());
    add("stream", nullable("boolean"));
    add(
        "stream_options",
        json!({
            "type": ["object", "null"],
            "properties": {"include_usage": nullable("boolean")},
        }),
    );
    add("smoe", json!({"type": ["object", "null"], "properties": {"progress": nullable("boolean")}}));
    fields
}

fn object(required: &[&str], fields: Map<String, Value>) -> Value {
    json!({"type": "object", "required": required, "properties": fields})
}

fn chat() -> Value {
    let mut fields = common();
    let mut add = |name: &str, schema| fields.insert(name.to_owned(), schema);
    add(
        "messages",
        json!({
            "type": "array",
            "minItems": 1,
            "items": {"$ref": "#/components/schemas/ChatMessage"},
        }),
    );
    add(
        "tools",
        json!({
            "type": ["array", "null"],
            "maxItems": MAX_TOOLS,
            "items": {"$ref": "#/components/schemas/Tool"},
        }),
    );
    add(
        "tool_choice",
        json!({"anyOf": [
            {"enum": ["none", "auto", "required", null]},
            {
                "type": "object",
                "required": ["function"],
                "properties": {
                    "function": {
                        "type": "object",
                        "required": ["name"],
                        "properties": {"name": {"type": "string"}},
                    },
                },
            },
        ]}),
    );
    add("parallel_tool_calls", nullable("boolean"));
    add(
        "response_format",
        json!({"anyOf": [
            {"type": "null"},
            {
                "type": "object",
                "required": ["type"],
                "properties": {"type": {"enum": ["text", "json_object"]}},
            },
            {
                "type": "object",
                "required": ["type", "json_schema"],
                "properties": {
                    "type": {"const": "json_schema"},
                    "json_schema": {
                        "type": "object",
                        "required": ["schema"],
                        "properties": {"name": nullable("string"), "schema": {"type": "object"}},
                    },
                },
            },
        ]}),
    );
    add("logprobs", nullable("boolean"));
    add("top_logprobs", integer(0, MAX_TOP_LOGPROBS as i64));
    add("max_completion_tokens", tokens());
    add("reasoning_effort", nullable("string"));
    add(
        "continue_final_message",
        json!({"type": ["boolean", "null"], "description": "The answer goes on from the last message"}),
    );
    add(
        "chat_template_kwargs",
        json!({
            "type": ["object", "null"],
            "properties": {"enable_thinking": {"type": "boolean"}},
        }),
    );
    object(&["messages"], fields)
}

fn chat_message() -> Value {
    let text = json!({"anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"$ref": "#/components/schemas/TextPart"}},
    ]});
    let call = json!({
        "type": "object",
        "required": ["function"],
        "properties": {
            "function": {
                "type": "object",
                "required": ["name", "arguments"],
                "properties": {
                    "name": {"type": "string"},
                    "arguments": {"type": ["string", "object"], "description": "A JSON object, or its text"},
                },
            },
        },
    });
    let fields = |roles: &[&str], content: Value| {
        json!({
            "role": {"enum": roles},
            "content": content,
            "name": nullable("string"),
            "tool_call_id": nullable("string"),
            "reasoning_content": nullable("string"),
            "tool_calls": {"type": ["array", "null"], "items": call},
        })
    };
    let told = fields(&["system", "developer", "user", "tool", "function"], text.clone());
    let said = fields(&["assistant"], json!({"anyOf": [{"type": "null"}, text]}));
    json!({"anyOf": [
        {"type": "object", "required": ["role", "content"], "properties": told},
        {"type": "object", "required": ["role"], "properties": said},
    ]})
}

fn completion() -> Value {
    let mut fields = common();
    let mut add = |name: &str, schema| fields.insert(name.to_owned(), schema);
    let id = json!({"type": "integer", "minimum": 0, "maximum": u32::MAX});
    let ids = json!({"type": "array", "minItems": 1, "items": id});
    add(
        "prompt",
        json!({"anyOf": [
            {"type": "string"},
            {"type": "array", "minItems": 1, "maxItems": MAX_CHOICES, "items": {"type": "string"}},
            ids,
            {"type": "array", "minItems": 1, "maxItems": MAX_CHOICES, "items": ids},
        ]}),
    );
    add("echo", nullable("boolean"));
    add("suffix", json!({"type": ["string", "null"], "maxLength": 0}));
    add("best_of", integer(1, MAX_CHOICES as i64));
    add("logprobs", integer(0, 5));
    object(&["prompt"], fields)
}

/// Anthropic's request.
fn message(required: &[&str]) -> Value {
    let mut fields = sampling();
    let mut add = |name: &str, schema| fields.insert(name.to_owned(), schema);
    let mut most = tokens();
    if required.contains(&"max_tokens") {
        most["type"] = "integer".into();
    }
    add("max_tokens", most);
    add("model", json!({"type": "string"}));
    add(
        "messages",
        json!({
            "type": "array",
            "minItems": 1,
            "items": {"$ref": "#/components/schemas/AnthropicMessage"},
            "description": "If the last one is the assistant's, the answer goes on from it",
        }),
    );
    add(
        "system",
        json!({"anyOf": [
            {"type": ["string", "null"]},
            {"type": "array", "items": {"$ref": "#/components/schemas/TextPart"}},
        ]}),
    );
    add(
        "tools",
        json!({
            "type": ["array", "null"],
            "maxItems": MAX_TOOLS,
            "items": {"$ref": "#/components/schemas/AnthropicTool"},
        }),
    );
    let single = nullable("boolean");
    add(
        "tool_choice",
        json!({"anyOf": [
            {"type": "null"},
            {
                "type": "object",
                "required": ["type"],
                "properties": {"type": {"enum": ["auto", "any"]}, "disable_parallel_tool_use": single},
            },
            {
                "type": "object",
                "required": ["type", "name"],
                "properties": {
                    "type": {"const": "tool"},
                    "name": {"type": "string"},
                    "disable_parallel_tool_use": single,
                },
            },
            {"type": "object", "required": ["type"], "properties": {"type": {"const": "none"}}},
        ]}),
    );
    add(
        "thinking",
        json!({
            "type": ["object", "null"],
            "required": ["type"],
            "properties": {"type": {"enum": ["enabled", "adaptive", "between_tools", "disabled"]}},
        }),
    );
    add(
        "output_config",
        json!({
            "type": ["object", "null"],
            "properties": {
                "effort": {"enum": ["low", "medium", "high", "xhigh", "max", null]},
                "format": {
                    "type": ["object", "null"],
                    "required": ["type", "schema"],
                    "properties": {"type": {"const": "json_schema"}, "schema": {"type": "object"}},
                },
            },
        }),
    );
    add("stop_sequences", json!({"anyOf": [{"type": "null"}, stops(MAX_STOPS)]}));
    add("stream", nullable("boolean"));
    object(required, fields)
}

fn anthropic_message() -> Value {
    let text = json!({"$ref": "#/components/schemas/TextPart"});
    let texts = json!({"anyOf": [{"type": "string"}, {"type": "array", "items": text}]});
    let content =
        |blocks: Value| json!({"anyOf": [{"type": "string"}, {"type": "array", "items": {"anyOf": blocks}}]});
    let result = json!({
        "type": "object",
        "required": ["type", "tool_use_id"],
        "properties": {
            "type": {"const": "tool_result"},
            "tool_use_id": {"type": "string"},
            "content": {"anyOf": [{"type": "null"}, texts]},
            "is_error": nullable("boolean"),
        },
    });
    let thinking = json!({
        "type": "object",
        "required": ["type", "thinking"],
        "properties": {"type": {"const": "thinking"}, "thinking": {"type": "string"}},
    });
    let hidden = json!({
        "type": "object",
        "required": ["type"],
        "properties": {"type": {"const": "redacted_thinking"}},
    });
    let call = json!({
        "type": "object",
        "required": ["type", "id", "name", "input"],
        "properties": {
            "type": {"const": "tool_use"},
            "id": {"type": "string"},
            "name": {"type": "string"},
            "input": {"type": "object"},
        },
    });
    let of = |role: &str, content: Value| {
        json!({
            "type": "object",
            "required": ["role", "content"],
            "properties": {"role": {"const": role}, "content": content},
        })
    };
    json!({"anyOf": [
        of("user", content(json!([text, result]))),
        of("assistant", content(json!([text, thinking, hidden, call]))),
        of("system", texts),
    ]})
}

fn ollama_chat() -> Value {
    let call = json!({
        "type": "object",
        "required": ["function"],
        "properties": {
            "function": {
                "type": "object",
                "required": ["name"],
                "properties": {"name": {"type": "string"}, "arguments": {"type": "object"}},
            },
        },
    });
    let function = json!({
        "type": "object",
        "required": ["name"],
        "properties": {
            "name": tool_name(LONGEST_NAME),
            "description": nullable("string"),
            "parameters": nullable("object"),
        },
    });
    json!({
        "type": "object",
        "required": ["model", "messages"],
        "properties": {
            "model": {"type": "string"},
            "messages": {
                "type": "array",
                "minItems": 1,
                "items": {
                    "type": "object",
                    "required": ["role"],
                    "properties": {
                        "role": {"enum": ["system", "user", "assistant", "tool"]},
                        "content": nullable("string"),
                        "thinking": nullable("string"),
                        "images": {"type": ["array", "null"], "maxItems": 0},
                        "tool_calls": {"type": ["array", "null"], "items": call},
                        "tool_name": nullable("string"),
                    },
                },
            },
            "stream": nullable("boolean"),
            "format": ollama_format(),
            "think": ollama_think(),
            "tools": {
                "type": ["array", "null"],
                "maxItems": MAX_TOOLS,
                "items": {"type": "object", "required": ["function"], "properties": {"function": function}},
            },
            "options": ollama_options(),
        },
    })
}

fn ollama_format() -> Value {
    json!({"anyOf": [{"enum": ["json", "", null]}, {"type": "object"}]})
}

fn ollama_think() -> Value {
    json!({"anyOf": [nullable("boolean"), {"enum": ["low", "medium", "high"]}]})
}

fn ollama_options() -> Value {
    json!({
                "type": ["object", "null"],
                "properties": {
                    "num_predict": {
                        "anyOf": [integer(i64::MIN, -1), tokens()],
                        "description": "Below 0 is as many as there is room for",
                    },
                    "temperature": number(0.0, 2.0),
                    "top_k": integer(-1, i64::MAX),
                    "top_p": number(0.0, 1.0),
                    "min_p": number(0.0, 1.0),
                    "seed": integer(i64::MIN, i64::MAX),
                    "stop": {"anyOf": [{"type": "null"}, stops(MAX_STOPS)]},
                    "repeat_penalty": {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 10},
                    "presence_penalty": number(-2.0, 2.0),
                    "frequency_penalty": number(-2.0, 2.0),
                },
    })
}

/// Ollama's request of one answer to one prompt.
fn ollama_generate() -> Value {
    json!({
        "type": "object",
        "required": ["model"],
        "properties": {
            "model": {"type": "string"},
            "prompt": {"type": ["string", "null"], "description": "Without one, the model is only loaded"},
            "system": nullable("string"),
            "suffix": {"type": ["string", "null"], "maxLength": 0},
            "images": {"type": ["array", "null"], "maxItems": 0},
            "raw": {"type": ["boolean", "null"], "description": "The prompt stands for itself, without a template"},
            "stream": nullable("boolean"),
            "format": ollama_format(),
            "think": ollama_think(),
            "options": ollama_options(),
        },
    })
}
