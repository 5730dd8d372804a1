//! Stop strings, piece by piece, against the whole text.

#![allow(clippy::unwrap_used)]

use proptest::prelude::*;
use smoe_text::StopMatcher;

/// What comes out of the pieces, and the stop string that ended it.
fn stream(stops: &[&str], pieces: &[&str]) -> (String, Option<usize>) {
    let mut matcher = StopMatcher::new(stops.iter().map(|stop| (*stop).to_owned()).collect());
    let mut out = String::new();
    for piece in pieces {
        let step = matcher.push(piece);
        out.push_str(&step.emit);
        assert_eq!(step.stopped, matcher.stopped());
    }
    out.push_str(&matcher.finish());
    (out, matcher.stopped())
}

/// The same by the definition: the first start, then the shortest, then the first in the list.
fn naive(stops: &[&str], text: &str) -> (String, Option<usize>) {
    let found = stops.iter().enumerate().filter(|(_, stop)| !stop.is_empty());
    let first = found.filter_map(|(index, stop)| text.find(stop).map(|at| (at, stop.len(), index))).min();
    first.map_or((text.to_owned(), None), |(at, _, index)| (text[..at].to_owned(), Some(index)))
}

#[test]
fn a_stop_string_may_span_pieces() {
    assert_eq!(stream(&["</s>"], &["Hi<", "/", "s", ">more"]), ("Hi".into(), Some(0)));
    assert_eq!(stream(&["</s>"], &["Hi</", "b>"]), ("Hi</b>".into(), None));
    assert_eq!(stream(&["aab"], &["aa", "ab", "x"]), ("a".into(), Some(0)));
    assert_eq!(stream(&["漢字"], &["a漢", "漢字"]), ("a漢".into(), Some(0)));
}

#[test]
fn what_cannot_be_a_stop_string_is_not_held() {
    let mut matcher = StopMatcher::new(vec!["\nUser:".into()]);
    assert_eq!(matcher.push("Hello").emit, "Hello");
    assert_eq!(matcher.push("\nUs").emit, "");
    assert_eq!(matcher.push("ing it").emit, "\nUsing it");
    assert_eq!(matcher.push("\n").emit, "");
    assert_eq!(matcher.finish(), "\n");
}

#[test]
fn the_stop_string_that_starts_first_counts() {
    // "bc" is complete first, but "abcd" starts before it.
    assert_eq!(stream(&["bc", "abcd"], &["xabc", "d"]), ("x".into(), Some(1)));
    assert_eq!(stream(&["bc", "abcd"], &["xabc", "e"]), ("xa".into(), Some(0)));
    assert_eq!(stream(&["bc", "abcd"], &["xabc"]), ("xa".into(), Some(0)));
    assert_eq!(stream(&["abc", "ab"], &["xab", "c"]), ("x".into(), Some(1)));
    assert_eq!(stream(&["ab", "ab"], &["ab"]), ("".into(), Some(0)));
}

#[test]
fn nothing_comes_after_a_stop() {
    let mut matcher = StopMatcher::new(vec!["!".into()]);
    assert_eq!(matcher.push("a!b").emit, "a");
    let after = matcher.push("c");
    assert_eq!((after.emit.as_str(), after.stopped), ("", Some(0)));
    assert_eq!(matcher.finish(), "");
    assert_eq!(matcher.stopped(), Some(0));
}

#[test]
fn without_stop_strings_all_comes_at_once() {
    assert_eq!(stream(&[], &["a", "", "b"]), ("ab".into(), None));
    assert_eq!(stream(&["", "b"], &["a", "b"]), ("a".into(), Some(1)));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    // Few letters, so that stop strings overlap one another and themselves.
    #[test]
    fn pieces_give_what_the_whole_gives(
        stops in prop::collection::vec("[abé]{0,5}", 0..4),
        pieces in prop::collection::vec("[abcé]{0,6}", 0..12),
    ) {
        let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
        let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
        prop_assert_eq!(stream(&stops, &pieces), naive(&stops, &pieces.concat()));
    }

    #[test]
    fn no_more_is_held_than_might_be_a_stop_string(
        stops in prop::collection::vec("[ab]{1,5}", 1..4),
        pieces in prop::collection::vec("[abc]{0,6}", 0..12),
    ) {
        let longest = stops.iter().map(String::len).max().unwrap();
        let mut matcher = StopMatcher::new(stops.clone());
        let (mut given, mut out) = (String::new(), String::new());
        for piece in &pieces {
            given.push_str(piece);
            let step = matcher.push(piece);
            out.push_str(&step.emit);
            if step.stopped.is_some() {
                break;
            }
            let held = &given[out.len()..];
            prop_assert!(held.len() < longest);
            prop_assert!(held.is_empty() || stops.iter().any(|stop| stop.starts_with(held)));
        }
    }
}
