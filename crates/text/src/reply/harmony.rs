//! The headers of Harmony's messages (GPT-OSS): who speaks, on which channel, to whom.
//!
//! `<|start|>assistant to=functions.NAME<|channel|>commentary <|constrain|>json<|message|>`; each part may be
//! absent, and the recipient may also follow the channel.

use super::format::{Mark, Marks};
use super::header::NAME_LIMIT;

/// With this, or what follows it, the prompt ends.
pub(super) const ASSISTANT: &str = "<|start|>assistant";

/// Markers of a header.
pub(super) const HEADER: Marks = &[
    ("<|start|>", Mark::Start),
    (CHANNEL, Mark::Channel),
    (CONSTRAIN, Mark::Constrain),
    ("<|message|>", Mark::Message),
    ("<|end|>", Mark::End),
    ("<|return|>", Mark::End),
    ("<|call|>", Mark::End),
];

/// Markers that end a message's content; the last two begin another message.
pub(super) const CONTENT: Marks = &[
    ("<|end|>", Mark::End),
    ("<|return|>", Mark::End),
    ("<|call|>", Mark::End),
    ("<|start|>", Mark::Start),
    (CHANNEL, Mark::Channel),
];

const CHANNEL: &str = "<|channel|>";
const CONSTRAIN: &str = "<|constrain|>";

/// Bytes that a header may have: a recipient, twice over, and the markers.
const LIMIT: usize = 2 * NAME_LIMIT + 128;

/// Whether this may go on to be a header: before the channel, nothing but the role and the recipient.
pub(super) fn may_be_header(raw: &str) -> bool {
    if raw.len() > LIMIT {
        return false;
    }
    if raw.contains(CHANNEL) || raw.contains(CONSTRAIN) {
        return true;
    }
    let raw = raw.trim_start();
    let rest = raw.strip_prefix("assistant").unwrap_or(raw).trim_start();
    let one_word = !rest.trim_end().contains(char::is_whitespace);
    "assistant".starts_with(raw) || "to=".starts_with(rest) || (rest.starts_with("to=") && one_word)
}

/// Whether this, with which a reply ends, is rather text than the beginning of a header.
pub(super) fn may_be_text(raw: &str) -> bool {
    !raw.trim().is_empty() && !raw.contains("<|")
}

/// The channel, empty if there is none, and the recipient of a header.
pub(super) fn read_header(raw: &str) -> (&str, Option<&str>) {
    let ends_word = |c: char| c.is_whitespace() || c == '<';
    let word = |text: &'_ str| text.find(ends_word).unwrap_or(text.len());
    let channel = raw.split_once(CHANNEL).map_or("", |(_, rest)| {
        let rest = rest.trim_start();
        &rest[..word(rest)]
    });
    let recipient = raw.split(ends_word).map(|part| part.rsplit('>').next().unwrap_or(part));
    let recipient = recipient.filter_map(|part| part.strip_prefix("to=")).find(|to| !to.is_empty());
    (channel, recipient)
}
