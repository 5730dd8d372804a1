//! What is asked of a [`crate::Scheduler`], and what it tells while it works.

use std::fmt;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::{EngineError, Finish, Limits, Sampling};

/// Names a job of one scheduler; never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct JobId(pub u64);

/// A prompt to be continued.
pub struct Job {
    /// Token ids, at least one.
    pub prompt: Vec<u32>,
    /// How to choose tokens.
    pub sampling: Sampling,
    /// When it ends.
    pub limits: Limits,
    /// Tells with each token its log probability and those of so many of the likeliest.
    pub logprobs: Option<usize>,
    /// What may be said; `None` allows everything.
    pub constraint: Option<Box<dyn Constraint>>,
    /// Set from anywhere: the job ends as [`Finish::Stopped`], at the latest when the running layer is done if
    /// nobody else is in the step. What was computed stays cached.
    pub cancel: Arc<AtomicBool>,
    /// Hears of everything, on the scheduler's thread: it must not block.
    pub sink: Box<dyn Sink>,
}

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Job")
            .field("prompt", &self.prompt.len())
            .field("sampling", &self.sampling)
            .field("limits", &self.limits)
            .finish_non_exhaustive()
    }
}

/// Hears what becomes of a job.
pub trait Sink: Send {
    /// Takes an event. Break ends the job as [`Finish::Stopped`], with the [`Event::End`] that every job has.
    fn event(&mut self, event: Event<'_>) -> ControlFlow<()>;
}

impl<F: FnMut(Event<'_>) -> ControlFlow<()> + Send> Sink for F {
    fn event(&mut self, event: Event<'_>) -> ControlFlow<()> {
        self(event)
    }
}

/// What becomes of a job, in order: any number of `Prefill`, then of `Token`, and one `End`.
#[derive(Debug)]
pub enum Event<'a> {
    /// The prompt is being computed.
    Prefill {
        /// Tokens that are done, of those to do.
        done: usize,
        /// Tokens to do.
        total: usize,
        /// Leading tokens of the prompt that were cached and need no work.
        cached: usize,
    },
    /// A new token; end tokens are told too.
    Token {
        /// Its id.
        id: u32,
        /// The natural logarithm of its probability by the model's own distribution, before penalties and
        /// temperature; if asked for.
        logprob: Option<f32>,
        /// The likeliest tokens of that distribution, the first one the likeliest, as many as were asked for.
        top: &'a [(u32, f32)],
    },
    /// It is over.
    End(Ended),
}

/// How a job ended.
#[derive(Debug)]
pub struct Ended {
    /// Why, or what went wrong.
    pub result: Result<Finish, EngineError>,
    /// What it took.
    pub usage: Usage,
}

/// Tokens and times of a job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Of those, leading ones that were cached.
    pub cached: usize,
    /// New tokens, an end token included.
    pub completion: usize,
    /// From the submission until its prompt began to be computed.
    pub queued: Duration,
    /// From there to the first new token.
    pub prefill: Duration,
    /// From the first new token to the last.
    pub decode: Duration,
}

/// Says which tokens may come next: a grammar.
pub trait Constraint: Send {
    /// A bit for each token id, bit `id % 32` of word `id / 32`; tokens beyond the last word are forbidden.
    ///
    /// # Errors
    /// In words, if there is no way on; the job fails with them.
    fn mask(&mut self) -> Result<&[u32], String>;

    /// Takes note of the token that was chosen.
    ///
    /// # Errors
    /// As [`Self::mask`].
    fn accept(&mut self, token: u32) -> Result<(), String>;
}

/// What a server needs of a [`crate::Scheduler`]: to be able to do without one in its tests.
pub trait Driver: Send {
    /// Queues a job. Its sink hears of it from the next [`Self::step`] on.
    ///
    /// # Errors
    /// Before anything is queued: a prompt that is empty, too long or of unknown ids, a setting out of range; the
    /// queue is full ([`EngineError::QueueFull`]).
    fn submit(&mut self, job: Job) -> Result<JobId, EngineError>;

    /// Queues jobs, all or none. What only does [`Self::submit`] is not that strict: it cancels those that it has
    /// queued when one is refused.
    ///
    /// # Errors
    /// As [`Self::submit`].
    fn submit_all(&mut self, jobs: Vec<Job>) -> Result<Vec<JobId>, EngineError> {
        let mut cancels = Vec::with_capacity(jobs.len());
        let submit = |job: Job| {
            cancels.push(job.cancel.clone());
            self.submit(job)
        };
        let ids: Result<Vec<JobId>, EngineError> = jobs.into_iter().map(submit).collect();
        if ids.is_err() {
            cancels.iter().for_each(|cancel| cancel.store(true, Ordering::Relaxed));
        }
        ids
    }

    /// Does one step of work; false if there was nothing to do. What fails, fails the jobs that it concerns.
    fn step(&mut self) -> bool;

    /// What went wrong and concerns no job, if that was not told yet: the file of the cache. Each is told once.
    fn take_warning(&mut self) -> Option<EngineError> {
        None
    }

    /// Ends every job as [`Finish::Stopped`], and brings what all of them computed to the file of the cache, for as long
    /// as `limit` allows. Returns how many blocks the file may lack. Nothing is to be asked of it afterwards.
    fn close(&mut self, _limit: Duration) -> usize {
        0
    }

    /// What is running and waiting.
    fn load(&self) -> Load;
}

/// What a scheduler is doing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Jobs being computed.
    pub running: usize,
    /// Of those, prompts not yet done.
    pub prefilling: usize,
    /// Jobs waiting.
    pub queued: usize,
    /// The most that run at once; fewer than planned while the ring is small.
    pub max_running: usize,
    /// The most that wait.
    pub max_queued: usize,
    /// Tokens that were guessed, and of those the right ones, since the start.
    pub guessed: u64,
    /// See `guessed`.
    pub accepted: u64,
    /// Times that a job went back to the queue for want of room, since the start.
    pub sent_back: u64,
    /// Blocks of the KV cache in all, and positions of one.
    pub kv_blocks: usize,
    /// Blocks that running jobs hold.
    pub kv_used: usize,
    /// Blocks that hold what finished jobs computed.
    pub kv_cached: usize,
    /// Blocks of layers that see a window, in all; none of other models.
    pub kv_window_blocks: usize,
    /// Those that running jobs hold.
    pub kv_window_used: usize,
    /// Positions of a block.
    pub kv_block_tokens: usize,
    /// Whether the cache has a file that is used.
    pub kv_has_file: bool,
    /// Reads and writes of the file that failed.
    pub kv_file_failures: u64,
    /// Blocks that gave way before the file had taken them.
    pub kv_lost: u64,
    /// States of linear attention that it should have had, and that gave way before it had taken them.
    pub kv_states_lost: u64,
    /// Positions of the longest conversation.
    pub context: usize,
}
