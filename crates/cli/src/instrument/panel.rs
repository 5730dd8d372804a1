//! The panel: a conversation that fills the screen, the engine at work beside it.
//!
//! ```text
//!  engine's thread                     screen's thread
//!  Face::next    ◄── lines ─────────── keys
//!  Face::piece   ──► Board ──────────► draw, ten times a second
//!  engine's meters (atomics) ────────►
//! ```
//!
//! The screen has a thread of its own, so that it lives while a layer takes its time, and the engine is never
//! asked: what moves is read from its meters. The terminal is restored however either thread ends.

mod input;
mod view;

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ratatui::crossterm::event::{
    self, DisableBracketedPaste, EnableBracketedPaste, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers,
};
use ratatui::crossterm::execute;
use smoe_engine::plan::Plan;
use smoe_engine::{Engine, Meters};
use smoe_meter::{Phase, RouteSnapshot};

use super::{Display, Mark};
use crate::answer::{Answer, Piece};
use crate::bench::machine;
use crate::chat::Face;
use crate::failure::Failure;
use crate::interrupt;
use input::{Input, Typed};
use view::{Doing, Gauges, Heat, Said, View, Who};

/// Time between two pictures.
const FRAME: Duration = Duration::from_millis(100);
/// The disk's rate is of so many pictures.
const RATE_FRAMES: usize = 10;
/// Tokens after which a use counts half.
const HALF_LIFE: f64 = 16.0;
/// Lines that a page of scrolling is.
const PAGE: usize = 10;

/// Shows the panel while `talk` holds a conversation in it.
pub fn show(
    engine: &mut Engine,
    talk: impl FnOnce(&mut Engine, &mut dyn Face) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let board = &Board::default();
    let (send, lines) = mpsc::channel();
    let meters = engine.meters();
    let scene =
        Scene { model: engine.spec().model_type.clone(), plan: engine.info().plan, meters: meters.clone() };
    board.lock().ring_slots = engine.ring_limit();
    std::thread::scope(|scope| {
        let screen = scope.spawn(move || {
            let shown = Screen::new(scene).run(board, &send);
            board.screen_is_gone.store(true, Ordering::Relaxed);
            // The engine's thread may wait for a line.
            drop(send);
            shown
        });
        // Also when `talk` panics, or the screen would be waited for without end.
        let over = Over(&board.talk_is_over);
        let held = talk(engine, &mut PanelFace { board, lines, meters });
        drop(over);
        let shown = screen.join().map_err(|_| Failure::new("the panel failed"));
        held.and(shown.and_then(|shown| Ok(shown?)))
    })
}

struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// What both threads see.
#[derive(Debug, Default)]
struct Board {
    state: Mutex<State>,
    talk_is_over: AtomicBool,
    screen_is_gone: AtomicBool,
}

impl Board {
    /// A panic elsewhere leaves nothing half done here.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug, Default)]
struct State {
    said: Vec<Said>,
    /// `said` is not what the screen has.
    is_news: bool,
    doing: Doing,
    question: Option<String>,
    /// Positions held.
    context: usize,
    ring_slots: usize,
    course: Option<Course>,
}

impl State {
    fn say(&mut self, who: Who, text: &str) {
        self.said.push(Said { who, text: text.to_owned() });
        self.is_news = true;
    }
}

/// The present answer's marks, or the last one's.
#[derive(Clone, Copy, Debug)]
struct Course {
    start: Mark,
    first: Option<Mark>,
    end: Option<Mark>,
    tokens: u64,
}

/// The conversation's side.
struct PanelFace<'a> {
    board: &'a Board,
    lines: Receiver<String>,
    meters: Meters,
}

impl PanelFace<'_> {
    fn line(&self, question: Option<&str>) -> Option<String> {
        {
            let mut state = self.board.lock();
            state.doing = Doing::Waiting;
            state.question = question.map(str::to_owned);
        }
        let line = self.lines.recv().ok()?;
        let mut state = self.board.lock();
        state.question = None;
        state.say(Who::User, &line);
        Some(line)
    }
}

impl Face for PanelFace<'_> {
    fn is_interactive(&self) -> bool {
        true
    }

    fn next(&mut self) -> Result<Option<String>, Failure> {
        Ok(self.line(None))
    }

    fn ask(&mut self, question: &str) -> Result<Option<String>, Failure> {
        Ok(self.line(Some(question)))
    }

    fn note(&mut self, text: &str) {
        self.board.lock().say(Who::Note, text);
    }

    fn begin(&mut self, prompt_tokens: usize) {
        let start = Mark::now(&self.meters);
        let mut state = self.board.lock();
        state.context = prompt_tokens;
        state.doing = Doing::Prefilling(0, 0);
        state.course = Some(Course { start, first: None, end: None, tokens: 0 });
        state.say(Who::Model, "");
    }

    fn piece(&mut self, piece: Piece<'_>) -> io::Result<()> {
        if self.board.screen_is_gone.load(Ordering::Relaxed) {
            return Err(io::Error::other("the panel is gone"));
        }
        let mut state = self.board.lock();
        match piece {
            Piece::Prompt { done, total } => state.doing = Doing::Prefilling(done, total),
            Piece::Token { first, .. } => {
                state.doing = Doing::Answering;
                state.context += usize::from(!first);
                if let Some(course) = &mut state.course {
                    course.tokens += 1;
                    course.first.get_or_insert_with(|| Mark::now(&self.meters));
                }
            }
            Piece::Text(text) => {
                if let Some(said) = state.said.iter_mut().rfind(|said| said.who == Who::Model) {
                    said.text.push_str(text);
                }
                state.is_news = true;
            }
        }
        Ok(())
    }

    fn end(&mut self, engine: &Engine, answer: Option<&Answer>) -> io::Result<()> {
        let end = Mark::now(&self.meters);
        let mut state = self.board.lock();
        state.doing = Doing::Waiting;
        state.ring_slots = engine.ring_limit();
        if let Some(course) = &mut state.course {
            course.end = Some(end);
        }
        if answer.is_none() {
            state.said.retain(|said| said.who != Who::Model || !said.text.is_empty());
            state.is_news = true;
        }
        Ok(())
    }

    /// They are beside the conversation.
    fn figures(&mut self, _answer: &Answer, _display: &Display) {}
}

/// What does not change.
struct Scene {
    model: String,
    plan: Plan,
    meters: Meters,
}

/// The screen's side.
struct Screen {
    scene: Scene,
    /// What the board had last: drawing may take its time, and the engine's thread must not wait for it.
    said: Vec<Said>,
    input: Input,
    back: usize,
    /// Bytes read, of the last pictures.
    disk: VecDeque<(Instant, u64)>,
    routes: RouteSnapshot,
    heat: Heat,
    mono: bool,
}

/// What an event asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asked {
    Nothing,
    Leave,
}

impl Screen {
    fn new(scene: Scene) -> Self {
        let routes = scene.meters.routes.snapshot();
        let heat = Heat { experts: routes.n_experts(), values: vec![0.0; routes.layers().flatten().count()] };
        Self {
            scene,
            said: Vec::new(),
            input: Input::default(),
            back: 0,
            disk: VecDeque::with_capacity(RATE_FRAMES + 1),
            routes,
            heat,
            mono: std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty()),
        }
    }

    fn run(mut self, board: &Board, lines: &Sender<String>) -> io::Result<()> {
        // Restores the terminal when a thread panics, too.
        let mut terminal = ratatui::try_init()?;
        let _restored = Restored;
        interrupt::before_exit(restore);
        // The handler of signals from outside; Ctrl-C is a key here.
        interrupt::fresh();
        execute!(io::stdout(), EnableBracketedPaste)?;
        while !board.talk_is_over.load(Ordering::Relaxed) {
            self.watch();
            let (gauges, question) = self.look(board);
            let view = View {
                said: &self.said,
                input: &self.input,
                back: self.back,
                question: question.as_deref(),
                gauges: &gauges,
                heat: &self.heat,
                mono: self.mono,
            };
            let mut beyond = 0;
            terminal.draw(|frame| beyond = view::draw(frame, &view))?;
            self.back = self.back.min(beyond);
            let mut patience = FRAME;
            while event::poll(patience)? {
                if self.event(event::read()?, board, lines) == Asked::Leave {
                    return Ok(());
                }
                // What is typed is seen at once; what is pasted or held down, together.
                patience = Duration::ZERO;
            }
            // A signal from outside, while nothing is there to be stopped.
            if interrupt::flag().load(Ordering::Relaxed) && board.lock().doing == Doing::Waiting {
                return Ok(());
            }
        }
        Ok(())
    }

    fn event(&mut self, event: Event, board: &Board, lines: &Sender<String>) -> Asked {
        match event {
            Event::Key(key) if key.kind != KeyEventKind::Release => return self.key(key, board, lines),
            Event::Paste(text) => self.input.insert(&text),
            _ => {}
        }
        Asked::Nothing
    }

    fn key(&mut self, key: KeyEvent, board: &Board, lines: &Sender<String>) -> Asked {
        let waiting = board.lock().doing == Doing::Waiting;
        let control = key.modifiers.contains(KeyModifiers::CONTROL);
        match key.code {
            KeyCode::Char('c') if control && !waiting => interrupt::press(),
            KeyCode::Char('c') if control && !self.input.is_empty() => self.input.clear(),
            KeyCode::Char('c' | 'd') if control && waiting && self.input.is_empty() => return Asked::Leave,
            KeyCode::PageUp => self.back += PAGE,
            KeyCode::PageDown => self.back = self.back.saturating_sub(PAGE),
            _ => {
                if let Typed::Sent(line) = self.input.key(key, waiting) {
                    self.back = 0;
                    // Whoever would have read it is about to say that all is over.
                    let _ = lines.send(line);
                }
            }
        }
        Asked::Nothing
    }

    /// Takes note of what the meters say since the last picture.
    fn watch(&mut self) {
        let meters = &self.scene.meters;
        self.disk.push_back((Instant::now(), meters.store.snapshot().disk_bytes));
        if self.disk.len() > RATE_FRAMES {
            self.disk.pop_front();
        }
        let routes = meters.routes.snapshot();
        let news = routes.since(&self.routes);
        let uses: u64 = news.layers().flatten().sum();
        if uses > 0 {
            let per_token = self.heat.values.len() / self.heat.experts.max(1) * news.top_k();
            let fade = 0.5_f64.powf(uses as f64 / per_token.max(1) as f64 / HALF_LIFE) as f32;
            for (value, uses) in self.heat.values.iter_mut().zip(news.layers().flatten()) {
                *value = *value * fade + *uses as f32;
            }
        }
        self.routes = routes;
    }

    /// Takes from the board what is drawn.
    fn look(&mut self, board: &Board) -> (Gauges, Option<String>) {
        let mut state = board.lock();
        if std::mem::take(&mut state.is_news) {
            self.said.clone_from(&state.said);
        }
        (self.gauges(&state), state.question.clone())
    }

    fn gauges(&self, state: &State) -> Gauges {
        let Scene { model, plan, meters } = &self.scene;
        let now = Mark::now(meters);
        let course = state.course;
        let end = course.and_then(|course| course.end).unwrap_or(now);
        let first = course.and_then(|course| course.first);
        let decode = first.map(|first| first.until(&end)).unwrap_or_default();
        // Until the first token there is only the prompt to speak of.
        let all = course.map(|course| course.start.until(&end)).unwrap_or_default();
        let shown = if decode.phases.steps() > 0 { decode } else { all };
        let rate = match (self.disk.front(), self.disk.back()) {
            (Some(old), Some(new)) if new.0 > old.0 => {
                new.1.saturating_sub(old.1) as f64 / (new.0 - old.0).as_secs_f64()
            }
            _ => 0.0,
        };
        let total = now.store;
        let held = total.loads.saturating_sub(total.evictions) as usize;
        Gauges {
            model: model.clone(),
            doing: state.doing,
            elapsed: course.map(|course| course.start.until(&end).time),
            first_token: course.zip(first).map(|(course, first)| course.start.until(&first).time),
            tokens: course.map_or(0, |course| course.tokens),
            rate: decode.rate(),
            phases_ms: Phase::ALL
                .map(|phase| decode.per_step(decode.phases.phase_ns(phase)).unwrap_or(0.0) / 1e6),
            hit_rate: shown.store.hit_rate(),
            disk_bytes_per_s: rate,
            disk_bytes_per_token: decode.per_step(decode.store.disk_bytes),
            ring: (held, state.ring_slots),
            ring_bytes: state.ring_slots as u64 * plan.slot_bytes,
            context: (state.context, plan.context),
            memory: (machine::rss_bytes(), plan.total_bytes()),
        }
    }
}

struct Restored;

impl Drop for Restored {
    fn drop(&mut self) {
        restore();
    }
}

fn restore() {
    // A terminal that is gone needs no restoring.
    let _ = execute!(io::stdout(), DisableBracketedPaste);
    ratatui::restore();
}
