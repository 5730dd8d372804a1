//! Requests to a hub: redirects, the token, what answers mean, and when to try again.

use std::collections::HashMap;
use std::io::{self, Read};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use ureq::http::Response;
use ureq::tls::{Certificate, PemItem, RootCerts, TlsConfig, TlsProvider};
use ureq::{Agent, Body, BodyReader};

use crate::error::HubError;
use crate::pull::Watch;
use crate::url::{self, Url};

/// Redirects that are followed for one answer.
const REDIRECTS: usize = 8;
/// Time to connect, and time that a connection may be silent.
const CONNECT: Duration = Duration::from_secs(30);
const SILENCE: Duration = Duration::from_secs(60);
/// Between two looks at whether to stop while waiting.
const LOOK: Duration = Duration::from_millis(50);
/// No listing is longer, nor an explanation read further.
const MAX_LISTING: u64 = 64 << 20;
const MAX_SAID: usize = 300;
const NO_TLS: &str = "this processor lacks what encrypted connections are made with here (AES, AVX2, ADX and BMI2, or AES \
                      and SHA-2): download the checkpoint with another tool and use `smoe sculpt`";
const AGENT: &str = concat!("smoe/", env!("CARGO_PKG_VERSION"));

/// How often is tried what failed in a way that may pass, and how long is waited between: each time twice as long, or
/// what the server asks for.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// Attempts without a new byte.
    pub tries: u32,
    /// The first wait.
    pub first: Duration,
    /// The longest.
    pub longest: Duration,
}

impl Default for Patience {
    /// Ten attempts over five minutes: longer than a router takes to come back.
    fn default() -> Self {
        Self { tries: 10, first: Duration::from_secs(1), longest: Duration::from_secs(60) }
    }
}

/// Why an attempt failed.
pub(crate) enum Failed {
    /// It would again.
    Surely(HubError),
    /// Another may succeed; when the server wants it.
    Maybe(HubError, Option<Duration>),
}

impl From<HubError> for Failed {
    fn from(error: HubError) -> Self {
        Self::Surely(error)
    }
}

/// A client of one hub.
pub(crate) struct Client {
    agent: Agent,
    endpoint: Url,
    repo: String,
    token: Option<String>,
    patience: Patience,
    watch: Arc<dyn Watch>,
    /// Where addresses led, so that not every part of a file is asked of the hub itself.
    leads: Mutex<HashMap<String, Url>>,
    /// Set when the caller wants to stop.
    stop: &'static AtomicBool,
    /// Set when nobody waits any more.
    pub over: AtomicBool,
}

/// Some bytes of a file: from the first, to before the second.
pub(crate) type Range = (u64, u64);

impl Client {
    pub fn new(
        (endpoint, repo, token): (&str, &str, Option<&str>),
        patience: Patience,
        watch: Arc<dyn Watch>,
        stop: &'static AtomicBool,
    ) -> Result<Self, HubError> {
        let endpoint = Url::endpoint(endpoint)?;
        let config = Agent::config_builder()
            .user_agent(AGENT)
            .http_status_as_error(false)
            // Followed here, where it is known whose address the next one is.
            .max_redirects(0)
            .max_redirects_will_error(false)
            .timeout_connect(Some(CONNECT))
            .timeout_recv_response(Some(SILENCE))
            .timeout_per_read(Some(SILENCE))
            .tls_config(tls(&endpoint)?)
            .build();
        Ok(Self {
            agent: config.new_agent(),
            endpoint,
            repo: repo.to_owned(),
            token: token.filter(|token| !token.is_empty()).map(str::to_owned),
            patience,
            watch,
            leads: Mutex::default(),
            stop,
            over: AtomicBool::new(false),
        })
    }

    pub fn endpoint(&self) -> &Url {
        &self.endpoint
    }

    pub fn watch(&self) -> &dyn Watch {
        &*self.watch
    }

    /// The listing of a revision.
    pub fn listing(&self, revision: &str) -> Result<Vec<u8>, HubError> {
        let path = format!("api/models/{}/revision/{}?blobs=true", self.repo, url::segment(revision));
        let url = self.endpoint.below(&path);
        // Who has no network should hear it soon.
        self.patiently(self.patience.tries.min(3), || {
            let what = || format!("{} of revision {revision}", self.repo);
            let response = self.send(&url, None, &what)?;
            let mut bytes = Vec::new();
            let mut body = response.into_body().into_with_config().limit(MAX_LISTING).reader();
            body.read_to_end(&mut bytes).map_err(|e| self.broken(&url, &e))?;
            Ok(bytes)
        })
    }

    /// The address of a file of a commit.
    pub fn file(&self, commit: &str, name: &str) -> Url {
        self.endpoint.below(&format!("{}/resolve/{commit}/{}", self.repo, url::path(name)))
    }

    /// A part of a file of `total` bytes, to be read from the answer.
    pub fn part(
        &self,
        url: &Url,
        name: &str,
        (start, end): Range,
        total: u64,
    ) -> Result<BodyReader<'static>, Failed> {
        let what = || format!("{name} in {}", self.repo);
        let whole = (start, end) == (0, total);
        let response = self.send(url, Some((start, end)).filter(|_| !whole), &what)?;
        let host = || url.host().to_owned();
        let body =
            |response: Response<Body>| response.into_body().into_with_config().limit(u64::MAX).reader();
        match response.status().as_u16() {
            206 => {}
            200 if whole => return Ok(body(response)),
            200 => return Err(HubError::NoRanges { host: host() }.into()),
            status => {
                let said = said(&response);
                return Err(HubError::Status { url: url.public(), status, said }.into());
            }
        }
        // "bytes FIRST-LAST/TOTAL".
        let range = response.headers().get("content-range").and_then(|value| value.to_str().ok());
        let numbers = range.and_then(|range| {
            let (part, total) = range.trim().strip_prefix("bytes")?.trim().split_once('/')?;
            let (first, last) = part.split_once('-')?;
            Some((first.parse::<u64>().ok()?, last.parse::<u64>().ok()?, total.parse::<u64>().ok()?))
        });
        match numbers {
            Some((_, _, found)) if found != total => {
                Err(HubError::Length { file: name.to_owned(), expected: total, found }.into())
            }
            Some((first, last, _)) if (first, last.wrapping_add(1)) == (start, end) => Ok(body(response)),
            _ => {
                let what = format!("it answers the bytes {range:?} instead of {start}-{}", end - 1);
                Err(HubError::Answer { url: url.public(), what }.into())
            }
        }
    }

    /// One request and what it leads to. Success is any status below 300.
    fn send(
        &self,
        url: &Url,
        range: Option<Range>,
        what: &dyn Fn() -> String,
    ) -> Result<Response<Body>, Failed> {
        let leads = || self.leads.lock().expect("nobody panics with it");
        let known = leads().get(&url.to_string()).cloned();
        let mut shortcut = known.is_some();
        let mut at = known.unwrap_or_else(|| url.clone());
        for _ in 0..=REDIRECTS {
            self.check()?;
            let mut request = self.agent.get(at.uri().clone()).header("accept-encoding", "identity");
            if let Some((start, end)) = range {
                request = request.header("range", format!("bytes={start}-{}", end - 1));
            }
            // To the hub itself, and to nobody that it names.
            if let Some(token) = self.token.as_ref().filter(|_| at.same_origin(&self.endpoint)) {
                request = request.header("authorization", format!("Bearer {token}"));
            }
            let response = request.call().map_err(|e| self.unreachable(&at, e))?;
            match response.status().as_u16() {
                301 | 302 | 303 | 307 | 308 => at = self.follow(&at, &response)?,
                200..=299 => {
                    if at != *url {
                        leads().insert(url.to_string(), at);
                    }
                    return Ok(response);
                }
                // A signed address has its time; the hub gives another one.
                401 | 403 | 404 | 410 if shortcut => {
                    leads().remove(&url.to_string());
                    (shortcut, at) = (false, url.clone());
                }
                status => return Err(self.refused(&at, status, &response, what)),
            }
        }
        let (from, to, what) = (url.public(), at.public(), "and so on, without end");
        Err(HubError::Redirect { from, to, what }.into())
    }

    fn follow(&self, from: &Url, response: &Response<Body>) -> Result<Url, HubError> {
        let location = response.headers().get("location").and_then(|value| value.to_str().ok()).unwrap_or("");
        let refuse = |what| {
            let to = location.split('?').next().unwrap_or_default().to_owned();
            HubError::Redirect { from: from.public(), to, what }
        };
        let to = from.join(location).ok_or_else(|| refuse("that is no address"))?;
        if from.is_encrypted() && !to.is_encrypted() {
            return Err(refuse("what was asked for in secret would come openly"));
        }
        if to.is_encrypted() && !supported() {
            return Err(HubError::Tls { what: NO_TLS.to_owned() });
        }
        Ok(to)
    }

    /// What an answer without success means.
    fn refused(
        &self,
        url: &Url,
        status: u16,
        response: &Response<Body>,
        what: &dyn Fn() -> String,
    ) -> Failed {
        let said = said(response);
        let endpoint = self.endpoint.public().trim_end_matches('/').to_owned();
        let repo = self.repo.clone();
        let own = url.same_origin(&self.endpoint);
        match status {
            401 if own => HubError::Unauthorised { endpoint, repo, token: self.token.is_some(), said }.into(),
            403 if own => HubError::Forbidden { endpoint, repo, said }.into(),
            404 | 410 => HubError::Absent { endpoint, what: what(), said }.into(),
            429 => Failed::Maybe(HubError::Limited { host: url.host().to_owned() }, retry_after(response)),
            401 | 403 | 408 | 500..=599 => {
                Failed::Maybe(HubError::Status { url: url.public(), status, said }, retry_after(response))
            }
            _ => HubError::Status { url: url.public(), status, said }.into(),
        }
    }

    fn unreachable(&self, url: &Url, error: ureq::Error) -> Failed {
        let host = url.host().to_owned();
        let what = match &error {
            ureq::Error::HostNotFound => "its name is not known".to_owned(),
            other => other.to_string(),
        };
        match error {
            ureq::Error::Tls(_) | ureq::Error::Rustls(_) | ureq::Error::Pem(_) => {
                HubError::Tls { what: format!("{host}: no secure connection: {what}") }.into()
            }
            // Certificates that are not believed come as errors of reading.
            ureq::Error::Io(e) if e.kind() == io::ErrorKind::InvalidData => {
                HubError::Tls { what: format!("{host}: no secure connection: {e}") }.into()
            }
            _ => Failed::Maybe(HubError::Unreachable { host, what }, None),
        }
    }

    /// An answer that ends before its end.
    pub fn broken(&self, url: &Url, error: &io::Error) -> Failed {
        Failed::Maybe(HubError::Unreachable { host: url.host().to_owned(), what: error.to_string() }, None)
    }

    /// Tries until it succeeds, surely fails, or `tries` are used up.
    pub fn patiently<T>(
        &self,
        tries: u32,
        mut attempt: impl FnMut() -> Result<T, Failed>,
    ) -> Result<T, HubError> {
        let mut waits = Waits::new(self.patience);
        loop {
            match attempt() {
                Ok(done) => return Ok(done),
                Err(failed) => self.wait(&mut waits, tries, failed)?,
            }
        }
    }

    /// Waits for the next attempt, if there is one.
    pub fn wait(&self, waits: &mut Waits, tries: u32, failed: Failed) -> Result<(), HubError> {
        let (error, asked) = match failed {
            Failed::Surely(error) => return Err(error),
            Failed::Maybe(error, asked) => (error, asked),
        };
        self.check()?;
        waits.failures += 1;
        if waits.failures >= tries {
            return Err(error);
        }
        let wait = asked.unwrap_or(waits.next).min(waits.patience.longest);
        waits.next = (2 * waits.next).min(waits.patience.longest);
        // Without what to do about it: that is done here.
        let error = error.to_string();
        let what = error.split("; ").next().unwrap_or(&error);
        self.watch.note(&format!("{what}; again in {} s", wait.as_secs().max(1)));
        let end = Instant::now() + wait;
        while let Some(left) = end.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
            self.check()?;
            thread::sleep(left.min(LOOK));
        }
        Ok(())
    }

    pub fn tries(&self) -> u32 {
        self.patience.tries
    }

    pub fn waits(&self) -> Waits {
        Waits::new(self.patience)
    }

    /// An error once the work is to stop.
    pub fn check(&self) -> Result<(), HubError> {
        let stop = [self.stop, &self.over];
        if stop.iter().any(|stop| stop.load(Ordering::Relaxed)) { Err(HubError::Stopped) } else { Ok(()) }
    }
}

/// Failures since something came.
pub(crate) struct Waits {
    failures: u32,
    next: Duration,
    patience: Patience,
}

impl Waits {
    fn new(patience: Patience) -> Self {
        Self { failures: 0, next: patience.first, patience }
    }
}

/// A header in which hubs explain themselves.
fn said(response: &Response<Body>) -> String {
    let header = response.headers().get("x-error-message").and_then(|value| value.to_str().ok());
    header.unwrap_or_default().chars().filter(|c| !c.is_control()).take(MAX_SAID).collect()
}

/// How long the server wants us to wait; dates are not read.
fn retry_after(response: &Response<Body>) -> Option<Duration> {
    let seconds = response.headers().get("retry-after")?.to_str().ok()?.trim().parse().ok()?;
    Some(Duration::from_secs(seconds))
}

/// Certificates of the web's authorities, or those of the file in `SSL_CERT_FILE`.
fn tls(endpoint: &Url) -> Result<TlsConfig, HubError> {
    let builder = TlsConfig::builder().provider(TlsProvider::Rustls);
    if !endpoint.is_encrypted() && !supported() {
        return Ok(builder.build());
    }
    if !supported() {
        return Err(HubError::Tls { what: NO_TLS.to_owned() });
    }
    let roots = match std::env::var_os("SSL_CERT_FILE").filter(|path| !path.is_empty()) {
        None => RootCerts::WebPki,
        Some(path) => {
            let bad = |e: &dyn std::fmt::Display| HubError::Tls {
                what: format!("SSL_CERT_FILE {}: {e}", path.display()),
            };
            let pem = std::fs::read(&path).map_err(|e| bad(&e))?;
            let certificates: Vec<Certificate<'static>> = ureq::tls::parse_pem(&pem)
                .filter_map(|item| match item {
                    Ok(PemItem::Certificate(certificate)) => Some(certificate),
                    _ => None,
                })
                .collect();
            if certificates.is_empty() {
                return Err(bad(&"there is no certificate in it"));
            }
            RootCerts::Specific(Arc::new(certificates))
        }
    };
    let provider = Arc::new(rustls_graviola::default_provider());
    Ok(builder.root_certs(roots).unversioned_rustls_crypto_provider(provider).build())
}

/// Whether the library of encryption runs here.
fn supported() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        is_x86_feature_detected!("aes")
            && is_x86_feature_detected!("ssse3")
            && is_x86_feature_detected!("pclmulqdq")
            && is_x86_feature_detected!("avx")
            && is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("adx")
            && is_x86_feature_detected!("bmi1")
            && is_x86_feature_detected!("bmi2")
    }
    #[cfg(target_arch = "aarch64")]
    {
        use std::arch::is_aarch64_feature_detected;
        is_aarch64_feature_detected!("aes")
            && is_aarch64_feature_detected!("sha2")
            && is_aarch64_feature_detected!("pmull")
            && is_aarch64_feature_detected!("neon")
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    false
}
