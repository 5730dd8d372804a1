//! The values that a parameter's schema admits, as alternatives: strings as text, everything else as JSON.

use std::collections::HashSet;

use serde_json::{Map, Value as Json};

use super::GrammarLimits;
use super::grammar::{fits, string};
use super::schema::target;

/// References and alternatives within a parameter's schema that are followed.
pub(crate) const DEPTH: usize = 16;

/// Subschemas, types and fixed values that are looked at to find the values of all parameters of all calls. Without references
/// there are at most [`GrammarLimits::values`]; a chain of definitions, each of which names the next twice, doubles at
/// every step.
pub(crate) const ALTERNATIVES: usize = 16_384;

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

/// Rules and values of a grammar may have this many times the bytes that a schema may.
pub(super) const GROWTH: usize = 8;

/// What the calls of a grammar have cost so far.
pub(super) struct Budget<'a> {
    pub(super) limits: &'a GrammarLimits,
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

    pub(super) fn bytes(&mut self, bytes: usize) -> Result<(), String> {
        self.bytes += bytes;
        fits("the values of the parameters up to this one come to", self.bytes / GROWTH, self.limits)
    }
}

/// One alternative of a parameter's value.
pub(super) enum Alternative<'a> {
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
    pub(super) fn is_string(&self) -> bool {
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
    pub(super) fn schema(&self) -> Option<Json> {
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
    pub(super) fn is_bare(&self) -> bool {
        match self {
            Alternative::Typed(keywords, _) => keywords.keys().all(|key| key == "type" || !is_rule(key)),
            Alternative::OneOf(_) => false,
            _ => true,
        }
    }
}

/// The values that a schema admits.
pub(super) fn alternatives<'a>(
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
    budget.steps(keywords.len() / KEYWORDS_A_STEP + types(keywords).count())?;
    let rules: Vec<&str> = keywords.keys().map(String::as_str).filter(|key| is_rule(key)).collect();
    match rules[..] {
        [] => out.push(any),
        ["$ref"] => {
            let target = keywords["$ref"].as_str().and_then(|reference| target(root, reference));
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

pub(super) fn is_rule(keyword: &str) -> bool {
    RULES.contains(&keyword)
}
