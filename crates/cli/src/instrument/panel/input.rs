//! The line that is being typed, and those before it.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

/// What a key did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Typed {
    /// The line changed, or nothing did.
    Edited,
    /// The line is done.
    Sent(String),
}

/// A line with a cursor and a history.
#[derive(Debug, Default)]
pub struct Input {
    text: Vec<char>,
    cursor: usize,
    history: Vec<String>,
    /// Line of the history that is shown; beyond its end is what is new.
    shown: usize,
}

impl Input {
    /// The text before the cursor, and behind it.
    pub fn parts(&self) -> (String, String) {
        let (before, behind) = self.text.split_at(self.cursor);
        (before.iter().collect(), behind.iter().collect())
    }

    /// Nothing is typed.
    pub fn is_empty(&self) -> bool {
        self.text.is_empty()
    }

    /// Empties the line.
    pub fn clear(&mut self) {
        self.text.clear();
        self.cursor = 0;
    }

    /// Inserts text, its line ends as spaces.
    pub fn insert(&mut self, text: &str) {
        for c in text.chars() {
            let c = if c.is_whitespace() { ' ' } else { c };
            if !c.is_control() {
                self.text.insert(self.cursor, c);
                self.cursor += 1;
            }
        }
    }

    /// A key was pressed. `may_send` says whether the line can be sent now.
    pub fn key(&mut self, key: KeyEvent, may_send: bool) -> Typed {
        let control = key.modifiers.contains(KeyModifiers::CONTROL);
        match key.code {
            KeyCode::Enter if may_send => return Typed::Sent(self.send()),
            KeyCode::Char('a') if control => self.cursor = 0,
            KeyCode::Char('e') if control => self.cursor = self.text.len(),
            KeyCode::Char('u') if control => {
                self.text.drain(..self.cursor);
                self.cursor = 0;
            }
            KeyCode::Char('k') if control => self.text.truncate(self.cursor),
            KeyCode::Char('w') if control => self.delete_word(),
            KeyCode::Char(c) if !control => self.insert(c.encode_utf8(&mut [0; 4])),
            KeyCode::Backspace if self.cursor > 0 => {
                self.cursor -= 1;
                self.text.remove(self.cursor);
            }
            KeyCode::Delete if self.cursor < self.text.len() => {
                self.text.remove(self.cursor);
            }
            KeyCode::Left => self.cursor = self.cursor.saturating_sub(1),
            KeyCode::Right => self.cursor = (self.cursor + 1).min(self.text.len()),
            KeyCode::Home => self.cursor = 0,
            KeyCode::End => self.cursor = self.text.len(),
            KeyCode::Up => self.recall(self.shown.saturating_sub(1)),
            KeyCode::Down => self.recall(self.shown + 1),
            _ => {}
        }
        Typed::Edited
    }

    fn send(&mut self) -> String {
        let line: String = self.text.iter().collect();
        if !line.trim().is_empty() && self.history.last() != Some(&line) {
            self.history.push(line.clone());
        }
        self.shown = self.history.len();
        self.clear();
        line
    }

    fn delete_word(&mut self) {
        let before = &self.text[..self.cursor];
        let word_end = before.iter().rposition(|c| *c != ' ').map_or(0, |i| i + 1);
        let start = before[..word_end].iter().rposition(|c| *c == ' ').map_or(0, |i| i + 1);
        self.text.drain(start..self.cursor);
        self.cursor = start;
    }

    fn recall(&mut self, line: usize) {
        self.shown = line.min(self.history.len());
        self.text = self.history.get(self.shown).map(|line| line.chars().collect()).unwrap_or_default();
        self.cursor = self.text.len();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn press(input: &mut Input, code: KeyCode) -> Typed {
        input.key(KeyEvent::new(code, KeyModifiers::NONE), true)
    }

    fn control(input: &mut Input, c: char) {
        input.key(KeyEvent::new(KeyCode::Char(c), KeyModifiers::CONTROL), true);
    }

    fn text(input: &Input) -> String {
        let (before, behind) = input.parts();
        format!("{before}|{behind}")
    }

    #[test]
    fn a_line_is_edited_as_one_expects() {
        let mut input = Input::default();
        input.insert("naïve \tcafé\r\n\u{1b}x");
        assert_eq!(text(&input), "naïve  café  x|");
        control(&mut input, 'w');
        control(&mut input, 'w');
        assert_eq!(text(&input), "naïve  |");
        press(&mut input, KeyCode::Home);
        press(&mut input, KeyCode::Delete);
        press(&mut input, KeyCode::Right);
        press(&mut input, KeyCode::Backspace);
        assert_eq!(text(&input), "|ïve  ");
        press(&mut input, KeyCode::Backspace);
        press(&mut input, KeyCode::Left);
        press(&mut input, KeyCode::Char('N'));
        assert_eq!(text(&input), "N|ïve  ");
        control(&mut input, 'k');
        assert_eq!(text(&input), "N|");
        control(&mut input, 'u');
        assert!(input.is_empty());
    }

    #[test]
    fn lines_are_sent_when_they_may_be_and_come_back() {
        let mut input = Input::default();
        for line in ["one", "two", "two", " "] {
            input.insert(line);
            let enter = KeyEvent::new(KeyCode::Enter, KeyModifiers::NONE);
            assert_eq!(input.key(enter, false), Typed::Edited);
            assert_eq!(input.key(enter, true), Typed::Sent(line.to_owned()));
        }
        press(&mut input, KeyCode::Up);
        assert_eq!(text(&input), "two|");
        press(&mut input, KeyCode::Up);
        press(&mut input, KeyCode::Up);
        assert_eq!(text(&input), "one|");
        press(&mut input, KeyCode::Down);
        press(&mut input, KeyCode::Down);
        press(&mut input, KeyCode::Down);
        assert!(input.is_empty());
    }
}
