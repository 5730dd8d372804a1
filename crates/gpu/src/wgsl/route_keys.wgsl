// What route.wgsl and route_one.wgsl rank by.
//
// Needs: const GROUPS, TOP_GROUPS; var<workgroup> group_keys, GROUPS of each token.

/// Orders like the number, both zeros alike; NaN is 0, the least of all.
fn key_of(x: f32) -> u32 {
    let bits = bitcast<u32>(x);
    let magnitude = bits & 0x7fffffffu;
    let key = select(bits | 0x80000000u, ~bits, bits > 0x80000000u);
    return select(select(key, 0x80000000u, magnitude == 0u), 0u, magnitude > 0x7f800000u);
}

/// The number of a key, but for NaN.
fn of_key(key: u32) -> f32 {
    return bitcast<f32>(select(~key, key & 0x7fffffffu, key >= 0x80000000u));
}

/// Whether a group of experts is among the best.
fn allowed(token: u32, group: u32) -> bool {
    if (GROUPS == 1u) {
        return true;
    }
    let key = group_keys[token * GROUPS + group];
    var rank = 0u;
    for (var g = 0u; g < GROUPS; g++) {
        let other = group_keys[token * GROUPS + g];
        rank += select(0u, 1u, other > key || (other == key && g < group));
    }
    return rank < TOP_GROUPS;
}
