// The latent of queries: the input of a product, as f32, int8 or both.
//
// Needs: latent_row.wgsl, const Q_RANK, Q_AT, CELLS (groups of a token), PLANE, CODED; fn store_low, store_codes.

fn value_at(c: u32) -> f32 {
    return select(0.0, x[min(c, Q_RANK - 1u)], c < Q_RANK);
}

fn four_at(c: u32) -> vec4<f32> {
    return vec4(value_at(c), value_at(c + 1u), value_at(c + 2u), value_at(c + 3u));
}

fn queries(token: u32, lane: u32) {
    for (var c = lane; c < Q_RANK; c += LANES) {
        x[c] = plane[token * STRIDE + Q_AT + c];
    }
    norm_first(Q_RANK, KV_RANK, lane);
    workgroupBarrier();
    if (PLANE) {
        for (var chunk = lane; 4u * chunk < Q_RANK; chunk += LANES) {
            store_low(token, chunk, four_at(4u * chunk));
        }
    }
    if (CODED) {
        for (var base = 0u; base < TEAM * CELLS; base += LANES) {
            let id = base + lane;
            // Lanes past the end repeat the last group, and write nothing.
            let group = min(id / TEAM, CELLS - 1u);
            var four: array<vec4<f32>, WORDS>;
            for (var i = 0u; i < WORDS; i++) {
                four[i] = four_at(group * GROUP + 4u * (TEAM * i + id % TEAM));
            }
            let coded = quantise(four);
            if (id / TEAM < CELLS) {
                store_codes(token * CELLS + group, id % TEAM, coded);
            }
        }
    }
}
