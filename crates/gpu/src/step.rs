//! Steps: kernels recorded one after the other, submitted together, and waited for.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crate::device::{DeviceKind, IMMEDIATES};
use crate::memory::Slice;
use crate::shader::{Idle, Kernel, Op};
use crate::{Gpu, GpuError};

/// Commands on their way to the device. Each kernel sees what those before it wrote.
pub struct Step {
    queue: wgpu::Queue,
    /// The device's.
    failed: Arc<OnceLock<String>>,
    // Dropped before the encoder ends.
    pass: Option<wgpu::ComputePass<'static>>,
    encoder: wgpu::CommandEncoder,
    dispatches: u32,
    profile: Option<Profile>,
    without: Option<LeftOut>,
    idle: Option<Arc<Idle>>,
}

/// A kernel that is not recorded.
struct LeftOut {
    kernel: Arc<Kernel>,
    times: u32,
    /// Of the last time.
    grid: [u32; 3],
}

/// The device's clock around each kernel of a step.
struct Profile {
    times: wgpu::QuerySet,
    names: Vec<String>,
}

/// Kernels of a profiled step; those after that are not timed.
const PROFILED: u32 = 2000;

impl std::fmt::Debug for Step {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Step").field("dispatches", &self.dispatches).finish_non_exhaustive()
    }
}

/// A step that is whole, to be handed over.
#[derive(Debug)]
pub struct Recorded {
    commands: wgpu::CommandBuffer,
    dispatches: u32,
}

impl Recorded {
    /// Kernels in it.
    #[must_use]
    pub const fn dispatches(&self) -> u32 {
        self.dispatches
    }
}

/// A step that the device works on.
#[derive(Clone, Debug)]
pub struct Submitted {
    index: wgpu::SubmissionIndex,
    /// It was seen to be done.
    is_done: Arc<AtomicBool>,
}

impl Submitted {
    /// What was just handed to `queue`.
    fn new(queue: &wgpu::Queue, index: wgpu::SubmissionIndex) -> Self {
        let is_done = Arc::<AtomicBool>::default();
        let tell = is_done.clone();
        queue.on_submitted_work_done(move || tell.store(true, Ordering::Release));
        Self { index, is_done }
    }
}

/// A buffer that the host can read, for results of up to its length.
#[derive(Debug)]
pub struct Readback {
    buffer: wgpu::Buffer,
}

/// A device that does not answer for so long has hung.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
/// For how long a wait asks before it sleeps; not measured.
const SPIN: Duration = Duration::from_millis(2);

impl Gpu {
    /// An empty step.
    #[must_use]
    pub fn step(&self) -> Step {
        let encoder = self.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        Step {
            queue: self.queue.clone(),
            failed: self.failed.clone(),
            pass: None,
            encoder,
            dispatches: 0,
            profile: None,
            without: None,
            idle: None,
        }
    }

    /// An empty step whose kernels are timed by the device's own clock; none if it cannot.
    #[must_use]
    pub fn profiled_step(&self) -> Option<Step> {
        let needed = wgpu::Features::TIMESTAMP_QUERY_INSIDE_PASSES;
        self.device.features().contains(needed).then(|| {
            let times = self.device.create_query_set(&wgpu::QuerySetDescriptor {
                label: None,
                ty: wgpu::QueryType::Timestamp,
                count: 2 * PROFILED,
            });
            Step { profile: Some(Profile { times, names: Vec::new() }), ..self.step() }
        })
    }

    /// Submits a profiled step, waits for it, and tells each kernel and its nanoseconds, from its first to its last
    /// workgroup.
    ///
    /// # Errors
    /// If the device failed.
    pub fn finish_profile(
        &self,
        mut step: Step,
        tell: &mut dyn FnMut(&str, f64),
    ) -> Result<Submitted, GpuError> {
        let Some(profile) = step.profile.take() else { return Ok(step.submit()) };
        step.pass = None;
        let count = 2 * profile.names.len() as u32;
        let bytes = u64::from(count.max(2)) * 8;
        let resolved = self.device.create_buffer(&wgpu::BufferDescriptor {
            label: Some("times of kernels"),
            size: bytes,
            usage: wgpu::BufferUsages::QUERY_RESOLVE | wgpu::BufferUsages::COPY_SRC,
            mapped_at_creation: false,
        });
        let readback = self.readback(bytes)?;
        if count > 0 {
            step.encoder.resolve_query_set(&profile.times, 0..count, &resolved, 0);
            step.encoder.copy_buffer_to_buffer(&resolved, 0, &readback.buffer, 0, bytes);
        }
        let submitted = step.submit();
        let mut out = vec![0; bytes as usize];
        self.read(&readback, &submitted, &mut out)?;
        let tick = f64::from(self.queue.get_timestamp_period());
        let times: Vec<u64> = out.as_chunks::<8>().0.iter().map(|b| u64::from_le_bytes(*b)).collect();
        for (name, times) in profile.names.iter().zip(times.chunks_exact(2)) {
            tell(name, times[1].wrapping_sub(times[0]) as f64 * tick);
        }
        Ok(submitted)
    }

    /// Waits until the device has done a step.
    ///
    /// # Errors
    /// If it failed, or does not answer within a minute.
    pub fn wait(&self, submitted: &Submitted) -> Result<(), GpuError> {
        self.wait_until(submitted, |is_queue_empty| is_queue_empty)
    }

    /// Whether the device has done a step, without waiting for it.
    ///
    /// # Errors
    /// If it failed.
    pub fn is_done(&self, submitted: &Submitted) -> Result<bool, GpuError> {
        // Not by waiting for no time: in wgpu 30.0.2 that fails an assertion if another thread looks at the device meanwhile.
        if !submitted.is_done.load(Ordering::Acquire) {
            self.device.poll(wgpu::PollType::Poll).map_err(|e| self.lost(e.to_string()))?;
        }
        self.check().map(|()| submitted.is_done.load(Ordering::Acquire))
    }

    /// Waits; `is_done` is asked again and again, and told whether the device has nothing left to do.
    fn wait_until(&self, submitted: &Submitted, is_done: impl Fn(bool) -> bool) -> Result<(), GpuError> {
        // One that has hung is not waited for again.
        self.check()?;
        // A device at work beside the processor is asked again and again at first: being woken takes longer than a layer.
        let start = Instant::now();
        while self.facts().kind != DeviceKind::Software && start.elapsed() < SPIN {
            match self.device.poll(wgpu::PollType::Poll) {
                Ok(status) if is_done(status.is_queue_empty()) => break,
                Ok(_) => std::hint::spin_loop(),
                Err(e) => return Err(self.has_failed(e.to_string())),
            }
        }
        let index = Some(submitted.index.clone());
        let poll = wgpu::PollType::Wait { submission_index: index, timeout: Some(self.patience) };
        self.device.poll(poll).map_err(|e| {
            let what =
                if matches!(e, wgpu::PollError::Timeout) { "it has hung" } else { "waiting for it failed" };
            self.has_failed(format!("{what}: {e}"))
        })?;
        self.check()?;
        submitted.is_done.store(true, Ordering::Release);
        Ok(())
    }

    /// A buffer for reading up to `len` bytes back.
    ///
    /// # Errors
    /// If there is no room.
    pub fn readback(&self, len: u64) -> Result<Readback, GpuError> {
        let usage = wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST;
        let buffer = self.allocate("results", len.next_multiple_of(4), usage)?;
        Ok(Readback { buffer })
    }

    /// Waits for `submitted` and hands the first `out.len()` bytes of what it copied to `readback` over.
    ///
    /// # Errors
    /// If the device failed.
    pub fn read(&self, readback: &Readback, submitted: &Submitted, out: &mut [u8]) -> Result<(), GpuError> {
        self.read_with(readback, submitted, out.len(), |bytes| out.copy_from_slice(bytes))
    }

    /// The same for the first `len` bytes, which `take` sees where they are.
    ///
    /// # Errors
    /// If the device failed.
    pub fn read_with<T>(
        &self,
        readback: &Readback,
        submitted: &Submitted,
        len: usize,
        take: impl FnOnce(&[u8]) -> T,
    ) -> Result<T, GpuError> {
        self.check()?;
        let range = 0..(len as u64).next_multiple_of(4);
        // The mapping is a callback of the wait. Steps behind this one may still be under way.
        let mapped = Arc::new(AtomicBool::new(false));
        let told = mapped.clone();
        readback.buffer.map_async(wgpu::MapMode::Read, range.clone(), move |_| {
            told.store(true, Ordering::Relaxed);
        });
        self.wait_until(submitted, |_| mapped.load(Ordering::Relaxed))?;
        let taken = {
            let view = readback.buffer.get_mapped_range(range).map_err(|e| self.lost(e.to_string()))?;
            take(&view[..len])
        };
        readback.buffer.unmap();
        Ok(taken)
    }

    /// Hands steps to the device, one after the other, at once.
    pub fn submit(&self, steps: impl IntoIterator<Item = Recorded>) -> Submitted {
        Submitted::new(&self.queue, self.queue.submit(steps.into_iter().map(|step| step.commands)))
    }

    /// Copies a slice to the host, waiting for everything before it: for tests and rare paths.
    ///
    /// # Errors
    /// If the device failed.
    pub fn download(&self, slice: &Slice) -> Result<Vec<u8>, GpuError> {
        let readback = self.readback(slice.len)?;
        let mut step = self.step();
        step.read_back(slice, &readback, 0);
        let submitted = step.submit();
        let mut out = vec![0; slice.len as usize];
        self.read(&readback, &submitted, &mut out)?;
        Ok(out)
    }
}

impl Step {
    /// Records a kernel over `grid` workgroups, once it is compiled; `words` are its immediates, zeros follow. Nothing if
    /// the grid is empty. A kernel that was refused fails the device: what the step does without it is void.
    ///
    /// # Panics
    /// If there are too many immediates.
    pub fn run(&mut self, op: &Op, words: &[u32], grid: [u32; 3]) {
        let mut immediates = [0; IMMEDIATES as usize / 4];
        assert!(words.len() < immediates.len(), "{} immediates", words.len());
        immediates[..words.len()].copy_from_slice(words);
        if grid.contains(&0) {
            return;
        }
        if let Some(without) =
            self.without.as_mut().filter(|without| Arc::ptr_eq(&without.kernel, &op.kernel))
        {
            (without.times, without.grid) = (without.times + 1, grid);
            return;
        }
        let twin = self.idle.as_ref().and_then(|idle| idle.twin_of(&op.kernel));
        let kernel = twin.unwrap_or(&op.kernel);
        let pipeline = match kernel.pipeline() {
            Ok(pipeline) => pipeline,
            Err(why) => {
                let _ = self.failed.set(format!("it was to run {}, which it refuses: {why}", kernel.name));
                return;
            }
        };
        let pass = self.pass.get_or_insert_with(|| {
            let desc = wgpu::ComputePassDescriptor { label: None, timestamp_writes: None };
            self.encoder.begin_compute_pass(&desc).forget_lifetime()
        });
        pass.set_pipeline(pipeline);
        pass.set_bind_group(0, &op.group, &[]);
        pass.set_immediates(0, bytemuck::cast_slice(&immediates));
        let at =
            self.profile.as_mut().filter(|profile| profile.names.len() < PROFILED as usize).map(|profile| {
                profile.names.push(op.kernel.name.clone());
                2 * (profile.names.len() as u32 - 1)
            });
        if let (Some(at), Some(profile)) = (at, &self.profile) {
            pass.write_timestamp(&profile.times, at);
        }
        pass.dispatch_workgroups(grid[0], grid[1], grid[2]);
        if let (Some(at), Some(profile)) = (at, &self.profile) {
            pass.write_timestamp(&profile.times, at + 1);
        }
        self.dispatches += 1;
    }

    /// Records a copy between buffers of the device, of whole words.
    ///
    /// # Panics
    /// If the lengths differ, or both are of one buffer, which wgpu refuses.
    pub fn copy(&mut self, from: &Slice, to: &Slice) {
        assert_eq!(from.len, to.len, "bytes of a copy");
        assert!(from.buffer != to.buffer, "a copy within a buffer");
        self.pass = None;
        self.encoder.copy_buffer_to_buffer(&from.buffer, from.offset, &to.buffer, to.offset, from.len);
    }

    /// Records a copy to `offset` of what the host can read.
    pub fn read_back(&mut self, from: &Slice, to: &Readback, offset: u64) {
        self.pass = None;
        self.encoder.copy_buffer_to_buffer(&from.buffer, from.offset, &to.buffer, offset, from.len);
    }

    /// Leaves a kernel out from now on: for who wants to know what it takes among the others.
    pub fn leave_out(&mut self, kernel: Arc<Kernel>) {
        self.without = Some(LeftOut { kernel, times: 0, grid: [0; 3] });
    }

    /// Runs kernels' twins in their place from now on: for who wants to know what dispatching takes.
    pub fn idle(&mut self, idle: Arc<Idle>) {
        self.idle = Some(idle);
    }

    /// How often it was left out, and its workgroups when it last was.
    #[must_use]
    pub fn left_out(&self) -> (u32, [u32; 3]) {
        self.without.as_ref().map_or((0, [0; 3]), |without| (without.times, without.grid))
    }

    /// Kernels recorded so far.
    #[must_use]
    pub const fn dispatches(&self) -> u32 {
        self.dispatches
    }

    /// Ends it: what is left to do is to hand it over.
    #[must_use]
    pub fn finish(mut self) -> Recorded {
        self.pass = None;
        Recorded { commands: self.encoder.finish(), dispatches: self.dispatches }
    }

    /// Hands everything to the device.
    #[must_use]
    pub fn submit(mut self) -> Submitted {
        self.pass = None;
        Submitted::new(&self.queue, self.queue.submit([self.encoder.finish()]))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]
#[allow(clippy::print_stderr, reason = "what is skipped is said")]
mod tests {
    use super::*;
    use crate::{Access, Shader, Software};

    /// A kernel that takes its time.
    const SLOW: &str = "
@group(0) @binding(0) var<storage, read_write> out: array<u32>;
@compute @workgroup_size(1)
fn main() {
    for (var i = 0u; i < 400000000u; i++) { out[i & 7u] = out[(i + 1u) & 7u] * 3u + i; }
}";

    #[test]
    fn a_device_that_does_not_answer_has_failed_and_is_not_waited_for_again() {
        let Ok(mut gpu) = Gpu::open(None, Software::Accept) else {
            eprintln!("SKIPPED: no GPU, nor a program that plays one");
            return;
        };
        let out = gpu.buffer("out", 32).unwrap();
        let shader = Shader { name: "slow", source: SLOW.into(), bindings: &[Access::Write] };
        let op = gpu.bind(&gpu.kernel(&shader).unwrap(), &[&out]).unwrap();
        let mut step = gpu.step();
        step.run(&op, &[], [1; 3]);
        gpu.patience = Duration::from_millis(1);
        let slow = step.submit();
        let error = gpu.wait(&slow).unwrap_err();
        assert!(error.to_string().contains("hung"), "{error}");
        gpu.patience = Duration::MAX;
        // At once, by what is known of it.
        let again = gpu.wait(&slow).unwrap_err();
        assert_eq!(again.to_string(), error.to_string());
        assert!(gpu.check().is_err() && gpu.is_done(&slow).is_err());
    }
}
