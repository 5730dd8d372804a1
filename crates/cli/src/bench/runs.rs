//! The canonical runs: the same tokens on every machine, prompts and answers alike.
//!
//! Tokens are drawn from a seed, when decoding too: the model's own greedy tokens soon repeat themselves, and
//! with them their experts, which flatters any cache.

use std::time::{Duration, Instant};

use smoe_engine::{Control, Engine, Session};
use smoe_meter::{PhaseSnapshot, RouteSnapshot, StoreSnapshot};
use smoe_sculpt::token_stream;

use crate::failure::Failure;
use crate::interrupt;

/// Tokens of the canonical prompt and of a further turn.
pub const PROMPT: usize = 45;
/// Tokens decoded at a time.
pub const DECODE: usize = 64;
/// Lengths of the prefills.
pub const PREFILLS: [usize; 3] = [64, 512, 2048];

/// A stretch of work, measured.
#[derive(Clone, Copy, Debug)]
pub struct Stretch {
    /// Tokens computed.
    pub tokens: usize,
    /// Wall time.
    pub time: Duration,
    /// The store's counters over it.
    pub store: StoreSnapshot,
    /// Time by phase over it.
    pub phases: PhaseSnapshot,
}

impl Stretch {
    /// Tokens per second.
    pub fn rate(&self) -> f64 {
        self.tokens as f64 / self.time.as_secs_f64()
    }
}

/// One run of everything.
#[derive(Clone, Debug)]
pub struct Run {
    /// Time to the first token of the canonical prompt, no expert in memory (all of them if all fit).
    pub cold: Stretch,
    /// Time to the first token of a further turn.
    pub warm: Stretch,
    /// Decoding after the canonical prompt.
    pub short: Stretch,
    /// Decoding after the longest prefill.
    pub long: Option<Stretch>,
    /// The prefills that the context has room for, each from no expert in memory.
    pub prefills: Vec<Stretch>,
}

/// The engine and what was measured with it.
pub struct Bench {
    pub engine: Engine,
    pub runs: Vec<Run>,
    /// Routing while decoding, over all runs.
    pub routes: RouteSnapshot,
    seed: u64,
}

impl Bench {
    pub fn new(engine: Engine, seed: u64) -> Self {
        let routes = engine.route_snapshot();
        Self { engine, runs: Vec::new(), routes, seed }
    }

    /// One more run; `tell` is told what is under way.
    pub fn run(&mut self, tell: &dyn Fn(&str)) -> Result<(), Failure> {
        let context = self.engine.info().plan.context;
        // Each run has its own tokens, the same on every machine.
        let seed = self.seed + self.runs.len() as u64;
        let mut tokens = token_stream(self.engine.spec().vocab_size, seed);
        let mut take = |n: usize| -> Vec<u32> { tokens.by_ref().take(n).collect() };

        tell("cold start");
        self.engine.forget_experts();
        let mut session = self.engine.open_session()?;
        let mut held = take(PROMPT);
        let cold = self.measure(|engine| sync(engine, &mut session, &held))?;
        tell("decoding");
        let answer = take(DECODE);
        let short = self.measure(|engine| decode(engine, &mut session, &answer))?;
        tell("a further turn");
        held.extend(answer);
        held.extend(take(PROMPT));
        let warm = self.measure(|engine| sync(engine, &mut session, &held).map(|_| PROMPT))?;
        drop(session);

        let (mut prefills, mut long) = (Vec::new(), None);
        for length in PREFILLS.into_iter().filter(|length| *length <= context) {
            tell(&format!("prefill of {length} tokens"));
            self.engine.forget_experts();
            let mut session = self.engine.open_session()?;
            let prompt = take(length);
            prefills.push(self.measure(|engine| sync(engine, &mut session, &prompt))?);
            if Some(&length) == PREFILLS.last() && length + DECODE <= context {
                tell("decoding at length");
                let answer = take(DECODE);
                long = Some(self.measure(|engine| decode(engine, &mut session, &answer))?);
            }
        }
        self.runs.push(Run { cold, warm, short, long, prefills });
        self.routes = self.engine.route_snapshot();
        Ok(())
    }

    fn measure(
        &mut self,
        work: impl FnOnce(&mut Engine) -> Result<usize, Failure>,
    ) -> Result<Stretch, Failure> {
        let (store, phases) = (self.engine.store_snapshot(), self.engine.phase_snapshot());
        let start = Instant::now();
        let tokens = work(&mut self.engine)?;
        Ok(Stretch {
            tokens,
            time: start.elapsed(),
            store: self.engine.store_snapshot() - store,
            phases: self.engine.phase_snapshot() - phases,
        })
    }
}

fn sync(engine: &mut Engine, session: &mut Session, tokens: &[u32]) -> Result<usize, Failure> {
    let mut control = Control::cancelled_by(interrupt::flag());
    Ok(engine.sync(session, tokens, &mut control)?.prefilled)
}

fn decode(engine: &mut Engine, session: &mut Session, tokens: &[u32]) -> Result<usize, Failure> {
    let mut control = Control::cancelled_by(interrupt::flag());
    for &token in tokens {
        engine.decode(session, token, &mut control)?;
    }
    Ok(tokens.len())
}
