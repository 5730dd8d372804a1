//! What a reader thread does: read, verify, decode, publish, report.
//!
//! A load ends in exactly one report, whatever happens in between: errors are values, and a panic of a disk
//! or a decoder is caught and becomes one.

use crate::aligned::AlignedBuf;
use crate::arena::LoadPermit;
use crate::disk::{Disk, DiskError};
use crate::error::StoreError;
use crate::exchange::{Exchange, Lane};
use crate::{Record, RecordDecoder};
use smoe_format::record_crc;
use smoe_meter::StoreMeter;
use std::any::Any;
use std::io::IoSliceMut;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

/// A record to read into a slot.
pub(crate) struct Load {
    pub(crate) record: u32,
    pub(crate) permit: LoadPermit,
}

/// Most records in one read; far below what a scattered read may have (1024 on Linux).
pub(crate) const RUN_RECORDS: usize = 256;

/// How a load ended. The slot is already Ready or Failed.
pub(crate) struct Done {
    pub(crate) record: u32,
    pub(crate) lane: Lane,
    pub(crate) outcome: Result<(), StoreError>,
}

/// What all readers of a store share.
#[derive(Clone)]
pub(crate) struct Reading {
    pub(crate) disk: Arc<dyn Disk>,
    pub(crate) records: Arc<[Record]>,
    pub(crate) decoder: Option<Arc<dyn RecordDecoder>>,
    pub(crate) verify: bool,
    pub(crate) meter: Arc<StoreMeter>,
    pub(crate) exchange: Arc<Exchange<Load, Done>>,
}

/// One reader.
pub(crate) struct Reader {
    pub(crate) reading: Reading,
    /// Where records land before they are decoded; empty without a decoder.
    pub(crate) staging: AlignedBuf,
}

impl Reader {
    /// Works until the exchange closes.
    pub(crate) fn run(self) {
        let Self { reading, mut staging } = self;
        let mut loads = Vec::with_capacity(RUN_RECORDS);
        let mut ended = None;
        while let Some(lane) = reading.exchange.take_work(ended, &mut loads) {
            if loads.len() == 1 {
                loads.drain(..).for_each(|load| reading.load(load, lane, &mut staging));
            } else {
                reading.sweep(&mut loads, lane, &mut staging);
            }
            ended = Some(lane);
        }
    }
}

impl Reading {
    fn load(&self, mut load: Load, lane: Lane, staging: &mut [u8]) {
        let record = self.records[load.record as usize];
        let slot = load.permit.bytes_mut();
        let outcome = self.guarded(record, || self.fill(record, staging, slot));
        self.settle(load, lane, outcome);
    }

    /// One read for records that lie one after another on disk; record by record if that fails, so that each
    /// demander gets its own error. Without a decoder only.
    fn sweep(&self, loads: &mut Vec<Load>, lane: Lane, staging: &mut [u8]) {
        let Some(first) = loads.first().map(|load| self.records[load.record as usize]) else { return };
        let swept = self.guarded(first, || self.read_run(first, loads));
        for mut load in loads.drain(..) {
            if swept.is_err() {
                self.load(load, lane, staging);
                continue;
            }
            let record = self.records[load.record as usize];
            let raw = &load.permit.bytes_mut()[..record.len as usize];
            let outcome = self.guarded(record, || self.check(record, raw));
            self.settle(load, lane, outcome);
        }
    }

    /// Reads one record into its slot, by way of `staging` if it is decoded.
    fn fill(&self, record: Record, staging: &mut [u8], slot: &mut [u8]) -> Result<(), StoreError> {
        let len = record.len as usize;
        let Some(decoder) = &self.decoder else {
            self.read(record, &mut slot[..len])?;
            return self.check(record, &slot[..len]);
        };
        self.read(record, &mut staging[..len])?;
        self.check(record, &staging[..len])?;
        let (start, slot) = (Instant::now(), &mut slot[..record.slot_len as usize]);
        let decoded = decoder.decode(record.key, &staging[..len + decoder.slack()], slot);
        self.meter.decode_ns.add_time(start.elapsed());
        self.meter.decoded_bytes.add(slot.len() as u64);
        decoded.map_err(|why| {
            self.meter.decode_errors.add(1);
            let (file, offset, key) = self.whereabouts(record);
            StoreError::Decode { file, offset, key, why }
        })
    }

    fn read(&self, record: Record, raw: &mut [u8]) -> Result<(), StoreError> {
        let len = raw.len();
        self.timed(record, len, || self.disk.read_exact_at(record.offset, raw))
    }

    fn read_run(&self, first: Record, loads: &mut [Load]) -> Result<(), StoreError> {
        // On the stack: a vector would be an allocation a read.
        let mut slots: [IoSliceMut<'_>; RUN_RECORDS] = std::array::from_fn(|_| IoSliceMut::new(&mut []));
        let count = loads.len();
        for (slot, load) in slots.iter_mut().zip(loads) {
            let len = self.records[load.record as usize].len as usize;
            *slot = IoSliceMut::new(&mut load.permit.bytes_mut()[..len]);
        }
        let slots = &mut slots[..count];
        let len = slots.iter().map(|slot| slot.len()).sum();
        self.timed(first, len, || self.disk.read_exact_vectored_at(first.offset, slots))
    }

    fn timed(
        &self,
        record: Record,
        len: usize,
        read: impl FnOnce() -> Result<(), DiskError>,
    ) -> Result<(), StoreError> {
        let start = Instant::now();
        let busy = self.meter.busy.begin();
        let result = read();
        drop(busy);
        self.meter.read_ns.add_time(start.elapsed());
        match result {
            Ok(()) => {
                self.meter.reads.add(1);
                self.meter.disk_bytes.add(len as u64);
                Ok(())
            }
            Err(source) => {
                self.meter.read_errors.add(1);
                Err(StoreError::Read { key: record.key, offset: record.offset, source: Box::new(source) })
            }
        }
    }

    fn check(&self, record: Record, raw: &[u8]) -> Result<(), StoreError> {
        let Some(expected) = record.crc32c.filter(|_| self.verify) else { return Ok(()) };
        let start = Instant::now();
        let found = record_crc(record.key, raw);
        self.meter.check_ns.add_time(start.elapsed());
        if found == expected {
            return Ok(());
        }
        self.meter.checksum_errors.add(1);
        let (file, offset, key) = self.whereabouts(record);
        Err(StoreError::Checksum { file, offset, key, expected, found })
    }

    /// Runs `work`; a panic in it is an error about `record`.
    fn guarded(
        &self,
        record: Record,
        work: impl FnOnce() -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        // Unwind safety: after a panic the slot is failed and its bytes are never shown; staging is
        // overwritten before it is read again.
        catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
            let (file, offset, key) = self.whereabouts(record);
            Err(StoreError::ReaderPanicked { file, offset, key, message: panic_message(&*panic) })
        })
    }

    fn settle(&self, load: Load, lane: Lane, outcome: Result<(), StoreError>) {
        let Load { record, permit } = load;
        match outcome {
            Ok(()) => permit.publish(),
            Err(_) => drop(permit),
        }
        self.exchange.finish(Done { record, lane, outcome });
    }

    fn whereabouts(&self, record: Record) -> (std::path::PathBuf, u64, smoe_format::ExpertKey) {
        (self.disk.name().to_owned(), record.offset, record.key)
    }
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message").to_owned()
}
