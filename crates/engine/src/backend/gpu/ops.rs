//! The kernels of each layer, bound to what they work on.

use smoe_format::Encoding;
use smoe_gpu::{
    Argmax, Attention, Beside, CodedMatmul, CodedPlane, Columns, DeltaNet, Down, Embed, ExactMatmul,
    ExpertInput, ExpertLayout, ExpertsOf, FloatMatmul, GateUp, Gpu, GpuError, Hidden, LoneExperts, MixNorm,
    NormMatmul, OwnMatmul, RopeAppend, Route, Slice, Step, Weights, WorkList,
};

use super::latent::Latent;

/// A product with a matrix of the backbone.
pub(super) enum Product {
    /// Codes by int8 activations.
    Coded(CodedMatmul),
    /// Codes by f32 activations.
    Exact(ExactMatmul),
    /// Floats.
    Float(FloatMatmul),
}

impl Product {
    pub(super) fn record(&self, step: &mut Step, tokens: usize) {
        match self {
            Self::Coded(op) => op.record(step, tokens),
            Self::Exact(op) => op.record(step, tokens),
            Self::Float(op) => op.record(step, tokens),
        }
    }
}

/// An input of products: f32, and int8 in every group size that its matrices have.
pub(super) struct Input {
    pub(super) float: Slice,
    pub(super) coded: Vec<CodedPlane>,
}

impl Input {
    pub(super) fn new(gpu: &Gpu, tokens: usize, cols: usize, groups: &[usize]) -> Result<Self, GpuError> {
        let coded = groups.iter().map(|&group| CodedPlane::new(gpu, tokens, cols, group));
        Ok(Self {
            float: gpu.buffer("activations", (4 * tokens * cols) as u64)?,
            coded: coded.collect::<Result<_, _>>()?,
        })
    }

    pub(super) fn coded(&self) -> Vec<&CodedPlane> {
        self.coded.iter().collect()
    }

    /// The same for products with these weights: int8 in no other group sizes than theirs. What nobody reads is not made, and
    /// a kernel that makes one int8 plane makes it beside what else it does.
    pub(super) fn for_weights(&self, encodings: &[Encoding]) -> Self {
        let is_read = |plane: &&CodedPlane| {
            encodings.iter().filter_map(|encoding| encoding.tiles()).any(|tiles| tiles.group() == plane.group)
        };
        Self { float: self.float.clone(), coded: self.coded.iter().filter(is_read).cloned().collect() }
    }
}

/// Experts' kernels over one work list.
pub(super) struct Routed {
    pub(super) gate_up: GateUp,
    pub(super) down: Down,
}

impl Routed {
    pub(super) fn record(&self, step: &mut Step, tokens: usize) {
        self.gate_up.record(step, tokens);
        self.down.record(step, tokens);
    }
}

/// What experts' kernels of a layer work on, besides a list and slots.
pub(super) struct Operands {
    pub(super) layout: ExpertLayout,
    /// The layer's input.
    pub(super) input: Input,
    pub(super) hidden: Hidden,
    /// `[T, top_k, d_model]`.
    pub(super) outputs: Slice,
}

impl Operands {
    /// The kernels over a list of what lies in `slots`, and `behind` them with slots so far apart.
    pub(super) fn routed(
        &self,
        gpu: &Gpu,
        list: &WorkList,
        slots: &Slice,
        behind: Option<(&Slice, u64)>,
    ) -> Result<Routed, GpuError> {
        let layout = &self.layout(behind);
        let coded = self.input.coded();
        let x = ExpertInput { coded: &coded, float: Some(&self.input.float) };
        Ok(Routed {
            gate_up: GateUp::new(gpu, layout, slots, list, &x, &self.hidden)?,
            down: Down::new(gpu, layout, slots, list, &self.hidden, &self.outputs)?,
        })
    }

    /// What they and the shared expert's do, of one token, in as many dispatches as they take alone, if that can be.
    pub(super) fn with_shared(
        &self,
        gpu: &Gpu,
        list: &WorkList,
        slots: &Slice,
        behind: Option<(&Slice, u64)>,
        shared: Option<&SharedExpert>,
    ) -> Result<Option<LoneExperts>, GpuError> {
        let Some(SharedExpert { expert, gate }) = shared else { return Ok(None) };
        let layout = &self.layout(behind);
        let routed = ExpertsOf { layout, slots, list, hidden: &self.hidden, y: &self.outputs };
        let Operands { layout, hidden, outputs, .. } = &expert.operands;
        let shared = ExpertsOf { layout, slots: &expert.record, list: &expert.list, hidden, y: outputs };
        let coded = self.input.coded();
        let x = ExpertInput { coded: &coded, float: Some(&self.input.float) };
        let gate = gate.as_ref().map(|gate| (&gate.weights, &self.input.float, &gate.out));
        LoneExperts::new(gpu, routed, shared, &x, gate)
    }

    fn layout(&self, behind: Option<(&Slice, u64)>) -> ExpertLayout {
        match behind {
            Some((behind, apart)) => self.layout.clone().and_behind(behind.clone(), apart),
            None => self.layout.clone(),
        }
    }
}

/// A resident SwiGLU: an expert that every token visits, alone in its slot.
pub(super) struct Resident {
    pub(super) operands: Operands,
    /// The slot.
    pub(super) record: Slice,
    pub(super) list: WorkList,
    pub(super) kernels: Routed,
}

/// The product that a shared expert's weight is the sigmoid of.
pub(super) struct Gate {
    pub(super) weights: Weights,
    pub(super) out: Columns,
    pub(super) product: FloatMatmul,
}

/// The shared expert of a layer.
pub(super) struct SharedExpert {
    pub(super) expert: Resident,
    pub(super) gate: Option<Gate>,
}

/// What an MoE layer does.
pub(super) struct Moe {
    /// Its number among the MoE layers.
    pub(super) index: usize,
    pub(super) router: Vec<Product>,
    /// `[T, n_experts]`; all layers share them.
    pub(super) logits: Slice,
    /// Added to the logits; the device's copy is in `route`.
    pub(super) bias: Option<Vec<f32>>,
    /// The choice of experts, and the list of them.
    pub(super) route: Route,
    /// Over that list: of the layer's slots, and of what lies behind them, if anything does.
    pub(super) own: Routed,
    /// The device's list.
    pub(super) list: WorkList,
    pub(super) operands: Operands,
    /// Over those that the host writes: of each list one for every segment of memory that has slots.
    pub(super) lists: Vec<Routed>,
    pub(super) shared: Option<SharedExpert>,
    /// What `own` and `shared` do, of one token.
    pub(super) lone: Option<LoneExperts>,
}

/// The feed-forward part of a layer.
pub(super) enum LayerOps {
    Dense(Box<Resident>),
    Moe(Box<Moe>),
}

impl Moe {
    /// Records the shared expert, if there is one.
    pub(super) fn record_shared(&self, step: &mut Step, tokens: usize) {
        if let Some(SharedExpert { expert, gate }) = &self.shared {
            expert.kernels.record(step, tokens);
            gate.iter().for_each(|gate| gate.product.record(step, tokens));
        }
    }

    /// Records the shared expert, and those of the device's list.
    pub(super) fn record_own(&self, step: &mut Step, tokens: usize) {
        match self.lone.as_ref().filter(|_| tokens == 1) {
            Some(lone) => lone.record(step),
            None => {
                self.record_shared(step, tokens);
                self.own.record(step, tokens);
            }
        }
    }

    /// Logits as the router means them.
    pub(super) fn add_bias(&self, logits: &mut [f32]) {
        if let Some(bias) = &self.bias {
            for row in logits.chunks_exact_mut(bias.len()) {
                row.iter_mut().zip(bias).for_each(|(logit, bias)| *logit += bias);
            }
        }
    }
}

impl Layer {
    /// Records the projections.
    pub(super) fn record_projections(&self, step: &mut Step, tokens: usize) {
        match self.lone_qkv.as_ref().filter(|_| tokens == 1) {
            Some(both) => both.record(step),
            None => self.qkv.iter().for_each(|product| product.record(step, tokens)),
        }
    }
}

impl LayerOps {
    pub(super) fn moe(&self) -> Option<&Moe> {
        match self {
            Self::Dense(_) => None,
            Self::Moe(moe) => Some(moe),
        }
    }
}

/// The entrance of a layer that one kernel is enough for.
pub(super) struct Lone {
    pub(super) enter: NormMatmul,
    pub(super) enter_plain: NormMatmul,
}

/// What stands between the projections and the product of the outputs.
pub(super) enum Mixer {
    /// Attention over keys and values of heads of their own.
    Heads { rope: RopeAppend, attention: Box<Attention> },
    /// Attention over a latent.
    Latent(Box<Latent>),
    /// A gated delta net over the states of the sequences.
    Delta(Box<DeltaNet>),
}

/// A layer, ready to be recorded.
pub(super) struct Layer {
    /// Adds what the layer before left, and norms.
    pub(super) enter: MixNorm,
    /// Norms only.
    pub(super) enter_plain: MixNorm,
    pub(super) qkv: Vec<Product>,
    /// What `qkv` does, of one token, if that is two products whose weights are of two kinds.
    pub(super) lone_qkv: Option<Beside>,
    /// What `enter`, `enter_plain` and `qkv` do, of one token in a kernel; hidden states go where the router takes them from.
    pub(super) lone: Option<Lone>,
    pub(super) mixer: Mixer,
    /// Positions that attention sees at most.
    pub(super) window: usize,
    pub(super) o: Vec<Product>,
    /// What `o` does, of a lone token's outputs that nobody has quantised.
    pub(super) lone_o: Option<OwnMatmul>,
    /// Adds attention's output, and norms.
    pub(super) leave: MixNorm,
    pub(super) ops: LayerOps,
}

/// What stands before the first layer and after the last.
pub(super) struct Ends {
    /// `[T]` token ids.
    pub(super) ids: Slice,
    pub(super) embed: Embed,
    /// `[T, d_model]`.
    pub(super) hidden: Slice,
    /// Adds what the last layer left, and norms into a plane that nobody reads.
    pub(super) mix: MixNorm,
    /// The same for steps of a few tokens, into the head's input.
    pub(super) mix_few: MixNorm,
    /// The one expert of every token of a step: list of a resident part.
    pub(super) everyone: Option<WorkList>,
    /// Norms chosen tokens into the head's input.
    pub(super) choose: MixNorm,
    /// Their numbers.
    pub(super) chosen: Slice,
    pub(super) input: Input,
    pub(super) head: Vec<Product>,
    /// `[HEAD_ROWS, vocab_size]`.
    pub(super) logits: Slice,
    /// Of one token's logits, into the ids: the token that follows.
    pub(super) likeliest: Argmax,
}

/// Per token: position, start of its session's blocks, first position that it sees, 0.
pub(super) struct RowBuffer {
    /// Positions that are seen; all of them if it is `usize::MAX`.
    pub(super) window: usize,
    /// Blocks are those of layers that see a window.
    pub(super) is_windowed: bool,
    pub(super) rows: Slice,
}
