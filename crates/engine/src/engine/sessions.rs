//! Sessions: what they hold, how they are brought further, and where that is kept.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use smoe_meter::Phase;
use smoe_store::{BlockFileSnapshot, FileDisk};

use super::{Control, Engine, Fallback, Finish, Limits, READERS, is_finite};
use crate::EngineError;
use crate::backend::cpu::CpuBackend;
use crate::kv::{Adopted, KvUse, Opened, SpillConfig};
use crate::sampler::Sampler;
use crate::session::{Session, Synced, reusable};
use crate::weights::Weights;

impl Engine {
    /// Starts a session.
    ///
    /// # Errors
    /// If as many are open as were planned for.
    pub fn open_session(&mut self) -> Result<Session, EngineError> {
        while let Some(seq) = self.dropped.take() {
            self.kv.close(seq);
        }
        self.alone = None;
        Ok(Session {
            seq: self.kv.open()?,
            tokens: Vec::with_capacity(self.plan.context),
            logits: vec![0.0; self.spec.vocab_size],
            pending: Vec::with_capacity(self.plan.chunk),
            wanted: 0,
            guesses: 0,
            is_answering: false,
            answer: None,
            likely: false,
            shared: false,
            broken: None,
            is_open: true,
            losses: self.losses,
            dropped: self.dropped.clone(),
        })
    }

    /// Brings a session to exactly `tokens`: what it holds of them is reused, what goes beyond is dropped,
    /// the rest is computed. Afterwards [`Session::logits`] are those after the last token.
    ///
    /// When cancelled or failed, the steps that were finished are kept: calling again goes on from there.
    ///
    /// # Errors
    /// If `tokens` is empty, too long, or holds an unknown id; if a read fails; if cancelled.
    ///
    /// # Panics
    /// If the session is another engine's.
    pub fn sync(
        &mut self,
        session: &mut Session,
        tokens: &[u32],
        control: &mut Control<'_>,
    ) -> Result<Synced, EngineError> {
        self.check_owner(session);
        self.check_tokens(tokens)?;
        if self.is_lost(session) {
            session.tokens.clear();
            session.losses = self.losses;
        }
        let reused = self.kv.truncate(session.seq, reusable(&session.tokens, tokens));
        if reused < session.tokens.len() {
            self.alone = None;
        }
        session.tokens.truncate(reused);
        session.is_answering = false;
        let total = tokens.len() - reused;
        let mut done = 0;
        for chunk in tokens[reused..].chunks(self.plan.chunk) {
            let last = done + chunk.len() == total;
            session.queue(chunk, usize::from(last));
            self.prefilled = (done, total);
            self.step_one(session, control)?;
            done += chunk.len();
            control.report(done, total);
        }
        Ok(Synced { reused, prefilled: total })
    }

    /// Appends one token. Afterwards [`Session::logits`] are those after it.
    ///
    /// # Errors
    /// If the context is full, the id unknown, or a read fails; if cancelled: the token is not appended then. If
    /// the logits are not finite; it is then.
    ///
    /// # Panics
    /// If the session is another engine's.
    pub fn decode(
        &mut self,
        session: &mut Session,
        token: u32,
        control: &mut Control<'_>,
    ) -> Result<(), EngineError> {
        self.decode_before(session, token, false, control)
    }

    /// The same, saying whether the next one will be, in all likelihood, that with the largest logit.
    fn decode_before(
        &mut self,
        session: &mut Session,
        token: u32,
        likeliest: bool,
        control: &mut Control<'_>,
    ) -> Result<(), EngineError> {
        self.check_id(token)?;
        if session.tokens.len() >= self.plan.context {
            let (needed, context) = (session.tokens.len() + 1, self.plan.context);
            return Err(EngineError::ContextFull { needed, context });
        }
        session.queue(&[token], 1);
        if likeliest {
            session.expect_likeliest();
        }
        self.step_one(session, control)
    }

    /// A step of what one session has queued, its last logits kept in it.
    fn step_one(&mut self, session: &mut Session, control: &mut Control<'_>) -> Result<(), EngineError> {
        let mut logits = std::mem::take(&mut session.logits);
        let mut keep = |_: usize, _: usize, row: &[f32]| logits.copy_from_slice(row);
        let wanted = session.wanted > 0;
        let done = self.step_queued(std::slice::from_mut(session), control, &mut keep);
        session.logits = logits;
        done?;
        if wanted && !is_finite(&session.logits) {
            return Err(EngineError::NotFinite { position: session.tokens.len() - 1 });
        }
        Ok(())
    }

    /// One step of what all these sessions have queued ([`Session::queue`]): one forward, in which an expert that
    /// several need is read once. Calls `on_logits(session, row, logits)` for every row whose logits were asked for,
    /// in order, the rows of a session counted from the first that was. No session's result depends on the others.
    ///
    /// # Errors
    /// If a read or the backend fails or it is cancelled; if there is no room in the cache or more is queued than a step
    /// takes. What was queued is then forgotten, and every session holds what it held before, also if some logits have
    /// been told.
    ///
    /// # Panics
    /// If a session is another engine's.
    pub fn step(
        &mut self,
        sessions: &mut [Session],
        control: &mut Control<'_>,
        on_logits: &mut dyn FnMut(usize, usize, &[f32]),
    ) -> Result<(), EngineError> {
        self.prefilled = (0, sessions.iter().map(|session| session.pending.len()).sum());
        self.step_queued(sessions, control, on_logits)
    }

    fn step_queued(
        &mut self,
        sessions: &mut [Session],
        control: &mut Control<'_>,
        on_logits: &mut dyn FnMut(usize, usize, &[f32]),
    ) -> Result<(), EngineError> {
        let mut told = false;
        let mut tell = |session: usize, row: usize, logits: &[f32]| {
            told = true;
            on_logits(session, row, logits);
        };
        let mut done = self.compute(sessions, control, &mut tell);
        if done.is_err() && !told {
            done = match self.unless_lost(done) {
                Ok(Some(())) => Ok(()),
                Ok(None) => self.compute(sessions, control, on_logits),
                Err(error) => Err(error),
            };
        }
        if let Err(error) = done {
            self.alone = None;
            self.kv.begin_step();
            for session in sessions {
                // Who was not in the step has nothing to take back, and may hold a beginning of which only a part was read.
                let was_in_step = !session.pending.is_empty();
                session.queue(&[], 0);
                if was_in_step && !self.is_lost(session) {
                    let held = self.kv.truncate(session.seq, session.tokens.len());
                    session.tokens.truncate(held);
                }
                session.broken = session.broken.filter(|&position| position < session.tokens.len());
            }
            return Err(error);
        }
        self.end_step();
        for session in &mut *sessions {
            let is_prompt = session.queued() > 0 && session.queues_prompt();
            session.tokens.append(&mut session.pending);
            if is_prompt {
                session.answer = (session.wanted > 0).then_some(session.tokens.len());
            }
            // Rows whose logits are wanted, but the last, may be taken back.
            if session.shared && session.broken.is_none() && session.wanted <= 1 {
                self.kv.commit(session.seq, &session.tokens);
            }
            self.kv.slide(session.seq, session.tokens.len());
            session.is_answering = session.wanted > 0;
            session.wanted = 0;
        }
        Ok(())
    }

    /// The step itself: what a lost device held is computed first.
    fn compute(
        &mut self,
        sessions: &mut [Session],
        control: &mut Control<'_>,
        on_logits: &mut dyn FnMut(usize, usize, &[f32]),
    ) -> Result<(), EngineError> {
        sessions.iter_mut().try_for_each(|session| self.restore(session, control))?;
        self.place(sessions)?;
        self.run_step(control, None)?;
        self.look_for_numbers(sessions)?;
        self.tell_logits(sessions, on_logits)
    }

    /// Whether what a session held was lost with a device.
    const fn is_lost(&self, session: &Session) -> bool {
        session.losses != self.losses
    }

    /// Computes again what a session held on a device that was lost.
    fn restore(&mut self, session: &mut Session, control: &mut Control<'_>) -> Result<(), EngineError> {
        if !self.is_lost(session) {
            return Ok(());
        }
        let held = std::mem::take(&mut session.tokens);
        let (queued, wanted) = (std::mem::take(&mut session.pending), session.wanted);
        let (is_answering, guesses) = (session.is_answering, session.guesses);
        // Where the answer began is a place to go back to, as before.
        let (prompt, answer) = held.split_at(session.answer.unwrap_or(held.len()).min(held.len()));
        let most = self.plan.chunk;
        let of_answer = answer.chunks(most).map(|chunk| (chunk, true));
        let mut chunks = prompt.chunks(most).map(|chunk| (chunk, false)).chain(of_answer);
        let done = chunks.try_for_each(|(chunk, is_answer)| {
            session.queue_again(chunk, is_answer);
            self.place(std::slice::from_ref(session))?;
            self.run_step(control, None)?;
            session.tokens.append(&mut session.pending);
            self.end_step();
            if session.shared && session.broken.is_none() {
                self.kv.commit(session.seq, &session.tokens);
            }
            // Windows have no more room than for what is seen.
            self.kv.slide(session.seq, session.tokens.len());
            Ok(())
        });
        session.queue(&queued, wanted);
        (session.is_answering, session.guesses) = (is_answering, guesses);
        match done {
            Ok(()) => session.losses = self.losses,
            // From the beginning, next time.
            Err(_) => {
                self.kv.truncate(session.seq, 0);
                session.tokens = held;
            }
        }
        done
    }

    /// Goes on without the device: on the processor, with keys and values of nothing.
    pub(super) fn leave_device(&mut self, fallback: &Fallback, why: String) -> Result<(), EngineError> {
        let Fallback { vault, disk, exact } = fallback;
        let backbone = FileDisk::open(&vault.backbone_path, *disk)?;
        let weights = Weights::load(vault, &backbone, READERS)?;
        let (spec, tables) = (vault.spec.clone(), &vault.experts.layers);
        self.backend = Box::new(CpuBackend::new(spec, weights, tables, &self.plan, self.kernels, *exact));
        self.kv.leave_device();
        (self.on_device, self.all_on_device, self.alone) = (false, false, None);
        self.losses += 1;
        self.device_note = Some(format!("on the processor: {why}"));
        self.warning = Some(EngineError::DeviceLost { why });
        Ok(())
    }

    /// Gives an empty session the longest beginning of `tokens`, short of the last one, that an earlier session
    /// computed and that is still in the cache or its file, and returns its length; from here on what it computes
    /// can be found by others.
    ///
    /// # Panics
    /// If the session is another engine's, or not empty.
    pub fn adopt(&mut self, session: &mut Session, tokens: &[u32]) -> usize {
        assert!(session.is_empty(), "only an empty session adopts");
        self.adopt_some(session, tokens, usize::MAX).held
    }

    /// As [`Self::adopt`], but reads about so many `blocks` of the file and no more: to be called again, with the same
    /// tokens, until it is done.
    ///
    /// # Panics
    /// If the session is another engine's, or holds anything that it has not adopted.
    pub fn adopt_some(&mut self, session: &mut Session, tokens: &[u32], blocks: usize) -> Adopted {
        self.check_owner(session);
        self.alone = None;
        session.shared = true;
        if self.is_lost(session) {
            session.tokens.clear();
            session.losses = self.losses;
        }
        let known = &tokens[..tokens.len().saturating_sub(1)];
        let adopted = self.kv.adopt_some(session.seq, known, blocks);
        session.is_answering = false;
        session.tokens.clear();
        session.tokens.extend_from_slice(&known[..adopted.held]);
        adopted
    }

    /// Makes room in the cache for what a session has queued.
    ///
    /// # Errors
    /// If there is not enough; nothing is taken then.
    pub fn reserve(&mut self, session: &Session) -> Result<(), EngineError> {
        let held = session.tokens.len();
        self.kv.reserve(session.seq, held, held + session.pending.len())
    }

    /// Takes back all but the first `len` tokens of a session.
    pub fn truncate(&mut self, session: &mut Session, len: usize) {
        let mut len = len.min(session.tokens.len());
        if !self.is_lost(session) {
            len = self.kv.truncate(session.seq, len);
        }
        if len < session.tokens.len() {
            self.alone = None;
        }
        session.tokens.truncate(len);
        session.answer = session.answer.filter(|&at| at <= len);
        session.broken = session.broken.filter(|&position| position < len);
    }

    /// Ends a session. What it computed can still be found if it has ever adopted; its end, if `keep` says so.
    pub fn close(&mut self, mut session: Session, keep: bool) {
        self.check_owner(&session);
        self.alone = None;
        if session.shared && keep && session.broken.is_none() && !self.is_lost(&session) {
            self.kv.commit_all(session.seq, &session.tokens);
        }
        self.kv.close(session.seq);
        session.is_open = false;
    }

    /// Keeps what sessions computed in a file too, and finds what is there from earlier. If the file cannot be used, the
    /// engine goes on without.
    ///
    /// # Errors
    /// As [`smoe_store::BlockFile::open`].
    pub fn spill_to(&mut self, config: &SpillConfig) -> Result<Opened, EngineError> {
        let model = self.fingerprint;
        self.kv.spill_to(config, model)
    }

    /// Queues a few blocks of the cache for its file, without waiting; true if more are left. To be called after each
    /// step: the next one may then wait for the file again, within a bound, when room is short.
    pub fn save_conversations(&mut self, blocks: usize) -> bool {
        self.kv.end_step();
        self.kv.save(blocks)
    }

    /// Waits until the file of the cache has written something, but not for longer than `limit`; false if that passed or
    /// there is no file.
    pub fn wait_for_file(&mut self, limit: Duration) -> bool {
        self.kv.wait_for_file(limit)
    }

    /// Brings everything to the file of the cache, and waits until the drive has it, but not for longer than `limit`.
    /// Returns how many blocks the file may lack; it is then closed.
    pub fn flush_conversations(&mut self, limit: Duration) -> usize {
        self.kv.flush(limit)
    }

    /// What went wrong and was got over, if that was not told yet: that a device was lost
    /// ([`EngineError::DeviceLost`]); the first failure of the file of the cache ([`EngineError::Spill`]), and that it is
    /// given up ([`EngineError::SpillGivenUp`]).
    pub fn take_warning(&mut self) -> Option<EngineError> {
        self.warning.take().or_else(|| self.kv.take_warning())
    }

    /// Blocks of the KV cache, by what they are used for.
    #[must_use]
    pub fn kv_usage(&self) -> KvUse {
        self.kv.usage()
    }

    /// Blocks that another session could get.
    #[must_use]
    pub fn kv_available(&self) -> usize {
        self.kv.available()
    }

    /// Counts of the file of the cache, if there is one.
    #[must_use]
    pub fn spilled(&self) -> Option<BlockFileSnapshot> {
        self.kv.spilled()
    }

    /// Draws from [`Session::logits`].
    pub fn sample(&mut self, session: &Session, sampler: &mut Sampler) -> u32 {
        let start = Instant::now();
        let token = sampler.sample(self.kernels, &session.logits);
        let time = start.elapsed();
        self.clock.charge(Phase::Sampling, time);
        if let Some(step) = self.steps.last_mut() {
            step.phases.charge(Phase::Sampling, time);
        }
        token
    }

    /// Generates from where [`Self::sync`] left the session, telling `on_token` each new token as it comes,
    /// an end token included. The last token told is not in the session yet: the next `sync` computes it.
    /// A cancellation ends it as [`Finish::Stopped`].
    ///
    /// # Errors
    /// If a read fails.
    pub fn generate(
        &mut self,
        session: &mut Session,
        sampler: &mut Sampler,
        limits: &Limits,
        control: &mut Control<'_>,
        on_token: &mut dyn FnMut(u32) -> ControlFlow<()>,
    ) -> Result<Finish, EngineError> {
        for n in 1..=limits.max_tokens {
            let token = self.sample(session, sampler);
            let flow = on_token(token);
            if limits.end_tokens.contains(&token) {
                return Ok(Finish::End);
            }
            if flow.is_break() {
                return Ok(Finish::Stopped);
            }
            if n == limits.max_tokens {
                break;
            }
            if session.tokens.len() >= self.plan.context {
                return Ok(Finish::ContextFull);
            }
            let likeliest = n + 1 < limits.max_tokens && sampler.sampling().is_greedy();
            match self.decode_before(session, token, likeliest, control) {
                Err(EngineError::Cancelled) => return Ok(Finish::Stopped),
                result => result?,
            }
        }
        Ok(Finish::Length)
    }
}

/// What a device said that can do no more.
#[cfg(feature = "gpu")]
pub(super) fn device_failure(error: &EngineError) -> Option<String> {
    match error {
        EngineError::Gpu(error) => Some(error.to_string()),
        #[cfg(feature = "cuda")]
        EngineError::Cuda(error) => Some(error.to_string()),
        _ => None,
    }
}

/// No device, no failure.
#[cfg(not(feature = "gpu"))]
pub(super) const fn device_failure(_error: &EngineError) -> Option<String> {
    None
}
