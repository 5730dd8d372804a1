//! The experts of a layer: `down(silu(gate x) * (up x))`, or what the family has instead, for every (expert,
//! token) pair of a call.
//!
//! All experts of a call share two forks, whatever their number, so that one expert with one token still
//! uses every thread: one for gate, up, SwiGLU and the quantising of the hidden values, by rows of gate and
//! up that are whole groups of down's columns; one for down, by its rows. If an expert serves only some of
//! the tokens, a fork before copies its tokens together.

use crate::activations::{Planes, Run, room};
use crate::matmul::{Operand, TASK_BYTES, TASKS_PER_THREAD, multiply};
use crate::output::Shared;
use crate::{Input, Kernels, Matrix, Pool};

use smoe_format::spec::Activation;
use smoe_format::tile::ROWS;

/// Bytes of gathered tokens from which a fork pays.
const FORK_BYTES: usize = 1 << 16;
/// Hidden values that the activation takes at once, on the stack.
const ACTIVATED: usize = 256;

/// One expert and the tokens that it serves.
#[derive(Clone, Copy, Debug)]
pub struct ExpertCall<'a> {
    /// `[d_ff, d_model]`.
    pub gate: Matrix<'a>,
    /// `[d_ff, d_model]`.
    pub up: Matrix<'a>,
    /// `[d_model, d_ff]`.
    pub down: Matrix<'a>,
    /// What is added to the products.
    pub bias: Option<ExpertBias<'a>>,
    /// Tokens of the layer's input.
    pub tokens: &'a [u32],
}

/// Biases of an expert.
#[derive(Clone, Copy, Debug)]
pub struct ExpertBias<'a> {
    /// `[d_ff]`.
    pub gate: &'a [f32],
    /// `[d_ff]`.
    pub up: &'a [f32],
    /// `[d_model]`.
    pub down: &'a [f32],
}

/// Working memory of [`expert_ffn`], reused from call to call.
#[derive(Debug)]
pub struct ExpertScratch {
    /// Gathered codes of the experts' tokens: for gate, and for up if its groups differ.
    coded: [Planes; 2],
    /// Gathered `f32` tokens, `[pairs, d_model]`.
    floats: Vec<f32>,
    /// `[pairs, d_ff]`; the activation's result replaces the gate.
    gate: Vec<f32>,
    /// `[pairs, d_ff]`.
    up: Vec<f32>,
    /// The hidden values as codes.
    hidden: Planes,
    /// Pairs before each expert.
    firsts: Vec<usize>,
}

impl ExpertScratch {
    /// Room for calls of up to `pairs` (expert, token) pairs; with `floats`, also for experts of float
    /// weights or exact products. A call beyond that allocates, and the scratch stays larger; so does the
    /// first call whose gate and up have different groups.
    #[must_use]
    pub fn with_capacity(pairs: usize, d_model: usize, d_ff: usize, floats: bool) -> Self {
        let mut scratch = Self {
            coded: [Planes::default(), Planes::default()],
            floats: Vec::new(),
            gate: Vec::new(),
            up: Vec::new(),
            hidden: Planes::default(),
            firsts: Vec::with_capacity(pairs + 1),
        };
        scratch.reserve(pairs, d_model, d_ff, [true, false], floats);
        scratch
    }

    /// What the last call's activation made of every pair, `[pairs, d_ff]`, in the order of its outputs and before any
    /// quantising: the inputs of down.
    ///
    /// # Panics
    /// If no call had as many.
    #[must_use]
    pub fn activated(&self, pairs: usize, d_ff: usize) -> &[f32] {
        &self.gate[..pairs * d_ff]
    }

    fn reserve(&mut self, pairs: usize, d_model: usize, d_ff: usize, coded: [bool; 2], floats: bool) {
        let grow = |plane: &mut Vec<f32>, len: usize| {
            if plane.len() < len {
                plane.resize(len, 0.0);
            }
        };
        grow(&mut self.gate, pairs * d_ff);
        grow(&mut self.up, pairs * d_ff);
        if floats {
            grow(&mut self.floats, pairs * d_model);
        }
        let (codes, cells) = room(d_model);
        for (planes, wanted) in self.coded.iter_mut().zip(coded) {
            if wanted {
                planes.reserve(pairs * codes, pairs * cells);
            }
        }
        let (codes, cells) = room(d_ff);
        self.hidden.reserve(pairs * codes, pairs * cells);
    }
}

/// The tokens `0..n` of a plane whose tokens before are `first`.
fn run(first: usize, tokens: usize, cols: usize, group: usize) -> Run {
    let (codes, cells) = room(cols);
    Run { code: first * codes, cell: first * cells, tokens, cols, group }
}

/// True if an expert serves all tokens in their order, and so needs no copy of them.
fn serves_all(call: &ExpertCall<'_>, input: &Input<'_>) -> bool {
    call.tokens.len() == input.tokens() && call.tokens.iter().enumerate().all(|(i, &t)| t as usize == i)
}

/// Where the gathered input of a matrix lies: 0 and 1 are `coded`, 2 is `floats`.
fn place(call: &ExpertCall<'_>, matrix: &Matrix<'_>, operand: Operand<'_>) -> usize {
    match operand {
        Operand::Float(_) => 2,
        Operand::Coded(_) => usize::from(
            call.gate.tiles().is_none_or(|gate| matrix.tiles().is_some_and(|m| m.group() != gate.group())),
        ),
    }
}

/// Rows of a task if every expert's `rows`, so many bytes, are cut alike, in whole units.
fn rows_per_task(pool: &Pool, experts: usize, rows: usize, bytes: usize, unit: usize) -> usize {
    let parts = (pool.threads() * TASKS_PER_THREAD).div_ceil(experts).max(bytes.div_ceil(TASK_BYTES));
    rows.div_ceil(parts).next_multiple_of(unit).max(unit)
}

/// Copies the tokens of every expert together, as far as it serves only some.
fn gather(
    pool: &Pool,
    experts: &[ExpertCall<'_>],
    input: &Input<'_>,
    scratch: &mut ExpertScratch,
    d_model: usize,
    pairs: usize,
) {
    let ExpertScratch { coded: [gates, ups], floats, firsts, .. } = scratch;
    let (coded, floats, firsts) = ([gates.share(), ups.share()], Shared::new(floats), &*firsts);
    let one = |e: usize| {
        let call = &experts[e];
        if serves_all(call, input) {
            return;
        }
        let mut done = [false; 3];
        for matrix in [&call.gate, &call.up] {
            let operand = input.operand(matrix);
            let place = place(call, matrix, operand);
            if std::mem::replace(&mut done[place], true) {
                continue;
            }
            match operand {
                Operand::Coded(q) => {
                    let run = run(firsts[e], call.tokens.len(), d_model, q.group());
                    // SAFETY: each expert has its own cells, and one task.
                    unsafe { coded[place].gather(run, q, call.tokens) };
                }
                Operand::Float(x) => {
                    for (i, &token) in call.tokens.iter().enumerate() {
                        let at = (firsts[e] + i) * d_model;
                        // SAFETY: each expert has its own rows, and one task.
                        let row = unsafe { floats.part(at..at + d_model) };
                        row.copy_from_slice(&x[token as usize * d_model..][..d_model]);
                    }
                }
            }
        }
    };
    if pairs * d_model < FORK_BYTES {
        (0..experts.len()).for_each(one);
    } else {
        pool.run(experts.len(), &one);
    }
}

/// Computes `down(activation(gate x, up x))` for each expert and each of its tokens, biases added to each product
/// where there are some.
///
/// `input` is the layer's input, `[T, d_model]`, quantised in the groups of the experts' gates and ups
/// (or exact, or with float weights: [`Input`]). `out` is `[pairs, d_model]`, in the order of `experts` and,
/// within one, of its tokens. The bits are those of [`matmul`](crate::matmul()) with gate and with up,
/// [`Kernels::glu`], [`Activations::quantise`](crate::Activations::quantise) in down's groups (unless
/// down is float or the input exact) and [`matmul`](crate::matmul()) with down: they depend neither on
/// threads nor on the other experts and tokens of the call.
///
/// # Panics
/// If the experts' shapes differ, `out` has another length, a token is not of the input, or the input lacks
/// a group size.
pub fn expert_ffn(
    pool: &Pool,
    kernels: Kernels,
    experts: &[ExpertCall<'_>],
    activation: Activation,
    input: &Input<'_>,
    scratch: &mut ExpertScratch,
    out: &mut [f32],
) {
    let Some(first) = experts.first() else {
        assert!(out.is_empty(), "no experts, no output");
        return;
    };
    let (d_ff, d_model) = (first.gate.rows(), first.gate.cols());
    scratch.firsts.clear();
    let mut pairs = 0;
    let mut places = [false; 3];
    // Rows of a task of the first fork: whole blocks of gate and up, whole groups of down.
    let mut unit = ROWS;
    for call in experts {
        assert!(
            (call.gate.rows(), call.gate.cols()) == (d_ff, d_model)
                && (call.up.rows(), call.up.cols()) == (d_ff, d_model)
                && (call.down.rows(), call.down.cols()) == (d_model, d_ff),
            "experts of {d_model} x {d_ff}: {call:?}"
        );
        assert!(
            call.bias.is_none_or(|b| (b.gate.len(), b.up.len(), b.down.len()) == (d_ff, d_ff, d_model)),
            "biases of {d_model} x {d_ff}"
        );
        assert!(call.tokens.iter().all(|&t| (t as usize) < input.tokens()), "tokens of the input");
        scratch.firsts.push(pairs);
        pairs += call.tokens.len();
        unit = unit.max(call.down.tiles().map_or(0, |u| u.group()));
        let gathers = !serves_all(call, input);
        for matrix in [&call.gate, &call.up] {
            places[place(call, matrix, input.operand(matrix))] |= gathers;
        }
    }
    assert_eq!(out.len(), pairs * d_model, "output is [{pairs}, {d_model}]");
    if pairs == 0 || d_model == 0 {
        return;
    }
    scratch.reserve(pairs, d_model, d_ff, [places[0], places[1]], places[2]);
    if places.contains(&true) {
        gather(pool, experts, input, scratch, d_model, pairs);
    }

    let ExpertScratch { coded, floats, gate, up, hidden, firsts } = scratch;
    let (coded, floats, firsts) = (&*coded, &*floats, &*firsts);
    let operand = |e: usize, matrix: &Matrix<'_>| {
        let call = &experts[e];
        let whole = input.operand(matrix);
        if serves_all(call, input) {
            return whole;
        }
        let n = call.tokens.len();
        match whole {
            Operand::Float(_) => Operand::Float(&floats[firsts[e] * d_model..(firsts[e] + n) * d_model]),
            Operand::Coded(q) => {
                let planes = &coded[place(call, matrix, whole)];
                Operand::Coded(planes.view(run(firsts[e], n, d_model, q.group())))
            }
        }
    };
    // The group in which an expert's hidden values are quantised.
    let hidden_group = |e: usize| {
        let tiles = experts[e].down.tiles();
        tiles.filter(|_| !input.is_exact()).map(|tiles| tiles.group())
    };

    let bytes = first.gate.bytes().len() + first.up.bytes().len();
    let rows_each = rows_per_task(pool, experts.len(), d_ff, bytes, unit);
    let parts = d_ff.div_ceil(rows_each);
    {
        let (gates, ups) = (Shared::new(gate), Shared::new(up));
        let hidden = hidden.share();
        pool.run_pieces(experts.len() * parts, &|task, piece| {
            let (e, part) = (task / parts, task % parts);
            let (call, start) = (&experts[e], firsts[e] * d_ff);
            let n = call.tokens.len();
            let rows = piece.of_rows(part * rows_each..d_ff.min((part + 1) * rows_each), unit);
            if rows.is_empty() {
                return;
            }
            // SAFETY: each task has its own expert's own rows of both planes.
            let (mut gate, mut up) = unsafe {
                (gates.shard(start, n, d_ff, rows.clone()), ups.shard(start, n, d_ff, rows.clone()))
            };
            kernels.prefetch(call.up.rows_from(rows.start));
            multiply(kernels, &call.gate, rows.clone(), operand(e, &call.gate), &mut gate);
            if let Some(next) = experts.get((task + 1) / parts) {
                kernels.prefetch(next.gate.rows_from((task + 1) % parts * rows_each));
            }
            multiply(kernels, &call.up, rows.clone(), operand(e, &call.up), &mut up);
            for token in 0..n {
                let (gate, up) = (gate.token(token), up.token(token));
                if let Some(bias) = call.bias {
                    kernels.add_in_place(gate, &bias.gate[rows.clone()]);
                    kernels.add_in_place(up, &bias.up[rows.clone()]);
                }
                for (gate, up) in gate.chunks_mut(ACTIVATED).zip(up.chunks(ACTIVATED)) {
                    let mut product = [0.0; ACTIVATED];
                    let product = &mut product[..gate.len()];
                    kernels.glu(activation, gate, up, product);
                    gate.copy_from_slice(product);
                }
                if let Some(group) = hidden_group(e) {
                    let run = run(firsts[e], n, d_ff, group);
                    // SAFETY: `rows` begin at a whole group, so these groups are this task's alone.
                    unsafe { hidden.quantise(kernels, run, token, rows.start / group, gate) };
                }
            }
        });
    }

    let rows_each = rows_per_task(pool, experts.len(), d_model, first.down.bytes().len(), ROWS);
    let parts = d_model.div_ceil(rows_each);
    let (hidden, floats) = (&*hidden, &*gate);
    let out = Shared::new(out);
    pool.run_pieces(experts.len() * parts, &|task, piece| {
        let (e, part) = (task / parts, task % parts);
        let (call, first, n) = (&experts[e], firsts[e], experts[e].tokens.len());
        let rows = piece.of_rows(part * rows_each..d_model.min((part + 1) * rows_each), ROWS);
        if rows.is_empty() {
            return;
        }
        let x = match hidden_group(e) {
            Some(group) => Operand::Coded(hidden.view(run(first, n, d_ff, group))),
            None => Operand::Float(&floats[first * d_ff..(first + n) * d_ff]),
        };
        // SAFETY: each task has its own expert's own rows.
        let mut out = unsafe { out.shard(first * d_model, n, d_model, rows.clone()) };
        if let Some(next) = experts.get((task + 1) / parts) {
            kernels.prefetch(next.down.rows_from((task + 1) % parts * rows_each));
        }
        multiply(kernels, &call.down, rows.clone(), x, &mut out);
        if let Some(bias) = call.bias {
            (0..n).for_each(|token| kernels.add_in_place(out.token(token), &bias.down[rows.clone()]));
        }
    });
}

#[cfg(test)]
mod tests {
    use smoe_format::{Encoding, Uniform, Zero};

    use super::*;
    use crate::{Activations, Quantised, matmul};

    const MODEL: usize = 200;
    const FF: usize = 300;

    fn values(n: usize, seed: u32) -> Vec<f32> {
        let mut state = seed;
        (0..n)
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 8) as f32 / 8_388_608.0 - 1.0
            })
            .collect()
    }

    fn bits(values: &[f32]) -> Vec<u32> {
        values.iter().map(|v| v.to_bits()).collect()
    }

    fn coded(bits: u8, group: usize, zero: Zero) -> Encoding {
        Encoding::Uniform(Uniform::new(bits, group, zero).expect("valid"))
    }

    struct Expert {
        bytes: [Vec<u8>; 3],
        encodings: [Encoding; 3],
        /// Gate's and up's, and down's, as one.
        bias: Option<Vec<f32>>,
        tokens: Vec<u32>,
    }

    impl Expert {
        fn new(encodings: [Encoding; 3], tokens: &[u32], seed: u32) -> Self {
            let shapes = [(FF, MODEL), (FF, MODEL), (MODEL, FF)];
            let bytes = std::array::from_fn(|i| {
                let (rows, cols) = shapes[i];
                let mut bytes = vec![0; encodings[i].tensor_bytes(rows, cols).expect("small")];
                encodings[i].encode(&values(rows * cols, seed + i as u32), cols, &mut bytes);
                bytes
            });
            let bias = seed.is_multiple_of(2).then(|| values(2 * FF + MODEL, seed + 9));
            Self { bytes, encodings, bias, tokens: tokens.to_vec() }
        }

        fn call(&self) -> ExpertCall<'_> {
            ExpertCall {
                gate: Matrix::new(&self.bytes[0], FF, MODEL, self.encodings[0]),
                up: Matrix::new(&self.bytes[1], FF, MODEL, self.encodings[1]),
                down: Matrix::new(&self.bytes[2], MODEL, FF, self.encodings[2]),
                bias: self.bias.as_ref().map(|bias| {
                    let ((gate, rest), up) = (bias.split_at(FF), &bias[FF..2 * FF]);
                    ExpertBias { gate, up, down: &rest[FF..] }
                }),
                tokens: &self.tokens,
            }
        }
    }

    /// Each pair by itself, with the single verbs.
    fn reference(
        kernels: Kernels,
        activation: Activation,
        experts: &[Expert],
        x: &[f32],
        exact: bool,
    ) -> Vec<f32> {
        let pool = Pool::new(1, false);
        let product = |matrix: &Matrix<'_>, x: &[f32]| {
            let mut out = vec![0.0; matrix.rows()];
            let mut a = Activations::with_capacity(1, x.len());
            if let Some(tiles) = matrix.tiles() {
                a.quantise(kernels, x, 1, x.len(), tiles.group());
            }
            let coded = [a.view()];
            let uses = !exact && matrix.tiles().is_some();
            let input = if uses { Input::new(x, 1, &coded) } else { Input::exact(x, 1) };
            matmul(&pool, kernels, matrix, &input, &mut out);
            out
        };
        let mut out = Vec::new();
        for expert in experts {
            let call = expert.call();
            for &token in call.tokens {
                let x = &x[token as usize * MODEL..][..MODEL];
                let add = |mut product: Vec<f32>, bias: Option<&[f32]>| {
                    product.iter_mut().zip(bias.unwrap_or_default()).for_each(|(x, b)| *x += b);
                    product
                };
                let gate = add(product(&call.gate, x), call.bias.map(|b| b.gate));
                let up = add(product(&call.up, x), call.bias.map(|b| b.up));
                let mut hidden = vec![0.0; FF];
                kernels.glu(activation, &gate, &up, &mut hidden);
                out.extend(add(product(&call.down, &hidden), call.bias.map(|b| b.down)));
            }
        }
        out
    }

    fn check(experts: &[Expert], tokens: usize, exact: bool) {
        let x = values(tokens * MODEL, 99);
        let activations = [Activation::SwiGlu, Activation::ClampedSwiglu { alpha: 1.702, limit: 0.5 }];
        for (kernels, activation) in
            Kernels::available().into_iter().flat_map(|k| activations.map(|a| (k, a)))
        {
            let expected = bits(&reference(kernels, activation, experts, &x, exact));
            let quantised: Vec<Activations> = [32, 64, 128]
                .into_iter()
                .map(|group| {
                    let mut a = Activations::with_capacity(tokens, MODEL);
                    a.quantise(kernels, &x, tokens, MODEL, group);
                    a
                })
                .collect();
            let coded: Vec<Quantised<'_>> = quantised.iter().map(Activations::view).collect();
            let input = if exact { Input::exact(&x, tokens) } else { Input::new(&x, tokens, &coded) };
            let calls: Vec<ExpertCall<'_>> = experts.iter().map(Expert::call).collect();
            let mut scratch = ExpertScratch::with_capacity(2, MODEL, FF, false);
            for threads in [1, 2, 5] {
                let pool = Pool::new(threads, false);
                for _ in 0..2 {
                    let mut out = vec![f32::NAN; expected.len()];
                    expert_ffn(&pool, kernels, &calls, activation, &input, &mut scratch, &mut out);
                    assert_eq!(bits(&out), expected, "{kernels:?} {threads} {exact}");
                }
            }
        }
    }

    #[test]
    fn a_call_is_the_composition_of_single_products() {
        let q4 = coded(4, 64, Zero::Symmetric);
        let mixed = [coded(3, 32, Zero::Affine), coded(8, 64, Zero::Symmetric), coded(6, 128, Zero::Affine)];
        let float = [Encoding::Bf16, Encoding::F32, Encoding::F16];
        for encodings in [[q4; 3], mixed, float, [Encoding::F32, q4, q4], [q4, q4, Encoding::Bf16]] {
            let experts = [
                Expert::new(encodings, &[0, 3, 4, 9, 10], 1),
                Expert::new(encodings, &[], 2),
                Expert::new(encodings, &[10], 3),
                Expert::new(encodings, &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 4),
            ];
            check(&experts, 11, false);
            check(&experts, 11, true);
            check(&experts[..1], 11, false);
        }
    }

    #[test]
    fn one_token_needs_no_gathering_and_experts_may_differ() {
        let encodings = [
            [coded(4, 64, Zero::Symmetric); 3],
            [Encoding::Bf16; 3],
            [coded(2, 128, Zero::Symmetric), coded(4, 32, Zero::Symmetric), coded(8, 16, Zero::Affine)],
        ];
        let experts: Vec<Expert> =
            encodings.into_iter().enumerate().map(|(i, e)| Expert::new(e, &[0], i as u32)).collect();
        check(&experts, 1, false);
        check(&experts, 1, true);
    }
}
