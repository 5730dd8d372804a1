//! How a long piece of work tells its caller where it is.

/// Receives what happens; called from worker threads.
pub trait Progress: Sync {
    /// A new phase with its name: `encoding`, `checking`.
    fn phase(&self, _name: &str) {}
    /// The phase has this many bytes to write or read.
    fn start(&self, _total_bytes: u64) {}
    /// So many more of them are done.
    fn advance(&self, _bytes: u64) {}
    /// To encode what this run encoded, so many bytes of the checkpoint's weights were read.
    fn encoded(&self, _source_bytes: u64) {}
    /// Something that was decided.
    fn note(&self, _message: &str) {}
    /// Something odd that a person should read.
    fn warn(&self, _message: &str) {}
}

/// Nobody watches.
impl Progress for () {}
