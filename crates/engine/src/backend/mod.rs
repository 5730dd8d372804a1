//! What computes: the verbs of a layer.
//!
//! A backend owns the planes of a step (hidden states, projections, expert outputs) and turns them in place;
//! the engine says in which order, and brings the experts. The verbs are those of a layer, not single
//! operations, so that a device may fuse. A backend never knows the store: experts come as leases, in
//! batches as they arrive, and each is dropped when the work on it is done.

pub mod cpu;

use smoe_store::Lease;

use crate::EngineError;
use crate::kv::{KvCache, SeqId};
use crate::routes::Routes;

/// Rows of a step: whose token, at which position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// The session.
    pub seq: SeqId,
    /// Position in it.
    pub position: u32,
}

/// The most rows that [`Backend::head`] takes at once.
pub const HEAD_ROWS: usize = 8;

/// The verbs of a layer, for the T tokens of a step.
///
/// A step is `embed`, then for each layer `attend` and either `dense`, or `route`, `begin`, `experts` any
/// number of times until every expert of the union has come, and `finish`; then `head` any number of times.
/// What a token gets does not depend on T or on its neighbours.
///
/// # Errors
/// A verb fails if its device does; the step is then void.
pub trait Backend: Send {
    /// Hidden states become the embeddings of `tokens`.
    fn embed(&mut self, tokens: &[u32]) -> Result<(), EngineError>;

    /// Adds attention: norm, projections, QK-norm, RoPE, append to the cache, scores, output projection.
    /// Rows of a session are in ascending position and its blocks are reserved.
    fn attend(&mut self, layer: usize, rows: &[Row], kv: &mut KvCache) -> Result<(), EngineError>;

    /// Adds a dense feed-forward part.
    fn dense(&mut self, layer: usize) -> Result<(), EngineError>;

    /// Norm and router logits, `[T, n_experts]`.
    fn route(&mut self, layer: usize) -> Result<&[f32], EngineError>;

    /// True if the experts of this layer must come in ascending id: more outputs than the backend keeps.
    fn wants_order(&self, routes: &Routes) -> bool;

    /// Starts the layer's experts; the shared expert may be computed while reads are under way.
    fn begin(&mut self, layer: usize, routes: &Routes) -> Result<(), EngineError>;

    /// Takes these experts, all of them, for all their tokens. A lease is given back when the work on it is
    /// done, which may be after the call's return.
    fn experts(&mut self, layer: usize, ready: &mut Vec<Lease>, routes: &Routes) -> Result<(), EngineError>;

    /// Waits until a lease that this backend still holds is given back: called when the store needs a slot
    /// and has none. False if none is held.
    fn reclaim(&mut self) -> Result<bool, EngineError>;

    /// Adds each token's expert outputs, weighted, in ascending expert id whatever order they came in, and
    /// the shared expert's.
    fn finish(&mut self, layer: usize, routes: &Routes) -> Result<(), EngineError>;

    /// Logits (`[rows, vocab_size]`) of at most [`HEAD_ROWS`] tokens of the step.
    fn head(&mut self, tokens: &[usize]) -> Result<&[f32], EngineError>;

    /// Hidden states, `[T, d_model]`.
    fn hidden(&mut self) -> Result<&[f32], EngineError>;

    /// Hidden states of one token after the final norm, `[d_model]`; only after the last layer.
    fn final_hidden(&mut self, token: usize) -> Result<&[f32], EngineError>;
}
