// SwiGLU with the bits of kernels' `glu`.
//
// Needs: quantise.wgsl (divide), exp.wgsl.

fn glu(gate: f32, up: f32) -> f32 {
    return divide(gate, 1.0 + exponential(-gate)) * up;
}
