// Rows of the cache, byte for byte the CPU's.
//
// Needs: norm_float.wgsl, const LANES (of a row), WIDEST, TYPE (0 f32, 1 f16, 2 q8), ROW_WORDS; the shared arrays x (WIDEST floats a row)
// and magnitudes (of the lanes' elements of a q8 row); fn put(sub, w, word), which takes the words of a row.

/// The code of a q8 row.
fn code(value: f32, inverse: f32) -> u32 {
    // The product is rounded first, then to an integer, even at a tie.
    return u32(i32(round(value * inverse))) & 0xffu;
}

/// Hands the words of a row of the cache over, once it is turned.
fn store_row(dim: u32, sub: u32, lane: u32) {
    let at = sub * WIDEST;
    if (TYPE == 0u) {
        for (var c = lane; c < dim; c += LANES) {
            put(sub, c, bitcast<u32>(x[at + c]));
        }
    } else if (TYPE == 1u) {
        for (var w = lane; w < dim / 2u; w += LANES) {
            put(sub, w, half_of(x[at + 2u * w]) | (half_of(x[at + 2u * w + 1u]) << 16u));
        }
    } else {
        var most = 0u;
        for (var i = 0u; i < LANES; i++) {
            most = max(most, magnitudes[sub * LANES + i]);
        }
        let absmax = bitcast<f32>(most);
        // 127 / absmax overflows for rows that are as good as zero.
        let usable = most < 0x7f800000u;
        var inverse_step = 0.0;
        var step = 0u;
        if (usable && most > 0x02fe0000u) {
            inverse_step = divide(127.0, absmax);
            step = bitcast<u32>(divide(absmax, 127.0));
        }
        for (var w = lane; w < dim / 4u; w += LANES) {
            let word = at + 4u * w;
            let codes = code(x[word], inverse_step)
                | (code(x[word + 1u], inverse_step) << 8u)
                | (code(x[word + 2u], inverse_step) << 16u)
                | (code(x[word + 3u], inverse_step) << 24u);
            put(sub, w, select(0u, codes, usable));
        }
        if (lane == 0u) {
            put(sub, ROW_WORDS - 1u, select(0x7fc00000u, step, usable));
        }
    }
}
