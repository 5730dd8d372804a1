//! What a layer keeps of each position, and where it lies.

use smoe_format::ModelSpec;
use smoe_kernels::KvType;
use smoe_store::PAGE;

use super::BLOCK;

/// A thing that a layer keeps of each position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plane {
    /// Keys.
    Keys = 0,
    /// Values; a latent has none of its own, they are the beginnings of its keys.
    Values = 1,
    /// Keys of the indexer of sparse attention.
    IndexKeys = 2,
}

/// As many kinds of planes are there.
const PLANES: usize = 3;

/// Heads of each plane that a layer keeps in pages, and bytes of a position of a head.
fn planes_of(spec: &ModelSpec, kv_type: KvType, layer: usize) -> [Option<(usize, usize)>; PLANES] {
    if spec.delta_of(layer).is_some() {
        return [None; PLANES];
    }
    let a = &spec.attention;
    let heads = (a.n_kv_heads, kv_type.row_bytes(a.key_dim()));
    let index = a.indexer.map(|indexer| (1, kv_type.row_bytes(indexer.head_dim)));
    [Some(heads), (a.kv_planes() > 1).then_some(heads), index]
}

/// Where a plane of a layer lies within a block: [`BLOCK`] positions of its first head, then of the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlaneGeometry {
    offset: usize,
    heads: usize,
    /// Bytes of a position of a head.
    pub row_bytes: usize,
}

impl PlaneGeometry {
    /// Where a head's rows begin within a block.
    #[must_use]
    pub const fn head(self, head: usize) -> usize {
        self.offset + head * BLOCK * self.row_bytes
    }
}

/// Where things lie in the memory of a cache. Layers may keep different things.
#[derive(Clone, Debug)]
pub struct Geometry {
    /// Bytes from block to block, a multiple of [`PAGE`].
    pub block_stride: usize,
    layers: Vec<[Option<PlaneGeometry>; PLANES]>,
}

impl Geometry {
    /// Of those layers that it `keeps`.
    pub(super) fn new(spec: &ModelSpec, kv_type: KvType, keeps: impl Fn(usize) -> bool) -> Self {
        let mut offset = 0;
        let mut place = |(heads, row_bytes)| {
            let plane = PlaneGeometry { offset, heads, row_bytes };
            offset = plane.head(heads);
            plane
        };
        let mut of_layer = |layer| {
            let planes = if keeps(layer) { planes_of(spec, kv_type, layer) } else { [None; PLANES] };
            planes.map(|plane| plane.map(&mut place))
        };
        let layers = (0..spec.n_layers()).map(&mut of_layer).collect();
        Self { block_stride: offset.next_multiple_of(PAGE), layers }
    }

    /// A plane of a layer, if it keeps it.
    #[must_use]
    pub fn plane(&self, layer: usize, plane: Plane) -> Option<PlaneGeometry> {
        self.layers[layer][plane as usize]
    }
}
