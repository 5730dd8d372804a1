// A token's splits joined, in ascending order.
//
// Needs: norm_float.wgsl, exp.wgsl, fn fma4, const HEADS, VALUE_DIM; the buffers rows (vec4<u32>), sums (vec4<f32>), stats (vec2<f32>); fn
// sink_of(head) and const SINKS; Params with low.

const SPLIT: u32 = 128u;
// Splits that a lane reads before it uses the first: their weights, their sums.
const STATS_AHEAD: u32 = 16u;
const SUMS_AHEAD: u32 = 8u;
const VALUE_WORDS: u32 = VALUE_DIM / 4u;

/// Splits that a token sees.
fn splits_of(token: u32) -> u32 {
    let row = rows[token];
    return row.x / SPLIT - row.z / SPLIT + 1u;
}

/// Four columns of a head, of `count` splits from `first` on.
fn joined(first: u32, count: u32, head: u32, word: u32) -> vec4<f32> {
    var maximum = bitcast<f32>(p.low);
    if (SINKS) {
        maximum = sink_of(head);
    }
    for (var begin = 0u; begin < count; begin += STATS_AHEAD) {
        var most: array<f32, STATS_AHEAD>;
        for (var r = 0u; r < STATS_AHEAD; r++) {
            // The last one again changes nothing.
            most[r] = stats[(first + min(begin + r, count - 1u)) * HEADS + head].x;
        }
        for (var r = 0u; r < STATS_AHEAD; r++) {
            maximum = max(maximum, most[r]);
        }
    }
    var total = 0.0;
    var x = vec4(0.0);
    for (var begin = 0u; begin < count; begin += SUMS_AHEAD) {
        var stat: array<vec2<f32>, SUMS_AHEAD>;
        var values: array<vec4<f32>, SUMS_AHEAD>;
        for (var r = 0u; r < SUMS_AHEAD; r++) {
            let at = (first + min(begin + r, count - 1u)) * HEADS + head;
            stat[r] = stats[at];
            values[r] = sums[at * VALUE_WORDS + word];
        }
        for (var r = 0u; r < SUMS_AHEAD; r++) {
            if (begin + r >= count) {
                break;
            }
            let factor = exponential(stat[r].x - maximum);
            total = fma(factor, stat[r].y, total);
            x = fma4(vec4(factor), values[r], x);
        }
    }
    if (SINKS) {
        total += exponential(sink_of(head) - maximum);
    }
    return x / vec4(total);
}
