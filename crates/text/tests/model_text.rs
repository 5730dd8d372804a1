//! A model directory's side files, put together.

#![allow(clippy::unwrap_used, clippy::print_stderr)]

mod common;

use std::collections::HashMap;

use serde_json::json;
use smoe_text::{ModelText, ReplyFormat, TemplateInput, TextError, ToolFormat};

fn load(files: &[(&str, String)]) -> Result<ModelText, TextError> {
    let files: HashMap<&str, &String> = files.iter().map(|(name, text)| (*name, text)).collect();
    ModelText::load(&|name| files.get(name).map(|text| text.as_bytes().to_vec()))
}

fn rendered(text: &ModelText, input: serde_json::Value) -> String {
    text.chat_template.as_ref().unwrap().render(&TemplateInput::from_json(&input).unwrap()).unwrap()
}

#[test]
fn an_empty_directory_gives_an_empty_answer() {
    let text = load(&[]).unwrap();
    assert!(text.tokenizer.is_none() && text.chat_template.is_none() && text.end_tokens.is_empty());
    assert_eq!(text.defaults, Default::default());
}

#[test]
fn a_whole_directory() {
    let text = load(&[
        ("tokenizer.json", common::byte_level().to_string()),
        (
            "tokenizer_config.json",
            json!({"bos_token": null, "eos_token": {"content": "<|end|>", "special": true}, "chat_template": "old"})
                .to_string(),
        ),
        ("chat_template.jinja", "new {{ eos_token }}".into()),
        (
            "generation_config.json",
            json!({"eos_token_id": [7, 5, 7], "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": null,
                "repetition_penalty": 1, "do_sample": true})
            .to_string(),
        ),
        ("config.json", json!({"eos_token_id": 9}).to_string()),
    ])
    .unwrap();
    // As the reference's `generate`: the tokenizer's own end token does not join a list that a config gives.
    assert_eq!(text.end_tokens, [7, 5]);
    assert_eq!((text.bos_token.as_deref(), text.eos_token.as_deref()), (None, Some("<|end|>")));
    assert_eq!(rendered(&text, json!({"eos_token": text.eos_token})), "new <|end|>");
    let defaults = text.defaults;
    assert_eq!((defaults.temperature, defaults.top_p, defaults.top_k), (Some(0.6), Some(0.95), Some(20)));
    assert_eq!(
        (defaults.min_p, defaults.repetition_penalty, defaults.do_sample),
        (None, Some(1.0), Some(true))
    );
}

#[test]
fn end_tokens_fall_back_to_the_model_config() {
    let end_tokens = |generation: &str, config: &str| {
        load(&[("generation_config.json", generation.into()), ("config.json", config.into())])
            .unwrap()
            .end_tokens
    };
    assert_eq!(end_tokens("{}", "{\"eos_token_id\": [1, 2]}"), [1, 2]);
    assert_eq!(end_tokens("{\"eos_token_id\": 3}", "{\"eos_token_id\": [1, 2]}"), [3]);
    assert_eq!(end_tokens("{\"eos_token_id\": null}", "{\"text_config\": {\"eos_token_id\": 4}}"), [4]);
    assert_eq!(end_tokens("{\"eos_token_id\": -1}", "{\"eos_token_id\": -1}"), [0_u32; 0]);
    // Where both are silent, the tokenizer's end token counts.
    let config = json!({"eos_token": "<|end|>"}).to_string();
    let files = [("tokenizer.json", common::byte_level().to_string()), ("tokenizer_config.json", config)];
    assert_eq!(load(&files).unwrap().end_tokens, [264]);
    // Unknown to the tokenizer, or without one, the end token has no id.
    let config = json!({"eos_token": "<|nowhere|>"}).to_string();
    let files = [("tokenizer.json", common::byte_level().to_string()), ("tokenizer_config.json", config)];
    assert!(load(&files).unwrap().end_tokens.is_empty());
    assert!(load(&files[1..]).unwrap().end_tokens.is_empty());
}

#[test]
fn templates_come_from_many_places() {
    let list = json!({"chat_template": [
        {"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]})
    .to_string();
    let tools = json!({"tools": [{}]});
    let text = load(&[("tokenizer_config.json", list.clone())]).unwrap();
    assert_eq!(
        (rendered(&text, json!({})), rendered(&text, tools.clone())),
        ("plain".into(), "tools".into())
    );

    let text = load(&[("tokenizer_config.json", list), ("chat_template.jinja", "file".into())]).unwrap();
    assert_eq!((rendered(&text, json!({})), rendered(&text, tools.clone())), ("file".into(), "file".into()));

    let more = ("additional_chat_templates/tool_use.jinja", "file for tools".to_owned());
    let text = load(&[("chat_template.jinja", "file".into()), more]).unwrap();
    assert_eq!(
        (rendered(&text, json!({})), rendered(&text, tools)),
        ("file".into(), "file for tools".into())
    );

    let text = load(&[("chat_template.json", json!({"chat_template": "json"}).to_string())]).unwrap();
    assert_eq!(rendered(&text, json!({})), "json");

    let only = json!({"chat_template": [{"name": "rag", "template": "only"}]}).to_string();
    assert_eq!(rendered(&load(&[("tokenizer_config.json", only)]).unwrap(), json!({})), "only");
}

#[test]
fn errors_name_the_file() {
    let two =
        json!({"chat_template": [{"name": "a", "template": ""}, {"name": "b", "template": ""}]}).to_string();
    for (file, text, expected) in [
        ("tokenizer.json", "{", "tokenizer.json: the tokenizer cannot be loaded"),
        ("tokenizer_config.json", "{", "tokenizer_config.json is not valid JSON"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json: `(root)` must be an object"),
        (
            "tokenizer_config.json",
            "{\"bos_token\": 1}",
            "tokenizer_config.json: `bos_token` must be a string",
        ),
        (
            "tokenizer_config.json",
            "{\"chat_template\": \"{% if %}\"}",
            "tokenizer_config.json: chat template, line 1",
        ),
        (
            "tokenizer_config.json",
            &two,
            "tokenizer_config.json: `chat_template` must be a template or a list",
        ),
        ("chat_template.jinja", "\n{% x %}", "chat_template.jinja: chat template, line 2"),
        ("chat_template.json", "{", "chat_template.json is not valid JSON"),
        ("generation_config.json", "nope", "generation_config.json is not valid JSON"),
        ("generation_config.json", "{\"top_p\": \"x\"}", "generation_config.json: `top_p` must be a number"),
        (
            "generation_config.json",
            "{\"do_sample\": 1}",
            "generation_config.json: `do_sample` must be true or false",
        ),
        (
            "generation_config.json",
            "{\"eos_token_id\": 1e12}",
            "generation_config.json: `eos_token_id` must be a token id",
        ),
        ("config.json", "{\"eos_token_id\": \"x\"}", "config.json: `eos_token_id` must be a token id"),
    ] {
        let error = load(&[(file, text.to_owned())]).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{error}");
    }
    let latin = ModelText::load(&|name| (name == "chat_template.jinja").then(|| vec![0xff]));
    assert!(matches!(latin, Err(TextError::NotUtf8 { file }) if file == "chat_template.jinja"));
}

#[test]
fn a_real_model_directory() {
    let Some(folder) = common::shared("demo-model") else { return };
    let text = ModelText::load(&|name| std::fs::read(folder.join(name)).ok()).unwrap();
    assert_eq!(text.end_tokens, [8191, 8189]);
    assert_eq!(text.eos_token.as_deref(), Some("<|im_end|>"));
    assert_eq!((text.defaults.temperature, text.defaults.top_k), (Some(0.6), Some(20)));
    let input = json!({"messages": [{"role": "user", "content": "Hi"}], "add_generation_prompt": true});
    let prompt = rendered(&text, input);
    assert_eq!(prompt, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n");
    let tokenizer = text.tokenizer.unwrap();
    let ids = tokenizer.encode(&prompt).unwrap();
    assert_eq!(ids.iter().filter(|&&id| tokenizer.is_special(id)).count(), 3);
    assert_eq!(tokenizer.decode(&ids, false), prompt);
}

#[test]
fn a_template_tells_how_replies_are_written_and_a_tokenizer_whether_that_is_text() {
    let with = |template: &str| {
        let files = [
            ("tokenizer.json", common::byte_level().to_string()),
            ("chat_template.jinja", template.to_owned()),
        ];
        let text = load(&files).unwrap();
        (text.reply_format(), text.tokenizer.unwrap())
    };
    assert_eq!(load(&[]).unwrap().reply_format(), ReplyFormat::default());
    let (plain, tokenizer) = with("<think>x</think>");
    assert_eq!(plain.reasoning, Some(("<think>".to_owned(), "</think>".to_owned())));
    assert!(!plain.reasons_in_special_tokens(&tokenizer));
    let special = ReplyFormat { reasoning: Some(("<tool>".to_owned(), "<|end|>".to_owned())), ..plain };
    assert!(special.reasons_in_special_tokens(&tokenizer));
    let (harmony, tokenizer) = with("<|channel|>x<|message|>");
    assert_eq!(harmony.tools, ToolFormat::Harmony);
    assert!(harmony.reasons_in_special_tokens(&tokenizer));
    let (none, tokenizer) = with("x");
    assert!(!none.reasons_in_special_tokens(&tokenizer));
}
