//! What the device is told of a step's tokens: their positions, and where the cache has what they see.

use super::GpuBackend;
use crate::backend::Row;
use crate::kv::{BlockCopy, KvCache};

impl GpuBackend {
    /// Tells the device whose tokens the step has.
    pub(super) fn place(&mut self, rows: &[Row], kv: &mut KvCache) {
        self.copy_blocks(kv);
        self.write_rows(rows, kv);
        if let Some(nets) = &mut self.nets {
            nets.place(&self.gpu, rows, kv);
        }
        self.visible = rows.iter().map(|row| row.position as usize + 1).max().unwrap_or(0);
    }

    /// Tells it their positions, and where the blocks of their sessions are.
    pub(super) fn write_rows(&mut self, rows: &[Row], kv: &KvCache) {
        self.table_words.clear();
        self.table_starts.clear();
        for row in rows {
            if self.table_starts.last().is_none_or(|&(seq, _)| seq != row.seq.0) {
                let words = &mut self.table_words;
                let start = words.len() as u32;
                words.extend_from_slice(kv.blocks(row.seq));
                let windowed = words.len() as u32;
                kv.window_table(row.seq).iter().for_each(|table| words.extend_from_slice(table));
                self.table_starts.push((row.seq.0, [start, windowed]));
            }
        }
        let room = self.tables.len() as usize / 4;
        assert!(self.table_words.len() <= room, "{} blocks of {room}", self.table_words.len());
        self.gpu.write(&self.tables, 0, bytemuck::cast_slice(&self.table_words));
        for buffer in &self.rows {
            self.row_words.clear();
            let mut starts = self.table_starts.iter();
            let (mut seq, mut start) = (u32::MAX, [0; 2]);
            for row in rows {
                if row.seq.0 != seq {
                    (seq, start) = starts.next().copied().unwrap_or((row.seq.0, start));
                }
                let window = u32::try_from(buffer.window).unwrap_or(u32::MAX);
                let first = (row.position + 1).saturating_sub(window);
                let start = start[usize::from(buffer.is_windowed)];
                self.row_words.extend([row.position, start, first, 0]);
            }
            self.gpu.write(&buffer.rows, 0, bytemuck::cast_slice(&self.row_words));
        }
    }

    /// Copies what the cache wants copied: a block that goes on from the middle of another, a state. At once, as the cache
    /// takes it for done, whatever becomes of the step.
    pub(super) fn copy_blocks(&mut self, kv: &mut KvCache) {
        let mut any = false;
        let copies: Vec<_> = kv.take_copies().collect();
        for BlockCopy { from, to, is_window } in copies {
            any = true;
            let step = self.recorder.step();
            let len = self.block.len();
            let spec = &self.spec;
            let of_these =
                |layer: &usize| kv.is_windowed(*layer) == is_window && spec.delta_of(*layer).is_none();
            for layer in (0..self.kv.len()).filter(of_these).map(|layer| &self.kv[layer]) {
                let part = |block: u32| layer.part(u64::from(block) * len, len);
                step.copy(&part(from), &self.block);
                step.copy(&self.block, &part(to));
            }
        }
        if let Some(nets) = &self.nets {
            for copy in kv.take_state_copies() {
                any = true;
                nets.copy(self.recorder.step(), copy);
            }
        }
        if any {
            self.submit();
        }
    }
}
