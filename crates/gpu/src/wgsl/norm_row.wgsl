// Residual sum, RMSNorm and int8 form of a token by a workgroup, all of its values in registers.
//
// Needs: quantise.wgsl (const GROUP), norm_float.wgsl, fn fma4, const D, D_GROUPS, THREADS, ROUNDS, AHEAD (weights
// that a lane reads in advance), NORMED, CODED, CHANGED;
// load_hidden, load_weight, store_normed, delta, eps, residual, store_own; store_codes if CODED.
//
// Lane q of a team holds columns 4 * (TEAM * i + q) of a group and the three after them, i = 0..WORDS.
//
// The sum of squares goes by lane, then by team, then by subgroup: its order depends on the width of the row, of
// its groups and of the device's subgroups alone, not on THREADS.

alias Held = array<vec4<f32>, ROUNDS * WORDS>;
alias Ahead = array<vec4<f32>, max(AHEAD, 1u)>;

// By group.
var<workgroup> squares: array<f32, ROUNDS * THREADS / TEAM>;

/// The i-th vector of a lane in a round.
fn chunk_of(round: u32, i: u32, lane: u32) -> u32 {
    return (round * (THREADS / TEAM) + lane / TEAM) * (GROUP / 4u) + TEAM * i + lane % TEAM;
}

/// A lane's part of a token, with what is added to it. Everything is on its way before the first is used.
fn take_row(x: ptr<function, Held>, ahead: ptr<function, Ahead>, token: u32, lane: u32) {
    for (var round = 0u; round < ROUNDS; round++) {
        for (var i = 0u; i < WORDS; i++) {
            let chunk = chunk_of(round, i, lane);
            var v = vec4(0.0);
            if (4u * chunk < D) {
                v = load_hidden(token, chunk);
                if (CHANGED) {
                    v = fma4(delta(token, chunk), vec4(residual()), v);
                }
                if (AHEAD > 0u) {
                    (*ahead)[round * WORDS + i] = load_weight(0u, chunk);
                }
            }
            (*x)[round * WORDS + i] = v;
        }
    }
}

/// Writes it back.
fn keep_row(x: ptr<function, Held>, token: u32, lane: u32) {
    for (var round = 0u; round < ROUNDS; round++) {
        for (var i = 0u; i < WORDS; i++) {
            let chunk = chunk_of(round, i, lane);
            if (4u * chunk < D) {
                store_hidden(token, chunk, (*x)[round * WORDS + i]);
            }
        }
    }
}

/// The norm of it, to `store_own`, and to output row `row` if `goes_on`. Called by a whole workgroup.
fn norm_row(
    x: ptr<function, Held>,
    ahead: ptr<function, Ahead>,
    row: u32,
    goes_on: bool,
    lane: u32,
    width: u32,
    place: u32,
) {
    for (var round = 0u; round < ROUNDS; round++) {
        var sum = 0.0;
        for (var i = 0u; i < WORDS; i++) {
            let v = (*x)[round * WORDS + i];
            sum = fma(v.x, v.x, sum);
            sum = fma(v.y, v.y, sum);
            sum = fma(v.z, v.z, sum);
            sum = fma(v.w, v.w, sum);
        }
        for (var step = 1u; step < TEAM; step *= 2u) {
            sum += subgroupShuffleXor(sum, step);
        }
        if (lane % TEAM == 0u) {
            squares[round * (THREADS / TEAM) + lane / TEAM] = sum;
        }
    }
    workgroupBarrier();
    // Every subgroup for itself: groups past the end are 0.
    var total = 0.0;
    for (var i = place; i < D_GROUPS; i += width) {
        total += squares[i];
    }
    let inverse = inverse_rms(subgroupAdd(total), f32(D), eps());
    for (var round = 0u; round < ROUNDS; round++) {
        let group = round * (THREADS / TEAM) + lane / TEAM;
        var y: array<vec4<f32>, WORDS>;
        for (var i = 0u; i < WORDS; i++) {
            let chunk = chunk_of(round, i, lane);
            var v = vec4(0.0);
            if (4u * chunk < D) {
                var weight: vec4<f32>;
                if (AHEAD > 0u) {
                    weight = (*ahead)[round * WORDS + i];
                } else {
                    weight = load_weight(0u, chunk);
                }
                v = weight * ((*x)[round * WORDS + i] * inverse);
                store_own(chunk, v);
                if (NORMED && goes_on) {
                    store_normed(row, chunk, v);
                }
            }
            y[i] = v;
        }
        if (CODED) {
            let coded = quantise(y);
            if (group < D_GROUPS && goes_on) {
                store_codes(row * D_GROUPS + group, lane % TEAM, coded);
            }
        }
    }
}
