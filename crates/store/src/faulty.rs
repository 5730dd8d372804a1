//! Disks for tests: one in memory, and one that fails as scripted (feature `test-support`).
//!
//! Nothing here sleeps. A slow disk is a [`Gate`] that the test opens, so that every order of events that a
//! test is about is one that it made.

use crate::disk::{DirectIo, Disk, DiskError};
use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// A disk that is a vector.
#[derive(Debug)]
pub struct MemoryDisk {
    bytes: Vec<u8>,
    name: PathBuf,
    direct: DirectIo,
}

impl MemoryDisk {
    /// A disk with these contents.
    pub fn new(bytes: Vec<u8>) -> Self {
        let direct = DirectIo::No { why: "a disk in memory".into() };
        Self { bytes, name: PathBuf::from("memory"), direct }
    }

    /// The same, with reads that must be aligned, as those of direct I/O.
    pub fn aligned(bytes: Vec<u8>, alignment: usize) -> Self {
        Self { direct: DirectIo::Yes { alignment }, ..Self::new(bytes) }
    }

    /// Its contents.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

impl Disk for MemoryDisk {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<usize, DiskError> {
        let (alignment, address) = (self.direct.alignment(), buf.as_ptr().addr());
        if !(offset | buf.len() as u64 | address as u64).is_multiple_of(alignment as u64) {
            let file = self.name.clone();
            return Err(DiskError::Misaligned { file, offset, len: buf.len(), address, alignment });
        }
        let there = usize::try_from(offset).ok().and_then(|offset| self.bytes.get(offset..)).unwrap_or(&[]);
        let len = there.len().min(buf.len());
        buf[..len].copy_from_slice(&there[..len]);
        Ok(len)
    }

    fn len(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn name(&self) -> &Path {
        &self.name
    }

    fn direct(&self) -> &DirectIo {
        &self.direct
    }
}

/// What happens to a read.
#[derive(Clone, Debug)]
pub enum Fault {
    /// The system fails it.
    Error(io::ErrorKind),
    /// It brings at most this many bytes, as if the file ended there.
    Short(usize),
    /// It succeeds, but the byte at this place of the buffer (modulo its length) is wrong.
    Torn(usize),
    /// The disk panics.
    Panic,
    /// It waits at the gate, then succeeds.
    Hold(Arc<Gate>),
}

/// A disk with faults, by script or by seed.
///
/// Reads are numbered from 0 in the order in which they begin. A fault set for a read's number or offset
/// applies to that read; those set by offset stay until cleared.
pub struct FaultyDisk {
    inner: Arc<dyn Disk>,
    script: Mutex<Script>,
}

#[derive(Default)]
struct Script {
    reads: u64,
    by_number: HashMap<u64, Fault>,
    by_offset: HashMap<u64, Fault>,
    /// Of 256 reads, how many fail, and the generator's state.
    random: Option<(u8, u64)>,
}

impl FaultyDisk {
    /// `inner`, without faults so far.
    pub fn new(inner: impl Disk + 'static) -> Arc<Self> {
        Arc::new(Self { inner: Arc::new(inner), script: Mutex::default() })
    }

    /// `fault` for read number `number`.
    pub fn on_read(&self, number: u64, fault: Fault) {
        locked(&self.script).by_number.insert(number, fault);
    }

    /// `fault` for every read that begins at `offset`.
    pub fn on_offset(&self, offset: u64, fault: Fault) {
        locked(&self.script).by_offset.insert(offset, fault);
    }

    /// From now on, of 256 reads some `share` get an error, a short read or a wrong byte, as `seed` has it.
    pub fn at_random(&self, seed: u64, share: u8) {
        locked(&self.script).random = Some((share, seed));
    }

    /// No more faults.
    pub fn heal(&self) {
        let mut script = locked(&self.script);
        *script = Script { reads: script.reads, ..Script::default() };
    }

    /// Reads begun so far.
    pub fn reads(&self) -> u64 {
        locked(&self.script).reads
    }

    fn next_fault(&self, offset: u64) -> Option<Fault> {
        let mut script = locked(&self.script);
        let number = script.reads;
        script.reads += 1;
        let scripted = script.by_number.remove(&number).or_else(|| script.by_offset.get(&offset).cloned());
        scripted.or_else(|| script.random_fault())
    }
}

impl Script {
    fn random_fault(&mut self) -> Option<Fault> {
        let (share, state) = self.random.as_mut()?;
        // SplitMix64.
        *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = *state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        if (z as u8) >= *share {
            return None;
        }
        let place = (z >> 16) as usize;
        Some(match (z >> 8) % 3 {
            0 => Fault::Error(io::ErrorKind::Other),
            1 => Fault::Short(place % 4096),
            _ => Fault::Torn(place),
        })
    }
}

impl Disk for FaultyDisk {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<usize, DiskError> {
        let fault = self.next_fault(offset);
        match fault {
            Some(Fault::Error(kind)) => {
                let (file, len) = (self.name().to_owned(), buf.len());
                return Err(DiskError::Io { file, offset, len, source: io::Error::from(kind) });
            }
            Some(Fault::Panic) => panic!("a scripted panic of the disk"),
            Some(Fault::Hold(gate)) => gate.pass(),
            Some(Fault::Short(len)) => {
                let found = self.inner.read_at(offset, buf)?.min(len);
                buf[found..].fill(0xa5);
                return Ok(found);
            }
            Some(Fault::Torn(place)) => {
                let found = self.inner.read_at(offset, buf)?;
                if found > 0 {
                    buf[place % found] ^= 0x10;
                }
                return Ok(found);
            }
            None => (),
        }
        self.inner.read_at(offset, buf)
    }

    fn len(&self) -> u64 {
        self.inner.len()
    }

    fn name(&self) -> &Path {
        self.inner.name()
    }

    fn direct(&self) -> &DirectIo {
        self.inner.direct()
    }
}

/// Where reads wait until the test lets them go.
#[derive(Debug, Default)]
pub struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct GateState {
    open: bool,
    waiting: usize,
}

impl Gate {
    /// A closed gate.
    pub fn closed() -> Arc<Self> {
        Arc::default()
    }

    /// Lets all pass, now and later.
    pub fn open(&self) {
        locked(&self.state).open = true;
        self.changed.notify_all();
    }

    /// Returns once `n` reads wait at the gate.
    pub fn wait_for(&self, n: usize) {
        let mut state = locked(&self.state);
        while state.waiting < n {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn pass(&self) {
        let mut state = locked(&self.state);
        state.waiting += 1;
        self.changed.notify_all();
        while !state.open {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.waiting -= 1;
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
