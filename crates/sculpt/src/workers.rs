//! Threads that take numbered pieces of work from one counter.

use std::num::NonZero;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use crate::error::SculptError;

/// Bytes that all workers' buffers may have together: half of the promised 2 GiB, for headers and the
/// allocator want some too.
const BUFFERS: usize = 1 << 30;

/// True once the caller wants to stop.
pub(crate) fn stopped(stop: &AtomicBool) -> bool {
    stop.load(Ordering::Relaxed)
}

/// How many workers to start, if each needs `bytes` of buffers.
pub(crate) fn count(threads: Option<usize>, bytes: usize) -> usize {
    let cores = thread::available_parallelism().map_or(1, NonZero::get);
    threads.unwrap_or(cores).min(BUFFERS / bytes.max(1)).max(1)
}

/// Calls `work` for every number below `count`, in ascending order of starting, each worker with a state of
/// its own. Stops early at the first error, or when the caller wants to stop: then the answer is false.
pub(crate) fn for_each<S: Default>(
    workers: usize,
    count: usize,
    stop: &AtomicBool,
    work: impl Fn(usize, &mut S) -> Result<(), SculptError> + Sync,
) -> Result<bool, SculptError> {
    let next = AtomicUsize::new(0);
    let done = AtomicUsize::new(0);
    let failure = Mutex::new(None);
    let failed = AtomicBool::new(false);
    let work_on = || {
        let mut state = S::default();
        while !stopped(stop) && !stopped(&failed) {
            let i = next.fetch_add(1, Ordering::Relaxed);
            if i >= count {
                break;
            }
            match work(i, &mut state) {
                Ok(()) => {
                    done.fetch_add(1, Ordering::Relaxed);
                }
                Err(e) => {
                    failed.store(true, Ordering::Relaxed);
                    failure.lock().expect("no worker panics").get_or_insert(e);
                }
            }
        }
    };
    thread::scope(|scope| {
        for _ in 1..workers.min(count) {
            scope.spawn(work_on);
        }
        work_on();
    });
    match failure.into_inner().expect("no worker panics") {
        Some(e) => Err(e),
        None => Ok(done.into_inner() == count),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_is_worked_on_once_and_errors_end_the_work() {
        let seen: Vec<AtomicUsize> = (0..100).map(|_| AtomicUsize::new(0)).collect();
        let stop = AtomicBool::new(false);
        let all = for_each(3, 100, &stop, |i, _: &mut ()| {
            seen[i].fetch_add(1, Ordering::Relaxed);
            Ok(())
        });
        assert!(all.expect("no error"));
        assert!(seen.iter().all(|n| n.load(Ordering::Relaxed) == 1));

        let failing =
            for_each(3, 100, &stop, |i, _: &mut ()| if i == 7 { Err(SculptError::Stopped) } else { Ok(()) });
        assert!(matches!(failing, Err(SculptError::Stopped)));

        let stopping = for_each(2, 100, &stop, |i, _: &mut ()| {
            stop.store(i >= 5, Ordering::Relaxed);
            Ok(())
        });
        assert!(!stopping.expect("no error"));
    }

    #[test]
    fn buffers_bound_the_workers() {
        assert_eq!(count(Some(8), 1 << 20), 8);
        assert_eq!(count(Some(8), 1 << 29), 2);
        assert_eq!(count(Some(8), usize::MAX), 1);
        assert!(count(None, 1) >= 1);
    }
}
