//! From logits to figures.

use smoe_engine::{Engine, Observer};
use smoe_meter::fidelity::{DocumentMean, argmax, kl_of_logs, log_softmax};

use crate::Result;

/// The logits of a text.
pub struct Logits {
    vocab_size: usize,
    values: Vec<f32>,
}

impl Logits {
    pub const fn new(vocab_size: usize) -> Self {
        Self { vocab_size, values: Vec::new() }
    }

    pub fn compute(&mut self, engine: &mut Engine, tokens: &[u32]) -> Result<()> {
        self.values.clear();
        self.values.resize(tokens.len() * self.vocab_size, f32::NAN);
        engine.observe(tokens, self)?;
        Ok(())
    }

    fn row(&self, position: usize) -> &[f32] {
        &self.values[position * self.vocab_size..][..self.vocab_size]
    }
}

impl Observer for Logits {
    fn hidden(&mut self, _: usize, _: usize, _: &[f32]) {}

    fn router(&mut self, _: usize, _: usize, _: &[f32]) {}

    fn logits(&mut self, first: usize, rows: &[f32]) {
        let start = first * self.vocab_size;
        self.values[start..start + rows.len()].copy_from_slice(rows);
    }
}

/// What the 16-bit model says of a text.
pub struct Reference {
    /// By position, but for the last.
    positions: Vec<Position>,
}

struct Position {
    /// The token that follows.
    next: usize,
    /// Log-probabilities and most likely token, where the next token is of an answer.
    answer: Option<(Vec<f64>, usize)>,
}

impl Reference {
    pub fn new(logits: &Logits, tokens: &[u32], answer: &[bool]) -> Self {
        let positions = (1..tokens.len())
            .map(|next| {
                let row = logits.row(next - 1);
                let said = answer[next].then(|| (log_softmax(row), argmax(row)));
                Position { next: tokens[next] as usize, answer: said }
            })
            .collect();
        Self { positions }
    }
}

/// Figures over answer tokens of some texts.
#[derive(Debug, Default)]
pub struct Answers {
    pub nll: DocumentMean,
    pub kl: DocumentMean,
    pub top1: DocumentMean,
}

impl Answers {
    fn begin(&mut self) {
        for mean in [&mut self.nll, &mut self.kl, &mut self.top1] {
            mean.begin();
        }
    }

    fn add(&mut self, score: &AnswerScore) {
        self.nll.add(score.nll);
        self.kl.add(score.kl);
        self.top1.add(f64::from(u8::from(score.top1)));
    }
}

/// The figures of a recipe.
#[derive(Debug, Default)]
pub struct Scores {
    /// All texts.
    pub answers: Answers,
    /// Those that calibrate nothing.
    pub apart: Answers,
    /// Negative log-likelihood of every token from the second on.
    pub all_nll: DocumentMean,
}

struct AnswerScore {
    nll: f64,
    kl: f64,
    top1: bool,
}

impl Scores {
    /// Adds a text, which calibrated nothing if it is `apart`.
    pub fn add(&mut self, apart: bool, reference: &Reference, logits: &Logits) {
        self.all_nll.begin();
        self.answers.begin();
        if apart {
            self.apart.begin();
        }
        for (nll, answer) in scores(reference, logits) {
            self.all_nll.add(nll);
            let Some(answer) = answer else { continue };
            self.answers.add(&answer);
            if apart {
                self.apart.add(&answer);
            }
        }
    }
}

/// The scores of all positions in order, computed on all cores.
fn scores(reference: &Reference, logits: &Logits) -> Vec<(f64, Option<AnswerScore>)> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let share = reference.positions.len().div_ceil(cores).max(1);
    std::thread::scope(|scope| {
        let workers: Vec<_> = reference
            .positions
            .chunks(share)
            .enumerate()
            .map(|(worker, positions)| {
                scope.spawn(move || {
                    let rows = positions.iter().enumerate();
                    rows.map(|(i, position)| score(position, logits.row(worker * share + i)))
                        .collect::<Vec<_>>()
                })
            })
            .collect();
        workers.into_iter().flat_map(|worker| worker.join().expect("scoring does not panic")).collect()
    })
}

fn score(position: &Position, row: &[f32]) -> (f64, Option<AnswerScore>) {
    let q = log_softmax(row);
    let nll = -q[position.next];
    let answer = position.answer.as_ref().map(|(p, top)| AnswerScore {
        nll,
        kl: kl_of_logs(p, &q),
        top1: argmax(row) == *top,
    });
    (nll, answer)
}
