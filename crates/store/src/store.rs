//! The owner's side: opening, and what demands and preloading share.
//!
//! A store has one owner, by `&mut self`: residency, policy and batches are plain data that no other thread
//! sees. Other threads meet it in three places only, the exchange, the slots' words and the meter.

use crate::ahead::Ahead;
use crate::aligned::AlignedBuf;
use crate::arena::{Arena, LentArena, LoadPermit};
use crate::demand::Batch;
use crate::disk::Disk;
use crate::error::StoreError;
use crate::exchange::{Bounds, Decoding, Exchange, Lane, Piece};
use crate::key_table::{KeyTable, KeyTableError};
use crate::policy::PolicyKind;
use crate::reader::{Done, Load, Queues, RUN_RECORDS, Reading};
use crate::residency::Residency;
use crate::staging::Staging;
use crate::{ExpertKey, Record, RecordDecoder};
use smoe_meter::StoreMeter;
use std::fmt;
use std::num::NonZero;
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
    /// Reader threads, at least 1: reads in flight at once, or fewer where records are decoded ([`decoded_at_once`]). Two to
    /// eight saturate a drive with records of 2 MB; small records want more.
    pub readers: usize,
    /// Most readers that are at low-priority reads at once, so that new demand finds a free one. None: half of
    /// them. At least 1 in any case.
    pub low_running: Option<usize>,
    /// Largest read of several records that lie one after another, in bytes. Records of 2 MiB and more go one by
    /// one whatever this is; 0: all do.
    pub run_bytes: u64,
    /// Slots that [`Store::set_limit`] leaves in any case, at least 1.
    pub floor: usize,
    /// Whom to evict.
    pub policy: PolicyKind,
    /// Whether the checksum of each record that has one is verified on every read.
    pub verify: bool,
}

impl StoreConfig {
    /// Four readers, two of them for low priority, runs of 4 MiB, no floor, LRU, checksums verified.
    pub fn new(slots: usize, slot_bytes: usize) -> Self {
        Self {
            slots,
            slot_bytes,
            readers: 4,
            low_running: None,
            run_bytes: 4 << 20,
            floor: 1,
            policy: PolicyKind::Lru,
            verify: true,
        }
    }
}

/// Records of this size and more are read one by one: they saturate a drive as they are, and the owner has the
/// first of them sooner.
const LARGE_RECORD: u32 = 2 << 20;

/// Bytes of demanded reads that are under way at once where they are decoded; enough for a drive, and what lands last
/// is decoded while it idles: EXP-STORE-17.
const DECODED_AT_ONCE: u64 = 3 << 20;

/// Demanded reads of `longest` bytes, or less, that are under way at once where they are decoded: two at least.
#[must_use]
pub fn decoded_at_once(longest: u64) -> usize {
    (DECODED_AT_ONCE.div_ceil(longest.max(1)) as usize).max(2)
}

/// The bytes of the buffers in which so many readers' records, `longest` bytes with all that is wanted behind, land
/// before they are decoded.
#[must_use]
pub fn staging_bytes(readers: usize, longest: u64) -> u64 {
    AlignedBuf::side_by_side_bytes(readers, longest as usize).map_or(u64::MAX, |bytes| bytes as u64)
}

/// A bounded cache of experts over a disk.
pub struct Store {
    pub(crate) records: Arc<[Record]>,
    pub(crate) has_decoder: bool,
    keys: KeyTable,
    pub(crate) residency: Residency,
    pub(crate) batch: Batch,
    pub(crate) ahead: Ahead,
    /// Loads submitted whose result has not been seen, whoever wanted them; and those of them at low priority.
    pub(crate) in_flight: usize,
    low_in_flight: usize,
    /// Work on its way to the exchange, and results on their way from it; empty between calls.
    pub(crate) outbox: Vec<Piece<Load>>,
    inbox: Vec<Done>,
    run_bytes: u64,
    floor: usize,
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
        let policy = config.policy.build(slots, records.len());
        let residency = Residency::new(arena, records.len(), policy, meter.clone());
        let (batch, ahead) = (Batch::new(records.len()), Ahead::new(records.len()));
        let low_running = config.low_running.unwrap_or(config.readers / 2).max(1);
        let records: Arc<[Record]> = records.into();
        let has_decoder = decoder.is_some();
        let longest = records.iter().map(|record| record.len).max().unwrap_or(0);
        let decoding = has_decoder.then(|| Decoding {
            reads: decoded_at_once(u64::from(longest)),
            decoders: thread::available_parallelism().map_or(1, NonZero::get),
        });
        let buffers = buffers(longest as usize, config.readers, decoder.as_deref())?;
        let reading = Reading {
            disk: disk.clone(),
            records: records.clone(),
            decoder,
            verify: config.verify,
            meter: meter.clone(),
            exchange: Arc::new(Exchange::new(slots, buffers, Bounds { low_running, decoding })),
        };
        let readers = Readers::start(&reading, config.readers)?;
        let (outbox, inbox) = (Vec::with_capacity(slots), Vec::with_capacity(slots));
        Ok(Self {
            records,
            has_decoder,
            keys,
            residency,
            batch,
            ahead,
            in_flight: 0,
            low_in_flight: 0,
            outbox,
            inbox,
            run_bytes: config.run_bytes,
            floor: config.floor.clamp(1, slots),
            disk,
            meter,
            readers,
        })
    }

    /// The arena, for devices that wrap it.
    pub fn arena(&self) -> &Arc<Arena> {
        self.residency.arena()
    }

    /// Lends the arena's memory to a device. While it is lent slots keep their pages, also those beyond
    /// [`limit`](Store::limit).
    pub fn lend(&mut self) -> LentArena {
        self.residency.lend()
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

    /// Reads that are under way or queued, as far as the owner has taken notice.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// The experts in slots, in no particular order.
    pub fn residents(&self) -> impl Iterator<Item = ExpertKey> + '_ {
        self.residency.residents(&self.records)
    }

    /// Tells of every expert whether it is in a slot, in the order of [`records`](Store::records).
    pub fn residency(&self, out: &mut dyn FnMut(ExpertKey, bool)) {
        for (index, record) in (0..).zip(&*self.records) {
            out(record.key, self.residency.is_resident(index));
        }
    }

    /// Slots that the store may use; all of the arena's at first.
    pub fn limit(&self) -> usize {
        self.residency.limit()
    }

    /// Slots that are in use or may be: more than [`limit`](Store::limit) while some beyond it have not come back.
    pub fn n_slots(&self) -> usize {
        self.residency.n_slots()
    }

    /// Changes the number of slots in use, between [`StoreConfig::floor`] and the arena's.
    ///
    /// Slots beyond it are emptied, those that would be evicted first before others, and their pages given back to
    /// the system; what is leased or being read at the moment follows as it comes back, at the latest with the
    /// next demand that looks for a slot. A slot that is emptied while the arena is [lent](Store::lend) keeps its
    /// pages. Raised again, slots are there at once and cost memory as they are filled.
    pub fn set_limit(&mut self, slots: usize) {
        self.collect();
        self.residency.set_limit(slots.clamp(self.floor, self.arena().n_slots()));
    }

    pub(crate) fn find(&self, key: ExpertKey) -> Result<u32, StoreError> {
        self.keys.find(key).ok_or(StoreError::UnknownExpert(key))
    }

    pub(crate) fn record(&self, record: u32) -> Record {
        self.records[record as usize]
    }

    /// Pieces of work that keep all readers busy: one being read, one to go on with.
    pub(crate) fn enough_work(&self) -> usize {
        2 * self.n_readers()
    }

    /// Sends what stands in the outbox on its way. Neighbours on disk go together as long as enough pieces remain.
    pub(crate) fn submit(&mut self, lane: Lane) {
        let most = (self.outbox.len() / self.enough_work()).min(RUN_RECORDS);
        // A decoder works record by record, through the reader's staging buffer.
        let most = if self.has_decoder { 1 } else { most };
        let (mut end, mut bytes, mut count) = (None, 0, 0);
        for piece in &mut self.outbox {
            let Record { offset, len, .. } = self.records[piece.work.record as usize];
            let is_small = len < LARGE_RECORD;
            bytes += u64::from(len);
            count += 1;
            piece.joined = is_small && end == Some(offset) && bytes <= self.run_bytes && count <= most;
            if !piece.joined {
                (bytes, count) = (u64::from(len), 1);
            }
            end = is_small.then_some(offset + u64::from(len));
        }
        self.send(lane);
    }

    /// As `submit`, joined as they are.
    pub(crate) fn send(&mut self, lane: Lane) {
        if self.outbox.is_empty() {
            return;
        }
        self.in_flight += self.outbox.len();
        if lane == Lane::Low {
            self.low_in_flight += self.outbox.len();
        }
        self.readers.exchange.submit(lane, &mut self.outbox);
    }

    /// Takes in what has arrived, without waiting.
    pub(crate) fn collect(&mut self) {
        self.readers.exchange.collect(&mut self.inbox);
        self.take_in(|_, _| ());
        self.residency.trim();
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
        let Self { records, residency, batch, in_flight, low_in_flight, inbox, meter, .. } = self;
        for Done { record: index, lane, outcome } in inbox.drain(..) {
            *in_flight -= 1;
            let record = records[index as usize];
            match &outcome {
                Ok(()) => {
                    residency.arrived(index);
                    meter.loads.add(1);
                }
                Err(_) => residency.failed(index),
            }
            if lane == Lane::Low {
                *low_in_flight -= 1;
                match &outcome {
                    Ok(()) => {
                        meter.ahead_reads.add(1);
                        meter.ahead_bytes.add(u64::from(record.len));
                    }
                    Err(_) => meter.ahead_errors.add(1),
                }
            }
            match outcome {
                _ if !batch.waits_for(index) => stray(record, outcome),
                Err(_) if lane == Lane::Low => batch.try_again(index),
                // Leased at once, so that no later read of the batch evicts what was not yet handed out.
                _ => batch.arrived(index, outcome.map(|()| residency.lease(index, record))),
            }
        }
    }

    /// Takes back into the outbox what no reader has begun.
    pub(crate) fn take_back(&mut self, lane: Lane) {
        debug_assert!(self.outbox.is_empty(), "the outbox is empty between calls");
        if lane == Lane::Low && self.low_in_flight == 0 {
            return;
        }
        self.readers.exchange.cancel(lane, &mut self.outbox);
        self.in_flight -= self.outbox.len();
        if lane == Lane::Low {
            self.low_in_flight -= self.outbox.len();
        }
    }

    /// Leaves the batch that is running: what is queued is taken back, what a reader has begun completes
    /// into the cache, and leases that were not handed out are dropped.
    pub(crate) fn abandon_batch(&mut self) {
        if self.batch.remaining() > 0 {
            self.take_back(Lane::Demand);
            self.outbox.drain(..).for_each(|piece| piece.work.give_up(&mut self.residency));
        }
        self.meter.demand_hits.add(self.batch.clear() as u64);
    }
}

impl Load {
    /// Ends a load that no reader has begun.
    pub(crate) fn give_up(self, residency: &mut Residency) {
        let Self { record, permit } = self;
        drop(permit);
        residency.failed(record);
    }
}

/// A load, not joined to another.
pub(crate) fn piece(record: u32, permit: LoadPermit) -> Piece<Load> {
    Piece { work: Load { record, permit }, joined: false }
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
    pub(crate) exchange: Arc<Queues>,
    threads: Vec<JoinHandle<()>>,
}

impl Readers {
    fn start(reading: &Reading, count: usize) -> Result<Self, StoreError> {
        // Made first, so that the threads that did start are joined if a later one does not.
        let mut readers = Self { exchange: reading.exchange.clone(), threads: Vec::with_capacity(count) };
        for number in 0..count {
            let reading = reading.clone();
            let thread = thread::Builder::new().name(format!("smoe-reader-{number}"));
            readers.threads.push(thread.spawn(move || reading.run()).map_err(StoreError::Spawn)?);
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

/// Where records land before they are decoded, one for each reader; empty without a decoder.
fn buffers(
    longest: usize,
    readers: usize,
    decoder: Option<&dyn RecordDecoder>,
) -> Result<Vec<Arc<Staging>>, StoreError> {
    let bytes = decoder.map_or(0, |decoder| longest + decoder.slack());
    // In huge pages if they are enough together: a drive's reads gain as much from them as into slots.
    let buffers = AlignedBuf::zeroed_side_by_side(readers, bytes)?;
    Ok(buffers.into_iter().map(|raw| Arc::new(Staging::new(raw))).collect())
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
