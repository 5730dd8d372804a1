//! A file read past the page cache where the system allows it.
//!
//! Direct I/O is the default because the engine's own cache claims the memory that the page cache would use:
//! measured on others' engines, +65 to +113 % for models several times memory (EXP-STORE-01). A flag that was
//! accepted proves nothing (tmpfs takes it, encrypted files may drop it without a word), so the alignment is
//! found by real reads, and the answer with its reason is part of [`Disk::direct`].
//!
//! Where a filesystem refuses, reads are buffered and the page cache is left alone: no `DONTNEED` after a read,
//! no `RANDOM`. Keeping pages gained a factor 3.7 for an engine whose memory was free, dropping them helps one
//! whose cache fills memory (EXP-STORE-02), and the kernel gives clean pages back before it swaps; under a
//! cgroup they are charged to the limit, but reclaimed first. What the reason string buys is that the user can
//! see it.
//!
//! macOS: `F_NOCACHE`, which bypasses the cache but does not evict what is already in it, and one descriptor
//! per reader thread, because uncached reads through one descriptor wait for each other there.

use crate::disk::{DirectIo, Disk, DiskError};
use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// How to open a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OpenMode {
    /// Past the page cache where that works, through it otherwise.
    #[default]
    Auto,
    /// Past the page cache, or an error.
    Direct,
    /// Through the page cache.
    Buffered,
}

/// A file on a filesystem.
#[derive(Debug)]
pub struct FileDisk {
    /// Readers are spread over these; one except on macOS.
    descriptors: Vec<File>,
    path: PathBuf,
    len: u64,
    direct: DirectIo,
}

impl FileDisk {
    /// Opens `path` for positioned reads.
    ///
    /// # Errors
    /// [`DiskError::Open`] if it cannot be opened, [`DiskError::NotDirect`] if `mode` is
    /// [`OpenMode::Direct`] and the file cannot be read so.
    pub fn open(path: impl AsRef<Path>, mode: OpenMode) -> Result<Self, DiskError> {
        let path = path.as_ref();
        let cannot = |source| DiskError::Open { file: path.to_owned(), source };
        let buffered = File::open(path).map_err(cannot)?;
        let len = regular_length(&buffered).map_err(cannot)?;
        let disk = |descriptors, direct| Self { descriptors, path: path.to_owned(), len, direct };
        if mode == OpenMode::Buffered {
            return Ok(disk(vec![buffered], DirectIo::No { why: "buffered reads were asked for".into() }));
        }
        match platform::open_direct(path, &buffered, len) {
            Ok((descriptors, alignment)) => Ok(disk(descriptors, DirectIo::Yes { alignment })),
            Err(why) if mode == OpenMode::Direct => Err(DiskError::NotDirect { file: path.to_owned(), why }),
            Err(why) => Ok(disk(vec![buffered], DirectIo::No { why })),
        }
    }

    /// This thread's descriptor.
    fn descriptor(&self) -> &File {
        match self.descriptors.as_slice() {
            [only] => only,
            several => &several[thread_number() % several.len()],
        }
    }

    fn check_alignment(&self, offset: u64, buf: &[u8]) -> Result<(), DiskError> {
        let alignment = self.direct.alignment();
        let address = buf.as_ptr().addr();
        if (offset | buf.len() as u64 | address as u64).is_multiple_of(alignment as u64) {
            return Ok(());
        }
        Err(DiskError::Misaligned { file: self.path.clone(), offset, len: buf.len(), address, alignment })
    }

    fn io_error(&self, offset: u64, len: usize, source: io::Error) -> DiskError {
        DiskError::Io { file: self.path.clone(), offset, len, source }
    }
}

impl Disk for FileDisk {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<usize, DiskError> {
        self.check_alignment(offset, buf)?;
        let alignment = self.direct.alignment();
        let file = self.descriptor();
        let mut filled = 0;
        while filled < buf.len() {
            let read = match file.read_at(&mut buf[filled..], offset + filled as u64) {
                Ok(0) => break,
                Ok(read) => read,
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                Err(e) => return Err(self.io_error(offset + filled as u64, buf.len() - filled, e)),
            };
            let end = filled + read;
            // A direct read goes on from a block's start only. One that stopped within a block is at the end
            // of the file, or is repeated from that block; if that brings nothing new, the file has shrunk.
            let resume = end - end % alignment;
            if end < buf.len() && resume < end && (offset + end as u64 >= self.len || resume <= filled) {
                return Ok(end);
            }
            filled = if end == buf.len() { end } else { resume };
        }
        Ok(filled)
    }

    fn len(&self) -> u64 {
        self.len
    }

    fn name(&self) -> &Path {
        &self.path
    }

    fn direct(&self) -> &DirectIo {
        &self.direct
    }

    #[cfg(target_os = "linux")]
    fn read_exact_vectored_at(&self, offset: u64, bufs: &mut [io::IoSliceMut<'_>]) -> Result<(), DiskError> {
        let mut total = 0;
        for buf in &*bufs {
            self.check_alignment(offset + total as u64, buf)?;
            total += buf.len();
        }
        let mut read = platform::read_vectored(self.descriptor(), offset, bufs)
            .map_err(|source| self.io_error(offset, total, source))?;
        if read == total {
            return Ok(());
        }
        // Interrupted, or too many buffers for one call: the buffers that are not full are read on their own.
        let mut at = offset;
        for buf in bufs {
            if read < buf.len() {
                self.read_exact_at(at, buf)?;
            }
            read = read.saturating_sub(buf.len());
            at += buf.len() as u64;
        }
        Ok(())
    }
}

fn regular_length(file: &File) -> io::Result<u64> {
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(io::Error::new(ErrorKind::InvalidInput, "not a regular file"));
    }
    Ok(metadata.len())
}

/// A small number that differs between threads, given out in the order of first use.
fn thread_number() -> usize {
    use std::sync::atomic::{AtomicUsize, Ordering};
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local!(static NUMBER: usize = NEXT.fetch_add(1, Ordering::Relaxed));
    NUMBER.with(|number| *number)
}

#[cfg(target_os = "linux")]
mod platform {
    //! `O_DIRECT`, and what it takes to believe in it.

    use crate::aligned::AlignedBuf;
    use std::fs::{File, OpenOptions};
    use std::io::{self, IoSliceMut};
    use std::mem::MaybeUninit;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::{FileExt, OpenOptionsExt};
    use std::path::Path;

    /// Block sizes to try, smallest first: old drives, most drives, and what our records guarantee.
    const ALIGNMENTS: [usize; 3] = [512, 4096, 16384];

    /// Descriptors for direct reads and the alignment that they need, or why there are none.
    pub(super) fn open_direct(path: &Path, buffered: &File, len: u64) -> Result<(Vec<File>, usize), String> {
        if len == 0 {
            return Err("the file is empty, so a trial read would prove nothing".into());
        }
        if let Some(name) = memory_filesystem(buffered) {
            return Err(format!("{name} keeps the file in memory"));
        }
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_DIRECT)
            .open(path)
            .map_err(|e| format!("opening with O_DIRECT: {e}"))?;
        if stated_alignment(&file) == Some(0) {
            return Err("the filesystem says that this file cannot be read directly".into());
        }
        let alignment = find_alignment(&file, len)?;
        Ok((vec![file], alignment))
    }

    /// The smallest alignment at which a real read brings all the bytes that it should.
    fn find_alignment(file: &File, len: u64) -> Result<usize, String> {
        let mut scratch = AlignedBuf::zeroed(2 * 16384).map_err(|e| e.to_string())?;
        let mut refusal = String::new();
        for alignment in ALIGNMENTS {
            // Offset and address are multiples of this alignment and of no larger one.
            let offset = if len > alignment as u64 { alignment as u64 } else { 0 };
            let expected = (len - offset).min(alignment as u64) as usize;
            match file.read_at(&mut scratch[alignment..2 * alignment], offset) {
                Ok(read) if read == expected => return Ok(alignment),
                Ok(read) => refusal = format!("a trial read brought {read} bytes of {expected}"),
                Err(e) => refusal = format!("a trial read at alignment {alignment}: {e}"),
            }
        }
        Err(refusal)
    }

    /// Filesystems without a disk, some of which accept `O_DIRECT` and ignore it.
    fn memory_filesystem(file: &File) -> Option<&'static str> {
        const TMPFS_MAGIC: u64 = 0x0102_1994;
        const RAMFS_MAGIC: u64 = 0x8584_58f6;
        let mut stat = MaybeUninit::<libc::statfs>::zeroed();
        // SAFETY: the descriptor is open, and `stat` is a valid place for the answer.
        let rc = unsafe { libc::fstatfs(file.as_raw_fd(), stat.as_mut_ptr()) };
        // SAFETY: zeroed above, and all-zero is a valid value of this struct of integers.
        let stat = unsafe { stat.assume_init() };
        // The field's type differs between C libraries; its low 32 bits are the magic everywhere.
        match stat.f_type as u64 & 0xffff_ffff {
            _ if rc != 0 => None,
            TMPFS_MAGIC => Some("tmpfs"),
            RAMFS_MAGIC => Some("ramfs"),
            _ => None,
        }
    }

    /// What the kernel says direct reads of this file need (Linux 6.1); 0 means that it has none.
    fn stated_alignment(file: &File) -> Option<u32> {
        let mut stat = MaybeUninit::<libc::statx>::zeroed();
        // SAFETY: an open descriptor, an empty path as AT_EMPTY_PATH wants it, and a valid place for the answer.
        let rc = unsafe {
            libc::statx(
                file.as_raw_fd(),
                c"".as_ptr(),
                libc::AT_EMPTY_PATH,
                libc::STATX_DIOALIGN,
                stat.as_mut_ptr(),
            )
        };
        // SAFETY: zeroed above, and all-zero is a valid value of this struct of integers.
        let stat = unsafe { stat.assume_init() };
        (rc == 0 && stat.stx_mask & libc::STATX_DIOALIGN != 0).then_some(stat.stx_dio_offset_align)
    }

    /// One `preadv`: the bytes that it brought, which may be fewer than asked.
    pub(super) fn read_vectored(file: &File, offset: u64, bufs: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let count = bufs.len().min(1024); // IOV_MAX
        let offset =
            libc::off_t::try_from(offset).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
        loop {
            // SAFETY: `IoSliceMut` is documented to have the layout of `iovec`; the first `count` are valid,
            // and borrowed mutably for the duration of the call.
            let read =
                unsafe { libc::preadv(file.as_raw_fd(), bufs.as_mut_ptr().cast(), count as i32, offset) };
            if let Ok(read) = usize::try_from(read) {
                return Ok(read);
            }
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
    }
}

#[cfg(target_os = "macos")]
mod platform {
    //! `F_NOCACHE`. Compile-checked; not run in CI on Linux.

    use crate::aligned::PAGE;
    use std::fs::File;
    use std::io;
    use std::os::fd::AsRawFd;
    use std::path::Path;

    /// As many descriptors as reader threads are useful on one drive.
    const DESCRIPTORS: usize = 8;

    /// Descriptors for uncached reads. Unaligned ones would pass through the cache, so alignment is demanded.
    pub(super) fn open_direct(path: &Path, _: &File, _: u64) -> Result<(Vec<File>, usize), String> {
        let files: Result<Vec<File>, io::Error> = (0..DESCRIPTORS).map(|_| open_uncached(path)).collect();
        files.map(|files| (files, PAGE)).map_err(|e| format!("opening with F_NOCACHE: {e}"))
    }

    fn open_uncached(path: &Path) -> io::Result<File> {
        let file = File::open(path)?;
        // SAFETY: the descriptor is open, and F_NOCACHE takes an int.
        if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_NOCACHE, 1) } == -1 {
            return Err(io::Error::last_os_error());
        }
        Ok(file)
    }
}

#[cfg(not(any(target_os = "linux", target_os = "macos")))]
mod platform {
    use std::fs::File;
    use std::path::Path;

    pub(super) fn open_direct(_: &Path, _: &File, _: u64) -> Result<(Vec<File>, usize), String> {
        Err("not implemented on this system".into())
    }
}
