//! Published chat templates against the reference renderer's output, byte for byte.

#![allow(clippy::unwrap_used, clippy::print_stderr)]

mod common;

use std::fs;

use serde_json::Value as Json;
use smoe_text::{ChatTemplate, TemplateInput, TextError};

/// Where two texts part, with a little of both.
fn difference(expected: &str, got: &str) -> String {
    let same = expected.char_indices().zip(got.chars()).find(|((_, a), b)| a != b);
    let at = same.map_or(expected.len().min(got.len()), |((at, _), _)| at);
    let from = (0..=at.saturating_sub(30)).rev().find(|&i| expected.is_char_boundary(i)).unwrap_or(0);
    let show = |text: &str| text[from..].chars().take(90).collect::<String>();
    format!("from byte {from}:\n  expected {:?}\n  got      {:?}", show(expected), show(got))
}

/// What is wrong with one case, if anything.
fn check(template: &ChatTemplate, case: &Json, now: &Json) -> Result<(), String> {
    let mut input = case["input"].clone();
    input["strftime_now"] = now.clone();
    let input = TemplateInput::from_json(&input).map_err(|error| error.to_string())?;
    match (template.render(&input), case["text"].as_str(), case["error"].as_str()) {
        (Ok(text), Some(expected), _) if text == expected => Ok(()),
        (Ok(text), Some(expected), _) => Err(difference(expected, &text)),
        (Err(error), Some(_), _) => Err(format!("failed: {error}")),
        (Ok(_), None, Some(error)) => Err(format!("rendered, but the reference failed: {error}")),
        (Err(TextError::TemplateRaised { message }), None, Some(error)) => {
            let expected = error.strip_prefix("TemplateError: ").unwrap_or(error);
            if message == expected { Ok(()) } else { Err(format!("raised {message:?}, not {expected:?}")) }
        }
        (Err(error), None, Some(expected)) if expected.starts_with("TemplateError: ") => {
            Err(format!("failed otherwise than by raise_exception: {error}"))
        }
        (Err(_), None, _) => Ok(()),
        (Ok(_), None, None) => Err("the golden has neither text nor error".into()),
    }
}

#[test]
fn published_templates_render_as_the_reference_does() {
    let Some(folder) = common::shared("compat/chat-templates") else { return };
    let mut templates: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "jinja"))
        .collect();
    templates.sort();
    let (mut cases, mut wrong) = (0, Vec::new());
    for path in &templates {
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        let golden = fs::read_to_string(path.with_file_name(format!("{name}.golden.json"))).unwrap();
        let golden: Json = serde_json::from_str(&golden).unwrap();
        let template = ChatTemplate::compile(&fs::read_to_string(path).unwrap());
        for (case, expected) in golden["cases"].as_object().unwrap() {
            cases += 1;
            let result = match &template {
                Ok(template) => check(template, expected, &golden["strftime_now"]),
                Err(error) => Err(format!("does not compile: {error}")),
            };
            if let Err(reason) = result {
                wrong.push(format!("{name} / {case}: {reason}"));
            }
        }
    }
    eprintln!("{} templates, {cases} cases", templates.len());
    assert!(cases > 0, "no goldens found");
    assert!(wrong.is_empty(), "{} of {cases} differ:\n{}", wrong.len(), wrong.join("\n"));
}
