//! Entropy-coded records: codes of one step a row, the step that meets a number of bits, and records whose lengths
//! are known only once they are made.

use std::collections::HashMap;
use std::sync::{Condvar, Mutex, MutexGuard};

use smoe_format::entropy::{SYMBOLS, decode_record, encode_record, estimated_bits};
use smoe_format::half::f32_to_f16;
use smoe_format::tile::ROWS;
use smoe_format::{Encoding, ExpertKey, LayerTable, RECORD_ALIGN, Uniform, Zero};

use crate::checkpoint::Checkpoint;
use crate::error::SculptError;
use crate::source::{Rows, Source};

/// Tensors that are looked at to find the step, and about how many weights of each.
const SAMPLE: (usize, usize) = (48, 1 << 17);
/// Steps are multiples of this, in mean magnitudes of a row.
const STEP_UNIT: f32 = 1.0 / 4096.0;
/// The steps that are tried, in those units: above 4 bits, where all codes are clamped, to less than one.
const STEPS: std::ops::Range<u32> = 512..16384;
/// The code next to zero: what stands where there is no weight, since it is among the cheapest.
pub(crate) const FILL: u8 = 7;
/// Lanes of a sum, so that it is the same everywhere and compilers make vectors of it.
const LANES: usize = 8;

/// The mean magnitude of a row's weights: a deviation that a few large weights do not decide.
fn magnitude(row: &[f32]) -> f32 {
    (sum(row.iter().map(|&w| f64::from(w.abs()))) / row.len().max(1) as f64) as f32
}

fn sum(terms: impl Iterator<Item = f64>) -> f64 {
    let mut lanes = [0.0; LANES];
    for (i, term) in terms.enumerate() {
        lanes[i % LANES] += term;
    }
    lanes.iter().sum()
}

/// The code of a weight on a grid whose cells end at multiples of the step.
fn code(w: f32, per_step: f32) -> u8 {
    // Not negative, so that the cast rounds down.
    (w * per_step + 8.0).clamp(0.0, 15.0) as u8
}

/// Steps of a row a unit of weight; 0 for a row of zeros.
fn per_step(magnitude: f32, step: f32) -> f32 {
    let step = magnitude * step;
    if step > 0.0 && (1.0 / step).is_finite() { 1.0 / step } else { 0.0 }
}

/// The largest weight of a group, if the group does not have the row's grid: one that lies beyond it, and then the grid
/// is the one that just holds it (clamped, the large weights of real models would take the model with them,
/// EXP-QUANT-10), or zero, for no cell of the row's grid holds zeros.
fn own_largest(group: &[f32], per_step: f32) -> Option<f32> {
    let largest = group.iter().fold(0.0f32, |largest, w| largest.max(w.abs()));
    (largest == 0.0 || largest * per_step > 8.0).then_some(largest)
}

/// Codes rows on one grid each, `step` mean magnitudes of the row wide, into 4-bit symmetric tiles; every group of a
/// row has the row's scale, but for those that the row's grid does not hold.
///
/// An entropy coder wants even cells more than even errors (Gish and Pierce 1968): the cells are those of the step,
/// and the scale is then fitted to the weights in them, by least squares. At 2.3 bits that takes 7 % off the squared
/// error of levels in the middle of the cells.
///
/// `weights` is `[rows, cols]`, `out` as [`smoe_format::Encoding::encode`] wants it.
///
/// # Panics
/// If a length does not match.
pub(crate) fn encode_uniform(uniform: Uniform, weights: &[f32], cols: usize, step: f32, out: &mut [u8]) {
    let (group, tile_bytes) = (uniform.group(), uniform.tile_bytes());
    let mut codes = vec![FILL; uniform.groups(cols) * group];
    out.fill(0);
    for (rows, block) in weights.chunks(ROWS * cols).zip(out.chunks_exact_mut(uniform.block_bytes(cols))) {
        for row in 0..ROWS {
            let weights = rows.get(row * cols..(row + 1) * cols).unwrap_or_default();
            let of_row = RowStep::coded(weights, group, step, &mut codes);
            let tiles = block.chunks_exact_mut(tile_bytes).zip(codes.chunks_exact(group));
            for (g, (tile, codes)) in tiles.enumerate() {
                let weights = weights.get(g * group..).unwrap_or_default();
                let (half, _) = of_row.of_group(&weights[..group.min(weights.len())]);
                uniform.write_row(tile, row, codes, half, 0);
            }
        }
    }
}

/// The grid of a row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowStep {
    /// Cells a unit of weight.
    per_step: f32,
    /// The scale under which codes are nearest to the weights of their cells.
    half: u16,
}

impl RowStep {
    /// Of a row whose cells are `step` of its mean magnitudes wide.
    pub fn of(uniform: Uniform, weights: &[f32], step: f32) -> Self {
        let group = uniform.group();
        Self::coded(weights, group, step, &mut vec![FILL; weights.len().next_multiple_of(group)])
    }

    /// The same, with the row's codes; what stands where there is no weight is [`FILL`].
    fn coded(weights: &[f32], group: usize, step: f32, codes: &mut [u8]) -> Self {
        codes.fill(FILL);
        if weights.is_empty() {
            return Self { per_step: 0.0, half: 0 };
        }
        let mut of_row = Self { per_step: per_step(magnitude(weights), step), half: 0 };
        let (mut product, mut power) = (0.0, 0.0);
        for (weights, codes) in weights.chunks(group).zip(codes.chunks_exact_mut(group)) {
            let (_, steps) = of_row.of_group(weights);
            codes.iter_mut().zip(weights).for_each(|(c, &w)| *c = code(w, steps));
            if own_largest(weights, of_row.per_step).is_none() {
                let fit = Fit::new(weights, codes);
                (product, power) = (product + fit.product, power + fit.power);
            }
        }
        of_row.half = Fit { product, power }.scale(of_row.per_step);
        of_row
    }

    /// The scale of a group with these weights, and its cells a unit of weight.
    pub fn of_group(self, weights: &[f32]) -> (u16, f32) {
        match own_largest(weights, self.per_step) {
            // Not fitted: to many small weights the large one is not worth what it is to the model.
            Some(largest) if largest > 0.0 => (f32_to_f16(largest), 7.5 / largest),
            Some(_) => (0, 0.0),
            None => (self.half, self.per_step),
        }
    }
}

/// What decides the scale with which codes are nearest to their weights.
struct Fit {
    product: f64,
    power: f64,
}

impl Fit {
    fn new(weights: &[f32], codes: &[u8]) -> Self {
        let level = |c: u8| f64::from(2 * i32::from(c) - 15);
        let both = || weights.iter().zip(codes);
        let product = sum(both().map(|(&w, &c)| f64::from(w) * level(c)));
        Self { product, power: sum(both().map(|(_, &c)| level(c) * level(c))) }
    }

    /// The scale of a row of so many cells a unit of weight. Other groups than those that decide it may come to have
    /// it, for what is fed back changes weights, and these may be few and small or none: so it is never less than half
    /// of the scale whose levels are in the middle of the cells.
    fn scale(&self, per_step: f32) -> u16 {
        if per_step == 0.0 {
            return 0;
        }
        let middle = 7.5 / per_step;
        let fitted = if self.power > 0.0 { (15.0 * self.product / self.power) as f32 } else { middle };
        f32_to_f16(fitted.max(0.5 * middle))
    }
}

/// The encoding of a tensor of `cols` columns whose rows have one scale each: what such a row means does not depend on
/// the group, so the largest one up to `most` is taken that leaves no columns to fill.
pub(crate) fn row_encoding(most: usize, cols: usize) -> Option<Uniform> {
    let whole = [128, 64, 32, 16].into_iter().find(|&group| group <= most && cols.is_multiple_of(group));
    Uniform::new(4, whole.unwrap_or(most), Zero::Symmetric)
}

/// The rows of a [`Sample`].
pub(crate) fn sampled_rows(experts: &[(ExpertKey, [Source; 3])]) -> Vec<Rows> {
    let all = 3 * experts.len();
    let count = SAMPLE.0.min(all);
    let rows = |i: usize| {
        let tensor = i * all / count;
        let source = experts[tensor / 3].1[tensor % 3];
        (source, 0..(SAMPLE.1 / source.cols.max(1)).clamp(1, source.rows))
    };
    (0..count).map(rows).collect()
}

/// Rows of some tensors, in mean magnitudes, by which bits are told beforehand.
pub(crate) struct Sample {
    /// Tensor by tensor: rows, where they are from, the group of their codes.
    tensors: Vec<(Vec<f32>, Source, usize)>,
}

impl Sample {
    pub fn new(
        checkpoint: &Checkpoint,
        experts: &[(ExpertKey, [Source; 3])],
        layers: &[LayerTable],
    ) -> Result<Self, SculptError> {
        let group_of = |cols: usize| {
            let mut entries = layers.iter().flat_map(|layer| &layer.tensors).filter(|t| t.cols == cols);
            let group = entries.find_map(|t| match t.encoding {
                Encoding::Uniform(uniform) => Some(uniform.group()),
                _ => None,
            });
            group.unwrap_or(128)
        };
        let (mut raw, mut values) = (Vec::new(), Vec::new());
        let mut tensors = Vec::new();
        for (source, rows) in sampled_rows(experts) {
            checkpoint.read_rows(&source, rows, &mut raw, &mut values)?;
            for row in values.chunks_exact_mut(source.cols) {
                let per_step = per_step(magnitude(row), 1.0);
                row.iter_mut().for_each(|w| *w *= per_step);
            }
            tensors.push((values.clone(), source, group_of(source.cols)));
        }
        Ok(Self { tensors })
    }

    /// The smallest step with which the experts take at most `bpw` bits a weight on disk, scales and tables counted,
    /// padding not, if nothing is fed back.
    pub fn step(&self, bpw: f64) -> f32 {
        // Bits fall as the step grows.
        let (mut low, mut high) = (STEPS.start, STEPS.end);
        while low < high {
            let middle = low.midpoint(high);
            if self.bits(middle as f32 * STEP_UNIT) <= bpw { high = middle } else { low = middle + 1 }
        }
        low as f32 * STEP_UNIT
    }

    fn bits(&self, step: f32) -> f64 {
        let (mut bits, mut weights) = (0.0, 0.0);
        for (values, source, group) in &self.tensors {
            let mut counts = [0u64; SYMBOLS];
            let mut own = 0u32;
            for row in values.chunks_exact(source.cols) {
                // In a row of zeros all scales are the same.
                let zeros = row.iter().all(|&w| w == 0.0);
                let of_row = RowStep { per_step: 1.0 / step, half: 0 };
                for weights in row.chunks(*group) {
                    own += u32::from(!zeros && own_largest(weights, of_row.per_step).is_some());
                    let (_, per_step) = of_row.of_group(weights);
                    weights.iter().for_each(|&w| counts[usize::from(code(w, per_step))] += 1);
                }
            }
            let n = (source.rows * source.cols) as f64;
            // How many times as many weights the tensor has.
            let times = n / values.len().max(1) as f64;
            let mut counts = counts.map(|count| (count as f64 * times).ceil() as u64);
            let rows = source.rows.next_multiple_of(ROWS);
            let groups = source.cols.div_ceil(*group);
            let filled = (rows * groups * group) as f64 - n;
            counts[usize::from(FILL)] += filled as u64;
            // A scale a row and six bytes an exception, or all scales.
            let scales =
                (16.0 * rows as f64 + 48.0 * f64::from(own) * times).min((16 * rows * groups) as f64);
            bits += (n + filled) * estimated_bits(&counts) + scales;
            weights += n;
        }
        bits / f64::max(weights, 1.0)
    }
}

/// Codes a record, and decodes it again: what is written is proven to be what was meant.
pub(crate) fn encode_checked(tiles: &[u8], table: &LayerTable, decoded: &mut Vec<u8>, out: &mut Vec<u8>) {
    encode_record(tiles, table, out);
    decoded.clear();
    decoded.resize(tiles.len(), 0);
    let read_back = decode_record(out, out.len(), table, decoded, |block| block.decode());
    let same = |t: &smoe_format::TensorEntry| decoded[t.offset..][..t.len] == tiles[t.offset..][..t.len];
    assert!(read_back.is_ok() && table.tensors.iter().all(same), "a record that is coded decodes to itself");
}

/// A finished record in the journal: bytes that are used, and its checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Claim {
    pub used: u64,
    pub crc: u32,
}

/// No record is longer: `format` has a bound for those of a layer, far below.
const LONGEST: u64 = 1 << 40;

/// The journal's name of a record of `used` bytes.
pub(crate) fn claim_name(item: &str, used: u64) -> String {
    format!("{item} {used}")
}

/// The records that the journal has, by name without length.
pub(crate) fn claims(pieces: &HashMap<String, u32>) -> HashMap<&str, Claim> {
    pieces
        .iter()
        .filter_map(|(name, &crc)| {
            let (item, used) = name.rsplit_once(' ')?;
            let used = used.parse().ok().filter(|used| *used < LONGEST)?;
            Some((item, Claim { used, crc }))
        })
        .collect()
}

/// Where records of different lengths go: one after another in the order of the table, whatever the order in which
/// they are made; so the file's bytes do not depend on threads.
pub(crate) struct Placing {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    used: Vec<u64>,
    end: u64,
    failed: bool,
}

impl Placing {
    /// The first records are those of `used`, from `start` on.
    pub fn new(start: u64, used: Vec<u64>) -> Self {
        let end = start + used.iter().map(|used| used.next_multiple_of(RECORD_ALIGN as u64)).sum::<u64>();
        Self { state: Mutex::new(State { used, end, failed: false }), changed: Condvar::new() }
    }

    /// Says that record `index` will come, from a worker that was given it after all those before it. Unless it is
    /// placed before this is dropped, nobody waits for it any more.
    pub fn turn(&self, index: usize) -> Turn<'_> {
        Turn { placing: self, index, placed: false }
    }

    /// Bytes used by all the records that were placed.
    pub fn into_used(self) -> Vec<u64> {
        self.state.into_inner().expect("no worker panics with it").used
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no worker panics with it")
    }
}

/// A record's turn.
pub(crate) struct Turn<'a> {
    placing: &'a Placing,
    index: usize,
    placed: bool,
}

impl Turn<'_> {
    /// Waits until all records before it are placed; the first byte of this one, of `used` bytes. None if one before
    /// it will not come.
    pub fn place(mut self, used: u64) -> Option<u64> {
        let waiting = |state: &mut State| state.used.len() < self.index && !state.failed;
        let state = self.placing.state();
        let mut state = self.placing.changed.wait_while(state, waiting).expect("no worker panics with it");
        if state.used.len() < self.index {
            return None;
        }
        self.placed = true;
        let start = state.end;
        state.used.push(used);
        state.end += used.next_multiple_of(RECORD_ALIGN as u64);
        self.placing.changed.notify_all();
        Some(start)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if !self.placed {
            self.placing.state().failed = true;
            self.placing.changed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn normal(n: usize) -> Vec<f32> {
        let mut state = 9u64;
        let mut uniform = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1 << 24) as f32
        };
        (0..n).map(|_| (0..12).map(|_| uniform()).sum::<f32>() - 6.0).collect()
    }

    #[test]
    fn rows_lie_on_a_grid_of_their_own_and_large_weights_on_one_of_theirs() {
        let uniform = Uniform::new(4, 64, Zero::Symmetric).expect("valid");
        let (rows, cols) = (40, 300);
        let mut weights = normal(rows * cols);
        // Deviations from 1 to 40, a row of zeros, and in every fifth row a weight of 30 deviations.
        for (r, row) in weights.chunks_exact_mut(cols).enumerate() {
            row.iter_mut().for_each(|w| *w *= if r == 7 { 0.0 } else { r as f32 + 1.0 });
            row[100] *= if r % 5 == 0 { 0.0 } else { 1.0 };
            row[100] += if r % 5 == 0 { 30.0 * (r as f32 + 1.0) } else { 0.0 };
        }
        let encoding = Encoding::Uniform(uniform);
        let mut tiles = vec![0; encoding.tensor_bytes(rows, cols).expect("small")];
        // In mean magnitudes: 0.93 and 0.46 deviations.
        for step in [1.165f32, 0.58] {
            encode_uniform(uniform, &weights, cols, step, &mut tiles);
            let mut decoded = vec![0.0; cols];
            for (r, row) in weights.chunks_exact(cols).enumerate() {
                encoding.decode_row(&tiles, cols, r, &mut decoded);
                let scales: Vec<f32> = tiles[r / 32 * uniform.block_bytes(cols)..]
                    .chunks_exact(uniform.tile_bytes())
                    .take(5)
                    .map(|tile| uniform.scale(tile, r % 32).0)
                    .collect();
                let (mean, mut shared) = (magnitude(row), None);
                for (g, (weights, decoded)) in row.chunks(64).zip(decoded.chunks(64)).enumerate() {
                    let own = own_largest(weights, per_step(mean, step));
                    if own.is_none() {
                        assert_eq!(*shared.get_or_insert(scales[g]), scales[g], "row {r} group {g}");
                    }
                    // The width of a cell, and half of one is the largest error but for the fitted scale's.
                    let cell = own.map_or(mean * step, |largest| largest / 7.5);
                    let worst = weights.iter().zip(decoded).fold(0.0f32, |m, (w, q)| m.max((w - q).abs()));
                    assert!(worst <= 1.1 * cell, "row {r} group {g}: {worst} of {cell}");
                    assert!(r % 5 != 0 || g != 1 || own.is_some());
                }
            }
        }
    }

    #[test]
    fn a_row_whose_grid_holds_no_group_or_a_small_one_has_a_scale_all_the_same() {
        let group = 64;
        let mut weights = normal(6 * group);
        // Every group reaches beyond the grid; then one of tiny weights does not, then one of zeros.
        weights.chunks_exact_mut(group).for_each(|group| group[5] = 4.0);
        for small in [1.0f32, 1e-3, 0.0] {
            weights[..group].iter_mut().for_each(|w| *w *= small);
            let mut codes = vec![0; weights.len()];
            let of_row = RowStep::coded(&weights, group, 0.35, &mut codes);
            // As if feedback had taken a little off the largest weights: this group fits, and keeps its size.
            let fits: Vec<f32> = weights[group..2 * group].iter().map(|w| w.clamp(-1.5, 1.5)).collect();
            let (half, per_step) = of_row.of_group(&fits);
            assert_eq!(per_step, of_row.per_step, "{small}");
            let middle = 7.5 / per_step;
            let scale = smoe_format::half::f16_to_f32(half);
            assert!((0.49..1.2).contains(&(scale / middle)), "{small}: {scale} of {middle}");
            // A group of zeros stays one.
            assert_eq!(of_row.of_group(&[0.0; 64]).0, 0, "{small}");
        }
    }

    #[test]
    fn a_fitted_scale_takes_what_wide_cells_leave() {
        let uniform = Uniform::new(4, 128, Zero::Symmetric).expect("valid");
        let (weights, cols) = (normal(64 * 1024), 1024);
        let encoding = Encoding::Uniform(uniform);
        let mut tiles = vec![0; encoding.tensor_bytes(64, cols).expect("small")];
        encode_uniform(uniform, &weights, cols, 1.165, &mut tiles);
        let mut decoded = vec![0.0; cols];
        let (mut error, mut power) = (0.0, 0.0);
        for (r, row) in weights.chunks_exact(cols).enumerate() {
            encoding.decode_row(&tiles, cols, r, &mut decoded);
            error += row.iter().zip(&decoded).map(|(w, q)| (w - q) * (w - q)).sum::<f32>();
            power += row.iter().map(|w| w * w).sum::<f32>();
        }
        // A twelfth of the square of the step, 0.93 deviations, is what the middles of the cells leave.
        assert!(error / power < 0.97 * 0.93 * 0.93 / 12.0, "{}", error / power);
    }

    #[test]
    fn groups_leave_no_columns_to_fill_where_they_can() {
        let group = |most, cols| row_encoding(most, cols).map(Uniform::group);
        assert_eq!(
            [2048, 576, 1408, 2880, 100].map(|cols| group(128, cols)),
            [128, 64, 128, 64, 128].map(Some)
        );
        assert_eq!(group(32, 2048), Some(32));
    }

    #[test]
    fn records_lie_in_order_whoever_makes_them_first() {
        let placing = Placing::new(16384, vec![100]);
        let starts: Vec<Option<u64>> = std::thread::scope(|scope| {
            let turns: Vec<_> = (1..9).map(|i| (i, placing.turn(i))).collect();
            let workers: Vec<_> = turns
                .into_iter()
                .rev()
                .map(|(i, turn)| scope.spawn(move || turn.place(16384 * i as u64)))
                .collect();
            workers.into_iter().rev().map(|w| w.join().expect("no panic")).collect()
        });
        let expected: Vec<Option<u64>> =
            (1..9u64).map(|i| Some(32768 + 16384 * (1..i).sum::<u64>())).collect();
        assert_eq!(starts, expected);
        assert_eq!(placing.into_used().len(), 9);
    }

    #[test]
    fn nobody_waits_for_a_record_that_does_not_come() {
        let placing = Placing::new(0, Vec::new());
        let (first, second) = (placing.turn(0), placing.turn(1));
        std::thread::scope(|scope| {
            let waits = scope.spawn(move || second.place(64));
            drop(first);
            assert_eq!(waits.join().expect("no panic"), None);
        });
    }

    #[test]
    fn the_journal_has_lengths() {
        let pieces = [("expert 1 3 777", 5), ("tensor embed 0", 6), ("expert x", 7)];
        let pieces = pieces.map(|(name, crc)| (name.to_owned(), crc)).into();
        assert_eq!(claim_name("expert 1 3", 777), "expert 1 3 777");
        assert_eq!(claims(&pieces)["expert 1 3"], Claim { used: 777, crc: 5 });
        assert!(!claims(&pieces).contains_key("expert 1"));
    }
}
