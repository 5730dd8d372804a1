// Multiplies `groups` groups of a stage for n tokens of a lane; tiling.rs has it once for each n that lanes end at.
//
// Needs: coded_tiled.wgsl, fn multiply_tokens_n, fn add_tokens_n.

fn multiply_n(
    integers: ptr<function, Integers>,
    sums: ptr<function, Sums>,
    buffer: u32,
    groups: u32,
    lane: u32,
) {
    let four = lane % ROW_LANES;
    let token = lane / ROW_LANES;
    for (var s = 0u; s < groups; s++) {
        let line = buffer * STAGE + s;
        for (var v = 0u; v < SPANS; v++) {
            let at = (line * UNITS + 4u * v) * PITCH + four;
            var span: Span;
            span[0] = codes[at];
            span[1] = codes[at + PITCH];
            span[2] = codes[at + 2u * PITCH];
            span[3] = codes[at + 3u * PITCH];
            if (QUADS > 1u) {
                span[4u * QUADS - 4u] = codes[at + ROW_LANES];
                span[4u * QUADS - 3u] = codes[at + PITCH + ROW_LANES];
                span[4u * QUADS - 2u] = codes[at + 2u * PITCH + ROW_LANES];
                span[4u * QUADS - 1u] = codes[at + 3u * PITCH + ROW_LANES];
            }
            multiply_tokens_n(integers, &span, buffer * INPUTS + (token * STAGE + s) * SPANS + v);
        }
        var group: Group;
        group.scales[0] = scales[line * FOURS + four];
        group.scales[QUADS - 1u] = scales[line * FOURS + (QUADS - 1u) * ROW_LANES + four];
        if (AFFINE == 1u) {
            group.minima[0] = minima[line * FOURS + four];
            group.minima[QUADS - 1u] = minima[line * FOURS + (QUADS - 1u) * ROW_LANES + four];
        }
        add_tokens_n(integers, sums, &group, buffer * CELLS + token * STAGE + s);
    }
}
