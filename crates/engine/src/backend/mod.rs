//! What computes: the verbs of a layer.
//!
//! A backend owns the planes of a step (hidden states, projections, expert outputs) and turns them in place;
//! the engine says in which order, and brings the experts. The verbs are those of a layer, not single
//! operations, so that a device may fuse. A backend never knows the store: experts come as leases, in
//! batches as they arrive, and each is dropped when the work on it is done.

mod choose;
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
#[cfg(feature = "gpu")]
pub mod gpu;
mod input;

use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use smoe_meter::TierMeter;
use smoe_store::Lease;

pub(crate) use choose::Chosen;
pub use choose::DeviceChoice;

use crate::EngineError;
use crate::device::DevicePlan;
use crate::forecast::DeviceRates;
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

/// How a step follows from the last, and the next from it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Follows {
    /// It is of one token, of the session that the last step was of alone, behind what that one computed: nothing has been
    /// taken back, and no session has come or gone.
    pub continues: bool,
    /// It is of one token, which is likely to be followed by the one with the largest logit.
    pub likely: bool,
}

/// The most rows that [`Backend::head`] takes at once.
pub const HEAD_ROWS: usize = 8;

/// Experts in the memory of a device.
#[derive(Clone, Debug)]
pub struct DeviceTier {
    /// What the device holds, and how experts come there.
    pub plan: DevicePlan,
    /// Why they come in no better way.
    pub path_note: Option<String>,
    /// What is counted there.
    pub meter: Arc<TierMeter>,
}

/// Where the time went in which a device was made ready for a model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceOpening {
    /// Handing the resident weights over.
    pub upload: Duration,
    /// Kernels that were compiled for it: those of a model before on the same device are not.
    pub kernels: u64,
    /// Parsing and checking their shaders, summed over kernels, side by side with all else.
    pub shaders: Duration,
    /// The driver's compiler, likewise, and writing its language.
    pub pipelines: Duration,
    /// Waiting for the last of them when all else was done.
    pub wait: Duration,
}

/// How often each kernel of a device ran, and how long, by its own clock.
#[derive(Clone, Debug, Default)]
pub struct KernelTimes {
    /// Name, runs, nanoseconds in all.
    pub kernels: Vec<(String, u64, f64)>,
}

impl KernelTimes {
    /// Counts a run.
    pub fn add(&mut self, name: &str, ns: f64) {
        match self.kernels.iter_mut().find(|kernel| kernel.0 == name) {
            Some(kernel) => (kernel.1, kernel.2) = (kernel.1 + 1, kernel.2 + ns),
            None => self.kernels.push((name.to_owned(), 1, ns)),
        }
    }
}

/// What a decoded token takes of a device alone, its experts all there and others following at once.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenCosts {
    /// Seconds.
    pub token_s: f64,
    /// Kernels that it runs.
    pub dispatches: u32,
    /// Seconds of a dispatch of next to nothing that waits for another, kernels of one layout in turn.
    pub dispatch_s: f64,
    /// Seconds of a dispatch in the token: all its kernels, as they are but for bodies that return at once.
    pub dispatch_in_token_s: f64,
    /// Bytes per second, read and written, of a copy by a kernel; not a number where there is no room for one.
    pub copy_bytes_per_s: f64,
    /// Its kernels, the one that takes most first.
    pub kernels: Vec<KernelCost>,
}

/// What a kernel adds to that: how much less a token takes without it.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelCost {
    /// Its name. Several may share one.
    pub name: String,
    /// Workgroups.
    pub grid: [u32; 3],
    /// Times that a token runs it.
    pub runs: u32,
    /// Seconds of each.
    pub seconds: f64,
}

/// How far a backend went by itself ([`Backend::advance`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Advanced {
    /// The first layer that is left.
    pub next: usize,
    /// That layer has all but some experts, which are to be brought: attention, routes and the experts that the
    /// backend holds are done. Its `begin` comes next.
    pub halted: bool,
}

/// An expert, its tokens, and what it made of them.
#[derive(Clone, Copy, Debug)]
pub struct ExpertSeen<'a> {
    /// Its layer.
    pub layer: u32,
    /// Its number there.
    pub expert: u32,
    /// Tokens of the step that it serves, or some of them: it may come again with others.
    pub tokens: &'a [u32],
    /// `[tokens]`, the weights of its outputs.
    pub weights: &'a [f32],
    /// `[T, d_model]`, the inputs of gate and up for all tokens of the step.
    pub inputs: &'a [f32],
    /// `[tokens, d_expert]`, the inputs of down.
    pub hidden: &'a [f32],
}

/// Sees what routed experts are given and what they make of it: for statistics.
pub trait ExpertObserver: std::fmt::Debug + Send {
    /// Told of an expert when its outputs are computed.
    fn expert(&mut self, seen: &ExpertSeen<'_>);
}

/// An observer that its owner looks into later.
pub type SharedObserver = Arc<Mutex<dyn ExpertObserver>>;

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

    /// Computes as many layers from `from` on as it can without the host, whose routes are asked for afterwards
    /// ([`Self::advanced`]); and, after the last one, the logits of the tokens `head`, [`HEAD_ROWS`] at most, which
    /// [`Self::head`] will be asked for.
    fn advance(
        &mut self,
        from: usize,
        rows: &[Row],
        kv: &mut KvCache,
        head: &[usize],
    ) -> Result<Advanced, EngineError> {
        let _ = (rows, kv, head);
        Ok(Advanced { next: from, halted: false })
    }

    /// Told before a step, what stands before and after it.
    ///
    /// After a step whose token is `likely` followed by the one with the largest logit, a backend may begin that token's
    /// step before it is asked to; and if the next step indeed is one that `continues`, and of that token, go on with it.
    /// What it begins in vain is over before anything else begins; but hidden states of the step before are not to be
    /// asked for then.
    fn follows(&mut self, follows: Follows) {
        let _ = follows;
    }

    /// Hears how a layer that [`Self::advance`] finished was routed.
    fn routed(&mut self, layer: usize, routes: &Routes) {
        let _ = (layer, routes);
    }

    /// Router logits, `[T, n_experts]`, of the `index`-th MoE layer, if [`Self::advance`] routed it.
    fn advanced(&mut self, index: usize) -> Result<&[f32], EngineError> {
        let what = format!("routes of MoE layer {index}, which the host has");
        Err(EngineError::Unsupported { what })
    }

    /// Router logits, `[n_experts]`, of a layer that comes, over the hidden states of a step of one token as they are
    /// now: at any time after [`Self::route`] or a layer's end, without a change to what the verbs compute. None if
    /// this backend does not.
    fn foretell(&mut self, layer: usize) -> Result<Option<&[f32]>, EngineError> {
        let _ = layer;
        Ok(None)
    }

    /// Whether an expert must be brought.
    fn lacks(&mut self, layer: usize, expert: u32) -> bool {
        let _ = (layer, expert);
        true
    }

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

    /// Gives up what it was lent of the ring's memory, so that its pages may go back to the system; false if it cannot do
    /// without.
    fn give_ring_back(&mut self) -> Result<bool, EngineError> {
        Ok(true)
    }

    /// Adds each token's expert outputs, weighted, in ascending expert id whatever order they came in, and
    /// the shared expert's.
    fn finish(&mut self, layer: usize, routes: &Routes) -> Result<(), EngineError>;

    /// Logits (`[rows, vocab_size]`) of at most [`HEAD_ROWS`] tokens of the step.
    fn head(&mut self, tokens: &[usize]) -> Result<&[f32], EngineError>;

    /// Hidden states, `[T, d_model]`.
    fn hidden(&mut self) -> Result<&[f32], EngineError>;

    /// Hidden states of one token after the final norm, `[d_model]`; only after the last layer.
    fn final_hidden(&mut self, token: usize) -> Result<&[f32], EngineError>;

    /// What its device does with this model, if nothing has been computed yet.
    fn measure(&mut self) -> Result<Option<DeviceRates>, EngineError> {
        Ok(None)
    }

    /// What a token and its kernels take of a device, if nothing has been computed yet.
    fn costs(&mut self) -> Result<Option<TokenCosts>, EngineError> {
        Ok(None)
    }

    /// Times every kernel of a device from now on, or no longer: gives what was timed so far. Timed steps are waited
    /// for, so they are slower than others.
    fn profile(&mut self, on: bool) -> Option<KernelTimes> {
        let _ = on;
        None
    }

    /// Where the time went in which its device was made ready.
    fn opening(&self) -> Option<DeviceOpening> {
        None
    }

    /// The device's own memory, if it has any.
    fn tier(&self) -> Option<DeviceTier> {
        None
    }

    /// Shows an observer every expert from now on, or none any longer.
    fn watch_experts(&mut self, observer: Option<SharedObserver>) -> Result<(), EngineError> {
        let _ = observer;
        Err(EngineError::Unsupported {
            what: "watching experts: only the CPU does, use --device cpu".to_owned(),
        })
    }

    /// Takes experts that come before anything needs them.
    fn bring(&mut self, layer: usize, ready: &mut Vec<Lease>) -> Result<(), EngineError> {
        let _ = layer;
        ready.clear();
        Ok(())
    }

    /// Forgets every expert of these layers that it holds.
    fn forget_experts(&mut self, layers: Range<usize>) {
        let _ = layers;
    }
}
