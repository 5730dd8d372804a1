//! Our own `exp`, and what is made of it: sigmoid, SiLU, SwiGLU in two forms, softmax.
//!
//! `exp(x)` by Cody and Waite's reduction: with n the integer next to x / ln 2, `r = x - n ln 2` in two
//! steps (|r| <= 0.3466), `exp(r)` by a polynomial of degree 6 in Horner's form (minimax, relative error
//! 4.4e-9, found by Remez exchange with the three lowest coefficients held at 1, 1 and 1/2), and n added to
//! the exponent. Only fused multiply-adds and single IEEE operations, so the bits are the same everywhere.
//! The largest error over all f32 is below [`EXP_ULP_MAX`]; a test samples it.

use smoe_format::spec::Activation;

use crate::isa::Kernels;
use crate::simd::{LANES, Op, Simd, join};

/// Bound of the error of [`exp`] in units of the last place: 0.913 was the largest over all f32.
pub const EXP_ULP_MAX: f64 = 0.92;

const LOG2_E: f32 = std::f32::consts::LOG2_E;
/// 1.5 * 2^23: adding it leaves the nearest integer in the low bits.
const MAGIC: f32 = 12_582_912.0;
/// ln 2 as a sum of two f32, the first so short that `x - n * LN2_HIGH` is exact.
const LN2_HIGH: f32 = f32::from_bits(0x3f31_8000);
const LN2_LOW: f32 = f32::from_bits(0xb95e_8083);
/// The coefficients of the polynomial, the highest first.
const POLYNOMIAL: [f32; 7] = [
    f32::from_bits(0x3ab7_f768),
    f32::from_bits(0x3c09_2bfa),
    f32::from_bits(0x3d2a_a97f),
    f32::from_bits(0x3e2a_aa33),
    0.5,
    1.0,
    1.0,
];
/// The smallest x whose `exp` is a normal number, -87.33654.
const LOWEST: f32 = f32::from_bits(0xc2ae_ac4f);
/// The smallest x whose `exp` is infinite, 88.72284.
const OVERFLOW: f32 = f32::from_bits(0x42b1_7218);

/// `e^x`, within one unit of the last place.
///
/// +0 where the result would be below the smallest normal number (x < -87.33654, so no subnormal ever comes
/// out), infinity where it would be above the largest one (x > 88.72283), NaN for NaN.
#[must_use]
pub fn exp(x: f32) -> f32 {
    if x < LOWEST {
        return 0.0;
    }
    if x.is_nan() || x >= OVERFLOW {
        return x + f32::INFINITY;
    }
    let shifted = x.mul_add(LOG2_E, MAGIC);
    let n = shifted - MAGIC;
    let r = n.mul_add(-LN2_LOW, n.mul_add(-LN2_HIGH, x));
    let e = POLYNOMIAL[1..].iter().fold(POLYNOMIAL[0], |e, &c| e.mul_add(r, c));
    f32::from_bits(e.to_bits().wrapping_add(shifted.to_bits() << 23))
}

/// `1 / (1 + exp(-x))`.
#[must_use]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// `x / (1 + exp(-x))`: not defined by way of [`sigmoid`], which would round once more.
#[must_use]
pub fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

#[inline(always)]
pub(crate) fn exp_lanes<S: Simd>(s: S, x: S::F) -> S::F {
    let magic = s.splat(MAGIC);
    let shifted = s.fma(x, s.splat(LOG2_E), magic);
    let n = s.sub(shifted, magic);
    let r = s.fma(n, s.splat(-LN2_LOW), s.fma(n, s.splat(-LN2_HIGH), x));
    let mut e = s.splat(POLYNOMIAL[0]);
    for c in &POLYNOMIAL[1..] {
        e = s.fma(e, r, s.splat(*c));
    }
    let e = s.add_exponent(e, shifted);
    let e = s.if_less(x, s.splat(OVERFLOW), e, s.add(x, s.splat(f32::INFINITY)));
    s.if_less(x, s.splat(LOWEST), s.splat(0.0), e)
}

/// `1 + exp(-x)`.
#[inline(always)]
fn one_plus_exp_of_minus<S: Simd>(s: S, x: S::F) -> S::F {
    // 0 - x and -x differ in the sign of a zero only, whose exp is 1 either way.
    s.add(s.splat(1.0), exp_lanes(s, s.sub(s.splat(0.0), x)))
}

/// A function of one number, in both ways.
trait Function: Copy {
    fn scalar(self, x: f32) -> f32;
    fn lanes<S: Simd>(self, s: S, x: S::F) -> S::F;
}

#[derive(Clone, Copy)]
struct Exp;

impl Function for Exp {
    fn scalar(self, x: f32) -> f32 {
        exp(x)
    }

    #[inline(always)]
    fn lanes<S: Simd>(self, s: S, x: S::F) -> S::F {
        exp_lanes(s, x)
    }
}

#[derive(Clone, Copy)]
struct Sigmoid;

impl Function for Sigmoid {
    fn scalar(self, x: f32) -> f32 {
        sigmoid(x)
    }

    #[inline(always)]
    fn lanes<S: Simd>(self, s: S, x: S::F) -> S::F {
        s.div(s.splat(1.0), one_plus_exp_of_minus(s, x))
    }
}

#[derive(Clone, Copy)]
struct Silu;

impl Function for Silu {
    fn scalar(self, x: f32) -> f32 {
        silu(x)
    }

    #[inline(always)]
    fn lanes<S: Simd>(self, s: S, x: S::F) -> S::F {
        s.div(x, one_plus_exp_of_minus(s, x))
    }
}

/// Replaces every element by a function of it.
struct Map<'a, F> {
    x: &'a mut [f32],
    function: F,
}

impl<F: Function> Op for Map<'_, F> {
    type Out = ();

    fn scalar(self) {
        self.x.iter_mut().for_each(|x| *x = self.function.scalar(*x));
    }

    #[inline(always)]
    fn vector<S: Simd>(self, s: S) {
        let (whole, tail) = self.x.as_chunks_mut::<LANES>();
        for x in whole {
            s.store(self.function.lanes(s, s.load(x)), x);
        }
        if !tail.is_empty() {
            s.store_part(self.function.lanes(s, s.load_part(tail, 0.0)), tail);
        }
    }
}

/// A function of gate and up, in both ways.
trait Glu: Copy {
    fn scalar(self, gate: f32, up: f32) -> f32;
    fn lanes<S: Simd>(self, s: S, gate: S::F, up: S::F) -> S::F;
}

#[derive(Clone, Copy)]
struct Plain;

impl Glu for Plain {
    fn scalar(self, gate: f32, up: f32) -> f32 {
        silu(gate) * up
    }

    #[inline(always)]
    fn lanes<S: Simd>(self, s: S, gate: S::F, up: S::F) -> S::F {
        s.mul(Silu.lanes(s, gate), up)
    }
}

#[derive(Clone, Copy)]
struct Clamped {
    alpha: f32,
    limit: f32,
}

impl Glu for Clamped {
    fn scalar(self, gate: f32, up: f32) -> f32 {
        let Self { alpha, limit } = self;
        let gate = if limit < gate { limit } else { gate };
        let up = if limit < up { limit } else { up };
        let up = if up < -limit { -limit } else { up };
        gate / (1.0 + exp(-(alpha * gate))) * (up + 1.0)
    }

    #[inline(always)]
    fn lanes<S: Simd>(self, s: S, gate: S::F, up: S::F) -> S::F {
        let (high, low) = (s.splat(self.limit), s.splat(-self.limit));
        let gate = s.if_less(high, gate, high, gate);
        let up = s.if_less(high, up, high, up);
        let up = s.if_less(up, low, low, up);
        let steep = s.mul(s.splat(self.alpha), gate);
        s.mul(s.div(gate, one_plus_exp_of_minus(s, steep)), s.add(up, s.splat(1.0)))
    }
}

struct Gated<'a, F> {
    gate: &'a [f32],
    up: &'a [f32],
    out: &'a mut [f32],
    function: F,
}

impl<F: Glu> Op for Gated<'_, F> {
    type Out = ();

    fn scalar(self) {
        for ((out, &gate), &up) in self.out.iter_mut().zip(self.gate).zip(self.up) {
            *out = self.function.scalar(gate, up);
        }
    }

    #[inline(always)]
    fn vector<S: Simd>(self, s: S) {
        let (gates, gate_tail) = self.gate.as_chunks::<LANES>();
        let (ups, up_tail) = self.up.as_chunks::<LANES>();
        let (outs, out_tail) = self.out.as_chunks_mut::<LANES>();
        for ((out, gate), up) in outs.iter_mut().zip(gates).zip(ups) {
            s.store(self.function.lanes(s, s.load(gate), s.load(up)), out);
        }
        if !out_tail.is_empty() {
            let (gate, up) = (s.load_part(gate_tail, 0.0), s.load_part(up_tail, 0.0));
            s.store_part(self.function.lanes(s, gate, up), out_tail);
        }
    }
}

/// Softmax over a row and perhaps one more logit that has no place in it.
pub(crate) struct Softmax<'a> {
    pub(crate) x: &'a mut [f32],
    pub(crate) sink: Option<f32>,
}

impl Op for Softmax<'_> {
    type Out = ();

    fn scalar(self) {
        let start = self.sink.unwrap_or(f32::NEG_INFINITY);
        let max = self.x.iter().fold(start, |max, &x| if x > max { x } else { max });
        let mut lanes = [0.0f32; LANES];
        for (i, x) in self.x.iter_mut().enumerate() {
            *x = exp(*x - max);
            lanes[i % LANES] += *x;
        }
        let sum = join(lanes) + self.sink.map_or(0.0, |sink| exp(sink - max));
        self.x.iter_mut().for_each(|x| *x /= sum);
    }

    #[inline(always)]
    fn vector<S: Simd>(self, s: S) {
        softmax_lanes(s, self.x, self.sink);
    }
}

#[inline(always)]
pub(crate) fn softmax_lanes<S: Simd>(s: S, x: &mut [f32], sink: Option<f32>) {
    let max = max_lanes(s, x, sink.unwrap_or(f32::NEG_INFINITY));
    let maxes = s.splat(max);
    let mut lanes = s.splat(0.0);
    let (whole, tail) = x.as_chunks_mut::<LANES>();
    for x in whole.iter_mut() {
        let e = exp_lanes(s, s.sub(s.load(x), maxes));
        s.store(e, x);
        lanes = s.add(lanes, e);
    }
    if !tail.is_empty() {
        s.store_part(exp_lanes(s, s.sub(s.load_part(tail, 0.0), maxes)), tail);
        // No lane holds -0, so adding +0 leaves the lanes past the end alone.
        lanes = s.add(lanes, s.load_part(tail, 0.0));
    }
    let sum = s.sum(lanes) + sink.map_or(0.0, |sink| exp(sink - max));
    let sums = s.splat(sum);
    for x in whole {
        s.store(s.div(s.load(x), sums), x);
    }
    if !tail.is_empty() {
        s.store_part(s.div(s.load_part(tail, 0.0), sums), tail);
    }
}

/// The largest of `start` and the elements of `x`, in which a NaN counts for nothing.
#[inline(always)]
pub(crate) fn max_lanes<S: Simd>(s: S, x: &[f32], start: f32) -> f32 {
    let mut lanes = s.splat(start);
    let (whole, tail) = x.as_chunks::<LANES>();
    for x in whole {
        lanes = s.max(s.load(x), lanes);
    }
    let mut maxes = [start; LANES];
    s.store(lanes, &mut maxes);
    maxes.iter().chain(tail).fold(start, |max, &x| if x > max { x } else { max })
}

impl Kernels {
    /// Replaces every element by its [`exp`].
    pub fn exp_in_place(self, x: &mut [f32]) {
        self.run(Map { x, function: Exp });
    }

    /// Replaces every element by its [`sigmoid`].
    pub fn sigmoid_in_place(self, x: &mut [f32]) {
        self.run(Map { x, function: Sigmoid });
    }

    /// Replaces every element by its [`silu`].
    pub fn silu_in_place(self, x: &mut [f32]) {
        self.run(Map { x, function: Silu });
    }

    /// `out[i] = silu(gate[i]) * up[i]`: the two halves of a gated FFN.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn swiglu(self, gate: &[f32], up: &[f32], out: &mut [f32]) {
        self.glu(Activation::SwiGlu, gate, up, out);
    }

    /// What stands between an expert's matrices: [`Kernels::swiglu`], or clamped (gpt-oss): with
    /// `g = min(gate, limit)` and u = up from `-limit` to `limit`, `out = g / (1 + exp(-(alpha * g))) * (u + 1)`,
    /// each step rounded. A NaN stays one.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn glu(self, activation: Activation, gate: &[f32], up: &[f32], out: &mut [f32]) {
        assert!(gate.len() == out.len() && up.len() == out.len(), "gate, up and out of one length");
        match activation {
            Activation::SwiGlu => self.run(Gated { gate, up, out, function: Plain }),
            Activation::ClampedSwiglu { alpha, limit } => {
                self.run(Gated { gate, up, out, function: Clamped { alpha, limit } });
            }
        }
    }

    /// Replaces `x` by its softmax: `e[i] = exp(x[i] - max)`, then `e[i] / sum`.
    ///
    /// The sum is over sixteen lanes as in [`Kernels::dot`]: `e[i]` is added to lane i mod 16.
    /// All results are NaN if an element is NaN or +infinity, or if all are -infinity.
    pub fn softmax_in_place(self, x: &mut [f32]) {
        self.run(Softmax { x, sink: None });
    }
}
