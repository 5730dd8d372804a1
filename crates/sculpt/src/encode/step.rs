//! The step of codes that take a number of bits, found before anything is written.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use smoe_format::{ExpertKey, LayerTable, ModelSpec, entropy};

use super::{RecordScratch, Scratch, encode_expert, may_feed_back};
use crate::calibrate::Statistics;
use crate::checkpoint::Checkpoint;
use crate::error::SculptError;
use crate::progress::Progress;
use crate::source::{Rows, Source};
use crate::{coded, workers};

/// Experts that are coded to find the step of codes that are fed back, and how often (EXP-QUANT-12).
const TRIED: (usize, usize) = (6, 2);

/// Bits of the budget that need not be looked for any more: a step 0.3 % wider saves as many.
const CLOSE: f64 = 0.005;

/// What decides the step of codes that take a number of bits.
pub(crate) struct StepSearch<'a> {
    pub checkpoint: &'a Checkpoint,
    pub spec: &'a ModelSpec,
    pub experts: &'a [(ExpertKey, [Source; 3])],
    pub layers: &'a [LayerTable],
    pub statistics: Option<&'a Statistics>,
    pub workers: usize,
    pub progress: &'a dyn Progress,
    pub stop: &'a AtomicBool,
}

impl StepSearch<'_> {
    /// The smallest step with which the experts take about `bpw` bits a weight on disk, scales and tables counted,
    /// padding not. What is fed back is coded as it will be: a sample of experts, which takes at most `bpw`.
    ///
    /// # Errors
    /// [`SculptError::Stopped`] if the caller wants to stop.
    pub fn find(&self, bpw: f64) -> Result<f32, SculptError> {
        self.progress.phase("finding the step");
        let sample = coded::Sample::new(self.checkpoint, self.experts, self.layers)?;
        let tried = self.tried();
        match self.statistics {
            Some(statistics) if !tried.is_empty() => {
                keep_budget(bpw, |bpw| sample.step(bpw), |step| self.fed_bits(statistics, &tried, step))
            }
            _ => Ok(sample.step(bpw)),
        }
    }

    /// What it reads.
    pub fn rows(&self) -> Vec<Rows> {
        let tried = if self.statistics.is_some() { self.tried() } else { Vec::new() };
        let whole = tried.iter().flat_map(|(_, tensors, _)| tensors.map(|source| (source, 0..source.rows)));
        coded::sampled_rows(self.experts).into_iter().chain(whole).collect()
    }

    /// The experts that are coded to see what feedback adds.
    fn tried(&self) -> Vec<(ExpertKey, &[Source; 3], &LayerTable)> {
        let tried = TRIED.0.min(self.experts.len());
        (0..tried)
            .map(|i| &self.experts[(2 * i + 1) * self.experts.len() / (2 * tried)])
            .map(|(key, tensors)| (*key, tensors, self.table(*key)))
            .filter(|(_, tensors, table)| may_feed_back(tensors, table))
            .collect()
    }

    fn table(&self, key: ExpertKey) -> &LayerTable {
        self.layers.iter().find(|table| table.layer == key.layer).expect("experts are of layers")
    }

    /// Bits a weight of some experts as they are written, padding not counted.
    fn fed_bits(
        &self,
        statistics: &Statistics,
        tried: &[(ExpertKey, &[Source; 3], &LayerTable)],
        step: f32,
    ) -> Result<f64, SculptError> {
        let len = |i: usize| tried[i].2.record_len as u64;
        self.progress.start((0..tried.len()).map(len).sum());
        let (bytes, weights) = (AtomicU64::new(0), AtomicU64::new(0));
        let all = workers::for_each(self.workers, tried.len(), self.stop, |i, scratch: &mut Scratch| {
            let (key, tensors, table) = tried[i];
            let fed = encode_expert(
                self.checkpoint,
                self.spec,
                statistics,
                Some(step),
                (key, tensors),
                table,
                scratch,
            )?;
            let RecordScratch { tiles, coded, .. } = &mut scratch.record;
            tiles.clear();
            tiles.resize(table.record_len, 0);
            for ((_, bytes), entry) in fed.iter().zip(&table.tensors) {
                tiles[entry.offset..][..entry.len].copy_from_slice(bytes);
                weights.fetch_add((entry.rows * entry.cols) as u64, Ordering::Relaxed);
            }
            entropy::encode_record(tiles, table, coded);
            bytes.fetch_add(coded.len() as u64, Ordering::Relaxed);
            self.progress.advance(len(i));
            Ok(())
        })?;
        if !all {
            return Err(SculptError::Stopped);
        }
        Ok(8.0 * bytes.into_inner() as f64 / weights.into_inner().max(1) as f64)
    }
}

/// The smallest step that is found to take at most `bpw` bits; the largest there is if none does. `expected` is the step
/// that is expected to take so many bits, and `bits` is what a step takes: other than expected, but by about as much, or
/// as many times, at any step.
fn keep_budget<E>(
    bpw: f64,
    expected: impl Fn(f64) -> f32,
    mut bits: impl FnMut(f32) -> Result<f64, E>,
) -> Result<f32, E> {
    let (mut wanted, mut step) = (bpw, expected(bpw));
    let mut kept: Option<f32> = None;
    let mut less = CLOSE;
    let mut last: Option<(f64, f64)> = None;
    for round in 0.. {
        let took = bits(step)?;
        let spare = bpw - took;
        if spare >= 0.0 {
            kept = Some(kept.map_or(step, |kept| kept.min(step)));
        }
        if (0.0..=CLOSE).contains(&spare) || (round >= TRIED.1 && kept.is_some()) {
            break;
        }
        // Bits that are taken for each that is wanted, by the last two trials.
        let slope = match last.replace((wanted, took)) {
            Some((before, had)) if (wanted - before).abs() > CLOSE / 2.0 => {
                ((took - had) / (wanted - before)).clamp(1.0, 4.0)
            }
            _ => 1.0,
        };
        wanted += (spare - CLOSE / 2.0) / slope;
        if spare < 0.0 && round >= TRIED.1 {
            // Not about as much, then: down it goes, faster and faster.
            wanted -= less;
            less *= 2.0;
        }
        let next = expected(wanted);
        if next == step && (spare >= 0.0 || step == expected(0.0)) {
            break;
        }
        step = next;
    }
    Ok(kept.unwrap_or(step))
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;

    const LARGEST: f32 = 4.0;

    /// What [`keep_budget`] finds, and after how many trials, if codes are expected to take `2 - log2(step)` bits.
    fn found(bpw: f64, bits: impl Fn(f32) -> f64) -> (f32, usize) {
        let mut trials = 0;
        let expected = |bpw: f64| (((2.0 - bpw).exp2() * 4096.0).ceil() / 4096.0).min(LARGEST.into()) as f32;
        let step = keep_budget::<Infallible>(bpw, expected, |step| {
            trials += 1;
            Ok(bits(step))
        });
        let Ok(step) = step;
        (step, trials)
    }

    #[test]
    fn the_step_that_is_found_keeps_the_budget_whatever_feedback_adds() {
        let plain = |step: f32| 2.0 - f64::from(step).log2();
        for bpw in [1.5, 2.31, 3.25, 3.9] {
            // More by a constant, by a share, by what changes from step to step; less.
            let kinds: [&dyn Fn(f32) -> f64; 5] = [
                &plain,
                &|step| plain(step) + 0.07,
                &|step| 1.1 * plain(step),
                &|step| plain(step) + 0.02 * (f64::from(step) * 4096.0 % 7.0),
                &|step| plain(step) - 0.1,
            ];
            for (i, bits) in kinds.iter().enumerate() {
                let (step, trials) = found(bpw, bits);
                let took = bits(step);
                assert!(took <= bpw && took > bpw - 0.15, "{bpw} {i}: {took}");
                assert!(trials <= 8 && (i == 3 || trials <= 3), "{bpw} {i}: {trials}");
            }
        }
    }

    #[test]
    fn a_budget_that_no_step_keeps_ends_at_the_largest() {
        let (step, trials) = found(1.5, |_| 9.0);
        assert!(step == LARGEST && trials <= 4, "{step} {trials}");
        let (step, trials) = found(1.5, |step| 1.5001 + f64::from(LARGEST - step) / 1e4);
        assert!(step == LARGEST && trials < 20, "{step} {trials}");
    }
}
