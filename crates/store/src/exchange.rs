//! The queues between the owner and the readers: work one way, results the other.
//!
//! One mutex over the lists, held to push and pop and never across I/O. Readers sleep when there is no work;
//! the owner spins for a moment, then sleeps, when nothing has arrived. Every piece of work that was submitted
//! is either cancelled by the owner or finished by exactly one reader, so the owner's count of what is in
//! flight is exact, and it never waits for what cannot come.
//!
//! There are two lanes. Readers take demanded work first; of the other, at most `low_running` pieces are under
//! way at once, so that new demand finds a free reader. A reader that ends one looks for more itself, so that no
//! one need be woken for it.

use crate::sync::{AtomicUsize, Condvar, Mutex, Ordering, lock, wait, wait_until};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Turns of the owner's spin before it sleeps: a few microseconds. A result that is that close is not worth
/// two context switches; a disk read is far longer and not worth a burning core.
const SPINS: usize = if cfg!(loom) { 0 } else { 128 };

/// The most that the owner gives way to readers that it woke for demanded work. Where it computes on all cores, a
/// reader would get one only after a good part of what the owner has to compute, and the disk would idle: EXP-STORE-15.
const GIVE_WAY: Duration = Duration::from_micros(200);

/// Which queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lane {
    /// Somebody waits for it.
    Demand,
    /// Nobody does yet.
    Low,
}

/// An entry of a queue.
#[derive(Debug)]
pub(crate) struct Piece<W> {
    pub(crate) work: W,
    /// To be done together with the one before it, by the same reader.
    pub(crate) joined: bool,
}

pub(crate) struct Exchange<W, D> {
    state: Mutex<State<W, D>>,
    /// Signalled when there is work, or no more to come.
    work: Condvar,
    /// Signalled when something was finished.
    finished: Condvar,
    /// Signalled when as many pieces have been begun as the owner gives way for.
    begun: Condvar,
    /// Length of `State::done`, for the spin. Written under the lock.
    n_done: AtomicUsize,
    /// Most readers at low-priority work.
    low_running: usize,
}

struct State<W, D> {
    demand: VecDeque<Piece<W>>,
    low: VecDeque<Piece<W>>,
    /// Readers at low-priority work.
    at_low: usize,
    done: Vec<D>,
    idle_readers: usize,
    /// Pieces that the owner gives way for until they are begun.
    to_begin: usize,
    owner_waits: bool,
    closed: bool,
}

impl<W, D> State<W, D> {
    fn queue(&mut self, lane: Lane) -> &mut VecDeque<Piece<W>> {
        match lane {
            Lane::Demand => &mut self.demand,
            Lane::Low => &mut self.low,
        }
    }

    /// Appends the next piece and what is joined to it; the one place that chooses a lane.
    fn pop(&mut self, low_running: usize, into: &mut Vec<W>) -> Option<Lane> {
        let lane = if !self.demand.is_empty() {
            Lane::Demand
        } else if !self.low.is_empty() && self.at_low < low_running {
            self.at_low += 1;
            Lane::Low
        } else {
            return None;
        };
        let queue = self.queue(lane);
        into.extend(queue.pop_front().map(|piece| piece.work));
        while let Some(piece) = queue.pop_front_if(|piece| piece.joined) {
            into.push(piece.work);
        }
        Some(lane)
    }
}

impl<W, D> Exchange<W, D> {
    /// An exchange that does not allocate while at most `capacity` pieces are under way, with at most
    /// `low_running` readers, at least 1, at low-priority work.
    pub(crate) fn new(capacity: usize, low_running: usize) -> Self {
        Self {
            state: Mutex::new(State {
                demand: VecDeque::with_capacity(capacity),
                low: VecDeque::with_capacity(capacity),
                at_low: 0,
                done: Vec::with_capacity(capacity),
                idle_readers: 0,
                to_begin: 0,
                owner_waits: false,
                closed: false,
            }),
            work: Condvar::new(),
            finished: Condvar::new(),
            n_done: AtomicUsize::new(0),
            begun: Condvar::new(),
            low_running,
        }
    }

    /// Queues all of `pieces`, in order, and sees to it that demanded ones are soon begun (owner).
    pub(crate) fn submit(&self, lane: Lane, pieces: &mut Vec<Piece<W>>) {
        let woken = self.queue(lane, pieces);
        if lane == Lane::Demand && woken > 0 {
            self.give_way();
        }
    }

    /// Queues `pieces`, and wakes as many readers as they need; says how many.
    fn queue(&self, lane: Lane, pieces: &mut Vec<Piece<W>>) -> usize {
        let wake = {
            let mut state = lock(&self.state);
            let most = match lane {
                Lane::Demand => state.idle_readers,
                Lane::Low => state.idle_readers.min(self.low_running.saturating_sub(state.at_low)),
            };
            let wake = pieces.iter().filter(|piece| !piece.joined).count().min(most);
            state.queue(lane).extend(pieces.drain(..));
            if lane == Lane::Demand {
                state.to_begin = wake;
            }
            wake
        };
        for _ in 0..wake {
            self.work.notify_one();
        }
        wake
    }

    /// Sleeps until the readers that were woken have begun, so that they have this core if they need it; not for long.
    fn give_way(&self) {
        let deadline = Instant::now() + GIVE_WAY;
        let mut state = lock(&self.state);
        while state.to_begin > 0 {
            // A model has no clock: there, who does not wait calls `queue`.
            state = if cfg!(loom) {
                wait(&self.begun, state)
            } else {
                let Some(again) = wait_until(&self.begun, state, deadline) else { return };
                again
            };
        }
    }

    /// Takes back what no reader has begun (owner).
    pub(crate) fn cancel(&self, lane: Lane, into: &mut Vec<Piece<W>>) {
        into.extend(lock(&self.state).queue(lane).drain(..));
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

    /// Appends the next piece of work with all that is joined to it, and says whose it is; sleeps until there is
    /// one, none once closed (reader). `ended` is the lane of the work that this reader has just ended, if any.
    pub(crate) fn take_work(&self, ended: Option<Lane>, into: &mut Vec<W>) -> Option<Lane> {
        let mut state = lock(&self.state);
        if ended == Some(Lane::Low) {
            state.at_low -= 1;
        }
        loop {
            if state.closed {
                return None;
            }
            if let Some(lane) = state.pop(self.low_running, into) {
                if lane == Lane::Demand && state.to_begin > 0 {
                    state.to_begin -= 1;
                    if state.to_begin == 0 {
                        self.begun.notify_one();
                    }
                }
                return Some(lane);
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
            (std::mem::take(&mut state.demand), std::mem::take(&mut state.low))
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
    use loom::sync::atomic::AtomicUsize;
    use loom::thread;

    type Numbers = Exchange<u32, u32>;

    fn pieces<const N: usize>(works: [u32; N]) -> Vec<Piece<u32>> {
        works.into_iter().map(|work| Piece { work, joined: false }).collect()
    }

    fn reader(exchange: &Arc<Numbers>) -> thread::JoinHandle<()> {
        reader_that(exchange, |_| (), |_| ())
    }

    fn reader_that(
        exchange: &Arc<Numbers>,
        begins: impl Fn(Lane) + 'static,
        ends: impl Fn(Lane) + 'static,
    ) -> thread::JoinHandle<()> {
        let exchange = exchange.clone();
        thread::spawn(move || {
            let (mut lane, mut works) = (None, Vec::new());
            loop {
                lane = exchange.take_work(lane, &mut works);
                let Some(lane) = lane else { return };
                begins(lane);
                for work in works.drain(..) {
                    exchange.finish(work * 10);
                }
                ends(lane);
            }
        })
    }

    fn wait_for(exchange: &Numbers, count: usize) -> Vec<u32> {
        let mut done = Vec::new();
        while done.len() < count {
            exchange.wait(&mut done);
        }
        done
    }

    /// Preemptions that the larger models are bounded to, so that they end.
    fn bounded(preemptions: usize) -> loom::model::Builder {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(preemptions);
        model
    }

    #[test]
    fn loom_every_piece_is_finished_once() {
        loom::model(|| {
            let exchange = Arc::new(Numbers::new(2, 1));
            let reader = reader(&exchange);
            exchange.submit(Lane::Demand, &mut pieces([1, 2]));
            assert_eq!(wait_for(&exchange, 2), [10, 20]);
            exchange.close();
            reader.join().unwrap();
        });
    }

    #[test]
    fn loom_two_readers_share_the_work() {
        bounded(3).check(|| {
            let exchange = Arc::new(Numbers::new(2, 1));
            let readers = [reader(&exchange), reader(&exchange)];
            exchange.submit(Lane::Demand, &mut pieces([1]));
            exchange.submit(Lane::Demand, &mut pieces([2]));
            let mut done = wait_for(&exchange, 2);
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
        for (lane, waits) in [(Lane::Demand, true), (Lane::Demand, false), (Lane::Low, false)] {
            loom::model(move || {
                let exchange = Arc::new(Numbers::new(2, 1));
                let reader = reader(&exchange);
                if waits {
                    exchange.submit(lane, &mut pieces([1, 2]));
                } else {
                    exchange.queue(lane, &mut pieces([1, 2]));
                }
                let mut cancelled = Vec::new();
                exchange.cancel(lane, &mut cancelled);
                let mut seen: Vec<u32> = cancelled.iter().map(|piece| piece.work * 10).collect();
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
    }

    #[test]
    fn loom_joined_pieces_stay_together() {
        bounded(3).check(|| {
            let exchange = Arc::new(Numbers::new(3, 1));
            let readers = [reader(&exchange), reader(&exchange)];
            let mut work = pieces([1, 2, 3]);
            work[1].joined = true;
            exchange.submit(Lane::Demand, &mut work);
            let done = wait_for(&exchange, 3);
            let place = |number| done.iter().position(|&n| n == number).unwrap();
            assert!(place(10) < place(20), "one reader's, in order: {done:?}");
            assert!(done.contains(&30));
            exchange.close();
            for reader in readers {
                reader.join().unwrap();
            }
        });
    }

    /// Low-priority work is bounded, and none of it is left lying while a reader sleeps: the owner waits for all.
    #[test]
    fn loom_low_work_is_bounded_and_not_forgotten() {
        bounded(2).check(|| {
            let exchange = Arc::new(Numbers::new(3, 1));
            let at_low = Arc::new(AtomicUsize::new(0));
            let counting_reader = || {
                let (begun, ended) = (at_low.clone(), at_low.clone());
                let begins = move |lane| {
                    if lane == Lane::Low {
                        assert_eq!(begun.fetch_add(1, Ordering::Relaxed), 0, "two readers at low priority");
                    }
                };
                let ends = move |lane| {
                    if lane == Lane::Low {
                        ended.fetch_sub(1, Ordering::Relaxed);
                    }
                };
                reader_that(&exchange, begins, ends)
            };
            let readers = [counting_reader(), counting_reader()];
            exchange.submit(Lane::Low, &mut pieces([1, 2]));
            exchange.submit(Lane::Demand, &mut pieces([3]));
            let mut done = wait_for(&exchange, 3);
            done.sort_unstable();
            assert_eq!(done, [10, 20, 30]);
            exchange.close();
            for reader in readers {
                reader.join().unwrap();
            }
        });
    }

    #[test]
    fn loom_demand_goes_first() {
        loom::model(|| {
            let exchange = Arc::new(Numbers::new(2, 1));
            exchange.submit(Lane::Low, &mut pieces([1]));
            exchange.submit(Lane::Demand, &mut pieces([2]));
            let reader = reader(&exchange);
            assert_eq!(wait_for(&exchange, 2), [20, 10]);
            exchange.close();
            reader.join().unwrap();
        });
    }

    #[test]
    fn loom_closing_wakes_sleepers() {
        loom::model(|| {
            let exchange = Arc::new(Numbers::new(1, 1));
            let reader = reader(&exchange);
            exchange.close();
            reader.join().unwrap();
        });
    }
}
