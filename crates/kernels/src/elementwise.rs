//! Sums and multiples of vectors: the residual stream and the weighted sum of experts.
//!
//! Elementwise, so one plain loop is both the definition and, compiled with an instruction set's features,
//! its kernel.

use crate::isa::Kernels;
use crate::simd::{Op, Simd};

struct AddInPlace<'a> {
    acc: &'a mut [f32],
    x: &'a [f32],
}

impl AddInPlace<'_> {
    #[inline(always)]
    fn eval(self) {
        for (acc, &x) in self.acc.iter_mut().zip(self.x) {
            *acc += x;
        }
    }
}

impl Op for AddInPlace<'_> {
    type Out = ();

    fn scalar(self) {
        self.eval();
    }

    #[inline(always)]
    fn vector<S: Simd>(self, _: S) {
        self.eval();
    }
}

struct MulInPlace<'a> {
    x: &'a mut [f32],
    by: &'a [f32],
}

impl MulInPlace<'_> {
    #[inline(always)]
    fn eval(self) {
        for (x, &by) in self.x.iter_mut().zip(self.by) {
            *x *= by;
        }
    }
}

impl Op for MulInPlace<'_> {
    type Out = ();

    fn scalar(self) {
        self.eval();
    }

    #[inline(always)]
    fn vector<S: Simd>(self, _: S) {
        self.eval();
    }
}

struct ScaleAdd<'a> {
    acc: &'a mut [f32],
    x: &'a [f32],
    w: f32,
}

impl ScaleAdd<'_> {
    #[inline(always)]
    fn eval(self) {
        for (acc, &x) in self.acc.iter_mut().zip(self.x) {
            *acc = self.w.mul_add(x, *acc);
        }
    }
}

impl Op for ScaleAdd<'_> {
    type Out = ();

    fn scalar(self) {
        self.eval();
    }

    #[inline(always)]
    fn vector<S: Simd>(self, _: S) {
        self.eval();
    }
}

struct ScaleInPlace<'a> {
    x: &'a mut [f32],
    w: f32,
}

impl ScaleInPlace<'_> {
    #[inline(always)]
    fn eval(self) {
        for x in self.x {
            *x *= self.w;
        }
    }
}

impl Op for ScaleInPlace<'_> {
    type Out = ();

    fn scalar(self) {
        self.eval();
    }

    #[inline(always)]
    fn vector<S: Simd>(self, _: S) {
        self.eval();
    }
}

impl Kernels {
    /// `acc[i] += x[i]`.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn add_in_place(self, acc: &mut [f32], x: &[f32]) {
        assert_eq!(acc.len(), x.len(), "operands of a sum");
        self.run(AddInPlace { acc, x });
    }

    /// `x[i] *= by[i]`.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn mul_in_place(self, x: &mut [f32], by: &[f32]) {
        assert_eq!(x.len(), by.len(), "operands of a product");
        self.run(MulInPlace { x, by });
    }

    /// `acc[i] = w * x[i] + acc[i]`, rounded once.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn scale_add(self, acc: &mut [f32], x: &[f32], w: f32) {
        assert_eq!(acc.len(), x.len(), "operands of a sum");
        self.run(ScaleAdd { acc, x, w });
    }

    /// `x[i] *= w`.
    pub fn scale_in_place(self, x: &mut [f32], w: f32) {
        self.run(ScaleInPlace { x, w });
    }
}
