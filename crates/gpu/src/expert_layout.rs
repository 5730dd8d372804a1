//! How the experts of a layer lie, and what stands between and behind their products.

use smoe_format::expert_file::{LayerTable, TensorEntry};
use smoe_format::spec::Activation;
use smoe_format::{Encoding, Uniform};

use crate::Slice;
use crate::draft::demand;
use crate::memories::Memories;

/// How the experts of a layer lie in slots, and what they make of their products.
#[derive(Clone, Debug)]
pub struct ExpertLayout {
    /// Gate, up, down, at their offsets in a slot.
    pub(crate) tensors: [TensorEntry; 3],
    pub(crate) slot_bytes: u64,
    n_experts: usize,
    activation: Activation,
    biases: Option<Slice>,
    /// Slots behind the first memory, and how far they are apart.
    behind: Option<(Slice, u64)>,
}

impl ExpertLayout {
    /// Records of `table`, one in each `slot_bytes`, with SwiGLU between products and nothing added to them.
    ///
    /// # Panics
    /// If a record does not fit, a slot is not a multiple of 64 bytes, or the tensors are no FFN.
    #[must_use]
    pub fn new(table: &LayerTable, slot_bytes: u64) -> Self {
        let [gate, up, down] = table.tensors;
        assert_slots_fit(slot_bytes, table.used_bytes());
        assert!(
            (gate.rows, gate.cols) == (up.rows, up.cols)
                && (down.rows, down.cols) == (gate.cols, gate.rows)
                && gate.rows > 0
                && gate.cols > 0,
            "an FFN of {gate:?}, {up:?}, {down:?}"
        );
        let (tensors, n_experts) = (table.tensors, table.n_experts as usize);
        Self { tensors, slot_bytes, n_experts, activation: Activation::SwiGlu, biases: None, behind: None }
    }

    /// With a second memory `behind` the first, in whose slots, `slot_bytes` apart, are the entries of a list that have
    /// [`BEHIND`](crate::WorkList::BEHIND).
    ///
    /// # Panics
    /// As [`Self::new`], and if 32 bits do not address it in pieces of 16 bytes.
    #[must_use]
    pub fn and_behind(mut self, behind: Slice, slot_bytes: u64) -> Self {
        let used = self.tensors.iter().map(|tensor| tensor.offset + tensor.len).max().unwrap_or(0);
        assert_slots_fit(slot_bytes, used);
        assert!(behind.len() / 16 < 1 << 32, "{} bytes of slots", behind.len());
        self.behind = Some((behind, slot_bytes));
        self
    }

    /// What slots of the second memory are apart, in pieces; 0 if there is none.
    pub(crate) fn apart_behind(&self) -> u32 {
        self.behind.as_ref().map_or(0, |(_, slot_bytes)| Self::piece(*slot_bytes))
    }

    /// Where kernels read, and what they need bound as number `binding` for it.
    pub(crate) fn memories(&self, binding: usize) -> (Memories, Option<&Slice>) {
        match &self.behind {
            Some((slots, _)) => (Memories::Two(binding as u32), Some(slots)),
            None => (Memories::One, None),
        }
    }

    /// With another activation.
    #[must_use]
    pub const fn activated(mut self, activation: Activation) -> Self {
        self.activation = activation;
        self
    }

    /// With biases that are added to the products: f32, of every expert one after the other its gate's, its up's and its
    /// down's.
    ///
    /// # Panics
    /// If `biases` is too short.
    #[must_use]
    pub fn biased(mut self, biases: Slice) -> Self {
        demand(&biases, self.n_experts * self.bias_values(), "biases of experts");
        self.biases = Some(biases);
        self
    }

    /// Biases of an expert.
    const fn bias_values(&self) -> usize {
        2 * self.d_expert() + self.d_model()
    }

    /// Width of the model.
    #[must_use]
    pub const fn d_model(&self) -> usize {
        self.tensors[0].cols
    }

    /// Width of an expert.
    #[must_use]
    pub const fn d_expert(&self) -> usize {
        self.tensors[0].rows
    }

    /// The tiles of the codes of gate (0), up (1) or down (2).
    pub(crate) fn tiles(&self, projection: usize) -> Option<Uniform> {
        self.tensors[projection].encoding.tiles()
    }

    /// One kernel computes gate and up.
    #[must_use]
    pub fn is_fused(&self) -> bool {
        self.fused().is_some()
    }

    /// If one kernel computes gate and up: their encoding and its tiles, and down's.
    pub(crate) fn fused(&self) -> Option<(Encoding, Uniform, Uniform)> {
        let [gate, up, _] = self.tensors.map(|tensor| tensor.encoding);
        (gate == up).then_some((gate, self.tiles(0)?, self.tiles(2)?))
    }

    /// A position in a slot, in pieces of 16 bytes.
    pub(crate) fn piece(bytes: u64) -> u32 {
        (bytes / 16) as u32
    }

    /// Experts of the layer.
    pub(crate) const fn n_experts(&self) -> usize {
        self.n_experts
    }

    /// Asserts that 32 bits address `slots` in pieces.
    pub(crate) fn assert_slots(&self, slots: &Slice) {
        assert!(
            slots.len() >= self.slot_bytes && slots.len() / 16 < 1 << 32,
            "{} bytes of slots",
            slots.len()
        );
    }

    /// `biased` and `take_biases` of experts.wgsl's users, for the gate's (0), up's (1) or down's (2) product, and what they
    /// need bound as number `binding`.
    pub(crate) fn bias(&self, projection: usize, binding: usize) -> (String, Option<&Slice>) {
        let Some(biases) = &self.biases else {
            return (include_str!("wgsl/experts_bias_none.wgsl").to_owned(), None);
        };
        let (all, d_expert) = (self.bias_values(), self.d_expert());
        let constants = format!(
            "const BIAS: u32 = {binding}u;\nconst BIASES: u32 = {all}u;\n\
             const BIAS_AT: u32 = {}u;\nconst UPS_AT: u32 = {d_expert}u;\n",
            projection * d_expert
        );
        (constants + include_str!("wgsl/experts_bias.wgsl"), Some(biases))
    }

    /// `glu`: what stands between an expert's matrices.
    pub(crate) fn glu(&self) -> String {
        let (constants, function) = match self.activation {
            Activation::SwiGlu => (String::new(), include_str!("wgsl/experts_glu.wgsl")),
            Activation::ClampedSwiglu { alpha, limit } => {
                let bits = |name: &str, value: f32| format!("const {name}: u32 = {}u;\n", value.to_bits());
                let constants = bits("ALPHA", alpha) + &bits("LIMIT", limit);
                (constants, include_str!("wgsl/experts_glu_clamped.wgsl"))
            }
        };
        [&constants, include_str!("wgsl/exp.wgsl"), function].concat()
    }
}

fn assert_slots_fit(slot_bytes: u64, used: usize) {
    assert!(
        slot_bytes >= used as u64 && slot_bytes.is_multiple_of(64),
        "slots of {slot_bytes} bytes for {used}"
    );
}
