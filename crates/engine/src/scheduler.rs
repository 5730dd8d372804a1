//! Many conversations at once: each step carries the next token of every one that is being answered, and a part of a
//! prompt, so that an expert which several need is read once.
//!
//! - *Order*: prompts are computed first come, first served; while others are being answered, in parts that keep the
//!   step short, and answering gets as much time as prompts took ([`Pace`]).
//! - *Room*: a job is let in when the cache has room for its prompt and the beginning of an answer. Should the room
//!   not suffice later, the youngest job goes back to the queue; what it computed is found again when it returns.
//! - *Sharing*: a prompt goes on from the longest beginning that any earlier job computed.
//! - *Failure*: when a step fails, its jobs go on one at a time, so that only those fail that cannot go on.
//!
//! What a job gets does not depend on the others.

mod draft;
mod pace;

use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use smoe_kernels::Kernels;

use crate::job::{Driver, Ended, Event, Job, JobId, Load, Usage};
use crate::kv::{BLOCK, SpillConfig};
use crate::sampler::log_probabilities;
use crate::{Control, Engine, EngineError, Finish, Sampler, Session, is_finite};
use draft::Drafts;
use pace::Pace;

/// How a scheduler works.
#[derive(Clone, Debug)]
pub struct SchedulerOptions {
    /// The most jobs that wait.
    pub max_queued: usize,
    /// Aimed at as the longest wait for a token while a prompt is computed.
    pub stall: Duration,
    /// Jobs at once, instead of what the ring suggests; never more than sessions were planned for.
    pub at_once: Option<usize>,
    /// Guess tokens that follow in the prompt or the answer, and check several in one step, while that pays.
    pub speculate: bool,
    /// File of the cache.
    pub spill: Option<SpillConfig>,
}

impl Default for SchedulerOptions {
    fn default() -> Self {
        Self {
            max_queued: 64,
            stall: Duration::from_millis(500),
            at_once: None,
            speculate: true,
            spill: None,
        }
    }
}

/// A ring that does not hold every expert holds those of so many tokens for each job that is let in, one job in any
/// case: with less, jobs evict each other's experts and all together are slower than one alone. EXP-ENGINE-03.
const RING_TOKENS: usize = 4;
/// Positions of an answer that must have room for its job to be let in.
const ANSWER_ROOM: usize = 256;
/// Blocks written to the file after a step, and four times as many while there is nothing else to do.
const SAVE_BLOCKS: usize = 4;

/// A job that was let in, or waits.
struct Active {
    id: JobId,
    job: Job,
    /// Made when it is let in.
    sampler: Option<Sampler>,
    /// Prompt and answer. The last one is not computed yet, as long as there is an answer.
    tokens: Vec<u32>,
    prompt_len: usize,
    usage: Usage,
    submitted: Instant,
    begun: Option<Instant>,
    first: Option<Instant>,
    /// It has looked for what is known of its tokens.
    adopted: bool,
    /// Tokens guessed to follow, which the running step checks.
    draft: Vec<u32>,
    /// A guess was wrong: the rows after it say nothing.
    refuted: bool,
    end: Option<Result<Finish, EngineError>>,
}

impl Active {
    fn is_cancelled(&self) -> bool {
        self.job.cancel.load(Ordering::Relaxed)
    }

    fn answered(&self) -> usize {
        self.tokens.len() - self.prompt_len
    }

    /// Tells how far the prompt is, `held` tokens being held.
    fn tell_prefill(&mut self, held: usize) {
        let (total, cached) = (self.prompt_len - self.usage.cached.min(self.prompt_len), self.usage.cached);
        let done = held.saturating_sub(cached).min(total);
        if self.answered() == 0 && self.job.sink.event(Event::Prefill { done, total, cached }).is_break() {
            self.end.get_or_insert(Ok(Finish::Stopped));
        }
    }

    /// Takes the logits of the `row`-th row that the step computed for this job.
    fn take_logits(&mut self, kernels: Kernels, row: usize, logits: &[f32], context: usize) {
        if self.end.is_some() || self.refuted {
            return;
        }
        if !is_finite(logits) {
            self.end = Some(Err(EngineError::NotFinite { position: self.tokens.len() - 1 }));
            return;
        }
        let failed = |what| Err(EngineError::Constraint { what });
        let mask = match self.job.constraint.as_mut().map(|constraint| constraint.mask()).transpose() {
            Ok(mask) => mask,
            Err(what) => return self.end = Some(failed(what)),
        };
        let Some(sampler) = self.sampler.as_mut().filter(|_| self.job.limits.max_tokens > 0) else {
            return self.end = Some(Ok(Finish::Length));
        };
        let token = sampler.sample_allowed(kernels, logits, mask);
        if let Some(Err(what)) = self.job.constraint.as_mut().map(|constraint| constraint.accept(token)) {
            return self.end = Some(failed(what));
        }
        let now = Instant::now();
        let first = *self.first.get_or_insert(now);
        self.usage.prefill = self.begun.map_or(Duration::ZERO, |begun| first - begun);
        self.usage.decode = now - first;
        self.usage.completion += 1;
        self.tokens.push(token);
        self.refuted = self.draft.get(row) != Some(&token);
        let (logprob, top) = match self.job.logprobs {
            Some(n) => {
                let (logprob, top) = log_probabilities(logits, token, n);
                (Some(logprob), top)
            }
            None => (None, Vec::new()),
        };
        let told = self.job.sink.event(Event::Token { id: token, logprob, top: &top });
        let limits = &self.job.limits;
        self.end = if limits.end_tokens.contains(&token) {
            Some(Ok(Finish::End))
        } else if told.is_break() {
            Some(Ok(Finish::Stopped))
        } else if self.answered() >= limits.max_tokens {
            Some(Ok(Finish::Length))
        } else if self.tokens.len() > context {
            Some(Ok(Finish::ContextFull))
        } else {
            None
        };
    }
}

/// What a step computes.
#[derive(Clone, Copy, Debug, Default)]
struct Composed {
    /// Tokens of prompts.
    prompt: usize,
    /// Jobs that get their next token.
    answers: usize,
}

/// The jobs of one engine.
pub struct Scheduler {
    engine: Engine,
    options: SchedulerOptions,
    waiting: VecDeque<Active>,
    /// Side by side with `sessions`.
    running: Vec<Active>,
    sessions: Vec<Session>,
    /// Jobs of a step that failed, to go on alone.
    alone: VecDeque<JobId>,
    step: Composed,
    max_running: usize,
    next_id: u64,
    pace: Pace,
    drafts: Drafts,
}

impl std::fmt::Debug for Scheduler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Scheduler").field("load", &self.load()).finish_non_exhaustive()
    }
}

impl Scheduler {
    /// A scheduler of as many jobs at once as the engine was planned for sessions, fewer on a small ring.
    ///
    /// # Errors
    /// If the file of the cache cannot be opened.
    pub fn new(mut engine: Engine, options: SchedulerOptions) -> Result<Self, EngineError> {
        if let Some(spill) = &options.spill {
            engine.spill_to(spill)?;
        }
        let plan = engine.plan();
        Ok(Self {
            pace: Pace::new(options.stall, plan.chunk),
            max_running: options
                .at_once
                .unwrap_or_else(|| suggested(&engine))
                .min(plan.sessions)
                .min(plan.chunk / 2)
                .max(1),
            engine,
            options,
            waiting: VecDeque::new(),
            running: Vec::new(),
            sessions: Vec::new(),
            alone: VecDeque::new(),
            step: Composed::default(),
            next_id: 1,
            drafts: Drafts::default(),
        })
    }

    /// The engine.
    #[must_use]
    pub const fn engine(&self) -> &Engine {
        &self.engine
    }

    fn new_active(&mut self, mut job: Job) -> Result<Active, EngineError> {
        let (spec, plan) = (self.engine.spec(), self.engine.plan());
        if job.prompt.is_empty() {
            return Err(EngineError::EmptyPrompt);
        }
        if job.prompt.len() > plan.context {
            return Err(EngineError::ContextFull { needed: job.prompt.len(), context: plan.context });
        }
        let vocab_size = spec.vocab_size;
        if let Some(&id) = job.prompt.iter().find(|&&id| id as usize >= vocab_size) {
            return Err(EngineError::Token { id, vocab_size });
        }
        job.sampling.validate(vocab_size)?;
        if self.waiting.len() >= self.options.max_queued {
            return Err(EngineError::QueueFull { queued: self.waiting.len() });
        }
        let id = JobId(self.next_id);
        self.next_id += 1;
        let prompt_len = job.prompt.len();
        Ok(Active {
            id,
            tokens: std::mem::take(&mut job.prompt),
            prompt_len,
            usage: Usage { prompt: prompt_len, ..Usage::default() },
            job,
            sampler: None,
            submitted: Instant::now(),
            begun: None,
            first: None,
            adopted: false,
            draft: Vec::new(),
            refuted: false,
            end: None,
        })
    }

    /// Lets jobs in, as far as there is room.
    fn admit(&mut self) {
        while self.running.len() < self.max_running
            && let Some(next) = self.waiting.front()
        {
            let room = next.job.limits.max_tokens.min(ANSWER_ROOM);
            let blocks = (next.tokens.len() + room).div_ceil(BLOCK) + 1;
            // What those inside may still take.
            let promised: usize = self.running.iter().zip(&self.sessions).map(still_to_take).sum();
            let fits = blocks + promised <= self.engine.kv_available();
            if !fits && !self.running.is_empty() {
                return;
            }
            let Ok(session) = self.engine.open_session() else { return };
            let Some(mut active) = self.waiting.pop_front() else { return };
            if active.sampler.is_none() {
                match Sampler::new(active.job.sampling.clone(), self.engine.spec().vocab_size) {
                    Ok(mut sampler) => {
                        sampler.begin(&active.tokens);
                        active.sampler = Some(sampler);
                    }
                    Err(error) => active.end = Some(Err(error)),
                }
            }
            // Who was sent back is not the last in the row.
            let place = self.running.partition_point(|other| other.id < active.id);
            self.running.insert(place, active);
            self.sessions.insert(place, session);
        }
    }

    /// Says what the step computes: a token of every job that is being answered, and a part of a prompt.
    fn compose(&mut self) {
        let is_running = |id: &JobId| self.running.iter().any(|active| active.id == *id);
        self.alone.retain(is_running);
        let alone = self.alone.pop_front();
        let answering = |active: &Active, session: &Session| {
            active.answered() > 0 && session.len() + 1 == active.tokens.len()
        };
        let jobs = || 0..self.running.len();
        let decoding = jobs().filter(|&i| answering(&self.running[i], &self.sessions[i])).count();
        let mut budget = self.pace.prompt_tokens(decoding);
        self.step = Composed::default();
        let prompts =
            jobs().any(|i| self.running[i].end.is_none() && !answering(&self.running[i], &self.sessions[i]));
        let drafts = decoding == 1 && !prompts && alone.is_none() && self.options.speculate;
        let chunk = self.engine.plan().chunk;
        let mut begun: Vec<usize> = Vec::new();
        let context = self.engine.plan().context;
        for i in 0..self.running.len() {
            let waits = !self.running[i].adopted && begun.iter().any(|&j| self.awaits(i, j));
            let (active, session) = (&mut self.running[i], &mut self.sessions[i]);
            session.queue(&[], 0);
            active.draft.clear();
            active.refuted = false;
            let skipped = active.end.is_some() || alone.is_some_and(|id| id != active.id);
            if skipped {
                continue;
            }
            let decodes = answering(active, session);
            if !decodes && !active.adopted {
                if budget == 0 || waits {
                    continue;
                }
                let now = Instant::now();
                let held = self.engine.adopt(session, &active.tokens);
                active.adopted = true;
                if active.begun.is_none() {
                    active.begun = Some(now);
                    active.usage.queued = now - active.submitted;
                    active.usage.cached = held.min(active.prompt_len);
                }
                active.tell_prefill(held);
                if active.end.is_some() {
                    continue;
                }
            }
            let rest = &active.tokens[session.len()..];
            if decodes {
                self.step.answers += 1;
                session.queue(rest, 1);
                if drafts {
                    let room = context.saturating_sub(active.tokens.len()).min(chunk - 1);
                    let left = active.job.limits.max_tokens.saturating_sub(active.answered() + 1).min(room);
                    self.drafts.draft(&active.tokens, left, &mut active.draft);
                    if !active.draft.is_empty() {
                        let mut all = rest.to_vec();
                        all.extend_from_slice(&active.draft);
                        session.queue(&all, all.len());
                    }
                }
            } else if budget > 0 {
                let n = rest.len().min(budget);
                budget -= n;
                self.step.prompt += n;
                session.queue(&rest[..n], usize::from(n == rest.len()));
                begun.push(i);
            }
        }
    }

    /// Whether the `i`-th job had better wait for what the `j`-th is about to compute: most of its prompt, of which the
    /// other does not hold all yet.
    fn awaits(&self, i: usize, j: usize) -> bool {
        let (own, other) = (&self.running[i].tokens, &self.running[j].tokens);
        let common = own.iter().zip(other).take_while(|(a, b)| a == b).count() / BLOCK * BLOCK;
        common > self.sessions[j].len() && 2 * common >= own.len()
    }

    /// Sees to it that what was composed has room: sends the youngest back until it has.
    fn make_room(&mut self) {
        let lacks = |this: &mut Self| {
            let reserved = this.sessions.iter().map(|session| this.engine.reserve(session));
            reserved.enumerate().find_map(|(i, reserved)| Some((i, reserved.err()?)))
        };
        while let Some((i, error)) = lacks(self) {
            let youngest = (0..self.running.len()).max_by_key(|&i| self.running[i].id).unwrap_or(i);
            if self.running.len() > 1 {
                self.send_back(youngest);
                continue;
            }
            let answered = self.running[i].answered() > 0;
            self.running[i].end = Some(if answered { Ok(Finish::ContextFull) } else { Err(error) });
            self.sessions[i].queue(&[], 0);
        }
    }

    fn send_back(&mut self, i: usize) {
        let mut active = self.running.remove(i);
        self.engine.close(self.sessions.remove(i), true);
        active.adopted = false;
        active.draft.clear();
        let place = self.waiting.partition_point(|other| other.id < active.id);
        self.waiting.insert(place, active);
    }

    /// Computes what was composed; false if that was nothing.
    fn compute(&mut self) -> bool {
        let n: usize = self.sessions.iter().map(Session::queued).sum();
        if n == 0 {
            return false;
        }
        let Self { engine, running, sessions, .. } = self;
        let (kernels, context) = (engine.kernels(), engine.plan().context);
        let in_step: Vec<JobId> =
            running.iter().zip(&*sessions).filter(|(_, s)| s.queued() > 0).map(|(a, _)| a.id).collect();
        let drafted = running.iter().map(|active| active.draft.len()).sum::<usize>();
        let Composed { prompt, answers } = self.step;
        let before: Vec<(usize, usize)> = sessions.iter().map(|s| (s.len(), s.queued())).collect();
        let running = RefCell::new(running);
        let all_cancelled = || {
            let running = running.try_borrow();
            running.is_ok_and(|r| {
                r.iter().filter(|a| in_step.contains(&a.id)).all(|a| a.is_cancelled() || a.end.is_some())
            })
        };
        let mut progress = |done: usize, total: usize| {
            // A step of prompts alone is long: its layers tell how far it is.
            for (active, (held, queued)) in running.borrow_mut().iter_mut().zip(&before) {
                if *queued > 1 && active.answered() == 0 && active.end.is_none() {
                    active.tell_prefill(held + queued * done / total.max(1));
                }
            }
        };
        let mut control = Control { cancel: None, stop: Some(&all_cancelled), progress: Some(&mut progress) };
        let start = Instant::now();
        let done = engine.step(sessions, &mut control, &mut |i, row, logits| {
            running.borrow_mut()[i].take_logits(kernels, row, logits, context);
        });
        let time = start.elapsed();
        match done {
            Ok(()) => {
                let accepted = self.settle();
                self.pace.note(prompt, answers, time);
                if answers == 1 && prompt == 0 {
                    self.drafts.note(drafted, accepted, time);
                }
            }
            Err(EngineError::Cancelled) => {}
            Err(error) if in_step.len() == 1 => {
                let failed = self.running.iter_mut().find(|active| active.id == in_step[0]);
                if let Some(active) = failed {
                    active.end = Some(Err(error));
                }
            }
            Err(_) => self.alone.extend(in_step),
        }
        true
    }

    /// After a step: takes back guesses that were wrong, tells how far prompts are. Returns how many guesses were
    /// right.
    fn settle(&mut self) -> usize {
        let mut accepted = 0;
        for (active, session) in self.running.iter_mut().zip(&mut self.sessions) {
            if active.answered() > 0 {
                let drafted = active.draft.len();
                let keep = session.len().min(active.tokens.len() - 1);
                accepted += drafted - (session.len() - keep).min(drafted);
                self.engine.truncate(session, keep);
            } else {
                active.tell_prefill(session.len());
            }
        }
        accepted
    }

    /// Lets go of the jobs that have ended.
    fn end_jobs(&mut self) {
        for active in self.waiting.iter_mut().chain(&mut self.running) {
            if active.is_cancelled() {
                active.end.get_or_insert(Ok(Finish::Stopped));
            }
        }
        let mut i = 0;
        while i < self.running.len() {
            if self.running[i].end.is_some() {
                let active = self.running.remove(i);
                // What made a number that is none must not be found again.
                let keep = !matches!(active.end, Some(Err(EngineError::NotFinite { .. })));
                self.engine.close(self.sessions.remove(i), keep);
                self.alone.retain(|id| *id != active.id);
                tell_end(active);
            } else {
                i += 1;
            }
        }
        while let Some(i) = self.waiting.iter().position(|active| active.end.is_some()) {
            self.waiting.remove(i).into_iter().for_each(tell_end);
        }
    }
}

/// Ends every job as [`Finish::Stopped`]; what all of them computed is brought to the file.
impl Drop for Scheduler {
    fn drop(&mut self) {
        for active in self.waiting.iter_mut().chain(&mut self.running) {
            active.end.get_or_insert(Ok(Finish::Stopped));
        }
        self.end_jobs();
        // Nobody is left to hear of a failure; it costs a prefill one day.
        let _ = self.engine.flush_conversations();
    }
}

/// Jobs at once, by the ring.
fn suggested(engine: &Engine) -> usize {
    let (plan, spec) = (engine.plan(), engine.spec());
    let token = spec.moe_layers().count() * spec.moe.top_k;
    if plan.holds_all() { plan.sessions } else { plan.ring_slots / (RING_TOKENS * token.max(1)) }
}

/// Blocks that a job inside may still take.
fn still_to_take((active, session): (&Active, &Session)) -> usize {
    let left = active.job.limits.max_tokens.saturating_sub(active.answered()).min(ANSWER_ROOM);
    (active.tokens.len() + left).div_ceil(BLOCK).saturating_sub(session.len().div_ceil(BLOCK))
}

fn tell_end(mut active: Active) {
    let result = active.end.unwrap_or(Ok(Finish::Stopped));
    // Nothing can be stopped any more.
    let _ = active.job.sink.event(Event::End(Ended { result, usage: active.usage }));
}

impl Driver for Scheduler {
    fn submit(&mut self, job: Job) -> Result<JobId, EngineError> {
        let active = self.new_active(job)?;
        let id = active.id;
        self.waiting.push_back(active);
        Ok(id)
    }

    fn step(&mut self) -> bool {
        self.end_jobs();
        self.admit();
        self.compose();
        self.make_room();
        let computed = self.compute();
        self.end_jobs();
        let blocks = if computed { SAVE_BLOCKS } else { 4 * SAVE_BLOCKS };
        // A file that fails is given up; conversations are then kept in memory only.
        let more = self.engine.save_conversations(blocks).unwrap_or(false);
        computed || more || !self.running.is_empty() || !self.waiting.is_empty()
    }

    fn load(&self) -> Load {
        let usage = self.engine.kv_usage();
        let prefilling = self.running.iter().filter(|active| active.answered() == 0).count();
        Load {
            running: self.running.len(),
            prefilling,
            queued: self.waiting.len(),
            max_running: self.max_running,
            max_queued: self.options.max_queued,
            kv_blocks: usage.blocks,
            kv_used: usage.held,
            kv_cached: usage.cached,
            kv_block_tokens: BLOCK,
            context: self.engine.plan().context,
        }
    }
}
