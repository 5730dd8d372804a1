//! Reading memory and doing nothing with it: the ceiling that products over weights are held against.

use crate::isa::Kernels;
use crate::simd::{LANES, Op, Simd};

/// Bytes of a step: eight registers of sixteen floats.
const STEP: usize = 8 * 4 * LANES;

struct Stream<'a>(&'a [u8]);

impl Op for Stream<'_> {
    type Out = f32;

    fn scalar(self) -> f32 {
        let words = self.0.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word));
        words.fold(0u64, |sum, word| sum ^ word) as f32
    }

    #[inline(always)]
    fn vector<S: Simd>(self, s: S) -> f32 {
        let mut sums = [s.splat(0.0); 8];
        for step in self.0.as_chunks::<STEP>().0 {
            for (i, sum) in sums.iter_mut().enumerate() {
                let at = step[4 * LANES * i..].as_ptr();
                s.prefetch(at.wrapping_add(8192));
                // SAFETY: 64 bytes of the step from `i * 64` on.
                *sum = s.add(*sum, unsafe { s.load_f32(at) });
            }
        }
        sums.into_iter().map(|sum| s.sum(sum)).sum()
    }
}

/// Bytes that are asked for ahead of time: as far ahead as the products' own prefetches reach, which do not cover them.
const BEGINNING: usize = 8192;

struct Prefetch<'a>(&'a [u8]);

impl Op for Prefetch<'_> {
    type Out = ();

    fn scalar(self) {}

    #[inline(always)]
    fn vector<S: Simd>(self, s: S) {
        for line in self.0[..BEGINNING.min(self.0.len())].chunks(64) {
            s.prefetch(line.as_ptr());
        }
    }
}

impl Kernels {
    /// Asks for the beginning of weights that a product takes soon. A product's own prefetches begin where it does, so
    /// that without this it waits for its first lines one after the other (EXP-KERNEL-14).
    pub(crate) fn prefetch(self, bytes: &[u8]) {
        self.run(Prefetch(bytes));
    }

    /// Reads `bytes` once, front to back, with the widest loads and prefetches of the products, and returns a
    /// number that depends on all of them (but for a tail of less than 512) and means nothing.
    #[must_use]
    pub fn stream(self, bytes: &[u8]) -> f32 {
        self.run(Stream(bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_step_counts() {
        for kernels in Kernels::available() {
            let mut bytes = vec![0; 3 * STEP + 100];
            let zero = kernels.stream(&bytes);
            for step in 0..3 {
                // Makes the last float of the step 2.0.
                bytes[step * STEP + STEP - 1] = 0x40;
                assert_ne!(kernels.stream(&bytes).to_bits(), zero.to_bits(), "{kernels:?} {step}");
                bytes[step * STEP + STEP - 1] = 0;
            }
        }
    }
}
