//! The products on a device against the CPU's kernels: the bits of coded ones, the values of float ones.
#![allow(clippy::unwrap_used, reason = "tests fail loudly")]

mod beside;
#[path = "../common/mod.rs"]
mod common;
mod experts;

use std::io::Write;
use std::sync::OnceLock;

use common::{Random, gpu};
use proptest::prelude::*;
use smoe_format::half::f32_to_f16;
use smoe_format::tile::ROWS;
use smoe_format::{Encoding, Table, Uniform, Zero};
use smoe_gpu::{
    CodedMatmul, CodedPlane, Columns, ExactMatmul, FloatMatmul, Gpu, Lanes, Quantise, Slice, Step, Tiling,
    Tuning, Weights,
};
use smoe_kernels::{Activations, Kernels, Matrix, Shard};

/// One device for all tests: opening it and compiling kernels is what takes long.
fn device() -> Option<&'static Gpu> {
    static GPU: OnceLock<Option<Gpu>> = OnceLock::new();
    GPU.get_or_init(|| {
        let gpu = gpu()?;
        let how = if gpu.fused_fma().unwrap() { "its own" } else { "played" };
        // Written, not printed: a passing test's prints are swallowed.
        let line = format!("{}: bits are compared, fused multiply-adds are {how}\n", gpu.facts());
        std::io::stderr().write_all(line.as_bytes()).unwrap();
        Some(gpu)
    })
    .as_ref()
}

fn scalar() -> Kernels {
    Kernels::by_name(Some("scalar")).unwrap()
}

impl Random {
    /// A tensor of random codes, scales and minima (padding included), or random floats.
    fn tensor(&mut self, encoding: Encoding, rows: usize, cols: usize) -> Vec<u8> {
        let mut bytes = vec![0u8; encoding.tensor_bytes(rows, cols).unwrap()];
        let Some(uniform) = encoding.tiles() else {
            let values = self.values(rows * cols);
            encoding.encode(&values, cols, &mut bytes);
            return bytes;
        };
        for tile in bytes.chunks_exact_mut(uniform.tile_bytes()) {
            for row in 0..ROWS {
                let codes: Vec<u8> =
                    (0..uniform.group()).map(|_| self.next() as u8 & uniform.max_code()).collect();
                // Affine scales and those of tables may have either sign.
                let (scale, minimum) = (self.value(), f32_to_f16(self.value()));
                let positive = encoding == uniform.into() && uniform.zero() == Zero::Symmetric;
                let scale = f32_to_f16(if positive { scale.abs() } else { scale });
                uniform.write_row(tile, row, &codes, scale, minimum);
            }
        }
        bytes
    }
}

fn coded(bits: u8, group: usize, zero: Zero) -> Uniform {
    Uniform::new(bits, group, zero).unwrap()
}

fn upload(gpu: &Gpu, bytes: &[u8]) -> Slice {
    let slice = gpu.buffer("test", bytes.len() as u64).unwrap();
    let mut whole = bytes.to_vec();
    whole.resize(bytes.len().next_multiple_of(4), 0);
    gpu.write(&slice, 0, &whole);
    slice
}

fn plane(gpu: &Gpu, values: &[f32]) -> Slice {
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    upload(gpu, &bytes)
}

fn floats(gpu: &Gpu, slice: &Slice) -> Vec<f32> {
    gpu.download(slice).unwrap().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

fn run(gpu: &Gpu, record: impl FnOnce(&mut Step)) {
    let mut step = gpu.step();
    record(&mut step);
    let submitted = step.submit();
    gpu.wait(&submitted).unwrap();
}

/// An int8 plane of `x` made on the device, checked to be made.
fn quantised(gpu: &Gpu, x: &[f32], tokens: usize, cols: usize, group: usize) -> CodedPlane {
    let out = CodedPlane::new(gpu, tokens, cols, group).unwrap();
    let quantise = Quantise::new(gpu, &plane(gpu, x), &out).unwrap();
    run(gpu, |step| quantise.record(step, tokens));
    out
}

/// Equal bits; any NaN is as good as another.
fn assert_same(found: &[f32], expected: &[f32], what: &dyn std::fmt::Debug) {
    assert_eq!(found.len(), expected.len());
    for (i, (f, e)) in found.iter().zip(expected).enumerate() {
        let same = f.to_bits() == e.to_bits() || f.is_nan() && e.is_nan();
        assert!(same, "{what:?}: {i}: {f} ({:x}), expected {e} ({:x})", f.to_bits(), e.to_bits());
    }
}

fn assert_close(found: &[f32], expected: &[f32], terms: usize, what: &dyn std::fmt::Debug) {
    assert_eq!(found.len(), expected.len());
    // Operands are below 1: so is every term, and a sum's error grows with its length.
    let bound = 2e-7 * terms as f32;
    for (i, (f, e)) in found.iter().zip(expected).enumerate() {
        assert!((f - e).abs() <= bound || f.is_nan() && e.is_nan(), "{what:?}: {i}: {f}, expected {e}");
    }
}

fn assert_quantised(gpu: &Gpu, x: &[f32], tokens: usize, cols: usize, group: usize) {
    let mut expected = Activations::with_capacity(tokens, cols);
    expected.quantise(scalar(), x, tokens, cols, group);
    let found = quantised(gpu, x, tokens, cols, group);
    let codes = gpu.download(&found.codes).unwrap();
    let cells = gpu.download(&found.cells).unwrap();
    for t in 0..tokens {
        for g in 0..found.groups() {
            let (expected, scale, sum) = expected.view().cell(t, g);
            let cell = t * found.groups() + g;
            let codes: Vec<i8> = codes[cell * group..(cell + 1) * group].iter().map(|&c| c as i8).collect();
            let [found_scale, found_sum] =
                [0, 4].map(|at| <[u8; 4]>::try_from(&cells[8 * cell + at..8 * cell + at + 4]).unwrap());
            let (found_scale, found_sum) = (f32::from_le_bytes(found_scale), i32::from_le_bytes(found_sum));
            assert_same(&[found_scale], &[scale], &(t, g));
            assert_eq!((&codes[..], found_sum), (expected, sum), "{t} {g} of {cols} in {group}");
        }
    }
}

#[test]
fn quantising_gives_the_cpus_codes() {
    let Some(gpu) = device() else { return };
    let config = ProptestConfig { cases: 12, failure_persistence: None, ..ProptestConfig::default() };
    let groups = prop::sample::select(vec![16usize, 32, 64, 128]);
    proptest!(config, |(
        tokens in 1usize..9, cols in 1usize..400, group in groups, exponent in -33i32..38, seed in any::<u64>(),
    )| {
        let x: Vec<f32> = Random(seed).values(tokens * cols).iter().map(|v| v * 10f32.powi(exponent)).collect();
        assert_quantised(gpu, &x, tokens, cols, group);
    });
    // Many values on both sides of ties.
    let x: Vec<f32> =
        (0..64 * 256).map(|i| if i % 64 == 0 { 126.4 } else { (i % 251) as f32 * 0.504 - 63.0 }).collect();
    assert_quantised(gpu, &x, 64, 256, 64);
}

#[test]
fn quantising_poisons_a_group_with_what_is_not_finite_and_no_other() {
    let Some(gpu) = device() else { return };
    let mut x = vec![1.0f32; 32 * 12];
    for (g, bad) in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -f32::NAN].into_iter().enumerate() {
        x[64 * g + 7] = bad;
    }
    x[256..288].fill(0.0);
    x[288..290].copy_from_slice(&[f32::MAX, -f32::MAX]);
    for (i, v) in x[320..352].iter_mut().enumerate() {
        *v = i as f32 - 15.5;
    }
    x[320] = 127.0;
    // So small that its inverse overflows.
    x[352..384].fill(1e-38);
    assert_quantised(gpu, &x, 1, 32 * 12, 32);
    assert_quantised(gpu, &x, 12, 32, 128);
}

/// The rows of `bytes` times `x` on the CPU.
fn cpu_coded(encoding: Encoding, bytes: &[u8], shape: (usize, usize), x: &[f32], tokens: usize) -> Vec<f32> {
    let (rows, cols) = shape;
    let matrix = Matrix::new(bytes, rows, cols, encoding);
    let mut a = Activations::with_capacity(tokens, cols);
    a.quantise(scalar(), x, tokens, cols, encoding.tiles().unwrap().group());
    let mut out = vec![0.0; tokens * rows];
    scalar().coded_matmul(&matrix, 0..rows, a.view(), &mut Shard::new(&mut out, tokens, rows));
    out
}

/// Checks products of all `counts` of tokens, into a poisoned plane that is wider than the matrix.
fn assert_coded(
    gpu: &Gpu,
    encoding: impl Into<Encoding>,
    shape: (usize, usize),
    counts: &[usize],
    tuning: Option<Tuning>,
    random: &mut Random,
    spoil: impl Fn(&mut Vec<f32>),
) {
    let make = |weights: &Weights, x: &CodedPlane, out: &Columns| {
        CodedMatmul::tuned(gpu, weights, x, out, tuning).unwrap()
    };
    assert_products(gpu, encoding.into(), shape, counts, &make, random, spoil);
}

/// The same, tiles being shared from the first token on.
fn assert_tiled(
    gpu: &Gpu,
    encoding: impl Into<Encoding>,
    shape: (usize, usize),
    counts: &[usize],
    tiling: Tiling,
    random: &mut Random,
    spoil: impl Fn(&mut Vec<f32>),
) {
    let encoding = encoding.into();
    let make = |weights: &Weights, x: &CodedPlane, out: &Columns| {
        let product = CodedMatmul::tiled(gpu, weights, x, out, 1, tiling).unwrap();
        assert!(product.shares_tiles(), "{encoding} in {tiling:?}");
        product
    };
    assert_products(gpu, encoding, shape, counts, &make, random, spoil);
}

fn assert_products(
    gpu: &Gpu,
    encoding: Encoding,
    (rows, cols): (usize, usize),
    counts: &[usize],
    make: &dyn Fn(&Weights, &CodedPlane, &Columns) -> CodedMatmul,
    random: &mut Random,
    spoil: impl Fn(&mut Vec<f32>),
) {
    let tokens = *counts.iter().max().unwrap();
    let bytes = random.tensor(encoding, rows, cols);
    let mut x = random.values(tokens * cols);
    spoil(&mut x);
    let expected = cpu_coded(encoding, &bytes, (rows, cols), &x, tokens);
    let weights = Weights::new(upload(gpu, &bytes), rows, cols, encoding);
    let coded = quantised(gpu, &x, tokens, cols, encoding.tiles().unwrap().group());
    let (stride, offset) = (rows + 5, 3);
    let poison = f32::from_bits(0x7fc0_1234);
    let out = Columns { plane: plane(gpu, &vec![poison; tokens * stride]), stride, offset };
    let product = make(&weights, &coded, &out);
    for &count in counts {
        gpu.write(&out.plane, 0, &0x7fc0_1234u32.to_le_bytes().repeat(tokens * stride));
        run(gpu, |step| product.record(step, count));
        let found = floats(gpu, &out.plane);
        for t in 0..tokens {
            let row = &found[t * stride..(t + 1) * stride];
            let untouched = |v: &f32| v.to_bits() == poison.to_bits();
            if t < count {
                let what = (encoding, rows, cols, count, t);
                assert_same(&row[offset..offset + rows], &expected[t * rows..(t + 1) * rows], &what);
                assert!(row[..offset].iter().chain(&row[offset + rows..]).all(untouched), "{what:?}");
            } else {
                assert!(row.iter().all(untouched), "{encoding}: token {t} of {count}");
            }
        }
    }
}

#[test]
fn every_encoding_has_the_cpus_bits() {
    let Some(gpu) = device() else { return };
    let mut random = Random(2);
    for (i, bits) in [2, 3, 4, 5, 6, 8].into_iter().enumerate() {
        for (j, group) in [16, 32, 64, 128].into_iter().enumerate() {
            let zero = if (i + j) % 2 == 0 { Zero::Symmetric } else { Zero::Affine };
            assert_coded(gpu, coded(bits, group, zero), (37, 150), &[1], None, &mut random, |_| {});
        }
        let zero = if i % 2 == 0 { Zero::Affine } else { Zero::Symmetric };
        assert_coded(gpu, coded(bits, 64, zero), (70, 200), &[1], None, &mut random, |_| {});
    }
}

/// Levels of either sign, in no order, of every width.
fn tables() -> [Table; 4] {
    let made = |bits: u8, group: usize| {
        let levels: Vec<i8> = (0..1 << bits).map(|code| (code * 89 + 40) as u8 as i8).collect();
        Table::new(bits, group, &levels).unwrap()
    };
    [Table::MXFP4, Table::IQ4_NL.with_group(128).unwrap(), made(3, 64), made(2, 16)]
}

#[test]
fn level_tables_have_the_cpus_bits() {
    let Some(gpu) = device() else { return };
    let mut random = Random(8);
    for table in tables() {
        assert_coded(gpu, table, (37, 150), &[1, 3], None, &mut random, |_| {});
    }
}

#[test]
fn any_number_of_tokens_has_the_same_bits() {
    let Some(gpu) = device() else { return };
    let mut random = Random(3);
    let counts = [1, 2, 3, 4, 5, 8, 11];
    assert_coded(gpu, coded(4, 64, Zero::Symmetric), (100, 1100), &counts, None, &mut random, |_| {});
    assert_coded(gpu, coded(8, 32, Zero::Affine), (33, 64), &[2, 7], None, &mut random, |_| {});
    assert_coded(gpu, coded(3, 16, Zero::Symmetric), (64, 1), &[4], None, &mut random, |_| {});
}

#[test]
fn long_rows_go_round_by_round_and_short_ones_share_a_workgroup() {
    let Some(gpu) = device() else { return };
    let mut random = Random(4);
    let q4 = coded(4, 64, Zero::Symmetric);
    // 70 and 129 tiles: more than a round of any workgroup; then several blocks a workgroup.
    assert_coded(gpu, q4, (32, 64 * 70), &[1], None, &mut random, |_| {});
    assert_coded(gpu, q4, (40, 64 * 129 - 3), &[1], None, &mut random, |_| {});
    assert_coded(gpu, q4, (32 * 600, 64), &[1], None, &mut random, |_| {});
    for threads in [64, 128, 256] {
        let tuning = Some(Tuning { threads, lanes: Lanes::Four });
        assert_coded(gpu, q4, (65, 64 * 37), &[1, 4], tuning, &mut random, |_| {});
        // Levels of a table are made for both halves of a tile at once.
        assert_coded(gpu, Table::MXFP4, (65, 32 * 41 - 5), &[1, 4], tuning, &mut random, |_| {});
        let nl = Table::IQ4_NL.with_group(64).unwrap();
        assert_coded(gpu, nl, (40, 64 * 9), &[1, 2], tuning, &mut random, |_| {});
    }
}

#[test]
fn tiles_that_32_lanes_share_have_the_cpus_bits() {
    let Some(gpu) = device() else { return };
    let mut random = Random(14);
    let [q4, q8] = [4, 8].map(|bits| coded(bits, 64, Zero::Symmetric));
    // One round that all subgroups fill, one that they do not, several; rows and columns past the last whole tile.
    for (threads, ahead, shape) in
        [(128, 4, (32, 64 * 16)), (256, 4, (70, 64 * 13 - 5)), (64, 2, (33, 64 * 37)), (128, 1, (64, 200))]
    {
        let tuning = Some(Tuning { threads, lanes: Lanes::Wide(ahead) });
        for codes in [q4, q8] {
            assert_coded(gpu, codes, shape, &[1, 2], tuning, &mut random, |_| {});
            assert_coded(gpu, codes, shape, &[1], tuning, &mut random, |x| x[130] = f32::NAN);
        }
    }
    let taken = |(_, source): &(String, String)| source.contains("fn take_tiles(");
    assert!(gpu.sources().iter().any(taken), "no tile was shared");
    // What they cannot share is cut as ever.
    let tuning = Some(Tuning { threads: 128, lanes: Lanes::Wide(4) });
    assert_coded(gpu, coded(4, 64, Zero::Affine), (40, 300), &[1], tuning, &mut random, |_| {});
    assert_coded(gpu, Table::IQ4_NL.with_group(64).unwrap(), (40, 300), &[1], tuning, &mut random, |_| {});
    assert_coded(gpu, q4, (32, 64 * 130), &[1], tuning, &mut random, |_| {});
}

/// The cuts that are timed, and such as no card would like.
const TILINGS: [Tiling; 6] = [
    Tiling { rows: 64, tokens: 64, lane_rows: 4, lane_tokens: 8, columns: 64, run: 2 },
    Tiling { rows: 128, tokens: 64, lane_rows: 8, lane_tokens: 8, columns: 64, run: 8 },
    Tiling { rows: 32, tokens: 32, lane_rows: 4, lane_tokens: 4, columns: 128, run: 1 },
    Tiling { rows: 64, tokens: 32, lane_rows: 4, lane_tokens: 4, columns: 32, run: 4 },
    Tiling { rows: 96, tokens: 16, lane_rows: 8, lane_tokens: 2, columns: 64, run: 1 },
    Tiling { rows: 128, tokens: 48, lane_rows: 4, lane_tokens: 6, columns: 64, run: 3 },
];

#[test]
fn tiles_that_many_tokens_share_have_the_cpus_bits() {
    let Some(gpu) = device() else { return };
    let mut random = Random(15);
    for (i, bits) in [2, 3, 4, 5, 6, 8].into_iter().enumerate() {
        for (j, group) in [16, 32, 64, 128].into_iter().enumerate() {
            let zero = if (i + j) % 2 == 0 { Zero::Symmetric } else { Zero::Affine };
            let tiling = TILINGS[(i + j) % 2 * 3];
            assert_tiled(gpu, coded(bits, group, zero), (37, 150), &[9], tiling, &mut random, |_| {});
        }
        let zero = if i % 2 == 0 { Zero::Affine } else { Zero::Symmetric };
        assert_tiled(gpu, coded(bits, 64, zero), (70, 200), &[1, 33], TILINGS[0], &mut random, |_| {});
    }
    for (i, table) in tables().into_iter().enumerate() {
        assert_tiled(gpu, table, (37, 150), &[3, 40], TILINGS[i], &mut random, |_| {});
    }
}

#[test]
fn many_tokens_of_any_number_have_the_same_bits() {
    let Some(gpu) = device() else { return };
    let mut random = Random(16);
    let q4 = coded(4, 64, Zero::Symmetric);
    // From few to many and back, by a product as models have them.
    let counts = [9, 31, 8, 32, 33, 64, 65, 1, 100];
    assert_coded(gpu, q4, (100, 700), &counts, None, &mut random, |_| {});
    for tiling in TILINGS {
        assert_tiled(gpu, q4, (161, 64 * 3 - 5), &[1, 17, 63, 70], tiling, &mut random, |_| {});
        assert_tiled(gpu, coded(8, 32, Zero::Affine), (33, 130), &[7, 49], tiling, &mut random, |_| {});
    }
    for bad in [f32::NAN, f32::INFINITY] {
        assert_tiled(gpu, q4, (40, 200), &[66], TILINGS[0], &mut random, |x| x[200 * 65 + 30] = bad);
    }
}

/// Activations and codes of the largest magnitudes: integers are exact as floats up to the last.
#[test]
fn the_largest_sums_of_many_tokens_are_exact() {
    let Some(gpu) = device() else { return };
    for zero in [Zero::Symmetric, Zero::Affine] {
        let (rows, cols, tokens, uniform) = (32, 128, 9, coded(8, 128, zero));
        let mut bytes = vec![0u8; Encoding::from(uniform).tensor_bytes(rows, cols).unwrap()];
        for row in 0..ROWS {
            let codes: Vec<u8> =
                (0..128).map(|col| if row % 2 == 0 || col % 2 == 0 { 255 } else { 0 }).collect();
            uniform.write_row(&mut bytes, row, &codes, f32_to_f16(1.0), f32_to_f16(0.5));
        }
        let sign = |t: usize, col: usize| if t == 0 || t == 1 && col.is_multiple_of(2) { 1.0 } else { -1.0 };
        let x: Vec<f32> = (0..tokens * cols).map(|i| sign(i / cols, i % cols)).collect();
        let expected = cpu_coded(uniform.into(), &bytes, (rows, cols), &x, tokens);
        let weights = Weights::new(upload(gpu, &bytes), rows, cols, uniform.into());
        let out = Columns::whole(plane(gpu, &vec![0.0; tokens * rows]), rows);
        let x = quantised(gpu, &x, tokens, cols, 128);
        let product = CodedMatmul::tiled(gpu, &weights, &x, &out, 1, TILINGS[3]).unwrap();
        run(gpu, |step| product.record(step, tokens));
        assert_same(&floats(gpu, &out.plane), &expected, &zero);
    }
}

#[test]
fn what_is_not_finite_reaches_every_sum_of_its_token_and_no_other() {
    let Some(gpu) = device() else { return };
    let mut random = Random(5);
    for zero in [Zero::Symmetric, Zero::Affine] {
        for bad in [f32::NAN, f32::INFINITY] {
            assert_coded(gpu, coded(4, 64, zero), (40, 200), &[2], None, &mut random, |x| x[230] = bad);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 8, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn any_shape_has_the_cpus_bits(
        rows in 1usize..200,
        cols in 1usize..900,
        tokens in 1usize..4,
        seed in any::<u64>(),
    ) {
        let Some(gpu) = device() else { return Ok(()) };
        let mut random = Random(seed);
        assert_coded(gpu, coded(4, 32, Zero::Symmetric), (rows, cols), &[tokens], None, &mut random, |_| {});
    }
}

#[test]
fn exact_products_are_close_to_the_cpus() {
    let Some(gpu) = device() else { return };
    let mut random = Random(6);
    let cases = [(2, 16), (3, 32), (4, 64), (5, 128), (6, 64), (8, 32)];
    for (i, (bits, group)) in cases.into_iter().enumerate() {
        let zero = if i % 2 == 0 { Zero::Symmetric } else { Zero::Affine };
        let (uniform, rows, cols, tokens) = (coded(bits, group, zero), 45, 331, 3);
        let bytes = random.tensor(Encoding::Uniform(uniform), rows, cols);
        let x = random.values(tokens * cols);
        let matrix = Matrix::new(&bytes, rows, cols, Encoding::Uniform(uniform));
        let mut decoded = vec![0.0; rows * cols];
        scalar().decode_rows(&matrix, 0..rows, &mut decoded);
        let out = Columns::whole(plane(gpu, &vec![f32::NAN; tokens * rows]), rows);
        let weights = Weights::new(upload(gpu, &bytes), rows, cols, Encoding::Uniform(uniform));
        let product = ExactMatmul::new(gpu, &weights, &plane(gpu, &x), tokens, &out).unwrap();
        run(gpu, |step| product.record(step, tokens));
        // Affine weights reach `max code * scale + minimum`.
        let largest = decoded.iter().fold(1.0f32, |m, v| m.max(v.abs()));
        let terms = cols * largest.ceil() as usize;
        assert_close(&floats(gpu, &out.plane), &products(&decoded, rows, cols, &x, tokens), terms, &uniform);
    }
}

/// Products in f64.
fn products(weights: &[f32], rows: usize, cols: usize, x: &[f32], tokens: usize) -> Vec<f32> {
    let mut out = Vec::new();
    for t in 0..tokens {
        for row in weights.chunks(cols).take(rows) {
            let terms = row.iter().zip(&x[t * cols..(t + 1) * cols]);
            out.push(terms.map(|(w, x)| f64::from(*w) * f64::from(*x)).sum::<f64>() as f32);
        }
    }
    out
}

#[test]
fn float_products_are_close_to_the_cpus_and_the_same_for_any_number_of_tokens() {
    let Some(gpu) = device() else { return };
    let mut random = Random(7);
    let shapes = [(37, 264), (1100, 72), (5, 2048), (19, 123), (1030, 9)];
    for (i, (rows, cols)) in shapes.into_iter().enumerate() {
        let encodings = [Encoding::Bf16, Encoding::F16, Encoding::F32];
        for encoding in [encodings[i % 3], encodings[(i + 1) % 3]] {
            let tokens = 9;
            let bytes = random.tensor(encoding, rows, cols);
            let x = random.values(tokens * cols);
            let mut expected = vec![0.0; tokens * rows];
            let mut shard = Shard::new(&mut expected, tokens, rows);
            scalar().float_matmul(&bytes, encoding, cols, 0..rows, &x, &mut shard);
            let weights = Weights::new(upload(gpu, &bytes), rows, cols, encoding);
            let (stride, offset) = (rows + 3, 2);
            let out = Columns { plane: plane(gpu, &vec![0.0; tokens * stride]), stride, offset };
            let product = FloatMatmul::new(gpu, &weights, &plane(gpu, &x), tokens, &out).unwrap();
            let mut first: Option<Vec<f32>> = None;
            for count in [1, 9, 2, 3] {
                let poison = 0x7fc0_1234u32;
                gpu.write(&out.plane, 0, &poison.to_le_bytes().repeat(tokens * stride));
                run(gpu, |step| product.record(step, count));
                let found = floats(gpu, &out.plane);
                for (t, row) in found.chunks(stride).enumerate() {
                    let what = (encoding, rows, cols, count, t);
                    let used = if t < count { offset..offset + rows } else { 0..0 };
                    if t < count {
                        assert_close(&row[used.clone()], &expected[t * rows..(t + 1) * rows], cols, &what);
                    }
                    let rest = row.iter().enumerate().filter(|(i, _)| !used.contains(i));
                    assert!(rest.map(|(_, v)| v.to_bits()).all(|bits| bits == poison), "{what:?}");
                }
                let token: Vec<f32> = found[offset..offset + rows].to_vec();
                let same = first.get_or_insert_with(|| token.clone()) == &token;
                assert!(same, "{encoding} {rows} {cols} {count}");
            }
        }
    }
}

#[test]
fn float_products_let_what_is_not_finite_through() {
    let Some(gpu) = device() else { return };
    for cols in [64, 61] {
        let weights = vec![1.0f32; 3 * cols];
        let bytes: Vec<u8> = weights.iter().flat_map(|v| v.to_le_bytes()).collect();
        let mut x = vec![1.0f32; 2 * cols];
        x[cols + 5] = f32::NAN;
        let out = Columns::whole(plane(gpu, &[0.0; 6]), 3);
        let weights = Weights::new(upload(gpu, &bytes), 3, cols, Encoding::F32);
        let product = FloatMatmul::new(gpu, &weights, &plane(gpu, &x), 2, &out).unwrap();
        run(gpu, |step| product.record(step, 2));
        let found = floats(gpu, &out.plane);
        assert_eq!(found[..3], [cols as f32; 3]);
        assert!(found[3..].iter().all(|v| v.is_nan()));
    }
}
