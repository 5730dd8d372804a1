// What a gated delta net makes of its projections before states are asked: convolution over a run's last positions and SiLU;
// queries and keys divided by their length; decay and the share of what is new. A head per 32 lanes. Workgroups: (four heads, token).
//
// Needs: norm_float.wgsl, exp.wgsl, fma4, const KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, CONV (positions that the convolution sees),
// STRIDE, Q_AT, K_AT, V_AT, BETA_AT, DECAY_AT (columns of the plane), UNIT, STATE (of a key head's state, of all), MIXED (columns of what
// is made), TOKENS_AT (in the words); the buffers words (u32), plane, taps, states, mixed (vec4<f32>), rates (f32).

struct Params { eps: f32, scale: f32, nothing: u32 }
var<immediate> p: Params;

const LANES: u32 = 32u;
const AT_ONCE: u32 = 4u;
const NONE: u32 = 0xffffffffu;
const PER_KEY: u32 = VALUE_HEADS / KEY_HEADS;
// All that follow are vectors of four.
const KEY_CHUNKS: u32 = KEY_DIM / 4u;
const VALUE_CHUNKS: u32 = VALUE_DIM / 4u;
const CHANNELS: u32 = 2u * KEY_CHUNKS + PER_KEY * VALUE_CHUNKS;
const TURNS: u32 = (max(KEY_CHUNKS, VALUE_CHUNKS) + LANES - 1u) / LANES;

// Sums of squares of a lane.
var<workgroup> parts: array<f32, AT_ONCE * LANES>;

fn silu(x: f32) -> f32 {
    return divide(x, 1.0 + exponential(-x));
}

/// ln(1 + e^x) to within a few units of the last place, however small: by way of the smaller of both where that is so.
fn softplus(x: f32) -> f32 {
    let e = exponential(x);
    let bits = bitcast<u32>(1.0 + e);
    // 1 + e = 2^n m, m from half the root of two to the root.
    let above = select(0u, 1u, (bits & 0x007fffffu) > 0x003504f3u);
    let n = f32(i32(bits >> 23u) - 127 + i32(above));
    let m = bitcast<f32>((bits & 0x007fffffu) | ((127u - above) << 23u));
    let is_small = e < 0.41;
    // ln m = 2 artanh((m - 1) / (m + 1)); the sixth term is below 2e-9 of it.
    let s = divide(select(m - 1.0, e, is_small), select(m + 1.0, 2.0 + e, is_small));
    let square = s * s;
    var series = fma(square, 0.11111111, 0.14285715);
    series = fma(series, square, 0.2);
    series = fma(series, square, 0.33333334);
    series = fma(series, square, 1.0);
    let sum = fma(select(n, 0.0, is_small), 0.6931472, 2.0 * s * series);
    // By bits, as what is not a number may be assumed away.
    let is_nan = (bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u;
    return select(sum, x, is_nan || x > 20.0);
}

@compute @workgroup_size(AT_ONCE * LANES)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let sub = index / LANES;
    let lane = index % LANES;
    let token = wg.y;
    // Lanes past the last head repeat it, and write nothing.
    let item = min(wg.x * AT_ONCE + sub, 2u * KEY_HEADS + VALUE_HEADS - 1u);
    let is_there = wg.x * AT_ONCE + sub == item;
    // Queries and keys by turns, then values.
    let is_value = item >= 2u * KEY_HEADS;
    let value = item - select(0u, 2u * KEY_HEADS, is_value);
    let head = select(item / 2u, value / PER_KEY, is_value);
    let chunks = select(KEY_CHUNKS, VALUE_CHUNKS, is_value);
    var channel = (item % 2u) * KEY_CHUNKS;
    var column = select(Q_AT, K_AT, item % 2u == 1u) / 4u + head * KEY_CHUNKS;
    if (is_value) {
        channel = 2u * KEY_CHUNKS + (value % PER_KEY) * VALUE_CHUNKS;
        column = V_AT / 4u + value * VALUE_CHUNKS;
    }
    let first = words[TOKENS_AT + 2u * token];
    let before = words[TOKENS_AT + 2u * token + 1u];
    var x: array<vec4<f32>, TURNS>;
    var squares = 0.0;
    for (var turn = 0u; turn < TURNS; turn++) {
        let c = min(turn * LANES + lane, chunks - 1u);
        var sum = vec4(0.0);
        for (var tap = 0u; tap < CONV; tap++) {
            let w = taps[(head * CONV + tap) * CHANNELS + channel + c];
            var input = vec4(0.0);
            // Positions before the run's first are remembered.
            let there = token + tap;
            if (there >= first + CONV - 1u) {
                input = plane[(there - (CONV - 1u)) * (STRIDE / 4u) + column + c];
            } else if (before != NONE) {
                input = states[(before * STATE + head * UNIT) / 4u + (there - first) * CHANNELS + channel + c];
            }
            sum = fma4(w, input, sum);
        }
        let y = vec4(silu(sum.x), silu(sum.y), silu(sum.z), silu(sum.w));
        x[turn] = y;
        if (turn * LANES + lane < chunks) {
            squares = fma(y.x, y.x, squares);
            squares = fma(y.y, y.y, squares);
            squares = fma(y.z, y.z, squares);
            squares = fma(y.w, y.w, squares);
        }
    }
    parts[index] = squares;
    workgroupBarrier();
    if (!is_there) {
        return;
    }
    var to = token * (MIXED / 4u) + 2u * KEY_HEADS * KEY_CHUNKS + value * VALUE_CHUNKS;
    var factors = vec2(1.0);
    if (!is_value) {
        to = token * (MIXED / 4u) + item * KEY_CHUNKS;
        var sums: array<f32, 4>;
        for (var i = 0u; i < LANES; i += 4u) {
            for (var j = 0u; j < 4u; j++) {
                sums[j] += parts[sub * LANES + i + j];
            }
        }
        let all = (sums[0] + sums[2]) + (sums[1] + sums[3]);
        factors = vec2(inverse_rms(all, 1.0, p.eps), select(p.scale, 1.0, item % 2u == 1u));
    }
    for (var turn = 0u; turn < TURNS; turn++) {
        let c = turn * LANES + lane;
        if (c < chunks) {
            mixed[to + c] = (x[turn] * vec4(factors.x)) * vec4(factors.y);
        }
    }
    // The rates of two heads are four numbers.
    if (is_value && lane == 0u && value % 2u == 0u) {
        var pair: vec4<f32>;
        for (var i = 0u; i < 2u; i++) {
            let own = min(value + i, VALUE_HEADS - 1u);
            let at = token * STRIDE + own;
            let decays = softplus(at_plane(at + DECAY_AT) + rates[VALUE_HEADS + own]);
            pair[2u * i] = exponential(-(rates[own] * decays));
            pair[2u * i + 1u] = opened(at_plane(at + BETA_AT));
        }
        mixed[token * (MIXED / 4u) + 2u * KEY_HEADS * KEY_CHUNKS + VALUE_HEADS * VALUE_CHUNKS + value / 2u] = pair;
    }
}

/// A number of the plane.
fn at_plane(i: u32) -> f32 {
    return plane[i / 4u][i % 4u];
}

fn opened(x: f32) -> f32 {
    return divide(1.0, 1.0 + exponential(-x));
}
