// Tiles of 32 rows, as all coded products have them: where their codes lie, and what becomes of integers.
//
// Needs: fn hide; consts LOW, HIGH (bits of the planes), TILE_GROUP, AFFINE, TABLE, LEAST (by which a table's levels are more than they
// are).

alias Word = vec4<u32>;

@group(0) @binding(0) var<storage, read> stored: array<Word>;

// 64-byte lines of the planes, and of the tile.
const LOW_LINES: u32 = TILE_GROUP * LOW / 16u;
const HIGH_LINES: u32 = TILE_GROUP * HIGH / 16u;
// As a divisor, if there is a high plane or none.
const HIGH_PLANE: u32 = max(HIGH_LINES, 1u);
const LINES: u32 = LOW_LINES + HIGH_LINES + 1u + AFFINE;
// 16-byte pieces of a tile.
const TILE: u32 = 4u * LINES;
// Runs of sixteen columns: one piece of activations.
const SPANS: u32 = TILE_GROUP / 16u;
const LOW_MASK: u32 = ((1u << LOW) - 1u) * 0x01010101u;
const HIGH_MASK: u32 = ((1u << HIGH) - 1u) * 0x01010101u;
// The largest code, and its reciprocal, rounded once.
const MOST: i32 = (1i << (LOW + HIGH)) - 1i;
const INVERSE: f32 = 1.0 / f32(MOST);

fn dot4(codes: vec4<u32>, x: u32) -> vec4<i32> {
    return vec4(
        dot4I8Packed(codes.x, x),
        dot4I8Packed(codes.y, x),
        dot4I8Packed(codes.z, x),
        dot4I8Packed(codes.w, x),
    );
}

// The factor of a group: its scale of activations, over the largest code where codes are symmetric (rounded once: Markstein).
fn factor_of(cell: vec2<u32>) -> f32 {
    let scale = bitcast<f32>(cell.x);
    if (AFFINE == 1u || TABLE == 1u) {
        return scale;
    }
    let inverse = hide(INVERSE);
    let q = scale * inverse;
    return fma(fma(-q, hide(f32(MOST)), scale), inverse, q);
}

// What integers of raw codes become: 8-bit ones were taken less 128, symmetric ones count from the middle, levels from LEAST.
fn times_of() -> i32 {
    return select(1i, 2i, AFFINE == 0u && TABLE == 0u);
}

fn shift_of(sum: i32) -> i32 {
    if (TABLE == 1u) {
        return -i32(LEAST) * sum;
    }
    let shift = select(0i, 128i * sum, LOW == 8u);
    return select(shift, 2i * shift - MOST * sum, AFFINE == 0u);
}

// The line of the low plane that has a unit, four columns of all rows; rows from 16 on if `half` is 1. Only whole bytes have a line for
// either half.
fn low_line(unit: u32, half: u32) -> u32 {
    return select(unit % LOW_LINES, 2u * unit + half, LOW == 8u);
}

fn high_line(unit: u32) -> u32 {
    return LOW_LINES + unit % HIGH_PLANE;
}

// The codes of a unit of four rows, of those 16 below if `half` is 1, from its lines of either plane; 8-bit ones less 128.
fn codes_of(low: vec4<u32>, high: vec4<u32>, unit: u32, half: u32) -> vec4<u32> {
    if (LOW == 8u) {
        return low ^ vec4(0x80808080u);
    }
    var out = (low >> vec4(LOW * (2u * (unit / LOW_LINES) + half))) & vec4(LOW_MASK);
    if (HIGH > 0u) {
        out |= ((high >> vec4(HIGH * (2u * (unit / HIGH_PLANE) + half))) & vec4(HIGH_MASK)) << vec4(LOW);
    }
    return out;
}
