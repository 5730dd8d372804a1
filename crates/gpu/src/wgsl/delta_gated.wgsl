// The end of a gated delta net: a head's answers normed, and multiplied with SiLU of a gate. A team of lanes has a group of columns, each
// lane every TEAM-th vector of it.
//
// Needs: norm_float.wgsl (const GROUP, TEAM), exp.wgsl, const OWN (vectors of a workgroup, whole heads), VALUE_DIM; fn silu; the buffer
// weight (vec4<f32>).

const HEAD_CHUNKS: u32 = VALUE_DIM / 4u;

var<workgroup> squares: array<f32, OWN>;

/// The i-th vector of a lane, among those of the workgroup.
fn own_of(lane: u32, i: u32) -> u32 {
    return (lane / TEAM) * (GROUP / 4u) + TEAM * i + lane % TEAM;
}

fn add_square(own: u32, v: vec4<f32>) {
    squares[own] = fma(v.x, v.x, fma(v.y, v.y, fma(v.z, v.z, v.w * v.w)));
}

/// Once the squares of all of its head are there.
fn gated(own: u32, x: vec4<f32>, gate: vec4<f32>, eps: f32) -> vec4<f32> {
    var sums: array<f32, 4>;
    for (var c = 0u; c < HEAD_CHUNKS; c += 4u) {
        for (var j = 0u; j < 4u; j++) {
            sums[j] += squares[own / HEAD_CHUNKS * HEAD_CHUNKS + c + j];
        }
    }
    let all = (sums[0] + sums[2]) + (sums[1] + sums[3]);
    let inverse = inverse_rms(all, f32(VALUE_DIM), eps);
    let factor = vec4(silu(gate.x), silu(gate.y), silu(gate.z), silu(gate.w));
    return factor * (weight[own % HEAD_CHUNKS] * (x * vec4(inverse)));
}
