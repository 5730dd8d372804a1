//! Blocks of sequences: taken as they go on, given back as they end or go back, and which of the others give way.

use super::{BLOCK, KvCache, SeqId};
use crate::EngineError;

impl KvCache {
    /// Makes room for positions `from` to `to`, the sequence holding those before `from`.
    ///
    /// # Errors
    /// If there are not enough blocks; nothing is taken then.
    pub fn reserve(&mut self, seq: SeqId, from: usize, to: usize) -> Result<(), EngineError> {
        let held = self.sequences[seq.0 as usize].blocks.len();
        let missing = to.div_ceil(BLOCK).saturating_sub(held);
        let begun = (to > from && !from.is_multiple_of(BLOCK))
            .then(|| self.sequences[seq.0 as usize].blocks[from / BLOCK]);
        // What only this sequence holds is its own again, and nobody else's to find.
        if let Some(id) = begun.filter(|&id| self.pool.holders(id) == 1) {
            self.unlink(id);
            if let Some(states) = &mut self.states {
                states.write(id, from % BLOCK);
            }
        }
        let shared = begun.is_some_and(|id| self.pool.holders(id) > 1);
        if missing == 0 && !shared {
            return Ok(());
        }
        let windows = self.windows.as_ref().map_or(usize::MAX, |windows| windows.pool.available());
        let available = self.available().min(windows);
        if missing + usize::from(shared) > available {
            return Err(EngineError::ContextFull { needed: to, context: (held + available) * BLOCK });
        }
        if shared {
            self.part_with(seq, from / BLOCK)?;
        }
        for _ in 0..missing {
            self.extend(seq)?;
        }
        Ok(())
    }

    /// A copy of its own, instead of a block that a sequence shares.
    fn part_with(&mut self, seq: SeqId, index: usize) -> Result<(), EngineError> {
        let copy = self.allocate()?;
        let original = std::mem::replace(&mut self.sequences[seq.0 as usize].blocks[index], copy);
        self.copy(original, copy);
        self.release(original);
        if self.windows.is_some() {
            let copy = self.allocate_window()?;
            if let Some(windows) = &mut self.windows {
                let original = windows.replace(seq, index, copy);
                windows.copy(original, copy, &mut self.device_copies);
                windows.let_go(original, true);
            }
        }
        Ok(())
    }

    /// A block more, of each pool.
    pub(super) fn extend(&mut self, seq: SeqId) -> Result<(), EngineError> {
        let block = self.allocate()?;
        self.sequences[seq.0 as usize].blocks.push(block);
        if self.windows.is_some() {
            let block = self.allocate_window()?;
            if let Some(windows) = &mut self.windows {
                windows.push(seq, block);
            }
        }
        Ok(())
    }

    /// Rolls a sequence back to `len` positions, or to the last one before that it can go back to, and says
    /// which; blocks beyond are given back. Pages can go back to any, states to snapshots only, windows to where they are
    /// whole: a few positions, to where the last answer began, and wherever their blocks can still be found.
    pub fn truncate(&mut self, seq: SeqId, len: usize) -> usize {
        let blocks = &self.sequences[seq.0 as usize].blocks;
        let len = match (&mut self.states, &mut self.windows) {
            (Some(states), _) => states.go_back(seq, blocks, len),
            (None, Some(windows)) => windows.go_back(seq, blocks, len),
            (None, None) => len,
        };
        self.give_back(seq, len);
        len
    }

    /// Gives back what a sequence holds beyond `len` positions.
    pub(super) fn give_back(&mut self, seq: SeqId, len: usize) {
        let keep = len.div_ceil(BLOCK);
        // The last first: what comes later in a sequence is the older, and gives way first.
        while self.sequences[seq.0 as usize].blocks.len() > keep
            && let Some(block) = self.sequences[seq.0 as usize].blocks.pop()
        {
            self.release(block);
        }
        if let Some(windows) = &mut self.windows {
            windows.give_back(seq, keep);
        }
        self.sequences[seq.0 as usize].keys.truncate(len / BLOCK);
    }

    /// Blocks that a new sequence could get: free ones, and those that only wait to be found again.
    #[must_use]
    pub fn available(&self) -> usize {
        self.pool.available()
    }

    /// One holder less. Nobody's: free, or cached if it can be found.
    pub(super) fn release(&mut self, id: u32) {
        if self.pool.release(id) && self.tree.node(id).is_none() {
            self.set_free(id);
        }
    }

    pub(super) fn set_free(&mut self, id: u32) {
        self.pool.set_free(id);
        if let Some(states) = &mut self.states {
            states.forget(id);
        }
    }

    /// A block with one holder: a free one, or the cached one that was held longest ago.
    pub(super) fn allocate(&mut self) -> Result<u32, EngineError> {
        let id = match self.pool.take_free() {
            Some(id) => id,
            None => {
                let id = self.oldest(false).ok_or_else(|| self.is_full())?;
                let id = self.make_way(id);
                self.unlink(id);
                if let Some(states) = &mut self.states {
                    states.forget(id);
                }
                id
            }
        };
        self.pool.hold(id);
        Ok(id)
    }

    /// The same of the pool of windowed layers.
    pub(super) fn allocate_window(&mut self) -> Result<u32, EngineError> {
        let free = self.windows.as_mut().and_then(|windows| windows.pool.take_free());
        let id = match free {
            Some(id) => id,
            None => self.window_that_gives_way().ok_or_else(|| self.is_full())?,
        };
        if let Some(windows) = &mut self.windows {
            windows.evict(id);
            windows.pool.hold(id);
        }
        Ok(id)
    }

    fn is_full(&self) -> EngineError {
        let context = self.pool.len() * BLOCK;
        EngineError::ContextFull { needed: context + 1, context }
    }

    /// The block that nobody holds and that was held longest ago; of those that are saved, if asked for.
    pub(super) fn oldest(&self, saved: bool) -> Option<u32> {
        let cached = self.pool.unheld().filter(|(id, _)| !saved || self.is_saved(*id));
        cached.min_by_key(|(_, used)| *used).map(|(id, _)| id)
    }
}
