//! Experts from disk to slot.
//!
//! A [`Store`] owns a bounded arena of page-aligned slots and a pool of reader threads. Its one owner demands
//! experts in batches; those that are resident are leased at once, the others are read into slots, all in
//! flight together, and handed out in the order in which they arrive. A slot in use is never overwritten.
//!
//! ```text
//!  owner thread                                    reader threads
//!  ────────────                                    ──────────────
//!  demand(keys) ── hits ──► Lease
//!       │
//!       └─ misses ─► evict ─► Exchange (FIFO) ───► Disk::read_exact_at ─► checksum ─► (decode)
//!                                                             │
//!  Demand::next() ◄── Lease ◄──── Exchange (done) ◄───────────┘ publish
//!
//!  any thread: drop(Lease)          the slot may be evicted again
//! ```
//!
//! What it knows of an expert is where its record lies, how long it is and its checksum. It must not know what
//! the bytes mean, tokens, or devices. It never prints or exits; what goes wrong reaches the one who waits for
//! it as a [`StoreError`], and a later demand tries again.
//!
//! | file | owns |
//! |---|---|
//! | `aligned` | page-aligned memory that fails by a typed error |
//! | `disk`, `file_disk` | positioned reads; direct I/O proven by a trial read |
//! | `slot` | the atomic state machine of a slot (model-checked with loom) |
//! | `arena`, `lease` | the slots' memory and the two permits to touch it |
//! | `policy` | whom to evict |
//! | `residency` | which expert is where |
//! | `exchange`, `reader` | the queue between owner and readers; what a reader does (queue model-checked) |
//! | `store`, `demand`, `preload` | the owner's side |
//! | `faulty`, `counting` | scripted disks and a counting allocator for tests (feature `test-support`) |

mod aligned;
mod arena;
#[cfg(any(test, feature = "test-support"))]
mod counting;
mod demand;
mod disk;
mod error;
mod exchange;
#[cfg(any(test, feature = "test-support"))]
mod faulty;
mod file_disk;
mod key_table;
mod lease;
mod policy;
mod preload;
mod reader;
mod record;
mod residency;
mod slot;
mod store;
mod sync;

pub use aligned::{AlignedBuf, OutOfMemory, PAGE};
pub use arena::Arena;
#[cfg(any(test, feature = "test-support"))]
pub use counting::CountingAllocator;
pub use demand::Demand;
pub use disk::{DirectIo, Disk, DiskError};
pub use error::StoreError;
#[cfg(any(test, feature = "test-support"))]
pub use faulty::{Fault, FaultyDisk, Gate, MemoryDisk};
pub use file_disk::{FileDisk, OpenMode};
pub use lease::Lease;
pub use policy::{Lru, Policy};
pub use record::{Record, RecordDecoder};
pub use smoe_format::ExpertKey;
pub use store::{Store, StoreConfig};
