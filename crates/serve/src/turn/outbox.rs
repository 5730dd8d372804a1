//! What an answer's voices have said and its reader has not taken yet. Voices never wait: they are on the model's
//! thread. A reader may be slower than the model, so what waits is bounded:
//!
//! - the first [`BEHIND`] deltas wait as they came; beyond them, what continues the last delta of its choice is added
//!   to it, so that a slow reader gets fewer and longer deltas, and the same text;
//! - when [`MOST`] bytes wait, the answer ends with an error after them. That is some 250,000 tokens of text, so it
//!   takes log probabilities and a reader that has all but stopped;
//! - progress is told [`PROGRESS`] apart, and only the newest waits.

use std::collections::VecDeque;
use std::mem::{Discriminant, discriminant};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use super::{Delta, Phase};
use crate::error::ApiError;

/// Deltas that wait as they came.
const BEHIND: usize = 32;
/// Bytes that may wait for each choice.
const MOST: usize = 1 << 20;
/// Between two reports of the same kind of progress.
const PROGRESS: Duration = Duration::from_millis(100);

/// For the answers to a turn of so many choices.
pub(super) fn outbox(choices: usize) -> (Teller, Reader) {
    let state = State {
        waiting: VecDeque::new(),
        taken: 0,
        last: vec![None; choices],
        bytes: 0,
        most: MOST * choices,
        tellers: 1,
        open: true,
        waker: None,
        progress: None,
    };
    let shared = Arc::new(Shared { state: Mutex::new(state), gone: Notify::new() });
    (Teller(shared.clone()), Reader(shared))
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// The reader has gone.
    gone: Notify,
}

#[derive(Debug)]
struct State {
    waiting: VecDeque<Delta>,
    /// Deltas that were taken: the number of the first that waits.
    taken: usize,
    /// The number of each choice's last delta.
    last: Vec<Option<usize>>,
    /// Of the texts that wait.
    bytes: usize,
    most: usize,
    tellers: usize,
    /// Something may still be told.
    open: bool,
    waker: Option<Waker>,
    /// What kind of progress was told last, and when.
    progress: Option<(Discriminant<Phase>, Instant)>,
}

/// Tells the reader. Clones tell the same one.
#[derive(Debug)]
pub(super) struct Teller(Arc<Shared>);

/// Takes what was told; when it is dropped, nobody listens.
#[derive(Debug)]
pub(super) struct Reader(Arc<Shared>);

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing panics while it is held.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Teller {
    /// False: nobody listens any more.
    pub(super) fn tell(&self, delta: Delta) -> bool {
        let (open, waker) = {
            let mut state = self.0.lock();
            state.put(delta, Instant::now());
            (state.open, state.waker.take())
        };
        if let Some(waker) = waker {
            waker.wake();
        }
        open
    }

    /// Comes when the reader has gone. For one waiter.
    pub(super) async fn gone(&self) {
        self.0.gone.notified().await;
    }
}

impl Clone for Teller {
    fn clone(&self) -> Self {
        self.0.lock().tellers += 1;
        Self(self.0.clone())
    }
}

impl Drop for Teller {
    fn drop(&mut self) {
        let waker = {
            let mut state = self.0.lock();
            state.tellers -= 1;
            if state.tellers == 0 { state.waker.take() } else { None }
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl Reader {
    /// The next delta; `None` when nobody is left to tell one.
    pub(super) fn poll(&self, context: &mut Context<'_>) -> Poll<Option<Delta>> {
        let mut state = self.0.lock();
        match state.take() {
            Some(delta) => Poll::Ready(Some(delta)),
            None if state.tellers == 0 => Poll::Ready(None),
            None => {
                state.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        {
            let mut state = self.0.lock();
            state.open = false;
            state.waiting.clear();
        }
        self.0.gone.notify_one();
    }
}

impl State {
    fn put(&mut self, delta: Delta, now: Instant) {
        if !self.open || self.is_too_soon(&delta, now) {
            return;
        }
        let size = size(&delta);
        if size > 0 && self.bytes > 0 && self.bytes + size > self.most {
            // What waits can still be read.
            self.open = false;
            return self.waiting.push_back(Delta::Error(ApiError::slow_reader(self.bytes)));
        }
        self.bytes += size;
        let choice = choice(&delta);
        let Some(delta) = self.merged(choice, delta) else { return };
        if let Some(last) = choice.and_then(|choice| self.last.get_mut(choice)) {
            *last = Some(self.taken + self.waiting.len());
        }
        self.waiting.push_back(delta);
    }

    /// Adds a delta to one that waits; gives it back if it stands for itself.
    fn merged(&mut self, choice: Option<usize>, delta: Delta) -> Option<Delta> {
        let place = match choice {
            Some(choice) if self.waiting.len() >= BEHIND => {
                let last = self.last.get(choice).copied().flatten();
                last.and_then(|last| last.checked_sub(self.taken))
            }
            Some(_) => None,
            // Progress: an older report of the same kind is not worth reading.
            None => self.waiting.len().checked_sub(1),
        };
        let Some(before) = place.and_then(|place| self.waiting.get_mut(place)) else { return Some(delta) };
        match (before, delta) {
            (Delta::Phase(before), Delta::Phase(phase)) if discriminant(before) == discriminant(&phase) => {
                *before = phase;
            }
            (Delta::Reasoning { text: before, .. }, Delta::Reasoning { text, .. }) => before.push_str(&text),
            (Delta::Text { text: before, logprobs: told, .. }, Delta::Text { text, logprobs, .. }) => {
                before.push_str(&text);
                told.extend(logprobs);
            }
            (
                Delta::ToolArguments { index: same, fragment: before, .. },
                Delta::ToolArguments { index, fragment, .. },
            ) if *same == index => before.push_str(&fragment),
            (_, delta) => return Some(delta),
        }
        None
    }

    /// Whether it is progress of which another report was just told, and not the last one.
    fn is_too_soon(&mut self, delta: &Delta, now: Instant) -> bool {
        let Delta::Phase(phase) = delta else { return false };
        let kind = discriminant(phase);
        let is_last = match *phase {
            Phase::Prefill { done, total, .. } => done >= total,
            Phase::Loading { done, total } => done >= total,
            Phase::Queued { .. } | Phase::Decode => true,
        };
        let soon = |(told, at): (Discriminant<Phase>, Instant)| {
            told == kind && now.saturating_duration_since(at) < PROGRESS
        };
        if !is_last && self.progress.is_some_and(soon) {
            return true;
        }
        self.progress = Some((kind, now));
        false
    }

    fn take(&mut self) -> Option<Delta> {
        let delta = self.waiting.pop_front()?;
        self.taken += 1;
        self.bytes -= size(&delta).min(self.bytes);
        Some(delta)
    }
}

/// The choice that a delta continues.
fn choice(delta: &Delta) -> Option<usize> {
    match *delta {
        Delta::Reasoning { choice, .. }
        | Delta::Text { choice, .. }
        | Delta::ToolBegin { choice, .. }
        | Delta::ToolArguments { choice, .. }
        | Delta::End { choice, .. } => Some(choice),
        Delta::Phase(_) | Delta::Accepted { .. } | Delta::Error(_) => None,
    }
}

/// Memory that what the model says takes while it waits.
fn size(delta: &Delta) -> usize {
    match delta {
        Delta::Reasoning { text, .. } => text.len(),
        Delta::Text { text, logprobs, .. } => {
            let tokens = |told: &super::TokenLogprob| 1 + told.top.len();
            let tokens: usize = logprobs.iter().map(tokens).sum();
            // Texts and bytes of tokens are short: what holds them is what counts.
            text.len() + tokens * (size_of::<super::TokenText>() + 32)
        }
        Delta::ToolBegin { id, name, .. } => size_of::<Delta>() + id.len() + name.len(),
        Delta::ToolArguments { fragment, .. } => fragment.len(),
        Delta::Phase(_) | Delta::Accepted { .. } | Delta::End { .. } | Delta::Error(_) => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::turn::{Reason, TokenLogprob, TokenText, TurnUsage};

    fn text(choice: usize, text: &str) -> Delta {
        Delta::Text { choice, text: text.to_owned(), logprobs: Vec::new() }
    }

    fn prefill(done: usize) -> Delta {
        Delta::Phase(Phase::Prefill { done, total: 100, cached: 0 })
    }

    fn taken(reader: &Reader) -> Vec<Delta> {
        let mut state = reader.0.lock();
        std::iter::from_fn(|| state.take()).collect()
    }

    #[test]
    fn a_reader_that_keeps_up_gets_every_delta_and_a_slow_one_the_same_text() {
        let (teller, reader) = outbox(2);
        let mut said = [String::new(), String::new()];
        let mut read = [String::new(), String::new()];
        let mut hear = |deltas: Vec<Delta>| {
            let n = deltas.len();
            for delta in deltas {
                let Delta::Text { choice, text, .. } = delta else { panic!("{delta:?}") };
                read[choice].push_str(&text);
            }
            n
        };
        for round in 0..10_usize {
            let burst = [1, BEHIND, 500, 3][round % 4];
            for i in 0..burst {
                let piece = format!("{round}.{i} ");
                said[i % 2].push_str(&piece);
                assert!(teller.tell(text(i % 2, &piece)));
            }
            assert_eq!(hear(taken(&reader)), burst.min(BEHIND), "of {burst}");
        }
        assert_eq!(read, said);
        assert_eq!(reader.0.lock().bytes, 0);
    }

    #[test]
    fn what_is_of_another_kind_keeps_its_place() {
        let (teller, reader) = outbox(1);
        let (choice, index) = (0, 0);
        (0..BEHIND).for_each(|_| assert!(teller.tell(text(0, "a"))));
        let begin = |index| Delta::ToolBegin { choice, index, id: String::new(), name: String::new() };
        let arguments =
            |index, fragment: &str| Delta::ToolArguments { choice, index, fragment: fragment.to_owned() };
        let end = Delta::End { choice, reason: Reason::Stop, usage: TurnUsage::default() };
        let told = [
            Delta::Reasoning { choice, text: "r".to_owned() },
            Delta::Reasoning { choice, text: "s".to_owned() },
            begin(index),
            arguments(index, "{"),
            arguments(index, "}"),
            begin(1),
            arguments(1, "{}"),
            end.clone(),
        ];
        told.into_iter().for_each(|delta| assert!(teller.tell(delta)));
        let expected = [
            Delta::Reasoning { choice, text: "rs".to_owned() },
            begin(index),
            arguments(index, "{}"),
            begin(1),
            arguments(1, "{}"),
            end,
        ];
        assert_eq!(taken(&reader)[BEHIND..], expected);
    }

    #[test]
    fn what_waits_is_bounded_and_the_answer_ends_after_it() {
        let (teller, reader) = outbox(1);
        let token = || TokenText { text: "x".to_owned(), bytes: Some(vec![b'x']) };
        let told = || TokenLogprob { token: token(), logprob: 0.0, top: vec![(token(), 0.0); 20] };
        let mut n = 0;
        while teller.tell(Delta::Text { choice: 0, text: "x".to_owned(), logprobs: vec![told()] }) {
            n += 1;
            assert!(reader.0.lock().bytes <= MOST && n < MOST);
        }
        assert!(reader.0.lock().waiting.len() <= BEHIND + 1);
        let mut deltas = taken(&reader);
        let Some(Delta::Error(error)) = deltas.pop() else { panic!("no error") };
        assert_eq!(error.code, Some("slow_reader"));
        let told = deltas.iter().map(|delta| match delta {
            Delta::Text { text, logprobs, .. } => (text.len(), logprobs.len()),
            other => panic!("{other:?}"),
        });
        assert_eq!(told.fold((0, 0), |(a, b), (c, d)| (a + c, b + d)), (n, n));
        // Text alone is never that much: a large piece has room where nothing waits.
        let (teller, _reader) = outbox(1);
        assert!(teller.tell(text(0, &"y".repeat(2 * MOST))));
        assert!(!teller.tell(text(0, "y")));
    }

    #[test]
    fn progress_is_told_apart_and_only_the_newest_waits() {
        let (_teller, reader) = outbox(1);
        let mut state = reader.0.lock();
        let start = Instant::now();
        for i in 0..100 {
            state.put(prefill(i), start + PROGRESS * i as u32 / 20);
        }
        assert_eq!(state.waiting.len(), 1);
        assert_eq!(state.take(), Some(prefill(80)));
        // The end of a phase and the next one are always told.
        state.put(prefill(100), start + PROGRESS * 4);
        state.put(Delta::Phase(Phase::Decode), start + PROGRESS * 4);
        assert_eq!(state.take(), Some(prefill(100)));
        assert_eq!(state.take(), Some(Delta::Phase(Phase::Decode)));
        let told = (0..1_000).filter(|i| {
            state.put(prefill(i % 100), start + PROGRESS * 5 + PROGRESS * *i as u32 / 100);
            state.take().is_some()
        });
        assert_eq!(told.count(), 10);
    }

    #[tokio::test]
    async fn both_sides_learn_that_the_other_has_gone() {
        let (teller, reader) = outbox(1);
        let other = teller.clone();
        drop(teller);
        assert!(other.tell(text(0, "a")));
        drop(other);
        let next = || std::future::poll_fn(|context| reader.poll(context));
        assert_eq!(next().await, Some(text(0, "a")));
        assert_eq!(next().await, None);
        let (teller, reader) = outbox(1);
        drop(reader);
        teller.gone().await;
        assert!(!teller.tell(text(0, "a")));
    }
}
