//! An answer while it is shown: what arrives goes in, a thread of its own keeps the picture alive.
//!
//! Where stdout is a terminal, the answer is rows with the monitor's line below them, all on stdout: they share
//! its lines. Where only stderr is one, it has the monitor's line, and stdout the bytes as they come.

use std::io::{self, IsTerminal, Write};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ratatui::crossterm::terminal;
use smoe_text::ReplyEvent;

use super::body::{Body, Calls, Looks, thought_rows};
use super::cells::{clean_lines, encode};
use super::monitor::Monitor;
use super::screen::Screen;

/// Time between two pictures while nothing arrives.
const TICK: Duration = Duration::from_millis(100);
/// What arrives sooner after a picture waits for the next one.
const SOON: Duration = Duration::from_millis(12);
/// Text is no wider, however wide the terminal is.
const WIDEST: usize = 120;

/// What there is to show on.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// Stdout is a terminal.
    stdout: bool,
    /// Stderr is one.
    stderr: bool,
    /// They know how to move the cursor.
    moves: bool,
    colours: bool,
}

impl Place {
    /// As this process finds it.
    pub fn detect() -> Self {
        let set = |name| std::env::var_os(name).filter(|value| !value.is_empty());
        Self {
            stdout: io::stdout().is_terminal(),
            stderr: io::stderr().is_terminal(),
            moves: set("TERM").is_none_or(|term| term != "dumb"),
            colours: set("NO_COLOR").is_none(),
        }
    }

    /// Answers are shown as rows.
    pub fn has_rows(self) -> bool {
        self.stdout && self.moves
    }

    fn has_monitor(self) -> bool {
        self.stderr && self.moves
    }

    /// Reasoning, once it is over.
    pub fn print_thought(self, thought: &str) -> io::Result<()> {
        let (columns, _) = size();
        let mut out = io::stdout().lock();
        for row in thought_rows(thought, text_columns(columns)) {
            writeln!(out, "{}", encode(&row, self.colours))?;
        }
        Ok(())
    }
}

/// An answer under way.
pub struct Show {
    stage: Arc<Mutex<Stage>>,
    ticker: Option<(Sender<()>, JoinHandle<()>)>,
}

struct Stage {
    screen: Option<Screen<Box<dyn Write + Send>>>,
    sink: Sink,
    monitor: Monitor,
    shows_monitor: bool,
    drawn: Option<Instant>,
}

enum Sink {
    Rows(Box<Body>),
    /// For a terminal that moves nothing control characters are left out.
    Bytes {
        to_terminal: bool,
        calls: Calls,
    },
}

impl Show {
    /// An answer begins.
    pub fn begin(place: Place, looks: Looks, monitor: Monitor) -> Self {
        let out: Option<Box<dyn Write + Send>> = match (place.has_rows(), place.has_monitor()) {
            (true, _) => Some(Box::new(io::stdout())),
            (false, true) => Some(Box::new(io::stderr())),
            (false, false) => None,
        };
        let sink = if place.has_rows() {
            Sink::Rows(Box::new(Body::new(looks)))
        } else {
            Sink::Bytes { to_terminal: place.stdout, calls: Calls::default() }
        };
        let stage = Stage {
            screen: out.map(|out| Screen::new(out, place.colours)),
            sink,
            monitor,
            shows_monitor: place.has_monitor(),
            drawn: None,
        };
        let is_drawn = stage.screen.is_some();
        let stage = Arc::new(Mutex::new(stage));
        Self { ticker: is_drawn.then(|| tick(stage.clone())), stage }
    }

    /// Answers are rows: what is reasoning matters.
    pub fn has_rows(&self) -> bool {
        matches!(lock(&self.stage).sink, Sink::Rows(_))
    }

    /// Something about it has changed.
    pub fn update(&self, change: impl FnOnce(&mut Monitor)) {
        change(&mut lock(&self.stage).monitor);
    }

    /// Asks the monitor.
    pub fn ask<T>(&self, question: impl FnOnce(&Monitor) -> T) -> T {
        question(&lock(&self.stage).monitor)
    }

    /// A part of it.
    pub fn event(&self, event: &ReplyEvent) -> io::Result<()> {
        let mut stage = lock(&self.stage);
        match &mut stage.sink {
            Sink::Rows(body) => {
                body.take(event, text_columns(size().0));
                if stage.drawn.is_none_or(|drawn| drawn.elapsed() >= SOON) {
                    stage.draw()?;
                }
                Ok(())
            }
            Sink::Bytes { to_terminal, calls } => {
                let to_terminal = *to_terminal;
                if let ReplyEvent::Text(text) = event {
                    return write(text, to_terminal);
                }
                if let Some(call) = calls.take(event) {
                    stage.clear()?;
                    eprintln!("{}", clean_lines(&call));
                }
                Ok(())
            }
        }
    }

    /// It is over; the monitor's line is gone. The last reasoning, if any was shown.
    pub fn end(mut self) -> io::Result<String> {
        self.stop();
        let mut stage = lock(&self.stage);
        let mut thought = String::new();
        match &mut stage.sink {
            Sink::Rows(body) => {
                body.finish(text_columns(size().0));
                body.thought().clone_into(&mut thought);
            }
            Sink::Bytes { calls, .. } => {
                let cut = calls.cut();
                stage.clear()?;
                cut.iter().for_each(|call| eprintln!("{}", clean_lines(call)));
            }
        }
        stage.shows_monitor = false;
        stage.draw()?;
        Ok(thought)
    }

    fn stop(&mut self) {
        if let Some((alive, thread)) = self.ticker.take() {
            drop(alive);
            // It has nothing to tell.
            let _ = thread.join();
        }
    }
}

impl Drop for Show {
    /// Also when an answer fails half-way.
    fn drop(&mut self) {
        if self.ticker.is_some() {
            self.stop();
            // Whoever cannot be shown the rest has left.
            let _ = lock(&self.stage).clear();
        }
    }
}

impl Stage {
    fn draw(&mut self) -> io::Result<()> {
        let Some(screen) = &mut self.screen else { return Ok(()) };
        let (columns, lines) = size();
        let (mut staying, mut changing) = (Vec::new(), Vec::new());
        if let Sink::Rows(body) = &mut self.sink {
            staying = body.take_rows();
            changing = body.preview(text_columns(columns));
            // What has scrolled away could not be replaced.
            let beyond = changing.len().saturating_sub((lines / 2).max(1));
            changing.drain(..beyond);
        }
        if self.shows_monitor {
            changing.push(self.monitor.facts().row(columns.saturating_sub(1)));
        }
        self.drawn = Some(Instant::now());
        screen.draw(&staying, &changing, columns)
    }

    /// Takes away what changes.
    fn clear(&mut self) -> io::Result<()> {
        let Some(screen) = &mut self.screen else { return Ok(()) };
        screen.draw(&[], &[], size().0)
    }
}

/// A panic elsewhere leaves nothing half done here.
fn lock(stage: &Mutex<Stage>) -> MutexGuard<'_, Stage> {
    stage.lock().unwrap_or_else(PoisonError::into_inner)
}

fn tick(stage: Arc<Mutex<Stage>>) -> (Sender<()>, JoinHandle<()>) {
    let (alive, over) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        while over.recv_timeout(TICK) == Err(RecvTimeoutError::Timeout) {
            // Who writes the answer will notice, too.
            let _ = lock(&stage).draw();
        }
    });
    (alive, thread)
}

fn write(text: &str, to_terminal: bool) -> io::Result<()> {
    let mut out = io::stdout().lock();
    if to_terminal {
        out.write_all(clean_lines(text).as_bytes())?;
    } else {
        out.write_all(text.as_bytes())?;
    }
    out.flush()
}

/// Columns and lines of the terminal.
fn size() -> (usize, usize) {
    let (columns, lines) = terminal::size().unwrap_or((0, 0));
    let known = |n: u16, otherwise| if n == 0 { otherwise } else { usize::from(n) };
    (known(columns, 80), known(lines, 24))
}

/// The last column stays free: terminals differ in what they do after it.
fn text_columns(columns: usize) -> usize {
    columns.saturating_sub(1).clamp(4, WIDEST)
}
