//! What does not depend on each other, of one token, in one dispatch: [`Beside`], [`LoneExperts`]. A dispatch that waits for another
//! takes 2 us whatever it does (EXP-GPU-08), and workgroups of several kernels fill a device where each alone leaves it idle.

use crate::cut::Tuning;
use crate::merge::{Part, merged};
use crate::shader::{Op, Shader};
use crate::{
    CodedMatmul, CodedPlane, Columns, Down, ExpertInput, ExpertLayout, FloatMatmul, GateUp, Gpu, GpuError,
    Hidden, Slice, Step, Weights, WorkList,
};

/// Threads of a workgroup that a float product has part in, at least.
const FLOAT_THREADS: u32 = crate::float::THREADS;

/// What a launcher records of one token.
pub(crate) struct Launch<'a> {
    pub(crate) op: &'a Op,
    pub(crate) words: Vec<u32>,
    pub(crate) grid: [u32; 2],
    /// Bytes that a workgroup shares.
    pub(crate) shared: u32,
}

/// Kernels of one token, none of which reads what another writes, in one dispatch: each workgroup is one of theirs, and computes what it
/// would alone.
#[derive(Clone, Debug)]
pub struct Beside {
    op: Op,
    words: Vec<u32>,
    workgroups: u32,
}

impl Beside {
    /// None if their workgroups have different numbers of threads, or the device binds or shares too little for all.
    fn new(gpu: &Gpu, launches: &[Launch<'_>]) -> Result<Option<Self>, GpuError> {
        let buffers: Vec<&Slice> = launches.iter().flat_map(|launch| &launch.op.slices).collect();
        // A workgroup has room for what each of them shares, whichever it is.
        let shared: u32 = launches.iter().map(|launch| launch.shared).sum();
        if buffers.len() > gpu.most_bindings() || shared > gpu.wide_shared_bytes() {
            return Ok(None);
        }
        let parts: Vec<Part<'_>> = launches
            .iter()
            .map(|launch| Part {
                source: &launch.op.kernel.source,
                bindings: launch.op.slices.len(),
                grid: launch.grid,
            })
            .collect();
        let Some(merged) = merged(&parts) else { return Ok(None) };
        let mut words = Vec::new();
        for (launch, room) in launches.iter().zip(&merged.words) {
            let end = words.len() + room;
            words.extend_from_slice(&launch.words);
            words.resize(end, 0);
        }
        let names: Vec<&str> = launches.iter().map(|launch| launch.op.name()).collect();
        let bindings: Vec<_> =
            launches.iter().flat_map(|launch| launch.op.kernel.bindings.iter().copied()).collect();
        let kernel = gpu.kernel(&Shader {
            name: &names.join(" + "),
            source: merged.source.into(),
            bindings: &bindings,
        })?;
        Ok(Some(Self { op: gpu.bind(&kernel, &buffers)?, words, workgroups: merged.workgroups }))
    }

    /// A coded product and a float one, as [`CodedMatmul`] and [`FloatMatmul`] have them, bit for bit: of weights, the operand, and where it
    /// goes.
    ///
    /// # Errors
    /// If the device refuses a kernel.
    ///
    /// # Panics
    /// As those, for one token.
    pub fn products(
        gpu: &Gpu,
        coded: (&Weights, &CodedPlane, &Columns),
        float: (&Weights, &Slice, &Columns),
    ) -> Result<Option<Self>, GpuError> {
        let (weights, x, out) = coded;
        let tuning = Tuning::of_product(gpu, weights).in_workgroups_of(FLOAT_THREADS);
        let x = CodedPlane { tokens: 1, ..x.clone() };
        let coded = CodedMatmul::tuned(gpu, weights, &x, out, Some(tuning))?;
        let (weights, x, out) = float;
        let float = FloatMatmul::of_one(gpu, weights, x, out, tuning.threads)?;
        // The float one waits most, and has least to do.
        Self::new(gpu, &[float.launch(), coded.launch()])
    }

    /// Records it.
    pub fn record(&self, step: &mut Step) {
        step.run(&self.op, &self.words, [self.workgroups, 1, 1]);
    }
}

/// Experts whose records lie side by side, and what they are to compute.
#[derive(Clone, Copy, Debug)]
pub struct ExpertsOf<'a> {
    /// How they lie.
    pub layout: &'a ExpertLayout,
    /// Where.
    pub slots: &'a Slice,
    /// Whose list it is; of one token.
    pub list: &'a WorkList,
    /// Between gate and up, and down.
    pub hidden: &'a Hidden,
    /// What down makes, `[list.top_k, d_model]`.
    pub y: &'a Slice,
}

/// One token's routed experts and the shared one, its gate with them, in two dispatches: the bits of [`GateUp`], [`Down`] and [`FloatMatmul`] of
/// each. Encodings and widths may differ.
#[derive(Clone, Debug)]
pub struct LoneExperts {
    gate_up: Beside,
    down: Beside,
}

impl LoneExperts {
    /// `gate` is the product of the shared expert's weight: weights, operand, and where it goes. None if a lone token has no kernels of its own for both kinds of experts, or
    /// the device has not enough for two at once.
    ///
    /// # Errors
    /// If the device refuses a kernel.
    ///
    /// # Panics
    /// As those.
    pub fn new(
        gpu: &Gpu,
        routed: ExpertsOf<'_>,
        shared: ExpertsOf<'_>,
        x: &ExpertInput<'_>,
        gate: Option<(&Weights, &Slice, &Columns)>,
    ) -> Result<Option<Self>, GpuError> {
        let Some([firsts, seconds]) = Tuning::of_lone_experts(gpu, [routed.layout, shared.layout]) else {
            return Ok(None);
        };
        let least = if gate.is_some() { FLOAT_THREADS } else { 0 };
        let firsts = firsts.map(|tuning| tuning.in_workgroups_of(least));
        let (mut gate_ups, mut downs) = (Vec::new(), Vec::new());
        for (i, of) in [routed, shared].into_iter().enumerate() {
            let ExpertsOf { layout, slots, list, hidden, y } = of;
            let list = &WorkList { tokens: 1, ..list.clone() };
            gate_ups.push(GateUp::tuned(gpu, layout, slots, list, x, hidden, Some(firsts[i]), None)?);
            downs.push(Down::tuned(gpu, layout, slots, list, hidden, y, Some(seconds[i]), None)?);
        }
        let gate = match gate {
            Some((weights, x, out)) => Some(FloatMatmul::of_one(gpu, weights, x, out, firsts[0].threads)?),
            None => None,
        };
        // The first workgroups begin first: those of the shared expert have most to do.
        let gate_ups: Option<Vec<Launch<'_>>> = gate_ups.iter().rev().map(GateUp::launch).collect();
        let downs: Option<Vec<Launch<'_>>> = downs.iter().rev().map(Down::launch).collect();
        let Some((gate_ups, downs)) = gate_ups.zip(downs) else { return Ok(None) };
        let gate_ups: Vec<Launch<'_>> = gate.iter().map(FloatMatmul::launch).chain(gate_ups).collect();
        let (gate_up, down) = (Beside::new(gpu, &gate_ups)?, Beside::new(gpu, &downs)?);
        Ok(gate_up.zip(down).map(|(gate_up, down)| Self { gate_up, down }))
    }

    /// Records it.
    pub fn record(&self, step: &mut Step) {
        self.gate_up.record(step);
        self.down.record(step);
    }
}
