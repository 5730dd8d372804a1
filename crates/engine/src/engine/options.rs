//! How an engine is opened, and what its callers hand it and hear of it.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use smoe_meter::{PhaseMeter, RouteMeter, StoreMeter, TierMeter};
use smoe_store::{DirectIo, OpenMode};

use crate::EngineError;
use crate::backend::{DeviceChoice, DeviceOpening, DeviceTier};
use crate::device::ExpertPath;
use crate::plan::{Plan, PlanRequest};

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
    /// When decoding, experts of the next layer that are read ahead while those of a layer arrive: so many of the
    /// highest in the ranking of its router, applied a layer early. `None` takes as many as prove worth it, 0 is off.
    pub look_ahead: Option<usize>,
    /// After a decoded token, experts of each layer that are read ahead: so many of the highest in its ranking
    /// that it did not choose. 0 is off.
    pub spec: usize,
    /// What computes.
    pub device: DeviceChoice,
    /// Most bytes of a device's memory; `None` is nearly all of it.
    pub vram: Option<u64>,
    /// Most experts of a layer in a device's memory; `None` is as many as fit.
    pub device_slots: Option<usize>,
    /// How experts come to a device.
    pub device_path: ExpertPath,
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
            look_ahead: None,
            spec: 0,
            device: DeviceChoice::Cpu,
            vram: None,
            device_slots: None,
            device_path: ExpertPath::Auto,
        }
    }
}

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

    pub(super) fn check(&self) -> Result<(), EngineError> {
        let cancelled = self.cancel.is_some_and(|flag| flag.load(Ordering::Relaxed));
        if cancelled || self.stop.is_some_and(|stop| stop()) { Err(EngineError::Cancelled) } else { Ok(()) }
    }

    pub(super) fn report(&mut self, done: usize, total: usize) {
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

/// Where the time went in which an engine was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpenTimes {
    /// Finding and opening a device.
    pub device: Duration,
    /// Reading the backbone, and claiming the ring.
    pub read: Duration,
    /// Making the backend: on a device, what `on_device` tells, and claiming memory there.
    pub backend: Duration,
    /// The device's part.
    pub on_device: Option<DeviceOpening>,
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
    /// Where opening's time went.
    pub open_times: OpenTimes,
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
    /// What a device's tier of experts counts, if there is one.
    pub tier: Option<Arc<TierMeter>>,
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
