use proptest::prelude::*;
use smoe_format::entropy::{SLACK, encode_record};
use smoe_format::{Encoding, TensorEntry, Uniform, Zero};

use super::*;

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 16
    }
}

fn layer(rows: usize, cols: usize, groups: [usize; 3]) -> LayerTable {
    let mut end = 0;
    let tensors = groups.map(|group| {
        let zero = if group == 32 { Zero::Affine } else { Zero::Symmetric };
        let encoding = Encoding::Uniform(Uniform::new(4, group, zero).expect("valid"));
        let len = encoding.tensor_bytes(rows, cols).expect("small");
        let entry = TensorEntry { encoding, rows, cols, offset: end, len };
        end += len;
        entry
    });
    LayerTable { layer: 0, n_experts: 1, record_len: end.next_multiple_of(16384), tensors }
}

/// A record whose codes are bell-shaped, `dice` dice of them.
fn record(layer: &LayerTable, dice: u64, random: &mut Random) -> Vec<u8> {
    let mut tiles = vec![0; layer.record_len];
    let mut code = || (0..dice).map(|_| random.next() % 16).sum::<u64>() / dice.max(1);
    tiles.fill_with(|| (code() | code() << 4) as u8);
    let mut raw = Vec::new();
    encode_record(&tiles, layer, &mut raw);
    raw
}

fn decoders() -> Vec<EntropyDecoder> {
    let mut all: Vec<EntropyDecoder> = Kernels::available().into_iter().map(EntropyDecoder::new).collect();
    all.dedup();
    all
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Records as they should be, and damaged ones; with all the slack there can be, with some, with none.
    #[test]
    fn every_decoder_gives_the_tiles_and_the_verdict_of_the_definition(
        (rows, cols) in (1usize..100, 1usize..400),
        groups in prop::array::uniform3(prop_oneof![Just(16usize), Just(32), Just(64), Just(128)]),
        dice in 0u64..12,
        seed: u64,
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        slack in prop_oneof![Just(0), 0..SLACK, Just(SLACK)],
    ) {
        let layer = layer(rows, cols, groups);
        let mut random = Random(seed);
        let mut raw = record(&layer, dice, &mut random);
        let len = raw.len();
        damage.iter().for_each(|(at, value)| raw[at.index(len)] = *value);
        raw.extend((0..slack).map(|_| random.next() as u8));
        let mut expected = vec![0; layer.record_len];
        let verdict = decode_record(&raw, len, &layer, &mut expected, |b| b.decode()).map_err(|e| e.to_string());
        if damage.is_empty() {
            prop_assert_eq!(&verdict, &Ok(()));
        }
        for decoder in decoders() {
            let mut slot = vec![0; layer.record_len];
            let found = decoder.decode(&raw, len, &layer, &mut slot).map_err(|e| e.to_string());
            prop_assert_eq!(&found, &verdict, "{}", decoder);
            prop_assert!(found.is_err() || slot == expected, "{}", decoder);
        }
    }
}

/// Blocks of any content, tables of any states, streams that begin at the very end: nothing beyond the slack is
/// read. The bytes end where the slack does; under a sanitizer, or at the end of a page, more would be noticed, and
/// everywhere the verdicts must agree.
#[test]
fn hostile_blocks_read_no_further_than_the_slack() {
    use smoe_format::entropy::{BLOCK_BYTES, BLOCK_STATES, STREAMS, SymbolTable};
    let mut random = Random(3);
    for round in 0..60 {
        let fill = [None, Some(0xff), Some(0)][round % 3];
        let mut byte = || fill.unwrap_or(random.next() as u8);
        let own = 4096;
        let bytes: Vec<u8> = (0..own + SLACK).map(|_| byte()).collect();
        let few = round % 4 == 0;
        let table = SymbolTable::from_bytes(&std::array::from_fn(|i| {
            if few { u8::from(i == round) } else { random.next() as u8 }
        }));
        let states: [u8; BLOCK_STATES] = std::array::from_fn(|_| random.next() as u8 & 127);
        let mut ends: [u32; STREAMS] = std::array::from_fn(|_| (random.next() % (own as u64 + 1)) as u32);
        ends.sort_unstable();
        if round % 2 == 0 {
            ends = [own as u32; STREAMS];
        }
        let (tile_bytes, code_bytes) = (2112, 2048);
        let mut results = decoders().into_iter().map(|decoder| {
            let mut tiles = vec![0; BLOCK_BYTES / code_bytes * tile_bytes];
            let mut block = Block {
                table: &table,
                bytes: &bytes,
                ends,
                states: &states,
                tiles: &mut tiles,
                tile_bytes,
                code_bytes,
            };
            assert!(block.has_slack());
            let verdict = decoder.block(&mut block);
            (verdict, tiles)
        });
        let first = results.next().expect("scalar");
        assert!(results.all(|other| other == first), "round {round}");
    }
}

#[test]
fn every_path_is_known_by_name() {
    let names: Vec<String> = decoders().iter().map(ToString::to_string).collect();
    assert_eq!(names[0], "scalar");
    #[cfg(target_arch = "x86_64")]
    for kernels in Kernels::available() {
        let vbmi = is_x86_feature_detected!("avx512vbmi");
        if kernels.isa() == Isa::Avx512 && vbmi {
            assert!(names.contains(&"avx512".to_owned()));
        }
    }
}
