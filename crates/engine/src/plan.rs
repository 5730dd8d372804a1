//! The memory plan: what a model will hold, answered before anything is claimed.
//!
//! ```text
//! budget = backbone + KV + states + activations + fixed + reserved + ring * slot
//! ```
//!
//! What remains after everything else goes to the ring, up to all experts. The floor is `top_k` slots, so
//! that the misses of a token are in flight together. Less memory makes it slower, never different.

use std::fmt;

use smoe_format::expert_file::LayerTable;
use smoe_format::{Encoding, ModelSpec};
use smoe_kernels::KvType;

use crate::EngineError;
use crate::backend::cpu::CpuBackend;
use crate::kv::{self, KvCache};
use crate::memory::MemoryFacts;
use crate::rope::RopeTable;
use crate::sampler::Sampler;
use crate::weights::Weights;

/// Size of the ring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RingSize {
    /// Whatever memory remains, up to all experts.
    #[default]
    Auto,
    /// So many experts.
    Slots(usize),
    /// So many bytes.
    Bytes(u64),
}

/// What the user asks for; `None` lets the plan choose.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PlanRequest {
    /// Bytes that the process may use.
    pub memory: Option<u64>,
    /// Size of the ring.
    pub ring: RingSize,
    /// Positions of a session.
    pub context: Option<usize>,
    /// Tokens of a prefill step.
    pub chunk: Option<usize>,
    /// The longest step that the plan may choose.
    pub longest_chunk: Option<usize>,
    /// Compute threads.
    pub threads: Option<usize>,
    /// How keys and values are kept.
    pub kv: Option<KvType>,
    /// Sessions open at once; 0 counts as 1.
    pub sessions: usize,
    /// Positions of the KV cache, in contexts: sessions share them, and what earlier ones computed. 0: as many as
    /// sessions.
    pub kv_contexts: usize,
    /// Layers that see a window keep all positions too: what keeping less is compared with.
    pub whole_windows: bool,
    /// Bytes that the caller holds besides the engine: a tokeniser, planes of its own.
    pub reserved: u64,
}

/// Bytes and sizes, decided.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// What the process may use.
    pub budget_bytes: u64,
    /// Resident weights.
    pub backbone_bytes: u64,
    /// Keys and values of all sessions.
    pub kv_bytes: u64,
    /// States of layers with linear attention: two a session, and snapshots.
    pub state_bytes: u64,
    /// Planes of a step, RoPE tables, logits and sampler of each session.
    pub activation_bytes: u64,
    /// Code, stacks, tables, reader buffers, f32 copies of weights.
    pub fixed_bytes: u64,
    /// What the caller holds.
    pub reserved_bytes: u64,
    /// Bytes of a slot.
    pub slot_bytes: u64,
    /// Slots of the ring.
    pub ring_slots: usize,
    /// The fewest slots that work.
    pub ring_floor: usize,
    /// Routed experts of the model.
    pub n_experts: usize,
    /// Positions of a session.
    pub context: usize,
    /// Tokens of a prefill step.
    pub chunk: usize,
    /// Compute threads.
    pub threads: usize,
    /// How keys and values are kept.
    pub kv: KvType,
    /// Sessions open at once.
    pub sessions: usize,
    /// Positions of the KV cache, in all.
    pub kv_positions: usize,
    /// Blocks of the KV cache for layers that see a window, which keep no more than windows; 0 if none does, or they keep
    /// all positions.
    pub window_blocks: usize,
    /// Snapshots of states, to which conversations can go back.
    pub snapshots: usize,
}

/// What the plan is made for.
#[derive(Clone, Copy, Debug)]
pub struct Subject<'a> {
    /// The model.
    pub spec: &'a ModelSpec,
    /// Its records.
    pub layers: &'a [LayerTable],
    /// Length of the backbone file.
    pub backbone_bytes: u64,
    /// No tensor is coded.
    pub all_float: bool,
    /// Number of group sizes among the coded weights.
    pub groups: usize,
    /// Buffers in which readers decode records (the original's files).
    pub decode_bytes: u64,
}

/// Code, stacks, allocator, tables; a tokeniser is the caller's, in `reserved`: EXP-MEMORY-01.
const FIXED_BYTES: u64 = 24 << 20;
/// Tokens of a step that an automatic chunk starts from: enough that an expert's tokens fill a kernel's block.
const CHUNK: usize = 512;
/// A longer automatic chunk, which reads the experts of a long prompt fewer times, may take this part of the
/// budget for its planes.
pub(crate) const CHUNK_SHARE: u64 = 8;
/// Snapshots of states may take this part of the budget, but there is one per session at least, and so many at most.
/// EXP-ENGINE-09.
pub(crate) const SNAPSHOT_SHARE: u64 = 32;
const MAX_SNAPSHOTS: usize = 16;
/// An automatic context asks for no more than this; longer ones are for the user to name.
const CONTEXT: usize = 8192;
/// The widest step.
pub(crate) const MAX_CHUNK: usize = 4096;

impl Plan {
    /// Decides every size.
    ///
    /// # Errors
    /// [`EngineError::Budget`] if even the floor does not fit, [`EngineError::Setting`] for a setting out
    /// of range.
    pub fn new(
        subject: Subject<'_>,
        request: &PlanRequest,
        facts: &MemoryFacts,
    ) -> Result<Self, EngineError> {
        let spec = subject.spec;
        let setting = |name, value: String, rule: String| EngineError::Setting { name, value, rule };
        if let Some(memory) = request.memory
            && memory > facts.limit()
        {
            let rule = format!("is more than the {} that there are", Bytes(facts.limit()));
            return Err(setting("--memory", Bytes(memory).to_string(), rule));
        }
        let budget_bytes = request.memory.unwrap_or_else(|| facts.budget());
        let kv_type = request.kv.unwrap_or(if subject.all_float { KvType::F32 } else { KvType::F16 });
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = request.threads.unwrap_or(cores);
        if !(1..=1024).contains(&threads) {
            return Err(setting("--threads", threads.to_string(), "must be 1 to 1024".to_owned()));
        }
        let sessions = request.sessions.max(1);
        let max_context = spec.max_context;
        if let Some(context) = request.context
            && !(1..=max_context).contains(&context)
        {
            let rule = format!("must be 1 to {max_context}, which the model was made for");
            return Err(setting("--context", context.to_string(), rule));
        }
        if let Some(chunk) = request.chunk
            && !(1..=MAX_CHUNK).contains(&chunk)
        {
            return Err(setting("--chunk", chunk.to_string(), format!("must be 1 to {MAX_CHUNK}")));
        }

        let slot_bytes = subject.layers.iter().map(|l| l.record_len as u64).max().unwrap_or(0);
        let n_experts: usize = subject.layers.iter().map(|l| l.n_experts as usize).sum();
        let ring_floor = spec.moe.top_k.min(n_experts);
        let fixed_bytes = FIXED_BYTES + subject.decode_bytes + Weights::copied_bytes(spec);
        let kv_contexts = if request.kv_contexts == 0 { sessions } else { request.kv_contexts };
        let state = kv::state_bytes(spec);
        let snapshots = (budget_bytes / SNAPSHOT_SHARE).checked_div(state).unwrap_or(0) as usize;
        let snapshots = if state > 0 { snapshots.clamp(sessions, MAX_SNAPSHOTS * sessions) } else { 0 };
        let state_bytes = state * (2 * sessions + snapshots) as u64;
        let window_blocks = |chunk: usize, context: usize| {
            let blocks = kv::window_blocks(spec, context * kv_contexts, sessions, chunk);
            if request.whole_windows { 0 } else { blocks }
        };
        let kv_bytes = |chunk: usize, context: usize| {
            KvCache::windowed_bytes(spec, kv_type, context * kv_contexts, window_blocks(chunk, context))
        };
        let activation_bytes = |chunk: usize, context: usize| {
            let per_session = Sampler::bytes(spec.vocab_size) + 4 * spec.vocab_size as u64;
            CpuBackend::activation_bytes(spec, subject.groups, kv_type, chunk, context, threads)
                + RopeTable::bytes(spec.rope_dim(), context)
                + sessions as u64 * per_session
        };
        let without_ring = |chunk: usize, context: usize| {
            subject.backbone_bytes
                + fixed_bytes
                + request.reserved
                + kv_bytes(chunk, context)
                + state_bytes
                + activation_bytes(chunk, context)
        };
        let ring_min = match request.ring {
            RingSize::Auto => ring_floor,
            RingSize::Slots(n) => n,
            RingSize::Bytes(bytes) => bytes.checked_div(slot_bytes).unwrap_or(0) as usize,
        };
        if ring_min < ring_floor {
            let rule = format!("must hold at least {ring_floor} experts of {} each", Bytes(slot_bytes));
            return Err(setting("--ring", format!("{ring_min} experts"), rule));
        }
        let ring_min = ring_min.min(n_experts);
        let ring_min_bytes = ring_min as u64 * slot_bytes;

        // What the user leaves open shrinks until the ring's minimum fits; the context first, since a
        // shorter chunk costs speed on every prompt.
        let mut context = request.context.unwrap_or(CONTEXT.min(max_context));
        let mut chunk = request.chunk.unwrap_or_else(|| {
            let mut longest = request.longest_chunk.unwrap_or(MAX_CHUNK).clamp(1, MAX_CHUNK);
            while longest > CHUNK && activation_bytes(longest, context) > budget_bytes / CHUNK_SHARE {
                longest /= 2;
            }
            longest
        });
        chunk = chunk.min(context);
        let fits = |chunk, context| without_ring(chunk, context) + ring_min_bytes <= budget_bytes;
        while !fits(chunk, context) {
            if request.context.is_none() && context > 1024 {
                context = (context / 2).max(1024);
            } else if request.chunk.is_none() && chunk > 16 {
                chunk = (chunk / 2).max(16);
            } else if request.context.is_none() && context > 256 {
                context = (context / 2).max(256);
            } else {
                let floor = without_ring(chunk, context) + ring_min_bytes;
                return Err(EngineError::Budget { floor, given: budget_bytes });
            }
            chunk = chunk.min(context);
        }
        let ring_slots = match request.ring {
            RingSize::Auto => {
                let left = budget_bytes - without_ring(chunk, context);
                (left.checked_div(slot_bytes).unwrap_or(0) as usize).min(n_experts)
            }
            RingSize::Slots(_) | RingSize::Bytes(_) => ring_min,
        };
        Ok(Self {
            budget_bytes,
            backbone_bytes: subject.backbone_bytes,
            kv_bytes: kv_bytes(chunk, context),
            state_bytes,
            activation_bytes: activation_bytes(chunk, context),
            fixed_bytes,
            reserved_bytes: request.reserved,
            slot_bytes,
            ring_slots,
            ring_floor,
            n_experts,
            context,
            chunk,
            threads,
            kv: kv_type,
            sessions,
            kv_positions: context * kv_contexts,
            window_blocks: window_blocks(chunk, context),
            snapshots,
        })
    }

    /// Bytes of the ring.
    #[must_use]
    pub const fn ring_bytes(&self) -> u64 {
        self.ring_slots as u64 * self.slot_bytes
    }

    /// Everything together.
    #[must_use]
    pub const fn total_bytes(&self) -> u64 {
        self.floor_bytes() - self.ring_floor as u64 * self.slot_bytes + self.ring_bytes()
    }

    /// The least with which these settings work.
    #[must_use]
    pub const fn floor_bytes(&self) -> u64 {
        self.backbone_bytes
            + self.kv_bytes
            + self.state_bytes
            + self.activation_bytes
            + self.fixed_bytes
            + self.reserved_bytes
            + self.ring_floor as u64 * self.slot_bytes
    }

    /// The ring holds every expert: after loading, the disk is idle.
    #[must_use]
    pub const fn holds_all(&self) -> bool {
        self.ring_slots >= self.n_experts
    }
}

/// True if neither backbone nor experts are coded.
pub(crate) fn all_float(backbone: impl IntoIterator<Item = Encoding>, layers: &[LayerTable]) -> bool {
    backbone.into_iter().all(Encoding::is_float)
        && layers.iter().flat_map(|l| &l.tensors).all(|t| t.encoding.is_float())
}

/// Bytes for people: `1.5 GiB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
        let mut value = self.0 as f64;
        let mut unit = 0;
        while value >= 1024.0 && unit + 1 < UNITS.len() {
            value /= 1024.0;
            unit += 1;
        }
        match unit {
            0 => write!(f, "{} B", self.0),
            _ if value < 10.0 => write!(f, "{value:.2} {}", UNITS[unit]),
            _ => write!(f, "{value:.1} {}", UNITS[unit]),
        }
    }
}
