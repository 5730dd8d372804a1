//! Norms, what is added to the hidden states before them, and their int8 forms.

use super::*;

/// One way of adding to the hidden states.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Adds {
    Nothing,
    Plane,
    Biased,
    Experts,
    Shared,
    Gated,
}

/// A step of `MixNorm` against the CPU: `tokens` of `room`, int8 planes in groups of `groups`.
fn check_norm(gpu: &Gpu, room: usize, tokens: usize, d: usize, adds: Adds, plane: bool, groups: &[usize]) {
    let what = format!("{tokens} x {d}, {adds:?}, {groups:?}");
    let mut random = Random(d as u64 * 31 + tokens as u64);
    let kernels = cpu();
    let (top_k, eps) = (3, 1e-6);
    let hidden = random.values(room * d);
    let weight = random.values(d);
    let added = random.values(room * d);
    let bias = random.values(d);
    let outputs = random.values(room * top_k * d);
    let weights = random.values(room * top_k);
    let gates = random.values(room);

    let device = floats(gpu, &hidden);
    let (weight_slice, added_slice, bias_slice) =
        (floats(gpu, &weight), floats(gpu, &added), floats(gpu, &bias));
    let (outputs_slice, weights_slice, gates_slice) =
        (floats(gpu, &outputs), floats(gpu, &weights), floats(gpu, &gates));
    let shared = |gate| Some(Shared { output: &added_slice, gate });
    let experts = |shared| Delta::Experts { outputs: &outputs_slice, weights: &weights_slice, top_k, shared };
    let delta = match adds {
        Adds::Nothing => Delta::None,
        Adds::Plane => Delta::Plane(&added_slice, None),
        Adds::Biased => Delta::Plane(&added_slice, Some(&bias_slice)),
        Adds::Experts => experts(None),
        Adds::Shared => experts(shared(None)),
        Adds::Gated => experts(shared(Some(&gates_slice))),
    };
    let normed = stale(gpu, room * d);
    let coded: Vec<_> = groups.iter().map(|&group| stale_coded(gpu, room, d, group)).collect();
    let coded: Vec<_> = coded.iter().collect();
    let out = NormOutputs { plane: plane.then_some(&normed), coded: &coded };
    let norm = MixNorm::new(gpu, room, d, eps, &device, &weight_slice, delta, None, out).unwrap();
    run(gpu, |step| norm.record(step, tokens));

    let mut expected = hidden.clone();
    for (t, gate) in gates[..tokens].iter().enumerate() {
        let row = t * d..(t + 1) * d;
        let mut sum = vec![0.0; d];
        match adds {
            Adds::Nothing => {}
            Adds::Plane => sum.copy_from_slice(&added[row.clone()]),
            Adds::Biased => {
                sum.copy_from_slice(&added[row.clone()]);
                kernels.add_in_place(&mut sum, &bias);
            }
            Adds::Experts | Adds::Shared | Adds::Gated => {
                for j in 0..top_k {
                    let pair = t * top_k + j;
                    kernels.scale_add(&mut sum, &outputs[pair * d..(pair + 1) * d], weights[pair]);
                }
                let gate = if adds == Adds::Gated { sigmoid(*gate) } else { 1.0 };
                if adds != Adds::Experts {
                    let shared: Vec<_> = added[row.clone()].iter().map(|v| v * gate).collect();
                    kernels.add_in_place(&mut sum, &shared);
                }
            }
        }
        if adds != Adds::Nothing {
            kernels.add_in_place(&mut expected[row], &sum);
        }
    }
    let got = read(gpu, &device);
    assert_close(&got, &expected, 1e-6, true, &format!("hidden states of {what}"));

    let mut rows = vec![0.0; tokens * d];
    for (row, x) in rows.chunks_exact_mut(d).zip(expected.chunks_exact(d)) {
        kernels.rms_norm(x, &weight, eps, row);
    }
    let got = read(gpu, &normed);
    if plane {
        assert_close(&got[..tokens * d], &rows, 1e-6, false, &format!("normed states of {what}"));
        assert_stale(&got[tokens * d..]);
        // What is quantised is what was written.
        coded.iter().for_each(|coded| assert_coded(gpu, coded, &got[..tokens * d], tokens));
    } else {
        let codes = gpu.download(&coded[0].codes).unwrap();
        let cells = read_words(gpu, &coded[0].cells);
        let (group, groups) = (coded[0].group, coded[0].groups());
        for t in 0..tokens {
            for c in 0..d {
                let cell = t * groups + c / group;
                let scale = f32::from_bits(cells[2 * cell]);
                let value = f32::from(codes[cell * group + c % group] as i8) * scale;
                assert!((value - rows[t * d + c]).abs() <= scale * 0.51, "{what}: {t} {c}");
            }
        }
    }
}

#[test]
fn hidden_states_are_added_to_normed_and_quantised() {
    let Some(gpu) = gpu() else { return };
    check_norm(gpu, 3, 2, 256, Adds::Nothing, true, &[64]);
    check_norm(gpu, 4, 3, 192, Adds::Plane, true, &[32, 64]);
    check_norm(gpu, 2, 2, 100, Adds::Biased, true, &[16]);
    check_norm(gpu, 2, 1, 37, Adds::Experts, true, &[128]);
    check_norm(gpu, 3, 2, 48, Adds::Shared, false, &[64]);
    check_norm(gpu, 3, 2, 130, Adds::Gated, true, &[64]);
    check_norm(gpu, 1, 1, 5120, Adds::Plane, true, &[64]);
    check_norm(gpu, 1, 1, 1, Adds::Plane, true, &[]);
    check_norm(gpu, 1, 1, 16384, Adds::Nothing, false, &[16]);
}

/// A coded product of a norm, both in one kernel and apart: the same bits, where hidden states go and in what comes of them.
fn check_norm_matmul(
    gpu: &Gpu,
    (rows, cols): (usize, usize),
    encoding: &str,
    adds: Adds,
    tuning: Option<Tuning>,
) {
    let what = format!("{rows} x {cols}, {encoding}, {adds:?}, {tuning:?}");
    let mut random = Random(cols as u64 * 7 + rows as u64);
    let (top_k, eps, residual) = (3, 1e-6, 0.7);
    let encoding: Encoding = encoding.parse().unwrap();
    let group = encoding.tiles().unwrap().group();
    let mut bytes = vec![0; encoding.tensor_bytes(rows, cols).unwrap()];
    encoding.encode(&random.values(rows * cols), cols, &mut bytes);
    let weights = Weights::new(upload(gpu, &bytes), rows, cols, encoding);
    let hidden = random.values(cols);
    let plane = |random: &mut Random, n: usize| floats(gpu, &random.values(n));
    let (weight, added) = (plane(&mut random, cols), plane(&mut random, cols));
    let (outputs, shares) = (plane(&mut random, top_k * cols), plane(&mut random, top_k));
    let gates = plane(&mut random, 1);
    let experts = |shared| Delta::Experts { outputs: &outputs, weights: &shares, top_k, shared };
    let delta = match adds {
        Adds::Nothing => Delta::None,
        Adds::Plane => Delta::Plane(&added, None),
        Adds::Biased => Delta::Plane(&added, Some(&weight)),
        Adds::Experts => experts(None),
        Adds::Shared => experts(Some(Shared { output: &added, gate: None })),
        Adds::Gated => experts(Some(Shared { output: &added, gate: Some(&gates) })),
    };
    let (stride, offset) = (rows + 7, 5);
    let columns = || Columns { plane: stale(gpu, stride), stride, offset };

    let (summed, coded, apart) = (floats(gpu, &hidden), stale_coded(gpu, 1, cols, group), columns());
    // With a gated expert both outputs are more than a kernel binds: the int8 plane is made by another.
    let normed = stale(gpu, cols);
    let out = NormOutputs { plane: Some(&normed), coded: &[&coded] };
    let norm = MixNorm::new(gpu, 1, cols, eps, &summed, &weight, delta, None, out).unwrap().scaled(residual);
    let product = CodedMatmul::new(gpu, &weights, &coded, &apart).unwrap();
    run(gpu, |step| {
        norm.record(step, 1);
        product.record(step, 1);
    });

    let (hidden, kept, fused) = (floats(gpu, &hidden), stale(gpu, cols), columns());
    let input = NormInput { hidden: &hidden, delta, residual, kept: &kept, weight: &weight, eps };
    let product = NormMatmul::tuned(gpu, &weights, input, &fused, tuning).unwrap();
    let product = product.unwrap_or_else(|| panic!("{what}: not in one kernel"));
    run(gpu, |step| product.record(step));
    assert!(read_words(gpu, &kept) == read_words(gpu, &summed), "{what}: hidden states");
    assert!(read_words(gpu, &fused.plane) == read_words(gpu, &apart.plane), "{what}: product");
}

#[test]
fn a_product_that_makes_its_norm_does_what_norm_and_product_do() {
    let Some(gpu) = gpu() else { return };
    let wide = |threads, ahead| Some(Tuning { threads, lanes: Lanes::Wide(ahead) });
    check_norm_matmul(gpu, (70, 200), "q8/64", Adds::Nothing, None);
    check_norm_matmul(gpu, (33, 1000), "q4/64", Adds::Plane, wide(128, 4));
    check_norm_matmul(gpu, (200, 130), "q4/64", Adds::Biased, None);
    check_norm_matmul(gpu, (96, 2048), "q8/64", Adds::Experts, wide(256, 4));
    check_norm_matmul(gpu, (65, 260), "q8/64", Adds::Shared, wide(64, 1));
    check_norm_matmul(gpu, (40, 96), "q4/64", Adds::Gated, wide(128, 2));
    check_norm_matmul(gpu, (64, 2880), "q8/32", Adds::Biased, None);
    // Several, as sums of another order are often rounded to the same.
    for cols in [1000, 1440, 2048, 2080, 2880] {
        check_norm_matmul(gpu, (64, cols), "q8/32", Adds::Gated, None);
    }
}

#[test]
fn a_norm_that_all_workgroups_would_read_too_much_for_stays_apart() {
    let Some(gpu) = gpu() else { return };
    let (rows, cols, top_k) = (32 * 600, 1024, 8);
    let encoding: Encoding = "q4/64".parse().unwrap();
    let bytes = encoding.tensor_bytes(rows, cols).unwrap();
    let weights = Weights::new(stale(gpu, bytes / 4), rows, cols, encoding);
    let (row, kept, outputs) = (stale(gpu, cols), stale(gpu, cols), stale(gpu, top_k * cols));
    let delta = Delta::Experts { outputs: &outputs, weights: &row, top_k, shared: None };
    let input = NormInput { hidden: &row, delta, residual: 1.0, kept: &kept, weight: &row, eps: 1e-6 };
    let tuning = Some(Tuning { threads: 64, lanes: Lanes::Wide(4) });
    let out = Columns::whole(stale(gpu, rows), rows);
    assert!(NormMatmul::tuned(gpu, &weights, input, &out, tuning).unwrap().is_none());
}

#[test]
fn what_is_added_and_what_is_embedded_may_be_multiplied() {
    let Some(gpu) = gpu() else { return };
    let (tokens, d) = (2, 100);
    let mut random = Random(41);
    let (hidden, added, weight) = (random.values(tokens * d), random.values(tokens * d), random.values(d));
    let (states, normed) = (floats(gpu, &hidden), stale(gpu, tokens * d));
    let (added_slice, weight_slice) = (floats(gpu, &added), floats(gpu, &weight));
    let delta = Delta::Plane(&added_slice, None);
    let out = NormOutputs { plane: Some(&normed), coded: &[] };
    let norm =
        MixNorm::new(gpu, tokens, d, 1e-6, &states, &weight_slice, delta, None, out).unwrap().scaled(0.3);
    run(gpu, |step| norm.record(step, tokens));
    let expected: Vec<f32> = hidden.iter().zip(&added).map(|(h, a)| a.mul_add(0.3, *h)).collect();
    assert_close(&read(gpu, &states), &expected, 1e-6, true, "hidden states");
    let (ids, out) = (words(gpu, &[1]), stale(gpu, d));
    let embed = Embed::new(gpu, 1, &floats(gpu, &hidden), Encoding::F32, tokens, d, &ids, &out).unwrap();
    run(gpu, |step| embed.scaled(12.0).record(step, 1));
    let expected: Vec<f32> = hidden[d..].iter().map(|h| h * 12.0).collect();
    assert_close(&read(gpu, &out), &expected, 0.0, true, "an embedding");
}

#[test]
fn a_norm_of_chosen_rows_leaves_the_other_tokens_alone() {
    let Some(gpu) = gpu() else { return };
    let (tokens, d, eps) = (5, 96, 1e-5);
    let mut random = Random(7);
    let (hidden, weight, added) = (random.values(tokens * d), random.values(d), random.values(tokens * d));
    let chosen = [3u32, 0];
    let device = floats(gpu, &hidden);
    let normed = stale(gpu, 2 * d);
    let added_slice = floats(gpu, &added);
    let norm = MixNorm::new(
        gpu,
        tokens,
        d,
        eps,
        &device,
        &floats(gpu, &weight),
        Delta::Plane(&added_slice, None),
        Some((&words(gpu, &chosen), 2)),
        NormOutputs { plane: Some(&normed), coded: &[] },
    )
    .unwrap();
    run(gpu, |step| norm.record(step, 2));
    let mut expected = hidden;
    let mut rows = vec![0.0; 2 * d];
    for (&t, row) in chosen.iter().zip(rows.chunks_exact_mut(d)) {
        let place = t as usize * d..(t as usize + 1) * d;
        cpu().add_in_place(&mut expected[place.clone()], &added[place.clone()]);
        cpu().rms_norm(&expected[place], &weight, eps, row);
    }
    assert_close(&read(gpu, &device), &expected, 0.0, true, "hidden states");
    assert_close(&read(gpu, &normed), &rows, 1e-6, false, "normed states");
}

#[test]
fn what_is_not_a_number_stays_with_its_token() {
    let Some(gpu) = gpu() else { return };
    let (tokens, d) = (3, 128);
    for bad in [f32::NAN, f32::INFINITY] {
        let mut hidden = Random(1).values(tokens * d);
        hidden[d + 77] = bad;
        let (device, weight) = (floats(gpu, &hidden), floats(gpu, &vec![1.0; d]));
        let normed = stale(gpu, tokens * d);
        let coded = stale_coded(gpu, tokens, d, 64);
        let out = NormOutputs { plane: Some(&normed), coded: &[&coded] };
        let norm = MixNorm::new(gpu, tokens, d, 1e-6, &device, &weight, Delta::None, None, out).unwrap();
        run(gpu, |step| norm.record(step, tokens));
        let got = read(gpu, &normed);
        let finite: Vec<_> = got.iter().map(|v| v.is_finite()).collect();
        assert!(finite[..d].iter().all(|f| *f) && finite[2 * d..].iter().all(|f| *f), "{bad}");
        assert!(got[d + 77].is_nan(), "{bad} became {}", got[d + 77]);
        let scales = read_words(gpu, &coded.cells);
        assert!(f32::from_bits(scales[6]).is_nan(), "the group of {bad}");
    }
}

#[test]
fn what_a_token_gets_from_a_norm_does_not_depend_on_the_others() {
    let Some(gpu) = gpu() else { return };
    let (tokens, d) = (6, 320);
    let hidden = Random(3).values(tokens * d);
    let weight = floats(gpu, &Random(4).values(d));
    let norms = |rows: &[f32]| {
        let n = rows.len() / d;
        let (device, normed) = (floats(gpu, rows), stale(gpu, n * d));
        let out = NormOutputs { plane: Some(&normed), coded: &[] };
        let norm = MixNorm::new(gpu, n, d, 1e-6, &device, &weight, Delta::None, None, out).unwrap();
        run(gpu, |step| norm.record(step, n));
        read(gpu, &normed)
    };
    let all = norms(&hidden);
    for t in 0..tokens {
        let row = t * d..(t + 1) * d;
        assert_eq!(norms(&hidden[row.clone()]), all[row]);
    }
}
