//! Tables: columns as wide as they must be, and as narrow as they have to be.

use super::inline::inline;
use crate::chat::cells::{Break, Margin, Row, Span, Style, width, wrap};

/// Columns below which a cell is not squeezed.
const NARROWEST: usize = 4;
/// Between two cells.
const BAR: &str = " │ ";

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Side {
    #[default]
    Left,
    Centre,
    Right,
}

/// A table whose cells are read.
#[derive(Debug)]
pub struct Table {
    sides: Vec<Side>,
    header: Vec<Vec<Span>>,
    body: Vec<Vec<Vec<Span>>>,
}

impl Table {
    /// Reads its lines.
    pub fn read(header: &str, delimiter: &str, body: &[String]) -> Self {
        let sides: Vec<Side> = cells(delimiter).iter().map(|cell| side(cell)).collect();
        let row = |line: &str, style| {
            let mut row: Vec<Vec<Span>> = cells(line).iter().map(|cell| inline(cell, style)).collect();
            row.resize(sides.len(), Vec::new());
            row
        };
        let bold = Style { bold: true, ..Style::PLAIN };
        let body = body.iter().map(|line| row(line, Style::PLAIN)).collect();
        Self { header: row(header, bold), body, sides }
    }

    /// Lays it out in so many columns; cells that do not fit have several rows, and what does not fit even so
    /// is a list of fields.
    pub fn rows(&self, margin: &Margin, columns: usize) -> Vec<Row> {
        let room = columns.saturating_sub(width(&margin.rest));
        let margins = margin.after_first();
        let lines = match self.widths(room) {
            Some(widths) => self.grid(&widths),
            None => return self.fields(&margins, columns),
        };
        let lines = lines.into_iter().enumerate();
        lines
            .map(|(i, line)| {
                let mut row = if i == 0 { margin.first.clone() } else { margin.rest.clone() };
                row.extend(line);
                row
            })
            .collect()
    }

    /// The columns' widths; `None` if there is no room for all of them.
    fn widths(&self, room: usize) -> Option<Vec<usize>> {
        let bars = BAR.chars().count() * (self.sides.len() - 1);
        let room = room.checked_sub(bars)?;
        let all = || std::iter::once(&self.header).chain(&self.body);
        let widest = |i: usize| all().map(|row| width(&row[i])).max().unwrap_or(0).clamp(1, room.max(1));
        let mut widths: Vec<usize> = (0..self.sides.len()).map(widest).collect();
        let mut total: usize = widths.iter().sum();
        while total > room {
            let most = widths.iter_mut().max()?;
            if *most <= NARROWEST {
                return None;
            }
            *most -= 1;
            total -= 1;
        }
        Some(widths)
    }

    fn grid(&self, widths: &[usize]) -> Vec<Row> {
        let mut rows = self.line(&self.header, widths);
        let strokes: Vec<String> = widths.iter().map(|width| "─".repeat(*width)).collect();
        rows.push(vec![Span::new(&strokes.join("─┼─"), Style::DIM)]);
        self.body.iter().for_each(|row| rows.extend(self.line(row, widths)));
        rows
    }

    fn line(&self, cells: &[Vec<Span>], widths: &[usize]) -> Vec<Row> {
        let columns: Vec<Vec<Row>> = cells
            .iter()
            .zip(widths)
            .map(|(cell, width)| wrap(cell, &Margin::default(), *width, Break::Words))
            .collect();
        let height = columns.iter().map(Vec::len).max().unwrap_or(1);
        let row = |y: usize| {
            let mut row = Row::new();
            for (i, column) in columns.iter().enumerate() {
                if i > 0 {
                    row.push(Span::new(BAR, Style::DIM));
                }
                let text = column.get(y).cloned().unwrap_or_default();
                let blanks = widths[i].saturating_sub(width(&text));
                let left = match self.sides[i] {
                    Side::Left => 0,
                    Side::Centre => blanks / 2,
                    Side::Right => blanks,
                };
                // Nothing stands to the right of the last column.
                let right = if i + 1 == columns.len() { 0 } else { blanks - left };
                row.push(Span::new(&" ".repeat(left), Style::PLAIN));
                row.extend(text);
                row.push(Span::new(&" ".repeat(right), Style::PLAIN));
            }
            row
        };
        (0..height).map(row).collect()
    }

    fn fields(&self, margin: &Margin, columns: usize) -> Vec<Row> {
        let mut rows = Vec::new();
        for (i, row) in self.body.iter().enumerate() {
            if i > 0 {
                rows.push(margin.rest.clone());
            }
            for (name, cell) in self.header.iter().zip(row) {
                let mut spans = name.clone();
                spans.push(Span::new(": ", Style::PLAIN));
                spans.extend(cell.iter().cloned());
                rows.extend(wrap(&spans, margin, columns, Break::Words));
            }
        }
        rows
    }
}

/// Whether a line says that the one before it is a table's header.
pub fn is_delimiter(line: &str, header: &str) -> bool {
    let marks = cells(line);
    let is_mark = |cell: &String| {
        let dashes = cell.strip_prefix(':').unwrap_or(cell);
        let dashes = dashes.strip_suffix(':').unwrap_or(dashes);
        !dashes.is_empty() && dashes.chars().all(|c| c == '-')
    };
    line.contains('|') && marks.len() == cells(header).len() && marks.iter().all(is_mark)
}

fn side(mark: &str) -> Side {
    match (mark.starts_with(':'), mark.ends_with(':')) {
        (true, true) => Side::Centre,
        (false, true) => Side::Right,
        _ => Side::Left,
    }
}

/// The cells of a line; a bar after a backslash is text, and one at the end begins no cell.
fn cells(line: &str) -> Vec<String> {
    let line = line.trim();
    let mut chars = line.strip_prefix('|').unwrap_or(line).chars().peekable();
    let (mut cells, mut cell) = (Vec::new(), String::new());
    while let Some(c) = chars.next() {
        if c == '\\' && chars.next_if_eq(&'|').is_some() {
            cell.push('|');
        } else if c == '|' {
            cells.push(std::mem::take(&mut cell).trim().to_owned());
        } else {
            cell.push(c);
        }
    }
    if cells.is_empty() || !cell.trim().is_empty() {
        cells.push(cell.trim().to_owned());
    }
    cells
}
