//! Every instruction set against the definition, and the definition against the rule in f64; that runs, segments, marks
//! and places change no bit.

use super::*;

fn values(n: usize, seed: u32) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / 8_388_608.0 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

const SHAPES: [DeltaShape; 3] = [
    DeltaShape { n_key_heads: 3, n_value_heads: 6, key_dim: 32, value_dim: 12, conv_width: 4 },
    DeltaShape { n_key_heads: 2, n_value_heads: 2, key_dim: 16, value_dim: 16, conv_width: 1 },
    DeltaShape { n_key_heads: 1, n_value_heads: 3, key_dim: 128, value_dim: 128, conv_width: 3 },
];

/// Random planes of so many tokens, and weights.
struct Case {
    shape: DeltaShape,
    conv: Vec<f32>,
    rate_log: Vec<f32>,
    bias: Vec<f32>,
    planes: [Vec<f32>; 5],
    tokens: usize,
}

impl Case {
    fn new(shape: DeltaShape, tokens: usize) -> Self {
        let (keys, values_of) = (shape.n_key_heads * shape.key_dim, shape.n_value_heads * shape.value_dim);
        let heads = shape.n_value_heads;
        let widths = [keys, keys, values_of, heads, heads];
        let mut seed = 0;
        Self {
            shape,
            conv: values((2 * keys + values_of) * shape.conv_width, 11),
            rate_log: values(heads, 12).iter().map(|x| 3.0 * x - 1.5).collect(),
            bias: values(heads, 13),
            planes: widths.map(|width| {
                seed += 1;
                values(tokens * width, seed).iter().map(|x| 2.0 * x).collect()
            }),
            tokens,
        }
    }

    /// Planes of some tokens.
    fn input(&self, rows: Range<usize>) -> DeltaInput<'_> {
        let [q, k, v, beta, decay] = self.planes.each_ref().map(|plane| {
            let width = plane.len() / self.tokens;
            &plane[rows.start * width..rows.end * width]
        });
        DeltaInput { q, k, v, beta, decay }
    }

    fn run(
        &self,
        (kernels, threads): (Kernels, usize),
        rows: Range<usize>,
        memory: &mut [f32],
        runs: &[DeltaRun],
        marks: &[DeltaMark],
    ) -> Vec<f32> {
        let weights = DeltaWeights::new(&self.shape, &self.conv, &self.rate_log, &self.bias);
        let mut out = vec![f32::NAN; rows.len() * self.shape.n_value_heads * self.shape.value_dim];
        let (pool, mut scratch) = (Pool::new(threads, false), DeltaScratch::new(&self.shape));
        let input = self.input(rows);
        let shape = &self.shape;
        delta_net(&pool, kernels, shape, &weights, input, memory, runs, marks, &mut scratch, &mut out);
        out
    }

    /// The rule as it is written, in f64.
    fn reference(&self) -> Vec<f64> {
        let DeltaShape { n_key_heads, n_value_heads, key_dim, value_dim, conv_width } = self.shape;
        let (keys, all) = (n_key_heads * key_dim, n_value_heads * value_dim);
        let [q, k, v, beta, decay] = &self.planes;
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        let mixed = |plane: &[f32], width: usize, first: usize, t: usize, c: usize| {
            let sum: f64 = (0..conv_width.min(t + 1))
                .map(|back| {
                    let w = self.conv[(first + c) * conv_width + conv_width - 1 - back];
                    f64::from(w) * f64::from(plane[(t - back) * width + c])
                })
                .sum();
            sum * sigmoid(sum)
        };
        let unit = |plane: &[f32], first: usize, t: usize, head: usize| {
            let x: Vec<f64> =
                (0..key_dim).map(|c| mixed(plane, keys, first, t, head * key_dim + c)).collect();
            let norm = (x.iter().map(|x| x * x).sum::<f64>() + f64::from(EPS)).sqrt();
            x.into_iter().map(|x| x / norm).collect::<Vec<f64>>()
        };
        let mut out = vec![0.0; self.tokens * all];
        for head in 0..n_value_heads {
            let key_head = head / (n_value_heads / n_key_heads);
            let mut state = vec![vec![0.0; key_dim]; value_dim];
            for t in 0..self.tokens {
                let (query, key) = (unit(q, 0, t, key_head), unit(k, keys, t, key_head));
                let at = t * n_value_heads + head;
                let inner = f64::from(decay[at]) + f64::from(self.bias[head]);
                let decay = (-f64::from(self.rate_log[head]).exp() * inner.exp().ln_1p()).exp();
                let beta = sigmoid(f64::from(beta[at]));
                for (r, row) in state.iter_mut().enumerate() {
                    row.iter_mut().for_each(|s| *s *= decay);
                    let found: f64 = row.iter().zip(&key).map(|(s, k)| s * k).sum();
                    let value = mixed(v, all, 2 * keys, t, head * value_dim + r);
                    row.iter_mut().zip(&key).for_each(|(s, k)| *s += beta * (value - found) * k);
                    let asked: f64 = row.iter().zip(&query).map(|(s, q)| s * q).sum();
                    out[t * all + head * value_dim + r] = asked / (key_dim as f64).sqrt();
                }
            }
        }
        out
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

#[test]
fn the_definition_is_the_rule_and_every_instruction_set_has_its_bits() {
    for shape in SHAPES {
        let case = Case::new(shape, 150);
        let len = shape.state_len();
        let run = |with| {
            let mut memory = vec![f32::NAN; len];
            let runs = [DeltaRun { rows: 0..150, from: None, to: 0 }];
            let out = case.run(with, 0..150, &mut memory, &runs, &[]);
            (bits(&out), bits(&memory), out)
        };
        let expected = run((Kernels::available()[0], 1));
        let largest = expected.2.iter().zip(case.reference()).map(|(a, b)| (f64::from(*a) - b).abs());
        let largest = largest.fold(0.0, f64::max);
        assert!(largest < 2e-5, "{shape:?}: {largest}");
        for kernels in Kernels::available() {
            for threads in [1, 2] {
                let found = run((kernels, threads));
                assert_eq!((&found.0, &found.1), (&expected.0, &expected.1), "{kernels:?} {shape:?}");
            }
        }
    }
}

#[test]
fn tokens_one_by_one_between_two_places_are_the_tokens_at_once() {
    for shape in SHAPES {
        let (case, len, width) =
            (Case::new(shape, 9), shape.state_len(), shape.n_value_heads * shape.value_dim);
        for kernels in Kernels::available() {
            let mut whole = vec![f32::NAN; len];
            let runs = [DeltaRun { rows: 0..9, from: None, to: 0 }];
            let expected = case.run((kernels, 1), 0..9, &mut whole, &runs, &[]);
            let mut memory = vec![f32::NAN; 2 * len];
            for t in 0..9 {
                let from = (t > 0).then_some((t + 1) % 2 * len);
                let runs = [DeltaRun { rows: 0..1, from, to: t % 2 * len }];
                let out = case.run((kernels, 2), t..t + 1, &mut memory, &runs, &[]);
                assert_eq!(bits(&out), bits(&expected[t * width..(t + 1) * width]), "{kernels:?} {t}");
            }
            assert_eq!(bits(&memory[..len]), bits(&whole));
        }
    }
}

#[test]
fn sequences_side_by_side_and_marks_change_no_bit() {
    let shape = SHAPES[0];
    let (case, len, width) =
        (Case::new(shape, 100), shape.state_len(), shape.n_value_heads * shape.value_dim);
    let kernels = Kernels::detect();
    let alone = |rows: Range<usize>| {
        let mut memory = vec![f32::NAN; len];
        let runs = [DeltaRun { rows: 0..rows.len(), from: None, to: 0 }];
        (case.run((kernels, 1), rows, &mut memory, &runs, &[]), memory)
    };
    let mut memory = vec![f32::NAN; 5 * len];
    let runs =
        [DeltaRun { rows: 0..20, from: None, to: len }, DeltaRun { rows: 20..100, from: None, to: 4 * len }];
    // In no order; one after the last token of its run, one in the middle of a segment, one where one ends.
    let marks = [
        DeltaMark { row: 52, to: 0 },
        DeltaMark { row: 19, to: 3 * len },
        DeltaMark { row: 20 + SEGMENT - 1, to: 2 * len },
    ];
    let out = case.run((kernels, 2), 0..100, &mut memory, &runs, &marks);
    let state = |i: usize| bits(&memory[i * len..(i + 1) * len]);
    for (rows, place) in [(0..20, 1), (20..100, 4)] {
        let (expected, end) = alone(rows.clone());
        assert_eq!(bits(&out[rows.start * width..rows.end * width]), bits(&expected));
        assert_eq!(state(place), bits(&end));
    }
    for (rows, place) in [(20..53, 0), (0..20, 3), (20..20 + SEGMENT, 2)] {
        assert_eq!(state(place), bits(&alone(rows.clone()).1), "{rows:?}");
    }
}

#[test]
fn softplus_is_the_logarithm() {
    for i in -4000..4000 {
        let x = i as f32 / 100.0;
        let expected = if x > 20.0 { f64::from(x) } else { f64::from(x).exp().ln_1p() };
        let difference = (f64::from(softplus(x)) - expected).abs();
        assert!(difference <= 1e-16 + 2e-7 * expected.max(f64::from(f32::EPSILON)), "{x}: {difference:e}");
    }
    assert!(softplus(f32::NAN).is_nan());
    assert_eq!(softplus(f32::NEG_INFINITY), 0.0);
    assert_eq!(softplus(f32::INFINITY), f32::INFINITY);
}

#[test]
fn places_that_would_spoil_each_other_are_refused() {
    let shape = SHAPES[0];
    let (case, len) = (Case::new(shape, 4), shape.state_len());
    let run = |rows, from, to| DeltaRun { rows, from, to };
    for (runs, marks) in [
        (vec![run(0..4, None, 1)], vec![]),
        (vec![run(0..5, None, 0)], vec![]),
        (vec![run(0..2, None, 0), run(2..4, None, len / 2)], vec![]),
        (vec![run(0..2, None, 0), run(2..4, Some(0), len)], vec![]),
        (vec![run(0..2, Some(len), 0)], vec![DeltaMark { row: 1, to: len }]),
        (vec![run(0..2, Some(len), 0), run(2..4, None, len + len / 2)], vec![]),
        (
            vec![run(0..4, None, 0)],
            vec![DeltaMark { row: 1, to: len }, DeltaMark { row: 2, to: len + len / 2 }],
        ),
    ] {
        let mut memory = vec![0.0; if runs[0].to == 1 { len } else { 3 * len }];
        let kernels = Kernels::available()[0];
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            case.run((kernels, 1), 0..4, &mut memory, &runs, &marks);
        }));
        assert!(result.is_err(), "{runs:?} {marks:?}");
    }
}
