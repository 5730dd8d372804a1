// One coded matrix times f32 tokens, each weight decoded as the format defines it: for exactness, not speed.
// A workgroup has a block of 32 rows, a token and a head (of one, unless there is a matrix for each of them); lane
// `32 * part + row` takes every PARTS-th group. Workgroups: (blocks of a head's rows, token, head).
//
// Needs: quantise.wgsl (divide), consts LOW, HIGH, TILE_GROUP, AFFINE, HEADS.

struct Params { rows: u32, cols: u32, tiles: u32, stride: u32, offset: u32, nothing: u32 }
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read> weights: array<u32>;
@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<storage, read_write> out: array<f32>;

const PARTS: u32 = 8u;
const LOW_LINES: u32 = TILE_GROUP * LOW / 16u;
const HIGH_LINES: u32 = TILE_GROUP * HIGH / 16u;
const HIGH_PLANE: u32 = max(HIGH_LINES, 1u);
const LOW_MASK: u32 = ((1u << LOW) - 1u) * 0x01010101u;
const HIGH_MASK: u32 = ((1u << HIGH) - 1u) * 0x01010101u;
const MOST: u32 = (1u << (LOW + HIGH)) - 1u;
// Words of the planes, and of a tile.
const CODES: u32 = 16u * (LOW_LINES + HIGH_LINES);
const TILE: u32 = CODES + 16u + 16u * AFFINE;

var<workgroup> parts: array<f32, 32u * PARTS>;

// The codes of four columns.
fn unit_codes(tile: u32, row: u32, unit: u32) -> u32 {
    let half = row >> 4u;
    let r = row & 15u;
    if (LOW == 8u) {
        return weights[tile + 32u * unit + 16u * half + r];
    }
    let low = weights[tile + 16u * (unit % LOW_LINES) + r];
    var out = (low >> (LOW * (2u * (unit / LOW_LINES) + half))) & LOW_MASK;
    if (HIGH > 0u) {
        let high = weights[tile + 16u * (LOW_LINES + unit % HIGH_PLANE) + r];
        out |= ((high >> (HIGH * (2u * (unit / HIGH_PLANE) + half))) & HIGH_MASK) << LOW;
    }
    return out;
}

fn half_at(word: u32, row: u32) -> f32 {
    let two = unpack2x16float(weights[word + (row >> 1u)]);
    return select(two.x, two.y, (row & 1u) == 1u);
}

@compute @workgroup_size(32u * PARTS)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let row = lane & 31u;
    let x_row = (wg.y * HEADS + wg.z) * p.cols;
    let block = wg.z * ((p.rows + 31u) / 32u) + wg.x;
    var acc = 0.0;
    for (var g = lane >> 5u; g < p.tiles; g += PARTS) {
        let tile = (block * p.tiles + g) * TILE;
        let scale = half_at(tile + CODES, row);
        var step = scale;
        var least = 0.0;
        if (AFFINE == 1u) {
            least = half_at(tile + CODES + 16u, row);
        } else {
            step = divide(scale, f32(MOST));
        }
        for (var unit = 0u; unit < TILE_GROUP / 4u; unit++) {
            let codes = unit_codes(tile, row, unit);
            for (var c = 0u; c < 4u; c++) {
                let col = g * TILE_GROUP + 4u * unit + c;
                if (col < p.cols) {
                    let code = (codes >> (8u * c)) & 0xffu;
                    var w = f32(2i * i32(code) - i32(MOST)) * step;
                    if (AFFINE == 1u) {
                        w = fma(f32(code), step, least);
                    }
                    acc = fma(w, x[x_row + col], acc);
                }
            }
        }
    }
    parts[lane] = acc;
    workgroupBarrier();
    let out_row = 32u * wg.x + row;
    if (lane < 32u && out_row < p.rows) {
        for (var part = 1u; part < PARTS; part++) {
            acc += parts[32u * part + row];
        }
        out[(wg.y * HEADS + wg.z) * p.stride + p.offset + out_row] = acc;
    }
}
