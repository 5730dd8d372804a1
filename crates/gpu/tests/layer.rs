//! Everything of a layer that is no matrix product, against the CPU's kernels.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod common;

use std::sync::OnceLock;

use common::Random;
use proptest::prelude::*;
use smoe_format::half::f16_to_f32;
use smoe_format::spec::{GroupScore, GroupSpec, MoeSpec, RouterKind};
use smoe_format::{Encoding, Uniform, Zero};
use smoe_gpu::{
    Angles, Argmax, Attention, AttentionHeads, AttentionOutputs, AttentionScratch, CodedPlane, Columns,
    Delta, Embed, FloatMatmul, Gpu, Halt, KV_BLOCK, KvFormat, KvLayout, MixNorm, NormOutputs, Projections,
    QkNorm, RopeAppend, RopePairs, Route, RouteInputs, RouteOutputs, RouterNorm, Rows, Shared, Slice, Step,
    Weights, WorkList,
};
use smoe_kernels::{Kernels, KvBlocks, KvPlane, KvType, RopeStyle, sigmoid, top_k};

/// What outputs hold before a kernel runs; a NaN that no arithmetic makes.
const STALE: u32 = 0x7fc0_dead;

/// One device for all tests: its kernels are compiled once.
fn gpu() -> Option<&'static Gpu> {
    static GPU: OnceLock<Option<Gpu>> = OnceLock::new();
    GPU.get_or_init(common::gpu).as_ref()
}

fn cpu() -> Kernels {
    Kernels::by_name(Some("scalar")).unwrap()
}

fn upload(gpu: &Gpu, bytes: &[u8]) -> Slice {
    let slice = gpu.buffer("test", bytes.len() as u64).unwrap();
    let mut whole = bytes.to_vec();
    whole.resize(bytes.len().next_multiple_of(4), 0);
    gpu.write(&slice, 0, &whole);
    slice
}

fn floats(gpu: &Gpu, values: &[f32]) -> Slice {
    upload(gpu, &values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>())
}

fn words(gpu: &Gpu, values: &[u32]) -> Slice {
    upload(gpu, &values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>())
}

fn stale(gpu: &Gpu, n: usize) -> Slice {
    words(gpu, &vec![STALE; n])
}

fn read_words(gpu: &Gpu, slice: &Slice) -> Vec<u32> {
    let bytes = gpu.download(slice).unwrap();
    bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect()
}

fn read(gpu: &Gpu, slice: &Slice) -> Vec<f32> {
    read_words(gpu, slice).into_iter().map(f32::from_bits).collect()
}

fn run(gpu: &Gpu, record: impl FnOnce(&mut Step)) {
    let mut step = gpu.step();
    record(&mut step);
    gpu.wait(&step.submit()).unwrap();
}

/// Equal numbers, or both NaN; equal bits if `bits`.
#[track_caller]
fn assert_close(got: &[f32], expected: &[f32], tolerance: f32, bits: bool, what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        let same = if expected.is_nan() {
            got.is_nan() && got.to_bits() != STALE
        } else if bits {
            got == expected
        } else {
            (got - expected).abs() <= tolerance * expected.abs().max(1.0)
        };
        assert!(same, "{what}: number {i} is {got}, not {expected}");
    }
}

#[track_caller]
fn assert_stale(rest: &[f32]) {
    assert!(rest.iter().all(|v| v.to_bits() == STALE), "something was written past the end");
}

/// An int8 plane that is stale all over.
fn stale_coded(gpu: &Gpu, tokens: usize, cols: usize, group: usize) -> CodedPlane {
    let plane = CodedPlane::new(gpu, tokens, cols, group).unwrap();
    for slice in [&plane.codes, &plane.cells] {
        gpu.write(slice, 0, &vec![0x5a; slice.len() as usize]);
    }
    plane
}

/// The first tokens of an int8 plane are those of `x`, and nothing was written behind them.
#[track_caller]
fn assert_coded(gpu: &Gpu, plane: &CodedPlane, x: &[f32], tokens: usize) {
    let (cols, group, groups) = (plane.cols, plane.group, plane.groups());
    let codes = gpu.download(&plane.codes).unwrap();
    let cells = read_words(gpu, &plane.cells);
    for cell in 0..tokens * groups {
        let (t, g) = (cell / groups, cell % groups);
        let part = &x[t * cols + g * group..t * cols + cols.min((g + 1) * group)];
        let most = part.iter().fold(0.0f32, |most, v| most.max(v.abs()));
        let (inverse, scale) =
            (127.0 / most, if part.iter().any(|v| v.is_nan()) { f32::NAN } else { most / 127.0 });
        let code = |v: &f32| if inverse.is_finite() { (v * inverse).round_ties_even() as i8 } else { 0 };
        let mut expected: Vec<i8> = part.iter().map(code).collect();
        expected.resize(group, 0);
        let sum: i32 = expected.iter().map(|&c| i32::from(c)).sum();
        let got: Vec<i8> = codes[cell * group..(cell + 1) * group].iter().map(|&b| b as i8).collect();
        let got_scale = f32::from_bits(cells[2 * cell]);
        assert_eq!(got, expected, "codes of cell {cell}");
        let same = got_scale == scale || (got_scale.is_nan() && scale.is_nan());
        assert!(same && cells[2 * cell + 1] as i32 == sum, "cell {cell}: {got_scale}, not {scale}");
    }
    assert!(codes[tokens * groups * group..].iter().all(|&b| b == 0x5a), "codes past the end");
    assert!(cells[2 * tokens * groups..].iter().all(|&w| w == 0x5a5a_5a5a), "cells past the end");
}

/// One way of adding to the hidden states.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Adds {
    Nothing,
    Plane,
    Biased,
    Experts,
    Shared,
    Gated,
}

/// A step of `MixNorm` against the CPU: `tokens` of `room`, int8 planes in groups of `groups`.
fn check_norm(gpu: &Gpu, room: usize, tokens: usize, d: usize, adds: Adds, plane: bool, groups: &[usize]) {
    let what = format!("{tokens} x {d}, {adds:?}, {groups:?}");
    let mut random = Random(d as u64 * 31 + tokens as u64);
    let kernels = cpu();
    let (top_k, eps) = (3, 1e-6);
    let hidden = random.values(room * d);
    let weight = random.values(d);
    let added = random.values(room * d);
    let bias = random.values(d);
    let outputs = random.values(room * top_k * d);
    let weights = random.values(room * top_k);
    let gates = random.values(room);

    let device = floats(gpu, &hidden);
    let (weight_slice, added_slice, bias_slice) =
        (floats(gpu, &weight), floats(gpu, &added), floats(gpu, &bias));
    let (outputs_slice, weights_slice, gates_slice) =
        (floats(gpu, &outputs), floats(gpu, &weights), floats(gpu, &gates));
    let shared = |gate| Some(Shared { output: &added_slice, gate });
    let experts = |shared| Delta::Experts { outputs: &outputs_slice, weights: &weights_slice, top_k, shared };
    let delta = match adds {
        Adds::Nothing => Delta::None,
        Adds::Plane => Delta::Plane(&added_slice, None),
        Adds::Biased => Delta::Plane(&added_slice, Some(&bias_slice)),
        Adds::Experts => experts(None),
        Adds::Shared => experts(shared(None)),
        Adds::Gated => experts(shared(Some(&gates_slice))),
    };
    let normed = stale(gpu, room * d);
    let coded: Vec<_> = groups.iter().map(|&group| stale_coded(gpu, room, d, group)).collect();
    let coded: Vec<_> = coded.iter().collect();
    let out = NormOutputs { plane: plane.then_some(&normed), coded: &coded };
    let norm = MixNorm::new(gpu, room, d, eps, &device, &weight_slice, delta, None, out).unwrap();
    run(gpu, |step| norm.record(step, tokens));

    let mut expected = hidden.clone();
    for (t, gate) in gates[..tokens].iter().enumerate() {
        let row = t * d..(t + 1) * d;
        let mut sum = vec![0.0; d];
        match adds {
            Adds::Nothing => {}
            Adds::Plane => sum.copy_from_slice(&added[row.clone()]),
            Adds::Biased => {
                sum.copy_from_slice(&added[row.clone()]);
                kernels.add_in_place(&mut sum, &bias);
            }
            Adds::Experts | Adds::Shared | Adds::Gated => {
                for j in 0..top_k {
                    let pair = t * top_k + j;
                    kernels.scale_add(&mut sum, &outputs[pair * d..(pair + 1) * d], weights[pair]);
                }
                let gate = if adds == Adds::Gated { sigmoid(*gate) } else { 1.0 };
                if adds != Adds::Experts {
                    let shared: Vec<_> = added[row.clone()].iter().map(|v| v * gate).collect();
                    kernels.add_in_place(&mut sum, &shared);
                }
            }
        }
        if adds != Adds::Nothing {
            kernels.add_in_place(&mut expected[row], &sum);
        }
    }
    let got = read(gpu, &device);
    assert_close(&got, &expected, 1e-6, true, &format!("hidden states of {what}"));

    let mut rows = vec![0.0; tokens * d];
    for (row, x) in rows.chunks_exact_mut(d).zip(expected.chunks_exact(d)) {
        kernels.rms_norm(x, &weight, eps, row);
    }
    let got = read(gpu, &normed);
    if plane {
        assert_close(&got[..tokens * d], &rows, 1e-6, false, &format!("normed states of {what}"));
        assert_stale(&got[tokens * d..]);
        // What is quantised is what was written.
        coded.iter().for_each(|coded| assert_coded(gpu, coded, &got[..tokens * d], tokens));
    } else {
        let codes = gpu.download(&coded[0].codes).unwrap();
        let cells = read_words(gpu, &coded[0].cells);
        let (group, groups) = (coded[0].group, coded[0].groups());
        for t in 0..tokens {
            for c in 0..d {
                let cell = t * groups + c / group;
                let scale = f32::from_bits(cells[2 * cell]);
                let value = f32::from(codes[cell * group + c % group] as i8) * scale;
                assert!((value - rows[t * d + c]).abs() <= scale * 0.51, "{what}: {t} {c}");
            }
        }
    }
}

#[test]
fn hidden_states_are_added_to_normed_and_quantised() {
    let Some(gpu) = gpu() else { return };
    check_norm(gpu, 3, 2, 256, Adds::Nothing, true, &[64]);
    check_norm(gpu, 4, 3, 192, Adds::Plane, true, &[32, 64]);
    check_norm(gpu, 2, 2, 100, Adds::Biased, true, &[16]);
    check_norm(gpu, 2, 1, 37, Adds::Experts, true, &[128]);
    check_norm(gpu, 3, 2, 48, Adds::Shared, false, &[64]);
    check_norm(gpu, 3, 2, 130, Adds::Gated, true, &[64]);
    check_norm(gpu, 1, 1, 5120, Adds::Plane, true, &[64]);
    check_norm(gpu, 1, 1, 1, Adds::Plane, true, &[]);
    check_norm(gpu, 1, 1, 16384, Adds::Nothing, false, &[16]);
}

#[test]
fn what_is_added_and_what_is_embedded_may_be_multiplied() {
    let Some(gpu) = gpu() else { return };
    let (tokens, d) = (2, 100);
    let mut random = Random(41);
    let (hidden, added, weight) = (random.values(tokens * d), random.values(tokens * d), random.values(d));
    let (states, normed) = (floats(gpu, &hidden), stale(gpu, tokens * d));
    let (added_slice, weight_slice) = (floats(gpu, &added), floats(gpu, &weight));
    let delta = Delta::Plane(&added_slice, None);
    let out = NormOutputs { plane: Some(&normed), coded: &[] };
    let norm =
        MixNorm::new(gpu, tokens, d, 1e-6, &states, &weight_slice, delta, None, out).unwrap().scaled(0.3);
    run(gpu, |step| norm.record(step, tokens));
    let expected: Vec<f32> = hidden.iter().zip(&added).map(|(h, a)| a.mul_add(0.3, *h)).collect();
    assert_close(&read(gpu, &states), &expected, 1e-6, true, "hidden states");
    let (ids, out) = (words(gpu, &[1]), stale(gpu, d));
    let embed = Embed::new(gpu, 1, &floats(gpu, &hidden), Encoding::F32, tokens, d, &ids, &out).unwrap();
    run(gpu, |step| embed.scaled(12.0).record(step, 1));
    let expected: Vec<f32> = hidden[d..].iter().map(|h| h * 12.0).collect();
    assert_close(&read(gpu, &out), &expected, 0.0, true, "an embedding");
}

#[test]
fn a_norm_of_chosen_rows_leaves_the_other_tokens_alone() {
    let Some(gpu) = gpu() else { return };
    let (tokens, d, eps) = (5, 96, 1e-5);
    let mut random = Random(7);
    let (hidden, weight, added) = (random.values(tokens * d), random.values(d), random.values(tokens * d));
    let chosen = [3u32, 0];
    let device = floats(gpu, &hidden);
    let normed = stale(gpu, 2 * d);
    let added_slice = floats(gpu, &added);
    let norm = MixNorm::new(
        gpu,
        tokens,
        d,
        eps,
        &device,
        &floats(gpu, &weight),
        Delta::Plane(&added_slice, None),
        Some((&words(gpu, &chosen), 2)),
        NormOutputs { plane: Some(&normed), coded: &[] },
    )
    .unwrap();
    run(gpu, |step| norm.record(step, 2));
    let mut expected = hidden;
    let mut rows = vec![0.0; 2 * d];
    for (&t, row) in chosen.iter().zip(rows.chunks_exact_mut(d)) {
        let place = t as usize * d..(t as usize + 1) * d;
        cpu().add_in_place(&mut expected[place.clone()], &added[place.clone()]);
        cpu().rms_norm(&expected[place], &weight, eps, row);
    }
    assert_close(&read(gpu, &device), &expected, 0.0, true, "hidden states");
    assert_close(&read(gpu, &normed), &rows, 1e-6, false, "normed states");
}

#[test]
fn what_is_not_a_number_stays_with_its_token() {
    let Some(gpu) = gpu() else { return };
    let (tokens, d) = (3, 128);
    for bad in [f32::NAN, f32::INFINITY] {
        let mut hidden = Random(1).values(tokens * d);
        hidden[d + 77] = bad;
        let (device, weight) = (floats(gpu, &hidden), floats(gpu, &vec![1.0; d]));
        let normed = stale(gpu, tokens * d);
        let coded = stale_coded(gpu, tokens, d, 64);
        let out = NormOutputs { plane: Some(&normed), coded: &[&coded] };
        let norm = MixNorm::new(gpu, tokens, d, 1e-6, &device, &weight, Delta::None, None, out).unwrap();
        run(gpu, |step| norm.record(step, tokens));
        let got = read(gpu, &normed);
        let finite: Vec<_> = got.iter().map(|v| v.is_finite()).collect();
        assert!(finite[..d].iter().all(|f| *f) && finite[2 * d..].iter().all(|f| *f), "{bad}");
        assert!(got[d + 77].is_nan(), "{bad} became {}", got[d + 77]);
        let scales = read_words(gpu, &coded.cells);
        assert!(f32::from_bits(scales[6]).is_nan(), "the group of {bad}");
    }
}

#[test]
fn what_a_token_gets_from_a_norm_does_not_depend_on_the_others() {
    let Some(gpu) = gpu() else { return };
    let (tokens, d) = (6, 320);
    let hidden = Random(3).values(tokens * d);
    let weight = floats(gpu, &Random(4).values(d));
    let norms = |rows: &[f32]| {
        let n = rows.len() / d;
        let (device, normed) = (floats(gpu, rows), stale(gpu, n * d));
        let out = NormOutputs { plane: Some(&normed), coded: &[] };
        let norm = MixNorm::new(gpu, n, d, 1e-6, &device, &weight, Delta::None, None, out).unwrap();
        run(gpu, |step| norm.record(step, n));
        read(gpu, &normed)
    };
    let all = norms(&hidden);
    for t in 0..tokens {
        let row = t * d..(t + 1) * d;
        assert_eq!(norms(&hidden[row.clone()]), all[row]);
    }
}

#[test]
fn embeddings_are_the_rows_that_the_format_defines() {
    let Some(gpu) = gpu() else { return };
    let rows = 70;
    let mut encodings = vec![Encoding::F32, Encoding::F16, Encoding::Bf16];
    for (i, bits) in [2, 3, 4, 5, 6, 8].into_iter().enumerate() {
        for (j, zero) in [Zero::Symmetric, Zero::Affine].into_iter().enumerate() {
            let group = [16, 32, 64, 128][(i + 2 * j) % 4];
            encodings.push(Encoding::Uniform(Uniform::new(bits, group, zero).unwrap()));
        }
    }
    let ids = [69u32, 0, 16, 37, 69, 70, u32::MAX];
    for (i, encoding) in encodings.into_iter().enumerate() {
        let cols = [64, 37, 130][i % 3];
        let mut random = Random(i as u64);
        let mut w = random.values(rows * cols);
        // Scales from subnormal halves to large ones.
        w.iter_mut().enumerate().for_each(|(i, w)| *w *= [1.0, 3e-6, 1000.0, 0.0][i / cols % 4]);
        let mut bytes = vec![0; encoding.tensor_bytes(rows, cols).unwrap()];
        encoding.encode(&w, cols, &mut bytes);
        let hidden = stale(gpu, (ids.len() + 1) * cols);
        let (table, ids_slice) = (upload(gpu, &bytes), words(gpu, &ids));
        let embed = Embed::new(gpu, ids.len(), &table, encoding, rows, cols, &ids_slice, &hidden).unwrap();
        run(gpu, |step| embed.record(step, ids.len()));
        let mut expected = vec![f32::NAN; ids.len() * cols];
        for (&id, row) in ids.iter().zip(expected.chunks_exact_mut(cols)).filter(|(id, _)| **id < 70) {
            encoding.decode_row(&bytes, cols, id as usize, row);
        }
        let got = read(gpu, &hidden);
        let (got, rest) = got.split_at(ids.len() * cols);
        assert_close(got, &expected, 1e-6, true, &format!("{encoding}"));
        assert_stale(rest);
    }
}

#[test]
fn the_largest_logit_is_found_and_what_is_not_a_number_is_told() {
    let Some(gpu) = gpu() else { return };
    for vocab in [1, 5, 300, 20_011] {
        let tokens = 8;
        let mut logits = Random(vocab as u64).values(tokens * vocab);
        let last = vocab - 1;
        // Ties, also of the two zeros; infinities; all equal; numbers that are none.
        let mut row = |t: usize, values: &dyn Fn(usize) -> f32| {
            (0..vocab).for_each(|i| logits[t * vocab + i] = values(i));
        };
        row(1, &|i| if i == last / 2 || i == last { 9.0 } else { -1.0 });
        row(2, &|i| if i % 2 == 0 { -0.0 } else { 0.0 });
        row(3, &|_| f32::NEG_INFINITY);
        row(4, &|i| if i == last { f32::INFINITY } else { f32::MAX });
        row(5, &|i| if i == last { f32::NAN } else { f32::INFINITY });
        row(6, &|i| if i == 0 { -f32::NAN } else { 1.0 });
        row(7, &|i| -1.0 - i as f32);
        let ids = stale(gpu, tokens + 1);
        let argmax = Argmax::new(gpu, tokens, vocab, &floats(gpu, &logits), &ids).unwrap();
        run(gpu, |step| argmax.record(step, tokens));
        let got = read_words(gpu, &ids);
        for (t, row) in logits.chunks_exact(vocab).enumerate() {
            let nan = row.iter().any(|v| v.is_nan());
            let expected = if nan { u32::MAX } else { cpu().argmax(row) };
            assert_eq!(got[t], expected, "token {t} of {vocab} logits");
        }
        assert_eq!(got[tokens], STALE);
    }
}

const FORMATS: [(KvFormat, KvType); 3] =
    [(KvFormat::F32, KvType::F32), (KvFormat::F16, KvType::F16), (KvFormat::Q8, KvType::Q8)];

/// The first byte of a row of a cache.
fn row_at(kv: &KvLayout, block: u32, plane: usize, head: usize, position: usize) -> usize {
    (((2 * block as usize + plane) * kv.n_kv_heads + head) * KV_BLOCK + position % KV_BLOCK) * kv.row_bytes()
}

/// Numbers of every size, a head that is zero and one that is not all numbers among them.
fn projections(random: &mut Random, n: usize, dim: usize) -> Vec<f32> {
    let mut values = random.values(n);
    for (i, head) in values.chunks_mut(dim).enumerate() {
        let scale = [1.0, 1e-3, 300.0, 0.0, 1e5][i % 5];
        head.iter_mut().for_each(|v| *v *= scale);
    }
    values
}

fn check_rope(
    gpu: &Gpu,
    kv: KvLayout,
    per_kv: usize,
    dim: usize,
    pairs: RopePairs,
    norm: Option<bool>,
    bias: bool,
    bad: bool,
) {
    let what = format!("{kv:?}, {dim} rotated, {pairs:?}, norm {norm:?}, bias {bias}");
    let KvLayout { n_kv_heads, head_dim, value_dim, format } = kv;
    let ty = FORMATS.iter().find(|(f, _)| *f == format).unwrap().1;
    let mut random = Random(dim as u64 + 1000 * head_dim as u64);
    let kernels = cpu();
    let n_heads = per_kv * n_kv_heads;
    let (tokens, room, context, blocks, eps) = (3usize, 4usize, 70usize, 7usize, 1e-6);
    // Values first, then a gap, queries, keys.
    let v_at = 0;
    let q_at = n_kv_heads * value_dim + 5;
    let k_at = q_at + n_heads * head_dim;
    let stride = k_at + n_kv_heads * head_dim + 3;
    let mut plane = projections(&mut random, room * stride, head_dim);
    if bad {
        plane[stride + k_at + 1] = f32::NAN;
        plane[v_at + 2] = f32::INFINITY;
    }
    let biases = random.values(stride);
    let angles: Vec<f32> = random.values(context * dim);
    let heads = if norm == Some(true) { n_heads + n_kv_heads } else { 2 };
    let norms = random.values(heads * head_dim);
    // Two sessions: tables of three blocks each.
    let tables = [6u32, 1, 4, 2, 0, 5];
    let rows = [(33u32, 0usize), (0, 3), (69, 3), (1, 0)];
    let row_words: Vec<u32> =
        rows.iter().flat_map(|&(position, table)| [position, table as u32, 0, 0]).collect();

    let cache = upload(gpu, &vec![0xee; blocks * kv.block_bytes()]);
    let queries = stale(gpu, room * n_heads * head_dim);
    let (plane_slice, bias_slice) = (floats(gpu, &plane), floats(gpu, &biases));
    let (angle_slice, norm_slice) = (floats(gpu, &angles), floats(gpu, &norms));
    let rope = RopeAppend::new(
        gpu,
        room,
        n_heads,
        kv,
        Projections {
            plane: &plane_slice,
            stride,
            at: [q_at, k_at, v_at],
            bias: bias.then_some(&bias_slice),
        },
        norm.map(|whole| QkNorm { weights: &norm_slice, eps, whole }),
        Angles { table: &angle_slice, positions: context, dim, pairs },
        Rows { rows: &words(gpu, &row_words), tables: &words(gpu, &tables) },
        &queries,
        &cache,
    )
    .unwrap();
    run(gpu, |step| rope.record(step, tokens));

    let mut expected_queries = Vec::new();
    let mut expected = vec![0xee; blocks * kv.block_bytes()];
    for t in 0..tokens {
        let mut row = plane[t * stride..(t + 1) * stride].to_vec();
        if bias {
            kernels.add_in_place(&mut row, &biases);
        }
        let (position, table) = rows[t];
        let position = position as usize;
        let (cos, sin): (Vec<f32>, Vec<f32>) = angles[position * dim..(position + 1) * dim]
            .as_chunks::<2>()
            .0
            .iter()
            .map(|a| (a[0], a[1]))
            .unzip();
        let style = if pairs == RopePairs::Halves { RopeStyle::Half } else { RopeStyle::Interleaved };
        let prepare = |at: usize, heads: usize, weights: &[f32]| {
            let mut x = row[at..at + heads * head_dim].to_vec();
            match norm {
                Some(true) => kernels.rms_norm_in_place(&mut x, &weights[..heads * head_dim], eps),
                Some(false) => kernels.rms_norm_in_place(&mut x, &weights[..head_dim], eps),
                None => {}
            }
            kernels.rope(&mut x, head_dim, &cos, &sin, style);
            x
        };
        let key_weights = if norm == Some(true) { n_heads * head_dim } else { head_dim };
        expected_queries.extend(prepare(q_at, n_heads, &norms));
        let keys = prepare(k_at, n_kv_heads, &norms[key_weights..]);
        let block = tables[table + position / KV_BLOCK];
        for h in 0..n_kv_heads {
            let at = row_at(&kv, block, 0, h, position);
            let key = &keys[h * head_dim..(h + 1) * head_dim];
            kernels.store_kv_row(ty, key, &mut expected[at..at + kv.row_bytes()]);
            let at = row_at(&kv, block, 1, h, position);
            let value = &row[v_at + h * value_dim..v_at + (h + 1) * value_dim];
            kernels.store_kv_row(ty, value, &mut expected[at..at + kv.row_bytes()]);
        }
    }
    let got = read(gpu, &queries);
    let (got, rest) = got.split_at(expected_queries.len());
    assert_close(got, &expected_queries, 0.0, true, &format!("queries of {what}"));
    assert_stale(rest);
    let got = gpu.download(&cache).unwrap();
    let rows = got.chunks_exact(kv.row_bytes()).zip(expected.chunks_exact(kv.row_bytes()));
    for (i, (got, expected)) in rows.enumerate() {
        assert_row(ty, got, expected, &format!("row {i} of {what}"));
    }
}

/// A row of the cache, byte by byte; only which NaN it is may differ, and the sign of a zero.
#[track_caller]
fn assert_row(ty: KvType, got: &[u8], expected: &[u8], what: &str) {
    let value = |row: &[u8], at: usize| match ty {
        KvType::F32 => f32::from_le_bytes(row[at / 4 * 4..][..4].try_into().unwrap()),
        KvType::F16 => f16_to_f32(u16::from_le_bytes(row[at / 2 * 2..][..2].try_into().unwrap())),
        KvType::Q8 => 1.0,
    };
    for (at, (a, b)) in got.iter().zip(expected).enumerate() {
        let values = [value(got, at), value(expected, at)];
        let alike = values.iter().all(|v| v.is_nan()) || values.iter().all(|v| *v == 0.0);
        assert!(a == b || alike, "{what}: byte {at} is {a}, not {b}");
    }
}

#[test]
fn projections_become_queries_and_rows_of_the_cache() {
    let Some(gpu) = gpu() else { return };
    let layout =
        |format, n_kv_heads, head_dim, value_dim| KvLayout { format, n_kv_heads, head_dim, value_dim };
    use RopePairs::{Halves, Neighbours};
    for (format, _) in FORMATS {
        check_rope(gpu, layout(format, 2, 64, 64), 2, 64, Halves, Some(false), false, false);
        check_rope(gpu, layout(format, 1, 36, 52), 3, 20, Neighbours, None, true, false);
        check_rope(gpu, layout(format, 1, 256, 128), 1, 128, Halves, None, false, true);
    }
    check_rope(gpu, layout(KvFormat::F16, 2, 48, 48), 2, 48, Halves, Some(true), false, false);
    check_rope(gpu, layout(KvFormat::F32, 3, 4, 4), 1, 2, Neighbours, Some(true), true, false);
}

#[test]
fn rows_of_every_size_are_stored_as_the_cpu_stores_them() {
    let Some(gpu) = gpu() else { return };
    let (dim, n) = (16, 64);
    let plane: Vec<f32> = (0..n * 3 * dim)
        .map(|i| {
            let exponent = (i / (3 * dim)) as i32 - 36;
            let mantissa = Random(i as u64 * 77).value();
            mantissa * 10f32.powi(exponent)
        })
        .collect();
    for (format, ty) in FORMATS {
        let kv = KvLayout { format, n_kv_heads: 1, head_dim: dim, value_dim: dim };
        let cache = upload(gpu, &vec![0; 2 * kv.block_bytes()]);
        let rows: Vec<u32> = (0..n as u32).flat_map(|t| [t, 0, 0, 0]).collect();
        // No rotation: the rows are stored as they come.
        let angles: Vec<f32> = (0..n).flat_map(|_| [1.0, 0.0]).collect();
        let rope = RopeAppend::new(
            gpu,
            n,
            1,
            kv,
            Projections { plane: &floats(gpu, &plane), stride: 3 * dim, at: [0, dim, 2 * dim], bias: None },
            None,
            Angles { table: &floats(gpu, &angles), positions: n, dim: 2, pairs: RopePairs::Halves },
            Rows { rows: &words(gpu, &rows), tables: &words(gpu, &[1, 0]) },
            &stale(gpu, n * dim),
            &cache,
        )
        .unwrap();
        run(gpu, |step| rope.record(step, n));
        let got = gpu.download(&cache).unwrap();
        for t in 0..n {
            let block = 1 - (t / KV_BLOCK) as u32;
            let value = &plane[(3 * t + 2) * dim..(3 * t + 3) * dim];
            let mut expected = vec![0; kv.row_bytes()];
            cpu().store_kv_row(ty, value, &mut expected);
            let at = row_at(&kv, block, 1, 0, t);
            let got = &got[at..at + kv.row_bytes()];
            // A device may take subnormal numbers, and scales, for zero.
            let least = value.iter().fold(f32::MAX, |m, v| m.min(v.abs()));
            let most = value.iter().fold(0.0f32, |m, v| m.max(v.abs()));
            if least > 1.2e-38 && (format != KvFormat::Q8 || most > 1.6e-36) {
                assert_row(ty, got, &expected, &format!("{format:?} row of {value:?}"));
            }
        }
    }
}

/// A cache on both sides: sessions with their blocks, every row that was not stored not a number.
struct Cache {
    kv: KvLayout,
    ty: KvType,
    bytes: Vec<u8>,
    tables: Vec<u32>,
    /// Where each session's table begins.
    starts: Vec<usize>,
}

impl Cache {
    /// Sessions of `lengths` positions.
    fn new(kv: KvLayout, lengths: &[usize], random: &mut Random) -> Self {
        let ty = FORMATS.iter().find(|(f, _)| *f == kv.format).unwrap().1;
        let counts = lengths.iter().map(|n| n.div_ceil(KV_BLOCK));
        let total: usize = counts.clone().sum();
        // Blocks in an order of their own, with one that nobody has in front.
        let mut tables: Vec<u32> = (1..=total as u32).collect();
        (1..total).for_each(|i| tables.swap(i, random.below(i + 1)));
        let starts = counts.scan(0, |at, n| Some(std::mem::replace(at, *at + n))).collect();
        let bytes = vec![0xff; (total + 1) * kv.block_bytes()];
        let mut cache = Self { kv, ty, bytes, tables, starts };
        for (session, &length) in lengths.iter().enumerate() {
            for position in 0..length {
                for head in 0..kv.n_kv_heads {
                    let key = random.values(kv.head_dim);
                    let value = random.values(kv.value_dim);
                    cache.store(session, position, head, &key, &value);
                }
            }
        }
        cache
    }

    fn store(&mut self, session: usize, position: usize, head: usize, key: &[f32], value: &[f32]) {
        let block = self.tables[self.starts[session] + position / KV_BLOCK];
        for (plane, x) in [key, value].into_iter().enumerate() {
            let at = row_at(&self.kv, block, plane, head, position);
            cpu().store_kv_row(self.ty, x, &mut self.bytes[at..at + self.kv.row_bytes()]);
        }
    }

    /// What the CPU makes of a token's queries: (session, position, first position it sees).
    fn attend(
        &self,
        (session, position, visible): (usize, usize, usize),
        queries: &[f32],
        scale: f32,
        sinks: Option<&[f32]>,
    ) -> Vec<f32> {
        let kv = &self.kv;
        let per_kv = queries.len() / kv.head_dim / kv.n_kv_heads;
        let mut out = Vec::new();
        for head in 0..kv.n_kv_heads {
            let plane = |plane: usize| KvPlane {
                ty: self.ty,
                bytes: &self.bytes,
                row_bytes: kv.row_bytes(),
                block_stride: kv.block_bytes(),
                head_offset: (plane * kv.n_kv_heads + head) * KV_BLOCK * kv.row_bytes(),
            };
            let blocks = KvBlocks {
                keys: plane(0),
                values: plane(1),
                table: &self.tables[self.starts[session]..],
                block_positions: KV_BLOCK,
            };
            let mut mixed = vec![0.0; per_kv * kv.value_dim];
            let mut scores = vec![0.0; per_kv * (position + 1)];
            cpu().attention(
                &queries[head * per_kv * kv.head_dim..(head + 1) * per_kv * kv.head_dim],
                kv.head_dim,
                blocks,
                visible..position + 1,
                scale,
                sinks.map(|sinks| &sinks[head * per_kv..(head + 1) * per_kv]),
                &mut scores,
                &mut mixed,
            );
            out.extend(mixed);
        }
        out
    }
}

/// A step's attention on the device, over scratch for `room` splits (or as many as one token needs).
fn attend(
    gpu: &Gpu,
    cache: &Cache,
    tokens: &[(usize, usize, usize)],
    queries: &[f32],
    scale: f32,
    sinks: Option<&[f32]>,
    room: usize,
    group: Option<usize>,
) -> Vec<f32> {
    let kv = cache.kv;
    let n_heads = queries.len() / tokens.len() / kv.head_dim;
    let width = n_heads * kv.value_dim;
    let visible = tokens.iter().map(|&(_, position, first)| position + 1 - first).max().unwrap();
    let bytes = (room * n_heads * (kv.value_dim + 2) * 4) as u64;
    let scratch = AttentionScratch::new(gpu, n_heads, kv.value_dim, visible, bytes).unwrap();
    let rows: Vec<u32> = tokens
        .iter()
        .flat_map(|&(session, position, first)| {
            [position as u32, cache.starts[session] as u32, first as u32, 0]
        })
        .collect();
    let plane = stale(gpu, (tokens.len() + 1) * width);
    let coded = group.map(|group| stale_coded(gpu, tokens.len() + 1, width, group));
    let sinks = sinks.map(|sinks| floats(gpu, sinks));
    let attention = Attention::new(
        gpu,
        tokens.len(),
        kv,
        AttentionHeads { n_heads, scale, sinks: sinks.as_ref() },
        &floats(gpu, queries),
        &upload(gpu, &cache.bytes),
        Rows { rows: &words(gpu, &rows), tables: &words(gpu, &cache.tables) },
        &scratch,
        AttentionOutputs { plane: Some(&plane), coded: coded.as_ref() },
    )
    .unwrap();
    // If all are in the first split that is known, and then it is not.
    let end = tokens.iter().map(|&(_, position, _)| position + 1).max().unwrap();
    let [got, again] = [end, usize::MAX].map(|end| {
        run(gpu, |step| attention.record(step, tokens.len(), visible, end));
        let mut got = read(gpu, &plane);
        let rest = got.split_off(tokens.len() * width);
        assert_stale(&rest);
        if let Some(coded) = &coded {
            assert_coded(gpu, coded, &got, tokens.len());
        }
        got.into_iter().map(f32::to_bits).collect::<Vec<_>>()
    });
    assert_eq!(got, again, "one kernel or two");
    got.into_iter().map(f32::from_bits).collect()
}

fn check_attention(
    gpu: &Gpu,
    kv: KvLayout,
    per_kv: usize,
    lengths: &[usize],
    tokens: &[(usize, usize, usize)],
    sinks: bool,
    group: Option<usize>,
) {
    let mut random = Random(per_kv as u64 * 1000 + kv.head_dim as u64);
    let cache = Cache::new(kv, lengths, &mut random);
    let n_heads = per_kv * kv.n_kv_heads;
    let queries: Vec<f32> = random.values(tokens.len() * n_heads * kv.head_dim);
    let sinks: Option<Vec<f32>> = sinks.then(|| random.values(n_heads));
    let scale = 1.7;
    let got = attend(gpu, &cache, tokens, &queries, scale, sinks.as_deref(), 1 << 12, group);
    let width = n_heads * kv.head_dim;
    let expected: Vec<f32> = tokens
        .iter()
        .zip(queries.chunks_exact(width))
        .flat_map(|(&token, queries)| cache.attend(token, queries, scale, sinks.as_deref()))
        .collect();
    assert_close(&got, &expected, 2e-5, false, &format!("{kv:?}, {per_kv} queries a head"));
}

#[test]
fn attention_is_the_cpus_for_every_shape_of_heads() {
    let Some(gpu) = gpu() else { return };
    let layout =
        |format, n_kv_heads, head_dim, value_dim| KvLayout { format, n_kv_heads, head_dim, value_dim };
    let tokens = [(0, 0, 0), (0, 299, 0), (1, 39, 0), (0, 299, 130), (0, 255, 255), (0, 256, 127)];
    let lengths = [300, 40];
    let first = [(0, 0, 0), (0, 127, 0), (1, 39, 0), (0, 100, 30)];
    for (format, _) in FORMATS {
        check_attention(gpu, layout(format, 2, 64, 64), 4, &lengths, &first, false, Some(64));
        check_attention(gpu, layout(format, 1, 36, 36), 3, &lengths, &first, true, None);
        check_attention(gpu, layout(format, 2, 64, 64), 4, &lengths, &tokens, false, Some(64));
        check_attention(gpu, layout(format, 1, 36, 52), 3, &lengths, &tokens, true, Some(32));
    }
    check_attention(gpu, layout(KvFormat::F16, 1, 128, 128), 16, &lengths, &tokens, false, Some(128));
    check_attention(gpu, layout(KvFormat::F16, 2, 128, 128), 8, &lengths, &first, false, Some(64));
    check_attention(gpu, layout(KvFormat::F16, 1, 128, 128), 9, &lengths, &first, false, Some(32));
    check_attention(gpu, layout(KvFormat::Q8, 1, 256, 256), 9, &lengths, &tokens[..3], false, None);
    check_attention(gpu, layout(KvFormat::F32, 3, 4, 4), 1, &lengths, &tokens, true, Some(16));
    // So many that the queries of a kv head share a workgroup.
    let many: Vec<_> = (285..300).map(|position| (0, position, 0)).collect();
    check_attention(gpu, layout(KvFormat::F16, 4, 64, 64), 4, &lengths, &many, false, Some(64));
}

/// How many decode together decides whether a kv head's queries share a workgroup: not what they get.
#[test]
fn a_token_gets_the_same_among_many_and_alone() {
    let Some(gpu) = gpu() else { return };
    for (format, per_kv) in [(KvFormat::F16, 4), (KvFormat::Q8, 8), (KvFormat::F32, 5)] {
        let kv = KvLayout { format, n_kv_heads: 4, head_dim: 32, value_dim: 32 };
        let mut random = Random(per_kv as u64 + 50);
        let cache = Cache::new(kv, &[300], &mut random);
        let tokens: Vec<_> = (288..300).map(|position| (0, position, 0)).collect();
        let width = per_kv * 4 * 32;
        let queries = random.values(tokens.len() * width);
        let all = attend(gpu, &cache, &tokens, &queries, 0.5, None, 1 << 12, Some(64));
        for (t, all) in all.chunks_exact(width).enumerate() {
            let query = &queries[t * width..(t + 1) * width];
            let one = attend(gpu, &cache, &tokens[t..=t], query, 0.5, None, 1 << 12, Some(64));
            assert_eq!(one, all, "{format:?}, token {t}");
        }
    }
}

/// Tokens of several sessions, some of them a prompt's.
fn mixed_tokens() -> Vec<(usize, usize, usize)> {
    let mut tokens: Vec<_> = (250..270).map(|position| (0, position, 0)).collect();
    tokens.extend([(1, 17, 0), (2, 5, 0), (0, 290, 200)]);
    tokens.extend((125..134).map(|position: usize| (1, position, position.saturating_sub(100))));
    tokens
}

#[test]
fn what_a_token_attends_to_does_not_depend_on_the_others_or_on_the_scratch() {
    let Some(gpu) = gpu() else { return };
    let tokens = mixed_tokens();
    for (format, per_kv) in [(KvFormat::F16, 2), (KvFormat::Q8, 1), (KvFormat::F32, 8)] {
        let kv = KvLayout { format, n_kv_heads: 2, head_dim: 32, value_dim: 32 };
        let mut random = Random(per_kv as u64);
        let cache = Cache::new(kv, &[300, 140, 8], &mut random);
        let width = per_kv * 2 * 32;
        let queries = random.values(tokens.len() * width);
        let all = attend(gpu, &cache, &tokens, &queries, 0.5, None, 1 << 12, None);
        // Room for a few tokens at once only.
        assert_eq!(all, attend(gpu, &cache, &tokens, &queries, 0.5, None, 13, None), "rounds");
        for t in [0, 7, 19, 21, 22, 25, tokens.len() - 1] {
            let row = t * width..(t + 1) * width;
            let one = attend(gpu, &cache, &tokens[t..=t], &queries[row.clone()], 0.5, None, 0, None);
            assert_eq!(one, all[row.clone()], "token {t}");
            let expected = cache.attend(tokens[t], &queries[row], 0.5, None);
            assert_close(&one, &expected, 2e-5, false, "token alone");
        }
    }
}

#[test]
fn a_row_that_is_not_a_number_reaches_those_who_see_it_and_no_others() {
    let Some(gpu) = gpu() else { return };
    for (format, _) in FORMATS {
        let kv = KvLayout { format, n_kv_heads: 2, head_dim: 32, value_dim: 32 };
        let mut random = Random(5);
        let mut cache = Cache::new(kv, &[300], &mut random);
        // A key of head 0 and a value of head 1.
        let good = random.values(32);
        cache.store(0, 255, 0, &[f32::NAN; 32], &good);
        cache.store(0, 258, 1, &good, &[f32::NAN; 32]);
        // Those who see neither, one, both; a window behind them.
        let tokens: Vec<_> =
            (250..270).map(|position| (0, position, 0)).chain([(0, 299, 259), (0, 299, 256)]).collect();
        let queries = random.values(tokens.len() * 64);
        let got = attend(gpu, &cache, &tokens, &queries, 0.5, None, 1 << 12, None);
        for (&(_, position, first), row) in tokens.iter().zip(got.chunks_exact(64)) {
            let sees = |bad: usize| (first..=position).contains(&bad);
            for (head, bad) in [(0, 255), (1, 258)] {
                let row = &row[head * 32..(head + 1) * 32];
                assert!(
                    row.iter().all(|v| v.is_nan() == sees(bad)),
                    "{format:?}: {first}..={position}, head {head}"
                );
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(6))]
    #[test]
    fn attention_over_any_rows_is_the_cpus(seed in any::<u64>()) {
        let Some(gpu) = gpu() else { return Ok(()) };
        let mut random = Random(seed);
        let kv = KvLayout { format: KvFormat::F16, n_kv_heads: 2, head_dim: 32, value_dim: 32 };
        let lengths: Vec<_> = (0..3).map(|_| 1 + random.below(400)).collect();
        let cache = Cache::new(kv, &lengths, &mut random);
        let tokens: Vec<_> = (0..1 + random.below(24)).map(|_| {
            let session = random.below(3);
            let position = random.below(lengths[session]);
            (session, position, if random.below(2) == 0 { 0 } else { random.below(position + 1) })
        }).collect();
        let queries = random.values(tokens.len() * 128);
        let room = 5 + random.below(60);
        let got = attend(gpu, &cache, &tokens, &queries, 1.0, None, room, None);
        for (t, &token) in tokens.iter().enumerate() {
            let row = t * 128..(t + 1) * 128;
            let expected = cache.attend(token, &queries[row.clone()], 1.0, None);
            assert_close(&got[row], &expected, 2e-5, false, &format!("{token:?}"));
        }
    }
}

/// Chosen experts (ascending) and their weights, as the CPU has them.
fn route(moe: &MoeSpec, logits: &[f32], bias: &[f32], correction: &[f32]) -> (Vec<u32>, Vec<f32>) {
    let mut scores: Vec<f32> = logits.iter().zip(bias).map(|(l, b)| l + b).collect();
    match moe.router {
        RouterKind::Softmax => cpu().softmax_in_place(&mut scores),
        RouterKind::Sigmoid => cpu().sigmoid_in_place(&mut scores),
    }
    let mut ranked: Vec<f32> = scores.iter().zip(correction).map(|(s, c)| s + c).collect();
    if let Some(groups) = moe.groups {
        let size = moe.n_experts / groups.n;
        let of_group = |group: &[f32]| {
            let mut sorted = group.to_vec();
            sorted.sort_by(|a, b| b.total_cmp(a));
            match groups.score {
                GroupScore::Best => sorted[0],
                GroupScore::BestTwo => sorted[0] + sorted[1],
            }
        };
        let group_scores: Vec<f32> = ranked.chunks_exact(size).map(of_group).collect();
        let mut best = vec![0; groups.top];
        top_k(&group_scores, &mut best);
        for (i, ranked) in ranked.iter_mut().enumerate() {
            if !best.contains(&((i / size) as u32)) {
                *ranked = f32::NEG_INFINITY;
            }
        }
    }
    let mut ids = vec![0; moe.top_k];
    top_k(&ranked, &mut ids);
    let sum: f32 = ids.iter().map(|&id| scores[id as usize]).sum();
    let divisor = if moe.norm_topk { sum.max(moe.norm_min as f32) } else { 1.0 };
    ids.sort_unstable();
    let weights = ids.iter().map(|&id| scores[id as usize] / divisor * moe.routed_scale as f32).collect();
    (ids, weights)
}

fn check_route(gpu: &Gpu, moe: &MoeSpec, tokens: usize, biased: bool, logits: &[f32]) {
    let what = format!("{moe:?}, {tokens} tokens");
    let n_experts = moe.n_experts;
    let n = tokens * moe.top_k;
    let mut random = Random(tokens as u64);
    let zeros = vec![0.0; n_experts];
    let (bias, correction) =
        if biased { (random.values(n_experts), random.values(n_experts)) } else { (zeros.clone(), zeros) };
    // Every third expert is not there.
    let slots: Vec<u32> =
        (0..n_experts as u32).map(|e| if e % 3 == 1 { WorkList::ABSENT } else { 1000 - e }).collect();
    let (bias_slice, correction_slice) = (floats(gpu, &bias), floats(gpu, &correction));
    let (ids, weights) = (stale(gpu, n + 1), stale(gpu, n + 1));
    let entries = n.min(n_experts + n / 8);
    let list = WorkList {
        entries: stale(gpu, 4 + 4 * entries + 1),
        pairs: stale(gpu, n + 1),
        tokens,
        top_k: moe.top_k,
    };
    let inputs = RouteInputs {
        logits: &floats(gpu, logits),
        bias: biased.then_some(&bias_slice),
        correction: biased.then_some(&correction_slice),
        router: None,
        norm: None,
        slots: &words(gpu, &slots),
    };
    let outputs = RouteOutputs { ids: &ids, weights: &weights, list: &list, seen: None };
    let router = Route::new(gpu, tokens, moe, inputs, outputs).unwrap();
    run(gpu, |step| router.record(step, tokens));

    let (mut expected_ids, mut expected_weights) = (Vec::new(), Vec::new());
    for logits in logits.chunks_exact(n_experts) {
        let (ids, weights) = route(moe, logits, &bias, &correction);
        expected_ids.extend(ids);
        expected_weights.extend(weights);
    }
    let got_ids = read_words(gpu, &ids);
    assert_eq!(got_ids[..n], expected_ids, "ids of {what}");
    let got = read(gpu, &weights);
    assert_close(&got[..n], &expected_weights, 1e-6, true, &format!("weights of {what}"));
    assert_eq!((got_ids[n], got[n].to_bits()), (STALE, STALE));

    let (mut expected, mut pairs) = (Vec::new(), Vec::<u32>::new());
    let (mut missing, mut visited) = (0, 0);
    for expert in 0..n_experts as u32 {
        let own: Vec<u32> = (0..n as u32).filter(|&p| expected_ids[p as usize] == expert).collect();
        visited += u32::from(!own.is_empty());
        for piece in own.chunks(8) {
            let slot = slots[expert as usize];
            missing += u32::from(slot == WorkList::ABSENT);
            expected.extend([slot, pairs.len() as u32, piece.len() as u32, expert]);
            pairs.extend(piece);
        }
    }
    let work = read_words(gpu, &list.entries);
    assert_eq!(work[..4], [expected.len() as u32 / 4, missing, visited, 0], "list of {what}");
    assert_eq!(work[4..4 + expected.len()], expected, "entries of {what}");
    assert!(work[4 + expected.len()..].iter().all(|&w| w == STALE), "entries past the end of {what}");
    let got = read_words(gpu, &list.pairs);
    assert_eq!(got[..n], pairs, "pairs of {what}");
    assert_eq!(got[n], STALE);
}

#[test]
fn a_halt_leaves_everything_behind_it_as_it_was() {
    let Some(gpu) = gpu() else { return };
    let (tokens, d, moe) = (2, 96, moe(16, 4, true));
    let n = tokens * moe.top_k;
    let mut random = Random(77);
    let logits = |random: &mut Random| random.values(tokens * moe.n_experts);
    let first = logits(&mut random);
    let plane = floats(gpu, &first);
    let slots = words(gpu, &(0..16).collect::<Vec<u32>>());
    let (ids, weights) = (stale(gpu, n), floats(gpu, &vec![0.0; n + 1]));
    let list = WorkList { entries: stale(gpu, 4 + 4 * n), pairs: stale(gpu, n), tokens, top_k: moe.top_k };
    let seen = stale(gpu, 5 * tokens * moe.n_experts);
    let halt = Halt { words: &weights, at: n };
    let inputs =
        RouteInputs { logits: &plane, bias: None, correction: None, router: None, norm: None, slots: &slots };
    let outputs = RouteOutputs { ids: &ids, weights: &weights, list: &list, seen: Some((&seen, 3)) };
    let route = Route::halting(gpu, tokens, &moe, inputs, outputs, Some((halt, 7.0))).unwrap();

    let hidden = random.values(tokens * d);
    let (states, normed) = (floats(gpu, &hidden), stale(gpu, tokens * d));
    let coded = stale_coded(gpu, tokens, d, 32);
    let (weight, added) = (floats(gpu, &random.values(d)), floats(gpu, &random.values(tokens * d)));
    let outputs = floats(gpu, &random.values(n * d));
    let experts = Delta::Experts { outputs: &outputs, weights: &weights, top_k: moe.top_k, shared: None };
    let norms = [experts, Delta::Plane(&added, None)].map(|delta| {
        let out = NormOutputs { plane: Some(&normed), coded: &[&coded] };
        MixNorm::halting(gpu, tokens, d, 1e-6, &states, &weight, delta, None, out, Some(halt)).unwrap()
    });
    let state = || {
        let planes = [&states, &normed, &coded.codes, &coded.cells, &ids, &weights];
        planes.map(|plane| gpu.download(plane).unwrap())
    };
    let halt_now = || read(gpu, &weights)[n];

    run(gpu, |step| route.record(step, tokens));
    assert_eq!((halt_now(), read_words(gpu, &list.entries)[1]), (0.0, 0), "nothing is missing");
    let blocks = read(gpu, &seen);
    let blocks: Vec<_> = blocks.chunks(first.len()).collect();
    assert_eq!(blocks[3], first, "logits of the fourth layer");
    assert_stale(&[blocks[2], blocks[4]].concat());
    // One of the chosen experts goes.
    let gone = read_words(gpu, &ids)[5];
    gpu.write(&slots, u64::from(gone) * 4, &WorkList::ABSENT.to_le_bytes());
    run(gpu, |step| route.record(step, tokens));
    let work = read_words(gpu, &list.entries);
    assert_eq!((halt_now(), work[1]), (7.0, 1));
    assert!(work[0] > 1, "the layer that halts has its list");
    let before = state();
    gpu.write(&plane, 0, bytemuck::cast_slice(&logits(&mut random)));
    run(gpu, |step| {
        norms.iter().for_each(|norm| norm.record(step, tokens));
        route.record(step, tokens);
    });
    assert!(state() == before, "something was written behind a halt");
    assert_eq!(read_words(gpu, &list.entries)[0], 0, "experts behind a halt");
    gpu.write(&weights, 4 * n as u64, &0f32.to_le_bytes());
    for norm in &norms {
        let before = state();
        run(gpu, |step| norm.record(step, tokens));
        let after = state();
        assert!((0..4).all(|i| after[i] != before[i]), "a norm that goes on");
    }
}

fn moe(n_experts: usize, top_k: usize, norm_topk: bool) -> MoeSpec {
    MoeSpec { n_experts, top_k, d_expert: 8, norm_topk, ..MoeSpec::default() }
}

#[test]
fn experts_are_chosen_weighed_and_listed_as_on_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let logits = |tokens: usize, moe: &MoeSpec, spread: f32| -> Vec<f32> {
        let values = Random(tokens as u64 + 5).values(tokens * moe.n_experts);
        values.into_iter().map(|v| v * spread).collect()
    };
    for (moe, counts, biased) in [
        (moe(128, 8, true), &[1usize, 8, 9, 70][..], false),
        (moe(60, 4, false), &[3, 40], false),
        (moe(512, 10, true), &[1, 2, 33], false),
        (moe(7, 7, true), &[1, 30], true),
        (moe(5, 1, false), &[2, 300], false),
        (MoeSpec { router: RouterKind::Sigmoid, routed_scale: 2.5, ..moe(32, 4, true) }, &[4, 50], true),
        // Corrections of shares; the least divisor counts for some tokens.
        (MoeSpec { norm_min: 0.5, ..moe(64, 6, true) }, &[4, 50], true),
    ] {
        // One token has a kernel of its own.
        for tokens in counts.iter().copied().chain([1]) {
            check_route(gpu, &moe, tokens, biased, &logits(tokens, &moe, 6.0));
        }
    }
    for score in [GroupScore::Best, GroupScore::BestTwo] {
        let groups = Some(GroupSpec { n: 8, top: 3, score });
        let moe = MoeSpec { groups, router: RouterKind::Sigmoid, ..moe(64, 6, true) };
        check_route(gpu, &moe, 11, true, &logits(11, &moe, 4.0));
        check_route(gpu, &moe, 1, true, &logits(1, &moe, 4.0));
    }
}

/// One token's ids, weights and halt, list, pairs and the logits that others see, of steps in a row: while experts are
/// missing, behind the halt that this has set, and from when the halt is 0 again and they are there.
fn routed(
    gpu: &Gpu,
    moe: &MoeSpec,
    weights: &Weights,
    x: &[f32],
    bias: Option<&Slice>,
) -> Vec<[Vec<u32>; 5]> {
    let (n_experts, top_k) = (moe.n_experts, moe.top_k);
    let (logits, x) = (stale(gpu, n_experts), floats(gpu, x));
    let all: Vec<u32> = (0..n_experts as u32).collect();
    let some: Vec<u32> = all.iter().map(|&e| if e % 3 == 1 { WorkList::ABSENT } else { e }).collect();
    let [two, one] = [None, Some((weights, &x))].map(|router| {
        let (ids, shares, seen) =
            (stale(gpu, top_k), floats(gpu, &vec![0.0; top_k + 1]), stale(gpu, n_experts));
        let list =
            WorkList { entries: stale(gpu, 4 + 4 * top_k), pairs: stale(gpu, top_k), tokens: 1, top_k };
        let slots = words(gpu, &some);
        let inputs =
            RouteInputs { logits: &logits, bias, correction: bias, router, norm: None, slots: &slots };
        let places = RouteOutputs { ids: &ids, weights: &shares, list: &list, seen: Some((&seen, 0)) };
        let halt = Halt { words: &shares, at: top_k };
        let route = Route::halting(gpu, 1, moe, inputs, places, Some((halt, 3.0))).unwrap();
        let columns = Columns::whole(logits.clone(), n_experts);
        let product = FloatMatmul::new(gpu, weights, &x, 1, &columns).unwrap();
        (0..4)
            .map(|round| {
                if round == 2 {
                    gpu.write(&slots, 0, &all.iter().flat_map(|e| e.to_le_bytes()).collect::<Vec<_>>());
                    gpu.write(&shares, 4 * top_k as u64, &0f32.to_le_bytes());
                }
                run(gpu, |step| {
                    // Where a device binds too few buffers there is no such kernel.
                    if !route.makes_logits(1) {
                        product.record(step, 1);
                    }
                    route.record(step, 1);
                });
                [&ids, &shares, &list.entries, &list.pairs, &seen].map(|slice| read_words(gpu, slice))
            })
            .collect::<Vec<_>>()
    });
    assert_eq!(one, two, "{moe:?}");
    let halt = |round: usize| f32::from_bits(one[round][1][top_k]);
    let missing = one[0][0].iter().any(|&expert| expert % 3 == 1);
    assert_eq!([halt(0), halt(1), halt(2)], if missing { [3.0, 3.0, 0.0] } else { [0.0; 3] }, "{moe:?}");
    assert_eq!(one[1][2][0], if missing { 0 } else { top_k as u32 }, "entries behind a halt");
    one
}

#[test]
fn a_router_that_makes_its_logits_chooses_as_two_kernels_do() {
    let Some(gpu) = gpu() else { return };
    let mut random = Random(77);
    for (moe, cols, encoding, biased) in [
        (moe(128, 8, true), 2048, Encoding::Bf16, false),
        (moe(60, 4, false), 100, Encoding::F32, true),
        (moe(300, 6, true), 72, Encoding::F16, false),
        (MoeSpec { router: RouterKind::Sigmoid, ..moe(7, 2, true) }, 37, Encoding::F32, true),
        (moe(1024, 8, true), 64, Encoding::F32, false),
    ] {
        let n = moe.n_experts * cols;
        let bytes: Vec<u8> = match encoding {
            Encoding::F32 => random.values(n).into_iter().flat_map(f32::to_le_bytes).collect(),
            // Exponents of less than 1 in both kinds of halves.
            _ => (0..n).flat_map(|_| (random.next() as u16 & 0xbbff).to_le_bytes()).collect(),
        };
        let weights = Weights::new(upload(gpu, &bytes), moe.n_experts, cols, encoding);
        let bias = floats(gpu, &random.values(moe.n_experts));
        let mut x = random.values(cols);
        routed(gpu, &moe, &weights, &x, biased.then_some(&bias));
        x[cols / 2] = f32::NAN;
        let [_, shares, ..] = &routed(gpu, &moe, &weights, &x, biased.then_some(&bias))[0];
        assert!(shares[..moe.top_k].iter().all(|&share| f32::from_bits(share).is_nan()), "{shares:?}");
    }
}

#[test]
fn a_router_that_makes_its_input_does_what_norm_and_router_do() {
    let Some(gpu) = gpu() else { return };
    let mut random = Random(78);
    let (mut made, mut halted) = (0, 0);
    for (moe, cols, group, biased) in [
        (moe(128, 8, true), 2048, Some(64), false),
        (moe(60, 4, false), 104, Some(32), true),
        (moe(16, 2, true), 512, None, true),
        (MoeSpec { router: RouterKind::Sigmoid, ..moe(7, 2, true) }, 40, Some(64), false),
    ] {
        let n_experts = moe.n_experts;
        let bytes: Vec<u8> = random.values(n_experts * cols).into_iter().flat_map(f32::to_le_bytes).collect();
        let matrix = Weights::new(upload(gpu, &bytes), n_experts, cols, Encoding::F32);
        let (weight, bias) = (floats(gpu, &random.values(cols)), floats(gpu, &random.values(cols)));
        let (hidden, added) = (random.values(cols), floats(gpu, &random.values(cols)));
        let bias = biased.then_some(&bias);
        let some: Vec<u32> =
            (0..n_experts as u32).map(|e| if e % 3 == 1 { WorkList::ABSENT } else { e }).collect();
        let slots = words(gpu, &some);
        // Apart, and in one; going on, and behind a halt.
        let [apart, one] = [false, true].map(|fused| {
            let (eps, residual) = (1e-5, 0.5);
            let hidden = floats(gpu, &hidden);
            let normed = stale(gpu, cols);
            let plane = group.map(|group| {
                let plane = CodedPlane::new(gpu, 1, cols, group).unwrap();
                let stales = |slice: &Slice| gpu.write(slice, 0, &vec![0xa5; slice.len() as usize]);
                stales(&plane.codes);
                stales(&plane.cells);
                plane
            });
            let planes: Vec<&CodedPlane> = plane.iter().collect();
            let (logits, seen) = (stale(gpu, n_experts), stale(gpu, n_experts));
            let (ids, shares) = (stale(gpu, moe.top_k), floats(gpu, &vec![0.0; moe.top_k + 1]));
            let list = WorkList {
                entries: stale(gpu, 4 + 4 * moe.top_k),
                pairs: stale(gpu, moe.top_k),
                tokens: 1,
                top_k: moe.top_k,
            };
            let halt = Halt { words: &shares, at: moe.top_k };
            let norm = RouterNorm {
                hidden: &hidden,
                weight: &weight,
                added: &added,
                bias,
                eps,
                residual,
                coded: plane.as_ref(),
            };
            let inputs = RouteInputs {
                logits: &logits,
                bias: None,
                correction: None,
                router: Some((&matrix, &normed)),
                norm: fused.then_some(norm),
                slots: &slots,
            };
            let outputs = RouteOutputs { ids: &ids, weights: &shares, list: &list, seen: Some((&seen, 0)) };
            let route = Route::halting(gpu, 1, &moe, inputs, outputs, Some((halt, 5.0))).unwrap();
            made += usize::from(route.norms(1));
            let outputs = NormOutputs { plane: Some(&normed), coded: &planes };
            let delta = Delta::Plane(&added, bias);
            let mix = MixNorm::halting(gpu, 1, cols, eps, &hidden, &weight, delta, None, outputs, Some(halt))
                .unwrap();
            let mix = mix.scaled(residual);
            let product =
                FloatMatmul::new(gpu, &matrix, &normed, 1, &Columns::whole(logits.clone(), n_experts))
                    .unwrap();
            (0..2)
                .map(|_| {
                    run(gpu, |step| {
                        if !route.norms(1) {
                            mix.record(step, 1);
                        }
                        if !route.makes_logits(1) {
                            product.record(step, 1);
                        }
                        route.record(step, 1);
                    });
                    let mut all = [&hidden, &normed, &ids, &shares, &list.entries, &list.pairs]
                        .map(|slice| read_words(gpu, slice))
                        .to_vec();
                    all.extend(
                        plane
                            .iter()
                            .flat_map(|plane| [&plane.codes, &plane.cells].map(|s| read_words(gpu, s))),
                    );
                    all
                })
                .collect::<Vec<_>>()
        });
        assert_eq!(apart, one, "{moe:?}, {cols} columns");
        // The second one stands behind a halt, if the first has set it.
        let missing = one[0][2].iter().any(|&expert| expert % 3 == 1);
        assert_eq!(f32::from_bits(one[0][3][moe.top_k]), if missing { 5.0 } else { 0.0 }, "{moe:?}");
        assert_eq!(one[0][0] == one[1][0], missing, "hidden states behind a halt");
        halted += usize::from(missing);
    }
    assert!((made == 4 || made == 0) && halted > 0, "{made}, {halted}");
    eprintln!("{made} of 4 in one kernel");
}

#[test]
fn ties_go_to_the_lower_expert_and_extreme_logits_choose_as_on_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let moe = moe(16, 4, true);
    let rows: [[f32; 16]; 4] = [
        [1.0; 16],
        std::array::from_fn(|i| (i % 3) as f32),
        // Logits that differ in their last bit only have equal scores, here or there.
        std::array::from_fn(|i| f32::from_bits(5f32.to_bits() + (i as u32 * 7) % 16)),
        // All but one without weight.
        std::array::from_fn(|i| if i == 9 { 200.0 } else { -(i as f32) }),
    ];
    let logits: Vec<f32> = rows.into_iter().flatten().collect();
    check_route(gpu, &moe, logits.len() / 16, false, &logits);
    rows.iter().for_each(|row| check_route(gpu, &moe, 1, false, row));
}

#[test]
fn logits_that_are_not_numbers_make_weights_that_are_none() {
    let Some(gpu) = gpu() else { return };
    let moe = moe(16, 4, true);
    for bad in [f32::NAN, -f32::NAN, f32::INFINITY] {
        let mut logits = Random(3).values(3 * 16);
        logits[16 + 5] = bad;
        check_route(gpu, &moe, 3, false, &logits);
    }
    check_route(gpu, &moe, 1, false, &[f32::NEG_INFINITY; 16]);
}
