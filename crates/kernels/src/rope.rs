//! Rotary position embedding (Su et al., 2021): pairs of a head's elements turned by an angle each.
//!
//! Elementwise, so one plain loop is both the definition and, compiled with an instruction set's features,
//! its kernel. Angles, and how they are stretched for long contexts, are the caller's.

use crate::isa::Kernels;
use crate::simd::{Op, Simd};

/// Which elements are a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RopeStyle {
    /// i and i + rope_dim / 2 (GPT-NeoX; the reference implementations' `rotate_half`).
    Half,
    /// 2i and 2i + 1 (GPT-J, the paper).
    Interleaved,
}

struct Rope<'a> {
    x: &'a mut [f32],
    head_dim: usize,
    cos: &'a [f32],
    sin: &'a [f32],
    style: RopeStyle,
}

#[inline(always)]
fn turn(x0: f32, x1: f32, cos: f32, sin: f32) -> (f32, f32) {
    (x0.mul_add(cos, -(x1 * sin)), x1.mul_add(cos, x0 * sin))
}

impl Rope<'_> {
    #[inline(always)]
    fn eval(self) {
        let pairs = self.cos.len();
        for head in self.x.chunks_exact_mut(self.head_dim) {
            let angles = self.cos.iter().zip(self.sin);
            match self.style {
                RopeStyle::Half => {
                    let (low, high) = head[..2 * pairs].split_at_mut(pairs);
                    for ((x0, x1), (&cos, &sin)) in low.iter_mut().zip(high).zip(angles) {
                        (*x0, *x1) = turn(*x0, *x1, cos, sin);
                    }
                }
                RopeStyle::Interleaved => {
                    let (whole, _) = head[..2 * pairs].as_chunks_mut::<2>();
                    for ([x0, x1], (&cos, &sin)) in whole.iter_mut().zip(angles) {
                        (*x0, *x1) = turn(*x0, *x1, cos, sin);
                    }
                }
            }
        }
    }
}

impl Op for Rope<'_> {
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
    /// Turns the pairs (x0, x1) of every head of one token to `(x0 cos - x1 sin, x1 cos + x0 sin)`.
    ///
    /// `x` is `[heads, head_dim]`; `cos` and `sin` are `[rope_dim / 2]`, the angles of this position. `style`
    /// says which elements of the first `rope_dim` of a head are pairs; the others stay.
    /// The first is `fma(x0, cos, -(x1 * sin))`, the second `fma(x1, cos, x0 * sin)`.
    ///
    /// # Panics
    /// If `cos` and `sin` differ in length, `rope_dim > head_dim`, `head_dim` is 0 or `x` is not whole heads.
    pub fn rope(self, x: &mut [f32], head_dim: usize, cos: &[f32], sin: &[f32], style: RopeStyle) {
        assert!(cos.len() == sin.len() && 2 * cos.len() <= head_dim, "rope_dim of a head of {head_dim}");
        assert!(head_dim > 0 && x.len().is_multiple_of(head_dim), "whole heads of {head_dim}");
        self.run(Rope { x, head_dim, cos, sin, style });
    }
}
