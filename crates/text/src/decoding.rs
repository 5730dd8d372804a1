//! How one token becomes bytes, and bytes become text as they come.
//!
//! The decoders that language models use are almost all of two kinds, and both can be followed token by token with
//! a state of a few bytes, exactly:
//!
//! - *byte level* (GPT-2, Llama 3, Qwen, DeepSeek, GLM, gpt-oss): each character of a token stands for a byte;
//! - *pieces* (SentencePiece: Llama 2, Mixtral, Gemma): a token is text with `▁` for a blank, or one byte `<0xNN>`;
//!   blanks at the very start of the text may be dropped.
//!
//! Any other decoder ([`Decoding::Whole`]) is asked for windows of tokens (see [`crate::detokeniser`]).

use serde_json::Value as Json;

/// The kind of a tokenizer's decoder.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Decoding {
    /// Characters stand for bytes.
    ByteLevel,
    /// Tokens are pieces of text.
    Pieces(Pieces),
    /// None of those.
    Whole,
}

/// A SentencePiece-like decoder: steps on each token, then on the text.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Pieces {
    steps: Vec<Step>,
    /// Whether `<0xNN>` is a byte.
    byte_fallback: bool,
    /// A character to drop at the start of the text, and how many of it at most.
    strip: Option<(char, usize)>,
}

/// What is done to each token's text.
#[derive(Clone, Debug, PartialEq)]
enum Step {
    Replace {
        from: String,
        to: String,
    },
    /// The mark becomes a blank; in the first token it is dropped, if so asked.
    Metaspace {
        mark: char,
        drop_first: bool,
    },
}

impl Decoding {
    /// Recognises a decoder by how it writes itself in `tokenizer.json`.
    pub(crate) fn of(decoder: Option<&tokenizers::DecoderWrapper>) -> Self {
        decoder
            .and_then(|decoder| serde_json::to_value(decoder).ok())
            .and_then(|decoder| Decoding::from_json(&decoder))
            .unwrap_or(Decoding::Whole)
    }

    fn from_json(decoder: &Json) -> Option<Self> {
        let single = std::slice::from_ref(decoder);
        let steps = match decoder["type"].as_str()? {
            "Sequence" => decoder["decoders"].as_array()?.as_slice(),
            _ => single,
        };
        if let [only] = steps
            && only["type"] == "ByteLevel"
        {
            return Some(Decoding::ByteLevel);
        }
        let mut pieces = Pieces::default();
        let mut fused = false;
        for step in steps {
            let per_token = !pieces.byte_fallback && !fused;
            match step["type"].as_str()? {
                "Replace" if per_token => pieces.steps.push(Step::Replace {
                    from: step["pattern"]["String"].as_str().filter(|from| !from.is_empty())?.to_owned(),
                    to: step["content"].as_str()?.to_owned(),
                }),
                "Metaspace" if per_token => pieces.steps.push(Step::Metaspace {
                    mark: step["replacement"].as_str()?.chars().next()?,
                    drop_first: step["prepend_scheme"] != "never",
                }),
                "ByteFallback" if per_token => pieces.byte_fallback = true,
                "Fuse" => fused = true,
                // Before `Fuse` it would strip every token; at the end of the text, it would need what is to come.
                "Strip" if fused && pieces.strip.is_none() && step["stop"] == 0 => {
                    let content = step["content"].as_str()?.chars().next()?;
                    pieces.strip = Some((content, usize::try_from(step["start"].as_u64()?).ok()?));
                }
                _ => return None,
            }
        }
        Some(Decoding::Pieces(pieces))
    }

    /// The bytes of a token that is not the first of its text; `None` where they depend on its neighbours.
    pub(crate) fn bytes(&self, token: &str) -> Option<Vec<u8>> {
        match self {
            Decoding::ByteLevel => Some(byte_level(token)),
            Decoding::Pieces(pieces) => Some(pieces.bytes(token, false)),
            Decoding::Whole => None,
        }
    }
}

/// The state of decoding a stream of tokens, whose text is appended as soon as it is certain.
#[derive(Clone, Debug)]
pub(crate) struct Decoder {
    /// The beginning of a character, at most three bytes.
    pending: Vec<u8>,
    /// Whether no token has come yet.
    first: bool,
    /// How many characters may still be stripped at the start.
    strip: usize,
}

impl Decoder {
    pub(crate) fn new(decoding: &Decoding) -> Self {
        let strip = match decoding {
            Decoding::Pieces(Pieces { strip: Some((_, most)), .. }) => *most,
            _ => 0,
        };
        Decoder { pending: Vec::new(), first: true, strip }
    }

    /// Appends what a token's coming makes certain.
    pub(crate) fn push(&mut self, decoding: &Decoding, token: &str, out: &mut String) {
        match decoding {
            Decoding::ByteLevel => self.push_bytes(&byte_level(token), out),
            Decoding::Pieces(pieces) => {
                let first = std::mem::take(&mut self.first);
                let start = out.len();
                self.push_bytes(&pieces.bytes(token, first), out);
                if let Some((content, _)) = pieces.strip {
                    self.strip_from(start, content, out);
                }
            }
            Decoding::Whole => out.push_str(token),
        }
    }

    /// Appends what is left: the beginning of a character that never came to its end.
    pub(crate) fn finish(&mut self, out: &mut String) {
        if !std::mem::take(&mut self.pending).is_empty() {
            out.push(char::REPLACEMENT_CHARACTER);
        }
    }

    /// Appends the characters that are complete, as `String::from_utf8_lossy` of all bytes would write them.
    fn push_bytes(&mut self, bytes: &[u8], out: &mut String) {
        self.pending.extend_from_slice(bytes);
        let mut rest = self.pending.as_slice();
        loop {
            match std::str::from_utf8(rest) {
                Ok(text) => {
                    out.push_str(text);
                    rest = &[];
                    break;
                }
                Err(error) => {
                    let (valid, broken) = rest.split_at(error.valid_up_to());
                    out.push_str(std::str::from_utf8(valid).unwrap_or_default());
                    match error.error_len() {
                        Some(length) => {
                            out.push(char::REPLACEMENT_CHARACTER);
                            rest = &broken[length..];
                        }
                        None => {
                            rest = broken;
                            break;
                        }
                    }
                }
            }
        }
        let done = self.pending.len() - rest.len();
        self.pending.drain(..done);
    }

    /// Drops characters at the start of the text, of which `out[start..]` is the newest part.
    fn strip_from(&mut self, start: usize, content: char, out: &mut String) {
        while self.strip > 0 && out.len() > start {
            if !out[start..].starts_with(content) {
                self.strip = 0;
                return;
            }
            out.remove(start);
            self.strip -= 1;
        }
    }
}

impl Pieces {
    fn apply(&self, token: &str, first: bool) -> String {
        self.steps.iter().fold(token.to_owned(), |text, step| match step {
            Step::Replace { from, to } => text.replace(from, to),
            Step::Metaspace { mark, drop_first: true } if first => text.replace(*mark, ""),
            Step::Metaspace { mark, .. } => text.replace(*mark, " "),
        })
    }

    fn bytes(&self, token: &str, first: bool) -> Vec<u8> {
        let text = self.apply(token, first);
        match byte_token(&text).filter(|_| self.byte_fallback) {
            Some(byte) => vec![byte],
            None => text.into_bytes(),
        }
    }
}

/// The bytes of a byte-level token. An added token that is not in that alphabet is written as it is meant.
fn byte_level(token: &str) -> Vec<u8> {
    token.chars().map(byte_of).collect::<Option<Vec<u8>>>().unwrap_or_else(|| token.as_bytes().to_vec())
}

/// The byte that a token of byte fallback stands for.
fn byte_token(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>').filter(|digits| digits.len() == 2)?;
    u8::from_str_radix(digits, 16).ok()
}

/// The byte that a character stands for in byte-level BPE: printable characters of Latin-1 stand for themselves,
/// the other 68 bytes, in order, are the characters from U+0100 on.
fn byte_of(c: char) -> Option<u8> {
    const OTHERS: [u8; 68] = {
        let mut others = [0; 68];
        let (mut byte, mut at) = (0_u8, 0);
        while at < others.len() {
            if !is_printable(byte) {
                others[at] = byte;
                at += 1;
            }
            byte = byte.wrapping_add(1);
        }
        others
    };
    match u8::try_from(c) {
        Ok(byte) => is_printable(byte).then_some(byte),
        Err(_) => OTHERS.get((u32::from(c) - 0x100) as usize).copied(),
    }
}

const fn is_printable(byte: u8) -> bool {
    matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn every_byte_has_one_character() {
        let mut bytes: Vec<u8> = (0..=0x143).filter_map(char::from_u32).filter_map(byte_of).collect();
        bytes.sort_unstable();
        assert_eq!(bytes, (0..=255).collect::<Vec<u8>>());
        assert_eq!((byte_of('Ġ'), byte_of('Ċ'), byte_of('A')), (Some(b' '), Some(b'\n'), Some(b'A')));
        assert_eq!((byte_of(' '), byte_of('\u{144}'), byte_of('漢')), (None, None, None));
    }

    #[test]
    fn decoders_are_recognised() {
        let byte_level = json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true});
        assert_eq!(Decoding::from_json(&byte_level), Some(Decoding::ByteLevel));
        let nested = json!({"type": "Sequence", "decoders": [byte_level]});
        assert_eq!(Decoding::from_json(&nested), Some(Decoding::ByteLevel));
        let replace = json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "});
        let strip = json!({"type": "Strip", "content": " ", "start": 1, "stop": 0});
        let llama = json!({"type": "Sequence", "decoders":
            [replace, {"type": "ByteFallback"}, {"type": "Fuse"}, strip]});
        let expected = Pieces {
            steps: vec![Step::Replace { from: "▁".into(), to: " ".into() }],
            byte_fallback: true,
            strip: Some((' ', 1)),
        };
        assert_eq!(Decoding::from_json(&llama), Some(Decoding::Pieces(expected)));
        for other in [
            json!({"type": "WordPiece", "prefix": "##", "cleanup": true}),
            json!({"type": "Sequence", "decoders": [strip]}),
            json!({"type": "Sequence", "decoders": [{"type": "Fuse"}, replace]}),
            json!({"type": "Sequence", "decoders": [byte_level, strip]}),
            json!({"type": "Replace", "pattern": {"Regex": "x"}, "content": " "}),
        ] {
            assert_eq!(Decoding::from_json(&other), None, "{other}");
        }
    }
}
