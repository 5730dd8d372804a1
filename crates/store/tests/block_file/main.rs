//! The block file: against a model, with torn and cut-off files, with failing disks, and as a file among
//! others.
#![allow(clippy::unwrap_used, clippy::print_stdout)] // Tests stop at the first surprise, and say what they saw.

mod disks;
mod faults;
mod model;
mod opening;
#[path = "../support/mod.rs"]
mod support;
mod torn;

use smoe_store::{AlignedBuf, BlockFile, BlockFileConfig, BlockMeta, OpenMode};
use support::Random;

/// Not a multiple of a page, so that padding and a tail that is read apart are in play.
const PAYLOAD: usize = 9001;
/// Header, and descriptor with padded payload, as documented.
const HEADER: usize = 4096;
const SLOT: usize = 4096 + 3 * 4096;

fn config(slots: usize) -> BlockFileConfig {
    BlockFileConfig {
        payload_bytes: PAYLOAD,
        max_bytes: (HEADER + slots * SLOT) as u64,
        fingerprint: [9; 32],
        queue: 2,
        direct: OpenMode::Auto,
    }
}

/// Everything about a block follows from its key; it continues the block of half its key.
fn meta(key: u128) -> BlockMeta {
    let note_len = (key as usize * 37) % 2049;
    let note = (0..note_len).map(|i| (i as u128 ^ key) as u8).collect();
    BlockMeta { key, parent: key / 2, note }
}

fn payload(key: u128) -> Vec<u8> {
    let mut random = Random(key as u64);
    let mut bytes: Vec<u8> = (0..PAYLOAD / 8 + 1).flat_map(|_| random.next().to_le_bytes()).collect();
    bytes.truncate(PAYLOAD);
    bytes
}

/// Puts a block, waiting as often as it takes.
fn put(file: &mut BlockFile, key: u128) {
    while !file.put(meta(key), &payload(key)).unwrap() {
        file.flush().unwrap();
    }
}

/// Gets blocks, and checks those that come.
fn get(file: &mut BlockFile, keys: &[u128]) -> Vec<bool> {
    let stride = PAYLOAD.next_multiple_of(4096) + 4096;
    let mut memory = AlignedBuf::zeroed(keys.len() * stride).unwrap();
    // Every other slice is not aligned.
    let skewed = |i: usize| i % 2 * 13;
    let mut wanted: Vec<(u128, &mut [u8])> = keys
        .iter()
        .zip(memory.chunks_exact_mut(stride))
        .enumerate()
        .map(|(i, (&key, chunk))| (key, &mut chunk[skewed(i)..][..PAYLOAD]))
        .collect();
    let came = file.get(&mut wanted).unwrap();
    for ((key, bytes), &came) in wanted.iter().zip(&came) {
        assert!(!came || **bytes == payload(*key), "wrong bytes for block {key}");
    }
    came
}

/// The keys of what is held, after checking what belongs to them.
fn keys(file: &BlockFile) -> Vec<u128> {
    let mut keys: Vec<u128> = file
        .entries()
        .map(|entry| {
            assert_eq!(*entry, meta(entry.key));
            assert!(file.contains(entry.key));
            entry.key
        })
        .collect();
    keys.sort_unstable();
    keys
}

#[test]
fn a_block_file_travels_between_threads() {
    fn is_send<T: Send>() {}
    is_send::<BlockFile>();
}
