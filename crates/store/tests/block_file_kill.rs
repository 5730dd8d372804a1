//! A process that writes blocks is killed: alone in its binary, because a process that is being started holds
//! copies of all locks for a moment.
#![allow(clippy::unwrap_used, clippy::print_stdout)] // Tests stop at the first surprise, and say what they saw.

use smoe_store::{AlignedBuf, BlockFile, BlockFileConfig, BlockFileError, BlockMeta, OpenMode};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

const PAYLOAD: usize = 300_000;
/// The child ends by itself after so many, should nobody kill it.
const BLOCKS: u128 = 2000;
/// In the child's environment, the file.
const FILE: &str = "SMOE_TEST_BLOCK_FILE";

fn config() -> BlockFileConfig {
    let max_bytes = 64 << 20; // Some 200 blocks, so that old ones are replaced.
    BlockFileConfig {
        payload_bytes: PAYLOAD,
        max_bytes,
        fingerprint: [1; 32],
        queue: 4,
        direct: OpenMode::Auto,
    }
}

/// Cheap to make, so that nearly all of the child's time is in writes.
fn payload(key: u128) -> Vec<u8> {
    vec![(key % 251) as u8; PAYLOAD]
}

/// Puts blocks 1, 2, 3 and so on, and says from time to time which was the last to be flushed.
fn write(path: &Path) {
    let (mut file, _) = BlockFile::open(path, &config()).unwrap();
    for key in 1..=BLOCKS {
        let meta = BlockMeta { key, parent: 0, note: key.to_le_bytes().into() };
        let payload = payload(key);
        while !file.put(meta.clone(), &payload).unwrap() {
            std::thread::yield_now();
        }
        if key % 10 == 0 {
            file.flush().unwrap();
            println!("\nflushed {key}");
        }
    }
}

#[test]
fn blocks_outlive_a_killed_process() {
    if let Some(path) = std::env::var_os(FILE) {
        return write(Path::new(&path));
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("blocks");
    // The second number varies the moment within the writes that follow.
    for (lines, attempts) in [(1, 1), (2, 10), (2, 30), (3, 60), (3, 100), (30, 20), (30, 50), (30, 150)] {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--nocapture", "--exact", "blocks_outlive_a_killed_process"])
            .env(FILE, &path)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        let flushed =
            out.lines().filter_map(|line| line.unwrap().strip_prefix("flushed ")?.parse::<u128>().ok());
        let last = flushed.take(lines).last().unwrap();
        for _ in 0..attempts {
            assert!(matches!(BlockFile::open(&path, &config()), Err(BlockFileError::InUse { .. })));
        }
        child.kill().unwrap();
        child.wait().unwrap();

        let (mut file, opened) = BlockFile::open(&path, &config()).unwrap();
        assert_eq!(opened.stale, None);
        let capacity = file.snapshot().capacity as u128;
        let mut newest = 0;
        let keys: Vec<u128> = file.entries().map(|entry| entry.key).collect();
        let mut buf = AlignedBuf::zeroed(PAYLOAD).unwrap();
        for key in keys {
            let came = file.get(&mut [(key, &mut buf)]).unwrap()[0];
            assert!(!came || *buf == payload(key), "wrong bytes for block {key}");
            newest = newest.max(key);
        }
        println!("{opened:?}, up to {newest}, after {last} were flushed: {:?}", file.snapshot());
        // What was flushed, and not replaced by what came after or was under way.
        for key in (newest + 5).saturating_sub(capacity).max(1)..=last {
            assert_eq!(
                file.get(&mut [(key, &mut buf)]).unwrap(),
                [true],
                "block {key} of {newest} was flushed"
            );
        }
        drop(file);
        std::fs::remove_file(&path).unwrap();
    }
}
