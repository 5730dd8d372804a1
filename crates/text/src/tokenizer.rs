//! Ids of a text and text of ids, after a `tokenizer.json` of Hugging Face.

use std::fmt;
use std::sync::Arc;

use crate::decoding::Decoding;
use crate::detokeniser::Detokeniser;
use crate::error::TextError;

/// A tokenizer. Clones are cheap and share it.
#[derive(Clone)]
pub struct Tokenizer {
    inner: Arc<Inner>,
}

struct Inner {
    tokenizer: tokenizers::Tokenizer,
    decoding: Decoding,
}

/// The part of a `tokenizer.json` that is read twice; the rest, which is large, is skipped fast.
#[derive(serde::Deserialize)]
struct Decoder {
    #[serde(default, rename = "decoder")]
    _decoder: serde_json::Value,
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer")
            .field("vocab_size", &self.vocab_size())
            .field("decoding", &self.inner.decoding)
            .finish()
    }
}

impl Tokenizer {
    /// Reads a `tokenizer.json`. Truncation and padding that it may ask for are left away: a prompt is never
    /// shortened in silence.
    ///
    /// # Errors
    /// [`TextError::Tokenizer`] if it is no such file.
    pub fn from_bytes(tokenizer_json: &[u8]) -> Result<Self, TextError> {
        let fail = |error: tokenizers::Error| TextError::Tokenizer { reason: error.to_string() };
        // The library (0.23) panics where the JSON of `decoder` does not read, so that is found out before.
        if let Err(error) = serde_json::from_slice::<Decoder>(tokenizer_json) {
            return Err(TextError::Tokenizer { reason: error.to_string() });
        }
        let mut tokenizer = tokenizers::Tokenizer::from_bytes(tokenizer_json).map_err(fail)?;
        tokenizer.with_truncation(None).map_err(fail)?;
        tokenizer.with_padding(None);
        let decoding = Decoding::of(tokenizer.get_decoder());
        Ok(Tokenizer { inner: Arc::new(Inner { tokenizer, decoding }) })
    }

    /// The ids of a text. Nothing is added; special tokens that stand in the text, as a chat template puts them
    /// there, are recognised.
    ///
    /// # Errors
    /// [`TextError::Encode`] if the model cannot express the text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TextError> {
        self.ids(text, false)
    }

    /// The ids of a text with what the tokenizer itself adds around one (most often a begin-of-text token): for
    /// completing a plain text, without a template.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn encode_with_special(&self, text: &str) -> Result<Vec<u32>, TextError> {
        self.ids(text, true)
    }

    fn ids(&self, text: &str, add_special: bool) -> Result<Vec<u32>, TextError> {
        match self.inner.tokenizer.encode_fast(text, add_special) {
            Ok(encoding) => Ok(encoding.get_ids().to_vec()),
            Err(error) => Err(TextError::Encode { bytes: text.len(), reason: error.to_string() }),
        }
    }

    /// The text of ids; special tokens leave nothing behind if they are to be skipped, nor do unknown ids.
    ///
    /// Bytes that are no UTF-8 become U+FFFD, one for each sequence that could not be completed. This is what
    /// Hugging Face's decoders give but for one: its byte fallback replaces every byte of a run of byte tokens, the
    /// good ones too, if one in it is wrong. Here a run keeps what is good in it, so that what was once
    /// streamed stays true.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        if matches!(self.inner.decoding, Decoding::Whole) {
            return self.decode_whole(ids, skip_special);
        }
        let mut detokeniser = Detokeniser::new(self, skip_special);
        let mut text = String::new();
        for &id in ids {
            detokeniser.push_to(id, &mut text);
        }
        text + &detokeniser.finish()
    }

    /// The library's own decoding. It fails only where a regular expression of the decoder does; the tokens as they
    /// stand are then the best there is.
    pub(crate) fn decode_whole(&self, ids: &[u32], skip_special: bool) -> String {
        self.inner
            .tokenizer
            .decode(ids, skip_special)
            .unwrap_or_else(|_| ids.iter().filter_map(|&id| self.id_to_token(id)).collect())
    }

    /// Number of tokens, the added ones included.
    pub fn vocab_size(&self) -> usize {
        self.inner.tokenizer.get_vocab_size(true)
    }

    /// The id of a token, written as in the vocabulary (`Ġthe`, `▁the`, `<|im_end|>`).
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.tokenizer.token_to_id(token)
    }

    /// The token of an id, written as in the vocabulary.
    pub fn id_to_token(&self, id: u32) -> Option<String> {
        self.inner.tokenizer.id_to_token(id)
    }

    /// Whether an id is that of a special token (a mark, not text).
    pub fn is_special(&self, id: u32) -> bool {
        self.id_to_token(id).is_some_and(|token| self.is_special_token(&token))
    }

    pub(crate) fn is_special_token(&self, token: &str) -> bool {
        self.inner.tokenizer.get_added_vocabulary().is_special_token(token)
    }

    pub(crate) fn decoding(&self) -> &Decoding {
        &self.inner.decoding
    }
}
