//! Whatever goes wrong reaches the one who waits, and nothing hangs or leaks.
#![allow(clippy::unwrap_used)] // Tests stop at the first surprise.

mod support;

use smoe_store::{
    DiskError, ExpertKey, Fault, FaultyDisk, Gate, MemoryDisk, Record, RecordDecoder, Store, StoreConfig,
    StoreError,
};
use std::io::ErrorKind;
use std::path::Path;
use std::sync::{Arc, mpsc};
use support::{Vault, demand, demand_all, key, within_a_minute};

fn faulty(vault: &Vault) -> Arc<FaultyDisk> {
    FaultyDisk::new(MemoryDisk::aligned(vault.bytes.clone(), 512))
}

fn offset(vault: &Vault, key: ExpertKey) -> u64 {
    vault.record(key).offset
}

/// Demands everything with one record at fault: that one's error, all others' bytes; then again, healed.
fn one_bad_record(fault: Fault, slots: usize, expect: impl Fn(&Vault, ExpertKey, StoreError)) {
    let vault = Vault::new(2, 4, 512);
    let disk = faulty(&vault);
    let bad = key(1, 2);
    disk.on_offset(offset(&vault, bad), fault);
    let mut store = vault.open(disk.clone(), slots, 4);
    for _ in 0..3 {
        let (mut good, mut errors) = (0, 0);
        for result in demand(&mut store, &vault.keys()).unwrap() {
            match result {
                Ok(lease) => {
                    vault.check(&lease);
                    good += 1;
                }
                Err(error) => {
                    expect(&vault, bad, error);
                    errors += 1;
                }
            }
        }
        assert_eq!((good, errors), (7, 1));
        assert!(!store.residents().any(|key| key == bad));
        // The bad one may have been the last to have a slot.
        assert!((slots - 1..=slots.min(7)).contains(&store.n_resident()));
    }
    disk.heal();
    for lease in demand(&mut store, &vault.keys()).unwrap() {
        vault.check(&lease.unwrap());
    }
    assert_eq!(store.n_resident(), slots);
}

#[test]
fn a_failed_read_names_its_expert() {
    within_a_minute(|| {
        for slots in [1, 3, 8] {
            one_bad_record(Fault::Error(ErrorKind::Other), slots, |vault, bad, error| {
                let text = error.to_string();
                let StoreError::Read { key, offset, source } = error else { panic!("{error:?}") };
                assert_eq!((key, offset), (bad, vault.record(bad).offset));
                assert!(matches!(*source, DiskError::Io { .. }));
                assert!(text.contains("layer 1 expert 2") && text.contains("memory"), "{text}");
            });
        }
    });
}

#[test]
fn a_short_read_says_how_short() {
    within_a_minute(|| {
        one_bad_record(Fault::Short(100), 8, |vault, bad, error| {
            let StoreError::Read { source, .. } = error else { panic!("{error:?}") };
            let DiskError::Short { file, offset, expected, found } = *source else { panic!("{source:?}") };
            let record = vault.record(bad);
            assert_eq!((file.as_path(), offset), (Path::new("memory"), record.offset));
            assert_eq!((expected, found), (u64::from(record.len), 100));
        });
    });
}

#[test]
fn a_torn_record_fails_its_checksum() {
    within_a_minute(|| {
        for place in [0, 77, usize::MAX] {
            one_bad_record(Fault::Torn(place), 5, |vault, bad, error| {
                let StoreError::Checksum { file, offset, key, expected, found } = error else {
                    panic!("{error:?}")
                };
                let record = vault.record(bad);
                assert_eq!((file.as_path(), offset, key), (Path::new("memory"), record.offset, bad));
                assert_eq!(Some(expected), record.crc32c);
                assert_ne!(expected, found);
            });
        }
    });
}

#[test]
fn a_panic_of_the_disk_is_an_error() {
    within_a_minute(|| {
        one_bad_record(Fault::Panic, 2, |_, bad, error| {
            let StoreError::ReaderPanicked { key, message, .. } = error else { panic!("{error:?}") };
            assert_eq!((key, message.as_str()), (bad, "a scripted panic of the disk"));
        });
    });
}

#[test]
fn records_that_changed_places_do_not_pass() {
    within_a_minute(|| {
        let vault = Vault::new(1, 6, 512);
        let same_length = |a: &Record, b: &Record| a.len == b.len && a.key != b.key;
        let (mut a, mut b) = vault
            .records
            .iter()
            .flat_map(|a| vault.records.iter().map(move |b| (*a, *b)))
            .find(|(a, b)| same_length(a, b))
            .unwrap();
        (a.offset, b.offset) = (b.offset, a.offset);
        let disk = Arc::new(MemoryDisk::new(vault.bytes.clone()));
        let config = StoreConfig::new(2, vault.slot_bytes());
        let mut store = Store::open(disk, vec![a, b], config, None, Arc::default()).unwrap();
        for record in [a, b] {
            let error = demand_all(&mut store, &[record.key]).unwrap_err();
            assert!(matches!(error, StoreError::Checksum { key, .. } if key == record.key));
        }
        assert_eq!(store.meter().snapshot().checksum_errors, 2);
    });
}

#[test]
fn checksums_can_be_left_out() {
    within_a_minute(|| {
        let vault = Vault::new(1, 2, 512);
        let disk = faulty(&vault);
        disk.on_read(0, Fault::Torn(3));
        let config = StoreConfig { verify: false, ..StoreConfig::new(2, vault.slot_bytes()) };
        let mut store = Store::open(disk, vault.records.clone(), config, None, Arc::default()).unwrap();
        let leases = demand_all(&mut store, &[key(0, 1)]).unwrap();
        assert_ne!(leases[0].bytes()[3], vault.raw(key(0, 1))[3]);
        assert_eq!(store.meter().snapshot().check_ns, 0);
    });
}

#[test]
fn misses_are_in_flight_together_and_hits_do_not_wait() {
    within_a_minute(|| {
        let vault = Vault::new(1, 8, 512);
        let disk = faulty(&vault);
        let mut store = vault.open(disk.clone(), 8, 4);
        let hits = [key(0, 6), key(0, 2)];
        drop(demand_all(&mut store, &hits).unwrap());
        let gate = Gate::closed();
        for expert in [0, 1, 3, 4] {
            disk.on_offset(offset(&vault, key(0, expert)), Fault::Hold(gate.clone()));
        }
        let keys = [key(0, 0), hits[0], key(0, 1), key(0, 3), hits[1], key(0, 4)];
        let mut batch = demand(&mut store, &keys).unwrap();
        // Every reader is inside a read before anything was waited for.
        gate.wait_for(4);
        let mut ready = Vec::new();
        assert_eq!(batch.take_ready(usize::MAX, &mut ready).unwrap(), 2);
        assert_eq!([ready[0].key(), ready[1].key()], hits);
        gate.open();
        assert_eq!(batch.filter(|lease| lease.is_ok()).count(), 4);
    });
}

#[test]
fn misses_come_in_the_order_of_arrival() {
    within_a_minute(|| {
        let vault = Vault::new(1, 3, 512);
        let disk = faulty(&vault);
        let gates = [Gate::closed(), Gate::closed(), Gate::closed()];
        for (expert, gate) in (0..).zip(&gates) {
            disk.on_offset(offset(&vault, key(0, expert)), Fault::Hold(gate.clone()));
        }
        let mut store = vault.open(disk, 3, 3);
        let mut batch = demand(&mut store, &vault.keys()).unwrap();
        for expert in [2, 0, 1] {
            gates[expert as usize].open();
            assert_eq!(batch.next().unwrap().unwrap().key(), key(0, expert));
        }
        assert!(batch.next().is_none());
    });
}

#[test]
fn a_dropped_batch_cancels_what_is_queued_and_keeps_what_was_begun() {
    within_a_minute(|| {
        let vault = Vault::new(1, 8, 512);
        let disk = faulty(&vault);
        let gate = Gate::closed();
        for read in 0..2 {
            disk.on_read(read, Fault::Hold(gate.clone()));
        }
        let mut store = vault.open(disk.clone(), 8, 2);
        let batch = demand(&mut store, &vault.keys()).unwrap();
        gate.wait_for(2);
        drop(batch);
        assert_eq!(disk.reads(), 2, "only what readers had begun");
        // Demanded again while still in flight: joined, not read twice.
        let again = [key(0, 1), key(0, 0)];
        let mut batch = demand(&mut store, &again).unwrap();
        gate.open();
        for lease in batch.by_ref() {
            vault.check(&lease.unwrap());
        }
        drop(batch);
        assert_eq!(disk.reads(), 2);
        let counted = store.meter().snapshot();
        assert_eq!((counted.demand_hits, counted.demand_misses, counted.reads), (0, 10, 2));
        assert_eq!(demand_all(&mut store, &vault.keys()).unwrap().len(), 8);
        assert_eq!(disk.reads(), 8);
    });
}

#[test]
fn reads_of_a_dropped_batch_give_their_slots_back() {
    within_a_minute(|| {
        for fault in [None, Some(Fault::Error(ErrorKind::Other))] {
            let vault = Vault::new(1, 4, 512);
            let disk = faulty(&vault);
            let gate = Gate::closed();
            disk.on_read(0, Fault::Hold(gate.clone()));
            if let Some(fault) = fault {
                disk.on_read(1, fault);
            }
            // One slot, held by a read that nobody wants any more: the next batch waits for it, not for ever.
            let mut store = vault.open(disk.clone(), 1, 1);
            let batch = demand(&mut store, &[key(0, 0)]).unwrap();
            gate.wait_for(1);
            drop(batch);
            let mut batch = demand(&mut store, &[key(0, 3)]).unwrap();
            gate.open();
            let result = batch.next().unwrap();
            drop(batch);
            if result.is_err() {
                drop(result);
                vault.check(&demand_all(&mut store, &[key(0, 3)]).unwrap()[0]);
            }
        }
    });
}

#[test]
fn a_forgotten_batch_is_cleaned_up_by_the_next() {
    within_a_minute(|| {
        let vault = Vault::new(1, 6, 512);
        let mut store = vault.open(faulty(&vault), 3, 2);
        for round in 0..50 {
            std::mem::forget(demand(&mut store, &vault.keys()[round % 4..]).unwrap());
        }
        for lease in demand(&mut store, &vault.keys()).unwrap() {
            vault.check(&lease.unwrap());
        }
        std::mem::forget(demand(&mut store, &vault.keys()).unwrap());
    });
}

#[test]
fn holding_every_slot_is_an_error_that_passes() {
    within_a_minute(|| {
        let vault = Vault::new(1, 4, 512);
        let mut store = vault.open(faulty(&vault), 2, 2);
        let mut batch = demand(&mut store, &vault.keys()).unwrap();
        let mut held = vec![batch.next().unwrap().unwrap(), batch.next().unwrap().unwrap()];
        for _ in 0..3 {
            let error = batch.next().unwrap().unwrap_err();
            assert!(matches!(error, StoreError::Stalled { slots: 2, leased: 2, wanted: 2 }), "{error}");
            assert!(matches!(batch.take_ready(usize::MAX, &mut held), Err(StoreError::Stalled { .. })));
        }
        held.pop();
        held.push(batch.next().unwrap().unwrap());
        assert!(matches!(batch.next(), Some(Err(StoreError::Stalled { wanted: 1, .. }))));
        held.clear();
        assert!(batch.next().unwrap().is_ok());
        assert!(batch.next().is_none());
    });
}

#[test]
fn leases_outlive_the_store() {
    within_a_minute(|| {
        let vault = Vault::new(1, 4, 512);
        let mut store = vault.open(faulty(&vault), 4, 2);
        let leases = demand_all(&mut store, &vault.keys()).unwrap();
        let start = store.arena().as_ptr().addr();
        for lease in &leases {
            assert_eq!(lease.bytes().as_ptr().addr(), start + lease.arena_offset());
            assert_eq!(lease.arena_offset(), lease.slot() * store.arena().stride());
        }
        drop(store);
        std::thread::spawn(move || leases.iter().for_each(|lease| vault.check(lease))).join().unwrap();
    });
}

#[test]
fn a_store_closes_with_reads_queued_and_in_flight() {
    within_a_minute(|| {
        let vault = Vault::new(1, 8, 512);
        let disk = faulty(&vault);
        let gate = Gate::closed();
        disk.on_read(0, Fault::Hold(gate.clone()));
        let mut store = vault.open(disk.clone(), 8, 1);
        std::mem::forget(demand(&mut store, &vault.keys()).unwrap());
        gate.wait_for(1);
        let (dropping, is_dropping) = mpsc::channel();
        let closer = std::thread::spawn(move || {
            dropping.send(()).unwrap();
            drop(store);
        });
        is_dropping.recv().unwrap();
        gate.open();
        closer.join().unwrap();
    });
}

#[test]
fn a_bad_demand_changes_nothing() {
    within_a_minute(|| {
        let vault = Vault::new(2, 2, 512);
        let mut store = vault.open(faulty(&vault), 2, 1);
        drop(demand_all(&mut store, &[key(0, 0)]).unwrap());
        let before = store.meter().snapshot();
        for keys in [[key(0, 0), key(0, 2)], [key(1, 1), key(7, 0)]] {
            let error = demand(&mut store, &keys).unwrap_err();
            assert!(matches!(error, StoreError::UnknownExpert(k) if k == keys[1]), "{error}");
        }
        let error = demand(&mut store, &[key(0, 1), key(0, 0), key(0, 1)]).unwrap_err();
        assert!(matches!(error, StoreError::Duplicate(k) if k == key(0, 1)));
        assert_eq!(store.meter().snapshot(), before);
        assert!(demand(&mut store, &[]).unwrap().next().is_none());
        assert_eq!(demand_all(&mut store, &vault.keys()[..2]).unwrap().len(), 2);
    });
}

/// Adds a number to each byte; refuses one expert, panics at another.
struct Adder;

impl RecordDecoder for Adder {
    fn slack(&self) -> usize {
        100
    }

    fn decode(&self, key: ExpertKey, raw: &[u8], _: usize, slot: &mut [u8]) -> Result<(), String> {
        match key.expert {
            2 => return Err("symbol table is empty".into()),
            3 => panic!("index out of range"),
            _ => (),
        }
        // The slack is there, also behind the longest record.
        let record = raw.len() - self.slack();
        assert!(record.is_multiple_of(512) && record >= slot.len());
        for (slot, raw) in slot.iter_mut().zip(raw) {
            *slot = raw.wrapping_add(1);
        }
        Ok(())
    }
}

#[test]
fn decoders_fill_slots_and_their_errors_arrive() {
    within_a_minute(|| {
        let vault = Vault::new(1, 5, 512);
        let disk = faulty(&vault);
        let mut store = vault.open_decoded(disk.clone(), 2, Arc::new(Adder));
        for _ in 0..2 {
            for expert in [0, 1, 4] {
                let leases = demand_all(&mut store, &[key(0, expert)]).unwrap();
                let raw = &vault.raw(leases[0].key())[..leases[0].bytes().len()];
                assert!(leases[0].bytes().iter().zip(raw).all(|(got, raw)| *got == raw.wrapping_add(1)));
            }
            let error = demand_all(&mut store, &[key(0, 2)]).unwrap_err();
            assert!(matches!(&error, StoreError::Decode { why, .. } if why == "symbol table is empty"));
            let error = demand_all(&mut store, &[key(0, 3)]).unwrap_err();
            assert!(matches!(error, StoreError::ReaderPanicked { key: k, .. } if k == key(0, 3)));
        }
        disk.on_read(disk.reads(), Fault::Torn(0));
        drop(demand_all(&mut store, &[key(0, 1), key(0, 4)]));
        let counted = store.meter().snapshot();
        assert_eq!(counted.decode_errors, 2);
        assert!(counted.decoded_bytes > 0 && counted.decode_bytes_per_s().is_some());
    });
}

/// Adds its part's number to each byte, in parts of unequal length; of one expert it refuses the third part and the
/// sixth, and panics at the fifth.
struct Parts;

impl RecordDecoder for Parts {
    fn parts(&self, _: ExpertKey) -> usize {
        7
    }

    fn start(&self, _: ExpertKey, part: usize) -> usize {
        [0, 0, 100, 101, 300, 300, 301][part]
    }

    fn decode(&self, key: ExpertKey, raw: &[u8], part: usize, out: &mut [u8]) -> Result<(), String> {
        match (key.expert, part) {
            (3, 2) => return Err("the third".into()),
            (3, 4) => panic!("the fifth"),
            (3, 5) => return Err("the sixth".into()),
            _ => (),
        }
        let starts: Vec<usize> = (0..7).map(|part| self.start(key, part)).collect();
        for (out, raw) in out.iter_mut().zip(&raw[starts[part]..]) {
            *out = raw.wrapping_add(part as u8);
        }
        Ok(())
    }
}

#[test]
fn parts_are_decoded_by_any_reader_and_fail_as_one() {
    within_a_minute(|| {
        let vault = Vault::new(2, 6, 512);
        let disk = faulty(&vault);
        let mut store = vault.open_decoded(disk.clone(), 4, Arc::new(Parts));
        for round in 0..50 {
            let experts = [[0, 1, 2, 4], [5, 4, 1, 0]][round % 2];
            let leases =
                demand_all(&mut store, &experts.map(|expert| key(round as u32 / 2 % 2, expert))).unwrap();
            for lease in leases {
                let raw = vault.raw(lease.key());
                for (at, got) in lease.bytes().iter().enumerate() {
                    let part = [0, 100, 101, 300, 301].iter().rposition(|&start| start <= at).unwrap();
                    let part = [1, 2, 3, 5, 6][part];
                    assert_eq!(*got, raw[at].wrapping_add(part), "{} at {at}", lease.key());
                }
            }
            let error = demand_all(&mut store, &[key(0, 3)]).unwrap_err();
            assert!(matches!(&error, StoreError::Decode { why, .. } if why == "the third"), "{error}");
            // Bytes that are not those that were written are the fault, whatever the decoder makes of them.
            disk.on_offset(vault.record(key(0, 3)).offset, Fault::Torn(round));
            let error = demand_all(&mut store, &[key(0, 3)]).unwrap_err();
            assert!(matches!(error, StoreError::Checksum { key: k, .. } if k == key(0, 3)), "{error}");
            disk.heal();
        }
        let counted = store.meter().snapshot();
        assert_eq!((counted.decode_errors, counted.checksum_errors), (50, 50));
    });
}

#[test]
fn a_store_closes_with_records_that_wait_to_be_decoded() {
    within_a_minute(|| {
        let vault = Vault::new(1, 6, 512);
        let gates: Vec<Arc<Gate>> = (0..4).map(|_| Gate::closed()).collect();
        let disk = faulty(&vault);
        for (number, gate) in gates.iter().enumerate() {
            disk.on_read(number as u64, Fault::Hold(gate.clone()));
        }
        let mut store = vault.open_decoded(disk, 6, Arc::new(Parts));
        std::mem::forget(demand(&mut store, &vault.keys()[..3]).unwrap());
        gates[0].wait_for(1);
        let closer = std::thread::spawn(move || drop(store));
        gates.iter().for_each(|gate| gate.open());
        closer.join().unwrap();
    });
}

#[test]
fn preloading_reads_runs_and_then_everything_hits() {
    within_a_minute(|| {
        let vault = Vault::new(3, 5, 512);
        let disk = faulty(&vault);
        let mut store = vault.open(disk.clone(), 100, 2);
        drop(demand_all(&mut store, &[key(1, 1)]).unwrap());
        let mut calls = Vec::new();
        store.preload_all(|loaded, total| calls.push((loaded, total))).unwrap();
        let total = vault.records.iter().map(|r| u64::from(r.len)).sum::<u64>()
            - u64::from(vault.record(key(1, 1)).len);
        assert!((1..=14).contains(&calls.len()), "{calls:?}");
        assert_eq!(calls.last(), Some(&(total, total)));
        assert!(calls.is_sorted());
        let before = store.meter().snapshot();
        assert_eq!(before.reads, 3, "one record, and a run on each side of it");
        for lease in demand_all(&mut store, &vault.keys()).unwrap() {
            vault.check(&lease);
        }
        let counted = store.meter().snapshot() - before;
        assert_eq!((counted.hit_rate(), counted.reads, counted.evictions), (Some(1.0), 0, 0));
        store.preload_all(|_, _| panic!("nothing is left to load")).unwrap();
    });
}

#[test]
fn a_preload_left_by_unwinding_leaves_the_store_whole() {
    within_a_minute(|| {
        let vault = Vault::new(3, 5, 512);
        let mut store = vault.open(faulty(&vault), 15, 1);
        let unwound = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            store.preload_all(|_, _| panic!("the caller's own"))
        }));
        assert!(unwound.is_err());
        for lease in demand_all(&mut store, &vault.keys()).unwrap() {
            vault.check(&lease);
        }
        store.preload_all(|_, _| ()).unwrap();
    });
}

#[test]
fn preloading_needs_room_and_reports_the_bad_record() {
    within_a_minute(|| {
        let vault = Vault::new(2, 4, 512);
        let disk = faulty(&vault);
        let error = vault.open(disk.clone(), 7, 2).preload_all(|_, _| ()).unwrap_err();
        assert!(matches!(error, StoreError::TooFewSlots { expected: 8, found: 7 }));

        let mut store = vault.open(disk.clone(), 8, 2);
        let bad = key(1, 0);
        for fault in [Fault::Error(ErrorKind::Other), Fault::Torn(1), Fault::Short(3), Fault::Panic] {
            disk.on_offset(offset(&vault, bad), fault);
            let error = store.preload_all(|_, _| ()).unwrap_err();
            let named = match error {
                StoreError::Read { key, .. }
                | StoreError::Checksum { key, .. }
                | StoreError::ReaderPanicked { key, .. } => key,
                error => panic!("{error}"),
            };
            assert_eq!(named, bad);
            assert_eq!(store.n_resident(), 7, "the others arrived");
        }
        disk.heal();
        store.preload_all(|_, _| ()).unwrap();
        for lease in demand_all(&mut store, &vault.keys()).unwrap() {
            vault.check(&lease);
        }
    });
}

#[test]
fn preloading_waits_for_a_dropped_batch_and_works_with_a_decoder() {
    within_a_minute(|| {
        let mut vault = Vault::new(1, 5, 512);
        vault.records.retain(|r| !matches!(r.key.expert, 2 | 3));
        let disk = faulty(&vault);
        let gate = Gate::closed();
        disk.on_read(0, Fault::Hold(gate.clone()));
        let mut store = vault.open_decoded(disk, 3, Arc::new(Adder));
        let batch = demand(&mut store, &[key(0, 4)]).unwrap();
        gate.wait_for(1);
        drop(batch);
        gate.open();
        store.preload_all(|_, _| ()).unwrap();
        assert_eq!(store.n_resident(), 3);
        let leases = demand_all(&mut store, &vault.keys()).unwrap();
        assert_eq!(leases[2].bytes()[0], vault.raw(key(0, 4))[0].wrapping_add(1));
        assert_eq!(store.meter().snapshot().reads, 3);
    });
}

#[test]
fn a_store_that_cannot_work_does_not_open() {
    within_a_minute(|| {
        let vault = Vault::new(1, 3, 512);
        let slot = vault.slot_bytes();
        let open = |records: Vec<Record>, config: StoreConfig| {
            let disk = Arc::new(MemoryDisk::aligned(vault.bytes.clone(), 512));
            Store::open(disk, records, config, None, Arc::default()).map(|_| ()).unwrap_err()
        };
        let with = |change: &dyn Fn(&mut Record)| {
            let mut records = vault.records.clone();
            change(&mut records[1]);
            open(records, StoreConfig::new(2, slot))
        };
        for (setting, config) in [
            ("slots", StoreConfig::new(0, slot)),
            ("slot_bytes", StoreConfig::new(1, 0)),
            ("readers", StoreConfig { readers: 0, ..StoreConfig::new(1, slot) }),
        ] {
            let error = open(vault.records.clone(), config);
            assert!(matches!(error, StoreError::Config { setting: s } if s == setting));
        }
        let error = with(&|r| r.offset = vault.bytes.len() as u64);
        assert!(matches!(error, StoreError::Truncated { found, .. } if found == vault.bytes.len() as u64));
        assert!(matches!(with(&|r| r.offset += 1), StoreError::BadRecord { key: k, .. } if k == key(0, 1)));
        assert!(matches!(with(&|r| r.len -= 1), StoreError::BadRecord { .. }));
        assert!(matches!(with(&|r| r.len = 0), StoreError::BadRecord { .. }));
        assert!(matches!(with(&|r| r.slot_len = r.len + 1), StoreError::BadRecord { .. }));
        assert!(matches!(with(&|r| r.offset = u64::MAX - 511), StoreError::BadRecord { .. }));
        assert!(matches!(with(&|r| r.key.layer = u32::MAX), StoreError::BadRecord { .. }));
        assert!(matches!(with(&|r| r.key.expert = 0), StoreError::Duplicate(k) if k == key(0, 0)));
        let error = open(vault.records.clone(), StoreConfig::new(2, slot - 1));
        assert!(matches!(error, StoreError::SlotTooSmall { expected, found, .. } if expected == found + 1));
        let error = open(vault.records.clone(), StoreConfig::new(3, 1 << 60));
        assert!(matches!(error, StoreError::OutOfMemory(_)), "{error}");
    });
}
