//! Gated delta nets of Qwen3-Next and Qwen3.5.

use smoe_gpu::{
    DeltaInput, DeltaLayout, DeltaNet, DeltaNetWeights, DeltaOutputs, DeltaScratch, GpuError, Slice,
    StateRun, StateRuns,
};

use super::Bench;

impl Bench {
    /// Convolution, states, norm and gate of tokens of one sequence, three dispatches: a state is read and written, and so are planes between them.
    pub(super) fn states(&mut self, name: &str, tokens: usize) -> Result<(), GpuError> {
        let scale = if self.small { 8 } else { 1 };
        let layout = DeltaLayout {
            n_key_heads: 16 / scale,
            n_value_heads: 32 / scale,
            key_dim: 128,
            value_dim: 128,
            conv_width: 4,
        };
        let (keys, values, heads) =
            (layout.n_key_heads * layout.key_dim, layout.values(), layout.n_value_heads);
        let at = [0, keys, 2 * keys, 2 * keys + values, 2 * (keys + values), 2 * (keys + values) + heads];
        let stride = at[5] + heads;
        let plane = self.x(tokens, stride)?;
        let taps = self.x(4, 2 * keys + values)?;
        let (rates, norm) = (self.x(2, heads)?, self.x(1, layout.value_dim)?);
        let mut runs = StateRuns::new(&self.gpu, tokens, 1, 0)?;
        runs.write(&self.gpu, &[StateRun { first: 0, end: tokens as u32, from: Some(0), to: 1 }], &[]);
        let scratch = DeltaScratch::new(&self.gpu, &layout, tokens)?;
        let out = self.coded_x(tokens, values, 64)?;
        let state = 4 * layout.state_len() as u64;
        let net = |states: &Slice| {
            DeltaNet::new(
                &self.gpu,
                tokens,
                layout,
                DeltaInput { plane: &plane, stride, at },
                DeltaNetWeights { taps: &taps, rates: &rates, norm: &norm, eps: 1e-6 },
                &runs,
                states,
                &scratch,
                DeltaOutputs { plane: None, coded: Some(&out) },
            )
        };
        // Layers take turns, as in a model.
        let layers = (0..(self.cold / state / 8).clamp(1, 36))
            .map(|_| net(&self.gpu.buffer("states", 2 * state)?))
            .collect::<Result<Vec<_>, GpuError>>()?;
        // Of a row and token: decay, two products with it, what is added to it.
        let macs = (4 * tokens * heads * layout.value_dim * layout.key_dim) as f64;
        let planes = 4 * tokens * (stride + 2 * layout.mixed() + 2 * values) + tokens * values;
        let work = (2 * state + planes as u64, macs);
        let record = |step: &mut smoe_gpu::Step, i: usize| layers[i % layers.len()].record(step, tokens);
        self.product(&format!("{name} states of {heads} heads"), tokens, work, &record)
    }
}
