//! From runs to figures.
//!
//! Every figure of the engine stands beside the ceiling of the same run: the best that disk and memory did in it,
//! and (shares are of these) what they did just before and after. Beside them the *serial floor* of a streamed
//! token, in which nothing overlaps but a layer's reads with its experts' arithmetic:
//!
//! ```text
//! dense bytes / memory + sum over layers of max(missed bytes / disk, expert bytes / memory) + head bytes / memory
//! ```
//!
//! with the misses of each layer of each token as they were counted.

use std::time::Duration;

use serde_json::{Map, Value, json};
use smoe_engine::ceiling::{self, DiskCeiling};
use smoe_engine::forecast::{Forecast, Missing, Touched, UploadRates};
use smoe_engine::{
    DeviceOpening, DirectIo, Engine, KernelCost, LookAheadReport, OpenMode, OpenTimes, TokenCosts, Vault,
};
use smoe_meter::{Phase, StoreSnapshot};
use smoe_store::FileDisk;

use super::machine;
use super::record::{Record, median, rounded};
use super::runs::{Bench, DECODE, KernelProfile, Run, Stretch};
use crate::failure::Failure;

/// For how long the disk is read at each depth.
const DISK_TIME: Duration = Duration::from_millis(400);
/// Passes over the memory buffer at a time, at most; fewer where so many bytes are streamed before.
const PASSES: usize = 20;
const STREAMED: u64 = 16 << 30;

/// What the machine can do, as measured in this run.
pub struct Ceilings {
    file: FileDisk,
    disk: DiskCeiling,
    /// The best of what was measured later, bytes per second.
    disk_best: f64,
    /// How often the disk was measured: each time reads other pieces.
    disk_times: u64,
    memory_rates: Vec<f64>,
    memory_buffer_bytes: usize,
}

/// What the machine did just before and after a stretch of work, the mean of both: bytes per second. A shared
/// machine changes by the minute, so a share of this may exceed 1 by chance: the
/// share of the run's best stands beside it.
#[derive(Clone, Copy, Debug)]
pub struct Around {
    /// Of the disk: random reads of a record's size, at the depth that was best at that moment.
    pub disk: f64,
    /// Of the disk, in large sequential reads.
    pub sequential: f64,
    /// Of memory; NaN where it could not be measured.
    pub memory: f64,
}

/// Memory that measuring the disk takes besides the engine.
pub fn buffer_bytes(vault: &Vault) -> u64 {
    ceiling::disk_buffer_bytes(vault.experts.longest_record() as usize) as u64
}

impl Ceilings {
    /// Measures both, before any expert is in memory.
    pub fn measure(vault: &Vault, engine: &mut Engine) -> Result<Self, Failure> {
        let file = FileDisk::open(&vault.experts_path, OpenMode::Auto)?;
        let disk = ceiling::disk(&file, vault.experts.longest_record() as usize, DISK_TIME, 0)?;
        let memory = engine.memory_ceiling(passes(engine));
        Ok(Self {
            file,
            disk_best: disk.bytes_per_s,
            disk_times: 1,
            disk,
            memory_rates: memory.iter().map(|memory| memory.bytes_per_s).collect(),
            memory_buffer_bytes: memory.map_or(0, |memory| memory.buffer_bytes),
        })
    }

    /// Measures both once more, the disk at every depth: which is the best changes with a shared drive's load.
    fn again(&mut self, engine: &mut Engine) -> Result<Around, Failure> {
        let seed = self.disk_times * 7919;
        self.disk_times += 1;
        let disk = ceiling::disk(&self.file, self.disk.read_bytes, DISK_TIME, seed)?;
        self.disk_best = self.disk_best.max(disk.bytes_per_s);
        let memory = engine.memory_ceiling(passes(engine));
        self.memory_rates.extend(memory.map(|memory| memory.bytes_per_s));
        Ok(Around {
            disk: disk.random_bytes_per_s(),
            sequential: disk.sequential_bytes_per_s,
            memory: memory.map_or(f64::NAN, |memory| memory.median_bytes_per_s),
        })
    }

    /// Runs `work` between two measurements.
    pub fn around<T>(
        &mut self,
        bench: &mut Bench,
        work: impl FnOnce(&mut Bench) -> Result<T, Failure>,
    ) -> Result<(T, Around), Failure> {
        let before = self.again(&mut bench.engine)?;
        let done = work(bench)?;
        let after = self.again(&mut bench.engine)?;
        let memory = match (before.memory, after.memory) {
            (before, after) if before.is_nan() => after,
            (before, after) if after.is_nan() => before,
            (before, after) => f64::midpoint(before, after),
        };
        let disk = f64::midpoint(before.disk, after.disk);
        let sequential = f64::midpoint(before.sequential, after.sequential);
        Ok((done, Around { disk, sequential, memory }))
    }
}

fn passes(engine: &Engine) -> usize {
    let bytes = engine.info().plan.ring_bytes().max(1);
    ((STREAMED / bytes) as usize).clamp(3, PASSES)
}

/// What was noted beside the runs.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    /// Opening: backbone, memory.
    pub open_s: f64,
    /// Bytes of experts loaded before the first run.
    pub load_bytes: u64,
    /// Time that took.
    pub load_s: f64,
    /// How fast the processor went through weights, round by round.
    pub weights_rates: Vec<f64>,
    /// What decoding was expected to do.
    pub forecast: Option<Forecast>,
    /// What a token takes of the device alone.
    pub costs: Option<TokenCosts>,
}

/// Seconds of `steps` steps in which nothing overlaps but a layer's reads with its experts' arithmetic. A layer's
/// misses are those that were counted, what was read ahead of it in time among them; its experts' bytes are the mean of
/// all layers and steps.
pub fn serial_floor_s(touched: &Touched, store: &StoreSnapshot, steps: usize, around: &Around) -> f64 {
    let record = store.disk_bytes as f64 / store.loads.max(1) as f64;
    let by_misses = || store.demands_by_misses.pairs(store.demand_misses + store.ahead_hits);
    let demands: u64 = by_misses().map(|(_, demands)| demands).sum();
    let asked = (store.demand_hits + store.demand_misses) as f64 / demands.max(1) as f64;
    let experts = asked * touched.expert / around.memory;
    let layers = by_misses().map(|(misses, n)| n as f64 * (misses * record / around.disk).max(experts));
    steps as f64 * (touched.dense + touched.head) as f64 / around.memory + layers.sum::<f64>()
}

/// Machine, model and plan of a bench.
pub fn set_up(vault: &Vault, bench: &Bench, facts: &Facts) -> Record {
    let mut record = Record::default();
    machine_facts(&mut record);
    model_facts(&mut record, vault);
    let info = bench.engine.info();
    let plan = &info.plan;
    record.set("kernels", info.kernels);
    record.set("threads", plan.threads);
    record.set("direct_io", matches!(info.direct_io, DirectIo::Yes { .. }));
    record.set("plan_bytes", plan.total_bytes());
    record.set("peak_rss_bytes", machine::peak_rss_bytes());
    record.set("swapped_bytes", machine::swapped_bytes());
    record.set("ring_slots", plan.ring_slots);
    record.set("ring_share", rounded(plan.ring_slots as f64 / plan.n_experts.max(1) as f64));
    record.set("context", plan.context);
    record.set("chunk", plan.chunk);
    if let Some(tier) = &info.tier {
        record.set("device", tier.plan.device.clone());
        record.set("device_path", tier.plan.path.name());
        if let Some(note) = &tier.path_note {
            record.set("device_path_note", note.clone());
        }
        record.set("device_plan_bytes", tier.plan.total_bytes());
        record.set("device_experts", tier.plan.slots.iter().sum::<usize>());
        let share = tier.plan.slots.iter().sum::<usize>() as f64 / plan.n_experts.max(1) as f64;
        record.set("device_expert_share", rounded(share));
    }
    if let Some(forecast) = &facts.forecast {
        record.set("predicted_cpu_decode_tok_s", rounded(forecast.cpu_tok_s));
        let rounds = facts.weights_rates.iter().map(|rate| json!(rounded(rate / 1e9)));
        record.set("predicted_by_weights_gb_s", rounds.collect::<Vec<Value>>());
        if let Some(device) = &forecast.device {
            record.set("predicted_device_decode_tok_s", rounded(device.tok_s));
            record.set("predicted_device_hit_rate", rounded(device.hit_rate));
            record.set("device_token_ms", rounded(device.rates.token_s * 1e3));
            record.set("device_first_token_ms", rounded(device.rates.first_s * 1e3));
            record.set("device_wait_us", rounded(device.rates.wait_s * 1e6));
            let UploadRates { staging, import, kernel, import_many, staging_many } = device.rates.uploads;
            let over_bus = match device.rates.missing {
                Missing::OverBus(rate) => Some(rate),
                Missing::Computed | Missing::Brought => None,
            };
            let ways = [
                ("device_over_bus_gb_s", over_bus),
                ("device_upload_gb_s", Some(device.rates.upload_bytes_per_s)),
                ("device_upload_staging_gb_s", staging),
                ("device_upload_staging_many_gb_s", staging_many),
                ("device_upload_import_gb_s", import),
                ("device_upload_import_many_gb_s", import_many),
                ("device_upload_kernel_gb_s", kernel),
            ];
            for (name, rate) in ways {
                if let Some(rate) = rate.filter(|rate| rate.is_finite()) {
                    record.set(name, rounded(rate / 1e9));
                }
            }
        }
    }
    if let Some(costs) = &facts.costs {
        let TokenCosts { token_s, dispatches, dispatch_s, dispatch_in_token_s, copy_bytes_per_s, kernels } =
            costs;
        record.set("device_token_alone_ms", rounded(token_s * 1e3));
        record.set("device_token_alone_dispatches", *dispatches);
        record.set("device_copy_gb_s", rounded(copy_bytes_per_s / 1e9));
        record.set("device_dispatch_us", rounded(dispatch_s * 1e6));
        record.set("device_dispatch_in_token_us", rounded(dispatch_in_token_s * 1e6));
        // What its bytes take at the speed of a copy, and its dispatches.
        let touched = Touched::of(vault);
        let bytes_s = (touched.all() + touched.states) as f64 / copy_bytes_per_s;
        for (dispatch, suffix) in [(dispatch_s, ""), (dispatch_in_token_s, "_in_token")] {
            let bound_s = bytes_s + f64::from(*dispatches) * dispatch;
            record.set(&format!("device_bound_by_dispatch{suffix}_ms"), rounded(bound_s * 1e3));
            record
                .set(&format!("device_token_alone_of_bound_by_dispatch{suffix}"), rounded(bound_s / token_s));
        }
        let cost = |kernel: &KernelCost| {
            let workgroups: u32 = kernel.grid.iter().product();
            json!([kernel.name, workgroups, kernel.runs, rounded(kernel.seconds * 1e6)])
        };
        record.set("device_kernel_workgroups_runs_us", kernels.iter().map(cost).collect::<Vec<Value>>());
    }
    record.set("open_s", rounded(facts.open_s));
    let seconds = |time: Duration| rounded(time.as_secs_f64());
    let OpenTimes { device, read, backend, on_device } = info.open_times;
    record.set("open_read_s", seconds(read));
    if let Some(DeviceOpening { upload, kernels, shaders, pipelines, wait }) = on_device {
        record.set("open_device_s", seconds(device));
        record.set("open_backend_s", seconds(backend));
        record.set("open_upload_s", seconds(upload));
        record.set("open_kernels", kernels);
        // Summed over kernels, which are compiled side by side.
        record.set("open_shaders_s", seconds(shaders));
        record.set("open_pipelines_s", seconds(pipelines));
        record.set("open_kernels_wait_s", seconds(wait));
    }
    if facts.load_bytes > 0 {
        record.set("load_s", rounded(facts.load_s));
        record.set("load_gb_s", rounded(facts.load_bytes as f64 / facts.load_s / 1e9));
    }
    record
}

/// All figures of a bench.
pub fn record(vault: &Vault, bench: &Bench, ceilings: &Ceilings, facts: &Facts) -> Record {
    let mut record = set_up(vault, bench, facts);
    let runs = &bench.runs;
    record.set("runs", runs.len());
    let seconds = |stretch: fn(&Run) -> &Stretch| runs.iter().map(move |run| stretch(run).time.as_secs_f64());
    record.spread("ttft_cold_s", seconds(|run| &run.cold));
    record.spread("ttft_warm_s", seconds(|run| &run.warm));
    for i in 0..runs.first().map_or(0, |run| run.prefills.len()) {
        let of = |run: &Run| run.prefills[i];
        let tokens = of(&runs[0]).tokens;
        record.spread(&format!("prefill_{tokens}_tok_s"), runs.iter().map(|run| of(run).rate()));
        let bytes = runs.iter().map(|run| of(run).store.disk_bytes as f64);
        record.spread(&format!("prefill_{tokens}_disk_bytes"), bytes);
    }
    record.spread("decode_tok_s", runs.iter().map(|run| run.short.rate()));
    if let Some(forecast) = &facts.forecast {
        let predicted = forecast.device.map_or(forecast.cpu_tok_s, |device| device.tok_s);
        record.spread("decode_of_predicted", runs.iter().map(|run| run.short.rate() / predicted));
    }
    record.spread("decode_greedy_tok_s", bench.greedy.iter().map(Stretch::rate));
    record.spread("decode_long_tok_s", runs.iter().filter_map(|run| run.long).map(|long| long.rate()));

    let short: Vec<Stretch> = runs.iter().map(|run| run.short).collect();
    let per_token = |f: fn(&Stretch) -> u64| short.iter().map(move |s| f(s) as f64 / s.tokens as f64);
    record.spread("disk_bytes_per_token", per_token(|s| s.store.disk_bytes));
    if vault.experts.coded {
        record.spread("slot_bytes_per_token", per_token(|s| s.store.decoded_bytes));
        record.spread("entropy_decode_ms_per_token", per_token(|s| s.store.decode_ns).map(|ns| ns / 1e6));
        let rates = short.iter().filter_map(|s| s.store.decode_bytes_per_s());
        record.spread("entropy_decode_slot_gb_s", rates.map(|rate| rate / 1e9));
    }
    let touched = Touched::of(vault);
    record.set("touched_bytes_per_token", touched.all());
    record.spread("hit_rate", short.iter().filter_map(|s| s.store.hit_rate()));
    record.spread("ahead_hits_per_token", per_token(|s| s.store.ahead_hits));
    record.spread("ahead_waste_per_token", per_token(|s| s.store.ahead_waste));
    look_ahead(&mut record, &bench.engine.look_ahead());
    record.spread("evictions_per_token", per_token(|s| s.store.evictions));
    if bench.engine.device_tier().is_some() {
        record.spread("device_hit_rate", short.iter().filter_map(|s| s.tier.hit_rate()));
        record.spread("device_computed_here_per_token", per_token(|s| s.tier.computed));
        record.spread("device_read_over_bus_per_token", per_token(|s| s.tier.over_bus));
        record.spread("device_load_bytes_per_token", per_token(|s| s.tier.load_bytes));
        record.spread("device_submits_per_token", per_token(|s| s.tier.submits));
        record.spread("device_submit_ms_per_token", per_token(|s| s.tier.submit_ns).map(|ns| ns / 1e6));
        record.spread("device_ahead_ms_per_token", per_token(|s| s.tier.ahead_ns).map(|ns| ns / 1e6));
        record.spread("device_waits_per_token", per_token(|s| s.tier.waits));
        record.spread("device_wait_ms_per_token", per_token(|s| s.tier.wait_ns).map(|ns| ns / 1e6));
        record.spread("device_dispatches_per_token", per_token(|s| s.tier.dispatches));
    }
    record.set("overlap", bench.routes.overlap().map(rounded));
    record.set("skew", bench.routes.skew().map(rounded));
    let coverage: Map<String, Value> = (1..)
        .map(|i| i * bench.routes.top_k())
        .take_while(|width| *width <= bench.routes.n_experts().min(8 * bench.routes.top_k()))
        .map(|width| {
            let of = |covered: Option<f64>| covered.map(rounded);
            let both = [bench.routes.coverage_before(width), bench.routes.coverage_ahead(width)].map(of);
            (width.to_string(), json!(both))
        })
        .collect();
    record.set("coverage_next_token_next_layer", coverage);

    record
        .spread("demand_wait_gb_s", short.iter().filter_map(|s| s.store.read_bytes_per_s()).map(|r| r / 1e9));
    record.spread(
        "demand_wait_share",
        pairs(runs, |s, around| Some(s.store.read_bytes_per_s()? / around.disk)),
    );
    let best = |rates: &[f64]| rates.iter().copied().fold(f64::NAN, f64::max) / 1e9;
    record.set("disk_ceiling_gb_s", rounded(ceilings.disk_best / 1e9));
    record.spread("disk_around_gb_s", runs.iter().map(|run| run.around_short.disk / 1e9));
    record.spread("disk_sequential_around_gb_s", runs.iter().map(|run| run.around_short.sequential / 1e9));
    let depths: Map<String, Value> = ceilings
        .disk
        .depths
        .iter()
        .map(|(depth, rate)| (depth.to_string(), json!(rounded(rate / 1e9))))
        .chain([("sequential".to_owned(), json!(rounded(ceilings.disk.sequential_bytes_per_s / 1e9)))])
        .collect();
    record.set("disk_depths_gb_s", depths);
    record.set("memory_ceiling_gb_s", rounded(best(&ceilings.memory_rates)));
    record.spread("memory_around_gb_s", runs.iter().map(|run| run.around_short.memory / 1e9));
    record.set("memory_buffer_bytes", ceilings.memory_buffer_bytes);

    let touched_gb_s = |s: &Stretch| s.rate() * touched.all() as f64 / 1e9;
    record.spread("decode_touched_gb_s", short.iter().map(touched_gb_s));
    let memory_share = |s: &Stretch, around: &Around| Some(touched_gb_s(s) * 1e9 / around.memory);
    record.spread("decode_memory_share", pairs(runs, memory_share));
    let memory_best = ceilings.memory_rates.iter().copied().fold(f64::NAN, f64::max);
    record.spread("decode_memory_share_of_best", short.iter().map(|s| touched_gb_s(s) * 1e9 / memory_best));
    let floor_share = |s: &Stretch, around: &Around| {
        Some(serial_floor_s(&touched, &s.store, s.tokens, around) / s.time.as_secs_f64())
    };
    record.spread("decode_serial_floor_share", pairs(runs, floor_share));

    record.set("buckets_ms", buckets(&short));
    let share = |s: &Stretch| s.phases.total_ns() as f64 / 1e9 / s.time.as_secs_f64();
    record.spread("buckets_share_of_wall", short.iter().map(share));
    let kernel = runs.iter().map(|run| run.kernel_read_bytes.map_or(f64::NAN, |bytes| bytes as f64));
    record.spread("decode_kernel_read_bytes_per_token", kernel.map(|bytes| bytes / DECODE as f64));
    record
}

/// Whether the next layer is read ahead, how far, and how often rightly.
fn look_ahead(record: &mut Record, report: &LookAheadReport) {
    record.set("look_ahead", report.told.map_or_else(|| json!("auto"), |ranks| json!(ranks)));
    record.set("look_ahead_ranks", rounded(report.ranks));
    record.set("look_ahead_right_share", report.right.map(rounded));
    let by_rank = report.right_by_rank.iter().map(|share| json!(share.map(rounded)));
    record.set("look_ahead_right_share_by_rank", by_rank.collect::<Vec<Value>>());
}

/// What the device's kernels take of a decoded token, and of a prompt of 512, by its own clock: microseconds, and runs.
pub fn device_kernels(record: &mut Record, profiles: [KernelProfile; 2]) {
    for (kernels, what) in profiles.into_iter().zip(["device", "device_prefill_512"]) {
        let all: f64 = kernels.iter().map(|kernel| kernel.1).sum();
        let list: Map<String, Value> =
            kernels.into_iter().map(|(name, us, runs)| (name, json!([rounded(us), rounded(runs)]))).collect();
        record.set(&format!("{what}_kernels_us"), rounded(all));
        record.set(&format!("{what}_kernels_us_and_runs"), list);
    }
}

/// A figure of each run's decoding against what the machine could do around it.
fn pairs(runs: &[Run], f: impl Fn(&Stretch, &Around) -> Option<f64>) -> impl Iterator<Item = f64> {
    runs.iter().filter_map(move |run| f(&run.short, &run.around_short))
}

pub fn machine_facts(record: &mut Record) {
    record.set("format", "smoe-bench-1");
    record.set("version", env!("CARGO_PKG_VERSION"));
    record.set("commit", env!("SMOE_COMMIT"));
    record.set("processor", machine::processor());
    record.set("system", machine::system());
    record.set("load_average", machine::load_average());
}

fn model_facts(record: &mut Record, vault: &Vault) {
    let (spec, experts) = (&vault.spec, &vault.experts);
    let weights: u64 = experts
        .layers
        .iter()
        .flat_map(|l| l.tensors.iter().map(|t| (t.rows * t.cols) as u64 * u64::from(l.n_experts)))
        .sum();
    let bytes: u64 = experts.layers.iter().map(|l| l.used_bytes() as u64 * u64::from(l.n_experts)).sum();
    let on_disk: u64 = experts.records.iter().map(|record| record.used).sum();
    let resident: u64 = vault.backbone.iter().map(|(_, t)| (t.rows * t.cols) as u64).sum();
    record.set("model", spec.model_type.clone());
    record.set("layers", spec.n_layers());
    record.set("experts", spec.moe.n_experts);
    record.set("top_k", spec.moe.top_k);
    record.set("expert_bits_per_weight", rounded(8.0 * bytes as f64 / weights.max(1) as f64));
    if experts.coded {
        record.set("expert_disk_bits_per_weight", rounded(8.0 * on_disk as f64 / weights.max(1) as f64));
    }
    let backbone = vault.backbone.file_len as f64;
    record.set("backbone_bits_per_weight", rounded(8.0 * backbone / resident.max(1) as f64));
    record.set("expert_file_bytes", experts.file_len);
    record.set("backbone_bytes", vault.backbone.file_len);
    if let Some(manifest) = experts.manifest() {
        record.set("source", serde_json::to_value(&manifest.source).unwrap_or_default());
    }
}

/// Milliseconds per token and phase, medians.
fn buckets(stretches: &[Stretch]) -> Map<String, Value> {
    let of = |phase: Phase| {
        let mut ms: Vec<f64> =
            stretches.iter().map(|s| s.phases.phase_ns(phase) as f64 / 1e6 / s.tokens as f64).collect();
        ms.sort_unstable_by(f64::total_cmp);
        (phase.name().to_owned(), json!(rounded(median(&ms))))
    };
    Phase::ALL.into_iter().map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_says_how_far_layers_are_read_ahead_and_how_rightly() {
        let of = |report: LookAheadReport| {
            let mut record = Record::default();
            look_ahead(&mut record, &report);
            serde_json::from_str::<Value>(&record.to_json().expect("JSON")).expect("JSON")
        };
        let right_by_rank = vec![Some(0.96), Some(0.875), None];
        let auto = of(LookAheadReport { told: None, ranks: 1.5, right: Some(0.9), right_by_rank });
        let expected = json!({
            "look_ahead": "auto", "look_ahead_ranks": 1.5, "look_ahead_right_share": 0.9,
            "look_ahead_right_share_by_rank": [0.96, 0.875, null],
        });
        assert_eq!(auto, expected);
        let off = of(LookAheadReport { told: Some(0), ranks: 0.0, right: None, right_by_rank: Vec::new() });
        assert_eq!((&off["look_ahead"], &off["look_ahead_right_share"]), (&json!(0), &Value::Null));
    }
}
