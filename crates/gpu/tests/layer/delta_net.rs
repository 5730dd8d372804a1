//! Gated delta nets, against the processor's.

use super::*;

/// A layer, what it is given of some tokens, and states.
struct Net {
    layout: DeltaLayout,
    /// Queries, keys, values, gates, beta, decay: a plane of each.
    planes: [Vec<f32>; 6],
    weights: DeltaWeights,
    norm: Vec<f32>,
    memory: Vec<f32>,
}

const NORM_EPS: f32 = 1e-6;

impl Net {
    /// Of so many tokens, with so many states of anything; `slow` ones hardly decay.
    fn new(layout: DeltaLayout, tokens: usize, states: usize, slow: bool, random: &mut Random) -> Self {
        let DeltaLayout { n_key_heads, n_value_heads, key_dim, conv_width, .. } = layout;
        let (keys, values) = (n_key_heads * key_dim, layout.values());
        let mut planes = [keys, keys, values, values, n_value_heads, n_value_heads]
            .map(|width| random.values(tokens * width));
        if slow {
            planes[5].iter_mut().for_each(|decay| *decay = *decay * 2.0 - 8.0);
        }
        let mut of = |n: usize| random.values(n);
        let weights = DeltaWeights::new(
            &shape(&layout),
            &of((2 * keys + values) * conv_width),
            &of(n_value_heads),
            &of(n_value_heads),
        );
        let norm = of(layout.key_dim.max(layout.value_dim))[..layout.value_dim].to_vec();
        let memory = of(states * layout.state_len());
        Self { layout, planes, weights, norm, memory }
    }

    /// Outputs and states as the processor makes them.
    fn on_cpu(&self, runs: &[StateRun], marks: &[StateMark]) -> (Vec<f32>, Vec<f32>) {
        let (shape, len) = (shape(&self.layout), self.layout.state_len());
        let at = |state: u32| state as usize * len;
        let runs: Vec<_> = runs
            .iter()
            .map(|run| DeltaRun {
                rows: run.first as usize..run.end as usize,
                from: run.from.map(at),
                to: at(run.to),
            })
            .collect();
        let marks: Vec<_> =
            marks.iter().map(|mark| DeltaMark { row: mark.row as usize, to: at(mark.to) }).collect();
        let [q, k, v, gate, beta, decay] = &self.planes;
        let (mut memory, mut out) = (self.memory.clone(), vec![0.0; v.len()]);
        cpu_delta_net(
            &Pool::new(1, false),
            cpu(),
            &shape,
            &self.weights,
            CpuDeltaInput { q, k, v, beta, decay },
            &mut memory,
            &runs,
            &marks,
            &mut CpuDeltaScratch::new(&shape),
            &mut out,
        );
        for head in out.chunks_exact_mut(self.layout.value_dim) {
            cpu().rms_norm_in_place(head, &self.norm, NORM_EPS);
        }
        let found = out.clone();
        cpu().swiglu(gate, &found, &mut out);
        (out, memory)
    }

    /// The same on a device, in calls of so many tokens each, every call's runs and marks as they are said: and the int8 form is that of the
    /// outputs.
    fn on_gpu(&self, gpu: &Gpu, calls: &[(&[StateRun], &[StateMark])], group: usize) -> (Vec<f32>, Vec<f32>) {
        let DeltaLayout { n_key_heads, n_value_heads, key_dim, .. } = self.layout;
        let (keys, values) = (n_key_heads * key_dim, self.layout.values());
        let widths = [keys, keys, values, values, n_value_heads, n_value_heads];
        // With columns between them that are nobody's.
        let ats: Vec<usize> =
            widths.iter().scan(4, |at, w| Some(std::mem::replace(at, *at + w + 4))).collect();
        let stride = (ats[5] + n_value_heads).next_multiple_of(4);
        let [taps, rates, norm] =
            [self.weights.taps(), &self.weights.rates(), &self.norm].map(|w| floats(gpu, w));
        let states = floats(gpu, &self.memory);
        let most = calls.iter().map(|(runs, _)| runs[runs.len() - 1].end as usize).max().unwrap();
        let n_runs = calls.iter().map(|(runs, _)| runs.len()).max().unwrap();
        let plane = stale(gpu, most * stride);
        let mut runs = StateRuns::new(gpu, most, n_runs, 4).unwrap();
        let scratch = DeltaScratch::new(gpu, &self.layout, most).unwrap();
        let out = stale(gpu, (most + 1) * values);
        let coded = stale_coded(gpu, most + 1, values, group);
        let net = DeltaNet::new(
            gpu,
            most,
            self.layout,
            DeltaInput { plane: &plane, stride, at: ats.clone().try_into().unwrap() },
            DeltaNetWeights { taps: &taps, rates: &rates, norm: &norm, eps: NORM_EPS },
            &runs,
            &states,
            &scratch,
            DeltaOutputs { plane: Some(&out), coded: Some(&coded) },
        )
        .unwrap();
        let (mut all, mut done) = (Vec::new(), 0);
        for (own, marks) in calls {
            let tokens = own[own.len() - 1].end as usize;
            let mut rows = vec![f32::from_bits(STALE); tokens * stride];
            for (t, row) in rows.chunks_exact_mut(stride).enumerate() {
                for ((plane, width), at) in self.planes.iter().zip(widths).zip(&ats) {
                    row[*at..at + width].copy_from_slice(&plane[(done + t) * width..(done + t + 1) * width]);
                }
            }
            gpu.write(&plane, 0, &rows.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>());
            gpu.write(&out, 0, &STALE.to_le_bytes().repeat((most + 1) * values));
            runs.write(gpu, own, marks);
            run(gpu, |step| net.record(step, tokens));
            let mut got = read(gpu, &out);
            let rest = got.split_off(tokens * values);
            assert_stale(&rest);
            if calls.len() == 1 {
                assert_coded(gpu, &coded, &got, tokens);
            }
            all.extend(got);
            done += tokens;
        }
        (all, read(gpu, &states))
    }

    /// One call is the processor's; places that are not written are left alone.
    fn check(&self, gpu: &Gpu, runs: &[StateRun], marks: &[StateMark], group: usize) {
        let what = format!("{:?}: {runs:?}, {marks:?}", self.layout);
        let (expected, expected_states) = self.on_cpu(runs, marks);
        let (got, states) = self.on_gpu(gpu, &[(runs, marks)], group);
        // A norm makes much of what is little.
        assert_close(&got, &expected, 2e-4, false, &format!("outputs of {what}"));
        let len = self.layout.state_len();
        let parts = states.chunks(len).zip(expected_states.chunks(len)).zip(self.memory.chunks(len));
        for (state, ((got, expected), before)) in parts.enumerate() {
            if expected == before {
                assert!(got == before, "state {state} of {what} was written");
            } else {
                assert_close(got, expected, 2e-5, false, &format!("state {state} of {what}"));
            }
        }
    }
}

fn shape(layout: &DeltaLayout) -> DeltaShape {
    let DeltaLayout { n_key_heads, n_value_heads, key_dim, value_dim, conv_width } = *layout;
    DeltaShape { n_key_heads, n_value_heads, key_dim, value_dim, conv_width }
}

const fn layout(heads: (usize, usize), dims: (usize, usize), conv_width: usize) -> DeltaLayout {
    DeltaLayout {
        n_key_heads: heads.0,
        n_value_heads: heads.1,
        key_dim: dims.0,
        value_dim: dims.1,
        conv_width,
    }
}

const fn one(first: u32, end: u32, from: Option<u32>, to: u32) -> StateRun {
    StateRun { first, end, from, to }
}

#[test]
fn gated_delta_nets_are_the_processors_for_every_shape_of_heads() {
    let Some(gpu) = gpu() else { return };
    let shapes = [
        (layout((1, 2), (128, 128), 4), 64),
        (layout((2, 2), (64, 32), 3), 32),
        (layout((1, 4), (48, 16), 2), 64),
        (layout((3, 3), (16, 48), 1), 128),
    ];
    for (i, (layout, group)) in shapes.into_iter().enumerate() {
        let mut random = Random(i as u64 + 11);
        let net = Net::new(layout, 30, 8, false, &mut random);
        // The beginning of a sequence; one that goes on, a token and two; one whose state is its own successor.
        let runs =
            [one(0, 9, None, 0), one(9, 10, Some(1), 2), one(10, 12, Some(3), 4), one(12, 30, Some(5), 5)];
        let marks = [StateMark { row: 29, to: 6 }, StateMark { row: 8, to: 7 }];
        net.check(gpu, &runs, &marks[i % 2..], group);
    }
}

#[test]
fn runs_of_every_length_leave_their_states_and_marks() {
    let Some(gpu) = gpu() else { return };
    let layout = layout((1, 2), (32, 16), 4);
    for n in [1, 2, 3, 63, 64, 65, 200] {
        let mut random = Random(n.into());
        let net = Net::new(layout, n as usize, 6, false, &mut random);
        for (from, to) in [(None, 0), (Some(1), 0), (Some(1), 1)] {
            if n == 1 && from == Some(to) {
                continue;
            }
            // At both edges, and in between; those of one token once.
            let rows = if n < 3 { vec![n - 1] } else { vec![n - 1, 0, n / 2] };
            let marks: Vec<_> = rows.into_iter().zip(3..).map(|(row, to)| StateMark { row, to }).collect();
            // Heads that are whole groups have one kernel of a lone token.
            let group = if n % 2 == 1 { 16 } else { 64 };
            net.check(gpu, &[one(0, n, from, to)], &marks, group);
        }
    }
}

#[test]
fn a_prompts_states_and_answers_have_the_bits_of_its_tokens_one_by_one() {
    let Some(gpu) = gpu() else { return };
    for (i, layout) in [layout((1, 2), (128, 64), 4), layout((2, 4), (16, 16), 3)].into_iter().enumerate() {
        let mut random = Random(i as u64 + 40);
        let net = Net::new(layout, 41, 5, false, &mut random);
        let whole = net.on_gpu(gpu, &[(&[one(0, 41, None, 1)], &[])], 64);
        // One by one, by two places by turns; and in pieces, another sequence beside the last.
        let alone: Vec<_> = (0..41).map(|t| [one(0, 1, (t > 0).then_some((t + 1) % 2), t % 2)]).collect();
        let calls: Vec<(&[StateRun], &[StateMark])> = alone.iter().map(|run| (&run[..], &[][..])).collect();
        let one_by_one = net.on_gpu(gpu, &calls, 64);
        let state = |states: &[f32], at: usize| {
            let len = layout.state_len();
            states[at * len..(at + 1) * len].iter().map(|v| v.to_bits()).collect::<Vec<_>>()
        };
        assert_eq!(one_by_one.0, whole.0, "answers one by one");
        assert_eq!(state(&one_by_one.1, 0), state(&whole.1, 1), "the state one by one");
        let pieces: [(&[StateRun], &[StateMark]); 3] = [
            (&[one(0, 2, None, 0)], &[]),
            (&[one(0, 17, Some(0), 1)], &[StateMark { row: 4, to: 3 }]),
            (&[one(0, 1, Some(1), 0), one(1, 22, Some(2), 4)], &[]),
        ];
        let cut = net.on_gpu(gpu, &pieces, 64);
        let first = 20 * layout.values();
        assert_eq!(cut.0[..first], whole.0[..first], "answers in pieces");
        let seven = net.on_gpu(gpu, &[(&[one(0, 7, None, 1)], &[])], 64);
        assert_eq!(state(&cut.1, 3), state(&seven.1, 1), "a mark in a piece");
    }
    let taken = |name: &str| gpu.sources().iter().any(|(kernel, _)| kernel == name);
    assert!(taken("states, norm and gate of a token") && taken("states of a token"));
}

/// States that hardly decay keep the rounding of thousands of tokens: it must stay what it is of a few.
#[test]
fn errors_do_not_build_up_over_thousands_of_tokens() {
    let Some(gpu) = gpu() else { return };
    let layout = layout((1, 2), (32, 16), 4);
    let mut random = Random(77);
    let net = Net::new(layout, 4000, 1, true, &mut random);
    let run = [one(0, 4000, None, 0)];
    let ((got, states), (expected, expected_states)) =
        (net.on_gpu(gpu, &[(&run, &[])], 64), net.on_cpu(&run, &[]));
    let worst = |got: &[f32], expected: &[f32]| {
        got.iter().zip(expected).map(|(a, b)| (a - b).abs() / b.abs().max(1.0)).fold(0f32, f32::max)
    };
    let values = layout.values();
    let by_thousand: Vec<f32> =
        got.chunks(1000 * values).zip(expected.chunks(1000 * values)).map(|(a, b)| worst(a, b)).collect();
    eprintln!(
        "answers of each thousand off by {by_thousand:?}, the state by {}",
        worst(&states, &expected_states)
    );
    assert!(by_thousand.iter().all(|off| *off < 2e-4), "{by_thousand:?}");
    assert!(worst(&states, &expected_states) < 2e-5);
}
