//! What kernels are held against: a copy by a kernel ([`CopyKernel`]), and dispatches that wait for each other
//! ([`Links`]).

use crate::quantise::GRID;
use crate::{Access, Gpu, GpuError, Op, Shader, Slice, Step};

/// Bytes that a workgroup copies.
const COPIED: u64 = 16 << 10;
/// Kernels that wait for each other in turn.
const KINDS: usize = 8;

/// Copies whole runs of 16 KiB, up to 65,535 of them: what the device's memory can do.
#[derive(Clone, Debug)]
pub struct CopyKernel {
    op: Op,
    runs: u64,
}

impl CopyKernel {
    /// From one slice to the beginning of another: as much as both have.
    ///
    /// # Errors
    /// If the device refuses the kernel.
    ///
    /// # Panics
    /// If one is shorter than 16 KiB.
    pub fn new(gpu: &Gpu, from: &Slice, to: &Slice) -> Result<Self, GpuError> {
        let runs = (from.len().min(to.len()) / COPIED).min(GRID as u64);
        assert!(runs > 0, "{} and {} bytes", from.len(), to.len());
        let kernel = gpu.kernel(&Shader {
            name: "copy",
            source: include_str!("wgsl/ceiling_copy.wgsl").into(),
            bindings: &[Access::Read, Access::Write],
        })?;
        Ok(Self { op: gpu.bind(&kernel, &[from, to])?, runs })
    }

    /// Bytes that it reads and writes, together.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        2 * self.runs * COPIED
    }

    /// Records it.
    pub fn record(&self, step: &mut Step) {
        step.run(&self.op, &[], [self.runs as u32, 1, 1]);
    }
}

/// Kernels of a workgroup each, of which every one reads what the one before it wrote, and is another than that.
#[derive(Clone, Debug)]
pub struct Links {
    ops: Vec<Op>,
}

impl Links {
    /// A chain of any length.
    ///
    /// # Errors
    /// If the device refuses.
    pub fn new(gpu: &Gpu) -> Result<Self, GpuError> {
        let words = [gpu.buffer("word", 4)?, gpu.buffer("word", 4)?];
        let link = |i: usize| {
            let source = format!("const LINK: u32 = {i}u;\n{}", include_str!("wgsl/ceiling_link.wgsl"));
            let bindings = &[Access::Read, Access::Write];
            let kernel = gpu.kernel(&Shader { name: "link", source: source.into(), bindings })?;
            gpu.bind(&kernel, &[&words[i % 2], &words[1 - i % 2]])
        };
        Ok(Self { ops: (0..KINDS).map(link).collect::<Result<_, _>>()? })
    }

    /// Records the i-th.
    pub fn record(&self, step: &mut Step, i: usize) {
        step.run(&self.ops[i % KINDS], &[], [1, 1, 1]);
    }
}
