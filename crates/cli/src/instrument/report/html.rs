//! Writing HTML and SVG that is well-formed by construction: elements close by themselves, text and attributes are
//! escaped.

/// An attribute's name and value.
pub type Attribute<'a> = (&'static str, &'a str);

/// What is written so far.
#[derive(Debug, Default)]
pub struct Html {
    out: String,
}

impl Html {
    /// An element around what `inner` writes.
    pub fn within(&mut self, tag: &'static str, attributes: &[Attribute<'_>], inner: impl FnOnce(&mut Self)) {
        self.open(tag, attributes, ">");
        inner(self);
        self.out.push_str("</");
        self.out.push_str(tag);
        self.out.push('>');
    }

    /// An element around text.
    pub fn leaf(&mut self, tag: &'static str, attributes: &[Attribute<'_>], text: &str) {
        self.within(tag, attributes, |html| html.text(text));
    }

    /// An element without content: a void one of HTML, or any of SVG.
    pub fn void(&mut self, tag: &'static str, attributes: &[Attribute<'_>]) {
        self.open(tag, attributes, "/>");
    }

    /// Text.
    pub fn text(&mut self, text: &str) {
        escape(text, &mut self.out);
    }

    /// The content of a `style` or `script` element, of our own making.
    pub fn raw(&mut self, text: &'static str) {
        self.out.push_str(text);
    }

    /// The whole page.
    pub fn finish(self) -> String {
        format!("<!doctype html>\n{}\n", self.out)
    }

    fn open(&mut self, tag: &'static str, attributes: &[Attribute<'_>], end: &str) {
        self.out.push('<');
        self.out.push_str(tag);
        for (name, value) in attributes {
            self.out.push(' ');
            self.out.push_str(name);
            self.out.push_str("=\"");
            escape(value, &mut self.out);
            self.out.push('"');
        }
        self.out.push_str(end);
    }
}

fn escape(text: &str, out: &mut String) {
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            // Not allowed in a document, whatever it stands for.
            c if c.is_control() && !c.is_whitespace() => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// The names of a page's elements in order; panics if they do not nest or a character is not escaped.
    pub fn elements(page: &str) -> Vec<String> {
        let mut open: Vec<String> = Vec::new();
        let mut found = Vec::new();
        let mut rest = page.strip_prefix("<!doctype html>").unwrap();
        while let Some(at) = rest.find('<') {
            rest = &rest[at + 1..];
            let end = rest.find('>').unwrap();
            let tag = &rest[..end];
            assert!(!tag.contains('<'), "<{tag}>");
            assert!(tag.matches('"').count().is_multiple_of(2), "<{tag}>");
            rest = &rest[end + 1..];
            if let Some(name) = tag.strip_prefix('/') {
                assert_eq!(open.pop().as_deref(), Some(name));
                continue;
            }
            let name: String = tag.chars().take_while(char::is_ascii_alphanumeric).collect();
            assert!(!name.is_empty(), "<{tag}>");
            if !tag.ends_with('/') {
                if name == "style" || name == "script" {
                    // Text of another language, up to its end.
                    rest = &rest[rest.find(&format!("</{name}")).unwrap()..];
                }
                open.push(name.clone());
            }
            found.push(name);
        }
        assert!(open.is_empty(), "{open:?}");
        found
    }

    #[test]
    fn hostile_text_stays_text() {
        let mut html = Html::default();
        let hostile = "</p><script>alert(\"1\")</script>&'\u{1b}[0m";
        html.within("div", &[("title", hostile)], |html| {
            html.leaf("p", &[], hostile);
            html.void("br", &[]);
        });
        let page = html.finish();
        assert_eq!(elements(&page), ["div", "p", "br"]);
        assert!(!page.contains('\u{1b}') && page.contains("&lt;script&gt;"));
    }

    #[test]
    #[should_panic(expected = "left == right")]
    fn what_does_not_nest_is_noticed() {
        elements("<!doctype html><p><b></p></b>");
    }
}
