//! Marks inside a line: emphasis, code, links.

use pulldown_cmark::{Event, LinkType, Options, Parser, Tag, TagEnd};

use crate::chat::cells::{Colour, Span, Style};

/// Stands at the end of what is parsed, so that nothing before it is taken for a heading's end.
const END: char = '\u{2060}';

/// The spans of a line's text.
pub fn inline(text: &str, base: Style) -> Vec<Span> {
    // A heading holds marks and nothing else: no text in it is taken for a block.
    let source = format!("# {text} {END}");
    let options = Options::ENABLE_STRIKETHROUGH | Options::ENABLE_MATH;
    let mut inline = Inline { base, spans: Vec::new(), depth: Depth::default(), links: Vec::new() };
    Parser::new_ext(&source, options).for_each(|event| inline.take(event));
    let mut spans = inline.spans;
    trim_end(&mut spans);
    spans
}

/// How deep in which marks.
#[derive(Default)]
struct Depth {
    strong: usize,
    emphasis: usize,
    strike: usize,
    link: usize,
}

struct Inline {
    base: Style,
    spans: Vec<Span>,
    depth: Depth,
    /// Where each open link leads, and the span that it begins with.
    links: Vec<(String, usize)>,
}

impl Inline {
    fn style(&self) -> Style {
        let Self { base, depth, .. } = self;
        Style {
            bold: base.bold || depth.strong > 0,
            italic: base.italic || depth.emphasis > 0,
            strike: base.strike || depth.strike > 0,
            underline: base.underline || depth.link > 0,
            colour: if depth.link > 0 { Some(Colour::Blue) } else { base.colour },
            ..*base
        }
    }

    fn push(&mut self, text: &str, style: Style) {
        self.spans.push(Span::new(text, style));
    }

    fn take(&mut self, event: Event<'_>) {
        let style = self.style();
        match event {
            Event::Start(Tag::Strong) => self.depth.strong += 1,
            Event::End(TagEnd::Strong) => self.depth.strong -= 1,
            Event::Start(Tag::Emphasis) => self.depth.emphasis += 1,
            Event::End(TagEnd::Emphasis) => self.depth.emphasis -= 1,
            Event::Start(Tag::Strikethrough) => self.depth.strike += 1,
            Event::End(TagEnd::Strikethrough) => self.depth.strike -= 1,
            Event::Start(Tag::Link { dest_url, link_type, .. }) => {
                let url = if link_type == LinkType::Email { String::new() } else { dest_url.into_string() };
                self.links.push((url, self.spans.len()));
                self.depth.link += 1;
            }
            Event::Start(Tag::Image { dest_url, .. }) => {
                self.links.push((dest_url.into_string(), self.spans.len()));
                self.depth.link += 1;
            }
            Event::End(TagEnd::Link | TagEnd::Image) => {
                self.depth.link -= 1;
                let Some((url, begin)) = self.links.pop() else { return };
                let text: String = self.spans[begin..].iter().map(Span::text).collect();
                // Where a link leads is seen, whatever its text says.
                if !url.is_empty() && text != url {
                    self.push(&format!(" ({url})"), Style { dim: true, ..self.base });
                }
            }
            Event::Code(code) => self.push(&code, Style { colour: Some(Colour::Cyan), ..style }),
            Event::InlineMath(math) => self.push(&format!("${math}$"), Style { italic: true, ..style }),
            Event::DisplayMath(math) => self.push(&format!("$${math}$$"), Style { italic: true, ..style }),
            Event::InlineHtml(tag) | Event::Html(tag) if is_line_break(&tag) => self.push(" ", style),
            Event::Text(text) | Event::InlineHtml(text) | Event::Html(text) => self.push(&text, style),
            Event::SoftBreak | Event::HardBreak => self.push(" ", style),
            _ => {}
        }
    }
}

fn is_line_break(tag: &str) -> bool {
    let name = tag.trim_matches(|c: char| matches!(c, '<' | '>' | '/') || c.is_whitespace());
    name.eq_ignore_ascii_case("br")
}

/// Takes the end that was put there, and blanks before it.
fn trim_end(spans: &mut Vec<Span>) {
    while let Some(last) = spans.pop() {
        let kept = last.text().trim_end_matches([END, ' ']);
        if !kept.is_empty() {
            let last = if kept.len() == last.text().len() { last } else { last.with_text(kept) };
            spans.push(last);
            return;
        }
    }
}
