//! The canonical runs: the same tokens on every machine, prompts and answers alike.
//!
//! Tokens are drawn from a seed, when decoding too: the model's own greedy tokens soon repeat themselves, and
//! with them their experts, which flatters any cache.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use smoe_engine::{Control, Engine, Limits, Sampler, Sampling, Session};
use smoe_meter::{PhaseSnapshot, RouteSnapshot, StoreSnapshot, TierSnapshot};
use smoe_sculpt::token_stream;

use super::figures::{Around, Ceilings};
use super::machine;
use crate::failure::Failure;
use crate::interrupt;

/// Tokens of the canonical prompt and of a further turn.
pub const PROMPT: usize = 45;
/// Tokens decoded at a time.
pub const DECODE: usize = 64;
/// For how long a device decodes before it is timed, and the last tokens of the prompt that it decodes again and again: idle, as
/// while memory is timed, it slows down, and needs about a second to be as fast as before (EXP-GPU-04).
const WAKE: Duration = Duration::from_secs(1);
const WAKE_TOKENS: usize = 8;
/// Lengths of the prefills.
pub const PREFILLS: [usize; 3] = [64, 512, 2048];

/// Kernels by name: microseconds, runs.
pub type KernelProfile = Vec<(String, f64, f64)>;

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
    /// What a device's tier of experts counted over it.
    pub tier: TierSnapshot,
}

/// What the device of an engine has counted.
pub fn tier(engine: &Engine) -> TierSnapshot {
    engine.device_tier().map_or_else(TierSnapshot::default, |tier| tier.meter.snapshot())
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
    /// What the machine could do around that.
    pub around_short: Around,
    /// What the kernel says this process read from storage meanwhile.
    pub kernel_read_bytes: Option<u64>,
    /// Decoding after the longest prefill.
    pub long: Option<Stretch>,
    /// The prefills that the context has room for, each from no expert in memory.
    pub prefills: Vec<Stretch>,
}

/// The engine and what was measured with it.
pub struct Bench {
    pub engine: Engine,
    pub runs: Vec<Run>,
    /// Decoding the model's own greedy tokens, where that says anything.
    pub greedy: Vec<Stretch>,
    /// Routing over all runs; overlap and coverage are of decoding.
    pub routes: RouteSnapshot,
    sampler: Sampler,
    seed: u64,
}

impl Bench {
    pub fn new(engine: Engine, seed: u64) -> Result<Self, Failure> {
        let routes = engine.route_snapshot();
        // Greedy: what it draws is timed and not used.
        let sampler = Sampler::new(Sampling::default(), engine.spec().vocab_size)?;
        Ok(Self { engine, runs: Vec::new(), greedy: Vec::new(), routes, sampler, seed })
    }

    /// One more run; `tell` is told what is under way.
    pub fn run(&mut self, ceilings: &mut Ceilings, tell: &dyn Fn(&str)) -> Result<(), Failure> {
        let context = self.engine.info().plan.context;
        // Each run has its own tokens, the same on every machine.
        let seed = self.seed + self.runs.len() as u64;
        let mut tokens = token_stream(self.engine.spec().vocab_size, seed);
        let mut take = |n: usize| -> Vec<u32> { tokens.by_ref().take(n).collect() };

        tell("cold start");
        self.engine.forget_experts();
        let mut session = self.engine.open_session()?;
        let mut held = take(PROMPT);
        let cold = self.measure(|engine, sampler| sync(engine, &mut session, sampler, &held))?;
        tell("decoding");
        let answer = take(DECODE);
        let ((short, kernel_read_bytes), around_short) = ceilings.around(self, |bench| {
            bench.wake(&mut session, &held)?;
            let before = machine::read_bytes();
            let short = bench.measure(|engine, sampler| decode(engine, &mut session, sampler, &answer))?;
            Ok((short, machine::read_bytes().zip(before).map(|(after, before)| after - before)))
        })?;
        tell("a further turn");
        held.extend(answer);
        held.extend(take(PROMPT));
        let warm = self.measure(|engine, sampler| sync(engine, &mut session, sampler, &held))?;
        drop(session);

        let (mut prefills, mut long) = (Vec::new(), None);
        for length in PREFILLS.into_iter().filter(|length| *length <= context) {
            tell(&format!("prefill of {length} tokens"));
            self.engine.forget_experts();
            let mut session = self.engine.open_session()?;
            let prompt = take(length);
            prefills.push(self.measure(|engine, sampler| sync(engine, &mut session, sampler, &prompt))?);
            if Some(&length) == PREFILLS.last() && length + DECODE <= context {
                tell("decoding at length");
                let answer = take(DECODE);
                long = Some(self.measure(|engine, sampler| decode(engine, &mut session, sampler, &answer))?);
            }
        }
        self.runs.push(Run { cold, warm, short, around_short, kernel_read_bytes, long, prefills });
        self.routes = self.engine.route_snapshot();
        Ok(())
    }

    /// Decodes what the model itself chooses, once for each run, where a device holds every expert: it has each token
    /// before it is asked for. Elsewhere that would flatter a cache; and routing is not counted any more.
    pub fn greedy(&mut self, tell: &dyn Fn(&str)) -> Result<(), Failure> {
        if !self.engine.device_tier().is_some_and(|tier| tier.plan.holds_all()) {
            return Ok(());
        }
        let mut tokens = token_stream(self.engine.spec().vocab_size, self.seed);
        let prompt: Vec<u32> = tokens.by_ref().take(PROMPT).collect();
        let mut session = self.engine.open_session()?;
        // The first one is there already.
        let limits = Limits { max_tokens: DECODE + 1, end_tokens: Vec::new() };
        tell("decoding greedily");
        for _ in 0..self.runs.len() {
            self.engine.truncate(&mut session, 0);
            sync(&mut self.engine, &mut session, &mut self.sampler, &prompt)?;
            self.wake(&mut session, &prompt)?;
            let stretch = self.measure(|engine, sampler| {
                let mut control = Control::cancelled_by(interrupt::flag());
                engine.generate(&mut session, sampler, &limits, &mut control, &mut |_| {
                    ControlFlow::Continue(())
                })?;
                Ok(DECODE)
            })?;
            self.greedy.push(stretch);
        }
        Ok(())
    }

    /// Wakes a device, if there is one, with the end of what a session holds.
    fn wake(&mut self, session: &mut Session, held: &[u32]) -> Result<(), Failure> {
        let rest = held.len().saturating_sub(WAKE_TOKENS);
        let start = Instant::now();
        while self.engine.device_tier().is_some() && start.elapsed() < WAKE {
            self.engine.truncate(session, rest);
            decode(&mut self.engine, session, &mut self.sampler, &held[rest..])?;
        }
        Ok(())
    }

    /// Times the device's kernels, by name: of a few decoded tokens, for each of them, and of a whole prompt of 512 tokens.
    pub fn profile(&mut self) -> Result<[KernelProfile; 2], Failure> {
        const TOKENS: usize = 8;
        let length = PREFILLS[1].min(self.engine.info().plan.context);
        let mut tokens = token_stream(self.engine.spec().vocab_size, self.seed);
        let mut take = |n: usize| -> Vec<u32> { tokens.by_ref().take(n).collect() };
        let (held, answer, prompt) = (take(PROMPT), take(TOKENS), take(length));
        let mut session = self.engine.open_session()?;
        sync(&mut self.engine, &mut session, &mut self.sampler, &held)?;
        let decoding =
            self.profile_of(TOKENS, |engine, sampler| decode(engine, &mut session, sampler, &answer))?;
        drop(session);
        let mut session = self.engine.open_session()?;
        let prompt = self.profile_of(1, |engine, sampler| sync(engine, &mut session, sampler, &prompt))?;
        Ok([decoding, prompt])
    }

    /// The device's kernels in some work, each by `share`.
    fn profile_of(
        &mut self,
        share: usize,
        work: impl FnOnce(&mut Engine, &mut Sampler) -> Result<usize, Failure>,
    ) -> Result<KernelProfile, Failure> {
        self.engine.profile_device(true);
        let done = work(&mut self.engine, &mut self.sampler);
        let times = self.engine.profile_device(false).unwrap_or_default();
        done?;
        let share = share as f64;
        let of = |(name, runs, ns): (String, u64, f64)| (name, ns / 1e3 / share, runs as f64 / share);
        Ok(times.kernels.into_iter().map(of).collect())
    }

    fn measure(
        &mut self,
        work: impl FnOnce(&mut Engine, &mut Sampler) -> Result<usize, Failure>,
    ) -> Result<Stretch, Failure> {
        let (store, phases) = (self.engine.store_snapshot(), self.engine.phase_snapshot());
        let before = tier(&self.engine);
        let start = Instant::now();
        let tokens = work(&mut self.engine, &mut self.sampler)?;
        Ok(Stretch {
            tokens,
            time: start.elapsed(),
            store: self.engine.store_snapshot() - store,
            phases: self.engine.phase_snapshot() - phases,
            tier: tier(&self.engine) - before,
        })
    }
}

fn sync(
    engine: &mut Engine,
    session: &mut Session,
    sampler: &mut Sampler,
    tokens: &[u32],
) -> Result<usize, Failure> {
    let mut control = Control::cancelled_by(interrupt::flag());
    let prefilled = engine.sync(session, tokens, &mut control)?.prefilled;
    engine.sample(session, sampler);
    Ok(prefilled)
}

fn decode(
    engine: &mut Engine,
    session: &mut Session,
    sampler: &mut Sampler,
    tokens: &[u32],
) -> Result<usize, Failure> {
    let mut control = Control::cancelled_by(interrupt::flag());
    for &token in tokens {
        engine.decode(session, token, &mut control)?;
        engine.sample(session, sampler);
    }
    Ok(tokens.len())
}
