//! What a reader thread does: read, verify, publish, report; or read, and verify and decode what it or another has read.
//!
//! A load ends in exactly one report, whatever happens in between: errors are values, and a panic of a disk
//! or a decoder is caught and becomes one.

use crate::arena::LoadPermit;
use crate::disk::{Disk, DiskError};
use crate::error::StoreError;
use crate::exchange::{Ended, Exchange, Lane, Task};
use crate::staging::{Cuts, Job, Staging};
use crate::{Record, RecordDecoder};
use smoe_format::crc::crc32c;
use smoe_format::{record_crc, record_crc_start};
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
    pub(crate) exchange: Arc<Queues>,
}

/// The queues, with the buffers where records land before they are decoded; empty ones without a decoder.
pub(crate) type Queues = Exchange<Load, Arc<Staging>, Done>;

impl Reading {
    /// Works until the exchange closes: what a reader thread does.
    pub(crate) fn run(&self) {
        let mut loads = Vec::with_capacity(RUN_RECORDS);
        let mut ended = None;
        while let Some(task) = self.exchange.take_work(ended, &mut loads) {
            ended = Some(match (task, self.decoder.as_deref()) {
                (Task::Read(lane, staging), None) => {
                    if loads.len() == 1 {
                        loads.drain(..).for_each(|load| self.load(load, lane));
                    } else {
                        self.sweep(&mut loads, lane);
                    }
                    Ended::Read(lane, staging)
                }
                (Task::Read(lane, staging), Some(decoder)) => self.land(&mut loads, lane, staging, decoder),
                (Task::Decode(staging, part), decoder) => {
                    let is_last = self.decode(&staging, part, decoder);
                    Ended::Decoded(is_last.then_some(staging))
                }
            });
        }
    }

    /// Reads a record into its slot.
    fn load(&self, mut load: Load, lane: Lane) {
        let record = self.records[load.record as usize];
        let raw = &mut load.permit.bytes_mut()[..record.len as usize];
        let outcome = self.guarded(record, || {
            self.read(record, raw)?;
            self.check(record, raw)
        });
        self.settle(load, lane, outcome);
    }

    /// Reads a record that is to be decoded.
    fn land(
        &self,
        loads: &mut Vec<Load>,
        lane: Lane,
        staging: Arc<Staging>,
        decoder: &dyn RecordDecoder,
    ) -> Ended<Arc<Staging>> {
        debug_assert!(loads.len() <= 1, "a decoder works record by record");
        let Some(load) = loads.pop() else { return Ended::Read(lane, staging) };
        let record = self.records[load.record as usize];
        // SAFETY: the exchange gave it to read into.
        let inner = unsafe { staging.alone() };
        let mut cuts = None;
        let read = self.guarded(record, || {
            self.read(record, &mut inner.raw[..record.len as usize])?;
            let parts = decoder.parts(record.key);
            cuts = Some(Cuts::new(record.slot_len as usize, parts, |part| decoder.start(record.key, part)));
            Ok(())
        });
        match (read, cuts) {
            (Ok(()), Some(cuts)) => {
                inner.job = Some(Job { load, lane, cuts });
                staging.begin(cuts.parts);
                Ended::Landed(lane, staging, cuts.parts)
            }
            (outcome, _) => {
                self.settle(load, lane, outcome);
                Ended::Read(lane, staging)
            }
        }
    }

    /// Decodes a part of a record; true if it was the last, and then the record is settled.
    fn decode(&self, staging: &Staging, part: usize, decoder: Option<&dyn RecordDecoder>) -> bool {
        {
            // SAFETY: the exchange gave this part of it, which is ended below.
            let inner = unsafe { staging.shared() };
            if let (Some(job), Some(decoder)) = (&inner.job, decoder) {
                let record = self.records[job.load.record as usize];
                let decoded = self
                    .guarded(record, || self.decode_part(record, job, &inner.raw, staging, part, decoder));
                if let Err(error) = decoded {
                    staging.fail(part, error);
                }
            }
        }
        let is_last = staging.end_part();
        if is_last {
            // SAFETY: it was the last part.
            let job = unsafe { staging.alone() }.job.take();
            if let Some(job) = job {
                let record = self.records[job.load.record as usize];
                let verified = self.verified(record, || {
                    staging.sum(&job.cuts, record.len as usize, record_crc_start(record.key))
                });
                // A decoder that was given other bytes than were written says nothing of worth.
                let outcome = verified.and(staging.take_failure().map_or(Ok(()), Err));
                if let Err(StoreError::Decode { .. }) = outcome {
                    self.meter.decode_errors.add(1);
                }
                self.settle(job.load, job.lane, outcome);
            }
        }
        is_last
    }

    fn decode_part(
        &self,
        record: Record,
        job: &Job,
        raw: &[u8],
        staging: &Staging,
        part: usize,
        decoder: &dyn RecordDecoder,
    ) -> Result<(), StoreError> {
        let len = record.len as usize;
        if self.verify && record.crc32c.is_some() {
            let start = Instant::now();
            staging.set_sum(part, crc32c(&raw[job.cuts.checked(part, len)]));
            self.meter.check_ns.add_time(start.elapsed());
        }
        let start = Instant::now();
        // SAFETY: no two parts have a byte in common, and each is given to one reader.
        let out = unsafe { job.load.permit.range_mut(job.cuts.slot(part)) };
        let decoded = decoder.decode(record.key, &raw[..len + decoder.slack()], part, out);
        self.meter.decode_ns.add_time(start.elapsed());
        self.meter.decoded_bytes.add(out.len() as u64);
        decoded.map_err(|why| {
            let (file, offset, key) = self.whereabouts(record);
            StoreError::Decode { file, offset, key, why }
        })
    }

    /// One read for records that lie one after another on disk; record by record if that fails, so that each
    /// demander gets its own error. Without a decoder only.
    fn sweep(&self, loads: &mut Vec<Load>, lane: Lane) {
        let Some(first) = loads.first().map(|load| self.records[load.record as usize]) else { return };
        let swept = self.guarded(first, || self.read_run(first, loads));
        for mut load in loads.drain(..) {
            if swept.is_err() {
                self.load(load, lane);
                continue;
            }
            let record = self.records[load.record as usize];
            let raw = &load.permit.bytes_mut()[..record.len as usize];
            let outcome = self.guarded(record, || self.check(record, raw));
            self.settle(load, lane, outcome);
        }
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
        self.verified(record, || {
            let start = Instant::now();
            let found = record_crc(record.key, raw);
            self.meter.check_ns.add_time(start.elapsed());
            found
        })
    }

    /// Compares the checksum, if the record has one and that is wanted.
    fn verified(&self, record: Record, found: impl FnOnce() -> u32) -> Result<(), StoreError> {
        let Some(expected) = record.crc32c.filter(|_| self.verify) else { return Ok(()) };
        let found = found();
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
