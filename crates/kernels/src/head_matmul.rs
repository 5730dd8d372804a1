//! Products head by head: a matrix that is one of every head's own, over the heads' parts of a plane.
//!
//! What latent attention does on either side of the latent. A head's tokens are copied together first, so that its
//! product is an ordinary one.

use crate::activations::{Planes, Run, room};
use crate::matmul::{FORK, Operand, multiply};
use crate::output::Shared;
use crate::{Kernels, Matrix, Pool};

use smoe_format::tile::ROWS;

/// A plane of `[tokens, heads * stride]`, of which the first `cols` of each head's columns are meant.
#[derive(Clone, Copy, Debug)]
pub struct HeadInput<'a> {
    /// The plane.
    pub x: &'a [f32],
    /// Columns from one head to the next.
    pub stride: usize,
    /// Int8 activations for coded weights; else `f32`.
    pub coded: bool,
}

/// Working memory of [`head_matmul`], reused from call to call.
#[derive(Debug)]
pub struct HeadScratch {
    floats: Vec<f32>,
    planes: Planes,
}

impl HeadScratch {
    /// Room for so many tokens and heads of at most `cols` columns.
    #[must_use]
    pub fn with_capacity(tokens: usize, heads: usize, cols: usize) -> Self {
        let mut planes = Planes::default();
        let (codes, cells) = room(cols);
        planes.reserve(tokens * heads * codes, tokens * heads * cells);
        Self { floats: vec![0.0; tokens * heads * cols], planes }
    }
}

/// Multiplies each head's rows of `matrix` (`[heads * N, K]`) by its K columns of `input`, into N columns of `out`.
///
/// `out` is `[tokens, heads * stride]`, `stride` being `out_stride`: of each head's columns the first N are
/// overwritten, the others stay. The bits are those of [`matmul`](crate::matmul()) with a matrix of the head's rows
/// and an input of its columns, quantised by [`Activations::quantise`](crate::Activations::quantise) where coded:
/// they do not depend on threads or other tokens. Allocates only beyond the scratch's capacity.
///
/// # Panics
/// If a shape does not match, or a head's rows are not whole blocks of 32.
pub fn head_matmul(
    pool: &Pool,
    kernels: Kernels,
    matrix: &Matrix<'_>,
    heads: usize,
    input: HeadInput<'_>,
    scratch: &mut HeadScratch,
    out: &mut [f32],
    out_stride: usize,
) {
    let HeadInput { x, stride, coded } = input;
    let (rows, cols) = (matrix.rows() / heads.max(1), matrix.cols());
    assert!(heads > 0 && rows * heads == matrix.rows() && rows.is_multiple_of(ROWS), "{heads} of {matrix:?}");
    assert!(cols <= stride && rows <= out_stride, "{rows} x {cols} of {out_stride} x {stride} columns");
    let tokens = x.len() / (heads * stride).max(1);
    assert_eq!(x.len(), tokens * heads * stride, "x is [tokens, {heads} * {stride}]");
    assert_eq!(out.len(), tokens * heads * out_stride, "out is [{tokens}, {heads} * {out_stride}]");
    let group = matrix.tiles().filter(|_| coded).map(|tiles| tiles.group());
    let HeadScratch { floats, planes } = scratch;
    if floats.len() < tokens * heads * cols {
        floats.resize(tokens * heads * cols, 0.0);
    }
    let (codes, cells) = room(cols);
    if group.is_some() {
        planes.reserve(tokens * heads * codes, tokens * heads * cells);
    }
    let run = |head: usize, group: usize| {
        let first = head * tokens;
        Run { code: first * codes, cell: first * cells, tokens, cols, group }
    };
    let of = |head: usize, token: usize| &x[(token * heads + head) * stride..][..cols];
    let (floats, shared, out) = (Shared::new(floats), planes.share(), Shared::new(out));
    let each = |task: &(dyn Fn(usize) + Sync)| {
        if heads * tokens * rows * cols < FORK {
            (0..heads).for_each(task);
        } else {
            pool.run(heads, task);
        }
    };
    if let Some(group) = group {
        each(&|head| {
            for token in 0..tokens {
                // SAFETY: each head has its own cells, and one task.
                unsafe { shared.quantise(kernels, run(head, group), token, 0, of(head, token)) };
            }
        });
    }
    let planes = &*planes;
    each(&|head| {
        let operand = match group {
            Some(group) => Operand::Coded(planes.view(run(head, group))),
            None => {
                let first = head * tokens * cols;
                // SAFETY: each head has its own part, and one task.
                let own = unsafe { floats.part(first..first + tokens * cols) };
                for (token, to) in own.chunks_exact_mut(cols).enumerate() {
                    to.copy_from_slice(of(head, token));
                }
                Operand::Float(own)
            }
        };
        let columns = head * out_stride..head * out_stride + rows;
        // SAFETY: each task has its own head's own columns.
        let out = unsafe { out.shard(0, tokens, heads * out_stride, columns) };
        let first = head * rows;
        multiply(kernels, matrix, first..first + rows, operand, &mut out.renumbered(first));
    });
}

#[cfg(test)]
mod tests {
    use smoe_format::{Encoding, Uniform, Zero};

    use super::*;
    use crate::{Activations, Input, matmul};

    fn values(n: usize, seed: u32) -> Vec<f32> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / 8_388_608.0 - 1.0
        };
        (0..n).map(|_| next()).collect()
    }

    #[test]
    fn each_head_is_a_product_of_its_own() {
        let q = |bits, group| Encoding::Uniform(Uniform::new(bits, group, Zero::Symmetric).expect("valid"));
        let (heads, rows, cols, stride, out_stride) = (3, 64, 40, 56, 70);
        for encoding in [Encoding::F32, Encoding::Bf16, q(8, 64), q(4, 32), q(3, 16)] {
            let size = encoding.tensor_bytes(rows, cols).expect("small");
            let mut bytes = vec![0; heads * size];
            encoding.encode(&values(heads * rows * cols, 1), cols, &mut bytes);
            let matrix = Matrix::new(&bytes, heads * rows, cols, encoding);
            for (tokens, coded) in [(1, true), (1, false), (9, true), (200, true), (200, false)] {
                let x = values(tokens * heads * stride, 2);
                for kernels in Kernels::available() {
                    let mut expected = vec![7.0; tokens * heads * out_stride];
                    for head in 0..heads {
                        let own: Vec<f32> = (0..tokens)
                            .flat_map(|t| x[(t * heads + head) * stride..][..cols].to_vec())
                            .collect();
                        let of_head =
                            Matrix::new(&bytes[head * size..(head + 1) * size], rows, cols, encoding);
                        let mut a = Activations::with_capacity(tokens, cols);
                        if let Some(uniform) = of_head.tiles() {
                            a.quantise(kernels, &own, tokens, cols, uniform.group());
                        }
                        let views = [a.view()];
                        let input = match of_head.tiles() {
                            Some(_) if coded => Input::new(&own, tokens, &views),
                            _ => Input::exact(&own, tokens),
                        };
                        let mut product = vec![0.0; tokens * rows];
                        matmul(&Pool::new(1, false), kernels, &of_head, &input, &mut product);
                        for (t, row) in product.chunks(rows).enumerate() {
                            expected[(t * heads + head) * out_stride..][..rows].copy_from_slice(row);
                        }
                    }
                    for threads in [1, 3] {
                        let pool = Pool::new(threads, false);
                        let mut scratch = HeadScratch::with_capacity(1, heads, cols);
                        let mut out = vec![7.0; tokens * heads * out_stride];
                        let input = HeadInput { x: &x, stride, coded };
                        head_matmul(
                            &pool,
                            kernels,
                            &matrix,
                            heads,
                            input,
                            &mut scratch,
                            &mut out,
                            out_stride,
                        );
                        let bits = |v: &[f32]| v.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
                        assert_eq!(bits(&out), bits(&expected), "{encoding} {tokens} {coded} {kernels:?}");
                    }
                }
            }
        }
    }
}
