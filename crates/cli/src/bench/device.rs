//! A device alone: its memory, handing work over, and the products of a token, cold.
//!
//! Every figure is the time of a dispatch among many of the same kind, over different weights: together they are
//! several times what a cache holds, so weights come from memory. GB/s counts bytes of weights (of copies: read
//! and written). Steps are handed over without waiting, so that the host records one while the device does the
//! one before; what one step takes is subtracted from what several take, and with it the cost of handing over
//! and waiting. A dispatch that waits for another is recorded before it is handed over: the host takes as long to record one. Medians of seven. `of_bound` holds each against the bytes at the speed of a copy, and what a dispatch costs
//! that is of another kernel than the last and waits for it, as those of a token do. Products of many tokens have `tmac_s` in its place, 10^12
//! multiply-adds a second: what they are bound by.

mod states;

use std::time::{Duration, Instant};

use serde_json::json;
use smoe_engine::DeviceChoice;
use smoe_format::spec::Activation;
use smoe_format::{Encoding, LayerTable, Table, TensorEntry, Uniform, Zero};
use smoe_gpu::{
    Access, Attention, AttentionHeads, AttentionOutputs, AttentionScratch, CodedMatmul, CodedPlane, Columns,
    CopyKernel, DeviceKind, Down, ExpertInput, ExpertLayout, FloatMatmul, GateUp, Gpu, GpuError, HeadMatmul,
    HeadPlane, Hidden, KV_BLOCK, KvFormat, KvLayout, LatentAttention, LatentLayout, Links, Quantise, Rows,
    Shader, Slice, Software, Step, Weights, WorkList,
};

use super::record::{Record, rounded};
use crate::failure::Failure;
use crate::progress;

/// Bytes of the weights that dispatches take turns with.
const COLD: u64 = 1_800_000_000;
const RUNS: usize = 7;
/// Dispatches of a step, of a few tokens and of more.
const DISPATCHES: usize = 100;
const PROMPT_DISPATCHES: usize = 10;
/// Tokens that are few.
const FEW: usize = 8;
/// For how long small dispatches go before anything counts: at first they took 2.6 us on an H200, after 0.7 s 2.1 (EXP-GPU-08).
const WARM_UP: Duration = Duration::from_secs(2);
/// What the others are held against.
const COPY: &str = "copy by a kernel";
const WAITS: &str = "dispatch that waits for another";

/// Times a device's kernels.
pub fn kernels(choice: &DeviceChoice) -> Result<Record, Failure> {
    let (name, software) = match choice {
        DeviceChoice::Gpu(name) => (name.as_deref(), Software::Accept),
        DeviceChoice::Cpu | DeviceChoice::Auto => (None, Software::Refuse),
        DeviceChoice::Cuda => {
            let what = "these are the kernels of --device gpu; those of cuda are timed with a vault";
            return Err(Failure::Usage(what.to_owned()));
        }
    };
    let failed = |error: GpuError| Failure::new(error.to_string());
    let gpu = Gpu::open(name, software).map_err(failed)?;
    let facts = gpu.facts().clone();
    let mut record = Record::default();
    super::figures::machine_facts(&mut record);
    record.set("device", facts.to_string());
    record.set("fused_fma", gpu.fused_fma().map_err(failed)?);
    // A program that plays a device would take hours: shapes of a hundredth show that it runs.
    let small = facts.kind == DeviceKind::Software;
    record.set("small", small);
    let room = facts.memory.map_or(COLD, |bytes| bytes / 4);
    let cold = if small { 8 << 20 } else { COLD.min(room).min(facts.max_binding) };
    let spinner = progress::spinner("timing kernels");
    let figures = Bench { gpu, cold, small, figures: Vec::new() }.all();
    spinner.finish_and_clear();
    let figures = figures.map_err(failed)?;
    let figure = |what| figures.iter().find(|figure| figure.what == what);
    let copy = figure(COPY).map_or(f64::NAN, Figure::rate);
    let dispatch = figure(WAITS).map_or(f64::NAN, |figure| figure.seconds);
    for figure in &figures {
        let name = match figure.tokens {
            0 => figure.what.clone(),
            n => format!("{}, {n} tokens", figure.what),
        };
        record.set(
            &name,
            match (figure.bytes, figure.macs) {
                (0, _) => json!({ "us": rounded(figure.us()) }),
                (_, Some(macs)) => json!({
                    "us": rounded(figure.us()),
                    "gb_s": rounded(figure.rate() / 1e9),
                    "tmac_s": rounded(macs / figure.seconds / 1e12),
                }),
                _ => json!({
                    "us": rounded(figure.us()),
                    "gb_s": rounded(figure.rate() / 1e9),
                    "of_copy": rounded(figure.rate() / copy),
                    "of_bound": rounded((figure.bytes as f64 / copy + dispatch) / figure.seconds),
                }),
            },
        );
    }
    Ok(record)
}

/// Seconds of a dispatch, and the bytes that it had to move.
struct Figure {
    what: String,
    tokens: usize,
    seconds: f64,
    bytes: u64,
    /// Multiply-adds, where those are what it is held against.
    macs: Option<f64>,
}

impl Figure {
    fn us(&self) -> f64 {
        self.seconds * 1e6
    }

    fn rate(&self) -> f64 {
        self.bytes as f64 / self.seconds
    }
}

/// The experts of a model's layer.
struct Experts {
    name: &'static str,
    d: usize,
    ff: usize,
    /// Of a token.
    top_k: usize,
    encoding: Encoding,
    /// They have biases, and a clamped activation.
    is_gpt_oss: bool,
}

/// Whose experts they are.
#[derive(Clone, Copy)]
enum Of {
    /// The same of all tokens.
    All,
    /// Each token's own.
    Each,
    /// So many in all, each of as many tokens as the next.
    Many(usize),
}

struct Bench {
    gpu: Gpu,
    cold: u64,
    small: bool,
    figures: Vec<Figure>,
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn q(bits: u8) -> Encoding {
    Encoding::Uniform(Uniform::new(bits, 64, Zero::Symmetric).expect("an encoding that there is"))
}

fn uniform(encoding: Encoding) -> Uniform {
    encoding.tiles().unwrap_or_else(|| panic!("{encoding} has no codes"))
}

/// Random codes and scales of 1, or random small floats.
fn tensor(encoding: Encoding, rows: usize, cols: usize) -> Vec<u8> {
    let mut state = 1u64;
    let mut bytes = vec![0; encoding.tensor_bytes(rows, cols).expect("a shape that fits")];
    for eight in bytes.chunks_mut(8) {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        // The exponents of floats are cleared of their highest bit: below 2.
        let word = if encoding.is_float() { state & 0xbfff_bfff_bfff_bfff } else { state };
        eight.copy_from_slice(&word.to_le_bytes()[..eight.len()]);
    }
    if let Some(uniform) = encoding.tiles() {
        for tile in bytes.chunks_exact_mut(uniform.tile_bytes()) {
            let scales = &mut tile[uniform.code_bytes()..];
            scales.chunks_exact_mut(2).for_each(|s| s.copy_from_slice(&0x3c00u16.to_le_bytes()));
        }
    }
    bytes
}

impl Bench {
    fn all(mut self) -> Result<Vec<Figure>, GpuError> {
        self.host()?;
        self.copies()?;
        self.quantise()?;
        let scale = if self.small { 16 } else { 1 };
        let shapes = [
            Experts { name: "235b", d: 4096, ff: 1536, top_k: 8, encoding: q(4), is_gpt_oss: false },
            Experts { name: "30b", d: 2048, ff: 768, top_k: 8, encoding: q(4), is_gpt_oss: false },
            Experts {
                name: "gpt-oss mxfp4",
                d: 2880,
                ff: 2880,
                top_k: 4,
                encoding: Table::MXFP4.into(),
                is_gpt_oss: true,
            },
        ]
        .map(|shape| Experts { d: shape.d / scale, ff: shape.ff / scale, ..shape });
        for shape in &shapes {
            for (tokens, of) in [(1, Of::Each), (8, Of::All), (8, Of::Each)] {
                self.experts(shape, tokens, of)?;
            }
        }
        // Of a token of the 30B's.
        for (what, rows, cols) in [("qkv 5120 x 2048 q8", 5120, 2048), ("o 2048 x 4096 q8", 2048, 4096)] {
            self.coded(what, (rows / scale, cols / scale), q(8), 1)?;
        }
        for tokens in [1, 2, 4, 8] {
            self.coded("matvec 24576 x 4096 q4", (24_576 / scale, 4096 / scale), q(4), tokens)?;
        }
        for tokens in [1, 8] {
            self.coded("matvec 4096 x 4096 q4", (4096 / scale, 4096 / scale), q(4), tokens)?;
            self.coded("head 151936 x 4096 q8", (151_936 / scale, 4096 / scale), q(8), tokens)?;
            self.float("head 151936 x 4096 bf16", (151_936 / scale, 4096 / scale), tokens)?;
            self.float("router 128 x 4096 bf16", (128, 4096), tokens)?;
        }
        self.prompts(scale, &shapes)?;
        for (name, heads) in [("v2-lite", 16 / scale), ("v3", 128 / scale)] {
            for (visible, tokens) in [(128, 1), (1024, 1), (8192, 1), (1024, 64)] {
                self.latent(name, heads, visible / scale, usize::div_ceil(tokens, scale))?;
            }
            // Of a latent's matrices of heads, into it and out of it.
            self.heads(name, heads, (512, 128), 1)?;
            self.heads(name, heads, (128, 512), 1)?;
        }
        for tokens in [1, 64, 512] {
            self.states("qwen3-next", usize::div_ceil(tokens, scale))?;
        }
        Ok(self.figures)
    }

    /// Products of a prompt's tokens.
    fn prompts(&mut self, scale: usize, [_, b30, gpt_oss]: &[Experts; 3]) -> Result<(), GpuError> {
        for (what, rows, cols, encoding) in [
            ("qkv 5120 x 2048 q8", 5120, 2048, q(8)),
            ("o 2048 x 4096 q8", 2048, 4096, q(8)),
            ("matmul 24576 x 4096 q4", 24_576, 4096, q(4)),
        ] {
            for tokens in [64, 512] {
                self.coded(what, (rows / scale, cols / scale), encoding, tokens / scale.min(2))?;
            }
        }
        self.experts(b30, 512, Of::Many(128))?;
        self.experts(b30, 2048, Of::Many(128))?;
        self.experts(gpt_oss, 512, Of::Many(32))?;
        for (tokens, before) in [(512, 0), (512, 1536), (64, 2048)] {
            self.attention("30b", tokens / scale, before / scale)?;
        }
        Ok(())
    }

    /// Seconds of one of the dispatches that `record` records, given its number.
    fn time(&self, record: &dyn Fn(&mut Step, usize)) -> Result<f64, GpuError> {
        self.time_of(if self.small { 4 } else { DISPATCHES }, record)
    }

    /// The same, of so many dispatches a step.
    fn time_of(&self, dispatches: usize, record: &dyn Fn(&mut Step, usize)) -> Result<f64, GpuError> {
        let steps = |n: usize| {
            let start = Instant::now();
            let mut last = None;
            for s in 0..n {
                let mut step = self.gpu.step();
                (0..dispatches).for_each(|i| record(&mut step, s * dispatches + i));
                last = Some(step.submit());
            }
            last.map_or(Ok(()), |last| self.gpu.wait(&last))?;
            Ok::<_, GpuError>(start.elapsed().as_secs_f64())
        };
        let (one, several) = (1, 4);
        steps(one)?;
        let differences = (0..RUNS).map(|_| {
            let first = steps(one)?;
            Ok(steps(several)? - first)
        });
        let difference = median(differences.collect::<Result<_, GpuError>>()?);
        Ok((difference / ((several - one) * dispatches) as f64).max(1e-9))
    }

    /// The same of the device alone: all is recorded before anything is handed over.
    fn time_recorded(&self, record: &dyn Fn(&mut Step, usize)) -> Result<f64, GpuError> {
        let dispatches = if self.small { 4 } else { 400 };
        let steps = |n: usize| {
            let recorded: Vec<_> = (0..n)
                .map(|_| {
                    let mut step = self.gpu.step();
                    (0..dispatches).for_each(|i| record(&mut step, i));
                    step.finish()
                })
                .collect();
            let start = Instant::now();
            let submitted = self.gpu.submit(recorded);
            self.gpu.wait(&submitted)?;
            Ok::<_, GpuError>(start.elapsed().as_secs_f64())
        };
        let differences = (0..RUNS).map(|_| {
            let first = steps(1)?;
            Ok(steps(4)? - first)
        });
        let difference = median(differences.collect::<Result<_, GpuError>>()?);
        Ok((difference / (3 * dispatches) as f64).max(1e-9))
    }

    fn tell(&mut self, what: &str, tokens: usize, seconds: f64, bytes: u64) {
        self.figures.push(Figure { what: what.to_owned(), tokens, seconds, bytes, macs: None });
    }

    /// Times a product of so many tokens with `bytes` of weights, and so many multiply-adds, and tells.
    fn product(
        &mut self,
        what: &str,
        tokens: usize,
        (bytes, macs): (u64, f64),
        record: &dyn Fn(&mut Step, usize),
    ) -> Result<(), GpuError> {
        // A dispatch of many takes as long as many of a few.
        let (dispatches, macs) =
            if tokens > FEW { (PROMPT_DISPATCHES, Some(macs)) } else { (DISPATCHES, None) };
        let seconds = self.time_of(if self.small { 4 } else { dispatches }, record)?;
        self.figures.push(Figure { what: what.to_owned(), tokens, seconds, bytes, macs });
        Ok(())
    }

    /// What it costs to hand a step over and wait for it, and to dispatch a kernel that does nothing.
    fn host(&mut self) -> Result<(), GpuError> {
        let word = self.gpu.buffer("word", 4)?;
        let source = "
            @group(0) @binding(0) var<storage, read_write> word: array<u32>;
            @compute @workgroup_size(64)
            fn main(@builtin(local_invocation_index) lane: u32) {
                if (lane == 0u) { word[0] += 1u; }
            }";
        let shader = Shader { name: "empty", source: source.into(), bindings: &[Access::Write] };
        let op = self.gpu.bind(&self.gpu.kernel(&shader)?, &[&word])?;
        // A processor and a card that were idle are slow at first.
        let began = Instant::now();
        while !self.small && began.elapsed() < WARM_UP {
            self.time(&|step, _| step.run(&op, &[], [1, 1, 1]))?;
        }
        let waits = (0..RUNS * 10).map(|_| {
            let start = Instant::now();
            let mut step = self.gpu.step();
            step.run(&op, &[], [1, 1, 1]);
            let submitted = step.submit();
            self.gpu.wait(&submitted)?;
            Ok(start.elapsed().as_secs_f64())
        });
        let wait = median(waits.collect::<Result<_, GpuError>>()?);
        self.tell("submit and wait", 0, wait, 0);
        let empty = self.time(&|step, _| step.run(&op, &[], [1, 1, 1]))?;
        self.tell("empty dispatch", 0, empty, 0);
        let links = Links::new(&self.gpu)?;
        // The host may take longer to record one.
        let waits = self.time_recorded(&|step, i| links.record(step, i))?;
        self.tell(WAITS, 0, waits, 0);
        Ok(())
    }

    /// What the device's memory does: the ceiling.
    fn copies(&mut self) -> Result<(), GpuError> {
        let bytes = self.cold / 2 / 16 * 16;
        let (from, to) = (self.gpu.buffer("from", bytes)?, self.gpu.buffer("to", bytes)?);
        let copy = CopyKernel::new(&self.gpu, &from, &to)?;
        let kernel = self.time(&|step, _| copy.record(step))?;
        self.tell(COPY, 0, kernel, copy.bytes());
        let buffer = self.time(&|step, _| step.copy(&from, &to))?;
        self.tell("copy by copy_buffer", 0, buffer, 2 * bytes);
        Ok(())
    }

    fn words(&self, words: &[u32]) -> Result<Slice, GpuError> {
        let slice = self.gpu.buffer("words", 4 * words.len() as u64)?;
        self.gpu.write(&slice, 0, &words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>());
        Ok(slice)
    }

    fn x(&self, tokens: usize, cols: usize) -> Result<Slice, GpuError> {
        let x: Vec<u8> = (0..tokens * cols)
            .flat_map(|i| (((i * 7919) % 1009) as f32 / 500.0 - 1.0).to_le_bytes())
            .collect();
        let slice = self.gpu.buffer("x", x.len() as u64)?;
        self.gpu.write(&slice, 0, &x);
        Ok(slice)
    }

    fn coded_x(&self, tokens: usize, cols: usize, group: usize) -> Result<CodedPlane, GpuError> {
        let plane = CodedPlane::new(&self.gpu, tokens, cols, group)?;
        let quantise = Quantise::new(&self.gpu, &self.x(tokens, cols)?, &plane)?;
        let mut step = self.gpu.step();
        quantise.record(&mut step, tokens);
        let submitted = step.submit();
        self.gpu.wait(&submitted)?;
        Ok(plane)
    }

    fn quantise(&mut self) -> Result<(), GpuError> {
        for tokens in [1, 8] {
            let plane = CodedPlane::new(&self.gpu, tokens, 4096, 64)?;
            let quantise = Quantise::new(&self.gpu, &self.x(tokens, 4096)?, &plane)?;
            let seconds = self.time(&|step, _| quantise.record(step, tokens))?;
            self.tell("quantise 4096", tokens, seconds, (tokens * 4096 * 4) as u64);
        }
        Ok(())
    }

    /// Copies of a tensor that are `cold` bytes together, in one slice each.
    fn copies_of(&self, bytes: &[u8]) -> Result<Vec<Slice>, GpuError> {
        let first = self.gpu.buffer("weights", bytes.len() as u64)?;
        // In pieces: what is written waits in memory of the host's until the next step.
        for (i, piece) in bytes.chunks(64 << 20).enumerate() {
            self.gpu.write(&first, (i * (64 << 20)) as u64, piece);
            let submitted = self.gpu.step().submit();
            self.gpu.wait(&submitted)?;
        }
        let count = (self.cold / bytes.len() as u64).max(1);
        let mut all = vec![first];
        for _ in 1..count {
            let copy = self.gpu.buffer("weights", bytes.len() as u64)?;
            let mut step = self.gpu.step();
            step.copy(&all[0], &copy);
            let submitted = step.submit();
            self.gpu.wait(&submitted)?;
            all.push(copy);
        }
        Ok(all)
    }

    fn coded(
        &mut self,
        what: &str,
        (rows, cols): (usize, usize),
        encoding: Encoding,
        tokens: usize,
    ) -> Result<(), GpuError> {
        let bytes = tensor(encoding, rows, cols);
        let copies = self.copies_of(&bytes)?;
        let x = self.coded_x(tokens, cols, uniform(encoding).group())?;
        let plane = self.gpu.buffer("out", (4 * tokens * rows) as u64)?;
        let out = Columns::whole(plane, rows);
        let product = |slice: &Slice| {
            let weights = Weights::new(slice.clone(), rows, cols, encoding);
            CodedMatmul::new(&self.gpu, &weights, &x, &out)
        };
        let products = copies.iter().map(product).collect::<Result<Vec<_>, _>>()?;
        let work = (bytes.len() as u64, (tokens * rows * cols) as f64);
        self.product(what, tokens, work, &|step, i| products[i % products.len()].record(step, tokens))
    }

    fn float(&mut self, what: &str, (rows, cols): (usize, usize), tokens: usize) -> Result<(), GpuError> {
        let bytes = tensor(Encoding::Bf16, rows, cols);
        let copies = self.copies_of(&bytes)?;
        let x = self.x(tokens, cols)?;
        let plane = self.gpu.buffer("out", (4 * tokens * rows) as u64)?;
        let out = Columns::whole(plane, rows);
        let product = |slice: &Slice| {
            let weights = Weights::new(slice.clone(), rows, cols, Encoding::Bf16);
            FloatMatmul::new(&self.gpu, &weights, &x, tokens, &out)
        };
        let products = copies.iter().map(product).collect::<Result<Vec<_>, _>>()?;
        let seconds = self.time(&|step, i| products[i % products.len()].record(step, tokens))?;
        self.tell(what, tokens, seconds, bytes.len() as u64);
        Ok(())
    }

    /// Attention of a prompt's tokens behind others of theirs: 32 query heads over 4 kv heads of 128, in halves. Keys and values
    /// count once.
    fn attention(&mut self, name: &str, tokens: usize, before: usize) -> Result<(), GpuError> {
        let n_kv_heads = if self.small { 1 } else { 4 };
        let n_heads = 8 * n_kv_heads;
        let kv = KvLayout { format: KvFormat::F16, n_kv_heads, head_dim: 128, value_dim: 128 };
        let visible = before + tokens;
        let blocks = visible.div_ceil(KV_BLOCK);
        let bytes = (blocks * kv.block_bytes()) as u64;
        // Layers take turns, as in a model.
        let caches = (0..(self.cold / bytes / 4).clamp(1, 48))
            .map(|_| self.gpu.buffer("keys and values", bytes))
            .collect::<Result<Vec<_>, _>>()?;
        let rows = (before..visible).flat_map(|position| [position as u32, 0, 0, 0]).collect::<Vec<_>>();
        let (rows, tables) = (self.words(&rows)?, self.words(&(0..blocks as u32).collect::<Vec<_>>())?);
        let rows = Rows { rows: &rows, tables: &tables };
        let queries = self.x(tokens, n_heads * kv.head_dim)?;
        let scratch = AttentionScratch::new(&self.gpu, n_heads, kv.value_dim, visible, 64 << 20)?;
        let out = self.gpu.buffer("out", (4 * tokens * n_heads * kv.value_dim) as u64)?;
        let heads = AttentionHeads { n_heads, scale: 0.09, sinks: None };
        let attention = |cache: &Slice| {
            let outputs = AttentionOutputs { plane: Some(&out), ..Default::default() };
            Attention::new(&self.gpu, tokens, kv, heads, &queries, cache, rows, &scratch, outputs, None)
        };
        let all = caches.iter().map(attention).collect::<Result<Vec<_>, _>>()?;
        let seen = (before + 1..=visible).sum::<usize>();
        let macs = (seen * n_heads * (kv.head_dim + kv.value_dim)) as f64;
        let what = format!("{name} attention after {before} positions");
        self.product(
            &what,
            tokens,
            ((visible * 2 * kv.n_kv_heads * kv.row_bytes()) as u64, macs),
            &|step, i| {
                all[i % all.len()].record(step, tokens, 1, visible, visible);
            },
        )
    }

    /// Attention of DeepSeek's shapes over latents in halves, of tokens that see as many positions: their rows count once for each
    /// token.
    fn latent(&mut self, name: &str, heads: usize, visible: usize, tokens: usize) -> Result<(), GpuError> {
        let kv = LatentLayout { format: KvFormat::F16, kv_rank: 512, rope_dim: 64 };
        let blocks = visible.div_ceil(KV_BLOCK);
        let bytes = (blocks * kv.block_bytes()) as u64;
        // Layers take turns, as in a model.
        let caches = (0..(self.cold / bytes / 4).clamp(1, 61))
            .map(|_| self.gpu.buffer("latents", bytes))
            .collect::<Result<Vec<_>, _>>()?;
        let rows = [visible as u32 - 1, 0, 0, 0].repeat(tokens);
        let (rows, tables) = (self.words(&rows)?, self.words(&(0..blocks as u32).collect::<Vec<_>>())?);
        let rows = Rows { rows: &rows, tables: &tables };
        let queries = self.x(tokens, heads * kv.key_dim())?;
        let scratch = AttentionScratch::new(&self.gpu, heads, kv.kv_rank, visible, 64 << 20)?;
        let out = self.gpu.buffer("out", (4 * tokens * heads * kv.kv_rank) as u64)?;
        let attention = |cache: &Slice| {
            let outputs = AttentionOutputs { plane: Some(&out), ..Default::default() };
            let scale = 0.07;
            LatentAttention::new(
                &self.gpu, tokens, kv, heads, scale, &queries, cache, rows, &scratch, outputs,
            )
        };
        let all = caches.iter().map(attention).collect::<Result<Vec<_>, _>>()?;
        let seconds = self.time(&|step, i| all[i % all.len()].record(step, tokens, visible, visible))?;
        let what = format!("{name} latent attention, {heads} heads, {visible} positions");
        self.tell(&what, tokens, seconds, (tokens * visible * kv.row_bytes()) as u64);
        Ok(())
    }

    /// A matrix of each head.
    fn heads(
        &mut self,
        name: &str,
        heads: usize,
        (rows, cols): (usize, usize),
        tokens: usize,
    ) -> Result<(), GpuError> {
        let bytes = tensor(q(8), heads * rows, cols);
        let copies = self.copies_of(&bytes)?;
        let plane = HeadPlane::Coded(self.coded_x(tokens * heads, cols, 64)?);
        let out = self.gpu.buffer("out", (4 * tokens * heads * rows) as u64)?;
        let product = |slice: &Slice| {
            let weights = Weights::new(slice.clone(), heads * rows, cols, q(8));
            HeadMatmul::new(&self.gpu, &weights, heads, &plane, tokens, &out, rows)
        };
        let products = copies.iter().map(product).collect::<Result<Vec<_>, _>>()?;
        let seconds = self.time(&|step, i| products[i % products.len()].record(step, tokens))?;
        self.tell(
            &format!("{name} {heads} heads of {rows} x {cols} q8"),
            tokens,
            seconds,
            bytes.len() as u64,
        );
        Ok(())
    }

    fn experts(&mut self, shape: &Experts, tokens: usize, of: Of) -> Result<(), GpuError> {
        let &Experts { name, d, ff, top_k, encoding, is_gpt_oss } = shape;
        let mut offset = 0;
        let tensors = [(ff, d), (ff, d), (d, ff)].map(|(rows, cols)| {
            let len = encoding.tensor_bytes(rows, cols).expect("a shape that fits");
            let entry = TensorEntry { encoding, rows, cols, offset, len };
            offset += len;
            entry
        });
        let record = offset.next_multiple_of(16 << 10);
        let experts = match of {
            Of::All => top_k,
            Of::Each => top_k * tokens,
            Of::Many(experts) => experts,
        };
        let lists = (self.cold as usize / record / experts).max(1);
        let table = LayerTable { layer: 0, n_experts: experts as u32, record_len: record, tensors };
        let mut layout = ExpertLayout::new(&table, record as u64);
        if is_gpt_oss {
            let biases = self.gpu.buffer("biases", (4 * experts * (2 * ff + d)) as u64)?;
            layout = layout.activated(Activation::ClampedSwiglu { alpha: 1.702, limit: 7.0 }).biased(biases);
        }
        let slots = self.slots(&tensors, record, lists * experts)?;
        let x = self.coded_x(tokens, d, uniform(encoding).group())?;
        let planes = [&x];
        let input = ExpertInput { coded: &planes, float: None };
        let pairs = tokens * top_k;
        let hidden = Hidden::new(&self.gpu, &layout, pairs)?;
        let y = self.gpu.buffer("y", (4 * pairs * d) as u64)?;
        let list = |l: usize| {
            let list = WorkList::new(&self.gpu, &layout, tokens, top_k)?;
            // Pairs take turns with the experts.
            let of = |e: usize| -> Vec<u32> { (e as u32..pairs as u32).step_by(experts).collect() };
            let all: Vec<(u32, u32, Vec<u32>)> =
                (0..experts).map(|e| ((l * experts + e) as u32, e as u32, of(e))).collect();
            let entries: Vec<_> = all.iter().map(|(slot, e, pairs)| (*slot, *e, &pairs[..])).collect();
            list.write(&self.gpu, tokens, &entries);
            Ok(list)
        };
        let lists = (0..lists).map(list).collect::<Result<Vec<_>, GpuError>>()?;
        let work = |matrices: u64| {
            let bytes = matrices * (experts * tensors[0].len) as u64;
            (bytes, (matrices as usize * pairs * ff * d) as f64)
        };
        let how = match (tokens, of) {
            (1, _) => format!("{top_k} experts"),
            (_, Of::All) => format!("{top_k} experts, shared"),
            _ => format!("{experts} experts"),
        };
        let gate_up = |list| GateUp::new(&self.gpu, &layout, &slots, list, &input, &hidden);
        let gate_ups = lists.iter().map(gate_up).collect::<Result<Vec<_>, _>>()?;
        let record = |step: &mut Step, i: usize| gate_ups[i % gate_ups.len()].record(step, tokens);
        self.product(&format!("{name} gate and up, {how}"), tokens, work(2), &record)?;
        let down = |list| Down::new(&self.gpu, &layout, &slots, list, &hidden, &y);
        let downs = lists.iter().map(down).collect::<Result<Vec<_>, _>>()?;
        let record = |step: &mut Step, i: usize| downs[i % downs.len()].record(step, tokens);
        self.product(&format!("{name} down, {how}"), tokens, work(1), &record)
    }

    /// Slots of one expert's weights, over and over.
    fn slots(&self, tensors: &[TensorEntry; 3], record: usize, count: usize) -> Result<Slice, GpuError> {
        let mut bytes = vec![0; record];
        for t in tensors {
            bytes[t.offset..t.offset + t.len].copy_from_slice(&tensor(t.encoding, t.rows, t.cols));
        }
        let slots = self.gpu.buffer("slots", (count * record) as u64)?;
        self.gpu.write(&slots, 0, &bytes);
        let record = record as u64;
        let mut done = 1;
        while done < count as u64 {
            let next = done.min(count as u64 - done);
            let from = self.gpu.buffer("some slots", next * record)?;
            let mut step = self.gpu.step();
            step.copy(&slots.part(0, next * record), &from);
            step.copy(&from, &slots.part(done * record, next * record));
            let submitted = step.submit();
            self.gpu.wait(&submitted)?;
            done += next;
        }
        Ok(slots)
    }
}
