//! Attention of all tokens of a step, spread over the threads of a pool.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock, TryLockError};

use super::tile::{scratch_len, tile_tokens};
use super::{KvBlocks, KvPlane};
use crate::matmul::FORK;
use crate::output::Shared;
use crate::simd::LANES;
use crate::{Kernels, Pool};

/// The heads of a layer's attention.
#[derive(Clone, Copy, Debug)]
pub struct AttentionHeads<'a> {
    /// Heads that keys and values have.
    pub n_kv_heads: usize,
    /// Query heads that share a kv head: those of kv head h are `h * per_kv` and the ones after it.
    pub per_kv: usize,
    /// Elements of a query and of a key.
    pub head_dim: usize,
    /// Elements of a value and of an output.
    pub value_dim: usize,
    /// What scores are multiplied with.
    pub scale: f32,
    /// One logit per query head, as in [`Kernels::attention`].
    pub sinks: Option<&'a [f32]>,
}

/// What a token sees of the cache, for one kv head.
#[derive(Clone, Debug)]
pub struct Sight<'a> {
    /// Keys and values of the token's session.
    pub blocks: KvBlocks<'a>,
    /// The positions that it sees.
    pub visible: Range<usize>,
    /// If it sees some of them only: which, ascending.
    pub chosen: Option<&'a [u32]>,
}

impl Sight<'_> {
    /// True if `next` is what the next token of the same session sees.
    fn precedes(&self, next: &Self) -> bool {
        self.chosen.is_none()
            && next.chosen.is_none()
            && std::ptr::eq(self.blocks.table, next.blocks.table)
            && self.visible.start == next.visible.start
            && self.visible.end + 1 == next.visible.end
    }
}

/// Positions whose rows a task copies where a token's are copied by several (EXP-KERNEL-12: unmeasured).
const GATHERED: usize = 256;

/// Working memory of [`attend`]: a buffer per thread, and room for the rows of as many tokens.
#[derive(Debug)]
pub struct AttentionScratch {
    buffers: Vec<Mutex<Vec<f32>>>,
    /// Rows of chosen positions: of a thread's token, or of a token that several threads share.
    rows: Vec<RwLock<Vec<u8>>>,
}

impl AttentionScratch {
    /// Buffers of [`Self::floats`] each, for a pool of `threads` threads.
    #[must_use]
    pub fn new(threads: usize, head_dim: usize, value_dim: usize, context: usize) -> Self {
        let len = Self::floats(head_dim, value_dim, context);
        let threads = threads.max(1);
        Self {
            buffers: (0..threads).map(|_| Mutex::new(vec![0.0; len])).collect(),
            rows: (0..threads).map(|_| RwLock::default()).collect(),
        }
    }

    /// With room for `bytes` of rows of chosen positions for each thread: keys, and values that are not the beginnings
    /// of the keys.
    #[must_use]
    pub fn with_rows(mut self, bytes: usize) -> Self {
        for rows in &mut self.rows {
            *rows = RwLock::new(vec![0; bytes]);
        }
        self
    }

    /// Floats that a thread needs where tokens see up to `context` positions: scores of 32 queries up to 8192
    /// positions (1 MiB), of 16 beyond twice that, and the widened rows.
    #[must_use]
    pub const fn floats(head_dim: usize, value_dim: usize, context: usize) -> usize {
        scratch_len(head_dim, value_dim, context)
    }

    /// A buffer that no other thread uses, and its number.
    fn free(&self) -> (usize, MutexGuard<'_, Vec<f32>>) {
        let free = self.buffers.iter().enumerate().find_map(|(i, buffer)| match buffer.try_lock() {
            Ok(guard) => Some((i, guard)),
            // Nothing is kept there from one use to the next.
            Err(TryLockError::Poisoned(error)) => Some((i, error.into_inner())),
            Err(TryLockError::WouldBlock) => None,
        });
        let Some(free) = free else { panic!("more threads than the {} of the scratch", self.buffers.len()) };
        free
    }
}

/// The rows of chosen positions, to be copied together into a cache of one block that has nothing else.
#[derive(Clone, Copy)]
struct Gather<'a> {
    blocks: KvBlocks<'a>,
    chosen: &'a [u32],
}

impl<'a> Gather<'a> {
    /// Whether values are the first elements of the keys.
    fn is_one(self) -> bool {
        let KvBlocks { keys, values, .. } = self.blocks;
        std::ptr::eq(keys.bytes, values.bytes)
            && (keys.head_offset, keys.row_bytes) == (values.head_offset, values.row_bytes)
    }

    fn key_bytes(self) -> usize {
        self.chosen.len() * self.blocks.keys.row_bytes
    }

    /// Where the rows of the keys come from and go to, and those of the values: none if they are the same.
    fn planes<'b>(self, rows: &'b mut [u8]) -> [(KvPlane<'a>, &'b mut [u8]); 2] {
        let KvBlocks { keys, values, .. } = self.blocks;
        let (of_keys, rest) = rows.split_at_mut(self.key_bytes());
        let len = if self.is_one() { 0 } else { self.chosen.len() * values.row_bytes };
        [(keys, of_keys), (values, &mut rest[..len])]
    }

    /// Copies all rows.
    fn copy(self, rows: &mut [u8]) {
        for (from, rows) in self.planes(rows) {
            self.copy_of(from, 0, rows);
        }
    }

    /// The same, by all threads.
    fn copy_parallel(self, pool: &Pool, rows: &mut [u8]) {
        for (from, rows) in self.planes(rows) {
            pool.chunks_mut(rows, GATHERED * from.row_bytes, &|i, rows| {
                self.copy_of(from, i * GATHERED, rows);
            });
        }
    }

    /// Copies the rows of one plane from the `first`-th chosen position on, as many as there is room for.
    fn copy_of(self, from: KvPlane<'_>, first: usize, rows: &mut [u8]) {
        let size = self.blocks.block_positions;
        for (to, &position) in rows.chunks_exact_mut(from.row_bytes).zip(&self.chosen[first..]) {
            let (block, at) = (position as usize / size, position as usize % size);
            to.copy_from_slice(from.run(self.blocks.table[block], at..at + 1).bytes);
        }
    }

    /// The cache that the rows are.
    fn cache<'b>(self, rows: &'b [u8]) -> KvBlocks<'b> {
        let plane = |from: KvPlane<'_>, head_offset| {
            let KvPlane { ty, row_bytes, .. } = from;
            KvPlane { ty, bytes: rows, row_bytes, block_stride: 0, head_offset }
        };
        KvBlocks {
            keys: plane(self.blocks.keys, 0),
            values: plane(self.blocks.values, if self.is_one() { 0 } else { self.key_bytes() }),
            table: &[0],
            block_positions: self.chosen.len(),
        }
    }
}

/// Attention of all tokens of a step.
///
/// `queries` is `[T, n_kv_heads * per_kv * head_dim]`, `out` is `[T, n_kv_heads * per_kv * value_dim]` and is
/// overwritten. `sight(t, h)` says what token t sees of kv head h; the planes of `h` must be those of one
/// cache for all tokens. Tokens whose sights continue one another, as a prompt's do, share the reading of
/// keys and values. Each gets the bits of [`Kernels::attention`], whatever its neighbours and the number of
/// threads; one that sees chosen positions, those over a cache of these alone. Allocates nothing.
///
/// # Panics
/// If a shape does not match, a token sees nothing or more than the scratch was made for, or a row lies
/// outside of its plane.
pub fn attend<'a>(
    pool: &Pool,
    kernels: Kernels,
    heads: &AttentionHeads<'_>,
    queries: &[f32],
    sight: &(dyn Fn(usize, usize) -> Sight<'a> + Sync),
    scratch: &mut AttentionScratch,
    out: &mut [f32],
) {
    let &AttentionHeads { n_kv_heads, per_kv, head_dim, value_dim, scale, sinks } = heads;
    let (query_width, width) = (n_kv_heads * per_kv * head_dim, n_kv_heads * per_kv * value_dim);
    assert!(query_width > 0 && queries.len().is_multiple_of(query_width), "queries are [T, {query_width}]");
    let tokens = queries.len() / query_width;
    assert_eq!(out.len(), tokens * width, "output is [{tokens}, {width}]");
    assert!(sinks.is_none_or(|sinks| sinks.len() == n_kv_heads * per_kv), "one sink per query head");
    let at_once = tile_tokens(per_kv);
    let tiles = tokens.div_ceil(at_once);
    let positions = sight(tokens.saturating_sub(1), 0).visible.len();
    let forks = positions * tokens * n_kv_heads * per_kv * (head_dim + value_dim) >= FORK;
    // Few tokens of many heads that share one (a latent's) are cut between heads too: as many as a token by itself
    // takes at once.
    let piece = if forks && n_kv_heads * tiles < pool.threads() { LANES.min(per_kv) } else { per_kv };
    let pieces = per_kv.div_ceil(piece);
    if pieces > 1 {
        // So many heads make a tile of one token each. Its rows are copied once for all of its pieces, by all threads
        // (EXP-KERNEL-12).
        assert!(at_once == 1 && n_kv_heads * tiles <= scratch.rows.len(), "room for the rows of each tile");
        for (tile, rows) in scratch.rows[..n_kv_heads * tiles].iter_mut().enumerate() {
            let Sight { blocks, chosen, .. } = sight(tile % tiles, tile / tiles);
            if let Some(chosen) = chosen {
                let rows = rows.get_mut().unwrap_or_else(PoisonError::into_inner);
                Gather { blocks, chosen }.copy_parallel(pool, rows);
            }
        }
    }
    let (out, scratch) = (Shared::new(out), &*scratch);
    // One head after the other: its rows stay in a thread's cache from tile to tile.
    let work = |task: usize| {
        let (head, tile, first_query) = (task / pieces / tiles, task / pieces % tiles, task % pieces * piece);
        let n_q = piece.min(per_kv - first_query);
        let first_query = head * per_kv + first_query;
        let end = tokens.min((tile + 1) * at_once);
        let (buffer, mut floats) = scratch.free();
        let slot = if pieces > 1 { head * tiles + tile } else { buffer };
        let mut first = tile * at_once;
        while first < end {
            let seen = sight(first, head);
            let mut last = seen.clone();
            let mut next = first + 1;
            while next < end {
                let after = sight(next, head);
                if !last.precedes(&after) {
                    break;
                }
                (last, next) = (after, next + 1);
            }
            let columns = first_query * value_dim..(first_query + n_q) * value_dim;
            // SAFETY: each task has its own tokens' own columns.
            let mut out = unsafe { out.shard(first * width, next - first, width, columns) };
            let rows;
            let (blocks, visible) = match seen.chosen {
                Some(chosen) => {
                    let gather = Gather { blocks: seen.blocks, chosen };
                    if pieces == 1 {
                        gather.copy(&mut scratch.rows[slot].write().unwrap_or_else(PoisonError::into_inner));
                    }
                    rows = scratch.rows[slot].read().unwrap_or_else(PoisonError::into_inner);
                    (gather.cache(&rows), 0..chosen.len())
                }
                None => (seen.blocks, seen.visible),
            };
            kernels.attention_block(
                &queries[first * query_width + first_query * head_dim..],
                query_width,
                n_q,
                head_dim,
                blocks,
                visible,
                scale,
                sinks.map(|sinks| &sinks[first_query..first_query + n_q]),
                &mut floats,
                &mut out,
            );
            first = next;
        }
    };
    if forks {
        pool.run(n_kv_heads * tiles * pieces, &work);
    } else {
        (0..n_kv_heads * tiles * pieces).for_each(work);
    }
}
