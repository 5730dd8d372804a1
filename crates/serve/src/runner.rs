//! The thread that owns a loaded model: it takes jobs between two steps, and sleeps when there is nothing to do.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use smoe_engine::{Driver, EngineError, Job, Load};
use tokio::sync::oneshot;

use crate::error::ApiError;

/// What the end of a model may take, whatever its disk does: within what [`crate::Config::grace`] leaves by default.
const CLOSING: Duration = Duration::from_millis(2_500);

/// A driver, and what only its thread may tell of it.
pub trait Machine: Driver {
    /// The state of its expert cache; `None` if it has none to show.
    fn glance(&self) -> Option<Glance> {
        None
    }
}

/// The state of an expert cache.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Glance {
    /// Experts that are in memory, a bit each: layer by layer in ascending order, bit `i % 8` of byte `i / 8`.
    pub resident: Vec<u8>,
    /// Slots that may be used now.
    pub ring_limit: usize,
}

/// What is told when jobs were accepted, with the load before them.
type Accepted = Box<dyn FnOnce(Load) + Send>;

enum Command {
    Submit(Vec<Job>, Accepted, oneshot::Sender<Result<(), EngineError>>),
    Glance(oneshot::Sender<Option<Glance>>),
    Stop,
}

/// A handle to the thread. Dropping it ends the thread, unwaited for.
pub struct Runner {
    commands: Sender<Command>,
    load: Arc<Mutex<Load>>,
    warnings: Arc<Mutex<Vec<String>>>,
    over: Arc<AtomicBool>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl fmt::Debug for Runner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Runner").field("load", &self.load()).finish_non_exhaustive()
    }
}

impl Runner {
    /// Starts the thread.
    ///
    /// # Errors
    /// If the system has no thread left.
    pub fn start(machine: Box<dyn Machine>) -> std::io::Result<Self> {
        let (commands, inbox) = channel();
        let load = Arc::new(Mutex::new(machine.load()));
        let over = Arc::new(AtomicBool::new(false));
        let warnings = Arc::<Mutex<Vec<String>>>::default();
        let (shown, told, ends) = (load.clone(), warnings.clone(), Ends(over.clone()));
        let thread = Builder::new()
            .name("model".to_owned())
            .spawn(move || run(machine, &inbox, &shown, &told, ends))?;
        Ok(Self { commands, load, warnings, over, thread: Mutex::new(Some(thread)) })
    }

    /// What it was doing after its last step.
    pub fn load(&self) -> Load {
        *lock(&self.load)
    }

    /// What went wrong since it began and concerned no job.
    pub fn warnings(&self) -> Vec<String> {
        lock(&self.warnings).clone()
    }

    /// Queues jobs, all or none. `accepted` is called before any of their sinks is.
    ///
    /// # Errors
    /// As [`Driver::submit_all`].
    pub async fn submit(
        &self,
        jobs: Vec<Job>,
        accepted: impl FnOnce(Load) + Send + 'static,
    ) -> Result<(), ApiError> {
        let (reply, answer) = oneshot::channel();
        // If the thread is gone, so is `reply`.
        let _ = self.commands.send(Command::Submit(jobs, Box::new(accepted), reply));
        match answer.await {
            Ok(result) => result.map_err(ApiError::from),
            Err(_) => {
                Err(ApiError::internal("the model's thread has ended; it is loaded anew when asked for"))
            }
        }
    }

    /// The state of the expert cache, after the step that is running.
    pub async fn glance(&self) -> Option<Glance> {
        let (reply, answer) = oneshot::channel();
        // As above.
        let _ = self.commands.send(Command::Glance(reply));
        answer.await.ok().flatten()
    }

    /// Whether the thread takes nothing more: because it was stopped, or by a panic. The sinks of its jobs are not
    /// gone before.
    pub fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }

    /// Cancels the jobs, ends the thread when it has nothing left to do, and waits until all that it owns is gone.
    pub fn stop(&self) {
        // It may have ended before.
        let _ = self.commands.send(Command::Stop);
        let thread = lock(&self.thread).take();
        if let Some(Err(_)) = thread.map(JoinHandle::join) {
            tracing::error!("the model's thread panicked");
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing panics while one is held.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Says so when it is dropped.
struct Ends(Arc<AtomicBool>);

impl Drop for Ends {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

fn run(
    mut machine: Box<dyn Machine>,
    inbox: &Receiver<Command>,
    load: &Mutex<Load>,
    warnings: &Mutex<Vec<String>>,
    ends: Ends,
) {
    // Dropped before the machine is, whatever happens.
    let _ends = ends;
    let mut busy = false;
    // Of jobs that may still run.
    let mut cancels: Vec<Arc<AtomicBool>> = Vec::new();
    loop {
        let command =
            if busy { inbox.try_recv() } else { inbox.recv().map_err(|_| TryRecvError::Disconnected) };
        match command {
            Ok(Command::Submit(jobs, accepted, reply)) => {
                let before = machine.load();
                cancels.retain(|cancel| Arc::strong_count(cancel) > 1);
                // The jobs of a request share a flag.
                for job in &jobs {
                    if !cancels.last().is_some_and(|last| Arc::ptr_eq(last, &job.cancel)) {
                        cancels.push(job.cancel.clone());
                    }
                }
                let result = machine.submit_all(jobs).map(|_| ());
                if result.is_ok() {
                    accepted(before);
                }
                // Who asked may have gone; the sinks find out.
                let _ = reply.send(result);
                busy = true;
                *lock(load) = machine.load();
            }
            Ok(Command::Glance(reply)) => {
                // As above.
                let _ = reply.send(machine.glance());
            }
            Ok(Command::Stop) | Err(TryRecvError::Disconnected) => {
                cancels.iter().for_each(|cancel| cancel.store(true, Ordering::Relaxed));
                let jobs = |machine: &dyn Machine| machine.load().running + machine.load().queued;
                while jobs(&*machine) > 0 && machine.step() {}
                let lost = machine.close(CLOSING);
                if lost > 0 {
                    tracing::warn!("{lost} blocks of conversations were not brought to their file in time");
                }
                return;
            }
            Err(TryRecvError::Empty) => {
                busy = machine.step();
                while let Some(warning) = machine.take_warning() {
                    tracing::warn!("{warning}");
                    lock(warnings).push(warning.to_string());
                }
                *lock(load) = machine.load();
            }
        }
    }
}
