//! Ctrl-C as a flag: long work looks at it, a second press ends the process.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

static FLAG: AtomicBool = AtomicBool::new(false);
static INSTALLED: OnceLock<bool> = OnceLock::new();

/// The flag that Ctrl-C (or SIGTERM) sets; installs the handler on first use.
pub fn flag() -> &'static AtomicBool {
    INSTALLED.get_or_init(|| {
        ctrlc::set_handler(|| {
            if FLAG.swap(true, Ordering::Relaxed) {
                std::process::exit(130);
            }
        })
        .is_ok()
    });
    &FLAG
}

/// Takes a press: true once per press.
pub fn take() -> bool {
    FLAG.swap(false, Ordering::Relaxed)
}

/// The flag for new work: a press that came before it is forgotten.
pub fn fresh() -> &'static AtomicBool {
    take();
    flag()
}
