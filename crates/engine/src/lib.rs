//! The engine: the order of a model's mathematics, its sessions, its memory.
//!
//! ```text
//! Vault::open ──► plan ──► Engine::open ──► open_session ──► sync(tokens) ──► generate | decode
//! ```
//!
//! A layer is written once, for T tokens: prefill is T = a chunk, decode is T = 1. At each MoE layer the exact
//! router names the experts, the store brings the union of them into slots, the backend computes them as they
//! arrive, and each token sums its own in ascending expert id. So the result is bit-identical for every ring
//! size, thread count, chunk and order of arrival.
//!
//! The engine knows nothing of HTTP, terminals, text or Hugging Face names; it never prints and never exits.
#![forbid(unsafe_code)]

pub mod backend;
pub mod ceiling;
pub mod device;
mod engine;
mod error;
pub mod forecast;
mod governor;
mod job;
pub mod kv;
pub mod memory;
pub mod plan;
mod rope;
mod routes;
pub mod sampler;
mod scheduler;
mod session;
mod vault;
mod watch;
mod weights;

pub use backend::{
    DeviceChoice, DeviceOpening, DeviceTier, ExpertObserver, ExpertSeen, KernelCost, KernelTimes,
    SharedObserver, TokenCosts,
};
pub use device::{DevicePlan, ExpertPath};
pub use engine::{
    Control, Engine, EngineInfo, EngineOptions, Finish, Limits, LookAheadReport, Meters, Observer, OpenTimes,
    POLICY, is_finite, kernels, plan as plan_vault, plan_with_device,
};
pub use error::EngineError;
pub use job::{Constraint, Driver, Ended, Event, Job, JobId, Load, Sink, Usage};
pub use kv::{Adopted, KvUse, SpillConfig};
pub use routes::Routes;
pub use sampler::{Sampler, Sampling};
pub use scheduler::{Scheduler, SchedulerOptions};
pub use session::{Session, Synced};
pub use smoe_kernels::KvType;
pub use smoe_store::{DirectIo, OpenMode};
pub use vault::Vault;
