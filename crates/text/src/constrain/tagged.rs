//! Calls that name each parameter in markup: their parameters in the library's terms.
//!
//! Parameters come in the order of the schema, each at most once, those that are required always. A value that may be
//! any string is bare text up to the mark that ends it; one that is something else is JSON of its schema.

use std::fmt::Write as _;

use serde_json::{Map, Value as Json};

use super::grammar::{compact, literal, string};
use super::{GrammarLimits, ParameterTags};
use crate::tokenizer::Tokenizer;

/// References and alternatives within a parameter's schema that are followed.
const DEPTH: usize = 16;

/// Values that a parameter may have, as alternatives.
const ALTERNATIVES: usize = 4096;

/// Keywords that constrain something; the others that do are refused before ([`super::schema`]).
const RULES: [&str; 27] = [
    "$ref",
    "additionalItems",
    "additionalProperties",
    "allOf",
    "anyOf",
    "const",
    "enum",
    "exclusiveMaximum",
    "exclusiveMinimum",
    "format",
    "items",
    "maxItems",
    "maxLength",
    "maxProperties",
    "maximum",
    "minItems",
    "minLength",
    "minProperties",
    "minimum",
    "multipleOf",
    "oneOf",
    "pattern",
    "patternProperties",
    "prefixItems",
    "properties",
    "required",
    "type",
];

/// Those of all arguments that hold by construction.
const HELD: [&str; 4] = ["additionalProperties", "properties", "required", "type"];

/// One alternative of a parameter's value.
enum Alternative {
    /// Text of so many characters.
    Text { least: u64, most: Option<u64> },
    /// This string.
    Word(String),
    /// JSON of this schema.
    Json(Json),
}

/// The rules of all parameters of a call, each in a line of its own, and the sequence that joins them. Names of rules
/// begin with `name`.
pub(super) fn parameters(
    tokenizer: &Tokenizer,
    tags: &ParameterTags,
    schema: &Json,
    name: &str,
    limits: &GrammarLimits,
) -> Result<(String, String), String> {
    let none = Map::new();
    let keywords = match schema {
        Json::Object(keywords) => keywords,
        Json::Bool(true) => &none,
        _ => return Err("no arguments satisfy the schema".to_owned()),
    };
    if let Some(rule) = keywords.keys().find(|key| is_rule(key) && !HELD.contains(&key.as_str())) {
        return Err(format!("#/{rule}: not supported where a model writes each parameter by itself"));
    }
    let declared = keywords.get("properties").and_then(Json::as_object).unwrap_or(&none);
    let required: Vec<&str> = keywords
        .get("required")
        .and_then(Json::as_array)
        .into_iter()
        .flatten()
        .filter_map(Json::as_str)
        .collect();
    let anything = Json::Bool(true);
    let undeclared = required.iter().filter(|key| !declared.contains_key(**key));
    let all = declared.iter().map(|(key, schema)| (key.as_str(), schema));
    let all = all.chain(undeclared.map(|key| (*key, &anything)));
    let (mut rules, mut sequence) = (String::new(), String::new());
    for (index, (key, value)) in all.enumerate() {
        let at = format!("#/properties/{key}");
        if key.trim() != key || key.is_empty() || key.contains(['<', '>', '"', '\n']) {
            return Err(format!("{at}: this model has no way of writing that name"));
        }
        let mut values = Vec::new();
        alternatives(value, schema, DEPTH, &mut values).map_err(|reason| format!("{at}: {reason}"))?;
        if values.is_empty() {
            if required.contains(&key) {
                return Err(format!("{at}: no value satisfies the schema"));
            }
            continue;
        }
        let rule = format!("{name}_p{index}");
        let texts = writes(&values, tags, schema, &at)?;
        let parameter = Parameter { tokenizer, tags, key, rule: &rule };
        parameter.write(&texts, &mut rules);
        let _ = write!(sequence, " {rule}{}", if required.contains(&key) { "" } else { "?" });
        super::grammar::fits("the parameters of a call come to", rules.len() / 8, limits)?;
    }
    Ok((rules, sequence))
}

/// A value as the grammar has it.
struct Written {
    /// A terminal or an expression.
    text: Term,
    /// Whether it is a string.
    is_string: bool,
}

enum Term {
    /// A regular expression, less what ends a value.
    Free(String),
    Word(String),
    Json(String),
}

/// The alternatives, each as it stands in the text.
fn writes(
    values: &[Alternative],
    tags: &ParameterTags,
    root: &Json,
    at: &str,
) -> Result<Vec<Written>, String> {
    let free = values.iter().any(|value| matches!(value, Alternative::Text { .. }));
    let mut written = Vec::new();
    for value in values {
        written.push(match value {
            Alternative::Text { least, most } => {
                let most = most.map_or(String::new(), |most| most.to_string());
                Written { text: Term::Free(format!("(?s:.{{{least},{most}}})")), is_string: true }
            }
            Alternative::Word(word) => {
                if tags.never.iter().any(|mark| word.contains(mark)) {
                    return Err(format!("{at}: this model has no way of writing {word:?}"));
                }
                Written { text: Term::Word(word.clone()), is_string: true }
            }
            Alternative::Json(schema) => {
                // What is read of a text that may be anything is JSON if it can be: its rules would not hold.
                let bare = schema.as_object().is_none_or(|keywords| {
                    keywords.keys().all(|key| key == "type" || key == "const" || !is_rule(key))
                });
                if free && !tags.typed() && !bare {
                    return Err(format!("{at}: where a string may stand, nothing else can have rules"));
                }
                let mut schema = schema.clone();
                for definitions in ["$defs", "definitions"] {
                    if let (Some(shared), Json::Object(keywords)) = (root.get(definitions), &mut schema)
                        && refers(keywords)
                    {
                        keywords.entry(definitions).or_insert_with(|| shared.clone());
                    }
                }
                Written { text: Term::Json(compact(schema).to_string()), is_string: false }
            }
        });
    }
    Ok(written)
}

/// Whether something in a schema is a reference.
fn refers(keywords: &Map<String, Json>) -> bool {
    keywords.iter().any(|(key, value)| key == "$ref" || refers_in(value))
}

fn refers_in(value: &Json) -> bool {
    match value {
        Json::Object(keywords) => refers(keywords),
        Json::Array(values) => values.iter().any(refers_in),
        _ => false,
    }
}

struct Parameter<'a> {
    tokenizer: &'a Tokenizer,
    tags: &'a ParameterTags,
    key: &'a str,
    rule: &'a str,
}

impl Parameter<'_> {
    /// The parameter's rule, its values' rules and terminals.
    fn write(&self, values: &[Written], rules: &mut String) {
        let Parameter { tokenizer, tags, key, rule } = self;
        let fixed = |text: &str| tags.fixed(tokenizer, text);
        let (before, after_value) = (fixed(tags.before_key), fixed(tags.after_value));
        let (mut ways, mut further) = (Vec::new(), String::new());
        for is_string in [true, false] {
            let mut some = Vec::new();
            for (index, value) in values.iter().enumerate().filter(|(_, value)| value.is_string == is_string)
            {
                some.push(match &value.text {
                    Term::Free(expression) => {
                        let terminal = format!("{}_{index}", rule.to_uppercase());
                        let ends: Vec<String> = tags.never.iter().map(|mark| escaped(mark)).collect();
                        let ends = ends.join("|");
                        // Writing to a string does not fail.
                        let _ = write!(further, "\n{terminal}: /{expression}/ & ~/(?s:.*)({ends})(?s:.*)/");
                        if after_value.contains("<[") {
                            // A special token, which no text goes over.
                            format!("{terminal} {after_value}")
                        } else {
                            // A terminal takes as much as it can: what ends it must be in it.
                            let _ =
                                write!(further, "\n{terminal}_END: {terminal} {}", string(tags.after_value));
                            format!("{terminal}_END")
                        }
                    }
                    Term::Word(word) => format!("{} {after_value}", string(word)),
                    Term::Json(schema) => format!("%json {schema} {after_value}"),
                });
            }
            if some.is_empty() {
                continue;
            }
            let way = format!("{rule}_{}", u8::from(is_string));
            let _ = write!(further, "\n{way}: {}", some.join(" | "));
            let after_key = fixed(if is_string { tags.after_key } else { tags.after_json_key });
            ways.push(format!("{} {after_key} {way}", string(key)));
        }
        let _ = write!(rules, "\n{rule}: {before} ({}){further}", ways.join(" | "));
    }
}

impl ParameterTags {
    /// Fixed text as a sequence of the grammar.
    pub(super) fn fixed(&self, tokenizer: &Tokenizer, text: &str) -> String {
        if !self.lines_optional {
            return literal(tokenizer, text);
        }
        text.split('\n').map(|part| literal(tokenizer, part)).collect::<Vec<_>>().join(" /\\n?/ ")
    }

    /// Whether the markup says what is a string.
    fn typed(&self) -> bool {
        self.after_key != self.after_json_key
    }
}

/// A text as a part of a regular expression between slashes.
fn escaped(text: &str) -> String {
    text.chars().fold(String::new(), |mut all, c| {
        match c {
            '\n' => all.push_str("\\n"),
            c if r"\.+*?()|[]{}^$#&-~/".contains(c) => all.extend(['\\', c]),
            c => all.push(c),
        }
        all
    })
}

fn is_rule(keyword: &str) -> bool {
    RULES.contains(&keyword)
}

/// The values that a schema admits.
fn alternatives(schema: &Json, root: &Json, depth: usize, out: &mut Vec<Alternative>) -> Result<(), String> {
    if out.len() > ALTERNATIVES || depth == 0 {
        return Err("too many alternatives, or too deep".to_owned());
    }
    let any = Alternative::Text { least: 0, most: None };
    let keywords = match schema {
        Json::Bool(true) => {
            out.push(any);
            return Ok(());
        }
        Json::Object(keywords) => keywords,
        _ => return Ok(()),
    };
    let rules: Vec<&str> = keywords.keys().map(String::as_str).filter(|key| is_rule(key)).collect();
    match rules[..] {
        [] => out.push(any),
        ["$ref"] => {
            let target =
                keywords["$ref"].as_str().and_then(|reference| super::schema::target(root, reference));
            let target = target.ok_or("it refers to nothing")?;
            alternatives(target, root, depth - 1, out)?;
        }
        ["anyOf" | "oneOf"] => {
            for branch in keywords[rules[0]].as_array().into_iter().flatten() {
                alternatives(branch, root, depth - 1, out)?;
            }
        }
        _ if rules.contains(&"const") || rules.contains(&"enum") => {
            if let Some(rule) = rules.iter().find(|rule| !["const", "enum", "type"].contains(*rule)) {
                return Err(format!("`{rule}` beside fixed values is not supported"));
            }
            let fixed = keywords.get("const").into_iter();
            let fixed = fixed.chain(keywords.get("enum").and_then(Json::as_array).into_iter().flatten());
            for value in fixed {
                out.push(match value {
                    Json::String(word) => Alternative::Word(word.clone()),
                    value => Alternative::Json(serde_json::json!({ "const": value })),
                });
            }
        }
        _ => {
            let types: Vec<&str> = match keywords.get("type") {
                Some(Json::String(one)) => vec![one],
                Some(Json::Array(several)) => several.iter().filter_map(Json::as_str).collect(),
                _ => return Err("it does not say its `type`".to_owned()),
            };
            for name in types {
                if name == "string" {
                    out.push(text(keywords, &rules)?);
                } else {
                    let mut schema = keywords.clone();
                    schema.insert("type".to_owned(), name.into());
                    out.push(Alternative::Json(schema.into()));
                }
            }
        }
    }
    Ok(())
}

/// Any string with these rules.
fn text(keywords: &Map<String, Json>, rules: &[&str]) -> Result<Alternative, String> {
    if let Some(rule) = rules.iter().find(|rule| ["pattern", "format", "contentEncoding"].contains(*rule)) {
        return Err(format!("`{rule}` is not supported where a model writes strings as bare text"));
    }
    let length = |rule: &str| keywords.get(rule).and_then(Json::as_u64);
    let (least, most) = (length("minLength").unwrap_or(0), length("maxLength"));
    if most.is_some_and(|most| most < least) {
        return Err("no string is that long".to_owned());
    }
    Ok(Alternative::Text { least, most })
}
