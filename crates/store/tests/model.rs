//! The store against a naive model, over thousands of random steps.
#![allow(clippy::unwrap_used, clippy::print_stdout)] // Tests stop at the first surprise, and say what they saw.

mod support;

use smoe_store::replay::{self, Trace};
use smoe_store::{
    ExpertKey, FaultyDisk, Lease, MemoryDisk, Order, PolicyKind, StoreConfig, StoreError, Want,
};
use std::collections::{BTreeMap, HashSet, VecDeque};
use std::sync::Arc;
use support::{Random, Vault, demand, key, one_by_one, within_a_minute};

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
        let mut demand = demand(&mut store, &batch).unwrap();
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

/// Many readers, random faults, batches dropped half way, leases held, guesses right and wrong, a limit that moves:
/// what must hold whatever the timing.
fn keeps_its_promises(seed: u64, slots: usize, steps: usize) {
    let mut random = Random(seed);
    let vault = Vault::new(4, 8, 512);
    let keys = vault.keys();
    let disk = FaultyDisk::new(MemoryDisk::aligned(vault.bytes.clone(), 512));
    let config = StoreConfig { readers: 3, ..StoreConfig::new(slots, vault.slot_bytes()) };
    let mut store = vault.open_as(disk.clone(), config);
    let (mut delivered, mut failed, mut demanded) = (0, 0, 0);
    let mut held: Vec<Lease> = Vec::new();
    let mut out: Vec<Lease> = Vec::new();
    let choose = |random: &mut Random, size| -> Vec<Want> {
        let mut chosen = random.choose(size, keys.len());
        if random.below(2) == 0 {
            chosen.sort_unstable(); // neighbours on disk, so that some are read together
        }
        chosen.into_iter().map(|i| Want { key: keys[i], stamp: random.next() % 1000 }).collect()
    };
    for step in 0..steps {
        if step % 100 == 0 {
            disk.heal();
            disk.at_random(random.next(), if step % 200 == 0 { 40 } else { 0 });
        }
        let size = 1 + random.below(keys.len());
        let batch = choose(&mut random, size);
        match random.below(6) {
            0 => store.expect(&batch),
            1 => store.prewarm(&keys),
            2 => store.set_limit(1 + random.below(slots)),
            3 => store.set_limit(slots),
            4 => store.poll(),
            _ => {}
        }
        let order = [Order::Arrival, Order::Given][random.below(2)];
        let stop_after = if random.below(3) == 0 { random.below(size + 1) } else { usize::MAX };
        let mut missing: VecDeque<ExpertKey> = batch.iter().map(|want| want.key).collect();
        let hand_out = |missing: &mut VecDeque<ExpertKey>, key| {
            let place = missing.iter().position(|&k| k == key);
            let place = place.unwrap_or_else(|| panic!("{key} came twice or unasked"));
            assert!(place == 0 || order == Order::Arrival, "{key} came before its turn");
            missing.remove(place);
        };
        let mut demand = store.demand(&batch, order).unwrap();
        demanded += size as u64;
        while !missing.is_empty() && batch.len() - missing.len() < stop_after {
            assert_eq!(demand.remaining(), missing.len());
            if random.below(4) == 0 {
                let size = random.below(8);
                demand.expect(&choose(&mut random, size));
            }
            let most = 1 + random.below(5);
            match demand.take_ready(most, &mut out) {
                Ok(n) => {
                    assert_eq!(n, out.len());
                    assert!((1..=most).contains(&n), "the batch ended early");
                    for lease in out.drain(..) {
                        hand_out(&mut missing, lease.key());
                        vault.check(&lease);
                        delivered += 1;
                        held.push(lease);
                    }
                    held.truncate(random.below(4));
                }
                Err(StoreError::Stalled { slots, leased, .. }) => {
                    let ours: HashSet<usize> = held.iter().map(Lease::slot).collect();
                    assert_eq!((ours.len(), leased), (slots, slots), "only the consumer can stall a batch");
                    held.clear();
                }
                Err(StoreError::Read { key, .. } | StoreError::Checksum { key, .. }) => {
                    hand_out(&mut missing, key);
                    failed += 1;
                }
                Err(error) => panic!("{error}"),
            }
        }
        if missing.is_empty() {
            assert_eq!(demand.take_ready(1, &mut out).unwrap(), 0);
            assert!(demand.next().is_none());
        }
        drop(demand);
        for lease in &held {
            vault.check(lease);
        }
        assert!(store.n_resident() <= store.n_slots());
    }
    // A batch of everything joins what is still in flight; after it the books must balance.
    disk.heal();
    drop(held);
    store.set_limit(slots);
    for lease in demand(&mut store, &keys).unwrap() {
        vault.check(&lease.unwrap());
    }
    assert_eq!((store.n_resident(), store.in_flight()), (slots, 0));
    let counted = store.meter().snapshot();
    assert_eq!(counted.demand_hits + counted.demand_misses, demanded + keys.len() as u64);
    assert_eq!(counted.loads - counted.evictions, slots as u64);
    let settled = counted.ahead_hits + counted.ahead_waste;
    assert!((settled..=settled + counted.ahead_late).contains(&counted.ahead_reads));
    println!("{slots} slots: {delivered} delivered, {failed} failed, {counted:?}");
    assert!(failed > 0 && counted.ahead_late > 0);
    let reads = counted.reads - counted.checksum_errors;
    assert!(slots < 16 || reads < counted.loads, "nothing was read together");
}

#[test]
fn promises_hold_under_faults_and_cancellation() {
    within_a_minute(|| {
        for (seed, slots) in [1, 2, 7, 16, 31, 32].into_iter().enumerate() {
            keeps_its_promises(seed as u64, slots, 1000);
        }
    });
}

/// The store and the replay of what was demanded of it agree, under every policy.
#[test]
fn replay_tells_what_the_store_does() {
    within_a_minute(|| {
        let (layers, experts, top_k) = (3, 8, 2);
        let vault = Vault::new(layers, experts, 512);
        for (seed, kind) in PolicyKind::ALL.into_iter().enumerate() {
            let mut random = Random(seed as u64);
            let mut trace = Trace::new(layers, experts, top_k).unwrap();
            let slots = experts as usize + random.below(8);
            let config = StoreConfig { policy: kind, ..one_by_one(slots, vault.slot_bytes(), 1) };
            let mut store = vault.open_as(Arc::new(MemoryDisk::new(vault.bytes.clone())), config);
            let mut position = 1;
            for _ in 0..300 {
                let tokens = [1, 1, 1, 5][random.below(4)];
                let mut ids: Vec<u16> = Vec::new();
                for layer in 0..layers {
                    let mut last: BTreeMap<u32, u64> = BTreeMap::new();
                    for token in 0..tokens {
                        // Some experts are asked for more often than others.
                        let pool = [experts as usize, 4][random.below(2)];
                        for id in random.choose(top_k as usize, pool) {
                            last.insert(id as u32, position + token);
                            ids.push(id as u16);
                        }
                    }
                    let wants: Vec<Want> =
                        last.into_iter().map(|(id, stamp)| Want { key: key(layer, id), stamp }).collect();
                    let demand = store.demand(&wants, Order::Given).unwrap();
                    let leases: Vec<Lease> = demand.collect::<Result<_, _>>().unwrap();
                    leases.iter().for_each(|lease| vault.check(lease));
                }
                trace.push(tokens as u32, &ids).unwrap();
                position += tokens;
            }
            let score = replay::replay(&trace, slots, &mut *kind.build(slots, trace.n_records()));
            let counted = store.meter().snapshot();
            assert_eq!(
                (score.hits, score.misses),
                (counted.demand_hits, counted.demand_misses),
                "{}",
                kind.name()
            );
            assert!(score.hits <= replay::belady(&trace, slots).hits);
        }
    });
}
