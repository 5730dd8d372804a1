//! One answer's way from tokens to deltas, on the scheduler's thread: what ends an answer ends it at that token.

use std::ops::ControlFlow;
use std::sync::Arc;

use smoe_engine::{Ended, Event, Finish, Sink};
use smoe_text::{Detokeniser, ReplyEvent, ReplyParser, StopMatcher, Tokenizer};

use super::outbox::Teller;
use super::prompt::Prepared;
use super::told::Told;
use super::{Delta, Phase, Reason, TokenLogprob, TokenText, Turn, TurnInput, TurnUsage};
use crate::error::ApiError;
use crate::fleet::Place;
use crate::id;
use crate::model::Lease;
use crate::tally::Tally;

/// Hears the tokens of a job and tells the client's side what they mean.
pub(super) struct Voice {
    choice: usize,
    /// Given back before the end is told: who asks again then finds it free.
    place: Option<Place>,
    tell: Teller,
    tally: Arc<Tally>,
    /// Keeps the model until the job is over.
    lease: Lease,
    progress: bool,
    began: bool,
    detokeniser: Option<Detokeniser>,
    /// None for plain texts.
    parser: Option<ReplyParser>,
    stops: Vec<String>,
    matcher: StopMatcher,
    parallel_tool_calls: bool,
    end_tokens: Vec<u32>,
    /// Tokens whose probabilities are to be told.
    told: Option<Told>,
    in_reasoning: bool,
    reasoning: usize,
    /// Set where the answer ends by what it says.
    ended: Option<Reason>,
    /// Nobody listens.
    gone: bool,
}

impl Voice {
    pub(super) fn new(
        choice: usize,
        place: Place,
        lease: Lease,
        turn: &Turn,
        prepared: &Prepared,
        tell: Teller,
        tally: &Arc<Tally>,
    ) -> Self {
        let chat = matches!(turn.input, TurnInput::Chat { .. });
        let tokenizer = lease.text().tokenizer.as_ref();
        // The markers of a reply are special tokens of some models.
        let detokeniser = tokenizer.map(|tokenizer| Detokeniser::new(tokenizer, !chat));
        let parser = chat.then(|| ReplyParser::new(lease.format(), &prepared.tools, &prepared.tail));
        let opened = lease.format().reasoning.as_ref().map(|(open, _)| open.trim_end());
        let in_reasoning = chat && opened.is_some_and(|open| prepared.tail.trim_end().ends_with(open));
        Self {
            choice,
            place: Some(place),
            tell,
            tally: tally.clone(),
            progress: turn.progress,
            began: false,
            detokeniser,
            parser,
            stops: turn.stop.clone(),
            matcher: StopMatcher::new(turn.stop.clone()),
            parallel_tool_calls: turn.parallel_tool_calls,
            end_tokens: prepared.limits.end_tokens.clone(),
            told: turn.logprobs.map(|_| Told::default()),
            in_reasoning,
            reasoning: 0,
            ended: None,
            gone: false,
            lease,
        }
    }

    fn say(&mut self, delta: Delta) {
        self.gone |= !self.tell.tell(delta);
    }

    fn token(&mut self, id: u32, logprob: Option<f32>, top: &[(u32, f32)]) {
        if !self.began {
            self.began = true;
            if self.progress {
                self.say(Delta::Phase(Phase::Decode));
            }
        }
        if self.end_tokens.contains(&id) {
            return;
        }
        let piece = self.detokeniser.as_mut().map(|detokeniser| detokeniser.push(id)).unwrap_or_default();
        if let (Some(logprob), Some(tokenizer), Some(told)) =
            (logprob, &self.lease.text().tokenizer, &mut self.told)
        {
            let top = top.iter().map(|&(id, logprob)| (token_text(tokenizer, id), logprob)).collect();
            told.hear(TokenLogprob { token: token_text(tokenizer, id), logprob, top }, &piece);
        }
        self.hear(&piece);
        self.reasoning += usize::from(self.in_reasoning);
    }

    /// Takes text of the model.
    fn hear(&mut self, piece: &str) {
        match &mut self.parser {
            Some(parser) => {
                let events = parser.push(piece);
                self.events(events);
            }
            None => self.text(piece),
        }
    }

    fn events(&mut self, events: Vec<ReplyEvent>) {
        let choice = self.choice;
        for event in events {
            if self.ended.is_some() {
                return;
            }
            self.in_reasoning = matches!(event, ReplyEvent::Reasoning(_));
            // Only the answer's text is told with probabilities.
            match (&event, &mut self.told) {
                (ReplyEvent::Text(_), _) | (_, None) => {}
                (ReplyEvent::Reasoning(text), Some(told)) => told.pass(text),
                (_, Some(told)) => told.forget(),
            }
            match event {
                ReplyEvent::Text(text) => self.text(&text),
                ReplyEvent::Reasoning(text) => self.say(Delta::Reasoning { choice, text }),
                ReplyEvent::ToolBegin { index, name, id } => {
                    let id = id.unwrap_or_else(|| id::new("call_"));
                    self.say(Delta::ToolBegin { choice, index, id, name });
                }
                ReplyEvent::ToolArguments { index, fragment } => {
                    self.say(Delta::ToolArguments { choice, index, fragment });
                }
                ReplyEvent::ToolEnd { .. } if !self.parallel_tool_calls => {
                    self.ended = Some(Reason::ToolCalls);
                }
                ReplyEvent::ToolEnd { .. } => {}
            }
        }
    }

    /// Takes text of the answer.
    fn text(&mut self, text: &str) {
        if let Some(told) = &mut self.told {
            told.say(text);
        }
        let step = self.matcher.push(text);
        self.emit(step.emit);
        if let Some(stop) = step.stopped {
            self.ended = Some(Reason::StopString(self.stops[stop].clone()));
        }
    }

    fn emit(&mut self, text: String) {
        if !text.is_empty() {
            let logprobs = self.told.as_mut().map(|told| told.out(&text)).unwrap_or_default();
            self.say(Delta::Text { choice: self.choice, text, logprobs });
        }
    }

    fn end(&mut self, ended: Ended) {
        // What was held back comes out first, unless the answer ended before it.
        if self.ended.is_none() {
            let rest = self.detokeniser.as_mut().map(Detokeniser::finish).unwrap_or_default();
            self.hear(&rest);
            if let Some(parser) = &mut self.parser {
                let events = parser.finish();
                self.events(events);
            }
            if self.ended.is_none() {
                let rest = self.matcher.finish();
                self.emit(rest);
                self.ended = self.matcher.stopped().map(|stop| Reason::StopString(self.stops[stop].clone()));
            }
        }
        let usage = TurnUsage { job: ended.usage, reasoning: self.reasoning };
        self.tally.answered(&ended.usage);
        self.place = None;
        let called = self.parser.as_ref().is_some_and(ReplyParser::saw_tool_call);
        let reason = match (ended.result, self.ended.take()) {
            (Err(error), _) => return self.say(Delta::Error(ApiError::from(error))),
            (Ok(_), Some(reason)) => reason,
            (Ok(Finish::Length | Finish::ContextFull), None) => Reason::Length,
            (Ok(Finish::Stopped), None) => Reason::Cancelled,
            (Ok(Finish::End), None) if called => Reason::ToolCalls,
            (Ok(Finish::End), None) => Reason::Stop,
        };
        self.say(Delta::End { choice: self.choice, reason, usage });
    }
}

impl Sink for Voice {
    fn event(&mut self, event: Event<'_>) -> ControlFlow<()> {
        match event {
            Event::Prefill { done, total, cached } if self.progress => {
                self.say(Delta::Phase(Phase::Prefill { done, total, cached }));
            }
            Event::Prefill { .. } => {}
            Event::Token { id, logprob, top } => {
                self.tally.tokens.add(1);
                self.token(id, logprob, top);
            }
            Event::End(ended) => self.end(ended),
        }
        if self.ended.is_some() || self.gone { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }
}

fn token_text(tokenizer: &Tokenizer, id: u32) -> TokenText {
    let text = tokenizer.decode(&[id], false);
    let bytes = (!text.contains(char::REPLACEMENT_CHARACTER)).then(|| text.clone().into_bytes());
    TokenText { text, bytes }
}
