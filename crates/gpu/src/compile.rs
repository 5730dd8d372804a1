//! Kernels in the making: a few threads compile them side by side, while whoever asked for them goes on.
//!
//! A kernel's bindings are known before it is compiled, so it is handed out, and bound, at once. wgpu takes no lock of the
//! device's while it translates a shader or has the driver make a pipeline, and error scopes are a thread's own, so neither
//! waits for another. Threads end when there is nothing left to compile.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::Kernel;

/// What compiling has taken so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CompileTimes {
    /// Kernels compiled or refused.
    pub kernels: u64,
    /// Parsing and checking WGSL, summed over kernels.
    pub shaders: Duration,
    /// Writing the driver's language (by naga) and the driver's own compiler, summed over kernels.
    pub pipelines: Duration,
}

/// A kernel to be compiled. Whatever becomes of it, its kernel is told.
pub(crate) struct Job {
    pub(crate) kernel: Arc<Kernel>,
    pub(crate) layout: wgpu::PipelineLayout,
}

impl Drop for Job {
    fn drop(&mut self) {
        self.kernel.tell(Err("it was given up before it was compiled".to_owned()));
    }
}

/// Compiles.
pub(crate) struct Compiler {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// Threads at once.
    most: usize,
}

struct Shared {
    device: wgpu::Device,
    /// Why the device can do no more.
    failed: Arc<OnceLock<String>>,
    queue: Mutex<Queue>,
    kernels: AtomicU64,
    shaders_ns: AtomicU64,
    pipelines_ns: AtomicU64,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    /// Threads that will look for another job.
    working: usize,
}

impl Compiler {
    /// For kernels of `device`, which can do no more once `failed` is set.
    pub(crate) fn new(device: wgpu::Device, failed: Arc<OnceLock<String>>) -> Self {
        let shared = Shared {
            device,
            failed,
            queue: Mutex::default(),
            kernels: AtomicU64::new(0),
            shaders_ns: AtomicU64::new(0),
            pipelines_ns: AtomicU64::new(0),
        };
        let most = thread::available_parallelism().map_or(1, usize::from);
        Self { shared: Arc::new(shared), threads: Mutex::default(), most }
    }

    /// Has a kernel compiled.
    pub(crate) fn begin(&self, job: Job) {
        let mut queue = self.shared.queue();
        queue.jobs.push_back(job);
        if queue.working == self.most {
            return;
        }
        queue.working += 1;
        drop(queue);
        let shared = self.shared.clone();
        let work = move || shared.work();
        match thread::Builder::new().name("smoe-compile".to_owned()).spawn(work) {
            Ok(thread) => {
                let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
                threads.retain(|thread| !thread.is_finished());
                threads.push(thread);
            }
            // There are no more threads to be had.
            Err(_) => self.shared.work(),
        }
    }

    pub(crate) fn times(&self) -> CompileTimes {
        let of = |ns: &AtomicU64| Duration::from_nanos(ns.load(Ordering::Relaxed));
        CompileTimes {
            kernels: self.shared.kernels.load(Ordering::Relaxed),
            shaders: of(&self.shared.shaders_ns),
            pipelines: of(&self.shared.pipelines_ns),
        }
    }
}

impl Drop for Compiler {
    /// Ends when the kernels have that are being compiled; others are given up.
    fn drop(&mut self) {
        let given_up = std::mem::take(&mut self.shared.queue().jobs);
        drop(given_up);
        let threads = self.threads.get_mut().unwrap_or_else(PoisonError::into_inner);
        // They have caught their panics.
        threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}

impl Shared {
    fn queue(&self) -> std::sync::MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Compiles until there is nothing left.
    fn work(&self) {
        loop {
            let mut queue = self.queue();
            let Some(job) = queue.jobs.pop_front() else {
                queue.working -= 1;
                return;
            };
            drop(queue);
            let made = catch_unwind(AssertUnwindSafe(|| self.compile(&job)));
            job.kernel.tell(made.unwrap_or_else(|_| Err("its compiler panicked".to_owned())));
        }
    }

    fn compile(&self, job: &Job) -> Result<wgpu::ComputePipeline, String> {
        let make = || {
            let name = Some(job.kernel.name());
            let desc = wgpu::ShaderModuleDescriptor {
                label: name,
                source: wgpu::ShaderSource::Wgsl((*job.kernel.source).into()),
            };
            let start = Instant::now();
            // SAFETY: indices stay within the bindings, whose lengths the launchers check; loops end.
            let module = unsafe {
                self.device.create_shader_module_trusted(desc, wgpu::ShaderRuntimeChecks::unchecked())
            };
            let translated = Instant::now();
            let pipeline = self.device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
                label: name,
                layout: Some(&job.layout),
                module: &module,
                entry_point: Some("main"),
                compilation_options: wgpu::PipelineCompilationOptions {
                    constants: &[],
                    zero_initialize_workgroup_memory: false,
                },
                cache: None,
            });
            let add = |to: &AtomicU64, time: Duration| {
                to.fetch_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
            };
            add(&self.shaders_ns, translated - start);
            add(&self.pipelines_ns, translated.elapsed());
            pipeline
        };
        let internal = wgpu::ErrorFilter::Internal;
        let made =
            scoped(&self.device, internal, || scoped(&self.device, wgpu::ErrorFilter::Validation, make));
        self.kernels.fetch_add(1, Ordering::Relaxed);
        let pipeline = made.and_then(|made| made)?;
        // A device that is lost makes pipelines that are none, and says so elsewhere.
        self.failed.get().map_or(Ok(pipeline), |why| Err(why.clone()))
    }
}

/// Makes `f`'s objects, telling what the device says of them.
pub(crate) fn scoped<T>(
    device: &wgpu::Device,
    filter: wgpu::ErrorFilter,
    f: impl FnOnce() -> T,
) -> Result<T, String> {
    let scope = device.push_error_scope(filter);
    let made = f();
    match pollster::block_on(scope.pop()) {
        Some(error) => Err(error.to_string()),
        None => Ok(made),
    }
}
