// Rows of halves.

const PARTS: u32 = 2u;

/// The elements in sixteen bytes of a key.
fn widen_key(k: vec4<u32>) -> array<vec4<f32>, PARTS> {
    return array<vec4<f32>, PARTS>(widen_value(k.xy), widen_value(k.zw));
}

/// Four elements of a value.
fn widen_value(v: vec2<u32>) -> vec4<f32> {
    return vec4(unpack2x16float(v.x), unpack2x16float(v.y));
}

/// What all elements of the row at `at` are multiplied with.
fn scale_of(at: u32) -> f32 {
    return 1.0;
}
