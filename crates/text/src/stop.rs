//! Stop strings: an answer ends where one of them begins, and none of it is shown.
//!
//! Text comes in pieces that break anywhere. What might be the beginning of a stop string is held back until it is
//! clear, never more than the longest stop string less a byte. The promise: what is given out is the whole answer
//! cut at the stop string that *starts* first.

/// Watches a stream of text for stop strings.
#[derive(Clone, Debug, Default)]
pub struct StopMatcher {
    stops: Vec<String>,
    /// The end of the text so far, which begins as a stop string does.
    held: String,
    stopped: Option<usize>,
}

/// What came of a piece of text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StopStep {
    /// Text that is no part of a stop string.
    pub emit: String,
    /// The index of the stop string that ended the answer, if one did.
    pub stopped: Option<usize>,
}

impl StopMatcher {
    /// Watches for these strings. Empty ones match nothing.
    ///
    /// Of two stop strings that start at the same place the shorter one counts (and of equal ones the first): it is
    /// complete first, and the answer is the same. Of two that start at different places the earlier one counts, even
    /// if the other is complete before; the matcher then waits for the earlier one to be decided.
    pub fn new(stops: Vec<String>) -> Self {
        StopMatcher { stops, ..Self::default() }
    }

    /// Takes the next piece. After a stop nothing more comes out.
    pub fn push(&mut self, text: &str) -> StopStep {
        if self.stopped.is_some() {
            return StopStep { emit: String::new(), stopped: self.stopped };
        }
        self.held.push_str(text);
        let cut = self.scan(false);
        let rest = self.held.split_off(cut);
        let emit =
            std::mem::replace(&mut self.held, if self.stopped.is_some() { String::new() } else { rest });
        StopStep { emit, stopped: self.stopped }
    }

    /// Ends the stream and returns what was held back. A stop string in it that waited for an earlier one counts
    /// now; [`StopMatcher::stopped`] tells.
    pub fn finish(&mut self) -> String {
        let cut = self.scan(true);
        self.held.truncate(cut);
        std::mem::take(&mut self.held)
    }

    /// The index of the stop string that ended the answer, if one did.
    pub fn stopped(&self) -> Option<usize> {
        self.stopped
    }

    /// Finds the first place where a stop string stands (noted in `stopped`) or, before the end of the stream,
    /// might begin; the length of the text if there is none.
    fn scan(&mut self, ended: bool) -> usize {
        for (at, _) in self.held.char_indices() {
            let rest = &self.held.as_bytes()[at..];
            let stops = self.stops.iter().enumerate().filter(|(_, stop)| !stop.is_empty());
            let complete = stops.clone().filter(|(_, stop)| rest.starts_with(stop.as_bytes()));
            if let Some((index, _)) = complete.min_by_key(|(_, stop)| stop.len()) {
                self.stopped = Some(index);
                return at;
            }
            if !ended && stops.clone().any(|(_, stop)| stop.as_bytes().starts_with(rest)) {
                return at;
            }
        }
        self.held.len()
    }
}
