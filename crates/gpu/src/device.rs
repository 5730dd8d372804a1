//! Finding and opening a device.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::Duration;

use crate::compile::{CompileTimes, Compiler, scoped};
use crate::shader::{Access, Kernels, Layouts};
use crate::step::PATIENCE;
use crate::{GpuError, import};

/// What kind of device it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    /// A card with memory of its own.
    Discrete,
    /// A GPU that shares the processor's memory.
    Integrated,
    /// Of a virtual machine, or unknown.
    Other,
    /// A program that plays a GPU on the processor: for tests.
    Software,
}

/// Whether a software device will do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Software {
    /// It will, if there is nothing better.
    Accept,
    /// Only hardware.
    Refuse,
}

/// What is known of a device before it is opened.
#[derive(Clone, Debug)]
pub struct DeviceFacts {
    /// As the driver names it.
    pub name: String,
    /// `vulkan` or `metal`.
    pub api: &'static str,
    /// The driver and its version.
    pub driver: String,
    /// What kind of device it is.
    pub kind: DeviceKind,
    /// Smallest and largest width of a subgroup.
    pub subgroup: (u32, u32),
    /// Bytes of memory of its own, or of the share of the processor's that it may use; `None` if the driver
    /// does not tell.
    pub memory: Option<u64>,
    /// Most bytes of one binding.
    pub max_binding: u64,
    /// Most bytes of one buffer.
    pub max_buffer: u64,
    /// Why it cannot run the kernels; `None` if it can.
    pub unusable: Option<String>,
}

impl std::fmt::Display for DeviceFacts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({}, {})", self.name, self.api, self.driver)
    }
}

/// What a device is made to do at one of its allocations: for who wants to see what comes of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It has no room for this one.
    NoRoom,
    /// Nor for any after it.
    Full,
    /// It is lost.
    Lost,
    /// It does not import the host's memory, the next time that it is asked to: allocations go on.
    NoImport,
}

/// What the kernels cannot do without.
const NEEDED: wgpu::Features = wgpu::Features::SUBGROUP.union(wgpu::Features::IMMEDIATES);
/// Bytes of immediates, as many as Vulkan promises: 32 words.
pub(crate) const IMMEDIATES: u32 = 128;
/// Storage buffers of a kernel.
const BINDINGS: u32 = 8;
/// Threads of a workgroup, and bytes that they share.
const THREADS: u32 = 256;
const SHARED_BYTES: u32 = 16 << 10;
/// The same where the device has more: the most that kernels use.
const MOST_THREADS: u32 = 1024;
const MOST_SHARED_BYTES: u32 = 32 << 10;
const MOST_WIDE_SHARED_BYTES: u32 = 48 << 10;

fn instance() -> wgpu::Instance {
    let mut desc = wgpu::InstanceDescriptor::new_without_display_handle();
    desc.backends = wgpu::Backends::VULKAN | wgpu::Backends::METAL;
    desc.flags = wgpu::InstanceFlags::empty();
    wgpu::Instance::new(desc)
}

fn adapters(instance: &wgpu::Instance) -> Vec<wgpu::Adapter> {
    pollster::block_on(instance.enumerate_adapters(wgpu::Backends::VULKAN | wgpu::Backends::METAL))
}

fn facts(adapter: &wgpu::Adapter) -> DeviceFacts {
    let (info, limits) = (adapter.get_info(), adapter.limits());
    let missing = NEEDED - adapter.features();
    let unusable = if !missing.is_empty() {
        Some(format!("lacks {missing:?}"))
    } else if limits.max_storage_buffers_per_shader_stage < BINDINGS
        || limits.max_immediate_size < IMMEDIATES
        || limits.max_compute_invocations_per_workgroup < THREADS
        || limits.max_compute_workgroup_size_x < THREADS
        || limits.max_compute_workgroup_storage_size < SHARED_BYTES
    {
        Some("its limits are too low".to_owned())
    } else if !(4..=128).contains(&info.subgroup_min_size) || info.subgroup_max_size > 128 {
        Some(format!("subgroups of {} to {}", info.subgroup_min_size, info.subgroup_max_size))
    } else {
        None
    };
    DeviceFacts {
        kind: match info.device_type {
            wgpu::DeviceType::DiscreteGpu => DeviceKind::Discrete,
            wgpu::DeviceType::IntegratedGpu => DeviceKind::Integrated,
            wgpu::DeviceType::Cpu => DeviceKind::Software,
            wgpu::DeviceType::Other | wgpu::DeviceType::VirtualGpu => DeviceKind::Other,
        },
        api: if info.backend == wgpu::Backend::Metal { "metal" } else { "vulkan" },
        driver: format!("{} {}", info.driver, info.driver_info).trim().to_owned(),
        subgroup: (info.subgroup_min_size, info.subgroup_max_size),
        memory: memory(adapter),
        max_binding: limits.max_storage_buffer_binding_size,
        max_buffer: limits.max_buffer_size,
        name: info.name,
        unusable,
    }
}

/// Bytes of the largest heap of the device's own memory; on macOS, of what it may use of the common one.
fn memory(adapter: &wgpu::Adapter) -> Option<u64> {
    #[cfg(not(target_os = "macos"))]
    {
        // SAFETY: the handles are only asked for facts, and live as long as the guard.
        unsafe {
            let hal = adapter.as_hal::<wgpu::hal::api::Vulkan>()?;
            let instance = hal.shared_instance().raw_instance();
            let properties = instance.get_physical_device_memory_properties(hal.raw_physical_device());
            let heaps = properties.memory_heaps_as_slice().iter();
            heaps.filter(|heap| heap.flags.as_raw() & DEVICE_LOCAL != 0).map(|heap| heap.size).max()
        }
    }
    #[cfg(target_os = "macos")]
    {
        use objc2_metal::MTLDevice;
        // SAFETY: the device is only asked for a fact, and lives as long as the guard.
        let hal = unsafe { adapter.as_hal::<wgpu::hal::api::Metal>()? };
        Some(hal.raw_device().recommendedMaxWorkingSetSize())
    }
}

/// `VK_MEMORY_HEAP_DEVICE_LOCAL_BIT`.
#[cfg(not(target_os = "macos"))]
const DEVICE_LOCAL: u32 = 1;

/// Every device that the drivers name, the one that [`Gpu::open`] prefers first.
#[must_use]
pub fn devices() -> Vec<DeviceFacts> {
    sorted(&instance()).into_iter().map(|(facts, _)| facts).collect()
}

fn sorted(instance: &wgpu::Instance) -> Vec<(DeviceFacts, wgpu::Adapter)> {
    let mut found: Vec<_> = adapters(instance).into_iter().map(|a| (facts(&a), a)).collect();
    found.sort_by_key(|(facts, _)| {
        let rank = match facts.kind {
            DeviceKind::Discrete => 0,
            DeviceKind::Integrated => 1,
            DeviceKind::Other => 2,
            DeviceKind::Software => 3,
        };
        (facts.unusable.is_some(), rank, std::cmp::Reverse(facts.memory))
    });
    found
}

/// The best device, or the one whose name contains `name`.
fn choose(name: Option<&str>, software: Software) -> Result<(DeviceFacts, wgpu::Adapter), GpuError> {
    let mut why = Vec::new();
    for (facts, adapter) in sorted(&instance()) {
        let named = name.is_none_or(|n| facts.name.to_lowercase().contains(&n.to_lowercase()));
        if let Some(reason) = &facts.unusable {
            why.push(format!("{facts}: {reason}"));
        } else if !named {
            why.push(format!("{facts}: not the one asked for"));
        } else if facts.kind == DeviceKind::Software && software == Software::Refuse {
            why.push(format!("{facts}: plays a GPU on the processor; taken only if asked for"));
        } else {
            return Ok((facts, adapter));
        }
    }
    let why = if why.is_empty() { "no Vulkan or Metal driver".to_owned() } else { why.join("; ") };
    Err(GpuError::None { why })
}

/// An open device.
///
/// A failed command does not panic: it is kept, and the next [`Gpu::check`], wait or read tells it.
pub struct Gpu {
    facts: DeviceFacts,
    pub(crate) device: wgpu::Device,
    pub(crate) queue: wgpu::Queue,
    /// What imports must be aligned to, or why there are none.
    pub(crate) import_alignment: Result<u64, String>,
    pub(crate) failed: Arc<OnceLock<String>>,
    /// For how long it is waited for.
    pub(crate) patience: Duration,
    /// Allocations until a fault, and which.
    fault: Mutex<Option<(usize, Fault)>>,
    pub(crate) fused: OnceLock<bool>,
    pub(crate) kernels: Mutex<Kernels>,
    pub(crate) compiler: Compiler,
    pub(crate) layouts: Mutex<HashMap<Vec<Access>, Layouts>>,
}

impl std::fmt::Debug for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gpu").field("facts", &self.facts).finish_non_exhaustive()
    }
}

impl Gpu {
    /// Opens the best device, or the one whose name contains `name` (whatever the case).
    ///
    /// # Errors
    /// If there is none, none is usable, or the best refuses.
    pub fn open(name: Option<&str>, software: Software) -> Result<Self, GpuError> {
        let (facts, adapter) = choose(name, software)?;
        Self::open_adapter(facts, &adapter)
    }

    /// The same, but a device that this process has open and that works is not opened again: its kernels are
    /// compiled, and drivers do not like to be asked for many at once.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn shared(name: Option<&str>, software: Software) -> Result<Arc<Self>, GpuError> {
        static OPEN: Mutex<Vec<Weak<Gpu>>> = Mutex::new(Vec::new());
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        let (facts, adapter) = choose(name, software)?;
        let same = |gpu: &Arc<Self>| gpu.facts.to_string() == facts.to_string() && gpu.check().is_ok();
        if let Some(gpu) = open.iter().filter_map(Weak::upgrade).find(same) {
            return Ok(gpu);
        }
        let gpu = Arc::new(Self::open_adapter(facts, &adapter)?);
        open.retain(|gpu| gpu.strong_count() > 0);
        open.push(Arc::downgrade(&gpu));
        Ok(gpu)
    }

    fn open_adapter(facts: DeviceFacts, adapter: &wgpu::Adapter) -> Result<Self, GpuError> {
        let wanted = wgpu::Features::TIMESTAMP_QUERY | wgpu::Features::TIMESTAMP_QUERY_INSIDE_PASSES;
        let desc = wgpu::DeviceDescriptor {
            label: None,
            required_features: NEEDED | (adapter.features() & wanted),
            required_limits: adapter.limits(),
            ..Default::default()
        };
        let (device, queue, import_alignment) =
            import::open(adapter, &desc).map_err(|why| GpuError::Open { device: facts.to_string(), why })?;
        let failed = Arc::new(OnceLock::new());
        let lost = failed.clone();
        device.set_device_lost_callback(move |reason, what| {
            if reason != wgpu::DeviceLostReason::Destroyed {
                let _ = lost.set(format!("the device was lost: {what}"));
            }
        });
        let refused = failed.clone();
        device.on_uncaptured_error(Arc::new(move |error: wgpu::Error| {
            let _ = refused.set(error.to_string());
        }));
        let compiler = Compiler::new(device.clone(), failed.clone());
        Ok(Self {
            facts,
            device,
            queue,
            import_alignment,
            failed,
            patience: PATIENCE,
            fault: Mutex::default(),
            fused: OnceLock::new(),
            compiler,
            kernels: Mutex::default(),
            layouts: Mutex::default(),
        })
    }

    /// What was known of it.
    #[must_use]
    pub const fn facts(&self) -> &DeviceFacts {
        &self.facts
    }

    /// Lanes that share a group of int8 activations, each with whole words of four: as many as are surely of one
    /// subgroup.
    pub(crate) fn team(&self, group: usize) -> usize {
        let surely = 1 << self.facts.subgroup.0.ilog2();
        (group / 4).min(surely)
    }

    /// Whether 32 neighbouring lanes are surely of one subgroup.
    pub(crate) const fn has_wide_subgroups(&self) -> bool {
        self.facts.subgroup.0 >= 32
    }

    /// Storage buffers that a kernel may have.
    pub(crate) fn most_bindings(&self) -> usize {
        self.device.limits().max_storage_buffers_per_shader_stage as usize
    }

    /// Bytes that a workgroup may share.
    pub(crate) fn shared_bytes(&self) -> u32 {
        self.device.limits().max_compute_workgroup_storage_size.min(MOST_SHARED_BYTES)
    }

    /// The same where 32 lanes share a tile, whose workgroups need more.
    pub(crate) fn wide_shared_bytes(&self) -> u32 {
        self.device.limits().max_compute_workgroup_storage_size.min(MOST_WIDE_SHARED_BYTES)
    }

    /// Most threads of a workgroup that is as wide as it likes.
    pub(crate) fn most_threads(&self) -> usize {
        let limits = self.device.limits();
        let most = limits.max_compute_invocations_per_workgroup.min(limits.max_compute_workgroup_size_x);
        most.min(MOST_THREADS) as usize
    }

    /// Gives the device up, as if it had failed: for who wants to see what comes of it.
    pub fn lose(&self, why: &str) {
        let _ = self.failed.set(why.to_owned());
        self.device.destroy();
    }

    /// Has the allocation fail that follows so many others.
    pub fn fail_at(&self, allocations: usize, fault: Fault) {
        *self.fault.lock().unwrap_or_else(PoisonError::into_inner) = Some((allocations, fault));
    }

    /// How many allocations lie before that failure, if it is still to come or goes on.
    #[must_use]
    pub fn faults_after(&self) -> Option<usize> {
        self.fault.lock().unwrap_or_else(PoisonError::into_inner).map(|(left, _)| left)
    }

    /// Nothing fails any longer that need not.
    pub fn end_faults(&self) {
        *self.fault.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Whether an allocation is to find no room.
    fn is_to_fail(&self) -> bool {
        let mut at = self.fault.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut *at {
            None | Some((_, Fault::NoImport)) => false,
            Some((0, Fault::Full)) => true,
            Some((0, fault)) => {
                let fault = *fault;
                *at = None;
                if fault == Fault::Lost {
                    self.lose("lost at an allocation");
                }
                fault == Fault::NoRoom
            }
            Some((left, _)) => {
                *left -= 1;
                false
            }
        }
    }

    /// Whether an import is to be refused.
    pub(crate) fn is_to_refuse(&self) -> bool {
        let mut at = self.fault.lock().unwrap_or_else(PoisonError::into_inner);
        at.take_if(|(_, fault)| *fault == Fault::NoImport).is_some()
    }

    /// Makes a buffer.
    pub(crate) fn allocate(
        &self,
        what: &str,
        size: u64,
        usage: wgpu::BufferUsages,
    ) -> Result<wgpu::Buffer, GpuError> {
        let no_room =
            || GpuError::OutOfMemory { device: self.facts.to_string(), what: what.to_owned(), bytes: size };
        if self.is_to_fail() {
            return Err(no_room());
        }
        let make = || {
            let label = Some(what);
            self.device.create_buffer(&wgpu::BufferDescriptor {
                label,
                size,
                usage,
                mapped_at_creation: false,
            })
        };
        let buffer = self.scoped(wgpu::ErrorFilter::OutOfMemory, make).map_err(|_| no_room())?;
        self.check()?;
        Ok(buffer)
    }

    /// Whether everything so far has worked.
    ///
    /// # Errors
    /// [`GpuError::Lost`], for ever after the first failure.
    pub fn check(&self) -> Result<(), GpuError> {
        match self.failed.get() {
            Some(why) => Err(self.lost(why.clone())),
            None => Ok(()),
        }
    }

    /// It has failed: nothing is asked of it any more.
    pub(crate) fn has_failed(&self, why: String) -> GpuError {
        let _ = self.failed.set(why.clone());
        self.lost(why)
    }

    /// What was said first tells more than what followed from it.
    pub(crate) fn lost(&self, why: String) -> GpuError {
        GpuError::Lost { device: self.facts.to_string(), why: self.failed.get().cloned().unwrap_or(why) }
    }

    /// Makes `f`'s objects, telling what the device says of them.
    pub(crate) fn scoped<T>(&self, filter: wgpu::ErrorFilter, f: impl FnOnce() -> T) -> Result<T, String> {
        scoped(&self.device, filter, f)
    }

    /// What compiling kernels has taken so far.
    #[must_use]
    pub fn compile_times(&self) -> CompileTimes {
        self.compiler.times()
    }
}
