//! What a layer keeps of each position, and where it lies.

use smoe_format::ModelSpec;
use smoe_kernels::KvType;
use smoe_store::PAGE;

use super::BLOCK;

/// What one layer keeps per session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LayerKv {
    /// Every position, in blocks (GQA, a latent, an indexer's keys).
    Paged {
        /// Bytes of a position.
        bytes_per_token: usize,
    },
    /// The last `positions` only (sliding-window attention).
    Window {
        /// Bytes of a position.
        bytes_per_token: usize,
        /// Width of the window.
        positions: usize,
    },
    /// A state of fixed size (linear attention). It has no history: no prefix can be shared or rolled back
    /// without a snapshot.
    Recurrent {
        /// Bytes of the state.
        bytes: usize,
        /// Snapshots kept at block edges.
        snapshots: usize,
    },
}

impl LayerKv {
    /// What each layer of a model keeps.
    #[must_use]
    pub fn of(spec: &ModelSpec, kv_type: KvType) -> Vec<Self> {
        let a = &spec.attention;
        let bytes_per_token = a.kv_planes() * a.n_kv_heads * kv_type.row_bytes(a.key_dim());
        vec![Self::Paged { bytes_per_token }; spec.n_layers()]
    }
}

/// One of the two things that a layer keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plane {
    /// Keys.
    Keys = 0,
    /// Values.
    Values = 1,
}

impl Plane {
    /// Keys, then values.
    pub const BOTH: [Self; 2] = [Self::Keys, Self::Values];
}

/// Where things lie in the memory of a cache.
#[derive(Clone, Copy, Debug)]
pub struct Geometry {
    /// Bytes from block to block, a multiple of [`PAGE`].
    pub block_stride: usize,
    /// Bytes from head to head within a plane of a block.
    pub head_stride: usize,
    /// Bytes of a position of a head.
    pub row_bytes: usize,
    pub(super) n_kv_heads: usize,
    /// Keys and values, or one that is both.
    pub(super) planes: usize,
}

impl Geometry {
    pub(super) fn new(spec: &ModelSpec, kv_type: KvType) -> Self {
        let a = &spec.attention;
        let (planes, row_bytes) = (a.kv_planes(), kv_type.row_bytes(a.key_dim()));
        let head_stride = BLOCK * row_bytes;
        let block = spec.n_layers() * planes * a.n_kv_heads * head_stride;
        let block_stride = block.next_multiple_of(PAGE);
        Self { block_stride, head_stride, row_bytes, n_kv_heads: a.n_kv_heads, planes }
    }

    /// Where a head's rows begin within a block. A latent's values are the beginnings of its keys.
    #[must_use]
    pub const fn head(&self, layer: usize, plane: Plane, head: usize) -> usize {
        let plane = if self.planes == 1 { 0 } else { plane as usize };
        ((layer * self.planes + plane) * self.n_kv_heads + head) * self.head_stride
    }
}
