//! A device alone: its memory, handing work over, and the products of a token, cold.
//!
//! Every figure is the time of a dispatch among many of the same kind, over different weights: together they are
//! several times what a cache holds, so weights come from memory. GB/s counts bytes of weights (of copies: read
//! and written). Steps are handed over without waiting, so that the host records one while the device does the
//! one before; what one step takes is subtracted from what several take, and with it the cost of handing over
//! and waiting. A dispatch that waits for another is recorded before it is handed over: the host takes as long to record one. Medians of seven. `of_bound` holds each against the bytes at the speed of a copy, and what a dispatch costs
//! that is of another kernel than the last and waits for it, as those of a token do. Products of many tokens have `tmac_s` in its place, 10^12
//! multiply-adds a second: what they are bound by.

mod attention;
mod data;
mod experts;
mod host;
mod products;
mod states;

use std::time::Instant;

use serde_json::json;
use smoe_engine::DeviceChoice;
use smoe_format::Table;
use smoe_gpu::{DeviceKind, Gpu, GpuError, Software, Step};

use super::record::{Record, rounded};
use crate::failure::Failure;
use crate::progress;
use data::q;
use experts::{Experts, Of};

/// Bytes of the weights that dispatches take turns with.
const COLD: u64 = 1_800_000_000;
const RUNS: usize = 7;
/// Dispatches of a step, of a few tokens and of more.
const DISPATCHES: usize = 100;
const PROMPT_DISPATCHES: usize = 10;
/// Tokens that are few.
const FEW: usize = 8;
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
}
