//! `strftime_now`: `datetime.now().strftime(format)`.

use std::fmt::Write;

use jiff::civil::DateTime;
use jiff::fmt::strtime::BrokenDownTime;

/// Formats a time without a zone as Python does on Linux: zone directives print nothing, `%f` prints six digits,
/// what is no directive is printed as it stands. Names are those of the C locale.
pub(super) fn strftime(now: DateTime, format: &str) -> String {
    let time = BrokenDownTime::from(now);
    let mut out = String::new();
    let mut rest = format;
    while let Some(at) = rest.find('%') {
        out.push_str(&rest[..at]);
        let directive = directive(&rest[at..]);
        rest = &rest[at + directive.len()..];
        match directive {
            "%f" => {
                let _ = write!(out, "{:06}", now.subsec_nanosecond() / 1000);
            }
            "%z" | "%Z" => {}
            "%c" => out.push_str(&strftime(now, "%a %b %e %H:%M:%S %Y")),
            "%x" => out.push_str(&strftime(now, "%m/%d/%y")),
            "%X" => out.push_str(&strftime(now, "%H:%M:%S")),
            _ => match time.to_string(directive) {
                Ok(text) => out.push_str(&text),
                Err(_) => out.push_str(directive),
            },
        }
    }
    out.push_str(rest);
    out
}

/// The directive at the start of a text: a percent sign, the C library's flags and a letter.
fn directive(text: &str) -> &str {
    let flags = text[1..].find(|c| !matches!(c, '-' | '_' | '^' | '#' | '0')).map_or(text.len(), |at| at + 1);
    let end = text[flags..].chars().next().map_or(flags, |letter| flags + letter.len_utf8());
    &text[..end]
}

/// The time of day on this machine's clock, in its own zone.
pub(super) fn local_time() -> DateTime {
    jiff::ZonedDateTime::now().datetime()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_as_python_does() {
        let now = jiff::civil::date(2026, 1, 2).at(3, 4, 5, 678_901_000);
        for (format, text) in [
            ("%Y-%m-%d", "2026-01-02"),
            ("%d %b %Y", "02 Jan 2026"),
            ("%A, %B %-d, %Y", "Friday, January 2, 2026"),
            ("%H:%M:%S.%f%z|%Z|", "03:04:05.678901||"),
            ("%I:%M %p %j %y %%", "03:04 AM 002 26 %"),
            ("%c", "Fri Jan  2 03:04:05 2026"),
            ("%x %X", "01/02/26 03:04:05"),
            ("100% %", "100% %"),
            ("%é", "%é"),
        ] {
            assert_eq!(strftime(now, format), text, "{format}");
        }
    }
}
