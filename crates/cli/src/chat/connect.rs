//! `smoe chat --connect`: the same conversation, with a model that a server runs.
//!
//! ```text
//! conversation ──► request ──► client (a thread of its own, which waits for the server)
//!                                 │ lines of the stream
//!                                 ▼
//!                  terminal ◄── news: progress, reasoning, text, calls, figures, errors
//! ```
//!
//! Ctrl-C closes the connection, which tells the server to stop.

mod client;
mod news;

use std::fmt;
use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};
use smoe_text::ReplyEvent;

use super::Face;
use super::conversation::{Conversation, agree};
use super::monitor::{Monitor, group};
use super::terminal::Terminal;
use crate::args::{ChatArgs, SamplingArgs};
use crate::failure::Failure;
use crate::interrupt;
use client::{Client, End, Model, Trouble};
use news::{News, Usage};

/// What a prompt that does not fit is called.
const TOO_LONG: &str = "context_length_exceeded";

const HELP: &str = "\
/reset          forget the conversation
/system TEXT    set the instructions (and forget the conversation); without TEXT, show them
/model NAME     go on with another model; without NAME, list them
/think          fold or unfold the model's reasoning
/stats          figures of the last answer and of the session
/help           this list
/quit           leave (also Ctrl-D)
Ctrl-C stops an answer and keeps what was said.";

/// Talks to the server at this address.
pub fn chat(url: &str, args: &ChatArgs) -> Result<(), Failure> {
    let key =
        args.api_key.clone().or_else(|| ["SMOE_API_KEY", "OPENAI_API_KEY"].into_iter().find_map(key_from));
    let client = Client::new(url, key)?;
    let models = client.models().map_err(|trouble| Failure::new(trouble.to_string()))?;
    let model = match &args.model {
        Some(name) => find(&models, name).map_err(Failure::new)?,
        // The one that is loaded answers soonest.
        None => models.iter().find(|model| model.is_loaded).or(models.first()),
    };
    let Some(model) = model.cloned() else {
        return Err(Failure::new(format!("{} has no models", client.address())));
    };
    let talk = Talk {
        client,
        model,
        conversation: Conversation::new(args.system.clone()),
        settings: settings(&args.sampling, args.max_tokens),
        last: None,
        answered: 0,
    };
    talk.converse(&mut Terminal::new(args.plain, None)?)
}

fn key_from(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|key| !key.is_empty())
}

/// The fields of a request that were set; the others are the model's own defaults, which the server knows.
fn settings(sampling: &SamplingArgs, max_tokens: Option<usize>) -> Map<String, Value> {
    let SamplingArgs {
        temperature,
        top_k,
        top_p,
        min_p,
        repetition_penalty,
        presence_penalty,
        frequency_penalty,
        logit_bias,
        seed,
    } = sampling;
    // As decimals, as they were typed: 0.7 is not 0.699999988.
    let decimal = |x: f32| json!(x.to_string().parse::<f64>().unwrap_or(f64::from(x)));
    let unless_zero = |x: f32| (x != 0.0).then(|| decimal(x));
    let bias: Map<String, Value> =
        logit_bias.iter().map(|(id, bias)| (id.to_string(), decimal(*bias))).collect();
    let fields = [
        ("max_tokens", max_tokens.map(Value::from)),
        ("temperature", temperature.map(decimal)),
        ("top_k", top_k.map(Value::from)),
        ("top_p", top_p.map(decimal)),
        ("min_p", min_p.map(decimal)),
        ("repetition_penalty", repetition_penalty.map(decimal)),
        ("presence_penalty", unless_zero(*presence_penalty)),
        ("frequency_penalty", unless_zero(*frequency_penalty)),
        ("logit_bias", (!bias.is_empty()).then_some(Value::Object(bias))),
        ("seed", Some(json!(seed))),
    ];
    fields.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect()
}

/// A model by its name, or by how its name alone begins.
fn find<'a>(models: &'a [Model], name: &str) -> Result<Option<&'a Model>, String> {
    if let Some(model) = models.iter().find(|model| model.id == name) {
        return Ok(Some(model));
    }
    let mut alike = models.iter().filter(|model| model.id.starts_with(name));
    match (alike.next(), alike.next()) {
        (Some(model), None) => Ok(Some(model)),
        _ => {
            let names = models.iter().map(|model| model.id.as_str()).collect::<Vec<_>>().join(", ");
            Err(format!("no model {name}: the server has {names}"))
        }
    }
}

struct Talk {
    client: Client,
    model: Model,
    conversation: Conversation,
    settings: Map<String, Value>,
    last: Option<Figures>,
    answered: usize,
}

/// An answer that is over, or was stopped.
struct Answer {
    text: String,
    /// Why it ended, in the server's word; `None` if Ctrl-C did.
    finish: Option<String>,
    figures: Figures,
}

/// What an answer cost, as seen from here.
#[derive(Clone, Copy, Debug)]
struct Figures {
    /// What the server counted, if it said so.
    usage: Option<Usage>,
    first: Duration,
    /// Pieces of the answer that came.
    pieces: usize,
    rest: Duration,
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(Usage { prompt, cached, .. }) = self.usage {
            write!(f, "prompt {} tokens (+{cached} reused), ", prompt.saturating_sub(cached))?;
        }
        let tokens = self.usage.map_or(self.pieces, |usage| usage.completion as usize);
        write!(f, "first token after {:.2} s · answer {tokens} tokens", self.first.as_secs_f64())?;
        if tokens > 1 {
            write!(f, ", {:.1} tok/s", (tokens - 1) as f64 / self.rest.as_secs_f64().max(1e-9))?;
        }
        Ok(())
    }
}

impl Talk {
    fn converse(mut self, face: &mut Terminal) -> Result<(), Failure> {
        if face.is_interactive() {
            face.note(&format!("{} at {}. /help lists commands.", self.model, self.client.address()));
        }
        while let Some(line) = face.next()? {
            let line = line.trim();
            if line.is_empty() {
                continue;
            }
            let (command, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
            match command {
                "/quit" | "/exit" => break,
                "/help" => face.note(HELP),
                "/stats" => face.note(&self.stats()),
                "/model" => {
                    let told = self.choose(rest.trim());
                    face.note(&told);
                }
                _ if self.conversation.command(command, rest, face)? => {}
                _ if command.starts_with('/') => face.note("no such command; /help lists them"),
                _ => self.turn(face, line)?,
            }
        }
        Ok(())
    }

    fn stats(&self) -> String {
        let last = self.last.map_or_else(|| "none yet".to_owned(), |figures| figures.to_string());
        let Self { answered, model, client, .. } = self;
        format!(
            "last answer  {last}\nsession      {answered} answers\nserver       {model} at {}",
            client.address()
        )
    }

    /// Lists the models, or goes on with another one; what there is to say.
    fn choose(&mut self, name: &str) -> String {
        let models = match self.client.models() {
            Ok(models) => models,
            Err(trouble) => return format!("error: {trouble}"),
        };
        if name.is_empty() {
            let line = |model: &Model| {
                let sign = if model.id == self.model.id { "*" } else { " " };
                format!("{sign} {model}{}", if model.is_loaded { ", loaded" } else { "" })
            };
            return models.iter().map(line).collect::<Vec<_>>().join("\n");
        }
        match find(&models, name) {
            Ok(Some(model)) => {
                self.model = model.clone();
                format!("{} from the next answer on", self.model)
            }
            Ok(None) => "the server has no models".to_owned(),
            Err(told) => told,
        }
    }

    fn turn(&mut self, face: &mut Terminal, said: &str) -> Result<(), Failure> {
        self.conversation.ask(said);
        let answer = loop {
            match self.answer(face) {
                Ok(answer) => break answer,
                Err(trouble) => {
                    face.close(true)?;
                    let is_too_long = trouble.code.as_deref() == Some(TOO_LONG);
                    face.note(&format!("error: {trouble}"));
                    if is_too_long && !self.conversation.is_one_question() {
                        if face.is_interactive() && agree(face, "drop the oldest turn? [Y/n] ")? {
                            self.conversation.drop_oldest();
                            continue;
                        }
                        face.note("kept; /reset forgets the conversation");
                    }
                    self.conversation.take_back();
                    return Ok(());
                }
            }
        };
        face.close(false)?;
        match answer.finish.as_deref() {
            None => face.note("[stopped]"),
            Some("length") => face.note("[the limit of tokens, or of the context]"),
            Some("stop" | "tool_calls") => {}
            Some(other) => face.note(&format!("[{other}]")),
        }
        if face.is_interactive() {
            face.note(&answer.figures.to_string());
        }
        face.warn_of_context();
        if answer.finish.is_none() && answer.text.is_empty() {
            self.conversation.take_back();
        } else {
            self.conversation.answer(&answer.text);
            self.answered += 1;
            self.last = Some(answer.figures);
        }
        Ok(())
    }

    fn request(&self) -> Value {
        let mut request = json!({
            "model": self.model.id,
            "messages": self.conversation.messages(),
            "stream": true,
            "stream_options": {"include_usage": true},
            "smoe": {"progress": true},
        });
        if let Value::Object(fields) = &mut request {
            fields.extend(self.settings.clone());
        }
        request
    }

    fn answer(&mut self, face: &mut Terminal) -> Result<Answer, Trouble> {
        let cancel = interrupt::fresh();
        let begun = Instant::now();
        face.open(Monitor::new(None, self.model.context, None));
        let mut text = String::new();
        let (mut usage, mut finish) = (None, None);
        let (mut first, mut pieces) = (None, 0);
        let end = self.client.stream(&self.request(), cancel, &mut |news| {
            match news {
                News::Doing(doing) => face.update(|monitor| monitor.at(doing)),
                News::Prompt(tokens) => face.update(|monitor| monitor.prompt_is(tokens)),
                News::Said(event) => {
                    if let ReplyEvent::Text(piece) = &event {
                        text.push_str(piece);
                    }
                    if !matches!(event, ReplyEvent::ToolEnd { .. }) {
                        first.get_or_insert_with(|| begun.elapsed());
                        pieces += 1;
                        face.update(|monitor| monitor.tokens_are(pieces));
                    }
                    face.event(&event)?;
                }
                News::Usage(counted) => {
                    face.update(|monitor| {
                        monitor.prompt_is(counted.prompt as usize);
                        monitor.tokens_are(counted.completion as usize);
                    });
                    usage = Some(counted);
                }
                News::Finish(reason) => finish = Some(reason),
            }
            Ok(())
        })?;
        let total = begun.elapsed();
        let first = first.unwrap_or(total);
        let finish = match end {
            End::Done => Some(finish.unwrap_or_else(|| "stop".to_owned())),
            End::Cancelled => {
                interrupt::take();
                None
            }
        };
        let figures = Figures { usage, first, pieces, rest: total.saturating_sub(first) };
        Ok(Answer { text, finish, figures })
    }
}

impl fmt::Display for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.id)?;
        if let Some(context) = self.context {
            write!(f, ", context of {} positions", group(context as u64))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_set_is_asked_for() {
        let sampling = SamplingArgs { seed: 1337, ..SamplingArgs::default() };
        assert_eq!(Value::Object(settings(&sampling, None)), json!({"seed": 1337}));
        let sampling = SamplingArgs {
            temperature: Some(0.7),
            top_k: Some(20),
            top_p: Some(0.95),
            min_p: Some(0.0),
            repetition_penalty: Some(1.1),
            presence_penalty: -0.5,
            frequency_penalty: 0.25,
            logit_bias: vec![(7, -100.0)],
            seed: 1,
        };
        assert_eq!(
            Value::Object(settings(&sampling, Some(64))),
            json!({
                "max_tokens": 64, "temperature": 0.7, "top_k": 20, "top_p": 0.95, "min_p": 0.0,
                "repetition_penalty": 1.1, "presence_penalty": -0.5, "frequency_penalty": 0.25,
                "logit_bias": {"7": -100.0}, "seed": 1
            })
        );
    }

    #[test]
    fn a_model_is_found_by_its_name_or_a_beginning_that_no_other_has() {
        let model = |id: &str| Model { id: id.to_owned(), context: None, is_loaded: false };
        let models = [model("qwen"), model("qwen-large"), model("deepseek")];
        let found = |name| find(&models, name).map(|model| model.map(|model| model.id.as_str()));
        assert_eq!(found("qwen"), Ok(Some("qwen")));
        assert_eq!(found("deep"), Ok(Some("deepseek")));
        assert!(found("qw").is_err_and(|told| told.contains("qwen, qwen-large, deepseek")));
        assert!(found("gpt").is_err());
    }

    #[test]
    fn figures_say_what_is_known() {
        let seen = Figures {
            usage: None,
            first: Duration::from_millis(1500),
            pieces: 3,
            rest: Duration::from_secs(1),
        };
        assert_eq!(seen.to_string(), "first token after 1.50 s · answer 3 tokens, 2.0 tok/s");
        let usage = Usage { prompt: 120, cached: 100, completion: 1 };
        let counted = Figures { usage: Some(usage), ..seen };
        assert_eq!(
            counted.to_string(),
            "prompt 20 tokens (+100 reused), first token after 1.50 s · answer 1 tokens"
        );
    }
}
