//! Parallel matrix products: rows of weights spread over the threads of a pool.
//!
//! A product does not depend on how it is spread: each row's bits are the kernels' own.

use std::cell::RefCell;
use std::ops::Range;

use smoe_format::Encoding;
use smoe_format::tile::ROWS;

use crate::activations::Quantised;
use crate::{Kernels, Matrix, Pool, Shard};

/// Multiply-adds below which a fork does not pay: some microseconds of work.
pub(crate) const FORK: usize = 1 << 18;
/// Tasks per thread of a product at least, if it has as many rows: enough to balance.
pub(crate) const TASKS_PER_THREAD: usize = 8;
/// Bytes of weights of a task at most, about, so that nobody waits long for the last one: 30 us of a core's share of
/// memory (EXP-ENGINE-05).
pub(crate) const TASK_BYTES: usize = 1 << 20;

/// What a layer's matrices are multiplied by: the activations in `f32`, and as int8 codes in every group
/// size that the coded matrices among them need.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a> {
    x: &'a [f32],
    tokens: usize,
    coded: &'a [Quantised<'a>],
    exact: bool,
}

/// The operand that a matrix takes of an [`Input`].
#[derive(Clone, Copy)]
pub(crate) enum Operand<'a> {
    Coded(Quantised<'a>),
    Float(&'a [f32]),
}

impl<'a> Input<'a> {
    /// Activations of `tokens` tokens: `x` is `[tokens, cols]`, and `coded` holds the same quantised, once
    /// for each group size in use. Float weights take `x`, coded weights the codes. `x` may be empty if all
    /// weights are coded.
    ///
    /// # Panics
    /// If a member of `coded` has another number of tokens.
    #[must_use]
    pub fn new(x: &'a [f32], tokens: usize, coded: &'a [Quantised<'a>]) -> Self {
        assert!(coded.iter().all(|q| q.tokens() == tokens), "{tokens} tokens in every quantisation");
        Self { x, tokens, coded, exact: false }
    }

    /// Activations for exact products: coded weights are decoded and multiplied in `f32` too.
    #[must_use]
    pub fn exact(x: &'a [f32], tokens: usize) -> Self {
        Self { x, tokens, coded: &[], exact: true }
    }

    /// Tokens.
    #[must_use]
    pub const fn tokens(&self) -> usize {
        self.tokens
    }

    /// True if coded weights too are multiplied in `f32`.
    #[must_use]
    pub const fn is_exact(&self) -> bool {
        self.exact
    }

    /// What `matrix` is multiplied by.
    ///
    /// # Panics
    /// If that is missing or of another width.
    pub(crate) fn operand(&self, matrix: &Matrix<'_>) -> Operand<'a> {
        match matrix.tiles() {
            Some(tiles) if !self.exact => {
                let fits = |q: &&Quantised<'_>| q.group() == tiles.group() && q.cols() == matrix.cols();
                match self.coded.iter().find(fits) {
                    Some(&q) => Operand::Coded(q),
                    None => panic!("no activations for {matrix:?} among {} quantisations", self.coded.len()),
                }
            }
            _ => {
                assert_eq!(self.x.len(), self.tokens * matrix.cols(), "x for {matrix:?}");
                Operand::Float(self.x)
            }
        }
    }
}

/// One product of [`matmul_all`]: a matrix, and its `[tokens, rows]` output.
#[derive(Debug)]
pub struct Product<'a> {
    matrix: Matrix<'a>,
    out: Shard<'a>,
}

impl<'a> Product<'a> {
    /// The product of `matrix` and `tokens` tokens, into `out` (`[tokens, rows]`, row-major).
    ///
    /// # Panics
    /// If `out` has another length.
    #[must_use]
    pub fn new(matrix: Matrix<'a>, tokens: usize, out: &'a mut [f32]) -> Self {
        Self { matrix, out: Shard::new(out, tokens, matrix.rows()) }
    }
}

/// Multiplies `matrix` (`[N, K]`) by `input` (T tokens of K columns) into `out` (`[T, N]`, row-major).
///
/// Coded weights take the int8 activations ([`Kernels::coded_matmul`]), or `f32` if the input is exact
/// ([`Kernels::exact_matmul`]); float weights take `f32` ([`Kernels::float_matmul`]). Those define the bits,
/// whatever the number of threads. A small product runs on the calling thread.
///
/// # Panics
/// If shapes differ or the input lacks the matrix's group size.
pub fn matmul(pool: &Pool, kernels: Kernels, matrix: &Matrix<'_>, input: &Input<'_>, out: &mut [f32]) {
    matmul_all(pool, kernels, &mut [Product::new(*matrix, input.tokens, out)], input);
}

/// Several products with one input in one fork, as the projections of an attention layer.
///
/// # Panics
/// As [`matmul`]; also if a product has another number of tokens than the input.
pub fn matmul_all(pool: &Pool, kernels: Kernels, products: &mut [Product<'_>], input: &Input<'_>) {
    for product in &*products {
        assert_eq!(product.out.tokens(), input.tokens, "tokens of {:?}", product.matrix);
        let _ = input.operand(&product.matrix);
    }
    let work = |m: &Matrix<'_>| m.rows() * m.cols() * input.tokens;
    let total: usize = products.iter().map(|p| work(&p.matrix)).sum();
    if pool.threads() == 1 || total < FORK {
        for Product { matrix, out } in products {
            multiply(kernels, matrix, 0..matrix.rows(), input.operand(matrix), out);
        }
        return;
    }
    let share = total / (pool.threads() * TASKS_PER_THREAD);
    let rows_per_task = |m: &Matrix<'_>| {
        let rows =
            (share / (m.cols() * input.tokens).max(1)).min(TASK_BYTES * m.rows() / m.bytes().len().max(1));
        rows.next_multiple_of(ROWS).max(ROWS)
    };
    let tasks_of = |m: &Matrix<'_>| m.rows().div_ceil(rows_per_task(m));
    let products = &*products;
    pool.run_pieces(products.iter().map(|p| tasks_of(&p.matrix)).sum(), &|mut task, piece| {
        for Product { matrix, out } in products {
            let tasks = tasks_of(matrix);
            if task < tasks {
                let step = rows_per_task(matrix);
                let rows = piece.of_rows(task * step..matrix.rows().min((task + 1) * step), ROWS);
                if rows.is_empty() {
                    return;
                }
                // SAFETY: each task has its own rows of its product's output.
                let mut out = unsafe { out.alias(rows.clone()) };
                multiply(kernels, matrix, rows, input.operand(matrix), &mut out);
                return;
            }
            task -= tasks;
        }
    });
}

thread_local! {
    /// Decoded weights of [`multiply`]'s exact products, some rows.
    static DECODED: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// One thread's part of a product. Allocates only for exact products of coded weights, once per thread.
pub(crate) fn multiply(
    kernels: Kernels,
    matrix: &Matrix<'_>,
    rows: Range<usize>,
    x: Operand<'_>,
    out: &mut Shard<'_>,
) {
    match x {
        Operand::Coded(x) => kernels.coded_matmul(matrix, rows, x, out),
        Operand::Float(x) if matrix.encoding().is_float() => {
            if matrix.cols() == 0 {
                (0..out.tokens()).for_each(|t| out.part(rows.clone()).token(t).fill(0.0));
            } else {
                kernels.float_matmul(matrix.bytes(), matrix.encoding(), matrix.cols(), rows, x, out);
            }
        }
        Operand::Float(x) => DECODED.with_borrow_mut(|decoded| {
            // Eight rows: what the float kernels take at once, in L2 for any width.
            let len = 8 * matrix.cols();
            if decoded.len() < len {
                decoded.resize(len, 0.0);
            }
            kernels.exact_matmul(matrix, rows, x, &mut decoded[..len], out);
        }),
    }
}

impl Kernels {
    /// Multiplies rows of a coded matrix by `f32` activations: the weights are decoded to `f32`
    /// ([`Self::decode_rows`]) and multiplied as [`Self::float_matmul`] multiplies F32 weights, with
    /// exactly its bits.
    ///
    /// `matrix` is `[N, K]`; `x` is `[T, K]`; `out` holds at least the columns `rows` of a `[T, N]` plane;
    /// `scratch` holds decoded rows, at least one (K floats), and more are better.
    ///
    /// # Panics
    /// If shapes differ, `rows` are not whole blocks of 32 (the end of the matrix excepted), or the scratch
    /// is shorter than a row.
    pub fn exact_matmul(
        self,
        matrix: &Matrix<'_>,
        rows: Range<usize>,
        x: &[f32],
        scratch: &mut [f32],
        out: &mut Shard<'_>,
    ) {
        matrix.assert_range(&rows);
        let cols = matrix.cols();
        assert_eq!(x.len(), out.tokens() * cols, "x for {matrix:?}");
        if cols == 0 {
            (0..out.tokens()).for_each(|t| out.part(rows.clone()).token(t).fill(0.0));
            return;
        }
        assert!(scratch.len() >= cols, "scratch for a row of {matrix:?}");
        let at_once = scratch.len() / cols;
        for start in rows.clone().step_by(at_once) {
            let chunk = start..rows.end.min(start + at_once);
            let scratch = &mut scratch[..chunk.len() * cols];
            self.decode_rows(matrix, chunk.clone(), scratch);
            let mut out = out.part(chunk.clone()).renumbered(0);
            self.float_matmul(bytes_of(scratch), Encoding::F32, cols, 0..chunk.len(), x, &mut out);
        }
    }
}

/// `values` as F32 weights.
fn bytes_of(values: &mut [f32]) -> &[u8] {
    if cfg!(target_endian = "big") {
        values.iter_mut().for_each(|v| *v = f32::from_bits(v.to_bits().to_le()));
    }
    // SAFETY: the same memory; every byte is initialised, and u8 has no alignment.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

#[cfg(test)]
mod tests {
    use smoe_format::{Uniform, Zero};

    use super::*;
    use crate::Activations;

    fn values(n: usize, seed: u32) -> Vec<f32> {
        let mut state = seed;
        (0..n)
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 8) as f32 / 8_388_608.0 - 1.0
            })
            .collect()
    }

    fn encoded(encoding: Encoding, rows: usize, cols: usize, seed: u32) -> Vec<u8> {
        let mut bytes = vec![0; encoding.tensor_bytes(rows, cols).expect("small")];
        encoding.encode(&values(rows * cols, seed), cols, &mut bytes);
        bytes
    }

    fn bits(values: &[f32]) -> Vec<u32> {
        values.iter().map(|v| v.to_bits()).collect()
    }

    fn encodings() -> Vec<Encoding> {
        let coded = [(4, 64, Zero::Symmetric), (8, 32, Zero::Symmetric), (3, 128, Zero::Affine)];
        let coded = coded.into_iter().filter_map(|(b, g, z)| Uniform::new(b, g, z)).map(Encoding::Uniform);
        coded.chain([Encoding::F32, Encoding::F16, Encoding::Bf16]).collect()
    }

    #[test]
    fn exact_products_are_float_products_of_the_decoded_weights() {
        let (rows, cols, tokens) = (75, 200, 5);
        let x = values(tokens * cols, 1);
        for encoding in encodings().into_iter().filter(|e| !e.is_float()) {
            let bytes = encoded(encoding, rows, cols, 2);
            let matrix = Matrix::new(&bytes, rows, cols, encoding);
            let mut plain = Vec::new();
            for row in 0..rows {
                let mut values = vec![0.0; cols];
                encoding.decode_row(&bytes, cols, row, &mut values);
                plain.extend(values.iter().flat_map(|v| v.to_le_bytes()));
            }
            for kernels in Kernels::available() {
                let mut expected = vec![0.0; tokens * rows];
                let mut shard = Shard::new(&mut expected, tokens, rows);
                kernels.float_matmul(&plain, Encoding::F32, cols, 0..rows, &x, &mut shard);
                for scratch_rows in [1, 3, 100] {
                    let mut scratch = vec![0.0; scratch_rows * cols + 7];
                    let mut out = vec![f32::NAN; tokens * rows];
                    let mut shard = Shard::new(&mut out, tokens, rows);
                    kernels.exact_matmul(&matrix, 0..rows, &x, &mut scratch, &mut shard);
                    assert_eq!(bits(&out), bits(&expected), "{encoding} {kernels:?}");
                }
            }
        }
    }

    #[test]
    fn spreading_over_threads_changes_nothing() {
        // Small enough for the caller's thread, and large enough to fork.
        for (rows, cols, tokens) in [(64, 64, 1), (1000, 512, 1), (333, 300, 13)] {
            let x = values(tokens * cols, 3);
            let kernels = Kernels::detect();
            let quantised: Vec<Activations> = [32, 64, 128]
                .into_iter()
                .map(|group| {
                    let mut a = Activations::with_capacity(tokens, cols);
                    a.quantise(kernels, &x, tokens, cols, group);
                    a
                })
                .collect();
            let coded: Vec<Quantised<'_>> = quantised.iter().map(Activations::view).collect();
            for input in [Input::new(&x, tokens, &coded), Input::exact(&x, tokens)] {
                for encoding in encodings() {
                    let bytes = encoded(encoding, rows, cols, 4);
                    let matrix = Matrix::new(&bytes, rows, cols, encoding);
                    let mut expected = vec![0.0; tokens * rows];
                    matmul(&Pool::new(1, false), kernels, &matrix, &input, &mut expected);
                    for threads in [2, 3, 5] {
                        let pool = Pool::new(threads, false);
                        let mut out = vec![f32::NAN; tokens * rows];
                        matmul(&pool, kernels, &matrix, &input, &mut out);
                        assert_eq!(bits(&out), bits(&expected), "{encoding} {threads}");
                    }
                }
            }
        }
    }

    #[test]
    fn several_products_in_one_fork_are_the_single_ones() {
        let (cols, tokens) = (512, 3);
        let x = values(tokens * cols, 5);
        let kernels = Kernels::detect();
        let mut a = Activations::with_capacity(tokens, cols);
        a.quantise(kernels, &x, tokens, cols, 64);
        let coded = [a.view()];
        let input = Input::new(&x, tokens, &coded);
        let q4 = Encoding::Uniform(Uniform::new(4, 64, Zero::Symmetric).expect("valid"));
        let shapes = [(700, q4), (40, Encoding::F32), (5, q4)];
        let bytes: Vec<Vec<u8>> = shapes.iter().map(|&(rows, e)| encoded(e, rows, cols, 6)).collect();
        let pool = Pool::new(3, false);
        let mut outs: Vec<Vec<f32>> = shapes.iter().map(|&(rows, _)| vec![0.0; tokens * rows]).collect();
        let matrix = |i: usize| Matrix::new(&bytes[i], shapes[i].0, cols, shapes[i].1);
        let mut products: Vec<Product<'_>> =
            outs.iter_mut().enumerate().map(|(i, out)| Product::new(matrix(i), tokens, out)).collect();
        matmul_all(&pool, kernels, &mut products, &input);
        for (i, out) in outs.iter().enumerate() {
            let mut expected = vec![0.0; out.len()];
            matmul(&pool, kernels, &matrix(i), &input, &mut expected);
            assert_eq!(bits(out), bits(&expected));
        }
    }
}
