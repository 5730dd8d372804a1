// Residual sum, RMSNorm and int8 form of a token: one workgroup each, all of its values in registers.
//
// Needs: quantise.wgsl (const GROUP), norm_float.wgsl, fn fma4, const D, GROUPS, THREADS, ROUNDS, AHEAD (weights
// that a lane reads in advance; 1 if none), NORMED, CODED, CHANGED;
// load_hidden, store_hidden, load_weight, store_normed, delta, token_of, halted; codes and cells if CODED.
//
// Lane q of a quad holds columns 4 * (4i + q) of a group and the three after them, i = 0..WORDS: a quad reads
// 64 bytes at a time.

struct Params { eps: f32, zero: f32, nothing: u32 }
var<immediate> p: Params;

var<workgroup> sums: array<f32, THREADS / 4u>;

/// The i-th vector of a lane in a round.
fn chunk_of(round: u32, i: u32, lane: u32) -> u32 {
    return (round * (THREADS / 4u) + lane / 4u) * (GROUP / 4u) + 4u * i + lane % 4u;
}

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) wg: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
    @builtin(subgroup_size) width: u32,
    @builtin(subgroup_invocation_id) place: u32,
) {
    let row = wg.x;
    let token = token_of(row);
    // Nothing waits for it but what is written.
    let goes_on = !halted();
    var x: array<vec4<f32>, ROUNDS * WORDS>;
    var weights_ahead: array<vec4<f32>, AHEAD>;
    // Everything is on its way before the first is used, and before anything is written.
    for (var round = 0u; round < ROUNDS; round++) {
        for (var i = 0u; i < WORDS; i++) {
            let chunk = chunk_of(round, i, lane);
            var v = vec4(0.0);
            if (4u * chunk < D) {
                v = load_hidden(token, chunk);
                if (CHANGED) {
                    v += delta(token, chunk);
                }
                if (AHEAD > 1u) {
                    weights_ahead[round * WORDS + i] = load_weight(0u, chunk);
                }
            }
            x[round * WORDS + i] = v;
        }
    }
    var sum = 0.0;
    for (var round = 0u; round < ROUNDS; round++) {
        for (var i = 0u; i < WORDS; i++) {
            let chunk = chunk_of(round, i, lane);
            let v = x[round * WORDS + i];
            if (CHANGED && goes_on && 4u * chunk < D) {
                store_hidden(token, chunk, v);
            }
            sum = fma(v.x, v.x, sum);
            sum = fma(v.y, v.y, sum);
            sum = fma(v.z, v.z, sum);
            sum = fma(v.w, v.w, sum);
        }
    }
    let part = subgroupAdd(sum);
    if (place == 0u) {
        sums[lane / width] = part;
    }
    workgroupBarrier();
    var total = 0.0;
    for (var i = 0u; i < THREADS / width; i++) {
        total += sums[i];
    }
    let inverse = inverse_rms(total, f32(D), p.eps);
    for (var round = 0u; round < ROUNDS; round++) {
        let group = round * (THREADS / 4u) + lane / 4u;
        var y: array<vec4<f32>, WORDS>;
        for (var i = 0u; i < WORDS; i++) {
            let chunk = chunk_of(round, i, lane);
            var v = vec4(0.0);
            if (4u * chunk < D) {
                var weight: vec4<f32>;
                if (AHEAD > 1u) {
                    weight = weights_ahead[round * WORDS + i];
                } else {
                    weight = load_weight(0u, chunk);
                }
                v = weight * (x[round * WORDS + i] * inverse);
                if (NORMED && goes_on) {
                    store_normed(row, chunk, v);
                }
            }
            y[i] = v;
        }
        if (CODED) {
            let coded = quantise(y);
            if (group < GROUPS && goes_on) {
                store_codes(row * GROUPS + group, lane % 4u, coded);
            }
        }
    }
}
