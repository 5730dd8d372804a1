//! A repository as a directory in which its files seem to lie.

mod arriving;
mod dir;

use std::collections::{HashMap, HashSet};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

use smoe_sculpt::WeightFile as _;

use crate::client::{Client, Failed, Patience};
use crate::error::HubError;
use crate::listing::{Entry, Hasher, Listing};
use crate::samples::Samples;
use dir::{State, check_name, clear, length, lock, read_state, write_state};

const SAMPLES: &str = ".samples";
/// Bytes received at once.
const PIECE: usize = 1 << 20;
/// Headers are read by parts of this length and more: nearly all that are published fit.
const HEAD: u64 = 512 << 10;
/// No header ends further on.
const MAX_HEAD: u64 = 257 << 20;
/// Between two looks at whether to stop.
const LOOK: Duration = Duration::from_millis(100);

/// Sees a download.
pub trait Watch: Send + Sync {
    /// So many more bytes are to come, some of which may be there.
    fn expected(&self, bytes: u64);
    /// So many more of them are there.
    fn received(&self, bytes: u64);
    /// Weight files on the disk have so many bytes now.
    fn held(&self, bytes: u64);
    /// Something that may pass went wrong.
    fn note(&self, text: &str);
}

impl Watch for () {
    fn expected(&self, _: u64) {}
    fn received(&self, _: u64) {}
    fn held(&self, _: u64) {}
    fn note(&self, _: &str) {}
}

/// Which hub, and how to ask it. Not shown by `{:?}`: it holds a secret.
#[derive(Clone)]
pub struct Options {
    /// Its address.
    pub endpoint: String,
    /// Who asks; sent to the hub's own host only.
    pub token: Option<String>,
    /// A branch, a tag or a commit.
    pub revision: String,
    /// When to give up.
    pub patience: Patience,
    /// Give up what the directory holds of another checkpoint.
    pub force: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            endpoint: "https://huggingface.co".to_owned(),
            token: None,
            revision: "main".to_owned(),
            patience: Patience::default(),
            force: false,
        }
    }
}

/// A repository on its way to the disk. Dropping it stops what is being received; [`Pull::finish`] removes what is
/// left.
pub struct Pull {
    inner: Arc<Inner>,
    receiver: Mutex<Option<JoinHandle<()>>>,
    /// Locked as long as this lives.
    _lock: File,
}

struct Inner {
    client: Client,
    dir: PathBuf,
    listing: Listing,
    samples: Samples,
    /// Bytes of weight files on the disk.
    held: AtomicU64,
    /// Files whose bytes were counted among those held.
    opened: Mutex<HashSet<String>>,
    /// Held while a header is being received.
    heading: Mutex<()>,
    /// How far each file was read before samples were: its header.
    heads: Mutex<HashMap<String, u64>>,
    /// Headers are read.
    headed: AtomicBool,
    /// Files come in order now.
    ordered: AtomicBool,
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Default)]
struct Queue {
    order: Vec<String>,
    /// The one that is waited for; the one after it may come.
    turn: usize,
    done: HashSet<String>,
    failed: Option<HubError>,
}

impl Pull {
    /// Makes `dir` the place where the files of `repo` (`OWNER/NAME`) arrive, or goes on there. The commit that a
    /// revision meant when `dir` was begun counts until it is finished.
    ///
    /// # Errors
    /// If the hub cannot be asked or does not have it, if another process is at work in `dir`, or if `dir` holds parts
    /// of something else.
    pub fn open(
        dir: &Path,
        repo: &str,
        options: &Options,
        watch: Arc<dyn Watch>,
        stop: &'static AtomicBool,
    ) -> Result<Self, HubError> {
        check_name(repo)?;
        let hub = (options.endpoint.as_str(), repo, options.token.as_deref());
        let client = Client::new(hub, options.patience, watch, stop)?;
        fs::create_dir_all(dir).map_err(HubError::io("create", dir))?;
        let lock = lock(dir)?;
        let asked =
            |commit: String| State { repo: repo.to_owned(), revision: options.revision.clone(), commit };
        let mut begun = read_state(dir)?;
        if let Some(found) = begun.take_if(|found| *found != asked(found.commit.clone())) {
            if !options.force {
                let name = |s: &State| format!("{} {}", s.repo, s.revision);
                let (found, expected) = (name(&found), name(&asked(String::new())));
                return Err(HubError::Other { dir: dir.to_owned(), found, expected });
            }
            clear(dir)?;
        }
        let revision = begun.as_ref().map_or(options.revision.as_str(), |begun| begun.commit.as_str());
        let listing = Listing::parse(&client.listing(revision)?)
            .map_err(|what| HubError::Answer { url: client.endpoint().public(), what })?;
        if begun.is_none() {
            write_state(dir, &asked(listing.commit.clone()))?;
        }
        let path = dir.join(SAMPLES);
        let samples = Samples::open(&path).map_err(HubError::io("open", &path))?;
        let inner = Inner {
            client,
            dir: dir.to_owned(),
            listing,
            samples,
            held: AtomicU64::new(0),
            opened: Mutex::default(),
            heading: Mutex::new(()),
            heads: Mutex::default(),
            headed: AtomicBool::new(false),
            ordered: AtomicBool::new(false),
            queue: Mutex::default(),
            changed: Condvar::new(),
        };
        Ok(Self { inner: Arc::new(inner), receiver: Mutex::new(None), _lock: lock })
    }

    /// The names of the repository's files.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.inner.listing.files.keys().map(String::as_str)
    }

    /// The commit whose files these are.
    #[must_use]
    pub fn commit(&self) -> &str {
        &self.inner.listing.commit
    }

    /// Receives those of the files called `names` that the repository has, whole.
    ///
    /// # Errors
    /// If one cannot be had or does not have its hash.
    pub fn small(&self, names: &[&str]) -> Result<(), HubError> {
        for name in names.iter().filter(|name| self.inner.listing.files.contains_key(**name)) {
            if !self.inner.path(name).is_file() {
                self.inner.receive_whole(name)?;
            }
        }
        Ok(())
    }

    /// Removes the directory and what is left in it.
    ///
    /// # Errors
    /// If that fails.
    pub fn finish(self) -> Result<(), HubError> {
        self.end();
        let dir = self.inner.dir.clone();
        fs::remove_dir_all(&dir).map_err(HubError::io("remove", &dir))
    }

    fn end(&self) {
        self.inner.client.over.store(true, Ordering::Relaxed);
        self.inner.changed.notify_all();
        if let Some(receiver) = self.receiver.lock().expect("nobody panics with it").take() {
            // A panic there was told to who waited.
            let _ = receiver.join();
        }
    }
}

impl Drop for Pull {
    fn drop(&mut self) {
        self.end();
    }
}

impl Inner {
    fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    fn part(&self, name: &str) -> PathBuf {
        self.dir.join(format!("{name}.part"))
    }

    /// The name and entry of the file that seems to be at `path`.
    fn entry(&self, path: &Path) -> Option<(&str, &Entry)> {
        let name = path.strip_prefix(&self.dir).ok()?.to_str()?;
        let (name, entry) = self.listing.files.get_key_value(name)?;
        Some((name, entry))
    }

    /// As [`Self::entry`], of a file that must be one.
    fn known(&self, path: &Path) -> io::Result<(&str, &Entry)> {
        self.entry(path).ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn hold(&self, change: i64) {
        let held = self.held.fetch_add(change as u64, Ordering::Relaxed).wrapping_add(change as u64);
        self.client.watch().held(held);
    }

    /// Appends to a file's part until it has `until` bytes; every byte goes to `seen`.
    fn receive(&self, name: &str, until: u64, seen: &mut dyn FnMut(&[u8])) -> Result<(), HubError> {
        let entry = &self.listing.files[name];
        let path = self.part(name);
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).map_err(HubError::io("create", folder))?;
        }
        let mut file =
            OpenOptions::new().create(true).append(true).open(&path).map_err(HubError::io("open", &path))?;
        let mut have = file.metadata().map_err(HubError::io("read", &path))?.len();
        let url = self.client.file(&self.listing.commit, name);
        let mut piece = vec![0; PIECE];
        let mut waits = self.client.waits();
        while have < until {
            let before = have;
            let mut attempt = || -> Result<(), Failed> {
                let mut body = self.client.part(&url, name, (have, until), entry.bytes)?;
                while have < until {
                    self.client.check()?;
                    let most = piece.len().min((until - have) as usize);
                    let n = body.read(&mut piece[..most]).map_err(|e| self.client.broken(&url, &e))?;
                    if n == 0 {
                        return Err(self.client.broken(&url, &io::ErrorKind::UnexpectedEof.into()));
                    }
                    file.write_all(&piece[..n]).map_err(|e| match e.kind() {
                        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                            HubError::Full { path: path.clone(), missing: entry.bytes - have }
                        }
                        _ => HubError::io("write", &path)(e),
                    })?;
                    seen(&piece[..n]);
                    have += n as u64;
                    self.hold(n as i64);
                    if self.ordered.load(Ordering::Relaxed) {
                        self.client.watch().received(n as u64);
                    }
                }
                Ok(())
            };
            let attempted = attempt();
            if have > before {
                waits = self.client.waits();
            }
            if let Err(failed) = attempted {
                self.client.wait(&mut waits, self.client.tries(), failed)?;
            }
        }
        Ok(())
    }

    /// Receives a file, or the rest of it, and gives it its name once it has its hash.
    fn receive_whole(&self, name: &str) -> Result<(), HubError> {
        let entry = &self.listing.files[name];
        let hash = entry.hash.as_ref().ok_or_else(|| HubError::NoHash { file: name.to_owned() })?;
        let part = self.part(name);
        let mut found = String::new();
        for _ in 0..2 {
            let mut hasher = Hasher::new(hash, entry.bytes);
            self.hash_part(&part, entry.bytes, &mut hasher)?;
            self.receive(name, entry.bytes, &mut |bytes| hasher.update(bytes))?;
            found = hasher.finish();
            if found == hash.text() {
                let path = self.path(name);
                // Under its own name it is trusted, also after a power cut.
                File::open(&part).and_then(|file| file.sync_all()).map_err(HubError::io("write", &part))?;
                fs::rename(&part, &path).map_err(HubError::io("rename", &part))?;
                return self.compare_samples(name, &path);
            }
            // Damaged on the way, or on the disk: once more, from the beginning.
            fs::remove_file(&part).map_err(HubError::io("remove", &part))?;
            self.hold(-(entry.bytes as i64));
            self.client.watch().expected(entry.bytes);
            self.client.watch().note(&format!("{name} does not have its hash; it is received once more"));
        }
        Err(HubError::Hash { file: name.to_owned(), expected: hash.text().to_owned(), found })
    }

    /// Hashes what is there of a file; one that is too long is begun anew.
    fn hash_part(&self, part: &Path, bytes: u64, hasher: &mut Hasher) -> Result<(), HubError> {
        let mut file = match File::open(part) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(e) => return Err(HubError::io("open", part)(e)),
        };
        let len = file.metadata().map_err(HubError::io("read", part))?.len();
        if len > bytes {
            fs::remove_file(part).map_err(HubError::io("remove", part))?;
            self.hold(-(len as i64));
            return Ok(());
        }
        let mut piece = vec![0; PIECE];
        loop {
            self.client.check()?;
            match file.read(&mut piece).map_err(HubError::io("read", part))? {
                0 => return Ok(()),
                n => hasher.update(&piece[..n]),
            }
        }
    }

    /// What was read of a file before it came must be what came.
    fn compare_samples(&self, name: &str, path: &Path) -> Result<(), HubError> {
        let samples = self.samples.of(name);
        if samples.is_empty() {
            return Ok(());
        }
        let file = File::open(path).map_err(HubError::io("open", path))?;
        let kept = self.dir.join(SAMPLES);
        let (mut sample, mut found) = (Vec::new(), Vec::new());
        for (offset, bytes) in samples {
            sample.resize(bytes, 0);
            found.resize(bytes, 0);
            self.samples.get(name, offset, &mut sample).map_err(HubError::io("read", &kept))?;
            file.read_exact_at(&mut found, offset).map_err(HubError::io("read", path))?;
            if found != sample {
                self.samples.clear().map_err(HubError::io("remove", &kept))?;
                return Err(HubError::Inconsistent { file: name.to_owned() });
            }
        }
        Ok(())
    }

    /// Bytes of a file that is not here yet.
    fn read_ahead(&self, name: &str, out: &mut [u8], offset: u64) -> Result<(), HubError> {
        let entry = &self.listing.files[name];
        let end = offset + out.len() as u64;
        let (part, samples) = (self.part(name), self.dir.join(SAMPLES));
        if self.samples.get(name, offset, out).map_err(HubError::io("read", &samples))? {
            return Ok(());
        }
        {
            let _one = self.heading.lock().expect("nobody panics with it");
            let have = length(&part);
            // The next bytes of a header; twice as many each time, for some are long.
            if end > have && offset <= have && end <= MAX_HEAD {
                let until = (have + have.max(HEAD)).max(end).min(entry.bytes);
                self.receive(name, until, &mut |_| {})?;
            }
            if end <= length(&part) {
                let file = File::open(&part).map_err(HubError::io("open", &part))?;
                file.read_exact_at(out, offset).map_err(HubError::io("read", &part))?;
                if !self.headed.load(Ordering::Relaxed) {
                    return Ok(());
                }
                // What decides codes is a sample, wherever it lies: the part has no checked hash yet.
                return self.samples.put(name, offset, out).map_err(HubError::io("write", &samples));
            }
        }
        self.ask(name, out, offset)?;
        self.samples.put(name, offset, out).map_err(HubError::io("write", &samples))
    }

    /// Asks for a part of a file.
    fn ask(&self, name: &str, out: &mut [u8], offset: u64) -> Result<(), HubError> {
        let url = self.client.file(&self.listing.commit, name);
        let total = self.listing.files[name].bytes;
        let end = offset + out.len() as u64;
        self.client.patiently(self.client.tries(), || {
            let mut body = self.client.part(&url, name, (offset, end), total)?;
            body.read_exact(out).map_err(|e| self.client.broken(&url, &e))
        })
    }

    /// Keeps nothing but headers of files that are not among the `needed`: an earlier run was stopped before it could.
    fn let_go(&self, needed: &HashSet<&str>) {
        let heads = self.heads.lock().expect("nobody panics with it").clone();
        for (name, head) in heads.iter().filter(|(name, _)| !needed.contains(name.as_str())) {
            if length(&self.path(name)) > 0 || length(&self.part(name)) > *head {
                // What cannot be removed now only takes room until the end.
                let _ = self.behead(name, *head);
            }
        }
    }

    /// Leaves a file's header, as a part of it.
    fn behead(&self, name: &str, head: u64) -> io::Result<()> {
        let (path, part) = (self.path(name), self.part(name));
        let before = length(&path).max(length(&part));
        if path.is_file() {
            fs::rename(path, &part)?;
        }
        OpenOptions::new().write(true).open(&part)?.set_len(head.min(before))?;
        self.hold(head.min(before) as i64 - before as i64);
        Ok(())
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().expect("nobody panics with it")
    }

    /// Receives the files of the queue, one after the other, none before its turn.
    fn receive_all(&self) {
        for i in 0.. {
            let name = {
                let mut queue = self.queue();
                while queue.turn + 1 < i && self.client.check().is_ok() {
                    queue = self.changed.wait_timeout(queue, LOOK).expect("nobody panics with it").0;
                }
                let Some(name) = queue.order.get(i) else { return };
                name.clone()
            };
            let here = self.path(&name).is_file();
            let received =
                self.client.check().and_then(|()| if here { Ok(()) } else { self.receive_whole(&name) });
            let mut queue = self.queue();
            let failed = received.is_err();
            match received {
                Ok(()) => _ = queue.done.insert(name),
                Err(error) => queue.failed = Some(error),
            }
            drop(queue);
            self.changed.notify_all();
            if failed {
                return;
            }
        }
    }
}

/// A part of a file: its name, first byte, bytes.
type Part<'a> = (&'a str, u64, usize);
