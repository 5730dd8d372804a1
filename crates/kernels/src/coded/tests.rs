//! Every set against a triple loop over single codes, and the promises about T and row ranges.

use proptest::prelude::*;
use smoe_format::half::f32_to_f16;
use smoe_format::{Encoding, Table, Zero, tile};

use super::*;
use crate::Activations;

fn all_uniform() -> impl Iterator<Item = Uniform> {
    [2, 3, 4, 5, 6, 8].into_iter().flat_map(|bits| {
        [16, 32, 64, 128].into_iter().flat_map(move |group| {
            [Zero::Symmetric, Zero::Affine].into_iter().filter_map(move |z| Uniform::new(bits, group, z))
        })
    })
}

/// Uniform codes, and level tables: MXFP4's and IQ4_NL's, one that has the extremes and zeros, one of neither.
fn all_coded() -> impl Iterator<Item = Encoding> {
    let levels = |bits: u8, i: usize| -> Vec<i8> {
        let other = (0..1 << bits).map(|code| (code * 89 + 31) as u8 as i8);
        match i {
            0 => other.map(|level| level.max(-127)).collect(),
            _ => other.map(|level| [0, 127, -127][level.unsigned_abs() as usize % 3]).collect(),
        }
    };
    let tables = [16, 32, 64, 128].into_iter().flat_map(move |group| {
        let known = [Table::MXFP4, Table::IQ4_NL].into_iter().filter_map(move |t| t.with_group(group));
        let others = (2..=4).flat_map(move |bits| (0..2).map(move |i| (bits, i)));
        known.chain(others.filter_map(move |(bits, i)| Table::new(bits, group, &levels(bits, i))))
    });
    all_uniform().map(Encoding::Uniform).chain(tables.map(Encoding::Table))
}

fn tiles(encoding: Encoding) -> Uniform {
    encoding.tiles().expect("coded")
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32
    }

    /// In -1..1.
    fn unit(&mut self) -> f32 {
        self.next() as f32 / (1u64 << 30) as f32 - 1.0
    }
}

/// A tensor of random codes, scales and minima, padding included.
fn tensor(encoding: Encoding, rows: usize, cols: usize, random: &mut Random) -> Vec<u8> {
    let uniform = tiles(encoding);
    let signed = encoding != Encoding::Uniform(uniform) || uniform.zero() == Zero::Affine;
    let mut bytes = vec![0u8; encoding.tensor_bytes(rows, cols).expect("small")];
    for tile in bytes.chunks_exact_mut(uniform.tile_bytes()) {
        for row in 0..ROWS {
            let mask = uniform.max_code();
            let codes: Vec<u8> = (0..uniform.group()).map(|_| random.next() as u8 & mask).collect();
            // Affine scales and those of tables may have either sign.
            let (scale, minimum) = (random.unit(), f32_to_f16(random.unit()));
            let scale = f32_to_f16(if signed { scale } else { scale.abs() });
            uniform.write_row(tile, row, &codes, scale, minimum);
        }
    }
    bytes
}

/// `[T, N]` in the words of the definition: single codes, wide integers.
fn reference(matrix: &Matrix<'_>, x: Quantised<'_>) -> Vec<f32> {
    let uniform = tiles(matrix.encoding());
    let table = match matrix.encoding() {
        Encoding::Table(table) => Some(table),
        _ => None,
    };
    let (group, m) = (uniform.group(), i64::from(uniform.max_code()));
    let mut out = Vec::new();
    for token in 0..x.tokens() {
        for row in 0..matrix.rows() {
            let block = row / ROWS * uniform.block_bytes(matrix.cols());
            let mut acc = 0.0f32;
            for g in 0..uniform.groups(matrix.cols()) {
                let tile = &matrix.bytes()[block + g * uniform.tile_bytes()..][..uniform.tile_bytes()];
                let (codes, sx, _) = x.cell(token, g);
                let (mut dot, mut sum) = (0i64, 0i64);
                let width = group.min(matrix.cols() - g * group);
                for (col, &x) in codes[..width].iter().enumerate() {
                    let code = tile::code(tile, uniform.bits(), group, row % ROWS, col);
                    let factor = table.map_or(i64::from(code), |t| i64::from(t.levels()[usize::from(code)]));
                    dot += factor * i64::from(x);
                    sum += i64::from(x);
                }
                let (scale, minimum) = uniform.scale(tile, row % ROWS);
                acc = match uniform.zero() {
                    _ if table.is_some() => (dot as f32).mul_add(scale * sx, acc),
                    Zero::Symmetric => ((2 * dot - m * sum) as f32).mul_add(scale * (sx / m as f32), acc),
                    Zero::Affine => {
                        let acc = (dot as f32).mul_add(scale * sx, acc);
                        (sum as f32).mul_add(minimum * sx, acc)
                    }
                };
            }
            out.push(acc);
        }
    }
    out
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

fn whole(kernels: Kernels, matrix: &Matrix<'_>, x: Quantised<'_>) -> Vec<f32> {
    let mut out = vec![f32::NAN; x.tokens() * matrix.rows()];
    kernels.coded_matmul(matrix, 0..matrix.rows(), x, &mut Shard::new(&mut out, x.tokens(), matrix.rows()));
    out
}

fn check(encoding: Encoding, rows: usize, cols: usize, tokens: usize, seed: u64) {
    let mut random = Random(seed);
    let bytes = tensor(encoding, rows, cols, &mut random);
    let matrix = Matrix::new(&bytes, rows, cols, encoding);
    let x: Vec<f32> = (0..tokens * cols).map(|_| random.unit()).collect();
    let mut a = Activations::with_capacity(tokens, cols);
    a.quantise(Kernels::detect(), &x, tokens, cols, tiles(encoding).group());
    let expected = bits(&reference(&matrix, a.view()));
    for kernels in Kernels::available() {
        assert_eq!(bits(&whole(kernels, &matrix, a.view())), expected, "{kernels:?} {matrix:?} T={tokens}");
    }
}

#[test]
fn every_set_gives_the_definition_for_every_encoding() {
    for (i, encoding) in all_coded().enumerate() {
        for (rows, cols, tokens) in [(32, 128, 1), (37, 150, 3), (64, 20, 8), (1, 300, 17)] {
            check(encoding, rows, cols, tokens, i as u64);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]
    #[test]
    fn every_set_gives_the_definition_for_random_shapes(
        which in 0usize..80,
        rows in 1usize..100,
        cols in 1usize..400,
        tokens in 1usize..20,
        seed in any::<u64>(),
    ) {
        let encoding = all_coded().nth(which).expect("48 uniform encodings, 32 tables");
        check(encoding, rows, cols, tokens, seed);
    }
}

#[test]
fn the_largest_codes_and_activations_do_not_saturate() {
    let extremes = (2..=4).flat_map(|bits| {
        let levels: Vec<i8> = (0..1 << bits).map(|code| if code % 2 == 0 { -127 } else { 127 }).collect();
        [16, 32, 64, 128].into_iter().filter_map(move |group| Table::new(bits, group, &levels))
    });
    for encoding in all_coded().chain(extremes.map(Encoding::Table)) {
        let uniform = tiles(encoding);
        let (rows, cols, tokens) = (32, 2 * uniform.group(), 15);
        let codes = vec![uniform.max_code(); uniform.group()];
        let mut bytes = vec![0u8; encoding.tensor_bytes(rows, cols).expect("small")];
        for tile in bytes.chunks_exact_mut(uniform.tile_bytes()) {
            (0..ROWS).for_each(|r| uniform.write_row(tile, r, &codes, f32_to_f16(1.0), f32_to_f16(-0.5)));
        }
        let matrix = Matrix::new(&bytes, rows, cols, encoding);
        for sign in [1.0, -1.0] {
            let mut a = Activations::with_capacity(tokens, cols);
            a.quantise(Kernels::detect(), &vec![sign; tokens * cols], tokens, cols, uniform.group());
            // Twice the largest dot is the largest integer, and exact as a float.
            let dot = uniform.group() as i32 * i32::from(uniform.max_code()) * 127;
            assert!(2 * dot < 1 << 24);
            assert!(a.view().cell(0, 0).0.iter().all(|&c| f32::from(c) == 127.0 * sign));
            let expected = bits(&reference(&matrix, a.view()));
            for kernels in Kernels::available() {
                assert_eq!(bits(&whole(kernels, &matrix, a.view())), expected, "{kernels:?} {encoding}");
            }
        }
    }
}

#[test]
fn many_tokens_give_the_bits_of_one_and_ranges_those_of_the_whole() {
    let mut random = Random(5);
    // Wide enough that several blocks of tokens take rows in more than one run.
    let uniform = |bits, group, zero| Encoding::Uniform(Uniform::new(bits, group, zero).expect("valid"));
    for (encoding, rows, cols) in [
        (uniform(4, 64, Zero::Symmetric), 150, 4096),
        (uniform(8, 32, Zero::Affine), 300, 1000),
        (uniform(3, 128, Zero::Symmetric), 96, 256),
        (Encoding::Table(Table::IQ4_NL), 150, 4096),
        (Encoding::Table(Table::MXFP4), 96, 288),
    ] {
        let uniform = tiles(encoding);
        let tokens = 23;
        let bytes = tensor(encoding, rows, cols, &mut random);
        let matrix = Matrix::new(&bytes, rows, cols, encoding);
        let x: Vec<f32> = (0..tokens * cols).map(|_| random.unit()).collect();
        let mut all = Activations::with_capacity(tokens, cols);
        all.quantise(Kernels::detect(), &x, tokens, cols, uniform.group());
        let mut one = Activations::with_capacity(1, cols);
        for kernels in Kernels::available() {
            let expected = whole(kernels, &matrix, all.view());
            for t in 0..tokens {
                one.quantise(kernels, &x[t * cols..(t + 1) * cols], 1, cols, uniform.group());
                let single = whole(kernels, &matrix, one.view());
                assert_eq!(bits(&single), bits(&expected[t * rows..(t + 1) * rows]), "{kernels:?} {t}");
            }
            let mut out = vec![0.0; tokens * rows];
            let (mut low, mut high) = Shard::new(&mut out, tokens, rows).split_at(64);
            kernels.coded_matmul(&matrix, 64..rows, all.view(), &mut high);
            kernels.coded_matmul(&matrix, 0..32, all.view(), &mut low);
            kernels.coded_matmul(&matrix, 32..64, all.view(), &mut low.part(32..64));
            assert_eq!(bits(&out), bits(&expected), "{kernels:?}");
        }
    }
}

#[test]
fn close_to_the_product_of_the_decoded_weights() {
    for encoding in all_coded() {
        let uniform = tiles(encoding);
        let (rows, cols) = (40, 200);
        let mut random = Random(9);
        let bytes = tensor(encoding, rows, cols, &mut random);
        let matrix = Matrix::new(&bytes, rows, cols, encoding);
        let x: Vec<f32> = (0..cols).map(|_| random.unit()).collect();
        let mut a = Activations::with_capacity(1, cols);
        a.quantise(Kernels::detect(), &x, 1, cols, uniform.group());
        let out = whole(Kernels::detect(), &matrix, a.view());
        let mut row_values = vec![0.0; cols];
        for (row, &value) in out.iter().enumerate() {
            encoding.decode_row(&bytes, cols, row, &mut row_values);
            let exact: f64 = row_values.iter().zip(&x).map(|(&w, &x)| f64::from(w) * f64::from(x)).sum();
            let magnitude: f64 = row_values.iter().map(|w| f64::from(w.abs())).sum();
            // Half a step of the activations per weight, and f32.
            assert!((f64::from(value) - exact).abs() <= magnitude * 0.51 / 127.0, "{encoding} {row}");
        }
    }
}

#[test]
fn decoded_rows_are_those_of_the_format() {
    let mut random = Random(11);
    for encoding in all_coded().chain([Encoding::F16]) {
        for (rows, cols) in [(70, 150), (33, 128), (5, 3)] {
            let mut bytes = vec![0; encoding.tensor_bytes(rows, cols).expect("small")];
            let weights: Vec<f32> = (0..rows * cols).map(|_| random.unit()).collect();
            encoding.encode(&weights, cols, &mut bytes);
            let matrix = Matrix::new(&bytes, rows, cols, encoding);
            let mut expected = vec![0.0; rows * cols];
            for (row, out) in expected.chunks_exact_mut(cols).enumerate() {
                encoding.decode_row(&bytes, cols, row, out);
            }
            for kernels in Kernels::available() {
                for range in [0..rows, 1..rows, rows - 1..rows, 0..0] {
                    let mut out = vec![f32::NAN; range.len() * cols];
                    kernels.decode_rows(&matrix, range.clone(), &mut out);
                    let expected = &expected[range.start * cols..range.end * cols];
                    assert_eq!(bits(&out), bits(expected), "{encoding} {kernels:?} {range:?}");
                }
            }
        }
    }
}

#[test]
#[should_panic(expected = "not whole blocks")]
fn ranges_that_cut_a_block_panic() {
    let uniform = Uniform::new(4, 64, Zero::Symmetric).expect("valid");
    let bytes = vec![0; 2 * 1088];
    let matrix = Matrix::new(&bytes, 64, 64, Encoding::Uniform(uniform));
    let a = Activations::with_capacity(1, 64);
    kernels_ignore(&matrix, a.view());
}

fn kernels_ignore(matrix: &Matrix<'_>, x: Quantised<'_>) {
    Kernels::detect().coded_matmul(matrix, 0..40, x, &mut Shard::new(&mut [], 0, 64));
}
