//! Calls that name each parameter in markup: their parameters in the library's terms.
//!
//! Parameters come in the order of the schema, each at most once, those that are required always. A value that may be
//! any string is bare text up to the mark that ends it; one that is something else is JSON of its schema.

use std::collections::HashSet;
use std::fmt::Write as _;

use serde_json::{Map, Value as Json};

use super::grammar::{compact, fits, literal, string};
use super::{GrammarLimits, ParameterTags};
use crate::reply::NAME_LIMIT;
use crate::tokenizer::Tokenizer;

/// References and alternatives within a parameter's schema that are followed.
pub(crate) const DEPTH: usize = 16;

/// Subschemas and fixed values that are looked at to find the values of all parameters of all calls. Without references
/// there are at most [`GrammarLimits::values`]; a chain of definitions, each of which names the next twice, doubles at
/// every step.
pub(crate) const ALTERNATIVES: usize = 16_384;

/// Rules and values of a grammar may have this many times the bytes that a schema may.
const GROWTH: usize = 8;

/// Keywords that a subschema may have for nothing.
const KEYWORDS_A_STEP: usize = 16;

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

/// What the calls of a grammar have cost so far.
pub(super) struct Budget<'a> {
    limits: &'a GrammarLimits,
    /// Of [`ALTERNATIVES`].
    steps: usize,
    /// Of all values as the grammar has them.
    bytes: usize,
}

impl<'a> Budget<'a> {
    pub(super) fn new(limits: &'a GrammarLimits) -> Self {
        Budget { limits, steps: 0, bytes: 0 }
    }

    fn steps(&mut self, steps: usize) -> Result<(), String> {
        self.steps += steps;
        if self.steps > ALTERNATIVES {
            return Err(format!(
                "too many alternatives: more than {ALTERNATIVES} for all parameters together"
            ));
        }
        Ok(())
    }

    fn bytes(&mut self, bytes: usize) -> Result<(), String> {
        self.bytes += bytes;
        fits("the values of the parameters up to this one come to", self.bytes / GROWTH, self.limits)
    }
}

/// One alternative of a parameter's value.
enum Alternative<'a> {
    /// Text of so many characters.
    Text { least: u64, most: Option<u64> },
    /// This string.
    Word(&'a str),
    /// This value, which is no string.
    Constant(&'a Json),
    /// JSON of these keywords and this type.
    Typed(&'a Map<String, Json>, &'a str),
    /// JSON of exactly one of these schemas, none of which admits a string.
    OneOf(Vec<&'a Json>),
}

impl Alternative<'_> {
    fn is_string(&self) -> bool {
        matches!(self, Alternative::Text { .. } | Alternative::Word(_))
    }

    /// What tells a fixed value from others; `None` of what is not fixed, or has parts.
    fn constant(&self) -> Option<String> {
        match self {
            Alternative::Word(word) => Some(string(word)),
            Alternative::Constant(Json::Number(number)) => Some(number.as_f64()?.to_string()),
            Alternative::Constant(value @ (Json::Bool(_) | Json::Null)) => Some(value.to_string()),
            _ => None,
        }
    }

    /// Its schema, if it is JSON.
    fn schema(&self) -> Option<Json> {
        match self {
            Alternative::Text { .. } | Alternative::Word(_) => None,
            Alternative::Constant(value) => Some(serde_json::json!({ "const": value })),
            Alternative::Typed(keywords, name) => {
                let mut schema = (*keywords).clone();
                schema.insert("type".to_owned(), (*name).into());
                Some(schema.into())
            }
            Alternative::OneOf(branches) => Some(serde_json::json!({ "oneOf": branches })),
        }
    }

    /// Whether it is all that there is of its type, or fixed.
    fn is_bare(&self) -> bool {
        match self {
            Alternative::Typed(keywords, _) => keywords.keys().all(|key| key == "type" || !is_rule(key)),
            Alternative::OneOf(_) => false,
            _ => true,
        }
    }
}

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

fn is_rule(keyword: &str) -> bool {
    RULES.contains(&keyword)
}

/// The values that a schema admits.
fn alternatives<'a>(
    schema: &'a Json,
    root: &'a Json,
    depth: usize,
    budget: &mut Budget,
    out: &mut Vec<Alternative<'a>>,
) -> Result<(), String> {
    if depth == 0 {
        return Err("its references and alternatives are too deep".to_owned());
    }
    budget.steps(1)?;
    let any = Alternative::Text { least: 0, most: None };
    let keywords = match schema {
        Json::Bool(true) => {
            out.push(any);
            return Ok(());
        }
        Json::Object(keywords) => keywords,
        _ => return Ok(()),
    };
    budget.steps(keywords.len() / KEYWORDS_A_STEP)?;
    let rules: Vec<&str> = keywords.keys().map(String::as_str).filter(|key| is_rule(key)).collect();
    match rules[..] {
        [] => out.push(any),
        ["$ref"] => {
            let target =
                keywords["$ref"].as_str().and_then(|reference| super::schema::target(root, reference));
            let target = target.ok_or("it refers to nothing")?;
            alternatives(target, root, depth - 1, budget, out)?;
        }
        ["anyOf"] => {
            for branch in keywords["anyOf"].as_array().into_iter().flatten() {
                alternatives(branch, root, depth - 1, budget, out)?;
            }
        }
        ["oneOf"] => {
            let mut branches = Vec::new();
            for branch in keywords["oneOf"].as_array().into_iter().flatten() {
                let mut own = Vec::new();
                alternatives(branch, root, depth - 1, budget, &mut own)?;
                branches.push((branch, own));
            }
            out.extend(one_of(branches)?);
        }
        _ if rules.contains(&"const") || rules.contains(&"enum") => {
            if let Some(rule) = rules.iter().find(|rule| !["const", "enum", "type"].contains(*rule)) {
                return Err(format!("`{rule}` beside fixed values is not supported"));
            }
            let list = keywords.get("enum").map(|values| values.as_array().map_or(&[][..], Vec::as_slice));
            budget.steps(list.map_or(0, <[Json]>::len))?;
            let (values, others) = match keywords.get("const") {
                Some(constant) => (std::slice::from_ref(constant), list),
                None => (list.unwrap_or_default(), None),
            };
            let admitted = |value: &&Json| {
                others.is_none_or(|others| others.iter().any(|other| same(other, value)))
                    && (!keywords.contains_key("type") || types(keywords).any(|name| is_of(value, name)))
            };
            out.extend(values.iter().filter(admitted).map(|value| match value {
                Json::String(word) => Alternative::Word(word),
                value => Alternative::Constant(value),
            }));
        }
        _ => {
            if !keywords.contains_key("type") {
                return Err("it does not say its `type`".to_owned());
            }
            for name in types(keywords) {
                out.push(match name {
                    "string" => text(keywords, &rules)?,
                    name => Alternative::Typed(keywords, name),
                });
            }
        }
    }
    Ok(())
}

/// The values of exactly one of some schemas, given with the values of each.
///
/// A string that two of them admit cannot be told here; what is no string the library sees to.
fn one_of<'a>(branches: Vec<(&'a Json, Vec<Alternative<'a>>)>) -> Result<Vec<Alternative<'a>>, String> {
    let constants: Option<Vec<String>> =
        branches.iter().flat_map(|(_, own)| own).map(Alternative::constant).collect();
    let are_different = constants.is_some_and(|constants| {
        let mut seen = HashSet::new();
        constants.into_iter().all(|constant| seen.insert(constant))
    });
    if are_different {
        return Ok(branches.into_iter().flat_map(|(_, own)| own).collect());
    }
    let (strings, others): (Vec<_>, Vec<_>) =
        branches.into_iter().partition(|(_, own)| own.iter().any(Alternative::is_string));
    if strings.len() > 1 || strings.iter().flat_map(|(_, own)| own).any(|value| !value.is_string()) {
        let reason = "`oneOf` of strings is only supported where its branches are different constants, or one \
                      branch is of strings alone and no other has any; `anyOf` is supported";
        return Err(reason.to_owned());
    }
    let mut values: Vec<_> = strings.into_iter().flat_map(|(_, own)| own).collect();
    if let [(_, _)] = others[..] {
        values.extend(others.into_iter().flat_map(|(_, own)| own));
    } else if !others.is_empty() {
        values.push(Alternative::OneOf(others.into_iter().map(|(branch, _)| branch).collect()));
    }
    Ok(values)
}

/// The types that a schema names.
fn types(keywords: &Map<String, Json>) -> impl Iterator<Item = &str> {
    let (one, several) = match keywords.get("type") {
        Some(Json::Array(several)) => (None, several.as_slice()),
        one => (one, &[][..]),
    };
    one.into_iter().chain(several).filter_map(Json::as_str)
}

/// Whether a value is of a type.
fn is_of(value: &Json, name: &str) -> bool {
    match value {
        Json::Null => name == "null",
        Json::Bool(_) => name == "boolean",
        Json::String(_) => name == "string",
        Json::Array(_) => name == "array",
        Json::Object(_) => name == "object",
        Json::Number(number) => {
            name == "number"
                || (name == "integer" && number.as_f64().is_some_and(|number| number.fract() == 0.0))
        }
    }
}

/// Whether two values are the same; numbers are however they are written.
fn same(one: &Json, other: &Json) -> bool {
    match (one, other) {
        (Json::Number(one), Json::Number(other)) => one.as_f64() == other.as_f64(),
        _ => one == other,
    }
}

/// Any string with these rules.
fn text<'a>(keywords: &Map<String, Json>, rules: &[&str]) -> Result<Alternative<'a>, String> {
    let unsupported = ["$ref", "allOf", "anyOf", "oneOf", "pattern", "format"];
    if let Some(rule) = rules.iter().find(|rule| unsupported.contains(*rule)) {
        return Err(format!("`{rule}` is not supported where a model writes strings as bare text"));
    }
    let length = |rule: &str| keywords.get(rule).and_then(Json::as_u64);
    let (least, most) = (length("minLength").unwrap_or(0), length("maxLength"));
    if most.is_some_and(|most| most < least) {
        return Err("no string is that long".to_owned());
    }
    Ok(Alternative::Text { least, most })
}
