//! One answer: prompt in, text out as it comes, figures at the end.

use std::fmt;
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use smoe_engine::plan::Bytes;
use smoe_engine::{Control, Engine, EngineError, Finish, Limits, Sampler, Session, Synced};
use smoe_meter::StoreSnapshot;
use smoe_text::{Detokeniser, StopMatcher, Tokenizer};

use crate::failure::Failure;
use crate::instrument::{Instrument, Reading};
use crate::interrupt;

/// What an answer is made with.
pub struct Asker<'a> {
    /// The engine.
    pub engine: &'a mut Engine,
    /// The conversation.
    pub session: &'a mut Session,
    /// Draws the tokens.
    pub sampler: &'a mut Sampler,
    /// Turns tokens into text; without it only ids come out.
    pub tokenizer: Option<&'a Tokenizer>,
    /// Special tokens are told as text too.
    pub markup: bool,
    /// When it ends.
    pub limits: &'a Limits,
    /// Texts that end it.
    pub stops: &'a [String],
}

/// An answer and its figures.
#[derive(Debug)]
pub struct Answer {
    /// The text that was emitted.
    pub text: String,
    /// Why it ended.
    pub finish: Finish,
    /// Ctrl-C ended it.
    pub interrupted: bool,
    /// What it cost.
    pub figures: Figures,
    /// What it cost, and why.
    pub reading: Reading,
}

/// A part of an answer, as soon as it is final, or the way to it.
#[derive(Debug, Clone, Copy)]
pub enum Piece<'a> {
    /// Tokens of the prompt that are done, of those to do.
    Prompt {
        /// Done.
        done: usize,
        /// To do.
        total: usize,
    },
    /// A new token.
    Token {
        /// Its id.
        id: u32,
        /// It is the answer's first.
        first: bool,
    },
    /// Text.
    Text(&'a str),
}

/// What an answer cost.
#[derive(Debug, Clone, Copy)]
pub struct Figures {
    /// Prompt tokens reused and computed.
    pub synced: Synced,
    /// Time to the first token.
    pub first: Duration,
    /// New tokens.
    pub tokens: usize,
    /// Time from the first token to the last.
    pub rest: Duration,
    /// The store's counters of this answer.
    pub store: StoreSnapshot,
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rate = |n: usize, time: Duration| n as f64 / time.as_secs_f64().max(1e-9);
        let Synced { reused, prefilled } = self.synced;
        write!(
            f,
            "prompt {prefilled} tokens (+{reused} reused), first token after {:.2} s ({:.1} tok/s)",
            self.first.as_secs_f64(),
            rate(prefilled, self.first)
        )?;
        write!(f, " · answer {} tokens", self.tokens)?;
        if self.tokens > 1 {
            write!(f, ", {:.1} tok/s", rate(self.tokens - 1, self.rest))?;
        }
        match self.store.hit_rate() {
            Some(rate) => write!(f, " · expert hits {:.1} %", rate * 100.0)?,
            None => write!(f, " · no experts asked for")?,
        }
        write!(f, " · {} read", Bytes(self.store.disk_bytes))
    }
}

impl Asker<'_> {
    /// Computes the prompt and generates, handing text on as soon as it is final.
    ///
    /// Ctrl-C ends the answer and keeps what there is; during the prompt it is [`Failure::Interrupted`].
    /// When a read fails, what was held back is handed on before the error is returned.
    pub fn answer(
        &mut self,
        prompt: &[u32],
        emit: &mut dyn FnMut(Piece<'_>) -> std::io::Result<()>,
    ) -> Result<Answer, Failure> {
        let flag = interrupt::fresh();
        let before = self.engine.store_snapshot();
        let mut instrument = Instrument::new(self.engine);
        let start = Instant::now();
        // Whoever cannot be told of progress cannot be told of tokens either, and that is noticed.
        let mut on_progress = |done: usize, total: usize| {
            let _ = emit(Piece::Prompt { done, total });
        };
        let mut control =
            Control { cancel: Some(flag), progress: Some(&mut on_progress), ..Control::default() };
        let synced = self.engine.sync(self.session, prompt, &mut control).map_err(|e| match e {
            EngineError::Cancelled => {
                interrupt::take();
                Failure::Interrupted
            }
            e => e.into(),
        })?;

        self.sampler.begin(prompt);
        let mut detokeniser = self.tokenizer.map(|tokenizer| Detokeniser::new(tokenizer, !self.markup));
        let mut matcher = StopMatcher::new(self.stops.to_vec());
        let (mut tokens, mut text) = (Vec::new(), String::new());
        let mut first = None;
        let mut failed = None;
        let end_tokens = &self.limits.end_tokens;
        let mut on_token = |token: u32| {
            first.get_or_insert_with(|| start.elapsed());
            instrument.first_token();
            let told = emit(Piece::Token { id: token, first: tokens.is_empty() });
            tokens.push(token);
            let told = told.and_then(|()| match &mut detokeniser {
                Some(detokeniser) if !end_tokens.contains(&token) => {
                    let step = matcher.push(&detokeniser.push(token));
                    text.push_str(&step.emit);
                    emit(Piece::Text(&step.emit))
                }
                _ => Ok(()),
            });
            match told {
                Ok(()) if matcher.stopped().is_none() => ControlFlow::Continue(()),
                Ok(()) => ControlFlow::Break(()),
                Err(error) => {
                    failed = Some(error);
                    ControlFlow::Break(())
                }
            }
        };
        let mut control = Control::cancelled_by(flag);
        let finish =
            self.engine.generate(self.session, self.sampler, self.limits, &mut control, &mut on_token);
        let total = start.elapsed();
        let reading = instrument.finish(self.engine, synced);
        let interrupted = interrupt::take();
        if let Some(error) = failed {
            return Err(error.into());
        }
        if let Some(detokeniser) = &mut detokeniser
            && matcher.stopped().is_none()
        {
            let mut rest = matcher.push(&detokeniser.finish()).emit;
            if matcher.stopped().is_none() {
                rest.push_str(&matcher.finish());
            }
            text.push_str(&rest);
            emit(Piece::Text(&rest))?;
        }
        let finish = finish?;
        while let Some(warning) = self.engine.take_warning() {
            eprintln!("warning: {warning}");
        }
        let first = first.unwrap_or(total);
        let figures = Figures {
            synced,
            first,
            tokens: tokens.len(),
            rest: total.saturating_sub(first),
            store: self.engine.store_snapshot() - before,
        };
        Ok(Answer { text, finish, interrupted, figures, reading })
    }
}
