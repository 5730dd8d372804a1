// The work list of at most eight tokens, within their workgroup: an expert has one entry at most. It is empty unless
// `goes_on`.

fn list(n: u32, lane: u32, goes_on: bool) {
    if (lane == 0u) {
        atomicStore(&entries, 0u);
        atomicStore(&missing, 0u);
    }
    for (var i = lane; i < n; i += THREADS) {
        var lead = 1u;
        for (var j = 0u; j < i; j++) {
            lead = select(lead, 0u, chosen[j] == chosen[i]);
        }
        leads[i] = lead;
    }
    workgroupBarrier();
    for (var i = lane; i < n; i += THREADS) {
        let expert = chosen[i];
        var place = 0u;
        var count = 0u;
        var entry = 0u;
        for (var j = 0u; j < n; j++) {
            let other = chosen[j];
            let same = other == expert;
            place += select(0u, 1u, other < expert || (same && j < i));
            count += select(0u, 1u, same);
            entry += select(0u, leads[j], other < expert);
        }
        if (!goes_on) {
            continue;
        }
        pairs[place] = i;
        if (leads[i] == 1u) {
            let slot = slots[expert];
            let at = 4u + 4u * entry;
            work[at] = slot;
            work[at + 1u] = place;
            work[at + 2u] = count;
            work[at + 3u] = expert;
            atomicAdd(&entries, 1u);
            atomicAdd(&missing, select(0u, 1u, slot == 0xffffffffu));
        }
    }
    workgroupBarrier();
    if (lane == 0u) {
        let total = atomicLoad(&entries);
        let absent = atomicLoad(&missing);
        work[0] = total;
        work[1] = absent;
        work[2] = total;
        work[3] = 0u;
        if (HALTS && absent > 0u) {
            weights[HALT] = p.number;
        }
    }
}
