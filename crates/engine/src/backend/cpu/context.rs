//! What every verb needs: weights, threads, kernels, and inputs in the forms that matrices take.

use smoe_format::expert_file::LayerTable;
use smoe_format::{ModelSpec, Uniform};
use smoe_kernels::{Activations, Input, Kernels, Matrix, Pool, Product, RopeStyle, matmul, matmul_all};

use crate::rope::RopeTable;
use crate::weights::{Tensor, Weights};

/// Group sizes that an encoding can have: 16, 32, 64, 128.
const MAX_GROUPS: usize = 4;

/// f32 inputs of T tokens and, once coded matrices ask, their int8 forms: one per group size of the model.
#[derive(Debug)]
pub(super) struct Plane {
    pub(super) x: Vec<f32>,
    coded: Vec<Coded>,
}

#[derive(Debug)]
struct Coded {
    group: usize,
    activations: Activations,
    /// Made from the current `x`.
    fresh: bool,
}

impl Plane {
    pub(super) fn with_capacity(tokens: usize, cols: usize, groups: &[usize]) -> Self {
        let coded =
            |&group| Coded { group, activations: Activations::with_capacity(tokens, cols), fresh: false };
        Self { x: vec![0.0; tokens * cols], coded: groups.iter().map(coded).collect() }
    }

    /// The first `len` values, to be overwritten.
    pub(super) fn fill(&mut self, len: usize) -> &mut [f32] {
        self.coded.iter_mut().for_each(|coded| coded.fresh = false);
        &mut self.x[..len]
    }
}

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
        let cols = matrices.first().map_or(0, Matrix::cols);
        let Plane { x, coded } = plane;
        let x = &x[..tokens * cols];
        let coded_groups = matrices.iter().filter_map(Matrix::tiles).map(Uniform::group);
        for group in coded_groups.filter(|_| !self.exact) {
            for coded in coded.iter_mut().filter(|coded| coded.group == group && !coded.fresh) {
                coded.activations.quantise_parallel(&self.pool, self.kernels, x, tokens, cols, group);
                coded.fresh = true;
            }
        }
        if self.exact {
            return f(&Input::exact(x, tokens));
        }
        let mut fresh = coded.iter().filter(|coded| coded.fresh).map(|coded| coded.activations.view());
        let Some(first) = fresh.next() else {
            return f(&Input::new(x, tokens, &[]));
        };
        let mut views = [first; MAX_GROUPS];
        let mut n = 1;
        for view in fresh {
            views[n] = view;
            n += 1;
        }
        f(&Input::new(x, tokens, &views[..n]));
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
