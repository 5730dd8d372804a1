//! A constraint followed on a thread of its own: while the model computes a step, the token before it is taken and what
//! may come next is worked out. So the model's thread waits only for what takes longer than a step, and never for
//! longer than [`PATIENCE`]: an answer whose form takes that long fails, and the others go on.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use smoe_text::TextError;

/// The longest wait for what may come next. Ordinary forms take less than a millisecond, the worst that the limits
/// of the grammars let through some tenths of a second.
const PATIENCE: Duration = Duration::from_secs(2);

/// What can be followed.
pub(super) trait Form: Send + 'static {
    /// The tokens that may come next.
    fn mask(&mut self) -> Result<&[u32], TextError>;
    /// Takes a token.
    fn accept(&mut self, token: u32) -> Result<(), TextError>;
}

impl Form for smoe_text::Constraint {
    fn mask(&mut self) -> Result<&[u32], TextError> {
        self.mask()
    }

    fn accept(&mut self, token: u32) -> Result<(), TextError> {
        self.accept(token)
    }
}

type Mask = Result<Vec<u32>, String>;

/// A form on its thread, which ends with this.
pub(super) struct Follower {
    tokens: Sender<u32>,
    masks: Receiver<Mask>,
    mask: Mask,
    /// A token was sent, and its mask has not come.
    asked: bool,
    patience: Duration,
}

impl Follower {
    /// Starts the thread, and waits for what may come first.
    ///
    /// # Errors
    /// If the system has no thread left.
    pub(super) fn new(form: impl Form) -> std::io::Result<Self> {
        Self::with_patience(form, PATIENCE)
    }

    fn with_patience(mut form: impl Form, patience: Duration) -> std::io::Result<Self> {
        let (tokens, inbox) = channel();
        let (tell, masks) = channel();
        let mask = mask_of(&mut form);
        let follow = move || {
            for token in inbox {
                let mask = form.accept(token).map_err(says).and_then(|()| mask_of(&mut form));
                if tell.send(mask).is_err() {
                    return;
                }
            }
        };
        std::thread::Builder::new().name("grammar".to_owned()).spawn(follow)?;
        Ok(Self { tokens, masks, mask, asked: false, patience })
    }

    /// The tokens that may come next.
    ///
    /// # Errors
    /// In words: if there are none, or it takes too long to tell.
    pub(super) fn mask(&mut self) -> Result<&[u32], String> {
        if std::mem::take(&mut self.asked) {
            self.mask = self.masks.recv_timeout(self.patience).unwrap_or_else(|error| {
                Err(match error {
                    RecvTimeoutError::Timeout => "it takes too long to tell what may follow".to_owned(),
                    RecvTimeoutError::Disconnected => "following the answer's form failed".to_owned(),
                })
            });
        }
        self.mask.as_deref().map_err(Clone::clone)
    }

    /// Takes a token; what is wrong with the way on is told by the next [`Self::mask`].
    ///
    /// # Errors
    /// If the token may not come here.
    pub(super) fn accept(&mut self, token: u32) -> Result<(), String> {
        let mask = self.mask()?;
        let word = mask.get(token as usize / 32).copied().unwrap_or(0);
        if word >> (token % 32) & 1 == 0 {
            return Err(format!("token {token} may not come here"));
        }
        // A thread that is gone is noticed when its mask does not come.
        let _ = self.tokens.send(token);
        self.asked = true;
        Ok(())
    }
}

fn mask_of(form: &mut impl Form) -> Mask {
    form.mask().map(<[u32]>::to_vec).map_err(says)
}

fn says(error: TextError) -> String {
    error.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Allows the token that is one more than the last, up to 9. Waits for a word before it takes 5; fails at 7.
    struct Counts {
        next: u32,
        mask: [u32; 1],
        word: Receiver<()>,
    }

    impl Form for Counts {
        fn mask(&mut self) -> Result<&[u32], TextError> {
            self.mask = [1 << self.next];
            match self.next {
                10.. => Err(TextError::Constraint { reason: "over".to_owned() }),
                _ => Ok(&self.mask),
            }
        }

        fn accept(&mut self, token: u32) -> Result<(), TextError> {
            assert!(token != 7, "as the test wants it");
            if token == 5 {
                // An error: the test is over.
                let _ = self.word.recv();
            }
            self.next = token + 1;
            Ok(())
        }
    }

    fn counts(from: u32, patience: Duration) -> (Follower, Sender<()>) {
        let (say, word) = channel();
        (Follower::with_patience(Counts { next: from, mask: [0], word }, patience).unwrap(), say)
    }

    #[test]
    fn it_allows_and_refuses_what_the_form_does() {
        let (mut follower, _say) = counts(1, PATIENCE);
        for token in 1..5 {
            assert_eq!(follower.mask(), Ok(&[1 << token][..]));
            assert!(follower.accept(token + 1).is_err() && follower.accept(99).is_err());
            follower.accept(token).unwrap();
        }
        let (mut follower, _say) = counts(9, PATIENCE);
        follower.accept(9).unwrap();
        let error = follower.mask().unwrap_err();
        assert!(error.contains("over"), "{error}");
        assert_eq!(follower.accept(9), Err(error));
    }

    #[test]
    fn a_form_that_takes_for_ever_or_fails_is_given_up() {
        let (mut follower, say) = counts(5, Duration::from_millis(1));
        follower.accept(5).unwrap();
        assert!(follower.mask().unwrap_err().contains("too long"));
        assert!(follower.accept(6).is_err(), "there is no way on");
        drop(say);
        let (mut follower, _say) = counts(7, PATIENCE);
        follower.accept(7).unwrap();
        assert!(follower.mask().unwrap_err().contains("failed"));
    }
}
