//! Styled text in terminal columns: spans, rows, and how text is broken into them.
//!
//! A [`Span`] holds no character that a terminal would obey: whatever a model or a server says passes through
//! [`clean`] on its way in, and escape sequences are written by [`encode`] alone.

use unicode_segmentation::UnicodeSegmentation;
use unicode_width::UnicodeWidthStr;

/// Columns between the stops of a tab.
const TAB: usize = 4;

/// How text looks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Style {
    /// Heavier.
    pub bold: bool,
    /// Fainter.
    pub dim: bool,
    /// Slanted.
    pub italic: bool,
    /// Underlined.
    pub underline: bool,
    /// Struck through.
    pub strike: bool,
    /// Coloured.
    pub colour: Option<Colour>,
}

impl Style {
    /// Fainter than the rest.
    pub const DIM: Self = Self { dim: true, ..Self::PLAIN };
    /// As the terminal has it.
    pub const PLAIN: Self =
        Self { bold: false, dim: false, italic: false, underline: false, strike: false, colour: None };

    /// The codes that select it after a reset.
    fn codes(self, colours: bool) -> String {
        let flags = [
            (self.bold, "1"),
            (self.dim, "2"),
            (self.italic, "3"),
            (self.underline, "4"),
            (self.strike, "9"),
        ];
        let colour = self.colour.filter(|_| colours).map(Colour::code);
        let codes = flags.into_iter().filter_map(|(is_set, code)| is_set.then_some(code)).chain(colour);
        codes.collect::<Vec<_>>().join(";")
    }
}

/// A colour of the terminal's own palette.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Colour {
    /// Of headings.
    Magenta,
    /// Of code.
    Cyan,
    /// Of links.
    Blue,
    /// Of warnings.
    Yellow,
}

impl Colour {
    fn code(self) -> &'static str {
        match self {
            Self::Yellow => "33",
            Self::Blue => "34",
            Self::Magenta => "35",
            Self::Cyan => "36",
        }
    }
}

/// Text in one style, without control characters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    text: String,
    style: Style,
}

impl Span {
    /// A span of what is harmless in this text.
    pub fn new(text: &str, style: Style) -> Self {
        Self { text: clean(text), style }
    }

    /// Another text in the same style.
    pub fn with_text(&self, text: &str) -> Self {
        Self::new(text, self.style)
    }

    /// Its text.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Its columns.
    pub fn width(&self) -> usize {
        self.text.width()
    }
}

/// A line on the screen.
pub type Row = Vec<Span>;

/// The columns of a row.
pub fn width(row: &[Span]) -> usize {
    row.iter().map(Span::width).sum()
}

/// A text without what a terminal obeys: control characters, and those that reorder what is around them.
pub fn clean(text: &str) -> String {
    text.chars().filter(|c| !is_unsafe(*c)).collect()
}

/// As [`clean`], line by line.
pub fn clean_lines(text: &str) -> String {
    text.chars().filter(|c| *c == '\n' || !is_unsafe(*c)).collect()
}

fn is_unsafe(c: char) -> bool {
    c.is_control() || matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// A line with its tabs as blanks.
pub fn expand_tabs(line: &str) -> String {
    let mut expanded = String::with_capacity(line.len());
    let mut column = 0;
    for (i, part) in line.split('\t').enumerate() {
        if i > 0 {
            let blanks = TAB - column % TAB;
            expanded.extend(std::iter::repeat_n(' ', blanks));
            column += blanks;
        }
        expanded.push_str(part);
        column += part.width();
    }
    expanded
}

/// A row as bytes for the terminal.
pub fn encode(row: &[Span], colours: bool) -> String {
    let mut line = String::new();
    let mut rest = row;
    while let Some(first) = rest.first() {
        let alike = rest.iter().take_while(|span| span.style == first.style).count();
        let codes = first.style.codes(colours);
        if !codes.is_empty() {
            line.push_str(&format!("\x1b[{codes}m"));
        }
        rest[..alike].iter().for_each(|span| line.push_str(&span.text));
        if !codes.is_empty() {
            line.push_str("\x1b[0m");
        }
        rest = &rest[alike..];
    }
    line
}

/// Where a line may be broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Break {
    /// Between words, and around wide characters; inside a word only if it is longer than a line.
    Words,
    /// Anywhere.
    Anywhere,
}

/// What stands before the text of a paragraph, on its first row and on the others; of equal width.
#[derive(Clone, Debug, Default)]
pub struct Margin {
    /// Before the first row.
    pub first: Row,
    /// Before the others.
    pub rest: Row,
}

impl Margin {
    /// The same before every row.
    pub fn every(text: &str, style: Style) -> Self {
        let row = vec![Span::new(text, style)];
        Self { first: row.clone(), rest: row }
    }

    /// The same before every row, for all that follows after a first row.
    pub fn after_first(&self) -> Self {
        Self { first: self.rest.clone(), rest: self.rest.clone() }
    }

    /// Appends to it.
    pub fn push(&mut self, first: &str, rest: &str, style: Style) {
        self.first.push(Span::new(first, style));
        self.rest.push(Span::new(rest, style));
    }
}

struct Cell<'a> {
    text: &'a str,
    style: Style,
    width: usize,
}

impl Cell<'_> {
    fn is_blank(&self) -> bool {
        self.text == " "
    }

    /// It stays with what is before it.
    fn closes(&self) -> bool {
        let closing = ".,:;!?)]}、。，．：；！？）」』】》";
        !self.text.is_empty() && closing.contains(self.text)
    }
}

/// Breaks text into rows of at most `columns`, the margin included. There is one row at least.
pub fn wrap(spans: &[Span], margin: &Margin, columns: usize, at: Break) -> Vec<Row> {
    // A wide character has to fit.
    let room = columns.saturating_sub(width(&margin.rest)).max(2);
    let cells = spans.iter().flat_map(|span| {
        let cell = |text| Cell { text, style: span.style, width: text.width() };
        span.text.graphemes(true).map(cell)
    });
    let mut rows = Vec::new();
    let mut line: Vec<Cell<'_>> = Vec::new();
    let mut used = 0;
    // Cells of the line that may stand without those after them.
    let mut breakable = 0;
    'cells: for cell in cells {
        let is_free = at == Break::Anywhere;
        // Blanks at a break are not shown.
        if cell.is_blank() && !is_free && line.is_empty() && !rows.is_empty() {
            continue;
        }
        // Scripts without blanks break around their characters.
        let is_wide = cell.width > 1 || line.last().is_some_and(|last: &Cell<'_>| last.width > 1);
        if is_free || (is_wide && !cell.closes()) {
            breakable = line.len();
        }
        while used + cell.width > room && !line.is_empty() {
            let blank_ends_it = cell.is_blank() && !is_free;
            let kept = if blank_ends_it || breakable == 0 { line.len() } else { breakable };
            let moved = line.split_off(kept);
            rows.push(row(&line, margin, rows.is_empty(), is_free));
            line = moved;
            used = line.iter().map(|cell| cell.width).sum();
            breakable = 0;
            if blank_ends_it {
                continue 'cells;
            }
        }
        used += cell.width;
        let is_blank = cell.is_blank();
        line.push(cell);
        if is_blank {
            breakable = line.len();
        }
    }
    if !line.is_empty() || rows.is_empty() {
        rows.push(row(&line, margin, rows.is_empty(), at == Break::Anywhere));
    }
    rows
}

fn row(line: &[Cell<'_>], margin: &Margin, is_first: bool, with_blanks: bool) -> Row {
    let mut row = if is_first { margin.first.clone() } else { margin.rest.clone() };
    let end = line.iter().rposition(|cell| with_blanks || !cell.is_blank()).map_or(0, |last| last + 1);
    let begin = row.len();
    for cell in &line[..end] {
        match row[begin..].last_mut() {
            Some(span) if span.style == cell.style => span.text.push_str(cell.text),
            _ => row.push(Span { text: cell.text.to_owned(), style: cell.style }),
        }
    }
    row
}

/// The text of rows, for tests and for cutting.
#[cfg(test)]
pub fn plain(rows: &[Row]) -> String {
    let line = |row: &Row| row.iter().map(Span::text).collect::<String>();
    rows.iter().map(line).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wrapped(text: &str, columns: usize) -> Vec<String> {
        let rows = wrap(&[Span::new(text, Style::PLAIN)], &Margin::default(), columns, Break::Words);
        rows.iter().map(|row| plain(std::slice::from_ref(row))).collect()
    }

    #[test]
    fn nothing_that_a_terminal_obeys_gets_into_a_span() {
        let hostile = "a\x1b[31mb\x07\x08\u{9b}2Jc\u{7f}\r\n\u{202e}d\u{2066}\x1b]0;title\x07";
        assert_eq!(Span::new(hostile, Style::PLAIN).text(), "a[31mb2Jcd]0;title");
        assert_eq!(clean_lines("a\x1b[A\nb\r"), "a[A\nb");
    }

    #[test]
    fn text_breaks_between_words_and_long_words_anywhere() {
        assert_eq!(wrapped("the quick brown fox", 10), ["the quick", "brown fox"]);
        assert_eq!(wrapped("abcdefgh ij", 3), ["abc", "def", "gh", "ij"]);
        assert_eq!(wrapped("", 10), [""]);
        assert_eq!(wrapped("ab   cd", 3), ["ab", "cd"]);
    }

    #[test]
    fn wide_characters_count_two_and_nothing_is_lost_at_any_width() {
        assert_eq!(wrapped("日本語です。", 6), ["日本語", "です。"]);
        // A closing mark takes the character before it along.
        assert_eq!(wrapped("日本語。", 6), ["日本", "語。"]);
        let text = "a 👩‍👩‍👧 family, e\u{301}tude 漢字かな。。！交じり文 and_a_very_long_identifier_indeed";
        let all: String = text.chars().filter(|c| *c != ' ').collect();
        for columns in 0..40 {
            let lines = wrapped(text, columns);
            assert!(lines.iter().all(|line| line.as_str().width() <= columns.max(2)), "{columns}: {lines:?}");
            assert_eq!(lines.concat().replace(' ', ""), all, "{columns}");
        }
    }

    #[test]
    fn the_margin_is_on_every_row_and_counts() {
        let mut margin = Margin::default();
        margin.push("• ", "  ", Style::PLAIN);
        let rows = wrap(&[Span::new("one two three", Style::PLAIN)], &margin, 7, Break::Words);
        assert_eq!(plain(&rows), "• one\n  two\n  three");
        assert_eq!(width(&rows[0]), 5);
    }

    #[test]
    fn a_style_is_selected_once_and_reset_and_colours_can_be_off() {
        let code = Style { colour: Some(Colour::Cyan), ..Style::PLAIN };
        let bold = Style { bold: true, ..code };
        let row =
            [Span::new("a", bold), Span::new("b", bold), Span::new("c", Style::PLAIN), Span::new("d", code)];
        assert_eq!(encode(&row, true), "\x1b[1;36mab\x1b[0mc\x1b[36md\x1b[0m");
        assert_eq!(encode(&row, false), "\x1b[1mab\x1b[0mcd");
    }

    #[test]
    fn tabs_go_to_the_next_stop() {
        assert_eq!(expand_tabs("\ta\tbcd\te"), "    a   bcd e");
    }
}
