//! HTTP to a server that speaks OpenAI's API.

use std::fmt;
use std::io::{self, BufRead, BufReader, Read};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender};
use std::time::Duration;

use serde_json::Value;
use ureq::{Agent, Body, http};

use super::news::{Events, News, Reader};
use crate::failure::Failure;

/// Time to find the server and to be let in.
const CONNECT: Duration = Duration::from_secs(10);
/// Time for an answer that needs no model.
const SHORT: Duration = Duration::from_secs(30);
/// Time between two looks at Ctrl-C.
const LOOK: Duration = Duration::from_millis(50);
/// No line of a stream is longer, unless something is wrong.
const LONGEST_LINE: u64 = 16 << 20;
/// No error body is read further.
const LONGEST_ERROR: u64 = 64 << 10;

/// A server and how to be let in.
#[derive(Debug)]
pub struct Client {
    base: String,
    key: Option<String>,
}

/// A model that a server has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Model {
    /// Its name.
    pub id: String,
    /// Positions of its context, where the server says so.
    pub context: Option<usize>,
    /// It is in memory.
    pub is_loaded: bool,
}

/// How a stream ended that did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The server had no more to say.
    Done,
    /// It was no longer wanted.
    Cancelled,
}

/// Why a request did not get what it asked for.
#[derive(Debug, PartialEq, Eq)]
pub struct Trouble {
    message: String,
    /// The server's name for it.
    pub code: Option<String>,
}

impl Trouble {
    /// In words.
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), code: None }
    }

    /// The `error` of a body or of an event.
    pub fn from_error(error: &Value) -> Self {
        let message = error["message"].as_str().or(error.as_str());
        let message = message.map_or_else(|| error.to_string(), str::to_owned);
        Self { message, code: error["code"].as_str().map(str::to_owned) }
    }
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl Client {
    /// For the server at this address: `http://` and the `/v1` of other clients may be there or not.
    pub fn new(url: &str, key: Option<String>) -> Result<Self, Failure> {
        let usage = |what: String| Failure::Usage(format!("--connect {url}: {what}"));
        let (scheme, rest) = url.trim().split_once("://").unwrap_or(("http", url.trim()));
        match scheme {
            "http" => {}
            "https" => {
                let why = "no TLS here: let a proxy or `ssh -L` bring the server near as http";
                return Err(usage(why.to_owned()));
            }
            scheme => return Err(usage(format!("{scheme} is not http"))),
        }
        let rest = rest.trim_end_matches('/');
        let base = format!("http://{}", rest.strip_suffix("/v1").unwrap_or(rest));
        let parsed: http::Uri =
            base.parse().map_err(|error| usage(format!("no address of a server: {error}")))?;
        if parsed.host().is_none_or(str::is_empty) {
            return Err(usage("no address of a server".to_owned()));
        }
        Ok(Self { base, key })
    }

    /// Where the server is.
    pub fn address(&self) -> &str {
        &self.base
    }

    fn agent(&self, whole: Option<Duration>) -> Agent {
        Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .timeout_resolve(Some(CONNECT))
            .timeout_connect(Some(CONNECT))
            .timeout_global(whole)
            .build()
            .into()
    }

    fn authorization(&self) -> Option<String> {
        self.key.as_ref().map(|key| format!("Bearer {key}"))
    }

    /// The models of the server.
    pub fn models(&self) -> Result<Vec<Model>, Trouble> {
        let mut request = self.agent(Some(SHORT)).get(format!("{}/v1/models", self.base));
        if let Some(authorization) = self.authorization() {
            request = request.header("authorization", authorization);
        }
        let response = request.call().map_err(|error| unreachable(&self.base, &error))?;
        let mut body = accepted(response)?;
        let text = body.read_to_string().map_err(|error| unreachable(&self.base, &error))?;
        let list: Value = serde_json::from_str(&text)
            .map_err(|_| Trouble::new(format!("{} does not answer as a model server does", self.base)))?;
        let model = |entry: &Value| {
            Some(Model {
                id: entry["id"].as_str()?.to_owned(),
                context: entry["smoe"]["context"].as_u64().map(|context| context as usize),
                is_loaded: entry["smoe"]["loaded"] == true,
            })
        };
        Ok(list["data"].as_array().into_iter().flatten().filter_map(model).collect())
    }

    /// Asks for an answer, and tells of it as it comes, until it is over or `cancel` is set; then the connection
    /// is closed.
    pub fn stream(
        &self,
        request: &Value,
        cancel: &AtomicBool,
        tell: &mut dyn FnMut(News) -> io::Result<()>,
    ) -> Result<End, Trouble> {
        let agent = self.agent(None);
        let lines = self.send(&agent, request);
        let ended = follow(&lines, cancel, tell);
        // Also when the end is an error: whatever the thread is at, it comes to an end.
        agent.shutdown();
        ended
    }

    /// The lines of the answer, from a thread that may have to wait for each of them.
    fn send(&self, agent: &Agent, request: &Value) -> Receiver<Result<String, Trouble>> {
        // A reader that is slow makes the server wait, not this process grow.
        let (send, lines) = mpsc::sync_channel(64);
        let agent = agent.clone();
        let base = self.base.clone();
        let authorization = self.authorization();
        let request = request.to_string();
        std::thread::spawn(move || {
            let mut post = agent
                .post(format!("{base}/v1/chat/completions"))
                .header("content-type", "application/json")
                .header("accept", "text/event-stream");
            if let Some(authorization) = authorization {
                post = post.header("authorization", authorization);
            }
            let response = post.send(request).map_err(|error| unreachable(&base, &error));
            if let Err(trouble) = response.and_then(accepted).and_then(|body| read(body, &send)) {
                // Nobody may be there any more.
                let _ = send.send(Err(trouble));
            }
        });
        lines
    }
}

/// Hands on the lines of a body.
fn read(body: Body, send: &SyncSender<Result<String, Trouble>>) -> Result<(), Trouble> {
    let mut reader = BufReader::new(body.into_reader());
    loop {
        let mut line = Vec::new();
        let n = reader
            .by_ref()
            .take(LONGEST_LINE)
            .read_until(b'\n', &mut line)
            .map_err(|error| Trouble::new(format!("the connection broke: {error}")))?;
        if n as u64 == LONGEST_LINE {
            return Err(Trouble::new("the server's line has no end"));
        }
        if n == 0 {
            return Ok(());
        }
        let line = String::from_utf8_lossy(&line);
        if send.send(Ok(line.trim_end_matches(['\n', '\r']).to_owned())).is_err() {
            return Ok(());
        }
    }
}

/// Reads the lines as they come.
fn follow(
    lines: &Receiver<Result<String, Trouble>>,
    cancel: &AtomicBool,
    tell: &mut dyn FnMut(News) -> io::Result<()>,
) -> Result<End, Trouble> {
    let (mut events, mut reader) = (Events::default(), Reader::default());
    let mut is_over = false;
    loop {
        if cancel.load(Ordering::Relaxed) && !is_over {
            return Ok(End::Cancelled);
        }
        let data = match lines.recv_timeout(LOOK) {
            Ok(line) if !is_over => events.line(&line?),
            // The server is given a moment to end what it sends.
            Ok(Ok(_)) => continue,
            Err(RecvTimeoutError::Timeout) if !is_over => continue,
            Err(RecvTimeoutError::Disconnected) if !is_over => {
                return Err(Trouble::new("the server closed the connection before the answer was over"));
            }
            Ok(Err(_)) | Err(_) => return Ok(End::Done),
        };
        match data.as_deref() {
            None => {}
            Some("[DONE]") => is_over = true,
            Some(data) => {
                for news in reader.read(data)? {
                    tell(news).map_err(|error| Trouble::new(error.to_string()))?;
                }
            }
        }
    }
}

/// The body of a response that is no refusal.
fn accepted(response: http::Response<Body>) -> Result<Body, Trouble> {
    let status = response.status();
    let mut body = response.into_body();
    if status.is_success() {
        return Ok(body);
    }
    let text = body.with_config().limit(LONGEST_ERROR).lossy_utf8(true).read_to_string().unwrap_or_default();
    let error =
        serde_json::from_str::<Value>(&text).ok().and_then(|mut body| body.get_mut("error").map(Value::take));
    let mut trouble = error.map_or_else(|| Trouble::new(""), |error| Trouble::from_error(&error));
    trouble.message = match (status.as_u16(), trouble.message.as_str()) {
        (401 | 403, message) => {
            let hint = "give --api-key, or set SMOE_API_KEY";
            format!("the server wants an API key ({}): {hint}{}", status.as_u16(), told(message))
        }
        (code, "") => format!("the server answered {code} {}", status.canonical_reason().unwrap_or_default()),
        (_, message) => message.to_owned(),
    };
    Err(trouble)
}

fn told(message: &str) -> String {
    if message.is_empty() { String::new() } else { format!(" ({message})") }
}

fn unreachable(base: &str, error: &ureq::Error) -> Trouble {
    Trouble::new(format!("{base}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_may_be_short_or_another_clients() {
        let base =
            |url| Client::new(url, None).map(|client| client.base).map_err(|failure| failure.to_string());
        for url in
            ["localhost:8080", "http://localhost:8080/", "http://localhost:8080/v1", "localhost:8080/v1/"]
        {
            assert_eq!(base(url), Ok("http://localhost:8080".to_owned()), "{url}");
        }
        assert_eq!(base("http://host/smoe"), Ok("http://host/smoe".to_owned()));
        for (url, why) in [
            ("https://x", "TLS"),
            ("ftp://x", "ftp"),
            ("", "address"),
            ("http://", "address"),
            ("a b", "address"),
        ] {
            assert!(base(url).is_err_and(|told| told.contains(why)), "{url}");
        }
    }
}
