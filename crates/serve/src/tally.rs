//! What the server itself counts; the engine's figures are in `smoe_meter`. Read by `/metrics`.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use smoe_engine::Usage;
use smoe_meter::Counter;

/// Counters of requests and answers.
#[derive(Debug, Default)]
pub struct Tally {
    /// Responses by route and status.
    requests: Mutex<BTreeMap<(String, u16), u64>>,
    /// New tokens, as they come.
    pub tokens: Counter,
    /// Answers that are over, however they ended.
    pub answers: Counter,
    /// Tokens of their prompts.
    pub prompt_tokens: Counter,
    /// Of those, tokens that were cached.
    pub cached_tokens: Counter,
    /// Their new tokens.
    pub completion_tokens: Counter,
    /// From submission to the first token.
    pub first_token: Histogram,
    /// Between two tokens, the mean of an answer counting once.
    pub between_tokens: Histogram,
}

impl Tally {
    /// Counts a response. `route` is the route's pattern, so that there are few.
    pub fn responded(&self, route: &str, status: u16) {
        let mut requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        match requests.get_mut(&(route.to_owned(), status)) {
            Some(count) => *count += 1,
            None => {
                requests.insert((route.to_owned(), status), 1);
            }
        }
    }

    /// Responses by route and status.
    pub fn requests(&self) -> Vec<(String, u16, u64)> {
        let requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        requests.iter().map(|((route, status), count)| (route.clone(), *status, *count)).collect()
    }

    /// Counts an answer that is over.
    pub fn answered(&self, usage: &Usage) {
        self.answers.add(1);
        self.prompt_tokens.add(usage.prompt as u64);
        self.cached_tokens.add(usage.cached as u64);
        self.completion_tokens.add(usage.completion as u64);
        if usage.completion > 0 {
            self.first_token.add(usage.queued + usage.prefill);
        }
        if let gaps @ 1.. = u32::try_from(usage.completion.saturating_sub(1)).unwrap_or(u32::MAX) {
            self.between_tokens.add(usage.decode / gaps);
        }
    }
}

/// How often durations were how long.
#[derive(Debug, Default)]
pub struct Histogram {
    /// One for each of [`Histogram::BOUNDS`]: durations up to it, and above the one before; and one above all.
    counts: [Counter; Self::BOUNDS.len() + 1],
    /// Their sum in nanoseconds.
    sum: Counter,
}

impl Histogram {
    /// Upper bounds of the buckets, in seconds: tokens come in milliseconds, prompts from a disk in minutes.
    pub const BOUNDS: [f64; 16] =
        [0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0];

    fn add(&self, time: Duration) {
        let seconds = time.as_secs_f64();
        let bucket = Self::BOUNDS.partition_point(|bound| *bound < seconds);
        self.counts[bucket].add(1);
        self.sum.add_time(time);
    }

    /// How many were at most as long as each bound, and in all: the cumulative buckets that Prometheus wants.
    pub fn cumulative(&self) -> [u64; Self::BOUNDS.len() + 1] {
        let mut sum = 0;
        std::array::from_fn(|bucket| {
            sum += self.counts[bucket].get();
            sum
        })
    }

    /// The sum in seconds.
    pub fn sum_seconds(&self) -> f64 {
        self.sum.get() as f64 * 1e-9
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_fall_into_the_bucket_that_bounds_them() {
        let histogram = Histogram::default();
        for milliseconds in [5, 6, 2_000, 900_000] {
            histogram.add(Duration::from_millis(milliseconds));
        }
        let counts = histogram.cumulative();
        assert_eq!([counts[0], counts[1], counts[7], counts[8], counts[15], counts[16]], [1, 2, 2, 3, 3, 4]);
        assert!((histogram.sum_seconds() - 902.011).abs() < 1e-6);
    }

    #[test]
    fn an_answer_of_one_token_has_no_gap() {
        let tally = Tally::default();
        tally.answered(&Usage { completion: 1, ..Usage::default() });
        tally.answered(&Usage { completion: 3, decode: Duration::from_secs(4), ..Usage::default() });
        assert_eq!(tally.between_tokens.cumulative().last(), Some(&1));
        assert_eq!(tally.between_tokens.sum_seconds(), 2.0);
        assert_eq!(tally.first_token.cumulative().last(), Some(&2));
    }
}
