//! The engine: a vault opened for computing. Sessions in, logits out.

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use smoe_format::{ExpertFile, ExpertKey, FfnKind, LayerTable, ModelSpec, entropy, original};
use smoe_kernels::{EntropyDecoder, Kernels, KernelsError};
use smoe_meter::{
    Phase, PhaseClock, PhaseMeter, PhaseSnapshot, RouteMeter, RouteSnapshot, Step, StepLog, StoreMeter,
    StoreSnapshot,
};
use smoe_store::{
    ArenaMemory, BlockFileSnapshot, DirectIo, Disk, FileDisk, Lease, OpenMode, Order, PolicyKind, Record,
    RecordDecoder, Store, StoreConfig, StoreError, Want, replay::Trace,
};

use crate::EngineError;
use crate::backend::cpu::{self, CALL_EXPERTS, CpuBackend};
use crate::backend::{
    Advanced, Backend, Chosen, DeviceChoice, DeviceTier, HEAD_ROWS, KernelTimes, Row, SharedObserver,
};
use crate::ceiling::{self, MemoryCeiling};
use crate::device::DevicePlan;
use crate::forecast::{Forecast, Touched, forecast};
use crate::governor::Governor;
use crate::kv::{Adopted, BLOCK, KvCache, KvUse, Opened, SpillConfig};
use crate::memory::MemoryFacts;
use crate::plan::{Plan, PlanRequest, Subject, all_float};
use crate::routes::Routes;
use crate::sampler::Sampler;
use crate::session::{Dropped, Session, Synced, reusable};
use crate::vault::Vault;
use crate::watch::RouteWatch;
use crate::weights::Weights;

/// How to open a vault.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// Memory, ring, context, chunk, threads.
    pub plan: PlanRequest,
    /// f32 activations for coded weights too.
    pub exact: bool,
    /// Kernels by name; `None` takes the fastest.
    pub kernels: Option<String>,
    /// Check every record that is read.
    pub verify: bool,
    /// Direct or buffered reads; automatic by default.
    pub disk: OpenMode,
    /// Reads in flight at once; `None` takes what suits the size of a record. An original's files, which are
    /// decoded as they are read, always have the same.
    pub readers: Option<usize>,
    /// When decoding, after each layer, experts of the next layer that are read ahead: so many of the highest
    /// in the ranking of its router over this layer's output. 0 is off.
    pub look_ahead: usize,
    /// After a decoded token, experts of each layer that are read ahead: so many of the highest in its ranking
    /// that it did not choose. 0 is off.
    pub spec: usize,
    /// What computes.
    pub device: DeviceChoice,
    /// Most bytes of a device's memory; `None` is nearly all of it.
    pub vram: Option<u64>,
    /// Most experts of a layer in a device's memory; `None` is as many as fit.
    pub device_slots: Option<usize>,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            plan: PlanRequest::default(),
            exact: false,
            kernels: None,
            verify: true,
            disk: OpenMode::Auto,
            readers: None,
            look_ahead: 0,
            spec: 0,
            device: DeviceChoice::Cpu,
            vram: None,
            device_slots: None,
        }
    }
}

/// Whom the ring evicts: EXP-STORE-09.
pub const POLICY: PolicyKind = PolicyKind::Lrfu;
/// Threads that read the backbone, and experts of some MB.
const READERS: usize = 4;
/// The most that may be asked for.
const MAX_READERS: usize = 64;

/// Reads in flight that saturate a drive, by the size of a record: EXP-STORE-05.
const fn readers(record_bytes: u64) -> usize {
    match record_bytes {
        0x20_0000.. => READERS,
        0x8_0000.. => 2 * READERS,
        _ => 4 * READERS,
    }
}

/// Readers that decode what they read, each with a buffer of its own; none if records are used as they lie on disk.
fn decoding_readers(experts: &ExpertFile) -> Option<usize> {
    if experts.coded {
        Some(readers(experts.longest_record()))
    } else {
        (!experts.original.is_empty()).then_some(READERS)
    }
}

/// Steps whose figures are kept: some minutes of decoding.
const STEPS: usize = 4096;
/// A whole layer is read ahead if the step needs this share of the experts of the layer before: what is read
/// in vain then costs less than the disk's idle time while the backend computes.
const SWEEP_SHARE: f64 = 0.9;
/// Tokens between two at which the look-ahead is scored while it is off: its products cost a router each.
const SCORE_EVERY: u64 = 16;
/// A step of so many tokens and more writes a block of the cache to its file in each layer: it completes many, and
/// copying one takes little of such a layer's time.
const SAVE_ROWS: usize = 2 * BLOCK;

/// What a long call may be told, and asked.
#[derive(Default)]
pub struct Control<'a> {
    /// Set from anywhere to stop; looked at before every layer.
    pub cancel: Option<&'a AtomicBool>,
    /// Asked at the same places.
    pub stop: Option<&'a dyn Fn() -> bool>,
    /// Told (tokens done, tokens to do) as a prefill goes on. Inside a step the layers done count as their
    /// part of its tokens.
    pub progress: Option<&'a mut dyn FnMut(usize, usize)>,
}

impl std::fmt::Debug for Control<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Control").field("cancel", &self.cancel).finish_non_exhaustive()
    }
}

impl<'a> Control<'a> {
    /// Stops when `cancel` is set; tells nothing.
    #[must_use]
    pub fn cancelled_by(cancel: &'a AtomicBool) -> Self {
        Self { cancel: Some(cancel), ..Self::default() }
    }

    fn check(&self) -> Result<(), EngineError> {
        let cancelled = self.cancel.is_some_and(|flag| flag.load(Ordering::Relaxed));
        if cancelled || self.stop.is_some_and(|stop| stop()) { Err(EngineError::Cancelled) } else { Ok(()) }
    }

    fn report(&mut self, done: usize, total: usize) {
        if let Some(progress) = &mut self.progress {
            progress(done, total);
        }
    }
}

/// Sees what a forward computes: for comparing with a reference.
pub trait Observer {
    /// Hidden states entering layer 0 (`index` 0), leaving layer `index - 1`, and, for the last index, after
    /// the final norm: `[tokens, d_model]`, the first of them at position `first`.
    fn hidden(&mut self, index: usize, first: usize, rows: &[f32]);
    /// Router logits of the `index`-th MoE layer, `[tokens, n_experts]`.
    fn router(&mut self, index: usize, first: usize, rows: &[f32]);
    /// Logits, `[tokens, vocab_size]`.
    fn logits(&mut self, first: usize, rows: &[f32]);
}

/// Facts about an open engine, for people and records.
#[derive(Clone, Debug)]
pub struct EngineInfo {
    /// The plan it runs by.
    pub plan: Plan,
    /// Name of the kernels.
    pub kernels: &'static str,
    /// Whether reads bypass the page cache.
    pub direct_io: DirectIo,
    /// Expert file.
    pub experts_path: PathBuf,
    /// The device's memory, if the backend has any of its own.
    pub tier: Option<DeviceTier>,
    /// Why the device is not what one may have hoped for.
    pub device_note: Option<String>,
}

/// The counters of an engine: anyone may read them, from any thread, while it works.
#[derive(Clone, Debug)]
pub struct Meters {
    /// Time by phase, of steps that are over.
    pub phases: Arc<PhaseMeter>,
    /// What the store counts.
    pub store: Arc<StoreMeter>,
    /// How tokens are routed.
    pub routes: Arc<RouteMeter>,
}

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// An end token came.
    End,
    /// So many tokens were asked for.
    Length,
    /// The context is full.
    ContextFull,
    /// The caller stopped it.
    Stopped,
}

/// When a generation ends.
#[derive(Clone, Debug, Default)]
pub struct Limits {
    /// The most new tokens.
    pub max_tokens: usize,
    /// Tokens that end it.
    pub end_tokens: Vec<u32>,
}

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
    /// Tokens computed so far: the clock of the experts' last uses.
    tokens_done: u64,
    /// Tokens of the running `sync` that are done, and that are to do.
    prefilled: (usize, usize),
    watch: RouteWatch,
    governor: Governor,
    steps: StepLog,
    store_before: StoreSnapshot,
    /// Experts by rank, in what reads ahead.
    ranking: Vec<u32>,
    look_ahead: usize,
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

/// The plan for a vault, before anything is claimed.
///
/// # Errors
/// As [`Plan::new`].
pub fn plan(vault: &Vault, request: &PlanRequest, facts: &MemoryFacts) -> Result<Plan, EngineError> {
    let experts = &vault.experts;
    let staging = experts.longest_record() + entropy::SLACK as u64;
    let decode_bytes = decoding_readers(experts).map_or(0, |readers| staging * readers as u64);
    let resident = || vault.backbone.iter().map(|(_, tensor)| tensor.encoding);
    let subject = Subject {
        spec: &vault.spec,
        layers: &experts.layers,
        backbone_bytes: vault.backbone.file_len,
        all_float: all_float(resident(), &experts.layers),
        groups: cpu::groups(resident(), &experts.layers).len(),
        decode_bytes,
    };
    Plan::new(subject, request, facts)
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
        let mut chosen = Chosen::open(&options.device, vault, options.exact)?;
        let plan = plan(vault, &chosen.adapt(&options.plan, vault), &MemoryFacts::detect())?;
        let backbone = FileDisk::open(&vault.backbone_path, options.disk)?;
        let weights = Weights::load(vault, &backbone, READERS)?;
        let store_meter = Arc::new(StoreMeter::default());
        let direct_io = disk.direct().clone();
        let store = open_store(vault, disk, &plan, kernels, options, store_meter.clone())?;
        let spec = vault.spec.clone();
        let corrections = weights.corrections();
        let backend = chosen.backend(
            &options.device,
            vault,
            weights,
            &plan,
            kernels,
            options.exact,
            options.vram,
            options.device_slots,
        )?;
        let phase_meter = Arc::new(PhaseMeter::default());
        let mut kv = KvCache::new(&spec, plan.kv, plan.kv_positions, plan.sessions)?;
        let tier = backend.tier();
        let (on_device, all_on_device) = (tier.is_some(), tier.is_some_and(|tier| tier.plan.holds_all()));
        if on_device {
            kv.keep_on_device();
        }
        Ok(Self {
            kv,
            on_device,
            all_on_device,
            device_note: chosen.note,
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
            tokens_done: 0,
            prefilled: (0, 0),
            watch: RouteWatch::new(&spec),
            governor: Governor::new(plan.slot_bytes, plan.ring_slots, plan.ring_floor),
            steps: StepLog::with_capacity(STEPS),
            store_before: StoreSnapshot::default(),
            ranking: Vec::with_capacity(spec.moe.n_experts),
            look_ahead: options.look_ahead,
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
        }
    }

    /// The counters themselves, for who watches while the engine is busy.
    #[must_use]
    pub fn meters(&self) -> Meters {
        Meters {
            phases: self.phase_meter.clone(),
            store: self.store_meter.clone(),
            routes: self.watch.meter().clone(),
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
    /// Told (bytes done, bytes to do). Without it experts are loaded as they are first needed.
    ///
    /// # Errors
    /// If a read fails.
    pub fn preload(&mut self, progress: &mut dyn FnMut(u64, u64)) -> Result<(), EngineError> {
        if self.plan.holds_all() {
            self.store.preload_all(&mut *progress)?;
        }
        if let Some(tier) = self.backend.tier().filter(|tier| tier.plan.holds_all()) {
            self.fill_device(&tier.plan, progress)?;
        }
        Ok(())
    }

    /// Brings every expert to the device that has room for all.
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
                progress(plan.expert_bytes * done as u64 / plan.n_experts.max(1) as u64, plan.expert_bytes);
            }
        }
        Ok(())
    }

    /// Empties the ring and a device's tier: what a bench calls cold. Nothing if one of them holds every expert.
    pub fn forget_experts(&mut self) {
        if !self.plan.holds_all() && !self.all_on_device {
            self.store.forget();
            self.backend.forget_experts(0..self.spec.n_layers());
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

    /// What decoding will do, memory streaming at this speed; of the device only before the first token and expert.
    ///
    /// # Errors
    /// If the device fails.
    pub fn forecast(&mut self, vault: &Vault, memory_bytes_per_s: f64) -> Result<Forecast, EngineError> {
        let rates = self.backend.measure()?;
        let tier = self.backend.tier();
        let device = tier.as_ref().map(|tier| &tier.plan).zip(rates);
        Ok(forecast(&self.spec, &Touched::of(vault), memory_bytes_per_s, device))
    }

    /// For tests that put something around it.
    #[cfg(test)]
    pub(crate) fn backend_mut(&mut self) -> &mut Box<dyn Backend> {
        &mut self.backend
    }

    /// Does what the governor does.
    #[cfg(test)]
    pub(crate) fn set_ring_limit(&mut self, slots: usize) {
        self.store.set_limit(slots);
    }

    /// Starts a session.
    ///
    /// # Errors
    /// If as many are open as were planned for.
    pub fn open_session(&mut self) -> Result<Session, EngineError> {
        while let Some(seq) = self.dropped.take() {
            self.kv.close(seq);
        }
        Ok(Session {
            seq: self.kv.open()?,
            tokens: Vec::with_capacity(self.plan.context),
            logits: vec![0.0; self.spec.vocab_size],
            pending: Vec::with_capacity(self.plan.chunk),
            wanted: 0,
            shared: false,
            broken: None,
            is_open: true,
            losses: self.losses,
            dropped: self.dropped.clone(),
        })
    }

    /// Brings a session to exactly `tokens`: what it holds of them is reused, what goes beyond is dropped,
    /// the rest is computed. Afterwards [`Session::logits`] are those after the last token.
    ///
    /// When cancelled or failed, the steps that were finished are kept: calling again goes on from there.
    ///
    /// # Errors
    /// If `tokens` is empty, too long, or holds an unknown id; if a read fails; if cancelled.
    ///
    /// # Panics
    /// If the session is another engine's.
    pub fn sync(
        &mut self,
        session: &mut Session,
        tokens: &[u32],
        control: &mut Control<'_>,
    ) -> Result<Synced, EngineError> {
        self.check_owner(session);
        self.check_tokens(tokens)?;
        if self.is_lost(session) {
            session.tokens.clear();
            session.losses = self.losses;
        }
        let reused = self.kv.truncate(session.seq, reusable(&session.tokens, tokens));
        session.tokens.truncate(reused);
        let total = tokens.len() - reused;
        let mut done = 0;
        for chunk in tokens[reused..].chunks(self.plan.chunk) {
            let last = done + chunk.len() == total;
            session.queue(chunk, usize::from(last));
            self.prefilled = (done, total);
            self.step_one(session, control)?;
            done += chunk.len();
            control.report(done, total);
        }
        Ok(Synced { reused, prefilled: total })
    }

    /// Appends one token. Afterwards [`Session::logits`] are those after it.
    ///
    /// # Errors
    /// If the context is full, the id unknown, or a read fails; if cancelled: the token is not appended then. If
    /// the logits are not finite; it is then.
    ///
    /// # Panics
    /// If the session is another engine's.
    pub fn decode(
        &mut self,
        session: &mut Session,
        token: u32,
        control: &mut Control<'_>,
    ) -> Result<(), EngineError> {
        self.check_id(token)?;
        if session.tokens.len() >= self.plan.context {
            let (needed, context) = (session.tokens.len() + 1, self.plan.context);
            return Err(EngineError::ContextFull { needed, context });
        }
        session.queue(&[token], 1);
        self.step_one(session, control)
    }

    /// A step of what one session has queued, its last logits kept in it.
    fn step_one(&mut self, session: &mut Session, control: &mut Control<'_>) -> Result<(), EngineError> {
        let mut logits = std::mem::take(&mut session.logits);
        let mut keep = |_: usize, _: usize, row: &[f32]| logits.copy_from_slice(row);
        let wanted = session.wanted > 0;
        let done = self.step_queued(std::slice::from_mut(session), control, &mut keep);
        session.logits = logits;
        done?;
        if wanted && !is_finite(&session.logits) {
            return Err(EngineError::NotFinite { position: session.tokens.len() - 1 });
        }
        Ok(())
    }

    /// One step of what all these sessions have queued ([`Session::queue`]): one forward, in which an expert that
    /// several need is read once. Calls `on_logits(session, row, logits)` for every row whose logits were asked for,
    /// in order, the rows of a session counted from the first that was. No session's result depends on the others.
    ///
    /// # Errors
    /// If a read or the backend fails or it is cancelled; if there is no room in the cache or more is queued than a step
    /// takes. What was queued is then forgotten, and every session holds what it held before, also if some logits have
    /// been told.
    ///
    /// # Panics
    /// If a session is another engine's.
    pub fn step(
        &mut self,
        sessions: &mut [Session],
        control: &mut Control<'_>,
        on_logits: &mut dyn FnMut(usize, usize, &[f32]),
    ) -> Result<(), EngineError> {
        self.prefilled = (0, sessions.iter().map(|session| session.pending.len()).sum());
        self.step_queued(sessions, control, on_logits)
    }

    fn step_queued(
        &mut self,
        sessions: &mut [Session],
        control: &mut Control<'_>,
        on_logits: &mut dyn FnMut(usize, usize, &[f32]),
    ) -> Result<(), EngineError> {
        let mut told = false;
        let mut tell = |session: usize, row: usize, logits: &[f32]| {
            told = true;
            on_logits(session, row, logits);
        };
        let mut done = self.compute(sessions, control, &mut tell);
        if let Err(error) = &done
            && !told
            && let Some(why) = device_failure(error)
            && let Some(fallback) = self.fallback.take()
        {
            done =
                self.leave_device(&fallback, why).and_then(|()| self.compute(sessions, control, on_logits));
        }
        if let Err(error) = done {
            for session in sessions {
                session.queue(&[], 0);
                if !self.is_lost(session) {
                    self.kv.truncate(session.seq, session.tokens.len());
                }
                session.broken = session.broken.filter(|&position| position < session.tokens.len());
            }
            return Err(error);
        }
        for session in &mut *sessions {
            session.tokens.append(&mut session.pending);
            // Rows whose logits are wanted, but the last, may be taken back.
            if session.shared && session.broken.is_none() && session.wanted <= 1 {
                self.kv.commit(session.seq, &session.tokens);
            }
            session.wanted = 0;
        }
        self.end_step();
        Ok(())
    }

    /// The step itself: what a lost device held is computed first.
    fn compute(
        &mut self,
        sessions: &mut [Session],
        control: &mut Control<'_>,
        on_logits: &mut dyn FnMut(usize, usize, &[f32]),
    ) -> Result<(), EngineError> {
        sessions.iter_mut().try_for_each(|session| self.restore(session, control))?;
        self.place(sessions)?;
        self.run_step(control, None)?;
        self.look_for_numbers(sessions)?;
        self.tell_logits(sessions, on_logits)
    }

    /// Whether what a session held was lost with a device.
    const fn is_lost(&self, session: &Session) -> bool {
        session.losses != self.losses
    }

    /// Computes again what a session held on a device that was lost.
    fn restore(&mut self, session: &mut Session, control: &mut Control<'_>) -> Result<(), EngineError> {
        if !self.is_lost(session) {
            return Ok(());
        }
        let held = std::mem::take(&mut session.tokens);
        let (queued, wanted) = (std::mem::take(&mut session.pending), session.wanted);
        let mut chunks = held.chunks(self.plan.chunk);
        let done = chunks.try_for_each(|chunk| {
            session.queue(chunk, 0);
            self.place(std::slice::from_ref(session))?;
            self.run_step(control, None)?;
            session.tokens.append(&mut session.pending);
            self.end_step();
            Ok(())
        });
        session.queue(&queued, wanted);
        match done {
            Ok(()) => {
                session.losses = self.losses;
                if session.shared && session.broken.is_none() {
                    self.kv.commit(session.seq, &session.tokens);
                }
            }
            // From the beginning, next time.
            Err(_) => session.tokens = held,
        }
        done
    }

    /// Goes on without the device: on the processor, with keys and values of nothing.
    fn leave_device(&mut self, fallback: &Fallback, why: String) -> Result<(), EngineError> {
        let Fallback { vault, disk, exact } = fallback;
        let backbone = FileDisk::open(&vault.backbone_path, *disk)?;
        let weights = Weights::load(vault, &backbone, READERS)?;
        let (spec, tables) = (vault.spec.clone(), &vault.experts.layers);
        self.backend = Box::new(CpuBackend::new(spec, weights, tables, &self.plan, self.kernels, *exact));
        self.kv.leave_device();
        (self.on_device, self.all_on_device) = (false, false);
        self.losses += 1;
        self.device_note = Some(format!("on the processor: {why}"));
        self.warning = Some(EngineError::DeviceLost { why });
        Ok(())
    }

    /// Notes which of the sessions that others may continue have computed something that is no number: a backend or
    /// weights that are broken for some tokens must not spoil what others find. Where the logits of every token are
    /// wanted, they tell ([`Self::tell_logits`]): a step that only answers asks the backend for nothing more.
    fn look_for_numbers(&mut self, sessions: &mut [Session]) -> Result<(), EngineError> {
        let looks = |session: &Session| session.shared && session.wanted < session.pending.len();
        if !sessions.iter().any(looks) {
            return Ok(());
        }
        let width = self.spec.d_model;
        let mut rest = self.backend.hidden()?;
        for session in sessions {
            let (own, others) = rest.split_at(session.pending.len() * width);
            rest = others;
            if looks(session) && session.broken.is_none() && !is_finite(own) {
                let row = own.chunks_exact(width).take_while(|row| is_finite(row)).count();
                session.broken = Some(session.tokens.len() + row);
            }
        }
        Ok(())
    }

    /// Computes the logits that were asked for, a few rows at a time.
    fn tell_logits(
        &mut self,
        sessions: &mut [Session],
        on_logits: &mut dyn FnMut(usize, usize, &[f32]),
    ) -> Result<(), EngineError> {
        let mut rows = [0; HEAD_ROWS];
        let mut of = [(0, 0); HEAD_ROWS];
        let (mut n, mut end) = (0, 0);
        let last = sessions.iter().rposition(|session| session.wanted > 0);
        for i in 0..sessions.len() {
            let wanted = sessions[i].wanted;
            end += sessions[i].pending.len();
            for row in 0..wanted {
                (rows[n], of[n]) = (end - wanted + row, (i, row));
                n += 1;
                if n < HEAD_ROWS && !(Some(i) == last && row + 1 == wanted) {
                    continue;
                }
                self.clock.switch(Phase::Head);
                let logits = self.backend.head(&rows[..n])?;
                self.clock.switch(Phase::Sampling);
                for (&(i, row), logits) in of.iter().zip(logits.chunks_exact(self.spec.vocab_size)) {
                    let session = &mut sessions[i];
                    if session.shared && session.broken.is_none() && !is_finite(logits) {
                        let first = session.tokens.len() + session.pending.len() - session.wanted;
                        session.broken = Some(first + row);
                    }
                    on_logits(i, row, logits);
                }
                n = 0;
            }
        }
        self.clock.switch(Phase::Other);
        Ok(())
    }

    /// Gives an empty session the longest beginning of `tokens`, short of the last one, that an earlier session
    /// computed and that is still in the cache or its file, and returns its length; from here on what it computes
    /// can be found by others.
    ///
    /// # Panics
    /// If the session is another engine's, or not empty.
    pub fn adopt(&mut self, session: &mut Session, tokens: &[u32]) -> usize {
        assert!(session.is_empty(), "only an empty session adopts");
        self.adopt_some(session, tokens, usize::MAX).held
    }

    /// As [`Self::adopt`], but reads about so many `blocks` of the file and no more: to be called again, with the same
    /// tokens, until it is done.
    ///
    /// # Panics
    /// If the session is another engine's, or holds anything that it has not adopted.
    pub fn adopt_some(&mut self, session: &mut Session, tokens: &[u32], blocks: usize) -> Adopted {
        self.check_owner(session);
        session.shared = true;
        if self.is_lost(session) {
            session.tokens.clear();
            session.losses = self.losses;
        }
        let known = &tokens[..tokens.len().saturating_sub(1)];
        let adopted = self.kv.adopt_some(session.seq, known, blocks);
        session.tokens.clear();
        session.tokens.extend_from_slice(&known[..adopted.held]);
        adopted
    }

    /// Makes room in the cache for what a session has queued.
    ///
    /// # Errors
    /// If there is not enough; nothing is taken then.
    pub fn reserve(&mut self, session: &Session) -> Result<(), EngineError> {
        let held = session.tokens.len();
        self.kv.reserve(session.seq, held, held + session.pending.len())
    }

    /// Takes back all but the first `len` tokens of a session.
    pub fn truncate(&mut self, session: &mut Session, len: usize) {
        let mut len = len.min(session.tokens.len());
        if !self.is_lost(session) {
            len = self.kv.truncate(session.seq, len);
        }
        session.tokens.truncate(len);
        session.broken = session.broken.filter(|&position| position < len);
    }

    /// Ends a session. What it computed can still be found if it has ever adopted; its end, if `keep` says so.
    pub fn close(&mut self, mut session: Session, keep: bool) {
        self.check_owner(&session);
        if session.shared && keep && session.broken.is_none() && !self.is_lost(&session) {
            self.kv.commit_all(session.seq, &session.tokens);
        }
        self.kv.close(session.seq);
        session.is_open = false;
    }

    /// Keeps what sessions computed in a file too, and finds what is there from earlier. If the file cannot be used, the
    /// engine goes on without.
    ///
    /// # Errors
    /// As [`smoe_store::BlockFile::open`].
    pub fn spill_to(&mut self, config: &SpillConfig) -> Result<Opened, EngineError> {
        let model = self.fingerprint;
        self.kv.spill_to(config, model)
    }

    /// Queues a few blocks of the cache for its file, without waiting; true if more are left. To be called after each
    /// step: the next one may then wait for the file again, within a bound, when room is short.
    pub fn save_conversations(&mut self, blocks: usize) -> bool {
        self.kv.end_step();
        self.kv.save(blocks)
    }

    /// Waits until the file of the cache has written something, but not for longer than `limit`; false if that passed or
    /// there is no file.
    pub fn wait_for_file(&mut self, limit: Duration) -> bool {
        self.kv.wait_for_file(limit)
    }

    /// Brings everything to the file of the cache, and waits until the drive has it, but not for longer than `limit`.
    /// Returns how many blocks the file may lack; it is then closed.
    pub fn flush_conversations(&mut self, limit: Duration) -> usize {
        self.kv.flush(limit)
    }

    /// What went wrong and was got over, if that was not told yet: that a device was lost
    /// ([`EngineError::DeviceLost`]); the first failure of the file of the cache ([`EngineError::Spill`]), and that it is
    /// given up ([`EngineError::SpillGivenUp`]).
    pub fn take_warning(&mut self) -> Option<EngineError> {
        self.warning.take().or_else(|| self.kv.take_warning())
    }

    /// Blocks of the KV cache, by what they are used for.
    #[must_use]
    pub fn kv_usage(&self) -> KvUse {
        self.kv.usage()
    }

    /// Blocks that another session could get.
    #[must_use]
    pub fn kv_available(&self) -> usize {
        self.kv.available()
    }

    /// Counts of the file of the cache, if there is one.
    #[must_use]
    pub fn spilled(&self) -> Option<BlockFileSnapshot> {
        self.kv.spilled()
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

    /// Draws from [`Session::logits`].
    pub fn sample(&mut self, session: &Session, sampler: &mut Sampler) -> u32 {
        let start = Instant::now();
        let token = sampler.sample(self.kernels, &session.logits);
        let time = start.elapsed();
        self.clock.charge(Phase::Sampling, time);
        if let Some(step) = self.steps.last_mut() {
            step.phases.charge(Phase::Sampling, time);
        }
        token
    }

    /// Generates from where [`Self::sync`] left the session, telling `on_token` each new token as it comes,
    /// an end token included. The last token told is not in the session yet: the next `sync` computes it.
    /// A cancellation ends it as [`Finish::Stopped`].
    ///
    /// # Errors
    /// If a read fails.
    pub fn generate(
        &mut self,
        session: &mut Session,
        sampler: &mut Sampler,
        limits: &Limits,
        control: &mut Control<'_>,
        on_token: &mut dyn FnMut(u32) -> ControlFlow<()>,
    ) -> Result<Finish, EngineError> {
        for n in 1..=limits.max_tokens {
            let token = self.sample(session, sampler);
            let flow = on_token(token);
            if limits.end_tokens.contains(&token) {
                return Ok(Finish::End);
            }
            if flow.is_break() {
                return Ok(Finish::Stopped);
            }
            if n == limits.max_tokens {
                break;
            }
            if session.tokens.len() >= self.plan.context {
                return Ok(Finish::ContextFull);
            }
            match self.decode(session, token, control) {
                Err(EngineError::Cancelled) => return Ok(Finish::Stopped),
                result => result?,
            }
        }
        Ok(Finish::Length)
    }

    /// Computes `tokens` from an empty session and shows `observer` everything.
    ///
    /// # Errors
    /// As [`Self::sync`].
    pub fn observe(&mut self, tokens: &[u32], observer: &mut dyn Observer) -> Result<(), EngineError> {
        self.check_tokens(tokens)?;
        let mut session = self.open_session()?;
        self.observe_in(&mut session, tokens, observer)
    }

    /// Shows `observer` every routed expert of every step from now on; `None` ends it.
    ///
    /// # Errors
    /// If what computes is no CPU.
    pub fn watch_experts(&mut self, observer: Option<SharedObserver>) -> Result<(), EngineError> {
        self.backend.watch_experts(observer)
    }

    fn observe_in(
        &mut self,
        session: &mut Session,
        tokens: &[u32],
        observer: &mut dyn Observer,
    ) -> Result<(), EngineError> {
        for chunk in tokens.chunks(self.plan.chunk) {
            let first = session.tokens.len();
            session.queue(chunk, 0);
            self.place(std::slice::from_mut(session))?;
            self.run_step(&mut Control::default(), Some(observer))?;
            session.tokens.append(&mut session.pending);
            for token in 0..chunk.len() {
                let hidden = self.backend.final_hidden(token)?;
                observer.hidden(self.spec.n_layers(), first + token, hidden);
            }
            let all: Vec<usize> = (0..chunk.len()).collect();
            for rows in all.chunks(HEAD_ROWS) {
                observer.logits(first + rows[0], self.backend.head(rows)?);
            }
            self.end_step();
        }
        Ok(())
    }

    fn check_owner(&self, session: &Session) {
        assert!(Arc::ptr_eq(&self.dropped, &session.dropped), "a session of another engine");
    }

    fn check_id(&self, id: u32) -> Result<(), EngineError> {
        if id as usize >= self.spec.vocab_size {
            return Err(EngineError::Token { id, vocab_size: self.spec.vocab_size });
        }
        Ok(())
    }

    fn check_tokens(&self, tokens: &[u32]) -> Result<(), EngineError> {
        if tokens.is_empty() {
            return Err(EngineError::EmptyPrompt);
        }
        if tokens.len() > self.plan.context {
            let (needed, context) = (tokens.len(), self.plan.context);
            return Err(EngineError::ContextFull { needed, context });
        }
        tokens.iter().try_for_each(|&id| self.check_id(id))
    }

    /// Makes room in the cache for what the sessions have queued, and lists the rows.
    fn place(&mut self, sessions: &[Session]) -> Result<(), EngineError> {
        self.rows.clear();
        self.row_tokens.clear();
        self.head_rows.clear();
        let wanted: usize = sessions.iter().map(|session| session.wanted).sum();
        for session in sessions {
            self.check_owner(session);
            let (first, end) = (session.tokens.len(), session.tokens.len() + session.pending.len());
            self.kv.reserve(session.seq, first, end)?;
            if wanted <= HEAD_ROWS {
                let row = self.rows.len() + session.pending.len();
                self.head_rows.extend(row - session.wanted..row);
            }
            let row = |position| Row { seq: session.seq, position: position as u32 };
            self.rows.extend((first..end).map(row));
            self.row_tokens.extend_from_slice(&session.pending);
        }
        let most = self.plan.chunk.max(1);
        if !(1..=most).contains(&self.rows.len()) {
            let (name, value) = ("tokens of a step", self.rows.len().to_string());
            return Err(EngineError::Setting { name, value, rule: format!("must be 1 to {most}") });
        }
        Ok(())
    }

    /// The forward of one step: all layers for the tokens in `self.rows`.
    fn run_step(
        &mut self,
        control: &mut Control<'_>,
        mut observer: Option<&mut dyn Observer>,
    ) -> Result<(), EngineError> {
        let (n_tokens, first) = (self.rows.len(), self.rows[0].position as usize);
        self.clock.begin_step();
        self.store_before = self.store_meter.snapshot();
        self.watch.begin_step(&self.rows);
        self.backend.embed(&self.row_tokens)?;
        let (mut moe_index, mut layer) = (0, 0);
        while layer < self.spec.n_layers() {
            control.check()?;
            if let Some(slots) = self.governor.advise(self.store.limit()) {
                self.store.set_limit(slots);
            }
            if self.on_device && observer.is_none() {
                let next = self.advance(layer, &mut moe_index)?;
                if next > layer {
                    layer = next;
                    continue;
                }
            }
            if layer > 0 && n_tokens > 1 {
                let (done, total) = self.prefilled;
                control.report(done + n_tokens * layer / self.spec.n_layers(), total);
            }
            if let Some(observer) = &mut observer {
                observer.hidden(layer, first, self.backend.hidden()?);
            }
            if n_tokens >= SAVE_ROWS {
                self.kv.save(1);
            }
            let is_moe = self.spec.layers[layer] == FfnKind::Moe;
            if is_moe && layer > 0 && n_tokens == 1 && self.backend.foretells() {
                self.foretell(layer, moe_index)?;
            }
            self.clock.switch(Phase::Attention);
            self.backend.attend(layer, &self.rows, &mut self.kv)?;
            if !is_moe {
                self.clock.switch(Phase::Dense);
                self.backend.dense(layer)?;
                layer += 1;
                continue;
            }
            self.store.poll();
            self.clock.switch(if self.on_device { Phase::Device } else { Phase::Router });
            let logits = self.backend.route(layer)?;
            if let Some(observer) = &mut observer {
                observer.router(moe_index, first, logits);
            }
            self.routes.route(self.kernels, &self.spec.moe, moe_index, logits);
            self.watch.routed(self.kernels, moe_index, &self.rows, logits, &self.routes);
            moe_index += 1;
            self.run_experts(layer)?;
            layer += 1;
        }
        self.tokens_done += n_tokens as u64;
        self.clock.switch(Phase::Other);
        if n_tokens == 1 && self.spec_width > 0 {
            self.speculate();
        }
        Ok(())
    }

    /// Lets the backend compute what it can by itself from `layer` on, counts how it routed, and brings it the experts
    /// that it halted for; gives the layer that is left.
    fn advance(&mut self, layer: usize, moe_index: &mut usize) -> Result<usize, EngineError> {
        self.clock.switch(Phase::Device);
        let Advanced { next, halted } =
            self.backend.advance(layer, &self.rows, &mut self.kv, &self.head_rows)?;
        for layer in layer..next {
            if self.spec.layers[layer] == FfnKind::Moe {
                self.hear(moe_index)?;
                self.backend.routed(layer, &self.routes);
            }
        }
        if !halted {
            return Ok(next);
        }
        self.hear(moe_index)?;
        self.store.poll();
        self.run_experts(next)?;
        Ok(next + 1)
    }

    /// Routes a layer as the backend has routed it.
    fn hear(&mut self, moe_index: &mut usize) -> Result<(), EngineError> {
        let logits = self.backend.advanced(*moe_index)?;
        self.routes.route(self.kernels, &self.spec.moe, *moe_index, logits);
        self.watch.routed(self.kernels, *moe_index, &self.rows, logits, &self.routes);
        *moe_index += 1;
        Ok(())
    }

    /// Ranks the experts of a layer that comes by its router over the hidden states as they are before it: to
    /// read the highest ahead, and now and then to score the ranking.
    fn foretell(&mut self, layer: usize, index: usize) -> Result<(), EngineError> {
        if self.look_ahead == 0 && !self.tokens_done.is_multiple_of(SCORE_EVERY) {
            return Ok(());
        }
        self.clock.switch(Phase::Router);
        self.watch.foretell(self.kernels, index, self.backend.route(layer)?, &self.routes);
        if self.look_ahead > 0 {
            self.wants.clear();
            self.ranking.truncate(0);
            self.ranking.resize(self.look_ahead.min(self.spec.moe.n_experts), 0);
            smoe_kernels::top_k(self.watch.ahead(), &mut self.ranking);
            let stamp = self.tokens_done;
            let want = |&expert: &u32| Want { key: ExpertKey { layer: layer as u32, expert }, stamp };
            self.wants.extend(self.ranking.iter().map(want));
            self.store.expect(&self.wants);
        }
        Ok(())
    }

    /// Reads ahead, layer by layer, what the last token ranked highest and did not choose.
    fn speculate(&mut self) {
        self.wants.clear();
        let chosen = self.spec.moe.top_k;
        let width = (chosen + self.spec_width).min(self.spec.moe.n_experts);
        for (index, layer) in self.spec.moe_layers().enumerate() {
            self.ranking.truncate(0);
            self.ranking.resize(width, 0);
            smoe_kernels::top_k(self.watch.last(index), &mut self.ranking);
            let key = |&expert: &u32| ExpertKey { layer: layer as u32, expert };
            let stamp = self.tokens_done;
            self.wants.extend(self.ranking[chosen..].iter().map(key).map(|key| Want { key, stamp }));
        }
        self.store.expect(&self.wants);
    }

    /// The experts of a layer: all misses are in flight before anything is computed, then the shared expert,
    /// the hits, and the misses as they arrive; in ascending order, and the next layer's behind them, when a
    /// long step needs most of the layer.
    fn run_experts(&mut self, layer: usize) -> Result<(), EngineError> {
        self.wants.clear();
        for &expert in self.routes.union() {
            if !self.backend.lacks(layer, expert) {
                continue;
            }
            let last = self.routes.of_expert(expert).1.last().map_or(0, |&token| u64::from(token));
            let key = ExpertKey { layer: layer as u32, expert };
            self.wants.push(Want { key, stamp: self.tokens_done + 1 + last });
        }
        let order = if self.backend.wants_order(&self.routes) { Order::Given } else { Order::Arrival };
        let mut demand = self.store.demand(&self.wants, order)?;
        let sweeps = self.wants.len() as f64 >= SWEEP_SHARE * self.spec.moe.n_experts as f64;
        if sweeps && self.rows.len() > 1 && self.spec.layers.get(layer + 1) == Some(&FfnKind::Moe) {
            // As old as the step: what is demanded indeed gets its own stamp.
            let stamp = self.tokens_done + 1;
            let key = |expert| ExpertKey { layer: layer as u32 + 1, expert };
            self.wants.clear();
            let lacked = (0..self.spec.moe.n_experts as u32).filter(|&e| self.backend.lacks(layer + 1, e));
            self.wants.extend(lacked.map(key).map(|key| Want { key, stamp }));
            demand.expect(&self.wants);
        }
        self.clock.switch(Phase::Dense);
        self.backend.begin(layer, &self.routes)?;
        loop {
            self.clock.switch(Phase::DemandWait);
            match demand.take_ready(CALL_EXPERTS, &mut self.leases) {
                Ok(0) => break,
                Ok(_) => {
                    self.clock.switch(Phase::Experts);
                    self.backend.experts(layer, &mut self.leases, &self.routes)?;
                }
                // Every slot is leased: by a device whose work on them is under way, or for ever.
                Err(StoreError::Stalled { .. }) if self.backend.reclaim()? => {}
                Err(error) => return Err(error.into()),
            }
        }
        drop(demand);
        self.clock.switch(Phase::Experts);
        self.backend.finish(layer, &self.routes)
    }

    fn end_step(&mut self) {
        let phases = self.clock.end_step();
        self.watch.end_step(&self.rows);
        let last = self.rows.iter().map(|row| row.position + 1).max();
        self.steps.push(Step {
            index: 0,
            tokens: self.rows.len() as u32,
            context: last.unwrap_or(0),
            phases,
            store: self.store_meter.snapshot() - self.store_before,
        });
    }
}

/// Whether all logits are numbers: else the weights, or a kernel, are broken.
#[must_use]
pub fn is_finite(logits: &[f32]) -> bool {
    // What is none has every bit of its exponent set. The largest of some at a time takes no branch.
    let none = f32::INFINITY.to_bits();
    let largest = |part: &[f32]| part.iter().fold(0, |largest, l| l.abs().to_bits().max(largest));
    logits.chunks(64).all(|part| largest(part) < none)
}

/// What a device said that can do no more.
#[cfg(feature = "gpu")]
fn device_failure(error: &EngineError) -> Option<String> {
    match error {
        EngineError::Gpu(error) => Some(error.to_string()),
        _ => None,
    }
}

/// No device, no failure.
#[cfg(not(feature = "gpu"))]
const fn device_failure(_error: &EngineError) -> Option<String> {
    None
}

/// The kernels called `name`, or the fastest.
///
/// # Errors
/// If this machine has no kernels of that name.
pub fn kernels(name: Option<&str>) -> Result<Kernels, EngineError> {
    Kernels::by_name(name).map_err(|e: KernelsError| EngineError::Setting {
        name: "SMOE_KERNELS",
        value: name.unwrap_or_default().to_owned(),
        rule: e.to_string(),
    })
}

fn open_store(
    vault: &Vault,
    disk: Arc<dyn Disk>,
    plan: &Plan,
    kernels: Kernels,
    options: &EngineOptions,
    meter: Arc<StoreMeter>,
) -> Result<Store, EngineError> {
    let experts = &vault.experts;
    let records = experts
        .records
        .iter()
        .map(|record| {
            let slot_len = experts.table(record.key.layer).map_or(0, |table| table.record_len);
            Record {
                key: record.key,
                offset: record.offset,
                len: record.len as u32,
                slot_len: slot_len as u32,
                crc32c: record.crc32c,
            }
        })
        .collect();
    let decoder: Option<Arc<dyn RecordDecoder>> = if experts.coded {
        Some(Arc::new(Uncode { decoder: EntropyDecoder::new(kernels), layers: experts.layers.clone() }))
    } else if experts.original.is_empty() {
        None
    } else {
        Some(Arc::new(Retile::new(vault)))
    };
    let config = StoreConfig {
        // Each reader that decodes has a buffer, which the plan counts: more there cannot be.
        readers: match (options.readers, decoding_readers(experts)) {
            (Some(n), most) => n.clamp(1, most.unwrap_or(MAX_READERS)),
            (None, Some(most)) => most,
            (None, None) => readers(plan.slot_bytes),
        },
        floor: plan.ring_floor,
        policy: POLICY,
        verify: options.verify,
        ..StoreConfig::new(plan.ring_slots, plan.slot_bytes as usize)
    };
    Ok(Store::open(disk, records, config, decoder, meter)?)
}

/// Turns entropy-coded records into tiles, on the reader threads.
struct Uncode {
    decoder: EntropyDecoder,
    layers: Vec<LayerTable>,
}

impl RecordDecoder for Uncode {
    fn slack(&self) -> usize {
        entropy::SLACK
    }

    fn decode(&self, key: ExpertKey, raw: &[u8], slot: &mut [u8]) -> Result<(), String> {
        let found = self.layers.binary_search_by_key(&key.layer, |table| table.layer);
        let table = found.map(|i| &self.layers[i]).map_err(|_| "is not in the layer table".to_owned())?;
        let len = raw.len() - self.slack();
        self.decoder.decode(raw, len, table, slot).map_err(|error| error.to_string())
    }
}

/// Turns the original's row-major records into tiles, on the reader threads.
struct Retile {
    experts: ExpertFile,
}

impl Retile {
    fn new(vault: &Vault) -> Self {
        Self { experts: vault.experts.clone() }
    }
}

impl RecordDecoder for Retile {
    fn decode(&self, key: ExpertKey, raw: &[u8], slot: &mut [u8]) -> Result<(), String> {
        let found = self.experts.records.binary_search_by_key(&key, |record| record.key);
        let (Ok(i), Some(table)) = (found, self.experts.table(key.layer)) else {
            return Err("is not in the expert table".to_owned());
        };
        original::retile(raw, &self.experts.original[i], table, slot);
        Ok(())
    }
}
