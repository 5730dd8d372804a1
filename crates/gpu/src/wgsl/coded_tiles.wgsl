// What coded.wgsl and coded_wide.wgsl have in common: tiles of 32 rows, and the runs of them that a workgroup has.
//
// Needs: consts LOW, HIGH (bits of the planes), TILE_GROUP, AFFINE, TABLE, LEAST (by which a table's levels are more than they are),
// TOKENS.

@group(0) @binding(0) var<storage, read> stored: array<vec4<u32>>;

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

struct Job {
    // The first tile, and the one that item `split` would follow, in pieces.
    at: u32,
    split_at: u32,
    split: u32,
    // Tiles of a block of rows, and in all.
    tiles: u32,
    items: u32,
    // Tokens, and their rows of the plane.
    count: u32,
    rows: array<u32, 8>,
}

fn dot4(codes: vec4<u32>, x: u32) -> vec4<i32> {
    return vec4(
        dot4I8Packed(codes.x, x),
        dot4I8Packed(codes.y, x),
        dot4I8Packed(codes.z, x),
        dot4I8Packed(codes.w, x),
    );
}

// A chain is sixteen lanes wide: (block of rows, token, pair of rows).
struct Chain {
    block: u32,
    token: u32,
    pair: u32,
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
