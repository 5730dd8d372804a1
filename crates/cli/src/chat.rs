//! `smoe chat`: turn by turn at a terminal.
//!
//! The whole conversation is rendered anew each turn, as the model's own template has it; the session keeps
//! what it already holds of it, so a turn costs its new tokens only.

use std::io::{self, BufRead, IsTerminal, Write};
use std::path::PathBuf;

use rustyline::error::ReadlineError;
use rustyline::history::DefaultHistory;
use rustyline::{Config, Editor};
use serde_json::{Value, json};
use smoe_engine::{Engine, Finish, Limits, Sampler, Session};
use smoe_text::{ChatTemplate, ModelText, Tokenizer};

use crate::answer::{Answer, Asker, Figures, Piece};
use crate::args::ChatArgs;
use crate::failure::Failure;
use crate::instrument::{Display, panel};
use crate::progress::Prefill;
use crate::{model, run, warmth};

const HELP: &str = "\
/reset          forget the conversation
/system TEXT    set the instructions (and forget the conversation); without TEXT, show them
/stats          figures of the last answer and of the session
/help           this list
/quit           leave (also Ctrl-D)
Ctrl-C stops an answer and keeps what was said.";

/// Runs the command.
pub fn chat(args: &ChatArgs) -> Result<(), Failure> {
    let vault = model::open_vault(&args.vault)?;
    let text = model::open_text(&vault)?;
    let (Some(tokenizer), Some(template)) = (&text.tokenizer, &text.chat_template) else {
        return Err(Failure::new(
            "this vault has no tokenizer or no chat template: `smoe run --no-template` or --tokens-in serve it",
        ));
    };
    let mut engine = model::open_engine(&vault, &args.machine, model::text_bytes(&vault))?;
    let settings = args.sampling.settings(&text.defaults);
    let sampler = Sampler::new(settings, engine.spec().vocab_size)?;
    let session = engine.open_session()?;
    let mut display = Display::begin(&args.instrument, &mut engine)?;
    let mut talk = Talk {
        text: &text,
        tokenizer,
        template,
        sampler,
        session,
        turns: Vec::new(),
        system: args.system.clone(),
        max_tokens: args.max_tokens,
        last: None,
        answered: 0,
    };
    let at_terminal = io::stdin().is_terminal() && io::stdout().is_terminal();
    if args.panel && !at_terminal {
        eprintln!("note: --panel needs a terminal for input and output: talking line by line");
    }
    warmth::prewarm(&mut engine, &vault);
    let talked = if args.panel && at_terminal {
        panel::show(&mut engine, |engine, face| talk.converse(engine, face, &mut display))
    } else {
        Terminal::new().and_then(|mut face| talk.converse(&mut engine, &mut face, &mut display))
    };
    warmth::keep(&engine, &vault);
    display.end(&mut engine)?;
    talked
}

/// Where a conversation is held: line by line at a terminal or a pipe, or in the panel.
pub trait Face {
    /// Somebody is there to be asked.
    fn is_interactive(&self) -> bool;
    /// What is said next; `None` at the end.
    fn next(&mut self) -> Result<Option<String>, Failure>;
    /// The reply to a question.
    fn ask(&mut self, question: &str) -> Result<Option<String>, Failure>;
    /// Something that is not part of the conversation.
    fn note(&mut self, text: &str);
    /// An answer begins, to so many tokens.
    fn begin(&mut self, prompt_tokens: usize);
    /// A part of it.
    fn piece(&mut self, piece: Piece<'_>) -> io::Result<()>;
    /// It is over; `None` if it failed.
    fn end(&mut self, engine: &Engine, answer: Option<&Answer>) -> io::Result<()>;
    /// What it cost, after what there is to say of its end.
    fn figures(&mut self, answer: &Answer, display: &Display);
}

struct Talk<'a> {
    text: &'a ModelText,
    tokenizer: &'a Tokenizer,
    template: &'a ChatTemplate,
    sampler: Sampler,
    session: Session,
    /// Messages of user and assistant.
    turns: Vec<Value>,
    system: Option<String>,
    max_tokens: usize,
    last: Option<Figures>,
    answered: usize,
}

impl Talk<'_> {
    fn converse(
        &mut self,
        engine: &mut Engine,
        face: &mut dyn Face,
        display: &mut Display,
    ) -> Result<(), Failure> {
        if face.is_interactive() {
            let model = &engine.spec().model_type;
            let context = engine.info().plan.context;
            face.note(&format!("{model}, context of {context} positions. /help lists commands."));
        }
        while let Some(line) = face.next()? {
            let line = line.trim();
            if line.is_empty() {
                continue;
            }
            let (command, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
            match command {
                "/quit" | "/exit" => break,
                "/help" => face.note(HELP),
                "/reset" => {
                    self.turns.clear();
                    face.note("forgotten");
                }
                "/system" if rest.is_empty() => {
                    face.note(self.system.as_deref().unwrap_or("no instructions"));
                }
                "/system" => {
                    self.system = Some(rest.trim().to_owned());
                    self.turns.clear();
                    face.note("instructions set, conversation forgotten");
                }
                "/stats" => face.note(&self.stats(engine)),
                _ if command.starts_with('/') => face.note("no such command; /help lists them"),
                _ => self.turn(engine, face, display, line)?,
            }
        }
        Ok(())
    }

    fn turn(
        &mut self,
        engine: &mut Engine,
        face: &mut dyn Face,
        display: &mut Display,
        said: &str,
    ) -> Result<(), Failure> {
        self.turns.push(json!({"role": "user", "content": said}));
        let answer = match self.answer(engine, face) {
            Ok(Some(answer)) => answer,
            Ok(None) => {
                self.turns.pop();
                return Ok(());
            }
            Err(failure) => {
                // The conversation outlives a failed answer: the next one asks for the expert again.
                face.end(engine, None)?;
                match failure {
                    Failure::Interrupted => {
                        face.note("stopped before the first token; what was computed is kept");
                    }
                    failure => face.note(&format!("error: {failure}")),
                }
                self.turns.pop();
                return Ok(());
            }
        };
        face.end(engine, Some(&answer))?;
        match answer.finish {
            Finish::Stopped => face.note("[stopped]"),
            Finish::Length => face.note(&format!("[the limit of {} tokens]", self.max_tokens)),
            Finish::ContextFull => {
                face.note("[the context is full: /reset, or go on and drop older turns]");
            }
            Finish::End => {}
        }
        display.keep(&answer);
        face.figures(&answer, display);
        self.turns.push(json!({"role": "assistant", "content": answer.text.clone()}));
        self.answered += 1;
        self.last = Some(answer.figures);
        Ok(())
    }

    /// The answer to the conversation as it stands; `None` if it does not fit and the user would not drop.
    fn answer(&mut self, engine: &mut Engine, face: &mut dyn Face) -> Result<Option<Answer>, Failure> {
        let context = engine.info().plan.context;
        let prompt = loop {
            let prompt = self.prompt()?;
            // An answer wants room too, but a short one is better than none.
            if prompt.len() < context {
                break prompt;
            }
            let needed = prompt.len();
            if self.turns.len() <= 1 {
                face.note(&format!(
                    "this message alone needs {needed} of {context} positions: shorten it, or raise --context"
                ));
                return Ok(None);
            }
            face.note(&format!(
                "the context is full: the conversation needs {needed} of {context} positions"
            ));
            if !(face.is_interactive() && agree(face, "drop the oldest turn? [Y/n] ")?) {
                face.note("kept; /reset forgets the conversation");
                return Ok(None);
            }
            // A turn is a question and its answer.
            let next = self.turns.iter().skip(1).position(|turn| turn["role"] == "user");
            self.turns.drain(..next.map_or(1, |i| i + 1));
        };
        let limits = Limits { max_tokens: self.max_tokens, end_tokens: self.text.end_tokens.clone() };
        face.begin(prompt.len());
        Asker {
            engine,
            session: &mut self.session,
            sampler: &mut self.sampler,
            tokenizer: Some(self.tokenizer),
            limits: &limits,
            stops: &[],
        }
        .answer(&prompt, &mut |piece| face.piece(piece))
        .map(Some)
    }

    fn prompt(&self) -> Result<Vec<u32>, Failure> {
        let mut messages = Vec::new();
        messages.extend(self.system.as_ref().map(|text| json!({"role": "system", "content": text})));
        messages.extend(self.turns.iter().cloned());
        let rendered = self.template.render(&run::conversation(self.text, messages))?;
        Ok(self.tokenizer.encode(&rendered)?)
    }

    fn stats(&self, engine: &Engine) -> String {
        let info = engine.info();
        let last = self.last.map_or_else(|| "none yet".to_owned(), |figures| figures.to_string());
        let phases = engine.phase_snapshot();
        let total = phases.total_ns().max(1) as f64;
        let shares: Vec<String> = smoe_meter::Phase::ALL
            .into_iter()
            .map(|phase| format!("{} {:.0} %", phase.name(), 100.0 * phases.phase_ns(phase) as f64 / total))
            .collect();
        format!(
            "last answer  {last}\n\
             session      {} answers, {} of {} positions held\n\
             machine      {} kernels, {} threads, ring of {} of {} experts, direct I/O {}\n\
             time         {}",
            self.answered,
            self.session.len(),
            info.plan.context,
            info.kernels,
            info.plan.threads,
            info.plan.ring_slots,
            info.plan.n_experts,
            info.direct_io,
            shares.join(", ")
        )
    }
}

/// Asks until the answer is yes (or nothing) or no; the end of input is no.
fn agree(face: &mut dyn Face, question: &str) -> Result<bool, Failure> {
    loop {
        let Some(reply) = face.ask(question)? else { return Ok(false) };
        match reply.trim().to_ascii_lowercase().as_str() {
            "" | "y" | "yes" => return Ok(true),
            "n" | "no" => return Ok(false),
            _ => face.note("y or n"),
        }
    }
}

/// Lines from a terminal, with editing and history, or from a pipe; answers to stdout.
struct Terminal {
    editor: Option<Editor<(), DefaultHistory>>,
    history: Option<PathBuf>,
    interactive: bool,
    bar: Prefill,
}

impl Terminal {
    fn new() -> Result<Self, Failure> {
        let interactive = io::stdin().is_terminal();
        let mut terminal = Self { editor: None, history: None, interactive, bar: Prefill::default() };
        if interactive {
            let config = Config::builder().max_history_size(1000)?.build();
            let mut editor = Editor::with_config(config)?;
            terminal.history = history_path();
            if let Some(path) = &terminal.history {
                // None on the first run.
                let _ = editor.load_history(path);
            }
            terminal.editor = Some(editor);
        }
        Ok(terminal)
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

    fn note(&mut self, text: &str) {
        eprintln!("{text}");
    }

    fn begin(&mut self, _prompt_tokens: usize) {}

    fn piece(&mut self, piece: Piece<'_>) -> io::Result<()> {
        match piece {
            Piece::Prompt { done, total } => self.bar.at(done, total),
            Piece::Token { .. } => {}
            Piece::Text(text) => {
                let mut out = io::stdout().lock();
                out.write_all(text.as_bytes())?;
                out.flush()?;
            }
        }
        Ok(())
    }

    fn end(&mut self, _engine: &Engine, answer: Option<&Answer>) -> io::Result<()> {
        self.bar = Prefill::default();
        match answer {
            Some(_) => writeln!(io::stdout().lock()),
            None => {
                eprintln!();
                Ok(())
            }
        }
    }

    fn figures(&mut self, answer: &Answer, display: &Display) {
        display.print(answer, self.interactive);
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
