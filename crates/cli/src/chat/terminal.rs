//! A conversation at a terminal or a pipe: lines with editing and history, answers as they are shown.

use std::io::{self, BufRead, IsTerminal, Write};
use std::path::PathBuf;

use rustyline::error::ReadlineError;
use rustyline::history::DefaultHistory;
use rustyline::{Config, Editor};
use smoe_engine::{Engine, Meters};
use smoe_text::{ReplyEvent, ReplyParser};

use super::Face;
use super::body::Looks;
use super::cells::clean_lines;
use super::monitor::{Doing, Monitor, warning};
use super::show::{Place, Show};
use crate::answer::{Answer, Piece};
use crate::failure::Failure;
use crate::instrument::Display;
use crate::interrupt;

/// Lines from a terminal or a pipe, answers to stdout, everything else to stderr.
pub struct Terminal {
    editor: Option<Editor<(), DefaultHistory>>,
    history: Option<PathBuf>,
    interactive: bool,
    place: Place,
    looks: Looks,
    /// The local engine's, and the positions of its context.
    engine: Option<(Meters, usize)>,
    show: Option<Show>,
    parser: Option<ReplyParser>,
    thought: String,
    /// Positions held after the last answer, of how many.
    context: Option<(usize, usize)>,
}

impl Terminal {
    /// Nothing was said yet; `plain` shows answers as they are written, and `engine` is whose work is watched,
    /// with the positions of its context.
    pub fn new(plain: bool, engine: Option<(Meters, usize)>) -> Result<Self, Failure> {
        let interactive = io::stdin().is_terminal();
        let mut terminal = Self {
            editor: None,
            history: None,
            interactive,
            place: Place::detect(),
            looks: Looks { plain, folded: false },
            engine,
            show: None,
            parser: None,
            thought: String::new(),
            context: None,
        };
        if interactive {
            let config = Config::builder().max_history_size(1000)?.build();
            let mut editor = Editor::with_config(config)?;
            terminal.history = history_path();
            if let Some(path) = &terminal.history {
                // None on the first run.
                let _ = editor.load_history(path);
            }
            terminal.editor = Some(editor);
            // The line that is drawn stays behind: whoever comes next begins a new one.
            interrupt::before_exit(|| eprintln!());
        }
        Ok(terminal)
    }

    /// An answer begins.
    pub fn open(&mut self, monitor: Monitor) {
        self.show = Some(Show::begin(self.place, self.looks, monitor));
    }

    /// A part of it.
    pub fn event(&mut self, event: &ReplyEvent) -> io::Result<()> {
        self.show.as_ref().map_or(Ok(()), |show| show.event(event))
    }

    /// Something about it has changed.
    pub fn update(&mut self, change: impl FnOnce(&mut Monitor)) {
        if let Some(show) = &self.show {
            show.update(change);
        }
    }

    /// It is over, or has failed.
    pub fn close(&mut self, failed: bool) -> io::Result<()> {
        let Some(show) = self.show.take() else { return Ok(()) };
        let ends_line = show.has_rows();
        self.context = show.ask(Monitor::context);
        let thought = show.end()?;
        if !thought.is_empty() {
            self.thought = thought;
        }
        match (ends_line, failed) {
            (true, _) => {}
            (false, false) => writeln!(io::stdout().lock())?,
            (false, true) => eprintln!(),
        }
        Ok(())
    }

    /// Says so if the context is nearly full.
    pub fn warn_of_context(&mut self) {
        if let Some(text) = self.context.and_then(warning).filter(|_| self.interactive) {
            self.note(&text);
        }
    }
}

impl Face for Terminal {
    fn is_interactive(&self) -> bool {
        self.interactive
    }

    /// Ctrl-C drops the line that is being typed.
    fn next(&mut self) -> Result<Option<String>, Failure> {
        let line = self.ask("> ")?;
        if let (Some(editor), Some(line)) = (&mut self.editor, &line) {
            editor.add_history_entry(line)?;
        }
        Ok(line)
    }

    /// Not in the history.
    fn ask(&mut self, question: &str) -> Result<Option<String>, Failure> {
        let Some(editor) = &mut self.editor else {
            let mut line = Vec::new();
            io::stdin().lock().read_until(b'\n', &mut line)?;
            return Ok((!line.is_empty()).then(|| String::from_utf8_lossy(&line).into_owned()));
        };
        loop {
            match editor.readline(question) {
                Ok(line) => return Ok(Some(line)),
                Err(ReadlineError::Interrupted) => eprintln!("(Ctrl-D leaves)"),
                Err(ReadlineError::Eof) => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// It may quote a server or a file.
    fn note(&mut self, text: &str) {
        eprintln!("{}", clean_lines(text));
    }

    fn begin(&mut self, prompt_tokens: usize) {
        let (meters, context) = self.engine.clone().unzip();
        self.open(Monitor::new(Some(prompt_tokens), context, meters.map(|meters| meters.store)));
    }

    fn reply(&mut self, parser: ReplyParser) {
        let reads = !self.looks.plain && self.show.as_ref().is_some_and(Show::has_rows);
        self.parser = reads.then_some(parser);
    }

    fn think(&mut self) -> io::Result<()> {
        if !self.place.has_rows() || self.looks.plain {
            self.note("reasoning is shown as it is written");
            return Ok(());
        }
        self.looks.folded = !self.looks.folded;
        if self.looks.folded {
            self.note("reasoning is folded from now on");
        } else {
            self.note("reasoning is shown from now on");
            if !self.thought.is_empty() {
                self.place.print_thought(&self.thought)?;
            }
        }
        Ok(())
    }

    fn piece(&mut self, piece: Piece<'_>) -> io::Result<()> {
        match piece {
            Piece::Prompt { done, total } => self.update(|monitor| {
                monitor.at(Doing::Prefilling { done: done as u64, total: total as u64 });
            }),
            Piece::Token { .. } => self.update(Monitor::token),
            Piece::Text("") => {}
            Piece::Text(text) => {
                let events = match &mut self.parser {
                    Some(parser) => parser.push(text),
                    None => vec![ReplyEvent::Text(text.to_owned())],
                };
                for event in &events {
                    self.event(event)?;
                }
            }
        }
        Ok(())
    }

    fn end(&mut self, _engine: &Engine, answer: Option<&Answer>) -> io::Result<()> {
        if let Some(mut parser) = self.parser.take() {
            for event in &parser.finish() {
                self.event(event)?;
            }
        }
        self.close(answer.is_none())
    }

    fn figures(&mut self, answer: &Answer, display: &Display) {
        display.print(answer, self.interactive);
        self.warn_of_context();
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        if let (Some(editor), Some(path)) = (&mut self.editor, &self.history) {
            // A history that cannot be saved is no reason to fail a conversation.
            let _ = path.parent().map(std::fs::create_dir_all);
            let _ = editor.save_history(path);
        }
    }
}

/// `$XDG_STATE_HOME/smoe/history`, or below `~/.local/state`.
fn history_path() -> Option<PathBuf> {
    let state = std::env::var_os("XDG_STATE_HOME").map(PathBuf::from);
    let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".local/state"));
    Some(state.or_else(home)?.join("smoe/history"))
}
