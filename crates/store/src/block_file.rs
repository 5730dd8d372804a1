//! A bounded file of equal blocks that survives a crash: what does not fit into memory, kept for later.
//!
//! A block is a key, its parent's key, a note of a few bytes and a payload, all opaque here. The file has a
//! header and slots; a block is written into a slot as a whole, descriptor and payload in one direct write
//! (bytes: `block_file/layout.rs`). Nothing is ever updated in place and nothing is synced per block, so at
//! any moment, also in the middle of a write, the file is one that can be opened:
//!
//! - a descriptor has a checksum of its own, looked at when the file is opened, where only descriptors are
//!   read;
//! - it holds the payload's checksum, looked at whenever the payload is read.
//!
//! So a torn write costs the block that was being written and the one that it replaced, never another, and
//! never brings wrong bytes. What [`BlockFile::flush`] returned for outlives a power failure as well.
//!
//! ```text
//!  owner ── put ──► copy + checksum ──► queue ──► writer threads ──► pwrite, whole slot
//!    │                  └─ buffer ◄── get, until the write has ended
//!    └───── get ──► threads of the call, all blocks at once ──► pread, checksum
//! ```
//!
//! Whom a new block replaces: the least recently used one, by a clock of puts, gets and touches, of those
//! whose descendants are all gone (`block_file/index.rs`); those that were demoted before all others. After a restart recency is the order of writing;
//! uses since are not recorded.
//!
//! Nobody who has something else to do need wait for the disk: [`BlockFile::put`] never does,
//! [`BlockFile::wait`] and [`BlockFile::flush_within`] do for as long as they are told, and
//! [`BlockFile::abandon`] leaves a disk that stands still to itself.

mod error;
mod facts;
mod index;
mod layout;
mod medium;
mod opening;
mod writers;

pub use error::BlockFileError;
pub use facts::{BlockFailure, BlockFileConfig, BlockFileSnapshot, BlockMeta, Opened};
pub use medium::WriteDisk;

use crate::aligned::AlignedBuf;
use crate::disk::DiskError;
use crate::sync::{Mutex, lock};
use index::{Claim, Index};
use layout::{BLOCK, Descriptor, Geometry};
use medium::FileMedium;
use opening::{begin, scan};
use std::collections::HashMap;
use std::fmt;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use writers::Writers;

/// Longest note of a block, in bytes.
pub const NOTE_BYTES_MAX: usize = 2048;

/// Threads that read payloads of one call; few, because each read is long.
const READERS: usize = 4;

/// Failures that are kept for [`BlockFile::poll`]; later ones are only counted.
const FAILURES_MAX: usize = 64;

/// Bytes that are copied before their checksum is taken: they are still in the core's cache then.
const COPY_BYTES: usize = 64 << 10;

/// A file of blocks, open and locked. One owner; dropping it finishes what is queued.
pub struct BlockFile {
    disk: Arc<dyn WriteDisk>,
    geometry: Geometry,
    index: Index,
    writers: Writers,
    /// Buffers of a slot that nobody uses.
    idle: Vec<Arc<AlignedBuf>>,
    /// Those of writes that are queued or under way, by slot.
    writing: HashMap<u32, Arc<AlignedBuf>>,
    failures: Vec<BlockFailure>,
    /// Syncs that the writers were asked for and have not done, and the first that failed.
    syncing: usize,
    not_synced: Option<io::Error>,
    /// The writers are left to themselves.
    is_abandoned: bool,
    /// Those fields that count.
    counts: BlockFileSnapshot,
}

impl BlockFile {
    /// Opens the file at `path`, or creates it, readable by this user only. It is locked against other
    /// processes until it is dropped; a kill releases it as well.
    ///
    /// A file with another fingerprint, another size of blocks or a damaged header is started anew. One that
    /// is longer than `max_bytes` is cut off, and its blocks beyond are lost.
    ///
    /// # Errors
    /// [`BlockFileError::Config`] and [`BlockFileError::TooSmall`] before anything is touched;
    /// [`BlockFileError::InUse`]; [`BlockFileError::Foreign`] if it is no block file at all; and what the
    /// system has against it.
    pub fn open(path: &Path, config: &BlockFileConfig) -> Result<(Self, Opened), BlockFileError> {
        let geometry = config.geometry()?;
        let disk = FileMedium::open(path)?;
        // Before direct I/O is tried: an empty file proves nothing.
        let stale = begin(&disk, &geometry)?;
        let disk = disk.past_the_cache(config.direct)?;
        Self::attach(Arc::new(disk), geometry, config.queue, stale)
    }

    /// The same on a disk of the caller's own, where `config.direct` means nothing.
    ///
    /// # Errors
    /// As [`open`](Self::open), save for the lock.
    pub fn on(disk: Arc<dyn WriteDisk>, config: &BlockFileConfig) -> Result<(Self, Opened), BlockFileError> {
        let geometry = config.geometry()?;
        let stale = begin(&*disk, &geometry)?;
        Self::attach(disk, geometry, config.queue, stale)
    }

    fn attach(
        disk: Arc<dyn WriteDisk>,
        geometry: Geometry,
        queue: usize,
        stale: Option<String>,
    ) -> Result<(Self, Opened), BlockFileError> {
        let (index, dropped) = scan(&*disk, &geometry)?;
        let buffers = (0..queue).map(|_| AlignedBuf::zeroed(geometry.slot_bytes).map(Arc::new));
        let idle = buffers.collect::<Result<Vec<_>, _>>()?;
        let opened = Opened { blocks: index.len(), dropped, stale, direct_io: disk.direct().clone() };
        let writers = Writers::start(disk.clone(), queue)?;
        let (writing, failures, counts) = Default::default();
        let file = Self {
            disk,
            geometry,
            index,
            writers,
            idle,
            writing,
            failures,
            syncing: 0,
            not_synced: None,
            is_abandoned: false,
            counts,
        };
        Ok((file, opened))
    }

    /// The blocks that are held, in no order that means anything.
    pub fn entries(&self) -> impl Iterator<Item = &BlockMeta> {
        self.index.held().map(|held| &held.meta)
    }

    /// Whether a block is held. Its payload may turn out to be damaged all the same.
    pub fn contains(&self, key: u128) -> bool {
        self.index.find(key).is_some()
    }

    /// The blocks that are held and continue `parent`, in no order that means anything.
    pub fn children(&self, parent: u128) -> impl Iterator<Item = &BlockMeta> {
        self.index.children(parent).map(|held| &held.meta)
    }

    /// Copies a block and queues its write, which may replace another block. False means that no buffer is
    /// free, or that the block to be replaced is itself still being written: come again after
    /// [`poll`](Self::poll) or [`flush`](Self::flush). A block that is held already counts as used, and
    /// nothing is written.
    ///
    /// # Errors
    /// [`BlockFileError::PayloadLength`], [`BlockFileError::NoteTooLong`], and [`BlockFileError::Full`] for
    /// the continuation of a chain that fills the whole file.
    pub fn put(&mut self, meta: BlockMeta, payload: &[u8]) -> Result<bool, BlockFileError> {
        self.check(&meta, payload)?;
        self.settle();
        if self.index.touch(meta.key) { Ok(true) } else { self.write(meta, payload) }
    }

    /// As [`put`](Self::put), but a block that is held already gets this note and payload, in its place. If that write
    /// fails, the block is not held any more.
    ///
    /// # Errors
    /// As [`put`](Self::put).
    pub fn replace(&mut self, meta: BlockMeta, payload: &[u8]) -> Result<bool, BlockFileError> {
        self.check(&meta, payload)?;
        self.settle();
        self.write(meta, payload)
    }

    fn check(&self, meta: &BlockMeta, payload: &[u8]) -> Result<(), BlockFileError> {
        self.check_length(payload)?;
        match meta.note.len() {
            found if found > NOTE_BYTES_MAX => Err(BlockFileError::NoteTooLong { found }),
            _ => Ok(()),
        }
    }

    /// Into the place that a block of this key has, or another.
    fn write(&mut self, meta: BlockMeta, payload: &[u8]) -> Result<bool, BlockFileError> {
        let Some(mut buffer) = self.idle.pop() else { return Ok(false) };
        let claim = self.index.reclaim(meta.key).unwrap_or_else(|| self.index.claim(meta.parent));
        let (slot, evicted) = match claim {
            Claim::Slot { slot, evicted } => (slot, evicted),
            refused => {
                self.idle.push(buffer);
                let capacity = self.index.capacity();
                return if refused == Claim::Busy {
                    Ok(false)
                } else {
                    Err(BlockFileError::Full { capacity })
                };
            }
        };
        self.counts.evicted += u64::from(evicted);
        let bytes =
            Arc::get_mut(&mut buffer).expect("a writer drops its share of a buffer before it reports");
        let (page, rest) = bytes.split_at_mut(BLOCK);
        let payload_crc = copy_with_crc(payload, rest);
        let sequence = self.index.hold(slot, meta.clone(), payload_crc);
        layout::write_descriptor(&self.geometry, slot, &Descriptor { sequence, payload_crc, meta }, page);
        self.writing.insert(slot, buffer.clone());
        self.writers.write(slot, self.geometry.offset(slot), buffer);
        Ok(true)
    }

    /// Reads blocks into the slices beside their keys, several at once, and says of each whether it came. One
    /// that did not is not held, and what its slice has then means nothing: it never was, its payload was
    /// damaged, or the system failed the read ([`poll`](Self::poll) says so). One whose write has not ended
    /// comes from its buffer.
    ///
    /// Slices at multiples of the alignment of direct I/O, such as [`AlignedBuf`]s, are read into without a
    /// copy.
    ///
    /// # Errors
    /// [`BlockFileError::PayloadLength`], and nothing is read then.
    pub fn get(&mut self, wanted: &mut [(u128, &mut [u8])]) -> Result<Vec<bool>, BlockFileError> {
        for (_, into) in wanted.iter() {
            self.check_length(into)?;
        }
        self.settle();
        let mut came = vec![false; wanted.len()];
        let mut reads = Vec::new();
        for (place, (key, into)) in wanted.iter_mut().enumerate() {
            let Some((slot, held)) = self.index.find(*key) else { continue };
            if let Some(buffer) = self.writing.get(&slot) {
                into.copy_from_slice(&buffer[BLOCK..BLOCK + into.len()]);
                came[place] = true;
            } else {
                let offset = self.geometry.offset(slot) + BLOCK as u64;
                reads.push(Read { place, key: *key, offset, crc: held.payload_crc, into, intact: Ok(false) });
            }
        }
        in_parallel(&mut reads, READERS, |read| read.perform(&*self.disk));
        for Read { place, key, intact, .. } in reads {
            match intact {
                Ok(intact) => {
                    self.counts.read_bytes += self.geometry.payload_bytes as u64;
                    came[place] = intact;
                    // Once, if it was asked for twice.
                    self.counts.corrupt += u64::from(!intact && self.drop_block(key));
                }
                Err(error) => {
                    self.counts.read_errors += 1;
                    self.drop_block(key);
                    self.fail(key, error.into());
                }
            }
        }
        for ((key, _), &came) in wanted.iter().zip(&came) {
            *(if came { &mut self.counts.hits } else { &mut self.counts.misses }) += 1;
            self.index.touch(*key);
        }
        Ok(came)
    }

    /// Forgets a block, if it is held, and wipes its descriptor behind the caller's back: after a crash it
    /// may be found again.
    pub fn remove(&mut self, key: u128) {
        self.settle();
        self.drop_block(key);
    }

    /// Notes that a block was used, if it is held, so that others give way first. Of a chain, touch the last
    /// block first: its ancestors then are the more recent.
    pub fn touch(&mut self, key: u128) {
        self.index.touch(key);
    }

    /// Notes that a block, if it is held, is worth less than any other: it is the first to give way, once its descendants
    /// are gone, until it is used again. Forgotten by a restart, as uses are.
    pub fn demote(&mut self, key: u128) {
        self.index.demote(key);
    }

    /// Takes note of writes that have ended, and returns what failed since the last call. Those blocks are
    /// not held; the file goes on. A block that was to be replaced by one of them is gone as well.
    pub fn poll(&mut self) -> Vec<BlockFailure> {
        self.settle();
        std::mem::take(&mut self.failures)
    }

    /// Waits until a write has ended or none is under way, but not for longer than `limit`; false if that passed.
    pub fn wait(&mut self, limit: Duration) -> bool {
        let came = self.writers.wait(Instant::now().checked_add(limit));
        self.settle();
        came
    }

    /// Returns once everything that was queued is on the drive, or has failed, which [`poll`](Self::poll)
    /// reports.
    ///
    /// # Errors
    /// [`BlockFileError::Io`] if the system cannot say that it is.
    pub fn flush(&mut self) -> Result<(), BlockFileError> {
        self.flush_until(None).map(|_| ())
    }

    /// As [`flush`](Self::flush), but not for longer than `limit`; false if that passed. What is under way goes on.
    ///
    /// # Errors
    /// As [`flush`](Self::flush).
    pub fn flush_within(&mut self, limit: Duration) -> Result<bool, BlockFileError> {
        self.flush_until(Instant::now().checked_add(limit))
    }

    fn flush_until(&mut self, deadline: Option<Instant>) -> Result<bool, BlockFileError> {
        if !self.finish(deadline) {
            return Ok(false);
        }
        self.syncing += 1;
        self.writers.sync();
        while self.syncing > 0 {
            if !self.writers.wait(deadline) {
                return Ok(false);
            }
            self.settle();
        }
        match self.not_synced.take() {
            Some(source) => Err(io_error(&*self.disk, "bring it to the drive", source)),
            None => Ok(true),
        }
    }

    /// Closes the file without waiting: what is queued is dropped. A write that is under way ends behind the
    /// caller's back, and the file stays locked until then.
    pub fn abandon(mut self) {
        self.is_abandoned = true;
        self.writers.abandon();
    }

    /// Counts, and what is held now.
    pub fn snapshot(&self) -> BlockFileSnapshot {
        BlockFileSnapshot {
            blocks: self.index.len(),
            capacity: self.index.capacity(),
            writing: self.writing.len(),
            ..self.counts
        }
    }

    /// Returns once nothing is queued or under way; false if that is not so at the deadline.
    fn finish(&mut self, deadline: Option<Instant>) -> bool {
        // The end of a write may begin a wiping.
        while !self.writing.is_empty() || self.index.leaving() > 0 {
            if !self.writers.wait(deadline) {
                return false;
            }
            self.settle();
        }
        true
    }

    /// Takes in the reports of the writers.
    fn settle(&mut self) {
        for writers::Done { slot, outcome } in self.writers.take_done() {
            let Some(slot) = slot else {
                self.syncing -= 1;
                self.not_synced = self.not_synced.take().or(outcome.err());
                continue;
            };
            self.counts.write_errors += u64::from(outcome.is_err());
            let Some(buffer) = self.writing.remove(&slot) else {
                // A wiping. If it failed, the block may be found again, as after a crash.
                self.index.released(slot);
                continue;
            };
            self.idle.push(buffer);
            if outcome.is_ok() {
                self.counts.written += 1;
                self.counts.written_bytes += self.geometry.slot_bytes as u64;
            }
            match outcome {
                // Removed meanwhile.
                _ if self.index.is_leaving(slot) => self.writers.wipe(slot, self.geometry.offset(slot)),
                Ok(()) => self.index.written(slot),
                Err(source) => {
                    let key = self.index.not_written(slot, is_disk_full(&source));
                    let file = self.disk.name().to_owned();
                    let (offset, len) = (self.geometry.offset(slot), self.geometry.slot_bytes);
                    self.fail(key, BlockFileError::Write { file, offset, len, source });
                }
            }
        }
    }

    /// Forgets a block and sees to it that its slot is wiped; false if it was not held.
    fn drop_block(&mut self, key: u128) -> bool {
        let Some(slot) = self.index.leave(key) else { return false };
        // One that is being written is wiped after that.
        if !self.writing.contains_key(&slot) {
            self.writers.wipe(slot, self.geometry.offset(slot));
        }
        true
    }

    fn fail(&mut self, key: u128, error: BlockFileError) {
        if self.failures.len() < FAILURES_MAX {
            self.failures.push(BlockFailure { key, error });
        }
    }

    fn check_length(&self, payload: &[u8]) -> Result<(), BlockFileError> {
        let (expected, found) = (self.geometry.payload_bytes, payload.len());
        if found == expected { Ok(()) } else { Err(BlockFileError::PayloadLength { expected, found }) }
    }
}

impl Drop for BlockFile {
    fn drop(&mut self) {
        if !self.is_abandoned {
            self.finish(None);
        }
    }
}

impl fmt::Debug for BlockFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BlockFile")
            .field("disk", &self.disk.name())
            .field("geometry", &self.geometry)
            .field("counts", &self.snapshot())
            .finish_non_exhaustive()
    }
}

/// A payload to be read.
struct Read<'a> {
    place: usize,
    key: u128,
    offset: u64,
    crc: u32,
    into: &'a mut [u8],
    /// Whether the bytes are those that were written.
    intact: Result<bool, DiskError>,
}

impl Read<'_> {
    fn perform(&mut self, disk: &dyn WriteDisk) {
        self.intact = match disk.read_range(self.offset, self.into) {
            Ok(()) => Ok(smoe_format::crc::crc32c(self.into) == self.crc),
            // Cut off since it was opened.
            Err(DiskError::Short { .. }) => Ok(false),
            Err(error) => Err(error),
        };
    }
}

/// Does `work` on each item, on this thread and up to `threads` - 1 others.
fn in_parallel<T: Send>(items: &mut [T], threads: usize, work: impl Fn(&mut T) + Sync) {
    let others = threads.min(items.len()).saturating_sub(1);
    let items = Mutex::new(items.iter_mut());
    let next = || lock(&items).next();
    let run = || {
        while let Some(item) = next() {
            work(item);
        }
    };
    thread::scope(|scope| {
        for _ in 0..others {
            // Where the system has no thread, this one does the work.
            if thread::Builder::new().spawn_scoped(scope, run).is_err() {
                break;
            }
        }
        run();
    });
}

/// Copies `from` to the start of `to`, and returns its checksum.
fn copy_with_crc(from: &[u8], to: &mut [u8]) -> u32 {
    from.chunks(COPY_BYTES).zip(to.chunks_mut(COPY_BYTES)).fold(0, |crc, (from, to)| {
        to[..from.len()].copy_from_slice(from);
        smoe_format::crc::crc32c_append(crc, from)
    })
}

fn is_disk_full(error: &io::Error) -> bool {
    use io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
    matches!(error.kind(), StorageFull | QuotaExceeded | FileTooLarge)
}

fn io_error(disk: &dyn WriteDisk, what: &'static str, source: io::Error) -> BlockFileError {
    BlockFileError::Io { file: disk.name().to_owned(), what, source }
}
