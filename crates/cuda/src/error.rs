//! What can go wrong with a card.

/// An error of this crate.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// There is no driver.
    #[error("there is no CUDA driver (libcuda)")]
    NoDriver,
    /// There is a driver and no compiler.
    #[error(
        "there is no NVRTC, CUDA's run-time compiler (libnvrtc): install it, or add its folder to LD_LIBRARY_PATH"
    )]
    NoCompiler,
    /// The driver has no card.
    #[error("CUDA finds no card")]
    NoDevice,
    /// The card lacks instructions that kernels need.
    #[error("{name} has compute capability {}.{}: 8.0 is needed", capability.0, capability.1)]
    TooOld {
        /// The card.
        name: String,
        /// Major and minor.
        capability: (i32, i32),
    },
    /// Memory that there is not.
    #[error("{name} has no room for another {bytes} bytes")]
    OutOfMemory {
        /// The card.
        name: String,
        /// What was asked for.
        bytes: usize,
    },
    /// A kernel does not compile: the compiler is too old, or the kernel wrong.
    #[error("NVRTC: {log}")]
    Compile {
        /// What the compiler says.
        log: String,
    },
    /// The driver refused something, or the card failed.
    #[error("CUDA, {doing}: {what}")]
    Driver {
        /// What was done.
        doing: &'static str,
        /// What the driver says.
        what: String,
    },
}
