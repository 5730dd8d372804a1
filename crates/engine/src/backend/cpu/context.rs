//! What every verb needs: weights, threads, kernels.

use smoe_format::ModelSpec;
use smoe_format::expert_file::LayerTable;
use smoe_kernels::{Input, Kernels, Matrix, Pool, Product, RopeStyle, matmul, matmul_all};

use crate::backend::input::Plane;
use crate::rope::RopeTable;
use crate::weights::{Tensor, Weights};

/// What every verb needs, apart from the planes.
#[derive(Debug)]
pub(super) struct Context {
    pub(super) spec: ModelSpec,
    pub(super) weights: Weights,
    pub(super) experts: Vec<LayerTable>,
    pub(super) rope: RopeTable,
    pub(super) pool: Pool,
    pub(super) kernels: Kernels,
    pub(super) exact: bool,
}

impl Context {
    /// `out = W x` for T tokens.
    pub(super) fn multiply(&self, w: &Tensor, plane: &mut Plane, tokens: usize, out: &mut [f32]) {
        let matrix = self.weights.matrix(w);
        self.with_input(&[matrix], plane, tokens, |input| {
            matmul(&self.pool, self.kernels, &matrix, input, &mut out[..tokens * w.rows]);
        });
    }

    /// Several products of the same input, in one fork.
    pub(super) fn multiply_all<const N: usize>(
        &self,
        ws: [&Tensor; N],
        plane: &mut Plane,
        tokens: usize,
        outs: [&mut [f32]; N],
    ) {
        let matrices = ws.map(|w| self.weights.matrix(w));
        self.with_input(&matrices, plane, tokens, |input| {
            let mut outs = outs.into_iter();
            let mut products = matrices.map(|matrix| {
                let out = outs.next().unwrap_or_default();
                Product::new(matrix, tokens, &mut out[..tokens * matrix.rows()])
            });
            matmul_all(&self.pool, self.kernels, &mut products, input);
        });
    }

    /// Calls `f` with the input in every form that `matrices` take; each form is made once per input.
    pub(super) fn with_input(
        &self,
        matrices: &[Matrix<'_>],
        plane: &mut Plane,
        tokens: usize,
        f: impl FnOnce(&Input<'_>),
    ) {
        plane.with_forms(&self.pool, self.kernels, self.exact, matrices, tokens, f);
    }

    /// `out[t] = rms_norm(x[t])` for every row.
    pub(super) fn norm(&self, x: &[f32], weight: &[f32], out: &mut [f32]) {
        let d = weight.len();
        self.pool.chunks_mut(out, d, &|t, out| {
            self.kernels.rms_norm(&x[t * d..(t + 1) * d], weight, self.spec.rms_norm_eps, out);
        });
    }

    /// Turns the first elements of each head of `x`, as wide as what is rotated of it.
    pub(super) fn rotate(&self, x: &mut [f32], head_dim: usize, position: u32) {
        let style = if self.spec.rope.interleaved { RopeStyle::Interleaved } else { RopeStyle::Half };
        self.rotate_as(style, x, head_dim, position);
    }

    pub(super) fn rotate_as(&self, style: RopeStyle, x: &mut [f32], head_dim: usize, position: u32) {
        let (cos, sin) = (self.rope.cos(position as usize), self.rope.sin(position as usize));
        self.kernels.rope(x, head_dim, cos, sin, style);
    }

    /// Adds `bias` to every row of `x`.
    pub(super) fn add_bias(&self, x: &mut [f32], bias: Option<&[f32]>) {
        if let Some(bias) = bias {
            self.pool.chunks_mut(x, bias.len(), &|_, row| self.kernels.add_in_place(row, bias));
        }
    }

    /// What a part of a layer adds to the hidden states, row by row: `hidden += multiplier * y`, rounded once, so that a
    /// multiplier of one changes no bit.
    pub(super) fn add_residual(&self, hidden: &mut [f32], y: &[f32]) {
        let (d, w) = (self.spec.d_model, self.spec.multipliers.residual as f32);
        self.pool.chunks_mut(hidden, d, &|t, row| {
            self.kernels.scale_add(row, &y[t * d..(t + 1) * d], w);
        });
    }

    /// `x *= by`, if that changes anything.
    pub(super) fn multiply_by(&self, x: &mut [f32], by: f64) {
        if by != 1.0 {
            self.kernels.scale_in_place(x, by as f32);
        }
    }

    /// `x += y`, row by row.
    pub(super) fn add(&self, x: &mut [f32], y: &[f32]) {
        let d = self.spec.d_model;
        self.pool.chunks_mut(x, d, &|t, x| self.kernels.add_in_place(x, &y[t * d..(t + 1) * d]));
    }
}
