//! A block file as a file: made anew or not, bounds, the lock, permissions, both kinds of I/O.

use crate::{HEADER, PAYLOAD, SLOT, config, get, keys, meta, payload, put};
use smoe_store::{BlockFile, BlockFileConfig, BlockFileError, BlockMeta, DirectIo, OpenMode};
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

/// A closed file with blocks 1 to `blocks`.
fn filled(folder: &Path, slots: usize, blocks: u128) -> PathBuf {
    let path = folder.join("blocks");
    let (mut file, _) = BlockFile::open(&path, &config(slots)).unwrap();
    (1..=blocks).for_each(|key| put(&mut file, key));
    path
}

#[test]
fn blocks_are_found_again_through_either_kind_of_io() {
    let folder = tempfile::tempdir().unwrap();
    let path = filled(folder.path(), 8, 5);
    for direct in [OpenMode::Buffered, OpenMode::Auto, OpenMode::Buffered] {
        let (mut file, opened) = BlockFile::open(&path, &BlockFileConfig { direct, ..config(8) }).unwrap();
        println!("direct I/O: {}", opened.direct_io);
        if direct == OpenMode::Buffered {
            assert!(matches!(opened.direct_io, DirectIo::No { .. }));
        }
        let five = opened.blocks as u128;
        let all: Vec<u128> = (1..=five).collect();
        assert_eq!(keys(&file), all);
        assert!(get(&mut file, &all).iter().all(|&came| came));
        put(&mut file, five + 1);
    }
    let direct = BlockFileConfig { direct: OpenMode::Direct, ..config(8) };
    match BlockFile::open(&path, &direct) {
        Ok((_, opened)) => assert!(matches!(opened.direct_io, DirectIo::Yes { .. })),
        Err(error) => println!("SKIPPED: {error}"),
    }
}

#[test]
fn a_file_of_another_fingerprint_or_size_is_started_anew() {
    let folder = tempfile::tempdir().unwrap();
    let other = BlockFileConfig { fingerprint: [1; 32], ..config(8) };
    let larger = BlockFileConfig { payload_bytes: PAYLOAD + 1, ..config(8) };
    for changed in [other, larger] {
        let path = filled(folder.path(), 8, 5);
        let (file, opened) = BlockFile::open(&path, &changed).unwrap();
        assert_eq!((opened.blocks, opened.dropped), (0, 0));
        println!("{}", opened.stale.unwrap());
        assert_eq!(path.metadata().unwrap().len(), HEADER as u64, "nothing of the old file is left");
        drop(file);
        // And back: what the other left is not believed either.
        let (_, opened) = BlockFile::open(&path, &config(8)).unwrap();
        assert!(opened.stale.is_some() && opened.blocks == 0);
    }
}

#[test]
fn a_smaller_bound_cuts_the_file_and_a_larger_one_lets_it_grow() {
    let folder = tempfile::tempdir().unwrap();
    let path = filled(folder.path(), 8, 8);
    assert_eq!(path.metadata().unwrap().len(), (HEADER + 8 * SLOT) as u64);
    let (mut file, opened) = BlockFile::open(&path, &config(3)).unwrap();
    assert_eq!((opened.blocks, opened.dropped, opened.stale), (3, 0, None));
    assert_eq!(path.metadata().unwrap().len(), (HEADER + 3 * SLOT) as u64);
    put(&mut file, 20);
    assert_eq!((file.snapshot().blocks, file.snapshot().capacity), (3, 3));
    let held = keys(&file);
    assert!(get(&mut file, &held).iter().all(|&came| came));
    drop(file);
    let (mut file, opened) = BlockFile::open(&path, &config(5)).unwrap();
    assert_eq!(opened.blocks, 3);
    (30..32).for_each(|key| put(&mut file, key));
    assert_eq!(keys(&file), [&held[..], &[30, 31]].concat());
    file.flush().unwrap();
    assert_eq!(path.metadata().unwrap().len(), (HEADER + 5 * SLOT) as u64);
}

#[test]
fn settings_without_a_file_touch_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("blocks");
    let no_queue = BlockFileConfig { queue: 0, ..config(8) };
    let no_payload = BlockFileConfig { payload_bytes: 0, ..config(8) };
    for bad in [no_queue, no_payload] {
        assert!(matches!(BlockFile::open(&path, &bad), Err(BlockFileError::Config { .. })));
    }
    let small = BlockFileConfig { max_bytes: (HEADER + SLOT) as u64 - 1, ..config(1) };
    let error = BlockFile::open(&path, &small).unwrap_err();
    assert!(matches!(error, BlockFileError::TooSmall { needed, .. } if needed == (HEADER + SLOT) as u64));
    assert!(error.to_string().contains(&(HEADER + SLOT).to_string()), "{error}");
    assert!(!path.exists());
}

#[test]
fn two_cannot_have_it_open() {
    let folder = tempfile::tempdir().unwrap();
    let path = filled(folder.path(), 8, 2);
    let (mut file, _) = BlockFile::open(&path, &config(8)).unwrap();
    let stale = BlockFileConfig { fingerprint: [1; 32], ..config(8) };
    for config in [config(8), stale] {
        assert!(matches!(BlockFile::open(&path, &config), Err(BlockFileError::InUse { .. })));
    }
    assert_eq!(get(&mut file, &[1, 2]), [true, true]);
    drop(file);
    assert_eq!(BlockFile::open(&path, &config(8)).unwrap().1.blocks, 2);
}

#[test]
fn the_file_is_private_and_what_is_not_ours_is_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let path = filled(folder.path(), 8, 2);
    assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);

    let letter = folder.path().join("letter");
    fs::write(&letter, b"Dear reader. ".repeat(1000)).unwrap();
    let error = BlockFile::open(&letter, &config(8)).unwrap_err();
    assert!(matches!(error, BlockFileError::Foreign { .. }), "{error}");
    assert_eq!(fs::read(&letter).unwrap(), b"Dear reader. ".repeat(1000));

    let link = folder.path().join("link");
    symlink(&path, &link).unwrap();
    for place in [link, folder.path().to_owned(), folder.path().join("absent/blocks")] {
        let error = BlockFile::open(&place, &config(8)).unwrap_err();
        assert!(matches!(error, BlockFileError::Disk(_)), "{error}");
    }
}

#[test]
fn lengths_are_checked() {
    let folder = tempfile::tempdir().unwrap();
    let (mut file, _) = BlockFile::open(&folder.path().join("blocks"), &config(8)).unwrap();
    let error = file.put(meta(1), &payload(1)[1..]).unwrap_err();
    assert!(matches!(error, BlockFileError::PayloadLength { expected: PAYLOAD, .. }), "{error}");
    let mut long = meta(1);
    long.note = vec![0; 2049].into();
    let error = file.put(long, &payload(1)).unwrap_err();
    assert!(matches!(error, BlockFileError::NoteTooLong { found: 2049 }), "{error}");
    let mut short = vec![0; PAYLOAD - 1];
    let error = file.get(&mut [(1, &mut short)]).unwrap_err();
    assert!(matches!(error, BlockFileError::PayloadLength { .. }), "{error}");
    assert_eq!(keys(&file), [0_u128; 0]);
}

#[test]
fn a_block_that_is_replaced_has_its_new_note_and_payload_after_a_restart_too() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("blocks");
    let (mut file, _) = BlockFile::open(&path, &config(3)).unwrap();
    (1..=3).for_each(|key| put(&mut file, key));
    file.flush().unwrap();
    let new = BlockMeta { note: (*b"once more").into(), ..meta(2) };
    assert!(file.replace(new.clone(), &payload(77)).unwrap());
    let check = |file: &mut BlockFile| {
        let mut bytes = vec![0; PAYLOAD];
        assert_eq!(file.get(&mut [(2, &mut bytes)]).unwrap(), [true]);
        assert!(bytes == payload(77));
        assert!(file.entries().any(|entry| *entry == new));
        assert_eq!(get(file, &[1, 3]), [true; 2]);
    };
    check(&mut file);
    assert_eq!(file.snapshot().evicted, 0);
    drop(file);
    let (mut file, opened) = BlockFile::open(&path, &config(3)).unwrap();
    assert_eq!((opened.blocks, opened.dropped), (3, 0));
    check(&mut file);
}
