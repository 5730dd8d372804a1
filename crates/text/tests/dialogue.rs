//! Conversations as tokens, and the answers in them.

#![allow(clippy::unwrap_used, clippy::print_stderr, reason = "tests")]

mod common;

use std::collections::HashMap;

use serde_json::{Value, json};
use smoe_text::{Dialogue, ModelText, TemplateInput, TextError};

const TURN: &str = "<{{ message.role }}>{{ message.content }}<|end|>\n";

/// A byte-level model that speaks by `template`.
fn model(template: &str, end: Option<u32>) -> ModelText {
    let files: HashMap<&str, String> = HashMap::from([
        ("tokenizer.json", common::byte_level().to_string()),
        ("chat_template.jinja", template.to_owned()),
        ("generation_config.json", json!({"eos_token_id": end}).to_string()),
    ]);
    ModelText::load(&|name| files.get(name).map(|text| text.clone().into_bytes())).unwrap()
}

fn chat() -> Value {
    json!([
        {"role": "system", "content": "short"},
        {"role": "user", "content": "a?"},
        {"role": "assistant", "content": "A."},
        {"role": "user", "content": "b?"},
        {"role": "assistant", "content": "B!"},
    ])
}

fn dialogue(model: &ModelText, messages: Value) -> Result<Dialogue, TextError> {
    model.dialogue(&TemplateInput { messages, ..TemplateInput::default() })
}

/// The answers as text, each between bars.
fn answers(model: &ModelText, dialogue: &Dialogue) -> String {
    let mut text = String::new();
    for run in dialogue.tokens.iter().zip(&dialogue.answer).collect::<Vec<_>>().chunk_by(|a, b| a.1 == b.1) {
        if *run[0].1 {
            let ids: Vec<u32> = run.iter().map(|(id, _)| **id).collect();
            text += &format!("|{}", model.tokenizer.as_ref().unwrap().decode(&ids, false));
        }
    }
    text
}

#[test]
fn answers_run_from_the_end_of_their_prompt_to_the_mark_that_ends_them() {
    let template = format!(
        "{{% for message in messages %}}{TURN}{{% endfor %}}{{% if add_generation_prompt %}}<assistant>{{% endif %}}"
    );
    let template = template.replace("<|end|>\n", "<|end|>\\n").replace("\\n", "{{ '\\n' }}");
    let end = model(&template, None).tokenizer.unwrap().token_to_id("<|end|>");
    let with_end = model(&template, end);
    assert_eq!(answers(&with_end, &dialogue(&with_end, chat()).unwrap()), "|A.<|end|>|B!<|end|>");
    // Without an end token, all that the message adds.
    let without = model(&template, None);
    assert_eq!(answers(&without, &dialogue(&without, chat()).unwrap()), "|A.<|end|>\n|B!<|end|>\n");
    // A conversation that the assistant opens, and one in which it is silent.
    let first = json!([{"role": "assistant", "content": "Hi"}]);
    assert_eq!(answers(&with_end, &dialogue(&with_end, first).unwrap()), "|Hi<|end|>");
    let silent = dialogue(&with_end, json!([{"role": "user", "content": "Hi"}])).unwrap();
    assert!(silent.tokens.len() > 2 && !silent.answer.contains(&true));
}

/// As DeepSeek-R1's and Qwen3's templates do.
#[test]
fn a_prompt_that_opens_reasoning_is_not_retold_and_the_answer_is_still_found() {
    let template = "{% for message in messages %}<{{ message.role }}>\
        {%- if loop.last and message.role == 'assistant' %}()({% endif %}{{ message.content }}<|end|>{% endfor %}\
        {%- if add_generation_prompt %}<assistant><think>{% endif %}";
    let end = model(template, None).tokenizer.unwrap().token_to_id("<|end|>");
    let model = model(template, end);
    assert_eq!(answers(&model, &dialogue(&model, chat()).unwrap()), "|A.<|end|>|()(B!<|end|>");
}

#[test]
fn what_is_missing_or_retold_otherwise_is_named() {
    let empty = ModelText::default();
    assert!(matches!(dialogue(&empty, chat()), Err(TextError::Absent { what: "tokenizer" })));
    // The length of the conversation stands at its beginning.
    let model =
        model("{{ messages | length }}{% for message in messages %}{{ message.content }}{% endfor %}", None);
    assert!(matches!(dialogue(&model, chat()), Err(TextError::Answer { message: 3 })));
}
