//! States in a device's memory: here is only which place has what, and what is to be copied there.

use smoe_kernels::{DeltaMark, DeltaRun};

use super::{Live, SeqId, States};
use crate::backend::Row;

/// A state that a device copies, in all layers: numbers of places.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateCopy {
    /// What is copied.
    pub from: usize,
    /// What it becomes.
    pub to: usize,
}

impl States {
    pub(super) fn copy(&mut self, from: usize, to: usize) {
        let copy = StateCopy { from: self.number(from), to: self.number(to) };
        match &mut self.device_copies {
            Some(copies) => copies.push(copy),
            None => self.memory.copy_within(from..from + self.len, to),
        }
    }

    /// Which place in memory this is.
    const fn number(&self, at: usize) -> usize {
        (at - self.base) / self.len
    }

    /// Keeps the bookkeeping only: pages of its own memory are never written.
    pub(in crate::kv) fn keep_on_device(&mut self) {
        self.device_copies = Some(Vec::new());
    }

    /// The device is lost with every state and snapshot: sequences are at their beginning, in this memory.
    pub(in crate::kv) fn leave_device(&mut self) {
        self.device_copies = None;
        self.pending.clear();
        (0..self.snapshots.len()).for_each(|snapshot| self.clear(snapshot));
        self.live.fill(Live::default());
    }

    pub(in crate::kv) fn take_copies(&mut self) -> impl Iterator<Item = StateCopy> + '_ {
        self.device_copies.iter_mut().flat_map(|copies| copies.drain(..))
    }

    /// As [`Self::runs`], of all layers, places by their numbers.
    pub(in crate::kv) fn numbered_runs(
        &mut self,
        rows: &[Row],
        runs: &mut Vec<DeltaRun>,
        marks: &mut Vec<DeltaMark>,
    ) {
        self.runs(0, rows, runs, marks);
        for run in runs {
            (run.from, run.to) = (run.from.map(|from| self.number(from)), self.number(run.to));
        }
        marks.iter_mut().for_each(|mark| mark.to = self.number(mark.to));
    }

    /// The run of the token behind the running step, which is of that sequence: from where the step leaves its state to where the state before
    /// the step is, which nobody needs any more when this is computed.
    pub(in crate::kv) fn run_behind(&self, seq: SeqId) -> DeltaRun {
        let place = self.live[seq.0 as usize].place;
        let [from, to] = [1 - place, place].map(|place| self.number(self.of_sequence(seq, place)));
        DeltaRun { rows: 0..1, from: Some(from), to }
    }

    /// Whether the running step takes snapshots.
    pub(in crate::kv) const fn has_marks(&self) -> bool {
        !self.pending.is_empty()
    }
}
