// Fused multiply-adds, where the device has them.

const PLAYED: bool = false;

fn fma2(a: vec2<f32>, b: vec2<f32>, c: vec2<f32>) -> vec2<f32> {
    return fma(a, b, c);
}

fn fma4(a: vec4<f32>, b: vec4<f32>, c: vec4<f32>) -> vec4<f32> {
    return fma(a, b, c);
}
