//! A turn: what every API's request becomes, and what every API's answer is made of.
//!
//! ```text
//! request ──► Turn ──► model (loaded if need be) ──► prompt ──► jobs ──► voices ──► Delta ... ──► response
//! ```
//!
//! [`start`] returns as soon as the jobs are accepted, so that what is wrong with a request has its HTTP status. If
//! that takes longer than a client should wait for the head of a response, the stream begins without it, and the
//! error comes in the stream. That there is no room is known before: every job has its place at the door, or none.

mod bound;
mod follow;
mod outbox;
mod prompt;
mod reply;
mod told;
mod voice;

use std::collections::VecDeque;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use futures_util::Stream;
use serde_json::{Map, Value as Json};
use smoe_engine::Job;

use crate::AppState;
use crate::error::ApiError;
use crate::fleet::Place;
use crate::id;

pub use reply::{Reply, ReplyCall, collect};

use outbox::{Reader, Teller, outbox};
use voice::Voice;

/// The most answers to one prompt.
pub const MAX_CHOICES: usize = 8;
/// The most stop strings.
pub const MAX_STOPS: usize = 16;
/// The most alternatives that are told with a token.
pub const MAX_TOP_LOGPROBS: usize = 20;
/// The most tools on offer.
pub const MAX_TOOLS: usize = 128;
/// The most tokens that have a bias.
pub const MAX_BIASES: usize = 1024;

/// A request, whatever API it came by.
#[derive(Clone, Debug, Default)]
pub struct Turn {
    /// The model's name; empty or `s-moe` is the one that is loaded.
    pub model: String,
    /// What is to be continued.
    pub input: TurnInput,
    /// The last message is the model's own, and the answer goes on from its end.
    pub continues: bool,
    /// Whether tools may or must be called.
    pub tool_choice: ToolChoice,
    /// More than one call may be made.
    pub parallel_tool_calls: bool,
    /// The form of the answer.
    pub format: Format,
    /// How tokens are chosen.
    pub sampling: SamplingOverrides,
    /// Texts that end the answer.
    pub stop: Vec<String>,
    /// The most new tokens; `None` is what the context leaves.
    pub max_tokens: Option<usize>,
    /// What the context does not leave of `max_tokens` is cut instead of refused.
    pub cut_to_fit: bool,
    /// How many answers.
    pub n: usize,
    /// Tells with each token its log probability, and those of so many of the likeliest.
    pub logprobs: Option<usize>,
    /// Whether the model should reason first; `None` leaves it to its template.
    pub thinking: Option<bool>,
    /// Further variables of the chat template.
    pub template: Map<String, Json>,
    /// The prompt stands before the answer.
    pub echo: bool,
    /// Tells of waiting, loading and prefill.
    pub progress: bool,
}

/// What is to be continued.
#[derive(Clone, Debug)]
pub enum TurnInput {
    /// A conversation.
    Chat {
        /// Messages as OpenAI's API has them.
        messages: Vec<Json>,
        /// Tools on offer.
        tools: Vec<Tool>,
    },
    /// A text, without a template.
    Text(String),
    /// Token ids, as they are.
    Tokens(Vec<u32>),
}

impl Default for TurnInput {
    fn default() -> Self {
        Self::Text(String::new())
    }
}

/// A tool on offer.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    /// Its name.
    pub name: String,
    /// What it does.
    pub description: Option<String>,
    /// JSON schema of its arguments.
    pub parameters: Json,
}

/// Whether tools may or must be called.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// As the model likes.
    #[default]
    Auto,
    /// No: the model does not even hear of them.
    None,
    /// One of them must.
    Required,
    /// This one must.
    Named(String),
}

/// The form of an answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Format {
    /// Any.
    #[default]
    Text,
    /// A JSON object.
    JsonObject,
    /// JSON after a schema.
    JsonSchema {
        /// Its name, for the client.
        name: String,
        /// The schema.
        schema: Json,
    },
}

/// Sampling settings of a request; what is `None` is as the model's makers chose.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SamplingOverrides {
    /// 0 to 2; 0 is greedy.
    pub temperature: Option<f64>,
    /// 0 to 1.
    pub top_p: Option<f64>,
    /// -1 or 0 is all.
    pub top_k: Option<i64>,
    /// 0 to 1.
    pub min_p: Option<f64>,
    /// -2 to 2.
    pub presence_penalty: Option<f64>,
    /// -2 to 2.
    pub frequency_penalty: Option<f64>,
    /// Above 0, at most 10.
    pub repetition_penalty: Option<f64>,
    /// Token ids and what is added to their logits, -100 to 100.
    pub logit_bias: Vec<(u32, f64)>,
    /// The same seed repeats an answer; drawn if `None`.
    pub seed: Option<i64>,
}

/// A piece of an answer, or of the way to it: one `Accepted`, then for each choice its texts and calls and one
/// `End`, the choices mixed. `Phase` may come at any time, and so may one `Error`, after which nothing does.
#[derive(Clone, Debug, PartialEq)]
pub enum Delta {
    /// What is being waited for. Only if the turn wants progress.
    Phase(Phase),
    /// The jobs are in the queue.
    Accepted {
        /// Tokens of the prompt.
        prompt_tokens: usize,
        /// The prompt itself, if it is to be echoed.
        echo: Option<String>,
    },
    /// A piece of the reasoning.
    Reasoning {
        /// Which answer.
        choice: usize,
        /// The text.
        text: String,
    },
    /// A piece of the answer.
    Text {
        /// Which answer.
        choice: usize,
        /// The text.
        text: String,
        /// The tokens that have become text with this piece, if asked for.
        logprobs: Vec<TokenLogprob>,
    },
    /// A call begins.
    ToolBegin {
        /// Which answer.
        choice: usize,
        /// The call's number in it.
        index: usize,
        /// The call's id.
        id: String,
        /// The tool.
        name: String,
    },
    /// A piece of a call's arguments.
    ToolArguments {
        /// Which answer.
        choice: usize,
        /// The call's number in it.
        index: usize,
        /// JSON text.
        fragment: String,
    },
    /// An answer is over.
    End {
        /// Which answer.
        choice: usize,
        /// Why.
        reason: Reason,
        /// What it took.
        usage: TurnUsage,
    },
    /// Something went wrong; nothing follows.
    Error(ApiError),
}

/// What is being waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Others come first.
    Queued {
        /// How many.
        ahead: usize,
    },
    /// The model is being loaded.
    Loading {
        /// Bytes that are loaded; 0 of 0 while that is not known.
        done: u64,
        /// Of so many.
        total: u64,
    },
    /// The prompt is being computed.
    Prefill {
        /// Tokens done.
        done: usize,
        /// Tokens to do.
        total: usize,
        /// Tokens that were cached.
        cached: usize,
    },
    /// The answer has begun.
    Decode,
}

/// Why an answer ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The model ended it.
    Stop,
    /// A stop string came.
    StopString(String),
    /// So many tokens were asked for, or the context is full.
    Length,
    /// The model calls tools.
    ToolCalls,
    /// The client has gone, or the server ends.
    Cancelled,
}

/// What an answer took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TurnUsage {
    /// What the scheduler counted.
    pub job: smoe_engine::Usage,
    /// New tokens that were reasoning.
    pub reasoning: usize,
}

/// A token and its alternatives.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprob {
    /// Its text.
    pub token: TokenText,
    /// The natural logarithm of its probability.
    pub logprob: f32,
    /// The likeliest tokens in its place, the likeliest first.
    pub top: Vec<(TokenText, f32)>,
}

/// A token's text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenText {
    /// As text; a part of a character is U+FFFD.
    pub text: String,
    /// As bytes, unless it is a part of a character.
    pub bytes: Option<Vec<u8>>,
}

/// What is known when an answer begins.
#[derive(Clone, Debug)]
pub struct TurnInfo {
    /// The model that answers, by its id.
    pub model: String,
    /// Names the model's exact weights.
    pub fingerprint: String,
    /// Seconds since 1970.
    pub created: u64,
}

/// The deltas of a turn. Dropping it cancels what is not over.
pub struct TurnStream {
    /// What came before the stream was handed out.
    early: VecDeque<Delta>,
    deltas: Reader,
    /// Answers that are not over.
    open: usize,
    cancel: Arc<AtomicBool>,
    ending: Pin<Box<dyn Future<Output = ()> + Send>>,
}

impl fmt::Debug for TurnStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TurnStream").field("open", &self.open).finish_non_exhaustive()
    }
}

impl Stream for TurnStream {
    type Item = Delta;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Delta>> {
        if self.open == 0 {
            return Poll::Ready(None);
        }
        let delta = if let Some(delta) = self.early.pop_front() {
            delta
        } else if let Poll::Ready(delta) = self.deltas.poll(context) {
            delta.unwrap_or_else(|| Delta::Error(ApiError::internal("the model stopped in the middle")))
        } else if self.ending.as_mut().poll(context).is_ready() {
            Delta::Error(ApiError::ending())
        } else {
            return Poll::Pending;
        };
        match delta {
            Delta::End { .. } => self.open -= 1,
            Delta::Error(_) => self.open = 0,
            _ => {}
        }
        Poll::Ready(Some(delta))
    }
}

impl Drop for TurnStream {
    fn drop(&mut self) {
        self.cancel.store(true, Ordering::Relaxed);
    }
}

/// Begins to answer.
///
/// # Errors
/// What is wrong with the request, or with the model, if that is found out while the client still waits for the
/// head of its response.
pub async fn start(state: &AppState, turn: Turn) -> Result<(TurnInfo, TurnStream), ApiError> {
    turn.check()?;
    let listing = state.fleet().resolve(&turn.model).await?;
    let info = TurnInfo {
        model: listing.id.clone(),
        fingerprint: listing.fingerprint.clone(),
        created: id::unix_seconds(),
    };
    let (places, sure) = state.fleet().enter(&listing.id, turn.n)?;
    let (tell, deltas) = outbox(turn.n);
    let cancel = Arc::new(AtomicBool::new(false));
    let mut stream = TurnStream {
        early: VecDeque::new(),
        deltas,
        open: turn.n,
        cancel: cancel.clone(),
        ending: Box::pin(state.ending()),
    };
    let work = begin(state.clone(), listing.id, turn, places, tell.clone(), cancel);
    tokio::spawn(async move {
        let gone = tell.clone();
        tokio::select! {
            result = work => if let Err(error) = result {
                // Nobody hears it if the client has gone.
                tell.tell(Delta::Error(error));
            },
            () = gone.gone() => {}
        }
    });
    let accepted = async {
        while let Some(delta) = std::future::poll_fn(|context| stream.deltas.poll(context)).await {
            let last = matches!(delta, Delta::Accepted { .. } | Delta::Error(_));
            stream.early.push_back(delta);
            if last {
                break;
            }
        }
    };
    if sure {
        // Late is no error: the rest comes in the stream.
        let _ = tokio::time::timeout(state.config().patience, accepted).await;
    } else {
        accepted.await;
    }
    if let Some(Delta::Error(error)) = stream.early.back() {
        return Err(error.clone());
    }
    Ok((info, stream))
}

/// Brings the model, makes the prompt and queues the jobs; what follows comes from their voices.
async fn begin(
    state: AppState,
    model: String,
    turn: Turn,
    places: Vec<Place>,
    tell: Teller,
    cancel: Arc<AtomicBool>,
) -> Result<(), ApiError> {
    let phases = turn.progress.then(|| tell.clone());
    let phase = |phase| {
        if let Some(phases) = &phases {
            phases.tell(Delta::Phase(phase));
        }
    };
    let lease = state.fleet().acquire(&model, &phase).await?;
    state.fleet().fits(&lease, turn.n)?;
    let (lease, turn, prepared) = state
        .blocking(turn.has_form(), move || {
            let prepared = prompt::prepare(&lease, &turn);
            (lease, turn, prepared)
        })
        .await?;
    let mut prepared = prepared?;
    let prompt_tokens = prepared.prompt.len();
    let echo = prepared.echo.take();
    let jobs = places
        .into_iter()
        .enumerate()
        .map(|(choice, place)| Job {
            prompt: prepared.prompt.clone(),
            sampling: prepared.sampling_of(choice),
            limits: prepared.limits.clone(),
            logprobs: turn.logprobs,
            constraint: prepared.constraints.pop().map(|bound| Box::new(bound) as _),
            cancel: cancel.clone(),
            sink: Box::new(Voice::new(
                choice,
                place,
                lease.clone(),
                &turn,
                &prepared,
                tell.clone(),
                state.tally(),
            )),
        })
        .collect();
    let accepted = tell.clone();
    let progress = turn.progress;
    lease
        .runner()
        .submit(jobs, move |load| {
            accepted.tell(Delta::Accepted { prompt_tokens, echo });
            if progress && load.running >= load.max_running {
                let ahead = load.queued + 1;
                accepted.tell(Delta::Phase(Phase::Queued { ahead }));
            }
        })
        .await
        .inspect_err(|_| cancel.store(true, Ordering::Relaxed))
}

/// Counts the tokens of a turn's prompt, without an answer to it.
///
/// # Errors
/// As [`start`], but that nothing has to fit.
pub async fn count(state: &AppState, turn: Turn) -> Result<usize, ApiError> {
    turn.check()?;
    let listing = state.fleet().resolve(&turn.model).await?;
    let lease = state.fleet().acquire(&listing.id, &|_| {}).await?;
    state.blocking(false, move || prompt::count(&lease, &turn)).await?
}

impl Turn {
    /// Whether the answer must have a form, which is to be compiled.
    fn has_form(&self) -> bool {
        self.format != Format::Text || matches!(self.tool_choice, ToolChoice::Required | ToolChoice::Named(_))
    }

    /// Checks what does not depend on the model. Names of fields are OpenAI's; the other APIs' are the same or
    /// nearly so.
    pub(crate) fn check(&self) -> Result<(), ApiError> {
        let s = &self.sampling;
        within("temperature", s.temperature, 0.0, 2.0)?;
        within("top_p", s.top_p, 0.0, 1.0)?;
        within("min_p", s.min_p, 0.0, 1.0)?;
        within("presence_penalty", s.presence_penalty, -2.0, 2.0)?;
        within("frequency_penalty", s.frequency_penalty, -2.0, 2.0)?;
        within("repetition_penalty", s.repetition_penalty, f64::MIN_POSITIVE, 10.0)?;
        if s.top_k.is_some_and(|k| k < -1) {
            return Err(ApiError::field("top_k", "top_k must be -1, 0 (both are all) or more"));
        }
        if s.logit_bias.len() > MAX_BIASES {
            let message = format!("logit_bias may name {MAX_BIASES} tokens at most");
            return Err(ApiError::field("logit_bias", message));
        }
        for &(_, bias) in &s.logit_bias {
            within("logit_bias", Some(bias), -100.0, 100.0)?;
        }
        if !(1..=MAX_CHOICES).contains(&self.n) {
            return Err(ApiError::field("n", format!("n must be 1 to {MAX_CHOICES}")));
        }
        if self.stop.len() > MAX_STOPS || self.stop.iter().any(String::is_empty) {
            let message = format!("stop must be a text or up to {MAX_STOPS} texts, none of them empty");
            return Err(ApiError::field("stop", message));
        }
        if self.max_tokens.is_some_and(|n| n == 0 || n > i64::MAX as usize) {
            return Err(ApiError::field("max_tokens", "max_tokens must be at least 1, and fit 64 bits"));
        }
        if self.logprobs.is_some_and(|top| top > MAX_TOP_LOGPROBS) {
            let message = format!("top_logprobs must be 0 to {MAX_TOP_LOGPROBS}");
            return Err(ApiError::field("top_logprobs", message));
        }
        if self.continues && self.has_form() {
            let message = "an answer that has begun cannot have a form: leave the model's own last message away, or \
                           the form";
            return Err(ApiError::field("messages", message));
        }
        let TurnInput::Chat { tools, .. } = &self.input else { return Ok(()) };
        if tools.len() > MAX_TOOLS {
            return Err(ApiError::field("tools", format!("{MAX_TOOLS} tools at most may be on offer")));
        }
        match &self.tool_choice {
            ToolChoice::Named(name) if !tools.iter().any(|tool| tool.name == *name) => {
                Err(ApiError::field("tool_choice", format!("the tool `{name}` is not among `tools`")))
            }
            ToolChoice::Required if tools.is_empty() => {
                Err(ApiError::field("tool_choice", "tool_choice is `required` and there are no tools"))
            }
            _ => Ok(()),
        }
    }
}

fn within(name: &'static str, value: Option<f64>, low: f64, high: f64) -> Result<(), ApiError> {
    match value {
        Some(value) if !(low..=high).contains(&value) => {
            let low = if low == f64::MIN_POSITIVE { "above 0".to_owned() } else { format!("{low}") };
            Err(ApiError::field(name, format!("{name} is {value}; it must be {low} to {high}")))
        }
        _ => Ok(()),
    }
}
