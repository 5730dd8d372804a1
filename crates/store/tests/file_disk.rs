//! Real files: direct I/O where there is any, the fallback, and files that are too short.
#![allow(clippy::unwrap_used, clippy::print_stdout)] // Tests stop at the first surprise, and say what they saw.

mod support;

use smoe_store::{AlignedBuf, DirectIo, Disk, DiskError, FileDisk, OpenMode, PAGE, StoreError};
use std::fs::{self, File};
use std::io::IoSliceMut;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use support::{Random, Vault, demand, demand_all, key, within_a_minute};

fn random_bytes(len: usize) -> Vec<u8> {
    let mut random = Random(len as u64);
    let mut bytes: Vec<u8> = (0..len / 8 + 1).flat_map(|_| random.next().to_le_bytes()).collect();
    bytes.truncate(len);
    bytes
}

fn file_of(folder: &Path, bytes: &[u8]) -> PathBuf {
    let path = folder.join(format!("file-{}", bytes.len()));
    fs::write(&path, bytes).unwrap();
    path
}

/// A direct disk in a temporary folder; none, said aloud, where the filesystem has no direct I/O.
fn direct_disk(path: &Path) -> Option<(FileDisk, usize)> {
    let disk = FileDisk::open(path, OpenMode::Auto).unwrap();
    match disk.direct().clone() {
        DirectIo::Yes { alignment } => Some((disk, alignment)),
        DirectIo::No { why } => {
            println!("SKIPPED: no direct I/O for {}: {why}", path.display());
            None
        }
    }
}

#[test]
fn direct_reads_bring_the_files_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = random_bytes(10 * PAGE + 77);
    let path = file_of(folder.path(), &bytes);
    let Some((disk, alignment)) = direct_disk(&path) else { return };
    println!("direct I/O: {}", disk.direct());
    let mut buf = AlignedBuf::zeroed(4 * PAGE).unwrap();
    for block in [alignment, PAGE] {
        for start in [0, block, 3 * block] {
            disk.read_exact_at(start as u64, &mut buf[..2 * block]).unwrap();
            assert!(buf[..2 * block] == bytes[start..start + 2 * block]);
        }
    }
    // The tail: what is there, and no more.
    assert_eq!(disk.read_at(10 * PAGE as u64, &mut buf[..PAGE]).unwrap(), 77);
    assert!(buf[..77] == bytes[10 * PAGE..]);
    assert_eq!(disk.read_at(20 * PAGE as u64, &mut buf).unwrap(), 0);
    let error = disk.read_exact_at(9 * PAGE as u64, &mut buf).unwrap_err();
    let DiskError::Short { file, offset, expected, found } = error else { panic!("{error:?}") };
    assert_eq!((file, offset), (path, 9 * PAGE as u64));
    assert_eq!((expected, found), (4 * PAGE as u64, PAGE as u64 + 77));
}

#[test]
fn misaligned_direct_reads_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = file_of(folder.path(), &random_bytes(4 * PAGE));
    let Some((disk, alignment)) = direct_disk(&path) else { return };
    let mut buf = AlignedBuf::zeroed(2 * PAGE).unwrap();
    for (offset, range) in [(1, 0..PAGE), (0, 0..PAGE - 1), (0, 1..PAGE + 1)] {
        let error = disk.read_exact_at(offset, &mut buf[range]).unwrap_err();
        assert!(matches!(error, DiskError::Misaligned { alignment: a, .. } if a == alignment), "{error}");
    }
}

#[test]
fn ranges_may_be_anywhere() {
    let folder = tempfile::tempdir().unwrap();
    // Longer than the bounce buffer, and with a tail.
    let bytes = random_bytes((17 << 20) + 4321);
    let path = file_of(folder.path(), &bytes);
    let mut random = Random(1);
    for mode in [OpenMode::Auto, OpenMode::Buffered] {
        let disk = FileDisk::open(&path, mode).unwrap();
        let mut buf = AlignedBuf::zeroed(bytes.len()).unwrap();
        let mut check = |start: usize, len: usize, skew: usize| {
            let target = &mut buf[skew..skew + len];
            disk.read_range(start as u64, target).unwrap();
            assert!(*target == bytes[start..start + len], "{len} bytes at {start}");
        };
        check(0, bytes.len(), 0);
        check(4096, bytes.len() - 4096, 0);
        check(1, bytes.len() - 1, 1);
        check(bytes.len() - 1, 1, 0);
        check(5, 0, 3);
        for _ in 0..100 {
            let start = random.below(bytes.len());
            check(start, random.below((bytes.len() - start).min(100_000)), random.below(4096));
        }
        let start = bytes.len() - 1000;
        let error = disk.read_range(start as u64, &mut buf[..5000]).unwrap_err();
        assert!(matches!(error, DiskError::Short { expected: 5000, found: 1000, .. }), "{error}");
    }
}

#[test]
fn scattered_reads_fill_every_buffer() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = random_bytes(64 * PAGE);
    let path = file_of(folder.path(), &bytes);
    for mode in [OpenMode::Auto, OpenMode::Buffered] {
        let disk = FileDisk::open(&path, mode).unwrap();
        // Many buffers: more than one call takes, of 512 bytes each, with gaps in memory; skipped where blocks
        // are larger.
        let sizes = if disk.direct().alignment() <= 512 { vec![512; 1500] } else { vec![PAGE; 7] };
        let mut memory = AlignedBuf::zeroed(sizes.len() * 2 * PAGE).unwrap();
        let mut bufs: Vec<IoSliceMut<'_>> = memory
            .chunks_exact_mut(2 * PAGE)
            .zip(&sizes)
            .map(|(chunk, &size)| IoSliceMut::new(&mut chunk[..size]))
            .collect();
        disk.read_exact_vectored_at(PAGE as u64, &mut bufs).unwrap();
        let read: Vec<u8> = bufs.iter().flat_map(|buf| buf.iter().copied()).collect();
        assert!(read == bytes[PAGE..PAGE + read.len()]);
        let late = 63 * PAGE as u64;
        let error = disk.read_exact_vectored_at(late, &mut bufs).unwrap_err();
        assert!(matches!(error, DiskError::Short { found: 0, .. }), "{error}");
    }
}

#[test]
fn a_filesystem_in_memory_falls_back_with_a_reason() {
    let Ok(folder) = tempfile::tempdir_in("/dev/shm") else {
        println!("SKIPPED: /dev/shm is not there or not writable");
        return;
    };
    let bytes = random_bytes(3 * PAGE + 5);
    let path = file_of(folder.path(), &bytes);
    let disk = FileDisk::open(&path, OpenMode::Auto).unwrap();
    let DirectIo::No { why } = disk.direct() else { panic!("direct I/O on a tmpfs: {}", disk.direct()) };
    println!("/dev/shm: {why}");
    assert!(why.contains("memory"));
    let mut buf = vec![0; bytes.len() - 3];
    disk.read_exact_at(3, &mut buf).unwrap();
    assert!(buf == bytes[3..]);
    let error = FileDisk::open(&path, OpenMode::Direct).unwrap_err();
    assert!(matches!(error, DiskError::NotDirect { .. }), "{error}");
}

#[test]
fn what_is_not_a_file_does_not_open() {
    let folder = tempfile::tempdir().unwrap();
    for path in [folder.path().to_owned(), folder.path().join("nowhere")] {
        let error = FileDisk::open(&path, OpenMode::Auto).unwrap_err();
        assert!(matches!(&error, DiskError::Open { file, .. } if *file == path), "{error}");
    }
    let empty = file_of(folder.path(), &[]);
    let disk = FileDisk::open(&empty, OpenMode::Auto).unwrap();
    assert!(disk.is_empty() && matches!(disk.direct(), DirectIo::No { .. }));
}

#[test]
fn a_small_file_can_be_direct_too() {
    let folder = tempfile::tempdir().unwrap();
    for len in [1, 511, 512, 513, 5000] {
        let bytes = random_bytes(len);
        let disk = FileDisk::open(file_of(folder.path(), &bytes), OpenMode::Auto).unwrap();
        let mut buf = vec![0; len];
        disk.read_range(0, &mut buf).unwrap();
        assert!(buf == bytes, "{len}: {}", disk.direct());
    }
}

#[test]
fn a_store_on_a_real_file() {
    within_a_minute(|| {
        let folder = tempfile::tempdir().unwrap();
        let vault = Vault::new(2, 6, PAGE);
        let path = file_of(folder.path(), &vault.bytes);
        for mode in [OpenMode::Auto, OpenMode::Buffered] {
            let disk = Arc::new(FileDisk::open(&path, mode).unwrap());
            let mut store = vault.open(disk.clone(), 5, 4);
            for lease in demand(&mut store, &vault.keys()).unwrap() {
                vault.check(&lease.unwrap());
            }
            let mut store = vault.open(disk, 12, 4);
            store.preload_all(|_, _| ()).unwrap();
            assert_eq!(store.meter().snapshot().reads, 1);
            for lease in demand_all(&mut store, &vault.keys()).unwrap() {
                vault.check(&lease);
            }
        }
    });
}

#[test]
fn a_file_that_shrinks_fails_the_reads_beyond_its_end() {
    within_a_minute(|| {
        let folder = tempfile::tempdir().unwrap();
        let vault = Vault::new(1, 6, PAGE);
        let path = file_of(folder.path(), &vault.bytes);
        let disk = Arc::new(FileDisk::open(&path, OpenMode::Auto).unwrap());
        let mut store = vault.open(disk, 6, 4);
        let last = vault.record(key(0, 5));
        File::options().write(true).open(&path).unwrap().set_len(last.offset + 700).unwrap();
        let error = demand_all(&mut store, &[key(0, 5)]).unwrap_err();
        println!("{error}");
        let StoreError::Read { source, .. } = error else { panic!("{error:?}") };
        let DiskError::Short { expected, found, .. } = *source else { panic!("{source:?}") };
        assert_eq!((expected, found), (u64::from(last.len), 700));
        assert_eq!(demand_all(&mut store, &vault.keys()[..5]).unwrap().len(), 5);

        // Opened short: refused at once, by name.
        let disk = Arc::new(FileDisk::open(&path, OpenMode::Auto).unwrap());
        let config = smoe_store::StoreConfig::new(6, vault.slot_bytes());
        let error = smoe_store::Store::open(disk, vault.records.clone(), config, None, Arc::default());
        let error = error.map(|_| ()).unwrap_err();
        println!("{error}");
        assert!(matches!(error, StoreError::Truncated { key: k, .. } if k == key(0, 5)));
    });
}
