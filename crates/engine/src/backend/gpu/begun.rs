//! Steps that the device begins before anyone has asked for them.
//!
//! In greedy decoding the device finds the next token by itself, and the next step is recorded already: it is handed over
//! before the host waits for this one. The host makes its own choice afterwards; if it is another, the step was in vain:
//! its keys and values are written again by whoever has that position next, its states are where nobody looks, and nothing else of
//! it is kept.

use smoe_gpu::Submitted;

use super::flow::{Foreseen, Reading};
use super::{GpuBackend, Pending};
use crate::EngineError;
use crate::backend::Row;
use crate::kv::{BLOCK, KvCache};

#[cfg(test)]
thread_local! {
    /// Steps of this thread that the device had begun before they were asked for, and those that it began.
    pub(super) static BEGUN: std::cell::Cell<[usize; 2]> = const { std::cell::Cell::new([0; 2]) };
}

/// A step of one token that the device works on, or will, before anyone has asked for it.
pub(super) struct Begun {
    /// Which token that is, once the device has told: the one with the largest logit.
    token: Option<u32>,
    row: Row,
    /// Positions that it sees.
    visible: usize,
    submitted: Submitted,
    reading: Reading,
}

impl Begun {
    /// The device has told which token that is.
    pub(super) const fn tell(&mut self, token: u32) {
        self.token = Some(token);
    }
}

impl GpuBackend {
    /// Whether the device finds the token that follows: that with the largest logit, if what the host reads are the
    /// logits themselves.
    pub(super) fn chooses(&self, head: &[usize]) -> bool {
        let sees = head == [0] && self.tokens == 1 && self.spec.multipliers.logits == 1.0;
        self.flow.follows.likely && sees && self.tier.reaches_all()
    }

    /// Hands the step that was foreseen to the device, behind the one that it works on, if the position that it writes has
    /// its room.
    pub(super) fn begin_next(&mut self, rows: &[Row], kv: &KvCache) {
        let &[Row { seq, position }] = rows else { return };
        let row = Row { seq, position: position + 1 };
        let has_room = kv.blocks(seq).len() * BLOCK > row.position as usize;
        let Some(Foreseen { visible, step, reading, .. }) =
            self.flow.foreseen.take_if(|step| has_room && step.reading.chosen && step.tokens == 1)
        else {
            return;
        };
        self.write_rows(&[row], kv);
        if let Some(nets) = &mut self.nets {
            nets.place_behind(&self.gpu, seq, kv);
        }
        // Of the token that the step before chooses.
        self.ends.embed.record(self.recorder.step(), 1);
        if let Some(submitted) = self.submit_with(Some(step)) {
            #[cfg(test)]
            BEGUN.set([BEGUN.get()[0], BEGUN.get()[1] + 1]);
            self.flow.begun = Some(Begun { token: None, row, visible, submitted, reading });
        }
    }

    /// The token of a step that may be the one that the device has begun.
    pub(super) fn begun_with(&self, tokens: &[u32]) -> Option<u32> {
        let begun = self.flow.begun.as_ref()?.token?;
        (self.flow.follows.continues && tokens == [begun]).then_some(begun)
    }

    /// Goes on with what the device has begun, if that is the step that was put off and of this row; else begins it in
    /// earnest.
    pub(super) fn take_begun(
        &mut self,
        rows: &[Row],
        kv: &mut KvCache,
        head: &[usize],
    ) -> Result<bool, EngineError> {
        // It has taken no snapshots.
        let is_it = |begun: &mut Begun| rows == [begun.row] && head == [0] && !kv.takes_snapshots();
        let Some(begun) = self.flow.begun.take_if(is_it).filter(|_| self.flow.put_off.is_some()) else {
            self.begin_in_earnest();
            return Ok(false);
        };
        self.flow.put_off = None;
        self.copy_blocks(kv);
        #[cfg(test)]
        BEGUN.set([BEGUN.get()[0] + 1, BEGUN.get()[1]]);
        self.headed.clear();
        self.tokens_done += 1;
        (self.next, self.pending, self.visible) = (self.layers.len(), Pending::Nothing, begun.visible);
        if self.may_foresee(head) {
            self.foresee(head);
            self.begin_next(rows, kv);
        }
        self.finish_flow(&begun.submitted, begun.reading, head)?;
        Ok(true)
    }
}
