// The end of attention over a token's only split, with the arithmetic of attention_combine.wgsl.
//
// Needs: attention.wgsl, const CELLS (groups of a token), PLANE, CODED, SINKS; fn sink_of(head), store_mixed,
// store_codes; gate_of, gated.

// What a query's sums are multiplied by, and what they are divided by.
var<workgroup> ends: array<vec2<f32>, VECTORS * 4u>;

/// A query's largest score, and the sum of its weights.
fn end_query(unit: u32, query: u32, head: u32, most: f32, sum: f32) {
    var maximum = bitcast<f32>(p.low);
    if (SINKS) {
        maximum = sink_of(head);
    }
    maximum = max(maximum, most);
    let factor = exponential(most - maximum);
    var total = fma2(vec2(factor), vec2(sum), vec2(0.0)).x;
    if (SINKS) {
        total += exponential(sink_of(head) - maximum);
    }
    ends[query] = vec2(factor, total);
}

/// Four columns of a query's sums.
fn end_sum(unit: u32, query: u32, head: u32, word: u32, sum: vec4<f32>) {
    // Nobody reads scores any more.
    let x = fma4(vec4(ends[query].x), sum, vec4(0.0));
    // The only split of the first round: its number is the token's.
    let gate = gate_of(unit, head * VALUE_WORDS + word);
    scores[query * VALUE_WORDS + word] = gated(x / vec4(ends[query].y), gate);
}

/// Writes the outputs of `count` heads from `head` on, which lie in `scores`.
fn hand_out(token: u32, head: u32, count: u32, lane: u32) {
    let first = head * VALUE_WORDS;
    if (PLANE) {
        for (var i = lane; i < count * VALUE_WORDS; i += THREADS) {
            store_mixed(token, first + i, scores[i]);
        }
    }
    if (CODED) {
        let groups = count * VALUE_WORDS / (GROUP / 4u);
        for (var base = 0u; base < TEAM * groups; base += THREADS) {
            let id = base + lane;
            // Lanes past the end repeat the last group, and write nothing.
            let group = min(id / TEAM, groups - 1u);
            var x: array<vec4<f32>, WORDS>;
            for (var i = 0u; i < WORDS; i++) {
                x[i] = scores[group * (GROUP / 4u) + TEAM * i + id % TEAM];
            }
            let coded = quantise(x);
            if (id / TEAM < groups) {
                store_codes(token * CELLS + first / (GROUP / 4u) + group, id % TEAM, coded);
            }
        }
    }
}
