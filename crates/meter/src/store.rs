//! What the expert store counts.

use crate::{Busy, Counter};
use std::ops::{Add, Sub};

/// Counts of [`StoreMeter::demands_by_misses`].
pub const MISS_COUNTS: usize = 17;

/// The counters of one expert store.
///
/// The *owner* is the thread that demands experts; *readers* are the threads that read the disk.
#[derive(Debug, Default)]
pub struct StoreMeter {
    /// Experts demanded that were resident and stayed so until they were handed out (owner); counted when their
    /// batch ends. An expert whose read is still in flight is a miss: its demander waits.
    pub demand_hits: Counter,
    /// Experts demanded that were not resident, or whose slot was needed for what comes before them in the same
    /// batch (owner).
    pub demand_misses: Counter,
    /// Demands, that is layers of steps, by how many of their experts the cache would not have had: those that had to be
    /// waited for when the demand was made, and those that were there only because they had been read ahead. None, one,
    /// two, ..., the last count being of so many and more (owner).
    pub demands_by_misses: [Counter; MISS_COUNTS],
    /// Resident experts whose slot was given to another, or given up (owner).
    pub evictions: Counter,
    /// Time that the owner was blocked because nothing that it demanded was ready, in nanoseconds (owner).
    pub wait_ns: Counter,
    /// Experts that were read into a slot, whatever for (owner, when it learns of them). Less `evictions`, those
    /// that are resident.
    pub loads: Counter,
    /// Those of `loads` that were read at low priority (owner).
    pub ahead_reads: Counter,
    /// Bytes on disk of `ahead_reads` (owner).
    pub ahead_bytes: Counter,
    /// Experts demanded for the first time while they were resident through a low-priority read (owner).
    pub ahead_hits: Counter,
    /// Experts demanded for the first time while their low-priority read was under way or queued (owner).
    pub ahead_late: Counter,
    /// Experts that were read at low priority and evicted without ever having been demanded (owner).
    pub ahead_waste: Counter,
    /// Low-priority reads that brought no expert: they failed, or what they brought did not pass (owner).
    pub ahead_errors: Counter,
    /// Disk reads completed with all their bytes; a read of several records counts once (readers).
    pub reads: Counter,
    /// Bytes delivered by those reads (readers).
    pub disk_bytes: Counter,
    /// Time in which at least one disk read was under way, in nanoseconds (readers).
    pub busy: Busy,
    /// Time inside disk reads, failed ones included, summed over reader threads, in nanoseconds (readers).
    pub read_ns: Counter,
    /// Time spent on checksums, summed over reader threads, in nanoseconds (readers).
    pub check_ns: Counter,
    /// Time spent turning records into slots, summed over reader threads, in nanoseconds (readers).
    pub decode_ns: Counter,
    /// Bytes of slots that were filled in that time; more than were read where records are entropy-coded (readers).
    pub decoded_bytes: Counter,
    /// Disk reads that failed or came up short (readers).
    pub read_errors: Counter,
    /// Records whose checksum was wrong (readers).
    pub checksum_errors: Counter,
    /// Records that could not be decoded (readers).
    pub decode_errors: Counter,
}

impl StoreMeter {
    /// Counts a demand, its misses, and its hits through reads ahead of it.
    pub fn count_demand(&self, misses: usize, ahead: usize) {
        self.demand_misses.add(misses as u64);
        self.ahead_hits.add(ahead as u64);
        self.demands_by_misses[(misses + ahead).min(MISS_COUNTS - 1)].add(1);
    }

    /// All counters, as they are now.
    pub fn snapshot(&self) -> StoreSnapshot {
        StoreSnapshot {
            demand_hits: self.demand_hits.get(),
            demand_misses: self.demand_misses.get(),
            demands_by_misses: ByMisses(self.demands_by_misses.each_ref().map(Counter::get)),
            evictions: self.evictions.get(),
            wait_ns: self.wait_ns.get(),
            loads: self.loads.get(),
            ahead_reads: self.ahead_reads.get(),
            ahead_bytes: self.ahead_bytes.get(),
            ahead_hits: self.ahead_hits.get(),
            ahead_late: self.ahead_late.get(),
            ahead_waste: self.ahead_waste.get(),
            ahead_errors: self.ahead_errors.get(),
            reads: self.reads.get(),
            disk_bytes: self.disk_bytes.get(),
            busy_ns: self.busy.get(),
            read_ns: self.read_ns.get(),
            check_ns: self.check_ns.get(),
            decode_ns: self.decode_ns.get(),
            decoded_bytes: self.decoded_bytes.get(),
            read_errors: self.read_errors.get(),
            checksum_errors: self.checksum_errors.get(),
            decode_errors: self.decode_errors.get(),
        }
    }
}

/// Demands by their misses: [`StoreMeter::demands_by_misses`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ByMisses([u64; MISS_COUNTS]);

impl Default for ByMisses {
    fn default() -> Self {
        Self([0; MISS_COUNTS])
    }
}

impl ByMisses {
    /// Pairs of misses and demands that had so many. Those that had too many to be counted apart share what is left of
    /// `all` misses.
    pub fn pairs(&self, all: u64) -> impl Iterator<Item = (f64, u64)> {
        let last = MISS_COUNTS - 1;
        let counted: u64 = self.0[..last].iter().zip(0..).map(|(demands, misses)| demands * misses).sum();
        let many = (all.saturating_sub(counted) as f64 / self.0[last].max(1) as f64).max(last as f64);
        self.0
            .into_iter()
            .enumerate()
            .map(move |(n, demands)| (if n == last { many } else { n as f64 }, demands))
    }
}

impl Sub for ByMisses {
    type Output = Self;

    fn sub(self, earlier: Self) -> Self {
        Self(std::array::from_fn(|n| self.0[n].saturating_sub(earlier.0[n])))
    }
}

impl Add for ByMisses {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self(std::array::from_fn(|n| self.0[n] + other.0[n]))
    }
}

/// The counters of [`StoreMeter`] at one time, or, after subtraction, over an interval. Same names, same units.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs, reason = "each field is documented on `StoreMeter`, its one definition")]
pub struct StoreSnapshot {
    pub demand_hits: u64,
    pub demand_misses: u64,
    pub demands_by_misses: ByMisses,
    pub evictions: u64,
    pub wait_ns: u64,
    pub loads: u64,
    pub ahead_reads: u64,
    pub ahead_bytes: u64,
    pub ahead_hits: u64,
    pub ahead_late: u64,
    pub ahead_waste: u64,
    pub ahead_errors: u64,
    pub reads: u64,
    pub disk_bytes: u64,
    pub busy_ns: u64,
    pub read_ns: u64,
    pub check_ns: u64,
    pub decode_ns: u64,
    pub decoded_bytes: u64,
    pub read_errors: u64,
    pub checksum_errors: u64,
    pub decode_errors: u64,
}

impl StoreSnapshot {
    /// Bytes per second while at least one read was under way; none if nothing was read.
    pub fn read_bytes_per_s(&self) -> Option<f64> {
        (self.busy_ns > 0).then(|| self.disk_bytes as f64 / (self.busy_ns as f64 / 1e9))
    }

    /// Bytes of slots that a reader thread fills a second when it decodes; none if nothing was decoded.
    pub fn decode_bytes_per_s(&self) -> Option<f64> {
        (self.decode_ns > 0).then(|| self.decoded_bytes as f64 / (self.decode_ns as f64 / 1e9))
    }

    /// The share of demanded experts that needed no read; none if nothing was demanded.
    ///
    /// Demand only: what preloading or speculation reads moves neither side of it, and nor do failed reads.
    pub fn hit_rate(&self) -> Option<f64> {
        let demanded = self.demand_hits + self.demand_misses;
        (demanded > 0).then(|| self.demand_hits as f64 / demanded as f64)
    }
}

impl Sub for StoreSnapshot {
    type Output = Self;

    /// What was counted between `earlier` and `self`.
    fn sub(self, earlier: Self) -> Self {
        Self {
            demand_hits: self.demand_hits.saturating_sub(earlier.demand_hits),
            demand_misses: self.demand_misses.saturating_sub(earlier.demand_misses),
            demands_by_misses: self.demands_by_misses - earlier.demands_by_misses,
            evictions: self.evictions.saturating_sub(earlier.evictions),
            wait_ns: self.wait_ns.saturating_sub(earlier.wait_ns),
            loads: self.loads.saturating_sub(earlier.loads),
            ahead_reads: self.ahead_reads.saturating_sub(earlier.ahead_reads),
            ahead_bytes: self.ahead_bytes.saturating_sub(earlier.ahead_bytes),
            ahead_hits: self.ahead_hits.saturating_sub(earlier.ahead_hits),
            ahead_late: self.ahead_late.saturating_sub(earlier.ahead_late),
            ahead_waste: self.ahead_waste.saturating_sub(earlier.ahead_waste),
            ahead_errors: self.ahead_errors.saturating_sub(earlier.ahead_errors),
            reads: self.reads.saturating_sub(earlier.reads),
            disk_bytes: self.disk_bytes.saturating_sub(earlier.disk_bytes),
            busy_ns: self.busy_ns.saturating_sub(earlier.busy_ns),
            read_ns: self.read_ns.saturating_sub(earlier.read_ns),
            check_ns: self.check_ns.saturating_sub(earlier.check_ns),
            decode_ns: self.decode_ns.saturating_sub(earlier.decode_ns),
            decoded_bytes: self.decoded_bytes.saturating_sub(earlier.decoded_bytes),
            read_errors: self.read_errors.saturating_sub(earlier.read_errors),
            checksum_errors: self.checksum_errors.saturating_sub(earlier.checksum_errors),
            decode_errors: self.decode_errors.saturating_sub(earlier.decode_errors),
        }
    }
}

impl Add for StoreSnapshot {
    type Output = Self;

    /// What was counted in two intervals together.
    fn add(self, other: Self) -> Self {
        Self {
            demand_hits: self.demand_hits + other.demand_hits,
            demand_misses: self.demand_misses + other.demand_misses,
            demands_by_misses: self.demands_by_misses + other.demands_by_misses,
            evictions: self.evictions + other.evictions,
            wait_ns: self.wait_ns + other.wait_ns,
            loads: self.loads + other.loads,
            ahead_reads: self.ahead_reads + other.ahead_reads,
            ahead_bytes: self.ahead_bytes + other.ahead_bytes,
            ahead_hits: self.ahead_hits + other.ahead_hits,
            ahead_late: self.ahead_late + other.ahead_late,
            ahead_waste: self.ahead_waste + other.ahead_waste,
            ahead_errors: self.ahead_errors + other.ahead_errors,
            reads: self.reads + other.reads,
            disk_bytes: self.disk_bytes + other.disk_bytes,
            busy_ns: self.busy_ns + other.busy_ns,
            read_ns: self.read_ns + other.read_ns,
            check_ns: self.check_ns + other.check_ns,
            decode_ns: self.decode_ns + other.decode_ns,
            decoded_bytes: self.decoded_bytes + other.decoded_bytes,
            read_errors: self.read_errors + other.read_errors,
            checksum_errors: self.checksum_errors + other.checksum_errors,
            decode_errors: self.decode_errors + other.decode_errors,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hit_rate_counts_demand_alone() {
        let meter = StoreMeter::default();
        assert_eq!(meter.snapshot().hit_rate(), None);
        meter.reads.add(100);
        meter.read_errors.add(7);
        assert_eq!(meter.snapshot().hit_rate(), None);
        meter.demand_hits.add(3);
        meter.demand_misses.add(1);
        assert_eq!(meter.snapshot().hit_rate(), Some(0.75));
    }

    #[test]
    fn demands_with_many_misses_share_what_is_left() {
        let meter = StoreMeter::default();
        for misses in [0, 3, 3, 40, 50] {
            meter.count_demand(misses, 0);
        }
        let by = meter.snapshot().demands_by_misses;
        let pairs: Vec<_> = by.pairs(96).filter(|&(_, demands)| demands > 0).collect();
        assert_eq!(pairs, [(0.0, 1), (3.0, 2), (45.0, 2)]);
        assert_eq!(by - by, ByMisses::default());
    }

    #[test]
    fn intervals_are_differences() {
        let meter = StoreMeter::default();
        meter.demand_hits.add(10);
        meter.disk_bytes.add(1 << 20);
        let earlier = meter.snapshot();
        meter.demand_misses.add(4);
        meter.disk_bytes.add(5);
        let interval = meter.snapshot() - earlier;
        assert_eq!(interval, StoreSnapshot { demand_misses: 4, disk_bytes: 5, ..Default::default() });
        assert_eq!(interval.hit_rate(), Some(0.0));
        assert_eq!(earlier + interval, meter.snapshot());
    }
}
