// Scores of experts, the choice of the best, their weights; and, of few tokens, the work list. A workgroup has
// up to TOKENS tokens, at most ROOM / EXPERTS of them.
//
// Everything is exact: the sum of a softmax follows the CPU's sixteen lanes and their tree, and an expert's rank is
// the number of those that come before it, so that no order of threads matters.
//
// Needs: norm_float.wgsl, route_keys.wgsl, const EXPERTS, TOP_K, TOKENS, SIGMOID, NORM (by no less than NORM_MIN), GROUPS (of which TOP_GROUPS are chosen; 1
// if there are none), TOP_GROUPS, BEST_TWO, LISTED (the work list is made too), HALTS (word HALT of the weights stops
// it, and becomes p.number where experts are missing); the buffers logits (f32), ids (u32),
// weights (f32), and, if LISTED, slots (u32), work (u32), pairs (u32); fn bias_of(expert), correction_of(expert),
// see(number, logit).

struct Params { tokens: u32, scale: f32, number: f32, seen: u32, nothing: u32 }
var<immediate> p: Params;

const THREADS: u32 = 256u;
const SIZE: u32 = EXPERTS / GROUPS;

var<workgroup> scores: array<f32, TOKENS * EXPERTS>;
// What experts are ranked by: order like the numbers that they stand for.
var<workgroup> keys: array<u32, TOKENS * EXPERTS>;
var<workgroup> lanes: array<f32, TOKENS * 16u>;
var<workgroup> peaks: array<u32, TOKENS * 16u>;
var<workgroup> group_keys: array<u32, TOKENS * GROUPS>;
var<workgroup> order: array<u32, TOKENS * TOP_K>;
var<workgroup> chosen: array<u32, TOKENS * TOP_K>;
var<workgroup> leads: array<u32, TOKENS * TOP_K>;
var<workgroup> entries: atomic<u32>;
var<workgroup> missing: atomic<u32>;
var<workgroup> halted: bool;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let first = wg.x * TOKENS;
    let tokens = min(TOKENS, p.tokens - first);
    // Read before anybody can set it: nothing but a barrier orders what lanes do with memory.
    if (lane == 0u) {
        halted = HALTS && weights[HALT] != 0.0;
    }
    for (var i = lane; i < tokens * EXPERTS; i += THREADS) {
        let logit = logits[first * EXPERTS + i] + bias_of(i % EXPERTS);
        scores[i] = logit;
        see(first * EXPERTS + i, logit);
        // Here NaN is to be found: it is above all numbers.
        keys[i] = select(key_of(logit), 0xffffffffu, (bitcast<u32>(logit) & 0x7fffffffu) > 0x7f800000u);
    }
    workgroupBarrier();
    if (SIGMOID) {
        for (var i = lane; i < tokens * EXPERTS; i += THREADS) {
            let score = divide(1.0, 1.0 + exponential(-scores[i]));
            scores[i] = select(score, scores[i], keys[i] == 0xffffffffu);
        }
    } else {
        if (lane < tokens * 16u) {
            var peak = 0u;
            for (var e = lane % 16u; e < EXPERTS; e += 16u) {
                peak = max(peak, keys[lane / 16u * EXPERTS + e]);
            }
            peaks[lane] = peak;
        }
        workgroupBarrier();
        for (var i = lane; i < tokens * EXPERTS; i += THREADS) {
            var peak = 0u;
            for (var l = 0u; l < 16u; l++) {
                peak = max(peak, peaks[i / EXPERTS * 16u + l]);
            }
            scores[i] = exponential(scores[i] - of_key(peak));
        }
        workgroupBarrier();
        if (lane < tokens * 16u) {
            var sum = 0.0;
            for (var e = lane % 16u; e < EXPERTS; e += 16u) {
                sum += scores[lane / 16u * EXPERTS + e];
            }
            lanes[lane] = sum;
        }
        workgroupBarrier();
        for (var i = lane; i < tokens * EXPERTS; i += THREADS) {
            let at = i / EXPERTS * 16u;
            var s: array<f32, 8>;
            for (var l = 0u; l < 8u; l++) {
                s[l] = lanes[at + l] + lanes[at + l + 8u];
            }
            let sum = ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
            scores[i] = divide(scores[i], sum);
        }
    }
    // Each thread goes on with the scores that it has made itself.
    for (var i = lane; i < tokens * EXPERTS; i += THREADS) {
        keys[i] = key_of(scores[i] + correction_of(i % EXPERTS));
    }
    workgroupBarrier();
    if (GROUPS > 1u) {
        for (var i = lane; i < tokens * GROUPS; i += THREADS) {
            var best = 0u;
            var second = 0u;
            for (var e = 0u; e < SIZE; e++) {
                let key = keys[i * SIZE + e];
                second = max(second, min(best, key));
                best = max(best, key);
            }
            group_keys[i] = select(best, key_of(of_key(best) + of_key(second)), BEST_TWO);
        }
        workgroupBarrier();
    }
    for (var i = lane; i < tokens * EXPERTS; i += THREADS) {
        let token = i / EXPERTS;
        let expert = i % EXPERTS;
        if (allowed(token, expert / SIZE)) {
            let key = keys[i];
            var rank = 0u;
            for (var g = 0u; g < GROUPS; g++) {
                if (allowed(token, g)) {
                    for (var e = g * SIZE; e < (g + 1u) * SIZE; e++) {
                        let other = keys[token * EXPERTS + e];
                        rank += select(0u, 1u, other > key || (other == key && e < expert));
                    }
                }
            }
            if (rank < TOP_K) {
                order[token * TOP_K + rank] = expert;
            }
        }
    }
    workgroupBarrier();
    let goes_on = !halted;
    for (var i = lane; i < tokens * TOP_K; i += THREADS) {
        let token = i / TOP_K;
        let expert = order[i];
        var divisor = 0.0;
        var before = 0u;
        // In the order of the ranking, as the CPU sums.
        for (var j = 0u; j < TOP_K; j++) {
            let other = order[token * TOP_K + j];
            divisor += scores[token * EXPERTS + other];
            before += select(0u, 1u, other < expert);
        }
        var weight = scores[token * EXPERTS + expert];
        if (NORM) {
            weight = divide(weight, select(divisor, NORM_MIN, divisor < NORM_MIN));
        }
        let pair = token * TOP_K + before;
        if (goes_on) {
            ids[first * TOP_K + pair] = expert;
            weights[first * TOP_K + pair] = weight * p.scale;
        }
        chosen[pair] = expert;
    }
    if (LISTED) {
        workgroupBarrier();
        list(tokens * TOP_K, lane, goes_on);
    }
}
