// Rows of f32.

const PARTS: u32 = 1u;

/// The elements in sixteen bytes of a key.
fn widen_key(k: vec4<u32>) -> array<vec4<f32>, PARTS> {
    return array<vec4<f32>, PARTS>(bitcast<vec4<f32>>(k));
}

/// Four elements of a value.
fn widen_value(v: vec4<u32>) -> vec4<f32> {
    return bitcast<vec4<f32>>(v);
}

/// What all elements of the row at `at` are multiplied with.
fn scale_of(at: u32) -> f32 {
    return 1.0;
}
