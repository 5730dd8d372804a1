// What route.wgsl and route_list.wgsl do, of one token: fewer waits, as everything else waits for it. A lane keeps
// what it has of its experts, sees the keys of all, and nothing is counted that can be told from the ranking.
//
// Needs: route_keys.wgsl; what route.wgsl needs but TOKENS, LISTED, logits; const THREADS, PER (experts of a lane), SPREAD (lanes that share
// the ranking of an expert), PADDED (EXPERTS, up to whole runs of keys), KEPT (experts of a segment that can be among the best; 0 if there are few experts); fn logit_of(expert), called once for each.

// eps and residual are the norm's, where there is one.
struct Params { parts: u32, scale: f32, number: f32, seen: u32, eps: f32, residual: f32, nothing: u32 }
var<immediate> p: Params;

const SIZE: u32 = EXPERTS / GROUPS;
const ABSENT: u32 = 0xffffffffu;
// Keys that a lane reads before it compares them.
const RUN: u32 = 8u;

// Experts that are ranked among themselves first, where they are many.
const SEGMENT: u32 = 32u;
const SEGMENTS: u32 = (EXPERTS + SEGMENT - 1u) / SEGMENT;
// Those that are kept, up to whole runs; lanes that share the ranking of one.
const ALL_KEPT: u32 = (SEGMENTS * KEPT + SEGMENT - 1u) / SEGMENT * SEGMENT;
const KEPT_SPREAD: u32 = 4u;

var<workgroup> scores: array<f32, EXPERTS>;
// What experts are ranked by, and one more: 0 is for those that are not.
var<workgroup> keys: array<u32, PADDED>;
// Of those that are kept; 0 where there is none.
var<workgroup> kept: array<u32, max(ALL_KEPT, 1u)>;
var<workgroup> kept_experts: array<u32, max(ALL_KEPT, 1u)>;
var<workgroup> here: array<u32, EXPERTS>;
var<workgroup> lanes: array<f32, 16>;
var<workgroup> peaks: array<u32, THREADS / 4u>;
var<workgroup> group_keys: array<u32, GROUPS>;
var<workgroup> order: array<u32, TOP_K>;
var<workgroup> halted: bool;

fn is_nan(x: f32) -> bool {
    return (bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u;
}

/// How many of RUN keys in a row, STEP apart, come before one, which is at `place`.
fn count_before(others: ptr<function, array<u32, RUN>>, key: u32, first: u32, step: u32, place: u32) -> u32 {
    var n = 0u;
    for (var j = 0u; j < RUN; j++) {
        let least = key + select(0u, 1u, first + j * step >= place);
        n += select(0u, 1u, (*others)[j] >= least);
    }
    return n;
}

/// Each expert among all.
fn rank_all(lane: u32) {
    let part = lane % SPREAD;
    for (var first = 0u; first < EXPERTS; first += THREADS / SPREAD) {
        let expert = first + lane / SPREAD;
        let key = keys[min(expert, EXPERTS - 1u)];
        var rank = 0u;
        for (var e = part; e < PADDED; e += RUN * SPREAD) {
            var others: array<u32, RUN>;
            for (var j = 0u; j < RUN; j++) {
                others[j] = keys[e + j * SPREAD];
            }
            rank += count_before(&others, key, e, SPREAD, expert);
        }
        for (var step = 1u; step < SPREAD; step *= 2u) {
            rank += subgroupShuffleXor(rank, step);
        }
        if (expert < EXPERTS && key > 0u && rank < TOP_K) {
            order[rank] = expert;
        }
    }
}

/// Each of many experts among its segment; those that may be among the best among those of all segments, which stand in the order of their
/// experts where keys are equal.
fn rank_kept(lane: u32) {
    for (var k = 0u; k < PER; k++) {
        let expert = k * THREADS + lane;
        if (expert < EXPERTS) {
            let segment = expert / SEGMENT;
            let key = keys[expert];
            var rank = 0u;
            for (var e = segment * SEGMENT; e < (segment + 1u) * SEGMENT; e += RUN) {
                var others: array<u32, RUN>;
                for (var j = 0u; j < RUN; j++) {
                    others[j] = keys[e + j];
                }
                rank += count_before(&others, key, e, 1u, expert);
            }
            if (key > 0u && rank < KEPT) {
                kept[segment * KEPT + rank] = key;
                kept_experts[segment * KEPT + rank] = expert;
            }
        }
    }
    workgroupBarrier();
    for (var first = 0u; first < ALL_KEPT; first += THREADS / KEPT_SPREAD) {
        let place = first + lane / KEPT_SPREAD;
        let key = kept[min(place, ALL_KEPT - 1u)];
        var rank = 0u;
        for (var e = lane % KEPT_SPREAD; e < ALL_KEPT; e += RUN * KEPT_SPREAD) {
            var others: array<u32, RUN>;
            for (var j = 0u; j < RUN; j++) {
                others[j] = kept[e + j * KEPT_SPREAD];
            }
            rank += count_before(&others, key, e, KEPT_SPREAD, place);
        }
        for (var step = 1u; step < KEPT_SPREAD; step *= 2u) {
            rank += subgroupShuffleXor(rank, step);
        }
        if (place < ALL_KEPT && key > 0u && rank < TOP_K) {
            order[rank] = kept_experts[place];
        }
    }
}

/// Called by a whole workgroup.
fn route(lane: u32, width: u32, place: u32) {
    // Read before lane 0 may set it, long before it is needed.
    if (lane == 0u) {
        halted = HALTS && weights[HALT] != 0.0;
    }
    var score: array<f32, PER>;
    var correction_ahead: array<f32, PER>;
    var peak = 0u;
    for (var k = 0u; k < PER; k++) {
        let i = k * THREADS + lane;
        if (i < EXPERTS) {
            let logit = logit_of(i) + bias_of(i);
            let slot = slots[i];
            correction_ahead[k] = correction_of(i);
            score[k] = logit;
            see(i, logit);
            here[i] = slot;
            // Here NaN is to be found: it is above all numbers.
            peak = max(peak, select(key_of(logit), 0xffffffffu, is_nan(logit)));
        }
    }
    if (SIGMOID) {
        for (var k = 0u; k < PER; k++) {
            score[k] = select(divide(1.0, 1.0 + exponential(-score[k])), score[k], is_nan(score[k]));
        }
    } else {
        let most = subgroupMax(peak);
        if (place == 0u) {
            peaks[lane / width] = most;
        }
        workgroupBarrier();
        for (var s = 0u; s < THREADS / width; s++) {
            peak = max(peak, peaks[s]);
        }
        for (var k = 0u; k < PER; k++) {
            let i = k * THREADS + lane;
            score[k] = exponential(score[k] - of_key(peak));
            if (i < EXPERTS) {
                scores[i] = score[k];
            }
        }
        workgroupBarrier();
        if (lane < 16u) {
            var sum = 0.0;
            for (var e = lane; e < EXPERTS; e += 16u) {
                sum += scores[e];
            }
            lanes[lane] = sum;
        }
        workgroupBarrier();
        var s: array<f32, 8>;
        for (var l = 0u; l < 8u; l++) {
            s[l] = lanes[l] + lanes[l + 8u];
        }
        let sum = ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
        for (var k = 0u; k < PER; k++) {
            score[k] = divide(score[k], sum);
        }
    }
    for (var k = 0u; k < PER; k++) {
        let i = k * THREADS + lane;
        if (i < EXPERTS) {
            scores[i] = score[k];
        }
        if (i < PADDED) {
            keys[i] = select(0u, key_of(score[k] + correction_ahead[k]) + 1u, i < EXPERTS);
        }
    }
    for (var i = lane; i < ALL_KEPT; i += THREADS) {
        kept[i] = 0u;
    }
    workgroupBarrier();
    if (GROUPS > 1u) {
        for (var group = lane; group < GROUPS; group += THREADS) {
            var best = 0u;
            var second = 0u;
            for (var e = 0u; e < SIZE; e++) {
                let key = keys[group * SIZE + e] - 1u;
                second = max(second, min(best, key));
                best = max(best, key);
            }
            group_keys[group] = select(best, key_of(of_key(best) + of_key(second)), BEST_TWO);
        }
        workgroupBarrier();
        for (var i = lane; i < EXPERTS; i += THREADS) {
            if (!allowed(0u, i / SIZE)) {
                keys[i] = 0u;
            }
        }
        workgroupBarrier();
    }
    // A rank is the number of those that come before: of equal keys the lower experts.
    if (KEPT > 0u) {
        rank_kept(lane);
    } else {
        rank_all(lane);
    }
    workgroupBarrier();
    if (lane >= TOP_K) {
        return;
    }
    let goes_on = !halted;
    let expert = order[lane];
    var divisor = 0.0;
    var before = 0u;
    var missing = 0u;
    // In the order of the ranking, as the CPU sums.
    for (var j = 0u; j < TOP_K; j++) {
        let other = order[j];
        divisor += scores[other];
        before += select(0u, 1u, other < expert);
        missing += select(0u, 1u, here[other] == ABSENT);
    }
    var weight = scores[expert];
    if (NORM) {
        weight = divide(weight, select(divisor, NORM_MIN, divisor < NORM_MIN));
    }
    if (goes_on) {
        ids[before] = expert;
        weights[before] = weight * p.scale;
        pairs[before] = before;
        let at = 4u + 4u * before;
        work[at] = here[expert];
        work[at + 1u] = before;
        work[at + 2u] = 1u;
        work[at + 3u] = expert;
    }
    if (lane == 0u) {
        work[0] = select(0u, TOP_K, goes_on);
        work[1] = select(0u, missing, goes_on);
        work[2] = select(0u, TOP_K, goes_on);
        work[3] = 0u;
        if (HALTS && goes_on && missing > 0u) {
            weights[HALT] = p.number;
        }
    }
}
