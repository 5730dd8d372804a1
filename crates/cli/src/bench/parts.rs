//! The machine's parts alone: a disk, the kernels.

use std::path::Path;
use std::time::Duration;

use serde_json::{Map, Value, json};
use smoe_engine::{DirectIo, OpenMode, ceiling};
use smoe_store::FileDisk;

use super::record::{Record, rounded};
use crate::failure::Failure;
use crate::progress;

/// Bytes of a read: small experts, experts of some MB, and large ones.
const READS: [usize; 4] = [256 << 10, 1 << 20, 2560 << 10, 10 << 20];
/// For how long each depth is read.
const TIME: Duration = Duration::from_millis(500);

/// Reads a large file, or the expert file of a vault, at random at several sizes and depths.
pub fn disk(path: &Path) -> Result<Record, Failure> {
    let inside = path.join(smoe_format::file_name::EXPERTS);
    let path = if inside.is_file() { &inside } else { path };
    let file = FileDisk::open(path, OpenMode::Auto)?;
    let direct = smoe_store::Disk::direct(&file).clone();
    let mut record = Record::default();
    super::figures::machine_facts(&mut record);
    record.set("file", path.display().to_string());
    record.set("file_bytes", smoe_store::Disk::len(&file));
    record.set("direct_io", matches!(direct, DirectIo::Yes { .. }));
    record.set("direct_io_why", direct.to_string());
    let mut best = 0f64;
    for bytes in READS.into_iter().filter(|bytes| *bytes as u64 <= smoe_store::Disk::len(&file)) {
        let spinner = progress::spinner("reading");
        let ceiling = ceiling::disk(&file, bytes, TIME, 0);
        spinner.finish_and_clear();
        let ceiling = ceiling?;
        let depths: Map<String, Value> = ceiling
            .depths
            .iter()
            .map(|(depth, rate)| (depth.to_string(), json!(rounded(rate / 1e9))))
            .collect();
        record.set(&format!("read_{}_kib_gb_s", bytes >> 10), depths);
        record.set("sequential_gb_s", rounded(ceiling.sequential_bytes_per_s / 1e9));
        best = best.max(ceiling.bytes_per_s);
    }
    record.set("disk_ceiling_gb_s", rounded(best / 1e9));
    Ok(record)
}

/// Streams memory and multiplies, with every instruction set of this machine.
pub fn kernels(threads: Option<usize>) -> Result<Record, Failure> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = threads.unwrap_or(cores).max(1);
    let mut record = Record::default();
    super::figures::machine_facts(&mut record);
    record.set("threads", threads);
    record.set("fork_join_us", rounded(ceiling::fork_join(threads) * 1e6));
    let spinner = progress::spinner("multiplying");
    let rates = ceiling::products(threads);
    spinner.finish_and_clear();
    for rate in rates? {
        let figures =
            json!({ "gmac_s": rounded(rate.macs_per_s / 1e9), "gb_s": rounded(rate.bytes_per_s / 1e9) });
        record.set(&rate.name, figures);
    }
    Ok(record)
}
