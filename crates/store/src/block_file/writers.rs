//! The threads that write, and the queue to them.
//!
//! The owner sees to it that of each slot at most one write is under way, so the order between writes does
//! not matter. A write ends in exactly one report, also if the disk panics.

use crate::aligned::AlignedBuf;
use crate::block_file::error::BlockFileError;
use crate::block_file::layout::BLOCK;
use crate::block_file::medium::WriteDisk;
use crate::sync::{Condvar, Mutex, lock, wait, wait_until};
use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Instant;

/// So that the drive has the next write when one ends; one write of some MiB is already split by the system.
const WRITERS: usize = 2;

/// What was asked for.
enum Job {
    /// The write of a whole slot, or, without bytes, of zeros over its descriptor.
    Write { slot: u32, offset: u64, bytes: Option<Arc<AlignedBuf>> },
    /// What was written before is to be brought to the drive.
    Sync,
}

/// What has ended.
pub(super) struct Done {
    /// None: a sync.
    pub(super) slot: Option<u32>,
    pub(super) outcome: io::Result<()>,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Job>,
    running: usize,
    done: Vec<Done>,
    closing: bool,
}

struct Shared {
    disk: Arc<dyn WriteDisk>,
    zeros: AlignedBuf,
    state: Mutex<State>,
    work: Condvar,
    /// Something has ended.
    ended: Condvar,
}

/// The writer threads. Dropping them finishes what is queued, and joins them.
pub(super) struct Writers {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl Writers {
    /// Threads for at most `queue` blocks at once.
    pub(super) fn start(disk: Arc<dyn WriteDisk>, queue: usize) -> Result<Self, BlockFileError> {
        let shared = Arc::new(Shared {
            disk,
            zeros: AlignedBuf::zeroed(BLOCK)?,
            state: Mutex::new(State::default()),
            work: Condvar::new(),
            ended: Condvar::new(),
        });
        // Made first, so that a thread that did start is joined if the next one does not.
        let mut writers = Self { shared, threads: Vec::new() };
        for number in 0..queue.min(WRITERS) {
            let shared = writers.shared.clone();
            let thread = thread::Builder::new().name(format!("smoe-blocks-{number}"));
            writers.threads.push(thread.spawn(move || shared.run()).map_err(BlockFileError::Spawn)?);
        }
        Ok(writers)
    }

    /// Queues the write of a whole slot.
    pub(super) fn write(&self, slot: u32, offset: u64, bytes: Arc<AlignedBuf>) {
        self.push(Job::Write { slot, offset, bytes: Some(bytes) });
    }

    /// Queues zeros over the descriptor at `offset`.
    pub(super) fn wipe(&self, slot: u32, offset: u64) {
        self.push(Job::Write { slot, offset, bytes: None });
    }

    /// Queues a sync; of writes that ended before.
    pub(super) fn sync(&self) {
        self.push(Job::Sync);
    }

    fn push(&self, job: Job) {
        lock(&self.shared.state).queue.push_back(job);
        self.shared.work.notify_one();
    }

    /// What has ended since the last call.
    pub(super) fn take_done(&self) -> Vec<Done> {
        std::mem::take(&mut lock(&self.shared.state).done)
    }

    /// Returns once something has ended that was not taken yet, or nothing is queued or under way; false if neither
    /// is so at the deadline. Without one it waits for as long as it takes.
    pub(super) fn wait(&self, deadline: Option<Instant>) -> bool {
        let mut state = lock(&self.shared.state);
        while state.done.is_empty() && (!state.queue.is_empty() || state.running > 0) {
            state = match deadline {
                None => wait(&self.shared.ended, state),
                Some(deadline) => match wait_until(&self.shared.ended, state, deadline) {
                    Some(state) => state,
                    None => return false,
                },
            };
        }
        true
    }

    /// Forgets what is queued, and leaves the threads to themselves: each ends with what it is doing.
    pub(super) fn abandon(&mut self) {
        let mut state = lock(&self.shared.state);
        state.queue.clear();
        state.closing = true;
        drop(state);
        self.shared.work.notify_all();
        self.threads.clear();
    }
}

impl Drop for Writers {
    fn drop(&mut self) {
        lock(&self.shared.state).closing = true;
        self.shared.work.notify_all();
        for thread in self.threads.drain(..) {
            // A writer catches the panics of its disk; if one died all the same there is nothing to add here.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn run(&self) {
        while let Some(job) = self.next() {
            let slot = match job {
                Job::Write { slot, .. } => Some(slot),
                Job::Sync => None,
            };
            let outcome = catch_unwind(AssertUnwindSafe(|| self.perform(&job)))
                .unwrap_or_else(|_| Err(io::Error::other("the disk panicked")));
            // Before the report: whoever hears of it owns the buffer alone.
            drop(job);
            let mut state = lock(&self.state);
            state.done.push(Done { slot, outcome });
            state.running -= 1;
            drop(state);
            self.ended.notify_all();
        }
    }

    /// The next job; none once the queue is empty and closed.
    fn next(&self) -> Option<Job> {
        let mut state = lock(&self.state);
        loop {
            if let Some(job) = state.queue.pop_front() {
                state.running += 1;
                return Some(job);
            }
            if state.closing {
                return None;
            }
            state = wait(&self.work, state);
        }
    }

    fn perform(&self, job: &Job) -> io::Result<()> {
        let (offset, bytes) = match job {
            Job::Sync => return self.disk.sync(),
            Job::Write { offset, bytes: None, .. } => return self.disk.write_all_at(*offset, &self.zeros),
            Job::Write { offset, bytes: Some(bytes), .. } => (*offset, bytes),
        };
        let written = self.disk.write_all_at(offset, bytes);
        if written.is_err() {
            // A half-written block would be found out when it is read; without its descriptor it is not even
            // found. If this fails too, nothing is lost.
            let _ = self.disk.write_all_at(offset, &self.zeros);
        }
        written
    }
}
