// Queries, keys and values of a token, a head per 32 lanes: bias, norm of queries and keys, rotation; and rows of the cache.
//
// Needs: norm_float.wgsl, rope_pairs.wgsl, rope_store.wgsl, const HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM, WIDEST (of the two), HALF (pairs that are
// rotated), STRIDE, Q_AT, K_AT, V_AT (columns of the plane), TYPE (0 f32, 1 f16, 2 q8), ROW_WORDS (of a cache
// row), NORM, WHOLE (the norm is over all heads), INTERLEAVED, HEADS_AT_ONCE (heads of a workgroup); the buffers angles
// (vec2<f32>); fn projected(token, column), fn norm_weight(its number), fn normed(x, weight, inverse), fn rope_eps(), fn put(sub, w, word),
// which takes the words of a row.

const LANES: u32 = 32u;
// Pairs of a lane.
const TURNS: u32 = (HALF + LANES - 1u) / LANES;

var<workgroup> x: array<f32, HEADS_AT_ONCE * WIDEST>;
// Sums of squares of sixteen lanes; then, of a q8 row, magnitudes.
var<workgroup> parts: array<f32, HEADS_AT_ONCE * 16u>;
var<workgroup> magnitudes: array<u32, HEADS_AT_ONCE * LANES>;

// Which head an item is: those of queries, of keys, of values.
struct Head {
    query: bool,
    value: bool,
    head: u32,
    // The first column of all of its kind, and of its own.
    first: u32,
    column: u32,
    dim: u32,
}

fn head_of(item: u32) -> Head {
    let query = item < HEADS;
    let value = item >= HEADS + KV_HEADS;
    var head = item;
    var first = Q_AT;
    if (value) {
        head = item - HEADS - KV_HEADS;
        first = V_AT;
    } else if (!query) {
        head = item - HEADS;
        first = K_AT;
    }
    let dim = select(HEAD_DIM, VALUE_DIM, value);
    return Head(query, value, head, first, first + head * dim, dim);
}

/// Leaves a head's row in `x`, and what its bytes need to be known. Called by a whole workgroup.
fn turn_head(token: u32, position: u32, h: Head, sub: u32, index: u32) {
    let lane = index % LANES;
    let at = sub * WIDEST;
    // Where this head's weights begin.
    let weights = select(HEAD_DIM * select(1u, HEADS, WHOLE), 0u, h.query) + select(0u, h.head * HEAD_DIM, WHOLE);
    // All of this is on its way at once.
    var turns: array<vec2<f32>, TURNS>;
    var weights0: array<f32, TURNS>;
    var weights1: array<f32, TURNS>;
    for (var t = 0u; t < TURNS; t++) {
        let i = min(t * LANES + lane, HALF - 1u);
        turns[t] = angles[position * HALF + i];
        if (!h.value) {
            weights0[t] = norm_weight(weights + first_of(i));
            weights1[t] = norm_weight(weights + second_of(i));
        }
    }
    for (var c = lane; c < h.dim; c += LANES) {
        x[at + c] = projected(token, h.column + c);
    }
    var inverse = 1.0;
    if (NORM) {
        // The CPU's order: sixteen lanes, joined by a tree.
        var begin = h.column;
        var count = HEAD_DIM;
        if (WHOLE) {
            begin = h.first;
            count = HEAD_DIM * select(KV_HEADS, HEADS, h.query);
        }
        workgroupBarrier();
        if (lane < 16u && !h.value) {
            var sum = 0.0;
            for (var c = lane; c < count; c += 16u) {
                var v: f32;
                if (WHOLE) {
                    v = projected(token, begin + c);
                } else {
                    v = x[at + c];
                }
                sum = fma(v, v, sum);
            }
            parts[sub * 16u + lane] = sum;
        }
        workgroupBarrier();
        if (!h.value) {
            let base = sub * 16u;
            var s: array<f32, 8>;
            for (var i = 0u; i < 8u; i++) {
                s[i] = parts[base + i] + parts[base + i + 8u];
            }
            let total = ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
            inverse = inverse_rms(total, f32(count), rope_eps());
        }
    }
    workgroupBarrier();
    if (!h.value) {
        for (var t = 0u; t < TURNS; t++) {
            let i = t * LANES + lane;
            if (i >= HALF) {
                break;
            }
            let i0 = first_of(i);
            let i1 = second_of(i);
            let x0 = normed(x[at + i0], weights0[t], inverse);
            let x1 = normed(x[at + i1], weights1[t], inverse);
            let turn = turns[t];
            x[at + i0] = fma(x0, turn.x, -(x1 * turn.y));
            x[at + i1] = fma(x1, turn.x, x0 * turn.y);
        }
        for (var c = 2u * HALF + lane; c < HEAD_DIM; c += LANES) {
            x[at + c] = normed(x[at + c], norm_weight(weights + c), inverse);
        }
    }
    workgroupBarrier();
    if (TYPE == 2u) {
        var most = 0u;
        for (var c = lane; c < h.dim; c += LANES) {
            // Magnitudes of floats order like their bits, NaN above infinity.
            most = max(most, bitcast<u32>(x[at + c]) & 0x7fffffffu);
        }
        magnitudes[index] = most;
        workgroupBarrier();
    }
}
