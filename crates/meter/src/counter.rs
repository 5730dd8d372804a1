//! A number that only grows.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A monotonic counter, shared between its owner and any number of readers.
///
/// Relaxed: counters order nothing, and a snapshot of several is not one instant's truth, only close to it.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds `n`.
    #[inline]
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    /// Adds a duration, in nanoseconds.
    #[inline]
    pub fn add_time(&self, time: Duration) {
        self.add(nanoseconds(time));
    }

    /// The value now.
    #[inline]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A duration as whole nanoseconds; 584 years fit.
pub(crate) fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
