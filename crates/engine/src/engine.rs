//! The engine: a vault opened for computing. Sessions in, logits out.

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use smoe_format::{ExpertKey, FfnKind, ModelSpec, original};
use smoe_kernels::{Kernels, KernelsError};
use smoe_meter::{Phase, PhaseClock, PhaseMeter, PhaseSnapshot, StoreMeter, StoreSnapshot};
use smoe_store::{
    DirectIo, Disk, FileDisk, Lease, OpenMode, Record, RecordDecoder, Store, StoreConfig, StoreError,
};

use crate::EngineError;
use crate::backend::cpu::{self, CpuBackend};
use crate::backend::{Backend, HEAD_ROWS, Row};
use crate::kv::KvCache;
use crate::memory::MemoryFacts;
use crate::plan::{Plan, PlanRequest, Subject, all_float};
use crate::routes::Routes;
use crate::sampler::Sampler;
use crate::session::{Dropped, Session, Synced, reusable};
use crate::vault::Vault;
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
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self { plan: PlanRequest::default(), exact: false, kernels: None, verify: true, disk: OpenMode::Auto }
    }
}

/// Reads of 2 MB and more saturate a drive with 2 to 8 in flight: EXP-STORE-05.
const READERS: usize = 4;

/// What a long call may be told, and asked.
#[derive(Default)]
pub struct Control<'a> {
    /// Set from anywhere to stop; looked at before every layer.
    pub cancel: Option<&'a AtomicBool>,
    /// Told (tokens done, tokens to do) after every prefill step.
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
        Self { cancel: Some(cancel), progress: None }
    }

    fn check(&self) -> Result<(), EngineError> {
        match self.cancel {
            Some(flag) if flag.load(Ordering::Relaxed) => Err(EngineError::Cancelled),
            _ => Ok(()),
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
    keys: Vec<ExpertKey>,
    leases: Vec<Lease>,
    rows: Vec<Row>,
    dropped: Arc<Dropped>,
    clock: PhaseClock,
    phase_meter: Arc<PhaseMeter>,
    store_meter: Arc<StoreMeter>,
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
    let decode_bytes = if experts.original.is_empty() {
        0
    } else {
        experts.records.iter().map(|r| r.len).max().unwrap_or(0) * READERS as u64
    };
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
        let plan = plan(vault, &options.plan, &MemoryFacts::detect())?;
        let backbone = FileDisk::open(&vault.backbone_path, options.disk)?;
        let weights = Weights::load(vault, &backbone, READERS)?;
        let store_meter = Arc::new(StoreMeter::default());
        let direct_io = disk.direct().clone();
        let store = open_store(vault, disk, &plan, options, store_meter.clone())?;
        let spec = vault.spec.clone();
        let backend =
            CpuBackend::new(spec.clone(), weights, &vault.experts.layers, &plan, kernels, options.exact);
        let phase_meter = Arc::new(PhaseMeter::default());
        Ok(Self {
            kv: KvCache::new(&spec, plan.kv, plan.context, plan.sessions)?,
            routes: Routes::with_capacity(&spec.moe, plan.chunk),
            keys: Vec::with_capacity(spec.moe.n_experts),
            leases: Vec::with_capacity(spec.moe.n_experts),
            rows: Vec::with_capacity(plan.chunk),
            dropped: Arc::default(),
            clock: PhaseClock::new(phase_meter.clone()),
            phase_meter,
            backend: Box::new(backend),
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

    /// Loads every expert in large sequential reads, if the ring holds them all; otherwise does nothing.
    /// Told (bytes done, bytes to do). Without it experts are loaded as they are first needed.
    ///
    /// # Errors
    /// If a read fails.
    pub fn preload(&mut self, progress: &mut dyn FnMut(u64, u64)) -> Result<(), EngineError> {
        if self.plan.holds_all() {
            self.store.preload_all(progress)?;
        }
        Ok(())
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
        let reused = self.kv.truncate(session.seq, reusable(&session.tokens, tokens));
        session.tokens.truncate(reused);
        let total = tokens.len() - reused;
        let mut done = 0;
        for chunk in tokens[reused..].chunks(self.plan.chunk) {
            let last = done + chunk.len() == total;
            let first = session.tokens.len();
            self.place(session, chunk.len())?;
            self.run_step(chunk, first, control, None)?;
            session.tokens.extend_from_slice(chunk);
            if last {
                self.compute_logits(session, chunk.len() - 1)?;
            }
            self.end_step();
            done += chunk.len();
            if let Some(progress) = &mut control.progress {
                progress(done, total);
            }
        }
        Ok(Synced { reused, prefilled: total })
    }

    /// Appends one token. Afterwards [`Session::logits`] are those after it.
    ///
    /// # Errors
    /// If the context is full, the id unknown, or a read fails; if cancelled: the token is not appended then.
    ///
    /// # Panics
    /// If the session is another engine's.
    pub fn decode(
        &mut self,
        session: &mut Session,
        token: u32,
        control: &mut Control<'_>,
    ) -> Result<(), EngineError> {
        self.check_owner(session);
        self.check_id(token)?;
        if session.tokens.len() >= self.plan.context {
            let (needed, context) = (session.tokens.len() + 1, self.plan.context);
            return Err(EngineError::ContextFull { needed, context });
        }
        let position = session.tokens.len();
        self.place(session, 1)?;
        self.run_step(&[token], position, control, None)?;
        session.tokens.push(token);
        self.compute_logits(session, 0)?;
        self.end_step();
        Ok(())
    }

    /// Draws from [`Session::logits`].
    pub fn sample(&mut self, session: &Session, sampler: &mut Sampler) -> u32 {
        let start = Instant::now();
        let token = sampler.sample(self.kernels, &session.logits);
        self.clock.charge(Phase::Sampling, start.elapsed());
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

    fn observe_in(
        &mut self,
        session: &mut Session,
        tokens: &[u32],
        observer: &mut dyn Observer,
    ) -> Result<(), EngineError> {
        for chunk in tokens.chunks(self.plan.chunk) {
            let first = session.tokens.len();
            self.place(session, chunk.len())?;
            self.run_step(chunk, first, &mut Control::default(), Some(observer))?;
            session.tokens.extend_from_slice(chunk);
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

    /// Makes room in the cache for the next `n` tokens of a session and lists their rows.
    fn place(&mut self, session: &Session, n: usize) -> Result<(), EngineError> {
        let first = session.tokens.len();
        self.kv.reserve(session.seq, first + n)?;
        self.rows.clear();
        self.rows
            .extend((first..first + n).map(|position| Row { seq: session.seq, position: position as u32 }));
        Ok(())
    }

    /// The forward of one step: all layers for the tokens in `self.rows`.
    fn run_step(
        &mut self,
        tokens: &[u32],
        first: usize,
        control: &mut Control<'_>,
        mut observer: Option<&mut dyn Observer>,
    ) -> Result<(), EngineError> {
        self.clock.begin_step();
        self.backend.embed(tokens)?;
        let mut moe_index = 0;
        for layer in 0..self.spec.n_layers() {
            control.check()?;
            if let Some(observer) = &mut observer {
                observer.hidden(layer, first, self.backend.hidden()?);
            }
            self.clock.switch(Phase::Attention);
            self.backend.attend(layer, &self.rows, &mut self.kv)?;
            match self.spec.layers[layer] {
                FfnKind::Dense(_) => {
                    self.clock.switch(Phase::Dense);
                    self.backend.dense(layer)?;
                }
                FfnKind::Moe => {
                    self.clock.switch(Phase::Router);
                    let logits = self.backend.route(layer)?;
                    if let Some(observer) = &mut observer {
                        observer.router(moe_index, first, logits);
                    }
                    self.routes.route(self.kernels, &self.spec.moe, logits);
                    moe_index += 1;
                    self.run_experts(layer)?;
                }
            }
        }
        self.clock.switch(Phase::Other);
        Ok(())
    }

    /// The experts of a layer: all misses are in flight before anything is computed, then the shared expert,
    /// the hits, and the misses as they arrive.
    fn run_experts(&mut self, layer: usize) -> Result<(), EngineError> {
        self.keys.clear();
        let keys = self.routes.union().iter().map(|&expert| ExpertKey { layer: layer as u32, expert });
        self.keys.extend(keys);
        let mut demand = self.store.demand(&self.keys)?;
        self.clock.switch(Phase::Dense);
        self.backend.begin(layer, &self.routes)?;
        loop {
            self.clock.switch(Phase::DemandWait);
            match demand.take_ready(&mut self.leases) {
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

    /// Logits of a token of the step, the last one of the session.
    fn compute_logits(&mut self, session: &mut Session, token: usize) -> Result<(), EngineError> {
        self.clock.switch(Phase::Head);
        session.logits.copy_from_slice(self.backend.head(&[token])?);
        if session.logits.iter().all(|l| l.is_finite()) {
            Ok(())
        } else {
            Err(EngineError::NotFinite { position: session.tokens.len() - 1 })
        }
    }

    fn end_step(&mut self) {
        self.clock.end_step();
    }
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
    let decoder: Option<Arc<dyn RecordDecoder>> =
        if experts.original.is_empty() { None } else { Some(Arc::new(Retile::new(vault))) };
    let config = StoreConfig {
        slots: plan.ring_slots,
        slot_bytes: plan.slot_bytes as usize,
        readers: READERS,
        verify: options.verify,
    };
    Ok(Store::open(disk, records, config, decoder, meter)?)
}

/// Turns the original's row-major records into tiles, on the reader threads.
struct Retile {
    experts: smoe_format::ExpertFile,
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
