//! The `tojson` filter as `transformers` defines it: `json.dumps` with `ensure_ascii=False` as the default.
//!
//! Jinja2's own filter and minijinja's escape `<`, `>`, `&` and `'` for HTML and write no spaces; models were
//! trained on Python's `", "` and `": "`.

use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind, State};

use super::args::Args;
use super::repr::{MAX_DEPTH, float, too_deep};

/// Steps that each item costs: walking a value is slower than copying text.
const FUEL_PER_ITEM: u64 = 4;

/// The arguments of `json.dumps` that a template may give.
struct Dumps {
    ensure_ascii: bool,
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
    sort_keys: bool,
}

/// `tojson(ensure_ascii=False, indent=None, separators=None, sort_keys=False)`.
pub(super) fn dumps(state: &State<'_, '_>, value: &Value, args: &Args) -> Result<String, Error> {
    let indent = match args.get(1, "indent")? {
        None => None,
        Some(indent) => Some(match indent.as_str() {
            // Bounded: it is repeated at every level of every line.
            Some(text) => short(text)?,
            None => " ".repeat(i64::try_from(indent)?.clamp(0, 64) as usize),
        }),
    };
    let (item_separator, key_separator) = match args.get(2, "separators")? {
        Some(pair) => {
            let part = |at| -> Result<String, Error> {
                let part = pair.get_item_by_index(at)?;
                short(part.as_str().ok_or_else(|| bad("separators must be two strings"))?)
            };
            (part(0)?, part(1)?)
        }
        // Python leaves the trailing blank away when it breaks lines.
        None => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
    };
    let dumps = Dumps {
        ensure_ascii: args.maybe_bool(0, "ensure_ascii")?.unwrap_or(false),
        indent,
        item_separator,
        key_separator,
        sort_keys: args.maybe_bool(3, "sort_keys")?.unwrap_or(false),
    };
    args.end()?;
    let mut out = String::new();
    dumps.write(&mut out, value, 0, state)?;
    Ok(out)
}

/// An indent or separator, which is written once per item: no longer than what an item pays for.
fn short(text: &str) -> Result<String, Error> {
    if text.len() > 64 {
        return Err(bad("an indent or separator of more than 64 bytes"));
    }
    Ok(text.to_owned())
}

fn bad(reason: impl Into<String>) -> Error {
    Error::new(ErrorKind::BadSerialization, reason.into())
}

impl Dumps {
    fn write(
        &self,
        out: &mut String,
        value: &Value,
        depth: usize,
        state: &State<'_, '_>,
    ) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(too_deep());
        }
        let start = out.len();
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number if value.is_integer() => out.push_str(&value.to_string()),
            ValueKind::Number => out.push_str(&json_float(f64::try_from(value.clone())?)),
            ValueKind::String => self.write_string(out, value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                out.push('[');
                let mut empty = true;
                for item in value.try_iter()? {
                    self.write_break(out, !empty, depth + 1);
                    empty = false;
                    self.write(out, &item, depth + 1, state)?;
                }
                self.write_end(out, empty, depth);
                out.push(']');
            }
            ValueKind::Map => {
                let mut pairs = Vec::new();
                for key in value.try_iter()? {
                    pairs.push((json_key(&key)?, value.get_item(&key)?));
                }
                if self.sort_keys {
                    pairs.sort_by(|a, b| a.0.cmp(&b.0));
                }
                out.push('{');
                for (at, (key, item)) in pairs.iter().enumerate() {
                    self.write_break(out, at > 0, depth + 1);
                    self.write_string(out, key);
                    out.push_str(&self.key_separator);
                    self.write(out, item, depth + 1, state)?;
                }
                self.write_end(out, pairs.is_empty(), depth);
                out.push('}');
            }
            kind => return Err(bad(format!("an object of type {kind} is not JSON serializable"))),
        }
        // A value that holds another many times over grows exponentially: pay while it grows, not when it is done.
        let text = if value.as_str().is_some() { out.len() - start } else { 0 };
        state.consume_fuel(FUEL_PER_ITEM + text as u64 / 64)?;
        Ok(())
    }

    /// Between items (`again`) or before the first.
    fn write_break(&self, out: &mut String, again: bool, depth: usize) {
        if again {
            out.push_str(&self.item_separator);
        }
        self.write_line(out, depth);
    }

    /// Before the closing bracket.
    fn write_end(&self, out: &mut String, empty: bool, depth: usize) {
        if !empty {
            self.write_line(out, depth);
        }
    }

    fn write_line(&self, out: &mut String, depth: usize) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            for _ in 0..depth {
                out.push_str(indent);
            }
        }
    }

    fn write_string(&self, out: &mut String, text: &str) {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                // With ensure_ascii DEL is escaped no more than without it: it is ASCII.
                c if c < ' ' || (self.ensure_ascii && !c.is_ascii()) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        out.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

/// `json.dumps` of a float: `repr`, with JavaScript's names for what is not a number.
fn json_float(number: f64) -> String {
    if number.is_nan() {
        "NaN".into()
    } else if number.is_infinite() {
        if number > 0.0 { "Infinity" } else { "-Infinity" }.into()
    } else {
        float(number)
    }
}

/// A key as `json.dumps` writes it: strings as they are; numbers, booleans and `None` by their JSON names.
fn json_key(key: &Value) -> Result<String, Error> {
    match key.kind() {
        ValueKind::String => Ok(key.as_str().unwrap_or_default().to_owned()),
        ValueKind::None => Ok("null".into()),
        ValueKind::Bool => Ok(if key.is_true() { "true" } else { "false" }.into()),
        ValueKind::Number if key.is_integer() => Ok(key.to_string()),
        ValueKind::Number => Ok(json_float(f64::try_from(key.clone())?)),
        kind => Err(bad(format!("keys must be strings or numbers, not {kind}"))),
    }
}
