//! The owner's side: opening, and what demands and preloading share.
//!
//! A store has one owner, by `&mut self`: residency, policy and batches are plain data that no other thread
//! sees. Other threads meet it in three places only, the exchange, the slots' words and the meter.

use crate::aligned::AlignedBuf;
use crate::arena::Arena;
use crate::demand::Batch;
use crate::disk::Disk;
use crate::error::StoreError;
use crate::exchange::Exchange;
use crate::key_table::{KeyTable, KeyTableError};
use crate::policy::Lru;
use crate::reader::{Done, Load, Reader, Reading, Work};
use crate::residency::Residency;
use crate::{ExpertKey, Record, RecordDecoder};
use smoe_meter::StoreMeter;
use std::fmt;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Instant;

/// How large a store is and how it reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoreConfig {
    /// Slots in the arena, at least 1. More than there are records are not made.
    pub slots: usize,
    /// Bytes of a slot; rounded up to [`crate::PAGE`].
    pub slot_bytes: usize,
    /// Reader threads, at least 1: reads in flight at once. Two to eight saturate a drive with records of
    /// 2 MB; small records want more.
    pub readers: usize,
    /// Whether the checksum of each record that has one is verified on every read.
    pub verify: bool,
}

impl StoreConfig {
    /// Four readers, checksums verified.
    pub fn new(slots: usize, slot_bytes: usize) -> Self {
        Self { slots, slot_bytes, readers: 4, verify: true }
    }
}

/// A bounded cache of experts over a disk.
pub struct Store {
    pub(crate) records: Arc<[Record]>,
    pub(crate) has_decoder: bool,
    keys: KeyTable,
    pub(crate) residency: Residency,
    pub(crate) batch: Batch,
    /// Loads submitted whose result has not been seen, whoever wanted them.
    pub(crate) in_flight: usize,
    /// Work on its way to the exchange, and results on their way from it; empty between calls.
    pub(crate) outbox: Vec<Work>,
    inbox: Vec<Done>,
    disk: Arc<dyn Disk>,
    pub(crate) meter: Arc<StoreMeter>,
    pub(crate) readers: Readers,
}

impl Store {
    /// Opens a store over the `records` of `disk`, claims its arena and starts its readers.
    ///
    /// # Errors
    /// A setting of 0; a record that is named twice, does not lie within the disk, is not aligned for it or
    /// does not fit a slot; no memory; no threads.
    pub fn open(
        disk: Arc<dyn Disk>,
        records: Vec<Record>,
        config: StoreConfig,
        decoder: Option<Arc<dyn RecordDecoder>>,
        meter: Arc<StoreMeter>,
    ) -> Result<Self, StoreError> {
        for (setting, value) in
            [("slots", config.slots), ("slot_bytes", config.slot_bytes), ("readers", config.readers)]
        {
            if value == 0 {
                return Err(StoreError::Config { setting });
            }
        }
        for record in &records {
            check_record(&*disk, record, config.slot_bytes, decoder.is_some())?;
        }
        let keys = KeyTable::new(&records).map_err(|error| match error {
            KeyTableError::Duplicate(key) => StoreError::Duplicate(key),
            KeyTableError::TooSparse(index) => {
                bad_record(&*disk, &records[index], "layer or expert id is implausibly large")
            }
        })?;
        let slots = config.slots.min(records.len().max(1));
        let arena = Arena::new(slots, config.slot_bytes)?;
        let residency = Residency::new(arena, records.len(), Box::new(Lru::new(slots)));
        let batch = Batch::new(slots, records.len());
        let records: Arc<[Record]> = records.into();
        let has_decoder = decoder.is_some();
        let reading = Reading {
            disk: disk.clone(),
            records: records.clone(),
            decoder,
            verify: config.verify,
            meter: meter.clone(),
            exchange: Arc::new(Exchange::new(slots)),
        };
        let readers = Readers::start(&reading, config.readers)?;
        let (outbox, inbox) = (Vec::with_capacity(slots), Vec::with_capacity(slots));
        Ok(Self {
            records,
            has_decoder,
            keys,
            residency,
            batch,
            in_flight: 0,
            outbox,
            inbox,
            disk,
            meter,
            readers,
        })
    }

    /// The arena, for devices that wrap it.
    pub fn arena(&self) -> &Arc<Arena> {
        self.residency.arena()
    }

    /// The disk.
    pub fn disk(&self) -> &dyn Disk {
        &*self.disk
    }

    /// The counters.
    pub fn meter(&self) -> &Arc<StoreMeter> {
        &self.meter
    }

    /// Every record, in the order given.
    pub fn records(&self) -> &[Record] {
        &self.records
    }

    pub(crate) fn n_readers(&self) -> usize {
        self.readers.threads.len()
    }

    /// Number of experts in slots.
    pub fn n_resident(&self) -> usize {
        self.residency.n_resident()
    }

    /// The experts in slots, in no particular order.
    pub fn residents(&self) -> impl Iterator<Item = ExpertKey> + '_ {
        self.residency.residents(&self.records)
    }

    pub(crate) fn find(&self, key: ExpertKey) -> Result<u32, StoreError> {
        self.keys.find(key).ok_or(StoreError::UnknownExpert(key))
    }

    pub(crate) fn record(&self, record: u32) -> Record {
        self.records[record as usize]
    }

    /// Wins a slot for an absent record; none while all are leased or loading.
    pub(crate) fn claim(&mut self, record: u32) -> Option<Load> {
        let claim = self.residency.claim(record)?;
        if claim.evicted {
            self.meter.evictions.add(1);
        }
        Some(Load { record, permit: claim.permit })
    }

    /// Sends `loads` loads that stand in the outbox on their way.
    pub(crate) fn submit(&mut self, loads: usize) {
        self.in_flight += loads;
        self.readers.exchange.submit(&mut self.outbox);
    }

    /// Takes in what has arrived, without waiting.
    pub(crate) fn collect(&mut self) {
        self.readers.exchange.collect(&mut self.inbox);
        self.take_in(|_, _| ());
    }

    /// Waits until something arrives, and takes it in. Something must be in flight.
    pub(crate) fn wait(&mut self) {
        self.wait_with(|_, _| ());
    }

    /// As `wait`; what the running batch does not wait for goes to `stray`.
    pub(crate) fn wait_with(&mut self, stray: impl FnMut(Record, Result<(), StoreError>)) {
        assert!(self.in_flight > 0, "waited for nothing");
        let start = Instant::now();
        self.readers.exchange.wait(&mut self.inbox);
        self.meter.wait_ns.add_time(start.elapsed());
        self.take_in(stray);
    }

    fn take_in(&mut self, mut stray: impl FnMut(Record, Result<(), StoreError>)) {
        let Self { records, residency, batch, in_flight, inbox, .. } = self;
        for Done { record: index, outcome } in inbox.drain(..) {
            *in_flight -= 1;
            let record = records[index as usize];
            match &outcome {
                Ok(()) => residency.arrived(index),
                Err(_) => residency.failed(index),
            }
            if batch.waits_for(index) {
                // Leased at once, so that no later read of the batch evicts what was not yet handed out.
                batch.arrived(outcome.map(|()| residency.lease(index, record)));
            } else {
                stray(record, outcome);
            }
        }
    }

    /// Leaves the batch that is running: what is queued is taken back, what a reader has begun completes
    /// into the cache, and leases that were not handed out are dropped.
    pub(crate) fn abandon_batch(&mut self) {
        if self.batch.remaining() > 0 {
            self.readers.exchange.cancel(&mut self.outbox);
        }
        let Self { residency, in_flight, outbox, .. } = self;
        let mut give_up = |Load { record, permit }| {
            drop(permit);
            residency.failed(record);
            *in_flight -= 1;
        };
        for work in outbox.drain(..) {
            match work {
                Work::Record(load) => give_up(load),
                // Of a preload that was left by unwinding.
                Work::Run(loads) => loads.into_iter().for_each(&mut give_up),
            }
        }
        self.batch.clear();
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store")
            .field("disk", &self.disk.name())
            .field("records", &self.records.len())
            .field("resident", &self.n_resident())
            .field("in_flight", &self.in_flight)
            .field("arena", self.residency.arena())
            .finish_non_exhaustive()
    }
}

/// The reader threads, joined on drop.
pub(crate) struct Readers {
    pub(crate) exchange: Arc<Exchange<Work, Done>>,
    threads: Vec<JoinHandle<()>>,
}

impl Readers {
    fn start(reading: &Reading, count: usize) -> Result<Self, StoreError> {
        let longest = reading.records.iter().map(|record| record.len).max().unwrap_or(0);
        let staging_bytes = if reading.decoder.is_some() { longest as usize } else { 0 };
        // Made first, so that the threads that did start are joined if a later one does not.
        let mut readers = Self { exchange: reading.exchange.clone(), threads: Vec::with_capacity(count) };
        for number in 0..count {
            let staging = AlignedBuf::zeroed(staging_bytes)?;
            let reader = Reader { reading: reading.clone(), staging };
            let thread = thread::Builder::new().name(format!("smoe-reader-{number}"));
            readers.threads.push(thread.spawn(move || reader.run()).map_err(StoreError::Spawn)?);
        }
        Ok(readers)
    }
}

impl Drop for Readers {
    fn drop(&mut self) {
        self.exchange.close();
        for thread in self.threads.drain(..) {
            // A reader catches the panics of its work; if one died all the same there is nothing to add here.
            let _ = thread.join();
        }
    }
}

fn bad_record(disk: &dyn Disk, record: &Record, why: &'static str) -> StoreError {
    StoreError::BadRecord { file: disk.name().to_owned(), offset: record.offset, key: record.key, why }
}

fn check_record(
    disk: &dyn Disk,
    record: &Record,
    slot_bytes: usize,
    has_decoder: bool,
) -> Result<(), StoreError> {
    let Record { key, offset, len, slot_len, .. } = *record;
    let bad = |why| Err(bad_record(disk, record, why));
    if len == 0 || slot_len == 0 {
        return bad("empty record");
    }
    let alignment = disk.direct().alignment() as u64;
    if !offset.is_multiple_of(alignment) || !u64::from(len).is_multiple_of(alignment) {
        return bad("offset or length is not aligned for direct I/O; open the file buffered");
    }
    if !has_decoder && slot_len > len {
        return bad("shows more bytes than it has");
    }
    let Some(end) = offset.checked_add(u64::from(len)) else { return bad("ends beyond any file") };
    if end > disk.len() {
        return Err(StoreError::Truncated {
            file: disk.name().to_owned(),
            offset,
            key,
            expected: end,
            found: disk.len(),
        });
    }
    let expected = if has_decoder { slot_len } else { len } as usize;
    if expected > slot_bytes {
        return Err(StoreError::SlotTooSmall { key, expected, found: slot_bytes });
    }
    Ok(())
}
