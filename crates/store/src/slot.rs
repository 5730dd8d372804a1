//! The state machine of a slot: one atomic word, model-checked with loom below.
//!
//! ```text
//!             begin_load (owner)            publish (reader)
//!   ┌───────┐ ─────────────────► ┌─────────┐ ───────────────► ┌───────────────┐ ◄─┐ lease   (owner)  n + 1
//!   │ Empty │                    │ Loading │                  │ Ready, n leases│   │ release (anyone) n - 1
//!   └───────┘                    └─────────┘                  └───────────────┘ ──┘
//!     ▲  ▲  clear (owner)  ┌────────┐ │ fail (reader)             │
//!     │  └──────────────── │ Failed │ ◄                           │
//!     │                    └────────┘                             │
//!     └───────────────────────────────────────────────────────────┘ evict (owner), only at n = 0
//! ```
//!
//! - *Who may touch the bytes*: while Loading, the one holder of the load permit, for writing; while Ready,
//!   holders of leases, for reading; otherwise nobody.
//! - Only the owner evicts and grants leases, so a count of 0 that the owner sees stays 0 until it grants
//!   again; `evict` is still one compare-and-swap, and a lease dropped at that moment decides it either way.
//! - `publish` releases what the reader wrote to whoever leases; `release` releases what the lessee read to
//!   whoever evicts.

use crate::sync::{AtomicU32, Ordering};

/// What a slot is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SlotState {
    /// Holds nothing.
    Empty = 0,
    /// A reader fills it, or will.
    Loading = 1,
    /// Holds an expert.
    Ready = 2,
    /// Its load failed; the owner has not noticed yet.
    Failed = 3,
}

const STATE: u32 = 0b11;
const LEASE: u32 = 0b100;

const EMPTY: u32 = SlotState::Empty as u32;
const LOADING: u32 = SlotState::Loading as u32;
const READY: u32 = SlotState::Ready as u32;
const FAILED: u32 = SlotState::Failed as u32;

/// State in the low two bits, leases above.
#[derive(Debug)]
pub(crate) struct Slot {
    word: AtomicU32,
}

impl Slot {
    pub(crate) fn empty() -> Self {
        Self { word: AtomicU32::new(EMPTY) }
    }

    /// State and leases; for reports, decides nothing.
    pub(crate) fn inspect(&self) -> (SlotState, u32) {
        let word = self.word.load(Ordering::Relaxed);
        let state = match word & STATE {
            EMPTY => SlotState::Empty,
            LOADING => SlotState::Loading,
            READY => SlotState::Ready,
            _ => SlotState::Failed,
        };
        (state, word / LEASE)
    }

    /// Empty to Loading. False in any other state.
    pub(crate) fn begin_load(&self) -> bool {
        self.step(EMPTY, LOADING, Ordering::Relaxed)
    }

    /// Loading to Ready: what was written before is visible to whoever leases after.
    ///
    /// # Panics
    /// In any other state: the caller was not the holder of the load permit.
    pub(crate) fn publish(&self) {
        assert!(self.step(LOADING, READY, Ordering::Release), "published a slot that was not loading");
    }

    /// Loading to Failed.
    ///
    /// # Panics
    /// In any other state, as `publish`.
    pub(crate) fn fail(&self) {
        assert!(self.step(LOADING, FAILED, Ordering::Release), "failed a slot that was not loading");
    }

    /// Failed to Empty. False in any other state.
    pub(crate) fn clear(&self) -> bool {
        self.step(FAILED, EMPTY, Ordering::Acquire)
    }

    /// Ready without leases to Empty. False if it is leased or in any other state.
    pub(crate) fn evict(&self) -> bool {
        self.step(READY, EMPTY, Ordering::Acquire)
    }

    /// One lease more, if Ready.
    pub(crate) fn lease(&self) -> bool {
        self.word
            .fetch_update(Ordering::Acquire, Ordering::Relaxed, |word| {
                (word & STATE == READY).then(|| word.checked_add(LEASE)).flatten()
            })
            .is_ok()
    }

    /// One lease less.
    ///
    /// # Panics
    /// If there was none.
    pub(crate) fn release(&self) {
        let before = self.word.fetch_sub(LEASE, Ordering::Release);
        assert!(before >= LEASE && before & STATE == READY, "released a slot that was not leased");
    }

    fn step(&self, from: u32, to: u32, success: Ordering) -> bool {
        self.word.compare_exchange(from, to, success, Ordering::Relaxed).is_ok()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn states_follow_the_diagram() {
        let slot = Slot::empty();
        assert!(!slot.evict() && !slot.clear() && !slot.lease());
        assert!(slot.begin_load());
        assert!(!slot.begin_load() && !slot.evict() && !slot.clear() && !slot.lease());
        slot.publish();
        assert!(slot.lease() && slot.lease());
        assert_eq!(slot.inspect(), (SlotState::Ready, 2));
        assert!(!slot.evict() && !slot.begin_load());
        slot.release();
        assert!(!slot.evict());
        slot.release();
        assert!(slot.evict());
        assert!(slot.begin_load());
        slot.fail();
        assert_eq!(slot.inspect(), (SlotState::Failed, 0));
        assert!(!slot.lease() && !slot.evict() && !slot.begin_load());
        assert!(slot.clear());
        assert_eq!(slot.inspect(), (SlotState::Empty, 0));
    }

    #[test]
    #[should_panic(expected = "not leased")]
    fn a_lease_too_many_is_a_bug() {
        Slot::empty().release();
    }
}

/// Run with `RUSTFLAGS="--cfg loom" cargo test -p smoe-store --release --lib loom`.
///
/// The slot's bytes are a loom cell, which fails the test on any access that another does not happen before.
#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::thread;

    struct Guarded {
        slot: Slot,
        bytes: UnsafeCell<u32>,
    }

    // SAFETY: loom checks every access to `bytes` at run time; that is what these tests are for.
    unsafe impl Sync for Guarded {}

    impl Guarded {
        fn new() -> Arc<Self> {
            Arc::new(Self { slot: Slot::empty(), bytes: UnsafeCell::new(0) })
        }

        fn write(&self, value: u32) {
            // SAFETY: checked by loom.
            self.bytes.with_mut(|bytes| unsafe { *bytes = value });
        }

        fn read(&self) -> u32 {
            // SAFETY: checked by loom.
            self.bytes.with(|bytes| unsafe { *bytes })
        }

        fn ready(value: u32) -> Arc<Self> {
            let guarded = Self::new();
            assert!(guarded.slot.begin_load());
            guarded.write(value);
            guarded.slot.publish();
            guarded
        }
    }

    #[test]
    fn loom_publish_makes_the_bytes_visible() {
        loom::model(|| {
            let guarded = Guarded::new();
            assert!(guarded.slot.begin_load());
            let reader = {
                let guarded = guarded.clone();
                thread::spawn(move || {
                    guarded.write(7);
                    guarded.slot.publish();
                })
            };
            if guarded.slot.lease() {
                assert_eq!(guarded.read(), 7);
                guarded.slot.release();
            }
            reader.join().unwrap();
            assert!(guarded.slot.lease());
            assert_eq!(guarded.read(), 7);
        });
    }

    #[test]
    fn loom_a_leased_slot_is_not_overwritten() {
        loom::model(|| {
            let guarded = Guarded::ready(1);
            assert!(guarded.slot.lease());
            let device = {
                let guarded = guarded.clone();
                thread::spawn(move || {
                    assert_eq!(guarded.read(), 1);
                    guarded.slot.release();
                })
            };
            if guarded.slot.evict() {
                assert!(guarded.slot.begin_load());
                guarded.write(2);
                guarded.slot.publish();
                assert!(guarded.slot.lease());
                assert_eq!(guarded.read(), 2);
            } else {
                assert!(guarded.slot.lease());
                assert_eq!(guarded.read(), 1);
            }
            guarded.slot.release();
            device.join().unwrap();
            assert!(guarded.slot.evict());
        });
    }

    #[test]
    fn loom_two_drops_against_eviction() {
        loom::model(|| {
            let guarded = Guarded::ready(1);
            let devices: Vec<_> = (0..2)
                .map(|_| {
                    assert!(guarded.slot.lease());
                    let guarded = guarded.clone();
                    thread::spawn(move || {
                        assert_eq!(guarded.read(), 1);
                        guarded.slot.release();
                    })
                })
                .collect();
            if guarded.slot.evict() {
                assert!(guarded.slot.begin_load());
                guarded.write(2);
            }
            for device in devices {
                device.join().unwrap();
            }
        });
    }

    #[test]
    fn loom_a_slot_goes_from_owner_to_reader_to_device_and_back() {
        loom::model(|| {
            let guarded = Guarded::ready(1);
            assert!(guarded.slot.lease());
            let device = {
                let guarded = guarded.clone();
                thread::spawn(move || {
                    assert_eq!(guarded.read(), 1);
                    guarded.slot.release();
                })
            };
            // The owner gives the slot to a reader as soon as it can; the reader writes on its own thread.
            let reader = guarded.slot.evict().then(|| {
                assert!(guarded.slot.begin_load());
                let guarded = guarded.clone();
                thread::spawn(move || {
                    guarded.write(2);
                    guarded.slot.publish();
                })
            });
            let given = reader.is_some();
            if guarded.slot.lease() {
                assert_eq!(guarded.read(), if given { 2 } else { 1 });
                guarded.slot.release();
            }
            device.join().unwrap();
            if let Some(reader) = reader {
                reader.join().unwrap();
            }
            assert!(guarded.slot.evict());
        });
    }

    #[test]
    fn loom_a_failed_load_gives_the_slot_back() {
        loom::model(|| {
            let guarded = Guarded::new();
            assert!(guarded.slot.begin_load());
            let reader = {
                let guarded = guarded.clone();
                thread::spawn(move || {
                    guarded.write(9);
                    guarded.slot.fail();
                })
            };
            assert!(!guarded.slot.lease() && !guarded.slot.evict());
            if guarded.slot.clear() {
                assert!(guarded.slot.begin_load());
                guarded.write(3);
                guarded.slot.publish();
                assert!(guarded.slot.lease());
                assert_eq!(guarded.read(), 3);
            }
            reader.join().unwrap();
        });
    }
}
