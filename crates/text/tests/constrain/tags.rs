//! Calls whose parameters stand between tags: what the grammar lets through is what the reader takes.

use super::*;

/// The formats that name each parameter in markup.
const TAGGED: [ToolFormat; 4] =
    [ToolFormat::Qwen3Coder, ToolFormat::Glm, ToolFormat::MiniMax, ToolFormat::Dsml];

/// The one call that a reply is: its name and arguments.
fn read_call(format: ToolFormat, tool: &ToolSpec, reply: &str) -> (String, Json) {
    let format = ReplyFormat { tools: format, ..ReplyFormat::default() };
    let mut parser = ReplyParser::new(&format, std::slice::from_ref(tool), "");
    let mut events = parser.push(reply);
    events.extend(parser.finish());
    let (mut name, mut arguments) = (String::new(), String::new());
    for event in events {
        match event {
            ReplyEvent::ToolBegin { index: 0, name: called, .. } => name = called,
            ReplyEvent::ToolArguments { index: 0, fragment } => arguments += &fragment,
            ReplyEvent::ToolEnd { index: 0 } => {}
            other => panic!("{other:?} in {reply:?}"),
        }
    }
    (name, serde_json::from_str(&arguments).unwrap_or_else(|_| panic!("{arguments:?} of {reply:?}")))
}

#[test]
fn a_call_in_tags_has_the_parameters_of_its_schema() {
    let words = Words::demo();
    let parameters = json!({"type": "object", "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 99},
        "unit": {"enum": ["C", "F", 7, ""]},
        "note": {"anyOf": [{"type": "string", "maxLength": 8}, {"type": "null"}], "title": "Note"},
        "exact": {"type": "boolean"},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 2}},
        "required": ["city", "days"], "$defs": {"tag": {"enum": ["a", "b"]}}});
    let tool = ToolSpec { name: "weather".into(), parameters: parameters.clone() };
    for format in TAGGED {
        let shape = Shape::Calls(vec![format.call_shape(&tool).unwrap()]);
        let mut optional = [0; 3];
        for seed in 0..30 {
            let text = sample(&words, &shape, seed);
            let (name, arguments) = read_call(format, &tool, &text);
            assert_eq!(name, "weather", "{text:?}");
            assert!(satisfies(&parameters, &parameters, &arguments), "{format:?}: {text:?} is {arguments}");
            for (seen, key) in optional.iter_mut().zip(["unit", "note", "tags"]) {
                *seen += usize::from(arguments.get(key).is_some());
            }
        }
        assert!(optional.iter().all(|seen| (1..30).contains(seen)), "{format:?}: {optional:?}");
    }
}

#[test]
fn a_call_in_tags_is_what_models_write() {
    let words = Words::demo();
    let parameters = json!({"type": "object", "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]});
    let tool = ToolSpec { name: "weather".into(), parameters };
    let written = [
        (
            ToolFormat::Qwen3Coder,
            "<tool_call>\n<function=weather>\n<parameter=city>\nNew\n<York>\n</parameter>\n<parameter=days>\n2\n\
             </parameter>\n</function>\n</tool_call>",
        ),
        (
            ToolFormat::Glm,
            "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>New\n<York></arg_value>\n<arg_key>days</arg_key>\n\
             <arg_value>2</arg_value>\n</tool_call>",
        ),
        (
            ToolFormat::Glm,
            "<tool_call>weather<arg_key>city</arg_key><arg_value>New\n<York></arg_value><arg_key>days</arg_key>\
             <arg_value>2</arg_value></tool_call>",
        ),
        (
            ToolFormat::MiniMax,
            "<minimax:tool_call>\n<invoke name=\"weather\">\n<parameter name=\"city\">New\n<York></parameter>\n\
             <parameter name=\"days\">2</parameter>\n</invoke>\n</minimax:tool_call>",
        ),
        (
            ToolFormat::Dsml,
            "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"weather\">\n<｜DSML｜parameter name=\"city\" string=\"true\">\
             New\n<York></｜DSML｜parameter>\n<｜DSML｜parameter name=\"days\" string=\"false\">2</｜DSML｜parameter>\n\
             </｜DSML｜invoke>\n</｜DSML｜function_calls>",
        ),
    ];
    for (format, text) in written {
        let shape = Shape::Calls(vec![format.call_shape(&tool).unwrap()]);
        assert!(words.takes(&shape, text), "{format:?}: {text}");
        assert_eq!(read_call(format, &tool, text).1, json!({"city": "New\n<York>", "days": 2}));
        for wrong in [
            text.replace('2', "two"),
            text.replace("city", "town"),
            text.replace("weather", "forecast"),
            text.replace("days", "city"),
            format!("{text}{text}"),
            text.replace("New", &format.call_shape(&tool).unwrap().tags.unwrap().after_value.repeat(2)),
        ] {
            assert!(!words.takes(&shape, &wrong), "{format:?}: {wrong}");
        }
    }
    assert_eq!(ToolFormat::None.call_shape(&tool), None);
}

#[test]
fn what_tags_cannot_hold_to_is_refused() {
    let words = Words::demo();
    let value = |schema: Json| json!({"properties": {"a": schema}, "required": ["a"]});
    for (parameters, reason) in [
        (value(json!({"type": "string", "pattern": "^a"})), "`pattern`"),
        (value(json!({"type": "string", "format": "date"})), "`format`"),
        (value(json!({"properties": {}})), "`type`"),
        (value(json!({"type": "string", "minLength": 3, "maxLength": 2})), "that long"),
        (value(json!({"type": ["string", "integer"], "minimum": 3})), "nothing else"),
        (value(json!({"enum": ["</parameter>"]})), "no way of writing"),
        (value(json!({"enum": []})), "no value"),
        (value(json!({"$ref": "#/nowhere"})), "refers to nothing"),
        (value(json!({"type": "string", "oneOf": [{"const": "a"}, {"const": "b"}]})), "`oneOf`"),
        (value(json!({"type": "string", "anyOf": [{"maxLength": 1}]})), "`anyOf`"),
        (value(json!({"type": ["string", "null"], "allOf": [{"maxLength": 1}]})), "`allOf`"),
        (value(json!({"type": "string", "$ref": "#/$defs/x", "$defs": {"x": {}}})), "`$ref`"),
        (value(json!({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 1}]})), "`oneOf`"),
        (value(json!({"oneOf": [{"const": "a"}, {"enum": ["b", "a"]}]})), "`oneOf`"),
        (value(json!({"oneOf": [{"const": 1}, {"const": 1.0}, {"const": "a"}]})), "overlap"),
        (value(json!({"oneOf": [{"type": "number"}, {"type": "integer"}]})), "overlap"),
        (value(json!({"const": "a", "enum": ["b", "c"]})), "no value"),
        (value(json!({"type": "integer", "enum": ["a", 1.5]})), "no value"),
        (value(json!({"$ref": "#/properties/a"})), "never come to an end"),
        (json!({"properties": {"a\">b": true}}), "no way of writing"),
        (json!({"properties": {" ": true}}), "no way of writing"),
        (json!({"properties": {"é".repeat(129): true}}), "no way of writing"),
        (json!({"required": ["b"], "additionalProperties": false}), "#/properties/b: no value"),
        (json!({"anyOf": [{"required": ["a"]}]}), "each parameter by itself"),
        (json!(false), "no arguments"),
    ] {
        let tool = ToolSpec { name: "f".into(), parameters: parameters.clone() };
        let shape = Shape::Calls(vec![ToolFormat::MiniMax.call_shape(&tool).unwrap()]);
        let error = words.constraint(&shape).expect_err(&parameters.to_string());
        assert!(error.to_string().contains(reason), "{parameters}: {error}");
    }
}

/// A call of `f` whose parameter `a` is this text.
fn minimax_call(text: &str) -> String {
    let parameter = format!("<parameter name=\"a\">{text}</parameter>");
    format!("<minimax:tool_call>\n<invoke name=\"f\">\n{parameter}\n</invoke>\n</minimax:tool_call>")
}

#[test]
fn fixed_values_and_alternatives_in_tags_are_those_of_the_schema() {
    let words = Words::demo();
    for (schema, good, bad) in [
        (json!({"const": "a", "enum": ["a", "b"]}), &["a"][..], &["b"][..]),
        (json!({"type": "string", "enum": ["a", 1, null]}), &["a"], &["1", "null"]),
        (json!({"type": ["integer", "null"], "enum": ["a", 1, 1.5, null]}), &["1", "null"], &["a", "1.5"]),
        (json!({"const": 1, "enum": [1.0, 2]}), &["1"], &["2"]),
        (json!({"oneOf": [{"const": "a"}, {"enum": ["b", 7]}]}), &["a", "b", "7"], &["c", "8"]),
        (json!({"oneOf": [{"type": "string", "maxLength": 2}, {"type": "null"}]}), &["ab", "null"], &["abc"]),
        (
            json!({"oneOf": [{"type": "boolean"}, {"type": "integer", "minimum": 5}, {"const": "a"}]}),
            &["true", "7", "a"],
            &["3", "b"],
        ),
    ] {
        let parameters = json!({"properties": {"a": schema}, "required": ["a"]});
        let tool = ToolSpec { name: "f".into(), parameters };
        let shape = Shape::Calls(vec![ToolFormat::MiniMax.call_shape(&tool).unwrap()]);
        for text in good {
            assert!(words.takes(&shape, &minimax_call(text)), "{schema}: {text}");
        }
        for text in bad {
            assert!(!words.takes(&shape, &minimax_call(text)), "{schema}: {text}");
        }
    }
}

#[test]
fn what_a_reference_names_is_read_as_it_was_written() {
    let words = Words::demo();
    let parameters = json!({"properties": {
        "zip": {"$ref": "#/$defs/Zip"}, "or": {"anyOf": [{"$ref": "#/$defs/Zip"}, {"type": "null"}]}},
        "required": ["zip", "or"], "$defs": {"Zip": {"$ref": "#/$defs/Text"}, "Text": {"type": "string"}}});
    let tool = ToolSpec { name: "f".into(), parameters };
    let text = "<tool_call>\n<function=f>\n<parameter=zip>\n12345\n</parameter>\n<parameter=or>\n12\n</parameter>\n\
                </function>\n</tool_call>";
    let shape = Shape::Calls(vec![ToolFormat::Qwen3Coder.call_shape(&tool).unwrap()]);
    assert!(words.takes(&shape, text));
    let read = read_call(ToolFormat::Qwen3Coder, &tool, text).1;
    assert_eq!(read, json!({"zip": "12345", "or": "12"}));
}

#[test]
fn a_value_does_not_begin_with_what_ends_it() {
    let words = Words::demo();
    let parameters =
        json!({"properties": {"a": {"type": "string"}, "days": {"type": "integer"}}, "required": ["a"]});
    let tool = ToolSpec { name: "f".into(), parameters };
    let shape = Shape::Calls(vec![ToolFormat::Qwen3Coder.call_shape(&tool).unwrap()]);
    for (value, free) in [
        ("</function>", false),
        ("<parameter=days>\n3", false),
        ("x\n</function>", false),
        ("x</function>", true),
        ("<function>", true),
        ("", true),
    ] {
        let text = format!(
            "<tool_call>\n<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>\n</tool_call>"
        );
        assert_eq!(words.takes(&shape, &text), free, "{value:?}");
        if free {
            assert_eq!(read_call(ToolFormat::Qwen3Coder, &tool, &text).1, json!({"a": value}));
        }
        let parameters = json!({"properties": {"a": {"const": value}}, "required": ["a"]});
        let word = ToolSpec { name: "f".into(), parameters };
        let shape = Shape::Calls(vec![ToolFormat::Qwen3Coder.call_shape(&word).unwrap()]);
        assert_eq!(words.constraint(&shape).is_ok(), free, "{value:?} alone");
    }
}

#[test]
fn required_parameters_that_are_not_declared_are_additional_ones() {
    let words = Words::demo();
    let parameters =
        json!({"required": ["a", "a"], "additionalProperties": {"type": "string", "maxLength": 3}});
    let tool = ToolSpec { name: "f".into(), parameters };
    let shape = Shape::Calls(vec![ToolFormat::MiniMax.call_shape(&tool).unwrap()]);
    assert!(words.takes(&shape, &minimax_call("123")));
    assert!(!words.takes(&shape, &minimax_call("1234")));
    assert_eq!(read_call(ToolFormat::MiniMax, &tool, &minimax_call("123")).1, json!({"a": "123"}));
}

#[test]
fn a_value_ends_before_the_special_token_of_its_tag() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../demo/tokenizer.json");
    let mut tokenizer: Json = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let id = Words::demo().tokenizer.vocab_size();
    tokenizer["added_tokens"]
        .as_array_mut()
        .unwrap()
        .push(json!({"id": id, "content": "｜DSML｜", "special": true,
        "single_word": false, "lstrip": false, "rstrip": false, "normalized": false}));
    let words =
        Words::new(Tokenizer::from_bytes(&serde_json::to_vec(&tokenizer).unwrap()).unwrap(), "<|im_end|>");
    assert!(words.tokenizer.is_special(words.tokenizer.token_to_id("｜DSML｜").unwrap()));
    let parameters =
        json!({"properties": {"a": {"type": "string"}, "b": {"enum": ["x", 1]}}, "required": ["a", "b"]});
    let tool = ToolSpec { name: "f".into(), parameters };
    let shape = Shape::Calls(vec![ToolFormat::Dsml.call_shape(&tool).unwrap()]);
    for value in ["Rome", "", "a < b </ c", "</"] {
        let text = format!(
            "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter name=\"a\" string=\"true\">{value}\
             </｜DSML｜parameter>\n<｜DSML｜parameter name=\"b\" string=\"false\">1</｜DSML｜parameter>\n</｜DSML｜invoke>\n\
             </｜DSML｜function_calls>"
        );
        assert!(words.takes(&shape, &text), "{value:?}");
        assert_eq!(read_call(ToolFormat::Dsml, &tool, &text).1, json!({"a": value, "b": 1}));
    }
}

#[test]
fn what_a_call_in_tags_may_cost_is_bounded() {
    let words = Words::demo();
    // Looked at 700^7 times, for no value at all.
    let alternatives = |n: usize| vec![json!({"$ref": format!("#/$defs/d{n}")}); 700];
    let mut definitions: serde_json::Map<_, _> =
        (0..7).map(|n| (format!("d{n}"), json!({"anyOf": alternatives(n + 1)}))).collect();
    definitions.insert("d7".to_owned(), json!(false));
    let many = json!({"properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": definitions});
    // All definitions once for each alternative.
    let list = json!({"type": "array", "items": {"$ref": "#/$defs/long"}});
    let large = json!({"properties": {"a": {"anyOf": vec![list; 700]}}, "$defs": {"long": {"const": "x".repeat(100_000)}}});
    let types = json!({"properties": {"a": {"anyOf": vec![json!({"$ref": "#/$defs/d"}); 100]}},
        "$defs": {"d": {"type": vec!["string"; 2_000]}}});
    for (parameters, reason) in [
        (many, "#/properties/a: too many alternatives"),
        (large, "#/properties/a: the values"),
        (types, "#/properties/a: too many alternatives"),
    ] {
        let tool = ToolSpec { name: "f".into(), parameters };
        let shape = Shape::Calls(vec![ToolFormat::MiniMax.call_shape(&tool).unwrap()]);
        let error = words.constraint(&shape).unwrap_err().to_string();
        assert!(error.contains(reason), "{error}");
    }
}
