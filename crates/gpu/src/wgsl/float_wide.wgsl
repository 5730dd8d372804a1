// Float weights whose rows are whole runs of eight columns: 16-byte loads.
//
// Needs: const KIND: 0 f32, 1 f16, 2 bf16; memory_one.wgsl or memory_two.wgsl.

alias Word = vec4<u32>;

@group(0) @binding(0) var<storage, read> stored: array<Word>;

// Bytes of what `stored` is an array of.
const UNIT: u32 = 16u;

fn two(halves: u32) -> vec2<f32> {
    if (KIND == 1u) {
        return unpack2x16float(halves);
    }
    return vec2(bitcast<f32>(halves << 16u), bitcast<f32>(halves & 0xffff0000u));
}

// Columns `8 * eight ..+ 8` of a row.
fn weights_eight(at: u32, row: u32, cols: u32, eight: u32) -> Eight {
    let i = row * (cols / 8u) + eight;
    if (KIND == 0u) {
        return Eight(bitcast<vec4<f32>>(word(at + 2u * i)), bitcast<vec4<f32>>(word(at + 2u * i + 1u)));
    }
    let w = word(at + i);
    return Eight(vec4(two(w.x), two(w.y)), vec4(two(w.z), two(w.w)));
}
