// Float weights whose rows are whole runs of eight columns: 16-byte loads.
//
// Needs: const KIND: 0 f32, 1 f16, 2 bf16.

@group(0) @binding(0) var<storage, read> matrix: array<vec4<u32>>;

// Bytes of what `matrix` is an array of.
const UNIT: u32 = 16u;

fn two(word: u32) -> vec2<f32> {
    if (KIND == 1u) {
        return unpack2x16float(word);
    }
    return vec2(bitcast<f32>(word << 16u), bitcast<f32>(word & 0xffff0000u));
}

// Columns `8 * eight ..+ 8` of a row.
fn weights_eight(at: u32, row: u32, cols: u32, eight: u32) -> Eight {
    let i = row * (cols / 8u) + eight;
    if (KIND == 0u) {
        return Eight(bitcast<vec4<f32>>(matrix[at + 2u * i]), bitcast<vec4<f32>>(matrix[at + 2u * i + 1u]));
    }
    let w = matrix[at + i];
    return Eight(vec4(two(w.x), two(w.y)), vec4(two(w.z), two(w.w)));
}
