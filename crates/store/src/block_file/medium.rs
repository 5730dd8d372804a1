//! What a block file asks of a disk, and the file that gives it.

use crate::aligned::AlignedBuf;
use crate::block_file::error::BlockFileError;
use crate::block_file::layout::BLOCK;
use crate::disk::{DirectIo, Disk, DiskError};
use crate::file_disk::{FileDisk, OpenMode};
use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// A file that many threads read and write at once.
///
/// [`Disk::len`] stays what it was when the file was opened; [`WriteDisk::len_now`] follows.
pub trait WriteDisk: Disk {
    /// Writes all of `bytes` at `offset`; the file grows if they end beyond it. Offset, length and address
    /// are multiples of 4096.
    ///
    /// # Errors
    /// What the system says, after which any part of the bytes may have been written.
    fn write_all_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()>;

    /// Length in bytes.
    ///
    /// # Errors
    /// What the system says.
    fn len_now(&self) -> io::Result<u64>;

    /// Cuts the file off, or extends it with zeros.
    ///
    /// # Errors
    /// What the system says.
    fn set_len(&self, len: u64) -> io::Result<()>;

    /// Returns once what was written before is on the drive.
    ///
    /// # Errors
    /// What the system says.
    fn sync(&self) -> io::Result<()>;
}

/// A locked file on a filesystem.
pub(super) struct FileMedium {
    path: PathBuf,
    reads: FileDisk,
    writes: File,
    /// The descriptor that was opened first; the lock goes with it.
    locked: File,
    direct: DirectIo,
}

impl FileMedium {
    /// Opens or creates `path`, for this user only, and locks it. Reads and writes are buffered at first.
    ///
    /// A symbolic link is refused: what another user has put there should not say which file is overwritten.
    pub(super) fn open(path: &Path) -> Result<Self, BlockFileError> {
        let cannot = |source| DiskError::Open { file: path.to_owned(), source };
        let locked = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW)
            .open(path)
            .map_err(cannot)?;
        match locked.try_lock() {
            Ok(()) => (),
            Err(TryLockError::WouldBlock) => return Err(BlockFileError::InUse { file: path.to_owned() }),
            Err(TryLockError::Error(source)) => {
                return Err(BlockFileError::Io { file: path.to_owned(), what: "lock it", source });
            }
        }
        let reads = FileDisk::open(path, OpenMode::Buffered)?;
        let writes = locked.try_clone().map_err(cannot)?;
        let direct = reads.direct().clone();
        Ok(Self { path: path.to_owned(), reads, writes, locked, direct })
    }

    /// Goes past the page cache, as far as `mode` asks for it. The first page is written and synced.
    pub(super) fn past_the_cache(self, mode: OpenMode) -> Result<Self, DiskError> {
        let reads = FileDisk::open(&self.path, mode)?;
        let DirectIo::Yes { alignment } = *reads.direct() else {
            let direct = reads.direct().clone();
            return Ok(Self { reads, direct, ..self });
        };
        match direct_writer(&self.path, &self.locked, &reads, alignment) {
            Ok(writes) => Ok(Self { reads, writes, direct: DirectIo::Yes { alignment }, ..self }),
            Err(why) if mode == OpenMode::Direct => Err(DiskError::NotDirect { file: self.path, why }),
            Err(why) => {
                let reads = FileDisk::open(&self.path, OpenMode::Buffered)?;
                Ok(Self { reads, direct: DirectIo::No { why }, ..self })
            }
        }
    }
}

/// A descriptor for direct writes, proven by writing the first page as it is.
fn direct_writer(path: &Path, locked: &File, reads: &FileDisk, alignment: usize) -> Result<File, String> {
    let writes = platform::open_direct(path, locked, alignment)?;
    let mut page = AlignedBuf::zeroed(BLOCK).map_err(|e| e.to_string())?;
    reads.read_range(0, &mut page).map_err(|e| e.to_string())?;
    writes.write_all_at(&page, 0).map_err(|e| format!("a trial write: {e}"))?;
    Ok(writes)
}

impl Disk for FileMedium {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<usize, DiskError> {
        self.reads.read_at(offset, buf)
    }

    fn len(&self) -> u64 {
        self.reads.len()
    }

    fn name(&self) -> &Path {
        &self.path
    }

    fn direct(&self) -> &DirectIo {
        &self.direct
    }
}

impl WriteDisk for FileMedium {
    fn write_all_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.writes.write_all_at(bytes, offset)
    }

    fn len_now(&self) -> io::Result<u64> {
        Ok(self.locked.metadata()?.len())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.locked.set_len(len)
    }

    fn sync(&self) -> io::Result<()> {
        self.writes.sync_data()
    }
}

#[cfg(target_os = "linux")]
mod platform {
    //! `O_DIRECT`.

    use crate::block_file::layout::BLOCK;
    use std::fs::{File, OpenOptions};
    use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
    use std::path::Path;

    pub(super) fn open_direct(path: &Path, locked: &File, alignment: usize) -> Result<File, String> {
        if alignment > BLOCK {
            return Err(format!("direct writes must be aligned to {alignment}, and blocks are to {BLOCK}"));
        }
        let file = OpenOptions::new()
            .write(true)
            .custom_flags(libc::O_DIRECT | libc::O_NOFOLLOW)
            .open(path)
            .map_err(|e| format!("opening for writing with O_DIRECT: {e}"))?;
        let identity = |file: &File| file.metadata().map(|m| (m.dev(), m.ino())).map_err(|e| e.to_string());
        if identity(&file)? != identity(locked)? {
            return Err("the file was replaced while it was opened".into());
        }
        Ok(file)
    }
}

#[cfg(target_os = "macos")]
mod platform {
    //! `F_NOCACHE`, which takes writes of any alignment. Compile-checked; not run in CI on Linux.

    use std::fs::File;
    use std::io;
    use std::os::fd::AsRawFd;
    use std::path::Path;

    pub(super) fn open_direct(_: &Path, locked: &File, _: usize) -> Result<File, String> {
        let file = locked.try_clone().map_err(|e| e.to_string())?;
        // SAFETY: the descriptor is open, and F_NOCACHE takes an int.
        if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_NOCACHE, 1) } == -1 {
            return Err(format!("F_NOCACHE: {}", io::Error::last_os_error()));
        }
        Ok(file)
    }
}

#[cfg(not(any(target_os = "linux", target_os = "macos")))]
mod platform {
    use std::fs::File;
    use std::path::Path;

    pub(super) fn open_direct(_: &Path, _: &File, _: usize) -> Result<File, String> {
        Err("not implemented on this system".into())
    }
}
