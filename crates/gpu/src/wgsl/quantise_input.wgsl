// Four columns of an f32 plane, 0 past its end.

@group(0) @binding(0) var<storage, read> x: array<f32>;

fn values_at(row: u32, column: u32) -> vec4<f32> {
    var values: vec4<f32>;
    for (var j = 0u; j < 4u; j++) {
        if (column + j < p.cols) {
            values[j] = x[row * p.cols + column + j];
        }
    }
    return values;
}
