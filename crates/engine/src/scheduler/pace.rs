//! How much of a prompt a step takes while others wait for their next token.
//!
//! A step's time is taken to be `a + b n` for n tokens of prompts; both are learnt from the steps that were, the newer
//! counting more. On a ring that holds everything `a` is small, and n is what keeps a step within the stall. When
//! experts are read from disk `a` is nearly all, as few tokens need nearly every expert: then n is what doubles the
//! step, for less would read as much and compute less. After such a step the answers have as much time for themselves.

use std::time::Duration;

/// Weight of what was before, when a step is added.
const FADE: f64 = 0.9;
/// Tokens of a part when nothing is known yet.
const FIRST: usize = 64;
/// The least.
const LEAST: usize = 16;

#[derive(Debug)]
pub(super) struct Pace {
    stall: f64,
    chunk: usize,
    /// Faded sums over steps with prompts: 1, n, t, n n, n t.
    sums: [f64; 5],
    /// Time that is owed to answers.
    owed: f64,
}

impl Pace {
    pub(super) fn new(stall: Duration, chunk: usize) -> Self {
        Self { stall: stall.as_secs_f64(), chunk, sums: [0.0; 5], owed: 0.0 }
    }

    /// Tokens of prompts that the next step may take, `decoding` jobs being answered in it.
    pub(super) fn prompt_tokens(&self, decoding: usize) -> usize {
        let most = self.chunk.saturating_sub(decoding);
        if decoding == 0 {
            return most;
        }
        if self.owed > 0.0 {
            return 0;
        }
        let Some((a, b)) = self.line() else { return FIRST.min(most) };
        let limit = self.stall.max(2.0 * a);
        (((limit - a) / b.max(1e-9)) as usize).clamp(LEAST.min(most), most)
    }

    /// Time of a step, and of each of its prompt tokens.
    fn line(&self) -> Option<(f64, f64)> {
        let [w, n, t, nn, nt] = self.sums;
        if w == 0.0 {
            return None;
        }
        let spread = w * nn - n * n;
        if spread <= 1e-9 * nn * w {
            // Always as many: take it all for theirs.
            return Some((0.0, t / n));
        }
        let b = ((w * nt - n * t) / spread).max(0.0);
        Some((((t - b * n) / w).max(0.0), b))
    }

    /// A step took `time`.
    pub(super) fn note(&mut self, prompt: usize, decoding: usize, time: Duration) {
        let t = time.as_secs_f64();
        if prompt == 0 {
            self.owed = (self.owed - t).max(0.0);
            return;
        }
        let n = prompt as f64;
        for (sum, x) in self.sums.iter_mut().zip([1.0, n, t, n * n, n * t]) {
            *sum = *sum * FADE + x;
        }
        self.owed = if decoding > 0 { t } else { 0.0 };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn learnt(a: f64, b: f64) -> Pace {
        let mut pace = Pace::new(Duration::from_millis(500), 2048);
        for n in [64, 512, 100, 300] {
            pace.note(n, 0, Duration::from_secs_f64(a + b * n as f64));
        }
        pace
    }

    #[test]
    fn in_memory_a_part_keeps_within_the_stall() {
        let n = learnt(0.02, 0.004).prompt_tokens(3);
        assert!((115..=120).contains(&n), "{n}");
    }

    #[test]
    fn from_disk_a_part_doubles_the_step() {
        let n = learnt(8.0, 0.005).prompt_tokens(1);
        assert!((1590..=1610).contains(&n), "{n}");
    }

    #[test]
    fn answers_get_as_much_time_as_prompts_took() {
        let mut pace = learnt(0.02, 0.004);
        assert_eq!(pace.prompt_tokens(0), 2048, "nobody waits");
        pace.note(100, 2, Duration::from_millis(400));
        assert_eq!(pace.prompt_tokens(2), 0);
        pace.note(0, 2, Duration::from_millis(250));
        assert_eq!(pace.prompt_tokens(2), 0);
        pace.note(0, 2, Duration::from_millis(250));
        assert!(pace.prompt_tokens(2) > 0);
    }

    #[test]
    fn whatever_was_measured_a_part_is_within_bounds() {
        for (n, t) in [(1, 0.0), (2048, 1e6), (1, 1e6), (512, 1e-9)] {
            let mut pace = Pace::new(Duration::from_millis(500), 2048);
            pace.note(n, 0, Duration::from_secs_f64(t));
            assert!((LEAST..=2047).contains(&pace.prompt_tokens(1)), "{n} {t}");
            pace.note(n / 2 + 1, 0, Duration::from_secs_f64(t * 3.0));
            assert!((LEAST..=2047).contains(&pace.prompt_tokens(1)), "{n} {t}");
        }
        assert_eq!(
            Pace::new(Duration::ZERO, 1).prompt_tokens(1),
            0,
            "a step of one token has room for the answer only"
        );
    }
}
