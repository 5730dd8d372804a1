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
mod index;
mod layout;
mod medium;
mod writers;

pub use error::BlockFileError;
pub use medium::WriteDisk;

use crate::aligned::AlignedBuf;
use crate::disk::{DirectIo, DiskError};
use crate::file_disk::OpenMode;
use crate::sync::{Mutex, lock};
use index::{Claim, Index};
use layout::{BLOCK, Described, Descriptor, Geometry, Header};
use medium::FileMedium;
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

/// Threads that read descriptors when a file is opened; more, because each read is short.
const SCANNERS: usize = 8;

/// Descriptors that a thread reads before it looks for more.
const SCAN_RUN: u32 = 32;

/// Failures that are kept for [`BlockFile::poll`]; later ones are only counted.
const FAILURES_MAX: usize = 64;

/// Bytes that are copied before their checksum is taken: they are still in the core's cache then.
const COPY_BYTES: usize = 64 << 10;

/// What a block file is made of.
#[derive(Clone, Debug)]
pub struct BlockFileConfig {
    /// Bytes of every payload.
    pub payload_bytes: usize,
    /// The file never becomes longer than this.
    pub max_bytes: u64,
    /// Whatever payloads depend on. A file with another fingerprint is stale, and is started anew.
    pub fingerprint: [u8; 32],
    /// Writes that may be queued, each with a buffer of its own of [`slot_bytes`](Self::slot_bytes).
    pub queue: usize,
    /// Past the page cache or through it.
    pub direct: OpenMode,
}

impl BlockFileConfig {
    /// Bytes that a block takes in the file, and a queued write in memory.
    ///
    /// # Errors
    /// [`BlockFileError::Config`] and [`BlockFileError::TooSmall`], as [`BlockFile::open`].
    pub fn slot_bytes(&self) -> Result<usize, BlockFileError> {
        Ok(self.geometry()?.slot_bytes)
    }

    /// Bytes of a file of so many blocks.
    ///
    /// # Errors
    /// As [`slot_bytes`](Self::slot_bytes).
    pub fn bytes_of(&self, blocks: u32) -> Result<u64, BlockFileError> {
        Ok(self.geometry()?.offset(blocks))
    }

    fn geometry(&self) -> Result<Geometry, BlockFileError> {
        if self.queue == 0 {
            return Err(BlockFileError::Config { setting: "queue" });
        }
        Geometry::new(self.fingerprint, self.payload_bytes, self.max_bytes)
    }
}

/// A block without its payload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockMeta {
    /// Its name. Equal keys mean equal parents, notes and payloads.
    pub key: u128,
    /// The key of the block that it continues, which need not be held; its own key or any that is never held
    /// (0, say) if there is none. Parents form no cycles.
    pub parent: u128,
    /// Anything, up to [`NOTE_BYTES_MAX`] bytes.
    pub note: Box<[u8]>,
}

/// What was found when a file was opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Opened {
    /// Blocks.
    pub blocks: usize,
    /// Slots whose descriptor was damaged or whose end was cut off.
    pub dropped: usize,
    /// Why the file that was there is of no use and was started anew.
    pub stale: Option<String>,
    /// Whether reads and writes bypass the page cache.
    pub direct_io: DirectIo,
}

/// A block that is no longer held because of the disk.
#[derive(Debug)]
pub struct BlockFailure {
    /// The block.
    pub key: u128,
    /// Why: its write or its read failed.
    pub error: BlockFileError,
}

/// Counts since the file was opened, and what it holds now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockFileSnapshot {
    /// Blocks held.
    pub blocks: usize,
    /// Blocks that can be held. Becomes less if the disk is full before the file has its bound.
    pub capacity: usize,
    /// Blocks whose write is queued or under way.
    pub writing: usize,
    /// Blocks written.
    pub written: u64,
    /// Their bytes in the file.
    pub written_bytes: u64,
    /// Bytes of payloads that were read from the file.
    pub read_bytes: u64,
    /// Blocks asked for that came.
    pub hits: u64,
    /// Blocks asked for that were not held, were damaged or could not be read.
    pub misses: u64,
    /// Blocks that gave way to others.
    pub evicted: u64,
    /// Blocks dropped because their payload was not what had been written.
    pub corrupt: u64,
    /// Reads that the system failed.
    pub read_errors: u64,
    /// Writes that the system failed.
    pub write_errors: u64,
}

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

/// Makes the file one whose header is current and that is no longer than its bound. Says why, if blocks that
/// were there are of no use.
fn begin(disk: &dyn WriteDisk, geometry: &Geometry) -> Result<Option<String>, BlockFileError> {
    let len = disk.len_now().map_err(|source| io_error(disk, "tell its length", source))?;
    let mut page = AlignedBuf::zeroed(BLOCK)?;
    let there = len.min(BLOCK as u64) as usize;
    disk.read_range(0, &mut page[..there])?;
    let stale = match layout::read_header(geometry, &page[..there]) {
        Header::Current => {
            let bound = geometry.offset(geometry.capacity);
            if len > bound {
                disk.set_len(bound).map_err(|source| io_error(disk, "cut it off", source))?;
            }
            return Ok(None);
        }
        Header::Foreign => return Err(BlockFileError::Foreign { file: disk.name().to_owned() }),
        Header::New => None,
        Header::Stale(why) => Some(why),
    };
    // Emptied first, so that no old descriptor stands behind the new header.
    disk.set_len(0).map_err(|source| io_error(disk, "empty it", source))?;
    page.fill(0);
    layout::write_header(geometry, &mut page);
    let file = || disk.name().to_owned();
    disk.write_all_at(0, &page).map_err(|source| BlockFileError::Write {
        file: file(),
        offset: 0,
        len: BLOCK,
        source,
    })?;
    disk.sync().map_err(|source| io_error(disk, "bring its header to the drive", source))?;
    Ok(stale)
}

/// Reads all descriptors. Returns the index and the number of slots that hold neither a block nor nothing.
fn scan(disk: &dyn WriteDisk, geometry: &Geometry) -> Result<(Index, usize), BlockFileError> {
    let len = disk.len_now().map_err(|source| io_error(disk, "tell its length", source))?;
    let slots = len.saturating_sub(BLOCK as u64).div_ceil(geometry.slot_bytes as u64);
    let slots = u32::try_from(slots).unwrap_or(u32::MAX).min(geometry.capacity);
    let mut runs: Vec<(u32, Vec<Described>)> =
        (0..slots).step_by(SCAN_RUN as usize).map(|first| (first, Vec::new())).collect();
    in_parallel(&mut runs, SCANNERS, |(first, found)| {
        let mut page = AlignedBuf::zeroed(BLOCK).ok();
        for slot in *first..slots.min(*first + SCAN_RUN) {
            found.push(describe(disk, geometry, len, slot, page.as_deref_mut()));
        }
    });
    let mut index = Index::new(geometry.capacity);
    let mut dropped = 0;
    for described in runs.into_iter().flat_map(|(_, found)| found) {
        dropped += usize::from(described == Described::Damaged);
        index.restore(match described {
            Described::Block(descriptor) => Some(descriptor),
            Described::Nothing | Described::Damaged => None,
        });
    }
    Ok((index, dropped))
}

/// What a slot of a file of `len` bytes holds. One that cannot be read, or whose end is missing, is damaged.
fn describe(
    disk: &dyn WriteDisk,
    geometry: &Geometry,
    len: u64,
    slot: u32,
    page: Option<&mut [u8]>,
) -> Described {
    let Some(page) = page else { return Described::Damaged };
    let (start, end) = (geometry.offset(slot), geometry.offset(slot + 1));
    if end > len || disk.read_range(start, page).is_err() {
        return Described::Damaged;
    }
    layout::read_descriptor(geometry, slot, page)
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
