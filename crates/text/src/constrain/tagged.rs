//! Calls that name each parameter in markup: their parameters in the library's terms.
//!
//! Parameters come in the order of the schema, each at most once, those that are required always. A value that may be
//! any string is bare text up to the mark that ends it; one that is something else is JSON of its schema.

use std::collections::HashSet;
use std::fmt::Write as _;

use serde_json::{Map, Value as Json};

use super::ParameterTags;
use super::grammar::{compact, fits, literal, string};
use super::values::{Alternative, Budget, DEPTH, GROWTH, alternatives, is_rule};
use crate::reply::NAME_LIMIT;
use crate::tokenizer::Tokenizer;

/// Those of all arguments that hold by construction.
const HELD: [&str; 4] = ["additionalProperties", "properties", "required", "type"];

/// The rules of all parameters of a call, each in a line of its own, and the sequence that joins them. Names of rules
/// begin with `name`.
pub(super) fn parameters(
    tokenizer: &Tokenizer,
    tags: &ParameterTags,
    schema: &Json,
    name: &str,
    budget: &mut Budget,
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
    let required = keywords.get("required").and_then(Json::as_array).into_iter().flatten();
    let mut required: Vec<&str> = required.filter_map(Json::as_str).collect();
    // One that is named twice is still written once.
    let mut seen = HashSet::new();
    required.retain(|key| seen.insert(*key));
    let anything = Json::Bool(true);
    let additional = keywords.get("additionalProperties").unwrap_or(&anything);
    let undeclared = required.iter().filter(|key| !declared.contains_key(**key));
    let all = declared.iter().map(|(key, schema)| (key.as_str(), schema));
    let all = all.chain(undeclared.map(|key| (*key, additional)));
    let (mut rules, mut sequence) = (String::new(), String::new());
    for (index, (key, value)) in all.enumerate() {
        let at = format!("#/properties/{key}");
        let is_name = (1..=NAME_LIMIT).contains(&key.len()) && key.trim() == key;
        if !is_name || key.contains(['<', '>', '"', '\n']) {
            return Err(format!("{at}: this model has no way of writing that name"));
        }
        let mut values = Vec::new();
        alternatives(value, schema, DEPTH, budget, &mut values)
            .map_err(|reason| format!("{at}: {reason}"))?;
        if values.is_empty() {
            if required.contains(&key) {
                return Err(format!("{at}: no value satisfies the schema"));
            }
            continue;
        }
        let rule = format!("{name}_p{index}");
        let texts = writes(&values, tags, schema, budget).map_err(|reason| format!("{at}: {reason}"))?;
        let parameter = Parameter { tokenizer, tags, key, rule: &rule };
        parameter.write(&texts, &mut rules);
        let _ = write!(sequence, " {rule}{}", if required.contains(&key) { "" } else { "?" });
        fits("the parameters of a call come to", rules.len() / GROWTH, budget.limits)?;
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
    budget: &mut Budget,
) -> Result<Vec<Written>, String> {
    let free = values.iter().any(|value| matches!(value, Alternative::Text { .. }));
    let mut written = Vec::new();
    for value in values {
        let text = match value {
            Alternative::Text { least, most } => {
                let most = most.map_or(String::new(), |most| most.to_string());
                Term::Free(format!("(?s:.{{{least},{most}}})"))
            }
            Alternative::Word(word) => {
                let ends = tags.never.iter().any(|mark| word.contains(mark))
                    || tags.never_first().any(|mark| word.starts_with(mark));
                if ends {
                    return Err(format!("this model has no way of writing {word:?}"));
                }
                Term::Word((*word).to_owned())
            }
            json => {
                // What is read of a text that may be anything is JSON if it can be: its rules would not hold.
                if free && !tags.typed() && !json.is_bare() {
                    return Err("where a string may stand, nothing else can have rules".to_owned());
                }
                let mut schema = json.schema().unwrap_or_default();
                for definitions in ["$defs", "definitions"] {
                    if let (Some(shared), Json::Object(keywords)) = (root.get(definitions), &mut schema)
                        && refers(keywords)
                    {
                        keywords.entry(definitions).or_insert_with(|| shared.clone());
                    }
                }
                Term::Json(compact(schema).to_string())
            }
        };
        let (Term::Free(bytes) | Term::Word(bytes) | Term::Json(bytes)) = &text;
        budget.bytes(bytes.len())?;
        written.push(Written { text, is_string: value.is_string() });
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
                        let within = any_of(tags.never.iter().copied());
                        // Writing to a string does not fail.
                        let _ = write!(further, "\n{terminal}: /{expression}/ & ~/(?s:.*)({within})(?s:.*)/");
                        let first = any_of(tags.never_first());
                        if !first.is_empty() {
                            let _ = write!(further, " & ~/({first})(?s:.*)/");
                        }
                        // A terminal takes as much as it can: what ends it must be in it, up to a special token,
                        // which no text goes over.
                        let (text, token) = match after_value.split_once("<[") {
                            Some((text, behind)) => (text.trim(), format!(" <[{behind}")),
                            None => (after_value.trim(), String::new()),
                        };
                        if text.is_empty() {
                            format!("{terminal}{token}")
                        } else {
                            let _ = write!(further, "\n{terminal}_END: {terminal} {text}");
                            format!("{terminal}_END{token}")
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

    /// What no text may begin with: marks that begin with a new line, where one stands before the text already.
    fn never_first(&self) -> impl Iterator<Item = &'static str> {
        let after_line = self.after_key.ends_with('\n');
        self.never.iter().filter_map(move |mark| mark.strip_prefix('\n').filter(|_| after_line))
    }

    /// Whether the markup says what is a string.
    fn typed(&self) -> bool {
        self.after_key != self.after_json_key
    }
}

/// A regular expression, between slashes, of these texts; empty without any.
fn any_of<'a>(texts: impl Iterator<Item = &'a str>) -> String {
    texts.map(escaped).collect::<Vec<_>>().join("|")
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
