//! Beginnings where layers see windows: a sequence can begin as another did only where the next token's window is whole.

use super::prefix::{Key, Node, Tokens, common};
use super::spill::{STAGE, Spill, Wanted};
use super::{Adopted, BLOCK, GONE, KvCache, SeqId};

/// Where a sequence can begin.
#[derive(Clone, Copy, Debug)]
struct Place {
    len: usize,
    /// Of which block its last positions are the beginning, if that is not complete there.
    part: Option<Part>,
    /// Where others are known to go on otherwise.
    parting: Option<usize>,
}

#[derive(Clone, Copy, Debug)]
enum Part {
    Memory(u32),
    File(Key),
}

/// A block that a sequence's beginning lacks.
#[derive(Clone, Copy, Debug)]
struct Lacking {
    index: usize,
    parent: Key,
    key: Key,
    /// Its window's alone, or both.
    has_own: bool,
}

impl KvCache {
    /// As [`Self::adopt_some`] where layers see windows: to the longest beginning whose window is whole. What lies before
    /// that window needs none of its own.
    pub(super) fn adopt_windowed(&mut self, seq: SeqId, tokens: &[u32], most: usize) -> Adopted {
        let (mut left, mut cap) = (most, tokens.len());
        loop {
            let place = self.find_place(&tokens[..cap]);
            let whole = place.len / BLOCK * BLOCK;
            self.give_back(seq, whole);
            let brought = self.bring(seq, tokens, place.len, &mut left);
            cap = match brought {
                Ok(false) => {
                    let held = self.sequences[seq.0 as usize].keys.len() * BLOCK;
                    return Adopted { held, is_done: false };
                }
                Ok(true)
                    if place
                        .part
                        .is_none_or(|part| self.bring_part(seq, part, &tokens[whole..place.len])) =>
                {
                    self.touch_and_part(seq, place.parting);
                    return Adopted { held: place.len, is_done: true };
                }
                // What was there has given way or is damaged: as if it had never been there.
                Ok(true) => whole,
                Err(index) => index * BLOCK,
            };
        }
    }

    fn touch_and_part(&mut self, seq: SeqId, parting: Option<usize>) {
        // The last first, as the file wants it.
        if let Some(spill) = &mut self.spill {
            self.sequences[seq.0 as usize].keys.iter().rev().for_each(|&key| spill.touch(key));
        }
        if let Some(windows) = &mut self.windows {
            windows.part_at(seq, parting);
        }
    }

    /// The longest beginning of `tokens` that memory or the file has, with a whole window.
    fn find_place(&self, tokens: &[u32]) -> Place {
        let nowhere = Place { len: 0, part: None, parting: None };
        let Some(windows) = &self.windows else { return nowhere };
        let spill = self.spill.as_ref();
        let (mut parent, mut has) = (Key::ROOT, Vec::new());
        for own in tokens.chunks_exact(BLOCK) {
            let id = self.tree.child(parent, own);
            let known = id.and_then(|id| self.tree.node(id));
            let key = known.map_or_else(|| parent.child(own), |node| node.key);
            if known.is_none() && !spill.is_some_and(|spill| spill.holds(key)) {
                break;
            }
            let in_memory = id.is_some_and(|id| windows.of(id).is_some());
            has.push(in_memory || spill.is_some_and(|spill| spill.holds_window(parent, key)));
            parent = key;
        }
        let whole = has.len() * BLOCK;
        let rest = &tokens[whole..];
        // The beginning of a block that goes on otherwise, or is not complete.
        let with_window = self.tree.children(parent).filter(|(id, _)| windows.of(*id).is_some());
        let in_memory = with_window.map(|(id, node)| (Part::Memory(id), common(&node.tokens, rest)));
        let in_file = spill.and_then(|spill| spill.longest(parent, rest));
        let begun = in_file.map(|(key, len)| (Part::File(key), len)).into_iter().chain(in_memory);
        let begun = begun.max_by_key(|(_, len)| *len).filter(|(_, len)| *len > 0);
        let most = whole + begun.map_or(0, |(_, len)| len);
        let len = windows.place(most, |i| has.get(i).copied().unwrap_or(true));
        let known = whole + self.tree.longest(parent, rest).map_or(0, |(_, len)| len);
        let goes_on = match begun {
            Some((Part::Memory(id), len)) => self.tree.node(id).is_some_and(|node| node.tokens.len() > len),
            Some((Part::File(_), _)) => true,
            None => {
                let in_memory = self.tree.children(parent).next().is_some();
                in_memory || spill.is_some_and(|spill| spill.goes_on(parent))
            }
        };
        let parts = len < known.max(most) || (len > 0 && goes_on);
        Place {
            len,
            part: begun.filter(|_| len > whole).map(|(part, _)| part),
            parting: parts.then_some(known.max(most)),
        }
    }

    /// Goes on to the last complete block before `len`, and to a whole window there; reads at most `left` blocks of the
    /// file. False if it has more of them; an error is the index of a block that is not there any more, or for which
    /// there is no room.
    fn bring(&mut self, seq: SeqId, tokens: &[u32], len: usize, left: &mut usize) -> Result<bool, usize> {
        let windows = self.windows.as_ref();
        let (n, first) = (len / BLOCK, windows.map_or(0, |windows| windows.range(len).start));
        loop {
            // What memory has is held before room is made for anything.
            self.take_in_memory(seq, tokens, n, first);
            let lacking = self.lacking(seq, tokens, n, first);
            if lacking.is_empty() {
                return Ok(true);
            }
            if *left == 0 {
                return Ok(false);
            }
            let some = lacking.len().min(*left).min(STAGE);
            *left -= self.fetch_with_windows(seq, tokens, first, &lacking[..some])?;
        }
    }

    fn take_in_memory(&mut self, seq: SeqId, tokens: &[u32], n: usize, first: usize) {
        let (known, mut parent) = self.end(seq);
        for own in tokens[known * BLOCK..n * BLOCK].chunks_exact(BLOCK) {
            let Some(id) = self.tree.child(parent, own) else { break };
            self.pool.hold(id);
            parent = self.tree.node(id).map_or(parent, |node| node.key);
            let sequence = &mut self.sequences[seq.0 as usize];
            sequence.blocks.push(id);
            sequence.keys.push(parent);
            if let Some(windows) = &mut self.windows {
                windows.push(seq, GONE);
            }
        }
        if let Some(windows) = &mut self.windows {
            windows.take(seq, &self.sequences[seq.0 as usize].blocks, first..n);
        }
    }

    /// What only the file has: the next blocks of the sequence, or else blocks of its window.
    fn lacking(&self, seq: SeqId, tokens: &[u32], n: usize, first: usize) -> Vec<Lacking> {
        let keys = &self.sequences[seq.0 as usize].keys;
        let mut lacking = Vec::new();
        let mut parent = self.end(seq).1;
        for index in keys.len()..n {
            let own = &tokens[index * BLOCK..(index + 1) * BLOCK];
            if self.tree.child(parent, own).is_some() {
                break;
            }
            let key = parent.child(own);
            lacking.push(Lacking { index, parent, key, has_own: false });
            parent = key;
        }
        let Some(windows) = self.windows.as_ref().filter(|_| lacking.is_empty()) else { return lacking };
        let gone = (first..n).filter(|&index| windows.table(seq)[index] == GONE);
        lacking.extend(gone.map(|index| {
            let parent = index.checked_sub(1).map_or(Key::ROOT, |before| keys[before]);
            Lacking { index, parent, key: keys[index], has_own: true }
        }));
        lacking
    }

    /// Reads blocks of the file that a sequence lacks, in order; from `first` on with those of windows. Returns how many.
    fn fetch_with_windows(
        &mut self,
        seq: SeqId,
        tokens: &[u32],
        first: usize,
        lacking: &[Lacking],
    ) -> Result<usize, usize> {
        let mut wanted = Vec::with_capacity(lacking.len());
        for &Lacking { index, parent, key, has_own } in lacking {
            let holds =
                |spill: &Spill| spill.holds(key) && (index < first || spill.holds_window(parent, key));
            if !self.spill.as_ref().is_some_and(holds) {
                break;
            }
            let own = if has_own { Ok(None) } else { self.allocate().map(Some) };
            let Ok(own) = own else { break };
            let window = if index < first { Ok(None) } else { self.allocate_window().map(Some) };
            let Ok(window) = window else {
                own.into_iter().for_each(|id| self.release(id));
                break;
            };
            wanted.push(Wanted { key, own, window });
        }
        let came = match (&mut self.spill, &mut self.windows) {
            (Some(spill), Some(windows)) => spill.get_parts(&wanted, &mut self.memory, &mut windows.memory),
            // It may have been given up meanwhile: then nothing comes from it.
            _ => vec![false; wanted.len()],
        };
        let missing = came.iter().position(|came| !came).unwrap_or(came.len());
        for (i, ((lacks, wanted), came)) in lacking.iter().zip(&wanted).zip(came).enumerate() {
            // Behind a block that did not come nothing is of use to this sequence.
            self.settle(seq, tokens, lacks, wanted, came, i < missing);
        }
        if missing < lacking.len() { Err(lacking[missing].index) } else { Ok(missing) }
    }

    /// Takes a block that was read into the tree, and into the sequence if all before it came too.
    fn settle(
        &mut self,
        seq: SeqId,
        tokens: &[u32],
        lacks: &Lacking,
        wanted: &Wanted,
        came: bool,
        goes_on: bool,
    ) {
        let &Lacking { index, parent, key, .. } = lacks;
        if let Some(own) = wanted.own {
            if came {
                let own_tokens = Tokens::new(&tokens[index * BLOCK..(index + 1) * BLOCK]);
                self.insert(own, Node { key, parent, tokens: own_tokens, saved: true });
            }
            if came && goes_on {
                let sequence = &mut self.sequences[seq.0 as usize];
                sequence.blocks.push(own);
                sequence.keys.push(key);
                if let Some(windows) = &mut self.windows {
                    windows.push(seq, GONE);
                }
            } else {
                self.release(own);
            }
        }
        let Some((windows, window)) = self.windows.as_mut().zip(wanted.window) else { return };
        let other = wanted.own.or_else(|| self.sequences[seq.0 as usize].blocks.get(index).copied());
        if let Some(other) = other.filter(|_| came) {
            windows.join(window, other);
        }
        if came && goes_on {
            windows.replace(seq, index, window);
        } else {
            windows.let_go(window, false);
        }
    }

    /// Goes on with a copy of the beginning of a block, which has these `tokens`; false if it is not there any more, or
    /// there is no room.
    fn bring_part(&mut self, seq: SeqId, part: Part, tokens: &[u32]) -> bool {
        let parent = self.end(seq).1;
        // What came before it may have taken its place.
        let is_still = |node: &Node| node.parent == parent && node.tokens.starts_with(tokens);
        let original = match part {
            Part::Memory(id) if self.tree.node(id).is_some_and(is_still) => {
                self.windows.as_ref().and_then(|windows| Some((id, windows.of(id)?)))
            }
            _ => None,
        };
        // It must not give way to its copy.
        if let (Some((id, window)), Some(windows)) = (original, &mut self.windows) {
            self.pool.hold(id);
            windows.pool.hold(window);
        }
        let n = self.sequences[seq.0 as usize].blocks.len();
        let mut came = self.extend(seq).is_ok();
        if let (true, Some(&own), Some(windows)) =
            (came, self.sequences[seq.0 as usize].blocks.last(), &mut self.windows)
        {
            let own_window = windows.table(seq)[n];
            came = match (part, original) {
                (Part::Memory(_), Some((id, window))) => {
                    windows.copy(window, own_window, &mut self.device_copies);
                    self.copy(id, own);
                    true
                }
                (Part::Memory(_), None) => false,
                (Part::File(key), _) => {
                    let wanted = [Wanted { key, own: Some(own), window: Some(own_window) }];
                    let get =
                        |spill: &mut Spill| spill.get_parts(&wanted, &mut self.memory, &mut windows.memory);
                    self.spill.as_mut().map(get) == Some(vec![true])
                }
            };
        }
        if let Some((id, window)) = original {
            let key = self.tree.node(id).map(|node| node.key);
            if let (Some(spill), Some(key)) = (&mut self.spill, key) {
                spill.touch(key);
            }
            self.release(id);
            if let Some(windows) = &mut self.windows {
                windows.let_go(window, true);
            }
        }
        if !came {
            self.give_back(seq, n * BLOCK);
        }
        came
    }
}
