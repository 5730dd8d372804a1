//! The weight files of a checkpoint: on the disk, or on their way to it.
//!
//! A sculpt reads headers and samples of all files first, and then each file's weights once. So a file need not be
//! there before its turn, nor after it: who downloads a checkpoint hands in a [`WeightFiles`] that
//! [`arrives`](WeightFiles::arrives), and is told the order of the files, when one is needed, and when it is not
//! needed any more.

use std::collections::HashMap;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use smoe_format::file_name;

use crate::checkpoint::INDEX;

/// An open weight file, read by place from any thread.
pub trait WeightFile: fmt::Debug + Send + Sync {
    /// Its length in bytes, all of it, whether it is there or not.
    ///
    /// # Errors
    /// What the system says.
    fn bytes(&self) -> io::Result<u64>;

    /// Fills `out` from `offset` on. Before the file was fetched this may be slow.
    ///
    /// # Errors
    /// If so much is not there, or cannot be had.
    fn read_exact_at(&self, out: &mut [u8], offset: u64) -> io::Result<()>;

    /// What tells this file from another of the same name and length: unfinished work goes on only with the very files
    /// that it was begun with.
    ///
    /// # Errors
    /// What the system says.
    fn stamp(&self) -> io::Result<Vec<u8>>;
}

/// The weight files of a checkpoint, by path.
pub trait WeightFiles: Sync {
    /// Whether there is such a file, here or where it comes from.
    fn has(&self, path: &Path) -> bool;

    /// Opens a file; its data need not be here.
    ///
    /// # Errors
    /// If there is none, or it cannot be opened.
    fn open(&self, path: &Path) -> io::Result<Box<dyn WeightFile>>;

    /// Whether files must be fetched before their weights are read, and are to be released after.
    fn arrives(&self) -> bool {
        false
    }

    /// These places will be read, in this order, before any file is fetched.
    ///
    /// # Errors
    /// If they cannot be had.
    fn expect(&self, places: &[Place<'_>]) -> io::Result<()> {
        let _ = places;
        Ok(())
    }

    /// Bytes of a file that are here already.
    fn here(&self, path: &Path) -> u64 {
        let _ = path;
        0
    }

    /// The files will be fetched in this order, each once.
    fn order(&self, paths: &[PathBuf]) {
        let _ = paths;
    }

    /// Waits until a file is here, whole and as it should be.
    ///
    /// # Errors
    /// If it cannot be had.
    fn fetch(&self, path: &Path) -> io::Result<()> {
        let _ = path;
        Ok(())
    }

    /// A file is not needed any more: what was made of it is on the disk.
    ///
    /// # Errors
    /// If it cannot be removed.
    fn release(&self, path: &Path) -> io::Result<()> {
        let _ = path;
        Ok(())
    }
}

/// Some bytes of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place<'a> {
    /// The file.
    pub path: &'a Path,
    /// The first of them.
    pub offset: u64,
    /// How many.
    pub bytes: usize,
}

/// Files that are all on the disk, and stay there.
#[derive(Clone, Copy, Debug, Default)]
pub struct OnDisk;

impl WeightFiles for OnDisk {
    fn has(&self, path: &Path) -> bool {
        path.is_file()
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn WeightFile>> {
        Ok(Box::new(File::open(path)?))
    }
}

impl WeightFile for File {
    fn bytes(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }

    fn read_exact_at(&self, out: &mut [u8], offset: u64) -> io::Result<()> {
        std::os::unix::fs::FileExt::read_exact_at(self, out, offset)
    }

    /// Length and time of change.
    fn stamp(&self) -> io::Result<Vec<u8>> {
        let meta = self.metadata()?;
        Ok([meta.len() as i64, meta.mtime(), meta.mtime_nsec()]
            .iter()
            .flat_map(|v| v.to_le_bytes())
            .collect())
    }
}

/// Weight files, and the places that were expected of them.
pub(crate) struct Expected<'a> {
    files: &'a dyn WeightFiles,
    /// Bytes by file and first byte.
    places: Mutex<HashMap<(PathBuf, u64), usize>>,
    only_noted: AtomicBool,
}

impl<'a> Expected<'a> {
    pub fn of(files: &'a dyn WeightFiles) -> Self {
        Self { files, places: Mutex::default(), only_noted: AtomicBool::new(false) }
    }

    /// What is expected from now on is noted, and not asked for.
    pub fn only_note(&self) {
        self.only_noted.store(true, Ordering::Relaxed);
    }

    /// Bytes of all places, each counted once.
    pub fn bytes(&self) -> u64 {
        self.places.lock().expect("nobody panics with it").values().map(|bytes| *bytes as u64).sum()
    }
}

impl WeightFiles for Expected<'_> {
    fn has(&self, path: &Path) -> bool {
        self.files.has(path)
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn WeightFile>> {
        self.files.open(path)
    }

    fn arrives(&self) -> bool {
        self.files.arrives()
    }

    fn expect(&self, places: &[Place<'_>]) -> io::Result<()> {
        let mut noted = self.places.lock().expect("nobody panics with it");
        for place in places {
            let bytes = noted.entry((place.path.to_owned(), place.offset)).or_default();
            *bytes = place.bytes.max(*bytes);
        }
        drop(noted);
        if self.only_noted.load(Ordering::Relaxed) { Ok(()) } else { self.files.expect(places) }
    }

    fn here(&self, path: &Path) -> u64 {
        self.files.here(path)
    }

    fn order(&self, paths: &[PathBuf]) {
        self.files.order(paths);
    }

    fn fetch(&self, path: &Path) -> io::Result<()> {
        self.files.fetch(path)
    }

    fn release(&self, path: &Path) -> io::Result<()> {
        self.files.release(path)
    }
}

/// Names of the files beside the weights that are read of a checkpoint, if they are there; all of them are small.
pub fn small_files() -> impl Iterator<Item = &'static str> {
    file_name::SIDE_FILES.into_iter().chain([INDEX])
}
