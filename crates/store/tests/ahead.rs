//! Reads that nobody waits for, reads of several records, and a limit that moves: one promise a test.
#![allow(clippy::unwrap_used)] // Tests stop at the first surprise.

mod support;

use smoe_format::record_crc;
use smoe_store::{
    ArenaMemory, ExpertKey, Fault, FaultyDisk, Gate, Lease, MemoryDisk, Order, Record, Store, StoreConfig,
    StoreError, Want,
};
use std::collections::HashSet;
use std::io::ErrorKind;
use std::sync::Arc;
use support::{Turnstile, Vault, demand, demand_all, key, one_by_one, wants, within_a_minute};

fn faulty(vault: &Vault) -> Arc<FaultyDisk> {
    FaultyDisk::new(MemoryDisk::aligned(vault.bytes.clone(), 512))
}

fn hold(disk: &FaultyDisk, vault: &Vault, keys: &[ExpertKey]) -> Arc<Gate> {
    let gate = Gate::closed();
    for &key in keys {
        disk.on_offset(vault.record(key).offset, Fault::Hold(gate.clone()));
    }
    gate
}

/// Polls until nothing is in flight.
fn finish(store: &mut Store) {
    while store.in_flight() > 0 {
        store.poll();
        std::thread::yield_now();
    }
}

fn residents(store: &Store) -> HashSet<ExpertKey> {
    store.residents().collect()
}

#[test]
fn what_was_expected_is_a_hit() {
    within_a_minute(|| {
        let vault = Vault::new(1, 8, 512);
        let disk = faulty(&vault);
        let mut store = vault.open(disk.clone(), 4, 2);
        let guess = [key(0, 5), key(0, 2), key(0, 7)];
        // Twice the same and what does not exist are no matter.
        store.expect(&wants(&[guess[0], guess[1], guess[0], key(9, 9), guess[2]]));
        finish(&mut store);
        assert_eq!((residents(&store), disk.reads()), (guess.into(), 3));
        demand_all(&mut store, &[key(0, 2), key(0, 7)]).unwrap().iter().for_each(|lease| vault.check(lease));
        demand_all(&mut store, &[key(0, 0), key(0, 1), key(0, 3)]).unwrap();
        demand_all(&mut store, &[key(0, 2)]).unwrap();
        let counted = store.meter().snapshot();
        assert_eq!((counted.demand_hits, counted.demand_misses), (2, 4));
        assert_eq!((counted.ahead_reads, counted.ahead_hits, counted.ahead_late), (3, 2, 0));
        assert_eq!(counted.ahead_waste, 1, "5 was evicted before anybody asked for it");
        let bytes: u64 = guess.iter().map(|&key| u64::from(vault.record(key).len)).sum();
        assert_eq!(counted.ahead_bytes, bytes);
    });
}

#[test]
fn low_priority_leaves_readers_for_demand() {
    within_a_minute(|| {
        let vault = Vault::new(1, 10, 512);
        let disk = faulty(&vault);
        let keys = vault.keys();
        let guessed = hold(&disk, &vault, &keys[..6]);
        let wanted = hold(&disk, &vault, &keys[6..8]);
        let config = StoreConfig { low_running: Some(2), ..one_by_one(10, vault.slot_bytes(), 4) };
        let mut store = vault.open_as(disk.clone(), config);
        store.expect(&wants(&keys[..6]));
        guessed.wait_for(2);
        let batch = demand(&mut store, &keys[6..8]).unwrap();
        // Both find a free reader though four guesses were queued before them.
        wanted.wait_for(2);
        assert_eq!(disk.reads(), 4);
        wanted.open();
        assert_eq!(batch.filter(|lease| lease.is_ok()).count(), 2);
        guessed.open();
        finish(&mut store);
        assert_eq!(disk.reads(), 4, "what was queued is forgotten with the next demand");
        let counted = store.meter().snapshot();
        assert_eq!((counted.ahead_reads, counted.ahead_late, counted.loads), (2, 0, 4));
    });
}

#[test]
fn a_demand_takes_over_what_is_read_and_what_is_queued() {
    within_a_minute(|| {
        let vault = Vault::new(1, 8, 512);
        let disk = faulty(&vault);
        let keys = vault.keys();
        let gate = hold(&disk, &vault, &keys[..1]);
        let config = StoreConfig { low_running: Some(1), ..one_by_one(8, vault.slot_bytes(), 1) };
        let mut store = vault.open_as(disk.clone(), config);
        store.expect(&wants(&keys[..4]));
        gate.wait_for(1);
        let mut batch = store.demand(&wants(&[keys[0], keys[5], keys[2]]), Order::Given).unwrap();
        gate.open();
        for expected in [keys[0], keys[5], keys[2]] {
            let lease = batch.next().unwrap().unwrap();
            assert_eq!(lease.key(), expected);
            vault.check(&lease);
        }
        drop(batch);
        assert_eq!((store.n_resident(), disk.reads()), (3, 3), "1 and 3 were never read");
        let counted = store.meter().snapshot();
        assert_eq!((counted.demand_hits, counted.demand_misses), (0, 3));
        assert_eq!((counted.ahead_late, counted.ahead_reads, counted.ahead_hits), (2, 1, 0));
    });
}

#[test]
fn expecting_waits_for_the_batch_and_spares_it() {
    within_a_minute(|| {
        let vault = Vault::new(1, 9, 512);
        let disk = Turnstile::new(vault.bytes.clone());
        let mut store = vault.open(disk.clone(), 4, 1);
        let keys = vault.keys();
        // Six wanted, four slots: two of the batch are without one until leases come back.
        let mut batch = demand(&mut store, &keys[..6]).unwrap();
        batch.expect(&wants(&keys[6..]));
        let mut held: Vec<Lease> = Vec::new();
        for key in &keys[..4] {
            assert_eq!(disk.wait_for_reader(), vault.record(*key).offset);
            disk.release(true);
            held.push(batch.next().unwrap().unwrap());
        }
        assert!(matches!(batch.next(), Some(Err(StoreError::Stalled { wanted: 2, .. }))));
        held.truncate(2);
        batch.poll();
        for key in &keys[4..6] {
            assert_eq!(disk.wait_for_reader(), vault.record(*key).offset, "the batch goes first");
            disk.release(true);
            held.push(batch.next().unwrap().unwrap());
        }
        batch.poll();
        assert_eq!(batch.in_flight(), 0, "nothing could be evicted but the batch");
        assert!(batch.next().is_none());
        drop(held);
        batch.poll();
        assert_eq!(batch.in_flight(), 0, "not even when it is not leased");
        drop(batch);
        store.poll();
        assert_eq!(store.in_flight(), 3, "now it can");
        disk.open();
        finish(&mut store);
        assert!(keys[6..].iter().all(|key| residents(&store).contains(key)));
    });
}

#[test]
fn a_failed_guess_is_silent_and_demand_tries_again() {
    within_a_minute(|| {
        for fault in [Fault::Error(ErrorKind::Other), Fault::Torn(3), Fault::Short(9), Fault::Panic] {
            let vault = Vault::new(1, 6, 512);
            let disk = faulty(&vault);
            let bad = key(0, 1);
            disk.on_offset(vault.record(bad).offset, fault.clone());
            let mut store = vault.open(disk.clone(), 3, 2);
            store.expect(&wants(&[bad, key(0, 2)]));
            finish(&mut store);
            assert_eq!(residents(&store), [key(0, 2)].into());
            assert_eq!(store.meter().snapshot().ahead_errors, 1);
            // Still bad: now somebody hears of it.
            assert!(demand_all(&mut store, &[bad]).is_err());
            disk.heal();
            vault.check(&demand_all(&mut store, &[bad]).unwrap()[0]);
        }
    });
}

#[test]
fn a_guess_that_fails_while_waited_for_is_read_again() {
    within_a_minute(|| {
        for order in [Order::Arrival, Order::Given] {
            let vault = Vault::new(1, 4, 512);
            let disk = Turnstile::new(vault.bytes.clone());
            let mut store = vault.open(disk.clone(), 2, 1);
            store.expect(&wants(&[key(0, 3)]));
            disk.wait_for_reader();
            let all = wants(&[key(0, 3), key(0, 0), key(0, 1)]);
            let batch = store.demand(&all, order).unwrap();
            disk.release(false);
            disk.open();
            let keys: HashSet<ExpertKey> = batch.map(|lease| lease.unwrap().key()).collect();
            assert_eq!(keys.len(), 3);
            let counted = store.meter().snapshot();
            assert_eq!((counted.ahead_errors, counted.ahead_late, counted.demand_misses), (1, 1, 3));
            assert_eq!(counted.loads, 3);
        }
    });
}

#[test]
fn prewarming_fills_free_slots_and_nothing_else() {
    within_a_minute(|| {
        let vault = Vault::new(2, 6, 512);
        let mut store = vault.open(faulty(&vault), 5, 2);
        let keys = vault.keys();
        let used: Vec<Want> = keys[..2].iter().map(|&key| Want { key, stamp: 7 }).collect();
        drop(store.demand(&used, Order::Arrival).unwrap().collect::<Result<Vec<_>, _>>().unwrap());
        store.prewarm(&keys);
        finish(&mut store);
        assert_eq!(residents(&store), keys[..5].iter().copied().collect());
        store.prewarm(&keys[6..]);
        finish(&mut store);
        assert_eq!(residents(&store), keys[..5].iter().copied().collect());
        // They are the first to go, though they came last.
        demand_all(&mut store, &keys[6..9]).unwrap();
        assert!(keys[..2].iter().all(|key| residents(&store).contains(key)));
        let counted = store.meter().snapshot();
        assert_eq!((counted.ahead_reads, counted.ahead_waste, counted.evictions), (3, 3, 3));
    });
}

#[test]
fn expecting_again_replaces_what_was_not_begun() {
    within_a_minute(|| {
        let vault = Vault::new(1, 8, 512);
        let disk = faulty(&vault);
        let keys = vault.keys();
        let gate = hold(&disk, &vault, &keys[..1]);
        let mut store = vault.open(disk.clone(), 8, 1);
        store.expect(&wants(&keys[..4]));
        gate.wait_for(1);
        store.expect(&wants(&keys[4..6]));
        gate.open();
        finish(&mut store);
        assert_eq!(residents(&store), [keys[0], keys[4], keys[5]].into());
        store.expect(&[]);
        assert_eq!(store.in_flight(), 0);
    });
}

#[test]
fn a_store_closes_with_guesses_queued_and_in_flight() {
    within_a_minute(|| {
        let vault = Vault::new(1, 8, 512);
        let disk = faulty(&vault);
        let gate = hold(&disk, &vault, &vault.keys()[..1]);
        let mut store = vault.open(disk, 8, 2);
        store.expect(&wants(&vault.keys()));
        gate.wait_for(1);
        gate.open();
        drop(store);
    });
}

#[test]
fn given_order_completes_within_any_cache() {
    within_a_minute(|| {
        let vault = Vault::new(1, 12, 512);
        let keys = vault.keys();
        for slots in 1..=12 {
            for resident in 0..12 {
                let mut store = vault.open(faulty(&vault), slots, 3);
                demand(&mut store, &keys[resident..]).unwrap().for_each(|lease| drop(lease.unwrap()));
                let batch = store.demand(&wants(&keys), Order::Given).unwrap();
                let order: Vec<ExpertKey> = batch
                    .map(|lease| {
                        let lease = lease.unwrap();
                        vault.check(&lease);
                        lease.key()
                    })
                    .collect();
                assert_eq!(order, keys);
            }
        }
    });
}

#[test]
fn given_order_gives_up_far_hits_only_while_readers_run_dry() {
    within_a_minute(|| {
        let vault = Vault::new(1, 12, 512);
        let keys = vault.keys();
        let disk = Turnstile::new(vault.bytes.clone());
        let mut store = vault.open(disk.clone(), 6, 1);
        store.prewarm(&keys[6..]);
        while store.in_flight() > 0 {
            if disk.has_reader() {
                disk.release(true);
            }
            store.poll();
            std::thread::yield_now();
        }
        // Six hits behind six misses: two reads keep a reader busy, so two hits go, the farthest.
        let batch = store.demand(&wants(&keys), Order::Given).unwrap();
        assert_eq!(batch.in_flight(), 2);
        disk.wait_for_reader();
        drop(batch);
        let hits: HashSet<ExpertKey> = keys[6..10].iter().copied().collect();
        assert_eq!(residents(&store), hits);
        let counted = store.meter().snapshot();
        assert_eq!((counted.demand_hits, counted.demand_misses), (4, 8));
        disk.open();
    });
}

/// A store of many small records, and the reads that a demand for `keys` took.
fn reads_for(vault: &Vault, config: StoreConfig, keys: &[ExpertKey]) -> u64 {
    let mut store = vault.open_as(faulty(vault), config);
    for lease in demand(&mut store, keys).unwrap() {
        vault.check(&lease.unwrap());
    }
    let counted = store.meter().snapshot();
    assert_eq!((counted.loads, counted.read_errors), (keys.len() as u64, 0));
    let bytes: u64 = keys.iter().map(|&key| u64::from(vault.record(key).len)).sum();
    assert_eq!(counted.disk_bytes, bytes);
    counted.reads
}

#[test]
fn neighbours_on_disk_are_read_together() {
    within_a_minute(|| {
        let vault = Vault::new(2, 32, 512);
        let keys = vault.keys();
        let config = StoreConfig { readers: 2, ..StoreConfig::new(64, vault.slot_bytes()) };
        assert_eq!(reads_for(&vault, config, &keys), 4, "as many pieces as keep two readers busy");
        assert_eq!(reads_for(&vault, config, &keys[..32]), 4);
        assert_eq!(reads_for(&vault, config, &keys[..7]), 7, "too few to join any");
        let reversed: Vec<ExpertKey> = keys.iter().rev().copied().collect();
        assert_eq!(reads_for(&vault, config, &reversed), 64, "not neighbours in this order");
        let with_gaps: Vec<ExpertKey> = keys.iter().copied().filter(|key| key.expert % 4 != 3).collect();
        assert_eq!(reads_for(&vault, config, &with_gaps), 16, "a gap ends a read");
        assert_eq!(reads_for(&vault, StoreConfig { run_bytes: 0, ..config }, &keys), 64);
        let small = StoreConfig { run_bytes: 2 * vault.slot_bytes() as u64, ..config };
        assert!((11..=32).contains(&reads_for(&vault, small, &keys)));
    });
}

#[test]
fn large_records_are_read_one_by_one() {
    within_a_minute(|| {
        let mut vault = Vault::new(1, 16, 512 << 10);
        let large = vault.records.iter().filter(|record| record.len >= 1 << 20).count() as u64;
        assert!(large > 4);
        let config =
            StoreConfig { readers: 1, run_bytes: 64 << 20, ..StoreConfig::new(16, vault.slot_bytes()) };
        let keys = vault.keys();
        assert!(reads_for(&vault, config, &keys) < 6, "all are below 2 MiB");
        // The same bytes in records of 2 MiB.
        vault.bytes.truncate((512 << 10) + (8 << 20));
        vault.bytes.resize((512 << 10) + (8 << 20), 7);
        vault.records.truncate(4);
        for (place, record) in (0..).zip(&mut vault.records) {
            (record.offset, record.len) = ((512 << 10) + place * (2 << 20), 2 << 20);
            let bytes = &vault.bytes[record.offset as usize..][..2 << 20];
            record.crc32c = Some(record_crc(record.key, bytes));
        }
        let config = StoreConfig { slot_bytes: 2 << 20, ..config };
        assert_eq!(reads_for(&vault, config, &vault.keys()), 4);
    });
}

#[test]
fn in_a_run_each_record_has_its_own_error() {
    within_a_minute(|| {
        let vault = Vault::new(1, 16, 512);
        for fault in [Fault::Error(ErrorKind::Other), Fault::Torn(3), Fault::Short(9), Fault::Panic] {
            let disk = faulty(&vault);
            disk.on_offset(vault.record(key(0, 5)).offset, fault);
            let config = StoreConfig { readers: 1, ..StoreConfig::new(16, vault.slot_bytes()) };
            let mut store = vault.open_as(disk.clone(), config);
            store.expect(&wants(&vault.keys()));
            finish(&mut store);
            assert_eq!((store.n_resident(), store.meter().snapshot().ahead_errors), (15, 1));
            store.set_limit(1);
            store.set_limit(16);
            let results: Vec<_> = demand(&mut store, &vault.keys()).unwrap().collect();
            assert_eq!(results.iter().filter(|result| result.is_err()).count(), 1);
            results.iter().flatten().for_each(|lease| vault.check(lease));
        }
    });
}

#[test]
fn layers_may_share_their_records_on_disk() {
    within_a_minute(|| {
        let vault = Vault::new(1, 16, 512);
        let shared = |layer: u32| {
            let vault = &vault;
            vault.records.iter().map(move |record| {
                let key = key(layer, record.key.expert);
                Record { key, crc32c: Some(record_crc(key, vault.raw(record.key))), ..*record }
            })
        };
        let records: Vec<Record> = (0..3).flat_map(shared).collect();
        let config = StoreConfig { readers: 1, ..StoreConfig::new(48, vault.slot_bytes()) };
        let open = || {
            let disk = Arc::new(MemoryDisk::aligned(vault.bytes.clone(), 512));
            Store::open(disk, records.clone(), config, None, Arc::default()).unwrap()
        };
        let keys: Vec<ExpertKey> = records.iter().map(|record| record.key).collect();
        let show = |lease: &Lease| {
            let raw = vault.raw(key(0, lease.key().expert));
            assert!(lease.bytes() == &raw[..lease.bytes().len()], "{}", lease.key());
        };
        let mut store = open();
        store.expect(&wants(&keys));
        finish(&mut store);
        assert_eq!(store.n_resident(), 48);
        demand_all(&mut store, &keys).unwrap().iter().for_each(show);
        let mut store = open();
        store.preload_all(|_, _| ()).unwrap();
        assert_eq!(store.meter().snapshot().reads, 3, "a run for each layer");
        demand_all(&mut store, &keys).unwrap().iter().for_each(show);
        let mut store = open();
        demand_all(&mut store, &keys).unwrap().iter().for_each(show);
    });
}

#[test]
fn a_lower_limit_empties_slots_as_they_come_back() {
    within_a_minute(|| {
        let vault = Vault::new(1, 10, 512);
        let keys = vault.keys();
        let config = StoreConfig { floor: 2, ..one_by_one(8, vault.slot_bytes(), 2) };
        let mut store = vault.open_as(faulty(&vault), config);
        let stamped: Vec<Want> = (1..).zip(&keys[..8]).map(|(stamp, &key)| Want { key, stamp }).collect();
        let mut held: Vec<Lease> =
            store.demand(&stamped, Order::Given).unwrap().collect::<Result<_, _>>().unwrap();
        held.truncate(3); // the three with the lowest stamps
        store.set_limit(4);
        assert_eq!((store.limit(), store.n_slots(), store.n_resident()), (4, 4, 4));
        assert_eq!(residents(&store), [keys[0], keys[1], keys[2], keys[7]].into(), "the most recent stays");
        store.set_limit(0);
        assert_eq!((store.limit(), store.n_slots()), (2, 3), "the floor; three are leased");
        held.iter().for_each(|lease| vault.check(lease));
        // A batch that wants more than there is goes on as leases come back, and the limit is kept.
        let mut batch = demand(&mut store, &keys[6..9]).unwrap();
        assert!(matches!(batch.next(), Some(Err(StoreError::Stalled { slots: 3, leased: 3, .. }))));
        held.clear();
        for lease in batch.by_ref() {
            vault.check(&lease.unwrap());
        }
        drop(batch);
        assert_eq!((store.n_slots(), store.n_resident()), (2, 2));
        assert!(matches!(store.preload_all(|_, _| ()), Err(StoreError::TooFewSlots { found: 2, .. })));
        store.set_limit(100);
        assert_eq!((store.limit(), store.n_slots(), store.n_resident()), (8, 8, 2));
        assert_eq!(demand_all(&mut store, &keys[..8]).unwrap().len(), 8);
        assert_eq!(store.n_resident(), 8);
    });
}

/// A cache that is forgotten is as it was when it was opened; its memory is shown only when all or none of it is used.
#[test]
fn forgotten_slots_are_free_and_the_memory_is_all_or_nothing() {
    within_a_minute(|| {
        let vault = Vault::new(1, 8, 512);
        let disk = faulty(&vault);
        let mut store = vault.open(disk.clone(), 4, 2);
        let shown = |store: &mut Store| {
            store.with_memory(|memory| match memory {
                ArenaMemory::Empty(bytes) => {
                    bytes.fill(0xaa);
                    (false, bytes.len())
                }
                ArenaMemory::Full(bytes) => (true, bytes.len()),
            })
        };
        let len = store.arena().bytes();
        assert_eq!(shown(&mut store), Some((false, len)));
        let first = demand_all(&mut store, &[key(0, 0), key(0, 1)]).unwrap();
        assert_eq!(shown(&mut store), None, "half full");
        store.expect(&wants(&[key(0, 2), key(0, 3)]));
        finish(&mut store);
        assert_eq!(shown(&mut store), Some((true, len)));
        // What is leased stays.
        store.forget();
        assert_eq!((residents(&store), shown(&mut store)), ([key(0, 0), key(0, 1)].into(), None));
        first.iter().for_each(|lease| vault.check(lease));
        drop(first);
        store.forget();
        assert_eq!((store.n_resident(), shown(&mut store)), (0, Some((false, len))));
        store.set_limit(2);
        assert_eq!(shown(&mut store), None, "some pages are the system's");
        store.set_limit(4);
        demand_all(&mut store, &[key(0, 4), key(0, 5), key(0, 6), key(0, 0)])
            .unwrap()
            .iter()
            .for_each(|lease| vault.check(lease));
        assert_eq!(store.meter().snapshot().loads - store.meter().snapshot().evictions, 4);
    });
}
