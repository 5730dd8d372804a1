// Residual sum, RMSNorm and int8 form of a token: one workgroup each, all of its values in registers.
//
// Needs: quantise.wgsl (const GROUP), norm_float.wgsl, fn fma4, const D, GROUPS, THREADS, ROUNDS, AHEAD (weights
// that a lane reads in advance; 1 if none), NORMED, CODED, CHANGED;
// load_hidden, store_hidden, load_weight, store_normed, delta, token_of, halted; codes and cells if CODED.
//
// Lane q of a team holds columns 4 * (TEAM * i + q) of a group and the three after them, i = 0..WORDS.
//
// The sum of squares goes by lane, then by team, then by subgroup: its order depends on the width of the row, of
// its groups and of the device's subgroups alone, not on THREADS.

struct Params { eps: f32, zero: f32, residual: f32, nothing: u32 }
var<immediate> p: Params;

// By group.
var<workgroup> sums: array<f32, ROUNDS * THREADS / TEAM>;

/// The i-th vector of a lane in a round.
fn chunk_of(round: u32, i: u32, lane: u32) -> u32 {
    return (round * (THREADS / TEAM) + lane / TEAM) * (GROUP / 4u) + TEAM * i + lane % TEAM;
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
                    v = fma4(delta(token, chunk), vec4(p.residual), v);
                }
                if (AHEAD > 1u) {
                    weights_ahead[round * WORDS + i] = load_weight(0u, chunk);
                }
            }
            x[round * WORDS + i] = v;
        }
    }
    for (var round = 0u; round < ROUNDS; round++) {
        var sum = 0.0;
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
        for (var step = 1u; step < TEAM; step *= 2u) {
            sum += subgroupShuffleXor(sum, step);
        }
        if (lane % TEAM == 0u) {
            sums[round * (THREADS / TEAM) + lane / TEAM] = sum;
        }
    }
    workgroupBarrier();
    // Every subgroup for itself: groups past the end are 0.
    var total = 0.0;
    for (var i = place; i < GROUPS; i += width) {
        total += sums[i];
    }
    let inverse = inverse_rms(subgroupAdd(total), f32(D), p.eps);
    for (var round = 0u; round < ROUNDS; round++) {
        let group = round * (THREADS / TEAM) + lane / TEAM;
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
                store_codes(row * GROUPS + group, lane % TEAM, coded);
            }
        }
    }
}
