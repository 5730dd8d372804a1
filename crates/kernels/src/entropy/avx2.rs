//! AVX2 with BMI2: a register holds 32 states, eight of each of four streams; `pdep` deals out their bits.

use std::arch::x86_64::*;

use smoe_format::entropy::{Block, STEP_BYTES, STREAMS};

use super::pairs;

/// A table of 128 bytes for `vpshufb`, which knows 16: part k is looked up with the states less 16 k. A state that
/// is too large by then gives some entry all the same, one below 0 gives 0; so each part holds the difference to the
/// part before, and the parts up to the right one add up, without carry, to the entry.
type Table = [__m128i; 8];

#[target_feature(enable = "avx2,bmi1,bmi2,popcnt")]
fn table(bytes: &[u8; 128]) -> Table {
    let mut parts = [_mm_setzero_si128(); 8];
    let mut before = _mm_setzero_si128();
    for (part, bytes) in parts.iter_mut().zip(bytes.as_chunks::<16>().0) {
        // SAFETY: 16 bytes.
        let here = unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) };
        *part = _mm_xor_si128(here, before);
        before = here;
    }
    parts
}

/// The block must have slack.
#[target_feature(enable = "avx2,bmi1,bmi2,popcnt")]
pub(super) fn decode(block: &mut Block<'_>) -> bool {
    assert!(block.has_slack() && block.code_bytes.is_multiple_of(STEP_BYTES));
    assert!(block.code_bytes <= block.tile_bytes);
    let codes = table(&pairs(block.table.symbols(), block.table.bits()));
    let bases = table(block.table.base());
    let masks =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 3, 7, 15, 31, 63, 127, 0, 0, 0, 0, 0, 0, 0, 0));
    let low_half = _mm256_set1_epi8(15);
    let sixteen = _mm256_set1_epi8(16);

    let bytes = block.bytes.as_ptr();
    let mut positions = block.starts().map(|start| 8 * start as usize);
    // Of four streams each.
    let mut states = [_mm256_setzero_si256(); STREAMS / 4];
    for (state, bytes) in states.iter_mut().zip(block.states.as_chunks::<32>().0) {
        // SAFETY: 32 bytes.
        *state = unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) };
    }
    for tile in block.tiles.chunks_exact_mut(block.tile_bytes) {
        for out in tile[..block.code_bytes].as_chunks_mut::<STEP_BYTES>().0 {
            for (part, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
                let mut emitted = [_mm256_setzero_si256(); 2];
                for (half, emitted) in emitted.iter_mut().enumerate() {
                    // Chain 2 * (part / 2) + half, and of that the lower or the upper four streams.
                    let quarter = 4 * (part / 2) + 2 * half + part % 2;
                    let mut state = states[quarter];
                    let part_of = |table: &Table, k: usize, state| {
                        _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table[k]), state)
                    };
                    let (mut looked_up, mut base) = (part_of(&codes, 0, state), part_of(&bases, 0, state));
                    for k in 1..8 {
                        state = _mm256_sub_epi8(state, sixteen);
                        looked_up = _mm256_xor_si256(looked_up, part_of(&codes, k, state));
                        base = _mm256_xor_si256(base, part_of(&bases, k, state));
                    }
                    *emitted = _mm256_and_si256(looked_up, low_half);
                    let wanted = _mm256_and_si256(_mm256_srli_epi16::<4>(looked_up), low_half);
                    let mask = _mm256_shuffle_epi8(masks, wanted);
                    let lanes = [
                        _mm256_extract_epi64::<0>(mask),
                        _mm256_extract_epi64::<1>(mask),
                        _mm256_extract_epi64::<2>(mask),
                        _mm256_extract_epi64::<3>(mask),
                    ];
                    let mut fields = [0; 4];
                    for ((field, lane), position) in
                        fields.iter_mut().zip(lanes).zip(&mut positions[4 * quarter..])
                    {
                        // SAFETY: a stream starts within `bytes` and advances at most 56 bits a step; the block has
                        // slack for its last stream after all steps, and the eight bytes of this load.
                        let window = unsafe { bytes.add(*position >> 3).cast::<u64>().read_unaligned() };
                        *field = _pdep_u64(u64::from_le(window) >> (*position & 7), lane as u64) as i64;
                        *position += lane.count_ones() as usize;
                    }
                    let fields = _mm256_setr_epi64x(fields[0], fields[1], fields[2], fields[3]);
                    states[quarter] = _mm256_add_epi8(base, fields);
                }
                let both = _mm256_or_si256(emitted[0], _mm256_slli_epi16::<4>(emitted[1]));
                // SAFETY: `out` is 32 bytes.
                unsafe { _mm256_storeu_si256(out.as_mut_ptr().cast(), both) };
            }
        }
    }
    let ended = positions.iter().zip(block.ends).all(|(&at, end)| at.div_ceil(8) == end as usize);
    let left = states.iter().fold(_mm256_setzero_si256(), |all, &state| _mm256_or_si256(all, state));
    ended && _mm256_testz_si256(left, left) == 1
}
