//! For how long anything at all was under way.

use crate::Counter;
use crate::counter::nanoseconds;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Sums the time in which at least one of many overlapping pieces of work was under way.
#[derive(Debug, Default)]
pub struct Busy {
    /// Pieces under way, and since when there has been one.
    running: Mutex<(usize, Option<Instant>)>,
    total: Counter,
}

impl Busy {
    /// A piece of work begins; it ends when what is returned is dropped.
    #[must_use]
    pub fn begin(&self) -> impl Drop {
        self.begin_at(Instant::now());
        During(self)
    }

    /// Nanoseconds so far, those of what is under way included.
    #[must_use]
    pub fn get(&self) -> u64 {
        self.get_at(Instant::now())
    }

    fn get_at(&self, now: Instant) -> u64 {
        let running = self.lock();
        let since = running.1.map_or(0, |since| nanoseconds(now.saturating_duration_since(since)));
        self.total.get() + since
    }

    fn lock(&self) -> MutexGuard<'_, (usize, Option<Instant>)> {
        // Nothing panics while it is held.
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin_at(&self, now: Instant) {
        let mut running = self.lock();
        running.0 += 1;
        running.1.get_or_insert(now);
    }

    fn end_at(&self, now: Instant) {
        let mut running = self.lock();
        running.0 = running.0.saturating_sub(1);
        if running.0 == 0
            && let Some(since) = running.1.take()
        {
            self.total.add_time(now.saturating_duration_since(since));
        }
    }
}

struct During<'a>(&'a Busy);

impl Drop for During<'_> {
    fn drop(&mut self) {
        self.0.end_at(Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn overlapping_work_counts_once() {
        let (busy, start) = (Busy::default(), Instant::now());
        let at = |ns| start + Duration::from_nanos(ns);
        busy.begin_at(at(10));
        busy.begin_at(at(15));
        busy.end_at(at(20));
        assert_eq!(busy.get_at(at(22)), 12);
        busy.end_at(at(40));
        assert_eq!(busy.get_at(at(50)), 30);
        busy.begin_at(at(100));
        busy.end_at(at(105));
        assert_eq!(busy.get_at(at(200)), 35);
    }
}
