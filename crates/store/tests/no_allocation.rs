//! In steady state a batch allocates nothing, on any thread.
#![allow(clippy::unwrap_used, clippy::print_stdout)] // Tests stop at the first surprise, and say what they saw.

mod support;

use smoe_store::{
    CountingAllocator, ExpertKey, FileDisk, Lease, OpenMode, Order, RecordDecoder, Store, StoreConfig, Want,
};
use std::sync::Arc;
use support::{Random, Vault};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new();

#[test]
fn batches_do_not_allocate() {
    let vault = Vault::new(4, 16, 16384);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("experts");
    std::fs::write(&path, &vault.bytes).unwrap();
    let disk = FileDisk::open(&path, OpenMode::Auto).unwrap();
    println!("direct I/O: {}", smoe_store::Disk::direct(&disk));
    let (disk, config) = (Arc::new(disk), StoreConfig::new(20, vault.slot_bytes()));
    without_allocating(&vault, vault.open_as(disk.clone(), config));
    without_allocating(&vault, vault.open_decoded(disk, 20, Arc::new(Halves)));
}

/// Copies, in two parts.
struct Halves;

impl RecordDecoder for Halves {
    fn parts(&self, _: ExpertKey) -> usize {
        2
    }

    fn start(&self, _: ExpertKey, part: usize) -> usize {
        part * 1000
    }

    fn decode(&self, _: ExpertKey, raw: &[u8], part: usize, out: &mut [u8]) -> Result<(), String> {
        out.copy_from_slice(&raw[part * 1000..][..out.len()]);
        Ok(())
    }
}

fn without_allocating(vault: &Vault, mut store: Store) {
    // From a few experts to more than there are slots, in both orders; some batches are dropped half way. Before
    // some, and while some run, others are expected, half of them rightly.
    let mut random = Random(7);
    let keys = vault.keys();
    let batches: Vec<Vec<Want>> = (5..605)
        .map(|i: usize| {
            let size = if i.is_multiple_of(10) { 40 } else { 1 + random.below(8) };
            let mut chosen = random.choose(size, keys.len());
            if i.is_multiple_of(4) {
                chosen.sort_unstable(); // neighbours, that are read together
            }
            chosen.into_iter().map(|j| Want { key: keys[j], stamp: (i - j % 5) as u64 }).collect()
        })
        .collect();
    let mut out: Vec<Lease> = Vec::with_capacity(64);
    let mut run = |batches: &[Vec<Want>]| {
        for (i, batch) in batches.iter().enumerate() {
            let expected = &batches[(i + 1 + i % 2) % batches.len()];
            match i % 5 {
                0 => store.expect(expected),
                1 => store.set_limit(12 + i % 8),
                2 => store.prewarm(&keys),
                _ => store.poll(),
            }
            let mut demand = store.demand(batch, [Order::Arrival, Order::Given][i / 2 % 2]).unwrap();
            if i % 3 == 0 {
                demand.expect(expected);
                while demand.take_ready(4, &mut out).unwrap() > 0 {
                    out.clear();
                }
            } else {
                let n = if i % 7 == 0 { 2 } else { batch.len() };
                demand.by_ref().take(n).for_each(|lease| drop(lease.unwrap()));
            }
        }
    };
    run(&batches[..100]);
    let before = ALLOCATOR.allocations();
    run(&batches[100..]);
    let after = ALLOCATOR.allocations();
    println!("{:?}", store.meter().snapshot());
    assert_eq!(after - before, 0, "allocations in 500 batches");
}
