//! A fork-join pool for the token loop: no allocation per fork, no lock on the fast path, idle threads sleep.
//!
//! One word, `unclaimed`, says how many tasks of the current job nobody has taken. A thread takes one by
//! decreasing it from a positive value; only that success entitles it to read the job. The job lives on the
//! forking thread's stack, which leaves `run` only when every task taken has been finished. So a worker that
//! wakes late, even during another job, either claims a task of *that* job or touches nothing.
//!
//! Waiting threads spin for some tens of microseconds, the time between two forks of a layer, and then
//! sleep, so that an engine that waits for its disk costs no CPU.

// `loom` is a cfg of the model checker's runs only, unknown to Cargo.
#![allow(unexpected_cfgs)]

use std::any::Any;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use crate::output::Shared;
use sync::{
    Arc, AtomicBool, AtomicUsize, Condvar, JoinHandle, Mutex, MutexGuard, Ordering, UnsafeCell, fence,
};

/// Rounds of `spin_loop` before a thread sleeps: about 50 us where a pause takes 140 cycles.
#[cfg(not(all(loom, test)))]
const SPINS: u32 = 1 << 10;
#[cfg(all(loom, test))]
const SPINS: u32 = 0;

/// Pieces of each of a job's last tasks ([`Pool::run_pieces`]): unmeasured but for 1 and 4 (EXP-KERNEL-14).
#[cfg(not(all(loom, test)))]
const PIECES: usize = 4;
#[cfg(all(loom, test))]
const PIECES: usize = 2;

/// Which part of a task is to be done: one of the pieces of a job's last tasks, or the whole of any other.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    at: usize,
    of: usize,
}

impl Piece {
    const WHOLE: Self = Self { at: 0, of: 1 };

    /// The piece's share of a task's rows, in whole units from their start on; the end of them excepted. It may be empty.
    pub(crate) fn of_rows(self, rows: Range<usize>, unit: usize) -> Range<usize> {
        let each = rows.len().div_ceil(self.of).next_multiple_of(unit);
        let start = rows.end.min(rows.start + self.at * each);
        start..rows.end.min(start + each)
    }
}

type Task<'a> = &'a (dyn Fn(usize, Piece) + Sync);
type Payload = Box<dyn Any + Send>;

/// The current job. `None` before the first one.
#[derive(Clone, Copy)]
struct Job {
    /// Valid as long as a task of the job is taken but not finished; the lifetime is erased.
    task: Option<Task<'static>>,
    tasks: usize,
    /// Threads that take part: so many runs of neighbouring tasks are handed out side by side.
    runs: usize,
    /// Tasks that are handed out in pieces, the last ones.
    cut: usize,
}

impl Job {
    /// How often something of the job is taken.
    const fn claims(&self) -> usize {
        self.tasks + self.cut * (PIECES - 1)
    }

    /// What is taken as the `claim`-th: a task, or a piece of one of the last tasks.
    const fn at(&self, claim: usize) -> (usize, Piece) {
        let whole = self.tasks - self.cut;
        if claim < whole {
            (self.index(claim), Piece::WHOLE)
        } else {
            let piece = claim - whole;
            (self.index(whole + piece % self.cut), Piece { at: piece / self.cut, of: PIECES })
        }
    }

    /// The index of the task that is the `nth` to be taken.
    ///
    /// Threads that are equally fast take turns, so each stays in a run of neighbouring tasks: what it
    /// prefetches past the end of one is the beginning of its next (EXP-KERNEL-08).
    const fn index(&self, nth: usize) -> usize {
        let length = self.tasks / self.runs;
        if nth < length * self.runs { nth % self.runs * length + nth / self.runs } else { nth }
    }
}

struct State {
    /// Tasks that nobody has taken.
    unclaimed: AtomicUsize,
    /// Tasks not yet finished.
    unfinished: AtomicUsize,
    /// Written by the forking thread while `unclaimed` and `unfinished` are 0, read by who took a task.
    job: UnsafeCell<Job>,
    /// Some thread is in `run`.
    busy: AtomicBool,
    stop: AtomicBool,
    /// Threads in, or about to go into, `wake`.
    sleepers: AtomicUsize,
    lock: Mutex<()>,
    wake: Condvar,
    panic: Mutex<Option<Payload>>,
}

// SAFETY: `job` is the only field that is not Sync. It is written only by the holder of `busy` when no task is
// taken or to be taken, and read only after taking a task, which acquires what the writer released.
unsafe impl Sync for State {}
// SAFETY: as above; the task it may point to is Sync.
unsafe impl Send for State {}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing panics while a lock is held, and what they guard is whole at all times.
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

impl State {
    /// Takes a task or a piece of one: gives which, and the function, or `None` if there is none to take.
    fn claim(&self) -> Option<((usize, Piece), Task<'_>)> {
        let mut left = self.unclaimed.load(Ordering::Relaxed);
        loop {
            if left == 0 {
                return None;
            }
            match self.unclaimed.compare_exchange_weak(left, left - 1, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => {
                    // SAFETY: a task is taken, so the forking thread stays in `run` and does not write the
                    // job; its write happened before the release that the exchange acquired.
                    let job = self.job.with(|job| unsafe { *job });
                    return job.task.map(|task| (job.at(job.claims() - left), task));
                }
                Err(now) => left = now,
            }
        }
    }

    /// Takes and runs tasks until none is left to take.
    fn work(&self) {
        while let Some(((index, piece), task)) = self.claim() {
            if let Err(payload) = catch_unwind(AssertUnwindSafe(|| task(index, piece))) {
                keep_first(&mut lock(&self.panic), payload);
            }
            // The last access to the job. Releases what the task wrote.
            if self.unfinished.fetch_sub(1, Ordering::AcqRel) == 1 {
                self.wake_all();
            }
        }
    }

    /// Waits until `ready` holds: spins, then sleeps. What makes it hold must be followed by `wake_all`.
    fn wait(&self, ready: impl Fn() -> bool) {
        for _ in 0..SPINS {
            if ready() {
                return;
            }
            std::hint::spin_loop();
        }
        let mut guard = lock(&self.lock);
        self.sleepers.fetch_add(1, Ordering::Relaxed);
        // Either this thread sees the change below, or the one that made it sees the sleeper.
        fence(Ordering::SeqCst);
        while !ready() {
            guard = self.wake.wait(guard).unwrap_or_else(std::sync::PoisonError::into_inner);
        }
        self.sleepers.fetch_sub(1, Ordering::Relaxed);
    }

    fn wake_all(&self) {
        fence(Ordering::SeqCst);
        if self.sleepers.load(Ordering::Relaxed) > 0 {
            // Taken so that a sleeper is either before its check or in `wait`.
            drop(lock(&self.lock));
            self.wake.notify_all();
        }
    }

    fn worker(&self) {
        inside_task(|| {
            loop {
                self.wait(|| self.unclaimed.load(Ordering::Relaxed) > 0 || self.stop.load(Ordering::Relaxed));
                if self.stop.load(Ordering::Relaxed) {
                    return;
                }
                self.work();
            }
        });
    }
}

sync::thread_local! {
    /// This thread runs a task of some pool.
    #[allow(clippy::missing_const_for_thread_local, reason = "the model checker's macro takes no const")]
    static INSIDE: std::cell::Cell<bool> = std::cell::Cell::new(false);
}

/// Runs `f` marked as being inside a task. `f` does not unwind.
fn inside_task(f: impl FnOnce()) {
    INSIDE.with(|inside| inside.set(true));
    f();
    INSIDE.with(|inside| inside.set(false));
}

/// A pool of threads that run the tasks of one job at a time; the calling thread takes part.
pub struct Pool {
    state: Arc<State>,
    workers: Vec<JoinHandle<()>>,
}

impl Pool {
    /// A pool of `threads` threads, the caller of [`Self::run`] being one of them; 0 counts as 1. If the
    /// system refuses some threads, the pool is smaller.
    ///
    /// With `pin`, on Linux, thread i of the pool stays on the i-th processor that this process may use; the
    /// calling thread of this function is the 0-th. Best effort.
    #[must_use]
    pub fn new(threads: usize, pin: bool) -> Self {
        let state = Arc::new(State {
            unclaimed: AtomicUsize::new(0),
            unfinished: AtomicUsize::new(0),
            job: UnsafeCell::new(Job { task: None, tasks: 0, runs: 1, cut: 0 }),
            busy: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            sleepers: AtomicUsize::new(0),
            lock: Mutex::new(()),
            wake: Condvar::new(),
            panic: Mutex::new(None),
        });
        let processors = if pin { affinity::allowed() } else { Vec::new() };
        let processor =
            |thread: usize| (!processors.is_empty()).then(|| processors[thread % processors.len()]);
        let mut workers = Vec::new();
        for thread in 1..threads {
            let state = Arc::clone(&state);
            let processor = processor(thread);
            let worker = sync::spawn(move || {
                processor.into_iter().for_each(affinity::stay_on);
                state.worker();
            });
            let Some(worker) = worker else { break };
            workers.push(worker);
        }
        processor(0).into_iter().for_each(affinity::stay_on);
        Self { state, workers }
    }

    /// Threads that take part in a job.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `f(0)` to `f(tasks - 1)`, each once, in any order and on any thread, and returns when all are
    /// done. Tasks are taken one by one, so uneven ones balance out. Allocates nothing.
    ///
    /// From inside a task, and while another thread forks on this pool, the tasks run one after the other on
    /// the calling thread.
    ///
    /// # Panics
    /// If a task does, with its panic (one of them), after all the others are done.
    pub fn run(&self, tasks: usize, f: &(dyn Fn(usize) + Sync)) {
        self.fork(tasks, 0, &|index, _| f(index));
    }

    /// As [`Self::run`], but of the last tasks, as many as there are threads, each is handed out in pieces, so that
    /// nobody waits long for the last of them: `f` is called with each piece once, or with the whole of a task.
    ///
    /// # Panics
    /// As [`Self::run`].
    pub(crate) fn run_pieces(&self, tasks: usize, f: &(dyn Fn(usize, Piece) + Sync)) {
        self.fork(tasks, tasks.min(self.threads()), f);
    }

    fn fork(&self, tasks: usize, cut: usize, f: Task<'_>) {
        let job = Job { task: None, tasks, runs: self.threads(), cut };
        let claims = job.claims();
        let alone = claims <= 1 || self.workers.is_empty() || INSIDE.with(std::cell::Cell::get);
        if alone || self.state.busy.swap(true, Ordering::Acquire) {
            run_inline(tasks, f);
            return;
        }
        let state = &*self.state;
        // SAFETY: only the lifetime changes. The reference is used by threads that have taken a task and not
        // finished it, and this function returns (it does not unwind before) when all are finished.
        let task = unsafe { std::mem::transmute::<Task<'_>, Task<'static>>(f) };
        // SAFETY: this thread holds `busy`, the last job's tasks are all taken and finished, so nobody reads.
        state.job.with_mut(|shared| unsafe { *shared = Job { task: Some(task), ..job } });
        state.unfinished.store(claims, Ordering::Relaxed);
        state.unclaimed.store(claims, Ordering::Release);
        state.wake_all();
        inside_task(|| state.work());
        state.wait(|| state.unfinished.load(Ordering::Acquire) == 0);
        let panic = lock(&state.panic).take();
        state.busy.store(false, Ordering::Release);
        if let Some(payload) = panic {
            resume_unwind(payload);
        }
    }

    /// Calls `f(i, chunk)` for each `chunk`-long piece of `data` (the last may be shorter), in parallel.
    ///
    /// # Panics
    /// If `chunk` is 0, or a task panics.
    pub fn chunks_mut<T: Send>(&self, data: &mut [T], chunk: usize, f: &(dyn Fn(usize, &mut [T]) + Sync)) {
        assert!(chunk > 0, "chunks of nothing");
        let len = data.len();
        let shared = Shared::new(data);
        self.run(len.div_ceil(chunk), &|i| {
            // SAFETY: each index is run once, and chunks do not overlap.
            f(i, unsafe { shared.part(i * chunk..len.min((i + 1) * chunk)) });
        });
    }
}

fn run_inline(tasks: usize, f: Task<'_>) {
    let mut panic = None;
    for index in 0..tasks {
        if let Err(payload) = catch_unwind(AssertUnwindSafe(|| f(index, Piece::WHOLE))) {
            keep_first(&mut panic, payload);
        }
    }
    if let Some(payload) = panic {
        resume_unwind(payload);
    }
}

/// Keeps the first panic; later ones are leaked, as dropping one could panic in turn.
fn keep_first(kept: &mut Option<Payload>, payload: Payload) {
    if kept.is_none() {
        *kept = Some(payload);
    } else {
        std::mem::forget(payload);
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.state.stop.store(true, Ordering::Relaxed);
        self.state.wake_all();
        for worker in self.workers.drain(..) {
            // Workers catch the panics of tasks, so there is no error to report.
            let _ = worker.join();
        }
    }
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Pool({} threads)", self.threads())
    }
}

#[cfg(all(target_os = "linux", not(all(loom, test))))]
mod affinity {
    /// The processors that this process may run on.
    pub(super) fn allowed() -> Vec<usize> {
        // SAFETY: a cpu_set_t is plain bits, and all zero is the empty set.
        let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
        // SAFETY: `set` is as large as said.
        if unsafe { libc::sched_getaffinity(0, size_of_val(&set), &raw mut set) } != 0 {
            return Vec::new();
        }
        // SAFETY: i is below the size of the set.
        (0..libc::CPU_SETSIZE as usize).filter(|&i| unsafe { libc::CPU_ISSET(i, &set) }).collect()
    }

    /// Keeps the calling thread on one processor, if the system agrees.
    pub(super) fn stay_on(processor: usize) {
        // SAFETY: a cpu_set_t is plain bits, and all zero is the empty set.
        let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
        // SAFETY: `processor` came out of such a set; the call reads the set only.
        unsafe {
            libc::CPU_SET(processor, &mut set);
            let _ = libc::sched_setaffinity(0, size_of_val(&set), &raw const set);
        }
    }
}

#[cfg(not(all(target_os = "linux", not(all(loom, test)))))]
mod affinity {
    pub(super) fn allowed() -> Vec<usize> {
        Vec::new()
    }

    pub(super) fn stay_on(_processor: usize) {}
}

/// The primitives, from the standard library or from the model checker.
#[cfg(not(all(loom, test)))]
mod sync {
    pub(super) use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
    pub(super) use std::sync::{Arc, Condvar, Mutex, MutexGuard};
    pub(super) use std::thread::JoinHandle;
    pub(super) use std::thread_local;

    pub(super) fn spawn(f: impl FnOnce() + Send + 'static) -> Option<JoinHandle<()>> {
        std::thread::Builder::new().name("smoe-compute".to_owned()).spawn(f).ok()
    }

    /// A cell with the model checker's interface.
    pub(super) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

    impl<T> UnsafeCell<T> {
        pub(super) fn new(value: T) -> Self {
            Self(std::cell::UnsafeCell::new(value))
        }

        pub(super) fn with<R>(&self, f: impl FnOnce(*const T) -> R) -> R {
            f(self.0.get())
        }

        pub(super) fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
            f(self.0.get())
        }
    }
}

#[cfg(all(loom, test))]
mod sync {
    pub(super) use loom::cell::UnsafeCell;
    pub(super) use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
    pub(super) use loom::sync::{Arc, Condvar, Mutex, MutexGuard};
    pub(super) use loom::thread::JoinHandle;
    pub(super) use loom::thread_local;

    pub(super) fn spawn(f: impl FnOnce() + Send + 'static) -> Option<JoinHandle<()>> {
        Some(loom::thread::spawn(f))
    }
}

#[cfg(all(loom, test))]
mod model {
    use super::*;
    use loom::sync::atomic::AtomicUsize as Counter;

    fn check(threads: usize, forks: usize, tasks: usize) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(move || {
            let pool = Pool::new(threads, false);
            for _ in 0..forks {
                let runs: Vec<_> = (0..tasks).map(|_| Counter::new(0)).collect();
                pool.run(tasks, &|i| {
                    runs[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(runs.iter().all(|r| r.load(Ordering::Relaxed) == 1));
            }
        });
    }

    #[test]
    fn two_threads_take_pieces() {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(|| {
            let pool = Pool::new(2, false);
            let runs: Vec<_> = (0..2 * PIECES).map(|_| Counter::new(0)).collect();
            pool.run_pieces(2, &|i, piece| {
                let rows = piece.of_rows(i * PIECES..(i + 1) * PIECES, 1);
                for row in rows {
                    runs[row].fetch_add(1, Ordering::Relaxed);
                }
            });
            assert!(runs.iter().all(|r| r.load(Ordering::Relaxed) == 1));
        });
    }

    #[test]
    fn two_threads_fork_twice() {
        check(2, 2, 2);
    }

    #[test]
    fn three_threads_fork_once() {
        check(3, 1, 2);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use super::*;

    #[test]
    fn every_task_runs_once_over_many_forks_and_pool_sizes() {
        for threads in [0, 1, 2, 3, 8] {
            let pool = Pool::new(threads, false);
            for fork in 0..3000 {
                let tasks = fork % 40;
                let runs: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
                pool.run(tasks, &|i| {
                    runs[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(runs.iter().all(|r| r.load(Ordering::Relaxed) == 1), "{threads} {fork}");
                if fork % 500 == 0 {
                    // Long enough that the workers sleep.
                    std::thread::sleep(Duration::from_millis(3));
                }
            }
        }
    }

    #[test]
    fn pieces_of_the_last_tasks_are_all_of_their_rows_once() {
        for threads in [1, 2, 3, 8] {
            let pool = Pool::new(threads, false);
            for (tasks, each, unit) in [(0, 64, 32), (1, 64, 32), (2, 50, 32), (7, 256, 32), (40, 200, 64)] {
                let rows: Vec<AtomicUsize> = (0..tasks * each).map(|_| AtomicUsize::new(0)).collect();
                let pieces = AtomicUsize::new(0);
                pool.run_pieces(tasks, &|i, piece| {
                    let task = i * each..(i + 1) * each;
                    let own = piece.of_rows(task.clone(), unit);
                    assert!(own.is_empty() || (own.start - task.start).is_multiple_of(unit));
                    assert!(own.end == task.end || own.len().is_multiple_of(unit));
                    pieces.fetch_add(usize::from(!own.is_empty()), Ordering::Relaxed);
                    for row in &rows[own] {
                        row.fetch_add(1, Ordering::Relaxed);
                    }
                });
                assert!(rows.iter().all(|r| r.load(Ordering::Relaxed) == 1), "{threads} {tasks} {each}");
                let pieces = pieces.load(Ordering::Relaxed);
                let cut = if threads > 1 { tasks.min(threads) } else { 0 };
                assert_eq!(pieces, tasks + cut * (each.div_ceil(unit).min(PIECES) - 1), "{threads} {tasks}");
            }
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_after_all_tasks_and_the_pool_lives_on() {
        for threads in [1, 3] {
            let pool = Pool::new(threads, false);
            let done = AtomicUsize::new(0);
            let result = catch_unwind(AssertUnwindSafe(|| {
                pool.run(20, &|i| {
                    assert!(i != 7, "task seven");
                    done.fetch_add(1, Ordering::Relaxed);
                });
            }));
            let payload = result.expect_err("task 7 panics");
            assert_eq!(payload.downcast_ref::<&str>(), Some(&"task seven"));
            assert_eq!(done.load(Ordering::Relaxed), 19);
            pool.run(5, &|_| {
                done.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(done.load(Ordering::Relaxed), 24);
        }
    }

    #[test]
    fn nested_and_concurrent_forks_run() {
        let pool = Pool::new(3, false);
        let count = AtomicUsize::new(0);
        let nested = |_| {
            pool.run(10, &|_| {
                count.fetch_add(1, Ordering::Relaxed);
            });
        };
        std::thread::scope(|s| {
            for _ in 0..4 {
                s.spawn(|| (0..50).for_each(|_| pool.run(10, &nested)));
            }
        });
        assert_eq!(count.load(Ordering::Relaxed), 4 * 50 * 10 * 10);
    }

    #[test]
    fn chunks_are_disjoint_and_complete() {
        let pool = Pool::new(4, true);
        let mut data = vec![0.0f32; 1003];
        pool.chunks_mut(&mut data, 10, &|i, chunk| chunk.iter_mut().for_each(|v| *v += i as f32));
        assert!(data.iter().enumerate().all(|(i, &v)| v == (i / 10) as f32));
    }
}
