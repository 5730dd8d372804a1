//! HTTP as bytes: enough to send anything, and to see a response while it comes.

use std::net::SocketAddr;

use serde_json::Value as Json;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

/// A response that is complete.
#[derive(Debug)]
pub struct Reply {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: String,
}

impl Reply {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n == name).map(|(_, value)| value.as_str())
    }

    pub fn json(&self) -> Json {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {self:?}"))
    }

    /// The body, if all went well.
    pub fn ok(&self) -> Json {
        assert_eq!(self.status, 200, "{}", self.body);
        self.json()
    }

    /// Status and OpenAI's `code` and `param`.
    pub fn error(&self) -> (u16, String, String) {
        let error = &self.json()["error"];
        let text = |field: &str| error[field].as_str().unwrap_or_default().to_owned();
        assert!(!text("message").is_empty() && !text("type").is_empty(), "{}", self.body);
        (self.status, text("code"), text("param"))
    }

    /// The data of the stream's events; the last is `[DONE]` and is left away.
    pub fn events(&self) -> Vec<Json> {
        assert_eq!(self.status, 200, "{}", self.body);
        let mut data: Vec<&str> = self.body.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
        assert_eq!(data.pop(), Some("[DONE]"), "{}", self.body);
        data.into_iter().map(|data| serde_json::from_str(data).unwrap()).collect()
    }
}

/// A response while it comes.
pub struct Incoming {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    stream: BufReader<TcpStream>,
    chunked: bool,
    /// What has come and was not asked for yet.
    held: Vec<u8>,
}

impl Incoming {
    /// The next line of the body; `None` at its end.
    pub async fn line(&mut self) -> Option<String> {
        loop {
            if let Some(end) = self.held.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.held.drain(..=end).collect();
                return Some(String::from_utf8(line).unwrap().trim_end().to_owned());
            }
            if !self.more().await {
                return None;
            }
        }
    }

    /// The next event of a stream.
    pub async fn event(&mut self) -> Option<String> {
        loop {
            let line = self.line().await?;
            if let Some(data) = line.strip_prefix("data: ") {
                return Some(data.to_owned());
            }
        }
    }

    async fn more(&mut self) -> bool {
        if !self.chunked {
            return self.stream.read_buf(&mut self.held).await.unwrap() > 0;
        }
        let mut size = String::new();
        if self.stream.read_line(&mut size).await.unwrap_or(0) == 0 {
            return false;
        }
        let size = usize::from_str_radix(size.trim(), 16).unwrap();
        let mut chunk = vec![0; size + 2];
        self.stream.read_exact(&mut chunk).await.unwrap();
        self.held.extend(&chunk[..size]);
        size > 0
    }

    pub async fn rest(mut self) -> Reply {
        while self.more().await {}
        let body = String::from_utf8(self.held).unwrap();
        Reply { status: self.status, headers: self.headers, body }
    }
}

/// Sends a request and reads the head of its response.
pub async fn open(
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> Incoming {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let mut head = format!("{method} {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n");
    if !body.is_empty() {
        head += &format!("content-length: {}\r\ncontent-type: application/json\r\n", body.len());
    }
    for (name, value) in headers {
        head += &format!("{name}: {value}\r\n");
    }
    stream.write_all(format!("{head}\r\n").as_bytes()).await.unwrap();
    // A server that refuses a body may close before it has all of it.
    let _ = stream.write_all(body).await;
    read_head(stream).await
}

/// Reads the head of a response.
pub async fn read_head(stream: TcpStream) -> Incoming {
    let mut stream = BufReader::new(stream);
    let mut line = String::new();
    stream.read_line(&mut line).await.unwrap();
    let status = line.split(' ').nth(1).unwrap_or_else(|| panic!("no status in {line:?}")).parse().unwrap();
    let mut headers = Vec::new();
    loop {
        let mut line = String::new();
        stream.read_line(&mut line).await.unwrap();
        let Some((name, value)) = line.trim_end().split_once(": ") else { break };
        headers.push((name.to_owned(), value.to_owned()));
    }
    let chunked = headers.iter().any(|(name, value)| name == "transfer-encoding" && value == "chunked");
    Incoming { status, headers, stream, chunked, held: Vec::new() }
}

/// Sends a request and reads its whole response.
pub async fn request(
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> Reply {
    open(address, method, path, headers, body).await.rest().await
}
