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
use crate::{model, run};

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
    talk.converse(&mut engine)
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
    fn converse(&mut self, engine: &mut Engine) -> Result<(), Failure> {
        let mut lines = Lines::new()?;
        if lines.interactive {
            let model = &engine.spec().model_type;
            eprintln!("{model}, context of {} positions. /help lists commands.", engine.info().plan.context);
        }
        while let Some(line) = lines.next("> ")? {
            let line = line.trim();
            if line.is_empty() {
                continue;
            }
            let (command, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
            match command {
                "/quit" | "/exit" => break,
                "/help" => eprintln!("{HELP}"),
                "/reset" => {
                    self.turns.clear();
                    eprintln!("forgotten");
                }
                "/system" if rest.is_empty() => {
                    eprintln!("{}", self.system.as_deref().unwrap_or("no instructions"));
                }
                "/system" => {
                    self.system = Some(rest.trim().to_owned());
                    self.turns.clear();
                    eprintln!("instructions set, conversation forgotten");
                }
                "/stats" => self.print_stats(engine),
                _ if command.starts_with('/') => eprintln!("no such command; /help lists them"),
                _ => self.turn(engine, &mut lines, line)?,
            }
        }
        Ok(())
    }

    fn turn(&mut self, engine: &mut Engine, lines: &mut Lines, said: &str) -> Result<(), Failure> {
        self.turns.push(json!({"role": "user", "content": said}));
        let answer = match self.answer(engine, lines) {
            Ok(Some(answer)) => answer,
            Ok(None) => {
                self.turns.pop();
                return Ok(());
            }
            Err(failure) => {
                // The conversation outlives a failed answer: the next one asks for the expert again.
                match failure {
                    Failure::Interrupted => {
                        eprintln!("stopped before the first token; what was computed is kept");
                    }
                    failure => eprintln!("\nerror: {failure}"),
                }
                self.turns.pop();
                return Ok(());
            }
        };
        say!();
        match answer.finish {
            Finish::Stopped => eprintln!("[stopped]"),
            Finish::Length => eprintln!("[the limit of {} tokens]", self.max_tokens),
            Finish::ContextFull => eprintln!("[the context is full: /reset, or go on and drop older turns]"),
            Finish::End => {}
        }
        if lines.interactive {
            eprintln!("{}", answer.figures);
        }
        self.turns.push(json!({"role": "assistant", "content": answer.text.clone()}));
        self.answered += 1;
        self.last = Some(answer.figures);
        Ok(())
    }

    /// The answer to the conversation as it stands; `None` if it does not fit and the user would not drop.
    fn answer(&mut self, engine: &mut Engine, lines: &mut Lines) -> Result<Option<Answer>, Failure> {
        let context = engine.info().plan.context;
        let prompt = loop {
            let prompt = self.prompt()?;
            // An answer wants room too, but a short one is better than none.
            if prompt.len() < context {
                break prompt;
            }
            if self.turns.len() <= 1 {
                let (needed, what) = (prompt.len(), "this message alone");
                eprintln!("{what} needs {needed} of {context} positions: shorten it, or raise --context");
                return Ok(None);
            }
            eprintln!("the context is full: the conversation needs {} of {context} positions", prompt.len());
            if !(lines.interactive && lines.agree("drop the oldest turn? [Y/n] ")?) {
                eprintln!("kept; /reset forgets the conversation");
                return Ok(None);
            }
            // A turn is a question and its answer.
            let next = self.turns.iter().skip(1).position(|turn| turn["role"] == "user");
            self.turns.drain(..next.map_or(1, |i| i + 1));
        };
        let limits = Limits { max_tokens: self.max_tokens, end_tokens: self.text.end_tokens.clone() };
        let mut out = io::stdout().lock();
        Asker {
            engine,
            session: &mut self.session,
            sampler: &mut self.sampler,
            tokenizer: Some(self.tokenizer),
            limits: &limits,
            stops: &[],
        }
        .answer(&prompt, &mut |piece| match piece {
            Piece::Text(text) => {
                out.write_all(text.as_bytes())?;
                out.flush()
            }
            Piece::Token { .. } => Ok(()),
        })
        .map(Some)
    }

    fn prompt(&self) -> Result<Vec<u32>, Failure> {
        let mut messages = Vec::new();
        messages.extend(self.system.as_ref().map(|text| json!({"role": "system", "content": text})));
        messages.extend(self.turns.iter().cloned());
        let rendered = self.template.render(&run::conversation(self.text, messages))?;
        Ok(self.tokenizer.encode(&rendered)?)
    }

    fn print_stats(&self, engine: &Engine) {
        let info = engine.info();
        match &self.last {
            Some(figures) => eprintln!("last answer  {figures}"),
            None => eprintln!("last answer  none yet"),
        }
        eprintln!(
            "session      {} answers, {} of {} positions held",
            self.answered,
            self.session.len(),
            info.plan.context
        );
        eprintln!(
            "machine      {} kernels, {} threads, ring of {} of {} experts, direct I/O {}",
            info.kernels, info.plan.threads, info.plan.ring_slots, info.plan.n_experts, info.direct_io
        );
        let phases = engine.phase_snapshot();
        let total = phases.total_ns().max(1) as f64;
        let shares: Vec<String> = smoe_meter::Phase::ALL
            .into_iter()
            .map(|phase| format!("{} {:.0} %", phase.name(), 100.0 * phases.phase_ns(phase) as f64 / total))
            .collect();
        eprintln!("time         {}", shares.join(", "));
    }
}

/// Lines from a terminal, with editing and history, or from a pipe.
struct Lines {
    editor: Option<Editor<(), DefaultHistory>>,
    history: Option<PathBuf>,
    interactive: bool,
}

impl Lines {
    fn new() -> Result<Self, Failure> {
        let interactive = io::stdin().is_terminal();
        if !interactive {
            return Ok(Self { editor: None, history: None, interactive });
        }
        let config = Config::builder().max_history_size(1000)?.build();
        let mut editor = Editor::with_config(config)?;
        let history = history_path();
        if let Some(path) = &history {
            // None on the first run.
            let _ = editor.load_history(path);
        }
        Ok(Self { editor: Some(editor), history, interactive })
    }

    /// The next line; `None` at the end. Ctrl-C drops the line that is being typed.
    fn next(&mut self, prompt: &str) -> Result<Option<String>, Failure> {
        let line = self.read(prompt)?;
        if let (Some(editor), Some(line)) = (&mut self.editor, &line) {
            editor.add_history_entry(line)?;
        }
        Ok(line)
    }

    /// Asks until the answer is yes (or nothing) or no; the end of input is no. Not in the history.
    fn agree(&mut self, question: &str) -> Result<bool, Failure> {
        loop {
            let Some(reply) = self.read(question)? else { return Ok(false) };
            match reply.trim().to_ascii_lowercase().as_str() {
                "" | "y" | "yes" => return Ok(true),
                "n" | "no" => return Ok(false),
                _ => eprintln!("y or n"),
            }
        }
    }

    fn read(&mut self, prompt: &str) -> Result<Option<String>, Failure> {
        let Some(editor) = &mut self.editor else {
            let mut line = Vec::new();
            io::stdin().lock().read_until(b'\n', &mut line)?;
            return Ok((!line.is_empty()).then(|| String::from_utf8_lossy(&line).into_owned()));
        };
        loop {
            match editor.readline(prompt) {
                Ok(line) => return Ok(Some(line)),
                Err(ReadlineError::Interrupted) => eprintln!("(Ctrl-D leaves)"),
                Err(ReadlineError::Eof) => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl Drop for Lines {
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
