//! Blocks in a device's memory: here is only who holds which, and what is to be copied there.

use smoe_kernels::{DeltaMark, DeltaRun};

use super::{BlockCopy, KvCache, SeqId, StateCopy, States};
use crate::backend::Row;

impl KvCache {
    pub(super) fn copy(&mut self, from: u32, to: u32) {
        if let Some(copies) = &mut self.device_copies {
            copies.push(BlockCopy { from, to, is_window: false });
            return;
        }
        let stride = self.geometry.block_stride;
        let from = from as usize * stride;
        self.memory.copy_within(from..from + stride, to as usize * stride);
    }

    /// Keeps the bookkeeping only: blocks and states lie in a device's memory, and who owns that copies them when
    /// [`Self::take_copies`] and [`Self::take_state_copies`] say so. Nothing of them can go to a file.
    pub fn keep_on_device(&mut self) {
        self.device_copies = Some(Vec::new());
        if let Some(states) = &mut self.states {
            states.keep_on_device();
        }
    }

    /// The device is lost, and the blocks on it: every sequence is empty, nothing can be found, and blocks lie in this
    /// memory from here on.
    pub fn leave_device(&mut self) {
        self.device_copies = None;
        if let Some(states) = &mut self.states {
            states.leave_device();
        }
        for i in 0..self.sequences.len() {
            self.truncate(SeqId(i as u32), 0);
        }
        for id in 0..self.pool.len() as u32 {
            // Nobody holds it: it was only there to be found.
            if self.tree.node(id).is_some() {
                self.unlink(id);
                self.set_free(id);
            }
        }
    }

    /// True if blocks lie in a device's memory.
    #[must_use]
    pub const fn is_on_device(&self) -> bool {
        self.device_copies.is_some()
    }

    /// States to be copied there before anything else is written, in this order.
    pub fn take_state_copies(&mut self) -> impl Iterator<Item = StateCopy> + '_ {
        self.states.iter_mut().flat_map(States::take_copies)
    }

    /// As [`Self::states_of`], of all layers that keep states in a device's memory: places by their numbers. Nothing if none does.
    pub fn state_runs(&mut self, rows: &[Row], runs: &mut Vec<DeltaRun>, marks: &mut Vec<DeltaMark>) {
        if let Some(states) = &mut self.states {
            states.numbered_runs(rows, runs, marks);
        }
    }

    /// The same of the token behind the running step of one sequence, before that is done.
    #[must_use]
    pub fn state_run_behind(&self, seq: SeqId) -> Option<DeltaRun> {
        self.states.as_ref().map(|states| states.run_behind(seq))
    }

    /// Whether the running step takes snapshots of states.
    #[must_use]
    pub fn takes_snapshots(&self) -> bool {
        self.states.as_ref().is_some_and(States::has_marks)
    }

    /// Blocks to be copied there before anything else is written.
    pub fn take_copies(&mut self) -> impl Iterator<Item = BlockCopy> + '_ {
        self.device_copies.iter_mut().flat_map(|copies| copies.drain(..))
    }
}
