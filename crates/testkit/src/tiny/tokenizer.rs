//! A byte-level tokenizer of 256 bytes and three special tokens: the token of a byte is the byte.

use serde_json::{Map, Value, json};

/// `<|endoftext|>`.
pub const END_OF_TEXT: u32 = 256;
/// `<|im_start|>`.
pub const IM_START: u32 = 257;
/// `<|im_end|>`, which ends a turn.
pub const IM_END: u32 = 258;
/// Tokens in all. A model's vocabulary may be larger: its last ids then have no text.
pub const SIZE: usize = 259;

const SPECIAL: [(u32, &str); 3] =
    [(END_OF_TEXT, "<|endoftext|>"), (IM_START, "<|im_start|>"), (IM_END, "<|im_end|>")];

/// ChatML.
pub const CHAT_TEMPLATE: &str = "\
{%- for message in messages %}
    {{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
";

/// The character that stands for a byte in a byte-level vocabulary (as GPT-2's): printable Latin-1 for
/// itself, the rest from U+0100 on in order.
fn stand_in(byte: u8) -> char {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if printable(byte) {
        return char::from(byte);
    }
    let rank = (0..byte).filter(|&b| !printable(b)).count() as u32;
    char::from_u32(0x100 + rank).expect("at most 68 past U+0100")
}

fn added(id: Option<u32>, content: &str) -> Value {
    let mut token = json!({
        "content": content,
        "single_word": false,
        "lstrip": false,
        "rstrip": false,
        "normalized": false,
        "special": true,
    });
    if let Some(id) = id {
        token["id"] = json!(id);
    }
    token
}

/// `tokenizer.json`.
#[must_use]
pub fn tokenizer() -> Value {
    let vocab: Map<String, Value> = (0..=255u8).map(|b| (stand_in(b).to_string(), json!(b))).collect();
    let byte_level = json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false,
    });
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": SPECIAL.map(|(id, content)| added(Some(id), content)),
        "normalizer": null,
        "pre_tokenizer": byte_level,
        "post_processor": null,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": null,
            "unk_token": null,
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            "fuse_unk": false,
            "byte_fallback": false,
            "ignore_merges": false,
            "vocab": vocab,
            "merges": [],
        },
    })
}

/// `tokenizer_config.json`.
#[must_use]
pub fn config() -> Value {
    let decoder: Map<String, Value> =
        SPECIAL.iter().map(|(id, content)| (id.to_string(), added(None, content))).collect();
    json!({
        "add_prefix_space": false,
        "added_tokens_decoder": decoder,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "bos_token": null,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": null,
        "clean_up_tokenization_spaces": false,
        "model_max_length": 1024,
        "tokenizer_class": "PreTrainedTokenizerFast",
    })
}

/// The tokens of `text`, special ones not looked for: its bytes.
#[must_use]
pub fn encode(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_a_character_of_its_own() {
        let all: std::collections::BTreeSet<char> = (0..=255).map(stand_in).collect();
        assert_eq!(all.len(), 256);
        assert_eq!((stand_in(b' '), stand_in(b'\n'), stand_in(b'a')), ('Ġ', 'Ċ', 'a'));
        assert_eq!(stand_in(0xad), 'Ń');
    }
}
