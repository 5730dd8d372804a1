// Outputs of attention are multiplied with sigmoids.
//
// Needs: exp.wgsl, quantise.wgsl (divide), const GATE_STRIDE (columns of a token), GATE_AT; fn gate_at(i).

/// What four outputs are multiplied with the sigmoids of.
fn gate_of(token: u32, chunk: u32) -> vec4<f32> {
    let at = token * GATE_STRIDE + GATE_AT + 4u * chunk;
    return vec4(gate_at(at), gate_at(at + 1u), gate_at(at + 2u), gate_at(at + 3u));
}

fn opened(gate: f32) -> f32 {
    return divide(1.0, 1.0 + exponential(-gate));
}

fn gated(x: vec4<f32>, gate: vec4<f32>) -> vec4<f32> {
    return x * vec4(opened(gate.x), opened(gate.y), opened(gate.z), opened(gate.w));
}
