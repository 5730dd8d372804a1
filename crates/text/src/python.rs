//! Python as templates see it.
//!
//! Chat templates are written for Jinja2 in Python and lean on it: how `None`, floats, lists and dictionaries
//! print, `json.dumps`, methods of strings and dictionaries, `datetime.strftime`. minijinja is close; this module
//! closes the rest of the gap by filters, tests, functions and a formatter, and rewrites nothing.

mod args;
mod clock;
mod json;
mod methods;
mod repr;

use jiff::civil::DateTime;
use minijinja::value::{Rest, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State};
use serde_json::Value as Json;

/// The message of `raise_exception`, carried as the source of a renderer's error.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Raised(pub(crate) String);

/// Teaches an environment Python's ways.
pub(crate) fn install(env: &mut Environment<'_>) {
    minijinja_contrib::add_to_environment(env);
    // Not in Jinja2; it would show a template all there is.
    env.remove_global("debug");

    env.set_formatter(|out, _state, value| repr::write_str(out, value));
    env.set_unknown_method_callback(methods::call);

    env.add_function("raise_exception", raise_exception);

    env.add_filter("tojson", json::tojson);
    env.add_filter("string", repr::to_str);
    env.add_filter("join", join);
    env.add_filter("center", center);
    env.add_filter("wordcount", word_count);

    env.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
    env.add_test("sequence", is_sequence);
    env.add_test("callable", is_callable);
}

/// What `json.loads` would make of it: dictionaries keep the order of their keys.
pub(crate) fn value(json: &Json) -> Value {
    match json {
        Json::Null => Value::from(()),
        Json::Bool(yes) => Value::from(*yes),
        Json::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(number), _) => Value::from(number),
            (None, Some(number)) => Value::from(number),
            (None, None) => Value::from(number.as_f64().unwrap_or(f64::NAN)),
        },
        Json::String(text) => Value::from(text.as_str()),
        Json::Array(items) => items.iter().map(value).collect(),
        Json::Object(fields) => {
            Value::from_pairs(fields.iter().map(|(name, field)| (name.as_str(), value(field))))
        }
    }
}

/// `strftime_now` at a fixed time, or by the clock.
pub(crate) fn strftime_now(now: Option<DateTime>) -> Value {
    Value::from_function(move |format: &str| clock::strftime(now.unwrap_or_else(clock::local_time), format))
}

fn raise_exception(message: &Value) -> Result<Value, Error> {
    let message = repr::to_str(message)?;
    Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Raised(message)))
}

/// Has a length and items: lists, tuples and ranges, but in Python strings and dictionaries too, and Jinja2's
/// undefined value.
fn is_sequence(value: &Value) -> bool {
    match value.kind() {
        ValueKind::Undefined | ValueKind::String | ValueKind::Bytes | ValueKind::Seq | ValueKind::Map => true,
        ValueKind::Iterable => value.len().is_some(),
        _ => false,
    }
}

fn is_callable(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Plain | ValueKind::Undefined)
}

/// `join(separator="", attribute=None)`, printing items as Python does.
fn join(state: &State<'_, '_>, value: &Value, args: Rest<Value>) -> Result<String, Error> {
    let args = args::Args::new("join", &args, 2)?;
    let (separator, attribute) = (args.get(0, "d")?, args.maybe_text(1, "attribute")?);
    args.end()?;
    let separator = separator.as_ref().map(repr::to_str).transpose()?.unwrap_or_default();
    let mut out = String::new();
    for (at, item) in value.try_iter()?.enumerate() {
        let start = out.len();
        if at > 0 {
            out.push_str(&separator);
        }
        match &attribute {
            None => repr::write_str(&mut out, &item)?,
            Some(path) => {
                let found = path.split('.').try_fold(item, |value, name| match name.parse::<usize>() {
                    Ok(index) => value.get_item_by_index(index),
                    Err(_) => value.get_attr(name),
                })?;
                repr::write_str(&mut out, &found)?;
            }
        }
        state.consume_fuel(1 + (out.len() - start) as u64 / 64)?;
    }
    Ok(out)
}

/// `center(width=80)`.
fn center(state: &mut State<'_, '_>, value: &Value, args: Rest<Value>) -> Result<Value, Error> {
    let args = args::Args::new("center", &args, 1)?;
    let width = args.maybe_int(0, "width")?.unwrap_or(80);
    args.end()?;
    methods::call(state, &Value::from(repr::to_str(value)?), "center", &[Value::from(width)])
}

/// Words are runs of letters, digits and underscores.
fn word_count(value: &Value) -> Result<usize, Error> {
    let text = repr::to_str(value)?;
    let words = text.split(|c: char| !(c.is_alphanumeric() || c == '_'));
    Ok(words.filter(|word| !word.is_empty()).count())
}
