//! Markdown for a terminal, line by line.
//!
//! ```text
//! a line ──► quotes, indentation, list marker ──► fence? table? heading? rule? ──► inline marks ──► rows
//!            (the margin)                         (kept from line to line)        (pulldown-cmark)
//! ```
//!
//! Models write a paragraph as one line, so a line is rendered as soon as it is whole, and nothing that was
//! rendered ever changes; only a table is held until it is over, for its columns. A list's own indentation is its
//! nesting.

mod inline;
mod table;

use super::cells::{Break, Colour, Margin, Row, Span, Style, expand_tabs, width, wrap};
use inline::inline;
use table::Table;

/// Before a line of code.
const GUTTER: &str = "│ ";
/// A table is shown while it grows, up to so many lines.
const MOST_SHOWN: usize = 40;

/// What one line leaves for the next.
#[derive(Clone, Debug, Default)]
pub struct Markdown {
    fence: Option<Fence>,
    /// Lines of what is, or may become, a table; their margin.
    table: Vec<String>,
    table_margin: Margin,
    in_list: bool,
    /// A blank line is to be shown before what follows.
    blank: bool,
    /// The last line was code by its indentation.
    after_code: bool,
    /// Something was rendered.
    begun: bool,
}

/// A fence that is open.
#[derive(Clone, Debug)]
struct Fence {
    mark: char,
    length: usize,
    quotes: usize,
    /// Columns that its lines are indented by.
    indent: usize,
    margin: Margin,
}

/// A line without what is to the left of its content.
struct Peeled<'a> {
    margin: Margin,
    content: &'a str,
    quotes: usize,
    /// Columns before the content, after the last quote.
    indent: usize,
    is_item: bool,
}

impl Markdown {
    /// Renders a line, its end excluded, in so many columns.
    pub fn line(&mut self, line: &str, columns: usize, rows: &mut Vec<Row>) {
        let line = expand_tabs(line.trim_end_matches('\r'));
        if let Some(fence) = self.fence.take()
            && let Some(code) = fence.inside(&line)
        {
            if fence.is_closed_by(code) {
                rows.push(edge(&fence.margin, "╰─"));
            } else {
                rows.extend(code_rows(code, &fence.margin, columns));
                self.fence = Some(fence);
            }
            return;
        }
        if self.in_table(&line, columns, rows) {
            return;
        }
        self.block(&line, columns, rows);
    }

    /// Renders what is held at the end of the text.
    pub fn finish(&mut self, columns: usize, rows: &mut Vec<Row>) {
        self.end_table(columns, rows);
    }

    /// What would be rendered if the text ended after this beginning of a line.
    pub fn preview(&self, line: &str, columns: usize) -> Vec<Row> {
        let mut rows = Vec::new();
        if self.table.len() > MOST_SHOWN {
            let lines = self.table.iter().rev().take(MOST_SHOWN).rev().map(String::as_str);
            for line in lines.chain([line]) {
                rows.extend(wrap(
                    &[Span::new(line, Style::DIM)],
                    &self.table_margin,
                    columns,
                    Break::Anywhere,
                ));
            }
            return rows;
        }
        let mut state = self.clone();
        if !line.is_empty() {
            state.line(line, columns, &mut rows);
        }
        state.finish(columns, &mut rows);
        rows
    }

    fn block(&mut self, line: &str, columns: usize, rows: &mut Vec<Row>) {
        if line.trim().is_empty() {
            (self.blank, self.after_code) = (self.begun, false);
            return;
        }
        let may_be_code = (self.blank || self.after_code || !self.begun) && !self.in_list;
        self.begun = true;
        if std::mem::take(&mut self.blank) {
            rows.push(Row::new());
        }
        if let (true, Some(code)) = (may_be_code, line.strip_prefix("    ")) {
            self.after_code = true;
            rows.extend(code_rows(code, &Margin::default(), columns));
            return;
        }
        self.after_code = false;
        let peeled = peel(line, columns);
        self.in_list = peeled.is_item || (self.in_list && peeled.indent > 0);
        let Peeled { margin, content, quotes, indent, .. } = peeled;
        if let Some((mark, length, info)) = fence_opening(content) {
            let label = info.split_whitespace().next().unwrap_or_default();
            rows.push(edge(&margin, format!("╭─ {label}").trim_end()));
            let margin = margin.after_first();
            self.fence = Some(Fence { mark, length, quotes, indent, margin });
        } else if let Some(stroke) = rule(content) {
            let room = columns.saturating_sub(width(&margin.first)).min(40);
            let mut row = margin.first;
            row.push(Span::new(&stroke.repeat(room), Style::DIM));
            rows.push(row);
        } else if let Some((level, text)) = heading(content) {
            let style = Style {
                bold: true,
                underline: level == 1,
                italic: level > 3,
                colour: Some(Colour::Magenta),
                ..Style::PLAIN
            };
            rows.extend(wrap(&inline(text, style), &margin, columns, Break::Words));
        } else if content.contains('|') {
            self.table_margin = margin;
            self.table.push(content.to_owned());
        } else {
            rows.extend(wrap(&inline(content, Style::PLAIN), &margin, columns, Break::Words));
        }
    }

    /// Whether this line goes on with the table that is held. If not, what was held is rendered.
    fn in_table(&mut self, line: &str, columns: usize, rows: &mut Vec<Row>) -> bool {
        let Some(header) = self.table.first() else { return false };
        let Peeled { content, is_item, .. } = peel(line, columns);
        let goes_on = match self.table.len() {
            1 => table::is_delimiter(content, header),
            _ => content.contains('|'),
        };
        if goes_on && !is_item {
            self.table.push(content.to_owned());
            return true;
        }
        self.end_table(columns, rows);
        false
    }

    fn end_table(&mut self, columns: usize, rows: &mut Vec<Row>) {
        let lines = std::mem::take(&mut self.table);
        let margin = std::mem::take(&mut self.table_margin);
        match &lines[..] {
            [] => {}
            // It was a line with a bar in it.
            [line] => rows.extend(wrap(&inline(line, Style::PLAIN), &margin, columns, Break::Words)),
            [header, delimiter, body @ ..] => {
                let table = Table::read(header, delimiter, body);
                rows.extend(table.rows(&margin, columns));
            }
        }
    }
}

impl Fence {
    /// The line as the fence has it; `None` if a quote that it stands in is over.
    fn inside<'a>(&self, line: &'a str) -> Option<&'a str> {
        let mut rest = line;
        for _ in 0..self.quotes {
            rest = rest.trim_start().strip_prefix('>')?;
            rest = rest.strip_prefix(' ').unwrap_or(rest);
        }
        let blanks = rest.len() - rest.trim_start_matches(' ').len();
        Some(&rest[blanks.min(self.indent)..])
    }

    fn is_closed_by(&self, code: &str) -> bool {
        let code = code.trim();
        code.len() >= self.length && code.chars().all(|c| c == self.mark)
    }
}

/// A line of code with its gutter.
fn code_rows(code: &str, margin: &Margin, columns: usize) -> Vec<Row> {
    let mut margin = margin.clone();
    margin.push(GUTTER, GUTTER, Style::DIM);
    let style = Style { colour: Some(Colour::Cyan), ..Style::PLAIN };
    wrap(&[Span::new(code, style)], &margin, columns, Break::Anywhere)
}

/// The upper or lower end of a gutter.
fn edge(margin: &Margin, text: &str) -> Row {
    let mut row = margin.first.clone();
    row.push(Span::new(text, Style::DIM));
    row
}

/// Takes quotes, indentation and list markers off a line. The margin takes half the columns at most.
fn peel(line: &str, columns: usize) -> Peeled<'_> {
    let mut peeled =
        Peeled { margin: Margin::default(), content: line, quotes: 0, indent: 0, is_item: false };
    loop {
        let content = peeled.content.trim_start_matches(' ');
        let blanks = peeled.content.len() - content.len();
        if width(&peeled.margin.rest) + blanks + 4 <= columns / 2 {
            let blank = " ".repeat(blanks);
            peeled.margin.push(&blank, &blank, Style::PLAIN);
        }
        peeled.indent += blanks;
        peeled.content = content;
        if let Some(rest) = content.strip_prefix('>') {
            peeled.margin.push("▌ ", "▌ ", Style::DIM);
            peeled.content = rest.strip_prefix(' ').unwrap_or(rest);
            peeled.quotes += 1;
            peeled.indent = 0;
        } else if let (Some((marker, rest)), None) = (list_marker(content), rule(content)) {
            peeled.is_item = true;
            peeled.indent += content.len() - rest.len();
            let (sign, rest) = match marker {
                "-" | "*" | "+" => task(rest),
                number => (format!("{number} "), rest),
            };
            let style = Style { colour: Some(Colour::Magenta), ..Style::PLAIN };
            peeled.margin.push(&sign, &" ".repeat(Span::new(&sign, style).width()), style);
            peeled.content = rest;
        } else {
            return peeled;
        }
        if width(&peeled.margin.rest) + 4 > columns / 2 {
            return peeled;
        }
    }
}

/// `-`, `*`, `+`, `1.` or `1)` and what follows the blank after it.
fn list_marker(content: &str) -> Option<(&str, &str)> {
    let digits = content.len() - content.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let end = match digits {
        0 => content.starts_with(['-', '*', '+']).then_some(1)?,
        1..=9 => content[digits..].starts_with(['.', ')']).then_some(digits + 1)?,
        _ => return None,
    };
    let (marker, rest) = content.split_at(end);
    let rest = rest.strip_prefix(' ')?;
    Some((marker, rest))
}

/// The sign of an item, which may have a box.
fn task(rest: &str) -> (String, &str) {
    let boxes = [("[ ] ", "☐ "), ("[x] ", "☑ "), ("[X] ", "☑ ")];
    let found = boxes.into_iter().find_map(|(text, sign)| Some((sign.to_owned(), rest.strip_prefix(text)?)));
    found.unwrap_or_else(|| ("• ".to_owned(), rest))
}

fn heading(content: &str) -> Option<(usize, &str)> {
    let rest = content.trim_start_matches('#');
    let level = content.len() - rest.len();
    if !(1..=6).contains(&level) || !(rest.is_empty() || rest.starts_with(' ')) {
        return None;
    }
    let text = rest.trim();
    let closed = text.trim_end_matches('#');
    Some((level, if closed.is_empty() || closed.ends_with(' ') { closed.trim_end() } else { text }))
}

/// The stroke of a horizontal rule; a line of `=` is one too, for the heading above it is past.
fn rule(content: &str) -> Option<&'static str> {
    let mark = content.chars().next().filter(|c| "-*_=".contains(*c))?;
    let count = content.chars().filter(|c| *c == mark).count();
    let is_rule = count >= 3 && content.chars().all(|c| c == mark || c == ' ');
    is_rule.then_some(if mark == '=' { "═" } else { "─" })
}

/// The mark of an opening fence, how many there are, and what is said of the code.
fn fence_opening(content: &str) -> Option<(char, usize, &str)> {
    let mark = content.chars().next().filter(|c| "`~".contains(*c))?;
    let info = content.trim_start_matches(mark);
    let length = content.len() - info.len();
    // Backticks further on make it code in a line.
    let is_fence = length >= 3 && !(mark == '`' && info.contains('`'));
    is_fence.then_some((mark, length, info))
}

#[cfg(test)]
mod tests;
