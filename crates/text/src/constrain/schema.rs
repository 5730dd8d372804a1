//! The borders of schemas: sizes, and keywords that would be passed over or taken wrongly.
//!
//! The library refuses what it knows not to support, but what a schema's draft does not know it ignores, numbers go
//! through `f64`, and it has no bound on what the intersection of subschemas may grow to.

use std::collections::HashSet;

use serde_json::Value as Json;

use super::GrammarLimits;

/// Assertions of any draft that are not enforced.
const UNSUPPORTED: [&str; 17] = [
    "$dynamicRef",
    "$recursiveRef",
    "contains",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "else",
    "if",
    "maxContains",
    "minContains",
    "not",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
    "uniqueItems",
    "$anchor",
];

/// Keywords that constrain nothing.
const ANNOTATIONS: [&str; 14] = [
    "$comment",
    "$defs",
    "$id",
    "$schema",
    "default",
    "definitions",
    "deprecated",
    "description",
    "discriminator",
    "examples",
    "readOnly",
    "title",
    "writeOnly",
    "x-guidance",
];

/// Integers up to here are exact in `f64`.
const LARGEST_INTEGER: u64 = 1 << 53;

/// Subschemas that may be met while every reference in an intersection is followed, all calls together.
const MOST_MERGED: usize = 100_000;

/// Subschemas that may be looked at to find out whether every recursion can end, all calls together.
const MOST_STEPS: usize = 2_000_000;

/// Levels of all definitions that are referred to, together: the library's recursion takes some 4 KiB for each.
const MOST_LEVELS: usize = 4_000;

/// Schemas as the library may see them.
///
/// # Errors
/// What is wrong, and where.
pub(super) fn checked<'a>(
    schemas: impl IntoIterator<Item = &'a Json>,
    limits: &GrammarLimits,
) -> Result<Vec<Json>, String> {
    let (mut size, mut merged, mut steps) = (Size::default(), 0, 0);
    let mut checked = Vec::new();
    for schema in schemas {
        size.add(schema, limits)?;
        let mut schema = schema.clone();
        if let Json::Object(keywords) = &mut schema {
            // Every draft is read as the newest one, which knows all keywords.
            keywords.shift_remove("$schema");
        }
        enforceable(&mut schema, &Place::Root)?;
        Merge { root: &schema, met: &mut merged, open: Vec::new() }.visit(&schema, false)?;
        End { root: &schema, steps: &mut steps, ending: HashSet::new() }.check()?;
        checked.push(schema);
    }
    Ok(checked)
}

/// The size of schemas.
#[derive(Default)]
struct Size {
    bytes: usize,
    values: usize,
}

impl Size {
    /// Adds a schema. It may be of any depth, so this does not recurse.
    fn add(&mut self, schema: &Json, limits: &GrammarLimits) -> Result<(), String> {
        let mut rest = vec![(schema, 1)];
        while let Some((value, depth)) = rest.pop() {
            self.values += 1;
            match value {
                Json::String(text) => self.bytes += text.len() + 2,
                Json::Array(values) => {
                    self.bytes += values.len() + 2;
                    rest.extend(values.iter().map(|value| (value, depth + 1)));
                }
                Json::Object(values) => {
                    self.bytes += 2 + values.keys().map(|key| key.len() + 4).sum::<usize>();
                    rest.extend(values.values().map(|value| (value, depth + 1)));
                }
                Json::Null | Json::Bool(_) | Json::Number(_) => self.bytes += 4,
            }
            let exceeded = [
                (self.bytes, limits.bytes, "bytes"),
                (self.values, limits.values, "values"),
                (depth, limits.depth, "levels"),
            ];
            if let Some((_, limit, unit)) = exceeded.iter().find(|(size, limit, _)| size > limit) {
                return Err(format!("the schema is too large: more than {limit} {unit}"));
            }
        }
        Ok(())
    }
}

/// Where in a schema something is.
enum Place<'a> {
    Root,
    In(&'a Place<'a>, &'a str),
}

impl std::fmt::Display for Place<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Place::Root => f.write_str("#"),
            Place::In(outer, part) => write!(f, "{outer}/{part}"),
        }
    }
}

/// Refuses what would not be enforced, and takes away what says nothing.
fn enforceable(schema: &mut Json, at: &Place) -> Result<(), String> {
    let keywords = match schema {
        Json::Bool(_) => return Ok(()),
        Json::Object(keywords) => keywords,
        _ => return Err(format!("{at}: a schema must be an object, `true` or `false`")),
    };
    if keywords.get("uniqueItems") == Some(&Json::Bool(false)) {
        keywords.shift_remove("uniqueItems");
    }
    for (keyword, value) in keywords {
        let at = &Place::In(at, keyword);
        match keyword.as_str() {
            "$id" if !matches!(at, Place::In(Place::Root, _)) => {
                return Err(format!("{at}: schemas within schemas (`$id`) are not supported"));
            }
            unsupported if UNSUPPORTED.contains(&unsupported) => {
                return Err(format!("{at}: `{unsupported}` is not supported"));
            }
            "$ref" if value.as_str().is_some_and(|reference| !reference.starts_with('#')) => {
                return Err(format!("{at}: only references within the schema (`#/...`) are supported"));
            }
            "const" => writable(value, at)?,
            "enum" => value.as_array().into_iter().flatten().try_for_each(|value| writable(value, at))?,
            "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum" | "multipleOf" => {
                exact(value, at)?
            }
            "$defs" | "definitions" => {
                for (name, schema) in value.as_object_mut().into_iter().flatten() {
                    enforceable(schema, &Place::In(at, name))?;
                }
            }
            keyword => {
                for (name, schema) in subschemas_mut(keyword, value) {
                    match name {
                        Some(name) => enforceable(schema, &Place::In(at, name))?,
                        None => enforceable(schema, at)?,
                    }
                }
            }
        }
    }
    Ok(())
}

/// What kind of value holds the subschemas of a keyword.
enum Holder {
    Map,
    List,
    /// A single one; in older drafts, `items` may be a list.
    Single,
}

fn holder(keyword: &str) -> Option<Holder> {
    match keyword {
        "properties" | "patternProperties" => Some(Holder::Map),
        "allOf" | "anyOf" | "oneOf" | "prefixItems" => Some(Holder::List),
        "items" | "additionalItems" | "additionalProperties" => Some(Holder::Single),
        _ => None,
    }
}

type Named<'a, T> = Vec<(Option<&'a str>, T)>;

fn subschemas_mut<'a>(keyword: &str, value: &'a mut Json) -> Named<'a, &'a mut Json> {
    match (holder(keyword), value) {
        (Some(Holder::Map), Json::Object(schemas)) => {
            schemas.iter_mut().map(|(name, schema)| (Some(name.as_str()), schema)).collect()
        }
        (Some(Holder::List | Holder::Single), Json::Array(schemas)) => {
            schemas.iter_mut().map(|schema| (None, schema)).collect()
        }
        (Some(Holder::Single), schema) => vec![(None, schema)],
        // The library says what it must be.
        _ => Vec::new(),
    }
}

fn subschemas<'a>(keyword: &str, value: &'a Json) -> Vec<&'a Json> {
    match (holder(keyword), value) {
        (Some(Holder::Map), Json::Object(schemas)) => schemas.values().collect(),
        (Some(Holder::List | Holder::Single), Json::Array(schemas)) => schemas.iter().collect(),
        (Some(Holder::Single), schema) => vec![schema],
        _ => Vec::new(),
    }
}

/// Refuses a constant that could not be written: see [`super::grammar`] for the escapes.
fn writable(value: &Json, at: &Place) -> Result<(), String> {
    let unwritable = |c: char| c.is_ascii_control() && !"\n\r\t\u{8}\u{c}".contains(c);
    match value {
        Json::String(text) if text.contains(unwritable) => {
            Err(format!("{at}: control characters in constants are not supported"))
        }
        Json::Array(values) => values.iter().try_for_each(|value| writable(value, at)),
        Json::Object(values) => values.values().try_for_each(|value| writable(value, at)),
        Json::Number(_) => exact(value, at),
        Json::String(_) | Json::Bool(_) | Json::Null => Ok(()),
    }
}

fn exact(value: &Json, at: &Place) -> Result<(), String> {
    let magnitude = value.as_u64().or_else(|| value.as_i64().map(i64::unsigned_abs));
    if magnitude.is_some_and(|magnitude| magnitude > LARGEST_INTEGER) {
        return Err(format!("{at}: integers beyond 2^53 are not supported"));
    }
    Ok(())
}

/// A walk over all that the intersections of a schema may bring together.
///
/// The library inlines a reference where it must be intersected with something, and the regular expressions of two
/// strings are joined then: a chain of definitions, each of which names the one before twice, doubles at every step.
struct Merge<'a, 'b> {
    root: &'a Json,
    met: &'b mut usize,
    /// References being followed.
    open: Vec<&'a str>,
}

impl<'a> Merge<'a, '_> {
    fn visit(&mut self, schema: &'a Json, merged: bool) -> Result<(), String> {
        *self.met += 1;
        if *self.met > MOST_MERGED {
            return Err("the schema's references and intersections amount to too much".to_owned());
        }
        let Json::Object(keywords) = schema else { return Ok(()) };
        let merged = merged || intersects(keywords);
        for (keyword, value) in keywords {
            match keyword.as_str() {
                "$ref" if merged => self.follow(value)?,
                "$defs" | "definitions" => {
                    value
                        .as_object()
                        .into_iter()
                        .flatten()
                        .try_for_each(|(_, schema)| self.visit(schema, false))?;
                }
                keyword => {
                    subschemas(keyword, value)
                        .into_iter()
                        .try_for_each(|schema| self.visit(schema, merged))?;
                }
            }
        }
        Ok(())
    }

    fn follow(&mut self, reference: &'a Json) -> Result<(), String> {
        let Some(reference) = reference.as_str().filter(|reference| !self.open.contains(reference)) else {
            return Ok(());
        };
        if let Some(target) = target(self.root, reference) {
            self.open.push(reference);
            self.visit(target, true)?;
            self.open.pop();
        }
        Ok(())
    }
}

/// What a reference names; `None` where it is not within the schema, which the library refuses.
pub(crate) fn target<'a>(root: &'a Json, reference: &str) -> Option<&'a Json> {
    root.pointer(reference.strip_prefix('#')?.trim_end_matches('/'))
}

/// Finds out whether some finite text satisfies what each reference names.
///
/// The library does not, and an answer would go on for ever, or stand before nothing that may follow. The references
/// that are known to end grow until no more follow from them.
struct End<'a, 'b> {
    root: &'a Json,
    steps: &'b mut usize,
    ending: HashSet<&'a str>,
}

impl<'a> End<'a, '_> {
    fn check(mut self) -> Result<(), String> {
        let mut open = Vec::new();
        references(self.root, &mut open);
        let mut seen = HashSet::new();
        open.retain(|reference| seen.insert(*reference));
        self.bounded(&open)?;
        // Definitions tend to name those that come after them.
        open.reverse();
        loop {
            let before = open.len();
            let mut still_open = Vec::new();
            for reference in open {
                match target(self.root, reference) {
                    Some(target) if !self.ends(target)? => still_open.push(reference),
                    _ => drop(self.ending.insert(reference)),
                }
            }
            match still_open.first() {
                None => return Ok(()),
                Some(endless) if still_open.len() == before => {
                    return Err(format!("`{endless}` can never come to an end"));
                }
                Some(_) => open = still_open,
            }
        }
    }

    /// Refuses references that may lead too deep, each into a definition that was not yet met: the library recurses.
    fn bounded(&self, references: &[&'a str]) -> Result<(), String> {
        let targets = references.iter().filter_map(|reference| target(self.root, reference));
        let levels = targets.chain([self.root]).map(depth).sum::<usize>();
        if levels > MOST_LEVELS {
            return Err(format!("the schema's references may lead more than {MOST_LEVELS} levels deep"));
        }
        Ok(())
    }

    /// Whether a value for this schema can come to an end by what is known. Only what surely asks for more is
    /// followed: an intersection that nothing satisfies may pass.
    fn ends(&mut self, schema: &'a Json) -> Result<bool, String> {
        *self.steps += 1;
        if *self.steps > MOST_STEPS {
            return Err("the schema's references amount to too much".to_owned());
        }
        let list = |keyword: &str| schema[keyword].as_array().map_or(&[][..], Vec::as_slice);
        if schema["$ref"].as_str().is_some_and(|reference| !self.ending.contains(reference)) {
            return Ok(false);
        }
        for alternatives in ["anyOf", "oneOf"].map(list) {
            if !alternatives.is_empty() && !self.any_ends(alternatives)? {
                return Ok(false);
            }
        }
        if !self.all_end(list("allOf"))? {
            return Ok(false);
        }
        if schema["type"] == "object" {
            let needed = list("required").iter().filter_map(|name| schema["properties"].get(name.as_str()?));
            return self.all_end(needed);
        }
        if schema["type"] == "array" {
            let least =
                schema["minItems"].as_u64().map_or(0, |least| usize::try_from(least).unwrap_or(usize::MAX));
            let first = list("prefixItems");
            let rest = schema.get("items").filter(|items| least > first.len() && !items.is_array());
            return self.all_end(first.iter().take(least).chain(rest));
        }
        Ok(true)
    }

    fn all_end(&mut self, schemas: impl IntoIterator<Item = &'a Json>) -> Result<bool, String> {
        for schema in schemas {
            if !self.ends(schema)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn any_ends(&mut self, schemas: &'a [Json]) -> Result<bool, String> {
        for schema in schemas {
            if self.ends(schema)? {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// Levels of a schema, whose depth is known to be bounded.
fn depth(schema: &Json) -> usize {
    let inner = match schema {
        Json::Array(values) => values.iter().map(depth).max(),
        Json::Object(values) => values.values().map(depth).max(),
        Json::Null | Json::Bool(_) | Json::Number(_) | Json::String(_) => None,
    };
    1 + inner.unwrap_or(0)
}

/// All references of a schema, its definitions' too.
fn references<'a>(schema: &'a Json, found: &mut Vec<&'a str>) {
    for (keyword, value) in schema.as_object().into_iter().flatten() {
        match keyword.as_str() {
            "$ref" => found.extend(value.as_str()),
            "$defs" | "definitions" => {
                value.as_object().into_iter().flatten().for_each(|(_, schema)| references(schema, found));
            }
            keyword => subschemas(keyword, value).into_iter().for_each(|schema| references(schema, found)),
        }
    }
}

/// Whether more than one thing is asked of a value at this very place.
fn intersects(keywords: &serde_json::Map<String, Json>) -> bool {
    let (mut parts, mut others) = (0, false);
    for (keyword, value) in keywords {
        match keyword.as_str() {
            "allOf" => parts += value.as_array().map_or(0, Vec::len),
            "anyOf" | "oneOf" | "$ref" | "const" | "enum" => parts += 1,
            // Properties that match a pattern must also satisfy its schema.
            "patternProperties" => parts += 2,
            annotation => others |= !ANNOTATIONS.contains(&annotation),
        }
    }
    parts + usize::from(others) > 1
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn refusal(schema: &Json) -> String {
        checked([schema], &GrammarLimits::default()).expect_err("refused")
    }

    #[test]
    fn what_is_not_enforced_is_refused_by_name_and_place() {
        for keyword in UNSUPPORTED {
            let schema = json!({"properties": {"a": {"items": {keyword: true}}}});
            let reason = refusal(&schema);
            assert_eq!(reason, format!("#/properties/a/items/{keyword}: `{keyword}` is not supported"));
        }
        assert!(refusal(&json!({"anyOf": [{"$id": "x"}]})).contains("#/anyOf/$id"));
        assert!(refusal(&json!({"const": 9_007_199_254_740_993_u64})).contains("2^53"));
        assert!(refusal(&json!({"enum": ["a\u{1}"]})).contains("control"));
        assert!(refusal(&json!([])).contains("must be an object"));
    }

    #[test]
    fn names_of_properties_are_no_keywords() {
        let schema = json!({"properties": {"not": {"type": "string"}, "if": true}, "uniqueItems": false});
        let checked = checked([&schema], &GrammarLimits::default()).expect("fine");
        assert_eq!(checked, [json!({"properties": {"not": {"type": "string"}, "if": true}})]);
    }

    #[test]
    fn sizes_are_bounded_without_recursion() {
        let mut deep = json!({});
        for _ in 0..50_000 {
            deep = Json::Array(vec![deep]);
        }
        assert!(refusal(&deep).contains("64 levels"));
        // Its own drop would recurse.
        while let Json::Array(mut inner) = deep {
            deep = inner.pop().unwrap_or_default();
        }
        assert!(refusal(&json!({"description": "x".repeat(300_000)})).contains("262144 bytes"));
        assert!(refusal(&json!({"enum": vec![1; 10_001]})).contains("10000 values"));
    }

    #[test]
    fn definitions_that_double_are_refused() {
        let mut definitions = json!({"d0": {"type": "string", "pattern": "a"}});
        for n in 1..40 {
            let previous = json!({"$ref": format!("#/$defs/d{}", n - 1)});
            definitions[format!("d{n}")] = json!({"allOf": [previous, previous]});
        }
        let schema = json!({"$defs": definitions, "$ref": "#/$defs/d39"});
        assert!(refusal(&schema).contains("amount to too much"));
    }

    #[test]
    fn what_cannot_end_is_refused() {
        for schema in [
            json!({"$ref": "#"}),
            json!({"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}),
            json!({"type": "array", "items": {"$ref": "#"}, "minItems": 1}),
            json!({"$defs": {"a": {"allOf": [{"$ref": "#/$defs/b"}]}, "b": {"$ref": "#/$defs/a"}},
                "properties": {"a": {"$ref": "#/$defs/a"}}}),
            json!({"type": "object", "required": ["next"], "properties": {"next": {"$ref": "#/"}}}),
        ] {
            assert!(refusal(&schema).contains("can never come to an end"), "{schema}");
        }
        for schema in [
            json!({"anyOf": [{"$ref": "#"}, {"type": "null"}]}),
            json!({"type": "array", "items": {"$ref": "#"}}),
            json!({"type": "object", "properties": {"next": {"$ref": "#"}}}),
            json!({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/c"}, "c": {"type": "null"}},
                "type": "array", "minItems": 2, "items": {"$ref": "#/$defs/a"}}),
        ] {
            assert!(checked([&schema], &GrammarLimits::default()).is_ok(), "{schema}");
        }
    }

    #[test]
    fn references_that_meet_nothing_may_recurse() {
        let tree = json!({"type": "object", "properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}}});
        assert!(checked([&tree], &GrammarLimits::default()).is_ok());
        let inherited = json!({"$defs": {"base": {"properties": {"next": {"$ref": "#"}}}},
            "allOf": [{"$ref": "#/$defs/base"}, {"properties": {"a": {"$ref": "#"}}}]});
        assert!(checked([&inherited], &GrammarLimits::default()).is_ok());
    }
}
