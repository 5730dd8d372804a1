//! What the device does with this model, measured before it is used.

use std::time::{Duration, Instant};

use smoe_gpu::Submitted;

use super::{GpuBackend, Pending};
use crate::EngineError;
use crate::forecast::DeviceRates;

/// Times that each is measured, the first of which is not counted.
const TIMES: usize = 6;
/// A device that was idle runs slowly at first: tokens are computed for so long before some are timed, at least one.
/// On an H200 the first six took 17 ms each where later ones take 7 (EXP-GPU-02).
const WARM_UP: Duration = Duration::from_millis(250);
/// Position of the token that is timed.
const POSITION: u32 = 31;

fn median(mut times: Vec<f64>) -> f64 {
    times.remove(0);
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

impl GpuBackend {
    /// Times a token, handing over and waiting, and uploads. Keys and values of the first block, and slots, are written:
    /// none if an expert or a token is there already.
    pub(super) fn measure_rates(&mut self) -> Result<Option<DeviceRates>, EngineError> {
        if !self.tier.is_empty() || self.tokens > 0 {
            return Ok(None);
        }
        let waits = (0..TIMES).map(|_| {
            let start = Instant::now();
            let mut step = self.gpu.step();
            step.read_back(&self.route_weights.part(0, 4), &self.readback, 0);
            self.gpu.read(&self.readback, &step.submit(), &mut [0; 4])?;
            Ok(start.elapsed().as_secs_f64())
        });
        let wait_s = median(waits.collect::<Result<_, EngineError>>()?);
        let upload_bytes_per_s = self.time_uploads()?;
        self.tier.pretend(&self.gpu, true);
        let token = self.time_tokens();
        self.tier.pretend(&self.gpu, false);
        let (token_s, dispatches) = token?;
        Ok(Some(DeviceRates { token_s, dispatches, wait_s, upload_bytes_per_s }))
    }

    /// Seconds of a token, and its kernels.
    fn time_tokens(&mut self) -> Result<(f64, u32), EngineError> {
        let (mut times, mut dispatches) = (Vec::with_capacity(TIMES), 0);
        let began = Instant::now();
        while times.len() < TIMES {
            let start = Instant::now();
            let before = self.meter.dispatches.get();
            self.begin_step(&[0]);
            self.gpu.write(&self.tables, 0, &[0; 4]);
            self.visible = POSITION as usize + 1;
            for buffer in &self.rows {
                self.gpu.write(&buffer.rows, 0, bytemuck::cast_slice(&[POSITION, 0, 0, 0]));
            }
            self.flow_all(0, &[0])?;
            if times.is_empty() && began.elapsed() < WARM_UP {
                continue;
            }
            times.push(start.elapsed().as_secs_f64());
            dispatches = (self.meter.dispatches.get() - before) as u32;
        }
        self.headed.clear();
        (self.tokens, self.tokens_done, self.pending) = (0, 0, Pending::Nothing);
        Ok((median(times), dispatches))
    }

    /// Bytes per second of a token's experts.
    fn time_uploads(&mut self) -> Result<f64, EngineError> {
        let Some(len) = self.tier.slot_bytes(0) else { return Ok(f64::INFINITY) };
        let count = self.spec.moe.top_k as u32;
        let expert = vec![0; len as usize];
        let mut times = Vec::with_capacity(TIMES);
        for _ in 0..TIMES {
            let start = Instant::now();
            let parts: Vec<_> =
                (0..count).map(|slot| (self.tier.slot(0, slot, len), expert.as_slice())).collect();
            self.gpu.write_all(&parts, &|tasks, task| self.pool.run(tasks, task));
            let submitted: Submitted = self.gpu.step().submit();
            self.gpu.wait(&submitted)?;
            times.push(start.elapsed().as_secs_f64());
        }
        Ok((u64::from(count) * len) as f64 / median(times))
    }
}
