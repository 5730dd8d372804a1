//! Speed of the parallel drivers on this machine: `cargo run --release -p smoe-kernels --example throughput`.
//!
//! Every figure is a whole call, forks included, timed by the calling thread, which is one of the workers.
//! "Cold" walks over different matrices, more than any cache holds; "hot" repeats one. GB/s counts codes and
//! scales. The stream is what the same threads read with plain loads in the same seconds. Medians, and what
//! is compared is run in turn. Arguments: names of kernel sets, `coded`, `tables`, `experts`, `clients`,
//! `attention`, `sparse`, `quick`.
#![allow(clippy::print_stdout)]

use std::hint::black_box;
use std::time::Instant;

use smoe_format::spec::Activation;
use smoe_format::{Encoding, Table, Uniform, Zero};
use smoe_kernels::{
    Activations, AttentionHeads, AttentionScratch, Choices, ExpertCall, ExpertScratch, IndexHeads, Input,
    Kernels, KvBlocks, KvPlane, KvType, Matrix, Pool, Sight, attend, choose, expert_ffn, matmul,
};

/// Bytes of all the matrices of a cold pass.
const COLD: usize = 640 << 20;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let among = |names: &[&str]| names.iter().any(|name| arguments.iter().any(|a| a == name));
    let passes = if among(&["quick"]) { 3 } else { 7 };
    let sections = ["coded", "tables", "experts", "clients", "attention", "sparse"];
    let wants = |section: &str| !among(&sections) || among(&[section]);
    let sets: Vec<Kernels> = Kernels::available().into_iter().skip(1).rev().collect();
    let names: Vec<&str> = sets.iter().map(|k| k.name()).collect();
    for kernels in sets {
        if among(&names) && !among(&[kernels.name()]) {
            continue;
        }
        if wants("coded") {
            for (rows, cols) in [(1536, 4096), (1536, 2048), (2048, 768)] {
                for bits in [4, 8] {
                    bench(kernels, rows, cols, bits, passes);
                }
            }
            for bits in [2, 3, 5, 6] {
                bench_width(kernels, bits, passes);
            }
        }
        if wants("tables") {
            bench_tables(kernels, passes);
        }
        if wants("experts") {
            bench_experts(kernels, passes);
        }
        if wants("clients") {
            bench_clients(kernels, passes);
        }
        if wants("attention") {
            for ty in [KvType::F16, KvType::F32, KvType::Q8] {
                bench_attention(kernels, ty, passes);
            }
        }
        if wants("sparse") {
            bench_sparse(kernels, passes);
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
    bytes.len() as f64 / median((0..3).map(|_| once(pool, bytes)).collect()) / 1e9
}

fn read(bytes: &[u8]) {
    let mut sums = [0u64; 8];
    for chunk in bytes.as_chunks::<64>().0 {
        for (sum, eight) in sums.iter_mut().zip(chunk.as_chunks::<8>().0) {
            *sum ^= u64::from_le_bytes(*eight);
        }
    }
    black_box(sums);
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
        for tokens in [1, 2, 3, 8, 13, 32] {
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
        for tokens in [1, 2, 3, 4, 7, 8, 13, 16, 32, 64, 128, 512] {
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

/// Level tables against uniform codes of the same bits and group, pass by pass: the ratios of their times.
fn bench_tables(kernels: Kernels, passes: usize) {
    let (rows, cols) = (768, 2048);
    let table = |bits: u8, step: i32| {
        let most = (1 << bits) / 2 * step;
        let levels: Vec<i8> = (0..1 << bits).map(|code| (code * step - most).max(-127) as i8).collect();
        Encoding::Table(Table::new(bits, 64, &levels).expect("valid"))
    };
    let pool = Pool::new(1, false);
    for bits in [4, 3, 2] {
        let encodings = [
            ("uniform", Encoding::Uniform(uniform(bits))),
            ("levels to 127", table(bits, 256 >> bits)),
            ("levels to 16", table(bits, 32 >> bits)),
        ];
        let size = encodings[0].1.tensor_bytes(rows, cols).expect("fits");
        let count = COLD / size;
        let bytes = tensors(bits, rows, cols, count);
        let mut line = format!("{:<7} {rows}x{cols} {bits} bits 1 thr:", kernels.name());
        for (cold, tokens) in [(true, 1), (false, 1), (false, 2), (false, 4), (false, 8), (false, 64)] {
            let a = quantised(kernels, tokens, cols);
            let coded = [a.view()];
            let input = Input::new(&[], tokens, &coded);
            let mut out = vec![0.0; tokens * rows];
            let repeat = if cold { count } else { (200 / tokens).max(4) };
            let mut times = [const { Vec::new() }; 3];
            for _ in 0..if cold { passes.min(5) } else { 3 * passes } {
                for (times, (_, encoding)) in times.iter_mut().zip(&encodings) {
                    times.push(seconds(1, || {
                        for i in 0..repeat {
                            let at = if cold { i * size } else { 0 };
                            let matrix = Matrix::new(&bytes[at..at + size], rows, cols, *encoding);
                            matmul(&pool, kernels, &matrix, &input, &mut out);
                        }
                    }));
                }
            }
            let macs = (rows * cols * tokens * repeat) as f64;
            let [uniform, others @ ..] = &times;
            let place = if cold { "cold" } else { "hot" };
            line += &format!("\n  {place} T={tokens}: {:.0} GMAC/s;", macs / median(uniform.clone()) / 1e9);
            for (times, (name, _)) in others.iter().zip(&encodings[1..]) {
                let ratios: Vec<f64> = times.iter().zip(uniform).map(|(a, b)| a / b).collect();
                line += &format!(" {name} {:.2} x the time;", median(ratios));
            }
        }
        println!("{line}");
    }
}

/// Width of the model and of an expert: Qwen3-30B-A3B.
const EXPERT: [usize; 2] = [2048, 768];
/// Experts of one call, as the engine has it.
const CALL: usize = 32;

/// An expert of 4-bit tensors that lie one after the other.
fn expert<'a>(bytes: &'a [u8], expert: usize, tokens: &'a [u32]) -> ExpertCall<'a> {
    let [d_model, d_ff] = EXPERT;
    let encoding = Encoding::Uniform(uniform(4));
    let size = encoding.tensor_bytes(d_ff, d_model).expect("fits");
    let part = |i: usize| &bytes[(3 * expert + i) * size..][..size];
    ExpertCall {
        gate: Matrix::new(part(0), d_ff, d_model, encoding),
        up: Matrix::new(part(1), d_ff, d_model, encoding),
        down: Matrix::new(part(2), d_model, d_ff, encoding),
        bias: None,
        tokens,
    }
}

/// The experts of a layer: decode from memory, and a prompt.
fn bench_experts(kernels: Kernels, passes: usize) {
    let ([d_model, d_ff], n_experts) = (EXPERT, 128);
    let encoding = Encoding::Uniform(uniform(4));
    let size = encoding.tensor_bytes(d_ff, d_model).expect("fits");
    let experts = COLD / (3 * size);
    let bytes = tensors(4, d_ff, d_model, 3 * experts);
    for threads in [1, 2] {
        let pool = Pool::new(threads, false);
        let mut line = format!("{:<7} experts {d_model} x {d_ff} q4 {threads} thr:", kernels.name());
        let mut scratch = ExpertScratch::with_capacity(512 * 8, d_model, d_ff, false);
        // Decode: eight experts and one token, then the same bytes as a stream, the next ones in turn.
        let (at_once, a) = (8, quantised(kernels, 1, d_model));
        let coded = [a.view()];
        let input = Input::new(&[], 1, &coded);
        let mut out = vec![0.0; at_once * d_model];
        let (mut computed, mut read) = (Vec::new(), Vec::new());
        for first in (0..experts - 2 * at_once).step_by(2 * at_once) {
            let calls: Vec<ExpertCall<'_>> =
                (first..first + at_once).map(|e| expert(&bytes, e, &[0])).collect();
            computed.push(seconds(1, || {
                expert_ffn(&pool, kernels, &calls, Activation::SwiGlu, &input, &mut scratch, &mut out);
            }));
            let len = 3 * size * at_once;
            read.push(once(&pool, &bytes[3 * size * (first + at_once)..][..len]));
        }
        let gb = (3 * size * at_once) as f64 / 1e9;
        let (computed, read) = (gb / median(computed), gb / median(read));
        line += &format!(" decode 8 experts {computed:.1} GB/s of a stream of {read:.1};");
        // A prompt: every expert has as many of 512 tokens, eight apart so that they must be gathered.
        for each in [8, 32] {
            let a = quantised(kernels, 512, d_model);
            let coded = [a.view()];
            let input = Input::new(&[], 512, &coded);
            let chosen: Vec<u32> = (0..each as u32).map(|i| i * 8 % 512 + i / 64).collect();
            let calls: Vec<ExpertCall<'_>> = (0..n_experts).map(|e| expert(&bytes, e, &chosen)).collect();
            let mut out = vec![0.0; CALL * each * d_model];
            let time = seconds(passes, || {
                for calls in calls.chunks(CALL) {
                    expert_ffn(&pool, kernels, calls, Activation::SwiGlu, &input, &mut scratch, &mut out);
                }
            });
            let macs = (3 * d_model * d_ff * each * n_experts) as f64;
            line += &format!(" prompt {n_experts} experts x {each} tokens {:.0} GMAC/s;", macs / time / 1e9);
        }
        println!("{line}");
    }
}

/// A step of eight clients from memory: the union of a layer's experts and products of resident weights, each followed by
/// a stream over as many other bytes; medians of the quotients, and the quartiles.
fn bench_clients(kernels: Kernels, passes: usize) {
    let ([d_model, d_ff], clients) = (EXPERT, 8);
    let encoding = Encoding::Uniform(uniform(4));
    let size = encoding.tensor_bytes(d_ff, d_model).expect("fits");
    let experts = COLD / (3 * size);
    let bytes = tensors(4, d_ff, d_model, 3 * experts);
    // Tokens of each expert, so many as with independent routing: 46 experts have 64 pairs.
    let tokens: Vec<Vec<u32>> = [(31, 1), (12, 2), (3, 3)]
        .iter()
        .flat_map(|&(n, each)| (0..n).map(move |i| (0..each).map(|k| (i * 3 + k * 2 + each) % 8).collect()))
        .collect();
    let pool = Pool::new(2, false);
    let mut scratch = ExpertScratch::with_capacity(128, d_model, d_ff, false);
    let mut line = format!("{:<7} {clients} clients, q4, 2 thr, of a stream:", kernels.name());
    let a = quantised(kernels, clients, d_model);
    let coded = [a.view()];
    let input = Input::new(&[], clients, &coded);
    let mut out = vec![0.0; 151_936 / 8 * clients];
    // Where the next bytes that are cold begin, in experts.
    let mut cursor = 0;
    let mut next = |n: usize| {
        if cursor + n > experts {
            cursor = 0;
        }
        cursor += n;
        cursor - n
    };
    let mut measure = |name: &str, n: usize, f: &mut dyn FnMut(usize)| {
        let (mut quotients, mut streams) = (Vec::new(), Vec::new());
        for _ in 0..4 * passes {
            let at = next(n);
            let time = seconds(1, || f(at));
            let at = next(n);
            let stream = once(&pool, &bytes[3 * size * at..][..3 * size * n]);
            quotients.push(stream / time);
            streams.push((3 * size * n) as f64 / stream / 1e9);
        }
        quotients.sort_by(f64::total_cmp);
        let [low, mid, high] = [1, 2, 3].map(|q| quotients[quotients.len() * q / 4]);
        line += &format!(" {name} {mid:.3} ({low:.3} to {high:.3}, of {:.1} GB/s);", median(streams));
    };
    measure("union of 46 experts", tokens.len(), &mut |first| {
        let mut pairs = 0;
        for (chunk, tokens) in tokens.chunks(CALL).enumerate() {
            let calls: Vec<ExpertCall<'_>> =
                tokens.iter().enumerate().map(|(i, t)| expert(&bytes, first + chunk * CALL + i, t)).collect();
            pairs = tokens.iter().map(Vec::len).sum();
            let out = &mut out[..pairs * d_model];
            expert_ffn(&pool, kernels, &calls, Activation::SwiGlu, &input, &mut scratch, out);
        }
        black_box(pairs);
    });
    for tokens in [1, 2, 3, 8] {
        let a = quantised(kernels, tokens, d_model);
        let coded = [a.view()];
        let input = Input::new(&[], tokens, &coded);
        // Eight experts' bytes as one matrix, as a head's part.
        let (n, rows) = (8, 24 * d_ff);
        measure(&format!("{rows} x {d_model}, T={tokens}"), n, &mut |first| {
            let matrix = Matrix::new(&bytes[3 * size * first..][..3 * size * n], rows, d_model, encoding);
            matmul(&pool, kernels, &matrix, &input, &mut out[..tokens * rows]);
        });
    }
    println!("{line}");
}

/// Seconds of reading `bytes` once.
fn once(pool: &Pool, bytes: &[u8]) -> f64 {
    let part = bytes.len() / (8 * pool.threads());
    seconds(1, || {
        pool.run(8 * pool.threads(), &|i| {
            read(&bytes[i * part..(i + 1) * part]);
        });
    })
}

/// Attention of 64 tokens of a prompt: a step's way, and token by token.
fn bench_attention(kernels: Kernels, ty: KvType, passes: usize) {
    let (n_kv_heads, per_kv, head_dim, block, tokens) = (4, 8, 128, 32, 64);
    let heads =
        AttentionHeads { n_kv_heads, per_kv, head_dim, value_dim: head_dim, scale: 0.09, sinks: None };
    let (row_bytes, width) = (ty.row_bytes(head_dim), n_kv_heads * per_kv * head_dim);
    let queries: Vec<f32> = (0..tokens * width).map(|i| ((i * 7919) % 1009) as f32 / 500.0 - 1.0).collect();
    for threads in [1, 2] {
        let pool = Pool::new(threads, false);
        let mut line = format!("{:<7} attention {ty:?} {threads} thr, GMAC/s (by token):", kernels.name());
        for context in [256, 512, 1024, 2048, 8192] {
            let blocks = context / block;
            let mut plane = vec![0; blocks * n_kv_heads * block * row_bytes];
            for (i, row) in plane.chunks_exact_mut(row_bytes).enumerate() {
                let x: Vec<f32> =
                    (0..head_dim).map(|d| ((i * 31 + d * 7919) % 1009) as f32 / 500.0 - 1.0).collect();
                kernels.store_kv_row(ty, &x, row);
            }
            // Blocks lie in another order than positions.
            let table: Vec<u32> = (0..blocks as u32).map(|b| (b * 5 + 1) % blocks as u32).collect();
            let sight = |t: usize, head: usize| {
                let plane = KvPlane {
                    ty,
                    bytes: &plane,
                    row_bytes,
                    block_stride: n_kv_heads * block * row_bytes,
                    head_offset: head * block * row_bytes,
                };
                let blocks = KvBlocks { keys: plane, values: plane, table: &table, block_positions: block };
                Sight { blocks, visible: 0..context - tokens + 1 + t, chosen: None }
            };
            let mut scratch = AttentionScratch::new(threads, head_dim, head_dim, context);
            let mut out = vec![0.0; tokens * width];
            let mut one = vec![0.0; tokens * width];
            let (mut step, mut single) = (Vec::new(), Vec::new());
            for _ in 0..passes {
                step.push(seconds(1, || {
                    attend(&pool, kernels, &heads, &queries, &sight, &mut scratch, &mut out);
                }));
                single.push(seconds(1, || {
                    for (t, out) in one.chunks_exact_mut(width).enumerate() {
                        let queries = &queries[t * width..][..width];
                        let sight = |_: usize, head: usize| sight(t, head);
                        attend(&pool, kernels, &heads, queries, &sight, &mut scratch, out);
                    }
                }));
                assert_eq!(out, one, "a prompt's attention is that of its tokens");
            }
            let seen: usize = (0..tokens).map(|t| context - tokens + 1 + t).sum();
            let giga = (2 * seen * width) as f64 / 1e9;
            let (step, single) = (giga / median(step), giga / median(single));
            line += &format!(" {context}: {step:.1} ({single:.1})");
        }
        println!("{line}");
    }
}

/// A cache of one head in f16, in blocks that lie in another order than positions.
struct Cache {
    bytes: Vec<u8>,
    table: Vec<u32>,
    row_bytes: usize,
}

impl Cache {
    const BLOCK: usize = 32;

    fn new(kernels: Kernels, positions: usize, dim: usize) -> Self {
        let (row_bytes, blocks) = (KvType::F16.row_bytes(dim), positions / Self::BLOCK);
        let mut bytes = vec![0; positions * row_bytes];
        for (i, row) in bytes.chunks_exact_mut(row_bytes).enumerate() {
            let x: Vec<f32> = (0..dim).map(|d| ((i * 31 + d * 7919) % 1009) as f32 / 500.0 - 1.0).collect();
            kernels.store_kv_row(KvType::F16, &x, row);
        }
        let table = (0..blocks as u32).map(|b| (b * 5 + 1) % blocks as u32).collect();
        Self { bytes, table, row_bytes }
    }

    fn sight(&self, positions: usize) -> Sight<'_> {
        let plane = KvPlane {
            ty: KvType::F16,
            bytes: &self.bytes,
            row_bytes: self.row_bytes,
            block_stride: Self::BLOCK * self.row_bytes,
            head_offset: 0,
        };
        let blocks =
            KvBlocks { keys: plane, values: plane, table: &self.table, block_positions: Self::BLOCK };
        Sight { blocks, visible: 0..positions, chosen: None }
    }
}

/// Latent attention in GLM-5's shape, over all positions and over those that its indexer chooses.
fn bench_sparse(kernels: Kernels, passes: usize) {
    let (per_kv, head_dim, value_dim) = (64, 576, 512);
    let heads = AttentionHeads { n_kv_heads: 1, per_kv, head_dim, value_dim, scale: 0.06, sinks: None };
    let index = IndexHeads { n_heads: 32, head_dim: 128, top_k: 2048 };
    let values =
        |n: usize| -> Vec<f32> { (0..n).map(|i| ((i * 7919) % 1009) as f32 / 500.0 - 1.0).collect() };
    for threads in [1, 2] {
        let pool = Pool::new(threads, false);
        for tokens in [1, 32] {
            let queries = values(tokens * per_kv * head_dim);
            let index_queries = values(tokens * index.n_heads * index.head_dim);
            let weights = values(tokens * index.n_heads);
            let mut line = format!("{:<7} sparse {threads} thr {tokens} tok, ms (all):", kernels.name());
            for context in [2048 + 1024, 8192, 32_768] {
                let (latents, keys) =
                    (Cache::new(kernels, context, head_dim), Cache::new(kernels, context, index.head_dim));
                let end = |t: usize| context - tokens + 1 + t;
                let mut choices = Choices::new(tokens, index.top_k, context);
                let mut scratch = AttentionScratch::new(threads, head_dim, value_dim, context)
                    .with_rows(index.top_k * latents.row_bytes);
                let mut out = vec![0.0; tokens * per_kv * value_dim];
                let (mut chosen, mut few, mut all) = (Vec::new(), Vec::new(), Vec::new());
                for _ in 0..passes {
                    chosen.push(seconds(1, || {
                        let sight = |t: usize| keys.sight(end(t));
                        choose(&pool, kernels, index, &index_queries, &weights, &sight, &mut choices);
                    }));
                    let sight =
                        |t: usize, _: usize| Sight { chosen: choices.of(t, end(t)), ..latents.sight(end(t)) };
                    few.push(seconds(1, || {
                        attend(&pool, kernels, &heads, &queries, &sight, &mut scratch, &mut out);
                    }));
                    let sight = |t: usize, _: usize| latents.sight(end(t));
                    all.push(seconds(1, || {
                        attend(&pool, kernels, &heads, &queries, &sight, &mut scratch, &mut out);
                    }));
                }
                let ms = |times: Vec<f64>| 1e3 * median(times);
                line += &format!(" {context}: {:.1} + {:.1} ({:.1})", ms(chosen), ms(few), ms(all));
            }
            println!("{line}");
        }
    }
}
