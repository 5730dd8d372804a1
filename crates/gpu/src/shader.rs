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
    bindings: Vec<Access>,
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

/// Kernels as they are, but for a body that returns at once: what is left is what it costs to dispatch them.
#[derive(Debug, Default)]
pub struct Idle {
    /// Of those that have a twin.
    twins: Vec<(Arc<Kernel>, Kernel)>,
}

impl Idle {
    /// What runs in a kernel's place.
    pub(crate) fn twin_of(&self, kernel: &Arc<Kernel>) -> Option<&Kernel> {
        self.twins.iter().find(|(of, _)| Arc::ptr_eq(of, kernel)).map(|(_, twin)| twin)
    }
}

/// The same kernel with a body that returns at once, which its compiler cannot know: it takes the registers, the shared
/// memory and the bindings that it took. None if its immediates have no `nothing`.
fn idle_source(source: &str) -> Option<String> {
    let main = source.find("fn main(")?;
    let body = main + source[main..].find(") {")? + 3;
    let (head, rest) = source.split_at(body);
    source.contains("nothing: u32").then(|| format!("{head}\n    if (p.nothing == 0u) {{ return; }}{rest}"))
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

    /// Twins of these kernels that do nothing, of those that can have one.
    ///
    /// # Errors
    /// If the device refuses one.
    pub fn idle(&self, kernels: &[Arc<Kernel>]) -> Result<Idle, GpuError> {
        let mut sources = Vec::new();
        {
            let compiled = self.kernels.lock().unwrap_or_else(PoisonError::into_inner);
            for (key, kernel) in compiled.iter() {
                if kernels.iter().any(|wanted| Arc::ptr_eq(wanted, kernel)) {
                    let source = key.split_once('\n').and_then(|(_, source)| idle_source(source));
                    sources.extend(source.map(|source| (kernel.clone(), source)));
                }
            }
        }
        let twins = sources.into_iter().map(|(kernel, source)| {
            let shader = Shader { name: &kernel.name, source: source.into(), bindings: &kernel.bindings };
            let twin = self.compile(&shader)?;
            Ok((kernel, twin))
        });
        Ok(Idle { twins: twins.collect::<Result<_, GpuError>>()? })
    }

    /// Compiles a shader, or finds it compiled.
    ///
    /// # Errors
    /// If the device refuses it.
    pub fn kernel(&self, shader: &Shader<'_>) -> Result<Arc<Kernel>, GpuError> {
        self.kernel_once(&format!("{}\n{}", shader.name, shader.source), || self.compile(shader))
    }

    /// The layouts of kernels with such bindings. Kernels share them: where one follows another of the same, the host has
    /// less to record. The device does not mind (EXP-GPU-08).
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
        Ok(Kernel { name, pipeline, layout, bindings: shader.bindings.to_vec() })
    }

    /// Binds buffers to a kernel, in the order of its bindings.
    ///
    /// # Errors
    /// If the device refuses.
    ///
    /// # Panics
    /// If there are too few or too many.
    pub fn bind(&self, kernel: &Arc<Kernel>, buffers: &[&Slice]) -> Result<Op, GpuError> {
        assert_eq!(buffers.len(), kernel.bindings.len(), "buffers of {}", kernel.name);
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

#[cfg(test)]
mod tests {
    use super::idle_source;

    #[test]
    fn an_idle_twin_returns_before_anything_else() {
        let source =
            "struct P { n: u32, nothing: u32 }\nfn f(a: u32) { }\nfn main(@builtin(x) a: u32) {\n    b();\n}";
        let idle = idle_source(source);
        let expected = "{\n    if (p.nothing == 0u) { return; }\n    b();\n}";
        assert!(idle.is_some_and(|idle| idle.ends_with(expected)));
        assert_eq!(idle_source("fn main() {\n}"), None);
    }
}
