//! What the experts in a device's own memory count.

use crate::Counter;

/// The counters of one device's tier of experts; its owner bumps them.
#[derive(Debug, Default)]
pub struct TierMeter {
    /// Experts asked for that the device held.
    pub hits: Counter,
    /// Experts asked for that it did not hold.
    pub misses: Counter,
    /// Of these, computed by the processor.
    pub computed: Counter,
    /// And read by the device's kernels where the ring has them.
    pub over_bus: Counter,
    /// Experts brought to the device.
    pub loads: Counter,
    /// Their bytes.
    pub load_bytes: Counter,
    /// Experts given up for others.
    pub evictions: Counter,
    /// Times that the device was handed work.
    pub submits: Counter,
    /// Time of handing it over, in nanoseconds.
    pub submit_ns: Counter,
    /// Time of recording what comes next while the device works, in nanoseconds.
    pub ahead_ns: Counter,
    /// Times that the host waited for it.
    pub waits: Counter,
    /// Time of these waits, in nanoseconds.
    pub wait_ns: Counter,
    /// Kernels recorded.
    pub dispatches: Counter,
}

impl TierMeter {
    /// All counters, as they are now.
    pub fn snapshot(&self) -> TierSnapshot {
        TierSnapshot {
            hits: self.hits.get(),
            misses: self.misses.get(),
            computed: self.computed.get(),
            over_bus: self.over_bus.get(),
            loads: self.loads.get(),
            load_bytes: self.load_bytes.get(),
            evictions: self.evictions.get(),
            submits: self.submits.get(),
            submit_ns: self.submit_ns.get(),
            ahead_ns: self.ahead_ns.get(),
            waits: self.waits.get(),
            wait_ns: self.wait_ns.get(),
            dispatches: self.dispatches.get(),
        }
    }
}

/// The counters of [`TierMeter`] at one time, or, after subtraction, over an interval. Same names, same units.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs, reason = "each field is documented on `TierMeter`, its one definition")]
pub struct TierSnapshot {
    pub hits: u64,
    pub misses: u64,
    pub computed: u64,
    pub over_bus: u64,
    pub loads: u64,
    pub load_bytes: u64,
    pub evictions: u64,
    pub submits: u64,
    pub submit_ns: u64,
    pub ahead_ns: u64,
    pub waits: u64,
    pub wait_ns: u64,
    pub dispatches: u64,
}

impl TierSnapshot {
    /// The share of experts asked for that the device held; none if none was asked for.
    #[must_use]
    pub fn hit_rate(&self) -> Option<f64> {
        let asked = self.hits + self.misses;
        (asked > 0).then(|| self.hits as f64 / asked as f64)
    }
}

impl TierSnapshot {
    /// Each counter of both, combined.
    fn with(self, other: Self, of: impl Fn(u64, u64) -> u64) -> Self {
        Self {
            hits: of(self.hits, other.hits),
            misses: of(self.misses, other.misses),
            computed: of(self.computed, other.computed),
            over_bus: of(self.over_bus, other.over_bus),
            loads: of(self.loads, other.loads),
            load_bytes: of(self.load_bytes, other.load_bytes),
            evictions: of(self.evictions, other.evictions),
            submits: of(self.submits, other.submits),
            submit_ns: of(self.submit_ns, other.submit_ns),
            ahead_ns: of(self.ahead_ns, other.ahead_ns),
            waits: of(self.waits, other.waits),
            wait_ns: of(self.wait_ns, other.wait_ns),
            dispatches: of(self.dispatches, other.dispatches),
        }
    }
}

impl std::ops::Sub for TierSnapshot {
    type Output = Self;

    /// What was counted between `earlier` and `self`.
    fn sub(self, earlier: Self) -> Self {
        self.with(earlier, u64::saturating_sub)
    }
}

impl std::ops::Add for TierSnapshot {
    type Output = Self;

    /// What was counted in both intervals.
    fn add(self, other: Self) -> Self {
        self.with(other, |a, b| a + b)
    }
}
