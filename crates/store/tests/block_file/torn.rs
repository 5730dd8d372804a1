//! Damage between closing and opening, and crashes while writes are under way.

use crate::disks::MemoryFile;
use crate::support::{Random, within_a_minute};
use crate::{HEADER, SLOT, config, get, keys, put};
use smoe_store::{BlockFile, BlockFileError};
use std::collections::HashSet;
use std::fs;

/// Of a file's slots, the key in each descriptor that is not wiped.
fn slots(bytes: &[u8]) -> Vec<Option<u128>> {
    let key = |slot: &[u8]| u128::from_le_bytes(slot[16..32].try_into().unwrap());
    bytes[HEADER..].chunks(SLOT).map(|slot| (slot[0] != 0).then(|| key(slot))).collect()
}

#[test]
fn damage_costs_the_blocks_that_it_hits_and_no_other() {
    within_a_minute(|| {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("blocks");
        let mut random = Random(11);
        let (mut lost, mut dropped_at_open) = (0, 0);
        for round in 0..150 {
            let _ = fs::remove_file(&path);
            let (mut file, _) = BlockFile::open(&path, &config(6)).unwrap();
            (0..8).for_each(|_| put(&mut file, 40 + random.below(20) as u128));
            drop(file);
            let mut bytes = fs::read(&path).unwrap();
            let whole = bytes.clone();
            for _ in 0..1 + random.below(3) {
                let at = random.below(bytes.len());
                let longest = [1, 600, 2 * SLOT][random.below(3)];
                let end = (at + 1 + random.below(longest)).min(bytes.len());
                match random.below(4) {
                    0 if bytes.len() > SLOT => bytes.truncate(at.max(HEADER)),
                    1 => bytes[at..end].fill(0),
                    2 => bytes[at..end].iter_mut().for_each(|byte| *byte = random.next() as u8),
                    _ => bytes[at] ^= 1 << random.below(8),
                }
            }
            fs::write(&path, &bytes).unwrap();
            let (mut file, opened) = match BlockFile::open(&path, &config(6)) {
                Ok(opened) => opened,
                Err(BlockFileError::Foreign { .. }) => {
                    assert!(bytes[..8] != whole[..8] && bytes[4088..HEADER] != whole[4088..HEADER]);
                    continue;
                }
                Err(error) => panic!("round {round}: {error}"),
            };
            dropped_at_open += opened.dropped;
            let header_is_whole = bytes[..4088] == whole[..4088];
            assert_eq!(opened.stale.is_none(), header_is_whole);
            let before = slots(&whole);
            for (slot, key) in before.iter().enumerate() {
                let Some(key) = *key else { continue };
                let range = HEADER + slot * SLOT..HEADER + (slot + 1) * SLOT;
                // The padding may change unnoticed, so this is one direction only.
                let whole = header_is_whole && bytes.get(range.clone()) == Some(&whole[range]);
                let came = get(&mut file, &[key])[0];
                assert!(came || !whole, "round {round}: block {key} is whole");
                lost += usize::from(!came);
                assert_eq!(file.contains(key), came, "what is damaged is no longer held");
            }
            // It goes on, and what was found damaged does not come back.
            put(&mut file, 99);
            let held = keys(&file);
            assert_eq!(file.poll().len(), 0);
            drop(file);
            let (mut file, opened) = BlockFile::open(&path, &config(6)).unwrap();
            assert_eq!((keys(&file), opened.stale), (held.clone(), None));
            assert!(get(&mut file, &held).iter().all(|&came| came));
        }
        assert!(lost > 50 && dropped_at_open > 20, "{lost} lost, {dropped_at_open} at opening");
    });
}

#[test]
fn a_power_failure_at_any_moment_leaves_what_was_flushed() {
    within_a_minute(|| {
        let mut random = Random(3);
        let (mut whole, mut torn) = (0, 0);
        for _ in 0..60 {
            let disk = MemoryFile::new(Vec::new());
            let (mut file, _) = BlockFile::on(disk.clone(), &config(6)).unwrap();
            // On the drive, and not touched since: neither replaced nor removed.
            let mut safe = HashSet::new();
            for _ in 0..20 {
                match random.below(6) {
                    0 => {
                        file.flush().unwrap();
                        safe = keys(&file).into_iter().collect();
                    }
                    1 => file.remove(40 + random.below(20) as u128),
                    _ => put_without_flush(&mut file, 40 + random.below(20) as u128),
                }
                let held: HashSet<u128> = keys(&file).into_iter().collect();
                safe.retain(|key| held.contains(key));
                let image = disk.crashed(&mut random);
                let (mut after, opened) = BlockFile::on(MemoryFile::new(image), &config(6)).unwrap();
                assert_eq!(opened.stale, None);
                for key in keys(&after) {
                    let came = get(&mut after, &[key])[0];
                    whole += usize::from(came);
                    torn += usize::from(!came);
                }
                for &key in &safe {
                    assert_eq!(get(&mut after, &[key]), [true], "block {key} was flushed");
                }
            }
        }
        assert!(whole > 100 && torn > 20, "{whole} whole, {torn} torn");
    });
}

/// Puts if there is room for it at once.
fn put_without_flush(file: &mut BlockFile, key: u128) {
    file.put(crate::meta(key), &crate::payload(key)).unwrap();
}

#[test]
fn a_copy_made_while_writes_run_can_be_opened() {
    within_a_minute(|| {
        let folder = tempfile::tempdir().unwrap();
        let (path, copy) = (folder.path().join("blocks"), folder.path().join("copy"));
        let (mut file, _) = BlockFile::open(&path, &config(12)).unwrap();
        let mut random = Random(8);
        let mut came = 0;
        for _ in 0..100 {
            (0..3).for_each(|_| put_without_flush(&mut file, 40 + random.below(40) as u128));
            fs::copy(&path, &copy).unwrap();
            let (mut after, opened) = BlockFile::open(&copy, &config(12)).unwrap();
            assert_eq!(opened.stale, None);
            let held = keys(&after);
            came += get(&mut after, &held).iter().filter(|&&came| came).count();
        }
        assert!(came > 300, "{came}");
        file.flush().unwrap();
        fs::copy(&path, &copy).unwrap();
        let held = keys(&file);
        assert!(held.len() > 6);
        let (mut after, opened) = BlockFile::open(&copy, &config(12)).unwrap();
        assert_eq!((keys(&after), opened.dropped), (held.clone(), 0));
        assert!(get(&mut after, &held).iter().all(|&came| came));
    });
}
