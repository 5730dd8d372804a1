//! What is answered: the events of a stream, and the message in one piece.
//!
//! ```text
//! message_start (content_block_start content_block_delta* content_block_stop)* message_delta message_stop
//! ```
//!
//! One block is open at a time, and blocks are numbered in their order. An answer that fails ends in `error`,
//! wherever it is.

use serde::Serialize;
use serde_json::{Map, Value as Json};

use crate::error::ApiError;
use crate::turn::{Delta, Reason, Reply, TurnUsage};

/// Goes with all thinking: clients send back what is signed, and templates want it while tools are called.
const SIGNATURE: &str = "s-moe";

/// An event.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum Event {
    /// The answer begins: a message with nothing in it yet.
    MessageStart { message: Message },
    /// A block begins, with nothing in it yet.
    ContentBlockStart { index: usize, content_block: Block },
    /// A block goes on.
    ContentBlockDelta { index: usize, delta: Piece },
    /// A block is complete.
    ContentBlockStop { index: usize },
    /// All blocks are complete.
    MessageDelta { delta: Stop, usage: Usage },
    /// Nothing follows.
    MessageStop,
    /// Nothing has happened for a while.
    Ping,
    /// It went wrong, and nothing follows: the error object.
    #[serde(untagged)]
    Error(Json),
}

/// An answer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Message {
    id: String,
    r#type: &'static str,
    role: &'static str,
    model: String,
    content: Vec<Block>,
    #[serde(flatten)]
    stop: Stop,
    usage: Usage,
}

/// A block of an answer.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum Block {
    Text { text: String },
    Thinking { thinking: String, signature: String },
    ToolUse { id: String, name: String, input: Map<String, Json> },
}

/// What is added to a block.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
#[allow(clippy::enum_variant_names, reason = "their names are the wire's")]
pub(super) enum Piece {
    TextDelta { text: String },
    ThinkingDelta { thinking: String },
    SignatureDelta { signature: String },
    InputJsonDelta { partial_json: String },
}

/// Why an answer ended; null before.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct Stop {
    stop_reason: Option<&'static str>,
    stop_sequence: Option<String>,
}

/// Tokens. Those of the prompt are counted either as cached or as input.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct Usage {
    input_tokens: usize,
    cache_creation_input_tokens: usize,
    cache_read_input_tokens: usize,
    output_tokens: usize,
}

impl From<TurnUsage> for Usage {
    fn from(TurnUsage { job, .. }: TurnUsage) -> Self {
        Self {
            input_tokens: job.prompt.saturating_sub(job.cached),
            cache_creation_input_tokens: 0,
            cache_read_input_tokens: job.cached,
            output_tokens: job.completion,
        }
    }
}

impl Stop {
    /// Of an answer that might have had `max_tokens`.
    fn new(reason: Reason, usage: &Usage, max_tokens: usize) -> Self {
        let (reason, sequence) = match reason {
            Reason::Stop | Reason::Cancelled => ("end_turn", None),
            Reason::StopString(sequence) => ("stop_sequence", Some(sequence)),
            Reason::ToolCalls => ("tool_use", None),
            Reason::Length if usage.output_tokens < max_tokens => ("model_context_window_exceeded", None),
            Reason::Length => ("max_tokens", None),
        };
        Self { stop_reason: Some(reason), stop_sequence: sequence }
    }
}

impl Message {
    /// An answer of which nothing is known yet.
    pub(super) fn new(id: String, model: String) -> Self {
        let (r#type, role) = ("message", "assistant");
        Self { id, r#type, role, model, content: Vec::new(), stop: Stop::default(), usage: Usage::default() }
    }

    /// The same, complete.
    pub(super) fn with(mut self, reply: Reply, max_tokens: usize) -> Self {
        if !reply.reasoning.is_empty() {
            let signature = SIGNATURE.to_owned();
            self.content.push(Block::Thinking { thinking: reply.reasoning, signature });
        }
        if !reply.text.is_empty() {
            self.content.push(Block::Text { text: reply.text });
        }
        self.content.extend(reply.calls.into_iter().map(|call| {
            // What the limit cut short, or the model wrote wrongly, is no object.
            let input = serde_json::from_str(&call.arguments).unwrap_or_default();
            Block::ToolUse { id: call.id, name: call.name, input }
        }));
        self.usage = reply.usage.into();
        self.stop = Stop::new(reply.reason.unwrap_or(Reason::Stop), &self.usage, max_tokens);
        self
    }
}

impl Event {
    /// As JSON.
    pub(super) fn data(&self) -> Json {
        // Nothing in it can fail: no maps but of strings, no numbers but whole ones.
        serde_json::to_value(self).unwrap_or_default()
    }
}

/// Turns the course of an answer into events.
#[derive(Debug)]
pub(super) struct Events {
    /// Until the answer begins.
    message: Option<Message>,
    max_tokens: usize,
    request_id: String,
    /// Blocks that are complete.
    blocks: usize,
    open: Option<Open>,
    ended: bool,
}

/// The open block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Open {
    Text,
    Thinking,
    /// The call of this number.
    Tool(usize),
}

impl Events {
    /// For an answer of at most `max_tokens` that begins with `message`.
    pub(super) fn new(message: Message, max_tokens: usize, request_id: String) -> Self {
        Self { message: Some(message), max_tokens, request_id, blocks: 0, open: None, ended: false }
    }

    /// The events of a step. What belongs to no open block, or comes after the end, has none.
    pub(super) fn push(&mut self, delta: Delta) -> Vec<Event> {
        let mut out = Vec::new();
        if self.ended {
            return out;
        }
        match delta {
            Delta::Accepted { prompt_tokens, .. } => self.begin(prompt_tokens, &mut out),
            Delta::Text { text, .. } if !text.is_empty() => {
                self.open(Open::Text, Block::Text { text: String::new() }, &mut out);
                self.add(Piece::TextDelta { text }, &mut out);
            }
            Delta::Reasoning { text: thinking, .. } if !thinking.is_empty() => {
                let block = Block::Thinking { thinking: String::new(), signature: String::new() };
                self.open(Open::Thinking, block, &mut out);
                self.add(Piece::ThinkingDelta { thinking }, &mut out);
            }
            Delta::ToolBegin { index, id, name, .. } => {
                self.close(&mut out);
                self.open(Open::Tool(index), Block::ToolUse { id, name, input: Map::new() }, &mut out);
            }
            Delta::ToolArguments { index, fragment, .. } if self.open == Some(Open::Tool(index)) => {
                self.add(Piece::InputJsonDelta { partial_json: fragment }, &mut out);
            }
            Delta::End { reason, usage, .. } => {
                self.begin(usage.job.prompt, &mut out);
                self.close(&mut out);
                let usage = usage.into();
                let delta = Stop::new(reason, &usage, self.max_tokens);
                out.extend([Event::MessageDelta { delta, usage }, Event::MessageStop]);
                self.ended = true;
            }
            Delta::Error(error) => {
                out.push(self.failed(&error));
                self.ended = true;
            }
            _ => {}
        }
        out
    }

    fn failed(&self, error: &ApiError) -> Event {
        Event::Error(error.anthropic(&self.request_id))
    }

    fn begin(&mut self, prompt_tokens: usize, out: &mut Vec<Event>) {
        if let Some(mut message) = self.message.take() {
            message.usage.input_tokens = prompt_tokens;
            out.push(Event::MessageStart { message });
        }
    }

    fn open(&mut self, kind: Open, block: Block, out: &mut Vec<Event>) {
        self.begin(0, out);
        if self.open != Some(kind) {
            self.close(out);
            out.push(Event::ContentBlockStart { index: self.blocks, content_block: block });
            self.open = Some(kind);
        }
    }

    fn add(&self, delta: Piece, out: &mut Vec<Event>) {
        out.push(Event::ContentBlockDelta { index: self.blocks, delta });
    }

    fn close(&mut self, out: &mut Vec<Event>) {
        let Some(open) = self.open.take() else { return };
        if open == Open::Thinking {
            self.add(Piece::SignatureDelta { signature: SIGNATURE.to_owned() }, out);
        }
        out.push(Event::ContentBlockStop { index: self.blocks });
        self.blocks += 1;
    }
}
