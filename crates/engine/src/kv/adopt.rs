//! Sequences that begin as earlier ones did: with the blocks that are still in memory or in the file.

use super::prefix::{Key, Node, Tokens};
use super::spill::Spill;
use super::{Adopted, BLOCK, KvCache, SeqId};

impl KvCache {
    /// Gives an empty sequence the longest beginning of `tokens` that is known, from memory or the file, and
    /// returns its length. What the file cannot give is as if it were not there.
    ///
    /// # Panics
    /// If the sequence is not empty.
    pub fn adopt(&mut self, seq: SeqId, tokens: &[u32]) -> usize {
        assert!(self.sequences[seq.0 as usize].blocks.is_empty(), "only an empty sequence adopts");
        self.adopt_some(seq, tokens, usize::MAX).held
    }

    /// As [`Self::adopt`], but reads about `most` blocks of the file and no more: to be called again, with the same
    /// tokens, until it is done.
    ///
    /// # Panics
    /// If the sequence holds anything that it has not adopted.
    pub fn adopt_some(&mut self, seq: SeqId, tokens: &[u32], most: usize) -> Adopted {
        let sequence = &self.sequences[seq.0 as usize];
        assert_eq!(sequence.blocks.len(), sequence.keys.len(), "only what was adopted is gone on from");
        if self.states.is_some() {
            return self.adopt_stateful(seq, tokens, most);
        }
        if self.windows.is_some() {
            return self.adopt_windowed(seq, tokens, most);
        }
        let mut left = most;
        loop {
            self.take_known(seq, tokens);
            match self.fetch(seq, tokens, left) {
                (0, true) => {
                    let held = self.sequences[seq.0 as usize].keys.len() * BLOCK;
                    return Adopted { held, is_done: false };
                }
                (0, false) => break,
                (read, _) => left -= read,
            }
        }
        // The last first, as the file wants it.
        if let Some(spill) = &mut self.spill {
            self.sequences[seq.0 as usize].keys.iter().rev().for_each(|&key| spill.touch(key));
        }
        let (n, parent) = self.end(seq);
        Adopted { held: n * BLOCK + self.adopt_part(seq, parent, &tokens[n * BLOCK..]), is_done: true }
    }

    /// As [`Self::adopt`] where layers keep states: to the longest beginning that has a snapshot, from memory.
    pub(super) fn adopt_state(&mut self, seq: SeqId, tokens: &[u32]) -> usize {
        // What was being read lies where the snapshot goes.
        self.sequences[seq.0 as usize].reading = None;
        self.take_known(seq, tokens);
        let Some(states) = &self.states else { return 0 };
        // After each block that is known: those that go on as the tokens do as far as their snapshots, whether or not
        // they are the sequence's own. The last such place has the longest beginning.
        let known = self.end(seq).0;
        let last = (0..=known).rev().find_map(|i| {
            let parent =
                i.checked_sub(1).map_or(Key::ROOT, |before| self.sequences[seq.0 as usize].keys[before]);
            let rest = &tokens[i * BLOCK..];
            let begun = self.tree.children(parent).filter_map(|(id, node)| {
                let fill = states.fill(id)?;
                (rest.get(..fill)? == node.tokens.get(..fill)?).then_some((i, id, fill, node.key))
            });
            begun.max_by_key(|(_, _, fill, _)| *fill)
        });
        if let Some((i, id, fill, key)) = last {
            self.pool.hold(id);
            self.give_back(seq, i * BLOCK);
            let sequence = &mut self.sequences[seq.0 as usize];
            sequence.blocks.push(id);
            sequence.keys.extend((fill == BLOCK).then_some(key));
        }
        let Some(states) = &mut self.states else { return 0 };
        let held = states.go_to(seq, &self.sequences[seq.0 as usize].blocks, tokens.len());
        self.give_back(seq, held);
        let last = held / BLOCK;
        let Some(&begun) = self.sequences[seq.0 as usize].blocks.get(last) else { return held };
        // Gone on from within: others find the block as it is.
        let Ok(copy) = self.allocate() else {
            self.close_state(seq);
            return 0;
        };
        self.copy(begun, copy);
        self.sequences[seq.0 as usize].blocks[last] = copy;
        self.release(begun);
        held
    }

    /// A sequence becomes empty.
    pub(super) fn close_state(&mut self, seq: SeqId) {
        self.sequences[seq.0 as usize].reading = None;
        if let Some(states) = &mut self.states {
            states.go_to(seq, &[], 0);
        }
        self.give_back(seq, 0);
    }

    /// How many blocks of a sequence can be found by others, and the key of the last of them.
    pub(super) fn end(&self, seq: SeqId) -> (usize, Key) {
        let keys = &self.sequences[seq.0 as usize].keys;
        (keys.len(), keys.last().copied().unwrap_or(Key::ROOT))
    }

    /// Goes on with the blocks that are in memory.
    pub(super) fn take_known(&mut self, seq: SeqId, tokens: &[u32]) {
        let (n, mut parent) = self.end(seq);
        for own in tokens[n * BLOCK..].chunks_exact(BLOCK) {
            let Some(id) = self.tree.child(parent, own) else { return };
            self.pool.hold(id);
            parent = self.tree.node(id).map_or(parent, |node| node.key);
            let sequence = &mut self.sequences[seq.0 as usize];
            sequence.blocks.push(id);
            sequence.keys.push(parent);
        }
    }

    /// Goes on with at most `most` blocks that are in the file. Returns how many were read, and whether it has more; a
    /// block that did not come is not in the file any more.
    pub(super) fn fetch(&mut self, seq: SeqId, tokens: &[u32], most: usize) -> (usize, bool) {
        let (n, mut parent) = self.end(seq);
        let (mut wanted, mut more) = (Vec::new(), false);
        for own in tokens[n * BLOCK..].chunks_exact(BLOCK) {
            if self.spill.is_none() || self.tree.child(parent, own).is_some() {
                break;
            }
            parent = parent.child(own);
            if !self.spill.as_ref().is_some_and(|spill| spill.holds(parent)) {
                break;
            }
            more = wanted.len() == most;
            if more {
                break;
            }
            let Ok(id) = self.allocate() else { break };
            wanted.push((parent, id));
        }
        // It may have been given up meanwhile: then nothing comes from it.
        let came = match &mut self.spill {
            Some(spill) if !wanted.is_empty() => {
                spill.get(&wanted, &mut self.memory, self.geometry.block_stride)
            }
            _ => vec![false; wanted.len()],
        };
        let (_, mut parent) = self.end(seq);
        let mut is_whole = true;
        for ((&(key, id), came), own) in wanted.iter().zip(came).zip(tokens[n * BLOCK..].chunks_exact(BLOCK))
        {
            if came {
                self.insert(id, Node { key, parent, tokens: Tokens::new(own), saved: true });
            }
            is_whole &= came;
            if is_whole {
                let sequence = &mut self.sequences[seq.0 as usize];
                sequence.blocks.push(id);
                sequence.keys.push(key);
            } else {
                self.release(id);
            }
            parent = key;
        }
        // Behind a block that did not come nothing is of use.
        if is_whole { (wanted.len(), more) } else { (0, false) }
    }

    /// Copies the beginning of a block that goes on as `tokens` do, if there is one.
    pub(super) fn adopt_part(&mut self, seq: SeqId, parent: Key, tokens: &[u32]) -> usize {
        let in_memory = self.tree.longest(parent, tokens);
        let in_file = self.spill.as_ref().and_then(|spill| spill.longest(parent, tokens));
        let memory_len = in_memory.map_or(0, |(_, len)| len);
        let file_len = in_file.map_or(0, |(_, len)| len);
        if memory_len.max(file_len) == 0 {
            return 0;
        }
        if let Some((id, _)) = in_memory.filter(|_| memory_len >= file_len) {
            let key = self.tree.node(id).map(|node| node.key);
            if let (Some(spill), Some(key)) = (&mut self.spill, key) {
                spill.touch(key);
            }
            self.pool.hold(id);
            let copy = self.allocate();
            if let Ok(copy) = copy {
                self.copy(id, copy);
                self.sequences[seq.0 as usize].blocks.push(copy);
            }
            self.release(id);
            return if copy.is_ok() { memory_len } else { 0 };
        }
        let (Some((key, _)), Ok(id)) = (in_file, self.allocate()) else { return 0 };
        let stride = self.geometry.block_stride;
        let get = |spill: &mut Spill| spill.get(&[(key, id)], &mut self.memory, stride);
        if self.spill.as_mut().map(get) == Some(vec![true]) {
            self.sequences[seq.0 as usize].blocks.push(id);
            return file_len;
        }
        self.release(id);
        0
    }
}
