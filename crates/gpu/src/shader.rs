//! Shaders: WGSL, made into kernels once, and bound to buffers as launchers.
//!
//! Bounds are not checked on the device and shared memory is not zeroed there: launchers check shapes before
//! anything is recorded, and a kernel writes what it reads. So a kernel is trusted with its bindings: each
//! is as long as the launcher demands.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::{Arc, OnceLock, PoisonError};

use crate::compile::Job;
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

/// A kernel: compiled, or on its way.
#[derive(Debug)]
pub struct Kernel {
    pub(crate) name: String,
    /// What it is compiled from.
    pub(crate) source: Arc<str>,
    /// What it was compiled to, or why it was not.
    made: OnceLock<Result<wgpu::ComputePipeline, String>>,
    layouts: Layouts,
    pub(crate) bindings: Vec<Access>,
}

/// The kernels that were asked for.
#[derive(Debug, Default)]
pub(crate) struct Kernels {
    /// By name, those of one name told apart by their sources. A model asks some thousand times for some fifty kernels: sources, tens
    /// of kilobytes, are compared: hashing them, and making a key of them, takes longer.
    by_name: HashMap<String, Vec<Arc<Kernel>>>,
    /// In the order in which they were asked for; those that [`Gpu::finish_kernels`] has not waited for.
    asked: Vec<Arc<Kernel>>,
}

/// A kernel over the buffers it works on.
#[derive(Clone, Debug)]
pub struct Op {
    pub(crate) kernel: Arc<Kernel>,
    pub(crate) group: wgpu::BindGroup,
    /// The buffers.
    pub(crate) slices: Vec<Slice>,
}

impl Kernels {
    fn all(&self) -> impl Iterator<Item = &Arc<Kernel>> {
        self.by_name.values().flatten()
    }

    fn find(&self, shader: &Shader<'_>) -> Option<&Arc<Kernel>> {
        let same = self.by_name.get(shader.name)?;
        same.iter().find(|kernel| *kernel.source == *shader.source)
    }
}

impl Kernel {
    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Once it is compiled.
    ///
    /// # Errors
    /// Why it was not.
    pub(crate) fn pipeline(&self) -> Result<&wgpu::ComputePipeline, &str> {
        self.made.wait().as_ref().map_err(String::as_str)
    }

    /// What became of it; the first word counts.
    pub(crate) fn tell(&self, made: Result<wgpu::ComputePipeline, String>) {
        let _ = self.made.set(made);
    }
}

/// Kernels as they are, but for a body that returns at once: what is left is what it costs to dispatch them.
#[derive(Debug, Default)]
pub struct Idle {
    /// Of those that have a twin.
    twins: Vec<(Arc<Kernel>, Arc<Kernel>)>,
}

impl Idle {
    /// What runs in a kernel's place.
    pub(crate) fn twin_of(&self, kernel: &Arc<Kernel>) -> Option<&Kernel> {
        self.twins.iter().find(|(of, _)| Arc::ptr_eq(of, kernel)).map(|(_, twin)| &**twin)
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
    /// Every kernel that was asked for so far.
    #[must_use]
    pub fn compiled(&self) -> Vec<Arc<Kernel>> {
        self.kernels().all().cloned().collect()
    }

    /// Name and WGSL of every kernel that was asked for so far: for those who look at what becomes of it.
    #[must_use]
    pub fn sources(&self) -> Vec<(String, String)> {
        let own = |kernel: &Arc<Kernel>| (kernel.name.clone(), kernel.source.to_string());
        self.kernels().all().map(own).collect()
    }

    fn kernels(&self) -> std::sync::MutexGuard<'_, Kernels> {
        self.kernels.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Twins of these kernels that do nothing, of those that can have one.
    ///
    /// # Errors
    /// If the device refuses one.
    pub fn idle(&self, kernels: &[Arc<Kernel>]) -> Result<Idle, GpuError> {
        let mut sources = Vec::new();
        for kernel in self.kernels().all() {
            if kernels.iter().any(|wanted| Arc::ptr_eq(wanted, kernel)) {
                sources.extend(idle_source(&kernel.source).map(|source| (kernel.clone(), source)));
            }
        }
        let begin = |(kernel, source): (Arc<Kernel>, String)| {
            let twin = self.begin(&kernel.name, source.into(), &kernel.bindings)?;
            Ok((kernel, twin))
        };
        // All are on their way before one is waited for.
        let twins = sources.into_iter().map(begin).collect::<Result<Vec<_>, GpuError>>()?;
        let refused = twins.iter().find_map(|(_, twin)| self.refusal(twin));
        self.check()?;
        refused.map_or(Ok(Idle { twins }), Err)
    }

    /// Has a shader compiled, or finds it: to be bound at once, and run as soon as it is compiled.
    ///
    /// # Errors
    /// If the device was lost, refuses its bindings, or has refused it already. What it says of it later
    /// [`Gpu::finish_kernels`] tells.
    pub fn kernel(&self, shader: &Shader<'_>) -> Result<Arc<Kernel>, GpuError> {
        let mut kernels = self.kernels();
        if let Some(kernel) = kernels.find(shader) {
            let refusal = kernel.made.get().and_then(|_| self.refusal(kernel));
            return refusal.map_or_else(|| Ok(kernel.clone()), Err);
        }
        let source: Arc<str> = shader.source.as_ref().into();
        let kernel = self.begin(shader.name, source, shader.bindings)?;
        kernels.asked.push(kernel.clone());
        kernels.by_name.entry(shader.name.to_owned()).or_default().push(kernel.clone());
        Ok(kernel)
    }

    /// Waits until every kernel that was asked for is compiled.
    ///
    /// # Errors
    /// If the device was lost; or the first, in the order in which they were asked for, that it refuses. Those are
    /// forgotten: whoever asks again has them compiled again. A step that runs a refused kernel all the same fails the device.
    pub fn finish_kernels(&self) -> Result<(), GpuError> {
        let asked = self.kernels().asked.clone();
        let mut first = None;
        for kernel in &asked {
            first = first.or(self.refusal(kernel));
        }
        let mut kernels = self.kernels();
        // Others may have asked meanwhile.
        kernels.asked.retain(|kernel| !asked.iter().any(|done| Arc::ptr_eq(done, kernel)));
        for same in kernels.by_name.values_mut() {
            same.retain(|kernel| !matches!(kernel.made.get(), Some(Err(_))));
        }
        drop(kernels);
        self.check()?;
        first.map_or(Ok(()), Err)
    }

    /// Why the device refuses a kernel, once that is known.
    fn refusal(&self, kernel: &Kernel) -> Option<GpuError> {
        let why = kernel.pipeline().err()?.to_owned();
        Some(GpuError::Kernel { device: self.facts().to_string(), kernel: kernel.name.clone(), why })
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

    /// Has a shader compiled.
    fn begin(&self, name: &str, source: Arc<str>, bindings: &[Access]) -> Result<Arc<Kernel>, GpuError> {
        let layouts =
            self.scoped(wgpu::ErrorFilter::Validation, || self.layouts(bindings)).map_err(|why| {
                let (device, kernel) = (self.facts().to_string(), name.to_owned());
                GpuError::Kernel { device, kernel, why }
            })?;
        self.check()?;
        let (name, bindings, layout) = (name.to_owned(), bindings.to_vec(), layouts.pipeline.clone());
        let kernel = Arc::new(Kernel { name, source, made: OnceLock::new(), layouts, bindings });
        self.compiler.begin(Job { kernel: kernel.clone(), layout });
        Ok(kernel)
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
                layout: &kernel.layouts.group,
                entries: &entries,
            })
        };
        let group = self.scoped(wgpu::ErrorFilter::Validation, make).map_err(|why| GpuError::Kernel {
            device: self.facts().to_string(),
            kernel: kernel.name.clone(),
            why,
        })?;
        Ok(Op { kernel: kernel.clone(), group, slices: buffers.iter().map(|&slice| slice.clone()).collect() })
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
