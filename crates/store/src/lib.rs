//! Experts from disk to slot.
//!
//! A [`Store`] owns a bounded arena of page-aligned slots and a pool of reader threads. Its one owner demands
//! experts in batches; those that are resident are leased at once, the others are read into slots, all in
//! flight together, and handed out as they arrive or in the order given. A slot in use is never overwritten.
//! What the owner expects to demand next is read behind that, while the disk would idle.
//!
//! ```text
//!  owner thread                                       reader threads
//!  ────────────                                       ──────────────
//!  demand(wants) ── hits ──► Lease
//!       │
//!       └─ misses ─► claim: free or evict ─┐
//!                                          ├─► Exchange ───► Disk::read_exact_at ─► checksum (and decode)
//!  expect(wants) ─► claim, sparing the ────┘   demand first,           │
//!                   batch and the list         low bounded             │
//!                                                                      │
//!  Demand::take_ready() ◄── Lease ◄──────────── Exchange (done) ◄──────┘ publish
//!
//!  any thread: drop(Lease)                            the slot may be evicted again
//!  set_limit(slots): pages of slots beyond it go back to the system
//! ```
//!
//! What it knows of an expert is where its record lies, how long it is and its checksum. It must not know what
//! the bytes mean, tokens, or devices. It never prints or exits; what goes wrong reaches the one who waits for
//! it as a [`StoreError`], and a later demand tries again.
//!
//! | file | owns |
//! |---|---|
//! | `aligned` | page-aligned memory that fails by a typed error; giving pages back |
//! | `disk`, `file_disk` | positioned reads; direct I/O proven by a trial read |
//! | `slot` | the atomic state machine of a slot (model-checked with loom) |
//! | `arena`, `lease` | the slots' memory and the two permits to touch it |
//! | `policy/` | whom to evict: LRU by stamp, and candidates |
//! | `replay` | scoring policies on recorded routes; the best that any could do |
//! | `residency` | which expert is where; the limit |
//! | `exchange`, `reader` | the queues between owner and readers; what a reader does (queues model-checked) |
//! | `staging` | records that were read and are decoded, in parts, by several readers; their checksums |
//! | `want` | what is demanded: experts, stamps, order |
//! | `memory` | the arena as plain bytes, for those who measure memory |
//! | `machine` | what macOS says of its memory |
//! | `store`, `demand`, `ahead`, `preload` | the owner's side: shared parts, batches, low priority, everything at once |
//! | `block_file`, `block_file/` | apart from all that: a bounded file of blocks that survives a crash |
//! | `faulty`, `counting` | scripted disks and a counting allocator for tests (feature `test-support`) |

mod ahead;
mod aligned;
mod arena;
mod block_file;
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
mod machine;
mod memory;
mod policy;
mod preload;
mod reader;
mod record;
pub mod replay;
mod residency;
mod slot;
mod staging;
mod store;
mod sync;
mod want;

pub use aligned::{AlignedBuf, OutOfMemory, PAGE};
pub use arena::{Arena, LentArena};
pub use block_file::{
    BlockFailure, BlockFile, BlockFileConfig, BlockFileError, BlockFileSnapshot, BlockMeta, NOTE_BYTES_MAX,
    Opened, WriteDisk,
};
#[cfg(any(test, feature = "test-support"))]
pub use counting::CountingAllocator;
pub use demand::Demand;
pub use disk::{DirectIo, Disk, DiskError};
pub use error::StoreError;
#[cfg(any(test, feature = "test-support"))]
pub use faulty::{Fault, FaultyDisk, Gate, MemoryDisk};
pub use file_disk::{FileDisk, OpenMode};
pub use lease::Lease;
pub use machine::{MachineMemory, machine_memory};
pub use memory::ArenaMemory;
pub use policy::{Clock, Fifo, LfuDecay, Lrfu, Lru, Policy, PolicyKind, S3Fifo, Slru};
pub use record::{MAX_PARTS, Record, RecordDecoder};
pub use smoe_format::ExpertKey;
pub use store::{Store, StoreConfig, decoded_at_once, staging_bytes};
pub use want::{Order, Want};
