//! One step: the forward of all layers for the tokens that sessions have queued.

use std::sync::Arc;

use smoe_format::{ExpertKey, FfnKind};
use smoe_meter::{Phase, Step};
use smoe_store::{Order, StoreError, Want};

use super::{Control, Engine, Observer};
use crate::EngineError;
use crate::backend::cpu::CALL_EXPERTS;
use crate::backend::{Advanced, Follows, HEAD_ROWS, Row, SharedObserver};
use crate::kv::BLOCK;
use crate::session::Session;

/// Steps whose figures are kept: some minutes of decoding.
pub(super) const STEPS: usize = 4096;
/// A whole layer is read ahead if the step needs this share of the experts of the layer before: what is read
/// in vain then costs less than the disk's idle time while the backend computes.
const SWEEP_SHARE: f64 = 0.9;
/// A step of so many tokens and more writes a block of the cache to its file in each layer: it completes many, and
/// copying one takes little of such a layer's time.
const SAVE_ROWS: usize = 2 * BLOCK;

impl Engine {
    /// Computes `tokens` from an empty session and shows `observer` everything.
    ///
    /// # Errors
    /// As [`Self::sync`].
    pub fn observe(&mut self, tokens: &[u32], observer: &mut dyn Observer) -> Result<(), EngineError> {
        self.check_tokens(tokens)?;
        let mut session = self.open_session()?;
        self.observe_in(&mut session, tokens, observer)
    }

    /// Shows `observer` every routed expert of every step from now on; `None` ends it.
    ///
    /// # Errors
    /// If what computes is no CPU.
    pub fn watch_experts(&mut self, observer: Option<SharedObserver>) -> Result<(), EngineError> {
        self.backend.watch_experts(observer)
    }

    fn observe_in(
        &mut self,
        session: &mut Session,
        tokens: &[u32],
        observer: &mut dyn Observer,
    ) -> Result<(), EngineError> {
        for chunk in tokens.chunks(self.plan.chunk) {
            let first = session.tokens.len();
            session.queue(chunk, 0);
            self.place(std::slice::from_mut(session))?;
            self.run_step(&mut Control::default(), Some(observer))?;
            session.tokens.append(&mut session.pending);
            for token in 0..chunk.len() {
                let hidden = self.backend.final_hidden(token)?;
                observer.hidden(self.spec.n_layers(), first + token, hidden);
            }
            let all: Vec<usize> = (0..chunk.len()).collect();
            for rows in all.chunks(HEAD_ROWS) {
                observer.logits(first + rows[0], self.backend.head(rows)?);
            }
            self.end_step();
            self.kv.slide(session.seq, session.tokens.len());
        }
        Ok(())
    }

    pub(super) fn check_owner(&self, session: &Session) {
        assert!(Arc::ptr_eq(&self.dropped, &session.dropped), "a session of another engine");
    }

    pub(super) fn check_id(&self, id: u32) -> Result<(), EngineError> {
        if id as usize >= self.spec.vocab_size {
            return Err(EngineError::Token { id, vocab_size: self.spec.vocab_size });
        }
        Ok(())
    }

    pub(super) fn check_tokens(&self, tokens: &[u32]) -> Result<(), EngineError> {
        if tokens.is_empty() {
            return Err(EngineError::EmptyPrompt);
        }
        if tokens.len() > self.plan.context {
            let (needed, context) = (tokens.len(), self.plan.context);
            return Err(EngineError::ContextFull { needed, context });
        }
        tokens.iter().try_for_each(|&id| self.check_id(id))
    }

    /// Makes room in the cache for what the sessions have queued, and lists the rows.
    pub(super) fn place(&mut self, sessions: &[Session]) -> Result<(), EngineError> {
        self.rows.clear();
        self.row_tokens.clear();
        self.head_rows.clear();
        self.kv.begin_step();
        let wanted: usize = sessions.iter().map(|session| session.wanted).sum();
        for session in sessions {
            self.check_owner(session);
            let (first, end) = (session.tokens.len(), session.tokens.len() + session.pending.len());
            self.kv.reserve(session.seq, first, end)?;
            self.kv.expect(session.seq, first, end, session.queues_prompt());
            if wanted <= HEAD_ROWS {
                let row = self.rows.len() + session.pending.len();
                self.head_rows.extend(row - session.wanted..row);
            }
            let row = |position| Row { seq: session.seq, position: position as u32 };
            self.rows.extend((first..end).map(row));
            self.row_tokens.extend_from_slice(&session.pending);
        }
        self.likely = sessions.iter().all(|session| session.pending.is_empty() || session.likely);
        let most = self.plan.chunk.max(1);
        if !(1..=most).contains(&self.rows.len()) {
            let (name, value) = ("tokens of a step", self.rows.len().to_string());
            return Err(EngineError::Setting { name, value, rule: format!("must be 1 to {most}") });
        }
        Ok(())
    }

    /// The forward of one step: all layers for the tokens in `self.rows`.
    pub(super) fn run_step(
        &mut self,
        control: &mut Control<'_>,
        mut observer: Option<&mut dyn Observer>,
    ) -> Result<(), EngineError> {
        let (n_tokens, first) = (self.rows.len(), self.rows[0].position as usize);
        self.clock.begin_step();
        self.store_before = self.store_meter.snapshot();
        self.watch.begin_step(&self.rows);
        self.look_ahead.begin_step();
        let before = self.alone.take();
        self.backend.follows(self.follows(before));
        self.backend.embed(&self.row_tokens)?;
        let (mut moe_index, mut layer) = (0, 0);
        while layer < self.spec.n_layers() {
            control.check()?;
            if let Some(slots) = self.governor.advise(self.store.limit()) {
                self.resize_ring(slots)?;
            }
            if self.on_device && observer.is_none() {
                let next = self.advance(layer, &mut moe_index)?;
                if next > layer {
                    layer = next;
                    continue;
                }
            }
            if layer > 0 && n_tokens > 1 {
                let (done, total) = self.prefilled;
                control.report(done + n_tokens * layer / self.spec.n_layers(), total);
            }
            if let Some(observer) = &mut observer {
                observer.hidden(layer, first, self.backend.hidden()?);
            }
            if n_tokens >= SAVE_ROWS {
                self.kv.save(1);
            }
            let is_moe = self.spec.layers[layer] == FfnKind::Moe;
            self.clock.switch(Phase::Attention);
            self.backend.attend(layer, &self.rows, &mut self.kv)?;
            if !is_moe {
                self.clock.switch(Phase::Dense);
                self.backend.dense(layer)?;
                layer += 1;
                continue;
            }
            self.store.poll();
            self.clock.switch(if self.on_device { Phase::Device } else { Phase::Router });
            let logits = self.backend.route(layer)?;
            if let Some(observer) = &mut observer {
                observer.router(moe_index, first, logits);
            }
            self.routes.route(self.kernels, &self.spec.moe, moe_index, logits);
            self.watch.routed(self.kernels, moe_index, &self.rows, logits, &self.routes);
            self.look_ahead.chosen(moe_index, self.routes.union());
            moe_index += 1;
            self.run_experts(layer, moe_index)?;
            layer += 1;
        }
        self.tokens_done += n_tokens as u64;
        self.alone = Some(self.rows[0]).filter(|_| n_tokens == 1);
        self.clock.switch(Phase::Other);
        if n_tokens == 1 && self.spec_width > 0 {
            self.speculate();
        }
        Ok(())
    }

    /// Gives the ring so many slots from now on, unless a device reads it in place: then its pages are not to be had, and
    /// fewer slots would free nothing.
    pub(super) fn resize_ring(&mut self, slots: usize) -> Result<(), EngineError> {
        if slots >= self.store.limit() || self.backend.give_ring_back()? {
            self.store.set_limit(slots);
        }
        Ok(())
    }

    /// How the step stands between the last one, of this row if of one, and the next.
    fn follows(&self, before: Option<Row>) -> Follows {
        let [row] = self.rows[..] else { return Follows::default() };
        let next = |before: Row| Row { position: before.position + 1, ..before };
        Follows { continues: before.is_some_and(|before| next(before) == row), likely: self.likely }
    }

    /// Lets the backend compute what it can by itself from `layer` on, counts how it routed, and brings it the experts
    /// that it halted for; gives the layer that is left.
    fn advance(&mut self, layer: usize, moe_index: &mut usize) -> Result<usize, EngineError> {
        self.clock.switch(Phase::Device);
        let Advanced { next, halted } =
            self.backend.advance(layer, &self.rows, &mut self.kv, &self.head_rows)?;
        for layer in layer..next {
            if self.spec.layers[layer] == FfnKind::Moe {
                self.hear(moe_index)?;
                self.backend.routed(layer, &self.routes);
            }
        }
        if !halted {
            return Ok(next);
        }
        self.hear(moe_index)?;
        self.store.poll();
        self.run_experts(next, *moe_index)?;
        Ok(next + 1)
    }

    /// Routes a layer as the backend has routed it.
    fn hear(&mut self, moe_index: &mut usize) -> Result<(), EngineError> {
        let logits = self.backend.advanced(*moe_index)?;
        self.routes.route(self.kernels, &self.spec.moe, *moe_index, logits);
        self.watch.routed(self.kernels, *moe_index, &self.rows, logits, &self.routes);
        *moe_index += 1;
        Ok(())
    }

    /// Reads ahead, layer by layer, what the last token ranked highest and did not choose.
    fn speculate(&mut self) {
        self.wants.clear();
        let chosen = self.spec.moe.top_k;
        let width = (chosen + self.spec_width).min(self.spec.moe.n_experts);
        for (index, layer) in self.spec.moe_layers().enumerate() {
            self.ranking.truncate(0);
            self.ranking.resize(width, 0);
            smoe_kernels::top_k(self.watch.last(index), &mut self.ranking);
            let key = |&expert: &u32| ExpertKey { layer: layer as u32, expert };
            let stamp = self.tokens_done;
            self.wants.extend(self.ranking[chosen..].iter().map(key).map(|key| Want { key, stamp }));
        }
        self.store.expect(&self.wants);
    }

    /// The experts of a layer: all misses are in flight before anything is computed, then the shared expert,
    /// the hits, and the misses as they arrive; in ascending order, and the next layer's behind them, when a
    /// long step needs most of the layer. When one token decodes, what the next layer, the `next`-th MoE layer, will
    /// probably want is read behind them.
    fn run_experts(&mut self, layer: usize, next: usize) -> Result<(), EngineError> {
        self.wants.clear();
        for &expert in self.routes.union() {
            if !self.backend.lacks(layer, expert) {
                continue;
            }
            let last = self.routes.of_expert(expert).1.last().map_or(0, |&token| u64::from(token));
            let key = ExpertKey { layer: layer as u32, expert };
            self.wants.push(Want { key, stamp: self.tokens_done + 1 + last });
        }
        let order = if self.backend.wants_order(&self.routes) { Order::Given } else { Order::Arrival };
        let streams = self.store.n_resident() < self.store.records().len();
        let mut demand = self.store.demand(&self.wants, order)?;
        let sweeps = self.wants.len() as f64 >= SWEEP_SHARE * self.spec.moe.n_experts as f64;
        let leads_to_moe = self.spec.layers.get(layer + 1) == Some(&FfnKind::Moe);
        if sweeps && self.rows.len() > 1 && leads_to_moe {
            // As old as the step: what is demanded indeed gets its own stamp.
            let stamp = self.tokens_done + 1;
            let key = |expert| ExpertKey { layer: layer as u32 + 1, expert };
            self.wants.clear();
            let lacked = (0..self.spec.moe.n_experts as u32).filter(|&e| self.backend.lacks(layer + 1, e));
            self.wants.extend(lacked.map(key).map(|key| Want { key, stamp }));
            demand.expect(&self.wants);
        }
        self.clock.switch(Phase::Dense);
        self.backend.begin(layer, &self.routes)?;
        let asks = leads_to_moe && self.rows.len() == 1;
        if asks && self.look_ahead.asks(next, self.tokens_done, streams) {
            self.clock.switch(Phase::Router);
            if let Some(logits) = self.backend.foretell(layer + 1)? {
                self.watch.foretell(self.kernels, next, logits, &self.routes);
                let stamp = self.tokens_done;
                let want = |&expert: &u32| Want { key: ExpertKey { layer: layer as u32 + 1, expert }, stamp };
                self.wants.clear();
                let is_absent = |expert| demand.is_absent(ExpertKey { layer: layer as u32 + 1, expert });
                let likely = self.look_ahead.ranked(next, self.watch.ahead(), is_absent);
                self.wants.extend(likely.iter().map(want));
                if !self.wants.is_empty() {
                    demand.expect(&self.wants);
                }
            }
        }
        loop {
            self.clock.switch(Phase::DemandWait);
            match demand.take_ready(CALL_EXPERTS, &mut self.leases) {
                Ok(0) => break,
                Ok(_) => {
                    self.clock.switch(Phase::Experts);
                    self.backend.experts(layer, &mut self.leases, &self.routes)?;
                }
                // Every slot is leased: by a device whose work on them is under way, or for ever.
                Err(StoreError::Stalled { .. }) if self.backend.reclaim()? => {}
                Err(error) => return Err(error.into()),
            }
        }
        drop(demand);
        self.clock.switch(Phase::Experts);
        self.backend.finish(layer, &self.routes)
    }

    pub(super) fn end_step(&mut self) {
        self.kv.keep(&self.rows);
        let phases = self.clock.end_step();
        self.watch.end_step(&self.rows);
        let last = self.rows.iter().map(|row| row.position + 1).max();
        self.steps.push(Step {
            index: 0,
            tokens: self.rows.len() as u32,
            context: last.unwrap_or(0),
            phases,
            store: self.store_meter.snapshot() - self.store_before,
        });
    }
    /// Notes which of the sessions that others may continue have computed something that is no number: a backend or
    /// weights that are broken for some tokens must not spoil what others find. Where the logits of every token are
    /// wanted, they tell ([`Self::tell_logits`]): a step that only answers asks the backend for nothing more.
    pub(super) fn look_for_numbers(&mut self, sessions: &mut [Session]) -> Result<(), EngineError> {
        let looks = |session: &Session| session.shared && session.wanted < session.pending.len();
        if !sessions.iter().any(looks) {
            return Ok(());
        }
        let width = self.spec.d_model;
        let mut rest = self.backend.hidden()?;
        for session in sessions {
            let (own, others) = rest.split_at(session.pending.len() * width);
            rest = others;
            if looks(session) && session.broken.is_none() && !is_finite(own) {
                let row = own.chunks_exact(width).take_while(|row| is_finite(row)).count();
                session.broken = Some(session.tokens.len() + row);
            }
        }
        Ok(())
    }

    /// Computes the logits that were asked for, a few rows at a time.
    pub(super) fn tell_logits(
        &mut self,
        sessions: &mut [Session],
        on_logits: &mut dyn FnMut(usize, usize, &[f32]),
    ) -> Result<(), EngineError> {
        let mut rows = [0; HEAD_ROWS];
        let mut of = [(0, 0); HEAD_ROWS];
        let (mut n, mut end) = (0, 0);
        let last = sessions.iter().rposition(|session| session.wanted > 0);
        for i in 0..sessions.len() {
            let wanted = sessions[i].wanted;
            end += sessions[i].pending.len();
            for row in 0..wanted {
                (rows[n], of[n]) = (end - wanted + row, (i, row));
                n += 1;
                if n < HEAD_ROWS && !(Some(i) == last && row + 1 == wanted) {
                    continue;
                }
                self.clock.switch(Phase::Head);
                let logits = self.backend.head(&rows[..n])?;
                self.clock.switch(Phase::Sampling);
                for (&(i, row), logits) in of.iter().zip(logits.chunks_exact(self.spec.vocab_size)) {
                    let session = &mut sessions[i];
                    if session.shared && session.broken.is_none() && !is_finite(logits) {
                        let first = session.tokens.len() + session.pending.len() - session.wanted;
                        session.broken = Some(first + row);
                    }
                    on_logits(i, row, logits);
                }
                n = 0;
            }
        }
        self.clock.switch(Phase::Other);
        Ok(())
    }
}

/// Whether all logits are numbers: else the weights, or a kernel, are broken.
#[must_use]
pub fn is_finite(logits: &[f32]) -> bool {
    // What is none has every bit of its exponent set. The largest of some at a time takes no branch.
    let none = f32::INFINITY.to_bits();
    let largest = |part: &[f32]| part.iter().fold(0, |largest, l| l.abs().to_bits().max(largest));
    logits.chunks(64).all(|part| largest(part) < none)
}
