//! Disks for these tests: one that remembers what a power failure may undo, and one that fails as told.

use crate::support::Random;
use smoe_store::{DirectIo, Disk, DiskError, WriteDisk};
use std::io;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex};

const SECTOR: usize = 512;

/// A disk in memory. Until a sync, each sector that was written may be found as it was or as any write left
/// it.
pub struct MemoryFile {
    state: Mutex<State>,
    direct: DirectIo,
}

#[derive(Default)]
struct State {
    synced: Vec<u8>,
    now: Vec<u8>,
    /// Since the last sync, in order.
    writes: Vec<(usize, Vec<u8>)>,
}

impl MemoryFile {
    pub fn new(bytes: Vec<u8>) -> Arc<Self> {
        let state = State { synced: bytes.clone(), now: bytes, writes: Vec::new() };
        // Alignment is demanded, as a strict drive does.
        Arc::new(Self { state: Mutex::new(state), direct: DirectIo::Yes { alignment: 4096 } })
    }

    /// What a power failure at this moment may leave.
    pub fn crashed(&self, random: &mut Random) -> Vec<u8> {
        let state = self.state.lock().unwrap();
        let mut image = state.synced.clone();
        for (offset, bytes) in &state.writes {
            for (i, sector) in bytes.chunks(SECTOR).enumerate() {
                let at = offset + i * SECTOR;
                if random.below(3) > 0 {
                    image.resize(image.len().max(at + sector.len()), 0);
                    image[at..at + sector.len()].copy_from_slice(sector);
                }
            }
        }
        image
    }
}

impl Disk for MemoryFile {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<usize, DiskError> {
        assert!((offset as usize | buf.len() | buf.as_ptr().addr()).is_multiple_of(4096), "an aligned read");
        let state = self.state.lock().unwrap();
        let there = state.now.get(offset as usize..).unwrap_or(&[]);
        let len = there.len().min(buf.len());
        buf[..len].copy_from_slice(&there[..len]);
        Ok(len)
    }

    fn len(&self) -> u64 {
        self.state.lock().unwrap().now.len() as u64
    }

    fn name(&self) -> &Path {
        Path::new("memory")
    }

    fn direct(&self) -> &DirectIo {
        &self.direct
    }
}

impl WriteDisk for MemoryFile {
    fn write_all_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let at = offset as usize;
        assert!((at | bytes.len() | bytes.as_ptr().addr()).is_multiple_of(4096), "an aligned write");
        let mut state = self.state.lock().unwrap();
        let len = state.now.len().max(at + bytes.len());
        state.now.resize(len, 0);
        state.now[at..at + bytes.len()].copy_from_slice(bytes);
        state.writes.push((at, bytes.to_vec()));
        Ok(())
    }

    fn len_now(&self) -> io::Result<u64> {
        Ok(Disk::len(self))
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        let mut state = self.state.lock().unwrap();
        state.now.resize(len as usize, 0);
        // As a journal orders it: before what is written later.
        state.synced = state.now.clone();
        state.writes.clear();
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        let mut state = self.state.lock().unwrap();
        state.synced = state.now.clone();
        state.writes.clear();
        Ok(())
    }
}

/// What goes wrong from now on.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    /// The disk has no room beyond this.
    pub room: Option<u64>,
    /// Of 256 writes, how many fail after some sectors.
    pub writes: u8,
    /// Of 256 reads, how many fail.
    pub reads: u8,
    /// Writes panic.
    pub panic: bool,
    /// Writes wait.
    pub hold: bool,
}

/// A disk that fails as told.
pub struct FaultyFile {
    inner: Arc<MemoryFile>,
    faults: Mutex<(Faults, Random)>,
    changed: Condvar,
}

impl FaultyFile {
    pub fn new(inner: Arc<MemoryFile>) -> Arc<Self> {
        Arc::new(Self { inner, faults: Mutex::new((Faults::default(), Random(5))), changed: Condvar::new() })
    }

    pub fn set(&self, faults: Faults) {
        self.faults.lock().unwrap().0 = faults;
        self.changed.notify_all();
    }
}

impl Disk for FaultyFile {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<usize, DiskError> {
        let (faults, fails) = {
            let (faults, random) = &mut *self.faults.lock().unwrap();
            (*faults, random.next() as u8)
        };
        if fails < faults.reads {
            let source = io::Error::other("a scripted failure");
            return Err(DiskError::Io { file: "memory".into(), offset, len: buf.len(), source });
        }
        self.inner.read_at(offset, buf)
    }

    fn len(&self) -> u64 {
        Disk::len(&*self.inner)
    }

    fn name(&self) -> &Path {
        self.inner.name()
    }

    fn direct(&self) -> &DirectIo {
        self.inner.direct()
    }
}

impl WriteDisk for FaultyFile {
    fn write_all_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let mut guard = self.faults.lock().unwrap();
        while guard.0.hold {
            guard = self.changed.wait(guard).unwrap();
        }
        let (faults, fails) = (guard.0, guard.1.next());
        drop(guard);
        if faults.panic {
            panic!("a scripted panic of the disk");
        }
        if let Some(room) = faults.room
            && offset + bytes.len() as u64 > room
        {
            return Err(io::ErrorKind::StorageFull.into());
        }
        if (fails as u8) < faults.writes {
            let some = (fails >> 8) as usize % bytes.len() / 4096 * 4096;
            self.inner.write_all_at(offset, &bytes[..some])?;
            return Err(io::Error::other("a scripted failure"));
        }
        self.inner.write_all_at(offset, bytes)
    }

    fn len_now(&self) -> io::Result<u64> {
        self.inner.len_now()
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.inner.set_len(len)
    }

    fn sync(&self) -> io::Result<()> {
        self.inner.sync()
    }
}
