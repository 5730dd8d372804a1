//! Which experts a token visits, and what halts a step.

use super::*;

/// Chosen experts (ascending) and their weights, as the CPU has them.
fn route(moe: &MoeSpec, logits: &[f32], bias: &[f32], correction: &[f32]) -> (Vec<u32>, Vec<f32>) {
    let mut scores: Vec<f32> = logits.iter().zip(bias).map(|(l, b)| l + b).collect();
    match moe.router {
        RouterKind::Softmax => cpu().softmax_in_place(&mut scores),
        RouterKind::Sigmoid => cpu().sigmoid_in_place(&mut scores),
    }
    let mut ranked: Vec<f32> = scores.iter().zip(correction).map(|(s, c)| s + c).collect();
    if let Some(groups) = moe.groups {
        let size = moe.n_experts / groups.n;
        let of_group = |group: &[f32]| {
            let mut sorted = group.to_vec();
            sorted.sort_by(|a, b| b.total_cmp(a));
            match groups.score {
                GroupScore::Best => sorted[0],
                GroupScore::BestTwo => sorted[0] + sorted[1],
            }
        };
        let group_scores: Vec<f32> = ranked.chunks_exact(size).map(of_group).collect();
        let mut best = vec![0; groups.top];
        top_k(&group_scores, &mut best);
        for (i, ranked) in ranked.iter_mut().enumerate() {
            if !best.contains(&((i / size) as u32)) {
                *ranked = f32::NEG_INFINITY;
            }
        }
    }
    let mut ids = vec![0; moe.top_k];
    top_k(&ranked, &mut ids);
    let sum: f32 = ids.iter().map(|&id| scores[id as usize]).sum();
    let divisor = if moe.norm_topk { sum.max(moe.norm_min as f32) } else { 1.0 };
    ids.sort_unstable();
    let weights = ids.iter().map(|&id| scores[id as usize] / divisor * moe.routed_scale as f32).collect();
    (ids, weights)
}

fn check_route(gpu: &Gpu, moe: &MoeSpec, tokens: usize, biased: bool, logits: &[f32]) {
    let what = format!("{moe:?}, {tokens} tokens");
    let n_experts = moe.n_experts;
    let n = tokens * moe.top_k;
    let mut random = Random(tokens as u64);
    let zeros = vec![0.0; n_experts];
    let (bias, correction) =
        if biased { (random.values(n_experts), random.values(n_experts)) } else { (zeros.clone(), zeros) };
    // Every third expert is not there.
    let slots: Vec<u32> =
        (0..n_experts as u32).map(|e| if e % 3 == 1 { WorkList::ABSENT } else { 1000 - e }).collect();
    let (bias_slice, correction_slice) = (floats(gpu, &bias), floats(gpu, &correction));
    let (ids, weights) = (stale(gpu, n + 1), stale(gpu, n + 1));
    let entries = n.min(n_experts + n / 8);
    let list = WorkList {
        entries: stale(gpu, 4 + 4 * entries + 1),
        pairs: stale(gpu, n + 1),
        tokens,
        top_k: moe.top_k,
        n_experts,
    };
    let inputs = RouteInputs {
        logits: &floats(gpu, logits),
        bias: biased.then_some(&bias_slice),
        correction: biased.then_some(&correction_slice),
        router: None,
        norm: None,
        slots: &words(gpu, &slots),
    };
    let outputs = RouteOutputs { ids: &ids, weights: &weights, list: &list, seen: None };
    let router = Route::new(gpu, tokens, moe, inputs, outputs).unwrap();
    run(gpu, |step| router.record(step, tokens));

    let (mut expected_ids, mut expected_weights) = (Vec::new(), Vec::new());
    for logits in logits.chunks_exact(n_experts) {
        let (ids, weights) = route(moe, logits, &bias, &correction);
        expected_ids.extend(ids);
        expected_weights.extend(weights);
    }
    let got_ids = read_words(gpu, &ids);
    assert_eq!(got_ids[..n], expected_ids, "ids of {what}");
    let got = read(gpu, &weights);
    assert_close(&got[..n], &expected_weights, 1e-6, true, &format!("weights of {what}"));
    assert_eq!((got_ids[n], got[n].to_bits()), (STALE, STALE));

    let (mut expected, mut pairs) = (Vec::new(), Vec::<u32>::new());
    let (mut missing, mut visited) = (0, 0);
    for expert in 0..n_experts as u32 {
        let own: Vec<u32> = (0..n as u32).filter(|&p| expected_ids[p as usize] == expert).collect();
        visited += u32::from(!own.is_empty());
        for piece in own.chunks(list.entry_pairs(tokens)) {
            let slot = slots[expert as usize];
            missing += u32::from(slot == WorkList::ABSENT);
            expected.extend([slot, pairs.len() as u32, piece.len() as u32, expert]);
            pairs.extend(piece);
        }
    }
    let work = read_words(gpu, &list.entries);
    assert_eq!(work[..4], [expected.len() as u32 / 4, missing, visited, 0], "list of {what}");
    assert_eq!(work[4..4 + expected.len()], expected, "entries of {what}");
    assert!(work[4 + expected.len()..].iter().all(|&w| w == STALE), "entries past the end of {what}");
    let got = read_words(gpu, &list.pairs);
    assert_eq!(got[..n], pairs, "pairs of {what}");
    assert_eq!(got[n], STALE);
}

#[test]
fn a_halt_leaves_everything_behind_it_as_it_was() {
    let Some(gpu) = gpu() else { return };
    let (tokens, d, moe) = (2, 96, moe(16, 4, true));
    let n = tokens * moe.top_k;
    let mut random = Random(77);
    let logits = |random: &mut Random| random.values(tokens * moe.n_experts);
    let first = logits(&mut random);
    let plane = floats(gpu, &first);
    let slots = words(gpu, &(0..16).collect::<Vec<u32>>());
    let (ids, weights) = (stale(gpu, n), floats(gpu, &vec![0.0; n + 1]));
    let list = WorkList {
        entries: stale(gpu, 4 + 4 * n),
        pairs: stale(gpu, n),
        tokens,
        top_k: moe.top_k,
        n_experts: moe.n_experts,
    };
    let seen = stale(gpu, 5 * tokens * moe.n_experts);
    let halt = Halt { words: &weights, at: n };
    let inputs =
        RouteInputs { logits: &plane, bias: None, correction: None, router: None, norm: None, slots: &slots };
    let outputs = RouteOutputs { ids: &ids, weights: &weights, list: &list, seen: Some((&seen, 3)) };
    let route = Route::halting(gpu, tokens, &moe, inputs, outputs, Some((halt, 7.0))).unwrap();

    let hidden = random.values(tokens * d);
    let (states, normed) = (floats(gpu, &hidden), stale(gpu, tokens * d));
    let coded = stale_coded(gpu, tokens, d, 32);
    let (weight, added) = (floats(gpu, &random.values(d)), floats(gpu, &random.values(tokens * d)));
    let outputs = floats(gpu, &random.values(n * d));
    let experts = Delta::Experts { outputs: &outputs, weights: &weights, top_k: moe.top_k, shared: None };
    let norms = [experts, Delta::Plane(&added, None)].map(|delta| {
        let out = NormOutputs { plane: Some(&normed), coded: &[&coded] };
        MixNorm::halting(gpu, tokens, d, 1e-6, &states, &weight, delta, None, out, Some(halt)).unwrap()
    });
    let state = || {
        let planes = [&states, &normed, &coded.codes, &coded.cells, &ids, &weights];
        planes.map(|plane| gpu.download(plane).unwrap())
    };
    let halt_now = || read(gpu, &weights)[n];

    run(gpu, |step| route.record(step, tokens));
    assert_eq!((halt_now(), read_words(gpu, &list.entries)[1]), (0.0, 0), "nothing is missing");
    let blocks = read(gpu, &seen);
    let blocks: Vec<_> = blocks.chunks(first.len()).collect();
    assert_eq!(blocks[3], first, "logits of the fourth layer");
    assert_stale(&[blocks[2], blocks[4]].concat());
    // One of the chosen experts goes.
    let gone = read_words(gpu, &ids)[5];
    gpu.write(&slots, u64::from(gone) * 4, &WorkList::ABSENT.to_le_bytes());
    run(gpu, |step| route.record(step, tokens));
    let work = read_words(gpu, &list.entries);
    assert_eq!((halt_now(), work[1]), (7.0, 1));
    assert!(work[0] > 1, "the layer that halts has its list");
    let before = state();
    gpu.write(&plane, 0, bytemuck::cast_slice(&logits(&mut random)));
    run(gpu, |step| {
        norms.iter().for_each(|norm| norm.record(step, tokens));
        route.record(step, tokens);
    });
    assert!(state() == before, "something was written behind a halt");
    assert_eq!(read_words(gpu, &list.entries)[0], 0, "experts behind a halt");
    gpu.write(&weights, 4 * n as u64, &0f32.to_le_bytes());
    for norm in &norms {
        let before = state();
        run(gpu, |step| norm.record(step, tokens));
        let after = state();
        assert!((0..4).all(|i| after[i] != before[i]), "a norm that goes on");
    }
}

fn moe(n_experts: usize, top_k: usize, norm_topk: bool) -> MoeSpec {
    MoeSpec { n_experts, top_k, d_expert: 8, norm_topk, ..MoeSpec::default() }
}

#[test]
fn experts_are_chosen_weighed_and_listed_as_on_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let logits = |tokens: usize, moe: &MoeSpec, spread: f32| -> Vec<f32> {
        let values = Random(tokens as u64 + 5).values(tokens * moe.n_experts);
        values.into_iter().map(|v| v * spread).collect()
    };
    for (moe, counts, biased) in [
        (moe(128, 8, true), &[1usize, 8, 9, 70][..], false),
        (moe(60, 4, false), &[3, 40], false),
        (moe(512, 10, true), &[1, 2, 33], false),
        (moe(7, 7, true), &[1, 30], true),
        (moe(5, 1, false), &[2, 300], false),
        (MoeSpec { router: RouterKind::Sigmoid, routed_scale: 2.5, ..moe(32, 4, true) }, &[4, 50], true),
        // Corrections of shares; the least divisor counts for some tokens.
        (MoeSpec { norm_min: 0.5, ..moe(64, 6, true) }, &[4, 50], true),
    ] {
        // One token has a kernel of its own.
        for tokens in counts.iter().copied().chain([1]) {
            check_route(gpu, &moe, tokens, biased, &logits(tokens, &moe, 6.0));
        }
    }
    for score in [GroupScore::Best, GroupScore::BestTwo] {
        let groups = Some(GroupSpec { n: 8, top: 3, score });
        let moe = MoeSpec { groups, router: RouterKind::Sigmoid, ..moe(64, 6, true) };
        check_route(gpu, &moe, 11, true, &logits(11, &moe, 4.0));
        check_route(gpu, &moe, 1, true, &logits(1, &moe, 4.0));
    }
}

/// One token's ids, weights and halt, list, pairs and the logits that others see, of steps in a row: while experts are
/// missing, behind the halt that this has set, and from when the halt is 0 again and they are there.
fn routed(
    gpu: &Gpu,
    moe: &MoeSpec,
    weights: &Weights,
    x: &[f32],
    bias: Option<&Slice>,
) -> Vec<[Vec<u32>; 5]> {
    let (n_experts, top_k) = (moe.n_experts, moe.top_k);
    let (logits, x) = (stale(gpu, n_experts), floats(gpu, x));
    let all: Vec<u32> = (0..n_experts as u32).collect();
    let some: Vec<u32> = all.iter().map(|&e| if e % 3 == 1 { WorkList::ABSENT } else { e }).collect();
    let [two, one] = [None, Some((weights, &x))].map(|router| {
        let (ids, shares, seen) =
            (stale(gpu, top_k), floats(gpu, &vec![0.0; top_k + 1]), stale(gpu, n_experts));
        let list = WorkList {
            entries: stale(gpu, 4 + 4 * top_k),
            pairs: stale(gpu, top_k),
            tokens: 1,
            top_k,
            n_experts,
        };
        let slots = words(gpu, &some);
        let inputs =
            RouteInputs { logits: &logits, bias, correction: bias, router, norm: None, slots: &slots };
        let places = RouteOutputs { ids: &ids, weights: &shares, list: &list, seen: Some((&seen, 0)) };
        let halt = Halt { words: &shares, at: top_k };
        let route = Route::halting(gpu, 1, moe, inputs, places, Some((halt, 3.0))).unwrap();
        let columns = Columns::whole(logits.clone(), n_experts);
        let product = FloatMatmul::new(gpu, weights, &x, 1, &columns).unwrap();
        (0..4)
            .map(|round| {
                if round == 2 {
                    gpu.write(&slots, 0, &all.iter().flat_map(|e| e.to_le_bytes()).collect::<Vec<_>>());
                    gpu.write(&shares, 4 * top_k as u64, &0f32.to_le_bytes());
                }
                run(gpu, |step| {
                    // Where a device binds too few buffers there is no such kernel.
                    if !route.makes_logits(1) {
                        product.record(step, 1);
                    }
                    route.record(step, 1);
                });
                [&ids, &shares, &list.entries, &list.pairs, &seen].map(|slice| read_words(gpu, slice))
            })
            .collect::<Vec<_>>()
    });
    assert_eq!(one, two, "{moe:?}");
    let halt = |round: usize| f32::from_bits(one[round][1][top_k]);
    let missing = one[0][0].iter().any(|&expert| expert % 3 == 1);
    assert_eq!([halt(0), halt(1), halt(2)], if missing { [3.0, 3.0, 0.0] } else { [0.0; 3] }, "{moe:?}");
    assert_eq!(one[1][2][0], if missing { 0 } else { top_k as u32 }, "entries behind a halt");
    one
}

#[test]
fn a_router_that_makes_its_logits_chooses_as_two_kernels_do() {
    let Some(gpu) = gpu() else { return };
    let mut random = Random(77);
    for (moe, cols, encoding, biased) in [
        (moe(128, 8, true), 2048, Encoding::Bf16, false),
        (moe(60, 4, false), 100, Encoding::F32, true),
        (moe(300, 6, true), 72, Encoding::F16, false),
        (MoeSpec { router: RouterKind::Sigmoid, ..moe(7, 2, true) }, 37, Encoding::F32, true),
        (moe(1024, 8, true), 64, Encoding::F32, false),
    ] {
        let n = moe.n_experts * cols;
        let bytes: Vec<u8> = match encoding {
            Encoding::F32 => random.values(n).into_iter().flat_map(f32::to_le_bytes).collect(),
            // Exponents of less than 1 in both kinds of halves.
            _ => (0..n).flat_map(|_| (random.next() as u16 & 0xbbff).to_le_bytes()).collect(),
        };
        let weights = Weights::new(upload(gpu, &bytes), moe.n_experts, cols, encoding);
        let bias = floats(gpu, &random.values(moe.n_experts));
        let mut x = random.values(cols);
        routed(gpu, &moe, &weights, &x, biased.then_some(&bias));
        x[cols / 2] = f32::NAN;
        let [_, shares, ..] = &routed(gpu, &moe, &weights, &x, biased.then_some(&bias))[0];
        assert!(shares[..moe.top_k].iter().all(|&share| f32::from_bits(share).is_nan()), "{shares:?}");
    }
}

#[test]
fn a_router_that_makes_its_input_does_what_norm_and_router_do() {
    let Some(gpu) = gpu() else { return };
    let mut random = Random(78);
    let (mut made, mut halted) = (0, 0);
    for (moe, cols, group, biased) in [
        (moe(128, 8, true), 2048, Some(64), false),
        (moe(60, 4, false), 104, Some(32), true),
        (moe(16, 2, true), 512, None, true),
        // Four rows a workgroup, the last of fewer.
        (moe(254, 8, true), 264, Some(64), false),
        (MoeSpec { router: RouterKind::Sigmoid, ..moe(7, 2, true) }, 40, Some(64), false),
    ] {
        let n_experts = moe.n_experts;
        let bytes: Vec<u8> = random.values(n_experts * cols).into_iter().flat_map(f32::to_le_bytes).collect();
        let matrix = Weights::new(upload(gpu, &bytes), n_experts, cols, Encoding::F32);
        let (weight, bias) = (floats(gpu, &random.values(cols)), floats(gpu, &random.values(cols)));
        let (hidden, added) = (random.values(cols), floats(gpu, &random.values(cols)));
        let bias = biased.then_some(&bias);
        let some: Vec<u32> =
            (0..n_experts as u32).map(|e| if e % 3 == 1 { WorkList::ABSENT } else { e }).collect();
        let slots = words(gpu, &some);
        // Apart, and in one; going on, and behind a halt.
        let [apart, one, elsewhere] = [(false, false), (true, false), (true, true)].map(|(fused, moves)| {
            let (eps, residual) = (1e-5, 0.5);
            let before = floats(gpu, &hidden);
            let hidden = floats(gpu, &hidden);
            let normed = stale(gpu, cols);
            let plane = group.map(|group| {
                let plane = CodedPlane::new(gpu, 1, cols, group).unwrap();
                let stales = |slice: &Slice| gpu.write(slice, 0, &vec![0xa5; slice.len() as usize]);
                stales(&plane.codes);
                stales(&plane.cells);
                plane
            });
            let planes: Vec<&CodedPlane> = plane.iter().collect();
            let (logits, seen) = (stale(gpu, n_experts), stale(gpu, n_experts));
            let (ids, shares) = (stale(gpu, moe.top_k), floats(gpu, &vec![0.0; moe.top_k + 1]));
            let list = WorkList {
                entries: stale(gpu, 4 + 4 * moe.top_k),
                pairs: stale(gpu, moe.top_k),
                tokens: 1,
                top_k: moe.top_k,
                n_experts,
            };
            let halt = Halt { words: &shares, at: moe.top_k };
            let norm = RouterNorm {
                hidden: &hidden,
                before: moves.then_some(&before),
                weight: &weight,
                added: &added,
                bias,
                eps,
                residual,
                coded: plane.as_ref(),
            };
            let inputs = RouteInputs {
                logits: &logits,
                bias: None,
                correction: None,
                router: Some((&matrix, &normed)),
                norm: fused.then_some(norm),
                slots: &slots,
            };
            let outputs = RouteOutputs { ids: &ids, weights: &shares, list: &list, seen: Some((&seen, 0)) };
            let route = Route::halting(gpu, 1, &moe, inputs, outputs, Some((halt, 5.0))).unwrap();
            made += usize::from(route.norms(1));
            let outputs = NormOutputs { plane: Some(&normed), coded: &planes };
            let delta = Delta::Plane(&added, bias);
            let mix = MixNorm::halting(gpu, 1, cols, eps, &hidden, &weight, delta, None, outputs, Some(halt))
                .unwrap();
            let mix = mix.scaled(residual);
            let product =
                FloatMatmul::new(gpu, &matrix, &normed, 1, &Columns::whole(logits.clone(), n_experts))
                    .unwrap();
            (0..2)
                .map(|_| {
                    run(gpu, |step| {
                        if !route.norms(1) {
                            mix.record(step, 1);
                        }
                        if !route.makes_logits(1) {
                            product.record(step, 1);
                        }
                        route.record(step, 1);
                    });
                    // What the sum is of the next time.
                    gpu.write(&before, 0, &gpu.download(&hidden).unwrap());
                    let mut all = [&hidden, &normed, &ids, &shares, &list.entries, &list.pairs]
                        .map(|slice| read_words(gpu, slice))
                        .to_vec();
                    all.extend(
                        plane
                            .iter()
                            .flat_map(|plane| [&plane.codes, &plane.cells].map(|s| read_words(gpu, s))),
                    );
                    all
                })
                .collect::<Vec<_>>()
        });
        assert_eq!(apart, one, "{moe:?}, {cols} columns");
        assert_eq!(apart, elsewhere, "{moe:?}, {cols} columns");
        // The second one stands behind a halt, if the first has set it.
        let missing = one[0][2].iter().any(|&expert| expert % 3 == 1);
        assert_eq!(f32::from_bits(one[0][3][moe.top_k]), if missing { 5.0 } else { 0.0 }, "{moe:?}");
        assert_eq!(one[0][0] == one[1][0], missing, "hidden states behind a halt");
        halted += usize::from(missing);
    }
    assert!((made == 10 || made == 0) && halted > 0, "{made}, {halted}");
    eprintln!("{made} of 10 in one kernel");
}

#[test]
fn ties_go_to_the_lower_expert_and_extreme_logits_choose_as_on_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let moe = moe(16, 4, true);
    let rows: [[f32; 16]; 4] = [
        [1.0; 16],
        std::array::from_fn(|i| (i % 3) as f32),
        // Logits that differ in their last bit only have equal scores, here or there.
        std::array::from_fn(|i| f32::from_bits(5f32.to_bits() + (i as u32 * 7) % 16)),
        // All but one without weight.
        std::array::from_fn(|i| if i == 9 { 200.0 } else { -(i as f32) }),
    ];
    let logits: Vec<f32> = rows.into_iter().flatten().collect();
    check_route(gpu, &moe, logits.len() / 16, false, &logits);
    rows.iter().for_each(|row| check_route(gpu, &moe, 1, false, row));
}

/// Of many experts a lone token's are ranked by segments of 32 first.
#[test]
fn many_experts_are_chosen_as_on_the_cpu_wherever_the_best_lie() {
    let Some(gpu) = gpu() else { return };
    let groups = Some(GroupSpec { n: 8, top: 4, score: GroupScore::BestTwo });
    for moe in [
        moe(161, 8, true),
        moe(300, 10, false),
        moe(512, 32, true),
        MoeSpec { groups, router: RouterKind::Sigmoid, ..moe(256, 8, true) },
    ] {
        let row = |of: &dyn Fn(usize) -> f32| (0..moe.n_experts).map(of).collect::<Vec<_>>();
        for logits in [
            row(&|_| 1.0),
            row(&|i| (i % 3) as f32),
            // All in one segment, and one in each.
            row(&|i| if i / 32 == 4 { (i % 7) as f32 } else { -1.0 }),
            row(&|i| if i % 32 == 31 { 3.0 } else { (i % 5) as f32 * 0.1 }),
            Random(9).values(moe.n_experts),
        ] {
            check_route(gpu, &moe, 1, false, &logits);
        }
    }
}

#[test]
fn logits_that_are_not_numbers_make_weights_that_are_none() {
    let Some(gpu) = gpu() else { return };
    let moe = moe(16, 4, true);
    for bad in [f32::NAN, -f32::NAN, f32::INFINITY] {
        let mut logits = Random(3).values(3 * 16);
        logits[16 + 5] = bad;
        check_route(gpu, &moe, 3, false, &logits);
    }
    check_route(gpu, &moe, 1, false, &[f32::NEG_INFINITY; 16]);
}
