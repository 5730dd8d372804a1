//! Puts a model on a device: uploads the backbone, claims planes, cache and tier, binds every kernel.
//!
//! Planes and cache are claimed here; a layer is bound in `layer.rs`, its feed-forward part in `experts.rs`, what they have in
//! common in `products.rs`, and what stands before and behind all layers in `ends.rs`.

mod ends;
mod experts;
mod layer;
mod products;

use std::sync::Arc;
use std::time::Instant;

use smoe_format::expert_file::LayerTable;
use smoe_format::{FfnKind, ModelSpec};
use smoe_gpu::{AttentionScratch, ExpertLayout, Gpu, GpuError, Hidden, KvLayout, Slice, WorkList};
use smoe_kernels::{Kernels, KvType, Pool};
use smoe_meter::TierMeter;

use super::delta::{DeltaPlanes, Nets};
use super::flow::{Flow, HALT_BYTES};
use super::host::HostExperts;
use super::latent::LatentPlanes;
use super::lent::{Flights, Ring};
use super::ops::{Input, Layer, RowBuffer};
use super::plan::{ATTENTION_SCRATCH, Widths, kv_format, layer_block_bytes};
use super::recorder::Recorder;
use super::tier::ExpertTier;
use super::weights::Uploader;
use super::{GpuBackend, LISTS, Pending};
use crate::EngineError;
use crate::backend::{DeviceOpening, HEAD_ROWS, cpu};
use crate::device::{DevicePlan, ExpertPath};
use crate::engine::POLICY;
use crate::kv::BLOCK;
use crate::plan::Plan;
use crate::rope::RopeTable;
use crate::weights::Weights;
use experts::TierOf;

/// The planes that layers share: one layer runs at a time.
pub(super) struct Planes {
    hidden: Slice,
    /// The same of one token, between the entrance of a layer and its router.
    kept: Slice,
    /// Input of attention.
    input: Input,
    /// Queries, keys and values, or latents, as projected.
    pub(super) projected: Slice,
    pub(super) queries: Slice,
    /// Outputs of the heads.
    mixed: Input,
    /// What attention adds.
    delta: Slice,
    /// Input of router and feed-forward parts.
    normed: Input,
    ids: Slice,
    route_weights: Slice,
    /// Outputs of (token, expert) pairs.
    outputs: Slice,
    /// Output of a dense part or a shared expert.
    dense: Slice,
    gates: Slice,
    pub(super) scratch: AttentionScratch,
    /// Of latent attention.
    pub(super) latent: Option<LatentPlanes>,
    /// Of gated delta nets.
    pub(super) net: Option<DeltaPlanes>,
    angles: Slice,
    tables: Slice,
    rows: Vec<RowBuffer>,
    /// Router logits, `[T, n_experts]`.
    router: Slice,
    /// The same of all MoE layers, for the host.
    seen: Slice,
}

pub(super) struct Builder<'a> {
    pub(super) gpu: &'a Gpu,
    pub(super) up: Uploader<'a>,
    pub(super) spec: &'a ModelSpec,
    pub(super) weights: &'a Weights,
    pub(super) tokens: usize,
    context: usize,
    pub(super) exact: bool,
    pub(super) planes: Planes,
    pub(super) kv_type: KvType,
    kv_layout: KvLayout,
    pub(super) kv: Vec<Slice>,
    /// List of the resident parts.
    everyone: Option<WorkList>,
    /// Hidden values of experts, by width, form and number: layers share them.
    hidden: Vec<([usize; 4], Hidden)>,
}

/// Bytes of so many floats.
pub(super) const fn floats(n: usize) -> u64 {
    4 * n as u64
}

impl GpuBackend {
    /// Puts the model on `gpu`, for steps of at most `plan.chunk` tokens. The weights here are not needed
    /// afterwards.
    ///
    /// # Errors
    /// If the device refuses something, or has no room.
    pub(crate) fn new(
        gpu: Arc<Gpu>,
        spec: &ModelSpec,
        weights: &Weights,
        tables: &[LayerTable],
        plan: &Plan,
        device: DevicePlan,
        kernels: Kernels,
        ring: Option<Ring>,
        exact: bool,
    ) -> Result<Self, EngineError> {
        let compiled = gpu.compile_times();
        let meter = Arc::new(TierMeter::default());
        let in_place = ring.as_ref().filter(|_| device.path == ExpertPath::InPlace);
        let tier = match in_place {
            Some(ring) => ExpertTier::in_place(&gpu, tables, &device.slots, ring, meter.clone())?,
            None => {
                let behind = ring.as_ref().filter(|_| device.path == ExpertPath::ZeroCopy);
                ExpertTier::new(&gpu, tables, &device.slots, POLICY, behind, meter.clone())?
            }
        };
        let mut builder = Builder::new(&gpu, spec, weights, tables, plan, device.snapshots, exact)?;
        let first = tables.first().map(|table| ExpertLayout::new(table, table.record_len as u64));
        let mut lists = Vec::new();
        let mut device_list = None;
        if let Some(layout) = &first {
            let list = || WorkList::new(&gpu, layout, plan.chunk, spec.moe.top_k);
            lists = (0..LISTS).map(|_| list()).collect::<Result<_, _>>()?;
            device_list = Some(list()?);
        }
        let mut layers = Vec::with_capacity(spec.n_layers());
        let mut moe_index = 0;
        for layer in 0..spec.n_layers() {
            let tier = (spec.layers[layer] == FfnKind::Moe).then(|| {
                moe_index += 1;
                let (memory, table, slot_bytes) = tier.bindings(moe_index - 1);
                // What the host's lists name: the layer's slots, or those of the ring.
                let listed = in_place.map_or(std::slice::from_ref(memory), Ring::segments);
                let behind = tier.behind(moe_index - 1).zip(ring.as_ref().map(Ring::slot_bytes));
                let table_of = &tables[moe_index - 1];
                let own = device_list.as_ref().expect("a model with experts has a list");
                TierOf {
                    index: moe_index - 1,
                    table: table_of,
                    memory,
                    places: table,
                    behind,
                    listed,
                    slot_bytes,
                    lists: &lists,
                    own,
                }
            });
            layers.push(builder.layer(layer, tier)?);
        }
        let ends = builder.ends()?;
        let n_moe = moe_index;
        let Builder { planes, kv, up, .. } = builder;
        let upload = up.spent;
        let router = n_moe * plan.chunk * spec.moe.n_experts;
        let few = layers.iter().filter_map(|layer: &Layer| layer.ops.moe()).map(|moe| moe.route.few()).min();
        let few = few.unwrap_or(usize::MAX);
        let halting = few.min(plan.chunk);
        // What the device reads as fast as the processor does is not computed here.
        let host = match device.holds_all() || in_place.is_some() {
            true => None,
            false => HostExperts::new(spec, weights, tables, kernels, halting),
        };
        let read = HALT_BYTES + floats(router + HEAD_ROWS * spec.vocab_size + halting * spec.d_model);
        let readbacks = [gpu.readback(read)?, gpu.readback(read)?];
        // Nothing waits for what was written: a device without room for it says so here, or at the first step.
        gpu.check()?;
        let waited = Instant::now();
        gpu.finish_kernels()?;
        let times = gpu.compile_times();
        let opening = DeviceOpening {
            upload,
            kernels: times.kernels - compiled.kernels,
            shaders: times.shaders - compiled.shaders,
            pipelines: times.pipelines - compiled.pipelines,
            wait: waited.elapsed(),
        };
        Ok(Self {
            recorder: Recorder::new(gpu.clone(), meter.clone()),
            tokens: 0,
            visible: 0,
            context: plan.context,
            next: 0,
            pending: Pending::Nothing,
            layers,
            ends,
            rows: planes.rows,
            table_words: Vec::with_capacity(planes.tables.len() as usize / 4),
            tables: planes.tables,
            table_starts: Vec::with_capacity(plan.sessions),
            row_words: Vec::with_capacity(4 * plan.chunk),
            route_weights: planes.route_weights,
            seen: planes.seen,
            kv,
            nets: planes.net.map(Nets::new),
            block: gpu.buffer("a block of keys and values", layer_block_bytes(spec, plan.kv))?,
            tier,
            host,
            outputs: planes.outputs,
            normed: planes.normed.float,
            ring,
            flights: Flights::default(),
            copies: None,
            path_note: None,
            pool: Pool::new(plan.threads, false),
            lists,
            listed: 0,
            readbacks,
            router: vec![0.0; router],
            logits: vec![0.0; HEAD_ROWS * spec.vocab_size],
            headed: Vec::with_capacity(HEAD_ROWS),
            host_hidden: Vec::new(),
            flow: Flow::new(few, plan.chunk * spec.moe.top_k),
            everyone: Vec::with_capacity(plan.chunk),
            tokens_done: 0,
            plan: device,
            opening,
            spec: spec.clone(),
            meter,
            gpu,
        })
    }
}

impl<'a> Builder<'a> {
    fn new(
        gpu: &'a Gpu,
        spec: &'a ModelSpec,
        weights: &'a Weights,
        tables: &[LayerTable],
        plan: &Plan,
        snapshots: usize,
        exact: bool,
    ) -> Result<Self, GpuError> {
        let a = &spec.attention;
        let (t, d, hd) = (plan.chunk, spec.d_model, a.head_dim);
        let groups = cpu::groups(weights.tensors().map(|t| t.encoding), tables);
        let groups = if exact { Vec::new() } else { groups };
        let widths = Widths::of(spec);
        let table = RopeTable::new(&spec.rope, spec.rope_dim(), plan.context);
        let angles: Vec<u8> = (0..plan.context)
            .flat_map(|p| table.cos(p).iter().zip(table.sin(p)).flat_map(|(c, s)| [*c, *s]))
            .flat_map(f32::to_le_bytes)
            .collect();
        let angle_slice = gpu.buffer("angles", angles.len() as u64)?;
        gpu.write(&angle_slice, 0, &angles);
        let is_windowed = |window: usize| window != usize::MAX && plan.window_blocks > 0;
        let pools = 1 + usize::from(plan.window_blocks > 0);
        let blocks = plan.sessions * plan.context.div_ceil(BLOCK) * pools;
        let mut windows: Vec<usize> =
            (0..spec.n_layers()).map(|layer| spec.window(layer).unwrap_or(usize::MAX)).collect();
        windows.sort_unstable();
        windows.dedup();
        let row = |window| {
            let rows = gpu.buffer("rows", (16 * t) as u64)?;
            Ok(RowBuffer { window, is_windowed: is_windowed(window), rows })
        };
        let pairs = t * spec.moe.top_k;
        let plane = |what: &str, n: usize| gpu.buffer(what, floats(n));
        let n_moe = spec.moe_layers().count();
        let kv_layout =
            KvLayout { format: kv_format(plan.kv), n_kv_heads: a.n_kv_heads, head_dim: hd, value_dim: hd };
        let kv_bytes = |layer: usize| {
            let is_windowed = is_windowed(spec.window(layer).unwrap_or(usize::MAX));
            let blocks = if is_windowed { plan.window_blocks } else { plan.kv_positions.div_ceil(BLOCK) };
            if spec.delta_of(layer).is_some() { 0 } else { layer_block_bytes(spec, plan.kv) * blocks as u64 }
        };
        let planes = Planes {
            hidden: plane("hidden states", t * d)?,
            kept: plane("hidden states of a token", d)?,
            input: Input::new(gpu, t, d, &groups)?,
            projected: plane("projections", t * widths.projected)?,
            queries: plane("queries", t * widths.queries)?,
            mixed: Input::new(gpu, t, widths.outputs, &groups)?,
            delta: plane("what attention adds", t * d)?,
            normed: Input::new(gpu, t, d, &groups)?,
            ids: plane("chosen experts", pairs)?,
            // And the halt.
            route_weights: plane("weights of experts", pairs + 1)?,
            outputs: plane("outputs of experts", pairs * d)?,
            dense: plane("output of a dense part", t * d)?,
            gates: plane("gates of shared experts", t)?,
            scratch: AttentionScratch::new(gpu, a.n_heads, a.mixed_dim(), plan.context, ATTENTION_SCRATCH)?,
            latent: LatentPlanes::new(gpu, spec, t, &groups)?,
            net: DeltaPlanes::new(gpu, spec, plan, snapshots, &groups)?,
            angles: angle_slice,
            tables: plane("blocks of sessions", blocks)?,
            rows: windows.into_iter().map(row).collect::<Result<_, GpuError>>()?,
            router: plane("router logits", t * spec.moe.n_experts)?,
            seen: plane("router logits of all layers", n_moe * t * spec.moe.n_experts)?,
        };
        Ok(Self {
            gpu,
            up: Uploader::new(gpu),
            spec,
            weights,
            tokens: t,
            context: plan.context,
            exact,
            planes,
            kv_type: plan.kv,
            kv_layout,
            everyone: None,
            hidden: Vec::new(),
            kv: (0..spec.n_layers())
                .map(|layer| gpu.buffer("keys and values", kv_bytes(layer)))
                .collect::<Result<_, _>>()?,
        })
    }
}
