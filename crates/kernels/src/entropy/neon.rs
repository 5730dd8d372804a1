//! NEON: a register holds 16 states, eight of each of two streams, whose bits are dealt out by halving three times.
//!
//! Sixteen registers of states are a step. Tables take sixteen of the 32 registers there are, so states and positions
//! are kept in memory between steps.

use std::arch::aarch64::*;
use std::arch::asm;

use smoe_format::entropy::{BLOCK_STATES, Block, STEP_BYTES, STREAMS};

use super::pairs;

/// A table of 128 bytes.
type Table = [uint8x16_t; 8];

#[inline]
#[target_feature(enable = "neon")]
fn table(bytes: &[u8; 128]) -> Table {
    let mut table = [vdupq_n_u8(0); 8];
    for (register, bytes) in table.iter_mut().zip(bytes.as_chunks::<16>().0) {
        // SAFETY: 16 bytes.
        *register = unsafe { vld1q_u8(bytes.as_ptr()) };
    }
    table
}

/// Looks up 16 states in two tables. `tbl` knows 64 bytes and gives 0 for what is too large; `tbx`, with the states less
/// 64, which wrap where they are below, gives what was there.
///
/// By hand, as the intrinsics leave it to the compiler where tables are, which then moves them about in the loop
/// (EXP-KERNEL-13).
#[inline]
#[target_feature(enable = "neon")]
fn look_up(tables: &[Table; 2], states: uint8x16_t) -> [uint8x16_t; 2] {
    let less_64 = vsubq_u8(states, vdupq_n_u8(64));
    let [a, b] = tables;
    let (first, second);
    // SAFETY: the feature is there; registers only.
    unsafe {
        asm!(
            "tbl {first:v}.16b, {{v16.16b-v19.16b}}, {states:v}.16b",
            "tbl {second:v}.16b, {{v24.16b-v27.16b}}, {states:v}.16b",
            "tbx {first:v}.16b, {{v20.16b-v23.16b}}, {less_64:v}.16b",
            "tbx {second:v}.16b, {{v28.16b-v31.16b}}, {less_64:v}.16b",
            first = out(vreg) first,
            second = out(vreg) second,
            states = in(vreg) states,
            less_64 = in(vreg) less_64,
            in("v16") a[0], in("v17") a[1], in("v18") a[2], in("v19") a[3],
            in("v20") a[4], in("v21") a[5], in("v22") a[6], in("v23") a[7],
            in("v24") b[0], in("v25") b[1], in("v26") b[2], in("v27") b[3],
            in("v28") b[4], in("v29") b[5], in("v30") b[6], in("v31") b[7],
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    [first, second]
}

/// The next bits of two streams, `less` of them less than 0 to each of their states in turn: in the lowest bits of a
/// byte, below others.
#[inline]
#[target_feature(enable = "neon")]
fn deal(streams: uint64x2_t, less: int8x16_t) -> (uint8x16_t, int64x2_t) {
    // Of two, four and eight states. A shift by a lane looks at the lowest byte of it, the sum of its lower half, and is
    // one to the right as that is below 0. What is shifted is the upper half's.
    let of_two = vpaddlq_s8(less);
    let of_four = vpaddlq_s16(of_two);
    let of_eight = vpaddlq_s32(of_four);
    let upper = vshlq_u64(streams, vreinterpretq_s64_s32(of_four));
    let fours = vtrn1q_u32(vreinterpretq_u32_u64(streams), vreinterpretq_u32_u64(upper));
    let upper = vshlq_u32(fours, vreinterpretq_s32_s16(of_two));
    let twos = vtrn1q_u16(vreinterpretq_u16_u32(fours), vreinterpretq_u16_u32(upper));
    let upper = vshlq_u16(twos, vreinterpretq_s16_s8(less));
    (vtrn1q_u8(vreinterpretq_u8_u16(twos), vreinterpretq_u8_u16(upper)), of_eight)
}

/// The block must have slack.
#[target_feature(enable = "neon")]
pub(super) fn decode(block: &mut Block<'_>) -> bool {
    assert!(block.has_slack() && block.code_bytes.is_multiple_of(STEP_BYTES));
    assert!(block.code_bytes <= block.tile_bytes);
    // Bits below 0, in half a byte.
    let less = block.table.bits().map(|bits| (16 - bits) & 15);
    let tables = [table(&pairs(block.table.symbols(), &less)), table(block.table.base())];
    // Of as many bits as that half a byte is below 0.
    let masks = [0, 0, 0, 0, 0, 0, 0, 0, 0, 127, 63, 31, 15, 7, 3, 1];
    // SAFETY: 16 bytes.
    let masks = unsafe { vld1q_u8(masks.as_ptr()) };

    let bytes = block.bytes.as_ptr();
    let mut states = [[0u8; 16]; BLOCK_STATES / 16];
    states.as_flattened_mut().copy_from_slice(block.states);
    // In bits, of the streams of each register of states.
    let mut positions = [[0u64; 2]; STREAMS / 2];
    for (position, start) in positions.as_flattened_mut().iter_mut().zip(block.starts()) {
        *position = 8 * u64::from(start);
    }
    for tile in block.tiles.chunks_exact_mut(block.tile_bytes) {
        for out in tile[..block.code_bytes].as_chunks_mut::<STEP_BYTES>().0 {
            for (part, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
                let mut looked_up = [vdupq_n_u8(0); 2];
                for (half, looked_up) in looked_up.iter_mut().enumerate() {
                    // Of chain 2 * (part / 4) + half, which has four registers.
                    let register = 8 * (part / 4) + 4 * half + part % 4;
                    let (states, positions) = (&mut states[register], &mut positions[register]);
                    // SAFETY: 16 bytes each.
                    let (state, position) =
                        unsafe { (vld1q_u8(states.as_ptr()), vld1q_u64(positions.as_ptr())) };
                    // SAFETY: a stream starts within `bytes` and advances at most 56 bits a step; the block has
                    // slack for its last stream after all steps, and the eight bytes of this load.
                    let load =
                        |at: u64| unsafe { bytes.add(at as usize >> 3).cast::<u64>().read_unaligned() };
                    let windows =
                        vcombine_u64(vcreate_u64(load(positions[0])), vcreate_u64(load(positions[1])));
                    // At most 7 bits of misalignment and 8 x 7 of content: a window is enough.
                    let misaligned = vreinterpretq_s64_u64(vandq_u64(position, vdupq_n_u64(7)));
                    let windows = vshlq_u64(windows, vnegq_s64(misaligned));
                    let base;
                    [*looked_up, base] = look_up(&tables, state);
                    let mask = vqtbl1q_u8(masks, vshrq_n_u8::<4>(*looked_up));
                    let (fields, advance) = deal(windows, vshrq_n_s8::<4>(vreinterpretq_s8_u8(*looked_up)));
                    let position = vsubq_u64(position, vreinterpretq_u64_s64(advance));
                    // SAFETY: as above. The bits that a base leaves 0 are those that it wants.
                    unsafe {
                        vst1q_u8(states.as_mut_ptr(), vbslq_u8(mask, fields, base));
                        vst1q_u64(positions.as_mut_ptr(), position);
                    }
                }
                // SAFETY: 16 bytes. The low halves of both.
                unsafe { vst1q_u8(out.as_mut_ptr(), vsliq_n_u8::<4>(looked_up[0], looked_up[1])) };
            }
        }
    }
    let ended =
        positions.as_flattened().iter().zip(block.ends).all(|(at, end)| at.div_ceil(8) == u64::from(end));
    ended && states.as_flattened().iter().all(|&state| state == 0)
}
