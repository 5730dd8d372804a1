//! How the experts of a plan are coded: in equal widths, or in those that a budget gives each kind.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;

use smoe_format::tile::ROWS;
use smoe_format::{Encoding, Projection, Table, Zero};
use smoe_kernels::Kernels;

use super::{Sources, common_type};
use crate::allocate::{Candidate, WIDTHS, allocate};
use crate::checkpoint::Checkpoint;
use crate::encode::{Scratch, encode_rows};
use crate::error::SculptError;
use crate::files::WeightFiles;
use crate::quantise::fit_table;
use crate::settings::{Recipe, Role, Settings};
use crate::source::{Rows, Source};
use crate::workers::stopped;

/// Weights of each kind to which a table is fitted, from so many experts at most (EXP-QUANT-02).
const SAMPLED_WEIGHTS: usize = 1 << 18;
const SAMPLED_EXPERTS: usize = 256;
/// Experts of a layer by whose first rows the widths of a budget are chosen.
const MEASURED_EXPERTS: usize = 4;

impl Sources {
    /// How the experts of every MoE layer are coded.
    pub(super) fn expert_encodings(
        &self,
        (checkpoint, files): (&Checkpoint, &dyn WeightFiles),
        settings: &Settings,
        stop: &AtomicBool,
    ) -> Result<BTreeMap<u32, [Encoding; 3]>, SculptError> {
        let Some(bpw) = settings.bpw else {
            return self.equal_encodings((checkpoint, files), settings, stop);
        };
        let widths = WIDTHS
            .map(|bits| {
                self.equal_encodings((checkpoint, files), &Settings { bits, ..settings.clone() }, stop)
            })
            .into_iter()
            .collect::<Result<Vec<_>, _>>()?;
        let n_experts = self.spec.moe.n_experts as u64;
        let measured = self.measured_rows();
        checkpoint.expect_rows(files, &measured.concat())?;
        let mut candidates = Vec::new();
        let mut weights = 0;
        for layer in self.spec.moe_layers().map(|layer| layer as u32) {
            for (p, projection) in Projection::ALL.into_iter().enumerate() {
                let (rows, cols) = projection.shape(&self.spec);
                let encodings: Vec<(Encoding, u64)> = widths
                    .iter()
                    .map(|width| width[&layer][p])
                    .map(|e| (e, n_experts * e.tensor_bytes(rows, cols).unwrap_or(usize::MAX) as u64))
                    .collect();
                let errors =
                    self.errors(checkpoint, &measured[candidates.len()], &encodings, settings.recipe, stop)?;
                weights += n_experts * (rows * cols) as u64;
                candidates.push(Candidate { encodings, errors, projection });
            }
        }
        let chosen = allocate(&candidates, bpw.bytes(weights)).ok_or_else(|| {
            let least: u64 = candidates.iter().map(|c| c.encodings[0].1).sum();
            let expected =
                format!("must be at least {:.3} for this model", 8.0 * least as f64 / weights as f64 + 5e-4);
            SculptError::Setting { flag: "--bpw", found: bpw.to_string(), expected }
        })?;
        let mut chosen = candidates.iter().zip(chosen).map(|(c, i)| c.encodings[i].0);
        let mut encodings = BTreeMap::new();
        for layer in self.spec.moe_layers() {
            let kinds = [Encoding::F32; 3].map(|_| chosen.next().expect("three a layer"));
            encodings.insert(layer as u32, kinds);
        }
        Ok(encodings)
    }

    /// By which rows the widths of a budget are chosen: those of gate, up and down of each layer.
    fn measured_rows(&self) -> Vec<Vec<Rows>> {
        let mut all = Vec::new();
        for layer in self.spec.moe_layers() {
            let of_layer = || self.experts.iter().filter(|(key, _)| key.layer as usize == layer);
            let step = of_layer().count().div_ceil(MEASURED_EXPERTS).max(1);
            for p in 0..Projection::ALL.len() {
                let first = |(_, tensors): &(_, [Source; 3])| (tensors[p], 0..tensors[p].rows.min(ROWS));
                all.push(of_layer().step_by(step).map(first).collect());
            }
        }
        all
    }

    /// Squared error over power of a sample, under each encoding.
    fn errors(
        &self,
        checkpoint: &Checkpoint,
        sample: &[Rows],
        encodings: &[(Encoding, u64)],
        recipe: Recipe,
        stop: &AtomicBool,
    ) -> Result<Vec<f64>, SculptError> {
        let mut sums = vec![(0.0, 0.0); encodings.len()];
        let mut scratch = Scratch::default();
        for (source, rows) in sample {
            if stopped(stop) {
                return Err(SculptError::Stopped);
            }
            let mut row = vec![0.0; source.cols];
            let mut weights = Vec::new();
            checkpoint.read_rows(source, rows.clone(), &mut scratch.raw, &mut weights)?;
            for ((error, power), (encoding, _)) in sums.iter_mut().zip(encodings) {
                encode_rows(checkpoint, source, *encoding, recipe, rows.clone(), &mut scratch)?;
                for (i, weights) in weights.chunks_exact(source.cols).enumerate() {
                    encoding.decode_row(&scratch.out, source.cols, i, &mut row);
                    for (&w, &q) in weights.iter().zip(&row) {
                        *error += f64::from(w - q).powi(2);
                        *power += f64::from(w).powi(2);
                    }
                }
            }
        }
        Ok(sums.into_iter().map(|(error, power)| if power > 0.0 { error / power } else { 0.0 }).collect())
    }

    /// The same width everywhere.
    fn equal_encodings(
        &self,
        (checkpoint, files): (&Checkpoint, &dyn WeightFiles),
        settings: &Settings,
        stop: &AtomicBool,
    ) -> Result<BTreeMap<u32, [Encoding; 3]>, SculptError> {
        let mut encodings = BTreeMap::new();
        for layer in self.spec.moe_layers() {
            let layer = layer as u32;
            let of_layer = || self.experts.iter().filter(|(key, _)| key.layer == layer);
            let mut kinds = [Encoding::F32; 3];
            for (p, projection) in Projection::ALL.into_iter().enumerate() {
                let source = common_type(of_layer().map(|(_, tensors)| tensors[p].encoding));
                kinds[p] = settings.encoding(Role::Expert { layer, projection }, source);
            }
            encodings.insert(layer, kinds);
        }
        if settings.fits_levels() {
            // Codes that the checkpoint has are affine, or have their own table.
            let is_fitted =
                |kind| matches!(kind, Encoding::Uniform(uniform) if uniform.zero() == Zero::Symmetric);
            let fitted = [0, 1, 2].map(|p| encodings.values().any(|kinds| is_fitted(kinds[p])));
            let tables = self.fit_tables((checkpoint, files), fitted, settings, stop)?;
            for kinds in encodings.values_mut() {
                for (kind, table) in kinds.iter_mut().zip(tables).filter(|(kind, _)| is_fitted(**kind)) {
                    *kind = table.map_or(*kind, Encoding::Table);
                }
            }
        }
        Ok(encodings)
    }

    /// To which rows of one kind a table is fitted: by turns from different places, so that no layer is sampled by the
    /// same expert always.
    fn fitted_rows(&self, p: usize) -> Vec<Rows> {
        let step = self.experts.len().div_ceil(SAMPLED_EXPERTS).max(1);
        let sampled = self.experts.len().div_ceil(step).max(1);
        let rows = |(i, (_, tensors)): (usize, &(_, [Source; 3]))| {
            let source = tensors[p];
            let n = (SAMPLED_WEIGHTS / (sampled * source.cols.max(1))).clamp(1, source.rows);
            let start = (i * n) % (source.rows - n + 1);
            (source, start..start + n)
        };
        self.experts.iter().step_by(step).enumerate().map(rows).collect()
    }

    /// Fits those tables of gate, up and down that are `fitted`, to a sample of experts of all layers.
    fn fit_tables(
        &self,
        (checkpoint, files): (&Checkpoint, &dyn WeightFiles),
        fitted: [bool; 3],
        settings: &Settings,
        stop: &AtomicBool,
    ) -> Result<[Option<Table>; 3], SculptError> {
        let group = settings.group;
        let mut tables = [None; 3];
        let (mut raw, mut values) = (Vec::new(), Vec::new());
        let sampled = [0, 1, 2].map(|p| if fitted[p] { self.fitted_rows(p) } else { Vec::new() });
        checkpoint.expect_rows(files, &sampled.concat())?;
        for (p, (table, sampled)) in tables.iter_mut().zip(&sampled).enumerate().filter(|(p, _)| fitted[*p]) {
            let mut sample = Vec::new();
            // Narrower matrices have one group a row.
            let cols = self.experts.iter().map(|(_, tensors)| tensors[p].cols).min().unwrap_or(0);
            let width = group.min(cols / 16 * 16);
            for (source, rows) in sampled {
                if stopped(stop) {
                    return Err(SculptError::Stopped);
                }
                checkpoint.read_rows(source, rows.clone(), &mut raw, &mut values)?;
                for row in values.chunks_exact(source.cols) {
                    let pieces = row.chunks_exact(width.max(1)).filter(|_| width > 0);
                    sample.extend(pieces.filter(|piece| piece.iter().all(|w| w.is_finite())).flatten());
                }
            }
            *table = fit_table(Kernels::detect(), (settings.bits, group), width.max(16), &sample);
        }
        Ok(tables)
    }
}
