//! From (layer, expert) to record number, in two array look-ups.

use crate::{ExpertKey, Record};

/// Largest table, in cells of 4 bytes. Real models need some ten thousand; a table of nonsense ends here.
const MAX_CELLS: usize = 1 << 22;

const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug, Default)]
struct Layer {
    start: usize,
    experts: usize,
}

/// Why a table could not be built.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum KeyTableError {
    /// Two records of one expert.
    Duplicate(ExpertKey),
    /// An id so large that the dense table would not be.
    TooSparse(usize),
}

/// A dense table per layer.
#[derive(Debug)]
pub(crate) struct KeyTable {
    layers: Vec<Layer>,
    cells: Vec<u32>,
}

impl KeyTable {
    pub(crate) fn new(records: &[Record]) -> Result<Self, KeyTableError> {
        let mut layers: Vec<Layer> = Vec::new();
        let mut cells = 0_usize;
        for (index, Record { key, .. }) in records.iter().enumerate() {
            let (layer, experts) = (key.layer as usize, key.expert as usize + 1);
            if layer >= MAX_CELLS || experts > MAX_CELLS {
                return Err(KeyTableError::TooSparse(index));
            }
            if layer >= layers.len() {
                layers.resize(layer + 1, Layer::default());
            }
            let grown = experts.saturating_sub(layers[layer].experts);
            layers[layer].experts += grown;
            cells += grown;
            if cells > MAX_CELLS {
                return Err(KeyTableError::TooSparse(index));
            }
        }
        let mut start = 0;
        for layer in &mut layers {
            layer.start = start;
            start += layer.experts;
        }
        let mut table = Self { layers, cells: vec![NONE; cells] };
        for (index, Record { key, .. }) in records.iter().enumerate() {
            let cell = &mut table.cells[table.layers[key.layer as usize].start + key.expert as usize];
            if *cell != NONE {
                return Err(KeyTableError::Duplicate(*key));
            }
            *cell = index as u32;
        }
        Ok(table)
    }

    pub(crate) fn find(&self, key: ExpertKey) -> Option<u32> {
        let layer = self.layers.get(key.layer as usize)?;
        let expert = key.expert as usize;
        let index = *(expert < layer.experts).then(|| &self.cells[layer.start + expert])?;
        (index != NONE).then_some(index)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn record(layer: u32, expert: u32) -> Record {
        Record { key: ExpertKey { layer, expert }, offset: 0, len: 0, slot_len: 0, crc32c: None }
    }

    #[test]
    fn finds_what_is_there_and_nothing_else() {
        let records = [record(3, 1), record(1, 0), record(3, 4), record(0, 2)];
        let table = KeyTable::new(&records).unwrap();
        for layer in 0..6 {
            for expert in 0..7 {
                let key = ExpertKey { layer, expert };
                let expected = records.iter().position(|r| r.key == key).map(|i| i as u32);
                assert_eq!(table.find(key), expected, "{key}");
            }
        }
        assert_eq!(table.find(ExpertKey { layer: u32::MAX, expert: u32::MAX }), None);
        assert_eq!(KeyTable::new(&[]).unwrap().find(ExpertKey { layer: 0, expert: 0 }), None);
    }

    #[test]
    fn refuses_nonsense() {
        let twice = KeyTable::new(&[record(1, 1), record(0, 0), record(1, 1)]);
        assert_eq!(twice.unwrap_err(), KeyTableError::Duplicate(ExpertKey { layer: 1, expert: 1 }));
        for hostile in [record(u32::MAX, 0), record(0, u32::MAX), record(9, MAX_CELLS as u32)] {
            assert_eq!(KeyTable::new(&[record(0, 0), hostile]).unwrap_err(), KeyTableError::TooSparse(1));
        }
        let creeping: Vec<Record> = (0..20).map(|layer| record(layer, 1 << 18)).collect();
        assert!(matches!(KeyTable::new(&creeping), Err(KeyTableError::TooSparse(_))));
    }
}
