//! What can go wrong on a device.

/// Why a device did not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum GpuError {
    /// Nothing here can run the kernels; one reason per device that was found.
    #[error("no usable GPU: {why}")]
    None {
        /// Device by device.
        why: String,
    },
    /// A device refused to open.
    #[error("{device} cannot be opened: {why}")]
    Open {
        /// Its name.
        device: String,
        /// What the driver said.
        why: String,
    },
    /// No memory for a buffer.
    #[error("{device} has no room for {bytes} bytes of {what}")]
    OutOfMemory {
        /// The device.
        device: String,
        /// What was to be kept there.
        what: String,
        /// Bytes asked for.
        bytes: u64,
    },
    /// A binding larger than the device can address.
    #[error("{what} needs {bytes} bytes in one binding, {device} addresses at most {most}")]
    Binding {
        /// The device.
        device: String,
        /// What was to be bound.
        what: String,
        /// Bytes asked for.
        bytes: u64,
        /// The device's limit.
        most: u64,
    },
    /// Host memory that the device cannot read where it lies.
    #[error("{device} cannot use {what} where it lies: {why}")]
    Import {
        /// The device.
        device: String,
        /// What was to be imported.
        what: String,
        /// What is wrong with it, or with the device.
        why: String,
    },
    /// A shader was refused: a bug here, or in the driver.
    #[error("{device} refuses the kernel {kernel}: {why}")]
    Kernel {
        /// The device.
        device: String,
        /// The kernel.
        kernel: String,
        /// What was said.
        why: String,
    },
    /// The device was lost, or a command failed; everything on it is void.
    #[error("{device} failed: {why}")]
    Lost {
        /// The device.
        device: String,
        /// What was said.
        why: String,
    },
}
