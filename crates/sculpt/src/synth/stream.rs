//! Tokens that come in runs of one topic.

use super::random::{Random, stream_of};

/// Topics that a vocabulary is cut into.
pub(crate) const TOPICS: usize = 64;
/// Mean length of a run of one topic.
pub(crate) const RUN: u64 = 64;

/// Token ids of a topic: so many neighbours.
pub(crate) fn topic_width(vocab_size: usize) -> usize {
    vocab_size.div_ceil(TOPICS).max(1)
}

/// Tokens for measuring a synthetic vault: runs of one topic after the other. A run's length is geometric
/// with mean 64, its topic any of the 64 with equal chance, its ids any of the topic's: topic t of a
/// vocabulary of V has the ids from `t * ceil(V / 64)` up to the next topic's. The statistics of routing that
/// [`synth`](crate::synth()) aims at are those of this stream, fed to a prompt or to decoding alike.
///
/// The same arguments give the same stream, on every machine. It has no end, except that an empty vocabulary
/// has no tokens.
pub fn token_stream(vocab_size: usize, seed: u64) -> impl Iterator<Item = u32> + Clone {
    topic_stream(vocab_size, seed).map(|(token, _)| token)
}

/// The same, each token with its topic.
pub(crate) fn topic_stream(vocab_size: usize, seed: u64) -> impl Iterator<Item = (u32, usize)> + Clone {
    TopicStream { vocab_size, random: Random::new(&[stream_of::STREAM, seed]), topic: None }
}

#[derive(Clone, Debug)]
struct TopicStream {
    vocab_size: usize,
    random: Random,
    topic: Option<usize>,
}

impl Iterator for TopicStream {
    type Item = (u32, usize);

    fn next(&mut self) -> Option<(u32, usize)> {
        if self.vocab_size == 0 {
            return None;
        }
        let width = topic_width(self.vocab_size);
        let topic = match self.topic {
            Some(topic) if self.random.below(RUN) > 0 => topic,
            _ => self.random.below(self.vocab_size.div_ceil(width) as u64) as usize,
        };
        self.topic = Some(topic);
        let first = topic * width;
        // The last topic may have fewer.
        let ids = width.min(self.vocab_size - first);
        Some(((first + self.random.below(ids as u64) as usize) as u32, topic))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_is_in_runs_of_one_topic_and_within_the_vocabulary() {
        for vocab_size in [1, 5, 63, 64, 65, 1000, 151_936] {
            let width = topic_width(vocab_size);
            assert!(topic_stream(vocab_size, 3).take(20_000).all(|(token, topic)| {
                (token as usize) < vocab_size && token as usize / width == topic && topic < TOPICS
            }));
        }
        let stream: Vec<(u32, usize)> = topic_stream(10_000, 9).take(64_000).collect();
        let changes = stream.windows(2).filter(|pair| pair[0].1 != pair[1].1).count();
        // One in 64, of which one in 64 finds the same topic: 984 expected, deviation 31.
        assert!((830..1140).contains(&changes), "{changes}");
        let distinct: std::collections::BTreeSet<u32> = stream.iter().map(|&(token, _)| token).collect();
        assert!(distinct.len() > 9_000);
        assert_eq!(token_stream(0, 1).next(), None);
    }

    #[test]
    fn seeds_name_streams() {
        let ids = |seed| token_stream(5000, seed).take(100).collect::<Vec<_>>();
        assert_eq!(ids(1), ids(1));
        assert_ne!(ids(1), ids(2));
    }
}
