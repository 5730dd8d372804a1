//! Speed of coded products on this machine: `cargo run --release -p smoe-kernels --example throughput`.
//!
//! Every figure is a whole call of the parallel driver, forks included, timed by the calling thread, which
//! is one of the workers. "Cold" walks over different matrices, more than any cache holds; "hot" repeats
//! one. GB/s counts codes and scales. The stream is what the same threads read with plain loads in the
//! same seconds. Medians. Arguments: a part of a kernel set's name, or `quick`.
#![allow(clippy::print_stdout)]

use std::hint::black_box;
use std::time::Instant;

use smoe_format::{Encoding, Uniform, Zero};
use smoe_kernels::{Activations, Input, Kernels, Matrix, Pool, matmul};

/// Bytes of all the matrices of a cold pass.
const COLD: usize = 640 << 20;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let quick = arguments.iter().any(|a| a == "quick");
    let wanted = arguments.iter().find(|a| *a != "quick");
    let passes = if quick { 3 } else { 7 };
    for kernels in Kernels::available().into_iter().rev() {
        if kernels.name() == "scalar" || wanted.is_some_and(|w| !kernels.name().contains(w.as_str())) {
            continue;
        }
        for (rows, cols) in [(1536, 4096), (768, 2048)] {
            for bits in [4, 8] {
                bench(kernels, rows, cols, bits, passes);
            }
        }
        for bits in [2, 3, 5, 6] {
            bench_width(kernels, bits, passes);
        }
    }
}

fn uniform(bits: u8) -> Uniform {
    Uniform::new(bits, 64, Zero::Symmetric).expect("valid")
}

/// `count` tensors of random codes and a scale of 1.
fn tensors(bits: u8, rows: usize, cols: usize, count: usize) -> Vec<u8> {
    let uniform = uniform(bits);
    let mut state = 1u64;
    let size = Encoding::Uniform(uniform).tensor_bytes(rows, cols).expect("fits");
    let mut bytes = vec![0; size * count];
    for tile in bytes.chunks_exact_mut(uniform.tile_bytes()) {
        let (codes, scales) = tile.split_at_mut(uniform.code_bytes());
        for eight in codes.chunks_exact_mut(8) {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            eight.copy_from_slice(&state.to_le_bytes());
        }
        scales.chunks_exact_mut(2).for_each(|s| s.copy_from_slice(&0x3c00u16.to_le_bytes()));
    }
    bytes
}

fn quantised(kernels: Kernels, tokens: usize, cols: usize) -> Activations {
    let x: Vec<f32> = (0..tokens * cols).map(|i| ((i * 7919) % 1009) as f32 - 500.0).collect();
    let mut a = Activations::with_capacity(tokens, cols);
    a.quantise(kernels, &x, tokens, cols, 64);
    a
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Seconds of `passes` calls of `f`, the median.
fn seconds(passes: usize, mut f: impl FnMut()) -> f64 {
    median(
        (0..passes)
            .map(|_| {
                let start = Instant::now();
                f();
                start.elapsed().as_secs_f64()
            })
            .collect(),
    )
}

fn stream(pool: &Pool, bytes: &[u8]) -> f64 {
    let part = bytes.len() / (8 * pool.threads());
    let time = seconds(3, || {
        pool.run(8 * pool.threads(), &|i| {
            let (chunks, _) = bytes[i * part..(i + 1) * part].as_chunks::<64>();
            let mut sums = [0u64; 8];
            for chunk in chunks {
                for (sum, eight) in sums.iter_mut().zip(chunk.as_chunks::<8>().0) {
                    *sum ^= u64::from_le_bytes(*eight);
                }
            }
            black_box(sums);
        });
    });
    bytes.len() as f64 / time / 1e9
}

fn bench(kernels: Kernels, rows: usize, cols: usize, bits: u8, passes: usize) {
    let encoding = Encoding::Uniform(uniform(bits));
    let size = encoding.tensor_bytes(rows, cols).expect("fits");
    let count = COLD / size;
    let bytes = tensors(bits, rows, cols, count);
    let matrix = |i: usize| Matrix::new(&bytes[i * size..(i + 1) * size], rows, cols, encoding);
    let macs = (rows * cols) as f64;
    for threads in [1, 2] {
        let pool = Pool::new(threads, false);
        let mut out = vec![0.0; 512 * rows];
        let mut line = format!("{:<7} {rows}x{cols} q{bits} {threads} thr:", kernels.name());
        line += &format!(" stream {:.1} GB/s;", stream(&pool, &bytes));
        for tokens in [1, 8, 32] {
            let a = quantised(kernels, tokens, cols);
            let coded = [a.view()];
            let input = Input::new(&[], tokens, &coded);
            let time = seconds(passes.min(3), || {
                (0..count)
                    .for_each(|i| matmul(&pool, kernels, &matrix(i), &input, &mut out[..tokens * rows]));
            }) / count as f64;
            line += &match tokens {
                1 => format!(" cold T=1 {:.1} GB/s", size as f64 / time / 1e9),
                _ => format!(", T={tokens} {:.0} GMAC/s", macs * tokens as f64 / time / 1e9),
            };
        }
        for tokens in [1, 2, 4, 8, 32, 512] {
            let a = quantised(kernels, tokens, cols);
            let coded = [a.view()];
            let input = Input::new(&[], tokens, &coded);
            let repeat = (400 / tokens).max(1);
            let time = seconds(3 * passes, || {
                for _ in 0..repeat {
                    matmul(&pool, kernels, &matrix(0), &input, &mut out[..tokens * rows]);
                }
            }) / repeat as f64;
            line += &match tokens {
                1 => format!("; hot T=1 {:.1} GB/s", size as f64 / time / 1e9),
                _ => format!(", T={tokens} {:.0} GMAC/s", macs * tokens as f64 / time / 1e9),
            };
        }
        println!("{line}");
    }
}

/// The other widths, hot, one thread.
fn bench_width(kernels: Kernels, bits: u8, passes: usize) {
    let (rows, cols) = (768, 2048);
    let encoding = Encoding::Uniform(uniform(bits));
    let bytes = tensors(bits, rows, cols, 1);
    let matrix = Matrix::new(&bytes, rows, cols, encoding);
    let pool = Pool::new(1, false);
    let mut line = format!("{:<7} {rows}x{cols} q{bits} 1 thr hot:", kernels.name());
    for tokens in [1, 4, 8, 64] {
        let a = quantised(kernels, tokens, cols);
        let coded = [a.view()];
        let input = Input::new(&[], tokens, &coded);
        let mut out = vec![0.0; tokens * rows];
        let time = seconds(5 * passes, || {
            (0..20).for_each(|_| matmul(&pool, kernels, &matrix, &input, &mut out));
        }) / 20.0;
        if tokens == 1 {
            line += &format!(" T=1 {:.1} GB/s", bytes.len() as f64 / time / 1e9);
        }
        line += &format!(" T={tokens} {:.0} GMAC/s", (rows * cols * tokens) as f64 / time / 1e9);
    }
    println!("{line}");
}
