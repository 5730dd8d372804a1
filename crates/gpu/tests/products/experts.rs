//! Experts on a device against the CPU's kernels.

use smoe_format::spec::Activation;
use smoe_format::{Encoding, LayerTable, Table, TensorEntry, Zero};
use smoe_gpu::{
    CodedPlane, Down, ExpertInput, ExpertLayout, GateUp, Gpu, Hidden, Lanes, Tiling, Tuning, WorkList,
};
use smoe_kernels::{Activations, Shard};

use crate::common::Random;
use crate::{assert_same, coded, cpu_coded, device, floats, plane, quantised, run, scalar, tables, upload};

/// The records of a layer in slots, some of their bytes never used.
pub struct Layer {
    pub layout: ExpertLayout,
    table: LayerTable,
    pub slots: Vec<u8>,
    slot_bytes: usize,
    activation: Activation,
    /// Of 16 experts: gate's, up's and down's.
    biases: Option<Vec<f32>>,
}

impl Layer {
    pub fn new(
        encodings: [Encoding; 3],
        (d_model, d_ff): (usize, usize),
        slots: usize,
        random: &mut Random,
    ) -> Self {
        let shapes = [(d_ff, d_model), (d_ff, d_model), (d_model, d_ff)];
        let mut offset = 0;
        let tensors = std::array::from_fn(|i| {
            let (encoding, (rows, cols)) = (encodings[i], shapes[i]);
            let len = encoding.tensor_bytes(rows, cols).unwrap();
            let entry = TensorEntry { encoding, rows, cols, offset, len };
            offset = (offset + len).next_multiple_of(64);
            entry
        });
        let slot_bytes = offset + 128;
        let table = LayerTable { layer: 0, n_experts: 16, record_len: offset, tensors };
        let mut bytes = vec![0xff; slots * slot_bytes];
        for slot in bytes.chunks_exact_mut(slot_bytes) {
            for tensor in &tensors {
                let values = random.tensor(tensor.encoding, tensor.rows, tensor.cols);
                slot[tensor.offset..tensor.offset + tensor.len].copy_from_slice(&values);
            }
        }
        let (layout, activation) = (ExpertLayout::new(&table, slot_bytes as u64), Activation::SwiGlu);
        Self { layout, table, slots: bytes, slot_bytes, activation, biases: None }
    }

    /// The same with biases, and the activation that GPT-OSS has, by a limit that many gates and ups pass.
    fn of_gpt_oss(mut self, random: &mut Random) -> Self {
        self.activation = Activation::ClampedSwiglu { alpha: 1.702, limit: 0.75 };
        self.layout = self.layout.activated(self.activation);
        self.biases = Some(random.values(16 * (2 * self.layout.d_expert() + self.layout.d_model())));
        self
    }

    /// An expert's bias of a projection.
    fn bias(&self, expert: usize, projection: usize) -> Option<&[f32]> {
        let (d, ff) = (self.layout.d_model(), self.layout.d_expert());
        let own = &self.biases.as_ref()?[expert * (2 * ff + d)..][projection * ff..];
        Some(&own[..self.table.tensors[projection].rows])
    }

    /// The product of the expert in a slot, its bias added.
    fn product(&self, slot: u32, expert: usize, projection: usize, x: &[f32]) -> Vec<f32> {
        let mut out = self.plain_product(slot, projection, x);
        let bias = self.bias(expert, projection);
        bias.into_iter().for_each(|bias| scalar().add_in_place(&mut out, bias));
        out
    }

    fn plain_product(&self, slot: u32, projection: usize, x: &[f32]) -> Vec<f32> {
        let tensor = &self.table.tensors[projection];
        let bytes = &self.slots[slot as usize * self.slot_bytes + tensor.offset..][..tensor.len];
        let (rows, cols) = (tensor.rows, tensor.cols);
        if is_coded(tensor.encoding) {
            return cpu_coded(tensor.encoding, bytes, (rows, cols), x, 1);
        }
        let mut out = vec![0.0; rows];
        scalar().float_matmul(bytes, tensor.encoding, cols, 0..rows, x, &mut Shard::new(&mut out, 1, rows));
        out
    }

    fn expected(&self, slot: u32, expert: usize, x: &[f32]) -> Vec<f32> {
        let (gate, up) = (self.product(slot, expert, 0, x), self.product(slot, expert, 1, x));
        let mut hidden = vec![0.0; gate.len()];
        scalar().glu(self.activation, &gate, &up, &mut hidden);
        self.product(slot, expert, 2, &hidden)
    }

    /// Runs `experts` (slot, pairs) of `tokens` tokens, and checks every row.
    fn check(
        &self,
        gpu: &Gpu,
        tokens: usize,
        top_k: usize,
        experts: &[(u32, Vec<u32>)],
        random: &mut Random,
        spoil: impl Fn(&mut Vec<f32>),
    ) {
        self.check_cut(gpu, tokens, top_k, experts, random, spoil, (None, None));
    }

    /// The same, a lone token's products cut as said.
    fn check_tuned(
        &self,
        gpu: &Gpu,
        tokens: usize,
        top_k: usize,
        experts: &[(u32, Vec<u32>)],
        random: &mut Random,
        spoil: impl Fn(&mut Vec<f32>),
        tuning: Option<Tuning>,
    ) {
        self.check_cut(gpu, tokens, top_k, experts, random, spoil, (tuning, None));
    }

    /// The same, and those of many tokens.
    fn check_cut<'a>(
        &self,
        gpu: &Gpu,
        tokens: usize,
        top_k: usize,
        experts: &'a [(u32, Vec<u32>)],
        random: &mut Random,
        spoil: impl Fn(&mut Vec<f32>),
        (tuning, tiling): (Option<Tuning>, Option<Tiling>),
    ) {
        let (d_model, all_coded) =
            (self.layout.d_model(), self.table.tensors.iter().all(|t| is_coded(t.encoding)));
        let mut x = random.values(tokens * d_model);
        spoil(&mut x);
        let planes: Vec<CodedPlane> =
            [16, 32, 64, 128].map(|group| quantised(gpu, &x, tokens, d_model, group)).into();
        let planes: Vec<&CodedPlane> = planes.iter().collect();
        let x_float = plane(gpu, &x);
        let input = ExpertInput { coded: &planes, float: Some(&x_float) };
        let list = WorkList::new(gpu, &self.layout, tokens, top_k).unwrap();
        let hidden = Hidden::new(gpu, &self.layout, list.most_pairs()).unwrap();
        let poison = 0x7fc0_1234u32;
        let y = upload(gpu, &poison.to_le_bytes().repeat(list.most_pairs() * d_model));
        let layout = match &self.biases {
            Some(biases) => &self.layout.clone().biased(plane(gpu, biases)),
            None => &self.layout,
        };
        // Every second expert of the list lies in a second memory, whose slots are further apart.
        let is_behind = |i: usize| i % 2 == 1 && experts[i].0 != WorkList::ABSENT;
        let entry = |(i, (slot, pairs)): (usize, &'a (u32, Vec<u32>))| {
            (*slot + if is_behind(i) { WorkList::BEHIND } else { 0 }, i as u32, &pairs[..])
        };
        list.write(gpu, tokens, &experts.iter().enumerate().map(entry).collect::<Vec<_>>());
        let behind_bytes = self.slot_bytes + 192;
        let (mut near, mut behind) = (self.slots.clone(), Vec::new());
        for (slot, bytes) in near.chunks_exact_mut(self.slot_bytes).enumerate() {
            behind.extend_from_slice(bytes);
            behind.resize((slot + 1) * behind_bytes, 0xff);
            if experts.iter().enumerate().any(|(i, of)| is_behind(i) && of.0 as usize == slot) {
                bytes.fill(0xff);
            }
        }
        let layout = &layout.clone().and_behind(upload(gpu, &behind), behind_bytes as u64);
        let slots = upload(gpu, &near);
        let gate_up = GateUp::tuned(gpu, layout, &slots, &list, &input, &hidden, tuning, tiling).unwrap();
        let down = Down::tuned(gpu, layout, &slots, &list, &hidden, &y, tuning, tiling).unwrap();
        // Again, as each must leave everything ready for the next time.
        for _ in 0..2 {
            run(gpu, |step| {
                gate_up.record(step, tokens);
                down.record(step, tokens);
            });
        }
        self.check_rows(&floats(gpu, &y), (tokens, top_k), experts, &x, all_coded, poison);
    }

    /// Checks every row of what was made of `experts`.
    fn check_rows(
        &self,
        found: &[f32],
        (tokens, top_k): (usize, usize),
        experts: &[(u32, Vec<u32>)],
        x: &[f32],
        all_coded: bool,
        poison: u32,
    ) {
        let d_model = self.layout.d_model();
        let mut seen = vec![false; tokens * top_k];
        for (expert, (slot, pairs)) in
            experts.iter().enumerate().filter(|(_, (slot, _))| *slot != WorkList::ABSENT)
        {
            for &pair in pairs {
                seen[pair as usize] = true;
                let token = pair as usize / top_k;
                let expected = self.expected(*slot, expert, &x[token * d_model..(token + 1) * d_model]);
                let found = &found[pair as usize * d_model..(pair as usize + 1) * d_model];
                let what = (self.table.tensors.map(|t| t.encoding), tokens, *slot, expert, pair);
                if all_coded {
                    assert_same(found, &expected, &what);
                } else {
                    let scale = expected.iter().fold(1.0f32, |m, v| m.max(v.abs()));
                    // A hidden value that rounds to the next code moves a sum by a code's worth.
                    let close =
                        |(f, e): (&f32, &f32)| (f - e).abs() <= 2e-2 * scale || f.is_nan() && e.is_nan();
                    assert!(found.iter().zip(&expected).all(close), "{what:?}\n{found:?}\n{expected:?}");
                }
            }
        }
        for (pair, row) in found.chunks(d_model).enumerate().filter(|(pair, _)| !seen[*pair]) {
            assert!(row.iter().all(|v| v.to_bits() == poison), "pair {pair}");
        }
    }
}

fn is_coded(encoding: Encoding) -> bool {
    !encoding.is_float()
}

pub fn q(bits: u8, group: usize, zero: Zero) -> Encoding {
    Encoding::Uniform(coded(bits, group, zero))
}

/// Every token's `top_k` experts among `slots`, by expert; some of them absent.
fn assignment(tokens: usize, top_k: usize, slots: u32, random: &mut Random) -> Vec<(u32, Vec<u32>)> {
    let mut experts = vec![Vec::new(); slots as usize + 2];
    for token in 0..tokens {
        let start = random.next() as usize;
        for j in 0..top_k {
            let expert = (start + j) % experts.len();
            experts[expert].push((token * top_k + j) as u32);
        }
    }
    let slot = |i: usize| if i < slots as usize { slots - 1 - i as u32 } else { WorkList::ABSENT };
    let all = experts.into_iter().enumerate().map(|(i, pairs)| (slot(i), pairs));
    all.filter(|(_, pairs)| !pairs.is_empty()).collect()
}

#[test]
fn coded_experts_have_the_cpus_bits() {
    let Some(gpu) = device() else { return };
    let mut random = Random(8);
    let q4 = q(4, 64, Zero::Symmetric);
    let layer = Layer::new([q4; 3], (200, 150), 4, &mut random);
    for tokens in [1, 2, 3, 21] {
        let experts = assignment(tokens, 3, 4, &mut random);
        layer.check(gpu, tokens, 3, &experts, &mut random, |_| {});
    }
}

#[test]
fn a_lone_tokens_hidden_values_are_quantised_by_down() {
    let Some(gpu) = device() else { return };
    let mut random = Random(28);
    let [q4, q8, q3] = [q(4, 64, Zero::Symmetric), q(8, 32, Zero::Symmetric), q(3, 128, Zero::Affine)];
    let table = Encoding::Table(tables()[0]);
    for (encodings, shape) in [
        ([q4; 3], (200, 152)),
        ([q4, q4, q8], (72, 96)),
        ([q8, q8, q3], (96, 260)),
        ([table, table, q4], (64, 700)),
    ] {
        let layer = Layer::new(encodings, shape, 4, &mut random);
        let experts = assignment(1, 5, 4, &mut random);
        layer.check(gpu, 1, 5, &experts, &mut random, |_| {});
        layer.check(gpu, 1, 5, &experts, &mut random, |x| x[shape.0 / 2] = f32::NAN);
    }
}

#[test]
fn a_lone_tokens_experts_have_the_cpus_bits_where_32_lanes_share_a_tile() {
    let Some(gpu) = device() else { return };
    let mut random = Random(29);
    let [q4, q8] = [q(4, 64, Zero::Symmetric), q(8, 64, Zero::Symmetric)];
    for (encodings, shape, threads, ahead) in [
        ([q4; 3], (200, 152), 128, 2),
        ([q4, q4, q8], (64 * 9, 96), 64, 2),
        ([q8, q8, q4], (96, 64 * 5), 256, 4),
    ] {
        let layer = Layer::new(encodings, shape, 4, &mut random);
        let experts = assignment(1, 5, 4, &mut random);
        let tuning = Some(Tuning { threads, lanes: Lanes::Wide(ahead) });
        layer.check_tuned(gpu, 1, 5, &experts, &mut random, |_| {}, tuning);
        layer.check_tuned(gpu, 1, 5, &experts, &mut random, |x| x[shape.0 / 2] = f32::NAN, tuning);
    }
}

/// Many pairs an expert: one of them more than an entry takes, some few, some absent.
#[test]
fn experts_of_many_tokens_share_tiles_and_have_the_cpus_bits() {
    let Some(gpu) = device() else { return };
    let mut random = Random(30);
    let [q4, q8, q3] = [q(4, 64, Zero::Symmetric), q(8, 64, Zero::Symmetric), q(3, 32, Zero::Affine)];
    let [mxfp4, nl, ..] = tables().map(Encoding::from);
    let tiling = |rows, tokens, lane_tokens, run| {
        Some(Tiling { rows, tokens, lane_rows: 8, lane_tokens, columns: 64, run })
    };
    for (encodings, shape, tokens, tiling) in [
        ([q4; 3], (200, 152), 70, None),
        ([q4, q4, q8], (72, 96), 150, tiling(128, 32, 4, 2)),
        ([mxfp4; 3], (96, 164), 70, None),
        // Groups of 16 and of 128 hidden values; some of the cuts do not fit, and go eight by eight.
        ([q3, q3, q(8, 16, Zero::Affine)], (130, 72), 70, tiling(64, 32, 8, 4)),
        ([q8, q8, q(4, 128, Zero::Symmetric)], (64, 330), 66, tiling(64, 16, 4, 1)),
        ([nl, nl, q4], (130, 70), 66, None),
        // Two projections of unlike encodings, and floats.
        ([q4, q8, q4], (72, 96), 66, None),
        ([Encoding::Bf16; 3], (72, 96), 66, None),
    ] {
        let layer = Layer::new(encodings, shape, 4, &mut random);
        let mut experts = assignment(tokens, 2, 4, &mut random);
        // The first has a pair of every token.
        let all: Vec<u32> = (0..tokens as u32).map(|token| 2 * token).collect();
        experts.iter_mut().for_each(|(_, pairs)| pairs.retain(|pair| pair % 2 == 1));
        experts[0].1 = all;
        experts.retain(|(_, pairs)| !pairs.is_empty());
        layer.check_cut(gpu, tokens, 2, &experts, &mut random, |_| {}, (None, tiling));
    }
    let taken = |name: &str| gpu.sources().iter().any(|(kernel, _)| kernel == name);
    assert!(taken("experts' gate and up, many tokens") && taken("experts' down, many tokens"));
    assert!(taken("experts' gate, many tokens") && taken("experts' up, many tokens"));
    // A token that is not finite, and biases with a clamped activation.
    let layer = Layer::new([mxfp4; 3], (96, 164), 4, &mut random).of_gpt_oss(&mut random);
    let experts = assignment(70, 4, 4, &mut random);
    layer.check(gpu, 70, 4, &experts, &mut random, |x| x[96 * 69 + 30] = f32::NAN);
}

#[test]
fn other_groups_of_down_are_whole_in_a_workgroup() {
    let Some(gpu) = device() else { return };
    let mut random = Random(9);
    let [mxfp4, nl, three, _] = tables().map(Encoding::from);
    let mixes = [
        ([mxfp4, mxfp4, nl], 3),
        // Other levels are another kernel.
        ([mxfp4, Encoding::from(Table::IQ4_NL), three], 2),
        ([q(4, 32, Zero::Affine), q(4, 32, Zero::Affine), q(6, 128, Zero::Symmetric)], 5),
        ([q(2, 64, Zero::Symmetric), q(2, 64, Zero::Symmetric), q(8, 16, Zero::Affine)], 1),
        ([q(3, 128, Zero::Symmetric), q(3, 128, Zero::Symmetric), q(4, 32, Zero::Symmetric)], 1),
    ];
    for (encodings, tokens) in mixes {
        let layer = Layer::new(encodings, (130, 330), 2, &mut random);
        let experts = assignment(tokens, 2, 2, &mut random);
        layer.check(gpu, tokens, 2, &experts, &mut random, |_| {});
    }
}

#[test]
fn experts_of_unlike_encodings_go_apart() {
    let Some(gpu) = device() else { return };
    let mut random = Random(10);
    let q4 = q(4, 64, Zero::Symmetric);
    let mixes = [
        [q(4, 32, Zero::Symmetric), q4, q4],
        [Encoding::Bf16; 3],
        [Encoding::F16, Encoding::F32, q4],
        [q4, q4, Encoding::Bf16],
    ];
    for (i, encodings) in mixes.into_iter().enumerate() {
        let layer = Layer::new(encodings, (72 + i, 96), 3, &mut random);
        let tokens = 1 + 2 * (i % 2);
        let experts = assignment(tokens, 2, 3, &mut random);
        layer.check(gpu, tokens, 2, &experts, &mut random, |_| {});
    }
}

#[test]
fn biases_and_a_clamped_activation_have_the_cpus_bits() {
    let Some(gpu) = device() else { return };
    let mut random = Random(12);
    let [mxfp4, ..] = tables().map(Encoding::from);
    let q4 = q(4, 64, Zero::Symmetric);
    // Rows that are no whole blocks; one kernel for gate and up, three, and floats.
    for (encodings, shape, all_tokens) in [
        ([mxfp4; 3], (130, 332), &[1usize, 3, 9][..]),
        ([q4; 3], (200, 152), &[1, 2]),
        ([mxfp4, q4, mxfp4], (96, 72), &[1, 4]),
        ([Encoding::Bf16; 3], (72, 96), &[1, 3]),
    ] {
        let layer = Layer::new(encodings, shape, 4, &mut random).of_gpt_oss(&mut random);
        for &tokens in all_tokens {
            let experts = assignment(tokens, 3, 4, &mut random);
            layer.check(gpu, tokens, 3, &experts, &mut random, |_| {});
        }
    }
    // 32 lanes a tile; and what is not a number stays so, whatever the bounds.
    let layer = Layer::new([q4; 3], (200, 152), 4, &mut random).of_gpt_oss(&mut random);
    let experts = assignment(1, 3, 4, &mut random);
    let tuning = Some(Tuning { threads: 128, lanes: Lanes::Wide(2) });
    layer.check_tuned(gpu, 1, 3, &experts, &mut random, |_| {}, tuning);
    layer.check_tuned(gpu, 1, 3, &experts, &mut random, |x| x[7] = f32::NAN, tuning);
}

#[test]
fn what_is_not_finite_reaches_all_of_its_tokens_experts() {
    let Some(gpu) = device() else { return };
    let mut random = Random(11);
    let q4 = q(4, 64, Zero::Symmetric);
    let layer = Layer::new([q4; 3], (128, 100), 3, &mut random);
    let experts = assignment(2, 2, 3, &mut random);
    layer.check(gpu, 2, 2, &experts, &mut random, |x| x[130] = f32::NAN);
}

/// Gates from far below to far above what `exp` can do, through weights of the identity.
#[test]
fn activations_have_the_cpus_bits_over_their_whole_range() {
    let Some(gpu) = device() else { return };
    for activation in [Activation::SwiGlu, Activation::ClampedSwiglu { alpha: 1.702, limit: 7.0 }] {
        assert_activation(gpu, activation);
    }
}

fn assert_activation(gpu: &Gpu, activation: Activation) {
    let d = 64;
    let one = Encoding::F32;
    let entry = |i: usize| {
        let encoding = if i < 2 { one } else { q(8, 16, Zero::Symmetric) };
        let len = encoding.tensor_bytes(d, d).unwrap();
        TensorEntry { encoding, rows: d, cols: d, offset: i * d * d * 4, len }
    };
    let table =
        LayerTable { layer: 0, n_experts: 1, record_len: 3 * d * d * 4, tensors: [0, 1, 2].map(entry) };
    let mut slot = vec![0u8; 3 * d * d * 4];
    for i in 0..d {
        for (matrix, value) in [(0, 1.0f32), (1, 0.75)] {
            let at = matrix * d * d * 4 + 4 * (i * d + i);
            slot[at..at + 4].copy_from_slice(&value.to_le_bytes());
        }
    }
    let layout = ExpertLayout::new(&table, slot.len() as u64).activated(activation);
    let tokens = 24;
    let x: Vec<f32> = (0..tokens * d)
        .map(|i| match i {
            0..1024 => i as f32 * 0.0927 - 47.3,
            1024..1280 => (i as f32 - 1024.0) * 0.35,
            _ => (i as f32 - 1408.0) * 1e-5,
        })
        .collect();
    let list = WorkList::new(gpu, &layout, tokens, 1).unwrap();
    let pairs: Vec<u32> = (0..tokens as u32).collect();
    list.write(gpu, tokens, &[(0, 0, &pairs)]);
    let hidden = Hidden::new(gpu, &layout, tokens).unwrap();
    let x_float = plane(gpu, &x);
    let input = ExpertInput { coded: &[], float: Some(&x_float) };
    let gate_up = GateUp::new(gpu, &layout, &upload(gpu, &slot), &list, &input, &hidden).unwrap();
    run(gpu, |step| gate_up.record(step, tokens));
    let ups: Vec<f32> = x.iter().map(|v| v * 0.75).collect();
    let mut values = vec![0.0; x.len()];
    scalar().glu(activation, &x, &ups, &mut values);
    let mut expected = Activations::with_capacity(tokens, d);
    expected.quantise(scalar(), &values, tokens, d, 16);
    let found = hidden.coded().expect("down is coded");
    let cells = floats(gpu, &found.cells);
    let codes = gpu.download(&found.codes).unwrap();
    for cell in 0..tokens * 4 {
        let (expected, scale, _) = expected.view().cell(cell / 4, cell % 4);
        assert_same(&[cells[2 * cell]], &[scale], &cell);
        let codes: Vec<i8> = codes[16 * cell..16 * (cell + 1)].iter().map(|&c| c as i8).collect();
        assert_eq!(codes, expected, "{cell}");
    }
}
