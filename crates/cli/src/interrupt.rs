//! Ctrl-C as a flag: long work looks at it, a second press ends the process.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

static FLAG: AtomicBool = AtomicBool::new(false);
static INSTALLED: OnceLock<bool> = OnceLock::new();
static LAST_WORD: OnceLock<fn()> = OnceLock::new();

/// The flag that Ctrl-C (or SIGTERM) sets; installs the handler on first use.
pub fn flag() -> &'static AtomicBool {
    INSTALLED.get_or_init(|| ctrlc::set_handler(press).is_ok());
    &FLAG
}

/// What a press does, for who reads the keys himself.
pub fn press() {
    if FLAG.swap(true, Ordering::Relaxed) {
        if let Some(last_word) = LAST_WORD.get() {
            last_word();
        }
        std::process::exit(130);
    }
}

/// What to do before a second press ends the process; the first one to ask is heard.
pub fn before_exit(last_word: fn()) {
    let _ = LAST_WORD.set(last_word);
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
