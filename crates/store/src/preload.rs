//! Loading the whole vault, when the arena can hold it.
//!
//! Records that lie one after another are read several at a time, scattered straight into their slots. Nothing
//! is demanded, so no hit or miss is counted.

use crate::error::StoreError;
use crate::reader::Work;
use crate::residency::Place;
use crate::store::Store;

/// Largest read: sequential enough for any drive, and small enough for progress to be smooth.
const RUN_BYTES: u64 = 16 << 20;

/// Most records in a read; far below what one scattered read may have (1024 on Linux).
const RUN_RECORDS: usize = 256;

impl Store {
    /// Makes every expert resident, and calls `progress` with bytes loaded and bytes to load as records arrive.
    ///
    /// # Errors
    /// [`StoreError::TooFewSlots`] if they do not fit. If a record fails, its error, once all reads that were
    /// under way have ended; what arrived stays resident.
    pub fn preload_all(&mut self, mut progress: impl FnMut(u64, u64)) -> Result<(), StoreError> {
        let (expected, found) = (self.records.len(), self.arena().n_slots());
        if found < expected {
            return Err(StoreError::TooFewSlots { expected, found });
        }
        // After this every record is absent or resident, and there is an empty slot for each absent one.
        self.abandon_batch();
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
        absent.sort_unstable_by_key(|&record| self.record(record).offset);
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
        let mut claim = |record| self.claim(record).expect("an empty slot for each absent record");
        let loads: Vec<_> = run.iter().map(|&record| claim(record)).collect();
        // A decoder works record by record, through the reader's staging buffer.
        if self.has_decoder {
            self.outbox.extend(loads.into_iter().map(Work::Record));
        } else {
            self.outbox.push(Work::Run(loads));
        }
        self.submit(run.len());
        run.iter().map(|&record| u64::from(self.record(record).len)).sum()
    }
}
