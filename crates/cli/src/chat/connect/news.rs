//! The stream of an answer, read: events of a server into what there is to show.

use serde_json::Value;
use smoe_text::ReplyEvent;

use super::client::Trouble;
use crate::chat::monitor::Doing;

/// Something has happened.
#[derive(Clone, Debug, PartialEq)]
pub enum News {
    /// What the server is at.
    Doing(Doing),
    /// The prompt has so many tokens.
    Prompt(usize),
    /// A part of the answer.
    Said(ReplyEvent),
    /// The answer is over, for this reason.
    Finish(String),
    /// What it cost.
    Usage(Usage),
}

/// Tokens, as the server counts them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Of the prompt.
    pub prompt: u64,
    /// Those of them that it had already.
    pub cached: u64,
    /// Of the answer.
    pub completion: u64,
}

/// Lines of an event stream into the data of its events.
#[derive(Debug, Default)]
pub struct Events {
    data: Option<String>,
}

impl Events {
    /// Takes a line, its end excluded; the data of the event that it ends.
    pub fn line(&mut self, line: &str) -> Option<String> {
        if line.is_empty() {
            return self.data.take();
        }
        let (field, value) = line.split_once(':').unwrap_or((line, ""));
        // Comments have no field and keep the connection alive.
        if field == "data" {
            let value = value.strip_prefix(' ').unwrap_or(value);
            match &mut self.data {
                Some(data) => {
                    data.push('\n');
                    data.push_str(value);
                }
                None => self.data = Some(value.to_owned()),
            }
        }
        None
    }
}

/// Reads the events of one answer.
#[derive(Debug, Default)]
pub struct Reader {
    /// The call under way.
    call: Option<usize>,
}

impl Reader {
    /// What an event tells.
    ///
    /// # Errors
    /// The server's own error, or that this is no event of an answer.
    pub fn read(&mut self, data: &str) -> Result<Vec<News>, Trouble> {
        let event: Value = serde_json::from_str(data)
            .map_err(|error| Trouble::new(format!("the server sent what is no JSON: {error}")))?;
        if let Some(error) = event.get("error").filter(|error| !error.is_null()) {
            return Err(Trouble::from_error(error));
        }
        let mut news = Vec::new();
        progress(&event["smoe"], &mut news);
        let choice = &event["choices"][0];
        self.delta(&choice["delta"], &mut news);
        if let Some(reason) = choice["finish_reason"].as_str() {
            self.end_call(&mut news);
            news.push(News::Finish(reason.to_owned()));
        }
        if let Some(prompt) = event["usage"]["prompt_tokens"].as_u64() {
            let usage = &event["usage"];
            let count = |value: &Value| value.as_u64().unwrap_or(0);
            let cached = count(&usage["prompt_tokens_details"]["cached_tokens"]);
            news.push(News::Usage(Usage { prompt, cached, completion: count(&usage["completion_tokens"]) }));
        }
        Ok(news)
    }

    fn delta(&mut self, delta: &Value, news: &mut Vec<News>) {
        let text = |name: &str| delta[name].as_str().filter(|text| !text.is_empty()).map(str::to_owned);
        // Two names for the same are in use.
        if let Some(piece) = text("reasoning_content").or_else(|| text("reasoning")) {
            news.push(News::Said(ReplyEvent::Reasoning(piece)));
        }
        if let Some(piece) = text("content") {
            news.push(News::Said(ReplyEvent::Text(piece)));
        }
        for call in delta["tool_calls"].as_array().into_iter().flatten() {
            let index = call["index"].as_u64().unwrap_or(0) as usize;
            if self.call != Some(index) {
                self.end_call(news);
                self.call = Some(index);
                let name = call["function"]["name"].as_str().unwrap_or_default().to_owned();
                let id = call["id"].as_str().map(str::to_owned);
                news.push(News::Said(ReplyEvent::ToolBegin { index, name, id }));
            }
            if let Some(fragment) = call["function"]["arguments"].as_str() {
                let fragment = fragment.to_owned();
                news.push(News::Said(ReplyEvent::ToolArguments { index, fragment }));
            }
        }
    }

    fn end_call(&mut self, news: &mut Vec<News>) {
        if let Some(index) = self.call.take() {
            news.push(News::Said(ReplyEvent::ToolEnd { index }));
        }
    }
}

fn progress(smoe: &Value, news: &mut Vec<News>) {
    let count = |name: &str| smoe[name].as_u64().unwrap_or(0);
    let (done, total) = (count("done"), count("total"));
    let doing = match smoe["phase"].as_str() {
        Some("queued") => Doing::Queued { ahead: count("ahead") },
        Some("loading") => Doing::Loading { done, total },
        Some("prefill") => {
            // What is cached is part of the prompt, and not of what is to do.
            news.push(News::Prompt((total + count("cached")) as usize));
            Doing::Prefilling { done, total }
        }
        _ => return,
    };
    news.push(News::Doing(doing));
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(events: &[Value]) -> Vec<News> {
        let mut reader = Reader::default();
        events.iter().flat_map(|event| reader.read(&event.to_string()).unwrap()).collect()
    }

    #[test]
    fn lines_make_events() {
        let mut events = Events::default();
        let text = ": heartbeat\n\ndata: one\n\nevent: x\ndata:two\ndata: three\nid: 4\n\n\ndata\n\n";
        let data: Vec<String> = text.lines().filter_map(|line| events.line(line)).collect();
        assert_eq!(data, ["one", "two\nthree", ""]);
    }

    #[test]
    fn progress_says_what_is_waited_for() {
        let smoe = |smoe: Value| json!({"choices": [], "smoe": smoe});
        let news = read(&[
            smoe(json!({"phase": "queued", "ahead": 2})),
            smoe(json!({"phase": "loading", "done": 43, "total": 100})),
            smoe(json!({"phase": "prefill", "done": 128, "total": 512, "cached": 64})),
            smoe(json!({"phase": "of the moon"})),
        ]);
        assert_eq!(
            news,
            [
                News::Doing(Doing::Queued { ahead: 2 }),
                News::Doing(Doing::Loading { done: 43, total: 100 }),
                News::Prompt(576),
                News::Doing(Doing::Prefilling { done: 128, total: 512 }),
            ]
        );
    }

    #[test]
    fn an_answer_is_reasoning_text_calls_end_and_figures() {
        let delta = |delta: Value| json!({"choices": [{"index": 0, "delta": delta, "finish_reason": null}]});
        let news = read(&[
            delta(json!({"role": "assistant", "content": ""})),
            delta(json!({"reasoning_content": "hm"})),
            delta(json!({"content": "I look"})),
            delta(
                json!({"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "find", "arguments": ""}}]}),
            ),
            delta(json!({"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]})),
            delta(
                json!({"tool_calls": [{"index": 1, "id": "c2", "function": {"name": "cut", "arguments": "{"}}]}),
            ),
            json!({"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}),
            json!({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 4,
                "prompt_tokens_details": {"cached_tokens": 3}}}),
        ]);
        let begin = |index, name: &str, id: &str| ReplyEvent::ToolBegin {
            index,
            name: name.to_owned(),
            id: Some(id.to_owned()),
        };
        let arguments =
            |index, fragment: &str| ReplyEvent::ToolArguments { index, fragment: fragment.to_owned() };
        let said = [
            ReplyEvent::Reasoning("hm".to_owned()),
            ReplyEvent::Text("I look".to_owned()),
            begin(0, "find", "c1"),
            arguments(0, ""),
            arguments(0, "{}"),
            ReplyEvent::ToolEnd { index: 0 },
            begin(1, "cut", "c2"),
            arguments(1, "{"),
            ReplyEvent::ToolEnd { index: 1 },
        ];
        let mut expected: Vec<News> = said.into_iter().map(News::Said).collect();
        expected.push(News::Finish("tool_calls".to_owned()));
        expected.push(News::Usage(Usage { prompt: 9, cached: 3, completion: 4 }));
        assert_eq!(news, expected);
    }

    #[test]
    fn errors_in_the_stream_are_the_servers_words() {
        let mut reader = Reader::default();
        let trouble = reader.read(r#"{"error": {"message": "disk gone", "code": "io"}}"#).unwrap_err();
        assert_eq!((trouble.to_string().as_str(), trouble.code.as_deref()), ("disk gone", Some("io")));
        assert_eq!(reader.read(r#"{"error": "plain"}"#).unwrap_err().to_string(), "plain");
        assert!(reader.read("<html>").is_err());
    }
}
