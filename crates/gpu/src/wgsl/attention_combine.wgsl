// Joins a token's splits, in ascending order: a team of lanes for a group of columns, which it may quantise.
// Workgroups: (groups, token).
//
// Needs: quantise.wgsl (const GROUP), norm_float.wgsl, fn fma4, const HEADS, VALUE_DIM, CELLS (groups of a token), PLANE,
// CODED, SINKS, AT_ONCE
// (vectors of a lane that are of one head); the buffers rows (vec4<u32>), sums (vec4<f32>), stats (vec2<f32>); fn sink_of(head),
// store_mixed, store_codes.

struct Params { first: u32, splits: u32, low: u32, nothing: u32 }
var<immediate> p: Params;

const SPLIT: u32 = 128u;
const THREADS: u32 = 64u;
// Splits that a lane reads before it adds them up.
const READS: u32 = 4u;
const VALUE_WORDS: u32 = VALUE_DIM / 4u;
const ROW_WORDS: u32 = HEADS * VALUE_WORDS;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let token = p.first + wg.y;
    let row = rows[token];
    let count = row.x / SPLIT - row.z / SPLIT + 1u;
    let group = wg.x * (THREADS / TEAM) + lane / TEAM;
    var x: array<vec4<f32>, WORDS>;
    for (var i = 0u; i < WORDS; i++) {
        x[i] = vec4(0.0);
    }
    for (var begin = 0u; begin < WORDS; begin += AT_ONCE) {
        let chunk = group * (GROUP / 4u) + TEAM * begin + lane % TEAM;
        if (chunk < ROW_WORDS) {
            let head = chunk / VALUE_WORDS;
            var maximum = bitcast<f32>(p.low);
            if (SINKS) {
                maximum = sink_of(head);
            }
            let first = wg.y * p.splits;
            for (var begin_split = 0u; begin_split < count; begin_split += READS) {
                for (var r = 0u; r < READS; r++) {
                    // The last one again changes nothing.
                    let s = min(begin_split + r, count - 1u);
                    maximum = max(maximum, stats[(first + s) * HEADS + head].x);
                }
            }
            var total = 0.0;
            for (var begin_split = 0u; begin_split < count; begin_split += READS) {
                // All are on their way before the first is used.
                var stat: array<vec2<f32>, READS>;
                var values: array<vec4<f32>, READS * AT_ONCE>;
                for (var r = 0u; r < READS; r++) {
                    let s = min(begin_split + r, count - 1u);
                    stat[r] = stats[(first + s) * HEADS + head];
                    let at = ((first + s) * HEADS + head) * VALUE_WORDS + chunk % VALUE_WORDS;
                    for (var i = 0u; i < AT_ONCE; i++) {
                        values[r * AT_ONCE + i] = sums[at + TEAM * i];
                    }
                }
                for (var r = 0u; r < READS; r++) {
                    if (begin_split + r >= count) {
                        break;
                    }
                    let factor = exponential(stat[r].x - maximum);
                    total = fma(factor, stat[r].y, total);
                    for (var i = 0u; i < AT_ONCE; i++) {
                        x[begin + i] = fma4(vec4(factor), values[r * AT_ONCE + i], x[begin + i]);
                    }
                }
            }
            if (SINKS) {
                total += exponential(sink_of(head) - maximum);
            }
            for (var i = 0u; i < AT_ONCE; i++) {
                x[begin + i] = x[begin + i] / vec4(total);
                if (PLANE) {
                    store_mixed(token, chunk + TEAM * i, x[begin + i]);
                }
            }
        }
    }
    if (CODED) {
        let coded = quantise(x);
        if (group < CELLS) {
            store_codes(token * CELLS + group, lane % TEAM, coded);
        }
    }
}
