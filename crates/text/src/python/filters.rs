//! Jinja2's filters where minijinja's differ or are missing.

use minijinja::value::{Rest, Value, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, ErrorKind, State};

use super::args::Args;
use super::{json, methods, repr};

/// A filter's arguments, by place or by name.
type Given = Rest<ValueOrKwargs>;

pub(super) fn install(env: &mut Environment<'_>) {
    env.add_filter("tojson", |state: &State<'_, '_>, value: &Value, given: Given| {
        json::dumps(state, value, &Args::new("tojson", given.into_values(), 4)?)
    });
    env.add_filter("string", repr::to_str);
    env.add_filter("pprint", |value: &Value| repr::to_repr(value));
    env.add_filter("join", join);
    env.add_filter("int", int);
    env.add_filter("float", float);
    env.add_filter("indent", indent);
    env.add_filter("center", center);
    env.add_filter("truncate", truncate);
    env.add_filter("wordcount", word_count);
    env.add_filter("escape", escape);
    env.add_filter("e", escape);
    env.add_filter("forceescape", |value: &Value| repr::to_str(value).map(|text| escaped(&text)));
}

/// `join(d="", attribute=None)`, printing items as Python does.
fn join(state: &State<'_, '_>, value: &Value, given: Given) -> Result<String, Error> {
    let args = Args::new("join", given.into_values(), 2)?;
    let separator = args.get(0, "d")?.as_ref().map(repr::to_str).transpose()?.unwrap_or_default();
    let attribute = args.maybe_text(1, "attribute")?;
    args.end()?;
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

/// `int(default=0, base=10)`: what is not a number is the default; a fraction is cut off.
fn int(value: &Value, given: Given) -> Result<Value, Error> {
    let args = Args::new("int", given.into_values(), 2)?;
    let default = args.get(0, "default")?.unwrap_or_else(|| Value::from(0));
    let base = args.maybe_int(1, "base")?.unwrap_or(10);
    args.end()?;
    if value.is_integer() {
        return Ok(value.clone());
    }
    let whole = value.as_str().and_then(|text| parse_int(text, base));
    // `as` would clamp what is out of range; no template has a use for such numbers.
    let cut = || number(value).filter(|number| number.abs() < 1e37).map(|number| number as i128);
    Ok(whole.or_else(cut).map_or(default, Value::from))
}

/// Python's `int(text, base)`: blanks around and underscores inside are allowed, and the prefix of the base.
fn parse_int(text: &str, base: i64) -> Option<i128> {
    let text = text.trim_matches(methods::is_space).replace('_', "").to_lowercase();
    let (sign, digits) = match text.strip_prefix('-') {
        Some(digits) => ("-", digits),
        None => ("", text.strip_prefix('+').unwrap_or(&text)),
    };
    let prefix = match base {
        2 => "0b",
        8 => "0o",
        16 => "0x",
        _ => "",
    };
    let digits = digits.strip_prefix(prefix).unwrap_or(digits);
    let base = u32::try_from(base).ok().filter(|base| (2..=36).contains(base))?;
    if digits.starts_with(['+', '-']) {
        None
    } else {
        i128::from_str_radix(&format!("{sign}{digits}"), base).ok()
    }
}

/// Python's `float(value)`.
fn number(value: &Value) -> Option<f64> {
    match value.as_str() {
        Some(text) => text.trim_matches(methods::is_space).replace('_', "").parse().ok(),
        None if value.is_number() => f64::try_from(value.clone()).ok(),
        None if value.kind() == ValueKind::Bool => Some(if value.is_true() { 1.0 } else { 0.0 }),
        None => None,
    }
}

/// `float(default=0.0)`: what is not a number is the default.
fn float(value: &Value, given: Given) -> Result<Value, Error> {
    let args = Args::new("float", given.into_values(), 1)?;
    let default = args.get(0, "default")?.unwrap_or_else(|| Value::from(0.0));
    args.end()?;
    Ok(number(value).map_or(default, Value::from))
}

/// `indent(width=4, first=False, blank=False)`; the width may be the indentation itself.
fn indent(state: &State<'_, '_>, value: &Value, given: Given) -> Result<String, Error> {
    let args = Args::new("indent", given.into_values(), 3)?;
    let width = args.get(0, "width")?.unwrap_or_else(|| Value::from(4));
    let (first, blank) = (args.maybe_bool(1, "first")?, args.maybe_bool(2, "blank")?);
    args.end()?;
    let indentation = match width.as_str() {
        Some(text) => text.to_owned(),
        None => " ".repeat(i64::try_from(width)?.clamp(0, 1024) as usize),
    };
    // With a line break more, so that a trailing one is not lost to `splitlines`.
    let text = repr::to_str(value)? + "\n";
    let lines = methods::lines(&text, false);
    state.consume_fuel((indentation.len() * lines.len()) as u64 / 64)?;
    let mut out = String::with_capacity(text.len());
    for (at, line) in lines.iter().enumerate() {
        let due = match at {
            0 => first == Some(true),
            _ => {
                out.push('\n');
                blank == Some(true) || !line.is_empty()
            }
        };
        if due {
            out.push_str(&indentation);
        }
        out.push_str(line);
    }
    Ok(out)
}

/// `center(width=80)`.
fn center(state: &State<'_, '_>, value: &Value, given: Given) -> Result<Value, Error> {
    let args = Args::new("center", given.into_values(), 1)?;
    let width = args.maybe_int(0, "width")?.unwrap_or(80);
    args.end()?;
    methods::justify(state, &repr::to_str(value)?, "center", width, " ")
}

/// `truncate(length=255, killwords=False, end="...", leeway=5)`.
fn truncate(value: &Value, given: Given) -> Result<String, Error> {
    let args = Args::new("truncate", given.into_values(), 4)?;
    let length = args.maybe_int(0, "length")?.unwrap_or(255).max(0) as usize;
    let kill = args.maybe_bool(1, "killwords")?.unwrap_or(false);
    let end = args.maybe_text(2, "end")?.unwrap_or_else(|| "...".into());
    let leeway = args.maybe_int(3, "leeway")?.unwrap_or(5).max(0) as usize;
    args.end()?;
    let text = repr::to_str(value)?;
    if text.chars().count() <= length + leeway {
        return Ok(text);
    }
    let Some(kept) = length.checked_sub(end.chars().count()) else {
        return Err(Error::new(ErrorKind::InvalidOperation, "truncate: the length is below that of the end"));
    };
    let kept: String = text.chars().take(kept).collect();
    let kept =
        if kill { kept.as_str() } else { kept.rsplit_once(' ').map_or(kept.as_str(), |(words, _)| words) };
    Ok(kept.to_owned() + &end)
}

/// Words are runs of letters, digits and underscores.
fn word_count(value: &Value) -> Result<usize, Error> {
    let text = repr::to_str(value)?;
    let words = text.split(|c: char| !(c.is_alphanumeric() || c == '_'));
    Ok(words.filter(|word| !word.is_empty()).count())
}

/// MarkupSafe's escaping for HTML; what is safe already stays as it is.
fn escape(value: &Value) -> Result<Value, Error> {
    if value.is_safe() { Ok(value.clone()) } else { repr::to_str(value).map(|text| escaped(&text)) }
}

fn escaped(text: &str) -> Value {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '\'' => out.push_str("&#39;"),
            '"' => out.push_str("&#34;"),
            c => out.push(c),
        }
    }
    Value::from_safe_string(out)
}
