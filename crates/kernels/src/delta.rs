//! Gated delta nets (Yang, Kautz, Hatamizadeh 2024): a linear attention that remembers a state of fixed size.
//!
//! Queries, keys and values of a token go through a causal convolution over the last positions and SiLU; queries and
//! keys are divided by their length. A value head has a state S, `[value_dim, key_dim]`, from which key k finds the value
//! `S k`: it decays, takes the difference between the token's value and what it finds for the token's key, and is asked
//! for the query,
//!
//! ```text
//! S = decay S;   S = S + (beta (v - S k)) k^T;   out = S q
//! ```
//!
//! one token after the other: there is no other form, so a prompt's bits are those of its tokens one by one. The rows
//! of a state do not depend on each other, so a few of them go through all tokens of a segment while they are in the
//! first cache. Reference: `torch_recurrent_gated_delta_rule` of `transformers`, whose norms' epsilon is [`EPS`].

// Rows that go side by side are indexed.
#![allow(clippy::needless_range_loop)]

use std::ops::Range;

use crate::exp::{exp, sigmoid};
use crate::output::Shared;
use crate::simd::{LANES, Op, Simd, join};
use crate::{Kernels, Pool};

/// Added to the squares of a query or key before the root.
const EPS: f32 = 1e-6;
/// Tokens whose queries, keys and values lie ready at once: what a second-level cache holds of a head.
const SEGMENT: usize = 64;
/// Rows of a state that go through a segment together: what [`Simd::sum_each`] sums at once.
const ROWS: usize = 4;

/// The shape of a layer's heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaShape {
    /// Heads of queries and keys.
    pub n_key_heads: usize,
    /// Heads of values; so many in a row share a key head.
    pub n_value_heads: usize,
    /// Width of a query or key, a multiple of 16.
    pub key_dim: usize,
    /// Width of a value, a multiple of 4.
    pub value_dim: usize,
    /// Positions that the convolution sees.
    pub conv_width: usize,
}

impl DeltaShape {
    /// Value heads of a key head.
    const fn per_key(&self) -> usize {
        self.n_value_heads / self.n_key_heads
    }

    /// Channels of a key head: its query, its key, and the values of its value heads.
    const fn channels(&self) -> usize {
        2 * self.key_dim + self.per_key() * self.value_dim
    }

    /// What the convolution remembers of a key head's channels.
    const fn history(&self) -> usize {
        (self.conv_width - 1) * self.channels()
    }

    /// f32 of a key head's state: the last inputs of its channels, the oldest position first, and then `S` of each of its
    /// value heads.
    const fn unit(&self) -> usize {
        self.history() + self.per_key() * self.value_dim * self.key_dim
    }

    /// f32 of the state of a layer and sequence.
    #[must_use]
    pub const fn state_len(&self) -> usize {
        self.n_key_heads * self.unit()
    }
}

/// A layer's weights.
#[derive(Clone, Debug)]
pub struct DeltaWeights {
    /// By key head: `[conv_width, channels]`.
    conv: Vec<f32>,
    /// `[n_value_heads]`: rates of decay.
    rate: Vec<f32>,
    /// `[n_value_heads]`.
    bias: Vec<f32>,
}

impl DeltaWeights {
    /// Arranges weights as they are published: `conv` is `[queries, keys and values of all heads, conv_width]`,
    /// `rate_log` and `bias` are `[n_value_heads]`.
    ///
    /// # Panics
    /// If a length does not match.
    #[must_use]
    pub fn new(shape: &DeltaShape, conv: &[f32], rate_log: &[f32], bias: &[f32]) -> Self {
        let DeltaShape { n_key_heads, n_value_heads, key_dim, value_dim, conv_width } = *shape;
        let (keys, values) = (n_key_heads * key_dim, n_value_heads * value_dim);
        assert_eq!(conv.len(), (2 * keys + values) * conv_width, "a row of the convolution per channel");
        assert!(rate_log.len() == n_value_heads && bias.len() == n_value_heads, "a rate and bias per head");
        let wide = shape.per_key() * value_dim;
        let mut arranged = Vec::with_capacity(conv.len());
        for head in 0..n_key_heads {
            let own = [
                head * key_dim..(head + 1) * key_dim,
                keys + head * key_dim..keys + (head + 1) * key_dim,
                2 * keys + head * wide..2 * keys + (head + 1) * wide,
            ];
            for tap in 0..conv_width {
                let channels = own.iter().cloned().flatten();
                arranged.extend(channels.map(|channel| conv[channel * conv_width + tap]));
            }
        }
        let rate = rate_log.iter().map(|&log| exp(log)).collect();
        Self { conv: arranged, rate, bias: bias.to_vec() }
    }

    /// By key head: `[conv_width, channels]`, as a device takes them.
    #[must_use]
    pub fn taps(&self) -> &[f32] {
        &self.conv
    }

    /// `[2 * n_value_heads]`: rates of decay, and what is added before softplus.
    #[must_use]
    pub fn rates(&self) -> Vec<f32> {
        [&self.rate[..], &self.bias].concat()
    }

    /// f32 of it.
    #[must_use]
    pub const fn floats(shape: &DeltaShape) -> usize {
        let channels = 2 * shape.n_key_heads * shape.key_dim + shape.n_value_heads * shape.value_dim;
        channels * shape.conv_width + 2 * shape.n_value_heads
    }
}

/// What a layer makes of T tokens before their states are asked: planes `[T, all heads]`.
#[derive(Clone, Copy, Debug)]
pub struct DeltaInput<'a> {
    /// `[T, n_key_heads * key_dim]`.
    pub q: &'a [f32],
    /// `[T, n_key_heads * key_dim]`.
    pub k: &'a [f32],
    /// `[T, n_value_heads * value_dim]`.
    pub v: &'a [f32],
    /// `[T, n_value_heads]`, before the sigmoid.
    pub beta: &'a [f32],
    /// `[T, n_value_heads]`: a head's state is multiplied with `exp(-rate softplus(decay + bias))`.
    pub decay: &'a [f32],
}

/// Tokens in a row of one sequence, and where its state lies in a memory of states.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeltaRun {
    /// The tokens' places in the planes.
    pub rows: Range<usize>,
    /// Where the state before them begins; none before a sequence's first token.
    pub from: Option<usize>,
    /// Where the state after them goes; may be the same.
    pub to: usize,
}

/// A copy of a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaMark {
    /// The token after which it is taken.
    pub row: usize,
    /// Where it goes.
    pub to: usize,
}

/// Working memory of [`delta_net`], reused from call to call.
#[derive(Debug)]
pub struct DeltaScratch {
    floats: Vec<f32>,
}

impl DeltaScratch {
    /// Memory for a shape.
    #[must_use]
    pub fn new(shape: &DeltaShape) -> Self {
        Self { floats: vec![0.0; Self::floats(shape)] }
    }

    /// f32 of it.
    #[must_use]
    pub const fn floats(shape: &DeltaShape) -> usize {
        shape.n_key_heads * Unit::floats(shape)
    }
}

/// Asks and renews the states of all heads for tokens of any sequences: `out` is `[T, n_value_heads * value_dim]`.
///
/// `memory` holds states, [`DeltaShape::state_len`] each at the places that `runs` and `marks` name; what a place
/// held that is written is not looked at, unless it is a run's own `from`. Per token and key head, each step rounded:
/// channels `c = silu(fma(w_t, x_t, ...))` over the taps from the oldest on, from +0; query and key multiplied with
/// `1 / sqrt(dot + EPS)`, and the query then with `1 / sqrt(key_dim)`. Per value head and row s of its state, element by element:
/// `s = decay s`; `d = beta (v - dot(s, k))`; `s = fma(d, k, s)`; `out = dot(s, q)`. Sums are those of
/// [`Kernels::dot`]. Decay is made in f64 of IEEE operations alone. The bits do not depend on threads, on other
/// sequences, or on how tokens are cut into calls.
///
/// # Panics
/// If a shape does not match, a state lies outside of the memory, or places that are written overlap what a later run
/// needs.
pub fn delta_net(
    pool: &Pool,
    kernels: Kernels,
    shape: &DeltaShape,
    weights: &DeltaWeights,
    input: DeltaInput<'_>,
    memory: &mut [f32],
    runs: &[DeltaRun],
    marks: &[DeltaMark],
    scratch: &mut DeltaScratch,
    out: &mut [f32],
) {
    let DeltaShape { n_key_heads, n_value_heads, key_dim, value_dim, conv_width } = *shape;
    assert!(n_key_heads > 0 && n_value_heads.is_multiple_of(n_key_heads) && conv_width > 0, "{shape:?}");
    assert!(key_dim.is_multiple_of(LANES) && value_dim.is_multiple_of(ROWS), "{shape:?}");
    let tokens = input.beta.len() / n_value_heads;
    let (keys, values) = (n_key_heads * key_dim, n_value_heads * value_dim);
    assert!(input.q.len() == tokens * keys && input.k.len() == tokens * keys, "queries and keys of {tokens}");
    assert!(input.v.len() == tokens * values && out.len() == tokens * values, "values of {tokens}");
    assert!(input.decay.len() == tokens * n_value_heads, "a decay for each of {tokens}");
    let len = shape.state_len();
    let fits = |at: usize| at + len <= memory.len();
    for (i, run) in runs.iter().enumerate() {
        assert!(run.rows.end <= tokens && fits(run.to) && run.from.is_none_or(fits), "{run:?} of {tokens}");
        let apart = |a: usize, b: usize| a.abs_diff(b) >= len;
        let later = &runs[i + 1..];
        assert!(run.from.is_none_or(|from| from == run.to || apart(from, run.to)), "{run:?}");
        assert!(later.iter().all(|l| apart(l.to, run.to) && l.from.is_none_or(|f| apart(f, run.to))));
        assert!(
            later.iter().all(|l| run.from.is_none_or(|from| apart(from, l.to))),
            "{run:?} before {later:?}"
        );
        assert!(marks.iter().all(|m| fits(m.to) && apart(m.to, run.to)), "{marks:?} in {run:?}");
        assert!(marks.iter().all(|m| run.from.is_none_or(|from| apart(m.to, from))), "{marks:?} in {run:?}");
    }
    for (i, mark) in marks.iter().enumerate() {
        assert!(marks[i + 1..].iter().all(|other| other.to.abs_diff(mark.to) >= len), "{marks:?}");
    }
    let (memory, out) = (Shared::new(memory), Shared::new(out));
    let (room, part) = (Shared::new(&mut scratch.floats), Unit::floats(shape));
    let wide = shape.per_key() * value_dim;
    pool.run(n_key_heads, &|head| {
        // SAFETY: each task has its own head's part.
        let room = unsafe { room.part(head * part..(head + 1) * part) };
        // SAFETY: each task has its own head's columns.
        let mut out = unsafe { out.shard(0, tokens, values, head * wide..(head + 1) * wide) };
        let mut unit = Unit::new(shape, weights, head, room);
        let own = |at: usize| at + head * shape.unit()..at + (head + 1) * shape.unit();
        for run in runs {
            // SAFETY: each task has its own head's part of every state, and states that one call writes lie apart.
            let state = unsafe { memory.part(own(run.to)) };
            let mut from = match run.from {
                Some(at) if at != run.to => {
                    // SAFETY: as above; it is only read.
                    let before: &[f32] = unsafe { memory.part(own(at)) };
                    Some(before)
                }
                Some(_) => None,
                None => {
                    state.fill(0.0);
                    None
                }
            };
            let mut row = run.rows.start;
            while row < run.rows.end {
                let mark =
                    marks.iter().filter(|m| (row..run.rows.end).contains(&m.row)).min_by_key(|m| m.row);
                let end = mark.map_or(run.rows.end, |mark| mark.row + 1).min(row + SEGMENT);
                unit.segment(kernels, input, row..end, from.take(), state);
                for (token, made) in (row..end).zip(unit.made.chunks_exact(wide)) {
                    out.store(token, head * wide, made);
                }
                for mark in marks.iter().filter(|mark| mark.row + 1 == end) {
                    // SAFETY: as above: no run's state is where a mark goes.
                    unsafe { memory.part(own(mark.to)) }.copy_from_slice(state);
                }
                row = end;
            }
        }
    });
}

/// One key head's work.
struct Unit<'a> {
    shape: DeltaShape,
    head: usize,
    conv: &'a [f32],
    rate: &'a [f32],
    bias: &'a [f32],
    /// `[conv_width - 1 + SEGMENT, channels]`: inputs, those before the segment first.
    window: &'a mut [f32],
    /// `[SEGMENT, channels]`: what the convolution made of them.
    mixed: &'a mut [f32],
    /// `[SEGMENT, value heads]`.
    decay: &'a mut [f32],
    beta: &'a mut [f32],
    /// `[SEGMENT, value heads * value_dim]`.
    made: &'a mut [f32],
}

impl<'a> Unit<'a> {
    const fn floats(shape: &DeltaShape) -> usize {
        let (channels, per_key) = (shape.channels(), shape.per_key());
        shape.history() + SEGMENT * (2 * channels + 2 * per_key + per_key * shape.value_dim)
    }

    fn new(shape: &DeltaShape, weights: &'a DeltaWeights, head: usize, room: &'a mut [f32]) -> Self {
        let (channels, per_key) = (shape.channels(), shape.per_key());
        let taps = shape.conv_width * channels;
        let (window, room) = room.split_at_mut(shape.history() + SEGMENT * channels);
        let (mixed, room) = room.split_at_mut(SEGMENT * channels);
        let (decay, room) = room.split_at_mut(SEGMENT * per_key);
        let (beta, made) = room.split_at_mut(SEGMENT * per_key);
        Self {
            shape: *shape,
            head,
            conv: &weights.conv[head * taps..(head + 1) * taps],
            rate: &weights.rate[head * per_key..(head + 1) * per_key],
            bias: &weights.bias[head * per_key..(head + 1) * per_key],
            window,
            mixed,
            decay,
            beta,
            made,
        }
    }

    /// Brings `state` over the tokens `rows`, a segment at most; `from` is what it was before them if that lies elsewhere.
    fn segment(
        &mut self,
        kernels: Kernels,
        input: DeltaInput<'_>,
        rows: Range<usize>,
        from: Option<&[f32]>,
        state: &mut [f32],
    ) {
        let Self { shape, head, conv, window, mixed, decay, beta, made, .. } = self;
        let (head, channels, history, per_key) = (*head, shape.channels(), shape.history(), shape.per_key());
        let DeltaShape { n_key_heads, n_value_heads, key_dim, value_dim, .. } = *shape;
        let (n, wide) = (rows.len(), per_key * value_dim);
        window[..history].copy_from_slice(&from.unwrap_or(state)[..history]);
        for (row, to) in rows.clone().zip(window[history..].chunks_exact_mut(channels)) {
            let (q, rest) = to.split_at_mut(key_dim);
            let (k, v) = rest.split_at_mut(key_dim);
            let key = (row * n_key_heads + head) * key_dim;
            q.copy_from_slice(&input.q[key..key + key_dim]);
            k.copy_from_slice(&input.k[key..key + key_dim]);
            v.copy_from_slice(&input.v[row * n_value_heads * value_dim + head * wide..][..wide]);
        }
        let inputs = &window[..history + n * channels];
        kernels.run(Conv { inputs, weights: conv, channels, out: &mut mixed[..n * channels] });
        state[..history].copy_from_slice(&inputs[n * channels..]);
        kernels.silu_in_place(&mut mixed[..n * channels]);
        let scale = 1.0 / (key_dim as f32).sqrt();
        for (i, row) in rows.enumerate() {
            let (q, rest) = mixed[i * channels..].split_at_mut(key_dim);
            let k = &mut rest[..key_dim];
            for x in [&mut *q, k] {
                let inverse = 1.0 / (kernels.dot(x, x) + EPS).sqrt();
                kernels.scale_in_place(x, inverse);
            }
            kernels.scale_in_place(q, scale);
            let first = row * n_value_heads + head * per_key;
            for value in 0..per_key {
                let made_of = input.decay[first + value] + self.bias[value];
                decay[i * per_key + value] = exp(-(self.rate[value] * softplus(made_of)));
                beta[i * per_key + value] = sigmoid(input.beta[first + value]);
            }
        }
        let size = value_dim * key_dim;
        for value in 0..per_key {
            let at = history + value * size..history + (value + 1) * size;
            kernels.run(Rows {
                from: from.map(|from| &from[at.clone()]),
                state: &mut state[at],
                tokens: Tokens {
                    mixed: &mixed[..n * channels],
                    channels,
                    key_dim,
                    value: 2 * key_dim + value * value_dim,
                    decay: &decay[value..],
                    beta: &beta[value..],
                    per_key,
                },
                out: &mut made[value * value_dim..],
                stride: wide,
            });
        }
    }
}

/// `ln(1 + e^x)` to within a few units of f32's last place above 2^-24 and absolutely below, of f64 operations that every
/// machine rounds alike: the same bits everywhere. Above 20 it is x, as in the reference.
fn softplus(x: f32) -> f32 {
    if x.is_nan() || x > 20.0 {
        return x;
    }
    // 1 + e^x = 2^n m, m from 1 to 2 or, beyond the root of 2, from half the root on.
    let y = 1.0 + f64::from(exp(x));
    let bits = y.to_bits();
    let mut n = (bits >> 52) as i64 - 1023;
    let mut m = f64::from_bits((bits & ((1 << 52) - 1)) | (1023 << 52));
    if m > std::f64::consts::SQRT_2 {
        (n, m) = (n + 1, m / 2.0);
    }
    // ln m = 2 artanh(s), |s| below 0.172: the series' ninth term is below 1e-14.
    let s = (m - 1.0) / (m + 1.0);
    let square = s * s;
    let series = (0..9).rev().fold(0.0, |sum, i| sum * square + 1.0 / f64::from(2 * i + 1));
    (n as f64 * std::f64::consts::LN_2 + 2.0 * s * series) as f32
}

/// The convolution of a segment, without SiLU.
struct Conv<'a> {
    /// `[conv_width - 1 + tokens, channels]`.
    inputs: &'a [f32],
    /// `[conv_width, channels]`.
    weights: &'a [f32],
    channels: usize,
    /// `[tokens, channels]`.
    out: &'a mut [f32],
}

impl Conv<'_> {
    /// Elementwise over the channels, so one plain loop is both the definition and its kernel.
    #[inline(always)]
    fn eval(self) {
        for (t, out) in self.out.chunks_exact_mut(self.channels).enumerate() {
            out.fill(0.0);
            let inputs = self.inputs[t * self.channels..].chunks_exact(self.channels);
            for (weights, inputs) in self.weights.chunks_exact(self.channels).zip(inputs) {
                for ((out, &w), &x) in out.iter_mut().zip(weights).zip(inputs) {
                    *out = w.mul_add(x, *out);
                }
            }
        }
    }
}

impl Op for Conv<'_> {
    type Out = ();

    fn scalar(self) {
        self.eval();
    }

    #[inline(always)]
    fn vector<S: Simd>(self, _: S) {
        self.eval();
    }
}

/// Tokens as a value head sees them.
#[derive(Clone, Copy)]
struct Tokens<'a> {
    /// `[T, channels]`: query, key, values.
    mixed: &'a [f32],
    channels: usize,
    key_dim: usize,
    /// Where the head's value begins among the channels.
    value: usize,
    /// Of token t the one at `t * per_key`.
    decay: &'a [f32],
    beta: &'a [f32],
    per_key: usize,
}

impl<'a> Tokens<'a> {
    fn count(self) -> usize {
        self.mixed.len() / self.channels
    }

    #[inline(always)]
    fn of(self, t: usize) -> (&'a [f32], &'a [f32], &'a [f32], f32, f32) {
        let row = &self.mixed[t * self.channels..(t + 1) * self.channels];
        let (q, rest) = row.split_at(self.key_dim);
        (
            q,
            &rest[..self.key_dim],
            &row[self.value..],
            self.decay[t * self.per_key],
            self.beta[t * self.per_key],
        )
    }
}

/// The states of a value head, over all tokens.
struct Rows<'a> {
    /// What it was, if that is not in `state`.
    from: Option<&'a [f32]>,
    /// `[value_dim, key_dim]`.
    state: &'a mut [f32],
    tokens: Tokens<'a>,
    /// Of token t, `value_dim` from `t * stride` on.
    out: &'a mut [f32],
    stride: usize,
}

impl Op for Rows<'_> {
    type Out = ();

    fn scalar(self) {
        let Self { from, state, tokens, out, stride } = self;
        if let Some(from) = from {
            state.copy_from_slice(from);
        }
        for (r, row) in state.chunks_exact_mut(tokens.key_dim).enumerate() {
            for t in 0..tokens.count() {
                let (q, k, v, decay, beta) = tokens.of(t);
                let mut lanes = [0.0f32; LANES];
                for (i, (s, &k)) in row.iter_mut().zip(k).enumerate() {
                    *s *= decay;
                    lanes[i % LANES] = s.mul_add(k, lanes[i % LANES]);
                }
                let difference = beta * (v[r] - join(lanes));
                let mut lanes = [0.0f32; LANES];
                for (i, (s, (&k, &q))) in row.iter_mut().zip(k.iter().zip(q)).enumerate() {
                    *s = difference.mul_add(k, *s);
                    lanes[i % LANES] = s.mul_add(q, lanes[i % LANES]);
                }
                out[t * stride + r] = join(lanes);
            }
        }
    }

    #[inline(always)]
    fn vector<S: Simd>(self, s: S) {
        let Self { from, state, tokens, out, stride } = self;
        let block = ROWS * tokens.key_dim;
        for (b, rows) in state.chunks_exact_mut(block).enumerate() {
            let mut before = from.map(|from| &from[b * block..(b + 1) * block]);
            for t in 0..tokens.count() {
                step(s, before.take(), rows, tokens, t, b, &mut out[t * stride + b * ROWS..]);
            }
        }
    }
}

/// A token's step of four rows, out of another place if there is one.
#[inline(always)]
fn step<S: Simd>(
    s: S,
    before: Option<&[f32]>,
    rows: &mut [f32],
    tokens: Tokens<'_>,
    t: usize,
    b: usize,
    out: &mut [f32],
) {
    let (q, k, v, decay, beta) = tokens.of(t);
    let width = tokens.key_dim;
    let decays = s.splat(decay);
    let keys = k.as_chunks::<LANES>().0;
    let mut found = [s.splat(0.0); ROWS];
    for (c, k) in keys.iter().enumerate() {
        let k = s.load(k);
        for r in 0..ROWS {
            let old = lanes(s, before.unwrap_or(rows), r * width + c * LANES);
            found[r] = s.fma(s.mul(old, decays), k, found[r]);
        }
    }
    let differences = differences(s.sum_each(found), &v[b * ROWS..], beta);
    let mut made = [s.splat(0.0); ROWS];
    for (c, (k, q)) in keys.iter().zip(q.as_chunks::<LANES>().0).enumerate() {
        let (k, q) = (s.load(k), s.load(q));
        for r in 0..ROWS {
            let at = r * width + c * LANES;
            let old = lanes(s, before.unwrap_or(rows), at);
            let new = s.fma(s.splat(differences[r]), k, s.mul(old, decays));
            store(s, new, rows, at);
            made[r] = s.fma(new, q, made[r]);
        }
    }
    out[..ROWS].copy_from_slice(&s.sum_each(made));
}

/// What four rows take of their values, by what they found.
#[inline(always)]
fn differences(found: [f32; ROWS], v: &[f32], beta: f32) -> [f32; ROWS] {
    let mut out = [0.0; ROWS];
    for r in 0..ROWS {
        out[r] = beta * (v[r] - found[r]);
    }
    out
}

/// Sixteen elements from `at` on.
#[inline(always)]
fn lanes<S: Simd>(s: S, from: &[f32], at: usize) -> S::F {
    let part = &from[at..at + LANES];
    // SAFETY: sixteen f32 are 64 readable bytes.
    unsafe { s.load_f32(part.as_ptr().cast()) }
}

#[inline(always)]
fn store<S: Simd>(s: S, v: S::F, to: &mut [f32], at: usize) {
    if let Some(part) = to[at..].first_chunk_mut::<LANES>() {
        s.store(v, part);
    }
}

#[cfg(test)]
mod tests;
