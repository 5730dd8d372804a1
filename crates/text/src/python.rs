//! Python as templates see it.
//!
//! Chat templates are written for Jinja2 in Python and lean on it: how `None`, floats, lists and dictionaries
//! print, `json.dumps`, methods of strings and dictionaries, `datetime.strftime`. minijinja is close; this module
//! closes the rest of the gap by filters, tests, functions and a formatter, and rewrites nothing.

mod args;
mod clock;
mod filters;
mod json;
mod methods;
mod repr;

use jiff::civil::DateTime;
use minijinja::value::{Rest, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind};
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
    env.add_function("cycler", |items: Rest<Value>| minijinja_contrib::globals::cycler(items.0));

    filters::install(env);

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
    Value::from_function(move |format: &str| {
        // A directive grows fifteenfold at most; no date needs a longer format.
        if format.len() > 4096 {
            let reason = "strftime_now with a format of more than 4096 bytes";
            return Err(Error::new(ErrorKind::InvalidOperation, reason));
        }
        Ok(clock::strftime(now.unwrap_or_else(clock::local_time), format))
    })
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
