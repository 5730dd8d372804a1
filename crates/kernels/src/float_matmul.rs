//! Matrix products of float weights, as they lie in a file, with f32 activations.

use std::ops::Range;

use smoe_format::Encoding;

use crate::dot::{Bf16, Element, F16, F32, Rows, products, products_scalar};
use crate::isa::Kernels;
use crate::output::Shard;
use crate::simd::{Op, Simd};

struct FloatMatmul<'a, 'o> {
    weights: &'a [u8],
    encoding: Encoding,
    cols: usize,
    rows: Range<usize>,
    x: &'a [f32],
    out: &'a mut Shard<'o>,
}

impl FloatMatmul<'_, '_> {
    fn scalar_of<E: Element>(self) {
        let first = self.rows.start;
        let rows = Rows::new(self.weights, self.cols * E::BYTES, self.rows.len());
        products_scalar::<E>(rows, self.x, self.cols, |row, token, sum| {
            self.out.set(token, first + row, sum)
        });
    }

    #[inline(always)]
    fn vector_of<S: Simd, E: Element>(self, s: S) {
        let first = self.rows.start;
        let rows = Rows::new(self.weights, self.cols * E::BYTES, self.rows.len());
        products::<S, E>(s, rows, self.x, self.cols, &mut |row, token, sum| {
            self.out.set(token, first + row, sum);
        });
    }
}

impl Op for FloatMatmul<'_, '_> {
    type Out = ();

    fn scalar(self) {
        match self.encoding {
            Encoding::F32 => self.scalar_of::<F32>(),
            Encoding::F16 => self.scalar_of::<F16>(),
            Encoding::Bf16 => self.scalar_of::<Bf16>(),
            Encoding::Uniform(_) | Encoding::Table(_) => {}
        }
    }

    #[inline(always)]
    fn vector<S: Simd>(self, s: S) {
        match self.encoding {
            Encoding::F32 => self.vector_of::<S, F32>(s),
            Encoding::F16 => self.vector_of::<S, F16>(s),
            Encoding::Bf16 => self.vector_of::<S, Bf16>(s),
            Encoding::Uniform(_) | Encoding::Table(_) => {}
        }
    }
}

impl Kernels {
    /// Multiplies rows of a float matrix by T activation vectors: `out[t, r] = dot(weights[r], x[t])`.
    ///
    /// `weights` is the whole matrix, `[_, cols]` row-major in `encoding` (f32, f16 or bf16, little-endian,
    /// any alignment); of it the rows `rows` are read. `x` is `[T, cols]`; `out` has T tokens and `rows`
    /// among its rows.
    /// Each result is [`Kernels::dot`] of the widened weights, whatever T, `rows` and the instruction set.
    ///
    /// # Panics
    /// If `encoding` is one of codes, `cols` is 0, `x` is not `[T, cols]`, or `rows` is not within the
    /// weights and `out`.
    pub fn float_matmul(
        self,
        weights: &[u8],
        encoding: Encoding,
        cols: usize,
        rows: Range<usize>,
        x: &[f32],
        out: &mut Shard<'_>,
    ) {
        assert!(encoding.is_float(), "{encoding} weights are not floats");
        assert!(cols > 0 && x.len() == out.tokens() * cols, "activations are [{}, {cols}]", out.tokens());
        assert!(rows.start <= rows.end, "rows {rows:?}");
        let bytes = |rows| encoding.tensor_bytes(rows, cols).filter(|&bytes| bytes <= weights.len());
        let (Some(start), Some(end)) = (bytes(rows.start), bytes(rows.end)) else {
            panic!("rows {rows:?} of {cols} columns in {} bytes of {encoding}", weights.len());
        };
        let weights = &weights[start..end];
        self.run(FloatMatmul { weights, encoding, cols, rows, x, out });
    }
}
