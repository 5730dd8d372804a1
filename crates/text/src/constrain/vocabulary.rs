//! A tokenizer's tokens as bytes, in the library's trie.

use std::fmt;
use std::sync::Arc;

use llguidance::api::ParserLimits;
use llguidance::toktrie::{TokEnv, TokRxInfo, TokTrie, TokenizerEnv};
use llguidance::{ParserFactory, earley::SlicedBiasComputer};

use crate::decoding::Decoding;
use crate::error::TextError;
use crate::tokenizer::Tokenizer;

/// A longer token is never chosen under a constraint; the trie is 1024 deep at most.
const LONGEST_TOKEN: usize = 1_000;

/// The trie has room for so many nodes; a byte is one at most.
const MOST_BYTES: usize = 1 << 22;

/// Ids have 24 bits in the trie.
const MOST_TOKENS: usize = 1 << 24;

/// The lexer's states of one answer take one to two kilobytes each.
const MOST_LEXER_STATES: usize = 25_000;

/// A model's tokens, prepared for constraints. Clones are cheap and share it.
#[derive(Clone)]
pub struct GrammarVocabulary {
    inner: Arc<Inner>,
}

struct Inner {
    factory: ParserFactory,
    environment: Arc<Environment>,
}

/// What the library asks about tokens.
struct Environment {
    tokenizer: Tokenizer,
    trie: TokTrie,
    /// Whether the tokenizer writes a part of a text as it would within the whole.
    canonical: bool,
}

impl fmt::Debug for GrammarVocabulary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GrammarVocabulary")
            .field("vocab_size", &self.vocab_size())
            .field("canonical", &self.inner.environment.canonical)
            .finish_non_exhaustive()
    }
}

impl GrammarVocabulary {
    /// Prepares a model's tokens: most of a second for 150,000 of them.
    ///
    /// `vocab_size` is the width of the model's logits, which may exceed the number of tokens: ids without a token
    /// are never allowed. `end_tokens` end an answer, and are never part of its text.
    ///
    /// # Errors
    /// [`TextError::Vocabulary`] if there is no end token among the ids, or if the tokenizer's decoder does not tell
    /// the bytes of a single token.
    pub fn new(tokenizer: &Tokenizer, vocab_size: usize, end_tokens: &[u32]) -> Result<Self, TextError> {
        let fail = |reason: String| TextError::Vocabulary { reason };
        let ends: Vec<u32> = end_tokens.iter().copied().filter(|&end| (end as usize) < vocab_size).collect();
        let Some(&end) = ends.first() else {
            return Err(fail(format!("none of the end tokens {end_tokens:?} is below {vocab_size}")));
        };
        let size = u32::try_from(vocab_size).ok().filter(|_| vocab_size < MOST_TOKENS);
        let size = size.ok_or_else(|| fail(format!("{vocab_size} tokens are too many")))?;
        let words = words(tokenizer, size, &ends)?;
        if words.iter().map(Vec::len).sum::<usize>() >= MOST_BYTES {
            return Err(fail(format!("its tokens have more than {MOST_BYTES} bytes")));
        }
        let trie = TokTrie::from(&TokRxInfo::new(size, end), &words).with_eos_tokens(&ends);
        let canonical = *tokenizer.decoding() == Decoding::ByteLevel && has_all_bytes(&trie);
        let environment = Arc::new(Environment { tokenizer: tokenizer.clone(), trie, canonical });
        let library: TokEnv = environment.clone();
        let slices = SlicedBiasComputer::json_slices();
        let mut factory = ParserFactory::new(&library, Default::default(), &slices)
            .map_err(|error| fail(super::says(&error)))?;
        factory.quiet();
        *factory.limits_mut() = ParserLimits {
            max_lexer_states: MOST_LEXER_STATES,
            verbose_errors: false,
            ..ParserLimits::default()
        };
        Ok(GrammarVocabulary { inner: Arc::new(Inner { factory, environment }) })
    }

    pub(super) fn factory(&self) -> &ParserFactory {
        &self.inner.factory
    }

    pub(super) fn tokenizer(&self) -> &Tokenizer {
        &self.inner.environment.tokenizer
    }

    pub(super) fn vocab_size(&self) -> usize {
        self.inner.environment.trie.vocab_size()
    }

    pub(super) fn is_end(&self, token: u32) -> bool {
        self.inner.environment.trie.eos_tokens().contains(&token)
    }
}

/// The bytes of each id; none for an id without a token or with one that no text can hold.
fn words(tokenizer: &Tokenizer, size: u32, ends: &[u32]) -> Result<Vec<Vec<u8>>, TextError> {
    const MARK: u8 = TokTrie::SPECIAL_TOKEN_MARKER;
    (0..size)
        .map(|id| {
            let Some(token) = tokenizer.id_to_token(id) else { return Ok(Vec::new()) };
            if tokenizer.is_special_token(&token) || ends.contains(&id) {
                return Ok([&[MARK], token.as_bytes()].concat());
            }
            let bytes = tokenizer.decoding().bytes(&token).ok_or_else(|| TextError::Vocabulary {
                reason: "its decoder does not tell the bytes of a single token".to_owned(),
            })?;
            // The byte that marks special tokens is in no UTF-8 text.
            let usable = bytes.len() <= LONGEST_TOKEN && bytes.first() != Some(&MARK);
            Ok(if usable { bytes } else { Vec::new() })
        })
        .collect()
}

/// Whether each byte that UTF-8 has is a token.
fn has_all_bytes(trie: &TokTrie) -> bool {
    (0..=0xf4_u8)
        .filter(|byte| !matches!(byte, 0xc0 | 0xc1))
        .all(|byte| trie.token_id_at_bytes(&[byte]).is_some())
}

impl Environment {
    /// The tokenizer's ids of a text if they spell just that text. They do not where it normalises, adds a blank or
    /// reads a special token.
    fn ids(&self, text: &str) -> Vec<u32> {
        let spells = |ids: &[u32]| {
            let bytes = ids.iter().flat_map(|&id| self.trie.token(id));
            bytes.eq(text.as_bytes())
        };
        let ids = self.tokenizer.encode(text).ok().filter(|ids| spells(ids));
        ids.unwrap_or_else(|| self.trie.greedy_tokenize(text.as_bytes()))
    }
}

impl TokenizerEnv for Environment {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<u32> {
        self.trie.tokenize_with_greedy_fallback(bytes, |text| self.ids(text))
    }

    fn tokenize_is_canonical(&self) -> bool {
        self.canonical
    }
}
