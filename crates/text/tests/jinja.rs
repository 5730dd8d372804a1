//! Jinja2's and Python's ways, one by one: each case is a template of our own and what the reference made of it
//! (`jinja/reference.py`).

#![allow(clippy::unwrap_used)]

use serde_json::Value as Json;
use smoe_text::{ChatTemplate, TemplateInput, TextError};

/// Templates on which the renderer is known to differ, with what it renders instead; `None` where it fails.
const KNOWN: &[(&str, Option<&str>)] = &[
    // Milder than the reference.
    ("{{ huge ~ tiny }}", Some("100000000000000000000.00.00001")),
    ("{% for x in none %}a{% endfor %}", Some("")),
    ("{{ none[1:] }}", Some("[]")),
    ("{{ d | attr(\"z\") }}", Some("1")),
    ("{{ missing | int(7) }}", Some("7")),
    // A safe string escapes what is added to it (not what is joined to it by `~`).
    ("{{ \"a\" | safe + \"<\" }}|{{ \"a\" | safe ~ \"<\" }}", Some("a<|a<")),
    // Not known to the parser or the compiler.
    ("{{ +one }}", None),
    ("{% macro m(a, c=a) %}{{ a }}{{ c }}{% endmacro %}{{ m(1) }}", Some("1")),
    ("{% macro m(a) %}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1, 2, k=3) }}", None),
    ("{{ \"a b&c/d\" | urlencode }}", None),
];

#[test]
fn templates_render_as_in_jinja2() {
    let golden: Json = serde_json::from_str(include_str!("jinja/cases.json")).unwrap();
    let mut variables = golden["variables"].clone();
    variables["strftime_now"] = golden["strftime_now"].clone();
    variables["add_generation_prompt"] = true.into();
    let input = TemplateInput::from_json(&variables).unwrap();
    let cases = golden["cases"].as_array().unwrap();
    let mut wrong = Vec::new();
    for case in cases {
        let source = case["template"].as_str().unwrap();
        let got = ChatTemplate::compile(source).and_then(|template| template.render(&input));
        let known = KNOWN.iter().find(|(template, _)| *template == source);
        let right = match (&got, known, case["text"].as_str()) {
            (got, Some((_, known)), _) => got.as_deref().ok() == *known,
            (Ok(text), None, Some(expected)) => text == expected,
            (Err(TextError::TemplateRaised { message }), None, None) => {
                case["error"].as_str() == Some(&format!("TemplateError: {message}"))
            }
            (Err(_), None, None) => true,
            _ => false,
        };
        if !right {
            let expected = case["text"].as_str().or(case["error"].as_str()).unwrap();
            wrong.push(format!("{source:?}\n  expected {expected:?}\n  got      {got:?}"));
        }
    }
    assert!(wrong.is_empty(), "{} of {} differ:\n{}", wrong.len(), cases.len(), wrong.join("\n"));
}
