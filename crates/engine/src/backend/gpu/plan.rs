//! What goes into a device's memory, decided before anything is claimed there.

use smoe_format::expert_file::LayerTable;
use smoe_format::{FfnKind, ModelSpec};
use smoe_gpu::{AttentionScratch, DeviceFacts, KvFormat};
use smoe_kernels::KvType;
use smoe_store::PAGE;

use super::{delta, latent};
use crate::EngineError;
use crate::backend::HEAD_ROWS;
use crate::device::{DevicePlan, ExpertPath};
use crate::kv::{self, BLOCK, KvCache};
use crate::plan::{Plan, SNAPSHOT_SHARE};

/// Of a card's memory, the part that is the driver's, the desktop's and fragmentation's.
const DRIVER_SHARE: u64 = 16;
/// What is planned with if a driver does not tell its memory.
const UNKNOWN_MEMORY: u64 = 4 << 30;
/// Besides planes: attention's scratch, staging of uploads.
const FIXED_BYTES: u64 = 192 << 20;
/// Bytes for what the splits of attention come to; more where a token of the longest context needs more.
pub(super) const ATTENTION_SCRATCH: u64 = 64 << 20;

impl DevicePlan {
    /// Decides: backbone, cache and planes, and experts with what remains, in equal shares.
    ///
    /// `limit` bytes are used at most, `None` takes nearly all of a card's memory; `most_slots` experts of a layer. Those
    /// that are read where the ring has them, by `path`, take none. What can not be read over the bus is copied.
    ///
    /// # Errors
    /// If even a token's experts of each layer do not fit, or the device cannot bind what it must.
    pub fn new(
        facts: &DeviceFacts,
        spec: &ModelSpec,
        tables: &[LayerTable],
        plan: &Plan,
        limit: Option<u64>,
        most_slots: Option<usize>,
        path: ExpertPath,
    ) -> Result<Self, EngineError> {
        // Up to so many positions an indexer chooses all that there are, and is not asked.
        if let Some(top_k) = spec.attention.indexer.map(|indexer| indexer.top_k).filter(|&n| plan.context > n)
        {
            let beyond = format!("sparse attention over more than {top_k} positions on a GPU");
            let what = format!("{beyond} (--context {top_k} or --device cpu can)");
            return Err(EngineError::Unsupported { what });
        }
        let memory = facts.memory.unwrap_or(UNKNOWN_MEMORY);
        let budget_bytes = limit.unwrap_or(memory - memory / DRIVER_SHARE);
        let kv_bytes = KvCache::windowed_bytes(spec, plan.kv, plan.kv_positions, plan.window_blocks);
        let plane_bytes = plane_bytes(spec, plan);
        let backbone_bytes = plan.backbone_bytes + bias_bytes(spec);
        let most = facts.max_binding.min(facts.max_buffer);
        let snapshots = snapshots(spec, plan, budget_bytes, most);
        let state_bytes = kv::state_bytes(spec) * (2 * plan.sessions + snapshots) as u64;
        let fixed = backbone_bytes + kv_bytes + state_bytes + plane_bytes;
        let in_place = path == ExpertPath::InPlace;
        let least = |t: &LayerTable| (spec.moe.top_k.min(t.n_experts as usize) * t.record_len) as u64;
        let floor: u64 = if in_place { 0 } else { tables.iter().map(least).sum() };
        if fixed + floor > budget_bytes {
            return Err(EngineError::DeviceBudget {
                device: facts.name.clone(),
                floor: fixed + floor,
                given: budget_bytes,
            });
        }
        let top_k = spec.moe.top_k;
        if let Some(slots) = most_slots.filter(|&slots| slots < top_k) {
            return Err(EngineError::Setting {
                name: "--device-experts",
                value: slots.to_string(),
                rule: format!("must be at least {top_k}, the experts of a token"),
            });
        }
        let each = (budget_bytes - fixed) / tables.len().max(1) as u64;
        let a = &spec.attention;
        let sums = AttentionScratch::least_bytes(a.n_heads, a.mixed_dim(), plan.context);
        if sums > most {
            let what = format!(
                "{} addresses {most} bytes at once: attention over {} positions takes {sums} (a shorter --context, or --device cpu, can)",
                facts.name, plan.context
            );
            return Err(EngineError::Unsupported { what });
        }
        // A kernel addresses a layer's slots of the ring, if all are there; else, in place, a segment of it.
        let stride = plan.slot_bytes.next_multiple_of(PAGE as u64);
        let is_whole = |table: &LayerTable| {
            plan.holds_all() && u64::from(table.n_experts).saturating_mul(stride) <= most
        };
        let path = match path {
            ExpertPath::ZeroCopy if !tables.iter().all(is_whole) => ExpertPath::Import,
            path => path,
        };
        let slots_of = |table: &LayerTable| {
            let n_experts = table.n_experts as usize;
            if in_place {
                return if is_whole(table) { n_experts } else { 0 };
            }
            let slots = (each.min(most) / table.record_len.max(1) as u64) as usize;
            slots.min(n_experts).min(most_slots.unwrap_or(usize::MAX))
        };
        let slots: Vec<usize> = tables.iter().map(slots_of).collect();
        let pairs = slots.iter().zip(tables);
        if let Some((slots, table)) = pairs.clone().find(|(slots, _)| !in_place && **slots < top_k) {
            let what = format!(
                "{} addresses {most} bytes at once: {slots} experts of layer {}, {top_k} are needed",
                facts.name, table.layer
            );
            return Err(EngineError::Unsupported { what });
        }
        let expert_bytes = pairs.map(|(slots, table)| (slots * table.record_len) as u64).sum();
        Ok(Self {
            device: facts.name.clone(),
            budget_bytes,
            backbone_bytes,
            kv_bytes,
            state_bytes,
            snapshots,
            plane_bytes,
            path,
            expert_bytes: if in_place { 0 } else { expert_bytes },
            n_experts: tables.iter().map(|t| t.n_experts as usize).sum(),
            slots,
        })
    }
}

/// Why a model cannot run on a device; `None` if it can.
pub(crate) fn unsupported(spec: &ModelSpec, exact: bool, tables: &[LayerTable]) -> Option<&'static str> {
    let a = &spec.attention;
    let heads_fit = a.head_dim.is_multiple_of(4) && a.head_dim <= 256 && a.n_heads / a.n_kv_heads <= 16;
    let heads_fit = a.latent.as_ref().map_or(heads_fit, |latent| latent::is_able(spec, latent) && !a.sinks);
    if delta::layout(spec).is_some_and(|layout| !layout.is_able()) {
        Some("linear attention of this shape")
    } else if !heads_fit {
        Some("attention heads of this shape")
    } else if spec.moe.n_experts > 1024 || spec.moe.top_k > 32 {
        Some("so many experts")
    } else if exact && tables.iter().flat_map(|t| &t.tensors).any(|t| !t.encoding.is_float()) {
        Some("exact products of coded experts")
    } else {
        None
    }
}

/// Snapshots of states: as many as the plan has, of a card's memory no more than their part of it, and of a layer's states no more than
/// the device binds; one a session at least, if that can be.
fn snapshots(spec: &ModelSpec, plan: &Plan, budget_bytes: u64, most: u64) -> usize {
    let state = kv::state_bytes(spec);
    let Some(of_share) = (budget_bytes / SNAPSHOT_SHARE).checked_div(state) else { return 0 };
    let of_layer = most / (state / spec.delta_layers().count().max(1) as u64);
    (of_share as usize)
        .max(plan.sessions)
        .min(plan.snapshots)
        .min((of_layer as usize).saturating_sub(2 * plan.sessions))
}

/// The longest step whose planes a device can bind.
pub(crate) fn max_chunk(facts: &DeviceFacts, spec: &ModelSpec) -> usize {
    let Widths { projected, queries, outputs } = Widths::of(spec);
    let pairs = spec.moe.top_k * spec.d_model.max(spec.moe.d_expert);
    let mixed = delta::layout(spec).map_or(0, |layout| layout.mixed());
    let routers = spec.moe_layers().count() * spec.moe.n_experts;
    let row = 4 * pairs.max(projected).max(queries).max(outputs).max(mixed).max(routers);
    (facts.max_binding.min(facts.max_buffer) as usize / row.max(1)).max(1)
}

/// Bytes of the experts' biases, which are f32 on a device.
fn bias_bytes(spec: &ModelSpec) -> u64 {
    let moe = &spec.moe;
    let values = if moe.expert_bias { moe.n_experts * (2 * moe.d_expert + spec.d_model) } else { 0 };
    4 * (spec.moe_layers().count() * values) as u64
}

/// Bytes of a KV block of one layer.
pub(super) fn layer_block_bytes(spec: &ModelSpec, kv: KvType) -> u64 {
    let a = &spec.attention;
    (a.kv_planes() * a.n_kv_heads * BLOCK * kv.row_bytes(a.key_dim())) as u64
}

/// How the device's kernels name it.
pub(super) const fn kv_format(kv: KvType) -> KvFormat {
    match kv {
        KvType::F32 => KvFormat::F32,
        KvType::F16 => KvFormat::F16,
        KvType::Q8 => KvFormat::Q8,
    }
}

/// Columns of a token in the planes that attention works on.
pub(super) struct Widths {
    /// What projections make of the hidden states.
    pub(super) projected: usize,
    /// Queries as they meet keys.
    pub(super) queries: usize,
    /// Outputs of the heads.
    pub(super) outputs: usize,
}

impl Widths {
    pub(super) fn of(spec: &ModelSpec) -> Self {
        let a = &spec.attention;
        let heads = a.n_heads * a.head_dim;
        let projected = match a.latent {
            Some(latent) if latent.q_rank > 0 => latent.q_rank + a.key_dim(),
            Some(_) => heads + a.key_dim(),
            None => heads + 2 * a.n_kv_heads * a.head_dim + if a.gate { heads } else { 0 },
        };
        let projected = projected.max(delta::projected(spec));
        Self { projected, queries: a.n_heads * a.key_dim(), outputs: a.n_heads * a.value_dim() }
    }
}

/// Planes of a step; an upper bound of what the backend claims.
fn plane_bytes(spec: &ModelSpec, plan: &Plan) -> u64 {
    let (t, d) = (plan.chunk as u64, spec.d_model as u64);
    let a = &spec.attention;
    let Widths { projected, queries, .. } = Widths::of(spec);
    let attention = (projected + queries + latent::plane_floats(spec) + delta::plane_floats(spec)) as u64;
    let pairs = t * spec.moe.top_k as u64;
    let width = spec
        .layers
        .iter()
        .map(|kind| match kind {
            FfnKind::Dense(width) => *width as u64,
            FfnKind::Moe => spec.moe.d_shared as u64,
        })
        .max()
        .unwrap_or(0);
    let moe_layers = spec.moe_layers().count() as u64;
    let floats = t * (5 * d + attention + 2 * width)
        + pairs * (d + 2 * spec.moe.d_expert as u64)
        + t * spec.moe.n_experts as u64 * (moe_layers + 1)
        + HEAD_ROWS as u64 * spec.vocab_size as u64
        + plan.context as u64 * a.head_dim as u64;
    let scratch = AttentionScratch::least_bytes(a.n_heads, a.mixed_dim(), plan.context);
    // Half as much again for int8 forms.
    floats * 4 * 3 / 2 + FIXED_BYTES + scratch.saturating_sub(ATTENTION_SCRATCH)
}
