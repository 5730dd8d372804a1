//! The indexer of sparse attention: its planes, and what it chooses for a block of tokens.

use smoe_format::ModelSpec;
use smoe_format::spec::IndexerSpec;
use smoe_kernels::{Choices, IndexHeads, KvBlocks, KvPlane, RopeStyle, Sight, choose};

use super::Context;
use crate::backend::Row;
use crate::kv::{self, BLOCK, KvCache};
use crate::weights::Indexer;

/// What an indexer needs for blocks of B tokens.
#[derive(Debug)]
pub(super) struct IndexPlanes {
    spec: IndexerSpec,
    /// `[B, n_heads * head_dim]`.
    pub queries: Vec<f32>,
    /// `[B, head_dim]`.
    pub keys: Vec<f32>,
    /// `[B, n_heads]`.
    pub weights: Vec<f32>,
    choices: Choices,
}

impl IndexPlanes {
    pub fn new(spec: IndexerSpec, block: usize, context: usize) -> Self {
        let IndexerSpec { n_heads, head_dim, top_k, .. } = spec;
        Self {
            spec,
            queries: vec![0.0; block * n_heads * head_dim],
            keys: vec![0.0; block * head_dim],
            weights: vec![0.0; block * n_heads],
            choices: Choices::new(block, top_k, context),
        }
    }

    /// Bytes of [`Self::new`].
    pub fn bytes(spec: &IndexerSpec, block: usize, context: usize) -> u64 {
        let IndexerSpec { n_heads, head_dim, top_k, .. } = *spec;
        let floats = block * (n_heads * head_dim + head_dim + n_heads);
        (4 * floats + Choices::bytes(block, top_k, context)) as u64
    }

    /// Whether any of these tokens could see more than is chosen; the queries of the others are asked for nothing.
    pub fn is_asked(&self, rows: &[Row]) -> bool {
        rows.iter().any(|row| row.position as usize >= self.spec.top_k)
    }

    /// Makes queries, if they are asked for, and keys of what the products of a block of tokens are.
    pub fn turn(&mut self, context: &Context, weights: &Indexer, rows: &[Row]) {
        let IndexerSpec { n_heads, head_dim, interleaved, norm_eps, .. } = self.spec;
        let style = if interleaved { RopeStyle::Interleaved } else { RopeStyle::Half };
        let width = n_heads * head_dim;
        let asked = if self.is_asked(rows) { rows.len() } else { 0 };
        context.pool.chunks_mut(&mut self.queries[..asked * width], width, &|t, row| {
            context.rotate_as(style, row, head_dim, rows[t].position);
        });
        context.pool.chunks_mut(&mut self.keys[..rows.len() * head_dim], head_dim, &|t, row| {
            context.kernels.layer_norm_in_place(row, &weights.k_norm, &weights.k_norm_bias, norm_eps);
            context.rotate_as(style, row, head_dim, rows[t].position);
        });
    }

    /// Appends the keys of a block of tokens to the cache.
    pub fn remember(&self, context: &Context, layer: usize, rows: &[Row], kv: &mut KvCache) {
        for (row, key) in rows.iter().zip(self.keys.chunks_exact(self.spec.head_dim)) {
            kv.append(context.kernels, layer, *row, (kv::Plane::IndexKeys, 0), key);
        }
    }

    /// Chooses what each of a block of tokens sees; its keys are in the cache.
    pub fn choose(&mut self, context: &Context, layer: usize, rows: &[Row], kv: &KvCache) {
        if !self.is_asked(rows) {
            return;
        }
        let (bytes, geometry) = kv.memory(layer);
        let Some(plane) = geometry.plane(layer, kv::Plane::IndexKeys) else { return };
        let keys = KvPlane {
            ty: kv.kv_type(),
            bytes,
            row_bytes: plane.row_bytes,
            block_stride: geometry.block_stride,
            head_offset: plane.head(0),
        };
        let sight = |t: usize| {
            let table = kv.table(layer, rows[t].seq);
            let blocks = KvBlocks { keys, values: keys, table, block_positions: BLOCK };
            Sight { blocks, visible: 0..rows[t].position as usize + 1, chosen: None }
        };
        let IndexerSpec { n_heads, head_dim, top_k, .. } = self.spec;
        let Self { queries, weights, choices, .. } = self;
        let heads = IndexHeads { n_heads, head_dim, top_k };
        let queries = &queries[..rows.len() * n_heads * head_dim];
        let weights = &weights[..rows.len() * n_heads];
        choose(&context.pool, context.kernels, heads, queries, weights, &sight, choices);
    }

    /// The positions chosen of the `visible` first that a token could see; `None` if it sees all of them.
    pub fn chosen(&self, token: usize, visible: usize) -> Option<&[u32]> {
        self.choices.of(token, visible)
    }
}

/// Positions that a token's attention sees at most, of a context.
pub(super) fn seen(spec: &ModelSpec, context: usize) -> usize {
    spec.attention.indexer.map_or(context, |indexer| context.min(indexer.top_k))
}
