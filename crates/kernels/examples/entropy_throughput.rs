//! Speed of the decoders of entropy-coded records: `cargo run --release -p smoe-kernels --example entropy_throughput`.
//!
//! Records of a model of 768 x 2048, normal codes, sixteen of them one after another: their coded bytes and their slots
//! are more than L2 holds. G codes/s counts decoded codes; "in" is what a drive would have to bring, "out" what is
//! written. Medians; the copy of as many slot bytes runs in the same passes. EXP-KERNEL-07.
#![allow(clippy::print_stdout)]

use std::sync::Barrier;
use std::time::Instant;

use smoe_format::entropy::{SLACK, encode_record};
use smoe_format::{Encoding, LayerTable, TensorEntry, Uniform, Zero};
use smoe_kernels::{EntropyDecoder, Kernels};

const RECORDS: usize = 16;
const PASSES: usize = 9;

fn main() {
    let mut end = 0;
    let tensors = [(768, 2048), (768, 2048), (2048, 768)].map(|(rows, cols)| {
        let encoding = Encoding::Uniform(Uniform::new(4, 128, Zero::Symmetric).expect("valid"));
        let len = encoding.tensor_bytes(rows, cols).expect("fits");
        let entry = TensorEntry { encoding, rows, cols, offset: end, len };
        end += len;
        entry
    });
    let layer = LayerTable { layer: 0, n_experts: 1, record_len: end.next_multiple_of(16384), tensors };
    let codes = (3 * 768 * 2048 * RECORDS) as f64;
    for step in [0.93, 0.44] {
        let start = Instant::now();
        let records: Vec<(Vec<u8>, usize)> = (0..RECORDS).map(|i| record(&layer, step, i as u64)).collect();
        let encode = codes / start.elapsed().as_secs_f64() / 1e9;
        let bytes: usize = records.iter().map(|(_, len)| len).sum();
        println!(
            "step {step} sigma: {:.3} bits on disk, encoded at {encode:.3} G codes/s (weights drawn, too)",
            8.0 * bytes as f64 / codes
        );
        let mut decoders: Vec<EntropyDecoder> =
            Kernels::available().into_iter().map(EntropyDecoder::new).collect();
        decoders.dedup();
        for threads in [1, 2] {
            let copy = seconds(&records, &layer, threads, &|raw, _, slot| {
                slot[..raw.len()].copy_from_slice(raw);
                let rest = slot.len() - raw.len();
                slot[raw.len()..].copy_from_slice(&raw[..rest]);
            });
            let out = (layer.record_len * RECORDS) as f64;
            println!("  {threads} thr copy    {:6.2} GB/s out", out / copy / 1e9);
            for decoder in &decoders {
                let time = seconds(&records, &layer, threads, &|raw, len, slot| {
                    decoder.decode(raw, len, &layer, slot).expect("own records");
                });
                println!(
                    "  {threads} thr {:<7} {:6.2} G codes/s, in {:5.2} GB/s, out {:5.2} GB/s",
                    decoder.to_string(),
                    codes / time / 1e9,
                    bytes as f64 / time / 1e9,
                    out / time / 1e9
                );
            }
        }
    }
}

/// A record with slack behind it, and its length.
fn record(layer: &LayerTable, step: f64, seed: u64) -> (Vec<u8>, usize) {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) + 1;
    let mut uniform = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    };
    let mut code = || {
        let normal = (-2.0 * uniform().ln()).sqrt() * (std::f64::consts::TAU * uniform()).cos();
        (normal / step + 8.0).clamp(0.0, 15.0) as u8
    };
    let mut tiles = vec![0; layer.record_len];
    for tile in tiles.chunks_exact_mut(2112) {
        tile[..2048].fill_with(|| code() | code() << 4);
    }
    let mut raw = Vec::new();
    encode_record(&tiles, layer, &mut raw);
    let len = raw.len();
    raw.resize(len + SLACK, 0);
    (raw, len)
}

/// Seconds of a pass over all records by so many threads, each with half of them and slots of its own.
fn seconds(
    records: &[(Vec<u8>, usize)],
    layer: &LayerTable,
    threads: usize,
    work: &(impl Fn(&[u8], usize, &mut [u8]) + Sync),
) -> f64 {
    let share = RECORDS / threads;
    let mut slots = vec![vec![0u8; layer.record_len]; RECORDS];
    let barrier = Barrier::new(threads);
    let mut times: Vec<f64> = std::thread::scope(|scope| {
        let workers: Vec<_> = records
            .chunks(share)
            .zip(slots.chunks_mut(share))
            .map(|(records, slots)| {
                let barrier = &barrier;
                scope.spawn(move || {
                    (0..PASSES)
                        .map(|_| {
                            barrier.wait();
                            let start = Instant::now();
                            for ((raw, len), slot) in records.iter().zip(slots.iter_mut()) {
                                work(raw, *len, slot);
                            }
                            start.elapsed().as_secs_f64()
                        })
                        .collect::<Vec<f64>>()
                })
            })
            .collect();
        let times: Vec<Vec<f64>> = workers.into_iter().map(|w| w.join().expect("no panic")).collect();
        (0..PASSES).map(|i| times.iter().map(|t| t[i]).fold(0.0, f64::max)).collect()
    });
    times.sort_by(f64::total_cmp);
    times[PASSES / 2]
}
