//! What the tests on a device share.
#![allow(dead_code, reason = "each test binary uses its own part")]

use smoe_gpu::{Gpu, Software};

/// A device, if only one that a program plays; None, said aloud, where there is none.
#[allow(clippy::print_stderr, reason = "a skip is said aloud")]
pub fn gpu() -> Option<Gpu> {
    match Gpu::open(None, Software::Accept) {
        Ok(gpu) => Some(gpu),
        Err(why) => {
            eprintln!("SKIPPED: {why}");
            None
        }
    }
}

/// A linear congruential generator.
pub struct Random(pub u64);

impl Random {
    /// 31 bits.
    pub fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32
    }

    /// In -1..1.
    pub fn value(&mut self) -> f32 {
        self.next() as f32 / (1u64 << 30) as f32 - 1.0
    }

    /// So many of them.
    pub fn values(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.value()).collect()
    }

    /// Below `n`.
    pub fn below(&mut self, n: usize) -> usize {
        self.next() as usize % n
    }
}
