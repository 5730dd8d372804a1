//! `smoe chat`: turn by turn at a terminal.
//!
//! The whole conversation is rendered anew each turn, as the model's own template has it; the session keeps
//! what it already holds of it, so a turn costs its new tokens only.

mod body;
mod cells;
mod connect;
mod conversation;
mod markdown;
mod monitor;
mod retold;
mod screen;
mod show;
mod terminal;

use std::io::{self, IsTerminal};

use smoe_engine::{Engine, Finish, Limits, Sampler, Session};
use smoe_text::{ChatTemplate, ModelText, ReplyFormat, ReplyParser, Tokenizer};

use crate::answer::{Answer, Asker, Figures, Piece};
use crate::args::ChatArgs;
use crate::failure::Failure;
use crate::instrument::{Display, panel};
use crate::{model, run, warmth};
use conversation::{Conversation, agree};
use retold::Retold;
use terminal::Terminal;

/// Unless it is said otherwise.
const MAX_TOKENS: usize = 4096;

const HELP: &str = "\
/reset          forget the conversation
/system TEXT    set the instructions (and forget the conversation); without TEXT, show them
/think          fold or unfold the model's reasoning
/stats          figures of the last answer and of the session
/help           this list
/quit           leave (also Ctrl-D)
Ctrl-C stops an answer and keeps what was said.";

/// Runs the command.
pub fn chat(args: &ChatArgs) -> Result<(), Failure> {
    if let Some(url) = &args.connect {
        return connect::chat(url, args);
    }
    let Some(path) = &args.vault else {
        return Err(Failure::Usage("name a vault, or a server with --connect".to_owned()));
    };
    let vault = model::open_vault(path)?;
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
        format: text.reply_format(),
        sampler,
        session,
        conversation: Conversation::new(args.system.clone()),
        max_tokens: args.max_tokens.unwrap_or(MAX_TOKENS),
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
        let watched = (engine.meters(), engine.info().plan.context);
        Terminal::new(args.plain, Some(watched))
            .and_then(|mut face| talk.converse(&mut engine, &mut face, &mut display))
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
    /// How to read the answer that has begun.
    fn reply(&mut self, _parser: ReplyParser) {}
    /// Folds reasoning, or unfolds it.
    fn think(&mut self) -> io::Result<()> {
        self.note("reasoning is shown as it is written");
        Ok(())
    }
}

struct Talk<'a> {
    text: &'a ModelText,
    tokenizer: &'a Tokenizer,
    template: &'a ChatTemplate,
    format: ReplyFormat,
    sampler: Sampler,
    session: Session,
    conversation: Conversation,
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
                "/stats" => face.note(&self.stats(engine)),
                _ if self.conversation.command(command, rest, face)? => {}
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
        asked: &str,
    ) -> Result<(), Failure> {
        self.conversation.ask(asked);
        let (answer, said) = match self.answer(engine, face) {
            Ok(Some(answer)) => answer,
            Ok(None) => {
                self.conversation.take_back();
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
                self.conversation.take_back();
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
        self.conversation.answer(&said);
        self.answered += 1;
        self.last = Some(answer.figures);
        Ok(())
    }

    /// The answer to the conversation as it stands, and what it says; `None` if it does not fit and the user would not
    /// drop.
    fn answer(
        &mut self,
        engine: &mut Engine,
        face: &mut dyn Face,
    ) -> Result<Option<(Answer, String)>, Failure> {
        let context = engine.info().plan.context;
        let (rendered, prompt) = loop {
            let (rendered, prompt) = self.prompt()?;
            // An answer wants room too, but a short one is better than none.
            if prompt.len() < context {
                break (rendered, prompt);
            }
            let needed = prompt.len();
            if self.conversation.is_one_question() {
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
            self.conversation.drop_oldest();
        };
        let limits = Limits { max_tokens: self.max_tokens, end_tokens: self.text.end_tokens.clone() };
        face.begin(prompt.len());
        let marked = self.format.reasons_in_special_tokens(self.tokenizer);
        let mut retold = marked.then(|| Retold::new(&self.format, &rendered));
        // It was offered no tools: what looks like a call is text.
        face.reply(match marked {
            true => ReplyParser::new(&Retold::format(), &[], ""),
            false => ReplyParser::new(&self.format, &[], &rendered),
        });
        let answer = Asker {
            engine,
            session: &mut self.session,
            sampler: &mut self.sampler,
            tokenizer: Some(self.tokenizer),
            markup: marked,
            limits: &limits,
            stops: &[],
        }
        .answer(&prompt, &mut |piece| match (piece, &mut retold) {
            (Piece::Text(text), Some(retold)) => face.piece(Piece::Text(&retold.push(text))),
            (piece, _) => face.piece(piece),
        })?;
        let Some(mut retold) = retold else {
            let said = answer.text.clone();
            return Ok(Some((answer, said)));
        };
        face.piece(Piece::Text(&retold.finish()))?;
        Ok(Some((answer, retold.answer().to_owned())))
    }

    /// The conversation as the template has it, and its tokens.
    fn prompt(&self) -> Result<(String, Vec<u32>), Failure> {
        let rendered = self.template.render(&run::conversation(self.text, self.conversation.messages()))?;
        let tokens = self.tokenizer.encode(&rendered)?;
        Ok((rendered, tokens))
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
