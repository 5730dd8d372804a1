//! Puts a model on a device: uploads the backbone, claims planes, cache and tier, binds every kernel.

use std::sync::Arc;
use std::time::Instant;

use smoe_format::expert_file::{LayerTable, TensorEntry};
use smoe_format::{Encoding, FfnKind, ModelSpec, Uniform};
use smoe_gpu::{
    Angles, Argmax, Attention, AttentionGate, AttentionHeads, AttentionOutputs, AttentionScratch, Beside,
    CodedMatmul, CodedPlane, Columns, Delta, Embed, ExactMatmul, ExpertLayout, FloatMatmul, Gpu, GpuError,
    Halt, Hidden, KvLayout, MixNorm, NormInput, NormMatmul, NormOutputs, OwnMatmul, Projections as Projected,
    QkNorm, RopeAppend, RopeInput, RopePairs, Route, RouteInputs, RouteOutputs, RouterNorm, Rows, Shared,
    Slice, Weights as DeviceWeights, WorkList,
};
use smoe_kernels::{Kernels, KvType, Matrix, Pool};
use smoe_meter::TierMeter;

use super::delta::{DeltaPlanes, Nets};
use super::flow::{Flow, HALT_BYTES};
use super::host::HostExperts;
use super::latent::LatentPlanes;
use super::lent::{Flights, Ring};
use super::ops::{
    Ends, Gate, Input, Layer, LayerOps, Lone, Mixer, Moe, Operands, Product, Resident, RowBuffer,
    SharedExpert,
};
use super::plan::{ATTENTION_SCRATCH, Widths, kv_format, layer_block_bytes};
use super::recorder::Recorder;
use super::tier::ExpertTier;
use super::weights::{DeviceMatrix, Part, Uploader, stackable};
use super::{GpuBackend, LISTS, Pending};
use crate::EngineError;
use crate::backend::{DeviceOpening, HEAD_ROWS, cpu};
use crate::device::{DevicePlan, ExpertPath};
use crate::engine::POLICY;
use crate::kv::BLOCK;
use crate::plan::Plan;
use crate::rope::RopeTable;
use crate::weights::{Delta as DeltaTensors, Ffn, LayerFfn, LayerWeights, Projections, Weights};

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

/// The experts of a layer, for binding.
struct TierOf<'a> {
    /// Its number among the MoE layers.
    index: usize,
    table: &'a LayerTable,
    /// Slots that the device finds by itself, and where it is told of each expert.
    memory: &'a Slice,
    places: &'a Slice,
    /// Slots of the ring behind them, and how far those are apart.
    behind: Option<(&'a Slice, u64)>,
    /// Slots that the host's lists name, by segment.
    listed: &'a [Slice],
    slot_bytes: u64,
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

/// The weights that the input of a feed-forward part is multiplied by.
fn multiplied(ffn: &LayerFfn, experts: Option<&LayerTable>) -> Vec<Encoding> {
    let of = |ffn: &Ffn| [ffn.gate.encoding, ffn.up.encoding];
    match ffn {
        LayerFfn::Dense(dense) => of(dense).into(),
        LayerFfn::Moe { router, shared, .. } => {
            let routed = experts.iter().flat_map(|table| &table.tensors[..2]).map(|tensor| tensor.encoding);
            routed.chain(shared.iter().flat_map(of)).chain([router.encoding]).collect()
        }
    }
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
                TierOf {
                    index: moe_index - 1,
                    table: table_of,
                    memory,
                    listed,
                    places: table,
                    behind,
                    slot_bytes,
                }
            });
            layers.push(builder.layer(layer, tier, &lists, device_list.as_ref())?);
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

    /// What the layer before `layer` left to be added.
    fn delta_before(&self, layer: usize) -> Delta<'_> {
        let Some(before) = layer.checked_sub(1) else { return Delta::None };
        match &self.weights.layers[before].ffn {
            LayerFfn::Dense(_) => Delta::Plane(&self.planes.dense, None),
            LayerFfn::Moe { shared, shared_scale, .. } => Delta::Experts {
                outputs: &self.planes.outputs,
                weights: &self.planes.route_weights,
                top_k: self.spec.moe.top_k,
                shared: shared.as_ref().map(|_| Shared {
                    output: &self.planes.dense,
                    gate: shared_scale.as_ref().map(|_| &self.planes.gates),
                }),
            },
        }
    }

    /// The word behind the routing weights.
    fn halt(&self) -> Halt<'_> {
        Halt { words: &self.planes.route_weights, at: self.tokens * self.spec.moe.top_k }
    }

    /// Stops at a halt if it adds anything.
    fn norm(
        &self,
        weight: &Slice,
        delta: Delta<'_>,
        rows: Option<(&Slice, usize)>,
        tokens: usize,
        out: &Input,
    ) -> Result<MixNorm, GpuError> {
        let coded = out.coded();
        let outputs = NormOutputs { plane: Some(&out.float), coded: &coded };
        let (d, eps, hidden) = (self.spec.d_model, self.spec.rms_norm_eps, &self.planes.hidden);
        let halt = (!matches!(delta, Delta::None)).then(|| self.halt());
        let norm = MixNorm::halting(self.gpu, tokens, d, eps, hidden, weight, delta, rows, outputs, halt)?;
        Ok(norm.scaled(self.spec.multipliers.residual as f32))
    }

    /// `out[t, offset..] = W input[t]`, W being `matrices` one under the other.
    pub(super) fn product(
        &mut self,
        matrices: &[Matrix<'_>],
        input: &Input,
        tokens: usize,
        out: &Slice,
        stride: usize,
    ) -> Result<Vec<Product>, GpuError> {
        let mut products = Vec::new();
        for (matrix, offset) in self.stacks(matrices)? {
            self.products_of(&matrix, input, tokens, out, stride, offset, &mut products)?;
        }
        Ok(products)
    }

    /// Matrices of one input, as many together as can be, and where the outputs of each begin.
    fn stacks(&mut self, matrices: &[Matrix<'_>]) -> Result<Vec<(DeviceMatrix, usize)>, GpuError> {
        let mut stacks = Vec::new();
        let mut offset = 0;
        let mut rest = matrices;
        while !rest.is_empty() {
            let n = (2..=rest.len()).rev().find(|&n| stackable(&rest[..n])).unwrap_or(1);
            let (together, others) = rest.split_at(n);
            stacks.push((self.up.stack(together)?, offset));
            offset += together.iter().map(Matrix::rows).sum::<usize>();
            rest = others;
        }
        Ok(stacks)
    }

    /// One token's products with a coded and a float matrix, in one dispatch.
    fn beside(
        &self,
        stacks: &[(DeviceMatrix, usize)],
        input: &Input,
        out: &Slice,
        stride: usize,
    ) -> Result<Option<Beside>, GpuError> {
        let [(coded, first), (float, second)] = stacks else { return Ok(None) };
        let (Some(tiles), [coded_part], [float_part]) =
            (coded.encoding.tiles(), coded.parts.as_slice(), float.parts.as_slice())
        else {
            return Ok(None);
        };
        let x = input.coded.iter().find(|x| x.suits(tiles, coded.cols));
        let Some(x) = x.filter(|_| !self.exact && float.encoding.is_float()) else { return Ok(None) };
        let columns = |offset: usize| Columns { plane: out.clone(), stride, offset };
        let weights = |matrix: &DeviceMatrix, part: &Part| {
            DeviceWeights::new(part.bytes.clone(), part.rows, matrix.cols, matrix.encoding)
        };
        Beside::products(
            self.gpu,
            (&weights(coded, coded_part), x, &columns(*first)),
            (&weights(float, float_part), &input.float, &columns(*second)),
        )
    }

    fn products_of(
        &self,
        matrix: &DeviceMatrix,
        input: &Input,
        tokens: usize,
        out: &Slice,
        stride: usize,
        offset: usize,
        products: &mut Vec<Product>,
    ) -> Result<(), GpuError> {
        for part in &matrix.parts {
            let weights = DeviceWeights::new(part.bytes.clone(), part.rows, matrix.cols, matrix.encoding);
            let columns = Columns { plane: out.clone(), stride, offset: offset + part.first_row };
            products.push(match matrix.encoding.tiles() {
                Some(_) if self.exact => {
                    Product::Exact(ExactMatmul::new(self.gpu, &weights, &input.float, tokens, &columns)?)
                }
                Some(tiles) => {
                    let x = input.coded.iter().find(|x| x.suits(tiles, matrix.cols));
                    let x = x.expect("every group size of the weights has its plane");
                    Product::Coded(CodedMatmul::new(self.gpu, &weights, x, &columns)?)
                }
                None => Product::Float(FloatMatmul::new(self.gpu, &weights, &input.float, tokens, &columns)?),
            });
        }
        Ok(())
    }

    /// The product of a norm in one kernel, if that can be and is worth it.
    fn norm_product(
        &self,
        weight: &Slice,
        delta: Delta<'_>,
        matrix: &DeviceMatrix,
        out: &Slice,
        stride: usize,
    ) -> Result<Option<NormMatmul>, GpuError> {
        let [part] = matrix.parts.as_slice() else { return Ok(None) };
        if self.exact || matrix.encoding.tiles().is_none() {
            return Ok(None);
        }
        let norm = NormInput {
            hidden: &self.planes.hidden,
            delta,
            residual: self.spec.multipliers.residual as f32,
            kept: &self.planes.kept,
            weight,
            eps: self.spec.rms_norm_eps,
        };
        let weights = DeviceWeights::new(part.bytes.clone(), part.rows, matrix.cols, matrix.encoding);
        NormMatmul::new(self.gpu, &weights, norm, &Columns::whole(out.clone(), stride))
    }

    fn layer(
        &mut self,
        layer: usize,
        tier: Option<TierOf<'_>>,
        lists: &[WorkList],
        device_list: Option<&WorkList>,
    ) -> Result<Layer, EngineError> {
        let weights: &'a LayerWeights = &self.weights.layers[layer];
        let host: &'a Weights = self.weights;
        let matrices: Vec<Matrix<'a>> = match &weights.projections {
            Projections::Heads { q, k, v, gate, .. } => {
                [q, k, v].into_iter().chain(gate).map(|w| host.matrix(w)).collect()
            }
            Projections::Latent { q_down, q, kv_down, .. } => {
                [q_down.as_ref().map_or(q, |(down, _)| down), kv_down].map(|w| host.matrix(w)).into()
            }
            Projections::Delta(delta) => {
                let DeltaTensors { q, k, v, gate, beta, decay, .. } = &**delta;
                [q, k, v, gate, beta, decay].map(|w| host.matrix(w)).into()
            }
        };
        let rows: usize = matrices.iter().map(Matrix::rows).sum();
        // Four columns are one vector where states are asked.
        let stride = rows.next_multiple_of(if self.spec.delta_of(layer).is_some() { 4 } else { 1 });
        let (t, d) = (self.tokens, self.spec.d_model);

        let norm_weight = self.up.vector(&weights.attn_norm)?;
        let encodings: Vec<Encoding> = matrices.iter().map(Matrix::encoding).collect();
        let input = self.planes.input.for_weights(&encodings);
        let enter = self.norm(&norm_weight, self.delta_before(layer), None, t, &input)?;
        let enter_plain = self.norm(&norm_weight, Delta::None, None, t, &input)?;

        let projected = self.planes.projected.clone();
        let stacked = if stackable(&matrices) { Some(self.up.stack(&matrices)?) } else { None };
        let stacks = match &stacked {
            Some(stacked) => vec![(stacked.clone(), 0)],
            None => self.stacks(&matrices)?,
        };
        let mut qkv = Vec::new();
        for (matrix, offset) in &stacks {
            self.products_of(matrix, &input, t, &projected, stride, *offset, &mut qkv)?;
        }
        let lone_qkv = self.beside(&stacks, &input, &projected, stride)?;
        // Between them the router's norm has what is kept.
        let lone = match &stacked {
            Some(stacked) if matches!(weights.ffn, LayerFfn::Moe { .. }) => {
                let made = |delta| self.norm_product(&norm_weight, delta, stacked, &projected, stride);
                let (enter, enter_plain) = (made(self.delta_before(layer))?, made(Delta::None)?);
                enter.zip(enter_plain).map(|(enter, enter_plain)| Lone { enter, enter_plain })
            }
            _ => None,
        };
        let window = self.spec.window(layer).unwrap_or(usize::MAX);
        let row_buffer = self.planes.rows.iter().find(|rows| rows.window == window);
        let (row_words, tables, angle_table) = (
            row_buffer.expect("every window has its rows").rows.clone(),
            self.planes.tables.clone(),
            self.planes.angles.clone(),
        );
        let rows = Rows { rows: &row_words, tables: &tables };
        let angles = Angles {
            table: &angle_table,
            positions: self.context,
            dim: self.spec.rope_dim(),
            pairs: if self.spec.rope.interleaved { RopePairs::Neighbours } else { RopePairs::Halves },
        };
        let mixed = match (&weights.projections, &self.planes.net) {
            (Projections::Delta(_), Some(net)) => &net.mixed,
            _ => &self.planes.mixed,
        };
        let mixed = Input { float: mixed.float.clone(), coded: mixed.coded.clone() };
        let wanted = host.matrix(&weights.o).tiles().filter(|_| !self.exact);
        let coded = wanted.and_then(|u| mixed.coded.iter().find(|plane| plane.suits(u, weights.o.cols)));
        let mixer = match &weights.projections {
            Projections::Heads { bias, norm, .. } => {
                self.heads(layer, bias.as_ref(), norm.as_ref(), stride, rows, angles, &mixed.float, coded)?
            }
            Projections::Delta(delta) => {
                Mixer::Delta(Box::new(self.delta(layer, delta, stride, &mixed.float, coded)?))
            }
            Projections::Latent { .. } => {
                Mixer::Latent(Box::new(self.latent(layer, stride, rows, angles, &mixed.float, coded)?))
            }
        };
        let delta = self.planes.delta.clone();
        let o_matrix = self.up.matrix(&host.matrix(&weights.o))?;
        let mut o = Vec::new();
        self.products_of(&o_matrix, &mixed, t, &delta, d, 0, &mut o)?;
        // Others' outputs come as int8.
        let lone_o = match (&mixer, o_matrix.parts.as_slice(), coded) {
            (Mixer::Latent(_), [part], Some(_)) => {
                let (cols, encoding) = (o_matrix.cols, o_matrix.encoding);
                let matrix = DeviceWeights::new(part.bytes.clone(), part.rows, cols, encoding);
                OwnMatmul::new(self.gpu, &matrix, &mixed.float, &Columns::whole(delta.clone(), d))?
            }
            _ => None,
        };
        let o_bias = weights.o_bias.as_ref().map(|bias| self.up.vector(bias)).transpose()?;
        let norm_weight = self.up.vector(&weights.ffn_norm)?;
        let added = Delta::Plane(&self.planes.delta, o_bias.as_ref());
        let normed =
            self.planes.normed.for_weights(&multiplied(&weights.ffn, tier.as_ref().map(|tier| tier.table)));
        let leave = self.norm(&norm_weight, added, None, t, &normed)?;

        let ops = match (&weights.ffn, tier) {
            (LayerFfn::Dense(ffn), _) => LayerOps::Dense(Box::new(self.resident(host, ffn, &normed)?)),
            (LayerFfn::Moe { router, router_bias, correction, shared, shared_scale, biases }, Some(tier)) => {
                let TierOf { index, table, memory, listed, places, behind, slot_bytes } = tier;
                let layout = ExpertLayout::new(table, slot_bytes).activated(self.spec.moe.activation);
                let layout = match biases {
                    Some(biases) => layout.biased(self.up.rows(&biases.each_ref().map(|b| host.matrix(b)))?),
                    None => layout,
                };
                let logits = self.planes.router.clone();
                let n_experts = self.spec.moe.n_experts;
                let matrix = self.up.matrix(&host.matrix(router))?;
                let mut router = Vec::new();
                self.products_of(&matrix, &normed, t, &logits, n_experts, 0, &mut router)?;
                let whole = match matrix.parts.as_slice() {
                    [part] if matrix.encoding.is_float() => {
                        let bytes = part.bytes.clone();
                        Some(DeviceWeights::new(bytes, part.rows, matrix.cols, matrix.encoding))
                    }
                    _ => None,
                };
                let shared = match shared {
                    None => None,
                    Some(ffn) => {
                        let expert = self.resident(host, ffn, &normed)?;
                        let gate = match shared_scale {
                            None => None,
                            Some(scale) => Some(self.gate(host.matrix(scale), &normed)?),
                        };
                        Some(SharedExpert { expert, gate })
                    }
                };
                let hidden = self.hidden(table, &layout, t * self.spec.moe.top_k)?;
                let operands = Operands {
                    layout,
                    input: Input { float: normed.float.clone(), coded: normed.coded.clone() },
                    hidden,
                    outputs: self.planes.outputs.clone(),
                };
                let own = device_list.expect("a model with experts has a list");
                let bias = router_bias.as_ref().map(|bias| self.up.vector(bias)).transpose()?;
                let correction = (!correction.is_empty()).then(|| self.up.vector(correction)).transpose()?;
                // What `leave` does.
                let norm = RouterNorm {
                    hidden: &self.planes.hidden,
                    before: lone.is_some().then_some(&self.planes.kept),
                    weight: &norm_weight,
                    added: &self.planes.delta,
                    bias: o_bias.as_ref(),
                    eps: self.spec.rms_norm_eps,
                    residual: self.spec.multipliers.residual as f32,
                    coded: normed.coded.first(),
                };
                let inputs = RouteInputs {
                    logits: &logits,
                    bias: bias.as_ref(),
                    correction: correction.as_ref(),
                    router: whole.as_ref().map(|weights| (weights, &normed.float)),
                    norm: (normed.coded.len() <= 1).then_some(norm),
                    slots: places,
                };
                let outputs = RouteOutputs {
                    ids: &self.planes.ids,
                    weights: &self.planes.route_weights,
                    list: own,
                    seen: Some((&self.planes.seen, index)),
                };
                let halt = (self.halt(), (index + 1) as f32);
                let route = Route::halting(self.gpu, t, &self.spec.moe, inputs, outputs, Some(halt))?;
                // Longer steps find nothing behind the slots.
                let tokens = if behind.is_some() { t.min(route.few()) } else { t };
                let few = WorkList { tokens, ..own.clone() };
                let lone = operands.with_shared(self.gpu, &few, memory, behind, shared.as_ref())?;
                LayerOps::Moe(Box::new(Moe {
                    index,
                    router,
                    bias: router_bias.clone(),
                    route,
                    own: operands.routed(self.gpu, &few, memory, behind)?,
                    list: own.clone(),
                    lists: lists
                        .iter()
                        .flat_map(|list| listed.iter().map(move |memory| (list, memory)))
                        .map(|(list, memory)| operands.routed(self.gpu, list, memory, None))
                        .collect::<Result<_, _>>()?,
                    operands,
                    shared,
                    lone,
                    logits,
                }))
            }
            (LayerFfn::Moe { .. }, None) => unreachable!("an MoE layer has its table"),
        };
        Ok(Layer { enter, enter_plain, qkv, lone_qkv, lone, mixer, window, o, lone_o, leave, ops })
    }

    /// Queries, keys and values of heads of their own, and attention over them, of a layer.
    fn heads(
        &mut self,
        layer: usize,
        bias: Option<&[Vec<f32>; 3]>,
        norm: Option<&[Vec<f32>; 2]>,
        stride: usize,
        rows: Rows<'_>,
        angles: Angles<'_>,
        mixed: &Slice,
        coded: Option<&CodedPlane>,
    ) -> Result<Mixer, EngineError> {
        let a = self.spec.attention;
        let (heads, kv_heads) = (a.n_heads * a.head_dim, a.n_kv_heads * a.head_dim);
        let (t, projected) = (self.tokens, self.planes.projected.clone());
        let padded = |bias: &[Vec<f32>; 3]| {
            let mut all = bias.concat();
            all.resize(stride, 0.0);
            all
        };
        let bias = bias.map(|bias| self.up.vector(&padded(bias))).transpose()?;
        let norms = norm.map(|norm| self.up.vector(&norm.concat())).transpose()?;
        let rope_input = RopeInput {
            projections: Projected {
                plane: &projected,
                stride,
                at: [0, heads, heads + kv_heads],
                bias: bias.as_ref(),
            },
            norm: norms.as_ref().map(|weights| QkNorm {
                weights,
                eps: self.spec.rms_norm_eps,
                whole: a.qk_norm_whole,
            }),
            angles,
        };
        let sinks = &self.weights.layers[layer].sinks;
        let sinks = sinks.as_ref().map(|sinks| self.up.vector(sinks)).transpose()?;
        let (queries, cache) = (&self.planes.queries, &self.kv[layer]);
        let rope = RopeAppend::new(self.gpu, t, a.n_heads, self.kv_layout, rope_input, rows, queries, cache)?;
        let attention = Attention::new(
            self.gpu,
            t,
            self.kv_layout,
            AttentionHeads {
                n_heads: a.n_heads,
                scale: (a.score_scale / (a.head_dim as f64).sqrt()) as f32,
                sinks: sinks.as_ref(),
            },
            queries,
            cache,
            rows,
            &self.planes.scratch,
            AttentionOutputs {
                plane: coded.is_none().then_some(mixed),
                coded,
                // Behind queries, keys and values.
                gate: a.gate.then_some(AttentionGate { plane: &projected, stride, at: heads + 2 * kv_heads }),
            },
            Some(rope_input),
        )?;
        Ok(Mixer::Heads { rope, attention: Box::new(attention) })
    }

    /// Room for the hidden values of `pairs` pairs.
    fn hidden(
        &mut self,
        table: &LayerTable,
        layout: &ExpertLayout,
        pairs: usize,
    ) -> Result<Hidden, GpuError> {
        let group = table.tensors[2].encoding.tiles().map_or(0, Uniform::group);
        let is_apart = usize::from(!layout.is_fused());
        let key = [layout.d_expert(), group, pairs, is_apart];
        if let Some((_, hidden)) = self.hidden.iter().find(|(other, _)| *other == key) {
            return Ok(hidden.clone());
        }
        let hidden = Hidden::new(self.gpu, layout, pairs)?;
        self.hidden.push((key, hidden.clone()));
        Ok(hidden)
    }

    /// The gate of a shared expert: one row, in f32.
    fn gate(&mut self, matrix: Matrix<'_>, normed: &Input) -> Result<Gate, GpuError> {
        let mut row = vec![0.0; matrix.cols()];
        matrix.encoding().decode_row(matrix.bytes(), matrix.cols(), 0, &mut row);
        let bytes = self.up.vector(&row)?;
        let weights = DeviceWeights::new(bytes, 1, matrix.cols(), Encoding::F32);
        let out = Columns::whole(self.planes.gates.clone(), 1);
        let product = FloatMatmul::new(self.gpu, &weights, &normed.float, self.tokens, &out)?;
        Ok(Gate { weights, out, product })
    }

    /// A dense part or a shared expert.
    fn resident(&mut self, host: &Weights, ffn: &Ffn, normed: &Input) -> Result<Resident, EngineError> {
        let matrices = [&ffn.gate, &ffn.up, &ffn.down].map(|tensor| host.matrix(tensor));
        if self.exact && matrices.iter().any(|m| m.tiles().is_some()) {
            let what = "exact products of coded dense parts on a GPU (--device cpu can)".to_owned();
            return Err(EngineError::Unsupported { what });
        }
        let mut at = 0;
        let tensors = matrices.map(|m| {
            let offset = at;
            at += m.bytes().len().next_multiple_of(64);
            TensorEntry {
                offset,
                len: m.bytes().len(),
                rows: m.rows(),
                cols: m.cols(),
                encoding: m.encoding(),
            }
        });
        let table = LayerTable { layer: 0, n_experts: 1, record_len: at, tensors };
        let record = self.up.record(&matrices, &tensors, at as u64)?;
        let layout = ExpertLayout::new(&table, at as u64);
        let list = match &self.everyone {
            Some(list) => list.clone(),
            None => {
                let list = WorkList::new(self.gpu, &layout, self.tokens, 1)?;
                self.everyone.insert(list).clone()
            }
        };
        let hidden = self.hidden(&table, &layout, self.tokens)?;
        let operands = Operands {
            layout,
            input: Input { float: normed.float.clone(), coded: normed.coded.clone() },
            hidden,
            outputs: self.planes.dense.clone(),
        };
        let kernels = operands.routed(self.gpu, &list, &record, None)?;
        Ok(Resident { operands, record, list, kernels })
    }

    fn ends(&mut self) -> Result<Ends, EngineError> {
        let (t, d, vocab) = (self.tokens, self.spec.d_model, self.spec.vocab_size);
        let host: &'a Weights = self.weights;
        let groups: Vec<usize> = match host.head.encoding.tiles() {
            Some(tiles) if !self.exact => vec![tiles.group()],
            _ => Vec::new(),
        };
        let final_norm = self.up.vector(&host.final_norm)?;
        let few = HEAD_ROWS.min(t);
        let input = Input::new(self.gpu, HEAD_ROWS, d, &groups)?;
        let chosen = self.gpu.buffer("tokens of the head", floats(HEAD_ROWS))?;
        let ids = self.gpu.buffer("tokens", floats(t))?;
        let logits = self.gpu.buffer("logits", floats(HEAD_ROWS * vocab))?;
        let delta = self.delta_before(self.spec.n_layers());
        let mix = self.norm(&final_norm, delta, None, t, &self.planes.input.for_weights(&[]))?;
        let mix_few = self.norm(&final_norm, delta, None, few, &input)?;
        let choose = self.norm(&final_norm, Delta::None, Some((&chosen, HEAD_ROWS)), t, &input)?;
        let head = self.product(&[host.matrix(&host.head)], &input, HEAD_ROWS, &logits, vocab)?;
        let table = host.matrix(&host.embed);
        let embed_bytes = self.up.matrix(&table)?;
        let [part] = embed_bytes.parts.as_slice() else {
            let what = format!("an embedding of {} bytes on this device", table.bytes().len());
            return Err(EngineError::Unsupported { what });
        };
        let (encoding, rows, cols) = (table.encoding(), table.rows(), table.cols());
        let hidden = self.planes.hidden.clone();
        Ok(Ends {
            embed: Embed::new(self.gpu, t, &part.bytes, encoding, rows, cols, &ids, &hidden)?
                .scaled(self.spec.multipliers.embedding as f32),
            likeliest: Argmax::new(self.gpu, 1, vocab, &logits, &ids)?,
            ids,
            hidden,
            everyone: self.everyone.clone(),
            mix,
            mix_few,
            choose,
            chosen,
            input,
            head,
            logits,
        })
    }
}
