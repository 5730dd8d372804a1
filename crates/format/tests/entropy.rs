//! Entropy-coded records: exact, as small as promised, and safe to decode whatever they say.

use proptest::prelude::*;
use smoe_format::entropy::{
    self, BLOCK_BYTES, Block, RECORD_HEAD_BYTES, SLACK, STATES, SYMBOLS, SymbolTable, decode_record,
    encode_record, estimated_bits, max_record_len,
};
use smoe_format::{Encoding, FormatError, LayerTable, TensorEntry, Uniform, Zero};

fn uniform(group: usize, zero: Zero) -> Encoding {
    Encoding::Uniform(Uniform::new(4, group, zero).expect("valid"))
}

/// A layer of three tensors of the given encodings and shapes, one after another.
fn layer(tensors: [(Encoding, usize, usize); 3]) -> LayerTable {
    let mut end = 0usize;
    let tensors = tensors.map(|(encoding, rows, cols)| {
        let len = encoding.tensor_bytes(rows, cols).expect("small");
        let offset = end.next_multiple_of(64);
        end = offset + len;
        TensorEntry { encoding, rows, cols, offset, len }
    });
    LayerTable { layer: 0, n_experts: 1, record_len: end.next_multiple_of(16384), tensors }
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// About normal, with the given deviation.
    fn normal(&mut self, sigma: f64) -> f64 {
        let sum: f64 = (0..12).map(|_| (self.next() >> 11) as f64 / (1u64 << 53) as f64).sum();
        (sum - 6.0) * sigma
    }
}

/// A record whose codes are normal with deviation `sigma` (in codes), with scales by row or by tile.
/// If by row, with some exceptions.
fn record(layer: &LayerTable, sigma: f64, by_row: bool, random: &mut Random) -> Vec<u8> {
    let mut tiles = vec![0; layer.record_len];
    for t in &layer.tensors {
        let Encoding::Uniform(u) = t.encoding else {
            tiles[t.offset..t.offset + t.len].fill_with(|| random.next() as u8);
            continue;
        };
        let groups = u.groups(t.cols);
        let mut tail = Vec::new();
        let tensor = &mut tiles[t.offset..t.offset + t.len];
        for (i, tile) in tensor.chunks_exact_mut(u.tile_bytes()).enumerate() {
            let (codes, rest) = tile.split_at_mut(u.code_bytes());
            let mut code = || (random.normal(sigma) + 8.0).clamp(0.0, 15.0) as u8;
            codes.fill_with(|| code() | code() << 4);
            if !by_row || i % groups == 0 {
                tail = (0..rest.len()).map(|_| random.next() as u8).collect();
            }
            rest.copy_from_slice(&tail);
            if random.next().is_multiple_of(5) {
                rest[random.next() as usize % 64] ^= random.next() as u8;
            }
        }
    }
    tiles
}

fn encoded(tiles: &[u8], layer: &LayerTable) -> Vec<u8> {
    let mut out = Vec::new();
    encode_record(tiles, layer, &mut out);
    assert!(out.len() <= max_record_len(layer));
    out
}

fn decoded(raw: &[u8], len: usize, layer: &LayerTable) -> Result<Vec<u8>, FormatError> {
    let mut slot = vec![0; layer.record_len];
    decode_record(raw, len, layer, &mut slot, by_definition).map(|()| slot)
}

fn by_definition(block: &mut Block<'_>) -> bool {
    block.decode()
}

/// The codes of a block by the letter of `docs/FORMAT.md`: bit by bit, a counter for everything.
fn decode_by_the_letter(job: &mut Block<'_>) -> bool {
    let symbols = job.table.symbols();
    let count = |s: u8, below: usize| symbols[..below].iter().filter(|&&other| other == s).count();
    let mut cursor: Vec<usize> = job.starts().iter().map(|&start| 8 * start as usize).collect();
    let mut states: Vec<usize> = job.states.iter().map(|&s| usize::from(s)).collect();
    let bit = |at: usize| job.bytes.get(at / 8).map_or(0, |byte| usize::from(byte >> (at % 8)) & 1);
    let mut codes = vec![0u8; 2 * 128 * job.steps()];
    for (n, code) in codes.iter_mut().enumerate() {
        let i = n % 256;
        let s = symbols[states[i]];
        let x = count(s, STATES) + count(s, states[i]);
        let mut next = x;
        let mut bits = 0;
        while next < STATES {
            next *= 2;
            bits += 1;
        }
        for b in 0..bits {
            next += bit(cursor[i / 8]) << b;
            cursor[i / 8] += 1;
        }
        states[i] = next - STATES;
        *code = s;
    }
    for (n, code) in codes.into_iter().enumerate() {
        let (t, i) = (n / 256, n % 256);
        let chain = i / 64;
        let byte = 128 * t + 64 * (chain / 2) + i % 64;
        let at = byte / job.code_bytes * job.tile_bytes + byte % job.code_bytes;
        job.tiles[at] = if chain.is_multiple_of(2) { code } else { job.tiles[at] | code << 4 };
    }
    cursor.iter().zip(job.ends).all(|(&at, end)| at.div_ceil(8) == end as usize)
        && states.iter().all(|&s| s == 0)
}

fn layers() -> impl Strategy<Value = LayerTable> {
    let tensor = prop_oneof![
        8 => (prop_oneof![Just(16usize), Just(32), Just(64), Just(128)], any::<bool>())
            .prop_map(|(g, affine)| uniform(g, if affine { Zero::Affine } else { Zero::Symmetric })),
        1 => Just(Encoding::Bf16),
        1 => Just(Encoding::Uniform(Uniform::new(3, 64, Zero::Symmetric).expect("valid"))),
    ];
    let shape = (tensor, 1usize..80, 1usize..300);
    (shape.clone(), shape.clone(), shape).prop_map(|(a, b, c)| layer([a, b, c]))
}

/// Parts ascend and cover the tensors, each byte once, and decoded from the `first` on they give the record or its refusal.
fn parts_are_the_record(layer: &LayerTable, raw: &[u8], first: usize) {
    let (len, n) = (raw.len(), entropy::n_parts(layer));
    assert!((3..=entropy::MAX_PARTS).contains(&n) && n.is_multiple_of(3));
    let (mut slot, mut covered, mut end) = (vec![0; layer.record_len], 0, 0);
    for i in 0..n {
        let part = entropy::part(layer, i);
        assert!(end <= part.slot.start, "part {i} of {n}");
        covered += part.slot.len();
        end = part.slot.end;
    }
    assert_eq!(covered, layer.tensors.iter().map(|t| t.len).sum::<usize>());
    let mut good = true;
    for i in (first..n).chain(0..first) {
        let part = entropy::part(layer, i);
        let out = &mut slot[part.slot.clone()];
        good &= entropy::decode_part(raw, len, layer, &part, out, by_definition).is_ok();
    }
    let whole = decoded(raw, len, layer);
    assert_eq!(good, whole.is_ok());
    assert!(whole.is_err() || whole.is_ok_and(|whole| whole == slot));
}

/// Tensors of several blocks are cut, beside others that are small or never coded.
#[test]
fn large_records_have_nine_parts_whatever_stands_beside() {
    let coded = uniform(64, Zero::Symmetric);
    let three = Encoding::Uniform(Uniform::new(3, 64, Zero::Symmetric).expect("valid"));
    let large = (coded, 1184, 1408);
    for tensors in [
        [large, large, (Encoding::Bf16, 96, 64)],
        [large, (three, 96, 64), large],
        [(coded, 40, 64), (Encoding::Bf16, 32, 64), large],
    ] {
        let layer = layer(tensors);
        assert_eq!(entropy::n_parts(&layer), entropy::MAX_PARTS);
        let mut raw = encoded(&record(&layer, 2.0, true, &mut Random(7)), &layer);
        for first in [0, 4, 8] {
            parts_are_the_record(&layer, &raw, first);
        }
        let middle = raw.len() / 2;
        raw[middle] ^= 0x55;
        parts_are_the_record(&layer, &raw, 2);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Parts cover the tensors, each byte once, and any order of them gives the record or its refusal.
    #[test]
    fn parts_are_the_record_in_any_order(
        layer in layers(),
        seed in 1u64..,
        damage in prop::option::of((any::<prop::sample::Index>(), any::<u8>())),
        order in any::<prop::sample::Index>(),
    ) {
        let mut raw = encoded(&record(&layer, 2.0, seed % 2 == 0, &mut Random(seed)), &layer);
        if let Some((at, value)) = damage {
            let at = at.index(raw.len());
            raw[at] = value;
        }
        parts_are_the_record(&layer, &raw, order.index(entropy::n_parts(&layer)));
    }

    #[test]
    fn a_record_comes_back_to_the_bit(
        layer in layers(),
        sigma in prop_oneof![Just(0.0), 0.1..1.0f64, 1.0..9.0f64],
        by_row: bool,
        seed in 1u64..,
    ) {
        let tiles = record(&layer, sigma, by_row, &mut Random(seed));
        let raw = encoded(&tiles, &layer);
        for decode in [by_definition, decode_by_the_letter] {
            let mut slot = vec![0x5a; layer.record_len];
            decode_record(&raw, raw.len(), &layer, &mut slot, decode).expect("own record");
            for t in &layer.tensors {
                let range = t.offset..t.offset + t.len;
                prop_assert!(slot[range.clone()] == tiles[range]);
            }
        }
    }

    /// Whatever is wrong with a record, decoding ends with a value; and what stands behind a record does not matter.
    #[test]
    fn a_hostile_record_is_an_error_or_tiles(
        seed in 1u64..,
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        cut in prop::option::of(any::<prop::sample::Index>()),
        head_only: bool,
    ) {
        let layer = layer([
            (uniform(64, Zero::Symmetric), 40, 200),
            (uniform(128, Zero::Affine), 33, 130),
            (Encoding::F16, 3, 5),
        ]);
        let mut random = Random(seed);
        let mut raw = encoded(&record(&layer, 2.0, seed.is_multiple_of(2), &mut random), &layer);
        for (at, value) in damage {
            let most = if head_only { RECORD_HEAD_BYTES + 600 } else { raw.len() };
            let at = at.index(most.min(raw.len()));
            raw[at] = value;
        }
        let len = cut.map_or(raw.len(), |cut| cut.index(raw.len()));
        let behind = |random: &mut Random| -> Vec<u8> {
            let slack = (0..SLACK).map(|_| random.next() as u8);
            raw[..len].iter().copied().chain(slack).collect()
        };
        let outcomes = [raw[..len].to_vec(), behind(&mut random), behind(&mut random)]
            .map(|raw| decoded(&raw, len, &layer).map_err(|e| e.to_string()));
        prop_assert_eq!(&outcomes[0], &outcomes[1]);
        prop_assert_eq!(&outcomes[1], &outcomes[2]);
    }

    #[test]
    fn a_body_of_noise_is_an_error_or_tiles(seed in 1u64.., fill in prop::option::of(any::<u8>())) {
        let layer = layer([(uniform(64, Zero::Symmetric), 64, 256); 3]);
        let mut random = Random(seed);
        let mut raw = encoded(&record(&layer, 2.0, true, &mut random), &layer);
        for byte in &mut raw[RECORD_HEAD_BYTES + 64 + 128..] {
            if seed.is_multiple_of(3) || random.next() % 16 < 3 {
                *byte = fill.unwrap_or(random.next() as u8);
            }
        }
        let _ = decoded(&raw, raw.len(), &layer);
    }
}

#[test]
fn every_truncation_is_an_error() {
    let layer = layer([(uniform(128, Zero::Symmetric), 32, 128); 3]);
    let raw = encoded(&record(&layer, 1.5, true, &mut Random(5)), &layer);
    assert!(decoded(&raw, raw.len(), &layer).is_ok());
    for len in 0..raw.len() {
        let error = decoded(&raw, len, &layer).expect_err("cut");
        assert!(matches!(error, FormatError::Coded { .. }), "{error}");
    }
}

#[test]
fn single_flipped_bits_of_a_block_are_nearly_always_noticed() {
    // The record's checksum is what guards; this is what a wrong record that passes it meets.
    let layer =
        layer([(uniform(128, Zero::Symmetric), 32, 512), (Encoding::F16, 1, 1), (Encoding::F16, 1, 1)]);
    let raw = encoded(&record(&layer, 2.0, true, &mut Random(9)), &layer);
    let part = u32::from_le_bytes([raw[4], raw[5], raw[6], raw[7]]) as usize;
    let body = RECORD_HEAD_BYTES + 64 + 64 + 8 + 64..RECORD_HEAD_BYTES + part;
    let (mut flips, mut missed) = (0, 0);
    for bit in (8 * body.start..8 * body.end).step_by(37) {
        let mut raw = raw.clone();
        raw[bit / 8] ^= 1 << (bit % 8);
        flips += 1;
        missed += u32::from(decoded(&raw, raw.len(), &layer).is_ok());
    }
    assert!(flips > 500 && missed * 5 < flips, "{missed} of {flips}");
}

#[test]
fn codes_of_weights_cost_little_more_than_their_entropy() {
    // 3 Mi codes a record, as of a model of 768 x 2048; the deviation in codes is 1 / step.
    let layer = layer([
        (uniform(128, Zero::Symmetric), 512, 2048),
        (uniform(128, Zero::Symmetric), 512, 2048),
        (uniform(128, Zero::Symmetric), 2048, 512),
    ]);
    for (step, most) in [(0.93, 1.012), (0.70, 1.012), (0.52, 1.012), (0.44, 1.009), (0.36, 1.006)] {
        let mut random = Random(77);
        let tiles = record(&layer, 1.0 / step, true, &mut random);
        let mut entropy = 0.0;
        let mut estimate = 0.0;
        for t in &layer.tensors {
            let mut counts = [0u64; SYMBOLS];
            for tile in tiles[t.offset..t.offset + t.len].chunks_exact(2112) {
                for byte in &tile[..2048] {
                    counts[usize::from(byte & 15)] += 1;
                    counts[usize::from(byte >> 4)] += 1;
                }
            }
            let total = counts.iter().sum::<u64>() as f64;
            let bits = |n: &u64| if *n == 0 { 0.0 } else { *n as f64 * (total / *n as f64).log2() };
            entropy += counts.iter().map(bits).sum::<f64>() / 8.0;
            estimate += estimated_bits(&counts) * total / 8.0;
        }
        let scales: usize = layer.tensors.iter().map(|t| t.rows.div_ceil(32) * 64).sum();
        let bytes = (encoded(&tiles, &layer).len() - scales) as f64;
        println!("step {step}: {:.4} x the entropy, estimated {:.4}", bytes / entropy, estimate / entropy);
        assert!(bytes / entropy < most, "step {step}: {}", bytes / entropy);
        assert!((bytes / estimate - 1.0).abs() < 0.003, "step {step}: {bytes} bytes, estimated {estimate}");
    }
}

#[test]
fn what_coding_would_lengthen_stays_as_it_is() {
    let layer = layer([(uniform(32, Zero::Symmetric), 8, 8); 3]);
    let tiles = record(&layer, 50.0, false, &mut Random(3));
    let raw = encoded(&tiles, &layer);
    assert_eq!(
        raw.len(),
        RECORD_HEAD_BYTES + 2 * layer.tensors[0].len.next_multiple_of(64) + layer.tensors[2].len
    );
    let slot = decoded(&raw, raw.len(), &layer).expect("own record");
    assert!(layer.tensors.iter().all(|t| slot[t.offset..][..t.len] == tiles[t.offset..][..t.len]));
}

#[test]
fn the_example_of_the_format_document() {
    // Half of the states stand for 7, a quarter for 8, the others for 6.
    let packed: [u8; 64] = std::array::from_fn(|i| {
        if i < 32 {
            0x77
        } else if i < 48 {
            0x88
        } else {
            0x66
        }
    });
    let table = SymbolTable::from_bytes(&packed);
    assert_eq!((table.symbols()[0], table.bits()[0], table.base()[0]), (7, 1, 0));
    assert_eq!((table.symbols()[63], table.bits()[63], table.base()[63]), (7, 1, 126));
    assert_eq!((table.symbols()[64], table.bits()[64], table.base()[64]), (8, 2, 0));
    assert_eq!((table.symbols()[95], table.bits()[95], table.base()[95]), (8, 2, 124));
    assert_eq!((table.symbols()[100], table.bits()[100], table.base()[100]), (6, 2, 16));
    assert_eq!((entropy::BLOCK_STATES, BLOCK_BYTES), (256, 128 << 10));
}
