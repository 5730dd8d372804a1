//! What the device takes before it computes anything: handing work over, dispatches, its memory.

use std::time::{Duration, Instant};

use smoe_gpu::{Access, CopyKernel, GpuError, Links, Shader};

use super::{Bench, COPY, RUNS, WAITS, median};

/// For how long small dispatches go before anything counts: at first they took 2.6 us on an H200, after 0.7 s 2.1 (EXP-GPU-08).
const WARM_UP: Duration = Duration::from_secs(2);

impl Bench {
    /// What it costs to hand a step over and wait for it, and to dispatch a kernel that does nothing.
    pub(super) fn host(&mut self) -> Result<(), GpuError> {
        let word = self.gpu.buffer("word", 4)?;
        let source = "
            @group(0) @binding(0) var<storage, read_write> word: array<u32>;
            @compute @workgroup_size(64)
            fn main(@builtin(local_invocation_index) lane: u32) {
                if (lane == 0u) { word[0] += 1u; }
            }";
        let shader = Shader { name: "empty", source: source.into(), bindings: &[Access::Write] };
        let op = self.gpu.bind(&self.gpu.kernel(&shader)?, &[&word])?;
        // A processor and a card that were idle are slow at first.
        let began = Instant::now();
        while !self.small && began.elapsed() < WARM_UP {
            self.time(&|step, _| step.run(&op, &[], [1, 1, 1]))?;
        }
        let waits = (0..RUNS * 10).map(|_| {
            let start = Instant::now();
            let mut step = self.gpu.step();
            step.run(&op, &[], [1, 1, 1]);
            let submitted = step.submit();
            self.gpu.wait(&submitted)?;
            Ok(start.elapsed().as_secs_f64())
        });
        let wait = median(waits.collect::<Result<_, GpuError>>()?);
        self.tell("submit and wait", 0, wait, 0);
        let empty = self.time(&|step, _| step.run(&op, &[], [1, 1, 1]))?;
        self.tell("empty dispatch", 0, empty, 0);
        let links = Links::new(&self.gpu)?;
        // The host may take longer to record one.
        let waits = self.time_recorded(&|step, i| links.record(step, i))?;
        self.tell(WAITS, 0, waits, 0);
        Ok(())
    }

    /// What the device's memory does: the ceiling.
    pub(super) fn copies(&mut self) -> Result<(), GpuError> {
        let bytes = self.cold / 2 / 16 * 16;
        let (from, to) = (self.gpu.buffer("from", bytes)?, self.gpu.buffer("to", bytes)?);
        let copy = CopyKernel::new(&self.gpu, &from, &to)?;
        let kernel = self.time(&|step, _| copy.record(step))?;
        self.tell(COPY, 0, kernel, copy.bytes());
        let buffer = self.time(&|step, _| step.copy(&from, &to))?;
        self.tell("copy by copy_buffer", 0, buffer, 2 * bytes);
        Ok(())
    }
}
