//! What the device does with this model, measured before it is used.

use std::sync::Arc;
use std::time::{Duration, Instant};

use smoe_gpu::{CopyKernel, DeviceKind, Gpu, GpuError, Idle, Kernel, Links, Slice, Step, Submitted};

use super::lent::Ring;
use super::tier::Pretence;
use super::{GpuBackend, Pending};
use crate::EngineError;
use crate::backend::{KernelCost, TokenCosts};
use crate::device::ExpertPath;
use crate::forecast::{DeviceRates, Missing, UploadRates};

/// Times that each is measured, the first of which is not counted.
const TIMES: usize = 6;
/// A device that was idle runs slowly at first: tokens are computed for so long before some are timed, at least one.
/// On an H200 tokens took 17 ms at first, 13 after 0.25 s, later 5 to 7 (EXP-GPU-04).
const WARM_UP: Duration = Duration::from_secs(1);
/// Experts of an upload that is timed.
const UPLOADED: usize = 2;
/// The same for a prompt: about what it lacks of a layer.
const MANY_UPLOADED: usize = 32;
/// Bytes of memory that uploads are timed from, the first ones written long before the last.
const COLD_BYTES: usize = 128 << 20;
/// Tokens that are handed over together where the device alone is timed: what a few take is taken off what many do, and with it
/// the cost of handing over and waiting.
const FEW: usize = 1;
const MANY: usize = 8;
/// For so long a bus is tried at least.
const BUS_WAKES: Duration = Duration::from_millis(30);
/// What a layer takes that halts and has one expert computed by the processor, besides the product: EXP-GPU-20. And bytes per second
/// of that product, of a processor with two channels of memory, which is not timed.
const HALTED_S: f64 = 150e-6;
const PRODUCTS_BYTES_PER_S: f64 = 50e9;
/// Dispatches of next to nothing that are timed.
const LINKED: usize = 400;
/// Bytes that are copied: several times what a cache holds.
const COPIED: u64 = 512 << 20;
/// Tokens that follow each other before they begin again at the first position: as many as a block holds.
const POSITIONS: u32 = 32;

/// What is done to the kernels of a token that is timed.
enum Change {
    Nothing,
    /// One is left out.
    Without(Arc<Kernel>),
    /// They return at once.
    Idle(Arc<Idle>),
}

/// Seconds of one of `count` dispatches that `record` records, given its number.
fn time_each(gpu: &Gpu, count: usize, record: &dyn Fn(&mut Step, usize)) -> Result<f64, GpuError> {
    let steps = |n: usize| {
        let start = Instant::now();
        let mut step = gpu.step();
        (0..n).for_each(|i| record(&mut step, i));
        let recorded = step.finish();
        let recording = start.elapsed();
        let submitted = gpu.submit([recorded]);
        gpu.wait(&submitted)?;
        Ok::<_, GpuError>((start.elapsed() - recording).as_secs_f64())
    };
    let mut times = Vec::with_capacity(TIMES);
    for _ in 0..TIMES {
        // With it goes what handing over and waiting cost.
        let one = steps(1)?;
        times.push((steps(1 + count)? - one) / count as f64);
    }
    Ok(median(times))
}

fn time_links(gpu: &Gpu) -> Result<f64, GpuError> {
    let links = Links::new(gpu)?;
    time_each(gpu, LINKED, &|step, i| links.record(step, i))
}

/// Not a number where there is no room.
fn time_copies(gpu: &Gpu) -> Result<f64, GpuError> {
    let software = gpu.facts().kind == DeviceKind::Software;
    let bytes = if software { COPIED >> 6 } else { COPIED };
    let (Ok(from), Ok(to)) = (gpu.buffer("from", bytes), gpu.buffer("to", bytes)) else {
        return Ok(f64::NAN);
    };
    let copy = CopyKernel::new(gpu, &from, &to)?;
    let seconds = time_each(gpu, if software { 1 } else { 16 }, &|step, _| copy.record(step))?;
    Ok(copy.bytes() as f64 / seconds.max(1e-12))
}

fn median(mut times: Vec<f64>) -> f64 {
    times.remove(0);
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Seconds in which the next slots of the ring come to `to`, once.
fn time_copy(
    gpu: &Gpu,
    ring: &Ring,
    from: &mut impl Iterator<Item = usize>,
    to: &[Slice],
    by_kernel: bool,
) -> Result<f64, GpuError> {
    let pairs: Vec<_> = to.iter().zip(from).map(|(to, from)| (ring.slot(from, to.len()), to)).collect();
    let kernels = if by_kernel {
        pairs.iter().map(|(from, to)| CopyKernel::new(gpu, from, to)).collect::<Result<Vec<_>, _>>()?
    } else {
        Vec::new()
    };
    let start = Instant::now();
    let mut step = gpu.step();
    if by_kernel {
        kernels.iter().for_each(|kernel| kernel.record(&mut step));
    } else {
        pairs.iter().for_each(|(from, to)| step.copy(from, to));
    }
    gpu.wait(&step.submit())?;
    Ok(start.elapsed().as_secs_f64())
}

/// Whether a kernel that reads an expert of `len` bytes over the bus is done before the processor would have computed it.
///
/// # Errors
/// If the device fails, or has no room for two experts.
pub(crate) fn is_bus_worth_it(gpu: &Gpu, ring: &Ring, len: u64) -> Result<bool, GpuError> {
    let to = [gpu.buffer("an expert", len)?, gpu.buffer("an expert", len)?];
    let mut from = (0..ring.slots()).cycle();
    let (began, mut least) = (Instant::now(), f64::INFINITY);
    // A bus that was idle is slow at first.
    while least.is_infinite() || began.elapsed() < BUS_WAKES {
        least = least.min(time_copy(gpu, ring, &mut from, &to, true)?);
    }
    let over_bus = least / to.len() as f64;
    Ok(over_bus <= HALTED_S + len as f64 / PRODUCTS_BYTES_PER_S)
}

impl GpuBackend {
    /// Times a token, handing over and waiting, and uploads. Keys and values of the first block, and slots, are written:
    /// none if an expert or a token is there already.
    pub(super) fn measure_rates(&mut self) -> Result<Option<DeviceRates>, EngineError> {
        if !self.tier.is_empty() || self.tokens > 0 {
            return Ok(None);
        }
        let uploads = self.time_uploads()?;
        let upload_bytes_per_s = match self.plan.path {
            ExpertPath::InPlace => f64::INFINITY,
            ExpertPath::Import | ExpertPath::ZeroCopy => uploads.import.unwrap_or(f64::NAN),
            _ => uploads.staging.unwrap_or(f64::INFINITY),
        };
        self.tier.pretend(&self.gpu, Pretence::Here);
        let (token, apart) = (self.time_tokens(false), self.time_tokens(true));
        let behind = if self.plan.path == ExpertPath::ZeroCopy {
            self.tier.pretend(&self.gpu, Pretence::Behind);
            Some(self.time_tokens(false))
        } else {
            None
        };
        self.tier.pretend(&self.gpu, Pretence::None);
        let ((token_s, first_s, dispatches), (apart_s, ..)) = (token?, apart?);
        let wait_s = (apart_s - token_s).max(0.0) / self.layers.len() as f64;
        let missing = match behind.transpose()? {
            Some((behind_s, ..)) => {
                let bytes = self.tier.token_bytes(self.spec.moe.top_k);
                Missing::OverBus(bytes as f64 / (behind_s - token_s).max(1e-9))
            }
            None if self.host.is_some() => Missing::Computed,
            None => Missing::Brought,
        };
        let rates =
            DeviceRates { token_s, first_s, dispatches, wait_s, upload_bytes_per_s, uploads, missing };
        self.pace_by(&rates);
        Ok(Some(rates))
    }

    /// Times a token that follows another at once, and the same without each of its kernels. Under the conditions of
    /// [`Self::measure_rates`], and none if those are not given.
    pub(super) fn measure_costs(&mut self) -> Result<Option<TokenCosts>, EngineError> {
        if !self.tier.is_empty() || self.tokens > 0 {
            return Ok(None);
        }
        self.tier.pretend(&self.gpu, Pretence::Here);
        let costs = self.time_kernels();
        self.tier.pretend(&self.gpu, Pretence::None);
        self.recorder.clear();
        self.headed.clear();
        (self.tokens, self.tokens_done, self.pending) = (0, 0, Pending::Nothing);
        Ok(Some(costs?))
    }

    fn time_kernels(&mut self) -> Result<TokenCosts, EngineError> {
        let token_s = self.time_warm()?;
        let (mut kernels, mut run, mut dispatches) = (Vec::new(), Vec::new(), 0);
        for kernel in self.gpu.compiled() {
            let name = kernel.name().to_owned();
            let (without_s, runs, grid) = self.time_together(&Change::Without(kernel.clone()))?;
            if runs > 0 {
                dispatches += runs;
                run.push(kernel);
                kernels.push(KernelCost {
                    name,
                    grid,
                    runs,
                    seconds: (token_s - without_s) / f64::from(runs),
                });
            }
        }
        kernels.sort_by(|a, b| (b.seconds * f64::from(b.runs)).total_cmp(&(a.seconds * f64::from(a.runs))));
        let idle = Change::Idle(Arc::new(self.gpu.idle(&run)?));
        // The device had nothing to do while these were compiled, for seconds if they are long (EXP-GPU-13).
        self.time_warm()?;
        let dispatch_in_token_s = self.time_together(&idle)?.0 / f64::from(dispatches);
        let dispatch_s = time_links(&self.gpu)?;
        let copy_bytes_per_s = time_copies(&self.gpu)?;
        Ok(TokenCosts { token_s, dispatches, dispatch_s, dispatch_in_token_s, copy_bytes_per_s, kernels })
    }

    /// Seconds of a token among others, once the device is warm.
    fn time_warm(&mut self) -> Result<f64, EngineError> {
        let warm_up = if self.gpu.facts().kind == DeviceKind::Software { Duration::ZERO } else { WARM_UP };
        let began = Instant::now();
        loop {
            let token_s = self.time_together(&Change::Nothing)?.0;
            if began.elapsed() >= warm_up {
                return Ok(token_s);
            }
        }
    }

    /// Seconds of a token among others that follow each other at once, or of what a change leaves of it; how often a kernel
    /// was left out, and its workgroups.
    fn time_together(&mut self, change: &Change) -> Result<(f64, u32, [u32; 3]), EngineError> {
        let software = self.gpu.facts().kind == DeviceKind::Software;
        let (rounds, many) = if software { (2, FEW + 1) } else { (TIMES, MANY) };
        let mut times = Vec::with_capacity(rounds);
        let mut left_out = (0, [0; 3]);
        for _ in 0..rounds {
            let mut seconds = [0.0; 2];
            for (seconds, tokens) in seconds.iter_mut().zip([FEW, many]) {
                self.begin_step(&[0]);
                self.recorder.clear();
                self.gpu.write(&self.tables, 0, &[0; 4]);
                self.visible = 1;
                self.nets.iter_mut().for_each(|nets| nets.pretend(&self.gpu));
                for buffer in &self.rows {
                    self.gpu.write(&buffer.rows, 0, bytemuck::cast_slice(&[0u32, 0, 0, 0]));
                }
                match change {
                    Change::Nothing => {}
                    Change::Without(kernel) => self.recorder.step().leave_out(kernel.clone()),
                    Change::Idle(idle) => self.recorder.step().idle(idle.clone()),
                }
                let layers = self.layers.len();
                let mut reading = None;
                for _ in 0..tokens {
                    self.ends.embed.record(self.recorder.step(), 1);
                    (0..layers).for_each(|layer| self.record_layer(layer));
                    reading = Some(self.record_reading(0, layers, &[0]));
                }
                let (times, grid) = self.recorder.step().left_out();
                left_out = (times / tokens as u32, grid);
                if matches!(change, Change::Without(_)) && times == 0 {
                    self.recorder.clear();
                    return Ok((0.0, 0, grid));
                }
                let step = self.recorder.ahead(None);
                let start = Instant::now();
                if let (Some(submitted), Some(reading)) = (self.submit_with(step), reading) {
                    self.read_flow(&submitted, reading, &[0])?;
                }
                *seconds = start.elapsed().as_secs_f64();
            }
            times.push((seconds[1] - seconds[0]) / (many - FEW) as f64);
        }
        Ok((median(times), left_out.0, left_out.1))
    }

    /// Seconds of a token whose layers are handed over together, or one by one with a wait for each, and of the first of
    /// them; its kernels.
    fn time_tokens(&mut self, apart: bool) -> Result<(f64, f64, u32), EngineError> {
        let (mut times, mut first, mut dispatches) = (Vec::with_capacity(TIMES), None, 0);
        // A software device has no clock of its own, and takes its time.
        let warm_up = if self.gpu.facts().kind == DeviceKind::Software { Duration::ZERO } else { WARM_UP };
        let began = Instant::now();
        let mut positions = (0..POSITIONS.min(self.context as u32)).cycle();
        while times.len() < TIMES {
            let position = positions.next().unwrap_or(0);
            let start = Instant::now();
            let before = self.meter.dispatches.get();
            self.begin_step(&[0]);
            self.gpu.write(&self.tables, 0, &[0; 4]);
            self.visible = position as usize + 1;
            self.nets.iter_mut().for_each(|nets| nets.pretend(&self.gpu));
            for buffer in &self.rows {
                self.gpu.write(&buffer.rows, 0, bytemuck::cast_slice(&[position, 0, 0, 0]));
            }
            if apart {
                self.flow_apart(&[0])?
            } else {
                self.flow_all(0, &[0])?
            }
            let seconds = start.elapsed().as_secs_f64();
            first.get_or_insert(seconds);
            if times.is_empty() && began.elapsed() < warm_up {
                continue;
            }
            times.push(seconds);
            dispatches = (self.meter.dispatches.get() - before) as u32;
        }
        self.headed.clear();
        (self.tokens, self.tokens_done, self.pending) = (0, 0, Pending::Nothing);
        Ok((median(times), first.unwrap_or(f64::NAN), dispatches))
    }

    /// Bytes per second of experts that come by [`UPLOADED`], as a layer's misses do, or by as many as a layer has slots, in each
    /// of the ways that there are, from memory that no cache holds.
    fn time_uploads(&mut self) -> Result<UploadRates, EngineError> {
        let mut rates = UploadRates::default();
        let Some(len) = self.tier.slot_bytes(0).filter(|_| !self.reads_in_place()) else { return Ok(rates) };
        let most = self.tier.room(0).min(MANY_UPLOADED);
        rates.staging = Some(self.time_staging(len, UPLOADED)?);
        rates.staging_many = Some(self.time_staging(len, most)?);
        if let Some(ring) = self.ring.clone() {
            rates.import = Some(self.time_copies_of(&ring, len, UPLOADED, false)?);
            rates.import_many = Some(self.time_copies_of(&ring, len, most, false)?);
            rates.kernel = Some(self.time_copies_of(&ring, len, UPLOADED, true)?);
        }
        Ok(rates)
    }

    /// Slots of the ring one after the other, `count` at a time, to the first layer's.
    fn time_copies_of(
        &self,
        ring: &Ring,
        len: u64,
        count: usize,
        by_kernel: bool,
    ) -> Result<f64, EngineError> {
        let mut from = (0..ring.slots()).cycle();
        let to: Vec<_> = (0..count as u32).map(|to| self.tier.slot(0, to, len)).collect();
        let mut times = Vec::with_capacity(TIMES);
        for _ in 0..TIMES {
            times.push(time_copy(&self.gpu, ring, &mut from, &to, by_kernel)?);
        }
        Ok((count as u64 * len) as f64 / median(times))
    }

    /// Copied by the processor, `count` at a time.
    fn time_staging(&self, len: u64, count: usize) -> Result<f64, EngineError> {
        let upload = count * len as usize;
        // Not zeros: those would be one page.
        let experts = vec![1; upload * (COLD_BYTES / upload).max(TIMES)];
        let mut times = Vec::with_capacity(TIMES);
        for experts in experts.chunks_exact(upload).take(TIMES) {
            let start = Instant::now();
            let parts = (0..).zip(experts.chunks_exact(len as usize));
            let parts: Vec<_> = parts.map(|(slot, bytes)| (self.tier.slot(0, slot, len), bytes)).collect();
            self.gpu.write_all(&parts, &|tasks, task| self.pool.run(tasks, task));
            let submitted: Submitted = self.gpu.step().submit();
            self.gpu.wait(&submitted)?;
            times.push(start.elapsed().as_secs_f64());
        }
        Ok(upload as f64 / median(times))
    }
}
