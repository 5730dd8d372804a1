//! Many conversations at once: each step carries the next token of every one that is being answered, and a part of a
//! prompt, so that an expert which several need is read once.
//!
//! - *Order*: jobs are let in first come, first served. Every prompt that was let in advances in every part, a short one
//!   most (`share.rs` states the bound); while others are being answered, in parts that keep the step short, and
//!   answering gets as much time as prompts took (`pace.rs`).
//! - *Room*: a job is let in when the cache has room for what is new of its prompt and for the beginning of an answer.
//!   Should the room not suffice later, the youngest job goes back to the queue; what it computed is found again when it
//!   returns.
//! - *Sharing*: a prompt goes on from the longest beginning that any earlier job computed; what of it is in the file is
//!   read a few blocks a step, while others go on.
//! - *Failure*: when a step fails, its jobs go on one at a time, so that only those fail that cannot go on.
//!
//! What a job gets does not depend on the others. A step that only answers allocates nothing.

mod draft;
mod pace;
mod share;
#[cfg(test)]
mod tests;

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
use share::{Share, deal};

/// How a scheduler works.
#[derive(Clone, Debug)]
pub struct SchedulerOptions {
    /// The most jobs that wait. 0: a job is refused unless it can be let in now.
    pub max_queued: usize,
    /// Aimed at as the longest wait for a token while a prompt is computed.
    pub stall: Duration,
    /// Jobs at once, instead of what the ring suggests; never more than sessions were planned for.
    pub at_once: Option<usize>,
    /// Guess tokens that follow in the prompt or the answer, and check several in one step, while that pays.
    pub speculate: bool,
    /// File of the cache; none also leaves the engine the one that it has.
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
/// Blocks read from the file in a step, each reader thread's two; and four times as many while nobody is being answered.
const LOAD_BLOCKS: usize = 8;
/// The most that is waited for the file when there is nothing else to do.
const IDLE_WAIT: Duration = Duration::from_millis(200);
/// The most that is waited for the file when a scheduler goes.
const CLOSE: Duration = Duration::from_secs(5);

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
    /// It holds what was known of its tokens; until then that is being looked for and read.
    adopted: bool,
    /// Tokens guessed to follow, which the running step checks.
    draft: Vec<u32>,
    /// It is looking for the first time.
    is_new: bool,
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

    /// Whether it lacks nothing but the token that was said last.
    fn is_answering(&self, session: &Session) -> bool {
        self.adopted && self.answered() > 0 && session.len() + 1 == self.tokens.len()
    }

    /// Positions that it will have, as far as is looked ahead.
    fn expected_len(&self, context: usize) -> usize {
        let left = self.job.limits.max_tokens.saturating_sub(self.answered()).min(ANSWER_ROOM);
        (self.tokens.len() + left).min(context.max(self.tokens.len()))
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
    /// Jobs of the running step.
    in_step: Vec<JobId>,
    /// Positions that each session held before it, and those that it computes.
    before: Vec<(usize, usize)>,
    shares: Vec<Share>,
    next_id: u64,
    pace: Pace,
    drafts: Drafts,
    counts: Counts,
    /// Why there is no file although one was asked for.
    warning: Option<EngineError>,
    is_closed: bool,
}

/// Counts since the start.
#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    guessed: u64,
    accepted: u64,
    sent_back: u64,
}

impl std::fmt::Debug for Scheduler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Scheduler").field("load", &self.load()).finish_non_exhaustive()
    }
}

impl Scheduler {
    /// A scheduler of as many jobs at once as the engine was planned for sessions, fewer on a small ring.
    ///
    /// A file of the cache that cannot be used is no error: conversations are then kept in memory only, and
    /// [`Driver::take_warning`] says why. Who wants to know before the engine is loaded calls [`Engine::spill_to`].
    ///
    /// # Errors
    /// None so far.
    pub fn new(mut engine: Engine, options: SchedulerOptions) -> Result<Self, EngineError> {
        let warning = options.spill.as_ref().and_then(|spill| engine.spill_to(spill).err());
        let (chunk, sessions) = (engine.plan().chunk, engine.plan().sessions);
        Ok(Self {
            pace: Pace::new(options.stall, chunk),
            engine,
            options,
            waiting: VecDeque::new(),
            running: Vec::with_capacity(sessions),
            sessions: Vec::with_capacity(sessions),
            alone: VecDeque::new(),
            step: Composed::default(),
            in_step: Vec::with_capacity(sessions),
            before: Vec::with_capacity(sessions),
            shares: Vec::with_capacity(sessions),
            next_id: 1,
            drafts: Drafts::default(),
            counts: Counts::default(),
            warning,
            is_closed: false,
        })
    }

    /// Jobs at once, as the ring is now: it shrinks while the machine's memory is short. Those that are inside stay.
    fn max_running(&self) -> usize {
        let plan = self.engine.plan();
        let most = self.options.at_once.unwrap_or_else(|| suggested(&self.engine));
        most.min(plan.sessions).min(plan.chunk / 2).max(1)
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
        let id = JobId(self.next_id);
        self.next_id += 1;
        let prompt_len = job.prompt.len();
        let mut tokens = std::mem::take(&mut job.prompt);
        tokens.reserve_exact(job.limits.max_tokens.min(plan.context + 1 - prompt_len));
        Ok(Active {
            id,
            tokens,
            prompt_len,
            usage: Usage { prompt: prompt_len, ..Usage::default() },
            job,
            sampler: None,
            submitted: Instant::now(),
            begun: None,
            first: None,
            adopted: false,
            draft: Vec::with_capacity(draft::MOST),
            is_new: false,
            refuted: false,
            end: None,
        })
    }

    /// Blocks that a job needs and the jobs inside do not hold, nor are about to: beside the first so many of them.
    fn lacks(&self, active: &Active, held: usize, inside: usize) -> usize {
        let expected = active.expected_len(self.engine.plan().context).div_ceil(BLOCK);
        let shared = |j| self.shared(&active.tokens, j) / BLOCK;
        let shared = if active.adopted { 0 } else { (0..inside).map(shared).max().unwrap_or(0) };
        expected.saturating_sub(shared.max(held.div_ceil(BLOCK)))
    }

    /// How many of those that wait, and of `more` behind them, can be let in now.
    fn admissible(&self, more: &[Active]) -> usize {
        let inside = self.running.len();
        let free = self.max_running().saturating_sub(inside);
        if free == 0 || (self.waiting.is_empty() && more.is_empty()) {
            return 0;
        }
        let jobs = self.running.iter().zip(&self.sessions).enumerate();
        // What those inside may still take.
        let mut promised: usize =
            jobs.map(|(i, (active, session))| self.lacks(active, session.len(), i)).sum();
        let available = self.engine.kv_available();
        let mut n = 0;
        for active in self.waiting.iter().chain(more).take(free) {
            // One more, as a block that is shared in part is copied.
            promised += self.lacks(active, 0, inside) + 1;
            if promised > available && inside + n > 0 {
                break;
            }
            n += 1;
        }
        n
    }

    /// Lets jobs in, as far as there is room.
    fn admit(&mut self) {
        while self.admissible(&[]) > 0 {
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

    /// Says what the step computes: a token of every job that is being answered, and a part of the prompts.
    fn compose(&mut self) {
        let Self { alone, running, sessions, .. } = self;
        alone.retain(|id| running.iter().any(|active| active.id == *id));
        let alone = alone.pop_front();
        let takes_part = |active: &Active| active.end.is_none() && alone.is_none_or(|id| id == active.id);
        self.step = Composed::default();
        let (mut answering, mut prompts) = (0, 0);
        for (active, session) in running.iter_mut().zip(&mut *sessions) {
            session.queue(&[], 0);
            active.draft.clear();
            active.refuted = false;
            if takes_part(active) {
                let is_answering = active.is_answering(session);
                answering += usize::from(is_answering);
                prompts += usize::from(!is_answering);
            }
        }
        if prompts > 0 {
            self.load_known(LOAD_BLOCKS * if answering == 0 { 4 } else { 1 }, &takes_part);
        }
        let plan = self.engine.plan();
        let Self { running, sessions, shares, .. } = self;
        let (context, chunk) = (plan.context, plan.chunk);
        // A state that has seen a guess cannot take it back.
        let takes_back = self.engine.spec().delta.is_none();
        let drafts =
            answering == 1 && prompts == 0 && alone.is_none() && self.options.speculate && takes_back;
        shares.clear();
        for (job, (active, session)) in running.iter_mut().zip(&mut *sessions).enumerate() {
            if !takes_part(active) || !active.adopted {
                continue;
            }
            let rest = &active.tokens[session.len()..];
            if !active.is_answering(session) {
                shares.push(Share { job, lacks: rest.len(), takes: 0 });
                continue;
            }
            session.queue(rest, 1);
            self.step.answers += 1;
            if drafts {
                let room = context.saturating_sub(active.tokens.len()).min(chunk - 1);
                let left = active.job.limits.max_tokens.saturating_sub(active.answered() + 1).min(room);
                self.drafts.draft(&active.tokens, left, &mut active.draft);
                session.queue_guesses(&active.draft);
            }
            let goes_on = active.answered() + 1 < active.job.limits.max_tokens;
            if goes_on && active.job.constraint.is_none() && active.job.sampling.is_greedy() {
                session.expect_likeliest();
            }
        }
        let budget = self.pace.prompt_tokens(self.step.answers);
        if budget == 0 || shares.is_empty() {
            return;
        }
        deal(budget, shares);
        for share in &*shares {
            let session = &mut sessions[share.job];
            let rest = &running[share.job].tokens[session.len()..];
            session.queue(&rest[..share.takes], usize::from(share.takes == rest.len()));
            self.step.prompt += share.takes;
        }
    }

    /// Goes on with looking for what is known of prompts, and reading it: about `most` blocks, as many for each.
    fn load_known(&mut self, most: usize, takes_part: &dyn Fn(&Active) -> bool) {
        let looks = |this: &Self, i: usize| {
            let active = &this.running[i];
            takes_part(active)
                && !active.adopted
                && !(0..i).any(|j| takes_part(&this.running[j]) && this.awaits(i, j))
        };
        let jobs = (0..self.running.len()).filter(|&i| looks(self, i)).count();
        for i in 0..self.running.len() {
            if !looks(self, i) {
                continue;
            }
            let (active, session) = (&mut self.running[i], &mut self.sessions[i]);
            let now = Instant::now();
            let adopted = self.engine.adopt_some(session, &active.tokens, (most / jobs).max(1));
            active.adopted = adopted.is_done;
            let is_first = active.begun.is_none();
            if is_first {
                active.begun = Some(now);
                active.usage.queued = now - active.submitted;
            }
            active.is_new |= is_first;
            if active.is_new {
                active.usage.cached = adopted.held.min(active.prompt_len);
            }
            if active.adopted {
                active.is_new = false;
                active.tell_prefill(adopted.held);
            }
        }
    }

    /// Leading tokens that the `j`-th job holds, or will hold before one with these tokens goes on. None of a model with
    /// states: which of them will have a snapshot is not known before.
    fn shared(&self, tokens: &[u32], j: usize) -> usize {
        if self.engine.spec().delta.is_some() {
            return 0;
        }
        let other = &self.running[j].tokens;
        let common = tokens.iter().zip(other).take_while(|(a, b)| a == b).count() / BLOCK * BLOCK;
        if 2 * common >= tokens.len() { common } else { common.min(self.sessions[j].len() / BLOCK * BLOCK) }
    }

    /// Whether the `i`-th job had better wait for what the `j`-th is about to compute: most of its prompt, of which the
    /// other does not hold all yet.
    fn awaits(&self, i: usize, j: usize) -> bool {
        let other = &self.sessions[j];
        !self.running[j].is_answering(other) && self.shared(&self.running[i].tokens, j) > other.len()
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
                self.counts.sent_back += 1;
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
        active.is_new = false;
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
        let Self { engine, running, sessions, in_step, before, .. } = self;
        let (kernels, context) = (engine.kernels(), engine.plan().context);
        in_step.clear();
        in_step.extend(running.iter().zip(&*sessions).filter(|(_, s)| s.queued() > 0).map(|(a, _)| a.id));
        let drafted = running.iter().map(|active| active.draft.len()).sum::<usize>();
        let Composed { prompt, answers } = self.step;
        before.clear();
        before.extend(sessions.iter().map(|s| (s.len(), s.queued())));
        let running = RefCell::new(running);
        let all_cancelled = || {
            let running = running.try_borrow();
            running.is_ok_and(|r| {
                r.iter().filter(|a| in_step.contains(&a.id)).all(|a| a.is_cancelled() || a.end.is_some())
            })
        };
        let mut progress = |done: usize, total: usize| {
            // A step of prompts alone is long: its layers tell how far it is.
            for (active, (held, queued)) in running.borrow_mut().iter_mut().zip(&*before) {
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
                self.counts.guessed += drafted as u64;
                self.counts.accepted += accepted as u64;
                if answers == 1 && prompt == 0 {
                    self.drafts.note(drafted, accepted, time);
                }
            }
            Err(EngineError::Cancelled) => {}
            Err(error) if self.in_step.len() == 1 => {
                let failed = self.running.iter_mut().find(|active| active.id == self.in_step[0]);
                if let Some(active) = failed {
                    active.end = Some(Err(error));
                }
            }
            Err(_) => self.alone.extend(&self.in_step),
        }
        true
    }

    /// After a step: takes back guesses that were wrong, tells how far prompts are. Returns how many guesses were
    /// right.
    fn settle(&mut self) -> usize {
        let mut accepted = 0;
        let jobs = self.running.iter_mut().zip(&mut self.sessions).zip(&self.before);
        for ((active, session), (_, queued)) in jobs {
            // Who was sent back and reads its beginning again was in no step.
            if active.answered() > 0 && *queued > 0 {
                let drafted = active.draft.len();
                let keep = session.len().min(active.tokens.len() - 1);
                accepted += drafted - (session.len() - keep).min(drafted);
                self.engine.truncate(session, keep);
            } else if *queued > 0 {
                active.tell_prefill(session.len());
            }
            if let Some(position) = session.broken {
                active.end = Some(Err(EngineError::NotFinite { position }));
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

/// As [`Driver::close`], within some seconds.
impl Drop for Scheduler {
    fn drop(&mut self) {
        if !self.is_closed {
            self.close(CLOSE);
        }
    }
}

/// Jobs at once, by the ring.
fn suggested(engine: &Engine) -> usize {
    let (plan, spec) = (engine.plan(), engine.spec());
    let token = spec.moe_layers().count() * spec.moe.top_k;
    if engine.holds_all() { plan.sessions } else { engine.ring_limit() / (RING_TOKENS * token.max(1)) }
}

fn tell_end(mut active: Active) {
    let result = active.end.unwrap_or(Ok(Finish::Stopped));
    // Of what it had not come to the end of.
    match (active.begun, active.first) {
        (None, _) => active.usage.queued = active.submitted.elapsed(),
        (Some(begun), None) => active.usage.prefill = begun.elapsed(),
        _ => {}
    }
    // Nothing can be stopped any more.
    let _ = active.job.sink.event(Event::End(Ended { result, usage: active.usage }));
}

impl Driver for Scheduler {
    fn submit(&mut self, job: Job) -> Result<JobId, EngineError> {
        let ids = self.submit_all(vec![job])?;
        Ok(ids[0])
    }

    fn submit_all(&mut self, jobs: Vec<Job>) -> Result<Vec<JobId>, EngineError> {
        let new = jobs.into_iter().map(|job| self.new_active(job)).collect::<Result<Vec<_>, _>>()?;
        if self.waiting.len() + new.len() > self.options.max_queued + self.admissible(&new) {
            let queued = self.waiting.len() - self.admissible(&[]);
            return Err(EngineError::QueueFull { queued });
        }
        let ids = new.iter().map(|active| active.id).collect();
        self.waiting.extend(new);
        Ok(ids)
    }

    fn step(&mut self) -> bool {
        self.end_jobs();
        self.admit();
        self.compose();
        self.make_room();
        let computed = self.compute();
        self.end_jobs();
        let more = self.engine.save_conversations(if computed { SAVE_BLOCKS } else { 4 * SAVE_BLOCKS });
        if computed || !self.running.is_empty() || !self.waiting.is_empty() {
            return true;
        }
        // A drive that stands still is left alone until there is something else to do.
        more && self.engine.wait_for_file(IDLE_WAIT)
    }

    fn load(&self) -> Load {
        let usage = self.engine.kv_usage();
        let prefilling = self.running.iter().filter(|active| active.answered() == 0).count();
        Load {
            running: self.running.len(),
            prefilling,
            queued: self.waiting.len(),
            max_running: self.max_running(),
            max_queued: self.options.max_queued,
            guessed: self.counts.guessed,
            accepted: self.counts.accepted,
            sent_back: self.counts.sent_back,
            kv_blocks: usage.blocks,
            kv_used: usage.held,
            kv_cached: usage.cached,
            kv_window_blocks: usage.window_blocks,
            kv_window_used: usage.window_held,
            kv_block_tokens: BLOCK,
            kv_has_file: usage.has_file,
            kv_file_failures: usage.file_failures,
            kv_lost: usage.lost,
            kv_states_lost: usage.lost_states,
            context: self.engine.plan().context,
        }
    }

    fn take_warning(&mut self) -> Option<EngineError> {
        self.warning.take().or_else(|| self.engine.take_warning())
    }

    fn close(&mut self, limit: Duration) -> usize {
        for active in self.waiting.iter_mut().chain(&mut self.running) {
            active.end.get_or_insert(Ok(Finish::Stopped));
        }
        self.end_jobs();
        self.is_closed = true;
        self.engine.flush_conversations(limit)
    }
}
