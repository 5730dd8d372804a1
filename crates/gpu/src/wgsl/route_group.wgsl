// The work list of any number of tokens: a workgroup per expert. Each counts all pairs, as that is quicker than
// waiting for another dispatch's counts, and lists its own.
//
// Needs: const EXPERTS, TOP_K; the buffers ids (u32), slots (u32), work (u32), pairs (u32).

// `most` is of an entry's pairs.
struct Params { tokens: u32, most: u32, nothing: u32 }
var<immediate> p: Params;

const THREADS: u32 = 256u;

var<workgroup> counts: array<atomic<u32>, EXPERTS>;
// Pairs and entries before this expert's; entries, missing entries and experts in all.
var<workgroup> facts: array<atomic<u32>, 5>;
var<workgroup> parts: array<u32, THREADS / 4u>;

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) wg: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
    @builtin(subgroup_size) width: u32,
    @builtin(subgroup_invocation_id) place: u32,
) {
    let expert = wg.x;
    for (var e = lane; e < EXPERTS; e += THREADS) {
        atomicStore(&counts[e], 0u);
    }
    if (lane < 5u) {
        atomicStore(&facts[lane], 0u);
    }
    workgroupBarrier();
    // A thread has pairs in a row, so that its own come after those of the threads before it.
    let n = p.tokens * TOP_K;
    let share = (n + THREADS - 1u) / THREADS;
    let first = min(lane * share, n);
    let end = min(first + share, n);
    var own = 0u;
    for (var i = first; i < end; i++) {
        let id = ids[i];
        atomicAdd(&counts[id], 1u);
        own += select(0u, 1u, id == expert);
    }
    let before = subgroupExclusiveAdd(own);
    if (place == width - 1u) {
        parts[lane / width] = before + own;
    }
    workgroupBarrier();
    for (var e = lane; e < EXPERTS; e += THREADS) {
        let count = atomicLoad(&counts[e]);
        let entries = (count + p.most - 1u) / p.most;
        if (e < expert) {
            atomicAdd(&facts[0], count);
            atomicAdd(&facts[1], entries);
        }
        if (expert == 0u) {
            atomicAdd(&facts[2], entries);
            atomicAdd(&facts[3], select(0u, entries, slots[e] == 0xffffffffu));
            atomicAdd(&facts[4], min(count, 1u));
        }
    }
    workgroupBarrier();
    if (expert == 0u && lane == 0u) {
        work[0] = atomicLoad(&facts[2]);
        work[1] = atomicLoad(&facts[3]);
        work[2] = atomicLoad(&facts[4]);
        work[3] = 0u;
    }
    let start = atomicLoad(&facts[0]);
    let entry = atomicLoad(&facts[1]);
    let count = atomicLoad(&counts[expert]);
    for (var i = lane; p.most * i < count; i += THREADS) {
        let at = 4u + 4u * (entry + i);
        work[at] = slots[expert];
        work[at + 1u] = start + p.most * i;
        work[at + 2u] = min(p.most, count - p.most * i);
        work[at + 3u] = expert;
    }
    if (own > 0u) {
        var to = start + before;
        for (var i = 0u; i < lane / width; i++) {
            to += parts[i];
        }
        for (var i = first; i < end; i++) {
            if (ids[i] == expert) {
                pairs[to] = i;
                to++;
            }
        }
    }
}
