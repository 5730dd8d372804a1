//! Answers in OpenAI's shapes: whole ones, and chunks.

use serde_json::{Map, Value as Json, json};

use crate::id;
use crate::turn::{Delta, Phase, Reason, Reply, TokenLogprob, TokenText, TurnInfo, TurnUsage};

/// Which of the two APIs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Chat,
    Text,
}

/// Writes the answer to one request.
#[derive(Debug)]
pub(super) struct Writer {
    kind: Kind,
    id: String,
    info: TurnInfo,
    include_usage: bool,
    /// Choices of a prompt.
    n: usize,
    /// What each choice has told, and took when it is over; those of a prompt one after the other.
    choices: Vec<Choice>,
}

#[derive(Clone, Debug, Default)]
struct Choice {
    begun: bool,
    /// Bytes of text so far.
    offset: usize,
    usage: Option<TurnUsage>,
}

impl Writer {
    pub(super) fn new(kind: Kind, info: TurnInfo, prompts: usize, n: usize, include_usage: bool) -> Self {
        let id = id::new(if kind == Kind::Chat { "chatcmpl-" } else { "cmpl-" });
        Self { kind, id, info, include_usage, n, choices: vec![Choice::default(); prompts * n] }
    }

    /// All choices are over.
    pub(super) fn is_over(&self) -> bool {
        self.choices.iter().all(|choice| choice.usage.is_some())
    }

    /// The chunks that a delta makes; its choices are counted from `offset` on.
    pub(super) fn chunks(&mut self, offset: usize, delta: Delta) -> Vec<Json> {
        match delta {
            Delta::Phase(phase) => vec![self.phase(phase)],
            Delta::Accepted { echo: Some(echo), .. } => {
                let choices = offset..offset + self.n;
                choices.map(|choice| self.text(choice, &echo, &[])).collect()
            }
            Delta::Accepted { .. } => Vec::new(),
            Delta::Reasoning { choice, text } => {
                self.delta(offset + choice, json!({"reasoning_content": text}), &[])
            }
            Delta::Text { choice, text, logprobs } if self.kind == Kind::Text => {
                vec![self.text(offset + choice, &text, &logprobs)]
            }
            Delta::Text { choice, text, logprobs } => {
                self.delta(offset + choice, json!({"content": text}), &logprobs)
            }
            Delta::ToolBegin { choice, index, id, name } => {
                let call = json!({
                    "index": index,
                    "id": id,
                    "type": "function",
                    "function": {"name": name, "arguments": ""},
                });
                self.delta(offset + choice, json!({"tool_calls": [call]}), &[])
            }
            Delta::ToolArguments { choice, index, fragment } => {
                let call = json!({"index": index, "function": {"arguments": fragment}});
                self.delta(offset + choice, json!({"tool_calls": [call]}), &[])
            }
            Delta::End { choice, reason, usage } => self.end(offset + choice, &reason, usage),
            Delta::Error(error) => vec![error.openai()],
        }
    }

    /// A chunk of a chat; before the first of a choice, the one that names the role.
    fn delta(&mut self, choice: usize, delta: Json, logprobs: &[TokenLogprob]) -> Vec<Json> {
        let mut chunks = self.begin(choice);
        let logprobs = if logprobs.is_empty() { Json::Null } else { chat_logprobs(logprobs) };
        let choice = json!({"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": null});
        chunks.push(self.chunk(json!([choice])));
        chunks
    }

    fn begin(&mut self, choice: usize) -> Vec<Json> {
        if self.kind == Kind::Text || std::mem::replace(&mut self.choices[choice].begun, true) {
            return Vec::new();
        }
        let delta = json!({"role": "assistant", "content": ""});
        let first = json!({"index": choice, "delta": delta, "logprobs": null, "finish_reason": null});
        vec![self.chunk(json!([first]))]
    }

    fn text(&mut self, choice: usize, text: &str, logprobs: &[TokenLogprob]) -> Json {
        let offset = self.choices[choice].offset;
        self.choices[choice].offset += text.len();
        let logprobs = if logprobs.is_empty() { Json::Null } else { text_logprobs(logprobs, offset) };
        let choice = json!({"index": choice, "text": text, "logprobs": logprobs, "finish_reason": null});
        self.chunk(json!([choice]))
    }

    fn end(&mut self, choice: usize, reason: &Reason, usage: TurnUsage) -> Vec<Json> {
        let mut chunks = self.begin(choice);
        let mut last = json!({"index": choice, "logprobs": null, "finish_reason": finish(reason)});
        match self.kind {
            Kind::Chat => last["delta"] = json!({}),
            Kind::Text => last["text"] = "".into(),
        }
        chunks.push(self.chunk(json!([last])));
        self.choices[choice].usage = Some(usage);
        if self.include_usage && self.is_over() {
            let mut chunk = self.chunk(json!([]));
            chunk["usage"] = usage_of(self.n, self.choices.iter().filter_map(|choice| choice.usage));
            chunks.push(chunk);
        }
        chunks
    }

    /// Progress, for clients that asked for it.
    fn phase(&self, phase: Phase) -> Json {
        let mut chunk = self.chunk(json!([]));
        chunk["smoe"] = match phase {
            Phase::Queued { ahead } => json!({"phase": "queued", "ahead": ahead}),
            Phase::Loading { done, total } => json!({"phase": "loading", "done": done, "total": total}),
            // Of the whole prompt: what was cached is done.
            Phase::Prefill { done, total, cached } => {
                json!({"phase": "prefill", "done": done + cached, "total": total + cached, "cached": cached})
            }
            Phase::Decode => json!({"phase": "decode"}),
        };
        chunk
    }

    fn chunk(&self, choices: Json) -> Json {
        let mut chunk = self.head(match self.kind {
            Kind::Chat => "chat.completion.chunk",
            Kind::Text => "text_completion",
        });
        chunk.insert("choices".to_owned(), choices);
        if self.include_usage {
            chunk.insert("usage".to_owned(), Json::Null);
        }
        Json::Object(chunk)
    }

    fn head(&self, object: &str) -> Map<String, Json> {
        let mut head = Map::new();
        head.insert("id".to_owned(), self.id.as_str().into());
        head.insert("object".to_owned(), object.into());
        head.insert("created".to_owned(), self.info.created.into());
        head.insert("model".to_owned(), self.info.model.as_str().into());
        head.insert("system_fingerprint".to_owned(), self.info.fingerprint.as_str().into());
        head
    }

    /// The answer at once.
    pub(super) fn whole(&self, replies: &[Reply]) -> Json {
        let choices = replies.iter().enumerate().map(|(index, reply)| {
            let finish = reply.reason.as_ref().map(finish);
            let mut choice = json!({"index": index});
            match self.kind {
                Kind::Chat => {
                    choice["message"] = message(reply);
                    choice["logprobs"] = logprobs_or_null(&reply.logprobs, chat_logprobs);
                }
                Kind::Text => {
                    choice["text"] = reply.text.as_str().into();
                    choice["logprobs"] = logprobs_or_null(&reply.logprobs, |told| text_logprobs(told, 0));
                }
            }
            choice["finish_reason"] = finish.into();
            choice
        });
        let choices = choices.collect();
        let mut whole = self.head(match self.kind {
            Kind::Chat => "chat.completion",
            Kind::Text => "text_completion",
        });
        whole.insert("choices".to_owned(), choices);
        whole.insert("usage".to_owned(), usage_of(self.n, replies.iter().map(|reply| reply.usage)));
        Json::Object(whole)
    }
}

fn message(reply: &Reply) -> Json {
    let silent = reply.text.is_empty() && !reply.calls.is_empty();
    let content = if silent { Json::Null } else { reply.text.as_str().into() };
    let mut message = json!({"role": "assistant", "content": content, "refusal": null});
    if !reply.reasoning.is_empty() {
        message["reasoning_content"] = reply.reasoning.as_str().into();
    }
    if !reply.calls.is_empty() {
        let call = |call: &crate::turn::ReplyCall| {
            json!({
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            })
        };
        message["tool_calls"] = reply.calls.iter().map(call).collect();
    }
    message
}

fn finish(reason: &Reason) -> &'static str {
    match reason {
        Reason::Stop | Reason::StopString(_) | Reason::Cancelled => "stop",
        Reason::Length => "length",
        Reason::ToolCalls => "tool_calls",
    }
}

/// A prompt counts once, however many answers it has.
fn usage_of(n: usize, choices: impl Iterator<Item = TurnUsage>) -> Json {
    let choices: Vec<TurnUsage> = choices.collect();
    let prompts = || choices.iter().step_by(n);
    let prompt: usize = prompts().map(|usage| usage.job.prompt).sum();
    let cached: usize = prompts().map(|usage| usage.job.cached).sum();
    let completion: usize = choices.iter().map(|usage| usage.job.completion).sum();
    let reasoning: usize = choices.iter().map(|usage| usage.reasoning).sum();
    json!({
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    })
}

fn logprobs_or_null(told: &[TokenLogprob], shape: impl Fn(&[TokenLogprob]) -> Json) -> Json {
    if told.is_empty() { Json::Null } else { shape(told) }
}

fn chat_logprobs(told: &[TokenLogprob]) -> Json {
    let one = |token: &TokenText, logprob: f32| json!({"token": token.text, "logprob": logprob, "bytes": token.bytes});
    let content = told.iter().map(|told| {
        let mut entry = one(&told.token, told.logprob);
        entry["top_logprobs"] = told.top.iter().map(|(token, logprob)| one(token, *logprob)).collect();
        entry
    });
    json!({"content": content.collect::<Vec<Json>>(), "refusal": null})
}

fn text_logprobs(told: &[TokenLogprob], mut offset: usize) -> Json {
    let mut offsets = Vec::with_capacity(told.len());
    for told in told {
        offsets.push(offset);
        offset += told.token.text.len();
    }
    let top = told.iter().map(|told| {
        let top = told.top.iter().map(|(token, logprob)| (token.text.clone(), Json::from(*logprob)));
        top.collect::<Map<String, Json>>()
    });
    json!({
        "tokens": told.iter().map(|told| told.token.text.as_str()).collect::<Vec<_>>(),
        "token_logprobs": told.iter().map(|told| told.logprob).collect::<Vec<_>>(),
        "top_logprobs": top.collect::<Vec<_>>(),
        "text_offset": offsets,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_counts_once() {
        let one = |completion| TurnUsage {
            job: smoe_engine::Usage { prompt: 10, cached: 4, completion, ..Default::default() },
            reasoning: 1,
        };
        let usage = usage_of(2, [3, 5, 1, 1].into_iter().map(one));
        assert_eq!(usage["prompt_tokens"], 20);
        assert_eq!(usage["completion_tokens"], 10);
        assert_eq!(usage["total_tokens"], 30);
        assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 8);
        assert_eq!(usage["completion_tokens_details"]["reasoning_tokens"], 4);
    }
}
