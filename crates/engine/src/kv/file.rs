//! The cache and its file: what is written when, and who waits for it how long. Which states are: `stateful.rs`.

use std::time::{Duration, Instant};

use smoe_store::{BlockFile, BlockFileError};

use super::prefix::Key;
use super::spill::{self, QUEUE, Spill};
use super::{KvCache, Opened, SpillConfig, WAIT};
use crate::EngineError;

impl KvCache {
    /// Keeps complete blocks in a file too, and finds those that are there. If it cannot be used nothing has changed,
    /// and the cache goes on without.
    ///
    /// # Errors
    /// As [`smoe_store::BlockFile::open`].
    pub fn spill_to(&mut self, config: &SpillConfig, model: [u8; 32]) -> Result<Opened, EngineError> {
        if self.is_on_device() {
            let what = "a file of the KV cache while the cache is on a GPU".to_owned();
            return Err(EngineError::Unsupported { what });
        }
        let settings = self.file_settings(config.max_bytes, model);
        // A state, and the block that it belongs to; with less, nothing of the file would be of use.
        let needed = settings.bytes_of(self.state_pieces() as u32 + 1)?;
        if self.states.is_some() && config.max_bytes < needed {
            return Err(EngineError::SpillTooSmall { max_bytes: config.max_bytes, needed });
        }
        let (file, opened) = BlockFile::open(&config.path, &settings)?;
        self.spill = Some(self.spill_on(file)?);
        Ok(opened)
    }

    /// A block of the file is one of each pool.
    pub(super) fn file_settings(&self, max_bytes: u64, model: [u8; 32]) -> smoe_store::BlockFileConfig {
        let mut layout = format!("{:?} {:?}", self.kv_type, self.geometry);
        let mut bytes = self.geometry.block_stride;
        if let Some(windows) = &self.windows {
            layout.extend([" beside ", &format!("{:?}", windows.geometry)]);
            bytes += windows.geometry.block_stride;
        }
        if let Some(states) = &self.states {
            layout.extend([" with states of ", &states.len().to_string()]);
        }
        spill::settings(max_bytes, bytes, spill::fingerprint(model, &layout))
    }

    /// What keeps this cache's blocks in an open file.
    ///
    /// # Errors
    /// If there is no memory.
    pub(super) fn spill_on(&self, file: BlockFile) -> Result<Spill, EngineError> {
        let (spill, stride) = (Spill::new(file), self.geometry.block_stride);
        Ok(match (&self.states, &self.windows) {
            (Some(states), _) => spill.with_states(states.len(), stride)?,
            (None, Some(windows)) => spill.with_windows(stride, windows.geometry.block_stride)?,
            (None, None) => spill,
        })
    }

    /// Queues at most `most` blocks that the file does not have yet, or pieces of states, by turns if it lacks both; as far
    /// as it takes them without waiting. True if more are left.
    pub fn save(&mut self, most: usize) -> bool {
        self.look_at_file();
        for n in 0..=most {
            let Some(spill) = &self.spill else { return false };
            let (has_blocks, has_pieces) = (spill.unsaved().len() > 0, spill.unsaved_pieces() > 0);
            if !has_blocks && !has_pieces {
                return false;
            }
            let takes_piece = has_pieces && (!has_blocks || n % 2 == 1);
            if n == most || !(if takes_piece { self.save_piece() } else { self.save_block() }) {
                return true;
            }
        }
        true
    }

    /// Queues the oldest block that the file does not have yet; false if that is busy.
    fn save_block(&mut self) -> bool {
        let Some((id, key)) = self.spill.as_mut().and_then(Spill::next_unsaved) else { return true };
        let is_done = !self.is_unsaved(id, key) || self.write(id);
        if let (false, Some(spill)) = (is_done, &mut self.spill) {
            spill.put_back(id, key);
        }
        is_done
    }

    /// A new step may wait for the file anew.
    pub fn end_step(&mut self) {
        self.patience = WAIT;
    }

    /// Waits until the file has written something, or has nothing to write, but not for longer than `limit`; false if
    /// that passed or there is no file.
    pub fn wait_for_file(&mut self, limit: Duration) -> bool {
        self.spill.as_mut().is_some_and(|spill| spill.wait(limit))
    }

    /// Brings what can be found to the file, the oldest first, and waits until the drive has it; but not for longer than
    /// `limit`. Returns how many blocks, and pieces of states, the file may lack: it is then closed, and not used any more.
    pub fn flush(&mut self, limit: Duration) -> usize {
        let start = Instant::now();
        let left = || limit.saturating_sub(start.elapsed());
        while self.save(usize::MAX) && left() > Duration::ZERO && self.wait_for_file(left()) {}
        let Some(mut spill) = self.spill.take() else { return 0 };
        let blocks = spill.unsaved().filter(|&(id, key)| self.is_unsaved(id, key)).count();
        let unsaved = blocks + spill.unsaved_pieces();
        match spill.flush_within(if unsaved == 0 { left() } else { Duration::ZERO }) {
            Ok(true) => {
                self.spill = Some(spill);
                self.look_at_file();
                0
            }
            Ok(false) => {
                let lacks = unsaved + spill.snapshot().writing;
                self.file_failures += spill.failures();
                spill.abandon();
                lacks
            }
            Err(error) => {
                self.spill = Some(spill);
                self.give_up(error);
                unsaved
            }
        }
    }

    /// Counts of the file, if there is one.
    #[must_use]
    pub fn spilled(&self) -> Option<smoe_store::BlockFileSnapshot> {
        self.spill.as_ref().map(Spill::snapshot)
    }

    /// Whether the file has a block.
    pub(super) fn is_saved(&self, id: u32) -> bool {
        self.tree.node(id).is_some_and(|node| node.saved)
    }

    fn is_unsaved(&self, id: u32, key: Key) -> bool {
        self.tree.node(id).is_some_and(|node| node.key == key && !node.saved)
    }

    /// Queues a block for the file; false if that is busy.
    fn write(&mut self, id: u32) -> bool {
        let (Some(spill), Some(node)) = (&mut self.spill, self.tree.node_mut(id)) else { return true };
        let stride = self.geometry.block_stride;
        if !node.saved {
            let own = &self.memory[id as usize * stride..(id as usize + 1) * stride];
            let window = self.windows.as_ref().and_then(|windows| Some(windows.bytes(windows.of(id)?)));
            match spill.put(node, own, window) {
                Ok(taken) => node.saved = taken,
                Err(error) => {
                    self.give_up(error);
                    return true;
                }
            }
        }
        node.saved
    }

    /// Notes what has failed in the file: it is told once, and a file that only fails is given up.
    fn look_at_file(&mut self) {
        let Some(spill) = &mut self.spill else { return };
        let Some((error, only_fails)) = spill.failed() else { return };
        if only_fails {
            self.give_up(error);
        } else if !std::mem::replace(&mut self.told, true) {
            self.warnings.push(error.into());
        }
    }

    pub(super) fn give_up(&mut self, source: BlockFileError) {
        let Some(spill) = self.spill.take() else { return };
        let failures = spill.failures().max(1);
        spill.abandon();
        self.file_failures += failures;
        self.warnings.push(EngineError::SpillGivenUp { failures, source });
    }

    /// Which block gives way: the `oldest`, once the file has it; while that is busy another that it has. If there is
    /// none the file is waited for, as long as the step may; then the block is lost.
    pub(super) fn make_way(&mut self, oldest: u32) -> u32 {
        if self.write(oldest) {
            return oldest;
        }
        if let Some(saved) = self.oldest(true) {
            return saved;
        }
        self.write_or_lose(oldest);
        oldest
    }

    /// The same of a window's block, if there is one that nobody holds.
    pub(super) fn window_that_gives_way(&mut self) -> Option<u32> {
        let (window, id) = self.windows.as_ref()?.oldest(|_| true)?;
        if !self.write(id) {
            if let Some((saved, _)) = self.windows.as_ref()?.oldest(|id| self.is_saved(id)) {
                return Some(saved);
            }
            self.write_or_lose(id);
        }
        Some(window)
    }

    /// Waits until the file has a block, as long as the step may.
    fn write_or_lose(&mut self, id: u32) {
        // Each write that ends frees a buffer, but not always the place that this block needs.
        for _ in 0..=QUEUE {
            let start = Instant::now();
            let has_ended = self.wait_for_file(self.patience);
            self.patience = self.patience.saturating_sub(start.elapsed());
            if self.write(id) {
                return;
            }
            if !has_ended {
                break;
            }
        }
        self.lost += 1;
    }
}
