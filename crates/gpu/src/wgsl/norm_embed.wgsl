// Rows of an embedding: a lane per four columns of a token. Workgroups: (columns, token).
//
// Needs: norm_float.wgsl, fn fma4, const ROWS, COLS, KIND (0 f32, 1 f16, 2 bf16, 3 codes), and of codes GROUP, GROUPS,
// LOW, HIGH (widths of their planes), MOST (the largest code), AFFINE, TILE and HIGH_AT and SCALES_AT (words
// of a tile, and where parts of it begin); the buffers table (u32), ids (u32) and out (f32).

struct Params { nan: u32, scale: f32, nothing: u32 }
var<immediate> p: Params;

/// One value of a row-major table.
fn plain(index: u32) -> f32 {
    if (KIND == 0u) {
        return bitcast<f32>(table[index]);
    }
    let half = (table[index / 2u] >> (16u * (index % 2u))) & 0xffffu;
    if (KIND == 1u) {
        return of_half(half);
    }
    return bitcast<f32>(half << 16u);
}

/// The bits that a plane of `width` at word `at` holds of four neighbouring codes of a row, a byte each.
fn bits_of(at: u32, width: u32, unit: u32, row: u32) -> u32 {
    if (width == 8u) {
        return table[at + 16u * (2u * unit + row / 16u) + row % 16u];
    }
    let lines = max(GROUP * width / 16u, 1u);
    let word = table[at + 16u * (unit % lines) + row % 16u];
    let field = 2u * (unit / lines) + row / 16u;
    return (word >> (field * width)) & (0x01010101u * ((1u << width) - 1u));
}

fn scale_of(at: u32, row: u32) -> f32 {
    return of_half((table[at + row / 2u] >> (16u * (row % 2u))) & 0xffffu);
}

/// Four neighbouring columns of a row of tiles.
fn decoded(id: u32, chunk: u32) -> vec4<f32> {
    let column = 4u * chunk;
    let tile = ((id / 32u) * GROUPS + column / GROUP) * TILE;
    let unit = (column % GROUP) / 4u;
    let row = id % 32u;
    var word = bits_of(tile, LOW, unit, row);
    if (HIGH > 0u) {
        word |= bits_of(tile + HIGH_AT, HIGH, unit, row) << LOW;
    }
    let codes = (vec4(word) >> vec4(0u, 8u, 16u, 24u)) & vec4(0xffu);
    let scale = scale_of(tile + SCALES_AT, row);
    if (AFFINE) {
        return fma4(vec4<f32>(codes), vec4(scale), vec4(scale_of(tile + SCALES_AT + 16u, row)));
    }
    return vec4<f32>(2i * vec4<i32>(codes) - vec4(i32(MOST))) * divide(scale, f32(MOST));
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let chunk = wg.x * 64u + lane;
    if (4u * chunk >= COLS) {
        return;
    }
    let id = ids[wg.y];
    let count = min(4u, COLS - 4u * chunk);
    // No such row, as after logits that were not numbers: nor is its embedding.
    var values = vec4(bitcast<f32>(p.nan));
    if (id < ROWS) {
        if (KIND == 3u) {
            values = decoded(id, chunk);
        } else {
            for (var i = 0u; i < count; i++) {
                values[i] = plain(id * COLS + 4u * chunk + i);
            }
        }
    }
    for (var i = 0u; i < count; i++) {
        out[wg.y * COLS + 4u * chunk + i] = values[i] * p.scale;
    }
}
