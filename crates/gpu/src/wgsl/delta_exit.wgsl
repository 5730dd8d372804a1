// What gated delta nets were asked, normed head by head and multiplied with SiLU of a gate: a team of lanes for a group of columns,
// which it may quantise. Workgroups: (groups of whole heads, token).
//
// Needs: delta_gated.wgsl with an OWN of THREADS * WORDS vectors and what that needs but silu, const VALUES (columns of all heads), THREADS, CELLS
// (groups of a token), STRIDE, GATE_AT (columns of the plane), PLANE, CODED; the buffers plane, found (vec4<f32>); fn store_mixed, store_codes.

struct Params { eps: f32, nothing: u32 }
var<immediate> p: Params;

fn silu(x: f32) -> f32 {
    return divide(x, 1.0 + exponential(-x));
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let token = wg.y;
    let group = wg.x * (THREADS / TEAM) + lane / TEAM;
    var x: array<vec4<f32>, WORDS>;
    var gates: array<vec4<f32>, WORDS>;
    for (var i = 0u; i < WORDS; i++) {
        let own = own_of(lane, i);
        let chunk = wg.x * OWN + own;
        x[i] = vec4(0.0);
        gates[i] = vec4(0.0);
        if (chunk < VALUES / 4u) {
            x[i] = found[token * (VALUES / 4u) + chunk];
            gates[i] = plane[(token * STRIDE + GATE_AT) / 4u + chunk];
        }
        add_square(own, x[i]);
    }
    workgroupBarrier();
    for (var i = 0u; i < WORDS; i++) {
        let own = own_of(lane, i);
        let chunk = wg.x * OWN + own;
        x[i] = gated(own, x[i], gates[i], p.eps);
        if (chunk >= VALUES / 4u) {
            x[i] = vec4(0.0);
        }
        if (PLANE && chunk < VALUES / 4u) {
            store_mixed(token, chunk, x[i]);
        }
    }
    if (CODED) {
        let coded = quantise(x);
        if (group < CELLS) {
            store_codes(token * CELLS + group, lane % TEAM, coded);
        }
    }
}
