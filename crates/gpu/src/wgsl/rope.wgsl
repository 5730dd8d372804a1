// A token's queries, keys and values, a head per 32 lanes: bias, norm of queries and keys, rotation; queries to a
// plane of their own, keys and values to the cache. Workgroups: (four heads, token).
//
// Needs: norm_float.wgsl, const HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM, WIDEST (of the two), HALF (pairs that are
// rotated), STRIDE, Q_AT, K_AT, V_AT (columns of the plane), TYPE (0 f32, 1 f16, 2 q8), ROW (words of a cache
// row), NORM, WHOLE (the norm is over all heads), INTERLEAVED; the buffers angles (vec2<f32>), rows (vec4<u32>),
// tables (u32), out (f32), cache (u32); fn projected(token, column), fn normed(x, weight's number, inverse).

struct Params { eps: f32, nothing: u32 }
var<immediate> p: Params;

const LANES: u32 = 32u;
const AT_ONCE: u32 = 4u;
const BLOCK: u32 = 32u;
// Pairs of a lane.
const TURNS: u32 = (HALF + LANES - 1u) / LANES;

var<workgroup> x: array<f32, AT_ONCE * WIDEST>;
// Sums of squares of sixteen lanes; then, of a q8 row, magnitudes.
var<workgroup> parts: array<f32, AT_ONCE * 16u>;
var<workgroup> magnitudes: array<u32, AT_ONCE * LANES>;

/// The code of a q8 row.
fn code(value: f32, inverse: f32) -> u32 {
    // The product is rounded first, then to an integer, even at a tie.
    return u32(i32(round(value * inverse))) & 0xffu;
}

@compute @workgroup_size(AT_ONCE * LANES)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let sub = index / LANES;
    let lane = index % LANES;
    let token = wg.y;
    // Lanes past the last head repeat it, and write nothing.
    let every = HEADS + 2u * KV_HEADS;
    let item = min(wg.x * AT_ONCE + sub, every - 1u);
    let wanted = wg.x * AT_ONCE + sub < every;
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
    let column = first + head * dim;
    let at = sub * WIDEST;
    // What a key or value needs in the end is on its way at once: these reads follow from each other.
    let row = rows[token];
    let block = tables[row.y + row.x / BLOCK];
    var turns: array<vec2<f32>, TURNS>;
    for (var t = 0u; t < TURNS; t++) {
        turns[t] = angles[row.x * HALF + min(t * LANES + lane, HALF - 1u)];
    }
    for (var c = lane; c < dim; c += LANES) {
        x[at + c] = projected(token, column + c);
    }
    var inverse = 1.0;
    if (NORM) {
        // The CPU's order: sixteen lanes, joined by a tree.
        var begin = column;
        var count = HEAD_DIM;
        if (WHOLE) {
            begin = first;
            count = HEAD_DIM * select(KV_HEADS, HEADS, query);
        }
        workgroupBarrier();
        if (lane < 16u && !value) {
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
        if (!value) {
            let base = sub * 16u;
            var s: array<f32, 8>;
            for (var i = 0u; i < 8u; i++) {
                s[i] = parts[base + i] + parts[base + i + 8u];
            }
            let total = ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
            inverse = inverse_rms(total, f32(count), p.eps);
        }
    }
    workgroupBarrier();
    if (!value) {
        // Where this head's weights begin.
        let weights = select(HEAD_DIM * select(1u, HEADS, WHOLE), 0u, query) + select(0u, head * HEAD_DIM, WHOLE);
        for (var t = 0u; t < TURNS; t++) {
            let i = t * LANES + lane;
            if (i >= HALF) {
                break;
            }
            let i0 = select(i, 2u * i, INTERLEAVED);
            let i1 = select(i + HALF, 2u * i + 1u, INTERLEAVED);
            let x0 = normed(x[at + i0], weights + i0, inverse);
            let x1 = normed(x[at + i1], weights + i1, inverse);
            let turn = turns[t];
            x[at + i0] = fma(x0, turn.x, -(x1 * turn.y));
            x[at + i1] = fma(x1, turn.x, x0 * turn.y);
        }
        for (var c = 2u * HALF + lane; c < HEAD_DIM; c += LANES) {
            x[at + c] = normed(x[at + c], weights + c, inverse);
        }
    }
    workgroupBarrier();
    if (TYPE == 2u) {
        var most = 0u;
        for (var c = lane; c < dim; c += LANES) {
            // Magnitudes of floats order like their bits, NaN above infinity.
            most = max(most, bitcast<u32>(x[at + c]) & 0x7fffffffu);
        }
        magnitudes[index] = most;
        workgroupBarrier();
    }
    if (!wanted) {
        return;
    }
    if (query) {
        for (var c = lane; c < dim; c += LANES) {
            out[(token * HEADS + head) * HEAD_DIM + c] = x[at + c];
        }
        return;
    }
    let to = (((2u * block + select(0u, 1u, value)) * KV_HEADS + head) * BLOCK + row.x % BLOCK) * ROW;
    if (TYPE == 0u) {
        for (var c = lane; c < dim; c += LANES) {
            cache[to + c] = bitcast<u32>(x[at + c]);
        }
    } else if (TYPE == 1u) {
        for (var w = lane; w < dim / 2u; w += LANES) {
            cache[to + w] = half_of(x[at + 2u * w]) | (half_of(x[at + 2u * w + 1u]) << 16u);
        }
    } else {
        var most = 0u;
        for (var i = 0u; i < LANES; i++) {
            most = max(most, magnitudes[sub * LANES + i]);
        }
        let absmax = bitcast<f32>(most);
        // 127 / absmax overflows for rows that are as good as zero.
        let usable = most < 0x7f800000u;
        var inverse_step = 0.0;
        var step = 0u;
        if (usable && most > 0x02fe0000u) {
            inverse_step = divide(127.0, absmax);
            step = bitcast<u32>(divide(absmax, 127.0));
        }
        for (var w = lane; w < dim / 4u; w += LANES) {
            let word = at + 4u * w;
            let codes = code(x[word], inverse_step)
                | (code(x[word + 1u], inverse_step) << 8u)
                | (code(x[word + 2u], inverse_step) << 16u)
                | (code(x[word + 3u], inverse_step) << 24u);
            cache[to + w] = select(0u, codes, usable);
        }
        if (lane == 0u) {
            cache[to + ROW - 1u] = select(0x7fc00000u, step, usable);
        }
    }
}
