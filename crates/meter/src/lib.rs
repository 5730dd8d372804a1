//! One definition, unit and owner per metric.
//!
//! Counters are relaxed atomics that their owner bumps and anyone may read; a reader takes a plain
//! [`StoreSnapshot`], [`PhaseSnapshot`] or [`RouteSnapshot`] and subtracts two of them for an interval. Rates are defined here,
//! once, on the snapshot: a panel, `/metrics` and a bench record that show a hit rate show the same one.
//! This crate formats nothing and does not know who reads it.
#![forbid(unsafe_code)]

mod busy;
mod counter;
pub mod fidelity;
mod phase;
mod routing;
mod step;
mod store;
mod tier;

pub use busy::Busy;
pub use counter::Counter;
pub use phase::{Phase, PhaseClock, PhaseMeter, PhaseSnapshot};
pub use routing::{RouteMeter, RouteSnapshot};
pub use step::{Step, StepLog};
pub use store::{ByMisses, MISS_COUNTS, StoreMeter, StoreSnapshot};
pub use tier::{TierMeter, TierSnapshot};
