// The operand of float.wgsl: rows of an f32 plane of any width.

@group(0) @binding(1) var<storage, read> x: array<f32>;

fn x_eight(token: u32, cols: u32, eight: u32) -> Eight {
    var out: Eight;
    for (var j = 0u; j < 4u; j++) {
        let col = 8u * eight + j;
        if (col < cols) { out.a[j] = x[token * cols + col]; }
        if (col + 4u < cols) { out.b[j] = x[token * cols + col + 4u]; }
    }
    return out;
}
