//! How Python prints a value: `str(x)` and `repr(x)`.

use std::fmt::Write;

use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind};

/// Containers nested deeper than this end the rendering with an error: a template can build a list that holds
/// itself by way of a namespace, and Python's own limit (1000 frames) ends there in an error too.
pub(super) const MAX_DEPTH: usize = 200;

/// Appends `str(value)`.
pub(super) fn write_str(out: &mut impl Write, value: &Value) -> Result<(), Error> {
    match value.kind() {
        ValueKind::Undefined => Ok(()),
        ValueKind::String => match value.as_str() {
            Some(text) => out.write_str(text).map_err(Error::from),
            None => Ok(()),
        },
        _ => write_repr(out, value, 0),
    }
}

/// Returns `str(value)`.
pub(super) fn to_str(value: &Value) -> Result<String, Error> {
    let mut out = String::new();
    write_str(&mut out, value)?;
    Ok(out)
}

/// Returns `repr(value)`.
pub(super) fn to_repr(value: &Value) -> Result<String, Error> {
    let mut out = String::new();
    write_repr(&mut out, value, 0)?;
    Ok(out)
}

/// Appends `repr(value)`.
fn write_repr(out: &mut impl Write, value: &Value, depth: usize) -> Result<(), Error> {
    if depth > MAX_DEPTH {
        return Err(too_deep());
    }
    match value.kind() {
        ValueKind::Undefined => out.write_str("Undefined")?,
        ValueKind::Number if !value.is_integer() => match f64::try_from(value.clone()) {
            Ok(number) => out.write_str(&float(number))?,
            Err(_) => write!(out, "{value}")?,
        },
        ValueKind::String => write_quoted(out, value.as_str().unwrap_or_default())?,
        ValueKind::Map => {
            out.write_char('{')?;
            for (at, key) in value.try_iter()?.enumerate() {
                if at > 0 {
                    out.write_str(", ")?;
                }
                write_repr(out, &key, depth + 1)?;
                out.write_str(": ")?;
                write_repr(out, &value.get_item(&key)?, depth + 1)?;
            }
            out.write_char('}')?;
        }
        // A slice of a list is lazy here and of another kind, but a list to Python.
        ValueKind::Seq | ValueKind::Iterable => {
            let tuple = value.is_tuple();
            out.write_char(if tuple { '(' } else { '[' })?;
            for (at, item) in value.try_iter()?.enumerate() {
                if at > 0 {
                    out.write_str(", ")?;
                }
                write_repr(out, &item, depth + 1)?;
            }
            out.write_str(match (tuple, value.len()) {
                (true, Some(1)) => ",)",
                (true, _) => ")",
                (false, _) => "]",
            })?;
        }
        _ => write!(out, "{value}")?,
    }
    Ok(())
}

/// The error of a value that nests too deep.
pub(super) fn too_deep() -> Error {
    Error::new(ErrorKind::InvalidOperation, format!("a value is nested more than {MAX_DEPTH} deep"))
}

/// `repr` of a float: the shortest digits that read back the same, with an exponent below 1e-4 and from 1e16.
pub(super) fn float(number: f64) -> String {
    if number.is_nan() {
        return "nan".into();
    }
    if number.is_infinite() {
        return if number > 0.0 { "inf" } else { "-inf" }.into();
    }
    let size = number.abs();
    if size != 0.0 && !(1e-4..1e16).contains(&size) {
        let shortest = format!("{number:e}");
        // Rust writes 1e16 and 1e-7; Python writes a sign and at least two digits.
        if let Some((digits, exponent)) = shortest.split_once('e') {
            let (sign, exponent) = match exponent.strip_prefix('-') {
                Some(rest) => ('-', rest),
                None => ('+', exponent),
            };
            return format!("{digits}e{sign}{exponent:0>2}");
        }
        return shortest;
    }
    let mut plain = number.to_string();
    if !plain.contains('.') {
        plain.push_str(".0");
    }
    plain
}

/// `repr` of a string: single quotes unless it holds one and no double quote; unprintable characters escaped.
fn write_quoted(out: &mut impl Write, text: &str) -> std::fmt::Result {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.write_char(quote)?;
    for c in text.chars() {
        match c {
            '\\' => out.write_str("\\\\")?,
            '\n' => out.write_str("\\n")?,
            '\r' => out.write_str("\\r")?,
            '\t' => out.write_str("\\t")?,
            c if c == quote => write!(out, "\\{c}")?,
            c if is_printable(c) => out.write_char(c)?,
            c => match u32::from(c) {
                code @ 0..=0xff => write!(out, "\\x{code:02x}")?,
                code @ 0x100..=0xffff => write!(out, "\\u{code:04x}")?,
                code => write!(out, "\\U{code:08x}")?,
            },
        }
    }
    out.write_char(quote)
}

/// `str.isprintable` of one character. The standard library's escaping of a string follows the same table
/// (categories Cc, Cf, Cs, Co, Cn, Zl, Zp, Zs but for the space); after the first character of a string it does
/// not escape combining marks for their own sake, hence the letter in front.
fn is_printable(c: char) -> bool {
    if c.is_ascii() {
        return !c.is_ascii_control();
    }
    let mut pair = [0; 5];
    pair[0] = b'a';
    let end = 1 + c.encode_utf8(&mut pair[1..]).len();
    match std::str::from_utf8(&pair[..end]) {
        Ok(text) => text.escape_debug().nth(1) == Some(c),
        Err(_) => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_print_as_in_python() {
        for (number, text) in [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (1.0, "1.0"),
            (0.1, "0.1"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (1.5e-7, "1.5e-07"),
            (123456789012345.0, "123456789012345.0"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.25e100, "1.25e+100"),
            (-1e22, "-1e+22"),
            (f64::MIN_POSITIVE, "2.2250738585072014e-308"),
            (f64::NAN, "nan"),
            (f64::NEG_INFINITY, "-inf"),
        ] {
            assert_eq!(float(number), text);
        }
    }

    #[test]
    fn strings_are_quoted_as_in_python() {
        for (text, repr) in [
            ("", "''"),
            ("a'b", "\"a'b\""),
            ("a'b\"c", "'a\\'b\"c'"),
            ("\u{0}\u{7f}\u{a0}", "'\\x00\\x7f\\xa0'"),
            ("\u{ad}\u{200b}\u{2028}\u{e000}", "'\\xad\\u200b\\u2028\\ue000'"),
            ("e\u{301} \u{1f600} 漢 \u{f0000}", "'e\u{301} \u{1f600} 漢 \\U000f0000'"),
            ("\\\n\r\t", "'\\\\\\n\\r\\t'"),
        ] {
            let mut out = String::new();
            write_quoted(&mut out, text).expect("writing to a string does not fail");
            assert_eq!(out, repr);
        }
    }
}
