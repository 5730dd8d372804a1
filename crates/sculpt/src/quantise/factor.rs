//! What error feedback needs of a Hessian: how an error in one column is made up for in the columns after it.
//!
//! A Hessian is `H = (U + I) D (U + I)^T` with U strictly upper triangular and D diagonal. The loss of errors `e` in a
//! row is then the sum over columns k of `D_k (e_k + sum over j < k of U_jk e_j)^2`: whoever codes columns in ascending
//! order adds `sum U_jk e_j` to column k and loses only what rounding leaves. (LDLQ of Chee et al. 2023, QuIP, who show
//! that it is GPTQ, Frantar et al. 2022, without an inverse.)

use smoe_kernels::{Kernels, Loops};

/// Rows are padded to whole registers.
pub(crate) const LANES: usize = 16;
/// Columns of a block of the factorisation.
const BLOCK: usize = 64;
/// Share of the mean diagonal that is added to the diagonal (GPTQ's 1 %), and by how much more it is tried again where
/// the Hessian is not positive definite in `f32`.
const DAMPING: f32 = 0.01;
const MORE: f32 = 10.0;

/// A symmetric matrix as rows of `stride`, both triangles.
#[derive(Clone, Debug, Default)]
pub(crate) struct Square {
    pub n: usize,
    pub stride: usize,
    pub values: Vec<f32>,
}

impl Square {
    pub fn zeros(n: usize) -> Self {
        let stride = n.next_multiple_of(LANES);
        Self { n, stride, values: vec![0.0; n * stride] }
    }

    pub fn row(&self, i: usize) -> &[f32] {
        &self.values[i * self.stride..][..self.stride]
    }
}

/// `U` by columns, and the diagonal of the Hessian.
#[derive(Debug)]
pub(crate) struct Feedback {
    /// Row k holds `U_jk` for j < k, then zeros.
    pub by_column: Square,
    /// How much an error in each column counts.
    pub importance: Vec<f32>,
    /// The column of the matrix that is k-th: ascending, unless it was made [to begin with the loudest](Self::loudest_first).
    pub order: Vec<u32>,
}

impl Feedback {
    /// Of a Hessian. One that is not positive definite is damped until it is; one of nothing gives no feedback.
    pub fn new(kernels: Kernels, hessian: &Square) -> Self {
        let n = hessian.n;
        let diagonal: Vec<f32> = (0..n).map(|i| hessian.row(i)[i]).collect();
        let mean = diagonal.iter().map(|&d| f64::from(d)).sum::<f64>() / n.max(1) as f64;
        let mean = mean as f32;
        let mut by_column = Square::zeros(n);
        let order = (0..n as u32).collect();
        if !(mean.is_finite() && mean > 0.0) {
            return Self { by_column, importance: vec![1.0; n], order };
        }
        // Turned around, so that the usual lower factor gives the upper one.
        let mut damping = DAMPING * mean;
        let factor = loop {
            let mut turned = Square::zeros(n);
            for i in 0..n {
                let row = &mut turned.values[i * turned.stride..][..=i];
                for (j, value) in row.iter_mut().enumerate() {
                    *value = hessian.row(n - 1 - i)[n - 1 - j];
                }
                row[i] += damping;
            }
            if kernels.compiled(Cholesky { matrix: &mut turned }) {
                break turned;
            }
            damping *= MORE;
        };
        for k in 0..n {
            let column = n - 1 - k;
            let scale = 1.0 / factor.row(column)[column];
            let row = &mut by_column.values[k * by_column.stride..][..k];
            for (j, value) in row.iter_mut().enumerate() {
                *value = factor.row(n - 1 - j)[column] * scale;
            }
        }
        // A column that no token used counts a little, or its scale would be anything.
        let importance = diagonal.iter().map(|&d| if d > 0.0 { d + damping } else { damping }).collect();
        Self { by_column, importance, order }
    }

    /// The same for columns in descending order of the Hessian's diagonal: those whose errors count most come while there
    /// are many left in which to make up for them.
    pub fn loudest_first(kernels: Kernels, hessian: &Square) -> Self {
        let mut order: Vec<u32> = (0..hessian.n as u32).collect();
        let loud = |k: u32| hessian.row(k as usize)[k as usize];
        order.sort_by(|&a, &b| loud(b).total_cmp(&loud(a)).then(a.cmp(&b)));
        let mut sorted = Square::zeros(hessian.n);
        for (row, &i) in sorted.values.chunks_exact_mut(hessian.stride.max(1)).zip(&order) {
            let from = hessian.row(i as usize);
            row.iter_mut().zip(&order).for_each(|(to, &j)| *to = from[j as usize]);
        }
        Self { order, ..Self::new(kernels, &sorted) }
    }
}

/// The products of four rows with four others, which are equally long and padded with zeros.
#[inline(always)]
pub(crate) fn dots(a: [&[f32]; 4], b: [&[f32]; 4]) -> [[f32; 4]; 4] {
    let mut sums = [[[0.0f32; LANES]; 4]; 4];
    let a = a.map(|row| row.as_chunks::<LANES>().0);
    let b = b.map(|row| row.as_chunks::<LANES>().0);
    let n = a[0].len();
    let (a, b) = (a.map(|row| &row[..n]), b.map(|row| &row[..n]));
    for c in 0..n {
        for i in 0..4 {
            for j in 0..4 {
                for lane in 0..LANES {
                    sums[i][j][lane] += a[i][c][lane] * b[j][c][lane];
                }
            }
        }
    }
    let mut out = [[0.0; 4]; 4];
    for i in 0..4 {
        for j in 0..4 {
            let mut half = LANES / 2;
            while half > 0 {
                for lane in 0..half {
                    sums[i][j][lane] += sums[i][j][lane + half];
                }
                half /= 2;
            }
            out[i][j] = sums[i][j][0];
        }
    }
    out
}

/// Replaces the lower triangle by its Cholesky factor, block by block; false if the matrix is not positive definite.
struct Cholesky<'a> {
    matrix: &'a mut Square,
}

impl Loops for Cholesky<'_> {
    type Out = bool;

    #[inline(always)]
    fn run(self) -> bool {
        let Square { n, stride, values } = self.matrix;
        let (n, stride) = (*n, *stride);
        let mut panel = Vec::new();
        for first in (0..n).step_by(BLOCK) {
            let end = n.min(first + BLOCK);
            // Finished rows of this block of columns, copied so that others can be written.
            for row in first..n {
                if row == first || (row - first).is_multiple_of(4) {
                    let rows: [usize; 4] = std::array::from_fn(|i| (row + i).min(n - 1));
                    for column in (first..end).step_by(4) {
                        let columns: [usize; 4] = std::array::from_fn(|j| (column + j).min(n - 1));
                        let of = |i: usize| &values[i * stride..][..first];
                        let products = dots(rows.map(of), columns.map(of));
                        for i in 0..4.min(n - row) {
                            for j in 0..4.min(end - column) {
                                values[(row + i) * stride + column + j] -= products[i][j];
                            }
                        }
                    }
                }
            }
            // The block on the diagonal, then the rows below it.
            panel.clear();
            for row in first..n {
                for column in first..end.min(row + 1) {
                    let own = &values[row * stride + first..][..column - first];
                    let other = &values[column * stride + first..][..column - first];
                    let mut sum = values[row * stride + column];
                    sum -= short_dot(own, other);
                    if column == row {
                        if !(sum > 0.0 && sum.is_finite()) {
                            return false;
                        }
                        values[row * stride + column] = sum.sqrt();
                        panel.push(1.0 / sum.sqrt());
                    } else {
                        values[row * stride + column] = sum * panel[column - first];
                    }
                }
            }
        }
        true
    }
}

/// A product of fewer than [`BLOCK`] elements, over eight lanes.
#[inline(always)]
fn short_dot(a: &[f32], b: &[f32]) -> f32 {
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<8>(), b.as_chunks::<8>());
    let mut lanes = [0.0f32; 8];
    for (a, b) in a.iter().zip(b) {
        for lane in 0..8 {
            lanes[lane] += a[lane] * b[lane];
        }
    }
    let mut sum = 0.0;
    for (a, b) in a_rest.iter().zip(b_rest) {
        sum += a * b;
    }
    for lane in lanes {
        sum += lane;
    }
    sum
}

#[cfg(test)]
pub(crate) mod tests {
    use smoe_testkit::random::Random;

    use super::*;

    /// X^T X of `tokens` rows whose columns depend on each other.
    pub(crate) fn hessian(n: usize, tokens: usize, seed: u64) -> Square {
        let mut random = Random::new(seed);
        let mut hessian = Square::zeros(n);
        let mut x = vec![0.0f64; n];
        for _ in 0..tokens {
            let mut common = 0.0;
            for x in &mut x {
                common = 0.8 * common + random.bell();
                *x = common;
            }
            for i in 0..n {
                for j in 0..n {
                    hessian.values[i * hessian.stride + j] += (x[i] * x[j]) as f32;
                }
            }
        }
        hessian
    }

    #[test]
    fn the_factors_multiply_to_the_damped_hessian() {
        for n in [1, 5, 64, 67, 150] {
            let h = hessian(n, 3 * n + 5, n as u64);
            for kernels in Kernels::available() {
                let feedback = Feedback::new(kernels, &h);
                let u = |j: usize, k: usize| match j.cmp(&k) {
                    std::cmp::Ordering::Less => f64::from(feedback.by_column.row(k)[j]),
                    std::cmp::Ordering::Equal => 1.0,
                    std::cmp::Ordering::Greater => 0.0,
                };
                let mean = (0..n).map(|i| f64::from(h.row(i)[i])).sum::<f64>() / n as f64;
                let damped =
                    |i: usize, j: usize| f64::from(h.row(i)[j]) + if i == j { 0.01 * mean } else { 0.0 };
                // D from the last column on, then every element of the product.
                let mut d = vec![0.0; n];
                for k in (0..n).rev() {
                    d[k] = damped(k, k) - (k + 1..n).map(|m| u(k, m).powi(2) * d[m]).sum::<f64>();
                    assert!(d[k] > 0.0);
                }
                for i in 0..n {
                    for j in 0..n {
                        let product: f64 = (i.max(j)..n).map(|k| u(i, k) * d[k] * u(j, k)).sum();
                        assert!((product - damped(i, j)).abs() < 2e-4 * mean, "{n} {i} {j} {product}");
                    }
                }
            }
        }
    }

    #[test]
    fn the_loudest_columns_come_first_and_have_their_own_factor() {
        let mut h = hessian(70, 200, 3);
        for (i, row) in h.values.chunks_exact_mut(h.stride).enumerate() {
            row.iter_mut().enumerate().for_each(|(j, v)| *v *= ((1 + i % 7) * (1 + j % 7)) as f32);
        }
        let feedback = Feedback::loudest_first(Kernels::detect(), &h);
        let loud = |k: usize| h.row(feedback.order[k] as usize)[feedback.order[k] as usize];
        assert!((1..70).all(|k| loud(k - 1) >= loud(k)));
        let mut there = feedback.order.clone();
        there.sort_unstable();
        assert!(there.into_iter().eq(0..70));
        // The Hessian in that order, by hand.
        let mut sorted = Square::zeros(70);
        for i in 0..70 {
            for j in 0..70 {
                sorted.values[i * sorted.stride + j] =
                    h.row(feedback.order[i] as usize)[feedback.order[j] as usize];
            }
        }
        let expected = Feedback::new(Kernels::detect(), &sorted);
        assert_eq!(expected.by_column.values, feedback.by_column.values);
        assert_eq!(expected.importance, feedback.importance);
    }

    #[test]
    fn what_is_not_positive_definite_is_damped_and_nothing_gives_no_feedback() {
        let mut h = hessian(40, 3, 2);
        // Rank 3, and a column that contradicts itself.
        h.values[7 * h.stride + 7] = -5.0;
        let feedback = Feedback::new(Kernels::detect(), &h);
        assert!(feedback.by_column.values.iter().all(|u| u.is_finite()));
        assert!(feedback.importance.iter().all(|&i| i > 0.0));
        let nothing = Feedback::new(Kernels::detect(), &Square::zeros(20));
        assert!(nothing.by_column.values.iter().all(|&u| u == 0.0));
        assert_eq!(nothing.importance, [1.0; 20]);
    }
}
