//! What the tests on a device share.

use smoe_gpu::{Gpu, Software};

/// A device, if only one that a program plays; None, said aloud, where there is none.
#[allow(clippy::print_stderr, reason = "a skip is said aloud")]
pub fn gpu() -> Option<Gpu> {
    match Gpu::open(None, Software::Accept) {
        Ok(gpu) => Some(gpu),
        Err(why) => {
            eprintln!("SKIPPED: {why}");
            None
        }
    }
}
