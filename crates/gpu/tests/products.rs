//! The products on a device against the CPU's kernels: the bits of coded ones, the values of float ones.
#![allow(clippy::unwrap_used, reason = "tests fail loudly")]

mod common;

use std::io::Write;
use std::sync::OnceLock;

use common::{Random, gpu};
use proptest::prelude::*;
use smoe_format::half::f32_to_f16;
use smoe_format::tile::ROWS;
use smoe_format::{Encoding, LayerTable, Table, TensorEntry, Uniform, Zero};
use smoe_gpu::{
    CodedMatmul, CodedPlane, Columns, Down, ExactMatmul, ExpertInput, ExpertLayout, FloatMatmul, GateUp, Gpu,
    Hidden, Lanes, Quantise, Slice, Step, Tuning, Weights, WorkList,
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
    (rows, cols): (usize, usize),
    counts: &[usize],
    tuning: Option<Tuning>,
    random: &mut Random,
    spoil: impl Fn(&mut Vec<f32>),
) {
    let encoding = encoding.into();
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
    let product = CodedMatmul::tuned(gpu, &weights, &coded, &out, tuning).unwrap();
    for &count in counts {
        gpu.write(&out.plane, 0, &0x7fc0_1234u32.to_le_bytes().repeat(tokens * stride));
        run(gpu, |step| product.record(step, count));
        let found = floats(gpu, &out.plane);
        for t in 0..tokens {
            let row = &found[t * stride..(t + 1) * stride];
            let untouched = |v: &f32| v.to_bits() == poison.to_bits();
            if t < count {
                let what = (encoding, rows, cols, count, t, tuning);
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

/// The records of a layer in slots, some of their bytes never used.
struct Layer {
    layout: ExpertLayout,
    table: LayerTable,
    slots: Vec<u8>,
    slot_bytes: usize,
}

impl Layer {
    fn new(
        encodings: [Encoding; 3],
        (d_model, d_ff): (usize, usize),
        slots: usize,
        random: &mut Random,
    ) -> Self {
        let shapes = [(d_ff, d_model), (d_ff, d_model), (d_model, d_ff)];
        let mut offset = 0;
        let tensors = std::array::from_fn(|i| {
            let (encoding, (rows, cols)) = (encodings[i], shapes[i]);
            let len = encoding.tensor_bytes(rows, cols).unwrap();
            let entry = TensorEntry { encoding, rows, cols, offset, len };
            offset = (offset + len).next_multiple_of(64);
            entry
        });
        let slot_bytes = offset + 128;
        let table = LayerTable { layer: 0, n_experts: 16, record_len: offset, tensors };
        let mut bytes = vec![0xff; slots * slot_bytes];
        for slot in bytes.chunks_exact_mut(slot_bytes) {
            for tensor in &tensors {
                let values = random.tensor(tensor.encoding, tensor.rows, tensor.cols);
                slot[tensor.offset..tensor.offset + tensor.len].copy_from_slice(&values);
            }
        }
        Self { layout: ExpertLayout::new(&table, slot_bytes as u64), table, slots: bytes, slot_bytes }
    }

    fn product(&self, slot: u32, projection: usize, x: &[f32]) -> Vec<f32> {
        let tensor = &self.table.tensors[projection];
        let bytes = &self.slots[slot as usize * self.slot_bytes + tensor.offset..][..tensor.len];
        let (rows, cols) = (tensor.rows, tensor.cols);
        if is_coded(tensor.encoding) {
            return cpu_coded(tensor.encoding, bytes, (rows, cols), x, 1);
        }
        let mut out = vec![0.0; rows];
        scalar().float_matmul(bytes, tensor.encoding, cols, 0..rows, x, &mut Shard::new(&mut out, 1, rows));
        out
    }

    fn expected(&self, slot: u32, x: &[f32]) -> Vec<f32> {
        let (gate, up) = (self.product(slot, 0, x), self.product(slot, 1, x));
        let mut hidden = vec![0.0; gate.len()];
        scalar().swiglu(&gate, &up, &mut hidden);
        self.product(slot, 2, &hidden)
    }

    /// Runs `experts` (slot, pairs) of `tokens` tokens, and checks every row.
    fn check(
        &self,
        gpu: &Gpu,
        tokens: usize,
        top_k: usize,
        experts: &[(u32, Vec<u32>)],
        random: &mut Random,
        spoil: impl Fn(&mut Vec<f32>),
    ) {
        self.check_tuned(gpu, tokens, top_k, experts, random, spoil, None);
    }

    /// The same, a lone token's products cut as said.
    fn check_tuned(
        &self,
        gpu: &Gpu,
        tokens: usize,
        top_k: usize,
        experts: &[(u32, Vec<u32>)],
        random: &mut Random,
        spoil: impl Fn(&mut Vec<f32>),
        tuning: Option<Tuning>,
    ) {
        let (d_model, all_coded) =
            (self.layout.d_model(), self.table.tensors.iter().all(|t| is_coded(t.encoding)));
        let mut x = random.values(tokens * d_model);
        spoil(&mut x);
        let planes: Vec<CodedPlane> =
            [16, 32, 64, 128].map(|group| quantised(gpu, &x, tokens, d_model, group)).into();
        let planes: Vec<&CodedPlane> = planes.iter().collect();
        let x_float = plane(gpu, &x);
        let input = ExpertInput { coded: &planes, float: Some(&x_float) };
        let slots = upload(gpu, &self.slots);
        let list = WorkList::new(gpu, &self.layout, tokens, top_k).unwrap();
        let entries: Vec<(u32, u32, &[u32])> =
            experts.iter().enumerate().map(|(i, (slot, pairs))| (*slot, i as u32, &pairs[..])).collect();
        list.write(gpu, &entries);
        let hidden = Hidden::new(gpu, &self.layout, list.most_pairs()).unwrap();
        let poison = 0x7fc0_1234u32;
        let y = upload(gpu, &poison.to_le_bytes().repeat(list.most_pairs() * d_model));
        let gate_up = GateUp::tuned(gpu, &self.layout, &slots, &list, &input, &hidden, tuning).unwrap();
        let down = Down::tuned(gpu, &self.layout, &slots, &list, &hidden, &y, tuning).unwrap();
        // Again, as each must leave everything ready for the next time.
        for _ in 0..2 {
            run(gpu, |step| {
                gate_up.record(step, tokens);
                down.record(step, tokens);
            });
        }
        let found = floats(gpu, &y);
        let mut seen = vec![false; list.most_pairs()];
        for (slot, pairs) in experts.iter().filter(|(slot, _)| *slot != WorkList::ABSENT) {
            for &pair in pairs {
                seen[pair as usize] = true;
                let token = pair as usize / top_k;
                let expected = self.expected(*slot, &x[token * d_model..(token + 1) * d_model]);
                let found = &found[pair as usize * d_model..(pair as usize + 1) * d_model];
                let what = (self.table.tensors.map(|t| t.encoding), tokens, *slot, pair);
                if all_coded {
                    assert_same(found, &expected, &what);
                } else {
                    let scale = expected.iter().fold(1.0f32, |m, v| m.max(v.abs()));
                    // A hidden value that rounds to the next code moves a sum by a code's worth.
                    let close =
                        |(f, e): (&f32, &f32)| (f - e).abs() <= 2e-2 * scale || f.is_nan() && e.is_nan();
                    assert!(found.iter().zip(&expected).all(close), "{what:?}\n{found:?}\n{expected:?}");
                }
            }
        }
        for (pair, row) in found.chunks(d_model).enumerate().filter(|(pair, _)| !seen[*pair]) {
            assert!(row.iter().all(|v| v.to_bits() == poison), "pair {pair}");
        }
    }
}

fn is_coded(encoding: Encoding) -> bool {
    !encoding.is_float()
}

fn q(bits: u8, group: usize, zero: Zero) -> Encoding {
    Encoding::Uniform(coded(bits, group, zero))
}

/// Every token's `top_k` experts among `slots`, by expert; some of them absent.
fn assignment(tokens: usize, top_k: usize, slots: u32, random: &mut Random) -> Vec<(u32, Vec<u32>)> {
    let mut experts = vec![Vec::new(); slots as usize + 2];
    for token in 0..tokens {
        let start = random.next() as usize;
        for j in 0..top_k {
            let expert = (start + j) % experts.len();
            experts[expert].push((token * top_k + j) as u32);
        }
    }
    let slot = |i: usize| if i < slots as usize { slots - 1 - i as u32 } else { WorkList::ABSENT };
    let all = experts.into_iter().enumerate().map(|(i, pairs)| (slot(i), pairs));
    all.filter(|(_, pairs)| !pairs.is_empty()).collect()
}

#[test]
fn coded_experts_have_the_cpus_bits() {
    let Some(gpu) = device() else { return };
    let mut random = Random(8);
    let q4 = q(4, 64, Zero::Symmetric);
    let layer = Layer::new([q4; 3], (200, 150), 4, &mut random);
    for tokens in [1, 2, 3, 21] {
        let experts = assignment(tokens, 3, 4, &mut random);
        layer.check(gpu, tokens, 3, &experts, &mut random, |_| {});
    }
}

#[test]
fn a_lone_tokens_hidden_values_are_quantised_by_down() {
    let Some(gpu) = device() else { return };
    let mut random = Random(28);
    let [q4, q8, q3] = [q(4, 64, Zero::Symmetric), q(8, 32, Zero::Symmetric), q(3, 128, Zero::Affine)];
    let table = Encoding::Table(tables()[0]);
    for (encodings, shape) in [
        ([q4; 3], (200, 152)),
        ([q4, q4, q8], (72, 96)),
        ([q8, q8, q3], (96, 260)),
        ([table, table, q4], (64, 700)),
    ] {
        let layer = Layer::new(encodings, shape, 4, &mut random);
        let experts = assignment(1, 5, 4, &mut random);
        layer.check(gpu, 1, 5, &experts, &mut random, |_| {});
        layer.check(gpu, 1, 5, &experts, &mut random, |x| x[shape.0 / 2] = f32::NAN);
    }
}

#[test]
fn a_lone_tokens_experts_have_the_cpus_bits_where_32_lanes_share_a_tile() {
    let Some(gpu) = device() else { return };
    let mut random = Random(29);
    let [q4, q8] = [q(4, 64, Zero::Symmetric), q(8, 64, Zero::Symmetric)];
    for (encodings, shape, threads, ahead) in [
        ([q4; 3], (200, 152), 128, 2),
        ([q4, q4, q8], (64 * 9, 96), 64, 2),
        ([q8, q8, q4], (96, 64 * 5), 256, 4),
    ] {
        let layer = Layer::new(encodings, shape, 4, &mut random);
        let experts = assignment(1, 5, 4, &mut random);
        let tuning = Some(Tuning { threads, lanes: Lanes::Wide(ahead) });
        layer.check_tuned(gpu, 1, 5, &experts, &mut random, |_| {}, tuning);
        layer.check_tuned(gpu, 1, 5, &experts, &mut random, |x| x[shape.0 / 2] = f32::NAN, tuning);
    }
}

#[test]
fn other_groups_of_down_are_whole_in_a_workgroup() {
    let Some(gpu) = device() else { return };
    let mut random = Random(9);
    let [mxfp4, nl, three, _] = tables().map(Encoding::from);
    let mixes = [
        ([mxfp4, mxfp4, nl], 3),
        // Other levels are another kernel.
        ([mxfp4, Encoding::from(Table::IQ4_NL), three], 2),
        ([q(4, 32, Zero::Affine), q(4, 32, Zero::Affine), q(6, 128, Zero::Symmetric)], 5),
        ([q(2, 64, Zero::Symmetric), q(2, 64, Zero::Symmetric), q(8, 16, Zero::Affine)], 1),
        ([q(3, 128, Zero::Symmetric), q(3, 128, Zero::Symmetric), q(4, 32, Zero::Symmetric)], 1),
    ];
    for (encodings, tokens) in mixes {
        let layer = Layer::new(encodings, (130, 330), 2, &mut random);
        let experts = assignment(tokens, 2, 2, &mut random);
        layer.check(gpu, tokens, 2, &experts, &mut random, |_| {});
    }
}

#[test]
fn experts_of_unlike_encodings_go_apart() {
    let Some(gpu) = device() else { return };
    let mut random = Random(10);
    let q4 = q(4, 64, Zero::Symmetric);
    let mixes = [
        [q(4, 32, Zero::Symmetric), q4, q4],
        [Encoding::Bf16; 3],
        [Encoding::F16, Encoding::F32, q4],
        [q4, q4, Encoding::Bf16],
    ];
    for (i, encodings) in mixes.into_iter().enumerate() {
        let layer = Layer::new(encodings, (72 + i, 96), 3, &mut random);
        let tokens = 1 + 2 * (i % 2);
        let experts = assignment(tokens, 2, 3, &mut random);
        layer.check(gpu, tokens, 2, &experts, &mut random, |_| {});
    }
}

#[test]
fn what_is_not_finite_reaches_all_of_its_tokens_experts() {
    let Some(gpu) = device() else { return };
    let mut random = Random(11);
    let q4 = q(4, 64, Zero::Symmetric);
    let layer = Layer::new([q4; 3], (128, 100), 3, &mut random);
    let experts = assignment(2, 2, 3, &mut random);
    layer.check(gpu, 2, 2, &experts, &mut random, |x| x[130] = f32::NAN);
}

/// Gates from far below to far above what `exp` can do, through weights of the identity.
#[test]
fn swiglu_has_the_cpus_bits_over_its_whole_range() {
    let Some(gpu) = device() else { return };
    let d = 64;
    let one = Encoding::F32;
    let entry = |i: usize| {
        let encoding = if i < 2 { one } else { q(8, 16, Zero::Symmetric) };
        let len = encoding.tensor_bytes(d, d).unwrap();
        TensorEntry { encoding, rows: d, cols: d, offset: i * d * d * 4, len }
    };
    let table =
        LayerTable { layer: 0, n_experts: 1, record_len: 3 * d * d * 4, tensors: [0, 1, 2].map(entry) };
    let mut slot = vec![0u8; 3 * d * d * 4];
    for i in 0..d {
        for (matrix, value) in [(0, 1.0f32), (1, 0.75)] {
            let at = matrix * d * d * 4 + 4 * (i * d + i);
            slot[at..at + 4].copy_from_slice(&value.to_le_bytes());
        }
    }
    let layout = ExpertLayout::new(&table, slot.len() as u64);
    let tokens = 24;
    let x: Vec<f32> = (0..tokens * d)
        .map(|i| match i {
            0..1024 => i as f32 * 0.0927 - 47.3,
            1024..1280 => (i as f32 - 1024.0) * 0.35,
            _ => (i as f32 - 1408.0) * 1e-5,
        })
        .collect();
    let list = WorkList::new(gpu, &layout, tokens, 1).unwrap();
    let pairs: Vec<u32> = (0..tokens as u32).collect();
    list.write(gpu, &[(0, 0, &pairs)]);
    let hidden = Hidden::new(gpu, &layout, tokens).unwrap();
    let x_float = plane(gpu, &x);
    let input = ExpertInput { coded: &[], float: Some(&x_float) };
    let gate_up = GateUp::new(gpu, &layout, &upload(gpu, &slot), &list, &input, &hidden).unwrap();
    run(gpu, |step| gate_up.record(step, tokens));
    let ups: Vec<f32> = x.iter().map(|v| v * 0.75).collect();
    let mut values = vec![0.0; x.len()];
    scalar().swiglu(&x, &ups, &mut values);
    let mut expected = Activations::with_capacity(tokens, d);
    expected.quantise(scalar(), &values, tokens, d, 16);
    let Hidden::Coded(found, _) = &hidden else { panic!("down is coded") };
    let cells = floats(gpu, &found.cells);
    let codes = gpu.download(&found.codes).unwrap();
    for cell in 0..tokens * 4 {
        let (expected, scale, _) = expected.view().cell(cell / 4, cell % 4);
        assert_same(&[cells[2 * cell]], &[scale], &cell);
        let codes: Vec<i8> = codes[16 * cell..16 * (cell + 1)].iter().map(|&c| c as i8).collect();
        assert_eq!(codes, expected, "{cell}");
    }
}
