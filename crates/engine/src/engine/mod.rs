//! The engine: a vault opened for computing. Sessions in, logits out.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use smoe_format::{ExpertKey, ModelSpec};
use smoe_kernels::Kernels;
use smoe_meter::{PhaseClock, PhaseMeter, PhaseSnapshot, RouteSnapshot, StepLog, StoreMeter, StoreSnapshot};
use smoe_store::{ArenaMemory, DirectIo, Disk, FileDisk, Lease, OpenMode, Order, Store, Want, replay::Trace};

use crate::EngineError;
use crate::backend::cpu::CALL_EXPERTS;
use crate::backend::{Backend, Chosen, DeviceTier, HEAD_ROWS, KernelTimes, Row, TokenCosts};
use crate::ceiling::{self, MemoryCeiling};
use crate::device::{DevicePlan, ExpertPath};
use crate::forecast::{DeviceRates, Forecast, Touched, forecast};
use crate::governor::Governor;
use crate::kv::KvCache;
use crate::memory::MemoryFacts;
use crate::plan::Plan;
use crate::routes::Routes;
use crate::session::Dropped;
use crate::vault::Vault;
use crate::watch::RouteWatch;
use crate::weights::Weights;

mod look_ahead;
mod open;
mod options;
mod sessions;
mod step;

use look_ahead::LookAhead;
pub use look_ahead::LookAheadReport;
pub use open::{POLICY, kernels, plan, plan_with_device};
use open::{READERS, open_store};
pub use options::{Control, EngineInfo, EngineOptions, Finish, Limits, Meters, Observer, OpenTimes};
use sessions::device_failure;
use step::STEPS;
pub use step::is_finite;

/// A vault opened for computing.
pub struct Engine {
    spec: ModelSpec,
    plan: Plan,
    kernels: Kernels,
    experts_path: PathBuf,
    backend: Box<dyn Backend>,
    store: Store,
    direct_io: DirectIo,
    kv: KvCache,
    routes: Routes,
    wants: Vec<Want>,
    leases: Vec<Lease>,
    rows: Vec<Row>,
    /// Their tokens.
    row_tokens: Vec<u32>,
    /// Rows whose logits are wanted; none of them if they are more than the backend takes at once.
    head_rows: Vec<usize>,
    /// The token after that of the step is likely to be the one with the largest logit.
    likely: bool,
    /// The row of the last step, if it had one and nothing has come between.
    alone: Option<Row>,
    /// Tokens computed so far: the clock of the experts' last uses.
    tokens_done: u64,
    /// Tokens of the running `sync` that are done, and that are to do.
    prefilled: (usize, usize),
    watch: RouteWatch,
    governor: Governor,
    steps: StepLog,
    store_before: StoreSnapshot,
    look_ahead: LookAhead,
    /// Experts by rank, in what is read ahead of the next token.
    ranking: Vec<u32>,
    spec_width: usize,
    dropped: Arc<Dropped>,
    /// Of all that decides what is computed.
    fingerprint: [u8; 32],
    /// The backend has memory of its own.
    on_device: bool,
    /// That memory has room for every expert.
    all_on_device: bool,
    /// Why the device is not what one may have hoped for.
    device_note: Option<String>,
    open_times: OpenTimes,
    /// What takes over if the device is lost.
    fallback: Option<Box<Fallback>>,
    /// Devices that were lost.
    losses: u32,
    /// Of the loss, until it is told.
    warning: Option<EngineError>,
    clock: PhaseClock,
    phase_meter: Arc<PhaseMeter>,
    store_meter: Arc<StoreMeter>,
}

/// What it takes to go on without a device.
struct Fallback {
    vault: Vault,
    disk: OpenMode,
    exact: bool,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("plan", &self.plan).finish_non_exhaustive()
    }
}

impl Engine {
    /// Opens a vault: plans, claims memory, reads the backbone. Experts are read as they are needed, or by
    /// [`Engine::preload`] if they all fit.
    ///
    /// # Errors
    /// If it does not fit, is damaged, or a setting is out of range.
    pub fn open(vault: &Vault, options: &EngineOptions) -> Result<Self, EngineError> {
        let disk = FileDisk::open(&vault.experts_path, options.disk)?;
        Self::open_on(vault, Arc::new(disk), options)
    }

    /// The same, over another disk for the expert file: what fault tests do.
    ///
    /// # Errors
    /// As [`Engine::open`].
    pub fn open_on(vault: &Vault, disk: Arc<dyn Disk>, options: &EngineOptions) -> Result<Self, EngineError> {
        let kernels = kernels(options.kernels.as_deref())?;
        let began = Instant::now();
        let mut chosen = Chosen::open(&options.device, vault, options.exact)?;
        let device = began.elapsed();
        let facts = MemoryFacts::detect();
        let plan = chosen.plan(vault, options, &|request| plan(vault, request, &facts))?;
        let backbone = FileDisk::open(&vault.backbone_path, options.disk)?;
        let weights = Weights::load(vault, &backbone, READERS)?;
        let store_meter = Arc::new(StoreMeter::default());
        let direct_io = disk.direct().clone();
        let mut store = open_store(vault, disk, &plan, kernels, options, store_meter.clone())?;
        let spec = vault.spec.clone();
        let corrections = weights.corrections();
        let read = began.elapsed() - device;
        let backend = chosen.backend(vault, options, weights, &plan, kernels, &mut store)?;
        let open_times = OpenTimes {
            device,
            read,
            backend: began.elapsed() - device - read,
            on_device: backend.opening(),
        };
        let phase_meter = Arc::new(PhaseMeter::default());
        let tier = backend.tier();
        let snapshots = tier.as_ref().map_or(plan.snapshots, |tier| tier.plan.snapshots);
        let mut kv = KvCache::new(&spec, plan.kv, plan.kv_positions, plan.sessions)?
            .with_windows(&spec, plan.window_blocks)?
            .with_snapshots(&spec, snapshots);
        let (on_device, all_on_device) = (tier.is_some(), tier.is_some_and(|tier| tier.plan.holds_all()));
        if on_device {
            kv.keep_on_device();
        }
        Ok(Self {
            kv,
            on_device,
            all_on_device,
            device_note: chosen.note,
            open_times,
            fallback: on_device.then(|| {
                let (disk, exact) = (options.disk, options.exact);
                Box::new(Fallback { vault: vault.clone(), disk, exact })
            }),
            losses: 0,
            warning: None,
            routes: Routes::with_capacity(&spec.moe, plan.chunk).correcting(corrections),
            wants: Vec::with_capacity(spec.moe.n_experts.max(options.spec * spec.n_layers())),
            leases: Vec::with_capacity(spec.moe.n_experts),
            rows: Vec::with_capacity(plan.chunk),
            row_tokens: Vec::with_capacity(plan.chunk),
            head_rows: Vec::with_capacity(HEAD_ROWS),
            likely: false,
            alone: None,
            tokens_done: 0,
            prefilled: (0, 0),
            watch: RouteWatch::new(&spec),
            governor: Governor::new(plan.slot_bytes, plan.ring_slots, plan.ring_floor),
            steps: StepLog::with_capacity(STEPS),
            store_before: StoreSnapshot::default(),
            look_ahead: LookAhead::new(
                options.look_ahead,
                spec.moe_layers().count(),
                spec.moe.n_experts,
                spec.moe.top_k,
            ),
            ranking: Vec::with_capacity(spec.moe.n_experts),
            spec_width: options.spec,
            dropped: Arc::default(),
            fingerprint: vault.fingerprint(options.exact),
            clock: PhaseClock::new(phase_meter.clone()),
            phase_meter,
            backend,
            experts_path: vault.experts_path.clone(),
            store,
            direct_io,
            spec,
            plan,
            kernels,
            store_meter,
        })
    }

    /// The model.
    #[must_use]
    pub const fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// Facts for people and records.
    #[must_use]
    pub fn info(&self) -> EngineInfo {
        EngineInfo {
            plan: self.plan.clone(),
            kernels: self.kernels.name(),
            direct_io: self.direct_io.clone(),
            experts_path: self.experts_path.clone(),
            tier: self.backend.tier(),
            device_note: self.device_note.clone(),
            open_times: self.open_times,
        }
    }

    /// The counters themselves, for who watches while the engine is busy.
    #[must_use]
    pub fn meters(&self) -> Meters {
        Meters {
            phases: self.phase_meter.clone(),
            store: self.store_meter.clone(),
            routes: self.watch.meter().clone(),
            tier: self.backend.tier().map(|tier| tier.meter),
        }
    }

    /// Counters of the store.
    #[must_use]
    pub fn store_snapshot(&self) -> StoreSnapshot {
        self.store_meter.snapshot()
    }

    /// Time by phase, over all steps.
    #[must_use]
    pub fn phase_snapshot(&self) -> PhaseSnapshot {
        self.phase_meter.snapshot()
    }

    /// How tokens were routed.
    #[must_use]
    pub fn route_snapshot(&self) -> RouteSnapshot {
        self.watch.meter().snapshot()
    }

    /// What reading the next layer ahead has come to.
    #[must_use]
    pub fn look_ahead(&self) -> LookAheadReport {
        self.look_ahead.report()
    }

    /// The last steps, one by one.
    #[must_use]
    pub const fn steps(&self) -> &StepLog {
        &self.steps
    }

    /// Begins to write down how every token is routed, or ends it: gives what was written.
    ///
    /// # Errors
    /// If the model has more experts or layers than a trace can name.
    pub fn record_trace(&mut self, on: bool) -> Result<Option<Trace>, EngineError> {
        let moe = &self.spec.moe;
        let layers = self.spec.moe_layers().count() as u32;
        let trace = if on { Some(Trace::new(layers, moe.n_experts as u32, moe.top_k as u32)?) } else { None };
        Ok(self.watch.record(trace))
    }

    /// Calls `out` with every expert, and whether it is in the ring.
    pub fn residency(&self, out: &mut dyn FnMut(ExpertKey, bool)) {
        self.store.residency(out);
    }

    /// Slots that the ring may use now: fewer than planned while memory is short.
    #[must_use]
    pub fn ring_limit(&self) -> usize {
        self.store.limit()
    }

    /// Reads experts into free slots while nothing else is to be done, the first ones first; the next token ends
    /// it.
    pub fn prewarm(&mut self, experts: &[ExpertKey]) {
        self.store.prewarm(experts);
    }

    /// Loads every expert in large sequential reads, if the ring holds them all; otherwise does nothing.
    /// Told (bytes done, bytes to do). Without it experts are loaded as they are first needed. A device that is lost
    /// meanwhile is left, which [`Engine::take_warning`] tells.
    ///
    /// # Errors
    /// If a read fails.
    pub fn preload(&mut self, progress: &mut dyn FnMut(u64, u64)) -> Result<(), EngineError> {
        if self.plan.holds_all() {
            self.store.preload_all(&mut *progress)?;
        }
        let is_filled = |plan: &DevicePlan| plan.holds_all() || plan.path == ExpertPath::ZeroCopy;
        if let Some(tier) = self.backend.tier().filter(|tier| is_filled(&tier.plan)) {
            let filled = self.fill_device(&tier.plan, progress);
            self.unless_lost(filled)?;
        }
        Ok(())
    }

    /// What a device did; none if it failed, and the processor goes on.
    ///
    /// # Errors
    /// Those that are not the device's, and those of going on.
    fn unless_lost<T>(&mut self, done: Result<T, EngineError>) -> Result<Option<T>, EngineError> {
        let error = match done {
            Ok(done) => return Ok(Some(done)),
            Err(error) => error,
        };
        match device_failure(&error).and_then(|why| Some((why, self.fallback.take()?))) {
            Some((why, fallback)) => self.leave_device(&fallback, why).map(|()| None),
            None => Err(error),
        }
    }

    /// Brings every expert to the device that has room for all, or that finds them in the ring.
    fn fill_device(
        &mut self,
        plan: &DevicePlan,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(), EngineError> {
        let mut done = 0;
        let layers: Vec<usize> = self.spec.moe_layers().collect();
        for layer in layers {
            self.wants.clear();
            let key = |expert| ExpertKey { layer: layer as u32, expert };
            self.wants.extend((0..self.spec.moe.n_experts as u32).map(|e| Want { key: key(e), stamp: 0 }));
            let mut demand = self.store.demand(&self.wants, Order::Given)?;
            loop {
                let n = demand.take_ready(CALL_EXPERTS, &mut self.leases)?;
                if n == 0 {
                    break;
                }
                done += n;
                self.backend.bring(layer, &mut self.leases)?;
                // None are copied where the device reads the ring.
                if plan.expert_bytes > 0 && plan.path != ExpertPath::ZeroCopy {
                    progress(
                        plan.expert_bytes * done as u64 / plan.n_experts.max(1) as u64,
                        plan.expert_bytes,
                    );
                }
            }
        }
        Ok(())
    }

    /// Empties the ring and a device's tier: what a bench calls cold. Nothing if one of them holds every expert.
    pub fn forget_experts(&mut self) {
        if !self.plan.holds_all() && !self.all_on_device {
            self.backend.forget_experts(0..self.spec.n_layers());
            self.store.forget();
        }
        self.watch.begin_step(&[]);
    }

    /// Streams the ring's memory with all threads, `passes` times: the ceiling that decoding from memory is
    /// held against. None while experts are being read, or if some slots hold nothing and others do.
    pub fn memory_ceiling(&mut self, passes: usize) -> Option<MemoryCeiling> {
        let (kernels, threads) = (self.kernels, self.plan.threads);
        self.store.with_memory(|memory| match memory {
            ArenaMemory::Empty(bytes) => {
                ceiling::touch(bytes, threads);
                ceiling::memory(bytes, kernels, threads, passes)
            }
            ArenaMemory::Full(bytes) => ceiling::memory(bytes, kernels, threads, passes),
        })
    }

    /// What a device does with this model; only before the first token and expert. A device that is lost meanwhile is left.
    ///
    /// # Errors
    /// If the processor cannot take over.
    pub fn measure_device(&mut self) -> Result<Option<DeviceRates>, EngineError> {
        let measured = self.backend.measure();
        Ok(self.unless_lost(measured)?.flatten())
    }

    /// What decoding will do, the processor going through weights at this speed
    /// ([`WeightsRate`](crate::forecast::WeightsRate)), and the device as measured ([`Self::measure_device`]).
    #[must_use]
    pub fn forecast(&self, vault: &Vault, weights_bytes_per_s: f64, rates: Option<DeviceRates>) -> Forecast {
        let tier = self.backend.tier();
        let device = tier.as_ref().map(|tier| &tier.plan).zip(rates);
        forecast(&self.spec, &Touched::of(vault), weights_bytes_per_s, device)
    }

    /// What a decoded token and its kernels take of a device alone; only before the first token and expert. A device that
    /// is lost meanwhile is left.
    ///
    /// # Errors
    /// If the processor cannot take over.
    pub fn device_costs(&mut self) -> Result<Option<TokenCosts>, EngineError> {
        let costs = self.backend.costs();
        Ok(self.unless_lost(costs)?.flatten())
    }

    /// For tests that put something around it.
    #[cfg(test)]
    pub(crate) fn backend_mut(&mut self) -> &mut Box<dyn Backend> {
        &mut self.backend
    }

    /// Does what the governor does.
    #[cfg(test)]
    pub(crate) fn set_ring_limit(&mut self, slots: usize) {
        self.resize_ring(slots).unwrap();
    }

    /// Times a device's kernels from now on, or no longer: gives what was timed so far.
    pub fn profile_device(&mut self, on: bool) -> Option<KernelTimes> {
        self.backend.profile(on)
    }

    /// Whether ring or device have room for every expert: then none is read twice.
    #[must_use]
    pub fn holds_all(&self) -> bool {
        self.all_on_device || self.store.limit() >= self.plan.n_experts
    }

    /// The device's own memory, if the backend has any.
    #[must_use]
    pub fn device_tier(&self) -> Option<DeviceTier> {
        self.backend.tier()
    }

    /// The plan it runs by.
    #[must_use]
    pub const fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The kernels that compute.
    #[must_use]
    pub const fn kernels(&self) -> Kernels {
        self.kernels
    }
}
