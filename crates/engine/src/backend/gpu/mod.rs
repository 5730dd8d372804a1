//! The GPU backend: the verbs of a layer as recorded kernels, experts in a tier of the device's own memory.
//!
//! Steps of a few tokens are recorded several layers at a time, all at once if the device holds every expert: the
//! routes stay on the device, and the host hears of them afterwards, and of experts that are missing (`flow.rs`). Longer
//! ones, that miss some in any case, are recorded layer by layer and handed over when the host must know which
//! experts a layer needs.
//!
//! What the device lacks is copied to it by the processor or by itself, from the ring that is lent to it (`lent.rs`); or
//! kernels read it where the ring has it, over the bus, or because there is no tier but the ring ([`ExpertPath`]).
//!
//! Experts' products have the CPU's bits where the device's fma is fused ([`Gpu::fused_fma`]), so it does not
//! matter which of the two computes an expert; attention and norms sum in an order of their own.

mod begun;
mod build;
mod delta;
mod flow;
mod host;
mod latent;
mod lent;
mod measure;
mod ops;
mod plan;
mod recorder;
#[cfg(test)]
mod tests;
mod tier;
mod weights;

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use smoe_format::ModelSpec;
use smoe_gpu::{Gpu, GpuError, Readback, Recorded, Slice, Step, Submitted, WorkList};
use smoe_kernels::Pool;
use smoe_meter::TierMeter;
use smoe_store::Lease;

use crate::EngineError;
use crate::backend::{
    Advanced, Backend, DeviceOpening, DeviceTier, Follows, HEAD_ROWS, KernelTimes, Row, TokenCosts,
};
use crate::device::{DevicePlan, ExpertPath};
use crate::forecast::DeviceRates;
use crate::kv::{BlockCopy, KvCache};
use crate::routes::Routes;
use delta::Nets;
use flow::{Flow, stamp};
use host::{HostExperts, MARGIN};
use lent::Flights;
pub(crate) use lent::Ring;
pub(crate) use measure::is_bus_worth_it;
use ops::{Ends, Layer, LayerOps, Mixer, RowBuffer};
pub(crate) use plan::{max_chunk, unsupported};
use recorder::Recorder;
use tier::{Admission, ExpertTier};

/// Work lists that the host writes: batches of experts between two submits.
const LISTS: usize = 8;

/// What the layer before left to be added to the hidden states.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pending {
    /// Nothing: they are whole.
    Nothing,
    /// What its feed-forward part made.
    Ffn,
}

/// The GPU backend.
pub struct GpuBackend {
    gpu: Arc<Gpu>,
    spec: ModelSpec,
    plan: DevicePlan,
    /// Why experts come in no better way.
    pub(crate) path_note: Option<String>,
    opening: DeviceOpening,
    meter: Arc<TierMeter>,
    recorder: Recorder,
    /// Tokens of the step.
    tokens: usize,
    /// Positions that the step's tokens see at most.
    visible: usize,
    /// Positions of a session at most.
    context: usize,
    /// The layer that comes.
    next: usize,
    pending: Pending,
    layers: Vec<Layer>,
    ends: Ends,
    /// By width of window; the first sees all.
    rows: Vec<RowBuffer>,
    /// Blocks of the step's sessions.
    tables: Slice,
    table_words: Vec<u32>,
    /// Where each session's blocks begin there, and those of layers that see a window.
    table_starts: Vec<(u32, [u32; 2])>,
    row_words: Vec<u32>,
    /// `[T, top_k]`, weights of the step's routes, and the halt.
    route_weights: Slice,
    /// `[MoE layers, T, n_experts]`, router logits of a flow.
    seen: Slice,
    /// Keys and values, by layer.
    kv: Vec<Slice>,
    /// States of layers that have them instead.
    nets: Option<Nets>,
    /// Room for a block of a layer on its way to another.
    block: Slice,
    tier: ExpertTier,
    /// What computes the experts that a step of a few tokens lacks; none where they are brought to the device.
    host: Option<HostExperts>,
    /// `[T, top_k, d_model]`, what experts made.
    outputs: Slice,
    /// Input of experts.
    normed: Slice,
    /// The ring, if it is lent to the device.
    ring: Option<Ring>,
    /// Leases of what is read there.
    flights: Flights<Submitted, Lease>,
    /// Copies of experts that come before what is recorded.
    copies: Option<Step>,
    /// Copies experts to where the device fetches them, and computes some.
    pool: Pool,
    lists: Vec<WorkList>,
    /// Lists written since the last submit.
    listed: usize,
    /// What the host reads, by turns: of a step while the next one is under way.
    readbacks: [Readback; 2],
    /// Router logits, `[MoE layers, T, n_experts]`.
    router: Vec<f32>,
    logits: Vec<f32>,
    /// The tokens whose logits these are.
    headed: Vec<usize>,
    host_hidden: Vec<f32>,
    flow: Flow,
    /// The step's tokens: pairs of a resident part.
    everyone: Vec<u32>,
    /// Tokens before the step: the clock of the experts' uses.
    tokens_done: u64,
}

impl std::fmt::Debug for GpuBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GpuBackend").field("plan", &self.plan).finish_non_exhaustive()
    }
}

impl GpuBackend {
    /// Hands what is recorded to the device.
    fn submit(&mut self) -> Option<Submitted> {
        self.submit_with(None)
    }

    /// Hands it over, and `then` after it.
    fn submit_with(&mut self, then: Option<Recorded>) -> Option<Submitted> {
        let copies = self.copies.take().map(Step::finish);
        let submitted = self.recorder.submit(copies, then)?;
        self.tier.submitted();
        self.listed = 0;
        self.flights.submitted(&submitted);
        self.land();
        Some(submitted)
    }

    /// Gives back the leases that the device has done with. A failure shows when something is read.
    fn land(&mut self) {
        let _ = self.flights.land(|submitted| self.gpu.is_done(submitted));
    }

    /// Hands over what reads leases, if something is recorded that does.
    fn take_off(&mut self) {
        if self.flights.is_recorded() {
            let _ = self.recorder.step();
            self.submit();
        }
    }

    /// Waits until every lease is given back.
    fn land_all(&mut self) -> Result<(), EngineError> {
        self.take_off();
        if let Some(latest) = self.flights.latest() {
            self.gpu.wait(latest)?;
        }
        // The device works in the order in which it is handed things.
        let _ = self.flights.land(|_| Ok::<_, GpuError>(true));
        Ok(())
    }

    /// Reads `out` back, once the device has done `submitted`.
    fn read(
        gpu: &Gpu,
        meter: &TierMeter,
        readback: &Readback,
        submitted: &Submitted,
        out: &mut [f32],
    ) -> Result<(), EngineError> {
        let start = Instant::now();
        let result = gpu.read(readback, submitted, bytemuck::cast_slice_mut(out));
        meter.waits.add(1);
        meter.wait_ns.add_time(start.elapsed());
        Ok(result?)
    }

    /// Begins the step that was put off, if it is not the one that the device has begun.
    fn begin_in_earnest(&mut self) {
        if let Some(token) = self.flow.put_off.take() {
            self.begin_step(&[token]);
        }
    }

    /// Begins a step of these tokens.
    fn begin_step(&mut self, tokens: &[u32]) {
        // What was begun is over before this begins.
        self.flow.begun = None;
        // A step that was given up leaves kernels and lists behind: nothing waits for what they compute. What they were to
        // read in the ring goes back with the next that is handed over; copies of experts are made all the same.
        self.recorder.clear();
        self.stop_flow();
        self.headed.clear();
        self.listed = 0;
        self.tokens_done += self.tokens as u64;
        (self.tokens, self.next, self.pending) = (tokens.len(), 0, Pending::Nothing);
        self.gpu.write(&self.ends.ids, 0, bytemuck::cast_slice(tokens));
        if let Some(list) = &self.ends.everyone {
            self.everyone.truncate(0);
            self.everyone.extend(0..tokens.len() as u32);
            list.write(&self.gpu, tokens.len(), &[(0, 0, &self.everyone)]);
        }
        let step = self.recorder.step();
        self.ends.embed.record(step, tokens.len());
    }

    /// Tells the device whose tokens the step has.
    fn place(&mut self, rows: &[Row], kv: &mut KvCache) {
        self.copy_blocks(kv);
        self.write_rows(rows, kv);
        if let Some(nets) = &mut self.nets {
            nets.place(&self.gpu, rows, kv);
        }
        self.visible = rows.iter().map(|row| row.position as usize + 1).max().unwrap_or(0);
    }

    /// Tells it their positions, and where the blocks of their sessions are.
    fn write_rows(&mut self, rows: &[Row], kv: &KvCache) {
        self.table_words.clear();
        self.table_starts.clear();
        for row in rows {
            if self.table_starts.last().is_none_or(|&(seq, _)| seq != row.seq.0) {
                let words = &mut self.table_words;
                let start = words.len() as u32;
                words.extend_from_slice(kv.blocks(row.seq));
                let windowed = words.len() as u32;
                kv.window_table(row.seq).iter().for_each(|table| words.extend_from_slice(table));
                self.table_starts.push((row.seq.0, [start, windowed]));
            }
        }
        let room = self.tables.len() as usize / 4;
        assert!(self.table_words.len() <= room, "{} blocks of {room}", self.table_words.len());
        self.gpu.write(&self.tables, 0, bytemuck::cast_slice(&self.table_words));
        for buffer in &self.rows {
            self.row_words.clear();
            let mut starts = self.table_starts.iter();
            let (mut seq, mut start) = (u32::MAX, [0; 2]);
            for row in rows {
                if row.seq.0 != seq {
                    (seq, start) = starts.next().copied().unwrap_or((row.seq.0, start));
                }
                let window = u32::try_from(buffer.window).unwrap_or(u32::MAX);
                let first = (row.position + 1).saturating_sub(window);
                let start = start[usize::from(buffer.is_windowed)];
                self.row_words.extend([row.position, start, first, 0]);
            }
            self.gpu.write(&buffer.rows, 0, bytemuck::cast_slice(&self.row_words));
        }
    }

    /// Copies what the cache wants copied: a block that goes on from the middle of another, a state. At once, as the cache
    /// takes it for done, whatever becomes of the step.
    fn copy_blocks(&mut self, kv: &mut KvCache) {
        let mut any = false;
        let copies: Vec<_> = kv.take_copies().collect();
        for BlockCopy { from, to, is_window } in copies {
            any = true;
            let step = self.recorder.step();
            let len = self.block.len();
            let spec = &self.spec;
            let of_these =
                |layer: &usize| kv.is_windowed(*layer) == is_window && spec.delta_of(*layer).is_none();
            for layer in (0..self.kv.len()).filter(of_these).map(|layer| &self.kv[layer]) {
                let part = |block: u32| layer.part(u64::from(block) * len, len);
                step.copy(&part(from), &self.block);
                step.copy(&self.block, &part(to));
            }
        }
        if let Some(nets) = &self.nets {
            for copy in kv.take_state_copies() {
                any = true;
                nets.copy(self.recorder.step(), copy);
            }
        }
        if any {
            self.submit();
        }
    }

    /// Records a layer's attention, and adds it to the hidden states unless the router does.
    fn record_attention(&mut self, layer: usize, leaves: bool) {
        let (tokens, visible) = (self.tokens, self.visible);
        let ops = &self.layers[layer];
        let step = self.recorder.step();
        match (ops.lone.as_ref().filter(|_| !leaves), self.pending) {
            (Some(lone), Pending::Nothing) => lone.enter_plain.record(step),
            (Some(lone), Pending::Ffn) => lone.enter.record(step),
            (None, pending) => {
                match pending {
                    Pending::Nothing => ops.enter_plain.record(step, tokens),
                    Pending::Ffn => ops.enter.record(step, tokens),
                }
                ops.record_projections(step, tokens);
            }
        }
        let seen = ops.window.min(visible);
        let lone_o = ops.lone_o.as_ref().filter(|_| tokens == 1);
        match &ops.mixer {
            Mixer::Heads { attention, .. } if tokens == 1 && attention.turns(seen) => {
                attention.record_turning(step, seen, visible);
            }
            Mixer::Heads { rope, attention } => {
                rope.record(step, tokens);
                attention.record(step, tokens, self.table_starts.len(), seen, visible);
            }
            Mixer::Delta(net) => net.record(step, tokens),
            Mixer::Latent(latent) => latent.record(step, tokens, seen, visible, lone_o.is_none()),
        }
        match lone_o {
            Some(o) => o.record(step),
            None => ops.o.iter().for_each(|product| product.record(step, tokens)),
        }
        if leaves {
            ops.leave.record(step, tokens);
        }
        self.pending = Pending::Nothing;
        self.next = layer + 1;
    }

    /// Adds what is pending to the hidden states, for who wants to see them.
    fn settle(&mut self) {
        if self.pending == Pending::Nothing {
            return;
        }
        let tokens = self.tokens;
        let step = self.recorder.step();
        match self.layers.get(self.next) {
            Some(layer) => layer.enter.record(step, tokens),
            None => self.ends.mix.record(step, tokens),
        }
        self.pending = Pending::Nothing;
    }

    /// Records the logits of these tokens.
    fn record_head(&mut self, tokens: &[usize]) {
        assert!(tokens.len() <= HEAD_ROWS, "{} rows of logits at once", tokens.len());
        if !self.heads_all(tokens) || self.pending == Pending::Nothing {
            self.settle();
        }
        let n = tokens.len();
        if self.pending == Pending::Nothing {
            let mut ids = [0; HEAD_ROWS];
            ids.iter_mut().zip(tokens).for_each(|(id, &token)| *id = token as u32);
            self.gpu.write(&self.ends.chosen, 0, bytemuck::cast_slice(&ids));
        }
        let step = self.recorder.step();
        match self.pending {
            Pending::Ffn => self.ends.mix_few.record(step, n),
            Pending::Nothing => self.ends.choose.record(step, n),
        }
        self.pending = Pending::Nothing;
        self.ends.head.iter().for_each(|product| product.record(step, n));
    }

    /// Multiplies the first `len` logits as the model does.
    fn scale_logits(&mut self, len: usize) {
        let by = self.spec.multipliers.logits as f32;
        if by != 1.0 {
            self.logits[..len].iter_mut().for_each(|logit| *logit *= by);
        }
    }

    /// Brings a plane to `host_hidden`.
    fn download(&mut self, slice: &Slice) -> Result<(), EngineError> {
        self.host_hidden.clear();
        self.submit();
        let bytes = self.gpu.download(slice)?;
        self.host_hidden.extend(bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)));
        Ok(())
    }
}

impl Backend for GpuBackend {
    fn embed(&mut self, tokens: &[u32]) -> Result<(), EngineError> {
        self.gpu.check()?;
        self.flow.put_off = self.begun_with(tokens);
        if self.flow.put_off.is_none() {
            self.begin_step(tokens);
        }
        Ok(())
    }

    fn follows(&mut self, follows: Follows) {
        self.flow.follows = follows;
    }

    fn attend(&mut self, layer: usize, rows: &[Row], kv: &mut KvCache) -> Result<(), EngineError> {
        if layer == 0 {
            self.begin_in_earnest();
            self.place(rows, kv);
        }
        self.record_attention(layer, true);
        Ok(())
    }

    fn dense(&mut self, layer: usize) -> Result<(), EngineError> {
        let tokens = self.tokens;
        if let LayerOps::Dense(ffn) = &self.layers[layer].ops {
            ffn.kernels.record(self.recorder.step(), tokens);
        }
        self.pending = Pending::Ffn;
        Ok(())
    }

    fn advance(
        &mut self,
        from: usize,
        rows: &[Row],
        kv: &mut KvCache,
        head: &[usize],
    ) -> Result<Advanced, EngineError> {
        self.flow(from, rows, kv, head)
    }

    fn advanced(&mut self, index: usize) -> Result<&[f32], EngineError> {
        let per_layer = self.tokens * self.spec.moe.n_experts;
        Ok(&self.router[index * per_layer..(index + 1) * per_layer])
    }

    fn routed(&mut self, layer: usize, routes: &Routes) {
        self.hear(layer, routes);
    }

    fn route(&mut self, layer: usize) -> Result<&[f32], EngineError> {
        let tokens = self.tokens;
        let n = tokens * self.spec.moe.n_experts;
        if let LayerOps::Moe(moe) = &self.layers[layer].ops {
            let step = self.recorder.step();
            moe.router.iter().for_each(|product| product.record(step, tokens));
            step.read_back(&moe.logits.part(0, 4 * n as u64), &self.readbacks[0], 0);
        }
        if let Some(submitted) = self.submit() {
            Self::read(&self.gpu, &self.meter, &self.readbacks[0], &submitted, &mut self.router[..n])?;
            self.land();
        }
        if let Some(moe) = self.layers[layer].ops.moe() {
            moe.add_bias(&mut self.router[..n]);
        }
        Ok(&self.router[..n])
    }

    fn lacks(&mut self, layer: usize, expert: u32) -> bool {
        let Some(index) = self.layers[layer].ops.moe().map(|moe| moe.index) else { return true };
        // Behind the slots only the device finds it: it has, where it halted for others.
        let is_behind = || self.flow.has_computed(layer) && self.tier.in_ring_behind(index, expert).is_some();
        self.tier.place(index, expert).is_none() && !is_behind()
    }

    fn wants_order(&self, _routes: &Routes) -> bool {
        false
    }

    fn begin(&mut self, layer: usize, routes: &Routes) -> Result<(), EngineError> {
        if self.resume(layer, routes) {
            return Ok(());
        }
        let tokens = self.tokens;
        let weights: Vec<f32> = (0..tokens).flat_map(|token| routes.of_token(token).1).copied().collect();
        self.gpu.write(&self.route_weights, 0, bytemuck::cast_slice(&weights));
        let Some(moe) = self.layers[layer].ops.moe() else { return Ok(()) };
        moe.record_shared(self.recorder.step(), tokens);
        let mut here = Vec::new();
        for &expert in routes.union() {
            if let Some(slot) = self.tier.place(moe.index, expert) {
                self.tier.touch(moe.index, slot, self.tokens_done + stamp(routes, expert));
                here.push((self.tier.in_ring(moe.index, slot), expert, routes.of_expert(expert).0));
            }
        }
        self.compute(layer, &here);
        Ok(())
    }

    fn experts(&mut self, layer: usize, ready: &mut Vec<Lease>, routes: &Routes) -> Result<(), EngineError> {
        let Some(index) = self.layers[layer].ops.moe().map(|moe| moe.index) else { return Ok(()) };
        self.meter.misses.add(ready.len() as u64);
        if self.flow.resumed && self.host.is_some() {
            self.compute_here(index, ready, routes);
            return Ok(());
        }
        if self.reads_in_place() {
            let in_ring = |lease: &Lease| {
                let expert = lease.key().expert;
                (lease.slot() as u32, expert, routes.of_expert(expert).0)
            };
            self.compute(layer, &ready.iter().map(in_ring).collect::<Vec<_>>());
            // Only now: what was handed over in between reads some of them, what is recorded the others.
            ready.drain(..).for_each(|lease| self.flights.hold(lease));
            return Ok(());
        }
        if self.listed == LISTS {
            // Now, and not when slots are admitted and what reads them is yet to be recorded: those would pass for read.
            self.submit();
        }
        let mut batch = Vec::with_capacity(ready.len());
        for lease in ready.drain(..) {
            let expert = lease.key().expert;
            let stamp = self.tokens_done + stamp(routes, expert);
            let slot = loop {
                match self.tier.admit(index, expert, stamp) {
                    Admission::Slot(slot) => break slot,
                    Admission::Busy => {
                        // What is recorded reads every slot: hand it over, then its slots may be written.
                        self.take_in(layer, &mut batch, routes);
                        self.submit();
                    }
                }
            };
            batch.push((slot, lease));
        }
        self.take_in(layer, &mut batch, routes);
        Ok(())
    }

    fn reclaim(&mut self) -> Result<bool, EngineError> {
        // By staging an expert's bytes are on their way when its lease is dropped, and none is held.
        let held = self.flights.held();
        if self.flights.oldest().is_none() {
            self.take_off();
        }
        if let Some(oldest) = self.flights.oldest() {
            self.gpu.wait(oldest)?;
            self.land();
        }
        Ok(self.flights.held() < held)
    }

    fn give_ring_back(&mut self) -> Result<bool, EngineError> {
        if self.reads_in_place() {
            return Ok(false);
        }
        if self.ring.is_some() {
            self.land_all()?;
            self.leave_behind()?;
            self.ring = None;
            self.plan.path = ExpertPath::Staging;
            self.path_note = Some("memory was short, and the ring was taken back from the device".to_owned());
        }
        Ok(true)
    }

    fn finish(&mut self, _layer: usize, _routes: &Routes) -> Result<(), EngineError> {
        self.flow.resumed = false;
        self.pending = Pending::Ffn;
        Ok(())
    }

    fn head(&mut self, tokens: &[usize]) -> Result<&[f32], EngineError> {
        let len = tokens.len() * self.spec.vocab_size;
        if self.headed.as_slice() != tokens {
            self.record_head(tokens);
            let logits = self.ends.logits.part(0, 4 * len as u64);
            self.recorder.step().read_back(&logits, &self.readbacks[0], 0);
            if let Some(submitted) = self.submit() {
                Self::read(&self.gpu, &self.meter, &self.readbacks[0], &submitted, &mut self.logits[..len])?;
                self.scale_logits(len);
            }
        }
        // What is asked for again may have changed: `observe` looks at a step in several ways.
        self.headed.clear();
        Ok(&self.logits[..len])
    }

    fn hidden(&mut self) -> Result<&[f32], EngineError> {
        self.settle();
        let hidden = self.ends.hidden.part(0, (4 * self.tokens * self.spec.d_model) as u64);
        self.download(&hidden)?;
        Ok(&self.host_hidden)
    }

    fn final_hidden(&mut self, token: usize) -> Result<&[f32], EngineError> {
        self.settle();
        let ids = [token as u32];
        self.gpu.write(&self.ends.chosen, 0, bytemuck::cast_slice(&ids));
        self.ends.choose.record(self.recorder.step(), 1);
        let normed = self.ends.input.float.part(0, (4 * self.spec.d_model) as u64);
        self.download(&normed)?;
        Ok(&self.host_hidden)
    }

    fn bring(&mut self, layer: usize, ready: &mut Vec<Lease>) -> Result<(), EngineError> {
        let Some(index) = self.layers[layer].ops.moe().map(|moe| moe.index) else { return Ok(()) };
        let mut batch = Vec::with_capacity(ready.len());
        for lease in ready.drain(..) {
            let expert = lease.key().expert;
            if self.tier.place(index, expert).is_some() {
                continue;
            }
            if self.reads_in_place() {
                // One that lies elsewhere is named by the host when it is needed.
                drop(self.tier.place_at(index, lease));
            } else if self.reads_over_bus() {
                // Its first use brings it.
                drop(self.tier.place_behind(index, lease));
            } else if let Admission::Slot(slot) = self.tier.admit(index, expert, self.tokens_done) {
                batch.push((slot, lease));
            }
        }
        if self.reads_in_place() || self.reads_over_bus() {
            self.tier.tell(&self.gpu, index);
            return Ok(self.gpu.check()?);
        }
        self.upload(index, batch);
        // What is written waits in memory of the host's until something is submitted.
        let submitted = self.copies.take().unwrap_or_else(|| self.gpu.step()).submit();
        self.tier.submitted();
        self.flights.submitted(&submitted);
        self.gpu.wait(&submitted)?;
        self.land();
        Ok(())
    }

    fn forget_experts(&mut self, layers: Range<usize>) {
        self.submit();
        for moe in self.layers[layers].iter().filter_map(|layer| layer.ops.moe()) {
            // A step that was begun before anyone asked for it may read them.
            self.tier.clear(&self.gpu, moe.index).into_iter().for_each(|lease| self.flights.hold(lease));
        }
        // A device that failed says so when it is asked next.
        let _ = self.land_all();
    }

    fn measure(&mut self) -> Result<Option<DeviceRates>, EngineError> {
        self.measure_rates()
    }

    fn costs(&mut self) -> Result<Option<TokenCosts>, EngineError> {
        self.measure_costs()
    }

    fn profile(&mut self, on: bool) -> Option<KernelTimes> {
        std::mem::replace(&mut self.recorder.profile, on.then(KernelTimes::default))
    }

    fn opening(&self) -> Option<DeviceOpening> {
        Some(self.opening)
    }

    fn tier(&self) -> Option<DeviceTier> {
        let path_note = self.path_note.clone();
        Some(DeviceTier { plan: self.plan.clone(), path_note, meter: self.meter.clone() })
    }
}

impl GpuBackend {
    /// Kernels read experts where the ring has them.
    fn reads_in_place(&self) -> bool {
        self.plan.path == ExpertPath::InPlace
    }

    /// Kernels read what the device lacks where the ring has it, over the bus.
    fn reads_over_bus(&self) -> bool {
        self.plan.path == ExpertPath::ZeroCopy
    }

    /// Brings experts that lie behind a layer's slots into some of those, from slots of the ring: before what is recorded, by the
    /// device.
    fn copy_over(&mut self, index: usize, brought: &[(u32, usize)]) {
        let Some(ring) = self.ring.as_ref().filter(|_| !brought.is_empty()) else { return };
        let copies = self.copies.get_or_insert_with(|| self.gpu.step());
        for &(slot, from) in brought {
            let to = self.tier.slot(index, slot, self.tier.slot_bytes(index).unwrap_or(0));
            copies.copy(&ring.slot(from, to.len()), &to);
        }
        self.tier.tell(&self.gpu, index);
    }

    /// Gives up what lies behind slots: no kernel reads it any more, nor any that is recorded. Kernels that do without are made
    /// now.
    fn leave_behind(&mut self) -> Result<(), EngineError> {
        if !self.reads_over_bus() {
            return Ok(());
        }
        (self.flow.foreseen, self.flow.begun) = (None, None);
        // What is under way may read it without a lease in a flight.
        let copies = self.copies.take().unwrap_or_else(|| self.gpu.step());
        self.gpu.wait(&copies.submit())?;
        self.tier.leave_behind(&self.gpu).into_iter().for_each(drop);
        for layer in &mut self.layers {
            if let LayerOps::Moe(moe) = &mut layer.ops {
                let (slots, ..) = self.tier.bindings(moe.index);
                moe.own = moe.operands.routed(&self.gpu, &moe.list, slots, None)?;
                let shared = moe.shared.as_ref();
                moe.lone = moe.operands.with_shared(&self.gpu, &moe.list, slots, None, shared)?;
            }
        }
        Ok(())
    }

    /// Brings experts into their slots, before what is recorded: now, or by the device, which holds their leases until it has.
    fn upload(&mut self, index: usize, batch: Vec<(u32, Lease)>) {
        if batch.is_empty() {
            return;
        }
        match &self.ring {
            Some(ring) => {
                let copies = self.copies.get_or_insert_with(|| self.gpu.step());
                for (slot, lease) in batch {
                    let len = lease.bytes().len() as u64;
                    copies.copy(&ring.slot(lease.slot(), len), &self.tier.slot(index, slot, len));
                    self.flights.hold(lease);
                }
            }
            None => {
                let part = |(slot, lease): &(u32, Lease)| {
                    let len = lease.bytes().len() as u64;
                    self.tier.slot(index, *slot, len)
                };
                let parts: Vec<_> = batch.iter().map(|of| (part(of), of.1.bytes())).collect();
                self.gpu.write_all(&parts, &|tasks, task| self.pool.run(tasks, task));
            }
        }
        self.tier.tell(&self.gpu, index);
    }

    /// Computes experts of the halted layer on the processor, writes what they make where the device's own write it, and
    /// brings it those that it is better off with.
    fn compute_here(&mut self, index: usize, ready: &mut Vec<Lease>, routes: &Routes) {
        let Self { host: Some(host), gpu, pool, outputs, tokens, .. } = self else { return };
        host.compute(pool, index, *tokens, ready, routes, |pair, output| {
            let bytes: &[u8] = bytemuck::cast_slice(output);
            gpu.write(outputs, u64::from(pair) * bytes.len() as u64, bytes);
        });
        self.meter.computed.add(ready.len() as u64);
        let mut batch = Vec::new();
        for lease in ready.drain(..) {
            // Where it lies behind the slots the device finds it from now on.
            let Some(lease) = self.tier.place_behind(index, lease) else { continue };
            let expert = lease.key().expert;
            let stamp = self.tokens_done + stamp(routes, expert);
            if self.tier.is_better_off_with(index, expert, stamp, MARGIN)
                && let Admission::Slot(slot) = self.tier.admit(index, expert, stamp)
            {
                batch.push((slot, lease));
            }
        }
        self.upload(index, batch);
        self.tier.tell(&self.gpu, index);
    }

    /// Brings experts into their slots and records them.
    fn take_in(&mut self, layer: usize, batch: &mut Vec<(u32, Lease)>, routes: &Routes) {
        let Some(index) = self.layers[layer].ops.moe().map(|moe| moe.index) else { return };
        let here = |(slot, lease): &(u32, Lease)| {
            let expert = lease.key().expert;
            (*slot, expert, routes.of_expert(expert).0)
        };
        let experts: Vec<_> = batch.iter().map(here).collect();
        self.upload(index, std::mem::take(batch));
        self.compute(layer, &experts);
    }

    /// Records experts that are there: (slot, expert, its pairs). Slots are the layer's; those of the ring if kernels read
    /// it, a dispatch for each segment that has some.
    fn compute(&mut self, layer: usize, experts: &[(u32, u32, &[u32])]) {
        let ring = self.ring.as_ref().filter(|_| self.reads_in_place());
        let Some(ring) = ring.cloned() else {
            self.compute_in(layer, 0, 1, experts);
            return;
        };
        let segments = ring.segments().len();
        let mut parts = vec![Vec::new(); segments];
        for &(slot, expert, pairs) in experts {
            let (segment, at) = ring.locate(slot);
            parts[segment].push((at, expert, pairs));
        }
        for (segment, experts) in parts.iter().enumerate() {
            self.compute_in(layer, segment, segments, experts);
        }
    }

    /// The same of one segment of so many.
    fn compute_in(&mut self, layer: usize, segment: usize, segments: usize, experts: &[(u32, u32, &[u32])]) {
        if experts.is_empty() {
            return;
        }
        if self.listed == LISTS {
            self.submit();
        }
        let Some(moe) = self.layers[layer].ops.moe() else { return };
        self.lists[self.listed].write(&self.gpu, self.tokens, experts);
        moe.lists[self.listed * segments + segment].record(self.recorder.step(), self.tokens);
        self.listed += 1;
    }
}

impl Drop for GpuBackend {
    /// Leases go back when the device reads no more. One that is lost may go on for a moment: what it reads then is of no use
    /// to anyone, and the memory itself stays while it may.
    fn drop(&mut self) {
        if let Some(latest) = self.flights.latest().filter(|_| self.gpu.check().is_ok()) {
            let _ = self.gpu.wait(latest);
        }
    }
}
