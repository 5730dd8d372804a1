//! Where a step's time goes.
//!
//! A [`PhaseClock`] always charges exactly one phase. Switching charges the time since the last switch to the
//! phase that was running, so the buckets sum to the step's wall time by construction; what nobody named is
//! in [`Phase::Other`], shown, not lost. One `Instant::now` a switch (some 25 ns on Linux).

use crate::Counter;
use crate::counter::nanoseconds;
use std::ops::{Add, Sub};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What a step is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Norms, projections, RoPE, attention, KV append.
    Attention,
    /// Dense FFN layers and shared experts.
    Dense,
    /// Router logits, top-k and weights.
    Router,
    /// Blocked on the expert store.
    DemandWait,
    /// Routed experts' arithmetic.
    Experts,
    /// Waiting for a GPU, whatever it computes.
    Device,
    /// Final norm and LM head.
    Head,
    /// Choosing the next token.
    Sampling,
    /// Everything without a name of its own.
    Other,
}

impl Phase {
    /// Every phase, in the order of the buckets.
    pub const ALL: [Phase; 9] = [
        Phase::Attention,
        Phase::Dense,
        Phase::Router,
        Phase::DemandWait,
        Phase::Experts,
        Phase::Device,
        Phase::Head,
        Phase::Sampling,
        Phase::Other,
    ];

    /// A stable name for tables and metrics, `snake_case`.
    pub fn name(self) -> &'static str {
        match self {
            Phase::Attention => "attention",
            Phase::Dense => "dense",
            Phase::Router => "router",
            Phase::DemandWait => "demand_wait",
            Phase::Experts => "experts",
            Phase::Device => "device",
            Phase::Head => "head",
            Phase::Sampling => "sampling",
            Phase::Other => "other",
        }
    }
}

const N_PHASES: usize = Phase::ALL.len();

/// Totals over all finished steps, readable from any thread. The clock's thread owns it.
#[derive(Debug, Default)]
pub struct PhaseMeter {
    phase_ns: [Counter; N_PHASES],
    steps: Counter,
}

impl PhaseMeter {
    /// Totals as they are now. Steps still running are not in them.
    pub fn snapshot(&self) -> PhaseSnapshot {
        PhaseSnapshot { phase_ns: std::array::from_fn(|i| self.phase_ns[i].get()), steps: self.steps.get() }
    }
}

/// Time per phase: of one step, of all steps, or, after subtraction, of an interval.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PhaseSnapshot {
    phase_ns: [u64; N_PHASES],
    steps: u64,
}

impl PhaseSnapshot {
    /// Nanoseconds charged to `phase`.
    pub fn phase_ns(&self, phase: Phase) -> u64 {
        self.phase_ns[phase as usize]
    }

    /// Wall time of the steps, in nanoseconds: the sum of the buckets.
    pub fn total_ns(&self) -> u64 {
        self.phase_ns.iter().sum()
    }

    /// Finished steps.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Charges `time` to `phase` as well.
    pub fn charge(&mut self, phase: Phase, time: Duration) {
        self.phase_ns[phase as usize] += nanoseconds(time);
    }
}

impl Sub for PhaseSnapshot {
    type Output = Self;

    /// What was charged between `earlier` and `self`.
    fn sub(self, earlier: Self) -> Self {
        Self {
            phase_ns: std::array::from_fn(|i| self.phase_ns[i].saturating_sub(earlier.phase_ns[i])),
            steps: self.steps.saturating_sub(earlier.steps),
        }
    }
}

impl Add for PhaseSnapshot {
    type Output = Self;

    /// What was charged in two intervals together.
    fn add(self, other: Self) -> Self {
        Self {
            phase_ns: std::array::from_fn(|i| self.phase_ns[i] + other.phase_ns[i]),
            steps: self.steps + other.steps,
        }
    }
}

/// The clock of one engine thread.
#[derive(Debug)]
pub struct PhaseClock {
    meter: Arc<PhaseMeter>,
    step: [Duration; N_PHASES],
    running: Option<(Phase, Instant)>,
}

impl PhaseClock {
    /// A stopped clock that adds finished steps to `meter`.
    pub fn new(meter: Arc<PhaseMeter>) -> Self {
        Self { meter, step: Default::default(), running: None }
    }

    /// Starts a step, in [`Phase::Other`]. A step that was not finished is discarded.
    pub fn begin_step(&mut self) {
        self.begin_step_at(Instant::now());
    }

    /// Charges the time since the last switch to the running phase and runs `phase` from here.
    ///
    /// Returns the phase that was running, to go back to; outside a step nothing happens and it is
    /// [`Phase::Other`].
    pub fn switch(&mut self, phase: Phase) -> Phase {
        self.switch_at(phase, Instant::now())
    }

    /// Ends the step: adds it to the meter and returns it. Outside a step it is all zero and adds nothing.
    pub fn end_step(&mut self) -> PhaseSnapshot {
        self.end_step_at(Instant::now())
    }

    /// Adds time spent between steps to the totals of `phase`; it is no step of its own.
    pub fn charge(&self, phase: Phase, time: Duration) {
        self.meter.phase_ns[phase as usize].add(nanoseconds(time));
    }

    fn begin_step_at(&mut self, now: Instant) {
        self.step = Default::default();
        self.running = Some((Phase::Other, now));
    }

    fn switch_at(&mut self, phase: Phase, now: Instant) -> Phase {
        let Some((previous, since)) = self.running else { return Phase::Other };
        self.step[previous as usize] += now.saturating_duration_since(since);
        self.running = Some((phase, now));
        previous
    }

    fn end_step_at(&mut self, now: Instant) -> PhaseSnapshot {
        if self.running.is_none() {
            return PhaseSnapshot::default();
        }
        self.switch_at(Phase::Other, now);
        self.running = None;
        let step = PhaseSnapshot { phase_ns: self.step.map(nanoseconds), steps: 1 };
        for (total, ns) in self.meter.phase_ns.iter().zip(step.phase_ns) {
            total.add(ns);
        }
        self.meter.steps.add(1);
        step
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(start: Instant, ns: u64) -> Instant {
        start + Duration::from_nanos(ns)
    }

    #[test]
    fn buckets_sum_to_the_step() {
        let meter = Arc::new(PhaseMeter::default());
        let mut clock = PhaseClock::new(meter.clone());
        let start = Instant::now();
        // A walk over the phases with uneven times; the model is the sum of what was charged.
        let mut expected = [0_u64; N_PHASES];
        let (mut now, mut running) = (0, Phase::Other);
        clock.begin_step_at(start);
        for i in 0..1000_u64 {
            let phase = Phase::ALL[(i * i % 7 + i % 2) as usize];
            let elapsed = i * 37 % 101;
            expected[running as usize] += elapsed;
            now += elapsed;
            assert_eq!(clock.switch_at(phase, at(start, now)), running);
            running = phase;
        }
        let step = clock.end_step_at(at(start, now));
        assert_eq!(step.phase_ns, expected);
        assert_eq!(step.total_ns(), now);
        assert_eq!(meter.snapshot(), step);
    }

    #[test]
    fn time_between_steps_is_nobodys() {
        let meter = Arc::new(PhaseMeter::default());
        let mut clock = PhaseClock::new(meter.clone());
        let start = Instant::now();
        assert_eq!(clock.switch_at(Phase::Head, start), Phase::Other);
        assert_eq!(clock.end_step_at(at(start, 5)), PhaseSnapshot::default());
        for step in 0..3 {
            clock.begin_step_at(at(start, step * 1000));
            clock.switch_at(Phase::Experts, at(start, step * 1000 + 10));
            clock.end_step_at(at(start, step * 1000 + 30));
        }
        let total = meter.snapshot();
        assert_eq!((total.steps(), total.total_ns()), (3, 90));
        assert_eq!((total.phase_ns(Phase::Other), total.phase_ns(Phase::Experts)), (30, 60));
        assert_eq!((total - total).total_ns(), 0);
        assert_eq!(total + total - total, total);
    }

    #[test]
    fn a_real_step_agrees_with_the_wall() {
        let mut clock = PhaseClock::new(Arc::default());
        let before = Instant::now();
        clock.begin_step();
        for phase in Phase::ALL {
            clock.switch(phase);
        }
        let step = clock.end_step();
        assert!(step.total_ns() <= nanoseconds(before.elapsed()));
    }

    #[test]
    fn names_follow_the_buckets() {
        for (i, phase) in Phase::ALL.into_iter().enumerate() {
            assert_eq!(phase as usize, i, "{}", phase.name());
        }
    }
}
