//! What the machine can do at best, measured: how fast its memory streams and how fast its disk reads.
//!
//! A figure of the engine is held against a ceiling of the same minutes; on a shared machine both move.
//! Clocks are read inside the workers, from the first one's start to the last one's end: a clock outside also
//! counts threads that start late, or misses those that start early.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Barrier, Mutex};
use std::time::{Duration, Instant};

use smoe_format::{Encoding, LayerTable, TensorEntry, Uniform, Zero, entropy};
use smoe_kernels::{Activations, EntropyDecoder, Input, Kernels, Matrix, Pool, matmul};
use smoe_store::{AlignedBuf, Disk};

use crate::EngineError;

/// Memory streamed by all threads at once.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MemoryCeiling {
    /// The best pass.
    pub bytes_per_s: f64,
    /// The median pass.
    pub median_bytes_per_s: f64,
    /// Bytes of the buffer that was streamed.
    pub buffer_bytes: usize,
    /// Threads.
    pub threads: usize,
}

/// What [`touch`] writes: scales, weights and their products are ordinary numbers in every encoding. Of bytes of 1 a bf16
/// is so small that its products are subnormal, which some processors take a hundred cycles for.
const ORDINARY: u8 = 0x3c;

/// Writes to every page of `buffer`: pages that were never written are all the same page of zeros, and
/// streaming them shows nothing.
pub fn touch(buffer: &mut [u8], threads: usize) {
    let part = part_of(buffer.len(), threads);
    std::thread::scope(|scope| {
        for part in buffer.chunks_mut(part) {
            scope.spawn(|| part.fill(ORDINARY));
        }
    });
}

fn part_of(len: usize, threads: usize) -> usize {
    len.div_ceil(threads.max(1)).next_multiple_of(4096).max(4096)
}

/// Streams `buffer`, whose pages were written, `passes` times with `threads` threads, each its own part. The
/// buffer should be at least twice the last-level cache.
#[must_use]
pub fn memory(buffer: &[u8], kernels: Kernels, threads: usize, passes: usize) -> MemoryCeiling {
    let part = part_of(buffer.len(), threads);
    let barrier = Barrier::new(buffer.chunks(part).count());
    let times = Mutex::new(vec![None::<(Instant, Instant)>; passes]);
    std::thread::scope(|scope| {
        for part in buffer.chunks(part) {
            scope.spawn(|| {
                for pass in 0..passes {
                    barrier.wait();
                    let start = Instant::now();
                    std::hint::black_box(kernels.stream(part));
                    let end = Instant::now();
                    if let Ok(mut times) = times.lock() {
                        let (first, last) = times[pass].unwrap_or((start, end));
                        times[pass] = Some((first.min(start), last.max(end)));
                    }
                }
            });
        }
    });
    let times = times.into_inner().unwrap_or_default();
    let seconds = |(start, end): (Instant, Instant)| (end - start).as_secs_f64();
    let mut seconds: Vec<f64> = times.into_iter().flatten().map(seconds).collect();
    seconds.sort_unstable_by(f64::total_cmp);
    let rate = |i: usize| buffer.len() as f64 / seconds.get(i).copied().unwrap_or(f64::NAN);
    MemoryCeiling {
        bytes_per_s: rate(0),
        median_bytes_per_s: rate(seconds.len() / 2),
        buffer_bytes: buffer.len(),
        threads,
    }
}

/// A disk read at several depths.
#[derive(Clone, Debug, PartialEq)]
pub struct DiskCeiling {
    /// The best of `depths` and of the sequential reads.
    pub bytes_per_s: f64,
    /// Reads in flight, and bytes per second, of random reads of `read_bytes`.
    pub depths: Vec<(usize, f64)>,
    /// Large sequential reads, four in flight.
    pub sequential_bytes_per_s: f64,
    /// Bytes of a random read.
    pub read_bytes: usize,
}

impl DiskCeiling {
    /// The best of the random reads.
    #[must_use]
    pub fn random_bytes_per_s(&self) -> f64 {
        self.depths.iter().map(|(_, rate)| *rate).fold(f64::NAN, f64::max)
    }
}

/// Depths that are tried.
const DEPTHS: [usize; 4] = [1, 2, 4, 8];
/// Bytes of a sequential read, and how many are in flight.
const SEQUENTIAL: (usize, usize) = (4 << 20, 4);

/// Memory that [`disk`] takes for reads of `read_bytes`.
#[must_use]
pub fn disk_buffer_bytes(read_bytes: usize) -> usize {
    (DEPTHS[DEPTHS.len() - 1] * read_bytes).max(SEQUENTIAL.0 * SEQUENTIAL.1)
}

/// Random reads of `read_bytes` for `time`, `depth` in flight: bytes per second.
///
/// # Errors
/// As [`disk`].
pub fn disk_at(
    disk: &dyn Disk,
    read_bytes: usize,
    depth: usize,
    time: Duration,
    seed: u64,
) -> Result<f64, EngineError> {
    let pieces = pieces(disk, read_bytes)?;
    // xorshift has no way out of 0.
    let mut seed = seed | 1;
    // A permutation: no piece is read twice before all have been.
    let (start, step) = (random(&mut seed) as usize, odd_step(pieces, &mut seed));
    let place = |i: usize| (i.wrapping_mul(step).wrapping_add(start) % pieces * read_bytes) as u64;
    read(disk, read_bytes, depth, time, &place)
}

fn pieces(disk: &dyn Disk, read_bytes: usize) -> Result<usize, EngineError> {
    match disk.len() / read_bytes.max(1) as u64 {
        0 => {
            let what = format!("shorter than a read of {read_bytes} bytes");
            Err(EngineError::Damaged { file: disk.name().to_owned(), what })
        }
        pieces => Ok(pieces as usize),
    }
}

/// Reads pieces of `read_bytes` at random places that are multiples of it, at several depths for `time` each,
/// and large pieces one after the other. Which pieces follows from `seed`.
///
/// # Errors
/// If a read fails or the file is shorter than a piece.
pub fn disk(
    disk: &dyn Disk,
    read_bytes: usize,
    time: Duration,
    seed: u64,
) -> Result<DiskCeiling, EngineError> {
    pieces(disk, read_bytes)?;
    let mut seed = seed ^ 1337;
    let mut depths = Vec::new();
    for depth in DEPTHS {
        depths.push((depth, disk_at(disk, read_bytes, depth, time, random(&mut seed))?));
    }
    let (bytes, depth) = SEQUENTIAL;
    let bytes = bytes.min(disk.len() as usize / read_bytes * read_bytes);
    let pieces = (disk.len() / bytes as u64) as usize;
    let start = random(&mut seed) as usize;
    let place = |i: usize| ((start + i) % pieces * bytes) as u64;
    let sequential_bytes_per_s = read(disk, bytes, depth, time, &place)?;
    let best = depths.iter().map(|(_, rate)| *rate).fold(sequential_bytes_per_s, f64::max);
    Ok(DiskCeiling { bytes_per_s: best, depths, sequential_bytes_per_s, read_bytes })
}

/// Bytes per second of reads of `bytes` at `place(0)`, `place(1)`, ... with `depth` in flight, into buffers that lie in huge
/// pages as a ring's slots do: into small ones a drive is slower (EXP-STORE-12).
fn read(
    disk: &dyn Disk,
    bytes: usize,
    depth: usize,
    time: Duration,
    place: &(dyn Fn(usize) -> u64 + Sync),
) -> Result<f64, EngineError> {
    let next = AtomicUsize::new(0);
    let barrier = Barrier::new(depth);
    let worker = |mut buffer: AlignedBuf| -> Result<(usize, Instant, Instant), EngineError> {
        barrier.wait();
        let start = Instant::now();
        let (mut n, mut end) = (0, start);
        while end - start < time {
            let i = next.fetch_add(1, Ordering::Relaxed);
            disk.read_exact_at(place(i), &mut buffer)?;
            (n, end) = (n + 1, Instant::now());
        }
        Ok((n, start, end))
    };
    let buffers = AlignedBuf::zeroed_side_by_side(depth, bytes)?;
    let results: Vec<_> = std::thread::scope(|scope| {
        let worker = &worker;
        let workers: Vec<_> = buffers.into_iter().map(|buffer| scope.spawn(move || worker(buffer))).collect();
        workers
            .into_iter()
            .map(|worker| worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect::<Result<_, _>>()
    })?;
    let n: usize = results.iter().map(|(n, ..)| n).sum();
    let start = results.iter().map(|(_, start, _)| *start).min();
    let end = results.iter().map(|(.., end)| *end).max();
    let seconds = start.zip(end).map_or(0.0, |(start, end)| (end - start).as_secs_f64());
    Ok((n * bytes) as f64 / seconds.max(1e-9))
}

/// xorshift64.
fn random(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state >> 1
}

/// A step that visits all of `n` places before any again: without a common divisor.
fn odd_step(n: usize, seed: &mut u64) -> usize {
    let gcd = |mut a: usize, mut b: usize| {
        while b > 0 {
            (a, b) = (b, a % b);
        }
        a
    };
    loop {
        let step = random(seed) as usize % n.max(2);
        if gcd(step, n) == 1 {
            return step;
        }
    }
}

/// How fast entropy-coded records are decoded.
#[derive(Clone, Debug, PartialEq)]
pub struct EntropyCeiling {
    /// Which decoder it is: `avx512`, `avx2`, `scalar`.
    pub decoder: String,
    /// Codes a second of each thread.
    pub codes_per_s: f64,
    /// Threads, all at once.
    pub threads: usize,
}

/// Codes a second that each of `threads` threads decodes out of entropy-coded records, all of them at once: the median
/// of some passes over codes of about 3.25 bits. The speed hardly depends on the bits (EXP-KERNEL-07).
///
/// # Panics
/// Never: the record is its own.
#[must_use]
pub fn entropy_decoding(kernels: Kernels, threads: usize) -> EntropyCeiling {
    let decoder = EntropyDecoder::new(kernels);
    let ceiling = |codes_per_s| EntropyCeiling { decoder: decoder.to_string(), codes_per_s, threads };
    let Some(uniform) = Uniform::new(4, 128, Zero::Symmetric) else { return ceiling(f64::NAN) };
    let (rows, cols) = SHAPE;
    let encoding = Encoding::Uniform(uniform);
    let (mut seed, len) = (1, encoding.tensor_bytes(rows / 2, cols).unwrap_or(0));
    let (whole, none) = ((rows / 2, len), (0, 0));
    let tensors = [whole, none, none].map(|(rows, len)| TensorEntry { encoding, rows, cols, offset: 0, len });
    let layer = LayerTable { layer: 0, n_experts: 1, record_len: len, tensors };
    let mut tiles = vec![0; len];
    // The mean of four numbers below 16, twice as wide: bell-shaped.
    let mut code = || {
        (0..4).map(|shift| random(&mut seed) >> (8 * shift) & 15).sum::<u64>().div_ceil(2).clamp(8, 23) - 8
    };
    tiles.fill_with(|| (code() | code() << 4) as u8);
    let mut raw = Vec::new();
    entropy::encode_record(&tiles, &layer, &mut raw);
    let record = raw.len();
    raw.resize(record + entropy::SLACK, 0);
    let barrier = Barrier::new(threads);
    let work = || {
        let mut slot = vec![0; len];
        barrier.wait();
        let passes = (0..9).map(|_| {
            let start = Instant::now();
            let decoded = decoder.decode(&raw, record, &layer, &mut slot);
            assert!(decoded.is_ok(), "a record decodes to itself");
            start.elapsed().as_secs_f64()
        });
        let mut seconds: Vec<f64> = passes.collect();
        seconds.sort_unstable_by(f64::total_cmp);
        seconds[seconds.len() / 2]
    };
    let slowest = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        let seconds = workers.into_iter().map(|worker| worker.join().unwrap_or(f64::INFINITY));
        seconds.fold(0.0, f64::max)
    });
    ceiling((rows / 2 * cols) as f64 / slowest)
}

/// One product, timed.
#[derive(Clone, Debug, PartialEq)]
pub struct ProductRate {
    /// Kernels, encoding and tokens.
    pub name: String,
    /// Multiply-adds.
    pub macs_per_s: f64,
    /// Bytes of weights; of memory, for the stream.
    pub bytes_per_s: f64,
}

/// What a fork and join of the compute pool costs: seconds, the median of many jobs of one task per thread, one
/// right after the other as a layer's are. A task ends when all have begun, so that every thread has one.
#[must_use]
pub fn fork_join(threads: usize) -> f64 {
    let pool = Pool::new(threads, false);
    let mut seconds: Vec<f64> = (0..20_000)
        .map(|_| {
            let (start, begun) = (Instant::now(), AtomicUsize::new(0));
            pool.run(threads, &|_| {
                begun.fetch_add(1, Ordering::Relaxed);
                // A pool that got fewer threads than it asked for runs tasks one after the other.
                while pool.threads() == threads && begun.load(Ordering::Relaxed) < threads {
                    std::hint::spin_loop();
                }
            });
            start.elapsed().as_secs_f64()
        })
        .collect();
    seconds.sort_unstable_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}

/// Bytes of weights that products cycle over: beyond most caches.
const WEIGHTS: usize = 384 << 20;
/// Rows and columns of the matrices.
const SHAPE: (usize, usize) = (1536, 2048);

/// Streams memory, and multiplies matrices of common encodings by 1, 8, 64 and 512 tokens, weights from
/// memory, with every instruction set of this machine; medians of some passes.
///
/// # Errors
/// If there is no memory for the weights.
pub fn products(threads: usize) -> Result<Vec<ProductRate>, EngineError> {
    let mut buffer = AlignedBuf::zeroed(WEIGHTS)?;
    touch(&mut buffer, threads);
    let pool = Pool::new(threads, false);
    let mut rates = Vec::new();
    for kernels in Kernels::available().into_iter().skip(1) {
        let stream = memory(&buffer, kernels, threads, 5).bytes_per_s;
        let name = format!("{}_stream", kernels.name());
        rates.push(ProductRate { name, macs_per_s: 0.0, bytes_per_s: stream });
        for (label, bits) in [("q4", 4), ("q8", 8)] {
            let Some(uniform) = Uniform::new(bits, 64, Zero::Symmetric) else { continue };
            for tokens in [1, 8, 64, 512] {
                let name = format!("{}_{label}_{tokens}_tokens", kernels.name());
                rates.push(product(&pool, kernels, &buffer, uniform, tokens, name));
            }
        }
    }
    Ok(rates)
}

fn product(
    pool: &Pool,
    kernels: Kernels,
    weights: &[u8],
    uniform: Uniform,
    tokens: usize,
    name: String,
) -> ProductRate {
    let (rows, cols) = SHAPE;
    let encoding = Encoding::Uniform(uniform);
    let bytes = encoding.tensor_bytes(rows, cols).unwrap_or(weights.len());
    let x: Vec<f32> = (0..tokens * cols).map(|i| (i % 251) as f32 / 125.0 - 1.0).collect();
    let mut activations = Activations::with_capacity(tokens, cols);
    activations.quantise(kernels, &x, tokens, cols, uniform.group());
    let coded = [activations.view()];
    let input = Input::new(&x, tokens, &coded);
    let mut out = vec![0.0; tokens * rows];
    // Enough matrices to come from memory, few enough to be quick.
    let matrices = (weights.len() / bytes).min((2048 / tokens).max(8));
    let mut seconds: Vec<f64> = (0..5)
        .map(|_| {
            let start = Instant::now();
            for matrix in weights.chunks_exact(bytes).take(matrices) {
                matmul(pool, kernels, &Matrix::new(matrix, rows, cols, encoding), &input, &mut out);
            }
            start.elapsed().as_secs_f64()
        })
        .collect();
    seconds.sort_unstable_by(f64::total_cmp);
    let median = seconds[seconds.len() / 2];
    ProductRate {
        name,
        macs_per_s: (matrices * rows * cols * tokens) as f64 / median,
        bytes_per_s: (matrices * bytes) as f64 / median,
    }
}
