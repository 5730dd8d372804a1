// Float weights of any width: one load an element.
//
// Needs: const KIND: 0 f32, 1 f16, 2 bf16; memory_one.wgsl or memory_two.wgsl.

alias Word = u32;

@group(0) @binding(0) var<storage, read> stored: array<Word>;

// Bytes of what `stored` is an array of.
const UNIT: u32 = 4u;

fn weight(at: u32, i: u32) -> f32 {
    if (KIND == 0u) {
        return bitcast<f32>(word(at + i));
    }
    let bits = (word(at + i / 2u) >> (16u * (i & 1u))) & 0xffffu;
    if (KIND == 1u) {
        return unpack2x16float(bits).x;
    }
    return bitcast<f32>(bits << 16u);
}

// Columns `8 * eight ..+ 8` of a row, 0 past the end.
fn weights_eight(at: u32, row: u32, cols: u32, eight: u32) -> Eight {
    var out: Eight;
    for (var j = 0u; j < 4u; j++) {
        let col = 8u * eight + j;
        if (col < cols) { out.a[j] = weight(at, row * cols + col); }
        if (col + 4u < cols) { out.b[j] = weight(at, row * cols + col + 4u); }
    }
    return out;
}
