// What gated delta nets were asked, normed head by head and multiplied with SiLU of a gate: a team of lanes for a group of columns,
// which it may quantise. Workgroups: (groups of whole heads, token).
//
// Needs: norm_float.wgsl (const GROUP, TEAM), exp.wgsl, const VALUES (columns of all heads), VALUE_DIM, THREADS, CELLS (groups of a
// token), STRIDE, GATE_AT (columns of the plane), PLANE, CODED; the buffers plane, found, weight (vec4<f32>); fn store_mixed, store_codes.

struct Params { eps: f32, nothing: u32 }
var<immediate> p: Params;

const CHUNKS: u32 = VALUE_DIM / 4u;
// Vectors of a workgroup.
const OWN: u32 = THREADS * WORDS;

var<workgroup> squares: array<f32, OWN>;

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
        let own = (lane / TEAM) * (GROUP / 4u) + TEAM * i + lane % TEAM;
        let chunk = wg.x * OWN + own;
        x[i] = vec4(0.0);
        gates[i] = vec4(0.0);
        if (chunk < VALUES / 4u) {
            x[i] = found[token * (VALUES / 4u) + chunk];
            gates[i] = plane[(token * STRIDE + GATE_AT) / 4u + chunk];
        }
        let v = x[i];
        squares[own] = fma(v.x, v.x, fma(v.y, v.y, fma(v.z, v.z, v.w * v.w)));
    }
    workgroupBarrier();
    for (var i = 0u; i < WORDS; i++) {
        let own = (lane / TEAM) * (GROUP / 4u) + TEAM * i + lane % TEAM;
        let chunk = wg.x * OWN + own;
        var sums: array<f32, 4>;
        for (var c = 0u; c < CHUNKS; c += 4u) {
            for (var j = 0u; j < 4u; j++) {
                sums[j] += squares[own / CHUNKS * CHUNKS + c + j];
            }
        }
        let all = (sums[0] + sums[2]) + (sums[1] + sums[3]);
        let inverse = inverse_rms(all, f32(VALUE_DIM), p.eps);
        let gate = vec4(silu(gates[i].x), silu(gates[i].y), silu(gates[i].z), silu(gates[i].w));
        x[i] = gate * (weight[own % CHUNKS] * (x[i] * vec4(inverse)));
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
