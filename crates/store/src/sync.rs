//! The one door to threads' primitives, so that loom can take their place under `--cfg loom`.

#[cfg(loom)]
pub(crate) use loom::sync::{
    Condvar, Mutex, MutexGuard,
    atomic::{AtomicU32, AtomicUsize, Ordering},
};
use std::sync::PoisonError;
#[cfg(not(loom))]
pub(crate) use std::sync::{
    Condvar, Mutex, MutexGuard,
    atomic::{AtomicU32, AtomicUsize, Ordering},
};
use std::time::{Duration, Instant};

/// Locks. Poison is ignored: nothing in this crate panics between two halves of a change under a lock.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits on `condvar`; spurious wake-ups are the caller's to handle.
pub(crate) fn wait<'a, T>(condvar: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    condvar.wait(guard).unwrap_or_else(PoisonError::into_inner)
}

/// Waits on `condvar`, at most until `deadline`; none once that has passed.
pub(crate) fn wait_until<'a, T>(
    condvar: &Condvar,
    guard: MutexGuard<'a, T>,
    deadline: Instant,
) -> Option<MutexGuard<'a, T>> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left == Duration::ZERO {
        return None;
    }
    Some(condvar.wait_timeout(guard, left).unwrap_or_else(PoisonError::into_inner).0)
}
