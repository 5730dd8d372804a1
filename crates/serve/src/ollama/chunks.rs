//! What is answered: the lines of a stream, and the answer in one piece.

use std::time::{Duration, Instant};

use serde_json::{Map, Value as Json, json};

use crate::id::{rfc3339, unix_seconds};
use crate::turn::{Delta, Reason, Reply, TurnUsage};

/// Where an answer's text stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// In a message.
    Chat,
    /// In the line itself.
    Generate,
}

/// Turns the course of an answer into lines. A call is told when it is complete.
#[derive(Debug)]
pub(super) struct Chunks {
    form: Form,
    model: String,
    asked: Instant,
    /// The call that is being told: its name, and its arguments so far.
    call: Option<(String, String)>,
    ended: bool,
}

impl Chunks {
    /// For an answer that was asked for at this time.
    pub(super) fn new(form: Form, model: String, asked: Instant) -> Self {
        Self { form, model, asked, call: None, ended: false }
    }

    /// The lines of a step. What comes after the end has none.
    pub(super) fn push(&mut self, delta: Delta) -> Vec<Json> {
        let mut out = Vec::new();
        if self.ended {
            return out;
        }
        match delta {
            Delta::Text { text, .. } if !text.is_empty() => {
                self.call_over(&mut out);
                out.push(self.said(json!({"role": "assistant", "content": text})));
            }
            Delta::Reasoning { text, .. } if !text.is_empty() => {
                self.call_over(&mut out);
                out.push(self.said(json!({"role": "assistant", "content": "", "thinking": text})));
            }
            Delta::ToolBegin { name, .. } => {
                self.call_over(&mut out);
                self.call = Some((name, String::new()));
            }
            Delta::ToolArguments { fragment, .. } => {
                if let Some((_, arguments)) = &mut self.call {
                    arguments.push_str(&fragment);
                }
            }
            Delta::End { reason, usage, .. } => {
                self.call_over(&mut out);
                out.push(self.done(json!({"role": "assistant", "content": ""}), &reason, &usage));
                self.ended = true;
            }
            Delta::Error(error) => {
                out.push(error.ollama());
                self.ended = true;
            }
            _ => {}
        }
        out
    }

    /// The answer in one piece.
    pub(super) fn whole(&self, reply: Reply) -> Json {
        let mut message = json!({"role": "assistant", "content": reply.text});
        if !reply.reasoning.is_empty() {
            message["thinking"] = reply.reasoning.into();
        }
        if !reply.calls.is_empty() {
            message["tool_calls"] =
                reply.calls.iter().map(|call| called(&call.name, &call.arguments)).collect();
        }
        self.done(message, &reply.reason.unwrap_or(Reason::Stop), &reply.usage)
    }

    fn call_over(&mut self, out: &mut Vec<Json>) {
        if let Some((name, arguments)) = self.call.take() {
            let calls = [called(&name, &arguments)];
            out.push(self.said(json!({"role": "assistant", "content": "", "tool_calls": calls})));
        }
    }

    fn said(&self, mut message: Json) -> Json {
        let now = rfc3339(unix_seconds());
        let mut line = json!({"model": self.model, "created_at": now});
        match self.form {
            Form::Chat => line["message"] = message,
            Form::Generate => {
                line["response"] = message["content"].take();
                if let Some(thinking) = message.get_mut("thinking") {
                    line["thinking"] = thinking.take();
                }
            }
        }
        line["done"] = false.into();
        line
    }

    /// The answer to who wanted the model loaded, and nothing said.
    pub(super) fn loaded(&self) -> Json {
        let mut line = self.said(json!({"role": "assistant", "content": ""}));
        line["done"] = true.into();
        line["done_reason"] = "load".into();
        line
    }

    fn done(&self, message: Json, reason: &Reason, TurnUsage { job, .. }: &TurnUsage) -> Json {
        let total = self.asked.elapsed();
        let mut last = self.said(message);
        let end = json!({
            "done": true,
            "done_reason": if *reason == Reason::Length { "length" } else { "stop" },
            "total_duration": ns(total),
            // Whatever came before the prompt: the model's loading, and others.
            "load_duration": ns(total.saturating_sub(job.prefill + job.decode)),
            "prompt_eval_count": job.prompt,
            "prompt_eval_duration": ns(job.prefill),
            "eval_count": job.completion,
            "eval_duration": ns(job.decode),
        });
        if let (Some(last), Json::Object(end)) = (last.as_object_mut(), end) {
            last.extend(end);
        }
        last
    }
}

fn called(name: &str, arguments: &str) -> Json {
    // What the limit cut short, or the model wrote wrongly, is no object.
    let arguments: Map<String, Json> = serde_json::from_str(arguments).unwrap_or_default();
    json!({"function": {"name": name, "arguments": arguments}})
}

fn ns(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
