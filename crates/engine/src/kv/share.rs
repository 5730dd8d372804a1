//! What others may find: blocks of tokens that are known go into the tree, with those of windows that go with them.

use super::prefix::{Key, Node, Tokens};
use super::{BLOCK, KvCache, SeqId};

impl KvCache {
    /// Lets others find the complete blocks of a sequence that holds `tokens`. A block that is known already gives
    /// way to the one that others share.
    pub fn commit(&mut self, seq: SeqId, tokens: &[u32]) {
        let (known, mut parent) = self.end(seq);
        for i in known..tokens.len() / BLOCK {
            let own = &tokens[i * BLOCK..(i + 1) * BLOCK];
            let id = self.sequences[seq.0 as usize].blocks[i];
            let key = parent.child(own);
            match self.tree.child(parent, own) {
                Some(other) if other != id => {
                    self.pool.hold(other);
                    self.sequences[seq.0 as usize].blocks[i] = other;
                    if let Some(states) = &mut self.states {
                        states.replace(id, other);
                    }
                    if let Some(windows) = &mut self.windows {
                        windows.agree(seq, i, other);
                    }
                    self.note_window(other);
                    self.release(id);
                }
                Some(_) => {}
                None => {
                    self.insert(id, Node { key, parent, tokens: Tokens::new(own), saved: false });
                    self.join(seq, i, id);
                }
            }
            self.sequences[seq.0 as usize].keys.push(key);
            parent = key;
        }
    }

    /// As [`Self::commit`], and the block at the end, which is not complete: for a sequence that ends.
    pub fn commit_all(&mut self, seq: SeqId, tokens: &[u32]) {
        self.commit_end(seq, tokens);
        if self.spill.is_some() {
            self.note_states(seq, tokens);
        }
    }

    fn commit_end(&mut self, seq: SeqId, tokens: &[u32]) {
        self.commit(seq, tokens);
        if let Some(states) = self.states.as_mut().filter(|states| states.at(seq) == tokens.len()) {
            states.snapshot(seq, &self.sequences[seq.0 as usize].blocks, false);
        }
        let tail = &tokens[tokens.len() / BLOCK * BLOCK..];
        let Some(&id) = self.sequences[seq.0 as usize].blocks.get(tokens.len() / BLOCK) else { return };
        let (_, parent) = self.end(seq);
        let known = self.tree.longest(parent, tail).filter(|(_, len)| *len == tail.len());
        if let (Some((known, _)), Some(states), false) = (known, &mut self.states, tail.is_empty()) {
            // That block may never have had a snapshot, or lost it.
            states.replace(id, known);
        }
        // Of a longer one a window's block would lack the last rows.
        let same =
            known.filter(|(id, _)| self.tree.node(*id).is_some_and(|node| node.tokens.len() == tail.len()));
        if let (Some((same, _)), false) = (same, tail.is_empty()) {
            self.join(seq, tokens.len() / BLOCK, same);
        }
        if tail.is_empty() || known.is_some() || self.tree.node(id).is_some() {
            return;
        }
        // A shorter end of the same conversation has had its day.
        let shorter = self.tree.children(parent).find(|(child, node)| {
            let is_part = node.tokens.len() < tail.len() && tail.starts_with(&node.tokens);
            is_part && self.pool.holders(*child) == 0
        });
        if let Some((shorter, _)) = shorter {
            self.unlink(shorter);
            self.set_free(shorter);
        }
        let key = parent.child(tail);
        self.insert(id, Node { key, parent, tokens: Tokens::new(tail), saved: false });
        self.join(seq, tokens.len() / BLOCK, id);
    }

    pub(super) fn insert(&mut self, id: u32, node: Node) {
        if !node.saved {
            self.note_unsaved(id, node.key);
        }
        self.tree.insert(id, node);
    }

    fn note_unsaved(&mut self, id: u32, key: Key) {
        let Some(spill) = &mut self.spill else { return };
        let tree = &self.tree;
        let is_unsaved = |id, key| tree.node(id).is_some_and(|node: &Node| node.key == key && !node.saved);
        spill.note_unsaved(id, key, self.pool.len(), is_unsaved);
    }

    /// A block can be found with a sequence's block of windowed layers.
    fn join(&mut self, seq: SeqId, index: usize, id: u32) {
        if let Some(windows) = &mut self.windows {
            windows.join(windows.table(seq)[index], id);
        }
        self.note_window(id);
    }

    /// A block that the file has without its window's is one for the file again, once that is there.
    fn note_window(&mut self, id: u32) {
        let has_window = self.windows.as_ref().is_some_and(|windows| windows.of(id).is_some());
        let (Some(spill), true) = (&self.spill, has_window) else { return };
        let is_short = |node: &&mut Node| node.saved && spill.lacks_window(node.parent, node.key);
        if let Some(node) = self.tree.node_mut(id).filter(is_short) {
            node.saved = false;
            let key = node.key;
            self.note_unsaved(id, key);
        }
    }

    /// A block can be found no more.
    pub(super) fn unlink(&mut self, id: u32) {
        self.tree.remove(id);
        if let Some(windows) = &mut self.windows {
            windows.forget(id);
        }
    }
}
