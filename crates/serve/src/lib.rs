//! The server: OpenAI's API and others over HTTP, a fleet of vaults, a console.
//!
//! ```text
//! connection ──► front (id, key, log, errors) ──► an API's handler ──► Turn ──► Fleet ──► Runner ──► Driver
//!                                                        ▲                                  │ a thread per model
//!                                                        └────────── Delta, Delta, ... ◄────┘
//! ```
//!
//! Every API turns its request into one [`turn::Turn`] and makes its answer from one stream of [`turn::Delta`]: what
//! one API can do, all can. A job's events are read on the model's thread and told to an outbox that never blocks it
//! and is bounded; dropping the stream, as a closed connection does, cancels the job. A connection whose client has
//! shut its sending half counts as closed: nothing tells it from one that is gone, and an answer to nobody would keep
//! others waiting. Most servers do the same.
//!
//! This room knows HTTP and text; of the engine it knows jobs and counters. It never prints and never exits.
#![forbid(unsafe_code)]

mod anthropic;
mod connection;
mod console;
mod engine;
pub mod error;
pub mod fleet;
pub mod front;
pub mod id;
mod instrument;
mod metrics;
pub mod model;
mod ollama;
mod openai;
mod openapi;
pub mod runner;
pub mod tally;
pub mod turn;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::routing::get;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, timeout_at};
use tower_http::cors::{AllowHeaders, AllowMethods, Any, CorsLayer};

pub use engine::start_engine;

use connection::Connection;
use error::ApiError;
use fleet::Fleet;
use tally::Tally;

/// Connections that are open at once; more wait to be accepted.
const MAX_CONNECTIONS: usize = 1024;
/// Tenths of [`Config::grace`] after which running answers are cut.
const CUT: u32 = 6;
/// Tenths after which connections are not waited for any more.
const LAST_WORDS: u32 = 7;

/// How to serve.
#[derive(Clone, Debug)]
pub struct Config {
    /// Name or address to listen on.
    pub host: String,
    /// Port; 0 lets the system choose.
    pub port: u16,
    /// What clients must send; `None` takes anything.
    pub api_key: Option<String>,
    /// Pages of other origins may use the server.
    pub cors: bool,
    /// Bytes of a request's body.
    pub body_limit: usize,
    /// In which a request's head must arrive; an idle connection is closed after it too.
    pub header_timeout: Duration,
    /// In which its body must.
    pub body_timeout: Duration,
    /// For how long a stream's client waits for the head of its response, which has the status in it, before the
    /// stream begins without one.
    pub patience: Duration,
    /// Between two signs of life in a stream that has nothing to say.
    pub heartbeat: Duration,
    /// For how long a client may take nothing of what is sent to it.
    pub write_timeout: Duration,
    /// From the wish to end to the end, whatever clients and disks do: running answers have most of it, saying that
    /// they are cut and bringing conversations to their files the rest.
    pub grace: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            host: "127.0.0.1".to_owned(),
            port: 8000,
            api_key: None,
            cors: false,
            body_limit: 16 << 20,
            header_timeout: Duration::from_secs(10),
            body_timeout: Duration::from_secs(60),
            patience: Duration::from_secs(10),
            heartbeat: Duration::from_secs(5),
            write_timeout: Duration::from_secs(120),
            grace: Duration::from_secs(10),
        }
    }
}

/// Why the server cannot be.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The address cannot be listened on.
    #[error("cannot listen on {host}:{port}: {source}")]
    Listen {
        /// Name or address.
        host: String,
        /// Port.
        port: u16,
        /// The system's error.
        source: std::io::Error,
    },
}

/// What handlers share. Clones are cheap.
#[derive(Clone, Debug)]
pub struct AppState(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    config: Config,
    fleet: Arc<Fleet>,
    tally: Arc<Tally>,
    /// For work that would hold up the server's threads.
    workers: Arc<Semaphore>,
    /// For such work as may take seconds.
    slow_workers: Arc<Semaphore>,
    life: watch::Sender<Life>,
}

/// How far the server is from its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Life {
    Serving,
    /// Nothing new; what runs may go on for a while.
    Draining,
    /// Whatever runs is cut.
    Ending,
}

impl AppState {
    fn new(config: Config, fleet: Arc<Fleet>) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let workers = Arc::new(Semaphore::new(cores));
        let slow_workers = Arc::new(Semaphore::new(cores.div_ceil(2)));
        let life = watch::Sender::new(Life::Serving);
        let tally = Arc::default();
        Self(Arc::new(Shared { config, fleet, tally, workers, slow_workers, life }))
    }

    /// How to serve.
    pub fn config(&self) -> &Config {
        &self.0.config
    }

    /// The vaults.
    pub fn fleet(&self) -> &Arc<Fleet> {
        &self.0.fleet
    }

    /// The server's own counters.
    pub fn tally(&self) -> &Arc<Tally> {
        &self.0.tally
    }

    /// Comes when the server takes nothing new: what would go on for ever ends here.
    pub fn draining(&self) -> impl Future<Output = ()> + Send + use<> {
        self.reached(Life::Draining)
    }

    /// Comes when answers are cut.
    pub fn ending(&self) -> impl Future<Output = ()> + Send + use<> {
        self.reached(Life::Ending)
    }

    fn reached(&self, wanted: Life) -> impl Future<Output = ()> + Send + use<> {
        let mut life = self.0.life.subscribe();
        async move {
            // Without a server there is an end too.
            let _ = life.wait_for(|life| *life >= wanted).await;
        }
    }

    /// Does work beside the server's threads, as many pieces at once as there are cores; `slow` work has a bound of its
    /// own, so that it does not keep the rest waiting.
    ///
    /// # Errors
    /// If the work panics.
    pub async fn blocking<T: Send + 'static>(
        &self,
        slow: bool,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, ApiError> {
        let workers = if slow { &self.0.slow_workers } else { &self.0.workers };
        let worker = workers.clone().acquire_owned().await;
        let done = tokio::task::spawn_blocking(move || {
            // Held to the end of the work, also where nobody waits for it any more.
            let _worker = worker;
            work()
        });
        done.await.map_err(|_| ApiError::internal("preparing the request failed unexpectedly"))
    }
}

/// A server that listens.
#[derive(Debug)]
pub struct Server {
    state: AppState,
    listener: TcpListener,
}

impl Server {
    /// Listens; connections wait until [`Server::run`].
    ///
    /// # Errors
    /// If it cannot.
    pub async fn bind(config: Config, fleet: Arc<Fleet>) -> Result<Self, ServeError> {
        match TcpListener::bind((config.host.as_str(), config.port)).await {
            Ok(listener) => Ok(Self { state: AppState::new(config, fleet), listener }),
            Err(source) => Err(ServeError::Listen { host: config.host, port: config.port, source }),
        }
    }

    /// Where it listens.
    ///
    /// # Errors
    /// If the system does not know.
    pub fn address(&self) -> std::io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Serves until `shutdown` comes; then accepts nothing, lets running answers go on, cuts what still runs, and unloads
    /// the models, all within [`Config::grace`]. Threads that a disk holds up beyond it are left behind.
    pub async fn run(self, shutdown: impl Future<Output = ()>) {
        let Self { state, listener } = self;
        let router = router(state.clone());
        let graceful = GracefulShutdown::new();
        let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        let mut shutdown = std::pin::pin!(shutdown);
        loop {
            let accepted = async {
                let place = places.clone().acquire_owned().await;
                (listener.accept().await, place)
            };
            tokio::select! {
                (accepted, place) = accepted => match accepted {
                    Ok((stream, _)) => {
                        let connection = connection(stream, &router, &graceful, &state);
                        tokio::spawn(async move {
                            connection.await;
                            drop(place);
                        });
                    }
                    Err(error) => {
                        // Most often too many open files: the next attempt must not come at once.
                        tracing::warn!("cannot accept a connection: {error}");
                        tokio::time::sleep(Duration::from_millis(100)).await;
                    }
                },
                () = &mut shutdown => break,
            }
        }
        drop(listener);
        tracing::info!("shutting down");
        state.0.life.send_replace(Life::Draining);
        let (start, grace) = (Instant::now(), state.config().grace);
        let mut closed = std::pin::pin!(graceful.shutdown());
        let drained = timeout_at(start + grace * CUT / 10, &mut closed).await;
        state.0.life.send_replace(Life::Ending);
        if drained.is_err() {
            // What does not even take its last words is dropped with the process.
            let _ = timeout_at(start + grace * LAST_WORDS / 10, &mut closed).await;
        }
        if timeout_at(start + grace, state.fleet().shut_down()).await.is_err() {
            tracing::warn!("models are not unloaded yet: what they computed last may not be remembered");
        }
    }
}

/// Listens and serves until `shutdown` comes.
///
/// # Errors
/// If it cannot listen.
pub async fn serve(
    config: Config,
    fleet: Arc<Fleet>,
    shutdown: impl Future<Output = ()>,
) -> Result<(), ServeError> {
    Server::bind(config, fleet).await?.run(shutdown).await;
    Ok(())
}

/// Serves one connection.
fn connection(
    stream: TcpStream,
    router: &Router,
    graceful: &GracefulShutdown,
    state: &AppState,
) -> impl Future<Output = ()> + use<> {
    // Tokens are small and wanted at once.
    let _ = stream.set_nodelay(true);
    let stream = Connection::new(stream, state.config().write_timeout);
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        // See above; not left to a default that may change.
        .half_close(false)
        .header_read_timeout(state.config().header_timeout)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router.clone()));
    let connection = graceful.watch(connection);
    async move {
        if let Err(error) = connection.await {
            tracing::debug!("connection: {error}");
        }
    }
}

/// That it lives, and what its loaded models go without.
async fn health(State(state): State<AppState>) -> axum::Json<serde_json::Value> {
    let mut health = serde_json::json!({"status": "ok"});
    for model in state.fleet().loaded() {
        let warnings = model.warnings();
        if !warnings.is_empty() {
            health["warnings"][&model.listing().id] = warnings.into();
        }
    }
    axum::Json(health)
}

/// Every route.
fn router(state: AppState) -> Router {
    let cors = state.config().cors;
    let router = Router::new()
        .route("/health", get(health))
        .merge(anthropic::routes())
        .merge(console::routes())
        .merge(instrument::routes())
        .merge(metrics::routes())
        .merge(ollama::routes())
        .merge(openai::routes())
        .merge(openapi::routes())
        .fallback(front::no_route)
        .method_not_allowed_fallback(front::wrong_method)
        .layer(axum::middleware::from_fn_with_state(state.clone(), front::front))
        .with_state(state);
    if cors {
        let cors = CorsLayer::new()
            .allow_origin(Any)
            .allow_methods(AllowMethods::mirror_request())
            .allow_headers(AllowHeaders::mirror_request())
            .expose_headers([front::REQUEST_ID]);
        router.layer(cors)
    } else {
        router
    }
}
