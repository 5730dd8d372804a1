//! Constraints: whatever is sampled under a mask parses and satisfies its schema, and no schema does harm.

#![allow(clippy::unwrap_used, reason = "tests")]

#[path = "../common/mod.rs"]
mod common;
mod tags;

use std::path::Path;

use serde_json::{Value as Json, json};
use smoe_text::{
    CallShape, Constraint, GrammarLimits, GrammarVocabulary, ReplyEvent, ReplyFormat, ReplyParser, Shape,
    TextError, Tokenizer, ToolFormat, ToolSpec,
};

/// A vocabulary, its tokenizer, and the width of its masks.
struct Words {
    tokenizer: Tokenizer,
    vocabulary: GrammarVocabulary,
    size: usize,
    end: u32,
    /// Ids whose text may close something.
    closing: Vec<bool>,
}

impl Words {
    /// Three more logits than tokens, as models round their vocabularies up.
    fn new(tokenizer: Tokenizer, end: &str) -> Self {
        let (size, end) = (tokenizer.vocab_size() + 3, tokenizer.token_to_id(end).unwrap());
        let vocabulary = GrammarVocabulary::new(&tokenizer, size, &[end]).unwrap();
        let closes = |id| id == end || tokenizer.decode(&[id], false).contains(['"', ']', '}']);
        let closing = (0..u32::try_from(size).unwrap()).map(closes).collect();
        Words { tokenizer, vocabulary, size, end, closing }
    }

    /// The tokenizer of the bundled model.
    fn demo() -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../demo/tokenizer.json");
        Words::new(Tokenizer::from_bytes(&std::fs::read(path).unwrap()).unwrap(), "<|im_end|>")
    }

    /// 151,669 tokens, where they are.
    fn qwen() -> Option<Self> {
        let path = common::shared("compat/qwen3-tokenizer")?.join("tokenizer.json");
        Some(Words::new(Tokenizer::from_bytes(&std::fs::read(path).unwrap()).unwrap(), "<|im_end|>"))
    }

    fn constraint(&self, shape: &Shape) -> Result<Constraint, TextError> {
        Constraint::new(&self.vocabulary, shape, &GrammarLimits::default())
    }

    fn schema(&self, schema: &Json) -> Result<Constraint, TextError> {
        self.constraint(&Shape::JsonSchema(schema.clone()))
    }

    /// Whether the text is one that the shape lets through, token by token.
    fn takes(&self, shape: &Shape, text: &str) -> bool {
        let mut constraint = self.constraint(shape).unwrap();
        let ids = self.tokenizer.encode(text).unwrap();
        ids.into_iter().chain([self.end]).all(|id| constraint.accept(id).is_ok())
    }

    fn allowed(&self, constraint: &mut Constraint) -> Vec<u32> {
        let mask = constraint.mask().unwrap();
        assert_eq!(mask.len(), self.size.div_ceil(32));
        (0..u32::try_from(mask.len() * 32).unwrap()).filter(|&id| bit(mask, id)).collect()
    }
}

fn bit(mask: &[u32], id: u32) -> bool {
    mask[id as usize / 32] >> (id % 32) & 1 == 1
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((z ^ (z >> 31)) % n as u64).unwrap()
    }
}

/// An answer sampled at random under the masks. What may close something is taken more often, or few would end.
fn sample(words: &Words, shape: &Shape, seed: u64) -> String {
    const CLOSE_AFTER: usize = 60;
    const LONGEST: usize = 3_000;
    let mut random = Random(seed);
    let mut constraint = words.constraint(shape).unwrap();
    let mut ids = Vec::new();
    for step in 0..LONGEST {
        let allowed = words.allowed(&mut constraint);
        assert!(allowed.iter().all(|&id| id == words.end || !words.tokenizer.is_special(id)));
        if constraint.is_complete() {
            assert_eq!(allowed, [words.end], "a complete text can only end");
        }
        for _ in 0..5 {
            let id = u32::try_from(random.below(words.size + 40)).unwrap();
            if allowed.binary_search(&id).is_err() {
                assert!(
                    matches!(constraint.accept(id), Err(TextError::Constraint { .. })),
                    "{id} was refused"
                );
            }
        }
        let forced = constraint.forced();
        if let [first, ..] = forced[..] {
            assert_eq!(allowed, [first], "the mask is the forced token alone");
        }
        let closing: Vec<u32> = allowed.iter().copied().filter(|&id| words.closing[id as usize]).collect();
        let close = step > CLOSE_AFTER || random.below(2) == 0;
        let from = if close && !closing.is_empty() { &closing } else { &allowed };
        let id = from[random.below(from.len())];
        constraint.accept(id).unwrap();
        if id == words.end {
            assert!(constraint.is_complete());
            assert!(constraint.accept(id).is_ok(), "an end token may follow another");
            return words.tokenizer.decode(&ids, false);
        }
        ids.push(id);
    }
    panic!("no end after {LONGEST} tokens: {:?}", words.tokenizer.decode(&ids, false));
}

/// Whether a value satisfies a schema; for the keywords of this file's schemas.
fn satisfies(root: &Json, schema: &Json, value: &Json) -> bool {
    let sub = |schema: &Json, value: &Json| satisfies(root, schema, value);
    let Json::Object(keywords) = schema else { return schema == true };
    keywords.iter().all(|(keyword, rule)| {
        let rules = || rule.as_array().unwrap().iter();
        let number = || value.as_f64().zip(rule.as_f64());
        let length = |length: Option<usize>| length.zip(rule.as_u64().map(|n| usize::try_from(n).unwrap()));
        let characters = length(value.as_str().map(|text| text.chars().count()));
        let items = length(value.as_array().map(Vec::len));
        let empty = serde_json::Map::new();
        let object = value.as_object();
        let properties = schema["properties"].as_object().unwrap_or(&empty);
        match keyword.as_str() {
            "type" => match rule.as_str() {
                Some(name) => is_of(value, name),
                None => rules().any(|name| is_of(value, name.as_str().unwrap())),
            },
            "const" => value == rule,
            "enum" => rules().any(|constant| constant == value),
            "anyOf" => rules().any(|rule| sub(rule, value)),
            "oneOf" => rules().filter(|rule| sub(rule, value)).count() == 1,
            "allOf" => rules().all(|rule| sub(rule, value)),
            "$ref" => sub(root.pointer(&rule.as_str().unwrap()[1..]).unwrap(), value),
            "minimum" => number().is_none_or(|(value, bound)| value >= bound),
            "maximum" => number().is_none_or(|(value, bound)| value <= bound),
            "exclusiveMinimum" => number().is_none_or(|(value, bound)| value > bound),
            "exclusiveMaximum" => number().is_none_or(|(value, bound)| value < bound),
            "multipleOf" => number().is_none_or(|(value, factor)| value % factor == 0.0),
            "minLength" => characters.is_none_or(|(length, bound)| length >= bound),
            "maxLength" => characters.is_none_or(|(length, bound)| length <= bound),
            "minItems" => items.is_none_or(|(length, bound)| length >= bound),
            "maxItems" => items.is_none_or(|(length, bound)| length <= bound),
            "required" => {
                object.is_none_or(|object| rules().all(|name| object.contains_key(name.as_str().unwrap())))
            }
            "properties" => object.is_none_or(|object| {
                properties.iter().all(|(name, rule)| object.get(name).is_none_or(|value| sub(rule, value)))
            }),
            "additionalProperties" => object.is_none_or(|object| {
                object.iter().all(|(name, value)| properties.contains_key(name) || sub(rule, value))
            }),
            "items" => value.as_array().is_none_or(|values| {
                let before = schema["prefixItems"].as_array().map_or(0, Vec::len);
                values.iter().skip(before).all(|value| sub(rule, value))
            }),
            "prefixItems" => value
                .as_array()
                .is_none_or(|values| rules().zip(values).all(|(rule, value)| sub(rule, value))),
            "$defs" | "title" | "description" | "$schema" | "x-guidance" => true,
            other => panic!("this test does not know {other}"),
        }
    })
}

fn is_of(value: &Json, name: &str) -> bool {
    match name {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "string" => value.is_string(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        "number" => value.is_number(),
        "integer" => value.as_f64().is_some_and(|number| number.fract() == 0.0),
        other => panic!("no type {other}"),
    }
}

/// Schemas as clients send them.
fn schemas() -> Vec<Json> {
    vec![
        json!({"type": "object", "additionalProperties": false, "required": ["name", "age", "tags"], "properties": {
            "name": {"type": "string"}, "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4}}}),
        // Optional properties, unions of types, nested objects.
        json!({"type": "object", "additionalProperties": false, "required": ["b"], "properties": {
            "a": {"type": ["string", "null"]}, "b": {"type": "boolean"}, "c": {"type": "number"},
            "d": {"type": "object", "properties": {"e": {"type": "array", "items": {"type": "array",
                "items": {"type": "integer"}, "minItems": 1, "maxItems": 3}}}, "additionalProperties": false}}}),
        // Strings that must be escaped, in values and in names.
        json!({"enum": ["a\"b", "back\\slash", "line\nfeed\ttab", "naïve — 漢字 🎨", 1, -2.5, null, true, ["x", {"y": []}]]}),
        json!({"type": "object", "additionalProperties": false, "required": ["ключ \"é\"\n"],
            "properties": {"ключ \"é\"\n": {"const": "值"}}}),
        // Definitions, recursion, alternatives.
        json!({"$defs": {"node": {"type": "object", "additionalProperties": false, "required": ["value", "next"],
                "properties": {"value": {"$ref": "#/$defs/value"},
                    "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}},
                "value": {"anyOf": [{"type": "integer"}, {"enum": ["none"]}]}}, "$ref": "#/$defs/node"}),
        json!({"anyOf": [
            {"type": "object", "properties": {"kind": {"const": "circle"}, "radius": {"type": "number",
                "exclusiveMinimum": 0}}, "required": ["kind", "radius"], "additionalProperties": false},
            {"type": "object", "properties": {"kind": {"const": "box"}, "sides": {"type": "array",
                "prefixItems": [{"type": "integer"}, {"type": "integer"}], "items": false, "minItems": 2}},
                "required": ["kind", "sides"], "additionalProperties": false}]}),
        json!({"oneOf": [{"type": "string", "minLength": 2, "maxLength": 5}, {"type": "integer",
            "exclusiveMaximum": -3, "minimum": -20}]}),
        json!({"allOf": [{"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 3}}},
            {"properties": {"a": {"minimum": 10, "maximum": 100}, "b": {"type": "null"}}, "required": ["a", "b"]}]}),
        // Free names: none may repeat a fixed one in another spelling.
        json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
            "additionalProperties": {"type": "string", "maxLength": 3}}),
        json!({"type": "array", "items": {"type": "number", "minimum": -1.5, "maximum": 1e3}, "minItems": 2,
            "maxItems": 5}),
        json!({"$schema": "http://json-schema.org/draft-04/schema#", "const": "kept"}),
        json!({}),
    ]
}

fn check_samples(words: &Words, seeds: std::ops::Range<u64>) {
    for (index, schema) in schemas().iter().enumerate() {
        for seed in seeds.clone() {
            let text = sample(words, &Shape::JsonSchema(schema.clone()), seed * 1_000 + index as u64);
            let value: Json =
                serde_json::from_str(&text).unwrap_or_else(|error| panic!("{schema}: {error} in {text:?}"));
            assert!(satisfies(schema, schema, &value), "{schema} gave {text:?}");
        }
    }
}

#[test]
fn whatever_is_sampled_satisfies_its_schema() {
    check_samples(&Words::demo(), 0..12);
}

#[test]
fn large_vocabularies_give_the_same_promise() {
    let Some(words) = Words::qwen() else { return };
    check_samples(&words, 0..2);
}

#[test]
fn vocabularies_of_pieces_give_the_same_promise() {
    for (name, decoder) in common::decoders() {
        let (tokenizer, _) = common::both(&common::pieces(&decoder));
        let end = tokenizer.token_to_id("</s>").unwrap();
        match GrammarVocabulary::new(&tokenizer, tokenizer.vocab_size(), &[end]) {
            Ok(_) if name.starts_with("metaspace") => {
                // Without byte fallback these few tokens have no bracket.
                let error = Words::new(tokenizer, "</s>").constraint(&Shape::JsonObject).unwrap_err();
                assert!(error.to_string().contains("no text"), "{name}: {error}");
            }
            Ok(_) => check_samples(&Words::new(tokenizer, "</s>"), 0..3),
            Err(error) => {
                assert!(["none", "word pieces", "end of word"].contains(&name), "{name}: {error}");
                assert!(error.to_string().contains("bytes of a single token"), "{error}");
            }
        }
    }
}

#[test]
fn a_json_object_is_an_object() {
    let words = Words::demo();
    for seed in 0..30 {
        let text = sample(&words, &Shape::JsonObject, seed);
        assert!(serde_json::from_str::<Json>(&text).unwrap().is_object(), "{text}");
    }
    assert!(!words.takes(&Shape::JsonObject, "[]"));
    assert!(words.takes(&Shape::JsonObject, r#"{"a": [1, -2.5e-7, "é🎨\n\"", null, {"b": {}}]}"#));
}

#[test]
fn common_ways_of_writing_json_are_free_and_endless_blanks_are_not() {
    let words = Words::demo();
    let schema = json!({"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}},
        "required": ["a"], "additionalProperties": false});
    let shape = Shape::JsonSchema(schema);
    for good in [
        r#"{"a":[1,2]}"#,
        r#"{"a": [1, 2]}"#,
        "{\n  \"a\": [\n    1,\n    2\n  ]\n}",
        "{\n\t\"a\": []\n}",
        r#"{ "a" : [ ] }"#,
    ] {
        assert!(words.takes(&shape, good), "{good:?}");
    }
    for bad in [
        r#" {"a": []}"#,
        "{\"a\":  []}",
        "{\"a\":\n\n[]}",
        &format!("{{\"a\":\n{}[]}}", " ".repeat(41)),
        "{\"a\": []} ",
        r#"{"a": [1], "b": 2}"#,
        r#"{"a": [1.5]}"#,
        r#"{"a": ["1"]}"#,
        "{}",
        r#"{"a": [1,]}"#,
    ] {
        assert!(!words.takes(&shape, bad), "{bad:?}");
    }
}

#[test]
fn a_client_cannot_change_how_its_schema_is_compiled() {
    let words = Words::demo();
    let schema = json!({"type": "array", "items": {"type": "string", "not": {}},
        "x-guidance": {"lenient": true, "whitespace_flexible": true}});
    assert!(words.schema(&schema).unwrap_err().to_string().contains("`not`"));
    let schema = json!({"type": "array", "x-guidance": {"whitespace_pattern": "[ ]*"}});
    assert!(!words.takes(&Shape::JsonSchema(schema), "[    ]"));
}

#[test]
fn a_fixed_name_has_one_spelling() {
    let words = Words::demo();
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
        "additionalProperties": {"type": "string"}});
    let shape = Shape::JsonSchema(schema);
    assert!(words.takes(&shape, r#"{"a": 1, "b": "x"}"#));
    assert!(!words.takes(&shape, r#"{"a": 1, "a": "x"}"#));
    assert!(!words.takes(&shape, "{\"a\": 1, \"\\u0061\": \"x\"}"));
}

#[test]
fn exactly_one_call_is_made() {
    let call = |name: &str, schema: Json| CallShape {
        prefix: format!("<tool_call>\n{{\"name\": \"{name}\", \"arguments\": "),
        schema,
        suffix: "}\n</tool_call>".to_owned(),
        tags: None,
    };
    let city = json!({"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}},
        "required": ["city"], "additionalProperties": false});
    let add = json!({"type": "object", "properties": {"x": {"type": "integer", "maximum": 99, "minimum": 0}},
        "required": ["x"], "additionalProperties": false});
    let shape = Shape::Calls(vec![call("weather", city.clone()), call("weather_add", add.clone())]);
    let check = |words: &Words, seeds| {
        let mut seen = [false; 2];
        for seed in seeds {
            let text = sample(words, &shape, seed);
            let body =
                text.strip_prefix("<tool_call>\n").and_then(|text| text.strip_suffix("\n</tool_call>"));
            let body: Json = serde_json::from_str(body.unwrap_or_else(|| panic!("{text:?}"))).unwrap();
            let second = body["name"] == "weather_add";
            assert!(second || body["name"] == "weather");
            let schema = if second { &add } else { &city };
            assert!(satisfies(schema, schema, &body["arguments"]), "{text:?}");
            seen[usize::from(second)] = true;
        }
        assert_eq!(seen, [true; 2]);
        let one = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Rome\"}}\n</tool_call>";
        assert!(words.takes(&shape, one));
        assert!(!words.takes(&shape, &format!("{one}\n{one}")));
        assert!(!words.takes(&shape, &one.replace("city", "town")));
    };
    check(&Words::demo(), 0..20);
    if let Some(words) = Words::qwen() {
        check(&words, 0..20);
    }
}

#[test]
fn special_tokens_of_a_call_stand_for_themselves() {
    let words = Words::demo();
    let mark = words.tokenizer.token_to_id("<|im_start|>").unwrap();
    let shape = Shape::Calls(vec![CallShape {
        prefix: "say<|im_start|>\"\u{7f}".to_owned(),
        schema: json!({"type": "integer", "minimum": 1, "maximum": 1}),
        suffix: "<|im_start|>".to_owned(),
        tags: None,
    }]);
    let mut constraint = words.constraint(&shape).unwrap();
    let mut ids = Vec::new();
    while !constraint.is_complete() {
        let allowed = words.allowed(&mut constraint);
        ids.push(*allowed.iter().find(|&&id| id != words.end).unwrap());
        constraint.accept(*ids.last().unwrap()).unwrap();
    }
    assert_eq!(words.tokenizer.decode(&ids, false), "say<|im_start|>\"\u{7f}1<|im_start|>");
    assert_eq!(ids.iter().filter(|&&id| id == mark).count(), 2);
}

#[test]
fn what_is_certain_is_forced_as_the_tokenizer_writes_it() {
    let words = Words::demo();
    let schema = json!({"const": {"temperature": "a long and certain text"}});
    let shape = Shape::Regex("\\{\"temperature\": \"a long and certain text\"\\}".to_owned());
    for shape in [Shape::JsonSchema(schema), shape] {
        let mut constraint = words.constraint(&shape).unwrap();
        let mut ids = Vec::new();
        let mut steps = 0;
        while !constraint.is_complete() {
            let forced = constraint.forced();
            let next = if forced.is_empty() { words.allowed(&mut constraint)[..1].to_vec() } else { forced };
            next.iter().for_each(|&id| constraint.accept(id).unwrap());
            ids.extend(next);
            steps += 1;
        }
        assert!(constraint.forced().is_empty());
        assert!(steps < ids.len(), "{steps} steps for {} tokens", ids.len());
        assert!(words.tokenizer.decode(&ids, false).contains("certain text"));
    }
    let fixed = Shape::Regex("the quick brown fox".to_owned());
    let forced = words.constraint(&fixed).unwrap().forced();
    let expected = words.tokenizer.encode("the quick brown fox").unwrap();
    assert!(!forced.is_empty() && expected.starts_with(&forced), "{forced:?} of {expected:?}");
}

#[test]
fn regular_expressions_and_grammars_hold() {
    let words = Words::demo();
    let date = Shape::Regex(r"\d{4}-\d\d/(x|é🎨)".to_owned());
    for text in ["2026-11/x", "1999-01/é🎨"] {
        assert!(words.takes(&date, text), "{text}");
    }
    for text in ["2026-1/x", "2026-11/y", "2026-11/x "] {
        assert!(!words.takes(&date, text), "{text}");
    }
    let sum = Shape::Lark(
        "start: term (\"+\" term)*\nterm: NUMBER | \"(\" start \")\"\nNUMBER: /[0-9]{1,3}/".to_owned(),
    );
    assert!(words.takes(&sum, "1+(22+(333))"));
    assert!(!words.takes(&sum, "1+(22"));
    for seed in 0..10 {
        let text = sample(&words, &date, seed);
        assert!(text.ends_with("/x") || text.ends_with("/é🎨"), "{text}");
    }
}

#[test]
fn text_in_the_form_of_a_special_token_stays_text() {
    let words = Words::demo();
    let shape = Shape::JsonSchema(json!({"const": "<|im_end|><|im_start|>"}));
    let text = sample(&words, &shape, 1);
    assert_eq!(serde_json::from_str::<Json>(&text).unwrap(), "<|im_end|><|im_start|>");
}

#[test]
fn end_tokens_are_never_part_of_a_text() {
    // An added token that is text to its tokenizer, as some models' end tokens are.
    let (tokenizer, _) = common::both(&common::byte_level());
    let text = (0..u32::try_from(tokenizer.vocab_size()).unwrap())
        .rev()
        .find(|&id| !tokenizer.is_special(id) && tokenizer.id_to_token(id).is_some())
        .unwrap();
    let vocabulary = GrammarVocabulary::new(&tokenizer, tokenizer.vocab_size(), &[text]).unwrap();
    let shape = Shape::Regex(".*".to_owned());
    let mut constraint = Constraint::new(&vocabulary, &shape, &GrammarLimits::default()).unwrap();
    constraint.accept(text).unwrap();
    assert!(constraint.is_complete());
    let none = GrammarVocabulary::new(&tokenizer, tokenizer.vocab_size(), &[u32::MAX]);
    assert!(matches!(none, Err(TextError::Vocabulary { .. })));
}

/// What must become of a hostile shape.
enum Outcome {
    /// An error with these words, before an answer begins.
    Refused(&'static str),
    /// It may work or not; some steps are tried, each of which may fail.
    Survived,
}

#[test]
fn no_schema_does_harm() {
    use Outcome::{Refused, Survived};
    let nested = |levels: usize| {
        (0..levels).fold(json!({"type": "null"}), |schema, _| json!({"items": schema, "type": "array"}))
    };
    let chain = |length: usize| {
        let definitions: serde_json::Map<_, _> = (0..length)
            .map(|n| (format!("d{n}"), json!({"properties": {"p": {"$ref": format!("#/$defs/d{}", n + 1)}}})))
            .chain([(format!("d{length}"), json!({"type": "null"}))])
            .collect();
        json!({"$ref": "#/$defs/d0", "$defs": definitions})
    };
    let deep_chain = |length: usize, levels: usize| {
        let deep = |innermost| (0..levels).fold(innermost, |schema, _| json!({"items": schema}));
        let definitions: serde_json::Map<_, _> = (0..length)
            .map(|n| (format!("d{n}"), deep(json!({"$ref": format!("#/$defs/d{}", n + 1)}))))
            .chain([(format!("d{length}"), json!({"type": "null"}))])
            .collect();
        json!({"$ref": "#/$defs/d0", "$defs": definitions})
    };
    let wide = |names: usize, required: bool| {
        let names: Vec<String> = (0..names).map(|n| format!("name{n}")).collect();
        let properties: serde_json::Map<_, _> =
            names.iter().map(|name| (name.clone(), json!({"type": "null"}))).collect();
        json!({"type": "object", "properties": properties, "required": if required { names } else { Vec::new() }})
    };
    let product = |factors: usize| {
        let factor = |n: usize| {
            let option =
                |m: usize| json!({"type": "object", "properties": {format!("p{n}{m}"): {"type": "null"}}});
            json!({"anyOf": (0..6).map(option).collect::<Vec<_>>()})
        };
        json!({"allOf": (0..factors).map(factor).collect::<Vec<_>>()})
    };
    let texts: Vec<String> = (0..9_000).map(|n| format!("value {n}")).collect();
    let cases = [
        ("deep", nested(30), Survived),
        ("too deep", nested(500), Refused("64 levels")),
        ("a long chain of references", chain(900), Survived),
        ("a long chain of deep references", deep_chain(68, 55), Survived),
        ("a longer chain of deep references", deep_chain(160, 55), Refused("levels deep")),
        (
            "alternatives times properties",
            json!({"allOf": [{"anyOf": vec![json!({"type": "null"}); 2_500]},
            wide(1_500, false)]}),
            Survived,
        ),
        (
            "alternatives of constants",
            json!({"allOf": [{"anyOf": vec![json!({"type": "string"}); 3_000]},
            {"enum": texts[..3_000]}]}),
            Refused(""),
        ),
        ("many properties", wide(3_000, true), Survived),
        ("many optional properties", wide(3_000, false), Survived),
        ("many values", json!({"enum": texts}), Survived),
        ("a product of alternatives", product(12), Refused("")),
        ("itself", json!({"$ref": "#"}), Refused("")),
        (
            "in a circle",
            json!({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
            Refused(""),
        ),
        ("alternatives of itself", json!({"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}), Refused("")),
        ("endless", json!({"type": "array", "items": {"$ref": "#"}, "minItems": 1}), Refused("")),
        ("a lost reference", json!({"$ref": "#/$defs/nowhere"}), Refused("nowhere")),
        (
            "a reference elsewhere",
            json!({"$ref": "https://example.com/schema"}),
            Refused("#/$ref: only references within"),
        ),
        ("a backtracker's trap", json!({"type": "string", "pattern": "^(a+)+(a|a)*b$"}), Survived),
        ("exponential automaton", json!({"type": "string", "pattern": "^(a|b)*a(a|b){40}$"}), Survived),
        (
            "repeats of repeats",
            json!({"type": "string", "pattern": "^(((a{1000}){1000}){1000}){1000}$"}),
            Survived,
        ),
        ("many repeats", json!({"type": "string", "pattern": r"^(\w{1,500}\s){1,500}$"}), Survived),
        (
            "a deep pattern",
            json!({"type": "string", "pattern": "(".repeat(20_000) + &")".repeat(20_000)}),
            Refused(""),
        ),
        (
            "a pattern of the unsupported kind",
            json!({"type": "string", "pattern": "(?=a)b"}),
            Refused("look-around"),
        ),
        ("an empty pattern", json!({"type": "string", "pattern": "^[^\\s\\S]$"}), Refused("")),
        (
            "two patterns",
            json!({"allOf": [{"type": "string", "pattern": "^(a|b)*a(a|b){12}$"},
            {"pattern": "^(a|b)*b(a|b){13}$"}, {"pattern": "^((a|b){7})*$"}]}),
            Survived,
        ),
        ("long strings", json!({"type": "string", "minLength": 100_000, "maxLength": 1_000_000}), Survived),
        ("endless strings", json!({"type": "string", "minLength": u64::MAX}), Refused("")),
        (
            "many items",
            json!({"type": "array", "items": {"type": "null"}, "minItems": 1_000_000_000}),
            Survived,
        ),
        (
            "endless items",
            json!({"type": "array", "items": {"type": "null"}, "minItems": u64::MAX}),
            Survived,
        ),
        ("large numbers", json!({"type": "number", "minimum": 1e300, "maximum": 1.000_001e300}), Survived),
        ("fine numbers", json!({"type": "number", "multipleOf": 1e-300}), Survived),
        ("a large factor", json!({"type": "integer", "multipleOf": 4_294_967_291_u32}), Survived),
        ("not a number", json!({"type": "string", "minLength": "é".repeat(200)}), Refused("")),
        ("no type", json!({"type": "text"}), Refused("text")),
        ("an unknown format", json!({"type": "string", "format": "crystal"}), Refused("crystal")),
        ("nothing", json!(false), Refused("")),
        ("no value", json!({"enum": []}), Refused("")),
        ("a contradiction", json!({"type": "integer", "minimum": 3, "maximum": 2}), Refused("")),
        (
            "alternatives that overlap",
            json!({"oneOf": [{"type": "integer"}, {"type": "number"}]}),
            Refused("`oneOf`"),
        ),
        (
            "properties at large",
            json!({"type": "object", "properties": {"a": true}, "minProperties": 3}),
            Refused("maxProperties"),
        ),
    ];
    let words = Words::demo();
    for (name, schema, outcome) in cases {
        let (prefix, suffix) = ("f(".into(), ")".into());
        let calls = vec![CallShape { prefix, schema: schema.clone(), suffix, tags: None }];
        // As a parameter and as all of them, whatever comes of it.
        let tagged =
            [json!({"properties": {"a": schema}, "required": ["a"]}), schema.clone()].map(|parameters| {
                let tool = ToolSpec { name: "f".into(), parameters };
                Shape::Calls(vec![ToolFormat::MiniMax.call_shape(&tool).unwrap()])
            });
        for shape in [Shape::JsonSchema(schema), Shape::Calls(calls)] {
            survive(&words, name, &shape, &outcome);
        }
        for shape in tagged {
            survive(&words, name, &shape, &Survived);
        }
    }
}

#[test]
fn no_grammar_does_harm() {
    use Outcome::{Refused, Survived};
    let lark = |text: &str| Shape::Lark(text.to_owned());
    let regex = |text: &str| Shape::Regex(text.to_owned());
    let call = |prefix: String| CallShape { prefix, schema: json!({}), suffix: ")".to_owned(), tags: None };
    let many_calls = (0..1_000).map(|n| call(format!("function{n}("))).collect();
    let rules: String = (0..5_000).map(|n| format!("r{n}: \"a\" r{} | \"b\"\n", n + 1)).collect();
    let doubling: String = (0..60).map(|n| format!("r{n}: r{0} r{0}\n", n + 1)).collect();
    let cases = [
        ("json within", lark("start: %json {}"), Refused("%json")),
        ("no start", lark("rule: \"a\""), Refused("start")),
        ("no grammar", lark("start: ((("), Refused("")),
        (
            "deep",
            lark(&format!("start: {}\"a\"{}", "(".repeat(50_000), ")".repeat(50_000))),
            Refused("nested"),
        ),
        ("itself", lark("start: start"), Refused("")),
        ("left-recursive", lark("start: start \"a\" | \"a\""), Survived),
        ("ambiguous", lark("start: start start | \"a\" | \"b\" | \"\""), Survived),
        ("a long chain", lark(&format!("start: r0\n{rules}r5000: \"c\"")), Survived),
        ("doubling", lark(&format!("start: r0\n{doubling}r60: \"a\"")), Survived),
        ("doubling nothing", lark(&format!("start: r0\n{doubling}r60: \"\"")), Survived),
        ("many repeats", lark("start: (((\"a\"~1000000)~1000000)~1000000)"), Survived),
        ("a lost rule", lark("start: nowhere"), Refused("nowhere")),
        ("a bad expression", regex("a("), Refused("")),
        ("an expression that ends early", regex("a/ | b"), Survived),
        ("an expression of nothing", regex(""), Survived),
        ("a trap", regex("(a+)+(a+)+(a+)+b"), Survived),
        ("an exponential automaton", regex("(a|b)*a(a|b){60}"), Survived),
        ("repeats of repeats", regex("(((a{1000}){1000}){1000}){1000}"), Survived),
        ("all of Unicode", regex(r"(\p{L}{1,300}\P{L}){1,300}"), Survived),
        ("too long", regex(&"a".repeat(300_000)), Refused("262144")),
        ("long", regex(&"ab".repeat(100_000)), Survived),
        ("many calls", Shape::Calls(many_calls), Survived),
        ("too many calls", Shape::Calls(vec![call("x".repeat(1_000)); 300]), Refused("262144")),
        ("no calls", Shape::Calls(Vec::new()), Refused("no call")),
    ];
    let words = Words::demo();
    for (name, shape, outcome) in cases {
        survive(&words, name, &shape, &outcome);
    }
}

/// Compiles a shape and takes some steps with it.
fn survive(words: &Words, name: &str, shape: &Shape, outcome: &Outcome) {
    let mut constraint = match (words.constraint(shape), outcome) {
        (Err(error), Outcome::Refused(reason)) => {
            assert!(matches!(error, TextError::Schema { .. }), "{name}: {error}");
            assert!(error.to_string().contains(reason), "{name}: {error}");
            assert!(!error.to_string().contains("panic"), "{name}: {error}");
            return;
        }
        (Err(error), Outcome::Survived) => {
            return assert!(matches!(error, TextError::Schema { .. }), "{name}: {error}");
        }
        (Ok(_), Outcome::Refused(_)) => panic!("{name}: not refused"),
        (Ok(constraint), Outcome::Survived) => constraint,
    };
    let mut random = Random(7);
    for _ in 0..40 {
        let Ok(mask) = constraint.mask() else { return };
        let allowed: Vec<u32> = (0..u32::try_from(words.size).unwrap()).filter(|&id| bit(mask, id)).collect();
        let id = allowed[random.below(allowed.len())];
        if constraint.accept(id).is_err() || id == words.end {
            return;
        }
    }
}
