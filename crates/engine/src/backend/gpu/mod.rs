//! The GPU backend: the verbs of a layer as recorded kernels, experts in a tier of the device's own memory.
//!
//! Steps of a few tokens are recorded several layers at a time, all at once if the device holds every expert: the
//! routes stay on the device, and the host hears of them afterwards, and of experts that are missing (`flow.rs`). Longer
//! ones, that miss some in any case, are recorded layer by layer and handed over when the host must know which
//! experts a layer needs.
//!
//! What the device lacks is copied to it by the processor or by itself, from the ring that is lent to it (`lent.rs`); or
//! kernels read it where the ring has it, over the bus, or because there is no tier but the ring ([`ExpertPath`](crate::device::ExpertPath)).
//!
//! Experts' products have the CPU's bits where the device's fma is fused ([`Gpu::fused_fma`]), so it does not
//! matter which of the two computes an expert; attention and norms sum in an order of their own.

mod begun;
mod bring;
mod build;
mod delta;
mod flow;
mod host;
mod latent;
mod lent;
mod measure;
mod ops;
mod place;
mod plan;
mod record;
mod recorder;
#[cfg(test)]
mod tests;
mod tier;
mod weights;

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use smoe_format::ModelSpec;
use smoe_gpu::{Gpu, Readback, Recorded, Slice, Step, Submitted, WorkList};
use smoe_kernels::Pool;
use smoe_meter::TierMeter;
use smoe_store::Lease;

use crate::EngineError;
use crate::backend::{Advanced, Backend, DeviceOpening, DeviceTier, Follows, KernelTimes, Row, TokenCosts};
use crate::device::DevicePlan;
use crate::forecast::DeviceRates;
use crate::kv::KvCache;
use crate::routes::Routes;
use delta::Nets;
use flow::{Flow, stamp};
use host::HostExperts;
use lent::Flights;
pub(crate) use lent::Ring;
pub(crate) use measure::is_bus_worth_it;
use ops::{Ends, Layer, LayerOps, RowBuffer};
pub(crate) use plan::{max_chunk, unsupported};
use recorder::Recorder;
use tier::ExpertTier;

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
        self.compute_ready(layer, ready, routes)
    }

    fn reclaim(&mut self) -> Result<bool, EngineError> {
        self.land_oldest()
    }

    fn give_ring_back(&mut self) -> Result<bool, EngineError> {
        self.withdraw_ring()
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
        self.fill_slots(layer, ready)
    }

    fn forget_experts(&mut self, layers: Range<usize>) {
        self.clear_slots(layers);
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

impl Drop for GpuBackend {
    /// Leases go back when the device reads no more. One that is lost may go on for a moment: what it reads then is of no use
    /// to anyone, and the memory itself stays while it may.
    fn drop(&mut self) {
        if let Some(latest) = self.flights.latest().filter(|_| self.gpu.check().is_ok()) {
            let _ = self.gpu.wait(latest);
        }
    }
}
