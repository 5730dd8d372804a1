//! Counts the ids of a `tokenizer.json`, without keeping its text.

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use crate::checkpoint::SideFile;
use crate::error::Warning;

#[derive(Deserialize)]
struct Tokenizer {
    model: Model,
    #[serde(default)]
    added_tokens: Vec<Added>,
}

#[derive(Deserialize)]
struct Model {
    vocab: Ids,
}

#[derive(Deserialize)]
struct Added {
    id: usize,
}

/// One more than the highest id.
struct Ids(usize);

impl<'de> Deserialize<'de> for Ids {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Count;
        impl<'de> Visitor<'de> for Count {
            type Value = Ids;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a vocabulary")
            }

            // Token to id.
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Ids, A::Error> {
                let mut ids = 0;
                while let Some((IgnoredAny, id)) = map.next_entry::<_, usize>()? {
                    ids = ids.max(id.saturating_add(1));
                }
                Ok(Ids(ids))
            }

            // Unigram: pairs of token and score, the id is the place.
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Ids, A::Error> {
                let mut ids = 0;
                while seq.next_element::<IgnoredAny>()?.is_some() {
                    ids += 1;
                }
                Ok(Ids(ids))
            }
        }
        deserializer.deserialize_any(Count)
    }
}

/// Compares the tokenizer, if there is one, with the embedding's rows.
pub(crate) fn check(side_files: &[SideFile], rows: usize) -> Option<Warning> {
    let bytes = side_files.iter().find(|side| side.name == "tokenizer.json")?.read().ok()?;
    let tokenizer: Tokenizer = match serde_json::from_slice(&bytes) {
        Ok(tokenizer) => tokenizer,
        Err(e) => return Some(Warning::Tokenizer { what: e.to_string() }),
    };
    let added = tokenizer.added_tokens.iter().map(|token| token.id.saturating_add(1)).max();
    let tokens = tokenizer.model.vocab.0.max(added.unwrap_or(0));
    match tokens.cmp(&rows) {
        std::cmp::Ordering::Less => Some(Warning::RowsWithoutTokens { rows, tokens }),
        std::cmp::Ordering::Equal => None,
        std::cmp::Ordering::Greater => Some(Warning::TokensWithoutRows { rows, tokens }),
    }
}
