//! A server on a real socket, over a scripted model; and a client that sees bytes.
//!
//! The script: the model says what follows `SAY:` in the last message, byte by byte (a token of the tiny tokeniser
//! is a byte), then its end token. Without `SAY:` it says its prompt backwards.
#![allow(dead_code, reason = "each test binary uses a part of it")]

pub mod client;
pub mod fake;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Value as Json, json};
use smoe_engine::{EngineError, Vault};
use smoe_format::Encoding;
use smoe_serve::fleet::{Fleet, LoaderConfig, Opened, Start, Starting};
use smoe_serve::{Config, Server};
use smoe_testkit::TinyModel;
use smoe_testkit::tiny::tokenizer;
use smoe_testkit::vault::write_vault;
use tempfile::TempDir;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use client::Reply;
use fake::Fake;

/// Calls as Qwen writes them, tools and all.
pub const TOOLS: &str = "\
{%- if tools %}{{- '<tools>' ~ (tools | tojson) ~ '</tools>' }}{% endif %}
{%- for message in messages %}
    {{- '<|im_start|>' ~ message.role ~ '\\n' ~ (message.content or '') }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>\\n{\"name\": \"' ~ call.function.name ~ '\", \"arguments\": ' }}
        {{- (call.function.arguments | tojson) ~ '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
";

/// Opens the reasoning itself.
pub const THINKING: &str = "\
{%- for message in messages %}{{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}{% endfor %}
{{- '<|im_start|>assistant\\n<think>\\n' }}{# </think> #}";

/// Positions of a scripted model.
pub const CONTEXT: usize = 1000;

/// A server to be.
pub struct Setup {
    pub config: Config,
    pub fake: Arc<Fake>,
    pub resident: usize,
    /// As many as the scripted model's, unless it is said.
    pub max_waiting: Option<usize>,
    pub vaults: Vec<(&'static str, &'static str)>,
    /// Instead of the scripted model.
    pub start: Option<Start>,
    /// Instead of tiny vaults.
    pub paths: Vec<PathBuf>,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            config: Config { port: 0, ..Config::default() },
            fake: Arc::default(),
            resident: 1,
            max_waiting: None,
            vaults: vec![("tiny", TOOLS)],
            start: None,
            paths: Vec::new(),
        }
    }
}

/// A server that runs.
pub struct Site {
    pub address: SocketAddr,
    pub fake: Arc<Fake>,
    pub fleet: Arc<Fleet>,
    pub directory: TempDir,
    stop: Option<oneshot::Sender<()>>,
    running: JoinHandle<()>,
}

impl Site {
    pub async fn new() -> Self {
        Self::with(Setup::default()).await
    }

    pub async fn with(setup: Setup) -> Self {
        let Setup { config, fake, resident, max_waiting, vaults, start, mut paths } = setup;
        let max_waiting = max_waiting.unwrap_or(fake.max_queued);
        let directory = tempfile::tempdir().unwrap();
        for (name, template) in vaults {
            tiny_vault(&directory.path().join(name), template);
        }
        if paths.is_empty() {
            paths.push(directory.path().to_owned());
        }
        let start = start.unwrap_or_else(|| scripted(fake.clone()));
        let open = Box::new(|path: &Path| Vault::open(path).map_err(|error| error.to_string()));
        let fleet = Fleet::new(LoaderConfig { paths, open, start, resident, max_waiting }).unwrap();
        let server = Server::bind(config, fleet.clone()).await.unwrap();
        let address = server.address().unwrap();
        let (stop, stopped) = oneshot::channel();
        let running = tokio::spawn(server.run(async {
            let _ = stopped.await;
        }));
        Self { address, fake, fleet, directory, stop: Some(stop), running }
    }

    pub async fn post(&self, path: &str, body: &Json) -> Reply {
        client::request(self.address, "POST", path, &[], body.to_string().as_bytes()).await
    }

    pub async fn get(&self, path: &str) -> Reply {
        client::request(self.address, "GET", path, &[], b"").await
    }

    /// What a chat with this single message, and these further fields, gets.
    pub async fn chat(&self, say: &str, extra: Json) -> Reply {
        self.post("/v1/chat/completions", &chat(say, extra)).await
    }

    /// Tells the server to end; what comes back ends with it.
    pub fn stop(mut self) -> JoinHandle<()> {
        self.stop.take().unwrap().send(()).unwrap();
        self.running
    }
}

/// A chat request of one message.
pub fn chat(say: &str, extra: Json) -> Json {
    let mut body = json!({"messages": [{"role": "user", "content": say}]});
    for (name, value) in extra.as_object().unwrap() {
        body[name.as_str()] = value.clone();
    }
    body
}

/// A vault with a byte-level tokeniser and this chat template.
pub fn tiny_vault(path: &Path, template: &str) {
    std::fs::create_dir(path).unwrap();
    let model = TinyModel::qwen3(1);
    let generation = json!({"do_sample": true, "temperature": 0.5, "eos_token_id": tokenizer::IM_END});
    let files = [
        ("generation_config.json", generation.to_string().into_bytes()),
        ("tokenizer.json", tokenizer::tokenizer().to_string().into_bytes()),
        ("tokenizer_config.json", tokenizer::config().to_string().into_bytes()),
        ("chat_template.jinja", template.as_bytes().to_vec()),
    ];
    write_vault(path, &model.spec, &model, |_| [Encoding::F32; 3], |_| Encoding::F32, &files);
}

/// Loads scripted models. A vault called `broken` cannot be loaded.
pub fn scripted(fake: Arc<Fake>) -> Start {
    Box::new(move |Starting { vault, progress, .. }| {
        if vault.experts_path.to_string_lossy().contains("broken") {
            return Err(EngineError::Unsupported { what: "a broken vault".to_owned() });
        }
        progress(1, 2);
        fake.loads.send_modify(|loads| *loads += 1);
        Ok(Opened { machine: fake.machine(), meters: None, info: None, warnings: fake.warnings.clone() })
    })
}
