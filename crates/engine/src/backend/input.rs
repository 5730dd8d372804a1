//! Inputs of products on the processor, in the forms that matrices take.

use smoe_format::Uniform;
use smoe_kernels::{Activations, Input, Kernels, Matrix, Pool};

/// Group sizes that an encoding can have: 16, 32, 64, 128.
const MAX_GROUPS: usize = 4;

/// f32 inputs of T tokens and, once coded matrices ask, their int8 forms: one per group size of the model.
#[derive(Debug)]
pub(crate) struct Plane {
    pub(crate) x: Vec<f32>,
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
    pub(crate) fn with_capacity(tokens: usize, cols: usize, groups: &[usize]) -> Self {
        let coded =
            |&group| Coded { group, activations: Activations::with_capacity(tokens, cols), fresh: false };
        Self { x: vec![0.0; tokens * cols], coded: groups.iter().map(coded).collect() }
    }

    /// The first `len` values, to be overwritten.
    pub(crate) fn fill(&mut self, len: usize) -> &mut [f32] {
        self.coded.iter_mut().for_each(|coded| coded.fresh = false);
        &mut self.x[..len]
    }

    /// Calls `f` with the input of `tokens` in every form that `matrices` take; each form is made once per input.
    pub(crate) fn with_forms(
        &mut self,
        pool: &Pool,
        kernels: Kernels,
        exact: bool,
        matrices: &[Matrix<'_>],
        tokens: usize,
        f: impl FnOnce(&Input<'_>),
    ) {
        let cols = matrices.first().map_or(0, Matrix::cols);
        let Self { x, coded } = self;
        let x = &x[..tokens * cols];
        let coded_groups = matrices.iter().filter_map(Matrix::tiles).map(Uniform::group);
        for group in coded_groups.filter(|_| !exact) {
            for coded in coded.iter_mut().filter(|coded| coded.group == group && !coded.fresh) {
                coded.activations.quantise_parallel(pool, kernels, x, tokens, cols, group);
                coded.fresh = true;
            }
        }
        if exact {
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
}
