//! Everything of a layer that is no matrix product, against the CPU's kernels.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod attention;
#[path = "../common/mod.rs"]
mod common;
mod delta_net;
mod latent;
mod latent_lone;
mod norm;
mod rope;
mod route;
mod vocabulary;

use std::sync::OnceLock;

use common::Random;
use proptest::prelude::*;
use smoe_format::half::f16_to_f32;
use smoe_format::spec::{GroupScore, GroupSpec, MoeSpec, RouterKind};
use smoe_format::{Encoding, Uniform, Zero};
use smoe_gpu::{
    Angles, Argmax, Attention, AttentionGate, AttentionHeads, AttentionOutputs, AttentionScratch,
    CodedMatmul, CodedPlane, Columns, Delta, DeltaInput, DeltaLayout, DeltaNet, DeltaNetWeights,
    DeltaOutputs, DeltaScratch, Embed, FloatMatmul, Gpu, Halt, HeadColumns, HeadInput, HeadMatmul, HeadPlane,
    HeadTurn, KV_BLOCK, KvFormat, KvLayout, Lanes, LatentAppend, LatentAttention, LatentCut, LatentEntry,
    LatentExit, LatentInput, LatentLayout, LatentNorm, LatentQueries, LatentRow, MixNorm, NormInput,
    NormMatmul, NormOutputs, OwnMatmul, Projections, QkNorm, Quantise, RopeAppend, RopeInput, RopePairs,
    Route, RouteInputs, RouteOutputs, RouterNorm, Rows, Shared, Slice, StateMark, StateRun, StateRuns, Step,
    Tuning, Weights, WorkList,
};
use smoe_kernels::{
    DeltaInput as CpuDeltaInput, DeltaMark, DeltaRun, DeltaScratch as CpuDeltaScratch, DeltaShape,
    DeltaWeights, HeadInput as CpuHeadInput, HeadScratch, Kernels, KvBlocks, KvPlane, KvType, Matrix, Pool,
    RopeStyle, delta_net as cpu_delta_net, head_matmul, sigmoid, top_k,
};

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

const FORMATS: [(KvFormat, KvType); 3] =
    [(KvFormat::F32, KvType::F32), (KvFormat::F16, KvType::F16), (KvFormat::Q8, KvType::Q8)];

/// The first byte of a row of a cache.
fn row_at(kv: &KvLayout, block: u32, plane: usize, head: usize, position: usize) -> usize {
    (((2 * block as usize + plane) * kv.n_kv_heads + head) * KV_BLOCK + position % KV_BLOCK) * kv.row_bytes()
}
