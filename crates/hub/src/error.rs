//! What can go wrong between a hub and the disk.

use std::io;
use std::path::{Path, PathBuf};

/// Why a file did not come.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HubError {
    /// The repository's name cannot be one.
    #[error("`{name}` names no repository: OWNER/NAME does")]
    Name {
        /// As it was given.
        name: String,
    },
    /// The repository has nothing to make a vault of, or it must be said what.
    #[error("{repo}: {what}")]
    NoCheckpoint {
        /// The repository.
        repo: String,
        /// What it lacks.
        what: String,
    },
    /// The hub's address cannot be one.
    #[error("the hub's address `{address}` (HF_ENDPOINT): {what}")]
    Endpoint {
        /// As it was given.
        address: String,
        /// What is wrong with it.
        what: &'static str,
    },
    /// No connection, or it broke again and again.
    #[error(
        "{host} cannot be reached: {what}; check the network (HF_ENDPOINT names another hub, HTTPS_PROXY a proxy) and run \
         again: what was received is kept"
    )]
    Unreachable {
        /// Whom.
        host: String,
        /// What the last attempt said.
        what: String,
    },
    /// The hub wants to know who asks, or there is no such repository: it does not tell which.
    #[error(
        "{endpoint} gives {repo} to nobody it does not know ({}){}", if *.token {
            "the token in HF_TOKEN is not accepted, or there is no such repository"
        } else {
            "there is no such repository, or it is private: set HF_TOKEN to a token that may read it"
        }, bracketed(.said)
    )]
    Unauthorised {
        /// The hub.
        endpoint: String,
        /// The repository.
        repo: String,
        /// A token was sent.
        token: bool,
        /// What the hub says.
        said: String,
    },
    /// The hub knows who asks, and refuses.
    #[error(
        "{endpoint} refuses {repo}{}; if the model is gated, accept its terms at {endpoint}/{repo} and set HF_TOKEN to a \
         token that may read it", bracketed(.said)
    )]
    Forbidden {
        /// The hub.
        endpoint: String,
        /// The repository.
        repo: String,
        /// What the hub says.
        said: String,
    },
    /// There is no such repository, revision or file.
    #[error("{endpoint} has no {what}{}", bracketed(.said))]
    Absent {
        /// The hub.
        endpoint: String,
        /// What is not there.
        what: String,
        /// What the hub says.
        said: String,
    },
    /// The hub wants fewer requests.
    #[error("{host} answers too many requests (429); wait and run again: what was received is kept")]
    Limited {
        /// Who.
        host: String,
    },
    /// A status that is neither success nor one of the above.
    #[error("{url} answers {status}{}; run again later: what was received is kept", bracketed(.said))]
    Status {
        /// What was asked for.
        url: String,
        /// The answer.
        status: u16,
        /// What the server says.
        said: String,
    },
    /// An answer that makes no sense.
    #[error("{url}: {what}")]
    Answer {
        /// What was asked for.
        url: String,
        /// What is wrong with it.
        what: String,
    },
    /// The server sends whole files only.
    #[error(
        "{host} sends no parts of files, and a checkpoint is read by parts here; download it with another tool and use \
         `smoe sculpt`"
    )]
    NoRanges {
        /// Who.
        host: String,
    },
    /// The file on the hub is not as long as the hub says, or became another.
    #[error("{file} changed on the hub: it has {found} bytes, the listing says {expected}")]
    Length {
        /// Its name.
        file: String,
        /// By the listing.
        expected: u64,
        /// By the server that has it.
        found: u64,
    },
    /// What was received twice is not what the hub says it is.
    #[error(
        "{file} does not have the hash that the hub gives it: {found} instead of {expected}, received twice"
    )]
    Hash {
        /// Its name.
        file: String,
        /// By the listing.
        expected: String,
        /// Of what was received.
        found: String,
    },
    /// The listing gives no hash of a file that is needed.
    #[error("the hub gives no hash of {file}: it cannot be checked")]
    NoHash {
        /// Its name.
        file: String,
    },
    /// A part that was received before is not in the whole file.
    #[error("{file}: a part that the hub sent before is not in the whole file; run again")]
    Inconsistent {
        /// Its name.
        file: String,
    },
    /// A redirect that is not followed.
    #[error("{from} leads to {to}: {what}")]
    Redirect {
        /// What was asked for.
        from: String,
        /// Where the answer leads.
        to: String,
        /// Why not.
        what: &'static str,
    },
    /// The disk is full.
    #[error("{} cannot grow: the disk is full; free {missing} bytes and run again: what was received is kept", .path.display())]
    Full {
        /// The file.
        path: PathBuf,
        /// What is to come of it.
        missing: u64,
    },
    /// The operating system refused.
    #[error("cannot {action} {}: {source}", .path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// On which file or directory.
        path: PathBuf,
        /// Its answer.
        source: io::Error,
    },
    /// Another process is downloading there.
    #[error("another smoe pull is at work in {}; wait for it or stop it", .dir.display())]
    Busy {
        /// The directory.
        dir: PathBuf,
    },
    /// The directory holds parts of another checkpoint.
    #[error(
        "{} holds parts of {found}, not of {expected}; finish that, or start afresh with --force", .dir.display()
    )]
    Other {
        /// The directory.
        dir: PathBuf,
        /// What it holds.
        found: String,
        /// What was asked for.
        expected: String,
    },
    /// No encrypted connection can be made here.
    #[error("{what}")]
    Tls {
        /// Why not.
        what: String,
    },
    /// The caller asked to stop; what was received is kept.
    #[error("stopped")]
    Stopped,
}

impl HubError {
    /// Wraps an I/O error with what was tried; for use in `map_err`.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { action, path: path.to_owned(), source }
    }
}

/// What a server says, in brackets, if it says anything.
fn bracketed(what: &str) -> String {
    if what.is_empty() { String::new() } else { format!(" (it says: {what})") }
}
