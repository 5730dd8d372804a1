//! AVX-512 with VBMI: a register holds 64 states, eight of each of eight streams.

use std::arch::x86_64::*;

use smoe_format::entropy::{Block, STEP_BYTES};

use super::pairs;

/// Registers of states.
const CHAINS: usize = 4;

/// A table of 128 bytes in two registers.
type Table = [__m512i; 2];

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
fn table(bytes: &[u8; 128]) -> Table {
    // SAFETY: 128 bytes are two registers.
    unsafe { [_mm512_loadu_si512(bytes.as_ptr().cast()), _mm512_loadu_si512(bytes.as_ptr().add(64).cast())] }
}

/// Looks up 64 states; their highest bit does not count.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
fn look_up(table: Table, states: __m512i) -> __m512i {
    _mm512_permutex2var_epi8(table[0], states, table[1])
}

/// The block must have slack.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
pub(super) fn decode(block: &mut Block<'_>) -> bool {
    assert!(block.has_slack() && block.code_bytes.is_multiple_of(STEP_BYTES));
    assert!(block.code_bytes <= block.tile_bytes);
    let (symbols, bits) = (block.table.symbols(), block.table.bits());
    // The code in the half of the byte where it goes, so that a chain's codes need no shift.
    let codes = [table(&pairs(symbols, bits)), table(&pairs(bits, symbols))];
    let bases = table(block.table.base());
    let masks = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 3, 7, 15, 31, 63, 127, 0, 0, 0, 0, 0, 0, 0, 0));
    let low_half = _mm512_set1_epi8(15);
    let misaligned = _mm512_set1_epi64(7);

    let starts = block.starts();
    let bytes = block.bytes.as_ptr();
    let mut states = [_mm512_setzero_si512(); CHAINS];
    let mut positions = [_mm512_setzero_si512(); CHAINS];
    for chain in 0..CHAINS {
        // SAFETY: 4 x 64 states; 4 x 8 starts of four bytes.
        let start = unsafe {
            states[chain] = _mm512_loadu_si512(block.states.as_ptr().add(64 * chain).cast());
            _mm256_loadu_si256(starts.as_ptr().add(8 * chain).cast())
        };
        positions[chain] = _mm512_slli_epi64::<3>(_mm512_cvtepu32_epi64(start));
    }
    for tile in block.tiles.chunks_exact_mut(block.tile_bytes) {
        for out in tile[..block.code_bytes].as_chunks_mut::<STEP_BYTES>().0 {
            for (pair, out) in out.as_chunks_mut::<64>().0.iter_mut().enumerate() {
                let mut emitted = [_mm512_setzero_si512(); 2];
                for (half, emitted) in emitted.iter_mut().enumerate() {
                    let chain = 2 * pair + half;
                    let (state, position) = (states[chain], positions[chain]);
                    // SAFETY: a stream starts within `bytes` and advances at most 56 bits a step; the block has
                    // slack for its last stream after all steps, and the eight bytes of this load.
                    let window = unsafe { gather(bytes, _mm512_srli_epi64::<3>(position)) };
                    // At most 7 bits of misalignment and 8 x 7 of content: a window is enough.
                    let window = _mm512_srlv_epi64(window, _mm512_and_si512(position, misaligned));
                    let looked_up = look_up(codes[half], state);
                    *emitted = looked_up;
                    let wanted = if half == 0 { _mm512_srli_epi16::<4>(looked_up) } else { looked_up };
                    let wanted = _mm512_and_si512(wanted, low_half);
                    // Sums of the bits wanted by the states up to and with this one, eight by eight.
                    let sum = _mm512_add_epi8(wanted, _mm512_slli_epi64::<8>(wanted));
                    let sum = _mm512_add_epi8(sum, _mm512_slli_epi64::<16>(sum));
                    let sum = _mm512_add_epi8(sum, _mm512_slli_epi64::<32>(sum));
                    let fields = _mm512_multishift_epi64_epi8(_mm512_slli_epi64::<8>(sum), window);
                    let mask = _mm512_shuffle_epi8(masks, wanted);
                    // base | (fields & mask): the bits that a base leaves 0 are those that it wants.
                    states[chain] = _mm512_ternarylogic_epi32::<0xf8>(look_up(bases, state), fields, mask);
                    positions[chain] = _mm512_add_epi64(position, _mm512_srli_epi64::<56>(sum));
                }
                let both = _mm512_ternarylogic_epi32::<0xca>(low_half, emitted[0], emitted[1]);
                // SAFETY: `out` is 64 bytes.
                unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), both) };
            }
        }
    }
    let mut whole = true;
    for chain in 0..CHAINS {
        let ended = _mm512_srli_epi64::<3>(_mm512_add_epi64(positions[chain], misaligned));
        // SAFETY: 4 x 8 ends of four bytes.
        let ends = unsafe { _mm256_loadu_si256(block.ends.as_ptr().add(8 * chain).cast()) };
        whole &= _mm512_cmpneq_epi64_mask(ended, _mm512_cvtepu32_epi64(ends)) == 0;
        whole &= _mm512_test_epi8_mask(states[chain], states[chain]) == 0;
    }
    whole
}

/// Eight bytes at each of eight offsets.
///
/// # Safety
/// They are readable.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
unsafe fn gather(bytes: *const u8, offsets: __m512i) -> __m512i {
    // SAFETY: the caller's.
    unsafe { _mm512_i64gather_epi64::<1>(offsets, bytes.cast()) }
}
