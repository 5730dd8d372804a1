//! Tokenizers: ids, texts and what a `tokenizer.json` may ask for.

#![allow(clippy::unwrap_used, clippy::print_stderr)]

mod common;

use std::sync::LazyLock;

use common::HARD_TEXTS;
use proptest::prelude::*;
use smoe_text::{TextError, Tokenizer};

#[test]
fn a_decoder_that_does_not_read_is_an_error() {
    // The library panics on these.
    for json in [&br#"{"decoder":{"type":"\ud800"}}"#[..], br#"{"decoder":{"type":"Byte"#] {
        assert!(matches!(Tokenizer::from_bytes(json), Err(TextError::Tokenizer { .. })));
    }
}

#[test]
fn tokens_of_a_small_tokenizer() {
    let (tokenizer, _) = common::both(&common::byte_level());
    assert_eq!(tokenizer.vocab_size(), 267);
    let end = tokenizer.token_to_id("<|end|>").unwrap();
    let tool = tokenizer.token_to_id("<tool>").unwrap();
    assert_eq!(
        tokenizer.encode("hello<|end|>he<tool>").unwrap(),
        [
            tokenizer.token_to_id("hell").unwrap(),
            u32::from(b'o'),
            end,
            tokenizer.token_to_id("he").unwrap(),
            tool,
        ]
    );
    assert!(tokenizer.is_special(end) && !tokenizer.is_special(tool) && !tokenizer.is_special(0));
    assert!(!tokenizer.is_special(9999));
    assert_eq!(tokenizer.id_to_token(end).as_deref(), Some("<|end|>"));
    assert_eq!(tokenizer.id_to_token(9999), None);
    assert_eq!(tokenizer.decode(&[u32::from(b'a'), end, tool, 9999], true), "a<tool>");
    assert_eq!(tokenizer.decode(&[u32::from(b'a'), end, tool, 9999], false), "a<|end|><tool>");
}

#[test]
fn only_the_plain_way_adds_special_tokens() {
    let (tokenizer, _) = common::both(&common::byte_level());
    let end = tokenizer.token_to_id("<|end|>").unwrap();
    assert_eq!(tokenizer.encode("x").unwrap(), [u32::from(b'x')]);
    assert_eq!(tokenizer.encode_with_special("x").unwrap(), [end, u32::from(b'x')]);
}

#[test]
fn a_prompt_is_neither_cut_nor_padded() {
    // The file asks for 8 tokens at most and for 64 at least.
    let (tokenizer, _) = common::both(&common::byte_level());
    assert_eq!(tokenizer.encode("x").unwrap().len(), 1);
    assert_eq!(tokenizer.encode(&"x".repeat(100)).unwrap().len(), 100);
}

#[test]
fn a_file_that_is_no_tokenizer_is_an_error() {
    for bytes in [&b""[..], b"{}", b"{\"model\": 3}", b"\xff"] {
        assert!(matches!(Tokenizer::from_bytes(bytes), Err(TextError::Tokenizer { .. })));
    }
}

#[test]
fn it_can_be_shared_between_threads() {
    fn shared<T: Send + Sync + Clone>(_: &T) {}
    let (tokenizer, _) = common::both(&common::byte_level());
    shared(&tokenizer);
    shared(&smoe_text::Detokeniser::new(&tokenizer, true));
}

fn round_trip(tokenizer: &Tokenizer, text: &str) {
    let ids = tokenizer.encode(text).unwrap();
    assert_eq!(tokenizer.decode(&ids, false), text);
    assert!(ids.iter().all(|&id| (id as usize) < tokenizer.vocab_size()));
}

#[test]
fn hard_texts_come_back() {
    let (bytes, _) = common::both(&common::byte_level());
    HARD_TEXTS.iter().for_each(|text| round_trip(&bytes, text));
    let (pieces, _) = common::both(&common::pieces(&common::llama_decoder()));
    HARD_TEXTS.iter().for_each(|text| round_trip(&pieces, text));
}

#[test]
fn hard_texts_come_back_from_real_vocabularies() {
    for part in ["compat/qwen3-tokenizer/tokenizer.json", "demo-model/tokenizer.json"] {
        let Some((tokenizer, _)) = common::shared_tokenizer(part) else { continue };
        HARD_TEXTS.iter().for_each(|text| round_trip(&tokenizer, text));
    }
}

#[test]
fn qwen3s_ids_are_the_published_ones() {
    let Some((tokenizer, _)) = common::shared_tokenizer("compat/qwen3-tokenizer/tokenizer.json") else {
        return;
    };
    assert_eq!(tokenizer.vocab_size(), 151_669);
    assert_eq!(tokenizer.encode("Hello world").unwrap(), [9707, 1879]);
    assert_eq!(
        tokenizer.encode("<|im_start|>user\nHi<|im_end|>\n").unwrap(),
        [151_644, 872, 198, 13048, 151_645, 198]
    );
    assert!(tokenizer.is_special(151_645));
    // `<think>` is shown: it is added, but not special.
    let think = tokenizer.token_to_id("<think>").unwrap();
    assert!(!tokenizer.is_special(think));
    assert_eq!(tokenizer.decode(&[151_644, think], true), "<think>");
}

proptest! {
    #[test]
    fn any_text_comes_back(text in "\\PC{0,40}|[\\x00-\\x7f]{0,40}") {
        static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(|| common::both(&common::byte_level()).0);
        let tokenizer = &TOKENIZER;
        let ids = tokenizer.encode(&text).unwrap();
        prop_assert_eq!(tokenizer.decode(&ids, false), text);
    }
}
