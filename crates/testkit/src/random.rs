//! Deterministic random numbers, the same on every machine: integer steps and exact or correctly rounded
//! float operations only (a library's `ln` or `cos` may differ between machines in the last place).

/// The SplitMix64 generator (Steele, Lea, Flood 2014).
#[derive(Clone, Debug)]
pub struct Random {
    state: u64,
}

impl Random {
    /// A generator that starts from `seed`.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// A generator for the thing called `name` under `seed`: streams of different names are unrelated.
    #[must_use]
    pub fn named(seed: u64, name: &str) -> Self {
        // FNV-1a over the name, from a start that the seed decides.
        let start = Self::new(seed).next_u64() ^ 0xcbf2_9ce4_8422_2325;
        let hash = name.bytes().fold(start, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3));
        Self::new(hash)
    }

    /// The next 64 bits.
    pub const fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in `0..1`.
    pub fn unit(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Uniform in `0..n`.
    ///
    /// # Panics
    /// If `n` is 0.
    pub fn below(&mut self, n: usize) -> usize {
        assert!(n > 0, "a choice among none");
        ((u128::from(self.next_u64()) * n as u128) >> 64) as usize
    }

    /// Bell-shaped, mean 0 and variance 1: the sum of four uniforms, within ±3.47.
    pub fn bell(&mut self) -> f64 {
        let sum: f64 = (0..4).map(|_| self.unit()).sum();
        (sum - 2.0) * 3f64.sqrt()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stream_is_the_published_one() {
        // First outputs of SplitMix64 from seed 1234567, as its authors' C code prints them.
        let mut random = Random::new(1_234_567);
        assert_eq!(random.next_u64(), 6_457_827_717_110_365_317);
        assert_eq!(random.next_u64(), 3_203_168_211_198_807_973);
    }

    #[test]
    fn bell_has_mean_zero_and_variance_one() {
        let mut random = Random::named(1, "bell");
        let n = 100_000;
        let (mut sum, mut squares) = (0.0, 0.0);
        for _ in 0..n {
            let x = random.bell();
            sum += x;
            squares += x * x;
        }
        assert!((sum / f64::from(n)).abs() < 0.02);
        assert!((squares / f64::from(n) - 1.0).abs() < 0.02);
    }

    #[test]
    fn names_and_seeds_give_other_streams() {
        let first = |seed, name| Random::named(seed, name).next_u64();
        assert_ne!(first(1, "a"), first(1, "b"));
        assert_ne!(first(1, "a"), first(2, "a"));
        assert_eq!(first(1, "a"), first(1, "a"));
    }
}
