// The operand of float.wgsl: rows of an f32 plane of whole runs of eight columns.

@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;

fn x_eight(token: u32, cols: u32, eight: u32) -> Eight {
    let i = 2u * (token * (cols / 8u) + eight);
    return Eight(x[i], x[i + 1u]);
}
