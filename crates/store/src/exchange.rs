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
//!
//! What is decoded comes back: who has read it hands it in, and reads on if there is something to read, so that the
//! disk does not wait for decoders; it is decoded in parts, by whoever is free. Few such reads are under way at once:
//! those that are land together, and what lands last is decoded while the disk idles (EXP-STORE-17). Each has a
//! buffer, and there are no more than were given.

use crate::sync::{AtomicUsize, Condvar, Mutex, Ordering, lock, wait, wait_until};
use std::collections::VecDeque;
use std::mem::take;
use std::time::{Duration, Instant};

/// Turns of the owner's spin before it sleeps: a few microseconds. A result that is that close is not worth
/// two context switches; a disk read is far longer and not worth a burning core.
const SPINS: usize = if cfg!(loom) { 0 } else { 128 };

/// The most that the owner gives way to readers that it woke for demanded work. Where it computes on all cores, a
/// reader would get one only after a good part of what the owner has to compute, and the disk would idle: EXP-STORE-15.
const GIVE_WAY: Duration = Duration::from_micros(200);

/// Of very many demanded reads that are decoded one in so many is under way, so that a drive has its depth.
const MANY: usize = 4;

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

/// What a reader is to do.
#[derive(Debug)]
pub(crate) enum Task<B> {
    /// To read the pieces that it was given, if they are decoded into this buffer.
    Read(Lane, B),
    /// To decode a part of what lies in the buffer.
    Decode(B, usize),
}

/// A piece that was read and is to be decoded.
#[derive(Debug)]
struct Landed<B> {
    lane: Lane,
    buffer: B,
    /// The part to decode next, and how many there are.
    next: usize,
    parts: usize,
}

/// What a reader has ended.
#[derive(Debug)]
pub(crate) enum Ended<B> {
    /// A read, all of whose pieces are finished.
    Read(Lane, B),
    /// A read of a piece that is to be decoded in so many parts, at least one.
    Landed(Lane, B, usize),
    /// A part; the buffer if it was the last of its piece to end.
    Decoded(Option<B>),
}

/// What bounds the readers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    /// Most of them at low-priority reads, at least 1.
    pub(crate) low_running: usize,
    /// If what they read is decoded.
    pub(crate) decoding: Option<Decoding>,
}

/// What bounds readers that decode.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Decoding {
    /// Most demanded reads at once, at least 1, as long as they are few.
    pub(crate) reads: usize,
    /// Most readers decoding, at least 1.
    pub(crate) decoders: usize,
}

pub(crate) struct Exchange<W, B, D> {
    state: Mutex<State<W, B, D>>,
    /// Signalled when there is work, or no more to come.
    work: Condvar,
    /// Signalled when something was finished.
    finished: Condvar,
    /// Signalled when as many pieces have been begun as the owner gives way for.
    begun: Condvar,
    /// Length of `State::done`, for the spin. Written under the lock.
    n_done: AtomicUsize,
    bounds: Bounds,
}

struct State<W, B, D> {
    demand: VecDeque<Piece<W>>,
    low: VecDeque<Piece<W>>,
    landed: VecDeque<Landed<B>>,
    /// Buffers that are free, of so many.
    spare: Vec<B>,
    buffers: usize,
    /// Readers at demanded reads; at reads of low priority; decoding.
    at_demand: usize,
    at_low: usize,
    decoding: usize,
    done: Vec<D>,
    idle_readers: usize,
    /// Pieces that the owner gives way for until they are begun.
    to_begin: usize,
    owner_waits: bool,
    closed: bool,
}

impl<W, B: Clone, D> State<W, B, D> {
    fn queue(&mut self, lane: Lane) -> &mut VecDeque<Piece<W>> {
        match lane {
            Lane::Demand => &mut self.demand,
            Lane::Low => &mut self.low,
        }
    }

    /// Demanded reads that may begin.
    fn startable(&self, bounds: &Bounds) -> usize {
        let wanted = self.demand.len() + self.at_demand;
        let most = bounds.decoding.map_or(usize::MAX, |most| most.reads.max(wanted / MANY));
        most.saturating_sub(self.at_demand).min(self.demand.len()).min(self.spare.len())
    }

    fn may_decode(&self, bounds: &Bounds) -> bool {
        !self.landed.is_empty() && bounds.decoding.is_some_and(|most| self.decoding < most.decoders)
    }

    fn may_read_low(&self, bounds: &Bounds) -> bool {
        // What is demanded and kept back comes before it.
        let is_free = self.demand.is_empty() && !self.spare.is_empty();
        // What is read in advance keeps its buffer until it is decoded: demand that comes meanwhile needs others.
        let held = self.buffers - self.spare.len();
        let leaves_some = bounds.decoding.is_none() || held < bounds.low_running;
        is_free && leaves_some && !self.low.is_empty() && self.at_low < bounds.low_running
    }

    /// Chooses what to do, and appends what is to be read, a piece and what is joined to it.
    fn pop(&mut self, bounds: &Bounds, into: &mut Vec<W>) -> Option<Task<B>> {
        let lane = if self.startable(bounds) > 0 {
            self.at_demand += 1;
            self.to_begin = self.to_begin.saturating_sub(1);
            Lane::Demand
        } else if self.may_decode(bounds) {
            let first = self.landed.iter().position(|landed| landed.lane == Lane::Demand).unwrap_or(0);
            let landed = self.landed.get_mut(first)?;
            let task = Task::Decode(landed.buffer.clone(), landed.next);
            landed.next += 1;
            if landed.next == landed.parts {
                self.landed.remove(first);
            }
            self.decoding += 1;
            return Some(task);
        } else if self.may_read_low(bounds) {
            self.at_low += 1;
            Lane::Low
        } else {
            return None;
        };
        let buffer = self.spare.pop()?;
        let queue = self.queue(lane);
        into.extend(queue.pop_front().map(|piece| piece.work));
        while let Some(piece) = queue.pop_front_if(|piece| piece.joined) {
            into.push(piece.work);
        }
        Some(Task::Read(lane, buffer))
    }

    fn end(&mut self, ended: Ended<B>) {
        let lane = match ended {
            Ended::Decoded(buffer) => {
                self.decoding -= 1;
                self.spare.extend(buffer);
                return;
            }
            Ended::Read(lane, buffer) => {
                self.spare.push(buffer);
                lane
            }
            Ended::Landed(lane, buffer, parts) => {
                self.landed.push_back(Landed { lane, buffer, next: 0, parts });
                lane
            }
        };
        match lane {
            Lane::Demand => self.at_demand -= 1,
            Lane::Low => self.at_low -= 1,
        }
    }
}

impl<W, B: Clone, D> Exchange<W, B, D> {
    /// An exchange that does not allocate while at most `capacity` pieces are under way; with a buffer for every
    /// reader at least.
    pub(crate) fn new(capacity: usize, buffers: Vec<B>, bounds: Bounds) -> Self {
        Self {
            state: Mutex::new(State {
                demand: VecDeque::with_capacity(capacity),
                low: VecDeque::with_capacity(capacity),
                landed: VecDeque::with_capacity(buffers.len()),
                buffers: buffers.len(),
                // The first is taken last, so that it is the first to be used: what is used is warm.
                spare: buffers.into_iter().rev().collect(),
                at_demand: 0,
                at_low: 0,
                decoding: 0,
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
            bounds,
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
            let wanted = pieces.iter().filter(|piece| !piece.joined).count();
            state.queue(lane).extend(pieces.drain(..));
            let most = match lane {
                // Nothing is joined where something is decoded.
                Lane::Demand if self.bounds.decoding.is_some() => state.startable(&self.bounds),
                Lane::Demand => wanted,
                Lane::Low => self.bounds.low_running.saturating_sub(state.at_low),
            };
            let wake = wanted.min(most).min(state.idle_readers);
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

    fn hand_over(&self, state: &mut State<W, B, D>, into: &mut Vec<D>) {
        into.append(&mut state.done);
        self.n_done.store(0, Ordering::Relaxed);
    }

    /// Says what to do next, and appends the pieces if it is to read; sleeps until there is something, none once
    /// closed (reader). `ended` is what this reader has just ended, if anything.
    pub(crate) fn take_work(&self, ended: Option<Ended<B>>, into: &mut Vec<W>) -> Option<Task<B>> {
        let mut state = lock(&self.state);
        let mut may_be_more = ended.is_some() && self.bounds.decoding.is_some();
        if let Some(ended) = ended {
            state.end(ended);
        }
        loop {
            if state.closed {
                return None;
            }
            let gave_way = state.to_begin;
            if let Some(task) = state.pop(&self.bounds, into) {
                if gave_way > 0 && state.to_begin == 0 {
                    self.begun.notify_one();
                }
                let is_more = state.startable(&self.bounds) > 0
                    || state.may_decode(&self.bounds)
                    || state.may_read_low(&self.bounds);
                if may_be_more && is_more && state.idle_readers > 0 {
                    self.work.notify_one();
                }
                return Some(task);
            }
            state.idle_readers += 1;
            state = wait(&self.work, state);
            state.idle_readers -= 1;
            // Who was woken for one thing may find two.
            may_be_more = self.bounds.decoding.is_some();
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
            (take(&mut state.demand), take(&mut state.low), take(&mut state.landed))
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

    type Numbers = Exchange<u32, Buffer, u32>;

    /// The piece that is in it, and the parts that have not been ended.
    type Buffer = Arc<(AtomicUsize, AtomicUsize)>;
    const PARTS: usize = 2;

    fn buffers(count: usize) -> Vec<Buffer> {
        (0..count).map(|_| Arc::new((AtomicUsize::new(0), AtomicUsize::new(0)))).collect()
    }

    fn numbers(capacity: usize) -> Numbers {
        Numbers::new(capacity, buffers(2), Bounds { low_running: 1, decoding: None })
    }

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
            let (mut ended, mut works) = (None, Vec::new());
            while let Some(task) = exchange.take_work(ended, &mut works) {
                ended = Some(match task {
                    Task::Read(lane, buffer) if exchange.bounds.decoding.is_none() => {
                        begins(lane);
                        for work in works.drain(..) {
                            exchange.finish(work * 10);
                        }
                        ends(lane);
                        Ended::Read(lane, buffer)
                    }
                    Task::Read(lane, buffer) => {
                        let work = works.pop().unwrap();
                        assert!(works.is_empty());
                        begins(lane);
                        ends(lane);
                        assert_eq!(buffer.1.load(Ordering::Relaxed), 0, "a buffer that is in use");
                        buffer.0.store(work as usize, Ordering::Relaxed);
                        buffer.1.store(PARTS, Ordering::Relaxed);
                        Ended::Landed(lane, buffer, PARTS)
                    }
                    Task::Decode(buffer, part) => {
                        assert!(part < PARTS);
                        let work = buffer.0.load(Ordering::Relaxed);
                        let is_last = buffer.1.fetch_sub(1, Ordering::AcqRel) == 1;
                        if is_last {
                            exchange.finish(work as u32 * 10);
                        }
                        Ended::Decoded(is_last.then_some(buffer))
                    }
                });
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
            let exchange = Arc::new(numbers(2));
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
            let exchange = Arc::new(numbers(2));
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
                let exchange = Arc::new(numbers(2));
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
            let exchange = Arc::new(numbers(3));
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
            let exchange = Arc::new(numbers(3));
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
            let exchange = Arc::new(numbers(2));
            exchange.submit(Lane::Low, &mut pieces([1]));
            exchange.submit(Lane::Demand, &mut pieces([2]));
            let reader = reader(&exchange);
            assert_eq!(wait_for(&exchange, 2), [20, 10]);
            exchange.close();
            reader.join().unwrap();
        });
    }

    fn decoded(capacity: usize, n_buffers: usize) -> Numbers {
        Numbers::new(
            capacity,
            buffers(n_buffers),
            Bounds { low_running: 1, decoding: Some(Decoding { reads: 1, decoders: 1 }) },
        )
    }

    /// One read at a time, fewer buffers than pieces, and one reader that decodes: all end all the same.
    #[test]
    fn loom_what_has_landed_is_decoded_by_somebody() {
        bounded(2).check(|| {
            let exchange = Arc::new(decoded(3, 2));
            let readers = [reader(&exchange), reader(&exchange)];
            exchange.queue(Lane::Demand, &mut pieces([1, 2, 3]));
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
    fn loom_low_work_is_decoded_beside_demand() {
        bounded(2).check(|| {
            let exchange = Arc::new(decoded(3, 2));
            let readers = [reader(&exchange), reader(&exchange)];
            exchange.queue(Lane::Low, &mut pieces([1, 2]));
            exchange.queue(Lane::Demand, &mut pieces([3]));
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
    fn loom_closing_between_reading_and_decoding_ends() {
        bounded(2).check(|| {
            let exchange = Arc::new(decoded(2, 1));
            let readers = [reader(&exchange), reader(&exchange)];
            exchange.queue(Lane::Demand, &mut pieces([1, 2]));
            exchange.close();
            for reader in readers {
                reader.join().unwrap();
            }
        });
    }

    #[test]
    fn loom_closing_wakes_sleepers() {
        loom::model(|| {
            let exchange = Arc::new(numbers(1));
            let reader = reader(&exchange);
            exchange.close();
            reader.join().unwrap();
        });
    }
}
