//! Facts about the machine and this process, as far as the system tells them.

use std::fs;

/// `/proc/self/status` field in bytes, 0 if unknown.
fn status_bytes(field: &str) -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix(field)).unwrap_or_default();
    line.trim().trim_end_matches("kB").trim().parse::<u64>().unwrap_or(0) * 1024
}

/// The most memory that this process has had resident; 0 if the system does not say.
pub fn peak_rss_bytes() -> u64 {
    status_bytes("VmHWM:")
}

/// The memory that this process has resident now; 0 if the system does not say.
pub fn rss_bytes() -> u64 {
    status_bytes("VmRSS:")
}

/// Bytes of this process that are swapped out.
pub fn swapped_bytes() -> u64 {
    status_bytes("VmSwap:")
}

/// Bytes that this process has had read from storage, by the kernel's count; none where it keeps none.
pub fn read_bytes() -> Option<u64> {
    let io = fs::read_to_string("/proc/self/io").ok()?;
    io.lines().find_map(|line| line.strip_prefix("read_bytes:"))?.trim().parse().ok()
}

/// The processor's name.
pub fn processor() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info.lines().find_map(|line| line.strip_prefix("model name"));
    name.map_or_else(
        || std::env::consts::ARCH.to_owned(),
        |name| name.trim_start_matches([' ', '\t', ':']).to_owned(),
    )
}

/// The system's name and version, without what a distributor adds to it.
pub fn system() -> String {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let version = release.trim().split('-').next().unwrap_or_default();
    format!("{} {version}", std::env::consts::OS).trim_end().to_owned()
}

/// Runnable processes over the last minute: what else the machine was doing.
pub fn load_average() -> Option<f64> {
    fs::read_to_string("/proc/loadavg").ok()?.split(' ').next()?.parse().ok()
}
