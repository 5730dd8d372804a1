//! The table of the coder: which code each of its 128 states stands for.

/// States of the coder.
pub const STATES: usize = 128;
/// Codes that there may be.
pub const SYMBOLS: usize = 16;
/// Bytes of a table in a record: a nibble per state.
pub const TABLE_BYTES: usize = STATES / 2;
const LOG: u32 = STATES.ilog2();

/// Which code each state stands for, and where each state leads: tANS (Duda 2013, as in Collet's FSE) with 128
/// states.
///
/// A state says how many bits it takes before any is read: with `f` states of its code, the i-th of them in
/// ascending order is `x = f + i`, takes `bits = 7 - floor(log2 x)` and leads to state
/// `base + the bits`, `base = (x << bits) - 128`. So 128 nibbles are the whole table, and any 128 nibbles are one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SymbolTable {
    symbols: [u8; STATES],
    bits: [u8; STATES],
    base: [u8; STATES],
}

impl SymbolTable {
    /// The table whose state `2 i` stands for the low nibble of byte `i`, `2 i + 1` for the high one.
    #[must_use]
    pub fn from_bytes(packed: &[u8; TABLE_BYTES]) -> Self {
        let mut symbols = [0; STATES];
        for (pair, byte) in symbols.as_chunks_mut::<2>().0.iter_mut().zip(packed) {
            *pair = [byte & 15, byte >> 4];
        }
        Self::new(symbols)
    }

    /// The nibbles again.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; TABLE_BYTES] {
        let mut packed = [0; TABLE_BYTES];
        for (byte, pair) in packed.iter_mut().zip(self.symbols.as_chunks::<2>().0) {
            *byte = pair[0] | pair[1] << 4;
        }
        packed
    }

    fn new(symbols: [u8; STATES]) -> Self {
        let mut next = [0u32; SYMBOLS];
        symbols.iter().for_each(|&s| next[usize::from(s)] += 1);
        let (mut bits, mut base) = ([0; STATES], [0; STATES]);
        for ((&s, bits), base) in symbols.iter().zip(&mut bits).zip(&mut base) {
            let x = next[usize::from(s)];
            next[usize::from(s)] += 1;
            let n = LOG - x.ilog2();
            *bits = n as u8;
            *base = ((x << n) - STATES as u32) as u8;
        }
        Self { symbols, bits, base }
    }

    /// A table for codes that occur `counts` times: each that occurs has a state. Integers and the four basic
    /// operations only, so every machine makes the same one.
    #[must_use]
    pub fn fit(counts: &[u64; SYMBOLS]) -> Self {
        let total = counts.iter().sum::<u64>();
        if total == 0 {
            return Self::new([0; STATES]);
        }
        let states = share(counts, total);
        // Not only how many states a code has counts at this size, but where they lie: state i is met with a
        // probability of about 1 / i, so the states of a code are put where its own probability wants them.
        let mut places = Vec::with_capacity(STATES);
        for (s, (&n, &count)) in states.iter().zip(counts).enumerate() {
            let p = count as f64 / total as f64;
            places.extend((n..2 * n).map(|x| (1.0 / (p * ln_1p_inverse(x)), s as u8)));
        }
        places.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        let mut symbols = [0; STATES];
        symbols.iter_mut().zip(places).for_each(|(symbol, (_, s))| *symbol = s);
        Self::new(symbols)
    }

    /// The code of each state.
    #[must_use]
    pub const fn symbols(&self) -> &[u8; STATES] {
        &self.symbols
    }

    /// Bits that each state takes, 0 to 7.
    #[must_use]
    pub const fn bits(&self) -> &[u8; STATES] {
        &self.bits
    }

    /// The state that each leads to if its bits are 0; `base + 2^bits` is at most 128.
    #[must_use]
    pub const fn base(&self) -> &[u8; STATES] {
        &self.base
    }
}

/// How many of the states each code gets: about its share, one at least, and what is left where it saves most.
fn share(counts: &[u64; SYMBOLS], total: u64) -> [u32; SYMBOLS] {
    let mut states = counts.map(|count| match count {
        0 => 0,
        _ => ((count as f64 / total as f64 * STATES as f64).round() as u32).max(1),
    });
    // What a code saves with one state more, and loses with one less, in units of no consequence.
    let worth = |s: usize, n: u32| counts[s] as f64 * ln_1p_inverse(n);
    loop {
        let sum = states.iter().sum::<u32>();
        if sum == STATES as u32 {
            return states;
        }
        let short = sum < STATES as u32;
        let candidates = (0..SYMBOLS).filter(|&s| states[s] > u32::from(!short));
        let by_worth = |a: &usize, b: &usize| {
            let of = |s: usize| worth(s, if short { states[s] } else { states[s] - 1 });
            of(*a).total_cmp(&of(*b))
        };
        // There is one: some code has states, and if they are too many, some code has more than one.
        let chosen = if short { candidates.max_by(by_worth) } else { candidates.min_by(by_worth) };
        let Some(s) = chosen else { return states };
        if short { states[s] += 1 } else { states[s] -= 1 }
    }
}

/// `ln(1 + 1/x)` for x from 1, to about 1e-9: `2 artanh(1 / (2x + 1))`, the first terms of its series.
fn ln_1p_inverse(x: u32) -> f64 {
    let z = 1.0 / f64::from(2 * x + 1);
    let q = z * z;
    2.0 * z
        * (1.0
            + q * (1.0 / 3.0 + q * (0.2 + q * (1.0 / 7.0 + q * (1.0 / 9.0 + q * (1.0 / 11.0 + q / 13.0))))))
}

/// A table turned round: from the code and the state after it to the state before it.
pub(crate) struct Encoder {
    of: [Share; SYMBOLS],
    /// The states of each code, ascending, code by code.
    states: [u8; STATES],
}

/// A code's part of a table.
#[derive(Clone, Copy, Default)]
struct Share {
    /// States.
    n: u32,
    /// The most bits that one of them takes.
    most: u32,
    /// A state below `n << most`, counted from 128, takes one bit less.
    limit: u32,
    /// Its first entry among the states, less `n`, modulo 2^32.
    first: u32,
}

impl Encoder {
    pub fn new(table: &SymbolTable) -> Self {
        let mut of = [Share::default(); SYMBOLS];
        let mut states = [0; STATES];
        let mut at = 0;
        for (s, of) in of.iter_mut().enumerate() {
            let first = at;
            for (i, _) in table.symbols.iter().enumerate().filter(|(_, symbol)| usize::from(**symbol) == s) {
                states[at] = i as u8;
                at += 1;
            }
            let n = (at - first) as u32;
            let most = LOG - n.max(1).ilog2();
            *of = Share { n, most, limit: n << most, first: (first as u32).wrapping_sub(n) };
        }
        Self { of, states }
    }

    /// True if the table has this code.
    pub fn has(&self, symbol: u8) -> bool {
        self.of[usize::from(symbol)].n > 0
    }

    /// Puts `symbol` before `state`: the state that stands for it, and the bits that lead from there to `state`,
    /// with their number. The table has the code.
    #[inline]
    pub fn put(&self, symbol: u8, state: u8) -> (u8, u8, u8) {
        let Share { most, limit, first, .. } = self.of[usize::from(symbol)];
        let y = STATES as u32 + u32::from(state);
        // The one number of bits for which y >> bits is one of n .. 2n.
        let bits = most - u32::from(y < limit);
        let before = self.states[first.wrapping_add(y >> bits) as usize];
        (before, (y & ((1 << bits) - 1)) as u8, bits as u8)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_step_of_the_encoder_is_a_step_of_the_table() {
        for counts in [
            [1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
            [0, 0, 3, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
            [1, 5, 40, 200, 800, 2000, 4000, 6000, 6000, 4000, 2000, 800, 200, 40, 5, 1],
            [1; 16],
            [u64::from(u32::MAX); 16],
        ] {
            let table = SymbolTable::fit(&counts);
            assert_eq!(SymbolTable::from_bytes(&table.to_bytes()), table);
            let encoder = Encoder::new(&table);
            for s in 0..SYMBOLS as u8 {
                assert_eq!(encoder.has(s), counts[usize::from(s)] > 0);
                if !encoder.has(s) {
                    continue;
                }
                for after in 0..STATES as u8 {
                    let (before, value, bits) = encoder.put(s, after);
                    let before = usize::from(before);
                    assert_eq!((table.symbols[before], table.bits[before]), (s, bits));
                    assert_eq!(table.base[before] + value, after);
                    assert!(value < 1 << bits);
                }
            }
        }
    }

    #[test]
    fn any_nibbles_are_a_table_that_stays_within_its_states() {
        let mut state = 1u32;
        for _ in 0..200 {
            let packed = std::array::from_fn(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                // Few codes and many: the upper bits choose how many there are.
                (state >> 24) as u8 & ((state >> 8) as u8 | 0x11)
            });
            let table = SymbolTable::from_bytes(&packed);
            assert_eq!(table.to_bytes(), packed);
            for i in 0..STATES {
                assert!(usize::from(table.base[i]) + (1 << table.bits[i]) <= STATES && table.bits[i] <= 7);
            }
        }
    }

    #[test]
    fn the_series_is_the_logarithm() {
        for x in 1..300 {
            let expected = (1.0 / f64::from(x)).ln_1p();
            assert!((ln_1p_inverse(x) / expected - 1.0).abs() < 1e-7, "{x}");
        }
    }
}
