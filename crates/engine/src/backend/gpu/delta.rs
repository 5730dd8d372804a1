//! Gated delta nets on a device: their planes, their states, and whose states a step's tokens go through.

use smoe_format::ModelSpec;
use smoe_gpu::{
    CodedPlane, DeltaInput, DeltaLayout, DeltaNet, DeltaNetWeights, DeltaOutputs, DeltaScratch, Gpu,
    GpuError, Slice, StateMark, StateRun, StateRuns, Step,
};
use smoe_kernels::{DeltaMark, DeltaRun};

use super::build::{Builder, floats};
use super::ops::Input;
use crate::EngineError;
use crate::backend::Row;
use crate::kv::{KvCache, SeqId, StateCopy};
use crate::plan::Plan;
use crate::weights::Delta;

/// How states lie, if layers have any.
pub(super) fn layout(spec: &ModelSpec) -> Option<DeltaLayout> {
    spec.delta.map(|delta| DeltaLayout {
        n_key_heads: delta.n_key_heads,
        n_value_heads: delta.n_value_heads,
        key_dim: delta.key_dim,
        value_dim: delta.value_dim,
        conv_width: delta.conv_width,
    })
}

/// Columns of a token's projections.
pub(super) fn projected(spec: &ModelSpec) -> usize {
    spec.delta
        .map_or(0, |delta| (delta.channels() + delta.values() + 2 * delta.n_value_heads).next_multiple_of(4))
}

/// Floats of a token in the planes of gated delta nets, besides projections.
pub(super) fn plane_floats(spec: &ModelSpec) -> usize {
    layout(spec).map_or(0, |layout| layout.mixed() + 2 * layout.values() + 2)
}

/// What layers share, and the states of each.
pub(super) struct DeltaPlanes {
    layout: DeltaLayout,
    runs: StateRuns,
    scratch: DeltaScratch,
    /// Outputs of the heads.
    pub(super) mixed: Input,
    /// By layer, of those that have any.
    states: Vec<(usize, Slice)>,
    /// A state on its way to another place.
    between: Slice,
}

impl DeltaPlanes {
    /// For the steps of a plan, with room for so many snapshots.
    pub(super) fn new(
        gpu: &Gpu,
        spec: &ModelSpec,
        plan: &Plan,
        snapshots: usize,
        groups: &[usize],
    ) -> Result<Option<Self>, GpuError> {
        let Some(layout) = layout(spec) else { return Ok(None) };
        let state = floats(layout.state_len());
        let places = (2 * plan.sessions + snapshots) as u64;
        let states =
            spec.delta_layers().map(|layer| Ok((layer, gpu.buffer("states of a layer", places * state)?)));
        Ok(Some(Self {
            layout,
            runs: StateRuns::new(gpu, plan.chunk, plan.sessions, snapshots)?,
            scratch: DeltaScratch::new(gpu, &layout, plan.chunk)?,
            mixed: Input::new(gpu, plan.chunk, layout.values(), groups)?,
            states: states.collect::<Result<_, GpuError>>()?,
            between: gpu.buffer("a state", state)?,
        }))
    }
}

impl Builder<'_> {
    /// A layer's, whose projections have `stride` columns. `mixed` takes the outputs, or `coded`, if that is what the product takes.
    pub(super) fn delta(
        &mut self,
        layer: usize,
        weights: &Delta,
        stride: usize,
        mixed: &Slice,
        coded: Option<&CodedPlane>,
    ) -> Result<DeltaNet, EngineError> {
        let taps = self.up.vector(weights.weights.taps())?;
        let rates = self.up.vector(&weights.weights.rates())?;
        let norm = self.up.vector(&weights.norm)?;
        let Some(planes) = &self.planes.net else { unreachable!("a gated delta net has its planes") };
        let Some((_, states)) = planes.states.iter().find(|(of, _)| *of == layer) else {
            unreachable!("a gated delta net has its states");
        };
        let mut next = 0;
        let mut place = |rows: usize| {
            next += rows;
            next - rows
        };
        let Delta { q, k, v, gate, beta, decay, .. } = weights;
        let at = [q, k, v, gate, beta, decay].map(|matrix| place(matrix.rows));
        Ok(DeltaNet::new(
            self.gpu,
            self.tokens,
            planes.layout,
            DeltaInput { plane: &self.planes.projected, stride, at },
            DeltaNetWeights { taps: &taps, rates: &rates, norm: &norm, eps: self.spec.rms_norm_eps },
            &planes.runs,
            states,
            &planes.scratch,
            DeltaOutputs { plane: coded.is_none().then_some(mixed), coded },
        )?)
    }
}

/// States of all layers, and where a step's are.
pub(super) struct Nets {
    states: Vec<Slice>,
    between: Slice,
    words: StateRuns,
    /// Of the step, as the cache says it.
    of_cache: (Vec<DeltaRun>, Vec<DeltaMark>),
    runs: Vec<StateRun>,
    marks: Vec<StateMark>,
}

impl Nets {
    pub(super) fn new(planes: DeltaPlanes) -> Self {
        Self {
            states: planes.states.into_iter().map(|(_, states)| states).collect(),
            between: planes.between,
            words: planes.runs,
            of_cache: (Vec::new(), Vec::new()),
            runs: Vec::new(),
            marks: Vec::new(),
        }
    }

    /// Records a copy of a state, in all layers.
    pub(super) fn copy(&self, step: &mut Step, StateCopy { from, to }: StateCopy) {
        let len = self.between.len();
        for states in &self.states {
            step.copy(&states.part(from as u64 * len, len), &self.between);
            step.copy(&self.between, &states.part(to as u64 * len, len));
        }
    }

    /// Tells the device whose states a step's rows go through.
    pub(super) fn place(&mut self, gpu: &Gpu, rows: &[Row], kv: &mut KvCache) {
        let (runs, marks) = &mut self.of_cache;
        kv.state_runs(rows, runs, marks);
        self.write(gpu);
    }

    /// The same of the token behind a step of this sequence, before that is done.
    pub(super) fn place_behind(&mut self, gpu: &Gpu, seq: SeqId, kv: &KvCache) {
        let (runs, marks) = &mut self.of_cache;
        runs.clear();
        marks.clear();
        runs.extend(kv.state_run_behind(seq));
        self.write(gpu);
    }

    /// The same of a token that nobody has, over the first sequence's places.
    pub(super) fn pretend(&mut self, gpu: &Gpu) {
        let (runs, marks) = &mut self.of_cache;
        runs.clear();
        marks.clear();
        runs.push(DeltaRun { rows: 0..1, from: Some(0), to: 1 });
        self.write(gpu);
    }

    fn write(&mut self, gpu: &Gpu) {
        let Self { words, of_cache, runs, marks, .. } = self;
        runs.clear();
        runs.extend(of_cache.0.iter().map(|run| StateRun {
            first: run.rows.start as u32,
            end: run.rows.end as u32,
            from: run.from.map(|from| from as u32),
            to: run.to as u32,
        }));
        marks.clear();
        marks.extend(of_cache.1.iter().map(|mark| StateMark { row: mark.row as u32, to: mark.to as u32 }));
        words.write(gpu, runs, marks);
    }
}
