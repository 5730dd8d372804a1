//! Guesses at what follows, from the conversation itself: where the last few tokens stood before, what came after them
//! may come again (prompt lookup: Saxena 2023, `transformers`' `prompt_lookup_num_tokens`). Guesses are checked in one
//! step and never change what is said; they are made only while that is faster.

use std::time::Duration;

/// Tokens that must have stood before, the longer first.
const NGRAMS: [usize; 2] = [3, 2];
/// Guesses of a step; each costs the experts that it needs.
pub(super) const MOST: usize = 4;
/// How far back is looked.
const WINDOW: usize = 16 * 1024;
/// Weight of what was before, when a step is added.
const FADE: f64 = 0.9;
/// Chances to guess that are passed over after it did not pay, before it is tried again.
const PAUSE: u32 = 64;

#[derive(Debug, Default)]
pub(super) struct Drafts {
    /// Seconds of a step without guesses.
    plain: Option<f64>,
    /// Seconds of a token in steps with guesses.
    guessed: Option<f64>,
    pause: u32,
}

impl Drafts {
    /// Guesses at most `left` tokens after `tokens`.
    pub(super) fn draft(&mut self, tokens: &[u32], left: usize, out: &mut Vec<u32>) {
        out.clear();
        if self.plain.is_none() {
            return;
        }
        let window = &tokens[tokens.len().saturating_sub(WINDOW)..];
        for n in NGRAMS {
            let Some(end) = window.len().checked_sub(n) else { continue };
            let last = &window[end..];
            if let Some(at) = window[..window.len() - 1].windows(n).rposition(|before| before == last) {
                if self.pause > 0 {
                    self.pause -= 1;
                    return;
                }
                out.extend(window[at + n..].iter().take(MOST.min(left)));
                return;
            }
        }
    }

    /// A step with one answer took `time`; of `drafted` guesses in it, so many were right.
    pub(super) fn note(&mut self, drafted: usize, accepted: usize, time: Duration) {
        let add =
            |mean: &mut Option<f64>, t: f64| *mean = Some(mean.map_or(t, |m| FADE * m + (1.0 - FADE) * t));
        let t = time.as_secs_f64();
        if drafted == 0 {
            return add(&mut self.plain, t);
        }
        add(&mut self.guessed, t / (1 + accepted) as f64);
        if self.guessed > self.plain {
            self.pause = PAUSE;
            self.guessed = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drafts() -> Drafts {
        let mut drafts = Drafts::default();
        drafts.note(0, 0, Duration::from_millis(100));
        drafts
    }

    fn guess(drafts: &mut Drafts, tokens: &[u32], left: usize) -> Vec<u32> {
        let mut out = vec![9];
        drafts.draft(tokens, left, &mut out);
        out
    }

    #[test]
    fn what_followed_last_time_is_guessed() {
        let mut drafts = drafts();
        assert_eq!(guess(&mut drafts, &[1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3], 9), [4, 5, 6, 7]);
        assert_eq!(guess(&mut drafts, &[1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3], 2), [4, 5]);
        assert_eq!(guess(&mut drafts, &[7, 2, 3, 4, 5, 1, 2, 3], 9), [4, 5, 1, 2], "two are enough");
        assert_eq!(guess(&mut drafts, &[2, 3, 4, 2, 3, 5, 2, 3], 1), [5], "the latest counts");
        assert_eq!(guess(&mut drafts, &[5, 5, 5, 5], 9), [5], "up to the end");
        assert!(guess(&mut drafts, &[1, 2, 3], 9).is_empty());
        assert!(guess(&mut drafts, &[], 9).is_empty());
    }

    #[test]
    fn it_is_left_off_while_it_does_not_pay() {
        let (mut drafts, tokens) = (drafts(), [1, 2, 3, 1, 2]);
        assert!(guess(&mut Drafts::default(), &tokens, 9).is_empty(), "not before a plain step was timed");
        drafts.note(4, 1, Duration::from_millis(150));
        assert!(!guess(&mut drafts, &tokens, 9).is_empty(), "75 ms a token");
        for _ in 0..10 {
            drafts.note(4, 0, Duration::from_millis(150));
        }
        let silent = (0..).take_while(|_| guess(&mut drafts, &tokens, 9).is_empty()).count();
        assert!((1..=64).contains(&silent), "{silent}");
    }
}
