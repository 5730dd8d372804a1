//! The store against a naive model, over thousands of random steps.
#![allow(clippy::unwrap_used, clippy::print_stdout)] // Tests stop at the first surprise, and say what they saw.

mod support;

use smoe_store::{ExpertKey, FaultyDisk, Lease, MemoryDisk, StoreError};
use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use support::{Random, Vault, within_a_minute};

/// What one reader and FIFO order make deterministic: a list of residents by age, and a queue of loads.
#[derive(Default)]
struct Model {
    slots: usize,
    /// Oldest first.
    residents: Vec<ExpertKey>,
    loading: VecDeque<ExpertKey>,
    /// Held by the test or not handed out yet.
    leased: Vec<ExpertKey>,
    wanted: VecDeque<ExpertKey>,
    ready: VecDeque<ExpertKey>,
    hits: u64,
    misses: u64,
    evictions: u64,
}

#[derive(Debug, PartialEq)]
enum Next {
    Lease(ExpertKey),
    Stalled,
    Complete,
}

impl Model {
    fn demand(&mut self, keys: &[ExpertKey]) {
        for &key in keys {
            if let Some(place) = self.residents.iter().position(|&k| k == key) {
                self.residents.remove(place);
                self.residents.push(key);
                self.leased.push(key);
                self.ready.push_back(key);
                self.hits += 1;
            } else {
                self.wanted.push_back(key);
                self.misses += 1;
            }
        }
        self.claim();
    }

    fn claim(&mut self) {
        while !self.wanted.is_empty() {
            if self.residents.len() + self.loading.len() == self.slots {
                let Some(victim) = self.residents.iter().position(|key| !self.leased.contains(key)) else {
                    return;
                };
                self.residents.remove(victim);
                self.evictions += 1;
            }
            self.loading.extend(self.wanted.pop_front());
        }
    }

    fn next(&mut self) -> Next {
        self.claim();
        if let Some(key) = self.ready.pop_front() {
            return Next::Lease(key);
        }
        if let Some(key) = self.loading.pop_front() {
            self.residents.push(key);
            self.leased.push(key);
            return Next::Lease(key);
        }
        if self.wanted.is_empty() { Next::Complete } else { Next::Stalled }
    }

    fn release(&mut self, key: ExpertKey) {
        let place = self.leased.iter().position(|&k| k == key).expect("leased");
        self.leased.swap_remove(place);
    }
}

fn agrees_with_the_model(seed: u64, slots: usize, steps: usize) {
    let mut random = Random(seed);
    let vault = Vault::new(3, 6, 512);
    let keys = vault.keys();
    let disk = Arc::new(MemoryDisk::new(vault.bytes.clone()));
    let mut store = vault.open(disk, slots, 1);
    let mut model = Model { slots, ..Model::default() };
    let mut held: Vec<Lease> = Vec::new();
    let mut stalls = 0;
    for _ in 0..steps {
        let size = random.below(keys.len() + 1).min(random.below(keys.len() + 1));
        let batch: Vec<ExpertKey> = random.choose(size, keys.len()).into_iter().map(|i| keys[i]).collect();
        let keep_share = random.below(3);
        model.demand(&batch);
        let mut demand = store.demand(&batch).unwrap();
        loop {
            let expected = model.next();
            match demand.next() {
                None => {
                    assert_eq!(expected, Next::Complete);
                    break;
                }
                Some(Ok(lease)) => {
                    assert_eq!(expected, Next::Lease(lease.key()));
                    vault.check(&lease);
                    held.push(lease);
                    // Mostly give back at once, sometimes one of those held for long.
                    while held.len() > random.below(keep_share + 1) {
                        let lease = held.swap_remove(random.below(held.len()));
                        vault.check(&lease);
                        model.release(lease.key());
                    }
                }
                Some(Err(StoreError::Stalled { slots: all, leased, wanted })) => {
                    assert_eq!(expected, Next::Stalled);
                    assert_eq!((all, leased, wanted), (slots, slots, model.wanted.len()));
                    stalls += 1;
                    let lease = held.swap_remove(random.below(held.len()));
                    model.release(lease.key());
                }
                Some(Err(error)) => panic!("{error}"),
            }
        }
        drop(demand);
        let residents: HashSet<ExpertKey> = store.residents().collect();
        assert_eq!(residents, model.residents.iter().copied().collect());
        let counted = store.meter().snapshot();
        assert_eq!(
            (counted.demand_hits, counted.demand_misses, counted.evictions, counted.reads),
            (model.hits, model.misses, model.evictions, model.misses)
        );
    }
    println!(
        "{slots} slots: {} hits, {} misses, {} evictions, {stalls} stalls",
        model.hits, model.misses, model.evictions
    );
}

#[test]
fn residency_hits_and_evictions_agree_with_the_model() {
    within_a_minute(|| {
        for (seed, slots) in [1, 2, 3, 5, 8, 13, 17, 18, 40].into_iter().enumerate() {
            let slots = std::cmp::min(slots, 18);
            agrees_with_the_model(seed as u64, slots, 1500);
        }
    });
}

/// Many readers, random faults, batches dropped half way, leases held: what must hold whatever the timing.
fn keeps_its_promises(seed: u64, slots: usize, steps: usize) {
    let mut random = Random(seed);
    let vault = Vault::new(4, 8, 512);
    let keys = vault.keys();
    let disk = FaultyDisk::new(MemoryDisk::aligned(vault.bytes.clone(), 512));
    let mut store = vault.open(disk.clone(), slots, 4);
    let (mut delivered, mut failed, mut demanded) = (0, 0, 0);
    let mut held: Vec<Lease> = Vec::new();
    let mut out: Vec<Lease> = Vec::new();
    for step in 0..steps {
        if step % 100 == 0 {
            disk.heal();
            disk.at_random(random.next(), if step % 200 == 0 { 40 } else { 0 });
        }
        let size = 1 + random.below(keys.len());
        let batch: Vec<ExpertKey> = random.choose(size, keys.len()).into_iter().map(|i| keys[i]).collect();
        let stop_after = if random.below(3) == 0 { random.below(size + 1) } else { usize::MAX };
        let mut missing: HashSet<ExpertKey> = batch.iter().copied().collect();
        let mut demand = store.demand(&batch).unwrap();
        demanded += size as u64;
        while !missing.is_empty() && batch.len() - missing.len() < stop_after {
            assert_eq!(demand.remaining(), missing.len());
            match demand.take_ready(&mut out) {
                Ok(n) => {
                    assert_eq!(n, out.len());
                    assert!(n > 0, "the batch ended early");
                    for lease in out.drain(..) {
                        assert!(missing.remove(&lease.key()), "{} came twice or unasked", lease.key());
                        vault.check(&lease);
                        delivered += 1;
                        held.push(lease);
                    }
                    held.truncate(random.below(4));
                }
                Err(StoreError::Stalled { .. }) => held.clear(),
                Err(StoreError::Read { key, .. } | StoreError::Checksum { key, .. }) => {
                    assert!(missing.remove(&key), "{key} failed twice or unasked");
                    failed += 1;
                }
                Err(error) => panic!("{error}"),
            }
        }
        if missing.is_empty() {
            assert_eq!(demand.take_ready(&mut out).unwrap(), 0);
            assert!(demand.next().is_none());
        }
        drop(demand);
        for lease in &held {
            vault.check(lease);
        }
        assert!(store.n_resident() <= slots);
    }
    // A batch of everything joins what is still in flight; after it the books must balance.
    disk.heal();
    drop(held);
    for lease in store.demand(&keys).unwrap() {
        vault.check(&lease.unwrap());
    }
    let counted = store.meter().snapshot();
    assert_eq!(counted.demand_hits + counted.demand_misses, demanded + keys.len() as u64);
    let loaded = counted.reads - counted.checksum_errors;
    assert_eq!(loaded - counted.evictions, store.n_resident() as u64);
    assert_eq!(store.n_resident(), slots);
    assert_eq!(counted.reads + counted.read_errors, disk.reads());
    println!("{slots} slots: {delivered} delivered, {failed} failed, {counted:?}");
    assert!(failed > 0);
}

#[test]
fn promises_hold_under_faults_and_cancellation() {
    within_a_minute(|| {
        for (seed, slots) in [1, 2, 7, 16, 31, 32].into_iter().enumerate() {
            keeps_its_promises(seed as u64, slots, 1000);
        }
    });
}
