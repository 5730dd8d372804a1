//! Shapes in the library's terms.

use std::fmt::Write as _;

use llguidance::api::TopLevelGrammar;
use serde_json::{Value as Json, json};

use super::vocabulary::GrammarVocabulary;
use super::{CallShape, GrammarLimits, Shape, schema, tagged, values};
use crate::tokenizer::Tokenizer;

/// What may stand between two tokens of JSON: a blank, or a new line and its indentation. A model that is unsure
/// likes to go on with blanks for ever.
const WHITESPACE: &str = r" |\n[ \t]{0,40}";

/// The escapes that a string may hold. Without `\u`, no property can be named in two ways, and no half of a
/// surrogate pair can be written; all characters but a few control codes still can.
const ESCAPES: &str = r#"nrbtf\""#;

/// The grammar of a shape.
pub(super) fn of(
    vocabulary: &GrammarVocabulary,
    shape: &Shape,
    limits: &GrammarLimits,
) -> Result<TopLevelGrammar, String> {
    match shape {
        Shape::JsonObject => Ok(TopLevelGrammar::from_json_schema(compact(json!({"type": "object"})))),
        Shape::JsonSchema(schema) => {
            Ok(TopLevelGrammar::from_json_schema(compact(schema::checked([schema], limits)?.remove(0))))
        }
        Shape::Regex(regex) => {
            fits("the regular expression has", regex.len(), limits)?;
            Ok(TopLevelGrammar::from_regex(regex))
        }
        Shape::Lark(grammar) => {
            fits("the grammar has", grammar.len(), limits)?;
            if grammar.contains("%json") {
                // It would go round the borders of schemas.
                return Err("`%json` is not supported in a grammar; ask for a JSON schema instead".to_owned());
            }
            Ok(TopLevelGrammar::from_lark(grammar.clone()))
        }
        Shape::Calls(calls) => {
            Ok(TopLevelGrammar::from_lark(self::calls(vocabulary.tokenizer(), calls, limits)?))
        }
    }
}

pub(super) fn fits(what: &str, bytes: usize, limits: &GrammarLimits) -> Result<(), String> {
    if bytes > limits.bytes {
        return Err(format!("{what} {bytes} bytes; the limit is {}", limits.bytes));
    }
    Ok(())
}

/// A schema with the options of its compilation. Those that a client may have put there are overwritten.
pub(super) fn compact(schema: Json) -> Json {
    let mut schema = match schema {
        Json::Bool(true) => json!({}),
        Json::Bool(false) => json!({"enum": []}),
        schema => schema,
    };
    schema["x-guidance"] = json!({"whitespace_pattern": WHITESPACE, "json_allowed_escapes": ESCAPES});
    schema
}

/// The grammar of exactly one of some calls.
fn calls(tokenizer: &Tokenizer, calls: &[CallShape], limits: &GrammarLimits) -> Result<String, String> {
    if calls.is_empty() {
        return Err("there is no call to choose from".to_owned());
    }
    let fixed = calls.iter().map(|call| call.prefix.len() + call.suffix.len()).sum();
    fits("the calls' fixed texts have", fixed, limits)?;
    let schemas = schema::checked(calls.iter().map(|call| &call.schema), limits)?;
    let mut rules = String::from("start: ");
    rules += &(0..calls.len()).map(|index| format!("call_{index}")).collect::<Vec<_>>().join(" | ");
    let mut budget = values::Budget::new(limits);
    for (index, (call, schema)) in calls.iter().zip(schemas).enumerate() {
        let Some(tags) = &call.tags else {
            let (prefix, suffix) = (literal(tokenizer, &call.prefix), literal(tokenizer, &call.suffix));
            // Writing to a string does not fail.
            let _ = write!(rules, "\ncall_{index}: {prefix} %json {} {suffix}", compact(schema));
            continue;
        };
        let name = format!("call_{index}");
        let (parameters, sequence) = tagged::parameters(tokenizer, tags, &schema, &name, &mut budget)?;
        let (prefix, suffix) = (tags.fixed(tokenizer, &call.prefix), tags.fixed(tokenizer, &call.suffix));
        let _ = write!(rules, "\n{name}: {prefix} {sequence} {suffix}{parameters}");
    }
    Ok(rules)
}

/// A text as a sequence of the grammar: strings, and special tokens by their ids.
pub(super) fn literal(tokenizer: &Tokenizer, text: &str) -> String {
    let (mut sequence, mut rest) = (String::new(), text);
    let ids = tokenizer.encode(text).unwrap_or_default();
    for id in ids.into_iter().filter(|&id| tokenizer.is_special(id)) {
        let token = tokenizer.id_to_token(id).unwrap_or_default();
        let Some((before, behind)) = rest.split_once(&token) else { continue };
        let _ = write!(sequence, "{} <[{id}]> ", string(before));
        rest = behind;
    }
    sequence + &string(rest)
}

pub(super) fn string(text: &str) -> String {
    if text.is_empty() {
        return String::new();
    }
    // JSON lets this one stand as it is, the grammar's strings do not.
    Json::from(text).to_string().replace('\u{7f}', "\\u007f")
}
