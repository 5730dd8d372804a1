//! Which blocks continue which beginning: a tree over the tokens of complete blocks, and of ends that are not.
//!
//! It has its memory from the start: a block that is added or taken out allocates nothing.

use std::collections::HashMap;
use std::ops::Deref;

use sha2::{Digest, Sha256};

use super::BLOCK;

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
        Self::half(hash)
    }

    /// Names the state after this beginning. No tokens have five bytes, so it is no block's name.
    pub(super) fn state(self) -> Self {
        let mut hash = Sha256::new();
        hash.update(self.0.to_le_bytes());
        hash.update(b"state");
        Self::half(hash)
    }

    fn half(hash: Sha256) -> Self {
        let digest: [u8; 32] = hash.finalize().into();
        let mut half = [0; 16];
        half.copy_from_slice(&digest[..16]);
        Self(u128::from_le_bytes(half))
    }
}

/// The tokens of a block: as many as it has positions, or fewer at the end of a conversation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tokens {
    len: usize,
    ids: [u32; BLOCK],
}

impl Tokens {
    /// # Panics
    /// If there are more than a block holds.
    pub(super) fn new(tokens: &[u32]) -> Self {
        let mut ids = [0; BLOCK];
        ids[..tokens.len()].copy_from_slice(tokens);
        Self { len: tokens.len(), ids }
    }
}

impl Deref for Tokens {
    type Target = [u32];

    fn deref(&self) -> &[u32] {
        &self.ids[..self.len]
    }
}

/// What a block holds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Node {
    pub(super) key: Key,
    pub(super) parent: Key,
    pub(super) tokens: Tokens,
    /// The file has it.
    pub(super) saved: bool,
}

/// What blocks in memory hold, and those that continue a beginning, by its key.
#[derive(Debug)]
pub(super) struct Tree {
    /// By block.
    nodes: Vec<Option<Node>>,
    /// The first block that continues a beginning; after each block, the next that continues the same.
    first: HashMap<Key, u32>,
    next: Vec<Option<u32>>,
}

impl Tree {
    /// An empty tree over so many blocks.
    pub(super) fn new(blocks: usize) -> Self {
        // A map that is at most half full makes room for itself without growing.
        let first = HashMap::with_capacity(2 * blocks);
        Self { nodes: vec![None; blocks], first, next: vec![None; blocks] }
    }

    pub(super) fn node(&self, id: u32) -> Option<&Node> {
        self.nodes[id as usize].as_ref()
    }

    pub(super) fn node_mut(&mut self, id: u32) -> Option<&mut Node> {
        self.nodes[id as usize].as_mut()
    }

    /// Every block that holds something.
    #[cfg(test)]
    pub(super) fn nodes(&self) -> impl Iterator<Item = (u32, &Node)> {
        (0..).zip(&self.nodes).filter_map(|(id, node)| Some((id, node.as_ref()?)))
    }

    /// The blocks after `parent`, and what they hold.
    pub(super) fn children(&self, parent: Key) -> impl Iterator<Item = (u32, &Node)> {
        let first = self.first.get(&parent).copied();
        let ids = std::iter::successors(first, |&id| self.next[id as usize]);
        ids.filter_map(|id| Some((id, self.node(id)?)))
    }

    /// The block that holds exactly `tokens` after `parent`.
    pub(super) fn child(&self, parent: Key, tokens: &[u32]) -> Option<u32> {
        self.children(parent).find(|(_, node)| *node.tokens == *tokens).map(|(id, _)| id)
    }

    /// The block after `parent` that begins as `tokens` do for longest, and for how long.
    pub(super) fn longest(&self, parent: Key, tokens: &[u32]) -> Option<(u32, usize)> {
        let lengths = self.children(parent).map(|(id, node)| (id, common(&node.tokens, tokens)));
        lengths.max_by_key(|(_, len)| *len).filter(|(_, len)| *len > 0)
    }

    /// Adds what a block holds that held nothing.
    pub(super) fn insert(&mut self, id: u32, node: Node) {
        self.next[id as usize] = self.first.insert(node.parent, id);
        self.nodes[id as usize] = Some(node);
    }

    /// Takes out what a block holds, if it holds anything.
    pub(super) fn remove(&mut self, id: u32) {
        let Some(node) = self.nodes[id as usize].take() else { return };
        let next = self.next[id as usize].take();
        let mut before = self.first.get(&node.parent).copied().filter(|&first| first != id);
        if before.is_none() {
            match next {
                Some(next) => self.first.insert(node.parent, next),
                None => self.first.remove(&node.parent),
            };
        }
        while let Some(at) = before {
            before = self.next[at as usize];
            if before == Some(id) {
                self.next[at as usize] = next;
                return;
            }
        }
    }
}

/// Leading tokens that two have in common.
pub(super) fn common(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn children_come_and_go_in_any_order() {
        let node = |parent, token| {
            let (parent, tokens) = (Key(parent), Tokens::new(&[token; 3]));
            Node { key: parent.child(&tokens), parent, tokens, saved: false }
        };
        for out in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
            let mut tree = Tree::new(5);
            (0..3).for_each(|id| tree.insert(id, node(7, id)));
            tree.insert(4, node(8, 4));
            let mut left = vec![0, 1, 2];
            for id in out {
                tree.remove(id);
                tree.remove(id);
                left.retain(|&other| other != id);
                let mut found: Vec<u32> = tree.children(Key(7)).map(|(id, _)| id).collect();
                found.sort_unstable();
                assert_eq!(found, left);
                assert_eq!(tree.child(Key(7), &[id; 3]), None);
            }
            assert_eq!(tree.child(Key(8), &[4; 3]), Some(4));
            assert_eq!(tree.longest(Key(8), &[4, 4, 9]), Some((4, 2)));
            assert_eq!(tree.first.len(), 1, "nothing is kept of what is gone");
        }
    }
}
