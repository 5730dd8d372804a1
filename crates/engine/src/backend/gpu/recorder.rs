//! The step being recorded, and handing it over.

use std::sync::Arc;
use std::time::Instant;

use smoe_gpu::{Gpu, Recorded, Step, Submitted};
use smoe_meter::TierMeter;

use crate::backend::KernelTimes;

/// Kernels on their way to the device.
pub(super) struct Recorder {
    gpu: Arc<Gpu>,
    meter: Arc<TierMeter>,
    /// Recorded and not yet handed over.
    step: Option<Step>,
    /// Times of kernels, while somebody asks.
    pub(super) profile: Option<KernelTimes>,
}

impl Recorder {
    pub(super) fn new(gpu: Arc<Gpu>, meter: Arc<TierMeter>) -> Self {
        Self { gpu, meter, step: None, profile: None }
    }

    /// Where the next kernel goes.
    pub(super) fn step(&mut self) -> &mut Step {
        let Self { gpu, step, profile, .. } = self;
        step.get_or_insert_with(|| {
            profile.as_ref().and_then(|_| gpu.profiled_step()).unwrap_or_else(|| gpu.step())
        })
    }

    /// Forgets what is recorded.
    pub(super) fn clear(&mut self) {
        self.step = None;
    }

    /// Puts aside what is recorded: others follow that may come to nothing.
    pub(super) fn set_aside(&mut self) -> Option<Step> {
        self.step.take()
    }

    /// Ends what was recorded since something was put aside, which comes back.
    pub(super) fn ahead(&mut self, aside: Option<Step>) -> Option<Recorded> {
        let step = std::mem::replace(&mut self.step, aside)?;
        Some(step.finish())
    }

    /// Hands over `first`, what is recorded, and `then` after it; none if there is nothing.
    pub(super) fn submit(&mut self, first: Option<Recorded>, then: Option<Recorded>) -> Option<Submitted> {
        let (step, count) =
            (self.step.take(), |dispatches: u32| self.meter.dispatches.add(u64::from(dispatches)));
        if first.is_none() && step.is_none() && then.is_none() {
            return None;
        }
        self.meter.submits.add(1);
        step.iter().for_each(|step| count(step.dispatches()));
        then.iter().for_each(|then| count(then.dispatches()));
        let start = Instant::now();
        let submitted = match (&mut self.profile, step) {
            (Some(times), Some(step)) => {
                let mut tell = |name: &str, ns: f64| times.add(name, ns);
                if let Some(first) = first {
                    self.gpu.submit([first]);
                }
                // A failure shows when the step's results are read.
                let profiled = self.gpu.finish_profile(step, &mut tell).ok();
                then.map_or(profiled, |then| Some(self.gpu.submit([then])))
            }
            (_, step) => {
                let steps = first.into_iter().chain(step.map(Step::finish)).chain(then);
                Some(self.gpu.submit(steps))
            }
        };
        self.meter.submit_ns.add_time(start.elapsed());
        submitted
    }
}
