//! Files of a repository, read as if they were here.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;

use smoe_sculpt::files::Place;
use smoe_sculpt::{WeightFile, WeightFiles};

use super::{Inner, LOOK, Part, Pull, SAMPLES, length};
use crate::error::HubError;
use crate::listing::{Entry, Hash};

/// Samples with at most so many bytes between them are asked for with one request, of so many bytes at most: words of a row
/// of GPTQ's codes may be kilobytes apart, and each would be a request of its own. Unmeasured (EXP-STORE-14).
const GAP: u64 = 8 << 10;
const MOST: u64 = 16 << 20;
/// Requests for samples at once.
const ASKERS: usize = 8;

impl WeightFiles for Pull {
    fn has(&self, path: &Path) -> bool {
        self.inner.entry(path).is_some()
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn WeightFile>> {
        let (name, entry) = self.inner.known(path)?;
        if self.inner.opened.lock().expect("nobody panics with it").insert(name.to_owned()) {
            self.inner.hold((length(&self.inner.path(name)) + length(&self.inner.part(name))) as i64);
        }
        Ok(Box::new(Arriving {
            inner: Arc::clone(&self.inner),
            name: name.to_owned(),
            entry: entry.clone(),
            file: OnceLock::new(),
        }))
    }

    fn arrives(&self) -> bool {
        true
    }

    fn expect(&self, places: &[Place<'_>]) -> io::Result<()> {
        self.inner.headed.store(true, Ordering::Relaxed);
        let mut missing = Vec::new();
        for place in places {
            let (name, _) = self.inner.known(place.path)?;
            let end = place.offset + place.bytes as u64;
            let here = end <= length(&self.inner.part(name)).max(length(&self.inner.path(name)));
            if place.bytes > 0 && !here && !self.inner.samples.has(name, place.offset, place.bytes) {
                missing.push((name, place.offset, place.bytes));
            }
        }
        let missing = together(missing);
        let next = AtomicU64::new(0);
        let failed = Mutex::new(None);
        thread::scope(|scope| {
            for _ in 0..ASKERS.min(missing.len()) {
                scope.spawn(|| {
                    let mut bytes = Vec::new();
                    while let Some(parts) = missing.get(next.fetch_add(1, Ordering::Relaxed) as usize) {
                        let (name, start, _) = parts[0];
                        let end = parts.iter().map(|(_, offset, len)| offset + *len as u64).max();
                        bytes.resize(end.map_or(0, |end| end - start) as usize, 0);
                        let path = self.inner.dir.join(SAMPLES);
                        let asked = self.inner.ask(name, &mut bytes, start);
                        let keep = |(name, offset, len): &Part<'_>| {
                            let part = &bytes[(offset - start) as usize..][..*len];
                            self.inner.samples.put(name, *offset, part).map_err(HubError::io("write", &path))
                        };
                        let asked = asked.and_then(|()| parts.iter().try_for_each(keep));
                        if let Err(error) = asked {
                            failed.lock().expect("nobody panics with it").get_or_insert(error);
                            next.store(u64::MAX / 2, Ordering::Relaxed);
                        }
                    }
                });
            }
        });
        failed
            .into_inner()
            .expect("nobody panics with it")
            .map_or(Ok(()), |error| Err(io::Error::other(error)))
    }

    fn here(&self, path: &Path) -> u64 {
        self.inner
            .entry(path)
            .map_or(0, |(name, _)| length(&self.inner.path(name)).max(length(&self.inner.part(name))))
    }

    fn order(&self, paths: &[PathBuf]) {
        let files = paths.iter().filter_map(|path| self.inner.entry(path));
        let files: Vec<(&str, &Entry)> = files.collect();
        let watch = self.inner.client.watch();
        watch.expected(files.iter().map(|(_, entry)| entry.bytes).sum());
        watch.received(paths.iter().map(|path| self.here(path)).sum());
        self.inner.ordered.store(true, Ordering::Relaxed);
        self.inner.let_go(&files.iter().map(|(name, _)| *name).collect());
        self.inner.queue().order = files.into_iter().map(|(name, _)| name.to_owned()).collect();
        let inner = Arc::clone(&self.inner);
        let receiver = thread::spawn(move || inner.receive_all());
        *self.receiver.lock().expect("nobody panics with it") = Some(receiver);
    }

    fn fetch(&self, path: &Path) -> io::Result<()> {
        let (name, _) = self.inner.known(path)?;
        let mut queue = self.inner.queue();
        queue.turn = queue.order.iter().position(|file| file == name).unwrap_or(queue.turn);
        self.inner.changed.notify_all();
        loop {
            if queue.done.contains(name) {
                return Ok(());
            }
            if let Some(error) = queue.failed.take() {
                return Err(io::Error::other(error));
            }
            self.inner.client.check().map_err(io::Error::other)?;
            queue = self.inner.changed.wait_timeout(queue, LOOK).expect("nobody panics with it").0;
        }
    }

    /// What is left of a file is its header, which the next run reads, should there be one.
    fn release(&self, path: &Path) -> io::Result<()> {
        let (name, _) = self.inner.known(path)?;
        let head = self.inner.heads.lock().expect("nobody panics with it").get(name).copied().unwrap_or(0);
        self.inner.behead(name, head)
    }
}

/// Parts that are asked for with one request: those that lie side by side, or nearly.
fn together(mut parts: Vec<Part<'_>>) -> Vec<Vec<Part<'_>>> {
    parts.sort_unstable();
    parts.dedup();
    let mut all: Vec<Vec<Part<'_>>> = Vec::new();
    let mut end = 0;
    for part in parts {
        let (name, offset, len) = part;
        match all.last_mut() {
            Some(last)
                if last[0].0 == name && offset <= end + GAP && offset + len as u64 - last[0].1 <= MOST =>
            {
                last.push(part);
                end = end.max(offset + len as u64);
            }
            _ => {
                all.push(vec![part]);
                end = offset + len as u64;
            }
        }
    }
    all
}

/// A weight file that may not be here yet.
struct Arriving {
    inner: Arc<Inner>,
    name: String,
    entry: Entry,
    /// Once it is.
    file: OnceLock<File>,
}

impl std::fmt::Debug for Arriving {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Arriving")
            .field("name", &self.name)
            .field("entry", &self.entry)
            .finish_non_exhaustive()
    }
}

impl WeightFile for Arriving {
    fn bytes(&self) -> io::Result<u64> {
        Ok(self.entry.bytes)
    }

    fn read_exact_at(&self, out: &mut [u8], offset: u64) -> io::Result<()> {
        if let Some(file) = self.file.get().filter(|_| self.inner.headed.load(Ordering::Relaxed)) {
            return file.read_exact_at(out, offset);
        }
        let end = offset + out.len() as u64;
        if end > self.entry.bytes {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if !self.inner.headed.load(Ordering::Relaxed) {
            let mut heads = self.inner.heads.lock().expect("nobody panics with it");
            let head = heads.entry(self.name.clone()).or_default();
            *head = end.max(*head);
        }
        match File::open(self.inner.path(&self.name)) {
            Ok(file) => self.file.get_or_init(|| file).read_exact_at(out, offset),
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                self.inner.read_ahead(&self.name, out, offset).map_err(io::Error::other)
            }
            Err(e) => Err(e),
        }
    }

    /// The hub's hash.
    fn stamp(&self) -> io::Result<Vec<u8>> {
        Ok(self.entry.hash.as_ref().map(Hash::text).unwrap_or_default().as_bytes().to_vec())
    }
}
