//! What the values of flags mean: numbers, sizes, shares.

use std::str::FromStr;

use smoe_engine::KvType;
use smoe_engine::plan::RingSize;

/// A size of the ring.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RingShare {
    /// Of all experts.
    Share(f64),
    /// So many.
    Slots(usize),
}

impl RingShare {
    /// As slots, 1 at least and no more than all.
    pub fn slots(self, all: usize) -> usize {
        let slots = match self {
            Self::Share(share) => (share * all as f64).round() as usize,
            Self::Slots(slots) => slots,
        };
        slots.clamp(1, all.max(1))
    }
}

/// A number, or `auto`.
#[derive(Debug, Default, Clone, Copy)]
pub struct AutoNumber(pub Option<usize>);

pub fn parse_auto(s: &str) -> Result<AutoNumber, String> {
    match s {
        "auto" => Ok(AutoNumber(None)),
        _ => s.parse().map(|n| AutoNumber(Some(n))).map_err(|_| "a number or `auto`".to_owned()),
    }
}

pub fn parse_kv(s: &str) -> Result<KvType, String> {
    match s {
        "f32" => Ok(KvType::F32),
        "f16" => Ok(KvType::F16),
        "q8" => Ok(KvType::Q8),
        _ => Err("one of f32, f16, q8".to_owned()),
    }
}

pub fn parse_bias(s: &str) -> Result<(u32, f32), String> {
    let parsed = s.split_once('=').and_then(|(id, bias)| Some((id.parse().ok()?, bias.parse().ok()?)));
    parsed.ok_or_else(|| "a token id and a number: ID=BIAS".to_owned())
}

/// Bytes: `1073741824`, `1024M`, `1G`, `1GiB` are the same.
pub fn parse_size(s: &str) -> Result<u64, String> {
    let fail = || "a size such as 800M or 12G".to_owned();
    let digits = s.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(s.len());
    let (number, unit) = s.split_at(digits);
    let shift = match unit.trim().to_ascii_lowercase().trim_end_matches("ib").trim_end_matches('b') {
        "" => 0,
        "k" => 10,
        "m" => 20,
        "g" => 30,
        "t" => 40,
        _ => return Err(fail()),
    };
    let value = f64::from_str(number).map_err(|_| fail())? * (1u64 << shift) as f64;
    if value >= 0.0 && value < (1u64 << 62) as f64 { Ok(value as u64) } else { Err(fail()) }
}

/// A bare number counts experts; a number with a unit is a size.
pub fn parse_ring(s: &str) -> Result<RingSize, String> {
    if s == "auto" {
        return Ok(RingSize::Auto);
    }
    if let Ok(slots) = s.parse() {
        return Ok(RingSize::Slots(slots));
    }
    parse_size(s)
        .map(RingSize::Bytes)
        .map_err(|_| "auto, a number of experts, or a size such as 4G".to_owned())
}

/// `5%` is a share of all experts, `200` a number of them.
pub fn parse_ring_share(s: &str) -> Result<RingShare, String> {
    let size = match s.trim().strip_suffix('%') {
        Some(share) => share.trim().parse().ok().map(|percent: f64| RingShare::Share(percent / 100.0)),
        None => s.trim().parse().ok().map(RingShare::Slots),
    };
    let fits = |size: &RingShare| match size {
        RingShare::Share(share) => *share > 0.0 && *share <= 1.0,
        RingShare::Slots(slots) => *slots > 0,
    };
    size.filter(fits).ok_or_else(|| "a share such as 5%, up to 100%, or a number of experts".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_take_units_of_1024() {
        assert_eq!(parse_size("1024"), Ok(1024));
        assert_eq!(parse_size("1.5G"), Ok(3 << 29));
        assert_eq!(parse_size("800MiB"), Ok(800 << 20));
        assert_eq!(parse_size("2kb"), Ok(2048));
        assert!(parse_size("G").is_err() && parse_size("1X").is_err() && parse_size("-1").is_err());
    }

    #[test]
    fn a_ring_is_experts_or_bytes() {
        assert_eq!(parse_ring("auto"), Ok(RingSize::Auto));
        assert_eq!(parse_ring("128"), Ok(RingSize::Slots(128)));
        assert_eq!(parse_ring("1G"), Ok(RingSize::Bytes(1 << 30)));
        assert!(parse_ring("lots").is_err());
    }

    #[test]
    fn a_size_to_replay_is_a_share_or_experts() {
        assert_eq!(parse_ring_share("5%").map(|size| size.slots(200)), Ok(10));
        assert_eq!(parse_ring_share("0.1%").map(|size| size.slots(200)), Ok(1));
        assert_eq!(parse_ring_share("300").map(|size| size.slots(200)), Ok(200));
        for wrong in ["0", "0%", "101%", "-5%", "nan%", "many", ""] {
            assert!(parse_ring_share(wrong).is_err(), "{wrong}");
        }
    }
}
