//! Which blocks continue which beginning: a tree over the tokens of complete blocks, and of ends that are not.

use std::collections::HashMap;

use sha2::{Digest, Sha256};

use super::Block;

/// Names a beginning of a conversation: all tokens up to the end of a block. The first half of a SHA-256 over the
/// key before and the block's tokens, so nobody can make two that meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key(pub(super) u128);

impl Key {
    /// Before the first token.
    pub(super) const ROOT: Self = Self(0);

    /// The beginning that goes on with `tokens`.
    pub(super) fn child(self, tokens: &[u32]) -> Self {
        let mut hash = Sha256::new();
        hash.update(self.0.to_le_bytes());
        tokens.iter().for_each(|token| hash.update(token.to_le_bytes()));
        let digest: [u8; 32] = hash.finalize().into();
        let mut half = [0; 16];
        half.copy_from_slice(&digest[..16]);
        Self(u128::from_le_bytes(half))
    }
}

/// What a block holds.
#[derive(Clone, Debug)]
pub(super) struct Node {
    pub(super) key: Key,
    pub(super) parent: Key,
    /// As many as a block has positions, or fewer at the end of a conversation.
    pub(super) tokens: Vec<u32>,
    /// The file has it.
    pub(super) saved: bool,
}

/// Blocks in memory by the key of what comes before them.
#[derive(Debug, Default)]
pub(super) struct Tree {
    children: HashMap<Key, Vec<u32>>,
}

impl Tree {
    pub(super) fn children(&self, parent: Key) -> &[u32] {
        self.children.get(&parent).map_or(&[], Vec::as_slice)
    }

    /// The block that holds exactly `tokens` after `parent`.
    pub(super) fn child(&self, parent: Key, tokens: &[u32], blocks: &[Block]) -> Option<u32> {
        let holds = |&&id: &&u32| blocks[id as usize].node.as_ref().is_some_and(|node| node.tokens == tokens);
        self.children(parent).iter().find(holds).copied()
    }

    /// The block after `parent` that begins as `tokens` do for longest, and for how long.
    pub(super) fn longest(&self, parent: Key, tokens: &[u32], blocks: &[Block]) -> Option<(u32, usize)> {
        let length = |&id: &u32| {
            let node = blocks[id as usize].node.as_ref();
            (id, node.map_or(0, |node| common(&node.tokens, tokens)))
        };
        self.children(parent).iter().map(length).max_by_key(|(_, len)| *len).filter(|(_, len)| *len > 0)
    }

    pub(super) fn insert(&mut self, parent: Key, id: u32) {
        self.children.entry(parent).or_default().push(id);
    }

    pub(super) fn remove(&mut self, parent: Key, id: u32) {
        if let Some(children) = self.children.get_mut(&parent) {
            children.retain(|&child| child != id);
            if children.is_empty() {
                self.children.remove(&parent);
            }
        }
    }
}

/// Leading tokens that two have in common.
pub(super) fn common(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}
