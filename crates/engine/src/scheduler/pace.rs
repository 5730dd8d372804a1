//! How much of a prompt a step takes while others wait for their next token.
//!
//! A step's time is taken to be `a + b n` for n tokens of prompts; both are learnt from the steps that were, the newer
//! counting more. On a ring that holds everything `a` is small, and n is what keeps a step within the stall. When
//! experts are read from disk `a` is nearly all, as few tokens need nearly every expert: then n is what doubles the
//! step, for less would read as much and compute less. Measured times are noisy, so a part is at most twice the last
//! one, and half of it when that one took far too long. After a step with a part the answers have as much time for
//! themselves.

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
    /// The most that the next part may be, as the last one went.
    reach: usize,
}

impl Pace {
    pub(super) fn new(stall: Duration, chunk: usize) -> Self {
        Self { stall: stall.as_secs_f64(), chunk, sums: [0.0; 5], owed: 0.0, reach: FIRST }
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
        let n = ((self.limit() - a) / b.max(1e-9)) as usize;
        n.min(self.reach).clamp(LEAST.min(most), most)
    }

    /// Longest step that is aimed at.
    fn limit(&self) -> f64 {
        self.line().map_or(self.stall, |(a, _)| self.stall.max(2.0 * a))
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
        self.reach = if t > 1.5 * self.limit() { prompt / 2 } else { prompt.max(FIRST) * 2 };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn learnt(a: f64, b: f64) -> Pace {
        let mut pace = Pace::new(Duration::from_millis(500), 2048);
        for n in [64, 512, 100, 1000] {
            pace.note(n, 0, Duration::from_secs_f64(a + b * n as f64));
        }
        pace.reach = 2048;
        pace
    }

    /// With times that scatter, the steps of a long prompt stay near what is aimed at.
    #[test]
    fn noise_does_not_make_a_part_long() {
        let mut pace = Pace::new(Duration::from_millis(500), 2048);
        let mut seed = 7_u64;
        let (mut longest, mut late) = (0.0_f64, 0);
        for step in 0..5000 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let noise = 1.0 + 0.2 * ((seed >> 40) as f64 / f64::from(1 << 24) - 0.5);
            let n = pace.prompt_tokens(1);
            let t = if n == 0 { 0.05 } else { (0.02 + 0.004 * n as f64) * noise };
            pace.note(n, 1, Duration::from_secs_f64(t));
            longest = longest.max(if step > 20 { t } else { 0.0 });
            late += u32::from(step > 20 && t > 0.75);
        }
        assert!(longest < 1.25 && late < 100, "{longest} s, {late} steps beyond 1.5 times the stall");
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
