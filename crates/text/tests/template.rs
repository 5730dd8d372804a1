//! Chat templates: their input, their errors and their bounds.

#![allow(clippy::unwrap_used)]

use serde_json::{Value as Json, json};
use smoe_text::{ChatTemplate, TemplateInput, TextError};

fn render(source: &str, input: Json) -> Result<String, TextError> {
    ChatTemplate::compile(source)?.render(&TemplateInput::from_json(&input)?)
}

fn text(source: &str, input: Json) -> String {
    render(source, input).unwrap()
}

#[test]
fn a_conversation_becomes_text() {
    let source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}\
                  {% if add_generation_prompt %}<assistant>{% endif %}";
    let messages = json!([{"role": "user", "content": "é"}]);
    assert_eq!(text(source, json!({"messages": messages})), "<user>é");
    assert_eq!(
        text(source, json!({"messages": messages, "add_generation_prompt": true})),
        "<user>é<assistant>"
    );
}

#[test]
fn variables_are_defined_as_in_transformers() {
    let source =
        "{{ tools is none }}{{ documents is none }}{{ bos_token is defined }}{{ eos_token }}{{ think }}";
    assert_eq!(text(source, json!({"eos_token": "</s>", "think": "x"})), "TrueTrueFalse</s>x");
    let tools = json!([{"name": "f"}]);
    assert_eq!(
        text("{{ tools[0].name }}{{ documents[0] }}", json!({"tools": tools, "documents": [1]})),
        "f1"
    );
}

#[test]
fn a_further_variable_does_not_replace_the_conversation() {
    let mut input = TemplateInput::from_json(&json!({"messages": [{"content": "mine"}]})).unwrap();
    input.extra.insert("messages".into(), json!([]));
    let template = ChatTemplate::compile("{{ messages[0].content }}").unwrap();
    assert_eq!(template.render(&input).unwrap(), "mine");
}

#[test]
fn wrong_input_names_the_field() {
    for (input, wrong) in [
        (json!([]), "input"),
        (json!({"messages": {}}), "messages"),
        (json!({"tools": "f"}), "tools"),
        (json!({"add_generation_prompt": 1}), "add_generation_prompt"),
        (json!({"bos_token": 1}), "bos_token"),
        (json!({"eos_token": []}), "eos_token"),
        (json!({"strftime_now": "noon"}), "strftime_now"),
    ] {
        match TemplateInput::from_json(&input) {
            Err(TextError::TemplateInput { field, .. }) => assert_eq!(field, wrong),
            other => panic!("{input}: {other:?}"),
        }
    }
}

#[test]
fn the_clock_can_be_set() {
    let input = json!({"strftime_now": "2026-01-02 03:04:05"});
    assert_eq!(text("{{ strftime_now('%d %b %Y %H:%M:%S') }}", input), "02 Jan 2026 03:04:05");
    let year: i32 = text("{{ strftime_now('%Y') }}", json!({})).parse().unwrap();
    assert!(year >= 2025);
}

#[test]
fn a_second_template_takes_over_where_tools_are_offered() {
    let template =
        ChatTemplate::compile("plain").unwrap().with_tool_use("with {{ tools | length }}").unwrap();
    let render = |input| template.render(&TemplateInput::from_json(&input).unwrap()).unwrap();
    assert_eq!(render(json!({})), "plain");
    assert_eq!(render(json!({"tools": []})), "plain");
    assert_eq!(render(json!({"tools": [{}, {}]})), "with 2");
}

#[test]
fn errors_say_what_and_where() {
    match ChatTemplate::compile("a\n{% if %}") {
        Err(TextError::TemplateSyntax { line, .. }) => assert_eq!(line, 2),
        other => panic!("{other:?}"),
    }
    match render("a\n\n{{ x.y.z }}", json!({})) {
        Err(TextError::TemplateFailed { line, .. }) => assert_eq!(line, 3),
        other => panic!("{other:?}"),
    }
    let raising =
        "{% macro m() %}{{ raise_exception('no ' ~ 'tools') }}{% endmacro %}{% set x = m() %}{{ x }}";
    match render(raising, json!({})) {
        Err(TextError::TemplateRaised { message }) => assert_eq!(message, "no tools"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_template_without_end_is_stopped() {
    let loops = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}";
    let doubling =
        "{% set n = namespace(s='x') %}{% for i in range(1000) %}{% set n.s = n.s ~ n.s %}{% endfor %}";
    let output = "{% set s = 'x' * 1000000 %}{% for i in range(100000) %}{{ s }}{% endfor %}";
    let joined = "{% for i in range(100000) %}{% set s = ('x' * 100000).join('y' * 100000) %}{% endfor %}";
    let json = "{% set n = namespace(x=[1]) %}{% for i in range(100) %}{% set n.x = [n.x, n.x] %}{% endfor %}\
                {{ n.x | tojson }}";
    let padded = "{{ 'x'.ljust(100000000000) }}";
    for source in [loops, doubling, output, joined, json, padded] {
        match render(source, json!({})) {
            Err(TextError::TemplateExhausted { .. }) => {}
            other => panic!("{source}: {:.80}", format!("{other:?}")),
        }
    }
}

#[test]
fn recursion_without_end_is_stopped() {
    // On half the stack that a thread usually has.
    let half = std::thread::Builder::new().stack_size(1 << 20).spawn(endless_recursions).unwrap();
    half.join().unwrap();
}

fn endless_recursions() {
    let macros = "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}";
    let nested = format!(
        "{{% macro m() %}}{}{{{{ m() }}}}{}{{% endmacro %}}{{{{ m() }}}}",
        "{% if 1 %}".repeat(90),
        "{% endif %}".repeat(90)
    );
    let printed = "{% set n = namespace() %}{% set n.x = n %}{{ n }}";
    let dumped = "{% set n = namespace() %}{% set n.x = [n] %}{{ n | tojson }}";
    for source in [macros, &nested, printed, dumped] {
        match render(source, json!({})) {
            Err(TextError::TemplateFailed { .. }) => {}
            other => panic!("{source}: {:.80}", format!("{other:?}")),
        }
    }
    let brackets = format!("{{{{ {}1{} }}}}", "[".repeat(100_000), "]".repeat(100_000));
    assert!(matches!(ChatTemplate::compile(&brackets), Err(TextError::TemplateSyntax { .. })));
}

#[test]
fn a_long_conversation_is_not_a_loop() {
    // Looks ahead from every message, as gpt-oss's template does.
    let source = "{% for m in messages %}{% set ns = namespace(found=false) %}\
                  {% for later in messages[loop.index:] %}{% if later.role == 'assistant' %}{% set ns.found = true %}\
                  {% endif %}{% endfor %}{{ m.content }}{% endfor %}";
    let turn = json!({"role": "user", "content": "x".repeat(400)});
    let messages = vec![turn; 1500];
    assert_eq!(text(source, json!({"messages": messages})).len(), 600_000);
    let one = json!([{"role": "user", "content": "x".repeat(20_000_000)}]);
    assert_eq!(text("{{ messages[0].content.strip() }}", json!({"messages": one})).len(), 20_000_000);
}

#[test]
fn what_is_written_once_per_item_is_short() {
    let hostile = [
        r#"{{ range(9)|list|tojson(separators=("x"*1000, ":")) }}"#,
        r#"{{ range(9)|list|tojson(indent="x"*1000) }}"#,
        r#"{{ "{:1000000000000}".format(1) }}"#,
        r#"{{ strftime_now("%c"*100000) }}"#,
    ];
    for source in hostile {
        let rendered = ChatTemplate::compile(source).and_then(|t| t.render(&TemplateInput::default()));
        assert!(rendered.is_err(), "{source}");
    }
}
