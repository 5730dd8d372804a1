// What a gated delta net makes of its projections before states are asked: convolution over a run's last positions and SiLU;
// queries and keys divided by their length; decay and the share of what is new.
//
// Needs: norm_float.wgsl, exp.wgsl, fma4, const KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, CONV (positions that the convolution sees),
// STRIDE, BETA_AT, DECAY_AT (columns of the plane), UNIT, STATE (of a key head's state, of all); the buffers plane, taps, states (vec4<f32>), rates
// (f32); Params with eps, scale.

const HEAD_LANES: u32 = 32u;
const NONE: u32 = 0xffffffffu;
const PER_KEY: u32 = VALUE_HEADS / KEY_HEADS;
// All that follow are vectors of four.
const KEY_CHUNKS: u32 = KEY_DIM / 4u;
const VALUE_CHUNKS: u32 = VALUE_DIM / 4u;
const CHANNELS: u32 = 2u * KEY_CHUNKS + PER_KEY * VALUE_CHUNKS;
const TURNS: u32 = (max(KEY_CHUNKS, VALUE_CHUNKS) + HEAD_LANES - 1u) / HEAD_LANES;

// Sums of squares of a lane.
var<workgroup> parts: array<f32, 4u * HEAD_LANES>;

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

/// Four channels of a key head, which are at a column of the plane, of a token.
fn channel_of(token: u32, first: u32, before: u32, head: u32, channel: u32, column: u32) -> vec4<f32> {
    // All of this is on its way at once.
    var weights: array<vec4<f32>, CONV>;
    var inputs: array<vec4<f32>, CONV>;
    for (var tap = 0u; tap < CONV; tap++) {
        weights[tap] = taps[(head * CONV + tap) * CHANNELS + channel];
        // Of a token before all, whatever is there.
        inputs[tap] = plane[(max(token + tap, CONV - 1u) - (CONV - 1u)) * (STRIDE / 4u) + column];
    }
    // Positions before the run's first are remembered.
    if (token - first < CONV - 1u) {
        let unit = select((before * STATE + head * UNIT) / 4u, 0u, before == NONE);
        var remembered: array<vec4<f32>, CONV>;
        for (var tap = 0u; tap < CONV; tap++) {
            let slot = min(token - first + tap, max(CONV, 2u) - 2u);
            remembered[tap] = states[unit + slot * CHANNELS + channel];
        }
        for (var tap = 0u; tap < CONV; tap++) {
            let old = select(remembered[tap], vec4(0.0), before == NONE);
            inputs[tap] = select(inputs[tap], old, token - first + tap < CONV - 1u);
        }
    }
    var sum = vec4(0.0);
    for (var tap = 0u; tap < CONV; tap++) {
        sum = fma4(weights[tap], inputs[tap], sum);
    }
    return vec4(silu(sum.x), silu(sum.y), silu(sum.z), silu(sum.w));
}

fn add_squares(sum: f32, y: vec4<f32>) -> f32 {
    return fma(y.w, y.w, fma(y.z, y.z, fma(y.y, y.y, fma(y.x, y.x, sum))));
}

/// What a query or a key is multiplied with, one after the other, by the sums of squares of its lanes.
fn factors_of(first: u32, is_key: bool) -> vec2<f32> {
    var sums: array<f32, 4>;
    for (var i = 0u; i < HEAD_LANES; i += 4u) {
        for (var j = 0u; j < 4u; j++) {
            sums[j] += parts[first + i + j];
        }
    }
    let all = (sums[0] + sums[2]) + (sums[1] + sums[3]);
    return vec2(inverse_rms(all, 1.0, p.eps), select(p.scale, 1.0, is_key));
}

/// Decay and share of two value heads in a row, the first an even one; of the last one alone, twice.
fn rates_of(token: u32, value: u32) -> vec4<f32> {
    var pair: vec4<f32>;
    for (var i = 0u; i < 2u; i++) {
        let own = min(value + i, VALUE_HEADS - 1u);
        let at = token * STRIDE + own;
        let decays = softplus(at_plane(at + DECAY_AT) + rates[VALUE_HEADS + own]);
        pair[2u * i] = exponential(-(rates[own] * decays));
        pair[2u * i + 1u] = opened(at_plane(at + BETA_AT));
    }
    return pair;
}

/// A number of the plane.
fn at_plane(i: u32) -> f32 {
    return plane[i / 4u][i % 4u];
}

fn opened(x: f32) -> f32 {
    return divide(1.0, 1.0 + exponential(-x));
}
