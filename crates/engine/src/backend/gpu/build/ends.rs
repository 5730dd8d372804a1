//! What stands before the first layer and behind the last: embedding, last norm, head and the choice of a token.

use smoe_gpu::{Argmax, Delta, Embed};

use super::{Builder, floats};
use crate::EngineError;
use crate::backend::HEAD_ROWS;
use crate::backend::gpu::ops::{Ends, Input};
use crate::weights::Weights;

impl<'a> Builder<'a> {
    pub(super) fn ends(&mut self) -> Result<Ends, EngineError> {
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
