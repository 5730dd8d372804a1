//! From tokens to scores: one or two models in step.

use std::sync::atomic::AtomicBool;
use std::thread;

use indicatif::ProgressBar;
use smoe_engine::{Control, Engine, EngineError};
use smoe_meter::fidelity::{Fidelity, TokenScore};

/// Bytes that the reference's logits of a chunk may take.
const HELD: u64 = 256 << 20;
/// Rows scored together, on all cores.
const BATCH: usize = 32;

/// Why a window has no scores.
pub enum Error {
    Engine(EngineError),
    /// Logits that are no numbers; of which model, and before which token of the window.
    NoNumber {
        model: usize,
        token: usize,
    },
}

impl From<EngineError> for Error {
    fn from(error: EngineError) -> Self {
        Self::Engine(error)
    }
}

/// One or two engines at work, the second one the reference.
pub struct Scorer<'a> {
    engines: &'a mut [Engine],
    top_k: usize,
    cancel: &'a AtomicBool,
    bar: &'a ProgressBar,
    /// Tokens computed, by all.
    computed: u64,
    /// Tokens of a step.
    chunk: usize,
    vocab_size: usize,
    /// The reference's rows of a chunk that count.
    reference: Vec<f32>,
    batch: Batch,
}

/// Rows that wait to be scored.
#[derive(Default)]
struct Batch {
    rows: Vec<f32>,
    /// The token that follows each, and its place in the window.
    tokens: Vec<(u32, usize)>,
}

/// Rows of a vocabulary that [`HELD`] has room for.
const fn held_rows(vocab_size: usize) -> usize {
    let rows = (HELD / (4 * vocab_size as u64 + 1)) as usize;
    if rows > BATCH { rows } else { BATCH }
}

impl<'a> Scorer<'a> {
    /// Bytes that it holds.
    pub fn bytes(vocab_size: usize, reference: bool) -> u64 {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        // Of each core two rows of logarithms in f64.
        let rows = BATCH + 4 * cores + if reference { held_rows(vocab_size) } else { 0 };
        4 * (rows * vocab_size) as u64
    }

    /// `engines` are the one that is evaluated and, maybe, the reference.
    pub fn new(
        engines: &'a mut [Engine],
        top_k: usize,
        cancel: &'a AtomicBool,
        bar: &'a ProgressBar,
    ) -> Self {
        let vocab_size = engines[0].spec().vocab_size;
        let mut chunk = engines.iter().map(|engine| engine.info().plan.chunk).min().unwrap_or(1);
        if engines.len() > 1 {
            chunk = chunk.min(held_rows(vocab_size));
        }
        let (reference, batch) = (Vec::new(), Batch::default());
        Self { engines, top_k, cancel, bar, computed: 0, chunk, vocab_size, reference, batch }
    }

    /// Computes `tokens` from an empty context and adds the scores of those that count; the first never does.
    pub fn window(&mut self, tokens: &[u32], counts: &[bool], fidelity: &mut Fidelity) -> Result<(), Error> {
        let mut sessions = Vec::new();
        for engine in &mut *self.engines {
            sessions.push([engine.open_session()?]);
        }
        let mut start = 0;
        for chunk in tokens.chunks(self.chunk) {
            let end = start + chunk.len();
            // The row of token i tells what comes at i + 1.
            let counting = |i: usize| counts.get(i + 1) == Some(&true);
            let first = (start..end).find(|&i| counting(i)).unwrap_or(end);
            self.reference.clear();
            for model in (0..sessions.len()).rev() {
                sessions[model][0].queue(chunk, end - first);
                let (bar, computed) = (self.bar, self.computed);
                let mut progress = |done: usize, _: usize| bar.set_position(computed + done as u64);
                let mut control =
                    Control { cancel: Some(self.cancel), progress: Some(&mut progress), stop: None };
                let Self { engines, reference, batch, vocab_size, top_k, .. } = self;
                let (vocab_size, top_k) = (*vocab_size, *top_k);
                let mut failed = None;
                let mut scored = 0;
                engines[model].step(&mut sessions[model], &mut control, &mut |_, row, logits| {
                    let token = first + row + 1;
                    if !counting(token - 1) {
                        return;
                    }
                    if model == 1 {
                        reference.extend_from_slice(logits);
                        return;
                    }
                    batch.rows.extend_from_slice(logits);
                    batch.tokens.push((tokens[token], token));
                    if batch.tokens.len() == BATCH && failed.is_none() {
                        let of = reference.get(scored * vocab_size..).unwrap_or_default();
                        scored += BATCH;
                        failed = batch.score(of, top_k, fidelity).err();
                    }
                })?;
                if model == 0 && failed.is_none() {
                    let of = self.reference.get(scored * vocab_size..).unwrap_or_default();
                    failed = self.batch.score(of, top_k, fidelity).err();
                }
                if let Some(error) = failed {
                    return Err(error);
                }
                self.computed += chunk.len() as u64;
                self.bar.set_position(self.computed);
            }
            start = end;
        }
        Ok(())
    }
}

impl Batch {
    /// Scores all rows, against those of `reference` if there are any, and adds them in their order.
    fn score(&mut self, reference: &[f32], top_k: usize, fidelity: &mut Fidelity) -> Result<(), Error> {
        let Some(width) = self.rows.len().checked_div(self.tokens.len()) else { return Ok(()) };
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let share = self.tokens.len().div_ceil(cores);
        let score = |i: usize| {
            let row = i * width..(i + 1) * width;
            let (q, token) = (&self.rows[row.clone()], self.tokens[i].0);
            match reference.get(row) {
                Some(p) => TokenScore::against(q, p, token, top_k),
                None => TokenScore::alone(q, token),
            }
        };
        let scores: Vec<TokenScore> = thread::scope(|scope| {
            let workers: Vec<_> = (0..self.tokens.len())
                .step_by(share)
                .map(|first| {
                    let last = (first + share).min(self.tokens.len());
                    scope.spawn(move || (first..last).map(score).collect::<Vec<_>>())
                })
                .collect();
            workers.into_iter().flat_map(|worker| worker.join().expect("scoring does not panic")).collect()
        });
        for (score, &(_, token)) in scores.iter().zip(&self.tokens) {
            if !score.nll.is_finite() {
                return Err(Error::NoNumber { model: 0, token });
            }
            if score.against.is_some_and(|against| !against.nll.is_finite()) {
                return Err(Error::NoNumber { model: 1, token });
            }
            fidelity.add(score);
        }
        self.rows.clear();
        self.tokens.clear();
        Ok(())
    }
}
