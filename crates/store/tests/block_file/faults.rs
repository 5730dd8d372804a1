//! Disks that are full, slow, broken or that panic.

use crate::disks::{Faults, FaultyFile, MemoryFile};
use crate::support::{Random, within_a_minute};
use crate::{HEADER, SLOT, config, get, keys, meta, payload, put};
use smoe_store::{BlockFile, BlockFileError};
use std::sync::Arc;
use std::time::Duration;

fn faulty(slots: usize) -> (Arc<MemoryFile>, Arc<FaultyFile>, BlockFile) {
    let memory = MemoryFile::new(Vec::new());
    let disk = FaultyFile::new(memory.clone());
    let (file, _) = BlockFile::on(disk.clone(), &config(slots)).unwrap();
    (memory, disk, file)
}

#[test]
fn a_block_comes_from_its_buffer_while_its_write_is_held_up() {
    within_a_minute(|| {
        let (memory, disk, mut file) = faulty(8);
        disk.set(Faults { hold: true, ..Faults::default() });
        assert!(file.put(meta(40), &payload(40)).unwrap());
        assert!(file.put(meta(41), &payload(41)).unwrap());
        assert!(!file.put(meta(42), &payload(42)).unwrap(), "both buffers are in use");
        assert!(file.put(meta(41), &payload(41)).unwrap(), "it is held");
        assert_eq!(get(&mut file, &[41, 42, 40]), [true, false, true]);
        assert_eq!(file.snapshot().writing, 2);
        // Removed before it is written: gone, and gone from the disk as well once that has happened.
        file.remove(40);
        assert_eq!((get(&mut file, &[40]), keys(&file)), (vec![false], vec![41]));
        disk.set(Faults::default());
        drop(file);
        let (mut file, opened) = BlockFile::on(memory, &config(8)).unwrap();
        assert_eq!((opened.blocks, opened.dropped), (1, 0));
        assert_eq!(get(&mut file, &[40, 41]), [false, true]);
    });
}

#[test]
fn a_block_that_was_removed_can_be_put_again_at_once() {
    within_a_minute(|| {
        let (memory, disk, mut file) = faulty(8);
        disk.set(Faults { hold: true, ..Faults::default() });
        assert!(file.put(meta(40), &payload(40)).unwrap());
        file.remove(40);
        assert!(file.put(meta(40), &payload(40)).unwrap());
        assert_eq!(get(&mut file, &[40]), [true]);
        disk.set(Faults::default());
        drop(file);
        let (mut file, _) = BlockFile::on(memory, &config(8)).unwrap();
        assert_eq!(get(&mut file, &[40]), [true]);
    });
}

#[test]
fn a_full_disk_is_told_once_and_older_blocks_give_way_instead() {
    within_a_minute(|| {
        let (memory, disk, mut file) = faulty(8);
        (40..43).for_each(|key| put(&mut file, key));
        file.flush().unwrap();
        disk.set(Faults { room: Some((HEADER + 3 * SLOT) as u64), ..Faults::default() });
        put(&mut file, 43);
        file.flush().unwrap();
        assert_eq!(keys(&file), [40, 41, 42]);
        let failures = file.poll();
        let [failure] = &failures[..] else { panic!("{failures:?}") };
        assert_eq!(failure.key, 43);
        assert!(matches!(&failure.error, BlockFileError::Write { len: SLOT, .. }), "{}", failure.error);
        assert!(file.poll().is_empty(), "told once");
        (44..48).for_each(|key| put(&mut file, key));
        file.flush().unwrap();
        assert!(file.poll().is_empty(), "no more growth, no more failures");
        assert_eq!(keys(&file), [45, 46, 47]);
        assert_eq!((file.snapshot().capacity, file.snapshot().write_errors), (3, 1));
        drop(file);
        // Opened again with room, it grows.
        let (mut file, opened) = BlockFile::on(memory, &config(8)).unwrap();
        assert_eq!((opened.blocks, file.snapshot().capacity), (3, 8));
        assert_eq!(get(&mut file, &[45, 46, 47]), [true; 3]);
    });
}

#[test]
fn a_disk_that_is_full_from_the_start_is_tried_again() {
    within_a_minute(|| {
        let (_, disk, mut file) = faulty(8);
        disk.set(Faults { room: Some(HEADER as u64), ..Faults::default() });
        for key in 40..45 {
            put(&mut file, key);
            file.flush().unwrap();
            assert_eq!((keys(&file), file.poll().len()), (vec![], 1));
        }
        disk.set(Faults::default());
        put(&mut file, 50);
        file.flush().unwrap();
        assert!(file.poll().is_empty());
        assert_eq!(get(&mut file, &[50]), [true]);
    });
}

#[test]
fn a_panic_of_the_disk_is_a_failed_write() {
    within_a_minute(|| {
        let (_, disk, mut file) = faulty(8);
        disk.set(Faults { panic: true, ..Faults::default() });
        (40..44).for_each(|key| put(&mut file, key));
        file.flush().unwrap();
        assert_eq!(file.poll().len(), 4);
        disk.set(Faults::default());
        put(&mut file, 40);
        file.flush().unwrap();
        assert_eq!(get(&mut file, &[40, 41]), [true, false]);
    });
}

#[test]
fn a_read_that_fails_is_a_miss_and_is_told() {
    within_a_minute(|| {
        let (_, disk, mut file) = faulty(8);
        put(&mut file, 40);
        file.flush().unwrap();
        disk.set(Faults { reads: 255, ..Faults::default() });
        while get(&mut file, &[40])[0] {}
        assert!(!file.contains(40));
        let failures = file.poll();
        assert!(matches!(&failures[..], [f] if f.key == 40 && matches!(f.error, BlockFileError::Disk(_))));
        assert_eq!(file.snapshot().read_errors, 1);
        assert_eq!(file.snapshot().corrupt, 0);
        disk.set(Faults::default());
        put(&mut file, 40);
        file.flush().unwrap();
        assert_eq!(get(&mut file, &[40]), [true]);
    });
}

#[test]
fn whatever_fails_bytes_are_right_and_the_file_goes_on() {
    within_a_minute(|| {
        let (mut failed, mut came) = (0, 0);
        for seed in 0..20 {
            let (memory, disk, mut file) = faulty(6);
            let mut random = Random(seed);
            for _ in 0..200 {
                let share = [0, 0, 60, 200][random.below(4)];
                let room = (random.below(4) == 0).then(|| (HEADER + random.below(7) * SLOT) as u64);
                disk.set(Faults { writes: share, reads: share / 4, room, ..Faults::default() });
                let mut key = || 40 + random.below(20) as u128;
                let (key, other) = (key(), key());
                match random.below(8) {
                    0..4 => put(&mut file, key),
                    4 => file.remove(key),
                    5 => failed += file.poll().len(),
                    _ => came += get(&mut file, &[key, other]).iter().filter(|&&came| came).count(),
                }
            }
            disk.set(Faults::default());
            file.flush().unwrap();
            failed += file.poll().len();
            let held = keys(&file);
            assert!(get(&mut file, &held).iter().all(|&came| came));
            // Whose parent is none of the others: a file that was left room for one block has none for its continuation.
            put(&mut file, 200);
            drop(file);
            let (mut file, _) = BlockFile::on(memory, &config(6)).unwrap();
            // Blocks whose wiping failed may be there besides, and are whole or found out.
            let again = get(&mut file, &held);
            assert!(again.iter().filter(|&&came| !came).count() <= 1, "one may have given way to block 200");
            let all = keys(&file);
            get(&mut file, &all);
        }
        assert!(failed > 300 && came > 200, "{failed} failed, {came} came");
    });
}

#[test]
fn a_disk_that_stands_still_holds_nobody_up_who_does_not_wait_for_it() {
    within_a_minute(|| {
        let (memory, disk, mut file) = faulty(8);
        put(&mut file, 40);
        assert!(file.flush_within(Duration::from_secs(30)).unwrap());
        disk.set(Faults { hold: true, ..Faults::default() });
        (41..43).for_each(|key| assert!(file.put(meta(key), &payload(key)).unwrap()));
        assert!(!file.wait(Duration::from_millis(1)), "nothing has ended");
        assert!(!file.flush_within(Duration::from_millis(1)).unwrap());
        assert_eq!(file.snapshot().writing, 2, "and goes on");
        file.abandon();
        disk.set(Faults::default());
        // What was under way is there or not; what was there before is.
        let (mut file, _) = BlockFile::on(memory, &config(8)).unwrap();
        assert_eq!(get(&mut file, &[40]), [true]);
    });
}

#[test]
fn a_wait_ends_when_a_write_does() {
    within_a_minute(|| {
        let (_, disk, mut file) = faulty(8);
        disk.set(Faults { hold: true, ..Faults::default() });
        (40..42).for_each(|key| assert!(file.put(meta(key), &payload(key)).unwrap()));
        assert!(!file.put(meta(42), &payload(42)).unwrap(), "no buffer");
        disk.set(Faults::default());
        assert!(file.wait(Duration::from_secs(30)));
        assert!(file.put(meta(42), &payload(42)).unwrap());
        file.flush().unwrap();
        assert!(file.wait(Duration::ZERO), "nothing is under way");
    });
}
