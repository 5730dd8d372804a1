//! Progress on stderr; silent where that is no terminal.

use std::borrow::Cow;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use indicatif::{HumanBytes, MultiProgress, ProgressBar, ProgressStyle};

/// A bar that counts bytes, with rate and time left.
pub fn bytes(what: &'static str, total: u64) -> ProgressBar {
    let style = "{msg} [{bar:32}] {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec} {eta}";
    bar(style, total).with_message(what)
}

/// A bar that counts tokens.
pub fn tokens(what: impl Into<Cow<'static, str>>, total: u64) -> ProgressBar {
    bar("{msg} [{bar:32}] {pos}/{len} tokens {per_sec} {eta}", total).with_message(what)
}

/// The bar of a prompt: there from the first report of work that goes on until it is done, or dropped.
#[derive(Default)]
pub struct Prefill(Option<ProgressBar>);

impl Prefill {
    /// So many tokens of so many are done.
    pub fn at(&mut self, done: usize, total: usize) {
        if done < total {
            let bar = self.0.get_or_insert_with(|| tokens("prefilling", total as u64));
            bar.set_position(done as u64);
        } else if let Some(bar) = self.0.take() {
            bar.finish_and_clear();
        }
    }
}

impl Drop for Prefill {
    fn drop(&mut self) {
        self.at(0, 0);
    }
}

fn bar(template: &str, total: u64) -> ProgressBar {
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(total).with_style(style.progress_chars("=> "))
}

/// Something of unknown length; appears only if it lasts.
pub fn spinner(what: &'static str) -> ProgressBar {
    let spinner = ProgressBar::new_spinner().with_message(what);
    spinner.enable_steady_tick(Duration::from_millis(120));
    spinner
}

/// The sculptor's progress, drawn as one bar of bytes per phase.
#[derive(Default)]
pub struct Bar {
    state: Mutex<State>,
    /// Bytes of weights that were encoded.
    encoded: AtomicU64,
    /// Other bars that it is drawn below.
    within: Option<MultiProgress>,
}

#[derive(Default)]
struct State {
    phase: String,
    /// When the phase began, and how long those before it lasted.
    since: Option<Instant>,
    lasted: Vec<(String, Duration)>,
    bar: Option<ProgressBar>,
}

impl Bar {
    /// Clears what is drawn.
    pub fn finish(&self) {
        if let Ok(mut state) = self.state.lock()
            && let Some(bar) = state.bar.take()
        {
            bar.finish_and_clear();
        }
    }

    /// How many of the checkpoint's bytes this run encoded and how fast, and how long all took; nothing if all was done
    /// before.
    pub fn speed(&self) -> Option<String> {
        let mut state = self.state.lock().ok()?;
        state.end_phase();
        let encoding = state.lasted.iter().find(|(phase, _)| phase == "encoding")?.1.as_secs_f64();
        let all = state.lasted.iter().map(|(_, lasted)| *lasted).sum::<Duration>().as_secs_f64();
        let megabytes = self.encoded.load(Ordering::Relaxed) as f64 / 1e6;
        let rate = megabytes / encoding.max(1e-3);
        (megabytes > 0.0).then(|| {
            format!("{megabytes:.0} MB of weights encoded in {encoding:.1} s ({rate:.0} MB/s), all done in {all:.1} s")
        })
    }
}

impl State {
    fn end_phase(&mut self) {
        if let Some(since) = self.since.take() {
            let phase = std::mem::take(&mut self.phase);
            self.lasted.push((phase, since.elapsed()));
        }
    }
}

impl smoe_sculpt::Progress for Bar {
    fn phase(&self, name: &str) {
        self.finish();
        if let Ok(mut state) = self.state.lock() {
            state.end_phase();
            state.since = Some(Instant::now());
            name.clone_into(&mut state.phase);
        }
    }

    fn start(&self, total_bytes: u64) {
        self.finish();
        if let Ok(mut state) = self.state.lock() {
            let mut bar = bytes("", total_bytes);
            if let Some(all) = &self.within {
                bar = all.add(bar);
            }
            bar.set_message(state.phase.clone());
            state.bar = Some(bar);
        }
    }

    fn advance(&self, bytes: u64) {
        if let Ok(state) = self.state.lock()
            && let Some(bar) = &state.bar
        {
            bar.inc(bytes);
        }
    }

    fn encoded(&self, source_bytes: u64) {
        self.encoded.fetch_add(source_bytes, Ordering::Relaxed);
    }

    fn note(&self, message: &str) {
        eprintln!("{message}");
    }

    fn warn(&self, message: &str) {
        let bar = self.state.lock().ok().and_then(|state| state.bar.clone());
        match bar {
            Some(bar) => bar.suspend(|| eprintln!("warning: {message}")),
            None => eprintln!("warning: {message}"),
        }
    }
}

/// The bars of a pull: what is received, with its rate and what is on the disk, and below it the sculptor's.
pub struct PullBars {
    all: MultiProgress,
    /// There once files come.
    received: Mutex<Option<ProgressBar>>,
    held: AtomicU64,
    sculptor: Bar,
}

impl Default for PullBars {
    fn default() -> Self {
        let all = MultiProgress::new();
        let sculptor = Bar { within: Some(all.clone()), ..Bar::default() };
        Self { all, received: Mutex::default(), held: AtomicU64::new(0), sculptor }
    }
}

impl PullBars {
    /// Clears what is drawn.
    pub fn finish(&self) {
        self.sculptor.finish();
        if let Ok(mut received) = self.received.lock()
            && let Some(bar) = received.take()
        {
            bar.finish_and_clear();
        }
    }

    fn message(&self) -> String {
        let held = HumanBytes(self.held.load(Ordering::Relaxed));
        format!("receiving, {held} on the disk")
    }
}

impl smoe_hub::Watch for PullBars {
    fn expected(&self, more: u64) {
        let Ok(mut received) = self.received.lock() else { return };
        let bar = received.get_or_insert_with(|| self.all.insert(0, bytes("receiving", 0)));
        bar.inc_length(more);
    }

    fn received(&self, more: u64) {
        if let Ok(received) = self.received.lock()
            && let Some(bar) = &*received
        {
            bar.inc(more);
            bar.set_message(self.message());
        }
    }

    fn held(&self, bytes: u64) {
        self.held.store(bytes, Ordering::Relaxed);
    }

    fn note(&self, text: &str) {
        smoe_sculpt::Progress::warn(self, text);
    }
}

impl smoe_sculpt::Progress for PullBars {
    fn phase(&self, name: &str) {
        self.sculptor.phase(name);
    }

    fn start(&self, total_bytes: u64) {
        self.sculptor.start(total_bytes);
    }

    fn advance(&self, bytes: u64) {
        self.sculptor.advance(bytes);
    }

    fn warn(&self, message: &str) {
        self.all.suspend(|| eprintln!("warning: {message}"));
    }
}

#[cfg(test)]
mod tests {
    use smoe_sculpt::Progress as _;

    use super::*;

    #[test]
    fn the_speed_is_of_what_was_encoded() {
        let bar = Bar::default();
        bar.phase("reading headers");
        assert_eq!(bar.speed(), None);
        bar.phase("encoding");
        bar.encoded(7_000_000);
        bar.phase("checking");
        let speed = bar.speed().unwrap_or_default();
        assert!(speed.starts_with("7 MB of weights encoded in "), "{speed}");
    }
}
