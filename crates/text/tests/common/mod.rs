//! What the tests share: where files of published models are found, and small tokenizers made on the spot.

#![allow(dead_code, clippy::unwrap_used, clippy::print_stderr)]

use std::path::PathBuf;

use serde_json::{Map, Value as Json, json};
use smoe_text::Tokenizer;

/// A file or folder of the shared material, or `None` (said aloud) where it is absent. `SMOE_SHARED` names another
/// place for it.
pub fn shared(part: &str) -> Option<PathBuf> {
    let root = std::env::var_os("SMOE_SHARED").map_or_else(
        || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared")),
        PathBuf::from,
    );
    let path = root.join(part);
    if !path.exists() {
        eprintln!("SKIPPED: {} is absent", path.display());
        return None;
    }
    Some(path)
}

/// A tokenizer of the shared material.
pub fn shared_tokenizer(part: &str) -> Option<(Tokenizer, tokenizers::Tokenizer)> {
    let bytes = std::fs::read(shared(part)?).unwrap();
    Some((Tokenizer::from_bytes(&bytes).unwrap(), tokenizers::Tokenizer::from_bytes(&bytes).unwrap()))
}

/// A tokenizer of ours and the library's view of the same file.
pub fn both(tokenizer: &Json) -> (Tokenizer, tokenizers::Tokenizer) {
    let bytes = serde_json::to_vec(tokenizer).unwrap();
    (Tokenizer::from_bytes(&bytes).unwrap(), tokenizers::Tokenizer::from_bytes(&bytes).unwrap())
}

fn added(id: usize, content: &str, special: bool) -> Json {
    json!({"id": id, "content": content, "special": special, "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false})
}

/// Byte-level BPE: all bytes, some merges (two of them parts of characters), a special token, an added one that is
/// text, and one that is not in the alphabet of bytes.
pub fn byte_level() -> Json {
    let alphabet: Vec<char> = {
        let printable = |byte: u32| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
        let mut others = 0x100..;
        (0..256_u32)
            .map(|byte| if printable(byte) { byte } else { others.next().unwrap() })
            .map(|code| char::from_u32(code).unwrap())
            .collect()
    };
    let byte = |byte: u8| alphabet[usize::from(byte)].to_string();
    let mut vocab: Vec<String> = (0..=255).map(byte).collect();
    let mut merges = Vec::new();
    for (left, right) in [
        ("h".to_owned(), "e".to_owned()),
        ("l".to_owned(), "l".to_owned()),
        ("he".to_owned(), "ll".to_owned()),
        (byte(b' '), "t".to_owned()),
        (byte(b'\n'), byte(b'\n')),
        // The beginning of every emoji, and the last two bytes of some.
        (byte(0xf0), byte(0x9f)),
        (byte(0x98), byte(0x80)),
        // The end of one character and the beginning of another.
        (byte(0xa9), byte(0xc3)),
    ] {
        vocab.push(left.clone() + &right);
        merges.push(json!([left, right]));
    }
    let next = vocab.len();
    let vocab: Map<String, Json> =
        vocab.into_iter().enumerate().map(|(id, token)| (token, json!(id))).collect();
    json!({
        "version": "1.0", "truncation": {"max_length": 8, "stride": 0, "strategy": "LongestFirst", "direction": "Right"},
        "padding": {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0,
            "pad_type_id": 0, "pad_token": "!"},
        "added_tokens": [added(next, "<|end|>", true), added(next + 1, "<tool>", false), added(next + 2, "<|a b|>", true)],
        "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<|end|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<|end|>": {"id": "<|end|>", "ids": [next], "tokens": ["<|end|>"]}}},
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab, "merges": merges},
    })
}

/// SentencePiece's BPE with byte fallback, and the decoder given (`null` is none).
pub fn pieces(decoder: &Json) -> Json {
    let mut vocab: Vec<String> = ["<unk>", "<s>", "</s>"].map(String::from).into();
    vocab.extend((0..=255_u8).map(|byte| format!("<0x{byte:02X}>")));
    vocab.extend(
        ["▁", "▁▁", "a", "b", "▁a", "▁b", "ab", "é", "漢", ".", "▁漢", "##a", "a</w>", "🎨"]
            .map(String::from),
    );
    let vocab: Map<String, Json> =
        vocab.into_iter().enumerate().map(|(id, token)| (token, json!(id))).collect();
    json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [added(0, "<unk>", true), added(1, "<s>", true), added(2, "</s>", true)],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
        "pre_tokenizer": null, "post_processor": null, "decoder": decoder,
        "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
            "vocab": vocab, "merges": [["▁", "a"], ["▁", "b"], ["a", "b"], ["▁", "▁"], ["▁", "漢"]]},
    })
}

/// The decoder of Llama 2 and Mixtral.
pub fn llama_decoder() -> Json {
    json!({"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"}, {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0}]})
}

/// Decoders of the common kinds and of others, by name.
pub fn decoders() -> Vec<(&'static str, Json)> {
    vec![
        ("llama", llama_decoder()),
        (
            "gemma",
            json!({"type": "Sequence", "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"}, {"type": "Fuse"}]}),
        ),
        (
            "metaspace",
            json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true}),
        ),
        (
            "metaspace, never",
            json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": true}),
        ),
        ("none", Json::Null),
        ("word pieces", json!({"type": "WordPiece", "prefix": "##", "cleanup": true})),
        ("end of word", json!({"type": "BPEDecoder", "suffix": "</w>"})),
    ]
}

/// Texts that are hard to take apart.
pub const HARD_TEXTS: &[&str] = &[
    "",
    " ",
    "Hello, world!",
    "  two leading and two trailing  ",
    "日本語と漢字、한국어, العربية, हिन्दी",
    "🎨👨‍👩‍👧‍👦🏳️‍🌈 flags 🇮🇹 and skin 👍🏽",
    "line\r\nline\n\n\n\ttab\u{a0}nbsp",
    "fn main() {\n    println!(\"{}\", 1_000.5e-3);\n}\n",
    "naïve café — “quotes” … ﬁ",
    "a\u{0}b\u{7f}\u{feff}",
    "\u{fffd} a real replacement character \u{fffd}\u{fffd}",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐌰𐌱𐌲 𓀀",
    "3.14159 2,000,000 0xFFEE",
];
