//! How far two results may be apart, by name, each with its reason.

/// Router logits of the k-th and the next expert nearer than this may change places: sums of some hundred
/// `f32` terms of order one differ by a few 1e-6 between two orders of summation.
pub const ROUTER_MARGIN: f64 = 1e-5;

/// Logits of the engine's `f32` path with float weights against a golden: an order of summation costs a few
/// 1e-6 per layer on logits of order ten, so this passes every order. Of a dozen slips of the spec it passes
/// one (an epsilon of 1e-4 for 1e-6: 7e-4 on the fixture, see `tests/goldens.rs`), so such constants need
/// [`REFERENCE_LOGITS`] or a test of their own.
pub const LOGITS: f64 = 2e-3;

/// A greedy token must be the golden's where its logit leads by more than this: each of two logits may be
/// off by [`LOGITS`], but a right engine's are off by far less, so the one tolerance serves for the pair.
pub const GREEDY_MARGIN: f64 = 2e-3;

/// Logits of the `f64` reference against a golden in `f32`: what is left is the golden's own rounding, at
/// most 4e-5 on the fixtures (a tied head with logits of order ten and YaRN; 1e-5 on the others).
pub const REFERENCE_LOGITS: f64 = 1e-4;

/// Hidden states of the `f64` reference against a golden in `f32`, as a fraction of the larger of one and
/// the golden's value: the residual stream of a random model grows, its rounding with it.
pub const REFERENCE_HIDDEN: f64 = 1e-4;

/// Router logits of the `f64` reference against a golden in `f32`: one matrix product after a norm, so as
/// exact as the hidden states that it reads.
pub const REFERENCE_ROUTER: f64 = 1e-4;

/// A weight decoded in `f32` against its formula in `f64`, as a fraction of the group's scale: a division
/// and a product (or a fused multiply-add) round once each, by 6e-8 at most (7e-8 seen in all).
pub const DEQUANTISE: f64 = 2e-7;

/// Logits of a reference on codes decoded in `f32` against one on the same codes decoded in `f64`, and the
/// router margin above which both must choose the same experts: [`DEQUANTISE`] on
/// every weight, at random, averages out in the products to far less than this (7e-7 on the fixture).
pub const SAME_CODES: f64 = 2e-5;
