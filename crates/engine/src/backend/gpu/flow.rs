//! Layers that are computed without the host.
//!
//! The routing of a layer feeds its experts' kernels on the device. Where some experts are not there, the kernel
//! that routes sets the *halt* ([`smoe_gpu::Halt`]): what was recorded behind it leaves the hidden states, the
//! routing weights and the layer's outputs as they are, and the experts that are there have been computed. Keys and
//! values of layers that ran in vain are written again. So the host hands over several layers at once, reads the
//! halt, brings what is missing and goes on from that layer's experts.
//!
//! While the device works, the host records what comes next: the layers behind, or, where every expert is there, the
//! whole of the next step, which is like this one but for a position more. If the token of that step is likely to be the one
//! with the largest logit, as in greedy decoding, the device finds it by itself, and has the next step before it is
//! done with this one (`begun.rs`).

use std::time::Instant;

use smoe_gpu::{Recorded, Submitted};

use super::begun::Begun;
use super::host::MARGIN;
use super::ops::LayerOps;
use super::tier::Admission;
use super::{GpuBackend, Pending};
use crate::EngineError;
use crate::backend::{Advanced, Follows, Row};
use crate::forecast::{DeviceRates, at_once};
use crate::kv::KvCache;
use crate::routes::Routes;

/// Bytes before the router logits of what the host reads: the halt, and the token that the device chose.
pub(super) const HALT_BYTES: u64 = 16;
/// Layers that are recorded before the device gets them, if it cannot halt: it works on these while the host records
/// the next ones (EXP-GPU-02).
const LAYERS_AT_ONCE: usize = 6;

#[cfg(test)]
thread_local! {
    /// Steps of this thread that had been recorded ahead.
    pub(super) static FORESEEN: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// What the host knows of layers on their way.
pub(super) struct Flow {
    /// Tokens of a step that may halt.
    few: usize,
    /// Place of the halt among the routing weights.
    at: usize,
    /// The halt may be set.
    set: bool,
    /// The layer whose experts are to be brought.
    halted: Option<usize>,
    /// That layer has been taken up again.
    pub(super) resumed: bool,
    /// Layers that are recorded and not handed over.
    ahead: Option<Ahead>,
    /// The step that is likely to come, where nothing halts.
    pub(super) foreseen: Option<Foreseen>,
    /// What stands before and after the step.
    pub(super) follows: Follows,
    /// The step that is likely to come, which the device has.
    pub(super) begun: Option<Begun>,
    /// The token of a step that may be that one: it has not begun otherwise.
    pub(super) put_off: Option<u32>,
    /// Which of the readbacks the last recorded step copies to.
    turn: usize,
    pace: Pace,
}

/// A step that is recorded, of all layers and the head of each of its tokens.
pub(super) struct Foreseen {
    pub(super) tokens: usize,
    /// Positions that its tokens see at most.
    pub(super) visible: usize,
    pub(super) step: Recorded,
    pub(super) reading: Reading,
}

/// Layers that are recorded.
struct Ahead {
    from: usize,
    to: usize,
    /// None if they stand with what comes before them.
    step: Option<Recorded>,
    reading: Reading,
}

/// What a step copies for the host: the halt, router logits, logits.
#[derive(Clone, Copy)]
pub(super) struct Reading {
    /// The MoE layers.
    first: usize,
    end: usize,
    /// Rows of the head.
    rows: usize,
    /// The readback.
    turn: usize,
    /// The token that follows is among it.
    pub(super) chosen: bool,
    /// So is the input of the experts of the layer that halted.
    input: bool,
}

/// How many layers are handed over at once where they may halt.
struct Pace {
    /// Part of the MoE layers that halt, of late.
    halting: f64,
    /// The cost of handing over and waiting, in layers.
    wait: f64,
}

impl Pace {
    /// That cost where it was not measured: an H200's was 0.7 to 1.2 (EXP-GPU-04).
    const WAIT: f64 = 1.0;
    /// MoE layers that are remembered, about.
    const MEMORY: f64 = 64.0;

    fn hear(&mut self, halted: bool) {
        self.halting += (f64::from(u8::from(halted)) - self.halting) / Self::MEMORY;
    }

    /// What goes on fastest if layers halt independently.
    fn layers(&self) -> usize {
        at_once(1.0 - self.halting, self.wait).0
    }
}

impl Flow {
    /// For steps of up to `few` tokens, with the halt at word `at` of the routing weights.
    pub(super) const fn new(few: usize, at: usize) -> Self {
        // Nothing is there at first.
        let pace = Pace { halting: 1.0, wait: Pace::WAIT };
        Self {
            few,
            at,
            set: false,
            halted: None,
            resumed: false,
            ahead: None,
            foreseen: None,
            follows: Follows { continues: false, likely: false },
            begun: None,
            put_off: None,
            turn: 0,
            pace,
        }
    }
}

impl Flow {
    /// Whether the device has computed what it finds of this layer, which halted for others.
    pub(super) fn has_computed(&self, layer: usize) -> bool {
        self.halted == Some(layer)
    }
}

impl GpuBackend {
    /// Paces what may halt by what was measured.
    pub(super) fn pace_by(&mut self, rates: &DeviceRates) {
        self.flow.pace.wait = rates.wait_s * self.layers.len() as f64 / rates.token_s;
    }

    /// Forgets layers that are on their way.
    pub(super) fn stop_flow(&mut self) {
        self.flow.ahead = None;
        self.flow.halted = None;
        self.flow.resumed = false;
        self.clear_halt();
    }

    fn clear_halt(&mut self) {
        if std::mem::take(&mut self.flow.set) {
            self.gpu.write(&self.route_weights, 4 * self.flow.at as u64, &0f32.to_le_bytes());
        }
    }

    /// [`crate::backend::Backend::advance`].
    pub(super) fn flow(
        &mut self,
        from: usize,
        rows: &[Row],
        kv: &mut KvCache,
        head: &[usize],
    ) -> Result<Advanced, EngineError> {
        if from == 0 && self.take_begun(rows, kv, head)? {
            return Ok(Advanced { next: self.layers.len(), halted: false });
        }
        let halts = !self.tier.reaches_all();
        if !self.tier.holds_all() && self.tokens > self.flow.few && (halts || !self.reads_each_once()) {
            return Ok(Advanced { next: from, halted: false });
        }
        if from == 0 {
            self.place(rows, kv);
        }
        let end = self.layers.len();
        if !halts {
            self.flow_rows(from, rows, kv, head)?;
            return Ok(Advanced { next: end, halted: false });
        }
        let mut at = from;
        while at < end {
            let ahead = match self.flow.ahead.take().filter(|ahead| ahead.from == at) {
                Some(ahead) => ahead,
                None => self.record_ahead(at, head),
            };
            let Ahead { to, step, reading, .. } = ahead;
            let Some(submitted) = self.submit_with(step) else { break };
            if to < end && self.recorder.profile.is_none() {
                self.flow.ahead = Some(self.record_ahead(to, head));
            }
            let halted = self.read_flow(&submitted, reading, head)?;
            let routed = self.moes(at, halted.unwrap_or(to));
            (routed.0..routed.1).for_each(|_| self.flow.pace.hear(false));
            if let Some(layer) = halted {
                self.flow.pace.hear(true);
                self.flow.halted = Some(layer);
                self.next = layer + 1;
                return Ok(Advanced { next: layer, halted: true });
            }
            at = to;
        }
        self.next = end;
        Ok(Advanced { next: end, halted: false })
    }

    /// Whether kernels read an expert once in the step, on average: its pairs are one entry of a work list. Of longer steps what is
    /// copied goes over the bus less often.
    fn reads_each_once(&self) -> bool {
        let moe = &self.spec.moe;
        let pairs = self.lists.first().map_or(0, |list| list.entry_pairs(self.tokens));
        self.tokens * moe.top_k <= moe.n_experts * pairs
    }

    /// The MoE layers among these, by their numbers.
    fn moes(&self, from: usize, to: usize) -> (usize, usize) {
        let count = |layers: usize| self.layers[..layers].iter().filter(|l| l.ops.moe().is_some()).count();
        (count(from), count(to))
    }

    /// Records a layer, whatever the router chooses.
    pub(super) fn record_layer(&mut self, layer: usize) {
        let tokens = self.tokens;
        let norms = self.layers[layer].ops.moe().is_some_and(|moe| moe.route.norms(tokens));
        self.record_attention(layer, !norms);
        let step = self.recorder.step();
        match &self.layers[layer].ops {
            LayerOps::Dense(ffn) => ffn.kernels.record(step, tokens),
            LayerOps::Moe(moe) => {
                if !moe.route.makes_logits(tokens) {
                    moe.router.iter().for_each(|product| product.record(step, tokens));
                }
                // Its input is there then.
                moe.route.record(step, tokens);
                moe.record_own(step, tokens);
            }
        }
        self.pending = Pending::Ffn;
    }

    /// Records layers that may halt, apart from what is recorded: they may come to nothing.
    fn record_ahead(&mut self, from: usize, head: &[usize]) -> Ahead {
        let start = Instant::now();
        let to = (from + self.flow.pace.layers()).min(self.layers.len());
        // A profiled step is handed over by itself.
        let aside = if self.recorder.profile.is_none() { Some(self.recorder.set_aside()) } else { None };
        (from..to).for_each(|layer| self.record_layer(layer));
        let reading = self.record_reading(from, to, head);
        let step = aside.and_then(|aside| self.recorder.ahead(aside));
        self.meter.ahead_ns.add_time(start.elapsed());
        Ahead { from, to, step, reading }
    }

    /// Computes everything that is left, nothing being missing: what was foreseen, or handing it over as it is recorded.
    pub(super) fn flow_all(&mut self, from: usize, head: &[usize]) -> Result<(), EngineError> {
        let Some((submitted, reading)) = self.hand_over(from, head) else { return Ok(()) };
        if from == 0 && self.may_foresee(head) {
            self.foresee(head);
        }
        self.finish_flow(&submitted, reading, head)
    }

    /// The same of rows that the next step may go on from.
    fn flow_rows(
        &mut self,
        from: usize,
        rows: &[Row],
        kv: &KvCache,
        head: &[usize],
    ) -> Result<(), EngineError> {
        let Some((submitted, reading)) = self.hand_over(from, head) else { return Ok(()) };
        if from == 0 && self.may_foresee(head) {
            self.foresee(head);
            self.begin_next(rows, kv);
        }
        self.finish_flow(&submitted, reading, head)
    }

    /// Hands the layers from this one on to the device, as many at once as is best.
    fn hand_over(&mut self, from: usize, head: &[usize]) -> Option<(Submitted, Reading)> {
        let to = self.layers.len();
        let whole = from == 0 && self.heads_all(head) && self.recorder.profile.is_none();
        let chosen = self.chooses(head);
        let like = |step: &Foreseen| {
            whole
                && (step.tokens, step.visible) == (self.tokens, self.visible)
                && step.reading.chosen == chosen
        };
        let (reading, then) = match self.flow.foreseen.take().filter(like) {
            Some(Foreseen { step, reading, .. }) => {
                #[cfg(test)]
                FORESEEN.set(FORESEEN.get() + 1);
                self.pending = Pending::Nothing;
                (reading, Some(step))
            }
            None => {
                for layer in from..to {
                    self.record_layer(layer);
                    if layer % LAYERS_AT_ONCE == LAYERS_AT_ONCE - 1 && layer + 1 < to {
                        self.submit();
                    }
                }
                (self.record_reading(from, to, head), None)
            }
        };
        self.next = to;
        self.submit_with(then).map(|submitted| (submitted, reading))
    }

    /// Reads what nothing can have halted.
    pub(super) fn finish_flow(
        &mut self,
        submitted: &Submitted,
        reading: Reading,
        head: &[usize],
    ) -> Result<(), EngineError> {
        let halted = self.read_flow(submitted, reading, head)?;
        debug_assert_eq!(halted, None, "every expert is there");
        (reading.first..reading.end).for_each(|_| self.flow.pace.hear(false));
        Ok(())
    }

    /// Whether a step like this one, one position on, is worth recording.
    pub(super) fn may_foresee(&self, head: &[usize]) -> bool {
        self.heads_all(head)
            && self.recorder.profile.is_none()
            && self.tokens <= self.flow.few
            && self.visible < self.context
    }

    /// Whether these are all of the step's tokens.
    pub(super) fn heads_all(&self, head: &[usize]) -> bool {
        head.len() == self.tokens && head.iter().enumerate().all(|(i, &token)| i == token)
    }

    /// Records the step that comes if each token is followed by one.
    pub(super) fn foresee(&mut self, head: &[usize]) {
        let start = Instant::now();
        let (tokens, to) = (self.tokens, self.layers.len());
        self.visible += 1;
        (0..to).for_each(|layer| self.record_layer(layer));
        let (visible, reading) = (self.visible, self.record_reading(0, to, head));
        self.visible -= 1;
        self.next = to;
        let step = self.recorder.ahead(None);
        self.flow.foreseen = step.map(|step| Foreseen { tokens, visible, step, reading });
        self.meter.ahead_ns.add_time(start.elapsed());
    }

    /// Computes everything with a wait for each layer, nothing being missing: as if each had halted.
    pub(super) fn flow_apart(&mut self, head: &[usize]) -> Result<(), EngineError> {
        let end = self.layers.len();
        for layer in 0..end {
            self.record_layer(layer);
            let reading = self.record_reading(layer, layer + 1, head);
            if let Some(submitted) = self.submit() {
                let halted = self.read_flow(&submitted, reading, head)?;
                debug_assert_eq!(halted, None, "every expert is there");
            }
        }
        self.next = end;
        Ok(())
    }

    /// Records what the host will read of these layers, and the head behind the last one.
    pub(super) fn record_reading(&mut self, from: usize, to: usize, head: &[usize]) -> Reading {
        let last = to == self.layers.len();
        let rows = if last { head.len() } else { 0 };
        if rows > 0 {
            self.record_head(head);
        }
        let chosen = last && self.chooses(head);
        if chosen {
            self.ends.likeliest.record(self.recorder.step(), 1);
        }
        self.flow.turn ^= 1;
        let turn = self.flow.turn;
        let readback = &self.readbacks[turn];
        let (first, end) = self.moes(from, to);
        let halt = self.route_weights.part(4 * self.flow.at as u64, 4);
        let per_layer = (4 * self.tokens * self.spec.moe.n_experts) as u64;
        let routes = (end - first) as u64 * per_layer;
        let step = self.recorder.step();
        step.read_back(&halt, readback, 0);
        if chosen {
            step.read_back(&self.ends.ids.part(0, 4), readback, 4);
        }
        if routes > 0 {
            step.read_back(&self.seen.part(first as u64 * per_layer, routes), readback, HALT_BYTES);
        }
        let at = HALT_BYTES + routes;
        if rows > 0 {
            let len = 4 * rows * self.spec.vocab_size;
            step.read_back(&self.ends.logits.part(0, len as u64), readback, at);
        }
        let input = self.host.is_some() && !self.tier.reaches_all();
        if input {
            let at = at + (4 * rows * self.spec.vocab_size) as u64;
            let len = (4 * self.tokens * self.spec.d_model) as u64;
            step.read_back(&self.normed.part(0, len), readback, at);
        }
        Reading { first, end, rows, turn, chosen, input }
    }

    /// Waits, and takes what the step copied: gives the layer that lacks experts.
    pub(super) fn read_flow(
        &mut self,
        submitted: &Submitted,
        reading: Reading,
        head: &[usize],
    ) -> Result<Option<usize>, EngineError> {
        let per_layer = self.tokens * self.spec.moe.n_experts;
        let router = &mut self.router[reading.first * per_layer..reading.end * per_layer];
        let logits = &mut self.logits[..reading.rows * self.spec.vocab_size];
        let input = match &mut self.host {
            Some(host) if reading.input => host.input(self.tokens),
            _ => &mut [],
        };
        let len = HALT_BYTES as usize + 4 * (router.len() + logits.len() + input.len());
        let start = Instant::now();
        let readback = &self.readbacks[reading.turn];
        let (halt, chosen) = self.gpu.read_with(readback, submitted, len, |bytes| {
            let (halt, bytes) = bytes.split_at(HALT_BYTES as usize);
            let (routes, bytes) = bytes.split_at(4 * router.len());
            let (rows, bytes) = bytes.split_at(4 * logits.len());
            bytemuck::cast_slice_mut(router).copy_from_slice(routes);
            bytemuck::cast_slice_mut(logits).copy_from_slice(rows);
            bytemuck::cast_slice_mut(input).copy_from_slice(bytes);
            let word = |at: usize| [halt[at], halt[at + 1], halt[at + 2], halt[at + 3]];
            (f32::from_le_bytes(word(0)), u32::from_le_bytes(word(4)))
        })?;
        if let Some(begun) = self.flow.begun.as_mut().filter(|_| reading.chosen) {
            begun.tell(chosen);
        }
        self.meter.waits.add(1);
        self.meter.wait_ns.add_time(start.elapsed());
        self.land();
        if halt == 0.0 {
            if reading.rows > 0 {
                self.scale_logits(reading.rows * self.spec.vocab_size);
                self.headed.extend_from_slice(head);
            }
            return Ok(None);
        }
        self.flow.set = true;
        let number = halt as usize;
        let layer = self.layers.iter().position(|l| l.ops.moe().is_some_and(|moe| moe.index + 1 == number));
        Ok(Some(layer.expect("a halt is the number of an MoE layer")))
    }

    /// Goes on with a layer that halted, whose experts come now; false if it did not.
    pub(super) fn resume(&mut self, layer: usize, routes: &Routes) -> bool {
        if self.flow.halted.take() != Some(layer) {
            return false;
        }
        self.clear_halt();
        self.flow.resumed = true;
        let tokens = self.tokens;
        if let Some(moe) = self.layers[layer].ops.moe() {
            // The layers behind it, though in vain, have had theirs.
            moe.record_shared(self.recorder.step(), tokens);
        }
        self.hear(layer, routes);
        true
    }

    /// Counts the uses of experts by kernels that are done; brings the device what they read over the bus and it is better
    /// off with, of a long step's no more than its last token's.
    pub(super) fn hear(&mut self, layer: usize, routes: &Routes) {
        let Some(index) = self.layers[layer].ops.moe().map(|moe| moe.index) else { return };
        let mut brought = Vec::new();
        for &expert in routes.union() {
            let stamp = self.tokens_done + stamp(routes, expert);
            if let Some(slot) = self.tier.place(index, expert) {
                self.tier.used(index, slot, stamp);
            } else if let Some(from) = self.tier.in_ring_behind(index, expert) {
                self.meter.misses.add(1);
                self.meter.over_bus.add(1);
                let is_last = routes.of_expert(expert).1.last() == Some(&(self.tokens as u32 - 1));
                if (is_last || self.tokens <= self.flow.few)
                    && self.tier.is_better_off_with(index, expert, stamp, MARGIN)
                    && let Admission::Slot(slot) = self.tier.admit(index, expert, stamp)
                {
                    brought.push((slot, from));
                }
            }
        }
        self.copy_over(index, &brought);
    }
}

/// The last token of a step that visits an expert, counted from 1.
pub(super) fn stamp(routes: &Routes, expert: u32) -> u64 {
    1 + routes.of_expert(expert).1.last().map_or(0, |&token| u64::from(token))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::forecast::MOST_LAYERS;

    #[test]
    fn the_pace_follows_what_halts() {
        let mut pace = Pace { halting: 1.0, wait: 0.5 };
        assert_eq!(pace.layers(), 1);
        (0..1000).for_each(|_| pace.hear(false));
        assert_eq!(pace.layers(), MOST_LAYERS);
        (0..1000).for_each(|_| pace.hear(true));
        assert_eq!(pace.layers(), 1);
    }
}
