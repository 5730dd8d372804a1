// What the device's arithmetic is: quotients of pairs, and what a fused multiply-add leaves of a product.
//
// Needs: quantise.wgsl, const THREADS.

struct Params { nothing: u32 }
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read> pairs: array<vec2<f32>>;
@group(0) @binding(1) var<storage, read_write> out: array<vec2<f32>>;

@compute @workgroup_size(THREADS)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    let pair = pairs[id.x];
    // Zero unless the product inside is exact.
    let rest = fma(pair.x, pair.y, -(pair.x * pair.y));
    out[id.x] = vec2(divide(pair.x, pair.y), rest);
}
