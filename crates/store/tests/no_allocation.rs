//! In steady state a batch allocates nothing, on any thread.
#![allow(clippy::unwrap_used, clippy::print_stdout)] // Tests stop at the first surprise, and say what they saw.

mod support;

use smoe_store::{CountingAllocator, FileDisk, Lease, OpenMode};
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
    let mut store = vault.open(Arc::new(disk), 20, 4);

    // From a few experts to more than there are slots; some batches are dropped half way.
    let mut random = Random(7);
    let keys = vault.keys();
    let batches: Vec<Vec<_>> = (0..600)
        .map(|i| {
            let size = if i % 10 == 0 { 40 } else { 1 + random.below(8) };
            random.choose(size, keys.len()).into_iter().map(|i| keys[i]).collect()
        })
        .collect();
    let mut out: Vec<Lease> = Vec::with_capacity(64);
    let mut run = |batches: &[Vec<_>]| {
        for (i, batch) in batches.iter().enumerate() {
            let mut demand = store.demand(batch).unwrap();
            if i % 3 == 0 {
                while demand.take_ready(&mut out).unwrap() > 0 {
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
