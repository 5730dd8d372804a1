//! The ring's memory, lent to the device: experts are copied by the device itself, or read where they lie.
//!
//! Who owns a slot while the device reads it: its lease. What is recorded *holds* leases; handing it over puts them
//! into a flight, and they are given back when the device has done what it was handed. Until then the store neither
//! evicts nor overwrites those slots; when it has no other left, the engine asks for the oldest flight's
//! ([`crate::backend::Backend::reclaim`]).

use std::collections::VecDeque;
use std::sync::Arc;

use smoe_format::expert_file::LayerTable;
use smoe_gpu::{Gpu, GpuError, Segments, Slice};
use smoe_store::LentArena;

/// The ring's slots as the device sees them.
#[derive(Clone, Debug)]
pub(crate) struct Ring {
    segments: Segments,
    slot_bytes: u64,
}

impl Ring {
    /// Lends the ring to a device, the experts of a layer in one segment where layers have as many and a binding can be
    /// so long.
    ///
    /// # Errors
    /// If the device cannot import it: it is not able to, or not so much.
    pub(crate) fn new(gpu: &Gpu, arena: LentArena, tables: &[LayerTable]) -> Result<Self, GpuError> {
        let slot_bytes = arena.stride() as u64;
        let together = tables.first().map_or(1, |table| u64::from(table.n_experts).max(1));
        let segments = gpu.lend("the ring of experts", Arc::new(arena), slot_bytes, together)?;
        Ok(Self { segments, slot_bytes })
    }

    pub(super) fn segments(&self) -> &[Slice] {
        self.segments.slices()
    }

    pub(super) const fn slot_bytes(&self) -> u64 {
        self.slot_bytes
    }

    /// How many there are.
    pub(super) fn slots(&self) -> usize {
        let bytes: u64 = self.segments().iter().map(Slice::len).sum();
        (bytes / self.slot_bytes) as usize
    }

    /// Which segment a slot is of, and which of its slots.
    pub(super) const fn locate(&self, slot: u32) -> (usize, u32) {
        let (segment, at) = self.segments.locate(slot as u64);
        (segment, at as u32)
    }

    /// The first `len` bytes of a slot.
    pub(super) fn slot(&self, slot: usize, len: u64) -> Slice {
        self.segments.record(slot as u64).part(0, len)
    }

    /// Slots in a row, if they are of one segment.
    pub(super) fn run(&self, first: usize, count: usize) -> Option<Slice> {
        self.segments.run(first as u64, count as u64)
    }
}

/// What the device reads of others: `L`, that must stay as it is until `S`, what the device was handed, is done. The
/// device works in the order in which it is handed something.
#[derive(Debug)]
pub(super) struct Flights<S, L> {
    /// Read by what is recorded and not handed over.
    recorded: Vec<L>,
    /// By what was handed over, the oldest first; none is empty.
    under_way: VecDeque<(S, Vec<L>)>,
}

impl<S, L> Default for Flights<S, L> {
    fn default() -> Self {
        Self { recorded: Vec::new(), under_way: VecDeque::new() }
    }
}

impl<S: Clone, L> Flights<S, L> {
    /// Holds what something that is recorded reads.
    pub(super) fn hold(&mut self, read: L) {
        self.recorded.push(read);
    }

    /// Whether something that is recorded reads anything.
    pub(super) fn is_recorded(&self) -> bool {
        !self.recorded.is_empty()
    }

    /// How much it holds.
    pub(super) fn held(&self) -> usize {
        self.recorded.len() + self.under_way.iter().map(|(_, reads)| reads.len()).sum::<usize>()
    }

    /// What is recorded was handed over.
    pub(super) fn submitted(&mut self, as_what: &S) {
        if !self.recorded.is_empty() {
            self.under_way.push_back((as_what.clone(), std::mem::take(&mut self.recorded)));
        }
    }

    /// Gives back what the device has done with; an error ends it.
    pub(super) fn land<E>(&mut self, is_done: impl Fn(&S) -> Result<bool, E>) -> Result<(), E> {
        while let Some((oldest, _)) = self.under_way.front() {
            if !is_done(oldest)? {
                break;
            }
            self.under_way.pop_front();
        }
        Ok(())
    }

    /// What was handed over first and not given back.
    pub(super) fn oldest(&self) -> Option<&S> {
        self.under_way.front().map(|(oldest, _)| oldest)
    }

    /// What was handed over last.
    pub(super) fn latest(&self) -> Option<&S> {
        self.under_way.back().map(|(latest, _)| latest)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]
mod tests {
    use std::cell::Cell;
    use std::rc::Rc;

    use super::*;

    /// Random numbers that repeat.
    struct Random(u64);

    impl Random {
        fn below(&mut self, n: u64) -> u64 {
            self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (self.0 >> 33) % n
        }
    }

    /// A device that does what it is handed in order, at times of its own, against slots that are free again as soon as
    /// nobody holds them.
    #[test]
    fn nothing_is_given_back_before_the_device_has_done_with_it() {
        for seed in 0..200 {
            let mut random = Random(seed);
            let slots: Vec<Rc<()>> = (0..1 + random.below(6)).map(|_| Rc::new(())).collect();
            let mut flights: Flights<u64, Rc<()>> = Flights::default();
            let (mut recorded, mut handed, done) = (Vec::new(), VecDeque::new(), Cell::new(0));
            let mut next = 0;
            for _ in 0..300 {
                match random.below(5) {
                    0 | 1 => match slots.iter().position(|slot| Rc::strong_count(slot) == 1) {
                        Some(free) => {
                            flights.hold(slots[free].clone());
                            recorded.push(free);
                        }
                        // The store has no slot: waits for the oldest, which gives at least one back.
                        None => {
                            if flights.oldest().is_none() {
                                flights.submitted(&next);
                                handed.push_back((next, std::mem::take(&mut recorded)));
                                next += 1;
                            }
                            let oldest = *flights.oldest().unwrap();
                            done.set(done.get().max(oldest + 1));
                            flights.land(|&s| Ok::<_, ()>(s < done.get())).unwrap();
                            assert!(slots.iter().any(|slot| Rc::strong_count(slot) == 1));
                        }
                    },
                    2 => {
                        flights.submitted(&next);
                        handed.push_back((next, std::mem::take(&mut recorded)));
                        next += 1;
                    }
                    3 => done.set(done.get() + random.below(next - done.get() + 1)),
                    _ => flights.land(|&s| Ok::<_, ()>(s < done.get())).unwrap(),
                }
                handed.retain(|(number, _)| *number >= done.get());
                for (_, reads) in handed.iter().chain([&(next, recorded.clone())]) {
                    assert!(reads.iter().all(|&slot| Rc::strong_count(&slots[slot]) > 1), "{seed}");
                }
                assert_eq!(flights.is_recorded(), !recorded.is_empty());
                let out = slots.iter().filter(|slot| Rc::strong_count(slot) > 1).count();
                assert_eq!(flights.held(), out, "each slot once");
            }
            flights.submitted(&next);
            assert!(flights.latest().is_none_or(|&latest| latest <= next));
            flights.land(|_| Ok::<_, ()>(true)).unwrap();
            assert!(slots.iter().all(|slot| Rc::strong_count(slot) == 1), "all are back");
        }
    }

    #[test]
    fn an_error_gives_nothing_back() {
        let slot = Rc::new(());
        let mut flights: Flights<u64, Rc<()>> = Flights::default();
        flights.hold(slot.clone());
        flights.submitted(&0);
        assert_eq!(flights.land(|_| Err("lost")), Err("lost"));
        assert_eq!(Rc::strong_count(&slot), 2);
        drop(flights);
        assert_eq!(Rc::strong_count(&slot), 1);
    }
}
