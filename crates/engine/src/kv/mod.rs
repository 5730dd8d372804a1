//! The KV cache: what attention remembers of earlier positions.
//!
//! Families differ in what a layer keeps, so each layer states its kind ([`LayerKv`]). Paged layers keep
//! keys and values in blocks of [`BLOCK`] positions out of one plane per layer; a session holds a table of
//! block numbers, the same in every layer, so that blocks can be given back, and later shared by prefix.
//!
//! ```text
//! plane of a layer = block 0 | block 1 | ...         block = KV head 0: position 0, 1, ... | KV head 1 | ...
//! ```

use smoe_format::ModelSpec;
use smoe_kernels::{Kernels, KvType};

use crate::EngineError;
use crate::backend::Row;

/// Positions of a block.
pub const BLOCK: usize = 32;

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
    /// Bytes for a session of `context` positions that grows by at most `step` at a time.
    #[must_use]
    pub fn bytes(self, context: usize, step: usize) -> u64 {
        let blocks = |positions: usize| positions.next_multiple_of(BLOCK) as u64;
        match self {
            Self::Paged { bytes_per_token } => blocks(context) * bytes_per_token as u64,
            Self::Window { bytes_per_token, positions } => {
                blocks(context.min(positions + step)) * bytes_per_token as u64
            }
            Self::Recurrent { bytes, snapshots } => bytes as u64 * (snapshots as u64 + 1),
        }
    }

    /// What each layer of a model keeps.
    #[must_use]
    pub fn of(spec: &ModelSpec, kv_type: KvType) -> Vec<Self> {
        let a = &spec.attention;
        let bytes_per_token = 2 * a.n_kv_heads * kv_type.row_bytes(a.head_dim);
        vec![Self::Paged { bytes_per_token }; spec.n_layers()]
    }
}

/// A session's place in the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SeqId(pub(crate) u32);

#[derive(Debug, Default)]
struct Sequence {
    blocks: Vec<u32>,
    open: bool,
}

/// Keys and values of all sessions.
#[derive(Debug)]
pub struct KvCache {
    kv_type: KvType,
    row_bytes: usize,
    block_bytes: usize,
    /// Keys, then values, of each layer.
    planes: Vec<[Vec<u8>; 2]>,
    free: Vec<u32>,
    sequences: Vec<Sequence>,
}

impl KvCache {
    /// A cache for `sessions` sessions of `context` positions each. Its address space is claimed now, pages
    /// as they are first written.
    ///
    /// # Errors
    /// If a layer keeps something else than pages, which no family does yet.
    pub fn new(
        spec: &ModelSpec,
        kv_type: KvType,
        context: usize,
        sessions: usize,
    ) -> Result<Self, EngineError> {
        let a = &spec.attention;
        let per_session = context.div_ceil(BLOCK);
        let blocks = per_session * sessions;
        let planes = LayerKv::of(spec, kv_type)
            .into_iter()
            .map(|layer| match layer {
                LayerKv::Paged { bytes_per_token } => {
                    let plane = || vec![0; blocks * BLOCK * bytes_per_token / 2];
                    Ok([plane(), plane()])
                }
                kind => Err(EngineError::Unsupported { what: format!("a layer that keeps {kind:?}") }),
            })
            .collect::<Result<_, _>>()?;
        let row_bytes = kv_type.row_bytes(a.head_dim);
        let block_bytes = a.n_kv_heads * BLOCK * row_bytes;
        Ok(Self {
            kv_type,
            row_bytes,
            block_bytes,
            planes,
            free: (0..blocks as u32).rev().collect(),
            sequences: (0..sessions)
                .map(|_| Sequence { blocks: Vec::with_capacity(per_session), open: false })
                .collect(),
        })
    }

    /// How numbers are kept.
    #[must_use]
    pub const fn kv_type(&self) -> KvType {
        self.kv_type
    }

    /// Takes a free session.
    ///
    /// # Errors
    /// If all are open.
    pub fn open(&mut self) -> Result<SeqId, EngineError> {
        let Some(i) = self.sequences.iter().position(|s| !s.open) else {
            return Err(EngineError::NoSession { sessions: self.sequences.len() });
        };
        self.sequences[i].open = true;
        Ok(SeqId(i as u32))
    }

    /// Gives a session and its blocks back.
    pub fn close(&mut self, seq: SeqId) {
        self.truncate(seq, 0);
        self.sequences[seq.0 as usize].open = false;
    }

    /// Makes room for `len` positions.
    ///
    /// # Errors
    /// If there are not enough blocks; nothing is taken then.
    pub fn reserve(&mut self, seq: SeqId, len: usize) -> Result<(), EngineError> {
        let blocks = &mut self.sequences[seq.0 as usize].blocks;
        let missing = len.div_ceil(BLOCK).saturating_sub(blocks.len());
        if missing > self.free.len() {
            let context = (blocks.len() + self.free.len()) * BLOCK;
            return Err(EngineError::ContextFull { needed: len, context });
        }
        let keep = self.free.len() - missing;
        blocks.extend(self.free.drain(keep..).rev());
        Ok(())
    }

    /// Rolls a session back to `len` positions, or to the last one before that it can go back to, and says
    /// which; blocks beyond are given back. Pages can go back to any.
    pub fn truncate(&mut self, seq: SeqId, len: usize) -> usize {
        let blocks = &mut self.sequences[seq.0 as usize].blocks;
        let keep = len.div_ceil(BLOCK).min(blocks.len());
        self.free.extend(blocks.drain(keep..).rev());
        len
    }

    /// The blocks of a session, in the order of its positions.
    #[must_use]
    pub fn blocks(&self, seq: SeqId) -> &[u32] {
        &self.sequences[seq.0 as usize].blocks
    }

    /// Keys and values of a layer, and where things lie in them.
    #[must_use]
    pub fn layer(&self, layer: usize) -> (&[u8], &[u8], Geometry) {
        let [k, v] = &self.planes[layer];
        (k, v, self.geometry())
    }

    /// Stores key and value (`[head_dim]`) of one position and KV head, whose block is reserved.
    pub fn append(
        &mut self,
        kernels: Kernels,
        layer: usize,
        row: Row,
        head: usize,
        key: &[f32],
        value: &[f32],
    ) {
        let at = self.geometry().row(self.blocks(row.seq), row.position as usize, head);
        for (plane, x) in self.planes[layer].iter_mut().zip([key, value]) {
            kernels.store_kv_row(self.kv_type, x, &mut plane[at..at + self.row_bytes]);
        }
    }

    fn geometry(&self) -> Geometry {
        Geometry {
            block_stride: self.block_bytes,
            head_stride: BLOCK * self.row_bytes,
            row_bytes: self.row_bytes,
        }
    }
}

/// Where a row lies in a plane.
#[derive(Clone, Copy, Debug)]
pub struct Geometry {
    /// Bytes of a block.
    pub block_stride: usize,
    /// Bytes of a head within a block.
    pub head_stride: usize,
    /// Bytes of a position of a head.
    pub row_bytes: usize,
}

impl Geometry {
    /// First byte of (position, head) of a session with these blocks.
    #[must_use]
    pub fn row(&self, blocks: &[u32], position: usize, head: usize) -> usize {
        blocks[position / BLOCK] as usize * self.block_stride
            + head * self.head_stride
            + position % BLOCK * self.row_bytes
    }
}
