// SwiGLU with the bits of kernels' `swiglu`: its own `exp`, in fused multiply-adds.
//
// Needs: quantise.wgsl (divide), fn fma4.

// e^x by Cody and Waite's reduction: x = n ln 2 + r, a polynomial of r, n into the exponent.
fn exponential(x: vec4<f32>) -> vec4<f32> {
    let shifted = fma4(x, vec4(1.44269502), vec4(12582912.0));
    // The integer is read off the bits: no compiler takes that sum apart.
    let n = vec4<f32>(bitcast<vec4<i32>>(shifted) - vec4(0x4b400000i));
    let r = fma4(n, vec4(0.00021219444), fma4(n, vec4(-0.693359375), x));
    var e = vec4(0.0014035525);
    e = fma4(e, r, vec4(0.0083723012));
    e = fma4(e, r, vec4(0.0416655503));
    e = fma4(e, r, vec4(0.166664883));
    e = fma4(e, r, vec4(0.5));
    e = fma4(e, r, vec4(1.0));
    e = fma4(e, r, vec4(1.0));
    let small = bitcast<vec4<f32>>(bitcast<vec4<u32>>(e) + (bitcast<vec4<u32>>(shifted) << vec4(23u)));
    // Infinite from 88.72284 on; a NaN stays one.
    let large = select(x * 3.0e38, small, x < vec4(88.7228394));
    return select(large, vec4(0.0), x < vec4(-87.3365402));
}

fn swiglu(gate: vec4<f32>, up: vec4<f32>) -> vec4<f32> {
    let under = vec4(1.0) + exponential(-gate);
    let silu = vec4(
        divide(gate.x, under.x),
        divide(gate.y, under.y),
        divide(gate.z, under.z),
        divide(gate.w, under.w),
    );
    return silu * up;
}
