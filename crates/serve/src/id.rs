//! Names and times that are nobody's secret: random enough not to meet twice.

use std::hash::{BuildHasher, RandomState};
use std::time::{SystemTime, UNIX_EPOCH};

/// A number that differs from call to call: the standard library keys every hasher anew.
pub fn random() -> u64 {
    RandomState::new().hash_one(UNIX_EPOCH.elapsed().map_or(0, |time| time.as_nanos()))
}

/// `prefix` and 24 hexadecimal digits.
pub fn new(prefix: &str) -> String {
    format!("{prefix}{:016x}{:08x}", random(), random() as u32)
}

/// Seconds since 1970.
pub fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// A time as RFC 3339 has it.
pub fn rfc3339(unix_seconds: u64) -> String {
    let time =
        i64::try_from(unix_seconds).ok().and_then(|seconds| jiff::Timestamp::from_second(seconds).ok());
    time.unwrap_or(jiff::Timestamp::UNIX_EPOCH).to_string()
}
