//! RMSNorm (Zhang and Sennrich, 2019) and LayerNorm (Ba, Kiros and Hinton, 2016).

use crate::dot::{dot_lanes, sum_of_products};
use crate::isa::Kernels;
use crate::simd::{LANES, Op, Simd, join};

/// `1 / sqrt(mean of squares + eps)`, each step rounded.
#[inline(always)]
fn inverse_rms(sum_of_squares: f32, n: usize, eps: f32) -> f32 {
    1.0 / (sum_of_squares / n as f32 + eps).sqrt()
}

/// Plain loops: elementwise, so the compiler's own vectors give the same bits.
#[inline(always)]
fn normalise(x: &[f32], weight: &[f32], inverse: f32, out: &mut [f32]) {
    for ((out, &x), &weight) in out.iter_mut().zip(x).zip(weight) {
        *out = weight * (x * inverse);
    }
}

#[inline(always)]
fn normalise_in_place(x: &mut [f32], weight: &[f32], inverse: f32) {
    for (x, &weight) in x.iter_mut().zip(weight) {
        *x = weight * (*x * inverse);
    }
}

struct RmsNorm<'a> {
    x: &'a [f32],
    weight: &'a [f32],
    eps: f32,
    out: &'a mut [f32],
}

impl Op for RmsNorm<'_> {
    type Out = ();

    fn scalar(self) {
        let sum = sum_of_products(self.x.iter().map(|&x| (x, x)));
        normalise(self.x, self.weight, inverse_rms(sum, self.x.len(), self.eps), self.out);
    }

    #[inline(always)]
    fn vector<S: Simd>(self, s: S) {
        let sum = dot_lanes(s, self.x, self.x);
        normalise(self.x, self.weight, inverse_rms(sum, self.x.len(), self.eps), self.out);
    }
}

struct RmsNormInPlace<'a> {
    x: &'a mut [f32],
    weight: &'a [f32],
    eps: f32,
}

impl Op for RmsNormInPlace<'_> {
    type Out = ();

    fn scalar(self) {
        for x in self.x.chunks_exact_mut(self.weight.len()) {
            let sum = sum_of_products(x.iter().map(|&x| (x, x)));
            normalise_in_place(x, self.weight, inverse_rms(sum, x.len(), self.eps));
        }
    }

    #[inline(always)]
    fn vector<S: Simd>(self, s: S) {
        for x in self.x.chunks_exact_mut(self.weight.len()) {
            let inverse = inverse_rms(dot_lanes(s, x, x), x.len(), self.eps);
            normalise_in_place(x, self.weight, inverse);
        }
    }
}

struct LayerNormInPlace<'a> {
    x: &'a mut [f32],
    weight: &'a [f32],
    bias: &'a [f32],
    eps: f32,
}

impl LayerNormInPlace<'_> {
    /// Element i goes to lane i mod 16. Elementwise within a chunk, so the compiler's own vectors give the same bits.
    #[inline(always)]
    fn sum(x: &[f32], of: impl Fn(f32) -> f32) -> f32 {
        let mut lanes = [0.0f32; LANES];
        for chunk in x.chunks(LANES) {
            for (lane, &x) in lanes.iter_mut().zip(chunk) {
                *lane += of(x);
            }
        }
        join(lanes)
    }

    #[inline(always)]
    fn eval(self) {
        let n = self.weight.len() as f32;
        for x in self.x.chunks_exact_mut(self.weight.len()) {
            let mean = Self::sum(x, |x| x) / n;
            let variance = Self::sum(x, |x| (x - mean) * (x - mean)) / n;
            let inverse = 1.0 / (variance + self.eps).sqrt();
            for ((x, &weight), &bias) in x.iter_mut().zip(self.weight).zip(self.bias) {
                *x = weight.mul_add((*x - mean) * inverse, bias);
            }
        }
    }
}

impl Op for LayerNormInPlace<'_> {
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
    /// LayerNorm of every row of `x`, in place: `fma(weight, (x - mean) * inv, bias)` with
    /// `inv = 1 / sqrt(mean of (x - mean)^2 + eps)`, each step rounded to f32.
    ///
    /// `weight` and `bias` are `[D]`, `x` is `[n, D]`. Both means add element i to lane i mod 16, lanes joined as in
    /// [`Kernels::dot`].
    ///
    /// # Panics
    /// If `weight` is empty, `bias` has another length, or `x` is not whole rows.
    pub fn layer_norm_in_place(self, x: &mut [f32], weight: &[f32], bias: &[f32], eps: f32) {
        assert!(!weight.is_empty() && x.len().is_multiple_of(weight.len()), "whole rows of {}", weight.len());
        assert_eq!(weight.len(), bias.len(), "weight and bias of one length");
        self.run(LayerNormInPlace { x, weight, bias, eps });
    }

    /// `out = weight * (x * inv)` with `inv = 1 / sqrt(dot(x, x) / D + eps)`, each step rounded to f32.
    ///
    /// `x`, `weight` and `out` are `[D]`; the sum is [`Kernels::dot`]'s.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn rms_norm(self, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        assert!(x.len() == weight.len() && x.len() == out.len(), "x, weight and out of one length");
        self.run(RmsNorm { x, weight, eps, out });
    }

    /// [`Kernels::rms_norm`] of every row of `x`, in place: the norm of all query or key heads.
    ///
    /// `weight` is `[D]`, `x` is `[n, D]`.
    ///
    /// # Panics
    /// If `weight` is empty, or `x` is not whole rows of its length.
    pub fn rms_norm_in_place(self, x: &mut [f32], weight: &[f32], eps: f32) {
        assert!(!weight.is_empty() && x.len().is_multiple_of(weight.len()), "whole rows of {}", weight.len());
        self.run(RmsNormInPlace { x, weight, eps });
    }
}
