//! Shaders: WGSL, made into kernels once, and bound to buffers as launchers.
//!
//! Bounds are not checked on the device and shared memory is not zeroed there: launchers check shapes before
//! anything is recorded, and a kernel writes what it reads. So a kernel is trusted with its bindings: each
//! is as long as the launcher demands.

use std::borrow::Cow;
use std::sync::{Arc, PoisonError};

use crate::device::IMMEDIATES;
use crate::memory::Slice;
use crate::{Gpu, GpuError};

/// What a kernel does with a binding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// Reads it.
    Read,
    /// Reads and writes it.
    Write,
}

/// A kernel's source: `@group(0) @binding(i)` is the i-th of `bindings`, the entry point is `main`.
#[derive(Clone, Debug)]
pub struct Shader<'a> {
    /// Name, for messages and profiles.
    pub name: &'a str,
    /// WGSL.
    pub source: Cow<'a, str>,
    /// Its storage buffers.
    pub bindings: &'a [Access],
}

/// What kernels of the same bindings have in common.
#[derive(Clone, Debug)]
pub(crate) struct Layouts {
    group: wgpu::BindGroupLayout,
    pipeline: wgpu::PipelineLayout,
}

/// A compiled kernel.
#[derive(Debug)]
pub struct Kernel {
    pub(crate) name: String,
    pub(crate) pipeline: wgpu::ComputePipeline,
    layout: wgpu::BindGroupLayout,
    bindings: usize,
}

/// A kernel over the buffers it works on.
#[derive(Clone, Debug)]
pub struct Op {
    pub(crate) kernel: Arc<Kernel>,
    pub(crate) group: wgpu::BindGroup,
}

impl Kernel {
    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl Op {
    /// Name of its kernel.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.kernel.name
    }
}

impl Gpu {
    /// Every kernel that was compiled so far.
    #[must_use]
    pub fn compiled(&self) -> Vec<Arc<Kernel>> {
        self.kernels.lock().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }

    /// Name and WGSL of every kernel that was compiled so far: for those who look at what becomes of it.
    #[must_use]
    pub fn sources(&self) -> Vec<(String, String)> {
        let kernels = self.kernels.lock().unwrap_or_else(PoisonError::into_inner);
        let parts = kernels.keys().filter_map(|key| key.split_once('\n'));
        parts.map(|(name, source)| (name.to_owned(), source.to_owned())).collect()
    }

    /// Compiles a shader, or finds it compiled.
    ///
    /// # Errors
    /// If the device refuses it.
    pub fn kernel(&self, shader: &Shader<'_>) -> Result<Arc<Kernel>, GpuError> {
        self.kernel_once(&format!("{}\n{}", shader.name, shader.source), || self.compile(shader))
    }

    /// The layouts of kernels with such bindings. Kernels share them: where one follows another of the same, nothing is
    /// bound or cleared but what differs.
    fn layouts(&self, bindings: &[Access]) -> Layouts {
        let mut layouts = self.layouts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = layouts.get(bindings) {
            return found.clone();
        }
        let entries: Vec<_> = bindings
            .iter()
            .enumerate()
            .map(|(i, access)| wgpu::BindGroupLayoutEntry {
                binding: i as u32,
                visibility: wgpu::ShaderStages::COMPUTE,
                ty: wgpu::BindingType::Buffer {
                    ty: wgpu::BufferBindingType::Storage { read_only: *access == Access::Read },
                    has_dynamic_offset: false,
                    min_binding_size: None,
                },
                count: None,
            })
            .collect();
        let group = self
            .device
            .create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor { label: None, entries: &entries });
        let pipeline = self.device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
            label: None,
            bind_group_layouts: &[Some(&group)],
            immediate_size: IMMEDIATES,
        });
        layouts.entry(bindings.to_vec()).or_insert(Layouts { group, pipeline }).clone()
    }

    fn compile(&self, shader: &Shader<'_>) -> Result<Kernel, GpuError> {
        let make = || {
            let layouts = self.layouts(shader.bindings);
            let desc = wgpu::ShaderModuleDescriptor {
                label: Some(shader.name),
                source: wgpu::ShaderSource::Wgsl(shader.source.clone().into_owned().into()),
            };
            // SAFETY: indices stay within the bindings, whose lengths the launchers check; loops end.
            let module = unsafe {
                self.device.create_shader_module_trusted(desc, wgpu::ShaderRuntimeChecks::unchecked())
            };
            let pipeline = self.device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
                label: Some(shader.name),
                layout: Some(&layouts.pipeline),
                module: &module,
                entry_point: Some("main"),
                compilation_options: wgpu::PipelineCompilationOptions {
                    constants: &[],
                    zero_initialize_workgroup_memory: false,
                },
                cache: None,
            });
            (pipeline, layouts.group)
        };
        let refused =
            |why| GpuError::Kernel { device: self.facts().to_string(), kernel: shader.name.to_owned(), why };
        let made =
            self.scoped(wgpu::ErrorFilter::Internal, || self.scoped(wgpu::ErrorFilter::Validation, make));
        let (pipeline, layout) = made.and_then(|made| made).map_err(refused)?;
        self.check()?;
        let name = shader.name.to_owned();
        Ok(Kernel { name, pipeline, layout, bindings: shader.bindings.len() })
    }

    /// Binds buffers to a kernel, in the order of its bindings.
    ///
    /// # Errors
    /// If the device refuses.
    ///
    /// # Panics
    /// If there are too few or too many.
    pub fn bind(&self, kernel: &Arc<Kernel>, buffers: &[&Slice]) -> Result<Op, GpuError> {
        assert_eq!(buffers.len(), kernel.bindings, "buffers of {}", kernel.name);
        let entries: Vec<_> = buffers
            .iter()
            .enumerate()
            .map(|(i, slice)| wgpu::BindGroupEntry {
                binding: i as u32,
                resource: wgpu::BindingResource::Buffer(wgpu::BufferBinding {
                    buffer: &slice.buffer,
                    offset: slice.offset,
                    size: wgpu::BufferSize::new(slice.len),
                }),
            })
            .collect();
        let make = || {
            self.device.create_bind_group(&wgpu::BindGroupDescriptor {
                label: Some(&kernel.name),
                layout: &kernel.layout,
                entries: &entries,
            })
        };
        let group = self.scoped(wgpu::ErrorFilter::Validation, make).map_err(|why| GpuError::Kernel {
            device: self.facts().to_string(),
            kernel: kernel.name.clone(),
            why,
        })?;
        Ok(Op { kernel: kernel.clone(), group })
    }
}
