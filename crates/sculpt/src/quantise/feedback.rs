//! Error feedback in the manner of GPTQ (Frantar et al. 2022): a column is coded after the errors of the columns before
//! it have been added where they are made up for, by the inputs that the matrix meets.
//!
//! Columns go in their natural order; the scale of a group is searched when its turn comes, on weights that already make
//! up for the groups before, weighted by the diagonal of the Hessian. Codes that are meant for an entropy coder have the
//! even cells of one step a row instead ([`crate::coded`]): their scales are known beforehand, and columns go in any
//! order.

use smoe_format::half::f16_to_f32;
use smoe_format::tile::{self, ROWS};
use smoe_format::{Encoding, Uniform};
use smoe_kernels::{Kernels, Loops};

use super::factor::{Feedback, dots};
use super::grid::{Grid, UniformGrid};
use super::search::search;
use super::{MAX_GROUP, WithGrid, with_grid};
use crate::coded::{self, RowStep};

/// Codes a whole matrix, `[rows, cols]`, with feedback over its columns; `out` is its tiles, to be overwritten. With
/// `steps`, one a row, the codes are those of cells of so many mean magnitudes of their row.
///
/// # Panics
/// If a length does not match, the encoding is not [searchable](super::is_searchable), there are steps and the encoding
/// is none of even levels, or there are none and the feedback is not in the natural order of columns.
pub(crate) fn encode_with_feedback(
    kernels: Kernels,
    encoding: Encoding,
    steps: Option<&[f32]>,
    feedback: &Feedback,
    weights: &[f32],
    cols: usize,
    out: &mut [u8],
) {
    assert_eq!(feedback.importance.len(), cols, "a column each");
    let layout = encoding.tiles().expect("codes lie in tiles");
    let mut errors = Vec::new();
    for (i, (rows, block)) in
        weights.chunks(ROWS * cols).zip(out.chunks_exact_mut(layout.block_bytes(cols))).enumerate()
    {
        let errors = &mut errors;
        let work = Fed { kernels, layout, feedback, rows, cols, block, errors };
        match (steps, encoding) {
            (None, _) => with_grid(encoding, work),
            (Some(steps), Encoding::Uniform(uniform)) => {
                let rows = rows.chunks(cols).zip(&steps[i * ROWS..]);
                let scaling = RowSteps(rows.map(|(row, &step)| RowStep::of(uniform, row, step)).collect());
                kernels.compiled(Block { grid: UniformGrid { max_code: uniform.max_code() }, scaling, work });
            }
            (Some(_), _) => unreachable!("a step is of even levels"),
        }
    }
}

struct Fed<'a> {
    kernels: Kernels,
    layout: Uniform,
    feedback: &'a Feedback,
    rows: &'a [f32],
    cols: usize,
    block: &'a mut [u8],
    errors: &'a mut Vec<f32>,
}

impl WithGrid for Fed<'_> {
    type Out = ();

    fn with<G: Grid>(self, grid: G) {
        let kernels = self.kernels;
        kernels.compiled(Block { grid, scaling: Searched(grid), work: self });
    }
}

/// How a group of a row gets its scale.
trait Scaling {
    /// The code that stands where there is no weight.
    const FILL: u8;
    /// The scale is that of the weights as they are, so that columns may go in any order.
    const AHEAD: bool;

    /// The stored scale, and grid steps a unit of weight: what a weight is multiplied by before the nearest level is
    /// taken. `weights` make up for the groups before, unless it is known ahead.
    fn scale(&self, row: usize, weights: &[f32], importance: &[f32]) -> (u16, f32);
}

/// The scale of the smallest error.
struct Searched<G>(G);

impl<G: Grid> Scaling for Searched<G> {
    const FILL: u8 = 0;
    const AHEAD: bool = false;

    #[inline(always)]
    fn scale(&self, _: usize, weights: &[f32], importance: &[f32]) -> (u16, f32) {
        let half = search(self.0, weights, importance).half;
        let inverse = 1.0 / (f16_to_f32(half) / self.0.scale());
        (half, if inverse.is_finite() { inverse } else { 0.0 })
    }
}

/// That of the row, unless the group does not fit its grid.
struct RowSteps(Vec<RowStep>);

impl Scaling for RowSteps {
    const FILL: u8 = coded::FILL;
    const AHEAD: bool = true;

    #[inline(always)]
    fn scale(&self, row: usize, weights: &[f32], _: &[f32]) -> (u16, f32) {
        let (half, per_step) = self.0[row].of_group(weights);
        // A cell is two steps of the grid, whose levels are the odd numbers.
        (half, 2.0 * per_step)
    }
}

struct Block<'a, G, S> {
    grid: G,
    scaling: S,
    work: Fed<'a>,
}

/// Columns of a group, each of 32 rows.
type Columns = [[f32; ROWS]; MAX_GROUP];

impl<G: Grid, S: Scaling> Loops for Block<'_, G, S> {
    type Out = ();

    #[inline(always)]
    fn run(self) {
        let Self { grid, scaling, work: Fed { layout, feedback, rows, cols, block, errors, .. } } = self;
        let (group, groups, n_rows) = (layout.group(), layout.groups(cols), rows.len() / cols);
        let (u, stride, order) = (&feedback.by_column, feedback.by_column.stride, &feedback.order);
        assert!(S::AHEAD || order.iter().enumerate().all(|(k, &column)| k == column as usize));
        errors.clear();
        errors.resize(ROWS * stride, 0.0);
        block.fill(0);
        let mut codes = vec![S::FILL; groups * ROWS * group];
        // Of each group: its step, and the grid's steps a unit of weight.
        let mut scales = vec![[[0.0f32; ROWS]; 2]; groups];
        let mut values = [0.0; MAX_GROUP];
        let mut scale = |g: usize,
                         row: usize,
                         scales: &mut [[[f32; ROWS]; 2]],
                         values: &[f32],
                         weighted: &[f32]| {
            let (half, inverse) = scaling.scale(row, values, weighted);
            layout.write_levels(&mut block[g * layout.tile_bytes()..][..layout.tile_bytes()], row, half, 0);
            scales[g][0][row] = f16_to_f32(half) / grid.scale();
            scales[g][1][row] = inverse;
        };
        if S::AHEAD {
            for (row, weights) in rows.chunks_exact(cols).enumerate() {
                for (g, weights) in weights.chunks(group).enumerate() {
                    scale(g, row, &mut scales, weights, &[]);
                }
            }
        }
        let mut targets: Box<Columns> = Box::new([[0.0; ROWS]; MAX_GROUP]);
        let mut lost: Box<Columns> = Box::new([[0.0; ROWS]; MAX_GROUP]);
        let mut importance = [0.0; MAX_GROUP];
        for (g, order) in order.chunks(group).enumerate() {
            let (first, width) = (g * group, order.len());
            // What the columns before cost, made up for here.
            for column in (0..width).step_by(4) {
                let of_column =
                    |j: usize| &u.values[(first + (column + j).min(width - 1)) * stride..][..first];
                let columns = [of_column(0), of_column(1), of_column(2), of_column(3)];
                for row in (0..ROWS).step_by(4) {
                    let of_row = |i: usize| &errors[(row + i) * stride..][..first];
                    let products = dots([of_row(0), of_row(1), of_row(2), of_row(3)], columns);
                    for i in 0..4 {
                        for j in 0..4.min(width - column) {
                            targets[column + j][row + i] = products[i][j];
                        }
                    }
                }
            }
            for (target, &column) in targets.iter_mut().zip(order) {
                for row in 0..n_rows {
                    target[row] += rows[row * cols + column as usize];
                }
            }
            if !S::AHEAD {
                importance[width..].fill(0.0);
                importance[..width].copy_from_slice(&feedback.importance[first..first + width]);
                values[width..].fill(0.0);
                for row in 0..n_rows {
                    values
                        .iter_mut()
                        .zip(targets[..width].iter())
                        .for_each(|(value, target)| *value = target[row]);
                    scale(g, row, &mut scales, &values[..group], &importance[..group]);
                }
            }
            for (k, &column) in order.iter().enumerate() {
                let column = column as usize;
                let mut target = targets[k];
                let weights = &u.values[(first + k) * stride + first..][..k];
                for (&weight, lost) in weights.iter().zip(lost.iter()) {
                    for row in 0..ROWS {
                        target[row] += weight * lost[row];
                    }
                }
                let [steps, inverses] = &scales[column / group];
                let mut levels = [0.0; ROWS];
                for row in 0..ROWS {
                    levels[row] = grid.nearest(target[row] * inverses[row]);
                }
                let codes = &mut codes[column / group * ROWS * group..][..ROWS * group];
                for row in 0..n_rows {
                    codes[row * group + column % group] = grid.code(levels[row]);
                    let error = rows[row * cols + column] - levels[row] * steps[row];
                    lost[k][row] = error;
                    errors[row * stride + first + k] = error;
                }
            }
        }
        let tiles = block.chunks_exact_mut(layout.tile_bytes()).zip(codes.chunks_exact(ROWS * group));
        for (tile, codes) in tiles {
            tile::pack(codes, layout.bits(), group, &mut tile[..layout.code_bytes()]);
        }
    }
}

#[cfg(test)]
mod tests {
    use smoe_format::{Table, Zero};
    use smoe_testkit::random::Random;

    use super::super::factor::tests::hessian;
    use super::super::{encode_searched, factor::Square};
    use super::*;

    /// The mean of e^T H e over the rows of a coded matrix.
    fn loss(encoding: Encoding, bytes: &[u8], weights: &[f32], h: &Square) -> f64 {
        let cols = h.n;
        let mut row = vec![0.0; cols];
        let mut sum = 0.0;
        for (r, weights) in weights.chunks_exact(cols).enumerate() {
            encoding.decode_row(bytes, cols, r, &mut row);
            let e: Vec<f64> = weights.iter().zip(&row).map(|(w, q)| f64::from(w - q)).collect();
            for i in 0..cols {
                sum += e[i] * (0..cols).map(|j| f64::from(h.row(i)[j]) * e[j]).sum::<f64>();
            }
        }
        sum
    }

    fn encodings() -> [Encoding; 4] {
        let uniform =
            |bits, group| Encoding::Uniform(Uniform::new(bits, group, Zero::Symmetric).expect("valid"));
        let table = Table::new(3, 64, &[-127, -80, -48, -16, 14, 44, 76, 115]).expect("valid");
        [uniform(2, 64), uniform(4, 32), uniform(3, 128), table.into()]
    }

    #[test]
    fn feedback_loses_far_less_where_inputs_depend_on_each_other() {
        let (rows, cols) = (37, 200);
        let mut random = Random::new(4);
        let weights: Vec<f32> = (0..rows * cols).map(|_| 0.02 * random.bell() as f32).collect();
        let h = hessian(cols, 900, 5);
        for encoding in encodings() {
            let len = encoding.tensor_bytes(rows, cols).expect("small");
            let (mut plain, mut fed) = (vec![1; len], vec![2; len]);
            let detected = Kernels::detect();
            encode_searched(detected, encoding, &weights, cols, &mut plain);
            for kernels in Kernels::available() {
                let feedback = Feedback::new(kernels, &h);
                encode_with_feedback(kernels, encoding, None, &feedback, &weights, cols, &mut fed);
                let (plain, fed) = (loss(encoding, &plain, &weights, &h), loss(encoding, &fed, &weights, &h));
                assert!(fed < 0.45 * plain, "{encoding} {kernels:?}: {fed} {plain}");
            }
        }
    }

    #[test]
    fn inputs_that_do_not_depend_on_each_other_change_nothing() {
        let (rows, cols) = (33, 130);
        let mut random = Random::new(6);
        let weights: Vec<f32> = (0..rows * cols).map(|_| 0.02 * random.bell() as f32).collect();
        let mut h = Square::zeros(cols);
        for i in 0..cols {
            h.values[i * h.stride + i] = 3.0;
        }
        for encoding in encodings() {
            let len = encoding.tensor_bytes(rows, cols).expect("small");
            let (mut plain, mut fed) = (vec![1; len], vec![2; len]);
            encode_searched(Kernels::detect(), encoding, &weights, cols, &mut plain);
            let feedback = Feedback::new(Kernels::detect(), &h);
            encode_with_feedback(Kernels::detect(), encoding, None, &feedback, &weights, cols, &mut fed);
            // The same but for roundings of equally good scales.
            let (plain, fed) = (loss(encoding, &plain, &weights, &h), loss(encoding, &fed, &weights, &h));
            assert!((fed / plain - 1.0).abs() < 2e-3, "{encoding}: {fed} {plain}");
        }
    }

    #[test]
    fn cells_of_a_step_are_fed_back_too_and_wide_groups_keep_their_largest_weight() {
        let (rows, cols) = (37, 200);
        let mut random = Random::new(8);
        let mut weights: Vec<f32> = (0..rows * cols).map(|_| 0.02 * random.bell() as f32).collect();
        weights[3 * cols + 70] = 0.9;
        let h = hessian(cols, 900, 5);
        let uniform = Uniform::new(4, 64, Zero::Symmetric).expect("valid");
        let encoding = Encoding::Uniform(uniform);
        let len = encoding.tensor_bytes(rows, cols).expect("small");
        let (mut plain, mut fed, mut again) = (vec![1; len], vec![2; len], vec![3; len]);
        for step in [1.1f32, 0.6] {
            coded::encode_uniform(uniform, &weights, cols, step, &mut plain);
            let mut first = None;
            for kernels in Kernels::available() {
                let feedback = Feedback::new(kernels, &h);
                encode_with_feedback(
                    kernels,
                    encoding,
                    Some(&[step; 37]),
                    &feedback,
                    &weights,
                    cols,
                    &mut fed,
                );
                first.get_or_insert_with(|| fed.clone());
                assert_eq!(first.as_ref(), Some(&fed), "{kernels:?}");
            }
            let mut row = vec![0.0; cols];
            encoding.decode_row(&fed, cols, 3, &mut row);
            assert!((row[70] - 0.9).abs() < 0.02, "{}", row[70]);
            let (without, with) = (loss(encoding, &plain, &weights, &h), loss(encoding, &fed, &weights, &h));
            assert!(with < 0.5 * without, "{step}: {with} {without}");
            // Inputs that do not depend on each other: the codes of the plain rule.
            let mut eye = Square::zeros(cols);
            (0..cols).for_each(|i| eye.values[i * eye.stride + i] = 1.0);
            let feedback = Feedback::new(Kernels::detect(), &eye);
            encode_with_feedback(
                Kernels::detect(),
                encoding,
                Some(&[step; 37]),
                &feedback,
                &weights,
                cols,
                &mut again,
            );
            let (a, b) = (loss(encoding, &plain, &weights, &eye), loss(encoding, &again, &weights, &eye));
            assert!((b / a - 1.0).abs() < 2e-3, "{step}: {b} {a}");
        }
    }

    #[test]
    fn no_group_that_feedback_brings_onto_the_grid_of_its_row_loses_its_scale() {
        // The grid of a row reaches to 2.2 deviations, so that most rows have no group that fits it; some groups, their
        // largest weight being just beyond, do once errors are fed back.
        let (rows, cols, step) = (320, 6 * 128, 0.35);
        let mut random = Random::new(12);
        let weights: Vec<f32> = (0..rows * cols).map(|_| 0.02 * random.bell() as f32).collect();
        let uniform = Uniform::new(4, 128, Zero::Symmetric).expect("valid");
        let encoding = Encoding::Uniform(uniform);
        let mut out = vec![0; encoding.tensor_bytes(rows, cols).expect("small")];
        let feedback = Feedback::new(Kernels::detect(), &hessian(cols, 300, 5));
        encode_with_feedback(
            Kernels::detect(),
            encoding,
            Some(&[step; 320]),
            &feedback,
            &weights,
            cols,
            &mut out,
        );
        for (i, tile) in out.chunks_exact(uniform.tile_bytes()).enumerate() {
            for row in 0..ROWS {
                assert!(uniform.scale(tile, row).0 > 0.0, "tile {i} row {row}");
            }
        }
    }
}
