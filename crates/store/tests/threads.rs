//! Leases dropped on other threads while the owner demands, evicts and overwrites.
#![allow(clippy::unwrap_used, clippy::print_stdout)] // Tests stop at the first surprise, and say what they saw.

mod support;

use smoe_store::{Lease, MemoryDisk, StoreError};
use std::sync::{Arc, mpsc};
use support::{Random, Vault, demand, within_a_minute};

#[test]
fn leases_come_back_from_other_threads() {
    within_a_minute(|| {
        let vault = Arc::new(Vault::new(4, 16, 512));
        let keys = vault.keys();
        for slots in [1, 3, 12] {
            let disk = Arc::new(MemoryDisk::new(vault.bytes.clone()));
            let mut store = vault.open(disk, slots, 3);
            // "Devices" that look at the bytes some time later and let go.
            let (devices, threads): (Vec<_>, Vec<_>) = (0..3)
                .map(|_| {
                    let (sender, receiver) = mpsc::channel::<Lease>();
                    let vault = vault.clone();
                    let thread =
                        std::thread::spawn(move || receiver.iter().map(|lease| vault.check(&lease)).count());
                    (sender, thread)
                })
                .unzip();
            let mut random = Random(slots as u64);
            let (mut sent, mut stalls) = (0, 0);
            for _ in 0..1500 {
                let size = 1 + random.below(8);
                let batch: Vec<_> = random.choose(size, keys.len()).into_iter().map(|i| keys[i]).collect();
                for result in demand(&mut store, &batch).unwrap() {
                    match result {
                        Ok(lease) => {
                            devices[random.below(devices.len())].send(lease).unwrap();
                            sent += 1;
                        }
                        Err(StoreError::Stalled { .. }) => {
                            stalls += 1;
                            std::thread::yield_now();
                        }
                        Err(error) => panic!("{error}"),
                    }
                }
            }
            drop(devices);
            let checked: usize = threads.into_iter().map(|thread| thread.join().unwrap()).sum();
            assert_eq!(checked, sent);
            println!("{slots} slots: {sent} leases on other threads, {stalls} stalls");
            for lease in demand(&mut store, &keys).unwrap() {
                vault.check(&lease.unwrap());
            }
        }
    });
}
