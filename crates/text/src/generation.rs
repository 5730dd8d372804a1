//! `{% generation %}` blocks.
//!
//! `transformers` adds this tag to Jinja2 to learn which part of a rendered conversation the assistant wrote; what
//! is in the block is rendered as if the tag were not there, in a scope of its own. minijinja takes no new tags, so
//! here alone a template's source is rewritten: the tag's name becomes `with`, a block with a scope and nothing else.

use std::borrow::Cow;

/// Replaces the names of the tags `generation` and `endgeneration`; all else stays as it is, so that line numbers
/// and white space do.
pub(crate) fn without_generation_tags(source: &str) -> Cow<'_, str> {
    if !source.contains("endgeneration") {
        return Cow::Borrowed(source);
    }
    let mut out = String::with_capacity(source.len());
    let mut copied = 0;
    let mut at = 0;
    while let Some(opening) = source[at..].find('{').map(|found| at + found) {
        let body = opening + 2;
        at = match source.as_bytes().get(opening + 1) {
            Some(b'#') => source[body..].find("#}").map_or(source.len(), |end| body + end + 2),
            Some(b'{') => end_of_tag(source, body, "}}"),
            Some(b'%') => {
                let (start, name) = tag_name(source, body);
                let with = match name {
                    "generation" => Some("with"),
                    "endgeneration" => Some("endwith"),
                    _ => None,
                };
                if let Some(with) = with {
                    out.push_str(&source[copied..start]);
                    out.push_str(with);
                    copied = start + name.len();
                }
                let end = end_of_tag(source, body, "%}");
                if name == "raw" { end_of_raw(source, end) } else { end }
            }
            _ => opening + 1,
        };
    }
    out.push_str(&source[copied..]);
    Cow::Owned(out)
}

/// The name of a tag whose text begins at `body`, and where it stands.
fn tag_name(source: &str, body: usize) -> (usize, &str) {
    let text = &source[body..];
    let marked = text.strip_prefix(['-', '+']).unwrap_or(text);
    let name = marked.trim_start();
    let length = name.find(|c: char| !(c.is_alphanumeric() || c == '_')).unwrap_or(name.len());
    (source.len() - name.len(), &name[..length])
}

/// The place after the end mark of a tag; marks inside string literals do not count.
fn end_of_tag(source: &str, body: usize, mark: &str) -> usize {
    let bytes = source.as_bytes();
    let mut quote = None;
    let mut at = body;
    while at < bytes.len() {
        match (quote, bytes[at]) {
            (Some(_), b'\\') => at += 1,
            (Some(open), byte) if byte == open => quote = None,
            (None, byte @ (b'"' | b'\'')) => quote = Some(byte),
            (None, _) if bytes[at..].starts_with(mark.as_bytes()) => return at + mark.len(),
            _ => {}
        }
        at += 1;
    }
    source.len()
}

/// The place of the `{% endraw %}` that ends a raw block.
fn end_of_raw(source: &str, body: usize) -> usize {
    let mut at = body;
    while let Some(opening) = source[at..].find("{%").map(|found| at + found) {
        if tag_name(source, opening + 2).1 == "endraw" {
            return opening;
        }
        at = opening + 2;
    }
    source.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_tags_change() {
        for (source, rewritten) in [
            ("{%- generation -%}a{% endgeneration %}", "{%- with -%}a{% endwith %}"),
            ("{%generation%}é{%+endgeneration%}", "{%with%}é{%+endwith%}"),
            (
                "{# {% generation %} #}{{ '{% endgeneration %}' }}generation",
                "{# {% generation %} #}{{ '{% endgeneration %}' }}generation",
            ),
            (
                "{% raw %}{% generation %}{% endraw %}{% endgeneration %}",
                "{% raw %}{% generation %}{% endraw %}{% endwith %}",
            ),
            ("{% set x = '\\'%}' %}{ {% endgeneration", "{% set x = '\\'%}' %}{ {% endwith"),
            ("{{ add_generation_prompt }}", "{{ add_generation_prompt }}"),
            ("{{ x {% endgeneration %}", "{{ x {% endgeneration %}"),
            ("endgeneration {", "endgeneration {"),
        ] {
            assert_eq!(without_generation_tags(source), rewritten);
        }
    }
}
