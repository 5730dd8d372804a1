//! Beginnings where layers keep states, in memory and in the file: a sequence begins as another did only where there is
//! the state after that beginning, and the blocks that lead to it.
//!
//! Which states the file gets: that at the end of a conversation, unless the file has one less than [`WORTH`] positions
//! before it, and that where conversations part. Not those that are taken on the way: a state is as large as thousands of
//! positions. Without one of the two, state or blocks, the other is merely not found; nothing goes to the file in an order
//! that matters.
//!
//! Many templates leave out of a conversation what the model thought, so the next turn does not go on from the end of the
//! last. Where a conversation is seen to go on otherwise than something that is known, the file gets the state at the last
//! edge of its prompt too.
//!
//! Of the ends of one conversation the file's last two are worth keeping, its own and the one before, from which its last
//! turn can be said otherwise. Earlier ones stay while there is room, and are the first to give way.

use super::prefix::{Key, Tokens};
use super::spill::{self, UnsavedState};
use super::{Adopted, BLOCK, KvCache, SeqId};

/// Positions that an end must be from the last state before it that the file has: computing fewer again one day costs less
/// than writing a state after every word. EXP-ENGINE-11.
const WORTH: usize = BLOCK;

/// Where a sequence can begin.
#[derive(Clone, Copy, Debug)]
struct Place {
    len: usize,
    state: Source,
    /// Leading positions in complete blocks that memory or the file has, whether or not there are states.
    known: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    /// The beginning of everything.
    Nothing,
    /// A block's snapshot.
    Memory(u32),
    /// Of this name.
    File(Key),
}

impl Place {
    /// Positions in complete blocks that lead to it.
    const fn whole(&self) -> usize {
        self.len / BLOCK * BLOCK
    }
}

/// What became of bringing what a place needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Brought {
    All,
    /// More is in the file.
    Part,
    /// What was there has given way or is damaged, or there is no room: no state after more positions can be reached.
    Only(usize),
}

impl KvCache {
    /// As [`Self::adopt_some`] where layers keep states: to the longest beginning whose state memory or the file has.
    /// Before it is done the sequence has no state.
    pub(super) fn adopt_stateful(&mut self, seq: SeqId, tokens: &[u32], most: usize) -> Adopted {
        let (mut left, mut cap, mut known) = (most, tokens.len(), 0);
        loop {
            let place = self.find_state(&tokens[..cap]);
            known = known.max(place.known);
            self.give_back(seq, place.whole());
            match self.bring_state(seq, tokens, place, &mut left) {
                Brought::Only(len) => cap = len,
                Brought::Part => {
                    return Adopted { held: self.end(seq).0 * BLOCK, is_done: false };
                }
                Brought::All => {
                    self.sequences[seq.0 as usize].reading = None;
                    self.touch_to(seq, tokens, place.len);
                    let states = self.states.as_mut().filter(|_| known > 0 && known >= place.len);
                    if let Some(states) = states {
                        states.part_at(seq, known);
                    }
                    return Adopted { held: place.len, is_done: true };
                }
            }
        }
    }

    /// The longest beginning of `tokens` that has a state.
    fn find_state(&self, tokens: &[u32]) -> Place {
        let mut keys = vec![Key::ROOT];
        let mut parent = Key::ROOT;
        for own in tokens.chunks_exact(BLOCK) {
            let in_memory = self.tree.child(parent, own).and_then(|id| self.tree.node(id));
            let key = in_memory.map_or_else(|| parent.child(own), |node| node.key);
            if in_memory.is_none() && !self.spill.as_ref().is_some_and(|spill| spill.holds(key)) {
                break;
            }
            keys.push(key);
            parent = key;
        }
        let last = keys.len() - 1;
        let place = keys.iter().enumerate().rev().find_map(|(i, &parent)| {
            let own = &tokens[i * BLOCK..tokens.len().min((i + 1) * BLOCK)];
            let in_memory = self.snapshot_after(parent, own);
            // Its last positions may be the beginning of a block.
            let has_rows = |fill| i < last || self.has_rows(parent, &own[..fill]);
            let in_file = self.spill.as_ref().and_then(|spill| spill.state_after(parent, own, has_rows));
            let fill = in_memory.map_or(0, |(_, fill)| fill);
            match in_file {
                Some((state, in_file)) if in_file > fill => Some((i, in_file, Source::File(state))),
                _ => in_memory.map(|(id, fill)| (i, fill, Source::Memory(id))),
            }
        });
        let (len, state) = place.map_or((0, Source::Nothing), |(i, fill, state)| (i * BLOCK + fill, state));
        Place { len, state, known: last * BLOCK }
    }

    /// The block after `parent` whose snapshot has seen the most of `own`, and no other token; and how many that are.
    fn snapshot_after(&self, parent: Key, own: &[u32]) -> Option<(u32, usize)> {
        let states = self.states.as_ref()?;
        let seen = self.tree.children(parent).filter_map(|(id, node)| {
            let fill = states.fill(id)?;
            (own.get(..fill)? == node.tokens.get(..fill)?).then_some((id, fill))
        });
        seen.max_by_key(|(_, fill)| *fill)
    }

    /// Whether memory or the file has a block after `parent` that begins so.
    fn has_rows(&self, parent: Key, own: &[u32]) -> bool {
        let in_memory = self.tree.longest(parent, own);
        let in_file = self.spill.as_ref().and_then(|spill| spill.longest(parent, own));
        let lens = [in_memory.map(|(_, len)| len), in_file.map(|(_, len)| len)];
        lens.contains(&Some(own.len()))
    }

    fn bring_state(&mut self, seq: SeqId, tokens: &[u32], place: Place, left: &mut usize) -> Brought {
        if let Source::Memory(id) = place.state {
            // It must not give way to what leads to it.
            self.pool.hold(id);
            let mut brought = self.bring_whole(seq, &tokens[..place.whole()], left);
            if brought == Brought::All {
                let held = self.adopt_state(seq, &tokens[..place.len]);
                if held != place.len {
                    self.close_state(seq);
                    brought = Brought::Only(place.len - 1);
                }
            }
            self.release(id);
            return brought;
        }
        match self.bring_whole(seq, &tokens[..place.whole()], left) {
            Brought::All => {}
            other => return other,
        }
        let Source::File(state) = place.state else { return Brought::All };
        match self.read_state(seq, state, left) {
            Brought::All => {}
            Brought::Part => return Brought::Part,
            Brought::Only(_) => return Brought::Only(place.len - 1),
        }
        let begun = &tokens[place.whole()..place.len];
        if !begun.is_empty() {
            let parent = self.end(seq).1;
            let came = self.adopt_part(seq, parent, begun);
            if came < begun.len() {
                self.give_back(seq, place.whole());
                return Brought::Only(place.whole() + came);
            }
        }
        if let Some(states) = &mut self.states {
            states.arrive(seq, place.len, &self.sequences[seq.0 as usize].blocks);
        }
        Brought::All
    }

    /// Goes on with complete blocks, to the end of `tokens`; reads at most `left` of them.
    fn bring_whole(&mut self, seq: SeqId, tokens: &[u32], left: &mut usize) -> Brought {
        loop {
            self.take_known(seq, tokens);
            if self.end(seq).0 * BLOCK == tokens.len() {
                return Brought::All;
            }
            match self.fetch(seq, tokens, *left) {
                (0, true) => return Brought::Part,
                // The beginning of a block that did not come may be that of another.
                (0, false) => return Brought::Only((self.end(seq).0 + 1) * BLOCK - 1),
                (read, _) => *left -= read,
            }
        }
    }

    /// Goes on reading a state into a sequence's place, at most `left` pieces of it.
    fn read_state(&mut self, seq: SeqId, state: Key, left: &mut usize) -> Brought {
        let (Some(spill), Some(states)) = (&mut self.spill, &mut self.states) else {
            return Brought::Only(0);
        };
        let reading = &mut self.sequences[seq.0 as usize].reading;
        let has = reading.take().filter(|(of, _)| *of == state).map_or(0, |(_, has)| has);
        match spill.get_pieces(state, has, *left, states.room(seq)) {
            None => Brought::Only(0),
            Some(now) => {
                *left -= now - has;
                if now == spill.pieces() {
                    return Brought::All;
                }
                *reading = Some((state, now));
                Brought::Part
            }
        }
    }

    /// Notes in the file that a beginning was used. The last first, as the file wants it.
    fn touch_to(&mut self, seq: SeqId, tokens: &[u32], len: usize) {
        let Some(spill) = &mut self.spill else { return };
        let keys = &self.sequences[seq.0 as usize].keys;
        if let Some(last) = len.checked_sub(1) {
            let parent = (last / BLOCK).checked_sub(1).map_or(Key::ROOT, |before| keys[before]);
            let own = &tokens[last / BLOCK * BLOCK..len];
            spill.touch_state(parent.child(own).state());
            if let Some((key, _)) = spill.longest(parent, own) {
                spill.touch(key);
            }
        }
        keys.iter().rev().for_each(|&key| spill.touch(key));
    }

    /// A sequence that holds `tokens` ends: notes which of its states the file should get.
    pub(super) fn note_states(&mut self, seq: SeqId, tokens: &[u32]) {
        let Some(states) = self.states.as_ref().filter(|states| states.at(seq) == tokens.len()) else {
            return;
        };
        let parting = states.parting(seq).filter(|&at| at <= tokens.len());
        // A step that was given up may have looked further.
        let edge = parting.map_or(0, |_| states.prompt_edge(seq));
        let edge = if edge > tokens.len() { 0 } else { edge };
        let worth = [(parting.unwrap_or(0), false), (edge, true), (tokens.len(), true)];
        for (position, is_end) in worth {
            let Some(index) = position.checked_sub(1).map(|last| last / BLOCK) else { continue };
            let parent = self.key_before(seq, index);
            let own = &tokens[index * BLOCK..position];
            let snapshot = self.snapshot_after(parent, own).filter(|(_, fill)| *fill == own.len());
            let Some((id, _)) = snapshot else { continue };
            let saved = if is_end { self.last_saved(seq, &tokens[..position]) } else { 0 };
            let is_worth = !is_end || position - saved >= WORTH;
            let Some(spill) = &mut self.spill else { return };
            // With no room for it and what leads to it, it would only drive others out.
            let fits = spill.pieces() + index < spill.snapshot().capacity;
            if is_worth && fits && !spill.holds_state(parent.child(own).state()) {
                let own = Tokens::new(own);
                spill.note_state(UnsavedState { id, parent, tokens: own, is_parting: !is_end, done: 0 });
                self.demote_before(seq, &tokens[..saved]);
            }
        }
    }

    /// States at the ends of a sequence's beginnings that are shorter than all of these tokens have had their day.
    fn demote_before(&mut self, seq: SeqId, tokens: &[u32]) {
        let Some(len) = tokens.len().checked_sub(1) else { return };
        for (i, own) in tokens[..len].chunks(BLOCK).enumerate() {
            let parent = self.key_before(seq, i);
            if let Some(spill) = &mut self.spill {
                spill.demote_ends(parent, own);
            }
        }
    }

    fn key_before(&self, seq: SeqId, index: usize) -> Key {
        let keys = &self.sequences[seq.0 as usize].keys;
        index.checked_sub(1).map_or(Key::ROOT, |before| keys[before])
    }

    /// Positions of the longest of a sequence's beginnings whose state the file has.
    fn last_saved(&self, seq: SeqId, tokens: &[u32]) -> usize {
        let Some(spill) = &self.spill else { return 0 };
        let blocks = tokens.chunks(BLOCK).enumerate().rev();
        let mut saved = blocks.filter_map(|(i, own)| {
            let (_, fill) = spill.state_after(self.key_before(seq, i), own, |_| true)?;
            Some(i * BLOCK + fill)
        });
        saved.next().unwrap_or(0)
    }

    /// Queues a piece of the oldest state that the file should have and has not; false if that is busy.
    pub(super) fn save_piece(&mut self) -> bool {
        let (Some(spill), Some(states)) = (&mut self.spill, &self.states) else { return true };
        let Some(next) = spill.next_state() else { return true };
        let is_there = self.tree.node(next.id).is_some_and(|node| next.is_of(node));
        let Some(floats) = states.snapshot_of(next.id, next.tokens.len()).filter(|_| is_there) else {
            spill.drop_state();
            self.lost_states += 1;
            return true;
        };
        match spill.put_piece(floats) {
            Ok(taken) => taken,
            Err(error) => {
                self.give_up(error);
                true
            }
        }
    }

    /// Blocks of the file that a state takes, if layers keep any.
    pub(super) fn state_pieces(&self) -> usize {
        let len = self.states.as_ref().map_or(0, super::States::len);
        spill::count(len, self.geometry.block_stride.max(size_of::<f32>()))
    }
}
