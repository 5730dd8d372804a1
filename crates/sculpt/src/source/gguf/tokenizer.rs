//! The side files of a vault out of a GGUF file's metadata: `tokenizer.json` for the `tokenizers` library,
//! `tokenizer_config.json`, `generation_config.json` and the chat template.
//!
//! A GGUF file names its pre-tokenizer and leaves the rule to the reader. The rules here are those of the
//! checkpoints' own `tokenizer.json`; a name that is not among them is refused, for a wrong rule gives other
//! tokens without any sign of it.

use serde_json::{Map, Value as Json, json};

use super::{Metadata, Value, shown};
use crate::error::SculptError;

/// Kinds of tokens.
const UNKNOWN: u64 = 2;
const CONTROL: u64 = 3;
const USER_DEFINED: u64 = 4;
const UNUSED: u64 = 5;

/// Longer tokens are not put together of pairs: each place where one can be cut is tried. (Those of published
/// vocabularies have some hundred bytes at most.)
const MAX_MERGED: usize = 1 << 10;

/// How a text is cut before pairs are merged.
struct Pre {
    names: &'static [&'static str],
    normalizer: Option<&'static str>,
    cuts: &'static [Cut],
    /// Byte-level's own rule, that of GPT-2, after the cuts.
    gpt2: bool,
    /// A piece that is a token is taken as it is.
    ignore_merges: bool,
    /// Texts begin with the begin token, where the file does not say.
    begin: bool,
}

enum Cut {
    Regex(&'static str),
    Digits,
}

const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// With marks among the letters.
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT_4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const DEEPSEEK_V3: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;
/// Letters of alphabets with capitals, as DeepSeek lists them.
const DEEPSEEK_LLM_WORDS: &str = "\
    \\s?[A-Za-z\u{b5}\u{c0}-\u{d6}\u{d8}-\u{f6}\u{f8}-\u{1ba}\u{1bc}-\u{1bf}\u{1c4}-\u{293}\u{295}-\
    \u{2af}\u{370}-\u{373}\u{376}\u{377}\u{37b}-\u{37d}\u{37f}\u{386}\u{388}-\u{38a}\u{38c}\u{38e}-\
    \u{3a1}\u{3a3}-\u{3f5}\u{3f7}-\u{481}\u{48a}-\u{52f}\u{531}-\u{556}\u{10a0}-\u{10c5}\u{13a0}-\
    \u{13f5}\u{13f8}-\u{13fd}\u{1c90}-\u{1cba}\u{1cbd}-\u{1cbf}\u{1d00}-\u{1d2b}\u{1d6b}-\u{1d77}\
    \u{1d79}-\u{1d9a}\u{1e00}-\u{1f15}\u{1f18}-\u{1f1d}\u{1f20}-\u{1f45}\u{1f48}-\u{1f4d}\u{1f50}-\
    \u{1f57}\u{1f59}\u{1f5b}\u{1f5d}\u{1f5f}-\u{1f7d}\u{1f80}-\u{1fb4}\u{1fb6}-\u{1fbc}\u{1fbe}\u{1fc2}-\
    \u{1fc4}\u{1fc6}-\u{1fcc}\u{1fd0}-\u{1fd3}\u{1fd6}-\u{1fdb}\u{1fe0}-\u{1fec}\u{1ff2}-\u{1ff4}\
    \u{1ff6}-\u{1ffc}\u{2102}\u{2107}\u{210a}-\u{2113}\u{2115}\u{2119}-\u{211d}\u{2124}\u{2126}\u{2128}\
    \u{212a}-\u{212d}\u{212f}-\u{2134}\u{2139}\u{213c}-\u{213f}\u{2145}-\u{2149}\u{214e}\u{2183}\u{2184}\
    \u{2c00}-\u{2c7b}\u{2c7e}-\u{2ce4}\u{2ceb}-\u{2cee}\u{2cf2}\u{2cf3}\u{a640}-\u{a66d}\u{a680}-\
    \u{a69b}\u{a722}-\u{a76f}\u{a771}-\u{a787}\u{a78b}-\u{a78e}\u{ab70}-\u{abbf}\u{fb00}-\u{fb06}\
    \u{fb13}-\u{fb17}\u{ff21}-\u{ff3a}\u{ff41}-\u{ff5a}\u{10400}-\u{1044f}\u{104b0}-\u{104d3}\u{104d8}-\
    \u{104fb}\u{10c80}-\u{10cb2}\u{10cc0}-\u{10cf2}\u{118a0}-\u{118df}\u{1e900}-\u{1e943}]+";

const PRES: &[Pre] = &[
    Pre {
        names: &["qwen2", "deepseek-r1-qwen"],
        normalizer: Some("NFC"),
        cuts: &[Cut::Regex(QWEN2)],
        gpt2: false,
        ignore_merges: false,
        begin: false,
    },
    Pre {
        names: &["qwen35"],
        normalizer: Some("NFC"),
        cuts: &[Cut::Regex(QWEN35)],
        gpt2: false,
        ignore_merges: false,
        begin: false,
    },
    Pre {
        names: &["llama-bpe", "llama3", "llama-v3"],
        normalizer: None,
        cuts: &[Cut::Regex(LLAMA3)],
        gpt2: false,
        ignore_merges: true,
        begin: true,
    },
    Pre {
        names: &["gpt-4o"],
        normalizer: None,
        cuts: &[Cut::Regex(GPT_4O)],
        gpt2: false,
        ignore_merges: true,
        begin: false,
    },
    // By llama.cpp's rules, not by the checkpoint's own file.
    Pre {
        names: &["minimax-m2"],
        normalizer: None,
        cuts: &[Cut::Regex(GPT_4O)],
        gpt2: false,
        ignore_merges: false,
        begin: false,
    },
    Pre {
        names: &["glm4"],
        normalizer: None,
        cuts: &[Cut::Regex(LLAMA3)],
        gpt2: false,
        ignore_merges: true,
        begin: false,
    },
    Pre {
        names: &["gpt-2", "gpt2"],
        normalizer: None,
        cuts: &[],
        gpt2: true,
        ignore_merges: false,
        begin: false,
    },
    Pre {
        names: &["olmo"],
        normalizer: Some("NFC"),
        cuts: &[],
        gpt2: true,
        ignore_merges: false,
        begin: false,
    },
    Pre {
        names: &["smollm", "starcoder", "refact"],
        normalizer: None,
        cuts: &[Cut::Digits],
        gpt2: true,
        ignore_merges: false,
        begin: false,
    },
    Pre {
        names: &["deepseek-v3"],
        normalizer: None,
        cuts: &[Cut::Regex(r"\p{N}{1,3}"), Cut::Regex("[一-龥\u{3040}-ゟ゠-ヿ]+"), Cut::Regex(DEEPSEEK_V3)],
        gpt2: false,
        ignore_merges: false,
        begin: false,
    },
    Pre {
        names: &["deepseek-llm"],
        normalizer: None,
        cuts: &[
            Cut::Regex("[\r\n]"),
            Cut::Regex(DEEPSEEK_LLM_WORDS),
            Cut::Regex(r"\s?[!-/:-~！-／：-～‘-‟　-。]+"),
            Cut::Regex(r"\s+$"),
            Cut::Regex("[一-龥ࠀ-一가-\u{d7ff}]+"),
            Cut::Digits,
        ],
        gpt2: false,
        ignore_merges: false,
        begin: false,
    },
    Pre {
        names: &["deepseek-coder"],
        normalizer: None,
        cuts: &[
            Cut::Regex("[\r\n]"),
            Cut::Regex(r"\s?\p{L}+"),
            Cut::Regex(r"\s?\p{P}+"),
            Cut::Regex("[一-龥ࠀ-一가-\u{d7ff}]+"),
            Cut::Digits,
        ],
        gpt2: false,
        ignore_merges: false,
        begin: false,
    },
];

/// What a GGUF file says of its tokens.
struct Vocabulary<'a> {
    metadata: &'a Metadata,
    tokens: &'a [String],
    kinds: &'a [f64],
}

/// `config.json` and, unless others are given, the files of the tokenizer.
pub(super) fn side_files(
    metadata: &Metadata,
    config: &Json,
    with_tokenizer: bool,
) -> Result<Vec<(&'static str, Vec<u8>)>, SculptError> {
    let mut files = Vec::new();
    let mut add = |name: &'static str, value: &Json| {
        let text = serde_json::to_vec_pretty(value).expect("values of JSON are written");
        files.push((name, text));
    };
    let id = |key: &str| metadata.unsigned(&format!("tokenizer.ggml.{key}"));
    let (begin, end) = (id("bos_token_id")?, id("eos_token_id")?);
    let mut config = config.clone();
    let mut generation = Map::new();
    let mut ends: Vec<u64> = Vec::new();
    for id in [end, id("eot_token_id")?].into_iter().flatten() {
        if !ends.contains(&id) {
            ends.push(id);
        }
    }
    if let Some(begin) = begin {
        config["bos_token_id"] = json!(begin);
        generation.insert("bos_token_id".to_owned(), json!(begin));
    }
    if !ends.is_empty() {
        config["eos_token_id"] = json!(ends);
        generation.insert("eos_token_id".to_owned(), json!(ends));
    }
    add("config.json", &config);
    if !with_tokenizer {
        return Ok(files);
    }
    add("generation_config.json", &Json::Object(generation));
    let template = metadata.text("tokenizer.chat_template")?;
    if let Some(vocabulary) = Vocabulary::find(metadata)? {
        let mut about = Map::new();
        for (key, id) in [("bos_token", begin), ("eos_token", end)] {
            if let Some(id) = id {
                about.insert(key.to_owned(), json!(vocabulary.token(key, id)?));
            }
        }
        add("tokenizer_config.json", &Json::Object(about));
        add("tokenizer.json", &vocabulary.tokenizer(begin)?);
    }
    if let Some(template) = template {
        files.push(("chat_template.jinja", template.as_bytes().to_vec()));
    }
    Ok(files)
}

impl<'a> Vocabulary<'a> {
    fn find(metadata: &'a Metadata) -> Result<Option<Self>, SculptError> {
        let key = "tokenizer.ggml.tokens";
        let tokens = match metadata.get(key) {
            None => return Ok(None),
            Some(Value::Texts(tokens)) => tokens,
            Some(_) => return Err(metadata.bad(key, "a list of texts")),
        };
        let key = "tokenizer.ggml.token_type";
        let kinds = match metadata.get(key) {
            None => &[][..],
            Some(Value::Numbers(kinds)) if kinds.len() == tokens.len() => kinds,
            Some(_) => return Err(metadata.bad(key, "a number for each token")),
        };
        Ok(Some(Self { metadata, tokens, kinds }))
    }

    fn token(&self, key: &str, id: u64) -> Result<&'a str, SculptError> {
        let token = usize::try_from(id).ok().and_then(|id| self.tokens.get(id));
        let token = token.map(String::as_str);
        token.ok_or_else(|| self.metadata.bad(&format!("tokenizer.ggml.{key}_id"), "the number of a token"))
    }

    fn kind(&self, id: usize) -> u64 {
        self.kinds.get(id).map_or(1, |&kind| kind as u64)
    }

    fn tokenizer(&self, begin: Option<u64>) -> Result<Json, SculptError> {
        let mut vocab = Map::new();
        let mut added = Vec::new();
        for (id, token) in self.tokens.iter().enumerate() {
            let kind = self.kind(id);
            if kind == UNUSED {
                continue;
            }
            if vocab.insert(token.clone(), json!(id)).is_some() {
                let file = self.metadata.file.clone();
                return Err(SculptError::Tokenizer {
                    file,
                    what: format!("the token {:?} stands twice", shown(token)),
                });
            }
            if matches!(kind, CONTROL | USER_DEFINED | UNKNOWN) {
                added.push(json!({
                    "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
                    "normalized": false, "special": kind != USER_DEFINED,
                }));
            }
        }
        let model = self.metadata.text("tokenizer.ggml.model")?;
        let (mut tokenizer, default_begin) = match model {
            Some("gpt2") => self.byte_level(vocab)?,
            Some("llama") => self.sentence_piece(vocab)?,
            _ => return Err(self.metadata.bad("tokenizer.ggml.model", "\"gpt2\" or \"llama\"")),
        };
        tokenizer["version"] = json!("1.0");
        tokenizer["truncation"] = Json::Null;
        tokenizer["padding"] = Json::Null;
        tokenizer["added_tokens"] = Json::Array(added);
        let begins = self.metadata.flag("tokenizer.ggml.add_bos_token")?.unwrap_or(default_begin);
        tokenizer["post_processor"] = match begin.filter(|_| begins) {
            None => Json::Null,
            Some(id) => {
                let token = self.token("bos_token", id)?;
                let special = json!({"SpecialToken": {"id": token, "type_id": 0}});
                let a = json!({"Sequence": {"id": "A", "type_id": 0}});
                let b = json!({"Sequence": {"id": "B", "type_id": 0}});
                json!({
                    "type": "TemplateProcessing",
                    "single": [special, a],
                    "pair": [special, a, b],
                    "special_tokens": {(token): {"id": token, "ids": [id], "tokens": [token]}},
                })
            }
        };
        Ok(tokenizer)
    }

    /// Pairs of bytes, as GPT-2.
    fn byte_level(&self, vocab: Map<String, Json>) -> Result<(Json, bool), SculptError> {
        let name = self.metadata.text("tokenizer.ggml.pre")?;
        let pre = PRES.iter().find(|pre| name.is_some_and(|name| pre.names.contains(&name)));
        let pre = pre.ok_or_else(|| {
            let known: Vec<&str> = PRES.iter().flat_map(|pre| pre.names).copied().collect();
            let (file, name) = (self.metadata.file.clone(), shown(name.unwrap_or("missing")));
            let what = format!("the pre-tokenizer is {name}, this build knows {}", known.join(", "));
            SculptError::Tokenizer { file, what }
        })?;
        let key = "tokenizer.ggml.merges";
        let Some(Value::Texts(merges)) = self.metadata.get(key) else {
            return Err(self.metadata.bad(key, "a list of pairs of tokens"));
        };
        let mut cuts: Vec<Json> = pre
            .cuts
            .iter()
            .map(|cut| match cut {
                Cut::Digits => json!({"type": "Digits", "individual_digits": true}),
                Cut::Regex(regex) => json!({
                    "type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false,
                }),
            })
            .collect();
        cuts.push(json!({
            "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": pre.gpt2,
        }));
        let tokenizer = json!({
            "normalizer": pre.normalizer.map(|kind| json!({"type": kind})),
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": cuts},
            "decoder": {
                "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true,
            },
            "model": {
                "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": "",
                "end_of_word_suffix": "", "fuse_unk": false, "byte_fallback": false,
                "ignore_merges": pre.ignore_merges, "vocab": vocab, "merges": merges,
            },
        });
        Ok((tokenizer, pre.begin))
    }

    /// Pairs of characters with scores, as Llama 2: a pair may be merged if its text is a token, the one with the
    /// highest score first. What no token covers is spelt in bytes.
    fn sentence_piece(&self, vocab: Map<String, Json>) -> Result<(Json, bool), SculptError> {
        let key = "tokenizer.ggml.scores";
        let scores = match self.metadata.get(key) {
            Some(Value::Numbers(scores)) if scores.len() == self.tokens.len() => scores,
            _ => return Err(self.metadata.bad(key, "a number for each token")),
        };
        let rank = |text: &str| vocab.get(text).and_then(Json::as_u64).map(|id| id as usize);
        let mut merges: Vec<(usize, [usize; 2], String)> = Vec::new();
        for (id, token) in self.tokens.iter().enumerate() {
            if !matches!(self.kind(id), 1 | USER_DEFINED) || token.len() > MAX_MERGED {
                continue;
            }
            for (at, _) in token.char_indices().skip(1) {
                let (left, right) = token.split_at(at);
                if let (Some(l), Some(r)) = (rank(left), rank(right)) {
                    merges.push((id, [l, r], format!("{left} {right}")));
                }
            }
        }
        merges.sort_by(|a, b| {
            let (x, y) = (scores[a.0], scores[b.0]);
            y.total_cmp(&x).then_with(|| (a.0, a.1).cmp(&(b.0, b.1)))
        });
        let merges: Vec<String> = merges.into_iter().map(|(_, _, pair)| pair).collect();
        let unknown = (0..self.tokens.len()).find(|&id| self.kind(id) == UNKNOWN).map(|id| &self.tokens[id]);
        let space = self.metadata.flag("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
        let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
        let mut decoders = vec![
            json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "}),
            json!({"type": "ByteFallback"}),
            json!({"type": "Fuse"}),
        ];
        let mut normalizers = vec![replace];
        if space {
            normalizers.insert(0, json!({"type": "Prepend", "prepend": "▁"}));
            decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
        }
        let tokenizer = json!({
            "normalizer": {"type": "Sequence", "normalizers": normalizers},
            "pre_tokenizer": null,
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": {
                "type": "BPE", "dropout": null, "unk_token": unknown, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
                "vocab": vocab, "merges": merges,
            },
        });
        Ok((tokenizer, true))
    }
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use super::*;

    /// llama.cpp's own vocabularies with texts and their tokens, where `SMOE_GGUF_VOCABS` says that they are.
    #[test]
    fn vocabularies_give_the_tokens_of_llama_cpp() {
        use std::io::Write as _;
        let Some(dir) = std::env::var_os("SMOE_GGUF_VOCABS").map(PathBuf::from) else {
            let what = b"SKIPPED: SMOE_GGUF_VOCABS names no directory of llama.cpp's ggml-vocab-*.gguf\n";
            std::io::stderr().write_all(what).expect("stderr");
            return;
        };
        let mut all = Vec::new();
        for name in ["qwen2", "llama-bpe", "gpt-2", "deepseek-llm", "deepseek-coder", "llama-spm"] {
            let path = dir.join(format!("ggml-vocab-{name}.gguf"));
            let (_, metadata, _) = super::super::read(&path, 0, &crate::OnDisk).expect("a GGUF file");
            let begin = metadata.unsigned("tokenizer.ggml.bos_token_id").expect("a number");
            let vocabulary = Vocabulary::find(&metadata).expect("read").expect("there");
            let json = vocabulary.tokenizer(begin).expect("a known pre-tokenizer").to_string();
            let tokenizer = tokenizers::Tokenizer::from_bytes(json).expect("a tokenizer.json");
            let read = |ending: &str| {
                let path = format!("{}.{ending}", path.display());
                std::fs::read_to_string(Path::new(&path)).expect("texts")
            };
            let (texts, wanted) = (read("inp"), read("out"));
            let texts: Vec<&str> = texts.split("\n__ggml_vocab_test__\n").collect();
            for (text, wanted) in texts.iter().zip(wanted.lines()) {
                let ids = tokenizer.encode_fast(*text, false).expect("encoded").get_ids().to_vec();
                let wanted: Vec<u32> =
                    wanted.split_whitespace().map(|id| id.parse().expect("an id")).collect();
                if ids != wanted {
                    all.push(format!("{name}: {text:?}\n  {ids:?}\n  {wanted:?}"));
                }
            }
        }
        assert!(all.is_empty(), "{} differ\n{}", all.len(), all.join("\n"));
    }
}
