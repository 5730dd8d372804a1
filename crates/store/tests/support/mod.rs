//! A small vault without meaning, and a guard against hanging tests.
#![allow(dead_code)] // Each test file uses a part.

use smoe_format::record_crc;
use smoe_meter::StoreMeter;
use smoe_store::{
    Demand, DirectIo, Disk, DiskError, ExpertKey, Lease, MemoryDisk, Order, Record, RecordDecoder, Store,
    StoreConfig, StoreError, Want,
};
use std::io;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::time::Duration;

/// SplitMix64.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// `n` different numbers below `of`, in random order.
    pub fn choose(&mut self, n: usize, of: usize) -> Vec<usize> {
        let mut all: Vec<usize> = (0..of).collect();
        for i in 0..n {
            let j = i + self.below(of - i);
            all.swap(i, j);
        }
        all.truncate(n);
        all
    }
}

pub fn key(layer: u32, expert: u32) -> ExpertKey {
    ExpertKey { layer, expert }
}

/// A disk's bytes and the records in them, in the order of the disk.
pub struct Vault {
    pub bytes: Vec<u8>,
    pub records: Vec<Record>,
}

impl Vault {
    /// `layers` x `experts` records of `block` to 3 x `block` bytes, after a header of one block.
    pub fn new(layers: u32, experts: u32, block: usize) -> Self {
        let mut random = Random(u64::from(layers * 1000 + experts));
        let mut bytes = vec![0xee; block];
        let mut records = Vec::new();
        for layer in 0..layers {
            for expert in 0..experts {
                let (key, offset) = (key(layer, expert), bytes.len() as u64);
                let len = block * (1 + random.below(3));
                bytes.extend((0..len / 8).flat_map(|_| random.next().to_le_bytes()));
                let crc32c = Some(record_crc(key, &bytes[offset as usize..]));
                records.push(Record { key, offset, len: len as u32, slot_len: len as u32 - 5, crc32c });
            }
        }
        Self { bytes, records }
    }

    pub fn slot_bytes(&self) -> usize {
        self.records.iter().map(|r| r.len as usize).max().unwrap()
    }

    pub fn keys(&self) -> Vec<ExpertKey> {
        self.records.iter().map(|r| r.key).collect()
    }

    pub fn record(&self, key: ExpertKey) -> Record {
        *self.records.iter().find(|r| r.key == key).unwrap()
    }

    pub fn raw(&self, key: ExpertKey) -> &[u8] {
        let Record { offset, len, .. } = self.record(key);
        &self.bytes[offset as usize..][..len as usize]
    }

    /// Whether a lease shows what is on the disk.
    pub fn check(&self, lease: &Lease) {
        let Record { offset, slot_len, .. } = self.record(lease.key());
        let expected = &self.bytes[offset as usize..][..slot_len as usize];
        assert!(lease.bytes() == expected, "{} shows other bytes than the disk's", lease.key());
    }

    pub fn open(&self, disk: Arc<dyn Disk>, slots: usize, readers: usize) -> Store {
        self.open_as(disk, one_by_one(slots, self.slot_bytes(), readers))
    }

    pub fn open_as(&self, disk: Arc<dyn Disk>, config: StoreConfig) -> Store {
        Store::open(disk, self.records.clone(), config, None, Arc::default()).unwrap()
    }

    pub fn open_decoded(&self, disk: Arc<dyn Disk>, slots: usize, decoder: Arc<dyn RecordDecoder>) -> Store {
        let config = StoreConfig::new(slots, self.slot_bytes());
        let meter = Arc::<StoreMeter>::default();
        Store::open(disk, self.records.clone(), config, Some(decoder), meter).unwrap()
    }
}

/// A configuration under which every record is read on its own.
pub fn one_by_one(slots: usize, slot_bytes: usize, readers: usize) -> StoreConfig {
    StoreConfig { readers, run_bytes: 0, ..StoreConfig::new(slots, slot_bytes) }
}

pub fn wants(keys: &[ExpertKey]) -> Vec<Want> {
    keys.iter().map(|&key| Want::from(key)).collect()
}

/// Demands in the order of arrival, the later use the more recent.
pub fn demand<'s>(store: &'s mut Store, keys: &[ExpertKey]) -> Result<Demand<'s>, StoreError> {
    store.demand(&wants(keys), Order::Arrival)
}

/// All leases of a demand, sorted by key, none kept back; the first error otherwise.
pub fn demand_all(store: &mut Store, keys: &[ExpertKey]) -> Result<Vec<Lease>, StoreError> {
    let mut leases = demand(store, keys)?.collect::<Result<Vec<_>, _>>()?;
    leases.sort_by_key(Lease::key);
    Ok(leases)
}

/// A disk whose reads wait, each until the test lets it end, well or badly. For one reader.
pub struct Turnstile {
    inner: MemoryDisk,
    state: Mutex<TurnstileState>,
    changed: Condvar,
}

#[derive(Default)]
struct TurnstileState {
    waiting: Option<u64>,
    released: Option<bool>,
    open: bool,
}

impl Turnstile {
    pub fn new(bytes: Vec<u8>) -> Arc<Self> {
        Arc::new(Self { inner: MemoryDisk::new(bytes), state: Mutex::default(), changed: Condvar::new() })
    }

    /// Where the reader that waits, or comes, wants to read.
    pub fn wait_for_reader(&self) -> u64 {
        let state = self.changed.wait_while(self.state.lock().unwrap(), |state| state.waiting.is_none());
        state.unwrap().waiting.unwrap()
    }

    /// Whether a reader waits.
    pub fn has_reader(&self) -> bool {
        self.state.lock().unwrap().waiting.is_some()
    }

    /// Lets the read that waits end.
    pub fn release(&self, ok: bool) {
        let mut state = self.state.lock().unwrap();
        assert!(state.waiting.take().is_some(), "nobody waits");
        state.released = Some(ok);
        self.changed.notify_all();
    }

    /// Lets all reads end well from now on.
    pub fn open(&self) {
        self.state.lock().unwrap().open = true;
        self.changed.notify_all();
    }
}

impl Disk for Turnstile {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<usize, DiskError> {
        let mut state = self.state.lock().unwrap();
        state.waiting = Some(offset);
        self.changed.notify_all();
        let mut state = self.changed.wait_while(state, |s| s.released.is_none() && !s.open).unwrap();
        if state.released.take() == Some(false) {
            let (file, source) = (self.name().to_owned(), io::Error::from(io::ErrorKind::Other));
            return Err(DiskError::Io { file, offset, len: buf.len(), source });
        }
        drop(state);
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

/// Runs a test that must not hang.
pub fn within_a_minute(test: impl FnOnce() + Send + 'static) {
    let (done, finished) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        test();
        let _ = done.send(());
    });
    match finished.recv_timeout(Duration::from_secs(60)) {
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("the test hangs"),
        _ => {
            if let Err(panic) = thread.join() {
                std::panic::resume_unwind(panic);
            }
        }
    }
}
