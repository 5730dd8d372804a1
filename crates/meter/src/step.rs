//! The last steps, one by one: what a panel draws as bars.

use crate::{PhaseSnapshot, StoreSnapshot};

/// One step of the engine: where its time went and what it asked of the store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Step {
    /// Number of the step, from 0 since the engine was opened.
    pub index: u64,
    /// Tokens computed: 1 when decoding.
    pub tokens: u32,
    /// Positions of the longest session after the step.
    pub context: u32,
    /// Time by phase, sampling included.
    pub phases: PhaseSnapshot,
    /// The store's counters over the step.
    pub store: StoreSnapshot,
}

/// The last steps, in a buffer of fixed size. The engine's thread owns it.
#[derive(Debug)]
pub struct StepLog {
    steps: Vec<Step>,
    capacity: usize,
    pushed: u64,
}

impl StepLog {
    /// An empty log of at most `capacity` steps, at least 1. Claims its memory now.
    #[must_use]
    pub fn with_capacity(capacity: usize) -> Self {
        let capacity = capacity.max(1);
        Self { steps: Vec::with_capacity(capacity), capacity, pushed: 0 }
    }

    /// Appends a step, numbering it, over the oldest if the log is full.
    pub fn push(&mut self, step: Step) {
        let step = Step { index: self.pushed, ..step };
        if self.steps.len() < self.capacity {
            self.steps.push(step);
        } else {
            self.steps[(self.pushed % self.capacity as u64) as usize] = step;
        }
        self.pushed += 1;
    }

    /// The last step, to be amended by what belongs to it but came after.
    pub fn last_mut(&mut self) -> Option<&mut Step> {
        let last = self.pushed.checked_sub(1)?;
        self.steps.get_mut((last % self.capacity as u64) as usize)
    }

    /// Steps pushed so far, those overwritten included.
    #[must_use]
    pub fn pushed(&self) -> u64 {
        self.pushed
    }

    /// The steps that are still there and have number `from` or above, the oldest first.
    pub fn since(&self, from: u64) -> impl Iterator<Item = &Step> {
        let first = self.pushed.saturating_sub(self.steps.len() as u64).max(from);
        (first..self.pushed).map(|index| &self.steps[(index % self.capacity as u64) as usize])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_steps_stay_in_order() {
        let mut log = StepLog::with_capacity(3);
        assert_eq!(log.last_mut(), None);
        for tokens in 0..8 {
            log.push(Step { tokens, ..Step::default() });
            let kept: Vec<_> = log.since(0).map(|step| (step.index, step.tokens)).collect();
            let expected: Vec<_> = ((tokens + 1).saturating_sub(3)..=tokens).map(|t| (t.into(), t)).collect();
            assert_eq!(kept, expected);
            assert_eq!(log.last_mut().map(|step| step.tokens), Some(tokens));
        }
        assert_eq!(log.since(7).count(), 1);
        assert_eq!(log.since(9).count(), 0);
        assert_eq!(log.pushed(), 8);
    }
}
