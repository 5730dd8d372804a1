//! Streamed text against the text of all ids at once, and both against the library's decoders.

#![allow(clippy::unwrap_used, clippy::print_stderr)]

mod common;

use std::sync::OnceLock;

use common::HARD_TEXTS;
use proptest::prelude::*;
use smoe_text::{Detokeniser, Tokenizer};

type Pair = (Tokenizer, tokenizers::Tokenizer);

/// The pieces that a stream of ids gives; the last is that of the end.
fn pieces(tokenizer: &Tokenizer, ids: &[u32], skip_special: bool) -> Vec<String> {
    let mut detokeniser = Detokeniser::new(tokenizer, skip_special);
    let mut pieces: Vec<String> = ids.iter().map(|&id| detokeniser.push(id)).collect();
    pieces.push(detokeniser.finish());
    pieces
}

/// What must hold of every sequence of ids under the common kinds of decoder.
fn check(tokenizer: &Tokenizer, ids: &[u32], skip_special: bool) {
    let pieces = pieces(tokenizer, ids, skip_special);
    let whole = tokenizer.decode(ids, skip_special);
    assert_eq!(pieces.concat(), whole, "{ids:?}");
    // All is out but the beginning of a character.
    let mut out = String::new();
    for (at, piece) in pieces[..ids.len()].iter().enumerate() {
        out.push_str(piece);
        let now = tokenizer.decode(&ids[..=at], skip_special);
        assert!(now == out || now == out.clone() + "\u{fffd}", "held back {now:?} at {at} of {ids:?}");
    }
}

fn byte_level() -> &'static Pair {
    static PAIR: OnceLock<Pair> = OnceLock::new();
    PAIR.get_or_init(|| common::both(&common::byte_level()))
}

fn all_decoders() -> &'static [(&'static str, Pair)] {
    static PAIRS: OnceLock<Vec<(&'static str, Pair)>> = OnceLock::new();
    PAIRS.get_or_init(|| {
        let pair = |(name, decoder)| (name, common::both(&common::pieces(&decoder)));
        common::decoders().into_iter().map(pair).collect()
    })
}

fn decoder(name: &str) -> &'static Pair {
    all_decoders().iter().find(|(this, _)| *this == name).map(|(_, pair)| pair).unwrap()
}

#[test]
fn an_emoji_comes_in_one_piece() {
    let (tokenizer, _) = byte_level();
    let ids = tokenizer.encode("a😀é").unwrap();
    let pieces = pieces(tokenizer, &ids, true);
    assert_eq!(pieces, ["a", "", "😀", "", "é", ""]);
}

#[test]
fn an_unfinished_character_is_shown_at_the_end() {
    let (tokenizer, _) = byte_level();
    let ids = tokenizer.encode("a😀").unwrap();
    assert_eq!(pieces(tokenizer, &ids[..2], true), ["a", "", "\u{fffd}"]);
}

#[test]
fn a_real_replacement_character_is_not_held() {
    let (tokenizer, _) = byte_level();
    let ids = tokenizer.encode("\u{fffd}").unwrap();
    assert_eq!(pieces(tokenizer, &ids, true), ["", "", "\u{fffd}", ""]);
    // Nor is a byte that begins nothing.
    assert_eq!(pieces(tokenizer, &[0x80, 0xff], true), ["\u{fffd}", "\u{fffd}", ""]);
}

#[test]
fn the_first_blank_is_stripped_once() {
    let (tokenizer, _) = decoder("llama");
    let id = |token| tokenizer.token_to_id(token).unwrap();
    let ids = [id("<s>"), id("▁a"), id("▁a"), id("<0x20>"), id("▁▁")];
    assert_eq!(pieces(tokenizer, &ids, true), ["", "a", " a", " ", "  ", ""]);
    assert_eq!(pieces(tokenizer, &ids, false), ["<s>", " a", " a", " ", "  ", ""]);
    let (metaspace, _) = decoder("metaspace");
    assert_eq!(pieces(metaspace, &ids, true)[..3], ["", "a", " a"]);
}

#[test]
fn a_run_of_byte_tokens_keeps_what_is_good() {
    let (tokenizer, library) = decoder("llama");
    let id = |token| tokenizer.token_to_id(token).unwrap();
    let ids = [id("a"), id("<0xC3>"), id("<0xA9>"), id("<0xFF>"), id("b")];
    assert_eq!(pieces(tokenizer, &ids, true), ["a", "", "é", "\u{fffd}", "b", ""]);
    assert_eq!(tokenizer.decode(&ids, true), "aé\u{fffd}b");
    // The one difference to the library, noted at `Tokenizer::decode`.
    assert_eq!(library.decode(&ids, true).unwrap(), "a\u{fffd}\u{fffd}\u{fffd}b");
}

#[test]
fn texts_stream() {
    for (tokenizer, _) in [byte_level(), decoder("llama"), decoder("gemma")] {
        for text in HARD_TEXTS {
            check(tokenizer, &tokenizer.encode(text).unwrap(), true);
        }
    }
}

#[test]
fn texts_stream_from_real_vocabularies() {
    for part in ["compat/qwen3-tokenizer/tokenizer.json", "demo-model/tokenizer.json"] {
        let Some((tokenizer, library)) = common::shared_tokenizer(part) else { continue };
        for text in HARD_TEXTS {
            check(&tokenizer, &tokenizer.encode(text).unwrap(), true);
        }
        let size = u32::try_from(tokenizer.vocab_size()).unwrap();
        let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(300));
        let ids = prop::collection::vec(0..size + 3, 0..60);
        let result = runner.run(&(ids, any::<bool>()), |(ids, skip)| {
            check(&tokenizer, &ids, skip);
            prop_assert_eq!(tokenizer.decode(&ids, skip), library.decode(&ids, skip).unwrap());
            Ok(())
        });
        result.unwrap();
    }
}

#[test]
fn a_long_stream_costs_no_more_per_token() {
    // Ten thousand tokens through the window of a decoder that must be asked for whole texts.
    let (tokenizer, _) = decoder("word pieces");
    let a = tokenizer.token_to_id("a").unwrap();
    let text = pieces(tokenizer, &[a; 10_000], true).concat();
    assert_eq!(text.len(), 19_999);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn any_ids_stream_at_byte_level(ids in prop::collection::vec(0..270_u32, 0..50), skip in any::<bool>()) {
        let (tokenizer, library) = byte_level();
        check(tokenizer, &ids, skip);
        prop_assert_eq!(tokenizer.decode(&ids, skip), library.decode(&ids, skip).unwrap());
    }

    // Bytes that often make characters, or almost.
    #[test]
    fn almost_characters_stream(
        ids in prop::collection::vec(prop::sample::select(
            vec![0x41, 0x80, 0x98, 0x9f, 0xa9, 0xbf, 0xc3, 0xe2, 0xed, 0xef, 0xf0, 0xf4, 0xf8, 258, 261, 262, 263, 264, 265]), 0..30),
        skip in any::<bool>(),
    ) {
        let (tokenizer, library) = byte_level();
        check(tokenizer, &ids, skip);
        prop_assert_eq!(tokenizer.decode(&ids, skip), library.decode(&ids, skip).unwrap());
    }

    #[test]
    fn any_ids_stream_in_pieces(ids in prop::collection::vec(0..275_u32, 0..40), skip in any::<bool>()) {
        for name in ["llama", "gemma", "metaspace", "metaspace, never"] {
            let (tokenizer, library) = decoder(name);
            check(tokenizer, &ids, skip);
            let expected = library.decode(&ids, skip).unwrap();
            if !expected.contains('\u{fffd}') {
                prop_assert_eq!(tokenizer.decode(&ids, skip), expected, "{}", name);
            }
        }
    }

    // Few byte tokens, so that most sequences are sound and the library's text is the measure.
    #[test]
    fn sound_ids_stream_as_the_library_decodes(
        ids in prop::collection::vec(prop_oneof![259..274_u32, Just(3 + 0x20), Just(3 + 0x0a), 0..3_u32], 0..30),
        skip in any::<bool>(),
    ) {
        for (name, (tokenizer, library)) in all_decoders() {
            let expected = library.decode(&ids, skip).unwrap();
            prop_assert_eq!(tokenizer.decode(&ids, skip), expected.clone(), "{}", name);
            prop_assert_eq!(pieces(tokenizer, &ids, skip).concat(), expected, "{}", name);
        }
    }

    #[test]
    fn any_text_streams(text in "\\PC{0,30}") {
        for (tokenizer, _) in [byte_level(), decoder("llama")] {
            check(tokenizer, &tokenizer.encode(&text).unwrap(), true);
        }
    }
}
