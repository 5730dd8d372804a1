//! Plain loops of other rooms, compiled for this machine's vectors.
//!
//! What is not worth a kernel (work that is done once per vault, not once per token) is written as plain loops over
//! slices and arrays, which the compiler turns into vectors of whatever width the processor has. Rust never reorders
//! or fuses float operations by itself, so the bits are the same everywhere.

use crate::isa::Kernels;
use crate::simd::{Op, Simd};

/// Work with all its operands.
pub trait Loops {
    /// What comes of it.
    type Out;

    /// The work. Must be `#[inline(always)]`, as everything hot that it calls: only what ends up inside is compiled
    /// with the processor's features.
    fn run(self) -> Self::Out;
}

struct Compiled<L>(L);

impl<L: Loops> Op for Compiled<L> {
    type Out = L::Out;

    fn scalar(self) -> L::Out {
        self.0.run()
    }

    #[inline(always)]
    fn vector<S: Simd>(self, _: S) -> L::Out {
        self.0.run()
    }
}

impl Kernels {
    /// Runs `work`, compiled for this instruction set.
    #[inline]
    pub fn compiled<L: Loops>(self, work: L) -> L::Out {
        self.run(Compiled(work))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Scaled<'a>(&'a [f32], f32);

    impl Loops for Scaled<'_> {
        type Out = Vec<u32>;

        #[inline(always)]
        fn run(self) -> Vec<u32> {
            self.0.iter().map(|x| x.mul_add(self.1, 0.1).to_bits()).collect()
        }
    }

    #[test]
    fn every_set_gives_the_bits_of_plain_rust() {
        let x: Vec<f32> = (0..1000).map(|i| (i as f32 * 0.37).fract() - 0.5).collect();
        let plain = Scaled(&x, 1.7).run();
        for kernels in Kernels::available() {
            assert_eq!(kernels.compiled(Scaled(&x, 1.7)), plain, "{kernels:?}");
        }
    }
}
