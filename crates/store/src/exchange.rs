//! The queue between the owner and the readers: work one way, results the other.
//!
//! One mutex over two lists, held to push and pop and never across I/O. Readers sleep when there is no work;
//! the owner spins for a moment, then sleeps, when nothing has arrived. Every piece of work that was submitted
//! is either cancelled by the owner or finished by exactly one reader, so the owner's count of what is in
//! flight is exact, and it never waits for what cannot come.
//!
//! Speculative reads, when they come, are a second FIFO in [`State`]: [`State::pop`] is the one place that
//! chooses, demand first.

use crate::sync::{AtomicUsize, Condvar, Mutex, Ordering, lock, wait};
use std::collections::VecDeque;

/// Turns of the owner's spin before it sleeps: a few microseconds. A result that is that close is not worth
/// two context switches; a disk read is far longer and not worth a burning core.
const SPINS: usize = if cfg!(loom) { 0 } else { 128 };

pub(crate) struct Exchange<W, D> {
    state: Mutex<State<W, D>>,
    /// Signalled when there is work, or no more to come.
    work: Condvar,
    /// Signalled when something was finished.
    finished: Condvar,
    /// Length of `State::done`, for the spin. Written under the lock.
    n_done: AtomicUsize,
}

struct State<W, D> {
    demand: VecDeque<W>,
    done: Vec<D>,
    idle_readers: usize,
    owner_waits: bool,
    closed: bool,
}

impl<W, D> State<W, D> {
    fn pop(&mut self) -> Option<W> {
        self.demand.pop_front()
    }
}

impl<W, D> Exchange<W, D> {
    /// An exchange that does not allocate while at most `capacity` pieces are under way.
    pub(crate) fn new(capacity: usize) -> Self {
        Self {
            state: Mutex::new(State {
                demand: VecDeque::with_capacity(capacity),
                done: Vec::with_capacity(capacity),
                idle_readers: 0,
                owner_waits: false,
                closed: false,
            }),
            work: Condvar::new(),
            finished: Condvar::new(),
            n_done: AtomicUsize::new(0),
        }
    }

    /// Queues all of `works`, in order (owner).
    pub(crate) fn submit(&self, works: &mut Vec<W>) {
        let wake = {
            let mut state = lock(&self.state);
            let wake = works.len().min(state.idle_readers);
            state.demand.extend(works.drain(..));
            wake
        };
        for _ in 0..wake {
            self.work.notify_one();
        }
    }

    /// Takes back what no reader has begun (owner).
    pub(crate) fn cancel(&self, into: &mut Vec<W>) {
        into.extend(lock(&self.state).demand.drain(..));
    }

    /// Appends what has been finished, without waiting (owner).
    pub(crate) fn collect(&self, into: &mut Vec<D>) {
        if self.n_done.load(Ordering::Acquire) > 0 {
            self.hand_over(&mut lock(&self.state), into);
        }
    }

    /// Appends what has been finished, at least one piece (owner). Something must be in flight.
    pub(crate) fn wait(&self, into: &mut Vec<D>) {
        for _ in 0..SPINS {
            if self.n_done.load(Ordering::Acquire) > 0 {
                break;
            }
            std::hint::spin_loop();
        }
        let mut state = lock(&self.state);
        while state.done.is_empty() {
            state.owner_waits = true;
            state = wait(&self.finished, state);
        }
        state.owner_waits = false;
        self.hand_over(&mut state, into);
    }

    fn hand_over(&self, state: &mut State<W, D>, into: &mut Vec<D>) {
        into.append(&mut state.done);
        self.n_done.store(0, Ordering::Relaxed);
    }

    /// The next piece of work; sleeps until there is one, none once closed (reader).
    pub(crate) fn take_work(&self) -> Option<W> {
        let mut state = lock(&self.state);
        loop {
            if state.closed {
                return None;
            }
            if let Some(work) = state.pop() {
                return Some(work);
            }
            state.idle_readers += 1;
            state = wait(&self.work, state);
            state.idle_readers -= 1;
        }
    }

    /// Reports a piece of work (reader).
    pub(crate) fn finish(&self, done: D) {
        let wake = {
            let mut state = lock(&self.state);
            state.done.push(done);
            self.n_done.store(state.done.len(), Ordering::Release);
            state.owner_waits
        };
        if wake {
            self.finished.notify_one();
        }
    }

    /// Drops what is queued and lets the readers go (owner).
    pub(crate) fn close(&self) {
        let queued = {
            let mut state = lock(&self.state);
            state.closed = true;
            std::mem::take(&mut state.demand)
        };
        drop(queued);
        self.work.notify_all();
    }
}

/// Run with `RUSTFLAGS="--cfg loom" cargo test -p smoe-store --release --lib loom`.
#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;

    type Numbers = Exchange<u32, u32>;

    fn reader(exchange: &Arc<Numbers>) -> thread::JoinHandle<()> {
        let exchange = exchange.clone();
        thread::spawn(move || {
            while let Some(work) = exchange.take_work() {
                exchange.finish(work * 10);
            }
        })
    }

    #[test]
    fn loom_every_piece_is_finished_once() {
        loom::model(|| {
            let exchange = Arc::new(Numbers::new(2));
            let reader = reader(&exchange);
            exchange.submit(&mut vec![1, 2]);
            let mut done = Vec::new();
            while done.len() < 2 {
                exchange.wait(&mut done);
            }
            assert_eq!(done, [10, 20]);
            exchange.close();
            reader.join().unwrap();
        });
    }

    #[test]
    fn loom_two_readers_share_the_work() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let exchange = Arc::new(Numbers::new(2));
            let readers = [reader(&exchange), reader(&exchange)];
            exchange.submit(&mut vec![1]);
            exchange.submit(&mut vec![2]);
            let mut done = Vec::new();
            while done.len() < 2 {
                exchange.wait(&mut done);
            }
            done.sort_unstable();
            assert_eq!(done, [10, 20]);
            exchange.close();
            for reader in readers {
                reader.join().unwrap();
            }
        });
    }

    #[test]
    fn loom_cancelled_or_finished_but_not_both() {
        loom::model(|| {
            let exchange = Arc::new(Numbers::new(2));
            let reader = reader(&exchange);
            exchange.submit(&mut vec![1, 2]);
            let mut cancelled = Vec::new();
            exchange.cancel(&mut cancelled);
            let mut seen: Vec<u32> = cancelled.iter().map(|work| work * 10).collect();
            while seen.len() < 2 {
                exchange.wait(&mut seen);
            }
            seen.sort_unstable();
            assert_eq!(seen, [10, 20]);
            exchange.collect(&mut seen);
            assert_eq!(seen.len(), 2);
            exchange.close();
            reader.join().unwrap();
        });
    }

    #[test]
    fn loom_closing_wakes_sleepers() {
        loom::model(|| {
            let exchange = Arc::new(Numbers::new(1));
            let reader = reader(&exchange);
            exchange.close();
            reader.join().unwrap();
        });
    }
}
