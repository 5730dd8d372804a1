// SwiGLU with the bits of kernels' `swiglu`.
//
// Needs: quantise.wgsl (divide), exp.wgsl.

fn silu(x: f32) -> f32 {
    return divide(x, 1.0 + exponential(-x));
}

fn swiglu(gate: vec4<f32>, up: vec4<f32>) -> vec4<f32> {
    return vec4(silu(gate.x), silu(gate.y), silu(gate.z), silu(gate.w)) * up;
}
