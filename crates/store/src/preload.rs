//! Loading the whole vault, when the arena can hold it.
//!
//! Records that lie one after another are read several at a time, scattered straight into their slots. Nothing
//! is demanded, so no hit or miss is counted.

use crate::error::StoreError;
use crate::exchange::Lane;
use crate::reader::RUN_RECORDS;
use crate::residency::Place;
use crate::store::{Store, piece};

/// Largest read: sequential enough for any drive, and small enough for progress to be smooth.
const RUN_BYTES: u64 = 16 << 20;

impl Store {
    /// Makes every expert resident, and calls `progress` with bytes loaded and bytes to load as records arrive.
    ///
    /// # Errors
    /// [`StoreError::TooFewSlots`] if they do not fit. If a record fails, its error, once all reads that were
    /// under way have ended; what arrived stays resident.
    pub fn preload_all(&mut self, mut progress: impl FnMut(u64, u64)) -> Result<(), StoreError> {
        let (expected, found) = (self.records.len(), self.limit());
        if found < expected {
            return Err(StoreError::TooFewSlots { expected, found });
        }
        // After this every record is absent or resident, and there is an empty slot for each absent one.
        self.abandon_batch();
        self.withdraw();
        while self.in_flight > 0 {
            self.wait();
        }
        let runs = self.absent_runs();
        let total = runs.iter().flatten().map(|&record| u64::from(self.record(record).len)).sum();
        let mut runs = runs.into_iter();
        // Two runs for each reader: one being read, one to go on with.
        let window = 2 * RUN_BYTES * self.n_readers() as u64;
        let (mut submitted, mut settled, mut loaded) = (0, 0, 0);
        let mut failure = None;
        loop {
            while failure.is_none() && submitted < settled + window {
                let Some(run) = runs.next() else { break };
                submitted += self.submit_run(&run);
            }
            if self.in_flight == 0 {
                return failure.map_or(Ok(()), Err);
            }
            let before = loaded;
            self.wait_with(|record, outcome| {
                settled += u64::from(record.len);
                match outcome {
                    Ok(()) => loaded += u64::from(record.len),
                    Err(error) => {
                        failure.get_or_insert(error);
                    }
                }
            });
            // The caller's code runs when the books are in order: should it unwind, the store stays whole.
            if loaded > before {
                progress(loaded, total);
            }
        }
    }

    /// Absent records in the order of the disk, in runs that one read can bring.
    fn absent_runs(&self) -> Vec<Vec<u32>> {
        let mut absent: Vec<u32> = (0..self.records.len() as u32)
            .filter(|&record| self.residency.place(record) == Place::Absent)
            .collect();
        // By layer first: layers may share records on disk, which would keep neighbours apart.
        absent.sort_unstable_by_key(|&record| (self.record(record).key.layer, self.record(record).offset));
        let mut runs: Vec<Vec<u32>> = Vec::new();
        let (mut end, mut bytes) = (0, 0);
        for index in absent {
            let record = self.record(index);
            let len = u64::from(record.len);
            match runs.last_mut() {
                Some(run)
                    if !self.has_decoder
                        && record.offset == end
                        && bytes + len <= RUN_BYTES
                        && run.len() < RUN_RECORDS =>
                {
                    run.push(index);
                    bytes += len;
                }
                _ => {
                    runs.push(vec![index]);
                    bytes = len;
                }
            }
            end = record.offset + len;
        }
        runs
    }

    /// Sends one run off; returns its bytes.
    fn submit_run(&mut self, run: &[u32]) -> u64 {
        for (place, &record) in run.iter().enumerate() {
            let permit = self.residency.claim(record, 0).expect("an empty slot for each absent record");
            let mut piece = piece(record, permit);
            piece.joined = place > 0;
            self.outbox.push(piece);
        }
        self.send(Lane::Demand);
        run.iter().map(|&record| u64::from(self.record(record).len)).sum()
    }
}
