// Rows of bytes, their scale in the last word.

const PARTS: u32 = 4u;

/// The elements in sixteen bytes of a key.
fn widen_key(k: vec4<u32>) -> array<vec4<f32>, PARTS> {
    return array<vec4<f32>, PARTS>(widen_value(k.x), widen_value(k.y), widen_value(k.z), widen_value(k.w));
}

/// Four elements of a value.
fn widen_value(v: u32) -> vec4<f32> {
    return vec4<f32>(unpack4xI8(v));
}

/// What all elements of the row at `at` are multiplied with.
fn scale_of(at: u32) -> f32 {
    return bitcast<f32>(keys[at + ROW - 1u].w);
}
