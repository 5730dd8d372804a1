//! Float operations: against f64 references of another shape, and bit for bit between instruction sets.

mod attention;
mod exp;
mod matmul;
mod small;

use smoe_kernels::Kernels;

/// Numbers without a pattern, the same every time: splitmix64.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// From -1 to 1.
    fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / 8_388_608.0 - 1.0
    }

    fn units(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.unit()).collect()
    }

    /// Any bits: subnormals, infinities and NaNs too, and many values near the others.
    fn any(&mut self, n: usize) -> Vec<f32> {
        const SPECIAL: [f32; 12] = [
            0.0,
            -0.0,
            1.0,
            -1.0,
            f32::MIN_POSITIVE,
            -1e-45,
            1e-30,
            -1e-30,
            f32::MAX,
            f32::INFINITY,
            f32::NEG_INFINITY,
            f32::NAN,
        ];
        (0..n)
            .map(|_| match self.next() % 4 {
                0 => SPECIAL[(self.next() % 12) as usize],
                1 => f32::from_bits(self.next() as u32),
                _ => self.unit() * 4.0,
            })
            .collect()
    }

    /// Products that vanish: lanes that hold -0.
    fn tiny(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| [1e-30, -1e-30, 0.0, -0.0][(self.next() % 4) as usize]).collect()
    }
}

/// The bits, with one NaN for all: which NaN comes out is not defined.
fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| if v.is_nan() { 0x7fc0_0000 } else { v.to_bits() }).collect()
}

/// Runs `f` with every instruction set and asserts that all give the bits of the first, scalar; returns them.
fn same_bits(what: &str, mut f: impl FnMut(Kernels) -> Vec<f32>) -> Vec<f32> {
    let mut all = Kernels::available().into_iter();
    let scalar = f(all.next().expect("scalar is always there"));
    for kernels in all {
        assert_eq!(bits(&f(kernels)), bits(&scalar), "{what}: {kernels:?}");
    }
    scalar
}

/// Lengths that matter: all short ones, and some around larger blocks.
fn lengths() -> impl Iterator<Item = usize> {
    (1..=70).chain([127, 128, 129, 255, 576, 1000, 1024, 2049])
}

fn assert_close(value: f32, expected: f64, tolerance: f64, what: &str) {
    let error = (f64::from(value) - expected).abs();
    assert!(error <= tolerance, "{what}: {value} for {expected}, off by {error:e} of {tolerance:e}");
}
