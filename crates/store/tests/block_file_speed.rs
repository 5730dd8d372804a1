//! Measures a block file: `cargo test -p smoe-store --release --test block_file_speed -- --ignored
//! --nocapture`.
#![allow(clippy::unwrap_used, clippy::print_stdout)] // Tests stop at the first surprise, and say what they saw.

use smoe_store::{AlignedBuf, BlockFile, BlockFileConfig, BlockMeta, OpenMode};
use std::time::Instant;

/// Puts, flushes, reopens and gets `blocks` blocks of `payload_bytes`, in a folder of `$SMOE_SPEED_DIR` or
/// the system's temporary one.
fn measure(payload_bytes: usize, blocks: u128, queue: usize, direct: OpenMode) {
    let folder = match std::env::var_os("SMOE_SPEED_DIR") {
        Some(dir) => tempfile::tempdir_in(dir).unwrap(),
        None => tempfile::tempdir().unwrap(),
    };
    let path = folder.path().join("blocks");
    let max_bytes = (payload_bytes as u64 + 8192) * blocks as u64 + 4096;
    let config = BlockFileConfig { payload_bytes, max_bytes, fingerprint: [0; 32], queue, direct };
    let mut payload = AlignedBuf::zeroed(payload_bytes).unwrap();
    payload.iter_mut().enumerate().for_each(|(i, byte)| *byte = (i * i / 3) as u8);
    let gigabytes = payload_bytes as f64 * blocks as f64 / 1e9;

    let (mut file, opened) = BlockFile::open(&path, &config).unwrap();
    println!("{payload_bytes} x {blocks}, queue {queue}, direct {}", opened.direct_io);
    let fill = |file: &mut BlockFile, first: u128| {
        let (start, mut in_put) = (Instant::now(), 0.0);
        for key in first..first + blocks {
            let meta = BlockMeta { key, parent: 0, note: vec![1; 512].into() };
            loop {
                let begin = Instant::now();
                let queued = file.put(meta.clone(), &payload).unwrap();
                if queued {
                    in_put += begin.elapsed().as_secs_f64();
                    break;
                }
                std::thread::yield_now();
            }
        }
        file.flush().unwrap();
        let seconds = start.elapsed().as_secs_f64();
        println!("  put {:.2} GB/s, {:.0} us a call", gigabytes / seconds, in_put * 1e6 / blocks as f64);
    };
    fill(&mut file, 1);
    fill(&mut file, 1 + blocks);
    drop(file);
    let start = Instant::now();
    let (mut file, opened) = BlockFile::open(&path, &config).unwrap();
    println!("  open {:.1} ms for {} blocks", start.elapsed().as_secs_f64() * 1e3, opened.blocks);
    for batch in [1, 4, 16] {
        let stride = payload_bytes.next_multiple_of(4096);
        let mut memory = AlignedBuf::zeroed(batch * stride).unwrap();
        memory.fill(1);
        let keys: Vec<u128> = (1 + blocks..1 + 2 * blocks).collect();
        let start = Instant::now();
        for keys in keys.chunks(batch) {
            let slices = memory.chunks_exact_mut(stride).map(|chunk| &mut chunk[..payload_bytes]);
            let mut wanted: Vec<(u128, &mut [u8])> = keys.iter().copied().zip(slices).collect();
            assert!(file.get(&mut wanted).unwrap().iter().all(|&came| came));
        }
        println!("  get {:.2} GB/s in batches of {batch}", gigabytes / start.elapsed().as_secs_f64());
    }
}

#[test]
#[ignore = "a measurement"]
fn throughput() {
    for direct in [OpenMode::Auto, OpenMode::Buffered] {
        measure(3 << 20, 1000, 4, direct);
    }
    measure(128 << 10, 4000, 8, OpenMode::Auto);
}
