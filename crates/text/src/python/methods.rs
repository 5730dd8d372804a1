//! Methods of Python's `str`, `list` and `tuple` that templates call and minijinja's own set lacks or does in
//! another way. What is not here falls through to that set (`minijinja_contrib::pycompat`); what is in neither is
//! an error, as it is in the sandbox of `transformers` for everything that would change its object.

use minijinja::value::{Tuple, Value, ValueKind};
use minijinja::{Error, ErrorKind, State};

use super::args::Args;

/// Calls `value.method(*values)`; an error of kind `UnknownMethod` where there is none.
pub(super) fn call(
    state: &mut State<'_, '_>,
    value: &Value,
    method: &str,
    values: &[Value],
) -> Result<Value, Error> {
    let own = match (value.kind(), value.as_str()) {
        (ValueKind::String, Some(text)) => string_method(state, text, method, values)?,
        (ValueKind::Seq | ValueKind::Iterable, _) => list_method(state, value, method, values)?,
        (ValueKind::Map, _) => dict_method(value, method, values)?,
        _ => None,
    };
    match own {
        Some(result) => Ok(result),
        None => minijinja_contrib::pycompat::unknown_method_callback(state, value, method, values),
    }
}

fn dict_method(dict: &Value, method: &str, values: &[Value]) -> Result<Option<Value>, Error> {
    Ok(match (method, values) {
        ("copy", []) => Some(dict.clone()),
        // A default that is given counts even where it is undefined.
        ("get", [key, default]) => match dict.get_item(key)? {
            value if value.is_undefined() => Some(default.clone()),
            value => Some(value),
        },
        _ => None,
    })
}

fn list_method(
    state: &State<'_, '_>,
    list: &Value,
    method: &str,
    values: &[Value],
) -> Result<Option<Value>, Error> {
    Ok(Some(match method {
        "copy" => list.clone(),
        "index" => {
            let what = Args::new("index", values, 1)?.need(0, "value")?;
            state.consume_fuel(list.len().unwrap_or(0) as u64)?;
            match list.try_iter()?.position(|item| item == what) {
                Some(at) => Value::from(at),
                None => return Err(invalid(format!("{what} is not in the list"))),
            }
        }
        _ => return Ok(None),
    }))
}

fn string_method(
    state: &State<'_, '_>,
    text: &str,
    method: &str,
    values: &[Value],
) -> Result<Option<Value>, Error> {
    Ok(Some(match method {
        // minijinja-contrib's own, which allocates whatever width it is told.
        "format" if has_long_number(text) => return Err(invalid("a width of more than four digits".into())),
        "strip" | "lstrip" | "rstrip" => {
            let chars = Args::new("strip", values, 1)?.maybe_text(0, "chars")?;
            let cut = |c: char| chars.as_ref().map_or_else(|| is_space(c), |set| set.contains(c));
            Value::from(match method {
                "lstrip" => text.trim_start_matches(cut),
                "rstrip" => text.trim_end_matches(cut),
                _ => text.trim_matches(cut),
            })
        }
        "removeprefix" => {
            let prefix = Args::new("removeprefix", values, 1)?.text(0, "prefix")?;
            Value::from(text.strip_prefix(prefix.as_str()).unwrap_or(text))
        }
        "removesuffix" => {
            let suffix = Args::new("removesuffix", values, 1)?.text(0, "suffix")?;
            Value::from(text.strip_suffix(suffix.as_str()).unwrap_or(text))
        }
        "split" | "rsplit" => {
            let args = Args::new("split", values, 2)?;
            let (separator, most) = (args.maybe_text(0, "sep")?, args.maybe_int(1, "maxsplit")?);
            args.end()?;
            let most = most.and_then(|n| usize::try_from(n).ok()).unwrap_or(usize::MAX);
            list(split(text, separator.as_deref(), most, method == "rsplit")?)
        }
        "splitlines" => {
            let args = Args::new("splitlines", values, 1)?;
            let keep = args.maybe_bool(0, "keepends")?.unwrap_or(false);
            args.end()?;
            list(lines(text, keep))
        }
        "partition" | "rpartition" => {
            let separator = Args::new("partition", values, 1)?.text(0, "sep")?;
            if separator.is_empty() {
                return Err(invalid("empty separator".into()));
            }
            let (head, middle, tail) = if method == "partition" {
                text.split_once(separator.as_str()).map_or((text, "", ""), |(a, b)| (a, &*separator, b))
            } else {
                text.rsplit_once(separator.as_str()).map_or(("", "", text), |(a, b)| (a, &*separator, b))
            };
            Value::from(Tuple::from([head.into(), middle.into(), tail.into()]))
        }
        "join" => {
            let items = Args::new("join", values, 1)?.need(0, "iterable")?;
            Value::from(join(state, text, &items)?)
        }
        "find" | "rfind" | "index" | "rindex" | "count" => {
            let args = Args::new("find", values, 3)?;
            let what = args.text(0, "sub")?;
            let (from, part) = part(text, args.maybe_int(1, "start")?, args.maybe_int(2, "end")?);
            if method == "count" {
                return Ok(Some(Value::from(part.matches(what.as_str()).count())));
            }
            let found = if method.starts_with('r') { part.rfind(&*what) } else { part.find(&*what) };
            match found {
                Some(at) => Value::from(from + part[..at].chars().count()),
                None if method.ends_with("find") => Value::from(-1),
                None => return Err(invalid("substring not found".into())),
            }
        }
        "title" => Value::from(title(text)),
        "capitalize" => {
            let mut chars = text.chars();
            let first = chars.next().map(|c| c.to_uppercase().to_string()).unwrap_or_default();
            Value::from(first + &chars.as_str().to_lowercase())
        }
        "swapcase" => Value::from(
            text.chars()
                .flat_map(|c| {
                    let swapped: Vec<char> = if c.is_uppercase() {
                        c.to_lowercase().collect()
                    } else {
                        c.to_uppercase().collect()
                    };
                    swapped
                })
                .collect::<String>(),
        ),
        "zfill" => {
            let width = Args::new("zfill", values, 1)?.need(0, "width")?;
            let (sign, digits) = match text.strip_prefix(['+', '-']) {
                Some(rest) => text.split_at(text.len() - rest.len()),
                None => ("", text),
            };
            let fill = padding(state, text, i64::try_from(width)?)?;
            Value::from(format!("{sign}{}{digits}", "0".repeat(fill)))
        }
        "ljust" | "rjust" | "center" => {
            let args = Args::new("ljust", values, 2)?;
            let (width, with) = (args.need(0, "width")?, args.maybe_text(1, "fillchar")?);
            let (width, with) = (i64::try_from(width)?, with.unwrap_or_else(|| " ".into()));
            if with.chars().count() != 1 {
                return Err(invalid("the fill character must be exactly one character long".into()));
            }
            justify(state, text, method, width, &with)?
        }
        _ => return Ok(None),
    }))
}

/// `str.ljust`, `str.rjust` and `str.center`.
pub(super) fn justify(
    state: &State<'_, '_>,
    text: &str,
    method: &str,
    width: i64,
    with: &str,
) -> Result<Value, Error> {
    let fill = padding(state, text, width)?;
    let left = match method {
        "ljust" => 0,
        "rjust" => fill,
        // CPython puts the odd blank to the left where the width is odd.
        _ => fill / 2 + (fill & width.max(0) as usize & 1),
    };
    Ok(Value::from(with.repeat(left) + text + &with.repeat(fill - left)))
}

fn invalid(reason: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, reason)
}

fn list(parts: Vec<&str>) -> Value {
    parts.into_iter().map(Value::from).collect()
}

/// True if five digits follow each other.
fn has_long_number(text: &str) -> bool {
    text.as_bytes().windows(5).any(|five| five.iter().all(u8::is_ascii_digit))
}

/// `str.isspace` of one character: Unicode's white space and the four separators of ASCII.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// `str.split` and `str.rsplit`.
fn split<'a>(text: &'a str, separator: Option<&str>, most: usize, back: bool) -> Result<Vec<&'a str>, Error> {
    let most = most.saturating_add(1);
    let mut parts: Vec<&str> = match separator {
        Some("") => return Err(invalid("empty separator".into())),
        Some(separator) if back => text.rsplitn(most, separator).collect(),
        Some(separator) => text.splitn(most, separator).collect(),
        None => split_at_space(text, most, back),
    };
    if back {
        parts.reverse();
    }
    Ok(parts)
}

/// At runs of white space, at most `most` parts; from the back the parts come last first.
fn split_at_space(text: &str, most: usize, back: bool) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut rest = if back { text.trim_end_matches(is_space) } else { text.trim_start_matches(is_space) };
    while !rest.is_empty() {
        let cut = if back { rest.rfind(is_space) } else { rest.find(is_space) };
        let Some(at) = cut.filter(|_| parts.len() + 1 < most) else {
            parts.push(rest);
            break;
        };
        if back {
            let part = &rest[at..];
            parts.push(part.trim_start_matches(is_space));
            rest = rest[..at].trim_end_matches(is_space);
        } else {
            parts.push(&rest[..at]);
            rest = rest[at..].trim_start_matches(is_space);
        }
    }
    parts
}

/// `str.splitlines`.
pub(super) fn lines(text: &str, keep: bool) -> Vec<&str> {
    let ends = |c: char| matches!(c, '\n'..='\r' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}');
    let mut lines = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let Some(at) = rest.find(ends) else {
            lines.push(rest);
            break;
        };
        let width = if rest[at..].starts_with("\r\n") {
            2
        } else {
            rest[at..].chars().next().map_or(1, char::len_utf8)
        };
        lines.push(&rest[..if keep { at + width } else { at }]);
        rest = &rest[at + width..];
    }
    lines
}

/// `str.join`: only strings may be joined.
fn join(state: &State<'_, '_>, between: &str, items: &Value) -> Result<String, Error> {
    let mut out = String::new();
    for (at, item) in items.try_iter()?.enumerate() {
        if at > 0 {
            out.push_str(between);
        }
        let Some(text) = item.as_str() else {
            return Err(invalid(format!("join: item {at} must be a string, not {}", item.kind())));
        };
        out.push_str(text);
        state.consume_fuel(1 + (between.len() + text.len()) as u64 / 64)?;
    }
    Ok(out)
}

/// The part of a text between two positions counted in characters, and the first of them.
fn part(text: &str, start: Option<i64>, end: Option<i64>) -> (usize, &str) {
    if start.is_none() && end.is_none() {
        return (0, text);
    }
    let length = text.chars().count();
    let place = |at: i64| {
        let at = if at < 0 { at.saturating_add(length as i64).max(0) } else { at };
        usize::try_from(at).unwrap_or(usize::MAX).min(length)
    };
    let (start, end) = (start.map_or(0, place), end.map_or(length, place));
    let byte = |at: usize| text.char_indices().nth(at).map_or(text.len(), |(byte, _)| byte);
    (start, &text[byte(start)..byte(end.max(start))])
}

/// `str.title`: a letter after anything but a letter is a capital.
fn title(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut inside = false;
    for c in text.chars() {
        if inside {
            out.extend(c.to_lowercase());
        } else {
            out.extend(c.to_uppercase());
        }
        inside = c.is_alphabetic();
    }
    out
}

/// How many characters a text lacks to `width`; they are paid for before they are made.
fn padding(state: &State<'_, '_>, text: &str, width: i64) -> Result<usize, Error> {
    let width = usize::try_from(width).unwrap_or(0);
    let fill = width.saturating_sub(text.chars().count());
    state.consume_fuel(fill as u64 / 64)?;
    Ok(fill)
}
