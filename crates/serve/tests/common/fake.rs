//! The scripted model.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use smoe_engine::{Driver, Ended, EngineError, Event, Finish, Job, JobId, Load, Usage};
use smoe_serve::runner::{Glance, Machine};
use smoe_testkit::tiny::tokenizer::{IM_END, IM_START};
use tokio::sync::watch;

use super::CONTEXT;

/// What a test knows and decides of scripted models.
pub struct Fake {
    /// Tokens that may still be said; `None` is any number.
    permits: Mutex<Option<usize>>,
    more: Condvar,
    pub max_running: usize,
    pub max_queued: usize,
    pub warnings: Vec<String>,
    /// Goes wrong with the next step.
    pub trouble: Mutex<Option<EngineError>>,
    /// Jobs that are over, by their prompts, and how many tokens they said.
    pub ended: watch::Sender<Vec<(String, usize)>>,
    /// Tokens said in all.
    pub said: watch::Sender<usize>,
    /// Models loaded so far.
    pub loads: watch::Sender<usize>,
}

impl Default for Fake {
    fn default() -> Self {
        Self {
            permits: Mutex::new(None),
            more: Condvar::new(),
            max_running: 4,
            max_queued: 4,
            warnings: Vec::new(),
            trouble: Mutex::new(None),
            ended: watch::Sender::new(Vec::new()),
            said: watch::Sender::new(0),
            loads: watch::Sender::new(0),
        }
    }
}

impl Fake {
    /// Models that say so many tokens and then wait.
    pub fn gated(permits: usize) -> Self {
        Self { permits: Mutex::new(Some(permits)), ..Self::default() }
    }

    /// Models that say all they have to say, where so many may wait.
    pub fn wide(max_queued: usize) -> Self {
        Self { max_queued, ..Self::default() }
    }

    /// Models that say so many tokens and then wait, where so many jobs run and so many wait.
    pub fn narrow(permits: usize, max_running: usize, max_queued: usize) -> Self {
        Self { max_running, max_queued, ..Self::gated(permits) }
    }

    /// Lets so many more tokens be said.
    pub fn permit(&self, more: usize) {
        if let Some(permits) = &mut *self.permits.lock().unwrap() {
            *permits += more;
        }
        self.more.notify_all();
    }

    pub fn machine(self: &Arc<Self>) -> Box<dyn Machine> {
        Box::new(FakeMachine { fake: self.clone(), waiting: VecDeque::new(), running: Vec::new(), next: 1 })
    }

    /// Takes leave to say a token; comes back without it after a moment, so that cancellations are seen.
    fn may_speak(&self) -> bool {
        let permits = self.permits.lock().unwrap();
        let shut = |permits: &mut Option<usize>| *permits == Some(0);
        let (mut permits, _) = self.more.wait_timeout_while(permits, Duration::from_millis(1), shut).unwrap();
        match &mut *permits {
            None => true,
            Some(0) => false,
            Some(left) => {
                *left -= 1;
                true
            }
        }
    }
}

struct Speaking {
    job: Job,
    prompt: String,
    script: VecDeque<u32>,
    said: usize,
    prefilled: bool,
}

struct FakeMachine {
    fake: Arc<Fake>,
    waiting: VecDeque<Speaking>,
    running: Vec<Speaking>,
    next: u64,
}

impl Machine for FakeMachine {
    fn glance(&self) -> Option<Glance> {
        Some(Glance { resident: vec![0b101], ring_limit: 3 })
    }
}

impl Driver for FakeMachine {
    fn submit(&mut self, job: Job) -> Result<JobId, EngineError> {
        if self.running.len() >= self.fake.max_running && self.waiting.len() >= self.fake.max_queued {
            return Err(EngineError::QueueFull { queued: self.waiting.len() });
        }
        job.sampling.validate(300)?;
        let bytes: Vec<u8> = job
            .prompt
            .iter()
            .flat_map(|&id| match id {
                0..=255 => vec![id as u8],
                IM_START => b"<|im_start|>".to_vec(),
                _ => b"<|im_end|>".to_vec(),
            })
            .collect();
        let prompt = String::from_utf8_lossy(&bytes).into_owned();
        let script = script(&prompt).replace("{seed}", &job.sampling.seed.to_string());
        let script = script.bytes().map(u32::from).collect();
        self.waiting.push_back(Speaking { job, prompt, script, said: 0, prefilled: false });
        self.next += 1;
        Ok(JobId(self.next))
    }

    fn step(&mut self) -> bool {
        while self.running.len() < self.fake.max_running {
            match self.waiting.pop_front() {
                Some(job) => self.running.push(job),
                None => break,
            }
        }
        let fake = self.fake.clone();
        self.waiting
            .retain_mut(|job| !job.job.cancel.load(Ordering::Relaxed) || job.end(&fake, Ok(Finish::Stopped)));
        self.running.retain_mut(|job| match job.step(&fake) {
            None => true,
            Some(result) => job.end(&fake, result),
        });
        !self.running.is_empty() || !self.waiting.is_empty()
    }

    fn take_warning(&mut self) -> Option<EngineError> {
        self.fake.trouble.lock().unwrap().take()
    }

    fn load(&self) -> Load {
        Load {
            running: self.running.len(),
            queued: self.waiting.len(),
            max_running: self.fake.max_running,
            max_queued: self.fake.max_queued,
            context: CONTEXT,
            ..Load::default()
        }
    }
}

/// What the model says to a prompt.
fn script(prompt: &str) -> String {
    match prompt.rsplit_once("SAY:") {
        Some((_, rest)) => rest.split("<|im_end|>").next().unwrap_or_default().to_owned(),
        None => prompt.chars().rev().collect(),
    }
}

impl Speaking {
    /// Says a token; how it ended, if it did.
    fn step(&mut self, fake: &Fake) -> Option<Result<Finish, EngineError>> {
        if self.job.cancel.load(Ordering::Relaxed) {
            return Some(Ok(Finish::Stopped));
        }
        assert!(!self.prompt.contains("SAY:PANIC"), "as the script wants it");
        if !std::mem::replace(&mut self.prefilled, true) {
            let total = self.job.prompt.len();
            for done in [total / 2, total] {
                if self.job.sink.event(Event::Prefill { done, total, cached: 0 }).is_break() {
                    return Some(Ok(Finish::Stopped));
                }
            }
        }
        if !fake.may_speak() {
            return None;
        }
        let wanted = self.script.pop_front().unwrap_or(IM_END);
        let id = match &mut self.job.constraint {
            None => wanted,
            Some(constraint) => {
                let mask = constraint.mask().unwrap().to_vec();
                let allowed =
                    |id: &u32| mask.get(*id as usize / 32).is_some_and(|word| word >> (id % 32) & 1 == 1);
                // What ends strings and objects soonest, so that it comes to an end.
                let liked = [wanted, IM_END, u32::from(b'"'), u32::from(b'}'), u32::from(b'0')];
                let id = liked.into_iter().chain(0..300).find(allowed).unwrap();
                constraint.accept(id).unwrap();
                id
            }
        };
        self.said += 1;
        fake.said.send_modify(|said| *said += 1);
        let top: Vec<(u32, f32)> = (0..self.job.logprobs.unwrap_or(0))
            .map(|rank| ((id + rank as u32) % 256, -(rank as f32) - 0.5))
            .collect();
        let logprob = self.job.logprobs.map(|_| -0.5);
        if self.job.sink.event(Event::Token { id, logprob, top: &top }).is_break() {
            return Some(Ok(Finish::Stopped));
        }
        if self.job.limits.end_tokens.contains(&id) {
            return Some(Ok(Finish::End));
        }
        (self.said >= self.job.limits.max_tokens).then_some(Ok(Finish::Length))
    }

    /// False: nothing is left of it.
    fn end(&mut self, fake: &Fake, result: Result<Finish, EngineError>) -> bool {
        let usage =
            Usage { prompt: self.job.prompt.len(), cached: 1, completion: self.said, ..Usage::default() };
        fake.ended.send_modify(|ended| ended.push((self.prompt.clone(), self.said)));
        let _ = self.job.sink.event(Event::End(Ended { result, usage }));
        false
    }
}
