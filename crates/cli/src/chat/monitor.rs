//! The turn monitor: what is going on, in one line.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use smoe_meter::{StoreMeter, StoreSnapshot};

use super::cells::{Colour, Row, Span, Style, width};

/// The share of the context at which it is time to say so.
const NEARLY_FULL: f64 = 0.85;
/// The disk's rate is of this stretch.
const RECENT: Duration = Duration::from_secs(2);

/// What an answer is at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Doing {
    /// On its way.
    #[default]
    Waiting,
    /// Others come first.
    Queued {
        /// So many.
        ahead: u64,
    },
    /// The model is being loaded.
    Loading {
        /// Done.
        done: u64,
        /// To do.
        total: u64,
    },
    /// The prompt is being read.
    Prefilling {
        /// Tokens done.
        done: u64,
        /// Tokens to do.
        total: u64,
    },
    /// Tokens come.
    Answering,
}

/// What the line says, at one time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Facts {
    /// What is going on.
    pub doing: Doing,
    /// Since the question.
    pub elapsed: Duration,
    /// New tokens.
    pub tokens: usize,
    /// Since the first of them.
    pub since_first: Duration,
    /// Share of experts that were in memory when they were needed.
    pub hit_rate: Option<f64>,
    /// Bytes read a second.
    pub disk_rate: Option<f64>,
    /// Positions held, and how many there are.
    pub context: Option<(usize, usize)>,
}

impl Facts {
    /// Its parts, the most important ones first.
    fn parts(&self) -> Vec<Span> {
        let part = |text: String| Span::new(&text, Style::DIM);
        let elapsed = part(seconds(self.elapsed));
        match self.doing {
            Doing::Waiting => vec![part("waiting".to_owned()), elapsed],
            Doing::Queued { ahead } => vec![part(format!("queued, {} ahead", group(ahead))), elapsed],
            Doing::Loading { done, total } => {
                let share = 100.0 * done as f64 / total.max(1) as f64;
                vec![part(format!("loading the model, {share:.0} %")), elapsed]
            }
            Doing::Prefilling { total: 0, .. } => vec![part("prefilling".to_owned()), elapsed],
            Doing::Prefilling { done, total } => {
                let size = format!("prefilling {} of {} tokens", group(done), group(total));
                let rate = (done > 0).then(|| done as f64 / self.elapsed.as_secs_f64().max(1e-9));
                let mut parts = vec![part(size), elapsed];
                parts.extend(rate.map(|rate| part(format!("{rate:.0} tok/s"))));
                parts
            }
            Doing::Answering => {
                let unit = if self.tokens == 1 { "token" } else { "tokens" };
                let mut parts =
                    vec![part("answering".to_owned()), part(format!("{} {unit}", group(self.tokens as u64)))];
                if self.tokens > 1 {
                    let rate = (self.tokens - 1) as f64 / self.since_first.as_secs_f64().max(1e-9);
                    parts.push(part(format!("{rate:.1} tok/s")));
                }
                parts.extend(self.hit_rate.map(|rate| part(format!("hits {:.0} %", 100.0 * rate))));
                parts.extend(self.disk_rate.map(|rate| part(format!("{:.1} GB/s", rate / 1e9))));
                if let Some((held, of)) = self.context {
                    let text = format!("context {}/{}", group(held as u64), group(of as u64));
                    let nearly_full = Style { colour: Some(Colour::Yellow), bold: true, ..Style::PLAIN };
                    let style = if is_nearly_full(held, of) { nearly_full } else { Style::DIM };
                    parts.push(Span::new(&text, style));
                }
                parts
            }
        }
    }

    /// The line, as much of it as has room.
    pub fn row(&self, columns: usize) -> Row {
        let mut row = Row::new();
        for part in self.parts() {
            let separator = Span::new(if row.is_empty() { "" } else { " · " }, Style::DIM);
            if width(&row) + separator.width() + part.width() > columns {
                break;
            }
            row.extend([separator, part]);
        }
        row
    }
}

/// What to say of a context that is nearly full.
pub fn warning((held, of): (usize, usize)) -> Option<String> {
    let share = 100.0 * held as f64 / of.max(1) as f64;
    is_nearly_full(held, of).then(|| {
        let (held, of) = (group(held as u64), group(of as u64));
        format!("the context is {share:.0} % full, {held} of {of} positions: /reset begins anew")
    })
}

fn is_nearly_full(held: usize, of: usize) -> bool {
    of > 0 && held as f64 >= NEARLY_FULL * of as f64
}

/// A number with its thousands set apart.
pub fn group(n: u64) -> String {
    let digits = n.to_string();
    let mut grouped = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

fn seconds(time: Duration) -> String {
    match time.as_secs() {
        0..100 => format!("{:.1} s", time.as_secs_f64()),
        whole => format!("{} min {:02} s", whole / 60, whole % 60),
    }
}

/// An answer under way.
#[derive(Debug)]
pub struct Monitor {
    begun: Instant,
    doing: Doing,
    first: Option<Instant>,
    tokens: usize,
    /// Tokens of the prompt, if they are known.
    prompt: Option<usize>,
    context: Option<usize>,
    gauge: Option<Gauge>,
}

impl Monitor {
    /// An answer begins, in a context of so many positions; `store` counts what it costs, where it is at hand.
    pub fn new(prompt: Option<usize>, context: Option<usize>, store: Option<Arc<StoreMeter>>) -> Self {
        let gauge = store.map(|store| Gauge { store, first: None, recent: VecDeque::new() });
        Self {
            begun: Instant::now(),
            doing: Doing::default(),
            first: None,
            tokens: 0,
            prompt,
            context,
            gauge,
        }
    }

    /// It is at this now.
    pub fn at(&mut self, doing: Doing) {
        self.doing = doing;
    }

    /// So many tokens of the prompt there are after all.
    pub fn prompt_is(&mut self, tokens: usize) {
        self.prompt = Some(tokens);
    }

    /// So many new tokens there are.
    pub fn tokens_are(&mut self, tokens: usize) {
        self.doing = Doing::Answering;
        self.tokens = tokens;
        self.first.get_or_insert_with(Instant::now);
        if let Some(gauge) = &mut self.gauge {
            gauge.first.get_or_insert_with(|| gauge.store.snapshot());
        }
    }

    /// One more token.
    pub fn token(&mut self) {
        self.tokens_are(self.tokens + 1);
    }

    /// Positions held, and how many there are.
    pub fn context(&self) -> Option<(usize, usize)> {
        // The last token has no keys and values yet. Pieces of a server's answer may be more than its tokens.
        let (held, of) = (self.prompt? + self.tokens.saturating_sub(1), self.context?);
        Some((held.min(of), of))
    }

    /// What there is to say now.
    pub fn facts(&mut self) -> Facts {
        let now = Instant::now();
        let (hit_rate, disk_rate) = self.gauge.as_mut().map_or((None, None), |gauge| gauge.read(now));
        Facts {
            doing: self.doing,
            elapsed: now.saturating_duration_since(self.begun),
            tokens: self.tokens,
            since_first: self.first.map_or(Duration::ZERO, |first| now.saturating_duration_since(first)),
            hit_rate,
            disk_rate,
            context: self.context(),
        }
    }
}

/// The store's counters, read while it works.
#[derive(Debug)]
struct Gauge {
    store: Arc<StoreMeter>,
    /// At the first token.
    first: Option<StoreSnapshot>,
    /// Bytes read.
    recent: VecDeque<(Instant, u64)>,
}

impl Gauge {
    fn read(&mut self, now: Instant) -> (Option<f64>, Option<f64>) {
        let store = self.store.snapshot();
        self.recent.push_back((now, store.disk_bytes));
        // The oldest one is as old as the stretch or a little older.
        while self.recent.get(1).is_some_and(|(at, _)| now.saturating_duration_since(*at) >= RECENT) {
            self.recent.pop_front();
        }
        let disk_rate = self.recent.front().and_then(|(at, bytes)| {
            let time = now.saturating_duration_since(*at).as_secs_f64();
            (time > 0.0).then(|| store.disk_bytes.saturating_sub(*bytes) as f64 / time)
        });
        (self.first.and_then(|first| (store - first).hit_rate()), disk_rate)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chat::cells::plain;

    fn line(facts: Facts, columns: usize) -> String {
        plain(&[facts.row(columns)])
    }

    fn after(elapsed: f64, doing: Doing) -> Facts {
        Facts { doing, elapsed: Duration::from_secs_f64(elapsed), ..Facts::default() }
    }

    #[test]
    fn what_is_waited_for_is_named_with_its_size() {
        let shown = |facts| line(facts, 100);
        assert_eq!(shown(after(0.25, Doing::Waiting)), "waiting · 0.2 s");
        assert_eq!(shown(after(3.0, Doing::Queued { ahead: 2 })), "queued, 2 ahead · 3.0 s");
        assert_eq!(
            shown(after(125.0, Doing::Loading { done: 43, total: 100 })),
            "loading the model, 43 % · 2 min 05 s"
        );
        assert_eq!(shown(after(0.1, Doing::Prefilling { done: 0, total: 0 })), "prefilling · 0.1 s");
        assert_eq!(
            shown(after(12.4, Doing::Prefilling { done: 1280, total: 4096 })),
            "prefilling 1,280 of 4,096 tokens · 12.4 s · 103 tok/s"
        );
    }

    #[test]
    fn an_answer_shows_what_it_costs_and_drops_what_has_no_room() {
        let facts = Facts {
            tokens: 42,
            since_first: Duration::from_secs_f64(2.24),
            hit_rate: Some(0.87),
            disk_rate: Some(1.2e9),
            context: Some((1234, 8192)),
            ..after(5.0, Doing::Answering)
        };
        let whole = "answering · 42 tokens · 18.3 tok/s · hits 87 % · 1.2 GB/s · context 1,234/8,192";
        assert_eq!(line(facts, 100), whole);
        assert_eq!(line(facts, 40), "answering · 42 tokens · 18.3 tok/s");
        for columns in 0..100 {
            assert!(width(&facts.row(columns)) <= columns && whole.starts_with(&line(facts, columns)));
        }
        let first = Facts { tokens: 1, ..after(1.0, Doing::Answering) };
        assert_eq!(line(first, 100), "answering · 1 token");
    }

    #[test]
    fn a_context_is_nearly_full_at_85_percent() {
        assert_eq!(warning((6963, 8192)), None);
        assert_eq!(
            warning((6964, 8192)).unwrap_or_default(),
            "the context is 85 % full, 6,964 of 8,192 positions: /reset begins anew"
        );
        assert_eq!(warning((0, 0)), None);
    }

    #[test]
    fn the_last_token_holds_no_position_yet() {
        let mut monitor = Monitor::new(Some(10), Some(64), None);
        assert_eq!(monitor.context(), Some((10, 64)));
        monitor.token();
        assert_eq!(monitor.context(), Some((10, 64)));
        monitor.token();
        assert_eq!(monitor.context(), Some((11, 64)));
        let facts = monitor.facts();
        assert_eq!((facts.doing, facts.tokens), (Doing::Answering, 2));
    }

    #[test]
    fn rates_are_of_what_the_store_counted() {
        let store = Arc::new(StoreMeter::default());
        let mut monitor = Monitor::new(Some(1), Some(2), Some(store.clone()));
        store.demand_misses.add(5);
        monitor.token();
        assert_eq!(monitor.facts().hit_rate, None);
        store.demand_hits.add(3);
        store.demand_misses.add(1);
        store.disk_bytes.add(1 << 20);
        let facts = monitor.facts();
        assert_eq!(facts.hit_rate, Some(0.75));
        // A clock may stand still between two looks.
        assert!(facts.disk_rate.is_none_or(|rate| rate > 0.0));
    }

    #[test]
    fn thousands_are_set_apart() {
        assert_eq!([0, 12, 999, 1000, 1_234_567].map(group), ["0", "12", "999", "1,000", "1,234,567"]);
    }
}
