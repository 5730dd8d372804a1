//! The end of the terminal: rows that stay, and below them rows that are drawn anew.
//!
//! A picture is one write: back to where the changing rows begin, everything from there erased, new rows that
//! stay, the changing rows again. Terminals that know synchronised output show it at once.

use std::io::{self, Write};

use super::cells::{Row, encode, width};

const BEGIN: &str = "\x1b[?2026h";
const END: &str = "\x1b[?2026l";

/// Where rows are drawn.
pub struct Screen<W> {
    out: W,
    colours: bool,
    /// The changing rows as they were drawn, and their columns.
    drawn: Vec<(String, usize)>,
}

impl<W: Write> Screen<W> {
    /// Begins where the cursor is, at the beginning of a line.
    pub fn new(out: W, colours: bool) -> Self {
        Self { out, colours, drawn: Vec::new() }
    }

    /// Adds rows that stay, and replaces those that change, on a terminal of so many columns.
    pub fn draw(&mut self, staying: &[Row], changing: &[Row], columns: usize) -> io::Result<()> {
        let changing: Vec<_> = changing.iter().map(|row| (encode(row, self.colours), width(row))).collect();
        if staying.is_empty() && changing == self.drawn {
            return Ok(());
        }
        // On a terminal that became narrower a row has become several.
        let lines = self.drawn.iter().map(|(_, width)| width.div_ceil(columns.max(1)).max(1)).sum::<usize>();
        let mut picture = BEGIN.to_owned();
        if lines > 0 {
            picture.push('\r');
            if lines > 1 {
                picture.push_str(&format!("\x1b[{}A", lines - 1));
            }
            picture.push_str("\x1b[J");
        }
        for row in staying {
            picture.push_str(&encode(row, self.colours));
            picture.push('\n');
        }
        for (i, (row, _)) in changing.iter().enumerate() {
            if i > 0 {
                picture.push('\n');
            }
            picture.push_str(row);
        }
        picture.push_str(END);
        self.drawn = changing;
        self.out.write_all(picture.as_bytes())?;
        self.out.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chat::cells::{Span, Style};

    /// A terminal as far as it is used here: lines, and where the cursor is.
    #[derive(Debug)]
    struct Glass {
        lines: Vec<Vec<char>>,
        row: usize,
        column: usize,
    }

    impl Glass {
        fn show(bytes: &[u8]) -> Vec<String> {
            let mut glass = Glass { lines: vec![Vec::new()], row: 0, column: 0 };
            let text = String::from_utf8(bytes.to_vec()).unwrap();
            let mut rest = text.as_str();
            while let Some(c) = rest.chars().next() {
                rest = &rest[c.len_utf8()..];
                match c {
                    '\x1b' => {
                        let end = rest.find(|c: char| c.is_ascii_alphabetic()).unwrap();
                        glass.obey(&rest[1..end], &rest[end..=end]);
                        rest = &rest[end + 1..];
                    }
                    '\r' => glass.column = 0,
                    '\n' => {
                        (glass.row, glass.column) = (glass.row + 1, 0);
                        if glass.row == glass.lines.len() {
                            glass.lines.push(Vec::new());
                        }
                    }
                    c => {
                        let line = &mut glass.lines[glass.row];
                        assert_eq!(line.len(), glass.column, "written over");
                        line.push(c);
                        glass.column += 1;
                    }
                }
            }
            glass.lines.iter().map(|line| line.iter().collect()).collect()
        }

        fn obey(&mut self, argument: &str, command: &str) {
            match command {
                "A" => self.row -= argument.parse::<usize>().unwrap(),
                "J" => {
                    self.lines.truncate(self.row + 1);
                    self.lines[self.row].truncate(self.column);
                }
                "h" | "l" => assert_eq!(argument, "?2026"),
                other => panic!("{other}"),
            }
        }
    }

    fn rows(texts: &[&str]) -> Vec<Row> {
        texts.iter().map(|text| vec![Span::new(text, Style::PLAIN)]).collect()
    }

    #[test]
    fn what_stays_stays_and_what_changes_is_replaced() {
        let mut screen = Screen::new(Vec::new(), true);
        let pictures: [(&[&str], &[&str]); 5] = [
            (&[], &["waiting"]),
            (&[], &["par", "answering"]),
            (&["partial line", "second"], &["thi", "more", "answering, later"]),
            (&[], &["third"]),
            (&["third line"], &[]),
        ];
        let mut stayed: Vec<&str> = Vec::new();
        for (staying, changing) in pictures {
            screen.draw(&rows(staying), &rows(changing), 80).unwrap();
            stayed.extend(staying);
            let mut expected = [&stayed[..], changing].concat();
            if changing.is_empty() {
                expected.push("");
            }
            assert_eq!(Glass::show(&screen.out), expected);
        }
    }

    #[test]
    fn what_has_not_changed_is_not_drawn() {
        let mut screen = Screen::new(Vec::new(), true);
        screen.draw(&[], &rows(&["same"]), 80).unwrap();
        let before = screen.out.len();
        screen.draw(&[], &rows(&["same"]), 80).unwrap();
        assert_eq!(screen.out.len(), before);
    }

    #[test]
    fn a_terminal_that_became_narrower_has_broken_the_rows() {
        let mut screen = Screen::new(Vec::new(), true);
        screen.draw(&[], &rows(&["0123456789", "x"]), 80).unwrap();
        screen.out.clear();
        screen.draw(&[], &rows(&["y"]), 4).unwrap();
        assert!(String::from_utf8(screen.out).unwrap().contains("\r\x1b[3A\x1b[J"));
    }
}
