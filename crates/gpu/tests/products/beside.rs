//! Kernels of one token beside each other in a dispatch, against the same kernels one after the other: the same bits.

use smoe_format::{Encoding, Zero};
use smoe_gpu::{
    Beside, CodedMatmul, Columns, Down, ExpertInput, ExpertsOf, FloatMatmul, GateUp, Gpu, Hidden,
    LoneExperts, Slice, Weights, WorkList,
};

use crate::common::Random;
use crate::experts::{Layer, q};
use crate::{device, floats, plane, quantised, run, tables, upload};

fn bits(gpu: &Gpu, slice: &Slice) -> Vec<u32> {
    floats(gpu, slice).into_iter().map(f32::to_bits).collect()
}

/// Several names of kernels in one.
fn is_made(gpu: &Gpu, parts: usize) -> bool {
    gpu.sources().iter().any(|(name, _)| name.split(" + ").count() == parts)
}

#[test]
fn routed_and_shared_experts_beside_each_other_have_the_bits_that_they_have_alone() {
    let Some(gpu) = device() else { return };
    let mut random = Random(61);
    let (d_model, top_k) = (200, 3);
    let [q4, q8, q3] = [q(4, 64, Zero::Symmetric), q(8, 64, Zero::Symmetric), q(3, 32, Zero::Affine)];
    let table = Encoding::Table(tables()[0]);
    for (routed, d_ff, shared, d_shared, gated) in [
        ([q4; 3], 96, [q8; 3], 96, true),
        ([q4; 3], 64, [q4; 3], 152, false),
        ([table, table, q4], 72, [q8, q8, q3], 260, true),
    ] {
        let routed = Layer::new(routed, (d_model, d_ff), 4, &mut random);
        let shared = Layer::new(shared, (d_model, d_shared), 1, &mut random);
        let x = random.values(d_model);
        let planes = [16, 32, 64, 128].map(|group| quantised(gpu, &x, 1, d_model, group));
        let planes: Vec<_> = planes.iter().collect();
        let x = plane(gpu, &x);
        let input = ExpertInput { coded: &planes, float: Some(&x) };
        let gate = Weights::new(plane(gpu, &random.values(d_model)), 1, d_model, Encoding::F32);
        let list = WorkList::new(gpu, &routed.layout, 1, top_k).unwrap();
        // One of them is not there.
        list.write(gpu, 1, &[(2, 0, &[0]), (WorkList::ABSENT, 3, &[1]), (1, 7, &[2])]);
        let everyone = WorkList::new(gpu, &shared.layout, 1, 1).unwrap();
        everyone.write(gpu, 1, &[(0, 0, &[0])]);
        let slots = [&routed, &shared].map(|layer| upload(gpu, &layer.slots));
        let made = [false, true].map(|together| {
            let hidden = [(&routed, top_k), (&shared, 1)]
                .map(|(layer, pairs)| Hidden::new(gpu, &layer.layout, pairs).unwrap());
            let y = [top_k, 1].map(|pairs| plane(gpu, &vec![0.5; pairs * d_model]));
            let out = plane(gpu, &[0.5]);
            let columns = Columns::whole(out.clone(), 1);
            let of = |i: usize| ExpertsOf {
                layout: [&routed.layout, &shared.layout][i],
                slots: &slots[i],
                list: [&list, &everyone][i],
                hidden: &hidden[i],
                y: &y[i],
            };
            let gate_of = gated.then_some((&gate, &x, &columns));
            let lone = LoneExperts::new(gpu, of(0), of(1), &input, gate_of).unwrap().unwrap();
            let apart = [0, 1].map(|i| {
                let ExpertsOf { layout, slots, list, hidden, y } = of(i);
                let gate_up = GateUp::new(gpu, layout, slots, list, &input, hidden).unwrap();
                (gate_up, Down::new(gpu, layout, slots, list, hidden, y).unwrap())
            });
            let product = FloatMatmul::new(gpu, &gate, &x, 1, &columns).unwrap();
            // Again, as each must leave everything ready for the next time.
            for _ in 0..2 {
                run(gpu, |step| {
                    if together {
                        return lone.record(step);
                    }
                    for (gate_up, down) in &apart {
                        gate_up.record(step, 1);
                        down.record(step, 1);
                    }
                    if gated {
                        product.record(step, 1);
                    }
                });
            }
            [&y[0], &y[1], &out].map(|slice| bits(gpu, slice))
        });
        assert_eq!(made[0], made[1], "{d_ff} and {d_shared}");
        assert_eq!(made[0][2] != [0.5f32.to_bits()], gated);
        assert!(made[0][0][..d_model].iter().any(|bits| *bits != 0.5f32.to_bits()));
    }
    assert!(is_made(gpu, 2) && is_made(gpu, 3));
}

#[test]
fn a_coded_and_a_float_product_beside_each_other_have_the_bits_that_they_have_alone() {
    let Some(gpu) = device() else { return };
    let mut random = Random(62);
    for (encoding, rows, cols, float_rows, float) in [
        (q(8, 64, Zero::Symmetric), 200, 256, 9, Encoding::Bf16),
        (q(4, 32, Zero::Affine), 70, 100, 4, Encoding::F32),
    ] {
        let [coded, other] = [(encoding, rows), (float, float_rows)].map(|(encoding, rows)| {
            Weights::new(upload(gpu, &random.tensor(encoding, rows, cols)), rows, cols, encoding)
        });
        let values = random.values(cols);
        let group = encoding.tiles().unwrap().group();
        let (x_coded, x) = (quantised(gpu, &values, 1, cols, group), plane(gpu, &values));
        let stride = rows + float_rows;
        let [apart, together] = [false, true].map(|together| {
            let out = plane(gpu, &vec![0.5; stride]);
            let [first, second] = [0, rows].map(|offset| Columns { plane: out.clone(), stride, offset });
            let both =
                Beside::products(gpu, (&coded, &x_coded, &first), (&other, &x, &second)).unwrap().unwrap();
            let coded = CodedMatmul::new(gpu, &coded, &x_coded, &first).unwrap();
            let other = FloatMatmul::new(gpu, &other, &x, 1, &second).unwrap();
            run(gpu, |step| match together {
                true => both.record(step),
                false => {
                    coded.record(step, 1);
                    other.record(step, 1);
                }
            });
            bits(gpu, &out)
        });
        assert_eq!(apart, together, "{encoding}");
        assert!(!apart.contains(&0.5f32.to_bits()));
    }
}
