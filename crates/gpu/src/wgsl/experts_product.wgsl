// One projection of a layer's experts. Workgroups: (runs of rows, entries, parts of an entry).
//
// Needs: coded.wgsl or float.wgsl; experts.wgsl; consts TOP_K (of whose tokens the rows of x are, 0 if x is by
// place in `pairs`), BY_PAIR (rows of the output are by pair, not by place in `pairs`).

@group(0) @binding(OUT) var<storage, read_write> out: array<f32>;

var<private> e: Entry;

fn x_row(i: u32) -> u32 {
    if (TOP_K > 0u) {
        return pair_of(e, i) / max(TOP_K, 1u);
    }
    return e.first + i;
}

fn x_rows() -> array<u32, 8> {
    var rows: array<u32, 8>;
    rows[0] = x_row(0u);
    if (TOKENS > 1u) { rows[1] = x_row(1u); }
    if (TOKENS > 2u) { rows[2] = x_row(2u); rows[3] = x_row(3u); }
    if (TOKENS > 4u) {
        rows[4] = x_row(4u);
        rows[5] = x_row(5u);
        rows[6] = x_row(6u);
        rows[7] = x_row(7u);
    }
    return rows;
}

fn out_row(i: u32) -> u32 {
    if (BY_PAIR == 1u) {
        return pair_of(e, i);
    }
    return e.first + i;
}
