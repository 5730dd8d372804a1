//! From an error to a line on stderr and an exit code.

use std::error::Error;
use std::fmt;
use std::io;
use std::process::ExitCode;

use smoe_engine::EngineError;
use smoe_hub::HubError;
use smoe_sculpt::SculptError;

/// Why a command did not do what it was asked.
#[derive(Debug)]
pub enum Failure {
    /// The world failed: exit code 1.
    Failed(Box<dyn Error>),
    /// The command line makes no sense: exit code 2.
    Usage(String),
    /// Already reported; exit code 1.
    Silent,
    /// Ctrl-C: exit code 130, as shells have it.
    Interrupted,
}

impl Failure {
    /// A failure of the world, in words.
    pub fn new(message: impl Into<String>) -> Self {
        Self::Failed(message.into().into())
    }

    /// Prints the error and its causes, and gives the exit code.
    pub fn report(self) -> ExitCode {
        match self {
            // Whoever read our output has left: not a failure.
            Self::Failed(error) if is_broken_pipe(&*error) => ExitCode::SUCCESS,
            Self::Failed(error) => {
                eprintln!("error: {}", chain(&*error));
                ExitCode::from(1)
            }
            Self::Usage(message) => {
                eprintln!("error: {message}\n\nsee --help");
                ExitCode::from(2)
            }
            Self::Silent => ExitCode::from(1),
            Self::Interrupted => ExitCode::from(130),
        }
    }
}

/// The message, and those of its causes that it does not hold already.
fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let message = error.to_string();
        if !text.contains(&message) {
            text = format!("{text}: {message}");
        }
        cause = error.source();
    }
    text
}

fn is_broken_pipe(error: &(dyn Error + 'static)) -> bool {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if error.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::BrokenPipe) {
            return true;
        }
        cause = error.source();
    }
    false
}

/// A setting that cannot be, rather than a world that fails.
fn is_usage(error: &(dyn Error + 'static)) -> bool {
    let engine = error.downcast_ref::<EngineError>();
    let sculpt = error.downcast_ref::<SculptError>();
    matches!(engine, Some(EngineError::Setting { .. } | EngineError::Sampling { .. }))
        || matches!(sculpt, Some(SculptError::Setting { .. }))
        || matches!(error.downcast_ref(), Some(HubError::Name { .. } | HubError::Endpoint { .. }))
}

impl<E: Error + 'static> From<E> for Failure {
    fn from(error: E) -> Self {
        let any: &(dyn Error + 'static) = &error;
        let stopped = matches!(any.downcast_ref(), Some(SculptError::Stopped));
        if stopped || matches!(any.downcast_ref(), Some(HubError::Stopped)) {
            return Self::Interrupted;
        }
        if is_usage(&error) { Self::Usage(error.to_string()) } else { Self::Failed(error.into()) }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed(error) => write!(f, "{}", chain(&**error)),
            Self::Usage(message) => f.write_str(message),
            Self::Silent => f.write_str("failed"),
            Self::Interrupted => f.write_str("interrupted"),
        }
    }
}
