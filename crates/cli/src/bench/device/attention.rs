//! Attention over keys and values, and over latents.

use smoe_gpu::{
    Attention, AttentionHeads, AttentionOutputs, AttentionScratch, GpuError, KV_BLOCK, KvFormat, KvLayout,
    LatentAttention, LatentLayout, Rows, Slice,
};

use super::Bench;

impl Bench {
    /// Attention of a prompt's tokens behind others of theirs: 32 query heads over 4 kv heads of 128, in halves. Keys and values
    /// count once.
    pub(super) fn attention(&mut self, name: &str, tokens: usize, before: usize) -> Result<(), GpuError> {
        let n_kv_heads = if self.small { 1 } else { 4 };
        let n_heads = 8 * n_kv_heads;
        let kv = KvLayout { format: KvFormat::F16, n_kv_heads, head_dim: 128, value_dim: 128 };
        let visible = before + tokens;
        let blocks = visible.div_ceil(KV_BLOCK);
        let bytes = (blocks * kv.block_bytes()) as u64;
        // Layers take turns, as in a model.
        let caches = (0..(self.cold / bytes / 4).clamp(1, 48))
            .map(|_| self.gpu.buffer("keys and values", bytes))
            .collect::<Result<Vec<_>, _>>()?;
        let rows = (before..visible).flat_map(|position| [position as u32, 0, 0, 0]).collect::<Vec<_>>();
        let (rows, tables) = (self.words(&rows)?, self.words(&(0..blocks as u32).collect::<Vec<_>>())?);
        let rows = Rows { rows: &rows, tables: &tables };
        let queries = self.x(tokens, n_heads * kv.head_dim)?;
        let scratch = AttentionScratch::new(&self.gpu, n_heads, kv.value_dim, visible, 64 << 20)?;
        let out = self.gpu.buffer("out", (4 * tokens * n_heads * kv.value_dim) as u64)?;
        let heads = AttentionHeads { n_heads, scale: 0.09, sinks: None };
        let attention = |cache: &Slice| {
            let outputs = AttentionOutputs { plane: Some(&out), ..Default::default() };
            Attention::new(&self.gpu, tokens, kv, heads, &queries, cache, rows, &scratch, outputs, None)
        };
        let all = caches.iter().map(attention).collect::<Result<Vec<_>, _>>()?;
        let seen = (before + 1..=visible).sum::<usize>();
        let macs = (seen * n_heads * (kv.head_dim + kv.value_dim)) as f64;
        let what = format!("{name} attention after {before} positions");
        self.product(
            &what,
            tokens,
            ((visible * 2 * kv.n_kv_heads * kv.row_bytes()) as u64, macs),
            &|step, i| {
                all[i % all.len()].record(step, tokens, 1, visible, visible);
            },
        )
    }

    /// Attention of DeepSeek's shapes over latents in halves, of tokens that see as many positions: their rows count once for each
    /// token.
    pub(super) fn latent(
        &mut self,
        name: &str,
        heads: usize,
        visible: usize,
        tokens: usize,
    ) -> Result<(), GpuError> {
        let kv = LatentLayout { format: KvFormat::F16, kv_rank: 512, rope_dim: 64 };
        let blocks = visible.div_ceil(KV_BLOCK);
        let bytes = (blocks * kv.block_bytes()) as u64;
        // Layers take turns, as in a model.
        let caches = (0..(self.cold / bytes / 4).clamp(1, 61))
            .map(|_| self.gpu.buffer("latents", bytes))
            .collect::<Result<Vec<_>, _>>()?;
        let rows = [visible as u32 - 1, 0, 0, 0].repeat(tokens);
        let (rows, tables) = (self.words(&rows)?, self.words(&(0..blocks as u32).collect::<Vec<_>>())?);
        let rows = Rows { rows: &rows, tables: &tables };
        let queries = self.x(tokens, heads * kv.key_dim())?;
        let scratch = AttentionScratch::new(&self.gpu, heads, kv.kv_rank, visible, 64 << 20)?;
        let out = self.gpu.buffer("out", (4 * tokens * heads * kv.kv_rank) as u64)?;
        let attention = |cache: &Slice| {
            let outputs = AttentionOutputs { plane: Some(&out), ..Default::default() };
            let scale = 0.07;
            LatentAttention::new(
                &self.gpu, tokens, kv, heads, scale, &queries, cache, rows, &scratch, outputs,
            )
        };
        let all = caches.iter().map(attention).collect::<Result<Vec<_>, _>>()?;
        let seconds = self.time(&|step, i| all[i % all.len()].record(step, tokens, visible, visible))?;
        let what = format!("{name} latent attention, {heads} heads, {visible} positions");
        self.tell(&what, tokens, seconds, (tokens * visible * kv.row_bytes()) as u64);
        Ok(())
    }
}
