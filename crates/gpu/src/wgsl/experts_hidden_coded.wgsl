// Four columns of what the activation makes of two f32 planes, 0 past their end.
//
// Needs: experts_glu.wgsl.

@group(0) @binding(0) var<storage, read> gate: array<f32>;
@group(0) @binding(1) var<storage, read> up: array<f32>;

fn values_at(row: u32, column: u32) -> vec4<f32> {
    var out: vec4<f32>;
    for (var j = 0u; j < 4u; j++) {
        if (column + j < p.cols) {
            let i = row * p.cols + column + j;
            out[j] = glu(gate[i], up[i]);
        }
    }
    return out;
}
