// The clamped SwiGLU with the bits of kernels' `glu`: a gate is at most LIMIT, an up from -LIMIT to LIMIT.
//
// Needs: quantise.wgsl (divide), exp.wgsl, consts ALPHA, LIMIT (above zero): bits of f32.

// Compares bits, as a comparison with NaN may be assumed away: beyond the bound is what has its sign and a larger magnitude,
// up to infinity.
fn bounded(x: f32, bound: u32) -> f32 {
    let bits = bitcast<u32>(x);
    let is_beyond = bits > bound && bits <= ((bound & 0x80000000u) | 0x7f800000u);
    return bitcast<f32>(select(bits, bound, is_beyond));
}

fn glu(gate: f32, up: f32) -> f32 {
    let g = bounded(gate, LIMIT);
    let u = bounded(bounded(up, LIMIT), LIMIT | 0x80000000u);
    return divide(g, 1.0 + exponential(-(bitcast<f32>(ALPHA) * g))) * (u + 1.0);
}
