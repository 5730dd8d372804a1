//! Records what every step does whatever experts it has: attention of a layer, and logits.

use super::ops::Mixer;
use super::{GpuBackend, Pending};
use crate::backend::HEAD_ROWS;

impl GpuBackend {
    /// Records a layer's attention, and adds it to the hidden states unless the router does.
    pub(super) fn record_attention(&mut self, layer: usize, leaves: bool) {
        let (tokens, visible) = (self.tokens, self.visible);
        let ops = &self.layers[layer];
        let step = self.recorder.step();
        match (ops.lone.as_ref().filter(|_| !leaves), self.pending) {
            (Some(lone), Pending::Nothing) => lone.enter_plain.record(step),
            (Some(lone), Pending::Ffn) => lone.enter.record(step),
            (None, pending) => {
                match pending {
                    Pending::Nothing => ops.enter_plain.record(step, tokens),
                    Pending::Ffn => ops.enter.record(step, tokens),
                }
                ops.record_projections(step, tokens);
            }
        }
        let seen = ops.window.min(visible);
        let lone_o = ops.lone_o.as_ref().filter(|_| tokens == 1);
        match &ops.mixer {
            Mixer::Heads { attention, .. } if tokens == 1 && attention.turns(seen) => {
                attention.record_turning(step, seen, visible);
            }
            Mixer::Heads { rope, attention } => {
                rope.record(step, tokens);
                attention.record(step, tokens, self.table_starts.len(), seen, visible);
            }
            Mixer::Delta(net) => net.record(step, tokens),
            Mixer::Latent(latent) => latent.record(step, tokens, seen, visible, lone_o.is_none()),
        }
        match lone_o {
            Some(o) => o.record(step),
            None => ops.o.iter().for_each(|product| product.record(step, tokens)),
        }
        if leaves {
            ops.leave.record(step, tokens);
        }
        self.pending = Pending::Nothing;
        self.next = layer + 1;
    }

    /// Adds what is pending to the hidden states, for who wants to see them.
    pub(super) fn settle(&mut self) {
        if self.pending == Pending::Nothing {
            return;
        }
        let tokens = self.tokens;
        let step = self.recorder.step();
        match self.layers.get(self.next) {
            Some(layer) => layer.enter.record(step, tokens),
            None => self.ends.mix.record(step, tokens),
        }
        self.pending = Pending::Nothing;
    }

    /// Records the logits of these tokens.
    pub(super) fn record_head(&mut self, tokens: &[usize]) {
        assert!(tokens.len() <= HEAD_ROWS, "{} rows of logits at once", tokens.len());
        if !self.heads_all(tokens) || self.pending == Pending::Nothing {
            self.settle();
        }
        let n = tokens.len();
        if self.pending == Pending::Nothing {
            let mut ids = [0; HEAD_ROWS];
            ids.iter_mut().zip(tokens).for_each(|(id, &token)| *id = token as u32);
            self.gpu.write(&self.ends.chosen, 0, bytemuck::cast_slice(&ids));
        }
        let step = self.recorder.step();
        match self.pending {
            Pending::Ffn => self.ends.mix_few.record(step, n),
            Pending::Nothing => self.ends.choose.record(step, n),
        }
        self.pending = Pending::Nothing;
        self.ends.head.iter().for_each(|product| product.record(step, n));
    }
}
